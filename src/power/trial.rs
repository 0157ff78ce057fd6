//! A trial: a trace of requests, run on a simulated board under a policy, at accelerated time. A field engineer
//! dry-runs a profile with it, and the study of this room is made of it.
//!
//! The engine is modelled as far as clocks care: prompts in chunks before decode, a batch up to the budget's limit,
//! one token a sequence and step. Samples come from the real sensors, decisions from the real governor, twice a
//! second and at each phase change.

use std::collections::VecDeque;
use std::sync::Arc;

use super::governor::{self, Demand, Inputs, Ladder};
use super::nodes::Nodes;
use super::profile::Profile;
use super::sensors::Sensors;
use super::sim::SimBoard;
use super::sim::work::{Model, Work};
use super::types::{Clocks, Phase, Sample};
use crate::engine::Budget;

/// How often sensors are read.
const SAMPLE_US: u64 = 500_000;
const GPU: &str = "/sys/class/devfreq/17000000.gpu";
const EMC: &str = "/sys/kernel/debug/bpmp/debug/clk/emc";

/// A request of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// When it comes.
    pub at_us: u64,
    /// Its prompt.
    pub prompt_tokens: u32,
    /// What it generates.
    pub output_tokens: u32,
}

/// Who decides about clocks and batch.
#[derive(Debug, Clone)]
pub enum Policy {
    /// Nobody: the power mode and the engine's default budget.
    Stock,
    /// The same clocks a phase throughout.
    Fixed {
        /// By [`Phase::index`].
        clocks: [Clocks; 3],
        /// Most sequences side by side.
        max_batch: usize,
    },
    /// The governor with a profile.
    Governed(Box<Profile>),
}

/// A moment of a trial.
#[derive(Debug, Clone)]
pub struct Row {
    /// What the sensors said.
    pub sample: Sample,
    /// What was going on.
    pub phase: Phase,
    /// The junction's true temperature.
    pub junction_c: f64,
    /// Tokens generated so far.
    pub output_tokens: u64,
    /// What the governor took, in words.
    pub why: String,
}

/// What came of a trial.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Time that it took.
    pub seconds: f64,
    /// True energy of the module.
    pub energy_j: f64,
    /// Highest true power.
    pub peak_w: f64,
    /// Highest true temperature.
    pub hottest_c: f64,
    /// Prompt tokens read.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Time and true energy by [`Phase::index`].
    pub phase_s: [f64; 3],
    /// True energy by phase.
    pub phase_j: [f64; 3],
    /// Times to first token, in the order of the requests' ends.
    pub ttft_s: Vec<f64>,
    /// Requests that were done.
    pub done: usize,
    /// Times at which the governor's steps changed, in seconds.
    pub changes_s: Vec<f64>,
}

impl Outcome {
    /// Prompt tokens a second of prefill.
    pub fn prefill_tok_s(&self) -> f64 {
        self.prompt_tokens as f64 / self.phase_s[0]
    }

    /// Generated tokens a second of decode, all sequences together.
    pub fn decode_tok_s(&self) -> f64 {
        self.output_tokens as f64 / self.phase_s[1]
    }

    /// All energy by generated tokens.
    pub fn j_per_token(&self) -> f64 {
        self.energy_j / self.output_tokens.max(1) as f64
    }

    /// All energy, brought to an hour.
    pub fn j_per_hour(&self) -> f64 {
        self.energy_j / self.seconds * 3600.0
    }

    /// Mean time to the first token.
    pub fn mean_ttft_s(&self) -> f64 {
        self.ttft_s.iter().sum::<f64>() / self.ttft_s.len().max(1) as f64
    }

    /// Most changes of the governor's steps within any minute.
    pub fn most_changes_a_minute(&self) -> usize {
        let within = |from: f64| self.changes_s.iter().filter(|&&t| t >= from && t < from + 60.0).count();
        self.changes_s.iter().map(|&t| within(t)).max().unwrap_or(0)
    }
}

