//! The kernels of a decode step and of a prefill chunk at the shapes of DeepSeek-V2-Lite and Llama 3 8B, each with the
//! bytes that its shape makes it move.

use super::{Case, Launch, Options, copies};
use crate::backend::KvType;
use crate::backend::cuda::Gpu;
use crate::backend::cuda::launch::attend::{Attend, Heads, Parts, Seen, attend};
use crate::backend::cuda::launch::expert::{self, Experts, Grouped, Step};
use crate::backend::cuda::launch::flash::{Flash, Keys, Part, flash};
use crate::backend::cuda::launch::gemv::{self, Acts, Product, Swiglu, product, swiglu};
use crate::backend::cuda::launch::norm::{Norm, rms};
use crate::backend::cuda::launch::quantize;
use crate::backend::cuda::launch::router::{Router, RouterFew, few, few_bytes};
use crate::backend::cuda::launch::top::{self, Top, largest};
use crate::backend::cuda::memory::{Buffer, Ptr};
use crate::backend::cuda::params::{MatrixParams, RowMap};
use crate::format::Codec;
use crate::format::layout;
use crate::kv::PAGE_TOKENS;
use crate::model::{Gating, Mask, MoeHyper};
use crate::units::Result;

/// One or two kernels at a shape.
#[derive(Debug, Clone, Copy)]
pub(super) enum Spec {
    /// `rows` rows through a matrix `(outputs, inputs)`.
    Product(&'static str, usize, usize),
    /// The same for each of some heads, in F16: latent attention's up-projections.
    HeadProduct(&'static str, usize, usize, usize),
    /// Gate and up `(width, hidden)`.
    Swiglu(&'static str, usize, usize),
    /// Routed experts: how many, how many picked, width, hidden.
    Experts(usize, usize, usize, usize),
    /// Few rows over a cache of so many tokens.
    Decode(Heads, usize),
    /// A prompt's rows over themselves: heads, key heads, and the widths of a query and a value; made from latents or not.
    Prefill(usize, usize, usize, usize, bool),
    /// Norm and quantization of rows of this width.
    Norm(usize),
    /// The router's product and choice.
    Router(usize, usize, usize),
    /// The likeliest token.
    Argmax(usize),
}

/// A model's name, the rows of the step, and what is measured.
pub(super) type Job = (&'static str, usize, Spec);

const LITE: Heads = Heads { heads: 16, kv_heads: 1, d: 576, dv: 512, latent: true };
const LLAMA: Heads = Heads { heads: 32, kv_heads: 8, d: 128, dv: 128, latent: false };
const LITE_DECODE: [Spec; 15] = [
    Spec::Norm(2048),
    Spec::Product("q, latent and rope key", 3648, 2048),
    Spec::HeadProduct("absorbed queries", 16, 512, 128),
    Spec::Decode(LITE, 512),
    Spec::Decode(LITE, 4096),
    Spec::Decode(LITE, 32768),
    Spec::HeadProduct("values", 16, 128, 512),
    Spec::Product("output", 2048, 2048),
    Spec::Router(64, 6, 2048),
    Spec::Experts(64, 6, 1408, 2048),
    Spec::Swiglu("shared experts", 2816, 2048),
    Spec::Product("shared down", 2048, 2816),
    Spec::Swiglu("dense layer", 10944, 2048),
    Spec::Product("head", 102_400, 2048),
    Spec::Argmax(102_400),
];
const LLAMA_DECODE: [Spec; 9] = [
    Spec::Norm(4096),
    Spec::Product("q, k, v", 6144, 4096),
    Spec::Decode(LLAMA, 512),
    Spec::Decode(LLAMA, 4096),
    Spec::Product("output", 4096, 4096),
    Spec::Swiglu("gate and up", 14336, 4096),
    Spec::Product("down", 4096, 14336),
    Spec::Product("head", 128_256, 4096),
    Spec::Argmax(128_256),
];
const LITE_PREFILL: [Spec; 6] = [
    Spec::Norm(2048),
    Spec::Product("q, latent and rope key", 3648, 2048),
    Spec::Prefill(16, 1, 192, 128, true),
    Spec::Product("output", 2048, 2048),
    Spec::Experts(64, 6, 1408, 2048),
    Spec::Swiglu("shared experts", 2816, 2048),
];
const LLAMA_PREFILL: [Spec; 4] = [
    Spec::Product("q, k, v", 6144, 4096),
    Spec::Prefill(32, 8, 128, 128, false),
    Spec::Swiglu("gate and up", 14336, 4096),
    Spec::Product("down", 4096, 14336),
];

/// Everything that is measured.
pub(super) fn all(o: &Options) -> Vec<Job> {
    let jobs = |model, rows, specs: &[Spec]| specs.iter().map(|s| (model, rows, *s)).collect::<Vec<Job>>();
    [
        jobs("deepseek-v2-lite decode", 1, &LITE_DECODE),
        jobs("deepseek-v2-lite decode of 8", 8, &LITE_DECODE),
        jobs("llama3-8b decode", 1, &LLAMA_DECODE),
        jobs("deepseek-v2-lite prefill", o.prefill_rows, &LITE_PREFILL),
        jobs("llama3-8b prefill", o.prefill_rows, &LLAMA_PREFILL),
    ]
    .concat()
}

/// Takes the job's memory and makes its launches.
pub(super) fn make<'a>(gpu: &'a Gpu, o: &Options, job: &Job) -> Result<Vec<Case<'a>>> {
    let (model, n, spec) = *job;
    let one = |name: String, (launch, bytes, macs)| vec![Case { model, name, rows: n, bytes, macs, launch }];
    Ok(match spec {
        Spec::Product(what, rows, cols) => {
            let m = Matrices::new(gpu, o.codec, rows, cols, 1)?;
            one(format!("{what} ({rows}, {cols})"), product_of(gpu, m, n)?)
        }
        Spec::HeadProduct(what, heads, rows, cols) => {
            let m = Matrices::new(gpu, Codec::F16, rows, cols, heads)?;
            one(format!("{what} {heads} x ({rows}, {cols})"), product_of(gpu, m, n)?)
        }
        Spec::Swiglu(what, width, hidden) => {
            let m = Matrices::new(gpu, o.codec, width, hidden, 2)?;
            one(format!("{what} 2 x ({width}, {hidden})"), swiglu_of(gpu, m, n)?)
        }
        Spec::Decode(h, tokens) => {
            one(format!("attention {} x {} at {tokens}", h.heads, h.d), decode(gpu, h, n, tokens)?)
        }
        Spec::Prefill(heads, kv_heads, d, dv, made) => one(
            format!("attention {heads} x {d}, {n} rows"),
            prefill(gpu, n, (heads, kv_heads, d, dv), made)?,
        ),
        Spec::Norm(cols) => one(format!("norm and quantize {cols}"), norm(gpu, n, cols)?),
        Spec::Router(experts, picked, cols) => {
            one(format!("router ({experts}, {cols})"), router(gpu, n, (experts, picked, cols))?)
        }
        Spec::Argmax(vocab) => one(format!("argmax {vocab}"), argmax(gpu, n, vocab)?),
        Spec::Experts(experts, picked, width, hidden) => {
            let [up, down] = experts_of(gpu, o.codec, n, (experts, picked, width, hidden))?;
            let name = |what: &str| format!("{what}, {picked} of {experts} x ({width}, {hidden})");
            let of_down = match fitting(o.codec, width) {
                codec if codec == o.codec => name("experts' down"),
                codec => format!("{}, {}", name("experts' down"), codec.name()),
            };
            let both = [one(name("experts' gate and up"), up), one(of_down, down)];
            both.into_iter().flatten().collect()
        }
    })
}

/// A launch, its bytes, its multiply-adds.
pub(super) type Made<'a> = (Launch<'a>, u64, u64);

/// Zeroed memory.
fn zeros(gpu: &Gpu, bytes: usize) -> Result<Buffer> {
    let made = Buffer::new(gpu.context(), bytes.max(256))?;
    gpu.device.zero(made.ptr(), made.len())?;
    Ok(made)
}

/// Memory with these contents.
fn holding<T: bytemuck::NoUninit>(gpu: &Gpu, data: &[T]) -> Result<Buffer> {
    let made = Buffer::new(gpu.context(), size_of_val(data))?;
    gpu.device.copy_in(made.ptr(), data)?;
    gpu.device.synchronize()?;
    Ok(made)
}

/// Sets of `each` matrices of one shape, as many sets as leave the cache.
pub(super) struct Matrices {
    first: MatrixParams,
    /// Bytes of one.
    bytes: u64,
    each: usize,
    sets: usize,
    memory: Buffer,
}

impl Matrices {
    pub(super) fn new(gpu: &Gpu, codec: Codec, rows: usize, cols: usize, each: usize) -> Result<Matrices> {
        let planes = layout::planes(codec, rows, cols).ok_or_else(|| {
            let found = format!("{} with {cols} columns", codec.name());
            crate::units::Error::bad("--kernels", "codec", "one that fits the models' widths", found)
        })?;
        let bytes = planes.total_bytes.next_multiple_of(256) as u64;
        let sets = copies(gpu, each as u64 * bytes);
        let memory = zeros(gpu, sets * each * bytes as usize)?;
        let first = MatrixParams::new(codec, rows, cols, &planes, memory.ptr());
        Ok(Matrices { first, bytes, each, sets, memory })
    }

