//! Packing: the GGUF that comes out computes what the folder that went in computes, whatever the family, and packing it
//! again changes nothing.

use crate::support::{command, data};
use std::path::{Path, PathBuf};
use tegu::app::{self, Options};
use tegu::engine::EvalOptions;

fn pack(model: &Path, output: &Path, codec: &str) {
    let mut command = command("tegu");
    command.args(["pack", "--codec", codec, "-o"]).arg(output).arg(model);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Logits of a few tokens, f32 throughout.
fn logits(model: &Path) -> Vec<f32> {
    let mut options = Options::new(model);
    (options.exact, options.context_tokens, options.threads) = (true, 64, 2);
    let mut app = app::prepare(options).unwrap().load(&|_| {}).unwrap();
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 380).collect();
    let mut out = Vec::new();
    let collect = &mut |c: tegu::engine::EvalChunk| {
        out.extend_from_slice(c.logits);
        Ok(())
    };
    app.engine.eval(&ids, &EvalOptions::default(), collect).unwrap();
    out
}

fn oracles() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data().join("oracles")).unwrap();
    let mut found: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    found.sort();
    assert!(found.len() >= 5);
    found
}

/// Root of the mean square difference, in units of the spread of `want`.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mean = want.iter().map(|&x| f64::from(x)).sum::<f64>() / want.len() as f64;
    let spread: f64 = want.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
    let error: f64 = got.iter().zip(want).map(|(&a, &b)| f64::from(a - b).powi(2)).sum();
    (error / spread).sqrt()
}

#[test]
fn a_packed_model_computes_what_its_folder_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for model in oracles() {
        let want = logits(&model);
        // These weights are BF16: nothing is lost, but rounding where rotary pairs were brought together. Quantizing may
        // flip a near-tie between experts, which random ones make much of; anything out of place would be 1 or more.
        for (codec, most) in [("bf16", 1e-5), ("f32", 1e-5), ("q8_0", 0.25)] {
            pack(&model, &path, codec);
            let d = distance(&logits(&path), &want);
            assert!(d <= most, "{} {codec}: {d}", model.display());
        }
    }
}

#[test]
fn packing_a_packed_model_again_keeps_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (once, twice) = (dir.path().join("once.gguf"), dir.path().join("twice.gguf"));
    for codec in ["q8_0", "q4_k_m"] {
        pack(&data().join("oracles/deepseek-v3"), &once, codec);
        pack(&once, &twice, codec);
        assert!(std::fs::read(&once).unwrap() == std::fs::read(&twice).unwrap(), "{codec}");
    }
}
