//! What is asked of the engine, and what it says back.

use crate::sample::{Sampled, Sampler};
use crate::units::{Error, TokenId};
use std::time::{Duration, Instant};

/// A sequence's number, never reused.
pub type SeqId = u64;

/// How urgent a request is. An earlier class always goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Class {
    /// Someone waits for the first token.
    #[default]
    Interactive,
    /// Neither waited for nor put off.
    Normal,
    /// Whenever nothing else wants the machine.
    Background,
}

/// What to compute.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // nearly all are the large one, and none moves often
pub enum Goal {
    /// Tokens after the prompt.
    Generate {
        /// Chooses tokens; holds its parameters, its random state and its grammar.
        sampler: Sampler,
        /// Most tokens to generate.
        max_new: usize,
        /// Tokens that end the answer; they are not part of it.
        end_ids: Vec<TokenId>,
    },
    /// The mean over the prompt of the hidden state after the final norm.
    Embed,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// What to compute.
    pub goal: Goal,
    /// How urgent it is.
    pub class: Class,
    /// When the answer is of no use any more.
    pub deadline: Option<Instant>,
    /// Whose it is: clients of one class share the machine evenly.
    pub client: String,
    /// Takes what earlier requests have left in the prefix tree, and leaves its own. An embedding never does.
    pub prefix: bool,
    /// Grouped-query models: when the context is full, keep this many tokens at the front, forget the older half of the
    /// rest, and go on.
    pub slide: Option<usize>,
}

impl Request {
    /// An interactive request of no one in particular for up to `max_new` tokens.
    pub fn new(prompt: Vec<TokenId>, sampler: Sampler, max_new: usize, end_ids: Vec<TokenId>) -> Request {
        Request::of(prompt, Goal::Generate { sampler, max_new, end_ids })
    }

    /// An interactive request of no one in particular.
    pub fn of(prompt: Vec<TokenId>, goal: Goal) -> Request {
        Request {
            prompt,
            goal,
            class: Class::default(),
            deadline: None,
            client: String::new(),
            prefix: false,
            slide: None,
        }
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// The model said so.
    End(TokenId),
    /// `max_new` tokens are there.
    Length,
    /// The context is full.
    Context,
    /// The grammar allows nothing more.
    Complete,
    /// The deadline has passed.
    Deadline,
    /// The reader has what it wanted: a text of its own ended the answer.
    Stopped,
}

/// What happened in a step.
#[derive(Debug)]
pub enum Event {
    /// Some of a prompt was read.
    Prefilled {
        /// Which sequence.
        seq: SeqId,
        /// Prompt tokens read so far, reused ones included.
        tokens: usize,
    },
    /// One more token.
    Token {
        /// Which sequence.
        seq: SeqId,
        /// The token, with its log-probability.
        sampled: Sampled,
    },
    /// What [`Goal::Embed`] asked for.
    Embedding {
        /// Which sequence.
        seq: SeqId,
        /// `(hidden)` f32
        mean: Vec<f32>,
    },
    /// The sequence ended; its cache stays until it is closed.
    Done {
        /// Which sequence.
        seq: SeqId,
        /// Why.
        why: Done,
    },
    /// The sequence cannot go on; it is to be closed.
    Failed {
        /// Which sequence.
        seq: SeqId,
        /// Why.
        error: Error,
    },
}

/// Times and counts of one answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    /// Prompt tokens that had to be read.
    pub prefilled: usize,
    /// Prompt tokens that were in the cache already.
    pub reused: usize,
    /// Tokens generated.
    pub generated: usize,
    /// From opening to the first token.
    pub ttft: Duration,
    /// Steps that read the prompt.
    pub prefill: Duration,
    /// Steps that generated all tokens but the first.
    pub decode: Duration,
}

impl Stats {
    /// Prompt tokens a second.
    pub fn pp(&self) -> f64 {
        self.prefilled as f64 / self.prefill.as_secs_f64().max(1e-9)
    }

    /// Generated tokens a second, the first one aside.
    pub fn tg(&self) -> f64 {
        self.generated.saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}
