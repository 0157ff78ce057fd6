//! Attention over pages: one algorithm for decode and prefill, so that a row's result does not depend on what else is
//! in the step, on where its prompt was split, or on the number of threads.
//!
//! A row's keys are cut at absolute positions: pages of [`PAGE_TOKENS`] and segments of [`SEGMENT_PAGES`] pages. Within a
//! segment a running softmax takes the pages in order (Milakov & Gimelshein, arXiv:1805.02867); segments are
//! then merged in order. Decode computes segments on several workers and merges after; prefill merges as it goes: the
//! same operations in the same order.

use super::ops::{KvBlock, Ops};
use crate::kv::{PAGE_TOKENS, Placement};
use crate::model::Mask;
use std::ops::Range;

/// Pages of a segment: long enough that merging is nothing, short enough that one row at 4k keeps all cores busy.
pub const SEGMENT_PAGES: usize = 8;

/// What a layer's rows see and where it lies.
#[derive(Clone, Copy)]
pub struct View {
    /// What a row sees.
    pub mask: Mask,
    /// Where positions lie.
    pub placement: Placement,
    /// Read every page up to the row and mask element by element: what sparse reading is tested against.
    pub dense: bool,
}

impl View {
    /// Segments that hold positions up to `last`.
    pub fn segments(&self, last: usize) -> usize {
        self.pages_to(last).div_ceil(SEGMENT_PAGES)
    }

    /// Block table entries that may hold positions up to `last`.
    fn pages_to(&self, last: usize) -> usize {
        let group = self.placement.stride * PAGE_TOKENS;
        (last / group + 1) * self.placement.stride
    }

    /// Slots of page `index` that hold positions up to `last`; they are the first ones.
    fn slots_to(&self, index: usize, last: usize) -> usize {
        let first = self.placement.position(index, 0);
        if first > last { 0 } else { ((last - first) / self.placement.stride + 1).min(PAGE_TOKENS) }
    }

    /// True if the row at `i` sees any slot of page `index`.
    fn sees_page(&self, i: usize, index: usize) -> bool {
        let slots = self.slots_to(index, i);
        if slots == 0 {
            return false;
        }
        if self.dense {
            return true;
        }
        let last = self.placement.position(index, slots - 1);
        let congruent = |stride: usize| index % self.placement.stride == i % stride;
        match self.mask {
            Mask::Full => true,
            Mask::Sliding { window } => i - last < window,
            Mask::Strided { stride } => congruent(stride),
            Mask::LocalStrided { window, stride } => congruent(stride) || i - last < window,
        }
    }

