//! `/v1/responses`: OpenAI's newer form of a chat. Text in, text out; nothing is stored here, so that what refers to an earlier
//! response, to tools or to files is refused by name.

use super::answer::{Delta, Finish, chat_logprob};
use super::body::{json as json_response, streamed};
use super::chat::Request;
use super::fail::Fail;
use super::fields::{Answered, Fields, found};
use super::generate::{Pieces, Render, Running, Step};
use super::options::{IGNORED, Options, TOP_LOGPROBS_MAX, any_seed};
use super::prompts::tokenizing;
use super::{Context, Server, unix_s};
use crate::sample::Form;
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Map, Value, json};
use std::future::poll_fn;
use std::sync::Arc;

/// Items of one input (as messages of a chat).
const ITEMS_MAX: usize = 16_384;
/// Tokens that an answer may be asked to have.
const TOKENS_MAX: u64 = 1 << 24;

/// Answers `/v1/responses`.
pub async fn create(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?.map(str::to_owned);
    let mut options = Options::read(&f, &server.settings())?;
    if options.n != 1 {
        return Err(Fail::field("n", "1: /v1/chat/completions has more", options.n));
    }
    if let Some((_, field)) = &options.form {
        return Err(Fail::field(*field, "nothing: here it is text.format", "a form"));
    }
    let asked = f.count("max_output_tokens", 1, TOKENS_MAX)?;
    options.max_tokens = asked.map(|n| n as usize).or(options.max_tokens);
    options.params.logprobs = logprobs(&f)?;
    let (form, format) = format(&f)?;
    options.form = form;
    let extra = reasoning(&f)?;
    refuse(&f)?;
    let mut messages = Vec::new();
    let instructions = f.text("instructions")?.map(str::to_owned);
    messages.extend(instructions.iter().map(|text| json!({ "role": "system", "content": text })));
    input(&f, &mut messages)?;
    let metadata = f.map("metadata")?;
    f.done(IGNORED)?;
    let lease = server.model(model.as_deref()).await?;
    let stream = options.stream;
    let base = json!({
        "id": format!("resp_{:016x}", any_seed()), "object": "response", "created_at": unix_s(), "model": lease.name,
        "background": false, "error": null, "incomplete_details": null, "instructions": instructions,
        "max_output_tokens": asked, "metadata": metadata, "output": [], "parallel_tool_calls": false,
        "previous_response_id": null, "store": false, "temperature": options.params.temp,
        "text": { "format": format }, "tool_choice": "none", "tools": [], "top_p": options.params.top_p,
        "truncation": "disabled", "usage": null,
    });
    let logprobs = options.params.logprobs.is_some();
    let request = Request::of(options, messages, Vec::new(), extra, model)?;
    let mut running = tokenizing(context.body_bytes, move || request.start(lease, &context)).await?;
    let mut said = Said::new(base, logprobs);
    if stream {
        return Ok(streamed("text/event-stream", Pieces::new(running, said)));
    }
    loop {
        match poll_fn(|cx| running.poll_step(cx)).await {
            // The events are not for this client; what they add up to is.
            Step::Delta(i, delta, finish) => drop(said.piece(&running, i, &delta, finish)),
            Step::Failed(fail) => return Err(fail),
            Step::End => return Ok(json_response(StatusCode::OK, &said.whole(&running))),
        }
    }
}

/// `include` with log-probabilities, and `top_logprobs`.
fn logprobs(f: &Fields) -> Answered<Option<usize>> {
    let mut wanted = false;
    for (i, what) in f.array("include")?.into_iter().flatten().enumerate() {
        match what.as_str() {
            Some("message.output_text.logprobs") => wanted = true,
            // Thoughts are not encrypted: there is nothing to include, and agents ask for it always.
            Some("reasoning.encrypted_content") => {}
            _ => {
                let expected = "message.output_text.logprobs: nothing else can be included";
                return Err(Fail::field(format!("include[{i}]"), expected, found(what)));
            }
        }
    }
    let top = f.count("top_logprobs", 0, TOP_LOGPROBS_MAX)?.unwrap_or(0) as usize;
    Ok((wanted || top > 0).then_some(top))
}

