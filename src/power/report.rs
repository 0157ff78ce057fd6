//! A recording as one page that needs nothing else: what it took, phase by phase, and curves of power, heat and clocks.

use std::fmt::Write as _;

use super::recording::{Moment, Recording};
use super::types::Phase;

/// Points of a curve at most: more than a screen has columns only costs bytes.
const POINTS_MAX: usize = 900;
/// Longest gap between two samples that still counts as time in which the first held.
const GAP_S: f64 = 10.0;

/// What a recording took.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    /// Its length.
    pub seconds: f64,
    /// Time in which power is known, and energy in it.
    pub metered_s: f64,
    /// Energy by the meters.
    pub energy_j: f64,
    /// Highest power, and when.
    pub peak: Option<(f64, f64)>,
    /// Highest temperature, and when.
    pub hottest: Option<(f64, f64)>,
    /// Tokens generated.
    pub tokens: Option<f64>,
    /// Time and energy by [`Phase::index`], where phases are known.
    pub phases: [(f64, f64); 3],
    /// Over-current events.
    pub oc: [Option<f64>; 3],
    /// Time with the kernel throttling.
    pub throttled_s: f64,
    /// Time with a sensor that could not be trusted.
    pub faulty_s: f64,
}

impl Summary {
    /// Adds up a recording. A sample's power holds until the next, within limits; the meters' lag moves energy by a
    /// second or two between neighbours and loses none.
    pub fn of(recording: &Recording) -> Summary {
        let moments = &recording.moments;
        let mut sum = Summary::default();
        let (Some(first), Some(last)) = (moments.first(), moments.last()) else { return sum };
        sum.seconds = last.at_s - first.at_s;
        for pair in moments.windows(2) {
            let held_s = (pair[1].at_s - pair[0].at_s).min(GAP_S);
            if let (Some(a), Some(b)) = (pair[0].total_w, pair[1].total_w) {
                let joules = (a + b) / 2.0 * held_s;
                sum.metered_s += held_s;
                sum.energy_j += joules;
                if let Some(phase) = pair[0].phase {
                    let (s, j) = &mut sum.phases[phase.index()];
                    (*s, *j) = (*s + held_s, *j + joules);
                }
            }
            sum.throttled_s += if pair[0].throttle.is_empty() { 0.0 } else { held_s };
            sum.faulty_s += if pair[0].faults.is_empty() { 0.0 } else { held_s };
        }
        let most = |pick: &dyn Fn(&Moment) -> Option<f64>| {
            let all = moments.iter().filter_map(|m| Some((pick(m)?, m.at_s)));
            all.max_by(|a, b| a.0.total_cmp(&b.0))
        };
        sum.peak = most(&|m| m.total_w);
        sum.hottest = most(&Moment::hottest_c);
        let gained = |a: Option<f64>, b: Option<f64>| Some(b? - a?).filter(|d| *d >= 0.0);
        sum.tokens = gained(first.tokens, last.tokens).filter(|t| *t > 0.0);
        sum.oc = std::array::from_fn(|n| gained(first.oc[n], last.oc[n]));
        sum
    }

    /// Mean power while it was metered.
    pub fn mean_w(&self) -> Option<f64> {
        (self.metered_s > 0.0).then(|| self.energy_j / self.metered_s)
    }
}

/// What a curve shows of a moment; nothing where it was not metered.
type Value<'a> = Box<dyn Fn(&Moment) -> Option<f64> + 'a>;

/// A curve: name, colour, points.
struct Curve<'a> {
    name: String,
    colour: &'static str,
    value: Value<'a>,
    /// A step holds its value until the next point, as clocks do.
    steps: bool,
}

const COLOURS: [&str; 6] = ["#2f81d6", "#e0762b", "#3c9a5f", "#9a5fc2", "#c4443e", "#7a8794"];
const PHASE_COLOURS: [&str; 3] = ["#e0762b", "#2f81d6", "#c3ccd5"];

/// The page.
pub fn html(recording: &Recording) -> String {
    let sum = Summary::of(recording);
    let fact = |key: &str| recording.facts.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str());
    let title = escape(fact("board").unwrap_or("Board"));
    let facts: Vec<String> = recording
        .facts
        .iter()
        .filter(|(k, _)| k != "board")
        .map(|(k, v)| format!("<span><b>{}</b> {}</span>", escape(k), escape(v)))
        .collect();
    let mut body = format!("<h1>{title}</h1>\n<p class=facts>{}</p>\n", facts.join(" "));
    body += &tiles(&sum);
    body += &warnings(recording, &sum);
    body += &charts(recording);
    body += &phases(&sum);
    body += "<p class=note>Power is that of the module's own meters: each value is an average over about half a second and one to \
             two seconds late, so that bursts shorter than that are flattened. It is not what a wall meter shows.</p>\n";
    format!(
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width\">\n<title>{title} — power</title>\n\
         <style>{STYLE}</style>\n<main>\n{body}</main></html>\n"
    )
}

