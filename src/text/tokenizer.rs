//! The tokenizer: one type for both kinds of file.

use crate::text::pieces::{Pieces, TokenKind};
use crate::text::spm::Spm;
use crate::text::stream::Detokenizer;
use crate::units::{Error, Result, TokenId};
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper,
};

/// The ids with a role. Every one is inside the vocabulary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begins a text.
    pub bos: Option<TokenId>,
    /// Ends a text. [`Tokenizer::end_ids`] has all that end an answer.
    pub eos: Option<TokenId>,
    /// Stands for what cannot be spelled.
    pub unk: Option<TokenId>,
    /// Fills unused places of a batch.
    pub pad: Option<TokenId>,
}

/// Text to ids and back. Immutable and shareable between threads.
#[derive(Debug)]
pub struct Tokenizer {
    pub(super) kind: String,
    pub(super) added: Added,
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) merger: Merger,
    pub(super) pieces: Pieces,
    pub(super) special: SpecialIds,
    /// Sorted ids that end an answer.
    pub(super) ends: Vec<TokenId>,
    /// What [`Tokenizer::encode`] puts before and after a text with `add_special`.
    pub(super) prefix: Vec<TokenId>,
    pub(super) suffix: Vec<TokenId>,
    /// Whether the space at the very start of a decoded text was put there by encoding.
    pub(super) strips_first_space: bool,
}

/// How pieces of text between added tokens become ids.
#[derive(Debug)]
pub(super) enum Merger {
    /// Cut by `pre`, then merged by rank.
    Ranked { pre: Option<PreTokenizerWrapper>, bpe: Box<BPE> },
    /// Merged by score.
    Scored(Box<Spm>),
}

/// Added tokens, found in text before anything else, the longest at a place first.
#[derive(Debug)]
pub(super) struct Added {
    /// Finds control and user-defined tokens.
    with_control: AddedVocabulary,
    /// Finds user-defined tokens only.
    without_control: AddedVocabulary,
}

impl Added {
    /// `tokens`: each added token with its id. `special` ones are the control tokens.
    pub fn new(
        file: &Path,
        tokens: Vec<(AddedToken, TokenId)>,
        normalizer: Option<&NormalizerWrapper>,
    ) -> Result<Self> {
        // The crate numbers added tokens itself unless a model knows them: this one knows just their ids.
        let ids: Vocab = tokens.iter().map(|(t, id)| (t.content.clone(), *id)).collect();
        let fail =
            |e: tokenizers::Error| Error::bad(file, "added tokens", "tokens that can be searched for", e);
        let lookup =
            BPE::builder().vocab_and_merges(ids, Vec::new()).cache_capacity(0).build().map_err(fail)?;
        let mut with_control = AddedVocabulary::new();
        with_control.add_tokens(tokens.into_iter().map(|t| t.0), &lookup, normalizer).map_err(fail)?;
        let mut without_control = with_control.clone();
        without_control.set_encode_special_tokens(true);
        Ok(Self { with_control, without_control })
    }
}

