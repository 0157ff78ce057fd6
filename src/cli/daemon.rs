//! The daemon `tegud` as far as it goes in this version: settings and model are checked, nothing is served.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use super::args::{Common, Load};
use super::out::Out;
use super::{load, resolve};
use crate::app;
use crate::config::Config;
use crate::engine::{Budget, Event, Request};
use crate::observe;
use crate::sample::{SampleParams, Sampler};
use crate::units::{Error, Result};

/// Exit code for what a later version will do.
const NOT_HERE: u8 = 64;

/// The Tegu daemon. In this version it checks its settings and its model; it does not serve yet.
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
    load: Load,
    #[command(flatten)]
    common: Common,
}

const EXAMPLES: &str = "\
Examples:
  tegud --config tegu.toml --print-config
  tegud --check

Exit codes:
  0    done
  2    bad input: a flag, a file, or a field in it; one line on standard error names it
  3    it does not fit: memory or context length
  64   serving was asked for, which is not in this version";

/// The `tegud` program.
pub fn main() -> ExitCode {
    let daemon = match Daemon::try_parse() {
        Ok(d) => d,
        Err(e) => return super::usage(&e, "tegud"),
    };
    observe::init_log(daemon.common.verbosity(None));
    let done = daemon.common.config(daemon.load.overrides()).and_then(|config| daemon.run(&config));
    match done {
        Ok(false) => {
            observe::note(
                "tegud: serving over a socket is not in this version (try --check or --print-config)",
            );
            ExitCode::from(NOT_HERE)
        }
        done => super::exit(done.map(drop)),
    }
}

impl Daemon {
    /// Does what was asked for; false if that was nothing, which means to serve.
    fn run(&self, config: &Config) -> Result<bool> {
        if self.print_config {
            Out::stdout().text(&config.to_string())?;
        }
        if self.check {
            let model = resolve::model(self.load.model_flag.as_deref(), config)?;
            self.self_test(model, config)?;
        }
        Ok(self.print_config || self.check)
    }

    /// One token from the loaded model: weights, kernels and cache are all touched once.
    fn self_test(&self, model: PathBuf, config: &Config) -> Result<()> {
        let opened = app::prepare(self.load.options(model, config))?;
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

#[test]
fn the_argument_table_is_consistent() {
    use clap::CommandFactory;
    Daemon::command().debug_assert();
}
