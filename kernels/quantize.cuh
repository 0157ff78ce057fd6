// Activations as the quantized products take them, the CPU backend's codes: groups of 32 columns, -1904..=1904 (12 bits),
// held as two int8 halves, so that byte dot products take them. int8 alone moves log-probabilities by 0.1.
#pragma once
#include "params.h"

// Largest magnitude of a code.
constexpr i32 CODE_MAX = 1904;

// One group of one row. A code is 64*high + low and its value d*code. Words t and t+4 of the columns, 4 codes each, lie
// together with their other halves: the 16 bytes that a lane of an mma fragment takes.
struct QGroup {
  struct Words {
    i32 high[2]; // codes rounded to multiples of 64, divided by 64
    i32 low[2];  // what is left: -32..31
  } words[4];
  i32 sum[2]; // of the codes of columns 0..16 and 16..32
  i32 total;  // of all
  f32 d;
};
static_assert(sizeof(QGroup) == 80, "launch/quantize.rs: GROUP_BYTES");

// Quantizes a group; called by a whole warp, `v` is the lane's column. `d` is the smallest power of two of which the
// largest magnitude is no more than CODE_MAX. Below 2^-80 the group becomes zero; from 2^100 on, and with an infinity or
// NaN, d is a NaN, so that the fault shows in the output.
__device__ __forceinline__ void quantize_group(f32 v, QGroup* out) {
  const u32 lane = threadIdx.x % 32, all = 0xffffffffu;
  u32 amax_bits = __float_as_uint(v) & 0x7fffffffu; // integers order as magnitudes do, NaN above all
#pragma unroll
  for (int o = 16; o > 0; o /= 2) amax_bits = max(amax_bits, __shfl_xor_sync(all, amax_bits, o));
  bool sound = amax_bits < (127u + 100) << 23, tiny = amax_bits < (127u - 80) << 23;
  // A mantissa above that of CODE_MAX = 2^10 * 1.859375 carries over into the exponent.
  const u32 power = ((amax_bits + (0x800000u - 0x6e0000u - 1)) >> 23) - 10;
  i32 code = sound && !tiny ? __float2int_rn(v * __uint_as_float((254 - power) << 23)) : 0;
  i32 high = (code + 32) >> 6;
  QGroup::Words& words = out->words[lane / 4 % 4];
  ((i8*)&words.high[lane / 16])[lane % 4] = (i8)high;
  ((i8*)&words.low[lane / 16])[lane % 4] = (i8)(code - 64 * high);
  i32 sum = code;
#pragma unroll
  for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(all, sum, o);
  if (lane % 16 == 0) out->sum[lane / 16] = sum;
  const i32 total = sum + __shfl_xor_sync(all, sum, 16);
  if (lane == 0) out->total = total;
  if (lane == 0) out->d = !sound ? __uint_as_float(0x7fc00000) : tiny ? 0.f : __uint_as_float(power << 23);
}
