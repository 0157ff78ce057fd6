//! One request's events: a bounded queue between the engine's thread and a reader that may be slow, gone, or asynchronous.
//!
//! The engine never waits for a reader. Who falls behind by more than the queue holds is cancelled, so that one slow
//! client costs the others nothing.

use crate::engine::{Done, Stats};
use crate::sample::Sampled;
use crate::units::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// A request's number, never reused.
pub type RequestId = u64;

/// What a request gives.
#[derive(Debug)]
pub enum Reply {
    /// Some of the prompt was read; given once a step at most, and left out where the reader is behind.
    Prefilled {
        /// Prompt tokens in the cache, reused ones included.
        tokens: usize,
        /// Prompt tokens in all.
        of: usize,
    },
    /// One more token of a choice.
    Token {
        /// Which of the request's answers.
        choice: usize,
        /// The token.
        sampled: Sampled,
    },
    /// A choice has ended.
    Done {
        /// Which of the request's answers.
        choice: usize,
        /// Why.
        why: Done,
        /// Its times and counts.
        stats: Stats,
    },
    /// The mean hidden state that was asked for; the request ends with it.
    Embedding {
        /// `(hidden)` f32
        mean: Vec<f32>,
        /// Times and counts.
        stats: Stats,
    },
}

/// The shared queue.
#[derive(Default)]
pub(super) struct Channel {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    replies: VecDeque<Reply>,
    /// The engine will say no more; with an error if that is why.
    ended: Option<Option<Error>>,
    /// The reader is gone or wants no more.
    cancelled: bool,
    /// Choices of which the reader wants no more.
    stopped: Vec<usize>,
    waker: Option<Waker>,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A reader that panicked left a queue that is whole: nothing is half done under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let waker = state.waker.take();
        drop(state);
        self.arrived.notify_all();
        if let Some(w) = waker {
            w.wake();
        }
    }

    /// Adds a reply. False if the reader is more than `most` replies behind; progress is then left out instead.
    pub fn push(&self, reply: Reply, most: usize) -> bool {
        let mut state = self.lock();
        if state.replies.len() >= most {
            return matches!(reply, Reply::Prefilled { .. });
        }
        // Progress that no one has looked at yet is replaced by the newer.
        if matches!(reply, Reply::Prefilled { .. })
            && matches!(state.replies.back(), Some(Reply::Prefilled { .. }))
        {
            state.replies.pop_back();
        }
        state.replies.push_back(reply);
        self.wake(state);
        true
    }

    /// Ends the stream: what is queued can still be read, then comes the error, if any.
    pub fn end(&self, error: Option<Error>) {
        let mut state = self.lock();
        if state.ended.is_none() {
            state.ended = Some(error);
        }
        self.wake(state);
    }

    /// Whether the reader wants no more at all, and of which choices it wants no more; those are told once.
    pub fn given_up(&self) -> (bool, Vec<usize>) {
        let mut state = self.lock();
        (state.cancelled, std::mem::take(&mut state.stopped))
    }
}

/// The engine's end. However it is lost, the reader hears of it.
pub(super) struct Writer(pub Arc<Channel>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.end(Some(Error::Stopped("the request was lost with it".into())));
    }
}

/// The reader's end. Dropping it cancels the request.
pub struct Stream {
    id: RequestId,
    channel: Arc<Channel>,
    nudge: Box<dyn Fn() + Send + Sync>,
}

impl Stream {
    pub(super) fn new(id: RequestId, channel: Arc<Channel>, nudge: Box<dyn Fn() + Send + Sync>) -> Stream {
        Stream { id, channel, nudge }
    }

