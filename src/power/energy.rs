//! Energy by phase, from meters that lag.
//!
//! A rail's meter averages and settles with a time constant of over a second, and gives a number every 430 ms, so what it
//! reads during a short phase is mostly the phase before. What each phase draws is therefore found by regression: the time
//! that was spent in each phase is sent through the same lag as the meter's, and the readings are sums of those times and
//! the phases' powers ([`Draw`]). A phase's energy is its time and its power; the sum of all is kept at the meter's own.
//! Where a GPU counts its own energy, the counter is taken instead, and no lag needs to be undone.

use super::draw::{Draw, Lagged, METER_US};
use super::types::{Phase, Sample};
use serde::Serialize;

/// Time constant of a module's meter, in µs: fits of published traces give 1.1 to 1.6 s.
pub const RAIL_LAG_US: u64 = 1_300_000;
/// A reading that has not moved for so long is a new one that says the same.
const STILL_US: u64 = 900_000;
/// Readings further apart than this say nothing about what was in between.
const GAP_MAX_US: u64 = 30_000_000;

/// Where the numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The module's rails, their lag undone.
    Rails,
    /// A GPU's own counter of its energy.
    Counter,
    /// A GPU's power, as its driver averages it (about a second).
    GpuPower,
}

impl Method {
    /// What a reader must know about the numbers.
    pub fn text(self) -> &'static str {
        match self {
            Method::Rails => "module rails (not the wall); phases estimated through the meter's lag of 1.3 s",
            Method::Counter => "the GPU's own energy counter (the GPU's board, not the computer)",
            Method::GpuPower => {
                "the GPU's power as its driver averages it (the GPU's board, not the computer)"
            }
        }
    }
}

/// What one phase took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Share {
    /// Millijoules.
    pub energy_mj: f64,
    /// Microseconds.
    pub time_us: u64,
}

/// Energy so far, by phase.
#[derive(Debug, Clone)]
pub struct Energy {
    method: Method,
    shares: [Share; 3],
    phase: Phase,
    phase_since_us: u64,
    /// Time in each phase since the last reading.
    spans_us: [u64; 3],
    last: Option<Reading>,
    last_read_us: u64,
    /// Undoing the lag can take a sum below zero: then this is taken from what comes next.
    debt_mj: f64,
    /// What the meter counted and no phase has yet: a meter that lags tells of a phase when another one is.
    owed_mj: f64,
    /// The same told afterwards: what is settled, and the time in each phase and the meter's sum of the last minute, which
    /// is divided by what is known in the end.
    settled_mj: [f64; 3],
    recent_s: [f64; 3],
    recent_mj: f64,
    /// Time in each phase, as a lagging meter sees it.
    lagged: Lagged,
    /// What each phase draws.
    draw: Draw,
    highest_mw: f64,
}

/// Part of what is owed that an interval pays, and the most that this changes what it takes. An interval is half a second;
/// what is owed for longer than some seconds is an error of the estimate, which all phases share.
const PAYS: f64 = 0.1;
const PAYS_MAX: f64 = 0.5;
/// How long a division may be revised: a short measurement is over before the meter has told of it.
const REVISED_S: f64 = 60.0;

#[derive(Debug, Clone, Copy)]
struct Reading {
    at_us: u64,
    mw: f64,
    counter_mj: Option<u64>,
}

impl Reading {
    /// Whether the meter has not yet given another number: the interval goes on.
    fn says_the_same(&self, now: &Reading) -> bool {
        let same = self.mw == now.mw && self.counter_mj == now.counter_mj;
        same && now.at_us.saturating_sub(self.at_us) < STILL_US
    }
}

impl Energy {
    /// Nothing yet; `phase` begins at `at_us`.
    pub fn new(method: Method, phase: Phase, at_us: u64) -> Energy {
        Energy {
            method,
            shares: Default::default(),
            phase,
            phase_since_us: at_us,
            spans_us: [0; 3],
            last: None,
            last_read_us: at_us,
            debt_mj: 0.0,
            owed_mj: 0.0,
            settled_mj: [0.0; 3],
            recent_s: [0.0; 3],
            recent_mj: 0.0,
            lagged: Lagged::new(phase, at_us),
            draw: Draw::default(),
            highest_mw: 0.0,
        }
    }

