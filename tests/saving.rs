//! Sessions are written beside the work: no step waits for the disk, what is asked meanwhile is answered in order, and a
//! disk that fails or stands still harms nothing but the file that it does not take. They are read in the same way.
//!
//! The disk that stands still is a pipe in place of the file that is written aside: opening it waits for a reader, and it
//! cannot be synced, so that this write fails once the test reads it.

use crate::sequences::{alone, fresh, open, request};
use crate::service::{ask, greedy, prompt, read, start, until};
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, openat as open_at};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tegu::engine::load::Loading;
use tegu::engine::service::{Handle, Limits, Service, SessionInfo};
use tegu::engine::{Budget, Class, Done, Engine};
use tegu::units::Result;

/// A service with a session "a" and a session "b" of one turn each.
fn talking(folder: &Path) -> Service {
    let limits = Limits { session_folder: Some(folder.into()), ..Limits::default() };
    let service = start("llama", limits);
    ["a", "b"].into_iter().zip(0..).for_each(|(name, seed)| turn(&service.handle(), name, seed, 10));
    service
}

fn turn(handle: &Handle, name: &str, seed: u32, tokens: usize) {
    let mut submit = ask(&prompt(30 + 5 * seed, seed), vec![greedy()], tokens);
    submit.session = Some(name.into());
    read(handle.submit(submit).unwrap()).unwrap();
}

/// A pipe where a file is written aside. Declared after the service, so that a test that fails frees the writer, which the
/// service's end waits for.
struct Stuck(PathBuf);

impl Stuck {
    /// In place of `name`'s file.
    fn new(folder: &Path, name: &str) -> Stuck {
        let pipe = folder.join(format!(".{name}.session.{}.part", std::process::id()));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        Stuck(pipe)
    }

    /// The disk comes back: reads what is written.
    fn free(&self) {
        std::io::copy(&mut std::fs::File::open(&self.0).unwrap(), &mut std::io::sink()).unwrap();
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // Opened for reading without waiting for a writer, and closed: one that waits here goes on and fails.
        let _ = open_at(CWD, &self.0, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
    }
}

/// Runs a call that waits, on a thread of its own.
fn later<T: Send + 'static>(handle: &Handle, call: impl FnOnce(Handle) -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = channel();
    let handle = handle.clone();
    std::thread::spawn(move || sender.send(call(handle)));
    receiver
}

/// The same, once what is asked waits for the disk with `before` others: so that they are in order.
fn waiting<T: Send + 'static>(
    handle: &Handle,
    before: usize,
    call: impl FnOnce(Handle) -> T + Send + 'static,
) -> Receiver<T> {
    // A call that was answered may be counted still.
    until(handle, |m| m.sessions_waiting == before);
    let receiver = later(handle, call);
    until(handle, |m| m.sessions_waiting == before + 1);
    receiver
}

fn wait<T>(of: &Receiver<T>) -> T {
    of.recv_timeout(Duration::from_secs(60)).expect("it ends")
}

/// Whether an answer is there; a moment for one that would come too early.
fn early<T>(of: &Receiver<T>) -> bool {
    of.recv_timeout(Duration::from_millis(100)).is_ok()
}

#[test]
fn others_go_on_while_the_disk_stands_still_and_all_is_answered_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let service = talking(folder.path());
    let handle = service.handle();
    let old = handle.save_session("a").unwrap();
    let pipe = Stuck::new(folder.path(), "a");
    let save = |before, name: &'static str| waiting(&handle, before, move |h| h.save_session(name));
    let saves: [Receiver<Result<SessionInfo>>; 2] = [save(0, "a"), save(1, "b")];
    // Whatever is asked about a session that is being written waits for that; the order is kept.
    let restored = waiting(&handle, 2, |h| h.restore_session("b"));
    let deleted = waiting(&handle, 3, |h| h.delete_session("b"));
    // The engine answers meanwhile, also about the sessions that are in memory.
    let meanwhile = later(&handle, |h| {
        for seed in 0..4 {
            turn(&h, "c", seed, 20);
            assert_eq!(h.sessions().unwrap().len(), 3);
            assert!(h.session_tokens("a").unwrap().len() > 30);
        }
        turn(&h, "a", 9, 5);
    });
    wait(&meanwhile);
    assert!(saves.iter().all(|s| !early(s)) && !early(&restored) && !early(&deleted));
    // The disk comes back: what it does not take is an error, and the old file is whole.
    pipe.free();
    let failed = wait(&saves[0]).unwrap_err().to_string();
    assert!(failed.contains(".part") && failed.contains("write"), "{failed}");
    let b = wait(&saves[1]).unwrap();
    assert!(!pipe.0.exists());
    let restored = wait(&restored).unwrap();
    assert_eq!((restored.tokens, restored.file_bytes), (b.tokens, b.file_bytes));
    assert_eq!(wait(&deleted).unwrap().tokens, b.tokens);
    assert!(!folder.path().join("b.session").exists(), "and it does not come back");
    assert_eq!(handle.restore_session("a").unwrap(), old, "the old one");
}

