// What a prefill of latent attention needs before it can use plain keys and values: latents out of their pages as f32 rows,
// which products turn into keys and values, and those rounded to f16 for the tensor cores.
//
// Bytes: `mla_latents` 2 in (int8: 1.06) and 4 out a value; `mla_halves` 4 in and 2 out. No operations to speak of.
//
// Kernels: `mla_latents` of f16 pages, `mla_latents_coded` of int8 ones.
#include "coded.cuh"

#define THREADS 256

struct LatentsParams {
  RowMap rows; // the run's first row
  u64 layer_offset;
  f32* y;      // (entries * PAGE_TOKENS, lora): the slots of the block table's entries, in their order
  u32 lora, rope;
  u32 first, pad; // entry of the first block
};
static_assert(sizeof(LatentsParams) == 56, "mirrored in launch/mla.rs");

// A block a page: grid (entries). Slots that hold nothing yet give what lies there; who reads the result skips them.
extern "C" __global__ void __launch_bounds__(THREADS) mla_latents(const __grid_constant__ LatentsParams p) {
  const u64 page = p.rows.pages[p.rows.table[0] + p.first + blockIdx.x];
  const __half* from = (const __half*)(page + p.layer_offset);
  f32* to = p.y + (u64)blockIdx.x * PAGE_TOKENS * p.lora;
  for (u32 i = threadIdx.x; i < PAGE_TOKENS * p.lora; i += THREADS) {
    to[i] = __half2float(from[i / p.lora * (p.lora + p.rope) + i % p.lora]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) mla_latents_coded(const __grid_constant__ LatentsParams p) {
  const u64 at = p.rows.pages[p.rows.table[0] + p.first + blockIdx.x] + p.layer_offset;
  const CodedPage page = {(u8*)at, 1, p.lora, 0, p.rope};
  const u32 groups = scales_of(p.lora);
  f32* to = p.y + (u64)blockIdx.x * PAGE_TOKENS * p.lora;
  for (u32 i = threadIdx.x; i < PAGE_TOKENS * p.lora; i += THREADS) {
    const f32 scale = __half2float(page.key_scales(0)[i / p.lora * groups + i % p.lora / GROUP]);
    to[i] = (f32)page.key_codes(0)[i] * scale;
  }
}

struct HalvesParams {
  const f32* x;
  __half* y;
  u64 n;
};
static_assert(sizeof(HalvesParams) == 24, "mirrored in launch/mla.rs");

// y = x as f16, eight values a thread; n is a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS) mla_halves(const __grid_constant__ HalvesParams p) {
  const u64 at = (blockIdx.x * (u64)THREADS + threadIdx.x) * 8;
  if (at >= p.n) return;
  const float4 a = *(const float4*)(p.x + at), b = *(const float4*)(p.x + at + 4);
  const __half2 h[4] = {__floats2half2_rn(a.x, a.y), __floats2half2_rn(a.z, a.w), __floats2half2_rn(b.x, b.y),
                        __floats2half2_rn(b.z, b.w)};
  *(uint4*)(p.y + at) = *(const uint4*)h;
}