    /// Where the numbers come from.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Another phase begins.
    pub fn phase(&mut self, phase: Phase, at_us: u64) {
        // News that comes after a later reading: what was settled by that stays.
        let at_us = at_us.max(self.phase_since_us);
        self.spans_us[self.phase.index()] += at_us - self.phase_since_us;
        if phase != self.phase {
            self.lagged.change(phase, at_us);
        }
        (self.phase, self.phase_since_us) = (phase, at_us);
    }

    /// A reading: the sample's total, and the counter where there is one.
    pub fn reading(&mut self, sample: &Sample, counter_mj: Option<u64>) {
        let now = sample.at_us;
        self.phase(self.phase, now);
        let Some(mw) = sample.total_mw.map(f64::from).or(counter_mj.map(|_| 0.0)) else {
            // A meter that fell silent: what passed since is not counted, in time either.
            self.spans_us = [0; 3];
            self.last = None;
            return;
        };
        let reading = Reading { at_us: now, mw, counter_mj };
        let unread_us = now.saturating_sub(std::mem::replace(&mut self.last_read_us, now));
        if self.last.is_some_and(|last| last.says_the_same(&reading)) {
            return;
        }
        let spans = std::mem::take(&mut self.spans_us);
        let before = self.last.replace(reading);
        let Some(before) = before.filter(|b| (1..GAP_MAX_US).contains(&now.saturating_sub(b.at_us))) else {
            return;
        };
        let energy_mj = self.interval(before, reading);
        let (seconds, all) = (spans.map(|us| us as f64 / 1e6), (now - before.at_us) as f64 / 1e6);
        if self.method == Method::Rails {
            // The number is as old as the meter's last, or as ours: somewhere in between.
            let seen = self.lagged.at(now.saturating_sub(unread_us.min(METER_US) / 2));
            self.draw.add(seen, mw, 1.0);
        } else {
            self.draw.add(seconds.map(|s| s / all), energy_mj / all, all);
        }
        self.divide(energy_mj, spans);
    }

    /// Millijoules between two readings.
    fn interval(&mut self, before: Reading, now: Reading) -> f64 {
        let dt_s = (now.at_us - before.at_us) as f64 / 1e6;
        if self.method == Method::Counter
            && let (Some(a), Some(b)) = (before.counter_mj, now.counter_mj)
            && b >= a
        {
            let mj = (b - a) as f64;
            self.highest_mw = self.highest_mw.max(mj / dt_s);
            return mj;
        }
        self.highest_mw = self.highest_mw.max(now.mw);
        let lag_s = if self.method == Method::Rails { RAIL_LAG_US as f64 / 1e6 } else { 0.0 };
        let mean_mj = (before.mw + now.mw) / 2.0 * dt_s;
        let undone = mean_mj + lag_s * (now.mw - before.mw) - self.debt_mj;
        self.debt_mj = (-undone).max(0.0);
        undone.max(0.0)
    }

    /// Gives an interval's energy to the phases that were in it, by their time and what each draws.
    fn divide(&mut self, energy_mj: f64, spans: [u64; 3]) {
        let total_us: u64 = spans.iter().sum();
        if total_us == 0 {
            return;
        }
        let powers = self.powers(energy_mj, total_us);
        let weights: [f64; 3] = std::array::from_fn(|i| spans[i] as f64 / 1e6 * powers[i]);
        let sum: f64 = weights.iter().sum();
        let paid = match self.method {
            Method::Rails => {
                self.owed_mj += energy_mj - sum;
                (self.owed_mj * PAYS).clamp(-PAYS_MAX * sum, PAYS_MAX * sum)
            }
            // What was counted was counted in this interval.
            Method::Counter | Method::GpuPower => energy_mj - sum,
        };
        if self.method == Method::Rails {
            self.owed_mj -= paid;
        }
        for i in 0..3 {
            self.shares[i].energy_mj += weights[i] * (1.0 + paid / sum);
            self.shares[i].time_us += spans[i];
        }
        self.settle(energy_mj, spans);
    }

    /// What each phase draws, given an interval more than is counted yet.
    fn powers(&self, more_mj: f64, more_us: u64) -> [f64; 3] {
        let all = self.total();
        let mean_mw = (all.energy_mj + more_mj) / ((all.time_us + more_us) as f64 / 1e6).max(1e-6);
        self.powers_near(mean_mw)
    }

