//! Attention's work cut into units for the team: some rows, some heads, one segment or all of them. How it is cut never shows
//! in the result.

use super::attend_half::AttnScratch;
use super::attention::{Part, Queries, Seen, View, segment};
use super::ops::{KvBlock, Ops, Out, Rows};
use super::step::{Ctx, Lines};
use crate::backend::{MlaOrder, StepPlan};
use crate::kv::{PAGE_TOKENS, PageId};
use crate::model::{Gqa, Layer, Mla};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Runs of at most this many rows are cut by segments (decode); longer ones by rows (prefill).
const DECODE_ROWS: usize = 4;
/// Queries of a prefill unit over cached keys: enough to convert a key once for many.
pub const PREFILL_QUERIES: usize = 96;
/// Rows of a unit that makes its keys from latents: making them is the cost, so many rows share it.
pub const MATERIALIZED_ROWS: usize = 256;
/// Units of more queries than this widen keys once for all of them: the kernel widens once for four.
const WIDEN_KEYS: usize = 4;
/// The same for values, which the kernel widens once for eight.
const WIDEN_VALUES: usize = 8;
/// f32s kept for the partial results of split decode; a step that would need more is not split.
pub const PARTS_LEN: usize = 8 << 20;

/// One piece of attention work: some rows of a run, some query heads of one key-value head, one segment or all.
#[derive(Debug, Clone)]
pub struct Unit {
    run: usize,
    kv_head: usize,
    /// Query heads, counted over all heads.
    heads: Range<usize>,
    /// Rows of the run.
    rows: Range<usize>,
    /// A single segment and where its part lies in `parts`; without, all segments, and the result is final.
    split: Option<(usize, usize)>,
}

impl AttnScratch {
    /// Attention of all rows, once keys are appended.
    pub fn attend(&mut self, ctx: Ctx, l: usize, layer: &Layer, plan: &StepPlan, lines: &Lines, kind: Kind) {
        let mut units = std::mem::take(&mut self.units);
        let mut merges = std::mem::take(&mut self.merges);
        units.clear();
        merges.clear();
        let mut parts = 0;
        for run in 0..plan.runs.len() {
            self.cut(ctx, l, layer, plan, run, kind, &mut units, &mut parts);
        }
        // The units of one (row, heads) are neighbours, segment 0 first; merging is cut by heads.
        for (i, u) in units.iter().enumerate().filter(|(_, u)| matches!(u.split, Some((0, _)))) {
            merges.extend((0..u.heads.len()).map(|head| (i, head)));
        }
        let this = &*self;
        let job = Job { ctx, l, layer, plan, lines, kind };
        ctx.team.chunks(units.len(), 1, &|range, worker| {
            units[range].iter().for_each(|u| this.unit(&job, u, worker));
        });
        ctx.team.chunks(merges.len(), 1, &|range, worker| {
            merges[range].iter().for_each(|&(i, head)| this.merge(&job, &units[i..], head, worker));
        });
        (self.units, self.merges) = (units, merges);
    }

