//! NEON with the dot product extension (ARMv8.2-A, as on Orin's Cortex-A78AE): four registers make 16 lanes.
//!
//! `sdot` by lane multiplies four codes of each of four rows with four activations that sit in one lane of a
//! register, so a group of 32 activations is two loads. Codes below 128 are the same signed or unsigned. The
//! intrinsic is not stable in Rust, hence the assembly.
//!
//! Instructions a weight, everything in the inner loop counted (`count.rs` compares them with the compiled program):
//!
//! | codec | one row | a row of many |
//! |---|---|---|
//! | q4_0 | 0.330 | 0.263 |
//! | q4_1 | 0.344 | 0.273 |
//! | q5_0 | 0.504 | 0.309 |
//! | q5_1 | 0.527 | 0.320 |
//! | q8_0 | 0.332 | 0.252 |
//! | q2_k | 0.594 | 0.422 |
//! | q3_k | 0.623 | 0.414 |
//! | q4_k | 0.436 | 0.299 |
//! | q5_k | 0.598 | 0.355 |
//! | q6_k | 0.641 | 0.401 |
//! | iq4_nl | 0.389 | 0.270 |
//! | iq4_xs | 0.406 | 0.290 |
//! | mxfp4 | 0.500 | 0.295 |

use super::entry::{entries, products};
use super::simd::{Simd, SimdDot, op};
use std::arch::aarch64::*;
use std::arch::asm;

entries!(NeonDot, "neon,dotprod");
products!(NeonDot, "neon,dotprod");

/// The instruction set.
#[derive(Clone, Copy)]
pub struct NeonDot;

/// Lanes of a register.
const W: usize = 4;

/// `acc[i] + Σ_b w[4i+b] * x[4*LANE+b]`.
macro_rules! sdot {
    ($acc:expr, $w:expr, $x:expr, $lane:literal) => {{
        let mut acc: int32x4_t = $acc;
        asm!(
            concat!("sdot {acc:v}.4s, {w:v}.16b, {x:v}.4b[", $lane, "]"),
            acc = inout(vreg) acc,
            w = in(vreg) $w,
            x = in(vreg) $x,
            options(pure, nomem, nostack, preserves_flags)
        );
        acc
    }};
}

/// Widens four halves. Rust's f16 intrinsics are not stable; `fcvtl` is part of the base instruction set.
#[inline(always)]
unsafe fn widen_f16(v: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    // SAFETY: a conversion between registers.
    unsafe {
        asm!(
            "fcvtl {out:v}.4s, {v:v}.4h",
            out = lateout(vreg) out,
            v = in(vreg) v,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// The first `n` of four values, the others 0.
#[inline(always)]
unsafe fn part<T: Copy + Default>(p: *const T, n: usize) -> [T; W] {
    let mut lanes = [T::default(); W];
    // SAFETY: the callers' contract.
    unsafe { std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n) };
    lanes
}

/// Four bytes as 16-bit lanes.
#[inline(always)]
unsafe fn four_u16(p: *const u8) -> uint16x4_t {
    // SAFETY: the callers' contract: four readable bytes.
    unsafe { vget_low_u16(vmovl_u8(vcreate_u8(u64::from(p.cast::<u32>().read_unaligned())))) }
}

impl Simd for NeonDot {
    const W: usize = W;
    type F = float32x4_t;
    type I = int32x4_t;
    op! {
        splat(v: f32) -> float32x4_t = vdupq_n_f32(v);
        load(p: *const f32) -> float32x4_t = vld1q_f32(p);
        load_part(p: *const f32, n: usize) -> float32x4_t = vld1q_f32(part(p, n).as_ptr());
        store(p: *mut f32, v: float32x4_t) = vst1q_f32(p, v);
        store_part(p: *mut f32, v: float32x4_t, n: usize) = {
            let mut lanes = [0f32; W];
            vst1q_f32(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n)
        };
        load_f16(p: *const u16) -> float32x4_t = widen_f16(vld1_u16(p));
        load_f16_part(p: *const u16, n: usize) -> float32x4_t = widen_f16(vld1_u16(part(p, n).as_ptr()));
        add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        sub(a: float32x4_t, b: float32x4_t) -> float32x4_t = vsubq_f32(a, b);
        mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        div(a: float32x4_t, b: float32x4_t) -> float32x4_t = vdivq_f32(a, b);
        fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        max(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcgtq_f32(a, b), a, b);
        min(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcltq_f32(a, b), a, b);
        sum16(v: &[float32x4_t; 4]) -> f32 = {
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
            vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
        };
        max16(v: &[float32x4_t; 4]) -> f32 =
            vmaxvq_f32(vmaxq_f32(vmaxq_f32(v[0], v[1]), vmaxq_f32(v[2], v[3])));
        sum16_i(v: &[int32x4_t; 4]) -> i32 =
            vaddvq_s32(vaddq_s32(vaddq_s32(v[0], v[1]), vaddq_s32(v[2], v[3])));
        split(a: int32x4_t) -> (int32x4_t, int32x4_t) = {
            let high = vshrq_n_s32::<5>(vaddq_s32(a, vdupq_n_s32(16)));
            (high, vsubq_s32(a, vshlq_n_s32::<5>(high)))
        };
        couple(a: int32x4_t, b: int32x4_t) -> [int32x4_t; 3] = {
            let first = vshrq_n_s32::<4>(vsubq_s32(b, vdupq_n_s32(112)));
            let h = vaddq_s32(first, vandq_s32(vsubq_s32(a, first), vdupq_n_s32(15)));
            [vshrq_n_s32::<4>(vsubq_s32(a, h)), h, vsubq_s32(b, vshlq_n_s32::<4>(h))]
        };
        store_bytes(p: *mut i8, v: int32x4_t) = {
            let v = vmovn_s32(v);
            let v = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(v, v)));
            p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(v))
        };
        splat_i(v: i32) -> int32x4_t = vdupq_n_s32(v);
        add_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vaddq_s32(a, b);
        sub_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vsubq_s32(a, b);
        half_i(a: int32x4_t) -> int32x4_t = vshrq_n_s32::<1>(a);
        to_exponent(a: int32x4_t) -> int32x4_t = vshlq_n_s32::<23>(a);
        bits(a: float32x4_t) -> int32x4_t = vreinterpretq_s32_f32(a);
        from_bits(a: int32x4_t) -> float32x4_t = vreinterpretq_f32_s32(a);
    }
}

