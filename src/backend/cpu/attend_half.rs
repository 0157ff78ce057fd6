//! The attention half of a layer: projections, rope and append, attention, output projection.

use super::attention::{Part, Queries, View, segment};
use super::ops::{KvBlock, Out, Q8Rows, Rows};
use super::scratch::Shared;
use super::step::{Acts, Ctx, Lines, Product};
use crate::backend::{MlaOrder, StepPlan};
use crate::kv::PAGE_TOKENS;
use crate::model::{AttnHyper, Gqa, Hyper, Layer, Linear, Mla, QkNorm};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Runs of at most this many rows are cut by segments (decode); longer ones by rows (prefill).
const DECODE_ROWS: usize = 4;
/// Queries of a prefill unit over cached keys: enough to convert a key once for many.
const PREFILL_QUERIES: usize = 96;
/// Rows of a unit that makes its keys from latents: making them is the cost, so many rows share it.
const MATERIALIZED_ROWS: usize = 256;
/// f32s kept for the partial results of split decode; a step that would need more is not split.
const PARTS_LEN: usize = 8 << 20;

/// Buffers of this half, `(rows, …)` f32.
pub struct AttnScratch {
    /// GQA: `(n_heads * head_dim)`; MLA: `(n_heads * (nope_dim + rope_dim))`.
    q: Shared,
    /// MLA: the query's bottleneck before and after its norm, `(q_lora_rank)`.
    q_low: [Shared; 2],
    /// GQA: keys `(n_kv_heads * head_dim)`; MLA: latent and rope key `(kv_lora_rank + rope_dim)`.
    k: Shared,
    /// GQA: values.
    v: Shared,
    /// MLA, absorbed: `(n_heads, rows, nope_dim)`.
    q_nope: Shared,
    /// MLA, absorbed: `(rows, n_heads, kv_lora_rank + rope_dim)`.
    q_latent: Shared,
    /// MLA, absorbed: `(n_heads, rows, kv_lora_rank)`.
    o_latent: Shared,
    /// `(n_heads * value width)`
    attn: Shared,
    /// `(hidden)`
    out: Shared,
    q8: Q8Rows,
    /// Cosines and sines, `(rows, dims/2)` each.
    cos: Shared,
    sin: Shared,
    /// A worker's own: queries, two parts, scores, made keys and values.
    workers: Shared,
    worker_len: usize,
    parts: Shared,
    identity: Vec<u32>,
    units: Vec<Unit>,
    /// Page reads counted by the workers.
    pub pages_read: AtomicU64,
}

/// One piece of attention work: some rows of a run, some query heads of one key-value head, one segment or all.
#[derive(Debug, Clone)]
struct Unit {
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
    /// Buffers for `rows` rows of a model.
    pub fn new(h: &Hyper, rows: usize, workers: usize) -> AttnScratch {
        let heads = h.n_heads();
        let (mut q_low, mut nope, mut latent, mut o_latent) = (0, 0, 0, 0);
        let (q, k, v, attn, worker_len, widest) = match h.attn {
            AttnHyper::Gqa { n_kv_heads, head_dim, .. } => {
                let n = PREFILL_QUERIES.max(heads / n_kv_heads);
                // Coded keys and values are widened a page at a time.
                let len = unit_len(n, head_dim, head_dim) + PAGE_TOKENS * 2 * head_dim;
                let kv = n_kv_heads * head_dim;
                (heads * head_dim, kv, kv, heads * head_dim, len, heads * head_dim)
            }
            AttnHyper::Mla { q_lora_rank, kv_lora_rank: lora, nope_dim, rope_dim, v_dim, .. } => {
                q_low = q_lora_rank.unwrap_or(0);
                (nope, latent, o_latent) = (heads * nope_dim, heads * (lora + rope_dim), heads * lora);
                let widened = PAGE_TOKENS * (lora + rope_dim);
                let absorbed = unit_len(PREFILL_QUERIES.max(heads), lora + rope_dim, lora) + widened;
                let made = PAGE_TOKENS * (lora + nope_dim + rope_dim + v_dim);
                let made = unit_len(MATERIALIZED_ROWS, nope_dim + rope_dim, v_dim) + made;
                let widest = nope.max(o_latent).max(heads * v_dim).max(q_low);
                let q = heads * (nope_dim + rope_dim);
                (q, lora + rope_dim, 0, heads * v_dim, absorbed.max(made), widest)
            }
        };
        let buffer = |width: usize| Shared::zeroed(rows * width);
        AttnScratch {
            q: buffer(q),
            q_low: [buffer(q_low), buffer(q_low)],
            k: buffer(k),
            v: buffer(v),
            q_nope: buffer(nope),
            q_latent: buffer(latent),
            o_latent: buffer(o_latent),
            attn: buffer(attn),
            out: buffer(h.hidden),
            q8: Q8Rows::with_capacity(rows * widest),
            cos: buffer(h.rope.dims / 2),
            sin: buffer(h.rope.dims / 2),
            workers: Shared::zeroed(workers * worker_len),
            worker_len,
            parts: Shared::zeroed(PARTS_LEN),
            identity: (0..(rows * heads) as u32).collect(),
            units: Vec::new(),
            pages_read: AtomicU64::new(0),
        }
    }

