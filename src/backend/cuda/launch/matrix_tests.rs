//! Matrix kernels against the CPU: quantized GEMVs against the CPU's quantized product, everything else against sums in
//! f64 over the weights that `format::Tiles` reads. Errors are measured in units of `Σ |w x|`, which bounds what
//! rounding can do whatever cancels.

use super::super::expert::{self, Experts, Grouped, Step};
use super::super::{embed, quantize};
use super::*;
use crate::backend::cpu::{Isa, Ops, Out, Q8Rows, Rows};
use crate::backend::cuda::memory::Buffer;
use crate::backend::cuda::params::PickParams;
use crate::backend::cuda::testing::gpu;
use crate::format::codec::TABLE;
use crate::format::{Tiles, bf16, f16, layout};
use crate::weights::{Matrix, Segment, WeightBytes};
use std::sync::Arc;

/// f32 sums in another order.
const SUMMED: f64 = 4e-6;
/// f16 weights and activations (2^-11 each), sums in f32.
const HALF: f64 = 1.5e-3;
/// Two terms of each side in bf16 (2^-18 is left of a value), sums in f32 as tensor cores make them.
const TERMS: f64 = 4e-5;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn rows(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() * (1.0 + 20.0 * self.unit().powi(8))).collect()
    }
}

/// A matrix whose codes may be any bit pattern and whose scales are those of real weights.
fn matrix(codec: Codec, rows: usize, cols: usize, random: &mut Random) -> Matrix {
    matrix_of(codec, rows, cols, random, 1.0)
}

/// The same with weights `by` times as large.
fn matrix_of(codec: Codec, rows: usize, cols: usize, random: &mut Random, by: f32) -> Matrix {
    let planes = layout::planes(codec, rows, cols).unwrap();
    let mut segment = Segment::zeroed(planes.total_bytes);
    let bytes = segment.bytes_mut();
    bytes.iter_mut().for_each(|b| *b = random.bits() as u8);
    let mut put = |plane: layout::Plane, size: usize, value: &mut dyn FnMut() -> u32| {
        for b in bytes[plane.offset..plane.offset + plane.len].chunks_exact_mut(size) {
            b.copy_from_slice(&value().to_le_bytes()[..size]);
        }
    };
    let half = |v: f32| u32::from(f16::from_f32(v).to_bits());
    match codec {
        Codec::F32 => put(planes.codes, 4, &mut || (random.unit() * 0.1 * by).to_bits()),
        Codec::F16 => put(planes.codes, 2, &mut || half(random.unit() * 0.1 * by)),
        Codec::BF16 => {
            put(planes.codes, 2, &mut || u32::from(bf16::from_f32(random.unit() * 0.1 * by).to_bits()))
        }
        Codec::F8E4M3 => {
            // Every code but the two NaNs.
            put(planes.codes, 1, &mut || (random.bits() as u32 & 0xff).wrapping_sub(1) & 0xfe);
            put(planes.d, 4, &mut || (random.unit() * 0.01 * by).to_bits());
        }
        Codec::MXFP4 => put(planes.d, 1, &mut || 115 + random.bits() as u32 % 12),
        _ => {
            put(planes.d, 2, &mut || half(random.unit() * 0.01 * by));
            put(planes.m, 2, &mut || half(random.unit() * 0.01 * by));
        }
    }
    Matrix::new(codec, rows, cols, WeightBytes::new(Arc::new(segment), 0, planes.total_bytes))
}

/// A matrix on both sides.
struct Both {
    cpu: Matrix,
    _memory: Buffer,
    gpu: MatrixParams,
    /// `(rows, cols)` f32
    values: Vec<f32>,
}

fn both(gpu: &Gpu, codec: Codec, rows: usize, cols: usize, random: &mut Random) -> Both {
    both_of(gpu, matrix(codec, rows, cols, random))
}

