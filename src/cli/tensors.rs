//! Writes a safetensors file whose rows arrive in any order, without holding it in memory.
//!
//! Layout (huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a JSON header padded with
//! spaces to 8 bytes, then each tensor's little-endian data at its `data_offsets`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::aside::Beside;
use crate::units::{Error, Result};

/// Element type of a written tensor: both are 4 bytes wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// 32-bit signed integer.
    I32,
}

/// One tensor to be written: a matrix of rows.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Rows; `None` for a vector of `width` elements (one row).
    pub rows: Option<usize>,
    /// Elements a row.
    pub width: usize,
}

const ELEMENT_BYTES: u64 = 4;

/// A file being written beside its final name. It appears there whole, by [`Writer::finish`], or not at all.
pub struct Writer {
    file: File,
    beside: Beside,
    specs: Vec<Spec>,
    /// Offset of each tensor's data from the start of the file.
    starts: Vec<u64>,
}

impl Writer {
    /// Creates the file aside with its header. Data that is never written reads as zeros, so callers write every row.
    pub fn create(target: &Path, specs: Vec<Spec>) -> Result<Writer> {
        let (header, offsets) = header(&specs);
        let beside = Beside::take(target)?;
        let file = File::create(beside.path()).map_err(|e| Error::io(beside.path(), "create", e))?;
        let data = 8 + header.len() as u64;
        let total = data + specs.iter().map(bytes).sum::<u64>();
        let starts = offsets.iter().map(|o| data + o).collect();
        let writer = Writer { file, beside, specs, starts };
        let mut head = (header.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(header.as_bytes());
        writer.put(&head, 0)?;
        writer.file.set_len(total).map_err(|e| Error::io(writer.beside.path(), "extend", e))?;
        Ok(writer)
    }

    fn put(&self, bytes: &[u8], at: u64) -> Result<()> {
        self.file.write_all_at(bytes, at).map_err(|e| Error::io(self.beside.path(), "write", e))
    }

    fn offset(&self, tensor: usize, row: usize, len: usize, dtype: Dtype) -> u64 {
        let spec = &self.specs[tensor];
        assert_eq!(spec.dtype, dtype, "{}", spec.name);
        assert!(row * spec.width + len <= spec.rows.unwrap_or(1) * spec.width, "{}: past its end", spec.name);
        self.starts[tensor] + (row * spec.width) as u64 * ELEMENT_BYTES
    }

    /// Writes whole rows of an F32 tensor (by its index in the specs) from row `row` on.
    pub fn rows_f32(&self, tensor: usize, row: usize, data: &[f32]) -> Result<()> {
        let at = self.offset(tensor, row, data.len(), Dtype::F32);
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.put(&bytes, at)
    }

    /// Writes whole rows of an I32 tensor from row `row` on.
    pub fn rows_i32(&self, tensor: usize, row: usize, data: &[i32]) -> Result<()> {
        let at = self.offset(tensor, row, data.len(), Dtype::I32);
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.put(&bytes, at)
    }

    /// Puts the file in its place: flushed to disk first, so that the name never holds half a file.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io(self.beside.path(), "sync", e))?;
        self.beside.place()
    }
}

fn bytes(spec: &Spec) -> u64 {
    spec.rows.unwrap_or(1) as u64 * spec.width as u64 * ELEMENT_BYTES
}

/// The padded header, and each tensor's offset into the data.
fn header(specs: &[Spec]) -> (String, Vec<u64>) {
    let (mut map, mut offsets, mut at) = (Map::new(), Vec::new(), 0);
    for spec in specs {
        let dtype = match spec.dtype {
            Dtype::F32 => "F32",
            Dtype::I32 => "I32",
        };
        let shape: Vec<usize> = spec.rows.into_iter().chain([spec.width]).collect();
        let end = at + bytes(spec);
        map.insert(spec.name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
        offsets.push(at);
        at = end;
    }
    let mut text = Value::Object(map).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    (text, offsets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs() -> Vec<Spec> {
        let spec = |name: &str, dtype, rows, width| Spec { name: name.into(), dtype, rows, width };
        vec![spec("input_ids", Dtype::I32, None, 3), spec("logits", Dtype::F32, Some(3), 2)]
    }

    #[test]
    fn rows_land_where_the_header_says() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        let w = Writer::create(&path, specs()).unwrap();
        w.rows_f32(1, 2, &[5.0, 6.0]).unwrap();
        w.rows_i32(0, 0, &[7, 8, 9]).unwrap();
        w.rows_f32(1, 0, &[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert!(!path.exists(), "nothing appears before it is whole");
        w.finish().unwrap();

        let bytes = std::fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(n % 8, 0);
        let head: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        assert_eq!(head["logits"]["shape"], json!([3, 2]));
        let range = |t: &str, i: usize| 8 + n + head[t]["data_offsets"][i].as_u64().unwrap() as usize;
        let logits = &bytes[range("logits", 0)..range("logits", 1)];
        let values: Vec<f32> = logits.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
        assert_eq!(values, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(bytes[range("input_ids", 0)..][..4], 7i32.to_le_bytes());
        assert_eq!(bytes.len(), range("logits", 1));
    }

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(Writer::create(&dir.path().join("out"), specs()).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(Writer::create(dir.path(), specs()).is_err());
        assert!(Writer::create(&dir.path().join("no/such/folder"), specs()).is_err());
    }
}
