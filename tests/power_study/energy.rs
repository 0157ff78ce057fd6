//! Energy of three ways of use, against the stock modes, with what an exhaustive search finds.

use std::sync::OnceLock;

use tegu::power::profile::Profile;
use tegu::power::sim::Options;
use tegu::power::sim::physics::{self, At};
use tegu::power::sim::spec::{EMC_HZ, NANO_SUPER};
use tegu::power::sim::work::{QWEN_1_5B_Q4, Work};
use tegu::power::trial::{self, Job, Outcome, Policy, traces};
use tegu::power::types::Clocks;

use super::{markdown, nano, percent};

const HOUR_US: u64 = 3_600_000_000;

/// A way of use: name, trace, and the batch that its decode has under a limit.
fn uses() -> [(&'static str, Vec<Job>); 3] {
    [
        ("chat, 20% busy", traces::chat(3600)),
        ("long prompts", traces::long_prompts(3600)),
        ("background batch", traces::background(256)),
    ]
}

fn run(mode: &str, jobs: &[Job], policy: &Policy) -> Outcome {
    trial::run(&nano(mode, Options::default()), &QWEN_1_5B_Q4, jobs, HOUR_US, policy)
}

fn efficiency() -> Policy {
    Policy::Governed(Box::new(Profile::find("efficiency", "orin-nano-8-super").unwrap()))
}

fn clocks(gpu_hz: u64, emc_hz: u64) -> Clocks {
    Clocks { gpu_cap_hz: Some(gpu_hz), emc_floor_hz: Some(emc_hz), ..Clocks::default() }
}

fn at(gpu_hz: u64, emc_hz: u64) -> At {
    At { gpu_hz, emc_hz, cpu_khz: 1_728_000, sms: 8 }
}

/// Energy above idle and time of one token of a phase at a setting.
fn token(work: &Work, tokens: f64, at: &At, idle_w: f64) -> (f64, f64) {
    let cost = physics::cost(&NANO_SUPER, work, at);
    let power = physics::power(&NANO_SUPER, &cost, at).total_w();
    ((power - idle_w) * cost.ms / 1e3 / tokens, cost.ms / tokens)
}

/// Every GPU cap, memory clock and batch of each phase: the setting of least energy an hour that is within 10% of the
/// stock mode's speed in its phase. Phases follow one another, so that the hour's energy is the sum of theirs and the
/// best of all combinations is the best of each phase.
fn search(batches: &[u32], stock_batch: u32, prompt: u32) -> (Policy, usize) {
    let all = || NANO_SUPER.gpu_hz.iter().flat_map(|&g| EMC_HZ.iter().map(move |&e| (g, e)));
    let idle = |g: u64, e: u64| physics::power(&NANO_SUPER, &Default::default(), &at(g, e)).total_w();
    let (idle_g, idle_e) = all().min_by(|a, b| idle(a.0, a.1).total_cmp(&idle(b.0, b.1))).unwrap();
    let idle_w = idle(idle_g, idle_e);
    let chunk = prompt.min(512);
    let prefill = Work::Prefill { model: &QWEN_1_5B_Q4, tokens: chunk, past: prompt / 2 };
    let decode = |batch: u32| Work::Decode { model: &QWEN_1_5B_Q4, batch, context: prompt, steps: 1 };
    let stock = at(1_020_000_000, EMC_HZ[2]);
    let stock_prefill_ms = token(&prefill, 1.0, &stock, 0.0).1;
    let stock_decode_ms = token(&decode(stock_batch), stock_batch as f64, &stock, 0.0).1;
    let mut tried = 0;
    let mut best = [(f64::MAX, 0, 0, 0); 2];
    for (g, e) in all() {
        tried += 1;
        let (joules, ms) = token(&prefill, 1.0, &at(g, e), idle_w);
        if ms <= stock_prefill_ms / 0.9 && joules < best[0].0 {
            best[0] = (joules, g, e, 0);
        }
        for &batch in batches {
            tried += 1;
            let (joules, ms) = token(&decode(batch), batch as f64, &at(g, e), idle_w);
            if ms <= stock_decode_ms / 0.9 && joules < best[1].0 {
                best[1] = (joules, g, e, batch);
            }
        }
    }
    let max_batch = best[1].3 as usize;
    let phase = |b: (f64, u64, u64, u32)| clocks(b.1, b.2);
    let idle = Clocks { gpu_cap_hz: Some(idle_g), emc_floor_hz: Some(idle_e), ..Clocks::default() };
    (Policy::Fixed { clocks: [phase(best[0]), phase(best[1]), idle], max_batch }, tried + 32)
}

/// What a way of use takes under four policies: stock MAXN_SUPER, the 25 W mode, the efficiency profile, the search's
/// best.
struct Case {
    name: &'static str,
    outcomes: [Outcome; 4],
    tried: usize,
    found: String,
}

/// All cases, run once for the test and the report.
fn cases() -> &'static [Case] {
    static CASES: OnceLock<Vec<Case>> = OnceLock::new();
    CASES.get_or_init(run_cases)
}

