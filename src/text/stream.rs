//! Streaming detokenization: ids in, text out, never half a character.

use crate::text::pieces::TokenKind;
use crate::text::tokenizer::Tokenizer;
use crate::units::TokenId;

/// Turns ids into text as they come. What has been pushed so far and then [`Detokenizer::finish`] give exactly what
/// decoding the whole at once gives.
///
/// A character may be spread over several tokens; its first bytes are held until the rest comes, or until a byte comes
/// that cannot continue it: then they become one U+FFFD, as the standard library's lossy conversion has it.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// At most three bytes that so far are the start of a character.
    held: Vec<u8>,
    skip_control: bool,
    /// Nothing has come out yet: a SentencePiece text begins with a space that encoding put there.
    at_start: bool,
}

impl Detokenizer {
    /// For a text from its start. `skip_control` leaves control tokens out of the text.
    pub fn new(skip_control: bool) -> Self {
        Self { held: Vec::with_capacity(8), skip_control, at_start: true }
    }

    /// For text that goes on after other text, such as a completion: a leading space is kept.
    pub fn continuing(skip_control: bool) -> Self {
        Self { at_start: false, ..Self::new(skip_control) }
    }

    /// Appends to `out` the characters that `id` completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: TokenId, out: &mut String) {
        if self.skip_control && tokenizer.token_kind(id) == TokenKind::Control {
            return;
        }
        let mut bytes = tokenizer.token_bytes(id);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if tokenizer.strips_first_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.push_bytes(bytes, out);
    }

    /// Appends to `out` the characters that `bytes` complete.
    pub fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut done = 0;
        while done < self.held.len() {
            match std::str::from_utf8(&self.held[done..]) {
                Ok(text) => {
                    out.push_str(text);
                    done = self.held.len();
                }
                Err(e) => {
                    let (valid, rest) = self.held[done..].split_at(e.valid_up_to());
                    // Checked just above; the lossy form borrows and replaces nothing.
                    out.push_str(&String::from_utf8_lossy(valid));
                    done += valid.len();
                    // No length: the bytes are a good start that the next token may complete.
                    let Some(bad) = e.error_len() else { break };
                    debug_assert!(bad <= rest.len());
                    out.push(char::REPLACEMENT_CHARACTER);
                    done += bad;
                }
            }
        }
        self.held.drain(..done);
    }

    /// Ends the text: a character that never came whole becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            out.push_str(&String::from_utf8_lossy(&self.held));
            self.held.clear();
        }
    }

    /// Whether bytes of an incomplete character are held back.
    pub fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(chunks: &[&[u8]]) -> (Vec<String>, String) {
        let mut d = Detokenizer::new(false);
        let mut whole = String::new();
        let mut parts = Vec::new();
        for c in chunks {
            let mut part = String::new();
            d.push_bytes(c, &mut part);
            whole.push_str(&part);
            parts.push(part);
        }
        d.finish(&mut whole);
        (parts, whole)
    }

    #[test]
    fn an_emoji_split_over_bytes_comes_whole() {
        let (parts, whole) = stream(&[b"a\xF0", b"\x9F", b"\x9A", b"\x80b"]);
        assert_eq!(parts, ["a", "", "", "🚀b"]);
        assert_eq!(whole, "a🚀b");
    }

    #[test]
    fn bytes_that_cannot_be_completed_are_replaced_at_once() {
        let (parts, _) = stream(&[b"\xF0\x9F", b"x"]);
        assert_eq!(parts, ["", "\u{FFFD}x"]);
        let (parts, _) = stream(&[b"\xFF", b"\x80\xE2\x82", b"\xAC"]);
        assert_eq!(parts, ["\u{FFFD}", "\u{FFFD}", "€"]);
        let (_, whole) = stream(&[b"ok\xE2\x82"]);
        assert_eq!(whole, "ok\u{FFFD}");
    }

    proptest! {
        #[test]
        fn any_cut_of_any_bytes_equals_the_whole(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), 0x80u8..0xC0, 0xC0u8..=0xFF, Just(b'a')], 0..40),
            cuts in proptest::collection::vec(1usize..4, 0..40),
        ) {
            let (mut rest, mut chunks) = (&bytes[..], Vec::new());
            for c in cuts {
                let (a, b) = rest.split_at(c.min(rest.len()));
                chunks.push(a);
                rest = b;
            }
            chunks.push(rest);
            let (_, whole) = stream(&chunks);
            prop_assert_eq!(whole, String::from_utf8_lossy(&bytes));
        }
    }
}
