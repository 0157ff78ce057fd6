//! From a request's line and headers to its handler; who may ask; how long answers took.

use super::body::{self, json as json_response};
use super::fail::Fail;
use super::fields::Answered;
use super::{Context, Server, chat, completions, llama, ollama, power, responses, small};
use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode, header};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Who asks.
#[derive(Debug, Clone)]
pub struct Peer {
    /// The process or address.
    pub client: String,
    /// It came over the port, which any local program and any web page may reach.
    pub is_tcp: bool,
}

/// The paths that are served, for `/metrics` and for hints.
const PATHS: &[(&str, &str)] = &[
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/completion"),
    ("POST", "/infill"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("POST", "/apply-template"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/power"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/api/show"),
];

/// Answers one request, whatever it is.
pub async fn answer(server: Arc<Server>, peer: Peer, request: Request<Body>) -> Response<Body> {
    let began = Instant::now();
    let path = named(request.uri().path()).to_owned();
    let route = route(&path);
    let ollama = path.starts_with("/api/");
    let answered = dispatch(server.clone(), &peer, request, &path).await;
    let response = answered.unwrap_or_else(|fail| {
        log::info!("{} {path}: {} {}", peer.client, fail.status.as_u16(), fail.message);
        fail.response(ollama)
    });
    server.metrics.answered(route, response.status().as_u16(), began.elapsed());
    response
}

/// A path by the name it has here: clients made for llama.cpp's server leave OpenAI's prefix away.
fn named(path: &str) -> &str {
    match path {
        "/chat/completions" => "/v1/chat/completions",
        "/responses" => "/v1/responses",
        "/embeddings" => "/v1/embeddings",
        "/models" => "/v1/models",
        "/v1/health" => "/health",
        "/completions" => "/completion",
        other => other,
    }
}

/// The name of a path in metrics: of a bounded set, whatever clients ask for.
fn route(path: &str) -> &'static str {
    let known = PATHS.iter().map(|(_, p)| *p).find(|p| *p == path);
    known.unwrap_or(match path {
        p if p.starts_with("/v1/models/") => "/v1/models",
        p if p.starts_with("/v1/requests/") => "/v1/requests",
        p if p.starts_with("/v1/sessions/") => "/v1/sessions",
        _ => "other",
    })
}

async fn dispatch(
    server: Arc<Server>,
    peer: &Peer,
    request: Request<Body>,
    path: &str,
) -> Answered<Response<Body>> {
    let (parts, body) = request.into_parts();
    // Answered before anything that could wait, and to anyone: they say nothing but how the daemon is.
    if parts.method == Method::GET || parts.method == Method::HEAD {
        match path {
            "/health" | "/health/ready" => return Ok(ready(&server)),
            // What Ollama's clients look for first.
            "/" => return Ok(body::typed(StatusCode::OK, "text/plain; charset=utf-8", "Tegu is running\n")),
            "/health/live" => return Ok(json_response(StatusCode::OK, &json!({ "status": "ok" }))),
            _ => {}
        }
    }
    if peer.is_tcp {
        admit(&server, &parts.headers)?;
    }
    let settings = server.settings();
    let header = |name: &str| parts.headers.get(name).and_then(|v| v.to_str().ok());
    let client = header("x-tegu-client").map_or_else(|| peer.client.clone(), crate::units::one_line);
    let body_bytes = header("content-length").and_then(|v| v.parse().ok()).unwrap_or(usize::MAX);
    let context = Context { client, deadline: Instant::now() + settings.request_within, body_bytes };
    let waits = header("expect").is_some();
    let read = async || -> Answered<Value> {
        body::parse(&body::read(body, waits, settings.body_bytes, settings.body_within).await?)
    };
    // The server leaves the body away itself.
    let method = if parts.method == Method::HEAD { "GET" } else { parts.method.as_str() };
    match (method, path) {
        ("GET", "/metrics") => Ok(small::metrics(&server)),
        ("GET", "/v1/models") => small::models(&server),
        ("GET", p) if p.starts_with("/v1/models/") => small::model(&server, &p["/v1/models/".len()..]),
        ("POST", "/v1/chat/completions") => chat::complete(server, context, read().await?).await,
        ("POST", "/v1/completions") => completions::complete(server, context, read().await?).await,
        ("POST", "/v1/responses") => responses::create(server, context, read().await?).await,
        ("POST", "/v1/embeddings") => small::embeddings(server, context, read().await?).await,
        ("POST", "/completion") => llama::completion(server, context, read().await?).await,
        ("POST", "/infill") => Err(llama::no_infill()),
        ("GET", "/slots") => llama::slots(server).await,
        ("GET", "/props") => llama::props(server).await,
        ("POST", "/apply-template") => llama::apply_template(server, read().await?).await,
        ("POST", "/tokenize") => small::tokenize(server, read().await?).await,
        ("POST", "/detokenize") => small::detokenize(server, read().await?).await,
        ("GET", "/v1/requests") => small::requests(server).await,
        ("DELETE", p) if p.starts_with("/v1/requests/") => {
            small::cancel(server, &p["/v1/requests/".len()..]).await
        }
        ("GET", "/v1/power") => power::status(&server).await,
        ("POST", "/v1/power") => power::switch(&server, read().await?).await,
        ("GET", "/v1/sessions") => small::sessions(server).await,
        (m, p) if p.starts_with("/v1/sessions/") => {
            small::one_session(server, m, &p["/v1/sessions/".len()..]).await
        }
        ("POST", "/api/chat") => ollama::chat(server, context, read().await?).await,
        ("POST", "/api/generate") => ollama::generate(server, context, read().await?).await,
        ("POST", "/api/embed") => ollama::embed(server, context, read().await?).await,
        ("POST", "/api/embeddings") => ollama::embeddings(server, context, read().await?).await,
        ("POST", "/api/show") => ollama::show(server, read().await?).await,
        ("GET", "/api/tags") => ollama::tags(&server),
        ("GET", "/api/ps") => ollama::ps(&server),
        ("GET", "/api/version") => Ok(ollama::version()),
        (method, path) => Err(unknown(method, path)),
    }
}

