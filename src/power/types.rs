//! What the pieces of this room hand to one another: a board's identity, one reading of its sensors, wanted clocks.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Kinds of board that are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BoardKind {
    /// Jetson AGX Orin 64GB, and the first developer kit.
    AgxOrin64,
    /// Jetson AGX Orin 32GB.
    AgxOrin32,
    /// Jetson Orin NX 16GB.
    OrinNx16,
    /// Jetson Orin NX 8GB.
    OrinNx8,
    /// Jetson Orin Nano 8GB.
    OrinNano8,
    /// Jetson Orin Nano 4GB.
    OrinNano4,
    /// Jetson Thor.
    Thor,
    /// A computer with an NVIDIA GPU on a bus of its own.
    Discrete,
    /// Anything else. Every sensor and knob is optional there as anywhere.
    Unknown,
}

impl BoardKind {
    /// Whether the GPU is an Orin's, which NVML only names.
    pub fn is_orin(self) -> bool {
        use BoardKind::*;
        matches!(self, AgxOrin64 | AgxOrin32 | OrinNx16 | OrinNx8 | OrinNano8 | OrinNano4)
    }

    /// Whether the module is an AGX Orin's (p3701), whose rails and totals differ from the small ones' (p3767).
    pub fn is_agx(self) -> bool {
        matches!(self, BoardKind::AgxOrin64 | BoardKind::AgxOrin32)
    }

    /// The name that people use.
    pub fn name(self) -> &'static str {
        match self {
            BoardKind::AgxOrin64 => "Jetson AGX Orin 64GB",
            BoardKind::AgxOrin32 => "Jetson AGX Orin 32GB",
            BoardKind::OrinNx16 => "Jetson Orin NX 16GB",
            BoardKind::OrinNx8 => "Jetson Orin NX 8GB",
            BoardKind::OrinNano8 => "Jetson Orin Nano 8GB",
            BoardKind::OrinNano4 => "Jetson Orin Nano 4GB",
            BoardKind::Thor => "Jetson Thor",
            BoardKind::Discrete => "discrete GPU",
            BoardKind::Unknown => "unknown board",
        }
    }
}

impl fmt::Display for BoardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// NVIDIA's software release, by generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JetPack {
    /// L4T R35, kernel 5.10, CUDA 11.4: recognized and refused.
    Five,
    /// L4T R36, kernel 5.15.
    Six,
    /// L4T R38 (Thor) and R39 (Orin too), kernel 6.8.
    Seven,
    /// None, or a release unknown here.
    Other,
}

/// A release of Jetson Linux, as `/etc/nv_tegra_release` names it: R36.4.7.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct L4t {
    /// 36 of R36.4.7.
    pub release: u32,
    /// "4.7" of it.
    pub revision: String,
}

impl fmt::Display for L4t {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "R{}.{}", self.release, self.revision)
    }
}

/// Which board this is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Board {
    /// Its kind.
    pub kind: BoardKind,
    /// The module's part number, such as "p3767-0005".
    pub module: Option<String>,
    /// Its device tree is a Super one, with the higher power modes.
    pub is_super: bool,
    /// What the device tree calls the board: shown, and nothing depends on it.
    pub model: Option<String>,
    /// Release of Jetson Linux.
    pub l4t: Option<L4t>,
    /// Generation of JetPack.
    pub jetpack: JetPack,
    /// The name of the simulation that this is, such as "sim:orin-nano-super".
    pub simulation: Option<String>,
}

/// What the engine is doing, as far as clocks care.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Reading prompts: bound by arithmetic.
    Prefill,
    /// Generating: bound by memory.
    Decode,
    /// Nothing to do.
    Idle,
}

impl Phase {
    /// All of them, in the order of [`Phase::index`].
    pub const ALL: [Phase; 3] = [Phase::Prefill, Phase::Decode, Phase::Idle];

    /// Its place in a table by phase.
    pub fn index(self) -> usize {
        self as usize
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        ["prefill", "decode", "idle"][self.index()]
    }
}

/// A supply rail's power.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rail {
    /// The board's own label: "VDD_IN", "VDD_GPU_SOC".
    pub label: String,
    /// Averaged by the meter over about half a second, and lagging by one or two.
    pub power_mw: u32,
    /// Volts times a thousand, where the meter tells them.
    pub volt_mv: Option<u32>,
}

/// A thermal zone that answered. One whose block is off does not, and is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zone {
    /// The zone's type, in lower case: "gpu-thermal", "tj-thermal".
    pub kind: String,
    /// Thousandths of a degree Celsius.
    pub temp_mc: i32,
}

