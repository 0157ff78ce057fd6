//! A tokenizer from GGUF metadata (`tokenizer.ggml.*`).
//!
//! Fields and defaults: the GGUF specification (ggml-org/ggml, docs/gguf.md) and, where it is silent, llama.cpp's
//! `llama-vocab.cpp`, which is what files in the wild were tested against. What neither has a key for stands under
//! `tegu.`, where `tegu pack` writes it: [`NORMALIZER`], [`METASPACE`].

use crate::format::gguf::{Meta, StrArray};
use crate::text::pieces::{Pieces, Spelling, TokenKind};
use crate::text::pretok::PreTok;
use crate::text::spm::{SpacePrefix, Spm};
use crate::text::tokenizer::{Added, Merger, SpecialIds, Tokenizer, check_id, end_ids};
use crate::units::{Error, Result, TokenId};
use std::collections::HashMap;
use std::path::PathBuf;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::unicode::NFC;

/// string, "NFC": text is brought into Unicode's composed form before it is cut.
pub const NORMALIZER: &str = "tegu.tokenizer.normalizer";
/// string, "first" or "always": the space of `add_space_prefix` is put as Hugging Face's Metaspace does: not before a text
/// that begins with one, and with "first" only at the very start, not after added tokens. Only for llama.
pub const METASPACE: &str = "tegu.tokenizer.metaspace";

/// The tokenizer fields of a GGUF file as plain data; keys are `tokenizer.ggml.` + the GGUF name given.
#[derive(Debug, Clone, Default)]
pub struct GgufVocab {
    /// The file, for messages.
    pub file: PathBuf,
    /// `model`: "gpt2" (byte-level BPE) or "llama" (SentencePiece).
    pub model: String,
    /// `pre`: the pre-tokenizer's name; none means "default". Only for gpt2.
    pub pre: Option<String>,
    /// `tokens`, in id order.
    pub tokens: Vec<String>,
    /// `scores`, one a token. Only for llama.
    pub scores: Option<Vec<f32>>,
    /// `token_type`, one a token; see [`TokenKind::from_gguf`].
    pub token_types: Option<Vec<i32>>,
    /// `merges`: "left right", best first. Only for gpt2.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos_id: Option<u64>,
    /// `eos_token_id`.
    pub eos_id: Option<u64>,
    /// `eot_token_id`: ends a turn.
    pub eot_id: Option<u64>,
    /// `eom_token_id`: ends a message of several.
    pub eom_id: Option<u64>,
    /// `unknown_token_id`.
    pub unk_id: Option<u64>,
    /// `padding_token_id`.
    pub pad_id: Option<u64>,
    /// `add_bos_token`; without it, the model kind decides.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`; true without it. Only for llama.
    pub add_space_prefix: Option<bool>,
    /// [`METASPACE`].
    pub metaspace: Option<String>,
    /// [`NORMALIZER`].
    pub normalizer: Option<String>,
}

impl GgufVocab {
    /// Takes the fields out of a file's metadata.
    pub fn from_meta(meta: &Meta) -> Result<Self> {
        let id = |name: &str| Ok(meta.opt_u32(&key_of(name))?.map(u64::from));
        let strings = |a: &StrArray| a.iter().map(str::to_owned).collect::<Vec<_>>();
        let ints = meta.opt_ints(&key_of("token_type"))?;
        Ok(Self {
            file: meta.path().to_owned(),
            model: meta.str(&key_of("model"))?.to_owned(),
            pre: meta.opt_str(&key_of("pre"))?.map(str::to_owned),
            tokens: strings(meta.strs(&key_of("tokens"))?),
            scores: meta.opt_floats(&key_of("scores"))?,
            // An integer past i32 is no kind either way.
            token_types: ints.map(|v| v.into_iter().map(|t| i32::try_from(t).unwrap_or(-1)).collect()),
            merges: meta.opt_strs(&key_of("merges"))?.map(strings).unwrap_or_default(),
            bos_id: id("bos_token_id")?,
            eos_id: id("eos_token_id")?,
            eot_id: id("eot_token_id")?,
            eom_id: id("eom_token_id")?,
            unk_id: id("unknown_token_id")?,
            pad_id: id("padding_token_id")?,
            add_bos: meta.opt_bool(&key_of("add_bos_token"))?,
            add_eos: meta.opt_bool(&key_of("add_eos_token"))?,
            add_space_prefix: meta.opt_bool(&key_of("add_space_prefix"))?,
            metaspace: meta.opt_str(METASPACE)?.map(str::to_owned),
            normalizer: meta.opt_str(NORMALIZER)?.map(str::to_owned),
        })
    }
}

