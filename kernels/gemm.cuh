// Products with many activation rows on the tensor cores: mma.sync m16n8k16, f16 or bf16 in, f32 sums. The weights are the A
// operand: a tile of 16 rows is one fragment, dequantized in registers by the lane that multiplies it; activations are B.
//
// A block of 4 warps has N = 8*NT activation rows. For N = 64 each warp has two tiles of its own (8 tiles a block, or 4 of
// gate and the same 4 of up). For N = 16 there is too little work to hide the weights' latency so: the warps share two
// tiles (or one of gate and of up), take every fourth group of columns, and are added up at the end (SPLIT).
// The columns go by in groups of 32, activations through shared memory in STAGES of cp.async. Which columns an mma step
// takes is free as long as both operands agree: lane t has columns 4t..4t+3 and 16+4t..16+4t+3, as the codes lie.
//
// Bytes: weights once for every N rows, activations (f16) once for every 8 tiles. Lane operations a weight, for every N
// rows: unpack (codec.cuh), 0.5 PRMT + 0.5 HADD2 + 0.5 HMUL2 or HFMA2 to f16; NT/16 mma of 16x8x16.
// Dequantized weights are f16 times WEIGHT_SCALE: 11 bits of any magnitude from 2^-17 to 2^13. Dense ones meet two terms of
// the activations: one alone moves the logits of small models with 16-bit weights by hundredths, while quantized weights err
// by more than that. F16 is taken as it is, against f16 terms; the others, whose range is f32's, go through bf16: BF16 as it
// is, F32 and FP8 (with its block's scale) as two terms themselves.
#pragma once
#include "codec.cuh"

#define STAGES 4
#define WEIGHT_SCALE 8.f

__device__ __forceinline__ void copy_async(void* to, const void* from, u32 bytes) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

__device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two values as bf16: `a` in the low half.
__device__ __forceinline__ u32 bf16_pair(f32 a, f32 b) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
  return bits;
}

__device__ __forceinline__ u32 bits_of(__half2 v) { return *(u32*)&v; }
__device__ __forceinline__ __half2 halves_of(u32 v) { return *(__half2*)&v; }
// To f16 without infinities: a weight past f16's range stays the largest there is.
__device__ __forceinline__ __half2 clamped(f32 a, f32 b) {
  return __floats2half2_rn(fminf(fmaxf(a, -65504.f), 65504.f), fminf(fmaxf(b, -65504.f), 65504.f));
}

// The A operand of one tile, quantized codecs: read into registers a group ahead.
template <int C, bool IS_DENSE = codec_row(C).part == DENSE> struct Weights {
  static constexpr CodecRow T = codec_row(C);
  static constexpr int STAGE_BYTES = 0, PASSES = 1;
  static constexpr bool BF16 = false;
  static constexpr f32 FACTOR = 1.f / WEIGHT_SCALE;
  Frag<C> codes[2]; // rows r and r+8
  Scales<C, 1> scales[2];

  __device__ __forceinline__ void fetch(const Planes& w, u32 tile, u32 g) {
    const u32 r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      codes[i].load(w, tile * w.groups + g, r + 8 * i, t);
      scales[i].load(w, tile, g, r + 8 * i);
    }
  }

  // a[step]: fragments of the group's two halves.
  __device__ __forceinline__ void fragments(u32 (&a)[2][4]) const {
    const u32 t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Scale s = scales[i].row(0);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const f32 scale = (has_halves(T.scale) ? s.s * (f32)s.sc[h] : s.s) * WEIGHT_SCALE;
        const __half2 scale2 = clamped(scale, scale);
        const u32 word = codes[i].word(t, h);
        // 0x6400 is 1024 in f16: a byte below it is 1024 + byte.
        const __half2 bias = __float2half2_rn(-(1024.f + T.offset));
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          const __half2 code = __hadd2(halves_of(__byte_perm(word, 0x64646464, pair ? 0x4342 : 0x4140)), bias);
          if constexpr (has_mins(T.scale)) {
            const f32 m = s.m[h] * WEIGHT_SCALE;
            a[h][2 * pair + i] = bits_of(__hfma2(code, scale2, clamped(m, m)));
          } else {
            a[h][2 * pair + i] = bits_of(__hmul2(code, scale2));
          }
        }
      }
    }
  }
};

