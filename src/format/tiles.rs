//! A matrix in the tile layout, read back: the definition that fast kernels are tested against.

use super::block::{self, Group, word};
use super::codec::Codec;
use super::decode::F8_VALUES;
use super::layout::{self, F8_BLOCK, GROUP, Planes, SUPER, TILE_ROWS};
use half::{bf16, f16};

/// A borrowed matrix `(rows, cols)` in the tile layout.
#[derive(Debug, Clone, Copy)]
pub struct Tiles<'a> {
    codec: Codec,
    rows: usize,
    cols: usize,
    planes: Planes,
    bytes: &'a [u8],
}

impl<'a> Tiles<'a> {
    /// Borrows the bytes of a whole matrix. Panics if they are not as many as the layout needs.
    pub fn new(codec: Codec, rows: usize, cols: usize, bytes: &'a [u8]) -> Tiles<'a> {
        let planes = layout::planes(codec, rows, cols).expect("shape was checked when planned");
        assert_eq!(planes.total_bytes, bytes.len());
        Tiles { codec, rows, cols, planes, bytes }
    }

    /// Values of a (tile, group of 32 columns), `out[column][row in tile]`. Columns past the matrix (a dense one's last
    /// group may be short) and padded rows are 0.
    pub fn group(&self, tile: usize, group: usize, out: &mut [[f32; TILE_ROWS]; GROUP]) {
        *out = [[0.0; TILE_ROWS]; GROUP];
        let first = group * GROUP;
        let cols = (self.cols - first).min(GROUP);
        let mut values = [0.0; GROUP];
        for row in tile * TILE_ROWS..self.rows.min((tile + 1) * TILE_ROWS) {
            self.columns(row, first, &mut values[..cols]);
            for (out, v) in out.iter_mut().zip(&values[..cols]) {
                out[row % TILE_ROWS] = *v;
            }
        }
    }

    /// Values of one row, `(cols)`; equal bit for bit to [`super::decode_row`] of the file's bytes (FP8: times its
    /// block's scale).
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        for (g, out) in out.chunks_mut(GROUP).enumerate() {
            self.columns(row, g * GROUP, out);
        }
    }

    /// Writes one row as the file had it: the inverse of [`super::TilesMut::put_tile`], `codec.row_bytes(cols)` bytes.
    pub fn row_blocks(&self, row: usize, out: &mut [u8]) {
        assert!(row < self.rows);
        assert_eq!(self.codec.row_bytes(self.cols), Some(out.len()));
        let info = self.codec.info();
        if self.codec.is_dense() {
            for (k, e) in out.chunks_exact_mut(info.block_bytes).enumerate() {
                e.copy_from_slice(self.element(row, k));
            }
            return;
        }
        out.fill(0);
        let groups = info.block_len / GROUP;
        for (i, b) in out.chunks_exact_mut(info.block_bytes).enumerate() {
            for g in 0..groups {
                block::write(self.codec, b, g, &self.codes(row, i * groups + g));
            }
        }
    }

    /// Up to 32 columns of a row from column `first`, a multiple of 32.
    fn columns(&self, row: usize, first: usize, out: &mut [f32]) {
        let dense = |value: &dyn Fn(&[u8], usize) -> f32, out: &mut [f32]| {
            for (i, o) in out.iter_mut().enumerate() {
                *o = value(self.element(row, first + i), first + i);
            }
        };
        match self.codec {
            Codec::F32 => dense(&|b, _| f32::from_le_bytes(block::bytes(b, 0)), out),
            Codec::F16 => dense(&|b, _| f16::from_le_bytes(block::bytes(b, 0)).to_f32(), out),
            Codec::BF16 => dense(&|b, _| bf16::from_le_bytes(block::bytes(b, 0)).to_f32(), out),
            Codec::F8E4M3 => dense(&|b, k| F8_VALUES[b[0] as usize] * self.f8_scale(row, k), out),
            _ => out.copy_from_slice(&self.codes(row, first / GROUP).values(self.codec)),
        }
    }

