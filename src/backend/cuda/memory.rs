//! Device memory: plain buffers, an arena that cuts segments, and a pinned host buffer. Segments are of 64 to 256 MiB,
//! because one large block can fail on Jetson while memory is free.

use super::driver::{Context, Device, failed};
use crate::units::{Bytes, Error, Result};
use bytemuck::{NoUninit, Pod};
use cudarc::driver::{result, sys};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A device address. 0 is none.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Ptr(pub u64);

impl Ptr {
    /// No address.
    pub const NULL: Ptr = Ptr(0);

    /// The address `bytes` on.
    pub fn at(self, bytes: u64) -> Ptr {
        Ptr(self.0 + bytes)
    }

    /// The address `n` f32s on.
    pub fn f32s(self, n: usize) -> Ptr {
        Ptr(self.0 + 4 * n as u64)
    }

    /// True if there is none.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// Every piece of an arena starts on this boundary: what the widest copies and loads ask for.
pub const PIECE_ALIGN: usize = 256;
/// An arena's usual segment.
pub const SEGMENT_BYTES: usize = 128 << 20;

/// An allocation of its own.
#[derive(Debug)]
pub struct Buffer {
    ptr: Ptr,
    len: usize,
    context: Arc<Context>,
}

impl Buffer {
    /// Allocates `len` bytes, contents undefined. Out of memory is [`Error::Limit`].
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Buffer> {
        context.bind()?;
        // SAFETY: a context is current; the size is not zero.
        let made = unsafe { result::malloc_sync(len.max(PIECE_ALIGN)) };
        let ptr = made.map_err(|e| match e.0 {
            sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => no_memory(context, len),
            _ => failed(format!("allocate {}", Bytes(len as u64)), e),
        })?;
        context.allocated_bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Buffer { ptr: Ptr(ptr), len, context: context.clone() })
    }

    /// Its address.
    pub fn ptr(&self) -> Ptr {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

fn no_memory(context: &Context, len: usize) -> Error {
    let (free, total) = context.memory_bytes().unwrap_or((0, 0));
    Error::Limit {
        what: "GPU memory".into(),
        needs: format!("{} more", Bytes(len as u64)),
        has: format!("{} free of {}", Bytes(free), Bytes(total)),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.ptr.0) };
            self.context.allocated_bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
    }
}

/// Hands out pieces of segments; nothing is given back before the whole.
#[derive(Debug)]
pub struct Arena {
    context: Arc<Context>,
    segments: Vec<Buffer>,
    used: usize,
}

impl Arena {
    /// An empty one.
    pub fn new(context: &Arc<Context>) -> Arena {
        Arena { context: context.clone(), segments: Vec::new(), used: 0 }
    }

    /// Takes the segments that pieces of these sizes will need, in this order, and no byte more than their last.
    pub fn reserve(&mut self, sizes: &[usize]) -> Result<Vec<Ptr>> {
        let (mut segments, mut places) = (Vec::<usize>::new(), Vec::with_capacity(sizes.len()));
        for &size in sizes {
            let need = size.next_multiple_of(PIECE_ALIGN);
            match segments.last_mut() {
                Some(used) if *used + need <= SEGMENT_BYTES => {
                    places.push((segments.len() - 1, *segments.last().expect("just matched")));
                    *segments.last_mut().expect("just matched") += need;
                }
                _ => {
                    places.push((segments.len(), 0));
                    segments.push(need);
                }
            }
        }
        let first = self.segments.len();
        for len in segments {
            self.segments.push(Buffer::new(&self.context, len)?);
            self.used += len;
        }
        Ok(places.iter().map(|&(s, at)| self.segments[first + s].ptr().at(at as u64)).collect())
    }

    /// One piece in a segment of its own.
    pub fn take(&mut self, len: usize) -> Result<Ptr> {
        Ok(self.reserve(&[len])?[0])
    }

    /// Bytes taken.
    pub fn used_bytes(&self) -> usize {
        self.used
    }
}

/// Host memory that the GPU copies from and to by itself.
#[derive(Debug)]
pub struct Pinned {
    ptr: *mut u8,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `len` zeroed bytes.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Pinned> {
        assert!(len > 0);
        context.bind()?;
        // SAFETY: a context is current; no flag but the mapping asks for ordinary cached memory, quick to read for the CPU.
        let made = unsafe { result::malloc_host(len, sys::CU_MEMHOSTALLOC_DEVICEMAP) };
        let ptr =
            made.map_err(|e| failed(format!("pin {} of host memory", Bytes(len as u64)), e))?.cast::<u8>();
        // SAFETY: just allocated with at least this size.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Pinned { ptr, len, context: context.clone() })
    }

    /// Its address for kernels, which reach it across the bus.
    pub fn device(&self) -> Result<Ptr> {
        let mut at = 0;
        // SAFETY: allocated by the driver in `new`, mapped as all such memory is; the pointer is valid for the call.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, self.ptr.cast(), 0) };
        status.result().map_err(|e| failed("map host memory", e))?;
        Ok(Ptr(at))
    }

    /// The bytes as words that the GPU may be writing.
    pub fn shared_words(&self) -> &[AtomicU32] {
        // SAFETY: page-aligned, initialized memory of whole words; atomics may be written from elsewhere meanwhile.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 4) }
    }

    /// None at all: what stands in for one that is lent out.
    pub fn empty(context: &Arc<Context>) -> Pinned {
        Pinned { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0, context: context.clone() }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialized for len bytes; callers synchronize before they read what the GPU wrote.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusively borrowed; copies from it are synchronized before it is reused.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.len > 0 && self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_host(self.ptr.cast()) };
        }
    }
}

impl Device {
    /// Copies `from` to the device, in stream order. Ordinary memory may be reused when this returns; pinned memory only
    /// after a synchronization.
    pub fn copy_in<T: NoUninit>(&self, to: Ptr, from: &[T]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: callers give an address of device memory with room; the driver stages pageable memory before it returns.
        unsafe { result::memcpy_htod_async(to.0, from, self.stream()) }
            .map_err(|e| failed("copy to the GPU", e))
    }

    /// Copies from the device in stream order; the bytes are there after [`Device::synchronize`].
    pub fn copy_out<T: Pod>(&self, to: &mut [T], from: Ptr) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: callers give an address of device memory of that length and synchronize before `to` is read or freed.
        unsafe { result::memcpy_dtoh_async(to, from.0, self.stream()) }
            .map_err(|e| failed("copy from the GPU", e))
    }

    /// Copies inside the device, in stream order.
    pub fn copy_within(&self, to: Ptr, from: Ptr, len: usize) -> Result<()> {
        // SAFETY: callers give addresses of device memory with `len` bytes each.
        unsafe { result::memcpy_dtod_async(to.0, from.0, len, self.stream()) }
            .map_err(|e| failed("copy on the GPU", e))
    }

    /// Zeroes bytes, in stream order.
    pub fn zero(&self, at: Ptr, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: callers give an address of device memory with `len` bytes.
        unsafe { result::memset_d8_async(at.0, 0, len, self.stream()) }.map_err(|e| failed("zero", e))
    }
}