#[test]
fn an_end_waits_for_what_is_being_written_and_writes_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let service = talking(folder.path());
    let handle = service.handle();
    let saved = handle.save_session("b").unwrap();
    let written = std::fs::metadata(folder.path().join("b.session")).unwrap().modified().unwrap();
    let pipe = Stuck::new(folder.path(), "a");
    let failing = waiting(&handle, 0, |h| h.save_session("a"));
    turn(&handle, "a", 3, 5);
    turn(&handle, "c", 4, 5);
    let ended = later(&handle, move |_| service.stop(Duration::ZERO));
    assert!(!early(&ended), "not before the disk answers");
    pipe.free();
    wait(&failing).unwrap_err();
    wait(&ended);
    // What failed was tried again, and what had not changed was not written again.
    let again = std::fs::metadata(folder.path().join("b.session")).unwrap().modified().unwrap();
    assert_eq!(again, written);
    let limits = Limits { session_folder: Some(folder.path().into()), ..Limits::default() };
    let service = start("llama", limits);
    let tokens = |name: &str| service.handle().restore_session(name).unwrap().tokens;
    assert_eq!([tokens("a"), tokens("b"), tokens("c")], [30 + 15 + 5, saved.tokens, 30 + 20 + 5]);
}

#[test]
fn a_place_that_cannot_be_written_is_an_error_and_the_next_save_works() {
    let folder = tempfile::tempdir().unwrap();
    let service = talking(folder.path());
    let handle = service.handle();
    // At the beginning: no folder. At the end: a folder stands in the file's place.
    let kept = folder.path().join("a.session");
    std::fs::create_dir_all(kept.join("x")).unwrap();
    let error = handle.save_session("a").unwrap_err().to_string();
    assert!(error.contains("rename to"), "{error}");
    std::fs::remove_dir_all(&kept).unwrap();
    let away = folder.path().with_extension("away");
    std::fs::rename(folder.path(), &away).unwrap();
    let error = handle.save_session("a").unwrap_err().to_string();
    assert!(error.contains("create"), "{error}");
    std::fs::rename(&away, folder.path()).unwrap();
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(handle.save_session("a").unwrap().file_bytes.is_some());
}

