// The dot products of a GEMV: one tile of 16 rows against B activation rows, by warps that each take every n-th step of
// the columns. A lane of a quantized step has 4 rows and a whole group; of a dense step 8 rows and one column at a time.
// Quantized products of more than one row are few.cuh's, which gives the same bits.
//
// Each sum's order depends on the shape and the warps of a block alone, never on B or on the other rows. Quantized: group
// g is in chain (g / 8 % warps, g % 8); chains are added over the first, in order, then over the second in pairs 4, 2 and
// 1 apart.
//
// Lane operations (SASS) a weight at B = 1: unpack (see codec.cuh) + 0.5 (IDP.4A, two halves of the activation) + 0.25
// (scale, convert, multiply-add of a group's 4 sums). Dense: 1 convert + B multiply-adds.
#pragma once
#include "codec.cuh"
#include "quantize.cuh"

// Activation rows: f32, and quantized unless EXACT or dense.
struct XRows {
  const f32* f;
  u64 f_row; // elements
  const QGroup* q;
  u64 q_row; // groups
};

// A row's sum and one more group: `dot` is its dot product times `d`. What every quantized product ends in.
template <int C>
__device__ __forceinline__ f32 add_group(f32 acc, const Scale& s, f32 dot, f32 d, const i32 (&sum)[2], i32 total) {
  constexpr ScaleKind K = codec_row(C).scale;
  acc = fmaf(s.s, dot, acc);
  if constexpr (K == HALF_Q2K) {
    acc = fmaf(s.m[0], d * (f32)sum[0], acc);
    acc = fmaf(s.m[1], d * (f32)sum[1], acc);
  } else if constexpr (has_mins(K)) {
    acc = fmaf(s.m[0], d * (f32)total, acc);
  }
  return acc;
}

// One codec's step. ROWS is how many rows a lane sums for, COLS how many columns a warp's step covers.
template <int C, int B, bool EXACT> struct Dot {
  static constexpr CodecRow T = codec_row(C);
  static constexpr bool DENSE_CODEC = T.part == DENSE;
  static constexpr int ROWS = DENSE_CODEC ? 8 : 4;
  static constexpr int COLS = DENSE_CODEC ? 64 : 256;
  // True if sums are made as the head says of quantized ones.
  static constexpr bool CHAINS = !DENSE_CODEC && !EXACT;
  // Lanes that share rows are this far apart, and its multiples.
  static constexpr int LANES = TILE_ROWS / ROWS;

  f32 acc[B][ROWS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < B; b++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) acc[b][r] = 0.f;
  }

  __device__ __forceinline__ static u32 steps(const Planes& w) { return (w.cols + COLS - 1) / COLS; }

  // Adds factor * (this step's columns). `row[b]` is the row of x that b stands for.
  __device__ __forceinline__ void step(const Planes& w, u32 tile, u32 step, const XRows& x,
                                       const u32 (&row)[B], f32 factor) {
    if constexpr (DENSE_CODEC) {
      dense(w, tile, step, x, row, factor);
    } else if constexpr (EXACT) {
      exact(w, tile, step, x, row, factor);
    } else {
      quantized(w, tile, step, x, row, factor);
    }
  }

  // The lane's part of a step in groups: 4 rows of group `g`, codes and scales. False past the last group.
  __device__ __forceinline__ static bool load(const Planes& w, u32 tile, u32 step, u32& g, Quad<C>& codes,
                                              Scales<C, 4>& scales) {
    const u32 lane = threadIdx.x % 32, q = lane % 4;
    g = step * 8 + lane / 4;
    if (g >= w.groups) return false;
    codes.load(w, tile * w.groups + g, q);
    scales.load(w, tile, g, 4 * q);
    return true;
  }

  // Codes of one row's quantized activations, in integers up to the group's sum.
  __device__ __forceinline__ void quantized(const Planes& w, u32 tile, u32 step, const XRows& x,
                                            const u32 (&row)[B], f32 factor) {
    static_assert(B == 1, "few.cuh takes more");
    u32 g;
    Quad<C> codes;
    Scales<C, 4> scales;
    if (!load(w, tile, step, g, codes, scales)) return;
    const int4* p = (const int4*)(x.q + row[0] * x.q_row + g);
    int4 v[5];
#pragma unroll
    for (int i = 0; i < 5; i++) v[i] = __ldg(p + i);
    const i32 sum[2] = {v[4].x, v[4].y};
    const f32 d = __int_as_float(v[4].w) * factor;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      i32 h[2] = {0, 0}, l[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        // An offset of 128 is taken off by the sign bit; others through the activations' sums.
        u32 word = codes.word(r, i) ^ (T.offset == 128 ? 0x80808080u : 0);
        h[i / 4] = __dp4a((i32)word, i < 4 ? v[i % 4].x : v[i % 4].y, h[i / 4]);
        l[i / 4] = __dp4a((i32)word, i < 4 ? v[i % 4].z : v[i % 4].w, l[i / 4]);
      }
      const i32 offset = T.offset == 128 ? 0 : T.offset;
      const Scale s = scales.row(r);
      i32 dot;
      if constexpr (has_halves(T.scale)) {
        dot = s.sc[0] * (64 * h[0] + l[0] - offset * sum[0]) + s.sc[1] * (64 * h[1] + l[1] - offset * sum[1]);
      } else {
        dot = 64 * (h[0] + h[1]) + (l[0] + l[1]) - offset * v[4].z;
      }
      acc[0][r] = add_group<C>(acc[0][r], s, d * (f32)dot, d, sum, v[4].z);
    }
  }

  // Weights as f32 against f32 activations.
  __device__ __forceinline__ void exact(const Planes& w, u32 tile, u32 step, const XRows& x,
                                        const u32 (&row)[B], f32 factor) {
    u32 g;
    Quad<C> codes;
    Scales<C, 4> scales;
    if (!load(w, tile, step, g, codes, scales)) return;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const Scale s = scales.row(r);
      f32 sum[B];
#pragma unroll
      for (int b = 0; b < B; b++) sum[b] = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 word = codes.word(r, i);
        f32 value[4];
#pragma unroll
        for (int j = 0; j < 4; j++) value[j] = weight_of<C>(word, j, s, i / 4);
#pragma unroll
        for (int b = 0; b < B; b++) {
          const f32* p = x.f + row[b] * x.f_row + 32 * g + 4 * i;
#pragma unroll
          for (int j = 0; j < 4; j++) sum[b] = fmaf(value[j], __ldg(p + j), sum[b]);
        }
      }
