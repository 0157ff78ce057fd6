//! One row's 32 columns of any quantized codec, taken out of a file's block and put back.
//!
//! A [`Group`] is the meeting point: the file decoder, the tile decoder and the encoders all speak it, so that the
//! value of a code is written down once ([`Group::values`]) and a block's bit packing once ([`read`], [`write`]).
//! Block structs: `ggml/src/ggml-common.h`. All offsets below are byte offsets in those structs.

use super::codec::Codec;
use super::layout::GROUP;
use half::f16;

/// Values of the 16 codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of the 16 e2m1 codes of MXFP4, so that they are whole numbers; [`e8m0_half`] takes the half back.
pub const E2M1_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Codes and scales of 32 columns of one row, as unsigned codes (see the table in [`super::layout`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Group {
    /// Unsigned codes, column by column.
    pub codes: [u8; GROUP],
    /// f16 bits of `d`; MXFP4's e8m0 in the low byte.
    pub d: u16,
    /// f16 bits of `m` or `dmin`; 0 where the codec has none.
    pub m: u16,
    /// Scale codes: one a half group (16 columns), or the same one twice. Signed ones are i8 bits, already minus 32.
    pub sc: [u8; 2],
    /// Min code of Q4_K and Q5_K.
    pub mn: u8,
}

impl Group {
    /// The 32 values, in f32. The order of operations is the definition: `(d*sc)*q - dmin*mn`, each step rounded.
    pub fn values(&self, codec: Codec) -> [f32; GROUP] {
        let d = || f16::from_bits(self.d).to_f32();
        let m = || f16::from_bits(self.m).to_f32();
        // One scale a half for the codecs that have them; block-32 codecs use d for both.
        let signed = |h: usize| d() * self.sc[h] as i8 as f32;
        let q = |k: usize, zero: i32| (self.codes[k] as i32 - zero) as f32;
        use Codec::*;
        match codec {
            Q4_0 => per_half(|_| (d(), 0.0), |k, (d, _)| d * q(k, 8)),
            Q5_0 => per_half(|_| (d(), 0.0), |k, (d, _)| d * q(k, 16)),
            Q8_0 => per_half(|_| (d(), 0.0), |k, (d, _)| d * q(k, 128)),
            Q4_1 | Q5_1 => per_half(|_| (d(), m()), |k, (d, m)| d * q(k, 0) + m),
            Q4K | Q5K => {
                per_half(|_| (d() * self.sc[0] as f32, m() * self.mn as f32), |k, (d, m)| d * q(k, 0) - m)
            }
            Q2K => per_half(
                |h| (d() * (self.sc[h] & 15) as f32, m() * (self.sc[h] >> 4) as f32),
                |k, (d, m)| d * q(k, 0) - m,
            ),
            Q3K => per_half(|h| (signed(h), 0.0), |k, (d, _)| d * q(k, 4)),
            Q6K => per_half(|h| (signed(h), 0.0), |k, (d, _)| d * q(k, 32)),
            IQ4NL => per_half(|_| (d(), 0.0), |k, (d, _)| d * lut(&IQ4_VALUES, self.codes[k])),
            IQ4XS => per_half(|_| (signed(0), 0.0), |k, (d, _)| d * lut(&IQ4_VALUES, self.codes[k])),
            MXFP4 => {
                per_half(|_| (e8m0_half(self.d as u8), 0.0), |k, (d, _)| d * lut(&E2M1_VALUES, self.codes[k]))
            }
            F32 | F16 | BF16 | F8E4M3 => unreachable!("dense codecs have no groups"),
        }
    }
}

/// Fills 32 values with a scale pair computed once a half group.
#[inline(always)]
fn per_half(scale: impl Fn(usize) -> (f32, f32), value: impl Fn(usize, (f32, f32)) -> f32) -> [f32; GROUP] {
    let mut out = [0.0; GROUP];
    for h in 0..2 {
        let s = scale(h);
        for (j, out) in out[16 * h..][..16].iter_mut().enumerate() {
            *out = value(16 * h + j, s);
        }
    }
    out
}

#[inline(always)]
fn lut(table: &[i8; 16], code: u8) -> f32 {
    table[(code & 15) as usize] as f32
}

/// `2^(e - 128)`: half of the OCP scale `2^(e - 127)`, because [`E2M1_VALUES`] are doubled.
pub fn e8m0_half(e: u8) -> f32 {
    // The two smallest are subnormal in f32.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 })
}

/// `N` bytes of `b` from `at`.
#[inline(always)]
pub(super) fn bytes<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    *b[at..].first_chunk().expect("inside the block")
}

/// A little-endian u16.
#[inline(always)]
pub(super) fn word(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(b, at))
}

