//! `tegu pack`: any model to a GGUF that Tegu and llama.cpp load, quantized on the way.

mod config;
mod convert;
pub(super) mod hparams;
mod ids;
pub(super) mod mix;
mod readback;
mod rules;
mod vocab;
mod write;

use std::path::{Path, PathBuf};

use crate::cli::aside;
use crate::cli::out::{self, Out};
use crate::format::Codec;
use crate::format::gguf::Value;
use crate::format::tensor::tensor_bytes;
use crate::model::{self, Hyper};
use crate::observe;
use crate::units::{Bytes, Error, Result};
use crate::weights::{Meta as SourceMeta, Source};
use convert::OutTensor;
use hparams::{Family, Hparams, Meta};
use mix::{Context, Target};
use serde_json::json;

/// Arguments of `tegu pack`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:\n  tegu pack model-folder -o model.gguf --codec q4_k_m\n  \
    tegu pack model.gguf -o small.gguf --codec q4_0")]
pub struct Args {
    /// A Hugging Face folder or a GGUF file.
    pub model: PathBuf,
    /// The GGUF file to write.
    #[arg(short, long)]
    pub output: PathBuf,
    /// f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q4_k_m, q5_k, q5_k_m, q6_k or iq4_nl.
    #[arg(long, value_parser = mix::parse, default_value = "q4_k_m")]
    pub codec: Target,
    /// Threads.
    #[arg(short, long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// A model ready to be written.
struct Packed {
    meta: Meta,
    tensors: Vec<(OutTensor, Codec)>,
    /// What the source was read as; none if this program does not run it.
    hyper: Option<Hyper>,
}

/// Runs `tegu pack`.
pub fn pack(args: &Args) -> Result<()> {
    let source = Source::open(&args.model)?;
    let packed = plan(&source, args.codec)?;
    (0..source.tensors().len()).try_for_each(|t| aside::differs(&args.output, source.file_of(t)))?;
    let check = |written: &Path| match &packed.hyper {
        Some(want) => readback::check(&source, want, written),
        None => Ok(()),
    };
    let bytes = write::write(&source, &packed, &args.output, args.threads.into(), check)?;
    report(args, &packed, bytes)
}

/// Reads the source as any model is read; a Hugging Face model is renamed and described anew, a GGUF kept but for codecs.
fn plan(source: &Source, target: Target) -> Result<Packed> {
    let (mut meta, tensors, layers, hyper) = match source.meta() {
        SourceMeta::HuggingFace(hf) => {
            let bound = model::bind(source)?;
            let mut meta = Meta::new();
            let h = hparams::convert(&hf.config_path, &hf.config, &bound.hyper, &mut meta)?;
            meta.push(("general.name".into(), Value::Str(model_name(source))));
            let keys = vocab::convert(hf, bound.hyper.vocab, &mut meta)?;
            let tensors = convert::tensors(source, &h, &bound.unread)?;
            // Now, rather than after hours of writing.
            readback::foresee(source, &bound.hyper, &meta, &tensors)?;
            say_beyond(&h, &keys, &tensors);
            (meta, tensors, h.layers, Some(bound.hyper))
        }
        SourceMeta::Gguf(gguf) => {
            if source.tensors().iter().any(|t| !t.codec.is_dense() && t.codec != target.codec) {
                observe::note(format_args!(
                    "{} is quantized already: quality is lost twice",
                    source.path().display()
                ));
            }
            let arch = gguf.str("general.architecture")?;
            let layers = gguf.usize(&format!("{arch}.block_count"))?;
            // Files of models that only others run can be packed too; there is nothing to compare then.
            let hyper = model::bind(source).ok().map(|b| b.hyper);
            (kept(gguf), convert::same(source), layers, hyper)
        }
    };
    meta.push(("general.file_type".into(), Value::U32(target.file_type)));
    meta.push(("general.quantization_version".into(), Value::U32(2)));
    let tied = !tensors.iter().any(|t| t.name == "output.weight");
    let context = Context { target, layers, tied };
    let mut chosen = Vec::with_capacity(tensors.len());
    for t in tensors {
        let codec = context.choose(&t.name, &t.dims);
        if tensor_bytes(codec, &t.dims).is_none() {
            let found = format!("{:?}", t.dims);
            return Err(Error::bad(
                source.path(),
                format_args!("tensor {}", t.name),
                "a shape in bounds",
                found,
            ));
        }
        chosen.push((t, codec));
    }
    Ok(Packed { meta, tensors: chosen, hyper })
}

/// Says what in the file only this program reads: `keys` of the tokenizer, hyperparameters, tensors.
fn say_beyond(h: &Hparams, keys: &[String], tensors: &[OutTensor]) {
    let mut beyond: Vec<&str> = h.beyond.iter().copied().chain(keys.iter().map(String::as_str)).collect();
    let biases = ["attn_output.bias", "attn_q_a.bias", "attn_kv_a_mqa.bias"];
    let has_one = |t: &OutTensor| biases.iter().any(|b| t.name.ends_with(b));
    if h.family != Family::Llama && tensors.iter().any(has_one) {
        beyond.push("biases of attention, for which it refuses the file");
    }
    if !beyond.is_empty() {
        observe::note(format_args!("llama.cpp does not read everything here: {}", beyond.join("; ")));
    }
}

/// A GGUF's metadata without what a new file says anew.
fn kept(gguf: &crate::format::gguf::Meta) -> Meta {
    let anew = |key: &str| {
        let general = ["general.file_type", "general.quantization_version", "general.alignment"];
        general.contains(&key) || key.starts_with("split.")
    };
    gguf.entries().iter().filter(|(k, _)| !anew(k)).cloned().collect()
}

/// The folder's name.
fn model_name(source: &Source) -> String {
    let path = source.path().canonicalize().unwrap_or_else(|_| source.path().to_owned());
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Says what was written: size, bits a weight, and how many tensors have which codec.
fn report(args: &Args, packed: &Packed, file_bytes: u64) -> Result<()> {
    let mut codecs: Vec<(Codec, usize)> = Vec::new();
    let (mut weights, mut bytes) = (0u64, 0u64);
    for (t, codec) in &packed.tensors {
        weights += t.dims.iter().map(|&d| d as u64).product::<u64>();
        bytes += tensor_bytes(*codec, &t.dims).expect("checked in plan");
        match codecs.iter_mut().find(|(c, _)| c == codec) {
            Some((_, n)) => *n += 1,
            None => codecs.push((*codec, 1)),
        }
    }
    let bits = 8.0 * bytes as f64 / weights as f64;
    let mut out = Out::stdout();
    if args.json {
        let codecs: serde_json::Map<_, _> =
            codecs.iter().map(|(c, n)| (c.name().to_owned(), json!(n))).collect();
        return out.json(&json!({
            "output": out::path(&args.output), "file_bytes": file_bytes, "weights": weights,
            "bits_per_weight": bits, "tensors": codecs,
        }));
    }
    let codecs: Vec<String> = codecs.iter().map(|(c, n)| format!("{} {n}", c.name())).collect();
    let size = Bytes(file_bytes);
    out.text(&format!(
        "{}: {size}, {bits:.2} bits a weight; tensors: {}\n",
        args.output.display(),
        codecs.join(", ")
    ))
}
