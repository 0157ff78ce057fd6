//! The daemon as its clients meet it, over its socket: what each endpoint answers, what bad clients get, and that others
//! never notice. The client here is a few lines over a Unix stream, so that every byte is the test's own.

mod bad;
mod kept;
mod others;
mod power;
mod responses;

use crate::support::data;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A daemon of the test's own, ended with it.
pub struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    /// With these lines in its settings file.
    pub fn start(settings: &str) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("c.toml"), settings).unwrap();
        let child = Daemon::spawn(&dir);
        Daemon { child, dir }.ready()
    }

    /// Killed without a word, and started again in the same folder.
    pub fn killed(mut self) -> Daemon {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Daemon::spawn(&self.dir);
        self.ready()
    }

    fn spawn(dir: &tempfile::TempDir) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tegud"));
        for name in [
            "TEGU_MODEL",
            "TEGU_LOG",
            "TEGU_SOCKET",
            "TEGU_BOARD",
            "TEGU_PROFILE",
            "HOME",
            "LISTEN_FDS",
            "NOTIFY_SOCKET",
        ] {
            command.env_remove(name);
        }
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        command
            .args(["--config", "c.toml", "--socket", "s", "-t", "2", "-m"])
            .arg(data().join("tinymoe-demo.gguf"))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the daemon starts")
    }

    fn ready(mut self) -> Daemon {
        self.wait_until("it is ready", |d| {
            d.socket().exists() && d.get("/health/ready").is_some_and(|(status, _)| status == 200)
        });
        self
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn wait_until(&mut self, what: &str, mut holds: impl FnMut(&Daemon) -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !holds(self) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{what}: the daemon ended: {ended:?}\n{}", self.log());
            assert!(Instant::now() < until, "{what}: not within a minute\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).expect("the daemon accepts");
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends bytes as they are and reads to the end.
    pub fn raw(&self, bytes: &[u8]) -> (u16, String) {
        let mut stream = self.connect();
        // A daemon that refuses early may close before it has all of it.
        let _ = stream.write_all(bytes);
        read(stream)
    }

    pub fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.raw(&[head.as_bytes(), body].concat())
    }

    pub fn get(&self, path: &str) -> Option<(u16, String)> {
        UnixStream::connect(self.socket()).ok()?;
        Some(self.send("GET", path, b""))
    }

    /// Status and JSON.
    pub fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let (status, text) = self.send("POST", path, body.to_string().as_bytes());
        let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}"));
        (status, value)
    }

    pub fn good(&self, path: &str, body: Value) -> Value {
        let (status, value) = self.post(path, body.clone());
        assert_eq!(status, 200, "{path} {body}: {value}");
        value
    }

    /// A counter or gauge without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics").unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        line.unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), id.as_str()]).status().unwrap();
        assert!(sent.success());
    }

    pub fn ended(&mut self) -> Option<i32> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes of a request, to be sent by hand.
pub fn post_bytes(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let head = "host: x\r\nconnection: close";
    format!("POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Status and body, chunks joined.
pub fn read(mut stream: UnixStream) -> (u16, String) {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return (0, text) };
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return (status, body.to_owned());
    }
    let (mut out, mut rest) = (String::new(), body);
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        let Some(chunk) = after.get(..size).filter(|_| size > 0) else { break };
        out += chunk;
        rest = after.get(size + 2..).unwrap_or("");
    }
    (status, out)
}

/// A daemon with the settings' defaults. Each test has its own: one that all share would outlive them.
fn plain() -> Daemon {
    Daemon::start("")
}

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "What is gravity?"}], "temperature": 0, "max_tokens": 16});
    for (k, v) in more.as_object().unwrap() {
        body[k] = v.clone();
    }
    body
}

/// The events of a stream, without the last, which is checked.
fn events(text: &str) -> Vec<Value> {
    let mut data: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{text}");
    data.iter().map(|d| serde_json::from_str(d).unwrap()).collect()
}

