//! Where the parts of the screen lie. Panels are stacked by hand: the same size always gives the same picture.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Widget};

use super::keys::{Dialog, Ui};
use super::panels::{View, cell};

/// Below this nothing useful fits.
const WIDTH_MIN: u16 = 30;
const HEIGHT_MIN: u16 = 8;
/// From here on there are two columns, and from there on three.
const TWO_COLUMNS: u16 = 76;
const THREE_COLUMNS: u16 = 120;
/// Lines of the head.
const HEAD: u16 = 2;
/// Lines of the foot.
const FOOT: u16 = 1;

/// A title and what stands below it.
type Panel = (&'static str, Vec<Line<'static>>);

/// Draws the whole screen.
pub fn screen(view: &View, ui: &Ui, area: Rect, buf: &mut Buffer) {
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        let text = format!("tegu top needs {WIDTH_MIN}x{HEIGHT_MIN}");
        buf.set_stringn(area.x, area.y, text, usize::from(area.width), view.look.warn());
        return;
    }
    head(view, ui, Rect { height: HEAD, ..area }, buf);
    let middle = Rect { y: area.y + HEAD, height: area.height - HEAD - FOOT, ..area };
    match area.width {
        THREE_COLUMNS.. => three(view, middle, buf),
        TWO_COLUMNS.. => two(view, middle, buf),
        _ => one(view, middle, buf),
    }
    foot(view, ui, Rect { y: area.bottom() - FOOT, height: FOOT, ..area }, buf);
    dialog(view, ui, area, buf);
}

fn head(view: &View, ui: &Ui, area: Rect, buf: &mut Buffer) {
    let width = usize::from(area.width);
    let s = view.status;
    let paused = if ui.paused { "[held] " } else { "" };
    buf.set_string(area.x, area.y, cell(&format!(" {paused}{}", s.board), width), view.look.chosen());
    let or = |v: &Option<String>, none: &str| v.clone().unwrap_or_else(|| none.to_owned());
    let mut text = format!(" mode {}   profile {}", or(&s.mode, "-"), or(&s.profile, "none"));
    if !s.hands.is_empty() {
        text += &format!("   clocks: {}", s.hands);
    }
    buf.set_string(area.x, area.y + 1, cell(&text, width), ratatui::style::Style::new());
}

fn foot(view: &View, ui: &Ui, area: Rect, buf: &mut Buffer) {
    let width = usize::from(area.width);
    let (text, style) = match &ui.trouble {
        Some(trouble) => (format!(" {trouble}"), view.look.bad()),
        None => (" q quit   p profile   m power mode   space hold   ? help".to_owned(), view.look.frame()),
    };
    buf.set_string(area.x, area.y, cell(&text, width), style);
}

fn columns<const N: usize>(area: Rect) -> [Rect; N] {
    let n = N as u16;
    std::array::from_fn(|i| {
        let (i, x) =
            (i as u16, |i: u16| area.x + (u32::from(area.width) * u32::from(i) / u32::from(n)) as u16);
        Rect { x: x(i), width: x(i + 1) - x(i), ..area }
    })
}

fn inner(column: Rect) -> usize {
    usize::from(column.width.saturating_sub(2))
}

fn one(view: &View, area: Rect, buf: &mut Buffer) {
    let w = inner(area);
    let panels = [
        ("Power", view.power(w)),
        ("Tokens", view.daemon(w)),
        ("Processors", view.processors(w)),
        ("Limits", view.limits(w)),
        ("Temperatures", view.heat(w)),
        ("Memory", view.memory(w)),
    ];
    stack(view, panels.into(), area, buf);
}

fn two(view: &View, area: Rect, buf: &mut Buffer) {
    let [left, right] = columns(area);
    let (l, r) = (inner(left), inner(right));
    let panels = [("Processors", view.processors(l)), ("Memory", view.memory(l)), ("Tokens", view.daemon(l))];
    stack(view, panels.into(), left, buf);
    let panels = [("Power", view.power(r)), ("Temperatures", view.heat(r)), ("Limits", view.limits(r))];
    stack(view, panels.into(), right, buf);
}

