//! Kernels that work on single rows, against their definitions: norm, angles, appends, SiLU, top-k.

use super::rope::{GqaAppend, MlaAppend, Turns, angles, gqa_append, mla_append};
use super::test_pages::{Cached, gqa_page, mla_page, random};
use super::top::{Found, Top, largest, scratch_bytes};
use super::{act, norm, quantize};
use crate::backend::KvType;
use crate::backend::cpu::{Isa, Ops};
use crate::backend::cuda::testing::gpu;
use crate::backend::cuda::{Gpu, Ptr};
use crate::model::hyper::{RopeHyper, RopeScaling};
use crate::model::{Mask, QkNorm, Rope, RopePairs};

/// Largest difference, relative to the larger of 1 and the expected magnitude.
fn error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(g, w)| (g - w).abs() / w.abs().max(1.0))
        .fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

#[test]
fn norms_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let ops = Ops::new(Isa::Scalar);
    for n in [1, 31, 32, 576, 2048, 2080, 7168, 8224] {
        let (rows, eps) = (5, 1e-6);
        let (x, weight, index) = (random(rows * n, 1), random(n, 2), [3u32, 0, 4]);
        let (bx, bw, bi) = (gpu.upload(&x), gpu.upload(&weight), gpu.upload(&index));
        let y = gpu.room(rows * n * 4);
        for indexed in [false, true] {
            let order: Vec<usize> =
                if indexed { index.iter().map(|&i| i as usize).collect() } else { (0..rows).collect() };
            let job = norm::Norm {
                x: bx.ptr(),
                x_row: n,
                index: if indexed { bi.ptr() } else { Ptr::NULL },
                rows: order.len(),
                weight: bw.ptr(),
                n,
                eps,
                y: y.ptr(),
                q: Ptr::NULL,
            };
            norm::rms(&gpu, &job).unwrap();
            let mut want = vec![0.0; order.len() * n];
            for (i, row) in order.iter().enumerate() {
                ops.rms_norm(&x[row * n..(row + 1) * n], &weight, eps, &mut want[i * n..(i + 1) * n]);
            }
            // The order of the sum differs.
            let e = error(&gpu.download(y.ptr(), want.len()), &want);
            assert!(e < 2e-6, "{n} columns, indexed {indexed}: {e}");
        }
    }
}

#[test]
fn what_is_fused_is_what_two_launches_give() {
    let Some(gpu) = gpu() else { return };
    let (rows, n) = (3, 576);
    let (x, weight) = (random(rows * n, 1), random(n, 2));
    let (bx, bw) = (gpu.upload(&x), gpu.upload(&weight));
    let len = rows * quantize::row_bytes(n);
    let (y, q, apart) = (gpu.room(rows * n * 4), gpu.room(len), gpu.room(len));
    let (y, q, apart) = (y.ptr(), q.ptr(), apart.ptr());
    let job =
        norm::Norm { x: bx.ptr(), x_row: n, index: Ptr::NULL, rows, weight: bw.ptr(), n, eps: 1e-5, y, q };
    norm::rms(&gpu, &job).unwrap();
    quantize::rows(&gpu, y, n, rows, n, apart).unwrap();
    assert_eq!(gpu.download::<u8>(q, len), gpu.download::<u8>(apart, len));
    // Columns of gate and up side by side, as one product gives them.
    let job =
        act::Silu { gate: (bx.ptr(), n), up: (bx.ptr().f32s(n / 2), n), rows, n: n / 2 / 32 * 32, y, q };
    act::silu(&gpu, &job).unwrap();
    let len = rows * quantize::row_bytes(job.n);
    quantize::rows(&gpu, y, job.n, rows, job.n, apart).unwrap();
    assert_eq!(gpu.download::<u8>(q, len), gpu.download::<u8>(apart, len));
}

