//! The engine as a service: a thread that owns the [`Engine`], and handles that any thread may hold.
//!
//! A [`Handle`] submits requests and gets a [`Stream`] of replies for each. The queue is bounded and refuses at once when
//! it is full; a reader that falls behind is cancelled; dropping a stream cancels its request before the next step.
//! Nothing here knows of sockets or of an asynchronous runtime: a stream is read by blocking or through a
//! [`std::task::Waker`].
//!
//! Tokens go in and come out; text is the caller's.

mod activity;
mod metrics;
mod sessions;
mod stream;
mod worker;

pub use activity::{Activity, Signal};
pub use metrics::{Metrics, RequestInfo};
pub use sessions::{SessionInfo, check_session_name};
pub use stream::{Reply, RequestId, Stream};

use super::{Budget, Class, Engine};
use crate::backend::{Pulse, Workers};
use crate::sample::Sampler;
use crate::units::{Error, Result, TokenId};
use sessions::SessionOp;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stream::{Channel, Writer};

/// Bounds of the service.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Requests that may be open, waiting ones included.
    pub requests_max: usize,
    /// Answers of one request.
    pub choices_max: usize,
    /// Replies that a reader may be behind before its request is cancelled.
    pub replies_max: usize,
    /// What a step may do; [`Handle::set_budget`] changes it.
    pub budget: Budget,
    /// Where sessions are saved.
    pub session_folder: Option<PathBuf>,
    /// Give idle cache memory back when the system or the control group runs short.
    pub watch_memory: bool,
    /// Is told what kind of work the engine does.
    pub signal: Arc<Signal>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            requests_max: 128,
            choices_max: 16,
            replies_max: 512,
            budget: Budget::default(),
            session_folder: None,
            watch_memory: true,
            signal: Arc::default(),
        }
    }
}

/// What a request wants.
#[derive(Debug)]
pub enum Work {
    /// Answers to the prompt.
    Generate {
        /// One for each answer; each holds its seed and its own grammar. An answer after the first starts when the
        /// prompt is read.
        samplers: Vec<Sampler>,
        /// Most tokens of an answer.
        max_new: usize,
        /// Tokens that end an answer; they are not part of it.
        end_ids: Vec<TokenId>,
    },
    /// The mean hidden state of the prompt.
    Embed,
}

/// One request.
#[derive(Debug)]
pub struct Submit {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// What it wants.
    pub work: Work,
    /// How urgent it is.
    pub class: Class,
    /// When the answer is of no use any more; what is generated until then is given.
    pub deadline: Option<Instant>,
    /// Whose it is: clients of one class share the machine evenly.
    pub client: String,
    /// Grouped-query models: when the context is full, keep this many tokens at the front, forget the older half of the
    /// rest, and go on; without, the answer ends there.
    pub slide: Option<usize>,
    /// The session that the first answer belongs to: it is read from disk if it is only there, and goes on with the prompt
    /// and the answer. What is cached is used with or without one.
    pub session: Option<String>,
}

/// What happens when the engine's thread panics: a bug.
pub enum OnPanic {
    /// Requests fail with [`Error::Stopped`], and so does everything after: for an engine inside another program.
    Poison,
    /// The same, and then this is called with the reason: a daemon puts clocks back and ends its process.
    Call(Box<dyn FnOnce(&str) + Send>),
}

/// What a handle asks of the thread.
enum Command {
    Submit(RequestId, Box<Submit>, Writer),
    /// Something changed that needs no words: a stream was dropped, the budget was set.
    Nudge,
    Cancel(RequestId, SyncSender<bool>),
    List(SyncSender<Vec<RequestInfo>>),
    Session(SessionOp, String, sessions::Reply),
    /// A session's file is written, or will not be: from the thread that writes.
    Saved(String, Result<u64>),
    Sessions(SyncSender<Vec<SessionInfo>>),
    /// Ends; open requests get until the instant.
    Stop(Instant),
}

