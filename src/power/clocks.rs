//! The knobs: wanted clocks become values of nodes, in an order that no kernel refuses, each read back.
//!
//! The contract: what a node held is on disk before it is written; a node is put back only while it still holds a value
//! of ours; what someone else set is a new start, not an enemy. A cap never lifts a power mode's own, and nobody's pinned
//! clocks are moved.

use super::find::{EMC, Found};
use super::ledger::Ledger;
use super::nodes::{Nodes, number, text};
use super::nvidia::Nvidia;
use super::types::Clocks;
use crate::units::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// Rates at which Orin's memory clock can be locked, in Hz; others round up to the next (measured on R36.5).
pub const EMC_POINTS_HZ: [u64; 4] = [204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000];

/// So many changes by someone else …
const QUARRELS_MAX: usize = 3;
/// … within this …
const QUARREL_US: u64 = 60_000_000;
/// … and we let them have the knob for this long.
const YIELD_US: u64 = 600_000_000;
/// A clock takes up to 10 ms to change, and a node may say the old one until then.
const SETTLE_EVERY_US: u64 = 2_000;
/// Reads before an unchanged node is taken at its word.
const SETTLE_READS: u32 = 6;
/// How long a node that has its old value back stays in the ledger: as long as a phase is likely to want it again.
const REST_US: u64 = 60_000_000;
/// Outcomes that were told, and writes that changed nothing: enough for a profile's phases and a governor's steps.
const TOLD_MAX: usize = 128;
/// How often the GPU's clock is looked for while it is missing.
const LOOK_AGAIN_US: u64 = 2_000_000;

/// What was asked of a knob, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// "gpu cap", "gpu floor", "memory floor", "memory cap".
    pub knob: String,
    /// What was asked.
    pub asked_hz: u64,
    /// What the node says after; none: the board lacks the knob, or we may not touch it.
    pub got_hz: Option<u64>,
    /// Why it is not what was asked.
    pub note: Option<String>,
}

/// Something else that steers a group of knobs.
#[derive(Debug, Default)]
struct Quarrel {
    /// When someone else changed what we held.
    times_us: Vec<u64>,
    /// Until when we leave the knobs alone.
    until_us: u64,
    /// Someone pinned the clock: we wait until the pin is gone.
    pinned: bool,
}

/// A write that changed nothing, such as that of a clock which firmware pins: it costs the time that a clock may take to
/// settle, in which a change of phase would wait, so it is not tried again for a while.
#[derive(Debug)]
struct Futile {
    at_us: u64,
    node: String,
    value: String,
    kept: String,
}

/// Which group of knobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    Gpu = 0,
    Emc = 1,
}

/// A board's knobs, with what is held of them.
pub struct Actuator {
    nodes: Arc<dyn Nodes>,
    found: Found,
    looked_us: u64,
    /// A discrete GPU's driver, where that is what is steered.
    nvidia: Option<Nvidia>,
    ledger: Ledger,
    want: Clocks,
    /// What came of wishes so far: the log tells only news, and phases come back.
    told: Vec<Outcome>,
    /// Writes that changed nothing.
    futile: Vec<Futile>,
    quarrels: [Quarrel; 2],
}

/// Another one after each start of the system.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The entry of a discrete GPU's lock, which cannot be read back.
const NVML_GPU: &str = "nvml:gpu";
/// As [`NVML_GPU`], for its memory.
const NVML_MEMORY: &str = "nvml:memory";

impl Actuator {
    /// Finds the knobs and opens the ledger. What an earlier process left behind is put back first.
    pub fn open(nodes: Arc<dyn Nodes>, nvidia: Option<Nvidia>, ledger: &Path) -> Result<Actuator> {
        let found = Found::look(nodes.as_ref());
        let looked_us = nodes.now_us();
        let nvidia = nvidia.filter(|n| n.measures() && found.gpu.is_none());
        let ledger = Ledger::open(ledger, &text(nodes.as_ref(), BOOT_ID).unwrap_or_default())?;
        let want = Clocks::default();
        let mut actuator = Actuator {
            nodes,
            found,
            looked_us,
            nvidia,
            ledger,
            want,
            told: Vec::new(),
            futile: Vec::new(),
            quarrels: Default::default(),
        };
        actuator.release()?;
        Ok(actuator)
    }

    /// What is wanted now.
    pub fn want(&self) -> &Clocks {
        &self.want
    }

