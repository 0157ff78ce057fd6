//! Tiny valid models that a row then breaks: a GGUF written field by field, so that every field can lie, and a Hugging
//! Face folder.

use serde_json::{Value as Json, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A metadata value.
#[derive(Clone)]
pub enum V {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    /// Any type number and any bytes.
    Raw(u32, Vec<u8>),
}

/// A directory entry; dimensions as the file lists them, row width first.
#[derive(Clone)]
pub struct T {
    pub name: String,
    pub dims: Vec<u64>,
    pub ty: u32,
    pub bytes: u64,
    /// Replaces the offset that follows from the tensors before.
    pub offset: Option<u64>,
}

/// A GGUF to be.
#[derive(Clone)]
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub entry_count: Option<u64>,
    pub entries: Vec<(String, V)>,
    pub tensors: Vec<T>,
    /// Bytes left off the end, or put there.
    pub cut: usize,
    pub extra: usize,
}

const VOCAB: u64 = 262;

impl Gguf {
    /// A two-layer deepseek2 with experts and a byte-level tokenizer: everything that a row may want to break.
    pub fn valid() -> Gguf {
        let mut g = Gguf {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            entry_count: None,
            entries: Vec::new(),
            tensors: Vec::new(),
            cut: 0,
            extra: 0,
        };
        g.hyperparameters();
        g.tokenizer();
        for (name, dims) in
            [("token_embd", vec![64, VOCAB]), ("output_norm", vec![64]), ("output", vec![64, VOCAB])]
        {
            g.tensor(&format!("{name}.weight"), dims);
        }
        for layer in 0..2 {
            g.layer(layer);
        }
        g
    }

    fn hyperparameters(&mut self) {
        self.set("general.architecture", V::Str("deepseek2".into()));
        for (key, n) in [
            ("block_count", 2),
            ("context_length", 512),
            ("embedding_length", 64),
            ("feed_forward_length", 96),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("attention.kv_lora_rank", 32),
            ("attention.q_lora_rank", 0),
            ("attention.key_length", 48),
            ("attention.value_length", 32),
            ("attention.key_length_mla", 32),
            ("attention.value_length_mla", 16),
            ("rope.dimension_count", 16),
            ("leading_dense_block_count", 1),
            ("expert_count", 4),
            ("expert_used_count", 2),
            ("expert_shared_count", 1),
            ("expert_feed_forward_length", 32),
            ("expert_gating_func", 2),
        ] {
            self.set(&format!("deepseek2.{key}"), V::U32(n));
        }
        self.set("deepseek2.attention.layer_norm_rms_epsilon", V::F32(1e-6));
        self.set("deepseek2.rope.freq_base", V::F32(10_000.0));
        self.set("deepseek2.expert_weights_norm", V::Bool(true));
    }

    fn tokenizer(&mut self) {
        let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let mut next = 0x100;
        let mut tokens: Vec<String> = Vec::new();
        for b in 0..=255u8 {
            let code = if printable(b) { u32::from(b) } else { next };
            next += u32::from(!printable(b));
            tokens.push(char::from_u32(code).unwrap().into());
        }
        tokens.extend(["\u{120}a", "ab", "abc"].map(String::from));
        tokens.extend(["<|a|>", "<|b|>", "<|c|>"].map(String::from));
        let types = (0..VOCAB as i32).map(|i| if i < 259 { 1 } else { 3 });
        self.set("tokenizer.ggml.model", V::Str("gpt2".into()));
        self.set("tokenizer.ggml.pre", V::Str("gpt-2".into()));
        self.set("tokenizer.ggml.tokens", V::Strs(tokens));
        self.set("tokenizer.ggml.token_type", V::I32s(types.collect()));
        self.set("tokenizer.ggml.merges", V::Strs(["\u{120} a", "a b", "ab c"].map(String::from).into()));
        self.set("tokenizer.ggml.bos_token_id", V::U32(259));
        self.set("tokenizer.ggml.eos_token_id", V::U32(260));
    }

    fn layer(&mut self, layer: usize) {
        let mut put = |name: &str, dims: &[u64]| self.tensor(&format!("blk.{layer}.{name}"), dims.to_vec());
        put("attn_norm.weight", &[64]);
        put("attn_q.weight", &[64, 64]);
        put("attn_kv_a_mqa.weight", &[64, 48]);
        put("attn_kv_a_norm.weight", &[32]);
        put("attn_k_b.weight", &[16, 32, 2]);
        put("attn_v_b.weight", &[32, 16, 2]);
        put("attn_output.weight", &[32, 64]);
        put("ffn_norm.weight", &[64]);
        if layer == 0 {
            put("ffn_gate.weight", &[64, 96]);
            put("ffn_up.weight", &[64, 96]);
            put("ffn_down.weight", &[96, 64]);
            return;
        }
        put("ffn_gate_inp.weight", &[64, 4]);
        put("exp_probs_b.bias", &[4]);
        put("ffn_gate_exps.weight", &[64, 32, 4]);
        put("ffn_up_exps.weight", &[64, 32, 4]);
        put("ffn_down_exps.weight", &[32, 64, 4]);
        put("ffn_gate_shexp.weight", &[64, 32]);
        put("ffn_up_shexp.weight", &[64, 32]);
        put("ffn_down_shexp.weight", &[32, 64]);
    }

