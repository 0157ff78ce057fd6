//! Weights from files to device memory. Batches of matrices are read and repacked on the host by the usual loader while
//! the batch before is copied; no second copy stays.

use super::driver::Device;
use super::memory::{Arena, PIECE_ALIGN, Ptr};
use super::params::MatrixParams;
use crate::format::layout::{self, Planes};
use crate::format::{Codec, f16};
use crate::units::Result;
use crate::weights::{self, Matrix, MatrixJob, Source};
use std::sync::mpsc;

/// Host bytes of a batch; three are alive at a time: one being read, one waiting, one being copied.
const BATCH_BYTES: usize = 64 << 20;

/// One matrix as it will lie on the device.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    /// Its codec there.
    pub codec: Codec,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Its planes.
    pub planes: Planes,
    /// It is F32 on the host and rounded to F16 on its way.
    pub halved: bool,
}

impl Stored {
    /// Bytes with the space to the next piece.
    pub fn room_bytes(&self) -> usize {
        self.planes.total_bytes.next_multiple_of(PIECE_ALIGN)
    }

    /// Its description at an address.
    pub fn at(&self, base: Ptr) -> MatrixParams {
        MatrixParams::new(self.codec, self.rows, self.cols, &self.planes, base)
    }
}

/// What each job becomes. Matrices that are F32 only because a quantized one was turned (heads of latent attention) are
/// kept in F16 unless `exact`: their values have at most 15 significant bits, and F32 would double a decode's bytes.
pub fn stored(source: &Source, jobs: &[MatrixJob], exact: bool) -> Result<Vec<Stored>> {
    let shapes = weights::shapes(source, jobs)?;
    let one = |(job, (codec, rows, cols)): (&MatrixJob, (Codec, usize, usize))| {
        let was = source.tensors()[job.spans[0].tensor].codec;
        let halved = !exact && codec == Codec::F32 && was != Codec::F32;
        let codec = if halved { Codec::F16 } else { codec };
        let planes = layout::planes(codec, rows, cols).expect("shape was checked when planned");
        Stored { codec, rows, cols, planes, halved }
    };
    Ok(jobs.iter().zip(shapes).map(one).collect())
}

/// Gives every matrix from number `first` on an address: the groups one after another, a group's matrices side by side.
/// Those before stay without.
pub fn place(arena: &mut Arena, stored: &[Stored], groups: &[Vec<usize>], first: usize) -> Result<Vec<Ptr>> {
    let groups: Vec<&Vec<usize>> = groups.iter().filter(|g| g[0] >= first).collect();
    let bytes = |g: &Vec<usize>| g.iter().map(|&i| stored[i].room_bytes()).sum::<usize>();
    let starts = arena.reserve(&groups.iter().map(|g| bytes(g)).collect::<Vec<_>>())?;
    let mut out = vec![Ptr::NULL; stored.len()];
    for (group, start) in groups.iter().zip(starts) {
        let mut at = start;
        for &i in group.iter() {
            out[i] = at;
            at = at.at(stored[i].room_bytes() as u64);
        }
    }
    assert!(out[first..].iter().all(|p| !p.is_null()), "every matrix is in a group");
    Ok(out)
}

/// Reads `jobs` and copies them to their addresses. `progress` gets the file bytes read so far.
pub fn load(
    device: &Device,
    source: &Source,
    jobs: &[MatrixJob],
    stored: &[Stored],
    places: &[Ptr],
    threads: usize,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let batches = batches(stored);
    let (send, receive) = mpsc::sync_channel::<Result<Vec<Matrix>>>(1);
    std::thread::scope(|scope| {
        let batches = &batches;
        scope.spawn(move || {
            for range in batches {
                let loaded = weights::load(source, &jobs[range.clone()], threads, &|_| {});
                let failed = loaded.is_err();
                // The receiver is gone only after an error of its own.
                if send.send(loaded).is_err() || failed {
                    return;
                }
            }
        });
        let mut done = 0;
        for (range, loaded) in batches.iter().zip(receive) {
            let loaded = loaded?;
            for (i, m) in range.clone().zip(&loaded) {
                copy(device, m, &stored[i], places[i])?;
                done += file_bytes(source, &jobs[i]);
            }
            device.synchronize()?;
            progress(done);
        }
        Ok(())
    })
}

/// File bytes of jobs.
pub fn jobs_bytes(source: &Source, jobs: &[MatrixJob]) -> u64 {
    jobs.iter().map(|j| file_bytes(source, j)).sum()
}

fn file_bytes(source: &Source, job: &MatrixJob) -> u64 {
    job.spans.iter().map(|s| s.rows as u64 * source.tensors()[s.tensor].row_bytes() as u64).sum()
}

/// Runs of jobs of about [`BATCH_BYTES`].
fn batches(stored: &[Stored]) -> Vec<std::ops::Range<usize>> {
    let (mut out, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (i, s) in stored.iter().enumerate() {
        bytes += s.planes.total_bytes;
        if bytes >= BATCH_BYTES || i + 1 == stored.len() {
            out.push(start..i + 1);
            (start, bytes) = (i + 1, 0);
        }
    }
    out
}

fn copy(device: &Device, m: &Matrix, stored: &Stored, to: Ptr) -> Result<()> {
    assert_eq!((m.rows, m.cols), (stored.rows, stored.cols));
    if !stored.halved {
        assert_eq!(m.codec, stored.codec);
        return device.copy_in(to, &m.bytes[..]);
    }
    // Dense tiles are element by element, so that another width needs no other order.
    let halves: Vec<u8> = (m.planes.codes.of(&m.bytes).as_chunks::<4>().0.iter())
        .flat_map(|b| f16::from_f32(f32::from_le_bytes(*b)).to_le_bytes())
        .collect();
    assert!(halves.len() <= stored.planes.total_bytes);
    device.copy_in(to, &halves)
}
