//! Which model is in memory: loaded by name on demand, one at a time, given back when it was idle for long.

use super::fail::Fail;
use super::fields::Answered;
use super::power::Power;
use super::prompts::longest_token;
use crate::engine::service::{Handle, Service};
use crate::observe;
use crate::sample::Grammars;
use crate::text::tools::ToolFormat;
use crate::text::{ChatTemplate, Tokenizer};
use crate::units::{Bytes, Error, Result};
use axum::http::StatusCode;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A model that can be asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Known {
    /// Its name in requests.
    pub name: String,
    /// Bytes of its files.
    pub file_bytes: u64,
    /// When its file was changed, seconds since 1970.
    pub changed_unix_s: u64,
    /// 64 hexadecimal digits that differ between versions of the file.
    pub digest: String,
}

/// A model in memory.
pub struct Loaded {
    /// Its engine; dropping it gives all memory back.
    pub service: Service,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// What it is, for listings.
    pub kind: Kind,
    /// Bytes that it was planned to take.
    pub planned_bytes: u64,
}

/// What a model is, in words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kind {
    /// `llama`, `deepseek2`.
    pub architecture: String,
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// Elements of all tensors.
    pub parameters: u64,
    /// The codec of most of them: `Q4_1`.
    pub codec: String,
}

/// What finds and loads models; the program's wiring implements it.
pub trait Loader: Send + Sync + 'static {
    /// Every model that may be asked for, the default one first.
    fn known(&self) -> Result<Vec<Known>>;
    /// Loads one of them; takes as long as that takes. `fatal` is to be told if its engine breaks.
    fn load(&self, name: &str, fatal: Box<dyn FnOnce(&str) + Send>) -> Result<Loaded>;
}

/// A loaded model, shared by the requests that use it.
pub struct Live {
    /// Which load this is, counted from 1.
    pub number: u64,
    /// Its name.
    pub name: String,
    /// Hands requests to its engine.
    pub handle: Handle,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template.
    pub template: Option<ChatTemplate>,
    /// The form of tool calls that its template teaches.
    pub tool_format: Option<ToolFormat>,
    /// Compiles grammars for its vocabulary.
    pub grammars: Grammars,
    /// Bytes of its vocabulary's longest token.
    pub longest_token: usize,
    /// What it is.
    pub kind: Kind,
    /// Bytes that it was planned to take.
    pub planned_bytes: u64,
}

/// Keeps the model in memory while a request uses it.
pub struct Lease {
    live: Arc<Live>,
    models: Arc<Models>,
}

impl std::ops::Deref for Lease {
    type Target = Live;
    fn deref(&self) -> &Live {
        &self.live
    }
}

impl Lease {
    /// What is known of the board's power.
    pub fn power(&self) -> Option<&Arc<dyn Power>> {
        self.models.power.as_ref()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *lock(&self.models.used) = Instant::now();
        if self.models.leases.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.models.released.notify_waiters();
        }
    }
}

/// The right to change what is in the slot.
type Changing = tokio::sync::OwnedMutexGuard<()>;

/// What is in the slot.
#[derive(Default)]
struct Slot {
    live: Option<Arc<Live>>,
    service: Option<Service>,
}

