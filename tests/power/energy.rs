//! Energy by phase through a simulated board's own lagging, noisy meter, against what the board really drew.

use std::sync::Arc;
use tegu::power::energy::{Energy, Method};
use tegu::power::nodes::Nodes;
use tegu::power::sensors::Sensors;
use tegu::power::sim::work::{QWEN_1_5B_Q4, Work};
use tegu::power::sim::{Options, SimBoard};
use tegu::power::types::Phase;

const BOARDS: [&str; 3] = ["sim:orin-nano-super", "sim:orin-nx-16", "sim:agx-orin-64"];
struct Rig {
    sim: Arc<SimBoard>,
    sensors: Sensors,
    energy: Energy,
    read_every_us: u64,
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
        Rig { sim, sensors, energy, read_every_us: 100_000, next_us, drew_mj: [0.0; 3] }
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
                self.next_us += self.read_every_us;
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

/// A meter gives a number every 430 ms and lags by 1.3 s; a prompt of 0.16 to 0.35 s is told from what comes after it by
/// regression over some requests.
#[test]
fn short_phases_are_told_apart_after_some_requests() {
    for (name, read_every_us) in BOARDS.iter().flat_map(|b| [(b, 100_000), (b, 500_000)]) {
        let mut rig = Rig::new(name);
        rig.read_every_us = read_every_us;
        let rounds = |rig: &mut Rig, n: usize| {
            for i in 0..n {
                // Requests are not alike, nor is the time between them.
                let tokens = 384 + 64 * (i as u32 % 5);
                let steps = 40 + 10 * (i as u32 * 3 % 5);
                rig.spend(Phase::Prefill, Work::Prefill { model: &QWEN_1_5B_Q4, tokens, past: 0 }, 0);
                rig.spend(
                    Phase::Decode,
                    Work::Decode { model: &QWEN_1_5B_Q4, batch: 1, context: 364, steps },
                    0,
                );
                rig.spend(Phase::Idle, Work::Idle, 1_700_000 + 370_000 * (i as u64 * 5 % 7));
            }
        };
        rounds(&mut rig, 30);
        let so_far = |rig: &Rig| Phase::ALL.map(|p| rig.energy.share(p).energy_mj);
        let (learned, drew) = (so_far(&rig), rig.drew_mj);
        rounds(&mut rig, 30);
        let all: f64 = rig.drew_mj.iter().sum();
        let total = rig.energy.total().energy_mj;
        assert!((total / all - 1.0).abs() < 0.02, "{name}: {total} mJ, drew {all}");
        for (phase, off) in [(Phase::Prefill, 0.05), (Phase::Decode, 0.05), (Phase::Idle, 0.05)] {
            let i = phase.index();
            let (got, drew) = (so_far(&rig)[i] - learned[i], rig.drew_mj[i] - drew[i]);
            let (error, said) = (got / drew - 1.0, rig.energy.uncertainty(phase).unwrap());
            println!(
                "{name}, read every {} ms, {}: {got:.0} mJ, drew {drew:.0} ({:+.1} %), said ±{:.1} %",
                read_every_us / 1000,
                phase.name(),
                error * 100.0,
                said * 100.0
            );
            assert!(error.abs() < off, "{name} {phase:?}: {got} mJ, drew {drew}");
            let revised = rig.energy.revised(phase).energy_mj;
            assert!((revised / rig.drew_mj[i] - 1.0).abs() < off, "{name} {phase:?}, all: {revised} mJ");
            assert!(said < 0.08, "{name} {phase:?}: ±{said}");
        }
    }
}
