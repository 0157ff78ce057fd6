//! Tuning: finds a board's knee and its best trades of speed, energy and peak power in a fraction of an exhaustive
//! sweep's runs, and writes what it found as a profile.
//!
//! A few runs spread over the space begin. Then a model of what is known ([`surrogate`]) proposes the setting that
//! would add most to the front if it turned out as well as it plausibly might, until the runs are used up or nothing
//! is left to gain.

pub mod front;
pub mod sim;
mod surrogate;

use front::Goals;
use surrogate::{Place, Surrogate};

use super::profile::{Profile, mhz_text};
use super::types::{Clocks, Phase};
use crate::units::{Error, Result};

/// A setting to be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Ceiling of the GPU clock.
    pub gpu_hz: u64,
    /// Memory clock.
    pub emc_hz: u64,
    /// Sequences side by side.
    pub batch: usize,
}

/// What a setting gives while it decodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Generated tokens a second, all sequences together.
    pub tok_s: f64,
    /// Joules a token, of the whole module.
    pub j_per_token: f64,
    /// Highest power, in W, averaged over a second or so.
    pub peak_w: f64,
}

impl Measured {
    /// As goals to be made small, in logarithms: equal gains count the same anywhere.
    fn goals(&self) -> Goals {
        [-self.tok_s.ln(), self.j_per_token.ln(), self.peak_w.ln()]
    }

    fn is_sane(&self) -> bool {
        [self.tok_s, self.j_per_token, self.peak_w].iter().all(|x| x.is_finite() && *x > 0.0)
    }
}

/// What can be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// GPU clocks, rising.
    pub gpu_hz: Vec<u64>,
    /// Memory clocks, rising.
    pub emc_hz: Vec<u64>,
    /// Batches, rising.
    pub batch: Vec<usize>,
}

impl Space {
    /// Every setting: what an exhaustive sweep measures.
    pub fn settings(&self) -> Vec<Setting> {
        let mut all = Vec::new();
        for &gpu_hz in &self.gpu_hz {
            for &emc_hz in &self.emc_hz {
                all.extend(self.batch.iter().map(|&batch| Setting { gpu_hz, emc_hz, batch }));
            }
        }
        all
    }

    /// Runs that a tuning may take: a quarter of the sweep's, and no fewer than it takes to begin.
    pub fn runs_max(&self) -> usize {
        (self.settings().len() / 4).max(8)
    }

    /// Settings to begin with: corners and the middle of each pair of clocks, at the ends of the batch.
    fn first(&self) -> Vec<Setting> {
        let ends = |v: &[usize]| [v[0], v[v.len() - 1]];
        let (g, e) = (&self.gpu_hz, &self.emc_hz);
        let middle = g[g.len() / 2];
        let mut first = Vec::new();
        for batch in ends(&self.batch) {
            // The two highest memory clocks decide; the lowest says how bad it gets.
            for &emc_hz in e.iter().rev().take(2) {
                for gpu_hz in [g[0], middle, g[g.len() - 1]] {
                    first.push(Setting { gpu_hz, emc_hz, batch });
                }
            }
            first.push(Setting { gpu_hz: middle, emc_hz: e[0], batch });
        }
        let mut kept: Vec<Setting> = Vec::new();
        for setting in first {
            if !kept.contains(&setting) {
                kept.push(setting);
            }
        }
        kept
    }
}

/// What a tuning found.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// Every run, in order.
    pub runs: Vec<(Setting, Measured)>,
    /// Those that no other beats in speed, energy and peak power at once.
    pub front: Vec<usize>,
    /// For each memory clock, the lowest GPU clock that is within 3% of its top's speed for the smallest batch, by a
    /// roofline fitted to its runs; empty where they are too few.
    pub knees: Vec<(u64, u64)>,
}

fn place(setting: &Setting) -> Place {
    [(setting.gpu_hz as f64).ln(), (setting.emc_hz as f64).ln(), (setting.batch as f64).ln()]
}

fn learn(runs: &[(Setting, Measured)]) -> Surrogate {
    let places: Vec<Place> = runs.iter().map(|(s, _)| place(s)).collect();
    let goals: Vec<Goals> = runs.iter().map(|(_, m)| m.goals()).collect();
    Surrogate::new(&places, &goals)
}

