//! Where a board's sensors and knobs are: found by type, name and label, never by index, because the numbers of hwmon
//! folders, thermal zones and devfreq devices change between releases and from one start to the next.

use super::nodes::{Nodes, name, number, text};
use super::types::BoardKind;

/// Entries of one class folder that are looked at. Boards have under 40 of any.
const ENTRIES_MAX: usize = 512;
/// Channels of a power meter.
const CHANNELS_MAX: usize = 8;

const DEVFREQ: &str = "/sys/class/devfreq";
const HWMON: &str = "/sys/class/hwmon";
const THERMAL: &str = "/sys/class/thermal";
const CPUFREQ: &str = "/sys/devices/system/cpu/cpufreq";
/// The firmware's clock for memory; debugfs, so for root only.
pub const EMC: &str = "/sys/kernel/debug/bpmp/debug/clk/emc";
/// The power mode's ceiling of the memory clock: JetPack 6 and 7, then 5.
pub const EMC_CAPS: [&str; 2] =
    ["/sys/kernel/nvpmodel_clk_cap/emc", "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"];
/// Where the GPU's load is, where it is not beside its clock.
const LOADS: [&str; 4] = [
    "/sys/devices/platform/gpu.0/load",
    "/sys/devices/platform/bus@0/17000000.gpu/load",
    "/sys/devices/platform/17000000.gpu/load",
    "/sys/devices/gpu.0/load",
];
/// Names of the GPU in the device tree: Orin's, Xavier's, Thor's, and the newer neutral one.
const GPU_NAMES: [&str; 4] = ["ga10b", "gv11b", "gb10b", "gpu"];

/// How a rail is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meter {
    /// INA3221: millivolts times milliamperes.
    VoltsAmps {
        /// Path of the millivolts.
        volts: String,
        /// Path of the milliamperes.
        amps: String,
    },
    /// INA238 and kin: microwatts.
    Watts(String),
}

/// A rail and its meter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailNode {
    /// The label.
    pub label: String,
    /// How it is read.
    pub meter: Meter,
}

/// Everything that was found, as paths.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Folder of the GPU's clock.
    pub gpu: Option<String>,
    /// GPU load, of a thousand.
    pub gpu_load: Option<String>,
    /// The memory clock can be read (and, by the same right, locked).
    pub emc: bool,
    /// Ceiling of the memory clock.
    pub emc_cap: Option<String>,
    /// Rails, as the meters order them.
    pub rails: Vec<RailNode>,
    /// Thermal zones: (type in lower case, path of the temperature).
    pub zones: Vec<(String, String)>,
    /// Cooling devices: (type, path of the state).
    pub coolers: Vec<(String, String)>,
    /// Over-current counters 1 to 3.
    pub oc: [Option<String>; 3],
    /// Fan drive, and its speed.
    pub fan_pwm: Option<String>,
    /// Turns a minute.
    pub fan_rpm: Option<String>,
    /// CPU policies: (number, folder).
    pub cpus: Vec<(u32, String)>,
}

impl Found {
    /// Looks everywhere. What is not there is left out.
    pub fn look(nodes: &dyn Nodes) -> Found {
        let mut found = Found { gpu: gpu(nodes), ..Found::default() };
        let beside = found.gpu.iter().map(|g| format!("{g}/device/load"));
        found.gpu_load = beside.chain(LOADS.map(String::from)).find(|p| number::<u32>(nodes, p).is_some());
        found.emc = number::<u64>(nodes, &format!("{EMC}/rate")).is_some();
        found.emc_cap = EMC_CAPS.into_iter().find(|p| number::<u64>(nodes, p).is_some()).map(String::from);
        hwmon(nodes, &mut found);
        thermal(nodes, &mut found);
        for name in entries(nodes, CPUFREQ) {
            if let Some(policy) = name.strip_prefix("policy").and_then(|n| n.parse().ok()) {
                found.cpus.push((policy, format!("{CPUFREQ}/{name}")));
            }
        }
        found.cpus.sort();
        found
    }

