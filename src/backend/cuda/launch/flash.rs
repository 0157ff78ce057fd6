//! Attention of a run of consecutive rows on tensor cores, `kernels/flash.cu`: prefill over f16 pages.

use super::attend::Seen;
use crate::backend::KvType;
use crate::backend::cuda::params::{MaskParams, Params, RowMap};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::units::Result;

/// Rows of a block.
const ROWS: usize = 64;
/// Keys of a pass.
const KEYS: u32 = 64;

/// Where keys and values come from.
#[derive(Debug, Clone, Copy)]
pub enum Keys {
    /// Pages hold them, for this many key heads.
    Cached {
        /// Key heads.
        kv_heads: usize,
    },
    /// They were made from latents, for the heads of this launch; the rope key is in pages.
    Made {
        /// `(heads of the launch, tokens, d - rope)` f16.
        keys: Ptr,
        /// `(heads of the launch, tokens, dv)` f16.
        values: Ptr,
        /// Slots of the block table's entries: entry `i`'s slot `s` is token `32 i + s`.
        tokens: usize,
        /// Width of the rope key.
        rope: usize,
        /// Width of the latent before it.
        lora: usize,
    },
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Flash {
    /// The rows: consecutive positions of one sequence. The cache is f16.
    pub seen: Seen,
    /// Rows.
    pub n: usize,
    /// Query heads of the model.
    pub heads: usize,
    /// The first of this launch's heads, and how many.
    pub some_heads: (usize, usize),
    /// Width of a query.
    pub d: usize,
    /// Width of a value.
    pub dv: usize,
    /// `(n, heads, d)` f32.
    pub q: Ptr,
    /// Elements from one row of `q` to the next.
    pub q_stride: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// `(heads)` f32 or null.
    pub sinks: Ptr,
    /// Keys and values.
    pub keys: Keys,
    /// `(n, heads, dv)` f32.
    pub out: Ptr,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct FlashParams {
    rows: RowMap,
    layer_offset: u64,
    q: Ptr,
    out: Ptr,
    sinks: Ptr,
    made_k: Ptr,
    made_v: Ptr,
    mask: MaskParams,
    scale: f32,
    n: u32,
    heads: u32,
    kv_heads: u32,
    d: u32,
    dv: u32,
    rope: u32,
    lora: u32,
    made_tokens: u32,
    first_head: u32,
    q_stride: u32,
    pad: u32,
}
const _: () = assert!(size_of::<FlashParams>() == 136);
// SAFETY: repr(C) without padding; FlashParams of kernels/flash.cu.
unsafe impl Params for FlashParams {}

/// The smallest module with room for these widths; `None` if there is none, or if rows are not in whole 16 bytes, and then
/// [`super::attend`] does it. `parts` are the widths that a key or latent row is made of.
pub fn unit(kv: KvType, d: usize, dv: usize, parts: &[usize]) -> Option<Unit> {
    let whole = parts.iter().chain(&[d, dv]).all(|w| w.is_multiple_of(8));
    let variant = match (d, dv) {
        (..=64, ..=64) => "HEAD=64",
        (..=128, ..=128) => "HEAD=128",
        (..=192, ..=128) => "HEAD=192",
        (..=256, ..=256) => "HEAD=256",
        _ => return None,
    };
    (whole && kv == KvType::F16).then_some(Unit { file: "flash", variant })
}

/// Dynamic shared memory of a module's block.
fn shared_bytes(unit: Unit) -> u32 {
    let (d, dv, stages, queries) = match unit.variant {
        "HEAD=64" => (64, 64, 2, 0),
        "HEAD=128" => (128, 128, 2, 0),
        "HEAD=192" => (192, 128, 2, 0),
        _ => (256, 256, 1, ROWS as u32 * (256 + 8) * 2),
    };
    stages * KEYS * (d + 8 + dv + 8) * 2 + queries
}

/// Attends from a run's rows, all of whose keys are in place.
pub fn flash(gpu: &Gpu, f: &Flash) -> Result<()> {
    let (made_k, made_v, tokens, rope, lora, kv_heads) = match f.keys {
        Keys::Cached { kv_heads } => (Ptr::NULL, Ptr::NULL, 0, 0, 0, kv_heads),
        Keys::Made { keys, values, tokens, rope, lora } => (keys, values, tokens, rope, lora, f.heads),
    };
    let unit =
        unit(f.seen.kv, f.d, f.dv, &[rope, lora, f.q_stride]).expect("the caller asked whether it fits");
    let params = FlashParams {
        rows: f.seen.rows,
        layer_offset: f.seen.layer_offset,
        q: f.q,
        out: f.out,
        sinks: f.sinks,
        made_k,
        made_v,
        mask: f.seen.mask,
        scale: f.scale,
        n: f.n as u32,
        heads: f.heads as u32,
        kv_heads: kv_heads as u32,
        d: f.d as u32,
        dv: f.dv as u32,
        rope: rope as u32,
        lora: lora as u32,
        made_tokens: tokens as u32,
        first_head: f.some_heads.0 as u32,
        q_stride: f.q_stride as u32,
        pad: 0,
    };
    let grid = Grid {
        blocks: [f.n.div_ceil(ROWS) as u32, f.some_heads.1 as u32, 1],
        threads: 128,
        shared_bytes: shared_bytes(unit),
    };
    gpu.launch(unit, "flash", grid, &params)
}
