//! Hyperparameters from a Hugging Face `config.json`. Pure, so that it can be fuzzed.
//!
//! Defaults are those of the transformers configuration classes (`defaults`); rope comes as `rope_parameters` (transformers 5) or
//! `rope_theta` + `rope_scaling` (before).

use super::defaults::{DEFAULTS, Defaults, MoeDefaults};
use super::hyper::{
    AttnHyper, Gating, Hyper, Mask, MoeHyper, QkNorm, RopeHyper, RopePairs, RopeScaling, in_range,
};
use super::rope::yarn_mscale;
use crate::limits;
use crate::units::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Reads a configuration. `file` is for messages.
pub fn hyper(file: &Path, config: &Value) -> Result<Hyper> {
    let c = Config { file, v: config, at: "" };
    if !config.is_object() {
        return Err(Error::bad(file, "config", "a JSON object", kind(config)));
    }
    let model_type = c.str("model_type")?.ok_or_else(|| c.missing("model_type", "a string"))?;
    let d = DEFAULTS.iter().find(|d| d.model_type == model_type).ok_or_else(|| {
        let known: Vec<&str> = DEFAULTS.iter().map(|d| d.model_type).collect();
        Error::bad(file, "model_type", format!("one of {}", known.join(", ")), model_type)
    })?;
    let act = c.str("hidden_act")?.unwrap_or("silu");
    if act != "silu" {
        return Err(Error::bad(file, "hidden_act", "silu", act));
    }
    if c.bool("mlp_bias")? == Some(true) {
        return Err(Error::bad(
            file,
            "mlp_bias",
            "false: no kernel adds a bias in a feed-forward layer",
            true,
        ));
    }
    let n_layers = c.need("num_hidden_layers")?;
    in_range(file, "num_hidden_layers", n_layers, 1, limits::LAYERS_MAX)?;
    let is_mla = d.q_lora_rank.is_some();
    let attn = if is_mla { mla(&c, d)? } else { gqa(&c, d)? };
    let rope = rope(&c, d, &attn)?;
    let softmax_scale = softmax_scale(&c, &attn)?;
    let moe = d.moe.as_ref().map(|m| moe(&c, model_type, m, n_layers)).transpose()?;
    let h = Hyper {
        arch: model_type.to_owned(),
        vocab: c.need("vocab_size")?,
        hidden: c.need("hidden_size")?,
        n_layers,
        context_tokens: c.uint("max_position_embeddings")?.unwrap_or(d.context_tokens),
        norm_eps: c.float("rms_norm_eps")?.unwrap_or(d.norm_eps),
        masks: masks(&c, d, n_layers)?,
        // Mixtral and OLMoE have no dense layer: their one width is an expert's.
        ffn_width: c.need("intermediate_size")?,
        attn,
        rope,
        softmax_scale,
        moe,
        tied_head: c.bool("tie_word_embeddings")?.unwrap_or(false),
    };
    h.check(file)?;
    Ok(h)
}

/// A configuration object with typed getters; `null` counts as absent.
struct Config<'a> {
    file: &'a Path,
    v: &'a Value,
    at: &'static str,
}

impl<'a> Config<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.v.get(key).filter(|v| !v.is_null())
    }

    /// True if the key is not there at all: where a class has a default, `null` says "none" and takes it away.
    fn is_left_out(&self, key: &str) -> bool {
        self.v.get(key).is_none()
    }

    fn name(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_owned() } else { format!("{}.{key}", self.at) }
    }

    fn missing(&self, key: &str, expected: &str) -> Error {
        Error::bad(self.file, self.name(key), expected, "nothing")
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        let found = match found {
            Value::Number(_) | Value::Bool(_) => found.to_string(),
            _ => kind(found).to_owned(),
        };
        Error::bad(self.file, self.name(key), expected, found)
    }

    fn uint(&self, key: &str) -> Result<Option<usize>> {
        self.get(key)
            .map(|v| {
                let n = v.as_u64().and_then(|n| usize::try_from(n).ok());
                n.ok_or_else(|| self.wrong(key, "a whole number, 0 or more", v))
            })
            .transpose()
    }

    fn need(&self, key: &str) -> Result<usize> {
        self.uint(key)?.ok_or_else(|| self.missing(key, "a whole number"))
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        self.get(key)
            .map(|v| v.as_f64().map(|f| f as f32).ok_or_else(|| self.wrong(key, "a number", v)))
            .transpose()
    }

    fn need_float(&self, key: &str) -> Result<f32> {
        self.float(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.wrong(key, "true or false", v))).transpose()
    }

    fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| self.wrong(key, "a string", v))).transpose()
    }

    fn object(&self, key: &'static str) -> Result<Option<Config<'a>>> {
        let sub = |v: &'a Value| {
            if v.is_object() {
                Ok(Config { file: self.file, v, at: key })
            } else {
                Err(self.wrong(key, "an object", v))
            }
        };
        self.get(key).map(sub).transpose()
    }

    fn array(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.get(key).map(|v| v.as_array().ok_or_else(|| self.wrong(key, "an array", v))).transpose()
    }
}

