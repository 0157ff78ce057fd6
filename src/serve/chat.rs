//! `/v1/chat/completions`, and how OpenAI's responses look.

use super::answer::{Delta, Finish, Reading, chat_logprob};
use super::body::{json as json_response, streamed};
use super::fail::Fail;
use super::fields::{Answered, Fields};
use super::generate::{Pieces, Render, Running, Usage};
use super::messages::{self, Choice, Tool};
use super::models::Lease;
use super::options::{IGNORED, Options, TOP_LOGPROBS_MAX};
use super::prompts::{prompt_ids, tokenizing};
use super::{Context, Server};
use crate::sample::Form;
use crate::text::{ToolFormat, ToolPiece};
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A chat request, checked.
pub struct Request {
    /// How to answer.
    pub options: Options,
    messages: Vec<Value>,
    tools: Vec<Tool>,
    choice: Choice,
    extra: Map<String, Value>,
    /// Calls may come in pieces.
    pieces: bool,
    /// The model asked for.
    pub model: Option<String>,
}

impl Request {
    /// Reads OpenAI's form.
    fn read(body: &Value, server: &Server) -> Answered<Request> {
        let f = Fields::of_body(body)?;
        let model = f.text("model")?.map(str::to_owned);
        let mut options = Options::read(&f, &server.settings())?;
        let wanted = f.flag("logprobs")?.unwrap_or(false);
        let top = f.count("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
        if top.is_some_and(|n| n > 0) && !wanted {
            return Err(Fail::field("top_logprobs", "logprobs to be true", "false"));
        }
        options.params.logprobs = wanted.then(|| top.unwrap_or(0) as usize);
        let tools = messages::tools(&f)?;
        let choice = messages::tool_choice(&f, &tools)?;
        f.flag("parallel_tool_calls")?;
        let mut extra = f.map("chat_template_kwargs")?;
        let speaks = f.array("modalities")?.and_then(|all| all.iter().find(|m| *m != "text"));
        if let Some(other) = speaks {
            let found = super::fields::found(other);
            return Err(Fail::field("modalities", "[\"text\"]: the model writes text", found));
        }
        if let Some(effort) =
            f.word("reasoning_effort", &["none", "minimal", "low", "medium", "high", "xhigh"])?
        {
            extra.entry("reasoning_effort").or_insert(json!(effort));
            if effort == "none" {
                extra.entry("enable_thinking").or_insert(json!(false));
            }
        }
        let messages = messages::messages(&f, false)?;
        f.done(IGNORED)?;
        let pieces = options.stream;
        Request { options, messages, tools, choice, extra, pieces, model }.checked()
    }

    /// A request that another form was read into. Calls come whole.
    pub fn of(
        options: Options,
        messages: Vec<Value>,
        tools: Vec<Tool>,
        extra: Map<String, Value>,
        model: Option<String>,
    ) -> Answered<Request> {
        let choice = if tools.is_empty() { Choice::None } else { Choice::Auto };
        Request { options, messages, tools, choice, extra, pieces: false, model }.checked()
    }

    fn checked(self) -> Answered<Request> {
        if matches!(self.choice, Choice::Required | Choice::Named(_)) && self.options.form.is_some() {
            return Err(Fail::field(
                "tool_choice",
                "no other form besides a call",
                "response_format or grammar",
            ));
        }
        Ok(self)
    }

    /// Renders, tokenizes and submits. For a thread that may take its time.
    pub fn start(mut self, lease: Lease, context: &Context) -> Answered<Running> {
        // Without tools, or told to call none, the model is not told of any.
        let tools = if self.choice == Choice::None { Vec::new() } else { self.tools };
        let prompt = messages::prompt(&lease, self.messages, &tools, self.extra)?;
        let mut text = prompt.text;
        let mut reading = Reading {
            stops: std::mem::take(&mut self.options.stops),
            thinks_after: Some(text.clone()),
            tools: (!tools.is_empty()).then(|| lease.tool_format.unwrap_or(ToolFormat::Hermes)),
            pieces: self.pieces,
            logprobs: self.options.params.logprobs.is_some(),
            ..Reading::default()
        };
        let chosen: Vec<&Tool> = match self.choice {
            Choice::Required => tools.iter().collect(),
            Choice::Named(i) => vec![&tools[i]],
            Choice::None | Choice::Auto => Vec::new(),
        };
        if let Some(format) = reading.tools.filter(|_| !chosen.is_empty()) {
            // The call's opening is put into the model's mouth; what follows is held to the schema.
            reading.opening = format.frame().0.to_owned();
            reading.thinks_after = None;
            text.push_str(&reading.opening);
            let grammar = messages::call_grammar(format, &chosen);
            self.options.form = Some((Form::JsonInLark(grammar), "tools"));
        }
        let ids = prompt_ids(&lease, &text, true, !prompt.from_template)?;
        Running::start(lease, vec![ids], &self.options, &reading, &context.client, context.deadline)
    }
}

/// Answers a chat request.
pub async fn complete(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let request = Request::read(&body, &server)?;
    let lease = server.model(request.model.as_deref()).await?;
    let (stream, include_usage) = (request.options.stream, request.options.include_usage);
    let logprobs = request.options.params.logprobs.is_some();
    let n = request.options.n;
    let head = Head::new("chatcmpl", &lease.name);
    let running = tokenizing(context.body_bytes, move || request.start(lease, &context)).await?;
    if stream {
        let chunks = Chunks { head, n, include_usage, logprobs };
        return Ok(streamed("text/event-stream", Pieces::new(running, chunks)));
    }
    let (answers, running) = running.collect().await?;
    let choices: Vec<Value> =
        answers.iter().enumerate().map(|(i, (d, f))| choice(&running, i, d, *f, logprobs)).collect();
    let mut object = head.object("chat.completion");
    object["choices"] = choices.into();
    count(&mut object, &running.usage);
    Ok(json_response(StatusCode::OK, &object))
}

/// What every object of a response begins with.
pub struct Head {
    id: String,
    model: String,
    created: u64,
}

impl Head {
    /// A new response's.
    pub fn new(prefix: &str, model: &str) -> Head {
        Head {
            id: format!("{prefix}-{:016x}", super::options::any_seed()),
            model: model.to_owned(),
            created: super::unix_s(),
        }
    }