impl Tokenizer {
    /// Builds the tokenizer from a GGUF file's metadata.
    pub fn from_gguf_meta(meta: &Meta) -> Result<Self> {
        Self::from_gguf_vocab(GgufVocab::from_meta(meta)?)
    }

    /// Builds the tokenizer that a GGUF file describes. Everything in `v` is checked: lengths against each other, ids
    /// against the vocabulary, merges against the tokens.
    pub fn from_gguf_vocab(v: GgufVocab) -> Result<Self> {
        let (spelling, pre) = match v.model.as_str() {
            "gpt2" => {
                (Spelling::ByteLevel, Some(PreTok::find(&v.file, v.pre.as_deref().unwrap_or("default"))?))
            }
            "llama" => (Spelling::SentencePiece, None),
            other => {
                return Err(Error::bad(&v.file, "tokenizer.ggml.model", "gpt2 or llama", other));
            }
        };
        let kinds = kinds(&v)?;
        let ids = index(&v)?;
        let pieces = Pieces::build(
            &v.file,
            spelling,
            v.tokens.iter().zip(&kinds).map(|(t, k)| Some((t.as_str(), *k))),
        )?;
        let special = special_ids(&v, pre.is_none())?;
        let added = added(&v, &kinds)?;
        let named = [("eos_token_id", v.eos_id), ("eot_token_id", v.eot_id), ("eom_token_id", v.eom_id)];
        let mut ends: Vec<TokenId> = special.eos.into_iter().collect();
        for (key, id) in named {
            ends.extend(id.map(|id| check_id(&v.file, &key_of(key), id, v.tokens.len())).transpose()?);
        }
        let ends = end_ids(ends.into_iter(), &added, &pieces);

        let add_bos = v.add_bos.unwrap_or(pre.is_none_or(|p| p.add_bos));
        let space_prefix = pre.is_none() && v.add_space_prefix.unwrap_or(true);
        let prefix = match v.metaspace.as_deref() {
            _ if !space_prefix => SpacePrefix::Never,
            None => SpacePrefix::Always,
            Some(scheme @ ("first" | "always")) => SpacePrefix::Metaspace { first: scheme == "first" },
            Some(other) => return Err(Error::bad(&v.file, METASPACE, "first or always", other)),
        };
        let normalizer = match v.normalizer.as_deref() {
            None => None,
            Some("NFC") => Some(NFC.into()),
            Some(other) => return Err(Error::bad(&v.file, NORMALIZER, "NFC", other)),
        };
        let merger = match pre {
            Some(pre) => ranked(&v, &ids, &kinds, pre)?,
            None => {
                let scores = scores(&v)?;
                Merger::Scored(Box::new(Spm::new(&v.file, &v.tokens, &kinds, scores, special.unk, prefix)?))
            }
        };
        Ok(Self {
            kind: match pre {
                Some(pre) => {
                    format!("byte-level BPE, pre-tokenizer {}", v.pre.as_deref().unwrap_or(pre.names[0]))
                }
                None => "SentencePiece BPE".to_owned(),
            },
            added,
            normalizer,
            merger,
            pieces,
            special,
            ends,
            prefix: special.bos.filter(|_| add_bos).into_iter().collect(),
            suffix: special.eos.filter(|_| v.add_eos.unwrap_or(false)).into_iter().collect(),
            strips_first_space: space_prefix,
        })
    }
}

