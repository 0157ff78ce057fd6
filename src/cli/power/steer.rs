//! `tegu power apply` and `tegu power restore`: a profile in force for as long as the command runs, or a dry run of it.

use std::time::{Duration, Instant};

use clap::Args;

use super::dry::{self, Dry};
use super::{Asked, Where};
use crate::app::power::end_asked;
use crate::cli::out::{self, Out};
use crate::power::governor::{self, Demand, Inputs, Ladder};
use crate::power::nodes::text;
use crate::power::profile::{Profile, board_key, mhz_text};
use crate::power::trial::{self, Outcome, Policy};
use crate::power::types::{Clocks, Phase, Sample};
use crate::power::wire::{Client, LEASE_MS};
use crate::units::Result;

/// Arguments of `tegu power apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// The profile: a name, or a file's path
    #[arg(value_name = "PROFILE")]
    profile: String,
    /// Stop after so many seconds [default: on Ctrl-C; an hour on a simulated board]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    seconds: Option<u64>,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    dry: Dry,
}

/// Examples for `tegu power apply --help`.
pub const EXAMPLES: &str = "\
Holds a profile's clocks through the clock helper for whatever runs on the board, until Ctrl-C; then everything goes back.
From outside, prefill and decode look alike: a busy GPU gets the profile's decode clocks. The daemon, which knows, steers itself.
On a simulated board it is a dry run: the profile beside the stock mode, with the same work.

Examples:
  tegu power apply efficiency
  tegu power apply mine.toml --seconds 600
  tegu power apply battery --board sim:orin-nano-super --work chat";

/// Arguments of `tegu power restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    #[command(flatten)]
    asked: Asked,
}

/// How often clocks are decided.
const EVERY: Duration = Duration::from_millis(500);
/// A GPU that is busier than this works.
const BUSY_PERMILLE: u16 = 200;

/// Applies a profile.
pub fn apply(args: &ApplyArgs) -> Result<()> {
    args.asked.check(&args.place)?;
    match &args.place.board {
        Some(name) => dry_run(args, name),
        None => hold(args),
    }
}

/// Gives everything back that the helper holds.
pub fn restore(args: &RestoreArgs) -> Result<()> {
    Client::connect(&args.asked.socket)?.release()?;
    Out::stdout().text("clocks are the system's again\n")
}

fn hold(args: &ApplyArgs) -> Result<()> {
    let site = args.place.open()?;
    let profile = Profile::find(&args.profile, board_key(&site.board))?;
    let mut client = Client::connect(&args.asked.socket)?;
    let stop = end_asked()?;
    let mut sensors = site.sensors();
    let mut out = Out::stdout();
    let ladder = ladder(&sensors.found().gpu, site.nodes.as_ref());
    let mut state = governor::State::default();
    let (mut set, mut told) = (None, String::new());
    let started = Instant::now();
    while !stop() && args.seconds.is_none_or(|s| started.elapsed() < Duration::from_secs(s)) {
        let sample = sensors.sample();
        let phase = phase(&sample);
        let inputs =
            Inputs { now_us: site.nodes.now_us(), sample: Some(&sample), phase, demand: Demand::default() };
        let (decision, next) = governor::decide(&profile, &ladder, &state, &inputs);
        state = next;
        if set != Some(decision.clocks) || !client.beat()? {
            for outcome in client.set(&decision.clocks, LEASE_MS)? {
                log::info!("{outcome:?}");
            }
            set = Some(decision.clocks);
        }
        let why: Vec<String> = decision.why.iter().map(ToString::to_string).collect();
        let line = format!(
            "{}: {}{}{}",
            phase.name(),
            clocks_text(&decision.clocks),
            if why.is_empty() { "" } else { "; " },
            why.join("; ")
        );
        if line != told {
            out.text(&format!("{:6.1} s  {line}\n", started.elapsed().as_secs_f64()))?;
            told = line;
        }
        std::thread::sleep(EVERY);
    }
    client.release()?;
    out.text("clocks are the system's again\n")
}

/// What an onlooker can tell: a busy GPU works, and one that does not say may.
fn phase(sample: &Sample) -> Phase {
    match sample.gpu_load_permille {
        Some(load) if load < BUSY_PERMILLE => Phase::Idle,
        _ => Phase::Decode,
    }
}

/// The clocks of the board's GPU up to the ceiling that is set now, and the memory's points.
fn ladder(gpu: &Option<String>, nodes: &dyn crate::power::nodes::Nodes) -> Ladder {
    let file = |name: &str| gpu.as_ref().and_then(|g| text(nodes, &format!("{g}/{name}")));
    let table: Vec<u64> = file("available_frequencies")
        .map(|t| t.split_whitespace().filter_map(|w| w.parse().ok()).take(64).collect())
        .unwrap_or_default();
    let ceiling = file("max_freq").and_then(|t| t.parse().ok());
    Ladder::new(&table, ceiling, &crate::power::sim::spec::EMC_HZ)
}

fn clocks_text(c: &Clocks) -> String {
    let part = |name: &str, hz: Option<u64>| hz.map(|hz| format!("{name} {} MHz", mhz_text(hz)));
    let parts: Vec<String> = [
        part("GPU at most", c.gpu_cap_hz),
        part("GPU at least", c.gpu_floor_hz),
        part("memory", c.emc_floor_hz),
        part("memory at most", c.emc_cap_hz),
    ]
    .into_iter()
    .flatten()
    .collect();
    if parts.is_empty() { "clocks left to the system".into() } else { parts.join(", ") }
}

fn dry_run(args: &ApplyArgs, name: &str) -> Result<()> {
    let seconds = args.seconds.unwrap_or(3600);
    let run = |policy: &Policy| -> Result<Outcome> {
        let board = args.dry.board(name)?;
        Ok(trial::run(&board, args.dry.model(), &args.dry.jobs(seconds), seconds * 1_000_000, policy))
    };
    let ours = run(&dry::policy(Some(&args.profile), &args.place)?)?;
    let stock = run(&Policy::Stock)?;
    let row = |what: &str, value: &dyn Fn(&Outcome) -> f64, digits: usize| {
        let text = |o: &Outcome| match value(o) {
            x if x.is_finite() => format!("{x:.digits$}"),
            _ => "-".into(),
        };
        vec![what.to_owned(), text(&stock), text(&ours)]
    };
    let rows = vec![
        vec![String::new(), "stock".into(), args.profile.clone()],
        row("J/hour", &|o| o.j_per_hour(), 0),
        row("J/token, idle included", &|o| if o.output_tokens > 0 { o.j_per_token() } else { f64::NAN }, 3),
        row("peak W", &|o| o.peak_w, 1),
        row("hottest °C", &|o| o.hottest_c, 1),
        row("TTFT s", &|o| if o.ttft_s.is_empty() { f64::NAN } else { o.mean_ttft_s() }, 2),
        row("prefill tok/s", &|o| o.prefill_tok_s(), 0),
        row("decode tok/s", &|o| o.decode_tok_s(), 1),
        row("requests done", &|o| o.done as f64, 0),
        row("step changes", &|o| o.changes_s.len() as f64, 0),
    ];
    let head = format!("{name}, {} for {seconds} s, simulated\n\n", args.dry.work());
    Out::stdout().text(&(head + &out::table(&rows)))
}
