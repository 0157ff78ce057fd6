// Picks from logits that a product made: many rows. A warp a row.
//
// Bytes: the logits once. Operations: about n_experts/32 * 30 for the scores and 60 + n_experts a pick, a warp.
#include "router.cuh"

// Shared memory: scores (experts), choice (experts), groups (groups).
extern __shared__ f32 room[];

extern "C" __global__ void __launch_bounds__(WARP) router_pick(const __grid_constant__ RouterParams p) {
  __shared__ u32 picks[PICKED_MAX];
  const u32 row = blockIdx.x;
  pick_row(p, row, p.logits + (u64)row * p.experts, room, room + p.experts, room + 2 * p.experts, picks);
}
