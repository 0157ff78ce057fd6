//! Broken and hostile files. Whatever is wrong, the program says so in one line that names the file and the field, with
//! what was expected and what was found, in under a second of a core and 100 MB, with exit code 2.

mod hostile;

use crate::support::{data, emulated, program};
use hostile::{Folder, Gguf, V, tokenizer};
use serde_json::{Value as Json, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tegu::format::gguf;
use tegu::format::input::NamedBytes;

/// Seconds of a core that the program may have, a limit of the process too: how long they take is the machine's business.
const CPU_MAX_S: u32 = 1;
/// One that does nothing is not waited for any longer.
const HANGS_AFTER: Duration = Duration::from_secs(120);
/// KiB of private memory that the program may have, set as a limit of the process.
const MEMORY_MAX_KIB: u32 = 100 << 10;

/// `tegu run MODEL hello -n 1` within the limits: a program that goes beyond ends by a signal. Emulated it needs more of both
/// for reasons of its own.
fn run(model: &Path) -> Output {
    let limits = format!("ulimit -d {MEMORY_MAX_KIB} && ulimit -t {CPU_MAX_S} && ");
    let limit = if emulated() { String::new() } else { limits };
    let script = format!("{limit}exec \"$@\"");
    let mut command = Command::new("sh");
    command
        .args(["-c", &script, "sh"])
        .args(program("tegu"))
        .arg("run")
        .arg(model)
        // As many threads, each with its stack, on every machine.
        .args(["hello", "-n", "1", "-t", "2"]);
    for name in ["TEGU_MODEL", "TEGU_THREADS", "TEGU_LOG", "HOME"] {
        command.env_remove(name);
    }
    command.env("XDG_CONFIG_HOME", "no-such-folder").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let until = Instant::now() + HANGS_AFTER;
    while child.try_wait().unwrap().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = child.kill(); // one that has ended is left alone
    child.wait_with_output().unwrap()
}

/// Rows that went wrong, so that one run shows all of them.
#[derive(Default)]
struct Table {
    rows: usize,
    wrong: Vec<String>,
}

impl Table {
    /// Checks one row: the model at `path` is refused, and the message has all of `says`.
    fn refused(&mut self, row: &str, path: &Path, says: &[&str]) {
        self.rows += 1;
        let output = run(path);
        let text = String::from_utf8_lossy(&output.stderr);
        // What the system says needs no "expected".
        let system = ["open", "read"].iter().any(|verb| text.contains(&format!(": {verb}: ")));
        let checks = [
            (output.status.code() == Some(2), "exit code 2"),
            (output.stdout.is_empty(), "nothing on standard output"),
            (text.lines().count() == 1, "one line"),
            (text.starts_with("tegu: ") && !text.contains("panicked"), "an error, no panic"),
            (says.iter().all(|part| text.contains(part)), "file and field"),
            (system || text.contains(": expected ") && text.contains(", found "), "expected and found"),
        ];
        for (_, what) in checks.iter().filter(|(good, _)| !good) {
            self.wrong.push(format!("{row}: {what} ({says:?}): {}: {text}", output.status));
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        assert!(panicking || self.wrong.is_empty(), "of {} rows:\n{}", self.rows, self.wrong.join("\n"));
    }
}

fn accepted(path: &Path) {
    let output = run(path);
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
}

/// A row: its name, what it breaks, what the message must say.
type Row<M> = (&'static str, fn(&mut M), &'static [&'static str]);

const HUGE: u64 = 1 << 63;

#[rustfmt::skip]
const GGUF_ROWS: &[Row<Gguf>] = &[
    ("wrong magic", |g| g.magic = *b"GGML", &["magic", "GGUF"]),
    ("version 1", |g| g.version = 1, &["version", "2 or 3", "found 1"]),
    ("version 99", |g| g.version = 99, &["version", "2 or 3", "found 99"]),
    ("big-endian", |g| g.version = 3u32.swap_bytes(), &["version", "little-endian"]),
    ("2^63 tensors", |g| g.tensor_count = Some(HUGE), &["tensor_count", "9223372036854775808"]),
    ("2^63 entries", |g| g.entry_count = Some(HUGE), &["metadata_kv_count", "9223372036854775808"]),
    ("more tensors than the file has bytes", |g| g.tensor_count = Some(300_000), &["tensor_count", "300000"]),
    ("one tensor more than there is", |g| g.tensor_count = Some(g.tensors.len() as u64 + 1), &["tensor"]),
    ("no tensors", |g| g.tensors.clear(), &["tensors", "at least one"]),
    ("one entry more than there is", |g| g.entry_count = Some(g.entries.len() as u64 + 1), &["tensor 0"]),
    ("2^63 bytes of string", |g| g.set("general.name", V::Raw(8, HUGE.to_le_bytes().into())), &["general.name"]),
    ("2^63 elements of array", |g| g.set("x.list", array(4, HUGE, &[])), &["x.list"]),
    ("2^63 strings", |g| g.set("x.list", array(8, HUGE, &[])), &["x.list"]),
    ("4 million strings of nothing", |g| g.set("x.list", array(8, 4_194_304, &[])), &["x.list"]),
    ("array of arrays", |g| g.set("x.list", array(9, 1, &[0; 16])), &["x.list", "array of arrays"]),
    ("value of no type", |g| g.set("x.y", V::Raw(13, vec![0; 8])), &["x.y", "type 13"]),
    ("bool of 7", |g| g.set("x.y", V::Raw(7, vec![7])), &["x.y", "found 7"]),
    ("key twice", |g| g.entries.push(g.entries[3].clone()), &["twice"]),
    ("name that is no text", |g| g.set("x.y", V::Raw(8, [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat())), &["x.y", "UTF-8"]),
    ("alignment 0", |g| g.set("general.alignment", V::U32(0)), &["general.alignment", "power of two"]),
    ("alignment 48", |g| g.set("general.alignment", V::U32(48)), &["general.alignment", "power of two"]),
    ("alignment that is text", |g| g.set("general.alignment", V::Str("32".into())), &["general.alignment", "integer"]),
    ("tensor twice", |g| g.tensors.push(g.tensors[0].clone()), &["tensor token_embd.weight", "twice"]),
    ("unknown codec", |g| g.at("output.weight").ty = 77, &["tensor output.weight", "ggml_type 77"]),
    ("no dimensions", |g| g.at("output.weight").dims.clear(), &["tensor output.weight", "1 to 4 dimensions"]),
    ("2^32-1 dimensions", |g| g.at("output.weight").dims = vec![1; 9], &["tensor output.weight", "found 9"]),
    ("dimension of 0", |g| g.at("output.weight").dims[1] = 0, &["tensor output.weight", "found 0"]),
    ("dimension of 2^63", |g| g.at("output.weight").dims[1] = HUGE, &["tensor output.weight", "9223372036854775808"]),
    ("dimensions whose product overflows", |g| g.at("output.weight").dims = vec![1 << 28; 4], &["tensor output.weight"]),
    ("row that no block fits", |g| { let t = g.at("output.weight"); t.ty = 2; t.dims[0] = 63; },
        &["tensor output.weight", "multiple of 32"]),
    ("offset off the alignment", |g| g.at("output_norm.weight").offset = Some(33),
        &["offset of tensor output_norm.weight", "multiple of 32"]),
    ("offset past the end", |g| g.at("output_norm.weight").offset = Some(1 << 40),
        &["offset of tensor output_norm.weight", "inside a file"]),
    ("offset near 2^64", |g| g.at("output_norm.weight").offset = Some(u64::MAX - 31), &["offset of tensor output_norm.weight"]),
    ("tensors that overlap", |g| g.at("output_norm.weight").offset = Some(0), &["offset of tensor", "the end of"]),
    ("last tensor cut", |g| g.cut = 64, &["offset of tensor blk.1.ffn_down_shexp.weight"]),
    ("no architecture", |g| g.drop_entry("general.architecture"), &["general.architecture", "nothing"]),
    ("unknown architecture", |g| g.set("general.architecture", V::Str("mamba".into())),
        &["general.architecture", "deepseek2", "mamba"]),
    ("architecture that is a number", |g| g.set("general.architecture", V::U32(2)), &["general.architecture", "a string", "u32 2"]),
    ("missing hyperparameter", |g| g.drop_entry("deepseek2.block_count"), &["deepseek2.block_count", "nothing"]),
    ("layers of the wrong type", |g| g.set("deepseek2.block_count", V::Str("two".into())), &["deepseek2.block_count", "integer"]),
    ("no layers", |g| g.set("deepseek2.block_count", V::U32(0)), &["deepseek2.block_count", "found 0"]),
    ("4 billion layers", |g| g.set("deepseek2.block_count", V::U32(u32::MAX)), &["deepseek2.block_count", "4294967295"]),
    ("4 billion heads", |g| g.set("deepseek2.attention.head_count", V::U32(u32::MAX)), &["head"]),
    ("no heads", |g| g.set("deepseek2.attention.head_count", V::U32(0)), &["head"]),
    ("heads that no tensor has", |g| g.set("deepseek2.attention.head_count", V::U32(3)), &["blk.0.attn", "shape"]),
    ("width that no tensor has", |g| g.set("deepseek2.embedding_length", V::U32(65)), &["shape", "65"]),
    ("rope wider than a head", |g| g.set("deepseek2.rope.dimension_count", V::U32(64)), &["key_length_mla"]),
    ("an epsilon of NaN", |g| g.set("deepseek2.attention.layer_norm_rms_epsilon", V::F32(f32::NAN)), &["epsilon", "finite"]),
    ("more picked than experts", |g| g.set("deepseek2.expert_used_count", V::U32(5)), &["expert"]),
    ("4 billion experts", |g| g.set("deepseek2.expert_count", V::U32(u32::MAX)), &["expert"]),
    ("unknown gating", |g| g.set("deepseek2.expert_gating_func", V::U32(9)), &["expert_gating_func", "u32 9"]),
    ("missing tensor", |g| g.drop_tensor("blk.1.ffn_up_exps.weight"), &["blk.1.ffn_up_exps.weight", "nothing"]),
    ("a bias in a feed-forward layer", |g| g.tensor("blk.0.ffn_gate.bias", vec![96]), &["blk.0.ffn_gate.bias", "no bias"]),
    ("a tensor of another architecture", |g| g.tensor("blk.0.ssm_in.weight", vec![64]),
        &["blk.0.ssm_in.weight", "nothing would read"]),
    ("sliding layers of half the model", |g| {
        g.set("deepseek2.attention.sliding_window", V::U32(8));
        g.set("deepseek2.attention.sliding_window_pattern", V::I32s(vec![1]));
    }, &["sliding_window_pattern", "2 layers", "found 1"]),
    ("more layers ahead than there are", |g| g.set("deepseek2.nextn_predict_layers", V::U32(2)), &["nextn_predict_layers"]),
    ("missing embedding", |g| g.drop_tensor("token_embd.weight"), &["token_embd.weight", "nothing"]),
    ("transposed tensor", |g| g.at("blk.0.ffn_down.weight").dims.reverse(), &["blk.0.ffn_down.weight", "shape"]),
    ("unknown tokenizer", |g| g.set("tokenizer.ggml.model", V::Str("words".into())), &["tokenizer.ggml.model", "words"]),
    ("unknown pre-tokenizer", |g| g.set("tokenizer.ggml.pre", V::Str("no-such".into())), &["tokenizer.ggml.pre", "no-such"]),
    ("no tokens", |g| g.drop_entry("tokenizer.ggml.tokens"), &["tokenizer.ggml.tokens", "nothing"]),
    ("fewer token types than tokens", |g| g.set("tokenizer.ggml.token_type", V::I32s(vec![1; 5])),
        &["tokenizer.ggml.token_type", "262"]),
    ("end token outside the vocabulary", |g| g.set("tokenizer.ggml.eos_token_id", V::U32(262)),
        &["tokenizer.ggml.eos_token_id", "262"]),
    ("merge of unknown tokens", |g| g.set("tokenizer.ggml.merges", V::Strs(vec!["xx yy".into()])), &["tokenizer.ggml.merges"]),
    ("merge without a space", |g| g.set("tokenizer.ggml.merges", V::Strs(vec!["ab".into()])), &["tokenizer.ggml.merges"]),
    ("more tokens than the embedding has rows", more_tokens, &["262", "263"]),
];

/// An array value: element type, count, and some bytes.
fn array(ty: u32, count: u64, bytes: &[u8]) -> V {
    V::Raw(9, [&ty.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat())
}

fn more_tokens(g: &mut Gguf) {
    let entry = |key: &str| g.entries.iter().position(|(k, _)| k == key).unwrap();
    let (tokens, types) = (entry("tokenizer.ggml.tokens"), entry("tokenizer.ggml.token_type"));
    if let V::Strs(list) = &mut g.entries[tokens].1 {
        list.push("one too many".into());
    }
    if let V::I32s(list) = &mut g.entries[types].1 {
        list.push(1);
    }
}

#[test]
fn broken_gguf_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    // However long the path is, the rest is said.
    let folder = dir.path().join("a-folder-with-a-long-name-".repeat(8));
    fs::create_dir(&folder).unwrap();
    let path = folder.join("model.gguf");
    fs::write(&path, Gguf::valid().bytes()).unwrap();
    accepted(&path);
    let mut table = Table::default();
    for (row, break_it, says) in GGUF_ROWS {
        let mut g = Gguf::valid();
        break_it(&mut g);
        fs::write(&path, g.bytes()).unwrap();
        table.refused(row, &path, &[says, &["model.gguf"][..]].concat());
    }
}

#[test]
fn a_gguf_cut_anywhere_is_refused() {
    let g = Gguf::valid();
    let (bytes, header) = (g.bytes(), g.header_len());
    // Every cut in the header, without a process each.
    for n in 0..header {
        let input = NamedBytes { path: Path::new("cut.gguf"), bytes: &bytes[..n] };
        let e = gguf::parse(&input).expect_err(&format!("cut at {n}")).to_string();
        assert!(e.starts_with("cut.gguf: ") && e.contains("expected"), "cut at {n}: {e}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut table = Table::default();
    let in_data = (header..bytes.len() - 1024).step_by((bytes.len() - header) / 8);
    for n in (0..header).step_by(header / 12).chain(in_data) {
        fs::write(&path, &bytes[..n]).unwrap();
        table.refused(&format!("cut at {n}"), &path, &["model.gguf"]);
    }
}

/// Flips in the header never make the parser panic, hang or take much memory; what it accepts is consistent.
#[test]
fn no_byte_of_a_header_breaks_the_parser() {
    let g = Gguf::valid();
    let (bytes, header) = (g.bytes(), g.header_len());
    let mut changed = bytes.clone();
    for at in 0..header {
        for value in [0x00, 0x01, 0x7f, 0x80, 0xff, bytes[at] ^ 0x10] {
            changed[at] = value;
            let input = NamedBytes { path: Path::new("f.gguf"), bytes: &changed };
            if let Ok(h) = gguf::parse(&input) {
                assert!(h.tensors.iter().all(|t| t.offset + t.len <= changed.len() as u64));
            }
        }
        changed[at] = bytes[at];
    }
}

fn set(f: &mut Folder, key: &str, value: Json) {
    f.config[key] = value;
}

const NORM: &str = "model.norm.weight";

#[rustfmt::skip]
const FOLDER_ROWS: &[Row<Folder>] = &[
    ("layers that are text", |f| set(f, "num_hidden_layers", json!("three")), &["config.json", "num_hidden_layers"]),
    ("layers below 0", |f| set(f, "num_hidden_layers", json!(-3)), &["config.json", "num_hidden_layers"]),
    ("layers of 1e30", |f| set(f, "num_hidden_layers", json!(1e30)), &["config.json", "num_hidden_layers"]),
    ("half a layer", |f| set(f, "num_hidden_layers", json!(2.5)), &["config.json", "num_hidden_layers"]),
    ("width as a list", |f| set(f, "hidden_size", json!([128])), &["config.json", "hidden_size"]),
    ("width that no tensor has", |f| set(f, "hidden_size", json!(127)), &["shape"]),
    ("vocabulary that no tensor has", |f| set(f, "vocab_size", json!(999)), &["999"]),
    ("no model type", |f| { f.config.as_object_mut().unwrap().remove("model_type"); }, &["config.json", "model_type"]),
    ("unknown model type", |f| set(f, "model_type", json!("rwkv")), &["config.json", "model_type", "rwkv"]),
    ("model type as a number", |f| set(f, "model_type", json!(3)), &["config.json", "model_type"]),
    ("unknown activation", |f| set(f, "hidden_act", json!("gelu")), &["config.json", "hidden_act", "gelu"]),
    ("no experts", |f| set(f, "n_routed_experts", json!(0)), &["config.json", "routed experts"]),
    ("experts that no tensor has", |f| set(f, "n_routed_experts", json!(17)), &["17"]),
    ("more picked than experts", |f| set(f, "num_experts_per_tok", json!(99)), &["config.json", "experts a token"]),
    ("rope as text", |f| set(f, "rope_parameters", json!("yarn")), &["config.json", "rope_parameters"]),
    ("unknown rope", |f| f.config["rope_parameters"]["rope_type"] = json!("spiral"), &["config.json", "spiral"]),
    ("config that is a list", |f| f.config = json!([1, 2]), &["config.json", "object"]),
    ("config that is no JSON", |f| f.file("config.json", "{\"a\": }"), &["config.json", "line 1"]),
    ("config of nothing", |f| f.file("config.json", ""), &["config.json", "line 1"]),
    ("config of 3 MB", |f| f.file("config.json", vec![b' '; 3 << 20]), &["config.json", "file size", "3145728"]),
    ("config nested deeply", |f| f.file("config.json", "[".repeat(100_000)), &["config.json", "line 1"]),
    ("header of 2^63 bytes", |f| f.header_len = Some(HUGE), &["model.safetensors", "header length"]),
    ("header longer than the file", |f| f.header_len = Some(90_000_000), &["model.safetensors", "header length"]),
    ("header of nothing", |f| f.header_text = Some(String::new()), &["model.safetensors", "header"]),
    ("header that is a bomb", |f| f.header_text = Some(format!("{{\"__metadata__\":{}", "[".repeat(1 << 20))),
        &["model.safetensors", "nesting"]),
    ("header that is one long string", |f| f.header_text = Some(format!("{{\"{}\":", "x".repeat(1 << 22))),
        &["model.safetensors", "at most"]),
    ("header cut", |f| f.header_text = Some(f.header.to_string()[..200].into()), &["model.safetensors"]),
    ("offset below 0", |f| f.entry(NORM, "data_offsets", json!([-4, 256])), &["model.safetensors", NORM, "integer"]),
    ("offsets past the end", |f| f.entry(NORM, "data_offsets", json!([1u64 << 40, (1u64 << 40) + 256])),
        &["model.safetensors", NORM]),
    ("offsets the wrong way round", |f| f.entry(NORM, "data_offsets", json!([512, 256])), &["model.safetensors", NORM]),
    ("tensors that overlap", |f| f.entry(NORM, "data_offsets", json!([0, 256])), &["model.safetensors", "start at"]),
    ("shape below 0", |f| f.entry(NORM, "shape", json!([-128])), &["model.safetensors", NORM]),
    ("shape whose product overflows", |f| f.entry(NORM, "shape", json!([268_435_456, 268_435_456, 268_435_456])),
        &["model.safetensors", NORM]),
    ("shape that its bytes do not hold", |f| f.entry(NORM, "shape", json!([129])), &["model.safetensors", NORM, "258 bytes"]),
    ("unknown dtype", |f| f.entry(NORM, "dtype", json!("Q3")), &["model.safetensors", NORM, "Q3"]),
    ("dtype that no weight has", |f| f.entry(NORM, "dtype", json!("I16")), &["model.safetensors", NORM, "I16"]),
    ("FP8 without scales", fp8, &["model.safetensors", "weight_scale_inv"]),
    ("missing tensor", |f| rename(f, NORM), &[NORM, "nothing"]),
    ("a bias in a feed-forward layer", |f| add(f, "model.layers.0.mlp.gate_proj.bias"),
        &["model.safetensors", "mlp.gate_proj.bias", "no bias"]),
    ("a layer that the config does not count", |f| add(f, "model.layers.3.mlp.gate_proj.weight"), &["model.layers.3"]),
    ("a tensor of another architecture", |f| add(f, "model.layers.0.mixer.conv1d.weight"), &["mixer.conv1d", "nothing would read"]),
    ("biases that no kernel adds", |f| set(f, "mlp_bias", json!(true)), &["config.json", "mlp_bias"]),
    ("data cut", |f| f.data.truncate(f.data.len() - 2), &["model.safetensors", "data_offsets"]),
    ("bytes after the data", |f| f.data.push(0), &["model.safetensors"]),
    ("index that names a missing shard", |f| f.file("model.safetensors.index.json", r#"{"weight_map":{"a":"no.safetensors"}}"#),
        &["no.safetensors: open"]),
    ("index that names a folder", |f| f.file("model.safetensors.index.json", r#"{"weight_map":{"a":".."}}"#),
        &["index.json", "weight_map: a"]),
    ("index with another folder's file", |f| f.file("model.safetensors.index.json", r#"{"weight_map":{"a":"/etc/passwd"}}"#),
        &["index.json", "weight_map: a"]),
    ("index with a tensor that is nowhere",
        |f| f.file("model.safetensors.index.json", r#"{"weight_map":{"a":"model.safetensors"}}"#),
        &["index.json", "weight_map: a"]),
    ("index that is no JSON", |f| f.file("model.safetensors.index.json", "weights"), &["index.json"]),
    ("no tokenizer", |f| f.files.clear(), &["tokenizer"]),
    ("tokenizer that is no JSON", |f| f.file("tokenizer.json", "{"), &["tokenizer.json"]),
    ("tokenizer without a model", |f| f.file("tokenizer.json", "{}"), &["tokenizer.json", "model"]),
    ("token outside the vocabulary", |f| words(f, json!({"a": 0, "b": 5_000_000_000u64})), &["tokenizer.json"]),
    ("token below 0", |f| words(f, json!({"a": 0, "b": -1})), &["tokenizer.json"]),
    ("more tokens than the embedding has rows", |f| words(f, json!({"a": 0, "b": 384})), &["385"]),
];

fn fp8(f: &mut Folder) {
    let name = "model.layers.0.mlp.up_proj.weight";
    let range = f.header[name]["data_offsets"].clone();
    let n = range[1].as_u64().unwrap() - range[0].as_u64().unwrap();
    f.entry(name, "dtype", json!("F8_E4M3"));
    // Half the element's size: twice the rows keep the bytes.
    let cols = f.header[name]["shape"][1].as_u64().unwrap();
    f.entry(name, "shape", json!([n / cols, cols]));
}

fn rename(f: &mut Folder, tensor: &str) {
    let entry = f.header.as_object_mut().unwrap().remove(tensor).unwrap();
    f.header["model.other.weight"] = entry;
}

/// One more tensor, of one number.
fn add(f: &mut Folder, tensor: &str) {
    let end = f.data.len();
    f.data.extend([0; 2]);
    f.header[tensor] = json!({ "dtype": "BF16", "shape": [1], "data_offsets": [end, end + 2] });
}

fn words(f: &mut Folder, vocab: Json) {
    let mut t = tokenizer();
    t["added_tokens"] = json!([]);
    t["model"]["vocab"] = vocab;
    f.file("tokenizer.json", t.to_string());
}

#[test]
fn broken_folders_are_refused() {
    let base = Folder::valid(&data().join("oracles/deepseek-v3"));
    let dir = tempfile::tempdir().unwrap();
    accepted(&base.write(dir.path()));
    let mut table = Table::default();
    for (row, break_it, says) in FOLDER_ROWS {
        let dir = tempfile::tempdir().unwrap();
        let mut f = base.clone();
        break_it(&mut f);
        table.refused(row, &f.write(dir.path()), says);
    }
}

#[test]
fn what_is_no_model_is_refused() {
    let mut table = Table::default();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let file = |name: &str, bytes: &[u8]| -> PathBuf {
        fs::write(at(name), bytes).unwrap();
        at(name)
    };
    table.refused("no such file", &at("absent.gguf"), &["absent.gguf: open"]);
    table.refused("empty file", &file("empty.gguf", b""), &["empty.gguf: magic", "end of file"]);
    table.refused("text", &file("text.gguf", b"This is no model."), &["text.gguf: magic", "GGUF"]);
    table.refused("zeros", &file("zeros.gguf", &[0; 4096]), &["zeros.gguf: magic"]);
    fs::create_dir(at("folder.gguf")).unwrap();
    table.refused("empty folder", &at("folder.gguf"), &["folder.gguf", "config.json"]);
    fs::create_dir_all(at("nested/model.safetensors")).unwrap();
    file("nested/config.json", b"{}");
    table.refused("folder in place of weights", &at("nested"), &["model.safetensors", "a directory"]);
    fs::create_dir(at("bare")).unwrap();
    file("bare/config.json", b"{}");
    table.refused("folder without weights", &at("bare"), &["bare", "model.safetensors"]);
    fs::create_dir(at("two")).unwrap();
    file("two/a.gguf", &Gguf::valid().bytes());
    file("two/b.gguf", &Gguf::valid().bytes());
    table.refused("two models", &at("two"), &["two", "one GGUF model"]);
    let mut g = Gguf::valid();
    g.set("split.count", V::U32(3));
    table.refused(
        "part of a split model, renamed",
        &file("part.gguf", &g.bytes()),
        &["part.gguf", "-00001-of-00003"],
    );
    let part = file("part-00001-of-00003.gguf", &g.bytes());
    table.refused("part without the others", &part, &["split.no"]);
    unreadable(&mut table, &file("secret.gguf", &Gguf::valid().bytes()));
}

/// A file without read permission, which root reads all the same.
fn unreadable(table: &mut Table, path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(path).is_ok() {
        return crate::support::skipped("unreadable file", "this user reads everything");
    }
    table.refused("unreadable file", path, &["secret.gguf: open"]);
}

#[test]
fn there_are_enough_rows() {
    assert!(GGUF_ROWS.len() >= 40 && FOLDER_ROWS.len() >= 40);
}