    /// What is held, as (node, value before us, value now).
    pub fn held(&self) -> Vec<(String, String, String)> {
        self.ledger.held().map(|e| (e.node.clone(), e.old.clone(), e.now.clone())).collect()
    }

    /// Sets the clocks: every knob that is asked for, and gives back every one that no longer is.
    pub fn apply(&mut self, want: &Clocks) -> Result<Vec<Outcome>> {
        self.want = *want;
        self.look_again();
        self.notice()?;
        let mut outcomes = Vec::new();
        // A lock that is to go, goes before the ceiling above it; a new one comes after.
        self.emc_cap(&mut outcomes)?;
        self.emc_floor(&mut outcomes)?;
        self.gpu(&mut outcomes)?;
        self.tell(&outcomes);
        Ok(outcomes)
    }

    /// Logs what has not been told before. A phase that comes back is no news, and the log may be slow.
    fn tell(&mut self, outcomes: &[Outcome]) {
        for o in outcomes {
            if self.told.contains(o) {
                continue;
            }
            let mhz = |hz: u64| hz as f64 / 1e6;
            let got = o.got_hz.map_or("nothing".into(), |hz| format!("{} MHz", mhz(hz)));
            let note = o.note.as_ref().map_or(String::new(), |n| format!(": {n}"));
            log::info!("{}: asked {} MHz, got {got}{note}", o.knob, mhz(o.asked_hz));
            if self.told.len() == TOLD_MAX {
                self.told.remove(0);
            }
            self.told.push(o.clone());
        }
    }

    /// Gives everything back: the memory's lock, its ceiling, the GPU. Only nodes that still hold a value of ours. What
    /// could not be put back (a device that is away) stays in the ledger for the next time.
    pub fn release(&mut self) -> Result<()> {
        self.want = Clocks::default();
        self.quarrels = Default::default();
        self.release_emc_lock()?;
        for node in super::find::EMC_CAPS {
            self.put_back(node)?;
        }
        // The device may have another name than the one it was held by.
        let names = self.ledger.entries().iter().filter_map(|e| e.node.strip_suffix("/max_freq"));
        let mins = self.ledger.entries().iter().filter_map(|e| e.node.strip_suffix("/min_freq"));
        let mut folders: Vec<String> = names.chain(mins).map(str::to_owned).collect();
        folders.dedup();
        for folder in folders {
            self.release_gpu(&folder)?;
        }
        self.release_nvml()?;
        self.told.clear();
        self.futile.clear();
        self.ledger.forget_rested(u64::MAX)
    }

    /// Looks whether others changed what we hold, or what we had no need to hold. Their values become the new start, and
    /// our wishes are set again on top; but where clocks are pinned, or someone keeps writing, we let go.
    pub fn reconcile(&mut self) -> Result<Vec<Outcome>> {
        if let Some(until) = self.nodes.now_us().checked_sub(REST_US) {
            self.ledger.forget_rested(until)?;
        }
        match (self.want == Clocks::default(), self.ledger.entries().is_empty()) {
            // Where all is as wished this only reads.
            (false, _) => self.apply(&self.want.clone()),
            // What could not be put back before: its device may be there now.
            (true, false) => self.release().map(|()| Vec::new()),
            (true, true) => Ok(Vec::new()),
        }
    }

    /// Takes note of what others set since we last looked.
    fn notice(&mut self) -> Result<()> {
        for group in [Group::Gpu, Group::Emc] {
            let changed = self.changed(group);
            if !changed.is_empty() {
                self.meet(group, &changed)?;
            }
        }
        Ok(())
    }

    /// Nodes of a group that hold something else than what we set last.
    fn changed(&self, group: Group) -> Vec<String> {
        let of_group = |node: &str| match group {
            Group::Gpu => node.starts_with("/sys/class/devfreq/"),
            Group::Emc => node.starts_with(EMC) || super::find::EMC_CAPS.contains(&node),
        };
        let held = self.ledger.held().filter(|e| of_group(&e.node));
        let differs =
            |e: &&super::ledger::Entry| text(self.nodes.as_ref(), &e.node).is_some_and(|v| v != e.now);
        held.filter(differs).map(|e| e.node.clone()).collect()
    }

