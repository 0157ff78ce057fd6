//! What each part of the screen says, as lines. What a board does not tell is a dash or is left out, never a zero.

use ratatui::text::{Line, Span};

use super::history::{DECODE, HOTTEST, History, TOTAL};
use super::look::Look;
use crate::power::status::Status;
use crate::power::types::Fault;
use crate::units::Bytes;

/// All that is drawn from.
pub struct View<'a> {
    /// The last status.
    pub status: &'a Status,
    /// What came before.
    pub history: &'a History,
    /// How to draw.
    pub look: Look,
}

/// Rows of cores, so that a dozen of them leave room for the rest.
const CORE_ROWS: usize = 4;
/// Cells of a core in its column: number, share, and a bar worth the name.
const CORE_CELLS_MIN: usize = 12;
/// A zone from here on deserves a look: the governor steps in here.
const WARM_MC: i32 = 85_000;
/// A zone from here on is close to what makes the board slow itself down (99 °C).
const HOT_MC: i32 = 95_000;
/// Cells of a name in front of a value.
const NAME: usize = 8;

/// `text` cut or filled to `width` cells; every text that comes from outside goes through here. Wide characters count as
/// what they take.
pub fn cell(text: &str, width: usize) -> String {
    let (mut out, mut used) = (String::new(), 0);
    for c in text.chars() {
        let span = Span::raw(c.to_string()).width();
        // What moves the cursor or takes no place is no text.
        if c.is_control() || span == 0 {
            continue;
        }
        if used + span > width {
            break;
        }
        out.push(c);
        used += span;
    }
    out.extend(std::iter::repeat_n(' ', width - used));
    out
}

/// A frequency in MHz, or a dash.
fn mhz(hz: Option<u64>) -> String {
    hz.map_or("-".into(), |hz| {
        let mhz = hz as f64 / 1e6;
        if mhz.fract() < 0.05 || mhz >= 1000.0 { format!("{mhz:.0}") } else { format!("{mhz:.1}") }
    })
}

fn watts(mw: u32) -> String {
    format!("{:.2} W", f64::from(mw) / 1e3)
}

/// Three digits, or a little less.
fn short(x: f64) -> String {
    match x {
        _ if x >= 99.95 => format!("{x:.0}"),
        _ if x >= 9.995 => format!("{x:.1}"),
        _ if x >= 0.0995 => format!("{x:.2}"),
        0.0 => "0".into(),
        _ => format!("{x:.3}"),
    }
}

/// Joules without the unit, in few digits.
fn joules(mj: u64) -> String {
    match mj {
        0..100_000 => format!("{:.1}", mj as f64 / 1e3),
        100_000..100_000_000 => format!("{:.0}", mj as f64 / 1e3),
        100_000_000..100_000_000_000 => format!("{:.0}k", mj as f64 / 1e6),
        _ => format!("{:.0}M", mj as f64 / 1e9),
    }
}

