//! Trees of plain files as a board has them, built from what is published of node names, rails, zones and tables. Each
//! JetPack numbers hwmon, zones and coolers in another order, so that whoever goes by index fails here.

use std::fs;
use std::path::Path;
use tegu::power::types::BoardKind;

/// A release of JetPack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    Five,
    Six,
    Seven,
}

/// A board's facts.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub name: &'static str,
    pub kind: BoardKind,
    pub module: &'static str,
    pub compatible: &'static str,
    pub model: &'static str,
    pub is_super: bool,
    /// GPU table, kHz.
    pub gpu_khz: &'static [u64],
    /// The power mode's GPU ceiling, kHz: an entry of the table.
    pub gpu_cap_khz: u64,
    /// The power mode's memory ceiling, Hz; none: uncapped.
    pub emc_cap_hz: Option<u64>,
    /// CPU policies.
    pub policies: &'static [u32],
    /// (label, mV, mA), by meter.
    pub rails: &'static [&'static [(&'static str, i64, i64)]],
    /// What the rails sum to, mW.
    pub total_mw: u32,
    /// nvpmodel's modes: (id, name, GPU kHz, EMC Hz; 0: no limit).
    pub modes: &'static [(u32, &'static str, u64, u64)],
}

const STEPS_SMALL: &[u64] = &[306_000, 408_000, 510_000, 612_000, 714_000, 816_000, 918_000];
const STEPS_SUPER: &[u64] = &[306_000, 408_000, 510_000, 612_000, 714_000, 816_000, 918_000, 1_020_000];
const STEPS_NX_SUPER: &[u64] =
    &[306_000, 408_000, 510_000, 612_000, 714_000, 816_000, 918_000, 1_020_000, 1_122_000, 1_173_000];