    /// The same, given the mean of all.
    fn powers_near(&self, mean_mw: f64) -> [f64; 3] {
        // Noise can make a regression say less than nothing.
        self.draw.powers(mean_mw).map(|p| p.max(mean_mw / 20.0).max(1.0))
    }

    /// Takes an interval to what is recent, and settles a part of that.
    fn settle(&mut self, energy_mj: f64, spans: [u64; 3]) {
        self.recent_mj += energy_mj;
        (0..3).for_each(|i| self.recent_s[i] += spans[i] as f64 / 1e6);
        let keep = (-(spans.iter().sum::<u64>() as f64 / 1e6) / REVISED_S).exp();
        let recent = self.recent();
        for (settled, recent) in self.settled_mj.iter_mut().zip(recent) {
            *settled += recent * (1.0 - keep);
        }
        self.recent_s.iter_mut().for_each(|s| *s *= keep);
        self.recent_mj *= keep;
    }

    /// The meter's sum of the last minute, divided by what is known now.
    fn recent(&self) -> [f64; 3] {
        let powers = self.powers(0.0, 0);
        let weights: [f64; 3] = std::array::from_fn(|i| self.recent_s[i] * powers[i]);
        let sum: f64 = weights.iter().sum();
        weights.map(|w| if sum > 0.0 { w / sum * self.recent_mj } else { 0.0 })
    }

    /// What a phase took so far, as it is known now: the last minute's division is revised as the meter goes on, so that
    /// this may fall. For a measurement that is looked at when it is over; a counter is [`Energy::share`].
    pub fn revised(&self, phase: Phase) -> Share {
        let i = phase.index();
        let share = self.shares[i];
        match self.method {
            Method::Rails => Share { energy_mj: self.settled_mj[i] + self.recent()[i], ..share },
            Method::Counter | Method::GpuPower => share,
        }
    }

    /// One standard error of what a phase is said to draw, as a share of it; none where a counter tells, or where too
    /// little is known.
    pub fn uncertainty(&self, phase: Phase) -> Option<f64> {
        (self.method == Method::Rails).then(|| self.draw.uncertainty(phase))?
    }

    /// What a phase took so far, up to the last reading.
    pub fn share(&self, phase: Phase) -> Share {
        self.shares[phase.index()]
    }

    /// What the phases have taken up to now in mJ, by [`Phase::index`]: what readings cover, and what the time since the last
    /// one is likely to have taken by what each phase draws. None before a reading.
    pub fn so_far_mj(&self, now_us: u64) -> Option<[f64; 3]> {
        let last = self.last?;
        let mut spans_us = self.spans_us;
        spans_us[self.phase.index()] += now_us.saturating_sub(self.phase_since_us);
        // A phase of which little is known is taken to draw the mean; where nothing is, what the meter says.
        let all = self.total();
        let mean_mw = if all.time_us > 0 { all.energy_mj * 1e6 / all.time_us as f64 } else { last.mw };
        let powers = self.powers_near(mean_mw);
        Some(std::array::from_fn(|i| self.shares[i].energy_mj + spans_us[i] as f64 / 1e6 * powers[i]))
    }

    /// All phases together: the meter's own sum.
    pub fn total(&self) -> Share {
        let owed = Share { energy_mj: self.owed_mj, time_us: 0 };
        self.shares.iter().fold(owed, |sum, s| Share {
            energy_mj: sum.energy_mj + s.energy_mj,
            time_us: sum.time_us + s.time_us,
        })
    }

    /// The highest power of any reading (of any interval, by a counter).
    pub fn highest_mw(&self) -> f64 {
        self.highest_mw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_us: u64, mw: f64) -> Sample {
        Sample { at_us, total_mw: Some(mw.round() as u32), ..Sample::default() }
    }

    /// A meter with the lag, read every 100 ms, over phases of given lengths and powers.
    fn run(phases: &[(Phase, u64, f64)], rounds: usize) -> Energy {
        let (step, mut at, mut shown) = (10_000u64, 0u64, phases[0].2);
        let mut energy = Energy::new(Method::Rails, phases[0].0, 0);
        energy.reading(&sample(0, shown), None);
        for _ in 0..rounds {
            for (phase, us, mw) in phases {
                energy.phase(*phase, at);
                for _ in 0..us / step {
                    at += step;
                    shown += (mw - shown) * (step as f64 / RAIL_LAG_US as f64);
                    if at % 100_000 == 0 {
                        energy.reading(&sample(at, shown), None);
                    }
                }
            }
        }
        energy
    }

