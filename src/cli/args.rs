//! Arguments that several commands share, and their way into the settings.

use std::path::PathBuf;

use clap::Args;

use crate::app::Prepared;
use crate::config::Config;
use crate::observe::{self, Verbosity};
use crate::sample::SampleParams;
use crate::units::{Error, Result};

/// A flag that overrides a settings key, as text.
pub type Override = (&'static str, String);

/// For every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Common {
    /// Settings file [default: tegu/config.toml in the user's configuration folder]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Say more; twice for everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Errors only
    #[arg(short, long, global = true, alias = "log-disable", conflicts_with = "verbose")]
    pub quiet: bool,
}

impl Common {
    /// The settings with the given flags on top; also sets the log level they ask for.
    pub fn config(&self, flags: Vec<Override>) -> Result<Config> {
        let config = self.read(&flags)?;
        self.log(&config);
        Ok(config)
    }

    /// The settings with the given flags on top.
    pub fn read(&self, flags: &[Override]) -> Result<Config> {
        Config::load(self.config.as_deref(), &|name| std::env::var_os(name), flags)
    }

    /// For commands that have no use for settings: a file that is named is read all the same, for its mistakes and its log.
    pub fn only_if_named(&self) -> Result<()> {
        self.config.is_some().then(|| self.config(Vec::new())).transpose().map(drop)
    }

    /// Has the log say as much as flags and settings ask for.
    pub fn log(&self, config: &Config) {
        observe::init_log(self.verbosity(Some(config.text("log"))));
    }

    /// What the flags say, else what the settings say, else warnings.
    pub fn verbosity(&self, configured: Option<&str>) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (_, 0) => configured.and_then(Verbosity::from_name).unwrap_or(Verbosity::Normal),
            (_, 1) => Verbosity::Verbose,
            _ => Verbosity::Debug,
        }
    }
}

/// For commands that load a model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct Load {
    /// Model file or folder [default: $TEGU_MODEL, then the settings, then the bundled demo]
    #[arg(short, long = "model", value_name = "MODEL")]
    pub model_flag: Option<PathBuf>,
    /// Worker threads; 0: one a core
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<i64>,
    /// Microseconds that an idle worker thread spins for more work before it sleeps; 0: not at all [default: 200]
    #[arg(long, value_name = "US")]
    pub spin_us: Option<u64>,
    /// What runs the model: cuda if a GPU can be used, else the cpu [default: auto]
    #[arg(long, value_name = "NAME", value_parser = ["auto", "cpu", "cuda"])]
    pub backend: Option<String>,
    /// Type of the key-value cache: f16, int8 or f32 (with --exact f32 unless another is named here)
    #[arg(long, value_name = "TYPE", value_parser = ["f16", "f32", "int8"], visible_alias = "cache-type-k")]
    pub kv: Option<String>,
    /// GPU memory for routed experts, as 3221225472, 3G or 3072M; the others stay in host memory [default: all where they fit]
    #[arg(long, value_name = "BYTES")]
    pub expert_budget: Option<String>,
    /// f32 activations and KV throughout: slower, and what references are compared with
    #[arg(long)]
    pub exact: bool,
    #[command(flatten)]
    pub ignored: Ignored,
}

/// llama.cpp's flags that have no meaning here. They are accepted, so that its command lines can be tried.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Accepted for llama.cpp's sake")]
pub struct Ignored {
    /// Layers on a GPU: all or none here; 0 is --backend cpu
    #[arg(
        long,
        alias = "gpu-layers",
        value_name = "N",
        hide_short_help = true,
        allow_negative_numbers = true
    )]
    #[arg(value_parser = layers)]
    pub n_gpu_layers: Option<i64>,
    #[arg(long, hide = true)]
    pub no_warmup: bool,
    #[arg(long, hide = true)]
    pub warmup: bool,
    #[arg(long, hide = true)]
    pub no_mmap: bool,
    #[arg(long, hide = true)]
    pub mlock: bool,
    #[arg(long, hide = true, value_name = "N", allow_negative_numbers = true)]
    pub threads_batch: Option<i64>,
    #[arg(long, hide = true, value_name = "TYPE", value_parser = ["f16", "f32", "int8"])]
    pub cache_type_v: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, value_parser = ["on", "off", "auto", "0", "1"])]
    pub flash_attn: Option<Option<String>>,
}

