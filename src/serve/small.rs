//! The endpoints that answer at once or nearly so: models, requests, metrics, tokens, embeddings.

use super::body::{json as json_response, typed};
use super::completions::{Input, inputs};
use super::fail::Fail;
use super::fields::{Answered, Fields};
use super::models::{Known, Lease};
use super::prompts::{TOKENIZE_BYTES_MAX, tokenizing};
use super::{Context, Server};
use crate::engine::Class;
use crate::engine::service::{Reply, RequestInfo, SessionInfo, Submit, Work};
use crate::units::TokenId;
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Value, json};
use std::future::poll_fn;
use std::sync::Arc;

/// Texts of one embeddings request.
pub const EMBEDDINGS_MAX: usize = 256;

fn ok(value: &Value) -> Response<Body> {
    json_response(StatusCode::OK, value)
}

/// `/metrics`
pub fn metrics(server: &Server) -> Response<Body> {
    typed(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", server.metrics.text(server))
}

fn shown(server: &Server, k: &Known) -> Value {
    let live = server.models.peek().filter(|l| l.name == k.name);
    json!({
        "id": k.name, "object": "model", "created": k.changed_unix_s, "owned_by": "tegu",
        "loaded": live.is_some(), "file_bytes": k.file_bytes,
        "context_tokens": live.map(|l| l.handle.context_tokens()),
    })
}

/// `/v1/models`
pub fn models(server: &Server) -> Answered<Response<Body>> {
    let data: Vec<Value> = server.models.known()?.iter().map(|k| shown(server, k)).collect();
    Ok(ok(&json!({ "object": "list", "data": data })))
}

/// `/v1/models/{name}`
pub fn model(server: &Server, name: &str) -> Answered<Response<Body>> {
    let known = server.models.known()?;
    let found = known.iter().find(|k| k.name == name);
    let found = found.ok_or_else(|| {
        let message = format!("model: none is named {:?}", crate::units::one_line(name));
        Fail::new(StatusCode::NOT_FOUND, message).code("model_not_found")
    })?;
    Ok(ok(&shown(server, found)))
}

/// `/v1/requests`: what runs and waits.
pub async fn requests(server: Arc<Server>) -> Answered<Response<Body>> {
    let live = server.models.peek();
    let model = live.as_ref().map(|l| l.name.clone());
    // The engine answers between two steps.
    let list = super::blocking(move || Ok(live.map_or(Ok(Vec::new()), |l| l.handle.requests())?)).await?;
    let one = |r: &RequestInfo| {
        json!({
            "id": r.id, "client": r.client, "class": format!("{:?}", r.class).to_lowercase(),
            "prompt_tokens": r.prompt_tokens, "read_tokens": r.read_tokens, "generated_tokens": r.generated,
            "age_ms": r.age.as_millis() as u64,
        })
    };
    let data: Vec<Value> = list.iter().map(one).collect();
    Ok(ok(&json!({ "object": "list", "model": model, "data": data })))
}

/// `DELETE /v1/requests/{id}`
pub async fn cancel(server: Arc<Server>, id: &str) -> Answered<Response<Body>> {
    let number: u64 = id.parse().map_err(|_| Fail::field("id", "a request's number", format!("{id:?}")))?;
    let live = server.models.peek();
    let found = super::blocking(move || Ok(live.map_or(Ok(false), |l| l.handle.cancel(number))?)).await?;
    if !found {
        return Err(Fail::new(StatusCode::NOT_FOUND, format!("id: no open request has the number {number}")));
    }
    Ok(ok(&json!({ "id": number, "cancelled": true })))
}

fn session(info: &SessionInfo) -> Value {
    json!({
        "id": info.name, "object": "session", "tokens": info.tokens, "cached_tokens": info.cached_tokens,
        "file_bytes": info.file_bytes,
    })
}

/// `/v1/sessions`
pub async fn sessions(server: Arc<Server>) -> Answered<Response<Body>> {
    let lease = server.present_model().await?;
    let list = super::blocking(move || Ok(lease.handle.sessions()?)).await?;
    let data: Vec<Value> = list.iter().map(session).collect();
    Ok(ok(&json!({ "object": "list", "data": data })))
}

/// `/v1/sessions/{name}` to look at or delete one, `/v1/sessions/{name}/save` and `…/restore` for its file.
pub async fn one_session(server: Arc<Server>, method: &str, path: &str) -> Answered<Response<Body>> {
    let (name, verb) = path.split_once('/').unwrap_or((path, ""));
    let (name, method, verb) = (name.to_owned(), method.to_owned(), verb.to_owned());
    let lease = server.present_model().await?;
    super::blocking(move || {
        let missing = || {
            let message = format!("session: none is named {:?}", crate::units::one_line(&name));
            Fail::new(StatusCode::NOT_FOUND, message).code("session_not_found")
        };
        let handle = &lease.handle;
        crate::engine::service::check_session_name(&name)?;
        let known = handle.sessions()?.into_iter().find(|s| s.name == name).ok_or_else(missing)?;
        let info = match (method.as_str(), verb.as_str()) {
            ("GET", "") => known,
            ("DELETE", "") => handle.delete_session(&name)?,
            ("POST", "save") => handle.save_session(&name)?,
            ("POST", "restore") => handle.restore_session(&name)?,
            _ => {
                let message = "method: expected GET or DELETE, or POST to …/save or …/restore";
                return Err(Fail::new(StatusCode::METHOD_NOT_ALLOWED, message));
            }
        };
        Ok(ok(&session(&info)))
    })
    .await
}

/// `/tokenize`
pub async fn tokenize(server: Arc<Server>, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?;
    let text = match (f.text("content")?, f.text("prompt")?) {
        (Some(text), None) | (None, Some(text)) => text.to_owned(),
        _ => return Err(Fail::field("content", "text here or in prompt", "neither or both")),
    };
    let add_special = f.flag("add_special")?.unwrap_or(false);
    let parse_special = f.flag("parse_special")?.unwrap_or(true);
    let with_pieces = f.flag("with_pieces")?.unwrap_or(false);
    f.done(&[])?;
    if text.len() > TOKENIZE_BYTES_MAX {
        let expected = format!("at most {TOKENIZE_BYTES_MAX} bytes of text");
        return Err(Fail::field("content", expected, text.len()).code("context_length_exceeded"));
    }
    let lease = server.model(model).await?;
    let object = tokenizing(text.len(), move || {
        let ids = lease.tokenizer.encode(&text, parse_special, add_special)?;
        let mut object = json!({ "tokens": ids, "count": ids.len() });
        if with_pieces {
            let piece = |id: &TokenId| String::from_utf8_lossy(lease.tokenizer.token_bytes(*id)).into_owned();
            object["pieces"] = ids.iter().map(piece).collect();
        }
        Ok(object)
    });
    Ok(ok(&object.await?))
}

/// `/detokenize`
pub async fn detokenize(server: Arc<Server>, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?;
    let list = f.array("tokens")?.ok_or_else(|| Fail::field("tokens", "an array of token ids", "nothing"))?;
    let skip_control = f.flag("skip_special")?.unwrap_or(false);
    f.done(&[])?;
    let lease = server.model(model).await?;
    let vocab = lease.handle.vocab();
    let id = |(i, v): (usize, &Value)| {
        let id = v.as_u64().filter(|&n| n < vocab as u64);
        let expected = format!("a token id below {vocab}");
        id.map(|n| n as TokenId)
            .ok_or_else(|| Fail::field(format!("tokens[{i}]"), expected, super::fields::found(v)))
    };
    let ids: Vec<TokenId> = list.iter().enumerate().map(id).collect::<Answered<_>>()?;
    let text = lease.tokenizer.decode(&ids, skip_control);
    Ok(ok(&json!({ "content": text, "prompt": text })))
}

/// `/v1/embeddings`
pub async fn embeddings(server: Arc<Server>, context: Context, body: Value) -> Answered<Response<Body>> {
    let f = Fields::of_body(&body)?;
    let model = f.text("model")?.map(str::to_owned);
    let inputs = inputs("input", f.get("input"), EMBEDDINGS_MAX)?;
    let base64 = f.word("encoding_format", &["float", "base64"])? == Some("base64");
    let client = f.text("user")?.map_or(context.client.clone(), crate::units::one_line);
    let lease = Arc::new(server.model(model.as_deref()).await?);
    let width = lease.handle.hidden() as u64;
    f.count("dimensions", width, width)?;
    f.done(&[])?;
    let mut data = Vec::with_capacity(inputs.len());
    let mut tokens = 0;
    // One after the other: a long list takes one place of the queue.
    for (i, input) in inputs.into_iter().enumerate() {
        let (mean, read) = embed(&lease, ("input", i), input, &client, context.deadline).await?;
        tokens += read;
        let value = if base64 { json!(base64_of(&mean)) } else { json!(mean) };
        data.push(json!({ "object": "embedding", "index": i, "embedding": value }));
    }
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    Ok(ok(&json!({ "object": "list", "data": data, "model": lease.name, "usage": usage })))
}

/// A text's embedding, of length 1, and how many tokens it had. `at`: the request's field, and which of its texts it is.
pub async fn embed(
    lease: &Arc<Lease>,
    at: (&str, usize),
    input: Input,
    client: &str,
    deadline: std::time::Instant,
) -> Answered<(Vec<f32>, usize)> {
    let live = lease.clone();
    let prompt = tokenizing(input.text_bytes(), move || input.ids(&live)).await?;
    let tokens = prompt.len();
    if tokens == 0 {
        return Err(Fail::field(format!("{}[{}]", at.0, at.1), "at least one token", "none"));
    }
    let submit = Submit {
        prompt,
        work: Work::Embed,
        class: Class::Normal,
        deadline: Some(deadline),
        client: client.to_owned(),
        slide: None,
        session: None,
    };
    let mut stream = lease.handle.submit(submit)?;
    let mut mean = None;
    while let Some(reply) = poll_fn(|cx| stream.poll_next(cx)).await {
        if let Reply::Embedding { mean: m, .. } = reply? {
            mean = Some(m);
        }
    }
    // A deadline is the one way to end without a result or an error.
    let mut mean = mean.ok_or_else(|| Fail::new(StatusCode::GATEWAY_TIMEOUT, "the deadline passed"))?;
    let length = mean.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if length > 0.0 {
        mean.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok((mean, tokens))
}

/// Little-endian f32 in base64 (RFC 4648), as OpenAI's clients ask for them.
fn base64_of(values: &[f32]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= three.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

#[test]
fn base64_is_the_standard_one() {
    assert_eq!(base64_of(&[]), "");
    // 1.0 is 00 00 80 3f, 2.0 is 00 00 00 40.
    assert_eq!(base64_of(&[1.0]), "AACAPw==");
    assert_eq!(base64_of(&[1.0, 2.0]), "AACAPwAAAEA=");
}
