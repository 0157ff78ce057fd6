//! `tegu bench --kernels --backend cuda`: every kernel at the shapes of real models, as a table, as JSON, and as a picture
//! of each under the memory roof. What was measured elsewhere can be shown again from its JSON.

use std::fmt::Write;
use std::path::Path;

use super::out::{self, Out};
use super::text_file;
use crate::backend::cuda::bench::{self, Measured, Options, Report};
use crate::backend::cuda::{Gpu, Wait};
use crate::format::Codec;
use crate::observe::{Progress, Unit};
use crate::units::{Error, Result};

/// Larger than any report.
const RECORDED_BYTES_MAX: u64 = 16 << 20;

/// Measures, or reads what was measured, and prints.
pub fn run(
    only: &[Codec],
    prefill_rows: usize,
    recorded: Option<&Path>,
    svg: Option<&Path>,
    json: bool,
) -> Result<()> {
    let reports = match recorded {
        Some(path) => read(path)?,
        None => measure(only, prefill_rows)?,
    };
    if let Some(path) = svg {
        std::fs::write(path, picture(&reports[0])).map_err(|e| Error::io(path, "write", e))?;
    }
    if json {
        return Out::stdout().json(&serde_json::json!({ "reports": reports }));
    }
    reports.iter().try_for_each(|r| Out::stdout().text(&table(r)))
}

fn measure(only: &[Codec], prefill_rows: usize) -> Result<Vec<Report>> {
    let gpu = Gpu::open(Wait::Spin)?;
    // Without a codec named: the one that most models for boards come in.
    let codecs = if only.is_empty() { &[Codec::Q4_0][..] } else { only };
    let progress = Progress::new("kernels", 100 * codecs.len() as u64, Unit::Items);
    let mut reports = Vec::new();
    for (i, &codec) in codecs.iter().enumerate() {
        let tell = &mut |done: usize, all: usize| progress.set((100 * i + 100 * done / all.max(1)) as u64);
        reports.push(bench::run(&gpu, &Options { codec, prefill_rows }, tell)?);
    }
    Ok(reports)
}

fn read(path: &Path) -> Result<Vec<Report>> {
    let text = text_file(path, RECORDED_BYTES_MAX)?;
    #[derive(serde::Deserialize)]
    struct All {
        reports: Vec<Report>,
    }
    let all: All = serde_json::from_str(&text).map_err(|e| {
        Error::bad(path, "reports", "what `tegu bench --kernels --backend cuda --json` prints", e)
    })?;
    if all.reports.is_empty() {
        return Err(Error::bad(path, "reports", "one or more", "none"));
    }
    Ok(all.reports)
}

/// For people: a line a kernel, then the few-SM runs.
fn table(r: &Report) -> String {
    let head = ["kernel", "µs", "MB", "GB/s", "of roof", "INT", "FP", "LSU", "tensor", "issue"];
    let mut out = format!(
        "{} (sm_{}, {} SMs at {:.0} MHz), {}: read roof {:.1} GB/s\n",
        r.device,
        r.sm,
        r.multiprocessors,
        r.clock_hz / 1e6,
        r.codec,
        r.roof_bytes_per_s / 1e9
    );
    let mut models: Vec<&str> = r.results.iter().map(|m| m.model.as_str()).collect();
    models.dedup();
    for model in models {
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(r.results.iter().filter(|m| m.model == model).map(|m| line(r, m)));
        let _ = write!(out, "\n{model}\n{}", out::table(&rows));
    }
    let mut rows = vec![["kept to few SMs", "blocks", "bytes a clock and SM"].map(str::to_owned).to_vec()];
    let few =
        |f: &bench::Few| vec![f.kernel.clone(), f.blocks.to_string(), format!("{:.1}", f.bytes_per_clock)];
    rows.extend(r.few.iter().map(few));
    let _ = write!(out, "\n{}", out::table(&rows));
    out.push_str("\nINT … issue: instructions a weight and lane in the inner loop on sm_87.\n");
    out
}

