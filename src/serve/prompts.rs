//! Text to tokens, within bounds: a tokenizer takes hundreds of bytes of memory for each of a text's, so that what cannot fit is
//! refused before it is cut, long texts are cut one at a time, and none on the threads that carry connections.

use super::fail::Fail;
use super::fields::Answered;
use super::models::Live;
use crate::text::Tokenizer;
use crate::units::{Error, TokenId};
use tokio::sync::Semaphore;

/// From here on a text is long.
const LONG_BYTES: usize = 128 << 10;
/// `/tokenize` takes no longer text: it is not bounded by a context.
pub const TOKENIZE_BYTES_MAX: usize = 1 << 20;

/// One long text at a time. Others wait without holding a thread.
static LONG: Semaphore = Semaphore::const_new(1);

/// Runs what tokenizes `bytes` of text on a thread for that.
pub async fn tokenizing<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Answered<T> + Send + 'static,
) -> Answered<T> {
    // It is never closed.
    let _permit = if bytes >= LONG_BYTES { LONG.acquire().await.ok() } else { None };
    super::blocking(work).await
}

/// The bytes of a vocabulary's longest token.
pub fn longest_token(tokenizer: &Tokenizer) -> usize {
    let bytes = |id| tokenizer.token_bytes(id as TokenId).len();
    (0..tokenizer.vocab_size()).map(bytes).max().unwrap_or(0).max(1)
}

/// The tokens of a prompt; `parse_special` and `add_special` as in [`Tokenizer::encode`].
///
/// # Errors
/// `context_length_exceeded`, for what has more bytes or clearly more tokens than any context of this model.
pub fn prompt_ids(live: &Live, text: &str, parse_special: bool, add_special: bool) -> Answered<Vec<TokenId>> {
    let most = live.handle.context_tokens();
    if text.len() > most.saturating_mul(live.longest_token) {
        return Err(too_long(format!("{} bytes of text", text.len()), most));
    }
    if text.len() > LONG_BYTES {
        let mut tokens = 0;
        for piece in pieces(text, LONG_BYTES) {
            tokens += live.tokenizer.encode(piece, parse_special, false)?.len();
            // Pieces may have more tokens than the whole where they are cut, by a word each: far less than this.
            if tokens > 2 * most + 1024 {
                return Err(too_long(format!("{tokens} and more"), most));
            }
        }
    }
    Ok(live.tokenizer.encode(text, parse_special, add_special)?)
}

fn too_long(needs: String, most: usize) -> Fail {
    let has = format!("{most} (--ctx-size raises it, up to what the model was made for)");
    Error::Limit { what: "context tokens".into(), needs, has }.into()
}

/// A text in pieces of about so many bytes, between characters.
fn pieces(mut text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let at = (bytes.min(text.len())..=text.len()).find(|&i| text.is_char_boundary(i))?;
        let (piece, rest) = text.split_at(at);
        text = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

#[test]
fn pieces_are_the_text_between_characters() {
    for (text, bytes) in [("", 3), ("abc", 3), ("abcd", 3), ("aé😀b", 1), ("😀😀😀", 5), ("é", 100)]
    {
        let all: Vec<&str> = pieces(text, bytes).collect();
        assert_eq!(all.concat(), text);
        assert!(all.iter().all(|p| !p.is_empty() && p.len() < bytes + 4), "{all:?}");
    }
}
