//! The quantized product over tiles, for any codec and instruction set.
//!
//! A pass holds `R` activation rows' 16 sums each in registers and goes once along a tile. With one row (decode) it is bound
//! by memory; with more, a (tile, group) is unpacked once for all `R`. Either way an output sees the same operations.
//!
//! Between the two, from 2 to some 16 rows, arithmetic takes about as long as reading, and both should go on at once: every
//! pass fetches codes ahead of it, and where a tile takes several passes the first fetches the next tile, so that the later
//! ones, which find this one in the cache, do not leave memory idle. Scales are a tenth of the bytes, in streams that the
//! processor's own prefetcher follows, but for Q4_0's: measured on Zen 4 with a read roof of 60 GB/s for two threads, each on a
//! die of its own, fetching them too takes its one-row product from 83 to 92% of the roof; for the other codecs it changed
//! nothing, or cost up to 5%. How far ahead hardly matters from 2 to 6 KiB, but for Q6_K, which is at 86% with 2.5 KiB and at 80%
//! with 4.
//!
//! Bytes a weight: those of the codec (4.5 bits for Q4_0). Instructions a weight: `instructions.md`, and the heads of
//! `avx2.rs`, `avx512.rs` and `neon.rs`. With AVX-512 a (tile, group) of 512 weights takes 47 instructions for one row of
//! Q4_0 and 20 for a row of eight; 12 of them are the dot products, 1 multiplies in f32: with 512-bit units that take one a
//! cycle of all of these, that is the floor of many rows.

use super::Product;
use super::codecs::{At, Codec8, Mins, PlanePtrs};
use super::simd::{LANES, SimdDot};
use super::vector::{Apart, Q8Group};
use crate::format::layout::{GROUP, SUPER, TILE_ROWS};

/// Bytes of activations that a sweep over the tiles keeps in the second-level cache.
const SWEEP_BYTES: usize = 384 << 10;
/// How far ahead of the codes in use the next ones are fetched where nothing else is known to be better.
pub const PREFETCH_BYTES: usize = 4096;

/// The product; see [`Product`].
///
/// # Safety
/// `p.w` is of codec `C`; the instruction set is available.
#[inline(always)]
pub unsafe fn matmul<S: SimdDot, C: Codec8>(p: &Product<'_, Q8Group>) {
    let planes = PlanePtrs::of(p.w);
    // What passes with several rows read of a group: the coupled line, its other form, or where halves need it both.
    let group_bytes = match (S::COUPLED, C::HALVES) {
        (true, false) => size_of::<Q8Group>() - size_of::<Apart>(),
        (true, true) => size_of::<Q8Group>(),
        (false, _) => size_of::<Apart>(),
    };
    let row_bytes = p.per_row * group_bytes;
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
    let next_tile = (p.per_row * C::CODE_BYTES).max(C::AHEAD_BYTES);
    // The first of several passes fetches the next tile; the others what they need themselves, from the cache behind.
    let ahead = |i, rows| if i == start && i + rows < end { next_tile } else { C::AHEAD_BYTES };
    // SAFETY: each pass has as many rows as are left.
    unsafe {
        if S::ROWS_Q8 >= 8 {
            while i + 8 <= end {
                pass::<S, C, 8>(p, planes, t, i, ahead(i, 8));
                i += 8;
            }
        }
        while i + 4 <= end {
            pass::<S, C, 4>(p, planes, t, i, ahead(i, 4));
            i += 4;
        }
        if i + 3 == end {
            return pass::<S, C, 3>(p, planes, t, i, ahead(i, 3));
        }
        if i + 2 <= end {
            pass::<S, C, 2>(p, planes, t, i, ahead(i, 2));
            i += 2;
        }
        if i < end {
            pass::<S, C, 1>(p, planes, t, i, ahead(i, 1));
        }
    }
}

