//! What we changed and what was there before, on disk before the first write: after a crash the next start puts it back.
//!
//! The file lies where a reboot empties it (`/run`), because a reboot clears the clocks too. Where someone put it
//! elsewhere, it names its boot, and says nothing of another. One process at a time has it.

use super::nodes::{Nodes, text};
use crate::units::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Nodes that can be held at once: six are known.
const ENTRIES_MAX: usize = 16;
/// Values that one node may have had from us: a profile has a handful, `tune` a sweep's.
const OURS_MAX: usize = 256;
const FILE_BYTES_MAX: u64 = 256 << 10;

/// A node that holds a value of ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its path on the board.
    pub node: String,
    /// What it held before us.
    pub old: String,
    /// What it may hold from us: each value was put here before it was written, with what the node may round it to.
    pub ours: Vec<String>,
    /// The value wanted now.
    pub now: String,
    /// Since when, on the board's clock, it holds its old value again. The entry is kept for a while, because phases
    /// come back within seconds and what is in the file need not be written a second time. A restart knows nothing of
    /// this: it judges by `ours`, and a node with its old value needs nothing.
    #[serde(skip)]
    pub rests_since_us: Option<u64>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    version: u32,
    /// The boot's id; empty where none was known.
    #[serde(default)]
    boot: String,
    entries: Vec<Entry>,
}

const VERSION: u32 = 1;

/// The file and what it says.
#[derive(Debug)]
pub struct Ledger {
    file: PathBuf,
    boot: String,
    entries: Vec<Entry>,
    _lock: Option<Lock>,
}

/// The right to write nodes by a ledger: a second helper would take the first one's values for what a dead one left.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    /// Locked as long as it is open, whatever ends the process.
    _file: File,
}

impl Lock {
    /// None where the ledger's folder is not there: then there is no ledger either.
    fn take(ledger: &Path) -> Result<Option<Lock>> {
        use std::os::unix::fs::MetadataExt;
        let path = ledger.with_extension("lock");
        loop {
            let file = match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                other => other.map_err(|e| Error::io(&path, "create", e))?,
            };
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    let (expected, found) = ("no other process that sets clocks by it", "one that runs");
                    return Err(Error::bad(ledger, "lock", expected, found));
                }
                Err(TryLockError::Error(e)) => return Err(Error::io(&path, "lock", e)),
                Ok(()) => {}
            }
            // Who had it before may have removed the name between our open and our lock.
            let is_named = file.metadata().ok().zip(fs::metadata(&path).ok());
            if is_named.is_some_and(|(a, b)| a.ino() == b.ino()) {
                return Ok(Some(Lock { path, _file: file }));
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.path));
    }
}

