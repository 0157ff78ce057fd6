//! Bodies: requests read within bounds of size and time, responses whole or as a stream.

use super::fail::Fail;
use super::fields::Answered;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Response, StatusCode, header};
use hyper::body::Frame;
use serde_json::Value;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

/// A refused body is read on and dropped up to here: a client that writes all of it before it reads would otherwise see a
/// broken connection and not the answer.
const DROPPED_BYTES_MAX: usize = 256 << 20;

/// Reads a body whole. `waits`: the client asked to be told before it sends anything (`Expect: 100-continue`).
pub async fn read(body: Body, waits: bool, bytes_max: usize, within: Duration) -> Answered<Vec<u8>> {
    let too_large = || {
        let message = format!("body: expected at most {bytes_max} bytes");
        Fail::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("body_too_large")
    };
    let announced = body.size_hint().lower();
    if announced > bytes_max as u64 && (waits || announced > DROPPED_BYTES_MAX as u64) {
        return Err(too_large());
    }
    let reading = async {
        let mut body = pin!(body);
        let (mut bytes, mut length) = (Vec::new(), 0);
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            let frame = frame.map_err(|e| Fail::field("body", "a whole body", e))?;
            let Ok(data) = frame.into_data() else { continue };
            length += data.len();
            if length <= bytes_max {
                bytes.extend_from_slice(&data);
            } else if length > DROPPED_BYTES_MAX {
                break;
            } else {
                bytes = Vec::new();
            }
        }
        if length > bytes_max { Err(too_large()) } else { Ok(bytes) }
    };
    tokio::time::timeout(within, reading).await.unwrap_or_else(|_| {
        let message = format!("body: expected within {} s", within.as_secs_f64());
        Err(Fail::new(StatusCode::REQUEST_TIMEOUT, message))
    })
}

/// Parses JSON; its depth is bounded by the parser (128).
pub fn parse(bytes: &[u8]) -> Answered<Value> {
    serde_json::from_slice(bytes).map_err(|e| Fail::field("body", "JSON in UTF-8", e).code("invalid_json"))
}

/// A JSON response.
pub fn json(status: StatusCode, value: &Value) -> Response<Body> {
    typed(status, "application/json", value.to_string())
}

/// A response of a type.
pub fn typed(status: StatusCode, kind: &'static str, body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// What makes a streamed body: called until it gives `None`.
pub trait Source: Send + 'static {
    /// The next bytes; never empty.
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

/// A body that is made as it is sent. Dropping it, as when the client is gone, drops its source.
struct Streamed<S>(Option<S>);

impl<S: Source + Unpin> HttpBody for Streamed<S> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Some(source) = &mut self.0 else { return Poll::Ready(None) };
        let polled = source.poll_bytes(cx);
        if let Poll::Ready(None) = polled {
            self.0 = None;
        }
        polled.map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
    }
}

/// A streamed response of a type.
pub fn streamed(kind: &'static str, source: impl Source + Unpin) -> Response<Body> {
    let mut response = typed(StatusCode::OK, kind, Body::new(Streamed(Some(source))));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would hold tokens back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A body that holds something until it is sent or dropped.
struct Held<T> {
    body: Body,
    _held: T,
}

impl<T: Send + Unpin + 'static> HttpBody for Held<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// Keeps `held` until the response is sent or dropped.
pub fn holding<T: Send + Unpin + 'static>(response: Response<Body>, held: T) -> Response<Body> {
    response.map(|body| Body::new(Held { body, _held: held }))
}
