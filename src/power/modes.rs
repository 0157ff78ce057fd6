//! Power modes and fan profiles: read from NVIDIA's own configuration, switched by NVIDIA's own programs, believed only
//! after reading the clocks. nvpmodel in a private mount namespace says nothing wrong and does nothing.

use super::nodes::{Nodes, number, text};
use crate::units::{Error, Result, one_line};
use serde::Serialize;
use std::process::Command;
use std::sync::Arc;

/// The configuration in force.
pub const NVPMODEL_CONF: &str = "/etc/nvpmodel.conf";
const NVPMODEL_STATUS: &str = "/var/lib/nvpmodel/status";
const FAN_CONF: &str = "/etc/nvfancontrol.conf";
const FAN_STATUS: &str = "/var/lib/nvfancontrol/status";
/// Modes of one board: 3 to 9.
const MODES_MAX: usize = 64;

/// A power mode and its limits, where it names them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Mode {
    /// Its number: not in order of power.
    pub id: u32,
    /// Its name: "25W", "MAXN_SUPER".
    pub name: String,
    /// Ceiling of the GPU's clock.
    pub gpu_max_hz: Option<u64>,
    /// Ceiling of the memory's.
    pub emc_max_hz: Option<u64>,
    /// The lowest ceiling of any group of CPU cores.
    pub cpu_max_hz: Option<u64>,
    /// Which GPU units are off, as the board's mask. Another mask than now needs a restart.
    pub tpc_mask: Option<u64>,
}

/// A configuration of nvpmodel, as far as it is of use here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Table {
    /// The modes, in the file's order.
    pub modes: Vec<Mode>,
    /// The mode after a fresh installation.
    pub default: Option<u32>,
}

impl Table {
    /// Reads the sections POWER_MODEL and PM_CONFIG; what else there is, is not looked at. Some files write a section's
    /// bracket without a space, and -1 means no limit.
    pub fn parse(conf: &str) -> Table {
        let mut table = Table::default();
        let mut in_mode = false;
        for line in conf.lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(section) = line.strip_prefix('<') {
                let section = section.trim_end_matches('>').trim();
                in_mode = section.starts_with("POWER_MODEL");
                let key = |name: &str| section.split_whitespace().find_map(|w| w.strip_prefix(name));
                if section.starts_with("PM_CONFIG") {
                    table.default = key("DEFAULT=").and_then(|d| d.parse().ok());
                }
                if let Some((id, name)) = key("ID=").and_then(|i| i.parse().ok()).zip(key("NAME="))
                    && in_mode
                    && table.modes.len() < MODES_MAX
                {
                    table.modes.push(Mode { id, name: one_line(name), ..Mode::default() });
                }
            } else if let [param, arg, value] = line.split_whitespace().collect::<Vec<_>>()[..]
                && in_mode
                && let Some(mode) = table.modes.last_mut()
            {
                mode.limit(param, arg, value);
            }
        }
        table
    }

    /// A mode by its name, in any case, or its number.
    pub fn find(&self, name: &str) -> Option<&Mode> {
        let by_name = self.modes.iter().find(|m| m.name.eq_ignore_ascii_case(name));
        by_name.or_else(|| self.modes.iter().find(|m| name.parse() == Ok(m.id)))
    }
}

impl Mode {
    fn limit(&mut self, param: &str, arg: &str, value: &str) {
        let hex = || value.strip_prefix("0x").and_then(|h| u64::from_str_radix(h, 16).ok());
        let limit =
            value.parse::<i64>().ok().filter(|v| *v > 0 && *v < i64::from(i32::MAX)).map(|v| v as u64);
        // Releases name the argument either way.
        match (param, arg) {
            ("GPU", "MAX_FREQ" | "MAX") => self.gpu_max_hz = limit,
            ("EMC", "MAX_FREQ" | "MAX") => {
                self.emc_max_hz = value.parse().ok().and_then(super::sensors::emc_cap);
            }
            (cpu, "MAX_FREQ" | "MAX") if cpu.starts_with("CPU") => {
                let hz = limit.map(|khz| khz * 1000);
                self.cpu_max_hz = [self.cpu_max_hz, hz].into_iter().flatten().min();
            }
            ("TPC_POWER_GATING" | "TPC_PG_MASK", _) => self.tpc_mask = hex().or(value.parse().ok()),
            _ => {}
        }
    }
}

