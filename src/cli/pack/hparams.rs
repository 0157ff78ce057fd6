//! Hyperparameters to the keys of a GGUF, named as llama.cpp's own converter does (`convert_hf_to_gguf.py`), so that
//! llama.cpp loads what we write. What its list has no key for goes under `tegu.` (`model::gguf`).
//!
//! The keys are made from what the source was understood to be, not from its config.json: a default that the config
//! leaves out is written out, and what the reader makes of the keys is compared afterwards (`readback`).

use std::path::Path;

use crate::format::gguf::{ScalarArray, Value};
use crate::model::gguf::{ROPE_MAGNITUDE, YARN_TRUNCATE};
use crate::model::rope::yarn_mscale;
use crate::model::{AttnHyper, Gating, Hyper, Mask, MoeHyper, RopeScaling};
use crate::units::{Error, Result};
use serde_json::Value as JsonValue;

/// A model family that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama, Mistral, Mixtral: one GGUF architecture, with or without experts.
    Llama,
    /// Qwen 2 and 2.5: biases on q, k and v.
    Qwen2,
    /// Qwen 3: norms on q and k heads.
    Qwen3,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// OLMoE: norms over all of q and k.
    Olmoe,
    /// DeepSeek V2, V3, R1, Moonlight, GLM-4.7-Flash: multi-head latent attention.
    Deepseek2,
}

/// What tensors need to know, and people.
#[derive(Debug, Clone)]
pub struct Hparams {
    /// The family.
    pub family: Family,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Routed experts a layer, 0 if none.
    pub experts: usize,
    /// MLA: part of a head without position.
    pub nope: usize,
    /// MLA: width of a head's values.
    pub v_head: usize,
    /// Factors of Llama 3's rope scaling, one a rotated pair.
    pub rope_factors: Option<Vec<f32>>,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// What the file says in words that llama.cpp does not read: it would compute something else.
    pub beyond: Vec<&'static str>,
}

/// Metadata being collected.
pub type Meta = Vec<(String, Value)>;

impl Family {
    /// `general.architecture`.
    pub fn arch(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Qwen3Moe => "qwen3moe",
            Family::Olmoe => "olmoe",
            Family::Deepseek2 => "deepseek2",
        }
    }

    fn of(file: &Path, model_type: &str) -> Result<Family> {
        Ok(match model_type {
            "llama" | "mistral" | "mixtral" => Family::Llama,
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            "qwen3_moe" => Family::Qwen3Moe,
            "olmoe" => Family::Olmoe,
            "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite" => Family::Deepseek2,
            _ => return Err(Error::bad(file, "model_type", "a family that GGUF has", model_type)),
        })
    }
}

/// Collects keys under the architecture's prefix.
struct Keys<'m> {
    family: Family,
    meta: &'m mut Meta,
    beyond: Vec<&'static str>,
}

impl Keys<'_> {
    fn put(&mut self, key: &str, value: Value) {
        self.meta.push((format!("{}.{key}", self.family.arch()), value));
    }

    fn u32(&mut self, key: &str, v: usize) {
        self.put(key, Value::U32(v as u32));
    }

    fn f32(&mut self, key: &str, v: f32) {
        self.put(key, Value::F32(v));
    }
}

/// Writes the keys of `h`, read from `config` of `file`, into `meta`.
pub fn convert(file: &Path, config: &JsonValue, h: &Hyper, meta: &mut Meta) -> Result<Hparams> {
    let family = Family::of(file, &h.arch)?;
    meta.push(("general.architecture".into(), Value::Str(family.arch().into())));
    meta.push(("general.type".into(), Value::Str("model".into())));
    let mut keys = Keys { family, meta, beyond: Vec::new() };
    keys.u32("block_count", h.n_layers);
    keys.u32("context_length", h.context_tokens);
    keys.u32("embedding_length", h.hidden);
    keys.u32("feed_forward_length", h.ffn_width);
    keys.f32("attention.layer_norm_rms_epsilon", h.norm_eps);
    keys.u32("vocab_size", h.vocab);
    keys.u32("attention.head_count", h.n_heads());
    let experts = match &h.moe {
        Some(moe) => experts(file, moe, &mut keys)?,
        None => 0,
    };
    let (kv_heads, nope, v_head) = attention(h, &mut keys);
    window(&h.masks, &mut keys);
    let rope_factors = rope(h, config, &mut keys);
    let (layers, heads, tied) = (h.n_layers, h.n_heads(), h.tied_head);
    let beyond = keys.beyond;
    Ok(Hparams { family, layers, heads, kv_heads, experts, nope, v_head, rope_factors, tied, beyond })
}

