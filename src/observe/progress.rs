//! Progress of long work: a bar on a terminal, sparse log lines elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with binary units and a rate.
    Bytes,
    /// Things: tensors, windows, repetitions.
    Items,
}

/// A running count towards a total. It may be shared between threads; dropping it removes the bar.
pub struct Progress {
    bar: Option<ProgressBar>,
    what: String,
    total: u64,
    unit: Unit,
    done: AtomicU64,
    started: Instant,
    /// The last log line, in milliseconds since the start.
    said_ms: AtomicU64,
}

/// Between two log lines when there is no terminal.
const LOG_EVERY: Duration = Duration::from_secs(5);

impl Progress {
    /// Starts at 0 of `total`. Draws only when standard error is a terminal.
    pub fn new(what: impl Into<String>, total: u64, unit: Unit) -> Self {
        let what = what.into();
        let bar = std::io::stderr().is_terminal().then(|| bar(&what, total, unit));
        Progress {
            bar,
            what,
            total,
            unit,
            done: AtomicU64::new(0),
            started: Instant::now(),
            said_ms: AtomicU64::new(0),
        }
    }

    /// Counts `n` more as done.
    pub fn add(&self, n: u64) {
        let done = self.done.fetch_add(n, Ordering::Relaxed) + n;
        match &self.bar {
            Some(bar) => bar.inc(n),
            None => self.log(done),
        }
    }

    /// Says how much is done in all, for work that counts by itself.
    pub fn set(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => bar.set_position(done),
            None => self.log(done),
        }
    }

    /// How much is done.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn log(&self, done: u64) {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let said_ms = self.said_ms.load(Ordering::Relaxed);
        let due = now_ms - said_ms.min(now_ms) >= LOG_EVERY.as_millis() as u64;
        // Only the thread that moves the mark speaks.
        let mine =
            || self.said_ms.compare_exchange(said_ms, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if due && mine() {
            log::info!("{}: {}", self.what, share(done, self.total, self.unit));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn share(done: u64, total: u64, unit: Unit) -> String {
    let percent = (done as f64 / total.max(1) as f64 * 100.0).min(100.0);
    match unit {
        Unit::Bytes => {
            format!("{} of {} ({percent:.0}%)", crate::units::Bytes(done), crate::units::Bytes(total))
        }
        Unit::Items => format!("{done} of {total} ({percent:.0}%)"),
    }
}

fn bar(what: &str, total: u64, unit: Unit) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let template = match unit {
        Unit::Bytes => "{msg} [{bar:32}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        Unit::Items => "{msg} [{bar:32}] {pos}/{len} {eta}",
    };
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(what.to_owned());
    bar
}

#[test]
fn shares_are_in_the_unit_of_the_work() {
    assert_eq!(share(512, 1024, Unit::Bytes), "512 B of 1.0 KiB (50%)");
    assert_eq!(share(3, 0, Unit::Items), "3 of 0 (100%)");
    let p = Progress::new("test", 10, Unit::Items);
    p.add(4);
    p.add(3);
    assert_eq!(p.done(), 7);
}
