//! The beginning of a call, told from text that only looks like one, and the object of its arguments as it comes.
//!
//! Once a name and the brace that opens the arguments are there, in the order in which models are taught to write them, the rest
//! can be handed on as it is written. Any other order is read when the call is whole.

use super::{FUNCTION, SEPARATOR, ToolFormat};

/// What the text after a call's opening mark is.
#[derive(Debug, PartialEq, Eq)]
pub enum Head {
    /// A call of `name`, whose arguments open at `at`.
    Call {
        /// The function's name.
        name: String,
        /// Offset of the arguments' opening brace.
        at: usize,
    },
    /// It may become one.
    More,
    /// None, or one in another order.
    Other,
}

/// Longest head: what has no arguments by then is not waited for.
const HEAD_BYTES_MAX: usize = 1024;

/// Reads the head of a call.
pub fn head(format: ToolFormat, text: &str) -> Head {
    let mut cursor = Cursor { text, at: 0 };
    let read = match format {
        ToolFormat::Hermes => cursor.json_head(),
        ToolFormat::Llama3 if text.trim_start().starts_with('<') => cursor.element_head(),
        ToolFormat::Llama3 => cursor.json_head(),
        ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => cursor.deepseek_head(),
    };
    match read {
        Ok(name) if !name.is_empty() => Head::Call { name, at: cursor.at },
        Err(Stop::More) if text.len() < HEAD_BYTES_MAX => Head::More,
        _ => Head::Other,
    }
}

enum Stop {
    More,
    Other,
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn literal(&mut self, what: &str) -> Result<(), Stop> {
        match self.rest() {
            rest if rest.starts_with(what) => {
                self.at += what.len();
                Ok(())
            }
            rest if what.starts_with(rest) => Err(Stop::More),
            _ => Err(Stop::Other),
        }
    }

    /// Everything up to `end`, and past it.
    fn until(&mut self, end: &str) -> Result<&'a str, Stop> {
        let length = self.rest().find(end).ok_or(Stop::More)?;
        let text = &self.rest()[..length];
        self.at += length + end.len();
        Ok(text)
    }

    fn string(&mut self) -> Result<String, Stop> {
        self.literal("\"")?;
        let mut escaped = false;
        for (i, c) in self.rest().char_indices() {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    let quoted = &self.text[self.at - 1..=self.at + i];
                    self.at += i + 1;
                    return serde_json::from_str(quoted).map_err(|_| Stop::Other);
                }
                _ => {}
            }
        }
        Err(Stop::More)
    }

    /// The brace that opens the arguments, left unread.
    fn open(&mut self) -> Result<(), Stop> {
        self.space();
        self.literal("{")?;
        self.at -= 1;
        Ok(())
    }

    /// `{"name": "NAME", "arguments": {`
    fn json_head(&mut self) -> Result<String, Stop> {
        for what in ["{", "\"name\"", ":"] {
            self.space();
            self.literal(what)?;
        }
        self.space();
        let name = self.string()?;
        self.space();
        self.literal(",")?;
        self.space();
        let key = self.string()?;
        if key != "arguments" && key != "parameters" {
            return Err(Stop::Other);
        }
        self.space();
        self.literal(":")?;
        self.open()?;
        Ok(name)
    }

    /// `<function=NAME>{`
    fn element_head(&mut self) -> Result<String, Stop> {
        self.space();
        self.literal(FUNCTION)?;
        let name = self.until(">")?.trim().to_owned();
        self.open()?;
        Ok(name)
    }

    /// `function<sep>NAME`, a line's end and a fence; or `NAME<sep>`.
    fn deepseek_head(&mut self) -> Result<String, Stop> {
        let mut name = self.until(SEPARATOR)?.trim();
        if name == "function" {
            name = self.until("\n")?.trim();
        }
        self.space();
        // A fence may be cut anywhere before the brace.
        if self.rest().starts_with('`') {
            self.literal("```")?;
            if !self.rest().starts_with(['{', '\n', ' ']) {
                self.literal("json")?;
            }
        }
        self.open()?;
        Ok(name.to_owned())
    }
}

/// Follows a JSON object to its closing brace.
#[derive(Debug, Clone, Default)]
pub struct Object {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Object {
    /// Takes text from the opening brace on, or where it was cut; appends what belongs to the object, without space between
    /// its parts. Returns how many bytes that were once the object is closed, `None` as long as it is open.
    pub fn take(&mut self, text: &str, out: &mut String) -> Option<usize> {
        for (i, c) in text.char_indices() {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' if self.in_string => self.escaped = true,
                '"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                '{' | '[' => self.depth += 1,
                '}' | ']' => self.depth = self.depth.saturating_sub(1),
                c if c.is_ascii_whitespace() => continue,
                _ => {}
            }
            out.push(c);
            if self.depth == 0 {
                return Some(i + c.len_utf8());
            }
        }
        None
    }
}
