//! Times of the kernels between the matrices at DeepSeek-V2-Lite's and Llama-8B's shapes: a measurement to run by hand on a
//! machine with a GPU, `tegu-tests --ignored --nocapture attention_speed`.

use super::attend::{Attend, Heads, Parts, attend};
use super::flash::{Flash, Keys, Part, flash};
use super::rope::{MlaAppend, Turns, mla_append};
use super::router::{Router, RouterFew, few, few_bytes, pick};
use super::test_pages::{Cached, gqa_page, mla_page};
use super::{norm, top};
use crate::backend::KvType;
use crate::backend::cuda::params::MatrixParams;
use crate::backend::cuda::testing::gpu;
use crate::backend::cuda::{Gpu, Ptr};
use crate::format::{Codec, layout};
use crate::model::{Gating, Mask, MoeHyper};
use std::time::Instant;

/// Microseconds a call, of 200 calls put on the stream at once.
fn time(gpu: &Gpu, name: &str, f: &dyn Fn()) {
    (0..3).for_each(|_| f());
    gpu.device.synchronize().unwrap();
    let start = Instant::now();
    (0..200).for_each(|_| f());
    gpu.device.synchronize().unwrap();
    println!("{name}: {:.1} us", start.elapsed().as_secs_f64() * 1e6 / 200.0);
}

fn decode(gpu: &Gpu, h: &Heads, n: usize, tokens: usize) {
    let kv = KvType::F16;
    let layout = if h.latent { mla_page(kv, h.dv, h.d - h.dv) } else { gqa_page(kv, h.kv_heads, h.d) };
    let cached = Cached::new(gpu, layout, Mask::Full, &vec![tokens - 1; n], false);
    cached.zero(gpu);
    let (q, out) = (gpu.room(n * h.heads * h.d * 4), gpu.room(n * h.heads * h.dv * 4));
    let parts = gpu.room(Parts::bytes(h, n));
    let a = Attend {
        seen: cached.seen,
        heads: *h,
        n,
        q: q.ptr(),
        scale: 0.1,
        sinks: Ptr::NULL,
        out: out.ptr(),
        out_q: Ptr::NULL,
        parts: Some(Parts { at: parts.ptr(), rows: n }),
        entries: tokens.div_ceil(32),
    };
    let name = format!("decode {} heads of {}, {n} rows at {tokens}", h.heads, h.d);
    time(gpu, &name, &|| attend(gpu, &a).unwrap());
}

fn prefill(gpu: &Gpu, heads: usize, kv_heads: usize, n: usize, made: bool) {
    let (d, dv) = if made { (192, 128) } else { (128, 128) };
    let positions: Vec<usize> = (0..n).collect();
    let kv = KvType::F16;
    let layout = if made { mla_page(kv, 512, 64) } else { gqa_page(kv, kv_heads, d) };
    let cached = Cached::new(gpu, layout, Mask::Full, &positions, true);
    cached.zero(gpu);
    let (q, out) = (gpu.room(n * heads * d * 4), gpu.room(n * heads * dv * 4));
    let (k, v) = (gpu.room(heads * n * 128 * 2), gpu.room(heads * n * 128 * 2));
    let keys = match made {
        true => {
            Keys::Made { keys: k.ptr(), values: v.ptr(), tokens: n, part: Part::WHOLE, rope: 64, lora: 512 }
        }
        false => Keys::Cached { kv_heads },
    };
    let f = Flash {
        seen: cached.seen,
        n,
        heads,
        some_heads: (0, heads),
        d,
        dv,
        q: q.ptr(),
        q_stride: heads * d,
        scale: 0.1,
        sinks: Ptr::NULL,
        keys,
        out: out.ptr(),
    };
    let tflop = (heads * n * n * (d + dv)) as f64 / 1e12;
    let name = format!("prefill {heads} heads of {d}, {n} rows, {tflop:.3} TFLOP");
    time(gpu, &name, &|| flash(gpu, &f).unwrap());
}

#[test]
#[ignore = "a measurement, not a check"]
fn attention_speed() {
    let Some(gpu) = gpu() else { return };
    let lite = Heads { heads: 16, kv_heads: 1, d: 576, dv: 512, latent: true };
    let llama = Heads { heads: 32, kv_heads: 8, d: 128, dv: 128, latent: false };
    for h in [&lite, &llama] {
        for (n, tokens) in [(1, 1), (1, 64), (1, 128), (1, 512), (1, 4096), (1, 32768), (4, 1024), (8, 1024)]
        {
            decode(&gpu, h, n, tokens);
        }
    }
    for n in [128, 512, 2048, 8192] {
        prefill(&gpu, 16, 1, n, true);
        prefill(&gpu, 32, 8, n, false);
    }
    small(&gpu);
}