fn both_of(gpu: &Gpu, cpu: Matrix) -> Both {
    let (codec, rows, cols) = (cpu.codec, cpu.rows, cpu.cols);
    let memory = gpu.upload::<u8>(&cpu.bytes);
    let params = MatrixParams::new(codec, rows, cols, &cpu.planes, memory.ptr());
    let tiles = Tiles::new(codec, rows, cols, &cpu.bytes);
    let mut values = vec![0.0; rows * cols];
    values.chunks_mut(cols).enumerate().for_each(|(r, out)| tiles.row(r, out));
    Both { cpu, _memory: memory, gpu: params, values }
}

impl Both {
    /// `W x` and `Σ |w x|` for each row of `x`, `(rows of x, rows)`.
    fn times(&self, x: &[f32]) -> Vec<(f64, f64)> {
        let cols = self.cpu.cols;
        let dot = |w: &[f32], x: &[f32]| {
            w.iter().zip(x).fold((0.0, 1e-30), |(s, a), (w, x)| {
                let v = f64::from(*w) * f64::from(*x);
                (s + v, a + v.abs())
            })
        };
        x.chunks(cols).flat_map(|x| self.values.chunks(cols).map(move |w| dot(w, x))).collect()
    }
}

#[track_caller]
fn assert_near(got: &[f32], want: &[(f64, f64)], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, (w, size))) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*g) - w).abs() / size;
        assert!(error <= tolerance, "{what}: at {i}: {g:e} is not {w:e}: off by {error:e} of {size:e}");
    }
}

/// Activations on the GPU.
struct X {
    _f: Buffer,
    _q: Buffer,
    acts: Acts,
}

fn upload(gpu: &Gpu, x: &[f32], cols: usize) -> X {
    let f = gpu.upload(x);
    let rows = x.len() / cols;
    let q = gpu.room(rows * quantize::row_bytes(cols.max(32)));
    if cols.is_multiple_of(32) {
        quantize::rows(gpu, f.ptr(), cols, rows, cols, q.ptr()).unwrap();
    }
    let acts = Acts { f32: f.ptr(), f32_stride: cols, q: q.ptr() };
    X { _f: f, _q: q, acts }
}

fn plain(w: MatrixParams, x: Acts, rows: usize, y: &Buffer, exact: bool, scratch: &Buffer) -> Product {
    Product { exact, ..Product::of(w, x, rows, (y.ptr(), w.rows as usize), (scratch.ptr(), scratch.len())) }
}

/// What the CPU computes with quantized activations.
fn cpu_q8(w: &Matrix, x: &[f32]) -> Vec<f32> {
    let ops = Ops::new(Isa::best());
    let n = x.len() / w.cols;
    let mut q = Q8Rows::default();
    let out = q.shape(n, w.cols);
    ops.quantize(x, 0..n, out);
    let mut y = vec![0.0; n * w.rows];
    let to = Out::new(&mut y, w.rows);
    ops.matmul_q8(w, 0..w.tiles(), &q, Rows::All(n), to);
    y
}

fn shapes(codec: Codec) -> &'static [(usize, usize)] {
    match codec.info().block_len {
        1 => &[(1, 1), (37, 40), (133, 130), (576, 200), (64, 2048)],
        32 => &[(1, 32), (37, 96), (576, 512), (130, 1408), (20, 10944)],
        _ => &[(1, 256), (37, 768), (576, 512), (130, 2048)],
    }
}