fn kind(v: &Value) -> &'static str {
    match v {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn mla(c: &Config, d: &Defaults) -> Result<AttnHyper> {
    let default_rank = d.q_lora_rank.filter(|_| c.is_left_out("q_lora_rank"));
    Ok(AttnHyper::Mla {
        n_heads: c.need("num_attention_heads")?,
        q_lora_rank: c.uint("q_lora_rank")?.or(default_rank).filter(|&r| r > 0),
        kv_lora_rank: c.need("kv_lora_rank")?,
        nope_dim: c.need("qk_nope_head_dim")?,
        rope_dim: c.need("qk_rope_head_dim")?,
        v_dim: c.need("v_head_dim")?,
    })
}

fn gqa(c: &Config, d: &Defaults) -> Result<AttnHyper> {
    let n_heads = c.need("num_attention_heads")?;
    in_range(c.file, "num_attention_heads", n_heads, 1, 1 << 14)?;
    let head_dim = match c.uint("head_dim")?.or(d.head_dim) {
        Some(width) => width,
        None => c.need("hidden_size")? / n_heads,
    };
    let kv_heads = d.kv_heads.filter(|_| c.is_left_out("num_key_value_heads"));
    Ok(AttnHyper::Gqa {
        n_heads,
        n_kv_heads: c.uint("num_key_value_heads")?.or(kv_heads).unwrap_or(n_heads),
        head_dim,
        qk_norm: match d.model_type {
            "qwen3" | "qwen3_moe" => QkNorm::Head,
            "olmoe" => QkNorm::Row,
            _ => QkNorm::None,
        },
        // Other classes have no such key and do not look at it.
        clip: c.float("clip_qkv")?.filter(|_| d.model_type == "olmoe"),
    })
}

fn rope(c: &Config, d: &Defaults, attn: &AttnHyper) -> Result<RopeHyper> {
    let interleaved = match d.model_type {
        "deepseek_v2" => true,
        "deepseek_v3" | "glm4_moe_lite" => c.bool("rope_interleave")?.unwrap_or(true),
        _ => false,
    };
    let dims = match *attn {
        AttnHyper::Mla { rope_dim, .. } => rope_dim,
        AttnHyper::Gqa { head_dim, .. } => head_dim,
    };
    let p = c.object("rope_parameters")?.or(c.object("rope_scaling")?);
    let theta = match &p {
        Some(p) => p.float("rope_theta")?.or(c.float("rope_theta")?),
        None => c.float("rope_theta")?,
    };
    let scaling = p.map_or(Ok(RopeScaling::None), |p| scaling(c, &p, d))?;
    let pairs = if interleaved { RopePairs::Interleaved } else { RopePairs::Half };
    Ok(RopeHyper { pairs, dims, theta: theta.unwrap_or(d.theta), scaling })
}

fn scaling(c: &Config, p: &Config, d: &Defaults) -> Result<RopeScaling> {
    let original = |p: &Config| -> Result<f32> {
        Ok(match p.float("original_max_position_embeddings")? {
            Some(n) => n,
            None => c.float("max_position_embeddings")?.unwrap_or(d.context_tokens as f32),
        })
    };
    let kind = p.str("rope_type")?.or(p.str("type")?).unwrap_or("default");
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: p.need_float("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: p.need_float("factor")?,
            low_freq: p.need_float("low_freq_factor")?,
            high_freq: p.need_float("high_freq_factor")?,
            original_tokens: original(p)?,
        },
        "yarn" => {
            let factor = p.need_float("factor")?;
            let mscale = |m: f32| yarn_mscale(f64::from(factor), f64::from(m));
            let pair =
                (p.float("mscale")?.filter(|&m| m != 0.0), p.float("mscale_all_dim")?.filter(|&m| m != 0.0));
            let attention_factor = match (p.float("attention_factor")?, pair) {
                (Some(a), _) => a,
                (None, (Some(m), Some(all))) => (mscale(m) / mscale(all)) as f32,
                (None, _) => mscale(1.0) as f32,
            };
            RopeScaling::Yarn {
                factor,
                beta_fast: p.float("beta_fast")?.unwrap_or(32.0),
                beta_slow: p.float("beta_slow")?.unwrap_or(1.0),
                original_tokens: original(p)?,
                attention_factor,
                truncate: p.bool("truncate")?.unwrap_or(true),
            }
        }
        other => {
            return Err(Error::bad(p.file, p.name("rope_type"), "default, linear, llama3 or yarn", other));
        }
    })
}

