//! A step recorded once and replayed: one call instead of some hundred launches.

use super::driver::failed;
use super::module::Gpu;
use crate::units::Result;
use cudarc::driver::{result, sys};

/// A recorded list of launches and copies, on one stream.
#[derive(Debug)]
pub struct Graph {
    exec: sys::CUgraphExec,
    graph: sys::CUgraph,
    context: std::sync::Arc<super::driver::Context>,
}

// SAFETY: a graph has one owner and is launched on the owner's stream; the handles are not tied to a thread.
unsafe impl Send for Graph {}

impl Gpu {
    /// Records what `work` puts on the stream, which runs none of it. Every kernel must have been launched before, so
    /// that nothing is loaded while recording.
    pub fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let stream = self.device.stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not recording.
        unsafe { result::stream::begin_capture(stream, mode) }.map_err(|e| failed("start recording", e))?;
        let done = work();
        // SAFETY: ends what was begun above, whether the work went well or not.
        let graph = unsafe { result::stream::end_capture(stream) };
        done?;
        let graph = graph.map_err(|e| failed("end recording", e))?;
        // SAFETY: the graph was just made.
        match unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) } {
            Ok(exec) => Ok(Graph { exec, graph, context: self.context().clone() }),
            Err(e) => {
                // SAFETY: made above, destroyed once.
                let _ = unsafe { result::graph::destroy(graph) };
                Err(failed("make a graph", e))
            }
        }
    }

    /// Puts a recorded list on the stream.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: the graph lives; what it names (buffers, modules) outlives it by the backend's order of fields.
        unsafe { result::graph::launch(graph.exec, self.device.stream()) }
            .map_err(|e| failed("launch a graph", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `record`, destroyed once.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
            // SAFETY: as above.
            let _ = unsafe { result::graph::destroy(self.graph) };
        }
    }
}
