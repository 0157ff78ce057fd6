//! GGUF metadata: typed values, and getters whose errors name file, key, expected and found.

use crate::units::{Error, Result, one_line};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A GGUF value type, by its number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)] // the names are the documentation
pub enum Type {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl Type {
    /// The type with this number.
    pub fn from_number(n: u32) -> Option<Type> {
        use Type::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64].get(n as usize).copied()
    }

    /// Bytes of one scalar; `None` for strings and arrays.
    pub fn scalar_bytes(self) -> Option<usize> {
        match self {
            Type::U8 | Type::I8 | Type::Bool => Some(1),
            Type::U16 | Type::I16 => Some(2),
            Type::U32 | Type::I32 | Type::F32 => Some(4),
            Type::U64 | Type::I64 | Type::F64 => Some(8),
            Type::Str | Type::Array => None,
        }
    }

    /// The name that messages show.
    pub fn name(self) -> &'static str {
        match self {
            Type::U8 => "u8",
            Type::I8 => "i8",
            Type::U16 => "u16",
            Type::I16 => "i16",
            Type::U32 => "u32",
            Type::I32 => "i32",
            Type::F32 => "f32",
            Type::Bool => "bool",
            Type::Str => "string",
            Type::Array => "array",
            Type::U64 => "u64",
            Type::I64 => "i64",
            Type::F64 => "f64",
        }
    }
}

/// Many strings in one buffer. A vocabulary has hundreds of thousands, and a `String` each would cost several times
/// the text.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StrArray {
    text: String,
    ends: Vec<u32>,
}

impl StrArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True without strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, if there are that many.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).expect("i < len"))
    }

    /// Appends one. The caller keeps the text under 4 GiB (the reader's limit on metadata is far below).
    pub fn push(&mut self, s: &str) {
        self.text.push_str(s);
        self.ends.push(u32::try_from(self.text.len()).expect("metadata text stays under 4 GiB"));
    }

    /// Bytes of all the text.
    pub fn text_bytes(&self) -> usize {
        self.text.len()
    }
}

impl<S: AsRef<str>> FromIterator<S> for StrArray {
    fn from_iter<I: IntoIterator<Item = S>>(iter: I) -> StrArray {
        let mut out = StrArray::default();
        iter.into_iter().for_each(|s| out.push(s.as_ref()));
        out
    }
}

/// An array of scalars as the file has it: little-endian bytes, so that a hostile count cannot grow in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct ScalarArray {
    /// Element type; never a string or an array.
    pub ty: Type,
    /// `len * ty.scalar_bytes()` bytes.
    pub bytes: Vec<u8>,
}

impl ScalarArray {
    /// Builds one from i32s.
    pub fn from_i32s(v: impl IntoIterator<Item = i32>) -> ScalarArray {
        ScalarArray { ty: Type::I32, bytes: v.into_iter().flat_map(i32::to_le_bytes).collect() }
    }

    /// Builds one from u32s.
    pub fn from_u32s(v: impl IntoIterator<Item = u32>) -> ScalarArray {
        ScalarArray { ty: Type::U32, bytes: v.into_iter().flat_map(u32::to_le_bytes).collect() }
    }

    /// Builds one from bools.
    pub fn from_bools(v: impl IntoIterator<Item = bool>) -> ScalarArray {
        ScalarArray { ty: Type::Bool, bytes: v.into_iter().map(u8::from).collect() }
    }

    /// Builds one from f32s.
    pub fn from_f32s(v: impl IntoIterator<Item = f32>) -> ScalarArray {
        ScalarArray { ty: Type::F32, bytes: v.into_iter().flat_map(f32::to_le_bytes).collect() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.ty.scalar_bytes().expect("scalars only")
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements as scalar values.
    pub fn iter(&self) -> impl Iterator<Item = Value> + '_ {
        let n = self.ty.scalar_bytes().expect("scalars only");
        self.bytes.chunks_exact(n).map(|b| Value::scalar(self.ty, b))
    }
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the names are the documentation
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    U64(u64),
    I64(i64),
    F64(f64),
    Scalars(ScalarArray),
    Strs(StrArray),
}

impl Value {
    /// A scalar from its little-endian bytes, which must be as many as the type has.
    pub(super) fn scalar(ty: Type, b: &[u8]) -> Value {
        fn le<const N: usize>(b: &[u8]) -> [u8; N] {
            b.try_into().expect("length of the type")
        }
        match ty {
            Type::U8 => Value::U8(b[0]),
            Type::I8 => Value::I8(b[0] as i8),
            Type::Bool => Value::Bool(b[0] != 0),
            Type::U16 => Value::U16(u16::from_le_bytes(le(b))),
            Type::I16 => Value::I16(i16::from_le_bytes(le(b))),
            Type::U32 => Value::U32(u32::from_le_bytes(le(b))),
            Type::I32 => Value::I32(i32::from_le_bytes(le(b))),
            Type::F32 => Value::F32(f32::from_le_bytes(le(b))),
            Type::U64 => Value::U64(u64::from_le_bytes(le(b))),
            Type::I64 => Value::I64(i64::from_le_bytes(le(b))),
            Type::F64 => Value::F64(f64::from_le_bytes(le(b))),
            Type::Str | Type::Array => unreachable!("not a scalar"),
        }
    }

    /// The value as an integer, if it is one of any width.
    pub fn as_int(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value as a float, if it is a number.
    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => self.as_int().map(|v| v as f64),
        }
    }

