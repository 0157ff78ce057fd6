//! The codecs: how a tensor's elements are written in a GGUF or safetensors file.
//!
//! Block shapes are those of ggml (`ggml/src/ggml-common.h`): a block of `block_len` elements takes `block_bytes`
//! bytes. One row of [`TABLE`] a codec; everything else looks codecs up here.

/// An element type or quantization codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are the documentation
pub enum Codec {
    F32,
    F16,
    BF16,
    /// FP8 e4m3fn; in Hugging Face folders with one f32 `weight_scale_inv` a 128x128 block. Not in GGUF.
    F8E4M3,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    MXFP4,
}

/// One row of the codec table.
#[derive(Debug, Clone, Copy)]
pub struct CodecInfo {
    /// The codec.
    pub codec: Codec,
    /// Its name as users write it: `q4_k`.
    pub name: &'static str,
    /// `ggml_type` number in a GGUF tensor directory; `None` if GGUF cannot hold it.
    pub ggml_type: Option<u32>,
    /// Elements in a block; a row's width must be a multiple.
    pub block_len: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
}

const fn row(
    codec: Codec,
    name: &'static str,
    ggml_type: Option<u32>,
    block_len: usize,
    block_bytes: usize,
) -> CodecInfo {
    CodecInfo { codec, name, ggml_type, block_len, block_bytes }
}

/// All codecs, in the order of [`Codec`].
pub const TABLE: [CodecInfo; 17] = [
    row(Codec::F32, "f32", Some(0), 1, 4),
    row(Codec::F16, "f16", Some(1), 1, 2),
    row(Codec::BF16, "bf16", Some(30), 1, 2),
    row(Codec::F8E4M3, "f8_e4m3", None, 1, 1),
    row(Codec::Q4_0, "q4_0", Some(2), 32, 18),
    row(Codec::Q4_1, "q4_1", Some(3), 32, 20),
    row(Codec::Q5_0, "q5_0", Some(6), 32, 22),
    row(Codec::Q5_1, "q5_1", Some(7), 32, 24),
    row(Codec::Q8_0, "q8_0", Some(8), 32, 34),
    row(Codec::Q2K, "q2_k", Some(10), 256, 84),
    row(Codec::Q3K, "q3_k", Some(11), 256, 110),
    row(Codec::Q4K, "q4_k", Some(12), 256, 144),
    row(Codec::Q5K, "q5_k", Some(13), 256, 176),
    row(Codec::Q6K, "q6_k", Some(14), 256, 210),
    row(Codec::IQ4NL, "iq4_nl", Some(20), 32, 18),
    row(Codec::IQ4XS, "iq4_xs", Some(23), 256, 136),
    row(Codec::MXFP4, "mxfp4", Some(39), 32, 17),
];

impl Codec {
    /// This codec's table row.
    pub fn info(self) -> &'static CodecInfo {
        &TABLE[self as usize]
    }

    /// The name users write.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// Finds a codec by the name users write, in any case.
    pub fn from_name(name: &str) -> Option<Codec> {
        TABLE.iter().find(|i| i.name.eq_ignore_ascii_case(name)).map(|i| i.codec)
    }

    /// Finds a codec by its `ggml_type` number.
    pub fn from_ggml(ty: u32) -> Option<Codec> {
        TABLE.iter().find(|i| i.ggml_type == Some(ty)).map(|i| i.codec)
    }

    /// True for the codecs whose elements are plain numbers (F32, F16, BF16, FP8), which meet f32 activations.
    pub fn is_dense(self) -> bool {
        matches!(self, Codec::F32 | Codec::F16 | Codec::BF16 | Codec::F8E4M3)
    }

    /// Bytes of one row of `cols` elements as the file has it; `None` if `cols` is no multiple of the block or the
    /// product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let i = self.info();
        if !cols.is_multiple_of(i.block_len) {
            return None;
        }
        (cols / i.block_len).checked_mul(i.block_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_enum_order() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.codec as usize, i, "{}", row.name);
        }
    }
}
