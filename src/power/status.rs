//! What is told of a board and of what is done with it, in one piece: the daemon's `/v1/power` gives it as JSON, and the
//! screen of `tegu top` is drawn from it, whoever took the sample.

use super::types::{Clocks, Phase, Sample};
use serde::{Deserialize, Serialize};

/// The whole state of a board's power. Fields that a client does not know are ignored, and those that it misses are absent,
/// so that a screen and a daemon of different versions understand each other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The board in one line: name, module, release, simulation.
    pub board: String,
    /// The power mode (nvpmodel) that the board is in.
    pub mode: Option<String>,
    /// The power modes that it has.
    pub modes: Vec<String>,
    /// The profile that steers, if any does.
    pub profile: Option<String>,
    /// The profiles that there are for this board.
    pub profiles: Vec<String>,
    /// Who moves clocks: "helper", "this process", or why no one does.
    pub hands: String,
    /// What the engine is doing.
    pub phase: Option<Phase>,
    /// The last reading.
    pub sample: Sample,
    /// How busy each CPU core was since the reading before, of a thousand; a core that is off has none.
    pub cores_permille: Vec<Option<u16>>,
    /// The clocks that were asked for last.
    pub asked: Option<Clocks>,
    /// Why the governor decided as it did.
    pub reasons: Vec<String>,
    /// What the engine may do.
    pub allowed: Option<Allowed>,
    /// Energy since the start, by phase; empty where nothing measures power.
    pub energy: Vec<PhaseEnergy>,
    /// How that was measured.
    pub energy_method: Option<String>,
    /// What the daemon is serving; none for a board that is looked at without one.
    pub served: Option<Served>,
}

/// The engine's budget, as it is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Allowed {
    /// Most decode rows of a step.
    pub max_batch: usize,
    /// Most prompt tokens of a step.
    pub prefill_chunk: usize,
    /// Nothing is computed for now.
    pub pause: bool,
}

/// Energy of the module while the engine was in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseEnergy {
    /// The phase.
    pub phase: Phase,
    /// Thousandths of a joule.
    pub energy_mj: u64,
    /// Time in the phase.
    pub time_us: u64,
    /// One standard error of the energy, in thousandths of it, where it is estimated through a meter's lag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_permille: Option<u32>,
}

/// Counts of the engine, from which rates are taken by whoever sees two of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Served {
    /// The model in memory.
    pub model: Option<String>,
    /// Since the daemon started.
    pub uptime_us: u64,
    /// Open requests, waiting ones included.
    pub open: usize,
    /// Sequences that read their prompt or wait to.
    pub prefilling: usize,
    /// Sequences that generate.
    pub decoding: usize,
    /// Prompt tokens read.
    pub prefill_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Requests taken.
    pub requests: u64,
}

#[test]
fn a_status_survives_json_and_other_versions() {
    let status = Status {
        board: "b".into(),
        phase: Some(Phase::Decode),
        cores_permille: vec![Some(3), None],
        energy: vec![PhaseEnergy { phase: Phase::Idle, energy_mj: 5, time_us: 7, error_permille: Some(20) }],
        served: Some(Served { model: Some("m".into()), ..Served::default() }),
        ..Status::default()
    };
    let text = serde_json::to_string(&status).unwrap();
    assert_eq!(serde_json::from_str::<Status>(&text).unwrap(), status);
    let other = serde_json::from_str::<Status>(r#"{"board":"b","newer":1}"#).unwrap();
    assert_eq!((other.board.as_str(), other.served), ("b", None));
}