/// `text.format`, and how it is shown again.
fn format(f: &Fields) -> Answered<(Option<(Form, &'static str)>, Value)> {
    let plain = json!({ "type": "text" });
    let Some(text) = f.object("text")? else { return Ok((None, plain)) };
    text.word("verbosity", &["low", "medium", "high"])?;
    let format = text.object("format")?;
    text.done(&[])?;
    let Some(format) = format else { return Ok((None, plain)) };
    let kind = format.word("type", &["text", "json_object", "json_schema"])?;
    let form = match kind {
        Some("json_schema") => {
            let missing = || Fail::field("text.format.schema", "a JSON schema", "nothing");
            let schema = format.get("schema").ok_or_else(missing)?;
            format.required_text("name")?;
            format.text("description")?;
            format.flag("strict")?;
            Some((Form::JsonSchema(schema.clone()), "text.format.schema"))
        }
        Some("json_object") => Some((Form::JsonObject, "text.format")),
        Some(_) => None,
        None => return Err(Fail::field("text.format.type", "text, json_object or json_schema", "nothing")),
    };
    format.done(&[])?;
    Ok((form, f.map("text")?.remove("format").unwrap_or(plain)))
}

/// `reasoning.effort`, for templates that know it.
fn reasoning(f: &Fields) -> Answered<Map<String, Value>> {
    let mut extra = f.map("chat_template_kwargs")?;
    if let Some(r) = f.object("reasoning")? {
        if let Some(effort) = r.word("effort", &["none", "minimal", "low", "medium", "high", "xhigh"])? {
            extra.entry("reasoning_effort").or_insert(json!(effort));
            if effort == "none" {
                extra.entry("enable_thinking").or_insert(json!(false));
            }
        }
        // Thoughts come whole, or not at all.
        r.done(&["summary", "generate_summary"])?;
    }
    Ok(extra)
}

/// Refuses what would change the answer and is not here; what says the default in other words is fine.
fn refuse(f: &Fields) -> Answered<()> {
    for name in ["previous_response_id", "conversation", "prompt", "context_management"] {
        if let Some(v) = f.get(name) {
            return Err(Fail::field(
                name,
                "nothing: responses are not stored, send the input whole",
                found(v),
            ));
        }
    }
    if let Some(tools) = f.array("tools")?.filter(|t| !t.is_empty()) {
        let expected = "none: /v1/chat/completions takes tools";
        return Err(Fail::field("tools", expected, format_args!("{} of them", tools.len())));
    }
    if let Some(v) = f.get("tool_choice").filter(|v| *v != "none" && *v != "auto") {
        return Err(Fail::field("tool_choice", "none or auto: there are no tools here", found(v)));
    }
    if f.flag("background")? == Some(true) {
        return Err(Fail::field("background", "false: an answer is given while its client waits", "true"));
    }
    f.word("truncation", &["disabled"])?;
    f.flag("parallel_tool_calls")?;
    f.count("max_tool_calls", 0, TOKENS_MAX)?;
    Ok(())
}

/// `input`: text, or messages in which the output of an earlier response may stand as it was.
fn input(f: &Fields, messages: &mut Vec<Value>) -> Answered<()> {
    let items = match f.get("input") {
        Some(Value::String(text)) => {
            messages.push(json!({ "role": "user", "content": text }));
            return Ok(());
        }
        Some(Value::Array(items)) if (1..=ITEMS_MAX).contains(&items.len()) => items,
        other => {
            let expected = format!("text, or an array of 1 to {ITEMS_MAX} messages");
            return Err(Fail::field("input", expected, other.map_or("nothing".into(), found)));
        }
    };
    for (i, value) in items.iter().enumerate() {
        let item = Fields::of(format!("input[{i}]"), value)?;
        match item.text("type")? {
            None | Some("message") => messages.push(message(&item)?),
            // The model is not shown what it thought before.
            Some("reasoning") => {}
            Some(other) => {
                let expected = "message: no calls, files or references";
                return Err(Fail::field(item.at("type"), expected, format_args!("{other:?}")));
            }
        }
    }
    Ok(())
}

fn message(item: &Fields) -> Answered<Value> {
    let role = item.word("role", &["user", "assistant", "system", "developer"])?;
    let role = role.ok_or_else(|| Fail::field(item.at("role"), "a role", "nothing"))?;
    let mut text = String::new();
    match item.get("content") {
        Some(Value::String(whole)) => text.push_str(whole),
        Some(Value::Array(parts)) => {
            for (i, part) in parts.iter().enumerate() {
                let p = Fields::of(format!("{}[{i}]", item.at("content")), part)?;
                let kind = p.required_text("type")?;
                if !["input_text", "output_text", "text"].contains(&kind) {
                    let expected = "input_text or output_text: the model reads no images, sounds or files";
                    return Err(Fail::field(p.at("type"), expected, format_args!("{kind:?}")));
                }
                text.push_str(p.required_text("text")?);
                p.done(&["annotations", "logprobs"])?;
            }
        }
        other => {
            let found = other.map_or("nothing".into(), found);
            return Err(Fail::field(item.at("content"), "text or an array of parts", found));
        }
    }
    item.done(&["id", "status", "phase"])?;
    Ok(json!({ "role": if role == "developer" { "system" } else { role }, "content": text }))
}

/// An item of the output that is being written.
struct Open {
    id: String,
    is_thought: bool,
    text: String,
    logprobs: Vec<Value>,
}

impl Open {
    fn part(&self) -> Value {
        match self.is_thought {
            true => json!({ "type": "reasoning_text", "text": self.text }),
            false => {
                json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs })
            }
        }
    }

    /// The item, with its part once it is whole.
    fn item(&self, status: &str) -> Value {
        let content = if status == "in_progress" { json!([]) } else { json!([self.part()]) };
        match self.is_thought {
            true => {
                json!({ "id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status })
            }
            false => {
                json!({ "id": self.id, "type": "message", "role": "assistant", "content": content, "status": status })
            }
        }
    }

    /// The name of an event about its text.
    fn event(&self, what: &str) -> String {
        format!("response.{}.{what}", if self.is_thought { "reasoning_text" } else { "output_text" })
    }
}

/// A response as it is written: its events, and what they add up to.
struct Said {
    /// The response without what comes last.
    base: Value,
    logprobs: bool,
    items: Vec<Value>,
    open: Option<Open>,
    /// Tokens without text yet: those of what comes next.
    silent: Vec<Value>,
    finish: Option<Finish>,
    /// Tokens of thoughts.
    thought: usize,
    events: u64,
}

impl Said {
    fn new(base: Value, logprobs: bool) -> Said {
        let (items, silent) = (Vec::new(), Vec::new());
        Said { base, logprobs, items, open: None, silent, finish: None, thought: 0, events: 0 }
    }

    fn event(&mut self, kind: &str, mut object: Value) -> String {
        object["type"] = json!(kind);
        object["sequence_number"] = json!(self.events);
        self.events += 1;
        format!("event: {kind}\ndata: {object}\n\n")
    }

    /// An event about the item that is open.
    fn of_item(&mut self, kind: &str, mut object: Value, id: Option<&str>) -> String {
        object["output_index"] = json!(self.items.len());
        if let Some(id) = id {
            object["item_id"] = json!(id);
            object["content_index"] = json!(0);
        }
        self.event(kind, object)
    }

    fn response(&self, status: &str) -> Value {
        let mut object = self.base.clone();
        object["status"] = json!(status);
        object["output"] = json!(self.items);
        object
    }

    /// More text of a thought or of what is said.
    fn add(&mut self, is_thought: bool, text: &str, logprobs: Vec<Value>, running: &Running) -> String {
        let mut out = String::new();
        let other = self.open.as_ref().is_some_and(|o| o.is_thought != is_thought);
        if other {
            out += &self.close("completed", running);
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                let id = format!("{}_{:016x}", if is_thought { "rs" } else { "msg" }, any_seed());
                let open = Open { id, is_thought, text: String::new(), logprobs: Vec::new() };
                out += &self.of_item(
                    "response.output_item.added",
                    json!({ "item": open.item("in_progress") }),
                    None,
                );
                out += &self.of_item(
                    "response.content_part.added",
                    json!({ "part": open.part() }),
                    Some(&open.id),
                );
                open
            }
        };
        open.text.push_str(text);
        if !text.is_empty() || !logprobs.is_empty() {
            let mut delta = json!({ "delta": text });
            if !is_thought {
                delta["logprobs"] = json!(logprobs);
            }
            out += &self.of_item(&open.event("delta"), delta, Some(&open.id));
        }
        open.logprobs.extend(logprobs);
        self.open = Some(open);
        out
    }

    fn close(&mut self, status: &str, running: &Running) -> String {
        let Some(open) = self.open.take() else { return String::new() };
        let mut done = json!({ "text": open.text });
        if open.is_thought {
            // What a text is in tokens is what it was made of, but for the marks around it.
            let tokens = running.live().tokenizer.encode(&open.text, false, false);
            self.thought += tokens.map_or(0, |t| t.len());
        } else {
            done["logprobs"] = json!(open.logprobs);
        }
        let mut out = self.of_item(&open.event("done"), done, Some(&open.id));
        out += &self.of_item("response.content_part.done", json!({ "part": open.part() }), Some(&open.id));
        let item = open.item(status);
        out += &self.of_item("response.output_item.done", json!({ "item": item }), None);
        self.items.push(item);
        out
    }

    /// The whole response, with its counts.
    fn whole(&self, running: &Running) -> Value {
        let cut = match self.finish {
            Some(Finish::Length) => Some("max_output_tokens"),
            Some(Finish::Deadline) => Some("deadline"),
            _ => None,
        };
        let mut object = self.response(if cut.is_some() { "incomplete" } else { "completed" });
        object["incomplete_details"] = cut.map_or(Value::Null, |reason| json!({ "reason": reason }));
        let u = &running.usage;
        object["usage"] = json!({
            "input_tokens": u.prompt,
            "input_tokens_details": { "cached_tokens": u.cached, "cache_write_tokens": 0 },
            "output_tokens": u.generated,
            "output_tokens_details": { "reasoning_tokens": self.thought.min(u.generated) },
            "total_tokens": u.prompt + u.generated,
        });
        if let Some(energy) = &u.energy {
            object["usage"]["tegu"] = energy.shown(u.generated);
        }
        object
    }
}

