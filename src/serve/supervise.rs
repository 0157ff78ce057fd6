//! The server's life: sockets, model, signals, idle unloading, an orderly end.

use super::connections::{Connections, accept};
use super::listen::Listening;
use super::models::{Loader, Models};
use super::power::Power;
use super::watchdog::{STUCK_AFTER, Watchdog};
use super::{Server, Settings};
use crate::observe;
use crate::units::{Error, Result};
use sd_notify::NotifyState;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

/// Threads for connections. They parse and copy a little; the cores belong to the model.
const THREADS: usize = 2;
/// Threads for templates, tokenizing and loading, at most.
const BLOCKING_THREADS_MAX: usize = 16;
/// What a failed request's answer gets to reach its client.
const FLUSH: Duration = Duration::from_millis(500);

/// How often the server looks around, at the longest and at the shortest.
const TICK_MAX: Duration = Duration::from_secs(1);
const TICK_MIN: Duration = Duration::from_millis(10);

/// How often the service manager's watchdog is told, if it wants to be: twice in its time, and never so often that telling it
/// is all that is done. A time of 0 is none (sd_watchdog_enabled(3)).
fn watchdog_tick(asked: Option<Duration>) -> Option<Duration> {
    asked.filter(|w| !w.is_zero()).map(|w| (w / 2).clamp(TICK_MIN, TICK_MAX))
}

#[test]
fn any_watchdog_time_gives_a_tick() {
    let us = Duration::from_micros;
    assert_eq!((watchdog_tick(None), watchdog_tick(Some(us(0)))), (None, None));
    let ticks = [1, 30_000, 1_000_000, u64::MAX].map(|asked| watchdog_tick(Some(us(asked))));
    assert_eq!(ticks, [TICK_MIN, us(15_000), us(500_000), TICK_MAX].map(Some));
}

/// Serves until told to end by SIGTERM or SIGINT; SIGHUP takes new settings from `reload`, which leaves fixed ones as they were.
///
/// # Errors
/// Where a socket cannot be had, the first model cannot be loaded, or the engine broke: [`Error::Stopped`].
pub fn run(
    settings: Settings,
    loader: Box<dyn Loader>,
    power: Option<Arc<dyn Power>>,
    reload: Box<dyn Fn() -> Result<Settings> + Send>,
) -> Result<()> {
    let listening = Listening::open(&settings)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_name("tegu-http")
        .enable_all()
        .build()
        .map_err(|e| Error::io("server", "start its threads", e))?;
    let ended = runtime.block_on(serve(settings, loader, power, reload, listening));
    // A load that is under way is not waited for.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

fn listen_for(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|e| Error::io("signals", "listen for them", e))
}

impl Signals {
    fn take() -> Result<Signals> {
        let (terminate, interrupt) =
            (listen_for(SignalKind::terminate())?, listen_for(SignalKind::interrupt())?);
        Ok(Signals { terminate, interrupt })
    }

