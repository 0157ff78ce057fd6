// silu(G x) * (U x) for 32 columns of the result: what the dense feed-forward and the experts share.
#pragma once
#include "gemv.cuh"

// A block of 256 threads computes columns 32*blockIdx.x.. of `act` (n, gate.rows) and quantizes them if `act_q` is given
// (then gate.rows is in whole groups). Warps: matrix w/2%2, tile w/4, half of the steps w%2.
template <int B, bool EXACT>
__device__ __forceinline__ void swiglu(const Planes& gate, const Planes& up, const XRows& x, const u32 (&row)[B], u32 n,
                                       f32* act, QGroup* act_q) {
  __shared__ f32 sums[8][B][TILE_ROWS];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x * 2 + warp / 4;
  const bool is_up = warp / 2 % 2 == 1;
  // One object, chosen by selects: two copies of the loop would double the code.
  Planes w = gate;
  if (is_up) w = up;
  Dot<CODEC, B, EXACT> dot;
  dot.clear();
  if (tile < w.tiles) {
    const u32 steps = dot.steps(w);
#pragma unroll(B == 1 ? 2 : 1)
    for (u32 s = warp % 2; s < steps; s += 2) dot.step(w, tile, s, x, row, 1.f);
  }
  dot.reduce(sums[warp]);
  __syncthreads();
  // Warp b has row b: lane = column.
  if (warp >= n) return;
  const u32 column = blockIdx.x * 32 + lane, at = 4 * (lane / 16), r = lane % 16;
  f32 g = sums[at][warp % B][r] + sums[at + 1][warp % B][r];
  f32 u = sums[at + 2][warp % B][r] + sums[at + 3][warp % B][r];
  f32 a = silu(g) * u;
  if (column < gate.rows) act[warp * (u64)gate.rows + column] = a;
  if (act_q) quantize_group(a, act_q + warp * (u64)(gate.rows / GROUP) + blockIdx.x);
}
