//! Files to checked tensors. Opens a GGUF (single or split) or a Hugging Face folder, lists its tensors, and loads those
//! that the model asks for into the tile layout ([`crate::format::layout`]), in parallel, by direct reads.

mod direct_write;
pub mod expert;
mod file;
pub mod load;
pub mod matrix;
mod open_gguf;
mod open_hf;
pub mod probe;
pub mod source;

pub use direct_write::DirectFile;
pub use expert::{Expert, ExpertSource, FakeMisses, ResidentExperts};
pub use file::{Reader, read_side_file};
pub use load::{MatrixJob, RowSpan, load, resident_bytes, shapes};
pub use matrix::{Matrix, Segment, WeightBytes};
pub use source::{HfMeta, Meta, Rows, Source, Tensor};

#[cfg(test)]
mod tests;
