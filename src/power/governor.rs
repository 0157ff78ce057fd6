//! The governor: a pure function from the board's samples, the engine's phase and a profile to what the engine may do
//! and how the clocks should stand.
//!
//! A profile names clocks a phase. Three things take from them: heat and a watt cap, each as a number of steps down
//! the GPU's table (the memory clock is touched only when that is used up), and a sensor that cannot be trusted,
//! which puts the profile's fall-back in place. Heat is judged by where it is going: a slope over some seconds,
//! looked ahead.

use std::fmt;

use super::profile::Profile;
use super::sane::is_die;
use super::types::{Clocks, Phase, Sample};
use crate::engine::Budget;

/// How far ahead heat is judged. The spreader of a module follows power within about 25 s.
const AHEAD_S: f64 = 15.0;
/// Averages of the temperature whose difference is its slope.
const FAST_S: f64 = 3.0;
const SLOW_S: f64 = 12.0;
/// Samples this old, or so many bad in a row, are a fault; so many good in a row end it.
const STALE_US: u64 = 5_000_000;
const BAD_MAX: u32 = 3;
const GOOD_MIN: u32 = 10;
/// The meters lag: power is averaged over this, and judged no sooner after a change.
const WATT_S: f64 = 2.0;
const WATT_DOWN_US: u64 = 3_000_000;
const WATT_UP_US: u64 = 8_000_000;
/// A step of the GPU's table is about so much of a module's power.
const WATT_STEP: f64 = 0.07;
/// A clock is raised again only where the next step is likely to keep the cap.
const WATT_ROOM: f64 = 0.90;
/// Most steps at once.
const STEPS_AT_ONCE: u32 = 3;

/// The clocks that a board can be set to, each rising. Empty where the board does not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ladder {
    /// GPU clocks, up to the ceiling that the power mode sets.
    pub gpu_hz: Vec<u64>,
    /// Memory clocks.
    pub emc_hz: Vec<u64>,
}

impl Ladder {
    /// The table of a GPU, cut at the ceiling that the system sets.
    pub fn new(gpu_hz: &[u64], ceiling_hz: Option<u64>, emc_hz: &[u64]) -> Ladder {
        let ceiling = ceiling_hz.unwrap_or(u64::MAX);
        let mut gpu: Vec<u64> = gpu_hz.iter().copied().filter(|&hz| hz <= ceiling).collect();
        gpu.sort_unstable();
        Ladder { gpu_hz: gpu, emc_hz: emc_hz.to_vec() }
    }

    /// The entry `steps` below the one that a cap allows, and how many steps the table was too short for.
    fn below(&self, cap_hz: Option<u64>, steps: u32) -> (Option<u64>, u32) {
        let allowed = self.gpu_hz.iter().filter(|&&hz| cap_hz.is_none_or(|cap| hz <= cap)).count();
        if self.gpu_hz.is_empty() {
            return (cap_hz, steps);
        }
        let at = allowed.saturating_sub(1);
        let left = at.saturating_sub(steps as usize);
        (Some(self.gpu_hz[left]), steps - (at - left) as u32)
    }

    /// The highest entry not above a clock; the lowest where all are.
    fn at_most(&self, hz: u64) -> u64 {
        let fits = self.gpu_hz.iter().rev().find(|&&entry| entry <= hz);
        fits.or(self.gpu_hz.first()).copied().unwrap_or(hz)
    }

    /// Steps that the whole table has, and one more that lowers the memory clock.
    fn depth(&self) -> u32 {
        self.gpu_hz.len().max(1) as u32
    }
}

/// What the engine has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Requests that wait for their first token.
    pub waiting: usize,
    /// Sequences that generate.
    pub running: usize,
}

/// What the governor looks at.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Now, on the clock of the samples.
    pub now_us: u64,
    /// The latest sample, if there ever was one. It may be one that was seen before.
    pub sample: Option<&'a Sample>,
    /// What the engine is doing.
    pub phase: Phase,
    /// What it has to do.
    pub demand: Demand,
}

