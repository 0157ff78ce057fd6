//! Chat templates: messages to the text that a model was trained on.
//!
//! A model's file carries a Jinja template, meant for Hugging Face transformers: Jinja2 with `trim_blocks` and
//! `lstrip_blocks`, loop controls, a `{% generation %}` tag, `tojson` by Python's `json.dumps`, and the functions
//! `raise_exception` and `strftime_now`. Here minijinja runs it, with what differs from Python put back
//! ([`crate::text::template_env`], [`crate::text::template_percent`]). A template is a program from a file, so its work, depth
//! and output are bounded.

use crate::format::gguf::{Meta, Value as MetaValue};
use crate::limits::{TEMPLATE_BYTES_MAX, TEMPLATE_FUEL_MAX, TEMPLATE_OUTPUT_MAX, TEMPLATE_STACK_BYTES};
use crate::text::files::{read_side_json, read_side_text};
use crate::text::template_env::{Now, environment, from_json};
use crate::text::template_percent::with_percent;
use crate::text::tokenizer::Tokenizer;
use crate::units::{Error, Result, TokenId};
use minijinja::{Environment, ErrorKind, Value};
use std::io;
use std::path::{Path, PathBuf};

/// ChatML: the format of Qwen and many fine-tunings, for files that carry no template but use it.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] \
                      + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
                      {% endif %}";

/// What a template is given.
#[derive(Debug, Clone, Default)]
pub struct Chat {
    /// The messages: an array of objects with `role` and `content`, in the OpenAI format.
    pub messages: serde_json::Value,
    /// The tools: an array of JSON schemas, or null.
    pub tools: serde_json::Value,
    /// Whether the text ends with the head of the assistant's answer.
    pub add_generation_prompt: bool,
    /// More variables, such as `enable_thinking`. They win over those above.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// Seconds since 1970, UTC, for `strftime_now`; none is the clock.
    pub now_unix_s: Option<i64>,
}

impl Chat {
    /// Messages given as (role, content), with the head of the answer after them.
    pub fn of<'a>(messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let messages = messages
            .into_iter()
            .map(|(role, content)| serde_json::json!({"role": role, "content": content}))
            .collect();
        Self { messages: serde_json::Value::Array(messages), add_generation_prompt: true, ..Self::default() }
    }
}

/// A model's chat template, compiled. Some files have two: one for plain chat, one for chat with tools.
#[derive(Debug)]
pub struct ChatTemplate {
    file: PathBuf,
    env: Environment<'static>,
    /// As the file has them; what is compiled is a little different.
    source: String,
    tool_use: Option<String>,
}

