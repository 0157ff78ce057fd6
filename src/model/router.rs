//! The router: from logits to picked experts and their weights. Small and scalar everywhere; the definition.
//!
//! Softmax gating follows DeepSeek-V2, Qwen3-MoE, Mixtral and OLMoE; sigmoid gating with a correction bias follows
//! DeepSeek-V3 (arXiv:2412.19437 §2.1.2). Ties go to the lower index.

use super::hyper::{Gating, MoeHyper};
use crate::units::ExpertId;

/// One token's picks, strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pick {
    /// The expert.
    pub expert: ExpertId,
    /// What its output is multiplied by.
    pub weight: f32,
}

/// Chooses `picks.len() == n_picked` experts. `logits` and `scratch` are `(n_experts)`; `logits` become scores.
/// `given` replays recorded choices: only the weights are computed then.
pub fn route(
    m: &MoeHyper,
    bias: Option<&[f32]>,
    logits: &mut [f32],
    scratch: &mut [f32],
    given: Option<&[ExpertId]>,
    picks: &mut [Pick],
) {
    scores(m.gating, logits);
    match given {
        Some(ids) => picks.iter_mut().zip(ids).for_each(|(p, &e)| p.expert = e),
        None => choose(m, bias, logits, scratch, picks),
    }
    picks.iter_mut().for_each(|p| p.weight = logits[p.expert as usize]);
    if m.normalize {
        // The reference adds 1e-20 so that all-zero scores do not divide by zero; f32 sums above it are unchanged.
        let sum: f32 = picks.iter().map(|p| p.weight).sum::<f32>() + 1e-20;
        picks.iter_mut().for_each(|p| p.weight /= sum);
    }
    picks.iter_mut().for_each(|p| p.weight *= m.scale);
}

/// Scores of all experts, in place.
fn scores(gating: Gating, logits: &mut [f32]) {
    match gating {
        Gating::Sigmoid => logits.iter_mut().for_each(|v| *v = 1.0 / (1.0 + (-*v).exp())),
        Gating::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter_mut().for_each(|v| *v = (*v - max).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|v| *v /= sum);
        }
    }
}

/// Group-limited top-k by score plus bias.
fn choose(m: &MoeHyper, bias: Option<&[f32]>, scores: &[f32], choice: &mut [f32], picks: &mut [Pick]) {
    choice.copy_from_slice(scores);
    if let Some(bias) = bias {
        choice.iter_mut().zip(bias).for_each(|(c, b)| *c += b);
    }
    if m.n_groups > 1 {
        let size = m.n_experts / m.n_groups;
        let mut groups = group_scores(m, choice);
        let mut kept = [false; crate::limits::EXPERTS_MAX];
        for _ in 0..m.n_groups_picked {
            let best = argmax(&groups[..m.n_groups]);
            kept[best] = true;
            groups[best] = f32::NEG_INFINITY;
        }
        for (g, keep) in choice.chunks_mut(size).zip(kept) {
            if !keep {
                g.fill(f32::NEG_INFINITY);
            }
        }
    }
    for p in picks {
        let best = argmax(choice);
        p.expert = best as ExpertId;
        choice[best] = f32::NEG_INFINITY;
    }
}

/// Scores of the groups of experts whose choice scores are `choice`.
fn group_scores(m: &MoeHyper, choice: &[f32]) -> [f32; crate::limits::EXPERTS_MAX] {
    let mut groups = [0f32; crate::limits::EXPERTS_MAX];
    for (g, s) in choice.chunks(m.n_experts / m.n_groups).zip(&mut groups) {
        *s = match m.gating {
            // V2 ranks a group by its best expert, V3 by its two best.
            Gating::Softmax => g.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            Gating::Sigmoid => top_two(g),
        };
    }
    groups
}

