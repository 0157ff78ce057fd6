//! Just enough of Rust's lexical grammar to tell code from comments and literals.

/// The source with comments and the insides of literals turned into spaces. Line breaks stay, so that line numbers and
/// brackets can be counted.
pub fn code_only(source: &str) -> String {
    let b = source.as_bytes();
    let mut out = b.to_vec();
    let mut i = 0;
    while i < b.len() {
        let end = match b[i] {
            b'/' if b.get(i + 1) == Some(&b'/') => line_end(b, i),
            b'/' if b.get(i + 1) == Some(&b'*') => block_comment_end(b, i),
            b'"' => string_end(b, i + 1),
            b'r' if !is_word(b, i) => raw_string_end(b, i).unwrap_or(i),
            b'\'' => char_end(b, i).unwrap_or(i),
            _ => i,
        };
        if end == i {
            i += 1;
            continue;
        }
        for c in &mut out[i..end] {
            if *c != b'\n' {
                *c = b' ';
            }
        }
        i = end;
    }
    // Only ASCII was written over whole literals and comments, so what is left is still UTF-8.
    String::from_utf8(out).expect("blanking keeps UTF-8")
}

/// Whether the byte before `i` continues an identifier: then an `r` at `i` opens no raw string. `b` and `c` may stand
/// before it (`br"…"`, `cr"…"`), which the blanking may keep.
fn is_word(b: &[u8], i: usize) -> bool {
    i > 0 && (b[i - 1].is_ascii_alphanumeric() || b[i - 1] == b'_') && !matches!(b[i - 1], b'b' | b'c')
}

fn line_end(b: &[u8], i: usize) -> usize {
    b[i..].iter().position(|&c| c == b'\n').map_or(b.len(), |n| i + n)
}

fn block_comment_end(b: &[u8], mut i: usize) -> usize {
    let mut depth = 0;
    while i + 1 < b.len() {
        match &b[i..i + 2] {
            b"/*" => (depth, i) = (depth + 1, i + 2),
            b"*/" => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    b.len()
}

/// The end of a string whose opening quote is before `i`.
fn string_end(b: &[u8], mut i: usize) -> usize {
    while i < b.len() {
        match b[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    b.len()
}

fn raw_string_end(b: &[u8], i: usize) -> Option<usize> {
    let hashes = b[i + 1..].iter().take_while(|&&c| c == b'#').count();
    let open = i + 1 + hashes;
    if b.get(open) != Some(&b'"') {
        return None;
    }
    let mut close = vec![b'"'];
    close.resize(1 + hashes, b'#');
    let found = b[open + 1..].windows(close.len()).position(|w| w == close);
    Some(found.map_or(b.len(), |n| open + 1 + n + close.len()))
}

/// The end of a character literal at `i`; `None` where the quote begins a lifetime or label.
fn char_end(b: &[u8], i: usize) -> Option<usize> {
    if b.get(i + 1) == Some(&b'\\') {
        return b[i + 3..].iter().position(|&c| c == b'\'').map(|n| i + 4 + n);
    }
    let width = match *b.get(i + 1)? {
        c if c < 0x80 => 1,
        c if c < 0xe0 => 2,
        c if c < 0xf0 => 3,
        _ => 4,
    };
    (b.get(i + 1 + width) == Some(&b'\'')).then_some(i + 2 + width)
}

/// Every path written in the code that begins with `head::`, with groups (`head::{a, b::c}`) taken apart: the first
/// segment after the head and its line, from 1.
pub fn segments_after(code: &str, head: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices(&format!("{head}::")) {
        let before = code[..at].chars().next_back();
        // `$crate::x` in a macro is an import too; `mycrate::x` and `a::crate_x::` are not.
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let line = 1 + code[..at].matches('\n').count();
        let rest = code[at + head.len() + 2..].trim_start();
        match rest.strip_prefix('{') {
            Some(group) => found.extend(group_heads(group).into_iter().map(|w| (line, w))),
            None => found.push((line, word(rest))),
        }
    }
    found
}

fn word(s: &str) -> String {
    s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The first segments inside a use group, up to its closing brace.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut heads, mut expect) = (0, Vec::new(), true);
    for (i, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => expect = true,
            c if expect && (c.is_alphabetic() || c == '_') => {
                heads.push(word(&group[i..]));
                expect = false;
            }
            _ => {}
        }
    }
    heads
}

/// Every `fn` with a body: its name, first line and number of lines.
pub fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        if code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let name = word(code[at + 3..].trim_start());
        let Some(open) = body_open(&code[at..]) else { continue };
        if name.is_empty() {
            continue;
        }
        let end = matching_brace(&code[at + open..]);
        let line = 1 + code[..at].matches('\n').count();
        found.push((name, line, 1 + code[at..at + open + end].matches('\n').count()));
    }
    found
}

/// Where the body's brace is, or `None` for a declaration that ends in `;` first (`[u8; 4]` in a signature does not end it).
fn body_open(signature: &str) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in signature.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ';' if depth == 0 => return None,
            '{' if depth == 0 => return Some(i),
            _ => {}
        }
    }
    None
}

fn matching_brace(body: &str) -> usize {
    let mut depth = 0;
    for (i, c) in body.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return i,
            '}' => depth -= 1,
            _ => {}
        }
    }
    body.len()
}

#[test]
fn comments_and_literals_are_blanked() {
    let source = "let a = \"crate::x\"; // crate::y\nlet b = r#\"un\"safe\"#; /* a /* b */ crate */ 'c': '\\'' '{' &'a str";
    let code = code_only(source);
    assert_eq!(code.len(), source.len());
    assert!(!code.contains("crate") && !code.contains("safe") && !code.contains('{'), "{code}");
    assert!(code.contains("let b") && code.contains("&'a str"), "{code}");
}

#[test]
fn groups_are_taken_apart() {
    let code = "use crate::{units::{Error, Result}, format,\n  weights::Matrix};\nlet x = crate::kv::Page; mycrate::no";
    let heads: Vec<String> = segments_after(code, "crate").into_iter().map(|(_, w)| w).collect();
    assert_eq!(heads, ["units", "format", "weights", "kv"]);
}
