//! What a daemon makes of its settings, and what of them can be refused before anything depends on it: a mistake is told by
//! whoever made it at the start, not by the first client.

use super::keeper::{Looker, Wanted};
use crate::config::Config;
use crate::power::profile::{Profile, board_key};
use crate::sample::{SampleParams, Sampler};
use crate::serve::{Settings, group_id};
use crate::units::{Error, Result};
use std::fs::{DirBuilder, OpenOptions};
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a token's file.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Settings that name a folder to write into, made where it is missing.
const FOLDERS: [&str; 2] = ["serve.sessions", "serve.spill"];

/// What a daemon does where the settings say nothing and a person at a terminal gets something else.
pub fn defaults(config: &mut Config) {
    // OpenAI's default, which its clients rely on.
    config.set_default("sample.temp", "1");
}

/// The server's part of the settings, each checked as far as that goes without opening anything.
///
/// # Errors
/// For a value that no start or no request could use.
pub fn settings(config: &Config) -> Result<Settings> {
    let bad = |key: &str, expected: &str, found: &str| bad(config, key, expected, format!("{found:?}"));
    let seconds = |key: &str| Duration::from_secs_f64(config.real(key));
    let tcp = match config.text("serve.tcp") {
        "" => None,
        text => {
            let address: Option<SocketAddr> = text.replace("localhost:", "127.0.0.1:").parse().ok();
            // Another machine has no business here: a proxy in front can add what that needs.
            let local = address.filter(|a| a.ip().is_loopback());
            Some(local.ok_or_else(|| bad("serve.tcp", "a loopback address and port", text))?)
        }
    };
    if config.count("context") == 1 {
        return Err(bad("context", "0, or room for a prompt and an answer", "1"));
    }
    let folder = config.text("serve.models");
    if !folder.is_empty() && !Path::new(folder).is_dir() {
        return Err(bad("serve.models", "a folder", folder));
    }
    let group = config.text("serve.group");
    if !group.is_empty() {
        group_id(group)?;
    }
    Ok(Settings {
        socket: config.text("serve.socket").into(),
        mode: mode(config)?,
        group: (!group.is_empty()).then(|| group.to_owned()),
        tcp,
        token: token(config.text("serve.token_file"))?,
        connections: config.count("serve.connections") as usize,
        body_bytes: config.count("serve.body_bytes") as usize,
        head_within: seconds("serve.head_s"),
        body_within: seconds("serve.body_s"),
        write_within: seconds("serve.write_s"),
        request_within: seconds("serve.request_s"),
        load_within: seconds("serve.load_s"),
        idle_unload: Some(seconds("serve.idle_unload_s")).filter(|d| !d.is_zero()),
        shutdown_within: seconds("serve.shutdown_s"),
        preload: config.text("serve.preload") == "yes",
        sample: sample(config)?,
    })
}

fn bad(config: &Config, key: &str, expected: &str, found: impl std::fmt::Display) -> Error {
    let file = config.file.clone().unwrap_or_else(|| "settings".into());
    Error::bad(file, key, expected, found)
}

/// The socket's mode. Whoever connects has to be allowed to write (unix(7)).
fn mode(config: &Config) -> Result<u32> {
    let text = config.text("serve.mode");
    let octal = u32::from_str_radix(text.trim_start_matches("0o"), 8).ok();
    let expected = "an octal mode such as 660, by which someone may write";
    octal
        .filter(|m| *m <= 0o777 && m & 0o222 != 0)
        .ok_or_else(|| bad(config, "serve.mode", expected, format!("{text:?}")))
}

/// What requests do not say about sampling, as the samplers will take it.
fn sample(config: &Config) -> Result<SampleParams> {
    let params = SampleParams {
        temp: config.real("sample.temp") as f32,
        top_k: config.count("sample.top_k") as usize,
        top_p: config.real("sample.top_p") as f32,
        min_p: config.real("sample.min_p") as f32,
        repeat_penalty: config.real("sample.repeat_penalty") as f32,
        ..SampleParams::default()
    };
    Sampler::new(params.clone())?;
    Ok(params)
}

