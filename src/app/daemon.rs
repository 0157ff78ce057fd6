//! What the daemon serves: models found by name, loaded as the settings say.

use crate::app::keeper::Told;
use crate::app::{self, Options, Text};
use crate::config::Config;
use crate::engine::Budget;
use crate::engine::service::{Limits, OnPanic, Service};
use crate::serve::{Kind, Known, Loaded, Loader};
use crate::units::{Error, Result};
use crate::weights::Meta;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::UNIX_EPOCH;

/// Models that the daemon can load, by name.
pub struct Shelf {
    /// How to open any of them; the path is each one's own.
    options: Options,
    limits: Limits,
    /// Who looks after the board.
    power: Option<Arc<Told>>,
    /// Where cold blocks of the cache go, and how many bytes of them.
    spill: Option<(PathBuf, u64)>,
    default: Option<PathBuf>,
    names: RwLock<Names>,
}

/// Where names come from; a reload changes them.
#[derive(Debug, Clone, Default)]
struct Names {
    folder: Option<PathBuf>,
    aliases: Vec<(String, String)>,
}

impl Names {
    /// Aliases of what is not there are left out, with a word in the log: settings that name a disk that is not mounted yet
    /// are no reason not to serve the rest, and a reload takes them.
    fn of(config: &Config) -> Names {
        let folder = config.text("serve.models");
        let folder = (!folder.is_empty()).then(|| folder.into());
        let mut names = Names { folder, aliases: config.aliases.clone() };
        let (there, missing) = std::mem::take(&mut names.aliases)
            .into_iter()
            .partition(|(_, target)| names.target(target).exists());
        names.aliases = there;
        let missing: Vec<(String, String)> = missing;
        for (name, target) in missing {
            log::warn!("alias {name}: no such file or model: {target}");
        }
        names
    }

    /// The file or folder behind an alias: a path, or a name in the model folder.
    fn target(&self, target: &str) -> PathBuf {
        let inside = self.folder.iter().flat_map(|f| [f.join(target), f.join(format!("{target}.gguf"))]);
        [PathBuf::from(target)]
            .into_iter()
            .chain(inside)
            .find(|p| p.exists())
            .unwrap_or_else(|| target.into())
    }
}

impl Shelf {
    /// `options`: as the flags and settings say, for a model at any path. `default`: what is served to requests that
    /// name no model; none: the first of the folder.
    pub fn new(
        options: Options,
        default: Option<PathBuf>,
        config: &Config,
        power: Option<Arc<Told>>,
    ) -> Shelf {
        let budget = Budget { max_batch: config.count("serve.batch") as usize, ..Budget::default() };
        let requests_max = config.count("serve.queue") as usize;
        let folder = |key: &str| Some(config.text(key)).filter(|f| !f.is_empty()).map(PathBuf::from);
        let session_folder = folder("serve.sessions");
        let signal = power.as_ref().map_or_else(Arc::default, |p| p.signal.clone());
        Shelf {
            options,
            limits: Limits { requests_max, budget, session_folder, signal, ..Limits::default() },
            power,
            spill: folder("serve.spill").map(|f| (f, config.count("serve.spill_bytes"))),
            default,
            names: RwLock::new(Names::of(config)),
        }
    }

    /// Takes the names of new settings.
    pub fn rename(&self, config: &Config) {
        *self.names.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Names::of(config);
    }

    /// Every model: name and path, the default first, each name once.
    pub fn models(&self) -> Result<Vec<(String, PathBuf)>> {
        let names = self.names.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let aliases = names.aliases.iter().map(|(n, t)| (n.clone(), names.target(t)));
        let mut all: Vec<(String, PathBuf)> = aliases.collect();
        if let Some(folder) = &names.folder {
            all.extend(in_folder(folder)?);
        }
        if let Some(path) = &self.default {
            // By the name that was given to it, if one was.
            let named = all.iter().position(|(_, p)| p == path);
            let first = named.map_or_else(|| (name_of(path), path.clone()), |i| all.remove(i));
            all.insert(0, first);
        }
        let mut seen = std::collections::HashSet::new();
        all.retain(|(name, _)| seen.insert(name.clone()));
        Ok(all)
    }
}

/// A file's name without its ending; a split model's without its number.
fn name_of(path: &Path) -> String {
    let name = path.file_name().map_or_else(|| path.to_string_lossy(), |n| n.to_string_lossy());
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    stem.split_once("-00001-of-").map_or(stem, |(first, _)| first).to_owned()
}

/// GGUF files (of split ones the first) and Hugging Face folders, by name.
fn in_folder(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let read = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "list the models", e))?;
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    for entry in read.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let later_part = name.contains("-of-") && !name.contains("-00001-of-");
        let is_file = name.ends_with(".gguf") && !later_part && path.is_file();
        if is_file || path.join("config.json").is_file() {
            found.push((name_of(&path), path));
        }
    }
    found.sort();
    Ok(found)
}

