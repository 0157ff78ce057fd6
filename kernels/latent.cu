// Absorbed latent attention of rows that each stand for themselves, over f16 or int8 pages on tensor cores: decode at the
// widths of every published model (latent 512, rope key 64).
//
// A block takes 16 query heads of a row and a segment, a page at a time: eight warps share out the scores (two halves of
// the keys by four parts of the width), add them up, soften them (two heads a warp, a lane a key), and each sums 64
// columns of the values, which are the latents again. The next page is on its way meanwhile.
//
// Bytes: 1152 a cached row (int8: 672), once for 16 heads. Operations: 1088 multiply-adds a (head, key) in mma.m16n8k16;
// 272 of those a page, 34 a warp. int8: about 1.5 lane operations a code to f16, once for 16 heads.
//
// Variants: none for f16 pages, KV=KV_I8. Codes become f16 on their way into shared memory, rounded once.
#include "coded.cuh"
#include "decode.cuh"
#include "mma.cuh"

#ifndef KV
#define KV KV_F16
#endif

#define THREADS 256
#define HEADS 16
#define D 576
#define DV 512
#define PITCH (D + 8)   // 16 bytes more than the row, so that eight rows lie in different banks
#define PITCH_P (PAGE_TOKENS + 8)
#define STEPS 9         // of 16 columns, in a warp's quarter of the width

struct Room {
  __half tile[2][PAGE_TOKENS * PITCH];
  f32 scores[4][HEADS][PAGE_TOKENS]; // by quarter of the width
  __half weights[HEADS * PITCH_P];
  f32 top[HEADS], sum[HEADS], factor[HEADS];
};

// A page on its way to shared memory; rows from `slots` on become zero, whatever lies there. `fetch` starts, `put` ends it:
// f16 is copied in the background, codes wait in registers.
struct Ahead {
#if KV == KV_I8
  static constexpr int EACH = PAGE_TOKENS * DV / 16 / THREADS; // 16 codes at a time
  static_assert(PAGE_TOKENS * (D - DV) / 8 == THREADS, "a thread copies 8 values of the rope keys");
  uint4 codes[EACH];
  __half scale[EACH];

  __device__ __forceinline__ void fetch(const AttendParams& p, u64 at, u32 slots, __half* tile) {
    const CodedPage page = {(u8*)(at + p.layer_offset), 1, DV, 0, D - DV};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 i = threadIdx.x + e * THREADS, row = i / (DV / 16);
      const bool real = row < slots;
      codes[e] = real ? *(const uint4*)(page.key_codes(0) + 16 * i) : make_uint4(0, 0, 0, 0);
      scale[e] = real ? page.key_scales(0)[i / 2] : __half(0.0f);
    }
    const u32 row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
    copy16(tile + row * PITCH + DV + column, page.tails() + 8 * threadIdx.x, row < slots);
    commit();
  }
  __device__ __forceinline__ void put(__half* tile) const {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 i = threadIdx.x + e * THREADS;
      uint4* to = (uint4*)(tile + i / (DV / 16) * PITCH + i % (DV / 16) * 16);
      to[0] = widen_eight(make_uint2(codes[e].x, codes[e].y), scale[e]);
      to[1] = widen_eight(make_uint2(codes[e].z, codes[e].w), scale[e]);
    }
  }
#else
  __device__ __forceinline__ void fetch(const AttendParams& p, u64 page, u32 slots, __half* tile) {
    const __half* from = (const __half*)(page + p.layer_offset);
#pragma unroll
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * (D / 8); i += THREADS) {
      const u32 row = i / (D / 8), column = i % (D / 8) * 8;
      copy16(tile + row * PITCH + column, from + row * D + column, row < slots);
    }
    commit();
  }
  __device__ __forceinline__ void put(__half*) const {}
#endif
};

// A warp's queries: 16 heads by its quarter of the width.
__device__ __forceinline__ void load_queries(const AttendParams& p, u32 row, u32 head, u32 n_heads, u32 quarter,
                                             u32 (&q)[STEPS][4]) {
  const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const f32* from = p.q + ((u64)row * p.heads + head + g) * D + quarter * (16 * STEPS) + 2 * t;
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) { // rows g and g + 8, then the columns 8 on
      const bool real = g + i % 2 * 8 < n_heads;
      const float2 v = real ? *(const float2*)(from + i % 2 * 8 * D + 16 * j + i / 2 * 8) : make_float2(0, 0);
      q[j][i] = pair(v.x, v.y);
    }
  }
}

// Scores of a page into weights, with the running maximum, sum and factor of each head.
__device__ __forceinline__ void soften(const AttendParams& p, u32 i, u32 index, u32 slots, Room& room) {
  const u32 lane = threadIdx.x % 32;
  const bool seen = lane < slots && sees(p.mask, i, position_of(p.mask, index, lane));
#pragma unroll
  for (u32 h = threadIdx.x / 32 * 2; h < threadIdx.x / 32 * 2 + 2; h++) {
    f32 s = (room.scores[0][h][lane] + room.scores[1][h][lane]) + (room.scores[2][h][lane] + room.scores[3][h][lane]);
    s = seen ? s * p.scale : NONE_SEEN;
    f32 m = s;
#pragma unroll
    for (int w = 16; w > 0; w /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, w));
    const f32 before = room.top[h], after = fmaxf(before, m);
    // The sum is that of the rounded weights, so that rounding cancels in the quotient.
    const __half weight = __float2half_rn(seen ? expf(s - after) : 0);
    room.weights[h * PITCH_P + lane] = weight;
    f32 total = __half2float(weight);
#pragma unroll
    for (int w = 16; w > 0; w /= 2) total += __shfl_xor_sync(~0u, total, w);
    __syncwarp(); // every lane has read the maximum that the first replaces
    if (lane == 0) {
      const f32 c = after == NONE_SEEN ? 1 : expf(before - after);
      room.factor[h] = c;
      room.top[h] = after;
      room.sum[h] = room.sum[h] * c + total;
    }
  }
}

