//! Clocks on fake boards: order, read-back, restore; a death at every point of the sequence; others' changes.

use super::detect::Files;
use super::trees::{EMC, Release, SPECS, Spec, build, get, gpu, gpu_folder, put, spec};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tegu::power::clocks::{Actuator, Outcome};
use tegu::power::nodes::{Nodes, number};
use tegu::power::types::Clocks;

const MHZ: u64 = 1_000_000;

/// A board that behaves as a kernel does: bounds that would cross are refused, the memory clock rounds to its points. And
/// that dies at a chosen operation.
struct Kernel {
    files: Files,
    gpu: &'static str,
    /// Operations left before the process dies; reads count too, so that every gap between two writes is a point.
    left: AtomicU64,
    /// Whether the deadly operation takes effect.
    after: bool,
}

impl Kernel {
    fn new(root: &Path, release: Release) -> Kernel {
        Kernel { files: Files::new(root), gpu: gpu_folder(release), left: u64::MAX.into(), after: false }
    }

    fn dies_after(root: &Path, release: Release, operations: u64, after: bool) -> Kernel {
        Kernel { left: operations.into(), after, ..Kernel::new(root, release) }
    }

    fn step<T>(&self, act: impl FnOnce() -> T) -> T {
        match self.left.load(Ordering::SeqCst) {
            0 => {
                if self.after {
                    drop(act());
                }
                panic!("killed");
            }
            n => {
                self.left.store(n - 1, Ordering::SeqCst);
                act()
            }
        }
    }

    fn bound(&self, name: &str) -> u64 {
        number(&self.files, &format!("{}/{name}", self.gpu)).unwrap()
    }

    fn accept(&self, path: &str, text: &str) -> io::Result<()> {
        let value: u64 = text.parse().unwrap_or(u64::MAX);
        let refused = || Err(io::ErrorKind::InvalidInput.into());
        if path == format!("{}/min_freq", self.gpu) && value > self.bound("max_freq") {
            return refused();
        }
        if path == format!("{}/max_freq", self.gpu) && value < self.bound("min_freq") {
            return refused();
        }
        if path == format!("{EMC}/rate") {
            let points = tegu::power::clocks::EMC_POINTS_HZ;
            // The firmware drops a rate while the clock is not locked.
            if number::<u8>(&self.files, &format!("{EMC}/mrq_rate_locked")) != Some(1) {
                return Ok(());
            }
            let rounded = tegu::power::clocks::round_up(&points, value);
            return self.files.write(path, &format!("{rounded}\n"));
        }
        self.files.write(path, &format!("{text}\n"))
    }
}

impl Nodes for Kernel {
    fn read(&self, path: &str) -> io::Result<String> {
        self.step(|| self.files.read(path))
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        self.step(|| self.accept(path, text))
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.files.list(path)
    }

    fn now_us(&self) -> u64 {
        self.files.now_us()
    }

    fn sleep(&self, us: u64) {
        self.files.sleep(us);
    }
}

fn open(nodes: Arc<dyn Nodes>, ledger: &Path) -> Actuator {
    Actuator::open(nodes, None, ledger).unwrap()
}

/// What every knob of a tree holds.
fn state(root: &Path, release: Release) -> Vec<String> {
    let gpu = gpu_folder(release);
    let knobs = [
        format!("{gpu}/min_freq"),
        format!("{gpu}/max_freq"),
        format!("{EMC}/mrq_rate_locked"),
        cap(release).into(),
    ];
    knobs.iter().map(|k| get(root, k)).collect()
}

fn cap(release: Release) -> &'static str {
    match release {
        Release::Five => "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap",
        _ => "/sys/kernel/nvpmodel_clk_cap/emc",
    }
}

struct Bench {
    dir: tempfile::TempDir,
    ledger: PathBuf,
    release: Release,
}

fn bench(spec: &Spec, release: Release) -> Bench {
    // Hundreds of deaths, each with its own tree and its own synced files: in memory where that can be had.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    build(dir.path(), spec, release);
    let ledger = dir.path().join("clocks.json");
    Bench { dir, ledger, release }
}

