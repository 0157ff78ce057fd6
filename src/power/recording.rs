//! A recording of a board's samples as a CSV file: one line a sample, so that any program reads it, and `report`
//! draws it.
//!
//! Lines that begin with `#` tell what it is; then the names of the columns, units included; an empty cell is a value
//! that the board did not tell. Rails and zones have a column each, as `rail NAME W` and `zone NAME C`, fixed by the
//! first sample.

use std::fmt::Write as _;
use std::path::Path;

use super::types::{Phase, Sample};
use crate::limits::{RECORDING_BYTES_MAX, RECORDING_COLUMNS_MAX};
use crate::units::{Error, Result, one_line};

/// First line of a file, and its version.
const MAGIC: &str = "# tegu power recording 1";

/// Columns that every recording has.
const COLUMNS: [&str; 16] = [
    "time s",
    "phase",
    "total W",
    "gpu MHz",
    "gpu max MHz",
    "emc MHz",
    "gpu load %",
    "fan %",
    "memory used MiB",
    "oc1",
    "oc2",
    "oc3",
    "throttle",
    "faults",
    "tokens",
    "note",
];

/// One moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Moment {
    /// Seconds since the start.
    pub at_s: f64,
    /// What was going on, where it is known.
    pub phase: Option<Phase>,
    /// Power of the module.
    pub total_w: Option<f64>,
    /// GPU clock.
    pub gpu_mhz: Option<f64>,
    /// Its ceiling.
    pub gpu_max_mhz: Option<f64>,
    /// Memory clock.
    pub emc_mhz: Option<f64>,
    /// How busy the GPU is.
    pub load_percent: Option<f64>,
    /// The fan's drive.
    pub fan_percent: Option<f64>,
    /// Memory in use.
    pub memory_mib: Option<f64>,
    /// Over-current events since boot.
    pub oc: [Option<f64>; 3],
    /// Cooling devices of the kernel at work.
    pub throttle: String,
    /// Sensors that could not be trusted.
    pub faults: String,
    /// Tokens generated since the start, where they are known.
    pub tokens: Option<f64>,
    /// What the governor took, in words.
    pub note: String,
    /// Power by rail, in the order of [`Recording::rails`].
    pub rails_w: Vec<Option<f64>>,
    /// Temperature by zone, in the order of [`Recording::zones`].
    pub zones_c: Vec<Option<f64>>,
}

impl Moment {
    /// The hottest zone.
    pub fn hottest_c(&self) -> Option<f64> {
        self.zones_c.iter().flatten().copied().reduce(f64::max)
    }
}

/// A recording.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Recording {
    /// Facts about it: board, profile, mode.
    pub facts: Vec<(String, String)>,
    /// Rails' labels.
    pub rails: Vec<String>,
    /// Zones' types.
    pub zones: Vec<String>,
    /// Its moments, in order.
    pub moments: Vec<Moment>,
}

/// Writes lines of a recording, one sample at a time.
#[derive(Debug)]
pub struct Writer {
    facts: Vec<(String, String)>,
    began_us: Option<u64>,
    rails: Vec<String>,
    zones: Vec<String>,
}

impl Writer {
    /// A recording with facts about it.
    pub fn new(facts: &[(&str, String)]) -> Writer {
        let facts = facts.iter().map(|(k, v)| (k.to_string(), one_line(v))).collect();
        Writer { facts, began_us: None, rails: Vec::new(), zones: Vec::new() }
    }

    /// The lines of a sample: before the first, the head.
    pub fn line(&mut self, sample: &Sample, phase: Option<Phase>, tokens: Option<u64>, note: &str) -> String {
        let mut text = String::new();
        let began_us = match self.began_us {
            Some(began_us) => began_us,
            None => {
                self.rails = sample.rails.iter().map(|r| r.label.clone()).collect();
                self.zones = sample.zones.iter().map(|z| z.kind.clone()).collect();
                text += &self.head();
                *self.began_us.insert(sample.at_us)
            }
        };
        let milli = |v: Option<u32>| v.map(|mw| format!("{:.3}", mw as f64 / 1e3)).unwrap_or_default();
        let mhz = |v: Option<u64>| v.map(|hz| format!("{}", hz as f64 / 1e6)).unwrap_or_default();
        let count = |v: Option<u64>| v.map(|n| n.to_string()).unwrap_or_default();
        // Cells hold words of the system's: a comma would end the cell.
        let words = |list: Vec<String>| one_line(&list.join(" ")).replace([',', '"'], ";");
        let memory = sample.memory.map(|m| (m.total_bytes.saturating_sub(m.available_bytes)) >> 20);
        let fan = sample.fan.and_then(|f| f.pwm).map(|pwm| format!("{:.0}", pwm as f64 / 2.55));
        let faults = sample.faults.iter().map(|f| format!("{} {:?}", f.sensor, f.fault).to_lowercase());
        let cells = [
            format!("{:.3}", sample.at_us.saturating_sub(began_us) as f64 / 1e6),
            phase.map_or("", Phase::name).to_owned(),
            milli(sample.total_mw),
            mhz(sample.gpu_hz),
            mhz(sample.gpu_max_hz),
            mhz(sample.emc_hz),
            sample.gpu_load_permille.map(|l| format!("{:.1}", l as f64 / 10.0)).unwrap_or_default(),
            fan.unwrap_or_default(),
            count(memory),
            count(sample.throttle.oc_counts[0]),
            count(sample.throttle.oc_counts[1]),
            count(sample.throttle.oc_counts[2]),
            words(sample.throttle.active.clone()),
            words(faults.collect()),
            count(tokens),
            words(vec![note.to_owned()]),
        ];
        text += &cells.join(",");
        for label in &self.rails {
            write!(text, ",{}", milli(sample.rail_mw(label))).expect("a string takes it");
        }
        for kind in &self.zones {
            let zone = sample.zones.iter().find(|z| z.kind == *kind);
            let cell = zone.map(|z| format!("{:.3}", z.temp_mc as f64 / 1e3)).unwrap_or_default();
            write!(text, ",{cell}").expect("a string takes it");
        }
        text.push('\n');
        text
    }

