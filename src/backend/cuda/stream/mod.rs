//! Routed experts that do not all lie on the device: slots, what is in them, how the rest comes there, and the picks as the
//! host reads them while the GPU goes on.
//!
//! The expert kernels read a table of addresses a layer; putting an expert into a slot writes its entry. A slot is taken only
//! when the work that read it last has ended: works are numbered, and the host learns of their end by reading the picks of
//! a later router, by an event, or by an idle stream.

pub mod lane;
pub mod slots;
#[cfg(test)]
mod tests;
pub mod upload;

use super::driver::{Context, Device, Wait};
use super::memory::{Pinned, Ptr};
use super::weights::Stored;
use crate::units::{Error, ExpertId, LayerId, Result};
use crate::weights::{Expert, ExpertSource};
use lane::Event;
use slots::{SlotId, Slots};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use upload::Upload;

/// What picks are set to before a router writes them: no expert.
const UNWRITTEN: u32 = u32::MAX;
/// The host polls for picks no longer than this before they usually come; until then it sleeps.
const POLL: Duration = Duration::from_micros(120);
/// After this long without picks something is wrong or slow, and waiting for the stream says which.
const OVERDUE: Duration = Duration::from_millis(2);

/// A layer's routed experts in slots.
#[derive(Debug, Clone, Copy)]
pub struct OfLayer {
    /// Device addresses `(n_experts, 3)` u64.
    pub table: Ptr,
    /// How gate, up and down lie there; they follow each other in a slot.
    pub stored: [Stored; 3],
}

impl OfLayer {
    /// Bytes of an expert.
    pub fn bytes(&self) -> usize {
        self.stored.iter().map(Stored::room_bytes).sum()
    }

    /// Addresses of the three matrices in a slot.
    fn places(&self, slot: Ptr) -> [Ptr; 3] {
        let up = slot.at(self.stored[0].room_bytes() as u64);
        [slot, up, up.at(self.stored[1].room_bytes() as u64)]
    }
}

/// Counted since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Misses {
    /// Experts that were not in a slot when they were needed.
    pub experts: u64,
    /// Bytes copied for them.
    pub bytes: u64,
}

/// The device's share of the routed experts.
pub struct Streamed {
    source: Arc<dyn ExpertSource>,
    /// By layer; `None` where there are none.
    layers: Vec<Option<OfLayer>>,
    slots: Slots,
    /// Address of each slot.
    at: Vec<Ptr>,
    /// Table entries on their way, `(slots, 3)` u64.
    entries: Pinned,
    upload: Upload,
    /// `(rows, layers, picked)` u32.
    picks: Pinned,
    n_picked: usize,
    /// Number of the work that is put together now; slots it reads carry it.
    work: u64,
    /// All work up to this one has ended.
    ended: u64,
    /// Works whose end an event tells.
    marks: VecDeque<(u64, Event)>,
    spare: Vec<Event>,
    wait: Wait,
    /// Running mean of how long picks take to come.
    usual: Duration,
    misses: u64,
    missing: Vec<(ExpertId, Option<SlotId>)>,
    fetched: Vec<Arc<Expert>>,
}

/// What [`Streamed::new`] is made of.
pub struct Parts {
    /// Where experts come from.
    pub source: Arc<dyn ExpertSource>,
    /// By layer.
    pub layers: Vec<Option<OfLayer>>,
    /// Experts of a layer and picks of a row.
    pub n_experts: usize,
    /// See above.
    pub n_picked: usize,
    /// Address of each slot.
    pub slots: Vec<Ptr>,
    /// Most rows of a step.
    pub rows: usize,
    /// How the host waits.
    pub wait: Wait,
}