/// Passes of one kind over the tiles, with nothing around them: what `count.rs` counts instructions in.
///
/// # Safety
/// As [`matmul`]; there are as many activation rows as a pass takes: one, or `ROWS_Q8`.
#[cfg(test)]
#[inline(always)]
pub unsafe fn passes<S: SimdDot, C: Codec8, const MANY: bool>(p: &Product<'_, Q8Group>) {
    let planes = PlanePtrs::of(p.w);
    for t in p.tiles.clone() {
        // SAFETY: by the contract.
        unsafe {
            match (MANY, S::ROWS_Q8) {
                (false, _) => pass::<S, C, 1>(p, &planes, t, 0, C::AHEAD_BYTES),
                (true, 8) => pass::<S, C, 8>(p, &planes, t, 0, C::AHEAD_BYTES),
                (true, 4) => pass::<S, C, 4>(p, &planes, t, 0, C::AHEAD_BYTES),
                (true, _) => unreachable!("no such pass"),
            }
        }
    }
}

/// Rows `i..i+R` with tile `t`; codes `ahead` bytes ahead are fetched, and scales as far.
///
/// # Safety
/// As [`matmul`]; the rows exist.
#[inline(always)]
unsafe fn pass<S: SimdDot, C: Codec8, const R: usize>(
    p: &Product<'_, Q8Group>,
    planes: &PlanePtrs,
    t: usize,
    i: usize,
    ahead: usize,
) {
    let x: [*const Q8Group; R] = std::array::from_fn(|n| p.row(i + n).as_ptr());
    // SAFETY: every group of the row and of the tile exists; a prefetch may be anywhere.
    unsafe {
        let (mut acc, mut shared) = ([[S::splat(0.0); 4]; R], [[S::splat(0.0); 2]; 4]);
        // A super-block at a time if the codec has them: what its groups share is loaded once.
        let (groups, super_groups) = (p.w.cols / GROUP, SUPER / GROUP);
        let mut first = 0;
        while first < groups {
            let last = if C::SUPERS { first + super_groups } else { groups };
            for s in 0..S::SUBS {
                shared[s] = C::shared::<S>(planes, At::new(t, first, p.w.cols, s * S::W));
            }
            for g in first..last {
                fetch::<S, C>(planes, t * p.per_row + g, ahead);
                // Written out, here and over rows below: a loop that is not unrolled indexes the sums, which then live in memory.
                let at = |s: usize| At::new(t, g, p.w.cols, s * S::W);
                group::<S, C, R>(planes, at(0), &shared[0], &x, g, 0, &mut acc);
                if S::SUBS > 1 {
                    group::<S, C, R>(planes, at(1), &shared[1], &x, g, 1, &mut acc);
                }
                if S::SUBS > 2 {
                    group::<S, C, R>(planes, at(2), &shared[2], &x, g, 2, &mut acc);
                    group::<S, C, R>(planes, at(3), &shared[3], &x, g, 3, &mut acc);
                }
            }
            first = last;
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

/// Starts to fetch the codes, and scales if the codec asks for it, `ahead` bytes of codes after (tile, group) number `at`.
///
/// # Safety
/// The instruction set is available. A prefetch may be anywhere.
#[inline(always)]
unsafe fn fetch<S: SimdDot, C: Codec8>(planes: &PlanePtrs, at: usize, ahead: usize) {
    // SAFETY: by the contract.
    unsafe {
        for line in (0..C::CODE_BYTES).step_by(64) {
            S::prefetch(planes.codes().wrapping_add(at * C::CODE_BYTES + ahead + line));
        }
        if C::FETCH_SCALES {
            let group = at + ahead / C::CODE_BYTES;
            S::prefetch(planes.scales().wrapping_add(group * TILE_ROWS * size_of::<u16>()));
        }
    }
}

/// A group of `W` weight rows, unpacked.
struct Group<S: SimdDot> {
    codes: [S::B; 8],
    /// The bytes that hold two codes each, where they are multiplied as they are.
    raw: [S::B; 4],
    scale: S::F,
    half_scales: [S::F; 2],
    mins: [S::F; 2],
}

/// One group of `W` weight rows against `R` activation rows.
///
/// # Safety
/// `at` is inside the matrix and `shared` its super-block's; the instruction set is available.
#[inline(always)]
unsafe fn group<S: SimdDot, C: Codec8, const R: usize>(
    planes: &PlanePtrs,
    at: At,
    shared: &[S::F; 2],
    x: &[*const Q8Group; R],
    g: usize,
    s: usize,
    acc: &mut [[S::F; 4]; R],
) {
    // SAFETY: by the contract.
    unsafe {
        let (raw, codes) = if C::NIBBLES && S::COUPLED {
            C::coupled::<S>(planes, at)
        } else {
            let codes = C::unpack::<S>(planes, at);
            ([codes[0]; 4], codes)
        };
        let scale = C::scale::<S>(planes, at, shared);
        let (mut half_scales, mut mins) = ([scale; 2], [S::splat(0.0); 2]);
        if C::HALVES {
            for half in 0..2 {
                half_scales[half] = S::mul(scale, S::to_f(C::half_scale::<S>(planes, at, half)));
            }
        }
        match C::MINS {
            Mins::None => {}
            Mins::Group => mins[0] = C::min::<S>(planes, at, 0, shared),
            Mins::Half => mins = [C::min::<S>(planes, at, 0, shared), C::min::<S>(planes, at, 1, shared)],
        }
        let w = Group { codes, raw, scale, half_scales, mins };
        row::<S, C, R>(&w, x, g, s, acc, 0);
        if R > 1 {
            row::<S, C, R>(&w, x, g, s, acc, 1);
        }
        if R > 2 {
            row::<S, C, R>(&w, x, g, s, acc, 2);
        }
        if R > 3 {
            row::<S, C, R>(&w, x, g, s, acc, 3);
        }
        if R > 4 {
            row::<S, C, R>(&w, x, g, s, acc, 4);
            row::<S, C, R>(&w, x, g, s, acc, 5);
            row::<S, C, R>(&w, x, g, s, acc, 6);
            row::<S, C, R>(&w, x, g, s, acc, 7);
        }
    }
}

/// The unpacked group against activation row `n < R`.
///
/// # Safety
/// As [`group`].
#[inline(always)]
unsafe fn row<S: SimdDot, C: Codec8, const R: usize>(
    w: &Group<S>,
    x: &[*const Q8Group; R],
    g: usize,
    s: usize,
    acc: &mut [[S::F; 4]; R],
    n: usize,
) {
    // SAFETY: by the contract.
    unsafe {
        let x = &*x[n].add(g);
        let mut sum = acc[n][s];
        if C::HALVES {
            sum = add_dot::<S>(sum, w.half_scales[0], dot_half::<S, C, R>(&w.codes, 0, x), x);
            sum = add_dot::<S>(sum, w.half_scales[1], dot_half::<S, C, R>(&w.codes, 1, x), x);
        } else {
            let dot = if C::NIBBLES && S::COUPLED && R == 1 {
                Dot::Whole(S::dot_coupled_once(minus_offset::<S, C>(x), &w.raw, x))
            } else if C::NIBBLES && S::COUPLED {
                Dot::Whole(S::dot_coupled(minus_offset::<S, C>(x), &w.raw, &w.codes, x))
            } else {
                dot_group::<S, C>(&w.codes, x)
            };
            sum = add_dot::<S>(sum, w.scale, dot, x);
        }
        match C::MINS {
            Mins::None => {}
            Mins::Group => {
                let sum_d = if S::COUPLED { x.sum_d } else { x.apart.sum_d };
                sum = S::fma(w.mins[0], S::splat(sum_d), sum);
            }
            Mins::Half => {
                sum = S::fma(w.mins[0], half_d::<S, R>(x, 0), sum);
                sum = S::fma(w.mins[1], half_d::<S, R>(x, 1), sum);
            }
        }
        acc[n][s] = sum;
    }
}

/// `dx` times the sum of half a group's codes: exact.
///
/// # Safety
/// The instruction set is available; `half < 2`.
#[inline(always)]
unsafe fn half_d<S: SimdDot, const R: usize>(x: &Q8Group, half: usize) -> S::F {
    // SAFETY: by the contract.
    unsafe {
        if halves_coupled::<S, R>() {
            let start = S::splat(x.start);
            S::sub(S::from_bits(S::add_halves(S::bits(start), x, only(half, -1))), start)
        } else {
            S::splat(x.apart.half_d[half])
        }
    }
}

/// True if a pass with `R` rows multiplies half groups by coupled codes. Many rows share what a tile's codes cost to unpack, and
/// what counts is then how often each row's codes are loaded: twice the coupled ones in the middle, which are for both halves.
const fn halves_coupled<S: SimdDot, const R: usize>() -> bool {
    S::COUPLED && R == 1
}

/// `by` for one half of a group and 0 for the other.
const fn only(half: usize, by: i16) -> [i16; 2] {
    if half == 0 { [by, 0] } else { [0, by] }
}

/// `sum + scale * dx * dot`, rounded once.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn add_dot<S: SimdDot>(sum: S::F, scale: S::F, dot: Dot<S>, x: &Q8Group) -> S::F {
    // SAFETY: by the contract.
    unsafe {
        match dot {
            // `scale * dx` is exact.
            Dot::Whole(dot) if !S::STARTS => S::fma(S::mul(scale, S::splat(x.apart.d)), S::to_f(dot), sum),
            Dot::Whole(dot) => S::fma(scale, times_d::<S>(dot, x), sum),
            // A code of 8 bits takes 24 in all: exact too.
            Dot::Parts(high, low) => {
                let dot = S::fma(times_d::<S>(high, x), S::splat(16.0), times_d::<S>(low, x));
                S::fma(scale, dot, sum)
            }
        }
    }
}

/// `dx` times an integer that started at `Q8Group::start`: exact.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn times_d<S: SimdDot>(dot: S::I, x: &Q8Group) -> S::F {
    // SAFETY: by the contract.
    unsafe { S::sub(S::from_bits(dot), S::splat(x.start)) }
}

/// An integer dot product of a group or half of one. With [`SimdDot::STARTS`] it started at `Q8Group::start`, for which it must
/// stay below 2^22: `32 * 2^5 * 1904`, or half as many of twice that.
enum Dot<S: SimdDot> {
    /// In one.
    Whole(S::I),
    /// `16 * .0 + .1`: of codes of 8 bits, which would not stay below.
    Parts(S::I, S::I),
}

/// What an integer dot starts with: `Q8Group::start` or 0.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn from_start<S: SimdDot>(x: &Q8Group) -> S::I {
    const { assert!(S::STARTS == S::COUPLED, "what they start at lies with the coupled codes") }
    // SAFETY: by the contract.
    unsafe { if S::STARTS { S::bits(S::splat(x.start)) } else { S::splat_i(0) } }
}

