// The dot products of a GEMV: one tile of 16 rows against B activation rows, by warps that each take every n-th step of
// the columns. A lane of a quantized step has 4 rows and a whole group; of a dense step 8 rows and one column at a time.
//
// Each sum's order depends on the shape and the warps of a block alone, never on B or on the other rows.
//
// Lane operations (SASS) a weight at B = 1: unpack (see codec.cuh) + 0.5 (IDP.4A, two halves of the activation) + 0.25
// (scale, convert, multiply-add of a group's 4 sums); each further row 0.75. Dense: 1 convert + B multiply-adds.
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

// One codec's step. ROWS is how many rows a lane sums for, COLS how many columns a warp's step covers.
template <int C, int B, bool EXACT> struct Dot {
  static constexpr CodecRow T = codec_row(C);
  static constexpr bool DENSE_CODEC = T.part == DENSE;
  static constexpr int ROWS = DENSE_CODEC ? 8 : 4;
  static constexpr int COLS = DENSE_CODEC ? 64 : 256;
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

  // Codes against quantized activations, in integers up to the group's sum.
  __device__ __forceinline__ void quantized(const Planes& w, u32 tile, u32 step, const XRows& x,
                                            const u32 (&row)[B], f32 factor) {
    u32 g;
    Quad<C> codes;
    Scales<C, 4> scales;
    if (!load(w, tile, step, g, codes, scales)) return;
#pragma unroll
    for (int b = 0; b < B; b++) {
      const int4* p = (const int4*)(x.q + row[b] * x.q_row + g);
      int4 v[5];
#pragma unroll
      for (int i = 0; i < 5; i++) v[i] = __ldg(p + i);
      const i32 high[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
      const i32 low[8] = {v[2].x, v[2].y, v[2].z, v[2].w, v[3].x, v[3].y, v[3].z, v[3].w};
      const f32 d = __int_as_float(v[4].x);
      const i32 sum[2] = {v[4].y, v[4].z};
#pragma unroll
      for (int r = 0; r < 4; r++) {
        i32 h[2] = {0, 0}, l[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++) {
          // An offset of 128 is taken off by the sign bit; others through the activations' sums.
          u32 word = codes.word(r, i) ^ (T.offset == 128 ? 0x80808080u : 0);
          h[i / 4] = __dp4a((i32)word, high[i], h[i / 4]);
          l[i / 4] = __dp4a((i32)word, low[i], l[i / 4]);
        }
        const i32 offset = T.offset == 128 ? 0 : T.offset;
        const Scale s = scales.row(r);
        i32 dot;
        if constexpr (has_halves(T.scale)) {
          dot = s.sc[0] * (64 * h[0] + l[0] - offset * sum[0]) + s.sc[1] * (64 * h[1] + l[1] - offset * sum[1]);
        } else {
          dot = 64 * (h[0] + h[1]) + (l[0] + l[1]) - offset * (sum[0] + sum[1]);
        }
        const f32 df = d * factor;
        acc[b][r] = fmaf(s.s * df, (f32)dot, acc[b][r]);
        if constexpr (T.scale == HALF_Q2K) {
          acc[b][r] = fmaf(s.m[0], df * (f32)sum[0], acc[b][r]);
          acc[b][r] = fmaf(s.m[1], df * (f32)sum[1], acc[b][r]);
        } else if constexpr (has_mins(T.scale)) {
          acc[b][r] = fmaf(s.m[0], df * (f32)(sum[0] + sum[1]), acc[b][r]);
        }
      }
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
