//! KV pages in device memory. A page holds all layers, one after another, each as [`PageLayout`] says; pages lie in
//! segments, and block tables name them by address.

use super::driver::Device;
use super::memory::{Arena, PIECE_ALIGN, Ptr, SEGMENT_BYTES};
use crate::backend::KvType;
use crate::backend::page::PageLayout;
use crate::kv::{PageId, Placement};
use crate::model::Hyper;
use crate::units::Result;
use std::ops::Range;

/// All pages.
#[derive(Debug)]
pub struct Pages {
    address: Vec<Ptr>,
    layout: PageLayout,
    placements: Vec<Placement>,
}

/// Bytes of a page of a model, all layers.
pub fn page_bytes(h: &Hyper, kind: KvType) -> usize {
    h.n_layers * PageLayout::of(h, kind).layer_bytes()
}

impl Pages {
    /// Takes memory for `pages` pages.
    pub fn new(arena: &mut Arena, h: &Hyper, kind: KvType, pages: usize) -> Result<Pages> {
        let placements = h.masks.iter().map(|m| Placement { stride: m.stride() }).collect();
        let layout = PageLayout::of(h, kind);
        let mut this = Pages { address: Vec::with_capacity(pages), layout, placements };
        let room = this.page_bytes().next_multiple_of(PIECE_ALIGN);
        let each = (SEGMENT_BYTES / room).max(1);
        let pieces: Vec<usize> = (0..pages).step_by(each).map(|at| each.min(pages - at)).collect();
        let starts = arena.reserve(&pieces.iter().map(|n| n * room).collect::<Vec<_>>())?;
        for (n, start) in pieces.iter().zip(starts) {
            this.address.extend((0..*n).map(|i| start.at((i * room) as u64)));
        }
        Ok(this)
    }

    /// Element type.
    pub fn kind(&self) -> KvType {
        self.layout.kind
    }

    /// Bytes of a page, all layers.
    pub fn page_bytes(&self) -> usize {
        self.placements.len() * self.layer_bytes()
    }

    /// Bytes of a page in one layer.
    pub fn layer_bytes(&self) -> usize {
        self.layout.layer_bytes()
    }

    /// A page's address.
    pub fn address(&self, page: PageId) -> Ptr {
        self.address[page as usize]
    }

    /// Pages.
    pub fn len(&self) -> usize {
        self.address.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.address.is_empty()
    }

    /// Copies a page in every layer.
    pub fn copy(&self, device: &Device, from: PageId, to: PageId) -> Result<()> {
        device.copy_within(self.address(to), self.address(from), self.page_bytes())
    }

    /// Calls `f(page index, bytes of the page)` for each piece of the canonical form, in its order.
    fn each_piece(&self, tokens: usize, mut f: impl FnMut(usize, Range<usize>)) {
        for (layer, placement) in self.placements.iter().enumerate() {
            let at = layer * self.layer_bytes();
            for position in 0..tokens {
                let (index, slot) = placement.locate(position);
                self.layout.each_piece(slot, |piece| f(index, at + piece.start..at + piece.end));
            }
        }
    }

    /// Appends the first `tokens` positions of a block table in the canonical form.
    pub fn export(&self, device: &Device, pages: &[PageId], tokens: usize, out: &mut Vec<u8>) -> Result<()> {
        let whole = self.read(device, pages)?;
        let size = self.page_bytes();
        self.each_piece(tokens, |index, piece| out.extend_from_slice(&whole[index * size..][piece]));
        Ok(())
    }

    /// Fills pages from the canonical form; `bytes` has the length that [`Pages::export`] gives.
    pub fn import(&self, device: &Device, pages: &[PageId], tokens: usize, bytes: &[u8]) -> Result<()> {
        let mut whole = self.read(device, pages)?;
        let size = self.page_bytes();
        let mut left = bytes;
        self.each_piece(tokens, |index, piece| {
            let (from, rest) = left.split_at(piece.len());
            whole[index * size..][piece].copy_from_slice(from);
            left = rest;
        });
        assert!(left.is_empty(), "{} bytes too many", left.len());
        for (i, &p) in pages.iter().enumerate() {
            device.copy_in(self.address(p), &whole[i * size..(i + 1) * size])?;
        }
        device.synchronize()
    }

    fn read(&self, device: &Device, pages: &[PageId]) -> Result<Vec<u8>> {
        let size = self.page_bytes();
        let mut whole = vec![0u8; pages.len() * size];
        for (page, &id) in whole.chunks_exact_mut(size).zip(pages) {
            device.copy_out(page, self.address(id))?;
        }
        device.synchronize()?;
        Ok(whole)
    }
}
