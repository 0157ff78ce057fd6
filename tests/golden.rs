//! Logits and hidden states against what Hugging Face transformers computes, and against themselves: however a prompt is
//! split, whatever company it has, on any number of threads, the bits are the same.

use crate::support::{Tensor, data, read_safetensors, shared, skipped};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tegu::app::{self, App, Choice, Options};
use tegu::backend::{KvType, MlaOrder};
use tegu::engine::EvalOptions;
use tegu::model::Mask;

/// Checkpoints with expected results: those in the repository, and the rest where it is at hand.
fn oracles() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for root in [Some(data().join("oracles")), shared().map(|s| s.join("oracles"))].into_iter().flatten() {
        let entries = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().path());
        let new = entries.filter(|p| p.join("config.json").is_file());
        let new: Vec<_> = new.filter(|p| !found.iter().any(|f| f.file_name() == p.file_name())).collect();
        found.extend(new);
    }
    found.sort();
    assert!(found.len() >= 5, "{found:?}");
    found
}

fn open(path: &Path, change: impl FnOnce(&mut Options)) -> App {
    let mut o = Options::new(path);
    o.backend = Choice::Cpu;
    o.context_tokens = 64;
    o.threads = 2;
    o.sequences = 8;
    change(&mut o);
    app::prepare(o).unwrap().load(&|_| {}).unwrap()
}

/// What a run gives, all rows together.
#[derive(Debug, Default, PartialEq)]
struct Run {
    logits: Vec<f32>,
    hidden: Vec<Vec<f32>>,
    routes: Vec<u32>,
}

fn run(app: &mut App, ids: &[u32], options: EvalOptions) -> Run {
    let n = app.engine.hyper().n_layers + 1;
    let mut out = Run { hidden: vec![vec![]; n], ..Run::default() };
    let options = EvalOptions { hidden: (0..n).collect(), record_routes: true, ..options };
    app.engine
        .eval(ids, &options, &mut |c| {
            out.logits.extend_from_slice(c.logits);
            out.routes.extend_from_slice(c.routes);
            out.hidden.iter_mut().zip(&c.hidden).for_each(|(to, from)| to.extend_from_slice(from));
            Ok(())
        })
        .unwrap();
    out
}

fn ids(expected: &HashMap<String, Tensor>) -> Vec<u32> {
    expected["input_ids"].i32.iter().map(|&i| i as u32).collect()
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() })
        .fold(0.0, f32::max)
}

/// Largest difference in units of the largest expected value.
fn relative(a: &[f32], b: &[f32]) -> f32 {
    max_abs(a, b) / b.iter().fold(0f32, |m, v| m.max(v.abs()))
}

#[test]
fn exact_runs_match_transformers_in_both_orders_of_latent_attention() {
    for path in oracles() {
        let expected = read_safetensors(&path.join("expected.safetensors"));
        for order in [MlaOrder::Absorbed, MlaOrder::Materialized] {
            let mut app = open(&path, |o| (o.exact, o.mla) = (true, Some(order)));
            let got = run(&mut app, &ids(&expected), EvalOptions::default());
            let d = max_abs(&got.logits, &expected["logits"].f32);
            assert!(d <= 1e-3, "{} {order:?}: logits differ by {d}", path.display());
            for (i, h) in got.hidden.iter().enumerate() {
                let d = relative(h, &expected[&format!("hidden.{i}")].f32);
                assert!(d <= 1e-3, "{} {order:?}: hidden.{i} differs by {d} relative", path.display());
            }
        }
    }
}

#[test]
fn default_runs_stay_close_to_exact_ones() {
    for path in oracles() {
        let expected = read_safetensors(&path.join("expected.safetensors"));
        let ids = ids(&expected);
        let exact = run(&mut open(&path, |o| o.exact = true), &ids, EvalOptions::default());
        // f16 keys and values move logits by a few thousandths; replayed routes keep near-ties from flipping experts.
        let replay = EvalOptions { routes: Some(&exact.routes), ..EvalOptions::default() };
        let half = run(&mut open(&path, |_| {}), &ids, replay);
        let d = max_abs(&half.logits, &expected["logits"].f32);
        assert!(d <= 2e-2, "{}: f16 KV differs by {d}", path.display());
        let full = run(&mut open(&path, |o| o.kv = Some(KvType::F32)), &ids, EvalOptions::default());
        let d = max_abs(&full.logits, &expected["logits"].f32);
        assert!(d <= 1e-3, "{}: f32 KV differs by {d}", path.display());
    }
}

