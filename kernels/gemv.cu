// Products with few activation rows: y = W x, or silu(G x) * (U x), for one codec (-DCODEC=CODEC_..).
//
// Bytes: the matrix once for every B rows; activations 2.5 bytes (quantized) or 4 a column and block, from L1 and L2.
// Lane operations a weight: gemv.cuh's head; few.cuh's for 2 to 8 rows of a quantized codec, whose blocks have 8 warps and
// 2 tiles, 1 where there are few, or 2 of both matrices. A block of `product` has one tile, its 4 warps every fourth step of the
// columns; a block of `swiglu` has two tiles of both matrices, so that its 32 outputs are one quantization group.
#include "gemv.cuh"

struct ProductParams {
  Matrix w;
  const f32* x;
  const QGroup* q;
  f32* y;
  u64 w_step, x_step, q_step, y_step; // a head: bytes, elements, groups, elements
  u64 x_row, q_row, y_row;            // a row: elements, groups, elements
  u32 rows, add;
};
static_assert(sizeof(ProductParams) == 152, "launch/gemv.rs");

// A matrix with few tiles leaves most multiprocessors idle: its blocks have more warps, each with fewer columns.
constexpr int WARPS = 4, WARPS_WIDE = codec_row(CODEC).part == DENSE ? 16 : 8;

// Puts a result away.
__device__ __forceinline__ void put(const ProductParams& p, u32 head, u32 row, u32 out, f32 sum) {
  f32* y = p.y + head * p.y_step + row * p.y_row + out;
  *y = p.add ? *y + sum : sum;
}

__device__ __forceinline__ XRows activations(const ProductParams& p, u32 head) {
  return {p.x + head * p.x_step, p.x_row, p.q + head * p.q_step, p.q_row};
}

template <int B, bool EXACT, int W> __device__ __forceinline__ void product(const ProductParams& p) {
  const u32 tile = blockIdx.x, head = blockIdx.y, first = blockIdx.z * B, warp = threadIdx.x / 32;
  const Planes w(p.w, p.w.base + head * p.w_step);
  const XRows x = activations(p, head);
  u32 row[B];
#pragma unroll
  for (int b = 0; b < B; b++) row[b] = min(first + b, p.rows - 1);
  typedef Dot<CODEC, B, EXACT> Dots;
  Dots dot;
  dot.clear();
  const u32 steps = dot.steps(w);
#pragma unroll(B == 1 ? 2 : 1)
  for (u32 s = warp; s < steps; s += W) dot.step(w, tile, s, x, row, 1.f);
  if constexpr (Dots::CHAINS) {
    __shared__ float4 left[W][32];
    __shared__ __align__(16) f32 sums[TILE_ROWS];
    dot.leave(left);
    __syncthreads();
    if (warp > 0) return;
    Dots::template finish<W>(left, 0, sums);
    __syncwarp();
    const u32 out = tile * TILE_ROWS + threadIdx.x;
    if (threadIdx.x < TILE_ROWS && out < w.rows) put(p, head, first, out, sums[threadIdx.x]);
  } else {
    __shared__ f32 sums[W][B][TILE_ROWS];
    dot.reduce(sums[warp]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < B * TILE_ROWS; i += 32 * W) {
      const u32 b = i / TILE_ROWS, r = i % TILE_ROWS, out = tile * TILE_ROWS + r;
      if (first + b >= p.rows || out >= w.rows) continue;
      f32 sum = sums[0][b][r];
#pragma unroll
      for (int s = 1; s < W; s++) sum += sums[s][b][r];
      put(p, head, first + b, out, sum);
    }
  }
}

// BLOCKS to an SM give the compiler its registers: left to itself it spills a few bytes to gain a block.
#define PRODUCT(name, B, EXACT, W, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * W, BLOCKS) name(const __grid_constant__ ProductParams p) { \
    product<B, EXACT, W>(p);                                                             \
  }

