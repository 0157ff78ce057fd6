//! The backend: weights, pages and buffers on one GPU, and the steps that run there.

use super::driver::Device;
use super::halves::runs_together;
use super::latent::{can_make, keeps_absorbed};
use super::memory::{Arena, Pinned, Ptr};
use super::model::DevModel;
use super::module::Gpu;
use super::pages::Pages;
use super::plan::Plan;
use super::rows::{ALONE_ROWS_MAX, Rows};
use super::scratch::{LOGIT_ROWS, Scratch};
use super::spans::{Recorded, Shape};
use super::step::Cx;
use super::stream::{Misses, Streamed};
use crate::backend::{Backend, Counters, Input, KvType, MlaOrder, Run, StepOutput, StepPlan};
use crate::kv::{self, PAGE_TOKENS, PageId};
use crate::model::{AttnHyper, Hyper, Mask};
use crate::units::{ExpertId, Result};
use std::collections::HashMap;

/// How the backend runs.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// f32 activations and KV throughout.
    pub exact: bool,
    /// Element type of the cache; f32 when exact, f16 otherwise, if not given.
    pub kv: Option<KvType>,
    /// KV pages.
    pub pages: usize,
    /// Most rows of a step.
    pub rows_max: usize,
    /// Threads that read and repack while loading.
    pub threads: usize,
    /// Record steps and replay them; without, every launch is made anew.
    pub graphs: bool,
    /// Most device bytes for routed experts; if not given, all of them where they fit, else what there is.
    pub expert_bytes: Option<u64>,
    /// All routed experts lie on the device, and this share of those asked for is declared missing: what measures streaming.
    pub fake_missing: Option<f32>,
}

impl CudaOptions {
    /// The cache's element type.
    pub fn kv_type(&self) -> KvType {
        self.kv.unwrap_or(if self.exact { KvType::F32 } else { KvType::F16 })
    }
}

/// The backend. Graphs are dropped before what they name.
pub struct CudaBackend {
    pub(super) graphs: HashMap<Shape, Recorded>,
    pub(super) rows: Rows,
    /// Logits and picks as the GPU copies them out.
    pub(super) out: Pinned,
    /// Where routed experts come and go; none where all are on the device.
    pub(super) streamed: Option<Streamed>,
    /// Layers with routed experts.
    pub(super) routed: Vec<usize>,
    /// Where routers write their picks: the scratch buffer, or host memory where experts come and go.
    pub(super) record: Ptr,
    pub(super) hyper: Hyper,
    pub(super) model: DevModel,
    pub(super) scratch: Scratch,
    pub(super) pages: Pages,
    pub(super) options: CudaOptions,
    pub(super) plan: Plan,
    pub(super) stride: usize,
    pub(super) counters: Counters,
    /// The memory behind every address above.
    pub(super) _arena: Arena,
    pub(super) gpu: Gpu,
}

impl CudaBackend {
    /// Bytes of the host buffer that a small step's logits and picks are copied to.
    pub(super) fn out_bytes(h: &Hyper, o: &CudaOptions) -> usize {
        let rows = o.rows_max.min(super::launch::gemv::ROWS_MAX);
        let picks = h.moe.as_ref().map_or(0, |m| h.n_layers * m.n_picked);
        4 * rows * (h.vocab + picks)
    }

    /// What routed experts were missing so far; none where all are on the device.
    pub fn misses(&self) -> Misses {
        self.streamed.as_ref().map_or(Misses::default(), |s| s.misses())
    }