    /// A short description for messages: `u32 7`, `array of 12 strings`.
    pub fn describe(&self) -> String {
        match self {
            Value::U8(v) => format!("u8 {v}"),
            Value::I8(v) => format!("i8 {v}"),
            Value::U16(v) => format!("u16 {v}"),
            Value::I16(v) => format!("i16 {v}"),
            Value::U32(v) => format!("u32 {v}"),
            Value::I32(v) => format!("i32 {v}"),
            Value::F32(v) => format!("f32 {v}"),
            Value::Bool(v) => format!("bool {v}"),
            Value::U64(v) => format!("u64 {v}"),
            Value::I64(v) => format!("i64 {v}"),
            Value::F64(v) => format!("f64 {v}"),
            Value::Str(s) => format!("string \"{}\"", one_line(&s.chars().take(60).collect::<String>())),
            Value::Scalars(a) => format!("array of {} {}", a.len(), a.ty.name()),
            Value::Strs(a) => format!("array of {} strings", a.len()),
        }
    }
}

/// A file's metadata: key and value pairs in file order.
#[derive(Debug, Clone, Default)]
pub struct Meta {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Meta {
    /// Metadata of the file at `path`, empty so far.
    pub fn new(path: &Path) -> Meta {
        Meta { path: path.to_owned(), ..Meta::default() }
    }

    /// Adds an entry; false if the key is there already.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        if self.by_key.contains_key(&key) {
            return false;
        }
        self.by_key.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        true
    }

    /// The file these entries come from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All entries in file order.
    pub fn entries(&self) -> &[(String, Value)] {
        &self.entries
    }

    /// The value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }

    /// The error that `key` should have been `expected`.
    pub fn bad(&self, key: &str, expected: &str) -> Error {
        let found = self.get(key).map_or("nothing".to_owned(), Value::describe);
        Error::bad(&self.path, key, expected, found)
    }

    fn opt<'m, T>(&'m self, key: &str, what: &str, f: impl Fn(&'m Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => f(v).map(Some).ok_or_else(|| self.bad(key, what)),
        }
    }

    fn need<T>(&self, key: &str, what: &str, v: Option<T>) -> Result<T> {
        v.ok_or_else(|| self.bad(key, what))
    }

    /// An integer of any width that fits u32, if the key is there.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.opt(key, "an integer that fits u32", |v| v.as_int()?.try_into().ok())
    }

    /// An integer of any width that fits u32.
    pub fn u32(&self, key: &str) -> Result<u32> {
        let v = self.opt_u32(key)?;
        self.need(key, "an integer that fits u32", v)
    }

    /// An integer of any width that fits usize, if the key is there.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.opt(key, "an integer of 0 or more", |v| v.as_int()?.try_into().ok())
    }

    /// An integer of any width that fits usize.
    pub fn usize(&self, key: &str) -> Result<usize> {
        let v = self.opt_usize(key)?;
        self.need(key, "an integer of 0 or more", v)
    }

    /// A finite number, if the key is there.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        self.opt(key, "a finite number", |v| Some(v.as_float()? as f32).filter(|x| x.is_finite()))
    }

    /// A finite number.
    pub fn f32(&self, key: &str) -> Result<f32> {
        let v = self.opt_f32(key)?;
        self.need(key, "a finite number", v)
    }

    /// A bool, if the key is there.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.opt(key, "a bool", |v| if let Value::Bool(b) = v { Some(*b) } else { None })
    }

    /// A string, if the key is there.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        self.opt(key, "a string", |v| if let Value::Str(s) = v { Some(s.as_str()) } else { None })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<&str> {
        let v = self.opt_str(key)?;
        self.need(key, "a string", v)
    }

    /// An array of strings, if the key is there.
    pub fn opt_strs(&self, key: &str) -> Result<Option<&StrArray>> {
        self.opt(key, "an array of strings", |v| match v {
            Value::Strs(a) => Some(a),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strs(&self, key: &str) -> Result<&StrArray> {
        let v = self.opt_strs(key)?;
        self.need(key, "an array of strings", v)
    }

    /// An array of integers of any width, if the key is there.
    pub fn opt_ints(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.opt(key, "an array of integers", |v| match v {
            Value::Scalars(a) => a.iter().map(|v| v.as_int()?.try_into().ok()).collect(),
            // An empty array has no element type worth arguing about.
            Value::Strs(a) if a.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    /// An array of bools, or of integers of which 0 is false, if the key is there.
    pub fn opt_flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.opt(key, "an array of bools", |v| match v {
            Value::Scalars(a) => a
                .iter()
                .map(|v| match v {
                    Value::Bool(b) => Some(b),
                    v => v.as_int().map(|n| n != 0),
                })
                .collect(),
            _ => None,
        })
    }

    /// An array of numbers, if the key is there.
    pub fn opt_floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.opt(key, "an array of numbers", |v| match v {
            Value::Scalars(a) => a.iter().map(|v| Some(v.as_float()? as f32)).collect(),
            Value::Strs(a) if a.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    /// A value a layer: one integer for all `layers`, or an array of that many.
    pub fn opt_per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let what = format!("an integer of 0 or more, or an array of {layers} of them");
        self.opt(key, &what, |v| match v {
            Value::Scalars(a) if a.len() == layers => a.iter().map(|v| v.as_int()?.try_into().ok()).collect(),
            v => Some(vec![v.as_int()?.try_into().ok()?; layers]),
        })
    }
}
