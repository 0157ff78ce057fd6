//! The command line: arguments in, text or one JSON object out.
//!
//! Standard output carries the answer and nothing else; notes, progress and errors go to standard error. An error is
//! one line, and its kind is the exit code.

mod answer;
mod args;
mod aside;
mod bench;
mod bench_cuda;
mod bench_kernels;
mod bench_report;
mod chat;
pub mod daemon;
mod daemons;
mod doctor;
mod inspect;
mod kernels;
mod llama;
mod load;
mod logits;
mod numbers;
mod out;
mod pack;
mod perplexity;
mod power;
mod ppl;
mod remote;
mod resolve;
mod routes;
mod run;
mod serve;
mod synth;
mod tensors;
mod top;

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::observe;
use crate::units::{Error, Result};

use args::Common;
use out::Out;

/// Part of every `--help`: what the process says with its exit code.
pub const EXIT_CODES: &str = "\
Exit codes:
  0    done
  2    bad input: a flag, a file, or a field in it; one line on standard error names it
  3    it does not fit: memory or context length
  70   the engine broke: the line on standard error says why
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
    /// Answer a prompt, or chat at the terminal.
    #[command(after_long_help = run::EXAMPLES)]
    Run(Box<run::RunArgs>),
    /// Serve a model to local programs over HTTP.
    #[command(after_long_help = serve::EXAMPLES)]
    Serve(Box<serve::ServeArgs>),
    /// Chat with a running daemon.
    #[command(after_long_help = chat::HELP)]
    Chat(Box<chat::ChatArgs>),
    /// Show what a running daemon answers.
    Ps(Box<daemons::PsArgs>),
    /// Stop one of a daemon's requests.
    Stop(Box<daemons::StopArgs>),
    /// Show the models that a daemon serves by name.
    List(Box<daemons::ListArgs>),
    /// Compute logits (and hidden states) of given tokens into a safetensors file.
    #[command(after_long_help = logits::EXAMPLES)]
    Logits(Box<logits::LogitsArgs>),
    /// Measure the perplexity of a text.
    #[command(after_long_help = ppl::EXAMPLES)]
    Ppl(Box<ppl::PplArgs>),
    /// Show what a model file holds and what running it takes.
    #[command(after_long_help = inspect::EXAMPLES)]
    Inspect(Box<inspect::InspectArgs>),
    /// Measure tokens a second.
    #[command(after_long_help = bench::EXAMPLES)]
    Bench(Box<bench::BenchArgs>),
    /// Watch a board: power, heat, clocks, memory, and what the daemon does.
    #[command(after_long_help = top::HELP)]
    Top(Box<top::TopArgs>),
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
    /// Check this machine for everything that Tegu uses, and say what to do.
    #[command(after_long_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Show the board's sensors, its power modes and profiles; tune, record and steer it.
    Power(power::PowerArgs),
    /// Compile the CUDA kernels ahead of time.
    #[command(after_long_help = kernels::EXAMPLES)]
    Kernels(kernels::KernelsArgs),
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
    match parse(std::env::args_os(), "tegu") {
        Ok(cli) => exit(dispatch(cli)),
        Err(code) => code,
    }
}

/// Reads a program's arguments, llama.cpp's spellings among them; else says why not, and with which code to leave.
fn parse<P: Parser>(args: impl Iterator<Item = OsString>, program: &str) -> std::result::Result<P, ExitCode> {
    let args = llama::rewrite(args).map_err(|e| exit(Err(e)))?;
    let matches = numbers::negative_too(P::command()).try_get_matches_from(args);
    matches.and_then(|m| P::from_arg_matches(&m)).map_err(|e| usage(&e, program))
}

/// What the parser stopped at: help goes to standard output with code 0, a usage error to standard error in one line
/// with code 2.
fn usage(e: &clap::Error, program: &str) -> ExitCode {
    match e.use_stderr() {
        true => observe::complain(format_args!("{program}: {}", usage_error(&e.to_string()))),
        false => drop(e.print()),
    }
    ExitCode::from(e.exit_code() as u8)
}

/// A usage error without its several lines of advice.
fn usage_error(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
    let said: Vec<&str> =
        lines.take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more")).collect();
    let said = numbers::in_words(&said.join(" "));
    crate::units::one_line(&format!("{}; see --help", said.strip_prefix("error: ").unwrap_or(&said)))
}

/// Reports an error and turns it into the exit code.
fn exit(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has what it wanted (`tegu … | head`).
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(e) => {
            observe::complain(format_args!("tegu: {}", crate::units::message_line(&e.to_string())));
            ExitCode::from(e.exit_code())
        }
    }
}

fn dispatch(cli: Cli) -> Result<()> {
    let common = &cli.common;
    observe::init_log(common.verbosity(None));
    match &cli.command {
        Command::Run(args) => run::run(args, common),
        Command::Serve(args) => serve::run(args, common),
        Command::Chat(args) => chat::run(args, common),
        Command::Ps(args) => daemons::ps(args, common),
        Command::Stop(args) => daemons::stop(args, common),
        Command::List(args) => daemons::list(args, common),
        Command::Logits(args) => logits::run(args, common),
        Command::Ppl(args) => ppl::run(args, common),
        Command::Inspect(args) => inspect::run(args, common),
        Command::Bench(args) => bench::run(args, common),
        Command::Top(args) => top::run(args, common),
        Command::Config { json } => {
            let config = common.config(Vec::new())?;
            let mut out = Out::stdout();
            if *json { out.json(&out::config_json(&config)) } else { out.text(&config.to_string()) }
        }
        Command::Pack(args) => common.config(Vec::new()).and_then(|_| pack::pack(args)),
        Command::Synth(args) => common.config(Vec::new()).and_then(|_| synth::synth(args)),
        Command::Doctor(args) => doctor::run(args, common),
        Command::Power(args) => power::run(args, common),
        Command::Kernels(args) => kernels::run(args, common),
        Command::Completions { shell } => {
            common.only_if_named()?;
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "tegu", &mut script);
            Out::stdout().text(&String::from_utf8_lossy(&script))
        }
    }
}

/// Reads a file that cannot sensibly be larger than `max_bytes`.
fn small_file(file: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let opened = crate::units::open_file(file)?;
    let mut bytes = Vec::new();
    opened.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|e| Error::io(file, "read", e))?;
    if bytes.len() as u64 > max_bytes {
        return Err(Error::bad(file, "size", format!("at most {max_bytes} bytes"), "more"));
    }
    Ok(bytes)
}

/// As [`small_file`], for UTF-8 text.
fn text_file(file: &Path, max_bytes: u64) -> Result<String> {
    String::from_utf8(small_file(file, max_bytes)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::bad(file, "text", "UTF-8", format!("another byte at offset {at}"))
    })
}

#[test]
fn the_argument_table_is_consistent() {
    numbers::negative_too(Cli::command()).debug_assert();
    // The settings' words for the log are those that the log knows.
    let words = crate::config::KEYS.iter().find(|k| k.name == "log").map(|k| k.kind.expected());
    assert_eq!(words, Some(format!("one of {}", observe::Verbosity::NAMES.join(", "))));
}
