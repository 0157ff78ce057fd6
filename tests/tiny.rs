//! Hugging Face folders of models of a few thousand weights, made from their config.json: every family, every option. A
//! tensor's values follow from its name, so that two configs differ by what they say and nothing else.

use serde_json::{Value as Json, json};
use std::path::Path;

/// A config of `family` with three layers; every key that the family's tensors depend on is there.
pub fn config(family: &str) -> Json {
    let mut c = json!({
        "model_type": family, "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    let more = match family {
        "qwen3_moe" => json!({ "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "norm_topk_prob": true }),
        "mixtral" => json!({ "num_local_experts": 4, "num_experts_per_tok": 2 }),
        "olmoe" => json!({ "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": false }),
        "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite" => {
            json!({ "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5 })
        }
        _ => json!({}),
    };
    c.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    c
}

/// Writes the folder of `config`, with tensors that its keys do not tell (`name`, shape).
pub fn write(dir: &Path, config: &Json, extra: &[(&str, &[usize])]) {
    let mut all = tensors(config);
    all.extend(extra.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())));
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape) in all {
        let start = data.len();
        data.extend(values(&name, shape.iter().product()).flat_map(f32::to_le_bytes));
        header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] }));
    }
    let header = Json::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// Numbers that follow from the name: norms near 1, the rest around 0 (Knuth's MMIX generator, from an FNV-1a hash).
fn values(name: &str, n: usize) -> impl Iterator<Item = f32> {
    let hash = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let (base, spread) = if name.contains("norm") { (1.0, 0.3) } else { (0.0, 0.35) };
    (0..n).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        base + spread * ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    })
}

fn tensors(c: &Json) -> Vec<(String, Vec<usize>)> {
    let n = |key: &str| c[key].as_u64().unwrap_or(0) as usize;
    let mut out = Vec::new();
    let mut put = |name: String, shape: &[usize]| out.push((name, shape.to_vec()));
    put("model.embed_tokens.weight".into(), &[n("vocab_size"), n("hidden_size")]);
    put("model.norm.weight".into(), &[n("hidden_size")]);
    if c["tie_word_embeddings"] == false {
        put("lm_head.weight".into(), &[n("vocab_size"), n("hidden_size")]);
    }
    for l in 0..n("num_hidden_layers") {
        let at = format!("model.layers.{l}");
        put(format!("{at}.input_layernorm.weight"), &[n("hidden_size")]);
        put(format!("{at}.post_attention_layernorm.weight"), &[n("hidden_size")]);
        if n("kv_lora_rank") > 0 {
            mla(c, &at, &mut put)
        } else {
            gqa(c, &at, &mut put)
        }
        feed_forward(c, l, &at, &mut put);
    }
    out
}

fn gqa(c: &Json, at: &str, put: &mut impl FnMut(String, &[usize])) {
    let n = |key: &str| c[key].as_u64().unwrap_or(0) as usize;
    let family = c["model_type"].as_str().unwrap();
    let (q, kv) = (n("num_attention_heads") * n("head_dim"), n("num_key_value_heads") * n("head_dim"));
    let all = c["attention_bias"] == true;
    for (name, rows, cols) in [
        ("q", q, n("hidden_size")),
        ("k", kv, n("hidden_size")),
        ("v", kv, n("hidden_size")),
        ("o", n("hidden_size"), q),
    ] {
        put(format!("{at}.self_attn.{name}_proj.weight"), &[rows, cols]);
        if all || family == "qwen2" && name != "o" {
            put(format!("{at}.self_attn.{name}_proj.bias"), &[rows]);
        }
    }
    let norms = match family {
        "qwen3" | "qwen3_moe" => Some((n("head_dim"), n("head_dim"))),
        "olmoe" => Some((q, kv)),
        _ => None,
    };
    if let Some((q, k)) = norms {
        put(format!("{at}.self_attn.q_norm.weight"), &[q]);
        put(format!("{at}.self_attn.k_norm.weight"), &[k]);
    }
}

