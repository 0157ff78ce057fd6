//! The only place that knows every room: opens a model, plans memory, loads, and wires backend and engine.

pub mod daemon;
mod interrupts;
pub mod keeper;
pub mod power;
pub mod settings;

pub use interrupts::{Interrupts, before_end};

use crate::backend::cpu::{self, CpuBackend, CpuOptions, Isa};
use crate::backend::cuda::{self, CudaBackend, CudaOptions, Draft, Gpu, Wait};
use crate::backend::{Backend, KvType, MlaOrder};
use crate::engine::{Engine, pressure, table_stride};
use crate::kv;
use crate::model::{self, Bound, Hyper, Mask};
use crate::observe;
use crate::text::Tokenizer;
use crate::text::template::ChatTemplate;
use crate::units::{Bytes, Error, Result};
use crate::weights::{self, Meta, Source};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which backend runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// CUDA if a GPU can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// CUDA, or an error that says what is missing.
    Cuda,
}

/// How to open a model.
#[derive(Debug, Clone)]
pub struct Options {
    /// File or folder.
    pub path: PathBuf,
    /// Which backend.
    pub backend: Choice,
    /// Worker threads; 0: one a core.
    pub threads: usize,
    /// Positions a sequence may have; 0: all that the model was made for.
    pub context_tokens: usize,
    /// Take fewer positions, rather than refuse, where the model was made for fewer.
    pub context_at_most: bool,
    /// Sequences that must fit in the cache side by side.
    pub sequences: usize,
    /// f32 activations and KV throughout.
    pub exact: bool,
    /// Element type of the cache, if not the mode's own.
    pub kv: Option<KvType>,
    /// Order of latent attention for prompts, if not the cheaper one.
    pub mla: Option<MlaOrder>,
    /// Replaces the mask of every layer: sparse attention to try out.
    pub mask: Option<Mask>,
    /// Read every page and mask element by element: what sparse reading is tested against.
    pub dense_masks: bool,
    /// Instruction set, if not the best one.
    pub isa: Option<Isa>,
    /// Most rows of a step.
    pub rows_max: usize,
    /// How long idle workers spin.
    pub spin_us: u64,
    /// How the host waits for a GPU.
    pub wait: Wait,
    /// Most GPU memory for routed experts, if not all of them where they fit and what there is where they do not.
    pub expert_bytes: Option<u64>,
    /// Share of the routed experts that the GPU is told it lacks, though it has them all: to measure.
    pub fake_missing: Option<f32>,
}

impl Options {
    /// The defaults for a model at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            path: path.into(),
            backend: Choice::Auto,
            threads: 0,
            context_tokens: 4096,
            context_at_most: false,
            sequences: 1,
            exact: false,
            kv: None,
            mla: None,
            mask: None,
            dense_masks: false,
            isa: None,
            rows_max: 512,
            // About what a decode step's serial parts take: long enough to bridge them, short enough that an idle
            // daemon leaves the cores to the robot.
            spin_us: 200,
            wait: Wait::Block,
            expert_bytes: None,
            fake_missing: None,
        }
    }
}

/// What belongs to a plan for a GPU beside what the model takes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPlan {
    /// The GPU's memory that the context and other programs have.
    pub taken_bytes: u64,
    /// Bytes in the machine's memory: buffers, and routed experts that stay there. Where the GPU has no memory of its own, all
    /// of the plan.
    pub host_bytes: u64,
    /// What the machine can give, if it says.
    pub host_available_bytes: Option<u64>,
    /// Routed experts that stay in the machine's memory; 0 if the GPU has them all.
    pub host_expert_bytes: u64,
}

/// Memory that a model will take, before it takes any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights but for routed experts.
    pub resident_bytes: u64,
    /// Routed experts.
    pub expert_bytes: u64,
    /// KV pages.
    pub kv_bytes: u64,
    /// Buffers of a step.
    pub scratch_bytes: u64,
    /// Positions a sequence may have.
    pub context_tokens: usize,
    /// KV bytes of one position.
    pub kv_token_bytes: u64,
    /// What the machine, or the GPU that runs the model, can give, if it says.
    pub available_bytes: Option<u64>,
    /// Of a model on a GPU.
    pub gpu: Option<GpuPlan>,
}

impl MemoryPlan {
    /// Routed experts wherever they are.
    pub fn all_expert_bytes(&self) -> u64 {
        self.gpu.map_or(0, |g| g.host_expert_bytes).max(self.expert_bytes)
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.resident_bytes + self.expert_bytes + self.kv_bytes + self.scratch_bytes
    }

