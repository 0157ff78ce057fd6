//! The power room's pieces put together: which board, its sensors, and the signal that ends the clock helper.

use crate::power::nodes::{Nodes, RealNodes};
use crate::power::nvidia::{LIBRARIES, Nvidia};
use crate::power::sensors::Sensors;
use crate::power::types::Board;
use crate::units::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where a board's files come from, and what is known of it.
pub struct Site {
    /// The files.
    pub nodes: Arc<dyn Nodes>,
    /// The board.
    pub board: Board,
    /// Whether it is the machine that this runs on: only then NVML and NVIDIA's programs tell of it.
    pub is_here: bool,
}

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

    /// NVML, or why there is none.
    pub fn nvidia(&self) -> Result<Nvidia> {
        match self.is_here {
            true => Nvidia::open(&LIBRARIES),
            false => Err(Error::bad("NVML", "board", "this machine", "a tree of files")),
        }
    }

    /// The board's sensors, with NVML where it is there.
    pub fn sensors(&self) -> Sensors {
        let nvidia = self.nvidia().map_err(|e| log::info!("{e}")).ok();
        Sensors::open(self.nodes.clone(), &self.board).with_nvidia(nvidia)
    }
}

/// A signal that asks the process to end, as a question that any thread may ask.
pub fn end_asked() -> Result<Arc<dyn Fn() -> bool + Send + Sync>> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    ctrlc::set_handler(|| ASKED.store(true, Ordering::SeqCst))
        .map_err(|e| Error::io("signals", "take over", std::io::Error::other(e)))?;
    Ok(Arc::new(|| ASKED.load(Ordering::SeqCst)))
}