/// Keys of the router and its experts; gives the number of routed experts.
fn experts(file: &Path, m: &MoeHyper, keys: &mut Keys) -> Result<usize> {
    let deepseek = keys.family == Family::Deepseek2;
    keys.u32("expert_count", m.n_experts);
    keys.u32("expert_used_count", m.n_picked);
    // Architectures without the key take feed_forward_length, which is the same number there.
    if deepseek || keys.family == Family::Qwen3Moe {
        keys.u32("expert_feed_forward_length", m.expert_width);
    }
    keys.put("expert_weights_norm", Value::Bool(m.normalize));
    let assumed = match keys.family {
        Family::Llama | Family::Qwen3Moe => true,
        Family::Olmoe => false,
        _ => m.normalize,
    };
    if m.normalize != assumed {
        keys.beyond.push("whether the picked experts' weights are normalized (expert_weights_norm)");
    }
    if m.n_groups > 1 {
        keys.u32("expert_group_count", m.n_groups);
        keys.u32("expert_group_used_count", m.n_groups_picked);
    }
    if m.shared_width > 0 || deepseek {
        if !m.shared_width.is_multiple_of(m.expert_width) {
            let expected = format!("a multiple of the experts' {}", m.expert_width);
            return Err(Error::bad(file, "shared expert width", expected, m.shared_width));
        }
        keys.u32("expert_shared_count", m.shared_width / m.expert_width);
    }
    let leading = m.dense.iter().take_while(|d| **d).count();
    keys.u32("leading_dense_block_count", leading);
    let dense = m.dense.iter().filter(|d| **d).count();
    if dense > leading || dense > 0 && !deepseek {
        keys.beyond.push("dense layers between those with experts");
    }
    if deepseek || m.scale != 1.0 {
        keys.f32("expert_weights_scale", m.scale);
    }
    if deepseek {
        keys.u32("expert_gating_func", if m.gating == Gating::Softmax { 1 } else { 2 });
    }
    Ok(m.n_experts)
}

/// Keys of attention; gives the heads of keys, and for MLA the widths of a head without position and of its values.
///
/// MLA is described in its absorbed form: one key head of latent and rope parts, whose values are the latent.
fn attention(h: &Hyper, keys: &mut Keys) -> (usize, usize, usize) {
    match h.attn {
        AttnHyper::Mla { q_lora_rank, kv_lora_rank, nope_dim, rope_dim, v_dim, .. } => {
            keys.u32("attention.head_count_kv", 1);
            // 0 says "none". llama.cpp wants the key except at the depths of the lite models it knows.
            keys.u32("attention.q_lora_rank", q_lora_rank.unwrap_or(0));
            keys.u32("attention.kv_lora_rank", kv_lora_rank);
            keys.u32("attention.key_length", kv_lora_rank + rope_dim);
            keys.u32("attention.value_length", kv_lora_rank);
            keys.u32("attention.key_length_mla", nope_dim + rope_dim);
            keys.u32("attention.value_length_mla", v_dim);
            (1, nope_dim, v_dim)
        }
        AttnHyper::Gqa { n_kv_heads, head_dim, clip, .. } => {
            keys.u32("attention.head_count_kv", n_kv_heads);
            keys.u32("attention.key_length", head_dim);
            keys.u32("attention.value_length", head_dim);
            if let Some(clip) = clip {
                keys.f32("attention.clamp_kqv", clip);
                keys.beyond.push("the clamp of queries, keys and values (attention.clamp_kqv)");
            }
            (n_kv_heads, 0, 0)
        }
    }
}

/// Sliding windows, with a flag a layer where not all slide.
fn window(masks: &[Mask], keys: &mut Keys) {
    let window = masks.iter().find_map(|m| match m {
        Mask::Sliding { window } => Some(*window),
        _ => None,
    });
    let Some(window) = window else { return };
    keys.u32("attention.sliding_window", window);
    if masks.contains(&Mask::Full) {
        let flags = masks.iter().map(|m| *m != Mask::Full);
        keys.put("attention.sliding_window_pattern", Value::Scalars(ScalarArray::from_bools(flags)));
    }
    keys.beyond.push("the sliding window of this architecture (attention.sliding_window)");
}