/// The names that a list of templates uses (transformers, `chat_template` as a list of `{name, template}`).
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Compiles `source`. `file` is where it comes from, for messages.
    pub fn new(file: &Path, source: &str) -> Result<Self> {
        Self::compile(file, source, None)
    }

    /// A template known by name: "chatml".
    pub fn builtin(name: &str) -> Option<Self> {
        match name {
            "chatml" => Some(Self::new(Path::new("chatml"), CHATML).expect("our own template compiles")),
            _ => None,
        }
    }

    /// The template in a GGUF file: `tokenizer.chat_template`, with `.tool_use` after it for the second one.
    pub fn from_gguf_meta(meta: &Meta) -> Result<Option<Self>> {
        const KEY: &str = "tokenizer.chat_template";
        let text = |key: &str| match meta.get(key) {
            None => Ok(None),
            Some(MetaValue::Str(s)) => Ok(Some(s.as_str())),
            Some(_) => Err(meta.bad(key, "a string")),
        };
        let tool_use = text(&format!("{KEY}.{TOOL_USE}"))?;
        match text(KEY)? {
            None => Ok(None),
            Some(source) => Self::compile(meta.path(), source, tool_use).map(Some),
        }
    }

    /// The template of a Hugging Face folder: `chat_template.jinja`, or `chat_template` in `chat_template.json` or
    /// `tokenizer_config.json`, the first of these that is there.
    pub fn from_hf_dir(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("chat_template.jinja");
        if let Some(source) = read_side_text(&path)? {
            let tool_use = read_side_text(&dir.join("additional_chat_templates").join("tool_use.jinja"))?;
            return Self::compile(&path, &source, tool_use.as_deref()).map(Some);
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = dir.join(name);
            if let Some(config) = read_side_json(&path)?
                && let Some(found) = Self::from_config(&path, &config)?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The template in a parsed `tokenizer_config.json`: a string, or a list of `{name, template}`.
    pub fn from_config(file: &Path, config: &serde_json::Value) -> Result<Option<Self>> {
        use serde_json::Value as Json;
        let list = match config.get("chat_template") {
            None | Some(Json::Null) => return Ok(None),
            Some(Json::String(source)) => return Self::new(file, source).map(Some),
            Some(Json::Array(list)) => list,
            Some(_) => {
                return Err(Error::bad(
                    file,
                    "chat_template",
                    "a string or a list of named templates",
                    "another type",
                ));
            }
        };
        let by_name = |name: &str| {
            list.iter()
                .find(|t| t.get("name").and_then(Json::as_str) == Some(name))
                .and_then(|t| t.get("template")?.as_str())
        };
        match by_name(DEFAULT) {
            Some(source) => Self::compile(file, source, by_name(TOOL_USE)).map(Some),
            None => {
                Err(Error::bad(file, "chat_template", "a template named \"default\"", "none of that name"))
            }
        }
    }

    fn compile(file: &Path, source: &str, tool_use: Option<&str>) -> Result<Self> {
        let mut env = environment();
        for (name, source) in [(DEFAULT, Some(source)), (TOOL_USE, tool_use)] {
            let Some(source) = source else { continue };
            if source.len() > TEMPLATE_BYTES_MAX {
                let want = format!("at most {TEMPLATE_BYTES_MAX} bytes");
                return Err(Error::bad(file, "chat_template", want, source.len()));
            }
            env.add_template_owned(name, with_percent(&without_generation_tags(source)))
                .map_err(|e| syntax_error(file, &e))?;
        }
        Ok(Self {
            file: file.to_owned(),
            env,
            source: source.to_owned(),
            tool_use: tool_use.map(str::to_owned),
        })
    }

    /// The template's text; the one for tools where there are two and `tools` asks for it.
    pub fn source(&self, tools: bool) -> &str {
        self.tool_use.as_deref().filter(|_| tools).unwrap_or(&self.source)
    }

    /// The text of `chat`. The template is given the texts of `tokenizer`'s special tokens; encode the result with
    /// `parse_special` and without `add_special`.
    pub fn render(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<String> {
        let ids = tokenizer.special();
        let text = |id: Option<TokenId>| {
            id.map(|id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned())
        };
        let special = [
            ("bos_token", text(ids.bos)),
            ("eos_token", text(ids.eos)),
            ("unk_token", text(ids.unk)),
            ("pad_token", text(ids.pad)),
        ];
        self.render_with(special.iter().filter_map(|(name, text)| Some((*name, text.as_deref()?))), chat)
    }

    /// As [`ChatTemplate::render`], with the special tokens' names and texts given.
    pub fn render_with<'a>(
        &self,
        special: impl Iterator<Item = (&'a str, &'a str)>,
        chat: &Chat,
    ) -> Result<String> {
        // As in transformers, tools and documents are none, not undefined, where there are none.
        let mut vars: Vec<(String, Value)> = vec![
            ("messages".into(), from_json(&chat.messages)),
            ("tools".into(), from_json(&chat.tools)),
            ("documents".into(), Value::from(())),
            ("add_generation_prompt".into(), Value::from(chat.add_generation_prompt)),
        ];
        vars.extend(special.map(|(name, text)| (name.to_owned(), Value::from(text))));
        vars.extend(chat.extra.iter().map(|(name, v)| (name.clone(), from_json(v))));
        vars.push(("strftime_now".into(), Now(chat.now_unix_s).into_value()));

        let name = if self.tool_use.is_some() && !chat.tools.is_null() { TOOL_USE } else { DEFAULT };
        let run = || self.run(name, Value::from_pairs(vars));
        // Dropping a value nested 100,000 deep, which fuel allows, takes a stack frame a level. A thread of its own has room
        // for that; only the pages it touches are ever memory.
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("template".into()).stack_size(TEMPLATE_STACK_BYTES);
            match thread.spawn_scoped(scope, run) {
                Ok(running) => running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(e) => Err(Error::io(&self.file, "start a thread for the template", e)),
            }
        })
    }

    fn run(&self, name: &str, vars: Value) -> Result<String> {
        let template = self.env.get_template(name).expect("compiled in `compile`");
        let mut out = Bounded(Vec::new());
        match template.render_captured_to(vars, &mut out) {
            Ok(_) => Ok(String::from_utf8(out.0).expect("a template writes strings")),
            Err(e) => Err(self.run_error(&e)),
        }
    }

    fn limit(&self, field: &str, needs: &str, has: String) -> Error {
        Error::Limit { what: format!("{}: {field}", self.file.display()), needs: needs.into(), has }
    }

    fn run_error(&self, e: &minijinja::Error) -> Error {
        let field = place(e);
        match e.kind() {
            // Not the messages' fault, as the other errors mostly are: another kind, that a server tells apart.
            ErrorKind::OutOfFuel => {
                self.limit(&field, "more steps", format!("{TEMPLATE_FUEL_MAX}, and goes on"))
            }
            ErrorKind::WriteFailure => {
                self.limit(&field, "more bytes of text", format!("at most {TEMPLATE_OUTPUT_MAX} bytes"))
            }
            _ => Error::bad(&self.file, field, "messages that the template takes", reason(e)),
        }
    }
}