    /// Someone changed nodes that we held.
    fn meet(&mut self, group: Group, changed: &[String]) -> Result<()> {
        let now = self.nodes.now_us();
        log::warn!("someone else set {}: taken as the new start", changed.join(", "));
        let quarrel = &mut self.quarrels[group as usize];
        quarrel.times_us.retain(|t| now.saturating_sub(*t) < QUARREL_US);
        quarrel.times_us.push(now);
        if quarrel.times_us.len() >= QUARRELS_MAX {
            quarrel.until_us = now + YIELD_US;
            quarrel.times_us.clear();
            log::warn!("it keeps being set: left alone for {} minutes", YIELD_US / 60_000_000);
        }
        if group == Group::Emc {
            // Whoever moved the rate or the lock has it; a ceiling has a new start.
            for node in changed {
                match node.starts_with(EMC) {
                    true => {
                        self.ledger.forget(&format!("{EMC}/mrq_rate_locked"))?;
                        self.ledger.forget(&format!("{EMC}/rate"))?;
                    }
                    false => self.ledger.forget(node)?,
                }
            }
            return Ok(());
        }
        // A power mode that is set again writes both bounds. What it wrote is the start for that bound; the other bound,
        // if it still is ours, keeps its own.
        for node in changed {
            let value = text(self.nodes.as_ref(), node).unwrap_or_default();
            self.ledger.rebase(node, &value)?;
        }
        Ok(())
    }

    /// Whether we leave a group alone just now; says why.
    fn yields(&mut self, group: Group, pinned: bool) -> Option<String> {
        let now = self.nodes.now_us();
        let quarrel = &mut self.quarrels[group as usize];
        quarrel.pinned = pinned;
        if pinned {
            return Some("held by someone else (jetson_clocks?): left alone".into());
        }
        (quarrel.until_us > now).then(|| "something else keeps setting it: left alone for a while".into())
    }

    fn look_again(&mut self) {
        let now = self.nodes.now_us();
        let gone = |g: &String| self.nodes.read(&format!("{g}/max_freq")).is_err();
        let missing = self.found.gpu.as_ref().is_none_or(gone) && self.nvidia.is_none();
        if missing && now.saturating_sub(self.looked_us) >= LOOK_AGAIN_US {
            self.looked_us = now;
            self.found = Found::look(self.nodes.as_ref());
        }
    }

    /// What a node holds, or held before us.
    fn start(&self, node: &str) -> Option<u64> {
        match self.ledger.entry(node) {
            Some(entry) => entry.old.parse().ok(),
            None => number(self.nodes.as_ref(), node),
        }
    }

    /// Sets a node to a value of ours: on disk, written, read back. `perhaps`: what it may round the value to.
    fn hold(&mut self, node: &str, value: u64, perhaps: &[u64]) -> Result<Option<u64>> {
        let nodes = self.nodes.clone();
        let Some(before) = text(nodes.as_ref(), node) else { return Ok(None) };
        let value = value.to_string();
        if before == value && self.ledger.entry(node).is_none_or(|e| e.now == value) {
            return Ok(before.parse().ok());
        }
        let now = nodes.now_us();
        self.futile.retain(|f| now.saturating_sub(f.at_us) < REST_US);
        if self.futile.iter().any(|f| f.node == node && f.value == value && f.kept == before) {
            return Ok(before.parse().ok());
        }
        let perhaps: Vec<String> = perhaps.iter().map(u64::to_string).collect();
        self.ledger.intend(node, &before, &value, &perhaps)?;
        if let Err(e) = nodes.write(node, &value) {
            log::warn!("{node}: write {value}: {e}");
        }
        let got = settled(nodes.as_ref(), node, &before);
        let Some(got) = got else { return Ok(None) };
        if got == before && self.futile.len() < TOLD_MAX {
            self.futile.push(Futile { at_us: now, node: node.to_owned(), value, kept: before.clone() });
        }
        // Where the write changed nothing there is nothing of ours to put back.
        match got == before && self.ledger.entry(node).is_some_and(|e| e.old == before) {
            true => self.ledger.rest(node, now),
            false => self.ledger.became(node, &got)?,
        }
        Ok(got.parse().ok())
    }

