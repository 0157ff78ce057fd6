//! Matrix products: the choice among kernels, and the ones for few rows.

use super::{gemm, quantize};
use crate::backend::cuda::params::{MatrixParams, Params};
use crate::backend::cuda::table::BY_CODEC;
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::format::Codec;
use crate::format::layout::{GROUP, tiles};
use crate::units::Result;

/// More rows than this go to the tensor cores.
pub const ROWS_MAX: usize = 8;

/// A kernel file compiled for a codec.
pub fn unit(file: &'static str, codec: Codec) -> Unit {
    Unit { file, variant: BY_CODEC[codec as usize] }
}

/// True if products with this codec take quantized activations (up to [`ROWS_MAX`] rows of them).
pub fn wants_q(codec: Codec, exact: bool) -> bool {
    !exact && !codec.is_dense()
}

/// Activation rows of a product.
#[derive(Debug, Clone, Copy)]
pub struct Acts {
    /// f32 rows.
    pub f32: Ptr,
    /// Elements from row to row.
    pub f32_stride: usize,
    /// The same rows quantized, one after another; null where no product wants them.
    pub q: Ptr,
}

/// `y[h][r] (+)= W_h x[h][r]` for `heads` matrices of one shape and `rows` activation rows of each.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// The first matrix.
    pub w: MatrixParams,
    /// Its activations.
    pub x: Acts,
    /// Rows.
    pub rows: usize,
    /// f32 results.
    pub y: Ptr,
    /// Elements from row to row.
    pub y_stride: usize,
    /// Add to what is there.
    pub add: bool,
    /// f32 activations and sums throughout.
    pub exact: bool,
    /// Matrices; 1 for a plain product.
    pub heads: usize,
    /// Bytes from matrix to matrix.
    pub w_step: u64,
    /// Elements from a head's f32 activations to the next head's; 0 if heads share them.
    pub x_step: usize,
    /// Bytes from a head's quantized activations to the next head's (a row's heads are neighbours); 0 if heads share them.
    pub q_step: usize,
    /// Elements from a head's results to the next head's.
    pub y_step: usize,
    /// Working memory, of [`scratch_bytes`].
    pub scratch: Ptr,
    /// Its size.
    pub scratch_bytes: usize,
}

impl Product {
    /// A plain product: one matrix, fast, nothing added to, in working memory `(address, bytes)`.
    pub fn of(w: MatrixParams, x: Acts, rows: usize, y: (Ptr, usize), scratch: (Ptr, usize)) -> Product {
        Product {
            w,
            x,
            rows,
            y: y.0,
            y_stride: y.1,
            add: false,
            exact: false,
            heads: 1,
            w_step: 0,
            x_step: 0,
            q_step: 0,
            y_step: 0,
            scratch: scratch.0,
            scratch_bytes: scratch.1,
        }
    }
}