fn line(r: &Report, m: &Measured) -> Vec<String> {
    let mut cells = vec![
        m.name.clone(),
        format!("{:.1}", m.us),
        format!("{:.2}", m.bytes as f64 / 1e6),
        format!("{:.0}", m.bytes_per_s() / 1e9),
        format!("{:.0}%", 100.0 * m.bytes_per_s() / r.roof_bytes_per_s),
    ];
    let inner = m.inner.filter(|i| i.weights > 0.0);
    let p = inner.map_or_else(Default::default, |i| i.code.pipes);
    for n in [p.int, p.fp, p.lsu, p.tensor, p.issue()] {
        cells.push(inner.map_or("-".to_owned(), |i| format!("{:.2}", f64::from(n) / i.weights)));
    }
    cells
}

// The picture: both axes logarithmic, operations a byte to the right, operations a second upward.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 60.0;
const COLOURS: [&str; 5] = ["#1b6ca8", "#d1495b", "#2e933c", "#e09f3e", "#7b4b94"];

/// Powers of ten that the axes span: operations a byte, operations a second.
#[derive(Debug, Clone, Copy)]
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn of(points: &[(f64, f64)], roof: f64) -> Axes {
        let span = |v: &mut dyn Iterator<Item = f64>| {
            let (low, high) = v.fold((f64::MAX, f64::MIN), |(a, b), p| (a.min(p.log10()), b.max(p.log10())));
            if low > high { (0.0, 1.0) } else { (low.floor(), (high + 0.05).ceil().max(low.floor() + 1.0)) }
        };
        let x = span(&mut points.iter().map(|p| p.0));
        let roof_at = |power: f64| roof * 10f64.powf(power);
        let y = span(&mut points.iter().map(|p| p.1).chain([roof_at(x.0)]));
        Axes { x, y }
    }

    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let share = |v: f64, (low, high): (f64, f64)| (v.log10() - low) / (high - low);
        let (w, h) = (WIDTH - LEFT - 260.0, HEIGHT - BOTTOM - 40.0);
        (LEFT + w * share(x, self.x), HEIGHT - BOTTOM - h * share(y, self.y))
    }
}

/// Each kernel under the roof, as SVG. Kernels that multiply nothing are in the table only.
fn picture(r: &Report) -> String {
    let counted: Vec<&Measured> = r.results.iter().filter(|m| m.macs > 0).collect();
    let point = |m: &Measured| (2.0 * m.macs as f64 / m.bytes as f64, 2.0 * m.macs as f64 / (m.us * 1e-6));
    let points: Vec<(f64, f64)> = counted.iter().map(|m| point(m)).collect();
    let axes = Axes::of(&points, r.roof_bytes_per_s);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n",
        escaped(&format!("{}, {}: read roof {:.0} GB/s", r.device, r.codec, r.roof_bytes_per_s / 1e9))
    );
    grid(&mut svg, &axes);
    // Under the roof a kernel is bound by memory: operations a second = operations a byte times the roof.
    let end = (10f64.powf(axes.y.1) / r.roof_bytes_per_s).min(10f64.powf(axes.x.1));
    let (x0, x1) = (10f64.powf(axes.x.0), end);
    let ((ax, ay), (bx, by)) = (axes.at(x0, x0 * r.roof_bytes_per_s), axes.at(x1, x1 * r.roof_bytes_per_s));
    let _ = writeln!(
        svg,
        "<path d=\"M{ax:.1} {ay:.1}L{bx:.1} {by:.1}\" stroke=\"black\" stroke-width=\"2\" fill=\"none\"/>"
    );
    let mut models: Vec<&str> = counted.iter().map(|m| m.model.as_str()).collect();
    models.dedup();
    for (m, p) in counted.iter().zip(&points) {
        let (x, y) = axes.at(p.0, p.1);
        let colour = COLOURS[models.iter().position(|n| *n == m.model).unwrap_or(0) % COLOURS.len()];
        let title = format!("{}, {}: {:.1} µs, {:.0} GB/s", m.model, m.name, m.us, m.bytes_per_s() / 1e9);
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{colour}\" fill-opacity=\"0.8\"><title>{}</title></circle>",
            escaped(&title)
        );
    }
    for (i, model) in models.iter().enumerate() {
        let (x, y, colour) = (WIDTH - 250.0, 60.0 + 22.0 * i as f64, COLOURS[i % COLOURS.len()]);
        let _ = writeln!(
            svg,
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"5\" fill=\"{colour}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            x + 12.0,
            y + 4.0,
            escaped(model)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Lines and labels at the powers of ten.
fn grid(svg: &mut String, axes: &Axes) {
    let ((left, bottom), (right, top)) = (
        axes.at(10f64.powf(axes.x.0), 10f64.powf(axes.y.0)),
        axes.at(10f64.powf(axes.x.1), 10f64.powf(axes.y.1)),
    );
    let mut draw = |from: (f64, f64), to: (f64, f64), label: (f64, f64), text: String| {
        let _ = writeln!(
            svg,
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
            from.0, from.1, to.0, to.1, label.0, label.1
        );
    };
    for power in axes.x.0 as i32..=axes.x.1 as i32 {
        let x = axes.at(10f64.powi(power), 1.0).0;
        draw((x, bottom), (x, top), (x - 8.0, bottom + 18.0), format!("1e{power}"));
    }
    for power in axes.y.0 as i32..=axes.y.1 as i32 {
        let y = axes.at(1.0, 10f64.powi(power)).1;
        draw((left, y), (right, y), (left - 42.0, y + 4.0), format!("1e{power}"));
    }
    let (x, y) = ((left + right) / 2.0 - 70.0, bottom + 40.0);
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\">operations a byte</text>");
    let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">operations a second</text>", left - 42.0, top - 8.0);
}

