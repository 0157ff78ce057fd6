//! One step on the GPU: a list of launches with shapes that depend on row counts alone, so that recording it is trivial.
//! Positions and block tables are read from device memory.

use super::launch::attend::{self, Attend, Parts, Seen};
use super::launch::expert::Experts;
use super::launch::gemv::{self, Acts, Product};
use super::launch::norm::{self, Norm};
use super::launch::rope::{self, Turns};
use super::launch::{act, embed, quantize};
use super::memory::Ptr;
use super::model::{DevAttention, DevFfn, DevLayer, DevLinear, DevModel, DevMoe, Heads};
use super::module::Gpu;
use super::pages::Pages;
use super::params::MatrixParams;
use super::rows::Rows;
use super::scratch::{self, SPLIT_ROWS, Scratch};
use crate::model::{Hyper, MoeHyper, RopePairs};
use crate::units::Result;

/// What every launch needs.
pub struct Cx<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// Hyperparameters.
    pub h: &'a Hyper,
    /// Weights.
    pub model: &'a DevModel,
    /// Buffers.
    pub s: &'a Scratch,
    /// Cached keys and values.
    pub pages: &'a Pages,
    /// The step's rows.
    pub rows: &'a Rows,
    /// f32 throughout.
    pub exact: bool,
    /// Where picks are recorded.
    pub record: Ptr,
    /// That is host memory, which the host reads while the GPU goes on.
    pub outside: bool,
    /// Picks are replayed from the buffer of given ones.
    pub replay: bool,
    /// Entries of the longest block table, rounded up so that a recorded step serves many positions.
    pub entries: usize,
}

/// A layer's routed experts as the launches take them.
pub fn experts_of(d: &DevMoe, m: &MoeHyper) -> Experts {
    Experts {
        table: d.table,
        gate: d.shape.gate,
        up: d.shape.up,
        down: d.shape.down,
        n_experts: m.n_experts,
        n_picked: m.n_picked,
    }
}

