//! The daemon's power threads: one decides with the governor, moves clocks through its hands and gives the engine its budget,
//! at once when the engine's phase changes; the other samples the board twice a second. They are two because a board's
//! sensors may take their time, or for ever (a bus that hangs), and a change of phase does not wait for them.
//!
//! ```text
//! engine ─ Signal ─► deciding thread ─► governor ─► hands ─► clocks
//!    ▲                 │          ▲
//!    └──── Budget ─────┤          │ samples
//!                      └─► Told ◄─┴─ watching thread ◄─ sensors
//!                            └─► /v1/power, /metrics, usage
//! ```
//!
//! However the deciding thread ends, clocks go back: by its last words where it can say them, by the helper's lease where
//! it cannot.

mod cores;
mod driven;
mod hands;
mod looker;
mod told;
mod watch;

pub use hands::Hands;
pub use looker::{Alone, Looker};
pub use told::Told;

use crate::app;
use crate::backend::Workers;
use crate::config::{Config, Origin};
use crate::engine::Budget;
use crate::engine::service::{Activity, Signal};
use crate::power::clocks::Actuator;
use crate::power::governor::{self, Demand, Inputs};
use crate::power::nodes::Nodes;
use crate::power::nvidia::{LIBRARIES, Nvidia};
use crate::power::profile::{Profile, board_key};
use crate::power::status::Allowed;
use crate::power::types::{Clocks, Phase};
use crate::units::{Error, Result};
use cores::Cores;
use driven::Driven;
use hands::{DirectHands, HelperHands, NoHands};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use told::ModesBy;
use watch::Watcher;

/// How often sensors are read: the rails' meters have a new value every 430 ms.
const SAMPLE: Duration = Duration::from_millis(500);

/// The longest that nothing is decided while a profile steers: samples may have stopped.
const DECIDE: Duration = Duration::from_millis(750);

/// How long the end waits for the thread of the sensors.
const SENSORS_END: Duration = Duration::from_secs(2);

/// Words to who holds the clocks are this far apart at least.
const BEAT: Duration = Duration::from_millis(400);

/// The same while nothing runs and no profile steers: the robot's processor may sleep longer.
const SAMPLE_IDLE: Duration = Duration::from_secs(2);

/// Where a process that moves clocks itself puts down what it holds.
const LEDGER: &str = "/run/tegu/clocks.json";

/// What is wanted of the board.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// "auto", or a simulated board.
    pub board: String,
    /// The profile that steers, if one does.
    pub profile: Option<String>,
    /// "helper", "direct" or "no".
    pub clocks: String,
    /// The helper's socket.
    pub helper: PathBuf,
    /// Sequences that generate side by side, whatever the profile allows.
    pub batch_max: usize,
    /// Threads that compute; 0: one a core.
    pub threads: usize,
    /// How long an idle one spins, where the profile says nothing or has no say.
    pub spin_us: u64,
    /// The settings leave that to the profile.
    pub spin_by_profile: bool,
}

impl Wanted {
    /// As the settings say; none where the board is not to be looked at.
    pub fn of(config: &Config) -> Option<Wanted> {
        let board = config.text("power.board");
        let is_sim = board.starts_with("sim:");
        let profile = match config.text("power.profile") {
            "" if is_sim => Some("balanced"),
            "" | "none" => None,
            name => Some(name),
        };
        (board != "off").then(|| Wanted {
            board: board.to_owned(),
            profile: profile.map(str::to_owned),
            clocks: config.text("power.clocks").to_owned(),
            helper: config.text("power.helper").into(),
            batch_max: config.count("serve.batch") as usize,
            threads: config.count("threads") as usize,
            spin_us: config.count("spin_us"),
            spin_by_profile: config.get("spin_us").1 == Origin::Default,
        })
    }
}

/// The running threads. Dropping it ends them and waits until clocks are back.
pub struct Keeper {
    told: Arc<Told>,
    threads: Vec<JoinHandle<()>>,
}

impl Keeper {
    /// Starts it.
    ///
    /// # Errors
    /// For a board or profile that there is not, a board whose software is refused, and clocks that this process may not
    /// move although it was told to.
    pub fn start(wanted: &Wanted) -> Result<Keeper> {
        let looker = Looker::open(&wanted.board)?;
        let (hands, modes_by) = hands_for(wanted, &looker)?;
        Keeper::with(wanted, looker, hands, modes_by, DECIDE)
    }

