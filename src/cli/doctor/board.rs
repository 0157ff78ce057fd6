//! The board's own items: what it is, what it measures, what may be steered.

use super::Item;
use crate::app::power::Site;
use crate::power::modes::{NVPMODEL_CONF, Table, current_mode};
use crate::power::sensors::{GPU_CLOCK, Sensors};
use crate::power::types::{BoardKind, JetPack, Sample, SensorFault};

/// Under this much memory no model of use fits.
const MEMORY_BYTES_MIN: u64 = 3 << 30;

/// All of them.
pub fn items(site: &Site) -> Vec<Item> {
    let mut sensors = site.sensors();
    let sample = sensors.sample();
    let is_jetson = sensors.board().kind.is_orin() || sensors.board().kind == BoardKind::Thor;
    let mut items = vec![board(&sensors), release(site, is_jetson)];
    if is_jetson {
        items.push(power_mode(site));
    }
    if is_jetson || sample.gpu_hz.is_some() {
        items.push(gpu_clock(&sample));
        items.push(memory_clock(&sensors, &sample, is_jetson));
    }
    items.extend([
        rails(&sensors, &sample, is_jetson),
        zones(&sensors, &sample, is_jetson),
        throttle(&sample, is_jetson),
    ]);
    items.push(memory(&sample));
    items.push(swap(&sample));
    items
}

fn board(sensors: &Sensors) -> Item {
    const WHY: &str = "clocks, rails and power modes are the board's own";
    let board = sensors.board();
    let name = board.title() + &board.model.as_ref().map_or(String::new(), |m| format!(": {m}"));
    match board.kind {
        BoardKind::Unknown => {
            let todo = "nothing, if this is no Jetson: power is then neither measured nor steered";
            Item::warn("board", name, WHY, todo)
        }
        _ => Item::ok("board", name, WHY),
    }
}

fn release(site: &Site, is_jetson: bool) -> Item {
    const WHY: &str = "JetPack 6 and 7 are supported; JetPack 5's CUDA 11.4 lacks what the kernels use";
    let board = &site.board;
    let Some(l4t) = &board.l4t else {
        return match is_jetson && board.simulation.is_none() {
            true => Item::warn(
                "jetson linux",
                "no /etc/nv_tegra_release",
                WHY,
                "use NVIDIA's Jetson Linux, R36 or later",
            ),
            false => Item::ok("jetson linux", "none: not a Jetson, or simulated", WHY),
        };
    };
    let found = l4t.to_string();
    match board.jetpack {
        JetPack::Five => Item::fail("jetson linux", found, WHY, "install JetPack 6 (R36) or 7 (R39)"),
        // The security fix of 4.7 makes NvMap refuse large blocks once memory is fragmented; 5.0 mends it.
        JetPack::Six if l4t.revision == "4.7" => {
            let why = "R36.4.7 refuses large GPU blocks once memory is fragmented, though memory is free";
            Item::warn(
                "jetson linux",
                found,
                why,
                "update to R36.5 (JetPack 6.2.2); until then load models soon after the start",
            )
        }
        JetPack::Other => Item::warn("jetson linux", found, WHY, "use R36 or R39: this one is unknown here"),
        JetPack::Six | JetPack::Seven => Item::ok("jetson linux", found, WHY),
    }
}

fn power_mode(site: &Site) -> Item {
    const WHY: &str =
        "the power mode caps every clock, and switches GPU units off: it bounds tokens a second";
    let table = site.nodes.read(NVPMODEL_CONF).map(|c| Table::parse(&c)).unwrap_or_default();
    let now = current_mode(site.nodes.as_ref());
    match now.and_then(|id| table.modes.iter().find(|m| m.id == id)) {
        Some(mode) => Item::ok(
            "power mode",
            format!("{} ({}), of {} modes", mode.name, mode.id, table.modes.len()),
            WHY,
        ),
        None => Item::warn(
            "power mode",
            "not known: no nvpmodel configuration, or no status",
            WHY,
            "install nvidia-l4t-nvpmodel",
        ),
    }
}

fn gpu_clock(s: &Sample) -> Item {
    const WHY: &str = "decode follows it up to the board's knee, prefill all the way";
    let mhz = |hz: Option<u64>| hz.map_or("?".to_owned(), |hz| format!("{:.0}", hz as f64 / 1e6));
    let found = format!("{} MHz, {} to {}", mhz(s.gpu_hz), mhz(s.gpu_min_hz), mhz(s.gpu_max_hz));
    if s.faults.iter().any(|f| f.sensor == GPU_CLOCK) {
        return Item::warn("gpu clock", "reads what no board can be", WHY, "see dmesg about the GPU");
    }
    if s.gpu_hz.is_none() {
        let todo =
            "wait, if the board has just started: the driver can come late; else see dmesg about the GPU";
        return Item::warn("gpu clock", "no devfreq node", WHY, todo);
    }
    match s.gpu_min_hz.is_some() && s.gpu_min_hz == s.gpu_max_hz {
        true => {
            let todo = "jetson_clocks --restore, if Tegu is to steer: pinned clocks are left alone";
            Item::warn("gpu clock", found + ": pinned (jetson_clocks?)", WHY, todo)
        }
        false => Item::ok("gpu clock", found, WHY),
    }
}

