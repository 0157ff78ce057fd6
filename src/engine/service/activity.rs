//! What the engine is doing, told to whoever steers clocks: at each change, never a token.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What kind of work the coming steps are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// None.
    Idle = 0,
    /// A prompt is read; others may generate beside it.
    Prefill = 1,
    /// Nothing but generating.
    Decode = 2,
}

impl Activity {
    const ALL: [Activity; 3] = [Activity::Idle, Activity::Prefill, Activity::Decode];
}

/// Changes that are remembered for one who was slow to wake; older ones are forgotten.
const CHANGES_MAX: usize = 256;

#[derive(Debug, Default)]
struct Bell {
    /// Changes so far, and rings for other reasons.
    rings: u64,
    /// Changes that no one has taken yet, with their times.
    changes: VecDeque<(Instant, Activity)>,
}

/// The present activity, and a bell that rings when it changes. One engine sets it, any thread waits.
#[derive(Debug, Default)]
pub struct Signal {
    now: AtomicU8,
    bell: Mutex<Bell>,
    rang: Condvar,
}

impl Signal {
    /// The present activity.
    pub fn now(&self) -> Activity {
        Activity::ALL[usize::from(self.now.load(Ordering::Acquire))]
    }

    /// Sets it. Costs one atomic read where it is the same as before.
    pub fn set(&self, activity: Activity) {
        if self.now.load(Ordering::Relaxed) != activity as u8 {
            self.now.store(activity as u8, Ordering::Release);
            let mut bell = self.lock();
            if bell.changes.len() == CHANGES_MAX {
                bell.changes.pop_front();
            }
            bell.changes.push_back((Instant::now(), activity));
            bell.rings += 1;
            drop(bell);
            self.rang.notify_all();
        }
    }

    /// Wakes who waits without a change: a setting changed, or it is time to end.
    pub fn ring(&self) {
        self.lock().rings += 1;
        self.rang.notify_all();
    }

    /// The changes since they were taken last, oldest first: who woke late still knows when each was.
    pub fn take_changes(&self) -> Vec<(Instant, Activity)> {
        self.lock().changes.drain(..).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Bell> {
        // Nothing is half done under this lock.
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it rang since `seen` rings, or until the time is up; returns the rings so far. Begin with 0.
    pub fn wait(&self, seen: u64, within: Duration) -> u64 {
        let until = Instant::now() + within;
        let mut bell = self.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if bell.rings != seen || left.is_zero() {
                return bell.rings;
            }
            bell = self.rang.wait_timeout(bell, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[test]
fn who_waits_hears_of_a_change_and_of_nothing_else() {
    let signal = std::sync::Arc::new(Signal::default());
    assert_eq!(signal.now(), Activity::Idle);
    signal.set(Activity::Idle);
    assert_eq!(signal.wait(0, Duration::ZERO), 0, "no change, no ring");
    let other = signal.clone();
    let waiter = std::thread::spawn(move || (other.wait(0, Duration::from_secs(60)), other.now()));
    signal.set(Activity::Prefill);
    assert_eq!(waiter.join().unwrap(), (1, Activity::Prefill));
    // A change between two waits is not missed.
    signal.set(Activity::Decode);
    signal.set(Activity::Decode);
    assert_eq!(signal.wait(1, Duration::from_secs(60)), 2);
    signal.ring();
    assert_eq!(signal.wait(2, Duration::from_secs(60)), 3);
    let changes: Vec<Activity> = signal.take_changes().into_iter().map(|(_, a)| a).collect();
    assert_eq!(changes, [Activity::Prefill, Activity::Decode]);
    assert!(signal.take_changes().is_empty());
    for i in 0..2 * CHANGES_MAX {
        signal.set(if i % 2 == 0 { Activity::Idle } else { Activity::Decode });
    }
    assert_eq!(signal.take_changes().len(), CHANGES_MAX);
}