    /// f32s of all buffers but the one that a long decode splits into, which is rarely touched.
    pub fn len(&self) -> usize {
        let [a, b] = &self.q_low;
        let all = [&self.q, a, b, &self.k, &self.v, &self.q_nope, &self.q_latent, &self.o_latent];
        let rest = [&self.attn, &self.out, &self.cos, &self.sin, &self.workers];
        all.iter().chain(&rest).map(|s| s.len()).sum()
    }

    /// Cosines and sines of every row, once a step.
    pub fn angles(&mut self, ctx: Ctx, lines: &Lines) {
        let (rope, n) = (&ctx.model.rope, ctx.model.rope.dims() / 2);
        let (cos, sin) = (self.cos.all_mut(), self.sin.all_mut());
        for (row, line) in lines.lines.iter().enumerate() {
            rope.angles(line.position, &mut cos[row * n..(row + 1) * n], &mut sin[row * n..(row + 1) * n]);
        }
    }

    /// Turns one head by the angles of `row`.
    fn turn(&self, ctx: Ctx, row: usize, head: &mut [f32]) {
        let n = ctx.model.rope.dims() / 2;
        ctx.model.rope.turn(
            head,
            self.cos.part(row * n..(row + 1) * n),
            self.sin.part(row * n..(row + 1) * n),
        );
    }

    /// Grouped-query attention of `x`; adds its result to `residual`.
    pub fn gqa(
        &mut self,
        ctx: Ctx,
        l: usize,
        layer: &Layer,
        g: &Gqa,
        plan: &StepPlan,
        lines: &Lines,
        x: Acts,
        residual: &Shared,
    ) {
        let rows = lines.len();
        let all = Rows::All(rows);
        let (qw, kw) = (g.n_heads * g.head_dim, g.n_kv_heads * g.head_dim);
        let list = [
            Product { w: &g.q.w, rows: all, out: Out::new(self.q.all_mut(), qw) },
            Product { w: &g.k.w, rows: all, out: Out::new(self.k.all_mut(), kw) },
            Product { w: &g.v.w, rows: all, out: Out::new(self.v.all_mut(), kw) },
        ];
        ctx.products(&list, x);
        let this = &*self;
        ctx.each_row(rows, &|row| this.append_gqa(ctx, l, g, plan, lines, row));
        self.attend(ctx, l, layer, plan, lines, Kind::Gqa(g));
        self.project(ctx, &g.o, rows, qw, residual);
    }

