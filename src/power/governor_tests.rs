//! The governor as a table: what it is told, and what it must answer.

use super::super::types::{Fault, Rail, SensorFault, Throttle, Zone};
use super::*;

const S: u64 = 1_000_000;
const MHZ: u64 = 1_000_000;

fn ladder() -> Ladder {
    let table: Vec<u64> = (3..=10).map(|n| n * 102 * MHZ).collect();
    Ladder::new(&table, Some(1020 * MHZ), &[204 * MHZ, 665_600_000, 2133 * MHZ, 3199 * MHZ])
}

fn profile(name: &str) -> Profile {
    Profile::find(name, "orin-nano-8-super").unwrap()
}

fn sample(at_s: u64, temp_c: f64, total_w: f64) -> Sample {
    // A living sensor moves by its last digit.
    let jitter_mc = if at_s.is_multiple_of(2) { 31 } else { 0 };
    Sample {
        at_us: at_s * S,
        rails: vec![Rail { label: "VDD_IN".into(), power_mw: (total_w * 1e3) as u32, volt_mv: None }],
        total_mw: Some((total_w * 1e3) as u32),
        zones: vec![Zone { kind: "tj-thermal".into(), temp_mc: (temp_c * 1e3) as i32 - jitter_mc }],
        ..Sample::default()
    }
}

struct Case {
    profile: Profile,
    state: State,
    last: Option<Decision>,
}

impl Case {
    fn new(name: &str) -> Case {
        Case { profile: profile(name), state: State::default(), last: None }
    }

    fn tell(&mut self, sample: &Sample, phase: Phase) -> &Decision {
        let inputs = Inputs {
            now_us: sample.at_us,
            sample: Some(sample),
            phase,
            demand: Demand { waiting: 0, running: 1 },
        };
        let (decision, state) = decide(&self.profile, &ladder(), &self.state, &inputs);
        self.state = state;
        self.last.insert(decision)
    }
}

#[test]
fn a_cool_board_gets_its_profile_by_phase() {
    let mut case = Case::new("balanced");
    let p = case.profile.clone();
    for phase in Phase::ALL {
        let decision = case.tell(&sample(1, 50.0, 8.0), phase).clone();
        assert_eq!(decision.clocks, p.clocks[phase.index()]);
        assert_eq!(decision.why, []);
        let budget = Budget { max_batch: p.max_batch, prefill_chunk: p.prefill_chunk, pause: false };
        assert_eq!(decision.budget, budget);
    }
    // An idle board with a request at the door already has prefill's clocks.
    let now = sample(2, 50.0, 8.0);
    let demand = Demand { waiting: 1, running: 0 };
    let inputs = Inputs { now_us: now.at_us, sample: Some(&now), phase: Phase::Idle, demand };
    let (decision, _) = decide(&p, &ladder(), &case.state, &inputs);
    assert_eq!(decision.clocks, p.clocks[Phase::Prefill.index()]);
}

/// Temperature held for a while → steps, GPU cap of decode and of prefill, prompt chunk.
#[test]
fn heat_steps_down_halves_prefill_and_favours_memory() {
    // Memory keeps its clock until the GPU is too slow to use it.
    let table: [(f64, u32, u64, u64, u64, usize); 4] = [
        (84.0, 0, 918, 3199, 1020, 512),
        (85.0, 1, 816, 3199, 510, 256),
        (87.5, 2, 714, 3199, 510, 256),
        (90.0, 3, 612, 2133, 510, 256),
    ];
    for (temp_c, steps, decode_mhz, emc_mhz, prefill_mhz, chunk) in table {
        let mut case = Case::new("balanced");
        let decode = case.tell(&sample(1, temp_c, 15.0), Phase::Decode).clone();
        assert_eq!(case.state.heat_steps(), steps, "{temp_c}");
        assert_eq!(decode.clocks.gpu_cap_hz, Some(decode_mhz * MHZ), "{temp_c}");
        assert_eq!(decode.clocks.emc_floor_hz, Some(emc_mhz * MHZ), "{temp_c}");
        let prefill = case.tell(&sample(2, temp_c, 15.0), Phase::Prefill).clone();
        let cap = prefill.clocks.gpu_cap_hz.unwrap_or(1020 * MHZ);
        assert_eq!((cap, prefill.budget.prefill_chunk), (prefill_mhz * MHZ, chunk), "{temp_c}");
    }
    // All the way: the GPU's table is used up.
    let mut case = Case::new("balanced");
    for n in 0..40 {
        case.tell(&sample(1 + 21 * n, 93.0, 15.0), Phase::Decode);
    }
    let last = case.last.unwrap();
    assert_eq!(last.clocks.gpu_cap_hz, Some(306 * MHZ));
    assert_eq!(last.clocks.emc_floor_hz, Some(2133 * MHZ));
}

