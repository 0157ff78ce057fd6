//! The CPU backend's KV pages: [`PageLayout`]s one after another. A page's layers lie together, so that a page that no one
//! uses can be given back to the system.

use super::ops::KvBlock;
use crate::backend::page::PageLayout;
use crate::backend::{KV_GROUP, KvType};
use crate::format::f16;
use crate::kv::{PAGE_TOKENS, PageId, Placement};
use crate::model::Hyper;
use crate::units::Result;
use crate::weights::Segment;
use std::ops::Range;

/// One row: which head, slot, and whether it is a value.
#[derive(Debug, Clone, Copy)]
struct Row {
    layer: usize,
    page: PageId,
    head: usize,
    slot: usize,
    value: bool,
}

/// All pages of all layers.
pub struct Cache {
    layout: PageLayout,
    pages: usize,
    strides: Vec<usize>,
    /// Bytes of a page in one layer.
    layer_bytes: usize,
    /// Workers write disjoint rows of a page while others only read rows written before the last barrier.
    data: Segment,
}

impl Cache {
    /// Zeroed pages. They take memory only once they are written, but a limit of the process counts them at once: an error
    /// if it does not give them.
    pub fn new(h: &Hyper, kind: KvType, pages: usize) -> Result<Cache> {
        let layout = PageLayout::of(h, kind);
        let layer_bytes = layout.layer_bytes();
        let bytes = h.n_layers.checked_mul(pages).and_then(|n| n.checked_mul(layer_bytes));
        Ok(Cache {
            layout,
            pages,
            strides: h.masks.iter().map(|m| m.stride()).collect(),
            layer_bytes,
            data: Segment::try_zeroed(bytes.unwrap_or(isize::MAX as usize), "memory for the KV cache")?,
        })
    }

    /// How a layer places positions.
    pub fn placement(&self, layer: usize) -> Placement {
        Placement { stride: self.strides[layer] }
    }

    /// Width of a key (or latent) row.
    pub fn key_width(&self) -> usize {
        self.layout.key
    }

    /// True if rows must be widened ([`Cache::widen`]) before anything is computed with them.
    pub fn is_coded(&self) -> bool {
        self.layout.kind == KvType::Int8
    }

    /// Bytes of one page, all layers.
    pub fn page_bytes(&self) -> usize {
        self.strides.len() * self.layer_bytes
    }

    /// First byte of a page in a layer.
    fn page_at(&self, layer: usize, page: PageId) -> usize {
        assert!((page as usize) < self.pages && layer < self.strides.len());
        (page as usize * self.strides.len() + layer) * self.layer_bytes
    }

    /// Bytes of a row of plain elements.
    fn plain(&self, r: Row) -> Range<usize> {
        let at = self.page_at(r.layer, r.page);
        let row = self.layout.plain(r.head, r.slot, r.value);
        at + row.start..at + row.end
    }

    /// Bytes of the codes, the scales and the tail of a coded row.
    fn coded(&self, r: Row) -> [Range<usize>; 3] {
        let at = self.page_at(r.layer, r.page);
        self.layout.coded(r.head, r.slot, r.value).map(|part| at + part.start..at + part.end)
    }

