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
// Variants: ATTEND, cached bits and value columns a thread: 161 162 164 321 322 324. Kernels: attend_qN, N query heads a
// block.
#include "decode.cuh"
#include <cuda_fp16.h>

#define THREADS 128
#define COLUMNS (ATTEND % 10)

#if ATTEND / 10 == 16
#define KV KV_F16
#else
#define KV KV_F32
#endif
#if KV == KV_F16
typedef __half Element;
#else
typedef f32 Element;
#endif
// Elements of a 16-byte load.
#define PER16 (16 / sizeof(Element))

// Bytes from one row of a tile to the next: whole 64-byte chunks, an odd number of them, so that the two rows that a
// quarter of a warp reads at once lie in different banks.
__device__ inline u32 tile_stride(u32 width) {
  u32 bytes = (width * (u32)sizeof(Element) + 63) / 64 * 64;
  return bytes % 128 == 0 ? bytes + 64 : bytes;
}

// Rows `0..slots` of `(PAGE_TOKENS, width)` to shared memory; the rest of the rows, and columns from `width` to the end of
// the last chunk, become zero: what lies there may be anything, and zero weights do not silence a NaN.
__device__ inline void load_tile(unsigned char* tile, u32 stride, const Element* from, u32 width, u32 slots) {
  u32 row_bytes = width * (u32)sizeof(Element);
  if (row_bytes % 16 == 0) {
    u32 chunks = row_bytes / 16, padded = (row_bytes + 63) / 64 * 4;
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * padded; i += THREADS) {
      u32 row = i / padded, c = i % padded;
      unsigned char* to = tile + row * stride + c * 16;
      if (row < slots && c < chunks) {
        u32 at = (u32)__cvta_generic_to_shared(to);
        const void* source = (const char*)from + (u64)row * row_bytes + c * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(source) : "memory");
      } else {
        *(uint4*)to = make_uint4(0, 0, 0, 0);
      }
    }
  } else {
    u32 padded = (row_bytes + 63) / 64 * 64 / (u32)sizeof(Element);
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * padded; i += THREADS) {
      u32 row = i / padded, c = i % padded;
      bool real = row < slots && c < width;
      ((Element*)(tile + row * stride))[c] = real ? from[row * width + c] : Element(0.0f);
    }
  }
}

// Waits for the loads of load_tile, all threads' ones.
__device__ inline void tiles_arrive() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
}

// 16 bytes of a tile as f32.
__device__ inline void widen(const unsigned char* at, f32 (&v)[PER16]) {
  uint4 raw = *(const uint4*)at;
#if KV == KV_F16
  const __half2* h = (const __half2*)&raw;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 f = __half22float2(h[i]);
    v[2 * i] = f.x;
    v[2 * i + 1] = f.y;
  }
#else
  const f32* f = (const f32*)&raw;
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = f[i];
#endif
}

// C columns of a tile's row as f32.
template <int C>
__device__ inline void columns(const unsigned char* row, u32 column, f32 (&v)[C]) {
  const Element* e = (const Element*)row + column;
#if KV == KV_F16
  if constexpr (C == 1) {
    v[0] = __half2float(e[0]);
  } else {
#pragma unroll
    for (int i = 0; i < C / 2; i++) {
      float2 f = __half22float2(((const __half2*)e)[i]);
      v[2 * i] = f.x;
      v[2 * i + 1] = f.y;
    }
  }
#else
#pragma unroll
  for (int i = 0; i < C; i++) v[i] = e[i];
#endif
}

// Scores of the tile: four lanes share a key, each a quarter of every chunk, then add. `scores` is (NQ, PAGE_TOKENS).
template <int NQ>
__device__ inline void score(const unsigned char* keys, u32 stride, const f32* q, u32 q_width, u32 chunks, f32* scores) {
  u32 lane = threadIdx.x % 32, part = lane % 4, key = threadIdx.x / 4;
  f32 sum[NQ];
#pragma unroll
  for (int n = 0; n < NQ; n++) sum[n] = 0;
  const unsigned char* at = keys + key * stride + part * 16;
  const f32* query = q + part * PER16;
#pragma unroll 2
  for (u32 c = 0; c < chunks; c++, at += 64, query += 4 * PER16) {
    f32 k[PER16];
    widen(at, k);
#pragma unroll
    for (int n = 0; n < NQ; n++) {
#pragma unroll
      for (int i = 0; i < PER16; i += 4) {
        float4 v = *(const float4*)(query + n * q_width + i);
        sum[n] = fmaf(v.x, k[i], sum[n]);
        sum[n] = fmaf(v.y, k[i + 1], sum[n]);
        sum[n] = fmaf(v.z, k[i + 2], sum[n]);
        sum[n] = fmaf(v.w, k[i + 3], sum[n]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < NQ; n++) {
    sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
    sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
    if (part == n % 4) scores[n * PAGE_TOKENS + key] = sum[n];
  }
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
__device__ inline void weigh(const unsigned char* values, u32 stride, u32 slots, const f32* scores, const f32* factor,
                             f32 (&acc)[NQ][C]) {
  u32 column = threadIdx.x * C;
#pragma unroll
  for (int n = 0; n < NQ; n++) {
#pragma unroll
    for (int c = 0; c < C; c++) acc[n][c] *= factor[n];
  }
  for (u32 j = 0; j < slots; j += 4) { // rows from `slots` on are zero
    f32 v[4][C];
#pragma unroll
    for (int k = 0; k < 4; k++) columns<C>(values + (j + k) * stride, column, v[k]);
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

  u32 chunks = (p.d * (u32)sizeof(Element) + 63) / 64, q_width = chunks * 4 * PER16;
  f32* q = (f32*)room;
  unsigned char* keys = room + NQ * q_width * 4;
  u32 k_stride = tile_stride(p.d), v_stride = p.latent ? k_stride : tile_stride(p.dv);
  unsigned char* values = p.latent ? keys : keys + PAGE_TOKENS * k_stride;
  for (u32 e = threadIdx.x; e < NQ * q_width; e += THREADS) {
    u32 n = e / q_width, c = e % q_width;
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
      const Element* base = (const Element*)(table[index] + p.layer_offset);
      load_tile(keys, k_stride, base + (u64)kv_head * PAGE_TOKENS * p.d, p.d, slots);
      if (!p.latent) {
        const Element* v = base + (u64)p.kv_heads * PAGE_TOKENS * p.d + (u64)kv_head * PAGE_TOKENS * p.dv;
        load_tile(values, v_stride, v, p.dv, slots);
      }
      tiles_arrive();
      score<NQ>(keys, k_stride, q, q_width, chunks, scores);
      __syncthreads();
      soften<NQ>(p.mask, i, index, slots, scores, top, sum, factor);
      __syncthreads();
      if (threadIdx.x * C < p.dv) weigh<NQ, C>(values, v_stride, slots, scores, factor, acc);
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
