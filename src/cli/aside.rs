//! A file that appears under its name whole or not at all: written beside, synced, renamed.
//!
//! What is beside goes when the command fails and when a signal ends it. After a kill or a power cut it goes at the next
//! start for the same name: a lock, which the system takes back with the process, tells whether someone still writes.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::app;
use crate::observe;
use crate::units::{Error, Result};
use crate::weights::DirectFile;

/// Between a file's name and the number of the process that writes it. Not `.part-`, as which others name what they split.
const MARK: &str = ".tegu-part-";

/// The files beside that this process writes. Held by whoever makes, renames or removes one, so that a signal finds each of
/// them either listed or gone.
static OPEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<PathBuf>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the list until the process has ended: nothing is begun any more.
fn remove_all() {
    let open = open();
    open.iter().for_each(|aside| drop(fs::remove_file(aside)));
    std::mem::forget(open);
}

/// A place beside a file's final name, with an empty file in it to be written by its path.
pub struct Beside {
    target: PathBuf,
    aside: PathBuf,
    /// Locked for as long as this lives.
    _lock: File,
    placed: bool,
}

impl Beside {
    /// Takes the place beside `target`, after what dead processes left there.
    pub fn take(target: &Path) -> Result<Beside> {
        let (target, aside) = names(target)?;
        app::before_end(remove_all);
        let mut open = open();
        sweep(&target);
        // Not emptied before it is locked: in another container another process may have our number.
        let lock = File::options().write(true).create(true).truncate(false).open(&aside);
        let lock = lock.map_err(|e| Error::io(&aside, "create", e))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let found = format!("{} is being written", aside.display());
            return Err(Error::bad(&target, "output", "no one else who writes it", found));
        }
        // A file system without locks is trusted to have one writer a number.
        open.push(aside.clone());
        Ok(Beside { target, aside, _lock: lock, placed: false })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.aside
    }

    /// Gives what was written, and synced, its name.
    pub fn place(mut self) -> Result<()> {
        let mut open = open();
        fs::rename(&self.aside, &self.target).map_err(|e| Error::io(&self.target, "rename to", e))?;
        open.retain(|a| *a != self.aside);
        self.placed = true;
        drop(open);
        // The new name must outlive a power cut too; not every file system can sync a folder.
        if let Ok(folder) = File::open(folder(&self.target)) {
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.placed {
            let mut open = open();
            let _ = fs::remove_file(&self.aside);
            open.retain(|a| *a != self.aside);
        }
    }
}

fn folder(file: &Path) -> &Path {
    file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes what processes that are no more left beside `target`.
fn sweep(target: &Path) {
    for entry in fs::read_dir(folder(target)).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_file = entry.file_type().is_ok_and(|t| t.is_file());
        let Some(pid) = writer(target.file_name().unwrap_or_default(), &name).filter(|_| is_file) else {
            continue;
        };
        // A live number may be another program's by now; then the file stays, which costs less than a mistake. A dead one may
        // be alive in another container; then it holds the lock.
        let is_alive = Path::new("/proc").join(pid.to_string()).exists();
        let left = !is_alive && File::open(entry.path()).is_ok_and(|f| f.try_lock().is_ok());
        if left && fs::remove_file(entry.path()).is_ok() {
            observe::note(format_args!("removed {}, which an interrupted run left", entry.path().display()));
        }
    }
}

/// The number of the process that writes `found` beside the file `name`, if it is such a file.
fn writer(name: &OsStr, found: &OsStr) -> Option<u32> {
    let number = found.as_bytes().strip_prefix(name.as_bytes())?.strip_prefix(MARK.as_bytes())?;
    std::str::from_utf8(number).ok()?.parse().ok().filter(|pid: &u32| pid.to_string().as_bytes() == number)
}

/// A file being written beside its final name.
pub struct AsideFile {
    beside: Beside,
    out: DirectFile,
}

/// Where to write, and where beside it first. Renaming onto a device would replace the device, and onto a link the
/// link: the one is refused, the other followed.
fn names(target: &Path) -> Result<(PathBuf, PathBuf)> {
    let found = match fs::metadata(target) {
        Ok(m) if m.is_file() => None,
        Ok(m) if m.is_dir() => Some("a directory"),
        Ok(_) => Some("a device or pipe"),
        Err(_) => target.file_name().is_none().then_some("no name"),
    };
    if let Some(found) = found {
        return Err(Error::bad(target, "output", "a file name", found));
    }
    let target = fs::canonicalize(target).unwrap_or_else(|_| followed(target));
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!("{MARK}{}", std::process::id()));
    let aside = target.with_file_name(name);
    Ok((target, aside))
}

