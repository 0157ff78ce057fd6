//! `tegu logits`: given tokens through the model; logits, hidden states and expert picks into a safetensors file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::args::{Common, Load, useless};
use super::tensors::{Dtype, Spec, Writer};
use super::{load, out, resolve, routes};
use crate::app;
use crate::backend::MlaOrder;
use crate::engine::{EvalChunk, EvalOptions};
use crate::limits;
use crate::model::{AttnHyper, Hyper, Mask};
use crate::units::{Error, ExpertId, Result, TokenId};

/// Arguments of `tegu logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// Model file or folder [default: $TEGU_MODEL, then the settings, then the bundled demo]
    #[arg(value_name = "MODEL", conflicts_with = "model_flag")]
    model: Option<PathBuf>,
    /// Token ids: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',', required_unless_present = "tokens_file")]
    tokens: Vec<TokenId>,
    /// File with token ids, separated by commas or white space
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    tokens_file: Option<PathBuf>,
    /// Where to write: `input_ids` (T) i32, `logits` (T, vocab) f32
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Also `hidden.0` (embeddings), `hidden.i` (after layer i) … `hidden.N` (after the final norm), (T, hidden) f32
    #[arg(long)]
    hidden: bool,
    /// Tokens of a step; 0: as many as fit
    #[arg(long, value_name = "N", default_value_t = 0)]
    chunk: usize,
    /// Run in a batch with N - 1 other sequences
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    batch: u16,
    /// Order of latent attention's products [default: the cheaper one]
    #[arg(long, value_parser = ["absorbed", "materialized"])]
    mla: Option<String>,
    /// Attention mask of every layer: full, sliding:W, strided:K or local-strided:W,K
    #[arg(long, value_name = "MASK", value_parser = mask)]
    mask: Option<Mask>,
    /// Read all pages and apply the mask to each element: what sparse reading is compared with
    #[arg(long)]
    dense_mask: bool,
    /// Record the expert picks: `routes` (T, layers * picks) i32
    #[arg(long, value_name = "FILE")]
    routes_out: Option<PathBuf>,
    /// Replay recorded expert picks instead of choosing
    #[arg(long, value_name = "FILE")]
    routes_in: Option<PathBuf>,
    /// One JSON object about the run on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Examples:
  tegu logits --tokens 1,2,3 -o out.safetensors
  tegu logits model.gguf --tokens-file ids.txt --hidden --exact --chunk 7 -o out.safetensors
  tegu logits --exact --tokens 1,2,3 --routes-out picks.safetensors -o exact.safetensors
  tegu logits --tokens 1,2,3 --routes-in picks.safetensors -o default.safetensors";

impl LogitsArgs {
    /// Refuses what would do nothing with this model, or here.
    fn check(&self, opened: &app::Prepared) -> Result<()> {
        self.load.check(opened)?;
        let h = opened.hyper();
        if self.mla.is_some() && !matches!(h.attn, AttnHyper::Mla { .. }) {
            return Err(useless(
                "--mla",
                "a model with latent attention",
                format!("grouped-query attention ({})", h.arch),
            ));
        }
        for (flag, given) in
            [("--routes-out", self.routes_out.is_some()), ("--routes-in", self.routes_in.is_some())]
        {
            if given && h.moe.is_none() {
                return Err(useless(
                    flag,
                    "a model with routed experts",
                    format!("a dense one ({})", h.arch),
                ));
            }
        }
        if self.dense_mask && opened.on_gpu() {
            return Err(useless("--dense-mask", "a model on --backend cpu", "a GPU"));
        }
        if self.dense_mask && h.masks.iter().all(|m| *m == Mask::Full) {
            return Err(useless("--dense-mask", "a --mask, or a model with one", "full attention"));
        }
        Ok(())
    }
}

fn mask(text: &str) -> std::result::Result<Mask, String> {
    Mask::parse(text).ok_or_else(|| "expected full, sliding:W, strided:K or local-strided:W,K".into())
}

/// Runs the command.
pub fn run(args: &LogitsArgs, common: &Common) -> Result<()> {
    let config = common.config(args.load.overrides()?)?;
    let tokens = tokens(args)?;
    let model = resolve::model(args.model.as_deref().or(args.load.model_flag.as_deref()), &config)?;
    super::aside::differs(&args.output, &model)?;
    let mut options = args.load.options(model, &config);
    options.context_tokens = tokens.len();
    options.sequences = args.batch.into();
    options.rows_max = options.rows_max.max(args.batch.into());
    options.mask = args.mask;
    options.dense_masks = args.dense_mask;
    options.mla = args.mla.as_deref().map(|order| match order {
        "absorbed" => MlaOrder::Absorbed,
        _ => MlaOrder::Materialized,
    });
    let opened = app::prepare(options)?;
    args.check(&opened)?;
    if args.routes_out.as_ref() == Some(&args.output) {
        let found = args.output.display();
        return Err(Error::bad("command line", "--routes-out", "another file than --output", found));
    }
    let replay = args.routes_in.as_deref().map(|f| routes::read(f, opened.hyper(), tokens.len()));
    let mut loaded = load::load(opened)?;
    let replay = replay.transpose()?;

    let started = Instant::now();
    write(args, &mut loaded.app, &tokens, replay.as_deref())?;
    let seconds = started.elapsed().as_secs_f64();
    let app = &loaded.app;
    let counters = app.engine.counters();
    if args.json {
        out::Out::stdout().json(&json!({
            "output": out::path(&args.output),
            "tokens": tokens.len(),
            "vocab": app.engine.hyper().vocab,
            "layers": app.engine.hyper().n_layers,
            "seconds": seconds,
            "load_seconds": loaded.took.as_secs_f64(),
            "threads": app.threads,
            "kernels": app.kernels,
            "kv_pages_read": counters.kv_pages_read,
            "experts_fetched": counters.experts_fetched,
            "peak_bytes": load::peak_bytes(),
        }))?;
    }
    Ok(())
}

