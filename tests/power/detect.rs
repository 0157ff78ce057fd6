//! Detection and sensors of every board under JetPack 6 and 7 (and 5, which is named and refused).

use super::trees::{EMC, Release, SPECS, build, gpu, gpu_folder, put, spec};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tegu::power::nodes::{Nodes, RealNodes};
use tegu::power::sensors::Sensors;
use tegu::power::types::{Board, BoardKind, Fan, Fault, JetPack};

/// A tree of files with a clock of its own, and nodes that answer EAGAIN.
pub struct Files {
    real: RealNodes,
    us: AtomicU64,
    resting: Mutex<Vec<String>>,
}

impl Files {
    pub fn new(root: &Path) -> Files {
        Files { real: RealNodes::under(root), us: AtomicU64::new(0), resting: Mutex::default() }
    }

    fn rest(&self, path: &str) {
        self.resting.lock().unwrap().push(path.to_owned());
    }
}

impl Nodes for Files {
    fn read(&self, path: &str) -> io::Result<String> {
        match self.resting.lock().unwrap().iter().any(|r| r == path) {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => self.real.read(path),
        }
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        self.real.write(path, text)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.real.list(path)
    }

    fn now_us(&self) -> u64 {
        self.us.load(Ordering::SeqCst)
    }

    fn sleep(&self, us: u64) {
        self.us.fetch_add(us, Ordering::SeqCst);
    }
}

const SECOND_US: u64 = 1_000_000;

#[test]
fn every_board_is_known_and_read() {
    for spec in &SPECS {
        for release in [Release::Five, Release::Six, Release::Seven] {
            let dir = tempfile::tempdir().unwrap();
            build(dir.path(), spec, release);
            let nodes: Arc<dyn Nodes> = Arc::new(Files::new(dir.path()));
            let board = Board::detect(nodes.as_ref());
            let what = format!("{} {release:?}", spec.name);
            assert_eq!((board.kind, board.is_super), (spec.kind, spec.is_super), "{what}");
            assert_eq!(board.module.as_deref(), Some(spec.module), "{what}");
            assert_eq!(board.model.as_deref(), Some(spec.model), "{what}");
            let (jetpack, supported) = match release {
                Release::Five => (JetPack::Five, false),
                Release::Six => (JetPack::Six, true),
                Release::Seven => (JetPack::Seven, true),
            };
            assert_eq!((board.jetpack, board.check().is_ok()), (jetpack, supported), "{what}");
            if let Err(e) = board.check() {
                assert!(e.to_string().contains("JetPack 5"), "{e}");
            }
            let sample = Sensors::open(nodes, &board).sample();
            assert_eq!(sample.total_mw, Some(spec.total_mw), "{what}");
            let labels: Vec<&str> = sample.rails.iter().map(|r| r.label.as_str()).collect();
            let want: usize = spec.rails.iter().flat_map(|m| m.iter()).filter(|c| c.0 != "NC").count();
            assert_eq!(labels.len(), want, "{what}: {labels:?}");
            assert_eq!(sample.hottest_mc(), Some(52_312), "{what}");
            assert!(sample.hottest().unwrap().kind.starts_with("tj-therm"), "{what}");
            assert!(
                sample.zones.iter().all(|z| !z.kind.starts_with("cv")),
                "{what}: a block that is off is absent"
            );
            assert_eq!(sample.gpu_max_hz, Some(spec.gpu_cap_khz * 1000), "{what}");
            assert_eq!(sample.gpu_hz, Some(306_000_000), "{what}");
            assert_eq!(sample.gpu_load_permille, Some(371), "{what}");
            assert_eq!((sample.emc_hz, sample.emc_locked), (Some(2_133_000_000), Some(false)), "{what}");
            assert_eq!(sample.emc_cap_hz, spec.emc_cap_hz, "{what}");
            assert_eq!(sample.throttle.oc_counts, [Some(0), Some(0), Some(27_390)], "{what}");
            assert!(sample.throttle.active.is_empty() && !sample.throttle.hot_surface, "{what}");
            assert_eq!(sample.fan, Some(Fan { pwm: Some(78), rpm: Some(1740) }), "{what}");
            assert_eq!(sample.cpus.len(), spec.policies.len(), "{what}");
            assert_eq!(sample.memory.unwrap().gpu_bytes, Some(1_024_000 << 10), "{what}");
        }
    }
}

