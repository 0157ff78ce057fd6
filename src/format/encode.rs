//! f32 rows to a file's blocks.
//!
//! Deterministic, and careful: scales come from the searches in [`super::fit`], and codes are picked again for the scale
//! as it is stored. Without activation statistics the large weights of a group matter most, so errors are weighted.

use super::block::{self, Group, IQ4_VALUES};
use super::codec::Codec;
use super::encode_k;
use super::fit::{self, to_f16};
use super::layout::GROUP;
use crate::units::Error;
use half::{bf16, f16};
use std::path::Path;

/// A value that a codec cannot hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Unencodable {
    /// The codec asked for.
    pub codec: Codec,
    /// Column of the first bad value.
    pub column: usize,
    /// The value: not finite, or above [`max_value`].
    pub value: f32,
}

impl Unencodable {
    /// As an error that names the file and the field (tensor and row).
    pub fn at(self, file: impl AsRef<Path>, field: impl std::fmt::Display) -> Error {
        let max = max_value(self.codec);
        let expected = format!("finite values up to {max:e} for {}", self.codec.name());
        Error::bad(file, format!("{field} column {}", self.column), expected, self.value)
    }
}

/// True for the codecs that [`encode_row`] writes.
pub fn can_encode(codec: Codec) -> bool {
    !matches!(codec, Codec::F8E4M3 | Codec::Q2K | Codec::Q3K | Codec::IQ4XS | Codec::MXFP4)
}

/// The largest magnitude that a codec takes. For all quantized ones that of f16, which their scales and mins are.
pub fn max_value(codec: Codec) -> f32 {
    match codec {
        Codec::F32 => f32::MAX,
        Codec::BF16 => bf16::MAX.to_f32(),
        _ => f16::MAX.to_f32(),
    }
}

/// Encodes one row to `out`, `codec.row_bytes(values.len())` bytes.
///
/// Panics if the lengths do not belong together or the codec is not one of [`can_encode`]: both are checked where a
/// conversion is planned.
pub fn encode_row(codec: Codec, values: &[f32], out: &mut [u8]) -> Result<(), Unencodable> {
    assert!(can_encode(codec), "{} has no encoder", codec.name());
    assert_eq!(codec.row_bytes(values.len()), Some(out.len()), "{} row", codec.name());
    let max = max_value(codec);
    // A NaN is in no range.
    if let Some(column) = values.iter().position(|v| !(-max..=max).contains(v)) {
        return Err(Unencodable { codec, column, value: values[column] });
    }
    match codec {
        Codec::F32 => each(values, out, f32::to_le_bytes),
        Codec::F16 => each(values, out, |v| f16::from_f32(v).to_le_bytes()),
        Codec::BF16 => each(values, out, |v| bf16::from_f32(v).to_le_bytes()),
        Codec::Q4K | Codec::Q5K | Codec::Q6K => encode_k::row(codec, values, out),
        _ => {
            out.fill(0);
            let blocks = out.chunks_exact_mut(codec.info().block_bytes);
            for (x, b) in values.as_chunks::<GROUP>().0.iter().zip(blocks) {
                block::write(codec, b, 0, &group(codec, x));
            }
        }
    }
    Ok(())
}

/// Encodes elements of `N` bytes.
fn each<const N: usize>(values: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (v, o) in values.iter().zip(out.as_chunks_mut::<N>().0) {
        *o = bytes(*v);
    }
}

/// Unsigned codes of whole numbers `q` with zero at `zero`.
pub(super) fn codes(q: &[f32; GROUP], zero: f32) -> [u8; GROUP] {
    q.map(|q| (q + zero) as u8)
}

/// The group of a block-32 codec.
fn group(codec: Codec, x: &[f32; GROUP]) -> Group {
    match codec {
        Codec::Q4_0 => symmetric(x, 8.0),
        Codec::Q5_0 => symmetric(x, 16.0),
        Codec::Q4_1 => affine(x, 15.0),
        Codec::Q5_1 => affine(x, 31.0),
        Codec::IQ4NL => nonlinear(x),
        _ => q8_0(x),
    }
}

/// `d*(q - half)`: Q4_0, Q5_0.
fn symmetric(x: &[f32; GROUP], half: f32) -> Group {
    let w = x.map(|v| v * v);
    let d = fit::scale(x, &w, -half, half - 1.0, to_f16);
    let q = if d == 0.0 { [0.0; GROUP] } else { fit::pick(x, d, 0.0, -half, half - 1.0) };
    Group { codes: codes(&q, half), d: f16::from_f32(d).to_bits(), ..Group::default() }
}

