//! `tegu bench --kernels` on a GPU: each kernel at the shapes of real models, its time held against the bytes that its shape
//! makes it move and against what a kernel that only reads gets from the same memory in the same run.
//!
//! A kernel is launched many times in one recorded graph, as a step launches it, on copies of its matrix that together
//! exceed the second-level cache. Weights are zeros: no time depends on their values.

mod cases;
mod roof;

use super::module::{Gpu, Unit};
use super::sass::{self, Loop};
use crate::format::Codec;
use crate::units::Result;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Codec of the models' matrices.
    pub codec: Codec,
    /// Rows of the prefill cases.
    pub prefill_rows: usize,
}

/// One kernel at one shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The model and phase.
    pub model: String,
    /// What it computes, and the shape.
    pub name: String,
    /// The function that does most of it.
    pub kernel: String,
    /// Time of one, in a graph of many.
    pub us: f64,
    /// Bytes that the shape (and the picks) make it move: each matrix, page and activation once.
    pub bytes: u64,
    /// Multiply-adds.
    pub macs: u64,
    /// Its inner loop on sm_87; none where the code could not be had or has no loop.
    pub inner: Option<Inner>,
}

impl Measured {
    /// Bytes a second.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / (self.us * 1e-6)
    }
}

/// An inner loop and the weights that a lane gets through in one pass of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Inner {
    /// Its instructions.
    pub code: Loop,
    /// Weights a lane and pass; 0 where the kernel multiplies no weights.
    pub weights: f64,
}

impl Inner {
    /// The loop of several kernels' that does the multiplying.
    fn rank(&self) -> (u32, u32, u32) {
        (self.code.pipes.tensor, self.code.dots, self.code.fmas)
    }
}

/// A kernel kept to few SMs: a block to each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Few {
    /// The kernel.
    pub kernel: String,
    /// Blocks, and so SMs.
    pub blocks: u32,
    /// Bytes a clock and SM.
    pub bytes_per_clock: f64,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The GPU.
    pub device: String,
    /// Its compute capability.
    pub sm: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Codec of the matrices.
    pub codec: String,
    /// The SMs' clock under load, measured.
    pub clock_hz: f64,
    /// Bytes a second of a kernel that only reads.
    pub roof_bytes_per_s: f64,
    /// The kernels.
    pub results: Vec<Measured>,
    /// Some of them on few SMs.
    pub few: Vec<Few>,
}

/// A launch to be timed: the `i`-th of many, so that it can take the `i`-th copy of its matrix.
type Launch<'a> = Box<dyn Fn(usize) -> Result<()> + 'a>;

/// A kernel at a shape, ready to be launched. The launch owns the memory that it names.
struct Case<'a> {
    model: &'static str,
    name: String,
    /// Activation rows of the step.
    rows: usize,
    bytes: u64,
    macs: u64,
    launch: Launch<'a>,
}

/// Measures everything; `progress` is told how many of how many jobs are done.
pub fn run(gpu: &Gpu, options: &Options, progress: &mut dyn FnMut(usize, usize)) -> Result<Report> {
    let device = &gpu.device;
    gpu.context().bind()?;
    let mut report = Report {
        device: device.name.clone(),
        sm: device.sm,
        multiprocessors: device.multiprocessors,
        codec: options.codec.name().to_owned(),
        clock_hz: roof::clock_hz(gpu)?,
        roof_bytes_per_s: roof::read_bytes_per_s(gpu)?,
        results: Vec::new(),
        few: Vec::new(),
    };
    let jobs = cases::all(options);
    for (done, job) in jobs.iter().enumerate() {
        progress(done, jobs.len());
        // Memory is taken a job at a time: what one took goes before the next one's comes.
        for case in cases::make(gpu, options, job)? {
            report.results.push(measure(gpu, case)?);
        }
    }
    report.few = roof::few(gpu, options, report.clock_hz)?;
    Ok(report)
}

fn measure(gpu: &Gpu, case: Case) -> Result<Measured> {
    // Once by itself: what it needs is compiled and loaded before it is recorded, and it shows which kernels it is.
    let launched = gpu.traced(|| (case.launch)(0))?;
    gpu.device.synchronize()?;
    let us = time_us(gpu, case.bytes, &case.launch)?;
    let names: Vec<&str> = launched.iter().map(|(_, name)| name.as_str()).collect();
    Ok(Measured {
        model: case.model.to_owned(),
        name: case.name,
        kernel: names.join(" + "),
        us,
        bytes: case.bytes,
        macs: case.macs,
        inner: launched
            .iter()
            .filter_map(|(u, name)| inner(gpu, *u, name, case.rows))
            .max_by_key(Inner::rank),
    })
}

