//! `tegu top`: a screen of the board like jtop's, over a running daemon's socket or alone, which switches profile and
//! power mode.
//!
//! Parts: [`history`] remembers, [`panels`] says, [`draw`] lays out, [`keys`] decides, [`snapshot`] writes a picture. All of
//! them are pure, so that tests render to a buffer; here are the terminal and the sources.

mod draw;
mod history;
mod keys;
mod look;
mod panels;
mod snapshot;
#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::Rect;
use serde_json::json;

use super::args::Common;
use super::out::Out;
use super::remote::{self, Remote};
use crate::app::keeper::Alone;
use crate::net::Client;
use crate::power::status::Status;
use crate::units::{Error, Result};
use history::History;
use keys::{Deed, Dialog, Key, Ui, What};
use look::Look;
use panels::View;

/// What `--help` says at the end.
pub const HELP: &str = "\
Keys:
  q, Ctrl-C  leave
  p          choose the profile that steers the daemon
  m          choose the board's power mode (nvpmodel)
  space      hold the picture, and go on
  arrows     move in a list; Enter chooses, y confirms, Esc leaves
  ?          the keys

With a daemon at the socket its board is shown, else this machine's. A dash is what a board does not tell.
NO_COLOR, TERM and the locale decide about colours and block characters.

Examples:
  tegu top
  tegu top --once
  tegu top --board sim:orin-nano-super
  tegu top --once --size 140x36 --svg > board.svg";

/// Flags of `tegu top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    remote: Remote,
    /// Look at a board without the daemon: auto for this machine, or sim:orin-nano-super and its like
    #[arg(long, value_name = "BOARD", conflicts_with_all = ["at", "token_file"])]
    board: Option<String>,
    /// Look at a folder that stands for a board's /
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["at", "token_file", "board"])]
    root: Option<PathBuf>,
    /// Print one picture and end
    #[arg(long, conflicts_with = "every")]
    once: bool,
    /// Size of that picture: COLUMNSxROWS [default: the terminal's, else 80x24]
    #[arg(long, value_name = "SIZE", requires = "once")]
    size: Option<String>,
    /// Print that picture as SVG
    #[arg(long, requires = "once")]
    svg: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    every: f64,
    /// Plain ASCII
    #[arg(long)]
    ascii: bool,
    /// No colours
    #[arg(long)]
    no_color: bool,
}

/// How long a first look and the second lie apart for `--once`: rates and shares need two.
const ONCE_APART: Duration = Duration::from_millis(600);
/// Widest and highest picture.
const SIZE_MAX: u16 = 1000;

/// Where a status comes from.
enum Source {
    Daemon(Client),
    Board(Box<Alone>),
}

impl Source {
    /// The daemon's board where one answers, else this machine's.
    fn open(args: &TopArgs, common: &Common) -> Result<Source> {
        if let Some(root) = &args.root {
            return Ok(Source::Board(Alone::under(root)?.into()));
        }
        if let Some(name) = &args.board {
            return Ok(Source::Board(Alone::open(name)?.into()));
        }
        let mut source = Source::Daemon(args.remote.client(common)?);
        match source.status() {
            Ok(_) => Ok(source),
            Err(e) if args.remote.at.is_some() => Err(e),
            Err(Error::Io { .. }) => Ok(Source::Board(Alone::open("auto")?.into())),
            Err(e) => Err(e),
        }
    }

    fn status(&mut self) -> Result<Status> {
        match self {
            Source::Board(alone) => Ok(alone.look()),
            Source::Daemon(client) => {
                let value = remote::json(client, "GET", "/v1/power", None)?;
                serde_json::from_value(value)
                    .map_err(|e| Error::bad(client.address().to_string(), "/v1/power", "a board's state", e))
            }
        }
    }

    fn switch(&mut self, what: What, name: &str) -> Result<String> {
        match (self, what) {
            (Source::Daemon(client), _) => {
                let field = if what == What::Profile { "profile" } else { "mode" };
                let body = json!({ field: name });
                let answer = remote::json(client, "POST", "/v1/power", Some(&body))?;
                Ok(answer["said"].as_str().unwrap_or("done").to_owned())
            }
            (Source::Board(alone), What::Mode) => alone.switch_mode(name),
            (Source::Board(_), What::Profile) => {
                Err(Error::bad("tegu top", "profile", "a daemon that steers this board", "none"))
            }
        }
    }
}

