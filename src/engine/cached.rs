//! The engine's side of the prefix tree: sequences take what is cached, leave what they computed, and make room for one
//! another. A sequence that is thrown out leaves its blocks in the tree like any other; when it comes back it takes what is
//! still there, from memory or from the spill file, and reads the rest again in the way it was read before.

use super::Engine;
use super::request::{Class, SeqId};
use super::sequence::Sequence;
use super::spill::SpillFile;
use crate::backend::MlaOrder;
use crate::kv::{NodeId, PAGE_TOKENS, PageId, Place, SlotId, pages_for};
use crate::units::Result;
use std::path::Path;

/// What the cache did, counted since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Sequences thrown out to make room; they come back.
    pub preempted: u64,
    /// Blocks forgotten.
    pub evicted: u64,
    /// Blocks written to the spill file.
    pub spilled: u64,
    /// Blocks read back from it.
    pub fetched: u64,
    /// Pages copied because two sequences went on differently from the middle of one.
    pub copied: u64,
    /// Bytes given back to the system.
    pub given_back_bytes: u64,
}

/// Tags in the tree: how a token was computed.
pub(super) fn tag(order: MlaOrder) -> u8 {
    match order {
        MlaOrder::Absorbed => 0,
        MlaOrder::Materialized => 1,
    }
}

/// The reverse of [`tag`].
pub(super) fn order(tag: u8) -> MlaOrder {
    if tag == 0 { MlaOrder::Absorbed } else { MlaOrder::Materialized }
}

impl Engine {
    /// Lets cold blocks go to a file in `folder`, up to `bytes_max`, instead of being forgotten.
    pub fn spill_to(&mut self, folder: &Path, bytes_max: u64) -> Result<()> {
        let slot_bytes = self.backend.page_bytes() * self.stride;
        self.spill = Some(SpillFile::create(folder, slot_bytes, bytes_max)?);
        Ok(())
    }

    /// What the cache did.
    pub fn cache_counters(&self) -> CacheCounters {
        self.cache_counters
    }

    /// `(blocks of the prefix tree in memory, in the spill file)`.
    pub fn cached_blocks(&self) -> (usize, usize) {
        self.tree.blocks()
    }

    /// Bytes of the spill file in use.
    pub fn spill_bytes(&self) -> u64 {
        self.spill.as_ref().map_or(0, |s| s.used_bytes())
    }

    /// Takes what is cached for a sequence that holds nothing yet. False if the whole of it would not fit now, whatever of
    /// lower rank were thrown out: it waits.
    pub(super) fn attach(&mut self, i: usize, kept: &[usize]) -> bool {
        let fresh = self.seqs[i].replay.is_empty();
        let (mut pages, mut tags) = (Vec::new(), Vec::new());
        if self.seqs[i].prefix || !fresh {
            let s = &self.seqs[i];
            let replay = (!fresh).then_some(&s.replay[..]);
            let path = self.tree.find(&s.tokens, replay);
            self.take_path(i, &path.nodes, path.tokens, kept, &mut pages, &mut tags);
        }
        let found = tags.len();
        let s = &mut self.seqs[i];
        // One token at least must be read to give logits.
        let usable = found.min(s.tokens.len() - 1);
        tags.truncate(usable);
        s.table.pages = pages;
        s.table.tokens = found;
        s.table.truncate(&mut self.pool, usable, self.stride);
        s.tags = tags;
        if !self.fits(i, kept) {
            self.seqs[i].detach(&mut self.pool);
            return false;
        }
        let s = &mut self.seqs[i];
        s.attached = true;
        if fresh {
            let (reused, prompt_len) = (s.table.tokens, s.prompt_len);
            s.start(found.min(prompt_len));
            let order = self.prompt_order(prompt_len - reused, reused);
            self.seqs[i].order = order;
        }
        true
    }

