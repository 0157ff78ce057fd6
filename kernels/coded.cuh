// Pages of int8 codes (backend/page.rs): codes of keys and of values, then a scale (f16) for every 32 codes of a row, then
// the rope keys of latent rows in f16. A code's value is code * scale, exact in f32.
#pragma once
#include "params.h"
#include <cuda_fp16.h>

// Scales of a row of `width` codes.
__device__ __forceinline__ u32 scales_of(u32 width) { return (width + GROUP - 1) / GROUP; }

// One layer's part of a page. `heads` is 1 and `value` 0 for latent rows; `tail` is the width of their rope key.
struct CodedPage {
  u8* base;
  u32 heads, key, value, tail;

  __device__ __forceinline__ i8* key_codes(u32 head) const { return (i8*)base + head * PAGE_TOKENS * key; }
  __device__ __forceinline__ i8* value_codes(u32 head) const {
    return (i8*)base + (heads * key + head * value) * PAGE_TOKENS;
  }
  __device__ __forceinline__ __half* scales() const { return (__half*)(base + heads * PAGE_TOKENS * (key + value)); }
  __device__ __forceinline__ __half* key_scales(u32 head) const {
    return scales() + head * PAGE_TOKENS * scales_of(key);
  }
  __device__ __forceinline__ __half* value_scales(u32 head) const {
    return scales() + (heads * scales_of(key) + head * scales_of(value)) * PAGE_TOKENS;
  }
  // Rope keys `(PAGE_TOKENS, tail)`.
  __device__ __forceinline__ __half* tails() const {
    return scales() + heads * PAGE_TOKENS * (scales_of(key) + scales_of(value));
  }
};

// Four codes of a word as f32: a byte below 0x4b0000 is 2^23 + byte.
__device__ __forceinline__ void widen_codes(u32 word, f32 (&v)[4]) {
  const u32 biased = word ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7650 + i)) - 8388736.f;
}

// Two codes of a word times a scale, rounded once to f16: bytes 0 and 1, or 2 and 3. A byte below 0x64 is 1024 + byte.
__device__ __forceinline__ __half2 widen_pair(u32 biased, bool upper, __half2 scale) {
  const u32 bits = __byte_perm(biased, 0x64646464u, upper ? 0x4342 : 0x4140);
  return __hmul2(__hsub2(*(const __half2*)&bits, __float2half2_rn(1152.f)), scale);
}

// Eight codes times a scale as f16, as 16 bytes.
__device__ __forceinline__ uint4 widen_eight(uint2 codes, __half scale) {
  const __half2 by = __half2half2(scale);
  const u32 low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
  const __half2 h[4] = {widen_pair(low, false, by), widen_pair(low, true, by), widen_pair(high, false, by),
                        widen_pair(high, true, by)};
  return *(const uint4*)h;
}

// Codes a row of `n` values that `value(e)` gives, by a block of BLOCK threads: a warp a group at a time. The largest of a group
// becomes +-127; the scale is rounded to f16 first, so that codes are the nearest ones to what will be read. What the CPU
// backend's `code` does, to the bit; a NaN becomes 0 there too.
template <int BLOCK, class Value>
__device__ __forceinline__ void code_row(u32 n, i8* codes, __half* scales, Value value) {
  const u32 lane = threadIdx.x % 32;
  for (u32 g = threadIdx.x / 32; g < scales_of(n); g += BLOCK / 32) {
    const u32 e = g * GROUP + lane;
    const f32 v = e < n ? value(e) : 0;
    f32 most = fmaxf(0, fabsf(v)); // fmaxf leaves a NaN out
#pragma unroll
    for (int w = 16; w > 0; w /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, w));
    const __half scale = __float2half_rn(__fdiv_rn(most, 127.f));
    const f32 s = __half2float(scale), by = s > 0 ? __fdiv_rn(1.f, s) : 0;
    const f32 code = roundf(__fmul_rn(v, by)); // halves away from zero
    if (e < n) codes[e] = code == code ? (i8)fminf(fmaxf(code, -127.f), 127.f) : 0;
    if (lane == 0) scales[g] = scale;
  }
}