#[test]
fn a_chat_is_the_same_whole_and_streamed() {
    let d = plain();
    let whole = d.good("/v1/chat/completions", chat(json!({"logprobs": true, "top_logprobs": 2})));
    let choice = &whole["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(text.starts_with("Gravity"), "{text}");
    assert_eq!(
        (choice["finish_reason"].as_str(), &whole["usage"]["completion_tokens"]),
        (Some("length"), &json!(16))
    );
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), 16);
    assert!(
        entries.iter().all(
            |e| e["top_logprobs"].as_array().unwrap().len() == 2 && e["logprob"].as_f64().unwrap() <= 0.0
        )
    );
    let spelled: String = entries.iter().map(|e| e["token"].as_str().unwrap()).collect();
    assert_eq!(spelled.trim_start(), text);
    let (_, streamed) = d.send(
        "POST",
        "/v1/chat/completions",
        chat(json!({"stream": true, "stream_options": {"include_usage": true}})).to_string().as_bytes(),
    );
    let events = events(&streamed);
    let pieces: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(pieces, text);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 16);
}

#[test]
fn answers_differ_by_seed_and_end_at_stops() {
    let d = plain();
    let ask = || {
        let v = d.good("/v1/chat/completions", chat(json!({"n": 3, "temperature": 1, "seed": 11})));
        let text = |c: &Value| c["message"]["content"].as_str().unwrap().to_owned();
        v["choices"].as_array().unwrap().iter().map(text).collect::<Vec<_>>()
    };
    let first = ask();
    assert_eq!(first.len(), 3);
    assert!(first[0] != first[1] || first[1] != first[2], "{first:?}");
    assert_eq!(first, ask());
    let v = d.good("/v1/chat/completions", chat(json!({"stop": ["vity"]})));
    assert_eq!(v["choices"][0]["message"]["content"], "Gra");
    assert_eq!(v["choices"][0]["finish_reason"], "stop");
    // Ended by the server's own doing, it is counted like any other: the prompt was cached by the answers before.
    assert!(v["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{v}");
    assert!(v["timings"]["ttft_ms"].as_f64().unwrap() > 0.0, "{v}");
}

#[test]
fn forms_and_forced_calls_hold() {
    let d = plain();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "tags"], "properties": {
        "name": {"type": "string", "maxLength": 8}, "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["a", "b"]}}}});
    for seed in 0..8 {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let more = json!({"response_format": format, "temperature": 1, "seed": seed, "max_tokens": 120});
        let v = d.good("/v1/chat/completions", chat(more));
        let text = v["choices"][0]["message"]["content"].as_str().unwrap();
        let object: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(
            object["name"].as_str().unwrap().chars().count() <= 8
                && object["tags"].as_array().unwrap().len() <= 2
        );
    }
    let v = d.good(
        "/v1/completions",
        json!({"prompt": "x", "grammar": "root ::= \"yes\" | \"no\"", "max_tokens": 9}),
    );
    assert!(["yes", "no"].contains(&v["choices"][0]["text"].as_str().unwrap()), "{v}");
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {"n": {"enum": [1, 2]}}});
    let tools = json!([{"type": "function", "function": {"name": "pick", "parameters": parameters}}]);
    for stream in [false, true] {
        let more = json!({"tools": tools, "tool_choice": "required", "max_tokens": 60, "stream": stream});
        let (_, text) = d.send("POST", "/v1/chat/completions", chat(more).to_string().as_bytes());
        let call = if stream {
            let all = events(&text);
            let found = all.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]);
            let pieces: Vec<&Value> = found.filter(|c| c.is_object()).collect();
            // The first piece names the call; the others are more of its arguments.
            assert!(pieces.len() > 1 && pieces[0]["id"].is_string() && pieces[1]["id"].is_null(), "{text}");
            let arguments: String =
                pieces.iter().filter_map(|p| p["function"]["arguments"].as_str()).collect();
            json!({"name": pieces[0]["function"]["name"], "arguments": arguments})
        } else {
            let v: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(v["choices"][0]["finish_reason"], "tool_calls", "{v}");
            v["choices"][0]["message"]["tool_calls"][0]["function"].clone()
        };
        assert_eq!(call["name"], "pick");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!([json!(1), json!(2)].contains(&arguments["n"]));
    }
}

