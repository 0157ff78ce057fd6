//! Comparison tables: every instruction set that this machine runs against the scalar definition, bit for bit, and the
//! definition against sums in f64.

use super::scalar;
use super::vector::Q8Group;
use crate::backend::cpu::ops::{KvBlock, Ops, Out, Q8Rows, Rows};
use crate::backend::cpu::{Isa, Team};
use crate::format::Tiles;
use crate::format::codec::{Codec, TABLE};
use crate::format::layout;
use crate::format::{bf16, f16};
use crate::weights::{Matrix, Segment, WeightBytes};
use std::sync::Arc;

/// A small deterministic generator (SplitMix64).
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In -1..1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// What the weights look like.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Weights {
    Random,
    Zero,
    /// All code bits set, largest scales.
    Max,
    /// Scales that are subnormal halves.
    Tiny,
    /// Scales that are 0, infinite, NaN, subnormal or the largest.
    Odd,
}

const WEIGHTS: [Weights; 5] = [Weights::Random, Weights::Zero, Weights::Max, Weights::Tiny, Weights::Odd];

/// What the activations look like.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Acts {
    Random,
    Zero,
    MinusZero,
    OneHot,
    Huge,
    Tiny,
    /// A NaN in every third row.
    Fault,
}

const ACTS: [Acts; 7] =
    [Acts::Random, Acts::Zero, Acts::MinusZero, Acts::OneHot, Acts::Huge, Acts::Tiny, Acts::Fault];

/// A matrix whose every code may be any bit pattern.
fn matrix(codec: Codec, rows: usize, cols: usize, style: Weights, random: &mut Random) -> Matrix {
    let planes = layout::planes(codec, rows, cols).unwrap();
    let mut segment = Segment::zeroed(planes.total_bytes);
    let bytes = segment.bytes_mut();
    if style == Weights::Zero {
        return Matrix::new(codec, rows, cols, WeightBytes::new(Arc::new(segment), 0, planes.total_bytes));
    }
    bytes.iter_mut().for_each(|b| *b = if style == Weights::Max { 0xff } else { random.bits() as u8 });
    let mut halves = |plane: layout::Plane, bytes: &mut [u8]| {
        for b in bytes[plane.offset..plane.offset + plane.len].chunks_exact_mut(2) {
            let value = match style {
                Weights::Max => 65504.0,
                Weights::Tiny => random.unit() * 3e-6,
                Weights::Odd => {
                    let odd = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 6e-8, 65504.0, 0.1];
                    odd[random.bits() as usize % odd.len()]
                }
                _ => random.unit() * 0.1,
            };
            b.copy_from_slice(&f16::from_f32(value).to_bits().to_le_bytes());
        }
    };
    match codec {
        Codec::F16 => halves(planes.codes, bytes),
        Codec::MXFP4 => {
            let base = if style == Weights::Tiny { 0 } else { 100 };
            bytes[planes.d.offset..][..planes.d.len].iter_mut().for_each(|b| *b = base + *b % 30);
        }
        Codec::F32 | Codec::F8E4M3 => {
            let plane = if codec == Codec::F32 { planes.codes } else { planes.d };
            for b in bytes[plane.offset..][..plane.len].chunks_exact_mut(4) {
                b.copy_from_slice(&(random.unit() * 0.1).to_le_bytes());
            }
        }
        Codec::BF16 => {
            for b in bytes[planes.codes.offset..][..planes.codes.len].chunks_exact_mut(2) {
                b.copy_from_slice(&bf16::from_f32(random.unit()).to_bits().to_le_bytes());
            }
        }
        _ => {
            halves(planes.d, bytes);
            halves(planes.m, bytes);
        }
    }
    Matrix::new(codec, rows, cols, WeightBytes::new(Arc::new(segment), 0, planes.total_bytes))
}

fn activations(n: usize, cols: usize, style: Acts, random: &mut Random) -> Vec<f32> {
    (0..n * cols)
        .map(|i| match style {
            Acts::Random => random.unit() * (1.0 + 20.0 * random.unit().powi(8)),
            Acts::Zero => 0.0,
            Acts::MinusZero => -0.0,
            Acts::OneHot => f32::from(i % cols == (i / cols * 7) % cols),
            Acts::Huge => random.unit() * 1e30,
            Acts::Tiny => random.unit() * 1e-35,
            Acts::Fault => {
                if i % (3 * cols) == cols / 2 {
                    f32::NAN
                } else {
                    random.unit()
                }
            }
        })
        .collect()
}

