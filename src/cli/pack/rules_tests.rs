use super::*;
use serde_json::json;
use std::path::Path;

const GPT4: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

fn with<T>(normalizer: JsonValue, pre: JsonValue, f: impl Fn(&Json) -> T) -> T {
    let value = json!({ "normalizer": normalizer, "pre_tokenizer": pre });
    f(&Json { path: Path::new("tokenizer.json"), prefix: "", value: &value })
}

fn bytes(regex: bool) -> JsonValue {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex })
}

fn split(regex: &str, behavior: &str, invert: bool) -> JsonValue {
    json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": behavior, "invert": invert })
}

fn sequence(steps: &[JsonValue]) -> JsonValue {
    json!({ "type": "Sequence", "pretokenizers": steps })
}

#[test]
fn cutting_rules_have_a_name_or_are_refused() {
    let (gpt4, qwen) = (split(GPT4, "Isolated", false), split(&GPT4.replace("{1,3}", ""), "Removed", true));
    let digits = |alone: bool| json!({ "type": "Digits", "individual_digits": alone });
    let none = JsonValue::Null;
    let named = [
        (none.clone(), bytes(true), "gpt-2", false),
        (json!({ "type": "NFC" }), bytes(true), "gpt-2", true),
        (
            json!({ "type": "Sequence", "normalizers": [] }),
            sequence(&[digits(true), bytes(true)]),
            "smollm",
            false,
        ),
        (none.clone(), sequence(&[gpt4.clone(), bytes(false)]), "dbrx", false),
        (json!({ "type": "NFC" }), sequence(&[qwen, bytes(false)]), "qwen2", true),
    ];
    for (normalizer, pre, name, nfc) in named {
        let got = with(normalizer, pre, |root| byte_level(root, false, false)).unwrap();
        assert_eq!(got, ByteLevel { name, nfc });
    }
    let gpt4_with = |ignore, glm| {
        with(none.clone(), sequence(&[gpt4.clone(), bytes(false)]), |root| byte_level(root, ignore, glm))
            .unwrap()
            .name
    };
    assert_eq!([gpt4_with(true, false), gpt4_with(true, true)], ["llama-bpe", "glm4"]);

    let spaced = json!({ "type": "ByteLevel", "add_prefix_space": true, "use_regex": true });
    let refused = [
        (json!({ "type": "Lowercase" }), bytes(true), "normalizer: expected none or NFC"),
        (json!({ "type": "NFKC" }), bytes(true), "found NFKC"),
        (none.clone(), spaced, "ByteLevel.add_prefix_space: expected false"),
        (none.clone(), bytes(false), "ByteLevel.use_regex: expected true"),
        (none.clone(), sequence(&[gpt4.clone(), bytes(true)]), "ByteLevel.use_regex: expected false"),
        (
            none.clone(),
            sequence(&[json!({ "type": "Whitespace" }), bytes(true)]),
            "Whitespace.type: expected Split",
        ),
        (none.clone(), sequence(&[digits(false), bytes(true)]), "Digits.individual_digits: expected true"),
        (
            none.clone(),
            sequence(&[split(GPT4, "MergedWithNext", false), bytes(false)]),
            "Split.behavior: expected",
        ),
        (
            none.clone(),
            sequence(&[split("[aeiou]", "Isolated", false), bytes(false)]),
            "rules that GGUF has a name for",
        ),
        (none.clone(), sequence(&[bytes(true), digits(true)]), "ByteLevel as the last step"),
        (none.clone(), none.clone(), "pre_tokenizer: expected ByteLevel as its last step, found nothing"),
    ];
    for (normalizer, pre, says) in refused {
        let e = with(normalizer, pre, |root| byte_level(root, false, false)).unwrap_err().to_string();
        assert!(e.starts_with("tokenizer.json: ") && e.contains(says), "{e}");
    }
}

#[test]
fn spaces_of_sentencepiece_are_said_or_refused() {
    let none = JsonValue::Null;
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prepend = json!({ "type": "Prepend", "prepend": "▁" });
    let both = json!({ "type": "Sequence", "normalizers": [prepend, replace] });
    let meta = |scheme: &str| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false });
    let table = [
        (both, none.clone(), Prefix::Always),
        (replace.clone(), none.clone(), Prefix::Never),
        (none.clone(), meta("first"), Prefix::Metaspace("first")),
        (none.clone(), meta("never"), Prefix::Never),
        (none.clone(), meta("always"), Prefix::Metaspace("always")),
        (
            none.clone(),
            json!({ "type": "Metaspace", "replacement": "▁", "add_prefix_space": true }),
            Prefix::Metaspace("always"),
        ),
    ];
    for (normalizer, pre, want) in table {
        assert_eq!(with(normalizer, pre, sentence_piece).unwrap(), want);
    }
    let refused = [
        (json!({ "type": "NFKC" }), none.clone(), "normalizer: expected Prepend"),
        (replace, json!({ "type": "Punctuation" }), "pre_tokenizer: expected none, or Metaspace"),
        (none.clone(), none, "spells spaces"),
    ];
    for (normalizer, pre, says) in refused {
        let e = with(normalizer, pre, sentence_piece).unwrap_err().to_string();
        assert!(e.contains(says), "{e}");
    }
}
