//! The server on an in-memory connection and without a model: what fuzzing drives.

use super::connections::http;
use super::models::{Known, Loaded, Loader, Models};
use super::{Server, Settings, routes};
use crate::units::{Error, Result};
use axum::body::Body;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Knows one model, which cannot be loaded.
struct NoModel;

impl Loader for NoModel {
    fn known(&self) -> Result<Vec<Known>> {
        Ok(vec![Known { name: "m".into(), file_bytes: 1, changed_unix_s: 0, digest: String::new() }])
    }

    fn load(&self, name: &str, _: Box<dyn FnOnce(&str) + Send>) -> Result<Loaded> {
        Err(Error::bad("probe", "model", "one with weights", name))
    }
}

/// A server that requests can be put to as bytes.
pub struct Probe {
    runtime: tokio::runtime::Runtime,
    server: Arc<Server>,
}

impl Default for Probe {
    fn default() -> Probe {
        Probe::new()
    }
}

impl Probe {
    /// Starts it.
    ///
    /// # Panics
    /// If the system gives it no threads.
    pub fn new() -> Probe {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let server = Server {
            models: Arc::new(Models::new(Box::new(NoModel), Arc::new(|_| {}), None)),
            metrics: Default::default(),
            started: Instant::now(),
            starting: false.into(),
            stopping: false.into(),
            settings: Arc::new(Settings::default()).into(),
        };
        Probe { runtime: runtime.expect("a runtime on this thread"), server: Arc::new(server) }
    }

    /// What a client that sends `input` and then closes its sending side reads until the end.
    pub fn answer(&self, input: &[u8]) -> Vec<u8> {
        let output = Arc::new(Mutex::new(Vec::new()));
        let memory = Memory { input: input.to_vec(), read: 0, output: output.clone() };
        let peer = routes::Peer { client: "probe".into(), is_tcp: true };
        let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
            let answer = routes::answer(self.server.clone(), peer.clone(), request.map(Body::new));
            async { Ok::<_, std::convert::Infallible>(answer.await) }
        });
        // How a connection that sent nonsense ends is the answer's business, not an error's.
        let connection = http(&self.server.settings()).serve_connection(TokioIo::new(memory), service);
        let _ = self.runtime.block_on(connection);
        std::mem::take(&mut *output.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A client's bytes, and what it is answered.
struct Memory {
    input: Vec<u8>,
    read: usize,
    output: Arc<Mutex<Vec<u8>>>,
}

impl AsyncRead for Memory {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let n = buf.remaining().min(self.input.len() - self.read);
        buf.put_slice(&self.input[self.read..self.read + n]);
        self.read += n;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Memory {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[test]
fn nonsense_is_answered_and_never_a_panic() {
    let probe = Probe::new();
    let answer = |bytes: &[u8]| String::from_utf8_lossy(&probe.answer(bytes)).into_owned();
    assert!(answer(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").starts_with("HTTP/1.1 200"));
    assert!(answer(b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n").starts_with("HTTP/1.1 403"));
    let page = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\n\r\n";
    assert!(answer(page).starts_with("HTTP/1.1 403"));
    // Every prefix of a good request, and every one of its bytes turned: any answer will do.
    let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stop":["a"],"n":2,"seed":-1}"#;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length:";
    let good = format!("{head} {}\r\n\r\n{body}", body.len()).into_bytes();
    assert!(answer(&good).contains("one with weights"), "{}", answer(&good));
    for i in 0..good.len() {
        probe.answer(&good[..i]);
        for flip in [1, 0x80] {
            let mut turned = good.clone();
            turned[i] ^= flip;
            let said = probe.answer(&turned);
            assert!(said.is_empty() || said.starts_with(b"HTTP/1."), "{}", String::from_utf8_lossy(&said));
        }
    }
}
