//! Models whose experts come and go give the bits of the same models with all experts on the device.

use crate::backend::cuda::testing::gpu;
use crate::backend::cuda::{CudaBackend, CudaOptions, Draft, ExpertRoom};
use crate::backend::{Backend, Input, MlaOrder, Run, StepOutput, StepPlan, Want};
use crate::kv::PageId;
use crate::model::{self, build};
use crate::units::{Error, ExpertId, LayerId, Result};
use crate::weights::{self, Expert, ExpertSource, ResidentExperts, Source};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Pages of a sequence in these tests.
const PAGES: usize = 4;
/// More rows than a GEMV takes, and not in whole blocks.
const PROMPT: usize = 44;

fn options(exact: bool) -> CudaOptions {
    CudaOptions {
        exact,
        kv: None,
        pages: 3 * PAGES,
        rows_max: 64,
        threads: 2,
        graphs: true,
        expert_bytes: None,
        fake_missing: None,
    }
}

fn load(
    path: &Path,
    o: CudaOptions,
    experts: Option<Arc<dyn ExpertSource>>,
) -> Option<(CudaBackend, ExpertRoom)> {
    let gpu = gpu()?;
    let source = Source::open(path).unwrap();
    let bound = model::bind(&source).unwrap();
    let draft = Draft::new(&source, bound, o, u64::MAX).unwrap();
    let room = draft.room;
    Some((CudaBackend::load(gpu, &source, draft, experts, &|_| {}).unwrap(), room))
}

/// Bytes of one expert (all are alike in these models), experts of a layer, and picks of a row.
fn sizes(path: &Path) -> (u64, usize, usize) {
    let source = Source::open(path).unwrap();
    let bound = model::bind(&source).unwrap();
    let (m, experts) = (bound.hyper.moe.clone().unwrap(), bound.expert_jobs as u64 / 3);
    let draft = Draft::new(&source, bound, options(false), u64::MAX).unwrap();
    (draft.plan.expert_bytes / experts, m.n_experts, m.n_picked)
}

/// One step of `(sequence, first position, tokens)`; all rows' logits.
fn step(b: &mut CudaBackend, runs: &[(u32, usize, Vec<u32>)]) -> Result<(Vec<f32>, Vec<u32>)> {
    let pages: Vec<Vec<PageId>> =
        runs.iter().map(|(s, ..)| (0..PAGES as u32).map(|i| s * PAGES as u32 + i).collect()).collect();
    let runs: Vec<Run> = runs
        .iter()
        .zip(&pages)
        .map(|((_, position, tokens), pages)| Run {
            input: Input::Tokens(tokens),
            position: *position,
            rows: tokens.len(),
            pages,
            mla: MlaOrder::Absorbed,
            want: if tokens.len() > 1 { Want::Last } else { Want::All },
        })
        .collect();
    let layers = 0..b.hyper.n_layers;
    let plan = StepPlan { runs: &runs, layers, hidden: &[], record_routes: true, routes: None };
    let mut out = StepOutput::default();
    b.step(&plan, &mut out)?;
    Ok((out.logits, out.routes))
}

/// A prompt in one piece, tokens one by one (recorded and replayed on the way), and a batch of eight rows.
fn session(b: &mut CudaBackend) -> Vec<(Vec<f32>, Vec<u32>)> {
    let token = |i: usize| 3 + (i as u32 * 7919) % 300;
    let prompt = |s: u32| (s, 0, (0..PROMPT).map(|i| token(i + 50 * s as usize)).collect::<Vec<u32>>());
    let mut all: Vec<_> = (0..3).map(|s| step(b, &[prompt(s)]).unwrap()).collect();
    for i in PROMPT..PROMPT + 5 {
        all.push(step(b, &[(0, i, vec![token(i)])]).unwrap());
    }
    for i in 0..4 {
        let tokens = |s: usize, n: usize| (0..n).map(|k| token(i + 10 * k + 100 * s)).collect::<Vec<u32>>();
        let runs = [
            (0, PROMPT + 5 + 4 * i, tokens(0, 4)),
            (1, PROMPT + 3 * i, tokens(1, 3)),
            (2, PROMPT + i, tokens(2, 1)),
        ];
        all.push(step(b, &runs).unwrap());
    }
    all
}

/// A fixture: of the folder that a machine without the sources is told, else of this one.
fn data(name: &str) -> PathBuf {
    let folder = std::env::var_os("TEGU_TEST_DATA").unwrap_or_else(|| "tests/data".into());
    PathBuf::from(folder).join(name)
}

fn models() -> Vec<PathBuf> {
    let names = ["oracles/deepseek-v3", "oracles/deepseek-v2", "oracles/qwen3-moe", "tinymoe-demo.gguf"];
    names.map(data).into()
}

