//! What a prefill of latent attention needs before [`super::flash`], `kernels/mla.cu`: latents from pages as f32 rows, and
//! the keys and values made from them as f16.

use super::attend::Seen;
use crate::backend::KvType;
use crate::backend::cuda::params::{Params, RowMap};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::units::Result;
use std::ops::Range;

/// The module.
pub const UNIT: Unit = Unit::of("mla");

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct LatentsParams {
    rows: RowMap,
    layer_offset: u64,
    y: Ptr,
    lora: u32,
    rope: u32,
    first: u32,
    pad: u32,
}
const _: () = assert!(size_of::<LatentsParams>() == 56);
// SAFETY: repr(C) without padding; LatentsParams of kernels/mla.cu.
unsafe impl Params for LatentsParams {}

/// Latents of some entries of the first row's block table, `(entries * 32, lora)` f32. Rows that hold no
/// position yet are whatever lies there; [`super::flash`] does not read them.
pub fn latents(
    gpu: &Gpu,
    seen: &Seen,
    entries: Range<usize>,
    lora: usize,
    rope: usize,
    to: Ptr,
) -> Result<()> {
    let name = match seen.kv {
        KvType::F16 => "mla_latents",
        KvType::Int8 => "mla_latents_coded",
        KvType::F32 => unreachable!("exact runs stay absorbed"),
    };
    let params = LatentsParams {
        rows: seen.rows,
        layer_offset: seen.layer_offset,
        y: to,
        lora: lora as u32,
        rope: rope as u32,
        first: entries.start as u32,
        pad: 0,
    };
    gpu.launch(
        UNIT,
        name,
        Grid { blocks: [entries.len() as u32, 1, 1], threads: 256, shared_bytes: 0 },
        &params,
    )
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct HalvesParams {
    x: Ptr,
    y: Ptr,
    n: u64,
}
const _: () = assert!(size_of::<HalvesParams>() == 24);
// SAFETY: repr(C) without padding; HalvesParams of kernels/mla.cu.
unsafe impl Params for HalvesParams {}

/// `n` f32s at `x` as f16 at `y`; `n` is a multiple of 8.
pub fn halves(gpu: &Gpu, n: usize, x: Ptr, y: Ptr) -> Result<()> {
    assert!(n.is_multiple_of(8));
    let blocks = [n.div_ceil(256 * 8) as u32, 1, 1];
    gpu.launch(
        UNIT,
        "mla_halves",
        Grid { blocks, threads: 256, shared_bytes: 0 },
        &HalvesParams { x, y, n: n as u64 },
    )
}
