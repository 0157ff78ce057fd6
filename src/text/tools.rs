//! Tool calls in a model's answer, by the format it was trained on.
//!
//! | format | a call looks like | models |
//! |---|---|---|
//! | [`ToolFormat::Hermes`] | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` | Qwen 2.5 and 3, Hermes |
//! | [`ToolFormat::DeepSeek`] | `…begin｜>function<｜tool▁sep｜>NAME`, fenced JSON, `<｜tool▁call▁end｜>` | DeepSeek V2.5, V3, R1 |
//! | [`ToolFormat::DeepSeekPlain`] | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` | DeepSeek V3.1 and later |
//! | [`ToolFormat::Llama3`] | nothing but `{"name": …, "parameters": {…}}` or `<function=NAME>{…}</function>` | Llama 3.1 to 3.3 |
//!
//! The sources are the models' own chat templates. [`ToolParser`] reads a stream: text that may yet become a call is held
//! back, and what turns out to be none comes out as text, so that nothing a model wrote is lost. Who wants arguments as they
//! are written ([`ToolParser::pieces`]) has them from the moment on at which name and opening brace are there.

#[path = "tools_head.rs"]
mod head;

use super::markers::{first_marker, held_bytes};
use head::{Head, Object};
use serde_json::Value;

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// JSON between `<tool_call>` marks.
    Hermes,
    /// Marks, the word `function`, the name, and JSON in a fence.
    DeepSeek,
    /// Marks, the name, and bare JSON.
    DeepSeekPlain,
    /// Bare JSON with `parameters`.
    Llama3,
}

const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const PYTHON_TAG: &str = "<|python_tag|>";
const FUNCTION: &str = "<function=";

/// A call, whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// Its arguments: the text of a JSON object.
    pub arguments: String,
}

/// A call or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolPiece {
    /// Which call of the answer, from 0.
    pub call: usize,
    /// The function's name, with the first piece.
    pub name: Option<String>,
    /// More of the arguments.
    pub arguments: String,
}

impl ToolPiece {
    /// The calls that pieces make, in order.
    pub fn gather(pieces: &[ToolPiece]) -> Vec<ToolCall> {
        let mut calls: Vec<ToolCall> = Vec::new();
        for piece in pieces {
            match (&piece.name, calls.last_mut()) {
                (Some(name), _) => {
                    calls.push(ToolCall { name: name.clone(), arguments: piece.arguments.clone() });
                }
                (None, Some(call)) => call.arguments.push_str(&piece.arguments),
                (None, None) => unreachable!("a call's first piece names it"),
            }
        }
        calls
    }
}

/// What came out of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolOutput {
    /// Text that belongs to no call.
    pub text: String,
    /// Calls, or pieces of them, in order.
    pub calls: Vec<ToolPiece>,
}

impl ToolFormat {
    /// The format that a chat template teaches, if it is a known one.
    pub fn of_template(source: &str) -> Option<ToolFormat> {
        if source.contains(CALL_BEGIN) {
            // The older templates write the kind of tool before the separator.
            let fenced = source.contains("```json");
            Some(if fenced { ToolFormat::DeepSeek } else { ToolFormat::DeepSeekPlain })
        } else if source.contains("<tool_call>") {
            Some(ToolFormat::Hermes)
        } else if source.contains("<|start_header_id|>") && source.contains("parameters") {
            Some(ToolFormat::Llama3)
        } else {
            None
        }
    }

    /// Control tokens that are part of this format: they must not be dropped from the text that is parsed.
    pub fn control_texts(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Hermes => &["<tool_call>", "</tool_call>"],
            ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => {
                &[CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END]
            }
            ToolFormat::Llama3 => &[PYTHON_TAG],
        }
    }

    /// How a call that must be made begins and ends around `name` and the JSON object of its arguments: `(opening, text
    /// between the name and the arguments, closing)`. The opening is the same for every function, so that it can be part
    /// of the prompt.
    pub fn frame(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            ToolFormat::Hermes => {
                ("<tool_call>\n", "{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>")
            }
            ToolFormat::DeepSeek => (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                "",
                "\n```json\n",
                "\n```",
            ),
            ToolFormat::DeepSeekPlain => {
                ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "", "<｜tool▁sep｜>", "")
            }
            ToolFormat::Llama3 => ("", "{\"name\": \"", "\", \"parameters\": ", "}"),
        }
    }
}

/// Where a call that is handed on in pieces is.
#[derive(Debug, Clone)]
enum Within {
    /// In its arguments.
    Arguments(Object),
    /// Behind them, before its end mark.
    Tail,
}

/// Reads one answer.
#[derive(Debug, Clone)]
pub struct ToolParser {
    format: ToolFormat,
    held: String,
    /// A call was seen: white space around calls is no text.
    called: bool,
    /// Text was seen: a Llama 3 answer that begins as text holds no call.
    plain: bool,
    /// Arguments are handed on as they come.
    in_pieces: bool,
    within: Option<Within>,
    /// Calls so far.
    calls: usize,
}