/// Eight bits are enough that the plain scale does: the largest magnitude at 127. -128 stays unused, as kernels that
/// multiply magnitudes and signs apart expect.
fn q8_0(x: &[f32; GROUP]) -> Group {
    let d = to_f16(fit::max_abs(x) / 127.0);
    let q = if d == 0.0 { [0.0; GROUP] } else { fit::pick(x, d, 0.0, -127.0, 127.0) };
    Group { codes: codes(&q, 128.0), d: f16::from_f32(d).to_bits(), ..Group::default() }
}

/// `d*q + m`: Q4_1, Q5_1.
fn affine(x: &[f32; GROUP], hi: f32) -> Group {
    let w = encode_k::weights(x);
    let (d, m) = fit::scale_min(x, &w, hi, false, -10..=10);
    let (d, m) = (to_f16(d), to_f16(m));
    let q = if d == 0.0 { [0.0; GROUP] } else { fit::pick(x, d, m, 0.0, hi) };
    let bits = |v| f16::from_f32(v).to_bits();
    Group { codes: codes(&q, 0.0), d: bits(d), m: bits(m), ..Group::default() }
}

/// `d*LUT[q]`: IQ4_NL. The search of [`fit::scale`] with the nearest table entry in place of rounding.
fn nonlinear(x: &[f32; GROUP]) -> Group {
    let w = x.map(|v| v * v);
    let extreme = x.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let (mut best, mut least) = (Group { codes: [8; GROUP], ..Group::default() }, f32::INFINITY);
    if extreme.abs() < fit::TINY {
        return best;
    }
    for step in -10..=10 {
        // The table reaches from -127 to 113; the largest magnitude may be either end.
        let (_, q) = nearest_iq4(x, extreme / (IQ4_VALUES[0] as f32 + 1.5 * step as f32));
        let (xq, qq) = (fit::sum::<GROUP>(|i| w[i] * x[i] * q[i]), fit::sum::<GROUP>(|i| w[i] * q[i] * q[i]));
        let d = to_f16(xq / qq);
        if d == 0.0 {
            continue;
        }
        let (code, q) = nearest_iq4(x, d);
        let e = fit::error(x, &w, &q, d, 0.0);
        if e < least {
            (best, least) =
                (Group { codes: codes(&code, 0.0), d: f16::from_f32(d).to_bits(), ..Group::default() }, e);
        }
    }
    best
}

/// Codes whose table values times `d` are nearest, and these table values. A code is the number of midpoints below the
/// value; summed a midpoint at a time over the whole group, which vectorizes where a search or a look-up does not.
fn nearest_iq4(x: &[f32; GROUP], d: f32) -> ([f32; GROUP], [f32; GROUP]) {
    let inverse = 1.0 / d;
    let (mut codes, mut values) = ([0.0; GROUP], [IQ4_VALUES[0] as f32; GROUP]);
    for pair in IQ4_VALUES.windows(2) {
        let (low, high) = (pair[0] as f32, pair[1] as f32);
        for k in 0..GROUP {
            let above = x[k] * inverse > 0.5 * (low + high);
            codes[k] += if above { 1.0 } else { 0.0 };
            values[k] += if above { high - low } else { 0.0 };
        }
    }
    (codes, values)
}

#[cfg(test)]
mod tests {
    use super::super::codec::TABLE;
    use super::super::decode_row;
    use super::*;

    /// Normal-like values: sums of four uniform ones, seeded.
    fn normal(seed: u64, n: usize, scale: f32) -> Vec<f32> {
        let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut uniform = || {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| scale * (uniform() + uniform() + uniform() + uniform())).collect()
    }