#[test]
fn silu_and_biases_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let ops = Ops::new(Isa::Scalar);
    for (rows, n) in [(1, 1), (3, 300), (7, 1408)] {
        let mut gate = random(rows * n, 3);
        gate.iter_mut().for_each(|g| *g *= 20.0); // both saturated ends
        let up = random(rows * n, 4);
        let (bg, bu, y) = (gpu.upload(&gate), gpu.upload(&up), gpu.room(rows * n * 4));
        let job = act::Silu { gate: (bg.ptr(), n), up: (bu.ptr(), n), rows, n, y: y.ptr(), q: Ptr::NULL };
        act::silu(&gpu, &job).unwrap();
        let mut want = vec![0.0; rows * n];
        ops.silu_mul(&gate, &up, &mut want);
        let e = error(&gpu.download(y.ptr(), want.len()), &want);
        assert!(e < 1e-6, "{rows} x {n}: {e}");
        let bias = random(n, 5);
        let bb = gpu.upload(&bias);
        act::add_bias(&gpu, rows, n, y.ptr(), n, bb.ptr()).unwrap();
        let before = gpu.download::<f32>(y.ptr(), rows * n);
        want.iter_mut().enumerate().for_each(|(i, w)| *w += bias[i % n]);
        assert!(error(&before, &want) < 1e-6);
    }
}

fn ropes(dims: usize, pairs: RopePairs) -> Vec<Rope> {
    let kinds = [
        RopeScaling::None,
        RopeScaling::Linear { factor: 4.0 },
        RopeScaling::Llama3 { factor: 8.0, low_freq: 1.0, high_freq: 4.0, original_tokens: 8192.0 },
        RopeScaling::Yarn {
            factor: 40.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_tokens: 4096.0,
            attention_factor: 1.37,
            truncate: true,
        },
    ];
    kinds.into_iter().map(|scaling| Rope::new(&RopeHyper { pairs, dims, theta: 10000.0, scaling })).collect()
}

/// The device's rotations at some positions, and what the definition says.
fn turns(gpu: &Gpu, rope: &Rope, cached: &Cached) -> (crate::backend::cuda::Buffer, Turns) {
    let (rows, half) = (cached.positions.len(), rope.dims() / 2);
    let room = gpu.room(rows * half * 8);
    let interleaved = rope.pairs == RopePairs::Interleaved;
    let turns = Turns { at: room.ptr(), half, interleaved };
    let frequency = gpu.upload(&rope.inv_freq);
    let at = cached.seen.rows.position;
    angles(gpu, cached.seen.kv, rows, at, frequency.ptr(), rope.attention_factor, turns).unwrap();
    gpu.device.synchronize().unwrap();
    (room, turns)
}

#[test]
fn angles_are_the_definitions_to_the_last_bit_or_the_one_before() {
    let Some(gpu) = gpu() else { return };
    let positions = [0, 1, 2, 31, 4095, 4096, 131_071, 1_000_003, (1 << 24) - 1];
    let cached = Cached::new(&gpu, gqa_page(KvType::F16, 1, 0), Mask::Full, &positions, false);
    for dims in [2, 64, 128] {
        for rope in ropes(dims, RopePairs::Half) {
            let (_room, t) = turns(&gpu, &rope, &cached);
            let got = gpu.download::<f32>(t.at, positions.len() * dims);
            let (mut cos, mut sin) = (vec![0.0; dims / 2], vec![0.0; dims / 2]);
            for (row, &p) in positions.iter().enumerate() {
                rope.angles(p, &mut cos, &mut sin);
                for i in 0..dims / 2 {
                    let pair = &got[row * dims + 2 * i..][..2];
                    for (g, w) in pair.iter().zip([cos[i], sin[i]]) {
                        assert!((g - w).abs() <= 1.2e-7 * w.abs().max(0.01), "{p} {i}: {g} {w}");
                    }
                }
            }
        }
    }
}

fn norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let mean = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / x.len() as f64;
    let by = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    x.iter_mut().zip(weight).for_each(|(v, w)| *v = *v * by * w);
}

/// Differences that the order of a norm's sum makes, and then one rounding to f16.
fn append_tolerance(kv: KvType) -> f32 {
    if kv == KvType::F32 { 4e-6 } else { 1.5e-3 }
}

