//! Requests with one answer, as Ollama's and llama.cpp's clients read them: one object, or an object for each piece and one that
//! closes.

use super::answer::{Delta, Finish};
use super::body::{json as json_response, streamed};
use super::fail::Fail;
use super::fields::Answered;
use super::generate::{Pieces, Render, Running};
use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::Value;

/// How objects look.
pub trait Lines: Send + Unpin + 'static {
    /// The type of a stream of them.
    const STREAM: &'static str;
    /// A piece, or the whole.
    fn said(&mut self, delta: &Delta, running: &Running) -> Value;
    /// Adds to the last one why it ended, counts and times.
    fn close(&mut self, object: &mut Value, running: &Running, finish: Finish);
    /// Instead of more.
    fn error(&mut self, fail: &Fail) -> Value;
    /// An object in a stream.
    fn line(object: &Value) -> String;
}

/// Answers a request that has one answer.
pub async fn answer<L: Lines>(running: Running, mut lines: L, stream: bool) -> Answered<Response<Body>> {
    if stream {
        return Ok(streamed(L::STREAM, Pieces::new(running, Each(lines))));
    }
    let (mut answers, running) = running.collect().await?;
    let (delta, finish) = answers.remove(0);
    let mut object = lines.said(&delta, &running);
    lines.close(&mut object, &running, finish);
    Ok(json_response(StatusCode::OK, &object))
}

struct Each<L>(L);

impl<L: Lines> Render for Each<L> {
    fn head(&mut self) -> String {
        String::new()
    }

    fn piece(&mut self, running: &Running, _: usize, d: &Delta, finish: Option<Finish>) -> String {
        let mut text = String::new();
        if !d.is_empty() {
            text += &L::line(&self.0.said(d, running));
        }
        if let Some(finish) = finish {
            let mut object = self.0.said(&Delta::default(), running);
            self.0.close(&mut object, running, finish);
            text += &L::line(&object);
        }
        text
    }

    fn end(&mut self, _: &Running) -> String {
        String::new()
    }

    fn failed(&mut self, fail: &Fail) -> String {
        L::line(&self.0.error(fail))
    }
}
