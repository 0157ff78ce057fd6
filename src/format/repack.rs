//! File blocks into the tile layout.
//!
//! Everything is 4-byte words: a row's group is brought into the word form of the layout's table (byte `b` of word `c`
//! belongs to lane `4r + b`), and word `c` of row `r` is stored at byte `64c + 4r`. No floats are touched: the repack
//! is lossless, and [`super::Tiles::row_blocks`] undoes it.

use super::block::{bytes, iq4xs_scale, k4_scales_mins, q3_scales};
use super::codec::Codec;
use super::layout::{self, F8_BLOCK, Planes, TILE_ROWS};

/// The file rows of one tile.
type Rows<'a> = [&'a [u8]; TILE_ROWS];

/// A run of whole tiles of one matrix, being filled. [`TilesMut::split_at`] cuts it so that threads fill disjoint runs.
#[derive(Debug)]
pub struct TilesMut<'a> {
    codec: Codec,
    cols: usize,
    rows: usize,
    /// codes, high, d, m, sc, mn: this run's part of each plane.
    planes: [&'a mut [u8]; 6],
}

impl<'a> TilesMut<'a> {
    /// All tiles of a matrix `(rows, cols)` whose `bytes` are [`layout::planes`]`.total_bytes` long (panics if not). FP8's
    /// block scales are no part of it: [`put_f8_scales`] writes them first.
    pub fn new(codec: Codec, rows: usize, cols: usize, bytes: &'a mut [u8]) -> TilesMut<'a> {
        let p = layout::planes(codec, rows, cols).expect("shape was checked when planned");
        assert_eq!(p.total_bytes, bytes.len());
        let mut rest = bytes;
        let mut at = 0;
        let mut take = |plane: layout::Plane, keep: bool| {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(plane.offset - at);
            let (part, tail) = tail.split_at_mut(plane.len);
            at = plane.offset + plane.len;
            rest = tail;
            if keep { part } else { &mut [][..] }
        };
        let scales_by_tile = codec != Codec::F8E4M3;
        let planes = [
            take(p.codes, true),
            take(p.high, true),
            take(p.d, scales_by_tile),
            take(p.m, true),
            take(p.sc, true),
            take(p.mn, true),
        ];
        TilesMut { codec, cols, rows, planes }
    }

    /// Tiles in this run.
    pub fn tiles(&self) -> usize {
        layout::tiles(self.rows)
    }

    /// Matrix rows in this run: 16 a tile, fewer in the matrix's last tile.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Cuts after the first `tiles` tiles.
    pub fn split_at(self, tiles: usize) -> (TilesMut<'a>, TilesMut<'a>) {
        let all = self.tiles();
        assert!(tiles <= all);
        let mut left: [&mut [u8]; 6] = Default::default();
        let mut right: [&mut [u8]; 6] = Default::default();
        for (i, plane) in self.planes.into_iter().enumerate() {
            let a_tile = plane.len().checked_div(all).unwrap_or(0);
            (left[i], right[i]) = plane.split_at_mut(tiles * a_tile);
        }
        let rows = self.rows.min(tiles * TILE_ROWS);
        let part = |rows, planes| TilesMut { codec: self.codec, cols: self.cols, rows, planes };
        (part(rows, left), part(self.rows - rows, right))
    }

    /// Fills the whole run from its rows as the file has them, one after another.
    pub fn put(&mut self, file_rows: &[u8]) {
        let row_bytes = self.codec.row_bytes(self.cols).expect("checked in new");
        assert_eq!(file_rows.len(), self.rows * row_bytes);
        let mut rows: Vec<&[u8]> = Vec::with_capacity(TILE_ROWS);
        for t in 0..self.tiles() {
            let n = (self.rows - t * TILE_ROWS).min(TILE_ROWS);
            rows.clear();
            rows.extend((0..n).map(|r| &file_rows[(t * TILE_ROWS + r) * row_bytes..][..row_bytes]));
            self.put_tile(t, &rows);
        }
    }

    /// Fills tile `tile` of this run from up to 16 rows, each as the file has it, in any order the caller likes (so that
    /// permuted or gathered rows cost nothing more). Missing rows become zeros.
    pub fn put_tile(&mut self, tile: usize, file_rows: &[&[u8]]) {
        let row_bytes = self.codec.row_bytes(self.cols).expect("checked in new");
        assert!(tile < self.tiles() && file_rows.len() <= TILE_ROWS);
        assert!(file_rows.iter().all(|r| r.len() == row_bytes));
        // A row of zero bytes has zero scales in every codec.
        let zeros = vec![0; if file_rows.len() < TILE_ROWS { row_bytes } else { 0 }];
        let rows: Rows = std::array::from_fn(|r| file_rows.get(r).copied().unwrap_or(&zeros));
        let tiles = self.tiles();
        let mut planes = self.planes.each_mut().into_iter().map(|p| {
            let n = p.len() / tiles;
            &mut p[tile * n..(tile + 1) * n]
        });
        let mut next = || planes.next().expect("six planes");
        let dst = Dst { codes: next(), high: next(), d: next(), m: next(), sc: next(), mn: next() };
        put(self.codec, &rows, dst);
    }
}

/// Writes FP8's block scales, row-major `(ceil(rows/128), ceil(cols/128))`, into a matrix's bytes.
pub fn put_f8_scales(rows: usize, cols: usize, planes: &Planes, bytes: &mut [u8], scales: &[f32]) {
    assert_eq!(scales.len(), rows.div_ceil(F8_BLOCK) * cols.div_ceil(F8_BLOCK));
    let dst = &mut bytes[planes.d.offset..planes.d.offset + planes.d.len];
    for (dst, s) in dst.as_chunks_mut::<4>().0.iter_mut().zip(scales) {
        *dst = s.to_le_bytes();
    }
}

/// One tile's part of each plane (or one super-block's).
struct Dst<'a> {
    codes: &'a mut [u8],
    high: &'a mut [u8],
    d: &'a mut [u8],
    m: &'a mut [u8],
    sc: &'a mut [u8],
    mn: &'a mut [u8],
}

