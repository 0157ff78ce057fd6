//! Compiled kernels on disk, so that the second start compiles nothing. An entry's name is the hash of everything that
//! went into it; its head is a checksum of the rest, so that a damaged one is made again. Entries are written aside and
//! renamed; a lock keeps two starts from compiling the same thing. A folder that cannot be used costs time, not work.

use crate::units::Result;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// First bytes of an entry; the number is the format's version.
const MAGIC: &[u8; 8] = b"tegucub1";
/// Larger than any module of ours: what is longer is not an entry.
const ENTRY_BYTES_MAX: u64 = 64 << 20;

/// How long another start may take to compile an entry; after that (it may be stopped in a debugger) the same work is
/// done twice rather than never.
const LOCK_WAIT: Duration = Duration::from_secs(30);

/// The folder.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    warned: AtomicBool,
    lock_wait: Duration,
}

/// Everything that decides what a compilation gives.
#[derive(Default)]
pub struct Key {
    hash: Xxh3,
}

impl Key {
    /// Adds a part; parts are kept apart by their lengths.
    pub fn add(&mut self, part: &str) {
        self.hash.update(&(part.len() as u64).to_le_bytes());
        self.hash.update(part.as_bytes());
    }

    /// The hash of all parts.
    pub fn digest(&self) -> u128 {
        self.hash.digest128()
    }

    /// The entry's name.
    pub fn name(&self, file: &str) -> String {
        format!("{file}-{:032x}.cubin", self.hash.digest128())
    }
}

impl Cache {
    /// The user's cache: `TEGU_CACHE_DIR`, the service's `CACHE_DIRECTORY`, `XDG_CACHE_HOME`, or `~/.cache`.
    pub fn of_user() -> Cache {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = var("TEGU_CACHE_DIR")
            .or_else(|| var("CACHE_DIRECTORY").map(|d| d.join("kernels")))
            .or_else(|| var("XDG_CACHE_HOME").map(|d| d.join("tegu/kernels")))
            .or_else(|| var("HOME").map(|d| d.join(".cache/tegu/kernels")));
        Cache { folder, warned: AtomicBool::new(false), lock_wait: LOCK_WAIT }
    }

    /// A cache in `folder`.
    pub fn in_folder(folder: &Path) -> Cache {
        let folder = Some(folder.to_owned());
        Cache { folder, warned: AtomicBool::new(false), lock_wait: LOCK_WAIT }
    }

    /// The entry `name`, made by `make` if it is not there or damaged.
    pub fn get(&self, name: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let Some(folder) = &self.folder else { return make() };
        let path = folder.join(name);
        if let Some(code) = read(&path) {
            return Ok(code);
        }
        // Held until the entry is written: another start waits and then finds it.
        let locked = fs::create_dir_all(folder).and_then(|()| lock(folder, name, self.lock_wait));
        let _lock = locked.map_err(|e| self.warn(&e)).ok();
        if let Some(code) = read(&path) {
            return Ok(code);
        }
        let code = make()?;
        if let Err(e) = write(folder, &path, &code) {
            self.warn(&e);
        }
        Ok(code)
    }

    /// Says once why kernels are compiled at every start.
    fn warn(&self, e: &std::io::Error) {
        if !self.warned.swap(true, Ordering::Relaxed)
            && let Some(folder) = &self.folder
        {
            log::warn!(
                "{}: compiled kernels cannot be kept here ({e}); set TEGU_CACHE_DIR",
                folder.display()
            );
        }
    }
}

/// An entry's code, if it is whole.
fn read(path: &Path) -> Option<Vec<u8>> {
    let len = fs::metadata(path).ok().filter(|m| m.is_file())?.len();
    if !(16..=ENTRY_BYTES_MAX).contains(&len) {
        return None;
    }
    let bytes = fs::read(path).ok()?;
    let (head, code) = bytes.split_at_checked(16)?;
    let whole = head[..8] == MAGIC[..] && head[8..] == xxh3_64(code).to_le_bytes();
    if !whole {
        log::warn!("{}: damaged; compiling it again", path.display());
    }
    whole.then(|| code.to_vec())
}

/// One lock file for each entry, so that different kernels compile side by side. The lock is the open file's: it goes with
/// a process that dies.
fn lock(folder: &Path, name: &str, wait: Duration) -> std::io::Result<File> {
    let file = File::options().create(true).append(true).open(folder.join(format!("{name}.lock")))?;
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(fs::TryLockError::Error(e)) => return Err(e),
            Err(fs::TryLockError::WouldBlock) if started.elapsed() >= wait => {
                log::warn!(
                    "{name}: locked by another process for {} s; compiling it here too",
                    wait.as_secs()
                );
                return Ok(file);
            }
            // Compiling takes a tenth of a second and more.
            Err(fs::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn write(folder: &Path, path: &Path, code: &[u8]) -> std::io::Result<()> {
    let aside = folder.join(format!(
        "{}.{}",
        path.file_name().expect("a name").to_string_lossy(),
        std::process::id()
    ));
    let result = (|| {
        let mut file = File::create(&aside)?;
        file.write_all(MAGIC)?;
        file.write_all(&xxh3_64(code).to_le_bytes())?;
        file.write_all(code)?;
        file.sync_data()?;
        fs::rename(&aside, path)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&aside);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Error;

    fn make(code: &[u8]) -> Result<Vec<u8>> {
        Ok(code.to_vec())
    }

    fn never() -> Result<Vec<u8>> {
        Err(Error::Interrupted)
    }

    #[test]
    fn an_entry_is_made_once_and_again_when_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::in_folder(&dir.path().join("deep/er"));
        assert_eq!(cache.get("a", || make(b"code")).unwrap(), b"code");
        assert_eq!(cache.get("a", never).unwrap(), b"code");
        let path = dir.path().join("deep/er/a");
        let good = fs::read(&path).unwrap();
        for at in [0, 9, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(cache.get("a", || make(b"code")).unwrap(), b"code");
            assert_eq!(fs::read(&path).unwrap(), good, "byte {at} healed");
        }
        fs::write(&path, &good[..10]).unwrap();
        assert_eq!(cache.get("a", || make(b"new")).unwrap(), b"new");
    }

    #[test]
    fn a_folder_that_cannot_be_used_costs_only_time() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let cache = Cache::in_folder(&file.join("below"));
        assert_eq!(cache.get("a", || make(b"code")).unwrap(), b"code");
        assert!(cache.warned.load(Ordering::Relaxed));
    }

    #[test]
    fn a_lock_that_is_never_given_back_is_not_waited_for_forever() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path(), "a", Duration::ZERO).unwrap();
        assert!(held.try_lock().is_ok(), "its own");
        let cache = Cache { lock_wait: Duration::from_millis(50), ..Cache::in_folder(dir.path()) };
        assert_eq!(cache.get("a", || make(b"code")).unwrap(), b"code");
        assert_eq!(cache.get("a", never).unwrap(), b"code", "and it was kept");
    }

    #[test]
    fn names_depend_on_every_part_and_where_it_ends() {
        let name = |parts: &[&str]| {
            let mut k = Key::default();
            parts.iter().for_each(|p| k.add(p));
            k.name("f")
        };
        assert_ne!(name(&["ab", "c"]), name(&["a", "bc"]));
        assert_eq!(name(&["ab", "c"]), name(&["ab", "c"]));
    }
}
