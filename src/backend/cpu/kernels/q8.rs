//! The quantized product over tiles, for any codec and instruction set.
//!
//! A pass holds `R` activation rows' 16 sums each in registers and goes once along a tile. With one row (decode) it is bound
//! by memory; with more, a (tile, group) is unpacked once for all `R`. Either way an output sees the same operations.
//!
//! Bytes a weight: those of the codec (4.5 bits for Q4_0). AVX-512 instructions a (tile, group) of 512 weights, counted in
//! the compiled loops:
//!
//! | codec | one row | a row of eight | | codec | one row | a row of eight |
//! |---|---|---|---|---|---|---|
//! | Q4_0, Q4_1 | 50, 52 | 29 | | Q4_K | 65 | 31 |
//! | Q5_0, Q5_1 | 66, 68 | 30 | | Q5_K | 81 | 33 |
//! | Q8_0 | 47 | 27 | | Q2_K | 73 | 39 |
//! | IQ4_NL, IQ4_XS, MXFP4 | 58, 67, 63 | 30, 32, 30 | | Q3_K, Q6_K | 80-83 | 43-45 |
//!
//! Sixteen of them are the dot products: with 512-bit units that take one a cycle, that is the floor of many rows.

use super::Product;
use super::codecs::{At, Codec8, Mins, PlanePtrs};
use super::simd::{LANES, SimdDot};
use super::vector::Q8Group;
use crate::format::layout::GROUP;

/// Bytes of activations that a sweep over the tiles keeps in the second-level cache.
const SWEEP_BYTES: usize = 384 << 10;
/// How far ahead of the codes in use the next ones are fetched, when a pass has few rows.
pub const PREFETCH_BYTES: usize = 4096;

/// The product; see [`Product`].
///
/// # Safety
/// `p.w` is of codec `C`; the instruction set is available.
#[inline(always)]
pub unsafe fn matmul<S: SimdDot, C: Codec8>(p: &Product<'_, Q8Group>) {
    let planes = PlanePtrs::of(p.w);
    let row_bytes = p.per_row * size_of::<Q8Group>();
    let sweep = (SWEEP_BYTES / row_bytes.max(1)).max(S::ROWS_Q8) / S::ROWS_Q8 * S::ROWS_Q8;
    let n = p.rows.len();
    for start in (0..n).step_by(sweep) {
        let end = n.min(start + sweep);
        for t in p.tiles.clone() {
            // SAFETY: rows start..end exist.
            unsafe { tile::<S, C>(p, &planes, t, start, end) };
        }
    }
}

/// Rows `start..end` of the activations with tile `t`.
///
/// # Safety
/// As [`matmul`]; the rows exist.
#[inline(always)]
unsafe fn tile<S: SimdDot, C: Codec8>(
    p: &Product<'_, Q8Group>,
    planes: &PlanePtrs,
    t: usize,
    start: usize,
    end: usize,
) {
    let mut i = start;
    // SAFETY: each pass has as many rows as are left.
    unsafe {
        if S::ROWS_Q8 >= 8 {
            while i + 8 <= end {
                pass::<S, C, 8>(p, planes, t, i);
                i += 8;
            }
        }
        while i + 4 <= end {
            pass::<S, C, 4>(p, planes, t, i);
            i += 4;
        }
        if i + 2 <= end {
            pass::<S, C, 2>(p, planes, t, i);
            i += 2;
        }
        if i < end {
            pass::<S, C, 1>(p, planes, t, i);
        }
    }
}

/// Rows `i..i+R` with tile `t`.
///
/// # Safety
/// As [`matmul`]; the rows exist.
#[inline(always)]
unsafe fn pass<S: SimdDot, C: Codec8, const R: usize>(
    p: &Product<'_, Q8Group>,
    planes: &PlanePtrs,
    t: usize,
    i: usize,
) {
    let x: [*const Q8Group; R] = std::array::from_fn(|n| p.row(i + n).as_ptr());
    // SAFETY: every group of the row and of the tile exists; a prefetch may be anywhere.
    unsafe {
        let mut acc = [[S::splat(0.0); 4]; R];
        for g in 0..p.w.cols / GROUP {
            if R <= 4 {
                let ahead = (t * p.per_row + g) * C::CODE_BYTES + PREFETCH_BYTES;
                for line in (0..C::CODE_BYTES).step_by(64) {
                    S::prefetch(planes.codes().wrapping_add(ahead + line));
                }
            }
            for s in 0..S::SUBS {
                let at = At::new(t, g, p.w.cols, s * S::W);
                group::<S, C, R>(planes, at, &x, g, s, &mut acc);
            }
        }
        let mut out = [[0f32; LANES]; R];
        for n in 0..R {
            for s in 0..S::SUBS {
                S::store(out[n].as_mut_ptr().add(s * S::W), acc[n][s]);
            }
        }
        for n in 0..R {
            p.write(i + n, t, &out[n]);
        }
    }
}

/// A group of `W` weight rows, unpacked.
struct Group<S: SimdDot> {
    codes: [S::B; 8],
    scale: S::F,
    half_scales: [S::I; 2],
    mins: [S::F; 2],
}

