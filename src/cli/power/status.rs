//! `tegu power status`: everything that the board tells, once.

use clap::Args;
use serde_json::json;

use super::{Asked, Shown, Where};
use crate::cli::out::Out;
use crate::power::modes::{self, Table};
use crate::power::nodes::Nodes;
use crate::power::sensors::{GpuProcess, Sensors};
use crate::power::types::{Fault, Sample};
use crate::power::wire::{Answer, Ask, Client};
use crate::units::{Bytes, Result, one_line};

/// Arguments.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    place: Where,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Power is that of the module's rails, averaged by their meter over about half a second and one to two seconds late; it is not
what a wall meter shows. What a board does not tell is left out.

Examples:
  tegu power status
  tegu power status --json
  tegu power status --board sim:orin-nano-super
  tegu power status --root tree";

/// Shows one sample.
pub fn run(args: &StatusArgs) -> Result<()> {
    let site = args.place.open()?;
    let mut sensors = site.sensors();
    let sample = sensors.sample();
    let processes = sensors.processes();
    let helper = Client::connect(&args.asked.socket).and_then(|mut c| c.ask(&Ask::Status)).ok();
    let mode = current_mode(site.nodes.as_ref());
    if args.shown.json {
        let process = |p: &GpuProcess| json!({ "pid": p.pid, "name": p.name, "gpu_bytes": p.gpu_bytes });
        let nvml = sensors.nvidia().map(|n| {
            let (used, total) = n.memory_bytes().unzip();
            json!({ "name": n.name(), "driver": n.driver(), "measures": n.measures(),
                "memory_used_bytes": used, "memory_total_bytes": total, "energy_mj": n.energy_mj() })
        });
        return Out::stdout().json(&json!({
            "board": sensors.board(),
            "supported": site.board.check().is_ok(),
            "power_mode": mode,
            "total_of": sensors.total_of(),
            "hottest_mc": sample.hottest_mc(),
            "sample": sample,
            "gpu_processes": processes.iter().map(process).collect::<Vec<_>>(),
            "nvml": nvml,
            "helper": helper,
        }));
    }
    let mut text = rows(&sensors, &sample, mode.as_deref());
    text.extend(held(helper.as_ref()));
    let shown = processes.iter().take(8).map(|p| {
        let bytes = p.gpu_bytes.map_or("?".into(), |b| Bytes(b).to_string());
        ("gpu process", format!("{bytes}  {} ({})", one_line(&p.name), p.pid))
    });
    text.extend(shown);
    let lines = text.iter().map(|(k, v)| format!("{k:<14}{v}\n"));
    Out::stdout().text(&lines.collect::<String>())
}

/// The power mode's name, else its number.
fn current_mode(nodes: &dyn Nodes) -> Option<String> {
    let id = modes::current_mode(nodes)?;
    let table = nodes.read(modes::NVPMODEL_CONF).map(|c| Table::parse(&c)).unwrap_or_default();
    let named = table.modes.into_iter().find(|m| m.id == id);
    Some(named.map_or(id.to_string(), |m| format!("{} ({id})", m.name)))
}

fn mhz(hz: u64) -> String {
    format!("{} MHz", (hz as f64 / 1e5).round() / 10.0)
}

fn watts(mw: u32) -> String {
    format!("{:.2} W", f64::from(mw) / 1e3)
}

