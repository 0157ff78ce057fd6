//! The largest logits of each row on the device, `kernels/sample.cu`.

use crate::backend::cuda::params::Params;
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::units::Result;

/// The module.
pub const UNIT: Unit = Unit::of("sample");
/// Logits of a block.
const SLICE: usize = 4096;
/// Most logits that may be asked for.
pub const TOP_MAX: usize = 64;

/// One of a row's largest logits.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Found {
    /// The logit.
    pub value: f32,
    /// The token; `u32::MAX` where fewer than k are allowed and above -infinity.
    pub index: u32,
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Top {
    /// `(rows, vocab)` f32.
    pub logits: Ptr,
    /// Rows.
    pub rows: usize,
    /// Width of a row.
    pub vocab: usize,
    /// `(rows, ceil(vocab / 32))` u32: set bits are allowed; or null.
    pub mask: Ptr,
    /// How many a row: 1 to [`TOP_MAX`].
    pub k: usize,
    /// `(rows, k)` [`Found`], the largest first; ties: the lower index first.
    pub found: Ptr,
    /// [`scratch_bytes`]; its first `4 * rows` bytes are zero before the first launch and after each.
    pub scratch: Ptr,
}

/// Bytes that a launch works in.
pub fn scratch_bytes(rows: usize, vocab: usize, k: usize) -> usize {
    (rows * 4).next_multiple_of(256) + rows * vocab.div_ceil(SLICE) * k * size_of::<Found>()
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct TopParams {
    logits: Ptr,
    mask: Ptr,
    found: Ptr,
    parts: Ptr,
    done: Ptr,
    vocab: u32,
    k: u32,
}
const _: () = assert!(size_of::<TopParams>() == 48);
// SAFETY: repr(C) without padding; TopParams of kernels/sample.cu.
unsafe impl Params for TopParams {}

/// The `k` largest logits of each row.
pub fn largest(gpu: &Gpu, a: &Top) -> Result<()> {
    assert!((1..=TOP_MAX).contains(&a.k));
    let params = TopParams {
        logits: a.logits,
        mask: a.mask,
        found: a.found,
        parts: a.scratch.at((a.rows * 4).next_multiple_of(256) as u64),
        done: a.scratch,
        vocab: a.vocab as u32,
        k: a.k as u32,
    };
    let blocks = [a.vocab.div_ceil(SLICE) as u32, a.rows as u32, 1];
    gpu.launch(UNIT, "top_k", Grid { blocks, threads: 256, shared_bytes: 0 }, &params)
}
