//! Jinja2's filters and functions that minijinja lacks, or has without some arguments.

use super::template_args::{Args, invalid, pay};
use super::template_methods::{lines, pad};
use super::template_printf::printf;
use minijinja::value::{Object, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) fn add(env: &mut Environment) {
    env.add_filter("truncate", truncate);
    env.add_filter("wordcount", |value: &Value| {
        let text = value.to_string();
        text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|w| !w.is_empty()).count()
    });
    env.add_filter("center", |state: &State, value: &Value, args: Passed| {
        let a = Args::of_passed(args)?;
        let width = a.int(0, "width")?.unwrap_or(80);
        a.done(1)?;
        pad(state, &value.to_string(), "center", width, None)
    });
    env.add_filter("striptags", |value: &Value| strip_tags(&value.to_string()));
    env.add_filter("indent", indent);
    env.add_filter("filesizeformat", minijinja_contrib::filters::filesizeformat);
    env.add_filter("urlencode", |value: &Value| url_encode(value));
    env.add_filter("format", |state: &mut State, format: &Value, args: Passed| {
        let (by_place, by_name) = Args::of_passed(args)?.into_parts();
        let named =
            by_name.args().map(|n| Ok((n, by_name.get::<Value>(n)?))).collect::<Result<Vec<_>, Error>>()?;
        if !named.is_empty() && !by_place.is_empty() {
            return Err(invalid("format: expected values, or names with values, not both"));
        }
        let values = if named.is_empty() { Tuple::from(by_place).into() } else { Value::from_pairs(named) };
        printf(state, &format.to_string(), &values)
    });
    env.add_filter("int", int);
    env.add_filter("float", |value: &Value, args: Passed| {
        let a = Args::of_passed(args)?;
        let default = a.get(0, "default")?.unwrap_or_else(|| Value::from(0.0));
        a.done(1)?;
        Ok::<_, Error>(real(value).map_or(default, Value::from))
    });
    // Functions and macros; an undefined one would say so itself, as in Python.
    env.add_test("callable", |value: &Value| matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined));
    env.add_function("cycler", cycler);
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    env.add_function("namespace", namespace);
}

/// All that follows a filter's value.
type Passed = Rest<ValueOrKwargs>;

impl Args {
    fn of_passed(Rest(args): Passed) -> Result<Args, Error> {
        Args::of(&args.into_iter().map(ValueOrKwargs::into_value).collect::<Vec<_>>())
    }
}

/// `truncate(length=255, killwords=False, end='...', leeway=5)`
fn truncate(value: &Value, args: Passed) -> Result<Value, Error> {
    let a = Args::of_passed(args)?;
    let length = a.int(0, "length")?.unwrap_or(255);
    let kills = a.is_true(1, "killwords")?;
    let end = a.get(2, "end")?.map_or_else(|| "...".to_owned(), |v| v.to_string());
    let leeway = a.int(3, "leeway")?.unwrap_or(5);
    a.done(4)?;
    let kept = usize::try_from(length).ok().and_then(|n| n.checked_sub(end.chars().count()));
    let kept = kept.ok_or_else(|| invalid("length: expected at least that of the end"))?;
    let leeway = usize::try_from(leeway).map_err(|_| invalid("leeway: expected 0 or more"))?;
    let text = value.to_string();
    if text.chars().count() <= (length as usize).saturating_add(leeway) {
        return Ok(value.clone());
    }
    let cut = text.char_indices().nth(kept).map_or(text.len(), |(i, _)| i);
    let head = &text[..cut];
    let head = if kills { head } else { head.rsplit_once(' ').map_or(head, |(words, _)| words) };
    Ok(Value::from(format!("{head}{end}")))
}

/// `indent(width=4, first=False, blank=False)`; a width may be a text.
fn indent(state: &State, value: &Value, args: Passed) -> Result<Value, Error> {
    let a = Args::of_passed(args)?;
    let width = a.get(0, "width")?.unwrap_or_else(|| Value::from(4));
    let (first, blank) = (a.is_true(1, "first")?, a.is_true(2, "blank")?);
    a.done(3)?;
    // As Jinja2 does it: a line more, so that an end of line at the end stays.
    let text = value.to_string() + "\n";
    let each = match width.as_str() {
        Some(text) => text.len(),
        None => usize::try_from(i64::try_from(width.clone())?).unwrap_or(0),
    };
    pay(state, each.saturating_mul(lines(&text).count()))?;
    let space = width.as_str().map_or_else(|| " ".repeat(each), str::to_owned);
    let mut out = String::new();
    for (i, (line, _)) in lines(&text).enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&space);
        }
        out.push_str(&text[line]);
    }
    Ok(Value::from(out))
}

