//! From a checked request to text: hands prompts to the engine and turns its replies into pieces of answers.
//!
//! A request may have several prompts, each with several answers; their pieces come as they are made. Dropping a
//! [`Running`], as happens when a client is gone, cancels its requests before the engine's next step.

use super::answer::{Answer, Delta, Finish, Reading};
use super::body::Source;
use super::fail::Fail;
use super::fields::Answered;
use super::models::Lease;
use super::options::Options;
use super::power::{Bill, Energy};
use crate::engine::service::{Reply, Stream, Submit, Work};
use crate::engine::{Done, Stats};
use crate::sample::{SampleParams, Sampler};
use crate::units::TokenId;
use axum::body::Bytes;
use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Instant;

/// Counts of a whole request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt: usize,
    /// Those of them that were in the cache.
    pub cached: usize,
    /// Tokens of all answers.
    pub generated: usize,
    /// Times of the last answer that ended.
    pub stats: Stats,
    /// Prompt tokens of all prompts that had to be read.
    pub read: usize,
    /// What it took of the board's energy, once it has ended.
    pub energy: Option<Energy>,
}

/// One prompt on its way.
struct Part {
    stream: Option<Stream>,
    answers: Vec<Answer>,
    finished: Vec<bool>,
    /// The place of its first answer among all answers.
    first: usize,
}

/// A request on its way.
pub struct Running {
    lease: Lease,
    parts: Vec<Part>,
    bill: Option<Bill>,
    /// Counts so far.
    pub usage: Usage,
}

/// What happened.
pub enum Step {
    /// More of an answer; with a reason if it ends here.
    Delta(usize, Delta, Option<Finish>),
    /// The request cannot go on.
    Failed(Fail),
    /// All answers have ended.
    End,
}

impl Running {
    /// Submits one prompt or several. `seed + i` is the seed of answer `i`.
    ///
    /// Compiles grammars and makes samplers: for a thread that may take its time.
    pub fn start(
        lease: Lease,
        prompts: Vec<Vec<TokenId>>,
        o: &Options,
        reading: &Reading,
        client: &str,
        deadline: Instant,
    ) -> Answered<Running> {
        let mut running =
            Running { parts: Vec::new(), usage: Usage::default(), bill: Bill::open(&lease), lease };
        let live = &running.lease;
        let mut params = o.params.clone();
        add_breakers(live, &mut params);
        for prompt in prompts {
            let mut samplers = Vec::with_capacity(o.n);
            let mut answers = Vec::with_capacity(o.n);
            for i in 0..o.n {
                let seed = params.seed.wrapping_add((running.parts.len() * o.n + i) as u64);
                let mut sampler = Sampler::new(SampleParams { seed, ..params.clone() })?;
                // Penalties see the prompt too.
                prompt.iter().for_each(|&t| sampler.accept(t));
                if let Some((form, field)) = &o.form {
                    sampler = sampler.constrained(live.grammars.compile(form, field)?);
                }
                samplers.push(sampler);
                answers.push(Answer::new(reading)?);
            }
            running.usage.prompt += prompt.len();
            let end_ids = if o.ignore_end { Vec::new() } else { live.tokenizer.end_ids().to_vec() };
            let room = live.handle.context_tokens().saturating_sub(prompt.len());
            let max_new = o.max_tokens.unwrap_or(room.max(1));
            let stream = live.handle.submit(Submit {
                prompt,
                work: Work::Generate { samplers, max_new, end_ids },
                class: o.class,
                deadline: Some(o.deadline.map_or(deadline, |d| d.min(deadline))),
                client: o.client.clone().unwrap_or_else(|| client.to_owned()),
                slide: o.slide,
                // A session is one conversation: that of the first prompt.
                session: o.session.clone().filter(|_| running.parts.is_empty()),
            })?;
            let first = running.parts.len() * o.n;
            running.parts.push(Part { stream: Some(stream), answers, finished: vec![false; o.n], first });
        }
        Ok(running)
    }

    /// The model that answers.
    pub fn live(&self) -> &Lease {
        &self.lease
    }

    /// How many answers there will be.
    pub fn answers(&self) -> usize {
        self.parts.iter().map(|p| p.answers.len()).sum()
    }

    /// What happens next.
    pub fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Step> {
        let mut waits = false;
        for part in &mut self.parts {
            match part.poll(cx, &self.lease, &mut self.usage) {
                Poll::Pending => waits = true,
                Poll::Ready(Some(step)) => return Poll::Ready(step),
                Poll::Ready(None) => {}
            }
        }
        if waits {
            return Poll::Pending;
        }
        self.usage.energy =
            self.bill.take().and_then(|b| b.close(&self.lease, &self.usage)).or(self.usage.energy);
        Poll::Ready(Step::End)
    }