// The first entry from `index` on, below `end`, that the row sees; else `end`.
__device__ __forceinline__ u32 seen_from(const MaskParams& m, u32 i, u32 index, u32 end) {
  for (index = next_page(m, i, index); index < end && !sees_page(m, i, index);) index = next_page(m, i, index + 1);
  return min(index, end);
}

extern __shared__ __align__(16) unsigned char shared_room[];

// Grid (segments, heads / 16, rows).
extern "C" __global__ void __launch_bounds__(THREADS, 1) latent_decode(const __grid_constant__ AttendParams p) {
  Room& room = *(Room*)shared_room;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = warp % 4, half = warp / 4;
  const u32 row = blockIdx.z, head = blockIdx.y * HEADS, n_heads = min((u32)HEADS, p.heads - head);
  const u32 i = p.rows.position[row];
  const Cut cut(p, i);
  if (blockIdx.x >= cut.segments) return;
  const u64* table = p.rows.pages + p.rows.table[row];
  u32 query[STEPS][4];
  bool fresh = true;
  for (u32 s = blockIdx.x; s < cut.segments; s += gridDim.x) {
    const u32 end = min((s + 1) * cut.each, cut.pages);
    u32 index = seen_from(p.mask, i, s * cut.each, end), stage = 0;
    Ahead ahead;
    if (index < end) {
      ahead.fetch(p, table[index], slots_to(p.mask, index, i), room.tile[0]);
      ahead.put(room.tile[0]);
    }
    if (fresh) load_queries(p, row, head, n_heads, quarter, query);
    fresh = false;
    if (threadIdx.x < HEADS) room.top[threadIdx.x] = NONE_SEEN, room.sum[threadIdx.x] = 0;
    f32 acc[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    while (index < end) {
      wait<0>();
      __syncthreads();
      const u32 after = seen_from(p.mask, i, index + 1, end);
      if (after < end) ahead.fetch(p, table[after], slots_to(p.mask, after, i), room.tile[stage ^ 1]);
      const __half* tile = room.tile[stage];
      f32 scores[2][4] = {};
      const __half* k_at = tile + (16 * half + lane % 8 + lane / 16 * 8) * PITCH + 16 * STEPS * quarter + lane / 8 % 2 * 8;
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        u32 b[4];
        load4(b, k_at + 16 * j);
        mma(scores[0], query[j], b[0], b[1]);
        mma(scores[1], query[j], b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
        f32* to = &room.scores[quarter][lane / 4][16 * half + 8 * n + 2 * (lane % 4)];
        *(float2*)to = make_float2(scores[n][0], scores[n][1]);
        *(float2*)(to + 8 * PAGE_TOKENS) = make_float2(scores[n][2], scores[n][3]);
      }
      __syncthreads();
      soften(p, i, index, slots_to(p.mask, index, i), room);
      __syncthreads();
      const f32 low = room.factor[lane / 4], high = room.factor[lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < 8; n++) acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
      const __half* v_at = tile + (lane % 8 + lane / 8 % 2 * 8) * PITCH + 64 * warp + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < PAGE_TOKENS / 16; k++) {
        u32 weights[4];
        load4(weights, room.weights + lane % 16 * PITCH_P + 16 * k + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < 4; n++) {
          u32 b[4];
          load4_turned(b, v_at + 16 * k * PITCH + 16 * n);
          mma(acc[2 * n], weights, b[0], b[1]);
          mma(acc[2 * n + 1], weights, b[2], b[3]);
        }
      }
      if (after < end) ahead.put(room.tile[stage ^ 1]);
      index = after;
      stage ^= 1;
    }
    __syncthreads();
    // One segment: the results, by way of shared memory, so that neighbours are one warp's. Else a part.
    const bool whole = cut.segments == 1;
    f32* staged = (f32*)room.tile;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 n = lane / 4 + 8 * h;
      if (n >= n_heads) continue;
      const f32 by = whole ? divisor(room.top[n], room.sum[n], p.sinks, head + n) : 1;
      f32* to = (whole ? staged + n * DV : p.parts + part_at(p, row, head + n, s) * DV) + 64 * warp + 2 * (lane % 4);
#pragma unroll
      for (int c = 0; c < 8; c++) *(float2*)(to + 8 * c) = make_float2(acc[c][2 * h] * by, acc[c][2 * h + 1] * by);
    }
    if (!whole && threadIdx.x < n_heads) {
      const float2 sums = make_float2(room.top[threadIdx.x], room.sum[threadIdx.x]);
      ((float2*)p.part_sums)[part_at(p, row, head + threadIdx.x, s)] = sums;
    }
    __syncthreads();
    if (whole) {
      const u64 at = ((u64)row * p.heads + head) * DV;
      for (u32 e = threadIdx.x; e < n_heads * DV; e += THREADS) put(p, at + e, staged[e]);
    }
  }
}