fn run_cases() -> Vec<Case> {
    let one = |(name, jobs): (&'static str, Vec<Job>)| {
        // One request at a time has no batch to choose; a pile of them has.
        let is_pile = jobs.iter().all(|j| j.at_us == 0);
        let (batches, stock_batch): (&[u32], u32) = if is_pile { (&[1, 2, 4, 8, 16], 8) } else { (&[1], 1) };
        let (best, tried) = search(batches, stock_batch, jobs[0].prompt_tokens);
        let found = match &best {
            Policy::Fixed { clocks, max_batch } => {
                let mhz = |c: &Clocks| {
                    let hz = |v: Option<u64>| v.unwrap_or(0) as f64 / 1e6;
                    format!("{}/{}", hz(c.gpu_cap_hz), hz(c.emc_floor_hz))
                };
                format!(
                    "prefill {}, decode {}, idle {}, batch {max_batch}",
                    mhz(&clocks[0]),
                    mhz(&clocks[1]),
                    mhz(&clocks[2])
                )
            }
            _ => String::new(),
        };
        let outcomes = [
            run("MAXN_SUPER", &jobs, &Policy::Stock),
            run("25W", &jobs, &Policy::Stock),
            run("MAXN_SUPER", &jobs, &efficiency()),
            run("MAXN_SUPER", &jobs, &best),
        ];
        Case { name, outcomes, tried, found }
    };
    uses().into_iter().map(one).collect()
}

/// Share of the search's saving over the stock mode that the profile reaches.
fn reached(case: &Case) -> f64 {
    let [stock, _, ours, best] = &case.outcomes;
    (stock.j_per_hour() - ours.j_per_hour()) / (stock.j_per_hour() - best.j_per_hour())
}

#[test]
fn the_efficiency_profile_saves_what_a_search_can_save() {
    for case in cases() {
        let [stock, _, ours, best] = &case.outcomes;
        assert_eq!(stock.output_tokens, ours.output_tokens, "{}: equal work", case.name);
        assert_eq!(stock.output_tokens, best.output_tokens, "{}: equal work", case.name);
        assert!(best.j_per_hour() < stock.j_per_hour(), "{}: the search saves something", case.name);
        assert!(reached(case) >= 0.95, "{}: {:.3} of the search's saving", case.name, reached(case));
        for (who, o) in [("profile", ours), ("search", best)] {
            assert!(o.decode_tok_s() >= 0.9 * stock.decode_tok_s(), "{}, {who}: decode", case.name);
            assert!(o.prefill_tok_s() >= 0.9 * stock.prefill_tok_s(), "{}, {who}: prefill", case.name);
        }
    }
}

/// One setting changed at a time, on long prompts.
fn variations() -> Vec<(&'static str, Outcome)> {
    const MHZ: u64 = 1_000_000;
    let base = [clocks(918 * MHZ, EMC_HZ[2]), clocks(918 * MHZ, EMC_HZ[2]), Clocks::default()];
    let with = |phase: usize, c: Clocks| {
        let mut all = base;
        all[phase] = c;
        all
    };
    let long = traces::long_prompts(3600);
    [
        ("918 / 2133 in both phases", base),
        ("prefill capped to 612", with(0, clocks(612 * MHZ, EMC_HZ[2]))),
        ("prefill uncapped", with(0, clocks(1020 * MHZ, EMC_HZ[2]))),
        ("prefill with memory at 3199", with(0, clocks(918 * MHZ, EMC_HZ[3]))),
        ("decode with memory at 3199", with(1, clocks(918 * MHZ, EMC_HZ[3]))),
        ("decode capped to 612", with(1, clocks(612 * MHZ, EMC_HZ[2]))),
        ("decode with memory at 665.6", with(1, clocks(918 * MHZ, EMC_HZ[1]))),
        ("idle with memory at 204", with(2, clocks(306 * MHZ, EMC_HZ[0]))),
    ]
    .into_iter()
    .map(|(name, clocks)| (name, run("MAXN_SUPER", &long, &Policy::Fixed { clocks, max_batch: 8 })))
    .collect()
}

