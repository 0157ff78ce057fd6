//! Where a cached row lies inside one layer's part of a page. Every backend places rows so: a page is the same bytes on a
//! GPU and on the CPU, and its pieces in order are the canonical serial form.
//!
//! - f32, f16: keys `(heads, PAGE_TOKENS, key)`, then values, the same: a head's block is contiguous. For MLA there is one
//!   head, its key is the normalized latent and then the turned rope key, and there are no values;
//! - int8: the codes of keys and of values, as above; then their scales, f16, one for [`KV_GROUP`] elements of a row; then for
//!   MLA the rope keys `(PAGE_TOKENS, rope_dim)` in f16, whose rounding would turn into wrong positions.

use super::{KV_GROUP, KvType};
use crate::kv::PAGE_TOKENS;
use crate::model::{AttnHyper, Hyper};
use std::ops::Range;

/// The layout of one layer's part of a page.
#[derive(Debug, Clone, Copy)]
pub struct PageLayout {
    /// Element type.
    pub kind: KvType,
    /// Key-value heads kept apart; 1 for MLA.
    pub heads: usize,
    /// Width of a head's key row, or of the latent row.
    pub key: usize,
    /// Width of a head's value row; 0 for MLA, whose values are the latents.
    pub value: usize,
    /// Elements at the end of a key row that are never coded in int8: MLA's rope key.
    pub tail: usize,
}

impl PageLayout {
    /// The layout that a model needs.
    pub fn of(h: &Hyper, kind: KvType) -> PageLayout {
        match h.attn {
            AttnHyper::Mla { kv_lora_rank, rope_dim, .. } => {
                PageLayout { kind, heads: 1, key: kv_lora_rank + rope_dim, value: 0, tail: rope_dim }
            }
            AttnHyper::Gqa { n_kv_heads, head_dim, .. } => {
                PageLayout { kind, heads: n_kv_heads, key: head_dim, value: head_dim, tail: 0 }
            }
        }
    }

    /// Width of a head's key row, or with `value` of its value row.
    pub fn width(&self, value: bool) -> usize {
        if value { self.value } else { self.key }
    }

    /// Elements of a row that are coded in int8.
    pub fn coded_width(&self, value: bool) -> usize {
        if value { self.value } else { self.key - self.tail }
    }

    /// Bytes of a layer's part of a page: a multiple of [`PAGE_TOKENS`].
    pub fn layer_bytes(&self) -> usize {
        let row = |value| match self.kind {
            KvType::F32 | KvType::F16 => self.width(value) * self.kind.bytes(),
            KvType::Int8 => self.coded_width(value) + 2 * self.coded_width(value).div_ceil(KV_GROUP),
        };
        let tail = if self.kind == KvType::Int8 { 2 * self.tail } else { 0 };
        PAGE_TOKENS * self.heads * (row(false) + row(true) + tail)
    }

    /// Of units of which a key row has `key` and a value row `value`: those before a row.
    fn before(&self, head: usize, slot: usize, value: bool, units: [usize; 2]) -> usize {
        assert!(head < self.heads && slot < PAGE_TOKENS);
        let row = head * PAGE_TOKENS + slot;
        if value { self.heads * PAGE_TOKENS * units[0] + row * units[1] } else { row * units[0] }
    }

    /// Bytes of a row of plain elements.
    pub fn plain(&self, head: usize, slot: usize, value: bool) -> Range<usize> {
        let each = self.kind.bytes();
        let at = self.before(head, slot, value, [self.key, self.value]) * each;
        at..at + self.width(value) * each
    }

    /// Bytes of the codes, the scales and the tail of a coded row.
    pub fn coded(&self, head: usize, slot: usize, value: bool) -> [Range<usize>; 3] {
        let widths = [self.coded_width(false), self.coded_width(true)];
        let groups = widths.map(|w| w.div_ceil(KV_GROUP));
        let rows = self.heads * PAGE_TOKENS;
        let scales = rows * (widths[0] + widths[1]);
        let tails = scales + rows * (groups[0] + groups[1]) * 2;
        let part = |at: usize, len: usize| at..at + len;
        let tail = if value { 0 } else { self.tail };
        [
            part(self.before(head, slot, value, widths), widths[usize::from(value)]),
            part(scales + self.before(head, slot, value, groups) * 2, groups[usize::from(value)] * 2),
            part(tails + (head * PAGE_TOKENS + slot) * self.tail * 2, tail * 2),
        ]
    }

    /// Calls `f` with the bytes of each piece of a position's canonical form, in its order: all heads' keys, then values.
    pub fn each_piece(&self, slot: usize, mut f: impl FnMut(Range<usize>)) {
        for value in [false, true] {
            for head in 0..if self.width(value) > 0 { self.heads } else { 0 } {
                match self.kind {
                    KvType::Int8 => self.coded(head, slot, value).into_iter().for_each(&mut f),
                    KvType::F32 | KvType::F16 => f(self.plain(head, slot, value)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of a part belongs to one row, whatever the type.
    #[test]
    fn rows_fill_their_part_without_a_gap() {
        for kind in [KvType::F32, KvType::F16, KvType::Int8] {
            for (heads, key, value, tail) in
                [(1, 576, 0, 64), (3, 64, 64, 0), (2, 20, 20, 0), (1, 56, 0, 6), (1, 1, 1, 0)]
            {
                let layout = PageLayout { kind, heads, key, value, tail };
                let mut owners = vec![0u8; layout.layer_bytes()];
                for slot in 0..PAGE_TOKENS {
                    layout.each_piece(slot, |range| owners[range].iter_mut().for_each(|o| *o += 1));
                }
                assert!(owners.iter().all(|o| *o == 1), "{layout:?}");
                assert!(layout.layer_bytes().is_multiple_of(PAGE_TOKENS));
            }
        }
    }
}