#[test]
fn the_small_endpoints_answer() {
    let d = plain();
    let tokens = d.good("/tokenize", json!({"content": "Hello there", "with_pieces": true}));
    assert_eq!(tokens["count"], tokens["pieces"].as_array().unwrap().len());
    let back = d.good("/detokenize", json!({"tokens": tokens["tokens"]}));
    assert_eq!(back["content"], "Hello there");
    let e = d.good("/v1/embeddings", json!({"input": ["a cat", "a cat", "gravity"]}));
    let vector = |i: usize| -> Vec<f64> {
        e["data"][i]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    assert!((dot(&vector(0), &vector(1)) - 1.0).abs() < 1e-5 && dot(&vector(0), &vector(2)) < 0.999);
    let models: Value = serde_json::from_str(&d.get("/v1/models").unwrap().1).unwrap();
    assert_eq!(models["data"][0]["id"], "tinymoe-demo");
    assert_eq!(d.get("/v1/models/tinymoe-demo").unwrap().0, 200);
    assert_eq!(d.get("/v1/models/none").unwrap().0, 404);
    let (_, text) = d.get("/metrics").unwrap();
    for (name, kind, _) in tegu::serve::METRICS {
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name} in\n{text}");
    }
    assert!(d.metric("tegu_generated_tokens_total") >= 0.0);
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    for (name, ..) in tegu::serve::METRICS {
        assert!(readme.contains(&format!("`{name}`")), "README.md lists no {name}");
    }
}

#[test]
fn ollamas_clients_are_understood() {
    let d = plain();
    let tags: Value = serde_json::from_str(&d.get("/api/tags").unwrap().1).unwrap();
    let model = &tags["models"][0];
    assert_eq!(model["name"], "tinymoe-demo");
    assert_eq!(model["digest"].as_str().unwrap().len(), 64);
    let size = model["details"]["parameter_size"].as_str().unwrap();
    assert!(size.ends_with('M') && !model["details"]["quantization_level"].as_str().unwrap().is_empty());
    let options = json!({"num_predict": 8, "temperature": 0});
    let messages = json!([{"role": "user", "content": "What is gravity?"}]);
    let body = json!({"model": "tinymoe-demo:latest", "messages": messages, "options": options});
    let (status, text) = d.send("POST", "/api/chat", body.to_string().as_bytes());
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let said: String = lines.iter().filter_map(|l| l["message"]["content"].as_str()).collect();
    assert!(status == 200 && said.starts_with("Gravity"), "{text}");
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("length"), &json!(8))
    );
    let body =
        json!({"model": "tinymoe-demo", "prompt": "What is gravity?", "stream": false, "options": options});
    assert_eq!(d.good("/api/generate", body)["response"], said);
    let body = json!({"model": "tinymoe-demo", "messages": messages, "stream": false, "options": options,
        "logprobs": true, "top_logprobs": 2});
    let v = d.good("/api/chat", body);
    let entries = v["logprobs"].as_array().unwrap();
    assert!(entries.len() == 8 && entries[0]["top_logprobs"].as_array().unwrap().len() == 2, "{v}");
    assert!(entries[0]["token"].as_str().unwrap().contains('G') && entries[0]["logprob"].is_number());
    let (status, v) = d.post("/api/chat", json!({"model": "none", "messages": messages}));
    assert!(status == 404 && v["error"].is_string(), "{v}");
}