fn three(view: &View, area: Rect, buf: &mut Buffer) {
    let [left, middle, right] = columns(area);
    let (l, m, r) = (inner(left), inner(middle), inner(right));
    stack(view, vec![("Processors", view.processors(l)), ("Memory", view.memory(l))], left, buf);
    let mut panels: Vec<Panel> = vec![("Power", view.power(m)), ("Tokens", view.daemon(m))];
    let taken: usize = panels.iter().map(|(_, lines)| lines.len() + 2).sum();
    let rows = usize::from(middle.height).saturating_sub(taken + 2);
    // A chart of fewer rows says no more than the line above.
    if rows >= 3 && view.status.sample.total_mw.is_some() {
        panels.insert(1, ("Total power", view.chart(m, rows)));
    }
    stack(view, panels, middle, buf);
    stack(view, vec![("Temperatures", view.heat(r)), ("Limits", view.limits(r))], right, buf);
}

/// One panel below the other, each as high as what it says; the last takes what is left. What has no room for one line is
/// left out, and a panel that has no room for all shows its first lines.
fn stack(view: &View, panels: Vec<Panel>, area: Rect, buf: &mut Buffer) {
    let (mut y, last) = (area.y, panels.len() - 1);
    for (i, (title, lines)) in panels.into_iter().enumerate() {
        let left = area.bottom() - y;
        if left < 3 {
            return;
        }
        let wanted = lines.len() as u16 + 2;
        // Two lines that would be left over are of no use to the next.
        let height = if i == last || left - wanted.min(left) < 3 { left } else { wanted };
        let block = Block::bordered()
            .border_set(view.look.border())
            .border_style(view.look.frame())
            .title(Span::raw(format!(" {title} ")));
        Paragraph::new(lines).block(block).render(Rect { y, height, ..area }, buf);
        y += height;
    }
}

fn dialog(view: &View, ui: &Ui, area: Rect, buf: &mut Buffer) {
    let (title, lines): (String, Vec<Line<'static>>) = match &ui.dialog {
        Dialog::None => return,
        Dialog::Help => (" Keys ".into(), HELP.iter().map(|l| Line::raw(*l)).collect()),
        Dialog::Say(text) => (" Done ".into(), wrapped(text)),
        Dialog::Pick { what, items, at } => {
            let current = what.current(view.status);
            let item = |(i, name): (usize, &String)| {
                let mark = if current == Some(name.as_str()) { "*" } else { " " };
                let style = if i == *at { view.look.chosen() } else { ratatui::style::Style::new() };
                Line::from(Span::styled(format!(" {mark} {} ", cell(name, 40).trim_end()), style))
            };
            // A long list shows the part around the choice.
            let most = usize::from(area.height.saturating_sub(6)).max(1);
            let first = at.saturating_sub(most / 2).min(items.len().saturating_sub(most));
            (
                format!(" {} (Enter chooses, Esc leaves) ", what.title()),
                items.iter().enumerate().skip(first).take(most).map(item).collect(),
            )
        }
        Dialog::Confirm { what, name } => {
            let mut lines =
                vec![Line::raw(format!(" Switch the {} to {}?", what.title(), cell(name, 40).trim_end()))];
            lines.extend(what.warning().iter().map(|l| Line::raw(*l)));
            lines.push(Line::raw(" y: yes   any other key: no"));
            (" Sure? ".into(), lines)
        }
    };
    let widest = lines.iter().map(Line::width).max().unwrap_or(0).max(Span::raw(&title).width());
    let width = (widest as u16 + 3).min(area.width);
    let height = (lines.len() as u16 + 2).min(area.height);
    let place =
        Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    Clear.render(place, buf);
    let block = Block::bordered().border_set(view.look.border()).title(title);
    Paragraph::new(lines).block(block).render(place, buf);
}

/// What `?` shows.
const HELP: &[&str] = &[
    " q, Ctrl-C   leave",
    " p           choose the profile that steers the daemon",
    " m           choose the board's power mode (nvpmodel)",
    " space       hold the picture, and go on",
    " arrows      move in a list; Enter chooses, Esc leaves",
    "",
    " A dash is what this board does not tell. ! is a zone at 85 C, !! at 95.",
    " OC1-3 count under-voltage and over-current since boot.",
];

/// A message in lines of at most 60 cells.
fn wrapped(text: &str) -> Vec<Line<'static>> {
    const MOST: usize = 60;
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("it begins with one");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > MOST {
            lines.push(String::new());
        }
        let line = lines.last_mut().expect("it begins with one");
        line.push(' ');
        line.push_str(cell(word, MOST).trim_end());
    }
    lines.into_iter().map(Line::raw).collect()
}
