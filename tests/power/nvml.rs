//! NVML against a stand-in built by the system's C compiler: an Orin that refuses or lies, a discrete GPU, no library, a
//! device that comes late.

use super::detect::Files;
use super::trees::{Release, build, spec};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use tegu::power::clocks::Actuator;
use tegu::power::nvidia::Nvidia;
use tegu::power::sensors::Sensors;
use tegu::power::types::{Board, BoardKind, Clocks};

/// A library of its own for each test: its answers are in a file beside it.
struct Fake {
    dir: tempfile::TempDir,
    path: String,
}

impl Fake {
    /// None where there is no C compiler.
    fn build(control: &str) -> Option<Fake> {
        let dir = tempfile::tempdir().unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/power/fake_nvml.c");
        let path = dir.path().join("libnvidia-ml.so.1").to_str().unwrap().to_owned();
        let define = format!("-DCONTROL=\"{}\"", dir.path().join("control").display());
        let built =
            Command::new("gcc").args(["-shared", "-fPIC", "-w", "-o", &path, &define, source]).status();
        if built.is_err() {
            println!("skipped: no gcc");
            return None;
        }
        assert!(built.unwrap().success());
        let fake = Fake { dir, path };
        fake.says(control);
        Some(fake)
    }

    fn says(&self, control: &str) {
        std::fs::write(self.dir.path().join("control"), control).unwrap();
    }

    fn open(&self) -> tegu::units::Result<Nvidia> {
        Nvidia::open(&[&self.path])
    }

