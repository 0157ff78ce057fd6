//! The daemon `tegud` as far as it goes in this version.

use std::process::ExitCode;

use clap::Parser;

use super::args::Common;
use super::out::Out;
use crate::observe;

/// Exit code for what a later version will do (EX_USAGE of sysexits.h).
const NOT_HERE: u8 = 64;

/// The Tegu daemon. In this version it checks its settings and its model; it does not serve yet.
#[derive(Debug, Parser)]
#[command(name = "tegud", version, after_long_help = super::EXIT_CODES, after_help = "Exit codes: see --help.")]
struct Daemon {
    #[command(flatten)]
    common: Common,
    /// Print the effective settings, each with its origin, and leave
    #[arg(long)]
    print_config: bool,
}

/// The `tegud` program.
pub fn main() -> ExitCode {
    let daemon = match Daemon::try_parse() {
        Ok(d) => d,
        Err(e) => {
            drop(e.print());
            return ExitCode::from(e.exit_code() as u8);
        }
    };
    observe::init_log(daemon.common.verbosity(None));
    let config = match daemon.common.config(Vec::new()) {
        Ok(c) => c,
        Err(e) => return super::exit(Err(e)),
    };
    if daemon.print_config {
        return super::exit(Out::stdout().text(&config.to_string()));
    }
    observe::note("tegud: serving over a socket is not in this version; --print-config checks the settings");
    ExitCode::from(NOT_HERE)
}
