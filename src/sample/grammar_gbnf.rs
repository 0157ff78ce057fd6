//! llama.cpp's GBNF in llguidance's Lark.
//!
//! GBNF matches characters; llguidance cuts text into lexemes, longest first. The same texts match if everything regular is
//! one lexeme: a rule that reaches no cycle becomes a terminal (a regular expression), and in the rules of a cycle what
//! stands side by side and is regular becomes a terminal of its own.

use crate::limits::GRAMMAR_DEPTH_MAX;
use crate::units::Error;
use std::collections::HashMap;
use std::fmt::Write;

/// What is wrong with a grammar.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    line: usize,
    expected: &'static str,
    found: String,
}

impl Wrong {
    pub fn of(self, field: &str) -> Error {
        Error::bad("request", format!("{field} line {}", self.line), self.expected, self.found)
    }
}

/// The deepest nesting of brackets in a grammar, those in literals and comments aside.
pub(super) fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                while let Some(c) = chars.next() {
                    match c {
                        '\\' => drop(chars.next()),
                        '"' | '\n' => break,
                        _ => {}
                    }
                }
            }
            '(' | '[' | '{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// A part of a rule.
#[derive(Debug, Clone)]
enum Node {
    Literal(String),
    /// A class in regular-expression notation, or any character.
    Class(String),
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, usize, Option<usize>),
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    names: HashMap<&'a str, usize>,
    rules: Vec<Option<Node>>,
    order: Vec<&'a str>,
    depth: usize,
}

/// Translates. The rule `root` is where a text starts.
pub(super) fn to_lark(text: &str) -> Result<String, Wrong> {
    let mut r = Reader { text, at: 0, names: HashMap::new(), rules: vec![], order: vec![], depth: 0 };
    r.grammar()?;
    let Some(&root) = r.names.get("root") else {
        return Err(Wrong { line: 1, expected: "a rule named root", found: "none".into() });
    };
    let mut rules = Vec::with_capacity(r.rules.len());
    for (i, rule) in r.rules.iter().enumerate() {
        let found = || format!("{}, which no rule defines", r.order[i]);
        rules.push(rule.as_ref().ok_or_else(|| Wrong {
            line: 1,
            expected: "a rule for every name",
            found: found(),
        })?);
    }
    let regular = regular(&rules);
    let mut out = Writer { regular, text: String::new(), extra: 0 };
    for (i, rule) in rules.iter().enumerate() {
        let name = out.name(i);
        let body = if out.regular[i] { terminal(rule) } else { out.rule(rule) };
        writeln!(out.text, "{name}: {body}").expect("writing to a string");
    }
    writeln!(out.text, "start: {}", out.name(root)).expect("writing to a string");
    Ok(out.text)
}

/// Which rules reach no cycle.
fn regular(rules: &[&Node]) -> Vec<bool> {
    fn uses(n: &Node, out: &mut Vec<usize>) {
        match n {
            Node::Literal(_) | Node::Class(_) => {}
            Node::Rule(i) => out.push(*i),
            Node::Sequence(v) | Node::Choice(v) => v.iter().for_each(|n| uses(n, out)),
            Node::Repeat(n, ..) => uses(n, out),
        }
    }
    let used: Vec<Vec<usize>> = rules
        .iter()
        .map(|r| {
            let mut out = Vec::new();
            uses(r, &mut out);
            out
        })
        .collect();
    // A rule is regular once all that it uses is; rules of a cycle never get there.
    let mut regular = vec![false; rules.len()];
    loop {
        let new: Vec<usize> =
            (0..rules.len()).filter(|&i| !regular[i] && used[i].iter().all(|&u| regular[u])).collect();
        if new.is_empty() {
            return regular;
        }
        new.into_iter().for_each(|i| regular[i] = true);
    }
}

struct Writer {
    regular: Vec<bool>,
    text: String,
    extra: usize,
}

impl Writer {
    fn name(&self, rule: usize) -> String {
        if self.regular[rule] { terminal_name(rule) } else { format!("r{rule}") }
    }

    fn is_regular(&self, n: &Node) -> bool {
        match n {
            Node::Literal(_) | Node::Class(_) => true,
            Node::Rule(i) => self.regular[*i],
            Node::Sequence(v) | Node::Choice(v) => v.iter().all(|n| self.is_regular(n)),
            Node::Repeat(n, ..) => self.is_regular(n),
        }
    }

