//! `--check`: does routing differ token by token? Random weights easily send every token to the same experts, and then
//! whatever is measured about experts is wrong.

use std::path::Path;

use crate::app::{self, Options};
use crate::engine::EvalOptions;
use crate::units::Result;

/// Tokens that are routed.
pub const TOKENS: usize = 64;

/// How tokens spread over a layer's experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Spread {
    /// Layer.
    pub layer: usize,
    /// Experts that at least one of the tokens picked.
    pub distinct: usize,
    /// Share of picks that went to the busiest quarter of the experts; 0.25 is even.
    pub top_quarter: f64,
}

/// Loads the model at `path` and routes [`TOKENS`] tokens; gives a row a layer with experts.
pub fn check(path: &Path) -> Result<Vec<Spread>> {
    let mut options = Options::new(path);
    options.context_tokens = TOKENS;
    let mut app = app::prepare(options)?.load(&|_| {})?;
    let hyper = app.engine.hyper();
    let Some(moe) = hyper.moe.clone() else { return Ok(Vec::new()) };
    let (layers, vocab) = (hyper.n_layers, hyper.vocab);
    // Any ids do, as long as they differ: these are spread over the vocabulary.
    let tokens: Vec<u32> = (0..TOKENS).map(|i| (i * (vocab / TOKENS)) as u32).collect();
    let mut counts = vec![vec![0usize; moe.n_experts]; layers];
    let want = EvalOptions { record_routes: true, logits_from: TOKENS, ..EvalOptions::default() };
    app.engine.eval(&tokens, &want, &mut |chunk| {
        for row in chunk.routes.chunks_exact(layers * moe.n_picked) {
            for (layer, picks) in row.chunks_exact(moe.n_picked).enumerate().filter(|(l, _)| !moe.dense[*l]) {
                picks.iter().for_each(|&e| counts[layer][e as usize] += 1);
            }
        }
        Ok(())
    })?;
    let routed = counts.into_iter().enumerate().filter(|(layer, _)| !moe.dense[*layer]);
    Ok(routed.map(|(layer, counts)| spread(layer, counts)).collect())
}

fn spread(layer: usize, mut counts: Vec<usize>) -> Spread {
    let distinct = counts.iter().filter(|&&n| n > 0).count();
    let all: usize = counts.iter().sum();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let top: usize = counts[..counts.len() / 4].iter().sum();
    Spread { layer, distinct, top_quarter: top as f64 / all.max(1) as f64 }
}
