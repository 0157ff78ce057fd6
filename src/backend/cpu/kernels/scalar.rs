//! The definition of the matrix products, in plain Rust and as plainly as it goes. `mod.rs` states the formulas.

use super::Product;
use super::vector::Q8Group;
use crate::format::Codec;
use crate::format::layout::{F8_BLOCK, GROUP, SUPER, TILE_ROWS};
use crate::format::{bf16, f16};
use crate::weights::Matrix;

/// 16 values, one a row of a tile.
type Tile<T> = [T; TILE_ROWS];

/// IQ4_NL's and IQ4_XS's code values (`kvalues_iq4nl` in ggml).
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// MXFP4's code values times two (the block scale is halved): E2M1 as in the OCP Microscaling specification.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A 16-bit little-endian float's bits at index `i` of a plane.
fn u16_at(plane: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([plane[2 * i], plane[2 * i + 1]])
}

fn f32_at(plane: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([plane[4 * i], plane[4 * i + 1], plane[4 * i + 2], plane[4 * i + 3]])
}

fn f16_at(plane: &[u8], i: usize) -> f32 {
    f16::from_bits(u16_at(plane, i)).to_f32()
}

/// `2^(e - 128)`: an E8M0 scale, halved because [`MXFP4_VALUES`] are doubled.
fn e8m0_half(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 };
    f32::from_bits(bits)
}

/// FP8 e4m3fn: no infinities, one NaN a sign.
fn f8_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = ((byte >> 3) & 15, f32::from(byte & 7));
    let value = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * (1.0 / 512.0),
        _ => (8.0 + mantissa) * f32::from_bits((u32::from(exponent) + 117) << 23),
    };
    if byte & 0x80 != 0 { -value } else { value }
}

/// A group of one weight row: what `Σ` in the contract runs over.
struct RowGroup {
    /// Codes with the offset taken off.
    codes: [i32; GROUP],
    /// `s` for the codecs without half-group scales; else `d`.
    scale: f32,
    /// Half-group scales, if the codec has them.
    half_scales: Option<[i32; 2]>,
    /// Mins of columns 0..16 and 16..32, if the codec has them.
    mins: Option<[f32; 2]>,
}

/// Reads group `g` of row `16t + r`.
fn row_group(w: &Matrix, t: usize, g: usize, r: usize) -> RowGroup {
    let groups = w.cols / GROUP;
    let tg = t * groups + g;
    let (d, m) = (w.planes.d.of(&w.bytes), w.planes.m.of(&w.bytes));
    let (sc, mn) = (w.planes.sc.of(&w.bytes), w.planes.mn.of(&w.bytes));
    let at = tg * TILE_ROWS + r;
    let half = |h: usize| (tg * 2 + h) * TILE_ROWS + r;
    let sup = || (t * (w.cols / SUPER) + g * GROUP / SUPER) * TILE_ROWS + r;
    let codes = std::array::from_fn(|k| code(w, tg, r, k));
    let halves = || Some([i32::from(sc[half(0)] as i8), i32::from(sc[half(1)] as i8)]);
    let (scale, half_scales, mins) = match w.codec {
        Codec::Q4_0 | Codec::Q5_0 | Codec::Q8_0 | Codec::IQ4NL => (f16_at(d, at), None, None),
        Codec::Q4_1 | Codec::Q5_1 => (f16_at(d, at), None, Some([f16_at(m, at); 2])),
        Codec::MXFP4 => (e8m0_half(d[at]), None, None),
        Codec::IQ4XS => (f16_at(d, sup()) * f32::from(sc[at] as i8), None, None),
        Codec::Q4K | Codec::Q5K => {
            let min = -(f16_at(m, sup()) * f32::from(mn[at]));
            (f16_at(d, sup()) * f32::from(sc[at]), None, Some([min; 2]))
        }
        Codec::Q3K | Codec::Q6K => (f16_at(d, sup()), halves(), None),
        Codec::Q2K => {
            let pairs = [sc[half(0)], sc[half(1)]];
            let mins = pairs.map(|p| -(f16_at(m, sup()) * f32::from(p >> 4)));
            (f16_at(d, sup()), Some(pairs.map(|p| i32::from(p & 15))), Some(mins))
        }
        Codec::F32 | Codec::F16 | Codec::BF16 | Codec::F8E4M3 => unreachable!("dense codecs have no groups"),
    };
    RowGroup { codes, scale, half_scales, mins }
}

/// The code of column `k` of a (tile, group), offset taken off.
fn code(w: &Matrix, tg: usize, r: usize, k: usize) -> i32 {
    let (codes, high) = (w.planes.codes.of(&w.bytes), w.planes.high.of(&w.bytes));
    let (c, lane) = (k / 4, 4 * r + k % 4);
    let nib = || (codes[tg * 256 + 64 * (c % 4) + lane] >> (4 * (c / 4))) & 15;
    let bit1 = || (high[tg * 64 + lane] >> c) & 1;
    let bit2 = |plane: &[u8]| (plane[tg * 128 + 64 * (c / 4) + lane] >> (2 * (c % 4))) & 3;
    match w.codec {
        Codec::Q4_0 => i32::from(nib()) - 8,
        Codec::Q4_1 | Codec::Q4K => i32::from(nib()),
        Codec::Q5_0 => i32::from(nib() | bit1() << 4) - 16,
        Codec::Q5_1 | Codec::Q5K => i32::from(nib() | bit1() << 4),
        Codec::Q8_0 => i32::from(codes[tg * 512 + 64 * c + lane]) - 128,
        Codec::Q2K => i32::from(bit2(codes)),
        Codec::Q3K => i32::from(bit2(codes) | bit1() << 2) - 4,
        Codec::Q6K => i32::from(nib() | bit2(high) << 4) - 32,
        Codec::IQ4NL | Codec::IQ4XS => i32::from(IQ4_VALUES[usize::from(nib())]),
        Codec::MXFP4 => i32::from(MXFP4_VALUES[usize::from(nib())]),
        Codec::F32 | Codec::F16 | Codec::BF16 | Codec::F8E4M3 => unreachable!("dense codecs have no codes"),
    }
}

