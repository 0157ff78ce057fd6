//! A JSON object read strictly: every field by its type and range, every unknown one refused by name.

use super::fail::Fail;
use crate::config::nearest;
use serde_json::{Map, Value};
use std::cell::RefCell;

/// What a handler answers with.
pub type Answered<T> = std::result::Result<T, Fail>;

/// An object, and which of its fields were asked for.
pub struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
    asked: RefCell<Vec<&'static str>>,
}

/// A value's type in words, for messages; text is shown.
pub fn found(v: &Value) -> String {
    match v {
        Value::Null => "null".into(),
        Value::Array(a) => format!("an array of {}", a.len()),
        Value::Object(_) => "an object".into(),
        other => other.to_string(),
    }
}

impl<'a> Fields<'a> {
    /// The fields of a request's body.
    pub fn of_body(body: &'a Value) -> Answered<Fields<'a>> {
        Fields::of(String::new(), body)
    }

    /// The fields of the object at `path`.
    pub fn of(path: String, value: &'a Value) -> Answered<Fields<'a>> {
        match value.as_object() {
            Some(map) => Ok(Fields { path, map, asked: RefCell::default() }),
            None if path.is_empty() => Err(Fail::field("body", "a JSON object", found(value))),
            None => Err(Fail::field(path, "an object", found(value))),
        }
    }

    /// The name of a field with the way to it: `messages[0].role`.
    pub fn at(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// A field's value; null is the same as none.
    pub fn get(&self, name: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().push(name);
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn typed<T>(
        &self,
        name: &'static str,
        expected: impl std::fmt::Display,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Answered<Option<T>> {
        let Some(v) = self.get(name) else { return Ok(None) };
        read(v).map(Some).ok_or_else(|| Fail::field(self.at(name), expected, found(v)))
    }

    /// Text.
    pub fn text(&self, name: &'static str) -> Answered<Option<&'a str>> {
        self.typed(name, "text", Value::as_str)
    }

    /// Text that must be there.
    pub fn required_text(&self, name: &'static str) -> Answered<&'a str> {
        self.text(name)?.ok_or_else(|| Fail::field(self.at(name), "text", "nothing"))
    }

    /// True or false.
    pub fn flag(&self, name: &'static str) -> Answered<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A whole number in a range.
    pub fn count(&self, name: &'static str, low: u64, high: u64) -> Answered<Option<u64>> {
        let expected = format!("a whole number from {low} to {high}");
        // Some clients write 16.0 for 16.
        let whole = |v: &Value| {
            v.as_u64().or_else(|| v.as_f64().filter(|x| *x >= 0.0 && x.fract() == 0.0).map(|x| x as u64))
        };
        self.typed(name, expected, |v| whole(v).filter(|n| (low..=high).contains(n)))
    }

    /// A number in a range.
    pub fn real(&self, name: &'static str, low: f64, high: f64) -> Answered<Option<f64>> {
        let expected = format!("a number from {low} to {high}");
        self.typed(name, expected, |v| v.as_f64().filter(|x| (low..=high).contains(x)))
    }

    /// An array.
    pub fn array(&self, name: &'static str) -> Answered<Option<&'a Vec<Value>>> {
        self.typed(name, "an array", Value::as_array)
    }

    /// An object, as fields of its own.
    pub fn object(&self, name: &'static str) -> Answered<Option<Fields<'a>>> {
        self.get(name).map(|v| Fields::of(self.at(name), v)).transpose()
    }

    /// One of some words.
    pub fn word(&self, name: &'static str, words: &[&'static str]) -> Answered<Option<&'static str>> {
        let expected = format!("one of {}", words.join(", "));
        self.typed(name, expected, |v| {
            let text = v.as_str()?;
            words.iter().copied().find(|w| *w == text)
        })
    }

    /// An object whose fields are someone else's; none is an empty one.
    pub fn map(&self, name: &'static str) -> Answered<Map<String, Value>> {
        Ok(self.typed(name, "an object", Value::as_object)?.cloned().unwrap_or_default())
    }

    /// Text or an array of texts, at most `most`.
    pub fn texts(&self, name: &'static str, most: usize) -> Answered<Vec<String>> {
        let list = self.get(name).and_then(Value::as_array).filter(|a| a.len() <= most);
        if let Some((i, v)) = list.and_then(|a| a.iter().enumerate().find(|(_, v)| !v.is_string())) {
            return Err(Fail::field(format!("{}[{i}]", self.at(name)), "text", found(v)));
        }
        let texts = |v: &Value| match v {
            Value::String(s) => Some(vec![s.clone()]),
            Value::Array(a) if a.len() <= most => a.iter().map(|s| s.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        let expected = format!("text or an array of at most {most} texts");
        Ok(self.typed(name, expected, texts)?.unwrap_or_default())
    }

    /// Refuses what was never asked for. `ignored` are fields that clients send and that change nothing here.
    pub fn done(&self, ignored: &[&'static str]) -> Answered<()> {
        let asked = self.asked.borrow();
        let known = |k: &str| asked.contains(&k) || ignored.contains(&k);
        // Some clients write every field that they know, with null for what they do not mean.
        let mut there = self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k);
        let Some(unknown) = there.find(|k| !known(k)) else { return Ok(()) };
        let hint = match nearest(unknown, &asked) {
            Some(near) => format!("a known field (did you mean {near}?)"),
            None => "a known field".into(),
        };
        Err(Fail::field(self.at(unknown), hint, "an unknown one"))
    }
}

#[test]
fn mistakes_are_named_with_their_path() {
    let body = serde_json::json!({"a": {"n": 3, "tempreature": 1}, "s": ["x", 2], "x": null});
    let fields = Fields::of_body(&body).unwrap();
    let a = fields.object("a").unwrap().unwrap();
    assert_eq!(a.count("n", 1, 3).unwrap(), Some(3));
    assert_eq!(a.count("n", 5, 9).unwrap_err().param.as_deref(), Some("a.n"));
    a.real("temperature", 0.0, 1.0).unwrap();
    let e = a.done(&[]).unwrap_err();
    assert_eq!(e.param.as_deref(), Some("a.tempreature"));
    assert!(e.message.contains("did you mean temperature?"), "{}", e.message);
    assert!(fields.texts("s", 4).unwrap_err().message.contains("s[1]: expected text, found 2"));
    assert!(fields.texts("s", 1).unwrap_err().message.contains("found an array of 2"));
    assert_eq!(fields.text("x").unwrap(), None);
    assert!(fields.done(&[]).is_ok());
    assert!(Fields::of_body(&serde_json::json!([])).is_err());
}