    /// Matrix `which` of the set that the `i`-th launch takes.
    fn at(&self, i: usize, which: usize) -> MatrixParams {
        let at = ((i % self.sets) * self.each + which) as u64 * self.bytes;
        MatrixParams { base: self.memory.ptr().at(at), ..self.first }
    }

    fn shape(&self) -> (usize, usize) {
        (self.first.rows as usize, self.first.cols as usize)
    }
}

/// Activations of a product: f32 rows and their quantized form, as a step has them.
struct Rows {
    memory: Buffer,
    f32_bytes: u64,
    cols: usize,
    quantized: bool,
}

impl Rows {
    fn new(gpu: &Gpu, n: usize, cols: usize, codec: Codec) -> Result<Rows> {
        let f32_bytes = (4 * n * cols).next_multiple_of(256);
        let memory = zeros(gpu, f32_bytes + n * quantize::row_bytes(cols.next_multiple_of(32)))?;
        let quantized = n <= gemv::ROWS_MAX && gemv::wants_q(codec, false);
        Ok(Rows { memory, f32_bytes: f32_bytes as u64, cols, quantized })
    }

    fn acts(&self) -> Acts {
        let q = if self.quantized { self.memory.ptr().at(self.f32_bytes) } else { Ptr::NULL };
        Acts { f32: self.memory.ptr(), f32_stride: self.cols, q }
    }