    /// Puts a node back, if it holds a value of ours. Forgets it, unless it could not be reached.
    fn put_back(&mut self, node: &str) -> Result<()> {
        let Some(entry) = self.ledger.entry(node) else { return Ok(()) };
        let nodes = self.nodes.clone();
        let Some(held) = text(nodes.as_ref(), node) else { return Ok(()) };
        if entry.ours.contains(&held) && held != entry.old {
            let old = entry.old.clone();
            if let Err(e) = nodes.write(node, &old) {
                log::warn!("{node}: put back {old}: {e}");
                return Ok(());
            }
            // At the end of a phase this is no news.
            let level = if self.want == Clocks::default() { log::Level::Info } else { log::Level::Debug };
            log::log!(level, "{node}: put back {old}");
        } else if held != entry.old {
            log::warn!("{node}: holds {held}, which is not ours: left alone");
            return self.ledger.forget(node);
        }
        self.ledger.rest(node, nodes.now_us());
        Ok(())
    }

    // ---- GPU

    fn gpu(&mut self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        if self.nvidia.is_some() {
            return self.gpu_nvml(outcomes);
        }
        let (cap, floor) = (self.want.gpu_cap_hz, self.want.gpu_floor_hz);
        let mut say = |got: (Option<u64>, Option<u64>), note: Option<String>| {
            for (knob, asked, got) in [("gpu cap", cap, got.1), ("gpu floor", floor, got.0)] {
                let Some(asked_hz) = asked else { continue };
                let note = note.clone().or_else(|| why(got, asked_hz));
                outcomes.push(Outcome { knob: knob.into(), asked_hz, got_hz: got, note });
            }
        };
        let Some(folder) = self.found.gpu.clone() else {
            say((None, None), Some("no GPU clock was found".into()));
            return Ok(());
        };
        let (low, high) = (format!("{folder}/min_freq"), format!("{folder}/max_freq"));
        let (Some(start_low), Some(start_high)) = (self.start(&low), self.start(&high)) else {
            say((None, None), Some("the GPU's clock cannot be read".into()));
            return Ok(());
        };
        let table = self.table(&folder);
        if cap.is_none() && floor.is_none() {
            return self.release_gpu(&folder);
        }
        // Equal bounds that were there before us are a pin: jetson_clocks'.
        let pinned = start_low == start_high && table.len() > 1;
        if let Some(why) = self.yields(Group::Gpu, pinned) {
            self.release_gpu(&folder)?;
            let nodes = self.nodes.as_ref();
            say((number(nodes, &low), number(nodes, &high)), Some(why));
            return Ok(());
        }
        let target_high = cap.map_or(start_high, |c| round_down(&table, c)).min(start_high);
        let target_low = floor.map_or(start_low, |f| round_up(&table, f)).max(start_low).min(target_high);
        let got = self.set_gpu(&folder, (target_low, target_high))?;
        say(got, None);
        Ok(())
    }

    /// Sets both bounds of the GPU's clock: never a floor above the ceiling in between.
    fn set_gpu(&mut self, folder: &str, target: (u64, u64)) -> Result<(Option<u64>, Option<u64>)> {
        let (low, high) = (format!("{folder}/min_freq"), format!("{folder}/max_freq"));
        let now_high: Option<u64> = number(self.nodes.as_ref(), &high);
        let raises = now_high.is_some_and(|now| target.1 >= now);
        if raises {
            self.hold(&high, target.1, &[])?;
            self.hold(&low, target.0, &[])?;
        } else {
            self.hold(&low, target.0, &[])?;
            self.hold(&high, target.1, &[])?;
        }
        // What equals its start is not ours to hold.
        for (node, value) in [(&low, target.0), (&high, target.1)] {
            if self.ledger.entry(node).is_some_and(|e| e.old == value.to_string() && e.now == e.old) {
                self.ledger.rest(node, self.nodes.now_us());
            }
        }
        let nodes = self.nodes.as_ref();
        Ok((number(nodes, &low), number(nodes, &high)))
    }

    /// Puts the GPU's bounds back, in the order that the values ask for.
    fn release_gpu(&mut self, folder: &str) -> Result<()> {
        let (low, high) = (format!("{folder}/min_freq"), format!("{folder}/max_freq"));
        let old_high = self.ledger.entry(&high).and_then(|e| e.old.parse::<u64>().ok());
        let now_high: Option<u64> = number(self.nodes.as_ref(), &high);
        let raises = old_high.zip(now_high).is_some_and(|(old, now)| old >= now);
        let order = if raises { [&high, &low] } else { [&low, &high] };
        order.into_iter().try_for_each(|node| self.put_back(node))
    }

