//! Whether pages of this process can be lent to the GPU as they are, without a copy. On Orin the GPU does not cache such
//! pages, so they pay only for what is read once; whether a driver takes them at all differs by release.

use super::driver::{Context, failed, has};
use crate::units::Result;
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

/// Pages of the probe: one, at the alignment that every system's pages have or divide.
const PROBE_BYTES: usize = 64 << 10;

/// What the driver says and does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registering {
    /// It says that it takes pages.
    pub supported: bool,
    /// It says that it takes pages which may only be read, such as a file's.
    pub read_only_supported: bool,
    /// It took a page of ours, and gave it back.
    pub works: bool,
}

/// Asks the driver, then tries.
pub fn probe(context: &Context) -> Result<Registering> {
    context.bind()?;
    let ask = |a: Attribute| {
        let mut value = 0;
        // SAFETY: the context's device; the pointer is valid for the call.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut value, a, context.device()) };
        status.result().map(|()| value != 0).map_err(|e| failed("ask for an attribute", e))
    };
    let supported = ask(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)?;
    let read_only_supported = ask(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)?;
    if !has("cuMemHostRegister_v2") || !has("cuMemHostUnregister") {
        return Ok(Registering { supported, read_only_supported, works: false });
    }
    let layout = std::alloc::Layout::from_size_align(PROBE_BYTES, PROBE_BYTES).expect("a power of two");
    // SAFETY: the size is not zero.
    let page = unsafe { std::alloc::alloc_zeroed(layout) };
    if page.is_null() {
        std::alloc::handle_alloc_error(layout);
    }
    // SAFETY: the memory is ours, of that size, and stays until it is unregistered.
    let works = unsafe { sys::cuMemHostRegister_v2(page.cast(), PROBE_BYTES, 0) }.result().is_ok();
    if works {
        // SAFETY: registered just above.
        let _ = unsafe { sys::cuMemHostUnregister(page.cast()) };
    }
    // SAFETY: allocated above with this layout; the driver has given it back.
    unsafe { std::alloc::dealloc(page, layout) };
    Ok(Registering { supported, read_only_supported, works })
}
