//! The buffers that a step works in. Those of the attention half, of the feed-forward half and of the head are never used
//! at once, and share their memory.

use super::launch::attend::{Heads, Parts};
use super::launch::{expert, flash, gemv, quantize, router};
use super::memory::{Arena, PIECE_ALIGN, Ptr};
use super::model::{DevFfn, DevModel};
use crate::format::layout::GROUP;
use crate::kv::PAGE_TOKENS;
use crate::model::{AttnHyper, Hyper, MoeHyper};
use crate::units::Result;

/// Rows of absorbed latent attention that go through it together: bounds its wide buffers.
pub const ABSORBED_ROWS: usize = 128;
/// Rows whose logits are made together.
pub const LOGIT_ROWS: usize = 32;
/// Rows whose attention is split over segments; more rows keep the GPU busy by themselves.
pub const SPLIT_ROWS: usize = 8;
/// Bytes of the keys and values that a prefill makes from latents: a part of the block table at a time, of all heads if at
/// least [`MADE_ENTRIES_MIN`] entries fit so, else of as many heads as fit.
pub const MADE_BYTES: usize = 24 << 20;
/// Entries of a part that are worth a launch.
const MADE_ENTRIES_MIN: usize = 16;

/// Addresses of all buffers, f32 `(rows, …)` unless said otherwise.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scratch {
    /// The residual stream, `(hidden)`.
    pub x: Ptr,
    /// Its normalized copy.
    pub normed: Ptr,
    /// The same quantized.
    pub normed_q: Ptr,
    /// Cosines and sines, `(dims/2, 2)`.
    pub turns: Ptr,
    /// Picks that are given, `(n_layers, n_picked)` u32.
    pub given: Ptr,
    /// Picks that were made.
    pub made: Ptr,
    /// Parts of split attention.
    pub parts: Ptr,
    /// The router of few rows. Its counter stays zero between launches, so that nothing else may lie over it.
    pub router_few: Ptr,
    /// Attention.
    pub attn: AttnScratch,
    /// Feed-forward.
    pub ffn: FfnScratch,
    /// `(LOGIT_ROWS, vocab)`
    pub logits: Ptr,
    /// Working memory of products.
    pub work: Ptr,
    /// Its size.
    pub work_bytes: usize,
}

/// The attention half's.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttnScratch {
    /// Queries.
    pub q: Ptr,
    /// Keys; latent and rope key.
    pub k: Ptr,
    /// Values.
    pub v: Ptr,
    /// The query's bottleneck, before and after its norm.
    pub q_low: [Ptr; 2],
    /// `(ABSORBED_ROWS, heads, lora + rope)`
    pub q_latent: Ptr,
    /// `(ABSORBED_ROWS, heads, lora)`
    pub o_latent: Ptr,
    /// Result `(heads * value)`.
    pub out: Ptr,
    /// Quantized activations of whatever enters a product next.
    pub act_q: Ptr,
    /// Keys and values made from latents, and the latents they are made from; over the absorbed rows' buffers.
    pub made: Ptr,
    /// What rows take from part to part of the keys that are made.
    pub carry: Ptr,
}

/// The feed-forward half's.
#[derive(Debug, Clone, Copy, Default)]
pub struct FfnScratch {
    /// Router logits `(n_experts)`.
    pub router: Ptr,
    /// `(n_picked)` picks.
    pub picks: Ptr,
    /// Picks grouped.
    pub grouped: Ptr,
    /// Activations of a SwiGLU: `(width)`, or `(n_picked, expert_width)`.
    pub act: Ptr,
    /// The same quantized, for up to eight rows.
    pub act_q: Ptr,
    /// Of the shared experts.
    pub shared: Ptr,
    /// The same quantized.
    pub shared_q: Ptr,
}

/// Lays pieces one after another.
#[derive(Default)]
struct Bump {
    at: usize,
}

impl Bump {
    fn bytes(&mut self, len: usize) -> usize {
        let at = self.at;
        self.at += len.next_multiple_of(PIECE_ALIGN);
        at
    }

    fn f32s(&mut self, len: usize) -> usize {
        self.bytes(4 * len)
    }
}

/// Quantized bytes of a row, if its width is in whole groups.
fn q_bytes(cols: usize) -> usize {
    if cols.is_multiple_of(GROUP) { quantize::row_bytes(cols) } else { 0 }
}

