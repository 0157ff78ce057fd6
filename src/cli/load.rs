//! Opens and loads a model as every command does: plan on standard error, progress on a terminal.

use std::time::{Duration, Instant};

use super::args::Load;
use crate::app::{self, App, Choice, Options, Prepared};
use crate::backend::KvType;
use crate::backend::cuda::Wait;
use crate::config::{self, Config, Origin};
use crate::observe::{self, Progress, Unit};
use crate::units::{Bytes, Result};

impl Load {
    /// How to open the model at `path`, by these flags and the settings.
    pub fn options(&self, path: std::path::PathBuf, config: &Config) -> Options {
        let mut options = Options::new(path);
        options.threads = config.count("threads") as usize;
        options.spin_us = config.count("spin_us");
        options.context_tokens = config.count("context") as usize;
        // A setting gives way to a model made for less; a flag that cannot be met is refused.
        options.context_at_most = config.get("context").1 != Origin::Flag;
        options.exact = self.exact;
        options.backend = match config.text("backend") {
            "cpu" => Choice::Cpu,
            "cuda" => Choice::Cuda,
            _ => Choice::Auto,
        };
        // Exact mode has f32 keys and values unless f16 is asked for in so many words.
        options.kv = match (config.text("kv"), config.get("kv").1) {
            ("f32", _) => Some(KvType::F32),
            ("int8", Origin::Flag) => Some(KvType::Int8),
            ("int8", _) if !self.exact => Some(KvType::Int8),
            (_, Origin::Flag) => Some(KvType::F16),
            _ => None,
        };
        options.wait = if config.text("cuda_wait") == "spin" { Wait::Spin } else { Wait::Block };
        // Empty is unset; what is neither that nor bytes, the settings have refused.
        options.expert_bytes = config::bytes_of(config.text("expert_budget"));
        options
    }
}

/// A loaded model and how long that took.
pub struct Loaded {
    /// The model.
    pub app: App,
    /// From the plan to the first step.
    pub took: Duration,
}

/// Prints the plan and loads the weights.
pub fn load(prepared: Prepared) -> Result<Loaded> {
    let plan = prepared.plan;
    let available = plan.available_bytes.map_or("unknown".into(), |b| Bytes(b).to_string());
    observe::note(format_args!("memory: {} ({plan}); {available} available", Bytes(plan.total_bytes())));
    let started = Instant::now();
    let progress = Progress::new("loading", prepared.file_bytes(), Unit::Bytes);
    let app = prepared.load(&|done| progress.set(done))?;
    Ok(Loaded { app, took: started.elapsed() })
}

/// The most memory that this process has held, `VmHWM` of /proc/self/status (proc(5)); 0 if the system does not say.
pub fn peak_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Bytes of weights that decode steps read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadBytes {
    /// Read in every step: all but the routed experts and the embedding, of which a step reads rows (and which is counted
    /// as the head where it is that too).
    pub always: u64,
    /// One routed expert of one layer, on average (layers may mix codecs); 0 without experts.
    pub expert: f64,
    /// Experts that one row reads, over all layers.
    pub experts_a_row: usize,
}

impl ReadBytes {
    /// Of an opened model.
    pub fn of(prepared: &Prepared) -> ReadBytes {
        let (h, plan, source) = (prepared.hyper(), &prepared.plan, &prepared.source);
        let names = ["token_embd.weight", "model.embed_tokens.weight"];
        let embedding = names.iter().find_map(|n| source.find(n)).filter(|_| !h.tied_head);
        let unread = embedding.map_or(0, |t| source.tensors()[t].size_bytes());
        let (mut all, mut experts_a_row) = (0, 0);
        if let Some(m) = &h.moe {
            let layers = m.dense.iter().filter(|dense| !**dense).count();
            (all, experts_a_row) = (layers * m.n_experts, layers * m.n_picked);
        }
        let expert = if all == 0 { 0.0 } else { plan.all_expert_bytes() as f64 / all as f64 };
        ReadBytes { always: plan.resident_bytes.saturating_sub(unread), expert, experts_a_row }
    }

    /// A step that reads `experts` (layer, expert) pairs, each once.
    pub fn step(&self, experts: f64) -> f64 {
        self.always as f64 + experts * self.expert
    }
}

/// The tokenizer and chat template of an opened model.
pub fn text(prepared: &Prepared) -> Result<app::Text> {
    app::text(&prepared.source, prepared.hyper())
}
