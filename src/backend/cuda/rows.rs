//! The rows of a step and what the device is told about them: one small block of host memory, one copy a step.
//!
//! Rows that each stand for themselves (decode; absorbed latent attention) come first, then runs whose rows attend
//! together. Nothing but where a row lies depends on that order.

use super::driver::{Context, Device};
use super::memory::{Arena, Pinned, Ptr};
use super::pages::Pages;
use super::params::RowMap;
use crate::backend::{Input, Run, StepPlan, Want};
use crate::kv;
use crate::units::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A run of at most this many rows of grouped-query attention goes row by row: as many as a GEMV takes.
pub const ALONE_ROWS_MAX: usize = 8;
/// Arrays before the page addresses: tokens, positions, table starts, wanted rows.
const ARRAYS: usize = 4;

/// Consecutive rows of one sequence that attend together.
#[derive(Debug, Clone, Copy)]
pub struct Together {
    /// First row of the step.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// Entries of its block table.
    pub entries: usize,
}

/// The rows of a step.
pub struct Rows {
    /// First row of each run of the plan.
    first: Vec<usize>,
    /// Rows that stand for themselves; they come first.
    pub alone: usize,
    /// Entries of the longest of their block tables.
    pub entries: usize,
    /// The others.
    pub together: Vec<Together>,
    /// Rows in all.
    pub rows: usize,
    /// Rows that want logits, in the plan's order.
    pub wanted: Vec<u32>,
    rows_max: usize,
    pages_max: usize,
    host: Pinned,
    device: Ptr,
}

impl Rows {
    /// Bytes of the block on the device.
    pub fn bytes(rows_max: usize, pages_max: usize) -> usize {
        bytes(rows_max, pages_max)
    }

    /// Buffers for steps of `rows_max` rows whose block tables name `pages_max` pages in all.
    pub fn new(context: &Arc<Context>, arena: &mut Arena, rows_max: usize, pages_max: usize) -> Result<Rows> {
        let len = bytes(rows_max, pages_max);
        Ok(Rows {
            first: Vec::new(),
            alone: 0,
            entries: 0,
            together: Vec::new(),
            rows: 0,
            wanted: Vec::with_capacity(rows_max),
            rows_max,
            pages_max,
            host: Pinned::new(context, len)?,
            device: arena.take(len)?,
        })
    }

    /// Orders a plan's rows and fills the host block. `alone` says of each run whether its rows stand for themselves.
    pub fn set(&mut self, plan: &StepPlan, pages: &Pages, stride: usize, alone: &[bool]) -> Result<()> {
        self.first.clear();
        self.first.resize(plan.runs.len(), 0);
        self.together.clear();
        (self.rows, self.alone, self.entries) = (0, 0, 0);
        let mut table = 0;
        for of_alone in [true, false] {
            for (i, r) in plan.runs.iter().enumerate().filter(|(i, _)| alone[*i] == of_alone) {
                let first = self.rows;
                self.first[i] = first;
                self.rows += r.rows;
                let n = kv::pages_for(r.position + r.rows, stride);
                if table + n > self.pages_max {
                    return Err(Error::Limit {
                        what: "pages named by the block tables of one step".into(),
                        needs: (table + n).to_string(),
                        has: self.pages_max.to_string(),
                    });
                }
                self.put(first, r, table, pages, n);
                if of_alone {
                    self.entries = self.entries.max(n);
                } else {
                    self.together.push(Together { first, rows: r.rows, entries: n });
                }
                table += n;
            }
            if of_alone {
                self.alone = self.rows;
            }
        }
        self.want(plan);
        Ok(())
    }

    fn put(&mut self, first: usize, r: &Run, table: usize, pages: &Pages, n: usize) {
        let tokens = match r.input {
            Input::Tokens(ids) => Some(ids),
            Input::Hidden(_) => None,
        };
        let words = self.words();
        let max = words.len() / ARRAYS;
        for i in 0..r.rows {
            words[first + i] = tokens.map_or(0, |ids| ids[i]);
            words[max + first + i] = (r.position + i) as u32;
            words[2 * max + first + i] = table as u32;
        }
        let at = self.pages_at();
        let to = &mut self.host.bytes_mut()[at + 8 * table..at + 8 * (table + n)];
        for (to, &page) in to.as_chunks_mut::<8>().0.iter_mut().zip(&r.pages[..n]) {
            *to = pages.address(page).0.to_ne_bytes();
        }
    }

    fn want(&mut self, plan: &StepPlan) {
        self.wanted.clear();
        for (run, r) in plan.runs.iter().enumerate() {
            let first = self.first[run] as u32;
            match r.want {
                Want::Nothing => {}
                Want::Last => self.wanted.push(first + r.rows as u32 - 1),
                Want::All => self.wanted.extend(first..first + r.rows as u32),
            }
        }
        let wanted = std::mem::take(&mut self.wanted);
        let max = self.rows_max;
        self.words()[3 * max..][..wanted.len()].copy_from_slice(&wanted);
        self.wanted = wanted;
    }

    fn words(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.host.bytes_mut()[..4 * ARRAYS * self.rows_max])
    }

    fn pages_at(&self) -> usize {
        bytes(self.rows_max, 0)
    }

    /// Copies the block to the device, in stream order.
    pub fn send(&self, device: &Device) -> Result<()> {
        device.copy_in(self.device, self.host.bytes())
    }

    /// `(rows)` u32 token ids on the device.
    pub fn tokens(&self) -> Ptr {
        self.device
    }

    /// `(wanted)` u32 row numbers on the device.
    pub fn wanted_at(&self) -> Ptr {
        self.device.f32s(3 * self.rows_max)
    }

    /// Positions and block tables on the device.
    pub fn map(&self) -> RowMap {
        RowMap {
            position: self.device.f32s(self.rows_max),
            table: self.device.f32s(2 * self.rows_max),
            pages: self.device.at(self.pages_at() as u64),
        }
    }

    /// Calls `f(rows in the plan's order, rows here)` for every run.
    pub fn each_run(&self, plan: &StepPlan, mut f: impl FnMut(&Run, Range<usize>, Range<usize>)) {
        let mut at = 0;
        for (run, r) in plan.runs.iter().enumerate() {
            f(r, at..at + r.rows, self.first[run]..self.first[run] + r.rows);
            at += r.rows;
        }
    }
}

/// Bytes of the block; the page addresses start on 8.
fn bytes(rows_max: usize, pages_max: usize) -> usize {
    (ARRAYS * 4 * rows_max).next_multiple_of(8) + 8 * pages_max
}