/// What handles and thread share.
struct Shared {
    commands: Mutex<Sender<Command>>,
    open: AtomicUsize,
    next_id: AtomicU64,
    /// A guess of how long one more request would wait, in microseconds.
    retry_us: AtomicU64,
    refused: AtomicU64,
    budget: Mutex<Budget>,
    /// The threads that compute from the next step on, if someone said so.
    workers: Mutex<Option<Workers>>,
    pulse: Arc<Pulse>,
    metrics: Mutex<Metrics>,
    /// Why the engine's thread has ended.
    stopped: Mutex<Option<String>>,
    limits: Limits,
    vocab: usize,
    context_tokens: usize,
    hidden: usize,
}

impl Shared {
    fn send(&self, command: Command) -> Result<()> {
        if lock(&self.stopped).is_some() {
            return Err(self.stopped_error());
        }
        let sent = lock(&self.commands).send(command);
        sent.map_err(|_| self.stopped_error())
    }

    fn stopped_error(&self) -> Error {
        Error::Stopped(lock(&self.stopped).clone().unwrap_or_else(|| "it was told to".into()))
    }
}

/// Locks; what these locks guard is whole at every moment, so that another thread's panic does not matter.
fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The running service. Dropping it cancels what is open and waits for the thread.
pub struct Service {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Submits requests; cheap to clone, for any thread.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Service {
    /// Moves the engine to a thread of its own.
    pub fn start(engine: Engine, limits: Limits, on_panic: OnPanic) -> Result<Service> {
        let (sender, receiver): (Sender<Command>, Receiver<Command>) = channel();
        let shared = Arc::new(Shared {
            commands: Mutex::new(sender),
            open: AtomicUsize::new(0),
            next_id: AtomicU64::new(1),
            retry_us: AtomicU64::new(1_000_000),
            refused: AtomicU64::new(0),
            budget: Mutex::new(limits.budget),
            workers: Mutex::default(),
            pulse: Arc::default(),
            metrics: Mutex::new(Metrics::default()),
            stopped: Mutex::new(None),
            limits,
            vocab: engine.hyper().vocab,
            context_tokens: engine.context_tokens(),
            hidden: engine.hyper().hidden,
        });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("tegu-engine".into())
            .spawn(move || worker::run(engine, for_thread, receiver, on_panic))
            .map_err(|e| Error::io("engine", "start a thread", e))?;
        Ok(Service { handle: Handle { shared }, thread: Some(thread) })
    }

    /// A handle.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Refuses new requests, lets open ones go on for up to `grace`, fails the rest, and gives back all memory.
    pub fn stop(mut self, grace: Duration) {
        self.end(grace);
    }

    fn end(&mut self, grace: Duration) {
        // A thread that has ended already hears nothing, which is fine.
        let _ = self.handle.shared.send(Command::Stop(Instant::now() + grace));
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end(Duration::ZERO);
        }
    }
}

