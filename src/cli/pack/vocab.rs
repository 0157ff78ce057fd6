//! tokenizer.json to the tokenizer keys of a GGUF.

use super::config::Json;
use super::hparams::Meta;
use super::ids;
use super::rules::{self, Prefix};
use crate::format::gguf::{ScalarArray, StrArray, Value};
use crate::limits;
use crate::text::{METASPACE, NORMALIZER};
use crate::units::{Error, Result};
use crate::weights::{HfMeta, read_side_file};
use serde_json::Value as JsonValue;
use std::collections::HashMap;
use std::path::Path;

/// `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;
const UNKNOWN: i32 = 2;

/// Writes the tokenizer keys and gives those that llama.cpp does not read. A folder without tokenizer.json gets a vocabulary
/// without words, as test models have.
pub fn convert(hf: &HfMeta, vocab_size: usize, meta: &mut Meta) -> Result<Vec<String>> {
    let mut put = |key: &str, value: Value| meta.push((format!("tokenizer.{key}"), value));
    let Some(path) = &hf.tokenizer_json else {
        put("ggml.model", Value::Str("none".into()));
        return Ok(Vec::new());
    };
    let bytes = read_side_file(path, limits::JSON_FILE_MAX)?;
    let root: JsonValue = serde_json::from_slice(&bytes)
        .map_err(|e| Error::bad(path, format_args!("line {}, column {}", e.line(), e.column()), "JSON", e))?;
    let root = Json { path, prefix: "", value: &root };
    let model = root.opt_object("model", "model.")?.ok_or_else(|| root.bad("model", "an object"))?;
    if model.opt_str("type")?.unwrap_or("BPE") != "BPE" {
        return Err(model.bad("type", "BPE"));
    }
    let words = Words::read(&root, &model, vocab_size)?;
    let sentence_piece = model.opt_bool("byte_fallback")?.unwrap_or(false);
    let merges = merges(&model)?;
    // What GGUF has no key for.
    let mut beyond = Meta::new();
    put("ggml.model", Value::Str(if sentence_piece { "llama" } else { "gpt2" }.into()));
    if sentence_piece {
        let prefix = rules::sentence_piece(&root)?;
        put("ggml.pre", Value::Str("default".into()));
        put("ggml.add_space_prefix", Value::Bool(prefix != Prefix::Never));
        if let Prefix::Metaspace(scheme) = prefix {
            beyond.push((METASPACE.to_owned(), Value::Str(scheme.into())));
        }
    } else {
        let ignore_merges = model.opt_bool("ignore_merges")?.unwrap_or(false);
        let rules = rules::byte_level(&root, ignore_merges, words.ids.contains_key("[gMASK]"))?;
        put("ggml.pre", Value::Str(rules.name.into()));
        beyond.extend(rules.nfc.then(|| (NORMALIZER.to_owned(), Value::Str("NFC".into()))));
    }
    if sentence_piece {
        put("ggml.scores", Value::Scalars(ScalarArray::from_f32s(words.scores(&merges))));
    } else {
        put("ggml.merges", Value::Strs(merges.iter().map(|(a, b)| format!("{a} {b}")).collect()));
    }
    special(hf, &root, &words, &mut put)?;
    put("ggml.token_type", Value::Scalars(ScalarArray::from_i32s(words.types(sentence_piece))));
    put("ggml.tokens", Value::Strs(words.tokens));
    if let Some(template) = template(hf)? {
        put("chat_template", Value::Str(template));
    }
    let unread = beyond.iter().map(|(key, _)| key.clone()).collect();
    meta.extend(beyond);
    ids::check(path.parent().unwrap_or(Path::new("")), meta)?;
    Ok(unread)
}

/// The vocabulary by id.
struct Words {
    tokens: StrArray,
    ids: HashMap<String, u32>,
    /// Type of each id that is not an ordinary word.
    special: HashMap<u32, i32>,
}

