//! Matrices in memory: the tile layout over bytes that are shared, aligned and never change after load.

use crate::format::Codec;
use crate::format::layout::{self, Planes};
use crate::units::{Bytes, Error, Result};
use rustix::mm::{self, MapFlags, ProtFlags};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, Range};
use std::ptr::null_mut;
use std::sync::Arc;

/// Segments start on this boundary: a huge page, so that `madvise` can back them with huge pages.
pub const SEGMENT_ALIGN: usize = 2 << 20;
/// Smaller allocations start on this one: a page, which is what direct reads into them need.
const SMALL_ALIGN: usize = 4096;

/// One zeroed, aligned allocation that holds the bytes of several matrices.
#[derive(Debug)]
pub struct Segment {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a Segment owns its memory; it is written only through `&mut` (before it is shared) and read after.
unsafe impl Send for Segment {}
// SAFETY: as above: shared access only reads.
unsafe impl Sync for Segment {}

impl Segment {
    /// Allocates `len` zeroed bytes, or says that the system will not give them for `what`. Pages are committed as they are first
    /// written.
    pub fn try_zeroed(len: usize, what: &str) -> Result<Segment> {
        // Small ones (tests, buffers) need no huge-page boundary; large ones are mapped, because the standard
        // allocator would write zeros over pages that the system hands out zeroed already.
        let ptr = if len < SEGMENT_ALIGN { allocate_small(len) } else { map_large(len) };
        let no_memory = || Error::Limit {
            what: what.to_owned(),
            needs: Bytes(len as u64).to_string(),
            has: "less".to_owned(),
        };
        Ok(Segment { ptr: ptr.ok_or_else(no_memory)?, len })
    }

    /// Like [`Segment::try_zeroed`], for buffers so small that running out is the end anyway.
    pub fn zeroed(len: usize) -> Segment {
        Segment::try_zeroed(len, "memory").expect("memory for a small buffer")
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: ptr is valid for len bytes, initialized (zeroed) and uniquely borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// Some bytes, to read.
    pub fn part(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the segment and initialized; `part_mut`'s contract keeps writers away from what others read.
        unsafe { std::slice::from_raw_parts(self.ptr.add(range.start), range.len()) }
    }

    /// Some bytes, to write while other threads use others.
    ///
    /// # Safety
    /// No one else may read or write any of them meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the segment and initialized; exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// Gives the whole pages of a range back to the system: they are zero when they are next looked at. Returns their
    /// bytes; a small segment is the allocator's and gives nothing back.
    pub fn discard(&mut self, range: Range<usize>) -> u64 {
        assert!(range.start <= range.end && range.end <= self.len);
        let page = rustix::param::page_size();
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if self.len < SEGMENT_ALIGN || start >= end {
            return 0;
        }
        // SAFETY: whole pages inside this mapping, which is private, anonymous and uniquely borrowed.
        let given =
            unsafe { mm::madvise(self.ptr.add(start).cast(), end - start, mm::Advice::LinuxDontNeed) };
        if given.is_ok() { (end - start) as u64 } else { 0 }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: ptr is valid for len bytes and initialized; no one writes while shared.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

fn small_layout(len: usize) -> Layout {
    Layout::from_size_align(len.max(layout::PLANE_ALIGN), SMALL_ALIGN).expect("under the huge page size")
}

fn allocate_small(len: usize) -> Option<*mut u8> {
    // SAFETY: the layout's size is not zero.
    let ptr = unsafe { alloc_zeroed(small_layout(len)) };
    (!ptr.is_null()).then_some(ptr)
}

/// Bytes mapped for a large segment: whole huge pages.
fn mapped_bytes(len: usize) -> usize {
    len.next_multiple_of(SEGMENT_ALIGN)
}

/// Maps anonymous memory on a huge-page boundary, by mapping one huge page too many and giving the edges back.
fn map_large(len: usize) -> Option<*mut u8> {
    let keep = len.checked_next_multiple_of(SEGMENT_ALIGN)?;
    let all = keep.checked_add(SEGMENT_ALIGN)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new private mapping at an address of the system's choice touches no memory in use.
    let base = unsafe { mm::mmap_anonymous(null_mut(), all, prot, MapFlags::PRIVATE) }.ok()? as *mut u8;
    let skip = base.align_offset(SEGMENT_ALIGN);
    let tail = all - skip - keep;
    // SAFETY: both edges and the part kept lie inside the mapping made above; nothing points into the edges.
    unsafe {
        let start = base.add(skip);
        if skip > 0 {
            mm::munmap(base.cast(), skip).ok()?;
        }
        if tail > 0 {
            mm::munmap(start.add(keep).cast(), tail).ok()?;
        }
        // Only a hint: without huge pages weights are merely slower to walk.
        let _ = mm::madvise(start.cast(), keep, mm::Advice::LinuxHugepage);
        Some(start)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.len < SEGMENT_ALIGN {
            // SAFETY: allocated in `allocate_small` with this same layout.
            unsafe { dealloc(self.ptr, small_layout(self.len)) }
        } else {
            // SAFETY: this is exactly what `map_large` kept of its mapping, and no borrow outlives self.
            let _ = unsafe { mm::munmap(self.ptr.cast(), mapped_bytes(self.len)) };
        }
    }
}

/// A byte range of a shared [`Segment`].
#[derive(Clone)]
pub struct WeightBytes {
    segment: Arc<Segment>,
    offset: usize,
    len: usize,
}

impl WeightBytes {
    /// A view of `segment[offset..offset+len]`; `offset` must be on a [`layout::PLANE_ALIGN`] boundary.
    pub fn new(segment: Arc<Segment>, offset: usize, len: usize) -> WeightBytes {
        assert!(offset.is_multiple_of(layout::PLANE_ALIGN));
        assert!(offset.checked_add(len).is_some_and(|end| end <= segment.len));
        WeightBytes { segment, offset, len }
    }
}

impl Deref for WeightBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.segment.bytes()[self.offset..self.offset + self.len]
    }
}

/// A weight matrix `(rows, cols)`: `y (rows) = W x (cols)`.
#[derive(Clone)]
pub struct Matrix {
    /// Element type.
    pub codec: Codec,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Where each plane lies in `bytes`.
    pub planes: Planes,
    /// The tile layout's bytes.
    pub bytes: WeightBytes,
}

impl Matrix {
    /// Wraps bytes that already are in the tile layout.
    pub fn new(codec: Codec, rows: usize, cols: usize, bytes: WeightBytes) -> Matrix {
        let planes = layout::planes(codec, rows, cols).expect("shape was checked when planned");
        assert_eq!(planes.total_bytes, bytes.len());
        Matrix { codec, rows, cols, planes, bytes }
    }

    /// A matrix whose bytes are elsewhere: what a model is bound with when its weights live on a device.
    pub fn shell(codec: Codec, rows: usize, cols: usize) -> Matrix {
        let planes = layout::planes(codec, rows, cols).expect("shape was checked when planned");
        let none = Arc::new(Segment::zeroed(0));
        Matrix { codec, rows, cols, planes, bytes: WeightBytes::new(none, 0, 0) }
    }

    /// Tiles of 16 rows.
    pub fn tiles(&self) -> usize {
        layout::tiles(self.rows)
    }

    /// Bytes a full multiplication reads.
    pub fn size_bytes(&self) -> usize {
        self.planes.total_bytes
    }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({}, {})", self.codec.name(), self.rows, self.cols)
    }
}