impl Ledger {
    /// Reads the file, if there is one; `boot` is this boot's id, empty where it is not known.
    ///
    /// # Errors
    /// For a file that cannot be trusted: nothing is written by it. And where another process has it.
    pub fn open(file: &Path, boot: &str) -> Result<Ledger> {
        let lock = Lock::take(file)?;
        let (file_path, boot_id) = (file.to_owned(), boot.to_owned());
        let mut ledger = Ledger { file: file_path, boot: boot_id, entries: Vec::new(), _lock: lock };
        let opened = match File::open(file) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(ledger),
            other => other.map_err(|e| Error::io(file, "open", e))?,
        };
        let mut bytes = Vec::new();
        opened.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(|e| Error::io(file, "read", e))?;
        let page: Page = serde_json::from_slice(&bytes)
            .map_err(|e| Error::bad(file, "contents", "what the clock helper wrote", e))?;
        if page.version != VERSION {
            return Err(Error::bad(file, "version", VERSION, page.version));
        }
        if page.entries.len() > ENTRIES_MAX {
            return Err(Error::bad(file, "entries", format!("at most {ENTRIES_MAX}"), page.entries.len()));
        }
        for entry in &page.entries {
            entry.check(file)?;
        }
        if !page.boot.is_empty() && !boot.is_empty() && page.boot != boot {
            log::warn!("{}: of an earlier boot, whose clocks are gone: nothing is put back", file.display());
            ledger.save()?;
            return Ok(ledger);
        }
        ledger.entries = page.entries;
        Ok(ledger)
    }

    /// What is held.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What is held of one node.
    pub fn entry(&self, node: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.node == node && e.rests_since_us.is_none())
    }

    /// Nodes that hold a value of ours now.
    pub fn held(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|e| e.rests_since_us.is_none())
    }

    /// A node that has its old value back. It stays in the file until [`Ledger::forget_rested`].
    pub fn rest(&mut self, node: &str, at_us: u64) {
        if let Some(entry) = self.entries.iter_mut().find(|e| e.node == node) {
            entry.now.clone_from(&entry.old);
            entry.rests_since_us.get_or_insert(at_us);
        }
    }

    /// Forgets the nodes that have rested since `until_us` or longer.
    pub fn forget_rested(&mut self, until_us: u64) -> Result<()> {
        let before = self.entries.len();
        self.entries.retain(|e| e.rests_since_us.is_none_or(|since| since > until_us));
        if self.entries.len() == before { Ok(()) } else { self.save() }
    }

    /// Puts down that `node`, which holds `old`, is about to get `now`, which it may round to any of `perhaps`. On disk
    /// when this returns.
    pub fn intend(&mut self, node: &str, old: &str, now: &str, perhaps: &[String]) -> Result<()> {
        let entry = match self.entries.iter_mut().position(|e| e.node == node) {
            Some(i) => &mut self.entries[i],
            None => {
                assert!(self.entries.len() < ENTRIES_MAX, "only known nodes are held");
                self.entries.push(Entry {
                    node: node.to_owned(),
                    old: old.to_owned(),
                    ours: Vec::new(),
                    now: String::new(),
                    rests_since_us: None,
                });
                self.entries.last_mut().expect("it was pushed")
            }
        };
        // Where a rested node has another value by now, that one is to go back in the end.
        let moved = entry.rests_since_us.take().is_some() && entry.old != old;
        if moved {
            entry.old = old.to_owned();
            entry.ours.clear();
        }
        let fresh: Vec<String> = std::iter::once(now.to_owned())
            .chain(perhaps.iter().cloned())
            .filter(|v| !entry.ours.contains(v))
            .collect();
        // A value that is on disk as ours already needs no second write of the file: phases change in milliseconds.
        let known = fresh.is_empty() && !entry.now.is_empty() && !moved;
        entry.now = now.to_owned();
        entry.ours.extend(fresh);
        let over = entry.ours.len().saturating_sub(OURS_MAX);
        entry.ours.drain(..over);
        if known { Ok(()) } else { self.save() }
    }

    /// Puts down what the node made of the value, if that is news.
    pub fn became(&mut self, node: &str, got: &str) -> Result<()> {
        let Some(entry) = self.entries.iter_mut().find(|e| e.node == node) else { return Ok(()) };
        entry.now = got.to_owned();
        if entry.ours.iter().any(|v| v == got) {
            return Ok(());
        }
        entry.ours.push(got.to_owned());
        self.save()
    }

    /// Someone else set the node to `old`: that is what goes back there in the end.
    pub fn rebase(&mut self, node: &str, old: &str) -> Result<()> {
        let Some(entry) = self.entries.iter_mut().find(|e| e.node == node) else { return Ok(()) };
        entry.old = old.to_owned();
        entry.ours.clear();
        entry.now = String::new();
        self.save()
    }

    /// Forgets a node: it holds no value of ours any more.
    pub fn forget(&mut self, node: &str) -> Result<()> {
        let before = self.entries.len();
        self.entries.retain(|e| e.node != node);
        if self.entries.len() == before { Ok(()) } else { self.save() }
    }

    /// Whole or not at all, and on disk: written aside, synced, renamed. An empty ledger is no file.
    fn save(&self) -> Result<()> {
        let io = |doing: &'static str| move |e| Error::io(&self.file, doing, e);
        if self.entries.is_empty() {
            return match fs::remove_file(&self.file) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io("remove")(e)),
                _ => Ok(()),
            };
        }
        let page = Page { version: VERSION, boot: self.boot.clone(), entries: self.entries.clone() };
        let text = serde_json::to_string(&page).expect("strings and numbers");
        let aside = self.file.with_extension("new");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&aside)
            .map_err(|e| Error::io(&aside, "create", e))?;
        file.write_all(text.as_bytes()).map_err(io("write"))?;
        file.sync_all().map_err(io("sync"))?;
        fs::rename(&aside, &self.file).map_err(io("rename"))?;
        // The name is on disk only when its folder is.
        let folder = self.file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|f| f.sync_all()).map_err(io("sync the folder"))
    }
}

impl Entry {
    /// A root process writes what this file says, so it says nothing but clock nodes and numbers.
    fn check(&self, file: &Path) -> Result<()> {
        let known = is_clock_node(&self.node) || self.node.starts_with("nvml:");
        if !known {
            return Err(Error::bad(file, "node", "a clock's node", &self.node));
        }
        let is_number = |v: &String| {
            v.len() <= 20 && v.strip_prefix('-').unwrap_or(v).bytes().all(|b| b.is_ascii_digit())
        };
        let mut values = self.ours.iter().chain([&self.old, &self.now]);
        match values.find(|v| !is_number(v)) {
            Some(bad) => Err(Error::bad(file, &self.node, "a number", bad)),
            None if self.ours.len() > OURS_MAX + 8 => {
                Err(Error::bad(file, &self.node, format!("at most {OURS_MAX} values"), self.ours.len()))
            }
            None => Ok(()),
        }
    }

    /// Whether the node still holds a value of ours.
    pub fn is_ours(&self, nodes: &dyn Nodes) -> bool {
        text(nodes, &self.node).is_some_and(|v| self.ours.contains(&v))
    }
}

