//! Signals. Ctrl-C: the first stops the answer, the second leaves. And what is put in order before any of them ends a
//! command that knows nothing of signals.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Once, mpsc};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::observe;

/// What Ctrl-C means now.
const IDLE: u8 = 0;
const ANSWERING: u8 = 1;
const STOPPED: u8 = 2;
const LEAVING: u8 = 3;
static STATE: AtomicU8 = AtomicU8::new(IDLE);

/// The exit code of a program that a signal 2 ended.
const EXIT_INTERRUPTED: i32 = 130;

/// The signal, taken over.
#[derive(Debug)]
pub struct Interrupts(());

impl Interrupts {
    /// Takes the signal over. Before this, Ctrl-C ends the process as usual.
    pub fn take() -> Interrupts {
        let taken = ctrlc::set_handler(|| match STATE.load(Ordering::SeqCst) {
            ANSWERING => STATE.store(STOPPED, Ordering::SeqCst),
            IDLE => {
                STATE.store(LEAVING, Ordering::SeqCst);
                observe::note("\n(Ctrl-C again leaves)");
            }
            _ => std::process::exit(EXIT_INTERRUPTED),
        });
        // It fails only where a handler is set already, and then that one does the same.
        drop(taken);
        Interrupts(())
    }

    /// An answer begins.
    pub fn begin(&self) {
        STATE.store(ANSWERING, Ordering::SeqCst);
    }

    /// The answer is to stop.
    pub fn stopped(&self) -> bool {
        STATE.load(Ordering::SeqCst) == STOPPED
    }

    /// The answer ended, stopped or not.
    pub fn end(&self) {
        STATE.store(IDLE, Ordering::SeqCst);
    }
}

/// Has `tidy` called before SIGINT, SIGTERM or SIGHUP ends the process, which then ends by that signal as ever. For commands
/// that do not take signals over themselves. Only the first call counts.
pub fn before_end(tidy: fn()) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        // What a parent has us ignore (nohup, a script's background jobs) stays ignored.
        let heard = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(move |s| !is_ignored(&status, *s));
        let (ready, taken) = mpsc::channel::<()>();
        // They are taken over in the thread: without one they end the process as before.
        let waiting = std::thread::Builder::new().name("signals".into()).spawn(move || {
            let signals = Signals::new(heard);
            drop(ready);
            if let Some(signal) = signals.ok().and_then(|mut s| s.forever().next()) {
                tidy();
                drop(emulate_default_handler(signal));
            }
        });
        match waiting {
            // Whatever is begun after this is found by a signal.
            Ok(_) => drop(taken.recv()),
            Err(e) => log::warn!("no thread for signals ({e}): an interrupt may leave a part of a file"),
        }
    });
}

/// Whether a process with that /proc/PID/status ignores a signal: `SigIgn` has bit 0 for signal 1 (proc(5)).
fn is_ignored(status: &str, signal: i32) -> bool {
    let line = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[test]
fn ignored_signals_are_read_off_the_mask() {
    let status =
        "Name:\ttegu\nSigBlk:\t0000000000000003\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000004002\n";
    assert!(is_ignored(status, SIGHUP) && !is_ignored(status, SIGINT) && !is_ignored(status, SIGTERM));
    assert!(!is_ignored("", SIGHUP));
}
