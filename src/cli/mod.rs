//! The command line: arguments in, text or one JSON object out.
//!
//! Standard output carries the answer and nothing else; notes, progress and errors go to standard error. An error is
//! one line, and its kind is the exit code.

mod args;
mod aside;
mod bench_report;
pub mod daemon;
mod llama;
mod out;
mod pack;
mod perplexity;
mod resolve;
mod synth;
mod tensors;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::observe::{self, Verbosity};
use crate::units::{Error, Result};

use args::Common;
use out::Out;

/// Part of every `--help`: what the process says with its exit code.
pub const EXIT_CODES: &str = "\
Exit codes:
  0    done
  2    bad input: a flag, a file, or a field in it; one line on standard error names it
  3    it does not fit: memory or context length
  64   not in this version
  101  a bug in Tegu: please report it
  130  interrupted";

/// An LLM runtime for NVIDIA Jetson Orin boards: MLA + MoE models on unified memory, a few watts.
#[derive(Debug, Parser)]
#[command(name = "tegu", version, after_long_help = EXIT_CODES, after_help = "Exit codes: see --help.")]
#[command(propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the effective settings and where each came from.
    #[command(after_long_help = "Examples:\n  tegu config\n  TEGU_THREADS=2 tegu config --json")]
    Config {
        /// One JSON object instead of TOML.
        #[arg(long)]
        json: bool,
    },
    /// Quantize a model into a GGUF that Tegu and llama.cpp load.
    Pack(pack::Args),
    /// Write a GGUF with random weights in the shape of a published model.
    Synth(synth::Args),
    /// Print a completion script for a shell.
    #[command(
        after_long_help = "Example:\n  tegu completions bash > ~/.local/share/bash-completion/completions/tegu"
    )]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// The `tegu` program.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(llama::rewrite(std::env::args_os())) {
        Ok(cli) => cli,
        Err(e) => {
            // Help goes to standard output with code 0, a usage error to standard error with code 2.
            drop(e.print());
            return ExitCode::from(e.exit_code() as u8);
        }
    };
    exit(dispatch(cli))
}

/// Reports an error and turns it into the exit code.
fn exit(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has what it wanted (`tegu … | head`).
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(e) => {
            observe::note(format_args!("tegu: {}", crate::units::one_line(&e.to_string())));
            ExitCode::from(e.exit_code())
        }
    }
}

fn dispatch(cli: Cli) -> Result<()> {
    let common = &cli.common;
    observe::init_log(common.verbosity(None));
    match &cli.command {
        Command::Config { json } => {
            let config = common.config(Vec::new())?;
            let mut out = Out::stdout();
            if *json { out.json(&out::config_json(&config)) } else { out.text(&config.to_string()) }
        }
        Command::Pack(args) => pack::pack(args),
        Command::Synth(args) => synth::synth(args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "tegu", &mut script);
            Out::stdout().text(&String::from_utf8_lossy(&script))
        }
    }
}

#[test]
fn the_argument_table_is_consistent() {
    Cli::command().debug_assert();
    // The settings' words for the log are those that the log knows.
    let words = crate::config::KEYS.iter().find(|k| k.name == "log").map(|k| k.kind.expected());
    assert_eq!(words, Some(format!("one of {}", Verbosity::NAMES.join(", "))));
}
