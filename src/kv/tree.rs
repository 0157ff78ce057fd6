//! The prefix tree: which blocks of tokens are cached, for any sequence that begins with them.
//!
//! A node is one block: the tokens of `stride` pages, or fewer in a leaf. A path from the root spells a prefix. The tree
//! holds one reference to each page; a sequence that uses the block holds another. What no sequence uses can be evicted,
//! coldest first and from the leaves, or moved to a slot of a spill file, which the engine owns.
//!
//! Each token carries a tag: how it was computed. Tokens and tags of a path determine the cached bits, so that a sequence
//! that was thrown out and reads its tokens again, with the same tags, continues as if nothing had happened. A path never
//! mixes: a node is only put below a parent whose tags are those it was computed over.

use super::{PageId, PagePool};
use crate::units::TokenId;
use std::collections::BTreeMap;
use std::ops::Bound::{Included, Unbounded};

/// A node's index; reused after the node is gone.
pub type NodeId = usize;

/// A slot of the spill file.
pub type SlotId = u32;

/// Where a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In memory.
    Pages(Vec<PageId>),
    /// In the spill file.
    Spilled(SlotId),
}

#[derive(Debug)]
struct Node {
    parent: Option<NodeId>,
    tokens: Box<[TokenId]>,
    tags: Box<[u8]>,
    place: Place,
    children: Children,
    /// Never the same for two nodes.
    stamp: u64,
    /// When it was last used.
    used: u64,
    /// Worth a write when it is evicted: it was reused, or someone will come back for it.
    keep: bool,
}

type Children = BTreeMap<Box<[TokenId]>, NodeId>;

/// The cached part of a prefix.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks in order.
    pub nodes: Vec<NodeId>,
    /// Tokens in all; the last block may be used in part.
    pub tokens: usize,
}

/// The tree.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Option<Node>>,
    empty: Vec<NodeId>,
    root: Children,
    block: usize,
    clock: u64,
    next_stamp: u64,
}

/// How many elements two slices share at the front.
fn common<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

impl Tree {
    /// An empty tree of blocks of `block` tokens.
    pub fn new(block: usize) -> Tree {
        assert!(block > 0 && block.is_multiple_of(super::PAGE_TOKENS), "whole pages");
        Tree { nodes: Vec::new(), empty: Vec::new(), root: Children::new(), block, clock: 0, next_stamp: 0 }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("a node that is there")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("a node that is there")
    }

    fn children(&self, parent: Option<NodeId>) -> &Children {
        parent.map_or(&self.root, |p| &self.node(p).children)
    }

    fn children_mut(&mut self, parent: Option<NodeId>) -> &mut Children {
        match parent {
            Some(p) => &mut self.node_mut(p).children,
            None => &mut self.root,
        }
    }

    /// Where a block is.
    pub fn place(&self, id: NodeId) -> &Place {
        &self.node(id).place
    }

    /// What tells a node from all others, also from a later one of the same index; `None` if it is gone.
    pub fn stamp(&self, id: NodeId) -> Option<u64> {
        self.nodes[id].as_ref().map(|n| n.stamp)
    }

    /// A block's tags.
    pub fn tags(&self, id: NodeId) -> &[u8] {
        &self.node(id).tags
    }

    /// Blocks in memory and in the spill file.
    pub fn blocks(&self) -> (usize, usize) {
        let all = self.nodes.iter().flatten();
        let memory = all.clone().filter(|n| matches!(n.place, Place::Pages(_))).count();
        (memory, all.count() - memory)
    }

    /// The longest cached prefix of `tokens`; with `tags`, only what was computed that way. Marks it as used.
    pub fn find(&mut self, tokens: &[TokenId], tags: Option<&[u8]>) -> Found {
        let mut found = Found::default();
        let mut parent = None;
        while found.tokens < tokens.len() {
            let rest = &tokens[found.tokens..];
            let Some((id, mut same)) = self.nearest(parent, rest) else { break };
            if let Some(tags) = tags {
                let tags = tags.get(found.tokens..).unwrap_or(&[]);
                same = same.min(common(&self.node(id).tags, tags));
            }
            if same == 0 {
                break;
            }
            found.nodes.push(id);
            found.tokens += same;
            if same < self.block {
                break;
            }
            parent = Some(id);
        }
        self.touch(&found.nodes);
        found
    }