fn small(gpu: &Gpu) {
    let room = gpu.room(96 << 20);
    let (at, to) = (room.ptr(), room.ptr().at(32 << 20));
    for rows in [1, 8, 2048] {
        let (x, index, weight, y, q) = (at, Ptr::NULL, at, to, to.at(24 << 20));
        let job = norm::Norm { x, x_row: 2048, index, rows, weight, n: 2048, eps: 1e-6, y, q };
        let name = format!("norm and quantize {rows} x 2048");
        time(gpu, &name, &|| norm::rms(gpu, &job).unwrap());
    }
    let cached = Cached::new(gpu, mla_page(KvType::F16, 512, 64), Mask::Full, &[100], false);
    let append = MlaAppend {
        seen: cached.seen,
        n: 1,
        q: (at, 16 * 192),
        kv: (at.at(1 << 20), 576),
        bias: [Ptr::NULL; 2],
        norm: at,
        eps: 1e-6,
        turns: Turns { at, half: 32, interleaved: true },
        heads: 16,
        lora: 512,
        nope: 128,
        rope: 64,
        q_latent: to,
    };
    time(gpu, "mla append", &|| mla_append(gpu, &append).unwrap());
    let m = MoeHyper {
        n_experts: 64,
        n_picked: 6,
        expert_width: 1,
        shared_width: 0,
        gating: Gating::Softmax,
        n_groups: 1,
        n_groups_picked: 1,
        normalize: false,
        scale: 1.0,
        dense: vec![],
    };
    let none = Ptr::NULL;
    let [logits, bias, given, record] = [none; 4];
    let plain = Router { logits, rows: 0, bias, given, record, outside: false, route: (0, 0), picks: to };
    for rows in [1, 2048] {
        let job = Router { logits: at, rows, ..plain };
        time(gpu, &format!("router {rows} x 64"), &|| pick(gpu, &m, &job).unwrap());
    }
    let planes = layout::planes(Codec::F32, 64, 2048).unwrap();
    let w = MatrixParams::new(Codec::F32, 64, 2048, &planes, at);
    for rows in [1, 8] {
        let pick = Router { rows, ..plain };
        let scratch = gpu.room(few_bytes(64, 2048, rows));
        let job = RouterFew { w, x: at.at(1 << 20), x_row: 2048, scratch: scratch.ptr(), pick };
        time(gpu, &format!("router with its product {rows} x 64"), &|| few(gpu, &m, &job).unwrap());
    }
    let job = top::Top {
        logits: at,
        rows: 1,
        vocab: 102_400,
        mask: Ptr::NULL,
        k: 1,
        found: to,
        scratch: to.at(4096),
    };
    time(gpu, "argmax 102400", &|| top::largest(gpu, &job).unwrap());
    routing(gpu);
}

/// The router's product by itself: 64 rows of 2048 f32.
fn routing(gpu: &Gpu) {
    use super::gemv::{Acts, Product, product};
    for (codec, rows, cols, exact) in [
        (Codec::F32, 64, 2048, true),
        (Codec::BF16, 64, 2048, true),
        (Codec::Q4_0, 576, 2048, false),
        (Codec::Q4_0, 2048, 2048, false),
    ] {
        let planes = layout::planes(codec, rows, cols).unwrap();
        let room = gpu.room(planes.total_bytes + (16 << 20));
        let w = MatrixParams::new(codec, rows, cols, &planes, room.ptr());
        let at = room.ptr().at((planes.total_bytes as u64).next_multiple_of(256));
        let p = Product {
            w,
            x: Acts { f32: at, f32_stride: cols, q: if exact { Ptr::NULL } else { at.at(1 << 20) } },
            rows: 1,
            y: at.at(2 << 20),
            y_stride: rows,
            add: false,
            exact,
            heads: 1,
            w_step: 0,
            x_step: 0,
            q_step: 0,
            y_step: 0,
            scratch: at.at(4 << 20),
            scratch_bytes: 4 << 20,
        };
        time(gpu, &format!("product {} {rows} x {cols} exact {exact}", codec.name()), &|| {
            product(gpu, &p).unwrap()
        });
    }
}
