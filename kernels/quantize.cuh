// Activations as the quantized products take them, the CPU backend's codes: groups of 32 columns, -1904..=1904 (12 bits),
// held as two int8 halves, so that byte dot products take them. int8 alone moves log-probabilities by 0.1.
#pragma once
#include "params.h"

// One group of one row. A code is 64*high + low and its value d*code.
struct QGroup {
  i32 high[8]; // words of 4 codes, in the order of the columns: rounded to multiples of 64, divided by 64
  i32 low[8];  // what is left: -32..31
  f32 d;
  i32 sum[2];  // of the codes of columns 0..16 and 16..32
  f32 pad;
};
static_assert(sizeof(QGroup) == 80, "launch/quantize.rs: GROUP_BYTES");

// Quantizes a group; called by a whole warp, `v` is the lane's column. Rows whose largest magnitude is below 2^-100
// become zero (1904/amax must stay finite); an infinity or NaN makes d a NaN, so that the fault shows in the output.
__device__ __forceinline__ void quantize_group(f32 v, QGroup* out) {
  const u32 lane = threadIdx.x % 32, all = 0xffffffffu;
  u32 amax_bits = __float_as_uint(v) & 0x7fffffffu; // integers order as magnitudes do, NaN above all
#pragma unroll
  for (int o = 16; o > 0; o /= 2) amax_bits = max(amax_bits, __shfl_xor_sync(all, amax_bits, o));
  f32 amax = __uint_as_float(amax_bits);
  bool sound = amax_bits < 0x7f800000u, tiny = amax < 7.8886090522101181e-31f;
  i32 code = sound && !tiny ? __float2int_rn(__fmul_rn(v, __fdiv_rn(1904.f, amax))) : 0;
  i32 high = (code + 32) >> 6;
  ((i8*)out->high)[lane] = (i8)high;
  ((i8*)out->low)[lane] = (i8)(code - 64 * high);
  i32 sum = code;
#pragma unroll
  for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(all, sum, o);
  if (lane % 16 == 0) out->sum[lane / 16] = sum;
  if (lane == 0) out->d = !sound ? __uint_as_float(0x7fc00000) : tiny ? 0.f : __fdiv_rn(amax, 1904.f);
}
