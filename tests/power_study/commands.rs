//! The commands around profiles, tuning and recordings, as a person runs them: on simulated boards and on a machine with nothing.

use std::process::Output;

use crate::support::command;

fn tegu(args: &[&str]) -> Output {
    command("tegu").arg("power").args(args).output().unwrap()
}

/// Standard output of a run that must succeed.
fn good(args: &[&str]) -> String {
    let out = tegu(args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The one line of a run that must fail as bad input.
fn bad(args: &[&str]) -> String {
    let out = tegu(args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{args:?}: {said}");
    said
}

const NANO: &str = "sim:orin-nano-super";

#[test]
fn profiles_are_listed_shown_and_checked() {
    let list = good(&["profiles", "--board", NANO]);
    assert!(list.starts_with("orin-nano-8-super"), "{list}");
    for name in ["balanced", "latency", "efficiency", "silent", "battery"] {
        assert!(list.contains(name), "{list}");
    }
    assert!(good(&["profiles", "--of", "agx-orin-64", "--json"]).contains("\"cap_mw\":25000"));
    // A machine that is no Jetson has profiles too.
    assert!(good(&["profiles"]).contains("balanced"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.toml");
    let path = file.to_str().unwrap();
    let text = good(&["profiles", "efficiency", "--board", NANO]);
    std::fs::write(&file, &text).unwrap();
    assert!(good(&["profiles", "--check", path]).contains("good"));
    std::fs::write(&file, text.replace("max_batch", "max_bach")).unwrap();
    let said = bad(&["profiles", "--check", path]);
    assert!(said.contains(path) && said.contains("did you mean \"decode.max_batch\""), "{said}");
    assert!(bad(&["profiles", "efficency", "--board", NANO]).contains("did you mean \"efficiency\""));
    assert!(bad(&["profiles", "--of", "orin-nano"]).contains("orin-nano-8"));
    assert!(bad(&["profiles", "--board", "sim:orin"]).contains("sim:agx-orin-64"));
}

#[test]
fn a_recording_becomes_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (csv, again, page) = (path("a.csv"), path("b.csv"), path("a.html"));
    let record = |file: &str| {
        good(&["record", "-o", file, "--board", NANO, "--profile", "efficiency", "--seconds", "120"])
    };
    assert!(record(&csv).contains("samples"));
    record(&again);
    let text = std::fs::read_to_string(&csv).unwrap();
    assert_eq!(text, std::fs::read_to_string(&again).unwrap(), "the same seed, the same recording");
    assert!(
        text.lines().count() > 200 && text.contains("rail VDD_IN W") && text.contains("zone tj-thermal C")
    );
    let sums = good(&["report", &csv, "-o", &page]);
    assert!(sums.contains("tokens") && sums.contains("W on average"), "{sums}");
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.contains("Orin Nano") && html.contains("prefill"));
    assert!(!html.contains("NaN") && !html.contains("http"), "nothing from elsewhere");
    // What is no recording is refused by its line; what was cut off is read as far as it goes.
    let cut = path("cut.csv");
    std::fs::write(&cut, &text[..text.len() - 7]).unwrap();
    good(&["report", &cut]);
    std::fs::write(&cut, text.replacen("prefill", "sleep", 1)).unwrap();
    assert!(bad(&["report", &cut]).contains("line "));
    assert!(bad(&["report", &path("none.csv")]).contains("none.csv"));
    assert!(bad(&["record", "-o", &path("no/where.csv"), "--board", NANO]).contains("where.csv"));
}

/// A machine without a single sensor records, and its report says what is missing.
#[test]
fn a_machine_with_nothing_is_recorded_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let root = dir.path().join("empty");
    std::fs::create_dir(&root).unwrap();
    let (csv, page) = (path("a.csv"), path("a.html"));
    good(&["record", "-o", &csv, "--root", root.to_str().unwrap(), "--seconds", "1", "--every", "100"]);
    good(&["report", &csv, "-o", &page]);
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("Power was metered for"), "{html}");
}

#[test]
fn a_tuning_takes_a_quarter_and_writes_a_profile_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("my tuned.toml");
    let path = file.to_str().unwrap();
    let text = good(&["tune", "--board", NANO, "-o", path, "--json"]);
    let said: serde_json::Value = serde_json::from_str(&text).unwrap();
    let runs = said["runs"].as_array().unwrap().len();
    assert!(runs * 4 <= said["settings"].as_u64().unwrap() as usize, "{runs} runs");
    assert_eq!(said["knees"].as_array().unwrap().len(), 4);
    assert!(good(&["profiles", "--check", path]).contains("my-tuned"));
    // The profile steers: a dry run with it beside the stock mode.
    let dry = good(&["apply", path, "--board", NANO, "--work", "batch", "--seconds", "600"]);
    assert!(dry.contains("stock") && dry.contains("J/hour") && !dry.contains("NaN"), "{dry}");
    assert!(
        good(&["tune", "--board", "sim:agx-orin-64", "--batch", "1,4", "--goal", "speed"])
            .contains("For speed")
    );
    assert!(bad(&["tune", "--board", NANO, "--batch", "0"]).contains("--batch"));
    assert!(bad(&["tune", "--board", NANO, "--batch", "1", "--peak", "1"]).contains("--peak"));
}

#[test]
fn without_a_helper_nothing_is_touched_and_it_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    let socket = socket.to_str().unwrap();
    for args in [&["apply", "balanced", "--helper", socket][..], &["restore", "--helper", socket]] {
        let said = bad(args);
        assert!(said.contains("none.sock") && said.contains("tegu-clocks.service"), "{said}");
    }
}
