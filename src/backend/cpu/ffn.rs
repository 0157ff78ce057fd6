//! The feed-forward half of a layer: one SwiGLU, or routed experts grouped so that each expert's weights are read once a
//! step, with the shared experts in the same phases.

use super::ops::{Out, Q8Out, Q8Rows, Rows};
use super::scratch::Shared;
use super::step::{Acts, Ctx, each_piece};
use crate::format::layout::{GROUP, TILE_ROWS};
use crate::model::{Mlp, Moe, MoeHyper, Pick, margin, route};
use crate::units::{ExpertId, LayerId, Result};
use crate::weights::{Expert, ExpertSource, Matrix};
use std::ops::Range;
use std::sync::Arc;

/// Tiles whose rows are one group of the next product's activations: the smallest piece that can be quantized.
const GROUP_TILES: usize = GROUP / TILE_ROWS;

/// Buffers of this half.
pub struct FfnScratch {
    gate: Shared,
    up: Shared,
    act: Shared,
    down: Shared,
    /// Quantized `act` of the routed slots (or the dense layer), and of the shared part.
    q8: [Q8Rows; 2],
    router: Shared,
    choice: Vec<f32>,
    /// `(rows, n_picked)`
    picks: Vec<Pick>,
    /// The slot of each pick: slots are grouped by expert.
    slot_of: Vec<u32>,
    /// The row of each slot.
    slot_rows: Vec<u32>,
    ids: Vec<ExpertId>,
    /// First slot of each distinct expert, and the end.
    starts: Vec<u32>,
    fetched: Vec<Arc<Expert>>,
    identity: Vec<u32>,
}

/// Routing asked for or given from outside, in the plan's order of rows.
pub struct Routes<'a> {
    /// Picks to replay, `(rows, n_layers, n_picked)`.
    pub given: Option<&'a [ExpertId]>,
    /// Picks to record, the same shape; empty if not asked for.
    pub record: &'a mut [ExpertId],
    /// How near each choice was to another, `(rows, n_layers)`; empty with `record`.
    pub margins: &'a mut [f32],
    /// The plan's index of each row.
    pub plan_row: &'a [u32],
}

/// One SwiGLU of the phases: a dense layer, an expert or the shared part.
#[derive(Clone, Copy)]
struct Job<'a> {
    gate: &'a Matrix,
    up: &'a Matrix,
    down: &'a Matrix,
    /// Activation rows that enter.
    rows: Rows<'a>,
    /// Where the first row's `(width)` activations lie in `gate`, `up` and `act`.
    base: usize,
    /// Rows of `act` from `act_base` on that enter `down`: `act_rows`, and which quantized copy holds them.
    act_rows: Rows<'a>,
    act_base: usize,
    q8: usize,
    /// First output row in `down`.
    out_row: usize,
}

impl FfnScratch {
    /// Buffers for `rows` rows of a model.
    pub fn new(h: &crate::model::Hyper, rows: usize) -> FfnScratch {
        let (mut act, mut out_rows, mut q8) = (rows * h.ffn_width, rows, [rows * h.ffn_width, 0]);
        let mut n_experts = 0;
        let mut slots = 0;
        if let Some(m) = &h.moe {
            slots = rows * m.n_picked;
            act = act.max(slots * m.expert_width + rows * m.shared_width);
            out_rows = slots + rows;
            q8 = [q8[0].max(slots * m.expert_width), rows * m.shared_width];
            n_experts = m.n_experts;
        }
        FfnScratch {
            gate: Shared::zeroed(act),
            up: Shared::zeroed(act),
            act: Shared::zeroed(act),
            down: Shared::zeroed(out_rows * h.hidden),
            q8: q8.map(Q8Rows::with_capacity),
            router: Shared::zeroed(rows * n_experts),
            choice: vec![0.0; n_experts],
            picks: vec![Pick::default(); slots],
            slot_of: vec![0; slots],
            slot_rows: vec![0; slots],
            ids: Vec::with_capacity(n_experts),
            starts: Vec::with_capacity(n_experts + 1),
            fetched: Vec::with_capacity(n_experts),
            identity: (0..slots.max(rows) as u32).collect(),
        }
    }

    /// f32s of all buffers.
    pub fn len(&self) -> usize {
        [&self.gate, &self.up, &self.act, &self.down, &self.router].iter().map(|s| s.len()).sum()
    }

    /// A dense layer: adds its result to `residual (rows, hidden)`.
    pub fn dense(&mut self, ctx: Ctx, mlp: &Mlp, rows: usize, x: Acts, residual: &Shared) {
        let all = Rows::All(rows);
        let job = Job {
            gate: &mlp.gate,
            up: &mlp.up,
            down: &mlp.down,
            rows: all,
            base: 0,
            act_rows: all,
            act_base: 0,
            q8: 0,
            out_row: 0,
        };
        let buffers = (&mut self.gate, &mut self.up, &mut self.act);
        phases(ctx, 1, &|_| job, x, [(rows, 0), (0, 0)], buffers, &mut self.down, &mut self.q8);
        ctx.add_rows(rows, &self.down, None, residual);
    }

