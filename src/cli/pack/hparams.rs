//! config.json to the hyperparameter keys of a GGUF, named and defaulted as llama.cpp's own converter does
//! (`convert_hf_to_gguf.py`), so that llama.cpp loads what we write.

use super::config::Json;
use crate::format::gguf::Value;
use crate::units::Result;

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

/// What tensors need to know.
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
    /// Whether the output head is the embedding, where config.json says.
    pub tied: Option<bool>,
}

/// Metadata being collected.
pub type Meta = Vec<(String, Value)>;

const FAMILIES: [(&str, Family); 9] = [
    ("llama", Family::Llama),
    ("mistral", Family::Llama),
    ("mixtral", Family::Llama),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("qwen3_moe", Family::Qwen3Moe),
    ("olmoe", Family::Olmoe),
    ("deepseek_v2", Family::Deepseek2),
    ("deepseek_v3", Family::Deepseek2),
];

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

    fn of(config: &Json) -> Result<Family> {
        let name = config.opt_str("model_type")?.unwrap_or("");
        if name == "glm4_moe_lite" {
            return Ok(Family::Deepseek2);
        }
        FAMILIES.iter().find(|(n, _)| *n == name).map(|(_, f)| *f).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|(n, _)| *n).collect();
            config.bad("model_type", format_args!("{}, glm4_moe_lite", known.join(", ")))
        })
    }
}

/// Collects keys under the architecture's prefix.
struct Keys<'m> {
    arch: &'static str,
    meta: &'m mut Meta,
}

impl Keys<'_> {
    fn put(&mut self, key: &str, value: Value) {
        self.meta.push((format!("{}.{key}", self.arch), value));
    }

    fn u32(&mut self, key: &str, v: usize) {
        self.put(key, Value::U32(v as u32));
    }

    fn opt_u32(&mut self, key: &str, v: Option<u32>) {
        v.into_iter().for_each(|v| self.put(key, Value::U32(v)));
    }

    fn opt_f32(&mut self, key: &str, v: Option<f32>) {
        v.into_iter().for_each(|v| self.put(key, Value::F32(v)));
    }
}

/// Writes the keys of `config` into `meta`.
pub fn convert(config: &Json, meta: &mut Meta) -> Result<Hparams> {
    let family = Family::of(config)?;
    meta.push(("general.architecture".into(), Value::Str(family.arch().into())));
    meta.push(("general.type".into(), Value::Str("model".into())));
    let mut keys = Keys { arch: family.arch(), meta };
    let mla = family == Family::Deepseek2;
    let layers = config.size("num_hidden_layers")?;
    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.opt_u32("num_key_value_heads")?.map_or(heads, |n| n as usize);
    if !mla && (kv_heads == 0 || !heads.is_multiple_of(kv_heads)) {
        return Err(config.bad("num_key_value_heads", format_args!("a divisor of {heads}, the heads")));
    }
    keys.u32("block_count", layers);
    keys.u32("context_length", config.size("max_position_embeddings")?);
    keys.u32("embedding_length", hidden);
    keys.u32("feed_forward_length", config.size("intermediate_size")?);
    keys.u32("attention.head_count", heads);
    keys.u32("attention.head_count_kv", if mla { 1 } else { kv_heads });
    keys.put("attention.layer_norm_rms_epsilon", Value::F32(config.opt_f32("rms_norm_eps")?.unwrap_or(1e-6)));
    keys.u32("vocab_size", config.size("vocab_size")?);
    let experts = experts(config, family, &mut keys)?;
    let rope_factors = rope(config, family, heads, hidden, &mut keys)?;
    let (nope, v_head) = if mla { latent(config, &mut keys)? } else { (0, 0) };
    if !mla {
        window(config, &mut keys)?;
    }
    let tied = config.opt_bool("tie_word_embeddings")?;
    Ok(Hparams { family, layers, heads, kv_heads, experts, nope, v_head, rope_factors, tied })
}

