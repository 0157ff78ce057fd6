// The k largest logits of each row, under a mask if there is one: k = 1 is greedy decoding without copying a vocabulary of
// logits out. Ties go to the lower index. A block takes a slice, the last block of a row to finish merges the slices.
//
// Bytes: the logits once (and a bit each for the mask). Operations: 3 a logit and k.
#include "params.h"

#define THREADS 256
#define SLICE 4096
#define TOP_MAX 64
#define NOTHING 0xffffffffu
#define LOWEST __int_as_float(0xff800000) // -infinity

struct Found {
  f32 value;
  u32 index; // NOTHING where fewer than k logits are allowed and above -infinity
};

struct TopParams {
  const f32* logits; // (rows, vocab)
  const u32* mask;   // (rows, ceil(vocab / 32)): bit i%32 of word i/32 allows index i; or null
  Found* found;      // (rows, k), the largest first
  Found* parts;      // (rows, slices, k)
  u32* done;         // (rows); zero before and after
  u32 vocab, k;
};
static_assert(sizeof(TopParams) == 48, "mirrored in launch/top.rs");

__device__ __forceinline__ bool above(const Found& a, const Found& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The largest of the block's candidates; every thread gets it.
__device__ __forceinline__ Found block_top(Found best) {
  __shared__ Found warps[THREADS / 32];
#pragma unroll
  for (int w = 16; w > 0; w /= 2) {
    Found other = {__shfl_xor_sync(~0u, best.value, w), __shfl_xor_sync(~0u, best.index, w)};
    if (above(other, best)) best = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  best = warps[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; w++) {
    if (above(warps[w], best)) best = warps[w];
  }
  return best;
}

extern "C" __global__ void __launch_bounds__(THREADS) top_k(const __grid_constant__ TopParams p) {
  __shared__ f32 values[SLICE];
  __shared__ bool last;
  const u32 row = blockIdx.y, slices = gridDim.x, first = blockIdx.x * SLICE;
  const u32 n = min(p.vocab - first, (u32)SLICE);
  const f32* logits = p.logits + (u64)row * p.vocab + first;
  for (u32 i = threadIdx.x; i < n; i += THREADS) {
    const u32 at = first + i;
    const bool allowed = !p.mask || p.mask[row * (u64)((p.vocab + 31) / 32) + at / 32] >> at % 32 & 1;
    values[i] = allowed ? logits[i] : LOWEST;
  }
  __syncthreads();
  // What comes after `before` in the order of `above`; a NaN is above nothing.
  Found before = {__int_as_float(0x7f800000), 0};
  bool any = false;
  Found* mine = p.parts + ((u64)row * slices + blockIdx.x) * p.k;
  for (u32 k = 0; k < p.k; k++) {
    Found best = {LOWEST, NOTHING};
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
      const Found f = {values[i], first + i};
      if ((!any || above(before, f)) && f.value > LOWEST && above(f, best)) best = f;
    }
    before = block_top(best);
    any = true;
    if (threadIdx.x == 0) mine[k] = before;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(p.done + row, 1) + 1 == slices;
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) p.done[row] = 0;
  __threadfence();
  const Found* all = p.parts + (u64)row * slices * p.k;
  any = false;
  for (u32 k = 0; k < p.k; k++) {
    Found best = {LOWEST, NOTHING};
    for (u32 i = threadIdx.x; i < slices * p.k; i += THREADS) {
      const Found f = {__ldcg(&all[i].value), __ldcg(&all[i].index)};
      if (f.index != NOTHING && (!any || above(before, f)) && above(f, best)) best = f;
    }
    before = block_top(best);
    any = true;
    if (threadIdx.x == 0) p.found[(u64)row * p.k + k] = before;
  }
}
