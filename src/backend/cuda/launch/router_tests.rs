//! The router's kernels against its definition, `model::route`.

use super::router::{Router, RouterFew, few, few_bytes, pick};
use super::test_pages::random;
use crate::backend::cuda::params::{MatrixParams, PickParams};
use crate::backend::cuda::testing::gpu;
use crate::backend::cuda::{Gpu, Ptr};
use crate::format::{Codec, bf16, f16, layout};
use crate::model::router::hyper;
use crate::model::{Gating, MoeHyper, Pick, route};

#[test]
fn picks_are_the_routers() {
    let Some(gpu) = gpu() else { return };
    let n_layers = 3;
    // (experts, groups, groups picked, picked)
    for (n_experts, n_groups, n_groups_picked, n_picked) in [
        (1, 1, 1, 1),
        (8, 1, 1, 2),
        (64, 1, 1, 6),
        (64, 8, 3, 6),
        (160, 8, 3, 6),
        (256, 8, 4, 8),
        (512, 1, 1, 64),
    ] {
        for (i, gating) in [Gating::Softmax, Gating::Sigmoid].into_iter().enumerate() {
            for coarse in [false, true] {
                let shape = hyper(gating, n_experts, n_groups, n_groups_picked, n_picked);
                let m = MoeHyper { normalize: coarse == (i == 0), scale: 2.5, ..shape };
                // Coarse logits are full of ties, which go to the lower index.
                let round = |v: f32| if coarse { (v * 4.0).round() / 4.0 } else { v * 3.0 };
                let logits: Vec<f32> = random(5 * n_experts, 60).into_iter().map(round).collect();
                let bias: Vec<f32> =
                    random(n_experts, 61).into_iter().map(|b| (b * 8.0).round() / 64.0).collect();
                let bias = (gating == Gating::Sigmoid && !coarse).then_some(bias);
                check_router(&gpu, &m, &logits, bias.as_deref(), n_layers);
            }
        }
    }
}

fn check_router(gpu: &Gpu, m: &MoeHyper, logits: &[f32], bias: Option<&[f32]>, n_layers: usize) {
    let rows = logits.len() / m.n_experts;
    let stride = n_layers * m.n_picked;
    let bl = gpu.upload(logits);
    let bb = bias.map(|b| gpu.upload(b));
    let (picks, record) = (gpu.room(rows * m.n_picked * 8), gpu.room(rows * stride * 4));
    let mut job = Router {
        bias: bb.as_ref().map_or(Ptr::NULL, |b| b.ptr()),
        record: record.ptr(),
        route: (stride, m.n_picked),
        ..Router::of(bl.ptr(), rows, picks.ptr())
    };
    let mut given: Option<Vec<u32>> = None;
    for replay in [false, true] {
        let replayed = given.as_ref().map(|g| gpu.upload(g));
        job.given = replayed.as_ref().map_or(Ptr::NULL, |g| g.ptr());
        pick(gpu, m, &job).unwrap();
        let got = gpu.download::<PickParams>(picks.ptr(), rows * m.n_picked);
        let recorded = gpu.download::<u32>(record.ptr(), rows * stride);
        for row in 0..rows {
            let mut l = logits[row * m.n_experts..][..m.n_experts].to_vec();
            let (mut scratch, mut want) = (vec![0.0; m.n_experts], vec![Pick::default(); m.n_picked]);
            let replay = given.as_ref().map(|g| &g[row * stride + m.n_picked..][..m.n_picked]);
            route(m, bias, &mut l, &mut scratch, replay, &mut want);
            for (k, want) in want.iter().enumerate() {
                let got = got[row * m.n_picked + k];
                assert_eq!(got.expert, want.expert, "{m:?} row {row} pick {k}");
                assert!(
                    (got.weight - want.weight).abs() <= 2e-6 * want.weight.abs(),
                    "{m:?}: {got:?} {want:?}"
                );
                assert_eq!(recorded[row * stride + m.n_picked + k], want.expert);
            }
        }
        // The second time round the picks are turned about and replayed.
        if !replay {
            let mut turned = recorded.clone();
            turned.chunks_mut(stride).for_each(|r| r[m.n_picked..2 * m.n_picked].reverse());
            given = Some(turned);
        }
    }
}

#[test]
fn the_router_of_few_rows_multiplies_and_picks() {
    let Some(gpu) = gpu() else { return };
    for (n_experts, cols, n_groups, n_picked) in [(64, 2048, 1, 6), (20, 200, 1, 3), (256, 129, 8, 8)] {
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            let shape = hyper(Gating::Sigmoid, n_experts, n_groups, n_groups.div_ceil(2), n_picked);
            let m = MoeHyper { normalize: true, scale: 2.5, ..shape };
            for rows in [1, 3, 8] {
                check_few(&gpu, &m, codec, cols, rows);
            }
        }
    }
}

fn check_few(gpu: &Gpu, m: &MoeHyper, codec: Codec, cols: usize, rows: usize) {
    let planes = layout::planes(codec, m.n_experts, cols).unwrap();
    // Every product and sum is exact: codes of few bits, so that ties stay ties and no order of sums matters.
    let code = |v: &f32| (v * 8.0).round() / 8.0;
    let weights: Vec<f32> = random(m.n_experts * cols, 80).iter().map(|v| code(v) / 8.0).collect();
    let x: Vec<f32> = random(rows * cols, 81).iter().map(code).collect();
    let mut bytes = vec![0u8; planes.total_bytes];
    for (i, w) in weights.iter().enumerate() {
        let (row, k) = (i / cols, i % cols);
        let at = ((row / 16) * cols + k) * 16 + row % 16;
        match codec {
            Codec::F32 => bytes[4 * at..4 * at + 4].copy_from_slice(&w.to_le_bytes()),
            Codec::F16 => bytes[2 * at..2 * at + 2].copy_from_slice(&f16::from_f32(*w).to_le_bytes()),
            _ => bytes[2 * at..2 * at + 2].copy_from_slice(&bf16::from_f32(*w).to_le_bytes()),
        }
    }
    let (bw, bx) = (gpu.upload(&bytes), gpu.upload(&x));
    let picks = gpu.room(rows * m.n_picked * 8);
    let scratch = gpu.room(few_bytes(m.n_experts, cols, rows));
    let pick = Router::of(Ptr::NULL, rows, picks.ptr());
    let w = MatrixParams::new(codec, m.n_experts, cols, &planes, bw.ptr());
    let job = RouterFew { w, x: bx.ptr(), x_row: cols, scratch: scratch.ptr(), pick };
    for _ in 0..2 {
        few(gpu, m, &job).unwrap(); // the second launch finds the counter at zero again
    }
    let got = gpu.download::<PickParams>(picks.ptr(), rows * m.n_picked);
    for row in 0..rows {
        let x = &x[row * cols..][..cols];
        let dot = |w: &[f32]| w.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
        let mut logits: Vec<f32> = weights.chunks(cols).map(dot).collect();
        let (mut scratch, mut want) = (vec![0.0; m.n_experts], vec![Pick::default(); m.n_picked]);
        route(m, None, &mut logits, &mut scratch, None, &mut want);
        for (got, want) in got[row * m.n_picked..].iter().zip(&want) {
            assert_eq!(got.expert, want.expert, "{codec:?} {m:?} row {row}");
            assert!((got.weight - want.weight).abs() <= 2e-6 * want.weight.abs());
        }
    }
}