    /// Bytes that are read of `n` rows.
    fn bytes(&self, n: usize) -> u64 {
        (n * if self.quantized { quantize::row_bytes(self.cols) } else { 4 * self.cols }) as u64
    }
}

/// A product of `n` rows with each matrix of a set: heads of one product.
pub(super) fn product_of<'a>(gpu: &'a Gpu, m: Matrices, n: usize) -> Result<Made<'a>> {
    let ((rows, cols), heads) = (m.shape(), m.each);
    let x = Rows::new(gpu, n, heads * cols, m.first.codec())?;
    let y = zeros(gpu, 4 * n * heads * rows)?;
    let scratch = zeros(gpu, gemv::scratch_bytes(n, cols, heads))?;
    let bytes = heads as u64 * m.bytes + x.bytes(n) + y.len() as u64;
    let macs = (heads * rows * cols * n) as u64;
    let launch = move |i: usize| {
        let p = Product {
            w: m.at(i, 0),
            x: x.acts(),
            rows: n,
            y: y.ptr(),
            y_stride: heads * rows,
            add: false,
            exact: false,
            heads,
            w_step: m.bytes,
            x_step: cols,
            q_step: if heads > 1 { quantize::row_bytes(cols) } else { 0 },
            y_step: rows,
            scratch: scratch.ptr(),
            scratch_bytes: scratch.len(),
        };
        product(gpu, &p)
    };
    Ok((Box::new(launch), bytes, macs))
}

/// A SwiGLU of `n` rows with sets of gate and up.
pub(super) fn swiglu_of<'a>(gpu: &'a Gpu, m: Matrices, n: usize) -> Result<Made<'a>> {
    let (width, hidden) = m.shape();
    let x = Rows::new(gpu, n, hidden, m.first.codec())?;
    let act = zeros(gpu, 4 * n * width)?;
    let act_q = zeros(gpu, n * quantize::row_bytes(width.next_multiple_of(32)))?;
    let scratch = zeros(gpu, gemv::swiglu_scratch_bytes(n, width, hidden))?;
    let bytes =
        2 * m.bytes + x.bytes(n) + act.len() as u64 + if x.quantized { act_q.len() as u64 } else { 0 };
    let launch = move |i: usize| {
        let s = Swiglu {
            gate: m.at(i, 0),
            up: m.at(i, 1),
            x: x.acts(),
            rows: n,
            act: act.ptr(),
            act_q: if x.quantized { act_q.ptr() } else { Ptr::NULL },
            exact: false,
            scratch: scratch.ptr(),
            scratch_bytes: scratch.len(),
        };
        swiglu(gpu, &s)
    };
    Ok((Box::new(launch), bytes, (2 * width * hidden * n) as u64))
}

