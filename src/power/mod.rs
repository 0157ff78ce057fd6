//! Power: what the board measures, and how its clocks are steered. Everything is optional: a sensor that a board, a
//! kernel or a release lacks is absent, never zero.
//!
//! ```text
//! nodes (files of a board, real or simulated) ─► board, sensors ─► Sample ─► governor ─► Budget, Clocks ─► helper ─► nodes
//! ```
//!
//! Nothing here runs on its own: the daemon, or a command, holds the pieces and calls them.

pub mod board;
mod built_in;
pub mod clocks;
pub mod cores;
mod draw;
pub mod energy;
pub mod find;
pub mod governor;
pub mod helper;
pub mod ledger;
pub mod modes;
pub mod nodes;
pub mod nvidia;
pub mod profile;
pub mod recording;
pub mod report;
pub mod sane;
pub mod sensors;
pub mod sim;
pub mod status;
pub mod trial;
pub mod tune;
pub mod types;
pub mod wire;
