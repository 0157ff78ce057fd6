//! The files by which a board is read and steered, as a seam: the same sensor and actuator code runs on a real board,
//! on a tree of plain files that stands for one, and on a simulated board at its own time.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes read of one node. sysfs gives at most a page; `/proc/meminfo` about 2 KiB; debugfs tables up to some tens.
const NODE_BYTES_MAX: u64 = 256 << 10;

/// A board's files and its clock. Paths are as on the board: `/sys/class/devfreq/17000000.gpu/cur_freq`.
///
/// Errors are the system's own: [`io::ErrorKind::NotFound`] for a node that is not there, `WouldBlock` (EAGAIN) for a
/// sensor whose block is off, `PermissionDenied` where a right is missing.
pub trait Nodes: Send + Sync {
    /// The whole text of a node, as it is: with the line end, and NULs where the device tree has them.
    fn read(&self, path: &str) -> io::Result<String>;

    /// Writes a value to a node that exists. Never creates one.
    fn write(&self, path: &str, text: &str) -> io::Result<()>;

    /// The names inside a folder, sorted.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;

    /// Time that only goes forward, from any start.
    fn now_us(&self) -> u64;

    /// Lets `us` of that time pass.
    fn sleep(&self, us: u64);
}

/// The trimmed text of a node, or nothing where it cannot be read.
pub fn text(nodes: &dyn Nodes, path: &str) -> Option<String> {
    nodes.read(path).ok().map(|t| t.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned())
}

/// Characters of a sensor's or board's name. A board's model has 70, the rest at most 20.
const NAME_CHARS_MAX: usize = 128;

/// A node's text as a name to show: whatever wrote it, a terminal is not steered by it.
pub fn name(nodes: &dyn Nodes, path: &str) -> Option<String> {
    let shown = |c: &char| !c.is_control();
    text(nodes, path).map(|t| t.chars().filter(shown).take(NAME_CHARS_MAX).collect())
}

/// A node's number, or nothing where it is absent or says something else.
pub fn number<T: std::str::FromStr>(nodes: &dyn Nodes, path: &str) -> Option<T> {
    text(nodes, path)?.parse().ok()
}

/// The machine's own files, or a tree of plain files in a folder that stands for a board.
#[derive(Debug, Clone)]
pub struct RealNodes {
    root: PathBuf,
    started: Instant,
}

impl RealNodes {
    /// This machine.
    pub fn system() -> RealNodes {
        RealNodes::under("/")
    }

    /// The files below `root`, which stands for `/`.
    pub fn under(root: impl Into<PathBuf>) -> RealNodes {
        RealNodes { root: root.into(), started: Instant::now() }
    }

    /// The folder that stands for `/`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a board's path lies. A path that climbs out is no board's path.
    fn place(&self, path: &str) -> io::Result<PathBuf> {
        let inside = path.trim_start_matches('/');
        if Path::new(inside).components().any(|c| !matches!(c, std::path::Component::Normal(_))) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a path that climbs"));
        }
        Ok(self.root.join(inside))
    }

    /// Where a board's file lies; a folder, or a pipe whose open could wait for ever, is none.
    fn file(&self, path: &str) -> io::Result<PathBuf> {
        let place = self.place(path)?;
        match fs::metadata(&place)?.is_file() {
            true => Ok(place),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "no plain file")),
        }
    }
}

impl Nodes for RealNodes {
    fn read(&self, path: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        fs::File::open(self.file(path)?)?.take(NODE_BYTES_MAX).read_to_end(&mut bytes)?;
        // The model's name is free text of the carrier's vendor, in any bytes.
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let place = self.file(path)?;
        if self.root != Path::new("/") {
            // A kernel's node takes a value whole or not at all; a plain file does so when it is replaced.
            let aside = place.with_extension("new");
            fs::write(&aside, text)?;
            return fs::rename(&aside, &place);
        }
        // One write call: the kernel takes a node's value from one. Cutting matters for plain files only.
        OpenOptions::new().write(true).truncate(true).open(place)?.write_all(text.as_bytes())
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.place(path)?)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    fn sleep(&self, us: u64) {
        std::thread::sleep(Duration::from_micros(us));
    }
}

#[test]
fn a_tree_of_files_stands_for_a_board() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("sys/b")).unwrap();
    fs::write(dir.path().join("sys/b/freq"), "1020000000\n").unwrap();
    fs::write(dir.path().join("sys/b/a"), "not a number").unwrap();
    let nodes = RealNodes::under(dir.path());
    assert_eq!(nodes.list("/sys/b").unwrap(), ["a", "freq"]);
    assert_eq!(number(&nodes, "/sys/b/freq"), Some(1_020_000_000u64));
    assert_eq!(number::<u64>(&nodes, "/sys/b/a"), None);
    nodes.write("/sys/b/freq", "306").unwrap();
    assert_eq!(nodes.read("/sys/b/freq").unwrap(), "306", "a shorter value leaves nothing of the longer one");
    // What is not there is not made, and nothing outside is reached.
    assert_eq!(nodes.write("/sys/b/new", "1").unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(nodes.read("/sys/../../x").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(nodes.read("/sys/b").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let before = nodes.now_us();
    nodes.sleep(1_000);
    assert!(nodes.now_us() >= before + 1_000);
}
