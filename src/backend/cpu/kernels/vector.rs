//! Kernels over vectors: norms, SiLU, exp and softmax's pieces, adds, and the quantization of activations. Cheap beside
//! the products; written for equal bits first. About 20 operations for an exp of W lanes, 1-3 for the rest.

use super::simd::{LANES, Simd};
use crate::format::layout::GROUP;

/// A group of 32 quantized activations: everything that a product needs, so that a kernel needs one pointer a row. A code
/// of -1904..=1904 is held twice, each time in bytes that byte dot products take:
///
/// - columns `c` and `c + 16` coupled: `code(c) = h + 16*k` and `code(c + 16) = 16*h + m`. Weight codes of 4 bits that share a
///   byte `w(c) + 16*w(c + 16)` give both columns' products with `h` at once, so three dot products serve two columns.
///   `h` is the one value of sixteen in a row that leaves `m` in an i8 and that equals `code(c)` modulo 16; 1904 is the
///   largest code for which it always fits an i8 itself;
/// - [`Apart`], for instruction sets whose byte products take no such pairs or overflow with them.
///
/// What goes with the coupled codes fits their cache line, and an instruction set that multiplies by them writes and reads
/// no other for one row: weights that stream by keep pushing activations out of the first-level cache, and with a second line
/// of them a product of Q6_K ran at 79% of the read roof of a Zen 4 where it runs at 88% with one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C, align(64))]
pub struct Q8Group {
    /// `(code(c) - h) / 16` for c < 16: -126..=126.
    pub k: [i8; LANES],
    /// What the columns c and c + 16 share: -126..=127.
    pub h: [i8; LANES],
    /// `code(c + 16) - 16*h`: -128..=127.
    pub m: [i8; LANES],
    /// `1.5 * 2^23 * dx` ([`Q8Group::d`]), whose last bit is worth `dx`: an integer below 2^22 that is added to the bits and
    /// then the float subtracted is that integer times `dx`, exactly.
    pub start: f32,
    /// Minus eight times the sum of all codes: shifted to a weight codec's offset it takes that offset off.
    pub neg_sum_8: i32,
    /// `dx` times the sum of all codes: what a weight codec's min is multiplied by.
    pub sum_d: f32,
    /// Minus the sums of the codes of columns 0..16 and 16..32: times a weight codec's offset they take that offset off.
    pub neg_half: [i16; 2],
    /// For instruction sets that are not [`Simd::COUPLED`], and for several rows; undefined for one row with one that is.
    pub apart: Apart,
}

/// A group's codes in two parts, `32*high + low`: two dot products a weight, for weight codes of any width. What goes with
/// them is here once more, so that the coupled line is not read too.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C, align(64))]
pub struct Apart {
    /// Codes rounded to multiples of 32, divided by 32, in the order of the columns: -59..=60.
    pub high: [i8; GROUP],
    /// What is left of the codes: -16..=15.
    pub low: [i8; GROUP],
    /// [`Q8Group::d`].
    pub d: f32,
    /// [`Q8Group::sum_d`].
    pub sum_d: f32,
    /// [`Q8Group::neg_sum_8`].
    pub neg_sum_8: i32,
    /// [`Q8Group::neg_half`].
    pub neg_half: [i32; 2],
    /// `sum_d` of the same.
    pub half_d: [f32; 2],
}

impl Q8Group {
    /// The code of column `c`.
    pub fn code(&self, c: usize) -> i32 {
        let [k, h, m] = [&self.k, &self.h, &self.m].map(|part| i32::from(part[c % LANES]));
        if c < LANES { h + 16 * k } else { 16 * h + m }
    }

    /// `dx`: the value of code 1, a power of two; 0 for a group of zeros, NaN for one that is not finite.
    pub fn d(&self) -> f32 {
        self.start / MAGIC // exact
    }

    /// A group of zeros, or of NaNs: `float` is 0 or NaN.
    fn fill(&mut self, float: f32, apart: bool) {
        (self.k, self.h, self.m, self.neg_half) = ([0; LANES], [0; LANES], [0; LANES], [0; 2]);
        (self.start, self.neg_sum_8, self.sum_d) = (float, 0, float);
        if apart {
            self.apart = Apart { d: float, sum_d: float, half_d: [float; 2], ..Apart::default() };
        }
    }
}

