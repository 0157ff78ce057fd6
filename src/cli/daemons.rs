//! `tegu ps`, `tegu stop`, `tegu list`: what a running daemon does, and what it could.

use clap::Args;
use serde_json::{Value, json};

use super::args::Common;
use super::out::{self, Out};
use super::remote::{self, Remote};
use crate::app::Options;
use crate::app::daemon::Shelf;
use crate::units::{Bytes, Result};

/// `tegu ps`
#[derive(Debug, Args)]
pub struct PsArgs {
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: Remote,
}

/// `tegu stop`
#[derive(Debug, Args)]
pub struct StopArgs {
    /// The request's number, as `tegu ps` shows it
    id: u64,
    #[command(flatten)]
    remote: Remote,
}

/// `tegu list`
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Folder of models [default: the settings' serve.models]
    #[arg(long, value_name = "FOLDER")]
    models: Option<std::path::PathBuf>,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
}

/// Shows the daemon's open requests.
pub fn ps(args: &PsArgs, common: &Common) -> Result<()> {
    let client = args.remote.client(common)?;
    let answer = remote::json(&client, "GET", "/v1/requests", None)?;
    if args.json {
        return Out::stdout().json(&answer);
    }
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let mut rows =
        vec![["CLIENT", "ID", "CLASS", "PROMPT", "READ", "GENERATED", "AGE"].map(String::from).to_vec()];
    for r in answer["data"].as_array().into_iter().flatten() {
        let age = format!("{:.1} s", r["age_ms"].as_f64().unwrap_or(0.0) / 1e3);
        let cells = ["client", "id", "class", "prompt_tokens", "read_tokens", "generated_tokens"];
        rows.push(cells.iter().map(|c| text(&r[*c])).chain([age]).collect());
    }
    let model = answer["model"].as_str().map_or("no model in memory".into(), |m| format!("model {m}"));
    Out::stdout().text(&format!("{model}\n{}", out::table(&rows)))
}

/// Ends one of them.
pub fn stop(args: &StopArgs, common: &Common) -> Result<()> {
    let client = args.remote.client(common)?;
    remote::json(&client, "DELETE", &format!("/v1/requests/{}", args.id), None)?;
    Out::stdout().text(&format!("request {} is stopped\n", args.id))
}

/// Shows the models that a daemon with these settings serves.
pub fn list(args: &ListArgs, common: &Common) -> Result<()> {
    let flags = args.models.iter().map(|f| ("serve.models", f.to_string_lossy().into_owned())).collect();
    let config = common.config(flags)?;
    // As the daemon has it: a folder stands for itself, else there is a default.
    let folder_only = config.text("model").is_empty() && !config.text("serve.models").is_empty();
    let default = if folder_only { None } else { Some(super::resolve::model(None, &config)?) };
    let shelf = Shelf::new(Options::new(""), default, &config, None);
    let models = shelf.models()?;
    let bytes = |p: &std::path::Path| std::fs::metadata(p).map_or(0, |m| m.len());
    if args.json {
        let one = |(name, path): &(String, std::path::PathBuf)| json!({ "name": name, "path": path, "file_bytes": bytes(path) });
        return Out::stdout().json(&json!({ "models": models.iter().map(one).collect::<Vec<_>>() }));
    }
    let mut rows = vec![vec!["NAME".to_owned(), "SIZE".into(), "PATH".into()]];
    rows.extend(
        models.iter().map(|(n, p)| vec![n.clone(), Bytes(bytes(p)).to_string(), p.display().to_string()]),
    );
    Out::stdout().text(&out::table(&rows))
}