    /// Cuts one run into units.
    fn cut(
        &self,
        ctx: Ctx,
        l: usize,
        layer: &Layer,
        plan: &StepPlan,
        run: usize,
        kind: Kind,
        units: &mut Vec<Unit>,
        parts: &mut usize,
    ) {
        let r = &plan.runs[run];
        let made = matches!(kind, Kind::Mla(_)) && r.mla == MlaOrder::Materialized;
        let (kv_heads, group) = kind.heads(made);
        let view = view(ctx, l, layer);
        let decode = r.rows <= DECODE_ROWS;
        // Few units: split a head group so that every worker has some. Whole groups convert a key once for all heads.
        let rows: usize = plan.runs.iter().map(|r| r.rows).sum();
        let whole_segments = view.segments(r.position).saturating_sub(1).max(1);
        let wanted = (2 * ctx.team.workers()).div_ceil(kv_heads * rows * whole_segments);
        let split_heads = if decode { wanted.clamp(1, group) } else { 1 };
        let heads_each = group.div_ceil(split_heads);
        let rows_each = match (made, decode) {
            (true, _) => MATERIALIZED_ROWS,
            (false, true) => 1,
            (false, false) => (PREFILL_QUERIES / group).max(1),
        };
        let (_, dv) = kind.widths(made);
        for kv_head in 0..kv_heads {
            for first in (0..group).step_by(heads_each) {
                let heads = kv_head * group + first..kv_head * group + (first + heads_each).min(group);
                for row in (0..r.rows).step_by(rows_each) {
                    let rows = row..(row + rows_each).min(r.rows);
                    let segments = view.segments(r.position + rows.end - 1);
                    let len = Part::len(heads.len(), dv);
                    let split =
                        !made && rows.len() == 1 && segments > 1 && *parts + segments * len <= PARTS_LEN;
                    let unit = |split| Unit { run, kv_head, heads: heads.clone(), rows: rows.clone(), split };
                    if !split {
                        units.push(unit(None));
                        continue;
                    }
                    units.extend((0..segments).map(|s| unit(Some((s, *parts + s * len)))));
                    *parts += segments * len;
                }
            }
        }
    }

    /// Computes one unit.
    fn unit(&self, job: &Job, u: &Unit, worker: usize) {
        let run = &job.plan.runs[u.run];
        let made = match job.kind {
            Kind::Mla(m) if run.mla == MlaOrder::Materialized => Some(m),
            _ => None,
        };
        let (d, dv) = job.kind.widths(made.is_some());
        let n = u.rows.len() * u.heads.len();
        // SAFETY: each worker has its own part.
        let buffer =
            unsafe { self.workers.part_mut(worker * self.worker_len..(worker + 1) * self.worker_len) };
        let (q, rest) = buffer.split_at_mut(n * d);
        let (total, rest) = rest.split_at_mut(Part::len(n, dv));
        let (part, rest) = rest.split_at_mut(Part::len(n, dv));
        let (scores, buffer) = rest.split_at_mut(n * PAGE_TOKENS);
        let first_row = job.lines.first[u.run] + u.rows.start;
        self.gather(job, u, first_row, made.is_some(), d, q);
        let view = view(job.ctx, job.l, job.layer);
        let queries = Queries {
            q,
            d,
            dv,
            per_row: u.heads.len(),
            position: run.position + u.rows.start,
            rows: u.rows.len(),
        };
        let mut fetch = |index: usize, slots: usize, f: &mut dyn FnMut(KvBlock<'_>, KvBlock<'_>)| match made {
            Some(m) => make_keys(job, m, u.kv_head, run.pages[index], slots, buffer, f),
            None => cached_keys(job, u.kv_head, run.pages[index], slots, n, buffer, f),
        };
        let ops = job.ctx.ops;
        if let Some((s, at)) = u.split {
            // SAFETY: each unit has its own part.
            let mut out = Part::over(unsafe { self.parts.part_mut(at..at + Part::len(n, dv)) }, n, dv);
            let reads = segment(ops, &view, &queries, s, &mut fetch, &mut out, scores);
            self.count(u, reads);
            return;
        }
        let (mut total, mut part) = (Part::over(total, n, dv), Part::over(part, n, dv));
        total.clear();
        for s in 0..view.segments(queries.position + queries.rows - 1) {
            let reads = segment(ops, &view, &queries, s, &mut fetch, &mut part, scores);
            self.count(u, reads);
            total.merge(ops, &part.seen(), 0, dv);
        }
        for row in 0..u.rows.len() {
            for i in 0..u.heads.len() {
                let head = u.heads.start + i;
                self.finish(job, first_row + row, head, made.is_some(), &total, row * u.heads.len() + i, dv);
            }
        }
    }

    /// Counts page reads once a row, not once for each group of heads.
    fn count(&self, u: &Unit, reads: u64) {
        if u.heads.start == 0 {
            self.pages_read.fetch_add(reads, Ordering::Relaxed);
        }
    }

