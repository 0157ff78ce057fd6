//! The simulated boards as data: what their device trees, tables and meters hold, and the coefficients of their power.
//!
//! Sources, by the names used here. *Table A*: steady medians of public raw traces of one Orin Nano Super (R36.5)
//! running Qwen2.5-1.5B Q4_K_M, and the fit to them. *AGX study*: vLLM in FP16 on an AGX Orin 64GB. *Config*:
//! NVIDIA's own nvpmodel and device-tree files. What is an assumption says so.

/// A power mode of nvpmodel.
#[derive(Debug, Clone, Copy)]
pub struct Mode {
    /// Its number in nvpmodel.conf.
    pub id: u32,
    /// Its name there.
    pub name: &'static str,
    /// Highest GPU clock.
    pub gpu_max_hz: u64,
    /// Cap of the memory clock; 0: none.
    pub emc_cap_hz: u64,
    /// Memory clock that the stock governor holds, idle or busy.
    pub emc_stock_hz: u64,
    /// Highest CPU clock.
    pub cpu_max_khz: u64,
    /// Multiprocessors that are on.
    pub sms: u32,
}

/// A channel of a power meter.
#[derive(Debug, Clone, Copy)]
pub struct Channel {
    /// The label in hwmon.
    pub label: &'static str,
    /// Supply, in mV.
    pub volt_mv: f64,
    /// Which of [`Power`]'s parts run through it: GPU and CPU, memory controller and SoC, everything else.
    pub parts: [f64; 3],
}

/// A power meter: up to three channels.
#[derive(Debug, Clone, Copy)]
pub struct Meter {
    /// Channels; an empty label is "NC".
    pub channels: [Channel; 3],
    /// Smallest step of current: 40 µV over the shunt.
    pub step_ma: f64,
}

/// Power by memory clock: watts that run always, and joules a byte read.
#[derive(Debug, Clone, Copy)]
pub struct EmcPoint {
    /// The clock.
    pub hz: u64,
    /// Memory controller and SoC.
    pub soc_w: f64,
    /// The same, a byte.
    pub soc_j: f64,
    /// Rest of the module, DRAM included.
    pub rest_w: f64,
}

/// A simulated board.
#[derive(Debug)]
pub struct Spec {
    /// Its name after `sim:`.
    pub name: &'static str,
    /// `compatible` of the device tree.
    pub compatible: &'static [&'static str],
    /// `model` of the device tree.
    pub model: &'static str,
    /// First line of `/etc/nv_tegra_release`.
    pub release: &'static str,
    /// Power modes.
    pub modes: &'static [Mode],
    /// The one a simulation starts in.
    pub default_mode: &'static str,
    /// GPU clocks, rising.
    pub gpu_hz: &'static [u64],
    /// The clock at which the GPU's voltage is 1 in the model.
    pub gpu_full_mhz: f64,
    /// First CPU of each clock group.
    pub policies: &'static [u32],
    /// Highest CPU clock of the part.
    pub cpu_max_khz: u64,
    /// Meters.
    pub meters: &'static [Meter],
    /// Power by memory clock: four points.
    pub emc: [EmcPoint; 4],
    /// Bytes a second that memory gives at 1 Hz of its clock.
    pub emc_bytes_per_hz: f64,
    /// Watts of the GPU's rail at rest.
    pub base_w: f64,
    /// Watts of one busy host thread at the CPU's full clock.
    pub host_w: f64,
    /// Watts of the GPU's clock tree at full clock and voltage, a multiprocessor.
    pub clock_w_per_sm: f64,
    /// Joules a byte in the rest of the module (DRAM).
    pub rest_j: f64,
    /// Thermal resistances of die and spreader in °C/W, and default of sink to air.
    pub r_c_per_w: [f64; 3],
    /// Memory.
    pub memory_kib: u64,
    /// Average over-current limit of the module, in W.
    pub limit_w: f64,
}

const MHZ: u64 = 1_000_000;
/// The points at which the memory clock locks on R36 (Table A's board; the same four are reported for AGX).
pub const EMC_HZ: [u64; 4] = [204 * MHZ, 665_600_000, 2133 * MHZ, 3199 * MHZ];
const B: f64 = super::work::TABLE_BYTES;

const fn mode(id: u32, name: &'static str, gpu: u64, emc: [u64; 2], cpu_max_khz: u64, sms: u32) -> Mode {
    // A mode names the CPU's table entry; EMC rates are the points above.
    Mode { id, name, gpu_max_hz: gpu, emc_cap_hz: emc[0], emc_stock_hz: emc[1], cpu_max_khz, sms }
}

const fn channel(label: &'static str, volt_mv: f64, parts: [f64; 3]) -> Channel {
    Channel { label, volt_mv, parts }
}

