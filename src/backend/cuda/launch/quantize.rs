//! Activations into the forms that products take: 12-bit codes for GEMVs, scaled f16 rows for GEMMs.

use crate::backend::cuda::params::Params;
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::format::Codec;
use crate::format::layout::GROUP;
use crate::units::Result;

/// Bytes of a quantized group of 32 activations (`QGroup` of `kernels/quantize.cuh`).
pub const GROUP_BYTES: usize = 80;

const UNIT: Unit = Unit::of("quantize");

/// Bytes of a quantized row of `cols` activations, a multiple of 16.
pub fn row_bytes(cols: usize) -> usize {
    cols / GROUP * GROUP_BYTES
}

#[repr(C)]
#[derive(Clone, Copy)]
struct QuantizeParams {
    x: Ptr,
    q: Ptr,
    x_row: u64,
    groups: u32,
    pad: u32,
}
const _: () = assert!(size_of::<QuantizeParams>() == 32);
// SAFETY: repr(C) without hidden padding; QuantizeParams of kernels/quantize.cu.
unsafe impl Params for QuantizeParams {}

/// Quantizes `rows` rows of `x`, `x_stride` elements apart, into contiguous rows of [`row_bytes`] at `q`, which is
/// 16-byte aligned. `cols` is in whole groups.
pub fn rows(gpu: &Gpu, x: Ptr, x_stride: usize, rows: usize, cols: usize, q: Ptr) -> Result<()> {
    assert!(cols.is_multiple_of(GROUP) && q.0.is_multiple_of(16));
    let groups = (cols / GROUP) as u32;
    let grid = Grid { blocks: [groups.div_ceil(8), rows as u32, 1], threads: 256, shared_bytes: 0 };
    gpu.launch(UNIT, "quantize_rows", grid, &QuantizeParams { x, q, x_row: x_stride as u64, groups, pad: 0 })
}

/// Rows of f16 or bf16 for the tensor cores, each with the factor that undoes its scaling.
#[derive(Debug, Clone, Copy)]
pub struct Halves {
    /// `(heads, rows, pitch)` of 2 bytes: a row is its one or two terms.
    pub x: Ptr,
    /// `(heads, rows)` f32
    pub factor: Ptr,
    /// Columns of a row with its padding.
    pub pitch: usize,
}

impl Halves {
    /// True against dense weights with f32's range, which f16 has no room for.
    fn are_bf16(codec: Codec) -> bool {
        codec.is_dense() && codec != Codec::F16
    }

    /// Terms that stand for an activation against this codec: dense weights are worth two (22 bits; of bf16 16).
    pub fn terms(codec: Codec) -> usize {
        1 + usize::from(codec.is_dense())
    }

    /// Bytes of `n` rows of `cols`.
    pub fn bytes(n: usize, cols: usize, terms: usize) -> usize {
        n * terms * cols.next_multiple_of(GROUP) * 2 + (n * 4).next_multiple_of(256)
    }

    /// Lays out `n` rows in scratch memory; returns also where the rest of it starts.
    pub fn at(scratch: Ptr, n: usize, cols: usize, terms: usize) -> (Halves, Ptr) {
        let pitch = terms * cols.next_multiple_of(GROUP);
        let x = scratch.at((n * 4).next_multiple_of(256) as u64);
        let end = scratch.at(Halves::bytes(n, cols, terms).next_multiple_of(256) as u64);
        (Halves { x, factor: scratch, pitch }, end)
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct HalfParams {
    x: Ptr,
    y: Ptr,
    factor: Ptr,
    x_step: u64,
    x_row: u64,
    cols: u32,
    pitch: u32,
    terms: u32,
    bf16: u32,
}
const _: () = assert!(size_of::<HalfParams>() == 56);
// SAFETY: repr(C) without hidden padding; HalfParams of kernels/quantize.cu.
unsafe impl Params for HalfParams {}

/// Where f32 rows lie: `heads` times `rows` of `cols`, `step` elements from head to head and `row` from row to row.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// The first row.
    pub x: Ptr,
    /// Rows of a head.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from head to head.
    pub step: usize,
    /// Elements from row to row.
    pub row: usize,
    /// What they will meet.
    pub against: Codec,
}

/// Converts rows to f16 or bf16 in `scratch`, which holds [`Halves::bytes`] of `heads * rows` rows.
pub fn halves(gpu: &Gpu, from: &Source, scratch: Ptr) -> Result<(Halves, Ptr)> {
    let terms = Halves::terms(from.against);
    let (to, end) = Halves::at(scratch, from.rows * from.heads, from.cols, terms);
    let params = HalfParams {
        x: from.x,
        y: to.x,
        factor: to.factor,
        x_step: from.step as u64,
        x_row: from.row as u64,
        cols: from.cols as u32,
        pitch: (to.pitch / terms) as u32,
        terms: terms as u32,
        bf16: u32::from(Halves::are_bf16(from.against)),
    };
    let grid = Grid { blocks: [from.rows as u32, from.heads as u32, 1], threads: 256, shared_bytes: 0 };
    gpu.launch(UNIT, "half_rows", grid, &params)?;
    Ok((to, end))
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SiluParams {
    gate: Ptr,
    up: Ptr,
    act: Ptr,
    n: u64,
}
const _: () = assert!(size_of::<SiluParams>() == 32);
// SAFETY: repr(C) without hidden padding; SiluParams of kernels/quantize.cu.
unsafe impl Params for SiluParams {}

/// `act = silu(gate) * up` over `n` elements; `act` may be either.
pub fn silu_products(gpu: &Gpu, gate: Ptr, up: Ptr, act: Ptr, n: usize) -> Result<()> {
    let grid = Grid { blocks: [n.div_ceil(256) as u32, 1, 1], threads: 256, shared_bytes: 0 };
    gpu.launch(UNIT, "silu_products", grid, &SiluParams { gate, up, act, n: n as u64 })
}
