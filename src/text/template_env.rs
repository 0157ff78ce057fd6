//! The environment that chat templates expect: Jinja2 as Hugging Face transformers sets it up, on minijinja.
//!
//! What is put back: `tojson` with Python's layout and no HTML escapes; values printed as Python prints them (`True`,
//! `None`, `{'a': 1}`); `raise_exception` and `strftime_now`; and, each in a file of its own, Python's methods, Jinja2's
//! filters and the `%` operator.
//!
//! Known gap: minijinja joins lists lazily and charges no fuel for it, so a template written to double a list 33 times is
//! not stopped before memory is. Strings, nesting, loops and recursion are all bounded.

use super::template_args::invalid;
use super::{template_filters, template_methods, template_percent};
use crate::limits::TEMPLATE_FUEL_MAX;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value};
use std::fmt::Write;

/// Nested values are walked by recursion: JSON from outside is at most 128 deep, a template's own may not be deeper.
const DEPTH_MAX: usize = 160;
/// Nested calls of a template's macros. Published ones stay under 10; each level costs several kilobytes of stack.
const RECURSION_MAX: usize = 200;

/// An environment with nothing in it but the functions.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("the standard delimiters"));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_fuel(Some(TEMPLATE_FUEL_MAX));
    env.set_recursion_limit(RECURSION_MAX);
    env.set_unknown_method_callback(template_methods::method);
    env.set_formatter(|out, state, value| {
        if let Some(s) = value.as_str() {
            return Ok(out.write_str(s)?);
        }
        let mut text = String::new();
        python_str(state, value, &mut text)?;
        Ok(out.write_str(&text)?)
    });
    env.add_function("raise_exception", raise_exception);
    env.add_filter("tojson", tojson);
    // minijinja iterates over none as over nothing; in Python it is not iterable, and templates ask before `tools|length`.
    env.add_test("iterable", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
    });
    env.add_filter("string", |state: &State, value: &Value| {
        let mut text = String::new();
        python_str(state, value, &mut text).map(|()| text)
    });
    template_filters::add(&mut env);
    template_percent::add(&mut env);
    env
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

/// A JSON value as a template's value, keys in order.
pub(super) fn from_json(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(list) => Value::from(list.iter().map(from_json).collect::<Vec<_>>()),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), from_json(v)))),
    }
}

