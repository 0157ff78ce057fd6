//! Weighted least-squares searches for the scale (and min) of a small group: what makes an encoder good.
//!
//! All searches try a fixed list of starting scales, round the values to codes, solve for the scale that fits these codes
//! best, and keep the best of all. The methods are those ggml's quantizers made common (`make_qx_quants`,
//! `make_qkx2_quants`). Sums run in eight lanes in a fixed order, so that the result is the same on every machine.

use half::f16;

/// Values below this (half of the smallest f16 subnormal) decode to zero in every codec; squares of anything above stay
/// normal in f32.
pub const TINY: f32 = 2.98e-8;

/// Rounds to the nearest f16, as an f32.
pub fn to_f16(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// Rounds to nearest even; only for `|x| < 2^22`. Adding and taking away 1.5 * 2^23 vectorizes where `round` is a call.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

/// `x` held to `lo..=hi`, as two instructions.
#[inline(always)]
fn hold(x: f32, lo: f32, hi: f32) -> f32 {
    let x = if x < hi { x } else { hi };
    if x > lo { x } else { lo }
}

/// Sums `f(0..N)` in eight lanes. `N` is a multiple of 8.
#[inline(always)]
pub fn sum<const N: usize>(f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; 8];
    for i in 0..N / 8 {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += f(8 * i + l);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (b + f)) + ((c + g) + (d + h))
}

/// The largest magnitude.
pub fn max_abs(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m, v| if v.abs() > m { v.abs() } else { m })
}

/// Codes (whole numbers in `lo..=hi`) of `x` on the grid `d*q + m`. `d` is not 0.
#[inline(always)]
pub fn pick<const N: usize>(x: &[f32; N], d: f32, m: f32, lo: f32, hi: f32) -> [f32; N] {
    let inverse = 1.0 / d;
    std::array::from_fn(|i| round(hold((x[i] - m) * inverse, lo, hi)))
}

/// The weighted squared error of `d*q + m`.
#[inline(always)]
pub fn error<const N: usize>(x: &[f32; N], w: &[f32; N], q: &[f32; N], d: f32, m: f32) -> f32 {
    sum::<N>(|i| {
        let e = d * q[i] + m - x[i];
        w[i] * e * e
    })
}

/// The scale of a grid `d*q`, `q` in `lo..=hi` with `lo = -hi - 1`: the best of 19 starts after rounding it by `rounded`
/// (f16, or nothing). 0 where all of `x` is.
pub fn scale<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    lo: f32,
    hi: f32,
    rounded: impl Fn(f32) -> f32,
) -> f32 {
    let extreme = x.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    if extreme.abs() < TINY {
        return 0.0;
    }
    let (mut best, mut least) = (0.0, f32::INFINITY);
    for step in -9..=9 {
        // The value of largest magnitude goes near `lo`, the end of the grid that reaches further.
        let q = pick(x, extreme / (lo - 0.1 * step as f32), 0.0, lo, hi);
        let (xq, qq) = (sum::<N>(|i| w[i] * x[i] * q[i]), sum::<N>(|i| w[i] * q[i] * q[i]));
        let d = rounded(xq / qq);
        if d == 0.0 {
            continue;
        }
        // The codes that will be written are those of the rounded scale.
        let e = error(x, w, &pick(x, d, 0.0, lo, hi), d, 0.0);
        if e < least {
            (best, least) = (d, e);
        }
    }
    best
}

/// Scale and min of a grid `d*q + m`, `q` in `0..=hi`; with `min_max_zero` the min is at most 0, as K-quants need. The
/// scale is 0 where all of `x` is alike.
pub fn scale_min<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    hi: f32,
    min_max_zero: bool,
    steps: std::ops::RangeInclusive<i32>,
) -> (f32, f32) {
    let mut low = x.iter().fold(f32::INFINITY, |m, &v| if v < m { v } else { m });
    let high = x.iter().fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
    if min_max_zero && low > 0.0 {
        low = 0.0;
    }
    if high - low < TINY {
        return (0.0, low);
    }
    let (sw, sx) = (sum::<N>(|i| w[i]), sum::<N>(|i| w[i] * x[i]));
    let start = (high - low) / hi;
    let (mut best, mut least) = ((start, low), error(x, w, &pick(x, start, low, 0.0, hi), start, low));
    for step in steps {
        let q = pick(x, (high - low) / (hi + 0.1 * step as f32), low, 0.0, hi);
        let sq = sum::<N>(|i| w[i] * q[i]);
        let sqq = sum::<N>(|i| w[i] * q[i] * q[i]);
        let sxq = sum::<N>(|i| w[i] * x[i] * q[i]);
        let det = sw * sqq - sq * sq;
        if det <= 0.0 || sqq <= 0.0 {
            continue; // all codes alike
        }
        let (mut d, mut m) = ((sw * sxq - sx * sq) / det, (sqq * sx - sq * sxq) / det);
        if min_max_zero && m > 0.0 {
            (d, m) = (sxq / sqq, 0.0);
        }
        if d <= 0.0 {
            continue;
        }
        let e = error(x, w, &pick(x, d, m, 0.0, hi), d, m);
        if e < least {
            (best, least) = ((d, m), e);
        }
    }
    best
}
