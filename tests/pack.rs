//! Packing: the GGUF that comes out computes what the folder that went in computes, whatever the family, and packing it
//! again changes nothing.

use crate::support::{command, data};
use crate::tiny;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use tegu::app::{self, Options};
use tegu::engine::EvalOptions;
use tegu::text::Tokenizer;
use tegu::weights::{Meta, Source};

fn pack(model: &Path, output: &Path, codec: &str) {
    let mut command = command("tegu");
    command.args(["pack", "--codec", codec, "-o"]).arg(output).arg(model);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Logits of a few tokens, f32 throughout.
fn logits(model: &Path) -> Vec<f32> {
    let mut options = Options::new(model);
    (options.exact, options.context_tokens, options.threads) = (true, 64, 2);
    let mut app = app::prepare(options).unwrap().load(&|_| {}).unwrap();
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 380).collect();
    let mut out = Vec::new();
    let collect = &mut |c: tegu::engine::EvalChunk| {
        out.extend_from_slice(c.logits);
        Ok(())
    };
    app.engine.eval(&ids, &EvalOptions::default(), collect).unwrap();
    out
}

fn oracles() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data().join("oracles")).unwrap();
    let mut found: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    found.sort();
    assert!(found.len() >= 5);
    found
}

/// Root of the mean square difference, in units of the spread of `want`.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mean = want.iter().map(|&x| f64::from(x)).sum::<f64>() / want.len() as f64;
    let spread: f64 = want.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let error: f64 = got.iter().zip(want).map(|(&a, &b)| f64::from(a - b).powi(2)).sum();
    (error / spread).sqrt()
}

#[test]
fn a_packed_model_computes_what_its_folder_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for model in oracles() {
        let want = logits(&model);
        // These weights are BF16: nothing is lost, but rounding where rotary pairs were brought together. Quantizing may
        // flip a near-tie between experts, which random ones make much of; anything out of place would be 1 or more.
        for (codec, most) in [("bf16", 1e-5), ("f32", 1e-5), ("q8_0", 0.25)] {
            pack(&model, &path, codec);
            let d = distance(&logits(&path), &want);
            assert!(d <= most, "{} {codec}: {d}", model.display());
        }
    }
}

/// A config that says something unusual.
type Row = (&'static str, &'static str, fn() -> Json);

