//! The spill file: cold blocks of the cache in slots of one size, on disk and back.
//!
//! The file has no name once it is open, so that its space comes back however the process ends. What is read is compared
//! with a checksum kept in memory: a block that the disk changed is read from the prompt again instead.

use crate::kv::SlotId;
use crate::units::{Error, Result};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64;

/// Slots on disk.
pub struct SpillFile {
    file: File,
    folder: PathBuf,
    slot_bytes: usize,
    slots: usize,
    free: Vec<SlotId>,
    /// `(length, checksum)` of each slot that was ever used.
    sums: Vec<(usize, u64)>,
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
        let slots = (bytes_max / slot_bytes.max(1) as u64).min(SlotId::MAX.into()) as usize;
        Ok(SpillFile { file, folder: folder.into(), slot_bytes, slots, free: Vec::new(), sums: Vec::new() })
    }

    /// True if no slot is free.
    pub fn full(&self) -> bool {
        self.free.is_empty() && self.sums.len() >= self.slots
    }

    /// Bytes of slots in use.
    pub fn used_bytes(&self) -> u64 {
        (self.sums.len() - self.free.len()) as u64 * self.slot_bytes as u64
    }

    /// Writes a block to a free slot.
    pub fn write(&mut self, bytes: &[u8]) -> Result<SlotId> {
        assert!(bytes.len() <= self.slot_bytes && !self.full());
        let slot = self.free.pop().unwrap_or(self.sums.len() as SlotId);
        let at = u64::from(slot) * self.slot_bytes as u64;
        if let Err(e) = self.file.write_all_at(bytes, at) {
            // A slot past the end was never handed out; one from the list goes back there.
            if (slot as usize) < self.sums.len() {
                self.free.push(slot);
            }
            return Err(Error::io(&self.folder, format_args!("spill {} bytes", bytes.len()), e));
        }
        let sum = (bytes.len(), xxh3_64(bytes));
        match self.sums.get_mut(slot as usize) {
            Some(s) => *s = sum,
            None => self.sums.push(sum),
        }
        Ok(slot)
    }

    /// Reads a slot; the slot stays.
    pub fn read(&self, slot: SlotId, out: &mut Vec<u8>) -> Result<()> {
        let (len, sum) = self.sums[slot as usize];
        out.clear();
        out.resize(len, 0);
        let at = u64::from(slot) * self.slot_bytes as u64;
        let read = self.file.read_exact_at(out, at);
        read.map_err(|e| Error::io(&self.folder, format_args!("read spilled slot {slot}"), e))?;
        let found = xxh3_64(out);
        if found == sum {
            return Ok(());
        }
        Err(Error::bad(
            &self.folder,
            format_args!("spilled slot {slot}"),
            format_args!("checksum {sum:016x}"),
            format_args!("{found:016x}"),
        ))
    }

    /// A slot is of no more use.
    pub fn release(&mut self, slot: SlotId) {
        debug_assert!(!self.free.contains(&slot));
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_back_and_a_changed_one_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = SpillFile::create(folder.path(), 100, 350).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no name");
        let slots: Vec<_> = (0..3).map(|i| spill.write(&vec![i; 90 + i as usize]).unwrap()).collect();
        assert!(spill.full() && spill.used_bytes() == 300);
        let mut out = vec![];
        for (i, &slot) in slots.iter().enumerate() {
            spill.read(slot, &mut out).unwrap();
            assert_eq!(out, vec![i as u8; 90 + i]);
        }
        spill.release(slots[1]);
        assert!(!spill.full());
        assert_eq!(spill.write(b"short").unwrap(), slots[1]);
        spill.read(slots[1], &mut out).unwrap();
        assert_eq!(out, b"short");
        spill.file.write_all_at(b"x", 205).unwrap();
        let error = spill.read(slots[2], &mut out).unwrap_err().to_string();
        assert!(error.contains("checksum"), "{error}");
        let nowhere = SpillFile::create(Path::new("/dev/null/x"), 1, 1).map(|_| ()).unwrap_err().to_string();
        assert!(nowhere.contains("create"), "{nowhere}");
    }
}
