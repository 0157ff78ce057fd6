//! A power profile: what a board's clocks, batch and heat limits should be, as a typed and checked TOML file.
//!
//! `profiles/README.md` documents it key by key. Every file there is part of the program; one's own is read from a
//! path.

use std::path::{Path, PathBuf};

use super::built_in::BUILT_IN;
use super::types::{Board, BoardKind, Clocks, Phase};
use crate::config::nearest;
use crate::units::{Error, Result};

/// Clocks of a phase. What is absent stays with the system.
pub type PhaseClocks = Clocks;

/// What heat does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thermal {
    /// From here on clocks step down.
    pub start_mc: i32,
    /// They step up again this far below.
    pub hysteresis_mc: i32,
    /// What prefill keeps of its GPU clock and chunk while it is hot, in percent.
    pub prefill_percent: u32,
    /// Least time between two steps.
    pub step_us: u64,
    /// Memory keeps its clock while the GPU's ceiling is at least this; below, it falls to its next lower point.
    pub emc_keep_hz: u64,
    /// Work stops from here on …
    pub pause_mc: i32,
    /// … until it is as cool as this.
    pub resume_mc: i32,
}

/// Another ceiling of the GPU clock in decode from some batch on: what many sequences share is bound by memory again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wide {
    /// From so many sequences on.
    pub from_batch: usize,
    /// The ceiling then.
    pub gpu_cap_hz: u64,
}

/// What applies while a sensor that decides cannot be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fallback {
    /// Ceiling of the GPU clock.
    pub gpu_cap_hz: u64,
    /// Most sequences side by side.
    pub max_batch: usize,
}

/// A profile.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Its name: "efficiency".
    pub name: String,
    /// The board it is for: "orin-nano-8-super", or "any".
    pub board: String,
    /// One line for people.
    pub about: String,
    /// Clocks by [`Phase::index`].
    pub clocks: [PhaseClocks; 3],
    /// Most prompt tokens of a step.
    pub prefill_chunk: usize,
    /// Most sequences that generate side by side.
    pub max_batch: usize,
    /// Decode of many sequences.
    pub wide: Option<Wide>,
    /// Heat.
    pub thermal: Thermal,
    /// Most power of the module, averaged over some seconds.
    pub cap_mw: Option<u32>,
    /// With a sensor that cannot be trusted.
    pub fallback: Fallback,
    /// Cores that the runtime's threads may use, as a list such as "0-3,6"; empty: all.
    pub cores: String,
    /// How long an idle worker spins before it sleeps; none: as the settings say.
    pub spin_us: Option<u64>,
}

