//! Times of the matrix kernels at DeepSeek-V2-Lite's shapes: a measurement to run by hand on a machine with a GPU,
//! `tegu-tests --ignored --nocapture matrix_speed`.

use super::*;
use std::time::Instant;

/// Microseconds a call, of `n` calls put on the stream at once.
fn time(gpu: &Gpu, n: usize, f: &mut dyn FnMut(usize)) -> f64 {
    (0..n.min(3)).for_each(&mut *f);
    gpu.device.synchronize().unwrap();
    let start = Instant::now();
    (0..n).for_each(f);
    gpu.device.synchronize().unwrap();
    start.elapsed().as_secs_f64() * 1e6 / n as f64
}

/// A matrix of zeros: its bytes are read like any others.
fn zeros(gpu: &Gpu, codec: Codec, rows: usize, cols: usize) -> (MatrixParams, Buffer) {
    let planes = layout::planes(codec, rows, cols).unwrap();
    let memory = gpu.room(planes.total_bytes);
    (MatrixParams::new(codec, rows, cols, &planes, memory.ptr()), memory)
}

#[test]
#[ignore = "a measurement, not a check"]
fn matrix_speed() {
    let Some(gpu) = gpu() else { return };
    for codec in [Codec::Q4_0, Codec::Q4K, Codec::Q8_0, Codec::BF16] {
        for (rows, cols) in [(102_400, 2048), (3648, 2048), (2048, 2048)] {
            // Copies enough that none of them is in L2.
            let copies: Vec<_> = (0..(400_000_000 / (rows * cols)).clamp(1, 60))
                .map(|_| zeros(&gpu, codec, rows, cols))
                .collect();
            let bytes = copies[0].1.len() as f64;
            for n in [1, 2, 4, 8, 9, 64, 512, 2048] {
                let x = upload(&gpu, &vec![0.5; n * cols], cols);
                let y = gpu.room(n * rows * 4);
                let scratch = gpu.room(scratch_bytes(n, cols, 1));
                let us = time(&gpu, 100, &mut |i| {
                    product(&gpu, &plain(copies[i % copies.len()].0, x.acts, n, &y, false, &scratch))
                        .unwrap();
                });
                let tflops = 2e-6 * (n * rows * cols) as f64 / us;
                println!(
                    "{:6} ({rows}, {cols}) x {n}: {us:.1} us, {:.0} GB/s, {tflops:.1} TFLOP/s",
                    codec.name(),
                    bytes / us / 1e3
                );
            }
        }
    }
    for codec in [Codec::Q4_0, Codec::Q8_0] {
        expert_speed(&gpu, codec);
    }
}

fn expert_speed(gpu: &Gpu, codec: Codec) {
    let (n_experts, n_picked, width, hidden) = (64, 6, 1408, 2048);
    let memory: Vec<_> = (0..n_experts)
        .flat_map(|_| {
            [(width, hidden), (width, hidden), (hidden, width)].map(|(r, c)| zeros(gpu, codec, r, c))
        })
        .collect();
    let addresses: Vec<u64> = memory.iter().map(|m| m.0.base.0).collect();
    let table = gpu.upload(&addresses);
    let [gate, up, down] = [0, 1, 2].map(|i| memory[i].0);
    let e = Experts { table: table.ptr(), gate, up, down, n_experts, n_picked };
    let bytes = memory[..3].iter().map(|m| m.1.len()).sum::<usize>() as f64;
    let mut random = Random(9);
    for rows in [1, 2, 4, 8, 9, 16, 64, 512, 2048] {
        let n = rows * n_picked;
        let picked: Vec<u32> =
            (0..64 * n).flat_map(|_| [random.bits() as u32 % 64, 0.5f32.to_bits()]).collect();
        let (picks, out) = (gpu.upload(&picked), gpu.room(rows * hidden * 4));
        let x = upload(gpu, &vec![0.5; rows * hidden], hidden);
        let groups = gpu.room(Grouped::bytes(n, n_experts));
        let grouped = Grouped::at(groups.ptr(), n, n_experts);
        let (act, act_q) = (gpu.room(n * width * 4), gpu.room(n * quantize::row_bytes(width)));
        let scratch = gpu.room(expert::scratch_bytes_best(&e, rows));
        let step = |i: usize| Step {
            rows,
            picks: picks.ptr().at((i % 64 * n * 8) as u64),
            grouped: &grouped,
            act: act.ptr(),
            act_q: act_q.ptr(),
            exact: false,
            experts: (0, e.n_experts as u32),
            scratch: scratch.ptr(),
            scratch_bytes: scratch.len(),
        };
        let us = |f: &mut dyn FnMut(usize)| time(gpu, 60, f);
        let group = if rows <= ROWS_MAX {
            0.0
        } else {
            us(&mut |i| expert::group(gpu, &e, step(i).picks, n, &grouped).unwrap())
        };
        let gate_up = us(&mut |i| expert::gate_up(gpu, &e, &x.acts, &step(i)).unwrap());
        let down = us(&mut |i| expert::down(gpu, &e, &step(i), out.ptr()).unwrap());
        let tflops = 2e-6 * (3 * n * width * hidden) as f64 / (gate_up + down);
        println!(
            "{:6} experts x {rows}: group {group:.1}, gate-up {gate_up:.1}, down {down:.1} us; \
             {:.0} GB/s by picks, {tflops:.1} TFLOP/s",
            codec.name(),
            n as f64 * bytes / (gate_up + down) / 1e3
        );
    }
}
