//! RMSNorm, `kernels/norm.cu`.

use crate::backend::cuda::params::Params;
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::units::Result;

/// The module.
pub const UNIT: Unit = Unit::of("norm");

/// One launch: `y[i] = x[index[i] or i] / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// Rows of `x_row` f32s.
    pub x: Ptr,
    /// Elements from one row to the next.
    pub x_row: usize,
    /// `(rows)` u32: which row of `x` each is; null: all in order.
    pub index: Ptr,
    /// Rows of the result.
    pub rows: usize,
    /// `(n)` f32.
    pub weight: Ptr,
    /// Width.
    pub n: usize,
    /// Epsilon.
    pub eps: f32,
    /// `(rows, n)` f32, or null.
    pub y: Ptr,
    /// The quantized form of the same, or null; then `n` is in whole groups.
    pub q: Ptr,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct NormParams {
    x: Ptr,
    index: Ptr,
    weight: Ptr,
    y: Ptr,
    q: Ptr,
    x_row: u64,
    n: u32,
    eps: f32,
}
const _: () = assert!(size_of::<NormParams>() == 56);
// SAFETY: repr(C) without padding; NormParams of kernels/norm.cu.
unsafe impl Params for NormParams {}

/// Normalizes rows.
pub fn rms(gpu: &Gpu, a: &Norm) -> Result<()> {
    assert!(a.q.is_null() || a.n.is_multiple_of(crate::format::layout::GROUP));
    let params = NormParams {
        x: a.x,
        index: a.index,
        weight: a.weight,
        y: a.y,
        q: a.q,
        x_row: a.x_row as u64,
        n: a.n as u32,
        eps: a.eps,
    };
    let name = match a.n {
        0..=2048 => "rms_norm_2",
        2049..=8192 => "rms_norm_8",
        _ => "rms_norm",
    };
    gpu.launch(UNIT, name, Grid { blocks: [a.rows as u32, 1, 1], threads: 1024, shared_bytes: 0 }, &params)
}
