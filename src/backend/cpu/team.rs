//! The team: persistent worker threads that run one closure together. Orin's robot programs need the other cores, so the
//! count is given, workers spin only for a bounded time after a job, and then sleep.
//!
//! A job is a pointer and an open door: the caller bumps an epoch that spinning workers watch, takes part as worker 0, and
//! workers that see the epoch *join* by a compare-and-swap. [`Team::chunks`] shuts the door when no work is left
//! and waits only for those who came in: a worker whose core the system gave to someone else holds nobody up. Handing
//! over takes 1-2 µs when the workers still spin. Locks are taken only to sleep and to wake sleepers.
//!
//! Workers that spin fetch nothing for the job to come: letting them fetch the first 128 KB of the next phase's weights was
//! measured, in turns, at 0.999 (DeepSeek-V2-Lite's shape) and 0.98 (a model that caches hold) of the decode rate without.

use crate::limits::THREADS_MAX;
use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the workers run: `(worker, workers)`.
type Job = dyn Fn(usize, usize) + Sync + 'static;

/// A value on cache lines of its own, so that one thread's writes do not slow another's reads (128: pairs of lines are
/// fetched together on x86, and some ARM cores have 128-byte lines).
#[repr(align(128))]
struct Line<T>(T);

/// The door is open: workers may join.
const OPEN: u64 = 1 << 16;
/// Workers that joined, in the low bits.
const JOINED: u64 = OPEN - 1;

struct Shared {
    workers: usize,
    /// How long to spin, in microseconds.
    spin_us: AtomicU64,
    /// The job's epoch (high 32 bits), [`OPEN`], and how many workers joined. One word, so that a worker joins exactly the
    /// job that it saw.
    state: Line<AtomicU64>,
    /// Workers that joined this job and have finished it.
    left: Line<AtomicUsize>,
    /// Next unit that [`Team::chunks`] hands out.
    next: Line<AtomicUsize>,
    /// Workers asleep, or about to be.
    asleep: AtomicUsize,
    /// The caller sleeps until those who joined have left.
    caller_asleep: AtomicBool,
    stop: AtomicBool,
    job: UnsafeCell<Option<&'static Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleep: Mutex<()>,
    wake_workers: Condvar,
    wake_caller: Condvar,
}

// SAFETY: `job` is written only by the caller while the door is shut and all who joined have left, and read by workers only
// once they joined the state that was stored (release) after the write. Everything else is atomics and locks.
unsafe impl Sync for Shared {}
// SAFETY: the job pointer is only followed while the `run` that set it waits, whatever thread owns the struct.
unsafe impl Send for Shared {}

/// A team of threads. The thread that calls [`Team::run`] is worker 0; dropping the team ends the others.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Serialises callers: a team runs one job at a time.
    running: AtomicBool,
}