    /// Bytes to read.
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.data.part(range)
    }

    /// A head's keys (or the latents): row `slot` at `slot * key` elements. Not for coded pages.
    pub fn keys(&self, layer: usize, page: PageId, head: usize) -> KvBlock<'_> {
        self.block(Row { layer, page, head, slot: 0, value: false }, self.layout.key)
    }

    /// A head's values; MLA's values are its latents. Not for coded pages.
    pub fn values(&self, layer: usize, page: PageId, head: usize) -> KvBlock<'_> {
        match self.layout.value {
            0 => self.keys(layer, page, head),
            width => self.block(Row { layer, page, head, slot: 0, value: true }, width),
        }
    }

    fn block(&self, first: Row, stride: usize) -> KvBlock<'_> {
        let at = self.plain(first).start;
        let bytes = self.bytes(at..at + PAGE_TOKENS * stride * self.layout.kind.bytes());
        match self.layout.kind {
            KvType::F32 => KvBlock::F32 { data: bytemuck::cast_slice(bytes), stride },
            KvType::F16 => KvBlock::F16 { data: bytemuck::cast_slice(bytes), stride },
            KvType::Int8 => unreachable!("coded rows are widened first"),
        }
    }

    /// The first `slots` rows of a head's keys, or with `value` of its values, as f32, side by side.
    pub fn widen<'b>(
        &self,
        layer: usize,
        page: PageId,
        head: usize,
        value: bool,
        slots: usize,
        out: &'b mut [f32],
    ) -> KvBlock<'b> {
        let stride = self.layout.width(value);
        let out = &mut out[..slots * stride];
        for (slot, to) in out.chunks_exact_mut(stride).enumerate() {
            self.read(layer, page, head, slot, value, 0, to);
        }
        KvBlock::F32 { data: out, stride }
    }

    /// Reads part of a row as f32, from element `from` on.
    pub fn read(
        &self,
        layer: usize,
        page: PageId,
        head: usize,
        slot: usize,
        value: bool,
        from: usize,
        out: &mut [f32],
    ) {
        let r = Row { layer, page, head, slot, value };
        match self.layout.kind {
            KvType::F32 => {
                out.copy_from_slice(&bytemuck::cast_slice(self.bytes(self.plain(r)))[from..][..out.len()]);
            }
            KvType::F16 => {
                let row: &[f16] = bytemuck::cast_slice(self.bytes(self.plain(r)));
                let row = &row[from..][..out.len()];
                out.iter_mut().zip(row).for_each(|(d, s)| *d = s.to_f32());
            }
            KvType::Int8 => {
                let [codes, scales, tail] = self.coded(r).map(|range| self.bytes(range));
                let (scales, tail): (&[f16], &[f16]) =
                    (bytemuck::cast_slice(scales), bytemuck::cast_slice(tail));
                let split = codes.len().saturating_sub(from).min(out.len());
                let (coded, rest) = out.split_at_mut(split);
                widen_codes(&codes[from.min(codes.len())..][..split], scales, from, coded);
                let tail = &tail[(from + split).saturating_sub(codes.len())..][..rest.len()];
                rest.iter_mut().zip(tail).for_each(|(d, s)| *d = s.to_f32());
            }
        }
    }

    /// Writes a row, rounding to the cache's type.
    ///
    /// # Safety
    /// No other thread may read or write the same row until a barrier of the team lies between.
    pub unsafe fn write(&self, layer: usize, page: PageId, head: usize, slot: usize, value: bool, x: &[f32]) {
        let r = Row { layer, page, head, slot, value };
        assert_eq!(x.len(), self.layout.width(value));
        // SAFETY: the row is ours (contract).
        let part = |range: Range<usize>| unsafe { self.data.part_mut(range) };
        match self.layout.kind {
            KvType::F32 => bytemuck::cast_slice_mut(part(self.plain(r))).copy_from_slice(x),
            KvType::F16 => to_f16(x, part(self.plain(r))),
            KvType::Int8 => {
                let [codes, scales, tail] = self.coded(r).map(part);
                let (coded, rest) = x.split_at(codes.len());
                code(coded, bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(scales));
                to_f16(rest, tail);
            }
        }
    }

    /// Copies a page in every layer.
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let (a, b, len) = (self.page_at(0, from), self.page_at(0, to), self.page_bytes());
        self.data.bytes_mut().copy_within(a..a + len, b);
    }

    /// Gives the memory of pages back to the system: of runs of neighbours, all but the edges. `pages` are in order.
    pub fn discard(&mut self, pages: &[PageId]) -> u64 {
        let runs = pages.chunk_by(|a, b| a + 1 == *b);
        let freed = runs.map(|run| {
            let at = self.page_at(0, run[0]);
            self.data.discard(at..at + run.len() * self.strides.len() * self.layer_bytes)
        });
        freed.collect::<Vec<_>>().into_iter().sum()
    }

    /// Calls `f` with the bytes of each piece of the canonical form, in its order.
    fn each_piece(&self, pages: &[PageId], tokens: usize, mut f: impl FnMut(Range<usize>)) {
        for layer in 0..self.strides.len() {
            for position in 0..tokens {
                let (index, slot) = self.placement(layer).locate(position);
                let at = self.page_at(layer, pages[index]);
                self.layout.each_piece(slot, |piece| f(at + piece.start..at + piece.end));
            }
        }
    }

    /// Appends `tokens` positions in the canonical form ([`crate::backend::Backend::export`]).
    pub fn export(&self, pages: &[PageId], tokens: usize, out: &mut Vec<u8>) {
        const { assert!(cfg!(target_endian = "little"), "bytes in memory are the serial form's") };
        self.each_piece(pages, tokens, |range| out.extend_from_slice(self.bytes(range)));
    }

    /// Fills pages from the canonical form.
    pub fn import(&mut self, pages: &[PageId], tokens: usize, bytes: &[u8]) {
        let mut pieces = Vec::new();
        self.each_piece(pages, tokens, |range| pieces.push(range));
        let mut left = bytes;
        for range in pieces {
            let (piece, rest) = left.split_at(range.len());
            self.data.bytes_mut()[range].copy_from_slice(piece);
            left = rest;
        }
        assert!(left.is_empty(), "{} bytes too many", left.len());
    }
}