impl Bench {
    fn root(&self) -> &Path {
        self.dir.path()
    }

    fn gpu(&self, name: &str) -> u64 {
        get(self.root(), &format!("{}/{name}", gpu_folder(self.release))).parse().unwrap()
    }

    fn set_gpu(&self, name: &str, hz: u64) {
        put(self.root(), &format!("{}/{name}", gpu_folder(self.release)), &format!("{hz}\n"));
    }

    fn state(&self) -> Vec<String> {
        state(self.root(), self.release)
    }
}

fn outcome<'a>(all: &'a [Outcome], knob: &str) -> &'a Outcome {
    all.iter().find(|o| o.knob == knob).unwrap_or_else(|| panic!("{knob}: {all:?}"))
}

#[test]
fn every_board_takes_clocks_and_gives_them_back() {
    for spec in &SPECS {
        for release in [Release::Six, Release::Seven] {
            let b = bench(spec, release);
            let before = b.state();
            let mut actuator = open(Arc::new(Kernel::new(b.root(), release)), &b.ledger);
            let want = Clocks {
                gpu_cap_hz: Some(450 * MHZ),
                gpu_floor_hz: Some(400 * MHZ),
                emc_floor_hz: Some(600 * MHZ),
                emc_cap_hz: Some(2_133 * MHZ),
            };
            let out = actuator.apply(&want).unwrap();
            // A cap rounds down and a floor up, so that neither is passed.
            assert_eq!(outcome(&out, "gpu cap").got_hz, Some(408 * MHZ), "{}", spec.name);
            assert_eq!(outcome(&out, "gpu floor").got_hz, Some(408 * MHZ), "{}", spec.name);
            assert_eq!(outcome(&out, "memory floor").got_hz, Some(665_600_000), "{}", spec.name);
            assert_eq!(outcome(&out, "memory cap").got_hz, Some(2_133 * MHZ), "{}", spec.name);
            assert!(b.ledger.exists());
            // Higher again, then lower: the order of the two writes turns round.
            for cap in [600, 306, 510] {
                let want = Clocks { gpu_cap_hz: Some(cap * MHZ), gpu_floor_hz: Some(cap * MHZ), ..want };
                let got = outcome(&actuator.apply(&want).unwrap(), "gpu cap").got_hz.unwrap();
                assert!(got <= cap * MHZ && got + 110 * MHZ > cap * MHZ, "{}: {cap} {got}", spec.name);
            }
            actuator.release().unwrap();
            assert_eq!(b.state(), before, "{} {release:?}", spec.name);
            assert!(!b.ledger.exists(), "nothing is held any more");
        }
    }
}

#[test]
fn a_cap_never_lifts_the_power_modes() {
    let b = bench(spec("agx-64"), Release::Six);
    let mut actuator = open(Arc::new(Kernel::new(b.root(), b.release)), &b.ledger);
    let out = actuator.apply(&Clocks { gpu_cap_hz: Some(1_300 * MHZ), ..Clocks::default() }).unwrap();
    let cap = outcome(&out, "gpu cap");
    assert_eq!(cap.got_hz, Some(612 * MHZ));
    assert!(cap.note.as_ref().unwrap().contains("power mode"), "{cap:?}");
    assert!(!b.ledger.exists(), "nothing was changed, so nothing is held");
}

#[test]
fn asked_and_got_are_told_where_a_knob_is_missing() {
    let b = bench(spec("nano-4"), Release::Six);
    std::fs::remove_dir_all(b.root().join(&EMC[1..])).unwrap();
    std::fs::remove_dir_all(b.root().join("sys/class/devfreq")).unwrap();
    std::fs::remove_dir_all(b.root().join("sys/kernel/nvpmodel_clk_cap")).unwrap();
    let mut actuator = open(Arc::new(Files::new(b.root())), &b.ledger);
    let hz = Some(408 * MHZ);
    let want = Clocks { gpu_cap_hz: hz, gpu_floor_hz: hz, emc_floor_hz: hz, emc_cap_hz: hz };
    let out = actuator.apply(&want).unwrap();
    assert_eq!(out.len(), 4);
    assert!(out.iter().all(|o| o.got_hz.is_none() && o.note.is_some()), "{out:?}");
}

