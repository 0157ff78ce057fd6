//! The model as the device has it: descriptions of matrices, addresses of vectors. Built by one walk over the bound
//! model that runs twice: first to say what lies side by side, then with addresses.

use super::memory::Ptr;
use super::params::{MaskParams, MatrixParams};
use super::weights::Stored;
use crate::model::{Attention, Ffn, Gqa, Layer, Linear, Mla, Mlp, Model, Moe};
use crate::units::{Error, Result};
use crate::weights::{Expert, Matrix};
use std::sync::Arc;

/// A matrix and its bias, or a null address.
#[derive(Debug, Clone, Copy)]
pub struct DevLinear {
    /// `(rows, cols)`
    pub w: MatrixParams,
    /// `(rows)` f32 or null.
    pub bias: Ptr,
}

/// One matrix a head, `step` bytes apart.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// The first head's.
    pub first: MatrixParams,
    /// Bytes to the next.
    pub step: u64,
}

/// Latent attention.
#[derive(Debug, Clone, Copy)]
pub struct DevMla {
    /// The query's bottleneck and its norm.
    pub q_a: Option<(DevLinear, Ptr)>,
    /// Queries.
    pub q_b: DevLinear,
    /// Latent and rope key.
    pub kv_a: DevLinear,
    /// The latent's norm.
    pub kv_norm: Ptr,
    /// `(lora, nope)` a head.
    pub k_absorb: Heads,
    /// `(nope, lora)` a head.
    pub k_up: Heads,
    /// `(v, lora)` a head.
    pub v_up: Heads,
    /// Output.
    pub o: DevLinear,
}

/// Grouped-query attention.
#[derive(Debug, Clone, Copy)]
pub struct DevGqa {
    /// Queries, keys, values.
    pub qkv: [DevLinear; 3],
    /// Output.
    pub o: DevLinear,
    /// Norm weights of queries and keys, or null.
    pub norms: [Ptr; 2],
    /// Sinks, or null.
    pub sinks: Ptr,
}

/// Attention.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant)] // a handful live, and all are walked: a box would only add a look-up
pub enum DevAttention {
    /// Latent.
    Mla(DevMla),
    /// Grouped-query.
    Gqa(DevGqa),
}

/// SwiGLU.
#[derive(Debug, Clone, Copy)]
pub struct DevMlp {
    /// `(width, hidden)`
    pub gate: MatrixParams,
    /// `(width, hidden)`
    pub up: MatrixParams,
    /// `(hidden, width)`
    pub down: MatrixParams,
}

/// Routed experts.
#[derive(Debug, Clone, Copy)]
pub struct DevMoe {
    /// `(n_experts, hidden)`
    pub router: MatrixParams,
    /// Correction bias or null.
    pub bias: Ptr,
    /// Base addresses `(n_experts, 3)` u64: gate, up, down.
    pub table: Ptr,
    /// Shapes and planes of an expert's matrices; their addresses are in the table.
    pub shape: DevMlp,
    /// The shared part.
    pub shared: Option<DevMlp>,
}

/// Feed-forward half.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant)] // a handful live, and all are walked: a box would only add a look-up
pub enum DevFfn {
    /// One SwiGLU.
    Dense(DevMlp),
    /// Routed.
    Moe(DevMoe),
}

/// One layer.
#[derive(Debug, Clone, Copy)]
pub struct DevLayer {
    /// Norm before attention.
    pub attn_norm: Ptr,
    /// Attention.
    pub attn: DevAttention,
    /// What rows see.
    pub mask: MaskParams,
    /// Norm before the feed-forward half.
    pub ffn_norm: Ptr,
    /// Feed-forward.
    pub ffn: DevFfn,
}

/// The model.
#[derive(Debug)]
pub struct DevModel {
    /// `(vocab, hidden)`
    pub embed: MatrixParams,
    /// In order.
    pub layers: Vec<DevLayer>,
    /// The last norm.
    pub final_norm: Ptr,
    /// `(vocab, hidden)`
    pub head: MatrixParams,
    /// Rotary frequencies `(dims/2)` f32.
    pub inv_freq: Ptr,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f32,
}