impl Words {
    fn read(root: &Json, model: &Json, vocab_size: usize) -> Result<Words> {
        let vocab = model.value.get("vocab").and_then(JsonValue::as_object);
        let vocab = vocab.ok_or_else(|| model.bad("vocab", "an object"))?;
        let mut by_id: Vec<Option<String>> = vec![None; vocab_size];
        let mut place = |word: &str, id: Option<u64>| {
            let slot = id.and_then(|id| by_id.get_mut(id as usize));
            let slot = slot.ok_or_else(|| {
                let found = id.map_or("no integer".to_owned(), |id| id.to_string());
                let expected = format!("an id under vocab_size {vocab_size}");
                Error::bad(root.path, format_args!("id of token {word:?}"), expected, found)
            })?;
            *slot = Some(word.to_owned());
            Ok::<u32, Error>(id.expect("it named a slot") as u32)
        };
        for (word, id) in vocab {
            place(word, id.as_u64())?;
        }
        let mut special = HashMap::new();
        for token in root.value.get("added_tokens").and_then(JsonValue::as_array).into_iter().flatten() {
            let word = token.get("content").and_then(JsonValue::as_str);
            let word = word.ok_or_else(|| root.bad("added_tokens", "tokens with a string content"))?;
            let id = place(word, token.get("id").and_then(JsonValue::as_u64))?;
            let control =
                token.get("special").and_then(JsonValue::as_bool) == Some(true) || looks_special(word);
            special.insert(id, if control { CONTROL } else { USER_DEFINED });
        }
        let mut ids = HashMap::with_capacity(vocab_size);
        let mut tokens = StrArray::default();
        for (id, word) in by_id.into_iter().enumerate() {
            match word {
                Some(word) => {
                    tokens.push(&word);
                    ids.insert(word, id as u32);
                }
                // Embeddings are often padded to a round number of rows.
                None => {
                    tokens.push(&format!("[PAD{id}]"));
                    special.insert(id as u32, UNUSED);
                }
            }
        }
        Ok(Words { tokens, ids, special })
    }

    fn types(&self, sentence_piece: bool) -> Vec<i32> {
        let one = |(id, word): (usize, &str)| match self.special.get(&(id as u32)) {
            Some(&CONTROL) if sentence_piece && word == "<unk>" => UNKNOWN,
            Some(ty) => *ty,
            None if sentence_piece && is_byte(word) => BYTE,
            None => NORMAL,
        };
        self.tokens.iter().enumerate().map(one).collect()
    }

    /// SentencePiece merges the neighbours whose union scores highest: the earlier a merge, the higher its result.
    fn scores(&self, merges: &[(String, String)]) -> Vec<f32> {
        let mut scores = vec![0.0; self.tokens.len()];
        let last = -(merges.len() as f32) - 1.0;
        for (id, word) in self.tokens.iter().enumerate() {
            let single = !self.special.contains_key(&(id as u32)) && !is_byte(word);
            scores[id] = if single { last } else { 0.0 };
        }
        for (rank, (a, b)) in merges.iter().enumerate().rev() {
            if let Some(&id) = self.ids.get(&format!("{a}{b}")) {
                scores[id as usize] = -(rank as f32);
            }
        }
        scores
    }
}

/// `<0x0A>`: one byte of a text that no word covers.
fn is_byte(word: &str) -> bool {
    word.len() == 6 && word.starts_with("<0x") && word.ends_with('>')
}

/// Some tokenizers forget to mark their markers.
fn looks_special(word: &str) -> bool {
    word.starts_with("<|") && word.ends_with("|>") || word.starts_with("<｜") && word.ends_with("｜>")
}

/// Merges as pairs; older files write them as one string.
fn merges(model: &Json) -> Result<Vec<(String, String)>> {
    let list = model.value.get("merges").and_then(JsonValue::as_array);
    let list = list.ok_or_else(|| model.bad("merges", "an array"))?;
    // Merges are written with a space between: one inside becomes the byte alphabet's character for it.
    let part = |s: &str| s.replace(' ', "\u{120}");
    let mut out = Vec::with_capacity(list.len());
    for (i, merge) in list.iter().enumerate() {
        let pair = match merge {
            JsonValue::String(s) => s.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
            JsonValue::Array(p) => match p.as_slice() {
                [JsonValue::String(a), JsonValue::String(b)] => Some((part(a), part(b))),
                _ => None,
            },
            _ => None,
        };
        let bad = || Error::bad(model.path, format_args!("model.merges[{i}]"), "two strings", merge);
        out.push(pair.ok_or_else(bad)?);
    }
    Ok(out)
}