    /// The bytes of one dense element.
    fn element(&self, row: usize, k: usize) -> &'a [u8] {
        let n = self.codec.info().block_bytes;
        let at = ((row / TILE_ROWS * self.cols + k) * TILE_ROWS + row % TILE_ROWS) * n;
        &self.planes.codes.of(self.bytes)[at..at + n]
    }

    /// The FP8 block scale of element `(row, k)`.
    fn f8_scale(&self, row: usize, k: usize) -> f32 {
        let at = row / F8_BLOCK * self.cols.div_ceil(F8_BLOCK) + k / F8_BLOCK;
        f32::from_le_bytes(block::bytes(self.planes.d.of(self.bytes), 4 * at))
    }

    /// Codes and scales of a row's group: the inverse of the tables in [`layout`].
    fn codes(&self, row: usize, g: usize) -> Group {
        let (tile, r) = (row / TILE_ROWS, row % TILE_ROWS);
        let at = tile * (self.cols / GROUP) + g; // the (tile, group)
        let sup = tile * (self.cols / SUPER) + g * GROUP / SUPER; // the (tile, super-block)
        let plane = |p: layout::Plane| p.of(self.bytes);
        let codes = plane(self.planes.codes);
        let high = plane(self.planes.high);
        let f16s = |p: layout::Plane, i: usize| word(plane(p), 2 * (i * TILE_ROWS + r));
        let u8s = |p: layout::Plane, i: usize| plane(p)[i * TILE_ROWS + r];
        let part = |bits: u32, k: usize| {
            let (p, b) = if bits == 4 || bits == 8 { (codes, k % 4) } else { (high, k % 4) };
            let lane = 4 * r + b;
            match bits {
                8 => p[512 * at + 64 * (k / 4) + lane],
                4 => p[256 * at + 64 * (k % 16 / 4) + lane] >> (4 * (k / 16)) & 15,
                1 => p[64 * at + lane] >> (k / 4) & 1,
                _ => p[128 * at + 64 * (k / 16) + lane] >> (2 * (k % 16 / 4)) & 3,
            }
        };
        // Q2_K and Q3_K have their 2-bit part in the codes plane.
        let low2 = |k: usize| codes[128 * at + 64 * (k / 16) + 4 * r + k % 4] >> (2 * (k % 16 / 4)) & 3;
        let (d, m) = (self.planes.d, self.planes.m);
        use Codec::*;
        let code = |k: usize| match self.codec {
            Q8_0 => part(8, k),
            Q5_0 | Q5_1 | Q5K => part(4, k) | part(1, k) << 4,
            Q6K => part(4, k) | part(2, k) << 4,
            Q2K => low2(k),
            Q3K => low2(k) | part(1, k) << 2,
            _ => part(4, k),
        };
        let mut group = Group { codes: std::array::from_fn(code), ..Group::default() };
        match self.codec {
            MXFP4 => group.d = u8s(d, at) as u16,
            Q4_0 | Q5_0 | Q8_0 | IQ4NL => group.d = f16s(d, at),
            Q4_1 | Q5_1 => (group.d, group.m) = (f16s(d, at), f16s(m, at)),
            Q4K | Q5K | Q2K => (group.d, group.m) = (f16s(d, sup), f16s(m, sup)),
            _ => group.d = f16s(d, sup),
        }
        match self.codec {
            Q4K | Q5K => (group.sc, group.mn) = ([u8s(self.planes.sc, at); 2], u8s(self.planes.mn, at)),
            IQ4XS => group.sc = [u8s(self.planes.sc, at); 2],
            Q2K | Q3K | Q6K => group.sc = [0, 1].map(|h| u8s(self.planes.sc, 2 * at + h)),
            _ => {}
        }
        group
    }
}

#[cfg(test)]
mod tests {
    use super::super::codec::TABLE;
    use super::super::repack::{TilesMut, put_f8_scales};
    use super::super::{decode_row, layout};
    use super::*;

