//! One step on the CPU: rows through layers. Each phase cuts its work over the team; between phases lies a barrier.
//!
//! Rows are kept in the order of `Lines`: first those whose latent attention is absorbed, then the rest, so that the
//! absorbed ones are a contiguous block. Nothing here depends on that order but where a row lies.

use super::cache::Cache;
use super::ops::{Ops, Out, Q8Out, Q8Rows, Rows};
use super::scratch::Shared;
use super::team::Team;
use crate::backend::{Input, MlaOrder, StepPlan, Want};
use crate::model::Model;
use crate::weights::Matrix;
use std::ops::Range;

/// Products a phase with few rows is not worth waking the team for.
const INLINE_ROWS: usize = 2;

/// One row of a step.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    /// Which run of the plan.
    pub run: usize,
    /// Its position in the sequence.
    pub position: usize,
}

/// The rows of a step, absorbed ones first.
#[derive(Debug, Default)]
pub struct Lines {
    /// All rows.
    pub lines: Vec<Line>,
    /// The row of the first line of each run.
    pub first: Vec<usize>,
    /// Rows whose attention is absorbed; they come first.
    pub absorbed: usize,
}

impl Lines {
    /// Orders a plan's rows.
    pub fn set(&mut self, plan: &StepPlan) {
        self.lines.clear();
        self.first.clear();
        self.first.resize(plan.runs.len(), 0);
        for order in [MlaOrder::Absorbed, MlaOrder::Materialized] {
            for (run, r) in plan.runs.iter().enumerate().filter(|(_, r)| r.mla == order) {
                self.first[run] = self.lines.len();
                self.lines.extend((0..r.rows).map(|i| Line { run, position: r.position + i }));
            }
            if order == MlaOrder::Absorbed {
                self.absorbed = self.lines.len();
            }
        }
    }

    /// Rows in all.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Calls `f(index in the plan's order, row here)` for every row.
    pub fn in_plan_order(&self, plan: &StepPlan, mut f: impl FnMut(usize, usize)) {
        let mut at = 0;
        for (run, r) in plan.runs.iter().enumerate() {
            for i in 0..r.rows {
                f(at, self.first[run] + i);
                at += 1;
            }
        }
    }
}

/// One product of a phase.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// `(rows, cols)`
    pub w: &'a Matrix,
    /// Which activation rows.
    pub rows: Rows<'a>,
    /// Where results go.
    pub out: Out<'a>,
}

/// Activations of a phase: always f32, and quantized where a quantized matrix meets them.
#[derive(Clone, Copy)]
pub struct Acts<'a> {
    /// `(n, cols)` f32
    pub f32: &'a [f32],
    /// The same, quantized; empty in exact mode or against dense matrices.
    pub q8: &'a Q8Rows,
}

/// What every phase needs.
#[derive(Clone, Copy)]
pub struct Ctx<'a> {
    /// The model.
    pub model: &'a Model,
    /// The instruction set's operations.
    pub ops: Ops,
    /// The workers.
    pub team: &'a Team,
    /// KV pages.
    pub cache: &'a Cache,
    /// f32 activations throughout.
    pub exact: bool,
    /// Read every page and mask element by element.
    pub dense_masks: bool,
}

