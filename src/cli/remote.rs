//! What the commands that talk to a running daemon share: where it is, and how its answers and errors are read.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;

use super::args::Common;
use crate::config::Config;
use crate::net::{Address, Client, Response};
use crate::units::{Error, Result};

/// Where the daemon is.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Daemon")]
pub struct Remote {
    /// The daemon's socket, or http://HOST:PORT [default: $TEGU_SOCKET, then the settings]
    #[arg(long = "at", visible_alias = "socket", value_name = "ADDRESS")]
    pub at: Option<String>,
    /// File with the bearer token that a port asks for
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// A daemon that says nothing for so long is taken for broken.
const SILENCE_MAX: Duration = Duration::from_secs(600);

impl Remote {
    /// A client for it.
    pub fn client(&self, common: &Common) -> Result<Client> {
        self.client_of(&common.config(Vec::new())?)
    }

    /// The same, by settings that were read.
    pub fn client_of(&self, config: &Config) -> Result<Client> {
        let address = match &self.at {
            Some(text) => Address::parse(text),
            None => Address::Unix(config.text("serve.socket").into()),
        };
        let token = match &self.token_file {
            Some(file) => Some(super::text_file(file, 4096)?.trim().to_owned()),
            None => None,
        };
        Ok(Client::new(address, token, SILENCE_MAX))
    }
}

/// The response if it is a good one, else what the daemon said.
pub fn good(client: &Client, response: Response) -> Result<Response> {
    if response.status < 400 {
        return Ok(response);
    }
    let status = response.status;
    let body: Value = serde_json::from_slice(&response.bytes()?).unwrap_or_default();
    let error = &body["error"];
    let message = error["message"].as_str().or(error.as_str()).unwrap_or("no reason given");
    Err(Error::bad(client.address().to_string(), format!("status {status}"), "200", message))
}

/// Asks for JSON.
pub fn json(client: &Client, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let bytes = body.map(|b| b.to_string().into_bytes());
    let response = good(client, client.send(method, path, bytes.as_deref())?)?;
    serde_json::from_slice(&response.bytes()?)
        .map_err(|e| Error::bad(client.address().to_string(), path, "JSON", e))
}
