//! The kernels. Their numerics are a contract: each output is a fixed sequence of floating-point operations that depends
//! on the codec and the width alone. Not on how many rows are multiplied, which rows share a batch, which tiles a
//! thread has, or the instruction set. All of them must give the same bits, and tests compare with `==`.
//!
//! **Quantized activations** ([`quantize`](vector::quantize)): a group of 32 columns has `amax = max |x|`,
//! `dx` the smallest power of two with `amax <= 1904 * dx`, codes `round_half_even(x / dx)` of 12 bits, held as int8 parts
//! that byte dot products take ([`Q8Group`](vector::Q8Group) says how): int8 alone moves SmolLM2's log-probabilities by 0.1
//! (its top 8, on average), this by 0.0104, and 14 bits, which take four products for two columns, by 0.002. A power of
//! two, so that a product by it is exact, and free where integers become floats.
//! A group with `amax < 2^-80` is all zero; one with `amax >= 2^100`, an infinity or NaN has `dx = NaN`, so that
//! the fault shows in the output.
//!
//! **Quantized product** of a weight row with groups `g` in order; `idot` is an exact integer sum, below 2^23
//! (Q8_0, the largest: `32 * 128 * 1904`), so that it and its products by `dx` are exact in f32:
//!
//! ```text
//! idot = Σ code_w * code_x                     codes signed: the codec's offset is taken off in integers
//! acc  = fma(s * dx, idot, acc)                s = d | d*sc (exact) | 2^(e-128); two half groups, in their order, for the
//!                                              codecs with a scale for each (Q2_K Q3_K Q6_K)
//! acc  = fma(m, dx * Σ code_x as f32, acc)     m = m | -(dmin*mn) (exact), for the codecs with mins;
//!                                              Q2_K: twice, one a half group
//! ```
//!
//! **Float product** (dense codecs; quantized ones in exact runs): `w` is the weight as f32, `s*code` or `s*code + m`,
//! and `a[k % 4] = fma(w, x[k], a[k % 4])` in the order of `k`; the result is `(a0 + a1) + (a2 + a3)`.
//!
//! **Sums over a vector** (norms, scores, softmax) keep 16 partial sums by `k % 16` and add them as a tree:
//! lanes 8 apart, then 4, 2, 1. Columns missing from the last 16 count as 0.

// Loops over registers are written with indices: a closure is a function of its own, which lacks the instruction
// set's features and may not be inlined.
#![allow(clippy::needless_range_loop)]
// An `unsafe fn` of a SIMD trait asks for nothing of its own: the instruction set is there, and pointers are good for
// the lanes that its name says. Saying so at each of a hundred one-line operations would hide the few that ask for more.
#![allow(clippy::missing_safety_doc)]

pub mod attend;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod bench;
pub mod codecs;
pub mod dense;
pub mod entry;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod q8;
pub mod scalar;
pub mod simd;
pub mod vector;

use crate::backend::cpu::ops::{Out, Rows};
use crate::format::layout::TILE_ROWS;
use crate::weights::Matrix;
use std::ops::Range;

/// What a matrix product works on; `T` is [`vector::Q8Group`] or f32. Lengths were checked when it was made.
pub struct Product<'a, T> {
    /// The weights.
    pub w: &'a Matrix,
    /// Tiles of `w` to compute.
    pub tiles: Range<usize>,
    /// Activations, `(n, per_row)`.
    pub x: &'a [T],
    /// Elements of a row of `x`.
    pub per_row: usize,
    /// Rows of `x` to multiply; the i-th gives row i of `out`.
    pub rows: Rows<'a>,
    /// Where results go.
    pub out: Out<'a>,
}

impl<T> Product<'_, T> {
    /// The i-th activation row.
    #[inline(always)]
    pub fn row(&self, i: usize) -> &[T] {
        &self.x[self.rows.at(i) * self.per_row..][..self.per_row]
    }

    /// Writes the rows of tile `t` that exist.
    #[inline(always)]
    pub fn write(&self, i: usize, t: usize, values: &[f32; TILE_ROWS]) {
        let n = TILE_ROWS.min(self.w.rows - t * TILE_ROWS);
        // SAFETY: `Ops` checked that row i holds the matrix's last column, and that the tiles are the caller's.
        unsafe {
            let to = self.out.at(i, t * TILE_ROWS);
            if n == TILE_ROWS {
                to.cast::<[f32; TILE_ROWS]>().write(*values);
            } else {
                std::ptr::copy_nonoverlapping(values.as_ptr(), to, n);
            }
        }
    }
}

#[cfg(test)]
mod count;
#[cfg(test)]
mod tests;
