//! Buffers that several workers write disjoint parts of.

use super::ops::Out;
use std::cell::UnsafeCell;
use std::ops::Range;

/// A buffer whose disjoint parts are written by several workers between two barriers of the team.
#[derive(Default)]
pub struct Shared {
    data: UnsafeCell<Vec<f32>>,
}

// SAFETY: parts are handed out by the unsafe `part_mut`, whose contract keeps them disjoint.
unsafe impl Sync for Shared {}

impl Shared {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Shared {
        Shared { data: UnsafeCell::new(vec![0.0; len]) }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        // SAFETY: only the Vec's header is read, and it never changes.
        unsafe { (*self.data.get()).len() }
    }

    /// All of it, for one owner.
    pub fn all_mut(&mut self) -> &mut [f32] {
        self.data.get_mut()
    }

    /// A part, to read.
    pub fn part(&self, range: Range<usize>) -> &[f32] {
        // SAFETY: `part_mut`'s contract keeps writers away from what others read.
        unsafe { &(&*self.data.get())[range] }
    }

    /// A part, to write.
    ///
    /// # Safety
    /// Until the next barrier no one else may read or write any of it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part_mut(&self, range: Range<usize>) -> &mut [f32] {
        // SAFETY: only the Vec's header is read through the shared reference; the elements are ours by contract.
        let v = unsafe { &*self.data.get() };
        assert!(range.start <= range.end && range.end <= v.len());
        // SAFETY: inside the buffer, exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(v.as_ptr().add(range.start).cast_mut(), range.len()) }
    }

    /// All of it as the output of products, with a stride of 1 to begin with.
    ///
    /// # Safety
    /// As for [`Shared::part_mut`], for each element that a product writes.
    pub unsafe fn out(&self) -> Out<'_> {
        // SAFETY: only the Vec's header is read through the shared reference.
        let v = unsafe { &*self.data.get() };
        // SAFETY: the buffer is valid for its length; exclusive use of what is written is the contract.
        unsafe { Out::from_raw(v.as_ptr().cast_mut(), v.len(), 1) }
    }
}