#[test]
fn the_client_commands_talk_to_it() {
    let d = plain();
    let run = |args: &[&str], input: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tegu"));
        command.args(args).arg("--at").arg(d.socket()).env("XDG_CONFIG_HOME", "no-such-folder");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        (out.status.code(), text(out.stdout), text(out.stderr))
    };
    let (code, out, notes) =
        run(&["chat", "-n", "8", "--temp", "0"], "/max 4\nWhat is \\\ngravity?\n/undo\n/quit\n");
    assert_eq!(code, Some(0), "{notes}");
    assert_eq!(out.lines().count(), 1, "{out}");
    assert!(notes.contains("tg 4 tokens") && notes.contains("TTFT"), "{notes}");
    let (code, out, _) = run(&["ps"], "");
    assert!(code == Some(0) && out.starts_with("model "), "{out}");
    let (code, out, _) = run(&["list"], "");
    let row = out.lines().nth(1).unwrap_or_default();
    assert!(code == Some(0) && row.starts_with("tinymoe-demo ") && row.ends_with("in memory"), "{out}");
    let (_, out, _) = run(&["list", "--json"], "");
    let listed: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&listed["models"][0]["name"], &listed["models"][0]["loaded"]),
        (&json!("tinymoe-demo"), &json!(true))
    );
    let (code, _, notes) = run(&["stop", "999999"], "");
    assert!(code == Some(2) && notes.contains("no open request has the number 999999"), "{notes}");
}

#[test]
fn it_lives_as_a_service_should() {
    let mut d = Daemon::start("[serve]\nidle_unload_s = 0.2\nshutdown_s = 0.2\n");
    // Idle, the model is given back; the next request brings it again.
    d.wait_until("the model is given back", |d| d.metric("tegu_model_idle_unloads_total") >= 1.0);
    d.good("/v1/completions", json!({"prompt": "x", "max_tokens": 1}));
    // One daemon a socket.
    let second = Command::new(env!("CARGO_BIN_EXE_tegud")).arg("--socket").arg(d.socket()).output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(
        second.status.code() == Some(2) && said.contains(&format!("process {} serves it", d.child.id())),
        "{said}"
    );
    // New settings, a bad file, and what needs a restart.
    std::fs::write(
        d.dir.path().join("c.toml"),
        "context = 300\n[serve]\nbody_bytes = 2000\nmode = \"600\"\nshutdown_s = 0.2\nbatch = 1\nsessions = \"kept\"\n[power]\nprofile = \"none\"",
    )
    .unwrap();
    d.signal("HUP");
    d.wait_until("it took them", |d| d.log().contains("settings reloaded"));
    for key in ["context", "serve.mode", "serve.batch", "serve.sessions", "power.profile"] {
        let said = format!("{key} takes effect at the next start");
        assert!(d.log().contains(&said), "{said}: {}", d.log());
    }
    assert!(d.log().contains("reload: serve.body_bytes, serve.idle_unload_s"), "{}", d.log());
    assert_eq!(d.send("POST", "/tokenize", &[b' '; 3000]).0, 413);
    std::fs::write(d.dir.path().join("c.toml"), "[serve]\nbody_byts = 1").unwrap();
    d.signal("HUP");
    d.wait_until("it refused them", |d| d.log().contains("did you mean serve.body_bytes?"));
    // A mistake in what would wait for the next start is told now.
    std::fs::write(d.dir.path().join("c.toml"), "power.board = \"x\"\nserve.body_bytes = 5000").unwrap();
    d.signal("HUP");
    d.wait_until("it refused them", |d| d.log().contains("reload: settings: power.board: expected auto"));
    assert_eq!(d.send("POST", "/tokenize", &[b' '; 3000]).0, 413);
    // An end while a request is open: it fails, and the daemon ends in order.
    let open = d.connect();
    let body = json!({"prompt": "x", "max_tokens": 100000, "stream": true, "ignore_eos": true});
    (&open).write_all(&post_bytes("/v1/completions", &body)).unwrap();
    let mut some = [0; 64];
    (&open).read_exact(&mut some).unwrap();
    d.signal("TERM");
    assert_eq!(d.ended(), Some(0), "{}", d.log());
    assert!(!d.socket().exists());
}