/// The table of variations, and in words where a cap of a phase does not pay.
fn phase_caps() -> String {
    let all = variations();
    let first = &all[0].1;
    let hour = |n: usize| percent(all[n].1.j_per_hour() / first.j_per_hour() - 1.0);
    let row = |(n, (name, o)): (usize, &(&str, Outcome))| {
        vec![
            name.to_string(),
            format!("{:.0} ({})", o.j_per_hour(), hour(n)),
            format!("{:.1}", o.peak_w),
            format!("{:.2}", o.mean_ttft_s()),
            format!("{:.0}", o.prefill_tok_s()),
            format!("{:.1}", o.decode_tok_s()),
        ]
    };
    let rows: Vec<Vec<String>> = all.iter().enumerate().map(row).collect();
    let slower = |pick: fn(&Outcome) -> f64, n: usize| percent(pick(&all[n].1) / pick(first) - 1.0);
    let (speed, ttft) = (|o: &Outcome| o.decode_tok_s(), |o: &Outcome| o.mean_ttft_s());
    let words = [
        "**Where phase caps do not pay.**".into(),
        format!("Capping prefill from 918 to 612 MHz changes the hour's energy by {} and the time to the first token by {}:", hour(1), slower(ttft, 1)),
        "it buys peak power and heat, no energy to speak of, so that only the thermal rule and the profiles silent and battery do it.".into(),
        format!("Capping decode from 918 to 612 changes energy by {} and speed by {}.", hour(5), slower(speed, 5)),
        format!("Memory at 3199 MHz costs energy in prefill ({}) and in decode ({}, for {} speed);", hour(3), hour(4), slower(speed, 4)),
        format!("memory at 665.6 MHz in decode costs {} and {} speed.", hour(6), slower(speed, 6)),
        format!("Holding memory at 204 MHz while idle gives {}: the fit has next to no idle power in it, nobody has published a board's,", hour(7)),
        "and every other program on the board would pay; no profile does it. What pays is the step from 1020 to 918 MHz (the last step of voltage)".into(),
        "and, where there are many requests, the batch: one pass over the weights for up to 16 sequences.".into(),
    ];
    let table = markdown(&["", "J/hour", "peak W", "TTFT s", "prefill tok/s", "decode tok/s"], &rows);
    format!(
        "**One setting changed at a time** (long prompts; GPU / memory MHz)\n\n{table}{}\n\n",
        words.join("\n")
    )
}

pub fn report() -> String {
    let mut text = String::from(
        "## 3. Energy of three ways of use\n\nAn hour each, equal work, idle included. *Search* is the least J/hour over every GPU cap, memory clock and batch of each phase, none slower than 90% of stock MAXN_SUPER. Bar: the profile reaches 95% of the search's saving.\n\n",
    );
    for case in cases() {
        let names = ["stock MAXN_SUPER", "stock 25W", "efficiency profile", "search"];
        let rows: Vec<Vec<String>> = names
            .iter()
            .zip(&case.outcomes)
            .map(|(name, o)| {
                vec![
                    name.to_string(),
                    format!("{:.3}", o.j_per_token()),
                    format!("{:.0}", o.j_per_hour()),
                    percent(o.j_per_hour() / case.outcomes[0].j_per_hour() - 1.0),
                    format!("{:.1}", o.peak_w),
                    format!("{:.2}", o.mean_ttft_s()),
                    format!("{:.0}", o.prefill_tok_s()),
                    format!("{:.1}", o.decode_tok_s()),
                ]
            })
            .collect();
        text += &format!("**{}**\n\n", case.name);
        text += &markdown(
            &["", "J/token", "J/hour", "against stock", "peak W", "TTFT s", "prefill tok/s", "decode tok/s"],
            &rows,
        );
        text += &format!(
            "Search over {} settings found: {}. The profile reaches {:.1}% of its saving.\n\n",
            case.tried,
            case.found,
            reached(case) * 100.0
        );
    }
    text + &phase_caps()
}