impl Ctx<'_> {
    /// True if products with `w` take quantized activations.
    pub fn wants_q8(&self, w: &Matrix) -> bool {
        !self.exact && !w.codec.is_dense()
    }

    /// One matrix, some tiles.
    pub fn product(&self, w: &Matrix, tiles: Range<usize>, x: Acts, rows: Rows, out: Out) {
        if self.wants_q8(w) {
            self.ops.matmul_q8(w, tiles, x.q8, rows, out);
        } else {
            self.ops.matmul_f32(w, tiles, x.f32, rows, out);
        }
    }

    /// A whole matrix and `n` rows `x` of the caller's own, quantized for it to rows `first..first + n` of `to`, which is there
    /// if the matrix wants it.
    pub fn product_of_own(&self, w: &Matrix, x: &[f32], n: usize, to: Option<Q8Out>, first: usize, out: Out) {
        if self.wants_q8(w) {
            let to = to.expect("rows to quantize to");
            self.ops.quantize_and_multiply(w, x, first..first + n, to, out);
        } else {
            self.ops.matmul_f32(w, 0..w.tiles(), x, Rows::All(n), out);
        }
    }

    /// All products of a list that share their activations, cut by tiles.
    pub fn products(&self, list: &[Product], x: Acts) {
        self.products_of(list.len(), &|i| list[i], x);
    }

    /// The same for products `get(0..n)`, which are made as they are asked for: no list is kept.
    pub fn products_of<'p>(&self, n: usize, get: &(dyn Fn(usize) -> Product<'p> + Sync), x: Acts) {
        let tiles = || (0..n).map(|i| get(i).w.tiles());
        self.team.chunks(tiles().sum(), 1, &|range, _| {
            each_piece(range, tiles(), |i, tiles| {
                let p = get(i);
                self.product(p.w, tiles, x, p.rows, p.out);
            });
        });
    }

    /// `f(row)` for every row, on the team if there are enough.
    pub fn each_row(&self, rows: usize, f: &(dyn Fn(usize) + Sync)) {
        if rows <= INLINE_ROWS {
            return (0..rows).for_each(f);
        }
        self.team.chunks(rows, 1, &|range, _| range.for_each(f));
    }

    /// Normalizes `rows` rows of `x (rows, len)` by `norm` into `to`, and quantizes them if asked.
    pub fn norm(&self, rows: usize, x: &Shared, norm: &[f32], to: &Shared, q8: &mut Q8Rows, quantize: bool) {
        let len = norm.len();
        let q = quantize.then(|| q8.shape(rows, len));
        self.each_row(rows, &|r| {
            // SAFETY: each row is one call's.
            let out = unsafe { to.part_mut(r * len..(r + 1) * len) };
            self.ops.rms_norm(x.part(r * len..(r + 1) * len), norm, self.model.hyper.norm_eps, out);
            if let Some(q) = q {
                self.ops.quantize(to.part(0..rows * len), r..r + 1, q);
            }
        });
    }

    /// Quantizes `x (rows, len)` if any of `against` wants it.
    pub fn quantize<'m>(
        &self,
        rows: usize,
        len: usize,
        x: &[f32],
        q8: &mut Q8Rows,
        mut against: impl Iterator<Item = &'m Matrix>,
    ) {
        if !against.any(|w| self.wants_q8(w)) {
            return;
        }
        let q = q8.shape(rows, len);
        self.each_row(rows, &|r| self.ops.quantize(x, r..r + 1, q));
    }

    /// `x[r] += y[r] + bias` for rows of `hidden`.
    pub fn add_rows(&self, rows: usize, y: &Shared, bias: Option<&[f32]>, x: &Shared) {
        let len = self.model.hyper.hidden;
        self.each_row(rows, &|r| {
            // SAFETY: each row is one call's.
            let out = unsafe { x.part_mut(r * len..(r + 1) * len) };
            self.ops.add(y.part(r * len..(r + 1) * len), out);
            if let Some(b) = bias {
                self.ops.add(b, out);
            }
        });
    }
}

/// Splits `range` of concatenated lists of `lens` into `(list, range in the list)`.
pub fn each_piece(
    range: Range<usize>,
    lens: impl Iterator<Item = usize>,
    mut f: impl FnMut(usize, Range<usize>),
) {
    let mut start = 0;
    for (i, len) in lens.enumerate() {
        let (from, to) = (range.start.max(start), range.end.min(start + len));
        if from < to {
            f(i, from - start..to - start);
        }
        start += len;
        if start >= range.end {
            return;
        }
    }
}

/// Fills the first hidden states `(rows, hidden)` from tokens or from outside.
pub fn embed(ctx: Ctx, plan: &StepPlan, lines: &Lines, x: &Shared) {
    let hidden = ctx.model.hyper.hidden;
    ctx.each_row(lines.len(), &|row| {
        let line = lines.lines[row];
        let run = &plan.runs[line.run];
        let i = line.position - run.position;
        // SAFETY: each row is one call's.
        let out = unsafe { x.part_mut(row * hidden..(row + 1) * hidden) };
        match run.input {
            Input::Tokens(ids) => ctx.ops.dequant_row(&ctx.model.embed, ids[i] as usize, out),
            Input::Hidden(h) => out.copy_from_slice(&h[i * hidden..(i + 1) * hidden]),
        }
    });
}

/// Rows that want logits, in the plan's order.
pub fn wanted(plan: &StepPlan, lines: &Lines, out: &mut Vec<usize>) {
    out.clear();
    for (run, r) in plan.runs.iter().enumerate() {
        let first = lines.first[run];
        match r.want {
            Want::Nothing => {}
            Want::Last => out.push(first + r.rows - 1),
            Want::All => out.extend(first..first + r.rows),
        }
    }
}