#[test]
fn quantized_rows_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(1);
    let cols = 96;
    let mut x = random.rows(5 * cols);
    x[..cols].fill(-0.0);
    x[cols..2 * cols].iter_mut().for_each(|v| *v *= 1e30);
    x[2 * cols..3 * cols].iter_mut().for_each(|v| *v *= 1e-35);
    (x[3 * cols + 5], x[3 * cols + 40], x[3 * cols + 70]) = (f32::INFINITY, f32::NAN, 1e-30);
    let mut q = Q8Rows::default();
    let out = q.shape(5, cols);
    Ops::new(Isa::best()).quantize(&x, 0..5, out);
    let up = upload(&gpu, &x, cols);
    let got = gpu.download::<u32>(up.acts.q, 5 * quantize::row_bytes(cols) / 4);
    for (i, got) in got.chunks(quantize::GROUP_BYTES / 4).enumerate() {
        let want = &q.row(i / 3)[i % 3];
        let bytes: Vec<u8> = got.iter().flat_map(|w| w.to_le_bytes()).collect();
        let d = f32::from_bits(got[19]);
        assert!(d == want.d() || d.is_nan() && want.d().is_nan(), "group {i}: {d:e} is not {:e}", want.d());
        if d.is_nan() {
            continue;
        }
        // Words t and t + 4 of the high parts, then of the low ones: 16 bytes for each t of 4.
        let at = |c: usize| 16 * (c / 4 % 4) + 4 * (c / 16) + c % 4;
        let code = |c: usize| 64 * i32::from(bytes[at(c)] as i8) + i32::from(bytes[8 + at(c)] as i8);
        assert!((0..32).all(|c| code(c) == want.code(c)), "group {i}");
        let sums: Vec<i32> = got[16..19].iter().map(|s| *s as i32).collect();
        let halves = want.neg_half.map(|s| -i32::from(s));
        assert_eq!(sums, [halves[0], halves[1], halves[0] + halves[1]], "group {i}");
    }
}

#[test]
fn few_rows_give_what_the_cpu_gives_alone_or_together() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(2);
    let scratch = gpu.room(0);
    for info in &TABLE {
        for &(rows, cols) in shapes(info.codec) {
            let w = both(&gpu, info.codec, rows, cols, &mut random);
            let x = random.rows(8 * cols);
            let up = upload(&gpu, &x, cols);
            let y = gpu.room(8 * rows * 4);
            let mut exact_want = w.times(&x);
            let all = {
                product(&gpu, &plain(w.gpu, up.acts, 8, &y, false, &scratch)).unwrap();
                gpu.download::<f32>(y.ptr(), 8 * rows)
            };
            if !info.codec.is_dense() {
                let cpu = cpu_q8(&w.cpu, &x);
                let want: Vec<_> = cpu.iter().zip(&exact_want).map(|(v, e)| (f64::from(*v), e.1)).collect();
                assert_near(&all, &want, SUMMED, &format!("{} ({rows}, {cols})", info.name));
            } else {
                assert_near(&all, &exact_want, SUMMED, &format!("{} ({rows}, {cols})", info.name));
            }
            for n in [1, 2, 3, 4, 5, 7] {
                product(&gpu, &plain(w.gpu, up.acts, n, &y, false, &scratch)).unwrap();
                let some = gpu.download::<f32>(y.ptr(), n * rows);
                assert!(some == all[..n * rows], "{} ({rows}, {cols}): {n} rows differ from 8", info.name);
            }
            product(&gpu, &plain(w.gpu, up.acts, 5, &y, true, &scratch)).unwrap();
            exact_want.truncate(5 * rows);
            let got = gpu.download::<f32>(y.ptr(), 5 * rows);
            assert_near(&got, &exact_want, SUMMED, &format!("{} ({rows}, {cols}) exact", info.name));
        }
    }
}

