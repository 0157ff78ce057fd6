//! Python's printf: `'%-5s|%05.1f' % (a, b)`, and by name: `'%(a)s' % {'a': 1}`.
//!
//! minijinja formats one value by one field; which value a field takes, how Python converts it before, and what is an error is
//! decided here.

use super::template_args::{invalid, pay};
use super::template_env::{python_repr, python_str, quote};
use minijinja::value::{Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::Write;

/// `format % values`: a tuple is a value for each field, a mapping one for each name, anything else one value.
pub(super) fn printf(state: &mut State, format: &str, values: &Value) -> Result<String, Error> {
    let is_tuple = values.is_tuple();
    let mut left: std::vec::IntoIter<Value> = match is_tuple {
        true => values.try_iter()?.collect::<Vec<_>>().into_iter(),
        false => vec![values.clone()].into_iter(),
    };
    let (mut out, mut rest, mut named) = (String::new(), format, false);
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let (field, after) = Field::parse(&rest[at + 1..])?;
        rest = after;
        if field.kind == '%' {
            out.push('%');
            continue;
        }
        pay(state, 64)?;
        let mut next = || left.next().ok_or_else(|| invalid("not enough values for the format"));
        let width = field.width.resolve(&mut next)?;
        let precision = field.precision.as_ref().map(|p| p.resolve(&mut next)).transpose()?.flatten();
        let value = match field.key {
            None => next()?,
            Some(_) if is_tuple || values.kind() != ValueKind::Map => {
                return Err(invalid("a format with names: expected a mapping"));
            }
            Some(key) => {
                named = true;
                let found = values.get_item(&Value::from(key))?;
                if found.is_undefined() {
                    return Err(Error::new(ErrorKind::InvalidOperation, format!("no value of name {key}")));
                }
                found
            }
        };
        out.push_str(&field.apply(state, &value, width, precision)?);
    }
    out.push_str(rest);
    // A mapping, and a list, may be there for a format that does not ask for it.
    let may_stay = named || matches!(values.kind(), ValueKind::Map | ValueKind::Seq) && !is_tuple;
    if left.next().is_some() && !may_stay {
        return Err(invalid("more values than the format takes"));
    }
    Ok(out)
}

/// A width or precision: in the format, or the next value.
enum Size {
    Given(Option<i64>),
    Next,
}

impl Size {
    fn parse(rest: &str) -> Result<(Size, &str), Error> {
        if let Some(rest) = rest.strip_prefix('*') {
            return Ok((Size::Next, rest));
        }
        let (digits, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()));
        let number = (!digits.is_empty()).then(|| digits.parse()).transpose();
        Ok((Size::Given(number.map_err(|_| invalid("a width of the format is too large"))?), after))
    }

    fn resolve(&self, next: &mut impl FnMut() -> Result<Value, Error>) -> Result<Option<i64>, Error> {
        match self {
            Size::Given(n) => Ok(*n),
            Size::Next => i64::try_from(next()?).map(Some).map_err(|_| invalid("* wants a whole number")),
        }
    }
}

/// What follows a `%`.
struct Field<'a> {
    key: Option<&'a str>,
    flags: &'a str,
    width: Size,
    precision: Option<Size>,
    kind: char,
}

impl<'a> Field<'a> {
    fn parse(rest: &'a str) -> Result<(Field<'a>, &'a str), Error> {
        let incomplete = || invalid("incomplete format");
        let (key, rest) = match rest.strip_prefix('(') {
            Some(key) => key.split_once(')').map(|(k, r)| (Some(k), r)).ok_or_else(incomplete)?,
            None => (None, rest),
        };
        let (flags, rest) = rest.split_at(rest.find(|c| !"-+ #0".contains(c)).unwrap_or(rest.len()));
        let (width, rest) = Size::parse(rest)?;
        let (precision, rest) = match rest.strip_prefix('.') {
            // A dot alone is a precision of 0.
            Some(rest) => match Size::parse(rest)? {
                (Size::Given(None), rest) => (Some(Size::Given(Some(0))), rest),
                (size, rest) => (Some(size), rest),
            },
            None => (None, rest),
        };
        // C's lengths mean nothing in Python.
        let rest = rest.trim_start_matches(['h', 'l', 'L']);
        let kind = rest.chars().next().ok_or_else(incomplete)?;
        Ok((Field { key, flags, width, precision, kind }, &rest[kind.len_utf8()..]))
    }

