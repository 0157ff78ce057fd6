//! Which codec each tensor gets. The choices are llama.cpp's (`src/llama-quant.cpp`), so that files of one name have the
//! size and quality that people expect of it.

use crate::format::{Codec, encode};

/// What `--codec` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The name as users write it.
    pub name: &'static str,
    /// The codec of most tensors.
    pub codec: Codec,
    /// Spend more bits on the values and down projections of some layers.
    mixed: bool,
    /// `general.file_type`, llama.cpp's number for the mix.
    pub file_type: u32,
}

const fn row(name: &'static str, codec: Codec, mixed: bool, file_type: u32) -> Target {
    Target { name, codec, mixed, file_type }
}

/// All targets.
pub const TARGETS: [Target; 14] = [
    row("f32", Codec::F32, false, 0),
    row("f16", Codec::F16, false, 1),
    row("bf16", Codec::BF16, false, 32),
    row("q4_0", Codec::Q4_0, false, 2),
    row("q4_1", Codec::Q4_1, false, 3),
    row("q5_0", Codec::Q5_0, false, 8),
    row("q5_1", Codec::Q5_1, false, 9),
    row("q8_0", Codec::Q8_0, false, 7),
    row("q4_k", Codec::Q4K, false, 14),
    row("q4_k_m", Codec::Q4K, true, 15),
    row("q5_k", Codec::Q5K, false, 16),
    row("q5_k_m", Codec::Q5K, true, 17),
    row("q6_k", Codec::Q6K, false, 18),
    row("iq4_nl", Codec::IQ4NL, false, 25),
];

/// Parses `--codec`.
pub fn parse(name: &str) -> Result<Target, String> {
    let found = TARGETS.iter().find(|t| t.name.eq_ignore_ascii_case(name)).copied();
    found.ok_or_else(|| format!("expected one of {}", TARGETS.map(|t| t.name).join(", ")))
}

/// What the choice depends on beside the tensor.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// What was asked for.
    pub target: Target,
    /// Layers of the model.
    pub layers: usize,
    /// The embedding is the output head too.
    pub tied: bool,
}

impl Context {
    /// The codec of one tensor.
    pub fn choose(&self, name: &str, dims: &[usize]) -> Codec {
        let cols = *dims.last().expect("a tensor has dimensions");
        if keeps_f32(name, dims) {
            return Codec::F32;
        }
        let wanted = if self.target.codec.is_dense() { self.target.codec } else { self.wanted(name) };
        let codec = fallback(wanted, cols);
        debug_assert!(encode::can_encode(codec));
        codec
    }

    fn wanted(&self, name: &str) -> Codec {
        let base = self.target.codec;
        if name == "output.weight" || self.tied && name == "token_embd.weight" {
            return if base == Codec::Q8_0 { Codec::Q8_0 } else { Codec::Q6K };
        }
        let sensitive = name.contains("ffn_down") || name.contains("attn_v.");
        if self.target.mixed && sensitive && more_bits(layer_of(name), self.layers) {
            Codec::Q6K
        } else {
            base
        }
    }
}

/// Vectors, routers and what the router adds: small, and every token's path depends on them.
fn keeps_f32(name: &str, dims: &[usize]) -> bool {
    dims.len() == 1 || name.ends_with(".bias") || name.contains("_norm.") || name.contains("ffn_gate_inp")
}

/// The layers that a mix spends more on: the first and last eighth, and every third between.
fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

fn layer_of(name: &str) -> usize {
    let number = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// A codec that rows of `cols` elements can have: K-quants need multiples of 256, the others of 32.
fn fallback(codec: Codec, cols: usize) -> Codec {
    let fits = |c: Codec| c.row_bytes(cols).is_some();
    let smaller = match codec {
        Codec::Q4K => Codec::Q5_0,
        Codec::Q5K => Codec::Q5_1,
        Codec::Q6K => Codec::Q8_0,
        other => other,
    };
    if fits(codec) {
        codec
    } else if fits(smaller) {
        smaller
    } else {
        Codec::F16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_those_of_llama_cpp() {
        let context = |name: &str| Context { target: parse(name).unwrap(), layers: 10, tied: false };
        // As in the file that llama.cpp made of a ten-layer model.
        for (target, name, dims, codec) in [
            ("q4_k_m", "output.weight", &[8192, 256][..], Codec::Q6K),
            ("q4_k_m", "token_embd.weight", &[8192, 256], Codec::Q4K),
            ("q4_k_m", "blk.0.ffn_down.weight", &[256, 768], Codec::Q6K),
            ("q4_k_m", "blk.1.ffn_down_exps.weight", &[32, 256, 128], Codec::Q5_0),
            ("q4_k_m", "blk.3.ffn_down_exps.weight", &[32, 256, 128], Codec::Q8_0),
            ("q4_k_m", "blk.3.ffn_gate_inp.weight", &[32, 256], Codec::F32),
            ("q4_k_m", "blk.3.exp_probs_b.bias", &[32], Codec::F32),
            ("q4_k", "blk.3.ffn_down.weight", &[256, 768], Codec::Q4K),
            ("q4_0", "output.weight", &[100, 96], Codec::Q8_0),
            ("q8_0", "output.weight", &[100, 256], Codec::Q8_0),
            ("q5_k", "blk.0.attn_q.weight", &[100, 96], Codec::Q5_1),
            ("q5_k", "blk.0.attn_q.weight", &[100, 40], Codec::F16),
            ("bf16", "blk.0.attn_q.weight", &[100, 40], Codec::BF16),
        ] {
            assert_eq!(context(target).choose(name, dims), codec, "{target} {name}");
        }
    }
}
