//! What a person sees beside the answer: log set-up, notes and progress. Everything goes to standard error, so that
//! standard output carries only what a program may read.

mod progress;

pub use progress::{Progress, Unit};

use std::fmt;
use std::io::Write;

/// How much the log says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors only.
    Quiet,
    /// Warnings too: the default.
    Normal,
    /// What is being done, with sizes and times.
    Verbose,
    /// Everything.
    Debug,
}

impl Verbosity {
    /// The names that settings use, in order.
    pub const NAMES: [&'static str; 4] = ["error", "warn", "info", "debug"];

    /// From a name of [`Verbosity::NAMES`].
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Quiet, Self::Normal, Self::Verbose, Self::Debug];
        all.into_iter().zip(Self::NAMES).find_map(|(v, n)| (n == name).then_some(v))
    }

    fn filter(self) -> log::LevelFilter {
        match self {
            Self::Quiet => log::LevelFilter::Error,
            Self::Normal => log::LevelFilter::Warn,
            Self::Verbose => log::LevelFilter::Info,
            Self::Debug => log::LevelFilter::Debug,
        }
    }
}

/// Sets the log up, once for the process; a second call only changes the level.
pub fn init_log(verbosity: Verbosity) {
    let level = verbosity.filter();
    // journald reads a priority at a line's start, and adds time and name itself (sd-daemon(3)).
    let to_journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let built = env_logger::Builder::new()
        // Dependencies speak only when something is wrong; their chatter is not about the user's model.
        .filter_level(log::LevelFilter::Warn.min(level))
        .filter_module("tegu", log::LevelFilter::Debug)
        .format(move |out, record| {
            if to_journal {
                let priority = match record.level() {
                    log::Level::Error => 3,
                    log::Level::Warn => 4,
                    log::Level::Info => 6,
                    log::Level::Debug | log::Level::Trace => 7,
                };
                return writeln!(out, "<{priority}>{}", record.args());
            }
            writeln!(out, "tegu: {}: {}", record.level().as_str().to_lowercase(), record.args())
        })
        .try_init();
    drop(built);
    log::set_max_level(level);
}

/// Writes one line for the person at the terminal, unless only errors are wanted.
pub fn note(line: impl fmt::Display) {
    if log::max_level() > log::LevelFilter::Error {
        complain(line);
    }
}

/// Writes one line whatever the level: an error. A closed standard error is no reason to stop.
pub fn complain(line: impl fmt::Display) {
    drop(writeln!(std::io::stderr().lock(), "{line}"));
}

#[test]
fn verbosity_names_match_their_levels() {
    let filters: Vec<String> =
        Verbosity::NAMES.iter().map(|n| Verbosity::from_name(n).expect(n).filter().to_string()).collect();
    assert_eq!(filters.join(" ").to_lowercase(), Verbosity::NAMES.join(" "));
    assert_eq!(Verbosity::from_name("loud"), None);
}
