// Attention of a run of consecutive rows over f16 or int8 pages, on tensor cores: prefill. Grouped-query attention reads
// keys and values from pages; latent attention reads keys and values that were made from the latents (made_k, made_v) and
// the rope keys, which all heads share and which are f16 in every page.
//
// A block: 64 rows of one query head against the pages that any of them sees, 64 keys at a time, in order, with a
// running softmax in registers (Dao, arXiv:2307.08691). Scores and sums are f32; queries, keys, weights and values enter
// the tensor cores as f16.
//
// Bytes: keys and values once a (64 rows, head), mostly from L2. Operations: (d + dv) * 64 multiply-adds a key and 64
// rows in mma.m16n8k16, and about 12 lane operations a score for the softmax.
//
// Variants: HEAD, the widths that a block has room for: 64 (64, 64), 128 (128, 128), 192 (192, 128), 256 (256, 256); the
// same as CODED_HEAD for pages of int8 codes, which become f16 on their way into shared memory (about 2 lane operations a
// code and block).
#include "attend.cuh"
#include "coded.cuh"
#include "mma.cuh"

#ifdef CODED_HEAD
#define HEAD CODED_HEAD
#define CODED true
#else
#define CODED false
#endif

#define THREADS 128
#define ROWS 64
#define KEYS 64
#define NO_PAGE 0xffffffffu
#define CARRY 8 // a row's partial sums of four threads, its maximum, and room

constexpr int D = HEAD, DV = HEAD == 192 ? 128 : HEAD;
// Two stages where they fit into 101,376 bytes; queries then live in registers and enter through the second stage.
constexpr int STAGES = HEAD == 256 ? 1 : 2;
// Elements of a row in shared memory: 16 bytes more than the row, so that eight rows lie in different banks.
constexpr int PITCH_K = D + 8, PITCH_V = DV + 8;
constexpr int STAGE_LEN = KEYS * (PITCH_K + PITCH_V);

struct FlashParams {
  RowMap rows;        // from the run's first row on
  u64 layer_offset;
  const f32* q;       // (n, heads, d), q_stride elements a row
  f32* out;           // (n, heads, dv)
  const f32* sinks;   // (heads) or null
  const __half* made_k; // (heads of this launch, made_tokens, d - rope) or null: keys are in pages
  const __half* made_v; // (heads of this launch, made_tokens, dv)
  MaskParams mask;
  f32 scale;
  u32 n, heads, kv_heads, d, dv;
  u32 rope;                // made keys: width of the rope key
  u32 rope_at, rope_pitch; // where rope keys start in a layer's part, and from one to the next, in f16 elements
  u32 made_tokens, first_head, q_stride;
  u32 first_entry, end_entry; // of the block table: what this launch reads
  u32 whole, pad;             // that is all that its rows see
  f32* carry; // (n, heads, CARRY): else, where rows stop and go on; `out` holds their weighted values meanwhile
};
static_assert(sizeof(FlashParams) == 160, "mirrored in launch/flash.rs");

// The rows of a block and the pages that they see.
struct Span {
  u32 first, last; // positions
  u32 pages;

  // True if any row may see entry `index`.
  __device__ __forceinline__ bool sees(const MaskParams& m, u32 index) const {
    if (m.kind == MASK_FULL) return true;
    u32 slots = slots_to(m, index, last);
    if (slots == 0) return false;
    bool near = position_of(m, index, slots - 1) + m.window > first;
    if (m.kind == MASK_SLIDING) return near;
    u32 ahead = (index % m.stride + m.stride - first % m.stride) % m.stride;
    return ahead <= last - first || (m.kind == MASK_LOCAL_STRIDED && near);
  }

  // The first seen entry from `index` on.
  __device__ __forceinline__ u32 next(const MaskParams& m, u32 index) const {
    if (m.kind == MASK_SLIDING && first + 1 > m.window) index = max(index, (first + 1 - m.window) / PAGE_TOKENS);
    while (index < pages && !sees(m, index)) index++;
    return index < pages ? index : NO_PAGE;
  }
};

// Two pages: the keys of one pass.
struct Pass {
  u32 page[2];

  __device__ __forceinline__ static Pass from(const Span& span, const MaskParams& m, u32 index) {
    u32 a = span.next(m, index);
    return {{a, a == NO_PAGE ? a : span.next(m, a + 1)}};
  }
  __device__ __forceinline__ bool is_empty() const { return page[0] == NO_PAGE; }
  __device__ __forceinline__ Pass after(const Span& span, const MaskParams& m) const {
    return page[1] == NO_PAGE ? Pass{{NO_PAGE, NO_PAGE}} : from(span, m, page[1] + 1);
  }
};

