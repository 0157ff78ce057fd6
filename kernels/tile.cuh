// A page's rows of one head in shared memory, f32 or f16 (KV): how they get there, their scores against queries, and columns of
// them as f32. tile_coded.cuh is the same for int8.
#pragma once
#include "params.h"
#include <cuda_fp16.h>

// Bytes from one row of a tile to the next: whole 64-byte chunks, an odd number of them, so that the two rows that a
// quarter of a warp reads at once lie in different banks.
__device__ __forceinline__ u32 tile_stride(u32 row_bytes) {
  const u32 bytes = (row_bytes + 63) / 64 * 64;
  return bytes % 128 == 0 ? bytes + 64 : bytes;
}

// Rows `0..slots` of `(PAGE_TOKENS, width)` to shared memory, by BLOCK threads; the rest of the rows, and columns from
// `width` to the end of the last chunk, become zero: what lies there may be anything, and zero weights do not silence a NaN.
template <int BLOCK, class E>
__device__ inline void load_rows(unsigned char* tile, u32 stride, const E* from, u32 width, u32 slots) {
  const u32 row_bytes = width * (u32)sizeof(E);
  if (row_bytes % 16 == 0) {
    const u32 chunks = row_bytes / 16, padded = (row_bytes + 63) / 64 * 4;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * padded; i += BLOCK) {
      const u32 row = i / padded, c = i % padded;
      unsigned char* to = tile + row * stride + c * 16;
      if (row < slots && c < chunks) {
        const u32 at = (u32)__cvta_generic_to_shared(to);
        const void* source = (const char*)from + (u64)row * row_bytes + c * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(source) : "memory");
      } else {
        *(uint4*)to = make_uint4(0, 0, 0, 0);
      }
    }
  } else {
    const u32 padded = (row_bytes + 63) / 64 * 64 / (u32)sizeof(E);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * padded; i += BLOCK) {
      const u32 row = i / padded, c = i % padded;
      const bool real = row < slots && c < width;
      ((E*)(tile + row * stride))[c] = real ? from[row * width + c] : E(0.0f);
    }
  }
}

// Eight halves as f32.
__device__ __forceinline__ void widen_halves(const unsigned char* at, f32 (&v)[8]) {
  const uint4 raw = *(const uint4*)at;
  const __half2* h = (const __half2*)&raw;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 f = __half22float2(h[i]);
    v[2 * i] = f.x;
    v[2 * i + 1] = f.y;
  }
}

// sum[n] += query n * v, for the N values of v; queries are `q_width` apart.
template <int NQ, int N>
__device__ __forceinline__ void dot(const f32* query, u32 q_width, const f32 (&v)[N], f32 (&sum)[NQ]) {
#pragma unroll
  for (int n = 0; n < NQ; n++) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 q = *(const float4*)(query + n * q_width + i);
      sum[n] = fmaf(q.x, v[i], sum[n]);
      sum[n] = fmaf(q.y, v[i + 1], sum[n]);
      sum[n] = fmaf(q.z, v[i + 2], sum[n]);
      sum[n] = fmaf(q.w, v[i + 3], sum[n]);
    }
  }
}

// Scores of eight keys a warp into `(NQ, PAGE_TOKENS)`: four lanes share a key, each a quarter of every chunk; they add.
template <int NQ> __device__ __forceinline__ void put_scores(f32 (&sum)[NQ], f32* scores) {
  const u32 part = threadIdx.x % 4, key = threadIdx.x / 4;
#pragma unroll
  for (int n = 0; n < NQ; n++) {
    sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
    sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
    if (part == n % 4) scores[n * PAGE_TOKENS + key] = sum[n];
  }
}

#if KV != KV_I8
#if KV == KV_F16
typedef __half Element;
#else
typedef f32 Element;
#endif
// Elements of a 16-byte load.
#define PER16 (16 / sizeof(Element))

// A layer's part of a page.
struct Page {
  const Element* base;
  u32 heads, d, dv;

  __device__ __forceinline__ Page(u64 at, u32 heads, u32 d, u32 dv, bool latent)
      : base((const Element*)at), heads(heads), d(d), dv(dv) {}
};

struct Tile {
  unsigned char* rows;
  u32 stride, width;

  __device__ __forceinline__ Tile(unsigned char* room, u32 width, u32 stride) : rows(room), stride(stride), width(width) {}
  // Keys `d` wide, or latent rows of which `dv` are the latent.
  __device__ __forceinline__ static Tile of_keys(unsigned char* room, u32 d, u32 dv, bool latent) {
    return Tile(room, d, tile_stride(d * (u32)sizeof(Element)));
  }
  // Values `dv` wide behind the keys, or the latent rows themselves.
  __device__ __forceinline__ static Tile of_values(const Tile& keys, u32 dv, bool latent) {
    return Tile(latent ? keys.rows : keys.end(), dv, latent ? keys.stride : tile_stride(dv * (u32)sizeof(Element)));
  }
  __device__ __forceinline__ unsigned char* end() const { return rows + PAGE_TOKENS * stride; }
  // Elements of a query as `score` takes it, and which of the query's elements is at `c` of them; `width` or more: none.
  __device__ __forceinline__ u32 q_width() const { return (width * (u32)sizeof(Element) + 63) / 64 * 4 * PER16; }
  __device__ __forceinline__ u32 q_column(u32 c) const { return c; }

  template <int BLOCK> __device__ __forceinline__ void load_keys(const Page& p, u32 head, u32 slots) const {
    load_rows<BLOCK>(rows, stride, p.base + (u64)head * PAGE_TOKENS * p.d, width, slots);
  }
  template <int BLOCK> __device__ __forceinline__ void load_values(const Page& p, u32 head, u32 slots) const {
    load_rows<BLOCK>(rows, stride, p.base + ((u64)p.heads * p.d + (u64)head * p.dv) * PAGE_TOKENS, width, slots);
  }

  template <int NQ> __device__ inline void score(const f32* q, u32 pitch, f32* scores) const {
    const u32 part = threadIdx.x % 4, chunks = pitch / (4 * PER16);
    f32 sum[NQ];
#pragma unroll
    for (int n = 0; n < NQ; n++) sum[n] = 0;
    const unsigned char* at = rows + threadIdx.x / 4 * stride + part * 16;
    const f32* query = q + part * PER16;
#pragma unroll(NQ == 8 ? 1 : 2)
    for (u32 c = 0; c < chunks; c++, at += 64, query += 4 * PER16) {
      f32 k[PER16];
#if KV == KV_F16
      widen_halves(at, k);
#else
      *(float4*)k = *(const float4*)at;
#endif
      dot<NQ>(query, pitch, k, sum);
    }
    put_scores(sum, scores);
  }

  // C columns of a row as f32.
  template <int C> __device__ __forceinline__ void columns(u32 row, u32 column, f32 (&v)[C]) const {
    const Element* e = (const Element*)(rows + row * stride) + column;
#pragma unroll
    for (int i = 0; i < C; i += C == 1 ? 1 : 2) {
#if KV == KV_F16
      if constexpr (C == 1) {
        v[i] = __half2float(e[i]);
      } else {
        const float2 f = __half22float2(*(const __half2*)(e + i));
        v[i] = f.x;
        v[i + 1] = f.y;
      }
#else
      v[i] = e[i];
      if constexpr (C > 1) v[i + 1] = e[i + 1];
#endif
    }
  }
};
#endif
