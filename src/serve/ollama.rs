//! Ollama's endpoints, for clients that speak only those: `/api/chat`, `/api/generate`, `/api/tags` and what they look up
//! before. The same requests as OpenAI's in other words; answers are lines of JSON.

use super::answer::{Delta, Finish, Reading, chat_logprob};
use super::body::json as json_response;
use super::chat::Request;
use super::completions::{Input, inputs};
use super::fail::Fail;
use super::fields::{Answered, Fields, found};
use super::generate::Running;
use super::lines::{Lines, answer};
use super::messages;
use super::models::{Kind, Known, Lease};
use super::options::{Options, TOP_LOGPROBS_MAX};
use super::prompts::{prompt_ids, tokenizing};
use super::small::{self, EMBEDDINGS_MAX};
use super::{Context, Server};
use crate::engine::Class;
use crate::limits::STOPS_MAX;
use crate::sample::Form;
use crate::text::ToolPiece;
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Options of Ollama's that are about how a model is loaded, which here the settings decide.
const LOAD_OPTIONS: &[&str] = &[
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "f16_kv",
    "vocab_only",
    "numa",
    "num_keep",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "penalize_newline",
    "tfs_z",
    "draft_num_predict",
];

/// Ollama names a version of a model after a colon.
fn plain(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

/// Reads what both endpoints share: `options`, `format`, `stream`.
fn options(f: &Fields, server: &Server) -> Answered<Options> {
    let empty = json!({});
    let settings = server.settings();
    let o = Fields::of("options".into(), f.get("options").unwrap_or(&empty))?;
    // The sampling fields have OpenAI's and llama.cpp's names.
    let mut options = Options::read(&o, &settings)?;
    // Below 0: until it ends.
    options.max_tokens =
        o.real("num_predict", -2.0, 1e7)?.and_then(|n| usize::try_from(n as i64).ok()).or(options.max_tokens);
    options.stops = o.texts("stop", STOPS_MAX)?;
    options.form = match f.get("format") {
        None => None,
        Some(Value::String(s)) if s.is_empty() => None,
        Some(Value::String(s)) if s == "json" => Some((Form::JsonObject, "format")),
        Some(schema) if schema.is_object() => Some((Form::JsonSchema(schema.clone()), "format")),
        Some(other) => return Err(Fail::field("format", "\"json\" or a JSON schema", found(other))),
    };
    // It streams unless told not to.
    options.stream = f.flag("stream")?.unwrap_or(true);
    options.class = Class::Interactive;
    let wanted = f.flag("logprobs")?.unwrap_or(false);
    let top = f.count("top_logprobs", 0, TOP_LOGPROBS_MAX)?.unwrap_or(0);
    options.params.logprobs = wanted.then_some(top as usize);
    o.done(LOAD_OPTIONS)?;
    Ok(options)
}

/// `think`: true, false, or a level.
fn extra(f: &Fields) -> Answered<Map<String, Value>> {
    let mut extra = Map::new();
    match f.get("think") {
        None => {}
        Some(Value::Bool(on)) => drop(extra.insert("enable_thinking".into(), json!(on))),
        Some(Value::String(level)) => drop(extra.insert("reasoning_effort".into(), json!(level))),
        Some(other) => return Err(Fail::field("think", "true, false or a level", found(other))),
    }
    Ok(extra)
}

/// `/api/chat`
pub async fn chat(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = plain(f.required_text("model")?).to_owned();
    let options = options(&f, &server)?;
    let empty = f.get("messages").and_then(Value::as_array).is_none_or(Vec::is_empty);
    let tools = messages::tools(&f)?;
    let extra = extra(&f)?;
    let list = if empty { Vec::new() } else { messages::messages(&f, true)? };
    let gives_back = gives_back(&f)?;
    f.done(&["truncate", "shift", "debug_render_only"])?;
    let lease = server.model(Some(&model)).await?;
    let name = lease.name.clone();
    if empty {
        return Ok(empty_request(&server, lease, true, gives_back).await);
    }
    let stream = options.stream;
    let request = Request::of(options, list, tools, extra, Some(model))?;
    let running = tokenizing(context.body_bytes, move || request.start(lease, &context)).await?;
    answer(running, Spoken { name, chat: true, began: std::time::Instant::now() }, stream).await
}

/// `/api/generate`
pub async fn generate(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = plain(f.required_text("model")?).to_owned();
    let mut options = options(&f, &server)?;
    let prompt = f.text("prompt")?.unwrap_or_default().to_owned();
    let system = f.text("system")?.unwrap_or_default().to_owned();
    let raw = f.flag("raw")?.unwrap_or(false);
    let gives_back = gives_back(&f)?;
    let extra = extra(&f)?;
    for name in ["suffix", "template"] {
        if f.text(name)?.is_some_and(|t| !t.is_empty()) {
            return Err(Fail::field(name, "nothing: not supported", "text"));
        }
    }
    if let Some(images) = f.array("images")?.filter(|i| !i.is_empty()) {
        return Err(Fail::field("images", "none: the model reads text", images.len()));
    }
    f.done(&["context", "truncate", "shift", "debug_render_only", "width", "height", "steps"])?;
    let lease = server.model(Some(&model)).await?;
    let name = lease.name.clone();
    if prompt.is_empty() {
        return Ok(empty_request(&server, lease, false, gives_back).await);
    }
    let stream = options.stream;
    let running = tokenizing(prompt.len() + system.len(), move || {
        if raw {
            let ids = prompt_ids(&lease, &prompt, true, true)?;
            let stops = std::mem::take(&mut options.stops);
            let logprobs = options.params.logprobs.is_some();
            let reading = Reading { stops, logprobs, continues: true, ..Reading::default() };
            return Running::start(lease, vec![ids], &options, &reading, &context.client, context.deadline);
        }
        let said = |role: &str, content: &str| json!({ "role": role, "content": content });
        let mut list = Vec::new();
        if !system.is_empty() {
            list.push(said("system", &system));
        }
        list.push(said("user", &prompt));
        Request::of(options, list, Vec::new(), extra, Some(model))?.start(lease, &context)
    });
    answer(running.await?, Spoken { name, chat: false, began: std::time::Instant::now() }, stream).await
}

/// `keep_alive`: how long the model stays in memory, in seconds or as a duration; below 0 for ever. Here the settings say how
/// long it does (`serve.idle_unload_s`), but for 0, by which clients ask to give it back at once.
fn gives_back(f: &Fields) -> Answered<bool> {
    let wrong = |v: &Value| Fail::field("keep_alive", "seconds, or a duration such as \"5m\"", found(v));
    match f.get("keep_alive") {
        None => Ok(false),
        Some(Value::Number(n)) => Ok(n.as_f64() == Some(0.0)),
        Some(v @ Value::String(text)) => {
            let digits = text.trim_start_matches(['-', '+']);
            let known = digits.starts_with(|c: char| c.is_ascii_digit())
                && digits.chars().all(|c| c.is_ascii_digit() || ".hmsuµn".contains(c));
            let is_zero = !digits.contains(|c: char| ('1'..='9').contains(&c));
            if known { Ok(is_zero) } else { Err(wrong(v)) }
        }
        Some(v) => Err(wrong(v)),
    }
}

/// An empty request asks for the model alone: that it be there, or that it be given back.
async fn empty_request(server: &Server, lease: Lease, chat: bool, gives_back: bool) -> Response<Body> {
    let lines = Spoken { name: lease.name.clone(), chat, began: std::time::Instant::now() };
    drop(lease);
    if gives_back {
        // Others that use it keep it.
        server.models.unload_idle(std::time::Duration::ZERO).await;
    }
    let mut object = lines.object(&Delta::default());
    object["done"] = json!(true);
    object["done_reason"] = json!(if gives_back { "unload" } else { "load" });
    json_response(StatusCode::OK, &object)
}

/// `/api/embed`
pub async fn embed(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let began = std::time::Instant::now();
    let f = Fields::of_body(&body)?;
    let model = plain(f.required_text("model")?).to_owned();
    let inputs = inputs("input", f.get("input"), EMBEDDINGS_MAX)?;
    gives_back(&f)?;
    let lease = Arc::new(server.model(Some(&model)).await?);
    let width = lease.handle.hidden() as u64;
    f.count("dimensions", width, width)?;
    f.done(&["truncate", "options"])?;
    let (mut all, mut tokens) = (Vec::with_capacity(inputs.len()), 0);
    for (i, input) in inputs.into_iter().enumerate() {
        let at = ("input", i);
        let (mean, read) = small::embed(&lease, at, input, &context.client, context.deadline).await?;
        tokens += read;
        all.push(mean);
    }
    let object = json!({
        "model": lease.name, "embeddings": all, "total_duration": began.elapsed().as_nanos() as u64,
        "load_duration": 0, "prompt_eval_count": tokens,
    });
    Ok(json_response(StatusCode::OK, &object))
}

/// `/api/embeddings`: the older form, of one text.
pub async fn embeddings(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = plain(f.required_text("model")?).to_owned();
    let input = Input::Text(f.required_text("prompt")?.to_owned());
    gives_back(&f)?;
    f.done(&["options"])?;
    let lease = Arc::new(server.model(Some(&model)).await?);
    let (mean, _) = small::embed(&lease, ("prompt", 0), input, &context.client, context.deadline).await?;
    Ok(json_response(StatusCode::OK, &json!({ "embedding": mean })))
}

struct Spoken {
    name: String,
    chat: bool,
    began: std::time::Instant,
}

impl Spoken {
    fn object(&self, d: &Delta) -> Value {
        let mut object = json!({ "model": self.name, "created_at": now() });
        if !self.chat {
            object["response"] = json!(d.content);
            if !d.reasoning.is_empty() {
                object["thinking"] = json!(d.reasoning);
            }
        } else {
            let mut message = json!({ "role": "assistant", "content": d.content });
            if !d.reasoning.is_empty() {
                message["thinking"] = json!(d.reasoning);
            }
            if !d.calls.is_empty() {
                let call = |c: crate::text::ToolCall| {
                    let arguments: Value = serde_json::from_str(&c.arguments).unwrap_or_default();
                    json!({ "function": { "name": c.name, "arguments": arguments } })
                };
                message["tool_calls"] = ToolPiece::gather(&d.calls).into_iter().map(call).collect();
            }
            object["message"] = message;
        }
        object["done"] = json!(false);
        object
    }
}

impl Lines for Spoken {
    const STREAM: &'static str = "application/x-ndjson";

    /// A line, with the log-probabilities of its tokens where they were asked for.
    fn said(&mut self, d: &Delta, running: &Running) -> Value {
        let mut object = self.object(d);
        if !d.tokens.is_empty() {
            let tokenizer = &running.live().tokenizer;
            object["logprobs"] = d.tokens.iter().map(|s| chat_logprob(tokenizer, s)).collect();
        }
        object
    }

    /// Times are whole nanoseconds.
    fn close(&mut self, object: &mut Value, running: &Running, finish: Finish) {
        let (u, ns) = (&running.usage, |d: std::time::Duration| d.as_nanos() as u64);
        let reason = if finish == Finish::Length { "length" } else { "stop" };
        let more = json!({
            "done": true, "done_reason": reason,
            "total_duration": ns(self.began.elapsed()), "load_duration": 0,
            "prompt_eval_count": u.prompt, "prompt_eval_duration": ns(u.stats.prefill),
            "eval_count": u.generated, "eval_duration": ns(u.stats.decode),
        });
        for (key, value) in more.as_object().expect("an object above") {
            object[key] = value.clone();
        }
    }

    fn error(&mut self, fail: &Fail) -> Value {
        json!({ "error": fail.message })
    }

    fn line(object: &Value) -> String {
        format!("{object}\n")
    }
}

/// What is known of a model once it was loaded.
fn details(kind: Option<&Kind>) -> Value {
    let none = Kind::default();
    let k = kind.unwrap_or(&none);
    let size = match k.parameters {
        0 => String::new(),
        n if n < 1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        n => format!("{:.1}B", n as f64 / 1e9),
    };
    json!({
        "parent_model": "", "format": k.format, "family": k.architecture, "families": [k.architecture],
        "parameter_size": size, "quantization_level": k.codec,
    })
}

fn listed(k: &Known, kind: Option<&Kind>) -> Value {
    json!({
        "name": k.name, "model": k.name, "modified_at": rfc3339(k.changed_unix_s), "size": k.file_bytes,
        "digest": k.digest, "details": details(kind),
    })
}

/// `/api/tags`
pub fn tags(server: &Server) -> Answered<Response<Body>> {
    let live = server.models.peek();
    let kind = |k: &Known| live.as_ref().filter(|l| l.name == k.name).map(|l| &l.kind);
    let models: Vec<Value> = server.models.known()?.iter().map(|k| listed(k, kind(k))).collect();
    Ok(json_response(StatusCode::OK, &json!({ "models": models })))
}

/// `/api/ps`
pub fn ps(server: &Server) -> Answered<Response<Body>> {
    let mut models = Vec::new();
    if let Some(live) = server.models.peek() {
        let known = server.models.known()?;
        for k in known.iter().filter(|k| k.name == live.name) {
            let mut object = listed(k, Some(&live.kind));
            object["size"] = json!(live.planned_bytes);
            object["size_vram"] = json!(0);
            object["context_length"] = json!(live.handle.context_tokens());
            models.push(object);
        }
    }
    Ok(json_response(StatusCode::OK, &json!({ "models": models })))
}

/// `/api/version`
pub fn version() -> Response<Body> {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `/api/show`
pub async fn show(server: Arc<Server>, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let name = f.text("model")?.or(f.text("name")?).map(plain);
    f.flag("verbose")?;
    f.done(&["system", "template", "options"])?;
    let live: Lease = server.model(name).await?;
    let template = live.template.as_ref().map_or("", |t| t.source(false));
    let mut capabilities = vec!["completion"];
    capabilities.extend(live.tool_format.map(|_| "tools"));
    let context = live.handle.context_tokens();
    let object = json!({
        "modelfile": "", "parameters": "", "template": template, "details": details(Some(&live.kind)),
        "model_info": {
            "general.architecture": live.kind.architecture, "general.parameter_count": live.kind.parameters,
            "context_length": context,
        },
        "capabilities": capabilities,
    });
    Ok(json_response(StatusCode::OK, &object))
}

fn now() -> String {
    rfc3339(super::unix_s())
}

/// Seconds since 1970 as a date and time in UTC. The days are counted in years that begin in March, so that the leap day is a
/// year's last (Howard Hinnant, "chrono-compatible low-level date algorithms").
fn rfc3339(unix_s: u64) -> String {
    let (days, s) = (unix_s / 86_400 + 719_468, unix_s % 86_400);
    let (era, doe) = (days / 146_097, days % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", s / 3600, s / 60 % 60, s % 60)
}

#[test]
fn dates_are_right() {
    assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
    assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
    assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
    assert_eq!(rfc3339(1_764_374_400), "2025-11-29T00:00:00Z");
    assert_eq!(plain("a:latest"), "a");
}
