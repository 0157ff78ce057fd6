// The codecs as kernels see them: one row of a table each, and three ways to read a group of 32 weights from the tile
// layout (src/format/layout.rs). Everything that differs between codecs is here.
//
// A group's codes are seen as 8 words of 4 bytes: word i holds columns 4i..4i+3, unsigned, one code a byte, `offset`
// above its value. The layout was made for this: 16 bytes of a plane are the same word of 4 neighbouring rows.
//
//   Quad<C>   4 rows x 32 columns, for a lane of a GEMV: 16-byte loads
//   Pair<C>   2 rows x words t and t+4, for a lane of an mma fragment of bytes: 8-byte loads
//   Frag<C>   1 row x words t and t+4, for a lane of an mma fragment or of an embedding row: 4-byte loads
//   Scales<C, R>  the scales of a group for R = 4, 2 or 1 rows
//
// Lane operations to unpack a weight, in SASS: nib 0.38 (one LOP3 or SHF+LOP3 for 4 weights), +bit1 0.5, +bit2 0.5,
// byte 0.25 (the sign), IQ4 and MXFP4 1.0 (PRMT table).
#pragma once
#include "params.h"
#include <cuda_fp16.h>

enum Part { NIB, NIB_BIT1, NIB_BIT2, BYTE, BIT2, BIT2_BIT1, DENSE };
// Where a group's scales are; names as in the layout's tables.
enum ScaleKind { D, D_M, E8M0, SUPER_U8, SUPER_I8, HALF_I8, HALF_Q2K, NONE };
enum Lut { PLAIN, IQ4, FP4 };

struct CodecRow {
  Part part;
  int offset;
  ScaleKind scale;
  Lut lut;
};

constexpr CodecRow codec_row(int codec) {
  switch (codec) {
    case CODEC_Q4_0: return {NIB, 8, D, PLAIN};
    case CODEC_Q4_1: return {NIB, 0, D_M, PLAIN};
    case CODEC_Q5_0: return {NIB_BIT1, 16, D, PLAIN};
    case CODEC_Q5_1: return {NIB_BIT1, 0, D_M, PLAIN};
    case CODEC_Q8_0: return {BYTE, 128, D, PLAIN};
    case CODEC_Q2_K: return {BIT2, 0, HALF_Q2K, PLAIN};
    case CODEC_Q3_K: return {BIT2_BIT1, 4, HALF_I8, PLAIN};
    case CODEC_Q4_K: return {NIB, 0, SUPER_U8, PLAIN};
    case CODEC_Q5_K: return {NIB_BIT1, 0, SUPER_U8, PLAIN};
    case CODEC_Q6_K: return {NIB_BIT2, 32, HALF_I8, PLAIN};
    case CODEC_IQ4_NL: return {NIB, 128, D, IQ4};
    case CODEC_IQ4_XS: return {NIB, 128, SUPER_I8, IQ4};
    case CODEC_MXFP4: return {NIB, 128, E8M0, FP4};
    default: return {DENSE, 0, NONE, PLAIN};
  }
}

constexpr bool has_mins(ScaleKind k) { return k == D_M || k == SUPER_U8 || k == HALF_Q2K; }
constexpr bool has_halves(ScaleKind k) { return k == HALF_I8 || k == HALF_Q2K; }

// A matrix with its planes' addresses taken.
struct Planes {
  const u8 *codes, *high, *d, *m, *sc, *mn;
  u32 rows, cols, groups, tiles;

  __device__ __forceinline__ Planes(const Matrix& w, u64 base)
      : codes((const u8*)base), high((const u8*)(base + w.high)), d((const u8*)(base + w.d)),
        m((const u8*)(base + w.m)), sc((const u8*)(base + w.sc)), mn((const u8*)(base + w.mn)), rows(w.rows),
        cols(w.cols), groups(w.cols / GROUP), tiles((w.rows + TILE_ROWS - 1) / TILE_ROWS) {}
};

