//! AVX-512 F, BW, VL, DQ and VNNI: one register holds 16 lanes, so a register is a tile's rows.
//!
//! Instructions a weight, everything in the inner loop counted (`count.rs` compares them with the compiled program):
//!
//! | codec | one row | a row of many |
//! |---|---|---|
//! | q4_0 | 0.092 | 0.039 |
//! | q4_1 | 0.094 | 0.044 |
//! | q5_0 | 0.141 | 0.074 |
//! | q5_1 | 0.143 | 0.069 |
//! | q8_0 | 0.098 | 0.064 |
//! | q2_k | 0.164 | 0.076 |
//! | q3_k | 0.156 | 0.084 |
//! | q4_k | 0.098 | 0.042 |
//! | q5_k | 0.146 | 0.070 |
//! | q6_k | 0.160 | 0.074 |
//! | iq4_nl | 0.119 | 0.068 |
//! | iq4_xs | 0.123 | 0.068 |
//! | mxfp4 | 0.129 | 0.071 |

use super::entry::{entries, products};
use super::simd::{LANES, Simd, SimdDot, op};
use std::arch::x86_64::*;

entries!(Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c");
products!(Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c");

/// The instruction set.
#[derive(Clone, Copy)]
pub struct Avx512;

/// A mask of the first `n < 16` lanes.
#[inline(always)]
fn first(n: usize) -> u16 {
    (1u16 << n) - 1
}

/// The first tree step of a sum: lanes eight apart added.
#[inline(always)]
unsafe fn halves(v: __m512) -> __m256 {
    // SAFETY: the callers have the instruction set.
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)) }
}

impl Simd for Avx512 {
    const W: usize = LANES;
    const COUPLED: bool = true;
    type F = __m512;
    type I = __m512i;
    op! {
        splat(v: f32) -> __m512 = _mm512_set1_ps(v);
        load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        load_part(p: *const f32, n: usize) -> __m512 = _mm512_maskz_loadu_ps(first(n), p);
        store(p: *mut f32, v: __m512) = _mm512_storeu_ps(p, v);
        store_part(p: *mut f32, v: __m512, n: usize) = _mm512_mask_storeu_ps(p, first(n), v);
        load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        load_f16_part(p: *const u16, n: usize) -> __m512 =
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p.cast()));
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        sum16(v: &[__m512; 4]) -> f32 = {
            let v = halves(v[0]);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        };
        sum16_of_4(v: &[[__m512; 4]; 4], out: *mut f32) = {
            let (a, b) = (halves(v[0][0]), halves(v[1][0]));
            let (c, d) = (halves(v[2][0]), halves(v[3][0]));
            // [a0..4 | b0..4], four apart added; then the same for c and d.
            let ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
            let cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
            // [a0 a1 c0 c1 | b0 b1 d0 d1], two apart added; then neighbours.
            let v = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
            let v = _mm256_add_ps(v, _mm256_movehdup_ps(v));
            let v = _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6));
            _mm_storeu_ps(out, _mm256_castps256_ps128(v))
        };
        max16(v: &[__m512; 4]) -> f32 = _mm512_reduce_max_ps(v[0]);
        sum16_i(v: &[__m512i; 4]) -> i32 = _mm512_reduce_add_epi32(v[0]);
        split(a: __m512i) -> (__m512i, __m512i) = {
            let high = _mm512_srai_epi32(_mm512_add_epi32(a, _mm512_set1_epi32(16)), 5);
            (high, _mm512_sub_epi32(a, _mm512_slli_epi32(high, 5)))
        };
        couple(a: __m512i, b: __m512i) -> [__m512i; 3] = {
            let first = _mm512_srai_epi32(_mm512_sub_epi32(b, _mm512_set1_epi32(112)), 4);
            let more = _mm512_and_si512(_mm512_sub_epi32(a, first), _mm512_set1_epi32(15));
            let h = _mm512_add_epi32(first, more);
            let k = _mm512_srai_epi32(_mm512_sub_epi32(a, h), 4);
            [k, h, _mm512_sub_epi32(b, _mm512_slli_epi32(h, 4))]
        };
        store_bytes(p: *mut i8, v: __m512i) = _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v));
        splat_i(v: i32) -> __m512i = _mm512_set1_epi32(v);
        add_i(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        sub_i(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        half_i(a: __m512i) -> __m512i = _mm512_srai_epi32(a, 1);
        to_exponent(a: __m512i) -> __m512i = _mm512_slli_epi32(a, 23);
        bits(a: __m512) -> __m512i = _mm512_castps_si512(a);
        from_bits(a: __m512i) -> __m512 = _mm512_castsi512_ps(a);
    }
}

/// Four activation codes to every lane; folds into the instruction that uses it.
#[inline(always)]
unsafe fn four(x: *const i8, c: usize) -> __m512i {
    // SAFETY: the callers' contract.
    unsafe { _mm512_set1_epi32(x.cast::<i32>().add(c).read_unaligned()) }
}

