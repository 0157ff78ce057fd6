//! Opens a GGUF model: one file, or all parts of a split one.
//!
//! Parts are named `NAME-00001-of-00003.gguf` and carry `split.no` (from 0), `split.count` and `split.tensors.count`;
//! the first part has the metadata.

use super::file::{HeaderInput, SourceFile};
use super::source::{Meta, Source, Tensor};
use crate::format::gguf::{self, Header};
use crate::limits;
use crate::units::{Error, Result};
use std::path::{Path, PathBuf};

/// Opens the model of which `part` is the file or one part; `given` is what the user named.
pub fn open(given: &Path, part: &Path) -> Result<Source> {
    let (file, header) = open_part(part)?;
    let count = header.meta.opt_usize("split.count")?.unwrap_or(1);
    if count <= 1 {
        let tensors = tensors_of(header.tensors, 0);
        return Source::assemble(given, Meta::Gguf(header.meta), vec![file], tensors.collect());
    }
    if count > limits::SHARDS_MAX {
        return Err(header.meta.bad("split.count", &format!("at most {}", limits::SHARDS_MAX)));
    }
    let Some((prefix, _, named)) = split_name(part).filter(|s| s.2 == count) else {
        let expected = format!("a name that ends in -00001-of-{count:05}.gguf, as split.count says");
        return Err(Error::bad(part, "file name", expected, "another name"));
    };
    let folder = part.parent().unwrap_or(Path::new(""));
    let paths = (1..=named).map(|i| folder.join(format!("{prefix}-{i:05}-of-{named:05}.gguf")));
    open_split(given, paths.collect())
}

/// All parts in order.
fn open_split(given: &Path, paths: Vec<PathBuf>) -> Result<Source> {
    let (mut files, mut tensors, mut first) = (Vec::new(), Vec::new(), None);
    let count = paths.len();
    for (i, path) in paths.iter().enumerate() {
        let (file, header) = open_part(path)?;
        for (key, value) in [("split.no", i), ("split.count", count)] {
            if header.meta.usize(key)? != value {
                return Err(header.meta.bad(key, &value.to_string()));
            }
        }
        tensors.extend(tensors_of(header.tensors, i));
        files.push(file);
        first.get_or_insert(header.meta);
    }
    let meta = first.expect("a split model has parts");
    if let Some(n) = meta.opt_usize("split.tensors.count")?
        && n != tensors.len()
    {
        return Err(meta.bad("split.tensors.count", &format!("{}, the tensors in all parts", tensors.len())));
    }
    Source::assemble(given, Meta::Gguf(meta), files, tensors)
}

fn open_part(path: &Path) -> Result<(SourceFile, Header)> {
    let file = SourceFile::open(path)?;
    let header = gguf::parse(&HeaderInput::new(&file))?;
    Ok((file, header))
}

fn tensors_of(infos: Vec<crate::format::tensor::TensorInfo>, file: usize) -> impl Iterator<Item = Tensor> {
    infos.into_iter().map(move |t| Tensor {
        name: t.name,
        codec: t.codec,
        dims: t.dims,
        scale: None,
        file,
        offset: t.offset,
        len: t.len,
    })
}

/// Prefix, part (from 1) and count of a split file's name.
fn split_name(path: &Path) -> Option<(&str, usize, usize)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    let number = |s: &str| if s.len() == 5 { s.parse::<usize>().ok() } else { None };
    Some((prefix, number(no)?, number(count)?))
}

/// The one GGUF model in a folder: its file or its first part. `None` if there is no GGUF file.
pub fn find_in_folder(folder: &Path) -> Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "list", e))?;
    let mut models = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io(folder, "list", e))?.path();
        let is_gguf = path.extension().is_some_and(|e| e == "gguf");
        if is_gguf && split_name(&path).is_none_or(|(_, no, _)| no == 1) {
            models.push(path);
        }
    }
    models.sort();
    match models.len() {
        0 | 1 => Ok(models.pop()),
        n => Err(Error::bad(folder, "folder", "one GGUF model", format_args!("{n}; name one of them"))),
    }
}
