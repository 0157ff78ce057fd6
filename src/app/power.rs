//! The power room's pieces put together: which board, its sensors, and the signal that ends the clock helper.

use crate::power::energy::{Energy, Method, Share};
use crate::power::nodes::{Nodes, RealNodes};
use crate::power::nvidia::{LIBRARIES, Nvidia};
use crate::power::sensors::Sensors;
use crate::power::sim::{self, SimBoard};
use crate::power::types::{Board, Phase};
use crate::units::{Error, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Where a board's files come from, and what is known of it.
pub struct Site {
    /// The files.
    pub nodes: Arc<dyn Nodes>,
    /// The board.
    pub board: Board,
    /// Whether it is the machine that this runs on: only then NVML and NVIDIA's programs tell of it.
    pub is_here: bool,
}

/// How long a simulated board runs before it is looked at: its meters lag as real ones do.
const SIMULATED_START_US: u64 = 10_000_000;

impl Site {
    /// This machine, or the board whose tree of files lies below `root`.
    pub fn open(root: Option<&Path>) -> Result<Site> {
        let nodes = match root {
            Some(root) if !root.is_dir() => {
                return Err(Error::bad(root, "--root", "a folder that stands for a board's /", "none"));
            }
            Some(root) => RealNodes::under(root),
            None => RealNodes::system(),
        };
        let board = Board::detect(&nodes);
        Ok(Site { nodes: Arc::new(nodes), board, is_here: root.is_none() })
    }

    /// A simulated board by its name, idle and a few seconds old.
    pub fn simulated(name: &str) -> Result<Site> {
        let sim = SimBoard::named(name, sim::Options::default())?;
        sim.sleep(SIMULATED_START_US);
        let board = sim.board();
        Ok(Site { nodes: Arc::new(sim), board, is_here: false })
    }

    /// NVML, or why there is none.
    pub fn nvidia(&self) -> Result<Nvidia> {
        match self.is_here {
            true => Nvidia::open(&LIBRARIES),
            false => Err(Error::bad("NVML", "board", "this machine", "a tree of files or a simulation")),
        }
    }

    /// The board's sensors, with NVML where it is there.
    pub fn sensors(&self) -> Sensors {
        let nvidia = self.nvidia().map_err(|e| log::info!("{e}")).ok();
        Sensors::open(self.nodes.clone(), &self.board).with_nvidia(nvidia)
    }
}

/// Lets the calling thread, and those that it starts from now on, run before others', where this process may ask for that
/// (root, or a unit with LimitNICE). For threads that move clocks: they use next to no time, and a busy machine would let
/// them wait for tens of milliseconds. Not a real-time class: an endless loop must not be able to take a core from a robot.
pub fn hurry() {
    // Measured beside two endless loops on two cores: at -10 one wake in a hundred still waits for 8 ms, at -20 none for 5.
    const NICE: i32 = -20;
    if let Err(e) = rustix::process::setpriority_process(None, NICE) {
        log::debug!("no higher priority for the thread that moves clocks: {e}");
    }
}

/// How often the meter is read while something is measured. A module's meter gives a new value every 430 ms.
const READ_EVERY: Duration = Duration::from_millis(100);

/// How energy is measured on a board whose total is `total_mw`; none where nothing tells the power.
pub fn method(sensors: &Sensors, total_mw: Option<u32>) -> Option<Method> {
    let nvidia = sensors.nvidia();
    total_mw?;
    match nvidia.map(Nvidia::energy_mj) {
        _ if !sensors.total_of().is_empty() => Some(Method::Rails),
        Some(Some(_)) => Some(Method::Counter),
        Some(None) => Some(Method::GpuPower),
        None => None,
    }
}

/// A meter that runs beside what it measures.
pub struct EnergyWatch {
    shared: Arc<Mutex<Metered>>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Metered {
    sensors: Sensors,
    energy: Energy,
}

impl Metered {
    fn read(&mut self) {
        let sample = self.sensors.sample();
        let counter = self.sensors.nvidia().and_then(Nvidia::energy_mj);
        self.energy.reading(&sample, counter);
    }
}

impl EnergyWatch {
    /// Starts to read; none where nothing tells the power.
    pub fn start(mut sensors: Sensors) -> Option<EnergyWatch> {
        let total_mw = sensors.sample().total_mw;
        let method = method(&sensors, total_mw)?;
        let energy = Energy::new(method, Phase::Idle, sensors.nodes().now_us());
        let shared = Arc::new(Mutex::new(Metered { sensors, energy }));
        let ended = Arc::new(AtomicBool::new(false));
        let (meter, stop) = (shared.clone(), ended.clone());
        let read = move || {
            while !stop.load(Ordering::Relaxed) {
                lock(&meter).read();
                std::thread::sleep(READ_EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("meter".into()).spawn(read).ok();
        Some(EnergyWatch { shared, ended, thread })
    }

    /// Where the numbers come from.
    pub fn method(&self) -> Method {
        lock(&self.shared).energy.method()
    }

    /// What a phase has taken up to now.
    pub fn share(&self, phase: Phase) -> Share {
        let mut metered = lock(&self.shared);
        metered.read();
        metered.energy.revised(phase)
    }

    /// Another phase begins. Its share is told apart from what was before.
    pub fn phase(&self, phase: Phase) {
        let mut metered = lock(&self.shared);
        let now = metered.sensors.nodes().now_us();
        metered.energy.phase(phase, now);
    }
}

impl Drop for EnergyWatch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panics only on a bug, which it has reported.
            drop(thread.join());
        }
    }
}

fn lock(shared: &Mutex<Metered>) -> MutexGuard<'_, Metered> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A signal that asks the process to end, as a question that any thread may ask.
pub fn end_asked() -> Result<Arc<dyn Fn() -> bool + Send + Sync>> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    ctrlc::set_handler(|| ASKED.store(true, Ordering::SeqCst))
        .map_err(|e| Error::io("signals", "take over", std::io::Error::other(e)))?;
    Ok(Arc::new(|| ASKED.load(Ordering::SeqCst)))
}