impl ToolParser {
    /// For one answer; calls come whole.
    pub fn new(format: ToolFormat) -> ToolParser {
        ToolParser {
            format,
            held: String::new(),
            called: false,
            plain: false,
            in_pieces: false,
            within: None,
            calls: 0,
        }
    }

    /// For one answer; arguments come as they are written. A call that breaks off is then a call with broken arguments.
    pub fn pieces(format: ToolFormat) -> ToolParser {
        ToolParser { in_pieces: true, ..ToolParser::new(format) }
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str, out: &mut ToolOutput) {
        self.held.push_str(text);
        // Behind one call there may be another.
        while self.through_call(out) {
            match self.format {
                ToolFormat::Hermes => self.marked(&["<tool_call>"], "</tool_call>", out),
                ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => {
                    self.marked(&[CALL_BEGIN, CALLS_BEGIN, CALLS_END], CALL_END, out);
                }
                ToolFormat::Llama3 => self.bare(out),
            }
            if self.within.is_none() {
                return;
            }
        }
    }

    /// Ends the text: what was held back comes out, as a call if it can be read as one.
    pub fn finish(&mut self, out: &mut ToolOutput) {
        let held = std::mem::take(&mut self.held);
        if self.within.take().is_some() {
            return; // what is left is a call's own end
        }
        let calls = match self.format {
            ToolFormat::Llama3 => llama3_calls(&held),
            // The end mark is the last thing a model writes, and some end their turn instead.
            _ => first_marker(&held, &["<tool_call>", CALL_BEGIN])
                .filter(|(at, _)| held[..*at].trim().is_empty())
                .and_then(|(at, i)| self.call(&held[at + ["<tool_call>", CALL_BEGIN][i].len()..]))
                .map(|call| vec![call]),
        };
        match calls {
            Some(calls) => calls.into_iter().for_each(|c| self.whole(c, out)),
            None if self.called && held.trim().is_empty() => {}
            None => out.text.push_str(&held),
        }
    }

    fn whole(&mut self, call: ToolCall, out: &mut ToolOutput) {
        self.called = true;
        out.calls.push(ToolPiece { call: self.calls, name: Some(call.name), arguments: call.arguments });
        self.calls += 1;
    }

    /// Begins to hand a call on, if `body`, an offset of what is held, is the head of one.
    fn begin(&mut self, body: usize, out: &mut ToolOutput) -> bool {
        if !self.in_pieces {
            return false;
        }
        let Head::Call { name, at } = head::head(self.format, &self.held[body..]) else { return false };
        self.whole(ToolCall { name, arguments: String::new() }, out);
        self.held.drain(..body + at);
        self.within = Some(Within::Arguments(Object::default()));
        true
    }

    /// Hands on what is there of a call that has begun. True once it is over, or if there is none.
    fn through_call(&mut self, out: &mut ToolOutput) -> bool {
        if let Some(Within::Arguments(object)) = &mut self.within {
            // The piece that names the call is the place for the first of its arguments.
            let named = out.calls.last_mut().filter(|p| p.call + 1 == self.calls);
            let mut fresh = String::new();
            let arguments = named.map_or(&mut fresh, |p| &mut p.arguments);
            let closed = object.take(&self.held, arguments);
            if !fresh.is_empty() {
                out.calls.push(ToolPiece { call: self.calls - 1, name: None, arguments: fresh });
            }
            self.held.drain(..closed.unwrap_or(self.held.len()));
            if closed.is_none() {
                return false;
            }
            self.within = Some(Within::Tail);
        }
        if self.within.is_some() {
            let Some(end) = self.tail() else { return false };
            self.held.drain(..end);
            self.within = None;
        }
        true
    }

    /// Bytes up to the end of a call whose arguments are over; `None` if it is not there yet.
    fn tail(&self) -> Option<usize> {
        let past = |mark: &str| Some(self.held.find(mark)? + mark.len());
        match self.format {
            ToolFormat::Hermes => past("</tool_call>"),
            ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => past(CALL_END),
            ToolFormat::Llama3 => {
                let end = |c: char| !(c.is_whitespace() || c == ';' || c == '}');
                let start = self.held.find(end)?;
                let rest = &self.held[start..];
                match rest.strip_prefix("</function>") {
                    Some(_) => Some(start + "</function>".len()),
                    None if "</function>".starts_with(rest) => None,
                    None => Some(start),
                }
            }
        }
    }

    /// Llama 3: the whole answer is calls, or none of it.
    fn bare(&mut self, out: &mut ToolOutput) {
        let start = self.held.trim_start_matches([';', ' ', '\n', '\t', '\r']);
        let may_be_call =
            ["{", PYTHON_TAG, FUNCTION].iter().any(|m| start.starts_with(m) || m.starts_with(start));
        if self.plain || !may_be_call {
            self.plain = true;
            out.text.push_str(&self.held);
            self.held.clear();
            return;
        }
        let body = start.strip_prefix(PYTHON_TAG).unwrap_or(start);
        self.begin(self.held.len() - body.len(), out);
    }

