// Between the projections and attention: bias, norms, clip and rope of queries and keys, and the append of what is cached
// to its page (f32, f16 rounded once, or int8 codes). Also the angles, once a step.
//
// Bytes: every query, key and value once in and once out (a few KB a row). Operations: about ten an element; latency is
// all that matters here, so a block takes one head of one row.
//
// Variants: KV (KV_F32, KV_F16, KV_I8).
#include "attend.cuh"
#include "coded.cuh"

#define THREADS 128

#if KV == KV_F32
typedef f32 Element;
__device__ inline Element narrow(f32 v) { return v; }
#else
typedef __half Element; // of int8 pages: the rope keys
__device__ inline Element narrow(f32 v) { return __float2half_rn(v); }
#endif

// Cosine and sine of |a| up to 2^25, to double precision: a quarter-turn count taken off in two parts (the product with
// the first is exact for counts below 2^26), then Taylor polynomials up to the term that an f32 can no longer tell. The
// library's own functions keep a slow path in local memory, which no kernel here may have.
__device__ inline void turn_of(double a, f32 by, f32& cosine, f32& sine) {
  const double quarter_high = 1.57079632673412561417e+00; // the first 33 bits of pi / 2
  const double quarter_low = 6.07710050650619224932e-11;
  double n = rint(a * 0.63661977236758134308);
  double r = fma(-n, quarter_low, fma(-n, quarter_high, a));
  double x = r * r;
  double s = fma(x, 1.0 / 6227020800.0, -1.0 / 39916800.0);
  s = fma(x, s, 1.0 / 362880.0);
  s = fma(x, s, -1.0 / 5040.0);
  s = fma(x, s, 1.0 / 120.0);
  s = fma(x, s, -1.0 / 6.0);
  s = fma(x * s, r, r);
  double c = fma(x, 1.0 / 479001600.0, -1.0 / 3628800.0);
  c = fma(x, c, 1.0 / 40320.0);
  c = fma(x, c, -1.0 / 720.0);
  c = fma(x, c, 1.0 / 24.0);
  c = fma(x, c, -0.5);
  c = fma(x, c, 1.0);
  int q = (int)n & 3;
  double cc = q & 1 ? s : c, ss = q & 1 ? c : s;
  cosine = (f32)(q == 1 || q == 2 ? -cc : cc) * by;
  sine = (f32)(q & 2 ? -ss : ss) * by;
}

struct AnglesParams {
  const u32* position;  // (rows)
  const f32* frequency; // (half): turns a position, in radians
  f32* turns;           // (rows, half, 2): cosine and sine
  u32 rows, half;
  f32 factor; // both are multiplied by it
  u32 pad;
};
static_assert(sizeof(AnglesParams) == 40, "mirrored in launch/rope.rs");

// The angle is rounded to f32 before cosine and sine, as the reference rounds it.
extern "C" __global__ void __launch_bounds__(THREADS) rope_angles(const __grid_constant__ AnglesParams p) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= p.rows * p.half) return;
  f32 angle = (f32)p.position[at / p.half] * p.frequency[at % p.half];
  turn_of(angle, p.factor, p.turns[2 * at], p.turns[2 * at + 1]);
}

// Sum over a block of THREADS; every thread gets it. `warps` is (THREADS / 32).
__device__ inline f32 block_sum(f32 v, f32* warps) {
#pragma unroll
  for (int w = 16; w > 0; w /= 2) v += __shfl_xor_sync(~0u, v, w);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  return (warps[0] + warps[1]) + (warps[2] + warps[3]);
}

// Turns a head by its row's angles: elements (2i, 2i+1) or (i, half+i).
struct Rotation {
  const float2* turns; // (half)
  u32 half, interleaved;

  // Pair `i`'s elements.
  __device__ u32 first(u32 i) const { return interleaved ? 2 * i : i; }
  __device__ u32 second(u32 i) const { return interleaved ? 2 * i + 1 : half + i; }

  // Turns the head that lies in shared memory; every thread of the block takes part.
  __device__ void apply(f32* head) const {
    for (u32 i = threadIdx.x; i < half; i += THREADS) {
      float2 t = turns[i];
      f32 x = head[first(i)], y = head[second(i)];
      head[first(i)] = x * t.x - y * t.y;
      head[second(i)] = y * t.x + x * t.y;
    }
  }
};

