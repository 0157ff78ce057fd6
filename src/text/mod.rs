//! Text to token ids and back.
//!
//! ```text
//! chat messages ─ template ─► text ─ Tokenizer::encode ─► ids ─► … ─► ids ─ Detokenizer ─► text ─ StopStrings ─► reader
//! ```
//!
//! - [`Tokenizer`]: from a Hugging Face `tokenizer.json` ([`hf`]) or from GGUF metadata ([`gguf`]). Both become the same
//!   four steps: split out added tokens, normalize, pre-tokenize, then byte-pair merges by rank ([`tokenizers`' BPE])
//!   or by score ([`spm`], what SentencePiece calls BPE).
//! - [`Detokenizer`]: ids to text as they come; never half a character.
//! - [`ChatTemplate`]: the model's own Jinja template, in bounded time and space.
//! - [`Reasoning`] and [`ToolParser`]: what a model thought, and the calls that it wrote, out of its text.
//! - [`StopStrings`]: holds back text that may yet turn out to be a stop string.
//!
//! The room reads side files of a Hugging Face folder itself ([`files`]): they are small and only text needs them.
//!
//! [`tokenizers`' BPE]: https://docs.rs/tokenizers

pub mod files;
pub mod gguf;
pub mod hf;
mod markers;
mod pieces;
pub mod pretok;
pub mod reasoning;
#[cfg(test)]
mod reference_tests;
mod spm;
pub mod stop;
pub mod stream;
pub mod template;
mod template_args;
mod template_env;
mod template_filters;
mod template_methods;
mod template_percent;
mod template_printf;
mod tokenizer;
pub mod tools;

pub use gguf::{GgufVocab, METASPACE, NORMALIZER};
pub use pieces::TokenKind;
pub use reasoning::{Reasoning, Split};
pub use stop::{StopHit, StopStrings};
pub use stream::Detokenizer;
pub use template::{Chat, ChatTemplate};
pub use tokenizer::{SpecialIds, Tokenizer};
pub use tools::{ToolCall, ToolFormat, ToolOutput, ToolParser, ToolPiece};