/// Measures at most `runs_max` settings of a space. `measure` runs one; its error ends the tuning.
pub fn tune(
    space: &Space,
    runs_max: usize,
    measure: &mut dyn FnMut(&Setting) -> Result<Measured>,
) -> Result<Tuning> {
    if space.settings().is_empty() {
        return Err(Error::bad("tune", "space", "at least one GPU clock, memory clock and batch", "none"));
    }
    let mut runs: Vec<(Setting, Measured)> = Vec::new();
    let mut run = |setting: Setting, runs: &mut Vec<(Setting, Measured)>| -> Result<()> {
        let measured = measure(&setting)?;
        if !measured.is_sane() {
            let at = format!("{} MHz, batch {}", mhz_text(setting.gpu_hz), setting.batch);
            return Err(Error::bad(
                "tune",
                at,
                "speed, energy and power above zero",
                format!("{measured:?}"),
            ));
        }
        runs.push((setting, measured));
        Ok(())
    };
    for setting in space.first().into_iter().take(runs_max) {
        run(setting, &mut runs)?;
    }
    while runs.len() < runs_max {
        let Some(next) = propose(space, &runs) else { break };
        run(next, &mut runs)?;
    }
    let goals: Vec<Goals> = runs.iter().map(|(_, m)| m.goals()).collect();
    let knees = knees(space, &runs);
    Ok(Tuning { front: front::front(&goals), runs, knees })
}

/// The unmeasured setting that may add most to the front.
fn propose(space: &Space, runs: &[(Setting, Measured)]) -> Option<Setting> {
    let process = learn(runs);
    let goals: Vec<Goals> = runs.iter().map(|(_, m)| m.goals()).collect();
    let best: Vec<Goals> = front::front(&goals).into_iter().map(|i| goals[i]).collect();
    // A corner a little worse than all that was seen, so that the ends of the front count.
    let corner: Goals = std::array::from_fn(|g| goals.iter().map(|p| p[g]).fold(f64::MIN, f64::max) + 0.1);
    let now = front::hypervolume(&best, &corner);
    let gain = |setting: &Setting| {
        let (mean, deviation) = process.predict(&place(setting));
        // Half a deviation better than expected: curious, but not about everything.
        let hoped: Goals = std::array::from_fn(|g| mean[g] - 0.5 * deviation[g]);
        let mut with = best.clone();
        with.push(hoped);
        front::hypervolume(&with, &corner) - now
    };
    let open = space.settings().into_iter().filter(|s| runs.iter().all(|(r, _)| r != s));
    let (best_gain, setting) = open.map(|s| (gain(&s), s)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    // A thousandth of what the front commands is less than the meters can tell apart.
    (best_gain > 1e-3 * now).then_some(setting)
}

/// A roofline of decode: a step's time is `(memory/emc)^p` and `(arithmetic/gpu)^p` added, to the power of `1/p`.
#[derive(Debug, Clone, Copy)]
struct Roofline {
    memory: f64,
    arithmetic: f64,
    sharpness: f64,
}

impl Roofline {
    /// Time of a step, in units of the fit.
    fn time(&self, gpu_hz: u64, emc_hz: u64) -> f64 {
        let p = self.sharpness;
        (self.memory * (emc_hz as f64).powf(-p) + self.arithmetic * (gpu_hz as f64).powf(-p)).powf(1.0 / p)
    }

    /// The best fit by relative error to runs of one batch; none for fewer than four.
    fn fit(runs: &[(Setting, Measured)]) -> Option<Roofline> {
        if runs.len() < 4 {
            return None;
        }
        let fits = [1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0].into_iter().map(|p| Roofline::fit_sharp(runs, p));
        fits.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(fit, _)| fit)
    }

    /// With a given exponent the fit is linear in two unknowns: least squares of `a·x + b·y = 1`. Returns its error
    /// too.
    fn fit_sharp(runs: &[(Setting, Measured)], p: f64) -> (Roofline, f64) {
        let rows = runs.iter().map(|(s, m)| {
            // The time's own power divides both, so that each run counts by its relative error.
            let scale = m.tok_s.powf(p);
            (scale * (s.emc_hz as f64).powf(-p), scale * (s.gpu_hz as f64).powf(-p))
        });
        let rows: Vec<(f64, f64)> = rows.collect();
        // Clocks in Hz to some power are tiny: each column by its own size.
        let size = |pick: fn(&(f64, f64)) -> f64| rows.iter().map(pick).fold(0.0, f64::max);
        let (sx, sy) = (size(|r| r.0), size(|r| r.1));
        let sum = |f: &dyn Fn(f64, f64) -> f64| rows.iter().map(|(x, y)| f(x / sx, y / sy)).sum::<f64>();
        let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
        let (x1, y1) = (sum(&|x, _| x), sum(&|_, y| y));
        let det = xx * yy - xy * xy;
        let (a, b) = match det > 1e-12 {
            true => ((x1 * yy - y1 * xy) / det, (y1 * xx - x1 * xy) / det),
            false => (x1 / xx, 0.0),
        };
        // Neither part of a time can be less than nothing.
        let (a, b) = match (a < 0.0, b < 0.0) {
            (true, _) => (0.0, y1 / yy),
            (_, true) => (x1 / xx, 0.0),
            _ => (a, b),
        };
        // The error is that of the time itself: exponents are compared by it.
        let error = sum(&|x, y| ((a * x + b * y).max(1e-300).ln() / p).powi(2));
        (Roofline { memory: a / sx, arithmetic: b / sy, sharpness: p }, error)
    }
}