impl Scratch {
    /// Buffers for steps of `rows` rows; bytes if `base` is null.
    fn lay(h: &Hyper, m: &DevModel, rows: usize, base: Ptr) -> (Scratch, usize) {
        let mut b = Bump::default();
        let at = |offset: usize| base.at(offset as u64);
        let mut s = Scratch {
            x: at(b.f32s(rows * h.hidden)),
            normed: at(b.f32s(rows * h.hidden)),
            normed_q: at(b.bytes(rows.min(gemv::ROWS_MAX) * q_bytes(h.hidden))),
            turns: at(b.f32s(rows * h.rope.dims)),
            ..Scratch::default()
        };
        if let Some(moe) = &h.moe {
            let picks = rows * h.n_layers * moe.n_picked;
            (s.given, s.made) = (at(b.f32s(picks)), at(b.f32s(picks)));
        }
        if let Some(moe) = &h.moe {
            let few = rows.min(router::FEW_ROWS_MAX);
            s.router_few = at(b.bytes(router::few_bytes(moe.n_experts, h.hidden, few)));
        }
        s.parts = at(b.bytes(Parts::bytes(&heads(h), rows.min(SPLIT_ROWS))));
        s.work_bytes = work_bytes(h, m, rows);
        s.work = at(b.bytes(s.work_bytes));
        let shared = b.at;
        let mut ends = [0; 3];
        s.attn.lay(h, rows, &mut b, base);
        ends[0] = b.at;
        b.at = shared;
        s.ffn.lay(h, rows, &mut b, base);
        ends[1] = b.at;
        b.at = shared;
        s.logits = at(b.f32s(LOGIT_ROWS.min(rows) * h.vocab));
        ends[2] = b.at;
        (s, ends.into_iter().max().expect("three"))
    }

    /// Takes the buffers.
    pub fn new(arena: &mut Arena, h: &Hyper, m: &DevModel, rows: usize) -> Result<Scratch> {
        let (_, bytes) = Scratch::lay(h, m, rows, Ptr::NULL);
        let base = arena.take(bytes)?;
        Ok(Scratch::lay(h, m, rows, base).0)
    }

    /// Bytes that [`Scratch::new`] will take.
    pub fn bytes(h: &Hyper, m: &DevModel, rows: usize) -> usize {
        Scratch::lay(h, m, rows, Ptr::NULL).1
    }
}

impl AttnScratch {
    fn lay(&mut self, h: &Hyper, rows: usize, b: &mut Bump, base: Ptr) {
        let at = |offset: usize| base.at(offset as u64);
        let heads = h.n_heads();
        let few = rows.min(gemv::ROWS_MAX);
        match h.attn {
            AttnHyper::Gqa { n_kv_heads, head_dim, .. } => {
                self.q = at(b.f32s(rows * heads * head_dim));
                self.k = at(b.f32s(rows * n_kv_heads * head_dim));
                self.v = at(b.f32s(rows * n_kv_heads * head_dim));
                self.out = at(b.f32s(rows * heads * head_dim));
                self.act_q = at(b.bytes(few * q_bytes(heads * head_dim)));
            }
            AttnHyper::Mla { q_lora_rank, kv_lora_rank: lora, nope_dim, rope_dim, v_dim, .. } => {
                let rank = q_lora_rank.unwrap_or(0);
                let block = rows.min(ABSORBED_ROWS);
                self.q = at(b.f32s(rows * heads * (nope_dim + rope_dim)));
                self.k = at(b.f32s(rows * (lora + rope_dim)));
                self.q_low = [at(b.f32s(rows * rank)), at(b.f32s(rows * rank))];
                self.out = at(b.f32s(rows * heads * v_dim));
                let widest = [rank, heads * v_dim, heads * lora, heads * nope_dim];
                let widest = widest.into_iter().map(q_bytes).max().expect("some");
                self.act_q = at(b.bytes(few * widest));
                self.carry = at(b.bytes(flash::carry_bytes(rows, heads)));
                let over = b.at;
                self.q_latent = at(b.f32s(block * heads * (lora + rope_dim)));
                self.o_latent = at(b.f32s(block * heads * lora));
                self.made = at(over);
                b.at = b.at.max(over + MADE_BYTES);
            }
        }
    }
}

