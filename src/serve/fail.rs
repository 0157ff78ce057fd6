//! What a client is told when something is wrong: a status, and a body in OpenAI's shape that names the field.

use crate::units::Error;
use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use std::time::Duration;

/// A refused or failed request.
#[derive(Debug, Clone)]
pub struct Fail {
    /// HTTP's status.
    pub status: StatusCode,
    /// The part of the request that is wrong: `messages[0].role`.
    pub param: Option<String>,
    /// A word that programs compare: `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// One line for people.
    pub message: String,
    /// When trying again is likely to help.
    pub retry: Option<Duration>,
}

impl Fail {
    /// A failure with a message of its own.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Fail {
        Fail { status, param: None, code: None, message: message.into(), retry: None }
    }

    /// A wrong field: 400.
    pub fn field(
        param: impl Into<String>,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Fail {
        let param = param.into();
        let found = crate::units::one_line(&found.to_string());
        let message = format!("{param}: expected {expected}, found {found}");
        Fail { param: Some(param), ..Fail::new(StatusCode::BAD_REQUEST, message) }
    }

    /// The same with a code.
    pub fn code(mut self, code: &'static str) -> Fail {
        self.code = Some(code);
        self
    }

    /// OpenAI's word for the kind of failure.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The object under `error`.
    pub fn object(&self) -> Value {
        json!({ "message": self.message, "type": self.kind(), "param": self.param, "code": self.code })
    }

    /// As a whole response. Ollama's clients expect the message alone under `error`.
    pub fn response(&self, ollama: bool) -> Response<Body> {
        let error = if ollama { json!(self.message) } else { self.object() };
        let mut response = super::body::json(self.status, &json!({ "error": error }));
        if let Some(retry) = self.retry {
            // Whole seconds, and never 0: a client would try at once.
            let seconds = retry.as_secs_f64().ceil().clamp(1.0, 3600.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<Error> for Fail {
    fn from(e: Error) -> Fail {
        let message = crate::units::one_line(&e.to_string());
        match e {
            Error::BadInput { field, .. } => {
                Fail { param: Some(field), ..Fail::new(StatusCode::BAD_REQUEST, message) }
            }
            Error::Limit { what, .. } if what.starts_with("context") => {
                Fail::new(StatusCode::BAD_REQUEST, message).code("context_length_exceeded")
            }
            Error::Limit { .. } => Fail::new(StatusCode::SERVICE_UNAVAILABLE, message).code("out_of_memory"),
            Error::Busy { retry, .. } => Fail {
                retry: Some(retry),
                ..Fail::new(StatusCode::TOO_MANY_REQUESTS, message).code("queue_full")
            },
            Error::Stopped(_) | Error::Interrupted => Fail::new(StatusCode::SERVICE_UNAVAILABLE, message),
            Error::Io { .. } => Fail::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}
