//! Files to checked tensors. Opens a GGUF (single or split) or a Hugging Face folder, lists its tensors, and loads those
//! that the model asks for into the tile layout ([`crate::format::layout`]), in parallel, by direct reads.

pub mod expert;
pub mod matrix;

pub use expert::{Expert, ExpertSource, ResidentExperts};
pub use matrix::{Matrix, Segment, WeightBytes};