/// `1/sqrt(width of a query head)`, times mscale squared for MLA with yarn.
fn softmax_scale(c: &Config, attn: &AttnHyper) -> Result<f32> {
    match *attn {
        AttnHyper::Gqa { head_dim, .. } => Ok((1.0 / (head_dim.max(1) as f64).sqrt()) as f32),
        AttnHyper::Mla { nope_dim, rope_dim, .. } => {
            let mut scale = 1.0 / (nope_dim.saturating_add(rope_dim).max(1) as f64).sqrt();
            if let Some(p) = c.object("rope_parameters")?.or(c.object("rope_scaling")?) {
                let all = p.float("mscale_all_dim")?.unwrap_or(0.0);
                let is_default = p.str("rope_type")?.or(p.str("type")?).unwrap_or("default") == "default";
                if all != 0.0 && !is_default {
                    scale *= yarn_mscale(f64::from(p.need_float("factor")?), f64::from(all)).powi(2);
                }
            }
            Ok(scale as f32)
        }
    }
}

fn moe(c: &Config, model_type: &str, d: &MoeDefaults, n_layers: usize) -> Result<MoeHyper> {
    let deepseek = matches!(model_type, "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite");
    let sigmoid = matches!(model_type, "deepseek_v3" | "glm4_moe_lite");
    if let Some(f) = c.str("scoring_func")? {
        let expected = if sigmoid { "sigmoid" } else { "softmax" };
        if f != expected {
            return Err(Error::bad(c.file, "scoring_func", expected, f));
        }
    }
    // Three spellings of one number; transformers writes one or another by version, whatever the family.
    let spellings = ["n_routed_experts", "num_experts", "num_local_experts"];
    let found = spellings.iter().find(|k| c.get(k).is_some());
    let n_experts = found.map_or(Ok(d.experts), |k| c.need(k))?;
    let expert_width = match d.width {
        0 => c.need("intermediate_size")?,
        width => c.uint("moe_intermediate_size")?.unwrap_or(width),
    };
    let grouped = sigmoid || c.str("topk_method")?.is_some_and(|m| m == "group_limited_greedy");
    let shared = c.uint("n_shared_experts")?.filter(|_| deepseek);
    // Without the key the class's number holds; null is none, though only old files say so.
    let shared = shared.unwrap_or(if c.is_left_out("n_shared_experts") { d.shared } else { 0 });
    in_range(c.file, "n_shared_experts", shared, 0, limits::EXPERTS_MAX)?;
    in_range(c.file, "moe_intermediate_size", expert_width, 1, limits::WIDTH_MAX)?;
    Ok(MoeHyper {
        n_experts,
        n_picked: match c.uint("num_experts_per_tok")? {
            Some(n) => n,
            None if d.picked > 0 => d.picked,
            None => return Err(c.missing("num_experts_per_tok", "a whole number")),
        },
        expert_width,
        shared_width: shared * expert_width,
        gating: if sigmoid { Gating::Sigmoid } else { Gating::Softmax },
        n_groups: if grouped { c.uint("n_group")?.unwrap_or(d.groups) } else { 1 },
        n_groups_picked: if grouped { c.uint("topk_group")?.unwrap_or(d.groups_picked) } else { 1 },
        normalize: match model_type {
            // The class always does; the V2 reference class never does, whatever its configuration says.
            "mixtral" => true,
            "deepseek_v2" => false,
            _ => c.bool("norm_topk_prob")?.unwrap_or(d.normalize),
        },
        scale: if deepseek { c.float("routed_scaling_factor")?.unwrap_or(d.scale) } else { 1.0 },
        dense: dense_layers(c, model_type, d, n_layers)?,
    })
}

