//! The rules of the house, checked on the source itself: which room may import which, where `unsafe` may live, one
//! room a dependency, sizes of files and functions, and what may be in the repository at all.
//!
//! Each rule is a pure function from a [`Tree`] (paths and bytes) to complaints. It runs on the real tree, which must
//! give none, and on a planted violation (`canaries`), which must give some: a rule that cannot fail checks nothing.

mod canaries;
mod lex;
mod rules;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Every file of the repository: path from the root with `/`, and its bytes.
pub struct Tree {
    pub files: Vec<(String, Vec<u8>)>,
}

impl Tree {
    /// What git tracks, and what it would track if it were added: a violation shows before it is committed.
    /// Without git (a source archive) it is everything but build outputs.
    fn of_repository() -> Tree {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let names = git_files(root).unwrap_or_else(|| walk(root));
        let files = names.into_iter().filter_map(|n| Some((n.clone(), std::fs::read(root.join(&n)).ok()?)));
        Tree { files: files.collect() }
    }

    /// The text files below any of the given folders (or equal to one of the names).
    pub fn text<'a>(&'a self, under: &'a [&str]) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(|(p, _)| {
                under.iter().any(|u| p == u || p.strip_prefix(u).is_some_and(|r| r.starts_with('/')))
            })
            .filter_map(|(p, b)| Some((p.as_str(), std::str::from_utf8(b).ok()?)))
    }

    /// Rust source below any of the given folders.
    pub fn rust<'a>(&'a self, under: &'a [&str]) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.text(under).filter(|(p, _)| p.ends_with(".rs"))
    }
}

fn git_files(root: &Path) -> Option<Vec<String>> {
    let out = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .ok()
        .filter(|o| o.status.success())?;
    let names: Vec<String> =
        out.stdout.split(|&b| b == 0).map(|n| String::from_utf8_lossy(n).into()).collect();
    let names: Vec<String> = names.into_iter().filter(|n| !n.is_empty()).collect();
    (!names.is_empty()).then_some(names)
}

fn walk(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder)).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if matches!(name.to_str(), Some("target" | ".git" | ".cuda")) {
                continue;
            }
            let path = folder.join(name);
            match entry.file_type() {
                Ok(t) if t.is_dir() => folders.push(path),
                Ok(t) if t.is_file() => names.push(path.to_string_lossy().into_owned()),
                _ => {}
            }
        }
    }
    names
}

fn assert_clean(rule: fn(&Tree) -> Vec<String>) {
    let tree = Tree::of_repository();
    assert!(tree.files.iter().any(|(p, _)| p == "src/lib.rs"), "the tree was not found");
    let complaints = rule(&tree);
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn imports_follow_the_table() {
    assert_clean(rules::imports);
}

#[test]
fn unsafe_stays_in_its_rooms_with_notes() {
    assert_clean(rules::unsafe_rooms);
}

#[test]
fn each_dependency_has_its_room() {
    assert_clean(rules::dependencies);
}

#[test]
fn files_and_functions_stay_small() {
    assert_clean(rules::sizes);
}

#[test]
fn nothing_is_left_undone() {
    assert_clean(rules::unfinished);
}

#[test]
fn no_machine_is_named() {
    assert_clean(rules::machine_paths);
}

#[test]
fn only_the_named_entries_at_the_top() {
    assert_clean(rules::top_level);
}

#[test]
fn the_changelog_says_each_thing_once() {
    assert_clean(rules::changelog);
}

#[test]
fn the_repository_stays_light() {
    assert_clean(rules::weight);
}
