// What a row sees and where it lies: kv::Placement and the CPU backend's View, in device code.
#pragma once
#include "params.h"

#define NONE_SEEN __int_as_float(0xff800000) // -infinity: the maximum of nothing

// Block table entries that may hold positions up to `last`.
__device__ inline u32 pages_to(const MaskParams& m, u32 last) {
  u32 group = m.placement * PAGE_TOKENS;
  return (last / group + 1) * m.placement;
}

// The position at a slot of block table entry `index`.
__device__ inline u32 position_of(const MaskParams& m, u32 index, u32 slot) {
  if (m.placement == 1) return index * PAGE_TOKENS + slot;
  u32 g = index / m.placement, residue = index % m.placement;
  return (g * PAGE_TOKENS + slot) * m.placement + residue;
}

// `(entry, slot)` of a position.
__device__ inline void locate(const MaskParams& m, u32 position, u32& index, u32& slot) {
  u32 group = m.placement * PAGE_TOKENS;
  u32 g = position / group, within = position % group;
  index = g * m.placement + within % m.placement;
  slot = within / m.placement;
}

// Slots of entry `index` that hold positions up to `last`; they are the first ones.
__device__ inline u32 slots_to(const MaskParams& m, u32 index, u32 last) {
  u32 first = position_of(m, index, 0);
  return first > last ? 0 : min((last - first) / m.placement + 1, (u32)PAGE_TOKENS);
}

// True if the row at `i` sees position `j`.
__device__ inline bool sees(const MaskParams& m, u32 i, u32 j) {
  if (j > i) return false;
  if (m.kind == MASK_FULL) return true;
  bool near = i - j < m.window;
  if (m.kind == MASK_SLIDING) return near;
  return (i - j) % m.stride == 0 || (m.kind == MASK_LOCAL_STRIDED && near);
}

// True if the row at `i` sees any slot of entry `index`.
__device__ inline bool sees_page(const MaskParams& m, u32 i, u32 index) {
  u32 slots = slots_to(m, index, i);
  if (slots == 0) return false;
  if (m.kind == MASK_FULL) return true;
  u32 last = position_of(m, index, slots - 1);
  bool near = i - last < m.window;
  if (m.kind == MASK_SLIDING) return near;
  return index % m.placement == i % m.stride || (m.kind == MASK_LOCAL_STRIDED && near);
}

// The first entry from `index` on that the row at `i` may see: skips what a window or a stride leaves out without a look
// at each page, so that sparse rows do the work of the pages they read. An entry it names may still turn out unseen.
__device__ inline u32 next_page(const MaskParams& m, u32 i, u32 index) {
  if (m.kind == MASK_FULL) return index;
  u32 from = i + 1 > m.window ? i + 1 - m.window : 0; // the window's first position
  u32 near = max(index, from / (PAGE_TOKENS * m.placement) * m.placement);
  if (m.kind == MASK_SLIDING) return near;
  u32 far = index + (i % m.stride + m.stride - index % m.stride) % m.stride;
  return m.kind == MASK_STRIDED ? far : min(near, far);
}
