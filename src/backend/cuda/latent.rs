//! Latent attention's launches: absorbed rows in latent space, and runs whose keys and values are made from latents.

use super::launch::attend::Seen;
use super::launch::flash::{self, Flash, Keys, Part};
use super::launch::gemv::Acts;
use super::launch::{mla, rope};
use super::memory::Ptr;
use super::model::{DevLayer, DevMla, Heads};
use super::rows::Together;
use super::scratch::{ABSORBED_ROWS, MADE_BYTES, made_bytes, made_entries};
use super::step::Cx;
use crate::kv::PAGE_TOKENS;
use crate::model::{AttnHyper, Hyper};
use crate::units::Result;

/// Latent attention's widths.
#[derive(Debug, Clone, Copy)]
struct Widths {
    heads: usize,
    lora: usize,
    nope: usize,
    rope: usize,
    v: usize,
}

impl Widths {
    fn of(h: &Hyper) -> Widths {
        let AttnHyper::Mla { n_heads, kv_lora_rank, nope_dim, rope_dim, v_dim, .. } = h.attn else {
            unreachable!("a layer of latent attention")
        };
        Widths { heads: n_heads, lora: kv_lora_rank, nope: nope_dim, rope: rope_dim, v: v_dim }
    }

    /// A head's query.
    fn q(&self) -> usize {
        self.nope + self.rope
    }

    /// A cached row.
    fn row(&self) -> usize {
        self.lora + self.rope
    }

    /// Entries of the block table whose keys are made together.
    fn part(&self) -> usize {
        made_entries(self.heads, self.lora, self.nope, self.v)
    }
}

/// True if keys can be made: the kernel has room for the widths, and the buffer for two pages of a head.
pub fn can_make(h: &Hyper, kv: crate::backend::KvType) -> bool {
    let w = Widths::of(h);
    let parts = [w.rope, w.lora, w.heads * w.q()];
    flash::unit(kv, w.q(), w.v, &parts, false).is_some() && w.part() > 0
}

/// Narrower latents are attended absorbed, unless asked otherwise: in f32, with nothing rounded but the f16 cache. Made keys
/// and values, queries and weights go to the tensor cores in f16, which doubles what the cache alone errs by, and gains
/// little where a latent is hardly wider than a key.
const MADE_LORA_MIN: usize = 256;

/// True for models whose prompts stay absorbed, whatever their length.
pub fn keeps_absorbed(h: &Hyper) -> bool {
    matches!(h.attn, AttnHyper::Mla { kv_lora_rank, .. } if kv_lora_rank < MADE_LORA_MIN)
}

