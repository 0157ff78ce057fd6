//! The CUDA backend against the CPU's exact runs, on a machine that has a GPU; elsewhere each test says that it was
//! skipped. Every measured difference is printed beside its bar, so that the output is the report; a test fails at its end.

use crate::support::{data, read_safetensors, shared, skipped};
use std::path::{Path, PathBuf};
use tegu::app::{self, App, Choice, Options};
use tegu::backend::cuda::{Gpu, Wait};
use tegu::backend::{KvType, MlaOrder};
use tegu::engine::EvalOptions;
use tegu::model::Mask;

/// True if a GPU can be used; says so if not.
pub fn gpu(test: &str) -> bool {
    match Gpu::open(Wait::Block) {
        Ok(_) => true,
        Err(e) => {
            skipped(test, &e.to_string());
            false
        }
    }
}

pub fn open(path: &Path, backend: Choice, change: impl FnOnce(&mut Options)) -> App {
    let mut o = Options::new(path);
    (o.backend, o.context_tokens, o.threads, o.sequences) = (backend, 512, 2, 8);
    change(&mut o);
    app::prepare(o).unwrap().load(&|_| {}).unwrap()
}

/// What a run gives of all rows.
#[derive(Default)]
struct Given {
    logits: Vec<f32>,
    /// `(rows, n_layers, n_picked)`
    routes: Vec<u32>,
    /// `(rows, n_layers)`
    margins: Vec<f32>,
}

fn run(app: &mut App, ids: &[u32], options: EvalOptions) -> Given {
    let mut all = Given::default();
    let options = EvalOptions { record_routes: true, ..options };
    app.engine
        .eval(ids, &options, &mut |c| {
            all.logits.extend_from_slice(c.logits);
            all.routes.extend_from_slice(c.routes);
            all.margins.extend_from_slice(c.margins);
            Ok(())
        })
        .unwrap();
    all
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let d =
        a.iter().zip(b).map(|(a, b)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() });
    d.fold(0.0, f32::max)
}

/// Measured values against their bars: printed as they come, and those above are what a test fails of at its end.
#[derive(Default)]
struct Bars {
    above: Vec<String>,
}

impl Bars {
    fn see(&mut self, what: &str, value: f32, bar: f32) {
        let line = format!("{what}: {value:.1e} of {bar:.0e}");
        println!("{line}");
        if value.is_nan() || value > bar {
            self.above.push(line);
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.above.is_empty(), "above their bars: {:#?}", self.above);
        }
    }
}

/// The checkpoints here and, if it is there, in the shared folder; each by its folder's name.
fn oracles() -> Vec<(String, PathBuf)> {
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    for root in [Some(data().join("oracles")), shared().map(|s| s.join("oracles"))].into_iter().flatten() {
        let Ok(entries) = std::fs::read_dir(&root) else { continue };
        for path in entries.map(|e| e.unwrap().path()).filter(|p| p.join("expected.safetensors").is_file()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if !found.iter().any(|f| f.0 == name) {
                found.push((name, path));
            }
        }
    }
    found.sort();
    found
}

fn ids(path: &Path) -> Vec<u32> {
    let expected = read_safetensors(&path.join("expected.safetensors"));
    expected["input_ids"].i32.iter().map(|&i| i as u32).collect()
}

/// The CPU's exact run.
fn exact(path: &Path, ids: &[u32]) -> Given {
    run(&mut open(path, Choice::Cpu, |o| o.exact = true), ids, EvalOptions::default())
}