/// Scale and min codes (6 bits each) of the 8 groups from the 12 packed bytes of Q4_K and Q5_K, four at a time.
#[inline(always)]
pub(super) fn k4_scales_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let [a, b, c] = [0, 4, 8].map(|at| u32::from_le_bytes(bytes(packed, at)));
    let upper = |w: u32| (w >> 6 & 0x0303_0303) << 4;
    let join = |lo: u32, hi: u32| (lo as u64 | (hi as u64) << 32).to_le_bytes();
    (
        join(a & 0x3f3f_3f3f, c & 0x0f0f_0f0f | upper(a)),
        join(b & 0x3f3f_3f3f, c >> 4 & 0x0f0f_0f0f | upper(b)),
    )
}

/// Scale codes of the 16 half groups from the 12 packed bytes of Q3_K, minus 32 (i8 bits).
#[inline(always)]
pub(super) fn q3_scales(packed: &[u8; 12]) -> [u8; 16] {
    let [a, b, high] = [0, 4, 8].map(|at| u32::from_le_bytes(bytes(packed, at)));
    let mut out = [0; 16];
    for (i, low) in [a, b, a >> 4, b >> 4].into_iter().enumerate() {
        let codes = low & 0x0f0f_0f0f | (high >> (2 * i) & 0x0303_0303) << 4;
        out[4 * i..4 * i + 4].copy_from_slice(&codes.to_le_bytes().map(|c| c.wrapping_sub(32)));
    }
    out
}

/// Scale code (6 bits) of group `g` from an IQ4_XS block.
#[inline(always)]
pub(super) fn iq4xs_scale(b: &[u8], g: usize) -> u8 {
    b[4 + g / 2] >> (4 * (g % 2)) & 15 | ((word(b, 2) >> (2 * g)) as u8 & 3) << 4
}

/// 16 bytes whose low nibbles are columns 0..16 and high nibbles columns 16..32.
fn halves(q: [u8; 16]) -> [u8; GROUP] {
    std::array::from_fn(|k| if k < 16 { q[k] & 15 } else { q[k - 16] >> 4 })
}

/// A byte a column, of which `bits` bits from `shift` are ours.
fn fields(q: [u8; GROUP], shift: usize, bits: u32) -> [u8; GROUP] {
    q.map(|b| b >> shift & ((1 << bits) - 1))
}

/// Adds `high << shift` to each code.
fn join(mut low: [u8; GROUP], high: [u8; GROUP], shift: usize) -> [u8; GROUP] {
    for (l, h) in low.iter_mut().zip(high) {
        *l |= h << shift;
    }
    low
}

/// The bits of a u32, bit `k` for column `k`.
fn bits(word: u32) -> [u8; GROUP] {
    std::array::from_fn(|k| (word >> k & 1) as u8)
}

/// Where the K-quants keep group `g`'s part of a plane with `per` groups in a byte: (first byte / 32, shift index).
#[inline(always)]
fn place(g: usize, per: usize) -> (usize, usize) {
    (g / per, g % per)
}

/// Where Q6_K keeps the low nibbles of group `g`: (first byte, shift).
#[inline(always)]
fn q6_low(g: usize) -> (usize, usize) {
    (64 * (g / 4) + 32 * (g % 2), 4 * (g % 4 / 2))
}