// Weights are read once a pass: they leave L1 to the activations.
__device__ __forceinline__ uint4 load16(const u8* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 stream8(const u8* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load8(const u8* p) { return __ldg((const uint2*)p); }
__device__ __forceinline__ u32 load4(const u8* p) { return __ldg((const u32*)p); }
__device__ __forceinline__ u32 load2(const u8* p) { return __ldg((const u16*)p); }
__device__ __forceinline__ u32 load1(const u8* p) { return __ldg(p); }
__device__ __forceinline__ u32 lane_of(const uint4& v, int r) { return r == 0 ? v.x : r == 1 ? v.y : r == 2 ? v.z : v.w; }

// Code values plus 128, four a word. IQ4: ggml's kvalues_iq4nl; FP4: E2M1 times two.
template <Lut L> __device__ __forceinline__ u32 lut_word(int i) {
  constexpr u32 iq4[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};
  constexpr u32 fp4[4] = {0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c};
  return L == IQ4 ? iq4[i] : fp4[i];
}

// Looks 4 nibbles up, given one in the low half of each byte; the high halves must be 0.
template <Lut L> __device__ __forceinline__ u32 look_up(u32 word) {
  if constexpr (L == PLAIN) return word;
  // Bytes to a PRMT selector of 4 nibbles: b0 | b1 << 4 | b2 << 8 | b3 << 12.
  u32 pairs = word | word >> 4;
  u32 selector = (pairs & 0xff) | (pairs >> 8 & 0xff00);
  // The low three bits choose among 8 bytes, in both halves of the table; bit 3 then chooses the half.
  u32 low = __byte_perm(lut_word<L>(0), lut_word<L>(1), selector & 0x7777);
  u32 high = __byte_perm(lut_word<L>(2), lut_word<L>(3), selector & 0x7777);
  return __byte_perm(low, high, 0x3210 | (selector & 0x8888) >> 1);
}

// Word i of a row, from the row's words of the planes; what every reader below ends in.
template <int C> __device__ __forceinline__ u32 code_word(u32 code, u32 high, int i) {
  constexpr CodecRow T = codec_row(C);
  if constexpr (T.part == BYTE) return code;
  if constexpr (T.part == BIT2 || T.part == BIT2_BIT1) {
    u32 low = code >> (2 * (i % 4)) & 0x03030303;
    return T.part == BIT2 ? low : low | (high >> i & 0x01010101) << 2;
  }
  u32 nib = (i < 4 ? code : code >> 4) & 0x0f0f0f0f;
  if constexpr (T.part == NIB_BIT1) return nib | (high >> i & 0x01010101) << 4;
  if constexpr (T.part == NIB_BIT2) return nib | (high >> (2 * (i % 4)) & 0x03030303) << 4;
  return look_up<T.lut>(nib);
}

// 4 rows (4q..4q+3 of a tile) by the 32 columns of a (tile, group).
template <int C> struct Quad {
  static constexpr CodecRow T = codec_row(C);
  static constexpr int CODES = T.part == BYTE ? 8 : T.part == BIT2 || T.part == BIT2_BIT1 ? 2 : 4;
  static constexpr int HIGH = T.part == NIB_BIT2 ? 2 : T.part == NIB_BIT1 || T.part == BIT2_BIT1 ? 1 : 0;
  uint4 codes[CODES];
  uint4 high[HIGH > 0 ? HIGH : 1];

  __device__ __forceinline__ void load(const Planes& w, u32 tile_group, u32 q) {
    const u8* p = w.codes + (u64)tile_group * (64 * CODES) + 16 * q;
#pragma unroll
    for (int c = 0; c < CODES; c++) codes[c] = load16(p + 64 * c);
#pragma unroll
    for (int c = 0; c < HIGH; c++) high[c] = load16(w.high + (u64)tile_group * (64 * HIGH) + 64 * c + 16 * q);
  }

  // Word i of row r.
  __device__ __forceinline__ u32 word(int r, int i) const {
    int c = CODES == 8 ? i : CODES == 2 ? i / 4 : i % 4;
    return code_word<C>(lane_of(codes[c], r), HIGH == 0 ? 0 : lane_of(high[HIGH == 2 ? i / 4 : 0], r), i);
  }
};

// Words t and t+4 of rows 2q and 2q+1 of a tile.
template <int C> struct Pair {
  static constexpr CodecRow T = codec_row(C);
  static constexpr int CODES = T.part == BYTE || T.part == BIT2 || T.part == BIT2_BIT1 ? 2 : 1;
  static constexpr int HIGH = Quad<C>::HIGH;
  uint2 codes[CODES];
  uint2 high[HIGH > 0 ? HIGH : 1];

  // Bytes of a (tile, group) in both planes, and where in them a lane's rows start.
  static constexpr u32 BYTES = 64 * Quad<C>::CODES, HIGH_BYTES = 64 * HIGH;
  static constexpr bool BY_WORD = T.part != BIT2 && T.part != BIT2_BIT1;
  __device__ __forceinline__ static u32 start(u32 q, u32 t) { return 8 * q + (BY_WORD ? 64 * t : 0); }
  __device__ __forceinline__ static u32 high_start(u32 q) { return 8 * q; }

  __device__ __forceinline__ void load(const u8* at, const u8* high_at) {
    codes[0] = stream8(at);
    if constexpr (CODES == 2) codes[1] = stream8(at + (BY_WORD ? 256 : 64));
#pragma unroll
    for (int c = 0; c < HIGH; c++) high[c] = stream8(high_at + 64 * c);
  }

  // Word t (half 0) or t+4 (half 1) of row r.
  __device__ __forceinline__ u32 word(int r, u32 t, int half) const {
    const uint2 code = codes[CODES == 2 ? half : 0], bits = high[HIGH == 2 ? half : 0];
    return code_word<C>(r == 0 ? code.x : code.y, HIGH == 0 ? 0 : r == 0 ? bits.x : bits.y, t + 4 * half);
  }
};

// Words t and t+4 of one row: columns 4t..4t+3 and 16+4t..16+4t+3.
template <int C> struct Frag {
  static constexpr CodecRow T = codec_row(C);
  static constexpr int CODES = T.part == BYTE || T.part == BIT2 || T.part == BIT2_BIT1 ? 2 : 1;
  static constexpr int HIGH = Quad<C>::HIGH;
  u32 codes[CODES];
  u32 high[HIGH > 0 ? HIGH : 1];

  __device__ __forceinline__ void load(const Planes& w, u32 tile_group, u32 row, u32 t) {
    const u8* p = w.codes + (u64)tile_group * (64 * Quad<C>::CODES) + 4 * row;
    if constexpr (T.part == BYTE) {
      codes[0] = load4(p + 64 * t);
      codes[1] = load4(p + 64 * t + 256);
    } else if constexpr (CODES == 2) {
      codes[0] = load4(p);
      codes[1] = load4(p + 64);
    } else {
      codes[0] = load4(p + 64 * t);
    }
    const u8* h = w.high + (u64)tile_group * (64 * HIGH) + 4 * row;
#pragma unroll
    for (int c = 0; c < HIGH; c++) high[c] = load4(h + 64 * c);
  }

  // Word t (half 0) or t+4 (half 1).
  __device__ __forceinline__ u32 word(u32 t, int half) const {
    return code_word<C>(codes[CODES == 2 ? half : 0], high[HIGH == 2 ? half : 0], t + 4 * half);
  }
};

// Scales of one row's group: a weight is s * (sc[half]) * (code - offset) + m[half]; sc is 1 without half scales.
struct Scale {
  f32 s;
  i32 sc[2];
  f32 m[2];
};

__device__ __forceinline__ f32 half_bits(u32 bits) { return __half2float(__ushort_as_half((u16)bits)); }

// The scales of R neighbouring rows, as loaded.
template <int C, int R> struct Scales {
  static constexpr ScaleKind K = codec_row(C).scale;
  static constexpr bool MINS = has_mins(K), HALVES = has_halves(K);
  static constexpr bool BY_SUPER = K == SUPER_U8 || K == SUPER_I8 || HALVES;
  uint2 d, m;
  u32 sc[2], mn;

  __device__ __forceinline__ static u32 bytes(const u8* p) {
    return R == 4 ? load4(p) : R == 2 ? load2(p) : load1(p);
  }
  __device__ __forceinline__ static uint2 halves(const u8* p) {
    return R == 4 ? load8(p) : make_uint2(R == 2 ? load4(p) : load2(p), 0);
  }

  // Where the scales of a group lie, from a row of its tile on. STEP_BYTES is the distance to those of eight groups on.
  struct At {
    const u8 *d, *m, *sc, *mn;
  };
  static constexpr u32 D_BYTES = K == E8M0 ? 1 : 2, SC_BYTES = HALVES ? 2 * TILE_ROWS : TILE_ROWS;
  static constexpr u32 D_STEP = (BY_SUPER ? 1 : 8) * TILE_ROWS * D_BYTES;

  // `lane` is where those of row `row` of tile 0's group 0 lie.
  __device__ __forceinline__ static At start(const Planes& w, u32 row) {
    return {w.d + D_BYTES * row, w.m + 2 * row, w.sc + row, w.mn + row};
  }
  // Of group `g` of tile `tile`, from `start`.
  __device__ __forceinline__ static At at(const At& start, const Planes& w, u32 tile, u32 g) {
    const u32 group = tile * w.groups + g, of_d = BY_SUPER ? tile * (w.groups / 8) + g / 8 : group;
    return {start.d + (u64)of_d * (TILE_ROWS * D_BYTES), start.m + (u64)of_d * (TILE_ROWS * D_BYTES),
            start.sc + (u64)group * SC_BYTES, start.mn + (u64)group * TILE_ROWS};
  }

  // Of the group `8 * steps` after the one at `p`.
  __device__ __forceinline__ void load(const At& p, int steps) {
    const u8 *at_d = p.d + steps * D_STEP, *at_m = p.m + steps * D_STEP, *at_sc = p.sc + steps * 8 * SC_BYTES;
    if constexpr (K == E8M0) {
      d = make_uint2(bytes(at_d), 0);
    } else {
      d = halves(at_d);
    }
    if constexpr (MINS) m = halves(at_m);
    if constexpr (BY_SUPER) sc[0] = bytes(at_sc);
    if constexpr (HALVES) sc[1] = bytes(at_sc + TILE_ROWS);
    if constexpr (K == SUPER_U8) mn = bytes(p.mn + steps * 8 * TILE_ROWS);
  }
  // Of rows `row`.. of tile `tile`, group `g`. Written out: with pointers from `at`, which live longer, gemm.cu spills.
  __device__ __forceinline__ void load(const Planes& w, u32 tile, u32 g, u32 row) {
    u64 at = ((u64)tile * w.groups + g) * TILE_ROWS + row;
    u64 of_d = BY_SUPER ? ((u64)tile * (w.groups / 8) + g / 8) * TILE_ROWS + row : at;
    if constexpr (K == E8M0) {
      d = make_uint2(bytes(w.d + at), 0);
    } else {
      d = halves(w.d + 2 * of_d);
    }
    if constexpr (MINS) m = halves(w.m + 2 * of_d);
    if constexpr (HALVES) {
      u64 half = ((u64)tile * w.groups + g) * 2 * TILE_ROWS + row;
      sc[0] = bytes(w.sc + half);
      sc[1] = bytes(w.sc + half + TILE_ROWS);
    } else if constexpr (BY_SUPER) {
      sc[0] = bytes(w.sc + at);
    }
    if constexpr (K == SUPER_U8) mn = bytes(w.mn + at);
  }

  __device__ __forceinline__ static f32 half_at(const uint2& v, int r) {
    return half_bits((r < 2 ? v.x : v.y) >> (16 * (r % 2)));
  }
  __device__ __forceinline__ static u32 byte_at(u32 v, int r) { return v >> (8 * r) & 0xff; }

  // Of row r of the R.
  __device__ __forceinline__ Scale row(int r) const {
    Scale o = {0.f, {1, 1}, {0.f, 0.f}};
    if constexpr (K == E8M0) {
      u32 e = byte_at(d.x, r);
      // 2^(e - 128): halved, as the table's values are doubled; the two smallest are subnormal.
      o.s = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
      return o;
    }
    o.s = half_at(d, r);
    if constexpr (K == D_M) o.m[0] = o.m[1] = half_at(m, r);
    if constexpr (K == SUPER_U8) {
      o.s *= (f32)byte_at(sc[0], r);
      o.m[0] = o.m[1] = -(half_at(m, r) * (f32)byte_at(mn, r));
    }
    if constexpr (K == SUPER_I8) o.s *= (f32)(i8)byte_at(sc[0], r);
    if constexpr (K == HALF_I8) {
      o.sc[0] = (i8)byte_at(sc[0], r);
      o.sc[1] = (i8)byte_at(sc[1], r);
    }
    if constexpr (K == HALF_Q2K) {
      f32 dmin = half_at(m, r);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        o.sc[h] = byte_at(sc[h], r) & 15;
        o.m[h] = -(dmin * (f32)(byte_at(sc[h], r) >> 4));
      }
    }
    return o;
  }
};

// Column j of a word as f32, exactly as format::Tiles gives it: products and sums are not contracted.
template <int C> __device__ __forceinline__ f32 weight_of(u32 word, int j, const Scale& s, int half) {
  constexpr CodecRow T = codec_row(C);
  f32 scale = has_halves(T.scale) ? __fmul_rn(s.s, (f32)s.sc[half]) : s.s;
  f32 value = __fmul_rn(scale, (f32)((i32)(word >> (8 * j) & 0xff) - T.offset));
  return has_mins(T.scale) ? __fadd_rn(value, s.m[half]) : value;
}

// FP8 e4m3fn as f32: its bits are f16's, shifted, with another exponent bias; the one NaN a sign is put back.
__device__ __forceinline__ f32 f8_value(u32 b) {
  if ((b & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
  return half_bits((b & 0x80) << 8 | (b & 0x7f) << 7) * 256.f;
}

// A dense codec's bytes an element.
constexpr int dense_bytes(int codec) {
  return codec == CODEC_F32 ? 4 : codec == CODEC_F8E4M3 ? 1 : 2;
}

// A dense element from its bits.
template <int C> __device__ __forceinline__ f32 dense_value(u32 bits) {
  if constexpr (C == CODEC_F32) return __uint_as_float(bits);
  if constexpr (C == CODEC_BF16) return __uint_as_float(bits << 16);
  if constexpr (C == CODEC_F8E4M3) return f8_value(bits);
  return half_bits(bits);
}

// FP8's scale of a 128x128 block; 1 for the others.
template <int C> __device__ __forceinline__ f32 block_scale(const Planes& w, u32 tile, u32 k) {
  if constexpr (C != CODEC_F8E4M3) return 1.f;
  return __ldg((const f32*)w.d + (u64)(tile * TILE_ROWS / 128) * ((w.cols + 127) / 128) + k / 128);
}
