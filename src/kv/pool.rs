//! Free pages and reference counts, and one sequence's pages.

use super::{PAGE_TOKENS, PageId, pages_for};
use crate::units::{Error, Result};

/// Free pages and reference counts.
#[derive(Debug)]
pub struct PagePool {
    free: Vec<PageId>,
    refs: Vec<u32>,
    /// Written since it was last given back to the system: it takes memory.
    resident: Vec<bool>,
    n_resident: usize,
    /// Most pages that may be in use: below the pool's size while memory is short.
    cap: usize,
}

impl PagePool {
    /// A pool of `pages` free pages.
    pub fn new(pages: usize) -> PagePool {
        PagePool {
            // Reversed, so that pages are handed out from 0 up.
            free: (0..pages as PageId).rev().collect(),
            refs: vec![0; pages],
            resident: vec![false; pages],
            n_resident: 0,
            cap: pages,
        }
    }

    /// Pages in all.
    pub fn len(&self) -> usize {
        self.refs.len()
    }

    /// True if the pool was made with no pages.
    pub fn is_empty(&self) -> bool {
        self.refs.is_empty()
    }

    /// Pages that can be taken now.
    pub fn free_pages(&self) -> usize {
        self.cap.saturating_sub(self.used_pages())
    }

    /// Pages that something holds.
    pub fn used_pages(&self) -> usize {
        self.refs.len() - self.free.len()
    }

    /// Limits the pages that may be in use. More may be in use now; they are not taken away.
    pub fn set_cap(&mut self, pages: usize) {
        self.cap = pages.min(self.refs.len());
    }

    /// Most pages that may be in use.
    pub fn cap(&self) -> usize {
        self.cap
    }

    /// Pages that take memory.
    pub fn resident_pages(&self) -> usize {
        self.n_resident
    }

    /// Free pages that still take memory; after this they count as given back.
    pub fn give_back(&mut self) -> Vec<PageId> {
        let resident = &mut self.resident;
        let mut pages: Vec<PageId> =
            self.free.iter().copied().filter(|p| std::mem::take(&mut resident[*p as usize])).collect();
        pages.sort_unstable();
        self.n_resident -= pages.len();
        pages
    }

    /// Takes a page with one reference.
    pub fn take(&mut self) -> Option<PageId> {
        if self.free_pages() == 0 {
            return None;
        }
        let page = self.free.pop()?;
        self.refs[page as usize] = 1;
        self.n_resident += usize::from(!std::mem::replace(&mut self.resident[page as usize], true));
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
    /// Pages that must be taken before positions up to `tokens` can be written: those that are missing, and copies of
    /// those that others hold too.
    pub fn lacks(&self, pool: &PagePool, tokens: usize, stride: usize) -> usize {
        let missing = pages_for(tokens, stride).saturating_sub(self.pages.len());
        missing + self.shared_tail(pool, stride).len()
    }

    /// Pages of the block that is half written, where others hold them too.
    fn shared_tail(&self, pool: &PagePool, stride: usize) -> Vec<usize> {
        let first = self.tokens / (PAGE_TOKENS * stride) * stride;
        let tail = first..self.pages.len();
        tail.filter(|&i| pool.references(self.pages[i]) > 1).collect()
    }

    /// Takes pages until `tokens` positions fit, and copies of what is about to be written and others hold too (copy on
    /// write): returns `(from, to)` page pairs to copy. On failure the table keeps what it had.
    pub fn reserve(
        &mut self,
        pool: &mut PagePool,
        tokens: usize,
        stride: usize,
    ) -> Result<Vec<(PageId, PageId)>> {
        let more = self.lacks(pool, tokens, stride);
        if more > pool.free_pages() {
            let page = |n: usize| format!("{n} pages of {PAGE_TOKENS} tokens");
            return Err(Error::Limit {
                what: "key-value cache".into(),
                needs: page(more),
                has: page(pool.free_pages()),
            });
        }
        let mut copies = Vec::new();
        for i in self.shared_tail(pool, stride) {
            let own = pool.take().expect("counted above");
            let shared = std::mem::replace(&mut self.pages[i], own);
            pool.release(shared);
            copies.push((shared, own));
        }
        let missing = pages_for(tokens, stride).saturating_sub(self.pages.len());
        self.pages.extend((0..missing).map(|_| pool.take().expect("counted above")));
        Ok(copies)
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

    #[test]
    fn a_shared_page_is_copied_before_it_is_written() {
        for stride in [1, 3] {
            let mut pool = PagePool::new(4 * stride);
            let mut a = BlockTable::default();
            let block = PAGE_TOKENS * stride;
            assert!(a.reserve(&mut pool, block + 5, stride).unwrap().is_empty());
            a.tokens = block + 5;
            a.pages.iter().for_each(|&p| pool.share(p));
            let mut b = BlockTable { pages: a.pages.clone(), tokens: a.tokens };
            assert_eq!(b.lacks(&pool, block + 6, stride), stride);
            let copies = b.reserve(&mut pool, block + 6, stride).unwrap();
            let want: Vec<_> = (stride..2 * stride).map(|i| (a.pages[i], b.pages[i])).collect();
            assert_eq!(copies, want);
            assert_eq!(b.pages[..stride], a.pages[..stride]);
            // Now each has its own: writing on copies nothing.
            assert!(a.reserve(&mut pool, block + 6, stride).unwrap().is_empty());
            assert!(b.reserve(&mut pool, block + 6, stride).unwrap().is_empty());
            a.clear(&mut pool);
            b.clear(&mut pool);
            assert_eq!(pool.free_pages(), 4 * stride);
        }
    }

    #[test]
    fn a_cap_holds_and_memory_is_given_back_once() {
        let mut pool = PagePool::new(6);
        let taken: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
        pool.set_cap(3);
        assert_eq!((pool.free_pages(), pool.take()), (0, None));
        taken[..2].iter().for_each(|&p| pool.release(p));
        assert_eq!((pool.free_pages(), pool.resident_pages()), (1, 4));
        assert_eq!(pool.give_back(), [0, 1]);
        assert_eq!((pool.give_back(), pool.resident_pages()), (vec![], 2));
        pool.set_cap(100);
        assert_eq!((pool.cap(), pool.free_pages()), (6, 4));
    }
}