impl Cx<'_> {
    /// Rows that take quantized activations: few, and not exact.
    pub(super) fn few(&self, rows: usize) -> bool {
        rows <= gemv::ROWS_MAX && !self.exact
    }

    /// Two pieces of work that do not touch each other's results: side by side for few rows, whose kernels leave most of
    /// the GPU idle and need no working memory; one after the other for many, which share it.
    pub(super) fn beside(
        &self,
        rows: usize,
        side: impl FnOnce() -> Result<()>,
        main: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.few(rows) {
            return self.gpu.device.beside(side, main);
        }
        side()?;
        main()
    }

    /// A buffer for quantized rows if one of `against` wants them, else null.
    pub(super) fn q_for(&self, rows: usize, against: &[&MatrixParams], buffer: Ptr) -> Ptr {
        let wants = self.few(rows) && against.iter().any(|w| gemv::wants_q(w.codec(), self.exact));
        if wants { buffer } else { Ptr::NULL }
    }

    /// `y (rows, stride) (+)= w x`.
    pub(super) fn product(
        &self,
        w: &MatrixParams,
        x: Acts,
        rows: usize,
        y: Ptr,
        y_stride: usize,
        add: bool,
    ) -> Result<()> {
        self.product_exact(w, x, rows, y, y_stride, add, self.exact)
    }

    pub(super) fn product_exact(
        &self,
        w: &MatrixParams,
        x: Acts,
        rows: usize,
        y: Ptr,
        y_stride: usize,
        add: bool,
        exact: bool,
    ) -> Result<()> {
        let work = (self.s.work, self.s.work_bytes);
        let p = Product { add, exact, ..Product::of(*w, x, rows, (y, y_stride), work) };
        gemv::product(self.gpu, &p)
    }

    /// One matrix a head: rows of `x` are `xs.0` elements apart and heads `xs.1` (0: shared); of `y` likewise.
    pub(super) fn of_heads(
        &self,
        w: &Heads,
        heads: usize,
        x: Ptr,
        xs: (usize, usize),
        rows: usize,
        y: Ptr,
        ys: (usize, usize),
    ) -> Result<()> {
        let cols = w.first.cols as usize;
        let q = self.q_for(rows, &[&w.first], self.s.attn.act_q);
        if !q.is_null() {
            // A row's heads are evenly spaced, and rows follow on, so that (row, head) is one run of rows.
            quantize::rows(self.gpu, x, xs.1, rows * heads, cols, q)?;
        }
        self.of_heads_quantized(w, heads, (x, q), xs, rows, y, ys)
    }

    /// The same, with the quantized form of `x` already made if it is needed.
    pub(super) fn of_heads_quantized(
        &self,
        w: &Heads,
        heads: usize,
        (x, q): (Ptr, Ptr),
        xs: (usize, usize),
        rows: usize,
        y: Ptr,
        ys: (usize, usize),
    ) -> Result<()> {
        let cols = w.first.cols as usize;
        let x = Acts { f32: x, f32_stride: xs.0, q };
        let p = Product {
            exact: self.exact,
            heads,
            w_step: w.step,
            x_step: xs.1,
            q_step: if q.is_null() { 0 } else { quantize::row_bytes(cols) },
            y_step: ys.1,
            ..Product::of(w.first, x, rows, (y, ys.0), (self.s.work, self.s.work_bytes))
        };
        gemv::product(self.gpu, &p)
    }

    pub(super) fn bias(&self, l: &DevLinear, rows: usize, y: Ptr, stride: usize) -> Result<()> {
        if l.bias.is_null() {
            return Ok(());
        }
        act::add_bias(self.gpu, rows, l.w.rows as usize, y, stride, l.bias)
    }

    /// First hidden states, from tokens.
    pub fn embed(&self) -> Result<()> {
        embed::rows(self.gpu, &self.model.embed, self.rows.tokens(), self.rows.rows, self.s.x)
    }

    /// Cosines and sines, once a step.
    pub fn angles(&self) -> Result<()> {
        let (n, factor) = (self.rows.rows, self.model.attention_factor);
        let position = self.rows.map().position;
        rope::angles(self.gpu, self.pages.kind(), n, position, self.model.inv_freq, factor, self.turns(0))
    }

    /// The rotations of rows from `first` on.
    pub(super) fn turns(&self, first: usize) -> Turns {
        let dims = self.h.rope.dims;
        let interleaved = self.h.rope.pairs == RopePairs::Interleaved;
        Turns { at: self.s.turns.f32s(first * dims), half: dims / 2, interleaved }
    }

    /// What a layer's rows from `first` on see.
    pub(super) fn seen(&self, l: usize, layer: &DevLayer, first: usize) -> Seen {
        Seen {
            rows: self.rows.map().from_row(first),
            layer_offset: (l * self.pages.layer_bytes()) as u64,
            mask: layer.mask,
            kv: self.pages.kind(),
        }
    }

    /// One layer: adds both halves to the residual stream.
    pub fn layer(&self, l: usize) -> Result<()> {
        let layer = &self.model.layers[l];
        self.attention(l, layer)?;
        match &layer.ffn {
            DevFfn::Dense(m) => self.dense(layer, m),
            DevFfn::Moe(m) => self.moe(l, layer, m),
        }
    }

    /// Its first half.
    pub(super) fn attention(&self, l: usize, layer: &DevLayer) -> Result<()> {
        match &layer.attn {
            DevAttention::Mla(m) => self.mla(l, layer, m),
            DevAttention::Gqa(g) => self.gqa(l, layer, g),
        }
    }

    /// Layer `l` and its routed experts; asked of such layers only.
    pub(super) fn routed_layer(&self, l: usize) -> (&DevLayer, &DevMoe) {
        let layer = &self.model.layers[l];
        match &layer.ffn {
            DevFfn::Moe(m) => (layer, m),
            DevFfn::Dense(_) => unreachable!("layer {l} has no routed experts"),
        }
    }

    /// Normalizes the residual stream; quantizes it if one of `against` wants that.
    pub(super) fn norm(&self, weight: Ptr, against: &[&MatrixParams]) -> Result<Acts> {
        let (n, hidden) = (self.rows.rows, self.h.hidden);
        let q = self.q_for(n, against, self.s.normed_q);
        self.norm_rows(self.s.x, Ptr::NULL, n, weight, hidden, self.s.normed, q)?;
        Ok(Acts { f32: self.s.normed, f32_stride: hidden, q })
    }

    /// Normalizes contiguous rows, or those that `index` names.
    pub(super) fn norm_rows(
        &self,
        x: Ptr,
        index: Ptr,
        rows: usize,
        weight: Ptr,
        n: usize,
        y: Ptr,
        q: Ptr,
    ) -> Result<()> {
        norm::rms(self.gpu, &Norm { x, x_row: n, index, rows, weight, n, eps: self.h.norm_eps, y, q })
    }

    /// Rows `first..first + n`, each by itself, over the pages. `q` and `out` are theirs, and `out_q` if it is not null.
    pub(super) fn attend(
        &self,
        l: usize,
        layer: &DevLayer,
        (first, n): (usize, usize),
        q: Ptr,
        (out, out_q): (Ptr, Ptr),
        sinks: Ptr,
    ) -> Result<()> {
        let parts = (n <= SPLIT_ROWS).then_some(Parts { at: self.s.parts, rows: SPLIT_ROWS });
        let a = Attend {
            seen: self.seen(l, layer, first),
            heads: scratch::heads(self.h),
            n,
            q,
            scale: self.h.softmax_scale,
            sinks,
            out,
            out_q,
            parts,
            entries: self.entries,
        };
        attend::attend(self.gpu, &a)
    }

    /// The attention result through the output projection into the residual stream.
    /// `quantized`: that form of it is there already, if it is needed.
    pub(super) fn project(&self, o: &DevLinear, width: usize, quantized: bool) -> Result<()> {
        let (n, out) = (self.rows.rows, self.s.attn.out);
        let q = self.q_for(n, &[&o.w], self.s.attn.act_q);
        if !q.is_null() && !quantized {
            quantize::rows(self.gpu, out, width, n, width, q)?;
        }
        let x = Acts { f32: out, f32_stride: width, q };
        self.product(&o.w, x, n, self.s.x, self.h.hidden, true)?;
        self.bias(o, n, self.s.x, self.h.hidden)
    }
}