const STEPS_AGX: &[u64] = &[
    306_000, 408_000, 510_000, 612_000, 714_000, 816_000, 918_000, 1_020_000, 1_122_000, 1_224_000, 1_300_500,
];
const RAILS_AGX: &[&[(&str, i64, i64)]] = &[
    &[("VDD_GPU_SOC", 19_000, 740), ("VDD_CPU_CV", 19_000, 120), ("VIN_SYS_5V0", 5_000, 980)],
    // Fed from VIN_SYS_5V0: adding it would count DRAM twice.
    &[("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5_000, 400), ("NC", 0, 0)],
];
const RAILS_SMALL: &[&[(&str, i64, i64)]] =
    &[&[("VDD_IN", 5_000, 3_054), ("VDD_CPU_GPU_CV", 5_000, 1_472), ("VDD_SOC", 5_000, 568)]];

/// The six modules, and the two Super trees of JetPack 6.2.
pub const SPECS: [Spec; 8] = [
    Spec {
        name: "agx-64",
        kind: BoardKind::AgxOrin64,
        module: "p3701-0005",
        compatible: "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0",
        model: "NVIDIA Jetson AGX Orin Developer Kit",
        is_super: false,
        gpu_khz: STEPS_AGX,
        gpu_cap_khz: 612_000,
        emc_cap_hz: None,
        policies: &[0, 4, 8],
        rails: RAILS_AGX,
        total_mw: 19 * 740 + 19 * 120 + 5 * 980,
        modes: &[
            (0, "MAXN", 0, 0),
            (1, "MODE_15W", 408_000, 2_133_000_000),
            (2, "MODE_30W", 612_000, 0),
            (3, "MODE_50W", 816_000, 0),
        ],
    },
    Spec {
        name: "agx-32",
        kind: BoardKind::AgxOrin32,
        module: "p3701-0004",
        compatible: "nvidia,p3737-0000+p3701-0004\0nvidia,p3701-0004\0nvidia,tegra234\0",
        model: "NVIDIA Jetson AGX Orin",
        is_super: false,
        gpu_khz: &[306_000, 408_000, 510_000, 612_000, 714_000, 816_000, 930_000],
        gpu_cap_khz: 930_000,
        emc_cap_hz: None,
        policies: &[0, 4],
        rails: RAILS_AGX,
        total_mw: 19 * 740 + 19 * 120 + 5 * 980,
        modes: &[(0, "MAXN", 0, 0), (3, "MODE_40W", 816_000, 0)],
    },
    Spec {
        name: "nx-16",
        kind: BoardKind::OrinNx16,
        module: "p3767-0000",
        compatible: "nvidia,p3768-0000+p3767-0000\0nvidia,p3767-0000\0nvidia,tegra234\0",
        model: "A vendor's own carrier",
        is_super: false,
        gpu_khz: STEPS_SMALL,
        gpu_cap_khz: 612_000,
        emc_cap_hz: None,
        policies: &[0, 4],
        rails: RAILS_SMALL,
        total_mw: 15_270,
        modes: &[(0, "MAXN", 918_000, 0), (1, "10W", 612_000, 2_133_000_000), (3, "25W", 408_000, 0)],
    },
    Spec {
        name: "nx-16-super",
        kind: BoardKind::OrinNx16,
        module: "p3767-0000",
        compatible: "nvidia,p3768-0000+p3767-0000-super\0nvidia,p3767-0000\0nvidia,tegra234\0",
        model: "NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super",
        is_super: true,
        gpu_khz: STEPS_NX_SUPER,
        gpu_cap_khz: 1_173_000,
        emc_cap_hz: Some(3_199_000_000),
        policies: &[0, 4],
        rails: RAILS_SMALL,
        total_mw: 15_270,
        modes: &[(0, "MAXN_SUPER", 1_173_000, 0), (4, "40W", 1_173_000, 3_199_000_000)],
    },
    Spec {
        name: "nx-8",
        kind: BoardKind::OrinNx8,
        module: "p3767-0001",
        compatible: "nvidia,p3768-0000+p3767-0001\0nvidia,p3767-0001\0nvidia,tegra234\0",
        model: "NVIDIA Jetson Orin NX",
        is_super: false,
        gpu_khz: &[306_000, 408_000, 510_000, 612_000, 714_000, 765_000],
        gpu_cap_khz: 765_000,
        emc_cap_hz: None,
        policies: &[0, 4],
        rails: RAILS_SMALL,
        total_mw: 15_270,
        modes: &[(0, "MAXN", 765_000, 0), (1, "10W", 612_000, 2_133_000_000)],
    },
    Spec {
        name: "nano-8",
        kind: BoardKind::OrinNano8,
        module: "p3767-0003",
        compatible: "nvidia,p3768-0000+p3767-0003\0nvidia,p3767-0003\0nvidia,tegra234\0",
        model: "NVIDIA Orin Nano",
        is_super: false,
        gpu_khz: &[306_000, 408_000, 510_000, 624_750],
        gpu_cap_khz: 624_750,
        emc_cap_hz: Some(2_133_000_000),
        policies: &[0, 4],
        rails: RAILS_SMALL,
        total_mw: 15_270,
        modes: &[(0, "15W", 624_750, 2_133_000_000), (1, "7W", 408_000, 2_133_000_000)],
    },
    Spec {
        name: "nano-8-super",
        kind: BoardKind::OrinNano8,
        module: "p3767-0005",
        compatible: "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
        model: "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        is_super: true,
        gpu_khz: STEPS_SUPER,
        gpu_cap_khz: 1_020_000,
        emc_cap_hz: Some(3_199_000_000),
        policies: &[0, 4],
        rails: RAILS_SMALL,
        total_mw: 15_270,
        modes: &[
            (0, "15W", 612_000, 2_133_000_000),
            (1, "25W", 918_000, 3_199_000_000),
            (2, "MAXN_SUPER", 0, 0),
        ],
    },
    Spec {
        name: "nano-4",
        kind: BoardKind::OrinNano4,
        module: "p3767-0004",
        compatible: "nvidia,p3768-0000+p3767-0004\0nvidia,p3767-0004\0nvidia,tegra234\0",
        model: "NVIDIA Orin Nano 4GB",
        is_super: false,
        gpu_khz: &[306_000, 408_000, 510_000, 624_750],
        gpu_cap_khz: 624_750,
        emc_cap_hz: Some(2_133_000_000),
        policies: &[0, 4],
        rails: RAILS_SMALL,
        total_mw: 15_270,
        modes: &[(0, "10W", 624_750, 0), (1, "7W_AI", 408_000, 2_133_000_000)],
    },
];

/// The board's facts by name.
pub fn spec(name: &str) -> &'static Spec {
    SPECS.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("{name}"))
}

