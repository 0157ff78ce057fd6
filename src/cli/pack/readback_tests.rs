use super::*;
use crate::model::hyper::RopeHyper;
use crate::model::{AttnHyper, Gating, Mask, MoeHyper, QkNorm, RopeScaling};

fn hyper() -> Hyper {
    Hyper {
        arch: "qwen3moe".into(),
        vocab: 384,
        hidden: 32,
        n_layers: 2,
        context_tokens: 64,
        norm_eps: 1e-5,
        attn: AttnHyper::Gqa { n_heads: 4, n_kv_heads: 2, head_dim: 8, qk_norm: QkNorm::Head, clip: None },
        rope: RopeHyper { pairs: RopePairs::Half, dims: 8, theta: 1e4, scaling: RopeScaling::None },
        softmax_scale: 0.3535534,
        masks: vec![Mask::Full; 2],
        ffn_width: 48,
        moe: Some(MoeHyper {
            n_experts: 4,
            n_picked: 2,
            expert_width: 24,
            shared_width: 0,
            gating: Gating::Softmax,
            n_groups: 1,
            n_groups_picked: 1,
            normalize: true,
            scale: 1.0,
            dense: vec![false; 2],
        }),
        tied_head: false,
    }
}

#[test]
fn any_number_that_differs_is_named() {
    type Change = fn(&mut Hyper);
    let table: [(Change, Option<&str>); 18] = [
        (|_| {}, None),
        (|h| h.arch = "qwen3_moe".into(), None),
        // A step of f32 is rounding.
        (|h| h.softmax_scale = f32::from_bits(h.softmax_scale.to_bits() + 1), None),
        (|h| h.vocab += 1, Some("vocabulary size")),
        (|h| h.hidden += 1, Some("hidden size")),
        (|h| h.context_tokens += 1, Some("context length")),
        (|h| h.norm_eps = 1e-6, Some("norm epsilon")),
        (|h| h.softmax_scale *= 1.001, Some("attention scale")),
        (|h| h.masks[1] = Mask::Sliding { window: 8 }, Some("attention masks")),
        (|h| h.ffn_width = 24, Some("feed-forward width")),
        (|h| h.tied_head = true, Some("tied output head")),
        (|h| h.moe.as_mut().unwrap().normalize = false, Some("routed experts")),
        (|h| h.moe.as_mut().unwrap().dense[1] = true, Some("routed experts")),
        (|h| h.moe = None, Some("routed experts")),
        (|h| h.rope.theta = 1e4 + 1.0, Some("rope frequencies")),
        (|h| h.rope.dims = 4, Some("rope frequencies")),
        (|h| h.rope.pairs = RopePairs::Interleaved, Some("rope pairs")),
        (
            |h| {
                let AttnHyper::Gqa { clip, .. } = &mut h.attn else { unreachable!() };
                *clip = Some(8.0);
            },
            Some("attention"),
        ),
    ];
    for (change, field) in table {
        let mut other = hyper();
        change(&mut other);
        assert_eq!(difference(&hyper(), &other, false).map(|d| d.0), field);
        assert_eq!(difference(&other, &hyper(), false).map(|d| d.0), field, "the other way");
    }
    // Rows of q and k in llama's order turn neighbours; in any other they must not.
    let mut turned = hyper();
    turned.rope.pairs = RopePairs::Interleaved;
    assert_eq!(difference(&hyper(), &turned, true), None);
    assert_eq!(difference(&hyper(), &hyper(), true).unwrap().0, "rope pairs");
}
