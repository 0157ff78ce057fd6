//! The thread that reads the board's sensors, and tells what it saw.

use super::looker::Looker;
use super::told::{Seen, Told};
use super::{SAMPLE, SAMPLE_IDLE};
use crate::engine::service::Activity;
use crate::power::governor::Ladder;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Who looks.
pub struct Watcher {
    told: Arc<Told>,
    looker: Looker,
    ladder: Ladder,
}

impl Watcher {
    /// It has seen nothing yet.
    pub fn new(told: Arc<Told>, looker: Looker) -> Watcher {
        Watcher { told, looker, ladder: Ladder::default() }
    }

    /// Looks until it is time to end.
    pub fn run(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.live())).is_err() {
            // Samples stop, so that the governor falls back until the daemon has ended.
            log::error!("power: a bug in the sensors");
            self.told.broke("the thread of the sensors: a bug");
        }
    }

    fn live(&mut self) {
        let (mut rings, mut due) = (0, Instant::now() + SAMPLE);
        loop {
            rings = self.told.signal.wait(rings, due.saturating_duration_since(Instant::now()));
            if self.told.stop.load(Ordering::SeqCst) {
                return;
            }
            let works = self.told.signal.now() != Activity::Idle;
            if Instant::now() >= due {
                self.look();
                // Who decides has something to decide on.
                self.told.signal.ring();
                let rests = !works && self.told.profile().is_none();
                due = Instant::now() + if rests { SAMPLE_IDLE } else { SAMPLE };
            } else if works {
                // Work began while it rested.
                due = due.min(Instant::now() + SAMPLE);
            }
        }
    }

    /// Reads the sensors.
    pub fn look(&mut self) {
        self.told.pass();
        let status = self.looker.look();
        let sample = status.sample.clone();
        let counter_mj = self.looker.counter_mj();
        if self.told.looked(status, counter_mj) || self.ladder == Ladder::default() {
            self.ladder = self.looker.ladder();
        }
        self.told.saw(Seen { sample, ladder: self.ladder.clone() });
    }
}
