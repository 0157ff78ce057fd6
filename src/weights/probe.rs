//! What the system lets a reader do: asked by `tegu doctor`, not by loading, which falls back by itself.

use super::file::DIRECT_ALIGN;
use super::matrix::Segment;
use rustix::fs::OFlags;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Reads a file's first block past the system's cache.
pub fn direct_read(file: &Path) -> io::Result<()> {
    let opened = OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(file)?;
    let mut block = Segment::zeroed(DIRECT_ALIGN as usize);
    opened.read_at(block.bytes_mut(), 0).map(drop)
}

/// Makes a small ring and asks whether it reads. Kernels switch io_uring off, and containers refuse its calls.
pub fn io_uring() -> io::Result<()> {
    let ring = io_uring::IoUring::new(8)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match probe.is_supported(io_uring::opcode::Read::CODE) {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's ring does not read")),
    }
}

#[test]
fn a_missing_file_is_told() {
    assert_eq!(direct_read(Path::new("no such file")).unwrap_err().kind(), io::ErrorKind::NotFound);
}
