//! The driver: opened at run time, so that one binary serves machines with and without a GPU.
//!
//! cudarc looks a symbol up when it is first called and panics if it is not there; so the library and every symbol that
//! this room uses are asked for first, and their absence is an ordinary error.

use crate::units::{Error, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a thread waits for the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wait {
    /// Sleeps: the default, because the cores belong to the robot's programs.
    #[default]
    Block,
    /// Spins: some microseconds sooner.
    Spin,
}

/// Oldest driver that is served: JetPack 6 brings 12.2 or later, JetPack 5 stops at 11.4.
const DRIVER_VERSION_MIN: i32 = 12020;
/// Functions that this room calls. A library without one is no driver that we know.
const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxSetFlags_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
];

/// Wraps a driver's answer: which GPU, what was being done, the driver's words.
pub(super) fn failed(doing: impl std::fmt::Display, e: DriverError) -> Error {
    let text = |s: std::result::Result<&std::ffi::CStr, DriverError>| {
        s.map_or(String::new(), |s| s.to_string_lossy().into_owned())
    };
    let words = format!("{} ({})", text(e.error_string()), text(e.error_name()));
    Error::io("CUDA", doing, std::io::Error::other(words))
}

fn missing(field: &str, expected: impl std::fmt::Display, found: impl std::fmt::Display) -> Error {
    Error::bad("CUDA", field, expected, found)
}

/// True if the driver's library is there: what `auto` asks before it tries.
pub fn is_present() -> bool {
    library().is_ok()
}

/// Why no GPU can be used, if that is because no driver is installed: the ordinary case of a machine without one. A
/// driver that is there and cannot be used is another matter, which [`Device::open`] tells.
pub fn absent() -> Option<Error> {
    library().err().filter(|e| e.to_string().contains("No such file"))
}

/// The loader's own words for a library that it would not load.
pub(super) fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), |s| s.to_string())
}

/// The driver's library, opened. It stays open: the process cannot be rid of it once it ran.
fn library() -> Result<&'static libloading::Library> {
    // cudarc tries the bare name first and then this one; ours must find what it will find.
    let names = ["libcuda.so.1", "libcuda.so"];
    let mut why = String::new();
    for name in names {
        // SAFETY: loading runs the driver's initializers, as any CUDA program's start does.
        match unsafe { libloading::Library::new(name) } {
            Ok(lib) => return Ok(Box::leak(Box::new(lib))),
            Err(e) if why.is_empty() => why = reason(&e),
            Err(_) => {}
        }
    }
    Err(missing("driver", "libcuda.so.1, which NVIDIA's driver installs", why))
}

/// Opens the library, checks that it is a driver that we know, and starts it. Returns its CUDA version.
fn start() -> Result<i32> {
    let lib = library()?;
    let has = |name: &str| {
        // SAFETY: only asks whether the symbol exists; it is not called through this type.
        let found = unsafe { lib.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok();
        let expected = || format!("function {name} in libcuda.so.1 (CUDA 12.2 or later)");
        if found { Ok(()) } else { Err(missing("driver", expected(), "none")) }
    };
    // The version first: an old driver lacks functions too, and its age is the better reason.
    has("cuDriverGetVersion")?;
    let mut version = 0;
    // SAFETY: the symbol is there (checked); the pointer is valid for the call.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) };
    status.result().map_err(|e| failed("ask for the driver's version", e))?;
    if version < DRIVER_VERSION_MIN {
        let from_jetpack_5 = if version / 1000 == 11 { ", as JetPack 5 has it" } else { "" };
        let found = format!("CUDA {}.{}{from_jetpack_5}", version / 1000, version % 1000 / 10);
        return Err(missing("driver", "CUDA 12.2 or later (JetPack 6 or 7)", found));
    }
    SYMBOLS.iter().try_for_each(|name| has(name))?;
    result::init().map_err(|e| failed("start the driver", e))?;
    Ok(version)
}

/// Whether the driver has a function that is not needed for work: one that only `tegu doctor` tries.
pub(super) fn has(name: &str) -> bool {
    // SAFETY: only asks whether the symbol exists; it is not called through this type.
    library().is_ok_and(|lib| unsafe { lib.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok())
}

/// A device's primary context, held while anything made in it lives.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// Bytes of device memory that this process took through [`super::memory`].
    pub(super) allocated_bytes: AtomicU64,
}

// SAFETY: a context may be made current on any thread; the driver's calls on it are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes it the calling thread's.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as self lives.
        unsafe { result::ctx::set_current(self.raw) }.map_err(|e| failed("use the device", e))
    }

    /// The device that it is of.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Free and total bytes of device memory, other programs' use included.
    pub fn memory_bytes(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (free, total) = result::mem_get_info().map_err(|e| failed("ask for free memory", e))?;
        Ok((free as u64, total as u64))
    }

    /// Bytes that this process took.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `Device::open`, released once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A GPU and the one stream that work is put on.
