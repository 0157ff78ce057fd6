//! Hyperparameters from GGUF metadata (keys as llama.cpp's `gguf-py/gguf/constants.py` names them).
//!
//! What that list has no key for stands under `tegu.`, where `tegu pack` writes it and nobody else looks:
//! [`ROPE_MAGNITUDE`], [`YARN_TRUNCATE`].

use super::hyper::{
    AttnHyper, Gating, Hyper, Mask, MoeHyper, QkNorm, RopeHyper, RopePairs, RopeScaling, in_range,
};
use super::rope::yarn_mscale;
use crate::format::gguf::{Meta, Value};
use crate::limits;
use crate::units::{Error, Result};

/// Architectures that can be read, as `general.architecture` names them.
pub const ARCHITECTURES: [&str; 6] = ["llama", "qwen2", "qwen3", "qwen3moe", "olmoe", "deepseek2"];

/// f32: what cosine and sine are multiplied by under yarn. Of deepseek2 the standard keys tell only the usual case, where
/// `mscale` equals `mscale_all_dim` and this is 1.
pub const ROPE_MAGNITUDE: &str = "tegu.rope.scaling.attention_factor";
/// bool: whether the ends of yarn's ramp are rounded to whole dimensions; true without it.
pub const YARN_TRUNCATE: &str = "tegu.rope.scaling.yarn_truncate";

/// What only the tensor directory tells.
pub struct Directory<'a> {
    /// A tensor's dimensions, outermost first.
    pub dims: &'a dyn Fn(&str) -> Option<Vec<usize>>,
    /// The contents of `rope_freqs.weight`, if there.
    pub rope_factors: Option<Vec<f32>>,
}

/// Reads the metadata.
pub fn hyper(meta: &Meta, dir: &Directory) -> Result<Hyper> {
    let arch = meta.str("general.architecture")?;
    if !ARCHITECTURES.contains(&arch) {
        return Err(meta.bad("general.architecture", &format!("one of {}", ARCHITECTURES.join(", "))));
    }
    let k = Keys { meta, arch };
    let file = meta.path();
    let n_layers = layers(&k)?;
    let hidden = k.need("embedding_length")?;
    let embed = (dir.dims)("token_embd.weight")
        .ok_or_else(|| Error::bad(file, "token_embd.weight", "a tensor", "nothing"))?;
    if embed.len() != 2 {
        return Err(Error::bad(file, "token_embd.weight", "2 dimensions", embed.len()));
    }
    let attn = if arch == "deepseek2" { mla(&k, dir)? } else { gqa(&k, hidden)? };
    let (rope, mscale) = rope(&k, &attn, dir)?;
    let head_width = match attn {
        AttnHyper::Mla { nope_dim, rope_dim, .. } => nope_dim.saturating_add(rope_dim),
        AttnHyper::Gqa { head_dim, .. } => head_dim,
    };
    let plain = 1.0 / (head_width.max(1) as f64).sqrt();
    let scale = k.float("attention.scale")?.filter(|&s| s != 0.0).map_or(plain, f64::from);
    let moe = moe(&k, dir, n_layers)?;
    let per_layer = meta.opt_per_layer(&k.key("feed_forward_length"), k.need("block_count")?)?;
    let h = Hyper {
        arch: arch.to_owned(),
        vocab: embed[0],
        hidden,
        n_layers,
        context_tokens: k.need("context_length")?,
        norm_eps: k
            .float("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| k.missing("attention.layer_norm_rms_epsilon"))?,
        softmax_scale: (scale * mscale * mscale) as f32,
        masks: masks(&k, n_layers)?,
        ffn_width: match (per_layer, &moe) {
            (Some(v), _) => v[0],
            (None, Some(m)) => m.expert_width,
            (None, None) => return Err(k.missing("feed_forward_length")),
        },
        tied_head: (dir.dims)("output.weight").is_none(),
        attn,
        rope,
        moe,
    };
    h.check(file)?;
    Ok(h)
}

/// Layers to run: those after them, for multi-token prediction, are counted too where a file has them.
fn layers(k: &Keys) -> Result<usize> {
    let all = k.need("block_count")?;
    in_range(k.meta.path(), &k.key("block_count"), all, 1, limits::LAYERS_MAX)?;
    let extra = k.uint("nextn_predict_layers")?.unwrap_or(0);
    in_range(k.meta.path(), &k.key("nextn_predict_layers"), extra, 0, all - 1)?;
    Ok(all - extra)
}

/// Sliding windows. The pattern is a flag a layer, or `n`: the last of every `n` layers sees everything (0: none does).
fn masks(k: &Keys, n_layers: usize) -> Result<Vec<Mask>> {
    let Some(window) = k.uint("attention.sliding_window")?.filter(|&w| w > 0) else {
        return Ok(vec![Mask::Full; n_layers]);
    };
    let key = k.key("attention.sliding_window_pattern");
    let slides: Vec<bool> = match k.meta.get(&key) {
        None => vec![true; n_layers],
        Some(Value::Scalars(_)) => {
            let flags = k.meta.opt_flags(&key)?.unwrap_or_default();
            if flags.len() < n_layers {
                let expected = format!("a flag for each of {n_layers} layers");
                return Err(Error::bad(k.meta.path(), key, expected, flags.len()));
            }
            flags
        }
        Some(_) => {
            let every = k.meta.usize(&key)?;
            (0..n_layers).map(|l| every == 0 || l % every + 1 < every).collect()
        }
    };
    let mask = |l: usize| if slides[l] { Mask::Sliding { window } } else { Mask::Full };
    Ok((0..n_layers).map(mask).collect())
}

/// Getters under the architecture's prefix.
struct Keys<'a> {
    meta: &'a Meta,
    arch: &'a str,
}