    /// Bias, clip, norm and rope of one row's queries and keys; appends keys and values to the row's page.
    fn append_gqa(&self, ctx: Ctx, l: usize, g: &Gqa, plan: &StepPlan, lines: &Lines, row: usize) {
        let (qw, kw) = (g.n_heads * g.head_dim, g.n_kv_heads * g.head_dim);
        // SAFETY: each row is one call's.
        let q = unsafe { self.q.part_mut(row * qw..(row + 1) * qw) };
        // SAFETY: as above.
        let k = unsafe { self.k.part_mut(row * kw..(row + 1) * kw) };
        // SAFETY: as above.
        let v = unsafe { self.v.part_mut(row * kw..(row + 1) * kw) };
        for (x, linear) in [(&mut *q, &g.q), (&mut *k, &g.k), (&mut *v, &g.v)] {
            if let Some(b) = &linear.bias {
                ctx.ops.add(b, x);
            }
        }
        for (x, norm) in [(&mut *q, &g.q_norm), (&mut *k, &g.k_norm)] {
            match g.qk_norm {
                QkNorm::None => {}
                QkNorm::Row => self.norm_in_place(ctx, norm, x),
                QkNorm::Head => x.chunks_mut(g.head_dim).for_each(|head| self.norm_in_place(ctx, norm, head)),
            }
        }
        if let Some(c) = g.clip {
            for x in [&mut *q, &mut *k, &mut *v] {
                x.iter_mut().for_each(|e| *e = e.clamp(-c, c));
            }
        }
        q.chunks_mut(g.head_dim).chain(k.chunks_mut(g.head_dim)).for_each(|head| self.turn(ctx, row, head));
        let line = lines.lines[row];
        let (index, slot) = ctx.cache.placement(l).locate(line.position);
        let page = plan.runs[line.run].pages[index];
        for head in 0..g.n_kv_heads {
            let part = head * g.head_dim..(head + 1) * g.head_dim;
            // SAFETY: a position is one row's, and attention starts after the barrier.
            unsafe {
                ctx.cache.write(l, page, head, slot, false, &k[part.clone()]);
                ctx.cache.write(l, page, head, slot, true, &v[part]);
            }
        }
    }

    fn norm_in_place(&self, ctx: Ctx, norm: &[f32], x: &mut [f32]) {
        // Heads are short: a copy on the stack would need a bound, so the definition is spelled out here.
        let mean = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / x.len() as f64;
        let by = (1.0 / (mean + f64::from(ctx.model.hyper.norm_eps)).sqrt()) as f32;
        x.iter_mut().zip(norm).for_each(|(v, w)| *v = *v * by * w);
    }

    /// Latent attention of `x`; adds its result to `residual`.
    pub fn mla(
        &mut self,
        ctx: Ctx,
        l: usize,
        layer: &Layer,
        m: &Mla,
        plan: &StepPlan,
        lines: &Lines,
        x: Acts,
        residual: &Shared,
    ) {
        let rows = lines.len();
        let all = Rows::All(rows);
        let (qw, kw) = (m.n_heads * (m.nope_dim + m.rope_dim), m.kv_lora_rank + m.rope_dim);
        let kv_a = Product { w: &m.kv_a.w, rows: all, out: Out::new(self.k.all_mut(), kw) };
        match &m.q_a {
            None => {
                let q = Product { w: &m.q_b.w, rows: all, out: Out::new(self.q.all_mut(), qw) };
                ctx.products(&[q, kv_a], x);
            }
            Some((a, norm)) => {
                let rank = norm.len();
                let low = Product { w: &a.w, rows: all, out: Out::new(self.q_low[0].all_mut(), rank) };
                ctx.products(&[low, kv_a], x);
                self.add_bias(ctx, rows, rank, a, 0);
                let quantize = ctx.wants_q8(&m.q_b.w);
                ctx.norm(rows, &self.q_low[0], norm, &self.q_low[1], &mut self.q8, quantize);
                let low = Acts { f32: self.q_low[1].part(0..rows * rank), q8: &self.q8 };
                ctx.products(&[Product { w: &m.q_b.w, rows: all, out: Out::new(self.q.all_mut(), qw) }], low);
            }
        }
        let this = &*self;
        ctx.each_row(rows, &|row| this.append_mla(ctx, l, m, plan, lines, row));
        self.absorb(ctx, m, lines.absorbed);
        self.attend(ctx, l, layer, plan, lines, Kind::Mla(m));
        self.values_up(ctx, m, lines.absorbed);
        self.project(ctx, &m.o, rows, m.n_heads * m.v_dim, residual);
    }