/// What the governor remembers between two decisions. [`State::default`] begins.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct State {
    /// Time of the last sample that was taken in.
    seen_us: Option<u64>,
    fast_c: f64,
    slow_c: f64,
    has_heat: bool,
    /// Steps that heat takes, and when that changed.
    heat_steps: u32,
    heat_at_us: Option<u64>,
    paused: bool,
    watt_mw: Option<f64>,
    watt_steps: u32,
    watt_at_us: u64,
    /// Since when there has been work without a break.
    busy_since_us: Option<u64>,
    bad: u32,
    good: u32,
    fault: bool,
    oc_seen: Option<u64>,
    /// How often steps, pause or fall-back changed.
    pub changes: u32,
}

/// Why the clocks are not simply the profile's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// So many steps down for heat.
    Heat(u32),
    /// So many steps down for the watt cap.
    Watts(u32),
    /// Too hot to work.
    Pause,
    /// A sensor that decides cannot be trusted.
    Fault(String),
    /// The kernel itself holds clocks back.
    Kernel(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Heat(n) => write!(f, "heat: {n} steps down"),
            Why::Watts(n) => write!(f, "watt cap: {n} steps down"),
            Why::Pause => write!(f, "paused: too hot"),
            Why::Fault(what) => write!(f, "fall-back: {what}"),
            Why::Kernel(what) => write!(f, "the kernel throttles: {what}"),
        }
    }
}

/// What the governor wants.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// For the engine.
    pub budget: Budget,
    /// For the clocks.
    pub clocks: Clocks,
    /// What was taken from the profile, and why; empty: nothing.
    pub why: Vec<Why>,
}

/// Decides. The same inputs give the same answer; `state` is what the last answer left.
pub fn decide(profile: &Profile, ladder: &Ladder, state: &State, inputs: &Inputs) -> (Decision, State) {
    let mut next = state.clone();
    // A request that waits makes the idle board's next phase a prefill: its clocks come up before it does.
    let phase = match inputs.phase {
        Phase::Idle if inputs.demand.waiting > 0 => Phase::Prefill,
        phase => phase,
    };
    match phase {
        Phase::Idle => next.busy_since_us = None,
        _ => drop(next.busy_since_us.get_or_insert(inputs.now_us)),
    }
    let fresh = inputs.sample.filter(|s| next.seen_us.is_none_or(|seen| s.at_us > seen));
    let trouble = trouble(profile, inputs);
    if let Some(sample) = fresh {
        let elapsed_s = next.seen_us.map_or(0.0, |seen| (sample.at_us - seen) as f64 / 1e6);
        next.seen_us = Some(sample.at_us);
        next.trust(trouble.is_some());
        next.heat(profile, ladder, sample, elapsed_s);
        next.watts(profile, ladder, sample, elapsed_s, phase);
    } else if inputs.sample.is_none_or(|s| inputs.now_us.saturating_sub(s.at_us) > STALE_US) {
        // Nobody measures: there is nothing to count to.
        next.bad = BAD_MAX;
        next.trust(true);
    }
    let decision = next.answer(profile, ladder, phase, trouble, inputs);
    let told = |s: &State| (s.heat_steps, s.watt_steps, s.paused, s.fault);
    next.changes += u32::from(told(state) != told(&next));
    (decision, next)
}

/// What is wrong with the sensors that decide, in words.
fn trouble(profile: &Profile, inputs: &Inputs) -> Option<String> {
    let Some(sample) = inputs.sample else { return Some("no sample".into()) };
    if inputs.now_us.saturating_sub(sample.at_us) > STALE_US {
        return Some("samples have stopped".into());
    }
    let named = || {
        let list: Vec<String> = sample.faults.iter().map(|f| format!("{} {:?}", f.sensor, f.fault)).collect();
        if list.is_empty() { "none found".into() } else { list.join(", ").to_lowercase() }
    };
    if sample.zones.is_empty() {
        return Some(format!("no temperature ({})", named()));
    }
    // A die's own zone gone wrong hides the heat, whatever a cooler neighbour says.
    let lost = sample.faults.iter().filter(|f| is_die(&f.sensor)).count();
    let left = sample.zones.iter().filter(|z| is_die(&z.kind)).count();
    if lost > 0 && left == 0 {
        return Some(format!("no temperature of the die ({})", named()));
    }
    if profile.cap_mw.is_some() && sample.total_mw.is_none() {
        return Some(format!("no power for the watt cap ({})", named()));
    }
    None
}