/// One group of `W` weight rows against `R` activation rows.
///
/// # Safety
/// `at` is inside the matrix; the instruction set is available.
#[inline(always)]
unsafe fn group<S: SimdDot, C: Codec8, const R: usize>(
    planes: &PlanePtrs,
    at: At,
    x: &[*const Q8Group; R],
    g: usize,
    s: usize,
    acc: &mut [[S::F; 4]; R],
) {
    // SAFETY: by the contract.
    unsafe {
        let codes = C::unpack::<S>(planes, at);
        let scale = C::scale::<S>(planes, at);
        let (mut half_scales, mut mins) = ([S::splat_i(0); 2], [S::splat(0.0); 2]);
        if C::HALVES {
            half_scales = [C::half_scale::<S>(planes, at, 0), C::half_scale::<S>(planes, at, 1)];
        }
        match C::MINS {
            Mins::None => {}
            Mins::Group => mins[0] = C::min::<S>(planes, at, 0),
            Mins::Half => mins = [C::min::<S>(planes, at, 0), C::min::<S>(planes, at, 1)],
        }
        let w = Group { codes, scale, half_scales, mins };
        // In fours, because a longer loop is not unrolled, and then the sums live in memory.
        rows::<S, C, R, 0>(&w, x, g, s, acc);
        if R > 4 {
            rows::<S, C, R, 4>(&w, x, g, s, acc);
        }
    }
}

/// The unpacked group against up to four activation rows from `FROM` on.
///
/// # Safety
/// As [`group`].
#[inline(always)]
unsafe fn rows<S: SimdDot, C: Codec8, const R: usize, const FROM: usize>(
    w: &Group<S>,
    x: &[*const Q8Group; R],
    g: usize,
    s: usize,
    acc: &mut [[S::F; 4]; R],
) {
    // SAFETY: by the contract.
    unsafe {
        for n in FROM..R.min(FROM + 4) {
            let x = &*x[n].add(g);
            let idot = if C::HALVES {
                let low = S::mul_i(dot_half::<S, C>(&w.codes, 0, x), w.half_scales[0]);
                let high = S::mul_i(dot_half::<S, C>(&w.codes, 1, x), w.half_scales[1]);
                S::add_i(low, high)
            } else {
                dot_group::<S, C>(&w.codes, x)
            };
            let mut sum = S::fma(S::mul(w.scale, S::splat(x.d)), S::to_f(idot), acc[n][s]);
            match C::MINS {
                Mins::None => {}
                Mins::Group => sum = S::fma(w.mins[0], S::splat(x.sum_d), sum),
                Mins::Half => {
                    sum = S::fma(w.mins[0], S::splat(x.half_d[0]), sum);
                    sum = S::fma(w.mins[1], S::splat(x.half_d[1]), sum);
                }
            }
            acc[n][s] = sum;
        }
    }
}

/// `-sum * offset`: what takes a codec's offset off an integer dot that starts with it.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn minus_offset<S: SimdDot, C: Codec8>(neg_sum: i32) -> S::I {
    // SAFETY: by the contract.
    unsafe {
        match (C::BITS, C::OFFSET) {
            (8, _) if S::SIGNED_BYTES => S::splat_i(0),
            (8, _) => S::shl_i::<7>(S::splat_i(neg_sum)),
            (_, 0) => S::splat_i(0),
            (_, 2) => S::shl_i::<2>(S::splat_i(neg_sum)),
            (_, 3) => S::shl_i::<3>(S::splat_i(neg_sum)),
            (_, 4) => S::shl_i::<4>(S::splat_i(neg_sum)),
            (_, 5) => S::shl_i::<5>(S::splat_i(neg_sum)),
            _ => unreachable!("an offset that no codec has"),
        }
    }
}

/// The integer dot of a group: the codes' high parts times 64, and their low parts.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn dot_group<S: SimdDot, C: Codec8>(w: &[S::B; 8], x: &Q8Group) -> S::I {
    // SAFETY: 32 codes each; by the contract.
    unsafe {
        let (zero, init) = (S::splat_i(0), minus_offset::<S, C>(x.neg_sum));
        let (high, low) = (x.high.as_ptr(), x.low.as_ptr());
        let (high, low) = match C::BITS {
            0..=4 => (S::dot8::<4>(zero, w, high), S::dot8::<4>(init, w, low)),
            5 => (S::dot8::<5>(zero, w, high), S::dot8::<5>(init, w, low)),
            6 => (S::dot8::<6>(zero, w, high), S::dot8::<6>(init, w, low)),
            _ => (S::dot8::<8>(zero, w, high), S::dot8::<8>(init, w, low)),
        };
        S::add_i(S::shl_i::<6>(high), low)
    }
}

/// The integer dot of a half group.
///
/// # Safety
/// The instruction set is available; `half < 2`.
#[inline(always)]
unsafe fn dot_half<S: SimdDot, C: Codec8>(w: &[S::B; 8], half: usize, x: &Q8Group) -> S::I {
    let w = [w[4 * half], w[4 * half + 1], w[4 * half + 2], w[4 * half + 3]];
    // SAFETY: 16 codes from 16*half on; by the contract.
    unsafe {
        let (zero, init) = (S::splat_i(0), minus_offset::<S, C>(x.neg_half[half]));
        let (high, low) = (x.high.as_ptr().add(16 * half), x.low.as_ptr().add(16 * half));
        let (high, low) = match C::BITS {
            0..=4 => (S::dot4::<4>(zero, w, high), S::dot4::<4>(init, w, low)),
            5 => (S::dot4::<5>(zero, w, high), S::dot4::<5>(init, w, low)),
            6 => (S::dot4::<6>(zero, w, high), S::dot4::<6>(init, w, low)),
            _ => (S::dot4::<8>(zero, w, high), S::dot4::<8>(init, w, low)),
        };
        S::add_i(S::shl_i::<6>(high), low)
    }
}