/// Opens a pipe for writing as soon as someone opens it for reading: who reads then waits for a first byte, until it is closed.
fn writer(pipe: &Path) -> OwnedFd {
    let began = Instant::now();
    loop {
        match open_at(CWD, pipe, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
            Ok(fd) => return fd,
            Err(e) => assert!(e == Errno::NXIO && began.elapsed() < Duration::from_secs(60), "{e}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Here the disk that stands still is a pipe in place of a session's file. Pipes are refused but for those of `/dev`.
#[test]
fn others_go_on_while_a_session_is_read_and_what_is_about_it_waits() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("skipped: no /dev/shm");
    };
    let service = talking(folder.path());
    let handle = service.handle();
    let saved = handle.save_session("a").unwrap();
    let (good, [a, d]) =
        (folder.path().join("good"), ["a", "d"].map(|n| folder.path().join(n.to_owned() + ".session")));
    std::fs::rename(&a, &good).unwrap();
    for pipe in [&a, &d] {
        mknodat(CWD, pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
    let restored = later(&handle, |h| h.restore_session("a"));
    let pipe = writer(&a);
    // It is being read now. Another session's steps go on; what names this one, or one behind it on the disk, waits.
    let tokens = later(&handle, |h| h.session_tokens("a"));
    let behind = later(&handle, |h| turn(&h, "d", 5, 4));
    for seed in 0..3 {
        wait(&later(&handle, move |h| turn(&h, "c", seed, 20)));
        wait(&later(&handle, |h| h.sessions().unwrap()));
    }
    // One that has no time left does not wait for the disk.
    std::fs::write(folder.path().join("e.session"), b"not a session").unwrap();
    let mut late = ask(&prompt(9, 6), vec![greedy()], 4);
    (late.session, late.deadline) = (Some("e".into()), Some(Instant::now()));
    let late = handle.submit(late).unwrap();
    assert_eq!(wait(&later(&handle, |_| read(late))).unwrap()[0].1.unwrap().0, Done::Deadline);
    assert!(restored.try_recv().is_err() && behind.try_recv().is_err());
    // The disk has nothing: an error, and the session in memory stays.
    drop(pipe);
    let error = wait(&restored).unwrap_err().to_string();
    assert!(error.contains("length: expected a whole session"), "{error}");
    assert_eq!(wait(&tokens).unwrap().len(), saved.tokens);
    // A request has all the text itself.
    drop(writer(&d));
    wait(&behind);
    std::fs::rename(&good, &a).unwrap();
    assert_eq!(handle.restore_session("a").unwrap(), saved);
}

#[test]
fn what_is_read_gives_way_meanwhile_and_only_has_to_be_computed_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a");
    // Four pages in all.
    let mut app = open("llama", 128, 1, None);
    let p = prompt(70, 1);
    let answer = alone(&mut app.engine, request(&p, 12, Class::Normal)).0;
    let all: Vec<u32> = p.iter().chain(&answer).copied().collect();
    assert_eq!(app.engine.save_session(&file, &all).unwrap().0, 81);
    let mut app = open("llama", 128, 1, None);
    let pump = |engine: &mut Engine, load: &mut Loading| {
        std::thread::yield_now();
        engine.pump_load(load, Duration::ZERO).transpose().unwrap()
    };
    let mut load = app.engine.begin_load(&file).unwrap();
    while app.engine.cached_blocks().0 == 0 {
        assert_eq!(pump(&mut app.engine, &mut load), None, "no more than one part at a time");
    }
    // Another comes and needs all of it, the first block too.
    let other = prompt(20, 2);
    let got = alone(&mut app.engine, request(&other, 90, Class::Normal)).0;
    assert_eq!(got, fresh("llama", None, &other, 90));
    let loaded = loop {
        if let Some(loaded) = pump(&mut app.engine, &mut load) {
            break loaded;
        }
    };
    assert_eq!((loaded.tokens, loaded.cached_tokens), (all.clone(), 0));
    assert_eq!(alone(&mut app.engine, request(&all, 20, Class::Normal)).0, fresh("llama", None, &all, 20));
    app.engine.step(&Budget::default()).unwrap();
    app.engine.shrink(u64::MAX);
    assert_eq!(app.engine.pool().used_pages(), 0, "nothing is held");
    // Given up half way.
    drop(app.engine.begin_load(&file).unwrap());
    assert_eq!(app.engine.load_session(&file).unwrap(), (all, 81));
}

/// What a session's file is, however long ago its write began.
#[test]
fn a_file_holds_what_was_cached_when_its_write_began() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    for spill in [false, true] {
        // Four pages in all.
        let mut app = open("llama", 128, 1, None);
        if spill {
            app.engine.spill_to(folder.path(), 1 << 30).unwrap();
        }
        let p = prompt(70, 1);
        let answer = alone(&mut app.engine, request(&p, 12, Class::Normal)).0;
        let all: Vec<u32> = p.iter().chain(&answer).copied().collect();
        assert_eq!(app.engine.save_session(&file("at-once"), &all).unwrap().0, 81);
        let want = std::fs::read(file("at-once")).unwrap();
        let begin = |engine: &mut Engine, name: &str| {
            let (sender, receiver) = channel();
            let saved = Box::new(move |how| sender.send(how).unwrap());
            assert_eq!(engine.begin_save(&file(name), &all, saved).unwrap(), 81);
            receiver
        };
        app.engine.keep(&all);
        // Another begins in the page that is left, and comes to need those that the write, which has not come further than
        // its beginning, still holds.
        let slow = begin(&mut app.engine, "slow");
        let other = prompt(20, 2);
        let got = alone(&mut app.engine, request(&other, 90, Class::Normal)).0;
        assert_eq!(got, fresh("llama", None, &other, 90), "spill {spill}");
        while app.engine.pump_saves(Duration::ZERO) {}
        assert_eq!(wait(&slow).unwrap(), want.len() as u64);
        assert!(std::fs::read(file("slow")).unwrap() == want, "spill {spill}");
        if spill {
            // From the spill file, where all of it is now; and its slots are wanted by others meanwhile.
            app.engine.shrink(u64::MAX);
            assert_eq!(app.engine.cached_blocks().0, 0);
            let spilled = begin(&mut app.engine, "spilled");
            let third = prompt(90, 3);
            alone(&mut app.engine, request(&third, 38, Class::Normal));
            while app.engine.pump_saves(Duration::ZERO) {}
            wait(&spilled).unwrap();
            assert!(std::fs::read(file("spilled")).unwrap() == want);
            // The first part of what is there in whole blocks.
            let (cached, _) = app.engine.save_session(&file("part"), &all[..40]).unwrap();
            assert_eq!(cached, 40);
            assert_eq!(app.engine.load_session(&file("part")).unwrap(), (all[..40].to_vec(), 40));
        }
        app.engine.load_session(&file("slow")).unwrap();
        let next = alone(&mut app.engine, request(&all, 20, Class::Normal));
        assert_eq!(next.0, fresh("llama", None, &all, 20));
        // Nothing is held for ever.
        app.engine.step(&Budget::default()).unwrap();
        app.engine.shrink(u64::MAX);
        assert_eq!(app.engine.pool().used_pages(), 0, "spill {spill}");
    }
}
