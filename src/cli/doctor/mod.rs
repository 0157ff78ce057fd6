//! `tegu doctor`: everything that Tegu uses of a machine, each with what was found, why it matters and what to do.

mod board;
mod machine;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::args::Common;
use super::out::Out;
use super::power::Where;
use crate::units::{Error, Result};

/// Arguments.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Each line is ok, warn (it works, and could work better) or fail (Tegu cannot do its work). With --root or --board only the
board's own items are looked at: the rest would be this machine's. The exit code is 2 where an item fails.

Examples:
  tegu doctor
  tegu doctor --json
  tegu doctor --board sim:orin-nano-super";

/// How an item stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warn,
    Fail,
}

/// One item.
#[derive(Debug, Clone, Serialize)]
struct Item {
    name: &'static str,
    state: State,
    /// What is there.
    found: String,
    /// Why it matters.
    why: &'static str,
    /// What to do, where there is something to do.
    todo: Option<String>,
}

impl Item {
    fn ok(name: &'static str, found: impl Into<String>, why: &'static str) -> Item {
        Item { name, state: State::Ok, found: found.into(), why, todo: None }
    }

    fn warn(
        name: &'static str,
        found: impl Into<String>,
        why: &'static str,
        todo: impl Into<String>,
    ) -> Item {
        Item { name, state: State::Warn, found: found.into(), why, todo: Some(todo.into()) }
    }

    fn fail(
        name: &'static str,
        found: impl Into<String>,
        why: &'static str,
        todo: impl Into<String>,
    ) -> Item {
        Item { state: State::Fail, ..Item::warn(name, found, why, todo) }
    }
}

/// Looks at everything.
pub fn run(args: &DoctorArgs, common: &Common) -> Result<()> {
    common.only_if_named()?;
    let site = args.place.open()?;
    let mut items = board::items(&site);
    if site.is_here {
        items.extend(machine::items(&site, &common.config(Vec::new())?));
    }
    let count = |state: State| items.iter().filter(|i| i.state == state).count();
    let (warn, fail) = (count(State::Warn), count(State::Fail));
    let mut out = Out::stdout();
    if args.json {
        out.json(&json!({ "board": site.board, "items": items, "warn": warn, "fail": fail }))?;
    } else {
        out.text(&text(&items))?;
    }
    let failed: Vec<&str> = items.iter().filter(|i| i.state == State::Fail).map(|i| i.name).collect();
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Error::bad("doctor", failed.join(", "), "ok or warn", "fail")),
    }
}

/// A line an item; below what is not well, why it matters and what to do.
fn text(items: &[Item]) -> String {
    let width = items.iter().map(|i| i.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for item in items {
        let mark = match item.state {
            State::Ok => "ok  ",
            State::Warn => "warn",
            State::Fail => "FAIL",
        };
        text += &format!("{mark}  {:<width$}  {}\n", item.name, crate::units::one_line(&item.found));
        if item.state != State::Ok {
            text += &format!("      {:<width$}  why: {}\n", "", item.why);
        }
        if let Some(todo) = &item.todo {
            text += &format!("      {:<width$}  do:  {todo}\n", "");
        }
    }
    text
}

#[test]
fn what_is_not_well_is_explained() {
    let items = [Item::ok("a", "fine", "x"), Item::warn("longer", "so so", "it matters", "this")];
    assert_eq!(
        text(&items),
        "ok    a       fine\nwarn  longer  so so\n              why: it matters\n              do:  this\n"
    );
}