#[test]
fn every_part_number_has_its_board() {
    let table = [
        ("nvidia,p3737-0000+p3701-0000\0nvidia,tegra234\0", BoardKind::AgxOrin64, false),
        ("nvidia,p3740-0002+p3701-0002\0nvidia,tegra234\0", BoardKind::AgxOrin64, false),
        ("nvidia,p3740-0002+p3701-0008\0nvidia,tegra234\0", BoardKind::AgxOrin64, false),
        ("nvidia,p3768-0000+p3767-0002\0nvidia,tegra234\0", BoardKind::OrinNx16, false),
        ("nvidia,p3768-0000+p3767-0001-super\0nvidia,tegra234\0", BoardKind::OrinNx8, true),
        ("nvidia,p3971-0089+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0", BoardKind::Thor, false),
        ("nvidia,other\0nvidia,tegra264\0", BoardKind::Thor, false),
        ("acme,board\0nvidia,tegra234\0", BoardKind::Unknown, false),
        ("", BoardKind::Unknown, false),
    ];
    for (compatible, kind, is_super) in table {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "/proc/device-tree/compatible", compatible);
        let board = Board::detect(&RealNodes::under(dir.path()));
        assert_eq!((board.kind, board.is_super), (kind, is_super), "{compatible:?}");
        assert!(board.check().is_ok(), "without a release there is nothing to refuse");
    }
}

#[test]
fn a_machine_without_anything_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let nodes: Arc<dyn Nodes> = Arc::new(RealNodes::under(dir.path()));
    let board = Board::detect(nodes.as_ref());
    assert_eq!(board.kind, BoardKind::Unknown);
    let sample = Sensors::open(nodes, &board).sample();
    assert_eq!((sample.total_mw, sample.gpu_hz, sample.memory, sample.fan), (None, None, None, None));
    assert!(sample.rails.is_empty() && sample.zones.is_empty() && sample.faults.is_empty());
}

#[test]
fn a_clock_that_comes_late_is_found() {
    for release in [Release::Six, Release::Seven] {
        let spec = spec("nano-8-super");
        let dir = tempfile::tempdir().unwrap();
        build(dir.path(), spec, release);
        std::fs::remove_dir_all(dir.path().join(&gpu_folder(release)[1..])).unwrap();
        let files = Arc::new(Files::new(dir.path()));
        let board = Board::detect(files.as_ref());
        let mut sensors = Sensors::open(files.clone(), &board);
        assert_eq!(sensors.sample().gpu_hz, None);
        files.sleep(6 * SECOND_US);
        assert_eq!(sensors.sample().gpu_hz, None);
        gpu(dir.path(), spec, release);
        files.sleep(6 * SECOND_US);
        let sample = sensors.sample();
        assert_eq!((sample.gpu_hz, sample.gpu_max_hz), (Some(306_000_000), Some(1_020_000_000)));
    }
}

#[test]
fn sensors_that_fail_are_named() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nano-8-super"), Release::Six);
    let files = Arc::new(Files::new(dir.path()));
    let board = Board::detect(files.as_ref());
    let mut sensors = Sensors::open(files.clone(), &board);
    let faults = |s: &mut Sensors| -> Vec<(String, Fault)> {
        files.sleep(SECOND_US);
        s.sample().faults.into_iter().map(|f| (f.sensor, f.fault)).collect()
    };
    // The resting block answers -256 °C on this tree: absent, as EAGAIN is, and no fault.
    assert_eq!(faults(&mut sensors), []);
    let zone = |kind: &str| {
        let all = sensors.found().zones.iter();
        all.clone().find(|z| z.0 == kind).map(|z| z.1.clone()).unwrap()
    };
    let (tj, gpu, cv) = (zone("tj-thermal"), zone("gpu-thermal"), zone("cv0-thermal"));
    // EAGAIN: normal for a block that is off, a fault for the junction.
    files.rest(&cv);
    files.rest(&gpu);
    assert_eq!(faults(&mut sensors), []);
    files.rest(&tj);
    assert_eq!(faults(&mut sensors), [("tj-thermal".into(), Fault::Missing)]);
    // A meter that breaks takes the total with it.
    let volts = std::fs::read_dir(dir.path().join("sys/class/hwmon")).unwrap().flatten();
    let meter = volts.map(|e| e.path()).find(|p| p.join("in1_label").exists()).unwrap();
    std::fs::write(meter.join("curr1_input"), "-99999999999\n").unwrap();
    files.sleep(SECOND_US);
    let sample = sensors.sample();
    assert_eq!(sample.total_mw, None);
    assert!(sample.faults.iter().any(|f| f.sensor == "VDD_IN" && f.fault == Fault::Absurd));
    assert!(sample.rail_mw("VDD_SOC").is_some(), "the others go on");
    // All zones gone at once.
    std::fs::remove_dir_all(dir.path().join("sys/class/thermal")).unwrap();
    assert!(faults(&mut sensors).contains(&("thermal zones".into(), Fault::Missing)));
}

