//! One sequence in the engine.

use super::request::{Class, Done, Event, Goal, Request, SeqId, Stats};
use crate::backend::MlaOrder;
use crate::kv::BlockTable;
use crate::units::{Result, TokenId};
use std::time::Instant;

/// A request on its way.
pub(super) struct Sequence {
    pub id: SeqId,
    /// Prompt and what was generated; those from `table.tokens` on are not in the cache yet.
    pub tokens: Vec<TokenId>,
    pub prompt_len: usize,
    pub table: BlockTable,
    pub order: MlaOrder,
    pub goal: Goal,
    /// Embedding: the sum of hidden states so far, `(hidden)`.
    sum: Vec<f64>,
    pub class: Class,
    pub deadline: Option<Instant>,
    pub done: Option<Done>,
    opened: Instant,
    pub stats: Stats,
}

impl Sequence {
    /// A sequence that has read `table.tokens` tokens of its prompt.
    pub fn new(id: SeqId, r: Request, table: BlockTable, order: MlaOrder, hidden: usize) -> Sequence {
        let (prompt_len, reused) = (r.prompt.len(), table.tokens);
        Sequence {
            id,
            prompt_len,
            tokens: r.prompt,
            table,
            order,
            sum: if matches!(r.goal, Goal::Embed) { vec![0.0; hidden] } else { Vec::new() },
            goal: r.goal,
            class: r.class,
            deadline: r.deadline,
            done: None,
            opened: Instant::now(),
            stats: Stats { prefilled: prompt_len - reused, reused, ..Stats::default() },
        }
    }

    /// Tokens that wait to be read.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.table.tokens
    }

    /// Part of the prompt is unread.
    pub fn in_prompt(&self) -> bool {
        self.table.tokens < self.prompt_len
    }

    /// Ends it.
    pub fn end(&mut self, why: Done, events: &mut Vec<Event>) {
        self.done = Some(why);
        events.push(Event::Done { seq: self.id, why });
    }

    /// Adds hidden states `(rows, hidden)` of rows just read; after the last the mean is there.
    pub fn add_hidden(&mut self, rows: &[f32], events: &mut Vec<Event>) {
        for row in rows.chunks_exact(self.sum.len()) {
            self.sum.iter_mut().zip(row).for_each(|(s, x)| *s += f64::from(*x));
        }
        if self.pending() == 0 {
            self.stats.ttft = self.opened.elapsed();
            let n = self.prompt_len as f64;
            events.push(Event::Embedding {
                seq: self.id,
                mean: self.sum.iter().map(|s| (s / n) as f32).collect(),
            });
            self.end(Done::Length, events);
        }
    }

    /// Samples the next token; all tokens are read.
    pub fn take_token(&mut self, logits: &mut [f32], context: usize, events: &mut Vec<Event>) {
        if let Err(error) = self.try_token(logits, context, events) {
            self.done = Some(Done::Context);
            events.push(Event::Failed { seq: self.id, error });
        }
    }

    fn try_token(&mut self, logits: &mut [f32], context: usize, events: &mut Vec<Event>) -> Result<()> {
        let Goal::Generate { sampler, max_new, end_ids } = &mut self.goal else {
            unreachable!("an embedding asks for no logits")
        };
        let sampled = sampler.sample(logits)?;
        let token = sampled.token;
        if self.stats.generated == 0 && self.tokens.len() == self.prompt_len {
            self.stats.ttft = self.opened.elapsed();
        }
        let ended = if end_ids.contains(&token) {
            Some(Done::End(token))
        } else {
            (*max_new == 0).then_some(Done::Length)
        };
        if let Some(why) = ended {
            self.end(why, events);
            return Ok(());
        }
        let complete = sampler.advance(token)?;
        self.tokens.push(token);
        self.stats.generated += 1;
        let why = if complete {
            Some(Done::Complete)
        } else if self.stats.generated >= *max_new {
            Some(Done::Length)
        } else {
            (self.tokens.len() > context).then_some(Done::Context)
        };
        events.push(Event::Token { seq: self.id, sampled });
        if let Some(why) = why {
            self.end(why, events);
        }
        Ok(())
    }
}