impl FfnScratch {
    fn lay(&mut self, h: &Hyper, rows: usize, b: &mut Bump, base: Ptr) {
        let at = |offset: usize| base.at(offset as u64);
        let few = rows.min(gemv::ROWS_MAX);
        let (mut act, mut act_q) = (rows * h.ffn_width, few * q_bytes(h.ffn_width));
        if let Some(m) = &h.moe {
            let picks = rows * m.n_picked;
            self.router = at(b.f32s(rows * m.n_experts));
            self.picks = at(b.bytes(expert::picks_bytes(picks)));
            self.grouped = at(b.bytes(expert::Grouped::bytes(picks, m.n_experts)));
            self.shared = at(b.f32s(rows * m.shared_width));
            self.shared_q = at(b.bytes(few * q_bytes(m.shared_width)));
            act = act.max(picks * m.expert_width);
            act_q = act_q.max(few * m.n_picked * q_bytes(m.expert_width));
        }
        self.act = at(b.f32s(act));
        self.act_q = at(b.bytes(act_q));
    }
}

/// The heads of attention that goes row by row.
pub fn heads(h: &Hyper) -> Heads {
    match h.attn {
        AttnHyper::Gqa { n_heads, n_kv_heads, head_dim, .. } => {
            Heads { heads: n_heads, kv_heads: n_kv_heads, d: head_dim, dv: head_dim, latent: false }
        }
        AttnHyper::Mla { n_heads, kv_lora_rank, rope_dim, .. } => {
            Heads { heads: n_heads, kv_heads: 1, d: kv_lora_rank + rope_dim, dv: kv_lora_rank, latent: true }
        }
    }
}

/// What a prefill that makes its keys needs in [`AttnScratch::made`] for `entries` pages: bytes of the latents, and of one
/// head.
pub fn made_bytes(entries: usize, lora: usize, nope: usize, v: usize) -> (usize, usize) {
    let tokens = entries * PAGE_TOKENS;
    // A head's keys and values, f32 as products write them and f16 as attention reads them; its own f32 only once.
    (tokens * lora * 4, tokens * (nope + v) * 6)
}

/// Entries of a part of the block table whose keys are made together; even, so that where parts end does not show.
pub fn made_entries(heads: usize, lora: usize, nope: usize, v: usize) -> usize {
    let (latents, head) = made_bytes(1, lora, nope, v);
    let whole = MADE_BYTES / (latents + heads * head);
    whole.max(MADE_ENTRIES_MIN).min(MADE_BYTES / (latents + head)) / 2 * 2
}

/// Working memory of the widest product of a step.
fn work_bytes(h: &Hyper, m: &DevModel, rows: usize) -> usize {
    let heads = h.n_heads();
    let mut most = gemv::scratch_bytes(rows, h.hidden, 1);
    most = most.max(gemv::swiglu_scratch_bytes(rows, h.ffn_width, h.hidden));
    most = most.max(gemv::scratch_bytes(rows, h.ffn_width, 1));
    let mut heads_of = |rows: usize, cols: usize, heads: usize| {
        most = most.max(gemv::scratch_bytes(rows, cols, heads));
    };
    match h.attn {
        AttnHyper::Gqa { head_dim, .. } => heads_of(rows, heads * head_dim, 1),
        AttnHyper::Mla { q_lora_rank, kv_lora_rank, nope_dim, v_dim, .. } => {
            heads_of(rows, q_lora_rank.unwrap_or(0), 1);
            heads_of(rows, heads * v_dim, 1);
            heads_of(rows.min(ABSORBED_ROWS), nope_dim, heads);
            heads_of(rows.min(ABSORBED_ROWS), kv_lora_rank, heads);
            // Latents of a part of a made prefill, shared by the heads.
            let entries = made_entries(heads, kv_lora_rank, nope_dim, v_dim);
            heads_of(entries * PAGE_TOKENS, kv_lora_rank, 1);
        }
    }
    let moe = |moe: &MoeHyper| {
        let of_layer = |l: &super::model::DevLayer| match &l.ffn {
            DevFfn::Moe(d) => {
                let e = super::step::experts_of(d, moe);
                expert::scratch_bytes(&e, rows).max(expert::scratch_bytes_best(&e, rows).min(BEST_BYTES))
            }
            DevFfn::Dense(_) => 0,
        };
        let routed = m.layers.iter().map(of_layer).max().unwrap_or(0);
        let shared = gemv::swiglu_scratch_bytes(rows, moe.shared_width, h.hidden);
        routed.max(shared).max(gemv::scratch_bytes(rows, moe.shared_width, 1))
    };
    most.max(h.moe.as_ref().map_or(0, moe))
}

/// Routed experts' down runs in one piece where that takes no more than this.
const BEST_BYTES: usize = 24 << 20;
