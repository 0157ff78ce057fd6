//! The CPU backend's KV pages.
//!
//! For each layer and page, f32 or f16:
//! - MLA: `(PAGE_TOKENS, kv_lora_rank + rope_dim)`: normalized latent, then the turned rope key;
//! - GQA: keys `(n_kv_heads, PAGE_TOKENS, head_dim)`, then values, the same: a head's block is contiguous.

use super::ops::KvBlock;
use crate::backend::KvType;
use crate::format::f16;
use crate::kv::{PAGE_TOKENS, PageId, Placement};
use crate::model::{AttnHyper, Hyper};
use std::cell::UnsafeCell;

/// Where a row of a page lies.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Key-value heads kept apart; 1 for MLA.
    pub heads: usize,
    /// Width of a head's key row, or of the latent row.
    pub key: usize,
    /// Width of a head's value row; 0 for MLA, whose values are the latents.
    pub value: usize,
}

impl Shape {
    /// The shape a model needs.
    pub fn of(h: &Hyper) -> Shape {
        match h.attn {
            AttnHyper::Mla { kv_lora_rank, rope_dim, .. } => {
                Shape { heads: 1, key: kv_lora_rank + rope_dim, value: 0 }
            }
            AttnHyper::Gqa { n_kv_heads, head_dim, .. } => {
                Shape { heads: n_kv_heads, key: head_dim, value: head_dim }
            }
        }
    }

    /// Elements of a page in one layer.
    pub fn page_len(&self) -> usize {
        PAGE_TOKENS * self.heads * (self.key + self.value)
    }
}

/// All pages of all layers.
pub struct Cache {
    shape: Shape,
    pages: usize,
    strides: Vec<usize>,
    data: Data,
}

/// Workers write disjoint rows of a page while others only read rows written before the last barrier.
enum Data {
    F32(UnsafeCell<Vec<f32>>),
    F16(UnsafeCell<Vec<f16>>),
}

// SAFETY: rows are written through `Cache::write`, whose contract keeps writers of a row exclusive and readers away.
unsafe impl Sync for Cache {}

impl Cache {
    /// Zeroed pages. They take memory only once they are written.
    pub fn new(h: &Hyper, kind: KvType, pages: usize) -> Cache {
        let shape = Shape::of(h);
        let len = h.n_layers * pages * shape.page_len();
        let data = match kind {
            KvType::F32 => Data::F32(UnsafeCell::new(vec![0.0; len])),
            KvType::F16 => Data::F16(UnsafeCell::new(bytemuck::allocation::zeroed_vec(len))),
        };
        Cache { shape, pages, strides: h.masks.iter().map(|m| m.stride()).collect(), data }
    }

    /// How a layer places positions.
    pub fn placement(&self, layer: usize) -> Placement {
        Placement { stride: self.strides[layer] }
    }

    /// Bytes of one page, all layers.
    pub fn page_bytes(&self) -> usize {
        let each = match self.data {
            Data::F32(_) => 4,
            Data::F16(_) => 2,
        };
        self.strides.len() * self.shape.page_len() * each
    }

    fn page_at(&self, layer: usize, page: PageId) -> usize {
        assert!((page as usize) < self.pages && layer < self.strides.len());
        (layer * self.pages + page as usize) * self.shape.page_len()
    }

    /// Offset of a key (or latent) row, or with `value` of a value row.
    fn row_at(&self, layer: usize, page: PageId, head: usize, slot: usize, value: bool) -> usize {
        let s = self.shape;
        assert!(head < s.heads && slot < PAGE_TOKENS);
        let base = self.page_at(layer, page);
        match value {
            false => base + (head * PAGE_TOKENS + slot) * s.key,
            true => base + s.heads * PAGE_TOKENS * s.key + (head * PAGE_TOKENS + slot) * s.value,
        }
    }

