//! The daemon `tegud`: `tegu serve` under the name that its service has, and what is checked before it is installed.

use std::process::ExitCode;

use clap::Parser;

use super::args::Common;
use super::load;
use super::out::Out;
use super::serve::{self, ServeArgs};
use crate::app::settings::{check_board, check_folders, settings};
use crate::app::{self, Options};
use crate::engine::{Budget, Event, Request};
use crate::observe;
use crate::sample::{SampleParams, Sampler};
use crate::units::{Error, Result};

/// The Tegu daemon: serves a model to local programs.
#[derive(Debug, Parser)]
#[command(name = "tegud", version, after_long_help = EXAMPLES, after_help = "Exit codes: see --help.")]
#[command(max_term_width = 110)]
struct Daemon {
    /// Print the effective settings, each with its origin, and leave
    #[arg(long)]
    print_config: bool,
    /// Load the model, print the memory plan, generate one token, and leave
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    serve: ServeArgs,
    #[command(flatten)]
    common: Common,
}

const EXAMPLES: &str = "\
Examples:
  tegud --config tegu.toml
  tegud --config tegu.toml --print-config
  tegud --check

Exit codes:
  0    done
  2    bad input: a flag, a file, or a field in it; one line on standard error names it
  3    it does not fit: memory or context length
  70   the engine broke: the service manager starts it again";

/// The `tegud` program.
pub fn main() -> ExitCode {
    let daemon: Daemon = match super::parse(std::env::args_os(), "tegud") {
        Ok(daemon) => daemon,
        Err(code) => return code,
    };
    observe::init_log(daemon.common.verbosity(None));
    super::exit(daemon.run())
}

impl Daemon {
    fn run(&self) -> Result<()> {
        if !self.print_config && !self.check {
            return serve::run(&self.serve, &self.common);
        }
        let config = serve::config(&self.serve, &self.common)?;
        // What could be refused at the start of serving is refused here too.
        settings(&config)?;
        check_folders(&config)?;
        check_board(&config)?;
        if self.print_config {
            Out::stdout().text(&config.to_string())?;
        }
        if self.check {
            let shelf = serve::shelf(&self.serve, &config, None, None)?;
            let (_, path) = shelf.models()?.into_iter().next().ok_or_else(|| {
                Error::bad(config.text("serve.models"), "serve.models", "a folder with a model", "none in it")
            })?;
            Daemon::self_test(Options { path, ..serve::options(&self.serve, &config) })?;
        }
        Ok(())
    }

    /// One token from the loaded model: weights, kernels and cache are all touched once.
    fn self_test(options: Options) -> Result<()> {
        let opened = app::prepare(options)?;
        let text = load::text(&opened)?;
        let path = opened.source.path().to_owned();
        let loaded = load::load(opened)?;
        let mut app = loaded.app;
        let prompt = text.tokenizer.encode("Hello", false, true)?;
        let sampler = Sampler::new(SampleParams { logprobs: Some(0), ..SampleParams::greedy() })?;
        let seq = app.engine.open(Request::new(prompt, sampler, 1, Vec::new()), None)?;
        let mut token = None;
        while token.is_none() {
            let events = app.engine.step(&Budget::default())?;
            token = events.iter().find_map(|e| match e {
                Event::Token { sampled, .. } => Some((sampled.token, sampled.logprob)),
                _ => None,
            });
        }
        let stats = app.engine.stats(seq).unwrap_or_default();
        let (id, logprob) = token.expect("the loop ends with a token");
        if !logprob.is_finite() {
            return Err(Error::bad(path, "self-test", "a finite log-probability", logprob));
        }
        Out::stdout().text(&format!(
            "ok: loaded in {:.2} s, token {id} {:?} after {:.1} ms, {} threads, {}\n",
            loaded.took.as_secs_f64(),
            text.tokenizer.decode(&[id], false),
            stats.ttft.as_secs_f64() * 1e3,
            app.threads,
            app.kernels
        ))
    }
}

/// The table of its arguments.
#[cfg(test)]
pub fn command() -> clap::Command {
    <Daemon as clap::CommandFactory>::command()
}

#[test]
fn the_argument_table_is_consistent() {
    super::numbers::negative_too(command()).debug_assert();
}

/// A refused value is told by the flag that set it.
#[test]
fn settings_name_the_flags_that_there_are() {
    use crate::config::KEYS;
    let args = "tegud --socket a --tcp b --models c -c 1 --idle-unload 1 --board off --profile d --clocks no -m e -t 1 \
                --spin-us 1 --backend cpu --kv f16 --expert-budget 1";
    let daemon = Daemon::try_parse_from(args.split_whitespace()).unwrap();
    let overrides = daemon.serve.overrides().unwrap();
    assert_eq!(overrides.len(), 14);
    for (name, _) in overrides {
        let key = KEYS.iter().find(|k| k.name == name).unwrap();
        let flag = key.flag();
        assert!(command().get_arguments().any(|a| a.get_long() == Some(&flag)), "{name}: --{flag}");
    }
}
