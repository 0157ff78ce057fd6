//! Python's methods of texts, lists, dicts and numbers that minijinja's compatibility layer lacks, or has without Python's
//! optional arguments. What is not here is passed on to it.

use super::template_args::{Args, invalid, pay};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, State, Value};

/// The environment's callback for methods that a value itself does not know.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::String => of_text(state, value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Seq => of_list(value, name, args)?,
        ValueKind::Map if name == "copy" => Args::of(args)?.done(0).map(|()| Some(value.clone()))?,
        ValueKind::Number => of_number(value, name, args)?,
        _ => None,
    };
    match found {
        Some(found) => Ok(found),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn of_text(state: &mut State, s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let a = Args::of(args)?;
    Ok(Some(match name {
        "removeprefix" | "removesuffix" | "partition" | "rpartition" => {
            a.done(1)?;
            cut(s, name, a.text(0)?)?
        }
        "split" | "rsplit" => {
            let (sep, most) = (a.get(0, "sep")?, a.int(1, "maxsplit")?.unwrap_or(-1));
            a.done(2)?;
            split(s, sep.as_ref(), most, name == "rsplit")?
        }
        "splitlines" => {
            let keep = a.is_true(0, "keepends")?;
            a.done(1)?;
            lines(s)
                .map(|(line, end)| Value::from(if keep { &s[line.start..end] } else { &s[line] }))
                .collect()
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let (what, range) = (a.text(0)?, (a.int(1, "")?, a.int(2, "")?));
            a.done(3)?;
            look(s, what, range, name)?
        }
        "startswith" | "endswith" => {
            let (what, range) = (a.required(0)?, (a.int(1, "")?, a.int(2, "")?));
            a.done(3)?;
            Value::from(touches(s, &what, range, name)?)
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let (width, fill) = (a.int(0, "")?.ok_or_else(|| invalid("expected a width"))?, a.get(1, "")?);
            a.done(if name == "zfill" { 1 } else { 2 })?;
            pad(state, s, name, width, fill.as_ref())?
        }
        "expandtabs" => {
            let size = a.int(0, "tabsize")?.unwrap_or(8);
            a.done(1)?;
            expand_tabs(state, s, size)?
        }
        "format_map" => {
            let map = a.required(0)?;
            a.done(1)?;
            let pairs =
                map.try_iter()?.filter_map(|k| Some((k.as_str()?.to_owned(), map.get_item(&k).ok()?)));
            let kwargs: minijinja::value::Kwargs = pairs.collect();
            let passed = [Value::from(kwargs)];
            minijinja_contrib::pycompat::unknown_method_callback(state, &Value::from(s), "format", &passed)?
        }
        "casefold" | "swapcase" | "title" | "isdecimal" | "istitle" | "isidentifier" | "isprintable" => {
            a.done(0)?;
            plain(s, name)
        }
        _ => return Ok(None),
    }))
}

/// What takes nothing but the text.
fn plain(s: &str, name: &str) -> Value {
    match name {
        "casefold" => s.chars().flat_map(fold).collect::<String>().into(),
        "swapcase" => s.chars().flat_map(swap).collect::<String>().into(),
        "title" => title(s).into(),
        "isdecimal" => Value::from(!s.is_empty() && s.chars().all(|c| c.is_ascii_digit())),
        "istitle" => Value::from(s.chars().any(char::is_alphabetic) && s == title(s)),
        "isidentifier" => {
            let word = |c: char| c == '_' || c.is_alphanumeric();
            Value::from(s.chars().all(word) && s.starts_with(|c: char| c == '_' || c.is_alphabetic()))
        }
        _ => Value::from(s.chars().all(|c| c == ' ' || !(c.is_control() || c.is_whitespace()))),
    }
}

/// One character's full case folding (Unicode, CaseFolding.txt, C and F): lower case of upper case, but for four groups.
fn fold(c: char) -> Vec<char> {
    match c {
        'ı' => vec![c],
        'ẞ' => vec!['s', 's'],
        // Cherokee folds to its capitals.
        '\u{13A0}'..='\u{13FF}' | '\u{AB70}'..='\u{ABBF}' => c.to_uppercase().collect(),
        _ => c.to_uppercase().flat_map(char::to_lowercase).collect(),
    }
}

fn swap(c: char) -> Vec<char> {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// Capitals after all that is no letter, as Python has it: `They'Re`.
fn title(s: &str) -> String {
    let (mut out, mut inside) = (String::with_capacity(s.len()), false);
    for c in s.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => {
                let mut upper = c.to_uppercase();
                out.extend(upper.next());
                out.extend(upper.flat_map(char::to_lowercase));
            }
        }
        inside = c.is_alphabetic();
    }
    out
}