    /// Refuses a plan that does not fit.
    pub fn check(&self) -> Result<()> {
        let fits = |what: &str, needs: u64, has: Option<u64>| match has {
            Some(has) if needs > has => Err(Error::Limit {
                what: what.into(),
                needs: format!("{} ({self})", Bytes(needs)),
                has: format!("{} available", Bytes(has)),
            }),
            _ => Ok(()),
        };
        let Some(g) = &self.gpu else { return fits("memory", self.total_bytes(), self.available_bytes) };
        fits("GPU memory", self.total_bytes(), self.available_bytes)?;
        fits("the machine's memory", g.host_bytes, g.host_available_bytes)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "weights {}, routed experts {}, KV {} for {} tokens, scratch {}",
            Bytes(self.resident_bytes),
            Bytes(self.expert_bytes),
            Bytes(self.kv_bytes),
            self.context_tokens,
            Bytes(self.scratch_bytes)
        )?;
        let Some(g) = &self.gpu else { return Ok(()) };
        if g.host_expert_bytes > 0 {
            write!(f, "; all {} of routed experts in host memory", Bytes(g.host_expert_bytes))?;
        }
        write!(f, "; not counted: {} of the context and other programs", Bytes(g.taken_bytes))
    }
}

/// A model whose every tensor was found and checked, not yet loaded.
pub struct Prepared {
    /// The opened files.
    pub source: Source,
    /// Memory it will take.
    pub plan: MemoryPlan,
    bound: Bound,
    options: Options,
    pages: usize,
    /// The GPU and the model laid out for it; without, the CPU runs it.
    gpu: Option<(Gpu, Draft)>,
}

/// A loaded model, ready to run.
pub struct App {
    /// The opened files.
    pub source: Source,
    /// Steps, sequences, KV.
    pub engine: Engine,
    /// Memory it took.
    pub plan: MemoryPlan,
    /// What computes: the CPU's instruction set, or the GPU.
    pub kernels: String,
    /// Threads in use.
    pub threads: usize,
}

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Opens and checks a model, and plans its memory.
pub fn prepare(options: Options) -> Result<Prepared> {
    let source = Source::open(&options.path)?;
    let mut bound = model::bind(&source)?;
    if let Some(mask) = options.mask {
        bound.hyper.masks.fill(mask);
    }
    let h = &bound.hyper;
    let context_tokens = match options.context_tokens {
        0 => h.context_tokens,
        n if options.context_at_most => n.min(h.context_tokens),
        n if n > h.context_tokens => {
            let has = format!("{} that the model was made for", h.context_tokens);
            return Err(Error::Limit { what: "context tokens".into(), needs: n.to_string(), has });
        }
        n => n,
    };
    let pages = kv::pages_for(context_tokens, table_stride(h)) * options.sequences;
    let cpu = cpu_options(&options, pages);
    if let Some(gpu) = gpu(&options)? {
        let free = gpu.context().memory_bytes()?.0;
        let draft = Draft::new(&source, bound.clone(), cuda_options(&options, pages), free)?;
        let plan = gpu_plan(&gpu, &draft, context_tokens, pages)?;
        if options.expert_bytes.is_none() && draft.plan.host_bytes > 0 {
            let [room, all] = [draft.plan.expert_bytes, draft.plan.host_bytes].map(Bytes);
            log::warn!(
                "the GPU has room for {room} of {all} of routed experts; they are copied as they are picked"
            );
        }
        return Ok(Prepared { source, plan, bound, options, pages, gpu: Some((gpu, draft)) });
    }
    let (experts, resident) = bound.jobs.split_at(bound.expert_jobs);
    let page_bytes = cpu::page_bytes(h, cpu.kv_type()) as u64;
    let plan = MemoryPlan {
        resident_bytes: weights::resident_bytes(&source, resident)?,
        expert_bytes: weights::resident_bytes(&source, experts)?,
        kv_bytes: pages as u64 * page_bytes,
        scratch_bytes: cpu::scratch_bytes(h, &cpu),
        context_tokens,
        kv_token_bytes: page_bytes / kv::PAGE_TOKENS as u64,
        available_bytes: available_bytes(),
        gpu: None,
    };
    Ok(Prepared { source, plan, bound, options, pages, gpu: None })
}

fn cpu_options(o: &Options, pages: usize) -> CpuOptions {
    CpuOptions {
        threads: if o.threads == 0 { cores() } else { o.threads },
        spin_us: o.spin_us,
        isa: o.isa,
        exact: o.exact,
        kv: o.kv,
        pages,
        rows_max: o.rows_max,
        dense_masks: o.dense_masks,
    }
}

fn cuda_options(o: &Options, pages: usize) -> CudaOptions {
    CudaOptions {
        exact: o.exact,
        kv: o.kv,
        pages,
        rows_max: o.rows_max,
        threads: if o.threads == 0 { cores() } else { o.threads },
        graphs: true,
        expert_bytes: o.expert_bytes,
        fake_missing: o.fake_missing,
    }
}

