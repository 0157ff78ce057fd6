//! Matrices in memory: the tile layout over bytes that are shared, aligned and never change after load.

use crate::format::Codec;
use crate::format::layout::{self, Planes};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Deref;
use std::sync::Arc;

/// Segments start on this boundary: a huge page, so that `madvise` can back them with huge pages.
pub const SEGMENT_ALIGN: usize = 2 << 20;

/// One zeroed, aligned allocation that holds the bytes of several matrices.
pub struct Segment {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a Segment owns its memory; it is written only through `&mut` (before it is shared) and read after.
unsafe impl Send for Segment {}
// SAFETY: as above: shared access only reads.
unsafe impl Sync for Segment {}

impl Segment {
    /// Allocates `len` zeroed bytes. Pages are committed as they are first written.
    pub fn zeroed(len: usize) -> Segment {
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero (`layout` rounds up to one cache line at least).
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Segment { ptr, len }
    }

    fn layout(len: usize) -> Layout {
        // Small matrices (tests, norms) need no huge-page boundary.
        let align = if len >= SEGMENT_ALIGN { SEGMENT_ALIGN } else { layout::PLANE_ALIGN };
        Layout::from_size_align(len.max(layout::PLANE_ALIGN), align)
            .expect("segment sizes are checked when planned")
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: ptr is valid for len bytes, initialized (zeroed) and uniquely borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: ptr is valid for len bytes and initialized; no one writes while shared.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this same layout.
        unsafe { dealloc(self.ptr, Self::layout(self.len)) }
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
