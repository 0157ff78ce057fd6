//! `tegu power record` and `tegu power report`: what a board did over time, as a file and as a page.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;

use super::Where;
use super::dry::{self, Dry};
use crate::app::power::end_asked;
use crate::cli::out::Out;
use crate::power::recording::{Recording, Writer};
use crate::power::report::{Summary, html};
use crate::power::trial::{self, Row};
use crate::units::{Error, Result};

/// Arguments of `tegu power record`.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// File to write; an existing one is replaced
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Stop after so many seconds [default: on Ctrl-C; 600 on a simulated board]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    seconds: Option<u64>,
    /// Milliseconds between two samples; the rails' meters change every 430
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    every: u64,
    /// Profile by which a simulated board is steered [default: none, the stock mode]
    #[arg(long, value_name = "NAME", requires = "board", conflicts_with = "root")]
    profile: Option<String>,
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    dry: Dry,
}

/// Examples for `tegu power record --help`.
pub const EXAMPLES: &str = "\
The file is CSV, written as it goes: what is there after a power cut is good. Memory clocks need root.

Examples:
  tegu power record -o night.csv
  tegu power record -o chat.csv --board sim:orin-nano-super --work chat --profile efficiency
  tegu power record -o hot.csv --board sim:orin-nano-super --work busy --ambient 45 --profile balanced --seconds 3600";

/// Arguments of `tegu power report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// A recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Page to write; an existing one is replaced [default: only print the sums]
    #[arg(short, long, value_name = "HTML")]
    output: Option<PathBuf>,
}

/// Examples for `tegu power report --help`.
pub const REPORT_EXAMPLES: &str = "\
The page is one file: curves and sums, no script, nothing from elsewhere.

Example:
  tegu power report night.csv -o night.html";

/// A file that is written line by line.
struct Lines<'a> {
    path: &'a Path,
    file: std::fs::File,
}

impl Lines<'_> {
    fn create(path: &Path) -> Result<Lines<'_>> {
        let file = std::fs::File::create(path).map_err(|e| Error::io(path, "create", e))?;
        Ok(Lines { path, file })
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io(self.path, "write", e))
    }
}

/// Records.
pub fn record(args: &RecordArgs) -> Result<()> {
    let site = args.place.open()?;
    let mut facts = vec![("board", site.board.title())];
    let mut lines = Lines::create(&args.output)?;
    let n = match &args.place.board {
        Some(name) => {
            facts.push(("work", args.dry.work().to_owned()));
            facts.push(("profile", args.profile.clone().unwrap_or_else(|| "none (stock)".into())));
            simulate(args, name, Writer::new(&facts), &mut lines)?
        }
        None => watch(args, Writer::new(&facts), &mut lines)?,
    };
    Out::stdout().text(&format!("{}: {n} samples\n", args.output.display()))
}

/// Samples this board until it is enough.
fn watch(args: &RecordArgs, mut writer: Writer, lines: &mut Lines) -> Result<u64> {
    let stop = end_asked()?;
    let mut sensors = args.place.open()?.sensors();
    let started = Instant::now();
    let every = Duration::from_millis(args.every);
    let mut n = 0;
    while !stop() && args.seconds.is_none_or(|s| started.elapsed() < Duration::from_secs(s)) {
        lines.write(&writer.line(&sensors.sample(), None, None, ""))?;
        n += 1;
        // Each sample has its own place in time, so that slow readings do not add up.
        let due = every * n as u32;
        while !stop() && started.elapsed() < due {
            std::thread::sleep((due - started.elapsed().min(due)).min(Duration::from_millis(100)));
        }
    }
    Ok(n)
}

/// Runs a simulated board at accelerated time.
fn simulate(args: &RecordArgs, name: &str, mut writer: Writer, lines: &mut Lines) -> Result<u64> {
    let seconds = args.seconds.unwrap_or(600);
    let board = args.dry.board(name)?;
    let policy = dry::policy(args.profile.as_deref(), &args.place)?;
    let (mut n, mut failed, mut next_us) = (0, None, 0);
    let end_us = seconds * 1_000_000;
    let mut each = |row: Row| {
        if failed.is_none() && row.sample.at_us >= next_us && row.sample.at_us <= end_us {
            next_us = row.sample.at_us + args.every.saturating_sub(250) * 1_000;
            n += 1;
            let line = writer.line(&row.sample, Some(row.phase), Some(row.output_tokens), &row.why);
            failed = lines.write(&line).err();
        }
    };
    trial::watch(&board, args.dry.model(), &args.dry.jobs(seconds), end_us, &policy, &mut each);
    failed.map_or(Ok(n), Err)
}

/// Draws a recording.
pub fn report(args: &ReportArgs) -> Result<()> {
    let recording = Recording::read(&args.file)?;
    let sum = Summary::of(&recording);
    let mut text = format!("{} samples over {:.0} s\n", recording.moments.len(), sum.seconds);
    if let Some(mean) = sum.mean_w() {
        text += &format!("{:.0} J, {mean:.2} W on average over {:.0} s\n", sum.energy_j, sum.metered_s);
    }
    if let Some((watts, at_s)) = sum.peak {
        text += &format!("{watts:.1} W at most, at {at_s:.0} s\n");
    }
    if let Some((celsius, at_s)) = sum.hottest {
        text += &format!("{celsius:.1} °C at most, at {at_s:.0} s\n");
    }
    if let Some(tokens) = sum.tokens {
        text += &format!("{tokens:.0} tokens, {:.3} J each\n", sum.energy_j / tokens);
    }
    if let Some(output) = &args.output {
        std::fs::write(output, html(&recording)).map_err(|e| Error::io(output, "write", e))?;
        text += &format!("{}: written\n", output.display());
    }
    Out::stdout().text(&text)
}