/// A count of layers, or llama.cpp's words for all of them; those count as more than any model has.
fn layers(text: &str) -> std::result::Result<i64, String> {
    match text {
        "auto" | "all" => Ok(i64::MAX),
        _ => text.parse().map_err(|_| "expected a whole number, auto or all".into()),
    }
}

/// A flag that has no use here.
pub fn useless(flag: &str, expected: impl std::fmt::Display, found: impl std::fmt::Display) -> Error {
    Error::bad("command line", flag, expected, found)
}

impl Load {
    /// As overrides of settings. Says what an accepted flag does not do.
    ///
    /// # Errors
    /// For two flags that contradict each other.
    pub fn overrides(&self) -> Result<Vec<Override>> {
        let asked = self.ignored.n_gpu_layers;
        if asked == Some(0) && self.backend.as_deref() == Some("cuda") {
            return Err(useless("--n-gpu-layers", "above 0 with --backend cuda", 0));
        }
        if let Some(values) = self.ignored.cache_type_v.as_ref()
            && self.kv.as_ref().is_some_and(|keys| keys != values)
        {
            let expected = "the type of --cache-type-k: keys and values have one";
            return Err(useless("--cache-type-v", expected, values));
        }
        let mut flags = Vec::new();
        match (asked, &self.backend) {
            (_, Some(b)) => flags.push(("backend", b.clone())),
            (Some(0), None) => flags.push(("backend", "cpu".to_owned())),
            (Some(_), None) if !crate::backend::cuda::driver::is_present() => {
                log::warn!("--n-gpu-layers: no NVIDIA driver is here; the model runs on the CPU");
            }
            _ => {}
        }
        // As in llama.cpp, a count of 0 or below leaves the choice to the program.
        flags.extend(self.threads.map(|n| ("threads", n.max(0).to_string())));
        flags.extend(self.spin_us.map(|n| ("spin_us", n.to_string())));
        flags.extend(self.kv.as_ref().or(self.ignored.cache_type_v.as_ref()).map(|k| ("kv", k.clone())));
        flags.extend(self.expert_budget.clone().map(|b| ("expert_budget", b)));
        Ok(flags)
    }

    /// Refuses flags that do nothing for the model that was opened.
    pub fn check(&self, opened: &Prepared) -> Result<()> {
        if self.expert_budget.is_some() && !opened.on_gpu() {
            return Err(useless("--expert-budget", "a model on --backend cuda", "the CPU"));
        }
        Ok(())
    }

    /// The first of these flags that was given, for where no model is loaded.
    pub fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--model", self.model_flag.is_some()),
            ("--threads", self.threads.is_some()),
            ("--spin-us", self.spin_us.is_some()),
            ("--backend", self.backend.is_some()),
            ("--kv", self.kv.is_some()),
            ("--expert-budget", self.expert_budget.is_some()),
            ("--exact", self.exact),
            ("--n-gpu-layers", self.ignored.n_gpu_layers.is_some()),
            ("--cache-type-v", self.ignored.cache_type_v.is_some()),
        ];
        flags.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

