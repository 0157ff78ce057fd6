//! The rest of a step: grouped-query attention, feed-forward halves, and the head.

use super::launch::expert::{self, Grouped, Step};
use super::launch::flash::{self, Flash, Keys};
use super::launch::gemv::{self, Acts, Swiglu};
use super::launch::router::{self, Router, RouterFew};
use super::launch::{quantize, rope};
use super::memory::Ptr;
use super::model::{DevGqa, DevLayer, DevMlp, DevMoe};
use super::params::MatrixParams;
use super::rows::Together;
use super::step::{Cx, experts_of};
use crate::format::layout::GROUP;
use crate::model::AttnHyper;
use crate::units::Result;

/// Which of a layer's routed work a launch does.
#[derive(Debug, Clone, Copy)]
pub enum Part {
    /// All of it.
    All,
    /// Rows from the first number on, as many as the second: where picks run by row.
    Rows(usize, usize),
    /// Experts from the first number to before the second: where rows are grouped by expert.
    Experts(u32, u32),
}

impl Cx<'_> {
    pub(super) fn gqa(&self, l: usize, layer: &DevLayer, g: &DevGqa) -> Result<()> {
        let AttnHyper::Gqa { n_heads, n_kv_heads, head_dim, qk_norm, clip } = self.h.attn else {
            unreachable!("a layer of grouped-query attention")
        };
        let (n, a) = (self.rows.rows, &self.s.attn);
        let (qw, kw) = (n_heads * head_dim, n_kv_heads * head_dim);
        let [q, k, v] = &g.qkv;
        let x = self.norm(layer.attn_norm, &[&q.w, &k.w, &v.w])?;
        for (l, y, width) in [(q, a.q, qw), (k, a.k, kw), (v, a.v, kw)] {
            self.product(&l.w, x, n, y, width, false)?;
        }
        let append = rope::GqaAppend {
            seen: self.seen(l, layer, 0),
            n,
            q: (a.q, qw),
            k: (a.k, kw),
            v: (a.v, kw),
            bias: g.qkv.map(|l| l.bias),
            norm: (qk_norm, g.norms),
            eps: self.h.norm_eps,
            clip,
            turns: self.turns(0),
            heads: n_heads,
            kv_heads: n_kv_heads,
            d: head_dim,
        };
        rope::gqa_append(self.gpu, &append)?;
        let alone = self.rows.alone;
        // Attention can quantize what it gives, if it gives all of it and heads are in whole groups.
        let quantized = alone == n && head_dim.is_multiple_of(GROUP);
        if alone > 0 {
            let q = if quantized { self.q_for(n, &[&g.o.w], a.act_q) } else { Ptr::NULL };
            self.attend(l, layer, (0, alone), a.q, (a.out, q), g.sinks)?;
        }
        for run in &self.rows.together {
            self.gqa_run(l, layer, g, run)?;
        }
        self.project(&g.o, qw, quantized)
    }

    /// A run whose rows attend together.
    fn gqa_run(&self, l: usize, layer: &DevLayer, g: &DevGqa, run: &Together) -> Result<()> {
        let AttnHyper::Gqa { n_heads, n_kv_heads, head_dim, .. } = self.h.attn else {
            unreachable!("a layer of grouped-query attention")
        };
        let width = n_heads * head_dim;
        let f = Flash {
            seen: self.seen(l, layer, run.first),
            n: run.rows,
            heads: n_heads,
            some_heads: (0, n_heads),
            d: head_dim,
            dv: head_dim,
            q: self.s.attn.q.f32s(run.first * width),
            q_stride: width,
            scale: self.h.softmax_scale,
            sinks: g.sinks,
            keys: Keys::Cached { kv_heads: n_kv_heads },
            out: self.s.attn.out.f32s(run.first * width),
        };
        flash::flash(self.gpu, &f)
    }

    pub(super) fn dense(&self, layer: &DevLayer, m: &DevMlp) -> Result<()> {
        let x = self.norm(layer.ffn_norm, &[&m.gate, &m.up])?;
        self.mlp(m, x, self.s.ffn.act, self.s.ffn.act_q)
    }

    /// A SwiGLU of all rows, added to the residual stream.
    fn mlp(&self, m: &DevMlp, x: Acts, act: Ptr, act_q: Ptr) -> Result<()> {
        let act_q = self.swiglu(m, x, act, act_q)?;
        self.down(m, act, act_q)
    }

    /// Its first half; returns the quantized activations' address, null if there are none.
    fn swiglu(&self, m: &DevMlp, x: Acts, act: Ptr, act_q: Ptr) -> Result<Ptr> {
        let act_q = self.q_for(self.rows.rows, &[&m.down], act_q);
        let s = Swiglu {
            gate: m.gate,
            up: m.up,
            x,
            rows: self.rows.rows,
            act,
            act_q,
            exact: self.exact,
            scratch: self.s.work,
            scratch_bytes: self.s.work_bytes,
        };
        gemv::swiglu(self.gpu, &s)?;
        Ok(act_q)
    }

    /// Its second half.
    fn down(&self, m: &DevMlp, act: Ptr, q: Ptr) -> Result<()> {
        let x = Acts { f32: act, f32_stride: m.gate.rows as usize, q };
        self.product(&m.down, x, self.rows.rows, self.s.x, self.h.hidden, true)
    }

    /// The matrices that a layer's normalized rows meet.
    fn against(d: &DevMoe) -> Vec<&MatrixParams> {
        let mut all = vec![&d.shape.gate, &d.shape.up];
        all.extend(d.shared.iter().flat_map(|s| [&s.gate, &s.up]));
        all
    }

    pub(super) fn moe(&self, l: usize, layer: &DevLayer, d: &DevMoe) -> Result<()> {
        let x = self.norm(layer.ffn_norm, &Self::against(d))?;
        let all = || {
            self.route(l, d, x)?;
            self.routed(d, x, Part::All)
        };
        match early(d) {
            Some(shared) => self.beside(self.rows.rows, || self.shared_first(shared, x), all)?,
            None => all()?,
        }
        self.shared_last(d, x)
    }

    /// A layer's work up to where its picks are known: attention, norm, router, and what needs no routed expert.
    pub(super) fn to_picks(&self, l: usize) -> Result<()> {
        let (layer, d) = self.routed_layer(l);
        self.attention(l, layer)?;
        let x = self.norm(layer.ffn_norm, &Self::against(d))?;
        match early(d) {
            Some(s) => self.beside(self.rows.rows, || self.shared_first(s, x), || self.route(l, d, x)),
            None => self.route(l, d, x),
        }
    }

    /// The rest of the layer, once the picked experts of `part` are in memory; [`Cx::shared_last`] follows the last part.
    pub(super) fn routed_part(&self, l: usize, part: Part) -> Result<()> {
        let (_, d) = self.routed_layer(l);
        self.routed(d, self.normed(d), part)
    }

    /// What [`Cx::norm`] gave for this layer.
    fn normed(&self, d: &DevMoe) -> Acts {
        let q = self.q_for(self.rows.rows, &Self::against(d), self.s.normed_q);
        Acts { f32: self.s.normed, f32_stride: self.h.hidden, q }
    }

    /// The shared experts' first half needs nothing of the routed ones; both add to the residual stream in turn.
    fn shared_first(&self, shared: &DevMlp, x: Acts) -> Result<()> {
        self.swiglu(shared, x, self.s.ffn.shared, self.s.ffn.shared_q).map(drop)
    }

    /// Ends a layer's second half: the shared experts into the residual stream.
    fn shared_last(&self, d: &DevMoe, x: Acts) -> Result<()> {
        let f = &self.s.ffn;
        match &d.shared {
            None => Ok(()),
            Some(s) if early(d).is_none() => self.mlp(s, x, f.shared, f.shared_q),
            Some(s) => self.down(s, f.shared, self.q_for(self.rows.rows, &[&s.down], f.shared_q)),
        }
    }

    /// The same after [`Cx::routed_part`].
    pub(super) fn after_parts(&self, l: usize) -> Result<()> {
        let (_, d) = self.routed_layer(l);
        self.shared_last(d, self.normed(d))
    }

    /// Picks experts for every row; groups the picks where that is how they are run.
    fn route(&self, l: usize, d: &DevMoe, x: Acts) -> Result<()> {
        let m = self.h.moe.as_ref().expect("a layer with experts");
        let (n, f) = (self.rows.rows, &self.s.ffn);
        let route = Router {
            logits: f.router,
            rows: n,
            bias: d.bias,
            given: if self.replay { self.s.given } else { Ptr::NULL },
            record: self.record,
            outside: self.outside,
            route: (self.h.n_layers * m.n_picked, l * m.n_picked),
            picks: f.picks,
        };
        // A routing decision is worth full precision, whatever the codec.
        if router::few_unit(m, d.router.codec(), n).is_some() {
            let few = RouterFew {
                w: d.router,
                x: x.f32,
                x_row: x.f32_stride,
                scratch: self.s.router_few,
                pick: route,
            };
            router::few(self.gpu, m, &few)?;
        } else {
            self.product_exact(&d.router, x, n, f.router, m.n_experts, false, true)?;
            router::pick(self.gpu, m, &route)?;
        }
        if !self.is_grouped() {
            return Ok(());
        }
        let picks = n * m.n_picked;
        let grouped = Grouped::at(f.grouped, picks, m.n_experts);
        expert::group(self.gpu, &experts_of(d, m), f.picks, picks, &grouped)
    }

    /// True if routed experts run by expert, not by row and pick.
    pub(super) fn is_grouped(&self) -> bool {
        self.rows.rows > gemv::ROWS_MAX && !self.exact
    }

    /// The routed experts, added to the residual stream.
    fn routed(&self, d: &DevMoe, x: Acts, part: Part) -> Result<()> {
        let m = self.h.moe.as_ref().expect("a layer with experts");
        let (n, f) = (self.rows.rows, &self.s.ffn);
        let e = experts_of(d, m);
        let (first, rows) = match part {
            Part::Rows(first, rows) => (first, rows),
            Part::All | Part::Experts(..) => (0, n),
        };
        assert!((first, rows) == (0, n) || !self.is_grouped(), "rows are grouped together");
        // From the first row's on; quantized rows follow each other.
        let q_at = |q: Ptr, cols: usize, rows: usize| {
            if q.is_null() { q } else { q.at((rows * quantize::row_bytes(cols)) as u64) }
        };
        let (width, picks) = (e.gate.rows as usize, first * m.n_picked);
        let x = Acts {
            f32: x.f32.f32s(first * x.f32_stride),
            f32_stride: x.f32_stride,
            q: q_at(x.q, e.gate.cols as usize, first),
        };
        let grouped = Grouped::at(f.grouped, n * m.n_picked, m.n_experts);
        let step = Step {
            rows,
            picks: f.picks.at(expert::picks_bytes(picks) as u64),
            grouped: &grouped,
            act: f.act.f32s(picks * width),
            act_q: q_at(self.q_for(n, &[&e.down], f.act_q), width, picks),
            exact: self.exact,
            experts: match part {
                Part::Experts(first, end) => (first, end),
                _ => (0, m.n_experts as u32),
            },
            scratch: self.s.work,
            scratch_bytes: self.s.work_bytes,
        };
        expert::gate_up(self.gpu, &e, &x, &step)?;
        expert::down(self.gpu, &e, &step, self.s.x.f32s(first * self.h.hidden))
    }

    /// Final norm and logits of wanted rows `first..first + n` into the logits buffer.
    pub fn head(&self, first: usize, n: usize) -> Result<()> {
        let hidden = self.h.hidden;
        let index = self.rows.wanted_at().f32s(first);
        let (s, head) = (self.s, &self.model.head);
        let q = self.q_for(n, &[head], s.normed_q);
        self.norm_rows(s.x, index, n, self.model.final_norm, hidden, s.normed, q)?;
        let x = Acts { f32: s.normed, f32_stride: hidden, q };
        self.product(head, x, n, s.logits, self.h.vocab, false)
    }

    /// The final norm of every row, as f32.
    pub fn final_norm(&self) -> Result<()> {
        let (n, hidden) = (self.rows.rows, self.h.hidden);
        self.norm_rows(self.s.x, Ptr::NULL, n, self.model.final_norm, hidden, self.s.normed, Ptr::NULL)
    }
}

/// The shared experts, if their first half may run before the routed ones. Different codecs take working memory, which the
/// routed part may be using.
fn early(d: &DevMoe) -> Option<&DevMlp> {
    d.shared.as_ref().filter(|s| s.gate.codec == s.up.codec)
}

/// True if grouped-query attention of whole runs has a kernel for this model.
pub fn runs_together(h: &crate::model::Hyper, kv: crate::backend::KvType) -> bool {
    match h.attn {
        AttnHyper::Gqa { n_heads, head_dim, .. } => {
            flash::unit(kv, head_dim, head_dim, &[n_heads * head_dim], true).is_some()
        }
        AttnHyper::Mla { .. } => false,
    }
}
