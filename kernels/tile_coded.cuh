// tile.cuh's Tile for pages of int8 codes: codes lie in shared memory as they are, beside their scales; a latent row's rope key
// lies behind them in f16. Sums are taken of code times query and multiplied by a group's scale: what is added up is what
// the CPU adds up, code * scale being exact in f32.
//
// Operations: 2 lane operations a code to f32, once for all queries of a block, then as for f16.
#pragma once
#include "coded.cuh"
#include "tile.cuh"

struct Page {
  CodedPage page;

  __device__ __forceinline__ Page(u64 at, u32 heads, u32 d, u32 dv, bool latent)
      : page{(u8*)at, heads, latent ? dv : d, latent ? 0 : dv, latent ? d - dv : 0} {}
};

struct Tile {
  unsigned char* codes;
  u32 width, tail, stride, groups;

  __device__ __forceinline__ Tile(unsigned char* room, u32 width, u32 tail)
      : codes(room), width(width), tail(tail), stride(tile_stride(width)), groups(scales_of(width)) {}
  __device__ __forceinline__ static Tile of_keys(unsigned char* room, u32 d, u32 dv, bool latent) {
    return Tile(room, latent ? dv : d, latent ? d - dv : 0);
  }
  __device__ __forceinline__ static Tile of_values(const Tile& keys, u32 dv, bool latent) {
    return Tile(latent ? keys.codes : keys.end(), dv, 0);
  }
  __device__ __forceinline__ __half* scales() const { return (__half*)(codes + PAGE_TOKENS * stride); }
  __device__ __forceinline__ unsigned char* tails() const { return codes + PAGE_TOKENS * (stride + 2 * groups); }
  __device__ __forceinline__ u32 tail_stride() const { return tail == 0 ? 0 : tile_stride(2 * tail); }
  __device__ __forceinline__ unsigned char* end() const { return tails() + PAGE_TOKENS * tail_stride(); }
  // A query: its part for the codes in whole chunks of 64, then the part for the rope key in chunks of 32.
  __device__ __forceinline__ u32 q_codes() const { return (width + 63) / 64 * 64; }
  __device__ __forceinline__ u32 q_width() const { return q_codes() + (tail + 31) / 32 * 32; }
  __device__ __forceinline__ u32 q_column(u32 c) const {
    if (c < q_codes()) return c < width ? c : ~0u;
    return width + c - q_codes();
  }

  template <int BLOCK>
  __device__ __forceinline__ void load(const i8* from, const __half* from_scales, u32 slots) const {
    load_rows<BLOCK>(codes, stride, from, width, slots);
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * groups; i += BLOCK) {
      scales()[i] = i / groups < slots ? from_scales[i] : __half(0.0f);
    }
  }
  template <int BLOCK> __device__ __forceinline__ void load_keys(const Page& p, u32 head, u32 slots) const {
    load<BLOCK>(p.page.key_codes(head), p.page.key_scales(head), slots);
    if (tail > 0) load_rows<BLOCK>(tails(), tail_stride(), p.page.tails(), tail, slots);
  }
  template <int BLOCK> __device__ __forceinline__ void load_values(const Page& p, u32 head, u32 slots) const {
    load<BLOCK>(p.page.value_codes(head), p.page.value_scales(head), slots);
  }

  template <int NQ> __device__ __forceinline__ void score(const f32* q, u32 pitch, f32* scores_to) const {
    const u32 part = threadIdx.x % 4, key = threadIdx.x / 4;
    f32 sum[NQ];
#pragma unroll
    for (int n = 0; n < NQ; n++) sum[n] = 0;
    const unsigned char* at = codes + key * stride + part * 16;
    // Parts 2 and 3 take their words in another order, so that the four parts' queries lie in different banks.
    const u32 turn = part / 2;
    const f32* query = q + part * 16;
    const __half* scale = scales() + key * groups;
    for (u32 c = 0; c < q_codes() / 64; c++, at += 64, query += 64) {
      const uint4 raw = *(const uint4*)at;
      const f32 s = __half2float(scale[min(2 * c + part / 2, groups - 1)]);
      const u32 words[4] = {turn ? raw.y : raw.x, turn ? raw.x : raw.y, turn ? raw.w : raw.z, turn ? raw.z : raw.w};
#pragma unroll
      for (u32 w = 0; w < 4; w++) {
        f32 k[4];
        widen_codes(words[w], k);
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] *= s;
        dot<NQ>(query + 4 * (w ^ turn), pitch, k, sum);
      }
    }
    at = tails() + key * tail_stride() + part * 16;
    query = q + q_codes() + part * 8;
    for (u32 c = 0; c < (tail + 31) / 32; c++, at += 64, query += 32) {
      f32 k[8];
      widen_halves(at, k);
      dot<NQ>(query, pitch, k, sum);
    }
    put_scores(sum, scores_to);
  }

  template <int C> __device__ __forceinline__ void columns(u32 row, u32 column, f32 (&v)[C]) const {
    const unsigned char* at = codes + row * stride + column;
    const f32 scale = __half2float(scales()[row * groups + min(column / GROUP, groups - 1)]);
    f32 four[4];
    widen_codes(C == 4 ? *(const u32*)at : C == 2 ? *(const u16*)at : *at, four);
#pragma unroll
    for (int i = 0; i < C; i++) v[i] = four[i] * scale;
  }
};
