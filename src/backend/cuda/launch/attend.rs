//! Attention over pages of rows that each stand for themselves: decode, and without [`Attend::parts`] any rows at all.
//! `kernels/latent.cu` has tensor cores and the widths of published latent models, `kernels/attend.cu` does the rest;
//! `kernels/merge.cu` adds up the parts of split rows.

use crate::backend::cuda::params::{MaskParams, Params, RowMap};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::backend::{KV_GROUP, KvType};
use crate::units::{Error, Result};

/// Threads of a block, as in the kernel.
const THREADS: u32 = 128;
/// Most segments of a row, as in the kernels.
const SEGMENTS_MAX: usize = 64;
/// Most shared memory of a block, static and dynamic: what every target of ours has.
pub const SHARED_BYTES_MAX: u32 = 101_376;
/// Shared memory that needs no asking.
const SHARED_BYTES_FREE: u32 = 48 << 10;
/// Cached rows of a page.
const PAGE: u32 = crate::kv::PAGE_TOKENS as u32;

/// What a layer's rows see, and where it lies in their pages.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Positions and block tables of the rows.
    pub rows: RowMap,
    /// Bytes of a page before the layer's part.
    pub layer_offset: u64,
    /// The layer's mask.
    pub mask: MaskParams,
    /// Element type of the cache.
    pub kv: KvType,
}

/// Heads and widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key heads; 1 for absorbed latent attention.
    pub kv_heads: usize,
    /// Width of a query.
    pub d: usize,
    /// Width of a value.
    pub dv: usize,
    /// Values are the first `dv` elements of the keys: absorbed latent attention.
    pub latent: bool,
}

impl Heads {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// An error if the kernel has no room for these widths.
    pub fn check(&self, kv: KvType) -> Result<()> {
        if self.dv > 4 * THREADS as usize || self.shared_bytes(1, kv) > SHARED_BYTES_MAX {
            let expected =
                "keys and values whose page fits into 100 KB of shared memory, values up to 512 wide";
            let found = format!("{} and {}", self.d, self.dv);
            return Err(Error::bad("CUDA", "attention widths", expected, found));
        }
        Ok(())
    }

    /// Shared memory of a block of `n` query heads: queries, a page of keys and one of values, and what is declared in the
    /// kernel: scores and sums.
    fn shared_bytes(&self, n: u32, kv: KvType) -> u32 {
        n * (PAGE * 4 + 12) + 16 + self.dynamic_bytes(n, kv)
    }

    /// The queries and the tiles of `kernels/tile.cuh` and `tile_coded.cuh`.
    fn dynamic_bytes(&self, n: u32, kv: KvType) -> u32 {
        let chunked = |bytes: usize| bytes.next_multiple_of(64);
        let stride = |bytes: usize| chunked(bytes) + if chunked(bytes).is_multiple_of(128) { 64 } else { 0 };
        let (query, keys, values) = match kv {
            KvType::F32 | KvType::F16 => {
                let b = kv.bytes();
                (chunked(self.d * b) / b, stride(self.d * b), stride(self.dv * b))
            }
            KvType::Int8 => {
                let tail = if self.latent { self.d - self.dv } else { 0 };
                let coded = |width: usize| stride(width) + 2 * width.div_ceil(KV_GROUP);
                let of_tail = if tail > 0 { stride(2 * tail) } else { 0 };
                let query = chunked(self.d - tail) + chunked(2 * tail) / 2;
                (query, coded(self.d - tail) + of_tail, coded(self.dv))
            }
        };
        let values = if self.latent { 0 } else { values };
        n * query as u32 * 4 + PAGE * (keys + values) as u32
    }

    /// Query heads of a block: all that share a key head if they are few; few of them when a step has few rows, so that
    /// more multiprocessors have work. A head's result does not depend on it.
    fn per_block(&self, rows: usize, kv: KvType) -> u32 {
        let most = if rows <= 4 { 4 } else { 8 };
        let mut n = self.group().next_power_of_two().min(most) as u32;
        while n > 1 && self.shared_bytes(n, kv) > SHARED_BYTES_MAX {
            n /= 2;
        }
        n
    }
}