    /// The request's number, for [`Handle::cancel`](super::Handle::cancel) and listings.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next reply, for asynchronous readers: the waker is called once when there is something to read. `None` ends
    /// the stream, and so does an error.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Reply>>> {
        let mut state = self.channel.lock();
        match take(&mut state) {
            Some(next) => Poll::Ready(next),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The next reply, waiting for it.
    #[allow(clippy::should_implement_trait)] // an iterator's `next` could not say that it blocks
    pub fn next(&mut self) -> Option<Result<Reply>> {
        let mut state = self.channel.lock();
        loop {
            if let Some(next) = take(&mut state) {
                return next;
            }
            state = self.channel.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next reply, if it comes in time; `None` if it does not.
    pub fn next_within(&mut self, timeout: Duration) -> Option<Option<Result<Reply>>> {
        let until = Instant::now() + timeout;
        let mut state = self.channel.lock();
        loop {
            if let Some(next) = take(&mut state) {
                return Some(next);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.channel.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Wants no more of one choice, whose end is told as of any: with its counts, and what it computed is kept.
    pub fn stop(&self, choice: usize) {
        self.channel.lock().stopped.push(choice);
        (self.nudge)();
    }

    /// Wants no more: the engine lets go of the request before its next step.
    pub fn cancel(&self) {
        self.channel.lock().cancelled = true;
        (self.nudge)();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let ended = self.channel.lock().ended.is_some();
        if !ended {
            self.cancel();
        }
    }
}

/// What is next, if anything is; an end stays an end.
fn take(state: &mut State) -> Option<Option<Result<Reply>>> {
    if let Some(reply) = state.replies.pop_front() {
        return Some(Some(Ok(reply)));
    }
    let ended = state.ended.as_mut()?;
    Some(ended.take().map(Err))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Arc<Channel>, Stream) {
        let channel = Arc::new(Channel::default());
        (channel.clone(), Stream::new(1, channel, Box::new(|| {})))
    }

    fn done(choice: usize) -> Reply {
        Reply::Done { choice, why: Done::Length, stats: Stats::default() }
    }

    #[test]
    fn replies_come_in_order_and_an_error_comes_last_and_once() {
        let (channel, mut stream) = pair();
        let writer = std::thread::spawn(move || {
            (0..5).for_each(|i| assert!(channel.push(done(i), 8)));
            channel.end(Some(Error::Interrupted));
            channel.end(None);
        });
        for i in 0..5 {
            assert!(matches!(stream.next(), Some(Ok(Reply::Done { choice, .. })) if choice == i));
        }
        assert!(matches!(stream.next(), Some(Err(Error::Interrupted))));
        assert!(stream.next().is_none() && stream.next().is_none());
        writer.join().unwrap();
    }

    #[test]
    fn a_reader_that_is_behind_loses_progress_first_and_then_its_place() {
        let (channel, mut stream) = pair();
        for tokens in 0..10 {
            assert!(channel.push(Reply::Prefilled { tokens, of: 10 }, 2), "progress replaces progress");
        }
        assert!(channel.push(done(0), 2));
        assert!(channel.push(Reply::Prefilled { tokens: 10, of: 10 }, 2), "left out");
        assert!(!channel.push(done(1), 2));
        assert!(matches!(stream.next(), Some(Ok(Reply::Prefilled { tokens: 9, .. }))));
        assert!(matches!(stream.next(), Some(Ok(Reply::Done { choice: 0, .. }))));
        assert!(stream.next_within(Duration::from_millis(1)).is_none());
        drop(stream);
        assert_eq!(channel.given_up(), (true, vec![]));
    }

    #[test]
    fn a_choice_that_is_stopped_is_told_once() {
        let (channel, stream) = pair();
        stream.stop(2);
        assert_eq!(channel.given_up(), (false, vec![2]));
        assert_eq!(channel.given_up(), (false, vec![]));
    }

    #[test]
    fn a_waker_is_called_when_something_arrives() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        struct Count(AtomicUsize);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let (channel, mut stream) = pair();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        assert!(stream.poll_next(&mut cx).is_pending());
        channel.push(done(0), 8);
        channel.push(done(1), 8);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(matches!(stream.poll_next(&mut cx), Poll::Ready(Some(Ok(_)))));
        assert!(matches!(stream.poll_next(&mut cx), Poll::Ready(Some(Ok(_)))));
        channel.end(None);
        assert!(matches!(stream.poll_next(&mut cx), Poll::Ready(None)));
        drop(stream);
        assert!(!channel.given_up().0, "what has ended needs no cancelling");
    }
}
