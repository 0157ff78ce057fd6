//! Settings: flags over environment over file over defaults, checked once, and printable with where each came from.
//!
//! The file is TOML, `$XDG_CONFIG_HOME/tegu/config.toml` (or below `~/.config`), or the one that `--config` names. Every key
//! is a row of [`keys::KEYS`]; an unknown one is refused with the nearest known name.

mod keys;
mod suggest;

pub use keys::{KEYS, Key, Kind, Value, bytes_of};
pub use suggest::nearest;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::units::{Error, Result};

/// Where a setting came from, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// Built in.
    Default,
    /// The settings file.
    File,
    /// An environment variable.
    Environment,
    /// A command-line flag.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Default => "default",
            Origin::File => "file",
            Origin::Environment => "environment",
            Origin::Flag => "flag",
        })
    }
}

/// The effective settings: one value a row of [`KEYS`].
#[derive(Debug, Clone)]
pub struct Config {
    /// The settings file that was read, if one was there.
    pub file: Option<PathBuf>,
    /// Names for models: `[aliases]`, in the file's order.
    pub aliases: Vec<(String, String)>,
    values: Vec<(Value, Origin)>,
}

/// What became of changed settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reloaded {
    /// Keys whose new value is in force.
    pub taken: Vec<&'static str>,
    /// Keys whose new value waits for the next start.
    pub waiting: Vec<&'static str>,
}

impl Config {
    /// Reads and joins all sources.
    ///
    /// `named` is the file a flag names: it must exist. Without one, the default place is read if it exists. `env` looks an
    /// environment variable up (a parameter so that tests need not change the process). `flags` are (key, text) pairs.
    pub fn load(
        named: Option<&Path>,
        env: &dyn Fn(&str) -> Option<OsString>,
        flags: &[(&str, String)],
    ) -> Result<Config> {
        let mut config = Config { file: None, aliases: Vec::new(), values: defaults() };
        let file = match named {
            Some(f) => Some(f.to_owned()),
            None => default_file(env).filter(|f| f.is_file()),
        };
        if let Some(file) = file {
            config.take_file(&file)?;
            config.file = Some(file);
        }
        for (i, key) in KEYS.iter().enumerate() {
            if let Some((name, text)) = key.env.and_then(|name| Some((name, env(name)?)))
                && !text.is_empty()
            {
                // Passed over, it would be another model or socket than the one that was meant.
                let text = text.into_string();
                let text =
                    text.map_err(|found| Error::bad(name, "environment", "UTF-8", format!("{found:?}")))?;
                let value = key.kind.from_text(&text);
                config.values[i] = (value.map_err(|e| e.of(name, "environment"))?, Origin::Environment);
            }
        }
        for (name, text) in flags {
            let i = index(name).unwrap_or_else(|| panic!("flag for {name}, which is no key"));
            let value = KEYS[i].kind.from_text(text);
            config.values[i] =
                (value.map_err(|e| e.of(format!("--{}", KEYS[i].flag()), "flag"))?, Origin::Flag);
        }
        Ok(config)
    }

