//! Pages for the tests of kernels that read or write them: rows scattered over memory, and NaN wherever nothing was written,
//! so that a read past a row's positions shows.

use super::attend::Seen;
use crate::backend::KV_GROUP;
use crate::backend::KvType;
use crate::backend::cpu::cache::code;
use crate::backend::cuda::params::RowMap;
use crate::backend::cuda::{Buffer, Gpu};
use crate::backend::page::PageLayout;
use crate::format::f16;
use crate::kv::{Placement, pages_for};
use crate::model::Mask;

/// Values in -1..1, the same for a seed.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Bytes of a page before the layer under test: another layer's.
const LAYER_OFFSET: usize = 4096;

/// Rows, each a sequence of its own (or all of one), with pages scattered over memory.
pub struct Cached {
    /// Position of each row.
    pub positions: Vec<usize>,
    /// What kernels are given.
    pub seen: Seen,
    layout: PageLayout,
    mask: Mask,
    /// Bytes of the pages as the host wrote them, and where each sequence's pages are.
    bytes: Vec<u8>,
    page_bytes: usize,
    pub tables: Vec<Vec<usize>>,
    pages: Buffer,
    _row_map: [Buffer; 3],
}

/// Pages of grouped-query attention.
pub fn gqa_page(kind: KvType, heads: usize, d: usize) -> PageLayout {
    PageLayout { kind, heads, key: d, value: d, tail: 0 }
}

/// Pages of latents and rope keys.
pub fn mla_page(kind: KvType, lora: usize, rope: usize) -> PageLayout {
    PageLayout { kind, heads: 1, key: lora + rope, value: 0, tail: rope }
}

impl Cached {
    /// Pages whose every byte is 0xff: NaN in all types, but for codes of -1.
    pub fn new(gpu: &Gpu, layout: PageLayout, mask: Mask, positions: &[usize], one_sequence: bool) -> Cached {
        let page_bytes = (LAYER_OFFSET + layout.layer_bytes()).next_multiple_of(256);
        let longest = positions.iter().max().unwrap() + 1;
        let mut tables: Vec<Vec<usize>> = Vec::new();
        let mut n_pages = 0;
        for &p in if one_sequence { std::slice::from_ref(&longest) } else { positions } {
            // Without cached rows (a test of angles) no page is read.
            let need = if layout.key == 0 { 1 } else { pages_for(p + 1, mask.stride()) };
            tables.push((n_pages..n_pages + need).collect());
            n_pages += need;
        }
        // A fixed permutation: the page after this one in a table is never the next in memory.
        let step = (n_pages / 2 + 1..).find(|s| gcd(*s, n_pages.max(1)) == 1).unwrap();
        tables.iter_mut().flatten().for_each(|p| *p = *p * step % n_pages);
        let bytes = vec![0xff; n_pages * page_bytes];
        let pages = gpu.upload(&bytes);
        let addresses: Vec<u64> =
            tables.iter().flatten().map(|p| pages.ptr().0 + (p * page_bytes) as u64).collect();
        let mut starts: Vec<u32> =
            tables.iter().scan(0, |at, t| Some(std::mem::replace(at, *at + t.len() as u32))).collect();
        if one_sequence {
            starts = vec![0; positions.len()];
        }
        let at: Vec<u32> = positions.iter().map(|&p| p as u32).collect();
        let row_map = [gpu.upload(&at), gpu.upload(&starts), gpu.upload(&addresses)];
        let rows = RowMap { position: row_map[0].ptr(), table: row_map[1].ptr(), pages: row_map[2].ptr() };
        let seen = Seen { rows, layer_offset: LAYER_OFFSET as u64, mask: mask.into(), kv: layout.kind };
        let positions = positions.to_vec();
        Cached { positions, seen, layout, mask, bytes, page_bytes, tables, pages, _row_map: row_map }
    }

    /// Where the layer's part of the page of a position starts, and the position's slot there.
    fn locate(&self, row: usize, position: usize) -> (usize, usize) {
        let (index, slot) = Placement { stride: self.mask.stride() }.locate(position);
        let table = self.tables.get(row).unwrap_or(&self.tables[0]);
        (table[index] * self.page_bytes + LAYER_OFFSET, slot)
    }

    /// Writes positions 0 to the row's own of every sequence with random keys and values. Returns them as they will be
    /// read: for each sequence `(tokens, heads, key)` and `(tokens, heads, value)`.
    pub fn fill(&mut self, gpu: &Gpu) -> Vec<(Vec<f32>, Vec<f32>)> {
        let mut all = Vec::new();
        for s in 0..self.tables.len() {
            let last =
                if self.tables.len() == 1 { self.positions.iter().max() } else { self.positions.get(s) };
            let (tokens, heads) = (*last.unwrap() + 1, self.layout.heads);
            let wide = |value| tokens * heads * self.layout.width(value);
            let mut rows = [random(wide(false), 7 + s as u64), random(wide(true), 99 + s as u64)];
            for p in 0..tokens {
                let (at, slot) = self.locate(s, p);
                let mut pieces = Vec::new();
                for (value, rows) in [false, true].into_iter().zip(&mut rows) {
                    let width = self.layout.width(value);
                    for row in rows[p * heads * width..][..heads * width].chunks_mut(width.max(1)) {
                        let bytes = self.encode(row, value);
                        self.decode(&bytes, value, row);
                        pieces.push(bytes);
                    }
                }
                let mut left: &[u8] = &pieces.concat();
                let layout = self.layout;
                layout.each_piece(slot, |piece| {
                    let (from, rest) = left.split_at(piece.len());
                    self.bytes[at..][piece].copy_from_slice(from);
                    left = rest;
                });
            }
            all.push(rows.into());
        }
        gpu.device.copy_in(self.pages.ptr(), &self.bytes).unwrap();
        gpu.device.synchronize().unwrap();
        all
    }

