//! Power: sensors, clocks and their helper, on trees of plain files that stand for boards.

mod clocks;
mod detect;
mod energy;
mod helper;
mod nvml;
mod top;
pub mod trees;