/// The GPU that the options ask for. `auto` falls back on the CPU and warns where a driver is there and cannot be used;
/// that none is installed is said once a model is loaded.
fn gpu(o: &Options) -> Result<Option<Gpu>> {
    // Reading every page is what the CPU's sparse reading is tested against; no GPU kernel does it.
    if o.backend == Choice::Cpu || o.backend == Choice::Auto && o.dense_masks {
        return Ok(None);
    }
    if o.backend == Choice::Auto && cuda::driver::absent().is_some() {
        return Ok(None);
    }
    match Gpu::open(o.wait) {
        Ok(gpu) => Ok(Some(gpu)),
        Err(e) if o.backend == Choice::Auto => {
            log::warn!("running on the CPU: {e}");
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// The GPU's plan in the words of a model's.
fn gpu_plan(gpu: &Gpu, draft: &Draft, context_tokens: usize, pages: usize) -> Result<MemoryPlan> {
    let p = &draft.plan;
    // Where both are one memory, what is pinned and what stays on the host's side come out of it too.
    let shared = gpu.device.integrated;
    let host = p.host_bytes + p.pinned_bytes;
    let (free, total) = gpu.context().memory_bytes()?;
    Ok(MemoryPlan {
        resident_bytes: p.resident_bytes + p.vector_bytes,
        expert_bytes: p.expert_bytes,
        kv_bytes: p.kv_bytes,
        scratch_bytes: p.scratch_bytes,
        context_tokens,
        kv_token_bytes: p.kv_bytes / (pages * kv::PAGE_TOKENS) as u64,
        available_bytes: Some(free),
        gpu: Some(GpuPlan {
            taken_bytes: total - free,
            host_bytes: if shared { p.total_bytes() + host } else { host },
            host_available_bytes: available_bytes(),
            host_expert_bytes: p.host_bytes,
        }),
    })
}

/// What can be taken now: `MemAvailable` of /proc/meminfo, or what the limit of the process's control group leaves, if that is
/// less.
pub fn available_bytes() -> Option<u64> {
    let group = pressure::Watch::new().free_bytes();
    machine_bytes().map_or(group, |has| Some(group.map_or(has, |group| group.min(has))))
}

/// `MemAvailable` of /proc/meminfo.
fn machine_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

impl Prepared {
    /// The model's hyperparameters.
    pub fn hyper(&self) -> &Hyper {
        &self.bound.hyper
    }

    /// True if a GPU will run it.
    pub fn on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Bytes that loading will read.
    pub fn file_bytes(&self) -> u64 {
        self.source.file_bytes()
    }

    /// Loads the weights. `progress` gets the file bytes read so far.
    pub fn load(self, progress: &dyn Fn(u64)) -> Result<App> {
        // A GPU's memory is checked by its backend, which says what others hold of it.
        if self.gpu.is_none() {
            self.plan.check()?;
        }
        let cpu = cpu_options(&self.options, self.pages);
        let threads = cpu.threads;
        let (hyper, backend, kernels): (Hyper, Box<dyn Backend>, String) = match self.gpu {
            Some((gpu, draft)) => {
                let kernels = format!("cuda sm_{}", gpu.device.sm);
                let backend = CudaBackend::load(gpu, &self.source, draft, None, progress)?;
                (self.bound.hyper, Box::new(backend), kernels)
            }
            None => {
                let loaded = weights::load(&self.source, &self.bound.jobs, threads, progress)?;
                let (model, experts) = model::build(&self.source, self.bound, loaded)?;
                let hyper = model.hyper.clone();
                let backend = CpuBackend::new(Arc::new(model), Arc::new(experts), cpu)?;
                let kernels = backend.isa().name().to_owned();
                if self.options.backend == Choice::Auto && cuda::driver::absent().is_some() {
                    observe::note("no NVIDIA driver (libcuda.so.1): running on the CPU");
                }
                (hyper, Box::new(backend), kernels)
            }
        };
        let context = self.plan.context_tokens;
        let model_id = crate::engine::model_id(&self.source, &hyper)?;
        let mut engine = Engine::new(backend, hyper, self.pages, context, self.options.mla);
        engine.set_model_id(model_id);
        Ok(App { source: self.source, engine, plan: self.plan, kernels, threads })
    }
}

/// What turns text into tokens and back.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if the model has one.
    pub template: Option<ChatTemplate>,
}

/// The tokenizer, checked against the model's vocabulary, and the chat template of an opened model.
pub fn text(source: &Source, hyper: &Hyper) -> Result<Text> {
    let (tokenizer, template) = match source.meta() {
        Meta::Gguf(meta) => (Tokenizer::from_gguf_meta(meta)?, ChatTemplate::from_gguf_meta(meta)?),
        Meta::HuggingFace(_) => {
            let folder = source.path();
            (Tokenizer::from_hf_dir(folder)?, ChatTemplate::from_hf_dir(folder)?)
        }
    };
    check_vocabulary(source.path(), &tokenizer, hyper)?;
    Ok(Text { tokenizer, template })
}

/// Checks that the tokenizer's ids fit the model.
pub fn check_vocabulary(file: &Path, tokenizer: &Tokenizer, hyper: &Hyper) -> Result<()> {
    if tokenizer.vocab_size() <= hyper.vocab {
        return Ok(());
    }
    let expected = format!("at most the {} rows of the embedding", hyper.vocab);
    Err(Error::bad(file, "tokenizer vocabulary", expected, tokenizer.vocab_size()))
}
