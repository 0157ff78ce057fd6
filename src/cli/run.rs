//! `tegu run`: one answer, or a conversation at the terminal.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::answer::{Answer, Chat, Finish};
use super::args::{Common, Load, Sampling};
use super::load::{self, Loaded};
use super::{out, resolve};
use crate::app::power::{EnergyWatch, Site};
use crate::app::{self, Interrupts};
use crate::config::Config;
use crate::observe;
use crate::units::{Error, Result};

/// Arguments of `tegu run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A model (file or folder), a prompt, or both in this order. A single word is the model if such a file exists
    #[arg(value_name = "MODEL] [PROMPT", num_args = 0..=2, hide_possible_values = true)]
    words: Vec<String>,
    /// The prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Turn \n, \t, \\ and \" in the prompt into what they stand for
    #[arg(short, long)]
    escape: bool,
    /// Instructions for the conversation
    #[arg(long, visible_alias = "system-prompt", value_name = "TEXT")]
    system: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long)]
    raw: bool,
    /// Tokens to generate at most; -1: until the answer or the context ends
    #[arg(short = 'n', long, visible_alias = "predict", value_name = "N", default_value_t = -1)]
    #[arg(allow_negative_numbers = true)]
    n_predict: i64,
    /// Context length: prompt and answers together; 0: all the model allows [default: 4096]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<u64>,
    /// Prompt tokens of a step
    #[arg(short, long, visible_alias = "ubatch-size", value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Stop before this text; may be repeated
    #[arg(short = 'r', long = "stop", visible_alias = "reverse-prompt", value_name = "TEXT")]
    stop: Vec<String>,
    /// With --json: log-probabilities of the N likeliest tokens at each position
    #[arg(long, value_name = "N", requires = "json", value_parser = clap::value_parser!(u16).range(0..=100))]
    logprobs: Option<u16>,
    /// Show special tokens in the answer
    #[arg(long)]
    special: bool,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[arg(long, hide = true)]
    conversation: bool,
    #[arg(long, hide = true)]
    single_turn: bool,
    #[arg(long, hide = true)]
    no_display_prompt: bool,
    #[arg(long, hide = true)]
    simple_io: bool,
    #[arg(long, hide = true)]
    jinja: bool,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
The answer goes to standard output, speed to standard error: TTFT is the time to the first token, pp prompt tokens a
second, tg generated tokens a second. Ctrl-C stops the answer, twice leaves.

Examples:
  tegu run \"What is gravity?\"
  tegu run model.gguf
  tegu run model.gguf \"Tell me a story.\" --temp 0.8 --seed 7 -n 200
  tegu run -m model.gguf -p \"Once upon a time\" --raw --json";

/// A prompt larger than this is a mistake: no context holds it.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

/// Runs the command.
pub fn run(args: &RunArgs, common: &Common) -> Result<()> {
    let mut flags = args.load.overrides()?;
    flags.extend(args.sampling.overrides());
    flags.extend(args.ctx_size.map(|n| ("context", n.to_string())));
    let config = common.config(flags)?;
    let (named, word) = resolve::words(&args.words, args.load.model_flag.as_deref())?;
    let prompt = prompt(args, word)?;
    if args.json && prompt.is_none() {
        return Err(Error::bad("command line", "--json", "a prompt", "none"));
    }
    let model = resolve::model(named.as_deref(), &config)?;
    let mut options = args.load.options(model, &config);
    options.rows_max = args.batch_size as usize;
    let opened = app::prepare(options)?;
    args.load.check(&opened)?;
    let text = load::text(&opened)?;
    let mut chat = chat(args, &config, load::load(opened)?, text)?;
    let interrupts = Interrupts::take();
    match prompt {
        Some(prompt) => once(args, &mut chat, &prompt, &interrupts),
        None => talk(&mut chat, &interrupts),
    }
}

fn prompt(args: &RunArgs, word: Option<String>) -> Result<Option<String>> {
    let given = [args.prompt.is_some() || args.file.is_some(), word.is_some()];
    if given == [true, true] {
        return Err(Error::bad("command line", "PROMPT", "one prompt", "a word and a flag"));
    }
    let text = match &args.file {
        Some(file) => Some(super::text_file(file, PROMPT_BYTES_MAX)?),
        None => args.prompt.clone().or(word),
    };
    Ok(if args.escape { text.map(|t| unescape(&t)) } else { text })
}

fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, chars.as_str().chars().next()) {
            ('\\', Some(e @ ('n' | 't' | '\\' | '"'))) => {
                chars.next();
                out.push(match e {
                    'n' => '\n',
                    't' => '\t',
                    other => other,
                });
            }
            _ => out.push(c),
        }
    }
    out
}

