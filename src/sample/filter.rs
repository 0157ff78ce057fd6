//! Filters over candidates. Each leaves at least one.
//!
//! A vocabulary has 100,000s of tokens and a filter keeps a handful, so nothing sorts them all unless it must: what
//! asks for the likeliest `n` selects them first, and what compares with a floor does not sort at all.

use super::rng::Rng;
use crate::units::TokenId;
use std::cmp::Ordering;

/// A token that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Its logit.
    pub logit: f32,
    /// Its id.
    pub id: TokenId,
}

/// Likeliest first; ties by lower id.
fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// The tokens still in play. They are in one of two orders, both independent of how the standard library selects, so that
/// a seed gives the same text with any compiler: by id as collected, or likeliest first once a filter needed that.
#[derive(Debug, Default)]
pub struct Candidates {
    list: Vec<Candidate>,
    is_ranked: bool,
    /// Scratch: (distance from the entropy, candidate), for typical sampling.
    typical: Vec<(f32, Candidate)>,
}

impl Candidates {
    /// Takes all tokens with a chance, within `n_sigma` standard deviations of the best if that is above 0.
    pub fn collect(&mut self, logits: &[f32], n_sigma: f32) {
        let mut floor = f32::NEG_INFINITY;
        if n_sigma > 0.0 {
            let finite = || logits.iter().filter(|l| l.is_finite()).map(|&l| f64::from(l));
            let n = finite().count() as f64;
            let mean = finite().sum::<f64>() / n;
            let sigma = (finite().map(|l| (l - mean).powi(2)).sum::<f64>() / n).sqrt();
            let max = finite().fold(f64::NEG_INFINITY, f64::max);
            floor = (max - f64::from(n_sigma) * sigma) as f32;
        }
        self.is_ranked = false;
        self.list.clear();
        let kept = logits.iter().enumerate().filter(|(_, l)| **l > f32::NEG_INFINITY && **l >= floor);
        self.list.extend(kept.map(|(i, &logit)| Candidate { logit, id: i as TokenId }));
        if self.list.is_empty() {
            self.list.push(Candidate { logit: 0.0, id: super::argmax(logits) });
        }
    }

    /// The candidates.
    pub fn list(&self) -> &[Candidate] {
        &self.list
    }

    /// Keeps the `k` likeliest; 0 keeps all.
    pub fn top_k(&mut self, k: usize) {
        if k == 0 || k >= self.list.len() {
            return;
        }
        if !self.is_ranked {
            self.list.select_nth_unstable_by(k - 1, by_logit);
        }
        self.list.truncate(k);
        self.rank_from(0);
        self.is_ranked = true;
    }

    fn rank_from(&mut self, from: usize) {
        self.list[from..].sort_unstable_by(by_logit);
    }

    fn max(&self) -> f32 {
        self.list.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    /// (greatest logit, sum of the exponentials above it): what turns a logit into a probability.
    fn scale(&self) -> (f32, f64) {
        let max = self.max();
        (max, self.list.iter().map(|c| f64::from((c.logit - max).exp())).sum())
    }

    /// Keeps the likeliest until they sum to `p`.
    pub fn top_p(&mut self, p: f32) {
        // The first guess at how many that takes; each further one is this much larger.
        const FIRST: usize = 128;
        const GROWTH: usize = 8;
        if p >= 1.0 {
            return;
        }
        let (max, total) = self.scale();
        let (mut sum, mut ranked) = (0.0, if self.is_ranked { self.list.len() } else { 0 });
        self.is_ranked = true;
        for i in 0..self.list.len() {
            if i == ranked {
                let next = (ranked * GROWTH).max(FIRST).min(self.list.len());
                if next < self.list.len() {
                    self.list[ranked..].select_nth_unstable_by(next - ranked - 1, by_logit);
                }
                self.list[ranked..next].sort_unstable_by(by_logit);
                ranked = next;
            }
            sum += f64::from((self.list[i].logit - max).exp()) / total;
            if sum >= f64::from(p) {
                self.list.truncate(i + 1);
                return;
            }
        }
    }

    /// Drops candidates below `p` times the likeliest's probability.
    pub fn min_p(&mut self, p: f32) {
        if p > 0.0 {
            let max = self.max();
            let floor = max + p.ln();
            // `>= max` keeps the best one whatever rounding does to the floor at p = 1.
            self.list.retain(|c| c.logit >= floor || c.logit >= max);
        }
    }

    /// Keeps the candidates whose surprise is closest to the distribution's entropy until they sum to more than `p`.
    pub fn typical(&mut self, p: f32) {
        const FIRST: usize = 128;
        const GROWTH: usize = 8;
        if p >= 1.0 {
            return;
        }
        let (max, total) = self.scale();
        let ln_total = total.ln() as f32;
        let ln_p = |c: &Candidate| c.logit - max - ln_total;
        let entropy: f64 = self.list.iter().map(|c| f64::from(-ln_p(c)) * f64::from(ln_p(c).exp())).sum();
        let scratch = &mut self.typical;
        scratch.clear();
        scratch.extend(self.list.iter().map(|c| ((-ln_p(c) - entropy as f32).abs(), *c)));
        let nearest = |a: &(f32, Candidate), b: &(f32, Candidate)| {
            a.0.total_cmp(&b.0).then_with(|| by_logit(&a.1, &b.1))
        };
        let (mut sum, mut ranked, mut keep) = (0.0, 0, scratch.len());
        for i in 0..scratch.len() {
            if i == ranked {
                let next = (ranked * GROWTH).max(FIRST).min(scratch.len());
                if next < scratch.len() {
                    scratch[ranked..].select_nth_unstable_by(next - ranked - 1, nearest);
                }
                scratch[ranked..next].sort_unstable_by(nearest);
                ranked = next;
            }
            sum += f64::from(ln_p(&scratch[i].1).exp());
            if sum > f64::from(p) {
                keep = i + 1;
                break;
            }
        }
        self.list.clear();
        self.list.extend(scratch[..keep].iter().map(|s| s.1));
        self.rank_from(0);
        self.is_ranked = true;
    }

    /// With `probability`, drops all candidates at or above `threshold` but the least likely of them.
    pub fn xtc(&mut self, probability: f32, threshold: f32, rng: &mut Rng) {
        if probability <= 0.0
            || threshold > 0.5
            || self.list.len() < 2
            || rng.unit() >= f64::from(probability)
        {
            return;
        }
        let (max, total) = self.scale();
        let is_likely = |c: &Candidate| f64::from((c.logit - max).exp()) / total >= f64::from(threshold);
        let likely = self.list.iter().copied().filter(is_likely);
        if let Some(least) = likely.max_by(by_logit) {
            self.list.retain(|c| !is_likely(c) || c.id == least.id);
        }
    }

    /// Divides all logits, then draws one by its probability. `weights` is scratch.
    pub fn draw(&mut self, temperature: f32, weights: &mut Vec<f64>, rng: &mut Rng) -> TokenId {
        self.list.iter_mut().for_each(|c| c.logit /= temperature);
        let max = self.max();
        weights.clear();
        weights.extend(self.list.iter().map(|c| f64::from((c.logit - max).exp())));
        let mut left = rng.unit() * weights.iter().sum::<f64>();
        for (c, w) in self.list.iter().zip(weights.iter()) {
            left -= w;
            if left < 0.0 {
                return c.id;
            }
        }
        // Rounding can leave a crumb: the last candidate that has any weight takes it.
        let last = self.list.iter().zip(weights.iter()).rev().find(|(_, w)| **w > 0.0);
        last.map_or(self.list[0].id, |(c, _)| c.id)
    }
}