    fn round_trip(codec: Codec, x: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0xff; codec.row_bytes(x.len()).unwrap()];
        encode_row(codec, x, &mut bytes).unwrap();
        let mut y = vec![0.0; x.len()];
        decode_row(codec, &bytes, &mut y);
        y
    }

    fn encodable() -> impl Iterator<Item = Codec> {
        TABLE.iter().map(|i| i.codec).filter(|&c| can_encode(c))
    }

    /// Root mean square error over root mean square.
    fn relative_error(x: &[f32], y: &[f32]) -> f64 {
        let sum = |f: &dyn Fn(usize) -> f32| (0..x.len()).map(|i| (f(i) as f64).powi(2)).sum::<f64>();
        (sum(&|i| x[i] - y[i]) / sum(&|i| x[i])).sqrt()
    }

    /// Bars just above what the searches reach; rounding to the plain scale (largest value at the end of the grid)
    /// misses those of four and five bits.
    #[test]
    fn errors_stay_within_what_the_searches_reach() {
        let bars = [
            (Codec::F32, 0.0),
            (Codec::F16, 3e-4),
            (Codec::BF16, 2e-3),
            (Codec::Q8_0, 0.0052),
            (Codec::Q6K, 0.0173),
            (Codec::Q5_0, 0.0395),
            (Codec::Q5_1, 0.0335),
            (Codec::Q5K, 0.034),
            (Codec::Q4_0, 0.081),
            (Codec::Q4_1, 0.069),
            (Codec::Q4K, 0.069),
            (Codec::IQ4NL, 0.075),
        ];
        assert_eq!(bars.len(), encodable().count());
        for (codec, bar) in bars {
            let x = normal(7, 1 << 16, 0.02);
            let e = relative_error(&x, &round_trip(codec, &x));
            println!("{} {e:.5}", codec.name());
            assert!(e <= bar, "{}: {e}", codec.name());
        }
    }

    #[test]
    fn any_finite_range_encodes_to_finite_values_near_it() {
        for codec in encodable() {
            for exponent in -45..=4 {
                let scale = 10f32.powi(exponent);
                let mut x = normal(exponent.unsigned_abs() as u64 + 1, 512, scale);
                x[..32].fill(0.0);
                x[32..64].fill(scale); // all alike
                x[64..96].fill(-scale);
                x[100] = 6.0 * scale; // one far out
                let y = round_trip(codec, &x);
                // Half an f16 subnormal of scale is lost whatever an encoder does: times 63 * 31 at a Q5_K grid's end.
                let floor = if matches!(codec, Codec::F32 | Codec::BF16) { 0.0 } else { 6e-5 };
                for (x, y) in x.iter().zip(&y) {
                    assert!(
                        y.is_finite() && (x - y).abs() <= 1.2 * scale + floor,
                        "{}: {x} {y}",
                        codec.name()
                    );
                }
                assert!(y[..32].iter().all(|&v| v == 0.0), "{} {exponent}: zeros", codec.name());
                if exponent >= -3 {
                    let e = relative_error(&x, &y);
                    assert!(e < 0.15, "{} {exponent}: {e}", codec.name());
                }
            }
        }
    }

    #[test]
    fn what_a_codec_cannot_hold_is_named() {
        for codec in encodable() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65_536.0] {
                if bad == 65_536.0 && matches!(codec, Codec::F32 | Codec::BF16) {
                    continue;
                }
                let mut x = vec![0.5; 256];
                x[130] = bad;
                let mut out = vec![0; codec.row_bytes(256).unwrap()];
                let e = encode_row(codec, &x, &mut out).unwrap_err();
                assert_eq!((e.codec, e.column), (codec, 130));
                let text = e.at("m.gguf", "tensor w row 3").to_string();
                assert!(text.starts_with("m.gguf: tensor w row 3 column 130: expected finite"), "{text}");
            }
            let mut x = vec![0.0; 256];
            x[9] = max_value(codec);
            x[10] = -max_value(codec);
            assert!(round_trip(codec, &x).iter().all(|v| v.is_finite()), "{}", codec.name());
        }
    }

    /// Values on a codec's own grid come back exactly: nothing is lost by quantizing twice.
    #[test]
    fn a_grid_of_its_own_is_found_again() {
        for codec in [Codec::Q4_0, Codec::Q5_0, Codec::Q8_0, Codec::IQ4NL] {
            let x = normal(3, 4096, 0.1);
            let once = round_trip(codec, &x);
            let e = relative_error(&once, &round_trip(codec, &once));
            assert!(e < 0.02, "{}: {e}", codec.name());
        }
    }

    /// `cargo test --release -- --ignored --nocapture encode_speed`
    #[test]
    #[ignore = "a measurement, not a check"]
    fn encode_speed() {
        let x = normal(1, 1 << 22, 0.02);
        for codec in encodable() {
            let mut out = vec![0; codec.row_bytes(x.len()).unwrap()];
            let start = std::time::Instant::now();
            encode_row(codec, &x, &mut out).unwrap();
            println!(
                "{:7} {:6.1} M values/s",
                codec.name(),
                x.len() as f64 / start.elapsed().as_secs_f64() / 1e6
            );
        }
    }
}
