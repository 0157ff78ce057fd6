//! Measures the memory roof and every kernel against it: what `tegu bench` prints beside its rates.

use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::ops::{Ops, Out, Q8Rows, Rows};
use crate::backend::cpu::team::Team;
use crate::format::codec::{Codec, TABLE};
use crate::format::layout;
use crate::units::Result;
use crate::weights::{Matrix, Segment, WeightBytes};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the working set unless asked otherwise: well beyond any last-level cache of a board or a desktop.
pub const WORKING_SET_BYTES: usize = 768 << 20;
/// Threads of the measuring teams spin so long after a job: runs follow each other at once.
const SPIN_US: u64 = 200;
/// How long the read roof is read for.
const SUSTAINED: Duration = Duration::from_millis(400);
/// Bytes that a worker takes at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Least bytes of the working set: 16 rows of the widest codec with room to spare.
const WORKING_SET_MIN_BYTES: usize = 1 << 20;
/// Width of the measured matrices: DeepSeek-V2-Lite's hidden size.
const COLS: usize = 2048;
/// Rows of the matrix in the many-row measurement.
const PREFILL_OUTPUTS: usize = 2816;

/// One codec's speed.
#[derive(Debug, Clone, Copy)]
pub struct KernelRate {
    /// The codec.
    pub codec: Codec,
    /// Weight bytes a second with one activation row.
    pub decode_bytes_per_s: f64,
    /// That over the measured roof.
    pub share_of_roof: f64,
    /// Multiply-adds a second with [`KernelRate::prefill_rows`] activation rows.
    pub prefill_macs_per_s: f64,
    /// Activation rows of the many-row measurement.
    pub prefill_rows: usize,
    /// Weights that all runs multiplied, once for each activation row: what a count of instructions is divided by.
    pub multiplied: usize,
}

/// Timed runs of each product, after one that warms up.
const RUNS: usize = 5;

/// The shortest of several runs of `f`, after one that warms up.
fn best_of(f: &mut dyn FnMut()) -> Duration {
    f();
    let mut once = || {
        let start = Instant::now();
        f();
        start.elapsed()
    };
    (0..RUNS).map(|_| once()).min().expect("at least one run")
}

/// A segment full of arbitrary bytes (pages that were never written would all be the same zero page).
fn filled(len: usize) -> Result<Segment> {
    let mut segment = Segment::try_zeroed(len, "memory for the measurement")?;
    let mut state = 0x1234_5678_9abc_def1u64;
    for word in segment.bytes_mut().chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Half floats below 2 in magnitude, so that scales are finite.
        word.copy_from_slice(&(state & 0xbfff_bfff_bfff_bfff).to_le_bytes());
    }
    Ok(segment)
}

/// Reads memory in order with a team's threads: the roof of everything that reads each weight once. Kept beside what is
/// measured, so that both can be in turns: memory's speed drifts.
pub struct ReadRoof {
    segment: Segment,
    team: Team,
}

impl ReadRoof {
    /// `bytes` is the working set, whole chunks of it. Fails if there is no such memory.
    pub fn new(threads: usize, bytes: usize) -> Result<ReadRoof> {
        Ok(ReadRoof { segment: filled(bytes.max(CHUNK_BYTES))?, team: Team::new(threads, SPIN_US) })
    }

    /// Bytes a second, all threads.
    pub fn rate(&self) -> f64 {
        self.sustained(&self.team)
    }

    /// The same with one thread.
    pub fn rate_of_one(&self) -> f64 {
        self.sustained(&Team::new(1, SPIN_US))
    }

    /// Over a while, as a decode test runs: a guest's memory may be faster for the first tenth of a second and slower after
    /// it, and the best of some short runs is then a roof that nothing reaches.
    fn sustained(&self, team: &Team) -> f64 {
        let (bytes, took) = self.read_for(team, SUSTAINED);
        bytes as f64 / took.as_secs_f64()
    }

    /// Reads with all threads for at least `time`, whole passes, in turns with what it is held against: bytes, and what they took.
    pub fn turn(&self, time: Duration) -> (u64, Duration) {
        self.read_for(&self.team, time)
    }

    /// The whole working set, again and again for at least `time`.
    fn read_for(&self, team: &Team, time: Duration) -> (u64, Duration) {
        let (began, mut bytes) = (Instant::now(), 0);
        loop {
            read(team, self.segment.bytes());
            bytes += self.bytes() as u64;
            let took = began.elapsed();
            if took >= time {
                return (bytes, took);
            }
        }
    }