impl Team {
    /// Starts `threads - 1` workers (`1..=THREADS_MAX` threads, clamped), which spin as [`Team::set_spin_us`] says.
    pub fn new(threads: usize, spin_us: u64) -> Team {
        let workers = threads.clamp(1, THREADS_MAX);
        let shared = Arc::new(Shared {
            workers,
            spin_us: AtomicU64::new(0),
            state: Line(AtomicU64::new(0)),
            left: Line(AtomicUsize::new(0)),
            next: Line(AtomicUsize::new(0)),
            asleep: AtomicUsize::new(0),
            caller_asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            sleep: Mutex::new(()),
            wake_workers: Condvar::new(),
            wake_caller: Condvar::new(),
        });
        let threads = (1..workers)
            .map(|worker| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("tegu-cpu{worker}"))
                    .spawn(move || work(&shared, worker))
                    .expect("the system lets us start the threads that were asked for")
            })
            .collect();
        let team = Team { shared, threads, running: AtomicBool::new(false) };
        team.set_spin_us(spin_us);
        team
    }

    /// From now on workers spin `spin_us` microseconds for the next job before they sleep; those of a team larger than the
    /// cores that the caller may use never spin, as that would keep the thread they wait for from running.
    pub fn set_spin_us(&self, spin_us: u64) {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let spin_us = if self.workers() > cores { 0 } else { spin_us };
        self.shared.spin_us.store(spin_us, Ordering::Relaxed);
    }

    /// Threads, the caller included.
    pub fn workers(&self) -> usize {
        self.shared.workers
    }

    /// Runs `f(worker, workers)` on every worker and returns when all have finished. A panic in any of them is
    /// raised here, after all have finished. Not to be called from inside a job.
    pub fn run(&self, f: &(dyn Fn(usize, usize) + Sync)) {
        self.job(f, true);
    }

    /// Runs `f(worker, workers)` as worker 0 and on the workers that join before that returns; on `all` of them if so.
    fn job(&self, f: &(dyn Fn(usize, usize) + Sync), all: bool) {
        let s = &*self.shared;
        if s.workers == 1 {
            return f(0, 1);
        }
        assert!(!self.running.swap(true, Ordering::Acquire), "a team runs one job at a time");
        // SAFETY: the lifetime is erased, but this function does not return before the door is shut and every worker that
        // joined is done with `f`, and none is inside now, so nobody reads `job`.
        unsafe {
            let job = std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), &'static Job>(f);
            *s.job.get() = Some(job);
        }
        s.left.0.store(0, Ordering::Relaxed);
        s.next_epoch(OPEN);
        let mine = catch_unwind(AssertUnwindSafe(|| f(0, s.workers)));
        if all {
            s.wait_for_left(s.workers - 1);
        }
        // Acquire is for the joiners' reads of `next`: none comes in after this.
        let joined = s.state.0.fetch_and(!OPEN, Ordering::AcqRel) & JOINED;
        s.wait_for_left(joined as usize);
        self.running.store(false, Ordering::Release);
        let theirs = lock(&s.panic).take();
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Cuts `0..units` into chunks of at least `min_chunk` units and hands them to whichever worker is free:
    /// `f(range, worker)`. Which worker gets a chunk must not change what the chunk computes.
    pub fn chunks(&self, units: usize, min_chunk: usize, f: &(dyn Fn(Range<usize>, usize) + Sync)) {
        if units == 0 {
            return;
        }
        let min_chunk = min_chunk.max(1);
        let workers = self.workers();
        if min_chunk >= units || workers == 1 {
            return f(0..units, 0);
        }
        let next = &self.shared.next.0;
        next.store(0, Ordering::Relaxed); // published by the new epoch
        // Guided: two thirds of an even share of what is left. Large chunks first, which run along memory undisturbed; small
        // ones last, so that all end together though cores differ in speed or are disturbed. Each chunk's first tiles wait for
        // memory: with half of a share, which makes more chunks, decoding took 3 to 6% longer where memory is fast.
        let end = |start: usize| start + ((units - start) * 2 / (3 * workers)).max(min_chunk);
        self.job(
            &|worker, _| {
                let take = |start| (start < units).then(|| end(start));
                while let Ok(start) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                    f(start..end(start).min(units), worker);
                }
            },
            false,
        );
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.next_epoch(0);
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a worker catches its jobs' panics, so it cannot have panicked
        }
    }
}

/// The epoch of a state.
fn epoch(state: u64) -> u64 {
    state >> 32
}

