//! The clock helper over its socket: one holder, a heartbeat, a way out; then as a process that is ended and killed.

use super::trees::{EMC, Release, build, get, gpu_folder, put, spec};
use crate::support::{emulated, program};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tegu::power::clocks::Actuator;
use tegu::power::helper::{Helper, listen};
use tegu::power::modes::{Modes, Programs};
use tegu::power::nodes::RealNodes;
use tegu::power::types::Clocks;
use tegu::power::wire::{Ask, Client};

const MHZ: u64 = 1_000_000;
const RELEASE: Release = Release::Six;

/// Programs that switch the tree as NVIDIA's would.
struct Scripted {
    root: PathBuf,
    /// nvpmodel in a mount namespace: says nothing wrong, does nothing.
    pretends: bool,
}

impl Programs for Scripted {
    fn run(&mut self, program: &str, args: &[&str]) -> std::io::Result<(bool, String)> {
        let max = format!("{}/max_freq", gpu_folder(RELEASE));
        match (program, args) {
            ("systemctl", ["start", unit]) if unit.starts_with("tegu-mode@") && !self.pretends => {
                let mhz = if *unit == "tegu-mode@0.service" { 612 } else { 918 };
                put(&self.root, &max, &format!("{}\n", mhz * MHZ));
            }
            ("nvfancontrol", ["-q"]) => {
                let conf = get(&self.root, "/etc/nvfancontrol.conf");
                let line = conf.lines().find(|l| l.contains("FAN_DEFAULT_PROFILE")).unwrap();
                let now = line.split_whitespace().last().unwrap();
                return Ok((true, format!("FAN1:FAN_PROFILE:{now}\n")));
            }
            _ => {}
        }
        Ok((true, "Running in chroot, ignoring request".into()))
    }
}

struct Rig {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<tegu::units::Result<()>>>,
}

impl Rig {
    fn start(pretends: bool) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        build(dir.path(), spec("nano-8-super"), RELEASE);
        let nodes = Arc::new(RealNodes::under(dir.path()));
        let actuator = Actuator::open(nodes.clone(), None, &dir.path().join("clocks.json")).unwrap();
        let programs = Scripted { root: dir.path().to_owned(), pretends };
        let modes = Modes::new(nodes, Box::new(programs), true);
        let listener = listen(&dir.path().join("s")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let serve = move || {
            Helper::new(actuator, modes).serve(listener, Arc::new(move || asked.load(Ordering::SeqCst)))
        };
        Rig { thread: Some(std::thread::spawn(serve)), dir, stop }
    }

    fn client(&self) -> Client {
        Client::connect(&self.dir.path().join("s")).unwrap()
    }

