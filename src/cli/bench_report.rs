//! What a benchmark measured, as a table and as JSON.

use serde_json::{Value, json};

use super::out;

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
}

impl Measured {
    /// Tokens a second (over all sequences) of each repetition.
    pub fn rates(&self) -> Vec<f64> {
        let tokens = (self.case.tokens * self.case.batch) as f64;
        self.seconds.iter().map(|s| tokens / s).collect()
    }

    /// As JSON; `bytes_read` is what one decode step must read from memory at least.
    pub fn json(&self, step_bytes: u64) -> Value {
        let (min, median, max) = spread(&self.rates());
        let gb_s = (self.case.phase == Phase::Decode)
            .then(|| median / self.case.batch as f64 * step_bytes as f64 / 1e9)
            .map_or(Value::Null, out::number);
        json!({
            "test": self.case.name(),
            "phase": match self.case.phase { Phase::Prefill => "pp", Phase::Decode => "tg" },
            "tokens": self.case.tokens,
            "depth": self.case.depth,
            "batch": self.case.batch,
            "tok_s": { "min": min, "median": median, "max": max },
            "samples_tok_s": self.rates(),
            "weights_gb_s": gb_s,
        })
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

/// The table for people.
pub fn table(measured: &[Measured], step_bytes: u64) -> String {
    let head = ["test", "tok/s", "min", "max", "weights GB/s"].map(str::to_owned).to_vec();
    let row = |m: &Measured| {
        let (min, median, max) = spread(&m.rates());
        let gb_s = m.json(step_bytes)["weights_gb_s"].as_f64().map_or("-".into(), |x| format!("{x:.1}"));
        vec![m.case.name(), format!("{median:.1}"), format!("{min:.1}"), format!("{max:.1}"), gb_s]
    };
    let rows: Vec<Vec<String>> = [head].into_iter().chain(measured.iter().map(row)).collect();
    out::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_cover_depths_and_batches() {
        let names: Vec<String> = cases(&[512, 0], &[128], &[0, 64], &[1, 4]).iter().map(Case::name).collect();
        assert_eq!(names, ["pp512", "tg128", "tg128 x4", "pp512 @ d64", "tg128 @ d64", "tg128 x4 @ d64"]);
    }

    #[test]
    fn rates_are_of_all_sequences_together() {
        let case = Case { phase: Phase::Decode, tokens: 10, depth: 0, batch: 4 };
        let m = Measured { case, seconds: vec![1.0, 4.0, 2.0] };
        assert_eq!(spread(&m.rates()), (10.0, 20.0, 40.0));
        let j = m.json(1_000_000_000);
        assert_eq!(j["weights_gb_s"], json!(5.0));
        assert_eq!(spread(&[1.0, 2.0, 4.0, 8.0]).1, 3.0);
        assert!(table(&[m], 1).lines().count() == 2);
    }
}
