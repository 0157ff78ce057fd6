//! `tegu inspect`: what a model file says about itself, and what running it takes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value, json};

use super::args::{Common, Load, useless};
use super::{load, out, resolve};
use crate::app::{self, Prepared};
use crate::model::{AttnHyper, Hyper, Mask};
use crate::observe::{Progress, Unit};
use crate::units::{Bytes, Error, Result};
use crate::weights::{Meta, Reader, Source, Tensor};

/// Arguments of `tegu inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model file or folder [default: $TEGU_MODEL, then the settings, then the bundled demo]
    #[arg(value_name = "MODEL", conflicts_with = "model_flag")]
    model: Option<PathBuf>,
    /// Context length for the memory figures [default: the settings']
    #[arg(short, long, visible_alias = "context", value_name = "N")]
    ctx_size: Option<u64>,
    /// Read and decode every tensor: finds unreadable data, infinities and NaNs
    #[arg(long)]
    verify: bool,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// One JSON object on standard output
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: Load,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Examples:
  tegu inspect
  tegu inspect model.gguf --ctx-size 32768 --json
  tegu inspect model.gguf --verify";

/// Runs the command.
pub fn run(args: &InspectArgs, common: &Common) -> Result<()> {
    let mut flags = args.load.overrides()?;
    flags.extend(args.ctx_size.map(|n| ("context", n.to_string())));
    let config = common.config(flags)?;
    let model = resolve::model(args.model.as_deref().or(args.load.model_flag.as_deref()), &config)?;
    if args.load.spin_us.is_some() {
        return Err(useless("--spin-us", "a command that runs the model", "inspect"));
    }
    let opened = app::prepare(args.load.options(model, &config))?;
    args.load.check(&opened)?;
    let mut report = report(&opened);
    if args.tensors {
        report["tensors"] = tensors(&opened.source);
    }
    if args.verify {
        report["verified_values"] = json!(verify(&opened.source)?);
    }
    let mut out = out::Out::stdout();
    if args.json { out.json(&report) } else { out.text(&text(&report)) }
}

fn report(opened: &Prepared) -> Value {
    let (h, plan, source) = (opened.hyper(), &opened.plan, &opened.source);
    let elements = |t: &Tensor| t.dims.iter().map(|&d| d as u64).product::<u64>();
    let parameters: u64 = source.tensors().iter().map(elements).sum();
    let weight_bytes: u64 = source.tensors().iter().map(|t| t.size_bytes()).sum();
    json!({
        "file": out::path(source.path()),
        "format": match source.meta() { Meta::Gguf(_) => "GGUF", Meta::HuggingFace(_) => "Hugging Face folder" },
        "file_bytes": source.file_bytes(),
        "architecture": h.arch,
        "tensor_count": source.tensors().len(),
        "parameters": parameters,
        "bits_a_weight": weight_bytes as f64 * 8.0 / parameters as f64,
        "codecs": codecs(source),
        "hyperparameters": hyperparameters(h),
        "memory": {
            "context": plan.context_tokens,
            "weights_bytes": plan.resident_bytes + plan.expert_bytes,
            "experts_bytes": plan.expert_bytes,
            "kv_bytes": plan.kv_bytes,
            "kv_bytes_a_token": plan.kv_token_bytes,
            "scratch_bytes": plan.scratch_bytes,
            "total_bytes": plan.total_bytes(),
            "available_bytes": plan.available_bytes,
        },
        "tokenizer": tokenizer(opened),
    })
}

/// What can be said of the tokenizer and template; a model without them (a test checkpoint) can still be inspected.
fn tokenizer(opened: &Prepared) -> Value {
    match load::text(opened) {
        Err(e) => json!({ "error": crate::units::one_line(&e.to_string()) }),
        Ok(text) => {
            let special = text.tokenizer.special();
            json!({
                "kind": text.tokenizer.kind(),
                "vocabulary": text.tokenizer.vocab_size(),
                "bos": special.bos,
                "eos": special.eos,
                "ends": text.tokenizer.end_ids(),
                "adds_bos": text.tokenizer.adds_bos(),
                "chat_template": text.template.is_some(),
            })
        }
    }
}

/// Tensors, elements and bytes by codec, the largest first.
fn codecs(source: &Source) -> Vec<Value> {
    let mut by_codec: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for t in source.tensors() {
        let sum = by_codec.entry(t.codec.name()).or_default();
        let elements: u64 = t.dims.iter().map(|&d| d as u64).product();
        *sum = (sum.0 + 1, sum.1 + elements, sum.2 + t.size_bytes());
    }
    let mut rows: Vec<_> = by_codec.into_iter().collect();
    rows.sort_by_key(|(_, (_, _, bytes))| std::cmp::Reverse(*bytes));
    let row = |(codec, (n, elements, bytes))| json!({ "codec": codec, "tensors": n, "elements": elements, "bytes": bytes });
    rows.into_iter().map(row).collect()
}

