// Embedding rows: y[i] = row tokens[i] of the matrix as f32, bit for bit the CPU's, for one codec (-DCODEC=CODEC_..).
//
// Bytes: 8 rows' worth of a tile for each row wanted (rows are interleaved by 4-byte words, and a sector is 32 bytes).
#include "codec.cuh"

struct EmbedParams {
  Matrix w;
  const u32* tokens;
  f32* y; // (rows, cols)
};
static_assert(sizeof(EmbedParams) == 80, "launch/embed.rs");

// A thread of a quantized codec has two words of a group: 8 columns; of a dense one 1.
extern "C" __global__ void __launch_bounds__(128) embed_rows(const __grid_constant__ EmbedParams p) {
  const Planes w(p.w, p.w.base);
  const u32 token = p.tokens[blockIdx.y], tile = token / TILE_ROWS, r = token % TILE_ROWS;
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  f32* y = p.y + blockIdx.y * (u64)w.cols;
  if constexpr (codec_row(CODEC).part == DENSE) {
    if (i >= w.cols) return;
    constexpr int BYTES = dense_bytes(CODEC);
    const u8* at = w.codes + (((u64)tile * w.cols + i) * TILE_ROWS + r) * BYTES;
    const u32 bits = BYTES == 4 ? load4(at) : BYTES == 2 ? load2(at) : load1(at);
    y[i] = dense_value<CODEC>(bits) * block_scale<CODEC>(w, tile, i);
  } else {
    const u32 g = i / 4, t = i % 4;
    if (g >= w.groups) return;
    Frag<CODEC> codes;
    Scales<CODEC, 1> scales;
    codes.load(w, tile * w.groups + g, r, t);
    scales.load(w, tile, g, r);
    const Scale s = scales.row(0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 word = codes.word(t, half);
#pragma unroll
      for (int j = 0; j < 4; j++) y[32 * g + 16 * half + 4 * t + j] = weight_of<CODEC>(word, j, s, half);
    }
  }
}
