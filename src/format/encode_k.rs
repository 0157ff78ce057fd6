//! f32 rows to K-quant super-blocks: Q4_K, Q5_K, Q6_K.
//!
//! A super-block's groups are fitted one by one; their scales are then rounded to the codes the format has, and each is
//! chosen again among its neighbours for the least error, because a scale rounded alone is seldom the best one left.

use super::block::{self, Group};
use super::codec::Codec;
use super::encode::codes;
use super::fit::{self, to_f16};
use super::layout::{GROUP, SUPER};
use half::f16;

/// Groups in a super-block.
const GROUPS: usize = SUPER / GROUP;
/// Largest 6-bit scale or min code.
const CODE_MAX: f32 = 63.0;

/// Encodes one row of whole super-blocks.
pub(super) fn row(codec: Codec, values: &[f32], out: &mut [u8]) {
    out.fill(0);
    let blocks = out.chunks_exact_mut(codec.info().block_bytes);
    for (x, b) in values.as_chunks::<SUPER>().0.iter().zip(blocks) {
        let groups = match codec {
            Codec::Q4K => affine(x, 15.0),
            Codec::Q5K => affine(x, 31.0),
            _ => q6k(x),
        };
        for (g, group) in groups.iter().enumerate() {
            block::write(codec, b, g, group);
        }
    }
}

/// Error weights of a group: large values matter more, but none nothing.
pub(super) fn weights<const N: usize>(x: &[f32; N]) -> [f32; N] {
    let rms = (fit::sum::<N>(|i| x[i] * x[i]) / N as f32).sqrt();
    x.map(|v| rms + v.abs())
}

/// One group's choice: scale and min codes, and the codes for them.
#[derive(Clone, Copy)]
struct Choice {
    sc: f32,
    mn: f32,
    q: [f32; GROUP],
}

/// `d*sc*q - dmin*mn`: Q4_K, Q5_K.
fn affine(x: &[f32; SUPER], hi: f32) -> [Group; GROUPS] {
    let x: &[[f32; GROUP]; GROUPS] = x.as_chunks().0.try_into().expect("a super-block");
    let w = x.map(|x| weights(&x));
    let fits: [(f32, f32); GROUPS] =
        std::array::from_fn(|g| fit::scale_min(&x[g], &w[g], hi, true, -10..=10));
    let largest = |f: fn(&(f32, f32)) -> f32| fits.iter().map(f).fold(0.0f32, f32::max);
    let (mut d, mut dmin) = (to_f16(largest(|f| f.0) / CODE_MAX), to_f16(largest(|f| -f.1) / CODE_MAX));
    let code =
        |v: f32, unit: f32| if unit == 0.0 { 0.0 } else { fit::round((v / unit).clamp(0.0, CODE_MAX)) };
    let around = |d: f32, dmin: f32, sc: &dyn Fn(usize) -> f32, mn: &dyn Fn(usize) -> f32| {
        let mut total = 0.0;
        let choices: [Choice; GROUPS] = std::array::from_fn(|g| {
            let (choice, e) = neighbours(&x[g], &w[g], hi, (d, dmin), (sc(g), mn(g)));
            total += e;
            choice
        });
        (choices, total)
    };
    let (mut best, mut least) = around(d, dmin, &|g| code(fits[g].0, d), &|g| code(-fits[g].1, dmin));
    for _ in 0..2 {
        // The best d and dmin for these codes, and then the best codes for them.
        let (d2, dmin2) = super_scales(x, &w, &best, d, dmin);
        let (next, e) = around(d2, dmin2, &|g| best[g].sc, &|g| best[g].mn);
        if e >= least {
            break;
        }
        (best, least, d, dmin) = (next, e, d2, dmin2);
    }
    best.map(|c| Group {
        codes: codes(&c.q, 0.0),
        d: f16::from_f32(d).to_bits(),
        m: f16::from_f32(dmin).to_bits(),
        sc: [c.sc as u8; 2],
        mn: c.mn as u8,
    })
}