impl Handle {
    /// Hands a request over. Fails at once where it can never be met, where the queue is full ([`Error::Busy`]), and
    /// where the engine has ended.
    pub fn submit(&self, submit: Submit) -> Result<Stream> {
        self.check(&submit)?;
        let s = &self.shared;
        let most = s.limits.requests_max;
        let full = |open: usize| (open < most).then_some(open + 1);
        if s.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, full).is_err() {
            s.refused.fetch_add(1, Ordering::Relaxed);
            let retry = Duration::from_micros(s.retry_us.load(Ordering::Relaxed));
            return Err(Error::Busy { what: "request queue".into(), retry });
        }
        let id = s.next_id.fetch_add(1, Ordering::Relaxed);
        let channel = Arc::new(Channel::default());
        let sent = s.send(Command::Submit(id, Box::new(submit), Writer(channel.clone())));
        if let Err(e) = sent {
            s.open.fetch_sub(1, Ordering::Relaxed);
            return Err(e);
        }
        let shared = s.clone();
        let nudge = Box::new(move || {
            let _ = shared.send(Command::Nudge); // a thread that has ended needs no telling
        });
        Ok(Stream::new(id, channel, nudge))
    }

    /// Refuses what can never be met, by name.
    fn check(&self, submit: &Submit) -> Result<()> {
        let s = &self.shared;
        super::check_prompt(&submit.prompt, s.vocab, s.context_tokens)?;
        submit.session.as_deref().map_or(Ok(()), check_session_name)?;
        if let Work::Generate { samplers, .. } = &submit.work {
            let most = s.limits.choices_max;
            if !(1..=most).contains(&samplers.len()) {
                return Err(Error::bad("request", "n", format!("1 to {most}"), samplers.len()));
            }
        }
        Ok(())
    }

    /// Cancels a request by its number; false if none is open under it.
    pub fn cancel(&self, id: RequestId) -> Result<bool> {
        self.ask(|reply| Command::Cancel(id, reply))
    }

    /// The open requests, oldest first. Waits for the step that runs.
    pub fn requests(&self) -> Result<Vec<RequestInfo>> {
        self.ask(Command::List)
    }

    /// Writes a session to its file.
    pub fn save_session(&self, name: &str) -> Result<SessionInfo> {
        self.session(SessionOp::Save, name).map(|(info, _)| info)
    }

    /// Reads a session from its file.
    pub fn restore_session(&self, name: &str) -> Result<SessionInfo> {
        self.session(SessionOp::Restore, name).map(|(info, _)| info)
    }

    /// Forgets a session, and removes its file.
    pub fn delete_session(&self, name: &str) -> Result<SessionInfo> {
        self.session(SessionOp::Delete, name).map(|(info, _)| info)
    }

    /// The tokens of a session that is in memory: prompts and answers so far.
    pub fn session_tokens(&self, name: &str) -> Result<Vec<TokenId>> {
        self.session(SessionOp::Tokens, name).map(|(_, tokens)| tokens)
    }

    /// All sessions, in memory and on disk, by name.
    pub fn sessions(&self) -> Result<Vec<SessionInfo>> {
        self.ask(Command::Sessions)
    }

    fn session(&self, op: SessionOp, name: &str) -> Result<(SessionInfo, Vec<TokenId>)> {
        check_session_name(name)?;
        self.ask(|reply| Command::Session(op, name.to_owned(), reply))?
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T> {
        let (sender, receiver) = sync_channel(1);
        self.shared.send(command(sender))?;
        receiver.recv().map_err(|_| self.shared.stopped_error())
    }

    /// Counts and state; never waits for the engine.
    pub fn metrics(&self) -> Metrics {
        let mut m = lock(&self.shared.metrics).clone();
        m.refused = self.shared.refused.load(Ordering::Relaxed);
        m.open = self.shared.open.load(Ordering::Relaxed);
        m
    }

    /// What each step may do from now on.
    pub fn set_budget(&self, budget: Budget) {
        *lock(&self.shared.budget) = budget;
        let _ = self.shared.send(Command::Nudge); // a thread that has ended needs no telling
    }

    /// What each step may do.
    pub fn budget(&self) -> Budget {
        *lock(&self.shared.budget)
    }

    /// Which threads compute from the next step on.
    pub fn set_workers(&self, workers: Workers) {
        *lock(&self.shared.workers) = Some(workers);
        let _ = self.shared.send(Command::Nudge); // a thread that has ended needs no telling
    }

    /// What [`Handle::set_workers`] was told last.
    pub fn workers(&self) -> Option<Workers> {
        *lock(&self.shared.workers)
    }

    /// A count that goes up as long as the engine works, within long steps too, or waits for work and would hear of it.
    pub fn beats(&self) -> u64 {
        self.shared.pulse.beats()
    }

    /// Why the engine has ended, if it has.
    pub fn stopped(&self) -> Option<String> {
        lock(&self.shared.stopped).clone()
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.shared.vocab
    }

    /// Positions a sequence may have.
    pub fn context_tokens(&self) -> usize {
        self.shared.context_tokens
    }

    /// Width of an embedding.
    pub fn hidden(&self) -> usize {
        self.shared.hidden
    }
}
