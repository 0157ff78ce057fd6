//! The cores that this process may use, as a profile says: all its threads at once, at the start or while it runs, and
//! those that the system gave it once no profile says anything.

use crate::units::{Error, Result};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicBool, Ordering};

/// What the system gave, and whether a profile took some of it.
pub(super) struct Cores {
    own: Option<CpuSet>,
    confined: AtomicBool,
}

impl Cores {
    /// Remembers what this process has now.
    pub fn new() -> Cores {
        Cores { own: sched_getaffinity(None).ok(), confined: false.into() }
    }

    /// Confines all threads to a profile's list, such as `0-3,6`; nothing means what the system gave.
    pub fn confine(&self, cores: &str) -> Result<()> {
        if cores.is_empty() && !self.confined.load(Ordering::Relaxed) {
            return Ok(()); // whoever else changed them meant it
        }
        let set = match &self.own {
            Some(own) if cores.is_empty() => *own,
            _ => listed(cores),
        };
        set_all(&set).map_err(|e| {
            let found = format!("{cores:?}, which this system refuses ({e})");
            Error::bad("profile", "cpu.cores", "cores that there are", found)
        })?;
        self.confined.store(!cores.is_empty(), Ordering::Relaxed);
        Ok(())
    }
}

/// The cores of a list, which the profile checked.
fn listed(cores: &str) -> CpuSet {
    let ranges = cores.split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
    let mut set = CpuSet::new();
    for (low, high) in ranges {
        let number = |s: &str| s.trim().parse::<usize>().ok().filter(|n| *n < CpuSet::MAX_CPU);
        if let Some((low, high)) = number(low).zip(number(high)) {
            (low..=high).for_each(|core| set.set(core));
        }
    }
    set
}

/// The calling thread first, so that a set that the system refuses changes nothing. A thread that another one starts
/// meanwhile has its parent's cores: again until all that are there have been told.
fn set_all(set: &CpuSet) -> std::io::Result<()> {
    sched_setaffinity(None, set)?;
    let mut told = std::collections::HashSet::new();
    loop {
        let threads = std::fs::read_dir("/proc/self/task")?;
        let ids = threads.flatten().filter_map(|t| t.file_name().to_str()?.parse::<i32>().ok());
        let new: Vec<i32> = ids.filter(|id| told.insert(*id)).collect();
        if new.is_empty() {
            return Ok(());
        }
        for id in new.into_iter().filter_map(Pid::from_raw) {
            match sched_setaffinity(Some(id), set) {
                // It has ended.
                Err(rustix::io::Errno::SRCH) | Ok(()) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}
