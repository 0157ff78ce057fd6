// Attention of rows that each stand for themselves, over pages of cached rows: decode, and in exact runs prefill too.
// One kernel for grouped-query attention and absorbed latent attention (whose one key head's values are its keys).
//
// A row's keys are cut at absolute positions into segments of whole pages whose length depends on the row's position
// alone. A block takes one (row, up to NQ query heads of one key head, segment), goes through the pages that the mask
// shows with a running softmax (Milakov & Gimelshein, arXiv:1805.02867), and writes a part, which merge.cu adds up in order.
//
// Bytes: each seen cached row once a block, i.e. ceil(group / NQ) times from L2 and once from memory. Operations: d + dv
// fused multiply-adds a (query head, key), about 1.6 lane operations each with what surrounds them.
//
// Variants: ATTEND, cached bits and value columns a thread: 81 82 84 161 162 164 321 322 324. Kernels: attend_qN, N query
// heads a block.
#include "decode.cuh"

#define THREADS 128
#define COLUMNS (ATTEND % 10)

#if ATTEND / 10 == 8
#define KV KV_I8
#include "tile_coded.cuh"
#elif ATTEND / 10 == 16
#define KV KV_F16
#include "tile.cuh"
#else
#define KV KV_F32
#include "tile.cuh"
#endif

// Waits for the loads of a tile, all threads' ones.
__device__ inline void tiles_arrive() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
}

// One page's scores into weights, and the running maximum, sum and factor of each query. A warp a query, a lane a key.
template <int NQ>
__device__ inline void soften(const MaskParams& mask, u32 i, u32 index, u32 slots, f32* scores, f32* top, f32* sum,
                              f32* factor) {
  u32 lane = threadIdx.x % 32;
  bool seen = lane < slots && sees(mask, i, position_of(mask, index, lane));
#pragma unroll
  for (int n = threadIdx.x / 32; n < NQ; n += THREADS / 32) {
    f32 s = seen ? scores[n * PAGE_TOKENS + lane] : NONE_SEEN;
    f32 m = s;
#pragma unroll
    for (int w = 16; w > 0; w /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, w));
    f32 before = top[n], after = fmaxf(before, m);
    f32 p = seen && after != NONE_SEEN ? expf(s - after) : 0;
    f32 total = p;
#pragma unroll
    for (int w = 16; w > 0; w /= 2) total += __shfl_xor_sync(~0u, total, w);
    scores[n * PAGE_TOKENS + lane] = p;
    __syncwarp();
    if (lane == 0) {
      f32 c = after == NONE_SEEN ? 1 : expf(before - after);
      factor[n] = c;
      top[n] = after;
      sum[n] = sum[n] * c + total;
    }
  }
}

// Weighted values: a thread owns C columns of every query.
template <int NQ, int C>
__device__ inline void weigh(const Tile& values, u32 slots, const f32* scores, const f32* factor, f32 (&acc)[NQ][C]) {
  u32 column = threadIdx.x * C;
#pragma unroll
  for (int n = 0; n < NQ; n++) {
#pragma unroll
    for (int c = 0; c < C; c++) acc[n][c] *= factor[n];
  }
  for (u32 j = 0; j < slots; j += 4) { // rows from `slots` on are zero
    f32 v[4][C];
#pragma unroll
    for (int k = 0; k < 4; k++) values.columns<C>(j + k, column, v[k]);
#pragma unroll
    for (int n = 0; n < NQ; n++) {
      float4 p = *(const float4*)(scores + n * PAGE_TOKENS + j);
#pragma unroll
      for (int c = 0; c < C; c++) {
        acc[n][c] = fmaf(p.x, v[0][c], acc[n][c]);
        acc[n][c] = fmaf(p.y, v[1][c], acc[n][c]);
        acc[n][c] = fmaf(p.z, v[2][c], acc[n][c]);
        acc[n][c] = fmaf(p.w, v[3][c], acc[n][c]);
      }
    }
  }
}

// Shared memory: queries (NQ, q_width) f32, keys, values; sized by the launch wrapper.
extern __shared__ __align__(16) unsigned char room[];

