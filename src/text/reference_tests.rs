//! Tests against what other programs say: Hugging Face `tokenizers` on a slice of text, and llama.cpp's own vocabulary
//! tests where a copy of them is at hand.

use crate::format::gguf::parse;
use crate::format::input::NamedBytes;
use crate::text::{Detokenizer, Tokenizer};
use crate::units::TokenId;
use std::path::{Path, PathBuf};

/// The shared folder of models, where there is one.
fn shared() -> Option<PathBuf> {
    let dir = match std::env::var_os("TEGU_SHARED") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.join("shared"),
    };
    dir.join("models/tinymoe-fp8/tokenizer.json").is_file().then_some(dir)
}

fn from_gguf(path: &Path) -> Tokenizer {
    let bytes = std::fs::read(path).unwrap();
    let header = parse(&NamedBytes { path, bytes: &bytes }).unwrap();
    Tokenizer::from_gguf_meta(&header.meta).unwrap()
}

fn slice() -> (String, Vec<TokenId>, Vec<TokenId>) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/text");
    let text = std::fs::read_to_string(data.join("slice.txt")).unwrap();
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(data.join("slice.ids.json")).unwrap()).unwrap();
    let ids = |k: &str| json[k].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as TokenId).collect();
    (text, ids("parse_special"), ids("as_text"))
}

/// Streaming gives what decoding at once gives, and both give the text back.
fn round_trip(t: &Tokenizer, text: &str, ids: &[TokenId]) {
    let mut out = String::new();
    let mut d = Detokenizer::new(false);
    for &id in ids {
        d.push(t, id, &mut out);
        assert!(!out.ends_with(char::REPLACEMENT_CHARACTER) || text.contains(char::REPLACEMENT_CHARACTER));
    }
    d.finish(&mut out);
    assert_eq!(out, text);
    assert_eq!(t.decode(ids, false), text);
}

#[test]
fn both_sources_of_one_tokenizer_give_the_reference_ids() {
    let Some(dir) = shared() else { return eprintln!("skipped: no shared folder") };
    let hf = Tokenizer::from_hf_dir(&dir.join("models/tinymoe-fp8")).unwrap();
    let gguf = from_gguf(&dir.join("models/tinymoe.Q4_K_M.gguf"));
    let (text, parsed, as_text) = slice();
    for (name, t) in [("tokenizer.json", &hf), ("gguf", &gguf)] {
        assert_eq!(t.encode(&text, true, false).unwrap(), parsed, "{name}");
        assert_eq!(t.encode(&text, false, false).unwrap(), as_text, "{name}");
        round_trip(t, &text, &parsed);
        round_trip(t, &text, &as_text);
        assert_eq!((t.special().bos, t.special().eos), (Some(0), Some(2)), "{name}");
        assert_eq!(t.end_ids(), [0, 2], "{name}");
        assert!(!t.adds_bos(), "{name}");
        assert_eq!(t.vocab_size(), 8192, "{name}");
        assert_eq!(t.decode(&[1, 46, 2], true).len() + 24, t.decode(&[1, 46, 2], false).len() + 2, "{name}");
    }
    let all = std::fs::read_to_string(dir.join("models/tinymoe-fp8/heldout.txt")).unwrap();
    for parse_special in [true, false] {
        let ids = hf.encode(&all, parse_special, true).unwrap();
        assert_eq!(ids, gguf.encode(&all, parse_special, true).unwrap());
        assert_eq!(hf.decode(&ids, false), all);
    }
}

/// llama.cpp's `models/ggml-vocab-NAME.gguf` with `.inp` (texts) and `.out` (ids a line), from the folder that
/// TEGU_LLAMA_VOCABS names.
#[test]
fn llama_cpp_vocabulary_tests() {
    let Some(dir) = std::env::var_os("TEGU_LLAMA_VOCABS").map(PathBuf::from) else {
        return eprintln!("skipped: no TEGU_LLAMA_VOCABS");
    };
    let names = [
        "llama-spm",
        "llama-bpe",
        "qwen2",
        "qwen35",
        "deepseek-llm",
        "deepseek-coder",
        "gpt-2",
        "mpt",
        "falcon",
        "starcoder",
        "refact",
        "command-r",
    ];
    let mut failed = Vec::new();
    for name in names {
        let path = dir.join(format!("ggml-vocab-{name}.gguf"));
        let start = std::time::Instant::now();
        let t = from_gguf(&path);
        println!("{name}: loaded in {:?}", start.elapsed());
        let read =
            |ext: &str| std::fs::read_to_string(dir.join(format!("ggml-vocab-{name}.gguf.{ext}"))).unwrap();
        let (inp, out) = (read("inp"), read("out"));
        let texts: Vec<&str> = inp.split("\n__ggml_vocab_test__\n").collect();
        let mut lines = out.lines();
        let mut same = 0;
        for text in &texts {
            let want: Vec<TokenId> =
                lines.next().unwrap_or("").split_whitespace().map(|id| id.parse().unwrap()).collect();
            let got = t.encode(text, false, false).unwrap();
            if got == want {
                same += 1
            } else {
                failed.push(format!("{name}: {text:?}\n got {got:?}\nwant {want:?}"))
            }
            assert_eq!(t.decode(&got, false), *text, "{name}");
        }
        println!("{name}: {same} of {} texts", texts.len());
        assert!(same > 20, "{name}");
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Long runs of one character are where cutting rules with look-ahead go quadratic or give up.
#[test]
fn long_runs_are_cut_in_linear_time() {
    let Some(dir) = shared() else { return eprintln!("skipped: no shared folder") };
    let mut vocab = {
        let path = dir.join("models/tinymoe.Q4_K_M.gguf");
        let bytes = std::fs::read(&path).unwrap();
        let header = parse(&NamedBytes { path: &path, bytes: &bytes }).unwrap();
        crate::text::GgufVocab::from_meta(&header.meta).unwrap()
    };
    for pre in crate::text::pretok::PRETOKS {
        vocab.pre = Some(pre.names[0].to_owned());
        let t = Tokenizer::from_gguf_vocab(vocab.clone()).unwrap();
        for unit in [" ", "\n", " \n", "a", "1", "'", "你", "A", "🚀", "\u{301}", "\t "] {
            // Three rows stand for the kinds of rules; on those a run passes a million, the engine's step limit.
            let long = unit == " " && ["llama-bpe", "gpt-2", "deepseek-llm"].contains(&pre.names[0]);
            let text = unit.repeat(if long { 1_200_000 } else { 60_000 / unit.len() });
            for text in [format!("{text}x"), text] {
                let start = std::time::Instant::now();
                let ids = t
                    .encode(&text, true, false)
                    .unwrap_or_else(|e| panic!("{}: {unit:?}: {e}", pre.names[0]));
                assert_eq!(t.decode(&ids, false), text);
                let spent = start.elapsed();
                assert!(spent.as_secs() < 5, "{}: {unit:?} took {spent:?}", pre.names[0]);
            }
        }
    }
}
