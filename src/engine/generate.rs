//! The step: sequences are prefilled in chunks, then decoded together.

use super::request::{Done, Event, Goal, Request, SeqId, Stats};
use super::sequence::Sequence;
use super::{Budget, Engine, check_prompt};
use crate::backend::{Input, MlaOrder, Run, StepPlan, Want};
use crate::kv::BlockTable;
use crate::units::{Result, TokenId};
use std::time::Instant;

impl Engine {
    /// Takes a request. `reuse` continues in the cache of an earlier sequence, which is closed: the tokens that both
    /// begin with are not read again.
    pub fn open(&mut self, request: Request, reuse: Option<SeqId>) -> Result<SeqId> {
        check_prompt(&request.prompt, self.hyper.vocab, self.context_tokens)?;
        let mut table = BlockTable::default();
        if let Some(i) = reuse.and_then(|id| self.seqs.iter().position(|s| s.id == id)) {
            let old = self.seqs.remove(i);
            table = old.table;
            // At least one token must be read to give logits, and all of them to be averaged.
            let most = match request.goal {
                Goal::Embed => 0,
                Goal::Generate { .. } => request.prompt.len() - 1,
            };
            let same = old.tokens.iter().zip(&request.prompt).take_while(|(a, b)| a == b).count();
            table.truncate(&mut self.pool, same.min(table.tokens).min(most), self.stride);
        }
        let (id, reused) = (self.next_id, table.tokens);
        self.next_id += 1;
        let new = request.prompt.len() - reused;
        let order = self.prompt_order(new, reused);
        self.seqs.push(Sequence::new(id, request, table, order, self.hyper.hidden));
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
        let started = Instant::now();
        if let Err(e) = self.run_batch(&batch) {
            for &(i, _) in &batch {
                self.seqs[i].done = Some(Done::Context);
                events.push(Event::Failed { seq: self.seqs[i].id, error: e.again() });
            }
            return events;
        }
        let took = started.elapsed();
        let vocab = self.hyper.vocab;
        let mut logits = std::mem::take(&mut self.out.logits);
        let mut rows = logits.chunks_mut(vocab);
        let mut first_row = 0;
        for &(i, n) in &batch {
            let s = &mut self.seqs[i];
            let prefill = s.in_prompt();
            s.table.tokens += n;
            *(if prefill { &mut s.stats.prefill } else { &mut s.stats.decode }) += took;
            if prefill {
                events.push(Event::Prefilled { seq: s.id, tokens: s.table.tokens });
            }
            if matches!(s.goal, Goal::Embed) {
                let hidden = self.hyper.hidden;
                s.add_hidden(&self.out.hidden[0][first_row * hidden..(first_row + n) * hidden], &mut events);
            } else if s.pending() == 0 {
                let row = rows.next().expect("a row of logits for each sequence that is read through");
                s.take_token(row, self.context_tokens, &mut events);
            }
            first_row += n;
        }
        drop(rows);
        self.out.logits = logits;
        events
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

    /// `(index, tokens)` of the sequences to advance.
    fn choose(&mut self, budget: &Budget, events: &mut Vec<Event>) -> Vec<(usize, usize)> {
        let rows_max = self.backend.rows_max();
        let mut order: Vec<usize> = (0..self.seqs.len()).filter(|&i| self.seqs[i].done.is_none()).collect();
        order.sort_by_key(|&i| self.seqs[i].class); // stable: the oldest of a class first
        let (prompts, decoding): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|&i| self.seqs[i].in_prompt());
        let most = budget.max_batch.clamp(1, rows_max);
        let mut batch: Vec<_> =
            decoding.into_iter().take(most).map(|i| (i, self.seqs[i].pending())).collect();
        let room = budget.prefill_chunk.max(1).min(rows_max - batch.len());
        if let Some(&i) = prompts.first().filter(|_| room > 0) {
            batch.push((i, self.seqs[i].pending().min(room)));
        }
        let mut kept = Vec::with_capacity(batch.len());
        for (i, n) in batch {
            let s = &mut self.seqs[i];
            match s.table.reserve(&mut self.pool, s.table.tokens + n, self.stride) {
                Ok(()) => kept.push((i, n)),
                // An answer that has begun ends where the cache does; a prompt that does not fit is refused.
                Err(_) if !s.in_prompt() => s.end(Done::Context, events),
                Err(error) => {
                    s.done = Some(Done::Context);
                    events.push(Event::Failed { seq: s.id, error });
                }
            }
        }
        kept
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
                    // Generated rows are always absorbed; prompt rows keep what was chosen for the prompt.
                    mla: if at < s.prompt_len { s.order } else { MlaOrder::Absorbed },
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
