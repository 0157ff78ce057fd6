//! A config.json read with errors that name the key, what was expected and what is there.

use crate::units::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// A JSON object of a Hugging Face folder.
#[derive(Clone, Copy)]
pub struct Json<'a> {
    /// The file, for messages.
    pub path: &'a Path,
    /// Where in the file this object is: empty, or `rope_parameters.`.
    pub prefix: &'static str,
    /// The object.
    pub value: &'a Value,
}

impl<'a> Json<'a> {
    /// The value under `key`; JSON null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// The error that `key` should have been `expected`.
    pub fn bad(&self, key: &str, expected: impl std::fmt::Display) -> Error {
        let found = self.get(key).map_or("nothing".to_owned(), Value::to_string);
        Error::bad(self.path, format_args!("{}{key}", self.prefix), expected, found)
    }

    fn opt<T>(&self, key: &str, what: &str, f: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => f(v).map(Some).ok_or_else(|| self.bad(key, what)),
        }
    }

    /// A bool, if the key is there.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.opt(key, "true or false", Value::as_bool)
    }

    /// A string, if the key is there.
    pub fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        self.opt(key, "a string", Value::as_str)
    }

    /// An object, if the key is there.
    pub fn opt_object(&self, key: &'static str, prefix: &'static str) -> Result<Option<Json<'a>>> {
        let value = self.opt(key, "an object", |v| v.is_object().then_some(v))?;
        Ok(value.map(|value| Json { path: self.path, prefix, value }))
    }
}
