//! Hyperparameters: what a model file says about its own shape, checked, in one form whatever the file.

use crate::limits;
use crate::units::{Error, LayerId, Result};
use std::path::Path;

/// A whole model's hyperparameters.
#[derive(Debug, Clone)]
pub struct Hyper {
    /// The architecture as the file names it: `deepseek2`, `qwen3_moe` …
    pub arch: String,
    /// Vocabulary size: rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub n_layers: usize,
    /// Positions the model was made for.
    pub context_tokens: usize,
    /// RMSNorm epsilon.
    pub norm_eps: f32,
    /// Attention shape, the same in every layer.
    pub attn: AttnHyper,
    /// Rotary embedding.
    pub rope: RopeHyper,
    /// Scores are multiplied by this before the softmax; includes yarn's mscale squared for MLA.
    pub softmax_scale: f32,
    /// Which keys a row may see, a layer.
    pub masks: Vec<Mask>,
    /// Width of a dense layer's SwiGLU.
    pub ffn_width: usize,
    /// Routed experts, if any.
    pub moe: Option<MoeHyper>,
    /// The output head is the embedding.
    pub tied_head: bool,
}

/// Attention shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AttnHyper {
    /// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 §2.1).
    Mla {
        /// Query heads.
        n_heads: usize,
        /// Width of the query's low-rank bottleneck, if it has one.
        q_lora_rank: Option<usize>,
        /// Width of the latent that is cached.
        kv_lora_rank: usize,
        /// Width of a head's part without position.
        nope_dim: usize,
        /// Width of the decoupled rope key, shared by all heads.
        rope_dim: usize,
        /// Width of a head's value.
        v_dim: usize,
    },
    /// Grouped-query attention; multi-head when the counts are equal.
    Gqa {
        /// Query heads.
        n_heads: usize,
        /// Key and value heads.
        n_kv_heads: usize,
        /// Width of a query or key head.
        head_dim: usize,
        /// RMSNorm of queries and keys before rope.
        qk_norm: QkNorm,
        /// Queries, keys and values are clamped to ±this (OLMoE's `clip_qkv`).
        clip: Option<f32>,
    },
}

/// Whether and over what queries and keys are normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Not at all.
    None,
    /// Each head by itself (Qwen3): weight `(head_dim)`.
    Head,
    /// The whole row (OLMoE): weight `(n_heads * head_dim)`.
    Row,
}

/// Which element pairs a rotation turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// `(0,1) (2,3) …` (DeepSeek; GGUF's llama).
    Interleaved,
    /// `(0, n/2) (1, n/2+1) …` (GPT-NeoX; Hugging Face's llama, qwen).
    Half,
}

/// Rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeHyper {
    /// Pairing.
    pub pairs: RopePairs,
    /// Elements of a head that are turned.
    pub dims: usize,
    /// Base wavelength.
    pub theta: f32,
    /// Long-context scaling.
    pub scaling: RopeScaling,
}

/// Long-context scaling of the rotary frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1: low frequencies divided, a smooth ramp between.
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f32,
        /// Wavelengths above `original/low_freq` are divided.
        low_freq: f32,
        /// Wavelengths below `original/high_freq` stay.
        high_freq: f32,
        /// Context of pre-training.
        original_tokens: f32,
    },
    /// YaRN (arXiv:2309.00071).
    Yarn {
        /// The divisor of the interpolated frequencies.
        factor: f32,
        /// Rotations above which a dimension is left alone.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Context of pre-training.
        original_tokens: f32,
        /// What cosine and sine are multiplied by.
        attention_factor: f32,
        /// Round the ramp's ends to whole dimensions, as the reference does unless told not to.
        truncate: bool,
    },
    /// One divisor a frequency, `(dims/2)` (GGUF's `rope_freqs.weight`).
    Factors(Vec<f32>),
}

/// Which earlier positions `j` a row at position `i` attends to; always `j <= i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All.
    Full,
    /// `i - j < window`.
    Sliding {
        /// Positions seen, the row's own included.
        window: usize,
    },
    /// `(i - j) % stride == 0` (atrous).
    Strided {
        /// Distance between seen positions.
        stride: usize,
    },
    /// `i - j < window || (i - j) % stride == 0` (Sparse Transformer, arXiv:1904.10509).
    LocalStrided {
        /// Local positions seen.
        window: usize,
        /// Distance between the others.
        stride: usize,
    },
}

