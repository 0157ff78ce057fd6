//! The CUDA backend against the CPU's exact runs, on a machine that has a GPU; elsewhere each test says that it was
//! skipped. Picks of experts are replayed, so that a near-tie that falls the other way is not taken for an error.

use crate::support::{data, read_safetensors, shared, skipped};
use std::path::{Path, PathBuf};
use tegu::app::{self, App, Choice, Options};
use tegu::backend::cuda::{Gpu, Wait};
use tegu::backend::{KvType, MlaOrder};
use tegu::engine::EvalOptions;
use tegu::model::Mask;

/// True if a GPU can be used; says so if not.
fn gpu(test: &str) -> bool {
    match Gpu::open(Wait::Block) {
        Ok(_) => true,
        Err(e) => {
            skipped(test, &e.to_string());
            false
        }
    }
}

fn open(path: &Path, backend: Choice, change: impl FnOnce(&mut Options)) -> App {
    let mut o = Options::new(path);
    (o.backend, o.context_tokens, o.threads, o.sequences) = (backend, 512, 2, 8);
    change(&mut o);
    app::prepare(o).unwrap().load(&|_| {}).unwrap()
}

/// Logits and picks of all rows.
fn run(app: &mut App, ids: &[u32], options: EvalOptions) -> (Vec<f32>, Vec<u32>) {
    let (mut logits, mut routes) = (Vec::new(), Vec::new());
    let options = EvalOptions { record_routes: true, ..options };
    app.engine
        .eval(ids, &options, &mut |c| {
            logits.extend_from_slice(c.logits);
            routes.extend_from_slice(c.routes);
            Ok(())
        })
        .unwrap();
    (logits, routes)
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let d =
        a.iter().zip(b).map(|(a, b)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() });
    d.fold(0.0, f32::max)
}

fn oracles() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for root in [Some(data().join("oracles")), shared().map(|s| s.join("oracles"))].into_iter().flatten() {
        let new = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().path());
        let new: Vec<_> = new.filter(|p| p.join("config.json").is_file()).collect();
        found.extend(new);
    }
    found.sort();
    found
}

fn ids(path: &Path) -> Vec<u32> {
    let expected = read_safetensors(&path.join("expected.safetensors"));
    expected["input_ids"].i32.iter().map(|&i| i as u32).collect()
}

#[test]
fn exact_runs_agree_to_a_thousandth_and_fast_ones_to_two_hundredths() {
    if !gpu("exact_runs_agree_to_a_thousandth_and_fast_ones_to_two_hundredths") {
        return;
    }
    for path in oracles() {
        let ids = ids(&path);
        let (want, routes) =
            run(&mut open(&path, Choice::Cpu, |o| o.exact = true), &ids, EvalOptions::default());
        let replay = || EvalOptions { routes: Some(&routes), ..EvalOptions::default() };
        for order in [MlaOrder::Absorbed, MlaOrder::Materialized] {
            for (exact, tolerance) in [(true, 1e-3), (false, 2e-2)] {
                let mut app = open(&path, Choice::Cuda, |o| (o.exact, o.mla) = (exact, Some(order)));
                let (got, made) = run(&mut app, &ids, replay());
                let d = max_abs(&got, &want);
                assert!(d <= tolerance, "{} {order:?} exact {exact}: {d}", path.display());
                assert_eq!(made, routes, "{}: replayed picks are recorded as given", path.display());
            }
        }
    }
}

/// Not bit-equal, unlike the CPU: kernels for few and for many rows sum in different orders.
#[test]
fn chunks_and_company_stay_within_the_tolerance() {
    if !gpu("chunks_and_company_stay_within_the_tolerance") {
        return;
    }
    for path in oracles() {
        let ids = ids(&path);
        for (exact, tolerance) in [(true, 1e-4), (false, 2e-2)] {
            let mut app = open(&path, Choice::Cuda, |o| o.exact = exact);
            let (want, routes) = run(&mut app, &ids, EvalOptions::default());
            for (chunk, batch) in [(1, 1), (7, 1), (20, 1), (1, 8), (5, 4)] {
                // Company is other tokens, whose picks were not recorded.
                let routes = if batch == 1 { Some(&routes[..]) } else { None };
                if batch > 1 && app.engine.hyper().moe.is_some() {
                    continue;
                }
                let (got, _) =
                    run(&mut app, &ids, EvalOptions { chunk, batch, routes, ..EvalOptions::default() });
                let d = max_abs(&got, &want);
                assert!(d <= tolerance, "{} exact {exact} chunk {chunk} batch {batch}: {d}", path.display());
            }
        }
    }
}

#[test]
fn masks_and_pages_read_are_the_cpus() {
    if !gpu("masks_and_pages_read_are_the_cpus") {
        return;
    }
    let ids: Vec<u32> = (0..300).map(|i: u32| 3 + (i * 7919 + i * i * 31) % 380).collect();
    for path in ["oracles/llama", "oracles/deepseek-v3"].map(|p| data().join(p)) {
        for mask in [
            Mask::Full,
            Mask::Sliding { window: 40 },
            Mask::Strided { stride: 3 },
            Mask::LocalStrided { window: 8, stride: 4 },
        ] {
            let chunk = || EvalOptions { chunk: 70, ..EvalOptions::default() };
            let mut cpu = open(&path, Choice::Cpu, |o| (o.exact, o.mask) = (true, Some(mask)));
            let (want, routes) = run(&mut cpu, &ids, chunk());
            let reads = cpu.engine.counters().kv_pages_read;
            for (exact, tolerance) in [(true, 1e-3), (false, 2e-2)] {
                let mut app = open(&path, Choice::Cuda, |o| (o.exact, o.mask) = (exact, Some(mask)));
                let (got, _) = run(&mut app, &ids, EvalOptions { routes: Some(&routes), ..chunk() });
                let d = max_abs(&got, &want);
                assert!(d <= tolerance, "{} {mask:?} exact {exact}: {d}", path.display());
                assert_eq!(app.engine.counters().kv_pages_read, reads, "{} {mask:?}", path.display());
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
    let (want, _) = run(&mut open(&path, Choice::Cpu, |o| o.exact = true), &ids, EvalOptions::default());
    let with = |kv| {
        let mut app = open(&path, Choice::Cuda, |o| o.kv = Some(kv));
        max_abs(&run(&mut app, &ids, EvalOptions { chunk: 4, ..EvalOptions::default() }).0, &want)
    };
    let (half, full) = (with(KvType::F16), with(KvType::F32));
    assert!(full <= 1e-3 && full < half, "f32 {full}, f16 {half}");
}