/// Keys of the router and its experts; gives the number of routed experts.
fn experts(config: &Json, family: Family, keys: &mut Keys) -> Result<usize> {
    let mut count = None;
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        count = count.or(config.opt_u32(key)?);
    }
    let Some(n) = count.filter(|&n| n > 0) else {
        if family == Family::Deepseek2 {
            return Err(config.bad("n_routed_experts", "an integer of 1 or more"));
        }
        return Ok(0);
    };
    keys.u32("expert_count", n as usize);
    keys.u32("expert_used_count", config.size("num_experts_per_tok")?);
    let width = config.opt_u32("moe_intermediate_size")?;
    keys.opt_u32("expert_feed_forward_length", width);
    let normalized = config.opt_bool("norm_topk_prob")?;
    normalized.into_iter().for_each(|b| keys.put("expert_weights_norm", Value::Bool(b)));
    if family != Family::Deepseek2 {
        return Ok(n as usize);
    }
    if width.is_none() {
        return Err(config.bad("moe_intermediate_size", "an integer of 1 or more"));
    }
    keys.opt_u32("expert_group_count", config.opt_u32("n_group")?);
    keys.opt_u32("expert_group_used_count", config.opt_u32("topk_group")?);
    keys.u32("expert_shared_count", config.opt_u32("n_shared_experts")?.unwrap_or(0) as usize);
    keys.u32("leading_dense_block_count", config.opt_u32("first_k_dense_replace")?.unwrap_or(0) as usize);
    keys.put("expert_weights_scale", Value::F32(config.opt_f32("routed_scaling_factor")?.unwrap_or(1.0)));
    // Classes after V2 know only the sigmoid and may leave the key out.
    let v2 = config.opt_str("model_type")? == Some("deepseek_v2");
    let gating = match config.opt_str("scoring_func")? {
        Some("softmax") => 1,
        Some("sigmoid") => 2,
        None if v2 => 1,
        None => 2,
        Some(_) => return Err(config.bad("scoring_func", "softmax or sigmoid")),
    };
    keys.u32("expert_gating_func", gating);
    Ok(n as usize)
}

/// Keys of multi-head latent attention; gives the widths of a head without position and of its values.
///
/// The converted file describes the absorbed form: one key head of latent and rope parts, whose values are the latent.
fn latent(config: &Json, keys: &mut Keys) -> Result<(usize, usize)> {
    let rank = config.size("kv_lora_rank")?;
    let (nope, rope) = (config.size("qk_nope_head_dim")?, config.size("qk_rope_head_dim")?);
    let v_head = config.size("v_head_dim")?;
    if config.opt_bool("rope_interleave")? == Some(false) {
        return Err(config.bad("rope_interleave", "true: files of this architecture rotate neighbours"));
    }
    // 0 says "none". llama.cpp wants the key except at the depths of the lite models it knows.
    keys.u32("attention.q_lora_rank", config.opt_u32("q_lora_rank")?.unwrap_or(0) as usize);
    keys.u32("attention.kv_lora_rank", rank);
    keys.u32("attention.key_length", rank + rope);
    keys.u32("attention.value_length", rank);
    keys.u32("attention.key_length_mla", nope + rope);
    keys.u32("attention.value_length_mla", v_head);
    keys.u32("rope.dimension_count", rope);
    Ok((nope, v_head))
}

/// A sliding window, where the config has one and uses it.
fn window(config: &Json, keys: &mut Keys) -> Result<()> {
    if config.opt_bool("use_sliding_window")? != Some(false) {
        keys.opt_u32("attention.sliding_window", config.opt_u32("sliding_window")?);
    }
    Ok(())
}

