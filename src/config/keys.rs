//! The table of settings: name, kind, default, environment variable.

use std::fmt;
use std::path::Path;

use crate::limits::{CONTEXT_MAX, SPIN_US_MAX, THREADS_MAX};
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
    /// Bytes as [`bytes_of`] reads them; empty means unset.
    Size,
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
    /// A running daemon takes a new value when it is told to read its settings again.
    pub live: bool,
}

const fn key(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    env: Option<&'static str>,
    help: &'static str,
) -> Key {
    Key { name, kind, default, env, help, live: false }
}

/// A key whose new value a running daemon takes.
const fn live(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Key {
    Key { live: true, ..key(name, kind, default, None, help) }
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
        "spin_us",
        Kind::Count(0, SPIN_US_MAX),
        "200",
        Some("TEGU_SPIN_US"),
        "how long an idle worker thread spins for more work before it sleeps; 0: not at all",
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
    key(
        "expert_budget",
        Kind::Size,
        "",
        Some("TEGU_EXPERT_BUDGET"),
        "GPU memory for routed experts, as 3221225472 or 3G; empty: all where they fit",
    ),
    key(
        "cuda_wait",
        Kind::Choice(&["block", "spin"]),
        "block",
        None,
        "how a thread waits for the GPU: asleep, or some microseconds sooner awake",
    ),
    key("kv", Kind::Choice(&["f16", "f32", "int8"]), "f16", None, "type of the key-value cache"),
    Key {
        live: true,
        ..key(
            "log",
            Kind::Choice(&["error", "warn", "info", "debug"]),
            "warn",
            Some("TEGU_LOG"),
            "what the log says",
        )
    },
    live(
        "sample.temp",
        Kind::Real(0.0, 100.0),
        "0",
        "temperature; 0: greedy, always the likeliest token; the daemon's default is 1",
    ),
    live("sample.top_k", Kind::Count(0, u32::MAX as u64), "40", "keep the k likeliest; 0: all"),
    live("sample.top_p", Kind::Real(0.0, 1.0), "0.95", "keep the likeliest that sum to p; 1: all"),
    live(
        "sample.min_p",
        Kind::Real(0.0, 1.0),
        "0.05",
        "drop those below this share of the likeliest; 0: none",
    ),
    live(
        "sample.repeat_penalty",
        // As the samplers have it: they divide by it.
        Kind::Real(1e-3, 1e3),
        "1",
        "divides the logits of recent tokens; 1: off",
    ),
    key(
        "serve.socket",
        Kind::Text,
        "/run/tegu/tegu.sock",
        Some("TEGU_SOCKET"),
        "the Unix socket; empty: none",
    ),
    key("serve.mode", Kind::Text, "660", None, "the socket's mode, in octal"),
    key("serve.group", Kind::Text, "", None, "the socket's group, by name or number; empty: the process's"),
    key("serve.tcp", Kind::Text, "", None, "loopback address and port to listen on too: 127.0.0.1:8080"),
    live("serve.token_file", Kind::Text, "", "file with the bearer token that the port asks for"),
    live("serve.models", Kind::Text, "", "folder of models that can be asked for by name"),
    key("serve.sessions", Kind::Text, "", None, "folder that sessions are saved in; empty: none"),
    key("serve.spill", Kind::Text, "", None, "folder for what the cache puts on disk; empty: it forgets"),
    key("serve.spill_bytes", Kind::Count(0, 1 << 50), "4294967296", None, "most bytes of that"),
    key("serve.preload", Kind::Choice(&["yes", "no"]), "yes", None, "load the model at the start"),
    key("serve.queue", Kind::Count(1, 65_536), "128", None, "requests that may be open; one more is refused"),
    live("serve.connections", Kind::Count(1, 65_536), "512", "connections at a time"),
    live("serve.body_bytes", Kind::Count(1024, 1 << 30), "8388608", "bytes of a request's body"),
    live("serve.head_s", Kind::Real(0.1, 3600.0), "30", "seconds for a request's headers"),
    live("serve.body_s", Kind::Real(0.1, 3600.0), "60", "seconds for a request's body"),
    live("serve.write_s", Kind::Real(0.1, 3600.0), "60", "seconds that a client may leave bytes unread"),
    live("serve.request_s", Kind::Real(0.1, 86_400.0), "600", "seconds of the longest answer"),
    live("serve.load_s", Kind::Real(0.1, 86_400.0), "300", "seconds that a request waits for its model"),
    live(
        "serve.idle_unload_s",
        Kind::Real(0.0, 1e9),
        "0",
        "seconds without a request after which the model's memory is given back; 0: never",
    ),
    live("serve.shutdown_s", Kind::Real(0.0, 3600.0), "20", "seconds that open requests get at the end"),
    key("serve.sequences", Kind::Count(1, 1024), "4", None, "sequences of full length that the cache holds"),
    key("serve.batch", Kind::Count(1, 512), "8", None, "sequences that generate side by side"),
    key(
        "power.board",
        Kind::Text,
        "auto",
        Some("TEGU_BOARD"),
        "the board to look at: auto, off, a simulated one (sim:orin-nano-super), a tree of files (tree:FOLDER)",
    ),
    key(
        "power.profile",
        Kind::Text,
        "",
        Some("TEGU_PROFILE"),
        "profile that steers clocks and batches, by name or file; empty: none (a simulated board: balanced)",
    ),
    key(
        "power.clocks",
        Kind::Choice(&["helper", "direct", "no"]),
        "helper",
        None,
        "who moves clocks for a profile: the helper, this process (as root), no one",
    ),
    key("power.helper", Kind::Text, "/run/tegu-clocks/clocks.sock", None, "the clock helper's socket"),
];

impl Key {
    /// The long flag that sets it, where a command has one.
    pub fn flag(&self) -> String {
        match self.name {
            "context" => "ctx-size".into(),
            "serve.idle_unload_s" => "idle-unload".into(),
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
            Kind::Size => "bytes, or a number with K, M or G behind it".into(),
        }
    }

    fn refuse(&self, found: impl fmt::Display) -> Refused {
        Refused { expected: self.expected(), found: found.to_string() }
    }

    /// Reads a value from a flag or an environment variable.
    pub fn from_text(&self, text: &str) -> Result<Value, Refused> {
        let value = match self {
            Kind::Text | Kind::Choice(_) | Kind::Size => Some(Value::Text(text.to_owned())),
            Kind::Count(..) => text.trim().parse().ok().map(Value::Count),
            Kind::Real(..) => text.trim().parse().ok().map(Value::Real),
        };
        value.filter(|v| self.allows(v)).ok_or_else(|| self.refuse(format!("{text:?}")))
    }

    /// Reads a value from the settings file.
    pub fn from_toml(&self, value: &toml::Value) -> Result<Value, Refused> {
        let read = match (self, value) {
            (Kind::Text | Kind::Choice(_) | Kind::Size, toml::Value::String(s)) => {
                Some(Value::Text(s.clone()))
            }
            // Bytes are a number, if a person writes them so.
            (Kind::Size, toml::Value::Integer(n)) => Some(Value::Text(n.to_string())),
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
            (Kind::Size, Value::Text(s)) => s.is_empty() || bytes_of(s).is_some(),
            (Kind::Count(lo, hi), Value::Count(n)) => lo <= n && n <= hi,
            // A comparison with NaN is false, so that NaN is refused too.
            (Kind::Real(lo, hi), Value::Real(x)) => lo <= x && x <= hi,
            _ => false,
        }
    }
}

/// Reads `4096`, `64K`, `512M` or `3G` (powers of 1024; `3GiB` too).
pub fn bytes_of(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].trim().trim_end_matches("iB").to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    text[..digits].parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[test]
fn sizes_are_read() {
    let read = [("4096", 4096), ("64K", 64 << 10), (" 512MiB ", 512 << 20), ("3 g", 3 << 30), ("0", 0)];
    assert!(read.iter().all(|&(text, bytes)| bytes_of(text) == Some(bytes)));
    for bad in ["", "G", "-1", "1.5G", "3T", "99999999999G", "ä"] {
        assert_eq!(bytes_of(bad), None, "{bad}");
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
