// What the memory and the clock give, for a measurement to be held against: no step launches these.
//
// Bytes of roof_read: all of `bytes`, once, 16 a lane and load, eight loads in flight a thread. Lane operations: one XOR
// for 4 bytes, so that nothing but memory bounds it.
#include "params.h"

struct RoofParams {
  const uint4* from;
  u32* to; // written only by a thread whose bytes say so: keeps the loads alive
  u64 bytes;
  u64 clocks; // roof_spin: how long; 16 bytes of `to` get the count
};
static_assert(sizeof(RoofParams) == 32, "bench/roof.rs");

extern "C" __global__ void __launch_bounds__(256) roof_read(const __grid_constant__ RoofParams p) {
  const u64 n = p.bytes / 16, all = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 sum = 0;
  for (; i + 7 * all < n; i += 8 * all) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(p.from + i + j * all));
#pragma unroll
    for (int j = 0; j < 8; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < n; i += all) {
    const uint4 v = p.from[i];
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x9e3779b9u) *p.to = sum;
}

// Spins for `clocks` of the SM's clock: over the time it took, that is the clock's rate.
extern "C" __global__ void roof_spin(const __grid_constant__ RoofParams p) {
  const u64 start = clock64();
  u64 now = start;
  while (now - start < p.clocks) now = clock64();
  *(u64*)p.to = now - start;
}