/// Equal bits, or both NaN.
#[track_caller]
fn assert_same(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}: at {i}: {a:e} is not {b:e}");
    }
}

/// One product, quantized or float.
fn product(isa: Isa, w: &Matrix, x: &[f32], n: usize, exact: bool) -> Vec<f32> {
    let ops = Ops::new(isa);
    let mut out = vec![f32::MAX; n * w.rows];
    if exact {
        ops.matmul_f32(w, 0..w.tiles(), x, Rows::All(n), Out::new(&mut out, w.rows));
    } else {
        let mut q8 = Q8Rows::default();
        ops.quantize(x, 0..n, q8.shape(n, w.cols));
        ops.matmul_q8(w, 0..w.tiles(), &q8, Rows::All(n), Out::new(&mut out, w.rows));
    }
    out
}

/// The instruction sets to compare with the definition.
fn others() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|&i| i != Isa::Scalar)
}

/// Fewer shapes where code is not optimized (under an emulator).
const THOROUGH: bool = !cfg!(debug_assertions);

#[test]
fn products_have_the_same_bits_on_every_instruction_set() {
    let mut random = Random(1);
    let (rows, cols, ns): (&[usize], &[usize], &[usize]) = if THOROUGH {
        (&[1, 15, 16, 17, 48], &[32, 64, 128, 256, 576, 1408, 2048], &[1, 2, 3, 8, 17, 64])
    } else {
        (&[17], &[32, 256, 576], &[1, 7, 17])
    };
    let mut cases = 0;
    for info in &TABLE {
        for (c, &cols) in cols.iter().enumerate() {
            if info.codec.row_bytes(cols).is_none() {
                continue;
            }
            for (r, &rows) in rows.iter().enumerate() {
                for (i, &n) in ns.iter().enumerate() {
                    // Every third of the large ones: the definition is slow.
                    if rows * cols * n > 300_000 && (c + r + i) % 3 != 0 {
                        continue;
                    }
                    let weights = WEIGHTS[(i + r) % WEIGHTS.len() * usize::from(i % 3 == 2)];
                    let acts = ACTS[(c + i) % ACTS.len() * usize::from(r % 2 == 1)];
                    let w = matrix(info.codec, rows, cols, weights, &mut random);
                    let x = activations(n, cols, acts, &mut random);
                    cases += compare(&w, &x, n, &format!("{w:?} {weights:?} n {n} {acts:?}"));
                }
            }
        }
    }
    // Dense codecs take any width.
    for codec in [Codec::F32, Codec::F16, Codec::BF16, Codec::F8E4M3] {
        for cols in [1, 2, 3, 5, 31, 127, 129, 259] {
            let w = matrix(codec, 19, cols, Weights::Random, &mut random);
            let x = activations(5, cols, Acts::Random, &mut random);
            cases += compare(&w, &x, 5, &format!("{w:?}"));
        }
    }
    println!("{cases} products compared");
}

fn compare(w: &Matrix, x: &[f32], n: usize, what: &str) -> usize {
    let mut cases = 0;
    for exact in [false, true] {
        if !exact && w.codec.is_dense() {
            continue;
        }
        let want = product(Isa::Scalar, w, x, n, exact);
        for isa in others() {
            assert_same(
                &product(isa, w, x, n, exact),
                &want,
                &format!("{what} {} exact {exact}", isa.name()),
            );
            cases += 1;
        }
    }
    cases
}

#[test]
fn weights_are_those_of_the_tile_decode() {
    let mut random = Random(10);
    for info in &TABLE {
        for weights in WEIGHTS {
            let w = matrix(info.codec, 35, 512, weights, &mut random);
            let tiles = Tiles::new(w.codec, w.rows, w.cols, &w.bytes);
            let (mut got, mut want) = (vec![0.0; w.cols], vec![0.0; w.cols]);
            for row in 0..w.rows {
                Ops::new(Isa::best()).dequant_row(&w, row, &mut got);
                tiles.row(row, &mut want);
                assert_same(&got, &want, &format!("{w:?} {weights:?}"));
            }
        }
    }
}

#[test]
fn every_code_and_scale_edge_has_the_same_bits() {
    let mut random = Random(2);
    for info in &TABLE {
        for weights in WEIGHTS {
            for acts in ACTS {
                let w = matrix(info.codec, 18, 256, weights, &mut random);
                let n = if THOROUGH { 13 } else { 5 };
                let x = activations(n, 256, acts, &mut random);
                compare(&w, &x, n, &format!("{w:?} {weights:?} {acts:?}"));
            }
        }
    }
}

