//! GGUF v2 and v3: header, metadata and tensor directory, every count and offset checked before it is used.
//!
//! Source of the format: `docs/gguf.md` in the ggml repository. Tensor data is not read here.

pub use super::gguf_meta::{Meta, ScalarArray, StrArray, Type, Value};

use super::codec::Codec;
use super::input::{Cursor, Input};
use super::tensor::{TensorInfo, tensor_bytes};
use crate::limits;
use crate::units::{Error, Result, one_line};
use std::collections::HashSet;

/// The first four bytes.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of tensor data when `general.alignment` is not there.
pub const ALIGNMENT_DEFAULT: u64 = 32;
/// The key that changes it.
pub const ALIGNMENT_KEY: &str = "general.alignment";
/// Alignments above this are refused: they only waste space.
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Bytes of a key or tensor name. ggml's own limit on tensor names is 64, on keys 65,535.
const NAME_MAX: u64 = 65_535;

/// A parsed header.
#[derive(Debug, Clone)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The metadata.
    pub meta: Meta,
    /// The tensors in file order.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data starts.
    pub data_offset: u64,
}

/// Parses the header of `input`.
pub fn parse(input: &dyn Input) -> Result<Header> {
    let mut c = Cursor::new(input, 0..input.len_bytes());
    let version = preamble(&mut c)?;
    let tensor_count = count(&mut c, "tensor_count", limits::TENSORS_MAX, MIN_TENSOR_BYTES)?;
    let meta_count = count(&mut c, "metadata_kv_count", limits::META_ENTRIES_MAX, MIN_ENTRY_BYTES)?;
    let meta = metadata(&mut c, meta_count)?;
    let alignment = alignment(&meta)?;
    let mut tensors = directory(&mut c, tensor_count)?;
    let data_offset = c.position().next_multiple_of(alignment);
    place(&mut tensors, input, data_offset, alignment)?;
    Ok(Header { version, meta, tensors, data_offset })
}

/// Least bytes of a directory entry: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;
/// Least bytes of a metadata entry: key length, type, a one-byte value.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;

fn preamble(c: &mut Cursor) -> Result<u32> {
    let magic: [u8; 4] = c.array("magic")?;
    if magic != MAGIC {
        return Err(Error::bad(c.path(), "magic", "GGUF", format_args!("bytes {magic:02x?}")));
    }
    let version = c.u32("version")?;
    match version {
        2 | 3 => Ok(version),
        v if matches!(v.swap_bytes(), 1..=3) => {
            Err(Error::bad(c.path(), "version", "a little-endian GGUF", "a big-endian one"))
        }
        v => Err(Error::bad(c.path(), "version", "2 or 3", v)),
    }
}

/// A count that must stay under `max`, and whose items, at `min_bytes` each, must fit in what is left of the file.
fn count(c: &mut Cursor, field: &str, max: u64, min_bytes: u64) -> Result<usize> {
    let n = c.u64(field)?;
    if n > max {
        return Err(Error::bad(c.path(), field, format_args!("at most {max}"), n));
    }
    if n * min_bytes > c.left() {
        let found = format!("{n} in a file with {} bytes left", c.left());
        return Err(Error::bad(c.path(), field, format_args!("at most {}", c.left() / min_bytes), found));
    }
    Ok(n as usize)
}

fn string(c: &mut Cursor, field: &str, max: u64) -> Result<String> {
    let len = c.u64(field)?;
    let bytes = c.bytes(field, len, max)?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::bad(c.path(), field, "UTF-8 text", format_args!("byte 0x{:02x} at {at}", e.as_bytes()[at]))
    })
}

fn metadata(c: &mut Cursor, n: usize) -> Result<Meta> {
    let start = c.position();
    let mut meta = Meta::new(c.path());
    for i in 0..n {
        let key = string(c, &format!("metadata key {i}"), NAME_MAX)?;
        let value = value(c, &key)?;
        if !meta.insert(key.clone(), value) {
            return Err(Error::bad(c.path(), key, "a key once", "it twice"));
        }
        let used = c.position() - start;
        if used > limits::META_BYTES_MAX {
            let expected = format!("at most {} bytes", limits::META_BYTES_MAX);
            return Err(Error::bad(c.path(), "metadata", expected, format_args!("{used} or more")));
        }
    }
    Ok(meta)
}

fn value(c: &mut Cursor, key: &str) -> Result<Value> {
    let ty = value_type(c, key)?;
    match ty {
        Type::Str => Ok(Value::Str(string(c, key, limits::META_STRING_MAX)?)),
        Type::Array => array(c, key),
        _ => {
            let mut b = [0; 8];
            let n = ty.scalar_bytes().expect("a scalar");
            c.take(key, &mut b[..n])?;
            if ty == Type::Bool && b[0] > 1 {
                return Err(Error::bad(c.path(), key, "a bool, 0 or 1", b[0]));
            }
            Ok(Value::scalar(ty, &b[..n]))
        }
    }
}