    /// Collects pages and tags of a path, with a reference to each page; what is spilled is read back. Stops early where
    /// there is no room or the file fails.
    fn take_path(
        &mut self,
        i: usize,
        path: &[NodeId],
        tokens: usize,
        kept: &[usize],
        pages: &mut Vec<PageId>,
        tags: &mut Vec<u8>,
    ) {
        let stamps: Vec<_> = path.iter().map(|&id| self.tree.stamp(id)).collect();
        for (n, &id) in path.iter().enumerate() {
            // Making room for one block may cost a later one.
            if self.tree.stamp(id) != stamps[n] {
                break;
            }
            if let Place::Spilled(slot) = *self.tree.place(id)
                && !self.fetch(i, id, slot, kept)
            {
                break;
            }
            let Place::Pages(own) = self.tree.place(id) else { unreachable!("fetched above") };
            own.iter().for_each(|&p| self.pool.share(p));
            pages.extend_from_slice(own);
            let left = tokens - n * self.block_tokens();
            tags.extend(self.tree.tags(id).iter().take(left));
        }
        self.tree.keep(&path[..pages.len() / self.stride]);
    }

    /// Reads a spilled block back into memory; without room or with a bad file it is not there.
    fn fetch(&mut self, i: usize, id: NodeId, slot: SlotId, kept: &[usize]) -> bool {
        if !self.make_room(self.stride, self.rank(i), kept) {
            return false;
        }
        let spill = self.spill.as_mut().expect("what is spilled has a file");
        let mut bytes = std::mem::take(&mut self.bytes);
        let read = spill.read(slot, &mut bytes);
        let tokens = self.tree.tags(id).len();
        let pages: Vec<PageId> = (0..self.stride).map(|_| self.pool.take().expect("room was made")).collect();
        let done = read.and_then(|()| self.backend.import(&pages, tokens, &bytes));
        if let Err(e) = &done {
            log::warn!("{e}; the tokens are read again");
            pages.into_iter().for_each(|p| self.pool.release(p));
            let mut slots = Vec::new();
            self.tree.remove(&mut self.pool, id, &mut slots);
            self.free_slots(slots);
        } else {
            let slot = self.tree.fetched(id, pages);
            self.free_slots(vec![slot]);
            self.cache_counters.fetched += 1;
        }
        self.bytes = bytes;
        done.is_ok()
    }

    /// Tokens of a block.
    pub(super) fn block_tokens(&self) -> usize {
        PAGE_TOKENS * self.stride
    }

    pub(super) fn free_slots(&mut self, slots: Vec<SlotId>) {
        if let Some(spill) = &mut self.spill {
            slots.into_iter().for_each(|s| spill.release(s));
        }
    }

    /// True if all that a sequence has to read would fit, with what can be evicted and what ranks below it thrown out.
    fn fits(&self, i: usize, kept: &[usize]) -> bool {
        let s = &self.seqs[i];
        // Each that runs grows meanwhile: a block of room for it, so that none is thrown out again at once.
        let running = self.seqs.iter().filter(|s| s.done.is_none() && s.attached).count();
        let needs = pages_for(s.tokens.len() + 1, self.stride) - s.table.pages.len() + running * self.stride;
        let victims = self.victims(self.rank(i), kept).map(|v| self.seqs[v].table.pages.len());
        needs <= self.pool.free_pages() + self.tree.evictable_pages(&self.pool) + victims.sum::<usize>()
    }

    /// Adds what a sequence has computed to the tree; the last block that is not full only with `partial`.
    pub(super) fn fold(&mut self, i: usize, partial: bool) -> Vec<NodeId> {
        let s = &self.seqs[i];
        let n = s.table.tokens;
        let (path, slots) =
            self.tree.insert(&mut self.pool, &s.tokens[..n], &s.tags[..n], &s.table.pages, partial);
        self.free_slots(slots);
        path.nodes
    }

    /// Who goes first when room is short: by class, then by age.
    pub(super) fn rank(&self, i: usize) -> (Class, SeqId) {
        (self.seqs[i].class, self.seqs[i].id)
    }