/// Ids that begin, end and pad a text.
fn special(hf: &HfMeta, root: &Json, words: &Words, put: &mut impl FnMut(&str, Value)) -> Result<()> {
    let none = JsonValue::Null;
    let folder = root.path.parent().unwrap_or(Path::new(""));
    let side = folder.join("tokenizer_config.json");
    let config = Json { path: &side, prefix: "", value: hf.tokenizer_config.as_ref().unwrap_or(&none) };
    // A token is a string or an object with a content; the tokenizer's words say its id.
    let named = |kind: &str| {
        let token = config.get(&format!("{kind}_token"))?;
        let word = token.as_str().or_else(|| token.get("content")?.as_str())?;
        words.ids.get(word).copied()
    };
    let mut ends = Vec::new();
    for (kind, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        let listed = ids(&hf.config_path, &hf.config, &format!("{kind}_token_id"), words.tokens.len())?;
        if let Some(id) = named(kind).or(listed.first().copied()) {
            put(&format!("ggml.{key}_token_id"), Value::U32(id));
            ends.extend((kind == "eos").then_some(id));
        }
    }
    // Generation may end at more ids than the one that ends a text.
    if let Some(generation) = &hf.generation_config {
        let path = folder.join("generation_config.json");
        ends.extend(ids(&path, generation, "eos_token_id", words.tokens.len())?);
    }
    let mut seen = Vec::new();
    ends.retain(|id| !seen.contains(id) && (seen.push(*id), true).1);
    for (id, key) in ends.iter().skip(1).zip(["eot", "eom"]) {
        put(&format!("ggml.{key}_token_id"), Value::U32(*id));
    }
    let begins = match config.opt_bool("add_bos_token")? {
        Some(add) => add,
        None => template_begins_with(root, named("bos").and_then(|id| words.tokens.get(id as usize))),
    };
    put("ggml.add_bos_token", Value::Bool(begins));
    put("ggml.add_eos_token", Value::Bool(config.opt_bool("add_eos_token")?.unwrap_or(false)));
    Ok(())
}

/// One id or a list of them under `key`.
fn ids(path: &Path, object: &JsonValue, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
    let value = object.get(key).unwrap_or(&JsonValue::Null);
    let list = match value {
        JsonValue::Null => return Ok(Vec::new()),
        JsonValue::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let id = |v: &JsonValue| v.as_u64().filter(|&id| id < vocab_size as u64).map(|id| id as u32);
    let all: Option<Vec<u32>> = list.iter().map(id).collect();
    all.ok_or_else(|| Error::bad(path, key, format_args!("ids under {vocab_size}"), value))
}

/// True if the post-processor puts the BOS token before a text.
fn template_begins_with(root: &Json, bos: Option<&str>) -> bool {
    let mut processors = Vec::new();
    if let Some(post) = root.get("post_processor") {
        match post.get("processors").and_then(JsonValue::as_array) {
            Some(list) => processors.extend(list),
            None => processors.push(post),
        }
    }
    let first = processors.iter().find_map(|p| p["single"][0]["SpecialToken"]["id"].as_str());
    first.is_some() && first == bos
}

/// The chat template: the one in tokenizer_config.json (its default, if there are several), else the file's.
fn template(hf: &HfMeta) -> Result<Option<String>> {
    let inner = hf.tokenizer_config.as_ref().and_then(|c| c.get("chat_template"));
    let text = match inner {
        Some(JsonValue::String(s)) => Some(s.clone()),
        Some(JsonValue::Array(list)) => {
            let default = list.iter().find(|t| t["name"] == "default");
            default.and_then(|t| t["template"].as_str()).map(str::to_owned)
        }
        _ => None,
    };
    Ok(text.or_else(|| hf.chat_template.clone()))
}