impl Profile {
    /// The names of a board's profiles that are part of the program.
    pub fn names(board: &str) -> Vec<&'static str> {
        BUILT_IN.as_flattened().iter().filter(|(b, _, _)| *b == board).map(|(_, name, _)| *name).collect()
    }

    /// Boards that have profiles of their own.
    pub fn boards() -> Vec<&'static str> {
        let mut boards: Vec<&str> = BUILT_IN.as_flattened().iter().map(|(b, _, _)| *b).collect();
        boards.dedup();
        boards
    }

    /// A profile by name for a board, or by the path of a file (a name with a `/` or a `.`).
    pub fn find(name: &str, board: &str) -> Result<Profile> {
        if name.contains(['/', '.']) {
            return Profile::read(Path::new(name));
        }
        let own = BUILT_IN.as_flattened().iter().find(|(b, n, _)| *b == board && *n == name);
        let Some((board, name, text)) = own else {
            let names = Profile::names(board);
            let hint = nearest(name, &names).map(|n| format!(" (did you mean {n:?}?)")).unwrap_or_default();
            let expected = format!("one of {}, or a path", names.join(", "));
            return Err(Error::bad(
                format!("profiles of {board}"),
                "name",
                expected,
                format!("{name:?}{hint}"),
            ));
        };
        Profile::parse(&PathBuf::from(format!("profiles/{board}/{name}.toml")), text)
    }

    /// Reads a profile's file.
    pub fn read(file: &Path) -> Result<Profile> {
        use std::io::Read;
        let mut text = String::new();
        let max = crate::limits::PROFILE_BYTES_MAX;
        let opened = crate::units::open_file(file)?;
        opened.take(max + 1).read_to_string(&mut text).map_err(|e| Error::io(file, "read", e))?;
        if text.len() as u64 > max {
            return Err(Error::bad(file, "size", format!("at most {max} bytes"), "more"));
        }
        Profile::parse(file, &text)
    }

    /// Reads a profile's text. Every key is checked; an unknown one is refused with the nearest known name.
    pub fn parse(file: &Path, text: &str) -> Result<Profile> {
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |s| text[..s.start].matches('\n').count() + 1);
            Error::bad(file, format!("line {line}"), "TOML", e.message())
        })?;
        let read = Reader { file, table: &table };
        read.known()?;
        let clocks = [read.clocks("prefill")?, read.clocks("decode")?, read.clocks("idle")?];
        let thermal = Thermal {
            start_mc: read.celsius("thermal.start_c", 85.0)?,
            hysteresis_mc: read.celsius("thermal.hysteresis_c", 2.0)?,
            prefill_percent: read.count("thermal.prefill_percent", 50)? as u32,
            step_us: read.count("thermal.step_s", 20)? * 1_000_000,
            emc_keep_hz: read.mhz("thermal.emc_keep_mhz")?.unwrap_or(0),
            pause_mc: read.celsius("thermal.pause_c", 95.0)?,
            resume_mc: read.celsius("thermal.resume_c", 85.0)?,
        };
        let profile = Profile {
            name: read.word("name")?,
            board: read.word("board")?,
            about: read.text("about")?,
            clocks,
            prefill_chunk: read.count("prefill.chunk_tokens", 512)? as usize,
            max_batch: read.count("decode.max_batch", 8)? as usize,
            wide: read.wide()?,
            thermal,
            cap_mw: read.real("power.cap_w")?.map(|w| (w * 1000.0) as u32),
            fallback: Fallback {
                gpu_cap_hz: read.mhz("fallback.gpu_cap_mhz")?.unwrap_or(612_000_000),
                max_batch: read.count("fallback.max_batch", 2)? as usize,
            },
            cores: read.text("cpu.cores")?,
            spin_us: read.real("cpu.spin_us")?.map(|_| read.count("cpu.spin_us", 0)).transpose()?,
        };
        profile.check(file)?;
        Ok(profile)
    }

    /// What no single key can tell.
    fn check(&self, file: &Path) -> Result<()> {
        let t = &self.thermal;
        let order = |field: &str, low: i32, high: i32, than: &str| match low < high {
            true => Ok(()),
            false => {
                let expected = format!("less than {than} ({} °C)", high as f64 / 1e3);
                Err(Error::bad(file, field, expected, format!("{} °C", low as f64 / 1e3)))
            }
        };
        order("thermal.start_c", t.start_mc, t.pause_mc, "thermal.pause_c")?;
        order("thermal.resume_c", t.resume_mc, t.pause_mc, "thermal.pause_c")?;
        for phase in Phase::ALL {
            let c = &self.clocks[phase.index()];
            let pairs = [("gpu", c.gpu_floor_hz, c.gpu_cap_hz), ("emc", c.emc_floor_hz, c.emc_cap_hz)];
            for (what, floor, cap) in pairs {
                if let (Some(floor), Some(cap)) = (floor, cap)
                    && floor > cap
                {
                    let field = format!("{}.{what}_floor_mhz", phase.name());
                    let expected = format!("at most {what}_cap_mhz ({})", mhz_text(cap));
                    return Err(Error::bad(file, field, expected, mhz_text(floor)));
                }
            }
        }
        check_cores(file, &self.cores)
    }

    /// As a file that [`Profile::parse`] reads back the same.
    pub fn to_toml(&self, comment: &str) -> String {
        let quoted = |s: &str| toml::Value::String(s.to_owned()).to_string();
        let mut out: String = comment.lines().map(|l| format!("# {l}\n")).collect();
        out += &format!(
            "name = {}\nboard = {}\nabout = {}\n",
            quoted(&self.name),
            quoted(&self.board),
            quoted(&self.about)
        );
        for phase in Phase::ALL {
            out += &format!("\n[{}]\n", phase.name());
            let c = &self.clocks[phase.index()];
            let keys = [
                ("gpu_cap_mhz", c.gpu_cap_hz),
                ("gpu_floor_mhz", c.gpu_floor_hz),
                ("emc_floor_mhz", c.emc_floor_hz),
                ("emc_cap_mhz", c.emc_cap_hz),
            ];
            for (key, hz) in keys {
                out += &hz.map(|hz| format!("{key} = {}\n", mhz_text(hz))).unwrap_or_default();
            }
            match phase {
                Phase::Prefill => out += &format!("chunk_tokens = {}\n", self.prefill_chunk),
                Phase::Decode => {
                    out += &format!("max_batch = {}\n", self.max_batch);
                    if let Some(wide) = self.wide {
                        let cap = mhz_text(wide.gpu_cap_hz);
                        out += &format!("wide_from_batch = {}\nwide_gpu_cap_mhz = {cap}\n", wide.from_batch);
                    }
                }
                Phase::Idle => {}
            }
        }
        let t = &self.thermal;
        let celsius = |mc: i32| mc as f64 / 1e3;
        let keep = match t.emc_keep_hz {
            0 => String::new(),
            hz => format!("emc_keep_mhz = {}\n", mhz_text(hz)),
        };
        out += &format!(
            "\n[thermal]\nstart_c = {}\nhysteresis_c = {}\nprefill_percent = {}\nstep_s = {}\n{keep}pause_c = {}\nresume_c = {}\n",
            celsius(t.start_mc),
            celsius(t.hysteresis_mc),
            t.prefill_percent,
            t.step_us / 1_000_000,
            celsius(t.pause_mc),
            celsius(t.resume_mc),
        );
        out += &self.cap_mw.map(|mw| format!("\n[power]\ncap_w = {}\n", mw as f64 / 1e3)).unwrap_or_default();
        let fallback = &self.fallback;
        let spin = self.spin_us.map(|us| format!("spin_us = {us}\n")).unwrap_or_default();
        out += &format!(
            "\n[fallback]\ngpu_cap_mhz = {}\nmax_batch = {}\n\n[cpu]\ncores = {}\n{spin}",
            mhz_text(fallback.gpu_cap_hz),
            fallback.max_batch,
            quoted(&self.cores),
        );
        out
    }
}