/// Keys of the rotary embedding and of what it does to the attention scale; gives Llama 3's factors, which GGUF holds as
/// a tensor.
fn rope(h: &Hyper, config: &JsonValue, keys: &mut Keys) -> Option<Vec<f32>> {
    keys.u32("rope.dimension_count", h.rope.dims);
    keys.f32("rope.freq_base", h.rope.theta);
    let mut mscale = 1.0;
    let mut factors = None;
    match h.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            keys.put("rope.scaling.type", Value::Str("linear".into()));
            keys.f32("rope.scaling.factor", factor);
        }
        RopeScaling::Yarn { .. } => mscale = yarn(h, config, keys),
        RopeScaling::Llama3 { .. } => {
            factors = Some(llama3_factors(h));
            if keys.family != Family::Llama {
                keys.beyond.push("rotary factors in this architecture (rope_freqs.weight)");
            }
        }
        // Only GGUF files have them, and those are not converted.
        RopeScaling::Factors(ref f) => factors = Some(f.clone()),
    }
    let width = match h.attn {
        AttnHyper::Mla { nope_dim, rope_dim, .. } => nope_dim + rope_dim,
        AttnHyper::Gqa { head_dim, .. } => head_dim,
    };
    let plain = mscale * mscale / (width as f64).sqrt();
    let scale = f64::from(h.softmax_scale);
    // What f32 rounds away is no other scale.
    if (scale / plain - 1.0).abs() > 1e-6 {
        keys.f32("attention.scale", (scale / (mscale * mscale)) as f32);
        keys.beyond.push("an attention scale of its own (attention.scale)");
    }
    factors
}

/// Keys of yarn; gives what MLA's attention scale is multiplied by (twice) for them.
fn yarn(h: &Hyper, config: &JsonValue, keys: &mut Keys) -> f64 {
    let RopeScaling::Yarn { factor, beta_fast, beta_slow, original_tokens, attention_factor, truncate } =
        h.rope.scaling
    else {
        unreachable!("called for yarn")
    };
    keys.put("rope.scaling.type", Value::Str("yarn".into()));
    keys.f32("rope.scaling.factor", factor);
    if original_tokens.fract() == 0.0 && original_tokens < 4e9 {
        keys.u32("rope.scaling.original_context_length", original_tokens as usize);
    } else {
        keys.f32("rope.scaling.original_context_length", original_tokens);
    }
    keys.f32("rope.scaling.yarn_beta_fast", beta_fast);
    keys.f32("rope.scaling.yarn_beta_slow", beta_slow);
    if !truncate {
        keys.meta.push((YARN_TRUNCATE.into(), Value::Bool(false)));
        keys.beyond.push("a yarn ramp that is not rounded to whole dimensions");
    }
    let usual = yarn_mscale(f64::from(factor), 1.0);
    let other = |a: f64, b: f64| (a / b - 1.0).abs() > 1e-6;
    if keys.family != Family::Deepseek2 {
        let own = f64::from(attention_factor) / usual;
        if other(own, 1.0) {
            keys.f32("rope.scaling.attn_factor", own as f32);
        }
        return 1.0;
    }
    let scaling =
        ["rope_parameters", "rope_scaling"].iter().find_map(|k| config.get(k).filter(|v| v.is_object()));
    let all = scaling.and_then(|p| p.get("mscale_all_dim")?.as_f64()).filter(|&m| m != 0.0);
    let (mscale, magnitude) = match all {
        Some(all) => {
            // A tenth, for llama.cpp's reasons of compatibility: readers of deepseek2 multiply by ten.
            let multiplier = (0.1 * all) as f32;
            keys.f32("rope.scaling.yarn_log_multiplier", multiplier);
            (1.0 + f64::from(multiplier) * f64::from(factor.max(1.0)).ln(), 1.0)
        }
        None => {
            keys.beyond.push("yarn without mscale_all_dim, which it takes into the attention scale");
            (1.0, usual)
        }
    };
    if other(f64::from(attention_factor), magnitude) {
        keys.meta.push((ROPE_MAGNITUDE.into(), Value::F32(attention_factor)));
        keys.beyond.push("a yarn attention factor beside mscale_all_dim");
    }
    mscale
}

/// By how much Llama 3's scaling slows each rotated pair: long wavelengths by `factor`, short ones not, a ramp between.
fn llama3_factors(h: &Hyper) -> Vec<f32> {
    let RopeScaling::Llama3 { factor, low_freq, high_freq, original_tokens } = h.rope.scaling else {
        unreachable!("called for llama3")
    };
    let [factor, low, high, original] = [factor, low_freq, high_freq, original_tokens].map(f64::from);
    let one = |pair: usize| {
        let frequency = f64::from(h.rope.theta).powf(-((2 * pair) as f64) / h.rope.dims as f64);
        let wavelength = std::f64::consts::TAU / frequency;
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..h.rope.dims / 2).map(|pair| one(pair) as f32).collect()
}
