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
            vector::quantize[](x: &[f32], out: &mut [Q8Group]) -> ();
            vector::rms_norm[](x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> ();
            vector::add[](x: &[f32], y: &mut [f32]) -> ();
            vector::axpy[](a: f32, x: &[f32], y: &mut [f32]) -> ();
            vector::scale[](a: f32, x: &mut [f32]) -> ();
            vector::silu_mul[](gate: &[f32], up: &[f32], out: &mut [f32]) -> ();
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
    use crate::backend::cpu::kernels::simd::Scalar;
    super::entries!(Scalar);
}