#[test]
fn exact_runs_agree_to_a_thousandth_and_fast_ones_to_two_hundredths() {
    if !gpu("exact_runs_agree_to_a_thousandth_and_fast_ones_to_two_hundredths") {
        return;
    }
    let mut bars = Bars::default();
    for (name, path) in oracles() {
        let ids = ids(&path);
        let want = exact(&path, &ids);
        // Picks are replayed: a near tie that falls the other way is no error of the logits.
        let replay = || EvalOptions { routes: Some(&want.routes), ..EvalOptions::default() };
        for order in [None, Some(MlaOrder::Absorbed), Some(MlaOrder::Materialized)] {
            for (exact, bar) in [(true, 1e-3), (false, 2e-2)] {
                let mut app = open(&path, Choice::Cuda, |o| (o.exact, o.mla) = (exact, order));
                let got = run(&mut app, &ids, replay());
                let mode = if exact { "exact" } else { "fast" };
                let order = order.map_or("default".into(), |o| format!("{o:?}"));
                bars.see(&format!("{name} {mode}, order {order}"), max_abs(&got.logits, &want.logits), bar);
                assert_eq!(got.routes, want.routes, "{name}: replayed picks are recorded as given");
            }
        }
    }
}

/// Without replay: picks that differ are counted, and none may differ where the CPU's choice was clear.
#[test]
fn picks_flip_only_at_near_ties() {
    if !gpu("picks_flip_only_at_near_ties") {
        return;
    }
    let mut bars = Bars::default();
    for (name, path) in oracles() {
        let ids = ids(&path);
        let want = exact(&path, &ids);
        for exact in [true, false] {
            let mut app = open(&path, Choice::Cuda, |o| o.exact = exact);
            let picked = app.engine.hyper().moe.as_ref().map_or(0, |m| m.n_picked);
            if picked == 0 {
                continue;
            }
            let got = run(&mut app, &ids, EvalOptions::default());
            let (mut flips, mut widest) = (0, 0.0f32);
            for (i, (a, b)) in got.routes.chunks(picked).zip(want.routes.chunks(picked)).enumerate() {
                let mut sets = [a.to_vec(), b.to_vec()];
                sets.iter_mut().for_each(|s| s.sort());
                if sets[0] != sets[1] {
                    // A layer after a flip sees other hidden states: its own margin says nothing of rounding.
                    let layers = app.engine.hyper().n_layers;
                    let (row, layer) = (i / layers, i % layers);
                    let earlier = (row * layers..row * layers + layer)
                        .any(|j| got.routes[j * picked..][..picked] != want.routes[j * picked..][..picked]);
                    flips += 1;
                    if !earlier {
                        widest = widest.max(want.margins[i]);
                    }
                }
            }
            let of = want.margins.iter().filter(|m| m.is_finite()).count();
            let mode = if exact { "exact" } else { "fast" };
            bars.see(&format!("{name} {mode}: {flips} of {of} choices flip, widest margin"), widest, 1e-2);
        }
    }
}

/// Not bit-equal, unlike the CPU: kernels for few and for many rows sum in different orders.
#[test]
fn chunks_and_company_stay_within_the_tolerance() {
    if !gpu("chunks_and_company_stay_within_the_tolerance") {
        return;
    }
    let mut bars = Bars::default();
    for (name, path) in oracles() {
        let ids = ids(&path);
        let cpu = exact(&path, &ids);
        for (exact, bar) in [(true, 1e-3), (false, 2e-2)] {
            let mut app = open(&path, Choice::Cuda, |o| o.exact = exact);
            for (chunk, batch) in [(0, 1), (1, 1), (7, 1), (20, 1), (0, 8), (1, 8), (5, 4)] {
                let routes = Some(&cpu.routes[..]);
                let options = EvalOptions { chunk, batch, routes, ..EvalOptions::default() };
                let got = run(&mut app, &ids, options);
                let mode = if exact { "exact" } else { "fast" };
                let what = format!("{name} {mode}, chunks of {chunk}, batch {batch}");
                bars.see(&what, max_abs(&got.logits, &cpu.logits), bar);
            }
        }
    }
}