/// The name of a board's profiles: by kind, and Super boards by themselves. A board without its own gets "any", which
/// touches no clock but for heat.
pub fn board_key(board: &Board) -> &'static str {
    let key = match (board.kind, board.is_super) {
        (BoardKind::AgxOrin64, _) => "agx-orin-64",
        (BoardKind::AgxOrin32, _) => "agx-orin-32",
        (BoardKind::OrinNx16, true) => "orin-nx-16-super",
        (BoardKind::OrinNx16, false) => "orin-nx-16",
        (BoardKind::OrinNx8, false) => "orin-nx-8",
        (BoardKind::OrinNano8, true) => "orin-nano-8-super",
        (BoardKind::OrinNano8, false) => "orin-nano-8",
        (BoardKind::OrinNano4, false) => "orin-nano-4",
        _ => "any",
    };
    debug_assert!(Profile::boards().contains(&key));
    key
}

/// A clock as a file and a person have it: 665.6, 2133.
pub fn mhz_text(hz: u64) -> String {
    format!("{}", hz as f64 / 1e6)
}

/// "0-3,6": numbers and ranges, rising inside a range.
fn check_cores(file: &Path, cores: &str) -> Result<()> {
    let number = |s: &str| s.trim().parse::<usize>().ok().filter(|&n| n < crate::limits::THREADS_MAX);
    let is_good = |part: &str| match part.split_once('-') {
        Some((low, high)) => number(low).zip(number(high)).is_some_and(|(l, h)| l <= h),
        None => number(part).is_some(),
    };
    match cores.is_empty() || cores.split(',').all(is_good) {
        true => Ok(()),
        false => {
            let expected = "cores as a list such as \"0-3,6\", or nothing for all";
            Err(Error::bad(file, "cpu.cores", expected, format!("{cores:?}")))
        }
    }
}

