//! Filters over candidates. Each leaves at least one.

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

/// All tokens with a chance, within `n` standard deviations of the best if `n` is above 0.
pub fn collect(c: &mut Vec<Candidate>, logits: &[f32], n_sigma: f32) {
    let mut floor = f32::NEG_INFINITY;
    if n_sigma > 0.0 {
        let finite = || logits.iter().filter(|l| l.is_finite()).map(|&l| f64::from(l));
        let n = finite().count() as f64;
        let mean = finite().sum::<f64>() / n;
        let sigma = (finite().map(|l| (l - mean).powi(2)).sum::<f64>() / n).sqrt();
        let max = finite().fold(f64::NEG_INFINITY, f64::max);
        floor = (max - f64::from(n_sigma) * sigma) as f32;
    }
    c.clear();
    let kept = logits.iter().enumerate().filter(|(_, l)| **l > f32::NEG_INFINITY && **l >= floor);
    c.extend(kept.map(|(i, &logit)| Candidate { logit, id: i as TokenId }));
    if c.is_empty() {
        c.push(Candidate { logit: 0.0, id: super::argmax(logits) });
    }
}

/// Keeps the `k` likeliest, sorted; 0 keeps and sorts all.
pub fn top_k(c: &mut Vec<Candidate>, k: usize) {
    if k > 0 && k < c.len() {
        c.select_nth_unstable_by(k - 1, by_logit);
        c.truncate(k);
    }
    c.sort_unstable_by(by_logit);
}

/// Probabilities of the candidates, in their order.
pub fn softmax(c: &[Candidate], weights: &mut Vec<f32>) {
    let max = c.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
    weights.clear();
    weights.extend(c.iter().map(|c| (c.logit - max).exp()));
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= sum);
}

/// Keeps the candidates whose surprise is closest to the distribution's entropy until they sum to `p`; leaves them sorted
/// by logit.
pub fn typical(c: &mut Vec<Candidate>, p: f32, weights: &mut Vec<f32>) {
    if p >= 1.0 {
        return;
    }
    softmax(c, weights);
    let entropy: f32 = weights.iter().filter(|w| **w > 0.0).map(|w| -w * w.ln()).sum();
    let mut order: Vec<usize> = (0..c.len()).collect();
    let distance = |i: usize| (-weights[i].ln() - entropy).abs();
    order.sort_by(|&a, &b| distance(a).total_cmp(&distance(b)).then(a.cmp(&b)));
    let mut sum = 0.0;
    let n = order.iter().position(|&i| {
        sum += weights[i];
        sum > p
    });
    order.truncate(n.map_or(c.len(), |n| n + 1).max(1));
    order.sort_unstable();
    let mut at = 0;
    order.iter().for_each(|&i| {
        c[at] = c[i];
        at += 1;
    });
    c.truncate(at);
}

/// Keeps the likeliest until they sum to `p`.
pub fn top_p(c: &mut Vec<Candidate>, p: f32, weights: &mut Vec<f32>) {
    if p >= 1.0 {
        return;
    }
    softmax(c, weights);
    let mut sum = 0.0;
    let n = weights.iter().position(|w| {
        sum += w;
        sum >= p
    });
    c.truncate(n.map_or(c.len(), |n| n + 1).max(1));
}

/// Drops candidates below `p` times the likeliest's probability.
pub fn min_p(c: &mut Vec<Candidate>, p: f32) {
    if p > 0.0 {
        let floor = c[0].logit + p.ln();
        let n = c.iter().take_while(|c| c.logit >= floor).count();
        c.truncate(n.max(1));
    }
}

/// With `probability`, drops all candidates at or above `threshold` but the least likely of them.
pub fn xtc(c: &mut Vec<Candidate>, probability: f32, threshold: f32, weights: &mut Vec<f32>, rng: &mut Rng) {
    if probability <= 0.0 || threshold > 0.5 || c.len() < 2 || rng.unit() >= f64::from(probability) {
        return;
    }
    softmax(c, weights);
    let likely = weights.iter().take_while(|w| **w >= threshold).count();
    if likely >= 2 {
        c.drain(..likely - 1);
    }
}