#[test]
fn picked_rows_tile_ranges_and_batches_do_not_change_bits() {
    let mut random = Random(3);
    for info in &TABLE {
        let (rows, cols, n) = (50, 256, 21);
        let w = matrix(info.codec, rows, cols, Weights::Random, &mut random);
        let x = activations(n, cols, Acts::Random, &mut random);
        for isa in Isa::available() {
            let ops = Ops::new(isa);
            for exact in [info.codec.is_dense(), true] {
                let all = product(isa, &w, &x, n, exact);
                let mut q8 = Q8Rows::default();
                ops.quantize(&x, 0..n, q8.shape(n, cols));
                for pick in [&[20u32][..], &[3, 3, 0], &[5, 1, 19, 2, 2, 7, 8, 9, 11]] {
                    let mut out = vec![0.0; pick.len() * rows];
                    for tiles in [0..1, 1..4] {
                        let (rows_in, to) = (Rows::Pick(pick), Out::new(&mut out, rows));
                        if exact {
                            ops.matmul_f32(&w, tiles, &x, rows_in, to);
                        } else {
                            ops.matmul_q8(&w, tiles, &q8, rows_in, to);
                        }
                    }
                    for (i, &p) in pick.iter().enumerate() {
                        let want = &all[p as usize * rows..][..rows];
                        assert_same(&out[i * rows..][..rows], want, &format!("{w:?} {}", isa.name()));
                    }
                }
            }
        }
    }
}

#[test]
fn products_agree_with_sums_in_f64() {
    let mut random = Random(4);
    for info in &TABLE {
        let (rows, cols, n) = (33, 512, 3);
        let w = matrix(info.codec, rows, cols, Weights::Random, &mut random);
        let x = activations(n, cols, Acts::Random, &mut random);
        for exact in [true, false] {
            if !exact && info.codec.is_dense() {
                continue;
            }
            // An exact product is off by rounding alone; 12-bit activations by half a step each, as a random walk.
            let tolerance = if exact { 2e-6 } else { 1e-3 };
            let got = product(Isa::best(), &w, &x, n, exact);
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                scalar::dequant_row(&w, r, &mut row);
                for i in 0..n {
                    let terms = || row.iter().zip(&x[i * cols..]).map(|(&w, &x)| f64::from(w) * f64::from(x));
                    let want: f64 = terms().sum();
                    let size = terms().map(|t| t * t).sum::<f64>().sqrt().max(1e-30);
                    let error = (f64::from(got[i * rows + r]) - want).abs() / size;
                    // FP8's two NaN codes make NaN of both.
                    let bad =
                        if want.is_nan() { !got[i * rows + r].is_nan() } else { error > 8.0 * tolerance };
                    assert!(!bad, "{w:?} exact {exact}: error {error:e} of the norm of the terms");
                }
            }
        }
    }
}

#[test]
fn vectors_have_the_same_bits_and_the_right_values() {
    let mut random = Random(5);
    for n in [1, 3, 16, 17, 31, 64, 100, 576] {
        let x: Vec<f32> = (0..n).map(|_| random.unit() * 8.0).collect();
        let y: Vec<f32> = (0..n).map(|_| random.unit()).collect();
        let run = |isa: Isa| {
            let ops = Ops::new(isa);
            let mut outs = vec![vec![0.0; n]; 3];
            ops.rms_norm(&x, &y, 1e-6, &mut outs[0]);
            ops.silu_mul(&x, &y, &mut outs[1]);
            outs[2].copy_from_slice(&x);
            ops.sigmoid(&mut outs[2]);
            ops.axpy(0.3, &x, &mut outs[2]);
            ops.add(&y, &mut outs[2]);
            ops.scale(1.7, &mut outs[2]);
            let mut exps = x.clone();
            let max = ops.max(&x);
            let sum = ops.exp_sum(&mut exps, max);
            outs.push(exps);
            outs.push(vec![max, sum]);
            outs
        };
        let want = run(Isa::Scalar);
        let mean = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / n as f64;
        for i in 0..n {
            let (x, y) = (f64::from(x[i]), f64::from(y[i]));
            let norm = x / (mean + 1e-6).sqrt() * y;
            assert!((f64::from(want[0][i]) - norm).abs() <= 1e-6 * norm.abs().max(1e-3));
            let silu = x / (1.0 + (-x).exp()) * y;
            assert!((f64::from(want[1][i]) - silu).abs() <= 1e-6 * silu.abs().max(1e-3));
        }
        for isa in others() {
            for (got, want) in run(isa).iter().zip(&want) {
                assert_same(got, want, isa.name());
            }
        }
    }
}

