//! The quantized codecs as rows of a table: how a (tile, group) becomes eight registers of codes, a scale and a min.
//! Everything else is common to all. `layout.rs` says where each part lies.

use super::scalar::{IQ4_VALUES, MXFP4_VALUES};
use super::simd::SimdDot;
use crate::format::layout::{GROUP, SUPER, TILE_ROWS};
use crate::weights::Matrix;

/// The planes of a matrix.
#[derive(Clone, Copy)]
pub struct PlanePtrs {
    codes: *const u8,
    high: *const u8,
    d: *const u8,
    m: *const u8,
    sc: *const u8,
    mn: *const u8,
}

impl PlanePtrs {
    /// The planes of `w`; a plane that the codec lacks is empty.
    pub fn of(w: &Matrix) -> PlanePtrs {
        let (p, bytes) = (&w.planes, &*w.bytes);
        let at = |plane: &crate::format::layout::Plane| plane.of(bytes).as_ptr();
        PlanePtrs {
            codes: at(&p.codes),
            high: at(&p.high),
            d: at(&p.d),
            m: at(&p.m),
            sc: at(&p.sc),
            mn: at(&p.mn),
        }
    }

    /// First byte of the `d` plane.
    pub fn scales(&self) -> *const u8 {
        self.d
    }

    /// First byte of the codes.
    pub fn codes(&self) -> *const u8 {
        self.codes
    }
}

/// A (tile, group) and the first of the `W` rows that a register holds.
#[derive(Clone, Copy)]
pub struct At {
    /// `tile * groups + group`.
    tile_group: usize,
    /// `tile * supers + super-block`.
    tile_super: usize,
    /// First row in the tile.
    row: usize,
}

impl At {
    /// Group `g` of tile `t` of a matrix with `cols` columns, from row `row` of the tile on.
    #[inline(always)]
    pub fn new(t: usize, g: usize, cols: usize, row: usize) -> At {
        At { tile_group: t * (cols / GROUP) + g, tile_super: t * (cols / SUPER) + g / (SUPER / GROUP), row }
    }

    /// Index in a plane with one value a (group, row).
    #[inline(always)]
    fn group(&self) -> usize {
        self.tile_group * TILE_ROWS + self.row
    }

    /// Index in a plane with one value a (half group, row).
    #[inline(always)]
    fn half(&self, half: usize) -> usize {
        (self.tile_group * 2 + half) * TILE_ROWS + self.row
    }

    /// Index in a plane with one value a (super-block, row).
    #[inline(always)]
    fn sup(&self) -> usize {
        self.tile_super * TILE_ROWS + self.row
    }
}

/// What multiplies a group's integer dot.
#[derive(Clone, Copy)]
pub enum Mins {
    /// The codec has no mins.
    None,
    /// One a group.
    Group,
    /// One a half group.
    Half,
}

/// One row of the table.
///
/// # Safety
/// Every function needs the planes of a matrix of this codec, a place inside it, and the instruction set.
#[allow(missing_docs)]
pub trait Codec8 {
    /// Codes are below `2^BITS`; 8 means that `unpack` follows [`SimdDot::SIGNED_BYTES`].
    const BITS: u32;
    /// Log2 of the offset that codes carry (`BITS < 8`); 0 for none.
    const OFFSET: u32 = 0;
    /// True if scales are of super-blocks of [`SUPER`] columns.
    const SUPERS: bool = false;
    /// True if each half group has an integer scale.
    const HALVES: bool = false;
    const MINS: Mins = Mins::None;
    /// True if the codes plane holds plain 4-bit codes, columns `c` and `c + 16` in a byte, and a group has one scale.
    const NIBBLES: bool = false;
    /// Bytes of the codes plane a (tile, group): what is prefetched.
    const CODE_BYTES: usize = 256;
    /// How far ahead of the codes in use the next ones are fetched, when a tile is read once.
    const AHEAD_BYTES: usize = super::q8::PREFETCH_BYTES;
    /// True if the `d` plane, which then has an f16 a (group, row), is fetched ahead too.
    const FETCH_SCALES: bool = false;