fn known(name: String, path: &Path) -> Known {
    let meta = std::fs::metadata(path).ok();
    let changed = meta.as_ref().and_then(|m| m.modified().ok()?.duration_since(UNIX_EPOCH).ok());
    let file_bytes = match &meta {
        Some(m) if m.is_file() => m.len(),
        // A folder's weights.
        _ => std::fs::read_dir(path)
            .map_or(0, |d| d.flatten().filter_map(|e| Some(e.metadata().ok()?.len())).sum()),
    };
    let changed = changed.unwrap_or_default();
    let digest = digest(&format!("{}\0{file_bytes}\0{}", path.display(), changed.as_nanos()));
    Known { name, file_bytes, changed_unix_s: changed.as_secs(), digest }
}

/// FNV-1a (draft-eastlake-fnv) from four beginnings: 64 digits for what was never meant to be forged. Reading gigabytes to hash
/// them would tell no more about whether a file was changed.
fn digest(text: &str) -> String {
    let one = |begin: u64| {
        let step = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        text.bytes().fold(0xcbf2_9ce4_8422_2325 ^ begin, step)
    };
    (0..4).map(|i| format!("{:016x}", one(i * 0x9e37_79b9))).collect()
}

/// What a model is, from its tensors and its metadata.
fn kind(prepared: &app::Prepared) -> Kind {
    let (architecture, format) = match prepared.source.meta() {
        Meta::Gguf(meta) => match meta.get("general.architecture") {
            Some(crate::format::gguf::Value::Str(arch)) => (arch.clone(), "gguf"),
            _ => ("gguf".into(), "gguf"),
        },
        Meta::HuggingFace(meta) => {
            (meta.config["model_type"].as_str().unwrap_or("transformers").to_owned(), "safetensors")
        }
    };
    let mut by_codec: Vec<(&str, u64)> = Vec::new();
    for t in prepared.source.tensors() {
        let elements = t.dims.iter().map(|&d| d as u64).product::<u64>();
        match by_codec.iter_mut().find(|(name, _)| *name == t.codec.name()) {
            Some((_, n)) => *n += elements,
            None => by_codec.push((t.codec.name(), elements)),
        }
    }
    let parameters = by_codec.iter().map(|(_, n)| n).sum();
    let most = by_codec.iter().max_by_key(|(_, n)| *n);
    Kind { architecture, format, parameters, codec: most.map_or(String::new(), |(c, _)| c.to_uppercase()) }
}

impl Loader for Arc<Shelf> {
    fn known(&self) -> Result<Vec<Known>> {
        Ok(self.models()?.into_iter().map(|(name, path)| known(name, &path)).collect())
    }

    fn load(&self, name: &str, fatal: Box<dyn FnOnce(&str) + Send>) -> Result<Loaded> {
        let models = self.models()?;
        let found = models.into_iter().find(|(n, _)| n == name);
        let (_, path) = found.ok_or_else(|| Error::bad("request", "model", "a known model", name))?;
        let prepared = app::prepare(Options { path, ..self.options.clone() })?;
        let Text { tokenizer, template } = app::text(&prepared.source, prepared.hyper())?;
        let kind = kind(&prepared);
        let mut app = prepared.load(&|_| {})?;
        if let Some((folder, bytes_max)) = &self.spill {
            app.engine.spill_to(folder, *bytes_max)?;
        }
        let service = Service::start(app.engine, self.limits.clone(), OnPanic::Call(fatal))?;
        if let Some(power) = &self.power {
            power.set_engine(service.handle(), app.plan.total_bytes());
        }
        Ok(Loaded {
            service,
            tokenizer: Arc::new(tokenizer),
            template,
            kind,
            planned_bytes: app.plan.total_bytes(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str, dir: &Path) -> Config {
        let file = dir.join("c.toml");
        std::fs::write(&file, text).unwrap();
        Config::load(Some(&file), &|_| None, &[]).unwrap()
    }

    #[test]
    fn models_have_names() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("models");
        std::fs::create_dir_all(folder.join("hf")).unwrap();
        std::fs::write(folder.join("hf/config.json"), "{}").unwrap();
        for name in ["a.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"] {
            std::fs::write(folder.join(name), "x").unwrap();
        }
        let text = format!("[serve]\nmodels = {:?}\n[aliases]\nsmall = \"a\"\ngone = \"b\"\n", folder);
        let shelf = Arc::new(Shelf::new(
            Options::new(""),
            Some(folder.join("a.gguf")),
            &config(&text, dir.path()),
            None,
        ));
        let names: Vec<String> = shelf.known().unwrap().into_iter().map(|k| k.name).collect();
        assert_eq!(names, ["small", "a", "big", "hf"]);
        let outside = Shelf::new(Options::new(""), Some("x/y.gguf".into()), &config(&text, dir.path()), None);
        assert_eq!(outside.models().unwrap()[0], ("y".to_owned(), "x/y.gguf".into()));
    }
}
