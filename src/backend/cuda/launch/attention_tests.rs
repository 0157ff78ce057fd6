//! Attention over pages against its definition in f64: every type, every mask, page edges, batches, split and whole.

use super::attend::{Attend, Heads, Parts, attend, chosen, unit};
use super::flash::{self, Flash, Keys, Part, flash};
use super::quantize;
use super::test_pages::{Cached, gqa_page, mla_page, random};
use crate::backend::KvType;
use crate::backend::cuda::testing::gpu;
use crate::backend::cuda::{Gpu, Ptr, Unit};
use crate::format::f16;
use crate::kv::{PAGE_TOKENS, Placement, pages_for};
use crate::model::Mask;
use std::collections::HashMap;

/// One row's attention: `q (heads, d)`, sequence `k (tokens, kv_heads, d)` and `v`.
fn reference(
    h: &Heads,
    mask: Mask,
    i: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    scale: f32,
    sinks: Option<&[f32]>,
) -> Vec<f32> {
    let mut out = Vec::with_capacity(h.heads * h.dv);
    for head in 0..h.heads {
        let g = head / (h.heads / h.kv_heads);
        let q = &q[head * h.d..][..h.d];
        let seen: Vec<usize> = (0..=i).filter(|&j| mask.sees(i, j)).collect();
        let dot = |j: &usize| {
            let k = &k[(j * h.kv_heads + g) * h.d..][..h.d];
            q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * f64::from(scale)
        };
        let scores: Vec<f64> = seen.iter().map(dot).collect();
        let sink = sinks.map(|s| f64::from(s[head]));
        let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - top).exp()).sum();
        let mut sum = vec![0f64; h.dv];
        for (j, s) in seen.iter().zip(scores) {
            let p = (s - top).exp() / total;
            let row =
                if h.latent { &k[j * h.d..][..h.dv] } else { &v[(j * h.kv_heads + g) * h.dv..][..h.dv] };
            sum.iter_mut().zip(row).for_each(|(s, v)| *s += p * f64::from(*v));
        }
        out.extend(sum.iter().map(|&s| s as f32));
    }
    out
}