/// The token in a file, without the line end.
fn token(file: &str) -> Result<Option<String>> {
    if file.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    let opened = crate::units::open_file(Path::new(file))?;
    let read = opened.take(TOKEN_BYTES_MAX + 1).read_to_string(&mut text);
    read.map_err(|e| Error::io(file, "read the token", e))?;
    let found = match text.trim() {
        _ if text.len() as u64 > TOKEN_BYTES_MAX => format!("more than {TOKEN_BYTES_MAX} bytes"),
        "" => "an empty file".into(),
        // No header could carry another: every client would be refused (RFC 9110, 5.5).
        token if !token.bytes().all(|b| b.is_ascii_graphic()) => {
            "spaces, lines or letters beyond ASCII".into()
        }
        token => return Ok(Some(token.to_owned())),
    };
    Err(Error::bad(file, "token", "one word of ASCII", found))
}

/// Refuses a board that there is not, or whose software is, and a profile that is not made for it.
pub fn check_board(config: &Config) -> Result<()> {
    let Some(wanted) = Wanted::of(config) else { return Ok(()) };
    let looker = Looker::open(&wanted.board)?;
    if let Some(name) = &wanted.profile {
        Profile::find(name, board_key(looker.board()))?;
    }
    Ok(())
}

/// Looks whether the folders that are written into could be made or are there. It makes none: whoever checks may be another
/// user than the daemon, which could not write into what is theirs.
pub fn check_folders(config: &Config) -> Result<()> {
    for (key, path) in folders(config) {
        let there = path.ancestors().map(|a| if a.as_os_str().is_empty() { Path::new(".") } else { a });
        let nearest = there.into_iter().find(|a| a.symlink_metadata().is_ok());
        if let Some(other) = nearest.filter(|a| !a.is_dir()) {
            let found = format!("{}, which is none", other.display());
            return Err(bad(config, key, "a folder, or a place for one", found));
        }
    }
    Ok(())
}

/// Makes those folders, and tries to write into each.
pub fn make_folders(config: &Config) -> Result<()> {
    check_folders(config)?;
    for (key, path) in folders(config) {
        // What is kept are people's conversations.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.map_err(|e| Error::io(&path, format!("make the folder of {key}"), e))?;
        let probe = path.join(format!(".tegu-probe-{}", std::process::id()));
        let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&probe);
        written.map_err(|e| Error::io(&path, format!("write into the folder of {key}"), e))?;
        std::fs::remove_file(&probe).map_err(|e| Error::io(&probe, "remove", e))?;
    }
    Ok(())
}

