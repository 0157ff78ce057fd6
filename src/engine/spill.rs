//! The spill file: cold blocks of the cache in slots of one size, on disk and back.
//!
//! A thread of its own writes, so that no step waits for the disk: a block that is spilled waits in memory, where it is found
//! if it is wanted before it is written, and what waits is bounded. The file has no name once it is open, so that its space
//! comes back however the process ends. What is read is compared with a checksum kept in memory: a block that the disk
//! changed, or did not take, is read from the prompt again instead.

use super::queue::Queue;
use crate::kv::SlotId;
use crate::limits::SPILL_QUEUE_BYTES_MAX;
use crate::units::{Error, Result};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// How long a block that has no room in the queue waits for it: a write takes less than reading its tokens again, but a disk
/// that does not answer must not hold up a step for long.
const PATIENCE: Duration = Duration::from_millis(20);

/// Slots on disk.
pub struct SpillFile {
    shared: Arc<Shared>,
    slots: usize,
    /// The disk let a block wait for too long: the next ones do not wait until it takes one again.
    stalled: bool,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    file: File,
    folder: PathBuf,
    slot_bytes: usize,
    /// Slots to write, each with the stamp of what it is to hold.
    queue: Queue<(SlotId, u64)>,
    slots: Mutex<Slots>,
}

#[derive(Default)]
struct Slots {
    held: Vec<Held>,
    free: Vec<SlotId>,
    /// Slots that a session's write still has to read: how many do, and whether the tree has let go meanwhile.
    pins: HashMap<SlotId, (usize, bool)>,
    next_stamp: u64,
}

/// What a slot holds.
enum Held {
    Nothing,
    /// It is not on disk yet.
    Waiting {
        stamp: u64,
        bytes: Arc<Vec<u8>>,
    },
    Written {
        len: usize,
        sum: u64,
    },
    /// The disk did not take it, with the reason.
    Lost(String),
}

impl SpillFile {
    /// A file in `folder` for blocks of up to `slot_bytes`, at most `bytes_max` in all.
    pub fn create(folder: &Path, slot_bytes: usize, bytes_max: u64) -> Result<SpillFile> {
        // Another process, or another engine of this one, may use the same folder.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".tegu-spill-{}-{n}", std::process::id()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|e| Error::io(&path, "create", e))?;
        std::fs::remove_file(&path).map_err(|e| Error::io(&path, "remove", e))?;
        let mut spill = SpillFile::on(file, folder, slot_bytes, bytes_max);
        spill.start()?;
        Ok(spill)
    }

    fn on(file: File, folder: &Path, slot_bytes: usize, bytes_max: u64) -> SpillFile {
        let slots = (bytes_max / slot_bytes.max(1) as u64).min(SlotId::MAX.into()) as usize;
        let queue = Queue::new(SPILL_QUEUE_BYTES_MAX);
        let shared =
            Arc::new(Shared { file, folder: folder.into(), slot_bytes, queue, slots: Mutex::default() });
        SpillFile { shared, slots, stalled: false, thread: None }
    }

    /// Starts the thread that writes.
    fn start(&mut self) -> Result<()> {
        let own = self.shared.clone();
        let thread = std::thread::Builder::new().name("tegu-spill".into()).spawn(move || own.write_all());
        self.thread = Some(thread.map_err(|e| Error::io("spill", "start a thread", e))?);
        Ok(())
    }

    /// True if no slot is free.
    pub fn full(&self) -> bool {
        let slots = self.shared.lock();
        slots.free.is_empty() && slots.held.len() >= self.slots
    }

    /// Bytes of slots in use.
    pub fn used_bytes(&self) -> u64 {
        let slots = self.shared.lock();
        (slots.held.len() - slots.free.len()) as u64 * self.shared.slot_bytes as u64
    }

    /// Gives a block to the thread that writes, for a free slot. `None`: it cannot keep up.
    pub fn write(&mut self, bytes: Vec<u8>) -> Option<SlotId> {
        assert!(bytes.len() <= self.shared.slot_bytes && !self.full());
        let queue = &self.shared.queue;
        if !queue.room(bytes.len(), if self.stalled { Duration::ZERO } else { PATIENCE }) {
            if !std::mem::replace(&mut self.stalled, true) {
                log::warn!("{}: too slow; blocks are forgotten meanwhile", self.shared.folder.display());
            }
            return None;
        }
        self.stalled = false;
        let len = bytes.len();
        let mut slots = self.shared.lock();
        let slot = slots.free.pop().unwrap_or_else(|| {
            slots.held.push(Held::Nothing);
            (slots.held.len() - 1) as SlotId
        });
        let stamp = slots.next_stamp;
        slots.next_stamp += 1;
        slots.held[slot as usize] = Held::Waiting { stamp, bytes: Arc::new(bytes) };
        drop(slots);
        queue.push(len, (slot, stamp));
        Some(slot)
    }