    /// Calls between marks. The first of `opens` begins a call; the others are noise around calls.
    fn marked(&mut self, opens: &[&str], close: &str, out: &mut ToolOutput) {
        loop {
            let Some((at, which)) = first_marker(&self.held, opens) else {
                let kept = self.held.len() - held_bytes(&self.held, opens);
                // White space may turn out to stand before a call, and then it is no text.
                self.text_out(self.held[..kept].trim_end().len(), out);
                return;
            };
            let before = self.held[..at].trim_end().len();
            if which != 0 {
                self.called = true;
                self.text_out(before, out);
                self.held.drain(..at - before + opens[which].len());
                continue;
            }
            let body = at + opens[0].len();
            let Some(length) = self.held[body..].find(close) else {
                self.text_out(before, out);
                self.begin(body - before, out);
                return;
            };
            let end = body + length + close.len();
            match self.call(&self.held[body..body + length]) {
                Some(call) => {
                    self.text_out(before, out);
                    self.whole(call, out);
                    self.held.drain(..end - before);
                }
                None => out.text.extend(self.held.drain(..end)),
            }
        }
    }

    fn text_out(&mut self, bytes: usize, out: &mut ToolOutput) {
        out.text.extend(self.held.drain(..bytes));
    }

    fn call(&self, body: &str) -> Option<ToolCall> {
        let call = match self.format {
            ToolFormat::Hermes => json_call(&serde_json::from_str(body.trim()).ok()?),
            _ => deepseek_call(body),
        }?;
        Some(as_written(self.format, body, call))
    }
}

/// The call with its arguments as the model wrote them, as they are in pieces too.
fn as_written(format: ToolFormat, body: &str, call: ToolCall) -> ToolCall {
    let Head::Call { name, at } = head::head(format, body) else { return call };
    let mut arguments = String::new();
    match Object::default().take(&body[at..], &mut arguments) {
        Some(_) if name == call.name => ToolCall { name, arguments },
        _ => call,
    }
}

/// `{"name": …, "arguments" or "parameters": {…}}`. Arguments given as text are taken if they hold an object.
fn json_call(value: &Value) -> Option<ToolCall> {
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = match value.get("arguments").or_else(|| value.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => {
            serde_json::from_str::<Value>(text).ok().filter(Value::is_object)?;
            text.clone()
        }
        Some(object) => object.is_object().then(|| object.to_string())?,
    };
    Some(ToolCall { name, arguments })
}

/// Both ways of DeepSeek: `function<sep>NAME\n` and a fence, or `NAME<sep>` and bare JSON.
fn deepseek_call(body: &str) -> Option<ToolCall> {
    let (left, right) = body.split_once(SEPARATOR)?;
    let (name, rest) = match left.trim() {
        "function" => right.split_once('\n').unwrap_or((right, "")),
        name => (name, right),
    };
    let rest = rest.trim();
    let rest = rest.strip_prefix("```json").or_else(|| rest.strip_prefix("```")).unwrap_or(rest);
    let rest = rest.trim().strip_suffix("```").unwrap_or(rest).trim();
    let arguments: Value = serde_json::from_str(rest).ok()?;
    let name = name.trim().to_owned();
    (arguments.is_object() && !name.is_empty()).then(|| ToolCall { name, arguments: arguments.to_string() })
}

/// One or more calls that are the whole answer: JSON objects with `;` or white space between, or `<function=…>` elements.
fn llama3_calls(text: &str) -> Option<Vec<ToolCall>> {
    let mut rest = text.trim().strip_prefix(PYTHON_TAG).unwrap_or(text.trim()).trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        if let Some(element) = rest.strip_prefix(FUNCTION) {
            let (name, after) = element.split_once('>')?;
            let (body, after) = after.split_once("</function>").unwrap_or((after, ""));
            let arguments: Value = serde_json::from_str(body.trim()).ok()?;
            let arguments = arguments.is_object().then(|| arguments.to_string())?;
            let call = ToolCall { name: name.trim().to_owned(), arguments };
            calls.push(as_written(ToolFormat::Llama3, rest, call));
            rest = after;
        } else {
            let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            let value = stream.next()?.ok()?;
            let end = stream.byte_offset();
            // An object without parameters is an answer in JSON, not a call.
            value.get("parameters").or_else(|| value.get("arguments"))?;
            calls.push(as_written(ToolFormat::Llama3, &rest[..end], json_call(&value)?));
            rest = &rest[end..];
        }
        rest = rest.trim_start_matches([';', ' ', '\n', '\t', '\r']);
    }
    (!calls.is_empty()).then_some(calls)
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;
