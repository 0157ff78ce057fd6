//! Which routed expert lies in which slot of device memory, and which slot goes next: bookkeeping only.
//!
//! Slots stand in a list by last use. A use is numbered by the piece of work that reads the slot; numbers grow, so that the
//! slot used longest ago is also the first whose work has ended, and looking at one slot answers for all.

use crate::units::{ExpertId, LayerId};

/// Index of a slot.
pub type SlotId = usize;
/// No slot; the list's end.
const NONE: SlotId = SlotId::MAX;

#[derive(Debug, Clone, Copy)]
struct Slot {
    holds: Option<(LayerId, ExpertId)>,
    /// The work that reads it last.
    used: u64,
    /// Neighbours in the list: used before, used after.
    before: SlotId,
    after: SlotId,
}

/// The slots.
#[derive(Debug)]
pub struct Slots {
    slots: Vec<Slot>,
    /// `(layer, expert)`: its slot or [`NONE`].
    of: Vec<Vec<SlotId>>,
    oldest: SlotId,
    newest: SlotId,
}

impl Slots {
    /// `slots` empty ones, for layers of these numbers of experts.
    pub fn new(slots: usize, experts: &[usize]) -> Slots {
        let link = |i: usize| Slot {
            holds: None,
            used: 0,
            before: i.checked_sub(1).unwrap_or(NONE),
            after: if i + 1 < slots { i + 1 } else { NONE },
        };
        Slots {
            slots: (0..slots).map(link).collect(),
            of: experts.iter().map(|&n| vec![NONE; n]).collect(),
            oldest: if slots == 0 { NONE } else { 0 },
            newest: slots.checked_sub(1).unwrap_or(NONE),
        }
    }

    /// Slots in all.
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// The slot that holds an expert.
    pub fn find(&self, layer: LayerId, expert: ExpertId) -> Option<SlotId> {
        Some(self.of[layer][expert as usize]).filter(|&s| s != NONE)
    }

    /// Work number `work` reads the slot: it is not taken before that has ended.
    pub fn touch(&mut self, slot: SlotId, work: u64) {
        debug_assert!(work >= self.slots[slot].used, "work is numbered in order");
        self.slots[slot].used = work;
        self.unlink(slot);
        self.link_after(self.newest, slot);
    }

    /// The slot to take next, if all work that read it has ended: that up to number `ended`.
    pub fn victim(&self, ended: u64) -> Option<SlotId> {
        Some(self.oldest).filter(|&s| s != NONE && self.slots[s].used <= ended)
    }

    /// Puts an expert into a slot; what was there is forgotten.
    pub fn assign(&mut self, slot: SlotId, layer: LayerId, expert: ExpertId) {
        self.forget(slot);
        self.slots[slot].holds = Some((layer, expert));
        self.of[layer][expert as usize] = slot;
    }

    /// Empties a slot; it is the next to be taken.
    pub fn clear(&mut self, slot: SlotId) {
        self.forget(slot);
        self.slots[slot].used = 0;
        self.unlink(slot);
        let first = self.oldest;
        self.link_after(NONE, slot);
        debug_assert!(self.slots[slot].after == first);
    }

    fn forget(&mut self, slot: SlotId) {
        if let Some((layer, expert)) = self.slots[slot].holds.take() {
            self.of[layer][expert as usize] = NONE;
        }
    }

    fn unlink(&mut self, slot: SlotId) {
        let Slot { before, after, .. } = self.slots[slot];
        match before {
            NONE => self.oldest = after,
            b => self.slots[b].after = after,
        }
        match after {
            NONE => self.newest = before,
            a => self.slots[a].before = before,
        }
    }

    /// Puts an unlinked slot after another; after [`NONE`] is the front.
    fn link_after(&mut self, before: SlotId, slot: SlotId) {
        let after = if before == NONE { self.oldest } else { self.slots[before].after };
        (self.slots[slot].before, self.slots[slot].after) = (before, after);
        match before {
            NONE => self.oldest = slot,
            b => self.slots[b].after = slot,
        }
        match after {
            NONE => self.newest = slot,
            a => self.slots[a].before = slot,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list's slots from the one used longest ago, both ways round.
    fn order(s: &Slots) -> Vec<SlotId> {
        let walk = |mut at: SlotId, next: fn(&Slot) -> SlotId| {
            let mut out = Vec::new();
            while at != NONE {
                out.push(at);
                at = next(&s.slots[at]);
            }
            out
        };
        let forth = walk(s.oldest, |s| s.after);
        let mut back = walk(s.newest, |s| s.before);
        back.reverse();
        assert_eq!(forth, back);
        assert_eq!(forth.len(), s.count());
        forth
    }

    #[test]
    fn the_slot_used_longest_ago_goes_once_its_work_has_ended() {
        let mut s = Slots::new(3, &[4, 0, 4]);
        for (work, (layer, expert)) in [(0, 3), (2, 1), (2, 0)].into_iter().enumerate() {
            let slot = s.victim(0).unwrap();
            s.assign(slot, layer, expert);
            s.touch(slot, work as u64 + 1);
            assert_eq!(s.find(layer, expert), Some(slot));
        }
        assert_eq!(order(&s), [0, 1, 2]);
        assert_eq!(s.victim(0), None, "all are in use");
        assert_eq!(s.victim(1), Some(0));
        s.touch(0, 4);
        assert_eq!((s.victim(1), s.victim(2)), (None, Some(1)));
        s.assign(1, 0, 2);
        s.touch(1, 5);
        assert_eq!((s.find(2, 1), s.find(0, 2)), (None, Some(1)));
        assert_eq!(order(&s), [2, 0, 1]);
    }

    #[test]
    fn a_cleared_slot_is_next_and_empty() {
        let mut s = Slots::new(3, &[8]);
        (0..3).for_each(|i| {
            s.assign(i, 0, i as u32);
            s.touch(i, 1 + i as u64);
        });
        s.clear(1);
        assert_eq!((order(&s), s.find(0, 1), s.victim(0)), (vec![1, 0, 2], None, Some(1)));
        s.clear(2);
        s.clear(2);
        assert_eq!(order(&s), [2, 1, 0]);
        s.assign(2, 0, 7);
        s.touch(2, 9);
        assert_eq!((order(&s), s.find(0, 0), s.find(0, 7)), (vec![1, 0, 2], Some(0), Some(2)));
    }

    #[test]
    fn one_slot_and_none_keep_a_list() {
        let mut one = Slots::new(1, &[2]);
        one.assign(0, 0, 0);
        one.touch(0, 3);
        one.clear(0);
        one.assign(0, 0, 1);
        one.touch(0, 4);
        assert_eq!((order(&one), one.victim(3), one.victim(4)), (vec![0], None, Some(0)));
        assert_eq!(Slots::new(0, &[2]).victim(u64::MAX), None);
    }
}