impl Streamed {
    /// All slots empty.
    pub fn new(context: &Arc<Context>, p: Parts) -> Result<Streamed> {
        let experts: Vec<usize> =
            p.layers.iter().map(|l| if l.is_some() { p.n_experts } else { 0 }).collect();
        Ok(Streamed {
            source: p.source,
            entries: Pinned::new(context, (24 * p.slots.len()).max(8))?,
            upload: Upload::new(context)?,
            picks: Pinned::new(context, 4 * p.rows * p.layers.len() * p.n_picked)?,
            n_picked: p.n_picked,
            slots: Slots::new(p.slots.len(), &experts),
            at: p.slots,
            layers: p.layers,
            work: 1,
            ended: 0,
            marks: VecDeque::new(),
            spare: Vec::new(),
            wait: p.wait,
            usual: Duration::ZERO,
            misses: 0,
            missing: Vec::new(),
            fetched: Vec::new(),
        })
    }

    /// Host memory that a backend pins for this.
    pub fn pinned_bytes(slots: usize, rows: usize, layers: usize, n_picked: usize) -> usize {
        24 * slots + Upload::RING_BYTES + 4 * rows * layers * n_picked
    }

    /// Says that the slots hold `experts`, in their order: where all were loaded into them.
    pub fn hold(&mut self, experts: impl Iterator<Item = (LayerId, ExpertId)>) {
        for (slot, (layer, expert)) in experts.enumerate() {
            self.slots.assign(slot, layer, expert);
        }
    }

    /// Slots.
    pub fn capacity(&self) -> usize {
        self.slots.count()
    }

    /// What was missing so far.
    pub fn misses(&self) -> Misses {
        Misses { experts: self.misses, bytes: self.upload.bytes }
    }

    /// Address of the picks for routers to write.
    pub fn picks_at(&self) -> Result<Ptr> {
        self.picks.device()
    }

    /// Picks of `rows` rows, `(rows, layers, picked)`, once the stream is idle.
    pub fn picks(&self, rows: usize) -> &[u32] {
        let row = self.layers.len() * self.n_picked;
        &bytemuck::cast_slice(self.picks.bytes())[..rows * row]
    }

    /// Before a step of `rows` rows: no picks are there.
    pub fn start(&mut self, rows: usize) {
        let row = self.layers.len() * self.n_picked;
        let words: &mut [u32] = bytemuck::cast_slice_mut(self.picks.bytes_mut());
        words[..rows * row].fill(UNWRITTEN);
    }

    /// All that was put on the stream has ended.
    pub fn idle(&mut self) {
        self.ended = self.work;
        self.spare.extend(self.marks.drain(..).map(|(_, e)| e));
    }

    /// Waits until the router of `layer` has picked for all rows. What was put on the stream before that router has ended
    /// then. Asked for right after that router, with nothing behind it that reads slots.
    pub fn await_picks(&mut self, device: &Device, layer: LayerId, rows: usize) -> Result<()> {
        let started = Instant::now();
        if self.wait == Wait::Block && self.usual > POLL {
            std::thread::sleep(self.usual - POLL);
        }
        let overdue = self.usual * 4 + OVERDUE;
        while !self.has_picks(layer, rows) {
            if started.elapsed() > overdue {
                // A fault would never write them; this returns it.
                device.synchronize()?;
                assert!(self.has_picks(layer, rows), "the router of layer {layer} wrote no picks");
            }
            std::hint::spin_loop();
        }
        self.usual = (self.usual * 7 + started.elapsed()) / 8;
        self.idle();
        Ok(())
    }

    fn has_picks(&self, layer: LayerId, rows: usize) -> bool {
        let row = self.layers.len() * self.n_picked;
        let words = self.picks.shared_words();
        let of_row = |r: usize| words[r * row + layer * self.n_picked..][..self.n_picked].iter();
        (0..rows).all(|r| of_row(r).all(|w| w.load(Ordering::Acquire) != UNWRITTEN))
    }

    /// The picks of a row in a layer.
    pub fn of_row(&self, layer: LayerId, row: usize) -> &[ExpertId] {
        let words: &[u32] = bytemuck::cast_slice(self.picks.bytes());
        &words[(row * self.layers.len() + layer) * self.n_picked..][..self.n_picked]
    }