impl State {
    /// Steps down that heat takes now.
    pub fn heat_steps(&self) -> u32 {
        self.heat_steps
    }

    /// Whether the fall-back is in place.
    pub fn is_fault(&self) -> bool {
        self.fault
    }

    /// Counts bad and good samples; enough of either decides.
    fn trust(&mut self, is_bad: bool) {
        match is_bad {
            true => (self.bad, self.good) = (self.bad.saturating_add(1), 0),
            false => (self.bad, self.good) = (0, self.good.saturating_add(1)),
        }
        self.fault = self.bad >= BAD_MAX || self.fault && self.good < GOOD_MIN;
    }

    fn heat(&mut self, profile: &Profile, ladder: &Ladder, sample: &Sample, elapsed_s: f64) {
        let Some(now_mc) = sample.hottest_mc() else { return };
        let now_c = now_mc as f64 / 1e3;
        if !self.has_heat {
            (self.fast_c, self.slow_c, self.has_heat) = (now_c, now_c, true);
        }
        self.fast_c += (now_c - self.fast_c) * (1.0 - (-elapsed_s / FAST_S).exp());
        self.slow_c += (now_c - self.slow_c) * (1.0 - (-elapsed_s / SLOW_S).exp());
        let t = &profile.thermal;
        self.paused = now_mc >= t.pause_mc || self.paused && now_mc > t.resume_mc;
        // Averages of a ramp lie behind it by slope times time constant.
        let slope = (self.fast_c - self.slow_c) / (SLOW_S - FAST_S);
        let here_c = self.fast_c + slope * FAST_S;
        let ahead_c = here_c + slope * AHEAD_S;
        let (start_c, back_c) = (t.start_mc as f64 / 1e3, (t.start_mc - t.hysteresis_mc) as f64 / 1e3);
        let since_us = self.heat_at_us.map_or(u64::MAX, |at| sample.at_us.saturating_sub(at));
        if since_us < t.step_us {
            return;
        }
        let kernel = !sample.throttle.active.is_empty();
        let over_c = ahead_c.max(here_c) - start_c;
        let wanted = if over_c >= 0.0 || kernel {
            // Far above, one step at a time would come too late.
            let steps = (1.0 + over_c.max(0.0) / 2.0) as u32;
            (self.heat_steps + steps.clamp(1, STEPS_AT_ONCE)).min(ladder.depth())
        } else if ahead_c < back_c && here_c < back_c {
            self.heat_steps.saturating_sub(1)
        } else {
            self.heat_steps
        };
        if wanted != self.heat_steps {
            self.heat_steps = wanted;
            self.heat_at_us = Some(sample.at_us);
        }
    }

    fn watts(&mut self, profile: &Profile, ladder: &Ladder, sample: &Sample, elapsed_s: f64, phase: Phase) {
        // Average over-current is the module's own cap; instantaneous events are everyday.
        let oc = sample.throttle.oc_counts[1];
        let is_over = oc.zip(self.oc_seen).is_some_and(|(now, seen)| now > seen);
        self.oc_seen = oc.or(self.oc_seen);
        let Some(cap_mw) = profile.cap_mw else {
            self.watt_steps =
                if is_over { (self.watt_steps + 1).min(ladder.depth()) } else { self.watt_steps };
            return;
        };
        let Some(now_mw) = sample.total_mw.map(f64::from) else { return };
        let average = self.watt_mw.map_or(now_mw, |a| a + (now_mw - a) * (1.0 - (-elapsed_s / WATT_S).exp()));
        self.watt_mw = Some(average);
        let over = average / cap_mw as f64;
        let since_us = sample.at_us.saturating_sub(self.watt_at_us);
        let busy_us = self.busy_since_us.map_or(0, |t| sample.at_us.saturating_sub(t));
        let wanted = if (over > 1.0 || is_over) && since_us >= WATT_DOWN_US {
            let steps = ((over - 1.0).max(0.0) / WATT_STEP).ceil() as u32;
            (self.watt_steps + steps.clamp(1, STEPS_AT_ONCE)).min(ladder.depth())
        } else if over < WATT_ROOM && since_us >= WATT_UP_US && phase != Phase::Idle && busy_us >= WATT_UP_US
        {
            // An idle board draws little, which says nothing of what the next burst will.
            self.watt_steps.saturating_sub(1)
        } else {
            self.watt_steps
        };
        if wanted != self.watt_steps {
            self.watt_steps = wanted;
            self.watt_at_us = sample.at_us;
        }
    }

