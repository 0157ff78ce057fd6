//! The table of settings: name, kind, default, environment variable.

use std::fmt;
use std::path::Path;

use crate::limits::{CONTEXT_MAX, THREADS_MAX};
use crate::units::Error;

/// What a key takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Any text; empty means unset.
    Text,
    /// A whole number from `.0` to `.1`.
    Count(u64, u64),
    /// A real number from `.0` to `.1`.
    Real(f64, f64),
    /// One of the words.
    Choice(&'static [&'static str]),
}

/// A checked value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Text or a chosen word.
    Text(String),
    /// A whole number.
    Count(u64),
    /// A real number.
    Real(f64),
}

/// A row of the table.
#[derive(Debug)]
pub struct Key {
    /// Dotted name, as in the file.
    pub name: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// The default, as text.
    pub default: &'static str,
    /// The environment variable that sets it.
    pub env: Option<&'static str>,
    /// One line for people.
    pub help: &'static str,
}

const fn key(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    env: Option<&'static str>,
    help: &'static str,
) -> Key {
    Key { name, kind, default, env, help }
}

/// Every setting. Keys of one section stand together.
pub const KEYS: &[Key] = &[
    key("model", Kind::Text, "", Some("TEGU_MODEL"), "model file or folder; empty: the bundled demo"),
    key(
        "threads",
        Kind::Count(0, THREADS_MAX as u64),
        "0",
        Some("TEGU_THREADS"),
        "worker threads; 0: one a core",
    ),
    key(
        "context",
        Kind::Count(0, CONTEXT_MAX as u64),
        "4096",
        None,
        "tokens a sequence may hold; 0: all the model allows",
    ),
    key(
        "backend",
        Kind::Choice(&["auto", "cpu", "cuda"]),
        "auto",
        Some("TEGU_BACKEND"),
        "what runs the model; auto: cuda if a GPU can be used",
    ),
    key("kv", Kind::Choice(&["f16", "f32", "int8"]), "f16", None, "type of the key-value cache"),
    key(
        "log",
        Kind::Choice(&["error", "warn", "info", "debug"]),
        "warn",
        Some("TEGU_LOG"),
        "what the log says",
    ),
    key(
        "sample.temp",
        Kind::Real(0.0, 100.0),
        "0",
        None,
        "temperature; 0: greedy, always the likeliest token",
    ),
    key("sample.top_k", Kind::Count(0, u32::MAX as u64), "40", None, "keep the k likeliest; 0: all"),
    key("sample.top_p", Kind::Real(0.0, 1.0), "0.95", None, "keep the likeliest that sum to p; 1: all"),
    key(
        "sample.min_p",
        Kind::Real(0.0, 1.0),
        "0.05",
        None,
        "drop those below this share of the likeliest; 0: none",
    ),
    key(
        "sample.repeat_penalty",
        Kind::Real(0.0, 100.0),
        "1",
        None,
        "divides the logits of recent tokens; 1: off",
    ),
];

impl Key {
    /// The long flag that sets it, where a command has one.
    pub fn flag(&self) -> String {
        match self.name {
            "context" => "ctx-size".into(),
            name => name.rsplit('.').next().unwrap_or(name).replace('_', "-"),
        }
    }
}

/// Why a value was refused; [`Refused::of`] adds whose it was.
#[derive(Debug)]
pub struct Refused {
    expected: String,
    found: String,
}

impl Refused {
    /// As an error that names the file (or variable, or flag) and field.
    pub fn of(self, file: impl AsRef<Path>, field: impl fmt::Display) -> Error {
        Error::bad(file, field, self.expected, self.found)
    }
}

impl Kind {
    /// In words: what is expected.
    pub fn expected(&self) -> String {
        match self {
            Kind::Text => "text".into(),
            Kind::Count(lo, hi) => format!("a whole number from {lo} to {hi}"),
            Kind::Real(lo, hi) => format!("a number from {lo} to {hi}"),
            Kind::Choice(words) => format!("one of {}", words.join(", ")),
        }
    }

    fn refuse(&self, found: impl fmt::Display) -> Refused {
        Refused { expected: self.expected(), found: found.to_string() }
    }

    /// Reads a value from a flag or an environment variable.
    pub fn from_text(&self, text: &str) -> Result<Value, Refused> {
        let value = match self {
            Kind::Text | Kind::Choice(_) => Some(Value::Text(text.to_owned())),
            Kind::Count(..) => text.trim().parse().ok().map(Value::Count),
            Kind::Real(..) => text.trim().parse().ok().map(Value::Real),
        };
        value.filter(|v| self.allows(v)).ok_or_else(|| self.refuse(format!("{text:?}")))
    }

    /// Reads a value from the settings file.
    pub fn from_toml(&self, value: &toml::Value) -> Result<Value, Refused> {
        let read = match (self, value) {
            (Kind::Text | Kind::Choice(_), toml::Value::String(s)) => Some(Value::Text(s.clone())),
            (Kind::Count(..), toml::Value::Integer(n)) => u64::try_from(*n).ok().map(Value::Count),
            (Kind::Real(..), toml::Value::Float(x)) => Some(Value::Real(*x)),
            (Kind::Real(..), toml::Value::Integer(n)) => Some(Value::Real(*n as f64)),
            _ => None,
        };
        read.filter(|v| self.allows(v)).ok_or_else(|| self.refuse(value))
    }

    fn allows(&self, value: &Value) -> bool {
        match (self, value) {
            (Kind::Text, Value::Text(_)) => true,
            (Kind::Choice(words), Value::Text(s)) => words.contains(&s.as_str()),
            (Kind::Count(lo, hi), Value::Count(n)) => lo <= n && n <= hi,
            // A comparison with NaN is false, so that NaN is refused too.
            (Kind::Real(lo, hi), Value::Real(x)) => lo <= x && x <= hi,
            _ => false,
        }
    }
}

/// As TOML.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(s) => write!(f, "{}", toml::Value::String(s.clone())),
            Value::Count(n) => write!(f, "{n}"),
            Value::Real(x) => write!(f, "{x:?}"),
        }
    }
}