impl Mask {
    /// True if the row at `i` sees position `j`.
    pub fn sees(self, i: usize, j: usize) -> bool {
        j <= i
            && match self {
                Mask::Full => true,
                Mask::Sliding { window } => i - j < window,
                Mask::Strided { stride } => (i - j).is_multiple_of(stride),
                Mask::LocalStrided { window, stride } => i - j < window || (i - j).is_multiple_of(stride),
            }
    }

    /// Positions are stored by residue modulo this, so that a strided row's keys share pages; 1 for the others.
    pub fn stride(self) -> usize {
        match self {
            Mask::Full | Mask::Sliding { .. } => 1,
            Mask::Strided { stride } | Mask::LocalStrided { stride, .. } => stride,
        }
    }

    /// Reads `full`, `sliding:W`, `strided:K` or `local-strided:W,K`.
    pub fn parse(text: &str) -> Option<Mask> {
        let num = |s: &str| s.parse::<usize>().ok().filter(|n| (1..=limits::CONTEXT_MAX).contains(n));
        let (kind, args) = text.split_once(':').unwrap_or((text, ""));
        match kind {
            "full" if args.is_empty() => Some(Mask::Full),
            "sliding" => Some(Mask::Sliding { window: num(args)? }),
            "strided" => Some(Mask::Strided { stride: num(args)? }),
            "local-strided" => {
                let (w, k) = args.split_once(',')?;
                Some(Mask::LocalStrided { window: num(w)?, stride: num(k)? })
            }
            _ => None,
        }
    }
}

/// How router logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// Routed experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeHyper {
    /// Routed experts in a layer.
    pub n_experts: usize,
    /// Experts a token picks.
    pub n_picked: usize,
    /// Width of one routed expert's SwiGLU.
    pub expert_width: usize,
    /// Width of the shared experts' SwiGLU together; 0 without.
    pub shared_width: usize,
    /// Scores.
    pub gating: Gating,
    /// Experts are split into this many groups …
    pub n_groups: usize,
    /// … of which a token may use this many.
    pub n_groups_picked: usize,
    /// Divide the picked weights by their sum.
    pub normalize: bool,
    /// Multiply the picked weights by this.
    pub scale: f32,
    /// Which layers are dense, a layer.
    pub dense: Vec<bool>,
}

impl Hyper {
    /// True if `layer` routes to experts.
    pub fn is_moe(&self, layer: LayerId) -> bool {
        self.moe.as_ref().is_some_and(|m| !m.dense[layer])
    }

    /// Query heads.
    pub fn n_heads(&self) -> usize {
        match self.attn {
            AttnHyper::Mla { n_heads, .. } | AttnHyper::Gqa { n_heads, .. } => n_heads,
        }
    }

    /// Elements cached a token and layer: `(key row, value row)`. MLA caches one row of latent and rope key.
    pub fn kv_widths(&self) -> (usize, usize) {
        match self.attn {
            AttnHyper::Mla { kv_lora_rank, rope_dim, .. } => (kv_lora_rank + rope_dim, 0),
            AttnHyper::Gqa { n_kv_heads, head_dim, .. } => (n_kv_heads * head_dim, n_kv_heads * head_dim),
        }
    }