/// The same for a group, and `-sum * offset`, which takes a codec's offset off.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn minus_offset<S: SimdDot, C: Codec8>(x: &Q8Group) -> S::I {
    // SAFETY: by the contract.
    unsafe {
        // Log2 of the offset. Codes of 8 bits that are not signed are 128 more: of their high parts, worth 16, take off 8.
        let offset = if C::BITS == 8 && !S::SIGNED_BYTES { 3 } else { C::OFFSET };
        let sum_8 = S::splat_i(if S::COUPLED { x.neg_sum_8 } else { x.apart.neg_sum_8 });
        let minus = match offset {
            0 => return from_start::<S>(x),
            3 => sum_8,
            4 => S::shl_i::<1>(sum_8),
            _ => unreachable!("an offset that no codec with one scale a group has"),
        };
        if S::STARTS { S::add_i(from_start::<S>(x), minus) } else { minus }
    }
}

/// The same for half a group, of a pass with `R` rows: what the sums of the codes' high parts, which are shifted, and of their
/// low parts start with.
///
/// # Safety
/// The instruction set is available; `half < 2`.
#[inline(always)]
unsafe fn minus_half_offset<S: SimdDot, C: Codec8, const R: usize>(half: usize, x: &Q8Group) -> (S::I, S::I) {
    // SAFETY: by the contract.
    unsafe {
        let (none, start) = (S::splat_i(0), from_start::<S>(x));
        match C::OFFSET {
            0 => (none, start),
            _ if halves_coupled::<S, R>() => (none, S::add_halves(start, x, only(half, 1 << C::OFFSET))),
            2 => (none, S::add_i(start, S::shl_i::<2>(S::splat_i(x.apart.neg_half[half])))),
            5 => (S::splat_i(x.apart.neg_half[half]), start),
            _ => unreachable!("an offset that no codec with two scales a group has"),
        }
    }
}