/// A sequence that generates.
#[derive(Debug)]
struct Running {
    context: u32,
    left: u32,
}

struct Trial<'a> {
    board: &'a Arc<SimBoard>,
    model: &'static Model,
    policy: &'a Policy,
    sensors: Sensors,
    ladder: Ladder,
    state: governor::State,
    budget: Budget,
    set: Clocks,
    sample: Option<Sample>,
    next_sample_us: u64,
    phase: Phase,
    why: String,
    demand: Demand,
    began_us: u64,
    each: Option<&'a mut dyn FnMut(Row)>,
    is_new: bool,
    out: Outcome,
}

/// Runs a trace until `until_us` after the start, and until every request is done, but no longer than twice that.
pub fn run(
    board: &Arc<SimBoard>,
    model: &'static Model,
    jobs: &[Job],
    until_us: u64,
    policy: &Policy,
) -> Outcome {
    run_with(board, model, jobs, until_us, policy, None)
}

/// Runs a trace and hands each moment, twice a second, to `each`.
pub fn watch(
    board: &Arc<SimBoard>,
    model: &'static Model,
    jobs: &[Job],
    until_us: u64,
    policy: &Policy,
    each: &mut dyn FnMut(Row),
) -> Outcome {
    run_with(board, model, jobs, until_us, policy, Some(each))
}

fn run_with<'a>(
    board: &'a Arc<SimBoard>,
    model: &'static Model,
    jobs: &[Job],
    until_us: u64,
    policy: &'a Policy,
    each: Option<&'a mut dyn FnMut(Row)>,
) -> Outcome {
    let nodes: Arc<dyn Nodes> = board.clone();
    let sensors = Sensors::open(nodes, &board.board());
    let ceiling_hz = super::nodes::number(board.as_ref(), &format!("{GPU}/max_freq"));
    let ladder = Ladder::new(board.spec().gpu_hz, ceiling_hz, &super::sim::spec::EMC_HZ);
    let began_us = board.now_us();
    let mut trial = Trial {
        board,
        model,
        policy,
        sensors,
        ladder,
        state: governor::State::default(),
        budget: Budget::default(),
        set: Clocks::default(),
        sample: None,
        next_sample_us: began_us,
        phase: Phase::Idle,
        why: String::new(),
        demand: Demand::default(),
        began_us,
        each,
        is_new: true,
        out: Outcome::default(),
    };
    let before = board.truth();
    trial.serve(jobs, until_us);
    let after = board.truth();
    let mut out = trial.out;
    out.seconds = (board.now_us() - began_us) as f64 / 1e6;
    out.energy_j = after.energy_j - before.energy_j;
    out.peak_w = after.peak_w;
    out.hottest_c = after.hottest_c;
    out
}

