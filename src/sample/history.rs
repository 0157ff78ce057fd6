//! Penalties for tokens and passages that were used already.

use super::params::SampleParams;
use crate::units::TokenId;
use std::collections::HashMap;

/// Tokens a history keeps when nothing bounds the look-back: the longest context anyone samples with.
const HISTORY_MAX: usize = 1 << 20;

/// Recent tokens, as many as any penalty looks back.
#[derive(Debug)]
pub struct History {
    tokens: Vec<TokenId>,
    keep: usize,
    /// DRY's breakers, sorted, so that those that begin with a token stand together.
    breakers: Vec<Vec<TokenId>>,
    // Scratch, kept so that a step allocates nothing.
    counts: HashMap<TokenId, u32>,
    z: Vec<usize>,
    longest: HashMap<TokenId, usize>,
}

impl History {
    /// A history for these parameters; keeps nothing if nothing would read it.
    pub fn new(p: &SampleParams) -> History {
        let reach =
            |on: bool, n: Option<usize>| if on { n.unwrap_or(HISTORY_MAX).min(HISTORY_MAX) } else { 0 };
        let penalties = p.repeat_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0;
        let keep = reach(penalties, p.repeat_last_n).max(reach(p.dry_multiplier > 0.0, p.dry_penalty_last_n));
        let mut breakers: Vec<_> = p.dry_breakers.iter().filter(|b| !b.is_empty()).cloned().collect();
        breakers.sort_unstable();
        let (tokens, counts, z, longest) = (Vec::new(), HashMap::new(), Vec::new(), HashMap::new());
        History { tokens, keep, breakers, counts, z, longest }
    }

    /// Adds a token.
    pub fn push(&mut self, token: TokenId) {
        if self.keep == 0 {
            return;
        }
        if self.tokens.len() >= 2 * self.keep {
            self.tokens.drain(..self.tokens.len() - self.keep);
        }
        self.tokens.push(token);
    }

    fn last(&self, n: Option<usize>) -> &[TokenId] {
        &self.tokens[self.tokens.len().saturating_sub(n.unwrap_or(usize::MAX).min(self.keep))..]
    }

    /// Applies all penalties.
    pub fn penalize(&mut self, p: &SampleParams, logits: &mut [f32]) {
        if self.keep == 0 {
            return;
        }
        let mut counts = std::mem::take(&mut self.counts);
        counts.clear();
        self.last(p.repeat_last_n).iter().for_each(|&t| *counts.entry(t).or_insert(0) += 1);
        for (&t, &n) in &counts {
            if let Some(l) = logits.get_mut(t as usize) {
                *l = if *l <= 0.0 { *l * p.repeat_penalty } else { *l / p.repeat_penalty };
                *l -= n as f32 * p.frequency_penalty + p.presence_penalty;
            }
        }
        self.counts = counts;
        if p.dry_multiplier > 0.0 {
            self.dry(p, logits);
        }
    }

    /// The breakers that begin with `token`.
    fn breakers_of(&self, token: TokenId) -> &[Vec<TokenId>] {
        let from = self.breakers.partition_point(|b| b[0] < token);
        let to = self.breakers.partition_point(|b| b[0] <= token);
        &self.breakers[from..to]
    }

    /// How many tokens at the end of `window` no breaker reaches into.
    fn unbroken(&self, window: &[TokenId]) -> usize {
        let n = window.len();
        for back in 0..n {
            let tail = &window[n - 1 - back..];
            let longest =
                self.breakers_of(tail[0]).iter().filter(|b| tail.starts_with(b)).map(Vec::len).max();
            if let Some(len) = longest {
                return back + 1 - len;
            }
        }
        n
    }

    /// DRY: if the text ends with a passage that stood before, the token that followed it then costs
    /// `multiplier * base^(length - allowed)`.
    fn dry(&mut self, p: &SampleParams, logits: &mut [f32]) {
        let (mut z, mut longest) = (std::mem::take(&mut self.z), std::mem::take(&mut self.longest));
        longest.clear();
        let window = self.last(p.dry_penalty_last_n);
        let n = window.len();
        let back = |i: usize| window[n - 1 - i];
        let limit = self.unbroken(window);
        z_function(n, &back, &mut z);
        for (i, &matched) in z.iter().enumerate().skip(1) {
            let len = matched.min(limit);
            if len >= p.dry_allowed_length.max(1) {
                let best = longest.entry(back(i - 1)).or_insert(0);
                *best = len.max(*best);
            }
        }
        for (&t, &len) in &longest {
            // What ends a passage is free, or lists and dialogues could never go on.
            if self.breakers_of(t).iter().any(|b| b.len() == 1) {
                continue;
            }
            if let Some(l) = logits.get_mut(t as usize) {
                // Capped, so that long loops do not overflow; f32 has no use for more.
                let power = p.dry_base.powi((len - p.dry_allowed_length.min(len)).min(200) as i32);
                *l -= (p.dry_multiplier * power).min(1e9);
            }
        }
        (self.z, self.longest) = (z, longest);
    }
}

/// `z[i]` = length of the longest common prefix of the sequence and its suffix from `i`, in linear time.
fn z_function(n: usize, at: &dyn Fn(usize) -> TokenId, z: &mut Vec<usize>) {
    z.clear();
    z.resize(n, 0);
    let (mut left, mut right) = (0, 0);
    for i in 1..n {
        let mut len = if i < right { z[i - left].min(right - i) } else { 0 };
        while i + len < n && at(len) == at(i + len) {
            len += 1;
        }
        z[i] = len;
        if i + len > right {
            (left, right) = (i, i + len);
        }
    }
}
