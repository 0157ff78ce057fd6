//! Entry points: each kernel compiled once an instruction set, with that set's features on.
//!
//! The kernels are `#[inline(always)]` generics over [`Simd`](super::simd::Simd); only a function that itself has the features
//! may inline the intrinsics, and these are those functions.

/// Lists the entry points for one instruction set: `entries!(Type, "features")`.
macro_rules! entries {
    ($S:ty $(, $features:literal)?) => {
        use crate::backend::cpu::kernels::attend::{self, KvElement, Rows2};
        use crate::backend::cpu::kernels::vector::{self, Q8Group};

        entries!(@ $S, ($($features)?)
            vector::quantize[](x: &[f32], out: &mut [Q8Group], apart: bool) -> ();
            vector::rms_norm[](x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> ();
            vector::rms_norm_in_place[](x: &mut [f32], weight: &[f32], eps: f32) -> ();
            vector::add[](x: &[f32], y: &mut [f32]) -> ();
            vector::axpy[](a: f32, x: &[f32], y: &mut [f32]) -> ();
            vector::scale[](a: f32, x: &mut [f32]) -> ();
            vector::silu_mul[](gate: &[f32], up: &[f32], out: &mut [f32]) -> ();
            vector::from_f16[](x: &[crate::format::f16], out: &mut [f32]) -> ();
            vector::sigmoid[](x: &mut [f32]) -> ();
            vector::max[](x: &[f32]) -> f32;
            vector::exp_sum[](x: &mut [f32], max: f32) -> f32;
            attend::qk[E: KvElement](
                q: Rows2<*const f32>, nq: usize, k: Rows2<*const E>, nk: usize, d: usize, out: Rows2<*mut f32>
            ) -> ();
            attend::pv[E: KvElement](
                p: Rows2<*const f32>, nq: usize, v: Rows2<*const E>, nk: usize, d: usize, acc: Rows2<*mut f32>
            ) -> ();
        );
    };
    (@ $S:ty, $features:tt $(
        $module:ident::$name:ident[$($G:ident: $bound:ident)?]($($arg:ident: $T:ty),*) -> $R:ty;
    )*) => {
        $(entries!(@one $S, $features $module::$name[$($G: $bound)?]($($arg: $T),*) -> $R);)*
    };
    (@one $S:ty, ($($features:literal)?)
        $module:ident::$name:ident[$($G:ident: $bound:ident)?]($($arg:ident: $T:ty),*) -> $R:ty
    ) => {
        /// The kernel of the same name.
        ///
        /// # Safety
        /// As that kernel's.
        $(#[target_feature(enable = $features)])?
        pub unsafe fn $name<$($G: $bound)?>($($arg: $T),*) -> $R {
            // SAFETY: the same contract, and this function has the features.
            unsafe { $module::$name::<$S $(, $G)?>($($arg),*) }
        }
    };
}

pub(super) use entries;

/// Entry points in plain Rust.
pub mod plain {
    pub use crate::backend::cpu::kernels::scalar::{matmul_f32, matmul_q8};
    use crate::backend::cpu::kernels::simd::Scalar;
    super::entries!(Scalar);
}

/// Lists the products' entry points for one instruction set: `products!(Type, "features")`.
macro_rules! products {
    ($S:ty, $features:literal) => {
        use crate::backend::cpu::kernels::codecs::{self, Codec8};
        use crate::backend::cpu::kernels::dense::{self, Blocks8, Decoded, Decoded8, Plain, Source};
        use crate::backend::cpu::kernels::{Product, q8};
        use crate::format::Codec;

        #[target_feature(enable = $features)]
        unsafe fn q8_of<C: Codec8>(p: &Product<'_, Q8Group>) {
            // SAFETY: the same contract, and this function has the features.
            unsafe { q8::matmul::<$S, C>(p) }
        }

        #[target_feature(enable = $features)]
        unsafe fn f32_of<W: Source>(p: &Product<'_, f32>) {
            // SAFETY: the same contract, and this function has the features.
            unsafe { dense::matmul::<$S, W>(p) }
        }

        /// The quantized product.
        ///
        /// # Safety
        /// The instruction set is available; `p.w` is of a quantized codec.
        pub unsafe fn matmul_q8(p: &Product<'_, Q8Group>) {
            // SAFETY: the codec is that of `p.w`.
            unsafe {
                match p.w.codec {
                    Codec::Q4_0 => q8_of::<codecs::Q4_0>(p),
                    Codec::Q4_1 => q8_of::<codecs::Q4_1>(p),
                    Codec::Q5_0 => q8_of::<codecs::Q5_0>(p),
                    Codec::Q5_1 => q8_of::<codecs::Q5_1>(p),
                    Codec::Q8_0 => q8_of::<codecs::Q8_0>(p),
                    Codec::Q2K => q8_of::<codecs::Q2K>(p),
                    Codec::Q3K => q8_of::<codecs::Q3K>(p),
                    Codec::Q4K => q8_of::<codecs::Q4K>(p),
                    Codec::Q5K => q8_of::<codecs::Q5K>(p),
                    Codec::Q6K => q8_of::<codecs::Q6K>(p),
                    Codec::IQ4NL => q8_of::<codecs::Iq4Nl>(p),
                    Codec::IQ4XS => q8_of::<codecs::Iq4Xs>(p),
                    Codec::MXFP4 => q8_of::<codecs::Mxfp4>(p),
                    Codec::F32 | Codec::F16 | Codec::BF16 | Codec::F8E4M3 => {
                        unreachable!("dense codecs meet f32 activations")
                    }
                }
            }
        }

        /// Where one pass over tiles is compiled to: with one activation row, and with [`SimdDot::ROWS_Q8`].
        #[cfg(test)]
        pub fn q8_passes(codec: Codec) -> [usize; 2] {
            match codec {
                Codec::Q4_0 => passes_of::<codecs::Q4_0>(),
                Codec::Q4_1 => passes_of::<codecs::Q4_1>(),
                Codec::Q5_0 => passes_of::<codecs::Q5_0>(),
                Codec::Q5_1 => passes_of::<codecs::Q5_1>(),
                Codec::Q8_0 => passes_of::<codecs::Q8_0>(),
                Codec::Q2K => passes_of::<codecs::Q2K>(),
                Codec::Q3K => passes_of::<codecs::Q3K>(),
                Codec::Q4K => passes_of::<codecs::Q4K>(),
                Codec::Q5K => passes_of::<codecs::Q5K>(),
                Codec::Q6K => passes_of::<codecs::Q6K>(),
                Codec::IQ4NL => passes_of::<codecs::Iq4Nl>(),
                Codec::IQ4XS => passes_of::<codecs::Iq4Xs>(),
                Codec::MXFP4 => passes_of::<codecs::Mxfp4>(),
                Codec::F32 | Codec::F16 | Codec::BF16 | Codec::F8E4M3 => {
                    unreachable!("dense codecs have no such product")
                }
            }
        }

        #[cfg(test)]
        #[target_feature(enable = $features)]
        unsafe fn pass_of<C: Codec8, const MANY: bool>(p: &Product<'_, Q8Group>) {
            // SAFETY: the same contract, and this function has the features.
            unsafe { q8::passes::<$S, C, MANY>(p) }
        }

        #[cfg(test)]
        fn passes_of<C: Codec8>() -> [usize; 2] {
            let passes: [unsafe fn(&Product<'_, Q8Group>); 2] = [pass_of::<C, false>, pass_of::<C, true>];
            passes.map(|f| f as usize)
        }

        /// The float product.
        ///
        /// # Safety
        /// The instruction set is available.
        pub unsafe fn matmul_f32(p: &Product<'_, f32>) {
            // SAFETY: the source is that of `p.w`'s codec.
            unsafe {
                match p.w.codec {
                    Codec::F32 => f32_of::<Plain<dense::F32>>(p),
                    Codec::F16 => f32_of::<Plain<dense::F16>>(p),
                    Codec::BF16 => f32_of::<Plain<dense::BF16>>(p),
                    Codec::F8E4M3 if p.rows.len() < 4 => f32_of::<Blocks8>(p),
                    Codec::F8E4M3 => f32_of::<Decoded8>(p),
                    Codec::Q4_0 => f32_of::<Decoded<codecs::Q4_0>>(p),
                    Codec::Q4_1 => f32_of::<Decoded<codecs::Q4_1>>(p),
                    Codec::Q5_0 => f32_of::<Decoded<codecs::Q5_0>>(p),
                    Codec::Q5_1 => f32_of::<Decoded<codecs::Q5_1>>(p),
                    Codec::Q8_0 => f32_of::<Decoded<codecs::Q8_0>>(p),
                    Codec::Q2K => f32_of::<Decoded<codecs::Q2K>>(p),
                    Codec::Q3K => f32_of::<Decoded<codecs::Q3K>>(p),
                    Codec::Q4K => f32_of::<Decoded<codecs::Q4K>>(p),
                    Codec::Q5K => f32_of::<Decoded<codecs::Q5K>>(p),
                    Codec::Q6K => f32_of::<Decoded<codecs::Q6K>>(p),
                    Codec::IQ4NL => f32_of::<Decoded<codecs::Iq4Nl>>(p),
                    Codec::IQ4XS => f32_of::<Decoded<codecs::Iq4Xs>>(p),
                    Codec::MXFP4 => f32_of::<Decoded<codecs::Mxfp4>>(p),
                }
            }
        }
    };
}

#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_imports))]
pub(super) use products;
