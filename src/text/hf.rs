//! A tokenizer from a Hugging Face folder: `tokenizer.json` and the side files that say which ids begin and end a text.
//!
//! The parts of `tokenizer.json` (normalizer, pre-tokenizer, post-processor) are built by the `tokenizers` crate. The
//! vocabulary, merges and added tokens are read here: each is checked, and in one pass over a file of up to 35 MB.

use crate::text::files::{read_side_file, read_side_json};
use crate::text::pieces::{Pieces, Spelling, TokenKind};
use crate::text::tokenizer::{Added, Merger, SpecialIds, Tokenizer, check_id, end_ids};
use crate::units::{Error, Result, TokenId};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, Encoding, NormalizerWrapper, PostProcessor, PostProcessorWrapper, PreTokenizerWrapper, Token,
};

/// The files of a Hugging Face folder that make its tokenizer, read into memory.
#[derive(Debug, Default)]
pub struct HfFiles {
    /// `tokenizer.json`'s path, for messages, and its bytes.
    pub tokenizer: (PathBuf, Vec<u8>),
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<(PathBuf, Value)>,
    /// `generation_config.json`.
    pub generation_config: Option<(PathBuf, Value)>,
}

impl HfFiles {
    /// Reads them from `dir`. Only `tokenizer.json` must be there.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes =
            read_side_file(&path)?.ok_or_else(|| Error::bad(&path, "file", "a tokenizer.json", "none"))?;
        let side = |name: &str| {
            let path = dir.join(name);
            Ok(read_side_json(&path)?.map(|v| (path, v)))
        };
        Ok(Self {
            tokenizer: (path, bytes),
            tokenizer_config: side("tokenizer_config.json")?,
            generation_config: side("generation_config.json")?,
        })
    }
}

/// `tokenizer.json`, the parts that matter for encoding one text.
#[derive(Deserialize)]
struct Json {
    #[serde(default)]
    added_tokens: Vec<AddedJson>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: ModelJson,
}

#[derive(Deserialize)]
struct AddedJson {
    id: u64,
    #[serde(flatten)]
    token: AddedToken,
}

/// The `model` field. Only byte-pair encoding: every decoder that this program runs has it.
#[derive(Deserialize)]
struct ModelJson {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: VocabJson,
    #[serde(default)]
    merges: Vec<MergeJson>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// `vocab`: token to id. Pairs, not a map, so that a key given twice is seen. `None`: not an object, so not BPE.
#[derive(Default)]
struct VocabJson(Option<Vec<(String, u64)>>);

impl<'de> Deserialize<'de> for VocabJson {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = VocabJson;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map from token to id")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<VocabJson, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(VocabJson(Some(pairs)))
            }
            // Unigram has a list here; it is passed over so that the message can name the model type.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<VocabJson, A::Error> {
                while seq.next_element::<serde::de::IgnoredAny>()?.is_some() {}
                Ok(VocabJson(None))
            }
        }
        d.deserialize_any(V)
    }
}

/// A merge: `"a b"`, or `["a", "b"]` as written since tokenizers 0.20.
struct MergeJson(String, String);

impl<'de> Deserialize<'de> for MergeJson {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = MergeJson;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge: \"left right\" or [\"left\", \"right\"]")
            }
            fn visit_str<E: serde::de::Error>(self, s: &str) -> std::result::Result<MergeJson, E> {
                match s.split_once(' ') {
                    Some((a, b)) if !b.contains(' ') => Ok(MergeJson(a.to_owned(), b.to_owned())),
                    _ => Err(E::custom(format!("merge {s:?} is not two tokens and a space between"))),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<MergeJson, A::Error> {
                let a = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let b = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                match seq.next_element::<serde::de::IgnoredAny>()? {
                    None => Ok(MergeJson(a, b)),
                    Some(_) => Err(A::Error::invalid_length(3, &self)),
                }
            }
        }
        d.deserialize_any(V)
    }
}

