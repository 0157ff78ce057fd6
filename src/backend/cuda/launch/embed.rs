//! Embedding rows.

use crate::backend::cuda::launch::gemv::unit;
use crate::backend::cuda::params::{MatrixParams, Params};
use crate::backend::cuda::{Gpu, Grid, Ptr};
use crate::units::Result;

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedParams {
    w: MatrixParams,
    tokens: Ptr,
    y: Ptr,
}
const _: () = assert!(size_of::<EmbedParams>() == 80);
// SAFETY: repr(C) without hidden padding; EmbedParams of kernels/embed.cu.
unsafe impl Params for EmbedParams {}

/// `y[i] = embed[tokens[i]]` for `rows` tokens (u32, each below the matrix's rows); `y` is `(rows, cols)` f32. Bit for
/// bit what the CPU gives.
pub fn rows(gpu: &Gpu, embed: &MatrixParams, tokens: Ptr, rows: usize, y: Ptr) -> Result<()> {
    let threads = if embed.codec().is_dense() { embed.cols } else { embed.cols / 8 };
    let grid = Grid { blocks: [threads.div_ceil(128), rows as u32, 1], threads: 128, shared_bytes: 0 };
    gpu.launch(unit("embed", embed.codec()), "embed_rows", grid, &EmbedParams { w: *embed, tokens, y })
}
