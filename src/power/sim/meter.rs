//! The INA3221 power meters of a simulated board: each channel lags, is averaged, carries noise and counts in steps.

use super::physics::Power;
use super::spec::Spec;
use super::state::Noise;

/// The boot script sets 512 samples, which makes an update each 430 ms.
pub const UPDATE_US: u64 = 430_000;
/// Time constant with which a channel follows (fits of published rises: 1.1-1.6 s).
const TAU_S: f64 = 1.3;

/// A channel's reading.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reading {
    /// Supply.
    pub volt_mv: f64,
    /// Current, a whole number of the meter's steps.
    pub current_ma: f64,
}

/// All channels of a board.
#[derive(Debug)]
pub struct Meters {
    spec: &'static Spec,
    /// Lagged power, W, by meter and channel.
    lagged_w: Vec<[f64; 3]>,
    /// What hwmon shows.
    pub shown: Vec<[Reading; 3]>,
    /// When it changes next.
    pub next_us: u64,
}

impl Meters {
    /// Meters that have not measured yet.
    pub fn new(spec: &'static Spec) -> Meters {
        let n = spec.meters.len();
        Meters {
            spec,
            lagged_w: vec![[0.0; 3]; n],
            shown: vec![[Reading::default(); 3]; n],
            next_us: UPDATE_US,
        }
    }

    fn true_w(&self, meter: usize, channel: usize, power: &Power) -> f64 {
        let [gpu, soc, rest] = self.spec.meters[meter].channels[channel].parts;
        gpu * power.gpu_w + soc * power.soc_w + rest * power.rest_w
    }

    /// As after a long time at this power.
    pub fn settle(&mut self, power: &Power) {
        for m in 0..self.lagged_w.len() {
            for c in 0..3 {
                self.lagged_w[m][c] = self.true_w(m, c, power);
                self.show(m, c, 1.0);
            }
        }
    }

    /// Follows the power for a while.
    pub fn lag(&mut self, power: &Power, dt_s: f64) {
        let keep = (-dt_s / TAU_S).exp();
        for m in 0..self.lagged_w.len() {
            for c in 0..3 {
                let to = self.true_w(m, c, power);
                self.lagged_w[m][c] = to + (self.lagged_w[m][c] - to) * keep;
            }
        }
    }

    fn show(&mut self, m: usize, c: usize, factor: f64) {
        let (meter, volt_mv) = (&self.spec.meters[m], self.spec.meters[m].channels[c].volt_mv);
        let current = self.lagged_w[m][c] * factor * 1e6 / volt_mv;
        let current_ma = (current / meter.step_ma).round().max(0.0) * meter.step_ma;
        self.shown[m][c] = Reading { volt_mv, current_ma };
    }

    /// Shows new readings, each off by noise of deviation `share`.
    pub fn publish(&mut self, now_us: u64, share: f64, noise: &mut Noise) {
        for m in 0..self.lagged_w.len() {
            for c in 0..3 {
                self.show(m, c, 1.0 + share * noise.normal());
            }
        }
        self.next_us = now_us + UPDATE_US;
    }
}
