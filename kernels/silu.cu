// SwiGLU's middle where a product did not fuse it: silu(gate) * up, in f32 and, for quantized products, in their form; and
// the plain sum of rows and a bias.
//
// Bytes: 8 in, 4 and 2.5 out a value. Operations: about 20 a value, and 25 more to quantize it.
#include "quantize.cuh"

#define THREADS 256

struct SiluParams {
  const f32 *gate, *up; // (rows, n), *_row elements a row
  f32* y;               // (rows, n) or null
  QGroup* q;            // (rows, n / 32) or null; then n is in whole groups
  u64 gate_row, up_row;
  u32 n, pad;
};
static_assert(sizeof(SiluParams) == 56, "mirrored in launch/act.rs");

// Grid (n / 256, rows).
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const __grid_constant__ SiluParams p) {
  const u32 k = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y;
  f32 v = 0;
  if (k < p.n) {
    const f32 g = p.gate[row * p.gate_row + k];
    v = g * (1 / (1 + expf(-g))) * p.up[row * p.up_row + k];
    if (p.y) p.y[row * (u64)p.n + k] = v;
  }
  // The whole warp is inside or outside: n is in whole groups here.
  if (p.q && k < p.n) quantize_group(v, p.q + (row * (u64)p.n + k) / 32);
}

struct BiasParams {
  f32* x; // (rows, n), x_row elements a row
  const f32* bias;
  u64 x_row;
  u32 n, pad;
};
static_assert(sizeof(BiasParams) == 32, "mirrored in launch/act.rs");

// x[r] += bias. Grid (n / 256, rows).
extern "C" __global__ void __launch_bounds__(THREADS) add_bias(const __grid_constant__ BiasParams p) {
  const u32 k = blockIdx.x * THREADS + threadIdx.x;
  if (k < p.n) p.x[blockIdx.y * p.x_row + k] += p.bias[k];
}
