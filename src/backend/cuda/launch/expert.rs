//! Routed experts: picks grouped, gate and up, down with the weighted sum.

use super::gemm::{self, BlockRows, GroupedParams};
use super::gemv::{Acts, ROWS_MAX, unit};
use super::quantize::{self, Halves, Source};
use crate::backend::cuda::params::{MatrixParams, Params, PickParams};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::format::layout::{GROUP, TILE_ROWS, tiles};
use crate::units::{Error, Result};

const UNIT: Unit = Unit::of("group");

/// A layer's routed experts.
#[derive(Debug, Clone, Copy)]
pub struct Experts {
    /// Device addresses `(n_experts, 3)`: gate, up, down of each.
    pub table: Ptr,
    /// `(width, hidden)`; its base is unused, as in the others.
    pub gate: MatrixParams,
    /// `(width, hidden)`
    pub up: MatrixParams,
    /// `(hidden, width)`
    pub down: MatrixParams,
    /// Experts.
    pub n_experts: usize,
    /// Picks of a row.
    pub n_picked: usize,
}

impl Experts {
    /// Checks what the kernels need of a model; `layer` names it in the message.
    pub fn check(&self, layer: usize) -> Result<()> {
        let (gate, up) = (self.gate.codec(), self.up.codec());
        if gate == up {
            return Ok(());
        }
        Err(Error::BadInput {
            file: "--backend".into(),
            field: format!("layer {layer}'s experts"),
            expected: "gate and up of one codec (cuda)".into(),
            found: format!("{} and {}", gate.name(), up.name()),
        })
    }
}

/// A step's picks grouped by expert, for more than [`ROWS_MAX`] rows. A slot is a pick's place in that order.
#[derive(Debug, Clone, Copy)]
pub struct Grouped {
    /// `(n_experts + 1)` u32: an expert's slots.
    pub starts: Ptr,
    /// `(n_blocks, 2)` u32: expert (!0: none) and first slot.
    pub blocks: Ptr,
    /// `(slots)` u32: the row of each slot.
    pub slot_row: Ptr,
    /// `(slots)` u32: the slot of each pick.
    pub slot_of: Ptr,
    /// Blocks of slots, used or not.
    pub n_blocks: usize,
    /// Slots of a block.
    pub block: BlockRows,
}

impl Grouped {
    /// Most blocks that `n` picks of `n_experts` experts make.
    fn n_blocks(n: usize, n_experts: usize, block: BlockRows) -> usize {
        n / block.rows() + n_experts.min(n)
    }

    /// Bytes for up to `n` picks of `n_experts` experts.
    pub fn bytes(n: usize, n_experts: usize) -> usize {
        // Blocks of 16 are for few picks an expert: the larger of the two choices at most.
        let blocks = 2 * (n.min(25 * n_experts) / 16 + n / 64 + n_experts);
        4 * (n_experts + 1 + blocks + 2 * n) + 4 * 256
    }

    /// Lays out the parts for `n` picks in memory of [`Grouped::bytes`].
    pub fn at(memory: Ptr, n: usize, n_experts: usize) -> Grouped {
        let block = BlockRows::of_experts(n.div_ceil(n_experts));
        let n_blocks = Grouped::n_blocks(n, n_experts, block);
        let part = |at: Ptr, len: usize| at.at((4 * len).next_multiple_of(256) as u64);
        let blocks = part(memory, n_experts + 1);
        let slot_row = part(blocks, 2 * n_blocks);
        Grouped { starts: memory, blocks, slot_row, slot_of: part(slot_row, n), n_blocks, block }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GroupParams {
    picks: Ptr,
    n: u32,
    n_experts: u32,
    n_picked: u32,
    block: u32,
    starts: Ptr,
    blocks: Ptr,
    slot_row: Ptr,
    slot_of: Ptr,
    n_blocks: u32,
    pad: u32,
}
const _: () = assert!(size_of::<GroupParams>() == 64);
// SAFETY: repr(C) without hidden padding; GroupParams of kernels/group.cu.
unsafe impl Params for GroupParams {}

/// Groups `n` picks (`rows * n_picked`); rows keep their order inside an expert.
pub fn group(gpu: &Gpu, e: &Experts, picks: Ptr, n: usize, to: &Grouped) -> Result<()> {
    assert!(e.n_experts <= crate::limits::EXPERTS_MAX);
    let params = GroupParams {
        picks,
        n: n as u32,
        n_experts: e.n_experts as u32,
        n_picked: e.n_picked as u32,
        block: to.block.rows() as u32,
        starts: to.starts,
        blocks: to.blocks,
        slot_row: to.slot_row,
        slot_of: to.slot_of,
        n_blocks: to.n_blocks as u32,
        pad: 0,
    };
    let grid = |blocks: usize, threads| Grid { blocks: [blocks as u32, 1, 1], threads, shared_bytes: 0 };
    gpu.launch(UNIT, "group_count", grid(1, 1024), &params)?;
    gpu.launch(UNIT, "group_place", grid(e.n_experts, 256), &params)
}

/// A step's rows at the experts.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Rows.
    pub rows: usize,
    /// `(rows, n_picked)` picks.
    pub picks: Ptr,
    /// The same grouped; read only for more than [`ROWS_MAX`] rows that are not exact.
    pub grouped: &'a Grouped,
    /// `(rows * n_picked, width)` f32 between gate-up and down: in the order of picks, or of slots when grouped.
    pub act: Ptr,
    /// The same quantized, where down wants it and rows are few; else null.
    pub act_q: Ptr,
    /// f32 activations and sums throughout.
    pub exact: bool,
    /// Experts `first..end` that run, where the step is grouped; others are left out. All of them in ascending parts give the
    /// same bits as all at once.
    pub experts: (u32, u32),
    /// Working memory.
    pub scratch: Ptr,
    /// Its size: at least [`scratch_bytes`].
    pub scratch_bytes: usize,
}

impl Step<'_> {
    fn is_grouped(&self) -> bool {
        self.rows > ROWS_MAX && !self.exact
    }
}

