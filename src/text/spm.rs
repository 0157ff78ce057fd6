//! SentencePiece's BPE: merge the neighbours whose joined text has the best score, until none has one.
//!
//! The vocabulary of Llama 1/2 and kin. There is no merge list: any two neighbours whose concatenation is a token may
//! merge, the highest score first and the leftmost among equals (sentencepiece, `bpe_model.cc`).

use crate::text::pieces::{TokenKind, byte_of};
use crate::units::{Error, Result, TokenId};
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::Path;

/// A score-merging model.
#[derive(Debug)]
pub(super) struct Spm {
    /// Text to id, of those tokens that ordinary text may become.
    ids: HashMap<Box<str>, TokenId>,
    scores: Vec<f32>,
    /// The token of each byte, for text that no token spells.
    byte_ids: [Option<TokenId>; 256],
    unk: Option<TokenId>,
    /// The longest token in bytes: longer joins need no look-up.
    longest_bytes: usize,
    prefix: SpacePrefix,
}

/// Where text is given a leading space, so that a word is spelled the same at the start and in the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    /// Nowhere.
    Never,
    /// At the start and after every added token.
    Always,
    /// As Hugging Face's Metaspace does: not before a text that begins with a space; `first`: only at the very start.
    Metaspace {
        /// Not after added tokens.
        first: bool,
    },
}

/// A piece of text in a doubly linked list of pieces. `len_bytes` 0: merged into its left neighbour.
struct Symbol {
    start: usize,
    len_bytes: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// A merge that may be done: of symbol `left` and its right neighbour, together `len_bytes` long.
struct Bigram {
    score: f32,
    left: usize,
    len_bytes: usize,
}

impl Ord for Bigram {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives the greatest: best score, then leftmost.
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}
impl PartialOrd for Bigram {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Bigram {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Bigram {}

impl Spm {
    /// `tokens`, `kinds` and `scores` have one entry an id.
    pub fn new(
        file: &Path,
        tokens: &[String],
        kinds: &[TokenKind],
        scores: Vec<f32>,
        unk: Option<TokenId>,
        prefix: SpacePrefix,
    ) -> Result<Self> {
        assert!(tokens.len() == kinds.len() && tokens.len() == scores.len());
        let mut out = Self {
            ids: HashMap::with_capacity(tokens.len()),
            scores,
            byte_ids: [None; 256],
            unk,
            longest_bytes: 0,
            prefix,
        };
        for (id, (text, kind)) in tokens.iter().zip(kinds).enumerate() {
            // Control tokens are never made from text, so a prompt cannot smuggle one in as plain letters.
            if matches!(kind, TokenKind::Normal | TokenKind::UserDefined) {
                out.longest_bytes = out.longest_bytes.max(text.len());
                out.ids.insert(text.as_str().into(), id as TokenId);
            }
            if let (TokenKind::Byte, Some(b)) = (kind, byte_of(text)) {
                out.byte_ids[b as usize] = Some(id as TokenId);
            }
        }
        if unk.is_none() && out.byte_ids.contains(&None) {
            return Err(Error::bad(
                file,
                "tokenizer.ggml.tokens",
                "an unknown token or one byte token (<0x00>) for each of the 256 bytes",
                format!("{} byte tokens", out.byte_ids.iter().flatten().count()),
            ));
        }
        Ok(out)
    }

    /// Appends the ids of `text`, a piece of prompt between added tokens; `first`: what the prompt begins with.
    pub fn encode(&self, text: &str, first: bool, out: &mut Vec<TokenId>) {
        let space = match self.prefix {
            SpacePrefix::Never => false,
            SpacePrefix::Always => true,
            SpacePrefix::Metaspace { first: only } => (first || !only) && !text.starts_with([' ', '▁']),
        };
        self.encode_part(text, space, out);
    }

    /// As [`Spm::encode`], with the space before the text or without it.
    pub fn encode_part(&self, text: &str, space_prefix: bool, out: &mut Vec<TokenId>) {
        if text.is_empty() {
            return;
        }
        let mut spelled = String::with_capacity(text.len() + text.len() / 2 + 3);
        if space_prefix {
            spelled.push('▁');
        }
        text.chars().for_each(|c| spelled.push(if c == ' ' { '▁' } else { c }));

        let mut symbols = split_chars(&spelled);
        let mut queue = BinaryHeap::new();
        for left in 0..symbols.len() {
            self.offer(&spelled, &symbols, left, &mut queue);
        }
        while let Some(best) = queue.pop() {
            let Some(right) = symbols[best.left].next else { continue };
            // Stale: one side has merged with something else since this was queued.
            let joined_bytes = symbols[best.left].len_bytes + symbols[right].len_bytes;
            if symbols[best.left].len_bytes == 0 || joined_bytes != best.len_bytes {
                continue;
            }
            symbols[best.left].len_bytes = joined_bytes;
            let after = symbols[right].next;
            symbols[right].len_bytes = 0;
            symbols[best.left].next = after;
            if let Some(after) = after {
                symbols[after].prev = Some(best.left);
            }
            if let Some(before) = symbols[best.left].prev {
                self.offer(&spelled, &symbols, before, &mut queue);
            }
            self.offer(&spelled, &symbols, best.left, &mut queue);
        }
        for s in symbols.iter().filter(|s| s.len_bytes > 0) {
            self.emit(&spelled[s.start..s.start + s.len_bytes], out);
        }
    }