#define NORM_NONE 0
#define NORM_HEAD 1
#define NORM_ROW 2

struct GqaAppendParams {
  RowMap rows;
  u64 layer_offset;
  f32 *q, *k, *v;                            // (rows, heads or kv_heads, d), `*_stride` elements a row; q is written
  const f32 *q_bias, *k_bias, *v_bias;       // or null
  const f32 *q_norm, *k_norm;                // by norm
  const f32* turns;                          // (rows, half, 2)
  MaskParams mask;
  u32 q_stride, k_stride, v_stride;
  u32 heads, kv_heads, d, half, interleaved;
  u32 norm;
  f32 eps;
  f32 clip; // infinity: none
  u32 pad;
};
static_assert(sizeof(GqaAppendParams) == 168, "mirrored in launch/rope.rs");

extern __shared__ __align__(16) f32 head[];

// The key or value in `head` to its page.
__device__ inline void append_head(const GqaAppendParams& p, u8* page, u32 h, u32 slot, bool value) {
#if KV == KV_I8
  const CodedPage to = {page, p.kv_heads, p.d, p.d, 0};
  code_row<THREADS>(p.d, (value ? to.value_codes(h) : to.key_codes(h)) + slot * p.d,
                    (value ? to.value_scales(h) : to.key_scales(h)) + slot * scales_of(p.d),
                    [](u32 e) { return head[e]; });
#else
  Element* to = (Element*)page + (((value ? p.kv_heads : 0) + h) * PAGE_TOKENS + slot) * p.d;
  for (u32 e = threadIdx.x; e < p.d; e += THREADS) to[e] = narrow(head[e]);
#endif
}

// A block: one head of queries, keys or values of one row; with NORM_ROW, whose sum goes over all heads, all of them:
// a block that wrote its head's queries would change what another still sums.
extern "C" __global__ void __launch_bounds__(THREADS) gqa_append(const __grid_constant__ GqaAppendParams p) {
  __shared__ f32 warps[THREADS / 32];
  u32 row = blockIdx.y, unit = blockIdx.x;
  bool whole = p.norm == NORM_ROW;
  u32 q_units = whole ? 1 : p.heads, k_units = whole ? 1 : p.kv_heads;
  u32 part = unit < q_units ? 0 : unit < q_units + k_units ? 1 : 2; // queries, keys, values
  u32 heads = part == 0 ? p.heads : p.kv_heads;
  u32 first = part == 0 ? unit : part == 1 ? unit - q_units : unit - q_units - k_units;
  u32 end = whole ? heads : first + 1;
  u32 stride = part == 0 ? p.q_stride : part == 1 ? p.k_stride : p.v_stride;
  f32* x = (part == 0 ? p.q : part == 1 ? p.k : p.v) + (u64)row * stride;
  const f32* bias = part == 0 ? p.q_bias : part == 1 ? p.k_bias : p.v_bias;
  const f32* weight = part == 0 ? p.q_norm : p.k_norm;
  Rotation rotation = {(const float2*)p.turns + (u64)row * p.half, p.half, p.interleaved};
  f32 by = 1;
  if (whole && part < 2) {
    f32 sum = 0;
    for (u32 e = threadIdx.x; e < heads * p.d; e += THREADS) {
      f32 v = x[e] + (bias ? bias[e] : 0);
      sum = fmaf(v, v, sum);
    }
    by = 1 / sqrtf(block_sum(sum, warps) / (heads * p.d) + p.eps);
  }
  u32 index, slot;
  locate(p.mask, p.rows.position[row], index, slot);
  u8* page = (u8*)(p.rows.pages[p.rows.table[row] + index] + p.layer_offset);
  for (u32 h = first; h < end; h++) {
    f32* from = x + h * p.d;
    f32 sum = 0;
    for (u32 e = threadIdx.x; e < p.d; e += THREADS) {
      f32 v = from[e] + (bias ? bias[h * p.d + e] : 0);
      head[e] = v;
      sum = fmaf(v, v, sum);
    }
    if (part < 2 && p.norm == NORM_HEAD) by = 1 / sqrtf(block_sum(sum, warps) / p.d + p.eps);
    for (u32 e = threadIdx.x; e < p.d; e += THREADS) {
      f32 v = head[e];
      if (part < 2 && p.norm != NORM_NONE) v = v * by * weight[whole ? h * p.d + e : e];
      head[e] = v > p.clip ? p.clip : v < -p.clip ? -p.clip : v; // a NaN stays one
    }
    __syncthreads();
    if (part < 2) rotation.apply(head);
    __syncthreads();
    if (part == 0) {
      for (u32 e = threadIdx.x; e < p.d; e += THREADS) from[e] = head[e];
    } else {
      append_head(p, page, h, slot, part == 2);
    }
    __syncthreads();
  }
}