// A page's rows of one head to shared memory as f16; rows from `slots` on and columns from `width` on become zero.
template <int W, int PITCH>
__device__ __forceinline__ void widen_rows(const i8* codes, const __half* scales, u32 width, u32 slots, __half* to) {
#pragma unroll 4
  for (u32 i = threadIdx.x; i < PAGE_TOKENS * (W / 8); i += THREADS) {
    const u32 row = i / (W / 8), column = i % (W / 8) * 8;
    uint4 wide = make_uint4(0, 0, 0, 0);
    if (row < slots && column < width) {
      const uint2 eight = *(const uint2*)(codes + row * width + column);
      wide = widen_eight(eight, scales[row * scales_of(width) + column / GROUP]);
    }
    *(uint4*)(to + row * PITCH + column) = wide;
  }
}

// Keys and values of a pass to shared memory. Rows that hold no position up to the last row's become zero: what lies
// there may be anything, and a zero weight does not silence a NaN.
__device__ __forceinline__ void load_pass(const FlashParams& p, const Pass& pass, u32 last, u32 kv_head, __half* keys) {
  const u64* table = p.rows.pages + p.rows.table[0];
  // Plain variables and selects: an array indexed by a row's number would lie in local memory.
  const bool second = pass.page[1] != NO_PAGE;
  const u32 slots_a = slots_to(p.mask, pass.page[0], last), slots_b = second ? slots_to(p.mask, pass.page[1], last) : 0;
  const __half* base_a = (const __half*)(table[pass.page[0]] + p.layer_offset);
  const __half* base_b = (const __half*)(table[second ? pass.page[1] : 0] + p.layer_offset);
  __half* values = keys + KEYS * PITCH_K;
  if constexpr (CODED) {
    const u32 a = pass.page[0], b = second ? pass.page[1] : a;
    const CodedPage page_a = {(u8*)(table[a] + p.layer_offset), p.kv_heads, p.d, p.dv, 0};
    const CodedPage page_b = {(u8*)(table[b] + p.layer_offset), p.kv_heads, p.d, p.dv, 0};
    widen_rows<D, PITCH_K>(page_a.key_codes(kv_head), page_a.key_scales(kv_head), p.d, slots_a, keys);
    widen_rows<D, PITCH_K>(page_b.key_codes(kv_head), page_b.key_scales(kv_head), p.d, slots_b, keys + PAGE_TOKENS * PITCH_K);
    widen_rows<DV, PITCH_V>(page_a.value_codes(kv_head), page_a.value_scales(kv_head), p.dv, slots_a, values);
    widen_rows<DV, PITCH_V>(page_b.value_codes(kv_head), page_b.value_scales(kv_head), p.dv, slots_b,
                            values + PAGE_TOKENS * PITCH_V);
    return;
  }
  bool made = p.made_k != nullptr;
  u32 nope = p.d - p.rope;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < KEYS * (D / 8); i += THREADS) {
    u32 row = i / (D / 8), column = i % (D / 8) * 8, slot = row % PAGE_TOKENS;
    bool b = row >= PAGE_TOKENS;
    const __half* base = b ? base_b : base_a;
    u64 token = (u64)kv_head * p.made_tokens + ((b ? pass.page[1] : pass.page[0]) - p.first_entry) * PAGE_TOKENS + slot;
    const __half* from = !made          ? base + (kv_head * PAGE_TOKENS + slot) * p.d + column
                         : column < nope ? p.made_k + token * nope + column
                                         : base + p.rope_at + slot * p.rope_pitch + (column - nope);
    bool real = slot < (b ? slots_b : slots_a) && column < p.d;
    copy16(keys + row * PITCH_K + column, real ? from : base_a, real);
  }
#pragma unroll 4
  for (u32 i = threadIdx.x; i < KEYS * (DV / 8); i += THREADS) {
    u32 row = i / (DV / 8), column = i % (DV / 8) * 8, slot = row % PAGE_TOKENS;
    bool b = row >= PAGE_TOKENS;
    const __half* base = b ? base_b : base_a;
    u64 token = (u64)kv_head * p.made_tokens + ((b ? pass.page[1] : pass.page[0]) - p.first_entry) * PAGE_TOKENS + slot;
    const __half* in_page = base + (p.kv_heads * p.d + kv_head * p.dv) * PAGE_TOKENS + slot * p.dv;
    const __half* from = (made ? p.made_v + token * p.dv : in_page) + column;
    bool real = slot < (b ? slots_b : slots_a) && column < p.dv;
    copy16(values + row * PITCH_V + column, real ? from : base_a, real);
  }
}

