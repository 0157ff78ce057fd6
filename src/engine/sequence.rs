//! One sequence in the engine.

use super::cached::tag;
use super::choose::Chunk;
use super::request::{Class, Done, Event, Goal, Request, SeqId, Stats};
use crate::backend::MlaOrder;
use crate::kv::{BlockTable, PagePool};
use crate::units::{Result, TokenId};
use std::time::Instant;

/// A request on its way.
pub(super) struct Sequence {
    pub id: SeqId,
    /// Prompt and what was generated; those from `table.tokens` on are not in the cache yet.
    pub tokens: Vec<TokenId>,
    pub prompt_len: usize,
    pub table: BlockTable,
    /// How each token of `table` was computed.
    pub tags: Vec<u8>,
    /// How the tokens were computed before the sequence was thrown out: they are read again in the same way.
    pub replay: Vec<u8>,
    /// It holds what was cached for it; false while it waits to begin, or to come back.
    pub attached: bool,
    /// Takes from the prefix tree, and adds to it.
    pub prefix: bool,
    /// Order of latent attention for the prompt, chosen when it begins.
    pub order: MlaOrder,
    pub goal: Goal,
    /// Embedding: the sum of hidden states so far, `(hidden)`.
    sum: Vec<f64>,
    pub class: Class,
    pub client: String,
    pub deadline: Option<Instant>,
    /// Tokens at the front that stay when the context is full and the rest moves on.
    pub slide: Option<usize>,
    /// The context is full: [`Sequence::slide_on`] is due.
    pub must_slide: bool,
    pub done: Option<Done>,
    /// The step that last advanced it.
    pub served: u64,
    /// How it is read where others may come.
    pub chunk: Chunk,
    /// When rows of it were last in a step; at first, when it was opened.
    pub advanced: Instant,
    opened: Instant,
    pub stats: Stats,
}

impl Sequence {
    /// A sequence that holds nothing yet.
    pub fn new(id: SeqId, r: Request, hidden: usize) -> Sequence {
        let prompt_len = r.prompt.len();
        Sequence {
            id,
            prompt_len,
            tokens: r.prompt,
            table: BlockTable::default(),
            tags: Vec::new(),
            replay: Vec::new(),
            attached: false,
            prefix: r.prefix && !matches!(r.goal, Goal::Embed), // a mean needs every row
            order: MlaOrder::Absorbed,
            sum: if matches!(r.goal, Goal::Embed) { vec![0.0; hidden] } else { Vec::new() },
            goal: r.goal,
            class: r.class,
            client: r.client,
            deadline: r.deadline,
            slide: r.slide,
            must_slide: false,
            done: None,
            served: 0,
            chunk: Chunk::default(),
            advanced: Instant::now(),
            opened: Instant::now(),
            stats: Stats::default(),
        }
    }

    /// The prompt begins, with `found` of its tokens in the cache. The row that gives the first logits counts as the first
    /// of decoding where all before it was there.
    pub fn start(&mut self, found: usize) {
        self.stats.prefilled = if found + 1 >= self.prompt_len { 0 } else { self.prompt_len - found };
        if found == 0 {
            self.stats.prefilled = self.prompt_len;
        }
        self.stats.reused = self.prompt_len - self.stats.prefilled;
    }

    /// Gives back all that it holds.
    pub fn detach(&mut self, pool: &mut PagePool) {
        self.table.clear(pool);
        self.tags.clear();
        self.attached = false;
    }

    /// Tokens that wait to be read.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.table.tokens
    }

    /// Part of the prompt is unread.
    pub fn in_prompt(&self) -> bool {
        self.table.tokens < self.prompt_len
    }

    /// More than the last token is unread: it has no row to generate from yet.
    pub fn reading(&self) -> bool {
        self.pending() > 1 || !self.attached
    }

    /// How the row at `position` is to be computed: as it was before, or the prompt as was chosen for it, and what was
    /// generated absorbed.
    pub fn tag_at(&self, position: usize) -> u8 {
        match self.replay.get(position) {
            Some(&tag) => tag,
            None if position < self.prompt_len => tag(self.order),
            None => tag(MlaOrder::Absorbed),
        }
    }

    /// Up to `most` of the rows that come next and are computed in one way.
    pub fn next_rows(&self, most: usize) -> usize {
        let first = self.tag_at(self.table.tokens);
        let rows = self.table.tokens..self.table.tokens + self.pending().min(most);
        rows.take_while(|&p| self.tag_at(p) == first).count()
    }

    /// The context is full: forgets the older half of what is not held at the front, and reads the rest anew at its new
    /// positions. (Turning cached keys back would be quicker and would round them once more each time.)
    pub fn slide_on(&mut self, pool: &mut PagePool, stride: usize) {
        let keep = self.slide.expect("asked for").min(self.tokens.len() / 2);
        let drop = (self.tokens.len() - keep).div_ceil(2);
        self.tokens.drain(keep..keep + drop);
        self.prompt_len = self.prompt_len.min(keep);
        let held = keep.min(self.table.tokens);
        self.table.truncate(pool, held, stride);
        self.tags.truncate(held);
        self.replay.clear();
        self.must_slide = false;
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
        if self.stats.generated == 0 {
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
        } else if self.tokens.len() > context {
            self.must_slide = self.slide.is_some();
            (!self.must_slide).then_some(Done::Context)
        } else {
            None
        };
        events.push(Event::Token { seq: self.id, sampled });
        if let Some(why) = why {
            self.end(why, events);
        }
        Ok(())
    }
}
