//! Memory pressure: how much the system, or the control group that this process lives in, wants back.
//!
//! Two signs count. Usage near a limit of the process's group, or of any group above it, comes first: beyond `memory.max` (or
//! cgroup v1's limit) the kernel kills, beyond `memory.high` it slows every allocation down. Page cache that the kernel can
//! drop by itself is not usage. Stalls on memory (PSI) say the same of the whole machine, and of each group of cgroup v2.
//! The kernel's Documentation: admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst, accounting/psi.rst.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes that should be free below a group's limit, and its share of a large one.
const FREE_BYTES: u64 = 256 << 20;
const FREE_SHARE: u64 = 16;
/// Something waited for memory for so long within [`STALL_WINDOW`]: the machine is short of it. The kernel's own triggers
/// are defined the same way; these are looked at instead, because a trigger needs a file that may be written, which a
/// service's group often is not. The averages that stand beside the total (over 10 s and more) go on saying so long after it
/// is over.
const STALL: Duration = Duration::from_millis(100);
const STALL_WINDOW: Duration = Duration::from_secs(1);
/// What stalls ask for at a time: they do not say how much is missing.
const STALL_BYTES: u64 = 128 << 20;
/// Between two looks.
const EVERY: Duration = Duration::from_millis(100);

/// One group's files. Any of them may be missing: the root of cgroup v2 has none, and a group whose parent does not hand the
/// memory controller down has none either, and is counted in its parent. They may also come later.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    usage: PathBuf,
    /// The least of them counts.
    limits: Vec<PathBuf>,
    stat: PathBuf,
    /// The line of `stat` that counts page cache not used lately, of the groups below too, as usage does.
    inactive: &'static str,
}

/// Watches.
#[derive(Debug)]
pub struct Watch {
    root: PathBuf,
    /// What /proc/self/cgroup said; who manages services may move a process.
    own: String,
    groups: Vec<Group>,
    /// The machine's stalls, and those of its groups.
    stalls: Vec<Stalls>,
    looked: Option<Instant>,
}

/// A PSI file, and its total at the beginning of the present window.
#[derive(Debug)]
struct Stalls {
    file: PathBuf,
    since: Option<(Instant, u64)>,
}

impl Watch {
    /// Watches this process's groups and its machine.
    pub fn new() -> Watch {
        Watch::at(Path::new("/"))
    }

    /// The same with another root of the file system.
    pub fn at(root: &Path) -> Watch {
        let mut watch = Watch {
            root: root.into(),
            own: String::new(),
            groups: Vec::new(),
            stalls: vec![Stalls::of(root.join("proc/pressure/memory"))],
            looked: None,
        };
        watch.find_groups();
        watch
    }

    /// Takes the groups that the process is in now, if they are others than before.
    fn find_groups(&mut self) {
        let own = fs::read_to_string(self.root.join("proc/self/cgroup")).unwrap_or_default();
        if own == self.own {
            return;
        }
        let found: Vec<(Group, Option<PathBuf>)> =
            own.lines().flat_map(|line| groups(&self.root, line)).collect();
        self.stalls.truncate(1);
        self.stalls.extend(found.iter().filter_map(|(_, psi)| psi.clone()).map(Stalls::of));
        self.groups = found.into_iter().map(|(group, _)| group).collect();
        self.own = own;
    }

    /// Bytes that can be taken below the limits of this process's groups, all page cache dropped; `None` if there is no limit.
    pub fn free_bytes(&self) -> Option<u64> {
        self.groups.iter().filter_map(Group::free).min()
    }

    /// Bytes wanted back now; `None` if it was asked a moment ago.
    pub fn look(&mut self, now: Instant) -> Option<u64> {
        if self.looked.is_some_and(|at| now.duration_since(at) < EVERY) {
            return None;
        }
        self.looked = Some(now);
        self.find_groups();
        let groups = self.groups.iter().filter_map(Group::wanted).max().unwrap_or(0);
        // All are looked at: each has its own window.
        let stalled = self.stalls.iter_mut().fold(false, |any, s| s.look(now) | any);
        Some(groups.max(if stalled { STALL_BYTES } else { 0 }))
    }
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}

