//! `tegu power helper`: the process behind tegu-clocks.service.

use clap::Args;
use std::path::PathBuf;

use super::Where;
use crate::app::power::{end_asked, hurry};
use crate::power::clocks::Actuator;
use crate::power::helper::{Helper, listen};
use crate::power::modes::{Modes, SystemPrograms};
use crate::power::wire::{LEDGER, SOCKET};
use crate::units::Result;

/// Arguments.
#[derive(Debug, Args)]
pub struct HelperArgs {
    /// Unix socket to listen on
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    /// File that says what is held; what an earlier helper left in it is put back first
    #[arg(long, value_name = "FILE", default_value = LEDGER)]
    state: PathBuf,
    /// Only put back what an earlier helper left, and leave
    #[arg(long)]
    heal: bool,
    #[command(flatten)]
    place: Where,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
One client at a time holds clocks. Everything goes back when it says so, falls silent for longer than its lease, or is gone;
when the helper ends; and after a crash when the helper, or --heal, is next run. A node that someone else has changed since is
left alone.

Examples:
  tegu power helper
  tegu power helper --heal
  tegu power helper --root tree --socket clocks.sock --state clocks.json";

/// Serves until a signal ends it.
pub fn run(args: &HelperArgs) -> Result<()> {
    let site = args.place.open()?;
    let nvidia = site.nvidia().map_err(|e| log::info!("{e}")).ok();
    // Before the first write: a signal in between must not end the process with clocks changed.
    let stop = end_asked()?;
    let actuator = Actuator::open(site.nodes.clone(), nvidia, &args.state)?;
    if args.heal {
        return Ok(());
    }
    let listener = listen(&args.socket)?;
    hurry();
    // The unit's sandbox is a mount namespace, in which nvpmodel does nothing and says that all is well.
    let modes = Modes::new(site.nodes, Box::new(SystemPrograms), true);
    let ended = Helper::new(actuator, modes).serve(listener, stop);
    drop(std::fs::remove_file(&args.socket));
    ended
}
