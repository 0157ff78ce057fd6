//! The CPU backend: a team of threads and the kernels they run. The scalar kernels are the definition of every number
//! that the program computes; AVX2, AVX-512 and NEON give the same bits.

mod attend_half;
mod attend_units;
mod attention;
pub(super) mod cache;
mod ffn;
pub mod isa;
pub mod kernels;
pub mod ops;
mod scratch;
mod step;
#[cfg(test)]
mod step_tests;
pub mod team;

pub use isa::Isa;
pub use ops::{KvBlock, Ops, Out, Q8Rows, Rows};
pub use team::Team;

use crate::backend::{Backend, Counters, KvType, Pulse, StepOutput, StepPlan, Workers};
use crate::kv::PageId;
use crate::model::{Attention, Ffn, Hyper, Model};
use crate::units::Result;
use crate::weights::{ExpertSource, Matrix};
use attend_half::AttnScratch;
use cache::Cache;
use ffn::{FfnScratch, Routes};
use scratch::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use step::{Acts, Ctx, Lines, Product};

/// How the CPU backend runs.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Threads, the caller's included.
    pub threads: usize,
    /// How long an idle worker spins before it sleeps.
    pub spin_us: u64,
    /// Instruction set; the best one that the machine has if not given.
    pub isa: Option<Isa>,
    /// f32 activations and KV throughout; without, 12-bit activations against quantized weights.
    pub exact: bool,
    /// Element type of the cache; f32 when exact, f16 otherwise, if not given.
    pub kv: Option<KvType>,
    /// KV pages.
    pub pages: usize,
    /// Most rows of a step.
    pub rows_max: usize,
    /// Read every page and mask element by element: what sparse reading is tested against.
    pub dense_masks: bool,
}

impl CpuOptions {
    /// The cache's element type.
    pub fn kv_type(&self) -> KvType {
        self.kv.unwrap_or(if self.exact { KvType::F32 } else { KvType::F16 })
    }
}

/// Bytes of one KV page of a model, all layers.
pub fn page_bytes(h: &Hyper, kv: KvType) -> usize {
    crate::backend::serial_bytes(h, kv, crate::kv::PAGE_TOKENS)
}

/// Bytes of the buffers that a step works in.
pub fn scratch_bytes(h: &Hyper, o: &CpuOptions) -> u64 {
    // The buffers' pages are committed when first written, so that making them to count them costs nothing.
    let workers = o.threads.clamp(1, crate::limits::THREADS_MAX);
    let attn = AttnScratch::new(h, o.rows_max, workers).len();
    let ffn = FfnScratch::new(h, o.rows_max).len();
    ((attn + ffn + 2 * o.rows_max * h.hidden) * 4 + o.rows_max * h.hidden * 9 / 8) as u64
}

/// What the phases of a step share. A macro, because a method would borrow the buffers that they write too.
macro_rules! ctx {
    ($self:ident, $model:expr) => {
        Ctx {
            model: $model,
            ops: $self.ops,
            team: &$self.team,
            cache: &$self.cache,
            exact: $self.options.exact,
            dense_masks: $self.options.dense_masks,
        }
    };
}

/// The backend.
pub struct CpuBackend {
    model: Arc<Model>,
    experts: Arc<dyn ExpertSource>,
    ops: Ops,
    team: Team,
    cache: Cache,
    options: CpuOptions,
    /// Some product with a row of the residual stream takes quantized activations.
    quantize: bool,
    lines: Lines,
    /// `(rows, hidden)`: the residual stream, and its normalized copy.
    x: Shared,
    normed: Shared,
    q8: Q8Rows,
    attn: AttnScratch,
    ffn: FfnScratch,
    wanted: Vec<usize>,
    plan_row: Vec<u32>,
    counters: Counters,
    pulse: Arc<Pulse>,
}