/// Takes group `g` out of a file block (`block_bytes` of them).
pub fn read(codec: Codec, b: &[u8], g: usize) -> Group {
    use Codec::*;
    let (d, mut m, mut sc, mut mn) = (word(b, 0), 0, [0; 2], 0);
    let mut high = |at: usize| {
        m = word(b, 2);
        (sc, mn) = {
            let (s, n) = k4_scales_mins(&bytes(b, 4));
            ([s[g]; 2], n[g])
        };
        let (i, s) = place(g, 2);
        fields(bytes(b, at + 32 * i), 4 * s, 4)
    };
    let codes = match codec {
        Q4_0 | IQ4NL => halves(bytes(b, 2)),
        Q4_1 | Q5_1 => {
            m = word(b, 2);
            match codec {
                Q4_1 => halves(bytes(b, 4)),
                _ => join(halves(bytes(b, 8)), bits(u32::from_le_bytes(bytes(b, 4))), 4),
            }
        }
        Q5_0 => join(halves(bytes(b, 6)), bits(u32::from_le_bytes(bytes(b, 2))), 4),
        Q8_0 => bytes::<GROUP>(b, 2).map(|q| q ^ 0x80),
        Q4K => high(16),
        Q5K => join(high(48), fields(bytes(b, 16), g, 1), 4),
        Q2K => return read_q2k(b, g),
        Q3K => return read_q3k(b, g),
        Q6K => return read_q6k(b, g),
        IQ4XS => {
            sc = [iq4xs_scale(b, g).wrapping_sub(32); 2];
            halves(bytes(b, 8 + 16 * g))
        }
        MXFP4 => return Group { codes: halves(bytes(b, 1)), d: b[0] as u16, ..Group::default() },
        F32 | F16 | BF16 | F8E4M3 => unreachable!("dense codecs have no groups"),
    };
    Group { codes, d, m, sc, mn }
}

fn read_q2k(b: &[u8], g: usize) -> Group {
    let (i, s) = place(g, 4);
    let codes = fields(bytes(b, 16 + 32 * i), 2 * s, 2);
    Group { codes, d: word(b, 80), m: word(b, 82), sc: bytes(b, 2 * g), mn: 0 }
}

fn read_q3k(b: &[u8], g: usize) -> Group {
    let (i, s) = place(g, 4);
    let codes = join(fields(bytes(b, 32 + 32 * i), 2 * s, 2), fields(bytes(b, 0), g, 1), 2);
    let scales = q3_scales(&bytes(b, 96));
    let sc = [scales[2 * g], scales[2 * g + 1]];
    Group { codes, d: word(b, 108), m: 0, sc, mn: 0 }
}

fn read_q6k(b: &[u8], g: usize) -> Group {
    let (at, shift) = q6_low(g);
    let (i, s) = place(g, 4);
    let codes = join(fields(bytes(b, at), shift, 4), fields(bytes(b, 128 + 32 * i), 2 * s, 2), 4);
    Group { codes, d: word(b, 208), m: 0, sc: bytes(b, 192 + 2 * g), mn: 0 }
}

/// Ors `code >> from & mask` shifted by `shift` into 32 bytes, one a column.
fn or_fields(b: &mut [u8], at: usize, codes: &[u8; GROUP], from: usize, mask: u8, shift: usize) {
    for (b, c) in b[at..at + GROUP].iter_mut().zip(codes) {
        *b |= (c >> from & mask) << shift;
    }
}

/// Ors low nibbles of the codes into 16 bytes, columns 16..32 in the high nibbles.
fn or_halves(b: &mut [u8], at: usize, codes: &[u8; GROUP]) {
    for j in 0..16 {
        b[at + j] |= codes[j] & 15 | codes[16 + j] << 4;
    }
}

/// The 5th bits as a u32, bit `k` for column `k`.
fn fifth_bits(codes: &[u8; GROUP]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |w, (k, c)| w | ((c >> 4 & 1) as u32) << k).to_le_bytes()
}

