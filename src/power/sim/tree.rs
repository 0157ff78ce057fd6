//! The files of a simulated board: which paths there are, what each says now, and what writing it does.
//!
//! The tree is JetPack 6's. Values outside a table round as the drivers do, a reversed order of limits is refused as
//! devfreq does, and a memory rate without the lock is dropped without an error as the firmware does.

use std::collections::BTreeMap;
use std::io;

use super::meter::UPDATE_US;
use super::physics;
use super::spec::Spec;
use super::state::State;

/// What a file is.
#[derive(Debug, Clone, PartialEq)]
pub enum File {
    /// The same text always.
    Text(String),
    /// A live value.
    Live(Live),
}

/// Live values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Live {
    GpuCur,
    GpuMin,
    GpuMax,
    GpuLoad,
    GpuGovernor,
    EmcRate,
    EmcLocked,
    EmcCap,
    EmcBusy,
    CpuMin,
    CpuMax,
    CpuCur,
    /// Millivolts of a meter's channel.
    Volt(usize, usize),
    /// Milliamperes of it.
    Current(usize, usize),
    /// A zone, and how far it lies from the junction, in m°C.
    Zone(i32),
    /// A zone whose block is off: EAGAIN.
    ZoneOff,
    ThrottleGpu,
    ThrottleHot,
    Over(usize),
    FanPwm,
    FanRpm,
    Mode,
    MemInfo,
}

const GPU: &str = "/sys/class/devfreq/17000000.gpu";
const EMC: &str = "/sys/kernel/debug/bpmp/debug/clk/emc";

/// Zones of a JetPack 6 tree and their distance from the junction, which is the hottest. cv zones are off.
const ZONES: &[(&str, Option<i32>)] = &[
    ("cpu-thermal", Some(-1_200)),
    ("gpu-thermal", Some(-250)),
    ("cv0-thermal", None),
    ("cv1-thermal", None),
    ("cv2-thermal", None),
    ("soc0-thermal", Some(-2_000)),
    ("soc1-thermal", Some(-2_400)),
    ("soc2-thermal", Some(-1_900)),
    ("tj-thermal", Some(0)),
];

/// Builds the tree of a board.
pub fn files(spec: &'static Spec) -> BTreeMap<String, File> {
    let mut files = BTreeMap::new();
    let mut text = |path: &str, value: String| drop(files.insert(path.to_owned(), File::Text(value)));
    text("/proc/device-tree/compatible", spec.compatible.iter().map(|c| format!("{c}\0")).collect());
    text("/proc/device-tree/model", format!("{}\0", spec.model));
    text("/etc/nv_tegra_release", format!("{}\n", spec.release));
    let table: Vec<String> = spec.gpu_hz.iter().map(u64::to_string).collect();
    text(&format!("{GPU}/available_frequencies"), format!("{}\n", table.join(" ")));
    text(&format!("{GPU}/available_governors"), "userspace performance nvhost_podgov\n".into());
    text(&format!("{GPU}/device/of_node/name"), "gpu\0".into());
    text(&format!("{GPU}/device/of_node/compatible"), "nvidia,ga10b\0".into());
    text(&format!("{EMC}/min_rate"), format!("{}\n", spec.emc[0].hz));
    text(&format!("{EMC}/max_rate"), format!("{}\n", spec.emc[3].hz));
    text(&format!("{EMC}/state"), "1\n".into());
    text("/etc/nvpmodel.conf", nvpmodel(spec));
    meters(spec, &mut files);
    live(spec, &mut files);
    files
}