impl Tokenizer {
    /// The ids of `text`.
    ///
    /// `parse_special`: whether `<|im_end|>` in the text is that control token (a rendered chat template) or eight
    /// characters (what a user typed). User-defined added tokens are always found. `add_special`: whether BOS (and
    /// EOS) are added where the model's file asks for them; a rendered chat template already has its own.
    pub fn encode(&self, text: &str, parse_special: bool, add_special: bool) -> Result<Vec<TokenId>> {
        let added = if parse_special { &self.added.with_control } else { &self.added.without_control };
        let split = added.extract_and_normalize(self.normalizer.as_ref(), text);
        let mut ids = if add_special { self.prefix.clone() } else { Vec::new() };
        match &self.merger {
            Merger::Ranked { pre, bpe } => ranked(split, pre.as_ref(), bpe, &mut ids)
                // What can fail here is the cutting rules' step limit on a pathological text.
                .map_err(|e| Error::bad("prompt", "text", "text that the pre-tokenizer can cut", e))?,
            Merger::Scored(spm) => scored(&split, spm, &mut ids),
        }
        if add_special {
            ids.extend(&self.suffix);
        }
        Ok(ids)
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD. `skip_control` leaves control tokens out.
    pub fn decode(&self, ids: &[TokenId], skip_control: bool) -> String {
        let mut out = String::new();
        let mut stream = Detokenizer::new(skip_control);
        for &id in ids {
            stream.push(self, id, &mut out);
        }
        stream.finish(&mut out);
        out
    }

    /// The bytes that `id` stands for, perhaps a part of a character. Ids past the vocabulary (padding rows of an
    /// embedding) have none.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// What `id` is.
    pub fn token_kind(&self, id: TokenId) -> TokenKind {
        self.pieces.kind(id)
    }

    /// The id of an added token, by its text.
    pub fn added_id(&self, text: &str) -> Option<TokenId> {
        self.added.with_control.get_vocab().get(text).copied()
    }

    /// The token sequences that spell `text` across any token borders, each begun as late as can be: a token with all of it
    /// inside, or one that ends with its beginning and then tokens of the rest. Sampling uses them as DRY's breakers.
    pub fn sequences_with(&self, text: &str) -> Result<Vec<Vec<TokenId>>> {
        let needle = text.as_bytes();
        let mut out = Vec::new();
        if needle.is_empty() {
            return Ok(out);
        }
        // The tokens of what is left of `text` after its first `n` bytes; none where that cuts a character.
        let rests: Vec<Option<Vec<TokenId>>> = (0..needle.len())
            .map(|n| text.get(n..).map(|rest| self.encode_inside(rest)).transpose())
            .collect::<Result<_>>()?;
        for id in 0..self.vocab_size() as TokenId {
            let bytes = self.token_bytes(id);
            if self.token_kind(id) == TokenKind::Control || bytes.is_empty() {
                continue;
            }
            if bytes.windows(needle.len()).any(|w| w == needle) {
                out.push(vec![id]);
                continue;
            }
            let overlaps = (1..needle.len()).rev().filter(|n| bytes.ends_with(&needle[..*n]));
            out.extend(overlaps.filter_map(|n| Some([&[id][..], rests[n].as_ref()?].concat())));
        }
        Ok(out)
    }

    /// The ids of text that goes on inside a word: no space is put before it.
    fn encode_inside(&self, text: &str) -> Result<Vec<TokenId>> {
        match &self.merger {
            Merger::Ranked { .. } => self.encode(text, false, false),
            Merger::Scored(spm) => {
                let mut ids = Vec::new();
                spm.encode_part(text, false, &mut ids);
                Ok(ids)
            }
        }
    }

    /// One more than the highest id that has text. The model's own vocabulary may be wider by padding rows.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The ids with a role.
    pub fn special(&self) -> SpecialIds {
        self.special
    }

    /// All ids that end an answer, sorted: EOS, the end of a turn, and known end tokens of chat formats.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.ends
    }

    /// Whether `id` ends an answer.
    pub fn is_end(&self, id: TokenId) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// Whether `encode(.., add_special = true)` puts BOS first.
    pub fn adds_bos(&self) -> bool {
        self.special.bos.is_some() && self.prefix.first() == self.special.bos.as_ref()
    }

    /// In words, for people: "BPE, pre-tokenizer smollm".
    pub fn kind(&self) -> &str {
        &self.kind
    }

    pub(super) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

fn ranked(
    mut split: PreTokenizedString,
    pre: Option<&PreTokenizerWrapper>,
    bpe: &BPE,
    out: &mut Vec<TokenId>,
) -> tokenizers::Result<()> {
    if let Some(pre) = pre {
        pre.pre_tokenize(&mut split)?;
    }
    split.tokenize(|piece| bpe.tokenize(piece.get()))?;
    out.extend(split.into_encoding(None, 0, OffsetType::None)?.get_ids());
    Ok(())
}

fn scored(split: &PreTokenizedString, spm: &Spm, out: &mut Vec<TokenId>) {
    let parts = split.get_splits(OffsetReferential::Original, OffsetType::None);
    for (i, (text, _, added)) in parts.into_iter().enumerate() {
        match added {
            Some(tokens) => out.extend(tokens.iter().map(|t| t.id)),
            None => spm.encode(text, i == 0, out),
        }
    }
}

/// Texts of tokens that end a turn or a document in published chat formats. GGUF names at most three end ids and
/// `generation_config.json` is often older than the chat template, so control tokens with these texts count as well.
const KNOWN_ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "[EOT]",
    "</s>",
];

/// The sorted set of ends: those named by the file and the known ones.
pub(super) fn end_ids(named: impl Iterator<Item = TokenId>, added: &Added, pieces: &Pieces) -> Vec<TokenId> {
    let control = |text: &str| {
        let id = added.with_control.get_vocab().get(text).copied()?;
        (pieces.kind(id) == TokenKind::Control).then_some(id)
    };
    // In the Harmony format `<|end|>` ends one message of several; `<|return|>` and `<|call|>` end the answer.
    let harmony = control("<|return|>").is_some() && control("<|call|>").is_some();
    let known = KNOWN_ENDS.iter().filter(|t| !(harmony && **t == "<|end|>")).filter_map(|t| control(t));
    let mut ends: Vec<TokenId> = named.chain(known).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Checks an id from a file against the vocabulary.
pub(super) fn check_id(file: &Path, field: &str, id: u64, vocab: usize) -> Result<TokenId> {
    if id < vocab as u64 {
        Ok(id as TokenId)
    } else {
        Err(Error::bad(file, field, format!("a token id below {vocab}"), id))
    }
}
