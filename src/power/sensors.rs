//! One [`Sample`] after another: reads what was found, checks each number, and looks again for what is missing.

use super::find::{EMC, Found, Meter};
use super::nodes::{Nodes, number, text};
use super::nvidia::Nvidia;
use super::sane::{Sanity, Unit};
use super::types::{Board, BoardKind, CpuClock, Fan, Fault, Memory, Rail, Sample, Throttle, Zone};
use std::sync::Arc;

/// How often a board is searched again while something that it should have is missing: drivers come late (on JetPack 7.2
/// the GPU's clock can appear after our service started).
const LOOK_AGAIN_US: u64 = 5_000_000;

/// The fastest memory clock of any board is under this.
const CLOCK_HZ_MAX: u64 = 10_000_000_000;
/// The GPU's clock among the faults.
pub const GPU_CLOCK: &str = "gpu clock";

/// What a zone whose block is off reads, where it does not answer EAGAIN.
const RESTING_MC: i64 = -256_000;

/// A process and the GPU memory that it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its id.
    pub pid: u32,
    /// Its name, where it can be told.
    pub name: String,
    /// What it holds, where it can be told.
    pub gpu_bytes: Option<u64>,
}

/// A board's sensors.
pub struct Sensors {
    nodes: Arc<dyn Nodes>,
    board: Board,
    nvidia: Option<Nvidia>,
    found: Found,
    looked_us: u64,
    sanity: Sanity,
}

impl Sensors {
    /// Finds the sensors of a board. NVML is not asked: see [`Sensors::with_nvidia`].
    pub fn open(nodes: Arc<dyn Nodes>, board: &Board) -> Sensors {
        let found = Found::look(nodes.as_ref());
        let looked_us = nodes.now_us();
        Sensors { nodes, board: board.clone(), nvidia: None, found, looked_us, sanity: Sanity::default() }
    }

    /// Adds what NVML tells. On a machine that is no known board, a GPU that NVML measures makes it
    /// [`BoardKind::Discrete`].
    pub fn with_nvidia(mut self, nvidia: Option<Nvidia>) -> Sensors {
        let measures = nvidia.as_ref().is_some_and(Nvidia::measures);
        if self.board.kind == BoardKind::Unknown && measures {
            self.board.kind = BoardKind::Discrete;
        }
        self.nvidia = nvidia;
        self
    }

    /// The board, as far as it is known by now.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Where everything is.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// NVML, where it is there.
    pub fn nvidia(&self) -> Option<&Nvidia> {
        self.nvidia.as_ref()
    }

    /// The board's files.
    pub fn nodes(&self) -> &Arc<dyn Nodes> {
        &self.nodes
    }

    /// Labels of the rails whose sum is the module's power.
    pub fn total_of(&self) -> Vec<&str> {
        self.found.total_of(self.board.kind)
    }

    /// Reads everything once. On a board this takes a millisecond or two, most of it the firmware's answer about the
    /// memory clock.
    pub fn sample(&mut self) -> Sample {
        self.look_again();
        let mut sample = Sample { at_us: self.nodes.now_us(), ..Sample::default() };
        self.rails(&mut sample);
        self.zones(&mut sample);
        self.clocks(&mut sample);
        sample.throttle = self.throttle();
        sample.fan = self.fan();
        sample.memory = memory(self.nodes.as_ref());
        if let Some(nvidia) = &mut self.nvidia {
            nvidia.add_to(&mut sample, &mut self.sanity);
        }
        self.sanity.witness(sample.at_us, sample.total_mw, sample.gpu_load_permille);
        sample.faults = self.sanity.take_faults();
        sample
    }

    /// Searches again while something is missing, or where the GPU's clock went away.
    fn look_again(&mut self) {
        let now = self.nodes.now_us();
        if now.saturating_sub(self.looked_us) < LOOK_AGAIN_US {
            return;
        }
        let lost =
            self.found.gpu.as_ref().is_some_and(|g| self.nodes.read(&format!("{g}/cur_freq")).is_err());
        if self.found.lacks(self.board.kind) || lost {
            self.looked_us = now;
            self.found = Found::look(self.nodes.as_ref());
        }
    }

