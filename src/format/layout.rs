//! The tile layout: how a matrix lies in memory (and in a pack), whatever file it came from.
//!
//! A matrix `(rows, cols)` is cut into tiles of [`TILE_ROWS`] = 16 rows; rows are padded to whole tiles with zero
//! codes and zero scales. Inside a tile the 16 rows are interleaved, so that a SIMD lane owns one row: its running sum
//! needs no horizontal add, and the order in which a row's products are summed is the same on every instruction set,
//! for every batch and every thread count. That is what makes results batch-invariant.
//!
//! **Why rows are interleaved.** Measured against planar rows (a row's groups one after another, then its scales) before the
//! layout was fixed; `tools/bakeoff` repeats it. Each planar loop is the best that we found for its instruction set. Instructions a
//! weight of the loop with one activation row, as compiled:
//!
//! | codec | AVX-512 planar | interleaved | AVX2 planar | interleaved | NEON planar | interleaved | sm_87 planar | interleaved |
//! |---|---|---|---|---|---|---|---|---|
//! | Q4_0 | 0.41 | 0.12 | 0.84 | 0.26 | 1.00 | 0.36 | 1.66 | 1.81 |
//! | Q8_0 | 0.36 | 0.12 | 0.84 | 0.44 | 1.00 | 0.42 | 1.56 | 1.81 |
//! | Q4_K | 0.75 | 0.15 | 1.22 | 0.31 | 1.41 | 0.51 | 2.72 | 2.84 |
//!
//! GB/s on two cores of a Zen 5 EPYC with AVX-512 VNNI, 2048 columns, 1 / 2 threads, with weights in cache and from memory
//! (512 MB; what memory gave drifted by a third within the run, so that only ratios of neighbours mean something there):
//!
//! | codec | set | planar, cache | interleaved, cache | planar, memory | interleaved, memory |
//! |---|---|---|---|---|---|
//! | Q4_0 | AVX-512 | 17 / 33 | 46 / 85 | 13 / 23 | 15 / 23 |
//! | Q8_0 | AVX-512 | 39 / 77 | 86 / 180 | 15 / 26 | 18 / 26 |
//! | Q4_K | AVX-512 | 10 / 12 | 40 / 80 | 10 / 15 | 24 / 46 |
//! | Q4_0 | AVX2 | 12 / 25 | 31 / 61 | 12 / 24 | 26 / 32 |
//! | Q8_0 | AVX2 | 22 / 45 | 32 / 65 | 21 / 34 | 27 / 31 |
//! | Q4_K | AVX2 | 8 / 15 | 28 / 55 | 7 / 13 | 23 / 33 |
//!
//! One H200 (weights from memory; its copy rate is 4270 GB/s), planar / interleaved: Q4_0 2870 / 3620 GB/s, Q8_0 4270 / 4040,
//! Q4_K 1520 / 3480. At a matrix of 16 thousand rows, which stays in its cache: 1560 / 1160, 2570 / 2110, 1050 / 1090.
//!
//! So on CPUs interleaving is worth 1.4 to 7 x where memory does not decide, and a single thread needs it to reach memory's rate at
//! all. On a GPU it costs up to a sixth more instructions a weight (a lane loads 4 bytes at a time in place of 16), loses to planar
//! rows in cache and with Q8_0, and wins from memory with the 4-bit codecs, whose planar scales are read in pieces. Only
//! interleaved rows give the same bits on every instruction set without emulating one's lanes on another. So one layout serves
//! all, the interleaved one.
//!
//! **Dense codecs** (F32 F16 BF16 F8E4M3): one plane; element `(row 16t+r, col k)` is at index `(t*cols + k)*16 + r`.
//! F8E4M3 adds a plane of f32 block scales, row-major `(ceil(rows/128), ceil(cols/128))`.
//!
//! **Quantized codecs** work in groups of [`GROUP`] = 32 columns. With `r` in 0..16 the row in the tile, `b` in 0..4 and
//! `c` in 0..8 so that the column in the group is `k = 4c + b`, and `lane = 4r + b` (0..64), a (tile, group) holds:
//!
//! | plane | bytes a (tile, group) | content |
//! |---|---|---|
//! | `nib` (4-bit part) | 256 | byte `64c + lane` (c in 0..4): low nibble is column `4c+b`, high nibble column `16+4c+b` |
//! | `bit1` (5th bit, or Q3_K's 3rd) | 64 | byte `lane`: bit `c` is the bit of column `4c+b` |
//! | `bit2` (2-bit part) | 128 | byte `64h + lane` (h in 0..2): bits `2j..2j+2` are column `16h+4j+b` (j in 0..4) |
//! | `byte` (8-bit part) | 512 | byte `64c + lane` (c in 0..8): column `4c+b`, stored plus 128 (so unsigned) |
//!
//! | codec | parts | value of a column |
//! |---|---|---|
//! | Q4_0 / Q4_1 | nib | `d*(q-8)` / `d*q + m` |
//! | Q5_0 / Q5_1 | nib, bit1 (weight 16) | `d*(q-16)` / `d*q + m` |
//! | Q8_0 | byte | `d*(q-128)` |
//! | Q2_K | bit2 | `d*sc*q - dmin*mn` (4-bit sc, mn a 16) |
//! | Q3_K | bit2, bit1 (weight 4) | `d*sc*(q-4)` (i8 sc a 16, already minus 32) |
//! | Q4_K / Q5_K | nib / nib, bit1 | `d*sc*q - dmin*mn` (u8 sc, mn a 32) |
//! | Q6_K | nib, bit2 (weight 16) | `d*sc*(q-32)` (i8 sc a 16) |
//! | IQ4_NL / IQ4_XS / MXFP4 | nib | `d*LUT[q]` / `d*sc*LUT[q]` (i8 sc a 32, already minus 32) / `e8m0*LUT[q]` |
//!
//! Scale planes, all with the 16 rows of a tile side by side:
//!
//! | plane | codecs | index of row `r` |
//! |---|---|---|
//! | `d` f16 a group | Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL | `(t*groups + g)*16 + r` |
//! | `m` f16 a group | Q4_1 Q5_1 | the same |
//! | `e8m0` u8 a group | MXFP4 | the same |
//! | `sc` u8 or i8 a group | Q4_K Q5_K (u8), IQ4_XS (i8) | the same |
//! | `mn` u8 a group | Q4_K Q5_K | the same |
//! | `sc` a half group (16 columns) | Q2_K (low nibble sc, high nibble mn), Q3_K, Q6_K (i8) | `((t*groups + g)*2 + half)*16 + r` |
//! | `d`, `dmin` f16 a super-block of 256 columns | K-quants (dmin: Q2_K Q4_K Q5_K), IQ4_XS (d) | `(t*supers + s)*16 + r` |
//!
//! Planes start on 64-byte boundaries, in the order codes, high, d, m, sc, mn.