/// The best scale and min codes within one of `(sc, mn)`, with their error.
fn neighbours(
    x: &[f32; GROUP],
    w: &[f32; GROUP],
    hi: f32,
    (d, dmin): (f32, f32),
    (sc, mn): (f32, f32),
) -> (Choice, f32) {
    let mut best = Choice { sc: 0.0, mn: 0.0, q: [0.0; GROUP] };
    let mut least = f32::INFINITY;
    for mn in [mn, mn - 1.0, mn + 1.0] {
        for sc in [sc, sc - 1.0, sc + 1.0] {
            if !(0.0..=CODE_MAX).contains(&sc) || !(0.0..=CODE_MAX).contains(&mn) {
                continue;
            }
            let (step, min) = (d * sc, -(dmin * mn));
            let q = if step == 0.0 { [0.0; GROUP] } else { fit::pick(x, step, min, 0.0, hi) };
            let e = fit::error(x, w, &q, step, min);
            if e < least {
                (best, least) = (Choice { sc, mn, q }, e);
            }
        }
    }
    (best, least)
}

/// Least-squares `d` and `dmin` for given codes, rounded to f16; the old ones where the equations do not decide.
fn super_scales(
    x: &[[f32; GROUP]; GROUPS],
    w: &[[f32; GROUP]; GROUPS],
    choices: &[Choice; GROUPS],
    d: f32,
    dmin: f32,
) -> (f32, f32) {
    // x = d*a - dmin*b with a = sc*q, b = mn. f64: the determinant is a difference of large sums.
    let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for ((x, w), c) in x.iter().zip(w).zip(choices) {
        let sum = |f: &dyn Fn(usize) -> f32| fit::sum::<GROUP>(|i| w[i] * f(i)) as f64;
        let (sc, mn) = (c.sc as f64, c.mn as f64);
        let q = sum(&|i| c.q[i]);
        aa += sc * sc * sum(&|i| c.q[i] * c.q[i]);
        ab += sc * mn * q;
        bb += mn * mn * sum(&|_| 1.0);
        xa += sc * sum(&|i| x[i] * c.q[i]);
        xb += mn * sum(&|i| x[i]);
    }
    let det = aa * bb - ab * ab;
    let (new_d, new_dmin) = if det > 1e-6 * aa * bb {
        ((xa * bb - xb * ab) / det, (xa * ab - xb * aa) / det)
    } else if aa > 0.0 && bb == 0.0 {
        (xa / aa, 0.0)
    } else {
        return (d, dmin);
    };
    let (new_d, new_dmin) = (to_f16(new_d as f32), to_f16(new_dmin as f32));
    // The format's scales and mins have no sign; a step to one means that these equations are a bad guide.
    if new_d > 0.0 && new_d.is_finite() && new_dmin >= 0.0 && new_dmin.is_finite() {
        (new_d, new_dmin)
    } else {
        (d, dmin)
    }
}

/// `d*sc*(q - 32)` with a signed 8-bit scale for 16 columns: Q6_K.
fn q6k(x: &[f32; SUPER]) -> [Group; GROUPS] {
    const HALF: usize = GROUP / 2;
    const HALVES: usize = SUPER / HALF;
    let x: &[[f32; HALF]; HALVES] = x.as_chunks().0.try_into().expect("a super-block");
    let w = x.map(|x| x.map(|v| v * v));
    let fits: [f32; HALVES] = std::array::from_fn(|h| fit::scale(&x[h], &w[h], -32.0, 31.0, |d| d));
    // The scale of largest magnitude gets the code -128, the end that reaches further.
    let extreme = fits.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let d = to_f16(extreme / -128.0);
    let mut groups = [Group { d: f16::from_f32(d).to_bits(), ..Group::default() }; GROUPS];
    for h in 0..HALVES {
        let (sc, q) = q6k_half(&x[h], &w[h], d, fits[h]);
        let group = &mut groups[h / 2];
        group.sc[h % 2] = sc as i8 as u8;
        for (code, q) in group.codes[h % 2 * HALF..][..HALF].iter_mut().zip(q) {
            *code = (q + 32.0) as u8;
        }
    }
    groups
}

/// The best scale code within one of `scale / d`, and its codes.
fn q6k_half(x: &[f32; 16], w: &[f32; 16], d: f32, scale: f32) -> (f32, [f32; 16]) {
    let mut best = (0.0, [0.0; 16]);
    if d == 0.0 {
        return best;
    }
    let mut least = fit::error(x, w, &best.1, 0.0, 0.0);
    let near = fit::round((scale / d).clamp(-128.0, 127.0));
    for sc in [near, near - 1.0, near + 1.0] {
        if sc == 0.0 || !(-128.0..=127.0).contains(&sc) {
            continue;
        }
        let q = fit::pick(x, d * sc, 0.0, -32.0, 31.0);
        let e = fit::error(x, w, &q, d * sc, 0.0);
        if e < least {
            (best, least) = ((sc, q), e);
        }
    }
    best
}