/// Where all of one sequence's rows, or of `n` sequences' last rows, lie: pages one after another.
struct Cache {
    seen: Seen,
    _memory: [Buffer; 4],
}

impl Cache {
    /// What a launch is given. A closure that calls this holds the memory too; one that names the field would not.
    fn seen(&self) -> Seen {
        self.seen
    }

    /// `row_bytes`: keys and values (or latent and rope key) of a position.
    fn new(gpu: &Gpu, positions: &[u32], sequences: usize, tokens: usize, row_bytes: usize) -> Result<Cache> {
        let each = tokens.div_ceil(PAGE_TOKENS);
        let pages = zeros(gpu, sequences * each * PAGE_TOKENS * row_bytes)?;
        let at = |p: usize| pages.ptr().0 + (p * PAGE_TOKENS * row_bytes) as u64;
        let addresses: Vec<u64> = (0..sequences * each).map(at).collect();
        let starts = |r: usize| if sequences == 1 { 0 } else { (r * each) as u32 };
        let starts: Vec<u32> = (0..positions.len()).map(starts).collect();
        let [position, table, addresses] =
            [holding(gpu, positions)?, holding(gpu, &starts)?, holding(gpu, &addresses)?];
        let rows = RowMap { position: position.ptr(), table: table.ptr(), pages: addresses.ptr() };
        let seen = Seen { rows, layer_offset: 0, mask: Mask::Full.into(), kv: KvType::F16 };
        Ok(Cache { seen, _memory: [pages, position, table, addresses] })
    }
}

/// `n` sequences of `tokens` tokens, a row each.
fn decode<'a>(gpu: &'a Gpu, h: Heads, n: usize, tokens: usize) -> Result<Made<'a>> {
    let width = if h.latent { h.d } else { h.kv_heads * (h.d + h.dv) };
    let positions = vec![tokens as u32 - 1; n];
    let cache = Cache::new(gpu, &positions, n.max(1), tokens, 2 * width)?;
    let (q, out) = (zeros(gpu, 4 * n * h.heads * h.d)?, zeros(gpu, 4 * n * h.heads * h.dv)?);
    let parts = zeros(gpu, Parts::bytes(&h, n))?;
    let bytes = (n * tokens * 2 * width) as u64 + q.len() as u64 + out.len() as u64;
    let macs = (n * h.heads * tokens * (h.d + h.dv)) as u64;
    let launch = move |_: usize| {
        let a = Attend {
            seen: cache.seen(),
            heads: h,
            n,
            q: q.ptr(),
            scale: 0.1,
            sinks: Ptr::NULL,
            out: out.ptr(),
            out_q: Ptr::NULL,
            parts: Some(Parts { at: parts.ptr(), rows: n }),
            entries: tokens.div_ceil(PAGE_TOKENS).next_power_of_two(),
        };
        attend(gpu, &a)
    };
    Ok((Box::new(launch), bytes, macs))
}

/// `n` rows of one sequence over themselves.
fn prefill<'a>(gpu: &'a Gpu, n: usize, shape: (usize, usize, usize, usize), made: bool) -> Result<Made<'a>> {
    let (heads, kv_heads, d, dv) = shape;
    let (rope, lora) = (64, 512);
    let width = if made { lora + rope } else { kv_heads * (d + dv) };
    let positions: Vec<u32> = (0..n as u32).collect();
    let cache = Cache::new(gpu, &positions, 1, n, 2 * width)?;
    let (q, out) = (zeros(gpu, 4 * n * heads * d)?, zeros(gpu, 4 * n * heads * dv)?);
    let slots = n.next_multiple_of(PAGE_TOKENS);
    let (k, v) = (zeros(gpu, 2 * heads * slots * d)?, zeros(gpu, 2 * heads * slots * dv)?);
    let kv_bytes = if made { 2 * n * (heads * (d - rope + dv) + rope) } else { 2 * n * width };
    let bytes = (kv_bytes + q.len() + out.len()) as u64;
    let macs = (heads * n * (n + 1) / 2 * (d + dv)) as u64;
    let launch = move |_: usize| {
        let keys = match made {
            true => {
                Keys::Made { keys: k.ptr(), values: v.ptr(), tokens: slots, part: Part::WHOLE, rope, lora }
            }
            false => Keys::Cached { kv_heads },
        };
        flash(gpu, &Flash::of(cache.seen(), n, heads, (d, dv), q.ptr(), keys, out.ptr()))
    };
    Ok((Box::new(launch), bytes, macs))
}

