// The router's choice for one row, by one warp, exactly as src/model/router.rs defines it: scores, bias, group limit, top-k,
// weights. Ties go to the lower index. A warp because picks depend on each other, and at 64 to 256 experts its shuffles
// beat a barrier.
#pragma once
#include "params.h"

#define WARP 32
#define GATING_SOFTMAX 0
#define GATING_SIGMOID 1
#define PICKED_MAX 64
#define LOWEST __int_as_float(0xff800000) // -infinity

struct RouterParams {
  const f32* logits; // (rows, experts)
  const f32* bias;   // (experts) or null: added for the choice only
  const u32* given;  // picks to replay: row r's at r*route_stride + route_offset; or null
  u32* record;       // picks made, laid out as `given`; or null
  Pick* picks;       // (rows, picked)
  u32 experts, picked, groups, groups_picked;
  u32 gating, normalize;
  f32 scale;
  u32 route_stride, route_offset;
  u32 outside;       // `record` is host memory that the host reads while the GPU goes on
};
static_assert(sizeof(RouterParams) == 80, "mirrored in launch/router.rs");

// The first index of the largest of `v[0..n]`; 0 if none is above -infinity. Every lane gets it.
__device__ inline u32 argmax(const f32* v, u32 n) {
  f32 best = LOWEST;
  u32 at = 0;
  for (u32 i = threadIdx.x % WARP; i < n; i += WARP) {
    if (v[i] > best) best = v[i], at = i;
  }
  if (!(best > LOWEST)) at = ~0u; // so that a lane with nothing never wins a tie at -infinity
#pragma unroll
  for (int w = 16; w > 0; w /= 2) {
    f32 other = __shfl_xor_sync(~0u, best, w);
    u32 index = __shfl_xor_sync(~0u, at, w);
    if (other > best || (other == best && index < at)) best = other, at = index;
  }
  return at == ~0u ? 0 : at;
}

// What a group is ranked by: its best expert (softmax, DeepSeek-V2) or its two best together (sigmoid, V3).
__device__ inline f32 rank(const f32* v, u32 n, u32 gating) {
  f32 a = LOWEST, b = LOWEST;
  for (u32 i = 0; i < n; i++) {
    if (v[i] > a) b = a, a = v[i];
    else if (v[i] > b) b = v[i];
  }
  return gating == GATING_SOFTMAX || b == LOWEST ? a : a + b;
}

// `scores` may be `logits`: a lane reads and writes its own.
__device__ inline void scores_of(const RouterParams& p, const f32* logits, f32* scores) {
  u32 lane = threadIdx.x % WARP;
  if (p.gating == GATING_SIGMOID) {
    for (u32 i = lane; i < p.experts; i += WARP) scores[i] = 1 / (1 + expf(-logits[i]));
    return;
  }
  f32 top = LOWEST, sum = 0;
  for (u32 i = lane; i < p.experts; i += WARP) top = fmaxf(top, logits[i]);
#pragma unroll
  for (int w = 16; w > 0; w /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
  for (u32 i = lane; i < p.experts; i += WARP) {
    f32 e = expf(logits[i] - top);
    scores[i] = e;
    sum += e;
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
  for (u32 i = lane; i < p.experts; i += WARP) scores[i] /= sum;
}

// Experts of the groups that are not among the best `groups_picked` leave the choice.
__device__ inline void limit_groups(const RouterParams& p, f32* choice, f32* groups) {
  u32 size = p.experts / p.groups;
  for (u32 g = threadIdx.x % WARP; g < p.groups; g += WARP) groups[g] = rank(choice + g * size, size, p.gating);
  __syncwarp();
  for (u32 k = 0; k < p.groups_picked; k++) {
    u32 best = argmax(groups, p.groups);
    __syncwarp();
    if (threadIdx.x % WARP == 0) groups[best] = __int_as_float(0x7fc00000); // NaN marks a kept group and is above nothing
    __syncwarp();
  }
  for (u32 i = threadIdx.x % WARP; i < p.experts; i += WARP) {
    f32 g = groups[i / size];
    if (g == g) choice[i] = LOWEST;
  }
  __syncwarp();
}

// One row's picks from its logits. `scores` and `choice` are (experts), `groups` (groups), `picks` (picked): the warp's own.
__device__ inline void pick_row(const RouterParams& p, u32 row, const f32* logits, f32* scores, f32* choice, f32* groups,
                                u32* picks) {
  const u32 lane = threadIdx.x % WARP;
  scores_of(p, logits, scores);
  __syncwarp();
  const u64 route = (u64)row * p.route_stride + p.route_offset;
  if (p.given) {
    for (u32 k = lane; k < p.picked; k += WARP) picks[k] = p.given[route + k];
  } else {
    for (u32 i = lane; i < p.experts; i += WARP) choice[i] = scores[i] + (p.bias ? p.bias[i] : 0);
    __syncwarp();
    if (p.groups > 1) limit_groups(p, choice, groups);
    for (u32 k = 0; k < p.picked; k++) {
      u32 best = argmax(choice, p.experts);
      __syncwarp();
      if (lane == 0) picks[k] = best, choice[best] = LOWEST;
      __syncwarp();
    }
  }
  __syncwarp();
  f32 sum = 0;
  for (u32 k = 0; k < p.picked; k++) sum += scores[picks[k]];
  // As the reference: 1e-20 keeps all-zero scores from dividing by zero.
  const f32 by = sum + 1e-20f;
  for (u32 k = lane; k < p.picked; k += WARP) {
    const u32 e = picks[k];
    const f32 w = p.normalize ? scores[e] / by : scores[e];
    p.picks[(u64)row * p.picked + k] = {e, w * p.scale};
    if (p.record) p.record[route + k] = e;
  }
  if (p.outside) __threadfence_system();
  __syncwarp();
}
