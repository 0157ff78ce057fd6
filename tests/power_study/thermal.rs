//! Heat: ambient 45 °C and two sinks, work without a break, against the best fixed setting that stays cool enough.

use std::sync::OnceLock;

use tegu::power::profile::Profile;
use tegu::power::sim::Options;
use tegu::power::sim::spec::{EMC_HZ, NANO_SUPER};
use tegu::power::sim::work::QWEN_1_5B_Q4;
use tegu::power::trial::{self, Outcome, Policy, traces};
use tegu::power::types::Clocks;

use super::{markdown, nano};

/// How long a trial may take to end once it is asked for; with work left it takes twice that: an hour for the governor, and for
/// fixed settings six times the 300 s in which a sink settles.
const SPAN_S: u64 = 1_800;
const FIXED_SPAN_S: u64 = 900;
const SINKS: [f64; 2] = [2.0, 2.5];
const PROFILES: [&str; 2] = ["balanced", "latency"];

/// Loads without a break: requests side by side, and one long answer after another.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Load {
    Many,
    One,
}

fn run(sink: f64, load: Load, span_s: u64, policy: &Policy) -> Outcome {
    let options = Options { ambient_c: 45.0, sink_c_per_w: Some(sink), ..Options::default() };
    let board = nano("MAXN_SUPER", options);
    // Twice the span is the most that a trial takes: there is always more work.
    let jobs = match load {
        Load::Many => traces::full(2 * span_s),
        Load::One => traces::singles(2 * span_s),
    };
    trial::run(&board, &QWEN_1_5B_Q4, &jobs, span_s * 1_000_000, policy)
}

fn tok_s(o: &Outcome) -> f64 {
    o.output_tokens as f64 / o.seconds
}

/// The fastest of all GPU caps and memory clocks, the same throughout, whose junction stays under 85 °C.
fn best_fixed(sink: f64, load: Load, max_batch: usize) -> (String, Outcome) {
    let mut best: Option<(String, Outcome)> = None;
    for &gpu in NANO_SUPER.gpu_hz {
        for emc in EMC_HZ {
            let clocks = Clocks { gpu_cap_hz: Some(gpu), emc_floor_hz: Some(emc), ..Clocks::default() };
            let outcome = run(sink, load, FIXED_SPAN_S, &Policy::Fixed { clocks: [clocks; 3], max_batch });
            let is_better = best.as_ref().is_none_or(|(_, b)| tok_s(&outcome) > tok_s(b));
            if outcome.hottest_c < 85.0 && is_better {
                best = Some((format!("{} / {}", gpu / 1_000_000, emc as f64 / 1e6), outcome));
            }
        }
    }
    best.expect("the slowest setting stays cool")
}

struct Case {
    profile: &'static str,
    load: Load,
    sink: f64,
    ours: Outcome,
    setting: String,
    fixed: Outcome,
}

/// All cases, run once for the test and the report.
fn cases() -> &'static [Case] {
    static CASES: OnceLock<Vec<Case>> = OnceLock::new();
    CASES.get_or_init(run_cases)
}

fn run_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for sink in SINKS {
        for name in PROFILES {
            for load in [Load::Many, Load::One] {
                let mut profile = Profile::find(name, "orin-nano-8-super").unwrap();
                if load == Load::One {
                    profile.max_batch = 1;
                }
                let (setting, fixed) = best_fixed(sink, load, profile.max_batch);
                let ours = run(sink, load, SPAN_S, &Policy::Governed(Box::new(profile)));
                cases.push(Case { profile: name, load, sink, ours, setting, fixed });
            }
        }
    }
    cases
}

#[test]
fn heat_is_held_with_few_steps_and_little_loss() {
    for Case { profile, load, sink, ours, setting, fixed } in cases() {
        let name = format!("{profile}, {load:?}");
        assert!(ours.hottest_c <= 86.0, "{name}, R3 {sink}: {:.1} °C", ours.hottest_c);
        let most = ours.most_changes_a_minute();
        assert!(most <= 4, "{name}, R3 {sink}: {most} changes within a minute");
        let share = tok_s(ours) / tok_s(fixed);
        assert!(share >= 0.9, "{name}, R3 {sink}: {share:.3} of the best fixed setting ({setting})");
    }
}

pub fn report() -> String {
    let rows: Vec<Vec<String>> = cases()
        .iter()
        .map(|Case { profile, load, sink, ours, setting, fixed }| {
            vec![
                format!("{profile}, {}", if *load == Load::Many { "batch" } else { "single" }),
                format!("{sink:.1}"),
                format!("{:.1}", ours.hottest_c),
                format!("{}", ours.most_changes_a_minute()),
                format!("{:.1}", tok_s(ours)),
                setting.clone(),
                format!("{:.1}", fixed.hottest_c),
                format!("{:.1}", tok_s(fixed)),
                format!("{:.0}%", 100.0 * tok_s(ours) / tok_s(fixed)),
            ]
        })
        .collect();
    let head = [
        "profile",
        "R3 °C/W",
        "hottest °C",
        "most steps a minute",
        "tok/s",
        "best fixed MHz",
        "its °C",
        "its tok/s",
        "share",
    ];
    "## 5. Heat\n\nAmbient 45 °C, work without a break for an hour (batch: requests of 512 + 256 tokens side by side; single: 128 + 1024, one at a time), from a board at rest. Bars: 86 °C, 4 step changes a minute, 90% of the best fixed setting that stays under 85 °C (all 32 were run, with the profile's batch).\n\n".to_owned()
        + &markdown(&head, &rows)
}
