//! The attention half of a layer: projections, rope and append, attention, output projection.

use super::attend_units::{Kind, MATERIALIZED_ROWS, PARTS_LEN, PREFILL_QUERIES, Unit, unit_len};
use super::ops::{Out, Q8Out, Q8Rows, Rows};
use super::scratch::Shared;
use super::step::{Acts, Ctx, Lines, Product};
use crate::backend::StepPlan;
use crate::kv::PAGE_TOKENS;
use crate::model::{AttnHyper, Gqa, Hyper, Layer, Linear, Mla, QkNorm};
use std::sync::atomic::AtomicU64;

/// Buffers of this half, `(rows, …)` f32.
pub struct AttnScratch {
    /// GQA: `(n_heads * head_dim)`; MLA: `(n_heads * (nope_dim + rope_dim))`.
    pub(super) q: Shared,
    /// MLA: the query's bottleneck before and after its norm, `(q_lora_rank)`.
    q_low: [Shared; 2],
    /// GQA: keys `(n_kv_heads * head_dim)`; MLA: latent and rope key `(kv_lora_rank + rope_dim)`.
    k: Shared,
    /// GQA: values.
    v: Shared,
    /// MLA, absorbed: `(n_heads, rows, nope_dim)`.
    q_nope: Shared,
    /// MLA, absorbed: `(rows, n_heads, kv_lora_rank + rope_dim)`.
    pub(super) q_latent: Shared,
    /// MLA, absorbed: `(n_heads, rows, kv_lora_rank)`.
    pub(super) o_latent: Shared,
    /// `(n_heads * value width)`
    pub(super) attn: Shared,
    /// `(hidden)`
    out: Shared,
    q8: Q8Rows,
    /// Cosines and sines, `(rows, dims/2)` each.
    cos: Shared,
    sin: Shared,
    /// A worker's own: queries, two parts, scores, made or widened keys and values.
    pub(super) workers: Shared,
    pub(super) worker_len: usize,
    pub(super) parts: Shared,
    pub(super) units: Vec<Unit>,
    /// `(first unit, query)` of what is merged.
    pub(super) merges: Vec<(usize, usize)>,
    /// Page reads counted by the workers.
    pub pages_read: AtomicU64,
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
            units: Vec::new(),
            merges: Vec::new(),
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
        let eps = ctx.model.hyper.norm_eps;
        for (x, norm) in [(&mut *q, &g.q_norm), (&mut *k, &g.k_norm)] {
            match g.qk_norm {
                QkNorm::None => {}
                QkNorm::Row => ctx.ops.rms_norm_in_place(x, norm, eps),
                QkNorm::Head => {
                    x.chunks_mut(g.head_dim).for_each(|head| ctx.ops.rms_norm_in_place(head, norm, eps))
                }
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
        self.append_and_absorb(ctx, l, m, plan, lines);
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

    /// Appends every row's latent, and takes queries to where attention wants them. One job, whose units are the heads of
    /// the absorbed rows, and rows: a head is so small that who makes its queries multiplies them, with no barrier between.
    fn append_and_absorb(&mut self, ctx: Ctx, l: usize, m: &Mla, plan: &StepPlan, lines: &Lines) {
        let (rows, n) = (lines.len(), lines.absorbed);
        let heads = if n > 0 { m.n_heads } else { 0 };
        let mut q8 = std::mem::take(&mut self.q8);
        let to = m.k_absorb[..heads].iter().any(|w| ctx.wants_q8(w)).then(|| q8.shape(heads * n, m.nope_dim));
        // SAFETY: a product writes its head's columns of the absorbed rows; `absorb` writes those beside them.
        let out = unsafe { self.q_latent.out() }.with_stride(m.n_heads * (m.kv_lora_rank + m.rope_dim));
        let this = &*self;
        ctx.team.chunks(heads + rows, 1, &|range, _| {
            for unit in range {
                let Some(row) = unit.checked_sub(heads) else {
                    this.absorb(ctx, m, n, unit, to, out);
                    continue;
                };
                this.append_latent(ctx, l, m, plan, lines, row);
                if row >= n {
                    (0..m.n_heads).for_each(|h| _ = this.query(ctx, m, row, h));
                }
            }
        });
        self.q8 = q8;
    }

    /// Bias, norm and rope of one row's latent and rope key, which go to the row's page.
    fn append_latent(&self, ctx: Ctx, l: usize, m: &Mla, plan: &StepPlan, lines: &Lines, row: usize) {
        let (lora, kw) = (m.kv_lora_rank, m.kv_lora_rank + m.rope_dim);
        // SAFETY: each row is one call's.
        let kv = unsafe { self.k.part_mut(row * kw..(row + 1) * kw) };
        if let Some(b) = &m.kv_a.bias {
            ctx.ops.add(b, kv);
        }
        ctx.ops.rms_norm_in_place(&mut kv[..lora], &m.kv_norm, ctx.model.hyper.norm_eps);
        self.turn(ctx, row, &mut kv[lora..]);
        let line = lines.lines[row];
        let (index, slot) = ctx.cache.placement(l).locate(line.position);
        // SAFETY: a position is one row's, and attention starts after the barrier.
        unsafe { ctx.cache.write(l, plan.runs[line.run].pages[index], 0, slot, false, kv) };
    }

    /// Bias and rope of the query of one (row, head), which is one unit's.
    fn query(&self, ctx: Ctx, m: &Mla, row: usize, h: usize) -> &[f32] {
        let head = m.nope_dim + m.rope_dim;
        let at = (row * m.n_heads + h) * head;
        // SAFETY: by the contract.
        let q = unsafe { self.q.part_mut(at..at + head) };
        if let Some(b) = &m.q_b.bias {
            ctx.ops.add(&b[h * head..(h + 1) * head], q);
        }
        self.turn(ctx, row, &mut q[m.nope_dim..]);
        q
    }

    /// Queries of the `n` absorbed rows' head `h` into latent space: `q_latent[row][h][..lora] = W_UK q_nope`, and beside it
    /// the part that rope turned.
    fn absorb(&self, ctx: Ctx, m: &Mla, n: usize, h: usize, to: Option<Q8Out>, out: Out) {
        let (nope, kw) = (m.nope_dim, m.kv_lora_rank + m.rope_dim);
        // SAFETY: each head is one call's, here and below.
        let own = unsafe { self.q_nope.part_mut(h * n * nope..(h + 1) * n * nope) };
        for (row, own) in own.chunks_exact_mut(nope).enumerate() {
            let (q_nope, q_rope) = self.query(ctx, m, row, h).split_at(nope);
            own.copy_from_slice(q_nope);
            let at = (row * m.n_heads + h) * kw + m.kv_lora_rank;
            // SAFETY: see above.
            unsafe { self.q_latent.part_mut(at..at + m.rope_dim) }.copy_from_slice(q_rope);
        }
        ctx.product_of_own(&m.k_absorb[h], own, n, to, h * n, out.columns_from(h * kw));
    }

    /// Weighted latents of the absorbed rows to values: `attn[row][head] = W_UV o_latent`.
    fn values_up(&mut self, ctx: Ctx, m: &Mla, n: usize) {
        if n == 0 {
            return;
        }
        let wants = m.v_up.iter().any(|w| ctx.wants_q8(w));
        let to = wants.then(|| self.q8.shape(m.n_heads * n, m.kv_lora_rank));
        let out = Out::new(self.attn.all_mut(), m.n_heads * m.v_dim);
        let (latent, width) = (&self.o_latent, n * m.kv_lora_rank);
        ctx.team.chunks(m.n_heads, 1, &|range, _| {
            for h in range {
                let x = latent.part(h * width..(h + 1) * width);
                ctx.product_of_own(&m.v_up[h], x, n, to, h * n, out.columns_from(h * m.v_dim));
            }
        });
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
}