/// How NVIDIA's programs are run: their exit status and what they print. Tests give another.
pub trait Programs: Send {
    /// Runs a program to its end.
    fn run(&mut self, program: &str, args: &[&str]) -> std::io::Result<(bool, String)>;
}

/// The system's.
#[derive(Debug)]
pub struct SystemPrograms;

impl Programs for SystemPrograms {
    fn run(&mut self, program: &str, args: &[&str]) -> std::io::Result<(bool, String)> {
        // No question may wait for an answer: nvpmodel asks before a restart.
        let out = Command::new(program).args(args).stdin(std::process::Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        Ok((out.status.success(), text.into_owned()))
    }
}

/// A board's modes and profiles, and the way to switch them.
pub struct Modes {
    nodes: Arc<dyn Nodes>,
    programs: Box<dyn Programs>,
    /// Ask the service manager to run nvpmodel as a unit of its own: this process may be in a mount namespace.
    by_unit: bool,
}

impl Modes {
    /// `by_unit`: through `tegu-mode@.service` rather than directly.
    pub fn new(nodes: Arc<dyn Nodes>, programs: Box<dyn Programs>, by_unit: bool) -> Modes {
        Modes { nodes, programs, by_unit }
    }

    /// The board's modes.
    pub fn table(&self) -> Result<Table> {
        let conf = self.nodes.read(NVPMODEL_CONF).map_err(|e| Error::io(NVPMODEL_CONF, "read", e))?;
        let table = Table::parse(&conf);
        match table.modes.is_empty() {
            true => Err(Error::bad(NVPMODEL_CONF, "POWER_MODEL", "at least one mode", "none")),
            false => Ok(table),
        }
    }

    /// The number of the mode that nvpmodel last wrote down.
    pub fn current(&self) -> Option<u32> {
        current_mode(self.nodes.as_ref())
    }

    /// Switches to a mode and reads the clocks: nvpmodel's word and its status file prove nothing. Says what came of it.
    pub fn switch(&mut self, name: &str) -> Result<String> {
        let table = self.table()?;
        let known = || table.modes.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
        let mode = table
            .find(name)
            .ok_or_else(|| Error::bad("power mode", "name", format!("one of {}", known()), name))?
            .clone();
        let id = mode.id.to_string();
        let now = self.current().and_then(|c| table.modes.iter().find(|m| m.id == c));
        if now.is_some_and(|n| n.tpc_mask.is_some() && mode.tpc_mask.is_some() && n.tpc_mask != mode.tpc_mask)
        {
            let found = "one that needs a restart: it switches GPU units on or off";
            return Err(Error::bad("power mode", &mode.name, "one that can be switched to", found));
        }
        let (ok, said) = match self.by_unit {
            true => self.run("systemctl", &["start", &format!("tegu-mode@{id}.service")])?,
            false => self.run("nvpmodel", &["-m", &id])?,
        };
        let failed = |found: String| Err(Error::bad("nvpmodel", &mode.name, "the mode's limits", found));
        if !ok {
            return failed(one_line(said.trim()));
        }
        let gpu = super::find::Found::look(self.nodes.as_ref()).gpu;
        let high: Option<u64> = gpu.and_then(|g| number(self.nodes.as_ref(), &format!("{g}/max_freq")));
        match (mode.gpu_max_hz, high) {
            // The table's own steps: a cap between two of them is rounded.
            (Some(limit), Some(high)) if high > limit + limit / 10 || high < limit - limit / 5 => {
                failed(format!(
                    "a GPU ceiling of {} MHz, not {} MHz: {}",
                    high / 1_000_000,
                    limit / 1_000_000,
                    one_line(said.trim())
                ))
            }
            (Some(_), Some(high)) => {
                Ok(format!("power mode {}: GPU ceiling {} MHz", mode.name, high / 1_000_000))
            }
            _ => Ok(format!(
                "power mode {}: its clocks cannot be read, so that this is nvpmodel's word only",
                mode.name
            )),
        }
    }

