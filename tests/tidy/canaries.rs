//! Each rule against a planted violation, and against the innocent twin of it.

use super::{Tree, rules};

fn plant(path: &str, text: &str) -> Tree {
    Tree { files: vec![(path.to_owned(), text.as_bytes().to_vec())] }
}

fn caught(rule: fn(&Tree) -> Vec<String>, path: &str, text: &str) {
    assert!(!rule(&plant(path, text)).is_empty(), "not caught in {path}: {text}");
}

fn passed(rule: fn(&Tree) -> Vec<String>, path: &str, text: &str) {
    let complaints = rule(&plant(path, text));
    assert!(complaints.is_empty(), "{complaints:?}");
}

#[test]
fn a_wrong_import_is_caught() {
    caught(rules::imports, "src/format/gguf.rs", "use crate::weights::Matrix;");
    caught(rules::imports, "src/format/gguf.rs", "use crate::{units::Error, engine};");
    caught(rules::imports, "src/format/mod.rs", "use super::weights::Matrix;");
    caught(rules::imports, "src/kv/pages.rs", "fn f() { crate::backend::step() }");
    caught(rules::imports, "src/app.rs", "use crate::cli::Args;");
    caught(rules::imports, "src/newroom/mod.rs", "");
    caught(rules::imports, "src/engine/mod.rs", "use crate::power::Budget;");
    passed(rules::imports, "src/format/gguf.rs", "// crate::weights\nuse crate::units::{Error, Result};");
    passed(rules::imports, "src/weights/load.rs", "use super::Matrix; use crate::format::Codec;");
}

#[test]
fn stray_unsafe_is_caught() {
    caught(rules::unsafe_rooms, "src/model/bind.rs", "// SAFETY: none\nunsafe { x() }");
    caught(rules::unsafe_rooms, "tests/a.rs", "// SAFETY: none\nunsafe { x() }");
    caught(rules::unsafe_rooms, "src/weights/map.rs", "fn f() { unsafe { x() } }");
    passed(rules::unsafe_rooms, "src/weights/map.rs", "// SAFETY: checked above.\nlet a = unsafe { x() };");
    passed(rules::unsafe_rooms, "src/model/bind.rs", "// unsafe\nlet s = \"unsafe\"; let unsafely = 1;");
}

#[test]
fn a_stray_dependency_is_caught() {
    let stray = |text: &str| {
        let complaints = rules::dependencies(&plant("src/model/bind.rs", text));
        complaints.iter().any(|c| c.contains("belongs to"))
    };
    assert!(stray("use half::f16;"));
    assert!(stray("let x: memmap2::Mmap;"));
    assert!(!stray("// half::f16\nuse crate::format::f16; use log::info;"));
    let unlisted = rules::dependencies(&plant("Cargo.toml", "[dependencies]\nrayon = \"1\"\n"));
    assert!(unlisted.iter().any(|c| c.contains("rayon")));
}

#[test]
fn what_the_changelog_says_twice_is_caught() {
    caught(rules::changelog, "CHANGELOG.md", "- A line of some length.\n\n- A line of some length.\n");
    passed(rules::changelog, "CHANGELOG.md", "### Added\n\n- One thing and another.\n\n### Added\n");
}

#[test]
fn what_grows_too_large_is_caught() {
    caught(rules::sizes, "src/a.rs", &"// line\n".repeat(701));
    caught(rules::sizes, "src/a.rs", &format!("fn f() {{\n{}}}", "g();\n".repeat(70)));
    caught(rules::sizes, "src/a.rs", &format!("// {}", "w".repeat(132)));
    passed(rules::sizes, "src/a.rs", &format!("fn f(x: [u8; 4]) {{\n{}}}", "g();\n".repeat(60)));
}

#[test]
fn unfinished_work_is_caught() {
    caught(rules::unfinished, "src/a.rs", &format!("// {}DO: later", "TO"));
    caught(rules::unfinished, "src/a.rs", &format!("fn f() {{ to{}() }}", "do!"));
    caught(rules::unfinished, "README.md", &format!("{}ME", "FIX"));
    passed(rules::unfinished, "src/a.rs", &format!("let MASTO{} = 1;", "DON"));
}

#[test]
fn machine_paths_are_caught() {
    caught(rules::machine_paths, "src/a.rs", &format!("\"/wo{}/main\"", "rk"));
    caught(rules::machine_paths, ".ci/run", &format!("cd ../sha{}", "red"));
    passed(rules::machine_paths, "src/a.rs", "root.join(\"shared\")");
}

#[test]
fn stray_entries_and_weight_are_caught() {
    caught(rules::top_level, "notes.txt", "");
    caught(rules::top_level, "examples/a.rs", "");
    passed(rules::top_level, ".ci/run", "");
    caught(rules::weight, "tests/data/big", &"x".repeat(45_000_001));
}
