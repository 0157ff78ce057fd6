//! One launch wrapper for each kernel: the only places that know a kernel's name, grid and parameters. All put work on the
//! GPU's one stream and return at once.

pub mod embed;
pub mod expert;
pub mod gemm;
pub mod gemv;
pub mod quantize;