#[test]
fn queries_keys_and_values_are_prepared_as_defined() {
    let Some(gpu) = gpu() else { return };
    let positions = [0, 1, 31, 32, 33, 100, 1000];
    let mut seed = 10;
    for (heads, kv_heads, d, dims) in
        [(1, 1, 64, 64), (9, 3, 64, 64), (8, 2, 128, 96), (4, 4, 18, 6), (2, 1, 256, 256)]
    {
        for (kind, pairs) in [
            (QkNorm::None, RopePairs::Half),
            (QkNorm::Head, RopePairs::Half),
            (QkNorm::Row, RopePairs::Interleaved),
        ] {
            for (kv, mask) in [
                (KvType::F16, Mask::Full),
                (KvType::F32, Mask::Strided { stride: 3 }),
                (KvType::Int8, Mask::Strided { stride: 2 }),
            ] {
                seed += 10;
                let shape = Heads { heads, kv_heads, d, kind, kv };
                append_gqa(&gpu, &shape, pairs, dims, mask, &positions, seed);
            }
        }
    }
}

struct Heads {
    heads: usize,
    kv_heads: usize,
    d: usize,
    kind: QkNorm,
    kv: KvType,
}

/// The kernel's own f32 rows, coded by the CPU: no sum's order between them.
fn append_coded(gpu: &Gpu, job: &GqaAppend, q: &[f32], cached: &Cached, plain: &Cached) {
    let q = gpu.upload(q);
    gqa_append(gpu, &GqaAppend { seen: plain.seen, q: (q.ptr(), job.q.1), ..*job }).unwrap();
    gqa_append(gpu, job).unwrap();
    cached.expect_coded(gpu, plain);
}

fn append_gqa(
    gpu: &Gpu,
    s: &Heads,
    pairs: RopePairs,
    dims: usize,
    mask: Mask,
    positions: &[usize],
    seed: u64,
) {
    let (n, d, eps) = (positions.len(), s.d, 1e-5);
    let cached = Cached::new(gpu, gqa_page(s.kv, s.kv_heads, d), mask, positions, false);
    let rope = &ropes(dims, pairs)[3];
    let (_room, turns) = turns(gpu, rope, &cached);
    let widths = [s.heads * d, s.kv_heads * d, s.kv_heads * d];
    let mut x: Vec<Vec<f32>> = widths.iter().zip(seed..).map(|(w, seed)| random(n * w, seed)).collect();
    let bias: Vec<Vec<f32>> = widths.iter().zip(seed + 3..).map(|(w, seed)| random(*w, seed)).collect();
    let norm_len = |w: usize| match s.kind {
        QkNorm::None => 1,
        QkNorm::Head => d,
        QkNorm::Row => w,
    };
    let norms: Vec<Vec<f32>> = (0..2).map(|i| random(norm_len(widths[i]), seed + 6 + i as u64)).collect();
    let clip = (s.kind == QkNorm::Row).then_some(0.8);
    let up = |v: &Vec<f32>| gpu.upload(v);
    let (bx, bb, bn): (Vec<_>, Vec<_>, Vec<_>) =
        (x.iter().map(up).collect(), bias.iter().map(up).collect(), norms.iter().map(up).collect());
    let job = GqaAppend {
        seen: cached.seen,
        n,
        q: (bx[0].ptr(), widths[0]),
        k: (bx[1].ptr(), widths[1]),
        v: (bx[2].ptr(), widths[2]),
        bias: [bb[0].ptr(), bb[1].ptr(), bb[2].ptr()],
        norm: (s.kind, [bn[0].ptr(), bn[1].ptr()]),
        eps,
        clip,
        turns,
        heads: s.heads,
        kv_heads: s.kv_heads,
        d,
    };
    if s.kv == KvType::Int8 {
        let plain = Cached::new(gpu, gqa_page(KvType::F32, s.kv_heads, d), mask, positions, false);
        return append_coded(gpu, &job, &x[0], &cached, &plain);
    }
    gqa_append(gpu, &job).unwrap();
    let (mut cos, mut sin) = (vec![0.0; dims / 2], vec![0.0; dims / 2]);
    for (part, x) in x.iter_mut().enumerate() {
        for (row, x) in x.chunks_mut(widths[part]).enumerate() {
            rope.angles(positions[row], &mut cos, &mut sin);
            x.iter_mut().zip(&bias[part]).for_each(|(x, b)| *x += b);
            if part < 2 {
                match s.kind {
                    QkNorm::None => {}
                    QkNorm::Head => x.chunks_mut(d).for_each(|h| norm_in_place(h, &norms[part], eps)),
                    QkNorm::Row => norm_in_place(x, &norms[part], eps),
                }
            }
            if let Some(c) = clip {
                x.iter_mut().for_each(|v| *v = v.clamp(-c, c));
            }
            if part < 2 {
                x.chunks_mut(d).for_each(|h| rope.turn(h, &cos, &sin));
            }
        }
    }
    let e = error(&gpu.download(bx[0].ptr(), x[0].len()), &x[0]);
    assert!(e < 4e-6, "queries: {e}");
    cached.expect_appended(gpu, &x[1], &x[2], append_tolerance(s.kv));
}

