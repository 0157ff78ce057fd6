//! What a benchmark measured, as a table and as JSON.

use serde_json::{Value, json};

use super::out;
use crate::power::energy::Method;
use crate::units::Bytes;

/// What one case does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Prefill: a prompt's tokens, many rows a step.
    Prefill,
    /// Decode: one row a sequence and step.
    Decode,
}

/// One case: `tokens` new tokens for each of `batch` sequences that hold `depth` tokens already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// Prefill or decode.
    pub phase: Phase,
    /// New tokens a sequence.
    pub tokens: usize,
    /// Tokens in the cache before.
    pub depth: usize,
    /// Sequences.
    pub batch: usize,
}

impl Case {
    /// As llama-bench writes it: `pp512`, `tg128 @ d4096`; with more than one sequence also `x4`.
    pub fn name(&self) -> String {
        let phase = match self.phase {
            Phase::Prefill => "pp",
            Phase::Decode => "tg",
        };
        let batch = if self.batch > 1 { format!(" x{}", self.batch) } else { String::new() };
        let depth = if self.depth > 0 { format!(" @ d{}", self.depth) } else { String::new() };
        format!("{phase}{}{batch}{depth}", self.tokens)
    }
}

/// The cases asked for: prefill runs one sequence at a time, decode every batch size; 0 tokens leaves a phase out.
pub fn cases(pp: &[usize], tg: &[usize], depths: &[usize], batches: &[usize]) -> Vec<Case> {
    let mut all = Vec::new();
    for &depth in depths {
        let prefill = pp.iter().map(|&tokens| Case { phase: Phase::Prefill, tokens, depth, batch: 1 });
        all.extend(prefill);
        for &batch in batches {
            all.extend(tg.iter().map(|&tokens| Case { phase: Phase::Decode, tokens, depth, batch }));
        }
    }
    all.retain(|c| c.tokens > 0);
    all
}

/// A case and what its repetitions took.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The case.
    pub case: Case,
    /// Seconds of each repetition.
    pub seconds: Vec<f64>,
    /// Bytes a second that the threads read from memory beside each repetition of a decode test: the mean of before and
    /// after. Empty if not measured.
    pub roofs: Vec<f64>,
    /// Distinct (layer, expert) pairs that a decode step read, counted; 0 without experts, NaN if nobody counted.
    pub experts_a_step: f64,
    /// Bytes of weights that a decode step must read, with those experts.
    pub step_bytes: f64,
    /// Energy of a token, where something tells the power.
    pub joules_a_token: Option<f64>,
}

impl Measured {
    /// Tokens a second (over all sequences) of each repetition.
    pub fn rates(&self) -> Vec<f64> {
        let tokens = (self.case.tokens * self.case.batch) as f64;
        self.seconds.iter().map(|s| tokens / s).collect()
    }

    /// The median of [`Measured::rates`].
    fn rate(&self) -> f64 {
        spread(&self.rates()).1
    }

    /// Bytes of weights a second, each read once a step; `None` for prefill, and where the experts were not counted.
    fn bytes_a_second(&self) -> Option<f64> {
        let rate = self.rate() / self.case.batch as f64 * self.step_bytes;
        (self.case.phase == Phase::Decode && rate.is_finite()).then_some(rate)
    }

    /// Weight bytes a second over the roof beside them, the median of the repetitions.
    fn of_roof(&self) -> Option<f64> {
        let bytes = self.step_bytes * self.case.tokens as f64;
        let shares: Vec<f64> =
            self.seconds.iter().zip(&self.roofs).map(|(s, roof)| bytes / s / roof).collect();
        (!shares.is_empty() && bytes.is_finite()).then(|| spread(&shares).1)
    }
}

/// All that a run found.
pub struct Report<'a> {
    /// The cases, in order.
    pub measured: &'a [Measured],
    /// `(threads, bytes a second)` read from memory; the last with all threads, the median of all that stood beside tests.
    /// Empty if not measured.
    pub roofs: &'a [(usize, f64)],
    /// `VmHWM`: most memory held, model and all.
    pub peak_bytes: u64,
    /// Bytes of the model's files.
    pub file_bytes: u64,
    /// Bytes of the KV pages.
    pub kv_bytes: u64,
    /// Where the energy comes from.
    pub energy_method: Option<Method>,
}