    /// A layer with routed experts: adds its result to `residual (rows, hidden)`.
    /// Returns the distinct experts used.
    pub fn moe(
        &mut self,
        ctx: Ctx,
        source: &dyn ExpertSource,
        layer: LayerId,
        (moe, m): (&Moe, &MoeHyper),
        rows: usize,
        x: Acts,
        residual: &Shared,
        routes: &mut Routes,
    ) -> Result<u64> {
        self.route(ctx, layer, moe, m, rows, x, routes);
        self.group(m, rows);
        self.fetched.clear();
        source.fetch(layer, &self.ids, &mut self.fetched)?;
        let slots = rows * m.n_picked;
        let (starts, fetched) = (&self.starts, &self.fetched);
        let (slot_rows, identity) = (&self.slot_rows, &self.identity);
        let shared_base = slots * m.expert_width;
        // Made as they are asked for: a list would be one more allocation in every layer. The shared part comes first: with
        // several rows it is bound by arithmetic, and while one worker does it the others keep memory busy with experts.
        let n_shared = usize::from(moe.shared.is_some());
        let job = |i: usize| match (i.checked_sub(n_shared), &moe.shared) {
            (Some(i), _) => {
                let e = &fetched[i];
                let range = starts[i] as usize..starts[i + 1] as usize;
                Job {
                    gate: &e.gate,
                    up: &e.up,
                    down: &e.down,
                    rows: Rows::Pick(&slot_rows[range.clone()]),
                    base: range.start * m.expert_width,
                    act_rows: Rows::Pick(&identity[range.clone()]),
                    act_base: 0,
                    q8: 0,
                    out_row: range.start,
                }
            }
            (None, shared) => {
                let s = shared.as_ref().expect("the job before the experts is the shared part");
                let all = Rows::All(rows);
                Job {
                    gate: &s.gate,
                    up: &s.up,
                    down: &s.down,
                    rows: all,
                    base: shared_base,
                    act_rows: all,
                    act_base: shared_base,
                    q8: 1,
                    out_row: slots,
                }
            }
        };
        let shared_rows = if moe.shared.is_some() { rows } else { 0 };
        let n = fetched.len() + n_shared;
        let acts = [(slots, 0), (shared_rows, shared_base)];
        let buffers = (&mut self.gate, &mut self.up, &mut self.act);
        phases(ctx, n, &job, x, acts, buffers, &mut self.down, &mut self.q8);
        self.combine(ctx, m, rows, shared_rows > 0, residual);
        Ok(self.ids.len() as u64)
    }

    /// Router logits, then picks.
    fn route(
        &mut self,
        ctx: Ctx,
        layer: LayerId,
        moe: &Moe,
        m: &MoeHyper,
        rows: usize,
        x: Acts,
        routes: &mut Routes,
    ) {
        let out = Out::new(self.router.all_mut(), m.n_experts);
        let tiles = moe.router.tiles();
        // Few tiles, and the f32 path whatever the codec: a routing decision is worth full precision.
        ctx.team.chunks(tiles, 1, &|range, _| {
            ctx.ops.matmul_f32(&moe.router, range, x.f32, Rows::All(rows), out)
        });
        let n_layers = ctx.model.hyper.n_layers;
        let logits = self.router.all_mut();
        for row in 0..rows {
            let at = (routes.plan_row[row] as usize * n_layers + layer) * m.n_picked;
            let given = routes.given.map(|g| &g[at..at + m.n_picked]);
            let picks = &mut self.picks[row * m.n_picked..(row + 1) * m.n_picked];
            let logits = &mut logits[row * m.n_experts..(row + 1) * m.n_experts];
            route(m, moe.bias.as_deref(), logits, &mut self.choice, given, picks);
            if !routes.record.is_empty() {
                routes.record[at..at + m.n_picked].iter_mut().zip(picks).for_each(|(r, p)| *r = p.expert);
                routes.margins[at / m.n_picked] = margin(m, moe.bias.as_deref(), logits);
            }
        }
    }

    /// Gives each pick a slot, so that an expert's slots are contiguous and its rows in order.
    fn group(&mut self, m: &MoeHyper, rows: usize) {
        let picks = &self.picks[..rows * m.n_picked];
        self.ids.clear();
        self.starts.clear();
        let mut next = [0u32; crate::limits::EXPERTS_MAX];
        picks.iter().for_each(|p| next[p.expert as usize] += 1);
        let mut slot = 0;
        for (e, n) in next[..m.n_experts].iter_mut().enumerate() {
            if *n > 0 {
                self.ids.push(e as ExpertId);
                self.starts.push(slot);
                slot += std::mem::replace(n, slot);
            }
        }
        self.starts.push(slot);
        for (i, p) in picks.iter().enumerate() {
            let s = &mut next[p.expert as usize];
            self.slot_of[i] = *s;
            self.slot_rows[*s as usize] = (i / m.n_picked) as u32;
            *s += 1;
        }
    }

