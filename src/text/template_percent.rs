//! `%` as Python has it: `'%s' % x` puts values into a text, where minijinja knows only the remainder of numbers.
//!
//! minijinja lets no one define an operator, so that each `a % b` of a template's source becomes `(a)|tegu_percent(b)` before it
//! is compiled. What `a` and `b` reach is decided by Jinja's grammar: `%` binds as `*` and `/` do, from the left; `b` is one
//! operand with its attributes, calls, filters and tests. A tag that is not understood stays as it is.

use super::template_printf;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::ops::Range;

const FILTER: &str = "tegu_percent";

/// Adds the filter that [`with_percent`] writes.
pub(super) fn add(env: &mut Environment) {
    env.add_filter(FILTER, percent);
}

/// `a % b`: printf for texts, the remainder that has the divisor's sign for numbers.
fn percent(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(format) = a.as_str() {
        return template_printf::printf(state, format, b).map(Value::from);
    }
    let zero = || Error::new(ErrorKind::InvalidOperation, "% by zero");
    let int = |v: &Value| match v.kind() {
        ValueKind::Bool => Some(i128::from(v.is_true())),
        _ if v.is_integer() => i128::try_from(v.clone()).ok(),
        _ => None,
    };
    if let (Some(x), Some(y)) = (int(a), int(b)) {
        let rest = x.checked_rem(y).ok_or_else(zero)?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (y < 0) { rest + y } else { rest }));
    }
    let real = |v: &Value| match int(v) {
        Some(n) => Ok(n as f64),
        None if v.kind() == ValueKind::Number => f64::try_from(v.clone()),
        None => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("% takes numbers, or a text and values; found {} and {}", a.kind(), b.kind()),
        )),
    };
    let (x, y) = (real(a)?, real(b)?);
    if y == 0.0 {
        return Err(zero());
    }
    let rest = x % y;
    Ok(Value::from(if rest != 0.0 && (rest < 0.0) != (y < 0.0) { rest + y } else { rest }))
}

/// The source with its `%` operators replaced.
pub(super) fn with_percent(source: &str) -> String {
    let (mut out, mut at) = (String::with_capacity(source.len()), 0);
    // Looked for in one pass: a search for each kind of tag would go to the source's end again and again.
    let opens = |at: usize| {
        let next = |i: usize| source.as_bytes().get(at + i + 1).filter(|c| b"{%#".contains(c));
        source[at..].match_indices('{').find_map(|(i, _)| next(i).map(|&c| (at + i, c)))
    };
    while let Some((start, mark)) = opens(at) {
        if mark == b'#' {
            // A comment is no tag, whatever is in it.
            let end = source[start + 2..].find("#}").map_or(source.len(), |n| start + 2 + n + 2);
            out.push_str(&source[at..end]);
            at = end;
            continue;
        }
        out.push_str(&source[at..start]);
        let is_block = mark == b'%';
        let Some((tokens, end)) = tokens(source, start + 2, is_block) else {
            // Not a whole tag: the compiler says what is wrong with it.
            out.push_str(&source[start..]);
            return out;
        };
        let first = tokens.first().map_or("", |t| &source[t.at.clone()]);
        let rewritten = Tag { source, tokens: &tokens, next: 0 }.rewrite(start, end, is_block);
        out.push_str(rewritten.as_deref().unwrap_or(&source[start..end]));
        at = end;
        if is_block && first == "raw" {
            let end = source[at..].find("endraw").map_or(source.len(), |n| at + n);
            out.push_str(&source[at..end]);
            at = end;
        }
    }
    out.push_str(&source[at..]);
    out
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Number,
    Name,
    Open,
    Close,
    Operator,
}

/// A piece of a tag.
struct Token {
    kind: Kind,
    at: Range<usize>,
}