/// The quantized product of one weight row and one activation row.
fn dot_q8(w: &Matrix, t: usize, r: usize, x: &[Q8Group]) -> f32 {
    let mut acc = 0f32;
    for (g, x) in x.iter().enumerate() {
        let group = row_group(w, t, g, r);
        let products: [i32; GROUP] = std::array::from_fn(|k| group.codes[k] * x.code(k));
        let sum = |half: usize| products[16 * half..][..16].iter().sum::<i32>();
        match group.half_scales {
            None => acc = (group.scale * x.d()).mul_add((sum(0) + sum(1)) as f32, acc),
            Some(half_scales) => {
                for (half, sc) in half_scales.into_iter().enumerate() {
                    acc = (group.scale * sc as f32 * x.d()).mul_add(sum(half) as f32, acc);
                }
            }
        }
        match group.mins {
            None => {}
            Some(mins) if w.codec == Codec::Q2K => {
                acc = mins[0].mul_add(x.apart.half_d[0], acc);
                acc = mins[1].mul_add(x.apart.half_d[1], acc);
            }
            Some(mins) => acc = mins[0].mul_add(x.sum_d, acc),
        }
    }
    acc
}

/// One weight as f32: row `16t + r`, column `k`, of a dense codec.
fn dense_weight(w: &Matrix, t: usize, r: usize, k: usize) -> f32 {
    let codes = w.planes.codes.of(&w.bytes);
    let i = (t * w.cols + k) * TILE_ROWS + r;
    match w.codec {
        Codec::F32 => f32_at(codes, i),
        Codec::F16 => f16_at(codes, i),
        Codec::BF16 => bf16::from_bits(u16_at(codes, i)).to_f32(),
        _ => {
            let row = t * TILE_ROWS / F8_BLOCK;
            let block = row * w.cols.div_ceil(F8_BLOCK) + k / F8_BLOCK;
            f8_e4m3(codes[i]) * f32_at(w.planes.d.of(&w.bytes), block)
        }
    }
}

/// Weights of row `16t + r` from column `k`, at most a group of them (all in one group for a quantized codec).
fn weights(w: &Matrix, t: usize, r: usize, k: usize, out: &mut [f32]) {
    if w.codec.is_dense() {
        out.iter_mut().enumerate().for_each(|(i, out)| *out = dense_weight(w, t, r, k + i));
        return;
    }
    let group = row_group(w, t, k / GROUP, r);
    for (i, out) in out.iter_mut().enumerate() {
        let half = (k + i) % GROUP / 16;
        let scale = match group.half_scales {
            None => group.scale,
            Some(sc) => group.scale * sc[half] as f32,
        };
        let value = scale * group.codes[(k + i) % GROUP] as f32;
        *out = group.mins.map_or(value, |mins| value + mins[half]);
    }
}

/// Dequantizes one row, exactly as the float product sees it.
pub fn dequant_row(w: &Matrix, row: usize, out: &mut [f32]) {
    for (i, out) in out.chunks_mut(GROUP).enumerate() {
        weights(w, row / TILE_ROWS, row % TILE_ROWS, i * GROUP, out);
    }
}

/// Quantized product; see [`Product`].
///
/// # Safety
/// None beyond what [`Product`] says; unsafe like its siblings on other instruction sets.
pub unsafe fn matmul_q8(p: &Product<'_, Q8Group>) {
    for t in p.tiles.clone() {
        for i in 0..p.rows.len() {
            let out: Tile<f32> = std::array::from_fn(|r| dot_q8(p.w, t, r, p.row(i)));
            p.write(i, t, &out);
        }
    }
}

/// Float product; see [`Product`].
///
/// # Safety
/// None beyond what [`Product`] says; unsafe like its siblings on other instruction sets.
pub unsafe fn matmul_f32(p: &Product<'_, f32>) {
    for t in p.tiles.clone() {
        for i in 0..p.rows.len() {
            let out: Tile<f32> = std::array::from_fn(|r| dot_f32(p.w, t, r, p.row(i)));
            p.write(i, t, &out);
        }
    }
}

/// The float product of one weight row and one activation row.
fn dot_f32(w: &Matrix, t: usize, r: usize, x: &[f32]) -> f32 {
    let mut a = [0f32; 4];
    let mut buffer = [0f32; GROUP];
    for (g, x) in x.chunks(GROUP).enumerate() {
        let weights_of_group = &mut buffer[..x.len()];
        weights(w, t, r, g * GROUP, weights_of_group);
        for (k, (x, w)) in x.iter().zip(weights_of_group).enumerate() {
            a[k % 4] = w.mul_add(*x, a[k % 4]);
        }
    }
    (a[0] + a[1]) + (a[2] + a[3])
}
