//! Opens a Hugging Face folder: config.json, safetensors files with or without an index, and the files beside them.

use super::file::{HeaderInput, SourceFile, read_side_file};
use super::source::{HfMeta, Meta, Source, Tensor};
use crate::format::json_scan::Scan;
use crate::format::layout::F8_BLOCK;
use crate::format::{Codec, safetensors};
use crate::limits;
use crate::units::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// What follows a weight's name in the name of its FP8 block scales.
const SCALE_SUFFIX: &str = "_scale_inv";

/// Opens the folder.
pub fn open(folder: &Path) -> Result<Source> {
    let config_path = folder.join("config.json");
    let config = json(&config_path)?;
    let meta = HfMeta {
        config,
        generation_config: optional_json(folder, "generation_config.json")?,
        tokenizer_config: optional_json(folder, "tokenizer_config.json")?,
        tokenizer_json: Some(folder.join("tokenizer.json")).filter(|p| p.exists()),
        chat_template: template(folder)?,
        config_path,
    };
    let (paths, index) = shards(folder)?;
    let (mut files, mut tensors) = (Vec::with_capacity(paths.len()), Vec::new());
    for (i, path) in paths.iter().enumerate() {
        let file = SourceFile::open(path)?;
        for entry in safetensors::parse(&HeaderInput::new(&file))? {
            let t = entry.tensor(path)?;
            tensors.push(Tensor {
                name: t.name,
                codec: t.codec,
                dims: t.dims,
                scale: None,
                file: i,
                offset: t.offset,
                len: t.len,
            });
        }
        files.push(file);
    }
    check_index(folder, &index, &tensors, &paths)?;
    pair_scales(&mut tensors, &files, &meta)?;
    Source::assemble(folder, Meta::HuggingFace(Box::new(meta)), files, tensors)
}

/// Reads a JSON object of at most [`limits::CONFIG_FILE_MAX`] bytes.
fn json(path: &Path) -> Result<Value> {
    let bytes = read_side_file(path, limits::CONFIG_FILE_MAX)?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|e| {
        let at = format!("line {}, column {}", e.line(), e.column());
        Error::bad(path, at, "JSON", e)
    })?;
    if !value.is_object() {
        return Err(Error::bad(path, "the file", "a JSON object", "another JSON value"));
    }
    Ok(value)
}

fn optional_json(folder: &Path, name: &str) -> Result<Option<Value>> {
    let path = folder.join(name);
    if path.exists() { json(&path).map(Some) } else { Ok(None) }
}

fn template(folder: &Path) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if !path.exists() {
        return Ok(None);
    }
    let bytes = read_side_file(&path, limits::TEMPLATE_FILE_MAX)?;
    let bad = |e: std::string::FromUtf8Error| Error::bad(&path, "the file", "UTF-8 text", e);
    String::from_utf8(bytes).map(Some).map_err(bad)
}

/// Tensor name to shard, from an index.
type Index = Vec<(String, usize)>;

/// The shard files, and the index if there is one.
fn shards(folder: &Path) -> Result<(Vec<PathBuf>, Index)> {
    let index_path = folder.join(INDEX);
    if index_path.exists() {
        return read_index(folder, &index_path);
    }
    let single = folder.join(SINGLE);
    if single.exists() {
        return Ok((vec![single], Vec::new()));
    }
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "list", e))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io(folder, "list", e))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    // Several files of any name could be anything (adapters, test vectors): only one alone is the model.
    match paths.len() {
        1 => Ok((paths, Vec::new())),
        n => {
            let found = format!("neither, and {n} other *.safetensors");
            Err(Error::bad(folder, "folder", format_args!("{SINGLE} or {INDEX}"), found))
        }
    }
}

