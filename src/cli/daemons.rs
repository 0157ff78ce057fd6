//! `tegu ps`, `tegu stop`, `tegu list`: what a running daemon does, and what it could.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use super::args::Common;
use super::out::{self, Out};
use super::remote::{self, Remote};
use crate::app::Options;
use crate::app::daemon::Shelf;
use crate::config::Config;
use crate::observe;
use crate::serve::Loader;
use crate::units::{Bytes, Error, Result};

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
    /// Look into this folder of models instead of asking a daemon
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["at", "token_file"])]
    models: Option<PathBuf>,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: Remote,
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

/// A model of a listing.
struct Row {
    name: String,
    file_bytes: u64,
    /// Whether it is in the daemon's memory, where one was asked.
    loaded: Option<bool>,
    /// Where it is, where this process found it.
    path: Option<PathBuf>,
}

/// Shows the models that the daemon serves, or, where none runs, those that one with these settings would.
pub fn list(args: &ListArgs, common: &Common) -> Result<()> {
    let flags = args.models.iter().map(|f| ("serve.models", f.to_string_lossy().into_owned())).collect();
    let config = common.config(flags)?;
    let asked = if args.models.is_some() { None } else { ask(&args.remote, &config)? };
    let rows = match asked {
        Some(rows) => rows,
        None => find(&config)?,
    };
    if args.json {
        let one = |r: &Row| {
            let path = r.path.as_deref().map(out::path);
            json!({ "name": r.name, "path": path, "file_bytes": r.file_bytes, "loaded": r.loaded })
        };
        return Out::stdout().json(&json!({ "models": rows.iter().map(one).collect::<Vec<_>>() }));
    }
    let mut table = vec![vec!["NAME".to_owned(), "SIZE".into(), "WHERE".into()]];
    table.extend(rows.into_iter().map(|r| {
        let place = match (r.path, r.loaded) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(true)) => "in memory".into(),
            (None, _) => "on disk".into(),
        };
        vec![r.name, Bytes(r.file_bytes).to_string(), place]
    }));
    Out::stdout().text(&out::table(&table))
}

/// What the daemon says; none where there is none and none was named.
fn ask(remote: &Remote, config: &Config) -> Result<Option<Vec<Row>>> {
    let client = remote.client_of(config)?;
    let answer = match remote::json(&client, "GET", "/v1/models", None) {
        Ok(answer) => answer,
        Err(Error::Io { source, .. }) if remote.at.is_none() && is_nobody(source.kind()) => {
            observe::note(format_args!(
                "no daemon at {}: what one with these settings would serve",
                client.address()
            ));
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let row = |m: &Value| Row {
        name: m["id"].as_str().unwrap_or_default().to_owned(),
        file_bytes: m["file_bytes"].as_u64().unwrap_or(0),
        loaded: Some(m["loaded"] == true),
        path: None,
    };
    Ok(Some(answer["data"].as_array().into_iter().flatten().map(row).collect()))
}

/// That nobody listens, as against a daemon that is not for us or broke.
fn is_nobody(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::ConnectionRefused)
}

/// What a daemon with these settings would find.
fn find(config: &Config) -> Result<Vec<Row>> {
    let folder = config.text("serve.models");
    if !folder.is_empty() && !Path::new(folder).is_dir() {
        return Err(Error::bad("settings", "serve.models", "a folder", format!("{folder:?}")));
    }
    // As the daemon has it: a folder stands for itself, else there is a default.
    let folder_only = config.text("model").is_empty() && !folder.is_empty();
    let default = if folder_only { None } else { Some(super::resolve::model(None, config)?) };
    let shelf = Arc::new(Shelf::new(Options::new(""), default, config, None));
    let found = shelf.models()?.into_iter().zip(shelf.known()?);
    Ok(found
        .map(|((name, path), known)| Row {
            name,
            file_bytes: known.file_bytes,
            loaded: None,
            path: Some(path),
        })
        .collect())
}