impl Keys<'_> {
    fn key(&self, k: &str) -> String {
        format!("{}.{k}", self.arch)
    }

    fn missing(&self, k: &str) -> Error {
        Error::bad(self.meta.path(), self.key(k), "a number", "nothing")
    }

    fn uint(&self, k: &str) -> Result<Option<usize>> {
        self.meta.opt_usize(&self.key(k))
    }

    fn need(&self, k: &str) -> Result<usize> {
        self.meta.usize(&self.key(k))
    }

    fn float(&self, k: &str) -> Result<Option<f32>> {
        self.meta.opt_f32(&self.key(k))
    }

    /// A count that may be given a layer; all layers must agree.
    fn uniform(&self, k: &str) -> Result<Option<usize>> {
        let layers = self.need("block_count")?;
        let Some(v) = self.meta.opt_per_layer(&self.key(k), layers)? else { return Ok(None) };
        if v.iter().any(|&n| n != v[0]) {
            return Err(Error::bad(
                self.meta.path(),
                self.key(k),
                "the same number in every layer",
                format!("{v:?}"),
            ));
        }
        Ok(v.first().copied())
    }
}

fn mla(k: &Keys, dir: &Directory) -> Result<AttnHyper> {
    let rope_dim = k.need("rope.dimension_count")?;
    // With `attn_k_b` / `attn_v_b` split, key_length is the cached width and *_mla the heads'; before, only the heads'.
    let key = k.uint("attention.key_length_mla")?.map_or_else(|| k.need("attention.key_length"), Ok)?;
    let v_dim = k.uint("attention.value_length_mla")?.map_or_else(|| k.need("attention.value_length"), Ok)?;
    if key <= rope_dim {
        let expected = format!("more than rope.dimension_count {rope_dim}");
        return Err(Error::bad(k.meta.path(), k.key("attention.key_length_mla"), expected, key));
    }
    // Converters disagree about the key when there is no bottleneck (absent, 0, or guessed from the depth):
    // the tensor decides.
    let q_lora_rank = (dir.dims)("blk.0.attn_q_a.weight").map(|dims| dims.first().copied().unwrap_or(0));
    Ok(AttnHyper::Mla {
        n_heads: k.uniform("attention.head_count")?.ok_or_else(|| k.missing("attention.head_count"))?,
        q_lora_rank,
        kv_lora_rank: k.need("attention.kv_lora_rank")?,
        nope_dim: key - rope_dim,
        rope_dim,
        v_dim,
    })
}