/// The slot for one model, and what may come into it.
pub struct Models {
    loader: Box<dyn Loader>,
    /// Held while a model is loaded, switched or given back.
    changing: Arc<tokio::sync::Mutex<()>>,
    slot: Mutex<Slot>,
    leases: AtomicUsize,
    released: Notify,
    used: Mutex<Instant>,
    /// Loads since the start.
    pub loads: AtomicU64,
    /// Times the model was given back because it was idle.
    pub unloads: AtomicU64,
    loading: std::sync::atomic::AtomicBool,
    /// A request waits until the model in memory is let go: no new one may begin to use it.
    switching: std::sync::atomic::AtomicBool,
    /// An engine ends, on a thread of its own.
    giving_back: std::sync::atomic::AtomicBool,
    fatal: Arc<dyn Fn(&str) + Send + Sync>,
    /// What is known of the board's power, if anything is.
    pub power: Option<Arc<dyn Power>>,
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Models {
    /// An empty slot. `fatal` is called when an engine breaks.
    pub fn new(
        loader: Box<dyn Loader>,
        fatal: Arc<dyn Fn(&str) + Send + Sync>,
        power: Option<Arc<dyn Power>>,
    ) -> Models {
        Models {
            loader,
            changing: Arc::default(),
            slot: Mutex::default(),
            leases: AtomicUsize::new(0),
            released: Notify::new(),
            used: Mutex::new(Instant::now()),
            loads: AtomicU64::new(0),
            unloads: AtomicU64::new(0),
            loading: false.into(),
            switching: false.into(),
            giving_back: false.into(),
            fatal,
            power,
        }
    }

    /// The models that may be asked for, the default first.
    pub fn known(&self) -> Result<Vec<Known>> {
        self.loader.known()
    }

    /// The model in memory, without a lease: for listings and metrics.
    pub fn peek(&self) -> Option<Arc<Live>> {
        lock(&self.slot).live.clone()
    }

    /// The number of the model in memory and its engine's beats.
    pub fn beats(&self) -> Option<(u64, u64)> {
        let live = self.peek()?;
        Some((live.number, live.handle.beats()))
    }

    /// Whether one is being loaded now.
    pub fn is_loading(&self) -> bool {
        self.loading.load(Ordering::Relaxed)
    }

    /// The model in memory, whichever it is.
    pub fn present(self: &Arc<Self>) -> Option<Lease> {
        self.lease(None)
    }

    fn lease(self: &Arc<Self>, named: Option<&str>) -> Option<Lease> {
        let slot = lock(&self.slot);
        let live = slot.live.clone().filter(|l| named.is_none_or(|n| n == l.name))?;
        // Counted under the slot's lock: who empties the slot looks at the count under it too.
        self.leases.fetch_add(1, Ordering::SeqCst);
        Some(Lease { live, models: self.clone() })
    }

    /// The model of that name, loaded first if it is not in memory; without a name, the default. Requests for another
    /// model than the one in memory are met in the order in which they come: those for that one wait behind them.
    pub async fn get(self: &Arc<Self>, named: Option<&str>, within: Duration) -> Answered<Lease> {
        let named = named.filter(|n| !n.is_empty() && *n != "default");
        let default = match named {
            Some(_) => None,
            None => Some(self.known()?.first().map(|k| k.name.clone()).ok_or_else(|| unknown("", &[]))?),
        };
        let named = named.or(default.as_deref());
        if !self.switching.load(Ordering::SeqCst)
            && let Some(lease) = self.lease(named)
        {
            return Ok(lease);
        }
        tokio::time::timeout(within, self.switch(named)).await.unwrap_or_else(|_| {
            let message = format!("model: not loaded within {} s", within.as_secs());
            Err(Fail::new(StatusCode::SERVICE_UNAVAILABLE, message).code("model_loading"))
        })
    }

    /// Loads the default model; its error stays what it is, for the program's exit code.
    pub async fn preload(self: &Arc<Self>) -> Result<()> {
        let known = self.known()?;
        let none = || Error::bad("settings", "model", "a model to serve", "none");
        let name = known.first().map(|k| k.name.clone()).ok_or_else(none)?;
        let changing = self.changing.clone().lock_owned().await;
        if self.peek().is_some_and(|l| l.name == name) {
            return Ok(());
        }
        let models = self.clone();
        let loaded = tokio::task::spawn_blocking(move || {
            let loaded = models.load(&name);
            drop(changing);
            loaded
        });
        loaded.await.unwrap_or_else(|_| Err(Error::Stopped("loading panicked".into())))
    }

    async fn switch(self: &Arc<Self>, named: Option<&str>) -> Answered<Lease> {
        let known = self.known()?;
        let name = match named {
            Some(n) if known.iter().any(|k| k.name == n) => n.to_owned(),
            Some(n) => return Err(unknown(n, &known)),
            None => known.first().map(|k| k.name.clone()).ok_or_else(|| unknown("", &known))?,
        };
        let mut changing = self.changing.clone().lock_owned().await;
        // Another request may have loaded it while this one waited.
        if let Some(lease) = self.lease(Some(&name)) {
            return Ok(lease);
        }
        // Gone with this request, however it ends.
        let waiting = Switching::begin(&self.switching);
        loop {
            let released = self.released.notified();
            if let Some(old) = self.take_if_unused(None) {
                changing = self.give_back(old, changing).await;
                break;
            }
            released.await;
        }
        // Once begun, a load is finished even if the request that began it gives up: the next one will want it. Until then
        // the slot is its own, so the lock goes with it.
        drop(waiting);
        let models = self.clone();
        let loaded = tokio::task::spawn_blocking(move || {
            let loaded = models.load(&name).map(|()| models.lease(None));
            drop(changing);
            loaded
        });
        let stopped = |why: &str| Fail::from(Error::Stopped(why.into()));
        let lease = loaded.await.unwrap_or_else(|_| Err(Error::Stopped("loading panicked".into())))?;
        lease.ok_or_else(|| stopped("the daemon ends"))
    }

    fn load(&self, name: &str) -> Result<()> {
        self.loading.store(true, Ordering::Relaxed);
        let fatal = self.fatal.clone();
        let started = Instant::now();
        let loaded = self.loader.load(name, Box::new(move |why| fatal(why)));
        self.loading.store(false, Ordering::Relaxed);
        let l = loaded?;
        let took = started.elapsed().as_secs_f64();
        observe::note(format_args!("model {name}: {} in {took:.2} s", Bytes(l.planned_bytes)));
        let live = Live {
            number: self.loads.fetch_add(1, Ordering::Relaxed) + 1,
            name: name.to_owned(),
            handle: l.service.handle(),
            grammars: Grammars::new(l.tokenizer.clone()),
            tool_format: l.template.as_ref().and_then(|t| ToolFormat::of_template(t.source(true))),
            longest_token: longest_token(&l.tokenizer),
            tokenizer: l.tokenizer,
            template: l.template,
            kind: l.kind,
            planned_bytes: l.planned_bytes,
        };
        *lock(&self.used) = Instant::now();
        *lock(&self.slot) = Slot { live: Some(Arc::new(live)), service: Some(l.service) };
        Ok(())
    }

    /// Empties the slot if no request uses it (and has not for `idle`).
    fn take_if_unused(&self, idle: Option<Duration>) -> Option<Slot> {
        let mut slot = lock(&self.slot);
        let unused = self.leases.load(Ordering::SeqCst) == 0
            && idle.is_none_or(|i| slot.live.is_some() && lock(&self.used).elapsed() >= i);
        unused.then(|| std::mem::take(&mut *slot))
    }

    /// Gives the model's memory back if it was idle for so long.
    pub async fn unload_idle(self: &Arc<Self>, idle: Duration) {
        let Ok(changing) = self.changing.clone().try_lock_owned() else { return };
        if let Some(old) = self.take_if_unused(Some(idle)) {
            let name = old.live.as_ref().map_or(String::new(), |l| l.name.clone());
            drop(self.give_back(old, changing).await);
            self.unloads.fetch_add(1, Ordering::Relaxed);
            observe::note(format_args!("model {name}: idle for {} s, given back", idle.as_secs()));
        }
    }

    /// Dropping a service waits for its thread, which writes its sessions first; no connection may wait so. The slot stays
    /// locked until that is done, even if whoever asked gives up.
    async fn give_back(self: &Arc<Self>, slot: Slot, changing: Changing) -> Changing {
        let models = self.clone();
        models.giving_back.store(true, Ordering::SeqCst);
        let given = tokio::task::spawn_blocking(move || {
            drop(slot);
            models.giving_back.store(false, Ordering::SeqCst);
            changing
        });
        match given.await {
            Ok(changing) => changing,
            // It panicked, or the runtime ends.
            Err(_) => self.changing.clone().lock_owned().await,
        }
    }

    /// Ends the engine: open requests get until `grace` is over.
    pub async fn stop(&self, grace: Duration) {
        if self.giving_back.load(Ordering::SeqCst) {
            // Its sessions are being written.
            drop(self.changing.lock().await);
        }
        let slot = std::mem::take(&mut *lock(&self.slot));
        let ended = tokio::task::spawn_blocking(move || {
            if let Some(service) = slot.service {
                service.stop(grace);
            }
        });
        drop(ended.await);
    }
}

/// Set while a request waits for the model in memory to be let go.
struct Switching<'a>(&'a std::sync::atomic::AtomicBool);

impl Switching<'_> {
    fn begin(flag: &std::sync::atomic::AtomicBool) -> Switching<'_> {
        flag.store(true, Ordering::SeqCst);
        Switching(flag)
    }
}

impl Drop for Switching<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn unknown(name: &str, known: &[Known]) -> Fail {
    let names: Vec<&str> = known.iter().map(|k| k.name.as_str()).collect();
    let message = format!("model: expected one of {}, found {name:?}", names.join(", "));
    let fail = Fail::new(StatusCode::NOT_FOUND, crate::units::one_line(&message)).code("model_not_found");
    Fail { param: Some("model".into()), ..fail }
}
