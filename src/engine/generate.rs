//! The step: sequences are prefilled in chunks, then decoded together.

use super::cached::order;
use super::request::{Done, Event, Goal, Request, SeqId, Stats};
use super::sequence::Sequence;
use super::{Budget, Engine, check_prompt};
use crate::backend::{Input, Run, StepPlan, Want};
use crate::model::AttnHyper;
use crate::units::{Error, Result, TokenId};
use std::time::{Duration, Instant};

impl Engine {
    /// Takes a request. `reuse` continues in the cache of an earlier sequence, which is closed: the tokens that both
    /// begin with are not read again.
    pub fn open(&mut self, request: Request, reuse: Option<SeqId>) -> Result<SeqId> {
        check_prompt(&request.prompt, self.hyper.vocab, self.context_tokens)?;
        if request.slide.is_some() && matches!(self.hyper.attn, AttnHyper::Mla { .. }) {
            let found = format!("latent attention ({})", self.hyper.arch);
            let expected = "a model with grouped-query attention: latents cannot be moved";
            return Err(Error::bad("request", "context_shift", expected, found));
        }
        let id = self.next_id;
        self.next_id += 1;
        let mut s = Sequence::new(id, request, self.hyper.hidden);
        if let Some(i) = reuse.and_then(|id| self.seqs.iter().position(|s| s.id == id)) {
            let old = self.seqs.remove(i);
            self.hand_over(old, &mut s);
        } else if !s.prefix {
            self.begin_at(&mut s, 0);
        }
        self.seqs.push(s);
        Ok(id)
    }

    /// Gives a sequence the pages of an earlier one, as far as both have the same tokens.
    fn hand_over(&mut self, old: Sequence, s: &mut Sequence) {
        let same = old.tokens.iter().zip(&s.tokens).take_while(|(a, b)| a == b).count();
        // At least one token must be read to give logits, and all of them to be averaged.
        let most = if matches!(s.goal, Goal::Embed) { 0 } else { s.prompt_len - 1 };
        let found = same.min(old.table.tokens);
        (s.table, s.tags) = (old.table, old.tags);
        s.table.truncate(&mut self.pool, found.min(most), self.stride);
        s.tags.truncate(found.min(most));
        self.begin_at(s, found.min(most));
    }

    /// A sequence begins with `found` tokens that it holds already.
    fn begin_at(&mut self, s: &mut Sequence, found: usize) {
        s.attached = true;
        s.start(found);
        s.order = self.prompt_order(s.prompt_len - found, found);
    }

    /// Gives back a sequence's pages, at any moment. What it computed stays in the prefix tree while there is room, if it was
    /// opened so.
    pub fn close(&mut self, seq: SeqId) {
        if let Some(i) = self.seqs.iter().position(|s| s.id == seq) {
            if self.seqs[i].prefix {
                self.fold(i, true);
            }
            let s = self.seqs.remove(i);
            self.release(s.table);
        }
    }

    /// Ends a sequence whose reader has all it wanted. `None` if it has ended already.
    pub fn stop(&mut self, seq: SeqId) -> Option<Event> {
        let s = self.seqs.iter_mut().find(|s| s.id == seq && s.done.is_none())?;
        let mut events = Vec::new();
        s.end(Done::Stopped, &mut events);
        events.pop()
    }

    /// Times and counts of a sequence that is open.
    pub fn stats(&self, seq: SeqId) -> Option<Stats> {
        self.seqs.iter().find(|s| s.id == seq).map(|s| s.stats)
    }

    /// Prompt and generated tokens of a sequence that is open.
    pub fn tokens(&self, seq: SeqId) -> Option<&[TokenId]> {
        self.seqs.iter().find(|s| s.id == seq).map(|s| &s.tokens[..])
    }

    /// One step, as [`Engine::advance`], for a caller to whom one failure is the end.
    pub fn step(&mut self, budget: &Budget) -> Result<Vec<Event>> {
        let mut events = self.advance(budget);
        match events.iter().position(|e| matches!(e, Event::Failed { .. })) {
            Some(i) => match events.swap_remove(i) {
                Event::Failed { error, .. } => Err(error),
                _ => unreachable!("found as a failure"),
            },
            None => Ok(events),
        }
    }

