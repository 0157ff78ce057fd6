//! Energy by phase through a simulated board's own lagging, noisy meter, against what the board really drew.

use std::sync::Arc;
use tegu::power::energy::{Energy, Method};
use tegu::power::nodes::Nodes;
use tegu::power::sensors::Sensors;
use tegu::power::sim::work::{QWEN_1_5B_Q4, Work};
use tegu::power::sim::{Options, SimBoard};
use tegu::power::types::Phase;

const BOARDS: [&str; 3] = ["sim:orin-nano-super", "sim:orin-nx-16", "sim:agx-orin-64"];
const READ_EVERY_US: u64 = 100_000;

struct Rig {
    sim: Arc<SimBoard>,
    sensors: Sensors,
    energy: Energy,
    next_us: u64,
    drew_mj: [f64; 3],
}

impl Rig {
    fn new(name: &str) -> Rig {
        let sim = Arc::new(SimBoard::named(name, Options::default()).unwrap());
        sim.sleep(10_000_000);
        let sensors = Sensors::open(sim.clone(), &sim.board());
        let energy = Energy::new(Method::Rails, Phase::Idle, sim.now_us());
        let next_us = sim.now_us();
        Rig { sim, sensors, energy, next_us, drew_mj: [0.0; 3] }
    }

    /// Does work, or for `us` nothing, with the meter read beside it.
    fn spend(&mut self, phase: Phase, work: Work, us: u64) {
        self.energy.phase(phase, self.sim.now_us());
        let before = self.sim.truth().energy_j;
        self.sim.start(work);
        let end = self.sim.now_us() + us;
        while self.sim.is_busy() || self.sim.now_us() < end {
            if self.sim.now_us() >= self.next_us {
                self.energy.reading(&self.sensors.sample(), None);
                self.next_us += READ_EVERY_US;
            }
            let left = self.next_us - self.sim.now_us();
            let left = if self.sim.is_busy() { left } else { left.min(end - self.sim.now_us()) };
            self.sim.advance(left.max(1));
        }
        self.drew_mj[phase.index()] += (self.sim.truth().energy_j - before) * 1e3;
    }
}

#[test]
fn a_boards_rest_is_metered() {
    for name in BOARDS {
        let mut rig = Rig::new(name);
        rig.spend(Phase::Idle, Work::Idle, 60_000_000);
        let (got, drew) = (rig.energy.share(Phase::Idle).energy_mj, rig.drew_mj[2]);
        // Noise of 3 % a reading averages out; what is left is the meter's step.
        assert!((got / drew - 1.0).abs() < 0.02, "{name}: {got} mJ, drew {drew}");
    }
}

#[test]
fn phases_of_a_second_are_told_apart() {
    for name in BOARDS {
        let mut rig = Rig::new(name);
        for _ in 0..40 {
            let decode = Work::Decode { model: &QWEN_1_5B_Q4, batch: 1, context: 364, steps: 60 };
            rig.spend(Phase::Prefill, Work::Prefill { model: &QWEN_1_5B_Q4, tokens: 512, past: 0 }, 0);
            rig.spend(Phase::Decode, decode, 0);
            rig.spend(Phase::Idle, Work::Idle, 3_000_000);
        }
        let all: f64 = rig.drew_mj.iter().sum();
        let total = rig.energy.total().energy_mj;
        assert!((total / all - 1.0).abs() < 0.02, "{name}: {total} mJ, drew {all}");
        // The meter gives a number every 430 ms: a prompt of 0.16 to 0.35 s is told less sharply than decode.
        for (phase, off) in [(Phase::Prefill, 0.25), (Phase::Decode, 0.05), (Phase::Idle, 0.03)] {
            let (got, drew) = (rig.energy.share(phase).energy_mj, rig.drew_mj[phase.index()]);
            println!(
                "{name} {}: {got:.0} mJ, drew {drew:.0} ({:+.1} %)",
                phase.name(),
                (got / drew - 1.0) * 100.0
            );
            assert!((got / drew - 1.0).abs() < off, "{name} {phase:?}: {got} mJ, drew {drew}");
        }
    }
}