/// The nodes that this program ever writes on a board.
pub fn is_clock_node(path: &str) -> bool {
    let devfreq = path.strip_prefix("/sys/class/devfreq/").and_then(|p| p.split_once('/'));
    let is_gpu = devfreq.is_some_and(|(name, file)| {
        !name.is_empty() && name != ".." && matches!(file, "min_freq" | "max_freq")
    });
    let emc = path.strip_prefix(super::find::EMC).is_some_and(|f| matches!(f, "/rate" | "/mrq_rate_locked"));
    is_gpu || emc || super::find::EMC_CAPS.contains(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &str = "/sys/class/devfreq/17000000.gpu/max_freq";
    const BOOT: &str = "b07";

    #[test]
    fn what_is_put_down_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clocks.json");
        let mut ledger = Ledger::open(&file, BOOT).unwrap();
        ledger.intend(NODE, "1020", "612", &["600".into()]).unwrap();
        ledger.became(NODE, "611").unwrap();
        let refused = Ledger::open(&file, BOOT).unwrap_err().to_string();
        assert!(refused.contains("one that runs"), "{refused}");
        let before = ledger.entries().to_vec();
        drop(ledger);
        let mut ledger = Ledger::open(&file, BOOT).unwrap();
        assert_eq!(ledger.entries(), before);
        let ours = ["612", "600", "611"].map(String::from).to_vec();
        let want =
            Entry { node: NODE.into(), old: "1020".into(), ours, now: "611".into(), rests_since_us: None };
        assert_eq!(ledger.entries(), [want]);
        ledger.forget(NODE).unwrap();
        assert!(!file.exists(), "nothing is held: no file");
        drop(ledger);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "and no lock");
    }

    #[test]
    fn another_boots_file_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clocks.json");
        let put_down =
            |boot: &str| Ledger::open(&file, boot).unwrap().intend(NODE, "1020", "612", &[]).unwrap();
        for (then, now, is_kept) in [("a", "a", true), ("a", "b", false), ("", "b", true), ("a", "", true)] {
            put_down(then);
            let ledger = Ledger::open(&file, now).unwrap();
            assert_eq!(ledger.entries().len(), usize::from(is_kept), "{then:?} read in {now:?}");
            assert_eq!(file.exists(), is_kept);
            drop(ledger);
            drop(fs::remove_file(&file));
        }
    }

    /// Phases come and go in milliseconds, and the file is written when something is new only.
    #[test]
    fn a_rested_node_is_taken_up_without_a_write() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clocks.json");
        // A file that is written anew is another file.
        let number = || fs::metadata(&file).unwrap().ino();
        let mut ledger = Ledger::open(&file, BOOT).unwrap();
        ledger.intend(NODE, "1020", "612", &[]).unwrap();
        let first = number();
        for at in 1..5 {
            ledger.rest(NODE, at);
            assert!(ledger.entry(NODE).is_none() && ledger.held().next().is_none());
            // A restart now would find what it may need, and a node that needs nothing.
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains("1020") && text.contains("612"), "{text}");
            ledger.intend(NODE, "1020", "612", &[]).unwrap();
            assert_eq!((ledger.entry(NODE).unwrap().now.as_str(), number()), ("612", first));
        }
        // Another start than before is news.
        ledger.rest(NODE, 5);
        ledger.intend(NODE, "918", "612", &[]).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("918"));
        ledger.rest(NODE, 6);
        ledger.forget_rested(5).unwrap();
        assert!(file.exists());
        ledger.forget_rested(6).unwrap();
        assert!(!file.exists() && ledger.entries().is_empty());
    }

    #[test]
    fn a_file_that_cannot_be_trusted_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clocks.json");
        let entry = |node: &str, old: &str| {
            format!(r#"{{"version":1,"entries":[{{"node":"{node}","old":"{old}","ours":["1"],"now":"1"}}]}}"#)
        };
        let many = format!(
            r#"{{"version":1,"entries":[{}]}}"#,
            vec![r#"{"node":"/sys/class/devfreq/g/min_freq","old":"1","ours":[],"now":""}"#; 17].join(",")
        );
        let bad = [
            String::new(),
            "{".into(),
            r#"{"version":2,"entries":[]}"#.into(),
            entry("/etc/shadow", "1"),
            entry("/sys/class/devfreq/../../etc/max_freq", "1"),
            entry(NODE, "rm -rf"),
            entry(NODE, "1\\n2"),
            many,
            r#"{"version":1,"entries":[],"more":1}"#.into(),
        ];
        for text in bad {
            fs::write(&file, &text).unwrap();
            assert!(Ledger::open(&file, BOOT).is_err(), "{text}");
        }
        fs::write(&file, entry(NODE, "1020")).unwrap();
        assert!(Ledger::open(&file, BOOT).is_ok());
    }
}