    fn rails(&mut self, sample: &mut Sample) {
        let nodes = self.nodes.as_ref();
        for rail in &self.found.rails {
            let (power_mw, volt_mv) = match &rail.meter {
                Meter::VoltsAmps { volts, amps } => {
                    let (mv, ma) = (number::<i64>(nodes, volts), number::<i64>(nodes, amps));
                    // A product past 64 bits is as absurd as one past any board.
                    let mw = mv.zip(ma).map(|(v, a)| v.saturating_mul(a) / 1000);
                    (mw, mv)
                }
                Meter::Watts(path) => (number::<i64>(nodes, path).map(|uw| uw / 1000), None),
            };
            let unit =
                if matches!(rail.label.as_str(), "VDD_IN" | "VIN") { Unit::Input } else { Unit::Module };
            let believed = self.sanity.check(&rail.label, unit, sample.at_us, power_mw, false);
            if let Some(mw) = believed {
                let volt_mv = volt_mv.and_then(|v| u32::try_from(v).ok());
                sample.rails.push(Rail { label: rail.label.clone(), power_mw: mw as u32, volt_mv });
            }
        }
        let total = self.total_of();
        if !total.is_empty() {
            sample.total_mw = total.iter().map(|label| sample.rail_mw(label)).sum();
        }
    }

    fn zones(&mut self, sample: &mut Sample) {
        for (kind, path) in &self.found.zones {
            let reading = number::<i64>(self.nodes.as_ref(), path);
            // EAGAIN from a block that is off: vision engines, and the GPU behind its power gate.
            let may_rest = kind.starts_with("cv") || kind.starts_with("gpu");
            // Some kernels say so by the number that tegrastats prints for it.
            let reading = reading.filter(|mc| !may_rest || *mc != RESTING_MC);
            let believed = self.sanity.check(kind, Unit::Temperature, sample.at_us, reading, may_rest);
            if let Some(temp_mc) = believed {
                sample.zones.push(Zone { kind: kind.clone(), temp_mc: temp_mc as i32 });
            }
        }
        // A Jetson without any temperature is a fault even where none was ever seen: nobody guards the heat.
        let is_jetson = self.board.kind.is_orin() || self.board.kind == BoardKind::Thor;
        if is_jetson && sample.zones.is_empty() {
            self.sanity.fault("thermal zones", Fault::Missing);
        }
    }

    fn clocks(&mut self, sample: &mut Sample) {
        let nodes = self.nodes.clone();
        let nodes = nodes.as_ref();
        if let Some(gpu) = &self.found.gpu {
            let hz = |file: &str| number(nodes, &format!("{gpu}/{file}"));
            let all: [Option<u64>; 3] = ["cur_freq", "min_freq", "max_freq"].map(hz);
            match all.iter().flatten().all(|hz| *hz <= CLOCK_HZ_MAX) {
                true => [sample.gpu_hz, sample.gpu_min_hz, sample.gpu_max_hz] = all,
                false => self.sanity.fault(GPU_CLOCK, Fault::Absurd),
            }
        }
        let load = self.found.gpu_load.as_ref().and_then(|p| number::<u16>(nodes, p));
        sample.gpu_load_permille = load.filter(|l| *l <= 1000);
        if self.found.emc {
            let hz = number(nodes, &format!("{EMC}/rate"));
            sample.emc_hz = hz.filter(|hz| *hz <= CLOCK_HZ_MAX);
            if hz != sample.emc_hz {
                self.sanity.fault("memory clock", Fault::Absurd);
            }
            let locked = number::<u8>(nodes, &format!("{EMC}/mrq_rate_locked"));
            sample.emc_locked = locked.map(|l| l != 0);
        }
        let cap = self.found.emc_cap.as_ref().and_then(|p| number::<i64>(nodes, p));
        sample.emc_cap_hz = cap.and_then(emc_cap);
        for (policy, folder) in &self.found.cpus {
            let khz = |file: &str| number::<u64>(nodes, &format!("{folder}/{file}"));
            let cur = khz("scaling_cur_freq").zip(khz("scaling_max_freq"));
            if let Some((cur, max)) = cur {
                let hz = |khz: u64| khz.saturating_mul(1000);
                sample.cpus.push(CpuClock { policy: *policy, cur_hz: hz(cur), max_hz: hz(max) });
            }
        }
    }

    fn throttle(&self) -> Throttle {
        let nodes = self.nodes.as_ref();
        let mut throttle = Throttle::default();
        for (kind, path) in &self.found.coolers {
            if number::<u32>(nodes, path).is_none_or(|state| state == 0) {
                continue;
            }
            // The fan is a cooling device as well, and its work costs no speed.
            let slows = kind.ends_with("-throttle-alert")
                || kind.starts_with("cpufreq-")
                || kind.starts_with("devfreq-");
            if kind == "hot-surface-alert" {
                throttle.hot_surface = true;
            } else if slows && !throttle.active.contains(kind) {
                throttle.active.push(kind.clone());
            }
        }
        for (count, path) in throttle.oc_counts.iter_mut().zip(&self.found.oc) {
            *count = path.as_ref().and_then(|p| number(nodes, p));
        }
        throttle
    }