const NC: Channel = channel("", 5000.0, [0.0; 3]);

/// Orin Nano and NX: VDD_IN contains the other two. 5 mΩ shunts.
const SMALL_METERS: &[Meter] = &[Meter {
    channels: [
        channel("VDD_IN", 5000.0, [1.0, 1.0, 1.0]),
        channel("VDD_CPU_GPU_CV", 5000.0, [1.0, 0.0, 0.0]),
        channel("VDD_SOC", 5000.0, [0.0, 1.0, 0.0]),
    ],
    step_ma: 8.0,
}];

/// AGX Orin: the total is the sum of the first meter. What of the GPU's part is the CPU's is taken off in the model.
/// The first two channels sit at the 19 V input, the third and the second meter at 5 V. 2 mΩ shunts.
const AGX_METERS: &[Meter] = &[
    Meter {
        channels: [
            channel("VDD_GPU_SOC", 19_000.0, [0.95, 1.0, 0.0]),
            channel("VDD_CPU_CV", 19_000.0, [0.05, 0.0, 0.0]),
            channel("VIN_SYS_5V0", 5000.0, [0.0, 0.0, 1.0]),
        ],
        step_ma: 20.0,
    },
    Meter { channels: [NC, channel("VDDQ_VDD2_1V8AO", 5000.0, [0.0, 0.0, 0.6]), NC], step_ma: 20.0 },
];

/// Table A's fit.
const SMALL_EMC: [EmcPoint; 4] = [
    EmcPoint { hz: EMC_HZ[0], soc_w: 1.17, soc_j: 0.035 / B, rest_w: 2.90 },
    EmcPoint { hz: EMC_HZ[1], soc_w: 1.18, soc_j: 0.035 / B, rest_w: 2.90 },
    EmcPoint { hz: EMC_HZ[2], soc_w: 1.44, soc_j: 0.039 / B, rest_w: 2.64 },
    EmcPoint { hz: EMC_HZ[3], soc_w: 2.27, soc_j: 0.057 / B, rest_w: 2.80 },
];

/// Orin Nano 8GB Super, developer kit: the board of Table A. Modes: config.
pub static NANO_SUPER: Spec = Spec {
    name: "orin-nano-super",
    compatible: &["nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"],
    model: "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    release: "# R36 (release), REVISION: 5.0, GCID: 0, BOARD: generic, EABI: aarch64",
    modes: &[
        mode(0, "15W", 612 * MHZ, [EMC_HZ[2], EMC_HZ[2]], 1_497_600, 8),
        mode(1, "25W", 918 * MHZ, [EMC_HZ[3], EMC_HZ[3]], 1_344_000, 8),
        mode(2, "MAXN_SUPER", 1020 * MHZ, [EMC_HZ[3], EMC_HZ[2]], 1_728_000, 8),
        // Four of eight SMs: the published speeds of this mode fit no other count.
        mode(3, "7W", 408 * MHZ, [EMC_HZ[2], EMC_HZ[2]], 960_000, 4),
    ],
    default_mode: "MAXN_SUPER",
    gpu_hz: &[306 * MHZ, 408 * MHZ, 510 * MHZ, 612 * MHZ, 714 * MHZ, 816 * MHZ, 918 * MHZ, 1020 * MHZ],
    gpu_full_mhz: 1020.0,
    policies: &[0, 4],
    cpu_max_khz: 1_728_000,
    meters: SMALL_METERS,
    emc: SMALL_EMC,
    // 128 bits, both edges, at 94% of the peak: the published fit.
    emc_bytes_per_hz: 0.94 * 32.0,
    // The fit's constant of 0.39 W is a quiet rail and one host thread: the idle row at 1020 MHz tells them apart.
    base_w: 0.11,
    host_w: 0.28,
    clock_w_per_sm: 1.33 / 8.0,
    rest_j: 0.067 / B,
    r_c_per_w: [0.2, 0.6, 2.0],
    memory_kib: 7_802_000,
    limit_w: 25.0,
};

