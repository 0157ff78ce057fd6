//! Tensors that binding never asked for. A checkpoint with one is of a model that this program does not know in full:
//! run without it, the model would answer, and answer wrongly, so it is refused by the tensor's name.

use super::hyper::Hyper;
use crate::units::{Error, Result};
use crate::weights::{Meta, Source};

/// Checks that every tensor of `source` was read, or is known not to be needed; gives the latter.
pub(super) fn check(source: &Source, h: &Hyper, read: &[bool]) -> Result<Vec<usize>> {
    let tensors = source.tensors();
    let hf = matches!(source.meta(), Meta::HuggingFace(_));
    // A tensor's block scales belong to it, read or not.
    let mut scales = vec![false; tensors.len()];
    tensors.iter().filter_map(|t| t.scale).for_each(|s| scales[s] = true);
    let mut left = Vec::new();
    for (t, tensor) in tensors.iter().enumerate() {
        if read[t] || scales[t] {
            continue;
        }
        let name = tensor.name.as_str();
        let unneeded = if hf { unneeded_hf(name, source, h) } else { unneeded_gguf(name, source, h) };
        if !unneeded {
            let expected = match name.strip_suffix(".bias") {
                Some(of) => format!("no bias: a {} has none at {of} here", h.arch),
                None => format!("a tensor that a {} has here", h.arch),
            };
            return Err(Error::bad(
                source.file_of(t),
                format_args!("tensor {name}"),
                expected,
                "one that nothing would read",
            ));
        }
        left.push(t);
    }
    if !left.is_empty() {
        log::info!("{}: {} tensors are not needed and stay unread", source.path().display(), left.len());
    }
    Ok(left)
}

/// The layer that a tensor belongs to, `at` being what comes before its number.
fn layer(name: &str, at: &str) -> Option<usize> {
    name.strip_prefix(at)?.split('.').next()?.parse().ok()
}

/// Buffers that old checkpoints saved (all follow from the configuration), the head that a tied one shadows, and the
/// layers of multi-token prediction, which come after the decoder's and have a projection that no other layer has.
fn unneeded_hf(name: &str, source: &Source, h: &Hyper) -> bool {
    let predicts = |l: usize| source.find(&format!("model.layers.{l}.eh_proj.weight")).is_some();
    let buffers = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".self_attn.masked_bias"];
    buffers.iter().any(|b| name.ends_with(b))
        || h.tied_head && name == "lm_head.weight"
        || layer(name, "model.layers.").is_some_and(|l| l >= h.n_layers && predicts(l))
}

/// Rotary frequencies, as factors (read with the hyperparameters) or as they are (they follow from the metadata);
/// multi-token prediction; and keys and values in one beside the two that are read.
fn unneeded_gguf(name: &str, source: &Source, h: &Hyper) -> bool {
    let split = |kv_b: &str| source.find(&format!("{kv_b}k_b.weight")).is_some();
    name == "rope_freqs.weight"
        || name.ends_with(".rope_freqs.weight")
        || name.ends_with(".attn_rot_embd.weight")
        || layer(name, "blk.").is_some_and(|l| l >= h.n_layers)
        || name.strip_suffix("kv_b.weight").is_some_and(split)
}