// Queries of 64 rows as f16; rows past the run and columns past d are zero.
__device__ __forceinline__ void load_queries(const FlashParams& p, u32 first, u32 head, __half* to) {
  for (u32 i = threadIdx.x; i < ROWS * D; i += THREADS) {
    u32 row = i / D, column = i % D;
    f32 v = first + row < p.n && column < p.d ? p.q[(u64)(first + row) * p.q_stride + head * p.d + column] : 0;
    to[row * PITCH_K + column] = __float2half_rn(v);
  }
}

// A warp's 16 rows: running maxima (of unscaled scores) and sums of rows g and g+8, weighted values.
struct State {
  f32 top[2], sum[2];
  f32 acc[DV / 8][4];
};

__device__ __forceinline__ void begin(State& state) {
#pragma unroll
  for (int h = 0; h < 2; h++) state.top[h] = NONE_SEEN, state.sum[h] = 0;
#pragma unroll
  for (int n = 0; n < DV / 8; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) state.acc[n][c] = 0;
  }
}

// Rows `row` and `row + 8` as `stop` left them: bit for bit, so that a part's end does not show.
__device__ __forceinline__ void go_on(const FlashParams& p, u32 row, u32 head, State& state) {
  begin(state);
  const u32 lane = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u64 at = (u64)(row + 8 * h) * p.heads + head;
    if (row + 8 * h >= p.n) continue;
    state.sum[h] = p.carry[at * CARRY + lane];
    state.top[h] = p.carry[at * CARRY + 4];
#pragma unroll
    for (int n = 0; n < DV / 8; n++) {
      const u32 column = 8 * n + 2 * lane;
      if (column >= p.dv) continue;
      const float2 v = *(const float2*)(p.out + at * p.dv + column);
      state.acc[n][2 * h] = v.x, state.acc[n][2 * h + 1] = v.y;
    }
  }
}

__device__ __forceinline__ void stop(const FlashParams& p, u32 row, u32 head, const State& state) {
  const u32 lane = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u64 at = (u64)(row + 8 * h) * p.heads + head;
    if (row + 8 * h >= p.n) continue;
    p.carry[at * CARRY + lane] = state.sum[h];
    if (lane == 0) p.carry[at * CARRY + 4] = state.top[h];
#pragma unroll
    for (int n = 0; n < DV / 8; n++) {
      const u32 column = 8 * n + 2 * lane;
      if (column < p.dv) *(float2*)(p.out + at * p.dv + column) = make_float2(state.acc[n][2 * h], state.acc[n][2 * h + 1]);
    }
  }
}

// Hides what rows `i[0]` and `i[1]` do not see: keys of the pass that start at positions `base`.
__device__ __forceinline__ void hide(const MaskParams& m, const u32 (&i)[2], const u32 (&base)[2], f32 (&s)[KEYS / 8][4]) {
  u32 t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      u32 position = (j < 4 ? base[0] : base[1]) + (j % 4 * 8 + 2 * t + c % 2) * m.placement;
      if (!sees(m, i[c / 2], position)) s[j][c] = NONE_SEEN;
    }
  }
}

// Scores into weights; `scale` is in powers of two.
__device__ __forceinline__ void soften(State& state, f32 (&s)[KEYS / 8][4], f32 scale) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    f32 m = state.top[h];
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) m = fmaxf(m, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    f32 shift = m == NONE_SEEN ? 0 : m * scale;
    f32 factor = exp2f(fmaf(state.top[h], scale, -shift));
    f32 sum = 0;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
      for (int c = 2 * h; c < 2 * h + 2; c++) {
        s[j][c] = exp2f(fmaf(s[j][c], scale, -shift));
        sum += s[j][c];
      }
    }
    state.top[h] = m;
    state.sum[h] = fmaf(state.sum[h], factor, sum);
#pragma unroll
    for (int n = 0; n < DV / 8; n++) {
      state.acc[n][2 * h] *= factor;
      state.acc[n][2 * h + 1] *= factor;
    }
  }
}

extern __shared__ __align__(16) __half room[];