fn cut(s: &str, name: &str, at: &str) -> Result<Value, Error> {
    let three = |a: &str, b: &str, c: &str| Value::from(Tuple::from([a, b, c].map(Value::from)));
    if at.is_empty() && name.ends_with("partition") {
        return Err(invalid("empty separator"));
    }
    Ok(match name {
        "removeprefix" => Value::from(s.strip_prefix(at).unwrap_or(s)),
        "removesuffix" => Value::from(s.strip_suffix(at).unwrap_or(s)),
        "partition" => s.split_once(at).map_or_else(|| three(s, "", ""), |(a, b)| three(a, at, b)),
        _ => s.rsplit_once(at).map_or_else(|| three("", "", s), |(a, b)| three(a, at, b)),
    })
}

/// `str.split` and `str.rsplit`: at a separator, or at white space; `most` below 0 is no bound.
fn split(s: &str, sep: Option<&Value>, most: i64, from_right: bool) -> Result<Value, Error> {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let parts = |mut all: Vec<&str>| {
        if from_right {
            all.reverse();
        }
        all.into_iter().map(Value::from).collect::<Value>()
    };
    let Some(sep) = sep.filter(|v| !v.is_none()) else {
        let (mut all, mut rest) = (Vec::new(), s);
        loop {
            rest = if from_right { rest.trim_end() } else { rest.trim_start() };
            let (part, more) = match (from_right, all.len() == most) {
                (_, true) => (rest, ""),
                (false, _) => rest.split_once(char::is_whitespace).unwrap_or((rest, "")),
                (true, _) => rest.rsplit_once(char::is_whitespace).map_or((rest, ""), |(a, b)| (b, a)),
            };
            if rest.is_empty() {
                return Ok(parts(all));
            }
            all.push(part);
            rest = more;
        }
    };
    let sep = sep.as_str().ok_or_else(|| invalid("sep: expected a string or none"))?;
    if sep.is_empty() {
        return Err(invalid("empty separator"));
    }
    let most = most.saturating_add(1);
    Ok(parts(if from_right { s.rsplitn(most, sep).collect() } else { s.splitn(most, sep).collect() }))
}

/// The lines of a text, as `str.splitlines` sees them: without their ends, and where those end.
pub(super) fn lines(s: &str) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> {
    const ENDS: &[char] =
        &['\n', '\r', '\u{B}', '\u{C}', '\u{1C}', '\u{1D}', '\u{1E}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = s.get(at..).filter(|r| !r.is_empty())?;
        let line = rest.find(ENDS).unwrap_or(rest.len());
        let end = if rest[line..].starts_with("\r\n") {
            2
        } else {
            rest[line..].chars().next().map_or(0, char::len_utf8)
        };
        let found = (at..at + line, at + line + end);
        at = found.1;
        Some(found)
    })
}

/// `s[start:end]` with the number of characters before it; none where it begins behind the end or is turned round.
fn span(s: &str, (start, end): (Option<i64>, Option<i64>)) -> Option<(&str, usize)> {
    let len = s.chars().count() as i64;
    let place = |n: i64| if n < 0 { (n.saturating_add(len)).max(0) } else { n };
    let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(len)).min(len));
    if start > end {
        return None;
    }
    let byte = |n: i64| s.char_indices().nth(n as usize).map_or(s.len(), |(i, _)| i);
    Some((&s[byte(start)..byte(end)], start as usize))
}