use super::codec::Codec;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Columns of a quantization group.
pub const GROUP: usize = 32;
/// Columns of a super-block (K-quants, IQ4_XS).
pub const SUPER: usize = 256;
/// Planes start on this boundary.
pub const PLANE_ALIGN: usize = 64;
/// Rows and columns covered by one FP8 block scale.
pub const F8_BLOCK: usize = 128;

/// A byte range inside a matrix's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plane {
    /// First byte.
    pub offset: usize,
    /// Bytes; 0 when the codec has no such plane.
    pub len: usize,
}

impl Plane {
    /// The plane's bytes inside `bytes`.
    pub fn of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.offset..self.offset + self.len]
    }
}

/// Where each plane of a `(rows, cols)` matrix lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Planes {
    /// Dense elements, or the `nib`, `bit2` (Q2_K, Q3_K) or `byte` part.
    pub codes: Plane,
    /// The part above it: `bit1` (Q5_*, Q3_K) or `bit2` (Q6_K).
    pub high: Plane,
    /// `d` (f16), `e8m0`, or FP8's f32 block scales.
    pub d: Plane,
    /// `m` or `dmin` (f16).
    pub m: Plane,
    /// `sc`.
    pub sc: Plane,
    /// `mn`.
    pub mn: Plane,
    /// Bytes of the whole matrix, a multiple of [`PLANE_ALIGN`].
    pub total_bytes: usize,
}

/// Tiles of a matrix with `rows` rows.
pub fn tiles(rows: usize) -> usize {
    rows.div_ceil(TILE_ROWS)
}

/// Lays out a `(rows, cols)` matrix. `None` if `cols` does not fit the codec's block or the size overflows.
pub fn planes(codec: Codec, rows: usize, cols: usize) -> Option<Planes> {
    codec.row_bytes(cols)?;
    let tiles = tiles(rows);
    let tile_cols = tiles.checked_mul(TILE_ROWS)?.checked_mul(cols)?;
    tile_cols.checked_mul(8)?; // everything below stays under this
    let tile_groups = tiles * (cols / GROUP);
    let tile_supers = tiles * (cols / SUPER);
    use Codec::*;
    // Bytes of codes and high part a (tile, group), f16 a group, scale bytes a (tile, group), mn bytes.
    let mut p = Planes::default();
    let (codes, high) = match codec {
        F32 => (tile_cols * 4, 0),
        F16 | BF16 => (tile_cols * 2, 0),
        F8E4M3 => (tile_cols, 0),
        Q4_0 | Q4_1 | Q4K | IQ4NL | IQ4XS | MXFP4 => (tile_groups * 256, 0),
        Q5_0 | Q5_1 | Q5K => (tile_groups * 256, tile_groups * 64),
        Q8_0 => (tile_groups * 512, 0),
        Q2K => (tile_groups * 128, 0),
        Q3K => (tile_groups * 128, tile_groups * 64),
        Q6K => (tile_groups * 256, tile_groups * 128),
    };
    let d = match codec {
        F32 | F16 | BF16 => 0,
        F8E4M3 => rows.div_ceil(F8_BLOCK) * cols.div_ceil(F8_BLOCK) * 4,
        Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | IQ4NL => tile_groups * TILE_ROWS * 2,
        MXFP4 => tile_groups * TILE_ROWS,
        Q2K | Q3K | Q4K | Q5K | Q6K | IQ4XS => tile_supers * TILE_ROWS * 2,
    };
    let m = match codec {
        Q4_1 | Q5_1 => tile_groups * TILE_ROWS * 2,
        Q2K | Q4K | Q5K => tile_supers * TILE_ROWS * 2,
        _ => 0,
    };
    let sc = match codec {
        Q4K | Q5K | IQ4XS => tile_groups * TILE_ROWS,
        Q2K | Q3K | Q6K => tile_groups * 2 * TILE_ROWS,
        _ => 0,
    };
    let mn = if matches!(codec, Q4K | Q5K) { tile_groups * TILE_ROWS } else { 0 };
    let mut at = 0;
    for (plane, len) in [
        (&mut p.codes, codes),
        (&mut p.high, high),
        (&mut p.d, d),
        (&mut p.m, m),
        (&mut p.sc, sc),
        (&mut p.mn, mn),
    ] {
        *plane = Plane { offset: at, len };
        at = (at + len).next_multiple_of(PLANE_ALIGN);
    }
    p.total_bytes = at;
    Some(p)
}