/// What the kernel or the firmware holds back just now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Throttle {
    /// Cooling devices of the kernel that are at work, by type; empty: none.
    pub active: Vec<String>,
    /// The hot-surface warning (70 °C), which costs no speed.
    pub hot_surface: bool,
    /// Events since boot: under-voltage, average over-current, instantaneous over-current (each halves clocks for about 1 ms).
    pub oc_counts: [Option<u64>; 3],
    /// A discrete GPU's reasons for lower clocks, by NVML's names.
    pub gpu_reasons: Vec<String>,
}

/// The fan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fan {
    /// Drive, 0-255.
    pub pwm: Option<u8>,
    /// Turns a minute.
    pub rpm: Option<u32>,
}

/// Memory and swap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// All of it.
    pub total_bytes: u64,
    /// What can be given out without swapping.
    pub available_bytes: u64,
    /// What the GPU holds of it (NvMap), where the kernel says.
    pub gpu_bytes: Option<u64>,
    /// Swap there is.
    pub swap_total_bytes: u64,
    /// Swap in use.
    pub swap_used_bytes: u64,
}

/// One group of CPU cores that share a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuClock {
    /// The policy's number: that of its first core.
    pub policy: u32,
    /// Now.
    pub cur_hz: u64,
    /// Its ceiling.
    pub max_hz: u64,
}

/// What is wrong with a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// It was there before and no longer is.
    Missing,
    /// It has not moved by its last digit for longer than a live sensor can stand still.
    Frozen,
    /// No board can be so.
    Absurd,
}

/// A sensor that cannot be trusted now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SensorFault {
    /// A zone's type, a rail's label, "gpu clock".
    pub sensor: String,
    /// What is wrong.
    pub fault: Fault,
}

/// One reading of everything, each part absent where the board does not tell it.
///
/// A value that failed its sanity check is left out of here and named in `faults` instead: whoever decides on a sample
/// needs no second check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// When, on the board's clock ([`Nodes::now_us`](super::nodes::Nodes::now_us)).
    pub at_us: u64,
    /// Power by rail.
    pub rails: Vec<Rail>,
    /// The module's power: the rail, or the sum of rails, that contains all others.
    pub total_mw: Option<u32>,
    /// Temperatures by zone.
    pub zones: Vec<Zone>,
    /// GPU clock as the clock framework has it, not as silicon runs.
    pub gpu_hz: Option<u64>,
    /// Its floor.
    pub gpu_min_hz: Option<u64>,
    /// Its ceiling.
    pub gpu_max_hz: Option<u64>,
    /// How busy the GPU is, of a thousand.
    pub gpu_load_permille: Option<u16>,
    /// Memory clock; readable by root only on Orin.
    pub emc_hz: Option<u64>,
    /// The memory clock is locked at its rate.
    pub emc_locked: Option<bool>,
    /// Ceiling of the memory clock that the power mode sets; none where it sets none.
    pub emc_cap_hz: Option<u64>,
    /// What is held back.
    pub throttle: Throttle,
    /// The fan.
    pub fan: Option<Fan>,
    /// CPU clocks by policy.
    pub cpus: Vec<CpuClock>,
    /// Memory and swap.
    pub memory: Option<Memory>,
    /// Sensors that cannot be trusted now.
    pub faults: Vec<SensorFault>,
}

impl Sample {
    /// The hottest zone. The maximum over all, because some images lack the junction's own zone.
    pub fn hottest(&self) -> Option<&Zone> {
        self.zones.iter().max_by_key(|z| z.temp_mc)
    }

    /// The hottest zone's temperature.
    pub fn hottest_mc(&self) -> Option<i32> {
        self.hottest().map(|z| z.temp_mc)
    }

    /// A rail's power by its label.
    pub fn rail_mw(&self, label: &str) -> Option<u32> {
        self.rails.iter().find(|r| r.label == label).map(|r| r.power_mw)
    }
}

/// Wanted clocks. What is `None` stays with the system: a value of ours that was there before is taken back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clocks {
    /// Ceiling of the GPU clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_cap_hz: Option<u64>,
    /// Floor of the GPU clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_floor_hz: Option<u64>,
    /// Floor of the memory clock. Orin has only a lock, so the clock is held here; it rounds up to 204, 665.6, 2133 or 3199 MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emc_floor_hz: Option<u64>,
    /// Ceiling of the memory clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emc_cap_hz: Option<u64>,
}

#[test]
fn a_phase_knows_its_place() {
    for (i, phase) in Phase::ALL.into_iter().enumerate() {
        assert_eq!(phase.index(), i);
        assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
    }
}
