//! Attention's two products over a block of cached rows.
//!
//! Both work on register tiles: a key or value is loaded (and widened from f16) once for up to 8 queries. Scores cost a fused
//! multiply-add a 16 elements and about 5 operations a (query, key) for the sum over lanes; values a fused
//! multiply-add a 16 elements. `acc[d] = fma(p[j], v[j][d], acc[d])` in the order of j, so that a block may be cut anywhere.

use super::simd::{LANES, Simd};
use super::vector::{load, store};

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
        data: &'a [crate::format::f16],
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

impl KvElement for crate::format::f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const crate::format::f16, lanes: usize) -> S::F {
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

impl<T> Rows2<*const T> {
    /// The rows from `i` on.
    ///
    /// # Safety
    /// Row `i` exists.
    #[inline(always)]
    unsafe fn row(self, i: usize) -> Self {
        // SAFETY: by the contract.
        Rows2 { ptr: unsafe { self.ptr.add(i * self.stride) }, ..self }
    }
}

impl<T> Rows2<*mut T> {
    /// The rows from `i` on.
    ///
    /// # Safety
    /// Row `i` exists.
    #[inline(always)]
    unsafe fn row(self, i: usize) -> Self {
        // SAFETY: by the contract.
        Rows2 { ptr: unsafe { self.ptr.add(i * self.stride) }, ..self }
    }
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
        // 24 sums, 4 keys and a query fill 29 of 32 registers; each key comes from the cache once for six queries.
        while S::SUBS == 1 && i + 6 <= nq {
            qk_rows::<S, E, 6>(q, i, k, nk, d, out);
            i += 6;
        }
        while S::SUBS == 1 && i + 4 <= nq {
            qk_rows::<S, E, 4>(q, i, k, nk, d, out);
            i += 4;
        }
        while i + 2 <= nq {
            qk_rows::<S, E, 2>(q, i, k, nk, d, out);
            i += 2;
        }
        if i < nq {
            qk_rows::<S, E, 1>(q, i, k, nk, d, out);
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
    let mut j = 0;
    // SAFETY: j + K <= nk in each call.
    unsafe {
        while (S::SUBS == 1 || Q == 1) && j + 4 <= nk {
            qk_tile::<S, E, Q, 4>(q, i, k, j, d, out);
            j += 4;
        }
        while j + 2 <= nk {
            qk_tile::<S, E, Q, 2>(q, i, k, j, d, out);
            j += 2;
        }
        if j < nk {
            qk_tile::<S, E, Q, 1>(q, i, k, j, d, out);
        }
    }
}

/// Queries `i..i+Q` against keys `j..j+K`.
///
/// # Safety
/// As [`qk`], with `i + Q` queries and `j + K` keys.
#[inline(always)]
unsafe fn qk_tile<S: Simd, E: KvElement, const Q: usize, const K: usize>(
    q: Rows2<*const f32>,
    i: usize,
    k: Rows2<*const E>,
    j: usize,
    d: usize,
    out: Rows2<*mut f32>,
) {
    // SAFETY: queries below i + Q, keys below j + K, columns below d.
    unsafe {
        let (q, k) = (q.row(i), k.row(j));
        let mut sums = [[[S::splat(0.0); 4]; K]; Q];
        for c in (0..d).step_by(LANES) {
            for s in 0..S::SUBS {
                let at = c + s * S::W;
                let lanes = S::W.min(d.saturating_sub(at));
                if lanes == 0 {
                    break;
                }
                let mut keys = [S::splat(0.0); K];
                for m in 0..K {
                    keys[m] = E::load::<S>(k.ptr.add(m * k.stride + at), lanes);
                }
                for n in 0..Q {
                    let query = load::<S>(q.ptr.add(n * q.stride + at), lanes);
                    for m in 0..K {
                        sums[n][m][s] = S::fma(query, keys[m], sums[n][m][s]);
                    }
                }
            }
        }
        for n in 0..Q {
            let out = out.ptr.add((i + n) * out.stride + j);
            if K == 4 {
                S::sum16_of_4(&[sums[n][0], sums[n][1 % K], sums[n][2 % K], sums[n][3 % K]], out);
            } else {
                for m in 0..K {
                    *out.add(m) = S::sum16(&sums[n][m]);
                }
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
        while S::REGISTERS >= 32 && i + 8 <= nq {
            pv_rows::<S, E, 8, 2>(p, i, v, nk, d, acc);
            i += 8;
        }
        while i + 4 <= nq {
            pv_rows::<S, E, 4, 2>(p, i, v, nk, d, acc);
            i += 4;
        }
        while i + 2 <= nq {
            pv_rows::<S, E, 2, 4>(p, i, v, nk, d, acc);
            i += 2;
        }
        if i < nq {
            pv_rows::<S, E, 1, 8>(p, i, v, nk, d, acc);
        }
    }
}

/// Rows `i..i+Q` of `acc`, `V` registers of columns at a time.
///
/// # Safety
/// As [`pv`], with `i + Q` rows.
#[inline(always)]
unsafe fn pv_rows<S: Simd, E: KvElement, const Q: usize, const V: usize>(
    p: Rows2<*const f32>,
    i: usize,
    v: Rows2<*const E>,
    nk: usize,
    d: usize,
    acc: Rows2<*mut f32>,
) {
    let mut c = 0;
    // SAFETY: the columns of each call are below d.
    unsafe {
        let (p, acc) = (p.row(i), acc.row(i));
        while c + V * S::W <= d {
            pv_tile::<S, E, Q, V>(p, v, nk, c, S::W, acc);
            c += V * S::W;
        }
        while c < d {
            let lanes = S::W.min(d - c);
            pv_tile::<S, E, Q, 1>(p, v, nk, c, lanes, acc);
            c += lanes;
        }
    }
}

/// `Q` rows and `V` registers of columns from `c` on; the last register has `lanes` columns.
///
/// # Safety
/// The rows and columns exist; `lanes` is `W` unless `V` is 1.
#[inline(always)]
unsafe fn pv_tile<S: Simd, E: KvElement, const Q: usize, const V: usize>(
    p: Rows2<*const f32>,
    v: Rows2<*const E>,
    nk: usize,
    c: usize,
    lanes: usize,
    acc: Rows2<*mut f32>,
) {
    // SAFETY: by the contract.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; Q];
        for n in 0..Q {
            for m in 0..V {
                sums[n][m] = load::<S>(acc.ptr.add(n * acc.stride + c + m * S::W), lanes);
            }
        }
        for j in 0..nk {
            let row = v.ptr.add(j * v.stride + c);
            let mut values = [S::splat(0.0); V];
            for m in 0..V {
                values[m] = E::load::<S>(row.add(m * S::W), lanes);
            }
            for n in 0..Q {
                let weight = S::splat(*p.ptr.add(n * p.stride + j));
                for m in 0..V {
                    sums[n][m] = S::fma(weight, values[m], sums[n][m]);
                }
            }
        }
        for n in 0..Q {
            for m in 0..V {
                store::<S>(acc.ptr.add(n * acc.stride + c + m * S::W), sums[n][m], lanes);
            }
        }
    }
}