fn chat(args: &RunArgs, config: &Config, loaded: Loaded, text: app::Text) -> Result<Chat> {
    let mut params = args.sampling.params(config);
    params.logprobs = args.logprobs.map(usize::from);
    let max_new = usize::try_from(args.n_predict).unwrap_or(usize::MAX);
    let mut chat = Chat::new(loaded.app, text, params, max_new);
    chat.load_seconds = loaded.took.as_secs_f64();
    chat.raw = args.raw;
    chat.stops = args.stop.clone();
    chat.show_special = args.special;
    chat.prefill_chunk = args.batch_size as usize;
    chat.meter = EnergyWatch::start(Site::open(None)?.sensors());
    if let Some(system) = &args.system {
        chat.say("system", system);
    }
    Ok(chat)
}

fn once(args: &RunArgs, chat: &mut Chat, prompt: &str, interrupts: &Interrupts) -> Result<()> {
    chat.say("user", prompt);
    let mut out = out::Out::stdout();
    let answer = chat.answer(interrupts, &mut |piece| if args.json { Ok(()) } else { out.text(piece) })?;
    if args.json {
        out.json(&to_json(chat, &answer))?;
    } else {
        out.text("\n")?;
        observe::note(stats(&answer));
    }
    if matches!(answer.finish, Finish::Interrupted) { Err(Error::Interrupted) } else { Ok(()) }
}

/// A turn a line until the input ends. A turn that does not fit is passed over; a script hears of the first one by how the
/// program ends.
fn talk(chat: &mut Chat, interrupts: &Interrupts) -> Result<()> {
    let at_terminal = std::io::stdin().is_terminal();
    let mut out = out::Out::stdout();
    let mut refused = None;
    loop {
        if at_terminal {
            drop(write!(std::io::stderr(), "> "));
        }
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line);
        if read.map_err(|e| Error::io("standard input", "read", e))? == 0 {
            return refused.map_or(Ok(()), Err);
        }
        if line.trim().is_empty() {
            continue;
        }
        chat.say("user", line.trim_end_matches(['\n', '\r']));
        let answer = match chat.answer(interrupts, &mut |piece| out.text(piece)) {
            Ok(answer) => answer,
            // The conversation is as it was before that turn.
            Err(e @ Error::Limit { .. }) => {
                if at_terminal || refused.is_some() {
                    observe::complain(format_args!("tegu: {e}"));
                } else {
                    refused = Some(e);
                }
                chat.forget_last();
                continue;
            }
            Err(e) => return Err(e),
        };
        out.text("\n")?;
        observe::note(stats(&answer));
        chat.hear(&answer);
    }
}

fn stats(answer: &Answer) -> String {
    let s = &answer.stats;
    let reused = if s.reused > 0 { format!(" (+{} cached)", s.reused) } else { String::new() };
    let a_token = |mj: f64| mj / 1e3 / s.generated.max(1) as f64;
    let energy = answer.energy.map_or(String::new(), |(_, mj, _)| format!(", {:.3} J/token", a_token(mj)));
    format!(
        "[TTFT {:.0} ms · pp {} tokens{reused}, {:.1} tok/s · tg {} tokens, {:.1} tok/s{energy} · {}]",
        s.ttft.as_secs_f64() * 1e3,
        s.prefilled,
        s.pp(),
        s.generated,
        s.tg(),
        answer.finish
    )
}

fn to_json(chat: &Chat, answer: &Answer) -> Value {
    let s = &answer.stats;
    let tokens: Vec<u32> = answer.tokens.iter().map(|t| t.token).collect();
    let mut object = json!({
        "text": answer.text,
        "tokens": tokens,
        "finish": answer.finish.to_string(),
        "prompt_tokens": s.prefilled + s.reused,
        "generated_tokens": s.generated,
        "ttft_ms": s.ttft.as_secs_f64() * 1e3,
        "pp_tok_s": out::number(s.pp()),
        "tg_tok_s": out::number(s.tg()),
        "seed": chat.seed(),
        "threads": chat.app.threads,
        "kernels": chat.app.kernels,
        "load_seconds": chat.load_seconds,
        "peak_bytes": load::peak_bytes(),
    });
    if let Some((prefill_mj, decode_mj, method)) = answer.energy {
        let (prefill, decode) = (out::number(prefill_mj), out::number(decode_mj));
        object["energy_mj"] = json!({ "prefill": prefill, "decode": decode, "method": method });
    }
    if chat.wants_logprobs() {
        let row = |t: &crate::sample::Sampled| {
            let top: Vec<Value> =
                t.top.iter().map(|&(id, p)| json!({ "id": id, "logprob": out::number(p.into()) })).collect();
            json!({ "id": t.token, "logprob": out::number(t.logprob.into()), "top": top })
        };
        object["logprobs"] = answer.tokens.iter().map(row).collect();
    }
    object
}

#[test]
fn escapes_are_undone() {
    assert_eq!(unescape(r#"a\nb\\n \"q\" \x"#), "a\nb\\n \"q\" \\x");
}