/// Wishes of a day: phases, a lower cap, all of it released.
fn day(actuator: &mut Actuator) -> tegu::units::Result<()> {
    let prefill =
        Clocks { gpu_cap_hz: Some(918 * MHZ), emc_floor_hz: Some(2_133 * MHZ), ..Clocks::default() };
    let decode = Clocks {
        gpu_cap_hz: Some(612 * MHZ),
        gpu_floor_hz: Some(510 * MHZ),
        emc_floor_hz: Some(3_199 * MHZ),
        emc_cap_hz: None,
    };
    let idle = Clocks { gpu_cap_hz: Some(306 * MHZ), emc_cap_hz: Some(665_600_000), ..Clocks::default() };
    for want in [prefill, decode, idle, decode, prefill] {
        actuator.apply(&want)?;
    }
    actuator.release()
}

/// Runs the day until it dies at operation `n`; false: it lived.
fn dies_at(b: &Bench, n: u64, after: bool) -> bool {
    let kernel = Arc::new(Kernel::dies_after(b.root(), b.release, n, after));
    let ledger = b.ledger.clone();
    catch_unwind(AssertUnwindSafe(move || day(&mut open(kernel, &ledger)).unwrap())).is_err()
}

/// Silences the panics that stand for SIGKILL, in this thread.
fn quietly<T>(f: impl FnOnce() -> T) -> T {
    use std::sync::Once;
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&"killed") {
                usual(info);
            }
        }));
    });
    f()
}

#[test]
fn a_death_at_any_point_is_healed_by_the_next_start() {
    quietly(|| {
        for (name, release) in [("nano-8-super", Release::Six), ("nx-16-super", Release::Seven)] {
            let mut points = 0;
            for after in [false, true] {
                for n in 0.. {
                    let b = bench(spec(name), release);
                    let before = b.state();
                    if !dies_at(&b, n, after) {
                        points += n;
                        break;
                    }
                    drop(open(Arc::new(Kernel::new(b.root(), release)), &b.ledger));
                    assert_eq!(b.state(), before, "{name}: killed at {n}, after: {after}");
                    assert!(!b.ledger.exists());
                }
            }
            assert!(points > 200, "{points} points: the sequence is longer than that");
        }
    });
}

#[test]
fn a_death_while_healing_is_healed_too() {
    quietly(|| {
        let release = Release::Six;
        for n in (0..).step_by(7) {
            let b = bench(spec("nano-8-super"), release);
            let before = b.state();
            if !dies_at(&b, n, true) {
                break;
            }
            for m in (0..60).step_by(3) {
                let kernel = Arc::new(Kernel::dies_after(b.root(), release, m, m % 2 == 0));
                drop(catch_unwind(AssertUnwindSafe(|| open(kernel, &b.ledger))));
            }
            drop(open(Arc::new(Kernel::new(b.root(), release)), &b.ledger));
            assert_eq!(b.state(), before, "killed at {n} and while healing");
        }
    });
}

#[test]
fn what_someone_else_set_is_left_alone() {
    quietly(|| {
        let release = Release::Six;
        // After a death at any point: a value that is neither the old one nor ours stays.
        for n in (0..).step_by(3) {
            let b = bench(spec("nano-8-super"), release);
            if !dies_at(&b, n, true) {
                break;
            }
            b.set_gpu("max_freq", 816 * MHZ);
            b.set_gpu("min_freq", 408 * MHZ);
            put(b.root(), cap(release), "1600000000\n");
            drop(open(Arc::new(Kernel::new(b.root(), release)), &b.ledger));
            assert_eq!((b.gpu("min_freq"), b.gpu("max_freq")), (408 * MHZ, 816 * MHZ), "killed at {n}");
            assert_eq!(get(b.root(), cap(release)), "1600000000", "killed at {n}");
        }
    });
}