struct MlaAppendParams {
  RowMap rows;
  u64 layer_offset;
  f32* q;               // (rows, heads, nope + rope), q_stride elements a row; bias and rope in place
  const f32* kv;        // (rows, lora + rope), kv_stride elements a row
  const f32* q_bias;    // or null
  const f32* kv_bias;   // or null
  const f32* norm;      // (lora)
  const f32* turns;     // (rows, half, 2)
  f32* q_latent;        // (rows, heads, lora + rope): its rope part is written; or null
  MaskParams mask;
  u32 q_stride, kv_stride;
  u32 heads, lora, nope, rope, half, interleaved;
  f32 eps;
  u32 pad;
};
static_assert(sizeof(MlaAppendParams) == 144, "mirrored in launch/rope.rs");

// A block: one head's query of one row, or (the last) the row's latent and rope key.
extern "C" __global__ void __launch_bounds__(THREADS) mla_append(const __grid_constant__ MlaAppendParams p) {
  __shared__ f32 warps[THREADS / 32];
  u32 row = blockIdx.y, h = blockIdx.x;
  Rotation rotation = {(const float2*)p.turns + (u64)row * p.half, p.half, p.interleaved};
  if (h < p.heads) {
    u32 d = p.nope + p.rope;
    f32* q = p.q + (u64)row * p.q_stride + h * d;
    const f32* bias = p.q_bias ? p.q_bias + h * d : nullptr;
    if (bias) {
      for (u32 e = threadIdx.x; e < p.nope; e += THREADS) q[e] += bias[e];
    }
    for (u32 e = threadIdx.x; e < p.rope; e += THREADS) head[e] = q[p.nope + e] + (bias ? bias[p.nope + e] : 0);
    __syncthreads();
    rotation.apply(head);
    __syncthreads();
    for (u32 e = threadIdx.x; e < p.rope; e += THREADS) {
      q[p.nope + e] = head[e];
      if (p.q_latent) p.q_latent[((u64)row * p.heads + h) * (p.lora + p.rope) + p.lora + e] = head[e];
    }
    return;
  }
  u32 width = p.lora + p.rope;
  const f32* kv = p.kv + (u64)row * p.kv_stride;
  f32 sum = 0;
  for (u32 e = threadIdx.x; e < width; e += THREADS) {
    f32 v = kv[e] + (p.kv_bias ? p.kv_bias[e] : 0);
    head[e] = v;
    if (e < p.lora) sum = fmaf(v, v, sum);
  }
  f32 by = 1 / sqrtf(block_sum(sum, warps) / p.lora + p.eps);
  rotation.apply(head + p.lora);
  u32 index, slot;
  locate(p.mask, p.rows.position[row], index, slot);
  u8* page = (u8*)(p.rows.pages[p.rows.table[row] + index] + p.layer_offset);
#if KV == KV_I8
  const CodedPage to = {page, 1, p.lora, 0, p.rope};
  code_row<THREADS>(p.lora, to.key_codes(0) + slot * p.lora, to.key_scales(0) + slot * scales_of(p.lora),
                    [&](u32 e) { return head[e] * by * p.norm[e]; });
  Element* rope = to.tails() + slot * p.rope;
#else
  Element* latent = (Element*)page + slot * width;
  for (u32 e = threadIdx.x; e < p.lora; e += THREADS) latent[e] = narrow(head[e] * by * p.norm[e]);
  Element* rope = latent + p.lora;
#endif
  __syncthreads();
  for (u32 e = threadIdx.x; e < p.rope; e += THREADS) rope[e] = narrow(head[p.lora + e]);
}