    fn apply(
        &self,
        state: &mut State,
        value: &Value,
        width: Option<i64>,
        precision: Option<i64>,
    ) -> Result<String, Error> {
        let (mut kind, mut value) = self.converted(state, value)?;
        let (mut flags, mut precision) = (self.flags, precision.map(|p| p.max(0)));
        if let ('d', Some(digits)) = (kind, precision) {
            // Digits at least, which minijinja does not know.
            value = Value::from(self.with_digits(state, &value, digits)?);
            (kind, precision) = ('s', None);
            flags = if flags.contains('-') { "-" } else { "" };
        }
        let mut spec = String::from("%") + flags;
        if let Some(width) = width {
            // Below 0: to the left.
            spec += if width < 0 { "-" } else { "" };
            let _ = write!(spec, "{}", width.unsigned_abs());
        }
        if let Some(precision) = precision {
            let _ = write!(spec, ".{precision}");
        }
        spec.push(kind);
        let (args,): (Rest<ValueOrKwargs>,) = from_args(std::slice::from_ref(&value))?;
        Ok(minijinja::filters::format(state, &Value::from(spec), args)?.to_string())
    }

    fn with_digits(&self, state: &State, value: &Value, digits: i64) -> Result<String, Error> {
        let number = i128::try_from(value.clone()).map_err(|_| invalid("%d wants a number"))?;
        let sign = match number {
            ..0 => "-",
            _ if self.flags.contains('+') => "+",
            _ if self.flags.contains(' ') => " ",
            _ => "",
        };
        let number = number.unsigned_abs().to_string();
        let zeros = usize::try_from(digits).unwrap_or(usize::MAX).saturating_sub(number.len());
        pay(state, zeros)?;
        Ok(format!("{sign}{}{number}", "0".repeat(zeros)))
    }

    /// The value as Python has it before it is laid out, and the kind that does so.
    fn converted(&self, state: &State, value: &Value) -> Result<(char, Value), Error> {
        let text = |write: &dyn Fn(&mut String) -> Result<(), Error>| {
            let mut out = String::new();
            write(&mut out).map(|()| ('s', Value::from(out)))
        };
        let repr = |out: &mut String| match value.as_str() {
            Some(s) => {
                quote(s, out);
                Ok(())
            }
            None => python_repr(state, value, 0, out),
        };
        match self.kind {
            's' => text(&|out| python_str(state, value, out)),
            'r' => text(&repr),
            'a' => text(&|out| {
                let mut all = String::new();
                repr(&mut all)?;
                all.chars().for_each(|c| ascii(c, out));
                Ok(())
            }),
            'd' | 'i' | 'u' if value.kind() == ValueKind::Number && !value.is_integer() => {
                let cut = f64::try_from(value.clone())?.trunc();
                if cut.abs() < 1e38 {
                    Ok(('d', Value::from(cut as i128)))
                } else {
                    Err(invalid("%d wants a number that a whole one can hold"))
                }
            }
            'd' | 'i' | 'u' => Ok(('d', value.clone())),
            other => Ok((other, value.clone())),
        }
    }
}

/// A character as `ascii()` writes it.
fn ascii(c: char, out: &mut String) {
    let _ = match c as u32 {
        0..0x80 => write!(out, "{c}"),
        n @ 0x80..0x100 => write!(out, "\\x{n:02x}"),
        n @ 0x100..0x10000 => write!(out, "\\u{n:04x}"),
        n => write!(out, "\\U{n:08x}"),
    };
}
