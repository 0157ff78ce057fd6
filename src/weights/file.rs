//! One file of a model, read without leaving anything behind: no mapping, and no page in the system's cache that was
//! not there before.
//!
//! A read first asks whether the pages are cached (`RWF_NOWAIT`); if so it copies them, else it reads past the cache
//! (`O_DIRECT`). Where the file system refuses direct reads, pages that a buffered read brought in are dropped after.

use super::matrix::Segment;
use crate::format::input::Input;
use crate::units::{Error, Result};
use rustix::fs::{Advice, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, IoSliceMut};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Offsets, lengths and addresses of direct reads are multiples of this: the largest logical block of disks in use.
pub(super) const DIRECT_ALIGN: u64 = 4096;

/// An open file of a model.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    len: u64,
    file: File,
    /// The same file opened for direct reads, where the file system allows it.
    direct: Option<File>,
}

impl SourceFile {
    /// Opens a regular file.
    pub fn open(path: &Path) -> Result<SourceFile> {
        // Asked before opening: opening a pipe would wait for its writer.
        let kind = fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
        if !kind.is_file() {
            let found = if kind.is_dir() { "a directory" } else { "something else" };
            return Err(Error::bad(path, "path", "a regular file", found));
        }
        let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
        let len = file.metadata().map_err(|e| Error::io(path, "read the size", e))?.len();
        let flags = OFlags::DIRECT.bits() as i32;
        let direct = OpenOptions::new().read(true).custom_flags(flags).open(path).ok();
        // Without this the cache probe would start read-ahead of pages that are not there.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        Ok(SourceFile { path: path.to_owned(), len, file, direct })
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// Reads what is cached from `offset` into the start of `out`; 0 if nothing is or the system cannot say.
    fn read_cached(&self, offset: u64, out: &mut [u8]) -> usize {
        let mut done = 0;
        // One page first: a miss makes the kernel fetch what was asked for, so ask for little.
        let mut ask = out.len().min(DIRECT_ALIGN as usize);
        while done < out.len() {
            let mut part = [IoSliceMut::new(&mut out[done..done + ask])];
            match rustix::io::preadv2(&self.file, &mut part, offset + done as u64, ReadWriteFlags::NOWAIT) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
            ask = out.len() - done;
        }
        done
    }

    /// Drops cached pages of a range that this process caused to be read.
    fn forget(&self, offset: u64, len: u64) {
        // Only whole pages are dropped; a partial one at the edge would stay without the widening.
        let start = offset & !(DIRECT_ALIGN - 1);
        let end = (offset + len).next_multiple_of(DIRECT_ALIGN);
        let _ = rustix::fs::fadvise(&self.file, start, NonZeroU64::new(end - start), Advice::DontNeed);
    }
}

/// A thread's reader: one aligned buffer that grows to the largest read.
pub struct Reader {
    buffer: Segment,
}

impl Reader {
    /// A reader whose buffer holds `capacity` bytes from any offset.
    pub fn new(capacity: usize) -> Reader {
        Reader { buffer: Segment::zeroed(buffer_bytes(capacity)) }
    }

    /// Reads `len` bytes at `offset`; `what` says in messages what they belong to.
    pub fn read(&mut self, f: &SourceFile, offset: u64, len: usize, what: &str) -> Result<&[u8]> {
        if self.buffer.bytes().len() < buffer_bytes(len) {
            self.buffer = Segment::zeroed(buffer_bytes(len));
        }
        let start = offset & !(DIRECT_ALIGN - 1);
        let skip = (offset - start) as usize;
        let span = (skip + len).next_multiple_of(DIRECT_ALIGN as usize);
        let buffer = &mut self.buffer.bytes_mut()[..span];
        let fail = |e: std::io::Error| {
            Error::io(&f.path, format_args!("read {len} bytes at offset {offset} of {what}"), e)
        };
        let mut done = f.read_cached(start, &mut buffer[..skip + len]);
        if done < skip + len {
            // The rest again from its last whole page; what the probe may have started to cache is dropped.
            done &= !(DIRECT_ALIGN as usize - 1);
            let missing = (skip + len - done) as u64;
            let at = start + done as u64;
            if !direct(f, at, &mut buffer[done..], missing).map_err(fail)? {
                f.file.read_exact_at(&mut buffer[done..skip + len], at).map_err(fail)?;
            }
            f.forget(at, missing);
        }
        Ok(&self.buffer.bytes()[skip..skip + len])
    }
}

fn buffer_bytes(len: usize) -> usize {
    len.next_multiple_of(DIRECT_ALIGN as usize) + DIRECT_ALIGN as usize
}

/// Fills `out` from `at` by direct reads until at least `needed` bytes are there. False if the file system will not.
fn direct(f: &SourceFile, at: u64, out: &mut [u8], needed: u64) -> std::io::Result<bool> {
    let Some(file) = &f.direct else { return Ok(false) };
    let mut done = 0;
    while (done as u64) < needed {
        match file.read_at(&mut out[done..], at + done as u64) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                done += n;
                // A short read that is no whole block is the file's end: nothing aligned can follow it.
                if !(done as u64).is_multiple_of(DIRECT_ALIGN) && (done as u64) < needed {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::InvalidInput => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// A file as header parsers see it.
pub struct HeaderInput<'a> {
    file: &'a SourceFile,
    reader: RefCell<Reader>,
}

impl<'a> HeaderInput<'a> {
    /// Wraps `file`.
    pub fn new(file: &'a SourceFile) -> HeaderInput<'a> {
        HeaderInput { file, reader: RefCell::new(Reader::new(64 << 10)) }
    }
}

impl Input for HeaderInput<'_> {
    fn path(&self) -> &Path {
        &self.file.path
    }

    fn len_bytes(&self) -> u64 {
        self.file.len
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut reader = self.reader.borrow_mut();
        out.copy_from_slice(reader.read(self.file, offset, out.len(), "the header")?);
        Ok(())
    }
}

/// Reads a whole side file (JSON, template) of at most `max` bytes.
pub fn read_side_file(path: &Path, max: u64) -> Result<Vec<u8>> {
    let file = SourceFile::open(path)?;
    if file.len > max {
        return Err(Error::bad(path, "file size", format_args!("at most {max} bytes"), file.len));
    }
    let mut bytes = vec![0; file.len as usize];
    file.file.read_exact_at(&mut bytes, 0).map_err(|e| Error::io(path, "read", e))?;
    Ok(bytes)
}
