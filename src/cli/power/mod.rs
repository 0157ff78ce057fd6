//! `tegu power`: what the board measures, and what steers its clocks.

mod helper;
mod modes;
mod status;

use clap::{Args, Subcommand};
use std::path::PathBuf;

use crate::app::power::Site;
use crate::units::Result;

/// Arguments of `tegu power`.
#[derive(Debug, Args)]
pub struct PowerArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show the board's sensors, limits, and who holds its clocks.
    #[command(after_long_help = status::EXAMPLES)]
    Status(status::StatusArgs),
    /// Show the board's power modes, or switch to one (as root).
    Mode(modes::ModeArgs),
    /// Switch the fan's profile (as root).
    Fan(modes::FanArgs),
    /// Run the clock helper: the one process that writes clocks (as root, by tegu-clocks.service).
    #[command(after_long_help = helper::EXAMPLES)]
    Helper(helper::HelperArgs),
}

/// Which board is meant.
#[derive(Debug, Clone, Args)]
pub struct Where {
    /// A folder that stands for a board's / [default: this machine]
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
    /// A simulated board, such as sim:orin-nano-super
    #[arg(long, value_name = "NAME", conflicts_with = "root")]
    board: Option<String>,
}

impl Where {
    /// The board.
    pub fn open(&self) -> Result<Site> {
        match &self.board {
            Some(name) => Site::simulated(name),
            None => Site::open(self.root.as_deref()),
        }
    }
}

/// Runs the command.
pub fn run(args: &PowerArgs) -> Result<()> {
    match &args.verb {
        Verb::Status(args) => status::run(args),
        Verb::Mode(args) => modes::mode(args),
        Verb::Fan(args) => modes::fan(args),
        Verb::Helper(args) => helper::run(args),
    }
}
