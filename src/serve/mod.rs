//! HTTP for local programs: OpenAI's endpoints and Ollama's on a Unix socket, and on a loopback port when asked.
//!
//! ```text
//! listen ─► connections ─► routes ─► chat | completions | ollama | small ─► generate ─► engine::service
//!                                    (fields, options, messages: strict)       (answer: text, thought, calls)
//! ```
//!
//! Connections live on a small asynchronous runtime that does nothing slow: templates, tokenizing, grammars and loading run
//! on threads of their own, the model on the engine's thread. A client that is slow, silent or gone costs the others
//! nothing: what it may hold is bounded in bytes, time and number. `/health` and `/metrics` never ask the engine.

mod answer;
mod body;
mod chat;
mod completions;
mod connections;
mod fail;
mod fields;
mod generate;
mod io;
mod lines;
mod listen;
mod llama;
mod messages;
mod metrics;
mod models;
mod ollama;
mod options;
mod power;
mod probe;
mod prompts;
mod responses;
mod routes;
mod small;
mod supervise;
mod watchdog;

pub use listen::group_id;
pub use metrics::{BOARD_REFERENCE as BOARD_METRICS, REFERENCE as METRICS};
pub use models::{Kind, Known, Loaded, Loader};
pub use power::{Gauge, Power, Spent};
pub use probe::Probe;
pub use supervise::run;

use crate::sample::SampleParams;
use fail::Fail;
use fields::Answered;
use models::{Lease, Models};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// How to serve. Those marked *fixed* are read at the start; a reload changes the others.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The Unix socket; empty: none. *Fixed.*
    pub socket: PathBuf,
    /// Its mode. *Fixed.*
    pub mode: u32,
    /// Its group, by name or number; none: the process's. *Fixed.*
    pub group: Option<String>,
    /// A loopback address to listen on as well. *Fixed.*
    pub tcp: Option<SocketAddr>,
    /// What clients of the port have to show: `Authorization: Bearer …`.
    pub token: Option<String>,
    /// Connections at a time. Beyond that the oldest that asks for nothing is closed.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// From the first byte of a request to the last of its headers, and how long a connection may idle.
    pub head_within: Duration,
    /// From the headers to the end of the body.
    pub body_within: Duration,
    /// How long a client may leave sent bytes unread.
    pub write_within: Duration,
    /// The longest answer.
    pub request_within: Duration,
    /// How long a request waits for its model to be loaded, and for others to let go of the one before.
    pub load_within: Duration,
    /// Gives the model's memory back after so long without a request; none: never.
    pub idle_unload: Option<Duration>,
    /// What open requests get when the daemon is told to end.
    pub shutdown_within: Duration,
    /// Load the default model at the start, not at the first request. *Fixed.*
    pub preload: bool,
    /// What requests do not say about sampling.
    pub sample: SampleParams,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            socket: PathBuf::new(),
            mode: 0o660,
            group: None,
            tcp: None,
            token: None,
            connections: 512,
            body_bytes: 8 << 20,
            head_within: Duration::from_secs(30),
            body_within: Duration::from_secs(60),
            write_within: Duration::from_secs(60),
            request_within: Duration::from_secs(600),
            load_within: Duration::from_secs(300),
            idle_unload: None,
            shutdown_within: Duration::from_secs(20),
            preload: true,
            sample: SampleParams { temp: 1.0, ..SampleParams::default() },
        }
    }
}

/// What every request sees.
pub struct Server {
    settings: RwLock<Arc<Settings>>,
    models: Arc<Models>,
    metrics: metrics::Metrics,
    started: Instant,
    /// The first model is not there yet: not ready.
    starting: AtomicBool,
    /// Told to end: not ready any more.
    stopping: AtomicBool,
}

/// One request's surroundings.
pub struct Context {
    /// Whose it is, if it does not say.
    pub client: String,
    /// When it ends at the latest.
    pub deadline: Instant,
    /// Bytes of its body, as far as they are known before it is read; without bound otherwise.
    pub body_bytes: usize,
}

impl Server {
    /// The settings of this moment.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The model of that name, in memory; without a name the default one, whatever others asked for before.
    async fn model(&self, name: Option<&str>) -> Answered<Lease> {
        self.models.get(name, self.settings().load_within).await
    }

    /// The model that is in memory; the default one if none is.
    async fn present_model(&self) -> Answered<Lease> {
        match self.models.present() {
            Some(lease) => Ok(lease),
            None => self.model(None).await,
        }
    }
}

/// Runs what may take its time on a thread for that.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Answered<T> + Send + 'static) -> Answered<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        let status = axum::http::StatusCode::INTERNAL_SERVER_ERROR;
        Err(Fail::new(status, "a bug in Tegu: please report it"))
    })
}

/// Seconds since 1970.
fn unix_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_secs())
}
