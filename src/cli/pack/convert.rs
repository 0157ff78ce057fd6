//! Which tensors the GGUF has, and from which rows of the source each is made.

use super::hparams::{Family, Hparams};
use crate::units::{Error, Result};
use crate::weights::{Source, Tensor};

/// One tensor to write.
#[derive(Debug)]
pub struct OutTensor {
    /// Its GGUF name.
    pub name: String,
    /// Row-major, the row width last.
    pub dims: Vec<usize>,
    /// Where its rows come from.
    pub recipe: Recipe,
}

/// Where a tensor's rows come from.
#[derive(Debug)]
pub enum Recipe {
    /// Pieces of source tensors, one after another.
    Pieces(Vec<Piece>),
    /// Values made here.
    Values(Vec<f32>),
}

/// Rows of one source tensor.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Index in the source.
    pub tensor: usize,
    /// First row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// How they change on the way.
    pub shape: Shape,
}

/// What happens to a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Nothing.
    Same,
    /// Row `i` of the first half and of the second become rows `2i` and `2i + 1`: from rotating halves to rotating
    /// neighbours, which is what GGUF's llama architecture does.
    Interleave,
    /// The transpose.
    Transpose,
}

/// Every tensor of a Hugging Face model, in the order in which it is written. `unread` are those that the model does not
/// need; one that is needed and not written is an error.
pub fn tensors(source: &Source, h: &Hparams, unread: &[usize]) -> Result<Vec<OutTensor>> {
    let used = vec![false; source.tensors().len()];
    let mut c = Convert { source, h, out: Vec::new(), used };
    c.plain("token_embd.weight", "model.embed_tokens.weight")?;
    c.plain("output_norm.weight", "model.norm.weight")?;
    if !h.tied {
        c.plain("output.weight", "lm_head.weight")?;
    }
    if let Some(factors) = &h.rope_factors {
        c.values("rope_freqs.weight", factors.clone());
    }
    for layer in 0..h.layers {
        c.layer(layer)?;
    }
    let scales = source.tensors().iter().filter_map(|t| t.scale);
    unread.iter().copied().chain(scales).for_each(|t| c.used[t] = true);
    match c.used.iter().position(|used| !used) {
        None => Ok(c.out),
        Some(t) => {
            let name = &source.tensors()[t].name;
            Err(Error::bad(
                source.file_of(t),
                format_args!("tensor {name}"),
                "a tensor that GGUF has a name for",
                "none",
            ))
        }
    }
}

/// Every tensor of a GGUF, unchanged.
pub fn same(source: &Source) -> Vec<OutTensor> {
    let whole = |(i, t): (usize, &Tensor)| OutTensor {
        name: t.name.clone(),
        dims: t.dims.clone(),
        recipe: Recipe::Pieces(vec![Piece { tensor: i, first: 0, rows: t.rows(), shape: Shape::Same }]),
    };
    source.tensors().iter().enumerate().map(whole).collect()
}

struct Convert<'a> {
    source: &'a Source,
    h: &'a Hparams,
    out: Vec<OutTensor>,
    /// Which of the source's tensors were taken.
    used: Vec<bool>,
}

