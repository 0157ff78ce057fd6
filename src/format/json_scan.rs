//! A pull scanner over JSON text in a file: takes what the caller expects, one piece at a time, in constant memory.
//!
//! Safetensors headers and shard indexes come from strangers and may claim 100 MB; building a tree of one costs tens of
//! times its text, this costs nothing.

use super::input::{Cursor, Input};
use crate::units::{Error, Result};

/// Reads JSON forward. `what` names the document in messages.
pub struct Scan<'a> {
    c: Cursor<'a>,
    what: &'static str,
}

/// Nesting that [`Scan::skip`] follows.
const DEPTH_MAX: usize = 64;

impl<'a> Scan<'a> {
    /// A scanner over the bytes `range` of `input`.
    pub fn new(input: &'a dyn Input, range: std::ops::Range<u64>, what: &'static str) -> Scan<'a> {
        Scan { c: Cursor::new(input, range), what }
    }

    /// The error that `expected` is not what stands here.
    fn wrong(&mut self, expected: &str) -> Error {
        let at = self.c.position();
        let found = match self.c.peek() {
            Ok(Some(b)) => format!("{:?}", b as char),
            Ok(None) => "its end".to_owned(),
            Err(e) => return e,
        };
        Error::bad(self.c.path(), format_args!("{} at byte {at}", self.what), expected, found)
    }

    /// The next byte that is not white space.
    pub fn peek(&mut self) -> Result<Option<u8>> {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.c.peek()? {
            self.c.bump();
        }
        self.c.peek()
    }

    /// Takes `byte`, or fails saying that it was expected.
    pub fn expect(&mut self, byte: u8) -> Result<()> {
        if self.peek()? != Some(byte) {
            return Err(self.wrong(&format!("{:?}", byte as char)));
        }
        self.c.bump();
        Ok(())
    }

    /// Takes `byte` if it is next.
    pub fn take(&mut self, byte: u8) -> Result<bool> {
        let hit = self.peek()? == Some(byte);
        if hit {
            self.c.bump();
        }
        Ok(hit)
    }

    /// Nothing but white space may follow.
    pub fn end(&mut self) -> Result<()> {
        match self.peek()? {
            None => Ok(()),
            Some(_) => Err(self.wrong("the end of the JSON text")),
        }
    }

    /// A string of at most `max` bytes.
    pub fn string(&mut self, max: usize) -> Result<String> {
        self.expect(b'"')?;
        let mut out = Vec::new();
        loop {
            match self.c.peek()? {
                Some(b'"') => break self.c.bump(),
                Some(b'\\') => {
                    self.c.bump();
                    self.escape(&mut out)?;
                }
                Some(b) if b >= 0x20 => {
                    self.c.bump();
                    out.push(b);
                }
                _ => return Err(self.wrong("the rest of a string")),
            }
            if out.len() > max {
                return Err(self.wrong(&format!("a string of at most {max} bytes")));
            }
        }
        String::from_utf8(out).map_err(|_| self.wrong("UTF-8 text before this"))
    }

    fn escape(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let plain = match self.c.peek()? {
            Some(b @ (b'"' | b'\\' | b'/')) => b,
            Some(b'b') => 8,
            Some(b'f') => 12,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(b'u') => {
                self.c.bump();
                let c = self.unicode_escape()?;
                out.extend(c.encode_utf8(&mut [0; 4]).bytes());
                return Ok(());
            }
            _ => return Err(self.wrong("a JSON escape")),
        };
        self.c.bump();
        out.push(plain);
        Ok(())
    }

    fn unicode_escape(&mut self) -> Result<char> {
        let mut code = self.hex4()?;
        if (0xd800..0xdc00).contains(&code) {
            self.literal("\\u")?;
            let low = self.hex4()?;
            if !(0xdc00..0xe000).contains(&low) {
                return Err(self.wrong("the second half of a surrogate pair before this"));
            }
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        char::from_u32(code).ok_or_else(|| self.wrong("a Unicode character before this"))
    }

    fn hex4(&mut self) -> Result<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self.c.peek()?.and_then(|b| (b as char).to_digit(16));
            code = code * 16 + digit.ok_or_else(|| self.wrong("a hexadecimal digit"))?;
            self.c.bump();
        }
        Ok(code)
    }

    fn literal(&mut self, text: &str) -> Result<()> {
        for b in text.bytes() {
            if self.c.peek()? != Some(b) {
                return Err(self.wrong(text));
            }
            self.c.bump();
        }
        Ok(())
    }

    /// An integer from 0 to 2^64 - 1, for the field `what`.
    pub fn u64(&mut self, what: &str) -> Result<u64> {
        let expected = format!("{what}: an integer from 0 to 2^64-1");
        let mut value: Option<u64> = None;
        self.peek()?;
        while let Some(digit @ b'0'..=b'9') = self.c.peek()? {
            let next =
                value.unwrap_or(0).checked_mul(10).and_then(|v| v.checked_add(u64::from(digit - b'0')));
            value = Some(next.ok_or_else(|| self.wrong(&expected))?);
            self.c.bump();
        }
        match (value, self.c.peek()?) {
            (Some(v), Some(b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t') | None) => Ok(v),
            _ => Err(self.wrong(&expected)),
        }
    }

    /// Steps over any value.
    pub fn skip(&mut self) -> Result<()> {
        self.skip_at(0)
    }

    fn skip_at(&mut self, depth: usize) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(self.wrong(&format!("nesting of at most {DEPTH_MAX}")));
        }
        match self.peek()? {
            Some(b'"') => self.skip_string(),
            Some(b'{') => {
                self.c.bump();
                self.items(b'}', |s| {
                    s.expect(b'"')?;
                    s.skip_string_rest()?;
                    s.expect(b':')?;
                    s.skip_at(depth + 1)
                })
            }
            Some(b'[') => {
                self.c.bump();
                self.items(b']', |s| s.skip_at(depth + 1))
            }
            Some(b't') => self.literal("true"),
            Some(b'f') => self.literal("false"),
            Some(b'n') => self.literal("null"),
            Some(b'-' | b'0'..=b'9') => {
                while let Some(b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9') = self.c.peek()? {
                    self.c.bump();
                }
                Ok(())
            }
            _ => Err(self.wrong("a JSON value")),
        }
    }

    fn skip_string(&mut self) -> Result<()> {
        self.expect(b'"')?;
        self.skip_string_rest()
    }

    fn skip_string_rest(&mut self) -> Result<()> {
        loop {
            match self.c.peek()? {
                Some(b'"') => {
                    self.c.bump();
                    return Ok(());
                }
                Some(b'\\') => {
                    self.c.bump();
                    if self.c.peek()?.is_some() {
                        self.c.bump();
                    }
                }
                Some(b) if b >= 0x20 => self.c.bump(),
                _ => return Err(self.wrong("the rest of a string")),
            }
        }
    }

    /// Runs `item` for each comma-separated item up to the closing `close`; the opening byte is taken already.
    pub fn items(&mut self, close: u8, mut item: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        if self.take(close)? {
            return Ok(());
        }
        loop {
            item(self)?;
            if !self.take(b',')? {
                return self.expect(close);
            }
        }
    }

    /// Runs `member` for each key of an object, positioned at the value.
    pub fn object(
        &mut self,
        key_max: usize,
        mut member: impl FnMut(&mut Self, String) -> Result<()>,
    ) -> Result<()> {
        self.expect(b'{')?;
        self.items(b'}', |s| {
            let key = s.string(key_max)?;
            s.expect(b':')?;
            member(s, key)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::input::NamedBytes;
    use std::path::Path;

    fn scan(text: &str, f: impl FnOnce(&mut Scan) -> Result<()>) -> std::result::Result<(), String> {
        let input = NamedBytes { path: Path::new("h"), bytes: text.as_bytes() };
        f(&mut Scan::new(&input, 0..text.len() as u64, "doc")).map_err(|e| e.to_string())
    }

    #[test]
    fn strings_numbers_and_skips() {
        let text = r#" { "a\u00e9\ud83d\ude00\n" : 18446744073709551615 , "b": [1, {"x": [null, -1.5e3, "q\""]}] } "#;
        let mut keys = Vec::new();
        scan(text, |s| {
            s.object(100, |s, k| {
                keys.push(k);
                if keys.len() == 1 { s.u64("n").map(|v| assert_eq!(v, u64::MAX)) } else { s.skip() }
            })?;
            s.end()
        })
        .unwrap();
        assert_eq!(keys, ["aé😀\n", "b"]);
    }

    #[test]
    fn hostile_text_is_refused() {
        for (text, says) in [
            ("18446744073709551616", "integer"),
            ("-1", "integer"),
            ("1.5", "integer"),
            ("\"a", "integer"),
            ("", "its end"),
        ] {
            let e = scan(text, |s| s.u64("n").map(|_| ())).unwrap_err();
            assert!(e.contains(says), "{text}: {e}");
        }
        let deep = "[".repeat(1000);
        assert!(scan(&deep, |s| s.skip()).unwrap_err().contains("nesting"));
        for text in ["{\"a\"}", "[1 2]", "tru", "\"\\q", "{1:2}"] {
            assert!(scan(text, |s| s.skip()).is_err(), "{text}");
        }
    }
}