fn knees(space: &Space, runs: &[(Setting, Measured)]) -> Vec<(u64, u64)> {
    let smallest: Vec<_> = runs.iter().copied().filter(|(s, _)| s.batch == space.batch[0]).collect();
    let Some(fit) = Roofline::fit(&smallest) else { return Vec::new() };
    let knee = |emc_hz: u64| {
        let top = space.gpu_hz[space.gpu_hz.len() - 1];
        let enough = fit.time(top, emc_hz) / 0.97;
        space.gpu_hz.iter().copied().find(|&gpu_hz| fit.time(gpu_hz, emc_hz) <= enough).unwrap_or(top)
    };
    space.emc_hz.iter().map(|&emc_hz| (emc_hz, knee(emc_hz))).collect()
}

/// What a profile is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Least energy a token, at no less than 90% of the speed that its batch can have.
    Efficiency,
    /// Most tokens a second.
    Speed,
}

impl Tuning {
    /// The run that suits a goal best, among those within a power limit; none where every run is above it.
    pub fn best(&self, goal: Goal, peak_w_max: Option<f64>) -> Option<(Setting, Measured)> {
        let fits = |m: &Measured| peak_w_max.is_none_or(|max| m.peak_w <= max);
        let runs = || self.runs.iter().copied().filter(|(_, m)| fits(m));
        let fastest =
            |batch: usize| runs().filter(|(s, _)| s.batch == batch).map(|(_, m)| m.tok_s).fold(0.0, f64::max);
        match goal {
            Goal::Speed => runs().max_by(|a, b| a.1.tok_s.total_cmp(&b.1.tok_s)),
            Goal::Efficiency => runs()
                .filter(|(s, m)| m.tok_s >= 0.9 * fastest(s.batch))
                .min_by(|a, b| a.1.j_per_token.total_cmp(&b.1.j_per_token)),
        }
    }

    /// A profile with that run's clocks in both phases and its batch; everything else as in `base`.
    pub fn profile(&self, name: &str, base: &Profile, chosen: &Setting) -> Profile {
        let clocks = Clocks {
            gpu_cap_hz: Some(chosen.gpu_hz),
            emc_floor_hz: Some(chosen.emc_hz),
            ..Clocks::default()
        };
        let mut profile = base.clone();
        profile.name = name.to_owned();
        profile.about =
            format!("Tuned: {} MHz GPU, {} MHz memory", mhz_text(chosen.gpu_hz), mhz_text(chosen.emc_hz));
        profile.clocks[Phase::Prefill.index()] = clocks;
        profile.clocks[Phase::Decode.index()] = clocks;
        profile.max_batch = chosen.batch;
        profile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        Space {
            gpu_hz: (3..=10).map(|n| n * 102_000_000).collect(),
            emc_hz: vec![204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000],
            batch: vec![1, 2, 4, 8, 16],
        }
    }

