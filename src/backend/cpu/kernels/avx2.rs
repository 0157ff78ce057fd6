//! AVX2, FMA and F16C: two registers make 16 lanes.
//!
//! `vpmaddubsw` multiplies unsigned codes with signed activations and adds pairs into 16 bits, saturating at 32767. A
//! pair of products of codes below `2^b` is at most `2 * (2^b - 1) * 127`, so as many chunks are added in 16 bits as
//! stay below: 8 of 4 bits, 4 of 5 bits, 2 of 6 bits; then `vpmaddwd` with ones widens. 8-bit codes are signed:
//! `|w| * (x * sign w)`, one at a time.
//!
//! Instructions a weight, everything in the inner loop counted (`count.rs` compares them with the compiled program):
//!
//! | codec | one row | a row of many |
//! |---|---|---|
//! | q4_0 | 0.312 | 0.250 |
//! | q4_1 | 0.309 | 0.264 |
//! | q5_0 | 0.418 | 0.305 |
//! | q5_1 | 0.412 | 0.317 |
//! | q8_0 | 0.488 | 0.460 |
//! | q2_k | 0.416 | 0.311 |
//! | q3_k | 0.459 | 0.329 |
//! | q4_k | 0.326 | 0.258 |
//! | q5_k | 0.434 | 0.300 |
//! | q6_k | 0.477 | 0.335 |
//! | iq4_nl | 0.557 | 0.479 |
//! | iq4_xs | 0.572 | 0.482 |
//! | mxfp4 | 0.639 | 0.498 |
//!
//! callgrind, with all that surrounds the loop (tools/callgrind-kernels): Q4_0 0.317 with one row.

use super::entry::{entries, products};
use super::simd::{Simd, SimdDot, op};
use std::arch::x86_64::*;

entries!(Avx2, "avx2,fma,f16c");
products!(Avx2, "avx2,fma,f16c");

/// The instruction set.
#[derive(Clone, Copy)]
pub struct Avx2;

/// Lanes of a register.
const W: usize = 8;

/// A mask of the first `n < 8` lanes.
#[inline(always)]
unsafe fn first(n: usize) -> __m256i {
    // SAFETY: the callers have the instruction set.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// Four activation codes to every lane.
#[inline(always)]
unsafe fn four(x: *const i8, c: usize) -> __m256i {
    // SAFETY: the callers' contract.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().add(c).read_unaligned()) }
}

/// Pair sums in 16 bits of one register of unsigned codes.
#[inline(always)]
unsafe fn pairs(w: __m256i, x: *const i8, c: usize) -> __m256i {
    // SAFETY: the callers' contract.
    unsafe { _mm256_maddubs_epi16(w, four(x, c)) }
}

/// The same of signed codes.
#[inline(always)]
unsafe fn signed_pairs(w: __m256i, x: *const i8, c: usize) -> __m256i {
    // SAFETY: the callers' contract.
    unsafe { _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four(x, c), w)) }
}

/// Adds pairs of 16 bits into `acc`.
#[inline(always)]
unsafe fn widen(acc: __m256i, pairs: __m256i) -> __m256i {
    // SAFETY: the callers have the instruction set.
    unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))) }
}

impl Simd for Avx2 {
    const W: usize = W;
    const REGISTERS: usize = 16;
    type F = __m256;
    type I = __m256i;
    op! {
        splat(v: f32) -> __m256 = _mm256_set1_ps(v);
        load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        load_part(p: *const f32, n: usize) -> __m256 = _mm256_maskload_ps(p, first(n));
        store(p: *mut f32, v: __m256) = _mm256_storeu_ps(p, v);
        store_part(p: *mut f32, v: __m256, n: usize) = _mm256_maskstore_ps(p, first(n), v);
        load_f16(p: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        load_f16_part(p: *const u16, n: usize) -> __m256 = {
            let mut lanes = [0u16; W];
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            Self::load_f16(lanes.as_ptr())
        };
        add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        sum16(v: &[__m256; 4]) -> f32 = {
            let v = _mm256_add_ps(v[0], v[1]);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        };
        max16(v: &[__m256; 4]) -> f32 = {
            let v = _mm256_max_ps(v[0], v[1]);
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        };
        sum16_i(v: &[__m256i; 4]) -> i32 = {
            let v = _mm256_add_epi32(v[0], v[1]);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
            _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)))
        };
        split(a: __m256i) -> (__m256i, __m256i) = {
            let high = _mm256_srai_epi32(_mm256_add_epi32(a, _mm256_set1_epi32(16)), 5);
            (high, _mm256_sub_epi32(a, _mm256_slli_epi32(high, 5)))
        };
        couple(a: __m256i, b: __m256i) -> [__m256i; 3] = {
            let first = _mm256_srai_epi32(_mm256_sub_epi32(b, _mm256_set1_epi32(112)), 4);
            let more = _mm256_and_si256(_mm256_sub_epi32(a, first), _mm256_set1_epi32(15));
            let h = _mm256_add_epi32(first, more);
            let k = _mm256_srai_epi32(_mm256_sub_epi32(a, h), 4);
            [k, h, _mm256_sub_epi32(b, _mm256_slli_epi32(h, 4))]
        };
        store_bytes(p: *mut i8, v: __m256i) = {
            let low = _mm_set1_epi32(0x0c08_0400);
            let first = _mm_shuffle_epi8(_mm256_castsi256_si128(v), low);
            let last = _mm_shuffle_epi8(_mm256_extracti128_si256(v, 1), low);
            _mm_storel_epi64(p.cast(), _mm_unpacklo_epi32(first, last))
        };
        splat_i(v: i32) -> __m256i = _mm256_set1_epi32(v);
        add_i(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        sub_i(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi32(a, b);
        half_i(a: __m256i) -> __m256i = _mm256_srai_epi32(a, 1);
        to_exponent(a: __m256i) -> __m256i = _mm256_slli_epi32(a, 23);
        bits(a: __m256) -> __m256i = _mm256_castps_si256(a);
        from_bits(a: __m256i) -> __m256 = _mm256_castsi256_ps(a);
    }
}

