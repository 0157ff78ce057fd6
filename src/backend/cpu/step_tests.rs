//! A step allocates nothing: what it works in was planned and printed before the model was loaded.

use super::{CpuBackend, CpuOptions};
use crate::backend::{Backend, Input, MlaOrder, Run, StepOutput, StepPlan, Want};
use crate::weights::Source;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

/// The system's allocator, counting each thread's requests.
struct Counting;

thread_local! {
    /// Requests of this thread: other tests run at the same time on theirs.
    static REQUESTS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // A thread that is ending has no counter any more, and is none that a test looks at.
    let _ = REQUESTS.try_with(|n| n.set(n.get() + 1));
}

// SAFETY: every request goes to the system's allocator unchanged; counting touches a plain cell of this thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn backend(name: &str, threads: usize) -> CpuBackend {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracles").join(name);
    let source = Source::open(&path).unwrap();
    let bound = crate::model::bind(&source).unwrap();
    let loaded = crate::weights::load(&source, &bound.jobs, 1, &|_| {}).unwrap();
    let (model, experts) = crate::model::build(&source, bound, loaded).unwrap();
    let options = CpuOptions {
        threads,
        spin_us: 0,
        isa: None,
        exact: false,
        kv: None,
        pages: 16,
        rows_max: 64,
        dense_masks: false,
    };
    CpuBackend::new(Arc::new(model), Arc::new(experts), options).unwrap()
}

#[test]
fn a_step_allocates_nothing() {
    for name in ["llama", "qwen3-moe", "deepseek-v2", "deepseek-v3"] {
        for threads in [1, 2] {
            let mut backend = backend(name, threads);
            let pages: Vec<u32> = (0..16).collect();
            let tokens: Vec<u32> = (0..64).map(|i| 3 + i * 5 % 250).collect();
            let mut out = StepOutput::default();
            let mut step = |position: usize, rows: usize, mla: MlaOrder| {
                let input = Input::Tokens(&tokens[..rows]);
                let run = Run { input, position, rows, pages: &pages, mla, want: Want::Last };
                let layers = 0..backend.model.hyper.n_layers;
                let runs = [run];
                let plan = StepPlan { runs: &runs, layers, hidden: &[], record_routes: false, routes: None };
                let before = REQUESTS.get();
                backend.step(&plan, &mut out).unwrap();
                REQUESTS.get() - before
            };
            // The first steps of a kind give lists and outputs their size; 300 positions need two segments.
            for position in (0..320).step_by(64) {
                step(position, 64, MlaOrder::Materialized);
            }
            step(320, 1, MlaOrder::Absorbed);
            step(321, 3, MlaOrder::Absorbed);
            for position in 324..330 {
                assert_eq!(step(position, 1, MlaOrder::Absorbed), 0, "{name}, {threads} threads, decode");
            }
            let again = step(330, 64, MlaOrder::Materialized);
            assert_eq!(again, 0, "{name}, {threads} threads, prefill");
        }
    }
}