    async fn end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn serve(
    settings: Settings,
    loader: Box<dyn Loader>,
    power: Option<Arc<dyn Power>>,
    reload: Box<dyn Fn() -> Result<Settings> + Send>,
    mut listening: Listening,
) -> Result<()> {
    let mut signals = Signals::take()?;
    let mut hangup = listen_for(SignalKind::hangup())?;
    let (fatal, mut broke) = mpsc::unbounded_channel::<String>();
    let fatal = Arc::new(move |why: &str| drop(fatal.send(why.to_owned())));
    if let Some(power) = &power {
        let fatal = fatal.clone();
        power.watch(Box::new(move |why| fatal(why)));
    }
    let server = Arc::new(Server {
        models: Arc::new(Models::new(loader, fatal, power)),
        metrics: Default::default(),
        started: Instant::now(),
        starting: settings.preload.into(),
        stopping: false.into(),
        settings: Arc::new(settings).into(),
    });
    let all = Arc::new(Connections::default());
    let counted = all.clone();
    drop(server.metrics.connections.set(Box::new(move || counted.count())));
    let (end, ending) = watch::channel(false);
    let tokio_error = |e| Error::io("socket", "serve", e);
    let unix = listening.unix.take().map(UnixListener::from_std).transpose().map_err(tokio_error)?;
    let tcp = listening.tcp.take().map(TcpListener::from_std).transpose().map_err(tokio_error)?;
    let accepting = tokio::spawn(accept(server.clone(), all.clone(), unix, tcp, ending));

    let outcome = tokio::select! {
        outcome = live(&server, &mut hangup, &mut broke, reload) => outcome,
        () = signals.end() => Ok(()),
    };
    notify(&[NotifyState::Stopping]);
    server.stopping.store(true, Ordering::Relaxed);
    let within = if outcome.is_err() { Duration::ZERO } else { server.settings().shutdown_within };
    observe::note(format_args!("ending; open requests have {} s", within.as_secs()));
    end.send_replace(true);
    drop(accepting.await);
    tokio::select! {
        _ = tokio::time::timeout(within, all.closed()) => {}
        // Told twice: at once.
        () = signals.end() => {}
    }
    server.models.stop(Duration::ZERO).await;
    drop(tokio::time::timeout(FLUSH, all.closed()).await);
    drop(listening);
    outcome
}

/// What goes on while it serves. Ends only when something broke.
async fn live(
    server: &Arc<Server>,
    hangup: &mut Signal,
    broke: &mut mpsc::UnboundedReceiver<String>,
    reload: Box<dyn Fn() -> Result<Settings> + Send>,
) -> Result<()> {
    if server.settings().preload {
        preload(server).await?;
        server.starting.store(false, Ordering::Relaxed);
    }
    notify(&[NotifyState::Ready]);
    observe::note("ready");
    let wanted = watchdog_tick(sd_notify::watchdog_enabled());
    let mut watchdog = Watchdog::new(STUCK_AFTER);
    let mut tick = tokio::time::interval(wanted.unwrap_or(TICK_MAX));
    loop {
        tokio::select! {
            _ = tick.tick() => {
                if wanted.is_some() && watchdog.is_well(Instant::now(), server.models.beats()) {
                    notify(&[NotifyState::Watchdog]);
                }
                if let Some(idle) = server.settings().idle_unload {
                    // Its sessions are written first, which may take longer than the watchdog waits.
                    let models = server.models.clone();
                    tokio::spawn(async move { models.unload_idle(idle).await });
                }
            }
            _ = hangup.recv() => {
                // Of two moments the service manager takes this for the beginning of the reload (sd_notify(3)).
                let now = NotifyState::monotonic_usec_now().ok();
                notify(&[NotifyState::Reloading].into_iter().chain(now).collect::<Vec<_>>());
                take_settings(server, &reload);
                notify(&[NotifyState::Ready]);
            }
            Some(why) = broke.recv() => return Err(Error::Stopped(why)),
        }
    }
}

/// Loads the first model. The service manager waits as long as that takes: it is told every few seconds that it goes on.
async fn preload(server: &Arc<Server>) -> Result<()> {
    const EVERY: Duration = Duration::from_secs(10);
    let mut tick = tokio::time::interval(EVERY);
    let mut loading = std::pin::pin!(server.models.preload());
    loop {
        tokio::select! {
            loaded = &mut loading => return loaded,
            _ = tick.tick() => notify(&[NotifyState::ExtendTimeoutUsec(3 * EVERY.as_micros() as u32)]),
        }
    }
}

/// Takes what may change while running. A bad file changes nothing.
fn take_settings(server: &Server, reload: &dyn Fn() -> Result<Settings>) {
    match reload() {
        Ok(new) => {
            *server.settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
            observe::note("settings reloaded");
        }
        Err(e) => log::error!("reload: {e}; the settings stay as they were"),
    }
}

/// Tells the service manager, if there is one.
fn notify(state: &[NotifyState]) {
    if let Err(e) = sd_notify::notify(state) {
        log::warn!("service manager: {e}");
    }
}