    /// The profile, less what is taken.
    fn answer(
        &self,
        profile: &Profile,
        ladder: &Ladder,
        phase: Phase,
        trouble: Option<String>,
        inputs: &Inputs,
    ) -> Decision {
        let running = inputs.demand.running;
        let steps = self.heat_steps.max(self.watt_steps);
        let mut clocks = profile.clocks[phase.index()];
        if phase == Phase::Decode
            && let Some(wide) = profile.wide
            && running >= wide.from_batch
        {
            clocks.gpu_cap_hz = Some(wide.gpu_cap_hz);
        }
        let mut budget =
            Budget { max_batch: profile.max_batch, prefill_chunk: profile.prefill_chunk, pause: false };
        let mut why = Vec::new();
        if steps > 0 && phase != Phase::Idle {
            let (cap, beyond) = ladder.below(clocks.gpu_cap_hz, steps);
            clocks.gpu_cap_hz = cap;
            // Memory is favoured: it gives way only where the GPU is too slow to use it, or can go no lower.
            if beyond > 0 || cap.is_some_and(|hz| hz < profile.thermal.emc_keep_hz) {
                let lower = ladder.emc_hz.iter().rev().nth(1);
                clocks.emc_floor_hz = clocks.emc_floor_hz.map(|hz| lower.map_or(hz, |&l| hz.min(l)));
            }
        }
        if self.heat_steps > 0 {
            budget.prefill_chunk =
                (budget.prefill_chunk * profile.thermal.prefill_percent as usize / 100).max(16);
            if phase == Phase::Prefill {
                let full = profile.clocks[phase.index()].gpu_cap_hz.or(ladder.gpu_hz.last().copied());
                let half = full.map(|hz| ladder.at_most(hz * profile.thermal.prefill_percent as u64 / 100));
                clocks.gpu_cap_hz = [clocks.gpu_cap_hz, half].into_iter().flatten().min();
            }
            why.push(Why::Heat(self.heat_steps));
        }
        if self.watt_steps > 0 {
            why.push(Why::Watts(self.watt_steps));
        }
        if self.fault {
            let cap = [Some(profile.fallback.gpu_cap_hz), clocks.gpu_cap_hz].into_iter().flatten().min();
            clocks = Clocks { gpu_cap_hz: cap, ..Clocks::default() };
            budget.max_batch = budget.max_batch.min(profile.fallback.max_batch);
            budget.prefill_chunk = (budget.prefill_chunk / 2).max(16);
            why.push(Why::Fault(trouble.unwrap_or_else(|| "sensors are back, and watched".into())));
        }
        if self.paused {
            budget.pause = true;
            clocks = Clocks { gpu_cap_hz: ladder.gpu_hz.first().copied(), ..Clocks::default() };
            why.push(Why::Pause);
        }
        if let Some(throttle) = inputs.sample.map(|s| &s.throttle.active).filter(|a| !a.is_empty()) {
            why.push(Why::Kernel(throttle.join(", ")));
        }
        // A floor above its cap would be refused.
        clocks.gpu_floor_hz = clocks.gpu_floor_hz.map(|f| clocks.gpu_cap_hz.map_or(f, |cap| f.min(cap)));
        Decision { budget, clocks, why }
    }
}

#[cfg(test)]
#[path = "governor_tests.rs"]
mod tests;