    /// One step: decode rows of the sequences that are past their prompt, and chunks of prompts that are not. Nothing to
    /// do gives no events. What fails, fails the sequences that needed it.
    pub fn advance(&mut self, budget: &Budget) -> Vec<Event> {
        let mut events = Vec::new();
        self.miss_deadlines(&mut events);
        if budget.pause {
            return events;
        }
        let batch = self.choose(budget, &mut events);
        if batch.is_empty() {
            return events;
        }
        self.steps += 1;
        let started = Instant::now();
        if let Err(e) = self.run_batch(&batch) {
            for &(i, _) in &batch {
                self.seqs[i].done = Some(Done::Context);
                events.push(Event::Failed { seq: self.seqs[i].id, error: e.again() });
            }
            return events;
        }
        let took = started.elapsed();
        self.learn(&batch, took);
        self.take_results(&batch, took, &mut events);
        for &(i, _) in &batch {
            let s = &mut self.seqs[i];
            if s.done.is_some() && s.prefix {
                // Nothing more comes: what it holds is the tree's to keep or to let go.
                self.fold(i, true);
                self.seqs[i].detach(&mut self.pool);
            } else if s.must_slide {
                s.slide_on(&mut self.pool, self.stride);
            } else if s.prefix && s.in_prompt() | (s.stats.generated <= 1) {
                // Others that begin alike need not wait for the answer.
                self.fold(i, false);
            }
        }
        events
    }

    /// Counts the rows of a step, and takes a token wherever all are read.
    fn take_results(&mut self, batch: &[(usize, usize)], took: Duration, events: &mut Vec<Event>) {
        let (vocab, hidden, now) = (self.hyper.vocab, self.hyper.hidden, Instant::now());
        let mut logits = std::mem::take(&mut self.out.logits);
        let mut rows = logits.chunks_mut(vocab);
        let mut first_row = 0;
        for &(i, n) in batch {
            let s = &mut self.seqs[i];
            let (prefill, generated) = (s.in_prompt(), s.stats.generated);
            let tag = s.tag_at(s.table.tokens);
            s.tags.resize(s.tags.len() + n, tag);
            s.table.tokens += n;
            (s.served, s.advanced) = (self.steps, now);
            *(if prefill { &mut s.stats.prefill } else { &mut s.stats.decode }) += took;
            if prefill {
                let tokens = s.table.tokens.min(s.prompt_len);
                events.push(Event::Prefilled { seq: s.id, tokens });
            }
            if matches!(s.goal, Goal::Embed) {
                s.add_hidden(&self.out.hidden[0][first_row * hidden..(first_row + n) * hidden], events);
            } else if s.pending() == 0 {
                let row = rows.next().expect("a row of logits for each sequence that is read through");
                s.take_token(row, self.context_tokens, events);
            }
            first_row += n;
            let read = if prefill { n } else { 0 };
            self.accounts.charge(&s.client, s.stats.generated - generated, read);
        }
        drop(rows);
        self.out.logits = logits;
    }

    /// Ends the sequences whose answer would come too late.
    fn miss_deadlines(&mut self, events: &mut Vec<Event>) {
        let now = Instant::now();
        for s in self.seqs.iter_mut().filter(|s| s.done.is_none()) {
            if s.deadline.is_some_and(|d| d <= now) {
                s.end(Done::Deadline, events);
            }
        }
    }

    fn run_batch(&mut self, batch: &[(usize, usize)]) -> Result<()> {
        let runs: Vec<Run> = batch
            .iter()
            .map(|&(i, n)| {
                let s = &self.seqs[i];
                let at = s.table.tokens;
                let last = at + n == s.tokens.len() && !matches!(s.goal, Goal::Embed);
                Run {
                    input: Input::Tokens(&s.tokens[at..at + n]),
                    position: at,
                    rows: n,
                    pages: &s.table.pages,
                    mla: order(s.tag_at(at)),
                    want: if last { Want::Last } else { Want::Nothing },
                }
            })
            .collect();
        let embeds = batch.iter().any(|&(i, _)| matches!(self.seqs[i].goal, Goal::Embed));
        let hidden = [self.hyper.n_layers];
        let plan = StepPlan {
            runs: &runs,
            layers: 0..self.hyper.n_layers,
            hidden: if embeds { &hidden } else { &[] },
            record_routes: false,
            routes: None,
        };
        self.backend.step(&plan, &mut self.out)
    }
}