impl SimdDot for Avx2 {
    type B = __m256i;
    const SIGNED_BYTES: bool = true;
    const ROWS_Q8: usize = 4;
    const ROWS_F32: usize = 2;
    op! {
        load_b(p: *const u8) -> __m256i = _mm256_loadu_si256(p.cast());
        splat_b(v: u8) -> __m256i = _mm256_set1_epi8(v as i8);
        and_b(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        or_b(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        xor_b(a: __m256i, b: __m256i) -> __m256i = _mm256_xor_si256(a, b);
        shr_b[N](a: __m256i) -> __m256i = _mm256_srl_epi32(a, _mm_cvtsi32_si128(N as i32));
        shl_b[N](a: __m256i) -> __m256i = _mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32));
        lookup_b(table: &[u8; 16], index: __m256i) -> __m256i = {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, index)
        };
        dot4[BITS](acc: __m256i, w: [__m256i; 4], x: *const i8) -> __m256i = {
            if BITS == 8 {
                let acc = widen(acc, signed_pairs(w[0], x, 0));
                let acc = widen(acc, signed_pairs(w[1], x, 1));
                let acc = widen(acc, signed_pairs(w[2], x, 2));
                widen(acc, signed_pairs(w[3], x, 3))
            } else {
                let low = _mm256_add_epi16(pairs(w[0], x, 0), pairs(w[1], x, 1));
                let high = _mm256_add_epi16(pairs(w[2], x, 2), pairs(w[3], x, 3));
                if BITS == 6 {
                    widen(widen(acc, low), high)
                } else {
                    widen(acc, _mm256_add_epi16(low, high))
                }
            }
        };
        dot8[BITS](acc: __m256i, w: &[__m256i; 8], x: *const i8) -> __m256i = {
            if BITS == 4 {
                let a = _mm256_add_epi16(pairs(w[0], x, 0), pairs(w[1], x, 1));
                let b = _mm256_add_epi16(pairs(w[2], x, 2), pairs(w[3], x, 3));
                let c = _mm256_add_epi16(pairs(w[4], x, 4), pairs(w[5], x, 5));
                let d = _mm256_add_epi16(pairs(w[6], x, 6), pairs(w[7], x, 7));
                widen(acc, _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d)))
            } else {
                let acc = Self::dot4::<BITS>(acc, [w[0], w[1], w[2], w[3]], x);
                Self::dot4::<BITS>(acc, [w[4], w[5], w[6], w[7]], x.add(16))
            }
        };
        byte_u[N](a: __m256i) -> __m256i = {
            let moved = _mm256_srl_epi32(a, _mm_cvtsi32_si128(8 * N as i32));
            _mm256_and_si256(moved, _mm256_set1_epi32(255))
        };
        byte_s[N](a: __m256i) -> __m256i =
            _mm256_srai_epi32(_mm256_sll_epi32(a, _mm_cvtsi32_si128(24 - 8 * N as i32)), 24);
        shl_i[N](a: __m256i) -> __m256i = _mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32));
        low_nibble_i(a: __m256i) -> __m256i = _mm256_and_si256(a, _mm256_set1_epi32(15));
        high_nibble_i(a: __m256i) -> __m256i = _mm256_srli_epi32(a, 4);
        to_f(a: __m256i) -> __m256 = _mm256_cvtepi32_ps(a);
        load_u8(p: *const u8) -> __m256i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        load_i8(p: *const u8) -> __m256i = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
        load_bf16(p: *const u16) -> __m256 = {
            let v = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32(v, 16))
        };
        load_f8(p: *const u8) -> __m256 = {
            // Exponent and mantissa moved into those of a half, whose bias is 8 more; halves take subnormals too.
            // The arithmetic shift doubles the sign, and the mask takes the copy off.
            let v = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast())), 8);
            let half = _mm_and_si128(_mm_srai_epi16(v, 1), _mm_set1_epi16(0xbfff_u16 as i16));
            let nan = _mm_cmpeq_epi16(_mm_slli_epi16(v, 1), _mm_set1_epi16(0xfe00_u16 as i16));
            // All ones is a NaN.
            _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(256.0))
        };
        load_e8m0_half(p: *const u8) -> __m256 = {
            let e = Self::load_u8(p);
            let normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
            let tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
            let is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
            _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny))
        };
        prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}
