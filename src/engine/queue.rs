//! A queue to a thread that writes, bounded in bytes: what waits for the disk takes memory that the board may not have.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

struct State<T> {
    items: VecDeque<(usize, T)>,
    /// Of items that wait and of the one that is being written.
    bytes: usize,
    closed: bool,
}

/// Items with their bytes, in order. One thread pushes, one pops.
pub(super) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    bytes_max: usize,
}

impl<T> Queue<T> {
    pub fn new(bytes_max: usize) -> Queue<T> {
        let state = State { items: VecDeque::new(), bytes: 0, closed: false };
        Queue { state: Mutex::new(state), changed: Condvar::new(), bytes_max }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing is half done under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `bytes` more may be pushed, but no longer than `within`. Into an empty queue anything may go: one item
    /// may be larger than the bound.
    pub fn room(&self, bytes: usize, within: Duration) -> bool {
        let until = Instant::now() + within;
        let mut state = self.lock();
        loop {
            if state.bytes == 0 || state.bytes + bytes <= self.bytes_max {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Adds an item. Who pushes many bytes asked for [`Queue::room`] before.
    pub fn push(&self, bytes: usize, item: T) {
        let mut state = self.lock();
        state.bytes += bytes;
        state.items.push_back((bytes, item));
        self.changed.notify_all();
    }

    /// The next item, when there is one; `None` once the queue is closed and empty. [`Queue::done`] is told when it is
    /// written: until then its bytes count.
    pub fn pop(&self) -> Option<(usize, T)> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                return Some(item);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What was popped has been written and dropped.
    pub fn done(&self, bytes: usize) {
        self.lock().bytes -= bytes;
        self.changed.notify_all();
    }

    /// No more is pushed; what waits is still popped, unless it is to be forgotten.
    pub fn close(&self, forget: bool) {
        let mut state = self.lock();
        state.closed = true;
        if forget {
            let waiting = std::mem::take(&mut state.items);
            state.bytes -= waiting.iter().map(|(bytes, _)| bytes).sum::<usize>();
        }
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_bounded_until_they_are_written() {
        let queue = Queue::new(10);
        assert!(queue.room(1000, Duration::ZERO), "anything into an empty one");
        queue.push(6, 'a');
        assert!(queue.room(4, Duration::ZERO) && !queue.room(5, Duration::ZERO));
        queue.push(4, 'b');
        let (bytes, item) = queue.pop().unwrap();
        assert_eq!((bytes, item, queue.room(1, Duration::from_millis(1))), (6, 'a', false));
        std::thread::scope(|scope| {
            scope.spawn(|| queue.done(6));
            assert!(queue.room(6, Duration::from_secs(60)), "who waits is woken");
        });
        queue.close(false);
        assert_eq!(queue.pop(), Some((4, 'b')));
        assert_eq!(queue.pop(), None);
        queue.done(4);
        queue.push(1, 'c');
        queue.close(true);
        assert_eq!(queue.pop(), None);
        assert!(queue.room(1000, Duration::ZERO));
    }
}