    /// Codes of columns `4c..4c+4` in register c.
    unsafe fn unpack<S: SimdDot>(p: &PlanePtrs, at: At) -> [S::B; 8];
    /// For `NIBBLES`, what [`SimdDot::dot_coupled`] takes: the bytes as they are, and apart.
    #[inline(always)]
    unsafe fn coupled<S: SimdDot>(p: &PlanePtrs, at: At) -> ([S::B; 4], [S::B; 8]) {
        let base = p.codes.wrapping_add(at.tile_group * 256 + 4 * at.row);
        // SAFETY: by the contract.
        unsafe {
            let raw = [
                S::load_b(base),
                S::load_b(base.add(64)),
                S::load_b(base.add(128)),
                S::load_b(base.add(192)),
            ];
            let mut apart = [raw[0]; 8];
            for c in 0..4 {
                apart[c] = S::and_b(S::shl_b::<4>(raw[c]), S::splat_b(0xf0));
                apart[4 + c] = S::and_b(S::shr_b::<4>(raw[c]), S::splat_b(0x0f));
            }
            (raw, apart)
        }
    }
    /// For `SUPERS`, what groups of a super-block share: `d`, and `-dmin` if there are mins.
    #[inline(always)]
    unsafe fn shared<S: SimdDot>(p: &PlanePtrs, at: At) -> [S::F; 2] {
        // SAFETY: by the contract.
        unsafe {
            let none = S::splat(0.0);
            let min = || S::mul(f16s::<S>(p.m, at.sup()), S::splat(-1.0));
            match (Self::SUPERS, Self::MINS) {
                (false, _) => [none; 2],
                (true, Mins::None) => [f16s::<S>(p.d, at.sup()), none],
                (true, _) => [f16s::<S>(p.d, at.sup()), min()],
            }
        }
    }
    /// The scale: `d` alone if the codec has half-group scales. `shared` is what [`Codec8::shared`] gives.
    #[inline(always)]
    unsafe fn scale<S: SimdDot>(_: &PlanePtrs, _: At, shared: &[S::F; 2]) -> S::F {
        shared[0]
    }
    /// Half-group scales.
    #[inline(always)]
    unsafe fn half_scale<S: SimdDot>(p: &PlanePtrs, at: At, half: usize) -> S::I {
        // SAFETY: by the contract.
        unsafe { S::load_i8(p.sc.add(at.half(half))) }
    }
    /// The min that is added: of the group, or of a half.
    #[inline(always)]
    unsafe fn min<S: SimdDot>(_: &PlanePtrs, _: At, _half: usize, _shared: &[S::F; 2]) -> S::F {
        // SAFETY: by the contract.
        unsafe { S::splat(0.0) }
    }
}

// Parts, as layout.rs names them. Each reads the 4*W bytes of the rows from `at.row` on.

/// `nib`: eight registers of 4-bit codes.
#[inline(always)]
unsafe fn nib<S: SimdDot>(p: &PlanePtrs, at: At) -> [S::B; 8] {
    // SAFETY: by the contract of Codec8.
    unsafe {
        let base = p.codes.add(at.tile_group * 256 + 4 * at.row);
        let mask = S::splat_b(15);
        let (b0, b1) = (S::load_b(base), S::load_b(base.add(64)));
        let (b2, b3) = (S::load_b(base.add(128)), S::load_b(base.add(192)));
        [
            S::and_b(b0, mask),
            S::and_b(b1, mask),
            S::and_b(b2, mask),
            S::and_b(b3, mask),
            S::and_b(S::shr_b::<4>(b0), mask),
            S::and_b(S::shr_b::<4>(b1), mask),
            S::and_b(S::shr_b::<4>(b2), mask),
            S::and_b(S::shr_b::<4>(b3), mask),
        ]
    }
}

/// `bit1` placed at bit `TO` (2 or 4), and-ed into place and or-ed onto `low`.
macro_rules! with_bit1 {
    ($S:ty, $p:expr, $at:expr, $low:expr, $to:literal) => {{
        let low = $low;
        let bits = <$S>::load_b($p.high.add($at.tile_group * 64 + 4 * $at.row));
        let mask = <$S>::splat_b(1 << $to);
        macro_rules! place {
            ($c:literal) => {{
                // Bit $c goes to bit $to; a shift by 0 costs nothing.
                let moved = if $c <= $to {
                    <$S>::shl_b::<{ if $c <= $to { $to - $c } else { 0 } }>(bits)
                } else {
                    <$S>::shr_b::<{ if $c > $to { $c - $to } else { 0 } }>(bits)
                };
                <$S>::or_b(low[$c], <$S>::and_b(moved, mask))
            }};
        }
        [place!(0), place!(1), place!(2), place!(3), place!(4), place!(5), place!(6), place!(7)]
    }};
}