impl Render for Said {
    fn head(&mut self) -> String {
        let response = json!({ "response": self.response("in_progress") });
        self.event("response.created", response.clone()) + &self.event("response.in_progress", response)
    }

    fn piece(&mut self, running: &Running, _: usize, d: &Delta, finish: Option<Finish>) -> String {
        let mut out = String::new();
        if self.logprobs {
            let tokenizer = &running.live().tokenizer;
            self.silent.extend(d.tokens.iter().map(|s| chat_logprob(tokenizer, s)));
        }
        if !d.reasoning.is_empty() {
            if d.content.is_empty() {
                self.silent.clear();
            }
            out += &self.add(true, &d.reasoning, Vec::new(), running);
        }
        // An answer of nothing is an empty message.
        let is_empty = finish.is_some() && self.items.is_empty() && self.open.is_none();
        if !d.content.is_empty() || is_empty {
            let logprobs = std::mem::take(&mut self.silent);
            out += &self.add(false, &d.content, logprobs, running);
        }
        if let Some(finish) = finish {
            self.finish = Some(finish);
            let cut = matches!(finish, Finish::Length | Finish::Deadline);
            out += &self.close(if cut { "incomplete" } else { "completed" }, running);
        }
        out
    }

    fn end(&mut self, running: &Running) -> String {
        let response = self.whole(running);
        let kind =
            if response["status"] == "completed" { "response.completed" } else { "response.incomplete" };
        self.event(kind, json!({ "response": response }))
    }

    fn failed(&mut self, fail: &Fail) -> String {
        let mut response = self.response("failed");
        response["error"] = json!({ "code": fail.code.unwrap_or("server_error"), "message": fail.message });
        self.event("response.failed", json!({ "response": response }))
    }
}