impl Tokenizer {
    /// Builds the tokenizer of a Hugging Face folder.
    pub fn from_hf_dir(dir: &Path) -> Result<Self> {
        Self::from_hf_files(&HfFiles::read(dir)?)
    }

    /// Builds the tokenizer from files in memory.
    pub fn from_hf_files(files: &HfFiles) -> Result<Self> {
        let (file, bytes) = &files.tokenizer;
        let file = file.as_path();
        let json: Json =
            serde_json::from_slice(bytes).map_err(|e| Error::bad(file, "JSON", "a tokenizer.json", e))?;
        let vocab = checked_vocab(file, &json.model)?;
        let table = token_table(file, &vocab, &json.added_tokens)?;
        let spelling = spelling(file, &json)?;
        let pieces = Pieces::build(file, spelling, table.iter().copied())?;

        let normalizer: Option<NormalizerWrapper> = part(file, "normalizer", &json.normalizer)?;
        let pre: Option<PreTokenizerWrapper> = part(file, "pre_tokenizer", &json.pre_tokenizer)?;
        let ids_of_added: Vec<_> =
            json.added_tokens.iter().map(|a| (a.token.clone(), a.id as TokenId)).collect();
        let added = Added::new(file, ids_of_added, normalizer.as_ref())?;

        let lookup = |text: &str| {
            let found = json.added_tokens.iter().find(|a| a.token.content == text).map(|a| a.id as TokenId);
            found.or_else(|| vocab.get(text).copied())
        };
        let special = special_ids(files, &json.model, lookup)?;
        let mut ends: Vec<TokenId> = special.eos.into_iter().collect();
        ends.extend(generation_ends(files, pieces.len())?);
        let ends = end_ids(ends.into_iter(), &added, &pieces);
        let (mut prefix, suffix) = around(file, &json.post_processor, pieces.len())?;
        // `add_bos_token` is the later word: transformers rebuilds the post-processor from it.
        if let Some(add_bos) = config_field(files, "add_bos_token").and_then(Value::as_bool) {
            prefix = special.bos.filter(|_| add_bos).into_iter().collect();
        }
        let strips_first_space = strips_first_space(&json.decoder);
        let bpe = bpe(file, vocab, json.model)?;
        Ok(Self {
            kind: "BPE, tokenizer.json".to_owned(),
            added,
            normalizer,
            merger: Merger::Ranked { pre, bpe: Box::new(bpe) },
            pieces,
            special,
            ends,
            prefix,
            suffix,
            strips_first_space,
        })
    }
}

/// One of the crate's own parts, from its JSON.
fn part<T: serde::de::DeserializeOwned>(file: &Path, field: &str, json: &Value) -> Result<Option<T>> {
    Option::<T>::deserialize(json).map_err(|e| Error::bad(file, field, format!("a known {field}"), e))
}

fn checked_vocab(file: &Path, model: &ModelJson) -> Result<Vocab> {
    let kind = model.kind.as_deref().unwrap_or("BPE");
    let (Some(pairs), "BPE") = (&model.vocab.0, kind) else {
        return Err(Error::bad(file, "model.type", "BPE", kind));
    };
    let mut vocab = Vocab::default();
    for (text, id) in pairs {
        let id = check_id(file, &format!("model.vocab[{text:?}]"), *id, crate::limits::VOCAB_MAX)?;
        if vocab.insert(text.clone(), id).is_some() {
            return Err(Error::bad(file, "model.vocab", "each token once", format!("{text:?} again")));
        }
    }
    Ok(vocab)
}

