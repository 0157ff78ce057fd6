//! What the next step advances: rows that generate, and chunks of prompts.
//!
//! An earlier class goes first. While someone waits for a first token, prompts of other classes rest and so do background
//! rows; and since someone may come at any moment, the chunks of other prompts are as short as the machine's speed
//! demands. Within a class clients share evenly ([`super::fair`]).

use super::request::{Class, Done, Event};
use super::{Budget, Engine};
use crate::kv::PAGE_TOKENS;
use crate::units::Error;
use std::time::{Duration, Instant};

/// How long a step may keep a newcomer waiting.
const STEP: Duration = Duration::from_millis(20);
/// Short chunks are multiples of this: half a page.
const CHUNK: usize = PAGE_TOKENS / 2;
/// A machine slower than this a row reads larger chunks all the same: its weights are read once a chunk.
const SLOW_ROW_US: f64 = 1000.0;
/// A prompt of which nothing was read for a second counts as this many tokens shorter.
const AGE_TOKENS: f64 = 256.0;

impl Engine {
    /// `(index, rows)` of the sequences to advance, with room for those rows.
    pub(super) fn choose(&mut self, budget: &Budget, events: &mut Vec<Event>) -> Vec<(usize, usize)> {
        let now = Instant::now();
        let live: Vec<usize> = (0..self.seqs.len()).filter(|&i| self.seqs[i].done.is_none()).collect();
        for &i in &live {
            self.accounts.seen(&self.seqs[i].client, now);
        }
        let (prompts, decoding): (Vec<usize>, Vec<usize>) =
            live.into_iter().partition(|&i| self.seqs[i].reading());
        let urgent = prompts.iter().any(|&i| self.seqs[i].class == Class::Interactive);
        let rows_max = self.backend.rows_max();
        let most = budget.max_batch.clamp(1, rows_max);
        let mut kept: Vec<(usize, usize)> = Vec::new();
        for i in self.decode_rows(&decoding, most, urgent) {
            self.keep_rows(i, 1, &mut kept, events);
        }
        let mut room = budget.prefill_chunk.max(1).min(rows_max.saturating_sub(kept.len()));
        for i in self.prompt_order_of(prompts, now) {
            let class = self.seqs[i].class;
            if room == 0 || (urgent && class != Class::Interactive) {
                break;
            }
            let chunk = self.chunk(i, budget.prefill_chunk).min(room);
            if !self.seqs[i].attached && !self.admit(i, most, &kept) {
                continue;
            }
            // What was cached may be all but the last token: a row like those that generate.
            let rows = self.seqs[i].next_rows(chunk);
            if self.keep_rows(i, rows, &mut kept, events) {
                // One chunk keeps a newcomer waiting as long as another: they share the step's time.
                room = room.min(chunk) - rows.min(room.min(chunk));
            }
        }
        kept
    }

    /// The rows that generate in this step, first things first.
    fn decode_rows(&self, decoding: &[usize], most: usize, urgent: bool) -> Vec<usize> {
        let mut chosen = Vec::new();
        for class in [Class::Interactive, Class::Normal, Class::Background] {
            if urgent && class == Class::Background {
                break;
            }
            let of_class: Vec<usize> =
                decoding.iter().copied().filter(|&i| self.seqs[i].class == class).collect();
            let ready: Vec<(&str, u64)> =
                of_class.iter().map(|&i| (self.seqs[i].client.as_str(), self.seqs[i].served)).collect();
            let picks = self.accounts.choose(&ready, most - chosen.len());
            chosen.extend(picks.into_iter().map(|p| of_class[p]));
        }
        chosen
    }

    /// Prompts in the order in which they are read: by class, then deadline, then the client served least; of one client the
    /// shortest, in which waiting counts.
    fn prompt_order_of(&self, mut prompts: Vec<usize>, now: Instant) -> Vec<usize> {
        let key = |&i: &usize| {
            let s = &self.seqs[i];
            let waited = now.saturating_duration_since(s.advanced).as_secs_f64();
            let length = (s.pending() as f64 - waited * AGE_TOKENS).max(0.0) as u64;
            // Of two deadlines only a pressing one counts, and then it counts most.
            let left = s.deadline.map(|d| d.saturating_duration_since(now));
            let pressing = left.filter(|l| *l < Duration::from_secs(10)).unwrap_or(Duration::MAX);
            // Of clients who were given as much, one that has nothing under way is first.
            let own = self.running(s.class, Some(&s.client)).min(1);
            (s.class, pressing, self.accounts.level(&s.client), own, length, s.id)
        };
        prompts.sort_by_cached_key(key);
        prompts
    }