fn look(s: &str, what: &str, range: (Option<i64>, Option<i64>), name: &str) -> Result<Value, Error> {
    let within = span(s, range);
    if name == "count" {
        return Ok(Value::from(within.map_or(0, |(part, _)| part.matches(what).count())));
    }
    let found = within.and_then(|(part, before)| {
        let at = if name.starts_with('r') { part.rfind(what) } else { part.find(what) };
        at.map(|at| (before + part[..at].chars().count()) as i64)
    });
    match found {
        None if name.ends_with("index") => Err(invalid("substring not found")),
        found => Ok(Value::from(found.unwrap_or(-1))),
    }
}

/// `what` is a text, or several of which one is enough.
fn touches(s: &str, what: &Value, range: (Option<i64>, Option<i64>), name: &str) -> Result<bool, Error> {
    let wrong = || invalid("expected a string or several");
    let any: Vec<Value> = match what.kind() {
        ValueKind::String => vec![what.clone()],
        ValueKind::Seq | ValueKind::Iterable => what.try_iter()?.collect(),
        _ => return Err(wrong()),
    };
    let within = span(s, range);
    let mut found = false;
    for text in &any {
        let text = text.as_str().ok_or_else(wrong)?;
        found |= within.is_some_and(|(part, _)| match name {
            "startswith" => part.starts_with(text),
            _ => part.ends_with(text),
        });
    }
    Ok(found)
}

pub(super) fn pad(
    state: &State,
    s: &str,
    name: &str,
    width: i64,
    fill: Option<&Value>,
) -> Result<Value, Error> {
    let fill = match (name, fill) {
        ("zfill", _) => '0',
        (_, None) => ' ',
        (_, Some(fill)) => {
            let mut chars = fill.as_str().unwrap_or_default().chars();
            match (chars.next(), chars.next()) {
                (Some(c), None) => c,
                _ => return Err(invalid("the fill character: expected one")),
            }
        }
    };
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(s.chars().count());
    pay(state, missing.saturating_mul(fill.len_utf8()))?;
    let filled = |n: usize| std::iter::repeat_n(fill, n);
    let (head, rest) = match name {
        "zfill" if s.starts_with(['-', '+']) => s.split_at(1),
        _ => ("", s),
    };
    let left = match name {
        "ljust" => 0,
        "center" => missing / 2 + (missing & width as usize & 1),
        _ => missing,
    };
    let mut out = head.to_owned();
    out.extend(filled(left));
    out.push_str(rest);
    out.extend(filled(missing - left));
    Ok(Value::from(out))
}

fn expand_tabs(state: &State, s: &str, size: i64) -> Result<Value, Error> {
    let size = usize::try_from(size).unwrap_or(0);
    pay(state, s.matches('\t').count().saturating_mul(size))?;
    let (mut out, mut column) = (String::new(), 0);
    for c in s.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let spaces = size - column % size;
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(Value::from(out))
}

fn of_list(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let a = Args::of(args)?;
    match name {
        "copy" => a.done(0).map(|()| Some(value.clone())),
        "index" => {
            let what = a.required(0)?;
            a.done(1)?;
            let at = value.try_iter()?.position(|v| v == what);
            at.map(|i| Some(Value::from(i))).ok_or_else(|| invalid("not in the list"))
        }
        _ => Ok(None),
    }
}

fn of_number(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let int = i128::try_from(value.clone()).ok().filter(|_| value.is_integer());
    let found = match (name, int) {
        ("is_integer", Some(_)) => Value::from(true),
        ("is_integer", None) => Value::from(f64::try_from(value.clone()).is_ok_and(|f| f.fract() == 0.0)),
        ("bit_length", Some(n)) => Value::from(128 - n.unsigned_abs().leading_zeros()),
        _ => return Ok(None),
    };
    Args::of(args)?.done(0).map(|()| Some(found))
}
