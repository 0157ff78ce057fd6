//! Whether a reading can be believed. A thermal policy that trusts a stuck or broken sensor is worse than none, so what
//! fails here is left out of the sample and named in its faults.

use super::types::{Fault, SensorFault};
use std::collections::BTreeMap;

/// Temperatures that a board can have and live, in m°C. The kernel shuts Orin down at 104.5 °C; a block that is off
/// answers -256 °C on some releases.
const TEMP_MC: std::ops::RangeInclusive<i64> = -40_000..=130_000;
/// Power of one rail, in mW: a discrete GPU draws most.
const POWER_MW: std::ops::RangeInclusive<i64> = 0..=2_000_000;
/// A Jetson module's rail: Thor's whole board takes 130 W.
const MODULE_MW: std::ops::RangeInclusive<i64> = 0..=200_000;

/// A die moves some 10 °C at once when load starts; this much between two readings is no physics …
const JUMP_MC: i64 = 30_000;
/// … unless readings are this far apart …
const JUMP_WITHIN_US: u64 = 5_000_000;
/// … or the sensor insists so many times.
const JUMPS_MAX: u32 = 3;

/// A zone that stands still to its last digit for so long …
const STILL_US: u64 = 30_000_000;
/// … and so many readings …
const STILL_READS: u32 = 10;
/// … while another zone moved by this much, is stuck.
const OTHERS_MOVED_MC: i64 = 3_000;
/// A zone of the die needs less proof, for it moves by its last digit under any load: it is stuck when it stands still for
/// so long …
const DIE_STILL_US: u64 = 20_000_000;
/// … while the board's power moved by this much, …
const POWER_MOVED_MW: i64 = 3_000;
/// … or while the GPU worked all the time, at no less than this.
const WORKS_PERMILLE: u16 = 300;
/// Zones that give whole or half degrees can stand still under load.
const COARSE_MC: i64 = 500;
/// As much for an input rail, whose own parts moved. Other rails may stand still: at 19 V a meter's step is 0.4 W.
const PARTS_MOVED_MW: i64 = 2_000;

/// What kind of number a sensor gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Thousandths of a degree.
    Temperature,
    /// Milliwatts of a module's rail.
    Module,
    /// Milliwatts of the rail that feeds all others of a module.
    Input,
    /// Milliwatts of a whole GPU board.
    Board,
}

#[derive(Debug, Clone)]
struct History {
    unit: Unit,
    value: i64,
    at_us: u64,
    /// Since when the value is what it is, and how often it was read so.
    still_since_us: u64,
    still_reads: u32,
    /// Jumps in a row that were not believed.
    jumps: u32,
    /// It gave no answer when it was last asked.
    gone: bool,
    /// It has told parts of [`COARSE_MC`].
    is_fine: bool,
    trail: Trail,
}

/// Readings a second apart: whether this one moved while another stood still.
#[derive(Debug, Clone, Default)]
struct Trail(Vec<(u64, i64)>);

impl Trail {
    fn add(&mut self, at_us: u64, value: i64) {
        if self.0.last().is_none_or(|(t, _)| at_us.saturating_sub(*t) >= TRAIL_EVERY_US) {
            if self.0.len() == TRAIL_MAX {
                self.0.remove(0);
            }
            self.0.push((at_us, value));
        }
    }

    /// How far apart its readings since then are; none where there are none.
    fn moved(&self, since_us: u64) -> Option<i64> {
        let values = || self.0.iter().filter(|(t, _)| *t >= since_us).map(|(_, v)| *v);
        Some(values().max()? - values().min()?)
    }
}

/// Remembers every sensor's last readings.
#[derive(Debug, Clone, Default)]
pub struct Sanity {
    seen: BTreeMap<String, History>,
    faults: Vec<SensorFault>,
    /// The board's power.
    power: Trail,
    /// How busy the GPU is, and since when it works without a break.
    load: Trail,
    works_since_us: Option<u64>,
}

/// Whether a zone lies on the die, where heat follows power at once. The other zones may rest or be far away.
pub fn is_die(zone: &str) -> bool {
    ["tj", "gpu", "cpu"].iter().any(|start| zone.starts_with(start))
}

/// Readings kept of a sensor to see how much it moved: one a second for as long as stillness takes, and some.
const TRAIL_MAX: usize = 64;
/// Spacing of them.
const TRAIL_EVERY_US: u64 = 1_000_000;

impl Sanity {
    /// The faults since the last call, for the sample.
    pub fn take_faults(&mut self) -> Vec<SensorFault> {
        std::mem::take(&mut self.faults)
    }

    /// Notes a fault.
    pub fn fault(&mut self, sensor: &str, fault: Fault) {
        let fault = SensorFault { sensor: sensor.to_owned(), fault };
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }

    /// What the board as a whole did: by that a temperature that does not follow is known.
    pub fn witness(&mut self, at_us: u64, total_mw: Option<u32>, load_permille: Option<u16>) {
        if let Some(mw) = total_mw {
            self.power.add(at_us, i64::from(mw));
        }
        if let Some(load) = load_permille {
            self.load.add(at_us, i64::from(load));
        }
        match load_permille {
            Some(load) if load >= WORKS_PERMILLE => drop(self.works_since_us.get_or_insert(at_us)),
            _ => self.works_since_us = None,
        }
    }