fn put(codec: Codec, rows: &Rows, dst: Dst) {
    use Codec::*;
    match codec {
        F32 => dense::<4>(rows, dst.codes),
        F16 | BF16 => dense::<2>(rows, dst.codes),
        F8E4M3 => dense::<1>(rows, dst.codes),
        Q4_0 | IQ4NL => block32::<18, 2, 0, 0>(rows, dst),
        MXFP4 => block32::<17, 1, 0, 0>(rows, dst),
        Q4_1 => block32::<20, 2, 2, 0>(rows, dst),
        Q5_0 => block32::<22, 2, 0, 4>(rows, dst),
        Q5_1 => block32::<24, 2, 2, 4>(rows, dst),
        Q8_0 => q8_0(rows, dst),
        Q4K => supers::<144>(rows, dst, q4k),
        Q5K => supers::<176>(rows, dst, q5k),
        Q2K => supers::<84>(rows, dst, q2k),
        Q3K => supers::<110>(rows, dst, q3k),
        Q6K => supers::<210>(rows, dst, q6k),
        IQ4XS => supers::<136>(rows, dst, iq4xs),
    }
}

/// Transposes elements of `N` bytes: `(16 rows, cols)` to `(cols, 16)`.
fn dense<const N: usize>(rows: &Rows, codes: &mut [u8]) {
    const STEP: usize = 16;
    let full = codes.len() / (TILE_ROWS * STEP * N);
    let (head, tail) = codes.split_at_mut(full * TILE_ROWS * STEP * N);
    for (i, dst) in head.chunks_exact_mut(TILE_ROWS * STEP * N).enumerate() {
        // Each row is read once into a local block: rows a power of two apart share cache sets.
        let mut block = [[0u8; N]; TILE_ROWS * STEP];
        for r in 0..TILE_ROWS {
            let src = rows[r][i * STEP * N..][..STEP * N].as_chunks::<N>().0;
            block[r * STEP..(r + 1) * STEP].copy_from_slice(src);
        }
        // Interleaving the two halves rotates the index (row, column) left by one bit; four of them swap row and column.
        for _ in 0..4 {
            let mut next = [[0u8; N]; TILE_ROWS * STEP];
            let (lo, hi) = block.split_at(TILE_ROWS * STEP / 2);
            for j in 0..TILE_ROWS * STEP / 2 {
                next[2 * j] = lo[j];
                next[2 * j + 1] = hi[j];
            }
            block = next;
        }
        dst.copy_from_slice(block.as_flattened());
    }
    for (k, dst) in tail.chunks_exact_mut(TILE_ROWS * N).enumerate() {
        for (dst, row) in dst.chunks_exact_mut(N).zip(rows) {
            dst.copy_from_slice(&row[(full * STEP + k) * N..][..N]);
        }
    }
}