    /// Labels whose sum is the module's power. Rails fed from others must not be added twice: on AGX the DRAM's rail
    /// hangs on the 5 V input, on the small modules everything hangs on VDD_IN.
    pub fn total_of(&self, kind: BoardKind) -> Vec<&str> {
        let wanted: &[&str] = match kind {
            k if k.is_agx() => &["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"],
            BoardKind::Thor => &["VIN"],
            k if k.is_orin() => &["VDD_IN"],
            // A carrier that nobody told us of: an input rail contains the rest, and nothing else can be summed.
            _ => match self.rails.iter().find(|r| matches!(r.label.as_str(), "VDD_IN" | "VIN")) {
                Some(rail) => return vec![&rail.label],
                None => return Vec::new(),
            },
        };
        let has = |label: &&&str| self.rails.iter().any(|r| r.label == **label);
        match wanted.iter().filter(has).count() == wanted.len() {
            true => wanted.to_vec(),
            false => Vec::new(),
        }
    }

    /// Whether something that such a board always has is absent: its driver may come later.
    pub fn lacks(&self, kind: BoardKind) -> bool {
        let is_jetson = kind.is_orin() || kind == BoardKind::Thor;
        is_jetson && (self.gpu.is_none() || self.rails.is_empty() || self.zones.is_empty())
    }
}

fn entries(nodes: &dyn Nodes, folder: &str) -> Vec<String> {
    let mut names = nodes.list(folder).unwrap_or_default();
    // thermal_zone9 before thermal_zone10: the first ones are the board's own.
    names.sort_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
    names.truncate(ENTRIES_MAX);
    names
}

/// The GPU among the devices with a clock: by its own name, or by what the device tree says of it.
fn gpu(nodes: &dyn Nodes) -> Option<String> {
    let is_gpu = |name: &String| {
        let folder = format!("{DEVFREQ}/{name}");
        let part = name.rsplit('.').next().unwrap_or(name);
        let says = |file: &str| {
            let text = text(nodes, &format!("{folder}/device/of_node/{file}")).unwrap_or_default();
            text.split(['\0', ',', '@']).any(|word| GPU_NAMES.contains(&word))
        };
        GPU_NAMES.contains(&part) || name.starts_with("gpu-gpc") || says("name") || says("compatible")
    };
    let name = entries(nodes, DEVFREQ).into_iter().find(is_gpu)?;
    let folder = format!("{DEVFREQ}/{name}");
    // A folder without its clock is a device half-way through its start.
    number::<u64>(nodes, &format!("{folder}/cur_freq"))?;
    Some(folder)
}

fn hwmon(nodes: &dyn Nodes, found: &mut Found) {
    for entry in entries(nodes, HWMON) {
        let folder = format!("{HWMON}/{entry}");
        let file = |name: &str| format!("{folder}/{name}");
        let there = |name: &str| nodes.read(&file(name)).is_ok().then(|| file(name));
        match text(nodes, &file("name")).as_deref() {
            Some("ina3221") => {
                for n in 1..=CHANNELS_MAX {
                    let Some(mut label) = name(nodes, &file(&format!("in{n}_label"))) else { continue };
                    // Channels without a wire, and the meter's sum of shunt voltages, are no rails.
                    if label.is_empty() || label == "NC" || label.contains("sum of shunt") {
                        continue;
                    }
                    // A carrier's own meter may name its rails as the module does.
                    if found.rails.iter().any(|r| r.label == label) {
                        label += &format!(" ({entry})");
                    }
                    let meter = Meter::VoltsAmps {
                        volts: file(&format!("in{n}_input")),
                        amps: file(&format!("curr{n}_input")),
                    };
                    found.rails.push(RailNode { label, meter });
                }
            }
            Some("ina238") => {
                // Its one channel has no label: it is the board's input.
                let meter = Meter::Watts(file("power1_input"));
                found.rails.push(RailNode { label: "VIN".into(), meter });
            }
            Some("soctherm_oc") => {
                for (i, slot) in found.oc.iter_mut().enumerate() {
                    *slot = there(&format!("oc{}_event_cnt", i + 1));
                }
            }
            Some("pwmfan") => found.fan_pwm = there("pwm1"),
            Some(name) if name.contains("tach") => {
                found.fan_rpm = there("fan1_input").or_else(|| there("rpm"));
            }
            _ => {}
        }
    }
}

fn thermal(nodes: &dyn Nodes, found: &mut Found) {
    for entry in entries(nodes, THERMAL) {
        let folder = format!("{THERMAL}/{entry}");
        let Some(kind) = name(nodes, &format!("{folder}/type")) else { continue };
        if entry.starts_with("thermal_zone") {
            found.zones.push((kind.to_lowercase(), format!("{folder}/temp")));
        } else if entry.starts_with("cooling_device") {
            found.coolers.push((kind, format!("{folder}/cur_state")));
        }
    }
}