fn unknown(method: &str, path: &str) -> Fail {
    let path = crate::units::one_line(path);
    match PATHS.iter().find(|(_, p)| *p == path) {
        Some((m, p)) => {
            let message = format!("method: {p} takes {m}, found {method}");
            Fail::new(StatusCode::METHOD_NOT_ALLOWED, message)
        }
        None => {
            let known: Vec<&str> = PATHS.iter().map(|(_, p)| *p).collect();
            let hint = crate::config::nearest(&path, &known)
                .map_or(String::new(), |n| format!(" (did you mean {n}?)"));
            Fail::new(StatusCode::NOT_FOUND, format!("path: {path} is not served{hint}")).code("unknown_path")
        }
    }
}

/// Ready: not ending, not loading. A model that is not in memory is loaded by the request that wants it.
fn ready(server: &Server) -> Response<Body> {
    let (status, word) = if server.stopping.load(Ordering::Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "stopping")
    } else if server.models.is_loading() || server.starting.load(Ordering::Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "loading")
    } else {
        (StatusCode::OK, "ok")
    };
    let model = server.models.peek().map(|l| l.name.clone());
    json_response(
        status,
        &json!({ "status": word, "model": model, "uptime_s": server.started.elapsed().as_secs() }),
    )
}

/// Who may ask over the port. With a token: who shows it. Without: local programs, but no web page that the user happens to
/// look at: browsers say where a page came from, and a name that was made to resolve to this machine shows in `Host`.
fn admit(server: &Server, headers: &axum::http::HeaderMap) -> Answered<()> {
    let text = |name: header::HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
    let settings = server.settings();
    let Some(token) = &settings.token else {
        let host = text(header::HOST).unwrap_or("localhost");
        let name = host
            .rsplit_once(':')
            .map_or(host, |(name, port)| if port.chars().all(|c| c.is_ascii_digit()) { name } else { host });
        let local = name == "localhost"
            || name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|a| a.is_loopback());
        if !local || headers.contains_key(header::ORIGIN) {
            let message = "host: expected a local program, found a web page or another name; set serve.token_file to admit it";
            return Err(Fail::new(StatusCode::FORBIDDEN, message));
        }
        return Ok(());
    };
    let shown = text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
    if same(shown.trim().as_bytes(), token.as_bytes()) {
        return Ok(());
    }
    let message = "authorization: expected the bearer token of this daemon";
    Err(Fail::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key"))
}

/// Compares in a time that does not tell where two texts begin to differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differing = a.iter().zip(b).fold(0, |d, (x, y)| d | (x ^ y));
    a.len() == b.len() && std::hint::black_box(differing) == 0
}

#[test]
fn unknown_paths_are_named_and_counted_together() {
    assert_eq!(route("/v1/models/x"), "/v1/models");
    assert_eq!(route("/whatever"), "other");
    assert_eq!(route(named("/chat/completions")), "/v1/chat/completions");
    assert!(unknown("GET", "/v1/chat/completion").message.contains("did you mean /v1/chat/completions?"));
    assert_eq!(unknown("GET", "/tokenize").status, 405);
    assert!(same(b"abc", b"abc") && !same(b"abc", b"abd") && !same(b"abc", b"ab") && !same(b"", b"a"));
}