// The same for dense codecs: a group of a tile (32 columns of 16 rows) goes through shared memory, each warp its own
// tiles, since a column's rows are neighbours there and a fragment wants a row's columns.
template <int C> struct Weights<C, true> {
  static constexpr int BYTES = dense_bytes(C);
  static constexpr int STAGE_BYTES = GROUP * TILE_ROWS * BYTES;
  static constexpr bool BF16 = C != CODEC_F16, AS_IS = BYTES == 2;
  // Over the columns: high terms, low activations, and where weights have two terms, low weights.
  static constexpr int PASSES = AS_IS ? 2 : 3;
  static constexpr f32 FACTOR = 1.f;

  // 16-byte chunk `chunk` moves inside its 128 bytes so that a fragment's four column sets meet different banks.
  __device__ __forceinline__ static u32 swizzled(u32 chunk) {
    const u32 line = chunk / 8;
    return chunk ^ 2 * (BYTES == 4 ? line / 2 % 4 : BYTES == 2 ? line % 4 : line % 2);
  }

  __device__ __forceinline__ static void stage(u8* to, const Planes& w, u32 tile, u32 g) {
#pragma unroll
    for (u32 chunk = threadIdx.x % 32; chunk < STAGE_BYTES / 16; chunk += 32) {
      // The last group of a dense matrix may be short: its missing columns are 0.
      const u32 k = g * GROUP + chunk / BYTES;
      const u8* from = w.codes + ((u64)tile * w.cols + g * GROUP) * (TILE_ROWS * BYTES) + 16 * chunk;
      copy_async(to + 16 * swizzled(chunk), k < w.cols ? from : w.codes, k < w.cols ? 16 : 0);
    }
  }

  __device__ __forceinline__ static u32 bits(const u8* from, u32 k, u32 r) {
    const u32 at = (k * TILE_ROWS + r) * BYTES;
    const u8* p = from + 16 * swizzled(at / 16) + at % 16;
    return BYTES == 4 ? *(const u32*)p : BYTES == 2 ? *(const u16*)p : *p;
  }

  // Of group `g`; `low`: what the first bf16 leaves of the weights.
  __device__ __forceinline__ static void fragments(u32 (&a)[2][4], const u8* from, const Planes& w, u32 tile, u32 g,
                                                   bool low) {
    const u32 r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const f32 scale = block_scale<C>(w, tile, g * GROUP);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          const u32 k = 16 * h + 4 * t + 2 * pair;
          const u32 first = bits(from, k, r + 8 * i), second = bits(from, k + 1, r + 8 * i);
          if constexpr (AS_IS) {
            a[h][2 * pair + i] = first | second << 16;
          } else {
            const f32 x = dense_value<C>(first) * scale, y = dense_value<C>(second) * scale;
            const u32 high = bf16_pair(x, y);
            const f32 x_left = x - __uint_as_float(high << 16), y_left = y - __uint_as_float(high & 0xffff0000u);
            a[h][2 * pair + i] = low ? bf16_pair(x_left, y_left) : high;
          }
        }
  }
};

// True for blocks whose warps split the columns.
constexpr bool is_split(int nt) { return nt < 4; }

// Tiles that a block has of a matrix that stands alone; half as many of gate and of up.
constexpr u32 block_tiles(int nt) { return is_split(nt) ? 2 : 8; }

// Where the activation rows of a block lie: row i of N at `rows[i]`, or zeros where `i >= n`.
struct Gather {
  const u16* x;  // f16 or bf16 rows in fragment order
  u64 pitch;     // elements
  const u32* rows; // null: rows first, first+1..
  u32 first, n;

  __device__ __forceinline__ u32 row(u32 i) const { return rows ? __ldg(rows + first + i) : first + i; }
};

// Adds the four warps' sums in the order of the warps; every warp gets the totals. `room` holds 4 * 8*NT * 32 f32.
template <int NT> __device__ __forceinline__ void add_up_warps(f32* room, f32 (&acc)[2][NT][4]) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr u32 SUMS = 2 * NT * 4;
  copy_wait<0>();
  __syncthreads(); // no warp reads its stages any more
#pragma unroll
  for (u32 i = 0; i < SUMS; i++) room[(warp * SUMS + i) * 32 + lane] = acc[i / (4 * NT)][i / 4 % NT][i % 4];
  __syncthreads();
#pragma unroll
  for (u32 i = 0; i < SUMS; i++) {
    f32 sum = room[i * 32 + lane];
#pragma unroll
    for (u32 w = 1; w < 4; w++) sum += room[(w * SUMS + i) * 32 + lane];
    acc[i / (4 * NT)][i / 4 % NT][i % 4] = sum;
  }
}

// Which activations a thread copies into shared memory: the same 16 bytes of COPIES rows in every stage. THREADS of them
// (a block, or a warp where each has its own activations) copy N rows of 64 bytes.
template <int N, int THREADS> struct Copies {
  static constexpr int COPIES = (N * 4 + THREADS - 1) / THREADS;
  const u16* from[COPIES];
  u32 bytes[COPIES];
  u32 thread;

  __device__ __forceinline__ explicit Copies(const Gather& x) : thread(threadIdx.x % THREADS) {
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
      const u32 i = thread / 4 + THREADS / 4 * c;
      bytes[c] = i < x.n ? 16 : 0; // rows past the last are zeros
      from[c] = x.x + (i < x.n ? x.row(i) : 0) * x.pitch + 8 * (thread % 4);
    }
  }

  __device__ __forceinline__ void stage(u8* to, u32 g) const {
    static_assert(N * 4 % THREADS == 0, "every thread copies");
#pragma unroll
    for (int c = 0; c < COPIES; c++) copy_async(to + 16 * (thread + THREADS * c), from[c] + (u64)g * 32, bytes[c]);
  }
};