    /// The whole of every answer.
    pub async fn collect(mut self) -> Answered<(Vec<(Delta, Finish)>, Running)> {
        let count = self.answers();
        let mut all: Vec<(Delta, Finish)> = (0..count).map(|_| (Delta::default(), Finish::Length)).collect();
        loop {
            match poll_fn(|cx| self.poll_step(cx)).await {
                Step::Delta(i, delta, finish) => {
                    let (whole, end) = &mut all[i];
                    whole.content.push_str(&delta.content);
                    whole.reasoning.push_str(&delta.reasoning);
                    whole.calls.extend(delta.calls);
                    whole.tokens.extend(delta.tokens);
                    *end = finish.unwrap_or(*end);
                }
                Step::Failed(fail) => return Err(fail),
                Step::End => return Ok((all, self)),
            }
        }
    }
}

/// DRY does not reach over these: repeating a list's bullets or a dialogue's quotes is no repetition.
fn add_breakers(live: &Lease, params: &mut SampleParams) {
    if params.dry_multiplier > 0.0 && params.dry_breakers.is_empty() {
        let spelled = |s: &str| live.tokenizer.sequences_with(s).unwrap_or_default();
        params.dry_breakers = ["\n", ":", "\"", "*"].into_iter().flat_map(spelled).collect();
    }
}

impl Part {
    fn poll(&mut self, cx: &mut Context<'_>, live: &Lease, usage: &mut Usage) -> Poll<Option<Step>> {
        loop {
            let Some(stream) = &mut self.stream else { return Poll::Ready(None) };
            let reply = match stream.poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    self.stream = None;
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Err(e))) => {
                    self.stream = None;
                    return Poll::Ready(Some(Step::Failed(e.into())));
                }
                Poll::Ready(Some(Ok(reply))) => reply,
            };
            let step = match reply {
                Reply::Token { choice, sampled } => self.token(choice, sampled, live, usage),
                Reply::Done { choice, why, stats } => self.done(choice, why, stats, usage),
                Reply::Prefilled { .. } | Reply::Embedding { .. } => None,
            };
            if step.is_some() {
                return Poll::Ready(step);
            }
        }
    }

    fn token(
        &mut self,
        choice: usize,
        sampled: crate::sample::Sampled,
        live: &Lease,
        usage: &mut Usage,
    ) -> Option<Step> {
        if self.finished[choice] {
            return None;
        }
        usage.generated += 1;
        let mut delta = Delta::default();
        self.answers[choice].push(&live.tokenizer, sampled, &mut delta);
        if self.answers[choice].stopped {
            // The engine would go on; it is told to end, so that the answer's counts come and its session is kept.
            if let Some(stream) = &self.stream {
                stream.stop(choice);
            }
            return Some(self.end(choice, Done::Stopped, delta));
        }
        // Tokens without text wait for it: a piece is whole characters.
        let silent = delta.content.is_empty() && delta.reasoning.is_empty() && delta.calls.is_empty();
        (!silent || !delta.tokens.is_empty()).then_some(Step::Delta(self.first + choice, delta, None))
    }

    fn done(&mut self, choice: usize, why: Done, stats: Stats, usage: &mut Usage) -> Option<Step> {
        if choice == 0 {
            usage.cached += stats.reused;
            usage.read += stats.prefilled;
        }
        usage.stats = stats;
        (!self.finished[choice]).then(|| self.end(choice, why, Delta::default()))
    }

    fn end(&mut self, choice: usize, why: Done, mut delta: Delta) -> Step {
        let finish = self.answers[choice].finish(why, &mut delta);
        self.finished[choice] = true;
        Step::Delta(self.first + choice, delta, Some(finish))
    }
}

/// How pieces are written: OpenAI's events or Ollama's lines. Nothing to say is empty text.
pub trait Render: Send + Unpin + 'static {
    /// Before the first piece.
    fn head(&mut self) -> String;
    /// A piece.
    fn piece(&mut self, running: &Running, index: usize, delta: &Delta, finish: Option<Finish>) -> String;
    /// After the last.
    fn end(&mut self, running: &Running) -> String;
    /// Instead of more.
    fn failed(&mut self, fail: &Fail) -> String;
}

/// The pieces of a request as the bytes of a body.
pub struct Pieces<R> {
    running: Running,
    render: R,
    begun: bool,
    ended: bool,
}

impl<R: Render> Pieces<R> {
    /// Streams what `running` makes.
    pub fn new(running: Running, render: R) -> Pieces<R> {
        Pieces { running, render, begun: false, ended: false }
    }
}

impl<R: Render> Source for Pieces<R> {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if !self.begun {
            self.begun = true;
            let head = self.render.head();
            if !head.is_empty() {
                return Poll::Ready(Some(head.into()));
            }
        }
        while !self.ended {
            let Poll::Ready(step) = self.running.poll_step(cx) else { return Poll::Pending };
            let text = match step {
                Step::Delta(i, delta, finish) => self.render.piece(&self.running, i, &delta, finish),
                Step::Failed(fail) => {
                    self.ended = true;
                    self.render.failed(&fail)
                }
                Step::End => {
                    self.ended = true;
                    self.render.end(&self.running)
                }
            };
            if !text.is_empty() {
                return Poll::Ready(Some(text.into()));
            }
        }
        Poll::Ready(None)
    }
}
