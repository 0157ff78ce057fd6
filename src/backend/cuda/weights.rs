//! Weights from files to device memory. Batches of matrices are read and repacked on the host by the usual loader while
//! the batch before is copied; no second copy stays.

use super::driver::Device;
use super::memory::{Arena, PIECE_ALIGN, Ptr};
use super::params::MatrixParams;
use crate::format::layout::{self, Planes, TILE_ROWS};
use crate::format::{Codec, Tiles, f16};
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
    /// It is of another codec on the host and converted on its way.
    pub converted: bool,
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
/// kept in F16 unless `exact`: their values have at most 15 significant bits, and F32 would double a decode's bytes. So are
/// parts of an FP8 tensor: only those on its blocks' edges are FP8 on the host, and heads must all be of one codec.
pub fn stored(source: &Source, jobs: &[MatrixJob], exact: bool) -> Result<Vec<Stored>> {
    let shapes = weights::shapes(source, jobs)?;
    let one = |(job, (was, rows, cols)): (&MatrixJob, (Codec, usize, usize))| {
        let codec = was;
        let span = &job.spans[0];
        let tensor = &source.tensors()[span.tensor];
        let widened = codec == Codec::F32 && tensor.codec != Codec::F32;
        let part_of_f8 = codec == Codec::F8E4M3 && span.rows < tensor.rows();
        let codec = match exact {
            true if part_of_f8 => Codec::F32,
            false if part_of_f8 || widened => Codec::F16,
            _ => codec,
        };
        let planes = layout::planes(codec, rows, cols).expect("shape was checked when planned");
        Stored { codec, rows, cols, planes, converted: codec != was }
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
    if !stored.converted {
        assert_eq!(m.codec, stored.codec);
        return device.copy_in(to, &m.bytes[..]);
    }
    device.copy_in(to, &convert(m, stored.codec))
}

/// The codes plane of a dense matrix as F16 or F32. Dense tiles are element by element, so that another width needs no other
/// order.
pub fn convert(m: &Matrix, to: Codec) -> Vec<u8> {
    let wide = |b: &[u8; 4]| f32::from_le_bytes(*b);
    let values: Vec<f32> = match m.codec {
        Codec::F32 => m.planes.codes.of(&m.bytes).as_chunks::<4>().0.iter().map(wide).collect(),
        _ => {
            let tiles = Tiles::new(m.codec, m.rows, m.cols, &m.bytes);
            let (mut row, mut out) = (vec![0.0; m.cols], vec![0.0; m.tiles() * TILE_ROWS * m.cols]);
            for r in 0..m.rows {
                tiles.row(r, &mut row);
                let first = r / TILE_ROWS * m.cols * TILE_ROWS + r % TILE_ROWS;
                row.iter().enumerate().for_each(|(k, v)| out[first + k * TILE_ROWS] = *v);
            }
            out
        }
    };
    match to {
        Codec::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Codec::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        other => unreachable!("{} is not converted to", other.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{Segment, WeightBytes};
    use std::sync::Arc;

    fn matrix(codec: Codec, rows: usize, cols: usize, fill: impl Fn(&mut [u8], &Planes)) -> Matrix {
        let planes = layout::planes(codec, rows, cols).unwrap();
        let mut segment = Segment::zeroed(planes.total_bytes);
        fill(segment.bytes_mut(), &planes);
        Matrix::new(codec, rows, cols, WeightBytes::new(Arc::new(segment), 0, planes.total_bytes))
    }

    #[test]
    fn what_is_converted_keeps_its_values() {
        // More than one block of FP8 each way, and a last tile that is not full.
        let (rows, cols) = (150, 140);
        let f8 = matrix(Codec::F8E4M3, rows, cols, |bytes, planes| {
            let codes = &mut bytes[planes.codes.offset..][..planes.codes.len];
            codes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 37 % 0x7f) as u8);
            let scales = &mut bytes[planes.d.offset..][..planes.d.len];
            for (i, b) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *b = (0.25 * (i + 1) as f32).to_le_bytes();
            }
        });
        let want = Tiles::new(f8.codec, rows, cols, &f8.bytes);
        for codec in [Codec::F32, Codec::F16] {
            let wide = matrix(codec, rows, cols, |bytes, planes| {
                let made = convert(&f8, codec);
                bytes[planes.codes.offset..][..made.len()].copy_from_slice(&made);
            });
            let got = Tiles::new(codec, rows, cols, &wide.bytes);
            let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
            for row in 0..rows {
                want.row(row, &mut a);
                got.row(row, &mut b);
                let same = a
                    .iter()
                    .zip(&b)
                    .all(|(a, b)| codec == Codec::F32 && a == b || f16::from_f32(*a).to_f32() == *b);
                assert!(same, "{codec:?} row {row}");
            }
        }
    }
}