#[test]
fn masks_and_pages_read_are_the_cpus() {
    if !gpu("masks_and_pages_read_are_the_cpus") {
        return;
    }
    let mut bars = Bars::default();
    let ids: Vec<u32> = (0..300).map(|i: u32| 3 + (i * 7919 + i * i * 31) % 380).collect();
    for name in ["llama", "deepseek-v3"] {
        let path = data().join("oracles").join(name);
        for mask in [
            Mask::Full,
            Mask::Sliding { window: 40 },
            Mask::Strided { stride: 3 },
            Mask::LocalStrided { window: 8, stride: 4 },
        ] {
            let chunk = || EvalOptions { chunk: 70, ..EvalOptions::default() };
            let mut cpu = open(&path, Choice::Cpu, |o| (o.exact, o.mask) = (true, Some(mask)));
            let want = run(&mut cpu, &ids, chunk());
            let reads = cpu.engine.counters().kv_pages_read;
            for (exact, bar) in [(true, 1e-3), (false, 2e-2)] {
                let mut app = open(&path, Choice::Cuda, |o| (o.exact, o.mask) = (exact, Some(mask)));
                let got = run(&mut app, &ids, EvalOptions { routes: Some(&want.routes), ..chunk() });
                let mode = if exact { "exact" } else { "fast" };
                bars.see(&format!("{name} {mask:?} {mode}"), max_abs(&got.logits, &want.logits), bar);
                assert_eq!(app.engine.counters().kv_pages_read, reads, "{name} {mask:?}");
            }
        }
    }
}

#[test]
fn a_cache_of_f32_is_closer_than_one_of_f16() {
    if !gpu("a_cache_of_f32_is_closer_than_one_of_f16") {
        return;
    }
    let path = data().join("oracles/llama");
    let ids = ids(&path);
    let want = exact(&path, &ids);
    let with = |kv| {
        let mut app = open(&path, Choice::Cuda, |o| o.kv = Some(kv));
        let got = run(&mut app, &ids, EvalOptions { chunk: 4, ..EvalOptions::default() });
        max_abs(&got.logits, &want.logits)
    };
    let (half, full) = (with(KvType::F16), with(KvType::F32));
    assert!(full <= 1e-3 && full < half, "f32 {full}, f16 {half}");
}

/// Perplexity of the trained demo model on held-out text.
fn demo_perplexity(backend: Choice, kv: KvType, chunk: usize) -> f64 {
    let text = std::fs::read_to_string(data().join("text/slice.ids.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<u32> = serde_json::from_value(json["parse_special"].clone()).unwrap();
    let ids = &ids[..ids.len().min(512)];
    let mut app = open(&data().join("tinymoe-demo.gguf"), backend, |o| o.kv = Some(kv));
    let vocab = app.engine.hyper().vocab;
    let got = run(&mut app, ids, EvalOptions { chunk, ..EvalOptions::default() });
    let nll = |(row, next): (&[f32], &u32)| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        sum.ln() - f64::from(row[*next as usize] - max)
    };
    let total: f64 = got.logits.chunks(vocab).zip(&ids[1..]).map(nll).sum();
    (total / (ids.len() - 1) as f64).exp()
}

/// Codes are the CPU's to the bit where their inputs are; where those differ by a rounding a code may move by one, so that
/// logits are no measure. Perplexity is.
#[test]
fn perplexity_is_the_cpus_with_every_cache_type() {
    if !gpu("perplexity_is_the_cpus_with_every_cache_type") {
        return;
    }
    let mut bars = Bars::default();
    for kv in [KvType::F32, KvType::F16, KvType::Int8] {
        let want = demo_perplexity(Choice::Cpu, kv, 0);
        for chunk in [0, 1, 50] {
            let got = demo_perplexity(Choice::Cuda, kv, chunk);
            let what = format!("demo, {} cache, chunks of {chunk}: {got:.4} for {want:.4}", kv.name());
            bars.see(&what, (got / want - 1.0).abs() as f32, 3e-3);
        }
    }
}
