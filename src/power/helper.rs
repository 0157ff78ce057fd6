//! The clock helper: the one process that may write clocks. It knows six verbs, holds what one client wishes while that
//! client lives, and puts everything back when it does not.
//!
//! Threads: one a connection, which reads lines, does what they say and answers, so that a wish becomes clocks with no
//! other thread in between; one that accepts; and the caller's, which sees to leases and to what others change. The knobs
//! are behind one lock.

use super::clocks::Actuator;
use super::modes::Modes;
use super::types::Clocks;
use super::wire::{Answer, Ask, Held, LEASE_MS_MAX, LINE_BYTES_MAX};
use crate::units::{Error, Result, one_line};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connections at a time: the daemon's, and a few of people who look.
const CONNECTIONS_MAX: usize = 8;
/// A connection that says nothing for so long is closed.
const SILENT_MAX: Duration = Duration::from_secs(120);
/// Where there is no room for another, one that holds nothing and said nothing for so long makes it.
const YIELDS_AFTER_MS: u64 = 1_000;
/// How often others' changes are looked for: a robot once ran for 85 minutes without its cap.
const RECONCILE_EVERY: Duration = Duration::from_secs(2);
/// How often the end, and leases, are looked for.
const STOP_EVERY: Duration = Duration::from_millis(100);
/// A pause where no connection can be accepted, for want of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(25);

/// What is known of a connection without a look at the knobs, which may be busy with something that takes long.
#[derive(Default)]
struct Pulse {
    /// When its last word came.
    heard_ms: AtomicU64,
    /// It holds clocks.
    holds: AtomicBool,
    /// What it held went back because it was silent, and it was not told yet.
    lost: AtomicBool,
}

/// Whose wishes are held.
struct Holder {
    from: u64,
    lease_ms: u64,
    pulse: Arc<Pulse>,
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.pulse.holds.store(false, Ordering::SeqCst);
    }
}

/// The helper's state.
pub struct Helper {
    actuator: Actuator,
    modes: Modes,
    holder: Option<Holder>,
    /// It has given everything back for the last time.
    ended: bool,
}

/// A connection, as the others see it.
struct Open {
    number: u64,
    stream: UnixStream,
    pulse: Arc<Pulse>,
}

/// What the threads share.
struct Shared {
    helper: Mutex<Helper>,
    open: Mutex<Vec<Open>>,
    began: Instant,
}