/// Which layers are dense although the model has experts.
fn dense_layers(c: &Config, model_type: &str, d: &MoeDefaults, n_layers: usize) -> Result<Vec<bool>> {
    if let Some(types) = c.array("mlp_layer_types")? {
        if types.len() != n_layers {
            return Err(Error::bad(c.file, "mlp_layer_types", format!("{n_layers} entries"), types.len()));
        }
        let dense = |v: &Value| match v.as_str() {
            Some("dense") => Ok(true),
            Some("sparse") => Ok(false),
            _ => Err(Error::bad(c.file, "mlp_layer_types", "dense or sparse", v)),
        };
        return types.iter().map(dense).collect();
    }
    if matches!(model_type, "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite") {
        let first = c.uint("first_k_dense_replace")?.unwrap_or(d.first_dense);
        let every = c.uint("moe_layer_freq")?.unwrap_or(1).max(1);
        return Ok((0..n_layers).map(|l| l < first || !l.is_multiple_of(every)).collect());
    }
    let step = c.uint("decoder_sparse_step")?.unwrap_or(1).max(1);
    let mut dense: Vec<bool> = (0..n_layers).map(|l| !(l + 1).is_multiple_of(step)).collect();
    for v in c.array("mlp_only_layers")?.into_iter().flatten() {
        let layer = v.as_u64().and_then(|l| usize::try_from(l).ok()).filter(|&l| l < n_layers);
        let layer = layer
            .ok_or_else(|| Error::bad(c.file, "mlp_only_layers", format!("layers below {n_layers}"), v))?;
        dense[layer] = true;
    }
    Ok(dense)
}

/// Sliding windows, where the configuration asks for them and the family's class looks.
fn masks(c: &Config, d: &Defaults, n_layers: usize) -> Result<Vec<Mask>> {
    let window = c.uint("sliding_window")?.or(d.window.filter(|_| c.is_left_out("sliding_window")));
    // Qwen slides only where told to; then qwen3_moe in every layer, the others by layer_types or from a layer on.
    let told = c.bool("use_sliding_window")?.unwrap_or(false);
    let window = match d.model_type {
        "mistral" | "mixtral" => window,
        "qwen2" | "qwen3" | "qwen3_moe" => window.filter(|_| told),
        _ => None,
    };
    let window = window.filter(|&w| w > 0);
    let slides: Vec<bool> = match (d.model_type, layer_types(c, n_layers)?) {
        ("mistral" | "mixtral" | "qwen3_moe", _) => vec![true; n_layers],
        (_, Some(types)) if window.is_none() && types.contains(&true) => {
            let expected = format!("full_attention only: this {} has no sliding window in use", d.model_type);
            return Err(Error::bad(c.file, "layer_types", expected, "sliding_attention"));
        }
        (_, Some(types)) => types,
        (_, None) => {
            let from = c.uint("max_window_layers")?.unwrap_or(28);
            (0..n_layers).map(|l| l >= from).collect()
        }
    };
    let mask = |slides: bool| match window {
        Some(window) if slides => Mask::Sliding { window },
        _ => Mask::Full,
    };
    Ok(slides.into_iter().map(mask).collect())
}

/// `layer_types`: true where a layer slides.
fn layer_types(c: &Config, n_layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(types) = c.array("layer_types")? else { return Ok(None) };
    if types.len() != n_layers {
        return Err(Error::bad(c.file, "layer_types", format!("{n_layers} entries"), types.len()));
    }
    let slides = |v: &Value| match v.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(Error::bad(c.file, "layer_types", "full_attention or sliding_attention", v)),
    };
    types.iter().map(slides).collect::<Result<_>>().map(Some)
}

#[cfg(test)]
#[path = "hf_tests.rs"]
mod tests;
