//! Simulated boards: everything that a Jetson shows in its files, driven by a model of its physics at a time of its
//! own.
//!
//! The real sensor and actuator code runs on [`SimBoard`] as it runs on a board. What the numbers rest on is told
//! where they stand: boards in [`spec`], models in [`work`], time and power in [`physics`]. In short: decode on the
//! Orin Nano Super is fitted to published traces; prefill, batches, the other boards and heat are derived or assumed,
//! and say which.

mod meter;
pub mod physics;
pub mod spec;
mod state;
mod tree;
pub mod work;

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;

use super::nodes::Nodes;
use super::types::Board;
use crate::units::{Error, Result};
use spec::Spec;
use state::State;
use tree::File;
use work::Work;

/// What can be chosen of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Seed of all noise.
    pub seed: u64,
    /// Deviation of each reading of a power meter, as a share.
    pub noise: f64,
    /// Deviation of each unit of work's time, as a share.
    pub run_noise: f64,
    /// Temperature of the air.
    pub ambient_c: f64,
    /// Thermal resistance from sink to air; none: the board's own.
    pub sink_c_per_w: Option<f64>,
    /// Power mode; none: the board's default here.
    pub mode: Option<String>,
}

impl Default for Options {
    fn default() -> Options {
        let mode = None;
        Options { seed: 1, noise: 0.03, run_noise: 0.0, ambient_c: 25.0, sink_c_per_w: None, mode }
    }
}

/// What really happened on a board, as no meter tells.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Truth {
    /// Energy of the module.
    pub energy_j: f64,
    /// Energy of GPU and CPU.
    pub gpu_j: f64,
    /// Energy of memory controller and SoC.
    pub soc_j: f64,
    /// Highest power.
    pub peak_w: f64,
    /// Highest temperature of the junction.
    pub hottest_c: f64,
    /// Time with work.
    pub busy_s: f64,
    /// Prompt tokens of finished work.
    pub prompt_tokens: u64,
    /// Generated tokens of finished work.
    pub output_tokens: u64,
}

/// A way in which a file goes wrong.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeFault {
    /// The block is off: EAGAIN.
    Again,
    /// No such file.
    Missing,
    /// Always what it said when the fault began.
    Frozen,
    /// Always this.
    Says(String),
}

/// A simulated board.
#[derive(Debug)]
pub struct SimBoard {
    spec: &'static Spec,
    files: BTreeMap<String, File>,
    state: Mutex<State>,
    /// Faults by path; a frozen one holds its text.
    faults: Mutex<BTreeMap<String, NodeFault>>,
}

impl SimBoard {
    /// A board by its name: "orin-nano-super", with or without "sim:". An unknown name or mode is an error that lists
    /// the known.
    pub fn named(name: &str, options: Options) -> Result<SimBoard> {
        let short = name.strip_prefix("sim:").unwrap_or(name);
        let known: Vec<String> = spec::BOARDS.iter().map(|b| format!("sim:{}", b.name)).collect();
        let spec = spec::BOARDS.iter().find(|b| b.name == short);
        let spec = spec.ok_or_else(|| Error::bad("board", "name", known.join(", "), format!("{name:?}")))?;
        let mode_name = options.mode.as_deref().unwrap_or(spec.default_mode);
        let mode = spec.mode(mode_name).ok_or_else(|| {
            let modes: Vec<&str> = spec.modes.iter().map(|m| m.name).collect();
            Error::bad(format!("sim:{short}"), "mode", modes.join(", "), format!("{mode_name:?}"))
        })?;
        let state = Mutex::new(State::new(spec, mode, options));
        Ok(SimBoard { spec, files: tree::files(spec), state, faults: Mutex::default() })
    }

