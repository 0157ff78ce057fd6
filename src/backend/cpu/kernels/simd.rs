//! What an instruction set must offer: registers of `W` lanes, [`SUBS`](Simd::SUBS) of which make the 16 lanes that the
//! kernels think in. A kernel is written once over this trait; its entry points are compiled once an instruction set,
//! with that set's features enabled, and everything here is inlined into them.

/// Lanes that the kernels think in: rows of a tile, partial sums of a reduction.
pub const LANES: usize = 16;

/// An instruction set's registers and operations.
///
/// # Safety
/// Every method needs the instruction set to be available, and pointers valid for what it reads or writes.
#[allow(missing_docs)] // names of arithmetic
pub trait Simd: Copy {
    /// 32-bit lanes of a register.
    const W: usize;
    /// Vector registers there are.
    const REGISTERS: usize = 32;
    /// True if products multiply by coupled codes ([`Q8Group`](super::vector::Q8Group)), for which
    /// [`SimdDot::dot_coupled`] must beat two dot products a column.
    const COUPLED: bool = false;
    /// Registers that hold 16 lanes.
    const SUBS: usize = LANES / Self::W;
    /// `W` f32.
    type F: Copy;
    /// `W` i32.
    type I: Copy;

    unsafe fn splat(v: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    /// The first `n < W` lanes from memory, the others 0.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    /// Writes the first `n < W` lanes.
    unsafe fn store_part(p: *mut f32, v: Self::F, n: usize);
    /// IEEE half, exact.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// The first `n < W` halves, the others 0.
    unsafe fn load_f16_part(p: *const u16, n: usize) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a*b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: the second if either is NaN or both are zeros.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`: the second if either is NaN or both are zeros.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Adds 16 lanes as a tree: lanes 8 apart, then 4, 2, 1.
    unsafe fn sum16(v: &[Self::F; 4]) -> f32;
    /// Four such sums to `out[0..4]`.
    #[inline(always)]
    unsafe fn sum16_of_4(v: &[[Self::F; 4]; 4], out: *mut f32) {
        // SAFETY: by the trait's contract.
        unsafe {
            out.cast::<[f32; 4]>().write_unaligned([
                Self::sum16(&v[0]),
                Self::sum16(&v[1]),
                Self::sum16(&v[2]),
                Self::sum16(&v[3]),
            ])
        };
    }

    /// The largest of 16 lanes, none of them NaN.
    unsafe fn max16(v: &[Self::F; 4]) -> f32;

    unsafe fn splat_i(v: i32) -> Self::I;
    /// Adds 16 lanes.
    unsafe fn sum16_i(v: &[Self::I; 4]) -> i32;
    /// `high = (a + 16) >> 5` and `low = a - 32*high`.
    unsafe fn split(a: Self::I) -> (Self::I, Self::I);
    /// `[k, h, m]` with `a = h + 16*k`, `b = 16*h + m` and `m` an i8: `h` is the value from `(b - 112) >> 4` on that equals
    /// `a` modulo 16.
    unsafe fn couple(a: Self::I, b: Self::I) -> [Self::I; 3];
    /// Writes the low byte of each lane.
    unsafe fn store_bytes(p: *mut i8, v: Self::I);
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    /// Arithmetic shift right by one.
    unsafe fn half_i(a: Self::I) -> Self::I;
    /// Shift left by 23: an integer to an exponent field.
    unsafe fn to_exponent(a: Self::I) -> Self::I;
    unsafe fn bits(a: Self::F) -> Self::I;
    unsafe fn from_bits(a: Self::I) -> Self::F;
}

/// What the matrix products need beside [`Simd`]; [`Scalar`] has its own products.
///
/// # Safety
/// As [`Simd`].
#[allow(missing_docs)] // names of arithmetic
pub trait SimdDot: Simd {
    /// `4*W` bytes: four codes of each of `W` rows.
    type B: Copy;
    /// True if [`SimdDot::dot4`] takes 8-bit codes as signed (then their offset of 128 is taken off in unpacking).
    const SIGNED_BYTES: bool;
    /// Activation rows that one pass over a tile works on at most: as many as registers hold.
    const ROWS_Q8: usize;
    /// The same for the float product.
    const ROWS_F32: usize;

    unsafe fn load_b(p: *const u8) -> Self::B;
    unsafe fn splat_b(v: u8) -> Self::B;
    unsafe fn and_b(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn or_b(a: Self::B, b: Self::B) -> Self::B;
    unsafe fn xor_b(a: Self::B, b: Self::B) -> Self::B;
    /// Shifts right by `N < 8`; bits that cross into a byte from its neighbour are the caller's to mask.
    unsafe fn shr_b<const N: u32>(a: Self::B) -> Self::B;
    /// Shifts left by `N < 8`, the same.
    unsafe fn shl_b<const N: u32>(a: Self::B) -> Self::B;
    /// `table[index]` for indices below 16.
    unsafe fn lookup_b(table: &[u8; 16], index: Self::B) -> Self::B;
    /// Lane i: `acc + Σ w[c][4i+b] * x[4c+b]` over b < 4, c < 4; codes below `2^BITS`.
    unsafe fn dot4<const BITS: u32>(acc: Self::I, w: [Self::B; 4], x: *const i8) -> Self::I;
    /// The same over c < 8.
    unsafe fn dot8<const BITS: u32>(acc: Self::I, w: &[Self::B; 8], x: *const i8) -> Self::I;
    /// 4-bit codes with coupled activations: `raw[c]` holds the code of column `4c+b` in the low and that of `16+4c+b` in the
    /// high half of byte `4i+b`; `apart[c]` holds the one times 16, `apart[4+c]` the other. Lane i: the sum over all 32
    /// columns of code times activation code, added to `acc`.
    unsafe fn dot_coupled(
        acc: Self::I,
        raw: &[Self::B; 4],
        apart: &[Self::B; 8],
        x: &super::vector::Q8Group,
    ) -> Self::I {
        let _ = (acc, raw, apart, x);
        unreachable!("asked of an instruction set that does not couple")
    }
    /// The same from `raw` alone: fewer instructions for one row, more for several that share `apart`.
    unsafe fn dot_coupled_once(acc: Self::I, raw: &[Self::B; 4], x: &super::vector::Q8Group) -> Self::I {
        let _ = (acc, raw, x);
        unreachable!("asked of an instruction set that does not couple")
    }
    /// `acc` plus `by[0]` times the first and `by[1]` times the second of `Q8Group::neg_half`, where codes are coupled.
    unsafe fn add_halves(acc: Self::I, x: &super::vector::Q8Group, by: [i16; 2]) -> Self::I {
        let _ = (acc, x, by);
        unreachable!("asked of an instruction set that does not couple")
    }
    /// True if additions have ports beside those that dot products and multiplications share: an integer that starts at
    /// `Q8Group::start` then becomes a float times `d` by a subtraction.
    const STARTS: bool = false;
    /// Byte `N` of each 32-bit lane, unsigned.
    unsafe fn byte_u<const N: u32>(a: Self::B) -> Self::I;
    /// Byte `N` of each 32-bit lane, signed.
    unsafe fn byte_s<const N: u32>(a: Self::B) -> Self::I;

    unsafe fn shl_i<const N: u32>(a: Self::I) -> Self::I;
    /// The low four bits.
    unsafe fn low_nibble_i(a: Self::I) -> Self::I;
    /// The bits above the low four, of a value that is not negative.
    unsafe fn high_nibble_i(a: Self::I) -> Self::I;
    unsafe fn to_f(a: Self::I) -> Self::F;
    /// `W` bytes, unsigned.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// `W` bytes, signed.
    unsafe fn load_i8(p: *const u8) -> Self::I;
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// FP8 e4m3fn, exact.
    unsafe fn load_f8(p: *const u8) -> Self::F;
    /// `W` E8M0 scales, halved: `2^(e - 128)`.
    unsafe fn load_e8m0_half(p: *const u8) -> Self::F;
    /// Starts to fetch a cache line that will be read once. Any address will do.
    unsafe fn prefetch(p: *const u8);
}

/// Wraps an intrinsic expression as a trait method.
macro_rules! op {
    ($($name:ident$([$N:ident])?($($arg:ident: $T:ty),*) $(-> $R:ty)? = $e:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name$(<const $N: u32>)?($($arg: $T),*) $(-> $R)? {
            // SAFETY: the trait's contract: the instruction set is there and pointers are valid.
            unsafe { $e }
        }
    )*};
}
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_imports))]
pub(super) use op;

/// Plain Rust: 16 lanes as an array.
#[derive(Clone, Copy)]
pub struct Scalar;

/// An array made lane by lane.
fn lanes<T>(f: impl FnMut(usize) -> T) -> [T; LANES] {
    std::array::from_fn(f)
}

// SAFETY of every block below: the trait's contract covers the pointers.
impl Simd for Scalar {
    const W: usize = LANES;
    type F = [f32; LANES];
    type I = [i32; LANES];

    unsafe fn splat(v: f32) -> Self::F {
        [v; LANES]
    }
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: see above.
        lanes(|i| unsafe { *p.add(i) })
    }
    unsafe fn load_part(p: *const f32, n: usize) -> Self::F {
        // SAFETY: see above.
        lanes(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    unsafe fn store(p: *mut f32, v: Self::F) {
        // SAFETY: see above.
        (0..LANES).for_each(|i| unsafe { *p.add(i) = v[i] });
    }
    unsafe fn store_part(p: *mut f32, v: Self::F, n: usize) {
        // SAFETY: see above.
        (0..n).for_each(|i| unsafe { *p.add(i) = v[i] });
    }
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: see above.
        lanes(|i| crate::format::f16::from_bits(unsafe { *p.add(i) }).to_f32())
    }
    unsafe fn load_f16_part(p: *const u16, n: usize) -> Self::F {
        // SAFETY: see above.
        lanes(|i| if i < n { crate::format::f16::from_bits(unsafe { *p.add(i) }).to_f32() } else { 0.0 })
    }
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanes(|i| a[i] + b[i])
    }
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanes(|i| a[i] - b[i])
    }
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanes(|i| a[i] * b[i])
    }
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        lanes(|i| a[i] / b[i])
    }
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes(|i| a[i].mul_add(b[i], c[i]))
    }
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        lanes(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    unsafe fn sum16(v: &[Self::F; 4]) -> f32 {
        let mut v = v[0];
        for apart in [8, 4, 2, 1] {
            for i in 0..apart {
                v[i] += v[i + apart];
            }
        }
        v[0]
    }
    unsafe fn max16(v: &[Self::F; 4]) -> f32 {
        v[0].into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    unsafe fn splat_i(v: i32) -> Self::I {
        [v; LANES]
    }
    unsafe fn sum16_i(v: &[Self::I; 4]) -> i32 {
        v[0].iter().sum()
    }
    unsafe fn split(a: Self::I) -> (Self::I, Self::I) {
        let high = lanes(|i| (a[i] + 16) >> 5);
        (high, lanes(|i| a[i] - (high[i] << 5)))
    }
    unsafe fn couple(a: Self::I, b: Self::I) -> [Self::I; 3] {
        let first = lanes(|i| (b[i] - 112) >> 4);
        let h = lanes(|i| first[i] + ((a[i] - first[i]) & 15));
        [lanes(|i| (a[i] - h[i]) >> 4), h, lanes(|i| b[i] - (h[i] << 4))]
    }
    unsafe fn store_bytes(p: *mut i8, v: Self::I) {
        // SAFETY: see above.
        (0..LANES).for_each(|i| unsafe { *p.add(i) = v[i] as i8 });
    }
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        lanes(|i| a[i].wrapping_add(b[i]))
    }
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        lanes(|i| a[i].wrapping_sub(b[i]))
    }
    unsafe fn half_i(a: Self::I) -> Self::I {
        lanes(|i| a[i] >> 1)
    }
    unsafe fn to_exponent(a: Self::I) -> Self::I {
        lanes(|i| a[i] << 23)
    }
    unsafe fn bits(a: Self::F) -> Self::I {
        lanes(|i| a[i].to_bits() as i32)
    }
    unsafe fn from_bits(a: Self::I) -> Self::F {
        lanes(|i| f32::from_bits(a[i] as u32))
    }
}