PRODUCT(gemv_r1, 1, false, WARPS, 4)
PRODUCT(gemv_w1, 1, false, WARPS_WIDE, 1)
PRODUCT(gemv_exact, 4, true, WARPS, 2)
#if CODEC <= CODEC_F8E4M3
PRODUCT(gemv_r2, 2, false, WARPS, 4)
PRODUCT(gemv_r4, 4, false, WARPS, 3)
PRODUCT(gemv_r8, 8, false, WARPS, 2)
PRODUCT(gemv_w2, 2, false, WARPS_WIDE, 1)
PRODUCT(gemv_w4, 4, false, WARPS_WIDE, 1)
PRODUCT(gemv_w8, 8, false, WARPS_WIDE, 1)
#else
#include "few.cuh"

// T tiles a block; W is what the kernel of one row has.
template <int T, int W> __device__ __forceinline__ void few(const ProductParams& p) {
  typedef Few<CODEC, T, W, 1> Dots;
  __shared__ typename Dots::Left left;
  const u32 head = blockIdx.y;
  const Planes plane(p.w, p.w.base + head * p.w_step);
  const Planes w[1] = {plane};
  u32 tile[T];
#pragma unroll
  for (int i = 0; i < T; i++) tile[i] = min(blockIdx.x * T + i, plane.tiles - 1);
  Dots dots;
  dots.run(w, tile, activations(p, head), p.rows);
  dots.leave(left);
  __syncthreads();
#pragma unroll
  for (u32 i = threadIdx.x; i < T * 8 * TILE_ROWS; i += 256) {
    const u32 at = i / (8 * TILE_ROWS), b = i / TILE_ROWS % 8, r = i % TILE_ROWS;
    const u32 out = (blockIdx.x * T + at) * TILE_ROWS + r;
    if (b < p.rows && out < plane.rows) put(p, head, b, out, Dots::finish(left, at, b, r));
  }
}

constexpr int FEW_BLOCKS = Few<CODEC, 1, 1, 1>::BLOCKS;

#define FEW(name, T, W)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, FEW_BLOCKS) name(const __grid_constant__ ProductParams p) { \
    few<T, W>(p);                                                                                       \
  }

FEW(gemv_r8, 2, WARPS)
FEW(gemv_w8, 1, WARPS_WIDE)
#endif

struct SwigluParams {
  Matrix gate, up;
  const f32* x;
  const QGroup* q;
  f32* act;
  QGroup* act_q; // null: not wanted
  u64 x_row, q_row;
  u32 rows, pad;
};
static_assert(sizeof(SwigluParams) == 184, "launch/gemv.rs");

#include "swiglu.cuh"

template <int B, bool EXACT> __device__ __forceinline__ void swiglu_rows(const SwigluParams& p) {
  const u32 first = blockIdx.y * B;
  const XRows x = {p.x, p.x_row, p.q, p.q_row};
  const Planes gate(p.gate, p.gate.base), up(p.up, p.up.base);
  u32 row[B];
#pragma unroll
  for (int b = 0; b < B; b++) row[b] = min(first + b, p.rows - 1);
  const u64 q_row = gate.rows / GROUP;
  swiglu<B, EXACT>(gate, up, x, row, min((u32)B, p.rows - first), p.act + first * (u64)gate.rows,
                   p.act_q ? p.act_q + first * q_row : nullptr);
}

#define SWIGLU(name, B, EXACT, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) name(const __grid_constant__ SwigluParams p) { \
    swiglu_rows<B, EXACT>(p);                                                    \
  }

SWIGLU(swiglu_r1, 1, false, 2)
SWIGLU(swiglu_exact, 4, true, 1)
#if CODEC <= CODEC_F8E4M3
SWIGLU(swiglu_r2, 2, false, 2)
SWIGLU(swiglu_r4, 4, false, 1)
SWIGLU(swiglu_r8, 8, false, 1)
#else
extern "C" __global__ void __launch_bounds__(256, FEW_BLOCKS) swiglu_r8(const __grid_constant__ SwigluParams p) {
  const Planes gate(p.gate, p.gate.base), up(p.up, p.up.base);
  const XRows x = {p.x, p.x_row, p.q, p.q_row};
  swiglu_few(gate, up, x, p.rows, p.act, p.act_q);
}
#endif