    /// A part of a rule of a cycle; its regular stretches become terminals.
    fn rule(&mut self, n: &Node) -> String {
        if self.is_regular(n) {
            return self.lexeme(n);
        }
        match n {
            Node::Literal(_) | Node::Class(_) => unreachable!("these are regular"),
            Node::Rule(i) => self.name(*i),
            Node::Choice(v) => {
                let parts: Vec<String> = v.iter().map(|n| self.rule(n)).collect();
                format!("({})", parts.join(" | "))
            }
            Node::Repeat(n, low, high) => format!("({}){}", self.rule(n), times(*low, *high)),
            Node::Sequence(v) => {
                let mut parts = Vec::new();
                let mut i = 0;
                while i < v.len() {
                    let run = v[i..].iter().take_while(|n| self.is_regular(n)).count();
                    if run > 0 {
                        parts.push(self.lexeme(&Node::Sequence(v[i..i + run].to_vec())));
                        i += run;
                    } else {
                        parts.push(self.rule(&v[i]));
                        i += 1;
                    }
                }
                parts.join(" ")
            }
        }
    }

    /// A terminal for a regular part. Nothing at all is no lexeme.
    fn lexeme(&mut self, n: &Node) -> String {
        if let Node::Rule(i) = n {
            return self.name(*i);
        }
        if matches!(n, Node::Sequence(v) if v.is_empty()) || matches!(n, Node::Literal(t) if t.is_empty()) {
            return "\"\"".into();
        }
        let name = format!("L{}", self.extra);
        self.extra += 1;
        let body = terminal(n);
        writeln!(self.text, "{name}: {body}").expect("writing to a string");
        name
    }
}

fn terminal_name(rule: usize) -> String {
    format!("T{rule}")
}

/// A regular part in a terminal's notation.
fn terminal(n: &Node) -> String {
    match n {
        Node::Literal(text) => serde_json::Value::from(text.as_str()).to_string(),
        Node::Class(class) => format!("/{class}/"),
        Node::Rule(i) => terminal_name(*i),
        Node::Sequence(v) if v.is_empty() => "\"\"".into(),
        Node::Sequence(v) => format!("({})", v.iter().map(terminal).collect::<Vec<_>>().join(" ")),
        Node::Choice(v) => format!("({})", v.iter().map(terminal).collect::<Vec<_>>().join(" | ")),
        Node::Repeat(n, low, high) => format!("({}){}", terminal(n), times(*low, *high)),
    }
}

fn times(low: usize, high: Option<usize>) -> String {
    match (low, high) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (low, None) => format!("{{{low},}}"),
        (low, Some(high)) => format!("{{{low},{high}}}"),
    }
}

impl<'a> Reader<'a> {
    fn wrong<T>(&self, expected: &'static str) -> Result<T, Wrong> {
        let line = 1 + self.text[..self.at].matches('\n').count();
        let found = self.peek().map_or("the end".into(), |c| format!("{c:?}"));
        Err(Wrong { line, expected, found })
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.text[self.at..].starts_with(text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    /// Skips white space and comments; line ends only where a rule may go on over them.
    fn space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.next();
                    }
                }
                '\n' | '\r' if !lines => return,
                c if c.is_whitespace() => drop(self.next()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = &self.text[self.at..];
        let end =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_')).unwrap_or(rest.len());
        self.at += end;
        (end > 0).then(|| &rest[..end])
    }

    fn rule_id(&mut self, name: &'a str) -> usize {
        let next = self.rules.len();
        let id = *self.names.entry(name).or_insert(next);
        if id == next {
            self.rules.push(None);
            self.order.push(name);
        }
        id
    }

    fn grammar(&mut self) -> Result<(), Wrong> {
        self.space(true);
        while self.peek().is_some() {
            let Some(name) = self.name() else { return self.wrong("the name of a rule") };
            let id = self.rule_id(name);
            self.space(false);
            if !self.eat("::=") {
                return self.wrong("::=");
            }
            self.space(true);
            let body = self.choice(false)?;
            if self.rules[id].replace(body).is_some() {
                return self.wrong("one rule of each name");
            }
            self.space(true);
        }
        Ok(())
    }