type Row = (&'static str, String);

fn rows(sensors: &Sensors, s: &Sample, mode: Option<&str>) -> Vec<Row> {
    let mut rows: Vec<Row> = vec![("board", sensors.board().title())];
    rows.extend(sensors.board().model.as_ref().map(|m| ("model", one_line(m))));
    if let Err(e) = sensors.board().check() {
        rows.push(("unsupported", e.to_string()));
    }
    rows.extend(sensors.nvidia().and_then(|n| {
        let driver = n.driver().unwrap_or_default();
        let use_of = if n.measures() { "" } else { ": NVML only names it" };
        Some(("nvml", format!("{}, driver {driver}{use_of}", n.name()?)))
    }));
    rows.extend(mode.map(|m| ("power mode", m.to_owned())));
    if let Some(total) = s.total_mw {
        let of = sensors.total_of().join(" + ");
        let of = if of.is_empty() { "the GPU's board, as its driver averages it".to_owned() } else { of };
        rows.push(("power", format!("{} ({of})", watts(total))));
    }
    rows.extend(s.rails.iter().map(|r| ("  rail", format!("{} {}", watts(r.power_mw), r.label))));
    if let Some(hz) = s.gpu_hz {
        let bounds = s.gpu_min_hz.zip(s.gpu_max_hz);
        let bounds = bounds
            .map_or(s.gpu_max_hz.map_or(String::new(), |m| format!(", at most {}", mhz(m))), |(l, h)| {
                format!(", {} to {}", mhz(l), mhz(h))
            });
        let load =
            s.gpu_load_permille.map_or(String::new(), |l| format!(", {:.1} % busy", f64::from(l) / 10.0));
        rows.push(("gpu clock", mhz(hz) + &bounds + &load));
    }
    let cap = s.emc_cap_hz.map_or(String::new(), |c| format!(", at most {}", mhz(c)));
    match (s.emc_hz, s.emc_locked) {
        (Some(hz), locked) => {
            let lock = if locked == Some(true) { ", locked" } else { "" };
            rows.push(("memory clock", mhz(hz) + lock + &cap));
        }
        _ if !cap.is_empty() => rows.push(("memory clock", format!("readable by root only{cap}"))),
        _ => {}
    }
    let zone = |z: &crate::power::types::Zone| format!("{:.1} °C {}", f64::from(z.temp_mc) / 1e3, z.kind);
    let mut zones: Vec<_> = s.zones.iter().collect();
    zones.sort_by_key(|z| std::cmp::Reverse(z.temp_mc));
    if !zones.is_empty() {
        rows.push(("heat", zones.into_iter().map(zone).collect::<Vec<_>>().join(", ")));
    }
    rows.extend(throttle(s));
    rows.extend(s.fan.map(|f| {
        let drive = f.pwm.map(|p| format!("{:.0} %", f64::from(p) / 2.55));
        let speed = f.rpm.map(|r| format!("{r} rpm"));
        ("fan", [drive, speed].into_iter().flatten().collect::<Vec<_>>().join(", "))
    }));
    if !s.cpus.is_empty() {
        let one = |c: &crate::power::types::CpuClock| {
            format!("cpu{} {} of {}", c.policy, mhz(c.cur_hz), mhz(c.max_hz))
        };
        rows.push(("cpu clocks", s.cpus.iter().map(one).collect::<Vec<_>>().join(", ")));
    }
    rows.extend(memory(sensors, s));
    rows.extend(s.faults.iter().map(|f| {
        let what = match f.fault {
            Fault::Missing => "gives no reading any more",
            Fault::Frozen => "stands still while others move",
            Fault::Absurd => "reads what no board can be",
        };
        ("fault", format!("{} {what}", f.sensor))
    }));
    rows
}

fn memory(sensors: &Sensors, s: &Sample) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    rows.extend(sensors.nvidia().and_then(|n| {
        let (used, total) = n.memory_bytes()?;
        Some(("gpu memory", format!("{} used of {}", Bytes(used), Bytes(total))))
    }));
    if let Some(m) = s.memory {
        let gpu = m.gpu_bytes.map_or(String::new(), |b| format!(", {} of it the GPU's", Bytes(b)));
        let used = Bytes(m.total_bytes.saturating_sub(m.available_bytes));
        rows.push(("memory", format!("{used} used of {}{gpu}", Bytes(m.total_bytes))));
        rows.push(("swap", format!("{} used of {}", Bytes(m.swap_used_bytes), Bytes(m.swap_total_bytes))));
    }
    rows
}

fn throttle(s: &Sample) -> Vec<Row> {
    let t = &s.throttle;
    let mut rows = Vec::new();
    let active: Vec<&str> = t.active.iter().chain(&t.gpu_reasons).map(String::as_str).collect();
    if !active.is_empty() {
        rows.push(("throttled", active.join(", ")));
    }
    if t.hot_surface {
        rows.push(("hot surface", "above 70 °C: a warning, it costs no speed".to_owned()));
    }
    if let [Some(voltage), Some(average), Some(peak)] = t.oc_counts {
        let peaks = "each halves the clocks for about 1 ms; thousands are normal in MAXN_SUPER";
        let text = format!("{voltage} under-voltage, {average} average, {peak} peaks ({peaks})");
        rows.push(("over-current", text));
    }
    rows
}

fn held(helper: Option<&Answer>) -> Vec<Row> {
    let Some(answer) = helper else { return vec![("clock helper", "not running".to_owned())] };
    if answer.held.is_empty() {
        return vec![("clock helper", "running, holds nothing".to_owned())];
    }
    let one =
        |h: &crate::power::wire::Held| ("clock helper", format!("{} = {} (was {})", h.node, h.now, h.old));
    answer.held.iter().map(one).collect()
}
