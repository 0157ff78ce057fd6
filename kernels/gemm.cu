// Products with many activation rows: y = W x, or silu(G x) * (U x), dense or by routed expert, for one codec
// (-DCODEC=CODEC_..). gemm.cuh's head has bytes and operations.
#include "gemm.cuh"

struct GemmParams {
  Matrix w;
  const u16* x;      // (heads, rows, pitch) from half_rows
  const f32* factor; // (heads, rows)
  f32* y;
  u64 w_step, x_step, factor_step, y_step, y_row; // a head: bytes, elements..; a row: elements
  u32 pitch, rows, add, pad;
};
static_assert(sizeof(GemmParams) == 144, "launch/gemm.rs");

// The two tiles of a warp (or, split, of the block), from the block's first on.
template <int NT> __device__ __forceinline__ u32 first_of_pair() {
  return blockIdx.x * block_tiles(NT) + (is_split(NT) ? 0 : threadIdx.x / 32 * 2);
}

// Grid (tiles / block_tiles, rows / N, heads).
template <int NT> __device__ __forceinline__ void gemm_rows(const GemmParams& p) {
  extern __shared__ __align__(16) u8 shared[];
  const u32 head = blockIdx.z, first = blockIdx.y * 8 * NT, n = min(p.rows - first, 8u * NT);
  const Planes w(p.w, p.w.base + head * p.w_step);
  const u32 tile = first_of_pair<NT>(), r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  f32 acc[2][NT][4];
  gemm<CODEC, NT>(w, w, tile, tile + 1, {p.x + head * p.x_step, p.pitch, nullptr, first, n}, shared, acc);
  EACH_SUM(NT) {
    const u32 i = 8 * nt + 2 * t + c % 2;
    if (i >= n) continue;
    const f32 factor = p.factor[head * p.factor_step + first + i] * Weights<CODEC>::FACTOR;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 out = (tile + j) * TILE_ROWS + r + 8 * (c / 2);
      if (out >= w.rows) continue;
      f32* y = p.y + head * p.y_step + (first + i) * p.y_row + out;
      const f32 v = acc[j][nt][c] * factor;
      *y = p.add ? *y + v : v;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 3) gemm_n64(const __grid_constant__ GemmParams p) { gemm_rows<8>(p); }
extern "C" __global__ void __launch_bounds__(128, 5) gemm_n16(const __grid_constant__ GemmParams p) { gemm_rows<2>(p); }

// What the kernels of one SwiGLU and of the routed ones share. Routed: a block finds its expert in `blocks`.
struct GroupedParams {
  Matrix a, b;        // gate and up; or down and unused. Base unused when routed
  const u64* table;   // (n_experts, 3): gate, up, down; null: not routed
  const u32* starts;  // (n_experts + 1): an expert's slots
  const u32* blocks;  // (.., 2): expert (~0: none) and first slot of each block of N slots
  const u32* gather;  // the activation row of each slot; null: the slot itself
  const u16* x;       // from half_rows
  const f32* factor;
  f32* y;             // (slots, y_row), from row 16*first_tile of the matrix on
  u64 y_row;          // elements
  u32 pitch, rows;    // rows: when not routed
  u32 first_tile, end_tile;
  u32 first_expert, end_expert; // others are left out: their weights may be elsewhere
};
static_assert(sizeof(GroupedParams) == 216, "launch/gemm.rs");

struct Slots {
  u32 expert, first, n;
};

// The slots of this block; n = 0 when there are none.
__device__ __forceinline__ Slots slots_of_block(const GroupedParams& p, u32 size) {
  if (!p.table) return {0, blockIdx.y * size, min(p.rows - blockIdx.y * size, size)};
  const u32 expert = p.blocks[2 * blockIdx.y], first = p.blocks[2 * blockIdx.y + 1];
  // No block at all (~0) is outside too.
  if (expert < p.first_expert || expert >= p.end_expert) return {0, 0, 0};
  return {expert, first, min(p.starts[expert + 1] - first, size)};
}

// Grid (tiles of gate / (block_tiles / 2), blocks). y = silu(G x) * (U x).
template <int NT> __device__ __forceinline__ void gate_up(const GroupedParams& p) {
  extern __shared__ __align__(16) u8 shared[];
  const Slots s = slots_of_block(p, 8 * NT);
  if (s.n == 0) return;
  const u64* base = p.table + 3 * (u64)s.expert;
  const Planes gate(p.a, p.table ? base[0] : p.a.base), up(p.b, p.table ? base[1] : p.b.base);
  const u32 tile = first_of_pair<NT>() / 2, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Gather x = {p.x, p.pitch, p.gather, s.first, s.n};
  f32 acc[2][NT][4];
  gemm<CODEC, NT>(gate, up, tile, tile, x, shared, acc);
  EACH_SUM(NT) {
    const u32 i = 8 * nt + 2 * t + c % 2, out = tile * TILE_ROWS + r + 8 * (c / 2);
    if (i >= s.n || out >= gate.rows) continue;
    const f32 factor = p.factor[x.row(i)] * Weights<CODEC>::FACTOR;
    p.y[(s.first + i) * p.y_row + out] = silu(acc[0][nt][c] * factor) * (acc[1][nt][c] * factor);
  }
}

extern "C" __global__ void __launch_bounds__(128, 3) gate_up_n64(const __grid_constant__ GroupedParams p) {
  gate_up<8>(p);
}
extern "C" __global__ void __launch_bounds__(128, 5) gate_up_n16(const __grid_constant__ GroupedParams p) {
  gate_up<2>(p);
}

// Grid (tiles from first_tile to end_tile / block_tiles, blocks). y = D x for every slot: a slice of its columns, since
// all of them for all slots may be more memory than there is.
template <int NT> __device__ __forceinline__ void down(const GroupedParams& p) {
  extern __shared__ __align__(16) u8 shared[];
  const Slots s = slots_of_block(p, 8 * NT);
  if (s.n == 0) return;
  const Planes w(p.a, p.table[3 * (u64)s.expert + 2]);
  const u32 tile = p.first_tile + first_of_pair<NT>(), r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 from = p.first_tile * TILE_ROWS, to = min(p.end_tile * TILE_ROWS, w.rows);
  f32 acc[2][NT][4];
  gemm<CODEC, NT>(w, w, tile, tile + 1, {p.x, p.pitch, nullptr, s.first, s.n}, shared, acc);
  EACH_SUM(NT) {
    const u32 i = 8 * nt + 2 * t + c % 2;
    if (i >= s.n) continue;
    const f32 factor = p.factor[s.first + i] * Weights<CODEC>::FACTOR;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 out = (tile + j) * TILE_ROWS + r + 8 * (c / 2);
      if (out < to) p.y[(s.first + i) * p.y_row + (out - from)] = acc[j][nt][c] * factor;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 3) down_n64(const __grid_constant__ GroupedParams p) { down<8>(p); }
extern "C" __global__ void __launch_bounds__(128, 5) down_n16(const __grid_constant__ GroupedParams p) { down<2>(p); }
