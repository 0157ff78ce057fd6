//! A new file written past the system's cache: a model of many gigabytes would push everything else out of it, and the
//! final sync would wait for all of it at once.

use super::file::DIRECT_ALIGN;
use super::matrix::Segment;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Bytes gathered before a write: what keeps a disk busy in one request.
const BUFFER_BYTES: usize = 4 << 20;

/// A file being written from start to end.
pub struct DirectFile {
    plain: File,
    /// The same file opened for direct writes, where the file system allows it.
    direct: Option<File>,
    buffer: Segment,
    used: usize,
    /// Bytes in the file: whole buffers until the end.
    written: u64,
}

impl DirectFile {
    /// Creates the file, or empties it.
    pub fn create(path: &Path) -> io::Result<DirectFile> {
        let plain = File::create(path)?;
        let direct =
            OpenOptions::new().write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path).ok();
        Ok(DirectFile { plain, direct, buffer: Segment::zeroed(BUFFER_BYTES), used: 0, written: 0 })
    }

    /// Writes what is left, waits until the disk has it, and gives the size.
    pub fn finish(mut self) -> io::Result<u64> {
        // Blocks go as before; what is no whole block can only go through the cache.
        let blocks = self.used - self.used % DIRECT_ALIGN as usize;
        self.put(blocks)?;
        let tail = &self.buffer.bytes()[blocks..self.used];
        self.plain.write_all_at(tail, self.written)?;
        self.plain.sync_all()?;
        Ok(self.written + tail.len() as u64)
    }

    /// Writes the first `len` bytes of the buffer.
    fn put(&mut self, len: usize) -> io::Result<()> {
        let bytes = &self.buffer.bytes()[..len];
        let done = match &self.direct {
            Some(file) => file.write_all_at(bytes, self.written),
            None => self.plain.write_all_at(bytes, self.written),
        };
        match done {
            // Some file systems open files for direct writes and then refuse them.
            Err(e) if e.kind() == ErrorKind::InvalidInput && self.direct.is_some() => {
                self.direct = None;
                self.plain.write_all_at(bytes, self.written)?;
            }
            other => other?,
        }
        self.written += len as u64;
        Ok(())
    }
}

impl Write for DirectFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.used == BUFFER_BYTES {
            self.put(BUFFER_BYTES)?;
            self.used = 0;
        }
        let n = bytes.len().min(BUFFER_BYTES - self.used);
        self.buffer.bytes_mut()[self.used..self.used + n].copy_from_slice(&bytes[..n]);
        self.used += n;
        Ok(n)
    }

    /// Nothing: [`DirectFile::finish`] ends the file, and a partial block in its middle could not be written directly.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn every_size_arrives_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    for len in [0, 1, 4096, 5000, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES + 4097] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 4096) as u8).collect();
        let mut file = DirectFile::create(&path).unwrap();
        bytes.chunks(1_000_003).for_each(|c| file.write_all(c).unwrap());
        assert_eq!(file.finish().unwrap(), len as u64);
        assert!(std::fs::read(&path).unwrap() == bytes, "{len}");
    }
}