    /// Sets the scores `(PAGE_TOKENS)` that the row at `i` does not see to -infinity.
    fn hide(&self, i: usize, index: usize, scores: &mut [f32]) {
        let slots = self.slots_to(index, i);
        scores[slots..].fill(f32::NEG_INFINITY);
        if self.mask != Mask::Full {
            for (slot, s) in scores[..slots].iter_mut().enumerate() {
                if !self.mask.sees(i, self.placement.position(index, slot)) {
                    *s = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// Queries that share keys: `per_row` heads of each of some consecutive rows.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// `(rows * per_row, d)` f32, already multiplied by the attention scale.
    pub q: &'a [f32],
    /// Width of a query.
    pub d: usize,
    /// Width of a value.
    pub dv: usize,
    /// Queries a row.
    pub per_row: usize,
    /// Position of the first row.
    pub position: usize,
    /// Rows.
    pub rows: usize,
}

/// Running softmax of `n` queries: `(n)` maxima, `(n)` sums, `(n, dv)` weighted values, not yet divided.
pub struct Part<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    acc: &'a mut [f32],
}

impl<'a> Part<'a> {
    /// f32s that a part of `n` queries takes.
    pub fn len(n: usize, dv: usize) -> usize {
        n * (dv + 2)
    }

    /// Cuts a buffer of at least [`Part::len`].
    pub fn over(buffer: &'a mut [f32], n: usize, dv: usize) -> Part<'a> {
        let (max, rest) = buffer.split_at_mut(n);
        let (sum, rest) = rest.split_at_mut(n);
        Part { max, sum, acc: &mut rest[..n * dv] }
    }

    /// The same, to read.
    pub fn seen(&self) -> Seen<'_> {
        Seen { max: self.max, sum: self.sum, acc: self.acc }
    }

    /// Nothing seen yet.
    pub fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Takes in a later segment: its queries from `first` on.
    pub fn merge(&mut self, ops: Ops, later: &Seen, first: usize, dv: usize) {
        for i in 0..self.max.len() {
            let (a, b) = (self.max[i], later.max[first + i]);
            if b == f32::NEG_INFINITY {
                continue;
            }
            let acc = &mut self.acc[i * dv..][..dv];
            let other = &later.acc[(first + i) * dv..][..dv];
            if a == f32::NEG_INFINITY {
                (self.max[i], self.sum[i]) = (b, later.sum[first + i]);
                acc.copy_from_slice(other);
                continue;
            }
            let m = a.max(b);
            let (ca, cb) = ((a - m).exp(), (b - m).exp());
            self.max[i] = m;
            self.sum[i] = self.sum[i] * ca + later.sum[first + i] * cb;
            ops.scale(ca, acc);
            ops.axpy(cb, other, acc);
        }
    }

    /// Divides and writes query `i`'s result; `sink` is one more logit that has no value.
    pub fn finish(&self, ops: Ops, i: usize, dv: usize, sink: Option<f32>, out: &mut [f32]) {
        out.copy_from_slice(&self.acc[i * dv..][..dv]);
        let mut by = 1.0 / self.sum[i];
        if let Some(sink) = sink {
            let m = self.max[i].max(sink);
            let c = (self.max[i] - m).exp();
            by = c / (self.sum[i] * c + (sink - m).exp());
        }
        ops.scale(by, out);
    }
}

/// A [`Part`] to read.
pub struct Seen<'a> {
    max: &'a [f32],
    sum: &'a [f32],
    acc: &'a [f32],
}

impl<'a> Seen<'a> {
    /// Cuts a buffer as [`Part::over`] does.
    pub fn over(buffer: &'a [f32], n: usize) -> Seen<'a> {
        let (max, rest) = buffer.split_at(n);
        let (sum, acc) = rest.split_at(n);
        Seen { max, sum, acc }
    }
}

/// Gives the keys and values of a block table entry: `keys(index, slots)` with rows `0..slots` valid.
pub type Fetch<'f> = dyn FnMut(usize, usize, &mut dyn FnMut(KvBlock<'_>, KvBlock<'_>)) + 'f;

/// Runs one segment of `queries` into `part` (cleared first). `scores` is `(queries, PAGE_TOKENS)`. Returns the page
/// reads that the rows' masks asked for.
pub fn segment(
    ops: Ops,
    view: &View,
    queries: &Queries,
    segment: usize,
    fetch: &mut Fetch,
    part: &mut Part,
    scores: &mut [f32],
) -> u64 {
    part.clear();
    let last = queries.position + queries.rows - 1;
    let end = view.pages_to(last).min((segment + 1) * SEGMENT_PAGES);
    let mut reads = 0;
    for index in segment * SEGMENT_PAGES..end {
        let sees = |row: &usize| view.sees_page(queries.position + row, index);
        let Some(from) = (0..queries.rows).find(sees) else { continue };
        let to = (0..queries.rows).rev().find(sees).expect("one row sees it") + 1;
        reads += (from..to).filter(sees).count() as u64;
        let slots = view.slots_to(index, last);
        fetch(index, slots, &mut |k, v| page(ops, view, queries, from..to, index, slots, k, v, part, scores));
    }
    reads
}

/// One page: scores, running softmax, weighted values, for the rows `rows`.
#[allow(clippy::too_many_arguments)]
fn page(
    ops: Ops,
    view: &View,
    queries: &Queries,
    rows: Range<usize>,
    index: usize,
    slots: usize,
    k: KvBlock,
    v: KvBlock,
    part: &mut Part,
    scores: &mut [f32],
) {
    let (d, dv, per_row) = (queries.d, queries.dv, queries.per_row);
    let first = rows.start * per_row;
    let n = rows.len() * per_row;
    ops.qk(&queries.q[first * d..], d, n, k, slots, d, scores, PAGE_TOKENS);
    for row in rows {
        let position = queries.position + row;
        let seen = view.sees_page(position, index);
        for i in row * per_row..(row + 1) * per_row {
            let s = &mut scores[(i - first) * PAGE_TOKENS..][..PAGE_TOKENS];
            if !seen {
                s.fill(0.0); // no weight for any key: the row's sums stay as they are
                continue;
            }
            view.hide(position, index, s);
            let max = part.max[i].max(ops.max(s));
            if max == f32::NEG_INFINITY {
                s.fill(0.0);
                continue;
            }
            let sum = ops.exp_sum(s, max);
            let c = (part.max[i] - max).exp();
            part.sum[i] = part.sum[i] * c + sum;
            if c != 1.0 {
                ops.scale(c, &mut part.acc[i * dv..][..dv]);
            }
            part.max[i] = max;
        }
    }
    ops.pv(scores, PAGE_TOKENS, n, v, slots, dv, &mut part.acc[first * dv..], dv);
}