fn worst(got: &[f32], want: &[f32]) -> f32 {
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

const MASKS: [Mask; 5] = [
    Mask::Full,
    Mask::Sliding { window: 45 },
    Mask::Strided { stride: 3 },
    Mask::LocalStrided { window: 40, stride: 7 },
    Mask::LocalStrided { window: 1, stride: 128 },
];

/// Decode of several sequences at once: split as it pleases and whole.
fn check_attend(gpu: &Gpu, h: &Heads, kv: KvType, mask: Mask, positions: &[usize], with_sinks: bool) {
    let layout = if h.latent { mla_page(kv, h.dv, h.d - h.dv) } else { gqa_page(kv, h.kv_heads, h.d) };
    let mut cached = Cached::new(gpu, layout, mask, positions, false);
    let rows = cached.fill(gpu);
    let n = positions.len();
    let q = random(n * h.heads * h.d, 5);
    let sinks = with_sinks.then(|| random(h.heads, 6));
    let scale = 4.0 / (h.d as f32).sqrt();
    let (bq, bs) = (gpu.upload(&q), sinks.as_ref().map(|s| gpu.upload(s)));
    let out = gpu.room(n * h.heads * h.dv * 4);
    let row_bytes = h.heads * quantize::row_bytes(h.dv);
    let out_q = h.dv.is_multiple_of(32).then(|| gpu.room(n * row_bytes));
    let apart = gpu.room(n * row_bytes);
    let room = gpu.room(Parts::bytes(h, n));
    let longest = pages_for(positions.iter().max().unwrap() + 1, mask.stride());
    let mut want = Vec::new();
    for (row, (k, v)) in rows.iter().enumerate() {
        let q = &q[row * h.heads * h.d..][..h.heads * h.d];
        want.extend(reference(h, mask, positions[row], q, k, v, scale, sinks.as_deref()));
    }
    let mut bits: HashMap<Unit, Vec<f32>> = HashMap::new();
    for (split, entries) in [(true, longest), (true, longest + 300), (true, longest), (false, 1)] {
        let job = Attend {
            seen: cached.seen,
            heads: *h,
            n,
            q: bq.ptr(),
            scale,
            sinks: bs.as_ref().map_or(Ptr::NULL, |s| s.ptr()),
            out: out.ptr(),
            out_q: out_q.as_ref().map_or(Ptr::NULL, |q| q.ptr()),
            parts: split.then_some(Parts { at: room.ptr(), rows: n }),
            entries,
        };
        attend(gpu, &job).unwrap();
        let got = gpu.download::<f32>(out.ptr(), want.len());
        let e = worst(&got, &want);
        // f32 sums of up to some thousand products; with tensor cores, queries, weights and what codes stand for of 11 bits.
        let tolerance = if unit(h, kv).file == "latent" { 3e-3 } else { 2e-5 };
        assert!(e < tolerance, "{h:?} {kv:?} {mask:?} split {split} of {entries} entries: {e}");
        if let Some(q) = &out_q {
            quantize::rows(gpu, out.ptr(), h.dv, n * h.heads, h.dv, apart.ptr()).unwrap();
            let same = gpu.download::<u8>(q.ptr(), q.len()) == gpu.download::<u8>(apart.ptr(), q.len());
            assert!(same, "{h:?} split {split}: quantized apart");
        }
        if split {
            // Of one kernel; which one it is depends on the grid.
            let first = bits.entry(chosen(gpu, &job)).or_insert_with(|| got.clone());
            assert!(*first == got, "{h:?} {mask:?}: the grid shows");
        }
    }
}

fn gqa(heads: usize, kv_heads: usize, d: usize) -> Heads {
    Heads { heads, kv_heads, d, dv: d, latent: false }
}

fn mla(heads: usize, lora: usize, rope: usize) -> Heads {
    Heads { heads, kv_heads: 1, d: lora + rope, dv: lora, latent: true }
}

#[test]
fn decode_follows_the_definition() {
    let Some(gpu) = gpu() else { return };
    let edges = [0, 1, 31, 32, 33, 63, 64, 700];
    for kv in [KvType::F16, KvType::F32, KvType::Int8] {
        for h in [
            gqa(1, 1, 64),
            gqa(9, 3, 64),
            gqa(32, 8, 128),
            gqa(28, 4, 128),
            gqa(16, 1, 256),
            gqa(6, 2, 80),
            gqa(5, 1, 37),
        ] {
            check_attend(&gpu, &h, kv, Mask::Full, &edges, h.d == 128);
        }
        for h in [mla(16, 512, 64), mla(3, 32, 8), mla(1, 96, 18), mla(20, 256, 32)] {
            check_attend(&gpu, &h, kv, Mask::Full, &edges, false);
        }
        for mask in MASKS {
            check_attend(&gpu, &gqa(4, 2, 64), kv, mask, &edges, true);
            check_attend(&gpu, &mla(4, 64, 16), kv, mask, &[5, 400], false);
        }
    }
    // More pages than segments, one page more than fits, and all of DeepSeek-V3's heads.
    for kv in [KvType::F16, KvType::Int8] {
        check_attend(&gpu, &gqa(2, 1, 64), kv, Mask::Full, &[32 * 128 - 1, 32 * 128, 9000], false);
        check_attend(&gpu, &mla(128, 512, 64), kv, Mask::Full, &[2047, 2048], false);
        check_attend(&gpu, &mla(20, 512, 64), kv, Mask::Full, &[100, 127, 128, 32 * 4 * 64, 9000], false);
        for mask in MASKS {
            check_attend(&gpu, &mla(16, 512, 64), kv, mask, &[5, 400], false);
        }
        check_attend(&gpu, &gqa(2, 1, 64), kv, Mask::Sliding { window: 500 }, &[6000], true);
    }
}

/// A run of `n` rows from `position` on.
fn check_flash(gpu: &Gpu, h: &Heads, kv: KvType, mask: Mask, position: usize, n: usize, with_sinks: bool) {
    let positions: Vec<usize> = (position..position + n).collect();
    let mut cached = Cached::new(gpu, gqa_page(kv, h.kv_heads, h.d), mask, &positions, true);
    let rows = cached.fill(gpu);
    let (k, v) = &rows[0];
    let q = random(n * h.heads * h.d, 5);
    let sinks = with_sinks.then(|| random(h.heads, 6));
    let scale = 4.0 / (h.d as f32).sqrt();
    let (bq, bs) = (gpu.upload(&q), sinks.as_ref().map(|s| gpu.upload(s)));
    let out = gpu.room(n * h.heads * h.dv * 4);
    let keys = Keys::Cached { kv_heads: h.kv_heads };
    let sinks_at = bs.as_ref().map_or(Ptr::NULL, |s| s.ptr());
    let plain = Flash::of(cached.seen, n, h.heads, (h.d, h.dv), bq.ptr(), keys, out.ptr());
    let job = Flash { scale, sinks: sinks_at, ..plain };
    flash(gpu, &job).unwrap();
    let got = gpu.download::<f32>(out.ptr(), n * h.heads * h.dv);
    expect_rows(h, mask, &positions, (&got, &q, k, v), scale, sinks.as_deref());
}

/// Compares some of a run's rows: the first, those at the edges of blocks and pages, and the last.
fn expect_rows(
    h: &Heads,
    mask: Mask,
    positions: &[usize],
    (got, q, k, v): (&[f32], &[f32], &[f32], &[f32]),
    scale: f32,
    sinks: Option<&[f32]>,
) {
    let n = positions.len();
    for row in (0..n).filter(|r| [0, 1, 15, 16, 31, 33, 63, 64, 65, 127, 200, n - 1].contains(r)) {
        let q = &q[row * h.heads * h.d..][..h.heads * h.d];
        let want = reference(h, mask, positions[row], q, k, v, scale, sinks);
        let e = worst(&got[row * h.heads * h.dv..][..want.len()], &want);
        // Queries and weights are rounded to 11 bits: scores of magnitude s move by s * 2^-11, and weights with them.
        assert!(e < 4e-3, "{h:?} {mask:?} from {} row {row}: {e}", positions[0]);
    }
}

#[test]
fn prefill_follows_the_definition() {
    let Some(gpu) = gpu() else { return };
    for kv in [KvType::F16, KvType::Int8] {
        for h in [
            gqa(1, 1, 64),
            gqa(9, 3, 64),
            gqa(8, 2, 128),
            gqa(4, 1, 256),
            gqa(6, 2, 80),
            gqa(4, 4, 16),
            gqa(2, 1, 136),
        ] {
            for (position, n) in [(0, 1), (0, 65), (5, 17), (31, 64), (100, 130), (0, 512)] {
                check_flash(&gpu, &h, kv, Mask::Full, position, n, h.d == 80);
            }
        }
        for mask in MASKS {
            for (position, n) in [(0, 130), (300, 20), (777, 65)] {
                check_flash(&gpu, &gqa(4, 2, 64), kv, mask, position, n, true);
            }
        }
    }
}

#[test]
fn prefill_of_made_keys_follows_the_definition() {
    let Some(gpu) = gpu() else { return };
    for (heads, nope, rope, lora, dv) in [(4, 128, 64, 512, 128), (3, 32, 16, 40, 24), (2, 96, 32, 64, 128)] {
        for (mask, position, n) in
            [(Mask::Full, 0, 130), (Mask::Full, 70, 33), (Mask::Strided { stride: 3 }, 50, 70)]
        {
            for kv in [KvType::F16, KvType::Int8] {
                check_made(&gpu, (heads, nope, rope, lora, dv), kv, mask, position, n);
            }
        }
    }
}

/// Rows of keys or values as they are made: by position, and as f16 by slot, where those of slots without a position are NaN
/// and must not be read.
fn made_rows(
    heads: usize,
    mask: Mask,
    tokens: usize,
    positions: usize,
    width: usize,
    seed: u64,
) -> (Vec<f32>, Vec<u16>) {
    let by_position: Vec<f32> =
        random(positions * heads * width, seed).iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    let mut by_slot = vec![0xffffu16; heads * tokens * width];
    for p in 0..positions {
        let (index, slot) = Placement { stride: mask.stride() }.locate(p);
        for h in 0..heads {
            let from = &by_position[(p * heads + h) * width..][..width];
            let to = &mut by_slot[(h * tokens + index * PAGE_TOKENS + slot) * width..][..width];
            to.iter_mut().zip(from).for_each(|(t, f)| *t = f16::from_f32(*f).to_bits());
        }
    }
    (by_position, by_slot)
}

fn check_made(
    gpu: &Gpu,
    (heads, nope, rope, lora, dv): (usize, usize, usize, usize, usize),
    kv: KvType,
    mask: Mask,
    position: usize,
    n: usize,
) {
    let (d, positions) = (nope + rope, (position..position + n).collect::<Vec<_>>());
    let mut cached = Cached::new(gpu, mla_page(kv, lora, rope), mask, &positions, true);
    let latents = cached.fill(gpu).remove(0).0;
    let tokens = cached.tables[0].len() * PAGE_TOKENS;
    let made = |width: usize, seed: u64| made_rows(heads, mask, tokens, position + n, width, seed);
    let ((k_nope, k_slots), (v, v_slots)) = (made(nope, 20), made(dv, 21));
    let mut k = Vec::new();
    for p in 0..position + n {
        for h in 0..heads {
            k.extend_from_slice(&k_nope[(p * heads + h) * nope..][..nope]);
            k.extend_from_slice(&latents[p * (lora + rope) + lora..][..rope]);
        }
    }
    let q = random(n * heads * d, 5);
    let (bq, bk, bv) = (gpu.upload(&q), gpu.upload(&k_slots), gpu.upload(&v_slots));
    let out = gpu.room(n * heads * dv * 4);
    let scale = 4.0 / (d as f32).sqrt();
    let launch = |keys: Ptr, values: Ptr, tokens: usize, some_heads: (usize, usize), part: Part| {
        let keys = Keys::Made { keys, values, tokens, part, rope, lora };
        let plain = Flash::of(cached.seen, n, heads, (d, dv), bq.ptr(), keys, out.ptr());
        let job = Flash { some_heads, scale, ..plain };
        assert!(flash::unit(kv, d, dv, &[rope, lora], false).is_some());
        flash(gpu, &job).unwrap();
    };
    // Two launches of some heads each, as when made keys of all heads do not fit at once.
    for (first, some) in [(0, 1), (1, heads - 1)] {
        let skip = |width: usize| (first * tokens * 2 * width) as u64;
        launch(bk.ptr().at(skip(nope)), bv.ptr().at(skip(dv)), tokens, (first, some), Part::WHOLE);
    }
    let got = gpu.download::<f32>(out.ptr(), n * heads * dv);
    // Two entries at a time, as when the made keys of all entries do not fit.
    let (entries, carry) = (tokens / PAGE_TOKENS, gpu.room(flash::carry_bytes(n, heads)));
    for first in (0..entries).step_by(2) {
        let part =
            Part { first, end: entries.min(first + 2), last: first + 2 >= entries, carry: carry.ptr() };
        let some = (part.end - first) * PAGE_TOKENS;
        let cut = |all: &[u16], width: usize| -> Vec<u16> {
            let from = |h: usize| (h * tokens + first * PAGE_TOKENS) * width;
            (0..heads).flat_map(|h| all[from(h)..from(h) + some * width].to_vec()).collect()
        };
        let (k, v) = (gpu.upload(&cut(&k_slots, nope)), gpu.upload(&cut(&v_slots, dv)));
        launch(k.ptr(), v.ptr(), some, (0, heads), part);
    }
    let in_parts = gpu.download::<f32>(out.ptr(), n * heads * dv);
    if mask == Mask::Full {
        assert!(in_parts == got, "parts of the table do not show");
    }
    let h = Heads { heads, kv_heads: heads, d, dv, latent: false };
    expect_rows(&h, mask, &positions, (&got, &q, &k, &v), scale, None);
    expect_rows(&h, mask, &positions, (&in_parts, &q, &k, &v), scale, None);
}

/// Every attention kernel once or twice: what compute-sanitizer has time for.
#[test]
fn attention_in_the_small() {
    let Some(gpu) = gpu() else { return };
    for kv in [KvType::F16, KvType::Int8, KvType::F32] {
        for h in [gqa(3, 3, 64), gqa(4, 2, 37), gqa(8, 1, 128), mla(3, 32, 8), mla(16, 512, 64)] {
            check_attend(&gpu, &h, kv, Mask::LocalStrided { window: 40, stride: 7 }, &[5, 150], true);
        }
    }
    for kv in [KvType::F16, KvType::Int8] {
        for h in [gqa(2, 1, 64), gqa(2, 1, 128), gqa(1, 1, 192), gqa(1, 1, 256)] {
            check_flash(&gpu, &h, kv, Mask::Sliding { window: 45 }, 60, 70, true);
        }
        check_made(&gpu, (3, 128, 64, 64, 128), kv, Mask::Strided { stride: 3 }, 50, 70);
    }
}

#[test]
fn latents_come_out_of_their_pages_and_halves_are_rounded() {
    let Some(gpu) = gpu() else { return };
    let (lora, rope) = (48, 16);
    for kv in [KvType::F16, KvType::Int8] {
        let mut cached = Cached::new(&gpu, mla_page(kv, lora, rope), Mask::Full, &[69], true);
        let rows = cached.fill(&gpu).remove(0).0;
        let out = gpu.room(3 * PAGE_TOKENS * lora * 4);
        super::mla::latents(&gpu, &cached.seen, 0..2, lora, rope, out.ptr()).unwrap();
        let last = out.ptr().f32s(2 * PAGE_TOKENS * lora);
        super::mla::latents(&gpu, &cached.seen, 2..3, lora, rope, last).unwrap();
        let got = gpu.download::<f32>(out.ptr(), 70 * lora);
        for (p, got) in got.chunks(lora).enumerate() {
            assert_eq!(got, &rows[p * (lora + rope)..][..lora]);
        }
    }
    let half = gpu.room(70 * lora * 2);
    let x = random(70 * lora, 9);
    let bx = gpu.upload(&x);
    super::mla::halves(&gpu, x.len(), bx.ptr(), half.ptr()).unwrap();
    let want: Vec<u16> = x.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    assert_eq!(gpu.download::<u16>(half.ptr(), x.len()), want);
}
