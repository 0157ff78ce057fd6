//! `tegu power profiles`: what profiles there are, what one says, and whether one's own is good.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::{Shown, Where};
use crate::cli::out::{self, Out};
use crate::config::nearest;
use crate::power::profile::{Profile, board_key, mhz_text};
use crate::power::types::{Clocks, Phase};
use crate::units::{Error, Result};

/// Arguments.
#[derive(Debug, Args)]
pub struct ProfilesArgs {
    /// Show this profile whole, as a file to begin your own with
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// The profiles of this kind of board [default: the board that this is]
    #[arg(long, value_name = "KIND", conflicts_with_all = ["root", "board"])]
    of: Option<String>,
    /// Only say whether a file is a good profile
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "of", "root", "board"])]
    check: Option<PathBuf>,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    place: Where,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Clocks are GPU/memory in MHz; - is left to the system. Every key is documented in profiles/README.md.

Examples:
  tegu power profiles
  tegu power profiles --of orin-nx-16
  tegu power profiles efficiency > mine.toml
  tegu power profiles --check mine.toml";

/// Lists, shows or checks.
pub fn run(args: &ProfilesArgs) -> Result<()> {
    if let Some(file) = &args.check {
        let profile = Profile::read(file)?;
        return match args.shown.json {
            true => Out::stdout().json(&object(&profile)),
            false => Out::stdout().text(&format!("{}: good: {}\n", file.display(), line(&profile))),
        };
    }
    let board = match &args.of {
        Some(kind) => known_board(kind)?,
        None => board_key(&args.place.open()?.board),
    };
    if let Some(name) = &args.name {
        let profile = Profile::find(name, board)?;
        return match args.shown.json {
            true => Out::stdout().json(&object(&profile)),
            false => Out::stdout().text(&profile.to_toml(&format!("{}. {}", profile.name, profile.about))),
        };
    }
    let all: Vec<Profile> =
        Profile::names(board).into_iter().map(|n| Profile::find(n, board)).collect::<Result<_>>()?;
    if args.shown.json {
        let profiles: Vec<Value> = all.iter().map(object).collect();
        return Out::stdout().json(&json!({ "board": board, "profiles": profiles }));
    }
    let head = ["profile", "prefill", "decode", "idle", "batch", "watt cap", "hot at", ""]
        .map(String::from)
        .to_vec();
    let rows = all.iter().map(|p| {
        let cap = p.cap_mw.map_or("-".into(), |mw| format!("{} W", mw as f64 / 1e3));
        let phase = |phase: Phase| pair(&p.clocks[phase.index()]);
        vec![
            p.name.clone(),
            phase(Phase::Prefill),
            phase(Phase::Decode),
            phase(Phase::Idle),
            p.max_batch.to_string(),
            cap,
            format!("{} °C", p.thermal.start_mc / 1000),
        ]
    });
    let table: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let about: String = all.iter().map(|p| format!("{:<11} {}\n", p.name, p.about)).collect();
    Out::stdout().text(&format!("{board}\n\n{}\n{about}", out::table(&table)))
}

fn known_board(kind: &str) -> Result<&'static str> {
    let boards = Profile::boards();
    let found = boards.iter().find(|b| **b == kind);
    found.copied().ok_or_else(|| {
        let hint = nearest(kind, &boards).map(|n| format!(" (did you mean {n:?}?)")).unwrap_or_default();
        Error::bad("command line", "--of", format!("one of {}", boards.join(", ")), format!("{kind:?}{hint}"))
    })
}

/// Ceiling of the GPU and clock of the memory, or a dash each.
fn pair(c: &Clocks) -> String {
    let text = |hz: Option<u64>| hz.map_or("-".into(), mhz_text);
    format!("{}/{}", text(c.gpu_cap_hz), text(c.emc_floor_hz))
}

fn line(p: &Profile) -> String {
    format!("{} for {}: prefill {}, decode {}", p.name, p.board, pair(&p.clocks[0]), pair(&p.clocks[1]))
}

fn object(p: &Profile) -> Value {
    let clocks: serde_json::Map<String, Value> =
        Phase::ALL.iter().map(|ph| (ph.name().to_owned(), json!(p.clocks[ph.index()]))).collect();
    json!({
        "name": p.name, "board": p.board, "about": p.about, "clocks": clocks, "max_batch": p.max_batch,
        "prefill_chunk": p.prefill_chunk, "cap_mw": p.cap_mw, "thermal_start_mc": p.thermal.start_mc,
        "thermal_pause_mc": p.thermal.pause_mc, "cores": p.cores, "spin_us": p.spin_us,
    })
}