/// Range of a number: low, high, and the unit in words.
type Range = (f64, f64, &'static str);

const MHZ: Range = (100.0, 20_000.0, "MHz");
const CELSIUS: Range = (30.0, 104.0, "°C");

/// Every key with its range; text has none.
const KEYS: &[(&str, Option<Range>)] = &[
    ("name", None),
    ("board", None),
    ("about", None),
    ("prefill.gpu_cap_mhz", Some(MHZ)),
    ("prefill.gpu_floor_mhz", Some(MHZ)),
    ("prefill.emc_floor_mhz", Some(MHZ)),
    ("prefill.emc_cap_mhz", Some(MHZ)),
    ("prefill.chunk_tokens", Some((16.0, 8192.0, "tokens"))),
    ("decode.gpu_cap_mhz", Some(MHZ)),
    ("decode.gpu_floor_mhz", Some(MHZ)),
    ("decode.emc_floor_mhz", Some(MHZ)),
    ("decode.emc_cap_mhz", Some(MHZ)),
    ("decode.max_batch", Some((1.0, 512.0, "sequences"))),
    ("decode.wide_from_batch", Some((2.0, 512.0, "sequences"))),
    ("decode.wide_gpu_cap_mhz", Some(MHZ)),
    ("idle.gpu_cap_mhz", Some(MHZ)),
    ("idle.gpu_floor_mhz", Some(MHZ)),
    ("idle.emc_floor_mhz", Some(MHZ)),
    ("idle.emc_cap_mhz", Some(MHZ)),
    ("thermal.start_c", Some(CELSIUS)),
    ("thermal.hysteresis_c", Some((0.5, 20.0, "°C"))),
    ("thermal.prefill_percent", Some((10.0, 100.0, "percent"))),
    // Four changes a minute at most.
    ("thermal.step_s", Some((15.0, 600.0, "seconds"))),
    ("thermal.emc_keep_mhz", Some(MHZ)),
    ("thermal.pause_c", Some(CELSIUS)),
    ("thermal.resume_c", Some(CELSIUS)),
    ("power.cap_w", Some((1.0, 2000.0, "W"))),
    ("fallback.gpu_cap_mhz", Some(MHZ)),
    ("fallback.max_batch", Some((1.0, 512.0, "sequences"))),
    ("cpu.cores", None),
    ("cpu.spin_us", Some((0.0, 1e6, "µs"))),
];

struct Reader<'a> {
    file: &'a Path,
    table: &'a toml::Table,
}

