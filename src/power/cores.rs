//! How busy each CPU core is, from `/proc/stat`: the share of time since the look before that it was not idle.

use super::nodes::Nodes;

const STAT: &str = "/proc/stat";
/// More cores than any board has; a longer list is cut.
const CORES_MAX: usize = 1024;

/// Counts of the look before.
#[derive(Debug, Clone, Default)]
pub struct Cores {
    /// By core number: `(busy, all)` in the kernel's ticks; none for a core that was off.
    before: Vec<Option<(u64, u64)>>,
}

impl Cores {
    /// Looks, and tells what happened since the look before, of a thousand a core; nothing at the first look. A core that is
    /// off, or came back just now, has no share.
    pub fn look(&mut self, nodes: &dyn Nodes) -> Vec<Option<u16>> {
        let now = nodes.read(STAT).map_or(Vec::new(), |text| counts(&text));
        let share = |(i, now): (usize, &Option<(u64, u64)>)| {
            let (busy, all) = (*now)?;
            let (busy_before, all_before) = (*self.before.get(i)?)?;
            let passed = all.checked_sub(all_before).filter(|p| *p > 0)?;
            Some((busy.saturating_sub(busy_before).min(passed) * 1000 / passed) as u16)
        };
        let first = self.before.is_empty();
        let shares: Vec<Option<u16>> = now.iter().enumerate().map(share).collect();
        self.before = now;
        if first { Vec::new() } else { shares }
    }
}

/// `cpu3 user nice system idle iowait irq softirq steal …` in ticks (proc(5)); guests are counted in user already.
fn counts(text: &str) -> Vec<Option<(u64, u64)>> {
    let mut cores = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let number = words.next().and_then(|w| w.strip_prefix("cpu")).and_then(|n| n.parse::<usize>().ok());
        let Some(number) = number.filter(|n| *n < CORES_MAX) else { continue };
        let ticks: Vec<u64> = words.take(8).map_while(|w| w.parse().ok()).collect();
        if ticks.len() < 4 {
            continue;
        }
        let all: u64 = ticks.iter().fold(0, |a, t| a.saturating_add(*t));
        let idle = ticks[3].saturating_add(ticks.get(4).copied().unwrap_or(0));
        if cores.len() <= number {
            cores.resize(number + 1, None);
        }
        cores[number] = Some((all.saturating_sub(idle), all));
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Mutex;

    struct Stat(Mutex<&'static str>);

    impl Nodes for Stat {
        fn read(&self, path: &str) -> io::Result<String> {
            assert_eq!(path, STAT);
            Ok((*self.0.lock().unwrap()).to_owned())
        }
        fn write(&self, _: &str, _: &str) -> io::Result<()> {
            Err(io::Error::from(io::ErrorKind::PermissionDenied))
        }
        fn list(&self, _: &str) -> io::Result<Vec<String>> {
            Err(io::Error::from(io::ErrorKind::NotFound))
        }
        fn now_us(&self) -> u64 {
            0
        }
        fn sleep(&self, _: u64) {}
    }

    #[test]
    fn shares_are_of_the_time_between_two_looks() {
        let stat =
            Stat(Mutex::new("cpu  9 9 9 9\ncpu0 100 0 100 700 100 0 0 0 50 0\ncpu2 0 0 0 10\nintr 1\n"));
        let mut cores = Cores::default();
        assert_eq!(cores.look(&stat), []);
        // Core 0: 30 of 40 ticks busy. Core 1 comes up. Core 2 stood still: no time passed for it.
        *stat.0.lock().unwrap() = "cpu0 120 0 110 705 105 0 0 0 60 0\ncpu1 5 5 5 5 5 5 5 5\ncpu2 0 0 0 10\n";
        assert_eq!(cores.look(&stat), [Some(750), None, None]);
        *stat.0.lock().unwrap() = "cpu0 1 0\ncpu1 x\ncpu99999999 1 1 1 1\ncpu 1 1 1 1";
        assert_eq!(cores.look(&stat), []);
    }
}