impl View<'_> {
    fn named(&self, name: &str, rest: impl Into<String>) -> Line<'static> {
        Line::from(vec![Span::styled(cell(name, NAME), self.look.name()), Span::raw(rest.into())])
    }

    fn nothing(&self, what: &str) -> Vec<Line<'static>> {
        vec![Line::from(Span::styled(what.to_owned(), self.look.frame()))]
    }

    /// CPU cores, GPU and memory clock.
    pub fn processors(&self, width: usize) -> Vec<Line<'static>> {
        let s = &self.status.sample;
        let mut lines = self.cores(width);
        if !s.cpus.is_empty() {
            let clock = |c: &crate::power::types::CpuClock| {
                format!("{}/{}", mhz(Some(c.cur_hz)), mhz(Some(c.max_hz)))
            };
            let clocks: Vec<String> = s.cpus.iter().map(clock).collect();
            lines.push(self.named("CPU", format!("{} MHz", clocks.join("  "))));
        }
        if s.gpu_hz.is_some() || s.gpu_load_permille.is_some() {
            let load = s.gpu_load_permille.map_or(String::new(), |l| format!(" {:>3}%", l / 10));
            let range = match (s.gpu_min_hz, s.gpu_max_hz) {
                (None, None) => String::new(),
                (low, high) => format!(" ({}-{})", mhz(low), mhz(high)),
            };
            let clocks = format!("{load} {} MHz{range}", mhz(s.gpu_hz));
            let room = width.saturating_sub(NAME + clocks.len()).min(24);
            let bar = s.gpu_load_permille.filter(|_| room > 3);
            let bar = bar.map_or(String::new(), |l| self.look.bar(room, u64::from(l)));
            lines.push(self.named("GPU", format!("{bar}{clocks}").trim_start().to_owned()));
        }
        if s.emc_hz.is_some() || s.emc_cap_hz.is_some() {
            let locked = if s.emc_locked == Some(true) { " held" } else { "" };
            let cap = s.emc_cap_hz.map_or(String::new(), |hz| format!(" (cap {})", mhz(Some(hz))));
            lines.push(self.named("memory", format!("{} MHz{locked}{cap}", mhz(s.emc_hz))));
        }
        if lines.is_empty() { self.nothing("no processor tells its load or clock") } else { lines }
    }

    fn cores(&self, width: usize) -> Vec<Line<'static>> {
        let cores = &self.status.cores_permille;
        let columns_max = (width / CORE_CELLS_MIN).max(1);
        let columns = cores.len().div_ceil(CORE_ROWS).clamp(1, columns_max);
        let rows = cores.len().div_ceil(columns);
        let cells = width / columns;
        if rows > 2 * CORE_ROWS {
            // A server's worth of cores: what matters is the whole and the busiest.
            let on: Vec<u16> = cores.iter().flatten().copied().collect();
            let mean = on.iter().map(|l| u64::from(*l)).sum::<u64>() / on.len().max(1) as u64;
            let most = on.iter().max().copied().unwrap_or(0);
            let text = format!(" {:>3}% of {} cores, busiest {}%", mean / 10, on.len(), most / 10);
            let bar = self.look.bar(width.saturating_sub(NAME + text.len()).min(24), mean);
            return vec![self.named("cores", format!("{bar}{text}"))];
        }
        let core = |i: usize| match cores.get(i) {
            None => String::new(),
            Some(None) => cell(&format!("{i:>2} off"), cells),
            Some(Some(load)) => {
                let bar = self.look.bar(cells.saturating_sub(9), u64::from(*load));
                format!("{i:>2} {bar} {:>3}% ", load / 10)
            }
        };
        let line = |row: usize| Line::raw((0..columns).map(|c| core(c * rows + row)).collect::<String>());
        (0..rows).map(line).collect()
    }

    /// Memory and swap.
    pub fn memory(&self, width: usize) -> Vec<Line<'static>> {
        let Some(m) = self.status.sample.memory else { return self.nothing("memory is not told") };
        let used = m.total_bytes.saturating_sub(m.available_bytes);
        let mut lines = vec![self.share("used", used, m.total_bytes, width)];
        if let Some(gpu) = m.gpu_bytes {
            lines.push(self.share("by GPU", gpu, m.total_bytes, width));
        }
        match m.swap_total_bytes {
            0 => lines.push(self.named("swap", "none")),
            total => lines.push(self.share("swap", m.swap_used_bytes, total, width)),
        }
        lines
    }

    fn share(&self, name: &str, used: u64, total: u64, width: usize) -> Line<'static> {
        let text = format!(" {} of {}", Bytes(used), Bytes(total));
        let permille = u128::from(used) * 1000 / u128::from(total.max(1));
        let room = width.saturating_sub(NAME + text.len()).min(24);
        let bar = if room > 3 { self.look.bar(room, permille as u64) } else { String::new() };
        self.named(name, format!("{bar}{text}"))
    }

    /// Rails with their past, and energy by phase.
    pub fn power(&self, width: usize) -> Vec<Line<'static>> {
        let s = &self.status.sample;
        let mut lines = Vec::new();
        // The total is often a rail itself: once is enough.
        let total_rail = s.rails.iter().find(|r| Some(r.power_mw) == s.total_mw && r.label == "VDD_IN");
        if let Some(mw) = s.total_mw {
            let label = total_rail.map_or("total", |r| r.label.as_str());
            lines.push(self.rail(label, TOTAL, mw, width));
        }
        let others = s.rails.iter().filter(|r| total_rail.is_none_or(|t| t.label != r.label));
        lines.extend(others.map(|r| self.rail(&r.label, &r.label, r.power_mw, width)));
        if lines.is_empty() {
            lines = self.nothing("no power sensor answers");
        }
        let phases: Vec<String> = self
            .status
            .energy
            .iter()
            .filter(|e| e.time_us > 0)
            .map(|e| format!("{} {}", e.phase.name(), joules(e.energy_mj)))
            .collect();
        if !phases.is_empty() {
            lines.push(Line::raw(cell(&format!("J: {}", phases.join(" ")), width)));
        }
        lines
    }

    /// The module's power as a chart of `rows` lines.
    pub fn chart(&self, width: usize, rows: usize) -> Vec<Line<'static>> {
        let values = self.history.values(TOTAL, width);
        let columns = self.look.chart(width, rows, &values, 1000);
        columns.into_iter().map(|c| Line::from(Span::styled(c, self.look.good()))).collect()
    }

    fn rail(&self, label: &str, line: &str, mw: u32, width: usize) -> Line<'static> {
        const LABEL: usize = 15;
        let value = format!("{:>8}", watts(mw));
        let room = width.saturating_sub(LABEL + value.len() + 1);
        // A watt is the scale's least, so that noise at idle does not look like a storm.
        let spark = self.look.spark(room, &self.history.values(line, room), 1000);
        Line::from(vec![
            Span::styled(cell(label, LABEL), self.look.name()),
            Span::raw(value + " "),
            Span::styled(spark, self.look.good()),
        ])
    }

    /// Temperatures by zone.
    pub fn heat(&self, width: usize) -> Vec<Line<'static>> {
        let zones = &self.status.sample.zones;
        if zones.is_empty() {
            return self.nothing("no thermal zone answers");
        }
        const CELLS: usize = 18;
        let columns = (width / CELLS).clamp(1, zones.len());
        let rows = zones.len().div_ceil(columns);
        let zone = |i: usize| {
            let z = zones.get(i)?;
            let name = z.kind.strip_suffix("-thermal").unwrap_or(&z.kind);
            let (mark, style) = match z.temp_mc {
                HOT_MC.. => ("!!", self.look.bad()),
                WARM_MC.. => ("! ", self.look.warn()),
                _ => ("  ", self.look.good()),
            };
            let value = format!("{:>5.1} C{mark}", f64::from(z.temp_mc) / 1e3);
            Some([
                Span::styled(cell(name, width / columns - value.len()), self.look.name()),
                Span::styled(value, style),
            ])
        };
        let line = |row: usize| {
            Line::from((0..columns).filter_map(|c| zone(c * rows + row)).flatten().collect::<Vec<_>>())
        };
        let mut lines: Vec<Line<'static>> = (0..rows).map(line).collect();
        let room = width.saturating_sub(NAME);
        let past = self.history.values(HOTTEST, room);
        if past.len() > 1 {
            lines.push(self.named("hottest", self.look.spark(room, &past, 100)));
        }
        lines
    }

    /// What holds the board back, the fan, and sensors that lie.
    pub fn limits(&self, width: usize) -> Vec<Line<'static>> {
        let s = &self.status.sample;
        let mut lines = Vec::new();
        let mut held: Vec<&str> =
            s.throttle.active.iter().chain(&s.throttle.gpu_reasons).map(String::as_str).collect();
        if s.throttle.hot_surface {
            held.push("hot surface (70 C)");
        }
        let (text, style) = match held.is_empty() {
            true => ("nothing".to_owned(), self.look.good()),
            false => (held.join(", "), self.look.bad()),
        };
        let line = |name: &str, text: String, style| {
            let room = width.saturating_sub(NAME + 1);
            Line::from(vec![
                Span::styled(cell(name, NAME + 1), self.look.name()),
                Span::styled(cell(&text, room), style),
            ])
        };
        lines.push(line("held by", text, style));
        if s.throttle.oc_counts.iter().any(Option::is_some) {
            let count = |(i, n): (usize, &Option<u64>)| {
                format!("OC{} {}", i + 1, n.map_or("-".into(), |n| n.to_string()))
            };
            let counts: Vec<String> = s.throttle.oc_counts.iter().enumerate().map(count).collect();
            let any = s.throttle.oc_counts.iter().flatten().any(|n| *n > 0);
            let style = if any { self.look.warn() } else { self.look.good() };
            lines.push(line("events", counts.join("  "), style));
        }
        for f in &s.faults {
            let what = match f.fault {
                Fault::Missing => "is gone",
                Fault::Frozen => "is frozen",
                Fault::Absurd => "says what cannot be",
            };
            lines.push(line("sensor", format!("{} {what}", f.sensor), self.look.bad()));
        }
        let pwm = s.fan.and_then(|f| f.pwm).map(|p| format!("{}%", u32::from(p) * 100 / 255));
        let rpm = s.fan.and_then(|f| f.rpm).map(|r| format!("{r} rpm"));
        let fan: Vec<String> = pwm.into_iter().chain(rpm).collect();
        if !fan.is_empty() {
            lines.push(line("fan", fan.join("  "), self.look.good()));
        }
        lines
    }

    /// What the daemon does, and what the governor decided.
    pub fn daemon(&self, width: usize) -> Vec<Line<'static>> {
        let s = self.status;
        let mut lines = Vec::new();
        match &s.served {
            None => lines.extend(self.nothing("no daemon: the board alone")),
            Some(d) => {
                let model = cell(d.model.as_deref().unwrap_or("none in memory"), width.saturating_sub(NAME));
                lines.push(self.named("model", model.trim_end().to_owned()));
                let phase = s.phase.map_or("-", |p| p.name());
                let work = format!("{phase}; {} open ({} in, {} out)", d.open, d.prefilling, d.decoding);
                lines.push(self.named("doing", work));
                let rates = self.history.rates().unwrap_or_default();
                let energy = rates.decode_j.map_or(String::new(), |j| format!(", {} J/tok", short(j)));
                let speed = format!("in {}/s, out {}/s{energy}", short(rates.prefill), short(rates.decode));
                lines.push(self.named("tokens", speed));
                let room = width.saturating_sub(NAME);
                let past = self.history.values(DECODE, room);
                if past.iter().any(|v| *v > 0) {
                    lines.push(self.named("out/s", self.look.spark(room, &past, 1)));
                }
            }
        }
        if let Some(asked) = &s.asked {
            let part = |name: &str, hz: Option<u64>| hz.map(|_| format!("{name} {}", mhz(hz)));
            let parts = [
                part("GPU to", asked.gpu_cap_hz),
                part("GPU from", asked.gpu_floor_hz),
                part("memory from", asked.emc_floor_hz),
                part("memory to", asked.emc_cap_hz),
            ];
            let parts: Vec<String> = parts.into_iter().flatten().collect();
            let text = if parts.is_empty() { "the system's own".into() } else { parts.join(", ") };
            lines.push(self.named("clocks", text));
        }
        if let Some(a) = s.allowed {
            let pause = if a.pause { ", paused" } else { "" };
            lines.push(
                self.named("allows", format!("{} rows, chunks of {}{pause}", a.max_batch, a.prefill_chunk)),
            );
        }
        if !s.reasons.is_empty() {
            let why = cell(&s.reasons.join("; "), width.saturating_sub(NAME));
            lines.push(self.named("because", why.trim_end().to_owned()));
        }
        lines
    }
}
