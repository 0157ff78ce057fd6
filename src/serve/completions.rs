//! `/v1/completions`: text that goes on from a prompt, without a chat template.

use super::answer::{Delta, Finish, Reading, completion_logprobs};
use super::body::{json as json_response, streamed};
use super::chat::{Head, count, event, last_events};
use super::fail::Fail;
use super::fields::{Answered, Fields, found};
use super::generate::{Pieces, Render, Running};
use super::models::Lease;
use super::options::{CHOICES_MAX, IGNORED, Options};
use super::prompts::{prompt_ids, tokenizing};
use super::{Context, Server};
use crate::units::TokenId;
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;

/// The likeliest tokens that may be asked for (OpenAI's bound for this endpoint).
const LOGPROBS_MAX: u64 = 5;

/// Text or token ids.
pub enum Input {
    /// To be tokenized.
    Text(String),
    /// As they are; the engine checks them against the vocabulary.
    Ids(Vec<TokenId>),
}

impl Input {
    /// Its tokens. Text gets the tokens that the model's file asks for at a text's start.
    pub fn ids(self, lease: &Lease) -> Answered<Vec<TokenId>> {
        match self {
            Input::Ids(ids) => Ok(ids),
            Input::Text(text) => prompt_ids(lease, &text, true, true),
        }
    }

    /// Bytes of text.
    pub fn text_bytes(&self) -> usize {
        if let Input::Text(text) = self { text.len() } else { 0 }
    }
}

/// Reads text, an array of texts, of ids, or of arrays of ids; at most `most` of them.
pub fn inputs(name: &str, value: Option<&Value>, most: usize) -> Answered<Vec<Input>> {
    const EXPECTED: &str = "text, token ids, or an array of them";
    let wrong = |v: &Value| Fail::field(name, EXPECTED, found(v));
    let ids = |a: &[Value]| -> Option<Vec<TokenId>> {
        a.iter().map(|v| v.as_u64().and_then(|n| TokenId::try_from(n).ok())).collect()
    };
    match value {
        None => Err(Fail::field(name, EXPECTED, "nothing")),
        Some(Value::String(text)) => Ok(vec![Input::Text(text.clone())]),
        Some(v @ Value::Array(a)) => match a.first() {
            None => Err(Fail::field(name, EXPECTED, "an empty array")),
            Some(Value::Number(_)) => Ok(vec![Input::Ids(ids(a).ok_or_else(|| wrong(v))?)]),
            Some(_) if a.len() > most => Err(Fail::field(name, format!("at most {most}"), a.len())),
            Some(_) => {
                let one = |v: &Value| match v {
                    Value::String(text) => Ok(Input::Text(text.clone())),
                    Value::Array(inner) => Ok(Input::Ids(ids(inner).ok_or_else(|| wrong(v))?)),
                    other => Err(wrong(other)),
                };
                a.iter().map(one).collect()
            }
        },
        Some(other) => Err(wrong(other)),
    }
}

