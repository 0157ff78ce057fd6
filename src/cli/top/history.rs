//! What the screen remembers: a line of past values for each rail and for what has no rail, and the counts that rates are
//! taken from.

use std::collections::{BTreeMap, VecDeque};

use crate::power::status::{Served, Status};

/// Values kept of each: what the widest screen shows.
const KEPT: usize = 512;

/// Tokens a second, between two looks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rates {
    /// Prompt tokens read.
    pub prefill: f64,
    /// Tokens generated.
    pub decode: f64,
    /// Joules a generated token while decoding; none where nothing measures or nothing was generated.
    pub decode_j: Option<f64>,
}

/// Past values.
#[derive(Debug, Default)]
pub struct History {
    lines: BTreeMap<String, VecDeque<u32>>,
    last: Option<(Served, u64)>,
    rates: Option<Rates>,
}

/// The line of the module's power.
pub const TOTAL: &str = "total";
/// The line of the hottest zone, in degrees.
pub const HOTTEST: &str = "hottest";
/// The line of generated tokens a second.
pub const DECODE: &str = "decode";

impl History {
    /// Takes a new status.
    pub fn take(&mut self, status: &Status) {
        let sample = &status.sample;
        for rail in &sample.rails {
            self.add(&rail.label, rail.power_mw);
        }
        if let Some(mw) = sample.total_mw {
            self.add(TOTAL, mw);
        }
        if let Some(mc) = sample.hottest_mc() {
            self.add(HOTTEST, (mc / 1000).max(0) as u32);
        }
        let decode_mj = status.energy.iter().find(|e| e.phase.name() == "decode").map_or(0, |e| e.energy_mj);
        let Some(now) = &status.served else {
            (self.last, self.rates) = (None, None);
            return;
        };
        if let Some((before, mj_before)) = &self.last {
            match rates(before, now, decode_mj.saturating_sub(*mj_before)) {
                Some(rates) => self.rates = Some(rates),
                // The same moment seen twice says nothing new.
                None => return,
            }
        }
        if let Some(rates) = self.rates {
            self.add(DECODE, rates.decode.round() as u32);
        }
        self.last = Some((now.clone(), decode_mj));
    }

    fn add(&mut self, line: &str, value: u32) {
        let values = self.lines.entry(line.to_owned()).or_default();
        if values.len() == KEPT {
            values.pop_front();
        }
        values.push_back(value);
    }

    /// The newest `most` values, the newest last.
    pub fn values(&self, line: &str, most: usize) -> Vec<u32> {
        let values = self.lines.get(line);
        values.map_or(Vec::new(), |v| v.iter().skip(v.len().saturating_sub(most)).copied().collect())
    }

    /// Rates between the last two looks.
    pub fn rates(&self) -> Option<Rates> {
        self.rates
    }
}

/// None where no time passed. A daemon that was started again counts from nothing.
fn rates(before: &Served, now: &Served, decode_mj: u64) -> Option<Rates> {
    let seconds = now.uptime_us.checked_sub(before.uptime_us).map(|us| us as f64 / 1e6);
    if seconds == Some(0.0) {
        return None;
    }
    let (Some(seconds), Some(read), Some(made)) = (
        seconds,
        now.prefill_tokens.checked_sub(before.prefill_tokens),
        now.generated_tokens.checked_sub(before.generated_tokens),
    ) else {
        return Some(Rates::default());
    };
    let decode_j = (made > 0 && decode_mj > 0).then(|| decode_mj as f64 / 1e3 / made as f64);
    Some(Rates { prefill: read as f64 / seconds, decode: made as f64 / seconds, decode_j })
}

#[test]
fn rates_are_between_two_looks() {
    let at = |uptime_us, prefill_tokens, generated_tokens| Status {
        served: Some(Served { uptime_us, prefill_tokens, generated_tokens, ..Served::default() }),
        ..Status::default()
    };
    let mut history = History::default();
    history.take(&at(1_000_000, 10, 10));
    assert_eq!(history.rates(), None);
    history.take(&at(3_000_000, 30, 20));
    assert_eq!(history.rates(), Some(Rates { prefill: 10.0, decode: 5.0, decode_j: None }));
    history.take(&at(3_000_000, 30, 20));
    assert_eq!(history.values(DECODE, 9), [5]);
    // Started again.
    history.take(&at(1_000, 0, 0));
    assert_eq!(history.rates(), Some(Rates::default()));
    for n in 0..2 * KEPT as u64 {
        history.take(&at(1_000 + 1_000_000 * (n + 1), 0, n));
    }
    assert_eq!(history.values(DECODE, usize::MAX).len(), KEPT);
    assert_eq!(history.values(DECODE, 3), [1, 1, 1]);
}
