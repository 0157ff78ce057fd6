//! Experts from host memory into their slots: by way of small pinned rings, on streams of their own, so that the GPU computes
//! meanwhile. One thread copies memory slower than the bus takes it, so several fill a ring each.

use super::lane::{Event, Lane};
use crate::backend::cuda::driver::{Context, Device};
use crate::backend::cuda::memory::{Pinned, Ptr};
use crate::backend::cuda::weights::{self, Stored};
use crate::format::{Codec, f16};
use crate::units::Result;
use crate::weights::{Matrix, WeightBytes};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a piece of a ring: a copy's fixed cost is some microseconds, a piece's transfer some ten.
const PIECE_BYTES: usize = 1 << 20;
/// Pieces of a ring: one is filled while the other is on its way.
const PIECES: usize = 2;
/// Rings, each with a thread while there is much to fill: four copy as much as memory gives on the boards.
const FILLERS: usize = 4;

/// The rings and their streams.
pub struct Upload {
    fillers: Vec<Filler>,
    /// Put, not sent yet.
    waiting: Vec<Piece>,
    /// Bytes put so far.
    pub bytes: u64,
}

/// One ring.
struct Filler {
    lane: Lane,
    ring: Pinned,
    /// When the GPU has taken a piece.
    taken: Vec<Event>,
    next: usize,
    /// After all that was sent here.
    all: Event,
    context: Arc<Context>,
}

/// What pieces are made from.
#[derive(Clone)]
enum Held {
    /// Weights as they lie.
    Weights(WeightBytes),
    /// Converted ones.
    Made(Arc<Vec<u8>>),
}

/// A part of a matrix on its way.
struct Piece {
    to: Ptr,
    from: Held,
    /// Of `from`.
    range: Range<usize>,
    /// f32 elements that become f16.
    narrow: bool,
}

impl Piece {
    /// Bytes at the other end.
    fn len(&self) -> usize {
        if self.narrow { self.range.len() / 2 } else { self.range.len() }
    }

    fn make(&self, to: &mut [u8]) {
        let from = match &self.from {
            Held::Weights(bytes) => &bytes[self.range.clone()],
            Held::Made(bytes) => &bytes[self.range.clone()],
        };
        if !self.narrow {
            return to.copy_from_slice(from);
        }
        for (to, b) in to.as_chunks_mut::<2>().0.iter_mut().zip(from.as_chunks::<4>().0) {
            *to = f16::from_f32(f32::from_le_bytes(*b)).to_le_bytes();
        }
    }
}

impl Filler {
    fn new(context: &Arc<Context>) -> Result<Filler> {
        Ok(Filler {
            lane: Lane::new(context)?,
            ring: Pinned::new(context, PIECE_BYTES * PIECES)?,
            taken: (0..PIECES).map(|_| Event::new(context)).collect::<Result<_>>()?,
            next: 0,
            all: Event::new(context)?,
            context: context.clone(),
        })
    }

    /// Sends pieces until none is left.
    fn send(&mut self, pieces: &[Piece], next: &AtomicUsize) -> Result<()> {
        self.context.bind()?;
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (taken, at) = (&self.taken[self.next], self.next * PIECE_BYTES);
            let part = at..at + piece.len();
            taken.wait()?;
            piece.make(&mut self.ring.bytes_mut()[part.clone()]);
            self.lane.copy_in(piece.to, &self.ring.bytes()[part])?;
            self.lane.record(taken)?;
            self.next = (self.next + 1) % PIECES;
        }
        Ok(())
    }
}

impl Upload {
    /// Pinned bytes of the rings.
    pub const RING_BYTES: usize = PIECE_BYTES * PIECES * FILLERS;

    /// An idle one.
    pub fn new(context: &Arc<Context>) -> Result<Upload> {
        let fillers = (0..FILLERS).map(|_| Filler::new(context)).collect::<Result<_>>()?;
        Ok(Upload { fillers, waiting: Vec::new(), bytes: 0 })
    }

    /// Puts a matrix in line for `to`.
    pub fn matrix(&mut self, to: Ptr, m: &Matrix, stored: &Stored) {
        assert_eq!((m.rows, m.cols), (stored.rows, stored.cols), "a source gives what was asked for");
        if !stored.converted {
            assert_eq!(m.codec, stored.codec);
            return self.pieces(to, Held::Weights(m.bytes.clone()), 0..m.bytes.len(), false);
        }
        if (m.codec, stored.codec) != (Codec::F32, Codec::F16) {
            let made = weights::convert(m, stored.codec);
            let len = made.len();
            return self.pieces(to, Held::Made(Arc::new(made)), 0..len, false);
        }
        // Dense tiles are element by element, so that another width needs no other order.
        let codes = m.planes.codes.offset..m.planes.codes.offset + m.planes.codes.len;
        self.pieces(to, Held::Weights(m.bytes.clone()), codes, true);
    }

    fn pieces(&mut self, to: Ptr, from: Held, range: Range<usize>, narrow: bool) {
        let (mut to, step) = (to, if narrow { 2 * PIECE_BYTES } else { PIECE_BYTES });
        for start in range.clone().step_by(step) {
            let piece = Piece { to, from: from.clone(), range: start..range.end.min(start + step), narrow };
            to = to.at(piece.len() as u64);
            self.bytes += piece.len() as u64;
            self.waiting.push(piece);
        }
    }

    /// Sends what was put; the matrices may be given up when this returns. Several threads do it where there is enough for
    /// them to be worth their start.
    pub fn send(&mut self) -> Result<()> {
        let pieces = std::mem::take(&mut self.waiting);
        let next = AtomicUsize::new(0);
        let some = (pieces.len() / (2 * PIECES)).clamp(1, self.fillers.len());
        let (first, others) = self.fillers[..some].split_first_mut().expect("one at least");
        let (pieces, next) = (&pieces[..], &next);
        std::thread::scope(|s| {
            let spawn = |f: &mut Filler| f.send(pieces, next);
            let begun: Vec<_> = others
                .iter_mut()
                // Without a thread the others do its part.
                .filter_map(|f| std::thread::Builder::new().spawn_scoped(s, move || spawn(f)).ok())
                .collect();
            let sent = first.send(pieces, next);
            begun.into_iter().fold(sent, |sent, t| sent.and(t.join().expect("a filler does not panic")))
        })
    }

    /// Sends bytes of other pinned memory, which stay as they are until the work that needs them has run.
    pub fn pinned(&mut self, to: Ptr, from: &[u8]) -> Result<()> {
        self.fillers[0].lane.copy_in(to, from)
    }

    /// What is put on the device's stream from now on waits for all that was sent.
    pub fn before_next(&self, device: &Device) -> Result<()> {
        for f in &self.fillers {
            f.lane.record(&f.all)?;
            device.follow(&f.all)?;
        }
        Ok(())
    }

    /// Drops what was not sent and waits for what was: after a failure, when slots are given up that copies still go to.
    /// Streams are not in order among each other, so the next copy to such a slot might come first.
    pub fn settle(&mut self) -> Result<()> {
        self.waiting.clear();
        for f in &self.fillers {
            f.lane.record(&f.all)?;
            f.all.wait()?;
        }
        Ok(())
    }
}