    /// The experts that rows picked in a layer, each once, ascending.
    pub fn distinct(&self, layer: LayerId, rows: std::ops::Range<usize>) -> Vec<ExpertId> {
        let mut ids: Vec<ExpertId> = rows.flat_map(|r| self.of_row(layer, r)).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Begins a work that reads the experts `ids` of `layer`: all are in slots, or on their way there and awaited by the
    /// stream, when this returns. At most as many as there are slots.
    pub fn bring(&mut self, device: &Device, layer: LayerId, ids: &[ExpertId]) -> Result<()> {
        assert!(ids.len() <= self.slots.count(), "{} experts of {} slots", ids.len(), self.slots.count());
        self.work += 1;
        self.missing.clear();
        for &e in ids {
            let slot = self.slots.find(layer, e);
            if let Some(slot) = slot {
                self.slots.touch(slot, self.work);
            }
            if slot.is_none() || self.source.forgets(layer, e) {
                self.missing.push((e, slot));
            }
        }
        if self.missing.is_empty() {
            return Ok(());
        }
        self.misses += self.missing.len() as u64;
        let done = self.fill(layer);
        self.fetched.clear();
        match done {
            Ok(()) => self.upload.before_next(device),
            Err(e) => {
                // Slots that were given up are still copied to, or read by work before.
                self.upload.settle()?;
                device.synchronize()?;
                self.idle();
                Err(e)
            }
        }
    }

    fn fill(&mut self, layer: LayerId) -> Result<()> {
        let missing = std::mem::take(&mut self.missing);
        let ids: Vec<ExpertId> = missing.iter().map(|m| m.0).collect();
        let result = self.source.fetch(layer, &ids, &mut self.fetched).and_then(|()| {
            assert_eq!(self.fetched.len(), ids.len(), "a source gives what was asked for");
            for (i, &(expert, slot)) in missing.iter().enumerate() {
                let own = slot.map_or_else(|| self.take_slot(), Ok)?;
                self.put(own, layer, expert, i)?;
            }
            self.upload.send()
        });
        if result.is_err() {
            // Some have come, some have not: none counts.
            for slot in ids.iter().filter_map(|&e| self.slots.find(layer, e)).collect::<Vec<_>>() {
                self.slots.clear(slot);
            }
        }
        self.missing = missing;
        result
    }

    /// A slot that nothing reads any more, after a wait if need be.
    fn take_slot(&mut self) -> Result<SlotId> {
        loop {
            if let Some(slot) = self.slots.victim(self.ended) {
                return Ok(slot);
            }
            let (work, event) = self.marks.pop_front().expect("a work reads no more than there are slots");
            let waited = event.wait();
            self.spare.push(event);
            waited?;
            self.ended = self.ended.max(work);
        }
    }

    /// Puts fetched expert number `i` in line for a slot and writes its table entry.
    fn put(&mut self, slot: SlotId, layer: LayerId, expert: ExpertId, i: usize) -> Result<()> {
        let of = self.layers[layer].expect("a layer with experts");
        let places = of.places(self.at[slot]);
        // Taken now: a second one must not be given the same slot.
        self.slots.assign(slot, layer, expert);
        self.slots.touch(slot, self.work);
        let e = self.fetched[i].clone();
        for ((m, stored), at) in [&e.gate, &e.up, &e.down].into_iter().zip(&of.stored).zip(places) {
            if !m.bytes.is_empty() {
                self.upload.matrix(at, m, stored);
            } else if !self.source.forgets_freely() {
                let found = format!("no bytes of layer {layer} expert {expert}");
                return Err(Error::bad("model", "experts", "weights", found));
            }
        }
        // The entry stays until the slot is taken again, which is after the copy.
        let bytes = 24 * slot..24 * slot + 24;
        self.entries.bytes_mut()[bytes.clone()].copy_from_slice(bytemuck::cast_slice(&places));
        self.upload.pinned(of.table.at(24 * u64::from(expert)), &self.entries.bytes()[bytes])
    }

    /// The work begun last is on the stream whole: its slots are free once the stream has come here.
    pub fn mark(&mut self, device: &Device) -> Result<()> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event::new(&device.context)?,
        };
        device.record_event(&event)?;
        self.marks.push_back((self.work, event));
        Ok(())
    }
}