impl Cx<'_> {
    pub(super) fn mla(&self, l: usize, layer: &DevLayer, m: &DevMla) -> Result<()> {
        let w = Widths::of(self.h);
        let (n, a) = (self.rows.rows, &self.s.attn);
        let first = m.q_a.map_or(m.q_b.w, |(a, _)| a.w);
        let x = self.norm(layer.attn_norm, &[&first, &m.kv_a.w])?;
        let keys = || self.product(&m.kv_a.w, x, n, a.k, w.row(), false);
        self.beside(n, keys, || self.queries(m, x))?;
        let alone = self.rows.alone;
        for first in (0..alone).step_by(ABSORBED_ROWS) {
            self.absorbed(l, layer, m, first, ABSORBED_ROWS.min(alone - first))?;
        }
        for run in &self.rows.together {
            self.append(l, layer, m, (run.first, run.rows), Ptr::NULL)?;
            self.made(l, layer, m, run)?;
        }
        self.project(&m.o, w.heads * w.v, false)
    }

    /// All heads' queries, through the bottleneck if there is one.
    fn queries(&self, m: &DevMla, x: Acts) -> Result<()> {
        let w = Widths::of(self.h);
        let (n, a) = (self.rows.rows, &self.s.attn);
        let Some((low, weight)) = &m.q_a else {
            return self.product(&m.q_b.w, x, n, a.q, w.heads * w.q(), false);
        };
        let rank = low.w.rows as usize;
        self.product(&low.w, x, n, a.q_low[0], rank, false)?;
        self.bias(low, n, a.q_low[0], rank)?;
        let q = self.q_for(n, &[&m.q_b.w], a.act_q);
        self.norm_rows(a.q_low[0], Ptr::NULL, n, *weight, rank, a.q_low[1], q)?;
        let low = Acts { f32: a.q_low[1], f32_stride: rank, q };
        self.product(&m.q_b.w, low, n, a.q, w.heads * w.q(), false)
    }

    /// Rope, norm and the append to pages of some rows; absorbed rows' rope parts go to `q_latent`.
    fn append(
        &self,
        l: usize,
        layer: &DevLayer,
        m: &DevMla,
        (first, n): (usize, usize),
        q_latent: Ptr,
    ) -> Result<()> {
        let w = Widths::of(self.h);
        let a = &self.s.attn;
        let append = rope::MlaAppend {
            seen: self.seen(l, layer, first),
            n,
            q: (a.q.f32s(first * w.heads * w.q()), w.heads * w.q()),
            kv: (a.k.f32s(first * w.row()), w.row()),
            bias: [m.q_b.bias, m.kv_a.bias],
            norm: m.kv_norm,
            eps: self.h.norm_eps,
            turns: self.turns(first),
            heads: w.heads,
            lora: w.lora,
            nope: w.nope,
            rope: w.rope,
            q_latent,
        };
        rope::mla_append(self.gpu, &append)
    }

    /// Appends rows and attends in latent space: queries through W_UK, values through W_UV after.
    fn absorbed(&self, l: usize, layer: &DevLayer, m: &DevMla, first: usize, n: usize) -> Result<()> {
        let w = Widths::of(self.h);
        let a = &self.s.attn;
        self.append(l, layer, m, (first, n), a.q_latent)?;
        let q = a.q.f32s(first * w.heads * w.q());
        let (from, to) = ((w.heads * w.q(), w.q()), (w.heads * w.row(), w.row()));
        self.of_heads(&m.k_absorb, w.heads, q, from, n, a.q_latent, to)?;
        let values = (a.o_latent, self.q_for(n, &[&m.v_up.first], a.act_q));
        self.attend(l, layer, (first, n), a.q_latent, values, Ptr::NULL)?;
        let out = a.out.f32s(first * w.heads * w.v);
        let (from, to) = ((w.heads * w.lora, w.lora), (w.heads * w.v, w.v));
        self.of_heads_quantized(&m.v_up, w.heads, values, from, n, out, to)
    }

    /// A run over keys and values made from the latents of all its positions, a part of them at a time.
    fn made(&self, l: usize, layer: &DevLayer, m: &DevMla, run: &Together) -> Result<()> {
        let each = Widths::of(self.h).part();
        for first in (0..run.entries).step_by(each) {
            let end = run.entries.min(first + each);
            let part = Part { first, end, last: end == run.entries, carry: self.s.attn.carry };
            self.made_part(l, layer, m, run, part)?;
        }
        Ok(())
    }

    /// One part, as many heads at a time as fit.
    fn made_part(&self, l: usize, layer: &DevLayer, m: &DevMla, run: &Together, part: Part) -> Result<()> {
        let w = Widths::of(self.h);
        let entries = part.end - part.first;
        let tokens = entries * PAGE_TOKENS;
        let (latents_bytes, head_bytes) = made_bytes(entries, w.lora, w.nope, w.v);
        let at_once = ((MADE_BYTES - latents_bytes) / head_bytes).min(w.heads);
        assert!(at_once > 0, "asked before");
        let seen = self.seen(l, layer, run.first);
        let latents = self.s.attn.made;
        mla::latents(self.gpu, &seen, part.first..part.end, w.lora, w.rope, latents)?;
        let room = latents.at(latents_bytes as u64);
        for head in (0..w.heads).step_by(at_once) {
            let heads = at_once.min(w.heads - head);
            let keys = room.at((at_once * tokens * w.nope.max(w.v) * 4) as u64);
            let values = keys.at((heads * tokens * w.nope * 2) as u64);
            self.up(&m.k_up, head, heads, latents, tokens, room, keys)?;
            self.up(&m.v_up, head, heads, latents, tokens, room, values)?;
            let made = Keys::Made { keys, values, tokens, part, rope: w.rope, lora: w.lora };
            self.flash(&seen, run, (head, heads), made)?;
        }
        Ok(())
    }

    /// `to (heads, tokens, rows of w) f16 = w latents`, by way of f32 in `room`.
    fn up(
        &self,
        w: &Heads,
        head: usize,
        heads: usize,
        latents: Ptr,
        tokens: usize,
        room: Ptr,
        to: Ptr,
    ) -> Result<()> {
        let (rows, lora) = (w.first.rows as usize, w.first.cols as usize);
        let mut of = *w;
        of.first.base = w.first.base.at(head as u64 * w.step);
        self.of_heads(&of, heads, latents, (lora, 0), tokens, room, (rows, tokens * rows))?;
        mla::halves(self.gpu, heads * tokens * rows, room, to)
    }

    fn flash(&self, seen: &Seen, run: &Together, some_heads: (usize, usize), keys: Keys) -> Result<()> {
        let w = Widths::of(self.h);
        let q_stride = w.heads * w.q();
        let f = Flash {
            seen: *seen,
            n: run.rows,
            heads: w.heads,
            some_heads,
            d: w.q(),
            dv: w.v,
            q: self.s.attn.q.f32s(run.first * q_stride),
            q_stride,
            scale: self.h.softmax_scale,
            sinks: Ptr::NULL,
            keys,
            out: self.s.attn.out.f32s(run.first * w.heads * w.v),
        };
        flash::flash(self.gpu, &f)
    }
}