    /// The child that shares most with `rest`, and how much: a neighbour of `rest` in the order of the keys.
    fn nearest(&self, parent: Option<NodeId>, rest: &[TokenId]) -> Option<(NodeId, usize)> {
        let children = self.children(parent);
        let key = &rest[..rest.len().min(self.block)];
        let before = children.range::<[TokenId], _>((Unbounded, Included(key))).next_back();
        let after = children.range::<[TokenId], _>((Included(key), Unbounded)).next();
        let shared = [before, after].into_iter().flatten().map(|(k, &id)| (id, common(k, key)));
        shared.max_by_key(|&(_, n)| n).filter(|&(_, n)| n > 0)
    }

    fn touch(&mut self, path: &[NodeId]) {
        self.clock += 1;
        // A parent is never colder than its child.
        for &id in path {
            let clock = self.clock;
            self.node_mut(id).used = clock;
        }
    }

    /// Marks a path as worth a write when it is evicted.
    pub fn keep(&mut self, path: &[NodeId]) {
        path.iter().for_each(|&id| self.node_mut(id).keep = true);
    }

    /// Adds the blocks of `tokens`, computed with `tags` into `pages` (`stride` of them a block), where they are not there
    /// yet; takes a reference to each page that it keeps. A last block that is not full is added only with `partial`.
    /// Returns the path as far as it goes, and the spill slots that are free now.
    pub fn insert(
        &mut self,
        pool: &mut PagePool,
        tokens: &[TokenId],
        tags: &[u8],
        pages: &[PageId],
        partial: bool,
    ) -> (Found, Vec<SlotId>) {
        assert_eq!(tokens.len(), tags.len());
        let (mut found, mut slots) = (Found::default(), Vec::new());
        let mut parent = None;
        let stride = self.block / super::PAGE_TOKENS;
        for (i, (tokens, tags)) in tokens.chunks(self.block).zip(tags.chunks(self.block)).enumerate() {
            let full = tokens.len() == self.block;
            if !full && !partial {
                break;
            }
            let pages = &pages[i * stride..(i + 1) * stride];
            match self.insert_block(pool, parent, tokens, tags, pages, &mut slots) {
                Some(id) => {
                    found.nodes.push(id);
                    found.tokens += tokens.len();
                    parent = Some(id);
                }
                None => break,
            }
        }
        self.touch(&found.nodes);
        (found, slots)
    }

    /// Adds one block after those that end in `parent`, as [`Tree::insert`] adds each of many; the last of a path may be short.
    /// Returns its node, if no other computation of the same tokens is there, and the spill slots that are free now.
    pub fn insert_after(
        &mut self,
        pool: &mut PagePool,
        parent: Option<NodeId>,
        tokens: &[TokenId],
        tags: &[u8],
        pages: &[PageId],
    ) -> (Option<NodeId>, Vec<SlotId>) {
        assert!(tokens.len() == tags.len() && (1..=self.block).contains(&tokens.len()), "one block");
        let mut slots = Vec::new();
        let id = self.insert_block(pool, parent, tokens, tags, pages, &mut slots);
        self.touch(id.as_slice());
        (id, slots)
    }