#[test]
fn exp_is_within_two_ulp_and_the_same_everywhere() {
    let mut x: Vec<f32> = (-1040..=890).map(|i| i as f32 * 0.1).collect();
    x.extend([0.0, -0.0, 1e-30, -1e-30, f32::INFINITY, f32::NEG_INFINITY, 88.7, 88.8, -87.4, -103.9, -104.1]);
    let mut random = Random(6);
    x.extend((0..20_000).map(|_| random.unit() * 100.0));
    x.push(f32::NAN);
    let exp = |isa| {
        let mut y = x.clone();
        Ops::new(isa).exp_sum(&mut y, 0.0);
        y
    };
    let scalar = exp(Isa::Scalar);
    for (x, y) in x.iter().zip(&scalar) {
        let want = f64::from(*x).exp();
        if want > f64::from(f32::MAX) || x.is_nan() {
            assert!(if x.is_nan() { y.is_nan() } else { *y >= 3.4e38 }, "exp({x}) = {y}");
            continue;
        }
        let near = want as f32;
        let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
        assert!((f64::from(*y) - want).abs() <= 2.0 * ulp, "exp({x}) = {y:e}, not {want:e}");
    }
    for isa in others() {
        assert_same(&exp(isa), &scalar, isa.name());
    }
}

#[test]
fn quantized_activations_are_as_defined() {
    let mut random = Random(7);
    for acts in ACTS.into_iter().filter(|&a| a != Acts::Fault) {
        let x = activations(3, 96, acts, &mut random);
        let mut want = Q8Rows::default();
        Ops::new(Isa::Scalar).quantize(&x, 0..3, want.shape(3, 96));
        for (i, x) in x.chunks_exact(96).enumerate() {
            for (group, x) in want.row(i).iter().zip(x.chunks_exact(32)) {
                let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
                let tiny = amax < 2f32.powi(-80);
                assert!(if tiny {
                    group.d() == 0.0
                } else {
                    amax <= 1904.0 * group.d() && amax > 952.0 * group.d()
                });
                assert!(
                    group.d().to_bits() & 0x7f_ffff == 0 && group.start == 12_582_912.0 * group.d(),
                    "a power of two"
                );
                let apart = &group.apart;
                for (k, x) in x.iter().enumerate() {
                    let exact = if tiny { 0.0 } else { x / group.d() };
                    assert_eq!(group.code(k) as f32, exact.round_ties_even(), "{acts:?}");
                    let [high, low] = [apart.high[k], apart.low[k]].map(i32::from);
                    assert!((-16..16).contains(&low) && 32 * high + low == group.code(k), "{acts:?}");
                }
                let sum = |r: std::ops::Range<usize>| r.map(|k| group.code(k)).sum::<i32>();
                assert_eq!(group.neg_half.map(i32::from), [-sum(0..16), -sum(16..32)]);
                assert_eq!(group.sum_d, group.d() * sum(0..32) as f32);
                assert_eq!((apart.d, apart.sum_d), (group.d(), group.sum_d));
                assert_eq!(apart.neg_half, [-sum(0..16), -sum(16..32)]);
                assert_eq!((group.neg_sum_8, apart.neg_sum_8), (-8 * sum(0..32), -8 * sum(0..32)));
                assert_eq!(apart.half_d, [0..16, 16..32].map(|half| group.d() * sum(half) as f32));
            }
        }
        for isa in others() {
            let mut got = Q8Rows::default();
            Ops::new(isa).quantize(&x, 0..3, got.shape(3, 96));
            for (got, want) in (0..3).flat_map(|i| got.row(i).iter().zip(want.row(i))) {
                assert!(got == want, "{acts:?} {}", isa.name());
            }
            // One row alone may lack what several need.
            Ops::new(isa).quantize(&x[..96], 0..1, got.shape(1, 96));
            for (got, want) in got.row(0).iter().zip(want.row(0)) {
                assert!(Q8Group { apart: want.apart, ..*got } == *want, "{acts:?} {}", isa.name());
            }
        }
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2f32.powi(100), -f32::MAX] {
        let mut x = vec![1.0; 64];
        x[40] = bad;
        for isa in Isa::available() {
            let mut q8 = Q8Rows::default();
            Ops::new(isa).quantize(&x, 0..1, q8.shape(1, 64));
            assert!(q8.row(0)[0].d() == 1.0 / 1024.0 && q8.row(0)[1].d().is_nan(), "{}", isa.name());
        }
    }
}

