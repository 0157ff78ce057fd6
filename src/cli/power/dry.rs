//! What can be chosen of a simulated board, for every command that runs one.

use std::sync::Arc;

use clap::Args;

use super::Where;
use crate::power::profile::{Profile, board_key};
use crate::power::sim::work::{MODELS, Model};
use crate::power::sim::{Options, SimBoard};
use crate::power::trial::{Job, Policy, traces};
use crate::units::Result;

/// Of a simulated board.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Of a simulated board (--board)")]
pub struct Dry {
    /// Temperature of the air, in °C
    #[arg(long, value_name = "C", default_value_t = 25.0, value_parser = ambient)]
    #[arg(requires = "board", conflicts_with = "root")]
    ambient: f64,
    /// Thermal resistance from sink to air, in °C/W [default: the board's]
    #[arg(long, value_name = "R", value_parser = sink, requires = "board", conflicts_with = "root")]
    sink: Option<f64>,
    /// Power mode that nvpmodel has set [default: the highest]
    #[arg(long, value_name = "MODE", requires = "board", conflicts_with = "root")]
    mode: Option<String>,
    /// What it has to do [default: chat]
    #[arg(long, value_name = "WORK", value_parser = ["chat", "long", "batch", "busy", "single", "idle"])]
    #[arg(requires = "board", conflicts_with = "root")]
    work: Option<String>,
    /// The model that it runs
    #[arg(long, value_name = "NAME", default_value = MODELS[0].name, value_parser = model)]
    #[arg(requires = "board", conflicts_with = "root")]
    sim_model: &'static Model,
    /// Seed of the sensors' noise
    #[arg(long, value_name = "N", default_value_t = 1, requires = "board", conflicts_with = "root")]
    seed: u64,
}

fn within(text: &str, low: f64, high: f64) -> std::result::Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|x| (low..=high).contains(x));
    value.ok_or_else(|| format!("expected a number from {low} to {high}"))
}

fn ambient(text: &str) -> std::result::Result<f64, String> {
    within(text, -40.0, 85.0)
}

fn sink(text: &str) -> std::result::Result<f64, String> {
    within(text, 0.0, 50.0)
}

fn model(text: &str) -> std::result::Result<&'static Model, String> {
    let names: Vec<&str> = MODELS.iter().map(|m| m.name).collect();
    let found = MODELS.iter().find(|m| m.name == text && m.prefill_work > 0.0);
    found.copied().ok_or_else(|| format!("expected one of {}", names[..3].join(", ")))
}

impl Dry {
    /// A fresh board of that name under these conditions.
    pub fn board(&self, name: &str) -> Result<Arc<SimBoard>> {
        let options = Options {
            seed: self.seed,
            ambient_c: self.ambient,
            sink_c_per_w: self.sink,
            mode: self.mode.clone(),
            ..Options::default()
        };
        SimBoard::named(name, options).map(Arc::new)
    }

    /// The model that runs.
    pub fn model(&self) -> &'static Model {
        self.sim_model
    }

    /// The requests that come within so many seconds.
    pub fn jobs(&self, seconds: u64) -> Vec<Job> {
        match self.work() {
            "chat" => traces::chat(seconds),
            "long" => traces::long_prompts(seconds),
            "batch" => traces::background((seconds / 15).clamp(16, 4096) as usize),
            "busy" => traces::full(seconds),
            "single" => traces::singles(seconds),
            _ => Vec::new(),
        }
    }

    /// Whether the work was chosen, for what runs work of its own.
    pub fn has_work(&self) -> bool {
        self.work.is_some()
    }

    /// The work, in words.
    pub fn work(&self) -> &str {
        self.work.as_deref().unwrap_or("chat")
    }
}

/// Who decides: a profile by name or path, or nobody.
pub fn policy(profile: Option<&str>, place: &Where) -> Result<Policy> {
    let Some(name) = profile else { return Ok(Policy::Stock) };
    let site = place.open()?;
    Profile::find(name, board_key(&site.board)).map(|p| Policy::Governed(Box::new(p)))
}
