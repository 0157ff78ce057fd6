//! Who moves clocks: the clock helper over its socket, this process, or no one.

use crate::power::clocks::Actuator;
use crate::power::types::Clocks;
use crate::power::wire::{Answer, Ask, Client, LEASE_MS};
use crate::units::{Error, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a helper that does not answer is left alone.
const AGAIN: Duration = Duration::from_secs(5);

/// Moves clocks.
pub trait Hands: Send {
    /// What they are, for people.
    fn name(&self) -> String;
    /// Sets clocks, and holds them while [`Hands::beat`] is called.
    fn set(&mut self, clocks: &Clocks) -> Result<()>;
    /// We are alive; others' changes are seen.
    fn beat(&mut self) -> Result<()>;
    /// Gives everything back.
    fn release(&mut self);
}

/// The helper's.
pub struct HelperHands {
    socket: PathBuf,
    client: Option<Client>,
    failed_at: Option<Instant>,
    wanted: Clocks,
}

impl HelperHands {
    /// Hands that reach for the helper when they are needed: it may start after us.
    pub fn new(socket: &Path) -> HelperHands {
        HelperHands { socket: socket.to_owned(), client: None, failed_at: None, wanted: Clocks::default() }
    }

    fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        if self.client.is_none() {
            if let Some(at) = self.failed_at.filter(|at| at.elapsed() < AGAIN) {
                let left = AGAIN.saturating_sub(at.elapsed());
                return Err(Error::Busy {
                    what: "the clock helper is away; reaching for it".into(),
                    retry: left,
                });
            }
            self.client =
                Some(Client::connect(&self.socket).inspect_err(|_| self.failed_at = Some(Instant::now()))?);
        }
        let client = self.client.as_mut().expect("it was connected");
        match client.ask(ask) {
            Ok(answer) => Ok(answer),
            // A helper that went away is reached for again; a refusal leaves the connection whole, but nothing is lost by
            // a new one.
            Err(e) => {
                self.client = None;
                self.failed_at = Some(Instant::now());
                Err(e)
            }
        }
    }
}

impl Hands for HelperHands {
    fn name(&self) -> String {
        match self.client {
            Some(_) => "helper".into(),
            None => "helper (away)".into(),
        }
    }

    fn set(&mut self, clocks: &Clocks) -> Result<()> {
        self.wanted = *clocks;
        self.ask(&Ask::Set { clocks: *clocks, lease_ms: LEASE_MS }).map(drop)
    }

    fn beat(&mut self) -> Result<()> {
        // After the helper was away, or we were for longer than our lease, it knows nothing of our wish.
        let is_held = self.client.is_some() && !self.ask(&Ask::Beat)?.lost;
        if is_held { Ok(()) } else { self.set(&self.wanted.clone()) }
    }

    fn release(&mut self) {
        if self.client.is_some()
            && let Err(e) = self.ask(&Ask::Release)
        {
            // Its lease runs out within seconds.
            log::warn!("clocks: {e}");
        }
        self.client = None;
    }
}

/// This process's own: as root where that was asked for, and on simulated boards.
pub struct DirectHands {
    actuator: Actuator,
}

impl DirectHands {
    /// Hands with the rights of this process.
    pub fn new(actuator: Actuator) -> DirectHands {
        DirectHands { actuator }
    }
}

impl Hands for DirectHands {
    fn name(&self) -> String {
        "this process".into()
    }

    fn set(&mut self, clocks: &Clocks) -> Result<()> {
        self.actuator.apply(clocks).map(drop)
    }

    fn beat(&mut self) -> Result<()> {
        self.actuator.reconcile().map(drop)
    }

    fn release(&mut self) {
        if let Err(e) = self.actuator.release() {
            log::error!("clocks: {e}; the next start puts them back");
        }
    }
}

impl Drop for DirectHands {
    /// However the thread that holds them ends.
    fn drop(&mut self) {
        self.release();
    }
}

/// No one's: why.
pub struct NoHands(pub String);

impl Hands for NoHands {
    fn name(&self) -> String {
        self.0.clone()
    }

    fn set(&mut self, _: &Clocks) -> Result<()> {
        Ok(())
    }

    fn beat(&mut self) -> Result<()> {
        Ok(())
    }

    fn release(&mut self) {}
}