extern "C" __global__ void __launch_bounds__(THREADS, HEAD == 64 ? 3 : 2) flash(const __grid_constant__ FlashParams p) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Later rows see more keys: they start first.
  const u32 first = (gridDim.x - 1 - blockIdx.x) * ROWS, head = p.first_head + blockIdx.y;
  const u32 kv_head = p.made_k ? blockIdx.y : head / (p.heads / p.kv_heads);
  const u32 position = p.rows.position[0];
  Span span;
  span.first = position + first;
  span.last = position + min(first + ROWS, p.n) - 1;
  span.pages = min(pages_to(p.mask, span.last), p.end_entry);

  __half* q = STAGES == 2 ? room + STAGE_LEN : room + STAGE_LEN * STAGES;
  Pass pass = Pass::from(span, p.mask, p.first_entry);
  // Rows may see nothing of a part.
  if (!pass.is_empty()) load_pass(p, pass, span.last, kv_head, room);
  commit();
  load_queries(p, first, head, q);
  __syncthreads();
  const __half* q_at = q + (16 * warp + lane % 16) * PITCH_K + lane / 16 * 8;
  u32 query[STAGES == 2 ? D / 16 : 1][4];
  if constexpr (STAGES == 2) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) load4(query[k], q_at + 16 * k);
    __syncthreads();
  }

  State state;
  if (p.first_entry == 0) {
    begin(state);
  } else {
    go_on(p, first + 16 * warp + lane / 4, head, state);
  }
  const u32 mine[2] = {min(span.first + 16 * warp + lane / 4, span.last),
                       min(span.first + 16 * warp + lane / 4 + 8, span.last)};
  const f32 scale = p.scale * 1.4426950408889634f;
  for (u32 stage = 0; !pass.is_empty();) {
    Pass next = pass.after(span, p.mask);
    if constexpr (STAGES == 2) {
      if (!next.is_empty()) load_pass(p, next, span.last, kv_head, room + (stage ^ 1) * STAGE_LEN);
      commit();
      wait<1>();
    } else {
      wait<0>();
    }
    __syncthreads();
    const __half* keys = room + stage * STAGE_LEN;
    const __half* values = keys + KEYS * PITCH_K;
    f32 s[KEYS / 8][4];
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
    const __half* k_at = keys + (lane % 8 + lane / 16 * 8) * PITCH_K + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      if constexpr (STAGES == 1) load4(query[0], q_at + 16 * k);
#pragma unroll
      for (int j = 0; j < KEYS / 16; j++) {
        u32 b[4];
        load4(b, k_at + 16 * j * PITCH_K + 16 * k);
        mma(s[2 * j], query[STAGES == 2 ? k : 0], b[0], b[1]);
        mma(s[2 * j + 1], query[STAGES == 2 ? k : 0], b[2], b[3]);
      }
    }
    bool all = p.mask.kind == MASK_FULL && pass.page[1] != NO_PAGE && (pass.page[1] + 1) * PAGE_TOKENS <= span.first + 1;
    if (!all) {
      // A page that is not there starts past every position.
      const u32 base[2] = {position_of(p.mask, pass.page[0], 0),
                           pass.page[1] == NO_PAGE ? 0x80000000u : position_of(p.mask, pass.page[1], 0)};
      hide(p.mask, mine, base, s);
    }
    soften(state, s, scale);
    const __half* v_at = values + (lane % 8 + lane / 8 % 2 * 8) * PITCH_V + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      const u32 weights[4] = {pair(s[2 * k][0], s[2 * k][1]), pair(s[2 * k][2], s[2 * k][3]),
                              pair(s[2 * k + 1][0], s[2 * k + 1][1]), pair(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < DV / 16; n++) {
        u32 b[4];
        load4_turned(b, v_at + 16 * k * PITCH_V + 16 * n);
        mma(state.acc[2 * n], weights, b[0], b[1]);
        mma(state.acc[2 * n + 1], weights, b[2], b[3]);
      }
    }
    __syncthreads();
    if constexpr (STAGES == 2) {
      stage ^= 1;
    } else if (!next.is_empty()) {
      load_pass(p, next, span.last, kv_head, room);
      commit();
    }
    pass = next;
  }
  wait<0>();

  if (!p.whole) return stop(p, first + 16 * warp + lane / 4, head, state);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    f32 sum = state.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    f32 by = 1 / sum;
    if (p.sinks) { // one more logit, without a value
      f32 top = state.top[h] * p.scale, sink = p.sinks[head], m = fmaxf(top, sink), c = expf(top - m);
      by = c / (sum * c + expf(sink - m));
    }
    u32 row = first + 16 * warp + lane / 4 + 8 * h;
    if (row >= p.n) continue;
    f32* out = p.out + ((u64)row * p.heads + head) * p.dv;
#pragma unroll
    for (int n = 0; n < DV / 8; n++) {
      u32 column = 8 * n + 2 * (lane % 4);
      if (column < p.dv) *(float2*)(out + column) = make_float2(state.acc[n][2 * h] * by, state.acc[n][2 * h + 1] * by);
    }
  }
}