    fn log(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.path().join("control.log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn ledger(&self) -> PathBuf {
        self.dir.path().join("clocks.json")
    }

    /// A machine without any node of a Jetson.
    fn machine(&self) -> Arc<Files> {
        Arc::new(Files::new(&self.dir.path().join("nothing")))
    }
}

#[test]
fn without_a_library_the_reason_is_told() {
    let e = Nvidia::open(&["libnvidia-ml-that-is-not-there.so.1"]).err().unwrap().to_string();
    assert!(e.contains("libnvidia-ml-that-is-not-there.so.1"), "{e}");
    let Some(fake) = Fake::build("init 9") else { return };
    let e = fake.open().err().unwrap().to_string();
    assert!(e.contains("driver"), "{e}");
    // A library that is none.
    std::fs::write(fake.dir.path().join("text.so"), "no library").unwrap();
    assert!(Nvidia::open(&[fake.dir.path().join("text.so").to_str().unwrap()]).is_err());
    // The first that works is taken.
    fake.says("");
    assert!(Nvidia::open(&["libnvidia-ml-that-is-not-there.so.1", &fake.path]).is_ok());
}

#[test]
fn on_orin_it_only_names_the_device() {
    for control in ["orin 1", "orin 1\nlies 1"] {
        let Some(fake) = Fake::build(control) else { return };
        let nvidia = fake.open().unwrap();
        assert_eq!((nvidia.name(), nvidia.measures()), (Some("Orin (nvgpu)"), false));
        assert_eq!((nvidia.energy_mj(), nvidia.memory_bytes()), (None, None));
        let dir = tempfile::tempdir().unwrap();
        build(dir.path(), spec("nano-8-super"), Release::Six);
        let files = Arc::new(Files::new(dir.path()));
        let board = Board::detect(files.as_ref());
        let mut sensors = Sensors::open(files, &board).with_nvidia(Some(nvidia));
        let sample = sensors.sample();
        assert_eq!(sensors.board().kind, BoardKind::OrinNano8);
        assert_eq!((sample.total_mw, sample.gpu_hz), (Some(15_270), Some(306_000_000)), "{control}");
        assert!(sample.rails.iter().all(|r| r.label != "GPU"));
        assert!(sensors.processes().iter().all(|p| p.pid != 4242), "invented process ids");
    }
}

#[test]
fn a_discrete_gpu_is_measured() {
    let Some(fake) = Fake::build("reasons 5") else { return };
    let files = fake.machine();
    let board = Board::detect(files.as_ref());
    let mut sensors = Sensors::open(files, &board).with_nvidia(fake.open().ok());
    assert_eq!(sensors.board().kind, BoardKind::Discrete);
    let s = sensors.sample();
    assert_eq!((s.total_mw, s.hottest_mc()), (Some(123_456), Some(51_000)));
    assert_eq!(
        (s.gpu_hz, s.gpu_max_hz, s.emc_hz),
        (Some(1_410_000_000), Some(1_980_000_000), Some(2_619_000_000))
    );
    assert_eq!(s.gpu_load_permille, Some(370));
    // Idleness (1) is no throttle; the power cap (4) is.
    assert_eq!(s.throttle.gpu_reasons, ["sw_power_cap"]);
    let p = sensors.processes();
    assert_eq!((p.len(), p[0].pid, p[0].gpu_bytes), (1, 4242, Some(512 << 20)));
    let nvidia = sensors.nvidia().unwrap();
    assert_eq!((nvidia.energy_mj(), nvidia.memory_bytes()), (Some(5000), Some((1 << 30, 16 << 30))));
}

#[test]
fn a_device_that_comes_late_is_found() {
    let Some(fake) = Fake::build("count 0") else { return };
    let files = fake.machine();
    let board = Board::detect(files.as_ref());
    let mut sensors = Sensors::open(files, &board).with_nvidia(fake.open().ok());
    assert_eq!(sensors.sample().total_mw, None);
    fake.says("count 1\npower 200000");
    assert_eq!(sensors.sample().total_mw, Some(200_000));
    // And gone again: a fault, not a zero.
    fake.says("count 0");
    let sample = sensors.sample();
    assert_eq!((sample.total_mw, sample.faults.len()), (None, 1));
}

#[test]
fn a_discrete_gpus_locks_are_set_and_reset() {
    let Some(fake) = Fake::build("") else { return };
    let open = || Actuator::open(fake.machine(), fake.open().ok(), &fake.ledger()).unwrap();
    let want = Clocks { gpu_cap_hz: Some(1_410_000_000), ..Clocks::default() };
    let mut actuator = open();
    let out = actuator.apply(&want).unwrap();
    assert_eq!((out[0].asked_hz, out[0].got_hz), (1_410_000_000, Some(1_410_000_000)));
    assert_eq!(fake.log(), ["gpu 345 1410"]);
    // Death: the next start resets what the ledger says was set, once.
    drop(actuator);
    assert!(fake.ledger().exists());
    let actuator = open();
    assert_eq!(fake.log(), ["gpu 345 1410", "gpu-reset 0 0"]);
    assert!(!fake.ledger().exists());
    drop(actuator);
    let mut actuator = open();
    assert_eq!(fake.log().len(), 2, "nothing was ours: nothing is reset");
    actuator.apply(&want).unwrap();
    actuator.release().unwrap();
    assert_eq!(fake.log()[2..], ["gpu 345 1410", "gpu-reset 0 0"]);
    // Memory locks only where asked for by name, and some boards refuse them.
    let nvidia = fake.open().unwrap();
    nvidia.lock_memory(2_619_000_000, 2_619_000_000).unwrap();
    nvidia.unlock_memory().unwrap();
    assert_eq!(fake.log()[4..], ["memory 2619 2619", "memory-reset 0 0"]);
    fake.says("memory_locks 0");
    assert!(nvidia.lock_memory(1, 1).is_err());
}

#[test]
fn without_the_right_nothing_is_held() {
    let Some(fake) = Fake::build("root 0") else { return };
    let mut actuator = Actuator::open(fake.machine(), fake.open().ok(), &fake.ledger()).unwrap();
    let out = actuator.apply(&Clocks { gpu_cap_hz: Some(1_410_000_000), ..Clocks::default() }).unwrap();
    assert_eq!(out[0].got_hz, None);
    assert!(out[0].note.as_ref().unwrap().contains("permission"), "{out:?}");
    assert!(!fake.ledger().exists());
}