/// Text inside SVG.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::bench::{Few, Inner};
    use crate::backend::cuda::sass::{Loop, Pipes};

    fn report() -> Report {
        let inner = Inner {
            code: Loop {
                pipes: Pipes { int: 256, fp: 64, lsu: 32, tensor: 0, control: 8 },
                dots: 128,
                fmas: 8,
            },
            weights: 256.0,
        };
        let one = |name: &str, us, macs, inner| Measured {
            model: "a <model>".into(),
            name: name.into(),
            kernel: "gemv_r1".into(),
            us,
            bytes: 4_000_000,
            macs,
            inner,
        };
        Report {
            device: "a GPU".into(),
            sm: 87,
            multiprocessors: 16,
            codec: "Q4_0".into(),
            clock_hz: 1.3e9,
            roof_bytes_per_s: 200e9,
            results: vec![one("product", 40.0, 7_000_000, Some(inner)), one("norm", 10.0, 0, None)],
            few: vec![Few { kernel: "product".into(), blocks: 8, bytes_per_clock: 12.34 }],
        }
    }

    #[test]
    fn the_table_has_rates_shares_and_instructions_a_weight() {
        let text = table(&report());
        let line = text.lines().find(|l| l.starts_with("product")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells, ["product", "40.0", "4.00", "100", "50%", "1.00", "0.25", "0.12", "0.00", "1.41"]);
        let line = text.lines().find(|l| l.starts_with("norm")).unwrap();
        assert_eq!(line.matches('-').count(), 5, "{line}");
        assert!(text.contains("12.3"), "{text}");
    }

    #[test]
    fn a_recorded_report_is_read_back_and_a_bad_one_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::fs::write(&path, serde_json::json!({ "reports": [report()] }).to_string()).unwrap();
        assert_eq!(read(&path).unwrap(), [report()]);
        for bad in ["", "{}", "{\"reports\": []}", "{\"reports\": [{\"device\": 1}]}"] {
            std::fs::write(&path, bad).unwrap();
            assert!(read(&path).unwrap_err().to_string().contains("r.json"), "{bad}");
        }
    }

    #[test]
    fn the_picture_puts_a_kernel_under_the_roof() {
        let svg = picture(&report());
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert_eq!(svg.matches("<title>").count(), 1, "what multiplies nothing is not drawn");
        assert!(svg.contains("a &lt;model&gt;") && !svg.contains("NaN") && !svg.contains("inf"));
        // 3.5 operations a byte at half the roof: below the line at the same place.
        let axes = Axes::of(&[(3.5, 350e9)], 200e9);
        assert!(axes.at(3.5, 350e9).1 > axes.at(3.5, 700e9).1);
    }
}
