//! Safetensors: an 8-byte little-endian header length, a JSON header, then tensor data without gaps.
//!
//! Source of the format: the README of huggingface/safetensors. Tensor data is not read here.

use super::codec::Codec;
use super::input::{Cursor, Input};
use super::json_scan::Scan;
use super::tensor::TensorInfo;
use crate::limits;
use crate::units::{Error, Result};
use std::collections::HashSet;
use std::path::Path;

/// One tensor of a header, its element type as written.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Element type: `F32`, `BF16`, `I64`, …
    pub dtype: String,
    /// Row-major, outermost first; empty for a scalar.
    pub dims: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Bytes of a tensor name. Published ones are under 200.
const NAME_MAX: usize = 4_096;
/// Dimensions that a header may list; convolutions of other models reach 5.
const HEADER_DIMS_MAX: usize = 8;

/// Bytes of an element, by type name.
fn dtype_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 1,
        "U16" | "I16" | "F16" | "BF16" => 2,
        "U32" | "I32" | "F32" => 4,
        "U64" | "I64" | "F64" => 8,
        _ => return None,
    })
}

/// Parses the header of `input`; entries come in the order of their data.
pub fn parse(input: &dyn Input) -> Result<Vec<Entry>> {
    let path = input.path();
    let mut c = Cursor::new(input, 0..input.len_bytes());
    let header_len = c.u64("header length")?;
    if header_len > limits::SAFETENSORS_HEADER_MAX {
        let expected = format!("at most {}", limits::SAFETENSORS_HEADER_MAX);
        return Err(Error::bad(path, "header length", expected, header_len));
    }
    if header_len > c.left() {
        let expected = format!("at most {}, the rest of the file", c.left());
        return Err(Error::bad(path, "header length", expected, header_len));
    }
    let data_start = 8 + header_len;
    let mut scan = Scan::new(input, 8..data_start, "safetensors header");
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    scan.object(NAME_MAX, |s, name| {
        if name == "__metadata__" {
            return s.skip();
        }
        if entries.len() as u64 == limits::TENSORS_MAX {
            let expected = format!("at most {} tensors", limits::TENSORS_MAX);
            return Err(Error::bad(path, "safetensors header", expected, "more"));
        }
        if !names.insert(name.clone()) {
            return Err(Error::bad(path, format_args!("tensor {name}"), "a name once", "it twice"));
        }
        entries.push(entry(s, path, name)?);
        Ok(())
    })?;
    scan.end()?;
    place(&mut entries, path, data_start, input.len_bytes())?;
    Ok(entries)
}

/// Reads one tensor's object; its offsets are still relative to the data.
fn entry(s: &mut Scan, path: &Path, name: String) -> Result<Entry> {
    let field = format!("tensor {name}");
    let (mut dtype, mut shape, mut range) = (None, None, None);
    s.object(NAME_MAX, |s, key| {
        let again = match key.as_str() {
            "dtype" => dtype.replace(s.string(64)?).is_some(),
            "shape" => shape.replace(ints(s, path, &field, "shape", HEADER_DIMS_MAX)?).is_some(),
            "data_offsets" => range.replace(ints(s, path, &field, "data_offsets", 2)?).is_some(),
            other => {
                let expected = "dtype, shape, data_offsets";
                return Err(Error::bad(path, &field, expected, format_args!("key \"{other}\"")));
            }
        };
        if again {
            Err(Error::bad(path, &field, "each key once", format_args!("{key} twice")))
        } else {
            Ok(())
        }
    })?;
    let missing = |key: &str| Error::bad(path, &field, format_args!("the key {key}"), "nothing");
    let dtype = dtype.ok_or_else(|| missing("dtype"))?;
    let shape = shape.ok_or_else(|| missing("shape"))?;
    let range = range.ok_or_else(|| missing("data_offsets"))?;
    let &[begin, end] = range.as_slice() else {
        return Err(Error::bad(path, &field, "two data_offsets", format_args!("{range:?}")));
    };
    let Some(size) = dtype_bytes(&dtype) else {
        return Err(Error::bad(path, &field, "a dtype such as F32, BF16, F8_E4M3", dtype));
    };
    if shape.iter().any(|&d| d == 0 || d > limits::WIDTH_MAX as u64) {
        let expected = format!("dimensions from 1 to {}", limits::WIDTH_MAX);
        return Err(Error::bad(path, &field, expected, format_args!("shape {shape:?}")));
    }
    let bytes = shape.iter().try_fold(size, |n, &d| n.checked_mul(d));
    if begin > end || bytes != Some(end - begin) {
        let expected =
            bytes.map_or("a size under 2^64".to_owned(), |n| format!("{n} bytes for {dtype} {shape:?}"));
        return Err(Error::bad(path, &field, expected, format_args!("data_offsets [{begin}, {end}]")));
    }
    let dims = shape.iter().map(|&d| d as usize).collect();
    Ok(Entry { name, dtype, dims, offset: begin, len: end - begin })
}

