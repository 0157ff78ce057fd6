// The layout bake-off on GPUs: planar rows against 16 interleaved rows, one activation row (decode), for Q4_0, Q8_0 and Q4_K.
//
//     ./count_sass.py                      # compiles for sm_87 by NVRTC, disassembles: instructions a weight, by pipe
//
// Planar: a warp has a row, a lane a group: one 16-byte load of nibbles (two of bytes) feeds 32 weights, sums are added across the
// warp at the end. Interleaved (src/format/layout.rs): a warp has a tile, half a warp a group, a lane a row: four 4-byte loads (eight)
// that a half warp makes as 64 bytes in a row; activations are the same for all lanes of a half. Activations as on the CPU:
// 14 bits in two int8 halves. Kernel names: codec_layout.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
enum { Q4_0, Q8_0, Q4_K, GROUP = 32, TILE = 16, SUPER = 8 };

struct Mat { const u8 *codes, *sc, *mn; const u16 *d, *m; int rows, groups; };
// Groups of an activation row: 32 high and 32 low halves, then scale, -sum times the codec's offset, scale times sum.
struct Act { int4 high[2], low[2]; float d; int off; float sd, pad; };

static __device__ __forceinline__ float half_to_f(u16 v) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v)); return f; }

// Eight words of four codes each against both halves.
static __device__ __forceinline__ int dot(const int c[8], const Act &x, int off) {
  const int *h = (const int *)x.high, *l = (const int *)x.low;
  int high = 0, low = off;
#pragma unroll
  for (int k = 0; k < 8; k++) high = __dp4a(c[k], h[k], high), low = __dp4a(c[k], l[k], low);
  return (high << 6) + low;
}

template <int CODEC> static __device__ __forceinline__ float scaled(const Mat &w, size_t at, size_t sup, const Act &x, const int c[8], float acc) {
  float s = CODEC == Q4_K ? half_to_f(w.d[sup]) * (float)w.sc[at] : half_to_f(w.d[at]);
  acc = fmaf(s * x.d, (float)dot(c, x, CODEC == Q4_K ? 0 : x.off), acc);
  if (CODEC == Q4_K) acc = fmaf(-(half_to_f(w.m[sup]) * (float)w.mn[at]), x.sd, acc);
  return acc;
}

template <int CODEC> static __device__ __forceinline__ void planar(Mat w, const Act *x, float *y) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= w.rows) return;
  float acc = 0;
#pragma unroll 1
  for (int g = lane; g < w.groups; g += 32) {
    const size_t at = (size_t)row * w.groups + g, sup = (size_t)row * (w.groups / SUPER) + g / SUPER;
    int c[8];
    if (CODEC == Q8_0) {
      const int4 a = ((const int4 *)w.codes)[2 * at], b = ((const int4 *)w.codes)[2 * at + 1];
      const int v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < 8; k++) c[k] = v[k] ^ 0x80808080;
    } else {
      const int4 a = ((const int4 *)w.codes)[at];
      const int v[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int k = 0; k < 4; k++) c[k] = v[k] & 0x0f0f0f0f, c[k + 4] = (v[k] >> 4) & 0x0f0f0f0f;
    }
    acc = scaled<CODEC>(w, at, sup, x[g], c, acc);
  }
#pragma unroll
  for (int apart = 16; apart; apart /= 2) acc += __shfl_xor_sync(~0u, acc, apart);
  if (lane == 0) y[row] = acc;
}

template <int CODEC> static __device__ __forceinline__ void interleaved(Mat w, const Act *x, float *y) {
  const int lane = threadIdx.x % 32, r = lane % TILE, tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (tile >= w.rows / TILE) return;
  float acc = 0;
#pragma unroll 1
  for (int g = lane / TILE; g < w.groups; g += 2) {
    const size_t tg = (size_t)tile * w.groups + g, at = tg * TILE + r;
    const size_t sup = ((size_t)tile * (w.groups / SUPER) + g / SUPER) * TILE + r;
    const int *p = (const int *)(w.codes + tg * (CODEC == Q8_0 ? 512 : 256)) + r;
    int c[8];
#pragma unroll
    for (int k = 0; k < (CODEC == Q8_0 ? 8 : 4); k++) {
      const int v = p[TILE * k];
      if (CODEC == Q8_0) c[k] = v ^ 0x80808080;
      else c[k] = v & 0x0f0f0f0f, c[k + 4] = (v >> 4) & 0x0f0f0f0f;
    }
    acc = scaled<CODEC>(w, at, sup, x[g], c, acc);
  }
  acc += __shfl_xor_sync(~0u, acc, TILE);
  if (lane < TILE) y[tile * TILE + r] = acc;
}

#define KERNELS(codec, name)                                                                                       \
  extern "C" __global__ void name##_planar(Mat w, const Act *__restrict__ x, float *__restrict__ y) { planar<codec>(w, x, y); } \
  extern "C" __global__ void name##_interleaved(Mat w, const Act *__restrict__ x, float *__restrict__ y) { interleaved<codec>(w, x, y); }
KERNELS(Q4_0, q4_0)
KERNELS(Q8_0, q8_0)
KERNELS(Q4_K, q4_k)
