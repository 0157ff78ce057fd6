//! One answer as it is generated: tokens to text, stop strings, thought and calls split from what is said.

use crate::engine::Done;
use crate::sample::Sampled;
use crate::text::{
    Detokenizer, Reasoning, Split, StopStrings, TokenKind, Tokenizer, ToolFormat, ToolOutput, ToolParser,
    ToolPiece,
};
use crate::units::Result;
use serde_json::{Value, json};

/// Why an answer ended, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end token, or a complete form.
    Stop,
    /// A text of `stop`.
    StopText,
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// It calls tools.
    ToolCalls,
    /// Its deadline passed.
    Deadline,
}

impl Finish {
    /// The word in a response. OpenAI has none for a deadline.
    pub fn word(self) -> &'static str {
        match self {
            Finish::Stop | Finish::StopText => "stop",
            Finish::Length => "length",
            Finish::ToolCalls => "tool_calls",
            Finish::Deadline => "deadline",
        }
    }
}

/// What a token added.
#[derive(Debug, Default)]
pub struct Delta {
    /// Text of the answer.
    pub content: String,
    /// Text of the thought before it.
    pub reasoning: String,
    /// Calls, or more of them.
    pub calls: Vec<ToolPiece>,
    /// The tokens since the last piece that carried any.
    pub tokens: Vec<Sampled>,
}

impl Delta {
    /// Whether there is anything to say.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty()
            && self.reasoning.is_empty()
            && self.calls.is_empty()
            && self.tokens.is_empty()
    }
}

/// How answers are read.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// The prompt's text, if thoughts are split off.
    pub thinks_after: Option<String>,
    /// The form of calls, if there may be any.
    pub tools: Option<ToolFormat>,
    /// Calls come as they are written, not when they are whole.
    pub pieces: bool,
    /// Text that the prompt ends with and that is part of the first call.
    pub opening: String,
    /// Tokens are wanted with their log-probabilities.
    pub logprobs: bool,
    /// The answer goes on after the prompt's text: a leading space is kept.
    pub continues: bool,
}

/// One answer's state.
pub struct Answer {
    detokenizer: Detokenizer,
    stops: StopStrings,
    reasoning: Option<Reasoning>,
    tools: Option<ToolParser>,
    keeps: &'static [&'static str],
    logprobs: bool,
    called: bool,
    /// Tokens so far.
    pub tokens: usize,
    /// A stop string was met: what comes after it is not wanted.
    pub stopped: bool,
}

/// Control tokens that mark thoughts in some vocabularies.
const THINK_MARKS: &[&str] = &["<think>", "</think>"];

impl Answer {
    /// An answer that is yet to begin.
    pub fn new(r: &Reading) -> Result<Answer> {
        let mut tools = r.tools.map(if r.pieces { ToolParser::pieces } else { ToolParser::new });
        if let Some(tools) = &mut tools {
            tools.push(&r.opening, &mut ToolOutput::default());
        }
        Ok(Answer {
            // Control tokens are dropped below, but for those that mark thoughts and calls.
            detokenizer: if r.continues { Detokenizer::continuing(false) } else { Detokenizer::new(false) },
            stops: StopStrings::new(r.stops.clone())?,
            reasoning: r.thinks_after.as_deref().map(Reasoning::after_prompt),
            tools,
            keeps: r.tools.map_or(&[], ToolFormat::control_texts),
            logprobs: r.logprobs,
            called: false,
            tokens: 0,
            stopped: false,
        })
    }

    /// Takes a token.
    pub fn push(&mut self, tokenizer: &Tokenizer, sampled: Sampled, delta: &mut Delta) {
        if self.stopped {
            return;
        }
        self.tokens += 1;
        let mut text = String::new();
        if self.shows(tokenizer, sampled.token) {
            self.detokenizer.push(tokenizer, sampled.token, &mut text);
        }
        if self.logprobs {
            delta.tokens.push(sampled);
        }
        let mut clear = String::new();
        self.stopped = self.stops.push(&text, &mut clear).is_some();
        self.split(&clear, delta);
    }