#[test]
fn experts_that_come_and_go_give_the_same_bits() {
    if gpu().is_none() {
        return;
    }
    for path in &models() {
        let (bytes, n_experts, n_picked) = sizes(path);
        for exact in [false, true] {
            let (mut resident, room) = load(path, options(exact), None).unwrap();
            assert_eq!(room, ExpertRoom::Resident);
            let want = session(&mut resident);
            drop(resident);
            let bytes = if exact { sizes_exact(path) } else { bytes };
            for slots in [n_picked, n_picked + 1, n_experts, n_experts + n_picked] {
                let o = CudaOptions { expert_bytes: Some(slots as u64 * bytes), ..options(exact) };
                let (mut b, room) = load(path, o, None).unwrap();
                let ExpertRoom::Slots { slots: got, .. } = room else { panic!("{room:?}") };
                assert_eq!(got, slots, "{}", path.display());
                assert!(session(&mut b) == want, "{} exact {exact} slots {slots}", path.display());
                let misses = b.misses();
                assert!(misses.experts > 0 && misses.bytes > 0, "{misses:?}");
                // Once more over warm slots and recorded spans.
                assert!(session(&mut b) == want, "{} exact {exact} slots {slots}, again", path.display());
            }
            for share in [0.0, 0.25, 1.0] {
                let o = CudaOptions { fake_missing: Some(share), ..options(exact) };
                let (mut b, _) = load(path, o, None).unwrap();
                assert!(session(&mut b) == want, "{} exact {exact} faked {share}", path.display());
                let misses = b.misses();
                assert_eq!((misses.experts > 0, misses.bytes), (share > 0.0, 0));
            }
        }
    }
}

fn sizes_exact(path: &Path) -> u64 {
    let source = Source::open(path).unwrap();
    let bound = model::bind(&source).unwrap();
    let experts = bound.expert_jobs as u64 / 3;
    let draft = Draft::new(&source, bound, options(true), u64::MAX).unwrap();
    draft.plan.expert_bytes / experts
}

/// Experts in memory that cannot be had while `broken`.
struct Fragile {
    experts: ResidentExperts,
    broken: AtomicBool,
    /// Fetches until it breaks by itself.
    left: AtomicU64,
}

impl ExpertSource for Fragile {
    fn fetch(&self, layer: LayerId, ids: &[ExpertId], out: &mut Vec<Arc<Expert>>) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.broken.store(true, Ordering::Relaxed);
        }
        if self.broken.load(Ordering::Relaxed) {
            // What was read before the failure is given out too.
            self.experts.fetch(layer, &ids[..ids.len() / 2], out)?;
            return Err(Error::bad("experts", format!("layer {layer}"), "experts", "a broken disk"));
        }
        self.experts.fetch(layer, ids, out)
    }
}

#[test]
fn a_failed_fetch_fails_its_step_and_no_other() {
    if gpu().is_none() {
        return;
    }
    let path = &*data("oracles/deepseek-v3");
    let (bytes, _, n_picked) = sizes(path);
    let want = session(&mut load(path, options(false), None).unwrap().0);
    let source = Source::open(path).unwrap();
    let bound = model::bind(&source).unwrap();
    let loaded = weights::load(&source, &bound.jobs, 2, &|_| {}).unwrap();
    let (_, experts) = build(&source, bound, loaded).unwrap();
    for left in [1, 2, 3, 7, 20] {
        let experts = ResidentExperts::new(experts.layers().to_vec());
        let fragile = Fragile { experts, broken: AtomicBool::new(false), left: AtomicU64::new(u64::MAX) };
        let fragile = Arc::new(fragile);
        let o = CudaOptions { expert_bytes: Some((n_picked as u64 + 1) * bytes), ..options(false) };
        let (mut b, _) = load(path, o, Some(fragile.clone())).unwrap();
        // Recorded before it breaks, or not.
        if left % 2 == 1 {
            assert!(session(&mut b) == want);
        }
        fragile.left.store(left, Ordering::Relaxed);
        let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 5 + i * 3 % 200).collect();
        let mut failed = None;
        for i in 0..40 {
            let run = if i % 2 == 0 { (0, 0, prompt.clone()) } else { (1, 0, vec![9 + i]) };
            if let Err(e) = step(&mut b, &[run]) {
                failed = Some(e.to_string());
                break;
            }
        }
        let failed = failed.expect("it breaks");
        assert!(failed.contains("a broken disk") && failed.contains("layer "), "{failed}");
        assert!(step(&mut b, &[(1, 0, vec![250])]).is_err(), "still broken");
        fragile.left.store(u64::MAX, Ordering::Relaxed);
        fragile.broken.store(false, Ordering::Relaxed);
        assert!(session(&mut b) == want, "whole again after fetch {left}");
    }
}