impl Shared {
    /// Starts the next epoch with `flags` and wakes who sleeps. Only the caller does this, with the door shut.
    fn next_epoch(&self, flags: u64) {
        let next = (epoch(self.state.0.load(Ordering::Relaxed)) + 1) << 32; // wraps: only equality matters
        // SeqCst here and in `wait_for_epoch`: either we see the sleeper, or it sees the new epoch. A swap rather than a
        // store: an emulator of ARM on x86 may let a load that follows a SeqCst store overtake it.
        self.state.0.swap(next | flags, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.sleep);
            self.wake_workers.notify_all();
        }
    }

    /// Joins the job of the epoch after `seen`, unless its door is shut already. Returns that epoch and whether we are in.
    fn join(&self, seen: u64) -> (u64, bool) {
        let mut state = self.wait_for_epoch(seen);
        while state & OPEN != 0 {
            // Acquire: the job's pointer and everything that the caller wrote for it.
            match self.state.0.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return (epoch(state), true),
                Err(now) => state = now,
            }
        }
        (epoch(state), false)
    }

    /// Spins, then sleeps, until the epoch is not `seen`; returns the new state.
    fn wait_for_epoch(&self, seen: u64) -> u64 {
        if let Some(now) = self.spin_for(|| {
            let now = self.state.0.load(Ordering::Acquire);
            (epoch(now) != seen).then_some(now)
        }) {
            return now;
        }
        let mut guard = lock(&self.sleep);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let now = loop {
            let now = self.state.0.load(Ordering::SeqCst);
            if epoch(now) != seen {
                break now;
            }
            guard = self.wake_workers.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        now
    }

    /// Spins, then sleeps, until `n` workers have left.
    fn wait_for_left(&self, n: usize) {
        if self.spin_for(|| (self.left.0.load(Ordering::Acquire) >= n).then_some(())).is_some() {
            return;
        }
        let mut guard = lock(&self.sleep);
        // As in `next_epoch`: either the one who leaves sees us asleep, or we see that it left.
        self.caller_asleep.swap(true, Ordering::SeqCst);
        while self.left.0.load(Ordering::SeqCst) < n {
            guard = self.wake_caller.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_asleep.store(false, Ordering::SeqCst);
    }

    /// Polls for at most the spin time; the clock is read once in 64 polls.
    fn spin_for<T>(&self, poll: impl Fn() -> Option<T>) -> Option<T> {
        let mut until = None;
        loop {
            for _ in 0..64 {
                if let Some(value) = poll() {
                    return Some(value);
                }
                spin_loop();
            }
            let now = Instant::now();
            let spin = || Duration::from_micros(self.spin_us.load(Ordering::Relaxed));
            if now >= *until.get_or_insert_with(|| now + spin()) {
                return None;
            }
        }
    }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        let (epoch, joined) = shared.join(seen);
        seen = epoch;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        if !joined {
            continue;
        }
        // SAFETY: the job was set before the state that we joined was stored, and its caller waits for us to leave before it
        // returns, so the closure lives.
        let job = unsafe { (*shared.job.get()).expect("a job is set before its epoch starts") };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker, shared.workers))) {
            lock(&shared.panic).get_or_insert(panic);
        }
        // The caller may be waiting for us; it sleeps only if we take long.
        shared.left.0.fetch_add(1, Ordering::SeqCst);
        if shared.caller_asleep.load(Ordering::SeqCst) {
            let _guard = lock(&shared.sleep);
            shared.wake_caller.notify_one();
        }
    }
}

/// Locks that guard no invariant: a poisoned one is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_every_job_once() {
        for threads in [1, 2, 3, 8] {
            for spin_us in [0, 50] {
                let team = Team::new(threads, spin_us);
                let count: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                for round in 0..200 {
                    team.run(&|worker, workers| {
                        assert_eq!(workers, threads);
                        count[worker].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(count.iter().all(|c| c.load(Ordering::Relaxed) == round + 1));
                    if round % 50 == 0 {
                        std::thread::sleep(Duration::from_millis(1)); // let them fall asleep
                    }
                }
            }
        }
    }

    #[test]
    fn how_long_idle_workers_spin_can_be_changed_between_jobs() {
        let team = Team::new(2, 0);
        let spins = |us: u64, team: &Team| {
            team.set_spin_us(us);
            let ran = AtomicUsize::new(0);
            team.run(&|_, _| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 2);
            team.shared.spin_us.load(Ordering::Relaxed)
        };
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let all = [0, 300, 20].map(|us| spins(us, &team));
        assert_eq!(all, if cores >= 2 { [0, 300, 20] } else { [0; 3] });
        // More workers than cores: none spins.
        assert_eq!(Team::new(cores + 1, 50).shared.spin_us.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn chunks_cover_every_unit_once() {
        for threads in [1, 2, 5] {
            let team = Team::new(threads, 20);
            for units in [0, 1, 2, 7, 64, 1000] {
                for min_chunk in [0, 1, 4, 2000] {
                    let seen: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
                    team.chunks(units, min_chunk, &|range, worker| {
                        assert!(worker < threads);
                        range.for_each(|u| {
                            seen[u].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                    assert!(
                        seen.iter().all(|s| s.load(Ordering::Relaxed) == 1),
                        "{threads} {units} {min_chunk}"
                    );
                }
            }
        }
    }

    #[test]
    fn who_comes_late_holds_nobody_up() {
        // The caller's own chunk lets no one else near the units; the others find the door shut or no unit left.
        let team = Team::new(4, 0);
        for round in 0..2000 {
            let done = AtomicUsize::new(0);
            team.chunks(3 + round % 5, 1, &|range, _| {
                done.fetch_add(range.len(), Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 3 + round % 5, "round {round}");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(3, 10);
        for guilty in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.run(&|worker, _| assert!(worker != guilty, "worker {guilty} fails"));
            }));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("worker {guilty} fails"));
        }
        let ran = AtomicUsize::new(0);
        team.run(&|_, _| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 3);
    }
}
