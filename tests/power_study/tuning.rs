//! The tuner on a simulated board with noise and lagging meters, against the exhaustive sweep.

use std::sync::Arc;

use tegu::power::nodes::Nodes;
use tegu::power::sim::Options;
use tegu::power::sim::physics::{self, At};
use tegu::power::sim::spec::{EMC_HZ, NANO_SUPER};
use tegu::power::sim::work::{QWEN_1_5B_Q4, Work};
use tegu::power::tune::front::{Goals, hypervolume};
use tegu::power::tune::{Goal, Measured, Setting, Space, Tuning, tune};

use super::{markdown, nano};

fn space() -> Space {
    Space { gpu_hz: NANO_SUPER.gpu_hz.to_vec(), emc_hz: EMC_HZ.to_vec(), batch: vec![1, 2, 4, 8, 16] }
}

/// What a setting truly gives.
fn truth(s: &Setting) -> Measured {
    let at = At { gpu_hz: s.gpu_hz, emc_hz: s.emc_hz, cpu_khz: 1_728_000, sms: 8 };
    let work = Work::Decode { model: &QWEN_1_5B_Q4, batch: s.batch as u32, context: 256, steps: 1 };
    let cost = physics::cost(&NANO_SUPER, &work, &at);
    let peak_w = physics::power(&NANO_SUPER, &cost, &at).total_w();
    let tok_s = s.batch as f64 * 1e3 / cost.ms;
    Measured { tok_s, j_per_token: peak_w / tok_s, peak_w }
}

/// A tuning with 3% noise on every meter reading and 3% on every run's time.
fn tuned(seed: u64) -> Tuning {
    let options = Options { seed, noise: 0.03, run_noise: 0.03, ..Options::default() };
    let board = nano("MAXN_SUPER", options);
    let nodes: Arc<dyn Nodes> = board.clone();
    let mut bench = tegu::power::tune::sim::Bench::new(board.clone(), nodes, &QWEN_1_5B_Q4);
    let space = space();
    tune(&space, space.runs_max(), &mut |s| bench.measure(s)).unwrap()
}

/// Share of the sweep's hypervolume that the tuning's front commands, both by true values, in plain units from the
/// worst corner.
fn share(tuning: &Tuning) -> f64 {
    let goals = |m: Measured| -> Goals { [-m.tok_s, m.j_per_token, m.peak_w] };
    let all: Vec<Goals> = space().settings().iter().map(|s| goals(truth(s))).collect();
    let corner: Goals = std::array::from_fn(|g| all.iter().map(|p| p[g]).fold(f64::MIN, f64::max));
    let found: Vec<Goals> = tuning.front.iter().map(|&i| goals(truth(&tuning.runs[i].0))).collect();
    // Each goal by its own span, so that the volume means the same in any unit.
    hypervolume(&found, &corner) / hypervolume(&all, &corner)
}

#[test]
fn a_quarter_of_the_sweep_finds_nearly_all_of_its_front() {
    for seed in 1..=5 {
        let tuning = tuned(seed);
        assert!(tuning.runs.len() * 4 <= space().settings().len(), "{} runs", tuning.runs.len());
        let share = share(&tuning);
        assert!(share >= 0.95, "seed {seed}: {share:.3} of the sweep's hypervolume");
    }
}

pub fn report() -> String {
    let all = space().settings().len();
    let rows: Vec<Vec<String>> = (1..=5)
        .map(|seed| {
            let tuning = tuned(seed);
            let (s, m) = tuning.best(Goal::Efficiency, None).unwrap();
            vec![
                seed.to_string(),
                format!("{} of {all}", tuning.runs.len()),
                format!("{:.1}%", share(&tuning) * 100.0),
                tuning.front.len().to_string(),
                format!("{} / {}, batch {}", s.gpu_hz / 1_000_000, s.emc_hz as f64 / 1e6, s.batch),
                format!("{:.3} ({:.3})", m.j_per_token, truth(&s).j_per_token),
            ]
        })
        .collect();
    let tuning = tuned(1);
    let knees: Vec<String> = tuning
        .knees
        .iter()
        .map(|(emc, gpu)| format!("{} MHz at memory {}", gpu / 1_000_000, *emc as f64 / 1e6))
        .collect();
    "## 4. Tuning\n\nGPU cap x memory clock x batch, 3% noise on each reading and on each run, meters that lag. Hypervolume of tok/s, J/token and peak W by true values. Bars: 95% in a quarter of the runs.\n\n".to_owned()
        + &markdown(&["seed", "runs", "hypervolume", "front", "chosen for efficiency", "J/token measured (true)"], &rows)
        + &format!("Knees found (97% of the top's speed, one sequence): {}.\n\n", knees.join(", "))
}
