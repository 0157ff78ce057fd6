// Quantized products of 2 to 8 activation rows on the tensor cores' byte products: an mma's 16 rows are a tile's, its 32
// columns a group's, its 8 columns the activation rows, so that a weight is unpacked once for all of them. Two mma a
// group: one for each half of the activations' codes.
//
// A group's sum is the integer that gemv.cuh's byte dot products give, and sums of groups are made in gemv.cuh's order: a
// row's bits are the same alone and in company. A block has 8 warps; warp c has groups c, c + 8, .. of T tiles, and W
// sums of each, one for each of the chains that gemv.cuh's warps have.
//
// Lane operations (SASS) a weight, whatever the rows: unpack (see codec.cuh) + 0.13 (mma) + 0.75 (a group's 16 x 8 sums:
// join the halves, scale, multiply-add) + 0.5 / T (the activations).
#pragma once
#include "gemv.cuh"
#include "mma.cuh"

// Largest magnitude of a group's dot product of codes and activations, offset taken off; 0 where scales are
// half a group's.
constexpr i32 dot_bound(int codec) {
  const CodecRow t = codec_row(codec);
  if (has_halves(t.scale)) return 0;
  const i32 most = t.lut == FP4 ? 12 : t.lut == IQ4 ? 127 : t.part == BYTE ? 128 : t.part == NIB ? 15 : 31;
  const i32 code = t.offset > 0 && t.offset < 128 ? t.offset : most;
  return GROUP * CODE_MAX * code;
}

// A value whose making the compiler shall not spread over its uses, where it costs more.
template <class V> __device__ __forceinline__ void settle(V*& v) { asm("" : "+l"(v)); }
__device__ __forceinline__ void settle(i32& v) { asm("" : "+r"(v)); }