    fn cap_mhz(&self) -> u64 {
        cap_mhz(self.dir.path())
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

fn cap_mhz(root: &Path) -> u64 {
    get(root, &format!("{}/max_freq", gpu_folder(RELEASE))).parse::<u64>().unwrap_or(0) / MHZ
}

fn cap(mhz: u64) -> Clocks {
    Clocks { gpu_cap_hz: Some(mhz * MHZ), ..Clocks::default() }
}

/// Waits for what must come soon.
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Holds a cap for longer than its lease, by words. False where this machine kept a word back for as long as the lease: then
/// nothing can be said.
fn kept_by_words(rig: &Rig, client: &mut Client) -> bool {
    const LEASE_MS: u64 = 800;
    // The helper counts whole milliseconds.
    let in_time = |said: Instant| said.elapsed() < Duration::from_millis(LEASE_MS - 5);
    let mut said = Instant::now();
    let out = client.set(&cap(612), LEASE_MS).unwrap();
    assert_eq!(out[0].got_hz, Some(612 * MHZ));
    for _ in 0..8 {
        std::thread::sleep(Duration::from_millis(LEASE_MS / 5));
        let now = Instant::now();
        let (held, cap_mhz) = (client.beat().unwrap(), rig.cap_mhz());
        if !in_time(said) {
            return false;
        }
        assert_eq!((held, cap_mhz), (true, 612));
        said = now;
    }
    true
}

#[test]
fn silence_gives_everything_back() {
    let mut rig = Rig::start(false);
    let mut client = rig.client();
    soon("words keep it", || kept_by_words(&rig, &mut client));
    soon("no heartbeat", || rig.cap_mhz() == 1_020);
    // A client that is gone needs no lease to run out.
    client.set(&cap(510), 60_000).unwrap();
    assert_eq!(rig.cap_mhz(), 510);
    drop(client);
    soon("the client is gone", || rig.cap_mhz() == 1_020);
    rig.end();
}

#[test]
fn one_holds_and_anyone_may_end_it() {
    let mut rig = Rig::start(false);
    let (mut first, mut second) = (rig.client(), rig.client());
    first.set(&cap(612), 60_000).unwrap();
    let e = second.set(&cap(408), 1_000).unwrap_err().to_string();
    assert!(e.contains("another client"), "{e}");
    let status = second.ask(&Ask::Status).unwrap();
    assert_eq!(status.want, Some(cap(612)));
    assert_eq!(
        (status.held.len(), status.held[0].now.as_str(), status.held[0].old.as_str()),
        (1, "612000000", "1020000000")
    );
    second.release().unwrap();
    assert_eq!(rig.cap_mhz(), 1_020);
    second.set(&cap(408), 60_000).unwrap();
    assert_eq!(rig.cap_mhz(), 408);
    // The end of the helper is the end of what it holds.
    rig.end();
    assert_eq!(rig.cap_mhz(), 1_020);
}

#[test]
fn bad_requests_are_answered_and_change_nothing() {
    let mut rig = Rig::start(false);
    let stream = UnixStream::connect(rig.dir.path().join("s")).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut say = |line: &str| {
        (&stream).write_all(line.as_bytes()).unwrap();
        (&stream).write_all(b"\n").unwrap();
        lines.next().unwrap().unwrap()
    };
    for bad in [
        "",
        "{",
        "[]",
        "{\"verb\":\"chmod\"}",
        "{\"verb\":\"set\"}",
        "{\"verb\":\"set\",\"clocks\":{\"gpu_cap\":1}}",
        "{\"verb\":\"set\",\"clocks\":{\"gpu_cap_hz\":-1}}",
        "{\"verb\":\"set\",\"clocks\":{\"gpu_cap_hz\":5}}",
        "{\"verb\":\"set\",\"clocks\":{\"gpu_cap_hz\":99999999999}}",
        "{\"verb\":\"set\",\"clocks\":{},\"lease_ms\":0}",
        "{\"verb\":\"set\",\"clocks\":{},\"lease_ms\":9999999}",
        "{\"verb\":\"mode\",\"name\":\"../../x\"}",
        "{\"verb\":\"fan\",\"profile\":\"x y\"}",
    ] {
        let answer = say(bad);
        assert!(answer.starts_with("{\"error\":"), "{bad}: {answer}");
    }
    assert_eq!(say("{\"verb\":\"beat\"}"), "{}", "the connection lives on");
    // A line without an end is cut off, and so is whoever sends it.
    let long = UnixStream::connect(rig.dir.path().join("s")).unwrap();
    (&long).write_all(&[b'x'; 20 << 10]).ok();
    let mut answer = String::new();
    BufReader::new(&long).read_line(&mut answer).ok();
    assert!(answer.contains("at most"), "{answer}");
    // More connections than there is room for: those beyond are told; where they came slowly, ones that sat idle went instead.
    soon("too many", || {
        let many: Vec<_> = (0..12).map(|_| UnixStream::connect(rig.dir.path().join("s")).unwrap()).collect();
        many.iter().for_each(|s| s.set_nonblocking(true).unwrap());
        let mut answers = vec![Vec::new(); many.len()];
        let mut out = vec![false; many.len()];
        soon("those without room are put out", || {
            for i in 0..many.len() {
                // Ends with an error while there is nothing to read.
                out[i] |= (&many[i]).read_to_end(&mut answers[i]).is_ok();
            }
            out.iter().filter(|o| **o).count() >= 4
        });
        answers.iter().any(|a| String::from_utf8_lossy(a).contains("too many"))
    });
    assert_eq!(rig.cap_mhz(), 1_020);
    rig.end();
}

/// Whoever comes late is told, so that it can wish again.
#[test]
fn a_beat_after_the_lease_says_that_all_went_back() {
    let mut rig = Rig::start(false);
    let mut client = rig.client();
    client.set(&cap(612), 100).unwrap();
    soon("no heartbeat", || rig.cap_mhz() == 1_020);
    assert!(!client.beat().unwrap());
    assert!(client.beat().unwrap(), "said once");
    client.set(&cap(612), 60_000).unwrap();
    assert!(client.beat().unwrap());
    assert_eq!(rig.cap_mhz(), 612);
    rig.end();
}

/// A hundred connections that only sit there keep nobody out, and whoever holds clocks is not put out by them.
#[test]
fn idle_connections_make_room() {
    let mut rig = Rig::start(false);
    let mut holder = rig.client();
    holder.set(&cap(612), 60_000).unwrap();
    let idle: Vec<_> = (0..100).map(|_| UnixStream::connect(rig.dir.path().join("s")).unwrap()).collect();
    soon("room", || rig.client().ask(&Ask::Status).is_ok());
    assert!(holder.beat().unwrap());
    assert_eq!(rig.cap_mhz(), 612);
    drop(idle);
    rig.end();
}

/// Pieces of lines, lines in pieces, bytes that are no text, and ends in the middle.
#[test]
fn what_is_no_request_harms_nobody() {
    let mut rig = Rig::start(false);
    let mut holder = rig.client();
    holder.set(&cap(612), 60_000).unwrap();
    let good = b"{\"verb\":\"release\"}";
    let deep = vec![b'['; 9_000];
    let pieces: [&[u8]; 7] = [
        b"\xff\xfe\x00\n",
        b"{\"verb\":\"rel",
        good,
        &deep,
        b"\0\0\0\n",
        b"\n\n\n\n\n",
        b"{\"verb\":\"set\",\"clocks\":",
    ];
    for piece in pieces {
        for _ in 0..20 {
            let stream = UnixStream::connect(rig.dir.path().join("s")).unwrap();
            drop((&stream).write_all(&piece[..piece.len() - 1]));
        }
    }
    // In pieces, slowly: still one line.
    let mut answer = String::new();
    soon("an answer", || {
        let stream = UnixStream::connect(rig.dir.path().join("s")).unwrap();
        for byte in b"{\"verb\":\"status\"}\n" {
            drop((&stream).write_all(&[*byte]));
        }
        answer.clear();
        drop(BufReader::new(stream).read_line(&mut answer));
        answer.contains("612000000")
    });
    assert!(holder.beat().unwrap());
    assert_eq!(rig.cap_mhz(), 612);
    rig.end();
}

/// What cannot be put down first is not written.
#[test]
fn without_a_place_for_its_state_nothing_is_set() {
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nano-8-super"), RELEASE);
    let nodes = Arc::new(RealNodes::under(dir.path()));
    let mut actuator =
        Actuator::open(nodes.clone(), None, &dir.path().join("no/folder/clocks.json")).unwrap();
    let e = actuator.apply(&cap(612)).unwrap_err().to_string();
    assert!(e.contains("no/folder") && e.contains("create"), "{e}");
    assert_eq!(cap_mhz(dir.path()), 1_020);
    // A folder that is a file.
    std::fs::write(dir.path().join("file"), "").unwrap();
    let e = Actuator::open(nodes, None, &dir.path().join("file/clocks.json")).err().unwrap().to_string();
    assert!(e.contains("file/clocks.lock"), "{e}");
}

#[test]
fn a_power_mode_is_believed_when_the_clocks_say_so() {
    let mut rig = Rig::start(false);
    let mut client = rig.client();
    let mode = |name: &str| Ask::Mode { name: name.into() };
    let said = client.ask(&mode("15w")).unwrap().said.unwrap();
    assert!(said.contains("612 MHz"), "{said}");
    assert!(client.ask(&mode("40W")).unwrap_err().to_string().contains("15W, 25W, MAXN_SUPER"));
    put(
        rig.dir.path(),
        "/etc/nvfancontrol.conf",
        "<FAN 1>\n\tFAN_PROFILE quiet {\n\t}\n\tFAN_PROFILE cool {\n\t}\n\tFAN_DEFAULT_PROFILE quiet\n",
    );
    let fan = |p: &str| Ask::Fan { profile: p.into() };
    assert_eq!(client.ask(&fan("cool")).unwrap().said.unwrap(), "fan profile cool");
    assert!(get(rig.dir.path(), "/etc/nvfancontrol.conf").ends_with("\tFAN_DEFAULT_PROFILE cool"));
    assert!(client.ask(&fan("silent")).unwrap_err().to_string().contains("quiet, cool"));
    rig.end();
    let mut rig = Rig::start(true);
    let e = rig.client().ask(&mode("15W")).unwrap_err().to_string();
    assert!(e.contains("1020 MHz, not 612 MHz") && e.contains("chroot"), "{e}");
    rig.end();
}

#[test]
fn a_socket_is_taken_over_only_from_the_dead() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let first = listen(&path).unwrap();
    assert!(listen(&path).is_err(), "someone answers there");
    drop(first);
    drop(listen(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "a file").unwrap();
    assert!(listen(&path).is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file");
}

// ---- as a process

fn command(root: &Path) -> Command {
    let mut words = program("tegu").into_iter();
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["power", "helper", "--root"]).arg(root);
    command.arg("--socket").arg(root.join("s")).arg("--state").arg(root.join("clocks.json"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn spawn(root: &Path) -> (Child, Client) {
    let child = command(root).spawn().unwrap();
    let mut client = None;
    soon("the helper listens", || {
        client = Client::connect(&root.join("s")).ok();
        client.is_some()
    });
    (child, client.unwrap())
}

fn knobs(root: &Path) -> Vec<String> {
    let gpu = gpu_folder(RELEASE);
    let all = [
        format!("{gpu}/min_freq"),
        format!("{gpu}/max_freq"),
        format!("{EMC}/mrq_rate_locked"),
        "/sys/kernel/nvpmodel_clk_cap/emc".into(),
    ];
    all.iter().map(|k| get(root, k)).collect()
}

#[test]
fn a_signal_ends_it_with_clocks_put_back() {
    if emulated() {
        return println!("skipped: programs are emulated");
    }
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nano-8-super"), RELEASE);
    let before = knobs(dir.path());
    let (mut child, mut client) = spawn(dir.path());
    let want = Clocks { emc_floor_hz: Some(2_133 * MHZ), emc_cap_hz: Some(2_133 * MHZ), ..cap(408) };
    client.set(&want, 60_000).unwrap();
    assert_ne!(knobs(dir.path()), before);
    let sent = Command::new("kill").arg("-TERM").arg(child.id().to_string()).status().unwrap();
    assert!(sent.success());
    assert!(child.wait().unwrap().success());
    assert_eq!(knobs(dir.path()), before);
    assert!(!dir.path().join("clocks.json").exists() && !dir.path().join("s").exists());
}

#[test]
fn a_killed_helper_is_healed_by_the_next() {
    if emulated() {
        return println!("skipped: programs are emulated");
    }
    let mut dirty = 0;
    for round in 0..12u64 {
        let dir = tempfile::tempdir().unwrap();
        build(dir.path(), spec("nano-8-super"), RELEASE);
        let before = knobs(dir.path());
        let (mut child, mut client) = spawn(dir.path());
        // Wishes as fast as they are answered; death somewhere among them.
        let (answered, first) = std::sync::mpsc::channel();
        let killer = std::thread::spawn(move || {
            // Mostly once there are clocks to put back; a machine may take its time for the first wish.
            if round % 4 != 0 {
                let _ = first.recv_timeout(Duration::from_secs(60));
            }
            std::thread::sleep(Duration::from_micros(1_000 + 6_100 * round));
            child.kill().unwrap();
            child.wait().unwrap();
        });
        for n in 0.. {
            let mhz = [408, 918, 612, 306][n % 4];
            let want = Clocks {
                gpu_floor_hz: Some(mhz * MHZ),
                emc_floor_hz: (n % 2 == 0).then_some(665 * MHZ),
                emc_cap_hz: (n % 3 == 0).then_some(2_133 * MHZ),
                ..cap(mhz)
            };
            if client.set(&want, 60_000).is_err() {
                break;
            }
            let _ = answered.send(()); // whoever waited for the first waits for no more
        }
        killer.join().unwrap();
        dirty += usize::from(knobs(dir.path()) != before);
        assert!(command(dir.path()).arg("--heal").status().unwrap().success());
        let rate = get(dir.path(), &format!("{EMC}/rate"));
        assert_eq!(knobs(dir.path()), before, "round {round}, rate {rate:?}");
        assert!(!dir.path().join("clocks.json").exists());
    }
    assert!(dirty >= 9, "{dirty} of 12 deaths left clocks changed: those after the first wish must");
}

/// A second helper would put back what the first one holds.
#[test]
fn a_second_helper_touches_nothing() {
    if emulated() {
        return println!("skipped: programs are emulated");
    }
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nano-8-super"), RELEASE);
    let (mut child, mut client) = spawn(dir.path());
    client.set(&cap(612), 60_000).unwrap();
    for more in [&[][..], &["--heal"]] {
        let out = command(dir.path()).args(more).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains("clocks.json: lock"), "{more:?}: {said}");
        assert_eq!(cap_mhz(dir.path()), 612);
    }
    assert!(client.beat().unwrap());
    drop(client);
    soon("the client is gone", || cap_mhz(dir.path()) == 1_020);
    child.kill().unwrap();
    child.wait().unwrap();
    // What a killed one leaves of its lock is none.
    assert!(command(dir.path()).arg("--heal").status().unwrap().success());
}

#[test]
fn a_state_file_that_cannot_be_trusted_is_refused_and_nothing_is_written() {
    if emulated() {
        return println!("skipped: programs are emulated");
    }
    let dir = tempfile::tempdir().unwrap();
    build(dir.path(), spec("nano-8-super"), RELEASE);
    let hostile =
        r#"{"version":1,"entries":[{"node":"/etc/nv_tegra_release","old":"1","ours":["1"],"now":"1"}]}"#;
    std::fs::write(dir.path().join("clocks.json"), hostile).unwrap();
    let out = command(dir.path()).arg("--heal").stderr(Stdio::piped()).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("clocks.json: node: expected a clock's node"), "{said}");
    assert!(get(dir.path(), "/etc/nv_tegra_release").starts_with("# R36"));
}
