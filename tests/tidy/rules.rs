//! The rules, each with its table as data.

use super::Tree;
use super::lex::{code_only, functions, segments_after};

/// Which rooms a room may import. The order is the order of the house: a room is listed after those it stands on.
const IMPORTS: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("limits", &[]),
    ("format", &["units", "limits"]),
    ("observe", &["units", "limits"]),
    ("config", &["units", "limits"]),
    ("weights", &["units", "limits", "format", "observe"]),
    ("model", &["units", "limits", "format", "observe", "weights"]),
    ("text", &["units", "limits", "format"]),
    ("kv", &["units", "limits", "format", "observe", "weights", "model"]),
    ("backend", &["units", "limits", "format", "observe", "weights", "model", "kv"]),
    ("sample", &["units", "limits", "format", "observe", "weights", "model", "kv", "backend", "text"]),
    (
        "engine",
        &["units", "limits", "format", "observe", "weights", "model", "kv", "backend", "sample", "text"],
    ),
    (
        "serve",
        &[
            "units", "limits", "format", "observe", "config", "weights", "model", "kv", "backend", "sample",
            "text", "engine",
        ],
    ),
    // A side room: of the engine it knows the Budget that it returns, and nothing else knows it but app and cli.
    ("power", &["units", "limits", "observe", "config", "engine"]),
    ("net", &["units", "limits"]),
    ("app", ALL_BUT_CLI),
    ("cli", ALL),
    ("bin", ALL),
];
const ALL_BUT_CLI: &[&str] = &[
    "units", "limits", "format", "observe", "config", "weights", "model", "text", "kv", "backend", "sample",
    "engine", "power", "serve", "net",
];
const ALL: &[&str] = &[
    "units", "limits", "format", "observe", "config", "weights", "model", "text", "kv", "backend", "sample",
    "engine", "power", "serve", "net", "app", "cli",
];

/// Rooms that may hold `unsafe`: the map and aligned buffers, and SIMD.
const UNSAFE_ROOMS: &[&str] = &["weights", "backend"];

/// The rooms of each dependency. A vocabulary crate (an error derive, a log macro, data derives, plain-old-data casts)
/// may be used where it is needed; each of the others is known to one room, so that it can be replaced there.
const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("axum", &["serve"]),
    ("bytemuck", ALL),
    ("clap", &["cli"]),
    ("clap_complete", &["cli"]),
    ("ctrlc", &["app"]),
    ("cudarc", &["backend"]),
    ("env_logger", &["observe"]),
    ("half", &["format"]),
    ("hyper", &["serve"]),
    ("hyper_util", &["serve"]),
    ("indicatif", &["observe"]),
    ("io_uring", &["weights"]),
    ("listenfd", &["serve"]),
    ("llguidance", &["sample"]),
    ("libloading", &["backend"]),
    ("log", ALL),
    ("lz4_flex", &["backend"]),
    ("memmap2", &["weights"]),
    ("minijinja", &["text"]),
    ("minijinja_contrib", &["text"]),
    ("nvml_wrapper", &["power"]),
    ("ratatui", &["cli"]),
    ("rustix", &["weights", "app"]),
    ("rustyline", &["cli"]),
    ("sd_notify", &["serve"]),
    ("serde", ALL),
    ("serde_json", ALL),
    ("signal_hook", &["app"]),
    ("thiserror", ALL),
    ("tokenizers", &["text"]),
    ("tokio", &["serve"]),
    ("toktrie", &["sample"]),
    ("toml", &["config", "power"]),
    ("xxhash_rust", &["backend", "engine"]),
];

const FILE_LINES_MAX: usize = 700;
const FUNCTION_LINES_MAX: usize = 70;
/// rustfmt keeps code at 110; the slack is for comments and rows of tables that would read worse in two lines.
const LINE_WIDTH_MAX: usize = 132;
/// Functions that are one long table, where cutting them would only scatter it: (file, function).
const TABLES: &[(&str, &str)] = &[];

const TOP_LEVEL: &[&str] = &[
    "build.rs",
    "Cargo.toml",
    "Cargo.lock",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "src",
    "kernels",
    "profiles",
    "tools",
    "tests",
    "systemd",
];
const REPOSITORY_BYTES_MAX: usize = 45_000_000;

/// The room of a source file: its folder, or its own name at the top of `src`.
fn room(path: &str) -> &str {
    let rest = path.strip_prefix("src/").unwrap_or(path);
    rest.split('/').next().map_or(rest, |r| r.strip_suffix(".rs").unwrap_or(r))
}

