//! Binding: names to weights, once. Every tensor's shape is checked here; after it there is no string look-up.
//!
//! The same walk runs twice: first it only collects what to load (so that memory can be planned, printed and refused
//! before a byte is read), then it takes the loaded matrices in the same order.

use super::hyper::{AttnHyper, Hyper, MoeHyper, QkNorm};
use super::layer::{Attention, Ffn, Gqa, Layer, Linear, Mla, Mlp, Model, Moe};
use super::rope::Rope;
use super::{gguf, hf, unread};
use crate::format::Codec;
use crate::units::{Error, LayerId, Result};
use crate::weights::{
    Expert, Matrix, MatrixJob, Meta, ResidentExperts, RowSpan, Segment, Source, WeightBytes,
};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

/// A model file whose every tensor has been found and checked, before loading.
#[derive(Debug, Clone)]
pub struct Bound {
    /// Hyperparameters.
    pub hyper: Hyper,
    /// What to load.
    pub jobs: Vec<MatrixJob>,
    /// How many of the first jobs are the routed experts' (the rest is the resident part).
    pub expert_jobs: usize,
    /// Tensors of the source that the model does not need.
    pub unread: Vec<usize>,
}

/// Reads the hyperparameters of an opened model.
pub fn hyper(source: &Source) -> Result<Hyper> {
    match source.meta() {
        Meta::HuggingFace(m) => hf::hyper(&source.path().join("config.json"), &m.config),
        Meta::Gguf(meta) => {
            let dims = |name: &str| source.find(name).map(|t| source.tensors()[t].dims.clone());
            let freqs = source.find("rope_freqs.weight").map(|t| source.read_f32(t)).transpose()?;
            gguf::hyper(meta, &gguf::Directory { dims: &dims, rope_factors: freqs })
        }
    }
}

/// Finds and checks every tensor of the model.
pub fn bind(source: &Source) -> Result<Bound> {
    let hyper = hyper(source)?;
    check_layers(source, &hyper)?;
    let mut b = Binder::new(source, &hyper, None);
    b.experts()?;
    let expert_jobs = b.jobs.len();
    b.model()?;
    let unread = unread::check(source, &hyper, &b.read.borrow())?;
    let jobs = b.jobs;
    Ok(Bound { hyper, jobs, expert_jobs, unread })
}

/// A GGUF with layers beyond its own count has a wrong count: run as it says, it would answer rubbish. (Hugging Face
/// folders may have more: the layers of multi-token prediction.)
fn check_layers(source: &Source, h: &Hyper) -> Result<()> {
    let Meta::Gguf(meta) = source.meta() else { return Ok(()) };
    let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<usize>().ok();
    // Layers for multi-token prediction are counted and not run.
    let extra = meta.opt_usize(&format!("{}.nextn_predict_layers", h.arch))?.unwrap_or(0);
    match source.tensors().iter().find(|t| layer(&t.name).is_some_and(|l| l >= h.n_layers + extra)) {
        Some(t) => {
            let field = format!("{}.block_count", h.arch);
            Err(Error::bad(source.path(), field, format!("a count that covers {}", t.name), h.n_layers))
        }
        None => Ok(()),
    }
}

/// Builds the model from the matrices loaded for [`Bound::jobs`], in their order.
pub fn build(source: &Source, bound: Bound, loaded: Vec<Matrix>) -> Result<(Model, ResidentExperts)> {
    assert_eq!(loaded.len(), bound.jobs.len());
    let mut b = Binder::new(source, &bound.hyper, Some(loaded.into_iter()));
    let experts = b.experts()?;
    let model = b.model()?;
    Ok((model, ResidentExperts::new(experts)))
}

/// What `attn_kv_b` holds, a head.
#[derive(Default)]
struct HeadMatrices {
    k_absorb: Vec<Matrix>,
    k_up: Vec<Matrix>,
    v_up: Vec<Matrix>,
}

struct Binder<'a> {
    source: &'a Source,
    h: &'a Hyper,
    hf: bool,
    jobs: Vec<MatrixJob>,
    /// Which of the source's tensors were asked for.
    read: RefCell<Vec<bool>>,
    loaded: Option<std::vec::IntoIter<Matrix>>,
}

impl<'a> Binder<'a> {
    fn new(source: &'a Source, h: &'a Hyper, loaded: Option<std::vec::IntoIter<Matrix>>) -> Self {
        let hf = matches!(source.meta(), Meta::HuggingFace(_));
        let read = RefCell::new(vec![false; source.tensors().len()]);
        Binder { source, h, hf, jobs: Vec::new(), read, loaded }
    }

