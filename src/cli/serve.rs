//! `tegu serve` and `tegud`: the settings, the model, and then the server until it is told to end.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;

use super::args::{Common, Load, Override};
use super::resolve;
use crate::app::Options;
use crate::app::daemon::Shelf;
use crate::app::keeper::{Keeper, Told, Wanted};
use crate::app::settings::{check_board, check_folders, defaults, make_folders, settings};
use crate::config::{Config, Origin};
use crate::observe;
use crate::serve::{self, Settings};
use crate::units::Result;

/// What the server can be told on the command line; the rest is in the settings.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Unix socket to listen on; empty: none [default: /run/tegu/tegu.sock]
    #[arg(long, value_name = "PATH", help_heading = "Serving")]
    pub socket: Option<PathBuf>,
    /// Loopback address to listen on as well, such as 127.0.0.1:8080
    #[arg(long, value_name = "ADDRESS", help_heading = "Serving")]
    pub tcp: Option<String>,
    /// Folder of models that can be asked for by name
    #[arg(long, value_name = "FOLDER", help_heading = "Serving")]
    pub models: Option<PathBuf>,
    /// Tokens that a sequence may hold; 0: all the model allows
    #[arg(short = 'c', long, value_name = "N", help_heading = "Serving")]
    pub ctx_size: Option<u64>,
    /// Give the model's memory back after so many seconds without a request; 0: never
    #[arg(long, value_name = "SECONDS", help_heading = "Serving")]
    pub idle_unload: Option<f64>,
    /// The board to look at: auto, off, or a simulated one such as sim:orin-nano-super, which the engine then drives
    #[arg(long, value_name = "BOARD", help_heading = "Power")]
    pub board: Option<String>,
    /// Profile that steers clocks and batches, by name or file; none: the system's own [default: power.profile]
    #[arg(long, value_name = "PROFILE", help_heading = "Power")]
    pub profile: Option<String>,
    /// Who moves clocks for it: helper, direct (this process, as root), no
    #[arg(long, value_name = "WHO", help_heading = "Power")]
    pub clocks: Option<String>,
    #[command(flatten)]
    pub load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
OpenAI's endpoints are under /v1, Ollama's under /api. SIGHUP reads the settings again, SIGTERM ends: open requests get
the time that serve.shutdown_s says. A second signal ends at once.

Examples:
  tegu serve --socket /run/tegu/tegu.sock
  tegu serve -m model.gguf --tcp 127.0.0.1:8080
  curl --unix-socket /run/tegu/tegu.sock http://localhost/v1/models";

impl ServeArgs {
    /// As overrides of settings.
    pub fn overrides(&self) -> Result<Vec<Override>> {
        let mut flags = self.load.overrides()?;
        let text = |p: &PathBuf| p.to_string_lossy().into_owned();
        // So that a print of the settings tells it; it is opened by the flag itself, which may hold any bytes.
        flags.extend(self.load.model_flag.as_ref().map(|p| ("model", text(p))));
        flags.extend(self.socket.as_ref().map(|p| ("serve.socket", text(p))));
        flags.extend(self.tcp.clone().map(|a| ("serve.tcp", a)));
        flags.extend(self.models.as_ref().map(|p| ("serve.models", text(p))));
        flags.extend(self.ctx_size.map(|n| ("context", n.to_string())));
        flags.extend(self.board.clone().map(|b| ("power.board", b)));
        flags.extend(self.profile.clone().map(|p| ("power.profile", p)));
        flags.extend(self.clocks.clone().map(|c| ("power.clocks", c)));
        flags.extend(self.idle_unload.map(|s| ("serve.idle_unload_s", s.to_string())));
        Ok(flags)
    }
}

/// The settings with these flags on top, and with the daemon's own defaults; the log says what they say.
pub fn config(args: &ServeArgs, common: &Common) -> Result<Config> {
    let mut config = common.config(args.overrides()?)?;
    defaults(&mut config);
    Ok(config)
}

/// Serves until told to end.
pub fn run(args: &ServeArgs, common: &Common) -> Result<()> {
    let config = config(args, common)?;
    let first = settings(&config)?;
    make_folders(&config)?;
    // Ends last: clocks go back when no request is left.
    let keeper = Wanted::of(&config).map(|w| Keeper::start(&w)).transpose()?;
    let told = keeper.as_ref().map(Keeper::told);
    let spin_us = keeper.as_ref().and_then(Keeper::spin_us);
    let shelf = Arc::new(shelf(args, &config, told.clone(), spin_us)?);
    let reload = reloader(args.overrides()?, common.clone(), config, shelf.clone());
    let power = told.map(|t| t as Arc<dyn serve::Power>);
    serve::run(first, Box::new(shelf), power, Box::new(reload))
}

/// Reads the settings again. What cannot change while running stays as it is and is named; a mistake anywhere changes nothing.
fn reloader(
    flags: Vec<Override>,
    common: Common,
    first: Config,
    shelf: Arc<Shelf>,
) -> impl Fn() -> Result<Settings> + Send {
    let running = Mutex::new(first);
    move || {
        let mut new = common.read(&flags)?;
        defaults(&mut new);
        settings(&new)?;
        check_folders(&new)?;
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = running.clone();
        let reloaded = next.reload(new.clone());
        // Opening a board takes its time, which only a change is worth.
        if reloaded.waiting.iter().any(|key| key.starts_with("power.")) {
            check_board(&new)?;
        }
        let settings = settings(&next)?;
        *running = next;
        common.log(&running);
        shelf.rename(&running);
        for key in &reloaded.waiting {
            log::warn!("reload: {key} takes effect at the next start");
        }
        if !reloaded.taken.is_empty() {
            observe::note(format_args!("reload: {}", reloaded.taken.join(", ")));
        }
        Ok(settings)
    }
}

/// The model of requests that name none, as the flags and settings say. With a folder, and none named, the folder's first is
/// that, and the demo stays away.
pub fn default_model(args: &ServeArgs, config: &Config) -> Result<Option<PathBuf>> {
    let named = args.load.model_flag.as_deref();
    let folder_only =
        named.is_none() && config.text("model").is_empty() && !config.text("serve.models").is_empty();
    if folder_only { Ok(None) } else { resolve::model(named, config).map(Some) }
}

/// How any of the models is opened; the path is each one's own.
pub fn options(args: &ServeArgs, config: &Config) -> Options {
    let mut options = args.load.options(PathBuf::new(), config);
    options.sequences = config.count("serve.sequences") as usize;
    options
}

/// The models. `spin_us`: what a profile says of idle workers, where the settings say nothing.
pub fn shelf(
    args: &ServeArgs,
    config: &Config,
    power: Option<Arc<Told>>,
    spin_us: Option<u64>,
) -> Result<Shelf> {
    let mut options = options(args, config);
    if let Some(us) = spin_us.filter(|_| config.get("spin_us").1 == Origin::Default) {
        options.spin_us = us;
    }
    Ok(Shelf::new(options, default_model(args, config)?, config, power))
}