fn norm<'a>(gpu: &'a Gpu, n: usize, cols: usize) -> Result<Made<'a>> {
    let (x, y, w) = (zeros(gpu, 4 * n * cols)?, zeros(gpu, 4 * n * cols)?, zeros(gpu, 4 * cols)?);
    let q = zeros(gpu, n * quantize::row_bytes(cols))?;
    let bytes = (x.len() + y.len() + w.len() + q.len()) as u64;
    let launch = move |_: usize| {
        let (index, weight) = (Ptr::NULL, w.ptr());
        let (x, y, q) = (x.ptr(), y.ptr(), q.ptr());
        rms(gpu, &Norm { x, x_row: cols, index, rows: n, weight, n: cols, eps: 1e-6, y, q })
    };
    Ok((Box::new(launch), bytes, 0))
}

fn router<'a>(gpu: &'a Gpu, n: usize, (experts, picked, cols): (usize, usize, usize)) -> Result<Made<'a>> {
    let m = MoeHyper {
        n_experts: experts,
        n_picked: picked,
        expert_width: 1,
        shared_width: 0,
        gating: Gating::Softmax,
        n_groups: 1,
        n_groups_picked: 1,
        normalize: false,
        scale: 1.0,
        dense: Vec::new(),
    };
    let w = Matrices::new(gpu, Codec::F32, experts, cols, 1)?;
    let (x, picks) = (zeros(gpu, 4 * n * cols)?, zeros(gpu, 8 * n * picked)?);
    let scratch = zeros(gpu, few_bytes(experts, cols, n))?;
    let bytes = w.bytes + x.len() as u64 + picks.len() as u64;
    let launch = move |i: usize| {
        let pick = Router::of(Ptr::NULL, n, picks.ptr());
        few(gpu, &m, &RouterFew { w: w.at(i, 0), x: x.ptr(), x_row: cols, scratch: scratch.ptr(), pick })
    };
    Ok((Box::new(launch), bytes, (experts * cols * n) as u64))
}

fn argmax<'a>(gpu: &'a Gpu, n: usize, vocab: usize) -> Result<Made<'a>> {
    let (logits, found) = (zeros(gpu, 4 * n * vocab)?, zeros(gpu, 8 * n)?);
    let scratch = zeros(gpu, top::scratch_bytes(n, vocab, 1))?;
    let bytes = logits.len() as u64;
    let launch = move |_: usize| {
        let (mask, logits, found) = (Ptr::NULL, logits.ptr(), found.ptr());
        largest(gpu, &Top { logits, rows: n, vocab, mask, k: 1, found, scratch: scratch.ptr() })
    };
    Ok((Box::new(launch), bytes, 0))
}

/// Picks of `n` rows, spread evenly, other ones for each of `sets` launches; and the experts that a launch reads on average.
fn picks(n: usize, experts: usize, picked: usize, sets: usize) -> (Vec<u32>, f64) {
    let mut all = Vec::new();
    let mut distinct = 0;
    for set in 0..sets {
        let mut seen = vec![false; experts];
        for row in 0..n {
            // A row's picks differ: steps of an odd stride through a power of two, or of one through any other number.
            let mix = (set * n + row).wrapping_mul(0x9e37_79b1) >> 7;
            let stride = if experts.is_power_of_two() { mix / experts * 2 + 1 } else { 1 };
            for k in 0..picked {
                let e = (mix + k * stride) % experts;
                seen[e] = true;
                all.extend([e as u32, 0.5f32.to_bits()]);
            }
        }
        distinct += seen.iter().filter(|s| **s).count();
    }
    (all, distinct as f64 / sets as f64)
}

/// The codec that files of `codec` have for a matrix whose width is no multiple of its block: what llama-quantize puts there.
fn fitting(codec: Codec, cols: usize) -> Codec {
    match codec {
        _ if layout::planes(codec, 1, cols).is_some() => codec,
        Codec::Q4K => Codec::Q5_0,
        Codec::Q5K => Codec::Q5_1,
        Codec::Q6K => Codec::Q8_0,
        _ => Codec::IQ4NL,
    }
}