    /// Switches the fan's profile: nvfancontrol reads its default when it starts without a status of its own.
    pub fn fan(&mut self, profile: &str) -> Result<String> {
        let conf = self.nodes.read(FAN_CONF).map_err(|e| Error::io(FAN_CONF, "read", e))?;
        let known = fan_profiles(&conf);
        if !known.iter().any(|k| k == profile) {
            return Err(Error::bad("fan profile", "name", format!("one of {}", known.join(", ")), profile));
        }
        let line = |l: &str| match l.trim_start().starts_with("FAN_DEFAULT_PROFILE") {
            true => {
                let indent = &l[..l.len() - l.trim_start().len()];
                format!("{indent}FAN_DEFAULT_PROFILE {profile}")
            }
            false => l.to_owned(),
        };
        let changed: String = conf.lines().map(|l| line(l) + "\n").collect();
        self.run("systemctl", &["stop", "nvfancontrol"])?;
        self.nodes.write(FAN_CONF, &changed).map_err(|e| Error::io(FAN_CONF, "write", e))?;
        // Emptied rather than removed: its status would win over the new default.
        drop(self.nodes.write(FAN_STATUS, ""));
        let (ok, said) = self.run("systemctl", &["start", "nvfancontrol"])?;
        let (_, says) = self.run("nvfancontrol", &["-q"])?;
        let is_so = says.lines().any(|l| l.contains("FAN_PROFILE") && l.trim_end().ends_with(profile));
        match ok && is_so {
            true => Ok(format!("fan profile {profile}")),
            false => Err(Error::bad("nvfancontrol", "profile", profile, one_line((said + &says).trim()))),
        }
    }

    fn run(&mut self, program: &str, args: &[&str]) -> Result<(bool, String)> {
        self.programs.run(program, args).map_err(|e| Error::io(program, "run", e))
    }
}

/// The number of the mode that nvpmodel last wrote down.
pub fn current_mode(nodes: &dyn Nodes) -> Option<u32> {
    text(nodes, NVPMODEL_STATUS)?.strip_prefix("pmode:")?.parse().ok()
}

/// The profiles of a fan's configuration, each once.
fn fan_profiles(conf: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for line in conf.lines() {
        if let Some(name) = line.trim().strip_prefix("FAN_PROFILE") {
            let name = name.trim().trim_end_matches('{').trim();
            if !name.is_empty() && !names.iter().any(|n| n == name) {
                names.push(name.to_owned());
            }
        }
    }
    names
}

#[test]
fn a_configuration_is_read() {
    let conf = "\
# comment
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
<PARAM TYPE=CLOCK NAME=GPU >
MAX_FREQ /sys/devices/17000000.gpu/devfreq_dev/max_freq
< POWER_MODEL ID=0 NAME=15W >
CPU_A78_0 MAX_FREQ 1497600
CPU_A78_1 MAX_FREQ 1344000
TPC_POWER_GATING TPC_PG_MASK 240
GPU MIN_FREQ 0
GPU MAX_FREQ 612000000
EMC MAX_FREQ 2133000000
<POWER_MODEL ID=2 NAME=MAXN_SUPER>
GPU MAX -1
EMC MAX 665600000
< PM_CONFIG DEFAULT=1 >
";
    let table = Table::parse(conf);
    let first = Mode {
        id: 0,
        name: "15W".into(),
        gpu_max_hz: Some(612_000_000),
        emc_max_hz: Some(2_133_000_000),
        cpu_max_hz: Some(1_344_000_000),
        tpc_mask: Some(240),
    };
    let second = Mode { id: 2, name: "MAXN_SUPER".into(), emc_max_hz: Some(665_600_000), ..Mode::default() };
    assert_eq!(table, Table { modes: vec![first, second], default: Some(1) });
    assert_eq!(table.find("maxn_super").map(|m| m.id), Some(2));
    assert_eq!(table.find("0").map(|m| m.name.as_str()), Some("15W"));
    assert_eq!(table.find("25W"), None);
    for hostile in [
        "<",
        "< POWER_MODEL >",
        "< POWER_MODEL ID=x NAME=y >\nGPU MAX_FREQ 1",
        "GPU MAX_FREQ 1",
        "<PM_CONFIG DEFAULT=-1>",
    ] {
        assert!(Table::parse(hostile).modes.is_empty(), "{hostile}");
    }
}
