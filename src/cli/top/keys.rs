//! What keys do. Nothing here draws or asks a board: a key changes the dialog, or gives a deed to do.

use crate::power::status::Status;

/// A key, as far as this screen cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A letter, digit or sign.
    Char(char),
    /// Arrow up.
    Up,
    /// Arrow down.
    Down,
    /// Enter.
    Enter,
    /// Escape.
    Escape,
    /// Ctrl-C.
    Interrupt,
}

/// What can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The profile that steers.
    Profile,
    /// The board's power mode.
    Mode,
}

impl What {
    /// What it is called.
    pub fn title(self) -> &'static str {
        match self {
            What::Profile => "profile",
            What::Mode => "power mode",
        }
    }

    /// Which one is in force.
    pub fn current(self, status: &Status) -> Option<&str> {
        match self {
            What::Profile => status.profile.as_deref(),
            What::Mode => status.mode.as_deref(),
        }
    }

    /// What has to be known before it is switched.
    pub fn warning(self) -> &'static [&'static str] {
        match self {
            What::Profile => &[],
            What::Mode => &[
                " It changes clocks of the whole board, for all programs.",
                " A mode with other GPU cores takes effect after a reboot.",
            ],
        }
    }

    fn items(self, status: &Status) -> &[String] {
        match self {
            What::Profile => &status.profiles,
            What::Mode => &status.modes,
        }
    }
}

/// What lies over the screen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Dialog {
    /// Nothing.
    #[default]
    None,
    /// The keys.
    Help,
    /// A list to choose from.
    Pick {
        /// Of what.
        what: What,
        /// The choices.
        items: Vec<String>,
        /// The marked one.
        at: usize,
    },
    /// A question.
    Confirm {
        /// What would be switched.
        what: What,
        /// To what.
        name: String,
    },
    /// A message.
    Say(String),
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// Leave.
    Quit,
    /// Switch.
    Switch(What, String),
}

/// The screen's own state.
#[derive(Debug, Default)]
pub struct Ui {
    /// What lies over it.
    pub dialog: Dialog,
    /// The picture is held.
    pub paused: bool,
    /// Why the picture is old.
    pub trouble: Option<String>,
}

impl Ui {
    /// Takes a key.
    pub fn key(&mut self, key: Key, status: &Status) -> Option<Deed> {
        if key == Key::Interrupt {
            return Some(Deed::Quit);
        }
        match std::mem::take(&mut self.dialog) {
            Dialog::None => self.plain(key, status),
            Dialog::Pick { what, items, at } => {
                self.picking(key, what, items, at);
                None
            }
            Dialog::Confirm { what, name } => {
                matches!(key, Key::Char('y' | 'Y')).then_some(Deed::Switch(what, name))
            }
            // Any key closes what only tells something.
            Dialog::Help | Dialog::Say(_) => None,
        }
    }

    fn plain(&mut self, key: Key, status: &Status) -> Option<Deed> {
        match key {
            Key::Char('q') => return Some(Deed::Quit),
            Key::Char('?' | 'h') => self.dialog = Dialog::Help,
            Key::Char(' ') => self.paused = !self.paused,
            Key::Char('p') => self.open(What::Profile, status),
            Key::Char('m') => self.open(What::Mode, status),
            _ => {}
        }
        None
    }

    fn open(&mut self, what: What, status: &Status) {
        let items = what.items(status).to_vec();
        if items.is_empty() {
            self.dialog = Dialog::Say(match what {
                What::Profile => "No profile can be switched here: no daemon steers this board.".into(),
                What::Mode => "This board tells of no power modes (no nvpmodel).".into(),
            });
            return;
        }
        let at = what.current(status).and_then(|c| items.iter().position(|i| i == c)).unwrap_or(0);
        self.dialog = Dialog::Pick { what, items, at };
    }

    fn picking(&mut self, key: Key, what: What, items: Vec<String>, at: usize) {
        let last = items.len() - 1;
        let at = match key {
            Key::Up | Key::Char('k') => at.saturating_sub(1),
            Key::Down | Key::Char('j') => (at + 1).min(last),
            Key::Enter => {
                self.dialog = Dialog::Confirm { what, name: items[at].clone() };
                return;
            }
            Key::Escape | Key::Char('q') => return,
            _ => at,
        };
        self.dialog = Dialog::Pick { what, items, at };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let names = |n: &[&str]| n.iter().map(|s| (*s).to_owned()).collect();
        Status {
            profile: Some("balanced".into()),
            profiles: names(&["silent", "balanced", "latency"]),
            modes: names(&["15W", "25W"]),
            ..Status::default()
        }
    }

    #[test]
    fn a_profile_is_switched_after_a_yes_only() {
        let (mut ui, s) = (Ui::default(), status());
        assert_eq!(ui.key(Key::Char('p'), &s), None);
        assert!(
            matches!(&ui.dialog, Dialog::Pick { at: 1, items, .. } if items.len() == 3),
            "{:?}",
            ui.dialog
        );
        for key in [Key::Down, Key::Down, Key::Down, Key::Enter] {
            assert_eq!(ui.key(key, &s), None);
        }
        assert_eq!(ui.dialog, Dialog::Confirm { what: What::Profile, name: "latency".into() });
        assert_eq!(ui.key(Key::Enter, &s), None, "Enter is no yes");
        assert_eq!(ui.dialog, Dialog::None);
        for key in [Key::Char('p'), Key::Up, Key::Up, Key::Enter] {
            assert_eq!(ui.key(key, &s), None);
        }
        assert_eq!(ui.key(Key::Char('y'), &s), Some(Deed::Switch(What::Profile, "silent".into())));
        assert_eq!(ui.dialog, Dialog::None);
    }

    #[test]
    fn keys_leave_hold_and_explain() {
        let (mut ui, s) = (Ui::default(), status());
        assert_eq!(ui.key(Key::Char(' '), &s), None);
        assert!(ui.paused);
        ui.key(Key::Char('?'), &s);
        assert_eq!(ui.dialog, Dialog::Help);
        assert_eq!(ui.key(Key::Char('q'), &s), None, "it closes the help only");
        assert_eq!(ui.key(Key::Char('q'), &s), Some(Deed::Quit));
        ui.key(Key::Char('m'), &s);
        assert!(matches!(ui.dialog, Dialog::Pick { what: What::Mode, at: 0, .. }));
        assert_eq!(ui.key(Key::Escape, &s), None);
        assert_eq!(ui.dialog, Dialog::None);
        ui.key(Key::Char('m'), &Status::default());
        assert!(matches!(ui.dialog, Dialog::Say(_)));
        assert_eq!(ui.key(Key::Interrupt, &s), Some(Deed::Quit));
    }
}