#[derive(Debug)]
pub struct Device {
    /// Its context.
    pub context: Arc<Context>,
    /// Its name.
    pub name: String,
    /// Compute capability: 87 for Orin.
    pub sm: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// CUDA version of the driver: 12060 for 12.6.
    pub driver_version: i32,
    /// Memory is shared with the CPU.
    pub integrated: bool,
    /// Shared memory a block may ask for.
    pub shared_bytes_max: u32,
    /// How the host waits for it.
    pub wait: Wait,
    /// The second-level cache.
    pub cache_bytes: u32,
    stream: sys::CUstream,
    /// A second stream for short independent work, and the events that tie it to the first.
    side: sys::CUstream,
    fork: sys::CUevent,
    join: sys::CUevent,
    aside: Cell<bool>,
}

// SAFETY: streams may be used from any thread whose current context is theirs; `bind` sees to that.
unsafe impl Send for Device {}

impl Device {
    /// Opens GPU number `ordinal`.
    pub fn open(ordinal: usize, wait: Wait) -> Result<Device> {
        let driver_version = start()?;
        let count = result::device::get_count().map_err(|e| failed("count devices", e))?;
        if ordinal >= count as usize {
            return Err(missing("device", format!("a GPU number {ordinal}"), format!("{count} GPUs")));
        }
        let device = result::device::get(ordinal as i32).map_err(|e| failed("get the device", e))?;
        let ask = |a: Attribute| {
            // SAFETY: the device comes from the driver.
            unsafe { result::device::get_attribute(device, a) }.map_err(|e| failed("ask for an attribute", e))
        };
        let major = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
        let minor = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
        let name = result::device::get_name(device).map_err(|e| failed("ask for the name", e))?;
        if major < 8 {
            let found = format!("{name}, {major}.{minor}");
            return Err(missing("device", "compute capability 8.0 or later", found));
        }
        let multiprocessors = ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let integrated = ask(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0;
        let shared_bytes_max = ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        let cache_bytes = ask(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u32;
        let flags = match wait {
            Wait::Block => sys::CUctx_flags_enum::CU_CTX_SCHED_BLOCKING_SYNC,
            Wait::Spin => sys::CUctx_flags_enum::CU_CTX_SCHED_SPIN,
        };
        // SAFETY: plain numbers. A context that another library made active keeps its flags; that is no error.
        let _ = unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, flags as u32) };
        // SAFETY: the device comes from the driver.
        let raw = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("make a context", e))?;
        let context = Arc::new(Context { device, raw, allocated_bytes: AtomicU64::new(0) });
        context.bind()?;
        // Whole from here on, so that its end gives back what was made when a part cannot be.
        let mut made = Device {
            context,
            name,
            sm: major * 10 + minor,
            multiprocessors,
            driver_version,
            integrated,
            shared_bytes_max,
            wait,
            cache_bytes,
            stream: std::ptr::null_mut(),
            side: std::ptr::null_mut(),
            fork: std::ptr::null_mut(),
            join: std::ptr::null_mut(),
            aside: Cell::new(false),
        };
        made.make_streams()?;
        Ok(made)
    }

    fn make_streams(&mut self) -> Result<()> {
        let stream = || {
            result::stream::create(result::stream::StreamKind::NonBlocking)
                .map_err(|e| failed("make a stream", e))
        };
        let event = || {
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .map_err(|e| failed("make an event", e))
        };
        self.stream = stream()?;
        self.side = stream()?;
        self.fork = event()?;
        self.join = event()?;
        Ok(())
    }

    /// The handle of the stream that work goes to now.
    pub(super) fn stream(&self) -> sys::CUstream {
        if self.aside.get() { self.side } else { self.stream }
    }

    /// Puts `side`'s work beside `main`'s: both start after what is on the stream, and what follows waits for both. They
    /// must not write what the other touches. Not nested.
    pub fn beside(&self, side: impl FnOnce() -> Result<()>, main: impl FnOnce() -> Result<()>) -> Result<()> {
        assert!(!self.aside.get(), "not nested");
        self.wait_for(self.fork, self.stream, self.side)?;
        self.aside.set(true);
        let of_side = side();
        self.aside.set(false);
        let of_main = main();
        // Joined whatever happened: a recording cannot end with a loose branch.
        self.wait_for(self.join, self.side, self.stream)?;
        of_side.and(of_main)
    }

    /// What is put on `later` from now on waits for what is on `earlier` now.
    fn wait_for(&self, event: sys::CUevent, earlier: sys::CUstream, later: sys::CUstream) -> Result<()> {
        // SAFETY: the event and both streams live as long as self.
        unsafe { result::event::record(event, earlier) }.map_err(|e| failed("record an event", e))?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        unsafe { result::stream::wait_event(later, event, flags) }.map_err(|e| failed("wait for an event", e))
    }

    /// Waits until the stream is empty.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as self.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|e| failed("wait for the GPU", e))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: made in `make_streams` where they are not null, destroyed once.
        unsafe {
            for event in [self.fork, self.join].into_iter().filter(|e| !e.is_null()) {
                let _ = result::event::destroy(event);
            }
            for stream in [self.side, self.stream].into_iter().filter(|s| !s.is_null()) {
                let _ = result::stream::destroy(stream);
            }
        }
    }
}