/// The integer dot of a group.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn dot_group<S: SimdDot, C: Codec8>(w: &[S::B; 8], x: &Q8Group) -> Dot<S> {
    // SAFETY: 32 codes each; by the contract.
    unsafe {
        let init = minus_offset::<S, C>(x);
        if S::COUPLED {
            // An offset of 128 is one of 8 to the high parts; the low ones would not stay below with it.
            let (up, init) = if C::BITS == 8 { (init, from_start::<S>(x)) } else { (S::splat_i(0), init) };
            let (first, last) = ([w[0], w[1], w[2], w[3]], [w[4], w[5], w[6], w[7]]);
            let (up, init) = dot_of_half::<S, C, true>(up, init, first, 0, x);
            let (up, init) = dot_of_half::<S, C, true>(up, init, last, 1, x);
            if C::BITS == 8 {
                return Dot::Parts(up, init);
            }
            return Dot::Whole(S::add_i(S::shl_i::<4>(up), init));
        }
        let (up, high, low) = (S::splat_i(0), x.apart.high.as_ptr(), x.apart.low.as_ptr());
        let (high, low) = match C::BITS {
            0..=4 => (S::dot8::<4>(up, w, high), S::dot8::<4>(init, w, low)),
            5 => (S::dot8::<5>(up, w, high), S::dot8::<5>(init, w, low)),
            6 => (S::dot8::<6>(up, w, high), S::dot8::<6>(init, w, low)),
            _ => (S::dot8::<8>(up, w, high), S::dot8::<8>(init, w, low)),
        };
        Dot::Whole(S::add_i(S::shl_i::<5>(high), low))
    }
}

