//! Attention of a run of consecutive rows on tensor cores, `kernels/flash.cu`: prefill over f16 and int8 pages.

use super::attend::Seen;
use crate::backend::KvType;
use crate::backend::cuda::params::{MaskParams, Params, RowMap};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::backend::page::PageLayout;
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
        /// Slots of the part's entries: slot `s` of its entry `i` is token `32 i + s`.
        tokens: usize,
        /// The entries that were made.
        part: Part,
        /// Width of the rope key.
        rope: usize,
        /// Width of the latent that lies with it in pages.
        lora: usize,
    },
}

/// A part of the block table, where keys of the whole do not fit. Parts follow each other from the first entry on; if each
/// but the last has an even number of entries, a full mask's result is that of one launch bit for bit.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// First entry.
    pub first: usize,
    /// Entry after the last.
    pub end: usize,
    /// No part follows.
    pub last: bool,
    /// What rows take from part to part, of [`carry_bytes`]; null if there is one part.
    pub carry: Ptr,
}

impl Part {
    /// All there is.
    pub const WHOLE: Part = Part { first: 0, end: usize::MAX, last: true, carry: Ptr::NULL };
}

/// Bytes that `rows` rows of `heads` heads take from part to part, beside the output itself.
pub fn carry_bytes(rows: usize, heads: usize) -> usize {
    rows * heads * CARRY * 4
}

/// f32s of a row and head, as in the kernel.
const CARRY: usize = 8;

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Flash {
    /// The rows: consecutive positions of one sequence.
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

impl Flash {
    /// All of `n` rows' heads at once, rows one after another, scores as they are, no sinks; `widths` of a query and a value.
    pub fn of(
        seen: Seen,
        n: usize,
        heads: usize,
        widths: (usize, usize),
        q: Ptr,
        keys: Keys,
        out: Ptr,
    ) -> Flash {
        let (d, dv) = widths;
        let (some_heads, q_stride) = ((0, heads), heads * d);
        Flash { seen, n, heads, some_heads, d, dv, q, q_stride, scale: 1.0, sinks: Ptr::NULL, keys, out }
    }
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
    rope_at: u32,
    rope_pitch: u32,
    made_tokens: u32,
    first_head: u32,
    q_stride: u32,
    first_entry: u32,
    end_entry: u32,
    whole: u32,
    pad: u32,
    carry: Ptr,
}
const _: () = assert!(size_of::<FlashParams>() == 160);
// SAFETY: repr(C) without padding; FlashParams of kernels/flash.cu.
unsafe impl Params for FlashParams {}

/// Widths of keys and values that a module has room for, and its variants for f16 and for int8 pages.
const WIDTHS: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];
const VARIANTS: [&str; 4] = ["HEAD=64", "HEAD=128", "HEAD=192", "HEAD=256"];
const CODED_VARIANTS: [&str; 4] = ["CODED_HEAD=64", "CODED_HEAD=128", "CODED_HEAD=192", "CODED_HEAD=256"];

/// The smallest module with room for these widths; `None` if there is none, or if rows are not in whole 8 elements, and then
/// [`super::attend`] does it. `parts` are the widths that a key or latent row is made of; `from_pages`: keys and values are
/// read there, not made.
pub fn unit(kv: KvType, d: usize, dv: usize, parts: &[usize], from_pages: bool) -> Option<Unit> {
    let whole = parts.iter().chain(&[d, dv]).all(|w| w.is_multiple_of(8));
    let width = WIDTHS.iter().position(|w| d <= w.0 && dv <= w.1)?;
    let variant = match kv {
        _ if !whole => return None,
        KvType::F32 => return None,
        KvType::Int8 if from_pages => CODED_VARIANTS[width],
        // Made keys are f16, and so are the rope keys of any page.
        KvType::F16 | KvType::Int8 => VARIANTS[width],
    };
    Some(Unit { file: "flash", variant })
}

/// Dynamic shared memory of a module's block.
fn shared_bytes(unit: Unit) -> u32 {
    let of = |variants: &[&str; 4]| variants.iter().position(|v| *v == unit.variant);
    let width = of(&VARIANTS).or_else(|| of(&CODED_VARIANTS)).expect("a variant of this file");
    let (d, dv) = WIDTHS[width];
    // One stage where two do not fit; then queries have a place of their own.
    let (stages, queries) = if d == 256 { (1, ROWS as u32 * (256 + 8) * 2) } else { (2, 0) };
    stages * KEYS * (d + 8 + dv + 8) as u32 * 2 + queries
}

/// Attends from a run's rows, all of whose keys are in place.
pub fn flash(gpu: &Gpu, f: &Flash) -> Result<()> {
    let (made_k, made_v, tokens, rope, lora, kv_heads, part) = match f.keys {
        Keys::Cached { kv_heads } => (Ptr::NULL, Ptr::NULL, 0, 0, 0, kv_heads, Part::WHOLE),
        Keys::Made { keys, values, tokens, part, rope, lora } => {
            (keys, values, tokens, rope, lora, f.heads, part)
        }
    };
    let unit = unit(f.seen.kv, f.d, f.dv, &[rope, lora, f.q_stride], made_k.is_null())
        .expect("the caller asked whether it fits");
    let (rope_at, rope_pitch) = match f.seen.kv {
        KvType::Int8 => {
            let page = PageLayout { kind: KvType::Int8, heads: 1, key: lora + rope, value: 0, tail: rope };
            (page.coded(0, 0, false)[2].start / 2, rope)
        }
        _ => (lora, lora + rope),
    };
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
        rope_at: rope_at as u32,
        rope_pitch: rope_pitch as u32,
        made_tokens: tokens as u32,
        first_head: f.some_heads.0 as u32,
        q_stride: f.q_stride as u32,
        first_entry: part.first as u32,
        end_entry: part.end.min(u32::MAX as usize) as u32,
        whole: part.last.into(),
        pad: 0,
        carry: part.carry,
    };
    let grid = Grid {
        blocks: [f.n.div_ceil(ROWS) as u32, f.some_heads.1 as u32, 1],
        threads: 128,
        shared_bytes: shared_bytes(unit),
    };
    gpu.launch(unit, "flash", grid, &params)
}
