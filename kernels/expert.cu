// Routed experts for few rows: each (row, pick) reads its expert's matrices through the layer's table of base addresses,
// for one codec of gate and up, or of down (-DCODEC=CODEC_..).
//
// Bytes: an expert's matrices once for every pick of it; picks of one expert by neighbouring rows meet in L2.
// Lane operations a weight: gemv.cuh's head. `expert_down` runs one sum over the columns of all of a row's picks, each
// multiplied by its weight, and adds it to the residual: no scratch, no atomics, one fixed order.
#include "gemv.cuh"
#include "swiglu.cuh"

struct GateUpParams {
  Matrix gate, up;  // base unused
  const u64* table; // (n_experts, 3): gate, up, down
  const Pick* picks;
  const f32* x;
  const QGroup* q;
  f32* act;      // (rows * n_picked, width)
  QGroup* act_q; // null: not wanted
  u64 x_row, q_row;
  u32 n_picked, pad;
};
static_assert(sizeof(GateUpParams) == 200, "launch/expert.rs");

template <bool EXACT> __device__ __forceinline__ void gate_up(const GateUpParams& p) {
  const u32 pick = blockIdx.y;
  const u64* base = p.table + 3 * (u64)__ldg(&p.picks[pick].expert);
  const Planes gate(p.gate, __ldg(base)), up(p.up, __ldg(base + 1));
  const XRows x = {p.x, p.x_row, p.q, p.q_row};
  const u32 row[1] = {pick / p.n_picked};
  const u64 q_row = gate.rows / GROUP;
  swiglu<1, EXACT>(gate, up, x, row, 1, p.act + pick * (u64)gate.rows, p.act_q ? p.act_q + pick * q_row : nullptr);
}

extern "C" __global__ void __launch_bounds__(256, 2) expert_gate_up(const __grid_constant__ GateUpParams p) {
  gate_up<false>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) expert_gate_up_exact(const __grid_constant__ GateUpParams p) {
  gate_up<true>(p);
}

struct DownParams {
  Matrix down; // base unused
  const u64* table;
  const Pick* picks;
  const f32* act;
  const QGroup* act_q;
  f32* x; // (rows, hidden), added to
  u64 x_row;
  u32 n_picked, pad;
};
static_assert(sizeof(DownParams) == 120, "launch/expert.rs");

#define WARPS 8

template <bool EXACT> __device__ __forceinline__ void down(const DownParams& p) {
  __shared__ f32 sums[WARPS][1][TILE_ROWS];
  const u32 tile = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32;
  const u32 width = p.down.cols;
  const XRows x = {p.act, width, p.act_q, width / GROUP};
  Dot<CODEC, 1, EXACT> dot;
  dot.clear();
  const u32 steps = (width + dot.COLS - 1) / dot.COLS, all = steps * p.n_picked;
#pragma unroll 2
  for (u32 i = warp; i < all; i += WARPS) {
    const u32 at[1] = {row * p.n_picked + i / steps};
    const Pick pick = p.picks[at[0]];
    const Planes w(p.down, __ldg(p.table + 3 * (u64)pick.expert + 2));
    dot.step(w, tile, i % steps, x, at, pick.weight);
  }
  dot.reduce(sums[warp]);
  __syncthreads();
  const u32 out = tile * TILE_ROWS + threadIdx.x;
  if (threadIdx.x >= TILE_ROWS || out >= p.down.rows) return;
  f32 sum = sums[0][0][threadIdx.x];
#pragma unroll
  for (int s = 1; s < WARPS; s++) sum += sums[s][0][threadIdx.x];
  p.x[row * p.x_row + out] += sum;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) expert_down(const __grid_constant__ DownParams p) {
  down<false>(p);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) expert_down_exact(const __grid_constant__ DownParams p) {
  down<true>(p);
}
