// What every kernel file shares with the host: integer names, the codec numbers, and the structs that kernels take.
//
// A kernel takes exactly one argument, a struct by value. src/backend/cuda/params.rs mirrors this file; the asserts
// here and there hold both to the same sizes, so that a field added on one side does not compile on the other.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef float f32;

// Numbers of format::Codec, in its order.
#define CODEC_F32 0
#define CODEC_F16 1
#define CODEC_BF16 2
#define CODEC_F8E4M3 3
#define CODEC_Q4_0 4
#define CODEC_Q4_1 5
#define CODEC_Q5_0 6
#define CODEC_Q5_1 7
#define CODEC_Q8_0 8
#define CODEC_Q2_K 9
#define CODEC_Q3_K 10
#define CODEC_Q4_K 11
#define CODEC_Q5_K 12
#define CODEC_Q6_K 13
#define CODEC_IQ4_NL 14
#define CODEC_IQ4_XS 15
#define CODEC_MXFP4 16

#define TILE_ROWS 16
#define GROUP 32
#define SUPER 256
#define PAGE_TOKENS 32

// A weight matrix (rows, cols) in the tile layout (src/format/layout.rs). `base` is 64-byte aligned and holds the codes
// plane; the other planes are byte offsets from it. In a table of matrices of one shape only `base` differs.
struct Matrix {
  u64 base;
  u64 high, d, m, sc, mn;
  u32 rows, cols;
  u32 codec;
  u32 pad;
};
static_assert(sizeof(Matrix) == 64, "mirrored in params.rs");

// Where the rows of a step lie in their sequences. Read from device memory, so that a captured graph serves every
// position: `position[row]`; `table[row]` is where the row's block table starts in `pages`, whose entries are device
// addresses of pages (a page holds all layers; a layer's part starts `layer * layer_bytes` in).
struct RowMap {
  const u32* position;
  const u32* table;
  const u64* pages;
};
static_assert(sizeof(RowMap) == 24, "mirrored in params.rs");

// Element type of cached keys, values and latents.
#define KV_F32 0
#define KV_F16 1
#define KV_I8 2

// Which earlier positions j a row at i sees (model::Mask): kind, window, stride.
#define MASK_FULL 0
#define MASK_SLIDING 1
#define MASK_STRIDED 2
#define MASK_LOCAL_STRIDED 3
struct MaskParams {
  u32 kind, window, stride;
  u32 placement; // stride by which positions are placed in pages (kv::Placement); 1 for full and sliding
};
static_assert(sizeof(MaskParams) == 16, "mirrored in params.rs");

// One routed pick: the expert and what its output is multiplied by.
struct Pick {
  u32 expert;
  f32 weight;
};
static_assert(sizeof(Pick) == 8, "mirrored in params.rs");