/// Values pass through the append kernel untouched, so that every edge of the coding can be put in.
#[test]
fn codes_of_edge_values_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let (d, heads) = (50, 2); // the second group of a head is not full
    let edges: [&[f32]; 8] = [
        &[0.0, -0.0],
        &[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0], // ties go away from zero
        &[1e-9, -3e-9],                                     // a scale that f16 rounds to zero
        &[5e-6, 1e-6, -4e-6],                               // a scale that is subnormal in f16
        &[1e38, -1e37, 8.3e6],                              // one that f16 has no room for
        &[f32::INFINITY, 1.0],
        &[f32::NAN, 2.0, -1.0],
        &[65504.0 * 127.0, 3.0],
    ];
    let positions: Vec<usize> = (0..edges.len()).map(|i| i * 5).collect();
    let v: Vec<f32> = edges.iter().flat_map(|e| e.iter().cycle().take(heads * d).copied()).collect();
    let cached = Cached::new(&gpu, gqa_page(KvType::Int8, heads, d), Mask::Full, &positions, false);
    let plain = Cached::new(&gpu, gqa_page(KvType::F32, heads, d), Mask::Full, &positions, false);
    let (_room, turns) = turns(&gpu, &ropes(d, RopePairs::Half)[0], &cached);
    let (bv, zero) = (gpu.upload(&v), gpu.room(v.len() * 4));
    for seen in [cached.seen, plain.seen] {
        let x = (zero.ptr(), heads * d);
        let job = GqaAppend {
            seen,
            n: edges.len(),
            q: x,
            k: x,
            v: (bv.ptr(), heads * d),
            bias: [Ptr::NULL; 3],
            norm: (QkNorm::None, [Ptr::NULL; 2]),
            eps: 0.0,
            clip: None,
            turns,
            heads,
            kv_heads: heads,
            d,
        };
        gqa_append(&gpu, &job).unwrap();
    }
    cached.expect_coded(&gpu, &plain);
}

#[test]
fn latents_and_rope_keys_are_prepared_as_defined() {
    let Some(gpu) = gpu() else { return };
    let positions = [0, 31, 32, 77];
    for (heads, lora, nope, rope_dim) in [(16, 512, 128, 64), (3, 32, 16, 8), (1, 96, 20, 10)] {
        for (kv, mask) in [
            (KvType::F16, Mask::Full),
            (KvType::F32, Mask::Strided { stride: 2 }),
            (KvType::Int8, Mask::Strided { stride: 3 }),
        ] {
            append_mla(&gpu, heads, lora, nope, rope_dim, kv, mask, &positions);
        }
    }
}