/// Runs it.
pub fn run(args: &TopArgs, common: &Common) -> Result<()> {
    if !(0.1..=3600.0).contains(&args.every) {
        return Err(Error::bad("--every", "flag", "seconds from 0.1 to 3600", args.every));
    }
    common.only_if_named()?;
    let size = args.size.as_deref().map(size).transpose()?;
    let mut look = Look::of(&|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()));
    look.ascii |= args.ascii;
    look.color &= !args.no_color;
    let mut source = Source::open(args, common)?;
    if args.once {
        return once(&mut source, args, look, size);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Error::bad("standard output", "terminal", "a terminal, or --once", "none"));
    }
    let mut terminal = ratatui::try_init().map_err(|e| Error::io("terminal", "set up", e))?;
    let ended = watch(&mut source, &mut terminal, look, Duration::from_secs_f64(args.every));
    // Also after an error, before it is told; a panic does it by ratatui's own hook.
    ratatui::restore();
    ended
}

/// "80x24"
fn size(text: &str) -> Result<(u16, u16)> {
    let side = |s: &str| s.trim().parse::<u16>().ok().filter(|n| (1..=SIZE_MAX).contains(n));
    let sides = text.split_once(['x', 'X']).and_then(|(w, h)| Some((side(w)?, side(h)?)));
    let expected = format!("columns and rows up to {SIZE_MAX}, such as 80x24");
    sides.ok_or_else(|| Error::bad("--size", "flag", expected, format!("{text:?}")))
}

fn once(source: &mut Source, args: &TopArgs, look: Look, size: Option<(u16, u16)>) -> Result<()> {
    let mut history = History::default();
    history.take(&source.status()?);
    std::thread::sleep(ONCE_APART);
    let status = source.status()?;
    history.take(&status);
    let terminal = || std::io::stdout().is_terminal().then(|| ratatui::crossterm::terminal::size().ok())?;
    let (width, height) = size.or_else(terminal).unwrap_or((80, 24));
    let area = Rect::new(0, 0, width.clamp(1, SIZE_MAX), height.clamp(1, SIZE_MAX));
    let mut buffer = Buffer::empty(area);
    draw::screen(&View { status: &status, history: &history, look }, &Ui::default(), area, &mut buffer);
    let picture = if args.svg { snapshot::svg(&buffer) } else { snapshot::text(&buffer) };
    Out::stdout().text(&picture)
}

fn watch(source: &mut Source, terminal: &mut DefaultTerminal, look: Look, every: Duration) -> Result<()> {
    let io = |e| Error::io("terminal", "draw", e);
    let (mut history, mut ui, mut status) = (History::default(), Ui::default(), source.status()?);
    history.take(&status);
    let mut due = Instant::now() + every;
    loop {
        let view = View { status: &status, history: &history, look };
        terminal.draw(|f| draw::screen(&view, &ui, f.area(), f.buffer_mut())).map_err(io)?;
        if event::poll(due.saturating_duration_since(Instant::now())).map_err(io)? {
            // A resize needs nothing but the next picture.
            let Event::Key(pressed) = event::read().map_err(io)? else { continue };
            match key(pressed).and_then(|k| ui.key(k, &status)) {
                Some(Deed::Quit) => return Ok(()),
                Some(Deed::Switch(what, name)) => {
                    ui.dialog = Dialog::Say(source.switch(what, &name).unwrap_or_else(|e| e.to_string()));
                }
                None => {}
            }
        }
        if Instant::now() >= due {
            due = Instant::now() + every;
            if !ui.paused {
                ui.trouble = match source.status() {
                    Ok(new) => {
                        history.take(&new);
                        status = new;
                        None
                    }
                    Err(e) => Some(format!("old picture: {e}")),
                };
            }
        }
    }
}

fn key(pressed: KeyEvent) -> Option<Key> {
    if pressed.kind == KeyEventKind::Release {
        return None;
    }
    Some(match pressed.code {
        KeyCode::Char('c') if pressed.modifiers.contains(KeyModifiers::CONTROL) => Key::Interrupt,
        KeyCode::Char(c) => Key::Char(c),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        _ => return None,
    })
}

#[test]
fn sizes_are_read() {
    assert_eq!(size("80x24").unwrap(), (80, 24));
    for bad in ["", "80", "0x24", "80x", "x24", "80x99999", "-1x2"] {
        assert!(size(bad).unwrap_err().to_string().starts_with("--size: flag: expected columns"), "{bad}");
    }
}
