//! A picture of the screen: as text, and as one SVG file for a report or a letter.

use std::fmt::Write;

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

/// Cell size of the drawing, for a font of 14.
const CELL_W: f64 = 8.4;
const CELL_H: f64 = 18.0;

/// The screen as lines without trailing blanks.
pub fn text(buffer: &Buffer) -> String {
    let area = buffer.area;
    let mut out = String::new();
    for y in 0..area.height {
        let row: String = runs(buffer, y).map(|r| r.text).collect();
        out.push_str(row.trim_end());
        out.push('\n');
    }
    out
}

/// Neighbours in a row that look alike.
struct Run {
    x: u16,
    text: String,
    fg: Color,
    modifier: Modifier,
}

fn runs(buffer: &Buffer, y: u16) -> impl Iterator<Item = Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut skip = 0;
    for x in 0..buffer.area.width {
        let cell: &Cell = &buffer[(buffer.area.x + x, buffer.area.y + y)];
        // A wide character covers the cell behind it.
        if skip > 0 {
            skip -= 1;
            continue;
        }
        skip = ratatui::text::Span::raw(cell.symbol()).width().saturating_sub(1);
        match runs.last_mut() {
            Some(r) if r.fg == cell.fg && r.modifier == cell.modifier => r.text.push_str(cell.symbol()),
            _ => runs.push(Run { x, text: cell.symbol().to_owned(), fg: cell.fg, modifier: cell.modifier }),
        }
    }
    runs.into_iter()
}

/// The screen as SVG, on a dark ground; needs nothing but a monospace font.
pub fn svg(buffer: &Buffer) -> String {
    let (columns, rows) = (f64::from(buffer.area.width), f64::from(buffer.area.height));
    let (width, height) = (columns * CELL_W + 16.0, rows * CELL_H + 16.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         font-family=\"monospace\" font-size=\"14\" style=\"white-space:pre\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#16181d\"/>\n"
    );
    for y in 0..buffer.area.height {
        let top = 8.0 + f64::from(y) * CELL_H;
        for run in runs(buffer, y) {
            let reversed = run.modifier.contains(Modifier::REVERSED);
            let left = 8.0 + f64::from(run.x) * CELL_W;
            let length = ratatui::text::Span::raw(&run.text).width() as f64 * CELL_W;
            let color = color(run.fg);
            if reversed {
                let _ = writeln!(
                    out,
                    "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{CELL_H}\" fill=\"{color}\"/>"
                );
            }
            if run.text.trim().is_empty() {
                continue;
            }
            let color = if reversed { "#16181d" } else { color };
            let weight = if run.modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
            let base = top + 13.5;
            let _ = writeln!(
                out,
                "<text x=\"{left:.1}\" y=\"{base:.1}\" textLength=\"{length:.1}\" xml:space=\"preserve\" \
                 fill=\"{color}\"{weight}>{}</text>",
                escaped(&run.text)
            );
        }
    }
    out + "</svg>\n"
}

fn color(c: Color) -> &'static str {
    match c {
        Color::DarkGray => "#7d8590",
        Color::Cyan => "#56b6c2",
        Color::Green => "#7ec97a",
        Color::Yellow => "#e5c07b",
        Color::Red => "#ff6b6b",
        _ => "#d7dae0",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
