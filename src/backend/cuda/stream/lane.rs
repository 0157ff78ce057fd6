//! A stream beside the main one, and events: points of a stream that the host or another stream waits for.

use crate::backend::cuda::driver::{Context, Device, failed};
use crate::backend::cuda::memory::Ptr;
use crate::units::Result;
use cudarc::driver::{result, sys};
use std::sync::Arc;

/// A point of a stream.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: an event has one owner; the driver's calls on it may come from any thread.
unsafe impl Send for Event {}

impl Event {
    /// One that nothing was put before yet: waiting for it is no wait.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        context.bind()?;
        // The host sleeps while it waits: what it waits for takes long enough.
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current; the pointer is valid for the call.
        let made = unsafe { sys::cuEventCreate(&mut raw, flags) };
        made.result().map_err(|e| failed("make an event", e))?;
        Ok(Event { raw, context: context.clone() })
    }

    /// The host waits until the stream has come here.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives as long as self.
        unsafe { result::event::synchronize(self.raw) }.map_err(|e| failed("wait for the GPU", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once; the driver keeps what waits for it in order.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// A stream for copies, beside the device's.
#[derive(Debug)]
pub struct Lane {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: a stream has one owner here; the driver's calls on it may come from any thread.
unsafe impl Send for Lane {}

impl Lane {
    /// An empty one.
    pub fn new(context: &Arc<Context>) -> Result<Lane> {
        context.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(Lane { raw: raw.map_err(|e| failed("make a stream", e))?, context: context.clone() })
    }

    /// Copies `from`, which is pinned, to the device; it must stay as it is until an event recorded after says so.
    pub fn copy_in(&self, to: Ptr, from: &[u8]) -> Result<()> {
        // SAFETY: callers give an address of device memory with room, and keep `from` as the line above says.
        unsafe { result::memcpy_htod_async(to.0, from, self.raw) }.map_err(|e| failed("copy to the GPU", e))
    }

    /// Puts an event here.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both live as long as their owners.
        unsafe { result::event::record(event.raw, self.raw) }.map_err(|e| failed("record an event", e))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once, when its work is done.
            unsafe {
                let _ = result::stream::synchronize(self.raw);
                let _ = result::stream::destroy(self.raw);
            }
        }
    }
}

impl Device {
    /// Puts an event into the stream that work goes to.
    pub fn record_event(&self, event: &Event) -> Result<()> {
        // SAFETY: both live as long as their owners.
        unsafe { result::event::record(event.raw, self.stream()) }.map_err(|e| failed("record an event", e))
    }

    /// What is put on the stream from now on waits for the event.
    pub fn follow(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        unsafe { result::stream::wait_event(self.stream(), event.raw, flags) }
            .map_err(|e| failed("wait for an event", e))
    }
}
