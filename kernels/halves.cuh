// Activations as the tensor cores take them: f16 rows, each scaled by a power of two so that nothing overflows and the
// largest values have f16's full precision.
#pragma once
#include "params.h"
#include <cuda_fp16.h>

// The column of a group that lies at position i of its fragment order: lane t of an mma finds its 8 columns, 4t..4t+3 and
// 16+4t..16+4t+3 (the ones whose codes are neighbours in the tile layout), in 16 consecutive bytes.
__device__ __forceinline__ u32 column_at(u32 i) { return i / 4 % 2 * 16 + i / 8 * 4 + i % 4; }

// The power of two that brings magnitudes up to `amax` (as bits) to [2^13, 2^14). An infinity or NaN gives NaN.
__device__ __forceinline__ f32 half_scale(u32 amax) {
  const i32 exponent = (i32)(amax >> 23);
  if (exponent == 255) return __uint_as_float(0x7fc00000);
  // Below 2^-100 the scale would overflow; such rows keep few bits, and stand for nothing.
  return __uint_as_float((u32)(127 + 13 - (max(exponent, 27) - 127)) << 23);
}

// 1/scale, exactly. A NaN stays one.
__device__ __forceinline__ f32 half_factor(f32 scale) { return 1.f / scale; }