impl Trial<'_> {
    fn now_us(&self) -> u64 {
        self.board.now_us() - self.began_us
    }

    /// The engine's loop.
    fn serve(&mut self, jobs: &[Job], until_us: u64) {
        let mut coming: VecDeque<Job> = jobs.iter().copied().collect();
        let mut waiting: VecDeque<Job> = VecDeque::new();
        let mut running: Vec<Running> = Vec::new();
        // The first sample comes before the first decision.
        self.pass(1);
        self.enter(Phase::Idle);
        loop {
            let now_us = self.now_us();
            while coming.front().is_some_and(|j| j.at_us <= now_us) {
                waiting.extend(coming.pop_front());
            }
            self.demand = Demand { waiting: waiting.len(), running: running.len() };
            let is_done = coming.is_empty() && waiting.is_empty() && running.is_empty();
            if is_done && now_us >= until_us || now_us >= 2 * until_us || self.board.is_shut_down() {
                return;
            }
            if self.budget.pause {
                self.pass(100_000);
            } else if running.len() < self.budget.max_batch.max(1)
                && let Some(job) = waiting.pop_front()
            {
                self.prefill(&job);
                let left = job.output_tokens.saturating_sub(1);
                running.push(Running { context: job.prompt_tokens, left });
                self.out.ttft_s.push((self.now_us() - job.at_us) as f64 / 1e6);
                self.out.output_tokens += 1;
            } else if !running.is_empty() {
                self.decode(&mut running, coming.front().map(|j| j.at_us));
            } else {
                self.enter(Phase::Idle);
                let next_us = coming.front().map_or(until_us, |j| j.at_us);
                self.pass(next_us.saturating_sub(now_us).max(1));
            }
            let before = running.len();
            running.retain(|r| r.left > 0);
            self.out.done += before - running.len();
        }
    }

    fn prefill(&mut self, job: &Job) {
        let mut past = 0;
        while past < job.prompt_tokens {
            // A chunk that pauses in the middle is finished all the same; the next waits.
            while self.budget.pause && !self.board.is_shut_down() {
                self.pass(100_000);
            }
            self.enter(Phase::Prefill);
            let tokens = (job.prompt_tokens - past).min(self.budget.prefill_chunk.max(1) as u32);
            self.board.start(Work::Prefill { model: self.model, tokens, past });
            self.finish();
            if self.board.is_shut_down() {
                return;
            }
            past += tokens;
            self.out.prompt_tokens += tokens as u64;
        }
    }

    /// Some decode steps: until a sequence ends, a request comes, or half a second has passed.
    fn decode(&mut self, running: &mut [Running], next_us: Option<u64>) {
        self.enter(Phase::Decode);
        let batch = running.len().min(self.budget.max_batch.max(1));
        let rows = &mut running[..batch];
        let context = rows.iter().map(|r| r.context).sum::<u32>() / batch as u32;
        let step = Work::Decode { model: self.model, batch: batch as u32, context, steps: 1 };
        let ms = super::sim::physics::cost(self.board.spec(), &step, &self.board.clocks()).ms;
        let free_us = next_us.map_or(SAMPLE_US, |t| t.saturating_sub(self.now_us()).min(SAMPLE_US));
        let fits = ((free_us as f64 / 1e3 / ms).ceil() as u32).max(1);
        let steps = rows.iter().map(|r| r.left).min().unwrap_or(1).min(fits).max(1);
        self.board.start(Work::Decode { model: self.model, batch: batch as u32, context, steps });
        self.finish();
        for row in rows {
            row.left -= steps;
            row.context += steps;
        }
        self.out.output_tokens += batch as u64 * steps as u64;
    }

    /// Until the work at hand is done.
    fn finish(&mut self) {
        while self.board.is_busy() && !self.board.is_shut_down() {
            self.pass(SAMPLE_US);
        }
    }

    /// Lets time pass, no longer than the work at hand, and reads sensors when that is due.
    fn pass(&mut self, us: u64) {
        let end_us = self.board.now_us() + us;
        while self.board.now_us() < end_us {
            let until_us = end_us.min(self.next_sample_us.max(self.board.now_us() + 1));
            let was_busy = self.board.is_busy();
            let before_j = self.board.truth().energy_j;
            let passed_us = self.board.advance(until_us - self.board.now_us());
            self.out.phase_s[self.phase.index()] += passed_us as f64 / 1e6;
            self.out.phase_j[self.phase.index()] += self.board.truth().energy_j - before_j;
            if self.board.now_us() >= self.next_sample_us {
                self.next_sample_us += SAMPLE_US;
                // Who never decides needs no sensors.
                if matches!(self.policy, Policy::Governed(_)) || self.each.is_some() {
                    self.measure();
                }
            }
            if was_busy && !self.board.is_busy() {
                return;
            }
        }
    }

    fn measure(&mut self) {
        let sample = self.sensors.sample();
        self.sample = Some(sample.clone());
        self.steer();
        if let Some(each) = &mut self.each {
            each(Row {
                sample,
                phase: self.phase,
                junction_c: self.board.junction_c(),
                output_tokens: self.out.output_tokens,
                why: self.why.clone(),
            });
        }
    }

    fn enter(&mut self, phase: Phase) {
        if phase != self.phase || std::mem::take(&mut self.is_new) {
            self.phase = phase;
            self.steer();
        }
    }

    /// Decides and acts.
    fn steer(&mut self) {
        let clocks = match self.policy {
            Policy::Stock => return,
            Policy::Fixed { clocks, max_batch } => {
                self.budget.max_batch = *max_batch;
                clocks[self.phase.index()]
            }
            Policy::Governed(profile) => {
                let now_us = self.board.now_us();
                let sample = self.sample.as_ref();
                let inputs = Inputs { now_us, sample, phase: self.phase, demand: self.demand };
                let (decision, state) = governor::decide(profile, &self.ladder, &self.state, &inputs);
                if state.changes != self.state.changes {
                    self.out.changes_s.push((now_us - self.began_us) as f64 / 1e6);
                }
                self.state = state;
                self.budget = decision.budget;
                let why: Vec<String> = decision.why.iter().map(ToString::to_string).collect();
                self.why = why.join("; ");
                decision.clocks
            }
        };
        if clocks != self.set {
            set_clocks(self.board.as_ref(), &self.ladder, &clocks);
            self.set = clocks;
        }
    }
}