    fn take_file(&mut self, file: &Path) -> Result<()> {
        let text = read_small(file)?;
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(0, |s| 1 + text[..s.start.min(text.len())].matches('\n').count());
            Error::bad(file, format!("line {line}"), "TOML", e.message())
        })?;
        let mut table = table;
        if let Some(aliases) = table.remove(ALIASES) {
            self.aliases = read_aliases(file, &aliases)?;
        }
        let mut found = Vec::new();
        flatten("", &table, &mut found);
        for (name, value) in found {
            let Some(i) = index(&name) else {
                let known: Vec<&str> = KEYS.iter().map(|k| k.name).collect();
                let hint = match nearest(&name, &known) {
                    Some(near) => format!("a known key (did you mean {near}?)"),
                    None => format!("one of {}", known.join(", ")),
                };
                return Err(Error::bad(file, &name, hint, "an unknown key"));
            };
            self.values[i] = (KEYS[i].kind.from_toml(&value).map_err(|e| e.of(file, &name))?, Origin::File);
        }
        Ok(())
    }

    /// Replaces a default by that of one program, where no one has set the key.
    ///
    /// # Panics
    /// If the key is none, or the value none of its kind: both are constants of the program.
    pub fn set_default(&mut self, name: &str, text: &str) {
        let i = index(name).unwrap_or_else(|| panic!("{name} is no key"));
        let value = KEYS[i].kind.from_text(text).unwrap_or_else(|e| panic!("default of {name}: {e:?}"));
        if self.values[i].1 == Origin::Default {
            self.values[i].0 = value;
        }
    }

    /// Takes from settings that were read again what a running daemon can take; the rest stays as it is.
    pub fn reload(&mut self, new: Config) -> Reloaded {
        let mut reloaded = Reloaded::default();
        for ((key, old), new) in KEYS.iter().zip(&mut self.values).zip(new.values) {
            match old.0 == new.0 {
                true => old.1 = new.1,
                false if key.live => {
                    *old = new;
                    reloaded.taken.push(key.name);
                }
                false => reloaded.waiting.push(key.name),
            }
        }
        if self.aliases != new.aliases {
            self.aliases = new.aliases;
            reloaded.taken.push(ALIASES);
        }
        self.file = new.file;
        reloaded
    }

    /// The value of a key and where it came from.
    ///
    /// # Panics
    /// If there is no such key: names are constants of the program.
    pub fn get(&self, name: &str) -> (&Value, Origin) {
        let i = index(name).unwrap_or_else(|| panic!("{name} is no key"));
        (&self.values[i].0, self.values[i].1)
    }

    /// A text value; empty means unset.
    pub fn text(&self, name: &str) -> &str {
        match self.get(name).0 {
            Value::Text(s) => s,
            other => panic!("{name} is {other:?}, not text"),
        }
    }

    /// A whole number.
    pub fn count(&self, name: &str) -> u64 {
        match self.get(name).0 {
            Value::Count(n) => *n,
            other => panic!("{name} is {other:?}, not a count"),
        }
    }

    /// A real number.
    pub fn real(&self, name: &str) -> f64 {
        match self.get(name).0 {
            Value::Real(x) => *x,
            other => panic!("{name} is {other:?}, not a real number"),
        }
    }
}

/// As a settings file that would give the same settings, each line with its origin. Defaults are comments, so that a print that
/// is kept as a settings file does not hold one program to the defaults of another, or of an earlier version.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => writeln!(f, "# settings file: {}", file.display())?,
            None => writeln!(f, "# settings file: none")?,
        }
        let mut section = "";
        for (key, (value, origin)) in KEYS.iter().zip(&self.values) {
            let (head, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
            if head != section {
                writeln!(f, "\n[{head}]")?;
                section = head;
            }
            let comment = if *origin == Origin::Default { "# " } else { "" };
            writeln!(f, "{:<26} # {origin}; {}", format!("{comment}{name} = {value}"), key.help)?;
        }
        for (i, (name, model)) in self.aliases.iter().enumerate() {
            if i == 0 {
                writeln!(f, "\n[{ALIASES}]")?;
            }
            let quoted = |s: &String| toml::Value::String(s.clone());
            writeln!(f, "{} = {}", quoted(name), quoted(model))?;
        }
        Ok(())
    }
}

/// The section of names for models, whose keys are the user's own.
const ALIASES: &str = "aliases";

fn read_aliases(file: &Path, value: &toml::Value) -> Result<Vec<(String, String)>> {
    let expected = "a name with a model's file, folder or name";
    let wrong = |field: &str, v: &toml::Value| Error::bad(file, field, expected, v);
    let table = value.as_table().ok_or_else(|| wrong(ALIASES, value))?;
    let entry = |(name, v): (&String, &toml::Value)| match v.as_str() {
        Some(model) if !model.is_empty() && !name.is_empty() => Ok((name.clone(), model.to_owned())),
        _ => Err(wrong(&format!("{ALIASES}.{name}"), v)),
    };
    table.iter().map(entry).collect()
}

fn defaults() -> Vec<(Value, Origin)> {
    let parse =
        |k: &Key| k.kind.from_text(k.default).unwrap_or_else(|e| panic!("default of {}: {e:?}", k.name));
    KEYS.iter().map(|k| (parse(k), Origin::Default)).collect()
}

fn index(name: &str) -> Option<usize> {
    KEYS.iter().position(|k| k.name == name)
}

