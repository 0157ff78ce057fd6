//! The float product over tiles: dense codecs always, quantized ones in exact runs.
//!
//! A pass holds, for `R` activation rows, four partial sums of each of the 16 weight rows. Dense weights are widened
//! as they are loaded (2-3 operations a 16 weights and a fused multiply-add a row); a quantized group is first
//! decoded to a 2 KB buffer.

use super::Product;
use super::codecs::{At, Codec8, Mins, PlanePtrs};
use super::q8::PREFETCH_BYTES;
use super::simd::{LANES, SimdDot};
use crate::format::layout::{F8_BLOCK, GROUP, TILE_ROWS};
use std::marker::PhantomData;

/// Partial sums of an output.
const PARTS: usize = 4;
/// Activation rows whose sums are kept while a decoded chunk is reused.
const BLOCK_ROWS: usize = 16;

/// The sums of a block of activation rows with one tile, `[row][lanes and parts]`.
type Sums = [[f32; PARTS * LANES]; BLOCK_ROWS];

/// Weights behind a pointer, widened to f32 as they are loaded.
///
/// # Safety
/// `load` reads `W` elements from index `i` on; the instruction set is available.
pub trait Dense: Copy {
    /// Bytes of an element.
    const BYTES: usize;
    /// Elements from index `i`.
    unsafe fn load<S: SimdDot>(self, i: usize) -> S::F;
    /// The address of element 0.
    fn address(self) -> *const u8;
}