    /// Sequences that hold pages and may be thrown out for one of `rank`.
    fn victims<'a>(&'a self, rank: (Class, SeqId), kept: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        let may = move |&v: &usize| {
            let s: &Sequence = &self.seqs[v];
            s.done.is_none() && !s.table.pages.is_empty() && self.rank(v) > rank && !kept.contains(&v)
        };
        (0..self.seqs.len()).filter(may)
    }

    /// Frees `pages` pages: evicts what is cold, then throws out what ranks below, last first. False if that is not enough.
    pub(super) fn make_room(&mut self, pages: usize, rank: (Class, SeqId), kept: &[usize]) -> bool {
        while self.pool.free_pages() < pages {
            if self.evict() {
                continue;
            }
            let Some(victim) = self.victims(rank, kept).max_by_key(|&v| self.rank(v)) else { return false };
            self.preempt(victim);
        }
        true
    }

    /// Throws a sequence out: its blocks stay in the tree as long as there is room, and in the spill file after.
    fn preempt(&mut self, i: usize) {
        let path = self.fold(i, true);
        self.tree.keep(&path);
        let s = &mut self.seqs[i];
        log::debug!("sequence {} makes room after {} tokens", s.id, s.table.tokens);
        s.replay = std::mem::take(&mut s.tags);
        s.detach(&mut self.pool);
        self.cache_counters.preempted += 1;
    }

    /// Lets the coldest block go, to the spill file if it is worth a write. False if none can go.
    fn evict(&mut self) -> bool {
        let Some((id, keep)) = self.tree.coldest(&self.pool) else { return false };
        if !(keep && self.spill_block(id)) {
            let mut slots = Vec::new();
            self.tree.remove(&mut self.pool, id, &mut slots);
            self.free_slots(slots);
            self.cache_counters.evicted += 1;
        }
        true
    }

    /// Gives a block to the spill file, in place of the coldest one there if it is full.
    fn spill_block(&mut self, id: NodeId) -> bool {
        let Some(spill) = &mut self.spill else { return false };
        if spill.full() {
            let Some(cold) = self.tree.coldest_spilled() else { return false };
            let mut slots = Vec::new();
            self.tree.remove(&mut self.pool, cold, &mut slots);
            slots.into_iter().for_each(|s| spill.release(s));
            // A session that is being saved may need the slot a while yet.
            if spill.full() {
                return false;
            }
        }
        let Place::Pages(pages) = self.tree.place(id) else { unreachable!("what is evicted is in memory") };
        let mut bytes = Vec::new();
        if let Err(e) = self.backend.export(pages, self.tree.tags(id).len(), &mut bytes) {
            log::warn!("{e}; the block is forgotten");
            return false;
        }
        let Some(slot) = spill.write(bytes) else { return false };
        self.tree.spilled(&mut self.pool, id, slot);
        self.cache_counters.spilled += 1;
        true
    }

    /// Gives idle cache memory back to the system: at least `bytes` of it, if there is so much. Blocks that no sequence uses
    /// go first to the spill file or are forgotten; the pool may not grow again until [`Engine::allow_growth`].
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let mut freed = self.give_back();
        while freed < bytes {
            // A batch of blocks at a time: giving back works on runs of pages.
            let mut any = false;
            for _ in 0..8 {
                any |= self.evict();
            }
            if !any {
                break;
            }
            freed += self.give_back();
        }
        // One whole sequence must always fit.
        let least = pages_for(self.context_tokens, self.stride);
        self.pool.set_cap(self.pool.used_pages().max(least));
        freed
    }

    fn give_back(&mut self) -> u64 {
        let pages = self.pool.give_back();
        let bytes = self.backend.discard(&pages);
        self.cache_counters.given_back_bytes += bytes;
        bytes
    }

    /// Lets the pool use a quarter more pages than now, after a [`Engine::shrink`]; true once it may use all.
    pub fn allow_growth(&mut self) -> bool {
        let cap = self.pool.cap();
        self.pool.set_cap(cap + cap.div_ceil(4));
        self.pool.cap() == self.pool.len()
    }
}