/// Working memory that `rows` rows need; with up to [`scratch_bytes_best`] down runs in fewer pieces.
pub fn scratch_bytes(e: &Experts, rows: usize) -> usize {
    scratch_of(e, rows, 8)
}

/// Working memory with which down runs in one piece.
pub fn scratch_bytes_best(e: &Experts, rows: usize) -> usize {
    scratch_of(e, rows, tiles(e.down.rows as usize).next_multiple_of(8))
}

fn scratch_of(e: &Experts, rows: usize, tiles: usize) -> usize {
    if rows <= ROWS_MAX {
        return 0;
    }
    let slots = rows * e.n_picked;
    let down = Halves::bytes(slots, e.down.cols as usize, Halves::terms(e.down.codec()))
        + slots * tiles * TILE_ROWS * 4;
    down.max(Halves::bytes(rows, e.gate.cols as usize, Halves::terms(e.gate.codec()))) + 512
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GateUpParams {
    gate: MatrixParams,
    up: MatrixParams,
    table: Ptr,
    picks: Ptr,
    x: Ptr,
    q: Ptr,
    act: Ptr,
    act_q: Ptr,
    x_row: u64,
    q_row: u64,
    n_picked: u32,
    pad: u32,
}
const _: () = assert!(size_of::<GateUpParams>() == 200);
// SAFETY: repr(C) without hidden padding; GateUpParams of kernels/expert.cu.
unsafe impl Params for GateUpParams {}

/// `act = silu(gate x) * (up x)` for every pick.
pub fn gate_up(gpu: &Gpu, e: &Experts, x: &Acts, s: &Step) -> Result<()> {
    let (codec, width) = (e.gate.codec(), e.gate.rows as usize);
    assert!(codec == e.up.codec(), "checked when the model was loaded");
    if s.is_grouped() {
        return gate_up_grouped(gpu, e, x, s);
    }
    let params = GateUpParams {
        gate: e.gate,
        up: e.up,
        table: e.table,
        picks: s.picks,
        x: x.f32,
        q: x.q,
        act: s.act,
        act_q: s.act_q,
        x_row: x.f32_stride as u64,
        q_row: (e.gate.cols as usize / GROUP) as u64,
        n_picked: e.n_picked as u32,
        pad: 0,
    };
    let exact = s.exact || !codec.is_dense() && x.q.is_null();
    let name = if exact { "expert_gate_up_exact" } else { "expert_gate_up" };
    let blocks = [width.div_ceil(32) as u32, (s.rows * e.n_picked) as u32, 1];
    gpu.launch(unit("expert", codec), name, Grid { blocks, threads: 256, shared_bytes: 0 }, &params)
}

fn gate_up_grouped(gpu: &Gpu, e: &Experts, x: &Acts, s: &Step) -> Result<()> {
    let (width, cols) = (e.gate.rows as usize, e.gate.cols as usize);
    assert!(
        s.scratch_bytes >= Halves::bytes(s.rows, cols, Halves::terms(e.gate.codec())),
        "scratch is short"
    );
    let from = Source {
        x: x.f32,
        rows: s.rows,
        heads: 1,
        cols,
        step: 0,
        row: x.f32_stride,
        against: e.gate.codec(),
    };
    let (halves, _) = quantize::halves(gpu, &from, s.scratch)?;
    let params = GroupedParams {
        a: e.gate,
        b: e.up,
        table: e.table,
        starts: s.grouped.starts,
        blocks: s.grouped.blocks,
        gather: s.grouped.slot_row,
        x: halves.x,
        factor: halves.factor,
        y: s.act,
        y_row: width as u64,
        pitch: halves.pitch as u32,
        rows: 0,
        first_tile: 0,
        end_tile: tiles(width) as u32,
        first_expert: s.experts.0,
        end_expert: s.experts.1,
    };
    gemm::gate_up(gpu, &params, s.grouped.block, s.grouped.n_blocks)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DownParams {
    down: MatrixParams,
    table: Ptr,
    picks: Ptr,
    act: Ptr,
    act_q: Ptr,
    x: Ptr,
    x_row: u64,
    n_picked: u32,
    pad: u32,
}
const _: () = assert!(size_of::<DownParams>() == 120);
// SAFETY: repr(C) without hidden padding; DownParams of kernels/expert.cu.
unsafe impl Params for DownParams {}

/// `x[r] += Σ weight * (down act)` over row r's picks; `x` is `(rows, hidden)`, the residual stream.
pub fn down(gpu: &Gpu, e: &Experts, s: &Step, x: Ptr) -> Result<()> {
    if s.is_grouped() {
        return down_grouped(gpu, e, s, x);
    }
    let (codec, hidden) = (e.down.codec(), e.down.rows as usize);
    let params = DownParams {
        down: e.down,
        table: e.table,
        picks: s.picks,
        act: s.act,
        act_q: s.act_q,
        x,
        x_row: hidden as u64,
        n_picked: e.n_picked as u32,
        pad: 0,
    };
    let exact = s.exact || !codec.is_dense() && s.act_q.is_null();
    let name = if exact { "expert_down_exact" } else { "expert_down" };
    let blocks = [tiles(hidden) as u32, s.rows as u32, 1];
    gpu.launch(unit("expert", codec), name, Grid { blocks, threads: 256, shared_bytes: 0 }, &params)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CombineParams {
    picks: Ptr,
    slot_of: Ptr,
    down: Ptr,
    x: Ptr,
    x_row: u64,
    n_picked: u32,
    width: u32,
    first_expert: u32,
    end_expert: u32,
}
const _: () = assert!(size_of::<CombineParams>() == 56);
// SAFETY: repr(C) without hidden padding; CombineParams of kernels/group.cu.
unsafe impl Params for CombineParams {}

/// Down for every slot, a slice of columns at a time as scratch allows, each added up over the picks.
fn down_grouped(gpu: &Gpu, e: &Experts, s: &Step, x: Ptr) -> Result<()> {
    let (hidden, width, slots) = (e.down.rows as usize, e.down.cols as usize, s.rows * e.n_picked);
    let from =
        Source { x: s.act, rows: slots, heads: 1, cols: width, step: 0, row: width, against: e.down.codec() };
    let (halves, y) = quantize::halves(gpu, &from, s.scratch)?;
    let room = s.scratch_bytes.saturating_sub((y.0 - s.scratch.0) as usize);
    let slice = room / (slots * TILE_ROWS * 4) / 8 * 8;
    assert!(slice > 0, "scratch is short");
    let all = tiles(hidden);
    for first in (0..all).step_by(slice) {
        let end = all.min(first + slice);
        let columns = hidden.min(end * TILE_ROWS) - first * TILE_ROWS;
        let params = GroupedParams {
            a: e.down,
            b: e.down,
            table: e.table,
            starts: s.grouped.starts,
            blocks: s.grouped.blocks,
            gather: Ptr::NULL,
            x: halves.x,
            factor: halves.factor,
            y,
            y_row: columns as u64,
            pitch: halves.pitch as u32,
            rows: 0,
            first_tile: first as u32,
            end_tile: end as u32,
            first_expert: s.experts.0,
            end_expert: s.experts.1,
        };
        gemm::down(gpu, &params, s.grouped.block, s.grouped.n_blocks)?;
        let combine = CombineParams {
            picks: s.picks,
            slot_of: s.grouped.slot_of,
            down: y,
            x: x.f32s(first * TILE_ROWS),
            x_row: hidden as u64,
            n_picked: e.n_picked as u32,
            width: columns as u32,
            first_expert: s.experts.0,
            end_expert: s.experts.1,
        };
        let blocks = [columns.div_ceil(256) as u32, s.rows as u32, 1];
        gpu.launch(UNIT, "combine", Grid { blocks, threads: 256, shared_bytes: 0 }, &combine)?;
    }
    Ok(())
}

/// Bytes of `n` picks.
pub fn picks_bytes(n: usize) -> usize {
    n * size_of::<PickParams>()
}