/// What a debug build, which also runs emulated, has time for: it shows the same on fewer checkpoints.
fn some(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let n = if cfg!(debug_assertions) { 2 } else { paths.len() };
    paths.into_iter().take(n).collect()
}

#[test]
fn neither_chunks_nor_company_nor_threads_change_a_bit() {
    for path in some(oracles()) {
        let ids = ids(&read_safetensors(&path.join("expected.safetensors")));
        for exact in [true, false] {
            for order in [MlaOrder::Absorbed, MlaOrder::Materialized] {
                let set = |o: &mut Options| (o.exact, o.mla) = (exact, Some(order));
                let mut app = open(&path, set);
                let whole = run(&mut app, &ids, EvalOptions::default());
                for chunk in [1, 7] {
                    let split = run(&mut app, &ids, EvalOptions { chunk, ..EvalOptions::default() });
                    assert!(whole == split, "{} exact {exact} {order:?} chunk {chunk}", path.display());
                }
                let company =
                    run(&mut app, &ids, EvalOptions { batch: 8, chunk: 5, ..EvalOptions::default() });
                assert!(whole == company, "{} exact {exact} {order:?} batch", path.display());
                for threads in [1, 3, 8] {
                    let mut app = open(&path, |o| {
                        set(o);
                        o.threads = threads;
                    });
                    let other = run(&mut app, &ids, EvalOptions::default());
                    assert!(whole == other, "{} exact {exact} {order:?} {threads} threads", path.display());
                }
            }
        }
    }
}

/// Tokens that no one chose, several pages of them.
fn long_ids() -> Vec<u32> {
    let n = if cfg!(debug_assertions) { 130 } else { 300 };
    (0..n).map(|i: u32| 3 + (i * 7919 + i * i * 31) % 380).collect()
}

#[test]
fn sparse_masks_equal_dense_ones_and_read_only_their_pages() {
    let masks = [
        (Mask::Sliding { window: 40 }, None),
        (Mask::Strided { stride: 4 }, Some(4)),
        (Mask::Strided { stride: 3 }, Some(3)),
        (Mask::LocalStrided { window: 8, stride: 4 }, None),
    ];
    for path in some(vec![data().join("oracles/llama"), data().join("oracles/deepseek-v3")]) {
        let name = path.display();
        let with = |mask, dense| {
            let mut app = open(&path, |o| {
                (o.exact, o.mask, o.dense_masks, o.context_tokens) = (true, Some(mask), dense, 512);
            });
            let logits =
                run(&mut app, &long_ids(), EvalOptions { chunk: 70, ..EvalOptions::default() }).logits;
            (logits, app.engine.counters().kv_pages_read)
        };
        let (full, full_reads) = with(Mask::Full, false);
        for (mask, stride) in masks {
            let (sparse, reads) = with(mask, false);
            let (dense, dense_reads) = with(mask, true);
            let d = max_abs(&sparse, &dense);
            assert!(d <= 1e-5, "{name} {mask:?}: {d}");
            assert!(max_abs(&sparse, &full) > 1e-3, "{name} {mask:?} changes nothing");
            // A local window is spread over all residues' pages: few tokens leave it nothing to skip.
            let skips = long_ids().len() >= 300 || !matches!(mask, Mask::LocalStrided { .. });
            assert!(
                reads < dense_reads || !skips && reads == dense_reads,
                "{name} {mask:?}: {reads} of {dense_reads}"
            );
            if let Some(k) = stride {
                // n/k, and one page a row and layer for rounding up.
                let most = full_reads / k + 3 * long_ids().len() as u64;
                assert!(reads <= most, "{name} {mask:?}: {reads} page reads, {full_reads} without a mask");
            }
        }
    }
}

#[test]
fn strided_runs_do_not_depend_on_chunks_either() {
    let path = data().join("oracles/llama");
    let mut app = open(&path, |o| (o.mask, o.context_tokens) = (Some(Mask::Strided { stride: 4 }), 512));
    let whole = run(&mut app, &long_ids(), EvalOptions::default());
    for chunk in [1, 7, 33] {
        let split = run(&mut app, &long_ids(), EvalOptions { chunk, ..EvalOptions::default() });
        assert!(whole == split, "chunk {chunk}");
    }
}

#[test]
fn all_families_are_at_hand() {
    if shared().is_none() {
        skipped(
            "all_families_are_at_hand",
            "the shared folder is absent; the repository's oracles were checked",
        );
    }
}