    fn add_bias(&self, ctx: Ctx, rows: usize, width: usize, linear: &Linear, buffer: usize) {
        let Some(b) = &linear.bias else { return };
        for row in 0..rows {
            // SAFETY: no one else runs.
            ctx.ops.add(b, unsafe { self.q_low[buffer].part_mut(row * width..(row + 1) * width) });
        }
    }

    /// Bias, norm and rope of one row; appends the latent and the rope key; queries of absorbed rows go to head-major
    /// order for the absorbed product.
    fn append_mla(&self, ctx: Ctx, l: usize, m: &Mla, plan: &StepPlan, lines: &Lines, row: usize) {
        let (head, lora) = (m.nope_dim + m.rope_dim, m.kv_lora_rank);
        let (qw, kw) = (m.n_heads * head, lora + m.rope_dim);
        // SAFETY: each row is one call's.
        let q = unsafe { self.q.part_mut(row * qw..(row + 1) * qw) };
        // SAFETY: as above.
        let kv = unsafe { self.k.part_mut(row * kw..(row + 1) * kw) };
        for (x, linear) in [(&mut *q, &m.q_b), (&mut *kv, &m.kv_a)] {
            if let Some(b) = &linear.bias {
                ctx.ops.add(b, x);
            }
        }
        self.norm_in_place(ctx, &m.kv_norm, &mut kv[..lora]);
        self.turn(ctx, row, &mut kv[lora..]);
        q.chunks_mut(head).for_each(|h| self.turn(ctx, row, &mut h[m.nope_dim..]));
        let line = lines.lines[row];
        let (index, slot) = ctx.cache.placement(l).locate(line.position);
        // SAFETY: a position is one row's, and attention starts after the barrier.
        unsafe { ctx.cache.write(l, plan.runs[line.run].pages[index], 0, slot, false, kv) };
        let n = lines.absorbed;
        if row < n {
            for (h, q) in q.chunks(head).enumerate() {
                let at = (h * n + row) * m.nope_dim;
                // SAFETY: this row's part of each head.
                unsafe { self.q_nope.part_mut(at..at + m.nope_dim) }.copy_from_slice(&q[..m.nope_dim]);
                let at = (row * m.n_heads + h) * kw + lora;
                // SAFETY: as above.
                unsafe { self.q_latent.part_mut(at..at + m.rope_dim) }.copy_from_slice(&q[m.nope_dim..]);
            }
        }
    }

    /// Queries of the absorbed rows into latent space: `q_latent[row][head][..lora] = W_UK q_nope`.
    fn absorb(&mut self, ctx: Ctx, m: &Mla, n: usize) {
        if n == 0 {
            return;
        }
        let kw = m.kv_lora_rank + m.rope_dim;
        let x = self.q_nope.part(0..m.n_heads * n * m.nope_dim);
        ctx.quantize(m.n_heads * n, m.nope_dim, x, &mut self.q8, m.k_absorb.iter());
        let out = Out::new(self.q_latent.all_mut(), m.n_heads * kw);
        let x = Acts { f32: self.q_nope.part(0..m.n_heads * n * m.nope_dim), q8: &self.q8 };
        let product = |(h, w)| Product {
            w,
            rows: Rows::Pick(&self.identity[h * n..(h + 1) * n]),
            out: out.columns_from(h * kw),
        };
        let list: Vec<Product> = m.k_absorb.iter().enumerate().map(product).collect();
        ctx.products(&list, x);
    }

