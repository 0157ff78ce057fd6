//! What the engine's thread counts, for anyone to read at any moment without asking it.

use super::stream::RequestId;
use crate::engine::{CacheCounters, Class, Done};
use std::time::Duration;

/// Counts since the start, and the state after the last step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics {
    /// Requests taken.
    pub requests: u64,
    /// Requests refused because the queue was full.
    pub refused: u64,
    /// Choices that ended by themselves: end token, length, context, grammar.
    pub finished: u64,
    /// Choices whose deadline passed.
    pub deadlines_missed: u64,
    /// Requests that the reader gave up, or lost by reading too slowly.
    pub cancelled: u64,
    /// Of those, the slow ones.
    pub slow_readers: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Prompt tokens read.
    pub prefill_tokens: u64,
    /// Prompt tokens that were in the cache.
    pub reused_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Steps of the engine.
    pub steps: u64,
    /// Time in those steps.
    pub step_time: Duration,
    /// Requests open now.
    pub open: usize,
    /// Sequences of those that read their prompt or wait to.
    pub prefilling: usize,
    /// Sequences that generate.
    pub decoding: usize,
    /// What waits for the disk: sessions that are being written, and what was asked about those meanwhile.
    pub sessions_waiting: usize,
    /// KV pages in all.
    pub pages: usize,
    /// KV pages that can be taken now.
    pub pages_free: usize,
    /// KV pages that take memory.
    pub pages_resident: usize,
    /// Blocks of the prefix tree in memory.
    pub blocks_cached: usize,
    /// Blocks of the prefix tree in the spill file.
    pub blocks_spilled: usize,
    /// What the cache did.
    pub cache: CacheCounters,
    /// Bytes of one page.
    pub page_bytes: usize,
}

impl Metrics {
    /// Counts how a choice ended.
    pub(super) fn ended(&mut self, why: Done) {
        match why {
            Done::Deadline => self.deadlines_missed += 1,
            _ => self.finished += 1,
        }
    }
}

/// An open request, for listings.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestInfo {
    /// Its number.
    pub id: RequestId,
    /// Whose it is.
    pub client: String,
    /// How urgent it is.
    pub class: Class,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens in the cache already.
    pub read_tokens: usize,
    /// Tokens generated, all choices.
    pub generated: usize,
    /// Since it was taken.
    pub age: Duration,
}