    /// `residual[row] += Σ weight * routed + shared`, in the order of the picks.
    fn combine(&self, ctx: Ctx, m: &MoeHyper, rows: usize, shared: bool, residual: &Shared) {
        let hidden = ctx.model.hyper.hidden;
        let slots = rows * m.n_picked;
        ctx.each_row(rows, &|row| {
            // SAFETY: each row is one call's.
            let out = unsafe { residual.part_mut(row * hidden..(row + 1) * hidden) };
            for i in row * m.n_picked..(row + 1) * m.n_picked {
                let slot = self.slot_of[i] as usize;
                ctx.ops.axpy(self.picks[i].weight, self.down.part(slot * hidden..(slot + 1) * hidden), out);
            }
            if shared {
                ctx.ops.add(self.down.part((slots + row) * hidden..(slots + row + 1) * hidden), out);
            }
        });
    }
}

/// gate and up with SiLU between, then down: two phases over jobs `job(0..n)`. `acts` are `(rows, base)` of the two groups of
/// activations (routed or dense; shared). Activations are quantized by whoever computed them, group by group.
fn phases<'j>(
    ctx: Ctx,
    n: usize,
    job: &(dyn Fn(usize) -> Job<'j> + Sync),
    x: Acts,
    acts: [(usize, usize); 2],
    (gate, up, act): (&mut Shared, &mut Shared, &mut Shared),
    down: &mut Shared,
    q8: &mut [Q8Rows; 2],
) {
    let hidden = ctx.model.hyper.hidden;
    let mut to = [None; 2];
    for (group, (q8, to)) in q8.iter_mut().zip(&mut to).enumerate() {
        let mut of_group = (0..n).map(job).filter(|j| j.q8 == group);
        if of_group.any(|j| ctx.wants_q8(j.down)) {
            let width = (0..n).map(job).find(|j| j.q8 == group).expect("one just was").down.cols;
            *to = Some(q8.shape(acts[group].0, width));
        }
    }
    let act: &Shared = act;
    let units = || (0..n).map(|i| job(i).gate.tiles().div_ceil(GROUP_TILES));
    // SAFETY: products write the columns of their own tiles, which the same call then reads; others' never.
    let outs = unsafe { [gate.out(), up.out()] };
    let (gate, up): (&Shared, &Shared) = (gate, up);
    ctx.team.chunks(units().sum(), 1, &|range, _| {
        each_piece(range, units(), |i, groups| {
            let job = job(i);
            let tiles = groups.start * GROUP_TILES..(groups.end * GROUP_TILES).min(job.gate.tiles());
            inner(ctx, &job, tiles, x, outs, (gate, up, act), to[job.q8]);
        });
    });
    let out = Out::new(down.all_mut(), hidden);
    let q8: &[Q8Rows; 2] = q8;
    let tiles = || (0..n).map(|i| job(i).down.tiles());
    ctx.team.chunks(tiles().sum(), 1, &|range, _| {
        each_piece(range, tiles(), |i, tiles| {
            let job = job(i);
            let end = job.act_base + acts[job.q8].0 * job.down.cols;
            let x = Acts { f32: act.part(job.act_base..end), q8: &q8[job.q8] };
            ctx.product(job.down, tiles, x, job.act_rows, out.columns_from(job.out_row * hidden));
        });
    });
}

/// `act = silu(gate x) * (up x)` of some tiles of a job, quantized to `to` if given.
fn inner(
    ctx: Ctx,
    job: &Job,
    tiles: Range<usize>,
    x: Acts,
    outs: [Out; 2],
    (gate, up, act): (&Shared, &Shared, &Shared),
    to: Option<Q8Out>,
) {
    let width = job.gate.rows;
    let [gate_out, up_out] = outs.map(|o| o.columns_from(job.base).with_stride(width));
    ctx.product(job.gate, tiles.clone(), x, job.rows, gate_out);
    ctx.product(job.up, tiles.clone(), x, job.rows, up_out);
    let cols = tiles.start * TILE_ROWS..(tiles.end * TILE_ROWS).min(width);
    for row in 0..job.rows.len() {
        let at = job.base + row * width;
        let part = at + cols.start..at + cols.end;
        // SAFETY: these columns of this job are this call's.
        let out = unsafe { act.part_mut(part.clone()) };
        ctx.ops.silu_mul(gate.part(part.clone()), up.part(part), out);
        if let Some(to) = to {
            ctx.ops.quantize_part(out, to, job.act_rows.at(row), cols.start / GROUP);
        }
    }
}