/// Text and kind of every id. Ids may have holes, but not so many that a small file makes a huge table.
fn token_table<'a>(
    file: &Path,
    vocab: &'a Vocab,
    added: &'a [AddedJson],
) -> Result<Vec<Option<(&'a str, TokenKind)>>> {
    let sparse_max = (vocab.len() + added.len()).saturating_mul(2).saturating_add(4096);
    let in_vocab = vocab.values().map(|id| u64::from(*id)).max();
    let highest = added.iter().map(|a| a.id).max().max(in_vocab).unwrap_or(0);
    check_id(file, "token ids", highest, sparse_max.min(crate::limits::VOCAB_MAX))?;

    let mut table: Vec<Option<(&str, TokenKind)>> = vec![None; highest as usize + 1];
    for (text, id) in vocab {
        if let Some((other, _)) = table[*id as usize].replace((text, TokenKind::Normal)) {
            return Err(Error::bad(
                file,
                "model.vocab",
                format!("one token for id {id}"),
                format!("{other:?} and {text:?}"),
            ));
        }
    }
    let mut seen = HashMap::with_capacity(added.len());
    for (i, a) in added.iter().enumerate() {
        let text = a.token.content.as_str();
        let field = format!("added_tokens[{i}]");
        if text.is_empty() || seen.insert(text, a.id).is_some() {
            return Err(Error::bad(file, field, "a text of its own", format!("{text:?}")));
        }
        let kind = if a.token.special { TokenKind::Control } else { TokenKind::UserDefined };
        match table[a.id as usize].replace((text, kind)) {
            Some((other, _)) if other != text => {
                return Err(Error::bad(
                    file,
                    field,
                    format!("one token for id {}", a.id),
                    format!("{other:?} and {text:?}"),
                ));
            }
            _ => {}
        }
    }
    Ok(table)
}

fn bpe(file: &Path, vocab: Vocab, model: ModelJson) -> Result<BPE> {
    for (field, value) in [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(v) = value.as_deref().filter(|v| !v.is_empty()) {
            return Err(Error::bad(file, field, "none", format!("{v:?}")));
        }
    }
    // The crate trusts the merges: one that makes a text longer than any token would overrun its buffer.
    let mut joined = String::new();
    for (i, MergeJson(a, b)) in model.merges.iter().enumerate() {
        joined.clear();
        joined.push_str(a);
        joined.push_str(b);
        if let Some(part) = [a, b, &joined].into_iter().find(|p| !vocab.contains_key(p.as_str())) {
            let found = format!("{a:?} {b:?}: {part:?} is no token");
            return Err(Error::bad(
                file,
                format!("model.merges[{i}]"),
                "a merge of tokens into a token",
                found,
            ));
        }
    }
    let unk = model.unk_token.filter(|u| !u.is_empty());
    if let Some(unk) = unk.as_ref().filter(|u| !vocab.contains_key(u.as_str())) {
        return Err(Error::bad(file, "model.unk_token", "a token of the vocabulary", format!("{unk:?}")));
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab, model.merges.into_iter().map(|m| (m.0, m.1)).collect())
        .fuse_unk(model.fuse_unk)
        .byte_fallback(model.byte_fallback)
        .ignore_merges(model.ignore_merges);
    if let Some(unk) = unk {
        builder = builder.unk_token(unk);
    }
    builder.build().map_err(|e| Error::bad(file, "model", "a byte-pair model", e))
}

/// Whether `json`, or anything it holds, is a part of type `kind`.
fn has_part(json: &Value, kind: &str) -> bool {
    match json {
        Value::Object(map) => {
            map.get("type").and_then(Value::as_str) == Some(kind) || map.values().any(|v| has_part(v, kind))
        }
        Value::Array(list) => list.iter().any(|v| has_part(v, kind)),
        _ => false,
    }
}

/// How tokens spell bytes: as the decoder says, or, without one, the parts that spell them.
fn spelling(file: &Path, json: &Json) -> Result<Spelling> {
    for source in [&json.decoder, &json.pre_tokenizer, &json.normalizer] {
        if has_part(source, "ByteLevel") {
            return Ok(Spelling::ByteLevel);
        }
        if has_part(source, "ByteFallback") || has_part(source, "Metaspace") || has_part(source, "Replace") {
            return Ok(Spelling::SentencePiece);
        }
    }
    let found = json.decoder.get("type").map_or("null".to_owned(), Value::to_string);
    Err(Error::bad(file, "decoder", "ByteLevel, or ByteFallback or Metaspace", found))
}

