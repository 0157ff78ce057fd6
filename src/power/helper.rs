//! The clock helper: the one process that may write clocks. It knows six verbs, holds what one client wishes while that
//! client lives, and puts everything back when it does not.
//!
//! Threads: one that owns the knobs; one that accepts; one a connection, which reads lines and waits for answers.

use super::clocks::Actuator;
use super::modes::Modes;
use super::types::Clocks;
use super::wire::{Answer, Ask, Held, LEASE_MS_MAX, LINE_BYTES_MAX};
use crate::units::{Error, Result, one_line};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

/// Connections at a time: the daemon's, and a few of people who look.
const CONNECTIONS_MAX: usize = 8;
/// A connection that says nothing for so long is closed.
const SILENT_MAX: Duration = Duration::from_secs(120);
/// How often others' changes are looked for: a robot once ran for 85 minutes without its cap.
const RECONCILE_EVERY: Duration = Duration::from_secs(2);
/// How often the end is looked for.
const STOP_EVERY: Duration = Duration::from_millis(100);

/// A line from a connection, or its end.
struct Letter {
    from: usize,
    /// None: it is gone.
    ask: Option<(Ask, SyncSender<Answer>)>,
}

/// Whose wishes are held.
struct Holder {
    from: usize,
    lease: Duration,
    until: Instant,
}

/// The helper's state.
pub struct Helper {
    actuator: Actuator,
    modes: Modes,
    holder: Option<Holder>,
}

impl Helper {
    /// Puts back what an earlier helper left, which opening the actuator does.
    pub fn new(actuator: Actuator, modes: Modes) -> Helper {
        Helper { actuator, modes, holder: None }
    }

    /// Serves until `stop` says so, then gives everything back.
    pub fn serve(mut self, listener: UnixListener, stop: Arc<dyn Fn() -> bool + Send + Sync>) -> Result<()> {
        let (letters, inbox) = mpsc::sync_channel(CONNECTIONS_MAX * 2);
        let accepting = stop.clone();
        std::thread::Builder::new()
            .name("clocks-accept".into())
            .spawn(move || accept(&listener, &letters, accepting.as_ref()))
            .map_err(|e| Error::io("clock helper", "start a thread", e))?;
        let mut reconciled = Instant::now();
        while !stop() {
            match inbox.recv_timeout(self.patience()) {
                Ok(letter) => self.take(letter),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.expire()?;
            if reconciled.elapsed() >= RECONCILE_EVERY {
                reconciled = Instant::now();
                self.actuator.reconcile()?;
            }
        }
        self.actuator.release()
    }

    /// How long nothing needs to be done.
    fn patience(&self) -> Duration {
        let lease = self.holder.as_ref().map(|h| h.until.saturating_duration_since(Instant::now()));
        lease.unwrap_or(STOP_EVERY).min(STOP_EVERY)
    }

    /// Gives everything back whose owner fell silent.
    fn expire(&mut self) -> Result<()> {
        if self.holder.as_ref().is_some_and(|h| h.until <= Instant::now()) {
            log::warn!("no heartbeat: clocks go back");
            self.holder = None;
            self.actuator.release()?;
        }
        Ok(())
    }

    fn take(&mut self, letter: Letter) {
        let is_holder = self.holder.as_ref().is_some_and(|h| h.from == letter.from);
        let Some((ask, reply)) = letter.ask else {
            if is_holder {
                log::info!("who set the clocks is gone: they go back");
                self.holder = None;
                if let Err(e) = self.actuator.release() {
                    log::error!("{e}");
                }
            }
            return;
        };
        // Any word of the holder is a sign of life.
        if let Some(h) = self.holder.as_mut().filter(|_| is_holder) {
            h.until = Instant::now() + h.lease;
        }
        let answer = self
            .answer(letter.from, ask)
            .unwrap_or_else(|e| Answer { error: Some(one_line(&e.to_string())), ..Answer::default() });
        // A client that does not wait for its answer has lost it.
        drop(reply.try_send(answer));
    }

    fn answer(&mut self, from: usize, ask: Ask) -> Result<Answer> {
        let mut answer = Answer::default();
        match ask {
            Ask::Set { clocks, lease_ms } => {
                check(&clocks, lease_ms)?;
                if self.holder.as_ref().is_some_and(|h| h.from != from) {
                    let (needs, has) = ("to be the only one".into(), "another client".into());
                    return Err(Error::Limit { what: "holding clocks".into(), needs, has });
                }
                let lease = Duration::from_millis(lease_ms);
                self.holder = Some(Holder { from, lease, until: Instant::now() + lease });
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

fn accept(listener: &UnixListener, letters: &SyncSender<Letter>, stop: &(dyn Fn() -> bool + Send + Sync)) {
    let open = Arc::new(AtomicUsize::new(0));
    drop(listener.set_nonblocking(true));
    let mut number = 0;
    while !stop() {
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(STOP_EVERY / 4);
            continue;
        };
        if open.load(Ordering::SeqCst) >= CONNECTIONS_MAX {
            let full = Answer { error: Some("too many connections".into()), ..Answer::default() };
            drop(say(&mut stream, &full));
            continue;
        }
        number += 1;
        open.fetch_add(1, Ordering::SeqCst);
        let (letters, from, left) = (letters.clone(), number, open.clone());
        let spawned = std::thread::Builder::new().name("clocks-client".into()).spawn(move || {
            converse(stream, from, &letters);
            drop(letters.send(Letter { from, ask: None }));
            left.fetch_sub(1, Ordering::SeqCst);
        });
        if spawned.is_err() {
            open.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Reads lines until there are none, or until one cannot be answered.
fn converse(stream: UnixStream, from: usize, letters: &SyncSender<Letter>) {
    let ready = stream.set_nonblocking(false).is_ok()
        && stream.set_read_timeout(Some(SILENT_MAX)).is_ok()
        && stream.set_write_timeout(Some(SILENT_MAX)).is_ok();
    let Ok(mut out) = stream.try_clone() else { return };
    if !ready {
        return;
    }
    let mut lines = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Ok(n) if n > 0 => {}
            _ => return,
        }
        let refused = |why: String| Answer { error: Some(one_line(&why)), ..Answer::default() };
        let too_long = line.len() as u64 == LINE_BYTES_MAX && !line.ends_with(b"\n");
        let answer = match serde_json::from_slice::<Ask>(&line) {
            _ if too_long => {
                refused(format!("request: expected a line of at most {LINE_BYTES_MAX} bytes, found more"))
            }
            Err(e) => refused(format!(
                "request: expected one of the verbs set, beat, release, status, mode, fan: {e}"
            )),
            Ok(ask) => {
                let (reply, answer) = mpsc::sync_channel(1);
                if letters.send(Letter { from, ask: Some((ask, reply)) }).is_err() {
                    return;
                }
                let Ok(answer) = answer.recv() else { return };
                answer
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