const STYLE: &str = "\
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2530;--dim:#637282;--line:#dfe5ea;--tile:#f4f6f8;--warn:#fdf0e2}\
@media(prefers-color-scheme:dark){:root{--bg:#12171d;--fg:#e4eaf0;--dim:#93a1af;--line:#2b3540;--tile:#1b222a;--warn:#3a2a16}}\
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif}\
main{max-width:1040px;margin:auto;padding:24px 16px}\
h1{font-size:22px;margin:0 0 4px}h2{font-size:15px;margin:26px 0 4px}\
.facts span{margin-right:18px;color:var(--dim)}.facts b{font-weight:600}\
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:16px 0}\
.tile{background:var(--tile);border-radius:8px;padding:10px 12px}\
.tile b{display:block;font-size:22px}.tile span{color:var(--dim);font-size:13px}\
.warn{background:var(--warn);border-left:4px solid #e0762b;padding:8px 12px;margin:6px 0}.note{color:var(--dim);font-size:13px}\
svg{width:100%;height:auto;display:block}\
svg text{fill:var(--dim);font-size:11px}.grid{stroke:var(--line)}.legend{font-size:13px;color:var(--dim)}\
.legend i{display:inline-block;width:14px;height:3px;margin:0 6px 3px 14px}.mark{stroke-dasharray:4 4}\
table{border-collapse:collapse;margin-top:6px}td,th{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid var(--line)}\
td:first-child,th:first-child{text-align:left}";

fn tiles(sum: &Summary) -> String {
    let mut tiles = vec![(clock(sum.seconds), "recorded".to_owned())];
    if let Some(mean) = sum.mean_w() {
        tiles.push((format!("{mean:.2} W"), "mean power".into()));
        let wh = sum.energy_j / 3600.0;
        tiles.push((format!("{:.0} J", sum.energy_j), format!("energy ({wh:.2} Wh)")));
    }
    if let Some((watts, at_s)) = sum.peak {
        tiles.push((format!("{watts:.1} W"), format!("peak, at {}", clock(at_s))));
    }
    if let Some((celsius, at_s)) = sum.hottest {
        tiles.push((format!("{celsius:.1} °C"), format!("hottest, at {}", clock(at_s))));
    }
    if let Some(tokens) = sum.tokens {
        tiles.push((format!("{tokens:.0}"), "tokens generated".into()));
        if sum.metered_s > 0.0 {
            tiles.push((format!("{:.3} J", sum.energy_j / tokens), "a token, idle included".into()));
        }
    }
    let tile =
        |(value, name): &(String, String)| format!("<div class=tile><b>{value}</b><span>{name}</span></div>");
    format!("<div class=tiles>{}</div>\n", tiles.iter().map(tile).collect::<String>())
}

/// What an engineer should look at first.
fn warnings(recording: &Recording, sum: &Summary) -> String {
    let mut out = String::new();
    let mut warn = |text: String| {
        writeln!(out, "<div class=warn>{text}</div>").expect("a string takes it");
    };
    if recording.moments.len() < 2 {
        warn("Fewer than two samples: there is nothing to add up.".into());
    }
    if sum.throttled_s > 0.0 {
        warn(format!(
            "The kernel held clocks back for {}: the board was near its thermal limit.",
            clock(sum.throttled_s)
        ));
    }
    let events = |n: usize| sum.oc[n].filter(|c| *c > 0.0);
    if let Some(n) = events(0) {
        warn(format!("{n:.0} under-voltage events (OC1): look at the supply and its cable."));
    }
    if let Some(n) = events(1) {
        warn(format!("{n:.0} average over-current events (OC2): the module's power limit was reached."));
    }
    if sum.faulty_s > 0.0 {
        warn(format!("Sensors could not be trusted for {}.", clock(sum.faulty_s)));
    }
    if sum.metered_s < 0.95 * sum.seconds {
        warn(format!("Power was metered for {} of {} only.", clock(sum.metered_s), clock(sum.seconds)));
    }
    if let Some(n) = events(2) {
        let rate = n / sum.seconds.max(1.0);
        out += &format!(
            "<p class=note>{n:.0} instantaneous over-current events (OC3), {rate:.1} a second: \
             everyday on a board without a power cap.</p>\n"
        );
    }
    out
}

