//! Small `tokenizer.json` files, good and bad.

use super::*;
use serde_json::json;

fn added(id: u32, text: &str, special: bool) -> Value {
    json!({"id": id, "content": text, "special": special,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
}

/// A byte-level vocabulary over a, b, space with two merges and two added tokens.
fn base() -> Value {
    json!({
        "added_tokens": [
            added(6, "<s>", true),
            added(7, "<tool>", false)
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "aab": 5},
            "merges": [["a", "b"], ["Ġ", "ab"], ["a", "ab"]]}
    })
}

fn files(json: &Value) -> HfFiles {
    HfFiles { tokenizer: ("t.json".into(), serde_json::to_vec(json).unwrap()), ..HfFiles::default() }
}

#[test]
fn added_tokens_and_the_template_are_honoured() {
    let t = Tokenizer::from_hf_files(&files(&base())).unwrap();
    assert_eq!(t.encode("ab ab", true, true).unwrap(), [6, 3, 4]);
    assert_eq!(t.encode("a<tool>b<s>", true, false).unwrap(), [0, 7, 1, 6]);
    // As text, `<s>` has no tokens here (the vocabulary spells a, b and space only); the user-defined token stays.
    assert_eq!(t.encode("a<tool>b<s>", false, false).unwrap(), [0, 7, 1]);
    assert_eq!(t.decode(&[6, 3, 4, 7], false), "<s>ab ab<tool>");
    assert_eq!(t.decode(&[6, 3, 4, 7], true), "ab ab<tool>");
    assert_eq!((t.token_bytes(999), t.vocab_size()), (&b""[..], 8));
}

#[test]
fn side_files_set_ends_and_bos() {
    let mut f = files(&base());
    f.tokenizer_config = Some((
        "c.json".into(),
        json!({"bos_token": {"content": "<s>"}, "eos_token": "<tool>", "add_bos_token": false}),
    ));
    f.generation_config = Some(("g.json".into(), json!({"eos_token_id": [7, 1]})));
    let t = Tokenizer::from_hf_files(&f).unwrap();
    assert_eq!((t.special().bos, t.special().eos, t.end_ids()), (Some(6), Some(7), &[1, 7][..]));
    assert_eq!(t.encode("ab", true, true).unwrap(), [3], "add_bos_token wins over the template");
    assert!(t.is_end(7) && !t.is_end(6) && !t.adds_bos());
}

#[test]
fn sentencepiece_style_files_decode_to_spaces() {
    let mut j = base();
    j["pre_tokenizer"] = Value::Null;
    j["post_processor"] = Value::Null;
    j["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    j["decoder"] = json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    j["model"] = json!({"type": "BPE", "byte_fallback": true, "fuse_unk": true, "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xC3>": 4, "<0xA9>": 5}, "merges": ["▁ a"]});
    let t = Tokenizer::from_hf_files(&files(&j)).unwrap();
    let ids = t.encode("a é", true, true).unwrap();
    assert_eq!(ids, [3, 1, 4, 5]);
    assert_eq!(t.decode(&ids, false), "a é");
    let mut out = String::new();
    let mut d = crate::text::Detokenizer::continuing(false);
    ids.iter().for_each(|id| d.push(&t, *id, &mut out));
    assert_eq!(out, " a é", "text that goes on keeps its space");
    assert_eq!(t.encode("zz", true, false).unwrap(), [1, 0]);
}

#[test]
fn what_is_wrong_is_named() {
    type Edit = fn(&mut Value);
    let table: [(&str, &str, Edit); 17] = [
        ("not JSON", "JSON", |j| *j = json!("x")),
        ("no model", "missing field `model`", |j| {
            j.as_object_mut().unwrap().remove("model");
        }),
        ("unigram", "model.type: expected BPE, found Unigram", |j| {
            j["model"] = json!({"type": "Unigram", "vocab": [["a", 0.5]]})
        }),
        ("vocab type", "JSON", |j| j["model"]["vocab"] = json!({"a": "zero"})),
        ("id too large", "model.vocab[\"a\"]", |j| j["model"]["vocab"]["a"] = json!(1u64 << 40)),
        ("id sparse", "token ids", |j| j["model"]["vocab"]["a"] = json!(1_000_000)),
        ("id negative", "JSON", |j| j["model"]["vocab"]["a"] = json!(-1)),
        ("one id twice", "one token for id 1", |j| j["model"]["vocab"]["a"] = json!(1)),
        ("added id twice", "added_tokens[1]", |j| j["added_tokens"][1]["id"] = json!(6)),
        ("added id taken", "added_tokens[1]", |j| j["added_tokens"][1]["id"] = json!(0)),
        ("added text twice", "added_tokens[1]", |j| j["added_tokens"][1]["content"] = json!("<s>")),
        ("merge unknown", "model.merges[0]", |j| j["model"]["merges"] = json!([["a", "z"]])),
        ("merge result", "model.merges[0]", |j| j["model"]["merges"] = json!([["aab", "aab"]])),
        ("merge shape", "is not two tokens", |j| j["model"]["merges"] = json!(["a b b"])),
        ("regex", "pre_tokenizer", |j| {
            j["pre_tokenizer"] =
                json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false})
        }),
        ("post id", "post_processor", |j| j["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([77])),
        ("decoder", "decoder", |j| {
            j["decoder"] = json!({"type": "WordPiece"});
            j["pre_tokenizer"] = Value::Null;
        }),
    ];
    for (name, want, edit) in table {
        let mut j = base();
        edit(&mut j);
        let e = Tokenizer::from_hf_files(&files(&j)).expect_err(name).to_string();
        assert!(e.starts_with("t.json: ") && e.contains(want) && !e.contains('\n'), "{name}: {e}");
    }
    // Side files are named by their own names.
    let mut f = files(&base());
    f.generation_config = Some(("g.json".into(), json!({"eos_token_id": 8})));
    let e = Tokenizer::from_hf_files(&f).unwrap_err().to_string();
    assert_eq!(e, "g.json: eos_token_id: expected a token id below 8, found 8");
    f.generation_config = None;
    f.tokenizer_config = Some(("c.json".into(), json!({"eos_token": "<nope>"})));
    let e = Tokenizer::from_hf_files(&f).unwrap_err().to_string();
    assert_eq!(e, "c.json: eos_token: expected a token of the vocabulary, found \"<nope>\"");
    let dir = tempfile::tempdir().unwrap();
    let e = Tokenizer::from_hf_dir(dir.path()).unwrap_err().to_string();
    assert!(e.contains("tokenizer.json: file: expected"), "{e}");
}