/// Text without tags and comments, white space as single spaces, entities as characters (MarkupSafe's `striptags`).
fn strip_tags(text: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('<') {
        let tag = &rest[start..];
        let end = match tag.strip_prefix("<!--") {
            Some(comment) => comment.find("-->").map(|n| n + 7),
            None => tag.find('>').map(|n| n + 1),
        };
        // One that never ends is text.
        let Some(end) = end else { break };
        kept.push_str(&rest[..start]);
        rest = &tag[end..];
    }
    kept.push_str(rest);
    unescape(&kept.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Entities by number, and those names that text is escaped with.
fn unescape(text: &str) -> String {
    const NAMES: &[(&str, char)] =
        &[("amp", '&'), ("lt", '<'), ("gt", '>'), ("quot", '"'), ("apos", '\''), ("nbsp", '\u{A0}')];
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let found = rest.split_once(';').and_then(|(name, after)| {
            let number = name.strip_prefix('#').and_then(|n| match n.strip_prefix(['x', 'X']) {
                Some(hex) => u32::from_str_radix(hex, 16).ok(),
                None => n.parse().ok(),
            });
            let named = NAMES.iter().find(|(n, _)| *n == name).map(|(_, c)| *c);
            Some((number.and_then(char::from_u32).or(named)?, after))
        });
        match found {
            Some((c, after)) => {
                out.push(c);
                rest = after;
            }
            None => out.push('&'),
        }
    }
    out + rest
}

/// `urllib.parse.quote` of a text; a mapping becomes a query.
fn url_encode(value: &Value) -> Result<String, Error> {
    let quote = |text: &str, is_query: bool| {
        let mut out = String::new();
        for b in text.bytes() {
            match b {
                b' ' if is_query => out.push('+'),
                b'/' if is_query => out.push_str("%2F"),
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' | b'/' => {
                    out.push(b as char)
                }
                b => out.push_str(&format!("%{b:02X}")),
            }
        }
        out
    };
    if value.kind() != ValueKind::Map {
        return Ok(quote(&value.to_string(), false));
    }
    let mut pairs = Vec::new();
    for key in value.try_iter()? {
        let found = value.get_item(&key)?;
        pairs.push(format!("{}={}", quote(&key.to_string(), true), quote(&found.to_string(), true)));
    }
    Ok(pairs.join("&"))
}

/// `float(x)`, none where Python has an error.
fn real(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => value.as_str()?.trim().replace('_', "").parse().ok(),
        _ => None,
    }
}

/// `int(default=0, base=10)`
fn int(value: &Value, args: Passed) -> Result<Value, Error> {
    let a = Args::of_passed(args)?;
    let default = a.get(0, "default")?.unwrap_or_else(|| Value::from(0));
    let base = a.int(1, "base")?.unwrap_or(10);
    a.done(2)?;
    let base = u32::try_from(base).ok().filter(|b| (2..=36).contains(b));
    let base = base.ok_or_else(|| invalid("base: expected 2 to 36"))?;
    if value.is_integer() {
        return Ok(value.clone());
    }
    let whole = value.as_str().and_then(|s| {
        let s = s.trim().replace('_', "").to_lowercase();
        let digits = s.trim_start_matches(['-', '+']);
        let prefix = [(16, "0x"), (8, "0o"), (2, "0b")].into_iter().find(|(b, _)| *b == base);
        let bare = prefix.and_then(|(_, p)| digits.strip_prefix(p)).unwrap_or(digits);
        let sign = if s.starts_with('-') { -1 } else { 1 };
        i128::from_str_radix(bare, base).ok().filter(|_| s.len() <= digits.len() + 1).map(|n| sign * n)
    });
    // A number with a fraction is cut; what is infinite or none has no whole part.
    let cut = || real(value).filter(|f| f.abs() < 1e38).map(|f| f.trunc() as i128);
    Ok(whole.or_else(cut).map_or(default, Value::from))
}

/// `cycler(a, b, …)`: `next()`, `current`, `reset()`.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Value {
        self.items[self.at.load(Ordering::Relaxed)].clone()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> minijinja::value::ObjectRepr {
        minijinja::value::ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "current" => Some(self.current()),
            "pos" => Some(Value::from(self.at.load(Ordering::Relaxed))),
            "items" => Some(Value::from(self.items.clone())),
            _ => None,
        }
    }

    fn call_method(self: &Arc<Self>, _: &mut State, name: &str, args: &[Value]) -> Result<Value, Error> {
        let () = from_args(args)?;
        match name {
            "next" => {
                let now = self.current();
                // A template runs on one thread.
                self.at.store((self.at.load(Ordering::Relaxed) + 1) % self.items.len(), Ordering::Relaxed);
                Ok(now)
            }
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

fn cycler(Rest(items): Rest<Value>) -> Result<Value, Error> {
    if items.is_empty() {
        return Err(invalid("cycler: expected at least one item"));
    }
    Ok(Value::from_object(Cycler { items, at: AtomicUsize::new(0) }))
}

/// `namespace(mapping, name=value, …)`: a mapping, names, or both.
fn namespace(args: Passed) -> Result<Value, Error> {
    let (mut by_place, by_name) = Args::of_passed(args)?.into_parts();
    if by_place.len() > 1 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut pairs = Vec::new();
    if let Some(mapping) = by_place.pop() {
        if mapping.kind() != ValueKind::Map {
            return Err(invalid("namespace: expected a mapping"));
        }
        for key in mapping.try_iter()? {
            let found = mapping.get_item(&key)?;
            pairs.push((key, found));
        }
    }
    for name in by_name.args() {
        pairs.push((name.into(), by_name.get::<Value>(name)?));
    }
    let all = Value::from_pairs(pairs);
    let (defaults,): (Option<ValueOrKwargs>,) = from_args(&[all])?;
    minijinja::functions::namespace(defaults)
}