#pragma unroll
      for (int b = 0; b < B; b++) acc[b][r] = fmaf(sum[b], factor, acc[b][r]);
    }
  }

  // Elements against f32 activations: lane pairs take the two halves of a column.
  __device__ __forceinline__ void dense(const Planes& w, u32 tile, u32 step, const XRows& x,
                                        const u32 (&row)[B], f32 factor) {
    const u32 lane = threadIdx.x % 32, half = lane % 2;
    constexpr int BYTES = dense_bytes(C);
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const u32 k = step * 64 + u * 16 + lane / 2;
      if (k >= w.cols) return;
      const u8* p = w.codes + (((u64)tile * w.cols + k) * TILE_ROWS + 8 * half) * BYTES;
      u32 word[2 * BYTES]; // 8 elements
      if constexpr (BYTES == 1) {
        uint2 v = load8(p);
        word[0] = v.x, word[1] = v.y;
      } else {
#pragma unroll
        for (int i = 0; i < BYTES / 2; i++) {
          uint4 v = load16(p + 16 * i);
          word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
        }
      }
      const f32 scale = block_scale<C>(w, tile, k) * factor;
      f32 xs[B];
#pragma unroll
      for (int b = 0; b < B; b++) xs[b] = __ldg(x.f + row[b] * x.f_row + k) * scale;
#pragma unroll
      for (int r = 0; r < 8; r++) {
        u32 bits = BYTES == 4 ? word[r % (2 * BYTES)] : word[r * BYTES / 4] >> (8 * (r * BYTES % 4));
        f32 value = dense_value<C>(BYTES == 4 ? bits : bits & (BYTES == 2 ? 0xffffu : 0xffu));
#pragma unroll
        for (int b = 0; b < B; b++) acc[b][r] = fmaf(value, xs[b], acc[b][r]);
      }
    }
  }

  // Quantized, one row: what the warp has, for `finish` to add up.
  __device__ __forceinline__ void leave(float4 (*to)[32]) const {
    to[threadIdx.x / 32][threadIdx.x % 32] = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
  }

  // The tile's 16 sums of what warps first, first + 1, .. first + W - 1 have left, to be called by one warp.
  template <int W> __device__ __forceinline__ static void finish(const float4 (*left)[32], u32 first, f32* to) {
    const u32 lane = threadIdx.x % 32;
    float4 sum = left[first][lane];
#pragma unroll
    for (int w = 1; w < W; w++) {
      const float4 v = left[first + w][lane];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
#pragma unroll
    for (int o = 16; o >= 4; o /= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, o);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, o);
      sum.z += __shfl_xor_sync(0xffffffffu, sum.z, o);
      sum.w += __shfl_xor_sync(0xffffffffu, sum.w, o);
    }
    if (lane < 4) *(float4*)(to + 4 * lane) = sum;
  }

  // Sums over the warp's lanes and leaves the tile's 16 sums of each b in `to`.
  __device__ __forceinline__ void reduce(f32 (*to)[TILE_ROWS]) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < B; b++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        f32 v = acc[b][r];
#pragma unroll
        for (int o = 16; o >= LANES; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
        if (lane < LANES) to[b][lane * ROWS + r] = v;
      }
  }
};

__device__ __forceinline__ f32 silu(f32 x) { return x / (1.f + expf(-x)); }
