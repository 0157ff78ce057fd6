//! The engine's thread: takes commands, advances the engine, hands out what happened.

use super::sessions::{Reply as SessionReply, SessionInfo, SessionOp, Sessions};
use super::stream::{Reply, RequestId, Writer};
use super::{Activity, Command, Metrics, OnPanic, RequestInfo, Shared, Submit, Work, lock};
use crate::backend::Workers;
use crate::engine::pressure::Watch;
use crate::engine::{Budget, Done, Engine, Event, Goal, Request, SeqId};
use crate::sample::Sampler;
use crate::units::{Bytes, Error, Result};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

/// How long the thread sleeps when open requests must wait; commands end the sleep at once, deadlines are seen after it.
const WAIT: Duration = Duration::from_millis(50);
/// The same when nothing is open: memory is looked at after it, and the robot's processor sleeps meanwhile.
const IDLE: Duration = Duration::from_millis(400);
/// The same while a session is being written or read: its next blocks wait for the disk.
const SAVING: Duration = Duration::from_millis(2);
/// What blocks of sessions may take of the time between two steps, in each direction.
const SAVE_BETWEEN: Duration = Duration::from_millis(2);

/// How long memory must not have been short before the cache may grow again.
const CALM: Duration = Duration::from_secs(5);

/// A request on its way.
struct Open {
    channel: Writer,
    request: Submit,
    /// Choices that wait for the prompt to be read, with their samplers.
    waiting: VecDeque<(usize, Sampler)>,
    seqs: Vec<SeqId>,
    read_tokens: usize,
    generated: usize,
    taken: Instant,
}

struct Worker {
    engine: Engine,
    shared: Arc<Shared>,
    open: BTreeMap<RequestId, Open>,
    /// Whose a sequence is.
    owners: HashMap<SeqId, (RequestId, usize)>,
    metrics: Metrics,
    sessions: Sessions,
    watch: Watch,
    /// When memory was last short, while the pool is still held small for it.
    short_at: Option<Instant>,
    /// Set by a command to stop: when the rest fails.
    stop: Option<Instant>,
    /// Running mean of the seconds that a request takes.
    request_seconds: f64,
    /// The threads that compute, once someone said which.
    workers: Option<Workers>,
}

/// Runs until told to stop. A panic fails what is open; the reason stays in `shared`.
pub fn run(mut engine: Engine, shared: Arc<Shared>, commands: Receiver<Command>, on_panic: OnPanic) {
    engine.set_shared(true);
    engine.set_pulse(shared.pulse.clone());
    let mut worker = Worker {
        engine,
        shared: shared.clone(),
        open: BTreeMap::new(),
        owners: HashMap::new(),
        metrics: Metrics::default(),
        sessions: Sessions::new(&shared.limits),
        watch: Watch::new(),
        short_at: None,
        stop: None,
        request_seconds: 1.0,
        workers: None,
    };
    let ended = catch_unwind(AssertUnwindSafe(|| worker.serve(&commands)));
    let why = match &ended {
        Ok(()) => "it was told to".to_owned(),
        Err(panic) => reason(&**panic),
    };
    *lock(&shared.stopped) = Some(why.clone());
    for open in worker.open.values() {
        open.channel.0.end(Some(Error::Stopped(why.clone())));
    }
    // Requests that were sent and never seen.
    while let Ok(command) = commands.try_recv() {
        if let Command::Submit(_, _, channel) = command {
            channel.0.end(Some(Error::Stopped(why.clone())));
        }
    }
    if ended.is_err() {
        log::error!("engine: {why}");
        worker.sessions.give_up();
        // What panicked half way is not run again, not even to be dropped.
        std::mem::forget(worker);
        if let OnPanic::Call(f) = on_panic {
            f(&why);
        }
    }
}

