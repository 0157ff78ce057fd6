//! A daemon on a simulated board: what it tells of power, what it lets itself be told, and that it ends in order.

use super::Daemon;
use crate::power::trees::{self, Release};
use serde_json::{Value, json};

fn status(d: &Daemon) -> Value {
    let (status, text) = d.get("/v1/power").unwrap();
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_daemon_on_a_simulated_board_tells_and_steers() {
    let mut d = Daemon::start("[power]\nboard = \"sim:orin-nano-super\"\n");
    let s = status(&d);
    assert!(s["board"].as_str().unwrap().contains("sim:orin-nano-super"), "{s}");
    assert_eq!((&s["profile"], &s["hands"]), (&json!("balanced"), &json!("this process")));
    assert!(s["sample"]["total_mw"].as_u64().unwrap() > 1_000);
    // Energy of a request, with its method, whole and streamed.
    let body = json!({"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 24});
    let usage = &d.good("/v1/chat/completions", body.clone())["usage"];
    let energy = &usage["tegu"]["energy_mj"];
    let part = |name: &str| energy[name].as_f64().unwrap_or_else(|| panic!("{name} in {usage}"));
    assert!(part("prefill") > 0.0 && part("decode") > 0.0, "{usage}");
    assert!((part("total") - part("prefill") - part("decode")).abs() < 0.2, "{usage}");
    assert_eq!(usage["tegu"]["method"], "rails");
    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    let (_, text) = d.send("POST", "/v1/chat/completions", streamed.to_string().as_bytes());
    assert!(text.contains("\"energy_mj\""), "{text}");
    // Profiles are switched; what is wrong is named.
    assert!(d.good("/v1/power", json!({"profile": "silent"}))["said"].as_str().unwrap().contains("silent"));
    d.wait_until("the profile is in force", |d| status(d)["profile"] == "silent");
    for (body, says) in [
        (json!({"profile": "silnt"}), "did you mean"),
        (json!({"profile": "../x.toml"}), "expected one of"),
        (json!({"mode": "15W"}), "simulated"),
        (json!({}), "neither or both"),
        (json!({"profil": "silent"}), "profil"),
    ] {
        let (status, value) = d.post("/v1/power", body.clone());
        let message = value["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(says), "{body}: {status} {value}");
    }
    let (_, page) = d.get("/metrics").unwrap();
    for name in ["tegu_power_milliwatts{rail=\"VDD_IN\"}", "tegu_profile{profile=\"silent\"} 1"] {
        assert!(page.contains(name), "{name} in\n{page}");
    }
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    for (name, ..) in tegu::serve::BOARD_METRICS {
        assert!(readme.contains(&format!("`{name}`")), "README.md lists no {name}");
    }
}

#[test]
fn a_daemon_that_looks_at_no_board_says_so() {
    let d = Daemon::start("[power]\nboard = \"off\"\n");
    let (status, text) = d.get("/v1/power").unwrap();
    assert!(status == 404 && text.contains("no_power"), "{status} {text}");
    let body = json!({"prompt": "a", "max_tokens": 2});
    assert_eq!(d.good("/v1/completions", body)["usage"].get("tegu"), None);
    assert!(!d.get("/metrics").unwrap().1.contains("tegu_temperature_celsius"));
}

/// On a tree of files that stands for an Orin: the real actuator holds a cap, a SIGKILL leaves it and the next start heals it,
/// and SIGTERM puts the board's own value back.
#[test]
fn clocks_go_back_however_the_daemon_ends() {
    let tree = tempfile::tempdir().unwrap();
    let root = tree.path();
    trees::build(root, trees::spec("nano-8-super"), Release::Six);
    std::fs::create_dir_all(root.join("run/tegu")).unwrap();
    let clocks: String =
        ["prefill", "decode", "idle"].map(|p| format!("[{p}]\ngpu_cap_mhz = 612\n")).concat();
    let profile = format!("name = \"capped\"\nboard = \"any\"\n{clocks}[fallback]\ngpu_cap_mhz = 612\n");
    std::fs::write(root.join("capped.toml"), profile).unwrap();
    let high =
        || trees::get(root, &format!("{}/max_freq", trees::gpu_folder(Release::Six))).trim().to_owned();
    let own = high();
    assert_ne!(own, "612000000");
    let mut d = Daemon::start(&format!(
        "[power]\nboard = \"tree:{0}\"\nclocks = \"direct\"\nprofile = \"{0}/capped.toml\"\n",
        root.display()
    ));
    d.wait_until("the cap is set", |_| high() == "612000000");
    let mut d = d.killed();
    d.wait_until("the cap is set again", |_| high() == "612000000");
    d.signal("TERM");
    assert_eq!(d.ended(), Some(0), "{}", d.log());
    assert_eq!(high(), own, "the board's own ceiling, not the killed daemon's cap\n{}", d.log());
    assert!(!root.join("run/tegu/clocks.json").exists());
}

/// The cores that each of the daemon's threads may use, and the threads' names.
fn threads(d: &Daemon) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", d.child.id())).unwrap().flatten();
    let one = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let cores = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
        Some((name.trim().to_owned(), cores.trim().to_owned()))
    };
    tasks.filter_map(one).collect()
}

#[test]
fn a_profiles_cores_hold_for_all_threads_and_come_back_with_another_profile() {
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let own = own.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned();
    let first = own.split([',', '-']).next().unwrap().to_owned();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("one.toml");
    let text = format!("name = \"one\"\nboard = \"any\"\n[cpu]\ncores = \"{first}\"\nspin_us = 9\n");
    std::fs::write(&file, text).unwrap();
    let mut d = Daemon::start(&format!(
        "[power]\nboard = \"sim:orin-nano-super\"\nprofile = \"{}\"\n",
        file.display()
    ));
    let ask = |d: &Daemon| {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0});
        d.good("/v1/completions", body)["choices"][0]["text"].clone()
    };
    let answer = ask(&d);
    let on = |d: &Daemon, cores: &str| threads(d).iter().all(|(_, c)| c == cores);
    let workers = |d: &Daemon| threads(d).iter().filter(|(n, _)| n.starts_with("tegu-cpu")).count();
    assert!(on(&d, &first), "{:?}", threads(&d));
    // Two were asked for; the second would only keep the first from its core.
    d.wait_until("one thread computes", |d| workers(d) == 0);
    d.good("/v1/power", json!({"profile": "balanced"}));
    d.wait_until("all cores are back", |d| on(d, &own) && workers(d) == 1);
    assert_eq!(ask(&d), answer);
}