fn charts(recording: &Recording) -> String {
    let rails = recording.rails.iter().enumerate().map(|(n, label)| Curve {
        name: label.clone(),
        colour: COLOURS[(n + 1) % COLOURS.len()],
        value: Box::new(move |m: &Moment| m.rails_w[n]),
        steps: false,
    });
    // The total is drawn once where a rail is the total.
    let is_total = |c: &Curve| recording.moments.iter().all(|m| (c.value)(m) == m.total_w);
    let mut power = vec![Curve {
        name: "module".into(),
        colour: COLOURS[0],
        value: Box::new(|m| m.total_w),
        steps: false,
    }];
    power.extend(rails.filter(|c| !is_total(c)).take(5));
    let heat = recording.zones.iter().enumerate().map(|(n, kind)| Curve {
        name: kind.clone(),
        colour: COLOURS[n % COLOURS.len()],
        value: Box::new(move |m: &Moment| m.zones_c[n]),
        steps: false,
    });
    let curve = |name: &str, colour, value: fn(&Moment) -> Option<f64>| Curve {
        name: name.into(),
        colour,
        value: Box::new(value),
        steps: true,
    };
    let clocks = vec![
        // Below the clock itself, which often lies on it.
        curve("GPU ceiling", COLOURS[5], |m| m.gpu_max_mhz),
        curve("GPU", COLOURS[0], |m| m.gpu_mhz),
        curve("memory", COLOURS[1], |m| m.emc_mhz),
    ];
    let load =
        vec![curve("GPU load", COLOURS[2], |m| m.load_percent), curve("fan", COLOURS[3], |m| m.fan_percent)];
    let moments = &recording.moments;
    chart("Power, W", moments, &power, &[], true)
        + &chart(
            "Temperature, °C",
            moments,
            &heat.collect::<Vec<_>>(),
            &[(85.0, "steps down"), (99.0, "kernel throttles")],
            false,
        )
        + &chart("Clocks, MHz", moments, &clocks, &[], false)
        + &chart("GPU load and fan, %", moments, &load, &[], false)
}

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 44.0;

/// One chart; nothing where no curve has a value. `bands`: phases as a stripe below.
fn chart(title: &str, moments: &[Moment], curves: &[Curve], marks: &[(f64, &str)], bands: bool) -> String {
    let shown: Vec<&Curve> =
        curves.iter().filter(|c| moments.iter().any(|m| (c.value)(m).is_some())).collect();
    let (Some(first), Some(last)) = (moments.first(), moments.last()) else { return String::new() };
    if shown.is_empty() {
        return String::new();
    }
    let values = || shown.iter().flat_map(|c| moments.iter().filter_map(|m| (c.value)(m)));
    let top = values().fold(0.0, f64::max);
    let (low, high, step) = scale(values().fold(f64::MAX, f64::min), top);
    let span_s = (last.at_s - first.at_s).max(1e-3);
    let x = |at_s: f64| LEFT + (at_s - first.at_s) / span_s * (WIDTH - LEFT - 8.0);
    let y = |v: f64| 8.0 + (high - v) / (high - low) * (HEIGHT - 16.0);
    let mut svg = String::new();
    let mut tick = low;
    while tick <= high + step * 1e-6 {
        let at = y(tick);
        svg += &format!(
            "<line class=grid x1={LEFT} x2={WIDTH} y1={at:.1} y2={at:.1} /><text x={:.0} y={:.1} text-anchor=end>{}</text>",
            LEFT - 6.0,
            at + 4.0,
            tick.round()
        );
        tick += step;
    }
    for (value, name) in marks.iter().filter(|(v, _)| *v > low && *v <= high) {
        let at = y(*value);
        svg += &format!(
            "<line class=mark x1={LEFT} x2={WIDTH} y1={at:.1} y2={at:.1} stroke=#c4443e />\
             <text x={WIDTH} y={:.1} text-anchor=end>{name}</text>",
            at - 3.0
        );
    }
    for curve in &shown {
        let name = escape(&curve.name);
        svg += &format!(
            "<path d=\"{}\" fill=none stroke={} stroke-width=1.6><title>{name}</title></path>",
            path(moments, curve, &x, &y),
            curve.colour
        );
    }
    let mut height = HEIGHT;
    if bands {
        svg += &stripe(moments, &x, HEIGHT + 2.0);
        height += 12.0;
    }
    svg += &time_axis(span_s, &|at_s| x(first.at_s + at_s), height + 14.0);
    let legend: String =
        shown.iter().map(|c| format!("<i style=background:{}></i>{}", c.colour, escape(&c.name))).collect();
    let phases = if bands && moments.iter().any(|m| m.phase.is_some()) {
        Phase::ALL
            .map(|p| format!("<i style=height:9px;background:{}></i>{}", PHASE_COLOURS[p.index()], p.name()))
            .concat()
    } else {
        String::new()
    };
    format!(
        "<h2>{title}</h2><div class=legend>{legend}{phases}</div>\n\
         <svg viewBox=\"0 0 {WIDTH} {:.0}\" role=img aria-label=\"{title}\">{svg}</svg>\n",
        height + 20.0
    )
}