#[test]
fn throttling_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("agx-64"), Release::Seven);
    let state = |kind: &str| {
        let base = dir.path().join("sys/class/thermal");
        let all = std::fs::read_dir(base).unwrap().flatten().map(|e| e.path());
        let cooler =
            all.into_iter().find(|p| std::fs::read_to_string(p.join("type")).unwrap().trim() == kind);
        std::fs::write(cooler.unwrap().join("cur_state"), "1\n").unwrap();
    };
    ["hot-surface-alert", "devfreq-17000000.gpu", "gpu-throttle-alert"].into_iter().for_each(state);
    let nodes: Arc<dyn Nodes> = Arc::new(RealNodes::under(dir.path()));
    let board = Board::detect(nodes.as_ref());
    let throttle = Sensors::open(nodes, &board).sample().throttle;
    assert!(throttle.hot_surface);
    assert_eq!(throttle.active, ["devfreq-17000000.gpu", "gpu-throttle-alert"]);
}

#[test]
fn without_the_right_to_debugfs_the_rest_is_read() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nx-16"), Release::Six);
    std::fs::remove_dir_all(dir.path().join(&EMC[1..])).unwrap();
    let nodes: Arc<dyn Nodes> = Arc::new(RealNodes::under(dir.path()));
    let board = Board::detect(nodes.as_ref());
    let sample = Sensors::open(nodes, &board).sample();
    assert_eq!((sample.emc_hz, sample.emc_locked, sample.total_mw), (None, None, Some(15_270)));
}

/// Names come from whoever wrote the device tree; numbers from whatever the hardware says.
#[test]
fn strange_names_and_numbers_are_told_as_such() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nano-8-super"), Release::Six);
    let sample = || {
        let nodes = Arc::new(Files::new(dir.path()));
        let board = Board::detect(nodes.as_ref());
        let mut sensors = Sensors::open(nodes, &board);
        (board, sensors.sample())
    };
    let before = sample().1;
    put(dir.path(), "/proc/device-tree/model", "A \u{1b}[2Jboard\u{7}\0");
    // A second meter on the carrier, which names its input as the module's does.
    let carrier = "/sys/class/hwmon/hwmon90";
    put(dir.path(), &format!("{carrier}/name"), "ina3221");
    for (n, label, ma) in [(1, "VDD_IN", "100"), (2, "\u{1b}[31mRED", "-3"), (3, &"x".repeat(3_000), "1")] {
        put(dir.path(), &format!("{carrier}/in{n}_label"), label);
        put(dir.path(), &format!("{carrier}/in{n}_input"), "5000");
        put(dir.path(), &format!("{carrier}/curr{n}_input"), ma);
    }
    // More zones than any board has, before and after its own.
    for n in 0..1_500 {
        put(dir.path(), &format!("/sys/class/thermal/thermal_zone{}/type", 1_000 + n), "z-thermal");
    }
    let (board, now) = sample();
    assert_eq!(board.model.as_deref(), Some("A [2Jboard"));
    assert_eq!((now.total_mw, &now.zones), (before.total_mw, &before.zones));
    let labels: Vec<&str> = now.rails[before.rails.len()..].iter().map(|r| r.label.as_str()).collect();
    assert_eq!(labels, ["VDD_IN (hwmon90)", &"x".repeat(128)]);
    let red = now.faults.iter().find(|f| f.sensor == "[31mRED").unwrap();
    assert_eq!(red.fault, Fault::Absurd, "no rail feeds power back");
    // Clocks past any board's are no clocks.
    put(dir.path(), &format!("{}/max_freq", gpu_folder(Release::Six)), "18446744073709551615");
    put(dir.path(), &format!("{EMC}/rate"), "99999999999");
    let now = sample().1;
    assert_eq!((now.gpu_hz, now.gpu_max_hz, now.emc_hz), (None, None, None));
    for clock in ["gpu clock", "memory clock"] {
        assert!(now.faults.iter().any(|f| f.sensor == clock && f.fault == Fault::Absurd), "{clock}");
    }
}