/// Goes over the matrices in the order of the loader's jobs, and over the vectors in the walk's.
pub struct Walk<'a> {
    stored: &'a [Stored],
    /// Addresses of matrices; empty in the first walk.
    places: &'a [Ptr],
    next: usize,
    /// Matrices that lie side by side, in their order.
    pub groups: Vec<Vec<usize>>,
    /// Contents of all vectors, each padded to 256 bytes.
    pub vectors: Vec<u32>,
    vectors_at: Ptr,
}

impl<'a> Walk<'a> {
    /// A first walk: groups and vectors are collected.
    pub fn plan(stored: &'a [Stored]) -> Walk<'a> {
        Walk { stored, places: &[], next: 0, groups: Vec::new(), vectors: Vec::new(), vectors_at: Ptr::NULL }
    }

    /// A second walk, with addresses.
    pub fn with(stored: &'a [Stored], places: &'a [Ptr], vectors_at: Ptr) -> Walk<'a> {
        Walk { stored, places, next: 0, groups: Vec::new(), vectors: Vec::new(), vectors_at }
    }

    fn take(&mut self, m: &Matrix) -> MatrixParams {
        let i = self.next;
        self.next += 1;
        let s = &self.stored[i];
        assert_eq!((s.rows, s.cols), (m.rows, m.cols), "the walk follows the loader's order");
        s.at(self.places.get(i).copied().unwrap_or(Ptr::NULL))
    }

    fn alone(&mut self, m: &Matrix) -> MatrixParams {
        self.groups.push(vec![self.next]);
        self.take(m)
    }

    fn words(&mut self, words: impl Iterator<Item = u32>) -> Ptr {
        let at = self.vectors_at.at(4 * self.vectors.len() as u64);
        self.vectors.extend(words);
        self.vectors.resize(self.vectors.len().next_multiple_of(64), 0);
        at
    }

    fn vector(&mut self, v: &[f32]) -> Ptr {
        if v.is_empty() { Ptr::NULL } else { self.words(v.iter().map(|x| x.to_bits())) }
    }

    fn optional(&mut self, v: &Option<Vec<f32>>) -> Ptr {
        v.as_ref().map_or(Ptr::NULL, |v| self.vector(v))
    }

    fn linear(&mut self, l: &Linear) -> DevLinear {
        DevLinear { w: self.alone(&l.w), bias: self.optional(&l.bias) }
    }

    fn mlp(&mut self, m: &Mlp) -> DevMlp {
        DevMlp { gate: self.alone(&m.gate), up: self.alone(&m.up), down: self.alone(&m.down) }
    }

    /// The whole model. `experts` are `(layer, expert)`, the loader's first jobs.
    pub fn model(&mut self, model: &Model, experts: &[Vec<Arc<Expert>>]) -> Result<DevModel> {
        let mut tables = Vec::with_capacity(experts.len());
        for (l, layer) in experts.iter().enumerate() {
            tables.push(self.experts(l, layer)?);
        }
        let embed = self.alone(&model.embed);
        let mut layers = Vec::with_capacity(model.layers.len());
        for (l, layer) in model.layers.iter().enumerate() {
            layers.push(self.layer(layer, tables.get(l).copied().flatten()));
        }
        let final_norm = self.vector(&model.final_norm);
        let head = if model.hyper.tied_head { embed } else { self.alone(&model.head) };
        let inv_freq = self.vector(&model.rope.inv_freq);
        assert_eq!(self.next, self.stored.len(), "every loaded matrix has a place");
        let attention_factor = model.rope.attention_factor;
        Ok(DevModel { embed, layers, final_norm, head, inv_freq, attention_factor })
    }

    /// A layer's routed experts: their shape and their table's address; `None` for a dense layer.
    fn experts(&mut self, layer: usize, experts: &[Arc<Expert>]) -> Result<Option<(DevMlp, Ptr)>> {
        let mut shape: Option<DevMlp> = None;
        let mut table = Vec::with_capacity(experts.len() * 6);
        for (e, expert) in experts.iter().enumerate() {
            // An expert's matrices lie side by side: they are used, and will be streamed, together.
            self.groups.push((self.next..self.next + 3).collect());
            let m = DevMlp {
                gate: self.take(&expert.gate),
                up: self.take(&expert.up),
                down: self.take(&expert.down),
            };
            let first = *shape.get_or_insert(m);
            for (name, a, b) in
                [("gate", m.gate, first.gate), ("up", m.up, first.up), ("down", m.down, first.down)]
            {
                if a.codec != b.codec {
                    let field = format!("layer {layer} expert {e} {name}");
                    let expected = format!("codec {} as expert 0", b.codec().name());
                    return Err(Error::bad("model", field, expected, a.codec().name()));
                }
                table.extend([a.base.0 as u32, (a.base.0 >> 32) as u32]);
            }
        }
        Ok(shape.map(|s| (s, self.words(table.into_iter()))))
    }