/// Python's `json.dumps`, whose layout models were trained on.
struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as transformers defines it: it does not
/// escape HTML, unlike Jinja2's own.
fn tojson(state: &State, value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    // Positional arguments come in the order above.
    let arg = |i: usize, name: &str| match args.get(i) {
        Some(v) => Ok(Some(v.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let ensure_ascii = arg(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match arg(1, "indent")?.filter(|v| !v.is_none()) {
        // A bound, since each level of each line is written out.
        Some(v) => {
            Some(v.as_usize().filter(|n| *n <= 64).ok_or_else(|| invalid("indent: expected 0 to 64"))?)
        }
        None => None,
    };
    let (item_separator, key_separator) = match arg(2, "separators")?.filter(|v| !v.is_none()) {
        Some(v) => {
            let part = |i| v.get_item_by_index(i).ok().and_then(|s| s.as_str().map(str::to_owned));
            part(0).zip(part(1)).ok_or_else(|| invalid("separators: expected two strings"))?
        }
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let sort_keys = arg(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let style = JsonStyle { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut out = String::new();
    style.write(state, value, 0, &mut out)?;
    Ok(Value::from(out))
}

impl JsonStyle {
    fn write(&self, state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid("tojson: nested too deeply"));
        }
        state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => push_number(value, out),
            ValueKind::String => {
                let s = value.as_str().unwrap_or_default();
                state.consume_fuel(s.len() as u64 / 64)?;
                self.string(s, out);
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((json_key(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(b"{}", pairs.into_iter(), depth, out, |(key, v), out| {
                    self.string(&key, out);
                    out.push_str(&self.key_separator);
                    self.write(state, &v, depth + 1, out)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.list(b"[]", value.try_iter()?, depth, out, |v, out| {
                    self.write(state, &v, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: {kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    /// Items between brackets, each on a line of its own where there is an indent.
    fn list<T>(
        &self,
        brackets: &[u8; 2],
        items: impl Iterator<Item = T>,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |levels: usize, out: &mut String| {
            if let Some(n) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', n * levels));
            }
        };
        out.push(brackets[0] as char);
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                out.push_str(&self.item_separator);
            }
            is_empty = false;
            new_line(depth + 1, out);
            write(item, out)?;
        }
        if !is_empty {
            new_line(depth, out);
        }
        out.push(brackets[1] as char);
        Ok(())
    }

    fn string(&self, s: &str, out: &mut String) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{C}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A key of an object: Python turns numbers, booleans and None into their JSON text.
fn json_key(key: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match key.kind() {
        ValueKind::String => out.push_str(key.as_str().unwrap_or_default()),
        ValueKind::Number => push_number(key, &mut out),
        ValueKind::Bool => out.push_str(if key.is_true() { "true" } else { "false" }),
        ValueKind::None => out.push_str("null"),
        _ => return Err(invalid("tojson: a key is no string")),
    }
    Ok(out)
}

/// A number as Python's `repr` writes it, which is also what `json.dumps` does.
fn push_number(value: &Value, out: &mut String) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
        return;
    }
    let f = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    let magnitude = f.abs();
    let _ = match () {
        () if f.is_nan() => write!(out, "NaN"),
        () if f.is_infinite() => write!(out, "{}Infinity", if f < 0.0 { "-" } else { "" }),
        // Python leaves plain notation at 1e16 and below 1e-4; the exponent has a sign and at least two digits.
        () if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) => {
            let text = format!("{f:e}");
            let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let exponent: i32 = exponent.parse().unwrap_or(0);
            let sign = if exponent < 0 { '-' } else { '+' };
            write!(out, "{mantissa}e{sign}{:02}", exponent.abs())
        }
        () => write!(out, "{f:?}"),
    };
}

/// Python's `str(value)`.
pub(super) fn python_str(state: &State, value: &Value, out: &mut String) -> Result<(), Error> {
    match value.as_str() {
        Some(s) => out.push_str(s),
        None => python_repr(state, value, 0, out)?,
    }
    Ok(())
}

/// Python's `repr(value)`, of the types that JSON has; other values as minijinja prints them.
pub(super) fn python_repr(state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(invalid("value nested too deeply"));
    }
    state.consume_fuel(1)?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            // JSON has other words for these.
            Ok(f) if f.is_nan() => out.push_str("nan"),
            Ok(f) if f.is_infinite() => out.push_str(if f < 0.0 { "-inf" } else { "inf" }),
            _ => push_number(value, out),
        },
        ValueKind::Number => push_number(value, out),
        ValueKind::String if depth > 0 => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(state, &item, depth + 1, out)?;
            }
            // (1,) is a tuple, (1) a number in brackets.
            out.push_str(if value.is_tuple() && value.len() == Some(1) { "," } else { "" });
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(state, &key, depth + 1, out)?;
                out.push_str(": ");
                python_repr(state, &value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// Python's quotes: single, unless there are single ones and no double ones inside.
pub(super) fn quote(s: &str, out: &mut String) {
    let mark = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => out.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// The clock that `strftime_now` reads: seconds since 1970, or none for the machine's.
pub(super) struct Now(pub Option<i64>);

impl Now {
    /// The function, as a variable of one run. Time is UTC: a robot's time zone is no business of the model's.
    pub fn into_value(self) -> Value {
        let fixed = self.0;
        Value::from_function(move |format: &str| {
            let clock = || {
                std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
            };
            strftime(fixed.unwrap_or_else(|| clock() as i64), format)
        })
    }
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// C's `strftime` in the C locale, for the directives that dates in prompts use.
fn strftime(unix_s: i64, format: &str) -> Result<String, Error> {
    let (days, second) = (unix_s.div_euclid(86_400), unix_s.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let weekday = (days + 4).rem_euclid(7) as usize; // 1970-01-01 was a Thursday
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let year_day = days - days_before(year, 1, 1) + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc: `%-d` leaves the padding out.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let mut two = |n: i64| if bare { write!(out, "{n}") } else { write!(out, "{n:02}") };
        let _ = match directive {
            Some('d') => two(day),
            Some('m') => two(month),
            Some('y') => two(year.rem_euclid(100)),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('e') => write!(out, "{day:2}"),
            Some('j') => write!(out, "{year_day:03}"),
            Some('Y') => write!(out, "{year}"),
            Some('B') => write!(out, "{}", MONTHS[month as usize - 1]),
            Some('b' | 'h') => write!(out, "{}", &MONTHS[month as usize - 1][..3]),
            Some('A') => write!(out, "{}", DAYS[weekday]),
            Some('a') => write!(out, "{}", &DAYS[weekday][..3]),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('s') => write!(out, "{unix_s}"),
            Some('%') => write!(out, "%"),
            other => {
                let text =
                    format!("strftime_now: no directive %{}", other.map(String::from).unwrap_or_default());
                return Err(Error::new(ErrorKind::InvalidOperation, text));
            }
        };
    }
    Ok(out)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar (years start in March here, so that the leap day is last).
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let of_era = y.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The date (year, month 1-12, day 1-31) of a day counted from 1970-01-01: the inverse of [`days_before`].
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let of_era = z.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + z.div_euclid(146_097) * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for days in (-800_000..800_000).step_by(37) {
            let (y, m, d) = civil(days);
            assert_eq!(days_before(y, m, d), days);
            assert!((1..=12).contains(&m) && (1..=31).contains(&d));
        }
        let f = "%A, %d %B %Y %a %b %-d %e %H:%M:%S %I%p %y %j %F %T 100%%";
        // `date -u -d @1709210096 +...`
        let want = "Thursday, 29 February 2024 Thu Feb 29 29 12:34:56 12PM 24 060 2024-02-29 12:34:56 100%";
        assert_eq!(strftime(1_709_210_096, f).unwrap(), want);
        assert_eq!(strftime(-1, "%d %b %Y %-I %p").unwrap(), "31 Dec 1969 11 PM");
        assert!(strftime(0, "%Q").is_err() && strftime(0, "%").is_err());
    }

    #[test]
    fn numbers_are_pythons() {
        // repr(x) for each
        let table = [
            (0.1, "0.1"),
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (0.0, "0.0"),
            (123456789.125, "123456789.125"),
        ];
        for (x, want) in table {
            let mut out = String::new();
            push_number(&Value::from(x), &mut out);
            assert_eq!(out, want);
        }
    }
}