    pub fn tensor(&mut self, name: &str, dims: Vec<u64>) {
        let bytes = dims.iter().product::<u64>() * 4;
        self.tensors.push(T { name: name.into(), dims, ty: 0, bytes, offset: None });
    }

    /// Sets or replaces an entry.
    pub fn set(&mut self, key: &str, value: V) {
        match self.entries.iter_mut().find(|(k, _)| k == key) {
            Some((_, v)) => *v = value,
            None => self.entries.push((key.into(), value)),
        }
    }

    pub fn drop_entry(&mut self, key: &str) {
        self.entries.retain(|(k, _)| k != key);
    }

    pub fn drop_tensor(&mut self, name: &str) {
        self.tensors.retain(|t| t.name != name);
    }

    pub fn at(&mut self, name: &str) -> &mut T {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut b = self.magic.to_vec();
        b.extend(self.version.to_le_bytes());
        b.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        b.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            put_str(&mut b, key);
            put_value(&mut b, value);
        }
        let mut at = 0;
        for t in &self.tensors {
            put_str(&mut b, &t.name);
            b.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| b.extend(d.to_le_bytes()));
            b.extend(t.ty.to_le_bytes());
            b.extend(t.offset.unwrap_or(at).to_le_bytes());
            at += t.bytes.next_multiple_of(32);
        }
        b.resize(b.len().next_multiple_of(32) + at as usize + self.extra, 0);
        b.truncate(b.len() - self.cut);
        b
    }

    /// Length of everything before the data.
    pub fn header_len(&self) -> usize {
        let data: u64 = self.tensors.iter().map(|t| t.bytes.next_multiple_of(32)).sum();
        self.bytes().len() - data as usize
    }
}

fn put_str(b: &mut Vec<u8>, s: &str) {
    b.extend((s.len() as u64).to_le_bytes());
    b.extend(s.bytes());
}

fn put_value(b: &mut Vec<u8>, value: &V) {
    let mut typed = |ty: u32, bytes: &[u8]| {
        b.extend(ty.to_le_bytes());
        b.extend(bytes);
    };
    match value {
        V::U32(v) => typed(4, &v.to_le_bytes()),
        V::F32(v) => typed(6, &v.to_le_bytes()),
        V::Bool(v) => typed(7, &[u8::from(*v)]),
        V::Raw(ty, bytes) => typed(*ty, bytes),
        V::Str(s) => {
            typed(8, &[]);
            put_str(b, s);
        }
        V::Strs(list) => {
            typed(9, &8u32.to_le_bytes());
            b.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|s| put_str(b, s));
        }
        V::I32s(list) => {
            typed(9, &5u32.to_le_bytes());
            b.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|v| b.extend(v.to_le_bytes()));
        }
    }
}

/// A Hugging Face folder to be: one of the repository's checkpoints, with a tokenizer.
#[derive(Clone)]
pub struct Folder {
    pub config: Json,
    /// The safetensors header, its data, and its length if that is a lie.
    pub header: Json,
    pub header_text: Option<String>,
    pub header_len: Option<u64>,
    pub data: Vec<u8>,
    /// Other files: name and content.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Folder {
    pub fn valid(checkpoint: &Path) -> Folder {
        let read = |name: &str| fs::read(checkpoint.join(name)).unwrap();
        let model = read("model.safetensors");
        let n = u64::from_le_bytes(model[..8].try_into().unwrap()) as usize;
        let mut folder = Folder {
            config: serde_json::from_slice(&read("config.json")).unwrap(),
            header: serde_json::from_slice(&model[8..8 + n]).unwrap(),
            header_text: None,
            header_len: None,
            data: model[8 + n..].to_vec(),
            files: Vec::new(),
        };
        folder.file("tokenizer.json", tokenizer().to_string());
        folder
    }

    /// Adds or replaces a file.
    pub fn file(&mut self, name: &str, content: impl Into<Vec<u8>>) {
        self.files.retain(|(n, _)| n != name);
        self.files.push((name.into(), content.into()));
    }

    /// Changes one tensor's entry of the header.
    pub fn entry(&mut self, tensor: &str, key: &str, value: Json) {
        self.header[tensor][key] = value;
    }

    /// Writes the folder under `dir`.
    pub fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("model");
        fs::create_dir_all(&path).unwrap();
        let text = self.header_text.clone().unwrap_or_else(|| self.header.to_string());
        let len = self.header_len.unwrap_or(text.len() as u64);
        let model = [&len.to_le_bytes(), text.as_bytes(), &self.data].concat();
        fs::write(path.join("config.json"), self.config.to_string()).unwrap();
        fs::write(path.join("model.safetensors"), model).unwrap();
        for (name, content) in &self.files {
            fs::write(path.join(name), content).unwrap();
        }
        path
    }
}

/// The bytes and nothing else: a tokenizer whose every part can be broken.
pub fn tokenizer() -> Json {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut vocab = serde_json::Map::new();
    let mut next = 0x100;
    for b in 0..=255u8 {
        let code = if printable(b) { u32::from(b) } else { next };
        next += u32::from(!printable(b));
        vocab.insert(char::from_u32(code).unwrap().into(), json!(b));
    }
    json!({
        "version": "1.0",
        "added_tokens": [{
            "id": 256, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false
        }],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}