#[test]
fn many_rows_are_near_the_sums_in_f64() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(3);
    for info in &TABLE {
        for &(rows, cols) in shapes(info.codec) {
            let w = both(&gpu, info.codec, rows, cols, &mut random);
            for n in [9, 17, 70, 2100] {
                // Enough rows for the large blocks, at one shape; the definition of some of them is enough to wait for.
                if n > 100 && rows != 576 {
                    continue;
                }
                let mut x = random.rows(n * cols);
                // Rows far apart in size must not share an exponent.
                x[..cols].iter_mut().for_each(|v| *v *= 1e6);
                x[cols..2 * cols].iter_mut().for_each(|v| *v *= 1e-6);
                let up = upload(&gpu, &x, cols);
                let y = gpu.room(n * rows * 4);
                let scratch = gpu.room(scratch_bytes(n, cols, 1));
                product(&gpu, &plain(w.gpu, up.acts, n, &y, false, &scratch)).unwrap();
                let got = gpu.download::<f32>(y.ptr(), n * rows);
                for part in [0..n.min(70), n - n.min(9)..n] {
                    let want = w.times(&x[part.start * cols..part.end * cols]);
                    let got = &got[part.start * rows..part.end * rows];
                    let tolerance = if info.codec.is_dense() { TERMS } else { HALF };
                    assert_near(got, &want, tolerance, &format!("{} ({rows}, {cols}) x {n}", info.name));
                }
            }
        }
    }
}

/// Of weights that f16 has no room for: dense ones of any size, quantized ones of some thousands.
#[test]
fn large_weights_keep_their_value() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(6);
    let (rows, cols, n) = (48, 256, 40);
    let x = random.rows(n * cols);
    let up = upload(&gpu, &x, cols);
    let (y, scratch) = (gpu.room(n * rows * 4), gpu.room(scratch_bytes(n, cols, 1)));
    for info in &TABLE {
        let (by, tolerance) = match info.codec {
            Codec::F16 => (6e5, TERMS),
            c if c.is_dense() => (1e7, TERMS),
            _ => (20.0, HALF),
        };
        let w = both_of(&gpu, matrix_of(info.codec, rows, cols, &mut random, by));
        product(&gpu, &plain(w.gpu, up.acts, n, &y, false, &scratch)).unwrap();
        let got = gpu.download::<f32>(y.ptr(), n * rows);
        assert_near(&got, &w.times(&x), tolerance, info.name);
    }
}

