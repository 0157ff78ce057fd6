//! The operations that a model step is made of, on the instruction set chosen at start. Every method may be called
//! from several threads at once with disjoint parts; none allocates.

use super::isa::Isa;
use super::kernels::attend::Rows2;
use super::kernels::entry::plain;
#[cfg(target_arch = "aarch64")]
use super::kernels::neon;
use super::kernels::vector::Q8Group;
use super::kernels::{Product, scalar};
#[cfg(target_arch = "x86_64")]
use super::kernels::{avx2, avx512};
use crate::format::layout::GROUP;
use crate::weights::Matrix;
use std::marker::PhantomData;
use std::ops::Range;

pub use super::kernels::attend::KvBlock;

/// Activation rows quantized to 12 bits in groups of 32; reused from step to step. One row alone lacks what only several need.
#[derive(Default)]
pub struct Q8Rows {
    groups: Vec<Q8Group>,
    groups_per_row: usize,
    rows: usize,
}

impl Q8Rows {
    /// Room for `elements` activations (rows times columns), so that [`Q8Rows::shape`] need not allocate.
    pub fn with_capacity(elements: usize) -> Q8Rows {
        Q8Rows { groups: Vec::with_capacity(elements.div_ceil(GROUP)), groups_per_row: 0, rows: 0 }
    }

    /// Makes this `(rows, cols)`, contents undefined; returns what [`Ops::quantize`] writes to.
    pub fn shape(&mut self, rows: usize, cols: usize) -> Q8Out<'_> {
        assert!(cols.is_multiple_of(GROUP));
        (self.rows, self.groups_per_row) = (rows, cols / GROUP);
        self.groups.resize(rows * self.groups_per_row, Q8Group::default());
        Q8Out { ptr: self.groups.as_mut_ptr(), per_row: self.groups_per_row, rows, life: PhantomData }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.groups_per_row * GROUP
    }

    /// The groups of row `i`.
    pub fn row(&self, i: usize) -> &[Q8Group] {
        &self.groups[i * self.groups_per_row..][..self.groups_per_row]
    }
}

/// The writable side of a [`Q8Rows`]: workers fill disjoint rows.
#[derive(Clone, Copy)]
pub struct Q8Out<'a> {
    ptr: *mut Q8Group,
    per_row: usize,
    rows: usize,
    life: PhantomData<&'a mut [Q8Group]>,
}

// SAFETY: it is a mutable slice that workers cut by rows; `Ops::quantize` says that rows must be disjoint.
unsafe impl Send for Q8Out<'_> {}
// SAFETY: as above.
unsafe impl Sync for Q8Out<'_> {}

/// Which rows of the activations a product reads; the i-th one gives row i of the output.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// Rows `0..n`.
    All(usize),
    /// These rows.
    Pick(&'a [u32]),
}

impl Rows<'_> {
    /// How many.
    #[inline(always)]
    pub fn len(&self) -> usize {
        match self {
            Rows::All(n) => *n,
            Rows::Pick(rows) => rows.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The i-th row's index.
    #[inline(always)]
    pub fn at(&self, i: usize) -> usize {
        match self {
            Rows::All(_) => i,
            Rows::Pick(rows) => rows[i] as usize,
        }
    }

    /// One more than the largest index.
    fn end(&self) -> usize {
        match self {
            Rows::All(n) => *n,
            Rows::Pick(rows) => rows.iter().max().map_or(0, |&r| r as usize + 1),
        }
    }
}

/// Where a product's results go: element `(i, row of the matrix)` at `i*stride + row`. Copied to each worker; workers
/// write disjoint tiles.
#[derive(Clone, Copy)]
pub struct Out<'a> {
    ptr: *mut f32,
    len: usize,
    stride: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a mutable slice that workers cut by tiles; `Ops::matmul_q8` says that tiles must be disjoint.
unsafe impl Send for Out<'_> {}
// SAFETY: as above.
unsafe impl Sync for Out<'_> {}

impl<'a> Out<'a> {
    /// Rows of `stride` elements in `slice`; a product uses the first ones of each row.
    pub fn new(slice: &'a mut [f32], stride: usize) -> Out<'a> {
        Out { ptr: slice.as_mut_ptr(), len: slice.len(), stride, life: PhantomData }
    }

    /// The same over a raw buffer.
    ///
    /// # Safety
    /// `ptr` is valid for `len` elements for `'a`, and no one else uses those that products write.
    pub(super) unsafe fn from_raw(ptr: *mut f32, len: usize, stride: usize) -> Out<'a> {
        Out { ptr, len, stride, life: PhantomData }
    }

    /// The same rows from column `first` on.
    pub fn columns_from(self, first: usize) -> Out<'a> {
        assert!(first <= self.len);
        // SAFETY: inside the slice.
        Out { ptr: unsafe { self.ptr.add(first) }, len: self.len - first, ..self }
    }

    /// The same start with rows `stride` apart.
    pub fn with_stride(self, stride: usize) -> Out<'a> {
        Out { stride, ..self }
    }

    /// True if `rows` rows of `cols` elements fit.
    fn holds(&self, rows: usize, cols: usize) -> bool {
        rows == 0 || (cols <= self.stride || rows == 1) && (rows - 1) * self.stride + cols <= self.len
    }

    /// Element `(i, col)`.
    ///
    /// # Safety
    /// It is inside the slice.
    #[inline(always)]
    pub(super) unsafe fn at(&self, i: usize, col: usize) -> *mut f32 {
        // SAFETY: by the contract.
        unsafe { self.ptr.add(i * self.stride + col) }
    }
}