    /// A head's keys (or the latents): row `slot` at `slot * key` elements.
    pub fn keys(&self, layer: usize, page: PageId, head: usize) -> KvBlock<'_> {
        self.block(self.row_at(layer, page, head, 0, false), PAGE_TOKENS * self.shape.key, self.shape.key)
    }

    /// A head's values; MLA's values are its latents.
    pub fn values(&self, layer: usize, page: PageId, head: usize) -> KvBlock<'_> {
        if self.shape.value == 0 {
            return self.keys(layer, page, head);
        }
        self.block(self.row_at(layer, page, head, 0, true), PAGE_TOKENS * self.shape.value, self.shape.value)
    }

    fn block(&self, at: usize, len: usize, stride: usize) -> KvBlock<'_> {
        match &self.data {
            // SAFETY: `write`'s contract: no row that a reader looks at is being written.
            Data::F32(v) => KvBlock::F32 { data: unsafe { &(&*v.get())[at..at + len] }, stride },
            // SAFETY: as above.
            Data::F16(v) => KvBlock::F16 { data: unsafe { &(&*v.get())[at..at + len] }, stride },
        }
    }

    /// Writes part of a row, rounding to the cache's type.
    ///
    /// # Safety
    /// No other thread may read or write the same row until a barrier of the team lies between.
    pub unsafe fn write(
        &self,
        layer: usize,
        page: PageId,
        head: usize,
        slot: usize,
        value: bool,
        from: usize,
        x: &[f32],
    ) {
        let at = self.row_at(layer, page, head, slot, value) + from;
        assert!(from + x.len() <= if value { self.shape.value } else { self.shape.key });
        match &self.data {
            Data::F32(v) => {
                // SAFETY: the row is ours (contract) and inside the vector, whose length never changes.
                let row = unsafe {
                    std::slice::from_raw_parts_mut((*v.get()).as_ptr().add(at).cast_mut(), x.len())
                };
                row.copy_from_slice(x);
            }
            Data::F16(v) => {
                // SAFETY: as above.
                let row = unsafe {
                    std::slice::from_raw_parts_mut((*v.get()).as_ptr().add(at).cast_mut(), x.len())
                };
                row.iter_mut().zip(x).for_each(|(d, s)| *d = f16::from_f32(*s));
            }
        }
    }

    /// Copies a page in every layer.
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let len = self.shape.page_len();
        for layer in 0..self.strides.len() {
            let (a, b) = (self.page_at(layer, from), self.page_at(layer, to));
            match &mut self.data {
                Data::F32(v) => v.get_mut().copy_within(a..a + len, b),
                Data::F16(v) => v.get_mut().copy_within(a..a + len, b),
            }
        }
    }

    /// Calls `f(offset, len)` for each row of the canonical form, in its order.
    fn each_row(&self, pages: &[PageId], tokens: usize, mut f: impl FnMut(usize, usize)) {
        let s = self.shape;
        for layer in 0..self.strides.len() {
            for position in 0..tokens {
                let (index, slot) = self.placement(layer).locate(position);
                for (value, width) in [(false, s.key), (true, s.value)] {
                    for head in 0..s.heads {
                        if width > 0 {
                            f(self.row_at(layer, pages[index], head, slot, value), width);
                        }
                    }
                }
            }
        }
    }

    /// Appends `tokens` positions in the canonical form ([`crate::backend::Backend::export`]).
    pub fn export(&self, pages: &[PageId], tokens: usize, out: &mut Vec<u8>) {
        self.each_row(pages, tokens, |at, len| match &self.data {
            Data::F32(v) => {
                // SAFETY: no step runs while the backend is borrowed here, so no one writes.
                unsafe { &(&*v.get())[at..at + len] }.iter().for_each(|x| out.extend(x.to_le_bytes()))
            }
            Data::F16(v) => {
                // SAFETY: as above.
                unsafe { &(&*v.get())[at..at + len] }.iter().for_each(|x| out.extend(x.to_le_bytes()))
            }
        });
    }

    /// Fills pages from the canonical form.
    pub fn import(&mut self, pages: &[PageId], tokens: usize, bytes: &[u8]) {
        let mut rows = Vec::new();
        self.each_row(pages, tokens, |at, len| rows.push((at, len)));
        let mut left = bytes;
        for (at, len) in rows {
            match &mut self.data {
                Data::F32(v) => {
                    let (row, rest) = left.split_at(len * 4);
                    let words = row.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                    v.get_mut()[at..at + len].iter_mut().zip(words).for_each(|(d, s)| *d = s);
                    left = rest;
                }
                Data::F16(v) => {
                    let (row, rest) = left.split_at(len * 2);
                    let words = row.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]));
                    v.get_mut()[at..at + len].iter_mut().zip(words).for_each(|(d, s)| *d = s);
                    left = rest;
                }
            }
        }
        assert!(left.is_empty(), "{} bytes too many", left.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Mask;

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
        let s = c.shape;
        for layer in 0..2 {
            for position in 0..tokens {
                let (index, slot) = c.placement(layer).locate(position);
                for head in 0..s.heads {
                    for (value, width) in [(false, s.key), (true, s.value)] {
                        let x: Vec<f32> = (0..width)
                            .map(|i| ((layer * 999 + position * 13 + head * 5 + i) % 97) as f32)
                            .collect();
                        // SAFETY: no other thread.
                        unsafe { c.write(layer, pages[index], head, slot, value, 0, &x) };
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
            for kind in [KvType::F32, KvType::F16] {
                let (mut c, tokens) = (Cache::new(&h, kind, 12), 100);
                let (from, to) = ([0, 2, 4, 6], [11, 9, 1, 3]);
                fill(&c, &from, tokens);
                let mut bytes = Vec::new();
                c.export(&from, tokens, &mut bytes);
                assert_eq!(bytes.len(), 2 * tokens * row * kind.bytes());
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
}