/// Codes of a row from element `from` on, times their groups' scales.
fn widen_codes(codes: &[u8], scales: &[f16], from: usize, out: &mut [f32]) {
    let mut at = 0;
    while at < codes.len() {
        // Up to the end of a group, so that the inner loop has one scale.
        let group = (from + at) / KV_GROUP;
        let end = ((group + 1) * KV_GROUP - from).min(codes.len());
        let scale = scales[group].to_f32();
        let part = out[at..end].iter_mut().zip(&codes[at..end]);
        part.for_each(|(d, c)| *d = f32::from(*c as i8) * scale);
        at = end;
    }
}

fn to_f16(x: &[f32], out: &mut [u8]) {
    let out: &mut [f16] = bytemuck::cast_slice_mut(out);
    out.iter_mut().zip(x).for_each(|(d, s)| *d = f16::from_f32(*s));
}

/// Codes a row in int8: the largest of each group becomes ±127. The scale is rounded to f16 first, so that codes are the
/// nearest ones to what will be read.
pub(in crate::backend) fn code(x: &[f32], codes: &mut [i8], scales: &mut [f16]) {
    for ((x, codes), scale) in x.chunks(KV_GROUP).zip(codes.chunks_mut(KV_GROUP)).zip(scales) {
        let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        *scale = f16::from_f32(max / 127.0);
        let s = scale.to_f32();
        let by = if s > 0.0 { 1.0 / s } else { 0.0 };
        codes.iter_mut().zip(x).for_each(|(c, v)| *c = (v * by).round().clamp(-127.0, 127.0) as i8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::serial_bytes;
    use crate::model::{AttnHyper, Mask};

    /// Two layers of different placement; only what the cache looks at is set.
    fn hyper(attn: AttnHyper) -> Hyper {
        Hyper {
            arch: String::new(),
            vocab: 1,
            hidden: 8,
            n_layers: 2,
            context_tokens: 512,
            norm_eps: 1e-6,
            attn,
            rope: crate::model::hyper::RopeHyper {
                pairs: crate::model::RopePairs::Half,
                dims: 2,
                theta: 1e4,
                scaling: crate::model::RopeScaling::None,
            },
            softmax_scale: 1.0,
            masks: vec![Mask::Full, Mask::Strided { stride: 2 }],
            ffn_width: 8,
            moe: None,
            tied_head: true,
        }
    }

    fn fill(c: &Cache, pages: &[PageId], tokens: usize) {
        let s = c.layout;
        for layer in 0..2 {
            for position in 0..tokens {
                let (index, slot) = c.placement(layer).locate(position);
                for head in 0..s.heads {
                    for (value, width) in [(false, s.key), (true, s.value)] {
                        let x: Vec<f32> = (0..width)
                            .map(|i| ((layer * 999 + position * 13 + head * 5 + i) % 97) as f32)
                            .collect();
                        // SAFETY: no other thread.
                        unsafe { c.write(layer, pages[index], head, slot, value, &x) };
                    }
                }
            }
        }
    }

    #[test]
    fn a_session_moves_to_other_pages_and_types_keep_their_bits() {
        let gqa = AttnHyper::Gqa {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 4,
            qk_norm: crate::model::QkNorm::None,
            clip: None,
        };
        let mla = AttnHyper::Mla {
            n_heads: 2,
            q_lora_rank: None,
            kv_lora_rank: 6,
            nope_dim: 4,
            rope_dim: 2,
            v_dim: 4,
        };
        for (attn, row) in [(gqa, 16), (mla, 8)] {
            let h = hyper(attn);
            for kind in [KvType::F32, KvType::F16, KvType::Int8] {
                let (mut c, tokens) = (Cache::new(&h, kind, 12).unwrap(), 100);
                let (from, to) = ([0, 2, 4, 6], [11, 9, 1, 3]);
                fill(&c, &from, tokens);
                let mut bytes = Vec::new();
                c.export(&from, tokens, &mut bytes);
                assert_eq!(bytes.len(), serial_bytes(&h, kind, tokens));
                if kind != KvType::Int8 {
                    assert_eq!(bytes.len(), 2 * tokens * row * kind.bytes());
                }
                c.import(&to, tokens, &bytes);
                let mut again = Vec::new();
                c.export(&to, tokens, &mut again);
                assert!(bytes == again);
                c.copy_page(11, 5);
                let mut copied = Vec::new();
                c.export(&[5, 9, 1, 3], tokens, &mut copied);
                assert!(bytes == copied);
            }
        }
    }

    #[test]
    fn coded_rows_are_close_and_small() {
        // DeepSeek-V2-Lite's row, SmolLM2's heads, and one with a group that is not full.
        let mla = |kv_lora_rank, rope_dim| AttnHyper::Mla {
            n_heads: 2,
            q_lora_rank: None,
            kv_lora_rank,
            nope_dim: 4,
            rope_dim,
            v_dim: 4,
        };
        let gqa = |n_kv_heads, head_dim| AttnHyper::Gqa {
            n_heads: 2 * n_kv_heads,
            n_kv_heads,
            head_dim,
            qk_norm: crate::model::QkNorm::None,
            clip: None,
        };
        for (attn, most) in [(mla(512, 64), 0.585), (gqa(3, 64), 0.535), (mla(50, 6), 1.0), (gqa(2, 20), 1.0)]
        {
            let h = hyper(attn);
            let share = serial_bytes(&h, KvType::Int8, 32) as f64 / serial_bytes(&h, KvType::F16, 32) as f64;
            assert!(share <= most, "{attn:?}: {share}");
            let c = Cache::new(&h, KvType::Int8, 2).unwrap();
            // More than any machine has, and more than a length can say: errors.
            for pages in [1 << 44, usize::MAX / 2] {
                let e = Cache::new(&h, KvType::Int8, pages).err().unwrap().to_string();
                assert!(e.starts_with("memory for the KV cache: needs"), "{e}");
            }
            assert_eq!(c.page_bytes(), serial_bytes(&h, KvType::Int8, PAGE_TOKENS));
            for (value, width) in [(false, c.layout.key), (true, c.layout.value)] {
                let x: Vec<f32> = (0..width).map(|i| ((i * 7919 + 13) % 201) as f32 - 100.0).collect();
                if width == 0 {
                    continue;
                }
                let head = c.layout.heads - 1;
                // SAFETY: no other thread.
                unsafe { c.write(1, 1, head, 5, value, &x) };
                let mut back = vec![0.0; 6 * width];
                c.widen(1, 1, head, value, 6, &mut back);
                let coded = c.layout.coded_width(value);
                for (i, (a, b)) in x.iter().zip(&back[5 * width..]).enumerate() {
                    // Half a step of the largest, and f16's rounding of the step.
                    let far = if i < coded { 100.0 / 254.0 * 1.01 } else { 0.0 };
                    assert!((a - b).abs() <= far, "{attn:?} {value} {i}: {a} {b}");
                }
                let mut part = vec![0.0; width - 3];
                c.read(1, 1, head, 5, value, 3, &mut part);
                assert_eq!(part, back[5 * width + 3..]);
                assert!(back[..5 * width].iter().all(|v| *v == 0.0), "other rows stay");
            }
        }
    }

    #[test]
    fn a_page_given_back_is_zero_and_others_stay() {
        let h = hyper(AttnHyper::Gqa {
            n_heads: 4,
            n_kv_heads: 4,
            head_dim: 128,
            qk_norm: crate::model::QkNorm::None,
            clip: None,
        });
        let mut c = Cache::new(&h, KvType::F16, 40).unwrap();
        let all: Vec<PageId> = (0..40).collect();
        fill(&c, &all, 40 * PAGE_TOKENS);
        let freed = c.discard(&[3, 4, 5, 9]);
        assert!(freed as usize >= 3 * c.page_bytes() && freed as usize <= 4 * c.page_bytes(), "{freed}");
        let keep: Vec<PageId> = all.iter().copied().filter(|p| ![3, 4, 5, 9].contains(p)).collect();
        let mut row = vec![1.0; 128];
        c.read(0, 4, 0, 0, false, 0, &mut row);
        assert!(row.iter().all(|x| *x == 0.0));
        for page in keep {
            let mut row = vec![0.0; 128];
            c.read(1, page, 3, 31, true, 0, &mut row);
            assert!(row.iter().any(|x| *x != 0.0), "page {page}");
        }
    }
}
