//! The step loop: the sole owner of the backend and of KV pages. Sequences are opened, advanced a step at a time, and
//! closed; evaluation ([`eval`]) runs given tokens through the same steps.

mod cached;
mod choose;
pub mod eval;
mod fair;
mod generate;
pub mod load;
pub mod pressure;
mod queue;
mod request;
mod save;
mod saver;
mod sequence;
pub mod service;
mod session;
mod spill;

pub use cached::CacheCounters;
pub use eval::{EvalChunk, EvalOptions};
pub use request::{Class, Done, Event, Goal, Request, SeqId, Stats};
pub use saver::Saved;
pub use session::model_id;

use crate::backend::{Backend, Counters, MlaOrder, Pulse, StepOutput, Workers};
use crate::kv::{BlockTable, PAGE_TOKENS, PagePool, Tree};
use crate::model::{AttnHyper, Hyper};
use crate::units::{Error, Result, TokenId};
use fair::Accounts;
use save::Save;
use saver::Saver;
use sequence::Sequence;
use spill::SpillFile;
use std::collections::VecDeque;
use std::sync::Arc;

/// What the engine may do in one step; the power governor's word, later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Most decode rows of a step.
    pub max_batch: usize,
    /// Most prompt tokens of a step.
    pub prefill_chunk: usize,
    /// Do nothing for now.
    pub pause: bool,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { max_batch: 8, prefill_chunk: 512, pause: false }
    }
}

/// The engine.
pub struct Engine {
    backend: Box<dyn Backend>,
    pool: PagePool,
    hyper: Hyper,
    /// Widest mask stride of any layer: block tables grow by this many pages.
    stride: usize,
    /// Positions a sequence may have.
    context_tokens: usize,
    /// Order of latent attention for prompts, if forced.
    mla: Option<MlaOrder>,
    seqs: Vec<Sequence>,
    next_id: SeqId,
    out: StepOutput,
    /// What is cached, for any sequence that begins alike.
    tree: Tree,
    /// Where cold blocks go.
    spill: Option<SpillFile>,
    /// Sessions that are being saved, the first of them now, and the thread that writes them once there was one.
    saves: VecDeque<Save>,
    saver: Option<Saver>,
    /// Tells models apart in sessions.
    model_id: u64,
    /// One block in serial form, on its way back.
    bytes: Vec<u8>,
    accounts: Accounts,
    cache_counters: CacheCounters,
    steps: u64,
    /// Requests may come at any moment: long prompts are read in short chunks.
    shared: bool,
    /// Running mean of what a step takes that reads no prompt, in microseconds.
    small_step_us: f64,
    pulse: Arc<Pulse>,
}

/// The widest stride of a model's masks: how many pages a block table grows by.
pub fn table_stride(h: &Hyper) -> usize {
    h.masks.iter().map(|m| m.stride()).max().unwrap_or(1)
}

impl Engine {
    /// Takes a backend made for `hyper` with `pages` KV pages.
    pub fn new(
        backend: Box<dyn Backend>,
        hyper: Hyper,
        pages: usize,
        context_tokens: usize,
        mla: Option<MlaOrder>,
    ) -> Engine {
        let stride = table_stride(&hyper);
        Engine {
            backend,
            pool: PagePool::new(pages),
            stride,
            hyper,
            context_tokens,
            mla,
            seqs: Vec::new(),
            next_id: 0,
            out: StepOutput::default(),
            tree: Tree::new(PAGE_TOKENS * stride),
            spill: None,
            saves: VecDeque::new(),
            saver: None,
            model_id: 0,
            bytes: Vec::new(),
            accounts: Accounts::default(),
            cache_counters: CacheCounters::default(),
            steps: 0,
            shared: false,
            small_step_us: 0.0,
            pulse: Arc::default(),
        }
    }

    /// The model's hyperparameters.
    pub fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    /// Positions a sequence may have.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    /// Work counted so far.
    pub fn counters(&self) -> Counters {
        self.backend.counters()
    }

    /// The order of latent attention for a prompt of `new` tokens over `cached` ones: chosen once, so that how the
    /// prompt is split never shows.
    fn prompt_order(&self, new: usize, cached: usize) -> MlaOrder {
        let fixed = self.mla.or_else(|| self.backend.prompt_order());
        fixed.unwrap_or_else(|| cheaper_order(&self.hyper, new, cached))
    }

    /// `(sequences that read their prompt or wait to, sequences that generate)`.
    pub fn sequences(&self) -> (usize, usize) {
        let running = self.seqs.iter().filter(|s| s.done.is_none());
        let (prompts, decoding): (Vec<_>, Vec<_>) = running.partition(|s| s.reading());
        (prompts.len(), decoding.len())
    }

    /// The pool of KV pages.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Says that requests may come at any moment, so that a step must not keep them waiting long: prompts that do not wait
    /// for a first token, and long ones, are read in short chunks.
    pub fn set_shared(&mut self, shared: bool) {
        self.shared = shared;
    }

    /// Changes the threads that compute, between two steps.
    pub fn set_workers(&mut self, workers: Workers) {
        self.backend.set_workers(workers);
    }

    /// Takes what beats as long as something gets done.
    pub fn set_pulse(&mut self, pulse: Arc<Pulse>) {
        self.backend.set_pulse(pulse.clone());
        self.pulse = pulse;
    }

    /// Bytes of one KV page.
    pub fn page_bytes(&self) -> usize {
        self.backend.page_bytes()
    }

    fn release(&mut self, mut table: BlockTable) {
        table.clear(&mut self.pool);
    }
}

/// Multiply-adds of both orders, counted: absorbed pays `2*lora + rope` a (query, key, head), materialized
/// `nope + rope + v` and once for each key and head `(nope + v) * lora`.
pub fn cheaper_order(h: &Hyper, new: usize, cached: usize) -> MlaOrder {
    let AttnHyper::Mla { kv_lora_rank, nope_dim, rope_dim, v_dim, .. } = h.attn else {
        return MlaOrder::Absorbed;
    };
    let (new, cached) = (new as f64, cached as f64);
    let pairs = new * (cached + new / 2.0);
    let absorbed = pairs * (2 * kv_lora_rank + rope_dim) as f64;
    let made = (cached + new) * ((nope_dim + v_dim) * kv_lora_rank) as f64;
    let materialized = pairs * (nope_dim + rope_dim + v_dim) as f64 + made;
    if materialized < absorbed { MlaOrder::Materialized } else { MlaOrder::Absorbed }
}

/// Refuses a prompt that no sequence can have: none at all, foreign tokens, no room for an answer.
fn check_prompt(prompt: &[TokenId], vocab: usize, context_tokens: usize) -> Result<()> {
    if prompt.is_empty() {
        return Err(Error::bad("request", "prompt", "at least one token", "none"));
    }
    check_tokens("prompt", prompt, vocab)?;
    check_context(prompt.len() + 1, context_tokens)
}

fn check_tokens(what: &str, tokens: &[TokenId], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        Some(t) => Err(Error::bad(what, "token id", format!("below the vocabulary's {vocab}"), t)),
        None => Ok(()),
    }
}

fn check_context(tokens: usize, context_tokens: usize) -> Result<()> {
    if tokens <= context_tokens {
        return Ok(());
    }
    let has = format!("{context_tokens} (--ctx-size raises it, up to what the model was made for)");
    Err(Error::Limit { what: "context tokens".into(), needs: tokens.to_string(), has })
}
