//! Time and power of work at given clocks: pure functions of a board's coefficients, a model and the clocks.
//!
//! Decode, one sequence: memory time and arithmetic time, joined by a norm: `(mem^p + cmp^p)^(1/p)`, the published
//! fit with p = 2 for 4-bit weights. A batch reads the weights once and each sequence's context; each further row
//! adds a third of a row's work; from the batch where that is slower, the tensor cores' path of a prompt chunk is
//! taken instead. Power of the GPU's rail grows with the square of the voltage, whose curve we refitted to Table A's
//! own rail column: 1 at 1020 MHz, 0.945 at 918, 0.93 at 612 and below. (The published curve, linear to 0.90 at 612,
//! misses single rails by up to 6%; and the published 16-26% more power of 1020 against 918 MHz, which neither was
//! fitted to, is 21% with this one and 14% with that one.)

use super::spec::Spec;
use super::work::{GPU_J_PER_BYTE, Model, ROW_SHARE, TILE_ROWS, Work};

/// The clocks at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct At {
    /// GPU.
    pub gpu_hz: u64,
    /// Memory.
    pub emc_hz: u64,
    /// CPU.
    pub cpu_khz: u64,
    /// Multiprocessors that are on.
    pub sms: u32,
}

/// Watts by part of the module.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Power {
    /// GPU and CPU.
    pub gpu_w: f64,
    /// Memory controller and SoC.
    pub soc_w: f64,
    /// Everything else, DRAM included.
    pub rest_w: f64,
}

impl Power {
    /// The module's.
    pub fn total_w(&self) -> f64 {
        self.gpu_w + self.soc_w + self.rest_w
    }
}

/// Cost of one unit of work: a prompt chunk, or one decode step of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Time.
    pub ms: f64,
    /// Bytes read.
    pub bytes: f64,
    /// Joules in the GPU at full voltage, beside its clock tree.
    pub gpu_j: f64,
}

/// Voltage relative to that of the full clock.
pub fn voltage(spec: &Spec, gpu_hz: u64) -> f64 {
    // Every part's curve is the Nano's, stretched to its own full clock.
    let mhz = gpu_hz as f64 / 1e6 * (1020.0 / spec.gpu_full_mhz);
    let line = |x0: f64, y0: f64, x1: f64, y1: f64| y0 + (y1 - y0) * (mhz - x0) / (x1 - x0);
    match mhz {
        m if m <= 612.0 => 0.93,
        m if m <= 918.0 => line(612.0, 0.93, 918.0, 0.945),
        _ => line(918.0, 0.945, 1020.0, 1.0),
    }
}

/// What a unit of work costs; nothing for [`Work::Idle`].
pub fn cost(spec: &Spec, work: &Work, at: &At) -> Cost {
    match *work {
        Work::Idle => Cost::default(),
        Work::Prefill { model, tokens, past } => chunk(spec, model, tokens as f64, past as f64, at),
        Work::Decode { model, batch, context, .. } => {
            let rows = rows(spec, model, batch as f64, context as f64, at);
            if batch < 2 {
                return rows;
            }
            // One tile of the tensor cores holds up to 16 rows; attention reads each row's own context.
            let tiles = batch.div_ceil(TILE_ROWS) * TILE_ROWS;
            let mut tile = chunk(spec, model, tiles as f64, 0.0, at);
            let kv_bytes = batch as f64 * context as f64 * model.kv_bytes;
            tile.ms += memory_ms(spec, kv_bytes, at);
            tile.bytes += kv_bytes;
            if tile.ms < rows.ms { tile } else { rows }
        }
    }
}

fn memory_ms(spec: &Spec, bytes: f64, at: &At) -> f64 {
    bytes / (spec.emc_bytes_per_hz * at.emc_hz as f64) * 1e3
}

fn compute_ms(work: f64, at: &At) -> f64 {
    work / (at.sms as f64 * at.gpu_hz as f64 / 1e6)
}

/// Decode by one dot product a row.
fn rows(spec: &Spec, model: &Model, batch: f64, context: f64, at: &At) -> Cost {
    let ops = 1.0 - ROW_SHARE + ROW_SHARE * batch;
    let bytes = model.weight_bytes + batch * context * model.kv_bytes;
    let (mem, cmp) = (memory_ms(spec, bytes, at), compute_ms(model.decode_work * ops, at));
    let p = model.sharpness;
    let ms = (mem.powf(p) + cmp.powf(p)).powf(1.0 / p);
    Cost { ms, bytes, gpu_j: GPU_J_PER_BYTE * bytes + model.decode_ops_j * ops }
}

/// A chunk of a prompt: launches, passes over the weights and arithmetic, one after another as published short
/// prompts show.
fn chunk(spec: &Spec, model: &Model, tokens: f64, past: f64, at: &At) -> Cost {
    let pairs = tokens * (past + tokens / 2.0);
    let work = model.prefill_work * tokens + model.prefill_attention_work * pairs;
    let bytes = model.prefill_passes * model.weight_bytes + past * model.kv_bytes;
    let launch = model.launch_ms * 1_728_000.0 / at.cpu_khz as f64;
    let ms = memory_ms(spec, bytes, at) + compute_ms(work, at) + launch;
    // Attention's arithmetic costs what the matrix products' does for the same time.
    let gpu_j = GPU_J_PER_BYTE * bytes + model.prefill_j * work / model.prefill_work.max(1.0);
    Cost { ms, bytes, gpu_j }
}

/// Power while a unit of `cost` runs over and over; at rest for a cost of no time.
pub fn power(spec: &Spec, cost: &Cost, at: &At) -> Power {
    let v2 = voltage(spec, at.gpu_hz).powi(2);
    let (rate, busy) = if cost.ms > 0.0 { (1e3 / cost.ms, 1.0) } else { (0.0, 0.0) };
    let clock = spec.clock_w_per_sm * at.sms as f64 * at.gpu_hz as f64 / 1e6 / spec.gpu_full_mhz;
    let host = spec.host_w * at.cpu_khz as f64 / spec.cpu_max_khz as f64;
    let emc = spec.emc_at(at.emc_hz);
    Power {
        gpu_w: spec.base_w + busy * host + v2 * (clock + rate * cost.gpu_j),
        soc_w: emc.soc_w + emc.soc_j * cost.bytes * rate,
        rest_w: emc.rest_w + spec.rest_j * cost.bytes * rate,
    }
}