/// An element type's pointer.
macro_rules! dense {
    ($(#[$doc:meta])* $Name:ident($T:ty), $S:ident, $at:ident => $load:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $Name(*const $T);
        impl Dense for $Name {
            const BYTES: usize = size_of::<$T>();
            #[inline(always)]
            fn address(self) -> *const u8 {
                self.0.cast()
            }
            #[inline(always)]
            unsafe fn load<$S: SimdDot>(self, i: usize) -> $S::F {
                // SAFETY: by the trait's contract.
                unsafe {
                    let $at = self.0.add(i);
                    $load
                }
            }
        }
    };
}

dense!(
    /// f32, also a decoded group.
    F32(f32), S, at => S::load(at)
);
dense!(
    /// IEEE half.
    F16(u16), S, at => S::load_f16(at)
);
dense!(
    /// bfloat16.
    BF16(u16), S, at => S::load_bf16(at)
);

/// FP8 e4m3 with the scale of its block.
#[derive(Clone, Copy)]
struct F8(*const u8, f32);

impl Dense for F8 {
    const BYTES: usize = 1;
    #[inline(always)]
    fn address(self) -> *const u8 {
        self.0
    }
    #[inline(always)]
    unsafe fn load<S: SimdDot>(self, i: usize) -> S::F {
        // SAFETY: by the trait's contract.
        unsafe { S::mul(S::load_f8(self.0.add(i)), S::splat(self.1)) }
    }
}

/// Cuts a tile into chunks of columns and shows each to a visitor as a [`Dense`].
///
/// # Safety
/// The matrix is of the source's codec; the instruction set is available.
pub trait Source {
    /// Columns of a chunk (the last may have fewer), a multiple of 4.
    fn chunk(cols: usize) -> usize;
    /// What a chunk's weights are.
    type Weights: Dense;
    /// The chunk of tile `t` that starts at column `k`; `buffer` is room to decode it.
    unsafe fn weights<S: SimdDot, T>(
        p: &Product<'_, T>,
        planes: &PlanePtrs,
        t: usize,
        k: usize,
        buffer: &mut [f32; GROUP * TILE_ROWS],
    ) -> Self::Weights;
}

/// A dense codec in one chunk.
pub struct Plain<D>(PhantomData<D>);

macro_rules! plain_source {
    ($Name:ident, $T:ty) => {
        impl Source for Plain<$Name> {
            type Weights = $Name;
            #[inline(always)]
            fn chunk(cols: usize) -> usize {
                cols.next_multiple_of(PARTS)
            }
            #[inline(always)]
            unsafe fn weights<S: SimdDot, T>(
                p: &Product<'_, T>,
                planes: &PlanePtrs,
                t: usize,
                k: usize,
                _: &mut [f32; GROUP * TILE_ROWS],
            ) -> $Name {
                // SAFETY: the tile exists.
                $Name(unsafe { planes.codes().cast::<$T>().add((t * p.w.cols + k) * TILE_ROWS) })
            }
        }
    };
}

plain_source!(F32, f32);
plain_source!(F16, u16);
plain_source!(BF16, u16);

/// FP8 in chunks of one block scale.
pub struct Blocks8;

impl Source for Blocks8 {
    type Weights = F8Weights;
    #[inline(always)]
    fn chunk(_: usize) -> usize {
        F8_BLOCK
    }
    #[inline(always)]
    unsafe fn weights<S: SimdDot, T>(
        p: &Product<'_, T>,
        planes: &PlanePtrs,
        t: usize,
        k: usize,
        _: &mut [f32; GROUP * TILE_ROWS],
    ) -> F8Weights {
        let block = t * TILE_ROWS / F8_BLOCK * p.w.cols.div_ceil(F8_BLOCK) + k / F8_BLOCK;
        // SAFETY: the tile and its block scale exist.
        unsafe {
            let scale = planes.scales().cast::<f32>().add(block).read();
            F8Weights(F8(planes.codes().add((t * p.w.cols + k) * TILE_ROWS), scale))
        }
    }
}

/// The same for several rows: decoded 32 columns at a time, so that widening is paid once for all of them.
pub struct Decoded8;

impl Source for Decoded8 {
    type Weights = F32;
    #[inline(always)]
    fn chunk(_: usize) -> usize {
        GROUP
    }
    #[inline(always)]
    unsafe fn weights<S: SimdDot, T>(
        p: &Product<'_, T>,
        planes: &PlanePtrs,
        t: usize,
        k: usize,
        buffer: &mut [f32; GROUP * TILE_ROWS],
    ) -> F32 {
        // SAFETY: the chunk has `n` columns of 16 rows, which the buffer holds.
        unsafe {
            let weights = Blocks8::weights::<S, T>(p, planes, t, k, buffer);
            let n = GROUP.min(p.w.cols - k) * TILE_ROWS;
            for i in (0..n).step_by(S::W) {
                S::store(buffer.as_mut_ptr().add(i), weights.load::<S>(i));
            }
        }
        F32(buffer.as_ptr())
    }
}

/// [`Blocks8`]'s weights.
#[derive(Clone, Copy)]
pub struct F8Weights(F8);

impl Dense for F8Weights {
    const BYTES: usize = 1;
    #[inline(always)]
    fn address(self) -> *const u8 {
        self.0.address()
    }
    #[inline(always)]
    unsafe fn load<S: SimdDot>(self, i: usize) -> S::F {
        // SAFETY: by the trait's contract.
        unsafe { self.0.load::<S>(i) }
    }
}

/// A quantized codec, decoded a group at a time.
pub struct Decoded<C>(PhantomData<C>);

impl<C: Codec8> Source for Decoded<C> {
    type Weights = F32;
    #[inline(always)]
    fn chunk(_: usize) -> usize {
        GROUP
    }
    #[inline(always)]
    unsafe fn weights<S: SimdDot, T>(
        p: &Product<'_, T>,
        planes: &PlanePtrs,
        t: usize,
        k: usize,
        buffer: &mut [f32; GROUP * TILE_ROWS],
    ) -> F32 {
        for s in 0..S::SUBS {
            let at = At::new(t, k / GROUP, p.w.cols, s * S::W);
            // SAFETY: the group exists, and the buffer holds 32 columns of 16 rows.
            unsafe { decode::<S, C>(planes, at, buffer.as_mut_ptr().add(s * S::W)) };
        }
        F32(buffer.as_ptr())
    }
}

/// Decodes a group of `W` rows to f32; column k goes to `out[16k..]`.
///
/// # Safety
/// `at` is inside the matrix, `out` holds the group; the instruction set is available.
#[inline(always)]
unsafe fn decode<S: SimdDot, C: Codec8>(planes: &PlanePtrs, at: At, out: *mut f32) {
    // SAFETY: by the contract.
    unsafe {
        let codes = C::unpack::<S>(planes, at);
        let shared = C::shared::<S>(planes, at);
        let d = C::scale::<S>(planes, at, &shared);
        for half in 0..2 {
            let scale = if C::HALVES { S::mul(d, S::to_f(C::half_scale::<S>(planes, at, half))) } else { d };
            let min = C::min::<S>(planes, at, half, &shared);
            for c in 4 * half..4 * half + 4 {
                let columns = [
                    code::<S, C, 0>(codes[c]),
                    code::<S, C, 1>(codes[c]),
                    code::<S, C, 2>(codes[c]),
                    code::<S, C, 3>(codes[c]),
                ];
                for b in 0..4 {
                    let value = S::mul(scale, S::to_f(columns[b]));
                    let value = if let Mins::None = C::MINS { value } else { S::add(value, min) };
                    S::store(out.add((4 * c + b) * LANES), value);
                }
            }
        }
    }
}

/// Column `N` of a register of codes, offset taken off.
///
/// # Safety
/// The instruction set is available.
#[inline(always)]
unsafe fn code<S: SimdDot, C: Codec8, const N: u32>(codes: S::B) -> S::I {
    // SAFETY: by the contract.
    unsafe {
        match (C::BITS, C::OFFSET) {
            (8, _) if S::SIGNED_BYTES => S::byte_s::<N>(codes),
            (8, _) => S::sub_i(S::byte_u::<N>(codes), S::splat_i(128)),
            (_, 0) => S::byte_u::<N>(codes),
            (_, log2) => S::sub_i(S::byte_u::<N>(codes), S::splat_i(1 << log2)),
        }
    }
}

/// The product; see [`Product`].
///
/// # Safety
/// `p.w` is of the source's codec; the instruction set is available.
#[inline(always)]
pub unsafe fn matmul<S: SimdDot, W: Source>(p: &Product<'_, f32>) {
    let planes = PlanePtrs::of(p.w);
    let n = p.rows.len();
    for t in p.tiles.clone() {
        for start in (0..n).step_by(BLOCK_ROWS) {
            // SAFETY: the rows exist.
            unsafe { block::<S, W>(p, &planes, t, start, BLOCK_ROWS.min(n - start)) };
        }
    }
}

/// Rows `start..start+rows` with tile `t`.
///
/// # Safety
/// As [`matmul`]; the rows exist, at most [`BLOCK_ROWS`].
#[inline(always)]
unsafe fn block<S: SimdDot, W: Source>(
    p: &Product<'_, f32>,
    planes: &PlanePtrs,
    t: usize,
    start: usize,
    rows: usize,
) {
    let mut sums: Sums = [[0.0; PARTS * LANES]; BLOCK_ROWS];
    let mut buffer = [0f32; GROUP * TILE_ROWS];
    let (cols, chunk) = (p.w.cols, W::chunk(p.w.cols));
    for k in (0..cols).step_by(chunk) {
        let n = chunk.min(cols - k);
        // SAFETY: the chunk and the rows exist.
        unsafe {
            let weights = W::weights::<S, f32>(p, planes, t, k, &mut buffer);
            let mut i = 0;
            // A pass of several rows takes one register of weight rows at a time; one row takes them all.
            while i + S::ROWS_F32 <= rows && S::ROWS_F32 == 4 {
                for s in 0..S::SUBS {
                    pass::<S, W::Weights, 4, 1>(p, weights, start + i, k, n, s, &mut sums[i..]);
                }
                i += 4;
            }
            while i + 2 <= rows {
                for s in 0..S::SUBS {
                    pass::<S, W::Weights, 2, 1>(p, weights, start + i, k, n, s, &mut sums[i..]);
                }
                i += 2;
            }
            if i < rows {
                match S::SUBS {
                    1 => pass::<S, W::Weights, 1, 1>(p, weights, start + i, k, n, 0, &mut sums[i..]),
                    2 => pass::<S, W::Weights, 1, 2>(p, weights, start + i, k, n, 0, &mut sums[i..]),
                    _ => pass::<S, W::Weights, 1, 4>(p, weights, start + i, k, n, 0, &mut sums[i..]),
                }
            }
        }
    }
    for (i, sums) in sums.iter().enumerate().take(rows) {
        let part = |b: usize, r: usize| sums[b * LANES + r];
        let out = std::array::from_fn(|r| (part(0, r) + part(1, r)) + (part(2, r) + part(3, r)));
        p.write(start + i, t, &out);
    }
}

/// `R` rows against `n` columns from `k` on of `N` registers of weight rows.
///
/// # Safety
/// The weights and rows exist; the instruction set is available.
#[inline(always)]
unsafe fn pass<S: SimdDot, D: Dense, const R: usize, const N: usize>(
    p: &Product<'_, f32>,
    weights: D,
    i: usize,
    k: usize,
    n: usize,
    s0: usize,
    sums: &mut [[f32; PARTS * LANES]],
) {
    // SAFETY: by the contract.
    unsafe {
        let x: [*const f32; R] = std::array::from_fn(|r| p.row(i + r).as_ptr().add(k));
        let mut acc = [[[S::splat(0.0); PARTS]; N]; R];
        for r in 0..R {
            for s in 0..N {
                for b in 0..PARTS {
                    acc[r][s][b] = S::load(sums[r].as_ptr().add(b * LANES + (s0 + s) * S::W));
                }
            }
        }
        let whole = n / PARTS * PARTS;
        for j in (0..whole).step_by(PARTS) {
            if R == 1 {
                // One row is bound by memory.
                let ahead = j * LANES * D::BYTES + PREFETCH_BYTES;
                for line in (0..PARTS * LANES * D::BYTES).step_by(64) {
                    S::prefetch(weights.address().wrapping_add(ahead + line));
                }
            }
            for b in 0..PARTS {
                for s in 0..N {
                    let w = weights.load::<S>((j + b) * LANES + (s0 + s) * S::W);
                    for r in 0..R {
                        acc[r][s][b] = S::fma(w, S::splat(*x[r].add(j + b)), acc[r][s][b]);
                    }
                }
            }
        }
        for b in 0..PARTS - 1 {
            if whole + b < n {
                for s in 0..N {
                    let w = weights.load::<S>((whole + b) * LANES + (s0 + s) * S::W);
                    for r in 0..R {
                        acc[r][s][b] = S::fma(w, S::splat(*x[r].add(whole + b)), acc[r][s][b]);
                    }
                }
            }
        }
        for r in 0..R {
            for s in 0..N {
                for b in 0..PARTS {
                    S::store(sums[r].as_mut_ptr().add(b * LANES + (s0 + s) * S::W), acc[r][s][b]);
                }
            }
        }
    }
}