fn live(spec: &Spec, files: &mut BTreeMap<String, File>) {
    let mut live = |path: String, value: Live| drop(files.insert(path, File::Live(value)));
    live(format!("{GPU}/cur_freq"), Live::GpuCur);
    live(format!("{GPU}/min_freq"), Live::GpuMin);
    live(format!("{GPU}/max_freq"), Live::GpuMax);
    live(format!("{GPU}/governor"), Live::GpuGovernor);
    live("/sys/devices/platform/gpu.0/load".into(), Live::GpuLoad);
    live("/sys/devices/platform/bus@0/17000000.gpu/load".into(), Live::GpuLoad);
    live(format!("{EMC}/rate"), Live::EmcRate);
    live(format!("{EMC}/mrq_rate_locked"), Live::EmcLocked);
    live(format!("{EMC}/pto_counter"), Live::EmcRate);
    live("/sys/kernel/nvpmodel_clk_cap/emc".into(), Live::EmcCap);
    live("/sys/kernel/debug/cactmon/mc_all".into(), Live::EmcBusy);
    for policy in spec.policies {
        let folder = format!("/sys/devices/system/cpu/cpufreq/policy{policy}");
        live(format!("{folder}/scaling_min_freq"), Live::CpuMin);
        live(format!("{folder}/scaling_max_freq"), Live::CpuMax);
        live(format!("{folder}/scaling_cur_freq"), Live::CpuCur);
        live(format!("{folder}/cpuinfo_cur_freq"), Live::CpuCur);
    }
    for (n, (_, distance)) in ZONES.iter().enumerate() {
        let value = distance.map_or(Live::ZoneOff, Live::Zone);
        live(format!("/sys/class/thermal/thermal_zone{n}/temp"), value);
    }
    live("/sys/class/thermal/cooling_device0/cur_state".into(), Live::ThrottleGpu);
    live("/sys/class/thermal/cooling_device1/cur_state".into(), Live::ThrottleHot);
    live("/sys/class/hwmon/hwmon5/pwm1".into(), Live::FanPwm);
    live("/sys/class/hwmon/hwmon6/rpm".into(), Live::FanRpm);
    live("/sys/class/hwmon/hwmon6/fan1_input".into(), Live::FanRpm);
    for n in 0..3 {
        live(format!("/sys/class/hwmon/hwmon4/oc{}_event_cnt", n + 1), Live::Over(n));
    }
    live("/var/lib/nvpmodel/status".into(), Live::Mode);
    live("/proc/meminfo".into(), Live::MemInfo);
    let mut text = |path: String, value: &str| drop(files.insert(path, File::Text(format!("{value}\n"))));
    for (n, (kind, _)) in ZONES.iter().enumerate() {
        text(format!("/sys/class/thermal/thermal_zone{n}/type"), kind);
        text(format!("/sys/class/thermal/thermal_zone{n}/mode"), "enabled");
    }
    text("/sys/class/thermal/cooling_device0/type".into(), "devfreq-17000000.gpu");
    text("/sys/class/thermal/cooling_device1/type".into(), "hot-surface-alert");
    text("/sys/class/hwmon/hwmon4/name".into(), "soctherm_oc");
    text("/sys/class/hwmon/hwmon5/name".into(), "pwmfan");
    text("/sys/class/hwmon/hwmon6/name".into(), "pwm_tach");
    for policy in spec.policies {
        let folder = format!("/sys/devices/system/cpu/cpufreq/policy{policy}");
        text(format!("{folder}/cpuinfo_max_freq"), &spec.cpu_max_khz.to_string());
        text(format!("{folder}/scaling_governor"), "schedutil");
    }
}

/// The power meters' hwmon folders, after one that is none: numbers say nothing.
fn meters(spec: &Spec, files: &mut BTreeMap<String, File>) {
    files.insert("/sys/class/hwmon/hwmon0/name".into(), File::Text("tmp451\n".into()));
    for (m, meter) in spec.meters.iter().enumerate() {
        let folder = format!("/sys/class/hwmon/hwmon{}", m + 1);
        let mut text = |name: &str, value: String| {
            files.insert(format!("{folder}/{name}"), File::Text(format!("{value}\n")));
        };
        text("name", "ina3221".into());
        text("samples", "512".into());
        text("update_interval", (UPDATE_US / 1000).to_string());
        text("in7_label", "sum of shunt voltages".into());
        text("in7_input", "0".into());
        for (c, channel) in meter.channels.iter().enumerate() {
            let label = if channel.label.is_empty() { "NC" } else { channel.label };
            text(&format!("in{}_label", c + 1), label.into());
            let crit_ma = spec.limit_w * 1e6 / channel.volt_mv;
            text(&format!("curr{}_crit", c + 1), format!("{crit_ma:.0}"));
        }
        for c in 0..3 {
            let paths = [("in", Live::Volt(m, c)), ("curr", Live::Current(m, c))];
            for (what, live) in paths {
                files.insert(format!("{folder}/{what}{}_input", c + 1), File::Live(live));
            }
        }
    }
}

/// The part of nvpmodel.conf that tells modes and caps.
fn nvpmodel(spec: &Spec) -> String {
    let mut conf = format!(
        "< PARAM TYPE=FILE NAME=GPU >\nMIN {GPU}/min_freq\nMAX {GPU}/max_freq\n\
         < PARAM TYPE=FILE NAME=EMC >\nMAX /sys/kernel/nvpmodel_clk_cap/emc\n\
         < PARAM TYPE=FILE NAME=CPU_A78_0 >\nMAX /sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq\n"
    );
    for mode in spec.modes {
        let emc = if mode.emc_cap_hz == 0 { "-1".to_owned() } else { mode.emc_cap_hz.to_string() };
        conf += &format!(
            "\n< POWER_MODEL ID={} NAME={} >\nGPU MAX {}\nEMC MAX {emc}\nCPU_A78_0 MAX {}\n",
            mode.id, mode.name, mode.gpu_max_hz, mode.cpu_max_khz
        );
    }
    let default = spec.mode(spec.default_mode).map_or(0, |m| m.id);
    conf + &format!("\n< PM_CONFIG DEFAULT={default} >\n")
}