fn append_mla(
    gpu: &Gpu,
    heads: usize,
    lora: usize,
    nope: usize,
    rope_dim: usize,
    kv: KvType,
    mask: Mask,
    positions: &[usize],
) {
    let (n, width, head, eps) = (positions.len(), lora + rope_dim, nope + rope_dim, 1e-6);
    let cached = Cached::new(gpu, mla_page(kv, lora, rope_dim), mask, positions, false);
    let rope = &ropes(rope_dim, RopePairs::Interleaved)[3];
    let (_room, turns) = turns(gpu, rope, &cached);
    let (mut q, mut x) = (random(n * heads * head, 40), random(n * width, 41));
    let (q_bias, kv_bias, weight) = (random(heads * head, 42), random(width, 43), random(lora, 44));
    let (bq, bx, bqb, bxb, bw) =
        (gpu.upload(&q), gpu.upload(&x), gpu.upload(&q_bias), gpu.upload(&kv_bias), gpu.upload(&weight));
    let q_latent = gpu.room(n * heads * width * 4);
    let job = MlaAppend {
        seen: cached.seen,
        n,
        q: (bq.ptr(), heads * head),
        kv: (bx.ptr(), width),
        bias: [bqb.ptr(), bxb.ptr()],
        norm: bw.ptr(),
        eps,
        turns,
        heads,
        lora,
        nope,
        rope: rope_dim,
        q_latent: q_latent.ptr(),
    };
    if kv == KvType::Int8 {
        let plain = Cached::new(gpu, mla_page(KvType::F32, lora, rope_dim), mask, positions, false);
        let q = gpu.upload(&q);
        mla_append(gpu, &MlaAppend { seen: plain.seen, q: (q.ptr(), heads * head), ..job }).unwrap();
        mla_append(gpu, &job).unwrap();
        return cached.expect_coded(gpu, &plain);
    }
    mla_append(gpu, &job).unwrap();
    let (mut cos, mut sin) = (vec![0.0; rope_dim / 2], vec![0.0; rope_dim / 2]);
    for row in 0..n {
        rope.angles(positions[row], &mut cos, &mut sin);
        let q = &mut q[row * heads * head..][..heads * head];
        q.iter_mut().zip(&q_bias).for_each(|(q, b)| *q += b);
        q.chunks_mut(head).for_each(|h| rope.turn(&mut h[nope..], &cos, &sin));
        let x = &mut x[row * width..][..width];
        x.iter_mut().zip(&kv_bias).for_each(|(x, b)| *x += b);
        norm_in_place(&mut x[..lora], &weight, eps);
        rope.turn(&mut x[lora..], &cos, &sin);
    }
    assert!(error(&gpu.download(bq.ptr(), q.len()), &q) < 1e-6);
    let got = gpu.download::<f32>(q_latent.ptr(), n * heads * width);
    for (got, q) in got.chunks(width).zip(q.chunks(head)) {
        assert!(error(&got[lora..], &q[nope..]) < 1e-6);
        assert!(got[..lora].iter().all(|&v| v == 0.0), "only the rope part is written");
    }
    cached.expect_appended(gpu, &x, &[], append_tolerance(kv));
}

#[test]
fn the_largest_logits_are_found() {
    let Some(gpu) = gpu() else { return };
    for (rows, vocab, k) in [(1, 1, 1), (3, 4096, 5), (2, 4097, 64), (1, 151_936, 40), (4, 102_400, 1)] {
        for masked in [false, true] {
            // Rounded, so that there are ties, across slices too.
            let logits: Vec<f32> =
                random(rows * vocab, 70).into_iter().map(|v| (v * 64.0).round() / 64.0).collect();
            let words = vocab.div_ceil(32);
            let mask: Vec<u32> =
                (0..rows * words).map(|i| 0x2222_0801u32.rotate_left(i as u32 % 32)).collect();
            let (bl, bm) = (gpu.upload(&logits), gpu.upload(&mask));
            let (found, scratch) = (gpu.room(rows * k * 8), gpu.room(scratch_bytes(rows, vocab, k)));
            let job = Top {
                logits: bl.ptr(),
                rows,
                vocab,
                mask: if masked { bm.ptr() } else { Ptr::NULL },
                k,
                found: found.ptr(),
                scratch: scratch.ptr(),
            };
            for _ in 0..2 {
                largest(&gpu, &job).unwrap(); // the second launch finds the counters at zero again
            }
            let got = gpu.download::<Found>(found.ptr(), rows * k);
            for row in 0..rows {
                let allowed = |i: &usize| !masked || mask[row * words + i / 32] >> (i % 32) & 1 == 1;
                let mut want: Vec<usize> = (0..vocab).filter(allowed).collect();
                want.sort_by(|&a, &b| {
                    logits[row * vocab + b].total_cmp(&logits[row * vocab + a]).then(a.cmp(&b))
                });
                for n in 0..k {
                    let index = want.get(n).map_or(u32::MAX, |&i| i as u32);
                    assert_eq!(
                        got[row * k + n].index,
                        index,
                        "{rows} x {vocab}, number {n}, masked {masked}"
                    );
                }
            }
        }
    }
}