    /// Weighted latents of the absorbed rows to values: `attn[row][head] = W_UV o_latent`.
    fn values_up(&mut self, ctx: Ctx, m: &Mla, n: usize) {
        if n == 0 {
            return;
        }
        let x = self.o_latent.part(0..m.n_heads * n * m.kv_lora_rank);
        ctx.quantize(m.n_heads * n, m.kv_lora_rank, x, &mut self.q8, m.v_up.iter());
        let out = Out::new(self.attn.all_mut(), m.n_heads * m.v_dim);
        let x = Acts { f32: x, q8: &self.q8 };
        let product = |(h, w)| Product {
            w,
            rows: Rows::Pick(&self.identity[h * n..(h + 1) * n]),
            out: out.columns_from(h * m.v_dim),
        };
        let list: Vec<Product> = m.v_up.iter().enumerate().map(product).collect();
        ctx.products(&list, x);
    }

    /// Output projection of `attn (rows, width)`; adds to the residual stream.
    fn project(&mut self, ctx: Ctx, o: &Linear, rows: usize, width: usize, residual: &Shared) {
        let x = self.attn.part(0..rows * width);
        ctx.quantize(rows, width, x, &mut self.q8, std::iter::once(&o.w));
        let x = Acts { f32: x, q8: &self.q8 };
        let out = Out::new(self.out.all_mut(), ctx.model.hyper.hidden);
        ctx.products(&[Product { w: &o.w, rows: Rows::All(rows), out }], x);
        ctx.add_rows(rows, &self.out, o.bias.as_deref(), residual);
    }

