//! What is said on the helper's socket: one JSON object a line, an answer a line. And the side that asks.

use super::clocks::Outcome;
use super::types::Clocks;
use crate::units::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the helper listens.
pub const SOCKET: &str = "/run/tegu-clocks/clocks.sock";
/// Where it puts down what it holds.
pub const LEDGER: &str = "/run/tegu-clocks/clocks.json";
/// Bytes of one line, either way.
pub const LINE_BYTES_MAX: u64 = 16 << 10;
/// How long a wish is kept without a word from who wished, unless the wish says otherwise.
pub const LEASE_MS: u64 = 3_000;
/// The longest that a wish may ask for.
pub const LEASE_MS_MAX: u64 = 60_000;

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "lowercase", deny_unknown_fields)]
pub enum Ask {
    /// Set clocks, and hold them while words keep coming.
    Set {
        /// The clocks.
        clocks: Clocks,
        /// Without another word for so long, everything goes back.
        #[serde(default = "lease")]
        lease_ms: u64,
    },
    /// I am alive.
    Beat,
    /// Give everything back.
    Release,
    /// Say what is held.
    Status,
    /// Switch the power mode, by its name or number.
    Mode {
        /// As nvpmodel's configuration has it.
        name: String,
    },
    /// Switch the fan's profile.
    Fan {
        /// As nvfancontrol's configuration has it.
        profile: String,
    },
}

fn lease() -> u64 {
    LEASE_MS
}

/// A node that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Its path.
    pub node: String,
    /// What goes back there in the end.
    pub old: String,
    /// What it has from us.
    pub now: String,
}

/// What is answered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// What went wrong; none: it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Of `beat`: it comes after its lease, and what was held went back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Of `set`: each knob's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outcomes: Vec<Outcome>,
    /// Of `status`: what is held.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<Held>,
    /// Of `status`: what is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub want: Option<Clocks>,
    /// Of `mode` and `fan`: what came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<String>,
}

/// A connection to the helper. Dropping it gives everything back that it set.
pub struct Client {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
}

/// The helper answers within milliseconds; switching a power mode takes seconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

impl Client {
    /// Connects.
    pub fn connect(socket: &Path) -> Result<Client> {
        let io = |doing: &'static str| move |e| Error::io(socket, doing, e);
        let stream = UnixStream::connect(socket).map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                let says = format!("no clock helper answers ({e}); its unit is tegu-clocks.service");
                Error::io(socket, "connect", std::io::Error::new(e.kind(), says))
            }
            _ => Error::io(socket, "connect", e),
        })?;
        stream.set_read_timeout(Some(ANSWER_WITHIN)).map_err(io("set a time limit"))?;
        stream.set_write_timeout(Some(ANSWER_WITHIN)).map_err(io("set a time limit"))?;
        Ok(Client { socket: socket.to_owned(), stream: BufReader::new(stream) })
    }

    /// Asks, and waits for the answer. A refusal is an error.
    pub fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        let io = |e| Error::io(&self.socket, "ask the clock helper", e);
        let mut line = serde_json::to_string(ask).expect("strings and numbers");
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).map_err(io)?;
        let mut line = String::new();
        let read = (&mut self.stream).take(LINE_BYTES_MAX).read_line(&mut line).map_err(io)?;
        if read == 0 {
            return Err(io(ErrorKind::UnexpectedEof.into()));
        }
        let answer: Answer = serde_json::from_str(&line)
            .map_err(|e| Error::bad(&self.socket, "answer", "one of the clock helper", e))?;
        match answer.error {
            Some(why) => Err(Error::io(&self.socket, "clock helper", std::io::Error::other(why))),
            None => Ok(answer),
        }
    }

    /// Sets clocks, and holds them while [`Client::beat`] is called more often than every `lease_ms`.
    pub fn set(&mut self, clocks: &Clocks, lease_ms: u64) -> Result<Vec<Outcome>> {
        Ok(self.ask(&Ask::Set { clocks: *clocks, lease_ms })?.outcomes)
    }

    /// Says that we live. False: too late for our lease, so what was set went back, and is to be set anew.
    pub fn beat(&mut self) -> Result<bool> {
        self.ask(&Ask::Beat).map(|answer| !answer.lost)
    }

    /// Gives everything back.
    pub fn release(&mut self) -> Result<()> {
        self.ask(&Ask::Release).map(drop)
    }
}