fn value_type(c: &mut Cursor, key: &str) -> Result<Type> {
    let n = c.u32(key)?;
    let bad = || Error::bad(c.path(), one_line(key), "a value type from 0 to 12", format_args!("type {n}"));
    Type::from_number(n).ok_or_else(bad)
}

fn array(c: &mut Cursor, key: &str) -> Result<Value> {
    let ty = value_type(c, key)?;
    if ty == Type::Array {
        return Err(Error::bad(c.path(), key, "an array of scalars or strings", "an array of arrays"));
    }
    let min_bytes = ty.scalar_bytes().unwrap_or(8) as u64;
    let n = count(c, key, limits::META_ARRAY_MAX, min_bytes)?;
    if let Some(size) = ty.scalar_bytes() {
        let bytes = c.bytes(key, (n * size) as u64, u64::MAX)?;
        return Ok(Value::Scalars(ScalarArray { ty, bytes }));
    }
    let mut strs = StrArray::default();
    for _ in 0..n {
        strs.push(&string(c, key, limits::META_STRING_MAX)?);
        // The text must stay addressable by u32, whatever a hostile file holds.
        if strs.text_bytes() as u64 > limits::META_BYTES_MAX {
            let expected = format!("at most {} bytes of strings", limits::META_BYTES_MAX);
            return Err(Error::bad(c.path(), key, expected, format_args!("{} or more", strs.text_bytes())));
        }
    }
    Ok(Value::Strs(strs))
}

fn alignment(meta: &Meta) -> Result<u64> {
    let a = meta.opt_u32(ALIGNMENT_KEY)?.map_or(ALIGNMENT_DEFAULT, u64::from);
    if !a.is_power_of_two() || a > ALIGNMENT_MAX {
        return Err(meta.bad(ALIGNMENT_KEY, "a power of two of at most 1048576"));
    }
    Ok(a)
}

/// Reads the directory; offsets are still relative to the data section.
fn directory(c: &mut Cursor, n: usize) -> Result<Vec<TensorInfo>> {
    let mut tensors = Vec::with_capacity(n);
    let mut names = HashSet::with_capacity(n);
    for i in 0..n {
        let name = string(c, &format!("name of tensor {i}"), NAME_MAX)?;
        if !names.insert(name.clone()) {
            return Err(Error::bad(c.path(), format_args!("tensor {name}"), "a name once", "it twice"));
        }
        tensors.push(tensor(c, name)?);
    }
    Ok(tensors)
}

fn tensor(c: &mut Cursor, name: String) -> Result<TensorInfo> {
    let field = format!("tensor {name}");
    let n_dims = c.u32(&field)? as usize;
    if n_dims == 0 || n_dims > limits::DIMS_MAX {
        let expected = format!("1 to {} dimensions", limits::DIMS_MAX);
        return Err(Error::bad(c.path(), field, expected, n_dims));
    }
    let mut dims = Vec::with_capacity(n_dims);
    for _ in 0..n_dims {
        let d = c.u64(&field)?;
        if d == 0 || d > limits::WIDTH_MAX as u64 {
            let expected = format!("dimensions from 1 to {}", limits::WIDTH_MAX);
            return Err(Error::bad(c.path(), field, expected, d));
        }
        dims.push(d as usize);
    }
    dims.reverse();
    let ty = c.u32(&field)?;
    let Some(codec) = Codec::from_ggml(ty) else {
        return Err(Error::bad(c.path(), field, "a codec Tegu reads", format_args!("ggml_type {ty}")));
    };
    let offset = c.u64(&field)?;
    let len = tensor_bytes(codec, &dims).ok_or_else(|| {
        let expected = format!("rows of a multiple of {} for {}", codec.info().block_len, codec.name());
        Error::bad(c.path(), &field, expected, format_args!("shape {dims:?}"))
    })?;
    Ok(TensorInfo { name, codec, dims, offset, len })
}

/// Makes offsets absolute; checks that each tensor is aligned, inside the file, and alone in its bytes.
fn place(tensors: &mut [TensorInfo], input: &dyn Input, data_offset: u64, alignment: u64) -> Result<()> {
    let path = input.path();
    for t in tensors.iter_mut() {
        let field = || format!("offset of tensor {}", t.name);
        if !t.offset.is_multiple_of(alignment) {
            return Err(Error::bad(path, field(), format_args!("a multiple of {alignment}"), t.offset));
        }
        let start = data_offset.checked_add(t.offset);
        let end = start.and_then(|s| s.checked_add(t.len));
        if end.is_none_or(|e| e > input.len_bytes()) {
            let expected = format!("{} bytes inside a file of {}", t.len, input.len_bytes());
            return Err(Error::bad(path, field(), expected, format_args!("{data_offset} + {}", t.offset)));
        }
        t.offset += data_offset;
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        let end = pair[0].offset + pair[0].len;
        if pair[1].offset < end {
            let expected = format!("at least {end}, the end of {}", pair[0].name);
            let field = format!("offset of tensor {}", pair[1].name);
            return Err(Error::bad(path, field, expected, pair[1].offset));
        }
    }
    Ok(())
}