/// Orin NX 16GB Super. No public table: the Nano's coefficients (same die, same memory width), its own clocks and
/// modes.
pub static NX_16: Spec = Spec {
    name: "orin-nx-16",
    compatible: &["nvidia,p3768-0000+p3767-0000-super", "nvidia,p3767-0000", "nvidia,tegra234"],
    model: "NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super",
    release: "# R36 (release), REVISION: 4.7, GCID: 0, BOARD: generic, EABI: aarch64",
    modes: &[
        mode(0, "MAXN_SUPER", 1173 * MHZ, [EMC_HZ[3], EMC_HZ[2]], 1_984_000, 8),
        mode(1, "10W", 612 * MHZ, [EMC_HZ[2], EMC_HZ[2]], 1_190_400, 4),
        mode(2, "15W", 612 * MHZ, [EMC_HZ[3], EMC_HZ[3]], 1_420_800, 4),
        mode(3, "25W", 408 * MHZ, [EMC_HZ[3], EMC_HZ[3]], 1_497_600, 8),
        mode(4, "40W", 1173 * MHZ, [EMC_HZ[3], EMC_HZ[3]], 1_984_000, 8),
    ],
    default_mode: "MAXN_SUPER",
    gpu_hz: &[
        306 * MHZ,
        408 * MHZ,
        510 * MHZ,
        612 * MHZ,
        714 * MHZ,
        816 * MHZ,
        918 * MHZ,
        1020 * MHZ,
        1122 * MHZ,
        1173 * MHZ,
    ],
    // The part is binned for 1173 MHz: its voltage curve is the Nano's, stretched (assumption).
    gpu_full_mhz: 1173.0,
    policies: &[0, 4],
    cpu_max_khz: 1_984_000,
    meters: SMALL_METERS,
    emc: SMALL_EMC,
    emc_bytes_per_hz: 0.94 * 32.0,
    base_w: 0.11,
    host_w: 0.32,
    clock_w_per_sm: 1.33 / 8.0 * 1.15,
    rest_j: 0.067 / B,
    r_c_per_w: [0.2, 0.6, 1.8],
    memory_kib: 15_900_000,
    limit_w: 45.0,
};

/// AGX Orin 64GB. Memory: the study's 152.8 GB/s, 74.6% of the peak. Power: its decode plateaus on VDD_GPU_SOC (25.4
/// W at 131 GB/s and 27.8 W at 150) give 8.9 W at rest and 0.126 W a GB/s; the split by part is ours. Below 3199 MHz:
/// twice the Nano's (assumption).
pub static AGX_64: Spec = Spec {
    name: "agx-orin-64",
    compatible: &["nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"],
    model: "NVIDIA Jetson AGX Orin Developer Kit",
    release: "# R36 (release), REVISION: 4.7, GCID: 0, BOARD: generic, EABI: aarch64",
    modes: &[
        mode(0, "MAXN", 1_300_500_000, [0, EMC_HZ[3]], 2_201_600, 16),
        mode(1, "15W", 408 * MHZ, [EMC_HZ[2], EMC_HZ[2]], 1_113_600, 6),
        mode(2, "30W", 612 * MHZ, [0, EMC_HZ[3]], 1_728_000, 8),
        mode(3, "50W", 816 * MHZ, [0, EMC_HZ[3]], 1_497_600, 16),
    ],
    default_mode: "MAXN",
    gpu_hz: &[
        306 * MHZ,
        408 * MHZ,
        510 * MHZ,
        612 * MHZ,
        714 * MHZ,
        816 * MHZ,
        918 * MHZ,
        1020 * MHZ,
        1122 * MHZ,
        1224 * MHZ,
        1_300_500_000,
    ],
    gpu_full_mhz: 1300.5,
    policies: &[0, 4, 8],
    cpu_max_khz: 2_201_600,
    meters: AGX_METERS,
    emc: [
        EmcPoint { hz: EMC_HZ[0], soc_w: 2.34, soc_j: 0.035 / B, rest_w: 5.80 },
        EmcPoint { hz: EMC_HZ[1], soc_w: 2.36, soc_j: 0.035 / B, rest_w: 5.80 },
        EmcPoint { hz: EMC_HZ[2], soc_w: 2.88, soc_j: 0.039 / B, rest_w: 5.28 },
        EmcPoint { hz: EMC_HZ[3], soc_w: 4.54, soc_j: 0.057 / B, rest_w: 5.60 },
    ],
    emc_bytes_per_hz: 152.8e9 / 3199e6,
    base_w: 0.9,
    host_w: 0.4,
    clock_w_per_sm: 3.4 / 16.0,
    rest_j: 0.067 / B,
    r_c_per_w: [0.12, 0.35, 1.0],
    memory_kib: 64_350_000,
    limit_w: 65.0,
};

/// All of them.
pub static BOARDS: [&Spec; 3] = [&NANO_SUPER, &NX_16, &AGX_64];

impl Spec {
    /// The mode of a name.
    pub fn mode(&self, name: &str) -> Option<&'static Mode> {
        self.modes.iter().find(|m| m.name == name)
    }

    /// The memory point of a rate.
    pub fn emc_at(&self, hz: u64) -> &EmcPoint {
        self.emc.iter().find(|e| e.hz >= hz).unwrap_or(&self.emc[3])
    }
}