/// The integer dot of half a group, of a pass with `R` rows.
///
/// # Safety
/// The instruction set is available; `half < 2`.
#[inline(always)]
unsafe fn dot_half<S: SimdDot, C: Codec8, const R: usize>(w: &[S::B; 8], half: usize, x: &Q8Group) -> Dot<S> {
    let w = [w[4 * half], w[4 * half + 1], w[4 * half + 2], w[4 * half + 3]];
    // SAFETY: by the contract.
    unsafe {
        let (up, init) = minus_half_offset::<S, C, R>(half, x);
        if halves_coupled::<S, R>() {
            let (high, low) = dot_of_half::<S, C, true>(up, init, w, half, x);
            return Dot::Whole(S::add_i(S::shl_i::<4>(high), low));
        }
        let (high, low) = dot_of_half::<S, C, false>(up, init, w, half, x);
        Dot::Whole(S::add_i(S::shl_i::<5>(high), low))
    }
}

/// Codes of half a group times the activations' high parts, added to `up`, and times their low parts, added to `init`. Coupled
/// ones' are 16 times `k` and `h` of the first half, 16 times `h` and `m` of the second.
///
/// # Safety
/// The instruction set is available and has what is `COUPLED`, if they are; `half < 2`.
#[inline(always)]
unsafe fn dot_of_half<S: SimdDot, C: Codec8, const COUPLED: bool>(
    up: S::I,
    init: S::I,
    w: [S::B; 4],
    half: usize,
    x: &Q8Group,
) -> (S::I, S::I) {
    // SAFETY: 16 codes each, from 16*half on; by the contract.
    unsafe {
        let (high, low) = match (COUPLED, half) {
            (true, 0) => (x.k.as_ptr(), x.h.as_ptr()),
            (true, _) => (x.h.as_ptr(), x.m.as_ptr()),
            (false, _) => (x.apart.high.as_ptr().add(16 * half), x.apart.low.as_ptr().add(16 * half)),
        };
        match C::BITS {
            0..=4 => (S::dot4::<4>(up, w, high), S::dot4::<4>(init, w, low)),
            5 => (S::dot4::<5>(up, w, high), S::dot4::<5>(init, w, low)),
            6 => (S::dot4::<6>(up, w, high), S::dot4::<6>(init, w, low)),
            _ => (S::dot4::<8>(up, w, high), S::dot4::<8>(init, w, low)),
        }
    }
}