    /// Queues the merge of `left` with its right neighbour where their text is a token.
    fn offer(&self, text: &str, symbols: &[Symbol], left: usize, queue: &mut BinaryHeap<Bigram>) {
        let Some(right) = symbols[left].next else { return };
        let start = symbols[left].start;
        let len_bytes = symbols[left].len_bytes + symbols[right].len_bytes;
        if len_bytes > self.longest_bytes {
            return;
        }
        if let Some(&id) = self.ids.get(&text[start..start + len_bytes]) {
            queue.push(Bigram { score: self.scores[id as usize], left, len_bytes });
        }
    }

    fn emit(&self, piece: &str, out: &mut Vec<TokenId>) {
        if let Some(&id) = self.ids.get(piece) {
            out.push(id);
        } else if piece.bytes().all(|b| self.byte_ids[b as usize].is_some()) {
            out.extend(piece.bytes().filter_map(|b| self.byte_ids[b as usize]));
        } else {
            out.extend(self.unk);
        }
    }
}

fn split_chars(text: &str) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = text
        .char_indices()
        .enumerate()
        .map(|(i, (start, c))| Symbol {
            start,
            len_bytes: c.len_utf8(),
            prev: i.checked_sub(1),
            next: Some(i + 1),
        })
        .collect();
    if let Some(last) = symbols.last_mut() {
        last.next = None;
    }
    symbols
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spm(pieces: &[(&str, f32)], prefix: bool) -> Spm {
        let mut tokens: Vec<String> = pieces.iter().map(|p| p.0.to_owned()).collect();
        let mut scores: Vec<f32> = pieces.iter().map(|p| p.1).collect();
        let mut kinds = vec![TokenKind::Normal; tokens.len()];
        for b in 0..=255u8 {
            tokens.push(format!("<0x{b:02X}>"));
            scores.push(0.0);
            kinds.push(TokenKind::Byte);
        }
        let prefix = if prefix { SpacePrefix::Always } else { SpacePrefix::Never };
        Spm::new(Path::new("t"), &tokens, &kinds, scores, None, prefix).unwrap()
    }

    /// The definition, without a queue: look at all neighbours, merge the best, start again.
    fn naive(m: &Spm, text: &str) -> Vec<TokenId> {
        let spelled =
            format!("{}{}", if m.prefix == SpacePrefix::Always { "▁" } else { "" }, text.replace(' ', "▁"));
        let mut parts: Vec<String> = spelled.chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for i in 0..parts.len().saturating_sub(1) {
                if let Some(&id) = m.ids.get(format!("{}{}", parts[i], parts[i + 1]).as_str()) {
                    let s = m.scores[id as usize];
                    if best.is_none_or(|b| s > b.0) {
                        best = Some((s, i));
                    }
                }
            }
            let Some((_, i)) = best else { break };
            let right = parts.remove(i + 1);
            parts[i].push_str(&right);
        }
        let mut out = Vec::new();
        parts.iter().for_each(|p| m.emit(p, &mut out));
        out
    }

    #[test]
    fn merges_by_score_not_by_length() {
        let m = spm(
            &[("a", 0.0), ("b", 0.0), ("c", 0.0), ("ab", -3.0), ("bc", -1.0), ("abc", -9.0), ("▁", 0.0)],
            false,
        );
        let mut out = Vec::new();
        m.encode("abc", true, &mut out);
        // "bc" first (-1), then "a"+"bc" is a token too.
        assert_eq!(out, [5]);
        out.clear();
        m.encode("ab c", true, &mut out);
        assert_eq!(out, [3, 6, 2]);
        out.clear();
        m.encode("é", true, &mut out);
        assert_eq!(out, [7 + 0xC3, 7 + 0xA9], "no token: its bytes");
    }

    #[test]
    fn equals_the_naive_definition() {
        let m = spm(
            &[
                ("▁", -0.5),
                ("a", 0.0),
                ("b", 0.0),
                ("aa", -2.0),
                ("ab", -2.0),
                ("ba", -1.5),
                ("aab", -4.0),
                ("▁a", -1.0),
                ("▁ab", -3.0),
                ("abab", -2.5),
                ("bb", -2.0),
                ("bba", -2.0),
            ],
            true,
        );
        let mut state = 1u32;
        for len in 1..60 {
            let text: String = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                    ['a', 'b', ' ', 'a', 'é'][(state >> 24) as usize % 5]
                })
                .collect();
            let mut out = Vec::new();
            m.encode(&text, true, &mut out);
            assert_eq!(out, naive(&m, &text), "{text:?}");
        }
    }

    #[test]
    fn a_vocabulary_that_cannot_spell_is_refused() {
        let e = Spm::new(
            Path::new("f"),
            &["a".into()],
            &[TokenKind::Normal],
            vec![0.0],
            None,
            SpacePrefix::Always,
        )
        .unwrap_err();
        assert!(e.to_string().contains("byte token"), "{e}");
    }
}
