//! The backend: weights, pages and buffers on one GPU, and the steps that run there.

use super::driver::Device;
use super::graph::Graph;
use super::halves::runs_together;
use super::latent::can_make;
use super::memory::{Arena, Pinned, Ptr};
use super::model::{DevFfn, DevModel, Walk};
use super::module::Gpu;
use super::pages::{Pages, page_bytes};
use super::rows::{ALONE_ROWS_MAX, Rows};
use super::scratch::{LOGIT_ROWS, Scratch};
use super::step::{Cx, experts_of};
use super::weights::Stored;
use super::{units, weights};
use crate::backend::{Backend, Counters, Input, KvType, MlaOrder, Run, StepOutput, StepPlan};
use crate::kv::{self, PAGE_TOKENS, PageId};
use crate::model::{AttnHyper, Bound, Hyper, Mask, Model, build};
use crate::units::{Bytes, Error, ExpertId, Result};
use crate::weights::{Matrix, MatrixJob, ResidentExperts, Source};
use std::collections::HashMap;

/// Runs side by side whose whole contexts the block of page addresses has room for.
const RUNS: usize = 64;

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
}

impl CudaOptions {
    /// The cache's element type.
    pub fn kv_type(&self) -> KvType {
        self.kv.unwrap_or(if self.exact { KvType::F32 } else { KvType::F16 })
    }
}

/// Device memory that a model takes, before it takes any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Weights but for routed experts.
    pub resident_bytes: u64,
    /// Routed experts.
    pub expert_bytes: u64,
    /// Norms, biases and tables.
    pub vector_bytes: u64,
    /// KV pages.
    pub kv_bytes: u64,
    /// Buffers of a step.
    pub scratch_bytes: u64,
}

impl Plan {
    /// All weights.
    pub fn weight_bytes(&self) -> u64 {
        self.resident_bytes + self.expert_bytes + self.vector_bytes
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.weight_bytes() + self.kv_bytes + self.scratch_bytes
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [w, k, s] = [self.weight_bytes(), self.kv_bytes, self.scratch_bytes].map(Bytes);
        write!(f, "GPU memory: weights {w}, KV {k}, scratch {s}")
    }
}

/// Which recorded step: rows, rows that want logits, and block table entries.
type Shape = (usize, usize, usize);

/// A recorded step, or that it ran once (so that everything is loaded) and may be recorded.
enum Recorded {
    Ran,
    Graph(Graph),
}

/// The backend. Graphs are dropped before what they name.
pub struct CudaBackend {
    graphs: HashMap<Shape, Recorded>,
    rows: Rows,
    /// Logits and picks as the GPU copies them out.
    out: Pinned,
    hyper: Hyper,
    model: DevModel,
    scratch: Scratch,
    pages: Pages,
    options: CudaOptions,
    plan: Plan,
    stride: usize,
    counters: Counters,
    /// The memory behind every address above.
    _arena: Arena,
    gpu: Gpu,
}

/// Room in the page address block.
fn pages_named(h: &Hyper, o: &CudaOptions) -> usize {
    let stride = h.masks.iter().map(|m| m.stride()).max().unwrap_or(1);
    o.pages.min(kv::pages_for(h.context_tokens, stride)) * RUNS.min(o.rows_max)
}

/// A bound model laid out for a GPU, nothing of it loaded yet.
pub struct Draft {
    jobs: Vec<MatrixJob>,
    stored: Vec<Stored>,
    groups: Vec<Vec<usize>>,
    model: Model,
    experts: ResidentExperts,
    /// Shapes; every address is null.
    shape: DevModel,
    options: CudaOptions,
    /// Device memory that it will take.
    pub plan: Plan,
}

impl Draft {
    /// Lays a model out and checks that the kernels can run it.
    pub fn new(source: &Source, bound: Bound, options: CudaOptions) -> Result<Draft> {
        let (jobs, expert_jobs) = (bound.jobs.clone(), bound.expert_jobs);
        let stored = weights::stored(source, &jobs, options.exact)?;
        let shells = stored.iter().map(|s| Matrix::shell(s.codec, s.rows, s.cols)).collect();
        let (model, experts) = build(source, bound, shells)?;
        let mut walk = Walk::plan(&stored);
        let shape = walk.model(&model, experts.layers())?;
        check(&model.hyper, &shape, &options)?;
        let plan = plan(&model.hyper, &shape, &walk, &stored, expert_jobs, &options);
        let groups = walk.groups;
        Ok(Draft { jobs, stored, groups, model, experts, shape, options, plan })
    }

