// f32 activation rows to the forms that products take.
//
// Bytes: `quantize_rows` 4 in and 2.5 out a value; `half_rows` 4 in (twice, the second from L1 or L2) and 2 or 4 out.
#include "quantize.cuh"
#include "halves.cuh"

struct QuantizeParams {
  const f32* x;
  QGroup* q; // (rows, groups)
  u64 x_row;
  u32 groups, pad;
};
static_assert(sizeof(QuantizeParams) == 32, "launch/quantize.rs");

// A warp a group; grid (groups / 8, rows).
extern "C" __global__ void __launch_bounds__(256) quantize_rows(const __grid_constant__ QuantizeParams p) {
  const u32 g = blockIdx.x * 8 + threadIdx.x / 32;
  if (g >= p.groups) return;
  const f32 v = p.x[blockIdx.y * p.x_row + 32 * g + threadIdx.x % 32];
  quantize_group(v, p.q + blockIdx.y * (u64)p.groups + g);
}

struct HalfParams {
  const f32* x;
  u16* y;      // (heads, rows, terms, pitch) f16 or bf16, a group's columns in fragment order, zero past cols
  f32* factor; // (heads, rows): what a product of y's row must be multiplied by
  u64 x_step, x_row;
  u32 cols, pitch;
  u32 terms; // 2: what the first leaves of a value follows as a second
  u32 bf16;  // 1: bf16, which needs no scaling
};
static_assert(sizeof(HalfParams) == 56, "launch/quantize.rs");

// A value as f16 or bf16, and what that stands for.
__device__ __forceinline__ u16 narrowed(f32 v, bool bf16, f32& back) {
  if (!bf16) {
    const __half h = __float2half_rn(v);
    back = __half2float(h);
    return __half_as_ushort(h);
  }
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  back = __uint_as_float((u32)bits << 16);
  return bits;
}

// A block a row; grid (rows, heads).
extern "C" __global__ void __launch_bounds__(256) half_rows(const __grid_constant__ HalfParams p) {
  __shared__ u32 warp_max[8];
  const f32* x = p.x + blockIdx.y * p.x_step + blockIdx.x * p.x_row;
  const u64 row = blockIdx.y * (u64)gridDim.x + blockIdx.x;
  u32 amax = 0;
  for (u32 k = threadIdx.x; k < p.cols; k += 256) amax = max(amax, __float_as_uint(x[k]) & 0x7fffffffu);
#pragma unroll
  for (int o = 16; o > 0; o /= 2) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, o));
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++) amax = max(amax, warp_max[i]);
  const f32 scale = p.bf16 ? 1.f : half_scale(amax);
  u16* y = p.y + row * p.pitch * p.terms;
  for (u32 i = threadIdx.x; i < p.pitch; i += 256) {
    const u32 k = i / 32 * 32 + column_at(i % 32);
    const f32 v = k < p.cols ? x[k] * scale : 0.f;
    f32 high, low;
    y[i] = narrowed(v, p.bf16, high);
    if (p.terms == 2) y[p.pitch + i] = narrowed(v - high, p.bf16, low);
  }
  if (threadIdx.x == 0) p.factor[row] = half_factor(scale);
}

struct SiluParams {
  const f32 *gate, *up;
  f32* act;
  u64 n;
};
static_assert(sizeof(SiluParams) == 32, "launch/gemv.rs");

// act = silu(gate) * up: for a gate and an up of different codecs, which no fused kernel takes.
extern "C" __global__ void __launch_bounds__(256) silu_products(const __grid_constant__ SiluParams p) {
  const u64 i = blockIdx.x * 256ull + threadIdx.x;
  if (i < p.n) p.act[i] = p.gate[i] / (1.f + expf(-p.gate[i])) * p.up[i];
}