    #[test]
    fn phases_get_what_they_drew_though_the_meter_lags() {
        // Half-second prompts at 20 W, a second and a half of decode at 12 W, two seconds of rest at 5 W.
        let phases = [
            (Phase::Prefill, 500_000, 20_000.0),
            (Phase::Decode, 1_500_000, 12_000.0),
            (Phase::Idle, 2_000_000, 5_000.0),
        ];
        let energy = run(&phases, 20);
        for (phase, us, mw) in phases {
            let want = mw * us as f64 / 1e6 * 20.0;
            let got = energy.share(phase).energy_mj;
            assert!((got / want - 1.0).abs() < 0.03, "{phase:?}: {got} mJ, drew {want}");
            assert_eq!(energy.share(phase).time_us, us * 20);
        }
        // Naively, prefill would be far too low: the reading at its end has come 32 % of the way.
        let all: f64 = phases.iter().map(|(_, us, mw)| mw * *us as f64 / 1e6).sum::<f64>() * 20.0;
        assert!((energy.total().energy_mj / all - 1.0).abs() < 0.01);
    }

    #[test]
    fn the_sum_is_the_meters_even_where_power_falls_to_nothing() {
        let phases = [(Phase::Decode, 3_000_000, 40_000.0), (Phase::Idle, 3_000_000, 100.0)];
        let energy = run(&phases, 10);
        let all = (40_000.0 + 100.0) * 3.0 * 10.0;
        assert!((energy.total().energy_mj / all - 1.0).abs() < 0.02, "{}", energy.total().energy_mj);
        assert!(energy.share(Phase::Idle).energy_mj >= 0.0);
    }

    #[test]
    fn what_no_reading_covers_is_filled_in() {
        let phases = [(Phase::Decode, 4_000_000, 15_000.0), (Phase::Idle, 4_000_000, 5_000.0)];
        let mut energy = run(&phases, 10);
        let now = 80_000_000;
        energy.phase(Phase::Decode, now);
        let before = energy.so_far_mj(now).unwrap();
        // 90 ms of decode, of which the meter has shown nothing.
        let after = energy.so_far_mj(now + 90_000).unwrap();
        let took = after[Phase::Decode.index()] - before[Phase::Decode.index()];
        assert!((took / 1_350.0 - 1.0).abs() < 0.1, "{took}");
        assert_eq!(after[Phase::Idle.index()], before[Phase::Idle.index()]);
        assert_eq!(Energy::new(Method::Rails, Phase::Idle, 0).so_far_mj(1), None);
    }

    #[test]
    fn a_counter_needs_no_undoing() {
        let mut energy = Energy::new(Method::Counter, Phase::Decode, 0);
        energy.reading(&sample(0, 1.0), Some(1_000));
        energy.reading(&sample(1_000_000, 500_000.0), Some(301_000));
        assert_eq!(energy.share(Phase::Decode), Share { energy_mj: 300_000.0, time_us: 1_000_000 });
        assert_eq!(energy.highest_mw(), 300_000.0);
        // A counter that starts anew (the driver was loaded again) is not believed for that interval.
        energy.reading(&sample(2_000_000, 100_000.0), Some(5));
        assert_eq!(energy.total().energy_mj, 300_000.0 + (500_000.0 + 100_000.0) / 2.0);
    }

    #[test]
    fn silence_is_not_counted() {
        let mut energy = Energy::new(Method::Rails, Phase::Idle, 0);
        energy.reading(&sample(0, 5_000.0), None);
        energy.reading(&Sample { at_us: 1_000_000, ..Sample::default() }, None);
        energy.reading(&sample(2_000_000, 5_000.0), None);
        assert_eq!(energy.total(), Share::default());
        energy.reading(&sample(3_000_000, 5_000.0), None);
        assert_eq!(energy.total(), Share { energy_mj: 5_000.0, time_us: 1_000_000 });
    }
}