/// What a live file says.
pub fn read(state: &mut State, live: Live) -> io::Result<String> {
    let number = match live {
        Live::GpuCur => state.gpu.now_hz as i64,
        Live::GpuMin => state.gpu_min_hz as i64,
        Live::GpuMax => state.gpu_max_hz as i64,
        Live::GpuLoad => state.load_permille.round() as i64,
        Live::EmcRate => state.emc.now_hz as i64,
        Live::EmcLocked => state.emc_locked as i64,
        Live::EmcCap => state.emc_cap_hz as i64,
        Live::EmcBusy => emc_busy_khz(state) as i64,
        Live::CpuMin => state.cpu_min_khz as i64,
        Live::CpuMax => state.cpu_max_khz as i64,
        Live::CpuCur => [state.cpu_min_khz, state.cpu_max_khz][state.is_busy() as usize] as i64,
        Live::Volt(m, c) => state.meters.shown[m][c].volt_mv as i64,
        Live::Current(m, c) => state.meters.shown[m][c].current_ma as i64,
        Live::Zone(distance_mc) => zone_mc(state, distance_mc),
        Live::ZoneOff => return Err(io::Error::from(io::ErrorKind::WouldBlock)),
        Live::ThrottleGpu => state.throttle_steps as i64,
        Live::ThrottleHot => (state.junction_c() >= 70.0) as i64,
        Live::Over(n) => state.oc[n] as i64,
        Live::FanPwm => fan_pwm(state) as i64,
        Live::FanRpm => (fan_pwm(state) * 25.0) as i64,
        Live::GpuGovernor => return Ok("nvhost_podgov\n".into()),
        Live::Mode => return Ok(format!("pmode:{:04}\n", state.mode.id)),
        Live::MemInfo => return Ok(meminfo(state.spec.memory_kib)),
    };
    Ok(format!("{number}\n"))
}

/// A zone as its sensor gives it: in steps of 1/16 °C, off by a step now and then.
fn zone_mc(state: &mut State, distance_mc: i32) -> i64 {
    let exact = state.junction_c() * 1e3 + distance_mc as f64 + 40.0 * state.noise.normal();
    ((exact / 62.5).round() * 62.5) as i64
}

/// The memory controller's activity, in kHz of its clock.
fn emc_busy_khz(state: &State) -> f64 {
    let at = state.clocks();
    let cost = physics::cost(state.spec, &state.work, &at);
    let rate = if cost.ms > 0.0 { cost.bytes / (cost.ms * 1e-3) } else { 0.0 };
    // The share is of the peak, which the model reads 94% of at most (75% on AGX).
    rate / state.spec.emc_bytes_per_hz * 0.94 / 1e3
}

/// The quiet fan profile in outline: off below 50 °C, full at 85 (assumption). Air flow is part of the sink's
/// resistance.
fn fan_pwm(state: &State) -> f64 {
    ((state.junction_c() - 50.0) / 35.0 * 255.0).clamp(0.0, 255.0).round()
}

fn meminfo(total_kib: u64) -> String {
    let line = |name: &str, kib: u64| format!("{:<16}{kib:>8} kB\n", format!("{name}:"));
    [
        line("MemTotal", total_kib),
        line("MemFree", total_kib * 3 / 5),
        line("MemAvailable", total_kib * 7 / 10),
        line("SwapTotal", 3_900_000),
        line("SwapFree", 3_900_000),
        line("NvMapMemUsed", 1_100_000),
    ]
    .concat()
}

/// Writes a live file.
pub fn write(state: &mut State, live: Live, text: &str) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    if live == Live::GpuGovernor {
        return Ok(());
    }
    let value: u64 = text.trim().parse().map_err(|_| invalid())?;
    let table = state.spec.gpu_hz;
    let (low, top) = (table[0], table[table.len() - 1]);
    match live {
        Live::GpuMin => {
            let rounded = table.iter().copied().find(|&hz| hz >= value).unwrap_or(top);
            if rounded > state.gpu_max_hz {
                return Err(invalid());
            }
            state.gpu_min_hz = rounded;
        }
        Live::GpuMax => {
            let rounded = table.iter().rev().copied().find(|&hz| hz <= value).unwrap_or(low);
            if rounded < state.gpu_min_hz {
                return Err(invalid());
            }
            state.gpu_max_hz = rounded;
        }
        Live::EmcLocked => state.emc_locked = value != 0,
        Live::EmcRate => state.emc_asked_hz = value,
        Live::EmcCap => {
            let max = state.spec.emc[3].hz;
            state.emc_cap_hz = if value >= max { 0 } else { value };
        }
        Live::CpuMin => state.cpu_min_khz = value.min(state.cpu_max_khz),
        Live::CpuMax => state.cpu_max_khz = value.clamp(state.cpu_min_khz, state.mode.cpu_max_khz),
        Live::FanPwm => {}
        _ => return Err(io::Error::from(io::ErrorKind::PermissionDenied)),
    }
    Ok(())
}