fn place(e: &minijinja::Error) -> String {
    let which = match e.name() {
        Some(TOOL_USE) => "chat_template \"tool_use\"",
        _ => "chat_template",
    };
    match e.line() {
        Some(line) => format!("{which} line {line}"),
        None => which.to_owned(),
    }
}

/// The template's own words where it raised, else the kind of error and its detail; the innermost cause last.
fn reason(e: &minijinja::Error) -> String {
    let mut out = e.detail().map_or_else(|| e.kind().to_string(), str::to_owned);
    let mut cause = std::error::Error::source(e);
    while let Some(inner) = cause {
        out = format!("{out}: {inner}");
        cause = inner.source();
    }
    out
}

fn syntax_error(file: &Path, e: &minijinja::Error) -> Error {
    Error::bad(file, place(e), "a Jinja template", format!("{}: {}", e.kind(), reason(e)))
}

/// Collects a template's output up to a limit.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEMPLATE_OUTPUT_MAX {
            return Err(io::Error::other("output limit"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `{% generation %}` marks the assistant's text for training and writes nothing. It becomes a block that always runs, with
/// its white-space marks kept, since what is around it may rely on them.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let body = tag[2..].trim_start_matches(['-', '+']);
        let open = &tag[..tag.len() - body.len()];
        let word = body.trim_start();
        let (name, block) = if word.starts_with("generation") {
            ("generation", "if true")
        } else if word.starts_with("endgeneration") {
            ("endgeneration", "endif")
        } else {
            ("", "")
        };
        let after = word[name.len()..].trim_start();
        let closes = ["%}", "-%}", "+%}"].iter().any(|c| after.starts_with(c));
        if !name.is_empty() && closes {
            out.extend([open, " ", block, " "]);
            rest = after;
        } else {
            out.push_str("{%");
            rest = &tag[2..];
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