/// Writes a file and its folders.
pub fn put(root: &Path, path: &str, text: &str) {
    let place = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::write(place, text).unwrap();
}

/// What a file of the tree says, trimmed.
pub fn get(root: &Path, path: &str) -> String {
    fs::read_to_string(root.join(path.trim_start_matches('/'))).unwrap().trim().to_owned()
}

/// The GPU's clock folder.
pub fn gpu_folder(release: Release) -> &'static str {
    match release {
        Release::Five => "/sys/class/devfreq/17000000.ga10b",
        _ => "/sys/class/devfreq/17000000.gpu",
    }
}

pub const EMC: &str = "/sys/kernel/debug/bpmp/debug/clk/emc";

/// Builds the whole tree.
pub fn build(root: &Path, spec: &Spec, release: Release) {
    put(root, "/proc/device-tree/compatible", spec.compatible);
    put(root, "/proc/device-tree/model", &format!("{}\0", spec.model));
    let says = match release {
        Release::Five => "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64",
        Release::Six => "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64",
        Release::Seven => "# R39 (release), REVISION: 2.0, GCID: 45477242, BOARD: generic, EABI: aarch64",
    };
    put(root, "/etc/nv_tegra_release", says);
    gpu(root, spec, release);
    memory_clock(root, spec, release);
    meters(root, spec, release);
    heat(root, spec, release);
    for policy in spec.policies {
        let folder = format!("/sys/devices/system/cpu/cpufreq/policy{policy}");
        put(root, &format!("{folder}/scaling_cur_freq"), "1344000\n");
        put(root, &format!("{folder}/scaling_max_freq"), "1728000\n");
    }
    let meminfo = "MemTotal: 7802900 kB\nMemFree: 1000 kB\nMemAvailable: 5120000 kB\nSwapTotal: 3901440 kB\nSwapFree: 3900000 kB\nNvMapMemUsed: 1024000 kB\n";
    put(root, "/proc/meminfo", meminfo);
    put(root, "/etc/nvpmodel.conf", &nvpmodel(spec));
    put(root, "/var/lib/nvpmodel/status", "pmode:0001\n");
}

/// The GPU's clock: what a late driver brings.
pub fn gpu(root: &Path, spec: &Spec, release: Release) {
    let folder = gpu_folder(release);
    let file = |name: &str, text: String| put(root, &format!("{folder}/{name}"), &text);
    let hz: Vec<String> = spec.gpu_khz.iter().map(|k| (k * 1000).to_string()).collect();
    file("available_frequencies", hz.join(" ") + "\n");
    file("cur_freq", format!("{}\n", spec.gpu_khz[0] * 1000));
    file("min_freq", format!("{}\n", spec.gpu_khz[0] * 1000));
    file("max_freq", format!("{}\n", spec.gpu_cap_khz * 1000));
    file("governor", "nvhost_podgov\n".into());
    let load = match release {
        Release::Five => "/sys/devices/gpu.0/load",
        Release::Six => "/sys/devices/platform/gpu.0/load",
        Release::Seven => "/sys/devices/platform/bus@0/17000000.gpu/load",
    };
    put(root, load, "371\n");
    // Another device with a clock, which is no GPU, and sorts before it.
    put(root, "/sys/class/devfreq/15380000.nvjpg/cur_freq", "115200000\n");
    put(root, "/sys/class/devfreq/15380000.nvjpg/device/of_node/name", "nvjpg\0");
}

