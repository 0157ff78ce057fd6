//! `tegu power tune`: finds the knee and the best trades of speed, energy and peak power, and writes a profile.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde_json::json;

use super::dry::Dry;
use super::live::Live;
use super::{Asked, Shown, Where};
use crate::cli::args::{Common, Load, useless};
use crate::cli::out::{self, Out};
use crate::observe::{Progress, Unit};
use crate::power::nodes::text;
use crate::power::profile::{Profile, board_key, mhz_text};
use crate::power::sim::spec::EMC_HZ;
use crate::power::tune::{Goal, Measured, Setting, Space, Tuning, sim::Bench, tune};
use crate::units::{Error, Result};

/// Arguments.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// Profile to write; its name is the file's
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// What the profile is for: efficiency (least J/token at no less than 90% of its batch's best speed) or speed
    #[arg(long, value_name = "GOAL", default_value = "efficiency", value_parser = ["efficiency", "speed"])]
    goal: String,
    /// Most power, in W, that the chosen setting may take
    #[arg(long, value_name = "W")]
    peak: Option<f64>,
    /// Batches to try
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4,8,16")]
    batch: Vec<usize>,
    /// Most runs [default: a quarter of the settings]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(4..=4096))]
    runs: Option<u16>,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    dry: Dry,
    #[command(flatten)]
    load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Each run decodes until the meters have settled and ten seconds more: on a board a tuning takes about ten minutes,
and the clock helper must run. Leave the board alone meanwhile. Power is that of the module's meters.

Examples:
  tegu power tune -m model.gguf -o mine.toml
  tegu power tune --board sim:orin-nano-super --goal efficiency --peak 12
  tegu power tune --board sim:agx-orin-64 --batch 1,4,8 --json";

impl TuneArgs {
    /// Refuses what a simulated board has no use for: it runs a model of its own, one setting after the other.
    fn check(&self) -> Result<()> {
        self.asked.check(&self.place)?;
        let Some(board) = &self.place.board else { return Ok(()) };
        match self.load.given() {
            Some(flag) => Err(useless(flag, "a real board, or --sim-model", board)),
            None if self.dry.has_work() => {
                Err(useless("--work", "none: each run decodes, at the batches of --batch", self.dry.work()))
            }
            None => Ok(()),
        }
    }
}

/// Batches above this are no board's.
const BATCH_MAX: usize = 64;

/// Tunes.
pub fn run(args: &TuneArgs, common: &Common) -> Result<()> {
    let mut batch = args.batch.clone();
    batch.sort_unstable();
    batch.dedup();
    if batch.is_empty() || batch.iter().any(|b| !(1..=BATCH_MAX).contains(b)) {
        let expected = format!("batches from 1 to {BATCH_MAX}");
        return Err(Error::bad("command line", "--batch", expected, format!("{:?}", args.batch)));
    }
    args.check()?;
    let site = args.place.open()?;
    let base = Profile::find("balanced", board_key(&site.board))?;
    let (space, tuning) = match &args.place.board {
        Some(name) => {
            let board = args.dry.board(name)?;
            let spec = board.spec();
            // What the power mode forbids cannot be measured.
            let ceiling = crate::power::nodes::number::<u64>(board.as_ref(), GPU_MAX).unwrap_or(u64::MAX);
            let gpu_hz = spec.gpu_hz.iter().copied().filter(|&hz| hz <= ceiling).collect();
            let space = Space { gpu_hz, emc_hz: EMC_HZ.to_vec(), batch };
            let nodes: Arc<dyn crate::power::nodes::Nodes> = board.clone();
            let mut bench = Bench::new(board, nodes, args.dry.model());
            let tuning = search(args, &space, &mut |s| bench.measure(s))?;
            (space, tuning)
        }
        None => {
            let sensors = site.sensors();
            let gpu = sensors.found().gpu.clone();
            let gpu = gpu
                .ok_or_else(|| Error::bad("tune", "GPU clock", "a board whose clocks can be set", "none"))?;
            let table =
                text(site.nodes.as_ref(), &format!("{gpu}/available_frequencies")).unwrap_or_default();
            let ceiling: u64 = crate::power::nodes::number(site.nodes.as_ref(), &format!("{gpu}/max_freq"))
                .unwrap_or(u64::MAX);
            let table = table.split_whitespace().filter_map(|w| w.parse().ok()).take(64);
            let mut gpu_hz: Vec<u64> = table.filter(|&hz| hz <= ceiling).collect();
            gpu_hz.sort_unstable();
            let space = Space { gpu_hz, emc_hz: EMC_HZ.to_vec(), batch };
            let config = common.config(args.load.overrides()?)?;
            let mut live = Live::open(&args.load, &config, sensors, &args.asked.socket, &space)?;
            let tuning = search(args, &space, &mut |s| live.measure(s))?;
            live.close()?;
            (space, tuning)
        }
    };
    let goal = if args.goal == "speed" { Goal::Speed } else { Goal::Efficiency };
    let chosen = tuning.best(goal, args.peak);
    if let (Some(file), Some((setting, measured))) = (&args.output, &chosen) {
        write(file, &tuning, &base, setting, measured)?;
    }
    match args.shown.json {
        true => Out::stdout().json(&object(&space, &tuning, chosen.as_ref())),
        false => Out::stdout().text(&shown(args, &space, &tuning, chosen.as_ref())),
    }?;
    if chosen.is_none() {
        let peak = args.peak.unwrap_or(f64::NAN);
        let least = tuning.runs.iter().map(|(_, m)| m.peak_w).fold(f64::MAX, f64::min);
        return Err(Error::bad(
            "command line",
            "--peak",
            format!("{least:.1} W or more"),
            format!("{peak} W"),
        ));
    }
    Ok(())
}