    /// Copies a unit's queries together and multiplies them by the attention scale.
    fn gather(&self, job: &Job, u: &Unit, first_row: usize, made: bool, d: usize, q: &mut [f32]) {
        let heads = job.ctx.model.hyper.n_heads();
        let from = if matches!(job.kind, Kind::Mla(_)) && !made { &self.q_latent } else { &self.q };
        let width = u.heads.len() * d;
        for (i, to) in q.chunks_mut(width).enumerate() {
            let at = ((first_row + i) * heads + u.heads.start) * d;
            to.copy_from_slice(from.part(at..at + width));
        }
        job.ctx.ops.scale(job.ctx.model.hyper.softmax_scale, q);
    }

    /// Merges the segments of one row and of query `i` of its unit's heads; the segments are the first of `units`.
    fn merge(&self, job: &Job, units: &[Unit], i: usize, worker: usize) {
        let (_, dv) = job.kind.widths(false);
        let u = &units[0];
        let n = u.heads.len();
        // SAFETY: each worker has its own part.
        let buffer =
            unsafe { self.workers.part_mut(worker * self.worker_len..(worker + 1) * self.worker_len) };
        let mut total = Part::over(buffer, 1, dv);
        total.clear();
        for (s, u) in units.iter().enumerate() {
            let Some((segment, at)) = u.split else { break };
            if segment != s {
                break;
            }
            total.merge(job.ctx.ops, &Seen::over(self.parts.part(at..at + Part::len(n, dv)), n), i, dv);
        }
        let row = job.lines.first[u.run] + u.rows.start;
        self.finish(job, row, u.heads.start + i, false, &total, 0, dv);
    }

    /// Writes the result of one (row, head), query `i` of `total`: `attn (rows, n_heads, dv)`, or for absorbed rows
    /// `o_latent (n_heads, rows, lora)`.
    fn finish(&self, job: &Job, row: usize, head: usize, made: bool, total: &Part, i: usize, dv: usize) {
        let heads = job.ctx.model.hyper.n_heads();
        let latent = matches!(job.kind, Kind::Mla(_)) && !made;
        let (to, at) = match latent {
            true => (&self.o_latent, head * job.lines.absorbed + row),
            false => (&self.attn, row * heads + head),
        };
        // SAFETY: each (row, head) is one call's.
        let out = unsafe { to.part_mut(at * dv..(at + 1) * dv) };
        total.finish(job.ctx.ops, i, dv, job.kind.sink(head), out);
    }
}

/// Gives `f` the keys and values of a page, widened into `buffer` if they are coded or `n` queries share them.
fn cached_keys(
    job: &Job,
    kv_head: usize,
    page: PageId,
    slots: usize,
    n: usize,
    buffer: &mut [f32],
    f: &mut dyn FnMut(KvBlock, KvBlock),
) {
    let (cache, ops, l) = (job.ctx.cache, job.ctx.ops, job.l);
    let (k, v) = buffer.split_at_mut(PAGE_TOKENS * cache.key_width());
    if cache.is_coded() {
        let keys = cache.widen(l, page, kv_head, false, slots, k);
        return match job.kind {
            Kind::Mla(_) => f(keys, keys),
            Kind::Gqa(_) => f(keys, cache.widen(l, page, kv_head, true, slots, v)),
        };
    }
    let (keys, values) = (cache.keys(l, page, kv_head), cache.values(l, page, kv_head));
    let keys = if n > WIDEN_KEYS { widened(ops, keys, slots, k) } else { keys };
    match job.kind {
        Kind::Mla(_) => f(keys, keys), // the latents are both
        Kind::Gqa(_) if n > WIDEN_VALUES => f(keys, widened(ops, values, slots, v)),
        Kind::Gqa(_) => f(keys, values),
    }
}