#[test]
fn heads_and_sums_onto_what_is_there() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(4);
    let (heads, rows, cols) = (3, 48, 128);
    for (codec, shared) in
        [(Codec::Q8_0, false), (Codec::F16, true), (Codec::Q4_0, true), (Codec::F32, false)]
    {
        let matrices: Vec<_> = (0..heads).map(|_| both(&gpu, codec, rows, cols, &mut random)).collect();
        let step = matrices[0].cpu.bytes.len();
        let all: Vec<u8> = matrices.iter().flat_map(|m| m.cpu.bytes.to_vec()).collect();
        let memory = gpu.upload(&all);
        for (n, exact) in [(1, false), (5, false), (5, true), (30, false)] {
            let heads_of_x = if shared { 1 } else { heads };
            let x = random.rows(n * heads_of_x * cols);
            let up = upload(&gpu, &x, cols);
            let y = gpu.upload(&vec![1.0f32; n * heads * rows]);
            let scratch = gpu.room(scratch_bytes(n, cols, heads_of_x));
            let p = Product {
                w: MatrixParams { base: memory.ptr(), ..matrices[0].gpu },
                x: Acts { f32_stride: heads_of_x * cols, ..up.acts },
                y_stride: heads * rows,
                add: true,
                heads,
                w_step: step as u64,
                x_step: if shared { 0 } else { cols },
                q_step: if shared { 0 } else { quantize::row_bytes(cols) },
                y_step: rows,
                ..plain(matrices[0].gpu, up.acts, n, &y, exact, &scratch)
            };
            product(&gpu, &p).unwrap();
            let got = gpu.download::<f32>(y.ptr(), n * heads * rows);
            for (h, m) in matrices.iter().enumerate() {
                for i in 0..n {
                    let x = &x[(i * heads_of_x + if shared { 0 } else { h }) * cols..][..cols];
                    let want: Vec<_> = m.times(x).iter().map(|(v, s)| (v + 1.0, s + 1.0)).collect();
                    let got = &got[(i * heads + h) * rows..][..rows];
                    assert_near(got, &want, HALF, &format!("{codec:?} x {n} head {h} exact {exact}"));
                }
            }
        }
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `silu(gate x) * (up x)` and what its rounding errors are measured in.
fn swiglu_of(gate: &Both, up: &Both, x: &[f32]) -> Vec<(f64, f64)> {
    let pairs = gate.times(x).into_iter().zip(up.times(x));
    pairs
        .map(|((g, gs), (u, us))| (silu(g) * u, silu(g).abs() * us + 1.1 * gs * u.abs() + gs * us * 1e-3))
        .collect()
}

#[test]
fn swiglu_in_all_its_forms() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(5);
    let table = [
        (Codec::Q4_0, Codec::Q4_0, 352, 512),
        (Codec::Q6K, Codec::Q6K, 96, 512),
        (Codec::BF16, Codec::BF16, 70, 130),
        (Codec::F8E4M3, Codec::F8E4M3, 160, 384),
        (Codec::Q4K, Codec::Q6K, 96, 512),
    ];
    for (a, b, width, cols) in table {
        let (gate, up) = (both(&gpu, a, width, cols, &mut random), both(&gpu, b, width, cols, &mut random));
        for (rows, exact) in
            [(1, false), (2, false), (3, false), (8, false), (1, true), (6, true), (20, false), (67, false)]
        {
            let x: Vec<f32> = random.rows(rows * cols).iter().map(|v| v * 0.2).collect();
            let acts = upload(&gpu, &x, cols);
            let act = gpu.room(rows * width * 4);
            let q = gpu.room(rows * quantize::row_bytes(width.next_multiple_of(32)));
            let scratch = gpu.room(swiglu_scratch_bytes(rows, width, cols));
            let whole = width.is_multiple_of(32);
            let s = Swiglu {
                gate: gate.gpu,
                up: up.gpu,
                x: acts.acts,
                rows,
                act: act.ptr(),
                act_q: if whole { q.ptr() } else { Ptr::NULL },
                exact,
                scratch: scratch.ptr(),
                scratch_bytes: scratch.len(),
            };
            swiglu(&gpu, &s).unwrap();
            let what = format!("{a:?} {b:?} ({width}, {cols}) x {rows} exact {exact}");
            let got = gpu.download::<f32>(act.ptr(), rows * width);
            let tolerance = if exact { 2.0 * SUMMED } else { 2.0 * HALF };
            assert_near(&got, &swiglu_of(&gate, &up, &x), tolerance, &what);
            if whole {
                let again = upload(&gpu, &got, width);
                let n = rows * quantize::row_bytes(width) / 4;
                let strip = |mut v: Vec<u32>| {
                    v.iter_mut().skip(19).step_by(20).for_each(|pad| *pad = 0);
                    v
                };
                let (a, b) = (strip(gpu.download(q.ptr(), n)), strip(gpu.download(again.acts.q, n)));
                assert!(a == b, "{what}: quantized otherwise than alone");
            }
        }
    }
}

/// A layer of experts on both sides.
struct Layer {
    experts: Vec<[Both; 3]>,
    _table: Buffer,
    gpu: Experts,
}

fn layer(gpu: &Gpu, codecs: [Codec; 2], width: usize, hidden: usize, random: &mut Random) -> Layer {
    let (n_experts, n_picked) = (11, 3);
    let experts: Vec<_> = (0..n_experts)
        .map(|_| {
            let gate = both(gpu, codecs[0], width, hidden, random);
            let up = both(gpu, codecs[0], width, hidden, random);
            [gate, up, both(gpu, codecs[1], hidden, width, random)]
        })
        .collect();
    let addresses: Vec<u64> = experts.iter().flatten().map(|m| m.gpu.base.0).collect();
    let table = gpu.upload(&addresses);
    let [gate, up, down] = [0, 1, 2].map(|i| MatrixParams { base: Ptr::NULL, ..experts[0][i].gpu });
    let e = Experts { table: table.ptr(), gate, up, down, n_experts, n_picked };
    Layer { experts, _table: table, gpu: e }
}

