//! Bytes to structs: GGUF and safetensors directories, quantization codecs, the tile layout. Pure: no I/O, no unsafe.

pub mod codec;
pub mod layout;

pub use codec::Codec;
pub use half::{bf16, f16};