    /// Most rows of a chunk of sequence `i`.
    fn chunk(&self, i: usize, most: usize) -> usize {
        let s = &self.seqs[i];
        let short = s.class == Class::Interactive && s.pending() <= most;
        if !self.shared || short {
            return most.max(1);
        }
        let known = if self.row_us > 0.0 { self.row_us } else { SLOW_ROW_US };
        let least = if known > SLOW_ROW_US { 2 * PAGE_TOKENS } else { CHUNK };
        let rows = (STEP.as_micros() as f64 / known) as usize;
        // Few lengths, of which pages are made.
        (rows / CHUNK * CHUNK).clamp(least, most.max(least)).min(most.max(1))
    }

    /// Lets a sequence begin, or come back: if not too many of its rank run already, and if all that it reads would fit.
    fn admit(&mut self, i: usize, batch: usize, kept: &[(usize, usize)]) -> bool {
        let s = &self.seqs[i];
        // Whoever has none under way may have one: the slots are not for who comes first to take them all.
        let full = self.running(s.class, None) >= (2 * batch).max(16);
        if full && self.running(s.class, Some(&s.client)) > 0 {
            return false;
        }
        let kept: Vec<usize> = kept.iter().map(|&(k, _)| k).collect();
        self.attach(i, &kept)
    }

    /// Sequences under way of this class or an earlier one, of all clients or of one.
    fn running(&self, class: Class, client: Option<&str>) -> usize {
        let counts = |s: &&super::Sequence| {
            s.done.is_none() && s.attached && s.class <= class && client.is_none_or(|c| s.client == c)
        };
        self.seqs.iter().filter(counts).count()
    }

    /// Makes room for `rows` more rows of a sequence and adds it to the step. Without room it waits; if nothing else holds
    /// any, it ends.
    fn keep_rows(
        &mut self,
        i: usize,
        rows: usize,
        kept: &mut Vec<(usize, usize)>,
        events: &mut Vec<Event>,
    ) -> bool {
        // An earlier one of this step may have thrown it out.
        if !self.seqs[i].attached {
            return false;
        }
        let s = &self.seqs[i];
        let tokens = s.table.tokens + rows;
        let lacks = s.table.lacks(&self.pool, tokens, self.stride);
        let protected: Vec<usize> = kept.iter().map(|&(k, _)| k).chain([i]).collect();
        if !self.make_room(lacks, self.rank(i), &protected) {
            self.end_if_hopeless(i, tokens, events);
            return false;
        }
        let s = &mut self.seqs[i];
        let copies = s.table.reserve(&mut self.pool, tokens, self.stride).expect("room was made");
        for (from, to) in copies {
            if let Err(error) = self.backend.copy_page(from, to) {
                self.end_without_copy(i, error, events);
                return false;
            }
            self.cache_counters.copied += 1;
        }
        kept.push((i, rows));
        true
    }

    /// Ends a sequence whose half-written block could not be copied: what the block holds now is undefined and must not
    /// reach the prefix tree.
    fn end_without_copy(&mut self, i: usize, error: Error, events: &mut Vec<Event>) {
        let whole = self.seqs[i].table.tokens / self.block_tokens() * self.block_tokens();
        let s = &mut self.seqs[i];
        s.table.truncate(&mut self.pool, whole, self.stride);
        s.tags.truncate(whole);
        s.done = Some(Done::Context);
        events.push(Event::Failed { seq: s.id, error });
    }

    /// Ends a sequence for which there will never be room: an answer that has begun ends where the cache does, a prompt that
    /// does not fit is refused.
    fn end_if_hopeless(&mut self, i: usize, tokens: usize, events: &mut Vec<Event>) {
        let others = self.seqs.iter().enumerate().filter(|(k, s)| *k != i && s.done.is_none());
        if others.map(|(_, s)| s.table.pages.len()).sum::<usize>() > 0 {
            return;
        }
        let s = &mut self.seqs[i];
        if !s.in_prompt() {
            return s.end(Done::Context, events);
        }
        let error = s.table.reserve(&mut self.pool, tokens, self.stride).map(|_| ());
        if let Err(error) = error {
            s.done = Some(Done::Context);
            events.push(Event::Failed { seq: s.id, error });
        }
    }

    /// Learns how long a row of a large step takes.
    pub(super) fn learn(&mut self, rows: usize, took: Duration) {
        if rows < PAGE_TOKENS / 2 {
            return;
        }
        let row_us = took.as_micros() as f64 / rows as f64;
        let weight = if self.row_us == 0.0 { 1.0 } else { 0.25 };
        self.row_us += weight * (row_us - self.row_us);
    }
}
