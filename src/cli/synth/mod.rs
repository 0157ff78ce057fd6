//! `tegu synth`: a GGUF with random weights in a published model's shape, for measuring without the model.

mod random;
mod shapes;

use std::path::{Path, PathBuf};

use serde_json::{Value as JsonValue, json};

use crate::cli::aside::AsideFile;
use crate::cli::out::Out;
use crate::cli::pack::config::Json;
use crate::cli::pack::hparams::{self, Meta};
use crate::cli::pack::mix::{self, Context, Target};
use crate::format::gguf::{ScalarArray, StrArray, Value};
use crate::format::{Codec, gguf_write};
use crate::observe::{Progress, Unit};
use crate::units::{Bytes, Error, Result};
use random::Random;
use shapes::{Kind, SynthTensor};

/// Arguments of `tegu synth`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:\n  tegu synth deepseek-v2-lite -o v2-lite.gguf\n  \
    tegu synth qwen3-30b-a3b -o small.gguf --scale 0.1 --codec q4_k_m --router-skew 0.5")]
pub struct Args {
    /// The model whose shape to take.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(shapes::NAMES))]
    pub shape: String,
    /// The GGUF file to write.
    #[arg(short, long)]
    pub output: PathBuf,
    /// q4_0, q4_k_m or q8_0.
    #[arg(long, value_parser = codec, default_value = "q4_0")]
    pub codec: Target,
    /// The same seed gives the same file.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// How unevenly experts are picked: the spread of the logarithm of router rows' lengths. 0 is even, 1 very uneven.
    #[arg(long, default_value_t = 0.0)]
    pub router_skew: f32,
    /// Multiplies the number of layers (at least 2 stay).
    #[arg(long, default_value_t = 1.0)]
    pub scale: f32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

fn codec(name: &str) -> std::result::Result<Target, String> {
    let known = ["q4_0", "q4_k_m", "q8_0"];
    let target = mix::parse(name).ok().filter(|t| known.contains(&t.name));
    target.ok_or_else(|| format!("expected one of {}", known.join(", ")))
}

/// Runs `tegu synth`.
pub fn synth(args: &Args) -> Result<()> {
    let config = scaled(args)?;
    let path = Path::new(&args.shape);
    let json = Json { path, prefix: "", value: &config };
    let mut meta = Meta::new();
    let h = hparams::convert(&json, &mut meta)?;
    meta.push(("general.name".into(), Value::Str(format!("{} with random weights", args.shape))));
    tokenizer(json.size("vocab_size")?, &mut meta);
    meta.push(("general.file_type".into(), Value::U32(args.codec.file_type)));
    meta.push(("general.quantization_version".into(), Value::U32(2)));
    let context = Context { target: args.codec, layers: h.layers, tied: false };
    let tensors: Vec<(SynthTensor, Codec)> = shapes::tensors(&config)
        .into_iter()
        .map(|t| {
            let codec = context.choose(&t.name, &t.dims);
            (t, codec)
        })
        .collect();
    let bytes = write(args, &meta, &tensors)?;
    let layers = h.layers;
    if args.json {
        return Out::stdout().json(&json!({"output": args.output, "file_bytes": bytes, "layers": layers}));
    }
    let said = format!("{}: {}, {layers} layers, {}\n", args.output.display(), Bytes(bytes), args.codec.name);
    Out::stdout().text(&said)
}

/// The shape's config with its layers scaled.
fn scaled(args: &Args) -> Result<JsonValue> {
    let bad = |flag: &str, expected: &str, found: f32| Error::bad("command line", flag, expected, found);
    if !(args.scale > 0.0 && args.scale <= 8.0) {
        return Err(bad("--scale", "a number above 0 and up to 8", args.scale));
    }
    if !(args.router_skew >= 0.0 && args.router_skew <= 8.0) {
        return Err(bad("--router-skew", "a number from 0 to 8", args.router_skew));
    }
    let mut config = shapes::config(&args.shape).expect("clap lets only known shapes through");
    let layers = config["num_hidden_layers"].as_u64().expect("every shape has layers") as f32;
    config["num_hidden_layers"] = json!(((layers * args.scale).round() as u64).max(2));
    Ok(config)
}

/// A byte-level tokenizer of the right size: bytes, pairs of letters, words that no text gives, and two markers. Any text
/// has ids and any id has text; more is not asked of random weights.
fn tokenizer(vocab_size: usize, meta: &mut Meta) {
    let mut tokens: Vec<String> = (0..=255).map(byte_char).map(String::from).collect();
    let mut merges = Vec::new();
    for a in "\u{120}abcdefghijklmnopqrstuvwxyz".chars() {
        for b in "abcdefghijklmnopqrstuvwxyz".chars() {
            merges.push(format!("{a} {b}"));
            tokens.push(format!("{a}{b}"));
        }
    }
    let markers = ["<|begin|>", "<|end|>"];
    let words = vocab_size - tokens.len() - markers.len();
    tokens.extend((0..words).map(|i| format!("\u{120}w{i}")));
    tokens.extend(markers.map(str::to_owned));
    let kind = |i: usize| if i < vocab_size - markers.len() { 1 } else { 3 };
    let mut put = |key: &str, value| meta.push((format!("tokenizer.ggml.{key}"), value));
    put("model", Value::Str("gpt2".into()));
    put("pre", Value::Str("gpt-2".into()));
    put("tokens", Value::Strs(tokens.iter().collect::<StrArray>()));
    put("token_type", Value::Scalars(ScalarArray::from_i32s((0..vocab_size).map(kind))));
    put("merges", Value::Strs(merges.iter().collect::<StrArray>()));
    put("bos_token_id", Value::U32(vocab_size as u32 - 2));
    put("eos_token_id", Value::U32(vocab_size as u32 - 1));
    put("add_bos_token", Value::Bool(false));
}

/// GPT-2's alphabet: a printable character for each byte.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte as char;
    }
    // The others, in order, from U+0100.
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("at most U+0143")
}