// Shared memory of a block (launch/gemm.rs counts the same): STAGES of activations (N, 64 bytes), one set a block or, when
// split, one a warp; then STAGES of dense weights, two tiles a warp. A split block's sums reuse it from the start.
//
// acc[i][nt]: sums of w0's tile0 (i = 0) and w1's tile1, the warp's or the block's two, against N rows. Tiles past the
// matrix are the caller's to leave out when it writes; here the last tile stands for them.
template <int C, int NT>
__device__ __forceinline__ void gemm(const Planes& w0, const Planes& w1, u32 tile0, u32 tile1, const Gather& x, u8* shared,
                                     f32 (&acc)[2][NT][4]) {
  constexpr bool SPLIT = is_split(NT), IS_DENSE = codec_row(C).part == DENSE;
  constexpr int N = 8 * NT, SETS = SPLIT ? 4 : 1;
  constexpr u32 X_STEP = N * 64 * SETS, DENSE_STEP = 8 * Weights<C>::STAGE_BYTES, STRIDE = SETS;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 groups = (w0.cols + GROUP - 1) / GROUP, first = SPLIT ? warp : 0;
  // Dense: all groups against the high terms of the activations, then against the low ones, then the weights' low terms.
  const u32 all = Weights<C>::PASSES * groups;
  u8* const x_at = shared + (SPLIT ? warp * N * 64 : 0);
  u8* const dense_at = shared + STAGES * X_STEP + warp * 2 * Weights<C>::STAGE_BYTES;
  tile0 = min(tile0, w0.tiles - 1), tile1 = min(tile1, w1.tiles - 1);

  const Copies<N, SPLIT ? 32 : 128> copies(x);
  // Stage i is the warp's (or block's) i-th group.
  auto stage = [&](u32 i) {
    const u32 g = first + i * STRIDE;
    if (g < all) {
      copies.stage(x_at + i % STAGES * X_STEP, g < 2 * groups ? g : g - 2 * groups);
      if constexpr (IS_DENSE) {
        u8* to = dense_at + i % STAGES * DENSE_STEP;
        const u32 wg = g < groups ? g : g < 2 * groups ? g - groups : g - 2 * groups;
        Weights<C>::stage(to, w0, tile0, wg);
        Weights<C>::stage(to + Weights<C>::STAGE_BYTES, w1, tile1, wg);
      }
    }
    copy_commit();
  };

  Weights<C> ahead[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[i][nt][c] = 0.f;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) stage(i);
  if constexpr (!IS_DENSE) {
    const u32 g = min(first, groups - 1);
    ahead[0].fetch(w0, tile0, g), ahead[1].fetch(w1, tile1, g);
  }

#pragma unroll 1
  for (u32 i = 0, g = first; g < all; i++, g += STRIDE) {
    copy_wait<STAGES - 2>();
    if constexpr (SPLIT) __syncwarp();
    else __syncthreads();
    stage(i + STAGES - 1);
    u32 a[2][2][4];
    if constexpr (IS_DENSE) {
      const u8* from = dense_at + i % STAGES * DENSE_STEP;
      const bool low = g >= 2 * groups;
      const u32 wg = low ? g - 2 * groups : g < groups ? g : g - groups;
      Weights<C>::fragments(a[0], from, w0, tile0, wg, low);
      Weights<C>::fragments(a[1], from + Weights<C>::STAGE_BYTES, w1, tile1, wg, low);
    } else {
      ahead[0].fragments(a[0]);
      ahead[1].fragments(a[1]);
      const u32 next = min(g + STRIDE, groups - 1);
      ahead[0].fetch(w0, tile0, next), ahead[1].fetch(w1, tile1, next);
    }
    const uint4* b = (const uint4*)(x_at + i % STAGES * X_STEP) + lane;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      const uint4 v = b[32 * nt];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if constexpr (Weights<C>::BF16) {
          mma_bf16(acc[i][nt], a[i][0], v.x, v.y);
          mma_bf16(acc[i][nt], a[i][1], v.z, v.w);
        } else {
          mma(acc[i][nt], a[i][0], v.x, v.y);
          mma(acc[i][nt], a[i][1], v.z, v.w);
        }
      }
    }
  }
  if constexpr (SPLIT) add_up_warps<NT>((f32*)shared, acc);
}

// True if this warp writes activation rows 8*nt..: all its own, or a quarter of what split warps share.
template <int NT> __device__ __forceinline__ bool writes(int nt) { return !is_split(NT) || nt % 4 == threadIdx.x / 32; }

__device__ __forceinline__ f32 silu(f32 x) { return x / (1.f + expf(-x)); }

// A lane's sums that it has to write: acc[..][nt][c] is of activation row 8*nt + 2*(lane%4) + c%2 and of row
// lane/4 + 8*(c/2) of the tile.
#define EACH_SUM(NT)                                                    \
  _Pragma("unroll") for (int nt = 0; nt < NT; nt++) if (writes<NT>(nt)) \
      _Pragma("unroll") for (int c = 0; c < 4; c++)
