//! Generation: sequences that are prefilled in chunks, then decoded together.

use super::{Budget, Engine};
use crate::backend::{Input, MlaOrder, Run, StepPlan, Want};
use crate::kv::BlockTable;
use crate::sample::{Sampled, Sampler};
use crate::units::{Error, Result, TokenId};
use std::time::{Duration, Instant};

/// A sequence's number, never reused.
pub type SeqId = u64;

/// What to generate.
pub struct Request {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Chooses tokens; holds its parameters and its random state.
    pub sampler: Sampler,
    /// Most tokens to generate.
    pub max_new: usize,
    /// Tokens that end the answer; they are not part of it.
    pub end_ids: Vec<TokenId>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// The model said so.
    End(TokenId),
    /// `max_new` tokens are there.
    Length,
    /// The context is full.
    Context,
}

/// What happened in a step.
#[derive(Debug)]
pub enum Event {
    /// Some of a prompt was read.
    Prefilled {
        /// Which sequence.
        seq: SeqId,
        /// Prompt tokens read so far, reused ones included.
        tokens: usize,
    },
    /// One more token.
    Token {
        /// Which sequence.
        seq: SeqId,
        /// The token, with its log-probability.
        sampled: Sampled,
    },
    /// The sequence ended; its cache stays until it is closed.
    Done {
        /// Which sequence.
        seq: SeqId,
        /// Why.
        why: Done,
    },
}

/// Times and counts of one answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    /// Prompt tokens that had to be read.
    pub prefilled: usize,
    /// Prompt tokens that were in the cache already.
    pub reused: usize,
    /// Tokens generated.
    pub generated: usize,
    /// From opening to the first token.
    pub ttft: Duration,
    /// Steps that read the prompt.
    pub prefill: Duration,
    /// Steps that generated all tokens but the first.
    pub decode: Duration,
}

impl Stats {
    /// Prompt tokens a second.
    pub fn pp(&self) -> f64 {
        self.prefilled as f64 / self.prefill.as_secs_f64().max(1e-9)
    }

