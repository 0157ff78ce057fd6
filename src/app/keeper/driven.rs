//! A simulated board driven by the real engine: its time goes as ours does, and its work is what the engine says it does. For a
//! dry run of a whole daemon: what steers, shows and reports is the real code; only the board is not.

use crate::power::nodes::Nodes;
use crate::power::sim::SimBoard;
use crate::power::sim::work::{MODELS, Model, Work};
use crate::power::types::Phase;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Tokens of context that a row is taken to have; it matters little to power.
const CONTEXT_TOKENS: u32 = 512;
/// Rows of a prompt's chunk at a time.
const CHUNK_TOKENS: u32 = 128;
/// Steps of one piece of work: it is begun again as long as the phase lasts.
const STEPS: u32 = 1_000_000;

struct Doing {
    phase: Phase,
    rows: u32,
    model: &'static Model,
}

/// The board and what it is given to do.
pub struct Driven {
    sim: Arc<SimBoard>,
    began: Instant,
    began_us: u64,
    doing: Mutex<Doing>,
}

impl Driven {
    /// Idle from now on.
    pub fn new(sim: Arc<SimBoard>) -> Driven {
        let doing = Doing { phase: Phase::Idle, rows: 1, model: MODELS[0] };
        Driven { began: Instant::now(), began_us: sim.now_us(), doing: doing.into(), sim }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Doing> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The weights of the model in memory: the board behaves as with the known model that comes closest.
    pub fn set_model(&self, weight_bytes: u64) {
        let distance = |m: &&Model| ((m.weight_bytes / weight_bytes.max(1) as f64).ln().abs() * 1e6) as u64;
        let named = MODELS.iter().copied().filter(|m| m.prefill_work > 0.0);
        self.lock().model = named.min_by_key(distance).expect("some models are known");
    }

    /// From now on the engine is in `phase`, with so many rows that generate.
    pub fn set(&self, phase: Phase, rows: usize) {
        let mut doing = self.lock();
        self.catch_up(&doing);
        let rows = rows.clamp(1, 512) as u32;
        if (doing.phase, doing.rows) != (phase, rows) {
            (doing.phase, doing.rows) = (phase, rows);
            self.sim.start(work(&doing));
        }
    }

    /// Lets the board's time come up to ours.
    pub fn pass(&self) {
        self.catch_up(&self.lock());
    }

    fn catch_up(&self, doing: &Doing) {
        let now_us = self.began_us + self.began.elapsed().as_micros() as u64;
        while self.sim.now_us() < now_us && !self.sim.is_shut_down() {
            if doing.phase != Phase::Idle && !self.sim.is_busy() {
                self.sim.start(work(doing));
            }
            self.sim.advance(now_us - self.sim.now_us());
        }
    }
}

fn work(doing: &Doing) -> Work {
    let (model, rows) = (doing.model, doing.rows);
    match doing.phase {
        Phase::Idle => Work::Idle,
        Phase::Prefill => Work::Prefill { model, tokens: CHUNK_TOKENS, past: CONTEXT_TOKENS },
        Phase::Decode => Work::Decode { model, batch: rows, context: CONTEXT_TOKENS, steps: STEPS },
    }
}