fn memory_clock(sensors: &Sensors, s: &Sample, is_jetson: bool) -> Item {
    const WHY: &str =
        "decode reads all weights a token; the stock governor left it at 2133 of 3199 MHz in MAXN_SUPER";
    let cap = s.emc_cap_hz.map_or(String::new(), |c| format!(", at most {:.0} MHz", c as f64 / 1e6));
    match s.emc_hz {
        Some(hz) => {
            let lock = if s.emc_locked == Some(true) { ", locked" } else { "" };
            Item::ok("memory clock", format!("{:.0} MHz{lock}{cap}", hz as f64 / 1e6), WHY)
        }
        None if is_jetson && !sensors.found().emc => {
            let todo = "look as root; steering needs tegu-clocks.service only";
            Item::warn("memory clock", format!("cannot be read: debugfs is root's{cap}"), WHY, todo)
        }
        None => Item::ok("memory clock", "not told", WHY),
    }
}

fn rails(sensors: &Sensors, s: &Sample, is_jetson: bool) -> Item {
    const WHY: &str = "J/token, the watt cap and the reports come from them";
    match s.total_mw {
        Some(mw) => {
            let of = sensors.total_of().join(" + ");
            let of = if of.is_empty() { "NVML".to_owned() } else { of };
            let found = format!("{:.2} W ({of}), {} rails", f64::from(mw) / 1e3, s.rails.len());
            Item::ok("rails", found + &left_out(s, |f| is_rail(sensors, f)), WHY)
        }
        None if is_jetson => {
            let found = format!("no total: {} rails found", sensors.found().rails.len())
                + &left_out(s, |f| is_rail(sensors, f));
            Item::warn(
                "rails",
                found,
                WHY,
                "see that the ina3221 driver is loaded (ls /sys/class/hwmon/*/name)",
            )
        }
        None => Item::ok("rails", "none here: energy is not measured", WHY),
    }
}

fn is_rail(sensors: &Sensors, f: &SensorFault) -> bool {
    sensors.found().rails.iter().any(|r| r.label == f.sensor)
}

/// Sensors that are not believed, by name.
fn left_out(s: &Sample, which: impl Fn(&SensorFault) -> bool) -> String {
    let faults = s.faults.iter().filter(|f| which(f));
    let named: Vec<String> =
        faults.map(|f| format!("{} {}", f.sensor, format!("{:?}", f.fault).to_lowercase())).collect();
    if named.is_empty() { String::new() } else { format!("; left out: {}", named.join(", ")) }
}

fn zones(sensors: &Sensors, s: &Sample, is_jetson: bool) -> Item {
    const WHY: &str = "the thermal policy steps in at 85 °C, 14 °C before the kernel does";
    match s.hottest() {
        // A block that is off answers nonsense on some releases; that is normal and named.
        Some(z) => {
            let named = left_out(s, |f| !is_rail(sensors, f) && !f.sensor.ends_with(" clock"));
            Item::ok(
                "zones",
                format!(
                    "{} zones, hottest {:.1} °C ({}){named}",
                    s.zones.len(),
                    f64::from(z.temp_mc) / 1e3,
                    z.kind
                ),
                WHY,
            )
        }
        None if is_jetson => Item::fail(
            "zones",
            "no temperature at all",
            WHY,
            "see /sys/class/thermal: without one Tegu steers by its safe fall-back",
        ),
        None => Item::ok("zones", "none here", WHY),
    }
}

fn throttle(s: &Sample, is_jetson: bool) -> Item {
    const WHY: &str = "the kernel or the firmware holds clocks back, whatever is asked";
    let t = &s.throttle;
    let now: Vec<&str> = t.active.iter().chain(&t.gpu_reasons).map(String::as_str).collect();
    let count = |n: usize| t.oc_counts[n].map_or("?".into(), |c| c.to_string());
    let counts = format!(
        "over-current events since boot: {} under-voltage, {} average, {} peaks",
        count(0),
        count(1),
        count(2)
    );
    if !now.is_empty() {
        return Item::warn(
            "throttling",
            format!("now: {}; {counts}", now.join(", ")),
            WHY,
            "cool the board, or take a lower power mode or profile",
        );
    }
    // Peaks are normal in MAXN_SUPER; the other two are not.
    if t.oc_counts[..2].iter().any(|c| c.is_some_and(|c| c > 0)) {
        return Item::warn("throttling", counts, WHY, "use a stronger supply, or a lower power mode");
    }
    match t.oc_counts[2] {
        None if is_jetson => {
            Item::warn("throttling", "no over-current counters", WHY, "nothing: this kernel lacks them")
        }
        None => Item::ok("throttling", "none", WHY),
        Some(_) => Item::ok("throttling", format!("none; {counts}"), WHY),
    }
}

fn memory(s: &Sample) -> Item {
    const WHY: &str = "weights, the cache and the robot's own programs share it";
    let Some(m) = s.memory else { return Item::ok("memory", "not told", WHY) };
    let gib = |b: u64| b as f64 / f64::from(1u32 << 30);
    let found = format!("{:.1} GiB available of {:.1}", gib(m.available_bytes), gib(m.total_bytes));
    match m.available_bytes < MEMORY_BYTES_MIN {
        true => Item::warn(
            "memory",
            found,
            WHY,
            "end what is not needed (a desktop takes 1 to 2 GiB: systemctl isolate multi-user.target)",
        ),
        false => Item::ok("memory", found, WHY),
    }
}

fn swap(s: &Sample) -> Item {
    const WHY: &str = "a model whose pages are swapped runs at a hundredth of its speed";
    let Some(m) = s.memory else { return Item::ok("swap", "not told", WHY) };
    let mib = |b: u64| b >> 20;
    let found = format!("{} MiB used of {}", mib(m.swap_used_bytes), mib(m.swap_total_bytes));
    match m.swap_used_bytes > m.total_bytes / 8 {
        true => Item::warn("swap", found, WHY, "free memory before a model is loaded"),
        false => Item::ok("swap", found, WHY),
    }
}