impl Group {
    /// The limit, and what is used without the page cache that these lines of `stat` count; `None` without a limit.
    fn limit_and_used(&self, cache: &[&str]) -> Option<(u64, u64)> {
        let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        // "max" is no number, and no limit.
        let limit = self.limits.iter().filter_map(|l| number(l)).min()?;
        let stat = fs::read_to_string(&self.stat).unwrap_or_default();
        let count = |line: &&str| stat.lines().find_map(|l| l.strip_prefix(line)?.trim().parse::<u64>().ok());
        let cached = cache.iter().filter_map(count).fold(0u64, u64::saturating_add);
        Some((limit, number(&self.usage)?.saturating_sub(cached)))
    }

    /// Bytes below the limit, page cache in use counted as free: the kernel drops that too before it kills.
    fn free(&self) -> Option<u64> {
        let active = self.inactive.replace("inactive", "active");
        let (limit, used) = self.limit_and_used(&[self.inactive, &active])?;
        Some(limit.saturating_sub(used))
    }

    /// Bytes by which what is free below the limit is too little; `None` without a limit.
    fn wanted(&self) -> Option<u64> {
        let (limit, used) = self.limit_and_used(&[self.inactive])?;
        let free = (limit / FREE_SHARE).max(FREE_BYTES).min(limit / 2);
        Some(used.saturating_add(free).saturating_sub(limit))
    }
}

impl Stalls {
    fn of(file: PathBuf) -> Stalls {
        Stalls { file, since: None }
    }

    /// True if the present window had too long a stall; the next begins then, so that one stall asks once.
    fn look(&mut self, now: Instant) -> bool {
        // Without PSI in the kernel the file is missing, or cannot be read.
        let total_us = fs::read_to_string(&self.file).ok().and_then(|t| stalled_us(&t));
        let Some(total_us) = total_us else {
            self.since = None;
            return false;
        };
        let (began, before) = *self.since.get_or_insert((now, total_us));
        let stalled = u128::from(total_us.saturating_sub(before)) >= STALL.as_micros();
        if stalled || now.duration_since(began) >= STALL_WINDOW {
            self.since = Some((now, total_us));
        }
        stalled
    }
}

/// The groups of one line of /proc/self/cgroup (cgroups(7)), from the process's own up, each with its PSI file if its kind has
/// one: any of them may have a limit, and a group's limit holds for all below it. In a container the path may be the host's
/// while the root is its own; what is not there says nothing.
fn groups(root: &Path, line: &str) -> Vec<(Group, Option<PathBuf>)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return Vec::new() };
    let v2 = controllers.is_empty();
    if !v2 && !controllers.split(',').any(|c| c == "memory") {
        return Vec::new();
    }
    // A group outside of what this process's namespace shows begins with "/..": none of it can be seen.
    if path.split('/').any(|part| part == "..") {
        return Vec::new();
    }
    let tree = root.join(if v2 { "sys/fs/cgroup" } else { "sys/fs/cgroup/memory" });
    let own = tree.join(path.trim_start_matches('/'));
    let up = own.ancestors().take_while(|p| p.starts_with(&tree));
    let group = |p: &Path| match v2 {
        true => (
            Group {
                usage: p.join("memory.current"),
                limits: vec![p.join("memory.max"), p.join("memory.high")],
                stat: p.join("memory.stat"),
                inactive: "inactive_file ",
            },
            Some(p.join("memory.pressure")),
        ),
        false => (
            Group {
                usage: p.join("memory.usage_in_bytes"),
                limits: vec![p.join("memory.limit_in_bytes")],
                stat: p.join("memory.stat"),
                inactive: "total_inactive_file ",
            },
            None,
        ),
    };
    up.map(group).collect()
}

/// `total` of the line "some" of a PSI file: microseconds in which something waited.
fn stalled_us(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("some "))?;
    line.split(' ').find_map(|f| f.strip_prefix("total="))?.trim().parse().ok()
}

#[cfg(test)]
#[path = "pressure_tests.rs"]
mod tests;