    /// Something is decided every `patience` at least while a profile steers.
    fn with(
        wanted: &Wanted,
        mut looker: Looker,
        hands: Box<dyn Hands>,
        modes_by: ModesBy,
        patience: Duration,
    ) -> Result<Keeper> {
        let key = board_key(looker.board());
        let profile = wanted.profile.as_deref().map(|name| Profile::find(name, key)).transpose()?;
        let cores = Cores::new();
        cores.confine(profile.as_ref().map_or("", |p| &p.cores))?;
        let driven = looker.sim().map(|sim| Driven::new(sim.clone()));
        let told = Arc::new(Told::new(&mut looker, driven, profile, modes_by, cores));
        let thread = Thread {
            told: told.clone(),
            nodes: looker.nodes().clone(),
            hands,
            state: governor::State::default(),
            patience,
            steers: None,
            asked: None,
            beaten: Instant::now(),
            phase: Phase::Idle,
            wanted: wanted.clone(),
            workers: None,
            complained: String::new(),
        };
        let mut watcher = Watcher::new(told.clone(), looker);
        // The first look is over when this returns: whoever asks next finds something.
        watcher.look();
        let mut keeper = Keeper { told, threads: Vec::new() };
        keeper.spawn("tegu-power", move || thread.run())?;
        keeper.spawn("tegu-sensors", move || watcher.run())?;
        Ok(keeper)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
        self.threads.push(spawned.map_err(|e| Error::io("power", "start a thread", e))?);
        Ok(())
    }

    /// What an engine tells its phase to.
    pub fn signal(&self) -> Arc<Signal> {
        self.told.signal.clone()
    }

    /// How long the profile lets an idle worker of the CPU backend spin, if a profile steers.
    pub fn spin_us(&self) -> Option<u64> {
        self.told.profile().and_then(|p| p.spin_us)
    }