/// Calls a kernel's entry point for the chosen instruction set.
macro_rules! on {
    ($isa:expr, $name:ident ( $($arg:expr),* $(,)? )) => {
        // SAFETY: the method that expands this checked the lengths, and `Ops::new` that the set is available.
        unsafe {
            match $isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Vnni => avx512::$name($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::$name($($arg),*),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonDot => neon::$name($($arg),*),
                _ => plain::$name($($arg),*),
            }
        }
    };
}

/// The operations. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub struct Ops {
    isa: Isa,
}

impl Ops {
    /// Operations on `isa`, which must be available.
    pub fn new(isa: Isa) -> Ops {
        assert!(isa.is_available(), "{} is not available on this machine", isa.name());
        Ops { isa }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Quantizes rows `rows` of `x (n, cols)` into the same rows of `out`. Concurrent calls must have disjoint rows.
    pub fn quantize(&self, x: &[f32], rows: Range<usize>, out: Q8Out<'_>) {
        let cols = out.per_row * GROUP;
        assert!(rows.end <= out.rows && rows.end * cols <= x.len());
        for row in rows {
            // SAFETY: the row is inside `out` and no one else's, by the contract.
            let to = unsafe { std::slice::from_raw_parts_mut(out.ptr.add(row * out.per_row), out.per_row) };
            on!(self.isa, quantize(&x[row * cols..][..cols], to, out.rows > 1));
        }
    }

    /// Quantizes part of a row: whole groups `x` to row `row` of `out` from group `first` on. Concurrent calls must have
    /// disjoint groups.
    pub fn quantize_part(&self, x: &[f32], out: Q8Out<'_>, row: usize, first: usize) {
        let n = x.len() / GROUP;
        assert!(x.len().is_multiple_of(GROUP) && row < out.rows && first + n <= out.per_row);
        // SAFETY: the groups are inside `out` and no one else's, by the contract.
        let to = unsafe { std::slice::from_raw_parts_mut(out.ptr.add(row * out.per_row + first), n) };
        on!(self.isa, quantize(x, to, out.rows > 1));
    }

    /// `out[i][16t + r] = w[16t + r] · x[rows[i]]` for tiles `tiles` of a quantized `w`, with quantized activations.
    /// Concurrent calls on one `out` must have disjoint tiles.
    pub fn matmul_q8(&self, w: &Matrix, tiles: Range<usize>, x: &Q8Rows, rows: Rows<'_>, out: Out<'_>) {
        assert!(!w.codec.is_dense() && w.cols == x.cols() && tiles.end <= w.tiles());
        assert!(rows.end() <= x.rows && out.holds(rows.len(), w.rows));
        assert!(rows.len() <= 1 || x.rows > 1, "one row is quantized for products of one row");
        let p = Product { w, tiles, x: &x.groups, per_row: x.groups_per_row, rows, out };
        on!(self.isa, matmul_q8(&p));
    }

    /// Quantizes `x (n, cols)` into rows `rows` of `to`, and multiplies them by all of `w`: row i of `x` gives row i of `out`.
    /// Concurrent calls must have disjoint rows, and on one `out` disjoint elements.
    pub fn quantize_and_multiply(
        &self,
        w: &Matrix,
        x: &[f32],
        rows: Range<usize>,
        to: Q8Out<'_>,
        out: Out<'_>,
    ) {
        let (n, per_row) = (rows.len(), to.per_row);
        assert!(!w.codec.is_dense() && w.cols == per_row * GROUP && out.holds(n, w.rows));
        assert!(rows.end <= to.rows && x.len() == n * w.cols);
        // SAFETY: the rows are inside `to` and no one else's, by the contract.
        let own = unsafe { std::slice::from_raw_parts_mut(to.ptr.add(rows.start * per_row), n * per_row) };
        on!(self.isa, quantize(x, own, to.rows > 1));
        let p = Product { w, tiles: 0..w.tiles(), x: &*own, per_row, rows: Rows::All(n), out };
        on!(self.isa, matmul_q8(&p));
    }

    /// [`Ops::matmul_q8`] with f32 activations `x (n, cols)` and a `w` of any codec.
    /// Concurrent calls on one `out` must have disjoint tiles.
    pub fn matmul_f32(&self, w: &Matrix, tiles: Range<usize>, x: &[f32], rows: Rows<'_>, out: Out<'_>) {
        assert!(tiles.end <= w.tiles());
        assert!(rows.end() * w.cols <= x.len() && out.holds(rows.len(), w.rows));
        let p = Product { w, tiles, x, per_row: w.cols, rows, out };
        on!(self.isa, matmul_f32(&p));
    }

    /// Row `row` of `w` as f32: an embedding.
    pub fn dequant_row(&self, w: &Matrix, row: usize, out: &mut [f32]) {
        assert!(row < w.rows && out.len() == w.cols);
        scalar::dequant_row(w, row, out);
    }

    /// `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len());
        on!(self.isa, rms_norm(x, weight, eps, out));
    }