fn gqa(k: &Keys, hidden: usize) -> Result<AttnHyper> {
    let n_heads = k.uniform("attention.head_count")?.ok_or_else(|| k.missing("attention.head_count"))?;
    in_range(k.meta.path(), &k.key("attention.head_count"), n_heads, 1, 1 << 14)?;
    let head_dim = k.uint("attention.key_length")?.unwrap_or(hidden / n_heads);
    let v_dim = k.uint("attention.value_length")?.unwrap_or(head_dim);
    if v_dim != head_dim {
        return Err(Error::bad(
            k.meta.path(),
            k.key("attention.value_length"),
            format!("key_length {head_dim}"),
            v_dim,
        ));
    }
    Ok(AttnHyper::Gqa {
        n_heads,
        n_kv_heads: k.uniform("attention.head_count_kv")?.unwrap_or(n_heads),
        head_dim,
        qk_norm: match k.arch {
            "qwen3" | "qwen3moe" => QkNorm::Head,
            "olmoe" => QkNorm::Row,
            _ => QkNorm::None,
        },
        clip: k.float("attention.clamp_kqv")?.filter(|&c| c > 0.0),
    })
}

/// The rotary embedding, and the mscale that MLA's attention scale is multiplied by (twice).
fn rope(k: &Keys, attn: &AttnHyper, dir: &Directory) -> Result<(RopeHyper, f64)> {
    let head = match *attn {
        AttnHyper::Mla { rope_dim, .. } => rope_dim,
        AttnHyper::Gqa { head_dim, .. } => head_dim,
    };
    // llama.cpp's converter reorders llama's query and key rows for interleaved pairs; deepseek2 has them by nature.
    let pairs =
        if matches!(k.arch, "llama" | "deepseek2") { RopePairs::Interleaved } else { RopePairs::Half };
    let kind = k.meta.opt_str(&k.key("rope.scaling.type"))?;
    let factor = k.float("rope.scaling.factor")?.or(k.float("rope.scale_linear")?).filter(|&f| f != 0.0);
    let mut mscale = 1.0;
    let scaling = match (kind, factor) {
        (None | Some("none"), None) => RopeScaling::None,
        (Some("none"), _) => RopeScaling::None,
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) => {
            let ln = f64::from(factor.max(1.0)).ln();
            let own = f64::from(k.float("rope.scaling.attn_factor")?.unwrap_or(1.0));
            let mut attention_factor = (own * yarn_mscale(f64::from(factor), 1.0)) as f32;
            if let (true, Some(multiplier)) =
                (k.arch == "deepseek2", k.float("rope.scaling.yarn_log_multiplier")?)
            {
                // The key holds 0.1 * mscale_all_dim. mscale equals it in all published files, so that cosine and
                // sine stay unscaled and all of the correction is in the attention scale.
                mscale = 1.0 + f64::from(multiplier) * ln;
                attention_factor = 1.0;
            }
            let attention_factor = k.meta.opt_f32(ROPE_MAGNITUDE)?.unwrap_or(attention_factor);
            let original = k.float_or_uint("rope.scaling.original_context_length")?;
            RopeScaling::Yarn {
                factor,
                beta_fast: k.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: k.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                original_tokens: original.map_or_else(|| k.need("context_length").map(|n| n as f32), Ok)?,
                attention_factor,
                truncate: k.meta.opt_bool(YARN_TRUNCATE)?.unwrap_or(true),
            }
        }
        (Some("linear" | "yarn"), None) => return Err(k.missing("rope.scaling.factor")),
        (Some(_), _) => return Err(k.meta.bad(&k.key("rope.scaling.type"), "none, linear or yarn")),
    };
    let scaling = match (&dir.rope_factors, scaling) {
        (Some(f), RopeScaling::None) => RopeScaling::Factors(f.clone()),
        (Some(f), RopeScaling::Linear { factor }) => {
            RopeScaling::Factors(f.iter().map(|f| f * factor).collect())
        }
        (Some(_), _) => {
            return Err(k.meta.bad(&k.key("rope.scaling.type"), "none or linear beside rope_freqs.weight"));
        }
        (None, s) => s,
    };
    let dims = k.uint("rope.dimension_count")?.unwrap_or(head);
    let theta = k.float("rope.freq_base")?.unwrap_or(10000.0);
    Ok((RopeHyper { pairs, dims, theta, scaling }, mscale))
}

