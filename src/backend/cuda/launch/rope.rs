//! Between the projections and attention, `kernels/rope.cu`: angles, and bias, norms, clip, rope and the append of keys and
//! values (or latents) to pages.

use super::attend::Seen;
use crate::backend::KvType;
use crate::backend::cuda::params::{MaskParams, Params, RowMap};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::model::QkNorm;
use crate::units::Result;

/// Threads of a block.
const THREADS: u32 = 128;

/// The module for a cache's element type.
pub fn unit(kv: KvType) -> Unit {
    let variant = match kv {
        KvType::F32 => "KV=KV_F32",
        KvType::F16 => "KV=KV_F16",
        KvType::Int8 => "KV=KV_I8",
    };
    Unit { file: "rope", variant }
}

/// A step's rotations.
#[derive(Debug, Clone, Copy)]
pub struct Turns {
    /// `(rows, half, 2)` f32: cosine and sine, from [`angles`].
    pub at: Ptr,
    /// Pairs that are turned.
    pub half: usize,
    /// Pairs are neighbours.
    pub interleaved: bool,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct AnglesParams {
    position: Ptr,
    frequency: Ptr,
    turns: Ptr,
    rows: u32,
    half: u32,
    factor: f32,
    pad: u32,
}
const _: () = assert!(size_of::<AnglesParams>() == 40);
// SAFETY: repr(C) without padding; AnglesParams of kernels/rope.cu.
unsafe impl Params for AnglesParams {}

/// Cosines and sines of `rows` positions; `frequency` is `(half)` f32, both are multiplied by `factor`.
pub fn angles(
    gpu: &Gpu,
    kv: KvType,
    rows: usize,
    position: Ptr,
    frequency: Ptr,
    factor: f32,
    to: Turns,
) -> Result<()> {
    let (rows, half) = (rows as u32, to.half as u32);
    let params = AnglesParams { position, frequency, turns: to.at, rows, half, factor, pad: 0 };
    let grid = Grid { blocks: [(rows * half).div_ceil(THREADS), 1, 1], threads: THREADS, shared_bytes: 0 };
    gpu.launch(unit(kv), "rope_angles", grid, &params)
}

/// Grouped-query attention's queries, keys and values of some rows.
#[derive(Debug, Clone, Copy)]
pub struct GqaAppend {
    /// Where the rows go.
    pub seen: Seen,
    /// Rows.
    pub n: usize,
    /// `(n, heads, d)` f32, changed in place; elements a row.
    pub q: (Ptr, usize),
    /// `(n, kv_heads, d)` f32; elements a row.
    pub k: (Ptr, usize),
    /// As `k`.
    pub v: (Ptr, usize),
    /// Biases of q, k and v: f32 or null.
    pub bias: [Ptr; 3],
    /// What is normalized, and the weights of queries and keys.
    pub norm: (QkNorm, [Ptr; 2]),
    /// The norm's epsilon.
    pub eps: f32,
    /// Clamp.
    pub clip: Option<f32>,
    /// Rotations.
    pub turns: Turns,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub d: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct GqaAppendParams {
    rows: RowMap,
    layer_offset: u64,
    x: [Ptr; 3],
    bias: [Ptr; 3],
    norms: [Ptr; 2],
    turns: Ptr,
    mask: MaskParams,
    strides: [u32; 3],
    heads: u32,
    kv_heads: u32,
    d: u32,
    half: u32,
    interleaved: u32,
    norm: u32,
    eps: f32,
    clip: f32,
    pad: u32,
}
const _: () = assert!(size_of::<GqaAppendParams>() == 168);
// SAFETY: repr(C) without padding; GqaAppendParams of kernels/rope.cu.
unsafe impl Params for GqaAppendParams {}

/// Prepares queries in place and appends keys and values.
pub fn gqa_append(gpu: &Gpu, a: &GqaAppend) -> Result<()> {
    let norm = match a.norm.0 {
        QkNorm::None => 0,
        QkNorm::Head => 1,
        QkNorm::Row => 2,
    };
    let params = GqaAppendParams {
        rows: a.seen.rows,
        layer_offset: a.seen.layer_offset,
        x: [a.q.0, a.k.0, a.v.0],
        bias: a.bias,
        norms: a.norm.1,
        turns: a.turns.at,
        mask: a.seen.mask,
        strides: [a.q.1 as u32, a.k.1 as u32, a.v.1 as u32],
        heads: a.heads as u32,
        kv_heads: a.kv_heads as u32,
        d: a.d as u32,
        half: a.turns.half as u32,
        interleaved: a.turns.interleaved.into(),
        norm,
        eps: a.eps,
        clip: a.clip.unwrap_or(f32::INFINITY),
        pad: 0,
    };
    let units = if a.norm.0 == QkNorm::Row { 3 } else { a.heads + 2 * a.kv_heads };
    let grid = Grid { blocks: [units as u32, a.n as u32, 1], threads: THREADS, shared_bytes: a.d as u32 * 4 };
    gpu.launch(unit(a.seen.kv), "gqa_append", grid, &params)
}

/// Latent attention's queries, latent and rope key of some rows.
#[derive(Debug, Clone, Copy)]
pub struct MlaAppend {
    /// Where the rows go.
    pub seen: Seen,
    /// Rows.
    pub n: usize,
    /// `(n, heads, nope + rope)` f32, changed in place; elements a row.
    pub q: (Ptr, usize),
    /// `(n, lora + rope)` f32; elements a row.
    pub kv: (Ptr, usize),
    /// Biases of q and kv: f32 or null.
    pub bias: [Ptr; 2],
    /// The latent norm's weight, `(lora)` f32.
    pub norm: Ptr,
    /// The norm's epsilon.
    pub eps: f32,
    /// Rotations.
    pub turns: Turns,
    /// Query heads.
    pub heads: usize,
    /// Width of the latent.
    pub lora: usize,
    /// Width of a query's part without position.
    pub nope: usize,
    /// Width of the rope key.
    pub rope: usize,
    /// `(n, heads, lora + rope)` f32 of which the rope parts are written, for absorbed rows; or null.
    pub q_latent: Ptr,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct MlaAppendParams {
    rows: RowMap,
    layer_offset: u64,
    q: Ptr,
    kv: Ptr,
    bias: [Ptr; 2],
    norm: Ptr,
    turns: Ptr,
    q_latent: Ptr,
    mask: MaskParams,
    q_stride: u32,
    kv_stride: u32,
    heads: u32,
    lora: u32,
    nope: u32,
    rope: u32,
    half: u32,
    interleaved: u32,
    eps: f32,
    pad: u32,
}
const _: () = assert!(size_of::<MlaAppendParams>() == 144);
// SAFETY: repr(C) without padding; MlaAppendParams of kernels/rope.cu.
unsafe impl Params for MlaAppendParams {}

/// Prepares queries in place and appends latents and rope keys.
pub fn mla_append(gpu: &Gpu, a: &MlaAppend) -> Result<()> {
    let params = MlaAppendParams {
        rows: a.seen.rows,
        layer_offset: a.seen.layer_offset,
        q: a.q.0,
        kv: a.kv.0,
        bias: a.bias,
        norm: a.norm,
        turns: a.turns.at,
        q_latent: a.q_latent,
        mask: a.seen.mask,
        q_stride: a.q.1 as u32,
        kv_stride: a.kv.1 as u32,
        heads: a.heads as u32,
        lora: a.lora as u32,
        nope: a.nope as u32,
        rope: a.rope as u32,
        half: a.turns.half as u32,
        interleaved: a.turns.interleaved.into(),
        eps: a.eps,
        pad: 0,
    };
    let grid = Grid {
        blocks: [a.heads as u32 + 1, a.n as u32, 1],
        threads: THREADS,
        shared_bytes: (a.lora + a.rope) as u32 * 4,
    };
    gpu.launch(unit(a.seen.kv), "mla_append", grid, &params)
}