// T tiles a block, of M matrices of one shape.
template <int C, int T, int W, int M> struct Few {
  static constexpr CodecRow R = codec_row(C);
  static constexpr bool SIGNED = R.offset == 128, HALVES = has_halves(R.scale);
  static constexpr i32 OFFSET = SIGNED ? 0 : R.offset;
  // A dot product below 2^22 becomes a float as the low bits of 1.5 * 2^23, and the multiplication by the group's factor
  // takes those 1.5 * 2^23 off again, exactly, for the factor is a power of two: one operation in place of two.
  static constexpr i32 BIAS = !HALVES && dot_bound(C) < 1 << 22 ? 0x4b400000 : 0;
  // Groups whose loads are under way together.
  static constexpr int BATCH = W < 4 ? W : 4;
  static_assert(W % BATCH == 0, "no part of a batch is left over");
  // Blocks to an SM, which decide a thread's registers: codecs of more planes need more of them.
  static constexpr int BLOCKS = HALVES || R.scale == SUPER_U8 || R.scale == SUPER_I8 || Pair<C>::HIGH > 0 ? 1 : 2;

  f32 acc[T][W][4];

  // One group of T tiles, and of the rows' activations.
  struct Loaded {
    Pair<C> codes[T];
    Scales<C, 2> scales[T];
    int4 words;
    int4 ends[2]; // sum, total, d of activation rows 2t and 2t + 1
  };

  typedef Scales<C, 2> S;
  // Where a lane reads of N tiles: its rows of them, the activation row of its fragment, and the two whose sums it has.
  template <int N> struct At {
    const u8 *codes[N], *high[N];
    typename S::At scales[N];
    const QGroup* words;
    const QGroup* ends[2];
  };

  // The lane's places of group 0 of the matrices' tiles 0.
  __device__ __forceinline__ static At<M> start(const Planes (&w)[M], const XRows& x, u32 rows) {
    const u32 lane = threadIdx.x % 32, q = lane / 4, t = lane % 4, last = rows - 1;
    At<M> at;
#pragma unroll
    for (int i = 0; i < M; i++) {
      at.codes[i] = w[i].codes + Pair<C>::start(q, t);
      at.high[i] = w[i].high + Pair<C>::high_start(q);
      at.scales[i] = S::start(w[i], 2 * q);
      settle(at.codes[i]), settle(at.scales[i].d);
    }
    at.words = (const QGroup*)&x.q[min(q, last) * x.q_row].words[t];
    at.ends[0] = x.q + min(2 * t, last) * x.q_row;
    at.ends[1] = x.q + min(2 * t + 1, last) * x.q_row;
    settle(at.words), settle(at.ends[0]), settle(at.ends[1]);
    return at;
  }

  // Of group `g` of each tile. One wide multiply-add a pointer: what is 8 groups on lies a constant away from it.
  __device__ __forceinline__ static At<T> at(const At<M>& start, const Planes (&w)[M], const u32 (&tile)[T], u32 g) {
    At<T> at;
#pragma unroll
    for (int i = 0; i < T; i++) {
      const int m = i / (T / M);
      const u32 group = tile[i] * w[m].groups + g;
      at.codes[i] = start.codes[m] + (u64)group * Pair<C>::BYTES;
      at.high[i] = start.high[m] + (u64)group * Pair<C>::HIGH_BYTES;
      at.scales[i] = S::at(start.scales[m], w[m], tile[i], g);
    }
    at.words = start.words + g;
#pragma unroll
    for (int b = 0; b < 2; b++) at.ends[b] = start.ends[b] + g;
    return at;
  }

  // The group `8 * steps` after the one at `p`.
  __device__ __forceinline__ static void load(Loaded& to, const At<T>& p, int steps) {
#pragma unroll
    for (int i = 0; i < T; i++) {
      to.codes[i].load(p.codes[i] + steps * 8 * Pair<C>::BYTES, p.high[i] + steps * 8 * Pair<C>::HIGH_BYTES);
      to.scales[i].load(p.scales[i], steps);
    }
    to.words = __ldg((const int4*)(p.words + 8 * steps));
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const QGroup* end = p.ends[b] + 8 * steps;
      if constexpr (HALVES) {
        to.ends[b] = __ldg((const int4*)end->sum);
      } else {
        const int2 v = __ldg((const int2*)&end->total);
        to.ends[b] = make_int4(0, 0, v.x, v.y);
      }
    }
  }

  // The dot products of one group: c[2 * row + b].
  // `none` is what a sum of two rows starts from.
  __device__ __forceinline__ static void dots(const Loaded& v, int tile, const Scale (&s)[2], const i32 (&none)[2],
                                              i32 (&c)[4]) {
    const u32 t = threadIdx.x % 4;
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = v.codes[tile].word(i % 2, t, i / 2) ^ (SIGNED ? 0x80808080u : 0);
    if constexpr (HALVES) {
      i32 half[2][4];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        i32 high[4] = {0, 0, 0, 0};
        mma_bytes<SIGNED>(high, a[2 * k], a[2 * k + 1], k == 0 ? v.words.x : v.words.y);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int4& end = v.ends[i % 2];
          half[k][i] = 64 * high[i] - OFFSET * (k == 0 ? end.x : end.y);
        }
        mma_bytes<SIGNED>(half[k], a[2 * k], a[2 * k + 1], k == 0 ? v.words.z : v.words.w);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) c[i] = s[i / 2].sc[0] * half[0][i] + s[i / 2].sc[1] * half[1][i];
    } else {
      i32 high[4] = {0, 0, 0, 0};
      mma_bytes<SIGNED>(high, a, v.words.x, v.words.y);
#pragma unroll
      for (int i = 0; i < 4; i++) c[i] = 64 * high[i] + none[i % 2];
      mma_bytes<SIGNED>(c, a, v.words.z, v.words.w);
    }
  }

  __device__ __forceinline__ void add(const Loaded& v, int chain) {
    f32 d[2];
    i32 none[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      d[b] = __int_as_float(v.ends[b].w);
      none[b] = BIAS - OFFSET * v.ends[b].z;
      if constexpr (OFFSET != 0 && !HALVES) settle(none[b]);
    }
#pragma unroll
    for (int tile = 0; tile < T; tile++) {
      const Scale s[2] = {v.scales[tile].row(0), v.scales[tile].row(1)};
      i32 c[4];
      dots(v, tile, s, none, c);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int4& end = v.ends[i % 2];
        const i32 sum[2] = {end.x, end.y};
        const f32 by = d[i % 2];
        const f32 dot = BIAS == 0 ? by * (f32)c[i] : fmaf(__int_as_float(c[i]), by, -12582912.f * by);
        acc[tile][chain][i] = add_group<C>(acc[tile][chain][i], s[i / 2], dot, by, sum, end.z);
      }
    }
  }

  // Goes through the columns for `rows` activation rows.
  __device__ __forceinline__ void run(const Planes (&w)[M], const u32 (&tile)[T], const XRows& x, u32 rows) {
    const u32 groups = w[0].groups;
    const At<M> first = start(w, x, rows);
#pragma unroll
    for (int i = 0; i < T; i++)
#pragma unroll
      for (int s = 0; s < W; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) acc[i][s][k] = 0.f;
    u32 g = threadIdx.x / 32;
#pragma unroll 1
    for (; g + 8 * (W - 1) < groups; g += 8 * W) {
      const At<T> p = at(first, w, tile, g);
#pragma unroll
      for (int s = 0; s < W; s += BATCH) {
        Loaded v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) load(v[i], p, s + i);
#pragma unroll
        for (int i = 0; i < BATCH; i++) add(v[i], s + i);
      }
    }
    // What is left is fewer than W groups a warp: past the last one, the last is loaded and dropped.
#pragma unroll
    for (int s = 0; s < W; s += BATCH) {
      if (g + 8 * s >= groups) break;
      Loaded v[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) load(v[i], at(first, w, tile, min(g + 8 * (s + i), groups - 1)), 0);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        if (g + 8 * (s + i) < groups) add(v[i], s + i);
      }
    }
  }

  // A tile's sums over 8 warps, as they leave them: (warp, tile, activation row, row). Rows are apart so that a warp's
  // stores meet different banks.
  static constexpr int PITCH = 20;
  typedef f32 Left[8][T][8][PITCH];

  __device__ __forceinline__ void leave(Left& to) const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < T; i++)
#pragma unroll
      for (int b = 0; b < 2; b++) {
        f32 sum[2] = {acc[i][0][b], acc[i][0][2 + b]};
#pragma unroll
        for (int s = 1; s < W; s++) sum[0] += acc[i][s][b], sum[1] += acc[i][s][2 + b];
        *(float2*)&to[warp][i][2 * t + b][2 * q] = make_float2(sum[0], sum[1]);
      }
  }

  __device__ __forceinline__ static f32 finish(const Left& left, u32 tile, u32 b, u32 row) {
    f32 v[8];
#pragma unroll
    for (int c = 0; c < 8; c++) v[c] = left[c][tile][b][row];
#pragma unroll
    for (int o = 4; o > 0; o /= 2)
#pragma unroll
      for (int c = 0; c < o; c++) v[c] += v[c + o];
    return v[0];
  }
};