#[test]
fn a_power_mode_that_is_set_again_is_the_new_start() {
    let b = bench(spec("nano-8-super"), Release::Six);
    let kernel = Arc::new(Kernel::new(b.root(), b.release));
    let mut actuator = open(kernel.clone(), &b.ledger);
    let want = Clocks { gpu_cap_hz: Some(510 * MHZ), ..Clocks::default() };
    actuator.apply(&want).unwrap();
    assert_eq!(b.gpu("max_freq"), 510 * MHZ);
    // nvpmodel runs again and lifts the ceiling: the cap comes back within one look, below the mode's own.
    b.set_gpu("max_freq", 918 * MHZ);
    kernel.sleep(5_000_000);
    actuator.reconcile().unwrap();
    assert_eq!(b.gpu("max_freq"), 510 * MHZ);
    // What goes back in the end is the mode's, not what was there at first.
    actuator.release().unwrap();
    assert_eq!(b.gpu("max_freq"), 918 * MHZ);
}

#[test]
fn a_cap_that_needed_no_write_is_kept_too() {
    let b = bench(spec("nano-8-super"), Release::Six);
    b.set_gpu("max_freq", 612 * MHZ);
    let kernel = Arc::new(Kernel::new(b.root(), b.release));
    let mut actuator = open(kernel.clone(), &b.ledger);
    // The mode's own ceiling is what is asked for: only the memory's lock is held.
    let want = Clocks { gpu_cap_hz: Some(612 * MHZ), emc_floor_hz: Some(3_199 * MHZ), ..Clocks::default() };
    actuator.apply(&want).unwrap();
    assert!(actuator.held().iter().all(|h| !h.0.contains("devfreq")), "{:?}", actuator.held());
    // Another mode lifts it.
    b.set_gpu("max_freq", 918 * MHZ);
    kernel.sleep(5_000_000);
    actuator.reconcile().unwrap();
    assert_eq!(b.gpu("max_freq"), 612 * MHZ);
    actuator.release().unwrap();
    assert_eq!(b.gpu("max_freq"), 918 * MHZ);
}

#[test]
fn whoever_keeps_writing_is_yielded_to() {
    let b = bench(spec("nano-8-super"), Release::Six);
    let kernel = Arc::new(Kernel::new(b.root(), b.release));
    let mut actuator = open(kernel.clone(), &b.ledger);
    actuator.apply(&Clocks { gpu_cap_hz: Some(510 * MHZ), ..Clocks::default() }).unwrap();
    for _ in 0..3 {
        b.set_gpu("max_freq", 918 * MHZ);
        kernel.sleep(5_000_000);
        actuator.reconcile().unwrap();
    }
    assert_eq!(b.gpu("max_freq"), 918 * MHZ, "the third time it is theirs");
    kernel.sleep(60_000_000);
    actuator.reconcile().unwrap();
    assert_eq!(b.gpu("max_freq"), 918 * MHZ);
    kernel.sleep(600_000_000);
    actuator.reconcile().unwrap();
    assert_eq!(b.gpu("max_freq"), 510 * MHZ, "after a while we ask again");
}

