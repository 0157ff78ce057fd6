// Picks grouped by expert, for many rows: a stable counting sort, and afterwards the weighted sum back into rows.
//
// Bytes: `group_count` the picks once, `group_place` the picks once an expert (from L2); `combine` (n_picked + 2) f32 a
// value of the residual.
#include "params.h"

struct GroupParams {
  const Pick* picks;
  u32 n, n_experts, n_picked;
  u32 block; // slots of a block
  u32* starts;    // (n_experts + 1)
  u32* blocks;    // (n_blocks, 2): expert or ~0, first slot
  u32* slot_row;  // (n): the row of each slot
  u32* slot_of;   // (n): the slot of each pick
  u32 n_blocks, pad;
};
static_assert(sizeof(GroupParams) == 64, "launch/expert.rs");

#define THREADS 1024
#define EXPERTS_MAX 4096 // limits::EXPERTS_MAX
#define OWN (EXPERTS_MAX / THREADS)

// Inclusive sum over the block, through `room` (32 words).
__device__ __forceinline__ u32 block_scan(u32 v, u32* room) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    u32 other = __shfl_up_sync(0xffffffffu, v, o);
    if (lane >= o) v += other;
  }
  __syncthreads();
  if (lane == 31) room[warp] = v;
  __syncthreads();
  for (u32 w = 0; w < warp; w++) v += room[w];
  return v;
}

// One block. Counts, their running sums, and the list of blocks of slots that the GEMMs walk. A thread has OWN experts.
extern "C" __global__ void __launch_bounds__(THREADS) group_count(const __grid_constant__ GroupParams p) {
  __shared__ u32 count[EXPERTS_MAX], room[32], used;
  const u32 thread = threadIdx.x;
#pragma unroll
  for (u32 i = 0; i < OWN; i++) count[thread * OWN + i] = 0;
  __syncthreads();
  // Integer sums: the order of atomics does not show.
  for (u32 i = thread; i < p.n; i += THREADS) atomicAdd(&count[p.picks[i].expert], 1u);
  __syncthreads();
  u32 mine = 0, blocks = 0;
#pragma unroll
  for (u32 i = 0; i < OWN; i++) {
    mine += count[thread * OWN + i];
    blocks += (count[thread * OWN + i] + p.block - 1) / p.block;
  }
  const u32 slot_end = block_scan(mine, room), block_end = block_scan(blocks, room);
  u32 slot = slot_end - mine, block = block_end - blocks;
  for (u32 e = thread * OWN; e < min((thread + 1) * OWN, p.n_experts); e++) {
    p.starts[e] = slot;
    const u32 end = slot + count[e];
    for (; slot < end; slot = min(slot + p.block, end)) {
      p.blocks[2 * block] = e;
      p.blocks[2 * block++ + 1] = slot;
    }
  }
  if (thread == THREADS - 1) {
    p.starts[p.n_experts] = slot_end;
    used = block_end;
  }
  __syncthreads();
  for (u32 b = used + thread; b < p.n_blocks; b += THREADS) p.blocks[2 * b] = ~0u;
}

// A block of 256 threads an expert: each thread has a run of the picks, so that slots keep the picks' order.
extern "C" __global__ void __launch_bounds__(256) group_place(const __grid_constant__ GroupParams p) {
  __shared__ u32 room[32];
  const u32 e = blockIdx.x, per = (p.n + 255) / 256, from = min(threadIdx.x * per, p.n), to = min(from + per, p.n);
  u32 mine = 0;
  for (u32 i = from; i < to; i++) mine += p.picks[i].expert == e;
  u32 slot = p.starts[e] + block_scan(mine, room) - mine;
  for (u32 i = from; i < to; i++) {
    if (p.picks[i].expert != e) continue;
    p.slot_of[i] = slot;
    p.slot_row[slot++] = i / p.n_picked;
  }
}

struct CombineParams {
  const Pick* picks;
  const u32* slot_of;
  const f32* down; // (slots, width)
  f32* x;          // (rows, width), added to
  u64 x_row;
  u32 n_picked, width;
  u32 first_expert, end_expert; // picks of others are left out
};
static_assert(sizeof(CombineParams) == 56, "launch/expert.rs");

#define PICKED_MAX 64 // limits::EXPERTS_PICKED_MAX

// x[row] += sum of weight * down[slot], in the order of the slots, which is the experts': the sum is the same whether all
// experts are added at once or some at a time, as they come into memory. Grid (width / 256, rows).
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineParams p) {
  __shared__ u32 order[PICKED_MAX]; // picks of the row by slot
  const u32 k = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, first = row * p.n_picked;
  for (u32 i = threadIdx.x; i < p.n_picked; i += 256) {
    const u32 slot = p.slot_of[first + i];
    u32 before = 0;
    for (u32 j = 0; j < p.n_picked; j++) before += p.slot_of[first + j] < slot;
    order[before] = first + i;
  }
  __syncthreads();
  if (k >= p.width) return;
  f32 sum = p.x[row * p.x_row + k];
  for (u32 i = 0; i < p.n_picked; i++) {
    const Pick pick = p.picks[order[i]];
    if (pick.expert < p.first_expert || pick.expert >= p.end_expert) continue;
    sum = fmaf(pick.weight, p.down[p.slot_of[order[i]] * (u64)p.width + k], sum);
  }
  p.x[row * p.x_row + k] = sum;
}
