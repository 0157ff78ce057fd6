//! `tegu synth`: a GGUF with random weights in a published model's shape, for measuring without the model.

mod check;
mod random;
mod shapes;

use std::path::{Path, PathBuf};

use serde_json::{Value as JsonValue, json};

use crate::cli::aside::AsideFile;
use crate::cli::out::{self, Out};
use crate::cli::pack::hparams::{self, Meta};
use crate::cli::pack::mix::{self, Context, Target};
use crate::format::gguf::{ScalarArray, StrArray, Value};
use crate::format::{Codec, gguf_write};
use crate::model;
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
    /// Load the file and print how many experts of each layer 64 tokens pick.
    #[arg(long)]
    pub check: bool,
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
    let bytes = make(
        &args.shape,
        &config,
        args.codec,
        Dice { seed: args.seed, skew: args.router_skew },
        &args.output,
    )?;
    let spread = if args.check { check::check(&args.output)? } else { Vec::new() };
    let mut out = Out::stdout();
    let layers = &config["num_hidden_layers"];
    if args.json {
        let row = |s: &check::Spread| json!({"layer": s.layer, "distinct": s.distinct, "top_quarter": s.top_quarter});
        let rows: Vec<JsonValue> = spread.iter().map(row).collect();
        return out.json(&json!({
            "output": out::path(&args.output), "file_bytes": bytes, "layers": layers,
            "check": args.check.then_some(rows),
        }));
    }
    let (file, size) = (args.output.display(), Bytes(bytes));
    out.text(&format!("{file}: {size}, {layers} layers, {}\n", args.codec.name))?;
    for s in spread {
        let share = s.top_quarter * 100.0;
        let what = format!("{} experts, busiest quarter {share:.0}% of picks", s.distinct);
        out.text(&format!("layer {}: {} tokens pick {what}\n", s.layer, check::TOKENS))?;
    }
    Ok(())
}

/// What is random.
#[derive(Debug, Clone, Copy)]
struct Dice {
    seed: u64,
    /// `--router-skew`.
    skew: f32,
}

/// Writes the model that `config` describes to `output` and gives its size.
fn make(name: &str, config: &JsonValue, target: Target, dice: Dice, output: &Path) -> Result<u64> {
    let name_path = Path::new(name);
    let hyper = model::hf::hyper(name_path, config)?;
    let mut meta = Meta::new();
    let h = hparams::convert(name_path, config, &hyper, &mut meta)?;
    meta.push(("general.name".into(), Value::Str(format!("{name} with random weights"))));
    tokenizer(hyper.vocab, &mut meta);
    meta.push(("general.file_type".into(), Value::U32(target.file_type)));
    meta.push(("general.quantization_version".into(), Value::U32(2)));
    let context = Context { target, layers: h.layers, tied: false };
    let chosen = shapes::tensors(config).into_iter().map(|t| {
        let codec = context.choose(&t.name, &t.dims);
        (t, codec)
    });
    write(dice, &meta, &chosen.collect::<Vec<_>>(), output)
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
    // A shape with experts says how wide they are, and only those have a router.
    if args.router_skew != 0.0 && config["moe_intermediate_size"].is_null() {
        return Err(Error::bad("command line", "--router-skew", "a shape with routed experts", &args.shape));
    }
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
fn write(dice: Dice, meta: &Meta, tensors: &[(SynthTensor, Codec)], output: &Path) -> Result<u64> {
    /// Bytes made at a time, about.
    const CHUNK_BYTES: usize = 1 << 20;
    let mut plan = gguf_write::Plan::new();
    meta.iter().for_each(|(key, value)| plan.meta(key, value));
    tensors.iter().for_each(|(t, codec)| plan.tensor(&t.name, *codec, &t.dims));
    let progress = Progress::new("writing", plan.data_bytes(), Unit::Bytes);
    let mut file = AsideFile::create(output)?;
    let fail = |e| Error::io(output, "write", e);
    let mut body = plan.start(&mut file).map_err(fail)?;
    let mut buffer = Vec::new();
    for (i, (t, codec)) in tensors.iter().enumerate() {
        body.begin(&t.name).map_err(fail)?;
        let mut random = Random::new(dice.seed, i as u64);
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
                    let length = (dice.skew * random.normal()).exp();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Source;

    /// A shape's config made small; widths that the codecs' blocks allow.
    fn small(name: &str) -> JsonValue {
        let mut config = shapes::config(name).unwrap();
        for (key, n) in [
            ("num_hidden_layers", 6),
            ("hidden_size", 256),
            ("intermediate_size", 512),
            ("moe_intermediate_size", 64),
            ("vocab_size", 1024),
            ("max_position_embeddings", 4096),
        ] {
            if !config[key].is_null() {
                config[key] = json!(n);
            }
        }
        config
    }

    #[test]
    fn every_shape_loads_and_spreads_its_tokens() {
        let dir = tempfile::tempdir().unwrap();
        for name in shapes::NAMES {
            for target in ["q4_0", "q4_k_m", "q8_0"] {
                let path = dir.path().join("m.gguf");
                let dice = Dice { seed: 1, skew: 0.0 };
                let bytes = make(name, &small(name), codec(target).unwrap(), dice, &path).unwrap();
                assert_eq!(bytes, std::fs::metadata(&path).unwrap().len());
                let rows = check::check(&path).unwrap();
                assert_eq!(rows.is_empty(), name == "llama3-8b");
                for s in rows {
                    // 64 tokens with 4 to 8 picks of 64 or 128 experts: chance leaves few out.
                    assert!(s.distinct >= 50, "{name} {target}: {s:?}");
                    assert!(s.top_quarter < 0.5, "{name} {target}: {s:?}");
                }
            }
        }
    }

    #[test]
    fn skew_makes_some_experts_busy_and_seeds_make_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let at = |seed: u64, skew: f32| {
            let path = dir.path().join(format!("{seed}-{skew}.gguf"));
            let config = small("deepseek-v2-lite");
            make("deepseek-v2-lite", &config, codec("q4_0").unwrap(), Dice { seed, skew }, &path).unwrap();
            path
        };
        let busy = |path: &Path| {
            let rows = check::check(path).unwrap();
            rows.iter().map(|s| s.top_quarter).sum::<f64>() / rows.len() as f64
        };
        let (even, skewed) = (busy(&at(1, 0.0)), busy(&at(1, 1.0)));
        assert!(skewed > even + 0.15, "{even} {skewed}");
        let data = |path: &Path| Source::open(path).unwrap().read_f32(0).unwrap();
        assert_eq!(data(&at(1, 0.0)), data(&at(1, 1.0)));
        assert_ne!(data(&at(1, 0.0)), data(&at(2, 0.0)));
    }
}