#[test]
fn steps_keep_their_distance_and_come_back_with_hysteresis() {
    let mut case = Case::new("balanced");
    let mut changes = Vec::new();
    // Hot for 5 minutes, then just under the start for 2, then cool.
    for at in 1..=900 {
        let temp_c = if at < 300 {
            86.0
        } else if at < 420 {
            84.0
        } else {
            70.0
        };
        let before = case.state.changes;
        case.tell(&sample(at, temp_c, 15.0), Phase::Decode);
        if case.state.changes != before {
            changes.push((at, case.state.heat_steps()));
        }
        if at == 419 {
            assert!(case.state.heat_steps() > 4, "84 °C lies inside the hysteresis: nothing comes back");
        }
    }
    assert!(changes.windows(2).all(|w| w[1].0 - w[0].0 >= 20), "{changes:?}");
    assert_eq!(changes.last().unwrap().1, 0, "{changes:?}");
}

#[test]
fn a_wide_batch_has_a_ceiling_of_its_own() {
    let mut profile = profile("efficiency");
    profile.wide = Some(super::super::profile::Wide { from_batch: 12, gpu_cap_hz: 408 * MHZ });
    let cool = sample(1, 50.0, 10.0);
    let cap = |phase: Phase, running: usize| {
        let demand = Demand { waiting: 0, running };
        let inputs = Inputs { now_us: S, sample: Some(&cool), phase, demand };
        decide(&profile, &ladder(), &State::default(), &inputs).0.clocks.gpu_cap_hz
    };
    assert_eq!(cap(Phase::Decode, 11), Some(918 * MHZ));
    assert_eq!(cap(Phase::Decode, 12), Some(408 * MHZ));
    assert_eq!(cap(Phase::Prefill, 12), Some(918 * MHZ));
}

/// A board that heats fast is caught before it is too hot.
#[test]
fn a_rising_temperature_counts_before_it_is_there() {
    let mut case = Case::new("balanced");
    for at in 1..60 {
        case.tell(&sample(at, 70.0 + at as f64 * 0.25, 15.0), Phase::Decode);
        if case.state.heat_steps() > 0 {
            break;
        }
    }
    let at_c = case.state.fast_c;
    assert!(case.state.heat_steps() > 0 && at_c < 83.0, "stepped at {at_c} °C");
}

#[test]
fn an_emergency_pauses_until_it_is_cool() {
    let mut case = Case::new("balanced");
    let temps = [(94.9, false), (95.0, true), (90.0, true), (85.1, true), (85.0, false), (90.0, false)];
    for (n, (temp_c, pause)) in temps.into_iter().enumerate() {
        let decision = case.tell(&sample(1 + 2 * n as u64, temp_c, 15.0), Phase::Decode).clone();
        assert_eq!(decision.budget.pause, pause, "{temp_c}");
        if pause {
            assert_eq!(decision.clocks.gpu_cap_hz, Some(306 * MHZ));
            assert!(decision.why.contains(&Why::Pause));
        }
    }
}

#[test]
fn a_watt_cap_is_kept_and_given_back() {
    let mut case = Case::new("battery");
    let cap_w = case.profile.cap_mw.unwrap() as f64 / 1e3;
    let mut power_w = cap_w * 1.3;
    let mut at = 1;
    // Each step down takes 7% in this world.
    while at < 60 {
        case.tell(&sample(at, 60.0, power_w), Phase::Decode);
        power_w = cap_w * 1.3 * (1.0 - 0.07 * case.state.watt_steps as f64);
        at += 1;
    }
    assert!(power_w <= cap_w && power_w > cap_w * 0.85, "{power_w} W of {cap_w}");
    let steps = case.state.watt_steps;
    assert!(case.last.as_ref().unwrap().why.contains(&Why::Watts(steps)));
    // An idle board proves nothing; a busy one that draws little does.
    for at in 60..120 {
        case.tell(&sample(at, 60.0, 4.0), Phase::Idle);
    }
    assert_eq!(case.state.watt_steps, steps);
    for at in 120..240 {
        case.tell(&sample(at, 60.0, 4.0), Phase::Decode);
    }
    assert_eq!(case.state.watt_steps, 0);
}

