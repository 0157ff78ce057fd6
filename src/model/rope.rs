//! Rotary frequencies, as Hugging Face transformers computes them (`modeling_rope_utils.py`).

use super::hyper::{RopeHyper, RopePairs, RopeScaling};
use std::f64::consts::PI;

/// Frequencies ready for use.
#[derive(Debug, Clone)]
pub struct Rope {
    /// Pairing.
    pub pairs: RopePairs,
    /// Turn a position, `(dims/2)` f32.
    pub inv_freq: Vec<f32>,
    /// What cosine and sine are multiplied by.
    pub attention_factor: f32,
}

impl Rope {
    /// Computes the frequencies.
    pub fn new(h: &RopeHyper) -> Rope {
        let n = h.dims / 2;
        // The reference raises and divides in f32; doing it in f64 and rounding once differs by under one ulp.
        let pos_freqs: Vec<f64> =
            (0..n).map(|i| f64::from(h.theta).powf((2 * i) as f64 / h.dims as f64)).collect();
        let plain: Vec<f64> = pos_freqs.iter().map(|f| 1.0 / f).collect();
        let mut attention_factor = 1.0;
        let inv: Vec<f64> = match &h.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|f| f / f64::from(*factor)).collect(),
            RopeScaling::Factors(v) => plain.iter().zip(v).map(|(f, d)| f / f64::from(*d)).collect(),
            RopeScaling::Llama3 { factor, low_freq, high_freq, original_tokens } => {
                let (factor, low, high) = (f64::from(*factor), f64::from(*low_freq), f64::from(*high_freq));
                let original = f64::from(*original_tokens);
                plain.iter().map(|&f| llama3(f, factor, low, high, original)).collect()
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_tokens,
                attention_factor: a,
                truncate,
            } => {
                attention_factor = *a;
                let dim_of = |rotations: f32| {
                    let turns = f64::from(*original_tokens) / (f64::from(rotations) * 2.0 * PI);
                    h.dims as f64 * turns.ln() / (2.0 * f64::from(h.theta).ln())
                };
                let (mut low, mut high) = (dim_of(*beta_fast), dim_of(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(h.dims as f64 - 1.0));
                if low == high {
                    high += 0.001; // the reference's guard against a division by zero
                }
                let blend = |(i, &f): (usize, &f64)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / f64::from(*factor) * ramp + f * (1.0 - ramp)
                };
                plain.iter().enumerate().map(blend).collect()
            }
        };
        Rope { pairs: h.pairs, inv_freq: inv.iter().map(|&f| f as f32).collect(), attention_factor }
    }

    /// Elements of a head that are turned.
    pub fn dims(&self) -> usize {
        self.inv_freq.len() * 2
    }

    /// Cosine and sine of each frequency at `position`, both `(dims/2)`. The angle is rounded to f32 as the reference
    /// rounds it.
    pub fn angles(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((f, c), s) in self.inv_freq.iter().zip(cos).zip(sin) {
            let angle = f64::from(position as f32 * f);
            *c = angle.cos() as f32 * self.attention_factor;
            *s = angle.sin() as f32 * self.attention_factor;
        }
    }

    /// Turns one head in place by the angles that [`Rope::angles`] gave; elements past `dims` stay.
    pub fn turn(&self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let n = self.inv_freq.len();
        for i in 0..n {
            let (a, b) = match self.pairs {
                RopePairs::Interleaved => (2 * i, 2 * i + 1),
                RopePairs::Half => (i, n + i),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * cos[i] - y * sin[i];
            head[b] = y * cos[i] + x * sin[i];
        }
    }
}

/// One Llama 3.1 frequency.
fn llama3(f: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI / f;
    if wavelength < original / high {
        f
    } else if wavelength > original / low {
        f / factor
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * f / factor + smooth * f
    }
}

/// YaRN's magnitude correction: `0.1 * mscale * ln(scale) + 1`.
pub fn yarn_mscale(scale: f64, mscale: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
}