fn folders(config: &Config) -> impl Iterator<Item = (&'static str, PathBuf)> {
    let named = FOLDERS.map(|key| (key, PathBuf::from(config.text(key))));
    named.into_iter().filter(|(_, path)| !path.as_os_str().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{KEYS, Kind, Value};
    use std::os::unix::fs::PermissionsExt;

    fn config(text: &str, dir: &Path) -> Config {
        let file = dir.join("c.toml");
        std::fs::write(&file, text).unwrap();
        let mut config = Config::load(Some(&file), &|_| None, &[]).unwrap();
        defaults(&mut config);
        config
    }

    #[test]
    fn settings_are_checked_by_name() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in
            [("spaces", "a b"), ("letters", "tökén"), ("empty", " \n"), ("long", &"x".repeat(5000))]
        {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let at = |name: &str| dir.path().join(name).display().to_string();
        let say = |text: &str| settings(&config(text, dir.path())).unwrap_err().to_string();
        for (text, says) in [
            ("serve.mode = \"999\"".to_owned(), "serve.mode"),
            ("serve.mode = \"000\"".into(), "by which someone may write"),
            ("serve.tcp = \"0.0.0.0:80\"".into(), "serve.tcp: expected a loopback address"),
            ("serve.group = \"no-such-group\"".into(), "serve.group: expected a group"),
            ("serve.models = \"no/such\"".into(), "serve.models: expected a folder, found \"no/such\""),
            ("context = 1".into(), "context: expected 0, or room for"),
            ("serve.token_file = \"no/such\"".into(), "no/such"),
            ("serve.token_file = \"/dev/zero\"".into(), "/dev/zero: token: expected one word"),
            (format!("serve.token_file = {:?}", at("spaces")), "token: expected one word of ASCII"),
            (format!("serve.token_file = {:?}", at("letters")), "token: expected one word of ASCII"),
            (format!("serve.token_file = {:?}", at("empty")), "found an empty file"),
            (format!("serve.token_file = {:?}", at("long")), "found more than 4096 bytes"),
        ] {
            let said = say(&text);
            assert!(said.contains(says), "{text}: {said}");
        }
        let s =
            settings(&config("serve.idle_unload_s = 5\nserve.tcp = \"localhost:0\"", dir.path())).unwrap();
        assert_eq!((s.idle_unload, s.sample.temp), (Some(Duration::from_secs(5)), 1.0));
        assert!(s.tcp.unwrap().ip().is_loopback());
        assert_eq!(settings(&config("sample.temp = 0", dir.path())).unwrap().sample.temp, 0.0);
    }

    /// What the table of settings lets through, to its ends, the samplers take.
    #[test]
    fn sampling_that_is_set_is_sampling_that_works() {
        let dir = tempfile::tempdir().unwrap();
        let mut seen = 0;
        for key in KEYS.iter().filter(|k| k.name.starts_with("sample.")) {
            let ends = match key.kind {
                Kind::Real(low, high) => [low, high].map(Value::Real),
                Kind::Count(low, high) => [low, high].map(Value::Count),
                other => panic!("{}: {other:?}", key.name),
            };
            for end in ends {
                let text = format!("{} = {end}", key.name);
                settings(&config(&text, dir.path())).unwrap_or_else(|e| panic!("{text}: {e}"));
                seen += 1;
            }
        }
        assert_eq!(seen, 10);
    }

    /// Each file of ours that a unit names is one that the guide installs, into that folder.
    #[test]
    fn the_guide_installs_what_the_units_name() {
        let guide = include_str!("../../systemd/README.md");
        let units =
            [include_str!("../../systemd/tegud.service"), include_str!("../../systemd/tegu-clocks.service")];
        let words = units.iter().flat_map(|u| u.split([' ', '\n', '=', ':']));
        let ours = ["/usr/bin/tegu", "/usr/share/", "/etc/tegu/"];
        let named: Vec<&str> = words.filter(|w| ours.iter().any(|o| w.starts_with(o))).collect();
        assert!(named.len() >= 6 && named.contains(&"/etc/tegu/config.toml"), "{named:?}");
        for (folder, name) in named.iter().filter_map(|path| path.rsplit_once('/')) {
            let installs = |line: &str| line.contains(&format!("$R{folder}")) && line.contains(name);
            assert!(guide.lines().any(installs), "{folder}/{name}");
        }
    }

    /// The settings that are installed are settings, those that are proposed as comments too.
    #[test]
    fn installed_settings_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let text = include_str!("../../systemd/config.toml");
        assert_eq!(config(text, dir.path()).text("serve.sessions"), "/var/lib/tegu/sessions");
        let proposed = text.lines().map(|l| l.strip_prefix('#').filter(|l| !l.starts_with(' ')).unwrap_or(l));
        let all = config(&proposed.collect::<Vec<_>>().join("\n"), dir.path());
        let set = KEYS.iter().filter(|k| all.get(k.name).1 == crate::config::Origin::File).count();
        assert_eq!(set, text.lines().filter(|l| l.contains(" = ")).count());
    }

    #[test]
    fn boards_and_profiles_are_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let check = |text: &str| check_board(&config(text, dir.path())).map_err(|e| e.to_string());
        assert_eq!(check("power.board = \"off\"\npower.profile = \"x\""), Ok(()));
        assert_eq!(check("power.board = \"sim:orin-nano-super\"\npower.profile = \"silent\""), Ok(()));
        for (text, says) in [
            ("power.board = \"orin\"", "power.board: expected auto, off"),
            ("power.board = \"sim:x\"", "sim:"),
            ("power.board = \"tree:no/such\"", "no/such"),
            ("power.board = \"sim:orin-nano-super\"\npower.profile = \"silnt\"", "did you mean"),
        ] {
            let said = check(text).expect_err(text);
            assert!(said.contains(says), "{text}: {said}");
        }
    }

    #[test]
    fn folders_are_made_or_the_setting_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        let text = format!("serve.sessions = {:?}\nserve.spill = {:?}\n", at("a/b"), at("c"));
        check_folders(&config(&text, dir.path())).unwrap();
        assert!(!at("a").exists() && !at("c").exists(), "a check makes nothing");
        make_folders(&config(&text, dir.path())).unwrap();
        for made in [at("a/b"), at("c")] {
            assert_eq!(std::fs::metadata(&made).unwrap().permissions().mode() & 0o777, 0o700);
            assert_eq!(std::fs::read_dir(&made).unwrap().count(), 0, "the probe is gone");
        }
        for key in FOLDERS {
            for path in [at("file"), at("file/below"), "/proc/no/such".into()] {
                let config = config(&format!("{key} = {path:?}"), dir.path());
                let said = make_folders(&config).expect_err(key).to_string();
                assert!(said.contains(key), "{said}");
            }
        }
    }
}
