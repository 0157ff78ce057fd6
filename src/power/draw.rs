//! What each phase draws, by least squares over a meter's readings.

use super::energy::RAIL_LAG_US;
use super::types::Phase;
use std::collections::VecDeque;

/// How often a module's meter has a new number, in µs.
pub const METER_US: u64 = 430_000;
/// Changes of phase kept until a reading comes. More in half a second are no engine's.
const CHANGES_MAX: usize = 1024;

/// The share of time in each phase as a meter with a first-order lag sees it.
#[derive(Debug, Clone)]
pub struct Lagged {
    shares: [f64; 3],
    at_us: u64,
    phase: Phase,
    /// Changes after `at_us`.
    changes: VecDeque<(u64, Phase)>,
}

impl Lagged {
    /// As after a long time in `phase`.
    pub fn new(phase: Phase, at_us: u64) -> Lagged {
        let mut shares = [0.0; 3];
        shares[phase.index()] = 1.0;
        Lagged { shares, at_us, phase, changes: VecDeque::new() }
    }

    /// Another phase begins.
    pub fn change(&mut self, phase: Phase, at_us: u64) {
        if self.changes.len() == CHANGES_MAX {
            let (at, _) = self.changes[0];
            self.at(at);
        }
        self.changes.push_back((at_us, phase));
    }

    /// The shares at a time, from which on they go. They add up to one.
    pub fn at(&mut self, at_us: u64) -> [f64; 3] {
        while let Some(&(changed, phase)) = self.changes.front().filter(|(at, _)| *at <= at_us) {
            self.pass(changed);
            self.phase = phase;
            self.changes.pop_front();
        }
        self.pass(at_us);
        self.shares
    }

    fn pass(&mut self, to_us: u64) {
        let keep = (-(to_us.saturating_sub(self.at_us) as f64) / RAIL_LAG_US as f64).exp();
        self.shares.iter_mut().for_each(|s| *s *= keep);
        self.shares[self.phase.index()] += 1.0 - keep;
        self.at_us = self.at_us.max(to_us);
    }
}

/// Least squares for the power of each phase: a reading is the sum of the phases' powers, each times its share. Old
/// readings fade, and a phase of which little is known is taken to draw the mean.
#[derive(Debug, Clone, Default)]
pub struct Draw {
    shares: [[f64; 3]; 3],
    products: [f64; 3],
    /// Sums of readings' squares and of weights: what is left unexplained is noise.
    squares: f64,
    weights: f64,
}

/// What a reading's weight is multiplied with at each later one: half after 350, some 150 s. Less would not tell a prompt of
/// a third of a second from the noise of a meter; more would keep clocks of long ago.
const FADE: f64 = 0.998;
/// Weight of the mean: as a twentieth of one reading in a phase.
const MEAN_WEIGHT: f64 = 0.05;

impl Draw {
    /// A reading in mW, with the share of each phase in it.
    pub fn add(&mut self, shares: [f64; 3], mw: f64, weight: f64) {
        for i in 0..3 {
            for j in 0..3 {
                self.shares[i][j] = self.shares[i][j] * FADE + weight * shares[i] * shares[j];
            }
            self.products[i] = self.products[i] * FADE + weight * shares[i] * mw;
        }
        self.squares = self.squares * FADE + weight * mw * mw;
        self.weights = self.weights * FADE + weight;
    }

    fn matrix(&self) -> [[f64; 3]; 3] {
        let mut a = self.shares;
        (0..3).for_each(|i| a[i][i] += MEAN_WEIGHT);
        a
    }

    /// Power of each phase in mW, given the mean of all.
    pub fn powers(&self, mean_mw: f64) -> [f64; 3] {
        solve(self.matrix(), self.products.map(|p| p + MEAN_WEIGHT * mean_mw))
    }

    /// One standard error of a phase's power, as a share of it. None before there are readings to tell.
    pub fn uncertainty(&self, phase: Phase) -> Option<f64> {
        // Three are explained by three numbers.
        let spare = self.weights - 3.0;
        let mean_mw = self.products.iter().sum::<f64>() / self.weights;
        let powers = self.powers(mean_mw);
        let mut left = self.squares;
        for i in 0..3 {
            left -= 2.0 * powers[i] * self.products[i];
            left += (0..3).map(|j| powers[i] * powers[j] * self.shares[i][j]).sum::<f64>();
        }
        let mut unit = [0.0; 3];
        unit[phase.index()] = 1.0;
        let variance = left.max(0.0) / spare * solve(self.matrix(), unit)[phase.index()];
        let share = variance.sqrt() / powers[phase.index()];
        (spare > 0.0 && share.is_finite() && share >= 0.0).then_some(share)
    }
}

/// Solves a symmetric, positive definite system, for which elimination needs no pivots.
fn solve(mut a: [[f64; 3]; 3], mut b: [f64; 3]) -> [f64; 3] {
    for i in 0..3 {
        for row in i + 1..3 {
            let f = a[row][i] / a[i][i];
            let above = a[i];
            a[row].iter_mut().zip(above).skip(i).for_each(|(x, y)| *x -= f * y);
            b[row] -= f * b[i];
        }
    }
    for i in (0..3).rev() {
        for col in i + 1..3 {
            b[i] -= a[i][col] * b[col];
        }
        b[i] /= a[i][i];
    }
    b
}

#[test]
fn shares_follow_as_a_meter_does() {
    let mut lagged = Lagged::new(Phase::Idle, 0);
    lagged.change(Phase::Prefill, 1_000_000);
    lagged.change(Phase::Decode, 1_000_000 + RAIL_LAG_US);
    assert_eq!(lagged.at(900_000), [0.0, 0.0, 1.0]);
    let e = (-1.0f64).exp();
    let [prefill, decode, idle] = lagged.at(1_000_000 + RAIL_LAG_US);
    assert!((prefill - (1.0 - e)).abs() < 1e-9 && decode == 0.0 && (idle - e).abs() < 1e-9);
    // Many changes between two readings lose nothing but their room.
    for at in 0..3 * CHANGES_MAX as u64 {
        lagged.change(if at % 2 == 0 { Phase::Idle } else { Phase::Decode }, 3_000_000 + at);
    }
    let shares = lagged.at(60_000_000);
    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9 && shares[1] > 0.999, "{shares:?}");
}

#[test]
fn powers_and_their_error_come_from_readings() {
    let mut draw = Draw::default();
    assert_eq!(draw.uncertainty(Phase::Idle), None);
    assert_eq!(draw.powers(5.0), [5.0; 3], "nothing is known: the mean");
    for n in 0..300u32 {
        let prefill = f64::from(n % 3) / 4.0;
        let decode = (1.0 - prefill) * f64::from(n % 2);
        let shares = [prefill, decode, 1.0 - prefill - decode];
        let noise = [30.0, -10.0, -20.0, 10.0, -30.0, 20.0][n as usize / 5 % 6];
        draw.add(shares, 15_000.0 * shares[0] + 10_000.0 * shares[1] + 4_000.0 * shares[2] + noise, 1.0);
    }
    let powers = draw.powers(9_000.0);
    for (got, want) in powers.iter().zip([15_000.0, 10_000.0, 4_000.0]) {
        assert!((got / want - 1.0).abs() < 0.01, "{powers:?}");
    }
    let errors = Phase::ALL.map(|p| draw.uncertainty(p).unwrap());
    assert!(errors.iter().all(|e| (1e-5..0.01).contains(e)), "{errors:?}");
}