    /// Bytes of the working set.
    pub fn bytes(&self) -> usize {
        self.segment.bytes().len()
    }
}

/// The most bytes a second of a few runs, beside kernels that are measured so.
fn read_rate(team: &Team, bytes: &[u8]) -> f64 {
    let time = best_of(&mut || read(team, bytes));
    bytes.len() as f64 / time.as_secs_f64()
}

/// Reads all whole chunks once, in order.
fn read(team: &Team, bytes: &[u8]) {
    let total = AtomicU64::new(0);
    team.chunks(bytes.len() / CHUNK_BYTES, 1, &|chunks, _| {
        let bytes = &bytes[chunks.start * CHUNK_BYTES..chunks.end * CHUNK_BYTES];
        // Eight sums, so that additions do not wait for each other.
        let mut sums = [0u64; 8];
        for line in bytes.chunks_exact(64) {
            for (sum, word) in sums.iter_mut().zip(line.chunks_exact(8)) {
                *sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("eight bytes")));
            }
        }
        total.fetch_add(sums.iter().fold(0, |a, b| a.wrapping_add(*b)), Ordering::Relaxed);
    });
    black_box(total.into_inner());
}

/// What [`bench_kernels`] measures.
#[derive(Debug, Clone, Copy)]
pub struct KernelBench<'a> {
    /// Threads of the team.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// These codecs; all if empty.
    pub only: &'a [Codec],
    /// Activation rows of the many-row measurement.
    pub prefill_rows: usize,
    /// Bytes of the working set.
    pub bytes: usize,
}

impl KernelBench<'_> {
    /// Codecs that will be measured.
    pub fn codecs(&self) -> impl Iterator<Item = Codec> + '_ {
        let only = self.only;
        TABLE.iter().map(|i| i.codec).filter(move |c| only.is_empty() || only.contains(c))
    }
}

/// Measures each codec; calls `show` as one is done.
pub fn bench_kernels(b: &KernelBench, show: &mut dyn FnMut(&KernelRate)) -> Result<()> {
    let (team, ops) = (&Team::new(b.threads, SPIN_US), &Ops::new(b.isa));
    let prefill_rows = b.prefill_rows;
    let segment = Arc::new(filled(b.bytes.max(WORKING_SET_MIN_BYTES))?);
    for codec in b.codecs() {
        let roof = read_rate(team, segment.bytes());
        let whole = matrix(&segment, codec, usize::MAX);
        let decode = product_time(team, ops, &whole, 1);
        let part = matrix(&segment, codec, PREFILL_OUTPUTS);
        let prefill = product_time(team, ops, &part, prefill_rows);
        let decode_bytes_per_s = whole.size_bytes() as f64 / decode.as_secs_f64();
        show(&KernelRate {
            codec,
            decode_bytes_per_s,
            share_of_roof: decode_bytes_per_s / roof,
            prefill_macs_per_s: (part.rows * part.cols * prefill_rows) as f64 / prefill.as_secs_f64(),
            prefill_rows,
            multiplied: (1 + RUNS) * (whole.rows + part.rows * prefill_rows) * COLS,
        });
    }
    Ok(())
}

/// The largest matrix of at most `rows_max` rows that the segment holds.
fn matrix(segment: &Arc<Segment>, codec: Codec, rows_max: usize) -> Matrix {
    let size = |rows| layout::planes(codec, rows, COLS).expect("a small shape").total_bytes;
    let rows = (segment.bytes().len() / (size(4096) / 4096 + 1)).min(rows_max) / 16 * 16;
    Matrix::new(codec, rows, COLS, WeightBytes::new(segment.clone(), 0, size(rows)))
}