    /// Frequencies that the GPU can have, low to high.
    fn table(&self, folder: &str) -> Vec<u64> {
        let list = text(self.nodes.as_ref(), &format!("{folder}/available_frequencies")).unwrap_or_default();
        let mut table: Vec<u64> = list.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        table.sort_unstable();
        table
    }

    // ---- memory

    fn emc_cap(&mut self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        let Some(node) = self.found.emc_cap.clone() else {
            if let Some(asked_hz) = self.want.emc_cap_hz {
                let note = Some("this board has no knob for it".into());
                outcomes.push(Outcome { knob: "memory cap".into(), asked_hz, got_hz: None, note });
            }
            return Ok(());
        };
        let Some(asked_hz) = self.want.emc_cap_hz else { return self.put_back(&node) };
        // A cap of the power mode stays; where there is none the node says 0 or a number beyond all rates.
        let start = match self.ledger.entry(&node) {
            Some(entry) => entry.old.parse::<i64>().ok(),
            None => number(self.nodes.as_ref(), &node),
        };
        let mode = start.and_then(super::sensors::emc_cap).unwrap_or(u64::MAX);
        let target = asked_hz.min(mode);
        let got = self.hold(
            &node,
            target,
            &[round_down(&EMC_POINTS_HZ, target), round_up(&EMC_POINTS_HZ, target)],
        )?;
        let note = why(got, asked_hz);
        outcomes.push(Outcome { knob: "memory cap".into(), asked_hz, got_hz: got, note });
        Ok(())
    }

    fn emc_floor(&mut self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        let (lock, rate) = (format!("{EMC}/mrq_rate_locked"), format!("{EMC}/rate"));
        let Some(asked_hz) = self.want.emc_floor_hz else { return self.release_emc_lock() };
        let outcome = |got_hz, note| Outcome { knob: "memory floor".into(), asked_hz, got_hz, note };
        let nodes = self.nodes.clone();
        let locked: Option<u8> = number(nodes.as_ref(), &lock);
        let Some(locked) = locked.filter(|_| self.nvidia.is_none()) else {
            let note = "the memory clock cannot be locked here (no debugfs, or no right)";
            outcomes.push(outcome(None, Some(note.to_owned())));
            return Ok(());
        };
        let theirs = locked != 0 && self.ledger.entry(&lock).is_none();
        if let Some(why) = self.yields(Group::Emc, theirs) {
            self.release_emc_lock()?;
            outcomes.push(outcome(number(nodes.as_ref(), &rate), Some(why)));
            return Ok(());
        }
        let cap = number(nodes.as_ref(), self.found.emc_cap.as_deref().unwrap_or_default());
        let cap = cap.and_then(super::sensors::emc_cap).unwrap_or(u64::MAX);
        let target = round_up(&EMC_POINTS_HZ, asked_hz.min(cap));
        // The lock holds whatever rate there is, so that one is ours from now on too, should we die before the next write.
        let there: Option<u64> = number(nodes.as_ref(), &rate);
        // The rate moves by itself while it is not locked, and is not put back: any that was is as good a start.
        let start = self.ledger.entries().iter().find(|e| e.node == rate).map(|e| e.old.clone());
        self.ledger.intend(
            &rate,
            &start.unwrap_or_else(|| text(nodes.as_ref(), &rate).unwrap_or_default()),
            &target.to_string(),
            &there.map_or(Vec::new(), |r| vec![r.to_string()]),
        )?;
        self.hold(&lock, 1, &[])?;
        let held: Option<u64> = number(nodes.as_ref(), &rate);
        if let Some(held) = held.filter(|h| Some(*h) != there) {
            self.ledger.became(&rate, &held.to_string())?;
        }
        let got = self.hold(&rate, target, &[])?;
        if let Some(got) = got {
            self.ledger.became(&rate, &got.to_string())?;
        }
        // Firmware that pins the clock takes the lock and changes nothing: only reading back tells.
        outcomes.push(outcome(got, why(got, asked_hz)));
        Ok(())
    }

    /// Unlocks the memory's clock, if the lock is ours: it locks, and at a rate of ours. The rate itself is the governor's
    /// again from then on.
    fn release_emc_lock(&mut self) -> Result<()> {
        let (lock, rate) = (format!("{EMC}/mrq_rate_locked"), format!("{EMC}/rate"));
        if self.ledger.entry(&lock).is_none() {
            self.ledger.rest(&rate, self.nodes.now_us());
            return Ok(());
        }
        let ours = self.ledger.entry(&rate).is_none_or(|e| e.is_ours(self.nodes.as_ref()));
        match ours {
            true => self.put_back(&lock)?,
            false => self.ledger.forget(&lock)?,
        }
        if self.ledger.entry(&lock).is_none() {
            self.ledger.rest(&rate, self.nodes.now_us());
        }
        Ok(())
    }