    /// A reading of a sensor, or that it gave none. `may_rest`: giving none is normal for it, as for a block that is off.
    /// Returns what can be believed of it.
    pub fn check(
        &mut self,
        sensor: &str,
        unit: Unit,
        at_us: u64,
        reading: Option<i64>,
        may_rest: bool,
    ) -> Option<i64> {
        let Some(value) = reading else {
            // A sensor that never answered is one that the board lacks.
            if let Some(h) = self.seen.get_mut(sensor) {
                h.gone = true;
                if !may_rest {
                    self.fault(sensor, Fault::Missing);
                }
            }
            return None;
        };
        let range = match unit {
            Unit::Temperature => TEMP_MC,
            Unit::Module | Unit::Input => MODULE_MW,
            Unit::Board => POWER_MW,
        };
        if !range.contains(&value) || self.jumps(sensor, unit, at_us, value) {
            self.fault(sensor, Fault::Absurd);
            return None;
        }
        self.remember(sensor, unit, at_us, value);
        if self.is_stuck(sensor, at_us) {
            self.fault(sensor, Fault::Frozen);
            return None;
        }
        Some(value)
    }

    /// Whether a temperature moved faster than heat does. One that keeps to its new value is believed in the end.
    fn jumps(&mut self, sensor: &str, unit: Unit, at_us: u64, value: i64) -> bool {
        let Some(h) = self.seen.get_mut(sensor).filter(|h| h.unit == unit && !h.gone) else { return false };
        let soon = at_us.saturating_sub(h.at_us) < JUMP_WITHIN_US;
        if unit != Unit::Temperature || !soon || (value - h.value).abs() <= JUMP_MC || h.jumps >= JUMPS_MAX {
            h.jumps = 0;
            return false;
        }
        h.jumps += 1;
        true
    }

    fn remember(&mut self, sensor: &str, unit: Unit, at_us: u64, value: i64) {
        let fresh = || History {
            unit,
            value,
            at_us,
            still_since_us: at_us,
            still_reads: 0,
            jumps: 0,
            gone: false,
            is_fine: false,
            trail: Trail::default(),
        };
        let h = self.seen.entry(sensor.to_owned()).or_insert_with(fresh);
        if h.value != value || h.gone {
            (h.still_since_us, h.still_reads) = (at_us, 0);
        }
        (h.value, h.at_us, h.gone) = (value, at_us, false);
        h.still_reads += 1;
        h.is_fine |= value % COARSE_MC != 0;
        h.trail.add(at_us, value);
    }