    /// The same with `x` as the output.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        assert_eq!(x.len(), weight.len());
        on!(self.isa, rms_norm_in_place(x, weight, eps));
    }

    /// `y += x`.
    pub fn add(&self, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len());
        on!(self.isa, add(x, y));
    }

    /// `y = a*x + y`, rounded once.
    pub fn axpy(&self, a: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len());
        on!(self.isa, axpy(a, x, y));
    }

    /// `x *= a`.
    pub fn scale(&self, a: f32, x: &mut [f32]) {
        on!(self.isa, scale(a, x));
    }

    /// `out = x`, widened: exact.
    pub fn widen(&self, x: &[crate::format::f16], out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        on!(self.isa, from_f16(x, out));
    }

    /// `out = gate * sigmoid(gate) * up`.
    pub fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == up.len() && gate.len() == out.len());
        on!(self.isa, silu_mul(gate, up, out));
    }

    /// `x = 1 / (1 + e^-x)`.
    pub fn sigmoid(&self, x: &mut [f32]) {
        on!(self.isa, sigmoid(x));
    }

    /// The largest of `x`; NaNs are passed over; -infinity for none.
    pub fn max(&self, x: &[f32]) -> f32 {
        on!(self.isa, max(x))
    }

    /// `x = e^(x - max)`; returns their sum.
    pub fn exp_sum(&self, x: &mut [f32], max: f32) -> f32 {
        on!(self.isa, exp_sum(x, max))
    }

    /// Scores: `out[i][j] = q[i] · k[j]` for `i < nq`, `j < nk`, over `d` elements. Strides are in elements.
    pub fn qk(
        &self,
        q: &[f32],
        q_stride: usize,
        nq: usize,
        k: KvBlock<'_>,
        nk: usize,
        d: usize,
        out: &mut [f32],
        out_stride: usize,
    ) {
        assert!(holds(q.len(), q_stride, nq, d) && k.holds(nk, d) && holds(out.len(), out_stride, nq, nk));
        let q = Rows2 { ptr: q.as_ptr(), stride: q_stride };
        let out = Rows2 { ptr: out.as_mut_ptr(), stride: out_stride };
        match k {
            KvBlock::F32 { data, stride } => {
                let k = Rows2 { ptr: data.as_ptr(), stride };
                on!(self.isa, qk(q, nq, k, nk, d, out));
            }
            KvBlock::F16 { data, stride } => {
                let k = Rows2 { ptr: data.as_ptr(), stride };
                on!(self.isa, qk(q, nq, k, nk, d, out));
            }
        }
    }

    /// Values: `acc[i] += Σ_j p[i][j] * v[j]`, fused multiply-adds in the order of j. Strides are in elements.
    pub fn pv(
        &self,
        p: &[f32],
        p_stride: usize,
        nq: usize,
        v: KvBlock<'_>,
        nk: usize,
        d: usize,
        acc: &mut [f32],
        acc_stride: usize,
    ) {
        assert!(holds(p.len(), p_stride, nq, nk) && v.holds(nk, d) && holds(acc.len(), acc_stride, nq, d));
        let p = Rows2 { ptr: p.as_ptr(), stride: p_stride };
        let acc = Rows2 { ptr: acc.as_mut_ptr(), stride: acc_stride };
        match v {
            KvBlock::F32 { data, stride } => {
                let v = Rows2 { ptr: data.as_ptr(), stride };
                on!(self.isa, pv(p, nq, v, nk, d, acc));
            }
            KvBlock::F16 { data, stride } => {
                let v = Rows2 { ptr: data.as_ptr(), stride };
                on!(self.isa, pv(p, nq, v, nk, d, acc));
            }
        }
    }
}

/// True if `rows` rows of `cols` elements, `stride` apart, lie in a slice of `len`.
fn holds(len: usize, stride: usize, rows: usize, cols: usize) -> bool {
    rows == 0 || (rows - 1) * stride + cols <= len
}