fn ints(s: &mut Scan, path: &Path, field: &str, what: &str, max: usize) -> Result<Vec<u64>> {
    let mut out = Vec::new();
    s.expect(b'[')?;
    s.items(b']', |s| {
        if out.len() == max {
            return Err(Error::bad(path, field, format_args!("at most {max} numbers in {what}"), "more"));
        }
        out.push(s.u64(&format!("{field}: {what}"))?);
        Ok(())
    })?;
    Ok(out)
}

/// Sorts entries by their data, makes offsets absolute and checks that the data is covered without gap or overlap.
fn place(entries: &mut [Entry], path: &Path, data_start: u64, file_len: u64) -> Result<()> {
    entries.sort_by_key(|e| e.offset);
    let mut at = 0;
    let data_len = file_len - data_start;
    for e in entries.iter_mut() {
        let field = || format!("tensor {}: data_offsets", e.name);
        if e.offset != at {
            let expected = format!("a start at {at}, where the tensor before it ends");
            return Err(Error::bad(path, field(), expected, e.offset));
        }
        at = e.offset + e.len;
        if at > data_len {
            return Err(Error::bad(
                path,
                field(),
                format_args!("an end of at most {data_len}, the file's data"),
                at,
            ));
        }
        e.offset += data_start;
    }
    if at != data_len {
        let expected = format!("{data_len} bytes of tensors, the rest of the file");
        return Err(Error::bad(path, "safetensors header", expected, at));
    }
    Ok(())
}

impl Entry {
    /// The tensor with its codec; `path` names the file when its type is none that Tegu reads.
    pub fn tensor(self, path: &Path) -> Result<TensorInfo> {
        let codec = match self.dtype.as_str() {
            "F32" => Codec::F32,
            "F16" => Codec::F16,
            "BF16" => Codec::BF16,
            "F8_E4M3" => Codec::F8E4M3,
            other => {
                let field = format!("tensor {}", self.name);
                return Err(Error::bad(path, field, "dtype F32, F16, BF16 or F8_E4M3", other));
            }
        };
        if self.dims.len() > limits::DIMS_MAX {
            let expected = format!("at most {} dimensions", limits::DIMS_MAX);
            return Err(Error::bad(path, format_args!("tensor {}", self.name), expected, self.dims.len()));
        }
        // A scalar is a row of one.
        let dims = if self.dims.is_empty() { vec![1] } else { self.dims };
        Ok(TensorInfo { name: self.name, codec, dims, offset: self.offset, len: self.len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::input::NamedBytes;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut b = (header.len() as u64).to_le_bytes().to_vec();
        b.extend(header.bytes());
        b.resize(b.len() + data, 0);
        b
    }

    fn parsed(bytes: &[u8]) -> Result<Vec<Entry>> {
        parse(&NamedBytes { path: Path::new("m.safetensors"), bytes })
    }

    #[test]
    fn reads_entries_in_data_order() {
        let h = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},
            "a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   "#;
        let e = parsed(&file(h, 20)).unwrap();
        assert_eq!(e.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((e[1].offset, e[1].len), (8 + h.len() as u64 + 8, 12));
        assert_eq!(e[1].clone().tensor(Path::new("x")).unwrap().codec, Codec::BF16);
    }

    #[test]
    fn refuses_what_cannot_be_right() {
        let one = |dtype: &str, shape: &str, range: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{range}}}}}"#)
        };
        for (header, data, says) in [
            (one("F32", "[2]", "[0,8]"), 9, "9 bytes of tensors"),
            (one("F32", "[2]", "[0,8]"), 7, "an end of at most 7"),
            (one("F32", "[2]", "[4,12]"), 12, "a start at 0"),
            (one("F32", "[2]", "[8,0]"), 8, "8 bytes for F32 [2]"),
            (one("F32", "[3]", "[0,8]"), 8, "12 bytes for F32 [3]"),
            (one("F32", "[2]", "[-8,0]"), 8, "data_offsets: an integer from 0"),
            (one("F32", "[268435456,268435456,268435456]", "[0,8]"), 8, "a size under 2^64"),
            (one("Q9", "[2]", "[0,8]"), 8, "a dtype"),
            (one("F32", "[2]", "[0,8,9]"), 8, "at most 2 numbers"),
            (one("F32", "\"x\"", "[0,8]"), 8, "expected '['"),
            ("[]".to_owned(), 0, "expected '{'"),
            ("{\"a\":{}}".to_owned(), 0, "the key dtype"),
            (" ".repeat(64), 0, "its end"),
        ] {
            let e = parsed(&file(&header, data)).unwrap_err().to_string();
            assert!(e.contains(says), "{header}: {e}");
        }
        assert!(parsed(&u64::MAX.to_le_bytes()).unwrap_err().to_string().contains("header length"));
        assert!(parsed(&100u64.to_le_bytes()).unwrap_err().to_string().contains("header length"));
        assert!(parsed(&[1, 2]).unwrap_err().to_string().contains("header length"));
    }
}