    fn layer(&mut self, layer: &Layer, experts: Option<(DevMlp, Ptr)>) -> DevLayer {
        let attn_norm = self.vector(&layer.attn_norm);
        let attn = match &layer.attn {
            Attention::Mla(m) => DevAttention::Mla(self.mla(m)),
            Attention::Gqa(g) => DevAttention::Gqa(self.gqa(g)),
        };
        let ffn_norm = self.vector(&layer.ffn_norm);
        let ffn = match &layer.ffn {
            Ffn::Dense(m) => DevFfn::Dense(self.mlp(m)),
            Ffn::Moe(m) => DevFfn::Moe(self.moe(m, experts.expect("a layer with a router has experts"))),
        };
        DevLayer { attn_norm, attn, mask: layer.mask.into(), ffn_norm, ffn }
    }

    fn moe(&mut self, m: &Moe, (shape, table): (DevMlp, Ptr)) -> DevMoe {
        let router = self.alone(&m.router);
        let bias = self.optional(&m.bias);
        let shared = m.shared.as_ref().map(|s| self.mlp(s));
        DevMoe { router, bias, table, shape, shared }
    }

    fn gqa(&mut self, g: &Gqa) -> DevGqa {
        let qkv = [self.linear(&g.q), self.linear(&g.k), self.linear(&g.v)];
        let o = self.linear(&g.o);
        let norms = [self.vector(&g.q_norm), self.vector(&g.k_norm)];
        DevGqa { qkv, o, norms, sinks: self.optional(&g.sinks) }
    }

    fn mla(&mut self, m: &Mla) -> DevMla {
        let q_a = m.q_a.as_ref().map(|(a, norm)| (self.linear(a), self.vector(norm)));
        let q_b = self.linear(&m.q_b);
        let kv_a = self.linear(&m.kv_a);
        let kv_norm = self.vector(&m.kv_norm);
        // The heads of a layer are one group, so that one address and one step describe them all.
        let first = self.next;
        self.groups.push((first..first + 3 * m.n_heads).collect());
        let step = (0..3).map(|i| self.stored[first + i].room_bytes() as u64).sum();
        let mut of_head = [None; 3];
        for head in 0..m.n_heads {
            for (i, w) in [&m.k_absorb[head], &m.k_up[head], &m.v_up[head]].into_iter().enumerate() {
                let w = self.take(w);
                let h = of_head[i].get_or_insert(Heads { first: w, step });
                assert_eq!(h.first.codec, w.codec, "heads are rows of one tensor");
            }
        }
        let [k_absorb, k_up, v_up] = of_head.map(|h| h.expect("at least one head"));
        DevMla { q_a, q_b, kv_a, kv_norm, k_absorb, k_up, v_up, o: self.linear(&m.o) }
    }
}

impl DevModel {
    /// The codecs that products meet, each once.
    pub fn codecs(&self) -> Vec<u32> {
        let mut all = vec![self.head.codec];
        let mlp = |m: &DevMlp| [m.gate.codec, m.up.codec, m.down.codec];
        for l in &self.layers {
            match &l.attn {
                DevAttention::Mla(m) => {
                    all.extend(m.q_a.map(|(a, _)| a.w.codec));
                    all.extend([m.q_b.w.codec, m.kv_a.w.codec, m.o.w.codec]);
                    all.extend([m.k_absorb.first.codec, m.k_up.first.codec, m.v_up.first.codec]);
                }
                DevAttention::Gqa(g) => {
                    all.extend(g.qkv.map(|l| l.w.codec));
                    all.push(g.o.w.codec);
                }
            }
            match &l.ffn {
                DevFfn::Dense(m) => all.extend(mlp(m)),
                DevFfn::Moe(m) => {
                    all.push(m.router.codec);
                    all.extend(mlp(&m.shape));
                    all.extend(m.shared.iter().flat_map(mlp));
                }
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }
}