    /// Checks every relation between the numbers, so that what follows may multiply and divide freely.
    pub fn check(&self, file: &Path) -> Result<()> {
        let width = |field: &str, v: usize| in_range(file, field, v, 1, limits::WIDTH_MAX);
        in_range(file, "layer count", self.n_layers, 1, limits::LAYERS_MAX)?;
        in_range(file, "vocabulary size", self.vocab, 1, limits::VOCAB_MAX)?;
        in_range(file, "context length", self.context_tokens, 1, limits::CONTEXT_MAX)?;
        width("hidden size", self.hidden)?;
        width("feed-forward width", self.ffn_width)?;
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(Error::bad(file, "norm epsilon", "a finite number, 0 or more", self.norm_eps));
        }
        if !(self.softmax_scale.is_finite() && self.softmax_scale > 0.0) {
            return Err(Error::bad(file, "attention scale", "a finite number above 0", self.softmax_scale));
        }
        self.check_attn(file)?;
        if let Some(moe) = &self.moe {
            self.check_moe(file, moe)?;
        }
        assert_eq!(self.masks.len(), self.n_layers);
        Ok(())
    }

    fn check_attn(&self, file: &Path) -> Result<()> {
        let width = |field: &str, v: usize| in_range(file, field, v, 1, limits::WIDTH_MAX);
        let heads = |field: &str, v: usize| in_range(file, field, v, 1, 1 << 14);
        let head_width = |field: &str, v: usize| in_range(file, field, v, 1, 1 << 14);
        let rope_room = match self.attn {
            AttnHyper::Mla { n_heads, q_lora_rank, kv_lora_rank, nope_dim, rope_dim, v_dim } => {
                heads("attention heads", n_heads)?;
                width("kv_lora_rank", kv_lora_rank)?;
                q_lora_rank.map_or(Ok(()), |r| width("q_lora_rank", r))?;
                head_width("qk_nope_head_dim", nope_dim)?;
                head_width("qk_rope_head_dim", rope_dim)?;
                head_width("v_head_dim", v_dim)?;
                rope_dim
            }
            AttnHyper::Gqa { n_heads, n_kv_heads, head_dim, .. } => {
                heads("attention heads", n_heads)?;
                heads("key-value heads", n_kv_heads)?;
                head_width("head_dim", head_dim)?;
                if !n_heads.is_multiple_of(n_kv_heads) {
                    let expected = format!("a divisor of the {n_heads} attention heads");
                    return Err(Error::bad(file, "key-value heads", expected, n_kv_heads));
                }
                head_dim
            }
        };
        let r = &self.rope;
        if r.dims == 0 || r.dims > rope_room || !r.dims.is_multiple_of(2) {
            return Err(Error::bad(
                file,
                "rope dimensions",
                format!("an even number from 2 to {rope_room}"),
                r.dims,
            ));
        }
        if !(r.theta.is_finite() && r.theta > 0.0) {
            return Err(Error::bad(file, "rope theta", "a finite number above 0", r.theta));
        }
        r.check(file)
    }

    fn check_moe(&self, file: &Path, m: &MoeHyper) -> Result<()> {
        in_range(file, "routed experts", m.n_experts, 1, limits::EXPERTS_MAX)?;
        in_range(file, "experts a token", m.n_picked, 1, m.n_experts.min(limits::EXPERTS_PICKED_MAX))?;
        in_range(file, "expert width", m.expert_width, 1, limits::WIDTH_MAX)?;
        in_range(file, "shared expert width", m.shared_width, 0, limits::WIDTH_MAX)?;
        in_range(file, "expert groups", m.n_groups, 1, m.n_experts)?;
        in_range(file, "expert groups a token", m.n_groups_picked, 1, m.n_groups)?;
        if !m.n_experts.is_multiple_of(m.n_groups) {
            let expected = format!("a divisor of the {} experts", m.n_experts);
            return Err(Error::bad(file, "expert groups", expected, m.n_groups));
        }
        let allowed = m.n_experts / m.n_groups * m.n_groups_picked;
        in_range(file, "experts a token", m.n_picked, 1, allowed)?;
        if !m.scale.is_finite() {
            return Err(Error::bad(file, "routed scaling factor", "a finite number", m.scale));
        }
        assert_eq!(m.dense.len(), self.n_layers);
        Ok(())
    }
}

impl RopeHyper {
    fn check(&self, file: &Path) -> Result<()> {
        let positive = |field: &str, v: f32| {
            if v.is_finite() && v > 0.0 {
                Ok(())
            } else {
                Err(Error::bad(file, field, "a finite number above 0", v))
            }
        };
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope scaling factor", *factor),
            RopeScaling::Llama3 { factor, low_freq, high_freq, original_tokens } => {
                positive("rope scaling factor", *factor)?;
                positive("rope low_freq_factor", *low_freq)?;
                positive("rope high_freq_factor", *high_freq)?;
                positive("rope original context", *original_tokens)?;
                if high_freq <= low_freq {
                    let expected = format!("a number above low_freq_factor {low_freq}");
                    return Err(Error::bad(file, "rope high_freq_factor", expected, high_freq));
                }
                Ok(())
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_tokens, attention_factor, .. } => {
                positive("rope scaling factor", *factor)?;
                positive("rope beta_fast", *beta_fast)?;
                positive("rope beta_slow", *beta_slow)?;
                positive("rope original context", *original_tokens)?;
                positive("rope attention factor", *attention_factor)
            }
            RopeScaling::Factors(f) => {
                if f.len() != self.dims / 2 {
                    return Err(Error::bad(
                        file,
                        "rope_freqs.weight",
                        format!("{} factors", self.dims / 2),
                        f.len(),
                    ));
                }
                f.iter().try_for_each(|&v| positive("rope_freqs.weight", v))
            }
        }
    }
}

/// Checks `low <= v <= high`.
pub(super) fn in_range(file: &Path, field: &str, v: usize, low: usize, high: usize) -> Result<()> {
    if (low..=high).contains(&v) {
        return Ok(());
    }
    Err(Error::bad(file, field, format!("{low} to {high}"), v))
}