fn hyperparameters(h: &Hyper) -> Value {
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| drop(map.insert(key.to_owned(), value));
    put("vocabulary", json!(h.vocab));
    put("hidden", json!(h.hidden));
    put("layers", json!(h.n_layers));
    put("context", json!(h.context_tokens));
    put("heads", json!(h.n_heads()));
    match h.attn {
        AttnHyper::Mla { q_lora_rank, kv_lora_rank, nope_dim, rope_dim, v_dim, .. } => {
            put("attention", json!("mla"));
            put("q_lora_rank", json!(q_lora_rank));
            put("kv_lora_rank", json!(kv_lora_rank));
            put("nope_dim", json!(nope_dim));
            put("rope_dim", json!(rope_dim));
            put("v_dim", json!(v_dim));
        }
        AttnHyper::Gqa { n_kv_heads, head_dim, .. } => {
            put("attention", json!("gqa"));
            put("kv_heads", json!(n_kv_heads));
            put("head_dim", json!(head_dim));
        }
    }
    put("masks", json!(masks(&h.masks)));
    put("rope_theta", json!(h.rope.theta));
    put("rope_scaling", json!(format!("{:?}", h.rope.scaling).split([' ', '(']).next()));
    put("ffn_width", json!(h.ffn_width));
    put("tied_head", json!(h.tied_head));
    if let Some(m) = &h.moe {
        put("experts", json!(m.n_experts));
        put("experts_picked", json!(m.n_picked));
        put("expert_width", json!(m.expert_width));
        put("shared_width", json!(m.shared_width));
        put("gating", json!(format!("{:?}", m.gating).to_lowercase()));
        put("dense_layers", json!(m.dense.iter().filter(|d| **d).count()));
    }
    Value::Object(map)
}

/// The kinds of mask in use, in words that `--mask` reads.
fn masks(masks: &[Mask]) -> Vec<String> {
    let words = masks.iter().map(|m| match *m {
        Mask::Full => "full".to_owned(),
        Mask::Sliding { window } => format!("sliding:{window}"),
        Mask::Strided { stride } => format!("strided:{stride}"),
        Mask::LocalStrided { window, stride } => format!("local-strided:{window},{stride}"),
    });
    words.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

fn tensors(source: &Source) -> Value {
    let row = |t: &Tensor| {
        let (name, codec) = (&t.name, t.codec.name());
        json!({ "name": name, "codec": codec, "dims": t.dims, "bytes": t.size_bytes() })
    };
    source.tensors().iter().map(row).collect()
}

/// Decodes every tensor; gives the number of values read, or the first that is not finite.
fn verify(source: &Source) -> Result<u64> {
    const ROWS_BYTES: usize = 4 << 20;
    let progress = Progress::new("verifying", source.file_bytes(), Unit::Bytes);
    let mut reader = Reader::new(ROWS_BYTES);
    let mut values = 0;
    for (i, t) in source.tensors().iter().enumerate() {
        let rows = source.rows(i)?;
        let step = (ROWS_BYTES / (4 * t.cols()).max(1)).max(1);
        let mut buffer = vec![0.0; step.min(t.rows()) * t.cols()];
        for first in (0..t.rows()).step_by(step) {
            let n = step.min(t.rows() - first);
            let out = &mut buffer[..n * t.cols()];
            rows.f32(&mut reader, first, n, out)?;
            if let Some(at) = out.iter().position(|x| !x.is_finite()) {
                let field = format!("tensor {}, element {}", t.name, first * t.cols() + at);
                return Err(Error::bad(source.file_of(i), field, "a finite value", out[at]));
            }
            values += out.len() as u64;
            progress.add((n * t.row_bytes()) as u64);
        }
    }
    Ok(values)
}

/// The report for people: one line a fact.
fn text(report: &Value) -> String {
    let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let bytes = |v: &Value| Bytes(v.as_u64().unwrap_or(0)).to_string();
    let mut rows: Vec<(String, String)> = Vec::new();
    for key in ["file", "format", "architecture", "tensor_count"] {
        rows.push((key.into(), plain(&report[key])));
    }
    rows.push(("file size".into(), bytes(&report["file_bytes"])));
    let millions = report["parameters"].as_u64().unwrap_or(0) as f64 / 1e6;
    let bits = report["bits_a_weight"].as_f64().unwrap_or(0.0);
    rows.push(("parameters".into(), format!("{millions:.1} M, {bits:.2} bits each")));
    for c in report["codecs"].as_array().into_iter().flatten() {
        let name = format!("  {}", plain(&c["codec"]));
        rows.push((name, format!("{} tensors, {}", c["tensors"], bytes(&c["bytes"]))));
    }
    for section in ["hyperparameters", "tokenizer"] {
        rows.push((section.into(), String::new()));
        let facts = report[section].as_object().into_iter().flatten();
        rows.extend(facts.map(|(k, v)| (format!("  {k}"), plain(v))));
    }
    let m = &report["memory"];
    rows.push((format!("memory at {} tokens", m["context"]), bytes(&m["total_bytes"])));
    rows.push((
        "  weights".into(),
        format!("{} (experts {})", bytes(&m["weights_bytes"]), bytes(&m["experts_bytes"])),
    ));
    rows.push((
        "  KV".into(),
        format!("{} ({} a token)", bytes(&m["kv_bytes"]), bytes(&m["kv_bytes_a_token"])),
    ));
    rows.push(("  scratch".into(), bytes(&m["scratch_bytes"])));
    rows.push(("  available".into(), bytes(&m["available_bytes"])));
    if let Some(n) = report["verified_values"].as_u64() {
        rows.push(("verified".into(), format!("{n} values, all finite")));
    }
    for t in report["tensors"].as_array().into_iter().flatten() {
        rows.push((plain(&t["name"]), format!("{} {}", plain(&t["codec"]), t["dims"])));
    }
    let width = rows.iter().map(|(k, _)| k.chars().count()).max().unwrap_or(0);
    rows.into_iter().map(|(k, v)| format!("{k:width$}  {v}").trim_end().to_owned() + "\n").collect()
}