/// Microseconds of one launch: the median over some replays of a graph of many.
fn time_us(gpu: &Gpu, bytes: u64, launch: &Launch) -> Result<f64> {
    const REPLAYS: usize = 7;
    // Enough for some milliseconds: the replay itself costs ten microseconds.
    let n = (4_000_000_000 / bytes.max(1)).clamp(16, 400) as usize;
    launch(0)?;
    gpu.device.synchronize()?;
    let graph = gpu.record(|| (0..n).try_for_each(launch))?;
    let mut took = [0.0; REPLAYS];
    for t in &mut took {
        let start = Instant::now();
        gpu.replay(&graph)?;
        gpu.device.synchronize()?;
        *t = start.elapsed().as_secs_f64() * 1e6 / n as f64;
    }
    took.sort_by(f64::total_cmp);
    Ok(took[REPLAYS / 2])
}

/// The inner loop of a kernel as it is compiled for Orin, whatever GPU is measured.
fn inner(gpu: &Gpu, unit: Unit, kernel: &str, rows: usize) -> Option<Inner> {
    let code =
        gpu.machine_code(unit, ORIN).inspect_err(|e| log::debug!("no code for sm_{ORIN}: {e}")).ok()?;
    let functions = sass::functions(&code);
    let (_, function) = functions.iter().find(|(name, _)| name == kernel)?;
    let code = sass::inner_loop(function)?;
    Some(Inner { code, weights: weights_a_pass(unit, kernel, &code, rows) })
}

/// The target whose instruction counts matter most.
const ORIN: u32 = 87;

/// Weights that a lane multiplies in a pass of a product's loop; 0 for kernels that multiply none. A byte dot product takes
/// 4 of them, in two halves of the activation, for each row of a block; an mma of 16x8x16 takes 256 for a warp's 32 lanes
/// and 8 rows, as does half of a pair of 16x8x32 of bytes (half of that where scales are of 16 columns); else a
/// multiply-add takes one for a row.
fn weights_a_pass(unit: Unit, kernel: &str, code: &Loop, rows: usize) -> f64 {
    // As many rows as a block of the kernel multiplies a weight by: its name ends in them.
    let named = kernel.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok());
    let block_rows = match unit.file {
        "gemv" | "gemm" => named.unwrap_or(rows),
        "expert" => 1,
        _ => return 0.0,
    };
    let rows = block_rows as f64;
    match (code.pipes.tensor, code.dots) {
        (0, 0) => f64::from(code.fmas) / rows,
        (0, dots) => f64::from(dots) * 4.0 / 2.0 / rows,
        (mmas, _) => {
            let narrow = ["Q2_K", "Q3_K", "Q6_K"].iter().any(|c| unit.variant.ends_with(c));
            let each = if unit.file == "gemv" && narrow { 128.0 } else { 256.0 };
            f64::from(mmas) * each / 32.0 / (rows / 8.0)
        }
    }
}

/// Copies of something of `bytes` that together leave the second-level cache.
fn copies(gpu: &Gpu, bytes: u64) -> usize {
    let enough = 4 * u64::from(gpu.device.cache_bytes);
    enough.div_ceil(bytes.max(1)).clamp(1, 256) as usize
}

#[test]
fn weights_are_counted_by_what_multiplies_them() {
    let count = |tensor, dots, fmas| Loop { pipes: sass::Pipes { tensor, ..Default::default() }, dots, fmas };
    let of = |file, kernel, code: Loop| weights_a_pass(Unit::of(file), kernel, &code, 3);
    // Q4_0 at one row: two groups of 4 rows x 32 columns take 64 IDP each.
    assert_eq!(of("gemv", "gemv_r1", count(0, 128, 8)), 256.0);
    assert_eq!(of("gemv", "swiglu_r4", count(0, 512, 8)), 256.0);
    assert_eq!(of("expert", "expert_down", count(0, 128, 8)), 256.0);
    assert_eq!(of("gemv", "gemv_w1", count(0, 0, 32)), 32.0);
    // Two tiles by 4 groups against 8 rows: 8 mma of 16 x 32 weights for each half of the activations.
    assert_eq!(of("gemv", "gemv_r8", count(16, 0, 64)), 128.0);
    let narrow = Unit { file: "gemv", variant: "CODEC=CODEC_Q6_K" };
    assert_eq!(weights_a_pass(narrow, "gemv_r8", &count(16, 0, 64), 3), 64.0);
    // A warp's two tiles by 32 columns against 64 rows: 32 mma for 1024 weights, 32 a lane.
    assert_eq!(of("gemm", "gemm_n64", count(32, 0, 0)), 32.0);
    assert_eq!(of("norm", "rms_norm", count(0, 0, 8)), 0.0);
}
