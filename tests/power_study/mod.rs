//! The power study: simulated boards through the real sensors, the governor and the tuner, held against what was
//! published and against exhaustive searches. Each part checks its bars and writes its section of
//! `tests/data/reports/power-sim.md`.
//!
//! `TEGU_WRITE_REPORTS=1 cargo test --release --test main power_study::` writes the report anew.

mod commands;
mod energy;
mod faults;
mod table;
mod thermal;
mod tuning;

use std::path::Path;
use std::sync::Arc;

use tegu::power::sim::{Options, SimBoard};

/// A simulated Orin Nano Super in a power mode.
fn nano(mode: &str, options: Options) -> Arc<SimBoard> {
    let options = Options { mode: Some(mode.into()), ..options };
    Arc::new(SimBoard::named("sim:orin-nano-super", options).unwrap())
}

/// A table in Markdown.
fn markdown(head: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    let rule: Vec<String> = head.iter().map(|_| "---".into()).collect();
    let body: String = rows.iter().map(|r| line(r)).collect();
    line(&head) + &line(&rule) + &body + "\n"
}

fn percent(share: f64) -> String {
    format!("{:+.1}%", share * 100.0)
}

const HEAD: &str = "\
# Power: the simulated boards, the governor and the tuner

Written by `TEGU_WRITE_REPORTS=1 cargo test --release --test main power_study::`; the test fails where the numbers no longer
hold. Everything here is **simulated**: no board was at hand. What the physics rests on stands in `src/power/sim`; the fit set
is Table A of one public set of traces (Orin Nano Super, Qwen2.5-1.5B Q4_K_M, llama.cpp), measured through this room's own
sensor code.

";

#[test]
fn the_report_says_what_the_study_finds() {
    let sections = [table::report(), energy::report(), tuning::report(), thermal::report(), faults::report()];
    let text = HEAD.to_owned() + &sections.concat();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/reports/power-sim.md");
    if std::env::var_os("TEGU_WRITE_REPORTS").is_some() {
        std::fs::write(&file, &text).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(&file).unwrap();
    assert!(same(&committed, &text), "the committed report is stale: write it anew (see its head)\n{text}");
}

/// Whether two reports say the same: words alike, and numbers of the same size. Another machine's last digit can send a search
/// or a controller another way; the bars are checked on their own.
fn same(a: &str, b: &str) -> bool {
    let words = |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
    let (a, b) = (words(a), words(b));
    let number = |w: &str| w.trim_matches(|c: char| "+%,;().:|".contains(c)).parse::<f64>().ok();
    a.len() == b.len()
        && a.iter().zip(&b).all(|(x, y)| match (number(x), number(y)) {
            (Some(m), Some(n)) => (m - n).abs() <= 0.5 * m.abs().max(n.abs()) + 1.5,
            _ => x == y,
        })
}

#[test]
fn reports_are_told_apart() {
    assert!(same("a 1.00 W, +2.0%", "a 1.01 W, +2.1%") && !same("a 100 W", "a 250 W") && !same("a 1", "b 1"));
}
