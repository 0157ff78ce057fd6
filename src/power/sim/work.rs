//! The models that a simulated board can run, reduced to what time and energy depend on: bytes, operations, launches.
//!
//! Work is counted in SM·MHz·ms: milliseconds on one multiprocessor at one megahertz. Dividing it by a board's
//! multiprocessors and clock gives time, so a table measured on one board carries over to another.

/// A model as a board feels it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    /// Its name, as in `--model`.
    pub name: &'static str,
    /// Bytes of weights that one pass reads.
    pub weight_bytes: f64,
    /// Bytes that attention reads a token of context and sequence.
    pub kv_bytes: f64,
    /// Work of one decode row alone, in SM·MHz·ms.
    pub decode_work: f64,
    /// Joules that unpacking and multiplying takes for one decode row alone, at full voltage.
    pub decode_ops_j: f64,
    /// How sharply the slower of memory and arithmetic decides: exponent of the norm that joins the two times.
    pub sharpness: f64,
    /// Work a prompt token, in SM·MHz·ms.
    pub prefill_work: f64,
    /// Work a prompt token and token before it (attention), in SM·MHz·ms.
    pub prefill_attention_work: f64,
    /// Joules a prompt token takes in the GPU, at full voltage.
    pub prefill_j: f64,
    /// Passes over the weights that one prompt chunk costs in memory time.
    pub prefill_passes: f64,
    /// Launching one prompt chunk, in ms at a CPU clock of 1728 MHz.
    pub launch_ms: f64,
}

/// Share of a decode row's work that each further row of a batch adds. Counted: a Q4_K GEMV spends per 8 weights
/// about 7 lane operations on loading and unpacking, which a batch shares, and 3.5 on dot products and scales, which
/// it does not.
pub const ROW_SHARE: f64 = 1.0 / 3.0;

/// Rows that a tensor-core tile computes whether they are filled or not.
pub const TILE_ROWS: u32 = 16;

/// Bytes of the model that the published table was measured with, context included.
pub const TABLE_BYTES: f64 = 1.087e9;

/// Joules a byte on its way through the GPU, at full voltage: the FP16 decode plateaus of an AGX Orin (25.4 W at 131
/// GB/s, 27.8 W at 150 GB/s on VDD_GPU_SOC) less what the memory controller takes.
pub const GPU_J_PER_BYTE: f64 = 0.07e-9;

/// Qwen2.5-1.5B Q4_K_M, of Table A. Decode: the published fit (21 882 MHz·ms on 8 SMs; 0.156 J a token, of which the
/// bytes' share goes by [`GPU_J_PER_BYTE`]). Prefill: fitted by us to the four published times of 64 tokens; three
/// unknowns, worst error 7%. They mean 5.2 TFLOPS, or 31% of the tensor cores' peak. Prefill energy has no published
/// number on this board: the AGX's prefill and decode plateaus, its sensor's lag undone, differ by 5%, and so they do
/// here.
pub const QWEN_1_5B_Q4: Model = Model {
    name: "qwen2.5-1.5b-q4_k_m",
    // The fit's 1087 MB contain the 364 tokens of context that the table's runs had on average.
    weight_bytes: TABLE_BYTES - 364.0 * 28_672.0,
    // 28 layers, 2 heads of 128 for keys and for values, 2 bytes each.
    kv_bytes: 28_672.0,
    decode_work: 21_882.0 * 8.0,
    decode_ops_j: 0.156 - GPU_J_PER_BYTE * TABLE_BYTES,
    sharpness: 2.0,
    prefill_work: 32.1 / 64.0 * 1020.0 * 8.0,
    // 4·1536·28 operations a pair of tokens, at half of the matrix products' rate.
    prefill_attention_work: 172_032.0 / 2.6e12 * 1e3 * 1020.0 * 8.0,
    prefill_j: 3.4e-3,
    prefill_passes: 2.2,
    launch_ms: 22.8,
};

/// Llama-3.1-8B Q4_K_M: everything by bytes and operations from the row above (4.36 times the bytes; 5.7 times the
/// operations).
pub const LLAMA_8B_Q4: Model = Model {
    name: "llama-3.1-8b-q4_k_m",
    weight_bytes: 4.69e9,
    kv_bytes: 131_072.0,
    decode_work: QWEN_1_5B_Q4.decode_work * 4.36,
    decode_ops_j: QWEN_1_5B_Q4.decode_ops_j * 4.36,
    sharpness: 2.0,
    prefill_work: QWEN_1_5B_Q4.prefill_work * 5.7,
    prefill_attention_work: QWEN_1_5B_Q4.prefill_attention_work * 3.05,
    prefill_j: QWEN_1_5B_Q4.prefill_j * 5.7,
    prefill_passes: 2.2,
    launch_ms: 26.0,
};

/// Llama-8B in FP16, of the AGX Orin study: prefill is its polynomial 6.65e-7·I² + 2.90e-4·I + 0.104 s at 16 SMs and
/// 1300.5 MHz, whose constant is one pass over the weights. The arithmetic of decode is the FP16 GEMV's 11.3 bytes a
/// clock and SM.
pub const LLAMA_8B_F16: Model = Model {
    name: "llama-8b-f16",
    weight_bytes: 15.0e9,
    kv_bytes: 131_072.0,
    decode_work: 15.0e9 / 11.3e3,
    decode_ops_j: 0.0,
    sharpness: 16.0,
    prefill_work: 2.90e-1 * 1300.5 * 16.0,
    prefill_attention_work: 2.0 * 6.65e-4 * 1300.5 * 16.0,
    prefill_j: 8.0e-3,
    prefill_passes: 1.0,
    launch_ms: 3.0,
};

/// The published GEMV that reads 400 MiB of FP16 once: no model, but the same physics.
pub const GEMV_400_MIB: Model = Model {
    name: "gemv-400mib-f16",
    weight_bytes: 419_430_400.0,
    kv_bytes: 0.0,
    // 11.3 bytes a clock and SM: the one number taken from the surface.
    decode_work: 419_430_400.0 / 11.3e3,
    decode_ops_j: 0.0,
    sharpness: 16.0,
    prefill_work: 0.0,
    prefill_attention_work: 0.0,
    prefill_j: 0.0,
    prefill_passes: 1.0,
    launch_ms: 0.0,
};

/// All of them.
pub const MODELS: [&Model; 4] = [&QWEN_1_5B_Q4, &LLAMA_8B_Q4, &LLAMA_8B_F16, &GEMV_400_MIB];

/// What the board is given to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Work {
    /// Nothing.
    Idle,
    /// One chunk of a prompt, after `past` tokens of it.
    Prefill {
        /// The model.
        model: &'static Model,
        /// Tokens of the chunk.
        tokens: u32,
        /// Tokens before it.
        past: u32,
    },
    /// Decode steps of a batch.
    Decode {
        /// The model.
        model: &'static Model,
        /// Sequences side by side.
        batch: u32,
        /// Tokens of context of each, on average.
        context: u32,
        /// Steps: tokens that each sequence gains.
        steps: u32,
    },
}
