//! One tensor of a file's directory, whatever the format.

use super::codec::Codec;

/// A tensor: its name, shape and place in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// How elements are written.
    pub codec: Codec,
    /// Row-major, outermost first; the last is the row width. (GGUF lists them the other way round.)
    pub dims: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Bytes of a tensor; `None` if the row is no multiple of the codec's block or the size overflows.
pub fn tensor_bytes(codec: Codec, dims: &[usize]) -> Option<u64> {
    let (cols, outer) = dims.split_last()?;
    let row = codec.row_bytes(*cols)? as u64;
    outer.iter().try_fold(row, |n, &d| n.checked_mul(d as u64)).filter(|&n| n < 1 << 63)
}
