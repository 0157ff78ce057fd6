// What the kernels of rows that each stand for themselves share: how a row is cut into segments, and how its parts become
// a result. A segment is some whole pages at absolute positions; their number depends on the row's position alone, so that
// a row's result does not depend on the batch or the grid.
#pragma once
#include "attend.cuh"
#include "quantize.cuh"

#define SEGMENTS_MAX 64

struct AttendParams {
  RowMap rows;
  u64 layer_offset;  // bytes of a page before this layer's part
  const f32* q;      // (rows, heads, d)
  f32* out;          // (rows, heads, dv)
  QGroup* out_q;     // the quantized form of the same, or null; then dv is in whole groups
  const f32* sinks;  // (heads) or null
  f32* parts;        // (rows, heads, SEGMENTS_MAX, dv)
  f32* part_sums;    // (rows, heads, SEGMENTS_MAX, 2): maximum, sum
  MaskParams mask;
  f32 scale;
  u32 heads, kv_heads;
  u32 d, dv;
  u32 latent;    // 1: values are the first dv elements of the keys
  u32 segments;  // most segments of a row; 0: one block goes through all pages
  u32 pages_min; // fewest pages of a segment
};
static_assert(sizeof(AttendParams) == 128, "mirrored in launch/attend.rs");

// Segments of the row at `i`, and pages of each.
struct Cut {
  u32 pages, each, segments;

  __device__ __forceinline__ Cut(const AttendParams& p, u32 i) {
    pages = pages_to(p.mask, i);
    each = pages;
    segments = 1;
    if (p.segments == 0) return;
    each = p.pages_min;
    while ((pages + each - 1) / each > p.segments) each *= 2;
    segments = (pages + each - 1) / each;
  }
};

// What accumulated values are multiplied by; a sink is one more logit that has no value.
__device__ __forceinline__ f32 divisor(f32 top, f32 sum, const f32* sinks, u32 head) {
  if (sinks == nullptr) return 1 / sum;
  f32 sink = sinks[head], m = fmaxf(top, sink), c = expf(top - m);
  return c / (sum * c + expf(sink - m));
}

// Writes a result; a warp's results are neighbours, so that it can quantize them.
__device__ __forceinline__ void put(const AttendParams& p, u64 at, f32 v) {
  p.out[at] = v;
  if (p.out_q) quantize_group(v, p.out_q + at / 32);
}

// Where the part of a (row, head) and segment lies.
__device__ __forceinline__ u64 part_at(const AttendParams& p, u32 row, u32 head, u32 segment) {
  return ((u64)row * p.heads + head) * SEGMENTS_MAX + segment;
}