fn default_file(env: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| env(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
    Some(base.join("tegu").join("config.toml"))
}

fn read_small(file: &Path) -> Result<String> {
    use std::io::Read;
    // A settings file is a page; reading more would only serve a mistake in --config (a model, a device).
    const FILE_BYTES_MAX: u64 = 1 << 20;
    let opened = crate::units::open_file(file)?;
    let mut bytes = Vec::new();
    opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|e| Error::io(file, "read", e))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(Error::bad(file, "settings", format!("at most {FILE_BYTES_MAX} bytes"), "more"));
    }
    String::from_utf8(bytes).map_err(|_| Error::bad(file, "settings", "UTF-8 text", "other bytes"))
}

/// Turns nested tables into dotted names.
fn flatten(head: &str, table: &toml::Table, out: &mut Vec<(String, toml::Value)>) {
    for (name, value) in table {
        let name = if head.is_empty() { name.clone() } else { format!("{head}.{name}") };
        match value {
            toml::Value::Table(inner) if index(&name).is_none() => flatten(&name, inner, out),
            _ => out.push((name, value.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, env: &[(&str, &str)], flags: &[(&str, String)]) -> Result<Config> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, text).unwrap();
        let env: Vec<(String, String)> = env.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
        let look = move |n: &str| env.iter().find(|(k, _)| k == n).map(|(_, v)| v.into());
        Config::load(Some(&file), &look, flags)
    }

    #[test]
    fn flags_win_over_environment_over_file_over_default() {
        let text = "threads = 2\ncontext = 100\nmodel = \"a\"\n[sample]\ntemp = 0.5\n";
        let c = load(text, &[("TEGU_THREADS", "3"), ("TEGU_MODEL", "b")], &[("model", "c".into())]).unwrap();
        assert_eq!((c.text("model"), c.get("model").1), ("c", Origin::Flag));
        assert_eq!((c.count("threads"), c.get("threads").1), (3, Origin::Environment));
        assert_eq!((c.count("context"), c.get("context").1), (100, Origin::File));
        assert_eq!(c.real("sample.temp"), 0.5);
        assert_eq!(c.get("sample.top_k").1, Origin::Default);
    }

    #[test]
    fn what_is_printed_loads_to_the_same() {
        let c = load("threads = 2\nmodel = \"x \\\"y\\\"\"\n[sample]\ntemp = 0.25\n", &[], &[]).unwrap();
        let again = load(&c.to_string(), &[], &[]).unwrap();
        for key in KEYS {
            assert_eq!(c.get(key.name), again.get(key.name), "{}", key.name);
        }
        // Every line is there, whether it is in force by default or not.
        for key in KEYS {
            let name = key.name.rsplit('.').next().unwrap();
            assert!(c.to_string().contains(&format!("{name} = ")), "{name}");
        }
    }

    /// Whatever a program's defaults are, a print of them sets nothing.
    #[test]
    fn a_program_may_have_a_default_of_its_own() {
        let mut c = load("", &[], &[]).unwrap();
        c.set_default("sample.temp", "1");
        assert_eq!(c.get("sample.temp"), (&Value::Real(1.0), Origin::Default));
        assert!(c.to_string().contains("\n# temp = 1.0"), "{c}");
        assert_eq!(load(&c.to_string(), &[], &[]).unwrap().real("sample.temp"), 0.0);
        let mut set = load("sample.temp = 0", &[], &[]).unwrap();
        set.set_default("sample.temp", "1");
        assert_eq!(set.real("sample.temp"), 0.0);
    }

    /// Each key, changed alone, is either in force after a reload or said to wait.
    #[test]
    fn every_key_is_taken_or_waits() {
        for (i, key) in KEYS.iter().enumerate() {
            let old = load("", &[], &[]).unwrap();
            let mut new = old.clone();
            new.values[i] = (other(&old.values[i].0, key.kind), Origin::File);
            let mut running = old.clone();
            let reloaded = running.reload(new.clone());
            let (taken, waiting) = if key.live { (vec![key.name], vec![]) } else { (vec![], vec![key.name]) };
            assert_eq!(reloaded, Reloaded { taken, waiting });
            assert_eq!(running.values[i] == new.values[i], key.live, "{}", key.name);
            // What waits is said again as long as it waits.
            assert_eq!(running.reload(new).waiting.is_empty(), key.live, "{}", key.name);
        }
        let mut running = load("", &[], &[]).unwrap();
        let reloaded = running.reload(load("[aliases]\na = \"b\"", &[], &[]).unwrap());
        assert_eq!((reloaded.taken, running.aliases.len()), (vec![ALIASES], 1));
    }

    fn other(value: &Value, kind: Kind) -> Value {
        match (value, kind) {
            (Value::Text(s), Kind::Choice(words)) => {
                Value::Text((*words.iter().find(|w| *w != s).unwrap()).to_owned())
            }
            (Value::Text(_), _) => Value::Text("77".into()),
            (Value::Count(n), _) => Value::Count(n + 1),
            (Value::Real(x), _) => Value::Real(x + 1.0),
        }
    }

    #[test]
    fn aliases_are_the_users_own_names() {
        let c = load("[aliases]\nsmall = \"a.gguf\"\n\"b c\" = \"d\"\n", &[], &[]).unwrap();
        assert_eq!(c.aliases, [("b c".to_owned(), "d".to_owned()), ("small".into(), "a.gguf".into())]);
        assert_eq!(load(&c.to_string(), &[], &[]).unwrap().aliases, c.aliases);
        let e = load("[aliases]\nsmall = 3", &[], &[]).unwrap_err().to_string();
        assert!(e.contains("aliases.small: expected a name"), "{e}");
    }

    #[test]
    fn mistakes_are_named() {
        let say = |text: &str| load(text, &[], &[]).unwrap_err().to_string();
        assert!(say("thraeds = 2").contains("did you mean threads?"), "{}", say("thraeds = 2"));
        assert!(say("[sample]\ntemperature = 1").contains("did you mean sample.temp?"));
        assert!(say("threads = \"two\"").contains("threads: expected a whole number"));
        assert!(say("threads = 100000").contains("threads: expected a whole number from 0 to"));
        assert!(say("kv = \"f8\"").contains("kv: expected one of f16, "));
        assert!(say("a = 1\nb = = 2").contains("line 2"), "{}", say("a = 1\nb = = 2"));
        assert!(say("sample.temp = -1").contains("sample.temp"));
        assert!(say("sample.repeat_penalty = 0").contains("repeat_penalty: expected a number from 0.001"));
        assert!(
            say("expert_budget = \"lots\"").contains("expert_budget: expected bytes, or a number with K")
        );
        assert!(say("expert_budget = -1").contains("expert_budget: expected bytes"));
        assert_eq!(load("expert_budget = 4096", &[], &[]).unwrap().text("expert_budget"), "4096");
        let e = load("", &[("TEGU_THREADS", "many")], &[]).unwrap_err();
        assert!(e.to_string().starts_with("TEGU_THREADS: environment: expected"), "{e}");
    }

    /// Every variable that a key has; a folder of settings may have any name.
    #[test]
    fn variables_that_are_no_text_are_named() {
        use std::os::unix::ffi::OsStringExt;
        let bytes = || OsString::from_vec(vec![b'm', 0xff]);
        let named: Vec<&str> = KEYS.iter().filter_map(|k| k.env).collect();
        assert!(named.contains(&"TEGU_MODEL") && named.contains(&"TEGU_SOCKET"), "{named:?}");
        for name in named {
            let said = Config::load(None, &|n| (n == name).then(bytes), &[]).unwrap_err().to_string();
            assert_eq!(said, format!("{name}: environment: expected UTF-8, found \"m\\xFF\""));
        }
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(bytes());
        std::fs::create_dir_all(folder.join("tegu")).unwrap();
        std::fs::write(folder.join("tegu/config.toml"), "threads = 7").unwrap();
        let place = |n: &str| (n == "XDG_CONFIG_HOME").then(|| folder.clone().into_os_string());
        assert_eq!(Config::load(None, &place, &[]).unwrap().count("threads"), 7);
    }

    #[test]
    fn a_named_file_must_exist_and_be_a_file() {
        let none = |_: &str| None;
        assert!(Config::load(Some(Path::new("no/such.toml")), &none, &[]).is_err());
        let dir = tempfile::tempdir().unwrap();
        assert!(Config::load(Some(dir.path()), &none, &[]).is_err());
        let home = dir.path().as_os_str().to_owned();
        let c = Config::load(None, &move |n| (n == "HOME").then(|| home.clone()), &[]).unwrap();
        assert_eq!(c.file, None);
    }
}