    /// A roofline with power that grows as clocks do.
    fn law(s: &Setting) -> Measured {
        let (f, e, b) = (s.gpu_hz as f64 / 1e9, s.emc_hz as f64 / 1e9, s.batch as f64);
        let ms = ((36.0 / e).powi(2) + (21.0 * (0.67 + 0.33 * b) / f).powi(2)).sqrt();
        let tok_s = 1e3 * b / ms;
        let peak_w = 4.5 + 1.3 * f + 0.5 * e + 0.25 * tok_s / b.sqrt();
        Measured { tok_s, j_per_token: peak_w / tok_s, peak_w }
    }

    #[test]
    fn a_quarter_of_the_runs_finds_nearly_all_of_the_front() {
        let space = space();
        let all: Vec<Goals> = space.settings().iter().map(|s| law(s).goals()).collect();
        let corner: Goals = std::array::from_fn(|g| all.iter().map(|p| p[g]).fold(f64::MIN, f64::max));
        let mut taken = 0;
        let tuning = tune(&space, space.runs_max(), &mut |s| {
            taken += 1;
            Ok(law(s))
        })
        .unwrap();
        assert!(taken <= space.settings().len() / 4 && taken == tuning.runs.len(), "{taken}");
        let found: Vec<Goals> = tuning.runs.iter().map(|(_, m)| m.goals()).collect();
        let share = front::hypervolume(&found, &corner) / front::hypervolume(&all, &corner);
        assert!(share > 0.97, "{share}");
        // No setting twice, and the knee is where the arithmetic stops to matter.
        for (n, (setting, _)) in tuning.runs.iter().enumerate() {
            assert!(tuning.runs[..n].iter().all(|(s, _)| s != setting));
        }
        let knee = |emc_hz: u64| {
            let ms = |gpu_hz: u64| 1e3 / law(&Setting { gpu_hz, emc_hz, batch: 1 }).tok_s;
            space.gpu_hz.iter().copied().find(|&g| ms(g) <= ms(1_020_000_000) / 0.97).unwrap()
        };
        for &(emc_hz, gpu_hz) in &tuning.knees {
            assert_eq!(gpu_hz, knee(emc_hz), "{:?}", tuning.knees);
        }
        assert_eq!(tuning.knees.len(), 4);
    }

    #[test]
    fn the_best_run_keeps_its_limits_and_becomes_a_profile() {
        let space = space();
        let tuning = tune(&space, space.runs_max(), &mut |s| Ok(law(s))).unwrap();
        let (fast, fast_m) = tuning.best(Goal::Speed, None).unwrap();
        assert_eq!(fast.gpu_hz, 1_020_000_000);
        let (frugal, m) = tuning.best(Goal::Efficiency, Some(fast_m.peak_w * 0.8)).unwrap();
        assert!(m.peak_w <= fast_m.peak_w * 0.8 && m.j_per_token < fast_m.j_per_token * 1.2);
        assert_eq!(tuning.best(Goal::Speed, Some(1.0)), None);
        let base = Profile::find("balanced", "orin-nano-8-super").unwrap();
        let profile = tuning.profile("mine", &base, &frugal);
        let again = Profile::parse(std::path::Path::new("mine.toml"), &profile.to_toml("Tuned.")).unwrap();
        assert_eq!(profile, again);
        assert_eq!(again.clocks[1].gpu_cap_hz, Some(frugal.gpu_hz));
    }

    #[test]
    fn a_broken_meter_or_an_empty_space_is_an_error() {
        let broken = |_: &Setting| Ok(Measured { tok_s: 1.0, j_per_token: f64::NAN, peak_w: 5.0 });
        assert!(tune(&space(), 10, &mut { broken }).unwrap_err().to_string().contains("NaN"));
        let empty = Space { batch: Vec::new(), ..space() };
        assert!(tune(&empty, 10, &mut |s| Ok(law(s))).is_err());
        let one = Space { gpu_hz: vec![1], emc_hz: vec![1], batch: vec![1] };
        assert_eq!(tune(&one, 10, &mut |_| Ok(law(&space().settings()[0]))).unwrap().runs.len(), 1);
    }
}