/// Block-32 codecs with nibbles: `D` bytes of scale, `M` of min, `H` of fifth bits, then 16 bytes whose halves already
/// are as the layout wants them.
fn block32<const BLOCK: usize, const D: usize, const M: usize, const H: usize>(rows: &Rows, dst: Dst) {
    let blocks = rows.map(|r| r.as_chunks::<BLOCK>().0);
    let d = dst.d.chunks_exact_mut(TILE_ROWS * D);
    for (g, (codes, d)) in dst.codes.as_chunks_mut::<256>().0.iter_mut().zip(d).enumerate() {
        for r in 0..TILE_ROWS {
            let b = &blocks[r][g];
            d[r * D..][..D].copy_from_slice(&b[..D]);
            if M > 0 {
                dst.m[(g * TILE_ROWS + r) * 2..][..2].copy_from_slice(&b[D..D + 2]);
            }
            if H > 0 {
                let word = spread_bits(u32::from_le_bytes(bytes(b, D + M)));
                dst.high[g * 64 + 4 * r..][..4].copy_from_slice(&word.to_le_bytes());
            }
            let q: [u8; 16] = bytes(b, D + M + H);
            for c in 0..4 {
                codes[64 * c + 4 * r..][..4].copy_from_slice(&q[4 * c..4 * c + 4]);
            }
        }
    }
}

fn q8_0(rows: &Rows, dst: Dst) {
    let blocks = rows.map(|r| r.as_chunks::<34>().0);
    let d = dst.d.as_chunks_mut::<32>().0;
    for (g, (codes, d)) in dst.codes.as_chunks_mut::<512>().0.iter_mut().zip(d).enumerate() {
        for r in 0..TILE_ROWS {
            let b = &blocks[r][g];
            d[2 * r..2 * r + 2].copy_from_slice(&b[..2]);
            let q = bytes::<32>(b, 2).map(|q| q ^ 0x80);
            for c in 0..8 {
                codes[64 * c + 4 * r..][..4].copy_from_slice(&q[4 * c..4 * c + 4]);
            }
        }
    }
}

/// Bit `4c + b` to bit `8b + c`: swaps of index bits, each one exchange of bits under a mask.
#[inline(always)]
fn spread_bits(mut w: u32) -> u32 {
    // Index (c2 c1 c0 b1 b0), from bit 4 down, to (b1 b0 c2 c1 c0).
    let mut swap = |shift: u32, mask: u32| {
        let t = (w >> shift ^ w) & mask;
        w ^= t ^ t << shift;
    };
    swap(14, 0x0000_cccc); // bits 4 and 1: (b1 c1 c0 c2 b0)
    swap(7, 0x00aa_00aa); // bits 3 and 0: (b1 b0 c0 c2 c1)
    swap(2, 0x0c0c_0c0c); // bits 2 and 1: (b1 b0 c2 c0 c1)
    swap(1, 0x2222_2222); // bits 1 and 0: (b1 b0 c2 c1 c0)
    w
}