impl Convert<'_> {
    fn find(&mut self, name: &str) -> Result<usize> {
        let t = self.source.find(name).ok_or_else(|| {
            Error::bad(self.source.path(), format_args!("tensor {name}"), "it in the model", "nothing")
        })?;
        self.used[t] = true;
        Ok(t)
    }

    /// A tensor as it is.
    fn plain(&mut self, name: &str, from: &str) -> Result<()> {
        let tensor = self.find(from)?;
        let t = &self.source.tensors()[tensor];
        let piece = Piece { tensor, first: 0, rows: t.rows(), shape: Shape::Same };
        self.out.push(OutTensor {
            name: name.to_owned(),
            dims: t.dims.clone(),
            recipe: Recipe::Pieces(vec![piece]),
        });
        Ok(())
    }

    /// A tensor as it is, if the model has it.
    fn optional(&mut self, name: &str, from: &str) -> Result<()> {
        if self.source.find(from).is_some() { self.plain(name, from) } else { Ok(()) }
    }

    fn values(&mut self, name: &str, values: Vec<f32>) {
        self.out.push(OutTensor {
            name: name.to_owned(),
            dims: vec![values.len()],
            recipe: Recipe::Values(values),
        });
    }

    fn layer(&mut self, layer: usize) -> Result<()> {
        let (blk, hf) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
        self.plain(&format!("{blk}.attn_norm.weight"), &format!("{hf}.input_layernorm.weight"))?;
        if self.h.family == Family::Deepseek2 {
            self.latent_attention(&blk, &format!("{hf}.self_attn"))?;
        } else {
            self.attention(&blk, &format!("{hf}.self_attn"))?;
        }
        self.plain(&format!("{blk}.ffn_norm.weight"), &format!("{hf}.post_attention_layernorm.weight"))?;
        self.feed_forward(&blk, &hf)
    }

    fn attention(&mut self, blk: &str, hf: &str) -> Result<()> {
        let turned = self.h.family == Family::Llama;
        for (letter, heads) in [("q", self.h.heads), ("k", self.h.kv_heads)] {
            let (name, from) = (format!("{blk}.attn_{letter}"), format!("{hf}.{letter}_proj"));
            if turned {
                self.interleaved(&format!("{name}.weight"), &format!("{from}.weight"), heads)?;
                self.interleaved_bias(&format!("{name}.bias"), &format!("{from}.bias"), heads)?;
            } else {
                self.plain(&format!("{name}.weight"), &format!("{from}.weight"))?;
                self.optional(&format!("{name}.bias"), &format!("{from}.bias"))?;
            }
            self.optional(&format!("{name}_norm.weight"), &format!("{hf}.{letter}_norm.weight"))?;
        }
        for (name, from) in [("attn_v", "v_proj"), ("attn_output", "o_proj")] {
            self.plain(&format!("{blk}.{name}.weight"), &format!("{hf}.{from}.weight"))?;
            self.optional(&format!("{blk}.{name}.bias"), &format!("{hf}.{from}.bias"))?;
        }
        self.optional(&format!("{blk}.attn_sinks.weight"), &format!("{hf}.sinks"))
    }

    /// Rows of each head from halves to neighbours.
    fn interleaved(&mut self, name: &str, from: &str, heads: usize) -> Result<()> {
        self.plain(name, from)?;
        let out = self.out.last_mut().expect("just pushed");
        let Recipe::Pieces(pieces) = &mut out.recipe else { unreachable!("plain makes pieces") };
        let whole = pieces[0].clone();
        if !whole.rows.is_multiple_of(2 * heads) {
            let expected = format!("a multiple of {} rows, 2 a head", 2 * heads);
            let file = self.source.file_of(whole.tensor);
            return Err(Error::bad(file, format_args!("tensor {from}"), expected, whole.rows));
        }
        let rows = whole.rows / heads;
        let head = |h| Piece { first: h * rows, rows, shape: Shape::Interleave, ..whole };
        *pieces = (0..heads).map(head).collect();
        Ok(())
    }

    fn interleaved_bias(&mut self, name: &str, from: &str, heads: usize) -> Result<()> {
        let Some(tensor) = self.source.find(from) else { return Ok(()) };
        self.used[tensor] = true;
        let bias = self.source.read_f32(tensor)?;
        if !bias.len().is_multiple_of(2 * heads) {
            let expected = format!("a multiple of {} elements, 2 a head", 2 * heads);
            let file = self.source.file_of(tensor);
            return Err(Error::bad(file, format_args!("tensor {from}"), expected, bias.len()));
        }
        let head_dim = bias.len() / heads;
        let half = head_dim / 2;
        let turn = |head: &[f32]| (0..head_dim).map(|j| head[j / 2 + j % 2 * half]).collect::<Vec<_>>();
        self.values(name, bias.chunks(head_dim).flat_map(turn).collect());
        Ok(())
    }

    fn latent_attention(&mut self, blk: &str, hf: &str) -> Result<()> {
        let q_a = self.source.find(&format!("{hf}.q_a_proj.weight")).is_some();
        let queries: &[_] =
            if q_a { &[("attn_q_a", "q_a_proj"), ("attn_q_b", "q_b_proj")] } else { &[("attn_q", "q_proj")] };
        let others = [("attn_kv_a_mqa", "kv_a_proj_with_mqa"), ("attn_output", "o_proj")];
        for (name, from) in queries.iter().chain(&others) {
            self.plain(&format!("{blk}.{name}.weight"), &format!("{hf}.{from}.weight"))?;
            self.optional(&format!("{blk}.{name}.bias"), &format!("{hf}.{from}.bias"))?;
        }
        self.optional(&format!("{blk}.attn_q_a_norm.weight"), &format!("{hf}.q_a_layernorm.weight"))?;
        self.plain(&format!("{blk}.attn_kv_a_norm.weight"), &format!("{hf}.kv_a_layernorm.weight"))?;
        self.split_kv_b(blk, &format!("{hf}.kv_b_proj.weight"))
    }

    /// The up-projection of keys and values, split by head for the absorbed product: keys transposed, values as they are.
    fn split_kv_b(&mut self, blk: &str, from: &str) -> Result<()> {
        let tensor = self.find(from)?;
        let t = &self.source.tensors()[tensor];
        let (heads, nope, v) = (self.h.heads, self.h.nope, self.h.v_head);
        if t.rows() != heads * (nope + v) {
            let expected = format!("{} rows: {heads} heads of {nope} + {v}", heads * (nope + v));
            return Err(Error::bad(
                self.source.file_of(tensor),
                format_args!("tensor {from}"),
                expected,
                t.rows(),
            ));
        }
        let piece = |h: usize, skip, rows, shape| Piece { tensor, first: h * (nope + v) + skip, rows, shape };
        let keys = (0..heads).map(|h| piece(h, 0, nope, Shape::Transpose)).collect();
        let values = (0..heads).map(|h| piece(h, nope, v, Shape::Same)).collect();
        self.out.push(OutTensor {
            name: format!("{blk}.attn_k_b.weight"),
            dims: vec![heads, t.cols(), nope],
            recipe: Recipe::Pieces(keys),
        });
        self.out.push(OutTensor {
            name: format!("{blk}.attn_v_b.weight"),
            dims: vec![heads, v, t.cols()],
            recipe: Recipe::Pieces(values),
        });
        Ok(())
    }

    fn feed_forward(&mut self, blk: &str, hf: &str) -> Result<()> {
        for router in [format!("{hf}.mlp.gate"), format!("{hf}.block_sparse_moe.gate")] {
            if self.source.find(&format!("{router}.weight")).is_some() {
                return self.experts(blk, &router);
            }
        }
        for part in ["gate", "up", "down"] {
            self.plain(&format!("{blk}.ffn_{part}.weight"), &format!("{hf}.mlp.{part}_proj.weight"))?;
        }
        Ok(())
    }

    fn experts(&mut self, blk: &str, router: &str) -> Result<()> {
        let mlp = router.strip_suffix(".gate").expect("a router's name");
        self.plain(&format!("{blk}.ffn_gate_inp.weight"), &format!("{router}.weight"))?;
        let bias = format!("{router}.e_score_correction_bias");
        self.optional(&format!("{blk}.exp_probs_b.bias"), &bias)?;
        // Mixtral's names beside everyone else's.
        for (part, letter) in [("gate", "w1"), ("up", "w3"), ("down", "w2")] {
            self.stacked(blk, mlp, part, letter)?;
        }
        for part in ["gate", "up", "down"] {
            let from = format!("{mlp}.shared_experts.{part}_proj.weight");
            self.optional(&format!("{blk}.ffn_{part}_shexp.weight"), &from)?;
        }
        Ok(())
    }

    /// One projection of all experts as one tensor `(experts, rows, cols)`.
    fn stacked(&mut self, blk: &str, mlp: &str, part: &str, letter: &str) -> Result<()> {
        let mut pieces = Vec::with_capacity(self.h.experts);
        let mut dims: Vec<usize> = Vec::new();
        for e in 0..self.h.experts {
            let mixtral = format!("{mlp}.experts.{e}.{letter}.weight");
            let name = if self.source.find(&mixtral).is_some() {
                mixtral
            } else {
                format!("{mlp}.experts.{e}.{part}_proj.weight")
            };
            let tensor = self.find(&name)?;
            let t = &self.source.tensors()[tensor];
            if !dims.is_empty() && dims[1..] != t.dims {
                let expected = format!("shape {:?} as expert 0", &dims[1..]);
                let file = self.source.file_of(tensor);
                return Err(Error::bad(
                    file,
                    format_args!("tensor {name}"),
                    expected,
                    format_args!("{:?}", t.dims),
                ));
            }
            dims = [&[self.h.experts], &t.dims[..]].concat();
            pieces.push(Piece { tensor, first: 0, rows: t.rows(), shape: Shape::Same });
        }
        self.out.push(OutTensor {
            name: format!("{blk}.ffn_{part}_exps.weight"),
            dims,
            recipe: Recipe::Pieces(pieces),
        });
        Ok(())
    }
}