    /// The tensor's name: the GGUF one or the Hugging Face one.
    fn name(&self, gguf: &str, hf: &str) -> String {
        if self.hf { hf.to_owned() } else { gguf.to_owned() }
    }

    fn layer_name(&self, l: LayerId, gguf: &str, hf: &str) -> String {
        self.name(&format!("blk.{l}.{gguf}"), &format!("model.layers.{l}.{hf}"))
    }

    /// Finds a tensor and checks its dimensions.
    fn find(&self, name: &str, dims: &[usize]) -> Result<usize> {
        let file: &Path = self.source.path();
        let t = self
            .source
            .find(name)
            .ok_or_else(|| Error::bad(file, name, format!("a tensor {dims:?}"), "nothing"))?;
        let found = &self.source.tensors()[t].dims;
        let trim = |d: &[usize]| -> Vec<usize> { d.iter().copied().skip_while(|&n| n == 1).collect() };
        if trim(found) != trim(dims) {
            return Err(Error::bad(file, name, format!("shape {dims:?}"), format!("{found:?}")));
        }
        self.read.borrow_mut()[t] = true;
        Ok(t)
    }

    fn job(&mut self, name: String, spans: Vec<RowSpan>, transpose: bool) -> Matrix {
        if let Some(loaded) = &mut self.loaded {
            return loaded.next().expect("one matrix a job");
        }
        self.jobs.push(MatrixJob { name, spans, transpose });
        // Stands in until the second walk.
        Matrix::new(Codec::F32, 0, 0, WeightBytes::new(Arc::new(Segment::zeroed(0)), 0, 0))
    }

    /// A whole matrix.
    fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<Matrix> {
        let t = self.find(&name, &[rows, cols])?;
        Ok(self.job(name, vec![RowSpan { tensor: t, first_row: 0, rows }], false))
    }

    /// A small f32 vector.
    fn vector(&self, name: String, len: usize) -> Result<Vec<f32>> {
        let t = self.find(&name, &[len])?;
        if self.loaded.is_none() {
            return Ok(Vec::new());
        }
        self.source.read_f32(t)
    }

    fn optional_vector(&self, name: String, len: usize) -> Result<Option<Vec<f32>>> {
        if self.source.find(&name).is_none() {
            return Ok(None);
        }
        self.vector(name, len).map(Some)
    }

    /// A matrix and the bias beside it, if the file has one. `gguf` and `hf` come without `.weight`.
    fn linear(&mut self, l: LayerId, gguf: &str, hf: &str, rows: usize, cols: usize) -> Result<Linear> {
        let base = self.layer_name(l, gguf, hf);
        let w = self.matrix(format!("{base}.weight"), rows, cols)?;
        Ok(Linear { w, bias: self.optional_vector(format!("{base}.bias"), rows)? })
    }

    fn model(&mut self) -> Result<Model> {
        let h = self.h;
        let embed =
            self.matrix(self.name("token_embd.weight", "model.embed_tokens.weight"), h.vocab, h.hidden)?;
        let layers = (0..h.n_layers).map(|l| self.layer(l)).collect::<Result<Vec<_>>>()?;
        let final_norm = self.vector(self.name("output_norm.weight", "model.norm.weight"), h.hidden)?;
        let head = match h.tied_head {
            true => embed.clone(),
            false => self.matrix(self.name("output.weight", "lm_head.weight"), h.vocab, h.hidden)?,
        };
        Ok(Model { hyper: h.clone(), rope: Rope::new(&h.rope), embed, layers, final_norm, head })
    }

    fn layer(&mut self, l: LayerId) -> Result<Layer> {
        let h = self.h;
        let attn_norm =
            self.vector(self.layer_name(l, "attn_norm.weight", "input_layernorm.weight"), h.hidden)?;
        let attn = match h.attn {
            AttnHyper::Mla { .. } => Attention::Mla(self.mla(l)?),
            AttnHyper::Gqa { .. } => Attention::Gqa(self.gqa(l)?),
        };
        let ffn_norm =
            self.vector(self.layer_name(l, "ffn_norm.weight", "post_attention_layernorm.weight"), h.hidden)?;
        let ffn = match &h.moe {
            Some(m) if !m.dense[l] => Ffn::Moe(self.moe(l, m)?),
            _ => Ffn::Dense(self.mlp(l, ["ffn_gate", "ffn_up", "ffn_down"], "mlp", h.ffn_width)?),
        };
        Ok(Layer { attn_norm, attn, mask: h.masks[l], ffn_norm, ffn })
    }

