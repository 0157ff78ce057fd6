//! `tegu power`: what the board measures, and what steers its clocks.

mod dry;
mod helper;
mod live;
mod modes;
mod profiles;
mod record;
mod status;
mod steer;
mod tune;

use clap::{Args, Subcommand};
use std::path::{Path, PathBuf};

use super::args::{Common, useless};
use crate::app::power::Site;
use crate::power::wire::SOCKET;
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
    /// Show the power profiles, one of them whole, or check your own.
    #[command(after_long_help = profiles::EXAMPLES)]
    Profiles(profiles::ProfilesArgs),
    /// Hold a profile's clocks until Ctrl-C, or dry-run it on a simulated board.
    #[command(after_long_help = steer::EXAMPLES)]
    Apply(Box<steer::ApplyArgs>),
    /// Give back every clock that the helper holds.
    Restore(steer::RestoreArgs),
    /// Find the best clocks and batch for a model, and write them as a profile.
    #[command(after_long_help = tune::EXAMPLES)]
    Tune(Box<tune::TuneArgs>),
    /// Write the board's sensors to a file over time.
    #[command(after_long_help = record::EXAMPLES)]
    Record(Box<record::RecordArgs>),
    /// Draw a recording as one page, and sum it up.
    #[command(after_long_help = record::REPORT_EXAMPLES)]
    Report(record::ReportArgs),
    /// Run the clock helper: the one process that writes clocks (as root, by tegu-clocks.service).
    #[command(after_long_help = helper::EXAMPLES)]
    Helper(helper::HelperArgs),
}

/// For a program that reads what is shown.
#[derive(Debug, Clone, Args)]
pub struct Shown {
    /// One JSON object on standard output
    #[arg(long)]
    pub json: bool,
}

/// Who is asked to set clocks, or about them.
#[derive(Debug, Clone, Args)]
pub struct Asked {
    /// The clock helper's socket
    #[arg(long = "helper", value_name = "PATH", default_value = SOCKET)]
    pub socket: PathBuf,
}

/// Which board is meant.
#[derive(Debug, Clone, Args)]
pub struct Where {
    /// A folder that stands for a board's / [default: this machine]
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
    /// A simulated board: sim:orin-nano-super, sim:orin-nx-16 or sim:agx-orin-64
    #[arg(long, value_name = "NAME", conflicts_with = "root")]
    board: Option<String>,
}

impl Asked {
    /// Refuses a helper that nobody would ask: no process moves a simulated board's clocks for this one.
    fn check(&self, place: &Where) -> Result<()> {
        match &place.board {
            Some(name) if self.socket != Path::new(SOCKET) => Err(useless("--helper", "a real board", name)),
            _ => Ok(()),
        }
    }
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
pub fn run(args: &PowerArgs, common: &Common) -> Result<()> {
    // Not more: a mistake in someone's own settings must keep no clocks from going back.
    common.only_if_named()?;
    match &args.verb {
        Verb::Status(args) => status::run(args),
        Verb::Mode(args) => modes::mode(args),
        Verb::Fan(args) => modes::fan(args),
        Verb::Profiles(args) => profiles::run(args),
        Verb::Apply(args) => steer::apply(args),
        Verb::Restore(args) => steer::restore(args),
        Verb::Tune(args) => tune::run(args, common),
        Verb::Record(args) => record::record(args),
        Verb::Report(args) => record::report(args),
        Verb::Helper(args) => helper::run(args),
    }
}
