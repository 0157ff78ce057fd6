// RMSNorm of rows, in f32 and, for quantized products, in their form.
//
// Bytes: a row in, once (rows above 8192 again from L1); out 4 (f32) and 2.5 (quantized) a value. Operations: about 4 a value,
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

// A block a row; its thread holds columns threadIdx.x + 1024 j for j below V, of which a row has all (V 0: any number, read
// twice). The sum's order depends on n alone.
template <int V>
__device__ __forceinline__ void norm(const NormParams& p) {
  __shared__ f32 sums[WARPS];
  const u32 row = p.index ? p.index[blockIdx.x] : blockIdx.x, warp = threadIdx.x / 32;
  const f32* x = p.x + row * p.x_row;
  f32 v[V > 0 ? V : 1], w[V > 0 ? V : 1], sum = 0;
  if constexpr (V > 0) {
#pragma unroll
    for (int j = 0; j < V; j++) {
      const u32 k = threadIdx.x + j * THREADS;
      v[j] = k < p.n ? x[k] : 0;
      w[j] = k < p.n ? p.weight[k] : 0;
    }
#pragma unroll
    for (int j = 0; j < V; j++) sum = fmaf(v[j], v[j], sum);
  } else {
#pragma unroll 4
    for (u32 k = threadIdx.x; k < p.n; k += THREADS) sum = fmaf(x[k], x[k], sum);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  sum = sums[threadIdx.x % WARPS];
#pragma unroll
  for (int o = WARPS / 2; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  const f32 by = 1 / sqrtf(sum / p.n + p.eps);
  // A warp's 32 columns are a group, so that it can quantize them.
#pragma unroll
  for (u32 k = threadIdx.x, j = 0; k < (p.n + 31) / 32 * 32; k += THREADS, j++) {
    if (V > 0 && j >= V) break;
    const f32 y = V > 0 ? v[V > 0 ? j : 0] * by * w[V > 0 ? j : 0] : k < p.n ? x[k] * by * p.weight[k] : 0;
    if (p.y && k < p.n) p.y[blockIdx.x * (u64)p.n + k] = y;
    if (p.q) quantize_group(y, p.q + (blockIdx.x * (u64)p.n + k) / 32);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_2(const __grid_constant__ NormParams p) { norm<2>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_8(const __grid_constant__ NormParams p) { norm<8>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ NormParams p) { norm<0>(p); }