/// Device memory for the parts of split rows.
#[derive(Debug, Clone, Copy)]
pub struct Parts {
    /// [`Parts::bytes`] of it.
    pub at: Ptr,
    /// Rows that it has room for.
    pub rows: usize,
}

impl Parts {
    /// Bytes that `rows` rows need.
    pub fn bytes(h: &Heads, rows: usize) -> usize {
        rows * h.heads * SEGMENTS_MAX * (2 + h.dv) * 4
    }
}

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Attend {
    /// The rows.
    pub seen: Seen,
    /// Heads and widths.
    pub heads: Heads,
    /// Rows.
    pub n: usize,
    /// `(n, heads, d)` f32.
    pub q: Ptr,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// `(heads)` f32: a logit that has no value; null without.
    pub sinks: Ptr,
    /// `(n, heads, dv)` f32.
    pub out: Ptr,
    /// The quantized form of the same, or null; then `dv` is in whole groups.
    pub out_q: Ptr,
    /// Room for the parts of rows that are split; without, a block goes through all pages of its row.
    pub parts: Option<Parts>,
    /// Block table entries of the longest row, or more: how many blocks are worth starting, and whether any row may be
    /// split. No result depends on it.
    pub entries: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct AttendParams {
    rows: RowMap,
    layer_offset: u64,
    q: Ptr,
    out: Ptr,
    out_q: Ptr,
    sinks: Ptr,
    parts: Ptr,
    part_sums: Ptr,
    mask: MaskParams,
    scale: f32,
    heads: u32,
    kv_heads: u32,
    d: u32,
    dv: u32,
    latent: u32,
    segments: u32,
    pages_min: u32,
}
const _: () = assert!(size_of::<AttendParams>() == 128);
// SAFETY: repr(C) without padding; AttendParams of kernels/decode.cuh.
unsafe impl Params for AttendParams {}

/// Adds up parts.
pub const MERGE: Unit = Unit::of("merge");
/// Tensor cores for latents of 512 and rope keys of 64: f16, int8.
const LATENT: Unit = Unit::of("latent");
const LATENT_CODED: Unit = Unit { file: "latent", variant: "KV=KV_I8" };
/// Query heads of a block of it, its threads, and its shared memory (`Room`).
const LATENT_HEADS: usize = 16;
const LATENT_THREADS: u32 = 256;
const LATENT_SHARED_BYTES: u32 =
    2 * PAGE * (576 + 8) * 2 + 4 * 16 * PAGE * 4 + 16 * (PAGE + 8) * 2 + 3 * 16 * 4;

/// The module that has a kernel for these widths.
pub fn unit(heads: &Heads, kv: KvType) -> Unit {
    match kv {
        KvType::F16 if heads.latent && (heads.d, heads.dv) == (576, 512) => LATENT,
        KvType::Int8 if heads.latent && (heads.d, heads.dv) == (576, 512) => LATENT_CODED,
        _ => plain(heads, kv),
    }
}

/// The module without tensor cores, which takes any widths.
pub fn plain(heads: &Heads, kv: KvType) -> Unit {
    let columns = heads.dv.div_ceil(THREADS as usize).next_power_of_two();
    let variant = match (kv, columns) {
        (KvType::F16, 1) => "ATTEND=161",
        (KvType::F16, 2) => "ATTEND=162",
        (KvType::F16, _) => "ATTEND=164",
        (KvType::F32, 1) => "ATTEND=321",
        (KvType::F32, 2) => "ATTEND=322",
        (KvType::F32, _) => "ATTEND=324",
        (KvType::Int8, 1) => "ATTEND=81",
        (KvType::Int8, 2) => "ATTEND=82",
        (KvType::Int8, _) => "ATTEND=84",
    };
    Unit { file: "attend", variant }
}

/// Fewest pages of a segment: what a block goes through in the time that a merge takes.
fn pages_min(h: &Heads, unit: Unit) -> usize {
    match (unit.file == LATENT.file, h.latent) {
        (true, _) => 4,
        // Wide pages and no tensor cores: one is work enough.
        (false, true) => 1,
        (false, false) => 2,
    }
}

fn params(a: &Attend, unit: Unit) -> AttendParams {
    let h = &a.heads;
    let (mut sums, mut parts) = (Ptr::NULL, Ptr::NULL);
    if let Some(p) = a.parts {
        assert!(a.n <= p.rows, "{} rows in room for {}", a.n, p.rows);
        sums = p.at;
        parts = sums.f32s(p.rows * h.heads * SEGMENTS_MAX * 2);
    }
    AttendParams {
        rows: a.seen.rows,
        layer_offset: a.seen.layer_offset,
        q: a.q,
        out: a.out,
        out_q: a.out_q,
        sinks: a.sinks,
        parts,
        part_sums: sums,
        mask: a.seen.mask,
        scale: a.scale,
        heads: h.heads as u32,
        kv_heads: h.kv_heads as u32,
        d: h.d as u32,
        dv: h.dv as u32,
        latent: h.latent.into(),
        segments: if a.parts.is_some() { SEGMENTS_MAX as u32 } else { 0 },
        pages_min: pages_min(h, unit) as u32,
    }
}

/// The module that does it. A block of the tensor cores' kernel takes twice as long as one without, for sixteen heads at once:
/// while one wave of small blocks does it all, they are sooner done.
pub(super) fn chosen(gpu: &Gpu, a: &Attend) -> Unit {
    let (h, unit) = (&a.heads, unit(&a.heads, a.seen.kv));
    let small = a.entries * h.heads.div_ceil(4) * a.n <= gpu.device.multiprocessors as usize;
    if unit.file == LATENT.file && small && a.parts.is_some() { plain(h, a.seen.kv) } else { unit }
}

/// Attends from `n` rows.
pub fn attend(gpu: &Gpu, a: &Attend) -> Result<()> {
    let (h, kv) = (&a.heads, a.seen.kv);
    let unit = chosen(gpu, a);
    assert!(a.out_q.is_null() || h.dv.is_multiple_of(crate::format::layout::GROUP));
    let params = params(a, unit);
    let each = pages_min(h, unit);
    let segments = if a.parts.is_some() { a.entries.div_ceil(each).clamp(1, SEGMENTS_MAX) } else { 1 };
    if unit.file == LATENT.file {
        let blocks = [segments as u32, h.heads.div_ceil(LATENT_HEADS) as u32, a.n as u32];
        let grid = Grid { blocks, threads: LATENT_THREADS, shared_bytes: LATENT_SHARED_BYTES };
        gpu.launch(unit, "latent_decode", grid, &params)?;
    } else {
        h.check(kv)?;
        let n = h.per_block(a.n, kv);
        let blocks_of_heads = h.kv_heads as u32 * (h.group() as u32).div_ceil(n);
        // The driver gives 48 KiB, static memory included, without asking; above, the launch asks for what it needs.
        let (all, mut shared_bytes) = (h.shared_bytes(n, kv), h.dynamic_bytes(n, kv));
        if all > SHARED_BYTES_FREE && shared_bytes <= SHARED_BYTES_FREE {
            shared_bytes = SHARED_BYTES_FREE + 16;
        }
        let blocks = [segments as u32, blocks_of_heads, a.n as u32];
        gpu.launch(unit, &format!("attend_q{n}"), Grid { blocks, threads: THREADS, shared_bytes }, &params)?;
    }
    if segments == 1 {
        return Ok(());
    }
    let blocks = [(h.dv as u32).div_ceil(THREADS), h.heads as u32, a.n as u32];
    gpu.launch(MERGE, "merge_parts", Grid { blocks, threads: THREADS, shared_bytes: 0 }, &params)
}
