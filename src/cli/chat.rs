//! `tegu chat`: a conversation with a running daemon, with a line editor.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use super::args::Common;
use super::out::Out;
use super::remote::{self, Remote};
use crate::app::Interrupts;
use crate::net::Client;
use crate::observe;
use crate::units::{Error, Result};

/// Flags of `tegu chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Model, by its name in `tegu list` [default: the daemon's]
    #[arg(short, long, value_name = "NAME")]
    model: Option<String>,
    /// System message
    #[arg(short = 's', long, value_name = "TEXT")]
    system: Option<String>,
    /// Temperature [default: the daemon's]
    #[arg(long, value_name = "T")]
    temp: Option<f64>,
    /// Most tokens of an answer
    #[arg(short = 'n', long, value_name = "N")]
    max_tokens: Option<u64>,
    /// Same seed, same text
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Do not read or write the history of lines
    #[arg(long)]
    no_history: bool,
    #[command(flatten)]
    remote: Remote,
}

/// Help in the chat and for `--help`.
pub const HELP: &str = "\
A line that ends in \\ goes on in the next; \"\"\" begins and ends a text of several lines. Ctrl-C stops an answer, Ctrl-D
leaves.

  /help              this
  /new               forget the conversation
  /system TEXT       set the system message and start anew
  /model [NAME]      change the model, or show the models
  /temp T            temperature; /seed N, /max N: seed and most tokens of an answer
  /undo              take the last question and its answer back
  /retry             answer the last question again
  /save FILE         write the conversation as JSON
  /quit              leave";

/// The conversation.
struct Talk {
    client: Client,
    model: Option<String>,
    messages: Vec<Value>,
    options: serde_json::Map<String, Value>,
}

/// What a line asks for.
enum Next {
    Say(String),
    Again,
    Nothing,
    Leave,
}

/// Runs the command.
pub fn run(args: &ChatArgs, common: &Common) -> Result<()> {
    let client = args.remote.client(common)?;
    let mut talk =
        Talk { client, model: args.model.clone(), messages: Vec::new(), options: Default::default() };
    talk.system(args.system.as_deref());
    for (name, value) in [
        ("temperature", args.temp.map(Value::from)),
        ("max_tokens", args.max_tokens.map(Value::from)),
        ("seed", args.seed.map(Value::from)),
    ] {
        talk.options.extend(value.map(|v| (name.to_owned(), v)));
    }
    // A daemon that is not there is said before the first question is typed.
    let models = remote::json(&talk.client, "GET", "/v1/models", None)?;
    let at_terminal = std::io::stdin().is_terminal();
    if at_terminal {
        let model = talk.model.as_deref().or(models["data"][0]["id"].as_str()).unwrap_or("none");
        observe::note(format_args!("{model} at {}; /help for help", talk.client.address()));
    }
    let mut lines = Lines::new(at_terminal, !args.no_history)?;
    let interrupts = Interrupts::take();
    while let Some(line) = lines.next()? {
        let question = match talk.command(&line) {
            Ok(Next::Leave) => break,
            Ok(Next::Nothing) => continue,
            Ok(Next::Again) => None,
            Ok(Next::Say(text)) => Some(text),
            Err(e) => {
                observe::complain(format_args!("tegu: {e}"));
                continue;
            }
        };
        let asked = question.is_some();
        talk.messages.extend(question.map(|text| json!({ "role": "user", "content": text })));
        if let Err(e) = talk.answer(&interrupts) {
            // The conversation stays as it was before the question.
            if asked {
                talk.messages.pop();
            }
            if !at_terminal || matches!(e, Error::Io { .. }) {
                return Err(e);
            }
            observe::complain(format_args!("tegu: {e}"));
        }
    }
    lines.save();
    Ok(())
}

impl Talk {
    fn system(&mut self, text: Option<&str>) {
        self.messages.clear();
        self.messages.extend(text.map(|t| json!({ "role": "system", "content": t })));
    }