/// Keys of the rotary embedding; gives Llama 3's factors, which GGUF holds as a tensor.
fn rope(
    config: &Json,
    family: Family,
    heads: usize,
    hidden: usize,
    keys: &mut Keys,
) -> Result<Option<Vec<f32>>> {
    let head_dim = match config.opt_u32("head_dim")? {
        Some(n) => n as usize,
        None => hidden / heads,
    };
    let mla = family == Family::Deepseek2;
    if !mla {
        if config.get("head_dim").is_some() {
            keys.u32("attention.key_length", head_dim);
            keys.u32("attention.value_length", head_dim);
        }
        if family == Family::Llama {
            keys.u32("rope.dimension_count", head_dim);
        }
    }
    // Newer configs have one object for all of it; older ones a scaling object and the base beside it.
    let params = match config.opt_object("rope_parameters", "rope_parameters.")? {
        Some(p) => Some(p),
        None => config.opt_object("rope_scaling", "rope_scaling.")?,
    };
    let inner_base = params.map_or(Ok(None), |p| p.opt_f32("rope_theta"))?;
    let base = inner_base.or(config.opt_f32("rope_theta")?).unwrap_or(10_000.0);
    keys.put("rope.freq_base", Value::F32(base));
    let Some(p) = params else { return Ok(None) };
    let kind = match p.opt_str("rope_type")? {
        Some(kind) => kind,
        None => p.opt_str("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => Ok(None),
        "linear" => {
            keys.put("rope.scaling.type", Value::Str("linear".into()));
            keys.opt_f32("rope.scaling.factor", Some(factor(&p)?));
            Ok(None)
        }
        "yarn" => yarn(config, &p, mla, keys).map(|()| None),
        "llama3" if family == Family::Llama => llama3_factors(&p, base, head_dim).map(Some),
        _ => Err(p.bad("rope_type", "default, linear, yarn, or llama3 for llama")),
    }
}

fn factor(p: &Json) -> Result<f32> {
    p.opt_f32("factor")?.filter(|&f| f > 0.0).ok_or_else(|| p.bad("factor", "a number above 0"))
}

fn yarn(config: &Json, p: &Json, mla: bool, keys: &mut Keys) -> Result<()> {
    keys.put("rope.scaling.type", Value::Str("yarn".into()));
    keys.opt_f32("rope.scaling.factor", Some(factor(p)?));
    let original = match p.opt_u32("original_max_position_embeddings")? {
        Some(n) => n,
        None => config.u32("max_position_embeddings")?,
    };
    keys.u32("rope.scaling.original_context_length", original as usize);
    keys.opt_f32("rope.scaling.yarn_attn_factor", p.opt_f32("attention_factor")?);
    keys.opt_f32("rope.scaling.yarn_beta_fast", p.opt_f32("beta_fast")?);
    keys.opt_f32("rope.scaling.yarn_beta_slow", p.opt_f32("beta_slow")?);
    if let Some(all) = p.opt_f32("mscale_all_dim")?.filter(|_| mla) {
        if p.opt_f32("mscale")?.is_some_and(|m| m != all) {
            return Err(p.bad("mscale", format_args!("{all}, as mscale_all_dim: the format has one number")));
        }
        // A tenth, for llama.cpp's reasons of compatibility: readers of deepseek2 multiply by ten.
        keys.opt_f32("rope.scaling.yarn_log_multiplier", Some(0.1 * all));
    }
    Ok(())
}

/// By how much Llama 3's scaling slows each rotated pair: long wavelengths by `factor`, short ones not, a ramp between.
fn llama3_factors(p: &Json, base: f32, head_dim: usize) -> Result<Vec<f32>> {
    let factor = f64::from(factor(p)?);
    let low = f64::from(p.opt_f32("low_freq_factor")?.unwrap_or(1.0));
    let high = f64::from(p.opt_f32("high_freq_factor")?.unwrap_or(4.0));
    let original = f64::from(p.opt_u32("original_max_position_embeddings")?.unwrap_or(8192));
    if !(low > 0.0 && high > low) {
        return Err(p.bad("high_freq_factor", "more than low_freq_factor, which is above 0"));
    }
    let one = |pair: usize| {
        let frequency = f64::from(base).powf(-((2 * pair) as f64) / head_dim as f64);
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
    Ok((0..head_dim / 2).map(|pair| one(pair) as f32).collect())
}