/// Working memory of a product of `rows` rows, `cols` wide, of any codec, whose activations differ for `heads` heads (1 if shared).
pub fn scratch_bytes(rows: usize, cols: usize, heads: usize) -> usize {
    if rows <= ROWS_MAX { 0 } else { quantize::Halves::bytes(rows * heads, cols, 2) + 256 }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ProductParams {
    w: MatrixParams,
    x: Ptr,
    q: Ptr,
    y: Ptr,
    w_step: u64,
    x_step: u64,
    q_step: u64,
    y_step: u64,
    x_row: u64,
    q_row: u64,
    y_row: u64,
    rows: u32,
    add: u32,
}
const _: () = assert!(size_of::<ProductParams>() == 152);
// SAFETY: repr(C) without hidden padding; ProductParams of kernels/gemv.cu.
unsafe impl Params for ProductParams {}

/// The kernel for `rows` rows and the rows that a block of it has. A quantized codec without quantized activations meets
/// f32 ones; with them, one kernel has all of 2 to 8 rows.
fn choose(codec: Codec, q: Ptr, exact: bool, rows: usize) -> (usize, usize) {
    match rows {
        // Dense codecs meet f32 activations anyway.
        _ if !codec.is_dense() && (exact || q.is_null()) => (4, 4),
        1 => (0, 1),
        _ if !codec.is_dense() => (3, 8),
        2 => (1, 2),
        3..=4 => (2, 4),
        _ => (3, 8),
    }
}

/// Puts a product on the stream.
pub fn product(gpu: &Gpu, p: &Product) -> Result<()> {
    if p.rows > ROWS_MAX && !p.exact {
        return gemm::product(gpu, p);
    }
    let codec = p.w.codec();
    let (kernel, rows) = choose(codec, p.x.q, p.exact, p.rows);
    let group = quantize::GROUP_BYTES;
    let q_row = if p.q_step == 0 { p.w.cols as usize / GROUP } else { p.heads * p.q_step / group };
    let params = ProductParams {
        w: p.w,
        x: p.x.f32,
        q: p.x.q,
        y: p.y,
        w_step: p.w_step,
        x_step: p.x_step as u64,
        q_step: (p.q_step / group) as u64,
        y_step: p.y_step as u64,
        x_row: p.x.f32_stride as u64,
        q_row: q_row as u64,
        y_row: p.y_stride as u64,
        rows: p.rows as u32,
        add: u32::from(p.add),
    };
    let tiles = tiles(p.w.rows as usize);
    // By the shape and the GPU alone, so that the order of a row's sum is the same in every batch.
    let wide = kernel < 4 && tiles * p.heads <= 2 * gpu.device.multiprocessors as usize;
    let (names, warps) = match wide {
        false => (["gemv_r1", "gemv_r2", "gemv_r4", "gemv_r8", "gemv_exact"], 4),
        true => (["gemv_w1", "gemv_w2", "gemv_w4", "gemv_w8", ""], if codec.is_dense() { 16 } else { 8 }),
    };
    let name = names[kernel];
    // few.cuh: 8 warps whatever the shape, and two tiles a block unless tiles are few.
    let (threads, each) = match kernel == 3 && !codec.is_dense() {
        true => (256, if wide { 1 } else { 2 }),
        false => (32 * warps, 1),
    };
    let blocks = [tiles.div_ceil(each) as u32, p.heads as u32, p.rows.div_ceil(rows) as u32];
    gpu.launch(unit("gemv", codec), name, Grid { blocks, threads, shared_bytes: 0 }, &params)
}

/// `act = silu(gate x) * (up x)`.
#[derive(Debug, Clone, Copy)]
pub struct Swiglu {
    /// `(width, hidden)`
    pub gate: MatrixParams,
    /// `(width, hidden)`
    pub up: MatrixParams,
    /// Activations.
    pub x: Acts,
    /// Rows.
    pub rows: usize,
    /// `(rows, width)` f32
    pub act: Ptr,
    /// The same quantized, if not null; `width` is then in whole groups.
    pub act_q: Ptr,
    /// f32 activations and sums throughout.
    pub exact: bool,
    /// Working memory, of [`swiglu_scratch_bytes`].
    pub scratch: Ptr,
    /// Its size.
    pub scratch_bytes: usize,
}

/// Working memory of a [`Swiglu`] of matrices `(width, hidden)`, whatever their codecs.
pub fn swiglu_scratch_bytes(rows: usize, width: usize, hidden: usize) -> usize {
    scratch_bytes(rows, hidden, 1) + (rows * width * 4).next_multiple_of(256)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SwigluParams {
    gate: MatrixParams,
    up: MatrixParams,
    x: Ptr,
    q: Ptr,
    act: Ptr,
    act_q: Ptr,
    x_row: u64,
    q_row: u64,
    rows: u32,
    pad: u32,
}
const _: () = assert!(size_of::<SwigluParams>() == 184);
// SAFETY: repr(C) without hidden padding; SwigluParams of kernels/gemv.cu.
unsafe impl Params for SwigluParams {}

/// Puts a SwiGLU's first half on the stream.
pub fn swiglu(gpu: &Gpu, s: &Swiglu) -> Result<()> {
    assert!(s.gate.rows == s.up.rows && s.gate.cols == s.up.cols);
    let (codec, width) = (s.gate.codec(), s.gate.rows as usize);
    if codec != s.up.codec() {
        return swiglu_apart(gpu, s);
    }
    if s.rows > ROWS_MAX && !s.exact {
        gemm::swiglu(gpu, s)?;
        return quantized_copy(gpu, s);
    }
    let (kernel, rows) = choose(codec, s.x.q, s.exact, s.rows);
    let params = SwigluParams {
        gate: s.gate,
        up: s.up,
        x: s.x.f32,
        q: s.x.q,
        act: s.act,
        act_q: s.act_q,
        x_row: s.x.f32_stride as u64,
        q_row: (s.gate.cols as usize / GROUP) as u64,
        rows: s.rows as u32,
        pad: 0,
    };
    let blocks = [width.div_ceil(32) as u32, s.rows.div_ceil(rows) as u32, 1];
    let name = ["swiglu_r1", "swiglu_r2", "swiglu_r4", "swiglu_r8", "swiglu_exact"][kernel];
    gpu.launch(unit("gemv", codec), name, Grid { blocks, threads: 256, shared_bytes: 0 }, &params)
}

/// Two products and an elementwise kernel, for a gate and an up of different codecs.
fn swiglu_apart(gpu: &Gpu, s: &Swiglu) -> Result<()> {
    let width = s.gate.rows as usize;
    let up_bytes = (s.rows * width * 4).next_multiple_of(256);
    assert!(s.scratch_bytes >= up_bytes);
    let room = (s.scratch.at(up_bytes as u64), s.scratch_bytes - up_bytes);
    let one =
        |w: MatrixParams, y: Ptr| Product { exact: s.exact, ..Product::of(w, s.x, s.rows, (y, width), room) };
    product(gpu, &one(s.gate, s.act))?;
    product(gpu, &one(s.up, s.scratch))?;
    quantize::silu_products(gpu, s.act, s.scratch, s.act, s.rows * width)?;
    quantized_copy(gpu, s)
}

fn quantized_copy(gpu: &Gpu, s: &Swiglu) -> Result<()> {
    if s.act_q.is_null() {
        return Ok(());
    }
    let width = s.gate.rows as usize;
    quantize::rows(gpu, s.act, width, s.rows, width, s.act_q)
}

#[cfg(test)]
#[path = "matrix_tests.rs"]
mod tests;