/// Calls `put` for each super-block of the 16 rows.
fn supers<const BLOCK: usize>(rows: &Rows, dst: Dst, put: fn(&[&[u8; BLOCK]; TILE_ROWS], Dst)) {
    let blocks = rows.map(|r| r.as_chunks::<BLOCK>().0);
    let n = blocks[0].len();
    if n == 0 {
        return;
    }
    let part = |p: &'_ mut [u8], s: usize| {
        let len = p.len() / n;
        (s * len, (s + 1) * len)
    };
    let Dst { codes, high, d, m, sc, mn } = dst;
    for s in 0..n {
        let mut cut = [&mut *codes, &mut *high, &mut *d, &mut *m, &mut *sc, &mut *mn].into_iter().map(|p| {
            let (from, to) = part(p, s);
            &mut p[from..to]
        });
        let mut next = || cut.next().expect("six planes");
        let one = Dst { codes: next(), high: next(), d: next(), m: next(), sc: next(), mn: next() };
        put(&blocks.map(|b| &b[s]), one);
    }
}

/// The words of 4 columns in a run of bytes.
#[inline(always)]
fn words<const N: usize>(b: &[u8], at: usize) -> [u32; N] {
    std::array::from_fn(|i| u32::from_le_bytes(bytes(b, at + 4 * i)))
}

/// Word `c` of row `r` in a part of a (tile, group).
#[inline(always)]
fn set(part: &mut [u8], c: usize, r: usize, w: u32) {
    part[64 * c + 4 * r..][..4].copy_from_slice(&w.to_le_bytes());
}

/// f16 of row `r`.
#[inline(always)]
fn set16(d: &mut [u8], r: usize, b: &[u8], at: usize) {
    d[2 * r..2 * r + 2].copy_from_slice(&b[at..at + 2]);
}

/// Scale bytes of row `r`, one a group or half group.
#[inline(always)]
fn set_bytes(plane: &mut [u8], r: usize, codes: &[u8]) {
    for (dst, c) in plane.as_chunks_mut::<TILE_ROWS>().0.iter_mut().zip(codes) {
        dst[r] = *c;
    }
}

/// A byte a column holding the nibbles of two groups to two groups of nibbles in halves.
#[inline(always)]
fn nibble_pair(b: &[u8], at: usize, r: usize, even: &mut [u8; 256], odd: &mut [u8; 256]) {
    let q: [u32; 8] = words(b, at);
    for c in 0..4 {
        set(even, c, r, q[c] & 0x0f0f_0f0f | (q[4 + c] & 0x0f0f_0f0f) << 4);
        set(odd, c, r, q[c] >> 4 & 0x0f0f_0f0f | q[4 + c] & 0xf0f0_f0f0);
    }
}

/// A byte a column with bit `g` for group `g`, to each group's `bit1` word: in every byte position the 8 words are an 8x8
/// bit matrix, which three rounds of exchanges transpose.
#[inline(always)]
fn bit_planes(mut q: [u32; 8]) -> [u32; 8] {
    for (s, mask) in [(1, 0x5555_5555), (2, 0x3333_3333), (4, 0x0f0f_0f0f)] {
        for i in (0..8).filter(|i| i & s == 0) {
            let t = (q[i] >> s ^ q[i + s]) & mask;
            q[i + s] ^= t;
            q[i] ^= t << s;
        }
    }
    q
}

/// Two bits from `shift` of a byte a column, to the layout's two `bit2` words.
#[inline(always)]
fn pair_plane(q: &[u32; 8], shift: usize) -> [u32; 2] {
    [0, 1].map(|h| (0..4).fold(0, |w, j| w | (q[4 * h + j] >> shift & 0x0303_0303) << (2 * j)))
}

/// d, dmin and the 6-bit scale and min codes, which Q4_K and Q5_K have in the same place.
#[inline(always)]
fn k4_scales(b: &[u8], r: usize, dst: &mut Dst) {
    set16(dst.d, r, b, 0);
    set16(dst.m, r, b, 2);
    let (sc, mn) = k4_scales_mins(&bytes(b, 4));
    set_bytes(dst.sc, r, &sc);
    set_bytes(dst.mn, r, &mn);
}