    /// Reads a slot; the slot stays.
    pub fn read(&self, slot: SlotId, out: &mut Vec<u8>) -> Result<()> {
        self.shared.read(slot, out)
    }

    /// Keeps what a slot holds until the value is dropped, whatever becomes of the slot: another thread may read it.
    pub fn pin(&self, slot: SlotId) -> Pinned {
        self.shared.lock().pins.entry(slot).or_default().0 += 1;
        Pinned { shared: self.shared.clone(), slot }
    }

    /// A slot is of no more use.
    pub fn release(&mut self, slot: SlotId) {
        let mut slots = self.shared.lock();
        match slots.pins.get_mut(&slot) {
            Some((_, released)) => *released = true,
            None => slots.free(slot),
        }
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        // No one will read what waits: the file ends here.
        self.shared.queue.close(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there is a bug, and was reported by its message
        }
    }
}

/// A slot that is being read elsewhere.
pub struct Pinned {
    shared: Arc<Shared>,
    slot: SlotId,
}

impl Pinned {
    /// Reads it.
    pub fn read(&self, out: &mut Vec<u8>) -> Result<()> {
        self.shared.read(self.slot, out)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut slots = self.shared.lock();
        let (pins, released) = slots.pins.get_mut(&self.slot).expect("a pinned slot");
        *pins -= 1;
        let (last, released) = (*pins == 0, *released);
        if last {
            slots.pins.remove(&self.slot);
            if released {
                slots.free(self.slot);
            }
        }
    }
}

impl Slots {
    fn free(&mut self, slot: SlotId) {
        debug_assert!(!self.free.contains(&slot));
        self.held[slot as usize] = Held::Nothing;
        self.free.push(slot);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        // Nothing is half done under this lock.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, slot: SlotId) -> u64 {
        u64::from(slot) * self.slot_bytes as u64
    }

    /// The thread: writes what waits, until the queue is closed.
    fn write_all(&self) {
        while let Some((len, (slot, stamp))) = self.queue.pop() {
            let wanted = |slots: &Slots| match &slots.held[slot as usize] {
                // A slot that was freed, or taken again, meanwhile has another stamp.
                Held::Waiting { stamp: s, bytes } if *s == stamp => Some(bytes.clone()),
                _ => None,
            };
            let bytes = wanted(&self.lock());
            if let Some(bytes) = bytes {
                let written = self.file.write_all_at(&bytes, self.at(slot));
                let now = match written {
                    Ok(()) => Held::Written { len, sum: xxh3_64(&bytes) },
                    Err(e) => {
                        let e = Error::io(&self.folder, format_args!("spill {len} bytes"), e);
                        log::warn!("{e}; the block is forgotten");
                        Held::Lost(e.to_string())
                    }
                };
                let mut slots = self.lock();
                if wanted(&slots).is_some() {
                    slots.held[slot as usize] = now;
                }
            }
            self.queue.done(len);
        }
    }

    fn read(&self, slot: SlotId, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        let what = || format!("spilled slot {slot}");
        let (len, sum) = match &self.lock().held[slot as usize] {
            Held::Nothing => panic!("slot {slot} is free"),
            Held::Waiting { bytes, .. } => {
                out.extend_from_slice(bytes);
                return Ok(());
            }
            Held::Lost(why) => return Err(Error::bad(&self.folder, what(), "a block", why)),
            Held::Written { len, sum } => (*len, *sum),
        };
        out.resize(len, 0);
        let read = self.file.read_exact_at(out, self.at(slot));
        read.map_err(|e| Error::io(&self.folder, format_args!("read spilled slot {slot}"), e))?;
        let found = xxh3_64(out);
        if found == sum {
            return Ok(());
        }
        let want = format_args!("checksum {sum:016x}");
        Err(Error::bad(&self.folder, what(), want, format_args!("{found:016x}")))
    }
}

#[cfg(test)]
#[path = "spill_tests.rs"]
mod tests;