/// `bit2`: eight registers of 2-bit codes, moved up to bit `UP` (0 or 4).
macro_rules! bit2 {
    ($S:ty, $plane:expr, $at:expr, $up:literal) => {{
        let base = $plane.add($at.tile_group * 128 + 4 * $at.row);
        let b = [<$S>::load_b(base), <$S>::load_b(base.add(64))];
        let mask = <$S>::splat_b(3 << $up);
        macro_rules! place {
            ($h:literal, $j:literal) => {{
                let moved = if 2 * $j <= $up {
                    <$S>::shl_b::<{ if 2 * $j <= $up { $up - 2 * $j } else { 0 } }>(b[$h])
                } else {
                    <$S>::shr_b::<{ if 2 * $j > $up { 2 * $j - $up } else { 0 } }>(b[$h])
                };
                <$S>::and_b(moved, mask)
            }};
        }
        [
            place!(0, 0),
            place!(0, 1),
            place!(0, 2),
            place!(0, 3),
            place!(1, 0),
            place!(1, 1),
            place!(1, 2),
            place!(1, 3),
        ]
    }};
}

/// Code values from a table of 16: signed, or plus 128 where bytes are unsigned.
#[inline(always)]
unsafe fn table<S: SimdDot>(p: &PlanePtrs, at: At, values: &[i8; 16]) -> [S::B; 8] {
    let flip = if S::SIGNED_BYTES { 0 } else { 0x80 };
    let mut bytes = [0u8; 16];
    for i in 0..16 {
        bytes[i] = values[i] as u8 ^ flip;
    }
    // SAFETY: by the contract of Codec8.
    unsafe {
        let mut codes = nib::<S>(p, at);
        for c in 0..8 {
            codes[c] = S::lookup_b(&bytes, codes[c]);
        }
        codes
    }
}

/// An f16 plane's `W` values from index `i`.
#[inline(always)]
unsafe fn f16s<S: SimdDot>(plane: *const u8, i: usize) -> S::F {
    // SAFETY: by the contract of Codec8; f16 planes start on 64-byte boundaries.
    unsafe { S::load_f16(plane.cast::<u16>().add(i)) }
}

/// A super-block's scale or min times an unsigned 8-bit one of the group: exact.
#[inline(always)]
unsafe fn times_u8<S: SimdDot>(shared: S::F, plane: *const u8, at: At) -> S::F {
    // SAFETY: by the contract of Codec8.
    unsafe { S::mul(shared, S::to_f(S::load_u8(plane.add(at.group())))) }
}