/// Puts group `g` into a file block; the inverse of [`read`]. The block must be zero before its first group, because
/// groups share bytes.
pub fn write(codec: Codec, b: &mut [u8], g: usize, group: &Group) {
    use Codec::*;
    let codes = &group.codes;
    let put = |b: &mut [u8], at: usize, v: u16| b[at..at + 2].copy_from_slice(&v.to_le_bytes());
    match codec {
        MXFP4 => b[0] = group.d as u8,
        Q2K => put(b, 80, group.d),
        Q3K => put(b, 108, group.d),
        Q6K => put(b, 208, group.d),
        _ => put(b, 0, group.d),
    }
    match codec {
        Q4_1 | Q5_1 | Q4K | Q5K => put(b, 2, group.m),
        Q2K => put(b, 82, group.m),
        _ => {}
    }
    let (pair, s2) = place(g, 2);
    let (quad, s4) = place(g, 4);
    match codec {
        Q4_0 | IQ4NL => or_halves(b, 2, codes),
        MXFP4 => or_halves(b, 1, codes),
        Q4_1 => or_halves(b, 4, codes),
        Q5_0 => {
            b[2..6].copy_from_slice(&fifth_bits(codes));
            or_halves(b, 6, codes);
        }
        Q5_1 => {
            b[4..8].copy_from_slice(&fifth_bits(codes));
            or_halves(b, 8, codes);
        }
        Q8_0 => b[2..34].copy_from_slice(&codes.map(|c| c ^ 0x80)),
        Q4K => or_fields(b, 16 + 32 * pair, codes, 0, 15, 4 * s2),
        Q5K => {
            or_fields(b, 48 + 32 * pair, codes, 0, 15, 4 * s2);
            or_fields(b, 16, codes, 4, 1, g);
        }
        Q2K => or_fields(b, 16 + 32 * quad, codes, 0, 3, 2 * s4),
        Q3K => {
            or_fields(b, 32 + 32 * quad, codes, 0, 3, 2 * s4);
            or_fields(b, 0, codes, 2, 1, g);
        }
        Q6K => {
            let (at, shift) = q6_low(g);
            or_fields(b, at, codes, 0, 15, shift);
            or_fields(b, 128 + 32 * quad, codes, 4, 3, 2 * s4);
        }
        IQ4XS => or_halves(b, 8 + 16 * g, codes),
        F32 | F16 | BF16 | F8E4M3 => unreachable!("dense codecs have no groups"),
    }
    write_scales(codec, b, g, group);
}

/// Ors the packed scale codes of group `g` into a block.
fn write_scales(codec: Codec, b: &mut [u8], g: usize, group: &Group) {
    match codec {
        Codec::Q4K | Codec::Q5K => {
            let (s, (sc, mn)) = (&mut b[4..16], (group.sc[0], group.mn));
            if g < 4 {
                s[g] |= sc & 63;
                s[g + 4] |= mn & 63;
            } else {
                s[g + 4] |= sc & 15 | mn << 4;
                s[g - 4] |= sc >> 4 << 6;
                s[g] |= mn >> 4 << 6;
            }
        }
        Codec::Q2K => b[2 * g..2 * g + 2].copy_from_slice(&group.sc),
        Codec::Q6K => b[192 + 2 * g..194 + 2 * g].copy_from_slice(&group.sc),
        Codec::Q3K => {
            for h in 0..2 {
                let (k, sc) = (2 * g + h, group.sc[h].wrapping_add(32));
                b[96 + k % 8] |= (sc & 15) << (4 * (k / 8));
                b[104 + k % 4] |= (sc >> 4) << (2 * (k / 4));
            }
        }
        Codec::IQ4XS => {
            let sc = group.sc[0].wrapping_add(32);
            b[4 + g / 2] |= (sc & 15) << (4 * (g % 2));
            b[2 + g / 4] |= (sc >> 4) << (2 * (g % 4));
        }
        _ => {}
    }
}