/// The tokens of the tag whose inside begins at `at`, and where what follows the tag begins. `None`: it has no end.
fn tokens(source: &str, mut at: usize, is_block: bool) -> Option<(Vec<Token>, usize)> {
    let (mut all, mut depth) = (Vec::new(), 0_usize);
    // The mark that keeps white space, or not.
    at += usize::from(source[at..].starts_with(['-', '+']) && is_block || source[at..].starts_with('-'));
    let end = if is_block { "%}" } else { "}}" };
    loop {
        let rest = &source[at..];
        let c = rest.chars().next()?;
        if c.is_whitespace() {
            at += c.len_utf8();
            continue;
        }
        if depth == 0 {
            let marked = rest.strip_prefix(['-', '+']).filter(|r| r.starts_with(end)).map(|_| 1);
            if let Some(mark) = marked.or(rest.starts_with(end).then_some(0)) {
                return Some((all, at + mark + end.len()));
            }
        }
        let word = |more: fn(char) -> bool| rest.find(|c| !more(c)).unwrap_or(rest.len());
        let (kind, bytes) = match c {
            '\'' | '"' => (Kind::Text, quoted(rest, c)?),
            '0'..='9' => (Kind::Number, number(rest)),
            c if c.is_alphabetic() || c == '_' => (Kind::Name, word(|c| c.is_alphanumeric() || c == '_')),
            '(' | '[' | '{' => (Kind::Open, 1),
            ')' | ']' | '}' => (Kind::Close, 1),
            _ if ["**", "//", "==", "!=", "<=", ">="].iter().any(|o| rest.starts_with(o)) => {
                (Kind::Operator, 2)
            }
            c => (Kind::Operator, c.len_utf8()),
        };
        match kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.checked_sub(1)?,
            _ => {}
        }
        all.push(Token { kind, at: at..at + bytes });
        at += bytes;
    }
}

/// Bytes of a quoted text.
fn quoted(rest: &str, mark: char) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1);
    while let Some((i, c)) = chars.next() {
        if c == '\\' {
            chars.next();
        } else if c == mark {
            return Some(i + 1);
        }
    }
    None
}

/// Bytes of a number: a dot belongs to it where a digit follows.
fn number(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_alphanumeric) || bytes.get(i) == Some(&b'_');
    let mut i = 0;
    loop {
        match bytes.get(i) {
            Some(_) if digit(i) => i += 1,
            Some(b'.') if bytes.get(i + 1).is_some_and(u8::is_ascii_digit) => i += 1,
            // 1e-7, but not 0x1e-7.
            Some(b'-' | b'+') if matches!(bytes[i - 1], b'e' | b'E') && !rest.starts_with("0x") => i += 1,
            _ => return i,
        }
    }
}

/// Names that end an operand and are none.
const WORDS: &[&str] = &["and", "or", "not", "in", "if", "else", "elif", "is"];

/// One tag on its way.
struct Tag<'a> {
    source: &'a str,
    tokens: &'a [Token],
    next: usize,
}

impl<'a> Tag<'a> {
    /// The tag from `start` to `end` anew; `None` if it has no `%`, or is not understood.
    fn rewrite(mut self, start: usize, end: usize, is_block: bool) -> Option<String> {
        let is_percent = |t: &Token| t.kind == Kind::Operator && &self.source[t.at.clone()] == "%";
        self.tokens.iter().find(|t| is_percent(t))?;
        let first = self.tokens.first()?;
        let mut out = self.source[start..first.at.start].to_owned();
        if is_block {
            // What kind of tag it is.
            self.take(&mut out);
        }
        self.list(&mut out)?;
        let last = self.tokens.last()?.at.end;
        (self.next == self.tokens.len()).then(|| out + &self.source[last..end])
    }

    fn peek(&self) -> Option<(Kind, &'a str)> {
        let token = self.tokens.get(self.next)?;
        Some((token.kind, &self.source[token.at.clone()]))
    }

    fn peeks(&self, text: &str) -> bool {
        self.peek().is_some_and(|(kind, t)| kind != Kind::Text && t == text)
    }

    /// Writes the next token, with the space before it.
    fn take(&mut self, out: &mut String) {
        let token = &self.tokens[self.next];
        let before = if self.next == 0 { token.at.start } else { self.tokens[self.next - 1].at.end };
        out.push_str(&self.source[before..token.at.end]);
        self.next += 1;
    }

    /// Expressions and what is between them, up to a bracket that closes or the end.
    fn list(&mut self, out: &mut String) -> Option<()> {
        // Where the product that `%` may go on begins in `out`.
        let mut product: Option<usize> = None;
        while let Some((kind, text)) = self.peek() {
            if kind == Kind::Close {
                break;
            }
            let operand = kind != Kind::Operator && !(kind == Kind::Name && WORDS.contains(&text));
            let from = out.len();
            match text {
                _ if operand => {
                    product.get_or_insert(from);
                    self.operand(out)?;
                }
                "%" => {
                    let start = product?;
                    self.next += 1;
                    let mut right = String::new();
                    self.operand(&mut right)?;
                    // The space before the left side stays before it.
                    let left = out.split_off(start);
                    let space = left.len() - left.trim_start().len();
                    out.extend([
                        &left[..space],
                        "(",
                        &left[space..],
                        ")|",
                        FILTER,
                        "(",
                        right.trim_start(),
                        ")",
                    ]);
                }
                "*" | "/" | "//" if product.is_some() => {
                    self.take(out);
                    self.operand(out)?;
                }
                // A sign: nothing that it could be between is before it.
                "-" | "+" if product.is_none() => {
                    product = Some(from);
                    self.operand(out)?;
                }
                _ => {
                    self.take(out);
                    product = None;
                }
            }
        }
        Some(())
    }