#[test]
fn pinned_clocks_are_nobodys_to_move() {
    let b = bench(spec("nano-8-super"), Release::Six);
    let (lock, rate) = (format!("{EMC}/mrq_rate_locked"), format!("{EMC}/rate"));
    let pin = || {
        b.set_gpu("max_freq", 1_020 * MHZ);
        b.set_gpu("min_freq", 1_020 * MHZ);
        put(b.root(), &lock, "1\n");
        put(b.root(), &rate, "3199000000\n");
    };
    let want = Clocks { gpu_cap_hz: Some(510 * MHZ), emc_floor_hz: Some(2_133 * MHZ), ..Clocks::default() };
    // jetson_clocks before us.
    pin();
    let kernel = Arc::new(Kernel::new(b.root(), b.release));
    let mut actuator = open(kernel.clone(), &b.ledger);
    let out = actuator.apply(&want).unwrap();
    assert!(out.iter().all(|o| o.note.as_ref().is_some_and(|n| n.contains("jetson_clocks"))), "{out:?}");
    assert_eq!((b.gpu("max_freq"), get(b.root(), &rate)), (1_020 * MHZ, "3199000000".to_owned()));
    // It ends: our wish is set.
    b.set_gpu("min_freq", 306 * MHZ);
    put(b.root(), &lock, "0\n");
    actuator.reconcile().unwrap();
    assert_eq!((b.gpu("max_freq"), get(b.root(), &rate)), (510 * MHZ, "2133000000".to_owned()));
    // It starts while we hold: we let go, and nothing of theirs is put back at the end.
    pin();
    kernel.sleep(5_000_000);
    actuator.reconcile().unwrap();
    actuator.release().unwrap();
    assert_eq!((b.gpu("min_freq"), b.gpu("max_freq")), (1_020 * MHZ, 1_020 * MHZ));
    assert_eq!((get(b.root(), &lock), get(b.root(), &rate)), ("1".to_owned(), "3199000000".to_owned()));
}

#[test]
fn a_clock_that_comes_late_is_steered() {
    let spec = spec("nano-8-super");
    let b = bench(spec, Release::Seven);
    std::fs::remove_dir_all(b.root().join(&gpu_folder(b.release)[1..])).unwrap();
    let files = Arc::new(Files::new(b.root()));
    let mut actuator = open(files.clone(), &b.ledger);
    let out = actuator.apply(&Clocks { gpu_cap_hz: Some(510 * MHZ), ..Clocks::default() }).unwrap();
    assert_eq!(outcome(&out, "gpu cap").got_hz, None);
    gpu(b.root(), spec, b.release);
    files.sleep(5_000_000);
    actuator.reconcile().unwrap();
    assert_eq!(b.gpu("max_freq"), 510 * MHZ);
    // And one that goes away while it is held is put back when it returns.
    std::fs::rename(b.root().join(&gpu_folder(b.release)[1..]), b.root().join("away")).unwrap();
    actuator.release().unwrap();
    assert!(b.ledger.exists(), "not put back yet");
    std::fs::rename(b.root().join("away"), b.root().join(&gpu_folder(b.release)[1..])).unwrap();
    actuator.reconcile().unwrap();
    assert_eq!(b.gpu("max_freq"), 1_020 * MHZ);
    assert!(!b.ledger.exists());
}

#[test]
fn firmware_that_pins_the_memory_clock_is_told_by_reading_back() {
    let b = bench(spec("nano-8-super"), Release::Six);
    // Plain files keep whatever is written, so a firmware that takes nothing is one that writes its own value back.
    struct Stubborn(Files);
    impl Nodes for Stubborn {
        fn read(&self, path: &str) -> io::Result<String> {
            self.0.read(path)
        }
        fn write(&self, path: &str, text: &str) -> io::Result<()> {
            if path.ends_with("emc/rate") { Ok(()) } else { self.0.write(path, text) }
        }
        fn list(&self, path: &str) -> io::Result<Vec<String>> {
            self.0.list(path)
        }
        fn now_us(&self) -> u64 {
            self.0.now_us()
        }
        fn sleep(&self, us: u64) {
            self.0.sleep(us);
        }
    }
    let before = b.state();
    let mut actuator = open(Arc::new(Stubborn(Files::new(b.root()))), &b.ledger);
    let out = actuator.apply(&Clocks { emc_floor_hz: Some(3_199 * MHZ), ..Clocks::default() }).unwrap();
    let floor = outcome(&out, "memory floor");
    assert_eq!((floor.asked_hz, floor.got_hz), (3_199 * MHZ, Some(2_133 * MHZ)));
    assert!(floor.note.as_ref().unwrap().contains("firmware"), "{floor:?}");
    actuator.release().unwrap();
    assert_eq!(b.state(), before);
}
