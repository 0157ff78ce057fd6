//! A board to look at: this machine's, or a simulated one; its sensors, power modes and how busy its cores are, in one piece.

use crate::app::power::{self, Site};
use crate::power::clocks::EMC_POINTS_HZ;
use crate::power::cores::Cores;
use crate::power::energy::Method;
use crate::power::governor::Ladder;
use crate::power::modes::{Modes, Programs, SystemPrograms};
use crate::power::nodes::{Nodes, number, text};
use crate::power::nvidia::Nvidia;
use crate::power::sensors::Sensors;
use crate::power::sim::{self, SimBoard};
use crate::power::status::Status;
use crate::power::types::{Board, Sample};
use crate::units::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// What stands for a board runs none of its programs.
struct NoPrograms;

impl Programs for NoPrograms {
    fn run(&mut self, program: &str, _: &[&str]) -> std::io::Result<(bool, String)> {
        Err(std::io::Error::other(format!("this board is not the machine that {program} would run on")))
    }
}

/// A board, and all that can be seen of it.
pub struct Looker {
    nodes: Arc<dyn Nodes>,
    sim: Option<Arc<SimBoard>>,
    sensors: Sensors,
    cores: Cores,
    modes: Modes,
}

impl Looker {
    /// `name`: "auto" for this machine, "sim:…" for a simulated board, "tree:FOLDER" for a tree of plain files.
    ///
    /// # Errors
    /// For a name that is neither, and for a board whose software is refused (JetPack 5).
    pub fn open(name: &str) -> Result<Looker> {
        if name.starts_with("sim:") {
            let sim = Arc::new(SimBoard::named(name, sim::Options::default())?);
            let board = sim.board();
            let modes = Modes::new(sim.clone(), Box::new(NoPrograms), false);
            let sensors = Sensors::open(sim.clone(), &board);
            return Ok(Looker {
                nodes: sim.clone(),
                sim: Some(sim),
                sensors,
                cores: Cores::default(),
                modes,
            });
        }
        if let Some(root) = name.strip_prefix("tree:") {
            return Looker::under(Path::new(root));
        }
        if name != "auto" {
            let expected =
                "auto, off, a simulated board (sim:orin-nano-super), or a tree of files (tree:FOLDER)";
            return Err(Error::bad("settings", "power.board", expected, format!("{name:?}")));
        }
        Looker::of(Site::open(None)?)
    }

    /// A tree of plain files in a folder that stands for a board's `/`.
    pub fn under(root: &Path) -> Result<Looker> {
        Looker::of(Site::open(Some(root))?)
    }

    pub(super) fn of(site: Site) -> Result<Looker> {
        site.board.check()?;
        let (sensors, nodes) = (site.sensors(), site.nodes.clone());
        let programs: Box<dyn Programs> = match site.is_here {
            true => Box::new(SystemPrograms),
            false => Box::new(NoPrograms),
        };
        let modes = Modes::new(nodes.clone(), programs, false);
        Ok(Looker { nodes, sim: None, sensors, cores: Cores::default(), modes })
    }

    /// The board.
    pub fn board(&self) -> &Board {
        self.sensors.board()
    }

    /// Its files and its clock.
    pub fn nodes(&self) -> &Arc<dyn Nodes> {
        &self.nodes
    }

    /// How energy is measured here, if it is.
    pub fn method(&mut self) -> Option<Method> {
        let total_mw = self.sample().total_mw;
        power::method(&self.sensors, total_mw)
    }

    /// A GPU's own count of its energy in mJ.
    pub fn counter_mj(&self) -> Option<u64> {
        self.sensors.nvidia().and_then(Nvidia::energy_mj)
    }

    /// The simulation, if it is one.
    pub fn sim(&self) -> Option<&Arc<SimBoard>> {
        self.sim.as_ref()
    }

    /// Reads the sensors.
    pub fn sample(&mut self) -> Sample {
        self.sensors.sample()
    }

    /// The power modes' names, and the one in force.
    pub fn modes(&self) -> (Vec<String>, Option<String>) {
        let Ok(table) = self.modes.table() else { return (Vec::new(), None) };
        let current = self.modes.current();
        let name = table.modes.iter().find(|m| Some(m.id) == current).map(|m| m.name.clone());
        (table.modes.into_iter().map(|m| m.name).collect(), name)
    }

    /// Switches the power mode from this process.
    pub fn switch_mode(&mut self, name: &str) -> Result<String> {
        self.modes.switch(name)
    }

    /// The clocks that the board can be set to.
    pub fn ladder(&self) -> Ladder {
        let found = self.sensors.found();
        let Some(gpu) = &found.gpu else { return Ladder::default() };
        let table = text(self.nodes.as_ref(), &format!("{gpu}/available_frequencies")).unwrap_or_default();
        let table: Vec<u64> = table.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        // The mode's own ceiling, where it tells: the node may hold a cap of ours.
        let mode = self.modes.table().ok().zip(self.modes.current());
        let of_mode = mode.and_then(|(t, id)| t.modes.into_iter().find(|m| m.id == id)?.gpu_max_hz);
        let ceiling = of_mode.or_else(|| number(self.nodes.as_ref(), &format!("{gpu}/max_freq")));
        let emc: &[u64] = if self.board().kind.is_orin() { &EMC_POINTS_HZ } else { &[] };
        Ladder::new(&table, ceiling, emc)
    }

    /// Looks at everything once.
    pub fn look(&mut self) -> Status {
        let sample = self.sample();
        let (modes, mode) = self.modes();
        Status {
            board: self.board().title(),
            mode,
            modes,
            sample,
            cores_permille: self.cores.look(self.nodes.as_ref()),
            ..Status::default()
        }
    }
}

/// A board that is looked at without a daemon.
pub struct Alone {
    looker: Looker,
    driven: Option<super::driven::Driven>,
}

impl Alone {
    /// As [`Looker::open`].
    pub fn open(name: &str) -> Result<Alone> {
        Ok(Alone::of(Looker::open(name)?))
    }

    /// As [`Looker::under`].
    pub fn under(root: &Path) -> Result<Alone> {
        Ok(Alone::of(Looker::under(root)?))
    }

    fn of(looker: Looker) -> Alone {
        let driven = looker.sim().map(|sim| super::driven::Driven::new(sim.clone()));
        Alone { looker, driven }
    }

    /// Looks at everything once.
    pub fn look(&mut self) -> Status {
        if let Some(driven) = &self.driven {
            driven.pass();
        }
        self.looker.look()
    }

    /// Switches the power mode, with the rights of this process.
    pub fn switch_mode(&mut self, name: &str) -> Result<String> {
        self.looker.switch_mode(name)
    }
}