/// Groups whose largest magnitude is below this (2^-80) become zero, and from the other (2^100) on they are as infinite:
/// `d` times a weight's scale, 2^-24..=2^24, must stay a normal number, so that it does not matter what is multiplied first.
const AMAX_TINY: f32 = f32::from_bits((127 - 80) << 23);
const AMAX_HUGE: f32 = f32::from_bits((127 + 100) << 23);
/// 1.5 * 2^23: adding it rounds half to even and leaves the rounded integer in the low bits.
const MAGIC: f32 = 12_582_912.0;
/// The largest code; see [`Q8Group`].
pub const CODE_MAX: f32 = 1904.0;

/// Biased exponent of the smallest power of two of which `amax` is no more than 1904.
fn power_for(amax: f32) -> i32 {
    /// 1904 is 2^10 times a mantissa of these bits: a larger mantissa carries over into the exponent.
    const CARRY: u32 = (1 << 23) - (CODE_MAX.to_bits() & 0x7f_ffff) - 1;
    ((amax.to_bits() + CARRY) >> 23) as i32 - 10
}

/// Calls `f(offset, lanes)` for every register's worth of `0..n`; `lanes` is `W` except in the last.
#[inline(always)]
fn steps<S: Simd>(n: usize, mut f: impl FnMut(usize, usize)) {
    let mut i = 0;
    while i < n {
        f(i, S::W.min(n - i));
        i += S::W;
    }
}

/// Loads `lanes <= W` values, the missing ones 0.
///
/// # Safety
/// `p` is valid for `lanes` reads and the instruction set is available.
#[inline(always)]
pub unsafe fn load<S: Simd>(p: *const f32, lanes: usize) -> S::F {
    // SAFETY: by the contract.
    unsafe { if lanes == S::W { S::load(p) } else { S::load_part(p, lanes) } }
}

/// Stores `lanes <= W` values.
///
/// # Safety
/// `p` is valid for `lanes` writes and the instruction set is available.
#[inline(always)]
pub unsafe fn store<S: Simd>(p: *mut f32, v: S::F, lanes: usize) {
    // SAFETY: by the contract.
    unsafe { if lanes == S::W { S::store(p, v) } else { S::store_part(p, v, lanes) } }
}

/// `e^x` within 2 ulp; 0 below about -103.97, infinity above about 88.72, NaN for NaN.
///
/// `x = n ln 2 + r` with ln 2 in two parts, a polynomial of degree 7 for `e^r`, and two multiplications by powers of two
/// so that subnormal results round once.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 6] =
        [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // SAFETY: by the contract.
    unsafe {
        // The clamps keep n in range; x is the second operand so that NaN comes through.
        let x = S::max(S::splat(-105.0), S::min(S::splat(89.0), x));
        let magic = S::splat(MAGIC);
        let shifted = S::fma(x, S::splat(std::f32::consts::LOG2_E), magic);
        let n = S::sub(shifted, magic);
        let r = S::fma(n, S::splat(-LN2_HI), x);
        let r = S::fma(n, S::splat(-LN2_LO), r);
        let mut p = S::splat(COEFFICIENTS[0]);
        for c in &COEFFICIENTS[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        let n = S::sub_i(S::bits(shifted), S::bits(magic));
        let (n1, bias) = (S::half_i(n), S::splat_i(127));
        let n2 = S::sub_i(n, n1);
        let p = S::mul(p, S::from_bits(S::to_exponent(S::add_i(n1, bias))));
        S::mul(p, S::from_bits(S::to_exponent(S::add_i(n2, bias))))
    }
}

/// `1 / (1 + e^-x)`.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn sigmoid_lanes<S: Simd>(x: S::F) -> S::F {
    // SAFETY: by the contract.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, exp::<S>(S::sub(S::splat(-0.0), x))))
    }
}

/// `x[i] = 1 / (1 + e^-x[i])`.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub unsafe fn sigmoid<S: Simd>(x: &mut [f32]) {
    let p = x.as_mut_ptr();
    // SAFETY: the steps stay inside x.
    steps::<S>(x.len(), |i, n| unsafe {
        store::<S>(p.add(i), sigmoid_lanes::<S>(load::<S>(p.add(i), n)), n);
    });
}

/// `out[i] = gate[i] * sigmoid(gate[i]) * up[i]`.
///
/// # Safety
/// Equal lengths; the instruction set is available.
#[inline(always)]
pub unsafe fn silu_mul<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (g, u, o) = (gate.as_ptr(), up.as_ptr(), out.as_mut_ptr());
    // SAFETY: the steps stay inside the three slices.
    steps::<S>(out.len(), |i, n| unsafe {
        let x = load::<S>(g.add(i), n);
        let y = S::mul(S::mul(x, sigmoid_lanes::<S>(x)), load::<S>(u.add(i), n));
        store::<S>(o.add(i), y, n);
    });
}