    /// The board's table.
    pub fn spec(&self) -> &'static Spec {
        self.spec
    }

    /// Its identity, read from its own files.
    pub fn board(&self) -> Board {
        Board { simulation: Some(format!("sim:{}", self.spec.name)), ..Board::detect(self) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic elsewhere leaves numbers, which are as good as before.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Begins work; what was going on is dropped.
    pub fn start(&self, work: Work) {
        self.state().start(work);
    }

    /// Lets at most `us` pass, and stops where the work ends; returns how much passed.
    pub fn advance(&self, us: u64) -> u64 {
        self.state().advance(us)
    }

    /// Whether work is going on.
    pub fn is_busy(&self) -> bool {
        self.state().is_busy()
    }

    /// Steps of the present work that are done, with the part of the one under way.
    pub fn steps_done(&self) -> f64 {
        self.state().done_units
    }

    /// What really happened since the start.
    pub fn truth(&self) -> Truth {
        self.state().truth
    }

    /// The junction's temperature now, in °C.
    pub fn junction_c(&self) -> f64 {
        self.state().junction_c()
    }

    /// The clocks as they run now.
    pub fn clocks(&self) -> physics::At {
        self.state().clocks()
    }

    /// Whether the board has shut itself down from heat.
    pub fn is_shut_down(&self) -> bool {
        self.state().shut_down
    }

    /// Sets the state as after a very long time of a load of `total_w`: sink and spreader are warm.
    pub fn warm(&self, total_w: f64) {
        let mut state = self.state();
        let sink = state.options.sink_c_per_w.unwrap_or(self.spec.r_c_per_w[2]);
        let [die, spreader, _] = self.spec.r_c_per_w;
        state.heat_c = [total_w * die, total_w * spreader, total_w * sink];
    }

    /// Makes a file go wrong from now on; `None` heals it.
    pub fn fault(&self, path: &str, fault: Option<NodeFault>) {
        let fault = match fault {
            Some(NodeFault::Frozen) => Some(self.read(path).map_or(NodeFault::Missing, NodeFault::Says)),
            other => other,
        };
        let mut faults = self.faults.lock().unwrap_or_else(|e| e.into_inner());
        match fault {
            Some(fault) => faults.insert(path.to_owned(), fault),
            None => faults.remove(path),
        };
    }

    /// Paths of all temperatures, for faults.
    pub fn zone_paths(&self) -> Vec<String> {
        let is_zone = |p: &&String| p.contains("/thermal_zone") && p.ends_with("/temp");
        self.files.keys().filter(is_zone).cloned().collect()
    }

    fn faulty(&self, path: &str) -> Option<io::Result<String>> {
        let faults = self.faults.lock().unwrap_or_else(|e| e.into_inner());
        Some(match faults.get(path)? {
            NodeFault::Again => Err(io::Error::from(io::ErrorKind::WouldBlock)),
            NodeFault::Missing | NodeFault::Frozen => Err(io::Error::from(io::ErrorKind::NotFound)),
            NodeFault::Says(text) => Ok(text.clone()),
        })
    }

    fn file(&self, path: &str) -> io::Result<&File> {
        if self.state().shut_down {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the board has shut down from heat"));
        }
        self.files.get(path).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

impl Nodes for SimBoard {
    fn read(&self, path: &str) -> io::Result<String> {
        let file = self.file(path)?;
        if let Some(answer) = self.faulty(path) {
            return answer;
        }
        match file {
            File::Text(text) => Ok(text.clone()),
            File::Live(live) => tree::read(&mut self.state(), *live),
        }
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        match self.file(path)? {
            File::Text(_) => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
            File::Live(live) => tree::write(&mut self.state(), *live, text),
        }
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let folder = format!("{}/", path.trim_end_matches('/'));
        let inside = self.files.range(folder.clone()..).take_while(|(p, _)| p.starts_with(&folder));
        let mut names: Vec<String> = Vec::new();
        for (path, _) in inside {
            let name = path[folder.len()..].split('/').next().unwrap_or_default();
            if names.last().is_none_or(|last| last != name) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        names.dedup();
        match names.is_empty() {
            true => Err(io::Error::from(io::ErrorKind::NotFound)),
            false => Ok(names),
        }
    }

    fn now_us(&self) -> u64 {
        self.state().now_us
    }

    /// Time passes as it would for a caller that waits: work goes on, and may end.
    fn sleep(&self, us: u64) {
        let mut state = self.state();
        let mut left_us = us;
        while left_us > 0 {
            left_us -= state.advance(left_us);
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