    /// Device memory as planned.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.gpu.device
    }

    fn check(&self, plan: &StepPlan) {
        let rows: usize = plan.runs.iter().map(|r| r.rows).sum();
        assert!(rows >= 1 && rows <= self.options.rows_max, "{rows} rows of {}", self.options.rows_max);
        assert!(plan.layers.start <= plan.layers.end && plan.layers.end <= self.hyper.n_layers);
        for r in plan.runs {
            assert!(r.pages.len() >= kv::pages_for(r.position + r.rows, self.stride), "a short block table");
            if let Input::Tokens(ids) = r.input {
                assert!(ids.len() == r.rows && ids.iter().all(|&t| (t as usize) < self.hyper.vocab));
            }
        }
    }

    pub(super) fn cx(&self, replay: bool) -> Cx<'_> {
        Cx {
            gpu: &self.gpu,
            h: &self.hyper,
            model: &self.model,
            s: &self.scratch,
            pages: &self.pages,
            rows: &self.rows,
            exact: self.options.exact,
            record: self.record,
            outside: self.streamed_picks(),
            replay,
            entries: self.entries(),
        }
    }

    /// Block table entries that launches are made for: a power of two, so that a recorded step serves many positions.
    pub(super) fn entries(&self) -> usize {
        self.rows.entries.next_power_of_two()
    }

    /// True if each row of a run stands for itself.
    fn stands_alone(&self, r: &Run) -> bool {
        let kv = self.options.kv_type();
        match self.hyper.attn {
            AttnHyper::Mla { .. } => {
                let few = r.rows <= ALONE_ROWS_MAX;
                r.mla == MlaOrder::Absorbed || few || !can_make(&self.hyper, kv)
            }
            AttnHyper::Gqa { .. } => r.rows <= ALONE_ROWS_MAX || !runs_together(&self.hyper, kv),
        }
    }

    /// Picks of a row.
    pub(super) fn picks_of_row(&self) -> usize {
        self.hyper.moe.as_ref().map_or(0, |m| self.hyper.n_layers * m.n_picked)
    }

    /// A step of any shape.
    fn large_step(&mut self, plan: &StepPlan, out: &mut StepOutput) -> Result<()> {
        let mut streamed = self.streamed.take();
        if let Some(s) = &mut streamed {
            s.start(self.rows.rows);
        }
        let done = self.large_walk(plan, streamed.as_mut(), out);
        // Also after a failure: nothing that runs may use what is given back.
        let idle = self.gpu.device.synchronize();
        if let Some(s) = &mut streamed {
            s.idle();
        }
        self.streamed = streamed;
        done.and(idle)
    }

    fn large_walk(
        &self,
        plan: &StepPlan,
        mut streamed: Option<&mut Streamed>,
        out: &mut StepOutput,
    ) -> Result<()> {
        self.rows.send(&self.gpu.device)?;
        let cx = self.cx(plan.routes.is_some());
        cx.embed()?;
        self.inputs(plan)?;
        cx.angles()?;
        self.copy_hidden(plan, plan.layers.start, self.scratch.x, out)?;
        for l in plan.layers.clone() {
            self.any_layer(streamed.as_deref_mut(), l, plan.routes.is_some())?;
            if l + 1 < self.hyper.n_layers {
                self.copy_hidden(plan, l + 1, self.scratch.x, out)?;
            }
        }
        let vocab = self.hyper.vocab;
        if plan.layers.end == self.hyper.n_layers {
            self.final_hidden(plan, out)?;
            out.logits.resize(self.rows.wanted.len() * vocab, 0.0);
            for first in (0..self.rows.wanted.len()).step_by(LOGIT_ROWS) {
                let n = LOGIT_ROWS.min(self.rows.wanted.len() - first);
                cx.head(first, n)?;
                self.gpu
                    .device
                    .copy_out(&mut out.logits[first * vocab..][..n * vocab], self.scratch.logits)?;
            }
        }
        Ok(())
    }

    /// Hidden states and picks that come from outside.
    fn inputs(&self, plan: &StepPlan) -> Result<()> {
        let (hidden, picks) = (self.hyper.hidden, self.picks_of_row());
        let mut done = Ok(());
        self.rows.each_run(plan, |r, at, here| {
            if done.is_err() {
                return;
            }
            if let Input::Hidden(x) = r.input {
                done =
                    self.gpu.device.copy_in(self.scratch.x.f32s(here.start * hidden), &x[..r.rows * hidden]);
            }
            if let (Some(given), Ok(())) = (plan.routes, &done) {
                let from = &given[at.start * picks..at.end * picks];
                done = self.gpu.device.copy_in(self.scratch.given.f32s(here.start * picks), from);
            }
        });
        done
    }

    /// Copies hidden states out if the plan asks for number `index`.
    fn copy_hidden(&self, plan: &StepPlan, index: usize, x: Ptr, out: &mut StepOutput) -> Result<()> {
        let hidden = self.hyper.hidden;
        for (i, _) in plan.hidden.iter().enumerate().filter(|(_, n)| **n == index) {
            let to = &mut out.hidden[i];
            to.resize(self.rows.rows * hidden, 0.0);
            let mut done = Ok(());
            self.rows.each_run(plan, |_, at, here| {
                if done.is_ok() {
                    let to = &mut to[at.start * hidden..at.end * hidden];
                    done = self.gpu.device.copy_out(to, x.f32s(here.start * hidden));
                }
            });
            done?;
            // Before the next launch changes what is copied: copies are in stream order, but the vector may move.
            self.gpu.device.synchronize()?;
        }
        Ok(())
    }

    fn final_hidden(&self, plan: &StepPlan, out: &mut StepOutput) -> Result<()> {
        if !plan.hidden.contains(&self.hyper.n_layers) {
            return Ok(());
        }
        self.cx(false).final_norm()?;
        self.copy_hidden(plan, self.hyper.n_layers, self.scratch.normed, out)
    }

    /// Copies picks into the plan's order and counts distinct experts.
    fn routes(&mut self, plan: &StepPlan, made: &[ExpertId], out: &mut StepOutput) {
        let picks = self.picks_of_row();
        let Some(m) = self.hyper.moe.as_ref() else { return };
        let mut seen = vec![false; m.n_experts];
        for l in plan.layers.clone().filter(|&l| !m.dense[l]) {
            seen.fill(false);
            for row in made.chunks_exact(picks) {
                for &e in &row[l * m.n_picked..(l + 1) * m.n_picked] {
                    self.counters.experts_fetched +=
                        u64::from(!std::mem::replace(&mut seen[e as usize], true));
                }
            }
        }
        if plan.record_routes {
            let dense = &m.dense;
            self.rows.each_run(plan, |_, at, here| {
                out.routes[at.start * picks..at.end * picks]
                    .copy_from_slice(&made[here.start * picks..here.end * picks]);
            });
            for row in out.routes.chunks_exact_mut(picks) {
                let of_layers = row.chunks_exact_mut(m.n_picked).zip(dense);
                of_layers.filter(|(_, d)| **d).for_each(|(r, _)| r.fill(0));
            }
        }
    }
}