/// How the next token is chosen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct Sampling {
    /// Temperature; 0: greedy, always the likeliest token [default: 0]
    #[arg(long, alias = "temperature", value_name = "T")]
    pub temp: Option<f32>,
    /// Keep the K likeliest; 0: all [default: 40]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the likeliest that sum to P; 1: all [default: 0.95]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop those below this share of the likeliest; 0: none [default: 0.05]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Locally typical sampling; 1: off
    #[arg(long, alias = "typical-p", value_name = "P", default_value_t = 1.0)]
    pub typical: f32,
    /// Keep logits within N standard deviations of the best; below 0: off
    #[arg(long, alias = "top-nsigma", value_name = "N", default_value_t = -1.0, allow_negative_numbers = true)]
    pub top_n_sigma: f32,
    /// XTC: chance of dropping all but the least of the likely tokens; 0: off
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub xtc_probability: f32,
    /// XTC: what counts as likely
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    pub xtc_threshold: f32,
    /// DRY: strength against repeated passages; 0: off
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub dry_multiplier: f32,
    /// DRY: growth with the length of the passage
    #[arg(long, value_name = "X", default_value_t = 1.75)]
    pub dry_base: f32,
    /// DRY: passages up to this length are free
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub dry_allowed_length: usize,
    /// DRY: tokens looked back; -1: all
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    pub dry_penalty_last_n: i64,
    /// Divides the logits of recent tokens; 1: off [default: 1]
    #[arg(long, value_name = "X")]
    pub repeat_penalty: Option<f32>,
    /// Tokens the penalties look back; -1: all
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    pub repeat_last_n: i64,
    /// Taken from a token's logit once for each time it was used
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Taken from the logit of every token that was used
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Added to one token's logit, as ID+X or ID-X; may be repeated
    #[arg(short = 'l', long, value_name = "ID±X", value_parser = logit_bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same text; -1: another each time
    #[arg(short, long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    pub seed: i64,
}

impl Sampling {
    /// As overrides of settings.
    pub fn overrides(&self) -> Vec<Override> {
        let mut flags = Vec::new();
        flags.extend(self.temp.map(|x| ("sample.temp", x.to_string())));
        flags.extend(self.top_k.map(|x| ("sample.top_k", x.to_string())));
        flags.extend(self.top_p.map(|x| ("sample.top_p", x.to_string())));
        flags.extend(self.min_p.map(|x| ("sample.min_p", x.to_string())));
        flags.extend(self.repeat_penalty.map(|x| ("sample.repeat_penalty", x.to_string())));
        flags
    }

    /// These flags and the settings together.
    pub fn params(&self, config: &Config) -> SampleParams {
        let last_n = |n: i64| usize::try_from(n).ok();
        SampleParams {
            temp: config.real("sample.temp") as f32,
            top_k: config.count("sample.top_k") as usize,
            top_p: config.real("sample.top_p") as f32,
            min_p: config.real("sample.min_p") as f32,
            typical: self.typical,
            top_n_sigma: self.top_n_sigma,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: last_n(self.dry_penalty_last_n),
            repeat_penalty: config.real("sample.repeat_penalty") as f32,
            repeat_last_n: last_n(self.repeat_last_n),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed(),
            dry_breakers: Vec::new(),
            logprobs: None,
        }
    }

    /// The seed asked for, or one from the clock.
    pub fn seed(&self) -> u64 {
        u64::try_from(self.seed).unwrap_or_else(|_| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            // 32 bits are easy to read back and type again.
            now.map_or(0, |d| (d.as_nanos() as u64 ^ (d.as_nanos() >> 32) as u64) & 0xffff_ffff)
        })
    }
}

/// Reads `15043+1` or `29905-0.5` (llama.cpp's form), or `15043=-1`.
fn logit_bias(text: &str) -> std::result::Result<(u32, f32), String> {
    let at = text.find(['+', '-', '=']).ok_or("expected ID+X or ID-X")?;
    let id = text[..at].parse().map_err(|_| format!("{:?} is no token id", &text[..at]))?;
    let bias = text[at..].trim_start_matches('=');
    let value: f32 = match bias {
        "-inf" | "false" => f32::NEG_INFINITY,
        _ => bias.parse().map_err(|_| format!("{bias:?} is no number"))?,
    };
    if value.is_nan() || value == f32::INFINITY {
        return Err("a bias is a number or -inf".into());
    }
    Ok((id, value))
}

#[test]
fn logit_biases_are_read() {
    assert_eq!(logit_bias("12+1.5"), Ok((12, 1.5)));
    assert_eq!(logit_bias("12-1"), Ok((12, -1.0)));
    assert_eq!(logit_bias("12-inf"), Ok((12, f32::NEG_INFINITY)));
    assert_eq!(logit_bias("7=-2"), Ok((7, -2.0)));
    assert!(logit_bias("x+1").is_err() && logit_bias("12").is_err() && logit_bias("1+nan").is_err());
}
