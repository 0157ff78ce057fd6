//! `tegu ppl`: perplexity of a text.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::args::{Common, Load};
use super::perplexity::{Tally, Windows};
use super::{load, out, resolve};
use crate::app;
use crate::engine::EvalOptions;
use crate::observe::{Progress, Unit};
use crate::units::{Error, Result, TokenId};

/// Arguments of `tegu ppl`.
#[derive(Debug, Args)]
pub struct PplArgs {
    /// Model file or folder [default: $TEGU_MODEL, then the settings, then the bundled demo]
    #[arg(value_name = "MODEL", conflicts_with = "model_flag")]
    model: Option<PathBuf>,
    /// The text, UTF-8; special tokens written out in it are parsed
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens a window
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..))]
    ctx: u32,
    /// Score only the second half of each window
    #[arg(long)]
    skip_half: bool,
    /// Stop after N windows
    #[arg(long, value_name = "N", visible_alias = "chunks")]
    windows: Option<usize>,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Windows of N tokens stand side by side; every position of a window but the first is scored. Nothing is inserted, no
BOS; an incomplete last window is dropped.

Examples:
  tegu ppl --file text.txt --ctx 256
  tegu ppl model.gguf --file text.txt --ctx 2048 --skip-half --exact --json";

/// A text of this size has some 10^8 tokens: days of work, and more than any evaluation uses.
const TEXT_BYTES_MAX: u64 = 512 << 20;

/// Runs the command.
pub fn run(args: &PplArgs, common: &Common) -> Result<()> {
    let config = common.config(args.load.overrides()?)?;
    let model = resolve::model(args.model.as_deref().or(args.load.model_flag.as_deref()), &config)?;
    let mut options = args.load.options(model, &config);
    let windows = Windows { ctx: args.ctx as usize, skip_half: args.skip_half };
    options.context_tokens = windows.ctx;
    let opened = app::prepare(options)?;
    args.load.check(&opened)?;
    let trained = opened.hyper().context_tokens;
    if windows.ctx > trained {
        let needs = windows.ctx.to_string();
        return Err(Error::Limit {
            what: "--ctx".into(),
            needs,
            has: format!("{trained} (the model's context)"),
        });
    }
    if args.windows == Some(0) {
        return Err(Error::bad("command line", "--windows", "1 or more", 0));
    }
    let text = super::text_file(&args.file, TEXT_BYTES_MAX)?;
    let tokens = load::text(&opened)?.tokenizer.encode(&text, true, false)?;
    let count = windows.count(tokens.len()).min(args.windows.unwrap_or(usize::MAX));
    if count == 0 {
        let expected = format!("at least one window of {} tokens", windows.ctx);
        return Err(Error::bad(&args.file, "text", expected, format!("{} tokens", tokens.len())));
    }
    let name = opened.source.path().to_owned();
    let mut app = load::load(opened)?.app;
    let started = Instant::now();
    let tally = score(&mut app, &name, &windows, &tokens[..count * windows.ctx])?;
    let seconds = started.elapsed().as_secs_f64();
    if args.json {
        return out::Out::stdout().json(&json!({
            "ppl": out::number(tally.ppl()),
            "error": out::number(tally.error()),
            "nll": out::number(tally.nll / tally.scored as f64),
            "model": out::path(&name),
            "file": out::path(&args.file),
            "ctx": windows.ctx,
            "windows": count,
            "scored": tally.scored,
            "skip_half": windows.skip_half,
            "exact": args.load.exact,
            "tokens": tokens.len(),
            "seconds": seconds,
            "tok_s": (count * windows.ctx) as f64 / seconds,
            "threads": app.threads,
        }));
    }
    out::Out::stdout().text(&format!(
        "ppl {:.4} ± {:.4} ({} positions in {count} windows of {}, {:.0} tok/s)\n",
        tally.ppl(),
        tally.error(),
        tally.scored,
        windows.ctx,
        (count * windows.ctx) as f64 / seconds
    ))
}

/// The sum over all windows of a text by the model at `name`. Logits that say nothing of the token that follows are an error.
fn score(app: &mut app::App, name: &Path, windows: &Windows, tokens: &[TokenId]) -> Result<Tally> {
    let vocab = app.engine.hyper().vocab;
    let progress = Progress::new("windows", (tokens.len() / windows.ctx) as u64, Unit::Items);
    let mut tally = Tally::default();
    // The row before the first scored position is the first whose logits are looked at.
    let options = EvalOptions { logits_from: windows.first_scored() - 1, ..EvalOptions::default() };
    for (i, window) in tokens.chunks_exact(windows.ctx).enumerate() {
        app.engine.eval(window, &options, &mut |chunk| {
            tally.add(windows, window, chunk.logits_from, chunk.logits, vocab).map_err(|bad| {
                let field = format!("logits at window {i}, position {}", bad.row);
                Error::bad(name, field, format!("a probability of token {}", bad.target), bad.found)
            })
        })?;
        progress.add(1);
    }
    Ok(tally)
}