/// Low, high and spacing of an axis with four to eight round ticks.
fn scale(low: f64, high: f64) -> (f64, f64, f64) {
    // Power and clocks begin at zero; temperatures far from it do not.
    let low = if low > 0.6 * high { low } else { low.min(0.0) };
    let span = (high - low).max(1.0);
    let raw = span / 6.0;
    let power = 10f64.powf(raw.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw).unwrap_or(raw).max(1.0);
    let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
    // An axis has a length, even of one value.
    (low, if high > low { high } else { low + step }, step)
}

/// A curve's path. Where there are more samples than columns, each column shows its lowest and highest.
fn path(moments: &[Moment], curve: &Curve, x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64) -> f64) -> String {
    let mut path = String::new();
    let mut is_down = false;
    let mut last_y = 0.0;
    let size = moments.len().div_ceil(POINTS_MAX / 2).max(1);
    for group in moments.chunks(size) {
        let known: Vec<(f64, f64)> = group.iter().filter_map(|m| Some((m.at_s, (curve.value)(m)?))).collect();
        if known.is_empty() {
            // A gap stays a gap.
            is_down = false;
            continue;
        }
        let extreme = |pick: fn(f64, f64) -> bool| {
            known.iter().copied().reduce(|a, b| if pick(b.1, a.1) { b } else { a }).unwrap_or(known[0])
        };
        let (low, high) = (extreme(|a, b| a < b), extreme(|a, b| a > b));
        let points = if low.0 <= high.0 { [low, high] } else { [high, low] };
        let distinct = if low == high { &points[..1] } else { &points[..] };
        for &(at_s, value) in distinct {
            let (px, py) = (x(at_s), y(value));
            match is_down {
                false => write!(path, "M{px:.1} {py:.1}"),
                true if curve.steps && py != last_y => write!(path, "H{px:.1}V{py:.1}"),
                true => write!(path, "L{px:.1} {py:.1}"),
            }
            .expect("a string takes it");
            (is_down, last_y) = (true, py);
        }
    }
    path
}

/// Phases as a coloured stripe: each column shows the phase that most of its samples have.
fn stripe(moments: &[Moment], x: &dyn Fn(f64) -> f64, top: f64) -> String {
    let size = moments.len().div_ceil(POINTS_MAX).max(1);
    let common = |group: &[Moment]| {
        let count = |p: Phase| group.iter().filter(|m| m.phase == Some(p)).count();
        Phase::ALL.into_iter().max_by_key(|p| count(*p)).filter(|p| count(*p) > 0)
    };
    let columns: Vec<(f64, Option<Phase>)> = moments.chunks(size).map(|g| (g[0].at_s, common(g))).collect();
    let end_s = moments.last().map_or(0.0, |m| m.at_s);
    let mut out = String::new();
    let mut at = 0;
    while at < columns.len() {
        let (from_s, phase) = columns[at];
        let end = columns[at..].iter().position(|(_, p)| *p != phase).map_or(columns.len(), |n| at + n);
        let (from, to) = (x(from_s), x(columns.get(end).map_or(end_s, |c| c.0)));
        if let Some(phase) = phase.filter(|_| to > from) {
            let colour = PHASE_COLOURS[phase.index()];
            write!(out, "<rect x={from:.1} y={top} width={:.1} height=8 fill={colour} />", to - from)
                .expect("a string takes it");
        }
        at = end;
    }
    out
}

fn phases(sum: &Summary) -> String {
    let total_s: f64 = sum.phases.iter().map(|p| p.0).sum();
    if total_s <= 0.0 {
        return String::new();
    }
    let row = |phase: Phase| {
        let (seconds, joules) = sum.phases[phase.index()];
        let mean = if seconds > 0.0 { format!("{:.2}", joules / seconds) } else { "–".into() };
        format!(
            "<tr><td>{}<td>{}<td>{:.1}%<td>{mean}<td>{joules:.0}",
            phase.name(),
            clock(seconds),
            100.0 * seconds / total_s
        )
    };
    format!(
        "<h2>By phase</h2><table><tr><th>phase<th>time<th>share<th>mean W<th>J{}</table>\n",
        Phase::ALL.map(row).concat()
    )
}