    fn command(&mut self, line: &str) -> Result<Next> {
        let Some(rest) = line.strip_prefix('/') else { return Ok(Next::Say(line.to_owned())) };
        let (word, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let argument = argument.trim();
        match word {
            "quit" | "exit" | "bye" => return Ok(Next::Leave),
            "help" | "?" => observe::complain(HELP),
            "new" | "clear" => {
                let system = self.messages.first().filter(|m| m["role"] == "system").cloned();
                self.messages = system.into_iter().collect();
            }
            "system" => self.system(Some(argument).filter(|a| !a.is_empty())),
            "model" if argument.is_empty() => {
                let models = remote::json(&self.client, "GET", "/v1/models", None)?;
                let names = models["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str());
                observe::complain(names.collect::<Vec<_>>().join("\n"));
            }
            "model" => self.model = Some(argument.to_owned()),
            "temp" => self.option("temperature", argument, argument.parse().ok().map(|t: f64| json!(t)))?,
            "seed" => self.option("seed", argument, argument.parse().ok().map(|n: u64| json!(n)))?,
            "max" => self.option("max_tokens", argument, argument.parse().ok().map(|n: u64| json!(n)))?,
            "undo" => self.forget(true),
            "retry" => {
                self.forget(false);
                let asked = self.messages.last().is_some_and(|m| m["role"] == "user");
                return Ok(if asked { Next::Again } else { Next::Nothing });
            }
            "save" => {
                let text = Value::from(self.messages.clone()).to_string();
                std::fs::write(argument, text)
                    .map_err(|e| Error::io(argument, "write the conversation", e))?;
            }
            other => return Err(Error::bad("chat", "command", "one of /help", format!("/{other}"))),
        }
        Ok(Next::Nothing)
    }

    fn option(&mut self, name: &str, found: &str, value: Option<Value>) -> Result<()> {
        let value = value.ok_or_else(|| Error::bad("chat", name, "a number", format!("{found:?}")))?;
        self.options.insert(name.to_owned(), value);
        Ok(())
    }

    /// Takes the last answer back, and the question as well if `question`.
    fn forget(&mut self, question: bool) {
        if self.messages.last().is_some_and(|m| m["role"] == "assistant") {
            self.messages.pop();
        }
        if question && self.messages.last().is_some_and(|m| m["role"] == "user") {
            self.messages.pop();
        }
    }

    /// Streams the answer to standard output, and its speed to standard error.
    fn answer(&mut self, interrupts: &Interrupts) -> Result<()> {
        let mut body = json!({
            "messages": self.messages, "stream": true, "stream_options": { "include_usage": true },
        });
        let fields = body.as_object_mut().expect("an object above");
        fields.extend(self.model.clone().map(|m| ("model".to_owned(), json!(m))));
        fields.extend(self.options.clone());
        let bytes = body.to_string().into_bytes();
        let response = self.client.send("POST", "/v1/chat/completions", Some(&bytes))?;
        let response = remote::good(&self.client, response)?;
        let mut out = Out::stdout();
        let (mut text, mut stats) = (String::new(), None);
        interrupts.begin();
        for line in response.lines() {
            // Leaving the connection cancels the request.
            if interrupts.stopped() {
                break;
            }
            let Some(data) = line.as_ref().ok().and_then(|l| l.strip_prefix("data: ")) else {
                line?;
                continue;
            };
            if data == "[DONE]" {
                break;
            }
            let chunk: Value = serde_json::from_str(data)
                .map_err(|e| Error::bad(self.client.address().to_string(), "stream", "JSON", e))?;
            if let Some(message) = chunk["error"]["message"].as_str() {
                interrupts.end();
                return Err(Error::bad(
                    self.client.address().to_string(),
                    "answer",
                    "one to the end",
                    message,
                ));
            }
            let delta = &chunk["choices"][0]["delta"];
            if let Some(thought) = delta["reasoning_content"].as_str() {
                // What the model thinks is shown, but is no part of the answer.
                drop(write!(std::io::stderr(), "{thought}"));
            }
            if let Some(piece) = delta["content"].as_str() {
                out.text(piece)?;
                text += piece;
            }
            if chunk["usage"].is_object() {
                stats = Some(chunk);
            }
        }
        interrupts.end();
        out.text("\n")?;
        if let Some(chunk) = stats {
            observe::note(speed(&chunk));
        }
        self.messages.push(json!({ "role": "assistant", "content": text }));
        Ok(())
    }
}

fn speed(chunk: &Value) -> String {
    let (u, t) = (&chunk["usage"], &chunk["timings"]);
    let real = |v: &Value| v.as_f64().unwrap_or(0.0);
    let cached = u["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    let cached = if cached > 0 { format!(" ({cached} cached)") } else { String::new() };
    format!(
        "[TTFT {:.0} ms · pp {} tokens{cached}, {:.1} tok/s · tg {} tokens, {:.1} tok/s]",
        real(&t["ttft_ms"]),
        u["prompt_tokens"],
        real(&t["prompt_per_second"]),
        u["completion_tokens"],
        real(&t["predicted_per_second"]),
    )
}

/// Questions: edited at a terminal, else the lines of standard input.
struct Lines {
    editor: Option<rustyline::DefaultEditor>,
    history: Option<PathBuf>,
}

impl Lines {
    fn new(at_terminal: bool, keep: bool) -> Result<Lines> {
        if !at_terminal {
            return Ok(Lines { editor: None, history: None });
        }
        let failed =
            |e: ReadlineError| Error::io("terminal", "set the line editor up", std::io::Error::other(e));
        let mut editor = rustyline::DefaultEditor::new().map_err(failed)?;
        let history = if keep { history_file() } else { None };
        if let Some(file) = &history {
            // There is none before the first time.
            drop(editor.load_history(file));
        }
        Ok(Lines { editor: Some(editor), history })
    }

    /// The next question, all its lines; none at the end.
    fn next(&mut self) -> Result<Option<String>> {
        let mut text = String::new();
        let mut quoted = false;
        loop {
            let first = text.is_empty() && !quoted;
            let Some(line) = self.line(if first { "> " } else { ". " })? else {
                return Ok(Some(text).filter(|t| !t.trim().is_empty()));
            };
            let trimmed = line.trim_end();
            if let Some(rest) = trimmed.strip_prefix("\"\"\"").filter(|_| first) {
                if let Some(whole) = rest.strip_suffix("\"\"\"") {
                    return Ok(Some(whole.to_owned()));
                }
                quoted = true;
                text = if rest.is_empty() { String::new() } else { format!("{rest}\n") };
            } else if quoted {
                match trimmed.strip_suffix("\"\"\"") {
                    Some(last) => return Ok(Some(text + last)),
                    None => text += &format!("{line}\n"),
                }
            } else if let Some(more) = trimmed.strip_suffix('\\') {
                text += &format!("{more}\n");
            } else if !first || !trimmed.is_empty() {
                return Ok(Some(text + trimmed));
            }
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Option<String>> {
        let Some(editor) = &mut self.editor else {
            let mut line = String::new();
            let read = std::io::stdin().read_line(&mut line);
            let read = read.map_err(|e| Error::io("standard input", "read", e))?;
            return Ok((read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()));
        };
        match editor.readline(prompt) {
            Ok(line) => {
                drop(editor.add_history_entry(&line));
                Ok(Some(line))
            }
            // Ctrl-C gives up the line that is being typed.
            Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
            Err(ReadlineError::Eof) => Ok(None),
            Err(e) => Err(Error::io("terminal", "read a line", std::io::Error::other(e))),
        }
    }

    fn save(&mut self) {
        if let (Some(editor), Some(file)) = (&mut self.editor, &self.history)
            && let Err(e) = editor.save_history(file)
        {
            log::warn!("{}: history not written: {e}", file.display());
        }
    }
}

/// Where programs keep what they remember (XDG Base Directory specification); made if it is not there.
fn history_file() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")))?.join("tegu");
    std::fs::create_dir_all(&base).ok()?;
    Some(base.join("chat-history"))
}
