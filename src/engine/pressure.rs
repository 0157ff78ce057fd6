//! Memory pressure: how much the system, or the control group that this process lives in, wants back.
//!
//! Two signs count. Usage near the group's limit, of cgroup v1 or v2, comes first: beyond it the kernel kills. Stalls on memory
//! (PSI, Documentation/accounting/psi.rst of the kernel) say the same of the whole machine. Page cache that the kernel can drop
//! by itself is not usage.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes that should be free below a group's limit, and its share of a large one.
const FREE_BYTES: u64 = 256 << 20;
const FREE_SHARE: u64 = 16;
/// Share of time, in percent over 10 s, in which something waited for memory: from here on the machine is short of it.
const STALL_PERCENT: f64 = 10.0;
/// What stalls ask for at a time: they do not say how much is missing.
const STALL_BYTES: u64 = 128 << 20;
/// Between two looks.
const EVERY: Duration = Duration::from_millis(100);

/// One group's files.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    usage: PathBuf,
    limit: PathBuf,
    stat: PathBuf,
    /// The line of `stat` that counts page cache not used lately.
    inactive: &'static str,
}

/// Watches.
#[derive(Debug)]
pub struct Watch {
    groups: Vec<Group>,
    stalls: PathBuf,
    looked: Option<Instant>,
}

impl Watch {
    /// Watches this process's groups and its machine.
    pub fn new() -> Watch {
        Watch::at(Path::new("/"))
    }

    /// The same with another root of the file system.
    pub fn at(root: &Path) -> Watch {
        let own = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let groups = own.lines().flat_map(|line| groups(root, line)).collect();
        Watch { groups, stalls: root.join("proc/pressure/memory"), looked: None }
    }

    /// Bytes wanted back now; `None` if it was asked a moment ago.
    pub fn look(&mut self, now: Instant) -> Option<u64> {
        if self.looked.is_some_and(|at| now.duration_since(at) < EVERY) {
            return None;
        }
        self.looked = Some(now);
        let groups = self.groups.iter().filter_map(Group::wanted).max().unwrap_or(0);
        let stalled = fs::read_to_string(&self.stalls).is_ok_and(|t| stall_percent(&t) >= STALL_PERCENT);
        Some(groups.max(if stalled { STALL_BYTES } else { 0 }))
    }
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}

impl Group {
    /// Bytes by which what is free below the limit is too little.
    fn wanted(&self) -> Option<u64> {
        let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let limit = number(&self.limit)?; // "max" is no number, and no limit
        let stat = fs::read_to_string(&self.stat).unwrap_or_default();
        let line = stat.lines().find_map(|l| l.strip_prefix(self.inactive)?.trim().parse::<u64>().ok());
        let used = number(&self.usage)?.saturating_sub(line.unwrap_or(0));
        let free = (limit / FREE_SHARE).max(FREE_BYTES).min(limit / 2);
        Some(used.saturating_add(free).saturating_sub(limit))
    }
}

/// The groups of one line of /proc/self/cgroup (cgroups(7)), from the process's own up: any of them may have a limit. In a
/// container the path may be the host's while the root is its own, so that missing folders are left out.
fn groups(root: &Path, line: &str) -> Vec<Group> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return Vec::new() };
    let v2 = controllers.is_empty();
    if !v2 && !controllers.split(',').any(|c| c == "memory") {
        return Vec::new();
    }
    let (tree, usage, limit, inactive) = match v2 {
        true => ("sys/fs/cgroup", "memory.current", "memory.max", "inactive_file "),
        false => {
            ("sys/fs/cgroup/memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file ")
        }
    };
    let tree = root.join(tree);
    let own = tree.join(path.trim_start_matches('/'));
    let up = own.ancestors().take_while(|p| p.starts_with(&tree));
    let group = |p: &Path| Group {
        usage: p.join(usage),
        limit: p.join(limit),
        stat: p.join("memory.stat"),
        inactive,
    };
    up.map(group).filter(|g| g.limit.exists() && g.usage.exists()).collect()
}

/// `avg10` of the line "some" of a PSI file.
fn stall_percent(text: &str) -> f64 {
    let line = text.lines().find_map(|l| l.strip_prefix("some "));
    let avg = line.and_then(|l| l.split(' ').find_map(|f| f.strip_prefix("avg10=")));
    avg.and_then(|a| a.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn look(watch: &mut Watch) -> u64 {
        watch.looked = None;
        watch.look(Instant::now()).unwrap()
    }

    #[test]
    fn both_kinds_of_groups_are_watched() {
        const MB: u64 = 1 << 20;
        for (own, tree, names) in [
            ("0::/robot/tegu\n", "sys/fs/cgroup", ["memory.current", "memory.max", "inactive_file"]),
            (
                "5:cpu:/x\n4:memory:/robot/tegu\n",
                "sys/fs/cgroup/memory",
                ["memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"],
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path();
            put(root, "proc/self/cgroup", own);
            let at = |g: &str, n: usize| format!("{tree}/{g}{}", names[n]);
            put(root, &at("robot/tegu/", 1), &(4000 * MB).to_string());
            put(root, &at("robot/tegu/", 0), &(3000 * MB).to_string());
            put(
                root,
                &format!("{tree}/robot/tegu/memory.stat"),
                &format!("cache 5\n{} {}\n", names[2], 100 * MB),
            );
            let mut watch = Watch::at(root);
            assert_eq!(look(&mut watch), 0);
            put(root, &at("robot/tegu/", 0), &(3900 * MB).to_string());
            assert_eq!(look(&mut watch), 56 * MB, "3800 used, 4000 - 256 may be");
            assert_eq!(watch.look(Instant::now()), None, "not again at once");
            // The limit of a group above counts too, and one without a limit does not.
            put(root, &at("robot/", 1), &(3000 * MB).to_string());
            put(root, &at("robot/", 0), &(3900 * MB).to_string());
            put(root, &at("", 1), "max\n");
            put(root, &at("", 0), &(9000 * MB).to_string());
            assert_eq!(look(&mut Watch::at(root)), 1156 * MB);
        }
    }

    #[test]
    fn stalls_ask_for_some_and_a_bare_system_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(look(&mut Watch::at(root)), 0);
        let psi = |avg: &str| format!("some avg10={avg} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00\n");
        put(root, "proc/pressure/memory", &psi("9.99"));
        assert_eq!(look(&mut Watch::at(root)), 0);
        put(root, "proc/pressure/memory", &psi("12.50"));
        assert_eq!(look(&mut Watch::at(root)), STALL_BYTES);
        put(root, "proc/pressure/memory", "nonsense");
        put(root, "proc/self/cgroup", "no colons\n\n7:memory\n");
        assert_eq!(look(&mut Watch::at(root)), 0);
        assert!(Watch::new().look(Instant::now()).is_some(), "whatever this machine says");
    }
}