    fn shows(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        if tokenizer.token_kind(token) != TokenKind::Control {
            return true;
        }
        let bytes = tokenizer.token_bytes(token);
        let thinks = self.reasoning.is_some() && THINK_MARKS.iter().any(|m| m.as_bytes() == bytes);
        thinks || self.keeps.iter().any(|m| m.as_bytes() == bytes)
    }

    fn split(&mut self, text: &str, delta: &mut Delta) {
        let mut split = Split::default();
        match &mut self.reasoning {
            Some(r) => r.push(text, &mut split),
            None => split.content.push_str(text),
        }
        delta.reasoning.push_str(&split.reasoning);
        self.say(&split.content, delta);
    }

    fn say(&mut self, content: &str, delta: &mut Delta) {
        let Some(tools) = &mut self.tools else {
            delta.content.push_str(content);
            return;
        };
        let mut out = ToolOutput::default();
        tools.push(content, &mut out);
        self.called |= !out.calls.is_empty();
        delta.content.push_str(&out.text);
        delta.calls.extend(out.calls);
    }

    /// Ends the answer: what was held back comes out.
    pub fn finish(&mut self, why: Done, delta: &mut Delta) -> Finish {
        if !self.stopped {
            let (mut rest, mut clear) = (String::new(), String::new());
            self.detokenizer.finish(&mut rest);
            self.stops.push(&rest, &mut clear);
            self.stops.finish(&mut clear);
            self.split(&clear, delta);
        }
        if let Some(mut r) = self.reasoning.take() {
            let mut split = Split::default();
            r.finish(&mut split);
            delta.reasoning.push_str(&split.reasoning);
            self.say(&split.content, delta);
        }
        if let Some(mut tools) = self.tools.take() {
            let mut out = ToolOutput::default();
            tools.finish(&mut out);
            self.called |= !out.calls.is_empty();
            delta.content.push_str(&out.text);
            delta.calls.extend(out.calls);
        }
        match why {
            _ if self.called => Finish::ToolCalls,
            _ if self.stopped => Finish::StopText,
            Done::End(_) | Done::Complete | Done::Stopped => Finish::Stop,
            Done::Length | Done::Context => Finish::Length,
            Done::Deadline => Finish::Deadline,
        }
    }
}

/// A token's text and bytes, as log-probabilities show them.
fn shown(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Value {
    let bytes = tokenizer.token_bytes(id);
    // JSON has no infinity; OpenAI writes -9999 for what cannot be.
    let logprob = if logprob.is_finite() { f64::from(logprob) } else { -9999.0 };
    json!({ "token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes })
}

/// One entry of a chat choice's `logprobs.content`.
pub fn chat_logprob(tokenizer: &Tokenizer, s: &Sampled) -> Value {
    let mut entry = shown(tokenizer, s.token, s.logprob);
    let top: Vec<Value> = s.top.iter().map(|&(id, p)| shown(tokenizer, id, p)).collect();
    entry["top_logprobs"] = top.into();
    entry
}

/// A completion choice's `logprobs`; `offset` is the length of the text before.
pub fn completion_logprobs(tokenizer: &Tokenizer, tokens: &[Sampled], mut offset: usize) -> Value {
    let text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
    let finite = |p: f32| if p.is_finite() { f64::from(p) } else { -9999.0 };
    let mut offsets = Vec::new();
    for s in tokens {
        offsets.push(offset);
        offset += text(s.token).chars().count();
    }
    let top = |s: &Sampled| -> Value {
        s.top.iter().map(|&(id, p)| (text(id), json!(finite(p)))).collect::<serde_json::Map<_, _>>().into()
    };
    json!({
        "tokens": tokens.iter().map(|s| text(s.token)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|s| finite(s.logprob)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