/// A block's first `slots` rows as f32, in `buffer` unless they are already.
fn widened<'a>(ops: Ops, block: KvBlock<'a>, slots: usize, buffer: &'a mut [f32]) -> KvBlock<'a> {
    let KvBlock::F16 { data, stride } = block else { return block };
    let to = &mut buffer[..slots * stride];
    ops.widen(&data[..slots * stride], to);
    KvBlock::F32 { data: to, stride }
}

/// f32s that a unit of `n` queries needs: queries, two parts, scores.
pub fn unit_len(n: usize, d: usize, dv: usize) -> usize {
    n * d + 2 * Part::len(n, dv) + n * PAGE_TOKENS
}

/// What the rows of one layer see.
fn view(ctx: Ctx, l: usize, layer: &Layer) -> View {
    View { mask: layer.mask, placement: ctx.cache.placement(l), dense: ctx.dense_masks }
}

/// Makes one head's keys and values of a page from its latents, in `buffer`.
fn make_keys(
    job: &Job,
    m: &Mla,
    head: usize,
    page: u32,
    slots: usize,
    buffer: &mut [f32],
    f: &mut dyn FnMut(KvBlock, KvBlock),
) {
    let (lora, d) = (m.kv_lora_rank, m.nope_dim + m.rope_dim);
    let (latents, rest) = buffer.split_at_mut(PAGE_TOKENS * lora);
    let (keys, values) = rest.split_at_mut(PAGE_TOKENS * d);
    let values = &mut values[..PAGE_TOKENS * m.v_dim];
    let ops = job.ctx.ops;
    for slot in 0..slots {
        let (latent, key) =
            (&mut latents[slot * lora..(slot + 1) * lora], &mut keys[slot * d..(slot + 1) * d]);
        job.ctx.cache.read(job.l, page, 0, slot, false, 0, latent);
        job.ctx.cache.read(job.l, page, 0, slot, false, lora, &mut key[m.nope_dim..]);
    }
    // f32 whatever the codec: the latents were rounded once when they were cached, and are not again.
    let (k_up, v_up) = (&m.k_up[head], &m.v_up[head]);
    ops.matmul_f32(k_up, 0..k_up.tiles(), latents, Rows::All(slots), Out::new(keys, d));
    ops.matmul_f32(v_up, 0..v_up.tiles(), latents, Rows::All(slots), Out::new(values, m.v_dim));
    f(KvBlock::F32 { data: keys, stride: d }, KvBlock::F32 { data: values, stride: m.v_dim });
}

/// What the units of one layer share.
struct Job<'a> {
    ctx: Ctx<'a>,
    l: usize,
    layer: &'a Layer,
    plan: &'a StepPlan<'a>,
    lines: &'a Lines,
    kind: Kind<'a>,
}

/// Which attention.
#[derive(Clone, Copy)]
pub enum Kind<'a> {
    /// Grouped-query.
    Gqa(&'a Gqa),
    /// Latent.
    Mla(&'a Mla),
}

impl Kind<'_> {
    /// `(key-value heads, query heads of each)`.
    fn heads(&self, made: bool) -> (usize, usize) {
        match self {
            Kind::Gqa(g) => (g.n_kv_heads, g.n_heads / g.n_kv_heads),
            Kind::Mla(m) if made => (m.n_heads, 1),
            Kind::Mla(m) => (1, m.n_heads),
        }
    }

    /// `(query, value)` widths.
    fn widths(&self, made: bool) -> (usize, usize) {
        match self {
            Kind::Gqa(g) => (g.head_dim, g.head_dim),
            Kind::Mla(m) if made => (m.nope_dim + m.rope_dim, m.v_dim),
            Kind::Mla(m) => (m.kv_lora_rank + m.rope_dim, m.kv_lora_rank),
        }
    }

    fn sink(&self, head: usize) -> Option<f32> {
        match self {
            Kind::Gqa(g) => g.sinks.as_ref().map(|s| s[head]),
            Kind::Mla(_) => None,
        }
    }
}
