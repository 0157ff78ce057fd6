// RMSNorm of rows, in f32 and, for quantized products, in their form.
//
// Bytes: a row in, once from memory and once from L1; out 4 (f32) and 2.5 (quantized) a value. Operations: about 4 a value,
// and 25 more to quantize it (a warp takes a group of 32 and agrees on its largest by shuffles).
#include "quantize.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

struct NormParams {
  const f32* x;     // rows of x_row elements
  const u32* index; // (rows): row i of the result is row index[i] of x; null: row i
  const f32* weight; // (n)
  f32* y;           // (rows, n) or null
  QGroup* q;        // (rows, n / 32) or null; then n is in whole groups
  u64 x_row;
  u32 n;
  f32 eps;
};
static_assert(sizeof(NormParams) == 56, "mirrored in launch/norm.rs");

// A block a row. The sum's order depends on n alone.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ NormParams p) {
  __shared__ f32 sums[WARPS];
  const u32 row = p.index ? p.index[blockIdx.x] : blockIdx.x, warp = threadIdx.x / 32;
  const f32* x = p.x + row * p.x_row;
  f32 sum = 0;
#pragma unroll 4
  for (u32 k = threadIdx.x; k < p.n; k += THREADS) {
    const f32 v = x[k];
    sum = fmaf(v, v, sum);
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  sum = sums[threadIdx.x % WARPS];
#pragma unroll
  for (int w = WARPS / 2; w > 0; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
  const f32 by = 1 / sqrtf(sum / p.n + p.eps);
  // A warp's 32 columns are a group, so that it can quantize them.
#pragma unroll 4
  for (u32 k = threadIdx.x; k < (p.n + 31) / 32 * 32; k += THREADS) {
    const f32 v = k < p.n ? x[k] * by * p.weight[k] : 0;
    if (p.y && k < p.n) p.y[blockIdx.x * (u64)p.n + k] = v;
    if (p.q) quantize_group(v, p.q + (blockIdx.x * (u64)p.n + k) / 32);
  }
}
