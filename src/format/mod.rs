//! Bytes to structs: GGUF and safetensors directories, quantization codecs, the tile layout. Pure: no I/O, no unsafe.
//!
//! Codecs: [`decode_row`] turns a row as a file has it into f32, [`encode_row`] the other way. [`TilesMut`] fills a
//! matrix in the tile layout from file rows (cut it with `split_at` and fill the parts from several threads),
//! [`Tiles`] reads one back: values of a row or of a (tile, group), and the file's own bytes.

pub mod block;
pub mod codec;
pub mod decode;
pub mod encode;
mod encode_k;
pub mod fit;
pub mod gguf;
mod gguf_meta;
pub mod gguf_write;
pub mod input;
pub mod json_scan;
pub mod layout;
pub mod repack;
pub mod safetensors;
pub mod tensor;
pub mod tiles;

pub use codec::Codec;
pub use decode::decode_row;
pub use encode::{Unencodable, can_encode, encode_row};
pub use half::{bf16, f16};
pub use repack::{TilesMut, put_f8_scales};
pub use tiles::Tiles;