template <int NQ, int C>
__device__ inline void attend(const AttendParams& p) {
  __shared__ __align__(16) f32 scores[NQ * PAGE_TOKENS];
  __shared__ f32 top[NQ], sum[NQ], factor[NQ];
  u32 group = p.heads / p.kv_heads, blocks_each = (group + NQ - 1) / NQ;
  u32 row = blockIdx.z, kv_head = blockIdx.y / blocks_each, first = blockIdx.y % blocks_each * NQ;
  u32 head = kv_head * group + first, n_heads = min((u32)NQ, group - first);
  const u32 i = p.rows.position[row];
  const Cut cut(p, i);
  const u32 pages = cut.pages, each = cut.each, segments = cut.segments;
  if (blockIdx.x >= segments) return;

  f32* q = (f32*)room;
  const u32 q_width = Tile::of_keys(room, p.d, p.dv, p.latent).q_width();
  const Tile keys = Tile::of_keys(room + NQ * q_width * 4, p.d, p.dv, p.latent);
  const Tile values = Tile::of_values(keys, p.dv, p.latent);
  for (u32 e = threadIdx.x; e < NQ * q_width; e += THREADS) {
    u32 n = e / q_width, c = keys.q_column(e % q_width);
    bool real = n < n_heads && c < p.d;
    q[e] = real ? p.q[((u64)row * p.heads + head + n) * p.d + c] * p.scale : 0;
  }
  const u64* table = p.rows.pages + p.rows.table[row];

  for (u32 s = blockIdx.x; s < segments; s += gridDim.x) {
    f32 acc[NQ][C];
#pragma unroll
    for (int n = 0; n < NQ; n++) {
#pragma unroll
      for (int c = 0; c < C; c++) acc[n][c] = 0;
    }
    if (threadIdx.x < NQ) {
      top[threadIdx.x] = NONE_SEEN;
      sum[threadIdx.x] = 0;
    }
    u32 end = min((s + 1) * each, pages);
    for (u32 index = next_page(p.mask, i, s * each); index < end; index = next_page(p.mask, i, index + 1)) {
      if (!sees_page(p.mask, i, index)) continue;
      u32 slots = slots_to(p.mask, index, i);
      const Page page(table[index] + p.layer_offset, p.kv_heads, p.d, p.dv, p.latent);
      keys.load_keys<THREADS>(page, kv_head, slots);
      if (!p.latent) values.load_values<THREADS>(page, kv_head, slots);
      tiles_arrive();
      keys.score<NQ>(q, q_width, scores);
      __syncthreads();
      soften<NQ>(p.mask, i, index, slots, scores, top, sum, factor);
      __syncthreads();
      if (threadIdx.x * C < p.dv) weigh<NQ, C>(values, slots, scores, factor, acc);
      __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x * C < p.dv) {
#pragma unroll
      for (int n = 0; n < NQ; n++) {
        if (n >= n_heads) continue;
        f32 by = segments == 1 ? divisor(top[n], sum[n], p.sinks, head + n) : 1;
        f32* to = segments == 1 ? (f32*)room + n * p.dv : p.parts + part_at(p, row, head + n, s) * p.dv;
#pragma unroll
        for (int c = 0; c < C; c++) {
          if (threadIdx.x * C + c < p.dv) to[threadIdx.x * C + c] = acc[n][c] * by;
        }
      }
    }
    if (segments > 1 && threadIdx.x < n_heads) {
      ((float2*)p.part_sums)[part_at(p, row, head + threadIdx.x, s)] = make_float2(top[threadIdx.x], sum[threadIdx.x]);
    }
    __syncthreads();
  }
  if (segments == 1) { // results lie where the queries and the tile were
    u64 at = ((u64)row * p.heads + head) * p.dv;
    for (u32 i = threadIdx.x; i < n_heads * p.dv; i += THREADS) put(p, at + i, ((f32*)room)[i]);
  }
}

// The number of blocks to an SM gives the compiler its registers: left to itself it spills a few bytes to gain a block.
#define KERNEL(NQ)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 3) attend_q##NQ(const __grid_constant__ AttendParams p) { \
    attend<NQ, COLUMNS>(p);                                                                                     \
  }
KERNEL(1) KERNEL(2) KERNEL(4) KERNEL(8)
