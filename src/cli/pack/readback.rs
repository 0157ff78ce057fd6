//! What was written, read again: a packed model must be the model that it was made from. Every number that the program
//! reads from the one is compared with what it reads from the other, so that nothing can be lost on the way unsaid.

use std::path::Path;

use super::convert::{OutTensor, Recipe};
use super::hparams;
use crate::format::gguf;
use crate::model::{self, Hyper, Rope, RopePairs, bind};
use crate::units::{Error, Result};
use crate::weights::{Meta, Source};

/// Rounding that scales and frequencies may pick up: a few steps of f32. Anything meant differs by far more.
const ROUNDING: f32 = 1e-6;

/// Opens the file at `path` as any model is opened, every tensor bound, and compares it with `want`, read from `source`.
pub fn check(source: &Source, want: &Hyper, path: &Path) -> Result<()> {
    let written = Source::open(path)?;
    compare(source, want, &bind(&written)?.hyper)
}

/// As [`check`], of what is about to be written.
pub fn foresee(source: &Source, want: &Hyper, meta: &hparams::Meta, tensors: &[OutTensor]) -> Result<()> {
    let mut entries = gguf::Meta::new(source.path());
    for (key, value) in meta {
        assert!(entries.insert(key.clone(), value.clone()), "{key} is written twice");
    }
    let find = |name: &str| tensors.iter().find(|t| t.name == name);
    let dims = |name: &str| find(name).map(|t| t.dims.clone());
    let rope_factors = find("rope_freqs.weight").and_then(|t| match &t.recipe {
        Recipe::Values(v) => Some(v.clone()),
        Recipe::Pieces(_) => None,
    });
    let got = model::gguf::hyper(&entries, &model::gguf::Directory { dims: &dims, rope_factors })?;
    compare(source, want, &got)
}

fn compare(source: &Source, want: &Hyper, got: &Hyper) -> Result<()> {
    // GGUF's llama has the rows of q and k in another order, and turns them accordingly.
    let turned = got.arch == "llama" && matches!(source.meta(), Meta::HuggingFace(_));
    match difference(want, got, turned) {
        None => Ok(()),
        Some((field, want, got)) => {
            let expected = format!("{want}, as in the model");
            Err(Error::bad(source.path(), format_args!("{field} in the packed file"), expected, got))
        }
    }
}

/// The first number that differs: its name, and what it is in both. `turned`: whether rotary pairs were brought together.
fn difference(a: &Hyper, b: &Hyper, turned: bool) -> Option<(&'static str, String, String)> {
    fn pair<T: std::fmt::Debug>(a: T, b: T) -> (String, String) {
        (format!("{a:?}"), format!("{b:?}"))
    }
    let pairs = if turned { RopePairs::Interleaved } else { a.rope.pairs };
    let near = |a: f32, b: f32| a == b || (a / b - 1.0).abs() <= ROUNDING;
    let ropes = (Rope::new(&a.rope), Rope::new(&b.rope));
    let turns = (&ropes.0.inv_freq, &ropes.1.inv_freq);
    let same_turns = turns.0.len() == turns.1.len() && turns.0.iter().zip(turns.1).all(|(a, b)| near(*a, *b));
    let magnitude = (ropes.0.attention_factor, ropes.1.attention_factor);
    let rows = [
        ("vocabulary size", a.vocab == b.vocab, pair(a.vocab, b.vocab)),
        ("hidden size", a.hidden == b.hidden, pair(a.hidden, b.hidden)),
        ("layer count", a.n_layers == b.n_layers, pair(a.n_layers, b.n_layers)),
        ("context length", a.context_tokens == b.context_tokens, pair(a.context_tokens, b.context_tokens)),
        ("norm epsilon", a.norm_eps == b.norm_eps, pair(a.norm_eps, b.norm_eps)),
        ("attention", a.attn == b.attn, pair(a.attn, b.attn)),
        ("rope pairs", pairs == b.rope.pairs, pair(pairs, b.rope.pairs)),
        ("rope frequencies", same_turns, pair(&a.rope, &b.rope)),
        ("rope attention factor", near(magnitude.0, magnitude.1), pair(magnitude.0, magnitude.1)),
        ("attention scale", near(a.softmax_scale, b.softmax_scale), pair(a.softmax_scale, b.softmax_scale)),
        ("attention masks", a.masks == b.masks, pair(&a.masks, &b.masks)),
        ("feed-forward width", a.ffn_width == b.ffn_width, pair(a.ffn_width, b.ffn_width)),
        ("routed experts", a.moe == b.moe, pair(&a.moe, &b.moe)),
        ("tied output head", a.tied_head == b.tied_head, pair(a.tied_head, b.tied_head)),
    ];
    let (field, _, (a, b)) = rows.into_iter().find(|(_, same, _)| !same)?;
    Some((field, a, b))
}

#[cfg(test)]
#[path = "readback_tests.rs"]
mod tests;
