//! Bookkeeping of the key-value cache: page ids, reference counts, block tables. Owns no bytes; a backend does.
//!
//! A page holds [`PAGE_TOKENS`] positions of every layer. A sequence's block table lists its pages in order. Where a
//! position lies is [`Placement`]'s business: for strided masks positions are spread over a group of pages by residue, so
//! that a row that sees every `k`-th position reads one page in `k`.

use crate::units::{Error, Result};

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

/// Free pages and reference counts.
#[derive(Debug)]
pub struct PagePool {
    free: Vec<PageId>,
    refs: Vec<u32>,
}

impl PagePool {
    /// A pool of `pages` free pages.
    pub fn new(pages: usize) -> PagePool {
        // Reversed, so that pages are handed out from 0 up.
        PagePool { free: (0..pages as PageId).rev().collect(), refs: vec![0; pages] }
    }

    /// Pages in all.
    pub fn len(&self) -> usize {
        self.refs.len()
    }

    /// True if the pool was made with no pages.
    pub fn is_empty(&self) -> bool {
        self.refs.is_empty()
    }

    /// Pages free now.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Takes a page with one reference.
    pub fn take(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.refs[page as usize] = 1;
        Some(page)
    }

    /// Adds a reference to a page in use.
    pub fn share(&mut self, page: PageId) {
        assert!(self.refs[page as usize] > 0, "page {page} is free");
        self.refs[page as usize] += 1;
    }

    /// References to a page.
    pub fn references(&self, page: PageId) -> u32 {
        self.refs[page as usize]
    }

    /// Drops a reference; the last one frees the page.
    pub fn release(&mut self, page: PageId) {
        let refs = &mut self.refs[page as usize];
        assert!(*refs > 0, "page {page} is released twice");
        *refs -= 1;
        if *refs == 0 {
            self.free.push(page);
        }
    }
}

/// One sequence's pages.
#[derive(Debug, Default)]
pub struct BlockTable {
    /// In order.
    pub pages: Vec<PageId>,
    /// Positions written.
    pub tokens: usize,
}

impl BlockTable {
    /// Takes pages until `tokens` positions fit. On failure the table keeps what it had.
    pub fn reserve(&mut self, pool: &mut PagePool, tokens: usize, stride: usize) -> Result<()> {
        let need = pages_for(tokens, stride);
        let more = need.saturating_sub(self.pages.len());
        if more > pool.free_pages() {
            let page = |n: usize| format!("{n} pages of {PAGE_TOKENS} tokens");
            return Err(Error::Limit {
                what: "key-value cache".into(),
                needs: page(more),
                has: page(pool.free_pages()),
            });
        }
        self.pages.extend((0..more).filter_map(|_| pool.take()));
        Ok(())
    }

    /// Gives every page back.
    pub fn clear(&mut self, pool: &mut PagePool) {
        self.pages.drain(..).for_each(|p| pool.release(p));
        self.tokens = 0;
    }

    /// Forgets the positions from `tokens` on and gives back the pages that hold none of the rest.
    pub fn truncate(&mut self, pool: &mut PagePool, tokens: usize, stride: usize) {
        assert!(tokens <= self.tokens);
        self.tokens = tokens;
        let keep = pages_for(tokens, stride).min(self.pages.len());
        self.pages.drain(keep..).for_each(|p| pool.release(p));
    }
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

    #[test]
    fn pages_are_counted() {
        let mut pool = PagePool::new(4);
        let mut t = BlockTable::default();
        t.reserve(&mut pool, 33, 1).unwrap();
        assert_eq!((t.pages.len(), pool.free_pages()), (2, 2));
        t.reserve(&mut pool, 64, 1).unwrap();
        assert_eq!(t.pages.len(), 2);
        let err = t.reserve(&mut pool, 32 * 5, 1).unwrap_err().to_string();
        assert!(err.contains("key-value cache"), "{err}");
        pool.share(t.pages[0]);
        t.tokens = 64;
        t.truncate(&mut pool, 32, 1);
        assert_eq!((t.pages.len(), pool.free_pages()), (1, 3));
        let page = t.pages[0];
        t.clear(&mut pool);
        assert_eq!((pool.references(page), pool.free_pages()), (1, 3));
        pool.release(page);
        assert_eq!(pool.free_pages(), 4);
    }
}