/// Gate and up, then down, of routed experts.
fn experts_of<'a>(
    gpu: &'a Gpu,
    codec: Codec,
    n: usize,
    (n_experts, n_picked, width, hidden): (usize, usize, usize, usize),
) -> Result<[Made<'a>; 2]> {
    const SETS: usize = 64;
    let gate = std::rc::Rc::new(Matrices::new(gpu, codec, width, hidden, 2 * n_experts)?);
    let down = std::rc::Rc::new(Matrices::new(gpu, fitting(codec, width), hidden, width, n_experts)?);
    let base = |i: usize| [gate.at(0, 2 * i), gate.at(0, 2 * i + 1), down.at(0, i)].map(|m| m.base.0);
    let addresses: Vec<u64> = (0..n_experts).flat_map(base).collect();
    let (list, distinct) = picks(n, n_experts, n_picked, SETS);
    let (g, d) = (gate.first, down.first);
    let e = Experts { table: Ptr::NULL, gate: g, up: g, down: d, n_experts, n_picked };
    let slots = n * n_picked;
    let x = Rows::new(gpu, n, hidden, codec)?;
    let quantized = x.quantized;
    let sizes = [
        size_of_val(&addresses[..]),
        size_of_val(&list[..]),
        Grouped::bytes(slots, n_experts),
        4 * slots * width,
        slots * quantize::row_bytes(width),
        4 * n * hidden,
        expert::scratch_bytes_best(&e, n),
    ];
    let mut arena = crate::backend::cuda::memory::Arena::new(gpu.context());
    let at = arena.reserve(&sizes)?;
    gpu.device.copy_in(at[0], &addresses)?;
    gpu.device.copy_in(at[1], &list)?;
    gpu.device.synchronize()?;
    let e = Experts { table: at[0], ..e };
    let shared = std::rc::Rc::new((gate.clone(), down.clone(), x, arena));
    let act_bytes =
        (4 * slots * width + if quantized { slots * quantize::row_bytes(width) } else { 0 }) as u64;
    let both = [false, true].map(|is_down| {
        let (weights, io) = match is_down {
            true => (down.bytes as f64, 2 * 4 * (n * hidden) as u64),
            false => (2.0 * gate.bytes as f64, shared.2.bytes(n)),
        };
        let (shared, at) = (shared.clone(), at.clone());
        let launch = move |i: usize| {
            let grouped = Grouped::at(at[2], slots, n_experts);
            let step = Step {
                rows: n,
                picks: at[1].at((i % SETS * slots * 8) as u64),
                grouped: &grouped,
                act: at[3],
                act_q: if quantized { at[4] } else { Ptr::NULL },
                exact: false,
                experts: (0, n_experts as u32),
                scratch: at[6],
                scratch_bytes: sizes[6],
            };
            if is_down {
                return expert::down(gpu, &e, &step, at[5]);
            }
            if n > gemv::ROWS_MAX {
                expert::group(gpu, &e, step.picks, slots, &grouped)?;
            }
            expert::gate_up(gpu, &e, &shared.2.acts(), &step)
        };
        let macs = (slots * width * hidden * if is_down { 1 } else { 2 }) as u64;
        (Box::new(launch) as Launch<'a>, (distinct * weights) as u64 + act_bytes + io, macs)
    });
    Ok(both)
}

#[test]
fn every_codec_has_one_that_fits_deepseeks_experts() {
    for info in &crate::format::codec::TABLE {
        let found = fitting(info.codec, 1408);
        assert!(layout::planes(found, 2048, 1408).is_some(), "{}", info.name);
        assert_eq!(found == info.codec, info.block_len <= 32, "{}", info.name);
    }
}

#[test]
fn picks_of_a_row_differ_and_are_counted_once() {
    for (experts, picked) in [(64, 6), (128, 8), (60, 4)] {
        let (list, distinct) = picks(1, experts, picked, 16);
        assert_eq!(distinct, picked as f64, "{experts}");
        assert!(list.chunks(2).all(|p| (p[0] as usize) < experts));
        let (_, of_many) = picks(512, experts, picked, 2);
        assert!(of_many > 0.9 * experts as f64, "{of_many} of {experts}");
    }
}