/// Sets a simulated board's clocks through its files: limits so that they never cross, the memory clock by its lock.
/// Its files take everything that is in its table, so that there is nothing to report.
pub fn set_clocks(board: &dyn Nodes, ladder: &Ladder, clocks: &Clocks) {
    let write = |path: String, hz: u64| board.write(&path, &hz.to_string()).is_ok();
    let (low, top) = match ladder.gpu_hz[..] {
        [low, .., top] => (low, top),
        _ => return,
    };
    let cap_hz = clocks.gpu_cap_hz.unwrap_or(top);
    // The floor goes down first, so that any ceiling is above it.
    write(format!("{GPU}/min_freq"), low);
    write(format!("{GPU}/max_freq"), cap_hz);
    write(format!("{GPU}/min_freq"), clocks.gpu_floor_hz.unwrap_or(low).min(cap_hz));
    match clocks.emc_floor_hz {
        Some(hz) => {
            write(format!("{EMC}/mrq_rate_locked"), 1);
            write(format!("{EMC}/rate"), hz);
        }
        None => {
            write(format!("{EMC}/mrq_rate_locked"), 0);
        }
    }
}

/// Traces that the study and a dry run use.
pub mod traces {
    use super::Job;

    /// An hour of chat: short prompts, short answers, at intervals that leave the stock Orin Nano Super 80% idle.
    pub fn chat(seconds: u64) -> Vec<Job> {
        regular(seconds, 19_000_000, 256, 128)
    }

    /// Long prompts with short answers.
    pub fn long_prompts(seconds: u64) -> Vec<Job> {
        regular(seconds, 20_000_000, 4096, 64)
    }

    /// A pile of requests that are all there at the start.
    pub fn background(jobs: usize) -> Vec<Job> {
        vec![Job { at_us: 0, prompt_tokens: 256, output_tokens: 256 }; jobs]
    }

    /// Work without a break: each request comes before the last one ends.
    pub fn full(seconds: u64) -> Vec<Job> {
        regular(seconds, 1_000_000, 512, 256)
    }

    /// One long answer after another.
    pub fn singles(seconds: u64) -> Vec<Job> {
        regular(seconds, 10_000_000, 128, 1024)
    }

    fn regular(seconds: u64, every_us: u64, prompt_tokens: u32, output_tokens: u32) -> Vec<Job> {
        let job = |n: u64| {
            // Intervals differ, in a pattern that does not repeat soon.
            let early_us = n * 7_919 % 101 * every_us / 300;
            Job { at_us: (n + 1) * every_us - early_us, prompt_tokens, output_tokens }
        };
        (0..seconds * 1_000_000 / every_us).map(job).filter(|j| j.at_us < seconds * 1_000_000).collect()
    }
}