impl CpuBackend {
    /// Starts the team and takes memory for pages and scratch; an error if there is none for the pages.
    pub fn new(model: Arc<Model>, experts: Arc<dyn ExpertSource>, options: CpuOptions) -> Result<CpuBackend> {
        let h = &model.hyper;
        let rows = options.rows_max;
        let team = Team::new(options.threads, options.spin_us);
        let quantize = !options.exact && has_quantized(&model);
        Ok(CpuBackend {
            quantize,
            ops: Ops::new(options.isa.unwrap_or_else(Isa::best)),
            cache: Cache::new(h, options.kv_type(), options.pages)?,
            lines: Lines::default(),
            x: Shared::zeroed(rows * h.hidden),
            normed: Shared::zeroed(rows * h.hidden),
            q8: Q8Rows::with_capacity(rows * h.hidden),
            attn: AttnScratch::new(h, rows, team.workers()),
            ffn: FfnScratch::new(h, rows),
            wanted: Vec::with_capacity(rows),
            plan_row: Vec::with_capacity(rows),
            counters: Counters::default(),
            pulse: Arc::default(),
            team,
            model,
            experts,
            options,
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.ops.isa()
    }

    /// The worker team, for measuring the machine.
    pub fn team(&self) -> &Team {
        &self.team
    }

    fn check(&self, plan: &StepPlan) {
        let h = &self.model.hyper;
        let rows: usize = plan.runs.iter().map(|r| r.rows).sum();
        assert!(
            rows >= 1 && rows <= self.options.rows_max,
            "{rows} rows in a step of {}",
            self.options.rows_max
        );
        assert!(plan.layers.start <= plan.layers.end && plan.layers.end <= h.n_layers);
        let stride = h.masks.iter().map(|m| m.stride()).max().unwrap_or(1);
        for r in plan.runs {
            assert!(r.rows >= 1);
            assert!(
                r.pages.len() >= crate::kv::pages_for(r.position + r.rows, stride),
                "a run's block table is short"
            );
            if let crate::backend::Input::Tokens(ids) = r.input {
                assert_eq!(ids.len(), r.rows);
                assert!(
                    ids.iter().all(|&t| (t as usize) < h.vocab),
                    "token ids are checked where they enter"
                );
            }
        }
    }

    /// Copies hidden states out, if the plan asks for number `index`.
    fn copy_hidden(
        plan: &StepPlan,
        lines: &Lines,
        x: &Shared,
        hidden: usize,
        index: usize,
        out: &mut StepOutput,
    ) {
        for (i, _) in plan.hidden.iter().enumerate().filter(|(_, n)| **n == index) {
            let to = &mut out.hidden[i];
            to.resize(lines.len() * hidden, 0.0);
            lines.in_plan_order(plan, |at, row| {
                to[at * hidden..(at + 1) * hidden].copy_from_slice(x.part(row * hidden..(row + 1) * hidden));
            });
        }
    }

    /// Final norm, and logits of the rows that want them.
    fn head(&mut self, plan: &StepPlan, out: &mut StepOutput) {
        let model = self.model.clone();
        let h = &model.hyper;
        step::wanted(plan, &self.lines, &mut self.wanted);
        let final_index = h.n_layers;
        if plan.hidden.contains(&final_index) {
            let ctx = ctx!(self, &model);
            ctx.norm(self.lines.len(), &self.x, &model.final_norm, &self.normed, &mut self.q8, false);
            Self::copy_hidden(plan, &self.lines, &self.normed, h.hidden, final_index, out);
        }
        let n = self.wanted.len();
        out.logits.resize(n * h.vocab, 0.0);
        if n == 0 {
            return;
        }
        // Wanted rows move to the front; they are in no particular order, so through the other buffer.
        let normed = self.normed.all_mut();
        for (i, &row) in self.wanted.iter().enumerate() {
            let from = self.x.part(row * h.hidden..(row + 1) * h.hidden);
            normed[i * h.hidden..(i + 1) * h.hidden].copy_from_slice(from);
        }
        self.x.all_mut()[..n * h.hidden].copy_from_slice(&normed[..n * h.hidden]);
        let ctx = ctx!(self, &model);
        let quantize = ctx.wants_q8(&model.head);
        ctx.norm(n, &self.x, &model.final_norm, &self.normed, &mut self.q8, quantize);
        let x = Acts { f32: self.normed.part(0..n * h.hidden), q8: &self.q8 };
        let product = Product { w: &model.head, rows: Rows::All(n), out: Out::new(&mut out.logits, h.vocab) };
        ctx.products(&[product], x);
    }
}

/// True if any matrix whose input is the residual stream is quantized.
fn has_quantized(model: &Model) -> bool {
    let dense = |m: &Matrix| m.codec.is_dense();
    let attn = |a: &Attention| match a {
        Attention::Gqa(g) => dense(&g.q.w) && dense(&g.k.w) && dense(&g.v.w),
        Attention::Mla(m) => dense(&m.kv_a.w) && m.q_a.as_ref().map_or(dense(&m.q_b.w), |(a, _)| dense(&a.w)),
    };
    // Routed experts are behind their source; a model that quantizes them has a hidden size in whole groups.
    let ffn = |f: &Ffn| match f {
        Ffn::Dense(m) => dense(&m.gate) && dense(&m.up),
        Ffn::Moe(m) => m.shared.as_ref().is_none_or(|s| dense(&s.gate) && dense(&s.up)),
    };
    let all_dense = model.layers.iter().all(|l| attn(&l.attn) && ffn(&l.ffn)) && model.hyper.moe.is_none();
    !all_dense && model.hyper.hidden.is_multiple_of(crate::format::layout::GROUP)
}

impl Backend for CpuBackend {
    fn step(&mut self, plan: &StepPlan, out: &mut StepOutput) -> Result<()> {
        self.check(plan);
        let model = self.model.clone();
        let h = &model.hyper;
        self.lines.set(plan);
        let rows = self.lines.len();
        self.plan_row.resize(rows, 0);
        self.lines.in_plan_order(plan, |at, row| self.plan_row[row] = at as u32);
        out.hidden.resize_with(plan.hidden.len(), Vec::new);
        let n_picked = h.moe.as_ref().map_or(0, |m| m.n_picked);
        out.routes.clear();
        out.margins.clear();
        if plan.record_routes {
            out.routes.resize(rows * h.n_layers * n_picked, 0);
            out.margins.resize(rows * h.n_layers, f32::INFINITY);
        }
        let ctx = ctx!(self, &model);
        step::embed(ctx, plan, &self.lines, &self.x);
        Self::copy_hidden(plan, &self.lines, &self.x, h.hidden, plan.layers.start, out);
        self.attn.angles(ctx, &self.lines);
        for l in plan.layers.clone() {
            self.pulse.beat();
            let layer = &model.layers[l];
            ctx.norm(rows, &self.x, &layer.attn_norm, &self.normed, &mut self.q8, self.quantize);
            let x = Acts { f32: self.normed.part(0..rows * h.hidden), q8: &self.q8 };
            match &layer.attn {
                Attention::Gqa(g) => self.attn.gqa(ctx, l, layer, g, plan, &self.lines, x, &self.x),
                Attention::Mla(m) => self.attn.mla(ctx, l, layer, m, plan, &self.lines, x, &self.x),
            }
            ctx.norm(rows, &self.x, &layer.ffn_norm, &self.normed, &mut self.q8, self.quantize);
            let x = Acts { f32: self.normed.part(0..rows * h.hidden), q8: &self.q8 };
            match &layer.ffn {
                Ffn::Dense(mlp) => self.ffn.dense(ctx, mlp, rows, x, &self.x),
                Ffn::Moe(moe) => {
                    let m = h.moe.as_ref().expect("a layer with experts");
                    let mut routes = Routes {
                        given: plan.routes,
                        record: &mut out.routes,
                        margins: &mut out.margins,
                        plan_row: &self.plan_row,
                    };
                    let source = &*self.experts;
                    let used = self.ffn.moe(ctx, source, l, (moe, m), rows, x, &self.x, &mut routes)?;
                    self.counters.experts_fetched += used;
                }
            }
            if l + 1 < h.n_layers {
                Self::copy_hidden(plan, &self.lines, &self.x, h.hidden, l + 1, out);
            }
        }
        self.counters.kv_pages_read = self.attn.pages_read.load(Ordering::Relaxed);
        if plan.layers.end == h.n_layers {
            self.head(plan, out);
        }
        Ok(())
    }

    fn rows_max(&self) -> usize {
        self.options.rows_max
    }

    fn page_bytes(&self) -> usize {
        self.cache.page_bytes()
    }

    fn kv_type(&self) -> KvType {
        self.options.kv_type()
    }

    fn discard(&mut self, pages: &[PageId]) -> u64 {
        self.cache.discard(pages)
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        self.cache.copy_page(from, to);
        Ok(())
    }

    fn export(&self, pages: &[PageId], tokens: usize, out: &mut Vec<u8>) -> Result<()> {
        self.cache.export(pages, tokens, out);
        Ok(())
    }

    fn import(&mut self, pages: &[PageId], tokens: usize, bytes: &[u8]) -> Result<()> {
        self.cache.import(pages, tokens, bytes);
        Ok(())
    }

    fn set_workers(&mut self, workers: Workers) {
        if workers.threads.clamp(1, crate::limits::THREADS_MAX) != self.team.workers() {
            self.team = Team::new(workers.threads, workers.spin_us);
            // Each worker has its own part of the scratch.
            let read = self.attn.pages_read.load(Ordering::Relaxed);
            self.attn = AttnScratch::new(&self.model.hyper, self.options.rows_max, self.team.workers());
            self.attn.pages_read.store(read, Ordering::Relaxed);
        }
        self.team.set_spin_us(workers.spin_us);
    }

    fn set_pulse(&mut self, pulse: Arc<Pulse>) {
        self.pulse = pulse;
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
