//! Measuring settings on a simulated board as one would on a real one: clocks by its files, power by its lagging
//! meters.

use std::sync::Arc;

use super::super::nodes::Nodes;
use super::super::sensors::Sensors;
use super::super::sim::SimBoard;
use super::super::sim::work::{Model, Work};
use super::super::trial::set_clocks;
use super::super::types::Clocks;
use super::{Measured, Setting};
use crate::power::governor::Ladder;
use crate::units::{Error, Result};

/// The meters lag by 1.3 s: after five times that they have settled to a hundredth.
const SETTLE_US: u64 = 6_500_000;
/// How long power is averaged.
const MEASURE_US: u64 = 10_000_000;
/// Spacing of readings: the meters' own.
const EVERY_US: u64 = 430_000;
/// Tokens of context that each sequence has while it is measured.
const CONTEXT: u32 = 256;

/// A simulated board that runs one setting after another.
pub struct Bench {
    board: Arc<SimBoard>,
    sensors: Sensors,
    model: &'static Model,
    ladder: Ladder,
}

impl Bench {
    /// A bench for a model. `nodes` are the board's files.
    pub fn new(board: Arc<SimBoard>, nodes: Arc<dyn Nodes>, model: &'static Model) -> Bench {
        let sensors = Sensors::open(nodes, &board.board());
        let spec = board.spec();
        let emc: Vec<u64> = spec.emc.iter().map(|e| e.hz).collect();
        Bench { ladder: Ladder::new(spec.gpu_hz, None, &emc), board, sensors, model }
    }

    /// Runs a setting: decode until the meters have settled, then for ten seconds more.
    pub fn measure(&mut self, setting: &Setting) -> Result<Measured> {
        let clocks = Clocks {
            gpu_cap_hz: Some(setting.gpu_hz),
            emc_floor_hz: Some(setting.emc_hz),
            ..Clocks::default()
        };
        set_clocks(self.board.as_ref(), &self.ladder, &clocks);
        let work = Work::Decode {
            model: self.model,
            batch: setting.batch as u32,
            context: CONTEXT,
            steps: u32::MAX,
        };
        self.board.start(work);
        self.board.sleep(SETTLE_US);
        let (began_us, began) = (self.board.now_us(), self.board.steps_done());
        let mut readings = Vec::new();
        while self.board.now_us() - began_us < MEASURE_US {
            self.board.sleep(EVERY_US);
            let sample = self.sensors.sample();
            let total_mw = sample.total_mw.ok_or_else(|| {
                Error::bad("tune", "power", "a meter that measures the module", "no reading")
            })?;
            readings.push(total_mw as f64 / 1e3);
        }
        let seconds = (self.board.now_us() - began_us) as f64 / 1e6;
        let tok_s = (self.board.steps_done() - began) * setting.batch as f64 / seconds;
        self.board.start(Work::Idle);
        let mean_w = readings.iter().sum::<f64>() / readings.len() as f64;
        // A single reading's noise is no peak: three in a row make one.
        let of_three = readings.windows(3).map(|w| w.iter().sum::<f64>() / 3.0);
        let peak_w = of_three.fold(mean_w, f64::max);
        Ok(Measured { tok_s, j_per_token: mean_w / tok_s, peak_w })
    }
}
