//! The shapes: published models' config.json, the keys that decide sizes and routing.

use serde_json::{Value, json};

/// Names and what they describe, for `--help`.
pub const NAMES: [&str; 5] =
    ["deepseek-v2-lite", "moonlight-16b", "glm-4.7-flash", "qwen3-30b-a3b", "llama3-8b"];

/// The config of a shape, as its publisher's config.json has it.
pub fn config(name: &str) -> Option<Value> {
    Some(match name {
        // deepseek-ai/DeepSeek-V2-Lite
        "deepseek-v2-lite" => json!({
            "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
            "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": false, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
            "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096
            },
        }),
        // moonshotai/Moonlight-16B-A3B
        "moonlight-16b" => json!({
            "model_type": "deepseek_v3", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
            "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "rope_theta": 50000,
        }),
        // zai-org/GLM-4.7-Flash
        "glm-4.7-flash" => json!({
            "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "intermediate_size": 10240,
            "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880,
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_routed_experts": 64, "n_shared_experts": 1,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.8,
            "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "v_head_dim": 256, "rope_theta": 1000000,
        }),
        // Qwen/Qwen3-30B-A3B
        "qwen3-30b-a3b" => json!({
            "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true, "rope_theta": 1000000,
        }),
        // meta-llama/Meta-Llama-3-8B
        "llama3-8b" => json!({
            "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000,
        }),
        _ => return None,
    })
}

/// One tensor to invent.
#[derive(Debug)]
pub struct SynthTensor {
    /// Its GGUF name.
    pub name: String,
    /// Row-major, the row width last.
    pub dims: Vec<usize>,
    /// What its values are like.
    pub kind: Kind,
}

/// What a tensor's values are like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// All ones: norms.
    Ones,
    /// All zeros: the router's correction.
    Zeros,
    /// Random with this standard deviation.
    Random(f32),
    /// Random with this standard deviation, each row longer or shorter by the skew.
    Router(f32),
}

/// The sizes of a config, its keys checked when it became metadata.
struct Sizes<'a>(&'a Value);

impl Sizes<'_> {
    fn get(&self, key: &str) -> usize {
        self.0.get(key).and_then(Value::as_u64).unwrap_or(0) as usize
    }
}

/// Every tensor of a shape.
pub fn tensors(config: &Value) -> Vec<SynthTensor> {
    let s = Sizes(config);
    let (hidden, vocab) = (s.get("hidden_size"), s.get("vocab_size"));
    let mut list = List { out: Vec::new(), residual: 1.0 / (2.0 * s.get("num_hidden_layers") as f32).sqrt() };
    // Embeddings are much longer than what a layer adds, or every token would end in one direction and be sent to the
    // same experts.
    let embedding = EMBEDDING_GAIN / (hidden as f32).sqrt();
    list.push("token_embd.weight".into(), &[vocab, hidden], Kind::Random(embedding));
    list.ones("output_norm.weight".into(), hidden);
    list.matrix("output.weight".into(), &[vocab, hidden]);
    for layer in 0..s.get("num_hidden_layers") {
        let blk = format!("blk.{layer}");
        list.ones(format!("{blk}.attn_norm.weight"), hidden);
        if s.get("kv_lora_rank") > 0 {
            list.latent(&s, &blk)
        } else {
            list.grouped(&s, &blk)
        }
        list.ones(format!("{blk}.ffn_norm.weight"), hidden);
        let routed = s.get("n_routed_experts") + s.get("num_experts");
        if routed > 0 && layer >= s.get("first_k_dense_replace") {
            list.experts(&s, &blk, routed);
        } else {
            list.dense(&blk, "", hidden, s.get("intermediate_size"));
        }
    }
    list.out
}

/// How much longer embeddings are than weights of the same width.
const EMBEDDING_GAIN: f32 = 50.0;

struct List {
    out: Vec<SynthTensor>,
    /// What writes into the residual stream is smaller the more layers there are, as in GPT-2's initialization.
    residual: f32,
}

impl List {
    fn push(&mut self, name: String, dims: &[usize], kind: Kind) {
        self.out.push(SynthTensor { name, dims: dims.to_vec(), kind });
    }

    fn ones(&mut self, name: String, n: usize) {
        self.push(name, &[n], Kind::Ones);
    }

