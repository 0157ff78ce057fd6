// The router of few rows in one launch: logits, then the choice. The matrix is small (64 rows of 2048 at DeepSeek-V2-Lite)
// and a plain product would put it on four multiprocessors, so blocks also share out its columns; the last block to
// finish adds their sums in order and picks, a warp a row. f32 throughout: a routing decision is worth full precision.
//
// Bytes: the matrix once (0.5 MB as f32), rows * splits * experts sums twice. Operations: one a weight and row.
//
// Variants: CODEC (CODEC_F32, CODEC_F16, CODEC_BF16).
#include "router.cuh"
#include <cuda_fp16.h>

#define THREADS 128
#define WARPS (THREADS / WARP)
#define COLS 128 // of a block
#define ROWS_MAX 8

struct RouterFewParams {
  Matrix w;      // (experts, cols)
  const f32* x;  // (rows, cols), x_row elements a row
  f32* sums;     // (rows, splits, experts)
  u32* done;     // zero before and after
  u64 x_row;
  u32 rows, pad;
  RouterParams pick;
};
static_assert(sizeof(RouterFewParams) == 184, "mirrored in launch/router.rs");

// Column k of rows 4q..4q+3 of a tile.
__device__ __forceinline__ float4 load_rows(const Matrix& w, u32 tile, u32 k, u32 q) {
  const u64 at = ((u64)tile * w.cols + k) * TILE_ROWS + 4 * q;
#if CODEC == CODEC_F32
  return __ldg((const float4*)w.base + at / 4);
#else
  const uint2 raw = __ldg((const uint2*)w.base + at / 4);
#if CODEC == CODEC_BF16
  return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000), __uint_as_float(raw.y << 16),
                     __uint_as_float(raw.y & 0xffff0000));
#else
  const float2 a = __half22float2(*(const __half2*)&raw.x), b = __half22float2(*(const __half2*)&raw.y);
  return make_float4(a.x, a.y, b.x, b.y);
#endif
#endif
}

// A warp's part of a row: scores (experts), choice (experts), groups (groups), WARPS times.
extern __shared__ f32 room[];

// Grid (tiles, splits). Four threads share a column's 16 experts.
extern "C" __global__ void __launch_bounds__(THREADS) router_few(const __grid_constant__ RouterFewParams p) {
  __shared__ __align__(16) f32 sums[ROWS_MAX][WARPS][TILE_ROWS];
  __shared__ u32 picks[WARPS][PICKED_MAX];
  __shared__ bool last;
  const u32 q = threadIdx.x % 4, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const u32 tile = blockIdx.x, splits = gridDim.y, experts = p.pick.experts;
  const u32 first = blockIdx.y * COLS + threadIdx.x / 4;
  float4 w[COLS / 32];
#pragma unroll
  for (u32 i = 0; i < COLS / 32; i++) {
    const u32 k = first + 32 * i;
    w[i] = k < p.w.cols ? load_rows(p.w, tile, k, q) : make_float4(0, 0, 0, 0);
  }
  for (u32 row = 0; row < p.rows; row++) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (u32 i = 0; i < COLS / 32; i++) {
      const u32 k = first + 32 * i;
      const f32 x = k < p.w.cols ? p.x[row * p.x_row + k] : 0;
      sum = make_float4(fmaf(w[i].x, x, sum.x), fmaf(w[i].y, x, sum.y), fmaf(w[i].z, x, sum.z), fmaf(w[i].w, x, sum.w));
    }
#pragma unroll
    for (int o = 4; o < WARP; o *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, o);
      sum.y += __shfl_xor_sync(~0u, sum.y, o);
      sum.z += __shfl_xor_sync(~0u, sum.z, o);
      sum.w += __shfl_xor_sync(~0u, sum.w, o);
    }
    if (lane < 4) *(float4*)(sums[row][warp] + 4 * q) = sum;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < p.rows * TILE_ROWS; i += THREADS) {
    const u32 row = i / TILE_ROWS, r = i % TILE_ROWS, e = tile * TILE_ROWS + r;
    const f32 sum = (sums[row][0][r] + sums[row][1][r]) + (sums[row][2][r] + sums[row][3][r]);
    if (e < experts) p.sums[((u64)row * splits + blockIdx.y) * experts + e] = sum;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(p.done, 1) + 1 == gridDim.x * splits;
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) *p.done = 0;
  __threadfence();
  f32* scores = room + warp * (2 * experts + p.pick.groups);
  for (u32 row = warp; row < p.rows; row += WARPS) {
    const f32* from = p.sums + (u64)row * splits * experts;
    for (u32 e = lane; e < experts; e += WARP) {
      f32 sum = 0;
#pragma unroll 8
      for (u32 s = 0; s < splits; s++) sum += __ldcg(from + s * experts + e);
      scores[e] = sum;
    }
    __syncwarp();
    pick_row(p.pick, row, scores, scores, scores + experts, scores + 2 * experts, picks[warp]);
  }
}