    /// What is known, for the server, and the way to switch.
    pub fn told(&self) -> Arc<Told> {
        self.told.clone()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.told.stop.store(true, Ordering::SeqCst);
        self.told.signal.ring();
        // Clocks go back before this returns. The sensors' thread may hang in the kernel, and is waited for a while only.
        let (began, mut threads) = (Instant::now(), self.threads.drain(..));
        // A panic in it was told of where it happened.
        drop(threads.next().map(JoinHandle::join));
        for sensors in threads {
            while !sensors.is_finished() && began.elapsed() < SENSORS_END {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Who moves clocks, and who switches power modes.
fn hands_for(wanted: &Wanted, looker: &Looker) -> Result<(Box<dyn Hands>, ModesBy)> {
    if let Some(sim) = looker.sim() {
        // The real code on the simulated files. Its ledger is of no use after it, and no other board's, of which one process
        // may have several: each ledger has one owner.
        static BOARDS: AtomicU64 = AtomicU64::new(0);
        let (process, n) = (std::process::id(), BOARDS.fetch_add(1, Ordering::Relaxed));
        let ledger = std::env::temp_dir().join(format!("tegu-sim-{process}-{n}.json"));
        drop(std::fs::remove_file(&ledger));
        let hands = DirectHands::new(Actuator::open(sim.clone(), None, &ledger)?);
        let why = "a simulated board, which keeps its mode".to_owned();
        return Ok((Box::new(hands), ModesBy::NoOne(why)));
    }
    let tree = wanted.board.strip_prefix("tree:");
    let no_one = |what: &str| ModesBy::NoOne(format!("{what}, whose mode is not switched"));
    match wanted.clocks.as_str() {
        "direct" => {
            let nvidia = if tree.is_none() { Nvidia::open(&LIBRARIES).ok() } else { None };
            let (ledger, modes_by) = match tree {
                Some(root) => {
                    (Path::new(root).join(LEDGER.trim_start_matches('/')), no_one("a tree of files"))
                }
                None => (LEDGER.into(), ModesBy::ThisProcess),
            };
            let actuator = Actuator::open(looker.nodes().clone(), nvidia, &ledger)?;
            Ok((Box::new(DirectHands::new(actuator)), modes_by))
        }
        "helper" => Ok((Box::new(HelperHands::new(&wanted.helper)), ModesBy::Helper(wanted.helper.clone()))),
        _ => {
            let why = "no one (power.clocks = \"no\")".to_owned();
            Ok((Box::new(NoHands(why.clone())), ModesBy::NoOne(why)))
        }
    }
}

/// The engine's word in this room's.
fn phase_of(activity: Activity) -> Phase {
    match activity {
        Activity::Idle => Phase::Idle,
        Activity::Prefill => Phase::Prefill,
        Activity::Decode => Phase::Decode,
    }
}

struct Thread {
    told: Arc<Told>,
    /// For the board's time.
    nodes: Arc<dyn Nodes>,
    hands: Box<dyn Hands>,
    state: governor::State,
    /// The longest that nothing is decided while a profile steers.
    patience: Duration,
    /// The name of the profile that the state belongs to.
    steers: Option<String>,
    asked: Option<Clocks>,
    beaten: Instant,
    phase: Phase,
    wanted: Wanted,
    /// The threads that the profile beside them asks for.
    workers: Option<(Option<Arc<Profile>>, Workers)>,
    /// What was complained of last: said once, not twice a second.
    complained: String,
}

impl Thread {
    fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.live()));
        // Also after a panic, whose half-done work is not used any more.
        self.hands.release();
        if ended.is_err() {
            log::error!("power: a bug; clocks are put back");
            self.told.broke("the power thread: a bug");
        }
    }

    fn live(&mut self) {
        crate::app::power::hurry();
        let mut seen = 0;
        loop {
            let patience = if self.steers.is_some() { self.patience } else { SAMPLE_IDLE };
            seen = self.told.signal.wait(seen, patience);
            if self.told.stop.load(Ordering::SeqCst) {
                return;
            }
            // First what is urgent: clocks for the new phase.
            self.phase = phase_of(self.told.signal.now());
            self.steer();
            self.told.enter(self.phase);
            self.beat();
        }
    }

    /// Decides, gives the engine its budget, and sets clocks where others are wanted than before.
    fn steer(&mut self) {
        let profile = self.told.profile();
        let name = profile.as_ref().map(|p| p.name.clone());
        if name != self.steers {
            self.state = governor::State::default();
            self.steers = name;
            if profile.is_none() {
                self.let_go();
            }
        }
        self.staff(profile.as_ref());
        let Some(profile) = profile else { return };
        let metrics = self.told.engine().map(|e| e.metrics());
        let demand =
            metrics.map_or(Demand::default(), |m| Demand { waiting: m.prefilling, running: m.decoding });
        let seen = self.told.seen();
        let inputs =
            Inputs { now_us: self.nodes.now_us(), sample: Some(&seen.sample), phase: self.phase, demand };
        let (decision, next) = governor::decide(&profile, &seen.ladder, &self.state, &inputs);
        self.state = next;
        if self.asked != Some(decision.clocks) {
            let done = self.hands.set(&decision.clocks);
            self.complain(done);
            self.asked = Some(decision.clocks);
            self.told.changed();
        }
        let budget =
            Budget { max_batch: decision.budget.max_batch.min(self.wanted.batch_max), ..decision.budget };
        self.allow(budget);
        let allowed =
            Allowed { max_batch: budget.max_batch, prefill_chunk: budget.prefill_chunk, pause: budget.pause };
        let why = decision.why.iter().map(ToString::to_string).collect();
        self.told.decided(Some(decision.clocks), why, Some(allowed));
    }

    /// Gives the engine the threads that a profile asks for: no more than the cores that it leaves, and spinning as long as
    /// it says. A team that has them already notices nothing.
    fn staff(&mut self, profile: Option<&Arc<Profile>>) {
        let same = |old: &Option<Arc<Profile>>| match (old, profile) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if !self.workers.as_ref().is_some_and(|(old, _)| same(old)) {
            // Asked once a profile: it reads files.
            let cores = app::cores();
            let confined = profile.is_some_and(|p| !p.cores.is_empty());
            let threads = match self.wanted.threads {
                0 => cores,
                n if confined => n.min(cores),
                n => n,
            };
            let spin_us = profile.and_then(|p| p.spin_us).filter(|_| self.wanted.spin_by_profile);
            let workers = Workers { threads, spin_us: spin_us.unwrap_or(self.wanted.spin_us) };
            self.workers = Some((profile.cloned(), workers));
        }
        let workers = self.workers.as_ref().map(|(_, w)| *w);
        if let Some(engine) = self.told.engine().filter(|e| e.workers() != workers) {
            workers.into_iter().for_each(|w| engine.set_workers(w));
        }
    }

    fn allow(&self, budget: Budget) {
        if let Some(engine) = self.told.engine().filter(|e| e.budget() != budget) {
            engine.set_budget(budget);
        }
    }

    /// No profile any more: everything is as without us.
    fn let_go(&mut self) {
        self.hands.release();
        self.asked = None;
        self.allow(Budget { max_batch: self.wanted.batch_max, ..Budget::default() });
        self.told.decided(None, Vec::new(), None);
    }

    fn beat(&mut self) {
        if self.asked.is_some() && self.beaten.elapsed() >= BEAT {
            self.beaten = Instant::now();
            let beaten = self.hands.beat();
            self.complain(beaten);
        }
        self.told.hands_are(self.hands.name());
    }

    /// Says what is wrong with the hands, once, and shows it.
    fn complain(&mut self, done: Result<()>) {
        match done {
            // Waiting for a helper is no news.
            Err(Error::Busy { .. }) => {}
            Err(e) => {
                let text = e.to_string();
                if text != self.complained {
                    log::warn!("clocks: {text}");
                    self.complained = text;
                }
            }
            Ok(()) => self.complained.clear(),
        }
    }
}

#[cfg(test)]
#[path = "keeper/tests.rs"]
mod tests;