    /// Attention of all rows, once keys are appended.
    fn attend(&mut self, ctx: Ctx, l: usize, layer: &Layer, plan: &StepPlan, lines: &Lines, kind: Kind) {
        let mut units = std::mem::take(&mut self.units);
        units.clear();
        let mut parts = 0;
        for run in 0..plan.runs.len() {
            self.cut(ctx, l, layer, plan, run, kind, &mut units, &mut parts);
        }
        let this = &*self;
        let job = Job { ctx, l, layer, plan, lines, kind };
        ctx.team.chunks(units.len(), 1, &|range, worker| {
            units[range].iter().for_each(|u| this.unit(&job, u, worker));
        });
        if parts > 0 {
            // The units of one (row, heads) are neighbours, segment 0 first.
            let starts: Vec<usize> =
                (0..units.len()).filter(|&i| matches!(units[i].split, Some((0, _)))).collect();
            ctx.team.chunks(starts.len(), 1, &|range, worker| {
                starts[range].iter().for_each(|&s| this.merge(&job, &units[s..], worker));
            });
        }
        self.units = units;
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
        // Few queries: split a head group so that every worker has some.
        let wanted = (2 * ctx.team.workers()).div_ceil(kv_heads * r.rows);
        let split_heads = if r.rows <= DECODE_ROWS { wanted.clamp(1, group) } else { 1 };
        let heads_each = group.div_ceil(split_heads);
        let rows_each = match (made, r.rows <= DECODE_ROWS) {
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
        let made = matches!(job.kind, Kind::Mla(_)) && run.mla == MlaOrder::Materialized;
        let (d, dv) = job.kind.widths(made);
        let n = u.rows.len() * u.heads.len();
        // SAFETY: each worker has its own part.
        let buffer =
            unsafe { self.workers.part_mut(worker * self.worker_len..(worker + 1) * self.worker_len) };
        let (q, rest) = buffer.split_at_mut(n * d);
        let (total, rest) = rest.split_at_mut(Part::len(n, dv));
        let (part, rest) = rest.split_at_mut(Part::len(n, dv));
        let (scores, rest) = rest.split_at_mut(n * PAGE_TOKENS);
        let first_row = job.lines.first[u.run] + u.rows.start;
        self.gather(job, u, first_row, made, d, q);
        let view = view(job.ctx, job.l, job.layer);
        let queries = Queries {
            q,
            d,
            dv,
            per_row: u.heads.len(),
            position: run.position + u.rows.start,
            rows: u.rows.len(),
        };
        let mut fetch = |index: usize, slots: usize, f: &mut dyn FnMut(KvBlock<'_>, KvBlock<'_>)| match (
            job.kind, made,
        ) {
            (Kind::Mla(m), true) => make_keys(job, m, u.kv_head, run.pages[index], slots, rest, f),
            _ => cached(job, u.kv_head, run.pages[index], slots, rest, f),
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
            total.merge(ops, &part, dv);
        }
        self.finish(job, u, first_row, made, dv, &total);
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

    /// Merges the segments of one (row, heads), which are the first of `units`.
    fn merge(&self, job: &Job, units: &[Unit], worker: usize) {
        let (_, dv) = job.kind.widths(false);
        let u = &units[0];
        let n = u.heads.len();
        // SAFETY: each worker has its own part.
        let buffer =
            unsafe { self.workers.part_mut(worker * self.worker_len..(worker + 1) * self.worker_len) };
        let mut total = Part::over(buffer, n, dv);
        total.clear();
        for (s, u) in units.iter().enumerate() {
            let Some((segment, at)) = u.split else { break };
            if segment != s {
                break;
            }
            // SAFETY: only this call reads or writes the segments of its (row, heads).
            let part = Part::over(unsafe { self.parts.part_mut(at..at + Part::len(n, dv)) }, n, dv);
            total.merge(job.ctx.ops, &part, dv);
        }
        self.finish(job, u, job.lines.first[u.run] + u.rows.start, false, dv, &total);
    }

    /// Writes a unit's results: `attn (rows, n_heads, dv)`, or for absorbed rows `o_latent (n_heads, rows, lora)`.
    fn finish(&self, job: &Job, u: &Unit, first_row: usize, made: bool, dv: usize, total: &Part) {
        let heads = job.ctx.model.hyper.n_heads();
        let latent = matches!(job.kind, Kind::Mla(_)) && !made;
        for row in 0..u.rows.len() {
            for (i, head) in u.heads.clone().enumerate() {
                let (to, at) = match latent {
                    true => (&self.o_latent, head * job.lines.absorbed + first_row + row),
                    false => (&self.attn, (first_row + row) * heads + head),
                };
                // SAFETY: each (row, head) is one unit's.
                let out = unsafe { to.part_mut(at * dv..(at + 1) * dv) };
                let sink = job.kind.sink(head);
                total.finish(job.ctx.ops, row * u.heads.len() + i, dv, sink, out);
            }
        }
    }
}

/// f32s that a unit of `n` queries needs: queries, two parts, scores.
fn unit_len(n: usize, d: usize, dv: usize) -> usize {
    n * d + 2 * Part::len(n, dv) + n * PAGE_TOKENS
}

/// What the rows of one layer see.
fn view(ctx: Ctx, l: usize, layer: &Layer) -> View {
    View { mask: layer.mask, placement: ctx.cache.placement(l), dense: ctx.dense_masks }
}

/// One head's cached keys and values of a page; coded ones are widened into `buffer`.
fn cached(
    job: &Job,
    head: usize,
    page: u32,
    slots: usize,
    buffer: &mut [f32],
    f: &mut dyn FnMut(KvBlock, KvBlock),
) {
    let (cache, l) = (job.ctx.cache, job.l);
    if !cache.is_coded() {
        return f(cache.keys(l, page, head), cache.values(l, page, head));
    }
    let (keys, values) = buffer.split_at_mut(PAGE_TOKENS * cache.key_width());
    let keys = cache.widen(l, page, head, false, slots, keys);
    match job.kind {
        Kind::Mla(_) => f(keys, keys),
        Kind::Gqa(_) => f(keys, cache.widen(l, page, head, true, slots, values)),
    }
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
    for slot in 0..slots {
        let (latent, key) =
            (&mut latents[slot * lora..(slot + 1) * lora], &mut keys[slot * d..(slot + 1) * d]);
        job.ctx.cache.read(job.l, page, 0, slot, false, 0, latent);
        job.ctx.cache.read(job.l, page, 0, slot, false, lora, &mut key[m.nope_dim..]);
    }
    // f32 whatever the codec: the latents were rounded once when they were cached, and are not again.
    let (k_up, v_up) = (&m.k_up[head], &m.v_up[head]);
    let ops = job.ctx.ops;
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
enum Kind<'a> {
    Gqa(&'a Gqa),
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
