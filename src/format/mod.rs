//! Bytes to structs: GGUF and safetensors directories, quantization codecs, the tile layout. Pure: no I/O, no unsafe.

pub mod codec;
pub mod gguf;
mod gguf_meta;
pub mod gguf_write;
pub mod input;
pub mod json_scan;
pub mod layout;
pub mod safetensors;
pub mod tensor;

pub use codec::Codec;
pub use half::{bf16, f16};
