//! Sensors that fail in the middle of work on a hot board: the fall-back comes, the board stays safe, and all is as
//! before when they heal.

use tegu::power::nodes::{Nodes, number};
use tegu::power::profile::Profile;
use tegu::power::sim::work::QWEN_1_5B_Q4;
use tegu::power::sim::{NodeFault, Options};
use tegu::power::trial::{self, Policy, traces};

use super::{markdown, nano};

const FROM_S: u64 = 300;
const TO_S: u64 = 600;

/// Faults: name, what each zone's file does, and whether the file of power stops too.
fn faults() -> [(&'static str, NodeFault, bool); 5] {
    [
        ("EAGAIN", NodeFault::Again, false),
        ("missing", NodeFault::Missing, false),
        ("frozen", NodeFault::Frozen, false),
        ("absurd", NodeFault::Says("-256000".into()), false),
        ("no number, and no power either", NodeFault::Says("garbage".into()), true),
    ]
}

struct Seen {
    /// Seconds from the fault until the fall-back, and whether it was left again after healing.
    after_s: Option<f64>,
    healed: bool,
    hottest_c: f64,
    /// Highest GPU clock while the fall-back was in place.
    most_mhz: u64,
    /// The profile's fall-back.
    cap_mhz: u64,
}

fn run(fault: &NodeFault, power_too: bool) -> Seen {
    let options = Options { ambient_c: 45.0, sink_c_per_w: Some(2.5), ..Options::default() };
    let board = nano("MAXN_SUPER", options);
    let profile = Profile::find("balanced", "orin-nano-8-super").unwrap();
    let cap_mhz = profile.fallback.gpu_cap_hz / 1_000_000;
    let mut seen = Seen { after_s: None, healed: false, hottest_c: 0.0, most_mhz: 0, cap_mhz };
    let mut set = false;
    let inside = board.clone();
    let mut paths = board.zone_paths();
    if power_too {
        let folder = "/sys/class/hwmon/hwmon1";
        let names = inside.list(folder).unwrap().into_iter().filter(|n| n.ends_with("_input"));
        paths.extend(names.map(|n| format!("{folder}/{n}")));
    }
    let mut each = |row: trial::Row| {
        let at_s = row.sample.at_us / 1_000_000;
        let wanted = (FROM_S..TO_S).contains(&at_s);
        if wanted != set {
            set = wanted;
            for path in &paths {
                // A block that is off stays off.
                if !wanted || inside.read(path).is_ok() {
                    inside.fault(path, wanted.then(|| fault.clone()));
                }
            }
        }
        let is_fallback = row.why.contains("fall-back");
        if is_fallback && wanted {
            seen.after_s.get_or_insert(row.sample.at_us as f64 / 1e6 - FROM_S as f64);
            let gpu_hz: u64 = number(inside.as_ref(), "/sys/class/devfreq/17000000.gpu/cur_freq").unwrap();
            // A clock needs its time to settle: the row that brings the fall-back is too early.
            if row.sample.at_us as f64 / 1e6 - FROM_S as f64 > seen.after_s.unwrap_or(0.0) + 1.0 {
                seen.most_mhz = seen.most_mhz.max(gpu_hz / 1_000_000);
            }
        }
        seen.healed = !is_fallback;
        seen.hottest_c = seen.hottest_c.max(row.junction_c);
    };
    let policy = Policy::Governed(Box::new(profile));
    trial::watch(&board, &QWEN_1_5B_Q4, &traces::full(1_800), 900_000_000, &policy, &mut each);
    seen
}

#[test]
fn a_failing_sensor_leads_to_the_fall_back_and_back() {
    for (name, fault, power_too) in faults() {
        let seen = run(&fault, power_too);
        let after_s = seen.after_s.unwrap_or_else(|| panic!("{name}: no fall-back"));
        assert!(after_s <= 30.0, "{name}: fall-back after {after_s} s");
        assert!(seen.most_mhz <= seen.cap_mhz && seen.most_mhz > 0, "{name}: {} MHz", seen.most_mhz);
        assert!(seen.healed, "{name}: the fall-back stayed");
        assert!(seen.hottest_c <= 88.0, "{name}: {:.1} °C", seen.hottest_c);
    }
}

pub fn report() -> String {
    let rows: Vec<Vec<String>> = faults()
        .iter()
        .map(|(name, fault, power_too)| {
            let seen = run(fault, *power_too);
            vec![
                name.to_string(),
                seen.after_s.map_or("never".into(), |s| format!("{s:.1}")),
                format!("{} of {}", seen.most_mhz, seen.cap_mhz),
                format!("{:.1}", seen.hottest_c),
                if seen.healed { "yes".into() } else { "no".into() },
            ]
        })
        .collect();
    let head = ["every temperature", "fall-back after s", "GPU MHz then, of", "hottest °C", "healed"];
    "## 6. Sensors that fail\n\nBalanced profile, ambient 45 °C, R3 2.5, work without a break; all temperature files fail from 300 to 600 s.\n\n".to_owned()
        + &markdown(&head, &rows)
}
