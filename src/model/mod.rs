//! Hyperparameters, names bound once, layers as plain data. A backend walks [`Model`]; nothing here computes but the
//! router and the rotary frequencies, which are small and the same everywhere.

pub mod bind;
mod defaults;
pub mod gguf;
pub mod hf;
pub mod hyper;
pub mod layer;
pub mod rope;
pub mod router;
mod unread;

pub use self::hyper::{AttnHyper, Gating, Hyper, Mask, MoeHyper, QkNorm, RopePairs, RopeScaling};
pub use bind::{Bound, bind, build};
pub use layer::{Attention, Ffn, Gqa, Layer, Linear, Mla, Mlp, Model, Moe};
pub use rope::Rope;
pub use router::{Pick, margin, route};
