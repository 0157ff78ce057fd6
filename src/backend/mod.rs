//! The seam between the engine and what computes. A backend owns KV bytes and scratch; the engine says which rows to
//! advance and what it wants back.

pub mod cpu;
pub mod cuda;
pub mod page;

use crate::kv::{PAGE_TOKENS, PageId};
use crate::model::Hyper;
use crate::units::{ExpertId, Result, TokenId};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Element type of the cached keys, values and latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// What exact mode uses.
    F32,
    /// Half precision: the default.
    F16,
    /// Codes of 8 bits with a scale for [`KV_GROUP`] of them; MLA's rope key stays in half precision.
    Int8,
}

/// Elements of a row that share a scale in [`KvType::Int8`]. 32 keep a row of 512 + 64 at 58.3% of half precision, and heads of
/// 64 at 53.1%.
pub const KV_GROUP: usize = 32;

impl KvType {
    /// What flags and files call it.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Int8 => "int8",
        }
    }

    /// Bytes of an element, or of its code.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
            KvType::Int8 => 1,
        }
    }
}

/// Bytes of `tokens` positions in the canonical serial form ([`Backend::export`]).
pub fn serial_bytes(h: &Hyper, kv: KvType, tokens: usize) -> usize {
    tokens * h.n_layers * page::PageLayout::of(h, kv).layer_bytes() / PAGE_TOKENS
}

/// The order of latent attention's products. Both give the same result up to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlaOrder {
    /// Queries go through W_UK into latent space; scores and sums are taken over the latents.
    Absorbed,
    /// Keys and values are made from the latents, a tile at a time.
    Materialized,
}

/// Which rows of a run give logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: a prefill chunk that is not the last.
    Nothing,
    /// The last.
    Last,
    /// All: evaluation.
    All,
}

/// What enters the first layer of a step.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// Token ids, looked up in the embedding.
    Tokens(&'a [TokenId]),
    /// Hidden states `(rows, hidden)` given from outside: another machine's layers, or an encoder.
    Hidden(&'a [f32]),
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// What enters.
    pub input: Input<'a>,
    /// Position of the first row.
    pub position: usize,
    /// Rows.
    pub rows: usize,
    /// The sequence's block table, with room for `position + rows` positions.
    pub pages: &'a [PageId],
    /// Order of latent attention for these rows.
    pub mla: MlaOrder,
    /// Rows that give logits.
    pub want: Want,
}

/// One step: a mixed batch of prefill chunks and decode rows.
#[derive(Debug, Clone)]
pub struct StepPlan<'a> {
    /// The rows, by sequence. No sequence appears twice.
    pub runs: &'a [Run<'a>],
    /// Layers to run; the final norm and the head follow only if this ends with the last layer.
    pub layers: Range<usize>,
    /// Hidden states to return, `(rows, hidden)` each: 0 = embeddings, i = after layer i, and the last number
    /// (n_layers) = after the final norm.
    pub hidden: &'a [usize],
    /// Return every row's expert picks.
    pub record_routes: bool,
    /// Use these picks instead of choosing: `(rows, n_layers, n_picked)`; dense layers' entries are ignored.
    pub routes: Option<&'a [ExpertId]>,
}

/// What a step gives back; buffers are reused.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// `(rows that wanted them, vocab)` f32, in the order of the runs.
    pub logits: Vec<f32>,
    /// One `(rows, hidden)` f32 for each entry of [`StepPlan::hidden`].
    pub hidden: Vec<Vec<f32>>,
    /// `(rows, n_layers, n_picked)`; 0 in dense layers.
    pub routes: Vec<ExpertId>,
    /// `(rows, n_layers)`: [`crate::model::margin`] of each choice, infinite in dense layers. With the routes, from the CPU
    /// alone: what a near tie is measured by.
    pub margins: Vec<f32>,
}

/// Work counted since the backend was made.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Attention block reads: one for each (page, layer, row) that a row's mask made it read.
    pub kv_pages_read: u64,
    /// Routed experts fetched, one for each (layer, distinct expert) of a step.
    pub experts_fetched: u64,
}

/// Threads that compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workers {
    /// How many, the caller of [`Backend::step`] included.
    pub threads: usize,
    /// How long an idle one spins before it sleeps, in microseconds.
    pub spin_us: u64,
}

/// Counts what gets done, so that another thread tells a long step from one that stands still.
#[derive(Debug, Default)]
pub struct Pulse(AtomicU64);

impl Pulse {
    /// Something was done.
    pub fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Beats so far.
    pub fn beats(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What computes.
pub trait Backend: Send {
    /// Advances the rows of `plan` through its layers, appending to their pages.
    fn step(&mut self, plan: &StepPlan, out: &mut StepOutput) -> Result<()>;

    /// Most rows of one step.
    fn rows_max(&self) -> usize;

    /// Bytes of one page, all layers.
    fn page_bytes(&self) -> usize;

    /// Element type of the cache.
    fn kv_type(&self) -> KvType;

    /// Gives the memory of pages that no one uses back to the system, as far as it can; returns the bytes. What the pages
    /// held is lost.
    fn discard(&mut self, pages: &[PageId]) -> u64 {
        let _ = pages; // a backend whose memory is not the system's keeps it
        0
    }

    /// Copies a page's contents. After an error the contents of `to` are undefined.
    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()>;

    /// Appends the first `tokens` positions of a block table to `out` in the canonical serial form: for each layer, for
    /// each position in order, the key (or latent) row, then the value row, little-endian. After an error what was appended is
    /// undefined.
    fn export(&self, pages: &[PageId], tokens: usize, out: &mut Vec<u8>) -> Result<()>;

    /// Fills pages from the canonical form; the reverse of [`Backend::export`]. `bytes` must have exactly the length that
    /// export gives. After an error the contents of `pages` are undefined.
    fn import(&mut self, pages: &[PageId], tokens: usize, bytes: &[u8]) -> Result<()>;

    /// The order in which this backend reads every prompt, if it does not leave that to the count of operations.
    fn prompt_order(&self) -> Option<MlaOrder> {
        None
    }

    /// Changes the threads between two steps; no result depends on them.
    fn set_workers(&mut self, workers: Workers) {
        let _ = workers; // a backend that computes elsewhere has none
    }

    /// Takes what is to beat within a step that may last for many seconds.
    fn set_pulse(&mut self, pulse: Arc<Pulse>) {
        let _ = pulse; // a backend whose steps are short needs none: whoever calls it beats between them
    }

    /// Work counted so far.
    fn counters(&self) -> Counters;
}
