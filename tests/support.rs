//! What several tests need: safetensors files as f32, the fixtures, the optional shared folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A tensor of a safetensors file, as f32 or i32 by its type.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub f32: Vec<f32>,
    pub i32: Vec<i32>,
}

/// Reads a small safetensors file whole.
pub fn read_safetensors(path: &Path) -> HashMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let data = &bytes[8 + n..];
    let mut out = HashMap::new();
    for (name, t) in header.as_object().unwrap().iter().filter(|(k, _)| *k != "__metadata__") {
        let at = |i: usize| t["data_offsets"][i].as_u64().unwrap() as usize;
        let words = data[at(0)..at(1)].chunks_exact(4).map(|b| <[u8; 4]>::try_from(b).unwrap());
        let mut tensor = Tensor { f32: vec![], i32: vec![] };
        match t["dtype"].as_str().unwrap() {
            "F32" => tensor.f32 = words.map(f32::from_le_bytes).collect(),
            "I32" => tensor.i32 = words.map(i32::from_le_bytes).collect(),
            other => panic!("{name}: {other}"),
        }
        out.insert(name.clone(), tensor);
    }
    out
}

/// The words that start one of the two programs. `TEGU_TEST_PROGRAMS` names a folder of programs to test instead of
/// those that were built with the tests, and `TEGU_TEST_RUNNER` what starts them: so a native test drives programs of
/// another processor, and no emulated test process has to start children (an emulator that is cloned while its other
/// threads hold its locks can hang).
pub fn program(name: &str) -> Vec<String> {
    let built = match name {
        "tegu" => env!("CARGO_BIN_EXE_tegu"),
        "tegud" => env!("CARGO_BIN_EXE_tegud"),
        other => panic!("no program {other}"),
    };
    let path = match std::env::var_os("TEGU_TEST_PROGRAMS") {
        Some(folder) => Path::new(&folder).join(name).to_str().expect("a UTF-8 path").to_owned(),
        None => built.to_owned(),
    };
    runner().into_iter().chain([path]).collect()
}

/// True when programs are emulated: they are slow for reasons of their own, and the emulator needs memory of its own.
pub fn emulated() -> bool {
    !runner().is_empty()
}

fn runner() -> Vec<String> {
    let words = std::env::var("TEGU_TEST_RUNNER").unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
}

/// A command that starts one of the two programs.
pub fn command(name: &str) -> std::process::Command {
    let words = program(name);
    let mut command = std::process::Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// The repository's fixtures; `TEGU_TEST_DATA` says where they are on a machine without the repository.
pub fn data() -> PathBuf {
    let named = std::env::var_os("TEGU_TEST_DATA").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data"))
}

/// Larger fixtures that are not in the repository: `$TEGU_SHARED`, or a folder `shared` beside the checkout.
pub fn shared() -> Option<PathBuf> {
    let named = std::env::var_os("TEGU_SHARED").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|p| p.join("shared"));
    let found = named.or(beside)?;
    found.is_dir().then_some(found)
}

/// Says that a test did nothing, in a form that CI counts.
pub fn skipped(test: &str, why: &str) {
    eprintln!("skipped: {test}: {why}");
}
