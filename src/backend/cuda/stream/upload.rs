//! Experts from host memory into their slots: by way of a small pinned ring, on a stream of their own, so that the GPU computes
//! meanwhile.

use super::lane::{Event, Lane};
use crate::backend::cuda::driver::{Context, Device};
use crate::backend::cuda::memory::{Pinned, Ptr};
use crate::backend::cuda::weights::{self, Stored};
use crate::format::{Codec, f16};
use crate::units::Result;
use crate::weights::Matrix;
use std::sync::Arc;

/// Bytes of a piece of the ring: a copy's fixed cost is some microseconds, a piece's transfer some hundred.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces: one is filled while others are on their way.
const PIECES: usize = 4;

/// The ring and its stream.
pub struct Upload {
    lane: Lane,
    ring: Pinned,
    /// When the GPU has taken a piece.
    taken: Vec<Event>,
    next: usize,
    /// After all that was put.
    all: Event,
    /// Bytes put so far.
    pub bytes: u64,
}

impl Upload {
    /// Pinned bytes of the ring.
    pub const RING_BYTES: usize = PIECE_BYTES * PIECES;

    /// An idle one.
    pub fn new(context: &Arc<Context>) -> Result<Upload> {
        Ok(Upload {
            lane: Lane::new(context)?,
            ring: Pinned::new(context, Self::RING_BYTES)?,
            taken: (0..PIECES).map(|_| Event::new(context)).collect::<Result<_>>()?,
            next: 0,
            all: Event::new(context)?,
            bytes: 0,
        })
    }

    /// Puts a matrix on its way to `to`; it may be given up when this returns.
    pub fn matrix(&mut self, to: Ptr, m: &Matrix, stored: &Stored) -> Result<()> {
        assert_eq!((m.rows, m.cols), (stored.rows, stored.cols), "a source gives what was asked for");
        if !stored.converted {
            assert_eq!(m.codec, stored.codec);
            return self.pieces(to, &m.bytes, 1, |from, piece| piece.copy_from_slice(from));
        }
        if (m.codec, stored.codec) != (Codec::F32, Codec::F16) {
            let bytes = weights::convert(m, stored.codec);
            return self.pieces(to, &bytes, 1, |from, piece| piece.copy_from_slice(from));
        }
        // Dense tiles are element by element, so that another width needs no other order.
        let f32s = m.planes.codes.of(&m.bytes);
        self.pieces(to, f32s, 2, |from, piece| {
            for (to, b) in piece.as_chunks_mut::<2>().0.iter_mut().zip(from.as_chunks::<4>().0) {
                *to = f16::from_f32(f32::from_le_bytes(*b)).to_le_bytes();
            }
        })
    }

    /// Sends `from` piece by piece, each made by `make` from `shrinks` times as many bytes.
    fn pieces(
        &mut self,
        to: Ptr,
        from: &[u8],
        shrinks: usize,
        make: impl Fn(&[u8], &mut [u8]),
    ) -> Result<()> {
        let mut to = to;
        for part in from.chunks(PIECE_BYTES * shrinks) {
            let len = part.len() / shrinks;
            let (taken, at) = (&self.taken[self.next], self.next * PIECE_BYTES);
            taken.wait()?;
            make(part, &mut self.ring.bytes_mut()[at..at + len]);
            self.lane.copy_in(to, &self.ring.bytes()[at..at + len])?;
            self.lane.record(taken)?;
            self.next = (self.next + 1) % PIECES;
            to = to.at(len as u64);
            self.bytes += len as u64;
        }
        Ok(())
    }

    /// Sends bytes of other pinned memory, which stay as they are until the work that needs them has run.
    pub fn pinned(&mut self, to: Ptr, from: &[u8]) -> Result<()> {
        self.lane.copy_in(to, from)
    }

    /// What is put on the device's stream from now on waits for all that was put here.
    pub fn before_next(&self, device: &Device) -> Result<()> {
        self.lane.record(&self.all)?;
        device.follow(&self.all)
    }
}