fn q4k(blocks: &[&[u8; 144]; TILE_ROWS], mut dst: Dst) {
    for (r, b) in blocks.iter().enumerate() {
        k4_scales(*b, r, &mut dst);
        let codes = dst.codes.as_chunks_mut::<256>().0.as_chunks_mut::<2>().0;
        for (i, [even, odd]) in codes.iter_mut().enumerate() {
            nibble_pair(*b, 16 + 32 * i, r, even, odd);
        }
    }
}

fn q5k(blocks: &[&[u8; 176]; TILE_ROWS], mut dst: Dst) {
    for (r, b) in blocks.iter().enumerate() {
        k4_scales(*b, r, &mut dst);
        let codes = dst.codes.as_chunks_mut::<256>().0.as_chunks_mut::<2>().0;
        for (i, [even, odd]) in codes.iter_mut().enumerate() {
            nibble_pair(*b, 48 + 32 * i, r, even, odd);
        }
        let qh = bit_planes(words(*b, 16));
        for (g, high) in dst.high.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            set(high, 0, r, qh[g]);
        }
    }
}

fn q2k(blocks: &[&[u8; 84]; TILE_ROWS], dst: Dst) {
    for (r, b) in blocks.iter().enumerate() {
        set16(dst.d, r, *b, 80);
        set16(dst.m, r, *b, 82);
        set_bytes(dst.sc, r, &b[..16]);
        for (g, codes) in dst.codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let w = pair_plane(&words(*b, 16 + 32 * (g / 4)), 2 * (g % 4));
            set(codes, 0, r, w[0]);
            set(codes, 1, r, w[1]);
        }
    }
}

fn q3k(blocks: &[&[u8; 110]; TILE_ROWS], dst: Dst) {
    for (r, b) in blocks.iter().enumerate() {
        set16(dst.d, r, *b, 108);
        set_bytes(dst.sc, r, &q3_scales(&bytes(*b, 96)));
        let hmask = bit_planes(words(*b, 0));
        let high = dst.high.as_chunks_mut::<64>().0;
        for (g, (codes, high)) in dst.codes.as_chunks_mut::<128>().0.iter_mut().zip(high).enumerate() {
            let w = pair_plane(&words(*b, 32 + 32 * (g / 4)), 2 * (g % 4));
            set(codes, 0, r, w[0]);
            set(codes, 1, r, w[1]);
            set(high, 0, r, hmask[g]);
        }
    }
}

fn q6k(blocks: &[&[u8; 210]; TILE_ROWS], dst: Dst) {
    for (r, b) in blocks.iter().enumerate() {
        set16(dst.d, r, *b, 208);
        set_bytes(dst.sc, r, &b[192..208]);
        // 32 bytes of ql hold the nibbles of groups j and j + 2 of each half super-block.
        let codes = dst.codes.as_chunks_mut::<256>().0.as_chunks_mut::<4>().0;
        for (n, [g0, g1, g2, g3]) in codes.iter_mut().enumerate() {
            nibble_pair(*b, 64 * n, r, g0, g2);
            nibble_pair(*b, 64 * n + 32, r, g1, g3);
        }
        for (g, high) in dst.high.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let w = pair_plane(&words(*b, 128 + 32 * (g / 4)), 2 * (g % 4));
            set(high, 0, r, w[0]);
            set(high, 1, r, w[1]);
        }
    }
}

fn iq4xs(blocks: &[&[u8; 136]; TILE_ROWS], dst: Dst) {
    for (r, b) in blocks.iter().enumerate() {
        set16(dst.d, r, *b, 0);
        for (g, codes) in dst.codes.as_chunks_mut::<256>().0.iter_mut().enumerate() {
            dst.sc[g * TILE_ROWS + r] = iq4xs_scale(*b, g).wrapping_sub(32);
            let q: [u32; 4] = words(*b, 8 + 16 * g);
            for (c, q) in q.into_iter().enumerate() {
                set(codes, c, r, q);
            }
        }
    }
}