impl Shared {
    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// The knobs. After a bug in another thread nothing is done with them but to put them back.
    fn helper(&self) -> Result<MutexGuard<'_, Helper>> {
        self.helper.lock().map_err(|_| broken("a bug; clocks go back"))
    }

    fn open(&self) -> MutexGuard<'_, Vec<Open>> {
        // Whole at every moment.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Helper {
    /// Puts back what an earlier helper left, which opening the actuator does.
    pub fn new(actuator: Actuator, modes: Modes) -> Helper {
        Helper { actuator, modes, holder: None, ended: false }
    }

    /// Serves until `stop` says so, then gives everything back.
    pub fn serve(self, listener: UnixListener, stop: Arc<dyn Fn() -> bool + Send + Sync>) -> Result<()> {
        let address = listener.local_addr().ok().and_then(|a| a.as_pathname().map(Path::to_owned));
        let shared = Arc::new(Shared { helper: self.into(), open: Mutex::default(), began: Instant::now() });
        let (accepting, ends) = (shared.clone(), stop.clone());
        std::thread::Builder::new()
            .name("clocks-accept".into())
            .spawn(move || accept(&listener, &accepting, ends.as_ref()))
            .map_err(|e| Error::io("clock helper", "start a thread", e))?;
        let kept = keep(&shared, stop.as_ref());
        // A lock that a bug left poisoned does not keep clocks from going back.
        let mut helper = shared.helper.lock().unwrap_or_else(PoisonError::into_inner);
        helper.ended = true;
        let released = helper.actuator.release();
        drop(helper);
        // Whoever accepts wakes, and sees that it is over.
        drop(address.map(UnixStream::connect));
        kept.and(released)
    }

    /// Gives everything back whose owner fell silent.
    fn expire(&mut self, now_ms: u64) -> Result<()> {
        let silent =
            |h: &mut Holder| now_ms.saturating_sub(h.pulse.heard_ms.load(Ordering::SeqCst)) >= h.lease_ms;
        let Some(holder) = self.holder.take_if(silent) else { return Ok(()) };
        log::warn!("no heartbeat: clocks go back");
        holder.pulse.lost.store(true, Ordering::SeqCst);
        self.actuator.release()
    }

    /// A connection ended.
    fn gone(&mut self, from: u64) {
        if self.holder.as_ref().is_some_and(|h| h.from == from) {
            log::info!("who set the clocks is gone: they go back");
            self.holder = None;
            if let Err(e) = self.actuator.release() {
                log::error!("{e}");
            }
        }
    }

    fn answer(&mut self, from: u64, pulse: &Arc<Pulse>, ask: Ask) -> Result<Answer> {
        let mut answer = Answer::default();
        match ask {
            _ if self.ended => return Err(broken("it ends; clocks are back")),
            Ask::Set { clocks, lease_ms } => {
                check(&clocks, lease_ms)?;
                if self.holder.as_ref().is_some_and(|h| h.from != from) {
                    let (needs, has) = ("to be the only one".into(), "another client".into());
                    return Err(Error::Limit { what: "holding clocks".into(), needs, has });
                }
                // The old one's end is told first.
                self.holder = None;
                pulse.holds.store(true, Ordering::SeqCst);
                pulse.lost.store(false, Ordering::SeqCst);
                self.holder = Some(Holder { from, lease_ms, pulse: pulse.clone() });
                answer.outcomes = self.actuator.apply(&clocks)?;
            }
            Ask::Beat => {}
            Ask::Release => {
                // Anyone may ask for everything to go back: an operator's way out.
                self.holder = None;
                self.actuator.release()?;
            }
            Ask::Status => {
                let held = self.actuator.held().into_iter();
                answer.held = held.map(|(node, old, now)| Held { node, old, now }).collect();
                answer.want = self.holder.is_some().then(|| *self.actuator.want());
            }
            Ask::Mode { name } => answer.said = Some(self.modes.switch(&name)?),
            Ask::Fan { profile } => answer.said = Some(self.modes.fan(&profile)?),
        }
        Ok(answer)
    }
}

fn broken(why: &str) -> Error {
    Error::io("clock helper", "serve", std::io::Error::other(why))
}

/// Sees to leases and to what others change, until the end.
fn keep(shared: &Shared, stop: &(dyn Fn() -> bool + Send + Sync)) -> Result<()> {
    let mut reconciled = Instant::now();
    while !stop() {
        std::thread::sleep(STOP_EVERY);
        let mut helper = shared.helper()?;
        helper.expire(shared.now_ms())?;
        if reconciled.elapsed() >= RECONCILE_EVERY {
            reconciled = Instant::now();
            helper.actuator.reconcile()?;
        }
    }
    Ok(())
}

/// Refuses what no board can do.
fn check(clocks: &Clocks, lease_ms: u64) -> Result<()> {
    // The fastest memory clock of any board is under 10 GHz.
    const HZ: std::ops::RangeInclusive<u64> = 1_000_000..=10_000_000_000;
    let all = [
        ("gpu_cap_hz", clocks.gpu_cap_hz),
        ("gpu_floor_hz", clocks.gpu_floor_hz),
        ("emc_floor_hz", clocks.emc_floor_hz),
        ("emc_cap_hz", clocks.emc_cap_hz),
    ];
    for (name, hz) in all {
        if let Some(hz) = hz.filter(|hz| !HZ.contains(hz)) {
            return Err(Error::bad("request", name, "1 MHz to 10 GHz, in Hz", hz));
        }
    }
    match (1..=LEASE_MS_MAX).contains(&lease_ms) {
        true => Ok(()),
        false => Err(Error::bad("request", "lease_ms", format!("1 to {LEASE_MS_MAX}"), lease_ms)),
    }
}

