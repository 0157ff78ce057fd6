//! Keys that only some files have.

use super::*;
use crate::format::gguf::ScalarArray;
use std::path::Path;

/// A small qwen2 with some keys more.
fn read(more: &[(&str, Value)]) -> Result<Hyper> {
    let mut meta = Meta::new(Path::new("m.gguf"));
    let numbers = [
        ("block_count", 4),
        ("embedding_length", 32),
        ("context_length", 64),
        ("feed_forward_length", 48),
        ("attention.head_count", 4),
    ];
    meta.insert("general.architecture".into(), Value::Str("qwen2".into()));
    meta.insert("qwen2.attention.layer_norm_rms_epsilon".into(), Value::F32(1e-6));
    for (key, n) in numbers {
        meta.insert(format!("qwen2.{key}"), Value::U32(n));
    }
    for (key, value) in more {
        assert!(meta.insert((*key).to_owned(), value.clone()), "{key} twice");
    }
    let dims = |name: &str| (name == "token_embd.weight").then(|| vec![384, 32]);
    hyper(&meta, &Directory { dims: &dims, rope_factors: None })
}

#[test]
fn windows_and_their_patterns() {
    let window = ("qwen2.attention.sliding_window", Value::U32(9));
    let pattern = |v: Value| ("qwen2.attention.sliding_window_pattern", v);
    let flags = |f: [bool; 4]| pattern(Value::Scalars(ScalarArray::from_bools(f)));
    let table = [
        (vec![], [false; 4]),
        (vec![window.clone()], [true; 4]),
        (vec![window.clone(), flags([true, false, false, true])], [true, false, false, true]),
        (vec![window.clone(), pattern(Value::U32(2))], [true, false, true, false]),
        (vec![window.clone(), pattern(Value::U32(0))], [true; 4]),
        (vec![window.clone(), pattern(Value::U32(1))], [false; 4]),
        (vec![("qwen2.attention.sliding_window", Value::U32(0)), pattern(Value::U32(0))], [false; 4]),
    ];
    for (more, slides) in table {
        let want = slides.map(|s| if s { Mask::Sliding { window: 9 } } else { Mask::Full });
        assert_eq!(read(&more).unwrap().masks, want, "{more:?}");
    }
    let e = read(&[window, pattern(Value::Str("all".into()))]).unwrap_err().to_string();
    assert!(e.starts_with("m.gguf: qwen2.attention.sliding_window_pattern: expected"), "{e}");
}

#[test]
fn layers_for_prediction_are_not_run() {
    let h = read(&[("qwen2.nextn_predict_layers", Value::U32(1))]).unwrap();
    assert_eq!((h.n_layers, h.masks.len()), (3, 3));
    let e = read(&[("qwen2.nextn_predict_layers", Value::U32(4))]).unwrap_err().to_string();
    assert_eq!(e, "m.gguf: qwen2.nextn_predict_layers: expected 0 to 3, found 4");
}