    /// A row in the canonical form, coded as the CPU codes it.
    pub fn encode(&self, x: &[f32], value: bool) -> Vec<u8> {
        let half = |x: &f32| f16::from_f32(*x).to_le_bytes();
        match self.layout.kind {
            KvType::F32 => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            KvType::F16 => x.iter().flat_map(half).collect(),
            KvType::Int8 => {
                let (coded, tail) = x.split_at(self.layout.coded_width(value));
                let mut codes = vec![0i8; coded.len()];
                let mut scales = vec![f16::ZERO; coded.len().div_ceil(KV_GROUP)];
                code(coded, &mut codes, &mut scales);
                let codes = codes.iter().map(|c| *c as u8);
                codes
                    .chain(scales.iter().flat_map(|s| s.to_le_bytes()))
                    .chain(tail.iter().flat_map(half))
                    .collect()
            }
        }
    }

    /// The reverse: what is read.
    fn decode(&self, bytes: &[u8], value: bool, x: &mut [f32]) {
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        match self.layout.kind {
            KvType::F32 => {
                let words = bytes.as_chunks::<4>().0;
                x.iter_mut().zip(words).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
            }
            KvType::F16 => x.iter_mut().zip(bytes.chunks(2)).for_each(|(x, b)| *x = half(b)),
            KvType::Int8 => {
                let coded = self.layout.coded_width(value);
                let (scales, tail) = bytes[coded..].split_at(2 * coded.div_ceil(KV_GROUP));
                let (of_codes, of_tail) = x.split_at_mut(coded);
                for (i, x) in of_codes.iter_mut().enumerate() {
                    *x = f32::from(bytes[i] as i8) * half(&scales[i / KV_GROUP * 2..]);
                }
                of_tail.iter_mut().zip(tail.chunks(2)).for_each(|(x, b)| *x = half(b));
            }
        }
    }

    /// What lies at the rows' positions, each in the canonical form; no other byte may have changed.
    pub fn appended(&self, gpu: &Gpu) -> Vec<Vec<u8>> {
        let mut got = gpu.download::<u8>(self.pages.ptr(), self.bytes.len());
        let read = |row: usize| {
            let (at, slot) = self.locate(row, self.positions[row]);
            let mut bytes = Vec::new();
            self.layout.each_piece(slot, |piece| {
                bytes.extend_from_slice(&got[at..][piece.clone()]);
                got[at..][piece].fill(0xff);
            });
            bytes
        };
        let rows = (0..self.positions.len()).map(read).collect();
        assert!(got.iter().all(|&b| b == 0xff), "bytes outside the rows were written");
        rows
    }

    /// Splits a position's canonical form into its rows: `(value, bytes)` of each head's key, then of each head's value.
    pub fn rows_of<'b>(&self, bytes: &'b [u8]) -> Vec<(bool, &'b [u8])> {
        let mut left = bytes;
        let mut rows = Vec::new();
        for value in [false, true] {
            let width = self.layout.width(value);
            let len = self.encode(&vec![0.0; width], value).len();
            for _ in 0..if width > 0 { self.layout.heads } else { 0 } {
                let (row, rest) = left.split_at(len);
                rows.push((value, row));
                left = rest;
            }
        }
        assert!(left.is_empty());
        rows
    }

    /// What lies at the rows' positions as f32: `(rows, heads, key)` and `(rows, heads, value)`.
    pub fn appended_f32(&self, gpu: &Gpu) -> [Vec<f32>; 2] {
        let mut out = [vec![], vec![]];
        for bytes in self.appended(gpu) {
            for (value, row) in self.rows_of(&bytes) {
                let mut x = vec![0.0; self.layout.width(value)];
                self.decode(row, value, &mut x);
                out[usize::from(value)].extend(x);
            }
        }
        out
    }

    /// Checks that the rows' positions hold these keys and values `(rows, heads, width)`, and no other byte changed.
    pub fn expect_appended(&self, gpu: &Gpu, k: &[f32], v: &[f32], tolerance: f32) {
        for (got, want) in self.appended_f32(gpu).iter().zip([k, v]) {
            assert_eq!(got.len(), want.len());
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let ok = (got - want).abs() <= tolerance * want.abs().max(1.0);
                assert!(ok, "element {i}: {got} for {want}");
            }
        }
    }

    /// Checks that int8 rows are what the CPU makes of the same rows in f32, to the bit.
    pub fn expect_coded(&self, gpu: &Gpu, plain: &Cached) {
        assert_eq!((self.layout.kind, plain.layout.kind), (KvType::Int8, KvType::F32));
        let (got, from) = (self.appended(gpu), plain.appended(gpu));
        for (row, (got, from)) in got.iter().zip(&from).enumerate() {
            for ((value, got), (_, from)) in self.rows_of(got).into_iter().zip(plain.rows_of(from)) {
                let mut x = vec![0.0; self.layout.width(value)];
                plain.decode(from, value, &mut x);
                assert_eq!(got, self.encode(&x, value), "row {row} value {value}: {x:?}");
            }
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
