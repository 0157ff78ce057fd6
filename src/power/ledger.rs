//! What we changed and what was there before, on disk before the first write: after a crash the next start puts it back.
//!
//! The file lies where a reboot empties it (`/run`), because a reboot clears the clocks too.

use super::nodes::{Nodes, text};
use crate::units::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
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
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    version: u32,
    entries: Vec<Entry>,
}

const VERSION: u32 = 1;

/// The file and what it says.
#[derive(Debug)]
pub struct Ledger {
    file: PathBuf,
    entries: Vec<Entry>,
}

impl Ledger {
    /// Reads the file, if there is one. One that cannot be trusted is an error: nothing is written by it.
    pub fn open(file: &Path) -> Result<Ledger> {
        let mut ledger = Ledger { file: file.to_owned(), entries: Vec::new() };
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
        ledger.entries = page.entries;
        Ok(ledger)
    }

    /// What is held.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What is held of one node.
    pub fn entry(&self, node: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.node == node)
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
                });
                self.entries.last_mut().expect("it was pushed")
            }
        };
        let fresh: Vec<String> = std::iter::once(now.to_owned())
            .chain(perhaps.iter().cloned())
            .filter(|v| !entry.ours.contains(v))
            .collect();
        // A value that is on disk as ours already needs no second write of the file: phases change in milliseconds.
        let known = fresh.is_empty() && !entry.now.is_empty();
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
        let page = Page { version: VERSION, entries: self.entries.clone() };
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

    #[test]
    fn what_is_put_down_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clocks.json");
        let mut ledger = Ledger::open(&file).unwrap();
        ledger.intend(NODE, "1020", "612", &["600".into()]).unwrap();
        ledger.became(NODE, "611").unwrap();
        let read = Ledger::open(&file).unwrap();
        assert_eq!(read.entries(), ledger.entries());
        let ours = ["612", "600", "611"].map(String::from).to_vec();
        let want = Entry { node: NODE.into(), old: "1020".into(), ours, now: "611".into() };
        assert_eq!(read.entries(), [want]);
        ledger.forget(NODE).unwrap();
        assert!(!file.exists(), "nothing is held: no file");
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
            assert!(Ledger::open(&file).is_err(), "{text}");
        }
        fs::write(&file, entry(NODE, "1020")).unwrap();
        assert!(Ledger::open(&file).is_ok());
    }
}