/// No line of the changelog is there twice, as a merge leaves it.
pub fn changelog(tree: &Tree) -> Vec<String> {
    let text = tree.text(&["CHANGELOG.md"]).map(|(_, text)| text).collect::<String>();
    let said = |line: &&str| line.len() > 20;
    let twice = |(i, line): &(usize, &str)| text.lines().take(*i).any(|l| l == *line);
    text.lines()
        .enumerate()
        .filter(|(_, l)| said(l))
        .filter(twice)
        .map(|(i, l)| format!("CHANGELOG.md:{}: {l}", i + 1))
        .collect()
}

/// Imports go one way.
pub fn imports(tree: &Tree) -> Vec<String> {
    let mut bad = Vec::new();
    for (path, source) in tree.rust(&["src"]) {
        let from = room(path);
        if from == "lib" {
            continue;
        }
        let Some((_, allowed)) = IMPORTS.iter().find(|(r, _)| *r == from) else {
            bad.push(format!("{path}: room {from} is not in the import table"));
            continue;
        };
        let code = code_only(source);
        let mut used = segments_after(&code, "crate");
        used.extend(segments_after(&code, "tegu"));
        // `super::x` reaches a sibling room only where x is no module of this room.
        let own = |x: &str| tree.files.iter().any(|(p, _)| p.starts_with(&format!("src/{from}/{x}")));
        used.extend(segments_after(&code, "super").into_iter().filter(|(_, x)| !own(x) && is_room(x)));
        for (line, to) in used {
            if is_room(&to) && to != from && !allowed.contains(&to.as_str()) {
                bad.push(format!("{path}:{line}: room {from} may not import {to}"));
            } else if !is_room(&to) && to != "bin" && !to.is_empty() && is_module_name(&to) && !own(&to) {
                bad.push(format!("{path}:{line}: crate::{to} is no room of the import table"));
            }
        }
        if code.contains("super::super::super") {
            bad.push(format!("{path}: a path climbs three modules; name it from crate::"));
        }
    }
    bad
}

fn is_room(name: &str) -> bool {
    IMPORTS.iter().any(|(r, _)| *r == name)
}

/// Lower case begins a module; macros and items of the crate root begin otherwise or do not exist here.
fn is_module_name(name: &str) -> bool {
    name != "super" && name != "self" && name.starts_with(|c: char| c.is_ascii_lowercase())
}

/// `unsafe` only in its rooms, and never without the reason why it is sound.
pub fn unsafe_rooms(tree: &Tree) -> Vec<String> {
    // The note stands right above, or above the statement or attributes that the block belongs to.
    const NOTE_WITHIN_LINES: usize = 8;
    let mut bad = Vec::new();
    for (path, source) in tree.rust(&["src", "tests", "tools"]) {
        let code = code_only(source);
        let lines: Vec<&str> = source.lines().collect();
        for (at, _) in code.match_indices("unsafe") {
            let line = code[..at].matches('\n').count();
            let rest = &code[at + "unsafe".len()..];
            let before = code[..at].chars().next_back();
            if rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
                || before.is_some_and(|c| c.is_alphanumeric() || c == '_')
            {
                continue;
            }
            if !path.starts_with("src/") || !UNSAFE_ROOMS.contains(&room(path)) {
                bad.push(format!("{path}:{}: unsafe outside rooms {UNSAFE_ROOMS:?}", line + 1));
            }
            let is_block = rest.trim_start().starts_with('{') || rest.trim_start().starts_with("impl");
            let noted =
                || lines[line.saturating_sub(NOTE_WITHIN_LINES)..=line].iter().any(|l| l.contains("SAFETY:"));
            if is_block && !noted() {
                bad.push(format!("{path}:{}: unsafe without a SAFETY note", line + 1));
            }
        }
    }
    bad
}

/// One room a dependency, and no dependency without a row.
pub fn dependencies(tree: &Tree) -> Vec<String> {
    let mut bad = Vec::new();
    let manifest = tree.text(&["Cargo.toml"]).map(|(_, t)| t).collect::<String>();
    let listed: Vec<String> = manifest
        .lines()
        .skip_while(|l| *l != "[dependencies]")
        .skip(1)
        .take_while(|l| !l.starts_with('['))
        .filter_map(|l| Some(l.split_once('=')?.0.trim().replace('-', "_")))
        .collect();
    for name in &listed {
        if !DEPENDENCIES.iter().any(|(d, _)| d == name) {
            bad.push(format!("Cargo.toml: dependency {name} has no room in the table"));
        }
    }
    for (name, _) in DEPENDENCIES {
        if !listed.iter().any(|l| l == name) {
            bad.push(format!("the table lists {name}, which is no dependency"));
        }
    }
    for (path, source) in tree.rust(&["src"]) {
        let code = code_only(source);
        for (name, rooms) in DEPENDENCIES {
            if let Some((line, _)) = segments_after(&code, name).first()
                && !rooms.contains(&room(path))
            {
                bad.push(format!("{path}:{line}: {name} belongs to {rooms:?}"));
            }
        }
    }
    bad
}

