//! What a key of `config.json` means where it is left out: the defaults of transformers' configuration classes
//! (`models/*/configuration_*.py`, 5.24), which differ from family to family. Published files say nearly everything; a
//! key that one does leave out must not silently mean something else here.

/// Defaults of one `model_type`. Widths and counts that no class could guess are not here: those keys must be given.
#[derive(Debug)]
pub(super) struct Defaults {
    /// `model_type`.
    pub model_type: &'static str,
    /// `max_position_embeddings`.
    pub context_tokens: usize,
    /// `rms_norm_eps`.
    pub norm_eps: f32,
    /// `rope_theta`.
    pub theta: f32,
    /// `num_key_value_heads`; none: as many as query heads.
    pub kv_heads: Option<usize>,
    /// `head_dim`; none: an even share of the hidden size.
    pub head_dim: Option<usize>,
    /// `sliding_window`; what it means is the family's.
    pub window: Option<usize>,
    /// Routed experts, for families that have them.
    pub moe: Option<MoeDefaults>,
    /// `q_lora_rank`.
    pub q_lora_rank: Option<usize>,
}

/// Defaults of a router and its experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct MoeDefaults {
    /// `num_experts`, `num_local_experts` or `n_routed_experts`.
    pub experts: usize,
    /// `num_experts_per_tok`; 0: the class has none.
    pub picked: usize,
    /// `moe_intermediate_size`; 0: an expert is as wide as `intermediate_size`.
    pub width: usize,
    /// `n_shared_experts`.
    pub shared: usize,
    /// `n_group`.
    pub groups: usize,
    /// `topk_group`.
    pub groups_picked: usize,
    /// `routed_scaling_factor`.
    pub scale: f32,
    /// `norm_topk_prob`.
    pub normalize: bool,
    /// `first_k_dense_replace`.
    pub first_dense: usize,
}

const DENSE: Defaults = Defaults {
    model_type: "",
    context_tokens: 2048,
    norm_eps: 1e-6,
    theta: 10_000.0,
    kv_heads: None,
    head_dim: None,
    window: None,
    moe: None,
    q_lora_rank: None,
};

const MOE: MoeDefaults = MoeDefaults {
    experts: 64,
    picked: 8,
    width: 0,
    shared: 0,
    groups: 1,
    groups_picked: 1,
    scale: 1.0,
    normalize: false,
    first_dense: 0,
};

/// One row a family, each only where it differs.
pub(super) const DEFAULTS: [Defaults; 10] = [
    Defaults { model_type: "llama", ..DENSE },
    Defaults {
        model_type: "mistral",
        context_tokens: 131_072,
        kv_heads: Some(8),
        window: Some(4096),
        ..DENSE
    },
    Defaults { model_type: "qwen2", context_tokens: 32_768, kv_heads: Some(32), window: Some(4096), ..DENSE },
    Defaults {
        model_type: "qwen3",
        context_tokens: 32_768,
        kv_heads: Some(32),
        head_dim: Some(128),
        window: Some(4096),
        ..DENSE
    },
    Defaults {
        model_type: "qwen3_moe",
        context_tokens: 32_768,
        kv_heads: Some(4),
        window: Some(4096),
        moe: Some(MoeDefaults { experts: 128, width: 768, ..MOE }),
        ..DENSE
    },
    Defaults {
        model_type: "mixtral",
        context_tokens: 131_072,
        norm_eps: 1e-5,
        theta: 1_000_000.0,
        kv_heads: Some(8),
        moe: Some(MoeDefaults { experts: 8, picked: 2, normalize: true, ..MOE }),
        ..DENSE
    },
    Defaults { model_type: "olmoe", context_tokens: 4096, norm_eps: 1e-5, moe: Some(MOE), ..DENSE },
    Defaults {
        model_type: "deepseek_v2",
        q_lora_rank: Some(1536),
        moe: Some(MoeDefaults { picked: 0, width: 1407, shared: 2, ..MOE }),
        ..DENSE
    },
    Defaults {
        model_type: "deepseek_v3",
        context_tokens: 4096,
        q_lora_rank: Some(1536),
        moe: Some(MoeDefaults {
            experts: 256,
            width: 2048,
            shared: 1,
            groups: 8,
            groups_picked: 4,
            scale: 2.5,
            normalize: true,
            first_dense: 3,
            ..MOE
        }),
        ..DENSE
    },
    Defaults {
        model_type: "glm4_moe_lite",
        context_tokens: 202_752,
        norm_eps: 1e-5,
        q_lora_rank: Some(768),
        moe: Some(MoeDefaults {
            picked: 4,
            width: 1536,
            shared: 1,
            scale: 1.8,
            normalize: true,
            first_dense: 1,
            ..MOE
        }),
        ..DENSE
    },
];
