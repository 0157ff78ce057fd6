//! What a header parser reads from: bytes by offset, through a small window, never past the end.

use crate::units::{Error, Result};
use std::path::Path;

/// A file's bytes by offset. `weights` implements it over a file, tests over memory; parsers stay free of I/O.
pub trait Input {
    /// The file's name, for messages.
    fn path(&self) -> &Path;
    /// Its size.
    fn len_bytes(&self) -> u64;
    /// Fills `out` from `offset`. Callers stay inside [`Input::len_bytes`].
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;
}

/// Bytes in memory under a name.
pub struct NamedBytes<'a> {
    /// The name that messages show.
    pub path: &'a Path,
    /// The content.
    pub bytes: &'a [u8],
}

impl Input for NamedBytes<'_> {
    fn path(&self) -> &Path {
        self.path
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let at = offset as usize;
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(())
    }
}

/// Reads forward through an [`Input`]. Every step takes the name of the field it reads, for the message when the
/// file ends early.
pub struct Cursor<'a> {
    input: &'a dyn Input,
    /// Exclusive end of what may be read: the file's end, or a header's.
    end: u64,
    window: Vec<u8>,
    window_at: u64,
    at: u64,
}

/// Bytes fetched at a time: large enough that a vocabulary costs few reads, small beside everything else.
const WINDOW_BYTES: u64 = 256 << 10;

impl<'a> Cursor<'a> {
    /// A cursor over `range` of the input, cut to the file's size.
    pub fn new(input: &'a dyn Input, range: std::ops::Range<u64>) -> Cursor<'a> {
        let end = range.end.min(input.len_bytes());
        Cursor { input, end, window: Vec::new(), window_at: range.start, at: range.start }
    }

    /// Where the next byte comes from.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Bytes left.
    pub fn left(&self) -> u64 {
        self.end.saturating_sub(self.at)
    }

    /// The file's name.
    pub fn path(&self) -> &'a Path {
        self.input.path()
    }

    /// The error for `field` needing `needed` bytes here when fewer are left.
    pub fn ends_early(&self, field: &str, needed: u64) -> Error {
        Error::bad(
            self.path(),
            field,
            format_args!("{needed} bytes at offset {}", self.at),
            format_args!("end of file after {} bytes", self.left()),
        )
    }

    /// The next byte without taking it; `None` at the end.
    pub fn peek(&mut self) -> Result<Option<u8>> {
        if self.left() == 0 {
            return Ok(None);
        }
        self.fill()?;
        Ok(Some(self.window[(self.at - self.window_at) as usize]))
    }

    /// Steps over a byte that [`Cursor::peek`] has shown.
    pub fn bump(&mut self) {
        debug_assert!(self.at < self.end);
        self.at += 1;
    }

    /// Makes the byte at the position be in the window.
    fn fill(&mut self) -> Result<()> {
        let have_end = self.window_at + self.window.len() as u64;
        if self.at < self.window_at || self.at >= have_end {
            let take = WINDOW_BYTES.min(self.left());
            self.window.resize(take as usize, 0);
            self.window_at = self.at;
            self.input.read_at(self.at, &mut self.window)?;
        }
        Ok(())
    }

    /// Fills `out` with the next bytes.
    pub fn take(&mut self, field: &str, out: &mut [u8]) -> Result<()> {
        if self.left() < out.len() as u64 {
            return Err(self.ends_early(field, out.len() as u64));
        }
        let mut done = 0;
        while done < out.len() {
            self.fill()?;
            let from = (self.at - self.window_at) as usize;
            let n = (self.window.len() - from).min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.window[from..from + n]);
            done += n;
            self.at += n as u64;
        }
        Ok(())
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.take(field, &mut out)?;
        Ok(out)
    }

    /// The next `len` bytes, `len` checked against `max` and against what is left before anything is allocated.
    pub fn bytes(&mut self, field: &str, len: u64, max: u64) -> Result<Vec<u8>> {
        if len > max {
            return Err(Error::bad(
                self.path(),
                field,
                format_args!("at most {max} bytes"),
                format_args!("{len}"),
            ));
        }
        if len > self.left() {
            return Err(self.ends_early(field, len));
        }
        let mut out = vec![0; len as usize];
        self.take(field, &mut out)?;
        Ok(out)
    }

    /// A little-endian u32.
    pub fn u32(&mut self, field: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    /// A little-endian u64.
    pub fn u64(&mut self, field: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }
}