    /// The one place that judges this: whether a reading stands still while others show that it cannot. Stillness alone
    /// proves nothing: an idle board in a quiet room is still, and a tree of plain files is.
    fn is_stuck(&self, sensor: &str, at_us: u64) -> bool {
        let Some(h) = self.seen.get(sensor) else { return false };
        let (witness, by) = match h.unit {
            Unit::Temperature => (Unit::Temperature, OTHERS_MOVED_MC),
            Unit::Input => (Unit::Module, PARTS_MOVED_MW),
            Unit::Module | Unit::Board => return false,
        };
        let still_us = at_us.saturating_sub(h.still_since_us);
        if h.still_reads < STILL_READS {
            return false;
        }
        if h.unit == Unit::Temperature && h.is_fine && is_die(sensor) && still_us >= DIE_STILL_US {
            let since = h.still_since_us;
            let power = self.power.moved(since);
            // Where not even the meter or the load moves by a digit, this is no board but a picture of one.
            let lives = power.is_some_and(|by| by > 0) || self.load.moved(since).is_some_and(|by| by > 0);
            let works = self.works_since_us.is_some_and(|t| at_us.saturating_sub(t) >= DIE_STILL_US);
            if power.is_some_and(|by| by >= POWER_MOVED_MW) || works && lives {
                return true;
            }
        }
        let mut others = self.seen.iter().filter(|(name, o)| *name != sensor && o.unit == witness);
        still_us >= STILL_US
            && others.any(|(_, o)| o.trail.moved(h.still_since_us).is_some_and(|moved| moved >= by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000;

    fn temp(s: &mut Sanity, name: &str, at_s: u64, mc: Option<i64>) -> Option<i64> {
        s.check(name, Unit::Temperature, at_s * S, mc, name.starts_with("cv"))
    }

    fn faults(s: &mut Sanity) -> Vec<(String, Fault)> {
        s.take_faults().into_iter().map(|f| (f.sensor, f.fault)).collect()
    }

    #[test]
    fn what_was_never_there_is_absent_and_what_was_is_missing() {
        let mut s = Sanity::default();
        assert_eq!(temp(&mut s, "tj-thermal", 0, None), None);
        assert_eq!(faults(&mut s), []);
        assert_eq!(temp(&mut s, "tj-thermal", 1, Some(50_000)), Some(50_000));
        assert_eq!(temp(&mut s, "cv0-thermal", 1, Some(50_000)), Some(50_000));
        temp(&mut s, "tj-thermal", 2, None);
        temp(&mut s, "cv0-thermal", 2, None);
        assert_eq!(faults(&mut s), [("tj-thermal".into(), Fault::Missing)]);
        // It comes back at another temperature, which is no jump: nobody knows what happened in between.
        assert_eq!(temp(&mut s, "tj-thermal", 3, Some(90_000)), Some(90_000));
        assert_eq!(faults(&mut s), []);
    }

    #[test]
    fn no_physics_is_absurd() {
        let mut s = Sanity::default();
        for bad in [-256_000, 131_000, i64::MAX, i64::MIN] {
            assert_eq!(temp(&mut s, "gpu-thermal", 0, Some(bad)), None);
            assert_eq!(faults(&mut s), [("gpu-thermal".into(), Fault::Absurd)]);
        }
        assert_eq!(s.check("VDD_IN", Unit::Module, 0, Some(201_000), false), None);
        assert_eq!(s.check("GPU", Unit::Board, 0, Some(700_000), false), Some(700_000));
        faults(&mut s);
        // A jump is doubted, then believed.
        temp(&mut s, "gpu-thermal", 1, Some(50_000));
        for at in 2..2 + u64::from(JUMPS_MAX) {
            assert_eq!(temp(&mut s, "gpu-thermal", at, Some(95_000)), None);
            assert_eq!(faults(&mut s), [("gpu-thermal".into(), Fault::Absurd)]);
        }
        assert_eq!(temp(&mut s, "gpu-thermal", 5, Some(95_000)), Some(95_000));
        assert_eq!(temp(&mut s, "gpu-thermal", 6, Some(94_000)), Some(94_000));
    }

    #[test]
    fn a_zone_that_stands_still_while_heat_moves_is_stuck() {
        let mut s = Sanity::default();
        // All still: an idle board.
        for at in 0..100 {
            assert!(temp(&mut s, "tj-thermal", at, Some(45_000)).is_some());
            assert!(temp(&mut s, "cpu-thermal", at, Some(44_000)).is_some());
        }
        // The CPU's zone warms by 4 °C and cools again; the junction's does not follow.
        for at in 100..110 {
            temp(&mut s, "cpu-thermal", at, Some(44_000 + (at as i64 - 99) * 400));
            temp(&mut s, "tj-thermal", at, Some(45_000));
        }
        assert!(faults(&mut s).contains(&("tj-thermal".into(), Fault::Frozen)));
        // It moves: it lives.
        assert_eq!(temp(&mut s, "tj-thermal", 111, Some(45_031)), Some(45_031));
        assert_eq!(faults(&mut s), []);
        // The input rail cannot stand still while a part of it moves; a part may while the input moves.
        for at in 0..40 {
            let part = 1_000 + at as i64 * 100;
            s.check("VDD_IN", Unit::Input, at * S, Some(9_000), false);
            s.check("VDD_CPU_GPU_CV", Unit::Module, at * S, Some(part), false);
            s.check("VDD_SOC", Unit::Module, at * S, Some(1_400), false);
        }
        assert_eq!(faults(&mut s), [("VDD_IN".into(), Fault::Frozen)]);
    }

    /// All zones stand still at a value; the board's power and load go as told. Whether that is a fault in the end.
    fn all_still(mc: i64, seconds: u64, mut board: impl FnMut(u64) -> (Option<u32>, Option<u16>)) -> bool {
        let mut s = Sanity::default();
        for at in 0..=seconds {
            let (mw, load) = board(at);
            s.witness(at * S, mw, load);
            temp(&mut s, "tj-thermal", at, Some(mc));
            temp(&mut s, "tboard", at, Some(mc - 9_000));
        }
        let told = faults(&mut s);
        assert!(told.is_empty() || told == [("tj-thermal".into(), Fault::Frozen)], "{told:?}");
        !told.is_empty()
    }

    #[test]
    fn a_die_that_does_not_follow_its_work_is_stuck() {
        let noise = |at: u64| 8_000 + (at % 3) as u32 * 40;
        // Work without a break, on a meter that is alive; and an idle board, which may stand still.
        assert!(all_still(60_031, 30, |at| (Some(noise(at)), Some(990))));
        assert!(!all_still(60_031, 19, |at| (Some(noise(at)), Some(990))), "too soon to tell");
        assert!(!all_still(60_031, 600, |at| (Some(noise(at)), Some(20))));
        assert!(!all_still(60_031, 600, |at| (Some(noise(at)), Some(if at % 15 == 0 { 0 } else { 990 }))));
        // Power moved, whatever the load says.
        assert!(all_still(60_031, 30, |at| (Some(if at < 10 { 5_000 } else { 15_000 }), None)));
        // No meter: the load moves.
        assert!(all_still(60_031, 30, |at| (None, Some(900 + (at % 7) as u16))));
        // A tree of plain files, where nothing moves; a sensor of whole degrees, under any load.
        assert!(!all_still(60_031, 600, |_| (Some(8_000), Some(990))));
        assert!(!all_still(60_000, 600, |at| (Some(noise(at) * (1 + at as u32 % 2)), Some(990))));
    }
}