/// Seven words below a chart, at even distances in time.
fn time_axis(span_s: f64, x: &dyn Fn(f64) -> f64, y: f64) -> String {
    let word = |n: usize| {
        let at_s = span_s * n as f64 / 6.0;
        // The last word ends where the axis does.
        let anchor = if n == 6 { "end" } else { "middle" };
        format!("<text x={:.0} y={y:.0} text-anchor={anchor}>{}</text>", x(at_s), tick_text(at_s, span_s))
    };
    (0..=6).map(word).collect()
}

/// A place on the time axis, in the unit that suits the whole axis.
fn tick_text(at_s: f64, span_s: f64) -> String {
    match span_s {
        s if s < 120.0 => format!("{at_s:.0} s"),
        s if s < 7200.0 => format!("{:.0}:{:02.0}", (at_s / 60.0).floor(), (at_s % 60.0).floor()),
        _ => format!("{:.0}:{:02.0} h", (at_s / 3600.0).floor(), (at_s / 60.0 % 60.0).floor()),
    }
}

/// Seconds as a person reads them.
fn clock(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0}:{:02.0} min", (s / 60.0).floor(), (s % 60.0).floor()),
        s => format!("{:.0}:{:02.0} h", (s / 3600.0).floor(), (s / 60.0 % 60.0).floor()),
    }
}

/// Text that a file brought, made harmless.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(n: usize) -> Recording {
        let moment = |i: usize| Moment {
            at_s: i as f64 * 0.5,
            phase: Some(if i.is_multiple_of(4) { Phase::Prefill } else { Phase::Decode }),
            total_w: Some(10.0 + (i % 2) as f64),
            gpu_mhz: Some(918.0),
            oc: [Some(0.0), Some(i as f64), None],
            throttle: if i == 1 { "cpufreq-cpu0".into() } else { String::new() },
            tokens: Some(i as f64 * 10.0),
            rails_w: vec![Some(3.0), None],
            zones_c: vec![Some(80.0 + i as f64 * 0.01)],
            ..Moment::default()
        };
        Recording {
            facts: vec![("board".into(), "<b>evil</b>".into()), ("profile".into(), "balanced".into())],
            rails: vec!["VDD_SOC".into(), "dead".into()],
            zones: vec!["tj-thermal".into()],
            moments: (0..n).map(moment).collect(),
        }
    }

    #[test]
    fn sums_are_right() {
        let sum = Summary::of(&recording(5));
        assert_eq!((sum.seconds, sum.metered_s, sum.energy_j), (2.0, 2.0, 21.0));
        assert_eq!((sum.peak, sum.tokens), (Some((11.0, 1.5)), Some(40.0)));
        assert_eq!(sum.phases, [(0.5, 5.25), (1.5, 15.75), (0.0, 0.0)]);
        assert_eq!((sum.oc, sum.throttled_s), ([Some(0.0), Some(4.0), None], 0.5));
        // A gap of an hour is no hour at the last power.
        let mut gap = recording(2);
        gap.moments[1].at_s = 3600.0;
        assert_eq!(Summary::of(&gap).metered_s, GAP_S);
        assert_eq!(Summary::of(&Recording::default()), Summary::default());
    }

    #[test]
    fn the_page_is_whole_small_and_harmless() {
        let page = html(&recording(20_000));
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(!page.contains("<b>evil") && page.contains("&lt;b&gt;evil"));
        for part in ["Power, W", "Temperature", "Clocks", "steps down", "OC2", "By phase", "VDD_SOC"] {
            assert!(page.contains(part), "{part}");
        }
        assert!(
            !page.contains("http") && !page.contains("NaN") && !page.contains("inf"),
            "nothing from outside"
        );
        assert!(!page.contains(">dead<"), "a rail without a value has no curve");
        assert!(page.len() < 400_000, "{} bytes", page.len());
        for n in 0..3 {
            assert!(html(&recording(n)).ends_with("</html>\n"), "{n} samples");
        }
    }

    #[test]
    fn axes_are_round() {
        assert_eq!(scale(0.0, 18.4), (0.0, 20.0, 5.0));
        assert_eq!(scale(81.0, 86.0), (81.0, 86.0, 1.0));
        assert_eq!(scale(5.0, 5.0), (5.0, 6.0, 1.0));
    }
}
