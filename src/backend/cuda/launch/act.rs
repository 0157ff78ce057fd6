//! SwiGLU's middle where no product fused it, and biases, `kernels/silu.cu`.

use crate::backend::cuda::params::Params;
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::units::Result;

/// The module.
pub const UNIT: Unit = Unit::of("silu");
/// Threads of a block.
const THREADS: usize = 256;

/// One launch: `y = silu(gate) * up`.
#[derive(Debug, Clone, Copy)]
pub struct Silu {
    /// `(rows, n)` f32; elements from one row to the next.
    pub gate: (Ptr, usize),
    /// As `gate`.
    pub up: (Ptr, usize),
    /// Rows.
    pub rows: usize,
    /// Width.
    pub n: usize,
    /// `(rows, n)` f32, or null.
    pub y: Ptr,
    /// The quantized form of the same, or null; then `n` is in whole groups.
    pub q: Ptr,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SiluParams {
    gate: Ptr,
    up: Ptr,
    y: Ptr,
    q: Ptr,
    gate_row: u64,
    up_row: u64,
    n: u32,
    pad: u32,
}
const _: () = assert!(size_of::<SiluParams>() == 56);
// SAFETY: repr(C) without padding; SiluParams of kernels/silu.cu.
unsafe impl Params for SiluParams {}

/// `silu(gate) * up`.
pub fn silu(gpu: &Gpu, a: &Silu) -> Result<()> {
    assert!(a.q.is_null() || a.n.is_multiple_of(crate::format::layout::GROUP));
    let params = SiluParams {
        gate: a.gate.0,
        up: a.up.0,
        y: a.y,
        q: a.q,
        gate_row: a.gate.1 as u64,
        up_row: a.up.1 as u64,
        n: a.n as u32,
        pad: 0,
    };
    gpu.launch(UNIT, "silu_mul", grid(a.n, a.rows), &params)
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BiasParams {
    x: Ptr,
    bias: Ptr,
    x_row: u64,
    n: u32,
    pad: u32,
}
const _: () = assert!(size_of::<BiasParams>() == 32);
// SAFETY: repr(C) without padding; BiasParams of kernels/silu.cu.
unsafe impl Params for BiasParams {}

/// `x[r] += bias` for rows of `n` f32s, `x_row` apart.
pub fn add_bias(gpu: &Gpu, rows: usize, n: usize, x: Ptr, x_row: usize, bias: Ptr) -> Result<()> {
    gpu.launch(
        UNIT,
        "add_bias",
        grid(n, rows),
        &BiasParams { x, bias, x_row: x_row as u64, n: n as u32, pad: 0 },
    )
}

fn grid(n: usize, rows: usize) -> Grid {
    Grid { blocks: [n.div_ceil(THREADS) as u32, rows as u32, 1], threads: THREADS as u32, shared_bytes: 0 }
}