/// How near a choice was to another one: the least difference of two scores (with bias; of experts, or of groups) that
/// would have to change sign for other picks. `scores` is what [`route`] leaves in its logits. Infinite without a choice.
pub fn margin(m: &MoeHyper, bias: Option<&[f32]>, scores: &[f32]) -> f32 {
    let choice: Vec<f32> = scores.iter().enumerate().map(|(i, s)| s + bias.map_or(0.0, |b| b[i])).collect();
    // Between the n-th and the next of values in falling order.
    let gap = |mut v: Vec<(f32, usize)>, n: usize| {
        v.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let gap = if n < v.len() { v[n - 1].0 - v[n].0 } else { f32::INFINITY };
        v.truncate(n);
        (gap, v)
    };
    let groups = group_scores(m, &choice)[..m.n_groups].iter().copied().zip(0..).collect();
    let (of_groups, kept) = gap(groups, m.n_groups_picked.min(m.n_groups));
    let size = m.n_experts / m.n_groups;
    let experts = kept.iter().flat_map(|(_, g)| (g * size..(g + 1) * size).map(|e| (choice[e], e))).collect();
    of_groups.min(gap(experts, m.n_picked).0)
}

/// The first index of the largest value. With NaN or nothing but -inf: the first that is not yet taken cannot be told
/// apart, so index 0; a model that yields NaN has no right answer.
fn argmax(v: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in v.iter().enumerate() {
        if x > v[best] {
            best = i;
        }
    }
    best
}

fn top_two(v: &[f32]) -> f32 {
    let (mut a, mut b) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &x in v {
        if x > a {
            (a, b) = (x, a);
        } else if x > b {
            b = x;
        }
    }
    if b == f32::NEG_INFINITY { a } else { a + b }
}

/// A router alone, for tests.
#[cfg(test)]
pub fn hyper(
    gating: Gating,
    n_experts: usize,
    n_groups: usize,
    n_groups_picked: usize,
    n_picked: usize,
) -> MoeHyper {
    MoeHyper {
        n_experts,
        n_picked,
        expert_width: 1,
        shared_width: 0,
        gating,
        n_groups,
        n_groups_picked,
        normalize: false,
        scale: 2.0,
        dense: vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(m: &MoeHyper, bias: Option<&[f32]>, logits: &[f32]) -> Vec<Pick> {
        let (mut l, mut s) = (logits.to_vec(), vec![0.0; logits.len()]);
        let mut picks = vec![Pick::default(); m.n_picked];
        route(m, bias, &mut l, &mut s, None, &mut picks);
        picks
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        let picks = run(&hyper(Gating::Softmax, 4, 1, 1, 2), None, &[1.0, 3.0, 3.0, 3.0]);
        assert_eq!([picks[0].expert, picks[1].expert], [1, 2]);
    }

    #[test]
    fn bias_moves_the_choice_but_not_the_weight() {
        let m = hyper(Gating::Sigmoid, 4, 1, 1, 1);
        let picks = run(&m, Some(&[0.0, 0.0, 0.0, 5.0]), &[2.0, 1.0, 0.0, 0.0]);
        assert_eq!(picks[0], Pick { expert: 3, weight: 0.5 * 2.0 });
    }

    #[test]
    fn groups_limit_the_choice() {
        // Group 0 holds the best single expert, group 1 the best pair.
        let logits = [3.0, -9.0, 2.9, 2.9];
        let v2 = run(&hyper(Gating::Softmax, 4, 2, 1, 2), None, &logits);
        assert_eq!([v2[0].expert, v2[1].expert], [0, 1]);
        let v3 = run(&hyper(Gating::Sigmoid, 4, 2, 1, 2), None, &logits);
        assert_eq!([v3[0].expert, v3[1].expert], [2, 3]);
    }

    #[test]
    fn a_margin_is_what_a_choice_hangs_on() {
        let of = |m: &MoeHyper, scores: &[f32], bias: Option<&[f32]>| margin(m, bias, scores);
        let plain = hyper(Gating::Sigmoid, 4, 1, 1, 2);
        assert!((of(&plain, &[0.9, 0.5, 0.4, 0.1], None) - 0.1).abs() < 1e-6);
        assert!((of(&plain, &[0.9, 0.5, 0.4, 0.1], Some(&[0.0, 0.0, 0.08, 0.0])) - 0.02).abs() < 1e-6);
        // Two groups by their sums, 1.4 and 1.3, come before two experts of the first.
        let grouped = hyper(Gating::Sigmoid, 4, 2, 1, 1);
        assert!((of(&grouped, &[0.9, 0.5, 0.7, 0.6], None) - 0.1).abs() < 1e-6);
        let all = hyper(Gating::Softmax, 2, 1, 1, 2);
        assert_eq!(of(&all, &[0.5, 0.5], None), f32::INFINITY);
    }
}
