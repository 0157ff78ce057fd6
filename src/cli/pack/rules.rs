//! How tokenizer.json spaces and cuts text, in the words that GGUF has for it.
//!
//! GGUF names the rules by which text is cut before merging instead of carrying them, so they have to be recognized; a
//! step that has no name is an error, because a wrong one gives wrong ids and no sign of it.

use super::config::Json;
use crate::units::{Error, Result};
use serde_json::Value as JsonValue;

/// Rules of a byte-level vocabulary.
#[derive(Debug, PartialEq, Eq)]
pub struct ByteLevel {
    /// `tokenizer.ggml.pre`.
    pub name: &'static str,
    /// Text is brought into Unicode's composed form first.
    pub nfc: bool,
}

/// Where a SentencePiece vocabulary has a space put before text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    /// Nowhere.
    Never,
    /// At the start and after every added token.
    Always,
    /// There, but not before a text that begins with a space: `text::METASPACE`'s "always" and "first".
    Metaspace(&'static str),
}

/// Reads the rules of a byte-level vocabulary. `glm`: the vocabulary has GLM's mask token.
pub fn byte_level(root: &Json, ignore_merges: bool, glm: bool) -> Result<ByteLevel> {
    let nfc = match kinds(&steps(root.get("normalizer"), "normalizers"))[..] {
        [] => false,
        ["NFC"] => true,
        ref found => {
            return Err(bad(root, "normalizer", "none or NFC, as GGUF has no other", &found.join(", ")));
        }
    };
    let steps = steps(root.get("pre_tokenizer"), "pretokenizers");
    let mut patterns = Vec::new();
    let (mut digits, mut own_rule) = (false, None);
    for step in &steps {
        let wrong = |part: &str, expected: &str| {
            let field = format!("pre_tokenizer: {}{part}", kind(step));
            Err(bad(root, &field, expected, &step[part.trim_start_matches('.')].to_string()))
        };
        match kind(step) {
            _ if own_rule.is_some() => return wrong(".type", "ByteLevel as the last step"),
            "Split" => match (&step["pattern"]["Regex"], split(step)) {
                (JsonValue::String(regex), true) => patterns.push(regex.as_str()),
                (JsonValue::String(_), false) => {
                    return wrong(".behavior", "Isolated without invert, or Removed with it");
                }
                _ => return wrong(".pattern", "a Regex"),
            },
            "Digits" if step["individual_digits"] == true => digits = true,
            "Digits" => return wrong(".individual_digits", "true, as GGUF has no name for groups of digits"),
            "ByteLevel" if step["add_prefix_space"] == false => own_rule = Some(step["use_regex"] != false),
            "ByteLevel" => {
                return wrong(".add_prefix_space", "false, as GGUF has no word for a space put before");
            }
            _ => return wrong(".type", "Split, Digits or ByteLevel"),
        }
    }
    let Some(own_rule) = own_rule else {
        return Err(bad(root, "pre_tokenizer", "ByteLevel as its last step", &kinds(&steps).join(", ")));
    };
    if own_rule != patterns.is_empty() {
        let expected = if own_rule { "false after a Split" } else { "true where nothing else cuts" };
        return Err(bad(root, "pre_tokenizer: ByteLevel.use_regex", expected, &own_rule.to_string()));
    }
    match name(&patterns, digits, ignore_merges, glm) {
        Some(name) => Ok(ByteLevel { name, nfc }),
        None => Err(bad(
            root,
            "pre_tokenizer: Split.pattern",
            "rules that GGUF has a name for",
            &patterns.join("  "),
        )),
    }
}

/// True if a split cuts before and after each match and loses nothing.
fn split(step: &JsonValue) -> bool {
    let invert = step["invert"] == true;
    match step["behavior"].as_str() {
        Some("Isolated") => !invert,
        // What the pattern does not match is removed: the published patterns match everything.
        Some("Removed") => invert,
        _ => false,
    }
}

/// The name of the rules by which text is cut, from what only their patterns say.
fn name(patterns: &[&str], digits: bool, ignore_merges: bool, glm: bool) -> Option<&'static str> {
    let has = |text: &str| patterns.iter().any(|p| p.contains(text));
    let cased = has(r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}");
    let by_three = has(r"\p{N}{1,3}");
    Some(if patterns.is_empty() {
        if digits { "smollm" } else { "gpt-2" }
    } else if has(r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*") && by_three {
        "deepseek-v3"
    } else if has(r"\s?[A-Za-zµ") {
        "deepseek-llm"
    } else if has(r"\s?\p{L}+") && has(r"\s?\p{P}+") {
        "deepseek-coder"
    } else if cased {
        if by_three { "gpt-4o" } else { "tekken" }
    } else if has(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*") {
        // The same rules: the one that knows GLM's mask token is GLM's, which adds no BOS.
        match (glm, ignore_merges) {
            (true, _) => "glm4",
            (_, true) => "llama-bpe",
            _ => "dbrx",
        }
    } else if has(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*") {
        "qwen2"
    } else if has(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*") {
        "qwen35"
    } else {
        return None;
    })
}

/// Reads where a SentencePiece vocabulary has a space put before text: by a normalizer, or by a pre-tokenizer.
pub fn sentence_piece(root: &Json) -> Result<Prefix> {
    let (mut prefix, mut spaces) = (Prefix::Never, false);
    for step in steps(root.get("normalizer"), "normalizers") {
        match (kind(step), &step["prepend"], &step["pattern"]["String"], &step["content"]) {
            ("Prepend", JsonValue::String(p), ..) if p == "▁" => prefix = Prefix::Always,
            ("Replace", _, JsonValue::String(a), JsonValue::String(b)) if a == " " && b == "▁" => {
                spaces = true
            }
            _ => {
                let expected = "Prepend of ▁ and Replace of a space by ▁, as GGUF has no other";
                return Err(bad(root, "normalizer", expected, &step.to_string()));
            }
        }
    }
    for step in steps(root.get("pre_tokenizer"), "pretokenizers") {
        if kind(step) != "Metaspace" || step["replacement"] != "▁" {
            let expected = "none, or Metaspace with ▁, beside byte_fallback";
            return Err(bad(root, "pre_tokenizer", expected, &step.to_string()));
        }
        spaces = true;
        // Files from before 0.15 say it with a bool.
        match step["prepend_scheme"].as_str() {
            Some("always") => prefix = Prefix::Metaspace("always"),
            Some("first") => prefix = Prefix::Metaspace("first"),
            None if step["add_prefix_space"] != false => prefix = Prefix::Metaspace("always"),
            _ => {}
        }
    }
    if !spaces {
        let expected = "a normalizer or a pre-tokenizer that spells spaces ▁";
        return Err(bad(root, "pre_tokenizer", expected, "none"));
    }
    Ok(prefix)
}

fn bad(root: &Json, field: &str, expected: &str, found: &str) -> Error {
    Error::bad(root.path, field, expected, if found.is_empty() { "nothing" } else { found })
}

fn kind(step: &JsonValue) -> &str {
    step["type"].as_str().unwrap_or("a step without a type")
}

fn kinds<'v>(steps: &[&'v JsonValue]) -> Vec<&'v str> {
    steps.iter().map(|s| kind(s)).collect()
}

/// The steps of a part, out of their sequences, which hold them under `inner`.
fn steps<'v>(part: Option<&'v JsonValue>, inner: &str) -> Vec<&'v JsonValue> {
    match part {
        None => Vec::new(),
        Some(part) => match part.get(inner).and_then(JsonValue::as_array) {
            Some(list) => list.iter().flat_map(|s| steps(Some(s), inner)).collect(),
            None => vec![part],
        },
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
