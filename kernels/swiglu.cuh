// silu(G x) * (U x) for 32 columns of the result: what the dense feed-forward and the experts share.
#pragma once
#include "few.cuh"

// Column `column`, a lane's, of row `b`.
__device__ __forceinline__ void put_swiglu(u32 width, u32 b, u32 column, f32 g, f32 u, f32* act, QGroup* act_q) {
  const f32 a = silu(g) * u;
  if (column < width) act[b * (u64)width + column] = a;
  if (act_q) quantize_group(a, act_q + b * (u64)(width / GROUP) + column / GROUP);
}

// A block of 256 threads computes columns 32*blockIdx.x.. of `act` (n, gate.rows) and quantizes them if `act_q` is given
// (then gate.rows is in whole groups). Warps: matrix w/2%2, tile w/4, half of the steps w%2.
template <int B, bool EXACT>
__device__ __forceinline__ void swiglu(const Planes& gate, const Planes& up, const XRows& x, const u32 (&row)[B], u32 n,
                                       f32* act, QGroup* act_q) {
  typedef Dot<CODEC, B, EXACT> Dots;
  __shared__ __align__(16) f32 sums[8][B][TILE_ROWS];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x * 2 + warp / 4;
  const bool is_up = warp / 2 % 2 == 1;
  // One object, chosen by selects: two copies of the loop would double the code.
  Planes w = gate;
  if (is_up) w = up;
  Dots dot;
  dot.clear();
  if (tile < w.tiles) {
    const u32 steps = dot.steps(w);
#pragma unroll(B == 1 ? 2 : 1)
    for (u32 s = warp % 2; s < steps; s += 2) dot.step(w, tile, s, x, row, 1.f);
  }
  if constexpr (Dots::CHAINS) {
    __shared__ float4 left[8][32];
    dot.leave(left);
    __syncthreads();
    if (warp % 2 == 0) Dots::template finish<2>(left, warp, sums[warp][0]);
  } else {
    dot.reduce(sums[warp]);
  }
  __syncthreads();
  // Warp b has row b: lane = column.
  if (warp >= n) return;
  const u32 column = blockIdx.x * 32 + lane, at = 4 * (lane / 16), r = lane % 16;
  f32 g = sums[at][warp % B][r], u = sums[at + 2][warp % B][r];
  if constexpr (!Dots::CHAINS) g += sums[at + 1][warp % B][r], u += sums[at + 3][warp % B][r];
  put_swiglu(gate.rows, warp, column, g, u, act, act_q);
}

// The same of 2 to 8 rows of a quantized codec. A warp has every eighth group of the two tiles of both matrices.
__device__ __forceinline__ void swiglu_few(const Planes& gate, const Planes& up, const XRows& x, u32 n, f32* act,
                                           QGroup* act_q) {
  typedef Few<CODEC, 4, 2, 2> Dots;
  __shared__ typename Dots::Left left;
  const u32 last = gate.tiles - 1, first = min(blockIdx.x * 2, last), second = min(blockIdx.x * 2 + 1, last);
  const Planes w[2] = {gate, up};
  const u32 tile[4] = {first, second, first, second};
  Dots dots;
  dots.run(w, tile, x, n);
  dots.leave(left);
  __syncthreads();
  const u32 b = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (b >= n) return;
  const f32 g = Dots::finish(left, lane / 16, b, lane % 16), u = Dots::finish(left, 2 + lane / 16, b, lane % 16);
  put_swiglu(gate.rows, b, blockIdx.x * 32 + lane, g, u, act, act_q);
}