/// Time of one product with `n` activation rows.
fn product_time(team: &Team, ops: &Ops, w: &Matrix, n: usize) -> Duration {
    let x: Vec<f32> = (0..n * w.cols).map(|i| ((i * 37 + i / 91) % 255) as f32 / 127.0 - 1.0).collect();
    let mut q8 = Q8Rows::default();
    let to = q8.shape(n, w.cols);
    ops.quantize(&x, 0..n, to);
    let mut y = vec![0f32; n * w.rows];
    let out = Out::new(&mut y, w.rows);
    let time = best_of(&mut || {
        team.chunks(w.tiles(), 4, &|tiles, _| {
            if w.codec.is_dense() {
                ops.matmul_f32(w, tiles, &x, Rows::All(n), out);
            } else {
                ops.matmul_q8(w, tiles, &q8, Rows::All(n), out);
            }
        });
    });
    black_box(&y);
    time
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::KvBlock;
    use crate::format::f16;

    #[test]
    fn rates_are_positive_on_a_small_working_set() {
        let roof = ReadRoof::new(2, 3 << 20).unwrap();
        let roofs = [roof.rate_of_one(), roof.rate()];
        assert!(roofs.len() == 2 && roofs.iter().all(|r| *r > 0.0 && r.is_finite()), "{roofs:?}");
        for asked in [Duration::ZERO, Duration::from_millis(2)] {
            let (bytes, took) = roof.turn(asked);
            assert!(bytes > 0 && bytes.is_multiple_of(3 << 20) && took >= asked, "{bytes} {took:?}");
        }
        for isa in Isa::available() {
            let only = &[Codec::Q4_0, Codec::F16][..];
            let b = KernelBench { threads: 2, isa, only, prefill_rows: 3, bytes: 1 };
            let mut seen = Vec::new();
            bench_kernels(&b, &mut |r| seen.push((r.codec, r.decode_bytes_per_s > 0.0))).unwrap();
            seen.sort_by_key(|s| s.0.name());
            assert_eq!(seen, [(Codec::F16, true), (Codec::Q4_0, true)]);
        }
    }

    /// Kernels over vectors and attention: `cargo test --release -- --ignored --nocapture vector_rates`. (Those of the
    /// products are `tegu bench --kernels`.)
    #[test]
    #[ignore = "a measurement; it checks nothing"]
    fn vector_rates() {
        let ops = Ops::new(Isa::best());
        let n = 2048;
        let x: Vec<f32> = (0..n).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let (mut y, mut q8) = (x.clone(), Q8Rows::default());
        let to = q8.shape(1, n);
        let show = |name: &str, elements: usize, f: &mut dyn FnMut()| {
            const LOOPS: u32 = 1000;
            let time = best_of(&mut || (0..LOOPS).for_each(|_| f())) / LOOPS;
            println!("{name:10} {:7.2} elements a ns", elements as f64 / time.as_secs_f64() / 1e9);
        };
        show("quantize", n, &mut || ops.quantize(&x, 0..1, to));
        show("rms_norm", n, &mut || ops.rms_norm(&x, &x, 1e-5, &mut y));
        show("silu_mul", n, &mut || ops.silu_mul(&x, &x, &mut y));
        show("exp_sum", n, &mut || {
            y.copy_from_slice(&x);
            black_box(ops.exp_sum(&mut y, 1.0));
        });
        let w = matrix(&Arc::new(filled(8 << 20).unwrap()), Codec::Q4_1, 1024);
        show("dequant", n, &mut || ops.dequant_row(&w, 77, &mut y));
        for (nq, d) in [(1, 64), (3, 64), (16, 128), (16, 576), (128, 192)] {
            let nk = 32;
            let k = vec![f16::from_f32(0.5); nk * d];
            let (q, p, mut s, mut o) =
                (vec![0.1; nq * d], vec![0.1; nq * nk], vec![0.0; nq * nk], vec![0.0; nq * d]);
            let wide: Vec<f32> = k.iter().map(|v| v.to_f32()).collect();
            for (name, block) in [
                ("f16", KvBlock::F16 { data: &k, stride: d }),
                ("f32", KvBlock::F32 { data: &wide, stride: d }),
            ] {
                let pairs = nq * nk * d;
                show(&format!("qk {nq}x{d} {name}"), pairs, &mut || {
                    ops.qk(&q, d, nq, block, nk, d, &mut s, nk);
                });
                show(&format!("pv {nq}x{d} {name}"), pairs, &mut || {
                    ops.pv(&p, nk, nq, block, nk, d, &mut o, d);
                });
            }
        }
        for threads in [1, 2] {
            let team = Team::new(threads, 100);
            let time = best_of(&mut || (0..1000).for_each(|_| team.run(&|_, _| ()))) / 1000;
            println!("a job on {threads} threads: {time:?}");
        }
    }
}