fn key_of(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// The kind of each token; an empty text is an unused row whatever its type says.
fn kinds(v: &GgufVocab) -> Result<Vec<TokenKind>> {
    let n = v.tokens.len();
    let types = match &v.token_types {
        Some(types) if types.len() != n => {
            let want = format!("{n} entries, one a token");
            return Err(Error::bad(&v.file, key_of("token_type"), want, types.len()));
        }
        Some(types) => types.as_slice(),
        None => &[],
    };
    let mut kinds = Vec::with_capacity(n);
    for (i, text) in v.tokens.iter().enumerate() {
        let t = types.get(i).copied().unwrap_or(1);
        let kind = TokenKind::from_gguf(t)
            .ok_or_else(|| Error::bad(&v.file, format!("{}[{i}]", key_of("token_type")), "0 to 6", t))?;
        kinds.push(if text.is_empty() { TokenKind::Unused } else { kind });
    }
    Ok(kinds)
}

/// The ids with a role. SentencePiece files may leave out its fixed ids: unknown 0, BOS 1, EOS 2.
fn special_ids(v: &GgufVocab, sentencepiece: bool) -> Result<SpecialIds> {
    let n = v.tokens.len();
    let get = |key: &str, id: Option<u64>, default: u64| match id {
        Some(id) => check_id(&v.file, &key_of(key), id, n).map(Some),
        None => Ok((sentencepiece && default < n as u64).then_some(default as TokenId)),
    };
    Ok(SpecialIds {
        bos: get("bos_token_id", v.bos_id, 1)?,
        eos: get("eos_token_id", v.eos_id, 2)?,
        unk: get("unknown_token_id", v.unk_id, 0)?,
        pad: get("padding_token_id", v.pad_id, u64::MAX)?,
    })
}

/// Control and user-defined tokens, to be found in text before it is cut.
fn added(v: &GgufVocab, kinds: &[TokenKind]) -> Result<Added> {
    let tokens = v.tokens.iter().zip(kinds).enumerate().filter_map(|(id, (text, kind))| {
        let special = match kind {
            TokenKind::Control => true,
            TokenKind::UserDefined => false,
            _ => return None,
        };
        Some((AddedToken::from(text.clone(), special).normalized(false), id as TokenId))
    });
    Added::new(&v.file, tokens.collect(), None)
}

fn ranked(v: &GgufVocab, ids: &HashMap<&str, usize>, kinds: &[TokenKind], pre: &PreTok) -> Result<Merger> {
    let mut vocab = Vocab::default();
    for (&text, &id) in ids {
        // Left out of the model so that text alone never becomes a control token.
        if kinds[id] != TokenKind::Control {
            vocab.insert(text.to_owned(), id as TokenId);
        }
    }
    let merges = merges(v, ids, kinds)?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|e| Error::bad(&v.file, key_of("merges"), "merges of tokens", e))?;
    Ok(Merger::Ranked { pre: Some(pre.build()), bpe: Box::new(bpe) })
}

/// Ids by text; two tokens of one text are an error, since encoding could never choose between them.
fn index(v: &GgufVocab) -> Result<HashMap<&str, usize>> {
    let mut ids: HashMap<&str, usize> = HashMap::with_capacity(v.tokens.len());
    for (id, text) in v.tokens.iter().enumerate().filter(|t| !t.1.is_empty()) {
        if let Some(first) = ids.insert(text, id) {
            let found = format!("{text:?} again (first at {first})");
            return Err(Error::bad(
                &v.file,
                format!("{}[{id}]", key_of("tokens")),
                "a token of its own",
                found,
            ));
        }
    }
    Ok(ids)
}