    /// Generated tokens a second, the first one aside.
    pub fn tg(&self) -> f64 {
        self.generated.saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// One sequence in the engine.
pub(super) struct Sequence {
    id: SeqId,
    /// Prompt and what was generated; those from `table.tokens` on are not in the cache yet.
    tokens: Vec<TokenId>,
    prompt_len: usize,
    table: BlockTable,
    order: MlaOrder,
    sampler: Sampler,
    max_new: usize,
    end_ids: Vec<TokenId>,
    done: Option<Done>,
    opened: Instant,
    stats: Stats,
}

impl Sequence {
    /// Tokens that wait to be read.
    fn pending(&self) -> usize {
        self.tokens.len() - self.table.tokens
    }

    fn in_prompt(&self) -> bool {
        self.table.tokens < self.prompt_len
    }
}

impl Engine {
    /// Takes a request. `reuse` continues in the cache of an earlier sequence, which is closed: the tokens that both
    /// begin with are not read again.
    pub fn open(&mut self, request: Request, reuse: Option<SeqId>) -> Result<SeqId> {
        if request.prompt.is_empty() {
            return Err(Error::bad("request", "prompt", "at least one token", "none"));
        }
        self.check_tokens("prompt", &request.prompt)?;
        self.check_context(request.prompt.len() + 1)?;
        let mut table = BlockTable::default();
        if let Some(i) = reuse.and_then(|id| self.seqs.iter().position(|s| s.id == id)) {
            let old = self.seqs.remove(i);
            table = old.table;
            let same = old.tokens.iter().zip(&request.prompt).take_while(|(a, b)| a == b).count();
            // At least one token must be read to give logits.
            table.truncate(&mut self.pool, same.min(table.tokens).min(request.prompt.len() - 1), self.stride);
        }
        let (id, reused) = (self.next_id, table.tokens);
        self.next_id += 1;
        let new = request.prompt.len() - reused;
        self.seqs.push(Sequence {
            id,
            prompt_len: request.prompt.len(),
            order: self.prompt_order(new, reused),
            tokens: request.prompt,
            table,
            sampler: request.sampler,
            max_new: request.max_new,
            end_ids: request.end_ids,
            done: None,
            opened: Instant::now(),
            stats: Stats { prefilled: new, reused, ..Stats::default() },
        });
        Ok(id)
    }

    /// Gives back a sequence's pages, at any moment.
    pub fn close(&mut self, seq: SeqId) {
        if let Some(i) = self.seqs.iter().position(|s| s.id == seq) {
            let s = self.seqs.remove(i);
            self.release(s.table);
        }
    }

    /// Times and counts of a sequence that is open.
    pub fn stats(&self, seq: SeqId) -> Option<Stats> {
        self.seqs.iter().find(|s| s.id == seq).map(|s| s.stats)
    }

    /// Prompt and generated tokens of a sequence that is open.
    pub fn tokens(&self, seq: SeqId) -> Option<&[TokenId]> {
        self.seqs.iter().find(|s| s.id == seq).map(|s| &s.tokens[..])
    }

    /// One step: decode rows of the sequences that are past their prompt, and one chunk of a prompt that is not.
    /// Nothing to do gives no events.
    pub fn step(&mut self, budget: &Budget) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        if budget.pause {
            return Ok(events);
        }
        let batch = self.choose(budget, &mut events)?;
        if batch.is_empty() {
            return Ok(events);
        }
        let started = Instant::now();
        self.run_batch(&batch)?;
        let took = started.elapsed();
        let vocab = self.hyper.vocab;
        let mut logits = std::mem::take(&mut self.out.logits);
        let mut rows = logits.chunks_mut(vocab);
        let mut result = Ok(());
        for &(i, n) in &batch {
            let s = &mut self.seqs[i];
            let prefill = s.in_prompt();
            s.table.tokens += n;
            *(if prefill { &mut s.stats.prefill } else { &mut s.stats.decode }) += took;
            if prefill {
                events.push(Event::Prefilled { seq: s.id, tokens: s.table.tokens });
            }
            if s.pending() == 0 {
                let row = rows.next().expect("a row of logits for each sequence that is read through");
                result = result.and(take_token(s, row, self.context_tokens, &mut events));
            }
        }
        drop(rows);
        self.out.logits = logits;
        result.map(|()| events)
    }

    /// `(index, tokens)` of the sequences to advance.
    fn choose(&mut self, budget: &Budget, events: &mut Vec<Event>) -> Result<Vec<(usize, usize)>> {
        let mut batch = Vec::new();
        let rows_max = self.backend.rows_max();
        for (i, s) in self.seqs.iter().enumerate().filter(|(_, s)| s.done.is_none() && !s.in_prompt()) {
            if batch.len() < budget.max_batch.clamp(1, rows_max) {
                batch.push((i, s.pending()));
            }
        }
        let room = budget.prefill_chunk.max(1).min(rows_max - batch.len());
        let prompt = self.seqs.iter().position(|s| s.done.is_none() && s.in_prompt());
        if let Some(i) = prompt.filter(|_| room > 0) {
            batch.push((i, self.seqs[i].pending().min(room)));
        }
        let mut kept = Vec::with_capacity(batch.len());
        for (i, n) in batch {
            let s = &mut self.seqs[i];
            match s.table.reserve(&mut self.pool, s.table.tokens + n, self.stride) {
                Ok(()) => kept.push((i, n)),
                // An answer that has begun ends where the cache does; a prompt that does not fit is refused.
                Err(_) if !s.in_prompt() => {
                    s.done = Some(Done::Context);
                    events.push(Event::Done { seq: s.id, why: Done::Context });
                }
                Err(e) => return Err(e),
            }
        }
        Ok(kept)
    }

    fn run_batch(&mut self, batch: &[(usize, usize)]) -> Result<()> {
        let runs: Vec<Run> = batch
            .iter()
            .map(|&(i, n)| {
                let s = &self.seqs[i];
                let at = s.table.tokens;
                Run {
                    input: Input::Tokens(&s.tokens[at..at + n]),
                    position: at,
                    rows: n,
                    pages: &s.table.pages,
                    // Generated rows are always absorbed; prompt rows keep what was chosen for the prompt.
                    mla: if at < s.prompt_len { s.order } else { MlaOrder::Absorbed },
                    want: if at + n == s.tokens.len() { Want::Last } else { Want::Nothing },
                }
            })
            .collect();
        let plan = StepPlan {
            runs: &runs,
            layers: 0..self.hyper.n_layers,
            hidden: &[],
            record_routes: false,
            routes: None,
        };
        self.backend.step(&plan, &mut self.out)
    }
}

/// Samples the next token of a sequence whose tokens are all read.
fn take_token(s: &mut Sequence, logits: &mut [f32], context: usize, events: &mut Vec<Event>) -> Result<()> {
    let sampled = s.sampler.sample(logits)?;
    let token = sampled.token;
    if s.stats.generated == 0 && s.tokens.len() == s.prompt_len {
        s.stats.ttft = s.opened.elapsed();
    }
    let ended = if s.end_ids.contains(&token) {
        Some(Done::End(token))
    } else {
        (s.max_new == 0).then_some(Done::Length)
    };
    if let Some(why) = ended {
        s.done = Some(why);
        events.push(Event::Done { seq: s.id, why });
        return Ok(());
    }
    s.sampler.accept(token);
    s.tokens.push(token);
    s.stats.generated += 1;
    let why = if s.stats.generated >= s.max_new {
        Some(Done::Length)
    } else if s.tokens.len() > context {
        Some(Done::Context)
    } else {
        None
    };
    events.push(Event::Token { seq: s.id, sampled });
    if let Some(why) = why {
        s.done = Some(why);
        events.push(Event::Done { seq: s.id, why });
    }
    Ok(())
}