/// A socket at `path`, in place of one that nobody serves any more. Who may connect is the folder's and the group's
/// business: the unit's.
pub fn listen(path: &Path) -> Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(Error::bad(path, "socket", "no other clock helper", "one that answers"));
    }
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()) => {
            return Err(Error::bad(path, "socket", "a path that is free, or a socket", "another file"));
        }
        Ok(_) => std::fs::remove_file(path).map_err(|e| Error::io(path, "remove the old socket", e))?,
        Err(_) => {}
    }
    UnixListener::bind(path).map_err(|e| Error::io(path, "listen", e))
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>, stop: &(dyn Fn() -> bool + Send + Sync)) {
    for number in 0u64.. {
        let accepted = listener.accept();
        if stop() {
            return;
        }
        let Ok((mut stream, _)) = accepted else {
            std::thread::sleep(ACCEPT_AGAIN);
            continue;
        };
        if !make_room(shared) {
            drop(stream.set_write_timeout(Some(ACCEPT_AGAIN)));
            drop(say(&mut stream, &refused("too many connections")));
            continue;
        }
        let pulse = Arc::new(Pulse { heard_ms: shared.now_ms().into(), ..Pulse::default() });
        let Ok(seen) = stream.try_clone() else { continue };
        shared.open().push(Open { number, stream: seen, pulse: pulse.clone() });
        let theirs = shared.clone();
        let spawned = std::thread::Builder::new().name("clocks-client".into()).spawn(move || {
            converse(stream, number, &pulse, &theirs);
            if let Ok(mut helper) = theirs.helper() {
                helper.gone(number);
            }
            theirs.open().retain(|o| o.number != number);
        });
        if spawned.is_err() {
            shared.open().retain(|o| o.number != number);
        }
    }
}

/// Whether there is room for a connection: where there is not, the one that has been silent longest makes it. Idle ones
/// must not keep the daemon from its clocks.
fn make_room(shared: &Shared) -> bool {
    let mut open = shared.open();
    if open.len() < CONNECTIONS_MAX {
        return true;
    }
    let now_ms = shared.now_ms();
    let heard = |o: &Open| o.pulse.heard_ms.load(Ordering::SeqCst);
    let idle = open.iter().enumerate().filter(|(_, o)| !o.pulse.holds.load(Ordering::SeqCst));
    let idle = idle.filter(|(_, o)| now_ms.saturating_sub(heard(o)) >= YIELDS_AFTER_MS);
    let Some(longest) = idle.min_by_key(|(_, o)| heard(o)).map(|(at, _)| at) else { return false };
    drop(open.remove(longest).stream.shutdown(Shutdown::Both));
    true
}

fn refused(why: &str) -> Answer {
    Answer { error: Some(one_line(why)), ..Answer::default() }
}

/// Reads lines until there are none, or until one cannot be answered.
fn converse(stream: UnixStream, from: u64, pulse: &Arc<Pulse>, shared: &Shared) {
    let ready = stream.set_read_timeout(Some(SILENT_MAX)).is_ok()
        && stream.set_write_timeout(Some(SILENT_MAX)).is_ok();
    let Ok(mut out) = stream.try_clone() else { return };
    if !ready {
        return;
    }
    let mut lines = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Ok(n) if n > 0 => {}
            _ => return,
        }
        // Any word is a sign of life.
        pulse.heard_ms.store(shared.now_ms(), Ordering::SeqCst);
        let too_long = line.len() as u64 == LINE_BYTES_MAX && !line.ends_with(b"\n");
        let answer = match serde_json::from_slice::<Ask>(&line) {
            _ if too_long => {
                refused(&format!("request: expected a line of at most {LINE_BYTES_MAX} bytes, found more"))
            }
            Err(e) => {
                let verbs = "set, beat, release, status, mode, fan";
                refused(&format!("request: expected one of the verbs {verbs}: {e}"))
            }
            // A heartbeat needs no knob, and must not wait for one.
            Ok(Ask::Beat) => Answer { lost: pulse.lost.swap(false, Ordering::SeqCst), ..Answer::default() },
            Ok(ask) => {
                let answer = shared.helper().and_then(|mut h| h.answer(from, pulse, ask));
                answer.unwrap_or_else(|e| refused(&e.to_string()))
            }
        };
        if say(&mut out, &answer).is_err() || too_long {
            return;
        }
    }
}

fn say(stream: &mut UnixStream, answer: &Answer) -> std::io::Result<()> {
    let mut line = serde_json::to_string(answer).expect("strings and numbers");
    line.push('\n');
    stream.write_all(line.as_bytes())
}