fn yarn(more: Json) -> Json {
    let mut p = json!({ "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 16 });
    p.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({ "rope_parameters": p })
}

/// What a config may say beyond the usual: each changes what the model computes.
#[rustfmt::skip]
const VARIANTS: &[Row] = &[
    ("attention biases", "llama", || json!({ "attention_bias": true })),
    ("tied head", "llama", || json!({ "tie_word_embeddings": true })),
    ("linear rope", "llama", || json!({ "rope_scaling": { "type": "linear", "factor": 4.0 } })),
    ("yarn", "llama", || yarn(json!({}))),
    ("yarn's attention factor", "llama", || yarn(json!({ "attention_factor": 0.8 }))),
    ("yarn without rounding", "llama", || yarn(json!({ "truncate": false, "beta_fast": 3.0, "beta_slow": 1.1 }))),
    ("yarn's mscales", "llama", || yarn(json!({ "mscale": 1.0, "mscale_all_dim": 0.5 }))),
    ("a window by default", "mistral", || json!({ "sliding_window": 5 })),
    ("windows from a layer on", "qwen2",
        || json!({ "use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1 })),
    ("windows by type", "qwen3", || json!({ "use_sliding_window": true, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] })),
    ("windows everywhere", "qwen3_moe",
        || json!({ "use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1 })),
    ("a window in Mixtral", "mixtral", || json!({ "sliding_window": 5 })),
    ("rope base by default", "mixtral", || json!({ "rope_theta": null })),
    ("weights as they are", "qwen3_moe", || json!({ "norm_topk_prob": false })),
    ("weights as they are, by default", "qwen3_moe", || json!({ "norm_topk_prob": null })),
    ("experts in every second layer", "qwen3_moe", || json!({ "decoder_sparse_step": 2 })),
    ("dense layers by number", "qwen3_moe", || json!({ "mlp_only_layers": [1] })),
    ("clamped queries", "olmoe", || json!({ "clip_qkv": 0.2 })),
    ("normalized weights", "olmoe", || json!({ "norm_topk_prob": true })),
    ("biases of latent attention", "deepseek_v2", || json!({ "attention_bias": true })),
    ("groups", "deepseek_v2", || json!({ "topk_method": "group_limited_greedy", "n_group": 2 })),
    ("no bottleneck", "deepseek_v2", || json!({ "q_lora_rank": null })),
    ("no dense layer", "deepseek_v2", || json!({ "first_k_dense_replace": 0 })),
    ("yarn without mscale_all_dim", "deepseek_v2", || yarn(json!({}))),
    ("yarn with mscale alone", "deepseek_v2", || yarn(json!({ "mscale": 0.707 }))),
    ("yarn with two mscales", "deepseek_v2", || yarn(json!({ "mscale": 1.0, "mscale_all_dim": 0.5 }))),
    ("biases of latent attention", "deepseek_v3", || json!({ "attention_bias": true })),
    ("yarn without mscale_all_dim", "deepseek_v3", || yarn(json!({}))),
    ("yarn with two equal mscales", "deepseek_v3", || yarn(json!({ "mscale": 1.0, "mscale_all_dim": 1.0 }))),
    ("an attention scale beside linear rope", "deepseek_v3", || json!({ "rope_parameters":
        { "rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0, "mscale_all_dim": 1.0 } })),
    ("weights as they are", "deepseek_v3", || json!({ "norm_topk_prob": false })),
    ("two shared experts", "deepseek_v3", || json!({ "n_shared_experts": 2 })),
    ("groups", "glm4_moe_lite", || json!({ "n_group": 2 })),
    ("dense layers by type", "glm4_moe_lite", || json!({ "mlp_layer_types": ["sparse", "dense", "sparse"] })),
];

#[test]
fn whatever_a_config_says_is_packed() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, path) = (dir.path().join("folder"), dir.path().join("m.gguf"));
    std::fs::create_dir(&folder).unwrap();
    for (name, family, more) in VARIANTS {
        let mut config = tiny::config(family);
        tiny::write(&folder, &config, &[]);
        let plain = logits(&folder);
        config.as_object_mut().unwrap().extend(more().as_object().unwrap().clone());
        tiny::write(&folder, &config, &[]);
        let want = logits(&folder);
        let matters = distance(&want, &plain);
        assert!(matters > 1e-3, "{family}, {name}: only {matters} from the family's plain model");
        pack(&folder, &path, "f32");
        let d = distance(&logits(&path), &want);
        assert!(d <= 1e-5, "{family}, {name}: {d}");
    }
}

/// Tensors by name and shape, beyond a family's own.
type Extra = &'static [(&'static str, &'static [usize])];

#[test]
fn what_gguf_cannot_say_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let rows: [(&str, Json, Extra, &str); 3] = [
        (
            "deepseek_v3",
            json!({ "rope_interleave": false }),
            &[],
            "rope pairs in the packed file: expected Half",
        ),
        (
            "llama",
            json!({}),
            &[("model.layers.1.mlp.up_proj.bias", &[48])],
            "model.layers.1.mlp.up_proj.bias",
        ),
        ("llama", json!({ "mlp_bias": true }), &[], "mlp_bias"),
    ];
    for (family, more, extra, says) in rows {
        let mut config = tiny::config(family);
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        tiny::write(dir.path(), &config, extra);
        let output = command("tegu").arg("pack").arg(dir.path()).arg("-o").arg(&path).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(says), "{family}, {more}: {error}");
        assert!(!path.exists());
    }
}

/// A SentencePiece vocabulary as tokenizer.json has it, with a way to space text.
fn spaced(normalizer: Json, pre: Json) -> Json {
    let words = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁ab", "ab", "▁▁"].map(String::from);
    let bytes = (0..256).map(|b| format!("<0x{b:02X}>"));
    let vocab: serde_json::Map<_, _> = words.into_iter().chain(bytes).zip((0..).map(Json::from)).collect();
    let added = |id: u32, word: &str| {
        json!({ "id": id, "content": word, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false })
    };
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" },
            { "type": "Fuse" }] },
        "model": { "type": "BPE", "vocab": vocab, "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true,
            "merges": [["▁", "a"], ["a", "b"], ["▁a", "b"], ["▁", "▁"]] },
    })
}

#[test]
fn spaces_before_text_are_packed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    tiny::write(dir.path(), &tiny::config("llama"), &[]);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let meta = |scheme: &str| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false });
    let prepend = json!({ "type": "Prepend", "prepend": "▁" });
    let both = json!({ "type": "Sequence", "normalizers": [prepend, replace] });
    let rows = [
        ("never, by a normalizer", replace, Json::Null, [vec![8], vec![8, 1, 8], vec![7]]),
        ("always, by a normalizer", both, Json::Null, [vec![7], vec![7, 1, 7], vec![3, 7]]),
        ("never", Json::Null, meta("never"), [vec![8], vec![8, 1, 8], vec![7]]),
        ("first", Json::Null, meta("first"), [vec![7], vec![7, 1, 8], vec![7]]),
        ("always", Json::Null, meta("always"), [vec![7], vec![7, 1, 7], vec![7]]),
    ];
    for (name, normalizer, pre, want) in rows {
        let json = spaced(normalizer, pre).to_string();
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        pack(dir.path(), &path, "f32");
        let source = Source::open(&path).unwrap();
        let Meta::Gguf(entries) = source.meta() else { panic!("a GGUF") };
        let packed = Tokenizer::from_gguf_meta(entries).unwrap();
        for t in [Tokenizer::from_hf_dir(dir.path()).unwrap(), packed] {
            let ids = ["ab", "ab<s>ab", " ab"].map(|text| t.encode(text, true, false).unwrap());
            assert_eq!(ids, want, "{name}");
        }
    }
}

#[test]
fn a_tokenizer_that_gives_other_ids_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    tiny::write(dir.path(), &tiny::config("llama"), &[]);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    // An added token that takes the spaces beside it, which GGUF has no word for.
    let mut json = spaced(replace, Json::Null);
    json["added_tokens"][1]["lstrip"] = json!(true);
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let output = command("tegu").arg("pack").arg(dir.path()).arg("-o").arg(&path).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(2) && error.contains("tokenizer.json: ids of \"<s>a <s> b"),
        "{error}"
    );
}

#[test]
fn packing_a_packed_model_again_keeps_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (once, twice) = (dir.path().join("once.gguf"), dir.path().join("twice.gguf"));
    for codec in ["q8_0", "q4_k_m"] {
        pack(&data().join("oracles/deepseek-v3"), &once, codec);
        pack(&once, &twice, codec);
        assert!(std::fs::read(&once).unwrap() == std::fs::read(&twice).unwrap(), "{codec}");
    }
}
