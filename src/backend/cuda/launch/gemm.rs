//! Matrix products of many rows, on the tensor cores.

use super::gemv::{Product, Swiglu, unit};
use super::quantize::{self, Halves, Source};
use crate::backend::cuda::params::{MatrixParams, Params};
use crate::backend::cuda::{Gpu, Grid, Ptr};
use crate::format::Codec;
use crate::format::layout::{GROUP, TILE_ROWS, tiles};
use crate::units::Result;

/// Activation rows of a block, and the ending of the kernels' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRows(usize);

impl BlockRows {
    /// For `rows` activation rows and a matrix of `tiles`. Blocks of 64 rows unpack a weight least often, but are few; the
    /// others make up for short latency what they unpack twice. The choice is by shape alone, never by the GPU.
    pub fn of(rows: usize, tiles: usize) -> BlockRows {
        let blocks = rows.div_ceil(64) * tiles.div_ceil(8);
        BlockRows(if rows <= 16 || blocks < 128 { 16 } else { 64 })
    }

    /// For experts that have `rows` each on average.
    pub fn of_experts(rows: usize) -> BlockRows {
        BlockRows(if rows <= 24 { 16 } else { 64 })
    }

    /// Rows.
    pub fn rows(self) -> usize {
        self.0
    }

    /// Of two names that end in n16 and n64.
    fn name(self, names: [&'static str; 2]) -> &'static str {
        names[usize::from(self.0 == 64)]
    }

    /// Tiles of a block (`block_tiles` of `kernels/gemm.cuh`).
    fn tiles(self) -> u32 {
        if self.0 == 64 { 8 } else { 2 }
    }

    /// Shared memory of a block, as `gemm` of `kernels/gemm.cuh` cuts it: four stages of 64 rows of activations (16 for
    /// each of four warps when they split the columns), and of dense weights two tiles for each of four warps.
    fn shared_bytes(self, codec: Codec) -> u32 {
        let dense = if codec.is_dense() { GROUP * TILE_ROWS * codec.info().block_bytes } else { 0 };
        (4 * (64 * 64 + 8 * dense)) as u32
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GemmParams {
    w: MatrixParams,
    x: Ptr,
    factor: Ptr,
    y: Ptr,
    w_step: u64,
    x_step: u64,
    factor_step: u64,
    y_step: u64,
    y_row: u64,
    pitch: u32,
    rows: u32,
    add: u32,
    pad: u32,
}
const _: () = assert!(size_of::<GemmParams>() == 144);
// SAFETY: repr(C) without hidden padding; GemmParams of kernels/gemm.cu.
unsafe impl Params for GemmParams {}

/// Puts a product on the stream.
pub(super) fn product(gpu: &Gpu, p: &Product) -> Result<()> {
    let cols = p.w.cols as usize;
    let heads = if p.x_step == 0 { 1 } else { p.heads };
    assert!(
        p.scratch_bytes >= Halves::bytes(p.rows * heads, cols, Halves::terms(p.w.codec())),
        "scratch is short"
    );
    let from = Source {
        x: p.x.f32,
        rows: p.rows,
        heads,
        cols,
        step: p.x_step,
        row: p.x.f32_stride,
        against: p.w.codec(),
    };
    let (x, _) = quantize::halves(gpu, &from, p.scratch)?;
    let shared = if heads == 1 { 0 } else { p.rows };
    let params = GemmParams {
        w: p.w,
        x: x.x,
        factor: x.factor,
        y: p.y,
        w_step: p.w_step,
        x_step: (shared * x.pitch) as u64,
        factor_step: shared as u64,
        y_step: p.y_step as u64,
        y_row: p.y_stride as u64,
        pitch: x.pitch as u32,
        rows: p.rows as u32,
        add: u32::from(p.add),
        pad: 0,
    };
    let tiles = tiles(p.w.rows as usize);
    let block = BlockRows::of(p.rows, tiles * p.heads);
    let blocks =
        [(tiles as u32).div_ceil(block.tiles()), p.rows.div_ceil(block.rows()) as u32, p.heads as u32];
    let grid = Grid { blocks, threads: 128, shared_bytes: block.shared_bytes(p.w.codec()) };
    gpu.launch(unit("gemm", p.w.codec()), block.name(["gemm_n16", "gemm_n64"]), grid, &params)
}

/// What the grouped kernels take.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GroupedParams {
    pub a: MatrixParams,
    pub b: MatrixParams,
    pub table: Ptr,
    pub starts: Ptr,
    pub blocks: Ptr,
    pub gather: Ptr,
    pub x: Ptr,
    pub factor: Ptr,
    pub y: Ptr,
    pub y_row: u64,
    pub pitch: u32,
    pub rows: u32,
    pub first_tile: u32,
    pub end_tile: u32,
    pub first_expert: u32,
    pub end_expert: u32,
}
const _: () = assert!(size_of::<GroupedParams>() == 216);
// SAFETY: repr(C) without hidden padding; GroupedParams of kernels/gemm.cu.
unsafe impl Params for GroupedParams {}

/// Launches gate and up over `n_blocks` blocks of rows or slots.
pub(super) fn gate_up(gpu: &Gpu, p: &GroupedParams, block: BlockRows, n_blocks: usize) -> Result<()> {
    let blocks = [(p.end_tile - p.first_tile).div_ceil(block.tiles() / 2), n_blocks as u32, 1];
    let grid = Grid { blocks, threads: 128, shared_bytes: block.shared_bytes(p.a.codec()) };
    gpu.launch(unit("gemm", p.a.codec()), block.name(["gate_up_n16", "gate_up_n64"]), grid, p)
}

/// Launches down over `n_blocks` blocks of slots, for the tiles that the parameters name.
pub(super) fn down(gpu: &Gpu, p: &GroupedParams, block: BlockRows, n_blocks: usize) -> Result<()> {
    let blocks = [(p.end_tile - p.first_tile).div_ceil(block.tiles()), n_blocks as u32, 1];
    let grid = Grid { blocks, threads: 128, shared_bytes: block.shared_bytes(p.a.codec()) };
    gpu.launch(unit("gemm", p.a.codec()), block.name(["down_n16", "down_n64"]), grid, p)
}

/// A dense SwiGLU's first half, f32 results.
pub(super) fn swiglu(gpu: &Gpu, s: &Swiglu) -> Result<()> {
    let (width, cols) = (s.gate.rows as usize, s.gate.cols as usize);
    assert!(
        s.scratch_bytes >= Halves::bytes(s.rows, cols, Halves::terms(s.gate.codec())),
        "scratch is short"
    );
    let from = Source {
        x: s.x.f32,
        rows: s.rows,
        heads: 1,
        cols,
        step: 0,
        row: s.x.f32_stride,
        against: s.gate.codec(),
    };
    let (x, _) = quantize::halves(gpu, &from, s.scratch)?;
    let params = GroupedParams {
        a: s.gate,
        b: s.up,
        table: Ptr::NULL,
        starts: Ptr::NULL,
        blocks: Ptr::NULL,
        gather: Ptr::NULL,
        x: x.x,
        factor: x.factor,
        y: s.act,
        y_row: width as u64,
        pitch: x.pitch as u32,
        rows: s.rows as u32,
        first_tile: 0,
        end_tile: tiles(width) as u32,
        first_expert: 0,
        end_expert: 0,
    };
    let block = BlockRows::of(s.rows, 2 * tiles(width));
    gate_up(gpu, &params, block, s.rows.div_ceil(block.rows()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::codec::TABLE;

    #[test]
    fn blocks_fit_orins_shared_memory() {
        for info in &TABLE {
            for rows in [16, 64] {
                assert!(BlockRows(rows).shared_bytes(info.codec) <= 101_376, "{}", info.name);
            }
        }
    }
}
