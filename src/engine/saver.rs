//! The thread that writes session files, so that no step waits for the disk.
//!
//! A file comes in parts, one file after the other: its place, bytes, slots of the spill file that are read here, an end.
//! What waits is bounded in bytes. A file that fails takes no more parts in and says so to whoever feeds it; a file whose end
//! never comes was never there.

use super::queue::Queue;
use super::session::SUM_BYTES;
use super::spill::Pinned;
use crate::limits::SAVE_QUEUE_BYTES_MAX;
use crate::units::{Error, Result};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3;

/// Is told, on the thread that writes, how a file ended: its bytes, or why it is not there.
pub type Saved = Box<dyn FnOnce(Result<u64>) + Send>;

/// Of a file, in this order.
pub(super) enum Part {
    /// Where it goes, who is told, and what is set once more parts are of no use.
    Begin(PathBuf, Saved, Arc<AtomicBool>),
    /// Bytes that follow.
    Bytes(Vec<u8>),
    /// A block that follows, from the spill file.
    Slot(Pinned),
    /// There will be no whole file, for this reason.
    Fail(Error),
    /// It is whole.
    End,
}

/// The thread and what waits for it.
pub(super) struct Saver {
    queue: Arc<Queue<Part>>,
    thread: Option<JoinHandle<()>>,
}

impl Saver {
    pub fn start() -> Result<Saver> {
        let queue = Arc::new(Queue::new(SAVE_QUEUE_BYTES_MAX));
        let own = queue.clone();
        let thread = std::thread::Builder::new().name("tegu-sessions".into()).spawn(move || write_all(&own));
        let thread = thread.map_err(|e| Error::io("sessions", "start a thread", e))?;
        Ok(Saver { queue, thread: Some(thread) })
    }

    /// Waits for room for so many bytes, but no longer than `within`.
    pub fn room(&self, bytes: usize, within: Duration) -> bool {
        self.queue.room(bytes, within)
    }

    /// Adds a part. Who adds many bytes asked for [`Saver::room`] before.
    pub fn push(&self, part: Part) {
        // A slot's bytes are in memory only while it is written.
        let bytes = if let Part::Bytes(b) = &part { b.len() } else { 0 };
        self.queue.push(bytes, part);
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // What was begun and given whole is still written.
        self.queue.close(false);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there is a bug, and was reported by its message
        }
    }
}

/// The file that is being written.
struct Current {
    out: Option<Aside>,
    saved: Option<Saved>,
    failed: Arc<AtomicBool>,
}

impl Current {
    fn begin(path: &Path, saved: Saved, failed: Arc<AtomicBool>) -> Current {
        let mut current = Current { out: None, saved: Some(saved), failed };
        match Aside::create(path) {
            Ok(out) => current.out = Some(out),
            Err(e) => current.fail(e),
        }
        current
    }

    fn add(&mut self, part: Part, buffer: &mut Vec<u8>) {
        let Some(out) = &mut self.out else { return }; // it has failed
        let written = match part {
            Part::Bytes(bytes) => out.write(&bytes),
            Part::Slot(slot) => slot.read(buffer).and_then(|()| out.write(buffer)),
            Part::Fail(e) => Err(e),
            Part::Begin(..) | Part::End => unreachable!("told apart before"),
        };
        if let Err(e) = written {
            self.fail(e);
        }
    }

    fn end(mut self) {
        match self.out.take().map(Aside::finish) {
            Some(Ok(bytes)) => self.tell(Ok(bytes)),
            Some(Err(e)) => self.fail(e),
            None => {}
        }
    }

    fn fail(&mut self, e: Error) {
        self.out = None;
        self.failed.store(true, Ordering::Relaxed);
        self.tell(Err(e));
    }

    fn tell(&mut self, how: Result<u64>) {
        if let Some(saved) = self.saved.take() {
            saved(how);
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        self.tell(Err(Error::Stopped("before the session was saved".into())));
    }
}

fn write_all(queue: &Queue<Part>) {
    let mut current: Option<Current> = None;
    let mut buffer = Vec::new();
    while let Some((bytes, part)) = queue.pop() {
        match part {
            // One that has no end is dropped here, which tells.
            Part::Begin(path, saved, failed) => current = Some(Current::begin(&path, saved, failed)),
            Part::End => current.take().into_iter().for_each(Current::end),
            part => {
                if let Some(current) = &mut current {
                    current.add(part, &mut buffer);
                }
            }
        }
        queue.done(bytes);
    }
}

/// Ends the name of a file that is being written.
pub const ASIDE_SUFFIX: &str = ".part";

/// A file that is written beside its place, and takes it when it is whole.
struct Aside {
    file: io::BufWriter<File>,
    sum: Xxh3,
    bytes: u64,
    aside: PathBuf,
    path: PathBuf,
    done: bool,
}

impl Aside {
    fn create(path: &Path) -> Result<Aside> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = path.with_file_name(format!(".{name}.{}{ASIDE_SUFFIX}", std::process::id()));
        let mut options = fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.write(true).create(true).truncate(true).open(&aside);
        let file = file.map_err(|e| Error::io(&aside, "create", e))?;
        let file = io::BufWriter::with_capacity(1 << 20, file);
        Ok(Aside { file, sum: Xxh3::new(), bytes: 0, aside, path: path.into(), done: false })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::io(&self.aside, "write", e))
    }

    /// Adds the checksum and takes the place. Returns the bytes written.
    fn finish(mut self) -> Result<u64> {
        let sum = self.sum.digest();
        let written = self.file.write_all(&sum.to_le_bytes()).and_then(|()| self.file.flush());
        let synced = written.and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(|e| Error::io(&self.aside, "write", e))?;
        fs::rename(&self.aside, &self.path).map_err(|e| Error::io(&self.path, "rename to", e))?;
        self.done = true;
        // The name is safe once its folder is: a system that cannot sync folders keeps its own order.
        if let Some(folder) = self.path.parent() {
            let _ = File::open(folder).and_then(|f| f.sync_all());
        }
        Ok(self.bytes + SUM_BYTES)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.aside); // what cannot be removed is swept at the next start
        }
    }
}
