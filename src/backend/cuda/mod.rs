//! The CUDA backend. Libraries are opened at run time: the driver by cudarc, the compiler by [`nvrtc`]; without them
//! the same binary runs on the CPU. Kernels come out of the [`archive`] of a package, or are text in the binary
//! (`kernels/`), compiled for the GPU at hand and kept in a cache.

pub mod archive;
pub mod backend;
pub mod bench;
pub mod cache;
pub mod driver;
pub mod graph;
mod halves;
mod latent;
pub mod launch;
mod loading;
pub mod memory;
pub mod model;
pub mod module;
pub mod nvrtc;
pub mod pages;
pub mod params;
mod plan;
pub mod register;
mod rows;
pub mod sass;
pub mod scratch;
mod spans;
mod step;
pub mod stream;
pub mod table;
#[cfg(test)]
pub mod testing;
mod units;
pub mod usage;
pub mod weights;

pub use backend::{CudaBackend, CudaOptions};
pub use driver::{Device, Wait};
pub use memory::{Buffer, Ptr};
pub use module::{Gpu, Grid, Unit};
pub use plan::{Draft, ExpertRoom, Plan};