impl Keys<'_> {
    fn float_or_uint(&self, k: &str) -> Result<Option<f32>> {
        Ok(match self.uint(k) {
            Ok(v) => v.map(|v| v as f32),
            Err(_) => self.float(k)?,
        })
    }
}

fn moe(k: &Keys, dir: &Directory, n_layers: usize) -> Result<Option<MoeHyper>> {
    let n_experts = k.uint("expert_count")?.unwrap_or(0);
    if n_experts == 0 {
        return Ok(None);
    }
    let file = k.meta.path();
    let width = match k.uint("expert_feed_forward_length")? {
        Some(w) => w,
        None => k.uniform("feed_forward_length")?.ok_or_else(|| k.missing("expert_feed_forward_length"))?,
    };
    in_range(file, &k.key("expert_feed_forward_length"), width, 1, limits::WIDTH_MAX)?;
    let shared = k.uint("expert_shared_count")?.unwrap_or(0);
    in_range(file, &k.key("expert_shared_count"), shared, 0, limits::EXPERTS_MAX)?;
    let first = k.uint("leading_dense_block_count")?.unwrap_or(0);
    if shared == 0 && (dir.dims)(&format!("blk.{first}.ffn_gate_shexp.weight")).is_some() {
        return Err(k.meta.bad(&k.key("expert_shared_count"), "1 or more, as the file has shared experts"));
    }
    let has = |l: usize, part: &str| (dir.dims)(&format!("blk.{l}.ffn_{part}.weight")).is_some();
    let has_bias = (0..n_layers).any(|l| (dir.dims)(&format!("blk.{l}.exp_probs_b.bias")).is_some());
    let gating = match k.uint("expert_gating_func")? {
        None | Some(0) if has_bias => Gating::Sigmoid,
        None | Some(0 | 1) => Gating::Softmax,
        Some(2) => Gating::Sigmoid,
        Some(_) => return Err(k.meta.bad(&k.key("expert_gating_func"), "1 (softmax) or 2 (sigmoid)")),
    };
    let normalize = match k.meta.opt_bool(&k.key("expert_weights_norm"))? {
        Some(b) => b,
        None => matches!(k.arch, "llama" | "qwen3moe"),
    };
    Ok(Some(MoeHyper {
        n_experts,
        n_picked: k.need("expert_used_count")?,
        expert_width: width,
        shared_width: shared * width,
        gating,
        n_groups: k.uint("expert_group_count")?.filter(|&g| g > 0).unwrap_or(1),
        n_groups_picked: k.uint("expert_group_used_count")?.filter(|&g| g > 0).unwrap_or(1),
        normalize,
        scale: k.float("expert_weights_scale")?.filter(|&s| s != 0.0).unwrap_or(1.0),
        // Where dense layers lie between the others no key says so; a layer without a router is one.
        dense: (0..n_layers).map(|l| l < first || !has(l, "gate_inp") && has(l, "gate")).collect(),
    }))
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
