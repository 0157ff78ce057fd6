//! The bytes and the kind of every token id, as one table: what decoding needs and nothing else.

use crate::limits::VOCAB_MAX;
use crate::units::{Error, Result, TokenId};
use std::path::Path;
use std::sync::LazyLock;

/// What a token is. The numbers are GGUF's `tokenizer.ggml.token_type` (and SentencePiece's `ModelProto.Type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum TokenKind {
    /// Part of ordinary text.
    Normal = 1,
    /// Stands for what the vocabulary cannot spell.
    Unknown = 2,
    /// Steers the model and is no text: `<s>`, `<|im_end|>`. Parsed from a prompt only when asked.
    Control = 3,
    /// An added token that is text: always matched whole.
    UserDefined = 4,
    /// A row that no text maps to.
    Unused = 5,
    /// One raw byte, spelled `<0x0A>`.
    Byte = 6,
}

impl TokenKind {
    /// The kind for a GGUF `token_type`; 0 ("undefined" in llama.cpp) is taken as normal.
    pub fn from_gguf(n: i32) -> Option<Self> {
        Some(match n {
            0 | 1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// How a vocabulary spells bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2: every byte is one printable character.
    ByteLevel,
    /// SentencePiece: `▁` is a space, `<0x0A>` a byte, the rest is itself.
    SentencePiece,
}

/// Bytes and kind of each id, packed: real vocabularies have 100,000s of tokens of a few bytes.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
}

impl Pieces {
    /// Builds the table from token texts in id order; a `None` is an id that no text has.
    pub fn build<'a>(
        file: &Path,
        spelling: Spelling,
        tokens: impl Iterator<Item = Option<(&'a str, TokenKind)>>,
    ) -> Result<Self> {
        let mut out = Self::default();
        for token in tokens {
            match token {
                Some((text, kind)) => out.push(spelling, text, kind),
                None => out.kinds.push(TokenKind::Unused),
            }
            let end = u32::try_from(out.bytes.len())
                .map_err(|_| Error::bad(file, "tokens", "under 4 GiB of token text", "more"))?;
            out.ends.push(end);
        }
        let n = out.ends.len();
        if n == 0 || n > VOCAB_MAX {
            return Err(Error::bad(file, "tokens", format!("1 to {VOCAB_MAX} tokens"), n));
        }
        Ok(out)
    }

    fn push(&mut self, spelling: Spelling, text: &str, kind: TokenKind) {
        self.kinds.push(kind);
        match (spelling, kind) {
            // Added tokens are written as they are read, whatever the spelling of the rest.
            (_, TokenKind::Control | TokenKind::UserDefined) => self.bytes.extend(text.as_bytes()),
            (Spelling::ByteLevel, _) => push_byte_level(&mut self.bytes, text),
            (Spelling::SentencePiece, _) => match byte_of(text) {
                Some(b) => self.bytes.push(b),
                None => self.bytes.extend(text.replace('▁', " ").as_bytes()),
            },
        }
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of `id`; nothing for an id past the table (padding rows of an embedding have no text).
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        let i = id as usize;
        let Some(&end) = self.ends.get(i) else { return &[] };
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// The kind of `id`; unused past the table.
    pub fn kind(&self, id: TokenId) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }
}

/// The byte that `<0x0A>` names.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// GPT-2's byte alphabet: printable Latin-1 bytes are themselves, the other 68 take U+0100 upwards in byte order
/// (`bytes_to_unicode` in openai/gpt-2, encoder.py).
pub(super) fn byte_to_char() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|b| match b as u8 {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => b as u8 as char,
        _ => {
            next += 1;
            char::from_u32(next - 1).expect("68 code points from U+0100 are characters")
        }
    })
}

/// The inverse of [`byte_to_char`]: no letter of the alphabet lies at or past U+0144.
static CHAR_TO_BYTE: LazyLock<[Option<u8>; 0x144]> = LazyLock::new(|| {
    let mut table = [None; 0x144];
    for (b, c) in byte_to_char().into_iter().enumerate() {
        table[c as usize] = Some(b as u8);
    }
    table
});

/// Appends the bytes that a byte-level token spells. A token with any other character stands for itself, as
/// in the `tokenizers` crate's ByteLevel decoder.
fn push_byte_level(out: &mut Vec<u8>, text: &str) {
    let start = out.len();
    for c in text.chars() {
        match CHAR_TO_BYTE.get(c as usize).copied().flatten() {
            Some(b) => out.push(b),
            None => {
                out.truncate(start);
                out.extend(text.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_gpt2s() {
        let t = byte_to_char();
        for (b, c) in [
            (b' ', 'Ġ'),
            (b'\n', 'Ċ'),
            (b'\t', 'ĉ'),
            (0, 'Ā'),
            (b'a', 'a'),
            (0xAD, 'Ń'),
            (0xC3, 'Ã'),
            (0x7F, 'ġ'),
        ] {
            assert_eq!(t[b as usize], c, "byte {b:#x}");
        }
        for b in 0..=255u8 {
            let mut out = Vec::new();
            push_byte_level(&mut out, &t[b as usize].to_string());
            assert_eq!(out, [b]);
        }
    }

    #[test]
    fn pieces_spell_bytes() {
        let file = Path::new("t");
        let k = TokenKind::Normal;
        let p = Pieces::build(
            file,
            Spelling::ByteLevel,
            [Some(("ĠhÃ©", k)), None, Some(("中", k)), Some(("Ġ", TokenKind::UserDefined))].into_iter(),
        )
        .unwrap();
        assert_eq!(p.bytes(0), " hé".as_bytes());
        assert_eq!(p.bytes(1), b"");
        assert_eq!(p.bytes(2), "中".as_bytes(), "outside the alphabet: itself");
        assert_eq!(p.bytes(3), "Ġ".as_bytes(), "added tokens are never respelled");
        assert_eq!((p.bytes(4), p.kind(4)), (&b""[..], TokenKind::Unused));
        let p = Pieces::build(
            file,
            Spelling::SentencePiece,
            [Some(("▁a▁", k)), Some(("<0x0A>", TokenKind::Byte)), Some(("<0x0>", k))].into_iter(),
        )
        .unwrap();
        assert_eq!((p.bytes(0), p.bytes(1), p.bytes(2)), (&b" a "[..], &b"\n"[..], &b"<0x0>"[..]));
        assert!(Pieces::build(file, Spelling::ByteLevel, std::iter::empty()).is_err());
    }
}