fn memory_clock(root: &Path, spec: &Spec, release: Release) {
    put(root, &format!("{EMC}/rate"), "2133000000\n");
    put(root, &format!("{EMC}/mrq_rate_locked"), "0\n");
    let (path, none) = match release {
        Release::Five => ("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "0"),
        _ => ("/sys/kernel/nvpmodel_clk_cap/emc", "2147483647"),
    };
    let cap = spec.emc_cap_hz.map_or(none.to_owned(), |hz| hz.to_string());
    put(root, path, &format!("{cap}\n"));
}

fn meters(root: &Path, spec: &Spec, release: Release) {
    // Each release's own numbering.
    let number = |n: usize| match release {
        Release::Five => n,
        Release::Six => n + 1,
        Release::Seven => 7 - n,
    };
    for (m, channels) in spec.rails.iter().enumerate() {
        let folder = format!("/sys/class/hwmon/hwmon{}", number(m));
        put(root, &format!("{folder}/name"), "ina3221\n");
        for (c, (label, mv, ma)) in channels.iter().enumerate() {
            let c = c + 1;
            put(root, &format!("{folder}/in{c}_label"), &format!("{label}\n"));
            put(root, &format!("{folder}/in{c}_input"), &format!("{mv}\n"));
            put(root, &format!("{folder}/curr{c}_input"), &format!("{ma}\n"));
        }
        put(root, &format!("{folder}/in7_label"), "sum of shunt voltages\n");
        put(root, &format!("{folder}/in7_input"), "30\n");
    }
    let folder = format!("/sys/class/hwmon/hwmon{}", number(3));
    put(root, &format!("{folder}/name"), "soctherm_oc\n");
    for (n, count) in [0, 0, 27_390].into_iter().enumerate() {
        put(root, &format!("{folder}/oc{}_event_cnt", n + 1), &format!("{count}\n"));
    }
    let folder = format!("/sys/class/hwmon/hwmon{}", number(4));
    put(root, &format!("{folder}/name"), "pwmfan\n");
    put(root, &format!("{folder}/pwm1"), "78\n");
    let folder = format!("/sys/class/hwmon/hwmon{}", number(5));
    put(root, &format!("{folder}/name"), "pwm_tach\n");
    put(root, &format!("{folder}/fan1_input"), "1740\n");
}

fn heat(root: &Path, spec: &Spec, release: Release) {
    let agx = spec.module.starts_with("p3701");
    let mut zones = match release {
        Release::Five => vec!["CPU-therm", "GPU-therm", "SOC0-therm", "tj-therm"],
        _ => vec!["cpu-thermal", "gpu-thermal", "cv0-thermal", "soc0-thermal", "soc1-thermal", "tj-thermal"],
    };
    if agx {
        zones.extend(["tboard-thermal", "tdiode-thermal"]);
    }
    if release == Release::Seven {
        zones.reverse();
    }
    for (n, kind) in zones.iter().enumerate() {
        let folder = format!("/sys/class/thermal/thermal_zone{n}");
        put(root, &format!("{folder}/type"), &format!("{kind}\n"));
        // A block that is off: a plain file cannot give EAGAIN, but some kernels answer this.
        let mc = match *kind {
            "cv0-thermal" => "-256000",
            k if k.starts_with("tj") => "52312",
            _ => "50125",
        };
        put(root, &format!("{folder}/temp"), &format!("{mc}\n"));
    }
    let coolers =
        ["pwm-fan", "cpufreq-cpu0", "devfreq-17000000.gpu", "hot-surface-alert", "gpu-throttle-alert"];
    for (n, kind) in coolers.iter().enumerate() {
        let folder = format!("/sys/class/thermal/cooling_device{n}");
        put(root, &format!("{folder}/type"), &format!("{kind}\n"));
        put(root, &format!("{folder}/cur_state"), if n == 0 { "2\n" } else { "0\n" });
    }
}

fn nvpmodel(spec: &Spec) -> String {
    let mut conf = String::from("< PARAM TYPE=CLOCK NAME=GPU >\nMAX_FREQ /x\n");
    for (id, name, gpu, emc) in spec.modes {
        let gpu = if *gpu == 0 { "-1".into() } else { (gpu * 1000).to_string() };
        conf += &format!("< POWER_MODEL ID={id} NAME={name} >\nGPU MAX_FREQ {gpu}\nEMC MAX_FREQ {emc}\n");
    }
    conf + "< PM_CONFIG DEFAULT=0 >\n"
}