fn mla(c: &Json, at: &str, put: &mut impl FnMut(String, &[usize])) {
    let n = |key: &str| c[key].as_u64().unwrap_or(0) as usize;
    let (heads, hidden, rank, lora) =
        (n("num_attention_heads"), n("hidden_size"), n("q_lora_rank"), n("kv_lora_rank"));
    let (nope, rope, v) = (n("qk_nope_head_dim"), n("qk_rope_head_dim"), n("v_head_dim"));
    let mut linear = |name: &str, rows: usize, cols: usize, has_bias: bool| {
        put(format!("{at}.self_attn.{name}.weight"), &[rows, cols]);
        if has_bias && c["attention_bias"] == true {
            put(format!("{at}.self_attn.{name}.bias"), &[rows]);
        }
    };
    if rank > 0 {
        linear("q_a_proj", rank, hidden, true);
        linear("q_b_proj", heads * (nope + rope), rank, false);
    } else {
        linear("q_proj", heads * (nope + rope), hidden, false);
    }
    linear("kv_a_proj_with_mqa", lora + rope, hidden, true);
    linear("kv_b_proj", heads * (nope + v), lora, false);
    linear("o_proj", hidden, heads * v, true);
    put(format!("{at}.self_attn.kv_a_layernorm.weight"), &[lora]);
    if rank > 0 {
        put(format!("{at}.self_attn.q_a_layernorm.weight"), &[rank]);
    }
}

/// Which layers are dense, as the transformers classes have it.
fn is_dense(c: &Json, l: usize) -> bool {
    match c["model_type"].as_str().unwrap() {
        "mixtral" | "olmoe" => false,
        "qwen3_moe" => {
            let only = c["mlp_only_layers"].as_array().is_some_and(|a| a.contains(&json!(l)));
            only || !(l as u64 + 1).is_multiple_of(c["decoder_sparse_step"].as_u64().unwrap_or(1))
        }
        "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite" => match &c["mlp_layer_types"] {
            Json::Array(types) => types[l] == "dense",
            _ => (l as u64) < c["first_k_dense_replace"].as_u64().unwrap_or(1),
        },
        _ => true,
    }
}

fn feed_forward(c: &Json, l: usize, at: &str, put: &mut impl FnMut(String, &[usize])) {
    let n = |key: &str| c[key].as_u64().unwrap_or(0) as usize;
    let (hidden, family) = (n("hidden_size"), c["model_type"].as_str().unwrap());
    let mut mlp = |name: String, width: usize, parts: [&str; 3]| {
        for (part, shape) in parts.iter().zip([[width, hidden], [width, hidden], [hidden, width]]) {
            put(format!("{name}.{part}.weight"), &shape);
        }
    };
    let parts = ["gate_proj", "up_proj", "down_proj"];
    if is_dense(c, l) {
        return mlp(format!("{at}.mlp"), n("intermediate_size"), parts);
    }
    let width =
        if n("moe_intermediate_size") > 0 { n("moe_intermediate_size") } else { n("intermediate_size") };
    let experts = n("n_routed_experts") + n("num_experts") + n("num_local_experts");
    let (block, parts) =
        if family == "mixtral" { ("block_sparse_moe", ["w1", "w3", "w2"]) } else { ("mlp", parts) };
    (0..experts).for_each(|e| mlp(format!("{at}.{block}.experts.{e}"), width, parts));
    if n("n_shared_experts") > 0 {
        mlp(format!("{at}.mlp.shared_experts"), width * n("n_shared_experts"), parts);
    }
    put(format!("{at}.{block}.gate.weight"), &[experts, hidden]);
    if matches!(family, "deepseek_v3" | "glm4_moe_lite") {
        put(format!("{at}.mlp.gate.e_score_correction_bias"), &[experts]);
    }
}