    /// Alternatives, up to a closing parenthesis or the end of the rule.
    fn choice(&mut self, nested: bool) -> Result<Node, Wrong> {
        self.depth += 1;
        if self.depth > GRAMMAR_DEPTH_MAX {
            return self.wrong("parentheses that are nested less deep");
        }
        let mut all = vec![self.sequence(nested)?];
        while self.eat("|") {
            self.space(true);
            all.push(self.sequence(nested)?);
        }
        self.depth -= 1;
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Choice(all) })
    }

    fn sequence(&mut self, nested: bool) -> Result<Node, Wrong> {
        let mut items: Vec<Node> = Vec::new();
        loop {
            self.space(nested);
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.next();
                    Node::Class("(?s:.)".into())
                }
                Some('(') => {
                    self.next();
                    let inner = self.choice(true)?;
                    if !self.eat(")") {
                        return self.wrong("a closing parenthesis");
                    }
                    inner
                }
                Some(c) if c.is_ascii_alphanumeric() => {
                    let name = self.name().expect("a letter was seen");
                    Node::Rule(self.rule_id(name))
                }
                None | Some('|' | ')' | '\n' | '\r') => {
                    return Ok(if items.len() == 1 { items.remove(0) } else { Node::Sequence(items) });
                }
                _ => return self.wrong("a literal, a class, a rule's name or a group"),
            };
            items.push(self.repeated(item)?);
        }
    }

    fn repeated(&mut self, mut item: Node) -> Result<Node, Wrong> {
        loop {
            let (low, high) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.next();
                    let (low, high) = self.bounds()?;
                    item = Node::Repeat(Box::new(item), low, high);
                    continue;
                }
                _ => return Ok(item),
            };
            self.next();
            item = Node::Repeat(Box::new(item), low, high);
        }
    }

    /// `m}`, `m,}`, `,n}` or `m,n}`.
    fn bounds(&mut self) -> Result<(usize, Option<usize>), Wrong> {
        let from = self.at;
        let low = self.number();
        let high = if self.eat(",") { self.number() } else { low };
        // More than this many copies of a part make no grammar that a token can be chosen by.
        const TIMES_MAX: usize = 10_000;
        let fits = low.unwrap_or(0) <= high.unwrap_or(TIMES_MAX)
            && high.unwrap_or(0).max(low.unwrap_or(0)) <= TIMES_MAX;
        if !self.eat("}") || (low.is_none() && high.is_none()) || !fits {
            let found = self.text[from..].chars().take_while(|c| !"}\n".contains(*c)).take(16);
            let found = format!("{{{}", found.collect::<String>());
            let line = 1 + self.text[..from].matches('\n').count();
            return Err(Wrong { line, expected: "bounds such as {2} or {0,3}, up to 10000", found });
        }
        Ok((low.unwrap_or(0), high))
    }

    fn number(&mut self) -> Option<usize> {
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        self.at += end;
        rest[..end].parse().ok()
    }

    fn literal(&mut self) -> Result<Node, Wrong> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(Node::Literal(text)),
                Some('\\') => text.push(self.escape()?),
                None | Some('\n') => return self.wrong("a closing quote"),
                Some(c) => text.push(c),
            }
        }
    }

    fn class(&mut self) -> Result<Node, Wrong> {
        self.next();
        let mut out = String::from(if self.eat("^") { "[^" } else { "[" });
        let mut empty = true;
        loop {
            let c = match self.next() {
                Some(']') if empty => return self.wrong("a character"),
                Some(']') => return Ok(Node::Class(out + "]")),
                Some('\\') => self.escape()?,
                Some('-') => {
                    // Between two characters it is a range; at either end it stands for itself.
                    let ends = empty || self.peek() == Some(']');
                    out.push_str(if ends { "\\-" } else { "-" });
                    empty = false;
                    continue;
                }
                None | Some('\n') => return self.wrong("a closing bracket"),
                Some(c) => c,
            };
            empty = false;
            write!(out, "\\x{{{:X}}}", c as u32).expect("writing to a string");
        }
    }

    /// What follows a backslash.
    fn escape(&mut self) -> Result<char, Wrong> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/' | '.')) => return Ok(c),
            _ => return self.wrong("a known escape"),
        };
        let code = self.text.get(self.at..self.at + digits);
        let c = code.and_then(|c| u32::from_str_radix(c, 16).ok()).and_then(char::from_u32);
        self.at += if c.is_some() { digits } else { 0 };
        c.map_or_else(|| self.wrong("a character's code in hexadecimal"), Ok)
    }
}