#[test]
fn attention_blocks_have_the_same_bits_and_the_right_values() {
    let mut random = Random(8);
    for (nq, nk, d) in
        [(1, 1, 1), (1, 5, 64), (3, 7, 20), (4, 64, 128), (5, 9, 192), (16, 33, 576), (2, 16, 100)]
    {
        let stride = d + 3;
        let q: Vec<f32> = (0..nq * stride).map(|_| random.unit()).collect();
        let k: Vec<f32> = (0..nk * stride).map(|_| random.unit()).collect();
        let k16: Vec<f16> = k.iter().map(|&v| f16::from_f32(v)).collect();
        let p: Vec<f32> = (0..nq * nk).map(|_| random.unit()).collect();
        for half in [false, true] {
            let block =
                if half { KvBlock::F16 { data: &k16, stride } } else { KvBlock::F32 { data: &k, stride } };
            let run = |isa: Isa| {
                let ops = Ops::new(isa);
                let (mut scores, mut acc) = (vec![0.0; nq * nk], vec![0.5; nq * d]);
                ops.qk(&q, stride, nq, block, nk, d, &mut scores, nk);
                ops.pv(&p, nk, nq, block, nk, d, &mut acc, d);
                (scores, acc)
            };
            let (scores, acc) = run(Isa::Scalar);
            let key = |j: usize, c: usize| {
                f64::from(if half { k16[j * stride + c].to_f32() } else { k[j * stride + c] })
            };
            for i in 0..nq {
                for j in 0..nk {
                    let want: f64 = (0..d).map(|c| f64::from(q[i * stride + c]) * key(j, c)).sum();
                    assert!((f64::from(scores[i * nk + j]) - want).abs() < 1e-5);
                }
                for c in 0..d {
                    let want: f64 = (0..nk).map(|j| f64::from(p[i * nk + j]) * key(j, c)).sum::<f64>() + 0.5;
                    assert!((f64::from(acc[i * d + c]) - want).abs() < 1e-5);
                }
            }
            for isa in others() {
                let (s, a) = run(isa);
                assert_same(&s, &scores, isa.name());
                assert_same(&a, &acc, isa.name());
            }
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    let mut random = Random(9);
    let w = matrix(Codec::Q4K, 200, 512, Weights::Random, &mut random);
    let x = activations(5, 512, Acts::Random, &mut random);
    let want = product(Isa::best(), &w, &x, 5, false);
    for threads in [1, 2, 3, 8] {
        let team = Team::new(threads, 0);
        let ops = Ops::new(Isa::best());
        let mut q8 = Q8Rows::default();
        let to = q8.shape(5, 512);
        team.chunks(5, 1, &|rows, _| ops.quantize(&x, rows, to));
        let mut got = vec![0.0; want.len()];
        let out = Out::new(&mut got, w.rows);
        team.chunks(w.tiles(), 1, &|tiles, _| ops.matmul_q8(&w, tiles, &q8, Rows::All(5), out));
        assert_same(&got, &want, "threads");
    }
}

#[test]
fn rows_that_their_worker_quantizes_give_the_same_bits() {
    let mut random = Random(10);
    for (codec, isa) in [Codec::Q4_0, Codec::Q6K, Codec::Q8_0]
        .into_iter()
        .flat_map(|c| Isa::available().into_iter().map(move |i| (c, i)))
    {
        let w = matrix(codec, 40, 512, Weights::Random, &mut random);
        for n in [1, 3, 9] {
            let x = activations(n, 512, Acts::Random, &mut random);
            let want = product(Isa::Scalar, &w, &x, n, false);
            // Rows in the middle of a buffer, to every other row of the output.
            let (mut q8, mut got) = (Q8Rows::default(), vec![f32::MAX; n * 2 * w.rows]);
            let to = q8.shape(n + 3, 512);
            Ops::new(isa).quantize_and_multiply(&w, &x, 2..2 + n, to, Out::new(&mut got, 2 * w.rows));
            for (i, row) in got.chunks_exact(2 * w.rows).enumerate() {
                assert_same(&row[..w.rows], &want[i * w.rows..][..w.rows], codec.info().name);
                assert!(row[w.rows..].iter().all(|v| *v == f32::MAX), "wrote beside its columns");
            }
        }
    }
}
