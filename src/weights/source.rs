//! A model on disk: its metadata and the list of its tensors, whatever the format.

use super::file::{Reader, SourceFile};
use super::{open_gguf, open_hf};
use crate::format::layout::F8_BLOCK;
use crate::format::{Codec, decode_row, gguf};
use crate::limits;
use crate::units::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A tensor of a [`Source`].
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name as the file has it.
    pub name: String,
    /// How elements are written.
    pub codec: Codec,
    /// Row-major, outermost first; the last is the row width.
    pub dims: Vec<usize>,
    /// FP8: index of the tensor of its 128x128 block scales, f32 `(ceil(rows/128), ceil(cols/128))`.
    pub scale: Option<usize>,
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Tensor {
    /// Elements of a row.
    pub fn cols(&self) -> usize {
        *self.dims.last().expect("at least one dimension")
    }

    /// Rows over the flattened outer dimensions; a vector is one row.
    pub fn rows(&self) -> usize {
        self.dims[..self.dims.len() - 1].iter().product()
    }

    /// Bytes of a row in the file.
    pub fn row_bytes(&self) -> usize {
        self.codec.row_bytes(self.cols()).expect("checked when the file was opened")
    }

    /// Bytes in the file.
    pub fn size_bytes(&self) -> u64 {
        self.len
    }
}

/// What a Hugging Face folder says beside its tensors.
#[derive(Debug, Clone)]
pub struct HfMeta {
    /// The folder's config.json, for messages.
    pub config_path: PathBuf,
    /// config.json, an object.
    pub config: Value,
    /// generation_config.json.
    pub generation_config: Option<Value>,
    /// tokenizer_config.json.
    pub tokenizer_config: Option<Value>,
    /// Path of tokenizer.json, read by whoever needs it.
    pub tokenizer_json: Option<PathBuf>,
    /// chat_template.jinja.
    pub chat_template: Option<String>,
}

/// Metadata by format.
#[derive(Debug, Clone)]
pub enum Meta {
    /// GGUF key and value pairs.
    Gguf(gguf::Meta),
    /// The JSON files of a Hugging Face folder.
    HuggingFace(Box<HfMeta>),
}

/// An opened model. Tensor data is read on demand.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    meta: Meta,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    files: Vec<SourceFile>,
}

impl Source {
    /// Opens a GGUF file (any part of a split one), a folder with one GGUF model, or a Hugging Face folder.
    pub fn open(path: &Path) -> Result<Source> {
        let kind = std::fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
        if kind.is_dir() { open_folder(path) } else { open_gguf::open(path, path) }
    }

    /// Puts the parts together; names must be unique over all files.
    pub(super) fn assemble(
        path: &Path,
        meta: Meta,
        files: Vec<SourceFile>,
        tensors: Vec<Tensor>,
    ) -> Result<Source> {
        let mut by_name = HashMap::with_capacity(tensors.len());
        for (i, t) in tensors.iter().enumerate() {
            if by_name.insert(t.name.clone(), i).is_some() {
                let file = files[t.file].path();
                return Err(Error::bad(
                    file,
                    format_args!("tensor {}", t.name),
                    "a name once",
                    "it in two files",
                ));
            }
        }
        if tensors.is_empty() {
            return Err(Error::bad(path, "tensors", "at least one", "none"));
        }
        if tensors.len() as u64 > limits::TENSORS_MAX {
            let expected = format!("at most {}", limits::TENSORS_MAX);
            return Err(Error::bad(path, "tensors", expected, tensors.len()));
        }
        Ok(Source { path: path.to_owned(), meta, tensors, by_name, files })
    }

    /// What [`Source::open`] was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The index of a tensor.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The file that holds tensor `t`.
    pub fn file_of(&self, t: usize) -> &Path {
        self.file(t).path()
    }