    // ---- a discrete GPU

    fn gpu_nvml(&mut self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        let nvidia = self.nvidia.as_ref().expect("the caller saw it");
        let want = self.want;
        let mut failed = None;
        if want.gpu_cap_hz.is_some() || want.gpu_floor_hz.is_some() {
            self.ledger.intend(NVML_GPU, "0", "1", &[])?;
            let table = nvidia.clocks_hz();
            let (lowest, highest) = (table.first().copied().unwrap_or(0), table.last().copied().unwrap_or(0));
            let high = want.gpu_cap_hz.unwrap_or(highest);
            let locked = nvidia.lock_gpu(want.gpu_floor_hz.unwrap_or(lowest).min(high), high);
            let got = locked.as_ref().ok().and_then(|l| l.got_hz);
            failed = locked.err();
            for (knob, asked) in [("gpu cap", want.gpu_cap_hz), ("gpu floor", want.gpu_floor_hz)] {
                let Some(asked_hz) = asked else { continue };
                // The clock right now is below a cap when the GPU rests, so only a refusal is worth a note.
                let note = failed.as_ref().map(ToString::to_string);
                let got_hz = got.filter(|_| note.is_none());
                outcomes.push(Outcome { knob: knob.into(), asked_hz, got_hz, note });
            }
        }
        if failed.is_some() || want.gpu_cap_hz.is_none() && want.gpu_floor_hz.is_none() {
            self.release_nvml()?;
        }
        Ok(())
    }

    /// Resets the locks of a discrete GPU. They cannot be read back, so that ours and another's look the same: they are
    /// reset only if the ledger says that we set some.
    fn release_nvml(&mut self) -> Result<()> {
        let Some(nvidia) = &self.nvidia else { return Ok(()) };
        for (entry, unlock) in [
            (NVML_GPU, Nvidia::unlock_gpu as fn(&Nvidia) -> Result<()>),
            (NVML_MEMORY, Nvidia::unlock_memory as fn(&Nvidia) -> Result<()>),
        ] {
            if self.ledger.entry(entry).is_some() {
                if let Err(e) = unlock(nvidia) {
                    log::warn!("{e}");
                }
                self.ledger.forget(entry)?;
            }
        }
        Ok(())
    }
}

/// What a node says once it says something else than `before`, or has had the time to.
fn settled(nodes: &dyn Nodes, node: &str, before: &str) -> Option<String> {
    let mut got = text(nodes, node);
    for _ in 0..SETTLE_READS {
        if got.as_deref() != Some(before) {
            break;
        }
        nodes.sleep(SETTLE_EVERY_US);
        got = text(nodes, node);
    }
    got
}

/// Why a value is not the one asked for.
fn why(got: Option<u64>, asked_hz: u64) -> Option<String> {
    match got {
        None => Some("the node is not there".into()),
        Some(got) if got == asked_hz => None,
        Some(got) if got.abs_diff(asked_hz) < asked_hz / 10 => {
            Some("rounded to what the clock can have".into())
        }
        Some(_) => Some("a limit of the power mode, the board's table or the firmware".into()),
    }
}

/// The highest entry of a table that is not above `hz`; the lowest if all are.
pub fn round_down(table: &[u64], hz: u64) -> u64 {
    table.iter().copied().filter(|t| *t <= hz).max().or(table.iter().copied().min()).unwrap_or(hz)
}

/// The lowest entry of a table that is not below `hz`; the highest if all are.
pub fn round_up(table: &[u64], hz: u64) -> u64 {
    table.iter().copied().filter(|t| *t >= hz).min().or(table.iter().copied().max()).unwrap_or(hz)
}

#[test]
fn rates_round_to_the_table() {
    let t = [306, 408, 510];
    assert_eq!(
        [round_down(&t, 450), round_down(&t, 100), round_down(&t, 900), round_down(&[], 7)],
        [408, 306, 510, 7]
    );
    assert_eq!(
        [round_up(&t, 450), round_up(&t, 100), round_up(&t, 900), round_up(&[], 7)],
        [510, 306, 510, 7]
    );
}
