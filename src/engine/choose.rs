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
/// The same where no one else has asked for anything: a newcomer is less likely, and larger chunks read weights less often.
const STEP_ALONE: Duration = Duration::from_millis(60);
/// Short chunks are multiples of this. Far into a long prompt even so few rows take most of a step's time.
const CHUNK: usize = PAGE_TOKENS / 4;
/// A prompt of which nothing was read for a second counts as this many tokens shorter.
const AGE_TOKENS: f64 = 256.0;
/// A prompt under way gives way to those of clients that have none, but not for longer than this.
const GIVE_WAY: Duration = Duration::from_secs(2);

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
        let mut answers = false;
        for i in self.prompt_order_of(prompts, now) {
            let class = self.seqs[i].class;
            if room == 0 || (urgent && class != Class::Interactive) {
                break;
            }
            let chunk = self.chunk(i, budget.prefill_chunk).min(room);
            // A step after which someone has a first token is not made longer by a piece of a long prompt.
            if answers && chunk < self.seqs[i].pending() {
                continue;
            }
            if !self.seqs[i].attached && !self.admit(i, most, &kept) {
                continue;
            }
            // What was cached may be all but the last token: a row like those that generate.
            let rows = self.seqs[i].next_rows(chunk);
            if self.keep_rows(i, rows, &mut kept, events) {
                // One chunk keeps a newcomer waiting as long as another: they share the step's time.
                room = room.min(chunk) - rows.min(room.min(chunk));
                answers |= class == Class::Interactive && rows == self.seqs[i].pending();
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

    /// Prompts in the order in which they are read: by class, then deadline; then those of clients that have nothing under way,
    /// then the client served least; of one client the shortest, in which waiting counts.
    fn prompt_order_of(&self, mut prompts: Vec<usize>, now: Instant) -> Vec<usize> {
        let key = |&i: &usize| {
            let s = &self.seqs[i];
            let waited = now.saturating_duration_since(s.advanced);
            let length = (s.pending() as f64 - waited.as_secs_f64() * AGE_TOKENS).max(0.0) as u64;
            // Of two deadlines only a pressing one counts, and then it counts most.
            let left = s.deadline.map(|d| d.saturating_duration_since(now));
            let pressing = left.filter(|l| *l < Duration::from_secs(10)).unwrap_or(Duration::MAX);
            // Whoever asks for the first time need not wait until a long prompt of another is read, however little that other
            // was given before.
            let settled = waited < GIVE_WAY && self.running(s.class, Some(&s.client)) > 0;
            (s.class, pressing, settled, self.accounts.level(&s.client, now), length, s.id)
        };
        prompts.sort_by_cached_key(key);
        prompts
    }

    /// Most rows of a chunk of sequence `i`.
    fn chunk(&self, i: usize, most: usize) -> usize {
        let s = &self.seqs[i];
        // By all that it had to read: the end of a long prompt is dearer than the whole of a short one.
        let short = s.class == Class::Interactive && s.stats.prefilled <= most && s.pending() <= most;
        if !self.shared || short {
            return most.max(1);
        }
        s.chunk.rows().min(most).max(1)
    }

    /// Learns from a step's time.
    pub(super) fn learn(&mut self, batch: &[(usize, usize)], took: Duration) {
        let least = Duration::from_micros(self.small_step_us as u64);
        let mut reads = false;
        let alone = self.seqs.iter().filter(|s| s.done.is_none()).count() == 1;
        let step = if alone { STEP_ALONE } else { STEP };
        for &(i, rows) in batch {
            let s = &mut self.seqs[i];
            reads |= rows > 1;
            // The last piece of a prompt is shorter, and one of a short prompt longer.
            if rows > 1 && rows == s.chunk.rows() {
                s.chunk.learn(took, step.max(2 * least));
            }
        }
        if !reads {
            let weight = if self.small_step_us == 0.0 { 1.0 } else { 0.1 };
            self.small_step_us += weight * (took.as_micros() as f64 - self.small_step_us);
        }
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
        let rank = self.rank(i);
        // The pages of a session that is being saved are the last that can be had: they cost a wait for the disk.
        let has_room = self.make_room(lacks, rank, &protected)
            || (self.finish_saves() && self.make_room(lacks, rank, &protected));
        if !has_room {
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
}

/// How many rows of a long prompt a step takes: so many that it lasts as long as it may, found from how long the last one
/// took. Rows become dearer the further a prompt is read, and what a row costs differs a hundredfold between machines: no rule
/// made beforehand would do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    rows: f64,
}

impl Default for Chunk {
    fn default() -> Chunk {
        Chunk { rows: CHUNK as f64 }
    }
}

impl Chunk {
    /// Rows of the next step. Few lengths, of which pages are made.
    pub fn rows(self) -> usize {
        ((self.rows / CHUNK as f64).round() as usize).max(1) * CHUNK
    }

    /// A step with as many rows of this prompt took so long, and `may` take so long.
    pub fn learn(&mut self, took: Duration, may: Duration) {
        let may = may.as_secs_f64();
        // One step that something disturbed says little.
        let change = (may / took.as_secs_f64().max(1e-6)).clamp(0.5, 2.0);
        self.rows = (self.rows() as f64 * change).clamp(CHUNK as f64, 65_536.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a step after a prompt was read for a while on a machine with these times.
    fn settled(step_ms: f64, row_ms: f64, small_ms: f64) -> usize {
        let mut chunk = Chunk::default();
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        for _ in 0..20 {
            chunk.learn(ms(step_ms + row_ms * chunk.rows() as f64), STEP.max(2 * ms(small_ms)));
        }
        chunk.rows()
    }

    #[test]
    fn chunks_follow_the_pace_of_the_machine() {
        // A small model on two cores, at the beginning of a prompt and far into it.
        assert!((16..=24).contains(&settled(5.0, 0.85, 5.0)));
        assert!((72..=80).contains(&settled(5.0, 0.2, 5.0)));
        assert_eq!(settled(5.0, 3.0, 7.0), 8);
        // A GPU that reads its weights in 50 ms and adds 0.6 ms a row.
        assert!((80..=96).contains(&settled(50.0, 0.6, 50.0)));
        // A fast one.
        assert!((430..=470).contains(&settled(2.0, 0.04, 2.0)));
        // One so slow that a row is longer than the step may be.
        assert_eq!(settled(0.0, 50.0, 40.0), 8);
        // A disturbance costs one short step.
        let mut chunk = Chunk { rows: 64.0 };
        chunk.learn(Duration::from_millis(500), STEP);
        assert_eq!(chunk.rows(), 32);
        chunk.learn(Duration::from_millis(10), STEP);
        assert_eq!(chunk.rows(), 64);
    }
}