fn reason(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

impl Worker {
    fn serve(&mut self, commands: &Receiver<Command>) {
        let (mut idle, mut saving) = (true, false);
        // Whoever looks before the first request finds the cache's size too.
        self.publish();
        loop {
            let rest = match self.open.is_empty() {
                _ if saving || self.sessions.is_restoring() => SAVING,
                true => IDLE,
                false => WAIT,
            };
            if self.take_commands(commands, idle.then_some(rest)).is_none() {
                return;
            }
            self.let_go();
            self.watch_memory();
            self.shared.pulse.beat();
            let workers = *lock(&self.shared.workers);
            if workers != self.workers {
                workers.into_iter().for_each(|w| self.engine.set_workers(w));
                self.workers = workers;
            }
            let budget = *lock(&self.shared.budget);
            self.tell(&budget);
            let started = Instant::now();
            let events = self.engine.advance(&budget);
            idle = events.is_empty();
            if !idle {
                self.metrics.steps += 1;
                self.metrics.step_time += started.elapsed();
            }
            events.into_iter().for_each(|e| self.deliver(e));
            saving = self.engine.pump_saves(SAVE_BETWEEN);
            self.pump_restores();
            self.publish();
            if self.stop.is_some_and(|at| self.open.is_empty() || at <= Instant::now()) {
                return self.save_all(commands);
            }
        }
    }

    /// Writes what is not in its file yet, and waits for that and for what is being written.
    fn save_all(&mut self, commands: &Receiver<Command>) {
        // What is being written now may be older than what is in memory: after it, so all that was asked is done.
        self.finish_saving(commands);
        for name in self.sessions.unsaved() {
            self.save(&name, None);
        }
        self.finish_saving(commands);
    }

    fn finish_saving(&mut self, commands: &Receiver<Command>) {
        while self.sessions.is_saving() {
            self.engine.pump_saves(IDLE);
            match commands.recv_timeout(SAVING) {
                Ok(c) => self.command(c),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Goes on with sessions that are being read; what waited for one begins.
    fn pump_restores(&mut self) {
        let Some(waited) = self.sessions.pump(&mut self.engine, SAVE_BETWEEN) else { return };
        waited.requests.into_iter().for_each(|id| self.begin(id));
        for (op, reply) in waited.later {
            // After one that reads or writes again the rest waits again.
            self.session(op, &waited.name, reply);
        }
    }

    /// Says what the coming step is, so that clocks can change before it and not after.
    fn tell(&self, budget: &Budget) {
        let activity = match self.engine.sequences() {
            _ if budget.pause => Activity::Idle,
            (0, 0) => Activity::Idle,
            (0, _) => Activity::Decode,
            _ => Activity::Prefill,
        };
        self.shared.limits.signal.set(activity);
    }

    /// Takes what was sent; waits a moment for it if there is nothing else to do. `None`: no one can send any more.
    fn take_commands(&mut self, commands: &Receiver<Command>, rest: Option<Duration>) -> Option<()> {
        if let Some(rest) = rest {
            match commands.recv_timeout(rest) {
                Ok(c) => self.command(c),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(c) => self.command(c),
                Err(TryRecvError::Empty) => return Some(()),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Submit(id, submit, channel) => self.submit(id, *submit, channel),
            Command::Nudge => {}
            Command::Cancel(id, reply) => {
                let found = self.open.contains_key(&id);
                if found {
                    self.metrics.cancelled += 1;
                    self.finish(id, Some(Error::Interrupted));
                }
                let _ = reply.send(found); // who asked may be gone
            }
            Command::List(reply) => {
                let _ = reply.send(self.list()); // who asked may be gone
            }
            Command::Sessions(reply) => {
                let _ = reply.send(self.sessions.list(&mut self.engine)); // who asked may be gone
            }
            Command::Session(op, name, reply) => self.session(op, &name, reply),
            Command::Saved(name, how) => {
                for (op, reply) in self.sessions.saved(&name, how) {
                    // After one that writes again the rest waits again.
                    self.session(op, &name, reply);
                }
            }
            Command::Stop(at) => self.stop = Some(at),
        }
    }

    fn session(&mut self, op: SessionOp, name: &str, reply: SessionReply) {
        let Some(reply) = self.sessions.put_off(op, name, reply) else { return };
        let (sessions, engine) = (&mut self.sessions, &mut self.engine);
        let done = match op {
            SessionOp::Save => return self.save(name, Some(reply)),
            SessionOp::Restore => return sessions.restore(name, reply),
            SessionOp::Delete => sessions.delete(name).map(|i| (i, Vec::new())),
            SessionOp::Tokens => sessions.tokens(name).map(|tokens| {
                let cached_tokens = engine.keep(&tokens);
                let info =
                    SessionInfo { name: name.into(), tokens: tokens.len(), cached_tokens, file_bytes: None };
                (info, tokens)
            }),
        };
        let _ = reply.send(done); // who asked may be gone
    }

    /// Begins to write a session; the thread that writes sends a command when it is done.
    fn save(&mut self, name: &str, reply: Option<SessionReply>) {
        let (shared, named) = (self.shared.clone(), name.to_owned());
        let saved = Box::new(move |how| {
            let _ = shared.send(Command::Saved(named, how)); // an engine that has ended needs no telling
        });
        self.sessions.save(&mut self.engine, name, saved, reply);
    }

    /// Gives cache memory back when the system runs short, and takes it again, bit by bit, when that is over.
    fn watch_memory(&mut self) {
        if !self.shared.limits.watch_memory {
            return;
        }
        let now = Instant::now();
        match self.watch.look(now) {
            Some(0) if self.short_at.is_some_and(|at| now.duration_since(at) > CALM) => {
                self.short_at = (!self.engine.allow_growth()).then_some(now);
            }
            Some(0) | None => {}
            Some(bytes) => {
                let freed = self.engine.shrink(bytes);
                if self.short_at.is_none() || freed > 0 {
                    log::warn!("memory is short by {}: {} of cache given back", Bytes(bytes), Bytes(freed));
                }
                self.short_at = Some(now);
            }
        }
    }

    fn submit(&mut self, id: RequestId, mut request: Submit, channel: Writer) {
        self.metrics.requests += 1;
        let mut waiting = VecDeque::new();
        if let Work::Generate { samplers, .. } = &mut request.work {
            waiting.extend(std::mem::take(samplers).into_iter().enumerate());
        }
        let open = Open {
            channel,
            request,
            waiting,
            seqs: Vec::new(),
            read_tokens: 0,
            generated: 0,
            taken: Instant::now(),
        };
        self.open.insert(id, open);
        if self.stop.is_some() {
            return self.finish(id, Some(Error::Stopped("it is stopping".into())));
        }
        let session = self.open[&id].request.session.clone();
        match session.map_or(Ok(true), |name| self.sessions.begin(&name, id)) {
            Ok(true) => self.begin(id),
            Ok(false) => {} // when its session has been read
            Err(e) => self.fail(id, e),
        }
    }

    /// Opens a request's first sequence. The request may be gone, if it waited for that.
    fn begin(&mut self, id: RequestId) {
        if self.open.contains_key(&id)
            && let Err(e) = self.open_next(id)
        {
            self.fail(id, e);
        }
    }

    fn fail(&mut self, id: RequestId, error: Error) {
        self.metrics.failed += 1;
        self.finish(id, Some(error));
    }

    /// Opens the sequence of a request's next choice, or of its embedding.
    fn open_next(&mut self, id: RequestId) -> Result<()> {
        let open = self.open.get_mut(&id).expect("an open request");
        let r = &open.request;
        let (choice, goal) = match &r.work {
            Work::Embed => (0, Goal::Embed),
            Work::Generate { max_new, end_ids, .. } => {
                let Some((choice, sampler)) = open.waiting.pop_front() else { return Ok(()) };
                (choice, Goal::Generate { sampler, max_new: *max_new, end_ids: end_ids.clone() })
            }
        };
        let mut request = Request::of(r.prompt.clone(), goal);
        (request.class, request.deadline, request.client) = (r.class, r.deadline, r.client.clone());
        (request.prefix, request.slide) = (true, r.slide);
        let seq = self.engine.open(request, None)?;
        open.seqs.push(seq);
        self.owners.insert(seq, (id, choice));
        Ok(())
    }

    /// Lets go of what its reader gave up: whole requests, or choices of them; and of a disk that takes longer than a request
    /// has time, whose deadline the engine then sees.
    fn let_go(&mut self) {
        let now = Instant::now();
        let is_late =
            |id: &RequestId| self.open.get(id).is_some_and(|o| o.request.deadline.is_some_and(|d| d <= now));
        let late: Vec<RequestId> = self.sessions.waiting().filter(is_late).collect();
        for id in late {
            self.sessions.forget(id);
            self.begin(id);
        }
        let (mut gone, mut stopped) = (Vec::new(), Vec::new());
        for (&id, open) in &self.open {
            let (cancelled, choices) = open.channel.0.given_up();
            if cancelled {
                gone.push(id);
            } else {
                stopped.extend(choices.into_iter().map(|c| (id, c)));
            }
        }
        for id in gone {
            self.metrics.cancelled += 1;
            self.finish(id, None);
        }
        for owner in stopped {
            let seq = self.owners.iter().find(|(_, o)| **o == owner).map(|(seq, _)| *seq);
            // One that has ended meanwhile has said so.
            if let Some(ended) = seq.and_then(|seq| self.engine.stop(seq)) {
                self.deliver(ended);
            }
        }
    }

    /// Closes a request and its sequences.
    fn finish(&mut self, id: RequestId, error: Option<Error>) {
        let Some(open) = self.open.remove(&id) else { return };
        for seq in open.seqs {
            self.owners.remove(&seq);
            self.engine.close(seq);
        }
        // In this order: who sees the end finds its place free, and who sees the place free finds it counted.
        lock(&self.shared.metrics).clone_from(&self.metrics);
        self.shared.open.fetch_sub(1, Ordering::Relaxed);
        open.channel.0.end(error);
        self.request_seconds += 0.1 * (open.taken.elapsed().as_secs_f64() - self.request_seconds);
        let batch = lock(&self.shared.budget).max_batch.max(1);
        let ahead = (self.open.len() as f64 / batch as f64).max(1.0);
        let wait = (self.request_seconds * ahead).clamp(1.0, 60.0);
        self.shared.retry_us.store((wait * 1e6) as u64, Ordering::Relaxed);
    }

    /// Hands one event to the reader whose it is.
    fn deliver(&mut self, event: Event) {
        let (Event::Prefilled { seq, .. }
        | Event::Token { seq, .. }
        | Event::Embedding { seq, .. }
        | Event::Done { seq, .. }
        | Event::Failed { seq, .. }) = event;
        // A request that an earlier event of this step ended is not listened to any more.
        let Some(&(id, choice)) = self.owners.get(&seq) else { return };
        let stats = self.engine.stats(seq).unwrap_or_default();
        let open = self.open.get_mut(&id).expect("a sequence's request");
        let mut first = false;
        let reply = match event {
            Event::Prefilled { tokens, .. } => {
                open.read_tokens = open.read_tokens.max(tokens);
                Reply::Prefilled { tokens: open.read_tokens, of: open.request.prompt.len() }
            }
            Event::Token { sampled, .. } => {
                first = stats.generated == 1;
                open.generated += 1;
                self.metrics.generated_tokens += 1;
                Reply::Token { choice, sampled }
            }
            Event::Embedding { mean, .. } => Reply::Embedding { mean, stats },
            Event::Done { why, .. } => {
                first = true;
                self.metrics.ended(why);
                self.metrics.prefill_tokens += stats.prefilled as u64;
                self.metrics.reused_tokens += stats.reused as u64;
                self.owners.remove(&seq);
                let tokens = self.engine.tokens(seq).unwrap_or_default().to_vec();
                self.engine.close(seq);
                if let Some(name) = open.request.session.as_ref().filter(|_| choice == 0) {
                    self.sessions.update(&mut self.engine, name, &tokens);
                }
                open.seqs.retain(|s| *s != seq);
                if matches!(open.request.work, Work::Embed) && why != Done::Deadline {
                    return self.finish(id, None); // the embedding itself was the last reply
                }
                Reply::Done { choice, why, stats }
            }
            Event::Failed { error, .. } => {
                return self.fail(id, error);
            }
        };
        if !open.channel.0.push(reply, self.shared.limits.replies_max) {
            self.metrics.cancelled += 1;
            self.metrics.slow_readers += 1;
            let replies = |n: usize| format!("{n} replies unread");
            let most = self.shared.limits.replies_max;
            let slow = Error::Limit { what: "reader".into(), needs: replies(most + 1), has: replies(most) };
            return self.finish(id, Some(slow));
        }
        if first {
            self.open_waiting(id);
        }
    }

    /// After a prompt is read its other choices begin; after the last choice the request ends.
    fn open_waiting(&mut self, id: RequestId) {
        while self.open.get(&id).is_some_and(|o| !o.waiting.is_empty()) {
            if let Err(e) = self.open_next(id) {
                return self.fail(id, e);
            }
        }
        if self.open.get(&id).is_some_and(|o| o.seqs.is_empty()) {
            self.finish(id, None);
        }
    }

    fn list(&self) -> Vec<RequestInfo> {
        let info = |(&id, o): (&RequestId, &Open)| RequestInfo {
            id,
            client: o.request.client.clone(),
            class: o.request.class,
            prompt_tokens: o.request.prompt.len(),
            read_tokens: o.read_tokens,
            generated: o.generated,
            age: o.taken.elapsed(),
        };
        self.open.iter().map(info).collect()
    }

    fn publish(&mut self) {
        let m = &mut self.metrics;
        (m.prefilling, m.decoding) = self.engine.sequences();
        m.sessions_waiting = self.sessions.unwritten();
        let pool = self.engine.pool();
        (m.pages, m.pages_free, m.pages_resident) = (pool.len(), pool.free_pages(), pool.resident_pages());
        (m.blocks_cached, m.blocks_spilled) = self.engine.cached_blocks();
        m.cache = self.engine.cache_counters();
        m.page_bytes = self.engine.page_bytes();
        lock(&self.shared.metrics).clone_from(m);
    }
}