    fn gqa(&mut self, l: LayerId) -> Result<Gqa> {
        let AttnHyper::Gqa { n_heads, n_kv_heads, head_dim, qk_norm, clip } = self.h.attn else {
            unreachable!()
        };
        let hidden = self.h.hidden;
        let norm_len = |heads: usize| match qk_norm {
            QkNorm::None => 0,
            QkNorm::Head => head_dim,
            QkNorm::Row => heads * head_dim,
        };
        let norm = |b: &Self, gguf: &str, hf: &str, heads: usize| match norm_len(heads) {
            0 => Ok(Vec::new()),
            n => b.vector(b.layer_name(l, gguf, hf), n),
        };
        Ok(Gqa {
            n_heads,
            n_kv_heads,
            head_dim,
            q: self.linear(l, "attn_q", "self_attn.q_proj", n_heads * head_dim, hidden)?,
            k: self.linear(l, "attn_k", "self_attn.k_proj", n_kv_heads * head_dim, hidden)?,
            v: self.linear(l, "attn_v", "self_attn.v_proj", n_kv_heads * head_dim, hidden)?,
            o: self.linear(l, "attn_output", "self_attn.o_proj", hidden, n_heads * head_dim)?,
            qk_norm,
            q_norm: norm(self, "attn_q_norm.weight", "self_attn.q_norm.weight", n_heads)?,
            k_norm: norm(self, "attn_k_norm.weight", "self_attn.k_norm.weight", n_kv_heads)?,
            clip,
            sinks: self
                .optional_vector(self.layer_name(l, "attn_sinks.weight", "self_attn.sinks"), n_heads)?,
        })
    }

