//! Ctrl-C: the first stops the answer, the second leaves.

use std::sync::atomic::{AtomicU8, Ordering};

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