/// Streams the file and gives its size.
fn write(args: &Args, meta: &Meta, tensors: &[(SynthTensor, Codec)]) -> Result<u64> {
    /// Bytes made at a time, about.
    const CHUNK_BYTES: usize = 1 << 20;
    let mut plan = gguf_write::Plan::new();
    meta.iter().for_each(|(key, value)| plan.meta(key, value));
    tensors.iter().for_each(|(t, codec)| plan.tensor(&t.name, *codec, &t.dims));
    let progress = Progress::new("writing", plan.data_bytes(), Unit::Bytes);
    let mut file = AsideFile::create(&args.output)?;
    let fail = |e| Error::io(&args.output, "write", e);
    let mut body = plan.start(&mut file).map_err(fail)?;
    let mut buffer = Vec::new();
    for (i, (t, codec)) in tensors.iter().enumerate() {
        body.begin(&t.name).map_err(fail)?;
        let mut random = Random::new(args.seed, i as u64);
        let (cols, outer) = t.dims.split_last().expect("a shape");
        let (rows, row_bytes) =
            (outer.iter().product::<usize>(), codec.row_bytes(*cols).expect("chosen for it"));
        let step = if matches!(t.kind, Kind::Router(_)) { 1 } else { (CHUNK_BYTES / row_bytes).max(1) };
        for at in (0..rows).step_by(step) {
            buffer.resize(step.min(rows - at) * row_bytes, 0);
            match t.kind {
                Kind::Ones => buffer.as_chunks_mut::<4>().0.fill(1f32.to_le_bytes()),
                Kind::Zeros => buffer.fill(0),
                Kind::Random(std) => random::blocks(*codec, std, &mut random, &mut buffer),
                Kind::Router(std) => {
                    let length = (args.router_skew * random.normal()).exp();
                    random::blocks(*codec, std * length, &mut random, &mut buffer);
                }
            }
            body.write(&buffer).map_err(fail)?;
            progress.add(buffer.len() as u64);
        }
    }
    body.finish().map_err(fail)?;
    file.finish()
}