/// `y[i] = fma(a, x[i], y[i])`.
///
/// # Safety
/// Equal lengths; the instruction set is available.
#[inline(always)]
pub unsafe fn axpy<S: Simd>(a: f32, x: &[f32], y: &mut [f32]) {
    let (x, p) = (x.as_ptr(), y.as_mut_ptr());
    // SAFETY: the steps stay inside both slices.
    steps::<S>(y.len(), |i, n| unsafe {
        let v = S::fma(S::splat(a), load::<S>(x.add(i), n), load::<S>(p.add(i), n));
        store::<S>(p.add(i), v, n);
    });
}

/// `x[i] *= a`.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub unsafe fn scale<S: Simd>(a: f32, x: &mut [f32]) {
    let p = x.as_mut_ptr();
    // SAFETY: the steps stay inside x.
    steps::<S>(x.len(), |i, n| unsafe {
        store::<S>(p.add(i), S::mul(S::splat(a), load::<S>(p.add(i), n)), n);
    });
}

/// `out[i] = x[i]`, widened.
///
/// # Safety
/// Equal lengths; the instruction set is available.
#[inline(always)]
pub unsafe fn from_f16<S: Simd>(x: &[crate::format::f16], out: &mut [f32]) {
    let (x, o) = (x.as_ptr().cast::<u16>(), out.as_mut_ptr());
    // SAFETY: the steps stay inside both slices; f16 is a transparent u16.
    steps::<S>(out.len(), |i, n| unsafe {
        let v = if n == S::W { S::load_f16(x.add(i)) } else { S::load_f16_part(x.add(i), n) };
        store::<S>(o.add(i), v, n);
    });
}

/// `y[i] += x[i]`.
///
/// # Safety
/// Equal lengths; the instruction set is available.
#[inline(always)]
pub unsafe fn add<S: Simd>(x: &[f32], y: &mut [f32]) {
    let (x, p) = (x.as_ptr(), y.as_mut_ptr());
    // SAFETY: the steps stay inside both slices.
    steps::<S>(y.len(), |i, n| unsafe {
        store::<S>(p.add(i), S::add(load::<S>(p.add(i), n), load::<S>(x.add(i), n)), n);
    });
}

/// `out[i] = (x[i] / sqrt(mean(x^2) + eps)) * weight[i]`, the division as a product with the reciprocal.
///
/// # Safety
/// Equal lengths; the instruction set is available.
#[inline(always)]
pub unsafe fn rms_norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: equal lengths, by the contract.
    unsafe { norm_to::<S>(x.as_ptr(), weight, eps, out.as_mut_ptr()) };
}

/// [`rms_norm`] with `x` as its own output.
///
/// # Safety
/// Equal lengths; the instruction set is available.
#[inline(always)]
pub unsafe fn rms_norm_in_place<S: Simd>(x: &mut [f32], weight: &[f32], eps: f32) {
    let p = x.as_mut_ptr();
    // SAFETY: equal lengths, by the contract; each element is read before it is written.
    unsafe { norm_to::<S>(p, weight, eps, p) };
}

/// Both norms.
///
/// # Safety
/// `x` is valid for `weight.len()` reads and `out`, which may be the same, for as many writes; the instruction set is
/// available.
#[inline(always)]
unsafe fn norm_to<S: Simd>(x: *const f32, weight: &[f32], eps: f32, out: *mut f32) {
    let (w, len) = (weight.as_ptr(), weight.len());
    // SAFETY: the steps stay inside the three.
    unsafe {
        // Loops, and not `steps`: its closures are not inlined here, and run without the instruction set's features.
        let mut sums = [S::splat(0.0); 4];
        for i in (0..len).step_by(S::W) {
            let v = load::<S>(x.add(i), S::W.min(len - i));
            let sum = &mut sums[i / S::W % S::SUBS];
            *sum = S::fma(v, v, *sum);
        }
        let inverse = S::splat(1.0 / (S::sum16(&sums) / len as f32 + eps).sqrt());
        for i in (0..len).step_by(S::W) {
            let n = S::W.min(len - i);
            let v = S::mul(S::mul(load::<S>(x.add(i), n), inverse), load::<S>(w.add(i), n));
            store::<S>(out.add(i), v, n);
        }
    }
}