    /// Refuses what the GPU has no room for now.
    pub fn check_memory(&self, gpu: &Gpu) -> Result<()> {
        let (free, total) = gpu.context().memory_bytes()?;
        if self.plan.total_bytes() <= free {
            return Ok(());
        }
        Err(Error::Limit {
            what: "GPU memory".into(),
            needs: format!("{} ({})", Bytes(self.plan.total_bytes()), self.plan),
            has: format!("{} free of {}", Bytes(free), Bytes(total)),
        })
    }
}

impl CudaBackend {
    /// Loads a drafted model onto the GPU. `progress` gets the file bytes read so far.
    pub fn load(gpu: Gpu, source: &Source, draft: Draft, progress: &dyn Fn(u64)) -> Result<CudaBackend> {
        draft.check_memory(&gpu)?;
        let Draft { jobs, stored, groups, model, experts, shape, options, plan } = draft;
        let h = model.hyper.clone();
        let named = |e: Error| match e {
            Error::Limit { what, needs, has } => {
                Error::Limit { what, needs: format!("{needs} ({plan})"), has }
            }
            e => e,
        };
        let mut arena = Arena::new(gpu.context());
        let places = weights::place(&mut arena, &stored, &groups).map_err(named)?;
        let vectors = arena.take(plan.vector_bytes as usize).map_err(named)?;
        let pages = Pages::new(&mut arena, &h, options.kv_type(), options.pages).map_err(named)?;
        let scratch = Scratch::new(&mut arena, &h, &shape, options.rows_max).map_err(named)?;
        let pages_max = pages_named(&h, &options);
        let rows = Rows::new(gpu.context(), &mut arena, options.rows_max, pages_max).map_err(named)?;
        weights::load(&gpu.device, source, &jobs, &stored, &places, options.threads, progress)?;
        let mut walk = Walk::with(&stored, &places, vectors);
        let dev = walk.model(&model, experts.layers())?;
        gpu.device.copy_in(vectors, &walk.vectors)?;
        if !scratch.router_few.is_null() {
            gpu.device.zero(scratch.router_few, 4)?;
        }
        gpu.device.synchronize()?;
        gpu.prepare(&units::of(&dev, &h, options.kv_type(), options.rows_max, options.exact))?;
        let picks = h.moe.as_ref().map_or(0, |m| options.rows_max * h.n_layers * m.n_picked);
        let out = 4 * (LOGIT_ROWS.min(options.rows_max) * h.vocab + picks);
        Ok(CudaBackend {
            graphs: HashMap::new(),
            rows,
            out: Pinned::new(gpu.context(), out)?,
            stride: h.masks.iter().map(|m| m.stride()).max().unwrap_or(1),
            hyper: h,
            model: dev,
            scratch,
            pages,
            options,
            plan,
            counters: Counters::default(),
            _arena: arena,
            gpu,
        })
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

    fn cx(&self, replay: bool) -> Cx<'_> {
        Cx {
            gpu: &self.gpu,
            h: &self.hyper,
            model: &self.model,
            s: &self.scratch,
            pages: &self.pages,
            rows: &self.rows,
            exact: self.options.exact,
            replay,
            entries: self.entries(),
        }
    }

    /// Block table entries that launches are made for: a power of two, so that a recorded step serves many positions.
    fn entries(&self) -> usize {
        self.rows.entries.next_power_of_two()
    }

    /// True if each row of a run stands for itself.
    fn stands_alone(&self, r: &Run) -> bool {
        let kv = self.options.kv_type();
        match self.hyper.attn {
            AttnHyper::Mla { .. } => {
                let entries = kv::pages_for(r.position + r.rows, self.stride);
                let few = r.rows <= ALONE_ROWS_MAX;
                r.mla == MlaOrder::Absorbed || few || !can_make(&self.hyper, kv, entries)
            }
            AttnHyper::Gqa { .. } => r.rows <= ALONE_ROWS_MAX || !runs_together(&self.hyper, kv),
        }
    }

    /// Picks of a row.
    fn picks_of_row(&self) -> usize {
        self.hyper.moe.as_ref().map_or(0, |m| self.hyper.n_layers * m.n_picked)
    }

