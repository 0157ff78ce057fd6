//! How things are drawn: with or without colour, with block characters or plain ASCII. Nothing is told by colour alone.

use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::border;

/// What the terminal can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Colours may be used.
    pub color: bool,
    /// Only ASCII: a serial console, or a locale without UTF-8.
    pub ascii: bool,
}

/// Levels of a bar that grows upward.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const ASCII_LEVELS: [char; 9] = [' ', '.', '.', ':', ':', '-', '=', '#', '#'];

/// A frame of `+`, `-` and `|`.
const ASCII_BORDER: border::Set<'static> = border::Set {
    top_left: "+",
    top_right: "+",
    bottom_left: "+",
    bottom_right: "+",
    vertical_left: "|",
    vertical_right: "|",
    horizontal_top: "-",
    horizontal_bottom: "-",
};

impl Look {
    /// What the surroundings say: `NO_COLOR` (no-color.org), `TERM`, and the locale's character set.
    pub fn of(env: &dyn Fn(&str) -> Option<String>) -> Look {
        let set = |name: &str| env(name).filter(|v| !v.is_empty());
        let term = set("TERM").unwrap_or_default();
        let color =
            set("NO_COLOR").is_none() && term != "dumb" && !term.ends_with("-mono") && term != "vt100";
        // The first of these that is set decides, as in locale(7).
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(|n| set(n)).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        Look { color, ascii: !(locale.contains("utf-8") || locale.contains("utf8")) || term == "vt100" }
    }

    /// The frame of a panel.
    pub fn border(self) -> border::Set<'static> {
        if self.ascii { ASCII_BORDER } else { border::PLAIN }
    }

    fn colored(self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    /// Titles and frames.
    pub fn frame(self) -> Style {
        self.colored(Color::DarkGray)
    }

    /// What a value is called.
    pub fn name(self) -> Style {
        self.colored(Color::Cyan)
    }

    /// A value that is as it should be.
    pub fn good(self) -> Style {
        self.colored(Color::Green)
    }

    /// A value that deserves a look; bold where there is no colour.
    pub fn warn(self) -> Style {
        if self.color { Style::new().fg(Color::Yellow) } else { Style::new().add_modifier(Modifier::BOLD) }
    }

    /// A value that is bad; reversed where there is no colour.
    pub fn bad(self) -> Style {
        let style = Style::new().add_modifier(Modifier::BOLD);
        if self.color { style.fg(Color::Red) } else { style.add_modifier(Modifier::REVERSED) }
    }

    /// The chosen row of a list, and the title.
    pub fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// A bar of `width` cells, filled to `permille` of a thousand.
    pub fn bar(self, width: usize, permille: u64) -> String {
        let (full, empty) = if self.ascii { ('|', '.') } else { ('█', '░') };
        let filled = (width as u64 * permille.min(1000)).div_ceil(1000) as usize;
        (0..width).map(|i| if i < filled { full } else { empty }).collect()
    }

    /// Past values as columns, the newest at the right end; from zero to the larger of `most` and what there is.
    pub fn spark(self, width: usize, values: &[u32], most: u32) -> String {
        self.chart(width, 1, values, most).pop().unwrap_or_default()
    }

    /// The same over several rows, the top one first.
    pub fn chart(self, width: usize, rows: usize, values: &[u32], most: u32) -> Vec<String> {
        let levels = if self.ascii { ASCII_LEVELS } else { BLOCKS };
        let shown = &values[values.len().saturating_sub(width)..];
        let most = shown.iter().copied().max().unwrap_or(0).max(most).max(1);
        let eighths = |v: u32| (u64::from(v) * 8 * rows as u64).div_ceil(u64::from(most)) as usize;
        let row = |above: usize| {
            let level = |v: &u32| levels[eighths(*v).saturating_sub(above * 8).min(8)];
            let blank = std::iter::repeat_n(' ', width - shown.len());
            blank.chain(shown.iter().map(level)).collect()
        };
        (0..rows).rev().map(row).collect()
    }
}

#[test]
fn bars_and_columns_fill_their_width() {
    let (plain, ascii) = (Look { color: true, ascii: false }, Look { color: false, ascii: true });
    assert_eq!(plain.bar(4, 500), "██░░");
    assert_eq!(ascii.bar(4, 1), "|...");
    assert_eq!(ascii.bar(4, 0), "....");
    assert_eq!(ascii.bar(4, 9999), "||||");
    assert_eq!(plain.spark(4, &[0, 4, 8], 0), "  ▄█");
    assert_eq!(plain.spark(2, &[9, 0, 8], 16), " ▄");
    assert_eq!(plain.spark(3, &[], 0), "   ");
    assert_eq!(plain.spark(1, &[u32::MAX], 0), "█");
    assert_eq!(plain.spark(0, &[1, 2], 0), "");
    assert_eq!(plain.chart(3, 2, &[1, 2, 4], 0), ["  █", "▄██"]);
}

#[test]
fn the_surroundings_decide() {
    let look = |vars: &[(&str, &str)]| {
        let vars: Vec<(String, String)> = vars.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
        Look::of(&move |n| vars.iter().find(|(k, _)| k == n).map(|(_, v)| v.clone()))
    };
    let usual = look(&[("TERM", "xterm-256color"), ("LANG", "en_US.UTF-8")]);
    assert_eq!(usual, Look { color: true, ascii: false });
    assert!(!look(&[("TERM", "xterm"), ("LANG", "C.utf8"), ("NO_COLOR", "1")]).color);
    assert!(look(&[("TERM", "vt220"), ("LANG", "en_US.UTF-8"), ("LC_ALL", "C")]).ascii);
    assert_eq!(look(&[("TERM", "vt100"), ("LANG", "en_US.UTF-8")]), Look { color: false, ascii: true });
}