/// Where a link to nothing points, so that it is that file which appears and the link stays. Links may point to links; more
/// than a system follows are a ring, and left to fail where they are.
fn followed(target: &Path) -> PathBuf {
    let mut at = target.to_owned();
    for _ in 0..40 {
        match fs::read_link(&at) {
            Ok(to) => at = at.parent().unwrap_or(Path::new("")).join(to),
            Err(_) => return at,
        }
    }
    target.to_owned()
}

/// Refuses an output that would replace the input.
pub fn differs(target: &Path, input: &Path) -> Result<()> {
    match (fs::canonicalize(target), fs::canonicalize(input)) {
        (Ok(a), Ok(b)) if a == b => {
            Err(Error::bad(target, "output", "another file than the input", "the input"))
        }
        _ => Ok(()),
    }
}

impl AsideFile {
    /// Starts a file that will be `target`.
    pub fn create(target: &Path) -> Result<AsideFile> {
        let beside = Beside::take(target)?;
        let out = DirectFile::create(beside.path()).map_err(|e| Error::io(beside.path(), "create", e))?;
        Ok(AsideFile { beside, out })
    }

    /// Makes it appear; gives its size in bytes.
    pub fn finish(self) -> Result<u64> {
        self.finish_checked(|_| Ok(()))
    }

    /// As [`AsideFile::finish`], if `check`, which is given the path that the whole file has until then, lets it.
    pub fn finish_checked(self, check: impl FnOnce(&Path) -> Result<()>) -> Result<u64> {
        let AsideFile { beside, out } = self;
        let len = out.finish().map_err(|e| Error::io(beside.path(), "write", e))?;
        check(beside.path())?;
        beside.place()?;
        Ok(len)
    }
}

impl Write for AsideFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[test]
fn only_files_are_replaced_and_only_by_whole_ones() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let link = dir.path().join("link");
    fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let mut file = AsideFile::create(&link).unwrap();
    file.write_all(b"half").unwrap();
    drop(file);
    assert_eq!(fs::read(&target).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    let mut file = AsideFile::create(&link).unwrap();
    file.write_all(b"whole").unwrap();
    assert_eq!(file.finish().unwrap(), 5);
    assert_eq!(fs::read(&target).unwrap(), b"whole");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let (missing, dangling) = (dir.path().join("missing"), dir.path().join("dangling"));
    std::os::unix::fs::symlink("missing", &dangling).unwrap();
    let mut file = AsideFile::create(&dangling).unwrap();
    file.write_all(b"there").unwrap();
    let refuse = |p: &Path| Err(Error::bad(p, "check", "anything else", "this"));
    assert!(file.finish_checked(refuse).is_err() && !missing.exists());
    let mut file = AsideFile::create(&dangling).unwrap();
    file.write_all(b"there").unwrap();
    file.finish().unwrap();
    assert_eq!(fs::read(&missing).unwrap(), b"there");
    assert!(fs::symlink_metadata(&dangling).unwrap().is_symlink());
    for target in [Path::new("/dev/null"), dir.path(), Path::new("..")] {
        let e = names(target).unwrap_err().to_string();
        assert!(e.contains("output: expected a file name"), "{e}");
    }
}

#[test]
fn what_the_dead_left_goes_and_nothing_else() {
    // More than any kernel's PID_MAX_LIMIT, so that no process has it (proc(5), pid_max).
    const NOBODY: u32 = (1 << 22) + 1;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: String| dir.path().join(name);
    let stale = at(format!("out{MARK}{NOBODY}"));
    let held = at(format!("out{MARK}{}", NOBODY + 1));
    let others = [
        at(format!("out{MARK}0{NOBODY}")),
        at(format!("out.part-{NOBODY}")),
        at(format!("out2{MARK}{NOBODY}")),
        at(format!("out{MARK}1")),
        at(format!("out{MARK}")),
    ];
    others.iter().chain([&stale, &held]).for_each(|f| fs::write(f, "half").unwrap());
    let folder = at(format!("out{MARK}{}", NOBODY + 2));
    fs::create_dir(&folder).unwrap();
    let lock = File::open(&held).unwrap();
    lock.lock().unwrap();
    let file = AsideFile::create(&at("out".into())).unwrap();
    assert!(!stale.exists(), "its process is no more");
    assert!(held.exists() && folder.exists() && others.iter().all(|f| f.exists()));
    // One writer at a time, of this process too.
    let said = AsideFile::create(&at("out".into())).err().unwrap().to_string();
    assert!(said.contains("output: expected no one else who writes it"), "{said}");
    let beside = file.beside.path().to_owned();
    assert!(beside.exists() && open().contains(&beside));
    drop(file);
    assert!(!beside.exists() && !open().contains(&beside));
    drop(lock);
    let beside = Beside::take(&at("out".into())).unwrap();
    // What cannot take its name goes, too.
    fs::create_dir(at("out".into())).unwrap();
    assert!(beside.place().is_err() && open().iter().all(|a| !a.starts_with(dir.path())));
    assert!(!held.exists(), "nobody holds it any more");
}