    /// Bytes of all files that hold tensors.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(SourceFile::len_bytes).sum()
    }

    pub(super) fn file(&self, t: usize) -> &SourceFile {
        &self.files[self.tensors[t].file]
    }

    /// All elements of tensor `t` as f32, row-major. For small tensors: norms, biases, scales.
    pub fn read_f32(&self, t: usize) -> Result<Vec<f32>> {
        let mut reader = Reader::new(64 << 10);
        let rows = self.rows(t)?;
        let n = self.tensors[t].rows();
        let mut out = vec![0.0; n * self.tensors[t].cols()];
        rows.f32(&mut reader, 0, n, &mut out)?;
        Ok(out)
    }

    /// Access to the rows of tensor `t`, its FP8 scales read.
    pub fn rows(&self, t: usize) -> Result<Rows<'_>> {
        let scales = match self.tensors[t].scale {
            Some(s) => self.read_f32(s)?,
            None => Vec::new(),
        };
        Ok(Rows { source: self, t, scales })
    }
}

/// The rows of one tensor.
#[derive(Debug, Clone)]
pub struct Rows<'a> {
    source: &'a Source,
    t: usize,
    /// FP8 block scales, row-major; empty without.
    scales: Vec<f32>,
}

impl<'a> Rows<'a> {
    /// The tensor.
    pub fn tensor(&self) -> &'a Tensor {
        &self.source.tensors[self.t]
    }

    /// FP8 block scales of the whole tensor, row-major; empty without.
    pub(super) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Rows `first..first + n` as the file has them.
    pub fn raw<'r>(&self, reader: &'r mut Reader, first: usize, n: usize) -> Result<&'r [u8]> {
        let t = self.tensor();
        assert!(first + n <= t.rows(), "{}: rows {first} + {n} of {}", t.name, t.rows());
        let row_bytes = t.row_bytes();
        let offset = t.offset + (first * row_bytes) as u64;
        reader.read(self.source.file(self.t), offset, n * row_bytes, &format!("tensor {}", t.name))
    }

    /// Rows `first..first + n` as f32 into `out (n, cols)`, FP8 scales applied.
    pub fn f32(&self, reader: &mut Reader, first: usize, n: usize, out: &mut [f32]) -> Result<()> {
        /// Bytes read at a time, so that a large tensor needs no second copy of itself.
        const CHUNK_BYTES: usize = 4 << 20;
        let t = self.tensor();
        let (cols, row_bytes) = (t.cols(), t.row_bytes());
        assert_eq!(out.len(), n * cols);
        let step = (CHUNK_BYTES / row_bytes).max(1);
        for at in (0..n).step_by(step) {
            let rows = step.min(n - at);
            let raw = self.raw(reader, first + at, rows)?;
            let out = &mut out[at * cols..(at + rows) * cols];
            for (r, (src, dst)) in raw.chunks_exact(row_bytes).zip(out.chunks_exact_mut(cols)).enumerate() {
                decode_row(t.codec, src, dst);
                self.scale_row(first + at + r, dst);
            }
        }
        Ok(())
    }

    fn scale_row(&self, row: usize, out: &mut [f32]) {
        if self.scales.is_empty() {
            return;
        }
        let blocks = out.len().div_ceil(F8_BLOCK);
        let scales = &self.scales[row / F8_BLOCK * blocks..][..blocks];
        for (chunk, s) in out.chunks_mut(F8_BLOCK).zip(scales) {
            chunk.iter_mut().for_each(|x| *x *= s);
        }
    }
}

/// A folder is a Hugging Face one if it has a config.json; else it must hold one GGUF model.
fn open_folder(path: &Path) -> Result<Source> {
    if path.join("config.json").exists() {
        return open_hf::open(path);
    }
    match open_gguf::find_in_folder(path)? {
        Some(first) => open_gguf::open(path, &first),
        None => {
            Err(Error::bad(path, "folder", "config.json with *.safetensors, or one GGUF model", "neither"))
        }
    }
}