impl Report<'_> {
    /// For batches above 1 where batch 1 of the same case was measured: tokens a second over its, and bytes a second over
    /// its. The second is the share of what reading the counted union of experts once a step allows.
    fn over_one(&self, m: &Measured) -> Option<(f64, f64)> {
        let one = Case { batch: 1, ..m.case };
        let one = self.measured.iter().find(|o| o.case == one).filter(|_| m.case.batch > 1)?;
        Some((m.rate() / one.rate(), m.bytes_a_second()? / one.bytes_a_second()?))
    }

    /// Memory held over the file and KV.
    fn peak_share(&self) -> f64 {
        self.peak_bytes as f64 / (self.file_bytes + self.kv_bytes) as f64
    }

    /// Adds everything to the JSON object.
    pub fn add_to(&self, object: &mut Value) {
        let roofs =
            self.roofs.iter().map(|(n, r)| json!({ "threads": n, "bytes_a_second": out::number(*r) }));
        object["file_bytes"] = self.file_bytes.into();
        object["kv_bytes"] = self.kv_bytes.into();
        object["peak_bytes"] = self.peak_bytes.into();
        object["peak_over_file_and_kv"] = out::number(self.peak_share());
        object["roofs"] = roofs.collect::<Vec<_>>().into();
        object["energy_method"] = self.energy_method.map_or(Value::Null, |m| m.text().into());
        object["results"] = self.measured.iter().map(|m| self.case_json(m)).collect::<Vec<_>>().into();
    }

    fn case_json(&self, m: &Measured) -> Value {
        let (min, median, max) = spread(&m.rates());
        let or_null = |x: Option<f64>| x.map_or(Value::Null, out::number);
        let decode = m.case.phase == Phase::Decode;
        json!({
            "test": m.case.name(),
            "phase": match m.case.phase { Phase::Prefill => "pp", Phase::Decode => "tg" },
            "tokens": m.case.tokens,
            "depth": m.case.depth,
            "batch": m.case.batch,
            "tok_s": { "min": min, "median": median, "max": max },
            "samples_tok_s": m.rates(),
            "experts_a_step": or_null(decode.then_some(m.experts_a_step)),
            "weights_bytes_a_step": or_null(decode.then_some(m.step_bytes)),
            "weights_gb_s": or_null(m.bytes_a_second().map(|b| b / 1e9)),
            "share_of_roof": or_null(m.of_roof()),
            "over_batch_1": or_null(self.over_one(m).map(|o| o.0)),
            "share_of_union": or_null(self.over_one(m).map(|o| o.1)),
            "joules_a_token": or_null(m.joules_a_token),
        })
    }

    /// The table for people, with the roof and the memory below.
    pub fn text(&self) -> String {
        let head =
            ["test", "tok/s", "min", "max", "weights GB/s", "of roof", "over x1", "of union", "J/token"];
        // Without a meter there is no column of dashes.
        let columns = if self.energy_method.is_some() { head.len() } else { head.len() - 1 };
        let percent = |x: Option<f64>| x.map_or("-".into(), |x| format!("{:.0}%", x * 100.0));
        let row = |m: &Measured| {
            let (min, median, max) = spread(&m.rates());
            let (over, union) = self.over_one(m).unzip();
            let mut cells = vec![
                m.case.name(),
                format!("{median:.1}"),
                format!("{min:.1}"),
                format!("{max:.1}"),
                m.bytes_a_second().map_or("-".into(), |x| format!("{:.1}", x / 1e9)),
                percent(m.of_roof()),
                over.map_or("-".into(), |x| format!("{x:.2}")),
                percent(union),
                m.joules_a_token.map_or("-".into(), |j| format!("{j:.4}")),
            ];
            cells.truncate(columns);
            cells
        };
        let rows = [head[..columns].iter().map(|h| (*h).to_owned()).collect()]
            .into_iter()
            .chain(self.measured.iter().map(row));
        let mut text = out::table(&rows.collect::<Vec<_>>());
        for (threads, rate) in self.roofs {
            let s = if *threads == 1 { "" } else { "s" };
            text += &format!("read roof, {threads} thread{s}: {:.1} GB/s\n", rate / 1e9);
        }
        if let Some(method) = self.energy_method {
            text += &format!("J/token: {}\n", method.text());
        }
        let peak = Bytes(self.peak_bytes);
        text + &format!("most memory held: {peak} (VmHWM), {:.2} x file and KV\n", self.peak_share())
    }
}

