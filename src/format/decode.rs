//! Rows of a file to f32: the definition of every codec's values.

use super::block;
use super::codec::Codec;
use super::layout::GROUP;
use half::{bf16, f16};

/// The 256 values of FP8 e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities, `0x7f` and `0xff` NaN.
pub const F8_VALUES: [f32; 256] = {
    let mut t = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        let (e, m) = (i >> 3 & 15, i & 7);
        let magnitude = if i & 127 == 127 {
            f32::NAN
        } else if e == 0 {
            m as f32 / 512.0
        } else {
            // 2^(e-7), built from bits, times 1.m.
            f32::from_bits(((e + 120) as u32) << 23) * (1.0 + m as f32 / 8.0)
        };
        t[i] = if i & 128 != 0 { -magnitude } else { magnitude };
        i += 1;
    }
    t
};

/// Decodes one row as a file has it (`codec.row_bytes(out.len())` bytes) to `out`. FP8 comes without its block scale.
///
/// Panics if the lengths do not belong together: shapes are checked where a file's directory is read.
pub fn decode_row(codec: Codec, row: &[u8], out: &mut [f32]) {
    assert_eq!(codec.row_bytes(out.len()), Some(row.len()), "{} row", codec.name());
    match codec {
        Codec::F32 => each(row, out, f32::from_le_bytes),
        Codec::F16 => each(row, out, |b| f16::from_le_bytes(b).to_f32()),
        Codec::BF16 => each(row, out, |b| bf16::from_le_bytes(b).to_f32()),
        Codec::F8E4M3 => each(row, out, |[b]| F8_VALUES[b as usize]),
        _ => {
            let info = codec.info();
            for (block, out) in row.chunks_exact(info.block_bytes).zip(out.chunks_exact_mut(info.block_len)) {
                for (g, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                    *out = block::read(codec, block, g).values(codec);
                }
            }
        }
    }
}

/// Decodes elements of `N` bytes.
fn each<const N: usize>(row: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (b, o) in row.as_chunks::<N>().0.iter().zip(out) {
        *o = value(*b);
    }
}

#[cfg(test)]
mod tests {
    use super::super::codec::TABLE;
    use super::*;

    /// `tests/data/codecs`: blocks with the values that gguf-py gives them (`tools/make_codec_vectors.py`).
    #[test]
    fn every_codec_decodes_as_gguf_py_does() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/codecs");
        for info in TABLE.iter().filter(|i| i.codec != Codec::F32) {
            let file = std::fs::read(dir.join(format!("{}.bin", info.name))).unwrap();
            let blocks = file.len() / (info.block_bytes + 4 * info.block_len);
            assert!(blocks > 0 && file.len() == blocks * (info.block_bytes + 4 * info.block_len));
            let (row, want) = file.split_at(blocks * info.block_bytes);
            let mut got = vec![0.0; blocks * info.block_len];
            decode_row(info.codec, row, &mut got);
            for (i, (got, want)) in got.iter().zip(want.as_chunks::<4>().0).enumerate() {
                let want = f32::from_le_bytes(*want);
                // Bit for bit, but for zero's sign (numpy adds offsets in another order) and NaN's payload.
                assert!(*got == want || got.is_nan() && want.is_nan(), "{} {i}: {got} {want}", info.name);
            }
        }
    }

    #[test]
    #[should_panic(expected = "q4_k row")]
    fn a_row_of_another_length_is_a_bug() {
        decode_row(Codec::Q4K, &[0; 144], &mut [0.0; 128]);
    }
}
