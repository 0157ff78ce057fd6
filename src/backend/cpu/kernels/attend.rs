//! Attention's two products over a block of cached rows.
//!
//! Scores: 2 * d operations a (query, key), each key element loaded (and widened from f16) once for [`QUERIES`] queries.
//! Values: `acc[d] = fma(p[j], v[j][d], acc[d])` in the order of j, so that a block may be cut anywhere.

use super::simd::Simd;
use super::vector::{load, store};

/// Queries that share a loaded key or value.
const QUERIES: usize = 4;

/// Rows of cached keys or values, `(rows, d)`, some stride apart.
#[derive(Debug, Clone, Copy)]
pub enum KvBlock<'a> {
    /// `data[j*stride..][..d]` is row j.
    F32 {
        /// The rows.
        data: &'a [f32],
        /// Elements from one row to the next.
        stride: usize,
    },
    /// The same, in IEEE half.
    F16 {
        /// The rows.
        data: &'a [half::f16],
        /// Elements from one row to the next.
        stride: usize,
    },
}

impl KvBlock<'_> {
    /// True if `rows` rows of `d` elements lie inside the data.
    pub fn holds(&self, rows: usize, d: usize) -> bool {
        let (len, stride) = match self {
            KvBlock::F32 { data, stride } => (data.len(), *stride),
            KvBlock::F16 { data, stride } => (data.len(), *stride),
        };
        rows == 0 || (rows - 1) * stride + d <= len
    }
}

/// A cached element type.
pub trait KvElement: Copy {
    /// Loads `lanes <= W` elements as f32, the missing ones 0.
    ///
    /// # Safety
    /// `p` is valid for `lanes` reads; the instruction set is available.
    unsafe fn load<S: Simd>(p: *const Self, lanes: usize) -> S::F;
}

impl KvElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32, lanes: usize) -> S::F {
        // SAFETY: by the contract.
        unsafe { load::<S>(p, lanes) }
    }
}

impl KvElement for half::f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const half::f16, lanes: usize) -> S::F {
        // SAFETY: by the contract; f16 is a transparent u16.
        unsafe { if lanes == S::W { S::load_f16(p.cast()) } else { S::load_f16_part(p.cast(), lanes) } }
    }
}

/// A matrix of f32 rows behind a pointer: element `(i, j)` is at `i*stride + j`.
#[derive(Clone, Copy)]
pub struct Rows2<P> {
    /// First element.
    pub ptr: P,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// `out[i][j] = q[i] · k[j]` for `i < nq`, `j < nk`.
///
/// # Safety
/// All three matrices hold what is read and written; the instruction set is available.
#[inline(always)]
pub unsafe fn qk<S: Simd, E: KvElement>(
    q: Rows2<*const f32>,
    nq: usize,
    k: Rows2<*const E>,
    nk: usize,
    d: usize,
    out: Rows2<*mut f32>,
) {
    let mut i = 0;
    // SAFETY: i + Q <= nq in each call.
    unsafe {
        while i + QUERIES <= nq {
            qk_rows::<S, E, QUERIES>(q, i, k, nk, d, out);
            i += QUERIES;
        }
        while i < nq {
            qk_rows::<S, E, 1>(q, i, k, nk, d, out);
            i += 1;
        }
    }
}

/// Queries `i..i+Q` against every key.
///
/// # Safety
/// As [`qk`], with `i + Q` queries.
#[inline(always)]
unsafe fn qk_rows<S: Simd, E: KvElement, const Q: usize>(
    q: Rows2<*const f32>,
    i: usize,
    k: Rows2<*const E>,
    nk: usize,
    d: usize,
    out: Rows2<*mut f32>,
) {
    for j in 0..nk {
        // SAFETY: j < nk, i + Q queries, columns below d.
        unsafe {
            let mut sums = [[S::splat(0.0); 4]; Q];
            let key = k.ptr.add(j * k.stride);
            let mut c = 0;
            while c < d {
                for s in 0..S::SUBS {
                    let at = c + s * S::W;
                    if at < d {
                        let lanes = S::W.min(d - at);
                        let key = E::load::<S>(key.add(at), lanes);
                        for (n, sum) in sums.iter_mut().enumerate() {
                            let query = load::<S>(q.ptr.add((i + n) * q.stride + at), lanes);
                            sum[s] = S::fma(query, key, sum[s]);
                        }
                    }
                }
                c += S::W * S::SUBS;
            }
            for (n, sum) in sums.iter().enumerate() {
                *out.ptr.add((i + n) * out.stride + j) = S::sum16(sum);
            }
        }
    }
}

/// `acc[i][c] = fma(p[i][j], v[j][c], acc[i][c])` for `j < nk` in order, `i < nq`, `c < d`.
///
/// # Safety
/// All three matrices hold what is read and written; the instruction set is available.
#[inline(always)]
pub unsafe fn pv<S: Simd, E: KvElement>(
    p: Rows2<*const f32>,
    nq: usize,
    v: Rows2<*const E>,
    nk: usize,
    d: usize,
    acc: Rows2<*mut f32>,
) {
    let mut i = 0;
    // SAFETY: i + Q <= nq in each call.
    unsafe {
        while i + QUERIES <= nq {
            pv_rows::<S, E, QUERIES>(p, i, v, nk, d, acc);
            i += QUERIES;
        }
        while i < nq {
            pv_rows::<S, E, 1>(p, i, v, nk, d, acc);
            i += 1;
        }
    }
}

/// Rows `i..i+Q` of `acc`.
///
/// # Safety
/// As [`pv`], with `i + Q` rows.
#[inline(always)]
unsafe fn pv_rows<S: Simd, E: KvElement, const Q: usize>(
    p: Rows2<*const f32>,
    i: usize,
    v: Rows2<*const E>,
    nk: usize,
    d: usize,
    acc: Rows2<*mut f32>,
) {
    let mut c = 0;
    while c < d {
        // SAFETY: columns c..c+lanes below d, rows below i + Q and nk.
        unsafe {
            let lanes = S::W.min(d - c);
            let mut sums = [S::splat(0.0); Q];
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = load::<S>(acc.ptr.add((i + n) * acc.stride + c), lanes);
            }
            for j in 0..nk {
                let value = E::load::<S>(v.ptr.add(j * v.stride + c), lanes);
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(S::splat(*p.ptr.add((i + n) * p.stride + j)), value, *sum);
                }
            }
            for (n, sum) in sums.iter().enumerate() {
                store::<S>(acc.ptr.add((i + n) * acc.stride + c), *sum, lanes);
            }
        }
        c += S::W;
    }
}