/// Smallest, median and largest.
pub fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let n = v.len();
    assert!(n > 0, "a case has at least one repetition");
    (v[0], (v[(n - 1) / 2] + v[n / 2]) / 2.0, v[n - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_cover_depths_and_batches() {
        let names: Vec<String> = cases(&[512, 0], &[128], &[0, 64], &[1, 4]).iter().map(Case::name).collect();
        assert_eq!(names, ["pp512", "tg128", "tg128 x4", "pp512 @ d64", "tg128 @ d64", "tg128 x4 @ d64"]);
    }

    fn decode(batch: usize, seconds: Vec<f64>, step_bytes: f64) -> Measured {
        let case = Case { phase: Phase::Decode, tokens: 10, depth: 0, batch };
        let roofs = vec![20e9; seconds.len()];
        Measured { case, seconds, roofs, experts_a_step: 0.0, step_bytes, joules_a_token: None }
    }

    #[test]
    fn rates_are_of_all_sequences_together() {
        assert_eq!(spread(&decode(4, vec![1.0, 4.0, 2.0], 1e9).rates()), (10.0, 20.0, 40.0));
        assert_eq!(spread(&[1.0, 2.0, 4.0, 8.0]).1, 3.0);
    }

    #[test]
    fn shares_are_of_the_roof_and_of_the_union() {
        // Batch 1: 10 steps a second of 1 GB. Batch 4: 5 steps of 1.5 GB: 7.5 GB/s of the 10 that reading allows.
        let measured = [decode(1, vec![1.0], 1e9), decode(4, vec![2.0], 1.5e9)];
        let roofs = [(1, 8e9), (2, 20e9)];
        let report = Report {
            measured: &measured,
            roofs: &roofs,
            peak_bytes: 330,
            file_bytes: 200,
            kv_bytes: 100,
            energy_method: None,
        };
        let mut j = json!({});
        report.add_to(&mut j);
        let [one, four] = [&j["results"][0], &j["results"][1]];
        assert_eq!((&one["weights_gb_s"], &one["share_of_roof"]), (&json!(10.0), &json!(0.5)));
        assert_eq!((&one["over_batch_1"], &one["share_of_union"]), (&Value::Null, &Value::Null));
        assert_eq!((&four["over_batch_1"], &four["share_of_union"]), (&json!(2.0), &json!(0.75)));
        assert_eq!(j["peak_over_file_and_kv"], json!(1.1));
        let text = report.text();
        assert!(text.lines().count() == 6 && text.contains("75%") && text.contains("20.0 GB/s"), "{text}");
        // Memory that slowed down by half in the second repetition leaves the share as it is.
        let drifted = Measured { roofs: vec![20e9, 10e9, 20e9], ..decode(1, vec![1.0, 2.0, 1.0], 1e9) };
        assert_eq!(drifted.of_roof(), Some(0.5));
        assert_eq!(Measured { roofs: vec![], ..drifted }.of_roof(), None);
    }

    #[test]
    fn prefill_has_no_bytes() {
        let case = Case { phase: Phase::Prefill, tokens: 8, depth: 0, batch: 1 };
        let measured = [Measured {
            case,
            seconds: vec![1.0],
            roofs: vec![],
            experts_a_step: 0.0,
            step_bytes: 5.0,
            joules_a_token: Some(0.5),
        }];
        let report = Report {
            measured: &measured,
            roofs: &[(1, 1.0)],
            peak_bytes: 1,
            file_bytes: 1,
            kv_bytes: 1,
            energy_method: Some(Method::Rails),
        };
        assert_eq!(report.case_json(&measured[0])["weights_gb_s"], Value::Null);
        assert_eq!(report.case_json(&measured[0])["weights_bytes_a_step"], Value::Null);
        // With a meter there is a column, and what it measured.
        assert_eq!(report.case_json(&measured[0])["joules_a_token"], json!(0.5));
        let text = report.text();
        assert!(text.contains("0.5000") && text.contains("J/token: module rails"), "{text}");
        let without = Report { energy_method: None, ..report };
        assert!(!without.text().contains("J/token"));
    }
}