impl Backend for CudaBackend {
    fn step(&mut self, plan: &StepPlan, out: &mut StepOutput) -> Result<()> {
        self.check(plan);
        self.gpu.context().bind()?;
        let alone: Vec<bool> = plan.runs.iter().map(|r| self.stands_alone(r)).collect();
        self.rows.set(plan, &self.pages, self.stride, &alone)?;
        out.hidden.resize_with(plan.hidden.len(), Vec::new);
        out.logits.clear();
        out.routes.clear();
        let picks = self.rows.rows * self.picks_of_row();
        if plan.record_routes {
            out.routes.resize(picks, 0);
        }
        let tokens = plan.runs.iter().all(|r| matches!(r.input, Input::Tokens(_)));
        let plain =
            plan.hidden.is_empty() && plan.routes.is_none() && plan.layers == (0..self.hyper.n_layers);
        let small = tokens && plain && self.is_small();
        let logits = 4 * self.rows.wanted.len() * self.hyper.vocab;
        if small {
            self.small_step()?;
            out.logits.extend_from_slice(bytemuck::cast_slice(&self.out.bytes()[..logits]));
        } else {
            self.large_step(plan, out)?;
        }
        let made: Vec<ExpertId> = match &self.streamed {
            Some(s) => s.picks(self.rows.rows).to_vec(),
            None if small => bytemuck::cast_slice(&self.out.bytes()[logits..logits + 4 * picks]).to_vec(),
            None => {
                let mut picked = vec![0; picks];
                self.gpu.device.copy_out(&mut picked, self.scratch.made)?;
                self.gpu.device.synchronize()?;
                picked
            }
        };
        self.routes(plan, &made, out);
        self.count_pages(plan);
        Ok(())
    }

    fn rows_max(&self) -> usize {
        self.options.rows_max
    }

    fn page_bytes(&self) -> usize {
        self.pages.page_bytes()
    }

    fn kv_type(&self) -> KvType {
        self.options.kv_type()
    }

    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        self.gpu.context().bind()?;
        self.pages.copy(&self.gpu.device, from, to)
    }

    fn export(&self, pages: &[PageId], tokens: usize, out: &mut Vec<u8>) -> Result<()> {
        self.gpu.context().bind()?;
        self.pages.export(&self.gpu.device, pages, tokens, out)
    }

    fn import(&mut self, pages: &[PageId], tokens: usize, bytes: &[u8]) -> Result<()> {
        self.gpu.context().bind()?;
        self.pages.import(&self.gpu.device, pages, tokens, bytes)
    }

    fn prompt_order(&self) -> Option<MlaOrder> {
        keeps_absorbed(&self.hyper).then_some(MlaOrder::Absorbed)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl CudaBackend {
    /// Counts the page reads that the rows' masks ask for: one for each (page, layer, row).
    fn count_pages(&mut self, plan: &StepPlan) {
        for l in plan.layers.clone() {
            let mask = self.hyper.masks[l];
            for r in plan.runs {
                let rows = r.position..r.position + r.rows;
                self.counters.kv_pages_read += rows.map(|i| pages_seen(mask, i)).sum::<u64>();
            }
        }
    }
}

/// Pages that the row at `i` sees.
fn pages_seen(mask: Mask, i: usize) -> u64 {
    let group = mask.stride() * PAGE_TOKENS;
    let n = match mask {
        Mask::Full => i / PAGE_TOKENS + 1,
        Mask::Sliding { window } => i / PAGE_TOKENS - (i + 1).saturating_sub(window) / PAGE_TOKENS + 1,
        Mask::Strided { .. } => i / group + 1,
        Mask::LocalStrided { window, stride } => {
            // The last slot up to `i` of every page: within the window, or of the row's own residue.
            let seen = |index: &usize| {
                let residue = index % stride;
                let start = index / stride * group + residue;
                if start > i {
                    return false;
                }
                let last = start + ((i - start) / stride).min(PAGE_TOKENS - 1) * stride;
                residue == i % stride || i - last < window
            };
            (0..(i / group + 1) * stride).filter(seen).count()
        }
    };
    n as u64
}