impl SimdDot for Avx512 {
    type B = __m512i;
    const SIGNED_BYTES: bool = false;
    const ROWS_Q8: usize = 8;
    const ROWS_F32: usize = 4;
    const STARTS: bool = true;
    op! {
        load_b(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        splat_b(v: u8) -> __m512i = _mm512_set1_epi8(v as i8);
        and_b(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        or_b(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        xor_b(a: __m512i, b: __m512i) -> __m512i = _mm512_xor_si512(a, b);
        shr_b[N](a: __m512i) -> __m512i = _mm512_srli_epi32(a, N);
        shl_b[N](a: __m512i) -> __m512i = _mm512_slli_epi32(a, N);
        lookup_b(table: &[u8; 16], index: __m512i) -> __m512i = {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, index)
        };
        dot4[BITS](acc: __m512i, w: [__m512i; 4], x: *const i8) -> __m512i = {
            let acc = _mm512_dpbusd_epi32(acc, w[0], four(x, 0));
            let acc = _mm512_dpbusd_epi32(acc, w[1], four(x, 1));
            let acc = _mm512_dpbusd_epi32(acc, w[2], four(x, 2));
            _mm512_dpbusd_epi32(acc, w[3], four(x, 3))
        };
        dot8[BITS](acc: __m512i, w: &[__m512i; 8], x: *const i8) -> __m512i = {
            let acc = Self::dot4::<BITS>(acc, [w[0], w[1], w[2], w[3]], x);
            Self::dot4::<BITS>(acc, [w[4], w[5], w[6], w[7]], x.add(16))
        };
        dot_coupled(acc: __m512i, raw: &[__m512i; 4], apart: &[__m512i; 8], x: &Q8Group) -> __m512i = {
            let [a, b, c, d, e, f, g, h] = *apart;
            let acc = Self::dot4::<8>(acc, *raw, x.h.as_ptr());
            let acc = Self::dot4::<4>(acc, [e, f, g, h], x.m.as_ptr());
            Self::dot4::<8>(acc, [a, b, c, d], x.k.as_ptr())
        };
        dot_coupled_once(acc: __m512i, raw: &[__m512i; 4], x: &Q8Group) -> __m512i = {
            // The one code is multiplied where it lies, the other times 16 as it lies; three chains instead of one long one.
            let (low, high) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0xf0_u8 as i8));
            let low = [0, 1, 2, 3].map(|c| _mm512_and_si512(raw[c], low));
            let high = [0, 1, 2, 3].map(|c| _mm512_and_si512(raw[c], high));
            let both = Self::dot4::<8>(acc, *raw, x.h.as_ptr());
            let low = Self::dot4::<4>(_mm512_setzero_si512(), low, x.k.as_ptr());
            let high = Self::dot4::<8>(_mm512_setzero_si512(), high, x.m.as_ptr());
            let apart = _mm512_add_epi32(_mm512_slli_epi32(low, 4), _mm512_srai_epi32(high, 4));
            _mm512_add_epi32(both, apart)
        };
        add_halves(acc: __m512i, x: &Q8Group, by: [i16; 2]) -> __m512i = {
            let by = i32::from(by[0]) & 0xffff | i32::from(by[1]) << 16;
            let halves = _mm512_set1_epi32(x.neg_half.as_ptr().cast::<i32>().read_unaligned());
            _mm512_dpwssd_epi32(acc, _mm512_set1_epi32(by), halves)
        };
        byte_u[N](a: __m512i) -> __m512i =
            _mm512_and_si512(_mm512_srlv_epi32(a, _mm512_set1_epi32(8 * N as i32)), _mm512_set1_epi32(255));
        byte_s[N](a: __m512i) -> __m512i =
            _mm512_srai_epi32(_mm512_sllv_epi32(a, _mm512_set1_epi32(24 - 8 * N as i32)), 24);
        shl_i[N](a: __m512i) -> __m512i = _mm512_slli_epi32(a, N);
        low_nibble_i(a: __m512i) -> __m512i = _mm512_and_si512(a, _mm512_set1_epi32(15));
        high_nibble_i(a: __m512i) -> __m512i = _mm512_srli_epi32(a, 4);
        to_f(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        load_u8(p: *const u8) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        load_i8(p: *const u8) -> __m512i = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()));
        load_bf16(p: *const u16) -> __m512 = {
            let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(v, 16))
        };
        load_f8(p: *const u8) -> __m512 = {
            // Exponent and mantissa moved into those of a half, whose bias is 8 more; halves take subnormals too.
            // The arithmetic shift doubles the sign, and the mask takes the copy off.
            let v = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())), 8);
            let half = _mm256_and_si256(_mm256_srai_epi16(v, 1), _mm256_set1_epi16(0xbfff_u16 as i16));
            let nan = _mm256_cmpeq_epi16_mask(_mm256_slli_epi16(v, 1), _mm256_set1_epi16(0xfe00_u16 as i16));
            // All ones is a NaN.
            let half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(-1));
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        };
        load_e8m0_half(p: *const u8) -> __m512 = {
            let e = Self::load_u8(p);
            let normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
            let tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let is_tiny = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, is_tiny, tiny))
        };
        prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}