/// The merges as pairs, each checked: two parts, both tokens, and so is what they make.
fn merges(v: &GgufVocab, ids: &HashMap<&str, usize>, kinds: &[TokenKind]) -> Result<Merges> {
    let mut out = Merges::with_capacity(v.merges.len());
    let mut joined = String::new();
    for (i, merge) in v.merges.iter().enumerate() {
        let bad = |want: &str, found: &str| {
            Error::bad(&v.file, format!("{}[{i}]", key_of("merges")), want, format!("{found:?}"))
        };
        // The alphabet has no space, so the only one is the separator; a part may not be empty.
        let (a, b) = merge.split_once(' ').ok_or_else(|| bad("two tokens and a space between", merge))?;
        joined.clear();
        joined.push_str(a);
        joined.push_str(b);
        let mut is_text = true;
        for part in [a, b, joined.as_str()] {
            match ids.get(part) {
                Some(&id) => is_text &= kinds[id] != TokenKind::Control,
                None => {
                    return Err(bad(
                        "a merge of tokens into a token",
                        &format!("{merge}: {part} is no token"),
                    ));
                }
            }
        }
        // Control tokens are not in the model, so a merge with one cannot be either.
        if is_text {
            out.push((a.to_owned(), b.to_owned()));
        }
    }
    Ok(out)
}

