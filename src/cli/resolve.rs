//! Which model, and which of two words is the prompt.

use std::path::{Path, PathBuf};

use crate::config::{Config, Origin};
use crate::observe;
use crate::units::{Error, Result};

/// The demo's place in the source tree and in an installed prefix.
const DEMO_IN_TREE: &str = "tests/data/tinymoe-demo.gguf";
const DEMO_IN_PREFIX: &str = "share/tegu/tinymoe-demo.gguf";

/// The model to open: the one named, else `$TEGU_MODEL`, else the settings' (both in `config`), else the bundled demo.
/// Says which, when the command line did not.
pub fn model(named: Option<&Path>, config: &Config) -> Result<PathBuf> {
    if let Some(path) = named {
        return Ok(path.to_owned());
    }
    let (path, from) = match config.get("model") {
        _ if config.text("model").is_empty() => (demo()?, "the bundled demo"),
        (_, Origin::Environment) => (config.text("model").into(), "from $TEGU_MODEL"),
        _ => (config.text("model").into(), "from the settings"),
    };
    observe::note(format_args!("model: {} ({from})", path.display()));
    Ok(path)
}

/// The bundled demo: beside the executable's source tree, in its prefix, or where it was built.
fn demo() -> Result<PathBuf> {
    let exe = std::env::current_exe().unwrap_or_default();
    let near = exe.ancestors().skip(1).flat_map(|a| [a.join(DEMO_IN_TREE), a.join(DEMO_IN_PREFIX)]);
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join(DEMO_IN_TREE);
    let found = near.chain([built]).find(|p| p.is_file());
    found.ok_or_else(|| {
        let expected = format!("a file or folder, or {DEMO_IN_PREFIX} beside the program's prefix");
        Error::bad("command line", "MODEL", expected, "none")
    })
}

/// Sorts up to two positional words into (model, prompt). One word is the model if it exists or looks like a model's
/// path, else the prompt: `tegu run model.gguf`, `tegu run "What is gravity?"`. With `-m` it is always the prompt.
pub fn words(words: &[String], model_flag: Option<&Path>) -> Result<(Option<PathBuf>, Option<String>)> {
    match (words, model_flag) {
        ([], m) => Ok((m.map(Path::to_owned), None)),
        ([prompt], Some(m)) => Ok((Some(m.to_owned()), Some(prompt.clone()))),
        ([one], None) if is_path(one) => Ok((Some(one.into()), None)),
        ([prompt], None) => Ok((None, Some(prompt.clone()))),
        ([model, prompt], None) => Ok((Some(model.into()), Some(prompt.clone()))),
        _ => Err(Error::bad(
            "command line",
            "MODEL",
            "at most MODEL and PROMPT",
            "more (is the prompt quoted?)",
        )),
    }
}

/// A mistyped path must say "no such file", not be answered as a question.
fn is_path(word: &str) -> bool {
    let lower = word.to_ascii_lowercase();
    let path_like = !word.contains(char::is_whitespace)
        && (lower.ends_with(".gguf") || lower.ends_with(".safetensors") || word.contains('/'));
    path_like || (!word.is_empty() && Path::new(word).exists())
}

#[test]
fn one_word_is_a_model_or_a_prompt() {
    let sort = |w: &[&str], m: Option<&str>| {
        let w: Vec<String> = w.iter().map(|s| s.to_string()).collect();
        let (m, p) = words(&w, m.map(Path::new)).ok()?;
        Some((m.map(|p| p.display().to_string()), p))
    };
    let some = |s: &str| Some(s.to_owned());
    assert_eq!(sort(&["What is gravity?"], None), Some((None, some("What is gravity?"))));
    assert_eq!(sort(&["either/or is a question"], None), Some((None, some("either/or is a question"))));
    assert_eq!(sort(&["no/such.gguf"], None), Some((some("no/such.gguf"), None)));
    assert_eq!(sort(&[env!("CARGO_MANIFEST_DIR")], None), Some((some(env!("CARGO_MANIFEST_DIR")), None)));
    assert_eq!(sort(&["a.gguf"], Some("m")), Some((some("m"), some("a.gguf"))));
    assert_eq!(sort(&["a", "b"], None), Some((some("a"), some("b"))));
    assert_eq!(sort(&["a", "b"], Some("m")), None);
    assert_eq!(sort(&["a", "b", "c"], None), None);
}