impl SimdDot for NeonDot {
    type B = uint8x16_t;
    const SIGNED_BYTES: bool = true;
    const ROWS_Q8: usize = 4;
    const ROWS_F32: usize = 4;
    op! {
        load_b(p: *const u8) -> uint8x16_t = vld1q_u8(p);
        splat_b(v: u8) -> uint8x16_t = vdupq_n_u8(v);
        and_b(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t = vandq_u8(a, b);
        or_b(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t = vorrq_u8(a, b);
        xor_b(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t = veorq_u8(a, b);
        shr_b[N](a: uint8x16_t) -> uint8x16_t = vshlq_u8(a, vdupq_n_s8(-(N as i8)));
        shl_b[N](a: uint8x16_t) -> uint8x16_t = vshlq_u8(a, vdupq_n_s8(N as i8));
        lookup_b(table: &[u8; 16], index: uint8x16_t) -> uint8x16_t =
            vqtbl1q_u8(vld1q_u8(table.as_ptr()), index);
        dot4[BITS](acc: int32x4_t, w: [uint8x16_t; 4], x: *const i8) -> int32x4_t = {
            let x = vld1q_s8(x);
            let acc = sdot!(acc, w[0], x, 0);
            let acc = sdot!(acc, w[1], x, 1);
            let acc = sdot!(acc, w[2], x, 2);
            sdot!(acc, w[3], x, 3)
        };
        dot8[BITS](acc: int32x4_t, w: &[uint8x16_t; 8], x: *const i8) -> int32x4_t = {
            let acc = Self::dot4::<BITS>(acc, [w[0], w[1], w[2], w[3]], x);
            Self::dot4::<BITS>(acc, [w[4], w[5], w[6], w[7]], x.add(16))
        };
        byte_u[N](a: uint8x16_t) -> int32x4_t = {
            let moved = vshlq_u32(vreinterpretq_u32_u8(a), vdupq_n_s32(-8 * N as i32));
            vreinterpretq_s32_u32(vandq_u32(moved, vdupq_n_u32(255)))
        };
        byte_s[N](a: uint8x16_t) -> int32x4_t = {
            let moved = vshlq_s32(vreinterpretq_s32_u8(a), vdupq_n_s32(24 - 8 * N as i32));
            vshrq_n_s32::<24>(moved)
        };
        shl_i[N](a: int32x4_t) -> int32x4_t = vshlq_s32(a, vdupq_n_s32(N as i32));
        low_nibble_i(a: int32x4_t) -> int32x4_t = vandq_s32(a, vdupq_n_s32(15));
        high_nibble_i(a: int32x4_t) -> int32x4_t = vshrq_n_s32::<4>(a);
        to_f(a: int32x4_t) -> float32x4_t = vcvtq_f32_s32(a);
        load_u8(p: *const u8) -> int32x4_t = vreinterpretq_s32_u32(vmovl_u16(four_u16(p)));
        load_i8(p: *const u8) -> int32x4_t = {
            let v = vmovl_s8(vcreate_s8(u64::from(p.cast::<u32>().read_unaligned())));
            vmovl_s16(vget_low_s16(v))
        };
        load_bf16(p: *const u16) -> float32x4_t = vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)));
        load_f8(p: *const u8) -> float32x4_t = {
            // Exponent and mantissa moved into those of a half, whose bias is 8 more; halves take subnormals too.
            // The arithmetic shift doubles the sign, and the mask takes the copy off.
            let v = vshl_n_u16::<8>(four_u16(p));
            let half = vreinterpret_u16_s16(vshr_n_s16::<1>(vreinterpret_s16_u16(v)));
            let half = vand_u16(half, vdup_n_u16(0xbfff));
            let nan = vceq_u16(vshl_n_u16::<1>(v), vdup_n_u16(0xfe00));
            // All ones is a NaN.
            vmulq_f32(widen_f16(vorr_u16(half, nan)), vdupq_n_f32(256.0))
        };
        load_e8m0_half(p: *const u8) -> float32x4_t = {
            let e = Self::load_u8(p);
            let normal = vshlq_n_s32::<23>(vsubq_s32(e, vdupq_n_s32(1)));
            let tiny = vshlq_s32(vdupq_n_s32(0x0020_0000), e);
            let is_tiny = vcltq_s32(e, vdupq_n_s32(2));
            vreinterpretq_f32_s32(vbslq_s32(is_tiny, tiny, normal))
        };
        prefetch(p: *const u8) = asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }
}