    fn head(&self) -> String {
        let facts: String = self.facts.iter().map(|(k, v)| format!("# {k}: {v}\n")).collect();
        let name = |s: &str| s.replace([',', '"'], ";");
        let rails = self.rails.iter().map(|r| format!("rail {} W", name(r)));
        let zones = self.zones.iter().map(|z| format!("zone {} C", name(z)));
        let columns: Vec<String> = COLUMNS.iter().map(|c| c.to_string()).chain(rails).chain(zones).collect();
        format!("{MAGIC}\n{facts}{}\n", columns.join(","))
    }
}

impl Recording {
    /// Reads a file.
    pub fn read(file: &Path) -> Result<Recording> {
        use std::io::Read;
        let mut text = String::new();
        let opened = crate::units::open_file(file)?;
        let read = opened.take(RECORDING_BYTES_MAX + 1).read_to_string(&mut text);
        read.map_err(|e| Error::io(file, "read", e))?;
        if text.len() as u64 > RECORDING_BYTES_MAX {
            return Err(Error::bad(file, "size", format!("at most {RECORDING_BYTES_MAX} bytes"), "more"));
        }
        Recording::parse(file, &text)
    }

    /// Reads a file's text. A last line that was cut off is left out.
    pub fn parse(file: &Path, text: &str) -> Result<Recording> {
        let bad = |line: usize, expected: &str, found: &str| {
            Err(Error::bad(file, format!("line {}", line + 1), expected, format!("{found:?}")))
        };
        let mut lines = text.lines().enumerate().peekable();
        match lines.next() {
            Some((_, MAGIC)) => {}
            other => return bad(0, MAGIC, other.map_or("", |(_, l)| l)),
        }
        let mut recording = Recording::default();
        while let Some((_, line)) = lines.next_if(|(_, l)| l.starts_with('#')) {
            let fact = line.trim_start_matches('#').trim();
            let (key, value) = fact.split_once(": ").unwrap_or((fact, ""));
            if recording.facts.len() < RECORDING_COLUMNS_MAX {
                recording.facts.push((one_line(key), one_line(value)));
            }
        }
        let Some((at, head)) = lines.next() else { return bad(1, "the names of the columns", "nothing") };
        let columns: Vec<&str> = head.split(',').collect();
        if columns.len() < COLUMNS.len() || columns[..COLUMNS.len()] != COLUMNS {
            return bad(at, &format!("columns {}", COLUMNS.join(",")), &one_line(head));
        }
        if columns.len() > RECORDING_COLUMNS_MAX {
            return bad(at, &format!("at most {RECORDING_COLUMNS_MAX} columns"), &columns.len().to_string());
        }
        for name in &columns[COLUMNS.len()..] {
            let rail = name.strip_prefix("rail ").and_then(|n| n.strip_suffix(" W"));
            let zone = name.strip_prefix("zone ").and_then(|n| n.strip_suffix(" C"));
            match (rail, zone) {
                // Zones follow rails, so that a cell's place tells what it is.
                (Some(rail), _) if recording.zones.is_empty() => recording.rails.push(one_line(rail)),
                (_, Some(zone)) => recording.zones.push(one_line(zone)),
                _ => return bad(at, "rail NAME W, then zone NAME C", name),
            }
        }
        let is_whole = text.ends_with('\n');
        while let Some((at, line)) = lines.next() {
            let is_last = lines.peek().is_none();
            match recording.moment(line) {
                Ok(moment) => {
                    let before = recording.moments.last().map_or(0.0, |m| m.at_s);
                    if moment.at_s < before {
                        return bad(at, &format!("a time from {before} s on"), &moment.at_s.to_string());
                    }
                    recording.moments.push(moment);
                }
                Err(_) if is_last && !is_whole => break,
                Err((expected, found)) => return bad(at, &expected, &found),
            }
        }
        Ok(recording)
    }