    /// An object of this kind.
    pub fn object(&self, kind: &str) -> Value {
        let version = concat!("tegu-", env!("CARGO_PKG_VERSION"));
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": version,
        })
    }
}

/// Adds OpenAI's counts to a response, what it took of the board's energy where that is measured, and times for clients that
/// show speed.
pub fn count(object: &mut Value, u: &Usage) {
    let (s, ms) = (&u.stats, |d: std::time::Duration| d.as_secs_f64() * 1e3);
    object["usage"] = json!({
        "prompt_tokens": u.prompt,
        "completion_tokens": u.generated,
        "total_tokens": u.prompt + u.generated,
        "prompt_tokens_details": { "cached_tokens": u.cached },
    });
    if let Some(energy) = &u.energy {
        object["usage"]["tegu"] = energy.shown(u.generated);
    }
    object["timings"] = json!({
        "ttft_ms": ms(s.ttft), "prompt_ms": ms(s.prefill), "predicted_ms": ms(s.decode),
        "prompt_per_second": s.pp(), "predicted_per_second": s.tg(),
    });
}

/// A call, or more of one that has begun.
fn call(piece: &ToolPiece) -> Value {
    let Some(name) = &piece.name else {
        return json!({ "index": piece.call, "function": { "arguments": piece.arguments } });
    };
    let function = json!({ "name": name, "arguments": piece.arguments });
    let id = format!("call_{:016x}", super::options::any_seed());
    json!({ "index": piece.call, "id": id, "type": "function", "function": function })
}

fn choice(running: &Running, index: usize, d: &Delta, finish: Finish, logprobs: bool) -> Value {
    let content = if d.content.is_empty() && !d.calls.is_empty() { Value::Null } else { json!(d.content) };
    let mut message = json!({ "role": "assistant", "content": content });
    if !d.reasoning.is_empty() {
        message["reasoning_content"] = json!(d.reasoning);
    }
    if !d.calls.is_empty() {
        message["tool_calls"] = d.calls.iter().map(call).collect();
    }
    let tokenizer = &running.live().tokenizer;
    let shown = logprobs.then(
        || json!({ "content": d.tokens.iter().map(|s| chat_logprob(tokenizer, s)).collect::<Vec<_>>() }),
    );
    json!({ "index": index, "message": message, "logprobs": shown, "finish_reason": finish.word() })
}

/// Streamed chunks.
struct Chunks {
    head: Head,
    n: usize,
    include_usage: bool,
    logprobs: bool,
}

/// One server-sent event.
pub fn event(object: &Value) -> String {
    format!("data: {object}\n\n")
}

/// The end of a stream: the counts in `object`, whose choices are none, where they were asked for; and OpenAI's mark.
pub fn last_events(mut object: Value, counts: Option<&Usage>) -> String {
    let mut text = String::new();
    if let Some(u) = counts {
        count(&mut object, u);
        text += &event(&object);
    }
    text + "data: [DONE]\n\n"
}

impl Chunks {
    fn chunk(&self, choices: Value) -> Value {
        let mut object = self.head.object("chat.completion.chunk");
        object["choices"] = choices;
        if self.include_usage {
            object["usage"] = Value::Null;
        }
        object
    }
}

impl Render for Chunks {
    fn head(&mut self) -> String {
        let first = |i: usize| {
            let delta = json!({ "role": "assistant", "content": "" });
            event(
                &self.chunk(json!([{ "index": i, "delta": delta, "logprobs": null, "finish_reason": null }])),
            )
        };
        (0..self.n).map(first).collect()
    }

    fn piece(&mut self, running: &Running, index: usize, d: &Delta, finish: Option<Finish>) -> String {
        let tokenizer = &running.live().tokenizer;
        let mut text = String::new();
        if !d.is_empty() {
            let mut delta = Map::new();
            if !d.reasoning.is_empty() {
                delta.insert("reasoning_content".into(), json!(d.reasoning));
            }
            if !d.content.is_empty() || (d.reasoning.is_empty() && d.calls.is_empty()) {
                delta.insert("content".into(), json!(d.content));
            }
            if !d.calls.is_empty() {
                delta.insert("tool_calls".into(), d.calls.iter().map(call).collect());
            }
            let shown = self.logprobs.then(
                || json!({ "content": d.tokens.iter().map(|s| chat_logprob(tokenizer, s)).collect::<Vec<_>>() }),
            );
            let choice =
                json!([{ "index": index, "delta": delta, "logprobs": shown, "finish_reason": null }]);
            text += &event(&self.chunk(choice));
        }
        if let Some(finish) = finish {
            let choice =
                json!([{ "index": index, "delta": {}, "logprobs": null, "finish_reason": finish.word() }]);
            text += &event(&self.chunk(choice));
        }
        text
    }

    fn end(&mut self, running: &Running) -> String {
        last_events(self.chunk(json!([])), self.include_usage.then_some(&running.usage))
    }

    fn failed(&mut self, fail: &Fail) -> String {
        event(&json!({ "error": fail.object() }))
    }
}
