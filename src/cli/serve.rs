//! `tegu serve` and `tegud`: the settings, the model, and then the server until it is told to end.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::args::{Common, Load, Override};
use super::resolve;
use crate::app::daemon::{Shelf, settings};
use crate::app::keeper::{Keeper, Told, Wanted};
use crate::config::{Config, Origin};
use crate::serve;
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
    pub fn overrides(&self) -> Vec<Override> {
        let mut flags = self.load.overrides();
        let text = |p: &PathBuf| p.to_string_lossy().into_owned();
        flags.extend(self.socket.as_ref().map(|p| ("serve.socket", text(p))));
        flags.extend(self.tcp.clone().map(|a| ("serve.tcp", a)));
        flags.extend(self.models.as_ref().map(|p| ("serve.models", text(p))));
        flags.extend(self.ctx_size.map(|n| ("context", n.to_string())));
        flags.extend(self.board.clone().map(|b| ("power.board", b)));
        flags.extend(self.profile.clone().map(|p| ("power.profile", p)));
        flags.extend(self.clocks.clone().map(|c| ("power.clocks", c)));
        flags.extend(self.idle_unload.map(|s| ("serve.idle_unload_s", s.to_string())));
        flags
    }
}

/// Serves until told to end.
pub fn run(args: &ServeArgs, common: &Common) -> Result<()> {
    let config = common.config(args.overrides())?;
    let first = settings(&config)?;
    // Ends last: clocks go back when no request is left.
    let keeper = Wanted::of(&config).map(|w| Keeper::start(&w)).transpose()?;
    let told = keeper.as_ref().map(Keeper::told);
    let spin_us = keeper.as_ref().and_then(Keeper::spin_us);
    let shelf = Arc::new(shelf(args, &config, told.clone(), spin_us)?);
    let (again, common) = (shelf.clone(), common.clone());
    let flags = args.overrides();
    let reload = move || {
        let config = common.config(flags.clone())?;
        let new = settings(&config)?;
        again.rename(&config);
        Ok(new)
    };
    let power = told.map(|t| t as Arc<dyn serve::Power>);
    serve::run(first, Box::new(shelf), power, Box::new(reload))
}

/// The models. With a folder, and none named, the folder's first is the default and the demo stays away.
/// `spin_us`: what a profile says of idle workers, where the settings say nothing.
pub fn shelf(
    args: &ServeArgs,
    config: &Config,
    power: Option<Arc<Told>>,
    spin_us: Option<u64>,
) -> Result<Shelf> {
    let named = args.load.model_flag.clone();
    let folder_only =
        named.is_none() && config.text("model").is_empty() && !config.text("serve.models").is_empty();
    let default = if folder_only { None } else { Some(resolve::model(named.as_deref(), config)?) };
    let mut options = args.load.options(PathBuf::new(), config)?;
    options.sequences = config.count("serve.sequences") as usize;
    if let Some(us) = spin_us.filter(|_| config.get("spin_us").1 == Origin::Default) {
        options.spin_us = us;
    }
    Ok(Shelf::new(options, default, config, power))
}
