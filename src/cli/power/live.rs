//! Measuring a setting on a real board: the engine decodes, the clock helper holds the clocks, the module's meters
//! tell the power.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::app;
use crate::cli::args::Load;
use crate::cli::{load, resolve};
use crate::config::Config;
use crate::engine::{Budget, Event, Request, SeqId};
use crate::power::sensors::Sensors;
use crate::power::tune::{Measured, Setting, Space};
use crate::power::types::Clocks;
use crate::power::wire::{Client, LEASE_MS_MAX};
use crate::sample::{SampleParams, Sampler};
use crate::units::{Error, Result, TokenId};

/// The meters lag by 1.3 s: after five times that they have settled to a hundredth.
const SETTLE: Duration = Duration::from_millis(6_500);
/// How long power is averaged.
const MEASURE: Duration = Duration::from_secs(10);
/// Spacing of readings: the meters' own.
const EVERY: Duration = Duration::from_millis(430);
/// Tokens of a sequence's prompt, and positions until it begins anew.
const PROMPT: usize = 64;
const CONTEXT: usize = 1_024;

/// A loaded model between a board's meters and clocks.
pub struct Live {
    app: app::App,
    sensors: Sensors,
    client: Client,
}

impl Live {
    /// Loads the model and reaches the helper. A board without a meter of the whole module is refused before that.
    pub fn open(
        load_args: &Load,
        config: &Config,
        mut sensors: Sensors,
        helper: &Path,
        space: &Space,
    ) -> Result<Live> {
        if sensors.sample().total_mw.is_none() {
            return Err(Error::bad("tune", "power", "a meter of the whole module", "none on this board"));
        }
        let client = Client::connect(helper)?;
        let model = resolve::model(load_args.model_flag.as_deref(), config)?;
        let widest = space.batch.iter().copied().max().unwrap_or(1);
        let mut options = load_args.options(model, config);
        options.context_tokens = CONTEXT;
        options.sequences = widest;
        options.rows_max = options.rows_max.max(widest);
        let app = load::load(app::prepare(options)?)?.app;
        Ok(Live { app, sensors, client })
    }

    /// Gives the clocks back.
    pub fn close(mut self) -> Result<()> {
        self.client.release()
    }

    /// Decodes at a setting until the meters have settled, then ten seconds more.
    pub fn measure(&mut self, setting: &Setting) -> Result<Measured> {
        let clocks = Clocks {
            gpu_cap_hz: Some(setting.gpu_hz),
            emc_floor_hz: Some(setting.emc_hz),
            ..Clocks::default()
        };
        // A run is shorter than the longest lease: no word is needed in between.
        self.client.set(&clocks, LEASE_MS_MAX)?;
        let mut open: Vec<SeqId> = Vec::new();
        for salt in 0..setting.batch {
            open.push(self.open_sequence(salt)?);
        }
        let result = self.decode(setting, &mut open);
        for seq in open {
            self.app.engine.close(seq);
        }
        result
    }

    fn open_sequence(&mut self, salt: usize) -> Result<SeqId> {
        let vocab = self.app.engine.hyper().vocab;
        // Ids spread over the vocabulary, another prompt for each sequence: nothing is shared.
        let id = |i: usize| ((i * 7_919 + salt * 104_729 + 17) % vocab) as TokenId;
        let prompt = (0..PROMPT).map(id).collect();
        let sampler = Sampler::new(SampleParams::greedy())?;
        let new = CONTEXT - PROMPT - 2;
        self.app.engine.open(Request::new(prompt, sampler, new, Vec::new()), None)
    }

    fn decode(&mut self, setting: &Setting, open: &mut [SeqId]) -> Result<Measured> {
        let budget = Budget { max_batch: setting.batch, ..Budget::default() };
        let mut salt = setting.batch;
        let (started, mut measuring, mut tokens) = (Instant::now(), None, 0u64);
        let (mut readings, mut next) = (Vec::new(), started);
        loop {
            let events = self.app.engine.step(&budget)?;
            tokens += events.iter().filter(|e| matches!(e, Event::Token { .. })).count() as u64;
            if events.is_empty() {
                // Every sequence has reached its end: they begin anew.
                for seq in open.iter_mut() {
                    self.app.engine.close(*seq);
                    *seq = self.open_sequence(salt)?;
                    salt += 1;
                }
            }
            let now = Instant::now();
            match measuring {
                None if now - started >= SETTLE => (measuring, tokens, next) = (Some(now), 0, now + EVERY),
                None => {}
                Some(began) => {
                    if now >= next {
                        next += EVERY;
                        readings.push(self.power_w()?);
                    }
                    if now - began >= MEASURE {
                        return summed(&readings, tokens, now - began);
                    }
                }
            }
        }
    }

    fn power_w(&mut self) -> Result<f64> {
        let total = self.sensors.sample().total_mw;
        total
            .map(|mw| mw as f64 / 1e3)
            .ok_or_else(|| Error::bad("tune", "power", "a reading", "none: the meter is gone"))
    }
}

/// Speed, energy a token and peak of a run's readings.
fn summed(readings: &[f64], tokens: u64, took: Duration) -> Result<Measured> {
    if readings.is_empty() || tokens == 0 {
        let found = format!("{} readings, {tokens} tokens", readings.len());
        return Err(Error::bad("tune", "run", "readings and tokens within ten seconds", found));
    }
    let mean_w = readings.iter().sum::<f64>() / readings.len() as f64;
    let tok_s = tokens as f64 / took.as_secs_f64();
    // A single reading's noise is no peak: three in a row make one.
    let of_three = readings.windows(3).map(|w| w.iter().sum::<f64>() / 3.0);
    Ok(Measured { tok_s, j_per_token: mean_w / tok_s, peak_w: of_three.fold(mean_w, f64::max) })
}

#[test]
fn a_run_is_summed_up() {
    let m = summed(&[10.0, 10.0, 16.0, 10.0], 230, Duration::from_secs(10)).unwrap();
    assert_eq!((m.tok_s, m.j_per_token, m.peak_w), (23.0, 0.5, 12.0));
    assert!(
        summed(&[], 5, Duration::from_secs(1)).is_err() && summed(&[1.0], 0, Duration::from_secs(1)).is_err()
    );
}