    /// Adds one block, or finds it. `None`: another computation of the same tokens is there.
    fn insert_block(
        &mut self,
        pool: &mut PagePool,
        parent: Option<NodeId>,
        tokens: &[TokenId],
        tags: &[u8],
        pages: &[PageId],
        slots: &mut Vec<SlotId>,
    ) -> Option<NodeId> {
        if let Some((id, same)) = self.nearest(parent, tokens) {
            let n = self.node_mut(id);
            if same == tokens.len() {
                if common(&n.tags, tags) < same {
                    return None;
                }
                // What is in memory now need not be fetched later.
                if let Place::Spilled(slot) = n.place
                    && n.tokens.len() == same
                {
                    slots.push(slot);
                    pages.iter().for_each(|&p| pool.share(p));
                    n.place = Place::Pages(pages.to_vec());
                }
                return Some(id);
            }
            // A shorter leaf that this block contains is of no more use.
            if same == n.tokens.len() && n.children.is_empty() {
                self.remove(pool, id, slots);
            }
        }
        pages.iter().for_each(|&p| pool.share(p));
        let node = Node {
            parent,
            tokens: tokens.into(),
            tags: tags.into(),
            place: Place::Pages(pages.to_vec()),
            children: Children::new(),
            stamp: self.next_stamp,
            used: self.clock,
            keep: false,
        };
        self.next_stamp += 1;
        let id = match self.empty.pop() {
            Some(id) => {
                self.nodes[id] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        self.children_mut(parent).insert(tokens.into(), id);
        Some(id)
    }

    /// Removes a block and all below it.
    pub fn remove(&mut self, pool: &mut PagePool, id: NodeId, slots: &mut Vec<SlotId>) {
        let mut node = self.nodes[id].take().expect("a node that is there");
        for (_, child) in std::mem::take(&mut node.children) {
            self.remove(pool, child, slots);
        }
        self.children_mut_if_there(node.parent).map(|c| c.remove(&node.tokens));
        match node.place {
            Place::Pages(pages) => pages.into_iter().for_each(|p| pool.release(p)),
            Place::Spilled(slot) => slots.push(slot),
        }
        self.empty.push(id);
    }

    /// A parent that is being removed itself has no list any more.
    fn children_mut_if_there(&mut self, parent: Option<NodeId>) -> Option<&mut Children> {
        match parent {
            Some(p) => self.nodes[p].as_mut().map(|n| &mut n.children),
            None => Some(&mut self.root),
        }
    }

    fn in_memory(&self, id: NodeId) -> bool {
        matches!(self.node(id).place, Place::Pages(_))
    }

    /// No sequence uses it, and nothing below it is in memory.
    fn evictable(&self, pool: &PagePool, n: &Node) -> bool {
        let Place::Pages(pages) = &n.place else { return false };
        pages.iter().all(|&p| pool.references(p) == 1) && !n.children.values().any(|&c| self.in_memory(c))
    }

    /// The coldest block in memory that can go, and whether it is worth a write.
    pub fn coldest(&self, pool: &PagePool) -> Option<(NodeId, bool)> {
        let nodes = self.nodes.iter().enumerate().filter_map(|(id, n)| Some((id, n.as_ref()?)));
        let can_go = nodes.filter(|(_, n)| self.evictable(pool, n));
        can_go.min_by_key(|(_, n)| n.used).map(|(id, n)| (id, n.keep))
    }

    /// The coldest block in the spill file that has nothing below it.
    pub fn coldest_spilled(&self) -> Option<NodeId> {
        let nodes = self.nodes.iter().enumerate().filter_map(|(id, n)| Some((id, n.as_ref()?)));
        let can_go = nodes.filter(|(_, n)| matches!(n.place, Place::Spilled(_)) && n.children.is_empty());
        can_go.min_by_key(|(_, n)| n.used).map(|(id, _)| id)
    }

    /// Pages that eviction could free: those that only the tree holds. A page held only by the tree whose child a sequence
    /// uses does not exist: a sequence holds its whole path.
    pub fn evictable_pages(&self, pool: &PagePool) -> usize {
        let pages = |n: &Node| match &n.place {
            Place::Pages(p) => p.iter().filter(|&&p| pool.references(p) == 1).count(),
            Place::Spilled(_) => 0,
        };
        self.nodes.iter().flatten().map(pages).sum()
    }

    /// A block has been written to a slot: its pages go.
    pub fn spilled(&mut self, pool: &mut PagePool, id: NodeId, slot: SlotId) {
        let place = std::mem::replace(&mut self.node_mut(id).place, Place::Spilled(slot));
        let Place::Pages(pages) = place else { panic!("only what is in memory is spilled") };
        pages.into_iter().for_each(|p| pool.release(p));
    }

    /// A block has been read back into pages taken from the pool, whose reference is the tree's now. Returns its slot.
    pub fn fetched(&mut self, id: NodeId, pages: Vec<PageId>) -> SlotId {
        let place = std::mem::replace(&mut self.node_mut(id).place, Place::Pages(pages));
        let Place::Spilled(slot) = place else { panic!("only what is spilled is fetched") };
        slot
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
