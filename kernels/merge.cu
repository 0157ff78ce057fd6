// Parts of split rows into results, in the order of the segments.
//
// Bytes: (dv + 2) * 4 a (row, head, segment) once. Operations: one multiply-add a value of a part.
#include "decode.cuh"

#define THREADS 128

// Grid (dv / 128, heads, rows). A row of one segment has its result already.
extern "C" __global__ void __launch_bounds__(THREADS) merge_parts(const __grid_constant__ AttendParams p) {
  __shared__ f32 weights[SEGMENTS_MAX];
  __shared__ f32 by;
  const u32 row = blockIdx.z, head = blockIdx.y, column = blockIdx.x * THREADS + threadIdx.x;
  const Cut cut(p, p.rows.position[row]);
  if (cut.segments == 1) return;
  const u64 first = part_at(p, row, head, 0);
  if (threadIdx.x < 32) { // a lane has segments lane and lane + 32
    const float2* sums = (const float2*)p.part_sums + first;
    const float2 none = make_float2(NONE_SEEN, 0);
    const float2 a = threadIdx.x < cut.segments ? sums[threadIdx.x] : none;
    const float2 b = threadIdx.x + 32 < cut.segments ? sums[threadIdx.x + 32] : none;
    f32 top = fmaxf(a.x, b.x);
#pragma unroll
    for (int w = 16; w > 0; w /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
    const f32 wa = a.x == NONE_SEEN ? 0 : expf(a.x - top), wb = b.x == NONE_SEEN ? 0 : expf(b.x - top);
    f32 sum = a.y * wa + b.y * wb;
#pragma unroll
    for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
    weights[threadIdx.x] = wa;
    weights[threadIdx.x + 32] = wb;
    if (threadIdx.x == 0) by = divisor(top, sum, p.sinks, head);
  }
  __syncthreads();
  if (column >= p.dv) return; // whole warps where results are quantized
  const f32* part = p.parts + first * p.dv + column;
  f32 sum = 0;
#pragma unroll 8
  for (u32 s = 0; s < cut.segments; s++) sum = fmaf(weights[s], part[(u64)s * p.dv], sum);
  put(p, ((u64)row * p.heads + head) * p.dv + column, sum * by);
}