/// Different experts for each pick of a row, some of them popular and one never picked.
fn picks(rows: usize, e: &Experts, random: &mut Random) -> Vec<PickParams> {
    let mut out: Vec<PickParams> = Vec::new();
    for _ in 0..rows {
        let first = out.len();
        while out.len() < first + e.n_picked {
            let n = random.bits() as usize % (e.n_experts - 1);
            let expert = (if random.bits().is_multiple_of(2) { n % 4 } else { n }) as u32;
            if out[first..].iter().all(|p| p.expert != expert) {
                out.push(PickParams { expert, weight: random.unit() });
            }
        }
    }
    out
}

/// Runs the experts on the GPU; returns the residual.
fn run_layer(
    gpu: &Gpu,
    l: &Layer,
    x: &[f32],
    picked: &[PickParams],
    residual: &[f32],
    exact: bool,
    scratch: usize,
) -> Vec<f32> {
    let (hidden, width) = (l.gpu.gate.cols as usize, l.gpu.gate.rows as usize);
    let (rows, n) = (x.len() / hidden, picked.len());
    let acts = upload(gpu, x, hidden);
    let flat: Vec<u32> = picked.iter().flat_map(|p| [p.expert, p.weight.to_bits()]).collect();
    let (picks, out) = (gpu.upload(&flat), gpu.upload(residual));
    let memory = gpu.room(Grouped::bytes(n, l.gpu.n_experts));
    let grouped = Grouped::at(memory.ptr(), n, l.gpu.n_experts);
    let (act, act_q) =
        (gpu.room(n * width * 4), gpu.room(n * quantize::row_bytes(width.next_multiple_of(32))));
    let scratch = gpu.room(scratch);
    let step = Step {
        rows,
        picks: picks.ptr(),
        grouped: &grouped,
        act: act.ptr(),
        act_q: if l.gpu.down.codec().is_dense() { Ptr::NULL } else { act_q.ptr() },
        exact,
        experts: (0, l.gpu.n_experts as u32),
        scratch: scratch.ptr(),
        scratch_bytes: scratch.len(),
    };
    if rows > ROWS_MAX {
        expert::group(gpu, &l.gpu, picks.ptr(), n, &grouped).unwrap();
        check_grouped(gpu, &grouped, picked, l.gpu.n_experts, l.gpu.n_picked);
    }
    expert::gate_up(gpu, &l.gpu, &acts.acts, &step).unwrap();
    expert::down(gpu, &l.gpu, &step, out.ptr()).unwrap();
    gpu.download(out.ptr(), residual.len())
}

/// Slots are the picks sorted by expert, in order inside one, and blocks cover each expert's.
fn check_grouped(gpu: &Gpu, g: &Grouped, picked: &[PickParams], n_experts: usize, n_picked: usize) {
    let n = picked.len();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|&i| picked[i].expert);
    let starts = gpu.download::<u32>(g.starts, n_experts + 1);
    let slot_row = gpu.download::<u32>(g.slot_row, n);
    let slot_of = gpu.download::<u32>(g.slot_of, n);
    for (slot, &i) in order.iter().enumerate() {
        assert_eq!((slot_of[i] as usize, slot_row[slot] as usize), (slot, i / n_picked));
    }
    let mut want = Vec::new();
    for (e, start) in starts[..n_experts].iter().enumerate() {
        let before = picked.iter().filter(|p| (p.expert as usize) < e).count() as u32;
        assert_eq!(*start, before);
        let end = picked.iter().filter(|p| p.expert as usize <= e).count() as u32;
        want.extend((before..end).step_by(g.block.rows()).map(|at| [e as u32, at]));
    }
    assert_eq!(starts[n_experts] as usize, n);
    assert!(want.len() <= g.n_blocks);
    let blocks = gpu.download::<u32>(g.blocks, 2 * g.n_blocks);
    for (i, b) in blocks.chunks(2).enumerate() {
        match want.get(i) {
            Some(w) => assert_eq!(b, w),
            None => assert_eq!(b[0], u32::MAX),
        }
    }
}

