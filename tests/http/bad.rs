//! Clients that are wrong, slow, silent or gone: each gets its status, the daemon stays, and a good client never notices.

use super::{Daemon, chat, plain, post_bytes};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

/// The daemon answers a good client as ever.
fn is_well(d: &Daemon) {
    let v = d.good("/v1/chat/completions", chat(json!({"max_tokens": 4})));
    assert_eq!(v["usage"]["completion_tokens"], 4);
}

#[test]
fn malformed_requests_get_their_status() {
    let d = plain();
    let cases: &[(&[u8], u16)] = &[
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"PUT /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx", 400),
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n", 400),
    ];
    for (bytes, status) in cases {
        let (found, text) = d.raw(bytes);
        assert_eq!(found, *status, "{:?}: {text}", String::from_utf8_lossy(bytes));
    }
    let long = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(200_000));
    assert!([400, 414, 431].contains(&d.raw(long.as_bytes()).0));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(5_000));
    assert!([400, 431].contains(&d.raw(many.as_bytes()).0));
    is_well(&d);
}

#[test]
fn wrong_bodies_are_named() {
    let d = plain();
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let cases: &[(&[u8], &str)] = &[
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}", "body"),
        (deep.as_bytes(), "body"),
        (
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"temperature\": \"hot\"}",
            "temperature",
        ),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"tempreature\": 1}", "tempreature"),
        (
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"logit_bias\": {\"99999999\": 1}}",
            "logit_bias",
        ),
    ];
    for (body, field) in cases {
        let (status, text) = d.send("POST", "/v1/chat/completions", body);
        let v: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!((status, v["error"]["param"].as_str()), (400, Some(*field)), "{text}");
        assert!(text.len() < 2_000, "{text}");
    }
    for schema in
        [json!({"type": "nonsense"}), json!({"$ref": "#/nowhere"}), json!({"type": "string", "pattern": "("})]
    {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let (status, v) = d.post("/v1/chat/completions", chat(json!({"response_format": format})));
        assert_eq!(
            (status, &v["error"]["param"]),
            (400, &json!("response_format.json_schema.schema")),
            "{v}"
        );
    }
    let (status, v) = d.post("/v1/completions", json!({"prompt": "x ".repeat(9_000)}));
    assert_eq!((status, &v["error"]["code"]), (400, &json!("context_length_exceeded")), "{v}");
    let (status, v) = d.post("/v1/completions", json!({"prompt": [999_999_999]}));
    assert_eq!(status, 400, "{v}");
    is_well(&d);
}

#[test]
fn a_body_of_100_mb_is_refused_and_not_kept() {
    let d = plain();
    let before = d.metric("tegu_process_resident_bytes");
    let mut stream = d.connect();
    stream
        .write_all(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100000000\r\n\r\n",
        )
        .unwrap();
    let piece = vec![b'x'; 1_000_000];
    for _ in 0..100 {
        if stream.write_all(&piece).is_err() {
            break;
        }
    }
    assert_eq!(super::read(stream).0, 413);
    let grew = d.metric("tegu_process_resident_bytes") - before;
    assert!(grew < 60e6, "{grew} bytes more");
    is_well(&d);
}

#[test]
fn half_closed_and_vanished_clients() {
    let mut d = plain();
    let short = post_bytes("/v1/chat/completions", &chat(json!({"max_tokens": 4})));
    // Half a close: the answer still comes.
    let mut half = d.connect();
    half.write_all(&short).unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    assert_eq!(super::read(half).0, 200);
    // Half a request: nothing hangs.
    let mut cut = d.connect();
    cut.write_all(&short[..120]).unwrap();
    cut.shutdown(Shutdown::Write).unwrap();
    assert!([0, 400].contains(&super::read(cut).0));
    // Gone in the middle of a stream, and gone while the answer is made whole: both are let go.
    for stream in [true, false] {
        assert!((0..10).any(|_| vanishes(&mut d, stream)), "stream {stream}: it goes on without its client");
    }
    is_well(&d);
}

/// A client that is gone before its answer is whole: whether the request was let go. One that this machine kept until the
/// answer was whole proves nothing.
fn vanishes(d: &mut Daemon, stream: bool) -> bool {
    let count = |d: &Daemon, what: &str| d.metric(what);
    let (requests, cancelled) = ("tegu_requests_total", "tegu_requests_cancelled_total");
    let before = (count(d, requests), count(d, cancelled));
    let long = json!({"prompt": "x", "max_tokens": 100_000, "stream": stream, "ignore_eos": true});
    let mut gone = d.connect();
    gone.write_all(&post_bytes("/v1/completions", &long)).unwrap();
    if stream {
        gone.read_exact(&mut [0; 200]).unwrap();
    } else {
        d.wait_until("the request is taken", |d| count(d, requests) > before.0);
    }
    drop(gone);
    d.wait_until("no request is open", |d| count(d, "tegu_requests_open") == 0.0);
    count(d, cancelled) > before.1
}

#[test]
fn slow_clients_lose_their_place_and_a_full_queue_says_so() {
    let slow = |d: &Daemon, n: usize| -> Vec<UnixStream> {
        let begun = |_| {
            let mut s = d.connect();
            let _ = s.write_all(b"GET /health HTTP/1.1\r\nhos");
            s
        };
        (0..n).map(begun).collect()
    };
    // More connections than places, each with a piece of a request: good clients still get in.
    let d = Daemon::start("[serve]\nconnections = 8\nqueue = 1\n");
    let many = slow(&d, 12);
    is_well(&d);
    drop(many);
    // One place in the queue, and it is taken; where it was free again before another came, once more.
    let refused = (0..10).any(|_| {
        let mut open = d.connect();
        let body = json!({"prompt": "x", "max_tokens": 100_000, "stream": true, "ignore_eos": true});
        open.write_all(&post_bytes("/v1/completions", &body)).unwrap();
        open.read_exact(&mut [0; 200]).unwrap();
        let mut second = d.connect();
        second.write_all(&post_bytes("/v1/completions", &json!({"prompt": "y", "max_tokens": 1}))).unwrap();
        let mut text = String::new();
        second.read_to_string(&mut text).unwrap();
        if text.starts_with("HTTP/1.1 200") {
            return false;
        }
        assert!(text.starts_with("HTTP/1.1 429"), "{text}");
        assert!(text.to_ascii_lowercase().contains("retry-after: ") && text.contains("queue_full"), "{text}");
        true
    });
    assert!(refused, "the queue has one place");
    // Whoever takes too long for its headers is let go; a good client could be such a one on a machine that stands still.
    let d = Daemon::start("[serve]\nhead_s = 0.5\n");
    for mut s in slow(&d, 3) {
        let mut rest = Vec::new();
        // An end with or without a word; no end is what this client's own patience says.
        let ended = s.read_to_end(&mut rest).map_err(|e| e.kind());
        assert_ne!(ended, Err(ErrorKind::WouldBlock));
        assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
    }
}
