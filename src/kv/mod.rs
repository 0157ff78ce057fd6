//! Bookkeeping of the key-value cache: page ids, reference counts, block tables. Owns no bytes; a backend does.
//!
//! A page holds [`PAGE_TOKENS`] positions of every layer. A sequence's block table lists its pages in order. Where a
//! position lies is [`Placement`]'s business: for strided masks positions are spread over a group of pages by residue, so
//! that a row that sees every `k`-th position reads one page in `k`. The unit that sequences share is therefore a block
//! of as many pages as the widest stride.

mod pool;
mod tree;

pub use pool::{BlockTable, PagePool};
pub use tree::{Found, NodeId, Place, SlotId, Tree};

/// Positions in a page. 32 rows of a 576-wide f16 latent are 36 KiB: a block of attention work that stays in L1/L2.
pub const PAGE_TOKENS: usize = 32;

/// A page's number in the pool.
pub type PageId = u32;

/// Where positions lie in a block table, for one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Residues kept apart: 1 keeps positions in order.
    pub stride: usize,
}

impl Placement {
    /// `(index into the block table, slot in the page)` of a position: a bijection on every aligned run of
    /// `stride * PAGE_TOKENS` positions.
    pub fn locate(self, position: usize) -> (usize, usize) {
        let group = self.stride * PAGE_TOKENS;
        let (g, within) = (position / group, position % group);
        (g * self.stride + within % self.stride, within / self.stride)
    }

    /// The position at a slot of a page; the inverse of [`Placement::locate`].
    pub fn position(self, index: usize, slot: usize) -> usize {
        let (g, residue) = (index / self.stride, index % self.stride);
        g * self.stride * PAGE_TOKENS + slot * self.stride + residue
    }
}

/// Pages that `tokens` positions need when the widest stride of any layer is `stride`.
pub fn pages_for(tokens: usize, stride: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS * stride) * stride
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_is_a_bijection_and_keeps_residues_apart() {
        for stride in [1, 2, 3, 8] {
            let p = Placement { stride };
            let n = stride * PAGE_TOKENS * 3;
            let mut seen = vec![false; n];
            for position in 0..n {
                let (index, slot) = p.locate(position);
                assert!(slot < PAGE_TOKENS && index < pages_for(n, stride));
                assert_eq!(p.position(index, slot), position);
                assert_eq!(index % stride, position % stride);
                assert!(!std::mem::replace(&mut seen[index * PAGE_TOKENS + slot], true));
            }
        }
    }
}