    fn fan(&self) -> Option<Fan> {
        let nodes = self.nodes.as_ref();
        let pwm = self.found.fan_pwm.as_ref().and_then(|p| number(nodes, p));
        let rpm = self.found.fan_rpm.as_ref().and_then(|p| number(nodes, p));
        (pwm.is_some() || rpm.is_some()).then_some(Fan { pwm, rpm })
    }

    /// Processes that hold GPU memory, the largest first: by NVML where it measures, else by the memory manager's own
    /// list, which root may read.
    pub fn processes(&self) -> Vec<GpuProcess> {
        let mut all = match &self.nvidia {
            Some(nvidia) if nvidia.measures() => nvidia.processes(),
            _ => nvmap_clients(&self.nodes.read(NVMAP_CLIENTS).unwrap_or_default()),
        };
        for p in all.iter_mut().filter(|p| p.name.is_empty()) {
            p.name = text(self.nodes.as_ref(), &format!("/proc/{}/comm", p.pid)).unwrap_or_default();
        }
        all.sort_by_key(|p| std::cmp::Reverse(p.gpu_bytes));
        all
    }
}

/// The ceiling that a cap node sets: 0 and below, or the largest number, is none (JetPack 5: 0; 6: -1 or 2^31-1).
pub fn emc_cap(value: i64) -> Option<u64> {
    (value > 0 && value < i64::from(i32::MAX) || value > i64::from(i32::MAX) && value < 10_000_000_000)
        .then_some(value as u64)
}

const NVMAP_CLIENTS: &str = "/sys/kernel/debug/nvmap/iovmm/clients";
/// Lines of that list that are looked at.
const CLIENTS_MAX: usize = 256;

/// `user  PROCESS  PID  SIZE[K|M]`, under a heading and above a total.
fn nvmap_clients(list: &str) -> Vec<GpuProcess> {
    let mut all: Vec<GpuProcess> = Vec::new();
    for line in list.lines().take(CLIENTS_MAX) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, name, pid, size] = words[..] else { continue };
        let (Ok(pid), Some(bytes)) = (pid.parse(), size_bytes(size)) else { continue };
        match all.iter_mut().find(|p| p.pid == pid) {
            Some(p) => p.gpu_bytes = p.gpu_bytes.map(|b| b.saturating_add(bytes)),
            None => all.push(GpuProcess { pid, name: name.to_owned(), gpu_bytes: Some(bytes) }),
        }
    }
    all
}

fn size_bytes(text: &str) -> Option<u64> {
    let shift = match text.chars().last()? {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        _ => 0,
    };
    text.trim_end_matches(['K', 'M', 'G']).parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// `/proc/meminfo`.
pub fn memory(nodes: &dyn Nodes) -> Option<Memory> {
    let table = nodes.read("/proc/meminfo").ok()?;
    let bytes = |key: &str| {
        let line = table.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let swap_total_bytes = bytes("SwapTotal").unwrap_or(0);
    Some(Memory {
        total_bytes: bytes("MemTotal")?,
        available_bytes: bytes("MemAvailable")?,
        gpu_bytes: bytes("NvMapMemUsed"),
        swap_total_bytes,
        swap_used_bytes: swap_total_bytes.saturating_sub(bytes("SwapFree").unwrap_or(swap_total_bytes)),
    })
}

#[test]
fn lists_of_clients_are_added_up() {
    let list = "CLIENT PROCESS PID SIZE\nuser tegud 812 20K\nuser tegud 812 2M\nuser x y 5K\nuser Xorg 9 4096\ntotal 2068K\n";
    let all = nvmap_clients(list);
    let bytes: Vec<_> = all.iter().map(|p| (p.name.as_str(), p.pid, p.gpu_bytes)).collect();
    assert_eq!(bytes, [("tegud", 812, Some((20 << 10) + (2 << 20))), ("Xorg", 9, Some(4096))]);
    assert_eq!(size_bytes("99999999999999999999K"), None);
    assert_eq!(size_bytes(""), None);
}

#[test]
fn a_cap_that_caps_nothing_is_none() {
    assert_eq!([0, -1, i64::from(i32::MAX), i64::MAX].map(emc_cap), [None; 4]);
    assert_eq!(emc_cap(2_133_000_000), Some(2_133_000_000));
    assert_eq!(emc_cap(3_199_000_000), Some(3_199_000_000));
}