    /// A whole step of few rows with nothing but logits wanted: everything from the rows' copy to the logits' copy.
    fn whole(&self, out: &mut [u8]) -> Result<()> {
        let cx = self.cx(false);
        self.rows.send(&self.gpu.device)?;
        cx.embed()?;
        cx.angles()?;
        for l in 0..self.hyper.n_layers {
            cx.layer(l)?;
        }
        let n = self.rows.wanted.len();
        if n > 0 {
            cx.head(0, n)?;
        }
        let (logits, picks) = out.split_at_mut(4 * n * self.hyper.vocab);
        self.gpu.device.copy_out(logits, self.scratch.logits)?;
        let picks = &mut picks[..4 * self.rows.rows * self.picks_of_row()];
        self.gpu.device.copy_out(picks, self.scratch.made)
    }

    /// Runs [`CudaBackend::whole`], recorded from its second time on.
    fn small_step(&mut self) -> Result<()> {
        let key = (self.rows.rows, self.rows.wanted.len(), self.entries());
        let mut out = std::mem::replace(&mut self.out, Pinned::empty(self.gpu.context()));
        let result = (|| {
            match self.graphs.get(&key) {
                _ if !self.options.graphs => self.whole(out.bytes_mut())?,
                None => {
                    self.whole(out.bytes_mut())?;
                    self.graphs.insert(key, Recorded::Ran);
                }
                Some(Recorded::Ran) => {
                    let graph = self.gpu.record(|| self.whole(out.bytes_mut()))?;
                    self.gpu.replay(&graph)?;
                    self.graphs.insert(key, Recorded::Graph(graph));
                }
                Some(Recorded::Graph(graph)) => self.gpu.replay(graph)?,
            }
            self.gpu.device.synchronize()
        })();
        self.out = out;
        result
    }

    /// A step of any shape.
    fn large_step(&mut self, plan: &StepPlan, out: &mut StepOutput) -> Result<()> {
        self.rows.send(&self.gpu.device)?;
        let cx = self.cx(plan.routes.is_some());
        cx.embed()?;
        self.inputs(plan)?;
        cx.angles()?;
        self.copy_hidden(plan, plan.layers.start, self.scratch.x, out)?;
        for l in plan.layers.clone() {
            cx.layer(l)?;
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
        self.gpu.device.synchronize()
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
        let small = self.rows.together.is_empty()
            && self.rows.rows <= super::launch::gemv::ROWS_MAX
            && self.rows.wanted.len() <= LOGIT_ROWS;
        let made: Vec<ExpertId> = if tokens && plain && small {
            self.small_step()?;
            let logits = 4 * self.rows.wanted.len() * self.hyper.vocab;
            let bytes = self.out.bytes();
            out.logits.extend_from_slice(bytemuck::cast_slice(&bytes[..logits]));
            bytemuck::cast_slice(&bytes[logits..logits + 4 * picks]).to_vec()
        } else {
            self.large_step(plan, out)?;
            let mut picked = vec![0; picks];
            self.gpu.device.copy_out(&mut picked, self.scratch.made)?;
            self.gpu.device.synchronize()?;
            picked
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

/// Device memory that the model will take.
fn plan(
    h: &Hyper,
    shape: &DevModel,
    walk: &Walk,
    stored: &[Stored],
    expert_jobs: usize,
    o: &CudaOptions,
) -> Plan {
    let bytes = |of: &[Stored]| of.iter().map(|s| s.room_bytes() as u64).sum();
    let (experts, resident) = stored.split_at(expert_jobs);
    Plan {
        resident_bytes: bytes(resident),
        expert_bytes: bytes(experts),
        vector_bytes: 4 * walk.vectors.len() as u64,
        kv_bytes: o.pages as u64 * page_bytes(h, o.kv_type()) as u64,
        scratch_bytes: (Scratch::bytes(h, shape, o.rows_max) + Rows::bytes(o.rows_max, pages_named(h, o)))
            as u64,
    }
}

/// What the kernels ask of a model, said before anything is loaded.
fn check(h: &Hyper, shape: &DevModel, o: &CudaOptions) -> Result<()> {
    super::scratch::heads(h).check(o.kv_type())?;
    let Some(m) = &h.moe else { return Ok(()) };
    for (l, layer) in shape.layers.iter().enumerate() {
        if let DevFfn::Moe(d) = &layer.ffn {
            experts_of(d, m).check(l)?;
        }
    }
    Ok(())
}