/// The ids from the flag or the file, never none and never more than a context may hold.
fn tokens(args: &LogitsArgs) -> Result<Vec<TokenId>> {
    // Seven digits and a separator each, at the most tokens there may be.
    const FILE_BYTES_MAX: u64 = 8 * limits::CONTEXT_MAX as u64;
    let Some(file) = &args.tokens_file else { return Ok(args.tokens.clone()) };
    let text = super::text_file(file, FILE_BYTES_MAX)?;
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    let ids: Vec<TokenId> = words
        .map(|w| w.parse().map_err(|_| Error::bad(file, "token id", "a whole number", format!("{w:?}"))))
        .collect::<Result<_>>()?;
    if ids.is_empty() {
        return Err(Error::bad(file, "token ids", "at least one", "none"));
    }
    Ok(ids)
}

fn specs(h: &Hyper, tokens: usize, hidden: bool) -> Vec<Spec> {
    let matrix = |name: String, width| Spec { name, dtype: Dtype::F32, rows: Some(tokens), width };
    let mut specs = vec![Spec { name: "input_ids".into(), dtype: Dtype::I32, rows: None, width: tokens }];
    specs.push(matrix("logits".into(), h.vocab));
    if hidden {
        specs.extend((0..=h.n_layers).map(|i| matrix(format!("hidden.{i}"), h.hidden)));
    }
    specs
}

fn write(
    args: &LogitsArgs,
    app: &mut app::App,
    tokens: &[TokenId],
    replay: Option<&[ExpertId]>,
) -> Result<()> {
    let h = app.engine.hyper().clone();
    let writer = Writer::create(&args.output, specs(&h, tokens.len(), args.hidden))?;
    let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    writer.rows_i32(0, 0, &ids)?;
    let options = EvalOptions {
        chunk: args.chunk,
        batch: args.batch.into(),
        hidden: if args.hidden { (0..=h.n_layers).collect() } else { Vec::new() },
        record_routes: args.routes_out.is_some(),
        routes: replay,
        logits_from: 0,
    };
    let mut picks = Vec::new();
    let name = app.source.path().to_owned();
    app.engine.eval(tokens, &options, &mut |chunk: EvalChunk| {
        if let Some((field, found)) = senseless(&chunk, h.hidden, h.vocab) {
            return Err(Error::bad(&name, field, "a finite number", found));
        }
        writer.rows_f32(1, chunk.logits_from, chunk.logits)?;
        for (i, rows) in chunk.hidden.iter().enumerate() {
            writer.rows_f32(2 + i, chunk.position, rows)?;
        }
        picks.extend_from_slice(chunk.routes);
        Ok(())
    })?;
    if let Some(file) = &args.routes_out {
        write_routes(file, &h, tokens.len(), &picks)?;
    }
    writer.finish()
}

/// The first value that is no finite number, by position and then from the embedding to the logits, and where it is.
fn senseless(chunk: &EvalChunk, width: usize, vocab: usize) -> Option<(String, f32)> {
    let hidden = chunk.hidden.iter().enumerate();
    let hidden = hidden.map(|(i, rows)| (format!("hidden.{i}"), *rows, chunk.position, width));
    let logits = ("logits".to_owned(), chunk.logits, chunk.logits_from, vocab);
    let first = |(name, values, from, width): (String, &[f32], usize, usize)| {
        let at = values.iter().position(|x| !x.is_finite())?;
        Some((from + at / width, name, at % width, values[at]))
    };
    // The earliest of those; at one position the first part, in the order in which they are computed.
    let (position, name, element, found) = hidden.chain([logits]).filter_map(first).min_by_key(|f| f.0)?;
    Some((format!("{name} at position {position}, element {element}"), found))
}

fn write_routes(file: &Path, h: &Hyper, tokens: usize, picks: &[ExpertId]) -> Result<()> {
    let moe = h.moe.as_ref();
    let shape = (tokens, h.n_layers, moe.map_or(0, |m| m.n_picked));
    routes::write(file, shape, picks)
}

#[test]
fn the_first_value_that_is_no_number_is_named() {
    let (mut a, mut b, mut logits) = ([0.0; 4], [0.0; 4], [0.0; 6]);
    let say = |a: &[f32], b: &[f32], logits: &[f32]| {
        let chunk = EvalChunk {
            position: 10,
            rows: 2,
            logits_from: 10,
            logits,
            hidden: vec![a, b],
            routes: &[],
            margins: &[],
        };
        senseless(&chunk, 2, 3).map(|(field, found)| format!("{field}: {found}"))
    };
    assert_eq!(say(&a, &b, &logits), None);
    logits[4] = f32::NAN;
    assert_eq!(say(&a, &b, &logits).as_deref(), Some("logits at position 11, element 1: NaN"));
    b[3] = f32::INFINITY;
    assert_eq!(say(&a, &b, &logits).as_deref(), Some("hidden.1 at position 11, element 1: inf"));
    logits[0] = f32::NEG_INFINITY;
    assert_eq!(say(&a, &b, &logits).as_deref(), Some("logits at position 10, element 0: -inf"));
    a[1] = f32::NAN;
    assert_eq!(say(&a, &b, &logits).as_deref(), Some("hidden.0 at position 10, element 1: NaN"));
}