    /// One operand: signs, a value, what hangs on it, its power.
    fn operand(&mut self, out: &mut String) -> Option<()> {
        while self.peeks("-") || self.peeks("+") {
            self.take(out);
        }
        self.value(out)?;
        loop {
            if self.peeks("|") {
                self.take(out);
                self.dotted(out)?;
                self.call(out)?;
            } else if self.peeks("is") {
                self.test(out)?;
            } else {
                break;
            }
        }
        if self.peeks("**") {
            self.take(out);
            self.operand(out)?;
        }
        Some(())
    }

    /// A text (or several side by side), number, name or bracket, with attributes, items and calls.
    fn value(&mut self, out: &mut String) -> Option<()> {
        match self.peek()? {
            (Kind::Text, _) => {
                while self.peek().is_some_and(|(kind, _)| kind == Kind::Text) {
                    self.take(out);
                }
            }
            (Kind::Number, _) => self.take(out),
            (Kind::Name, text) if !WORDS.contains(&text) => self.take(out),
            (Kind::Open, _) => self.bracket(out)?,
            _ => return None,
        }
        loop {
            if self.peeks(".") {
                self.take(out);
                self.peek().filter(|(kind, _)| matches!(kind, Kind::Name | Kind::Number))?;
                self.take(out);
            } else if self.peeks("(") || self.peeks("[") {
                self.bracket(out)?;
            } else {
                return Some(());
            }
        }
    }

    fn bracket(&mut self, out: &mut String) -> Option<()> {
        self.take(out);
        self.list(out)?;
        self.peek().filter(|(kind, _)| *kind == Kind::Close)?;
        self.take(out);
        Some(())
    }

    fn call(&mut self, out: &mut String) -> Option<()> {
        if self.peeks("(") { self.bracket(out) } else { Some(()) }
    }

    /// The name of a filter or test.
    fn dotted(&mut self, out: &mut String) -> Option<()> {
        loop {
            self.peek().filter(|(kind, _)| *kind == Kind::Name)?;
            self.take(out);
            if !self.peeks(".") {
                return Some(());
            }
            self.take(out);
        }
    }

    /// `is [not] name`, with arguments in brackets or one without.
    fn test(&mut self, out: &mut String) -> Option<()> {
        self.take(out);
        if self.peeks("not") {
            self.take(out);
        }
        self.dotted(out)?;
        match self.peek() {
            Some((Kind::Open, "(")) => self.bracket(out),
            Some((Kind::Text | Kind::Number | Kind::Open, _)) => self.value(out),
            Some((Kind::Name, text)) if !WORDS.contains(&text) => self.value(out),
            _ => Some(()),
        }
    }
}

#[test]
fn operators_are_found_where_they_are_some() {
    for (source, want) in [
        ("{{ a % b }}", "{{ (a)|tegu_percent(b) }}"),
        ("{{- a%b -}}", "{{- (a)|tegu_percent(b) -}}"),
        (
            "{{ 1 + a.b[c % 2] * 2 % -d|f(3) ** 2 == 0 }}",
            "{{ 1 + (a.b[(c)|tegu_percent(2)] * 2)|tegu_percent(-d|f(3) ** 2) == 0 }}",
        ),
        ("{% if a % 2 is not eq 1 and b %}", "{% if (a)|tegu_percent(2 is not eq 1) and b %}"),
        (
            "{% set x = 'a' 'b' % (y, z % 2) %}",
            "{% set x = ('a' 'b')|tegu_percent((y, (z)|tegu_percent(2))) %}",
        ),
        ("{{ a % b % c }}", "{{ ((a)|tegu_percent(b))|tegu_percent(c) }}"),
        ("{{ {'a': {'b': 1}} }}5 % 3", "{{ {'a': {'b': 1}} }}5 % 3"),
    ] {
        assert_eq!(with_percent(source), want);
    }
    // Nothing to do, or nothing that is understood: as it is.
    for same in [
        "{# a % b #}",
        "{% raw %}{{ a % b }}{% endraw %}",
        "{{ '%' }} {{ \"a % b\" }} {{ 'it\\'s % x' }}",
        "{{ % }} {{ a % }} {{ a % and }} {{ (a % b }}",
        "{{ a %",
        "{{ 'a % b }}",
        "{% if",
        "{",
        "é{{ é }}é",
    ] {
        assert_eq!(with_percent(same), same);
    }
}