#[test]
fn experts_few_many_and_exact() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(6);
    let table = [
        ([Codec::Q4_0, Codec::Q4_0], 352, 512),
        ([Codec::Q4K, Codec::Q6K], 256, 512),
        ([Codec::Q4K, Codec::Q5_0], 96, 256),
        ([Codec::F8E4M3, Codec::F8E4M3], 136, 200),
        ([Codec::BF16, Codec::F16], 70, 130),
        ([Codec::MXFP4, Codec::MXFP4], 64, 96),
    ];
    for (codecs, width, hidden) in table {
        let l = layer(&gpu, codecs, width, hidden, &mut random);
        for (rows, exact) in
            [(1, false), (5, false), (8, false), (3, true), (12, true), (9, false), (40, false), (300, false)]
        {
            let x: Vec<f32> = random.rows(rows * hidden).iter().map(|v| v * 0.3).collect();
            let residual = random.rows(rows * hidden);
            let picked = picks(rows, &l.gpu, &mut random);
            let scratch = expert::scratch_bytes_best(&l.gpu, rows);
            let got = run_layer(&gpu, &l, &x, &picked, &residual, exact, scratch);
            let what = format!("{codecs:?} ({width}, {hidden}) x {rows} exact {exact}");
            let want = layer_of(&l, &x, &picked, &residual);
            assert_near(&got, &want, if exact { 4.0 * SUMMED } else { 2.0 * HALF }, &what);
            if rows > ROWS_MAX && !exact {
                let small = expert::scratch_bytes(&l.gpu, rows);
                let again = run_layer(&gpu, &l, &x, &picked, &residual, exact, small);
                assert!(got == again, "{what}: slices of down differ from the whole");
            }
        }
    }
}

/// The definition: `residual + Σ weight * down(silu(gate x) * (up x))`, with error units carried along.
fn layer_of(l: &Layer, x: &[f32], picked: &[PickParams], residual: &[f32]) -> Vec<(f64, f64)> {
    let hidden = l.gpu.gate.cols as usize;
    let mut out: Vec<_> = residual.iter().map(|v| (f64::from(*v), f64::from(v.abs()))).collect();
    for (i, p) in picked.iter().enumerate() {
        let row = i / l.gpu.n_picked;
        let [gate, up, down] = &l.experts[p.expert as usize];
        let act = swiglu_of(gate, up, &x[row * hidden..][..hidden]);
        for (o, w) in out[row * hidden..][..hidden].iter_mut().zip(down.values.chunks(act.len())) {
            for (w, (a, size)) in w.iter().zip(&act) {
                let w = f64::from(*w) * f64::from(p.weight);
                o.0 += w * a;
                o.1 += w.abs() * (size + a.abs());
            }
        }
    }
    out
}

#[test]
fn embedding_rows_are_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(7);
    for info in &TABLE {
        for &(rows, cols) in shapes(info.codec) {
            let w = both(&gpu, info.codec, rows, cols, &mut random);
            let tokens: Vec<u32> = [0, rows - 1, rows / 2, rows / 3].map(|t| t as u32).to_vec();
            let at = gpu.upload(&tokens);
            let y = gpu.room(tokens.len() * cols * 4);
            embed::rows(&gpu, &w.gpu, at.ptr(), tokens.len(), y.ptr()).unwrap();
            let got = gpu.download::<f32>(y.ptr(), tokens.len() * cols);
            for (t, got) in tokens.iter().zip(got.chunks(cols)) {
                let want = &w.values[*t as usize * cols..][..cols];
                let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits() || a == b);
                assert!(same, "{} ({rows}, {cols}) row {t}", info.name);
            }
        }
    }
}

#[path = "matrix_speed.rs"]
mod speed;