fn scores(v: &GgufVocab) -> Result<Vec<f32>> {
    let n = v.tokens.len();
    let want = format!("{n} entries, one a token");
    let scores = v.scores.clone().ok_or_else(|| Error::bad(&v.file, key_of("scores"), &want, "none"))?;
    if scores.len() != n {
        return Err(Error::bad(&v.file, key_of("scores"), want, scores.len()));
    }
    if let Some(i) = scores.iter().position(|s| s.is_nan()) {
        return Err(Error::bad(&v.file, format!("{}[{i}]", key_of("scores")), "a number", "NaN"));
    }
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bpe() -> GgufVocab {
        let tokens = ["a", "b", "Ġ", "ab", "Ġab", "<|im_end|>", "<think>", ""];
        GgufVocab {
            file: "m.gguf".into(),
            model: "gpt2".into(),
            pre: Some("gpt-2".into()),
            tokens: tokens.map(String::from).to_vec(),
            token_types: Some(vec![1, 1, 1, 1, 1, 3, 4, 5]),
            merges: vec!["a b".into(), "Ġ ab".into()],
            bos_id: Some(0),
            eos_id: Some(1),
            ..GgufVocab::default()
        }
    }

    fn spm() -> GgufVocab {
        let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁ab", "ab"];
        GgufVocab {
            file: "m.gguf".into(),
            model: "llama".into(),
            tokens: tokens.map(String::from).to_vec(),
            scores: Some(vec![0.0, 0.0, 0.0, -9.0, -8.0, -8.0, -1.0, -2.0, -3.0]),
            token_types: Some(vec![2, 3, 3, 1, 1, 1, 1, 1, 1]),
            ..GgufVocab::default()
        }
    }

    #[test]
    fn bpe_from_metadata() {
        let t = Tokenizer::from_gguf_vocab(bpe()).unwrap();
        assert_eq!(
            t.encode("ab ab<think><|im_end|>", true, true).unwrap(),
            [3, 4, 6, 5],
            "gpt-2 adds no BOS"
        );
        assert_eq!(t.end_ids(), [1, 5], "EOS and the known end token");
        let t = Tokenizer::from_gguf_vocab(GgufVocab { add_bos: Some(true), add_eos: Some(true), ..bpe() })
            .unwrap();
        assert_eq!(t.encode("ab", true, true).unwrap(), [0, 3, 1]);
        assert_eq!(t.encode("ab", true, false).unwrap(), [3]);
        assert!(t.adds_bos());
    }

    #[test]
    fn sequences_spell_a_text_across_token_borders() {
        let t = Tokenizer::from_gguf_vocab(bpe()).unwrap();
        assert_eq!(t.sequences_with("b").unwrap(), [vec![1], vec![3], vec![4]]);
        assert_eq!(t.sequences_with("ba").unwrap(), [vec![1, 0], vec![3, 0], vec![4, 0]]);
        assert!(t.sequences_with("").unwrap().is_empty());
        let t = Tokenizer::from_gguf_vocab(spm()).unwrap();
        assert_eq!(t.sequences_with("ab").unwrap(), [vec![4, 5], vec![6, 5], vec![7], vec![8]]);
    }

    #[test]
    fn text_alone_never_becomes_a_control_token() {
        // Even where the merges and the whole-piece rule of llama-bpe would make one.
        let mut v = bpe();
        v.pre = Some("llama-bpe".into());
        v.token_types.as_mut().unwrap()[3] = 3;
        let t = Tokenizer::from_gguf_vocab(v).unwrap();
        assert_eq!(t.encode("ab", false, false).unwrap(), [0, 1]);
        assert_eq!(t.encode("ab", true, false).unwrap(), [3]);
    }

    #[test]
    fn sentencepiece_from_metadata() {
        let t = Tokenizer::from_gguf_vocab(spm()).unwrap();
        assert_eq!(t.encode("ab", false, true).unwrap(), [1, 7], "BOS, then a space put before the text");
        assert_eq!(t.encode("ab</s>a", true, false).unwrap(), [7, 2, 6]);
        assert_eq!(
            t.encode("a</s>", false, false).unwrap(),
            [6, 0, 0, 0, 0],
            "unknown, not the control token"
        );
        assert_eq!(t.decode(&[1, 7, 6], true), "ab a");
        assert_eq!(t.decode(&[1, 7, 6], false), "<s> ab a");
        assert_eq!((t.special().bos, t.end_ids()), (Some(1), &[2][..]));
        let t = Tokenizer::from_gguf_vocab(GgufVocab { add_space_prefix: Some(false), ..spm() }).unwrap();
        assert_eq!(t.encode("ab", false, false).unwrap(), [8]);
        assert_eq!(t.decode(&[7], false), " ab");
    }

    #[test]
    fn what_is_wrong_is_named() {
        type Edit = fn(&mut GgufVocab);
        let table: [(&str, &str, Edit); 14] = [
            ("model", "tokenizer.ggml.model: expected gpt2 or llama, found bert", |v| {
                v.model = "bert".into()
            }),
            ("pre", "tokenizer.ggml.pre: expected a known", |v| v.pre = Some("x".into())),
            ("no tokens", "tokens: expected 1 to", |v| {
                *v = GgufVocab { model: "gpt2".into(), file: v.file.clone(), ..GgufVocab::default() }
            }),
            ("duplicate", "tokens[1]: expected a token of its own", |v| v.tokens[1] = "a".into()),
            ("types", "token_type: expected 8 entries", |v| v.token_types = Some(vec![1; 3])),
            ("type", "token_type[2]: expected 0 to 6, found 9", |v| v.token_types.as_mut().unwrap()[2] = 9),
            ("bos", "bos_token_id: expected a token id below 8, found 8", |v| v.bos_id = Some(8)),
            ("eot", "eot_token_id: expected a token id below 8, found 4294967295", |v| {
                v.eot_id = Some(0xFFFF_FFFF)
            }),
            ("merge", "merges[0]", |v| v.merges[0] = "ab".into()),
            ("merge part", "\\\"z\\\" is no token|z is no token", |v| v.merges[0] = "a z".into()),
            ("merge result", "merges[0]", |v| v.merges[0] = "b a".into()),
            ("scores", "scores: expected 9 entries, one a token, found none", |v| {
                *v = GgufVocab { scores: None, ..spm() }
            }),
            ("scores length", "scores: expected 9 entries, one a token, found 2", |v| {
                *v = GgufVocab { scores: Some(vec![0.0; 2]), ..spm() }
            }),
            ("NaN", "scores[4]: expected a number", |v| {
                *v = spm();
                v.scores.as_mut().unwrap()[4] = f32::NAN;
            }),
        ];
        for (name, want, edit) in table {
            let mut v = bpe();
            edit(&mut v);
            let e = Tokenizer::from_gguf_vocab(v).expect_err(name).to_string();
            assert!(e.starts_with("m.gguf: ") && want.split('|').any(|w| e.contains(w)), "{name}: {e}");
        }
    }
}