/// Answers a completion request.
pub async fn complete(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?.map(str::to_owned);
    let mut options = Options::read(&f, &server.settings())?;
    options.params.logprobs = f.count("logprobs", 0, LOGPROBS_MAX)?.map(|n| n as usize);
    let echo = f.flag("echo")?.unwrap_or(false);
    if let Some(n) = f.count("best_of", 1, CHOICES_MAX)?.filter(|n| *n != options.n as u64) {
        return Err(Fail::field("best_of", "the same as n", n));
    }
    if f.text("suffix")?.is_some_and(|s| !s.is_empty()) {
        return Err(Fail::field("suffix", "nothing: not supported", "text"));
    }
    if echo && options.params.logprobs.is_some() {
        // An answer without the prompt's own would pass for a measurement of it.
        let expected = "false with logprobs: those of a prompt's tokens are not computed (`tegu ppl` does)";
        return Err(Fail::field("echo", expected, "true"));
    }
    let prompts = inputs("prompt", f.get("prompt"), CHOICES_MAX as usize)?;
    f.done(IGNORED)?;
    // OpenAI's default for this endpoint.
    const MAX_TOKENS: usize = 16;
    options.max_tokens = options.max_tokens.or(Some(MAX_TOKENS));
    let lease = server.model(model.as_deref()).await?;
    let head = Head::new("cmpl", &lease.name);
    let (stream, include_usage, n) = (options.stream, options.include_usage, options.n);
    let logprobs = options.params.logprobs.is_some();
    let bytes = prompts.iter().map(Input::text_bytes).sum();
    let starting = move || {
        let ids: Vec<Vec<TokenId>> = prompts.into_iter().map(|p| p.ids(&lease)).collect::<Answered<_>>()?;
        let texts: Vec<String> =
            if echo { ids.iter().map(|i| lease.tokenizer.decode(i, true)).collect() } else { Vec::new() };
        let reading = Reading {
            stops: std::mem::take(&mut options.stops),
            logprobs,
            continues: true,
            ..Reading::default()
        };
        Ok((Running::start(lease, ids, &options, &reading, &context.client, context.deadline)?, texts))
    };
    let (running, echoed) = tokenizing(bytes, starting).await?;
    let echoed = move |i: usize| echoed.get(i / n).cloned().unwrap_or_default();
    if stream {
        let count = running.answers();
        let heads = (0..count).map(&echoed).collect();
        let chunks = Chunks { head, echoed: heads, include_usage, logprobs, lengths: vec![0; count] };
        return Ok(streamed("text/event-stream", Pieces::new(running, chunks)));
    }
    let (answers, running) = running.collect().await?;
    let tokenizer = running.live().tokenizer.clone();
    let choice = |(i, (d, finish)): (usize, &(Delta, Finish))| {
        let text = echoed(i);
        let shown = logprobs.then(|| completion_logprobs(&tokenizer, &d.tokens, text.chars().count()));
        json!({
            "index": i, "text": text + &d.content, "logprobs": shown, "finish_reason": finish.word(),
        })
    };
    let mut object = head.object("text_completion");
    object["choices"] = answers.iter().enumerate().map(choice).collect();
    count(&mut object, &running.usage);
    Ok(json_response(StatusCode::OK, &object))
}

struct Chunks {
    head: Head,
    /// Text before each answer.
    echoed: Vec<String>,
    include_usage: bool,
    logprobs: bool,
    /// Characters of each answer so far.
    lengths: Vec<usize>,
}

impl Chunks {
    fn chunk(&self, choices: Value) -> Value {
        let mut object = self.head.object("text_completion");
        object["choices"] = choices;
        if self.include_usage {
            object["usage"] = Value::Null;
        }
        object
    }
}

impl Render for Chunks {
    fn head(&mut self) -> String {
        let mut out = String::new();
        for (i, text) in self.echoed.iter().enumerate().filter(|(_, t)| !t.is_empty()) {
            self.lengths[i] = text.chars().count();
            let choice = json!([{ "index": i, "text": text, "logprobs": null, "finish_reason": null }]);
            out += &event(&self.chunk(choice));
        }
        out
    }

    fn piece(&mut self, running: &Running, i: usize, d: &Delta, finish: Option<Finish>) -> String {
        let shown = (self.logprobs && !d.tokens.is_empty())
            .then(|| completion_logprobs(&running.live().tokenizer, &d.tokens, self.lengths[i]));
        self.lengths[i] += d.content.chars().count();
        let word = finish.map(Finish::word);
        let choice = json!([{ "index": i, "text": d.content, "logprobs": shown, "finish_reason": word }]);
        event(&self.chunk(choice))
    }

    fn end(&mut self, running: &Running) -> String {
        last_events(self.chunk(json!([])), self.include_usage.then_some(&running.usage))
    }

    fn failed(&mut self, fail: &Fail) -> String {
        event(&json!({ "error": fail.object() }))
    }
}
