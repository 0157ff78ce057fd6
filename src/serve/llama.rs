//! llama.cpp's own endpoints, for clients that speak only those: `/completion`, `/props`, `/apply-template`. The same work as
//! OpenAI's in other words.

use super::answer::{Delta, Finish, Reading, chat_logprob};
use super::body::json as json_response;
use super::chat::{count, event};
use super::completions::inputs;
use super::fail::Fail;
use super::fields::{Answered, Fields};
use super::generate::Running;
use super::lines::{Lines, answer};
use super::messages;
use super::options::{IGNORED, Options, TOP_LOGPROBS_MAX};
use super::prompts::tokenizing;
use super::{Context, Server};
use crate::sample::Form;
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/completion`
pub async fn completion(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?.map(str::to_owned);
    let mut options = Options::read(&f, &server.settings())?;
    if options.n != 1 {
        return Err(Fail::field("n", "1: /v1/completions has more", options.n));
    }
    // 0 asks for none.
    let probs = f.count("n_probs", 0, TOP_LOGPROBS_MAX)?.filter(|n| *n > 0);
    options.params.logprobs = probs.map(|n| n as usize);
    if let Some(schema) = f.get("json_schema") {
        if options.form.is_some() {
            return Err(Fail::field("json_schema", "no other form besides grammar", "both"));
        }
        options.form = Some((Form::JsonSchema(schema.clone()), "json_schema"));
    }
    let mut prompts = inputs("prompt", f.get("prompt"), 1)?;
    f.done(IGNORED)?;
    let lease = server.model(model.as_deref()).await?;
    let name = lease.name.clone();
    let stream = options.stream;
    let running = tokenizing(prompts[0].text_bytes(), move || {
        let ids = prompts.remove(0).ids(&lease)?;
        let reading = Reading {
            stops: std::mem::take(&mut options.stops),
            logprobs: probs.is_some(),
            continues: true,
            ..Reading::default()
        };
        Running::start(lease, vec![ids], &options, &reading, &context.client, context.deadline)
    });
    answer(running.await?, Events { name }, stream).await
}

struct Events {
    name: String,
}

impl Lines for Events {
    const STREAM: &'static str = "text/event-stream";

    fn said(&mut self, d: &Delta, running: &Running) -> Value {
        let tokens: Vec<u32> = d.tokens.iter().map(|s| s.token).collect();
        let mut object = json!({ "index": 0, "content": d.content, "tokens": tokens, "stop": false });
        if !d.tokens.is_empty() {
            let tokenizer = &running.live().tokenizer;
            let one = |s: &crate::sample::Sampled| {
                let mut entry = chat_logprob(tokenizer, s);
                entry["id"] = json!(s.token);
                entry
            };
            object["completion_probabilities"] = d.tokens.iter().map(one).collect();
        }
        object
    }

    fn close(&mut self, object: &mut Value, running: &Running, finish: Finish) {
        let u = &running.usage;
        count(object, u);
        object["timings"]["prompt_n"] = json!(u.read);
        object["timings"]["predicted_n"] = json!(u.generated);
        object["stop"] = json!(true);
        object["model"] = json!(self.name);
        object["stop_type"] = json!(match finish {
            Finish::Stop | Finish::ToolCalls => "eos",
            Finish::StopText => "word",
            Finish::Length => "limit",
            Finish::Deadline => "deadline",
        });
        object["truncated"] = json!(false);
        object["tokens_predicted"] = json!(u.generated);
        object["tokens_evaluated"] = json!(u.prompt);
        object["tokens_cached"] = json!(u.cached);
    }

    fn error(&mut self, fail: &Fail) -> Value {
        json!({ "error": fail.object() })
    }

    fn line(object: &Value) -> String {
        event(object)
    }
}

/// `/props`
pub async fn props(server: Arc<Server>) -> Answered<Response<Body>> {
    let live = server.present_model().await?;
    let sample = &server.settings().sample;
    let params = json!({
        "temperature": sample.temp, "top_k": sample.top_k, "top_p": sample.top_p, "min_p": sample.min_p,
        "repeat_penalty": sample.repeat_penalty,
    });
    let object = json!({
        "default_generation_settings": { "n_ctx": live.handle.context_tokens(), "params": params },
        "total_slots": live.handle.budget().max_batch,
        "model_alias": live.name,
        "chat_template": live.template.as_ref().map_or("", |t| t.source(false)),
        "modalities": { "vision": false, "audio": false },
        "build_info": concat!("tegu-", env!("CARGO_PKG_VERSION")),
    });
    Ok(json_response(StatusCode::OK, &object))
}

/// `/slots`: as many as sequences are generated at a time, with the open requests in them. Nothing is loaded for it.
pub async fn slots(server: Arc<Server>) -> Answered<Response<Body>> {
    let Some(live) = server.models.peek() else { return Ok(json_response(StatusCode::OK, &json!([]))) };
    let (slots, context) = (live.handle.budget().max_batch, live.handle.context_tokens());
    // The engine answers between two steps. Those beyond the slots wait for one.
    let open = super::blocking(move || Ok(live.handle.requests()?)).await?;
    let slot = |id: usize| match open.get(id) {
        None => json!({ "id": id, "n_ctx": context, "is_processing": false }),
        Some(r) => json!({
            "id": id, "n_ctx": context, "is_processing": true, "id_task": r.id, "client": r.client,
            "n_prompt_tokens": r.prompt_tokens, "n_prompt_tokens_processed": r.read_tokens,
            "next_token": { "n_decoded": r.generated },
        }),
    };
    Ok(json_response(StatusCode::OK, &(0..slots).map(slot).collect()))
}

/// `/infill` wants a vocabulary with marks for what is before and after a gap.
pub fn no_infill() -> Fail {
    let message = "path: /infill is not served: filling a gap takes a model with tokens for it, and those are not read yet; \
                   /completion goes on from a text";
    Fail::new(StatusCode::NOT_IMPLEMENTED, message).code("not_supported")
}

/// `/apply-template`: the prompt that a chat would have.
pub async fn apply_template(server: Arc<Server>, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?.map(str::to_owned);
    let tools = messages::tools(&f)?;
    let list = messages::messages(&f, false)?;
    let extra = f.map("chat_template_kwargs")?;
    f.done(&[])?;
    let lease = server.model(model.as_deref()).await?;
    let prompt = super::blocking(move || messages::prompt(&lease, list, &tools, extra)).await?;
    Ok(json_response(StatusCode::OK, &json!({ "prompt": prompt.text })))
}