/// Each way that a sensor fails, in samples as the sensors give them: the fall-back comes, and goes when all is well
/// for a while.
#[test]
fn a_sensor_that_cannot_be_trusted_puts_the_fall_back_in_place() {
    let fault = |sensor: &str, fault: Fault| SensorFault { sensor: sensor.into(), fault };
    let gone = |at: u64| Sample { zones: Vec::new(), ..sample(at, 0.0, 15.0) };
    let absurd = |at: u64| Sample { faults: vec![fault("tj-thermal", Fault::Absurd)], ..gone(at) };
    // A cool neighbour does not stand in for the die.
    let neighbour = |at: u64| Sample {
        zones: vec![Zone { kind: "tboard".into(), temp_mc: 40_000 }],
        faults: vec![fault("tj-thermal", Fault::Frozen)],
        ..sample(at, 0.0, 15.0)
    };
    let no_power = |at: u64| Sample { total_mw: None, rails: Vec::new(), ..sample(at, 60.0, 0.0) };
    type Bad<'a> = &'a dyn Fn(u64) -> Sample;
    let cases: [(&str, Bad, bool); 5] = [
        ("balanced", &gone, true),
        ("balanced", &absurd, true),
        ("balanced", &neighbour, true),
        ("battery", &no_power, true),
        // Without a cap nobody needs the power.
        ("balanced", &no_power, false),
    ];
    for (n, (name, bad, falls)) in cases.into_iter().enumerate() {
        let mut case = Case::new(name);
        for at in 1..=20 {
            case.tell(&sample(at, 60.0, 8.0), Phase::Decode);
        }
        // One bad reading is no reason yet.
        case.tell(&bad(21), Phase::Decode);
        assert!(!case.state.is_fault(), "case {n}");
        for at in 22..30 {
            case.tell(&bad(at), Phase::Decode);
        }
        assert_eq!(case.state.is_fault(), falls, "case {n}");
        let last = case.last.clone().unwrap();
        if falls {
            let fallback = case.profile.fallback;
            assert!(last.clocks.gpu_cap_hz.unwrap() <= fallback.gpu_cap_hz, "case {n}");
            assert!(last.budget.max_batch <= fallback.max_batch && !last.budget.pause, "case {n}");
            assert!(matches!(last.why[..], [Why::Fault(_)]), "case {n}: {:?}", last.why);
        }
        for at in 30..45 {
            case.tell(&sample(at, 60.0, 8.0), Phase::Decode);
        }
        assert!(!case.state.is_fault(), "case {n}: it healed");
    }
}

#[test]
fn a_silent_board_is_a_fault() {
    let mut case = Case::new("balanced");
    // Samples stop, or never come.
    let old = sample(60, 60.0, 5.0);
    case.tell(&old, Phase::Decode);
    for (sample, now_us) in [(Some(&old), 66 * S), (None, 0)] {
        let inputs = Inputs { now_us, sample, phase: Phase::Decode, demand: Demand::default() };
        let (decision, state) = decide(&case.profile, &ladder(), &case.state, &inputs);
        assert!(state.is_fault(), "{now_us}");
        assert_eq!(decision.clocks.gpu_cap_hz, Some(case.profile.fallback.gpu_cap_hz));
    }
}

#[test]
fn the_kernels_throttle_and_average_over_current_step_down() {
    let mut case = Case::new("balanced");
    let active = vec!["devfreq-17000000.gpu".to_owned()];
    let throttle = Throttle { active, ..Throttle::default() };
    let decision = case.tell(&Sample { throttle, ..sample(1, 70.0, 15.0) }, Phase::Decode).clone();
    assert_eq!(case.state.heat_steps(), 1);
    assert!(decision.why.iter().any(|w| w.to_string().contains("devfreq-17000000.gpu")));
    // Instantaneous events are everyday, average ones are not.
    let counts = |at: u64, oc_counts: [Option<u64>; 3]| {
        let throttle = Throttle { oc_counts, ..Throttle::default() };
        Sample { throttle, ..sample(at, 60.0, 15.0) }
    };
    let mut case = Case::new("battery");
    case.profile.cap_mw = Some(25_000);
    case.tell(&counts(1, [Some(0), Some(0), Some(5)]), Phase::Decode);
    case.tell(&counts(10, [Some(0), Some(0), Some(500)]), Phase::Decode);
    assert_eq!(case.state.watt_steps, 0);
    case.tell(&counts(20, [Some(0), Some(1), Some(500)]), Phase::Decode);
    assert_eq!(case.state.watt_steps, 1);
}

/// A board that tells no table keeps the profile's caps and still pauses and falls back.
#[test]
fn a_board_without_a_table_is_guarded_all_the_same() {
    let profile = profile("balanced");
    let hot = sample(1, 96.0, 15.0);
    let inputs = Inputs { now_us: S, sample: Some(&hot), phase: Phase::Decode, demand: Demand::default() };
    let (decision, _) = decide(&profile, &Ladder::default(), &State::default(), &inputs);
    assert!(decision.budget.pause);
    assert_eq!(Ladder::default().below(Some(918 * MHZ), 3), (Some(918 * MHZ), 3));
}