/// Whether decoding drops one space at the very start: `Strip` with `start`, or `Metaspace` that prepends.
fn strips_first_space(decoder: &Value) -> bool {
    match decoder {
        Value::Object(map) => match map.get("type").and_then(Value::as_str) {
            Some("Strip") => {
                map.get("content").and_then(Value::as_str) == Some(" ")
                    && map.get("start").and_then(Value::as_u64).is_some_and(|n| n > 0)
            }
            Some("Metaspace") => map.get("prepend_scheme").and_then(Value::as_str) != Some("never"),
            _ => map.values().any(strips_first_space),
        },
        Value::Array(list) => list.iter().any(strips_first_space),
        _ => false,
    }
}

fn config_field<'a>(files: &'a HfFiles, name: &str) -> Option<&'a Value> {
    files.tokenizer_config.as_ref()?.1.get(name).filter(|v| !v.is_null())
}

/// A token named in `tokenizer_config.json`: a string, or an object with `content`.
pub(super) fn config_token<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    let v = config.get(name)?;
    v.as_str().or_else(|| v.get("content")?.as_str())
}

fn special_ids(
    files: &HfFiles,
    model: &ModelJson,
    lookup: impl Fn(&str) -> Option<TokenId>,
) -> Result<SpecialIds> {
    let named = |name: &str| files.tokenizer_config.as_ref().and_then(|(_, c)| config_token(c, name));
    let need = |name: &str| match named(name) {
        None => Ok(None),
        Some(text) => lookup(text).map(Some).ok_or_else(|| {
            let file = &files.tokenizer_config.as_ref().expect("it named the token").0;
            Error::bad(file, name, "a token of the vocabulary", format!("{text:?}"))
        }),
    };
    Ok(SpecialIds {
        bos: need("bos_token")?,
        eos: need("eos_token")?,
        // These two may name a token that fine-tuning would add; nothing here depends on them.
        unk: named("unk_token").or(model.unk_token.as_deref()).and_then(&lookup),
        pad: named("pad_token").and_then(&lookup),
    })
}

/// `eos_token_id` of `generation_config.json`: an id or a list of them.
fn generation_ends(files: &HfFiles, vocab: usize) -> Result<Vec<TokenId>> {
    let Some((file, config)) = &files.generation_config else { return Ok(Vec::new()) };
    let ids = match config.get("eos_token_id") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    ids.iter()
        .map(|v| match v.as_u64() {
            Some(id) => check_id(file, "eos_token_id", id, vocab),
            None => Err(Error::bad(file, "eos_token_id", "a token id, or a list of them", v)),
        })
        .collect()
}

/// What the post-processor puts before and after one text.
fn around(file: &Path, json: &Value, vocab: usize) -> Result<(Vec<TokenId>, Vec<TokenId>)> {
    let Some(post) = part::<PostProcessorWrapper>(file, "post_processor", json)? else {
        return Ok((Vec::new(), Vec::new()));
    };
    // A text of one token with an id that no vocabulary has shows where the text goes.
    const TEXT: TokenId = TokenId::MAX;
    let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
    let fail = |e: String| Error::bad(file, "post_processor", "a template of one text", e);
    let ids = post.process(text, None, true).map_err(|e| fail(e.to_string()))?.get_ids().to_vec();
    let at = ids.iter().position(|id| *id == TEXT).ok_or_else(|| fail("one without the text".to_owned()))?;
    let (before, after) = (&ids[..at], &ids[at + 1..]);
    for id in before.iter().chain(after) {
        check_id(file, "post_processor", u64::from(*id), vocab)?;
    }
    Ok((before.to_vec(), after.to_vec()))
}

#[cfg(test)]
#[path = "hf_tests.rs"]
mod tests;