impl Reader<'_> {
    /// Refuses what is no key.
    fn known(&self) -> Result<()> {
        for (name, value) in self.table {
            match value {
                toml::Value::Table(section) => {
                    for key in section.keys() {
                        self.is_key(&format!("{name}.{key}"))?;
                    }
                }
                _ => self.is_key(name)?,
            }
        }
        Ok(())
    }

    fn is_key(&self, name: &str) -> Result<()> {
        let names: Vec<&str> = KEYS.iter().map(|(k, _)| *k).collect();
        if names.contains(&name) {
            return Ok(());
        }
        let expected = match nearest(name, &names) {
            Some(near) => format!("a key of profiles (did you mean {near:?}?)"),
            None => "a key that profiles/README.md lists".into(),
        };
        Err(Error::bad(self.file, name, expected, "an unknown key"))
    }

    fn get(&self, name: &str) -> Option<&toml::Value> {
        match name.split_once('.') {
            Some((section, key)) => self.table.get(section)?.as_table()?.get(key),
            None => self.table.get(name),
        }
    }

    fn text(&self, name: &str) -> Result<String> {
        match self.get(name) {
            None => Ok(String::new()),
            Some(toml::Value::String(s)) => Ok(s.clone()),
            Some(other) => Err(Error::bad(self.file, name, "text", other)),
        }
    }

    /// Text that must be there, and can be part of a path.
    fn word(&self, name: &str) -> Result<String> {
        let text = self.text(name)?;
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        match !text.is_empty() && text.len() <= 64 && text.chars().all(is_word) {
            true => Ok(text),
            false => {
                let expected = "a name of letters, digits, - and _";
                Err(Error::bad(self.file, name, expected, format!("{text:?}")))
            }
        }
    }

    fn real(&self, name: &str) -> Result<Option<f64>> {
        let range = KEYS.iter().find(|(k, _)| *k == name).and_then(|(_, r)| *r);
        let (low, high, unit) = range.expect("a number has a row with a range");
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_float().or(value.as_integer().map(|n| n as f64));
        match number.filter(|x| (low..=high).contains(x)) {
            Some(x) => Ok(Some(x)),
            None => Err(Error::bad(self.file, name, format!("a number from {low} to {high} {unit}"), value)),
        }
    }

    fn count(&self, name: &str, default: u64) -> Result<u64> {
        match self.real(name)? {
            None => Ok(default),
            Some(x) if x.fract() == 0.0 => Ok(x as u64),
            Some(x) => Err(Error::bad(self.file, name, "a whole number", x)),
        }
    }

    fn mhz(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.real(name)?.map(|mhz| (mhz * 1e6).round() as u64))
    }

    fn celsius(&self, name: &str, default: f64) -> Result<i32> {
        Ok((self.real(name)?.unwrap_or(default) * 1e3).round() as i32)
    }

    /// Both keys or none.
    fn wide(&self) -> Result<Option<Wide>> {
        let (from, cap) = ("decode.wide_from_batch", "decode.wide_gpu_cap_mhz");
        match (self.real(from)?, self.mhz(cap)?) {
            (None, None) => Ok(None),
            (Some(_), Some(gpu_cap_hz)) => {
                Ok(Some(Wide { from_batch: self.count(from, 1)? as usize, gpu_cap_hz }))
            }
            (Some(_), None) => {
                Err(Error::bad(self.file, cap, format!("a clock, because {from} is there"), "none"))
            }
            (None, Some(_)) => {
                Err(Error::bad(self.file, from, format!("a batch, because {cap} is there"), "none"))
            }
        }
    }

    fn clocks(&self, phase: &str) -> Result<Clocks> {
        Ok(Clocks {
            gpu_cap_hz: self.mhz(&format!("{phase}.gpu_cap_mhz"))?,
            gpu_floor_hz: self.mhz(&format!("{phase}.gpu_floor_mhz"))?,
            emc_floor_hz: self.mhz(&format!("{phase}.emc_floor_mhz"))?,
            emc_cap_hz: self.mhz(&format!("{phase}.emc_cap_mhz"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Profile> {
        let head = "name = \"x\"\nboard = \"any\"\n";
        Profile::parse(Path::new("x.toml"), &format!("{head}{text}"))
    }

    #[test]
    fn every_built_in_profile_is_good_and_says_who_it_is() {
        for (board, name, text) in BUILT_IN.as_flattened() {
            let profile = Profile::find(name, board).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((profile.board.as_str(), profile.name.as_str()), (*board, *name));
            assert!(!profile.about.is_empty() && text.starts_with('#'), "{board}/{name} says what it is for");
            assert_eq!(profile.cap_mw.is_some(), *name == "battery", "{board}/{name}");
            let again = Profile::parse(Path::new("again"), &profile.to_toml("A copy.")).unwrap();
            assert_eq!(profile, again, "written and read back");
        }
        for board in Profile::boards() {
            assert_eq!(Profile::names(board), ["balanced", "latency", "efficiency", "silent", "battery"]);
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_what_was_meant() {
        let wrong = [
            ("[decode]\nmax_bach = 4", "decode.max_bach", "did you mean \"decode.max_batch\""),
            ("[thermal]\nstart_c = \"hot\"", "thermal.start_c", "a number from 30 to 104 °C"),
            ("[thermal]\nstart_c = 200", "thermal.start_c", "200"),
            ("[thermal]\nstart_c = 96", "thermal.start_c", "less than thermal.pause_c"),
            ("[thermal]\nresume_c = 99\npause_c = 98", "thermal.resume_c", "less than"),
            ("[thermal]\nstep_s = 1", "thermal.step_s", "15 to 600"),
            ("[decode]\nmax_batch = 2.5", "decode.max_batch", "a whole number"),
            (
                "[decode]\ngpu_cap_mhz = 612\ngpu_floor_mhz = 918",
                "decode.gpu_floor_mhz",
                "at most gpu_cap_mhz (612)",
            ),
            ("[power]\ncap_w = nan", "power.cap_w", "a number"),
            ("[cpu]\ncores = \"3-1\"", "cpu.cores", "0-3,6"),
            ("[cpu]\ncores = 3", "cpu.cores", "text"),
            ("[zebra]\nx = 1", "zebra.x", "profiles/README.md"),
            (
                "[decode]\nwide_from_batch = 8",
                "decode.wide_gpu_cap_mhz",
                "because decode.wide_from_batch is there",
            ),
            ("[decode\n", "line 3", "TOML"),
        ];
        for (text, field, hint) in wrong {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains(hint), "{text:?}: {error}");
        }
        assert!(Profile::parse(Path::new("x"), "name = \"../x\"\nboard = \"any\"").is_err());
        let error = Profile::find("eficiency", "orin-nano-8-super").unwrap_err().to_string();
        assert!(error.contains("did you mean \"efficiency\""), "{error}");
        assert!(parse("[cpu]\ncores = \"0-3,6\"").is_ok());
    }
}
