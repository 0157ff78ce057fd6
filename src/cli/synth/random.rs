//! Random rows directly in a codec's blocks: codes are random bits, scales are set so that values have mean zero and the
//! wanted spread. Encoding floats would be a hundred times slower and give the same.

use crate::format::{Codec, f16};

/// A 64-bit generator (splitmix64: one multiplication chain a number, any seed good).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The stream `index` of `seed`.
    pub fn new(seed: u64, index: u64) -> Random {
        let mut r = Random(seed ^ index.wrapping_mul(0xd134_2543_de82_ef95));
        r.next();
        Random(r.next() ^ seed)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        let (words, tail) = out.as_chunks_mut::<8>();
        words.iter_mut().for_each(|w| *w = self.next().to_le_bytes());
        let last = self.next().to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }

    /// Uniform with mean 0 and standard deviation 1.
    pub fn uniform(&mut self) -> f32 {
        // 24 bits, which a float holds exactly, centred.
        let bits = (self.next() >> 40) as f32;
        ((bits + 0.5) / (1 << 24) as f32 - 0.5) * 12f32.sqrt()
    }

    /// Close to normal with mean 0 and standard deviation 1: the sum of twelve.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() / 12f32.sqrt()
    }
}

/// Standard deviation of a code uniform over `n` integers.
fn code_std(n: u32) -> f32 {
    ((n * n - 1) as f32 / 12.0).sqrt()
}

/// Fills whole blocks of `codec` with values of mean 0 and standard deviation `std`.
///
/// Codes of most codecs lie one further below zero than above; a scale of random sign in each block evens that out.
pub fn blocks(codec: Codec, std: f32, random: &mut Random, out: &mut [u8]) {
    let f = |x: f32| f16::from_f32(x).to_le_bytes();
    /// 6-bit and 8-bit sub-scales of K-quants: all the same, chosen so that the super-block's scale is no subnormal.
    const SUB_SCALE: u8 = 8;
    match codec {
        Codec::F32 => {
            let values = out.as_chunks_mut::<4>().0;
            values.iter_mut().for_each(|v| *v = (std * random.uniform()).to_le_bytes());
        }
        Codec::F16 => {
            let values = out.as_chunks_mut::<2>().0;
            values.iter_mut().for_each(|v| *v = f(std * random.uniform()));
        }
        Codec::Q4_0 | Codec::Q5_0 | Codec::Q8_0 => {
            let codes = match codec {
                Codec::Q4_0 => 16,
                Codec::Q5_0 => 32,
                _ => 256,
            };
            let d = f(std / code_std(codes));
            random.fill(out);
            for b in out.chunks_exact_mut(codec.info().block_bytes) {
                signed(&mut b[..2], d);
            }
        }
        Codec::Q4K | Codec::Q5K => {
            let codes = if codec == Codec::Q4K { 16 } else { 32 };
            let d = std / code_std(codes) / f32::from(SUB_SCALE);
            // d, dmin, then eight scales and eight mins of 6 bits; the mins put zero in the middle of the codes.
            let mut head = [0; 16];
            head[..2].copy_from_slice(&f(d));
            head[2..4].copy_from_slice(&f(d * (codes - 1) as f32 / 2.0));
            head[4..12].fill(SUB_SCALE);
            head[12..].fill(SUB_SCALE | SUB_SCALE << 4);
            random.fill(out);
            for b in out.chunks_exact_mut(codec.info().block_bytes) {
                b[..16].copy_from_slice(&head);
            }
        }
        Codec::Q6K => {
            let d = f(std / code_std(64) / f32::from(SUB_SCALE));
            random.fill(out);
            for b in out.chunks_exact_mut(codec.info().block_bytes) {
                b[192..208].fill(SUB_SCALE);
                signed(&mut b[208..], d);
            }
        }
        other => unreachable!("no target gives {}", other.name()),
    }
}

/// Sets a block's scale to `d` or `-d`, by a random bit that stands there.
fn signed(at: &mut [u8], d: [u8; 2]) {
    let sign = at[1] & 0x80;
    at.copy_from_slice(&d);
    at[1] ^= sign;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::decode_row;

    #[test]
    fn values_have_mean_zero_and_the_spread_asked_for() {
        use Codec::*;
        for codec in [F32, F16, Q4_0, Q5_0, Q8_0, Q4K, Q5K, Q6K] {
            let n = 256 * 4000;
            let (std, mut random) = (0.02f32, Random::new(5, 1));
            let mut bytes = vec![0; codec.row_bytes(n).unwrap()];
            blocks(codec, std, &mut random, &mut bytes);
            let mut values = vec![0.0; n];
            decode_row(codec, &bytes, &mut values);
            let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
            let spread = (values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64).sqrt();
            assert!(mean.abs() < 2e-4, "{}: mean {mean}", codec.name());
            assert!((spread / f64::from(std) - 1.0).abs() < 0.02, "{}: {spread}", codec.name());
        }
    }

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let take = |seed, index| Random::new(seed, index).next();
        assert_eq!(take(1, 2), take(1, 2));
        assert_ne!(take(1, 2), take(1, 3));
        assert_ne!(take(1, 2), take(2, 2));
        let mut random = Random::new(9, 9);
        let n = 100_000;
        let squares: f32 = (0..n).map(|_| random.normal().powi(2)).sum();
        assert!((squares / n as f32 - 1.0).abs() < 0.02);
    }
}