/// A file is one idea, a function fits a screen, a line fits beside another.
pub fn sizes(tree: &Tree) -> Vec<String> {
    let mut bad = Vec::new();
    for (path, source) in tree.rust(&["src", "tests", "tools"]) {
        let lines = source.lines().count();
        if lines > FILE_LINES_MAX {
            bad.push(format!("{path}: {lines} lines, at most {FILE_LINES_MAX}"));
        }
        for (n, l) in source.lines().enumerate() {
            let width = l.chars().count();
            // Rows of a test's data stay in one line.
            let is_data = path.starts_with("tests/") || path.ends_with("_tests.rs");
            if width > LINE_WIDTH_MAX && !(is_data && l.contains('"')) {
                bad.push(format!("{path}:{}: {width} columns, at most {LINE_WIDTH_MAX}", n + 1));
            }
        }
        for (name, line, length) in functions(&code_only(source)) {
            if length > FUNCTION_LINES_MAX && !TABLES.contains(&(path, &name)) {
                bad.push(format!(
                    "{path}:{line}: fn {name} has {length} lines, at most {FUNCTION_LINES_MAX}"
                ));
            }
        }
    }
    bad
}

/// Nothing is left for later in the source.
pub fn unfinished(tree: &Tree) -> Vec<String> {
    // Spelled apart so that this file does not accuse itself.
    let marks = [["TO", "DO"], ["FIX", "ME"], ["X", "XX"], ["to", "do!("], ["unimple", "mented!("]]
        .map(|p| p.concat());
    let mut bad = Vec::new();
    for (path, text) in
        tree.text(&["src", "tests", "tools", ".ci", "README.md", "CHANGELOG.md", "Cargo.toml"])
    {
        for (n, line) in text.lines().enumerate() {
            // A longer word that contains a mark (an id, base64 in data) is not one.
            let is_mark = |m: &String| {
                line.match_indices(m.as_str()).any(|(at, _)| {
                    let before = line[..at].chars().next_back();
                    let after = line[at + m.len()..].chars().next();
                    let joins = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
                    !joins(before) && (m.ends_with('(') || !joins(after))
                })
            };
            if !path.starts_with("tests/data") && marks.iter().any(is_mark) {
                bad.push(format!("{path}:{}: left for later: {}", n + 1, line.trim()));
            }
        }
    }
    bad
}

/// The project runs anywhere: no path of the machine it was written on.
pub fn machine_paths(tree: &Tree) -> Vec<String> {
    let marks = [["/wo", "rk/"], ["../sha", "red"], ["/ro", "ot/"], ["/ho", "me/"], ["/t", "mp/"]]
        .map(|p| p.concat());
    let mut bad = Vec::new();
    for (path, bytes) in tree.files.iter().filter(|(p, _)| !p.starts_with("tests/data")) {
        let Ok(text) = std::str::from_utf8(bytes) else { continue };
        for (n, line) in text.lines().enumerate() {
            if marks.iter().any(|m| line.contains(m.as_str())) {
                bad.push(format!("{path}:{}: names a machine's path: {}", n + 1, line.trim()));
            }
        }
    }
    bad
}

/// Only the entries that the design names, and dot-files.
pub fn top_level(tree: &Tree) -> Vec<String> {
    let tops: std::collections::BTreeSet<&str> =
        tree.files.iter().filter_map(|(p, _)| p.split('/').next()).collect();
    let stray = tops.into_iter().filter(|t| !t.starts_with('.') && !TOP_LEVEL.contains(t));
    stray.map(|t| format!("{t}: not an entry that the design names")).collect()
}

/// A clone stays quick.
pub fn weight(tree: &Tree) -> Vec<String> {
    let total: usize = tree.files.iter().map(|(_, b)| b.len()).sum();
    let over = total > REPOSITORY_BYTES_MAX;
    over.then(|| format!("{total} bytes in the repository, at most {REPOSITORY_BYTES_MAX}"))
        .into_iter()
        .collect()
}
