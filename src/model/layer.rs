//! Layers as plain data: what a backend walks. Names are gone; every shape was checked when it was bound.

use super::hyper::{Gating, Hyper, Mask, QkNorm};
use super::rope::Rope;
use crate::weights::Matrix;

/// A model: weights but for the routed experts, which an [`crate::weights::ExpertSource`] gives out.
#[derive(Debug)]
pub struct Model {
    /// Its hyperparameters.
    pub hyper: Hyper,
    /// Rotary frequencies, the same in every layer.
    pub rope: Rope,
    /// `(vocab, hidden)`
    pub embed: Matrix,
    /// In order.
    pub layers: Vec<Layer>,
    /// `(hidden)` f32
    pub final_norm: Vec<f32>,
    /// `(vocab, hidden)`; the embedding when tied.
    pub head: Matrix,
}

/// One decoder layer: `x += attn(norm(x)); x += ffn(norm(x))`.
#[derive(Debug)]
pub struct Layer {
    /// `(hidden)` f32
    pub attn_norm: Vec<f32>,
    /// Attention.
    pub attn: Attention,
    /// Keys that a row may see.
    pub mask: Mask,
    /// `(hidden)` f32
    pub ffn_norm: Vec<f32>,
    /// Feed-forward.
    pub ffn: Ffn,
}

/// A matrix and, in some models, a bias.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `(rows, cols)`
    pub w: Matrix,
    /// `(rows)` f32
    pub bias: Option<Vec<f32>>,
}

/// Attention weights.
#[derive(Debug)]
pub enum Attention {
    /// Latent attention.
    Mla(Mla),
    /// Grouped-query attention.
    Gqa(Gqa),
}

/// Latent attention (arXiv:2405.04434). A token caches `kv_norm(latent) (kv_lora_rank)` and its rope key `(rope_dim)`.
#[derive(Debug)]
pub struct Mla {
    /// Query heads.
    pub n_heads: usize,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Width of a head's part without position.
    pub nope_dim: usize,
    /// Width of the rope key.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub v_dim: usize,
    /// The query's bottleneck: `(q_lora_rank, hidden)` and its norm `(q_lora_rank)`.
    pub q_a: Option<(Linear, Vec<f32>)>,
    /// `(n_heads * (nope_dim + rope_dim), q_lora_rank or hidden)`
    pub q_b: Linear,
    /// `(kv_lora_rank + rope_dim, hidden)`
    pub kv_a: Linear,
    /// `(kv_lora_rank)` f32
    pub kv_norm: Vec<f32>,
    /// W_UK a head, turned for the absorbed product: `(kv_lora_rank, nope_dim)`: latent query = this · q_nope.
    pub k_absorb: Vec<Matrix>,
    /// W_UK a head, as materialized keys need it: `(nope_dim, kv_lora_rank)`: k_nope = this · latent.
    pub k_up: Vec<Matrix>,
    /// W_UV a head: `(v_dim, kv_lora_rank)`.
    pub v_up: Vec<Matrix>,
    /// `(hidden, n_heads * v_dim)`
    pub o: Linear,
}

/// Grouped-query attention. A token caches its keys and values, `(n_kv_heads, head_dim)` each.
#[derive(Debug)]
pub struct Gqa {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// `(n_heads * head_dim, hidden)`
    pub q: Linear,
    /// `(n_kv_heads * head_dim, hidden)`
    pub k: Linear,
    /// `(n_kv_heads * head_dim, hidden)`
    pub v: Linear,
    /// `(hidden, n_heads * head_dim)`
    pub o: Linear,
    /// Whether and over what queries and keys are normalized.
    pub qk_norm: QkNorm,
    /// The query norm's weight, by `qk_norm`; empty without.
    pub q_norm: Vec<f32>,
    /// The key norm's weight.
    pub k_norm: Vec<f32>,
    /// Queries, keys and values are clamped to ±this.
    pub clip: Option<f32>,
    /// Attention sinks: one extra logit a head, `(n_heads)`, that takes weight and gives no value.
    pub sinks: Option<Vec<f32>>,
}

/// Feed-forward part of a layer.
#[derive(Debug)]
pub enum Ffn {
    /// One SwiGLU.
    Dense(Mlp),
    /// Routed experts.
    Moe(Moe),
}

/// SwiGLU: `down (silu(gate x) * (up x))`.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// `(width, hidden)`
    pub gate: Matrix,
    /// `(width, hidden)`
    pub up: Matrix,
    /// `(hidden, width)`
    pub down: Matrix,
}

/// Routed experts: the router and the shared part.
#[derive(Debug)]
pub struct Moe {
    /// `(n_experts, hidden)`
    pub router: Matrix,
    /// Added to the scores for the choice only, `(n_experts)` (DeepSeek-V3's correction bias).
    pub bias: Option<Vec<f32>>,
    /// Scores.
    pub gating: Gating,
    /// Experts that every token uses.
    pub shared: Option<Mlp>,
}
