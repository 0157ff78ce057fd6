//! What a config.json leaves out, as transformers 5.24's configuration classes fill it in.

use super::*;
use serde_json::json;

/// A config with only the keys that have no default here.
fn bare(family: &str) -> Value {
    json!({
        "model_type": family, "vocab_size": 384, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "num_experts_per_tok": 2,
    })
}

fn with(mut config: Value, more: Value) -> Value {
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn read(config: &Value) -> Hyper {
    hyper(Path::new("config.json"), config).unwrap()
}

#[test]
fn what_is_left_out_is_what_the_class_takes() {
    // Family, context, epsilon, rope base, key-value heads (0: MLA), head width.
    let table = [
        ("llama", 2048, 1e-6, 1e4, 32, 8),
        ("mistral", 131_072, 1e-6, 1e4, 8, 8),
        ("qwen2", 32_768, 1e-6, 1e4, 32, 8),
        ("qwen3", 32_768, 1e-6, 1e4, 32, 128),
        ("qwen3_moe", 32_768, 1e-6, 1e4, 4, 8),
        ("mixtral", 131_072, 1e-5, 1e6, 8, 8),
        ("olmoe", 4096, 1e-5, 1e4, 32, 8),
        ("deepseek_v2", 2048, 1e-6, 1e4, 0, 0),
        ("deepseek_v3", 4096, 1e-6, 1e4, 0, 0),
        ("glm4_moe_lite", 202_752, 1e-5, 1e4, 0, 0),
    ];
    for (family, context, eps, theta, kv_heads, width) in table {
        let h = read(&bare(family));
        assert_eq!((h.context_tokens, h.norm_eps, h.rope.theta), (context, eps, theta), "{family}");
        match h.attn {
            AttnHyper::Gqa { n_kv_heads, head_dim, .. } => {
                assert_eq!((n_kv_heads, head_dim), (kv_heads, width), "{family}");
            }
            AttnHyper::Mla { q_lora_rank, .. } => {
                let rank = if family == "glm4_moe_lite" { 768 } else { 1536 };
                assert_eq!((kv_heads, q_lora_rank), (0, Some(rank)), "{family}");
            }
        }
        if family != "mistral" {
            assert!(h.masks.iter().all(|m| *m == Mask::Full), "{family}");
        }
    }
    // null is "none", not "as usual".
    let null = with(bare("qwen2"), json!({ "num_key_value_heads": null }));
    assert!(matches!(read(&null).attn, AttnHyper::Gqa { n_kv_heads: 32, .. }));
    let null = with(bare("deepseek_v3"), json!({ "q_lora_rank": null }));
    assert!(matches!(read(&null).attn, AttnHyper::Mla { q_lora_rank: None, .. }));
}

#[test]
fn routers_left_out_are_what_the_class_takes() {
    // Family, experts, their width, shared width, groups and how many of them, scale, normalized, leading dense layers.
    let table = [
        ("qwen3_moe", 128, 768, 0, (1, 1), 1.0, false, 0),
        ("mixtral", 8, 48, 0, (1, 1), 1.0, true, 0),
        ("olmoe", 64, 48, 0, (1, 1), 1.0, false, 0),
        ("deepseek_v2", 64, 1407, 2814, (1, 1), 1.0, false, 0),
        ("deepseek_v3", 256, 2048, 2048, (8, 4), 2.5, true, 3),
        ("glm4_moe_lite", 64, 1536, 1536, (1, 1), 1.8, true, 1),
    ];
    for (family, experts, width, shared, groups, scale, normalize, dense) in table {
        let m = read(&bare(family)).moe.unwrap();
        assert_eq!((m.n_experts, m.expert_width, m.shared_width), (experts, width, shared), "{family}");
        assert_eq!(
            ((m.n_groups, m.n_groups_picked), m.scale, m.normalize),
            (groups, scale, normalize),
            "{family}"
        );
        assert_eq!(m.dense.iter().filter(|d| **d).count(), dense, "{family}");
    }
    for (family, picked) in
        [("mixtral", 2), ("olmoe", 8), ("qwen3_moe", 8), ("deepseek_v3", 8), ("glm4_moe_lite", 4)]
    {
        let mut config = bare(family);
        config.as_object_mut().unwrap().remove("num_experts_per_tok");
        assert_eq!(read(&config).moe.unwrap().n_picked, picked, "{family}");
    }
}

#[test]
fn windows_slide_where_the_class_lets_them() {
    let on = json!({ "use_sliding_window": true, "sliding_window": 7, "max_window_layers": 3 });
    let types = json!({ "use_sliding_window": true, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"] });
    let table = [
        ("qwen2", on.clone(), [0, 0, 0, 7]),
        ("qwen3", types, [7, 0, 0, 0]),
        ("qwen3_moe", on.clone(), [7, 7, 7, 7]),
        ("qwen2", json!({ "sliding_window": 7, "max_window_layers": 0 }), [0, 0, 0, 0]),
        ("qwen2", json!({ "use_sliding_window": true, "max_window_layers": 2 }), [0, 0, 4096, 4096]),
        (
            "qwen2",
            json!({ "use_sliding_window": true, "sliding_window": null, "max_window_layers": 2 }),
            [0; 4],
        ),
        ("mistral", json!({}), [4096; 4]),
        ("mistral", json!({ "sliding_window": null }), [0; 4]),
        ("mixtral", json!({ "sliding_window": 7 }), [7; 4]),
        ("llama", on, [0; 4]),
    ];
    for (family, more, windows) in table {
        let mask = |w: usize| if w > 0 { Mask::Sliding { window: w } } else { Mask::Full };
        assert_eq!(read(&with(bare(family), more.clone())).masks, windows.map(mask), "{family} {more}");
    }
    let unused =
        json!({ "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"] });
    for family in ["llama", "qwen3"] {
        let e = hyper(Path::new("config.json"), &with(bare(family), unused.clone())).unwrap_err().to_string();
        assert!(e.contains("layer_types: expected full_attention"), "{e}");
    }
}