    /// Keeps the length of what it multiplies.
    fn matrix(&mut self, name: String, dims: &[usize]) {
        let fan_in = *dims.last().expect("a shape") as f32;
        self.push(name, dims, Kind::Random(1.0 / fan_in.sqrt()));
    }

    /// Writes into the residual stream.
    fn output(&mut self, name: String, dims: &[usize]) {
        let fan_in = *dims.last().expect("a shape") as f32;
        self.push(name, dims, Kind::Random(self.residual / fan_in.sqrt()));
    }

    fn grouped(&mut self, s: &Sizes, blk: &str) {
        let (hidden, heads, kv) =
            (s.get("hidden_size"), s.get("num_attention_heads"), s.get("num_key_value_heads"));
        let named = s.get("head_dim");
        let head = if named > 0 { named } else { hidden / heads };
        self.matrix(format!("{blk}.attn_q.weight"), &[heads * head, hidden]);
        self.matrix(format!("{blk}.attn_k.weight"), &[kv * head, hidden]);
        self.matrix(format!("{blk}.attn_v.weight"), &[kv * head, hidden]);
        if s.0["model_type"] == "qwen3_moe" {
            self.ones(format!("{blk}.attn_q_norm.weight"), head);
            self.ones(format!("{blk}.attn_k_norm.weight"), head);
        }
        self.output(format!("{blk}.attn_output.weight"), &[hidden, heads * head]);
    }

    fn latent(&mut self, s: &Sizes, blk: &str) {
        let (hidden, heads) = (s.get("hidden_size"), s.get("num_attention_heads"));
        let (rank, q_rank) = (s.get("kv_lora_rank"), s.get("q_lora_rank"));
        let (nope, rope, v) = (s.get("qk_nope_head_dim"), s.get("qk_rope_head_dim"), s.get("v_head_dim"));
        if q_rank > 0 {
            self.matrix(format!("{blk}.attn_q_a.weight"), &[q_rank, hidden]);
            self.ones(format!("{blk}.attn_q_a_norm.weight"), q_rank);
            self.matrix(format!("{blk}.attn_q_b.weight"), &[heads * (nope + rope), q_rank]);
        } else {
            self.matrix(format!("{blk}.attn_q.weight"), &[heads * (nope + rope), hidden]);
        }
        self.matrix(format!("{blk}.attn_kv_a_mqa.weight"), &[rank + rope, hidden]);
        self.ones(format!("{blk}.attn_kv_a_norm.weight"), rank);
        // The keys' up-projection is stored transposed: its fan-in is the latent's width all the same.
        let keys = Kind::Random(1.0 / (rank as f32).sqrt());
        self.push(format!("{blk}.attn_k_b.weight"), &[heads, rank, nope], keys);
        self.matrix(format!("{blk}.attn_v_b.weight"), &[heads, v, rank]);
        self.output(format!("{blk}.attn_output.weight"), &[hidden, heads * v]);
    }

    fn dense(&mut self, blk: &str, suffix: &str, hidden: usize, width: usize) {
        self.matrix(format!("{blk}.ffn_gate{suffix}.weight"), &[width, hidden]);
        self.matrix(format!("{blk}.ffn_up{suffix}.weight"), &[width, hidden]);
        self.output(format!("{blk}.ffn_down{suffix}.weight"), &[hidden, width]);
    }

    fn experts(&mut self, s: &Sizes, blk: &str, n: usize) {
        let (hidden, width, shared) =
            (s.get("hidden_size"), s.get("moe_intermediate_size"), s.get("n_shared_experts"));
        let router = Kind::Router(1.0 / (hidden as f32).sqrt());
        self.push(format!("{blk}.ffn_gate_inp.weight"), &[n, hidden], router);
        if matches!(s.0["model_type"].as_str(), Some("deepseek_v3" | "glm4_moe_lite")) {
            self.push(format!("{blk}.exp_probs_b.bias"), &[n], Kind::Zeros);
        }
        self.matrix(format!("{blk}.ffn_gate_exps.weight"), &[n, width, hidden]);
        self.matrix(format!("{blk}.ffn_up_exps.weight"), &[n, width, hidden]);
        self.output(format!("{blk}.ffn_down_exps.weight"), &[n, hidden, width]);
        if shared > 0 {
            self.dense(blk, "_shexp", hidden, width * shared);
        }
    }
}