    fn mla(&mut self, l: LayerId) -> Result<Mla> {
        let AttnHyper::Mla { n_heads, q_lora_rank, kv_lora_rank, nope_dim, rope_dim, v_dim } = self.h.attn
        else {
            unreachable!()
        };
        let hidden = self.h.hidden;
        let q_rows = n_heads * (nope_dim + rope_dim);
        let (q_a, q_b) = match q_lora_rank {
            None => (None, self.linear(l, "attn_q", "self_attn.q_proj", q_rows, hidden)?),
            Some(rank) => {
                let a = self.linear(l, "attn_q_a", "self_attn.q_a_proj", rank, hidden)?;
                let norm = self.layer_name(l, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight");
                let norm = self.vector(norm, rank)?;
                (Some((a, norm)), self.linear(l, "attn_q_b", "self_attn.q_b_proj", q_rows, rank)?)
            }
        };
        let kv_a =
            self.linear(l, "attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", kv_lora_rank + rope_dim, hidden)?;
        let norm = self.layer_name(l, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight");
        let kv_norm = self.vector(norm, kv_lora_rank)?;
        let HeadMatrices { k_absorb, k_up, v_up } = self.kv_b(l, n_heads, kv_lora_rank, nope_dim, v_dim)?;
        let o = self.linear(l, "attn_output", "self_attn.o_proj", hidden, n_heads * v_dim)?;
        Ok(Mla {
            n_heads,
            kv_lora_rank,
            nope_dim,
            rope_dim,
            v_dim,
            q_a,
            q_b,
            kv_a,
            kv_norm,
            k_absorb,
            k_up,
            v_up,
            o,
        })
    }

    /// W_UK (both ways round) and W_UV, a head. The orientation that the file has keeps its codec.
    fn kv_b(&mut self, l: LayerId, heads: usize, lora: usize, nope: usize, v: usize) -> Result<HeadMatrices> {
        let mut out = HeadMatrices::default();
        let split = format!("blk.{l}.attn_k_b.weight");
        if !self.hf && self.source.find(&split).is_some() {
            let k = self.find(&split, &[heads, lora, nope])?;
            let v_name = format!("blk.{l}.attn_v_b.weight");
            let vt = self.find(&v_name, &[heads, v, lora])?;
            for head in 0..heads {
                let span = || vec![RowSpan { tensor: k, first_row: head * lora, rows: lora }];
                out.k_absorb.push(self.job(format!("{split}[{head}]"), span(), false));
                out.k_up.push(self.job(format!("{split}[{head}] turned"), span(), true));
                let span = vec![RowSpan { tensor: vt, first_row: head * v, rows: v }];
                out.v_up.push(self.job(format!("{v_name}[{head}]"), span, false));
            }
            return Ok(out);
        }
        let name = self.layer_name(l, "attn_kv_b.weight", "self_attn.kv_b_proj.weight");
        let t = self.find(&name, &[heads * (nope + v), lora])?;
        for head in 0..heads {
            let first_row = head * (nope + v);
            let span = || vec![RowSpan { tensor: t, first_row, rows: nope }];
            out.k_absorb.push(self.job(format!("{name}[{head}] turned"), span(), true));
            out.k_up.push(self.job(format!("{name}[{head}] keys"), span(), false));
            let span = vec![RowSpan { tensor: t, first_row: first_row + nope, rows: v }];
            out.v_up.push(self.job(format!("{name}[{head}] values"), span, false));
        }
        Ok(out)
    }

    fn mlp(&mut self, l: LayerId, gguf: [&str; 3], hf: &str, width: usize) -> Result<Mlp> {
        let hidden = self.h.hidden;
        let name = |b: &Self, i: usize, part: &str| {
            b.layer_name(l, &format!("{}.weight", gguf[i]), &format!("{hf}.{part}_proj.weight"))
        };
        Ok(Mlp {
            gate: self.matrix(name(self, 0, "gate"), width, hidden)?,
            up: self.matrix(name(self, 1, "up"), width, hidden)?,
            down: self.matrix(name(self, 2, "down"), hidden, width)?,
        })
    }

    fn moe(&mut self, l: LayerId, m: &MoeHyper) -> Result<Moe> {
        let block = self.hf_moe_block(l);
        let router = self.layer_name(l, "ffn_gate_inp.weight", &format!("{block}.gate.weight"));
        let router = self.matrix(router, m.n_experts, self.h.hidden)?;
        let bias = self.layer_name(l, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias");
        let bias = self.optional_vector(bias, m.n_experts)?;
        let shared = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
        let shared = match m.shared_width {
            0 => None,
            width => Some(self.mlp(l, shared, "mlp.shared_experts", width)?),
        };
        Ok(Moe { router, bias, gating: m.gating, shared })
    }

    /// Mixtral's published checkpoints say `block_sparse_moe` and `w1 w3 w2`; the others `mlp`.
    fn hf_moe_block(&self, l: LayerId) -> &'static str {
        let mixtral = format!("model.layers.{l}.block_sparse_moe.gate.weight");
        if self.source.find(&mixtral).is_some() { "block_sparse_moe" } else { "mlp" }
    }

    /// All routed experts, `(layer, expert)`.
    fn experts(&mut self) -> Result<Vec<Vec<Arc<Expert>>>> {
        let Some(m) = &self.h.moe else { return Ok(Vec::new()) };
        (0..self.h.n_layers)
            .map(|l| match m.dense[l] {
                true => Ok(Vec::new()),
                false => (0..m.n_experts).map(|e| self.expert(l, e, m).map(Arc::new)).collect(),
            })
            .collect()
    }

    fn expert(&mut self, l: LayerId, e: usize, m: &MoeHyper) -> Result<Expert> {
        let (w, hidden) = (m.expert_width, self.h.hidden);
        Ok(Expert {
            gate: self.expert_matrix(l, e, m, ("gate", "w1"), w, hidden)?,
            up: self.expert_matrix(l, e, m, ("up", "w3"), w, hidden)?,
            down: self.expert_matrix(l, e, m, ("down", "w2"), hidden, w)?,
        })
    }

    /// One matrix of one expert: a slice of GGUF's `(n_experts, rows, cols)` tensor, or a tensor of its own.
    fn expert_matrix(
        &mut self,
        l: LayerId,
        e: usize,
        m: &MoeHyper,
        part: (&str, &str),
        rows: usize,
        cols: usize,
    ) -> Result<Matrix> {
        if self.hf {
            let block = self.hf_moe_block(l);
            let own = format!("model.layers.{l}.{block}.experts.{e}.{}_proj.weight", part.0);
            let old = format!("model.layers.{l}.{block}.experts.{e}.{}.weight", part.1);
            let name = if self.source.find(&old).is_some() { old } else { own };
            return self.matrix(name, rows, cols);
        }
        let single = format!("blk.{l}.ffn_{}.{e}.weight", part.0); // files from before experts were merged
        if self.source.find(&single).is_some() {
            return self.matrix(single, rows, cols);
        }
        let name = format!("blk.{l}.ffn_{}_exps.weight", part.0);
        let t = self.find(&name, &[m.n_experts, rows, cols])?;
        let span = RowSpan { tensor: t, first_row: e * rows, rows };
        Ok(self.job(format!("{name}[{e}]"), vec![span], false))
    }
}