    /// xorshift64*: enough for test bytes.
    fn random_bytes(seed: u64, n: usize) -> Vec<u8> {
        let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        (0..n)
            .map(|_| {
                s ^= s >> 12;
                s ^= s << 25;
                s ^= s >> 27;
                (s.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
            })
            .collect()
    }

    /// A matrix's file bytes and its tile layout, filled in two runs.
    fn repacked(codec: Codec, rows: usize, cols: usize, seed: u64) -> (Vec<u8>, Vec<u8>) {
        let row_bytes = codec.row_bytes(cols).unwrap();
        let file = random_bytes(seed, rows * row_bytes);
        // Stale bytes: a slot is filled again without being cleared.
        let planes = layout::planes(codec, rows, cols).unwrap();
        let mut bytes = vec![0xa5; planes.total_bytes];
        if codec == Codec::F8E4M3 {
            put_f8_scales(rows, cols, &planes, &mut bytes, &vec![1.0; planes.d.len / 4]);
        }
        let all = TilesMut::new(codec, rows, cols, &mut bytes);
        let cut = all.tiles() / 2;
        let (mut a, mut b) = all.split_at(cut);
        let (fa, fb) = file.split_at(a.rows() * row_bytes);
        a.put(fa);
        b.put(fb);
        (file, bytes)
    }

    fn shapes(codec: Codec) -> Vec<(usize, usize)> {
        let unit = codec.info().block_len;
        // Dense rows may have any width; padded rows and a short last group are where layouts go wrong.
        let cols = if unit == 1 { vec![1, 40, 130] } else { vec![unit, 3 * unit] };
        cols.into_iter().flat_map(|c| [(1, c), (16, c), (37, c), (133, c)]).collect()
    }

    #[test]
    fn tiles_decode_as_the_file_does_and_give_its_bytes_back() {
        for (seed, info) in TABLE.iter().enumerate() {
            let codec = info.codec;
            for (rows, cols) in shapes(codec) {
                let (file, bytes) = repacked(codec, rows, cols, seed as u64 + 1);
                let tiles = Tiles::new(codec, rows, cols, &bytes);
                let row_bytes = codec.row_bytes(cols).unwrap();
                let (mut want, mut got, mut blocks) = (vec![0.0; cols], vec![0.0; cols], vec![0; row_bytes]);
                let mut group = [[0.0; TILE_ROWS]; GROUP];
                for row in 0..rows {
                    let src = &file[row * row_bytes..][..row_bytes];
                    decode_row(codec, src, &mut want);
                    tiles.row(row, &mut got);
                    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&want), bits(&got), "{} ({rows}, {cols}) row {row}", info.name);
                    tiles.row_blocks(row, &mut blocks);
                    assert_eq!(src, blocks, "{} ({rows}, {cols}) row {row}", info.name);
                    for g in 0..cols.div_ceil(GROUP) {
                        tiles.group(row / TILE_ROWS, g, &mut group);
                        for (k, w) in want[g * GROUP..].iter().take(GROUP).enumerate() {
                            assert_eq!(w.to_bits(), group[k][row % TILE_ROWS].to_bits(), "{}", info.name);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn padded_rows_are_zero() {
        for info in &TABLE {
            let (_, bytes) = repacked(info.codec, 3, info.block_len, 9);
            // The same bytes seen as 16 rows: what a kernel that works on whole tiles reads.
            let tiles = Tiles::new(info.codec, TILE_ROWS, info.block_len, &bytes);
            let mut row = vec![1.0; info.block_len];
            for r in 3..TILE_ROWS {
                tiles.row(r, &mut row);
                assert!(row.iter().all(|&v| v == 0.0), "{} row {r}", info.name);
            }
        }
    }

    #[test]
    fn fp8_values_are_scaled_by_their_block() {
        let (rows, cols) = (200, 300);
        let planes = layout::planes(Codec::F8E4M3, rows, cols).unwrap();
        let mut bytes = vec![0; planes.total_bytes];
        let scales: Vec<f32> = (0..6).map(|i| 0.3 + i as f32).collect();
        put_f8_scales(rows, cols, &planes, &mut bytes, &scales);
        let file: Vec<u8> = random_bytes(5, rows * cols).iter().map(|b| b & 0x77).collect();
        TilesMut::new(Codec::F8E4M3, rows, cols, &mut bytes).put(&file);
        let tiles = Tiles::new(Codec::F8E4M3, rows, cols, &bytes);
        let mut row = vec![0.0; cols];
        for r in [0, 127, 128, 199] {
            tiles.row(r, &mut row);
            for k in 0..cols {
                let want = F8_VALUES[file[r * cols + k] as usize] * scales[r / 128 * 3 + k / 128];
                assert_eq!(row[k], want, "({r}, {k})");
            }
        }
    }

    #[test]
    fn layout_costs_at_most_four_percent() {
        for (rows, cols) in [(2048, 2048), (1408, 2048), (2048, 1408), (5632, 2048)] {
            for info in &TABLE {
                let Some(row_bytes) = info.codec.row_bytes(cols) else { continue };
                let total = layout::planes(info.codec, rows, cols).unwrap().total_bytes;
                assert!(total as f64 <= 1.04 * (rows * row_bytes) as f64, "{} ({rows}, {cols})", info.name);
            }
        }
    }

    /// `cargo test --release -- --ignored --nocapture repack_speed`
    #[test]
    #[ignore = "a measurement, not a check"]
    fn repack_speed() {
        for info in &TABLE {
            let (rows, cols) = (8192, 2048);
            let file = random_bytes(1, rows * info.codec.row_bytes(cols).unwrap());
            let mut bytes = vec![0; layout::planes(info.codec, rows, cols).unwrap().total_bytes];
            let mut best = f64::MAX;
            for _ in 0..7 {
                let start = std::time::Instant::now();
                let all = TilesMut::new(info.codec, rows, cols, &mut bytes);
                let cut = all.tiles() / 2;
                let (mut a, mut b) = all.split_at(cut);
                let (fa, fb) = file.split_at(file.len() / 2);
                std::thread::scope(|s| {
                    s.spawn(move || a.put(fa));
                    b.put(fb);
                });
                best = best.min(start.elapsed().as_secs_f64());
            }
            println!("{:8} {:.2} GB/s, two threads", info.name, file.len() as f64 / best / 1e9);
        }
    }
}