/// The largest of `x`; -infinity for none.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub unsafe fn max<S: Simd>(x: &[f32]) -> f32 {
    let whole = x.len() / S::W * S::W;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    // SAFETY: whole registers inside x; LANES >= W.
    unsafe {
        let mut v = S::load(lanes.as_ptr());
        for i in (0..whole).step_by(S::W) {
            v = S::max(S::load(x.as_ptr().add(i)), v);
        }
        S::store(lanes.as_mut_ptr(), v);
    }
    lanes.iter().chain(&x[whole..]).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
}

/// `x[i] = e^(x[i] - max)`; returns their sum.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
pub unsafe fn exp_sum<S: Simd>(x: &mut [f32], max: f32) -> f32 {
    let p = x.as_mut_ptr();
    // SAFETY: the steps stay inside x; a missing lane is stored to no memory and adds nothing because it is read
    // back as 0.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        steps::<S>(x.len(), |i, n| {
            let v = exp::<S>(S::sub(load::<S>(p.add(i), n), S::splat(max)));
            store::<S>(p.add(i), v, n);
            let sum = &mut sums[i / S::W % S::SUBS];
            *sum = S::add(*sum, load::<S>(p.add(i), n));
        });
        S::sum16(&sums)
    }
}

/// Quantizes one row of whole groups; `apart` asks for [`Q8Group::apart`] too, where one row would do without.
///
/// # Safety
/// `x.len() == 32 * out.len()`; the instruction set is available.
#[inline(always)]
pub unsafe fn quantize<S: Simd>(x: &[f32], out: &mut [Q8Group], apart: bool) {
    let apart = apart || !S::COUPLED;
    for (x, out) in x.chunks_exact(GROUP).zip(out) {
        // SAFETY: x is one whole group.
        unsafe { quantize_group::<S>(x.as_ptr(), out, apart) };
    }
}

/// # Safety
/// `x` is valid for 32 reads; the instruction set is available.
#[inline(always)]
unsafe fn quantize_group<S: Simd>(x: *const f32, out: &mut Q8Group, apart: bool) {
    // SAFETY: 32 readable values and 32 codes.
    unsafe {
        // Times zero, an infinity or a NaN becomes NaN and stays it through the sum.
        let (mut largest, mut zeros) = ([S::splat(0.0); 4], [S::splat(0.0); 4]);
        for k in 0..GROUP / S::W {
            let (v, s) = (S::load(x.add(k * S::W)), k % S::SUBS);
            largest[s] = S::max(S::max(v, S::sub(S::splat(-0.0), v)), largest[s]);
            zeros[s] = S::fma(v, S::splat(0.0), zeros[s]);
        }
        let amax = S::max16(&largest);
        if S::sum16(&zeros).is_nan() || amax >= AMAX_HUGE {
            return out.fill(f32::NAN, apart);
        }
        if amax < AMAX_TINY {
            return out.fill(0.0, apart);
        }
        let power = power_for(amax);
        let (to_code, magic) = (S::splat(f32::from_bits(((254 - power) as u32) << 23)), S::splat(MAGIC));
        let mut codes = [[S::splat_i(0); 4]; 2];
        for s in 0..S::SUBS {
            for half in 0..2 {
                let at = half * LANES + s * S::W;
                // Exact, and at most 1904.
                let shifted = S::add(S::mul(S::load(x.add(at)), to_code), magic);
                codes[half][s] = S::sub_i(S::bits(shifted), S::bits(magic));
                if apart {
                    let (high, low) = S::split(codes[half][s]);
                    S::store_bytes(out.apart.high.as_mut_ptr().add(at), high);
                    S::store_bytes(out.apart.low.as_mut_ptr().add(at), low);
                }
            }
            let [k, h, m] = S::couple(codes[0][s], codes[1][s]);
            S::store_bytes(out.k.as_mut_ptr().add(s * S::W), k);
            S::store_bytes(out.h.as_mut_ptr().add(s * S::W), h);
            S::store_bytes(out.m.as_mut_ptr().add(s * S::W), m);
        }
        let halves = [S::sum16_i(&codes[0]), S::sum16_i(&codes[1])];
        let d = f32::from_bits((power as u32) << 23);
        out.start = MAGIC * d;
        out.neg_sum_8 = -8 * (halves[0] + halves[1]);
        out.sum_d = d * (halves[0] + halves[1]) as f32;
        // Sixteen codes of at most 1904: 30464.
        out.neg_half = [-halves[0] as i16, -halves[1] as i16];
        if apart {
            (out.apart.d, out.apart.sum_d, out.apart.neg_sum_8) = (d, out.sum_d, out.neg_sum_8);
            out.apart.neg_half = [-halves[0], -halves[1]];
            out.apart.half_d = [d * halves[0] as f32, d * halves[1] as f32];
        }
    }
}