/// Declares table rows: `Name { consts } S p at half shared: unpack expr; [scale expr;] [half_scale expr;] [min expr;]`.
macro_rules! codec {
    ($(#[$doc:meta])* $Name:ident { $($const:ident: $T:ty = $value:expr),* }
     $S:ident $p:ident $at:ident $half:ident $shared:ident:
     unpack $unpack:expr; $(scale $scale:expr;)? $(half_scale $hs:expr;)? $(min $min:expr;)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $Name;
        impl Codec8 for $Name {
            $(const $const: $T = $value;)*
            #[inline(always)]
            unsafe fn unpack<$S: SimdDot>($p: &PlanePtrs, $at: At) -> [$S::B; 8] {
                // SAFETY: by the contract of Codec8.
                unsafe { $unpack }
            }
            $(#[inline(always)]
            unsafe fn scale<$S: SimdDot>($p: &PlanePtrs, $at: At, $shared: &[$S::F; 2]) -> $S::F {
                let _ = $shared; // many codecs have no super-blocks
                // SAFETY: by the contract of Codec8.
                unsafe { $scale }
            })?
            $(#[inline(always)]
            unsafe fn half_scale<$S: SimdDot>($p: &PlanePtrs, $at: At, $half: usize) -> $S::I {
                // SAFETY: by the contract of Codec8.
                unsafe { $hs }
            })?
            $(#[inline(always)]
            unsafe fn min<$S: SimdDot>($p: &PlanePtrs, $at: At, $half: usize, $shared: &[$S::F; 2]) -> $S::F {
                let _ = ($half, $shared); // most codecs have one min a group
                // SAFETY: by the contract of Codec8.
                unsafe { $min }
            })?
        }
    };
}

codec! {
    /// 4-bit, offset 8.
    Q4_0 { BITS: u32 = 4, OFFSET: u32 = 3, NIBBLES: bool = true, FETCH_SCALES: bool = true } S p at half shared:
    unpack nib::<S>(p, at); scale f16s::<S>(p.d, at.group());
}
codec! {
    /// 4-bit with min.
    Q4_1 { BITS: u32 = 4, MINS: Mins = Mins::Group, NIBBLES: bool = true } S p at half shared:
    unpack nib::<S>(p, at); scale f16s::<S>(p.d, at.group()); min f16s::<S>(p.m, at.group());
}
codec! {
    /// 5-bit, offset 16.
    Q5_0 { BITS: u32 = 5, OFFSET: u32 = 4 } S p at half shared:
    unpack with_bit1!(S, p, at, nib::<S>(p, at), 4); scale f16s::<S>(p.d, at.group());
}
codec! {
    /// 5-bit with min.
    Q5_1 { BITS: u32 = 5, MINS: Mins = Mins::Group } S p at half shared:
    unpack with_bit1!(S, p, at, nib::<S>(p, at), 4); scale f16s::<S>(p.d, at.group());
    min f16s::<S>(p.m, at.group());
}
codec! {
    /// 8-bit, stored plus 128.
    Q8_0 { BITS: u32 = 8, CODE_BYTES: usize = 512 } S p at half shared:
    unpack {
        let base = p.codes.add(at.tile_group * 512 + 4 * at.row);
        let flip = S::splat_b(if S::SIGNED_BYTES { 0x80 } else { 0 });
        let mut codes = [flip; 8];
        for c in 0..8 {
            codes[c] = S::xor_b(S::load_b(base.add(64 * c)), flip);
        }
        codes
    };
    scale f16s::<S>(p.d, at.group());
}
codec! {
    /// 2-bit, 4-bit scale and min a half group.
    Q2K {
        SUPERS: bool = true,
        BITS: u32 = 2,
        HALVES: bool = true,
        MINS: Mins = Mins::Half,
        CODE_BYTES: usize = 128
    } S p at half shared:
    unpack bit2!(S, p.codes, at, 0);
    half_scale S::low_nibble_i(S::load_u8(p.sc.add(at.half(half))));
    min {
        let mn = S::to_f(S::high_nibble_i(S::load_u8(p.sc.add(at.half(half)))));
        S::mul(shared[1], mn)
    };
}
codec! {
    /// 3-bit, offset 4, 8-bit scale a half group.
    Q3K { SUPERS: bool = true, BITS: u32 = 3, OFFSET: u32 = 2, HALVES: bool = true, CODE_BYTES: usize = 128 } S p at half shared:
    unpack with_bit1!(S, p, at, bit2!(S, p.codes, at, 0), 2);
}
codec! {
    /// 4-bit, scale and min a group in 8-bit codes.
    Q4K { SUPERS: bool = true, BITS: u32 = 4, MINS: Mins = Mins::Group, NIBBLES: bool = true } S p at half shared:
    unpack nib::<S>(p, at); scale times_u8::<S>(shared[0], p.sc, at);
    min times_u8::<S>(shared[1], p.mn, at);
}
codec! {
    /// 5-bit, the same.
    Q5K { SUPERS: bool = true, BITS: u32 = 5, MINS: Mins = Mins::Group } S p at half shared:
    unpack with_bit1!(S, p, at, nib::<S>(p, at), 4); scale times_u8::<S>(shared[0], p.sc, at);
    min times_u8::<S>(shared[1], p.mn, at);
}
codec! {
    /// 6-bit, offset 32, 8-bit scale a half group.
    Q6K { SUPERS: bool = true, BITS: u32 = 6, OFFSET: u32 = 5, HALVES: bool = true, AHEAD_BYTES: usize = 2560 } S p at half shared:
    unpack {
        let (mut codes, high) = (nib::<S>(p, at), bit2!(S, p.high, at, 4));
        for c in 0..8 {
            codes[c] = S::or_b(codes[c], high[c]);
        }
        codes
    };

}
codec! {
    /// 4-bit index into a table.
    Iq4Nl { BITS: u32 = 8 } S p at half shared:
    unpack table::<S>(p, at, &IQ4_VALUES); scale f16s::<S>(p.d, at.group());
}
codec! {
    /// The same with a signed 8-bit scale a group.
    Iq4Xs { SUPERS: bool = true, BITS: u32 = 8 } S p at half shared:
    unpack table::<S>(p, at, &IQ4_VALUES);
    scale S::mul(shared[0], S::to_f(S::load_i8(p.sc.add(at.group()))));
}
codec! {
    /// 4-bit floats with a power of two a group.
    Mxfp4 { BITS: u32 = 8 } S p at half shared:
    unpack table::<S>(p, at, &MXFP4_VALUES); scale S::load_e8m0_half(p.d.add(at.group()));
}