const GPU_MAX: &str = "/sys/class/devfreq/17000000.gpu/max_freq";

fn search(
    args: &TuneArgs,
    space: &Space,
    measure: &mut dyn FnMut(&Setting) -> Result<Measured>,
) -> Result<Tuning> {
    let runs = args.runs.map_or(space.runs_max(), usize::from);
    let progress = Progress::new("runs", runs as u64, Unit::Items);
    tune(space, runs, &mut |setting| {
        let measured = measure(setting)?;
        progress.add(1);
        Ok(measured)
    })
}

fn write(file: &PathBuf, tuning: &Tuning, base: &Profile, setting: &Setting, m: &Measured) -> Result<()> {
    let stem = file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    // A profile's name is a word; a file's may be anything.
    let name: String = stem
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' })
        .take(64)
        .collect();
    let name = if name.is_empty() { "tuned".into() } else { name };
    let comment = format!(
        "Tuned in {} runs: {:.1} tok/s, {:.3} J/token, {:.1} W while it decodes.\nAll that is not clocks or batch is from {}.",
        tuning.runs.len(),
        m.tok_s,
        m.j_per_token,
        m.peak_w,
        base.name
    );
    let text = tuning.profile(&name, base, setting).to_toml(&comment);
    std::fs::write(file, text).map_err(|e| Error::io(file, "write", e))
}

fn cells(setting: &Setting, m: &Measured) -> Vec<String> {
    vec![
        mhz_text(setting.gpu_hz),
        mhz_text(setting.emc_hz),
        setting.batch.to_string(),
        format!("{:.1}", m.tok_s),
        format!("{:.3}", m.j_per_token),
        format!("{:.1}", m.peak_w),
    ]
}

fn shown(args: &TuneArgs, space: &Space, tuning: &Tuning, chosen: Option<&(Setting, Measured)>) -> String {
    let mut text = format!("{} of {} settings measured\n\n", tuning.runs.len(), space.settings().len());
    text += "Nothing measured beats these in speed, energy and peak power at once:\n\n";
    let head = ["GPU MHz", "memory MHz", "batch", "tok/s", "J/token", "peak W"].map(String::from).to_vec();
    let mut best: Vec<&(Setting, Measured)> = tuning.front.iter().map(|&i| &tuning.runs[i]).collect();
    best.sort_by(|a, b| b.1.tok_s.total_cmp(&a.1.tok_s));
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(best.iter().map(|(s, m)| cells(s, m))).collect();
    text += &out::table(&rows);
    if !tuning.knees.is_empty() {
        text += "\nKnee of the GPU clock (97% of the top's speed, smallest batch):\n";
        for (emc_hz, gpu_hz) in &tuning.knees {
            text += &format!("  memory {:>6} MHz: {} MHz\n", mhz_text(*emc_hz), mhz_text(*gpu_hz));
        }
    }
    if let Some((s, m)) = chosen {
        let (gpu, emc) = (mhz_text(s.gpu_hz), mhz_text(s.emc_hz));
        text += &format!(
            "\nFor {}: GPU {gpu} MHz, memory {emc} MHz, batch {}: {:.1} tok/s, {:.3} J/token, {:.1} W\n",
            args.goal, s.batch, m.tok_s, m.j_per_token, m.peak_w
        );
    }
    if let (Some(file), Some(_)) = (&args.output, chosen) {
        text += &format!("{}: written\n", file.display());
    }
    text
}

fn object(space: &Space, tuning: &Tuning, chosen: Option<&(Setting, Measured)>) -> serde_json::Value {
    let row = |(s, m): &(Setting, Measured)| {
        json!({ "gpu_hz": s.gpu_hz, "emc_hz": s.emc_hz, "batch": s.batch, "tok_s": m.tok_s,
            "j_per_token": m.j_per_token, "peak_w": m.peak_w })
    };
    let knees: Vec<_> = tuning.knees.iter().map(|(e, g)| json!({ "emc_hz": e, "gpu_hz": g })).collect();
    json!({
        "settings": space.settings().len(),
        "runs": tuning.runs.iter().map(row).collect::<Vec<_>>(),
        "front": tuning.front,
        "knees": knees,
        "chosen": chosen.map(row),
    })
}