/// Reads `weight_map` of an index; shards come in the order of their names.
fn read_index(folder: &Path, path: &Path) -> Result<(Vec<PathBuf>, Index)> {
    const NAME_MAX: usize = 4_096;
    let file = SourceFile::open(path)?;
    if file.len_bytes() > limits::JSON_FILE_MAX {
        let expected = format!("at most {} bytes", limits::JSON_FILE_MAX);
        return Err(Error::bad(path, "file size", expected, file.len_bytes()));
    }
    let input = HeaderInput::new(&file);
    let mut scan = Scan::new(&input, 0..file.len_bytes(), "shard index");
    let mut shards: HashMap<String, usize> = HashMap::new();
    let mut index: Index = Vec::new();
    scan.object(NAME_MAX, |s, key| {
        if key != "weight_map" {
            return s.skip();
        }
        s.object(NAME_MAX, |s, tensor| {
            let shard = s.string(NAME_MAX)?;
            // A name, not a path: an index must not reach out of its folder.
            let plain = Path::new(&shard).file_name().is_some_and(|n| n == shard.as_str());
            if !plain || index.len() as u64 == limits::TENSORS_MAX || shards.len() > limits::SHARDS_MAX {
                let field = format!("weight_map: {tensor}");
                return Err(Error::bad(path, field, "a file name in this folder, within limits", shard));
            }
            let next = shards.len();
            index.push((tensor, *shards.entry(shard).or_insert(next)));
            Ok(())
        })
    })?;
    scan.end()?;
    if shards.is_empty() {
        return Err(Error::bad(path, "weight_map", "at least one tensor", "none"));
    }
    let mut names: Vec<(String, usize)> = shards.into_iter().collect();
    names.sort();
    let mut place = vec![0; names.len()];
    names.iter().enumerate().for_each(|(i, (_, old))| place[*old] = i);
    index.iter_mut().for_each(|(_, shard)| *shard = place[*shard]);
    Ok((names.into_iter().map(|(n, _)| folder.join(n)).collect(), index))
}

/// Every tensor that the index names must be in the shard that it names.
fn check_index(folder: &Path, index: &Index, tensors: &[Tensor], paths: &[PathBuf]) -> Result<()> {
    let found: HashMap<&str, usize> = tensors.iter().map(|t| (t.name.as_str(), t.file)).collect();
    for (name, shard) in index {
        if found.get(name.as_str()) != Some(shard) {
            let file = paths[*shard].file_name().unwrap_or_default().to_string_lossy();
            let field = format!("weight_map: {name}");
            return Err(Error::bad(
                folder.join(INDEX),
                field,
                format_args!("a tensor in {file}"),
                "none there",
            ));
        }
    }
    Ok(())
}

/// Finds each FP8 weight's block scales and checks their shape.
fn pair_scales(tensors: &mut [Tensor], files: &[SourceFile], meta: &HfMeta) -> Result<()> {
    if tensors.iter().all(|t| t.codec != Codec::F8E4M3) {
        return Ok(());
    }
    check_block_size(meta)?;
    let by_name: HashMap<String, usize> = tensors
        .iter()
        .enumerate()
        .filter(|(_, t)| t.name.ends_with(SCALE_SUFFIX))
        .map(|(i, t)| (t.name.clone(), i))
        .collect();
    for i in 0..tensors.len() {
        let t = &tensors[i];
        if t.codec != Codec::F8E4M3 {
            continue;
        }
        let file = files[t.file].path();
        let name = format!("{}{SCALE_SUFFIX}", t.name);
        let Some(&scale) = by_name.get(&name) else {
            let field = format!("tensor {}", t.name);
            return Err(Error::bad(file, field, format_args!("block scales in tensor {name}"), "none"));
        };
        let [rows, cols] = t.dims[..] else {
            let field = format!("tensor {}", t.name);
            return Err(Error::bad(file, field, "two dimensions for FP8", format_args!("{:?}", t.dims)));
        };
        let want = [rows.div_ceil(F8_BLOCK), cols.div_ceil(F8_BLOCK)];
        let s = &tensors[scale];
        if s.dims != want || s.codec != Codec::F32 {
            let found = format!("{} {:?}", s.codec.name(), s.dims);
            let field = format!("tensor {name}");
            return Err(Error::bad(files[s.file].path(), field, format_args!("f32 {want:?}"), found));
        }
        tensors[i].scale = Some(scale);
    }
    Ok(())
}

/// `quantization_config.weight_block_size`, where it is given, must be what the layout has.
fn check_block_size(meta: &HfMeta) -> Result<()> {
    match meta.config.get("quantization_config").and_then(|q| q.get("weight_block_size")) {
        None | Some(Value::Null) => Ok(()),
        Some(v) if *v == serde_json::json!([F8_BLOCK, F8_BLOCK]) => Ok(()),
        Some(v) => {
            let field = "quantization_config.weight_block_size";
            Err(Error::bad(&meta.config_path, field, format_args!("[{F8_BLOCK}, {F8_BLOCK}]"), v))
        }
    }
}
