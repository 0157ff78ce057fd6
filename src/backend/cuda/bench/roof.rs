//! What kernels are held against: the read roof, the clock, and the same bytes through few SMs.

use super::cases::{Matrices, product_of, swiglu_of};
use super::{Few, Options, copies, time_us};
use crate::backend::cuda::memory::{Buffer, Ptr};
use crate::backend::cuda::params::Params;
use crate::backend::cuda::{Gpu, Grid, Unit};
use crate::units::Result;
use std::time::Instant;

const UNIT: Unit = Unit::of("roof");
const THREADS: u32 = 256;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RoofParams {
    from: Ptr,
    to: Ptr,
    bytes: u64,
    clocks: u64,
}
const _: () = assert!(size_of::<RoofParams>() == 32);
// SAFETY: repr(C) without padding; RoofParams of kernels/roof.cu.
unsafe impl Params for RoofParams {}

fn read(gpu: &Gpu, from: Ptr, bytes: u64, to: Ptr, blocks: u32) -> Result<()> {
    let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared_bytes: 0 };
    gpu.launch(UNIT, "roof_read", grid, &RoofParams { from, to, bytes, clocks: 0 })
}

/// Bytes a second that reading alone gets from memory past the caches: the best of some numbers of blocks.
pub fn read_bytes_per_s(gpu: &Gpu) -> Result<f64> {
    let bytes = 16 * u64::from(gpu.device.cache_bytes).max(8 << 20);
    let memory = Buffer::new(gpu.context(), bytes as usize)?;
    let to = Buffer::new(gpu.context(), 256)?;
    gpu.device.zero(memory.ptr(), memory.len())?;
    let mut best = 0.0f64;
    for per_sm in [2, 4, 8] {
        let blocks = gpu.device.multiprocessors * per_sm;
        let us = time_us(gpu, bytes, &(Box::new(|_| read(gpu, memory.ptr(), bytes, to.ptr(), blocks)) as _))?;
        best = best.max(bytes as f64 / (us * 1e-6));
    }
    Ok(best)
}

/// The SMs' clock under load.
pub fn clock_hz(gpu: &Gpu) -> Result<f64> {
    const CLOCKS: u64 = 40_000_000;
    let to = Buffer::new(gpu.context(), 256)?;
    let grid = Grid { blocks: [gpu.device.multiprocessors, 1, 1], threads: 32, shared_bytes: 0 };
    let params = |clocks| RoofParams { from: Ptr::NULL, to: to.ptr(), bytes: 0, clocks };
    let mut hz = 0.0;
    // The first runs wake the clock up.
    for _ in 0..5 {
        gpu.device.synchronize()?;
        let start = Instant::now();
        gpu.launch(UNIT, "roof_spin", grid, &params(CLOCKS))?;
        gpu.device.synchronize()?;
        hz = CLOCKS as f64 / start.elapsed().as_secs_f64();
    }
    Ok(hz)
}

/// Kernels on matrices so small that they have 8 and 16 blocks, so many of them that they come from memory.
pub fn few(gpu: &Gpu, options: &Options, clock_hz: f64) -> Result<Vec<Few>> {
    const COLS: usize = 8192;
    let mut out = Vec::new();
    for blocks in [8u32, 16] {
        let mut add = |kernel: &str, bytes: u64, us: f64| {
            let bytes_per_clock = bytes as f64 / (us * 1e-6 * clock_hz) / f64::from(blocks);
            out.push(Few { kernel: kernel.to_owned(), blocks, bytes_per_clock });
        };
        let bytes = 4u64 << 20;
        let n = copies(gpu, bytes);
        let (memory, to) =
            (Buffer::new(gpu.context(), n * bytes as usize)?, Buffer::new(gpu.context(), 256)?);
        gpu.device.zero(memory.ptr(), memory.len())?;
        let at = |i: usize| memory.ptr().at((i % n) as u64 * bytes);
        add(
            "roof_read",
            bytes,
            time_us(gpu, bytes, &(Box::new(|i| read(gpu, at(i), bytes, to.ptr(), blocks)) as _))?,
        );
        drop(memory);
        // A block of a product has one tile of 16 rows; one of a SwiGLU has two of both matrices.
        let m = Matrices::new(gpu, options.codec, 16 * blocks as usize, COLS, 1)?;
        let (launch, bytes, _) = product_of(gpu, m, 1)?;
        add("product", bytes, time_us(gpu, bytes, &launch)?);
        drop(launch);
        let m = Matrices::new(gpu, options.codec, 32 * blocks as usize, COLS, 2)?;
        let (launch, bytes, _) = swiglu_of(gpu, m, 1)?;
        add("swiglu", bytes, time_us(gpu, bytes, &launch)?);
    }
    Ok(out)
}
