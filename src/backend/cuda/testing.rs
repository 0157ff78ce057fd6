//! What the GPU tests share. Without a GPU a test says that it was skipped and passes.

use super::cache::Cache;
use super::driver::{Device, Wait};
use super::memory::{Buffer, Ptr};
use super::module::Gpu;
use bytemuck::{NoUninit, Pod};

/// The first GPU, or a line that says why the calling test was skipped.
pub fn gpu() -> Option<Gpu> {
    match Device::open(0, Wait::Block) {
        Ok(device) => Some(Gpu::new(device, Cache::of_user())),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

impl Gpu {
    /// A buffer with these contents.
    pub fn upload<T: NoUninit>(&self, data: &[T]) -> Buffer {
        let buffer = self.room(size_of_val(data));
        self.device.copy_in(buffer.ptr(), data).unwrap();
        self.device.synchronize().unwrap();
        buffer
    }

    /// A zeroed buffer of `len` bytes.
    pub fn room(&self, len: usize) -> Buffer {
        let buffer = Buffer::new(self.context(), len).unwrap();
        self.device.zero(buffer.ptr(), len).unwrap();
        buffer
    }

    /// `n` elements from `at`, once all work is done.
    pub fn download<T: Pod>(&self, at: Ptr, n: usize) -> Vec<T> {
        let mut out = vec![T::zeroed(); n];
        self.device.synchronize().unwrap();
        self.device.copy_out(&mut out, at).unwrap();
        self.device.synchronize().unwrap();
        out
    }
}
