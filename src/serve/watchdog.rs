//! Whether the service manager's watchdog is still told that all is well: only while the engine gets something done, or is
//! idle and would hear of work. A step may take long, but within it layer after layer is done; one that stands still (a
//! driver that hangs, a disk that no longer answers a page of weights) is what a restart mends.

use std::time::{Duration, Instant};

/// How long nothing may get done. The longest honest gap is one layer of a long prompt's chunk on one slow core, seconds; a
/// restart in the middle of honest work would only begin it again.
pub const STUCK_AFTER: Duration = Duration::from_secs(60);

/// Compares beats.
#[derive(Debug)]
pub struct Watchdog {
    stuck_after: Duration,
    /// Which engine was looked at, and its beats then; none while no model is in memory.
    seen: Option<(u64, u64)>,
    /// When those beats were new.
    since: Option<Instant>,
    stuck: bool,
}

impl Watchdog {
    /// One that gives an engine so long.
    pub fn new(stuck_after: Duration) -> Watchdog {
        Watchdog { stuck_after, seen: None, since: None, stuck: false }
    }

    /// True if all is well: `engine` is the number of the engine in memory, if any, and its beats so far.
    pub fn is_well(&mut self, now: Instant, engine: Option<(u64, u64)>) -> bool {
        if engine.is_none() || engine != self.seen {
            (self.seen, self.since) = (engine, Some(now));
        }
        let still = now.duration_since(*self.since.get_or_insert(now));
        let stuck = still >= self.stuck_after;
        if stuck && !self.stuck {
            log::error!("engine: nothing done for {} s; the watchdog is told no more", still.as_secs());
        }
        if self.stuck && !stuck {
            log::warn!("engine: it goes on");
        }
        self.stuck = stuck;
        !stuck
    }
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;