    fn moment(&self, line: &str) -> std::result::Result<Moment, (String, String)> {
        let cells: Vec<&str> = line.split(',').take(RECORDING_COLUMNS_MAX + 1).collect();
        let width = COLUMNS.len() + self.rails.len() + self.zones.len();
        if cells.len() != width {
            return Err((format!("{width} cells"), cells.len().to_string()));
        }
        let real = |n: usize| -> std::result::Result<Option<f64>, (String, String)> {
            if cells[n].is_empty() {
                return Ok(None);
            }
            let value = cells[n].parse::<f64>().ok().filter(|x| x.is_finite() && x.abs() < 1e12);
            value.map(Some).ok_or_else(|| ("a number".into(), one_line(cells[n])))
        };
        let phase = match cells[1] {
            "" => None,
            name => {
                let known = Phase::ALL.into_iter().find(|p| p.name() == name);
                Some(known.ok_or_else(|| ("prefill, decode or idle".to_owned(), one_line(name)))?)
            }
        };
        let reals =
            |from: usize, n: usize| (from..from + n).map(real).collect::<std::result::Result<Vec<_>, _>>();
        let at_s = real(0)?.filter(|t| *t >= 0.0).ok_or(("a time".to_owned(), one_line(cells[0])))?;
        Ok(Moment {
            at_s,
            phase,
            total_w: real(2)?,
            gpu_mhz: real(3)?,
            gpu_max_mhz: real(4)?,
            emc_mhz: real(5)?,
            load_percent: real(6)?,
            fan_percent: real(7)?,
            memory_mib: real(8)?,
            oc: [real(9)?, real(10)?, real(11)?],
            throttle: one_line(cells[12]),
            faults: one_line(cells[13]),
            tokens: real(14)?,
            note: one_line(cells[15]),
            rails_w: reals(COLUMNS.len(), self.rails.len())?,
            zones_c: reals(COLUMNS.len() + self.rails.len(), self.zones.len())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::types::{Fault, Rail, SensorFault, Zone};
    use super::*;

    fn sample(at_us: u64, mw: u32) -> Sample {
        Sample {
            at_us,
            rails: vec![Rail { label: "VDD_IN".into(), power_mw: mw, volt_mv: None }],
            total_mw: Some(mw),
            zones: vec![Zone { kind: "tj-thermal".into(), temp_mc: 51_250 }],
            gpu_hz: Some(1_020_000_000),
            emc_hz: Some(665_600_000),
            ..Sample::default()
        }
    }

    fn recorded() -> String {
        let mut writer = Writer::new(&[("board", "sim, \"x\"\nnext".into())]);
        let mut second = sample(1_500_000, 9_876);
        second.zones.clear();
        second.faults.push(SensorFault { sensor: "tj-thermal".into(), fault: Fault::Missing });
        writer.line(&sample(1_000_000, 5_000), Some(Phase::Idle), Some(0), "")
            + &writer.line(&second, Some(Phase::Decode), Some(17), "heat: 1, more")
    }

    #[test]
    fn what_is_written_is_read_back() {
        let text = recorded();
        let recording = Recording::parse(Path::new("r.csv"), &text).unwrap();
        assert_eq!(recording.facts[0].0, "board");
        let [a, b] = &recording.moments[..] else { panic!("{recording:?}") };
        assert_eq!((a.at_s, a.total_w, a.phase), (0.0, Some(5.0), Some(Phase::Idle)));
        assert_eq!((a.emc_mhz, a.hottest_c(), a.rails_w[0]), (Some(665.6), Some(51.25), Some(5.0)));
        assert_eq!((b.at_s, b.tokens, b.hottest_c()), (0.5, Some(17.0), None));
        assert_eq!((b.faults.as_str(), b.note.as_str()), ("tj-thermal missing", "heat: 1; more"));
        // A recording that was cut off, as by an empty battery, is good up to there.
        let cut = Recording::parse(Path::new("r.csv"), &text[..text.len() - 5]).unwrap();
        assert_eq!(cut.moments.len(), 1);
    }

    #[test]
    fn what_is_no_recording_is_refused_by_its_line() {
        let good = recorded();
        let cases = [
            (String::new(), "line 1"),
            ("time s,total W\n".into(), "line 1"),
            (MAGIC.to_owned() + "\n", "line 2"),
            (good.replace("total W", "total mW"), "line 3"),
            (good.replace("5.000", "many"), "line 4"),
            (good.replace("decode", "sleep"), "prefill, decode or idle"),
            (good.replace("0.500,", "-1,"), "a time"),
            (good.clone() + "1,2,3\n", "18 cells"),
            (good.replace("rail VDD_IN W", "VDD_IN"), "rail NAME W"),
            (good.replace("9.876", "inf"), "a number"),
            (good.clone() + &good[good.find("0.000,").unwrap()..], "a time from 0.5 s on"),
        ];
        for (text, hint) in cases {
            let error = Recording::parse(Path::new("r.csv"), &text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }
}
