//! The router's choice, `kernels/router.cu`, and for few rows its product too, `kernels/router_few.cu`.

use crate::backend::cuda::params::{MatrixParams, Params};
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
use crate::format::Codec;
use crate::format::layout::tiles;
use crate::model::{Gating, MoeHyper};
use crate::units::Result;

/// The module.
pub const UNIT: Unit = Unit::of("router");

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Router {
    /// `(rows, n_experts)` f32.
    pub logits: Ptr,
    /// Rows.
    pub rows: usize,
    /// `(n_experts)` f32 added for the choice, or null.
    pub bias: Ptr,
    /// `(rows, route_stride)` u32 picks to replay, all below `n_experts`; or null.
    pub given: Ptr,
    /// The same shape: where picks are recorded; or null.
    pub record: Ptr,
    /// `record` is host memory that the host reads while the GPU goes on.
    pub outside: bool,
    /// Elements from one row's picks to the next's, and where this layer's start.
    pub route: (usize, usize),
    /// `(rows, n_picked)` of [`crate::backend::cuda::params::PickParams`].
    pub picks: Ptr,
}

impl Router {
    /// The plain choice: no bias, nothing replayed or recorded. `logits` may be null for [`few`].
    pub fn of(logits: Ptr, rows: usize, picks: Ptr) -> Router {
        let none = Ptr::NULL;
        Router { logits, rows, bias: none, given: none, record: none, outside: false, route: (0, 0), picks }
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RouterParams {
    logits: Ptr,
    bias: Ptr,
    given: Ptr,
    record: Ptr,
    picks: Ptr,
    experts: u32,
    picked: u32,
    groups: u32,
    groups_picked: u32,
    gating: u32,
    normalize: u32,
    scale: f32,
    route_stride: u32,
    route_offset: u32,
    outside: u32,
}
const _: () = assert!(size_of::<RouterParams>() == 80);
// SAFETY: repr(C) without padding; RouterParams of kernels/router.cu.
unsafe impl Params for RouterParams {}

impl RouterParams {
    fn new(m: &MoeHyper, a: &Router) -> RouterParams {
        RouterParams {
            logits: a.logits,
            bias: a.bias,
            given: a.given,
            record: a.record,
            picks: a.picks,
            experts: m.n_experts as u32,
            picked: m.n_picked as u32,
            groups: m.n_groups as u32,
            groups_picked: m.n_groups_picked as u32,
            gating: match m.gating {
                Gating::Softmax => 0,
                Gating::Sigmoid => 1,
            },
            normalize: m.normalize.into(),
            scale: m.scale,
            route_stride: a.route.0 as u32,
            route_offset: a.route.1 as u32,
            outside: a.outside.into(),
        }
    }
}

/// Bytes of shared memory that a row's warp needs.
fn row_bytes(m: &MoeHyper) -> usize {
    (2 * m.n_experts + m.n_groups) * 4
}

/// Picks experts for every row.
pub fn pick(gpu: &Gpu, m: &MoeHyper, a: &Router) -> Result<()> {
    let grid = Grid { blocks: [a.rows as u32, 1, 1], threads: 32, shared_bytes: row_bytes(m) as u32 };
    gpu.launch(UNIT, "router_pick", grid, &RouterParams::new(m, a))
}

/// Most rows of [`few`], as in the kernel.
pub const FEW_ROWS_MAX: usize = 8;
/// Columns of a block of [`few`], as in the kernel.
const FEW_COLS: usize = 128;
/// Warps of a block of [`few`].
const FEW_WARPS: usize = 4;

/// The module that multiplies and picks for few rows in one launch; `None` where the router's matrix or the number of
/// experts has none, and then a product and [`pick`] do it.
pub fn few_unit(m: &MoeHyper, codec: Codec, rows: usize) -> Option<Unit> {
    let variant = match codec {
        Codec::F32 => "CODEC=CODEC_F32",
        Codec::F16 => "CODEC=CODEC_F16",
        Codec::BF16 => "CODEC=CODEC_BF16",
        _ => return None,
    };
    let fits = rows <= FEW_ROWS_MAX && FEW_WARPS * row_bytes(m) <= 40 << 10;
    fits.then_some(Unit { file: "router_few", variant })
}

/// One launch of the router's product and choice.
#[derive(Debug, Clone, Copy)]
pub struct RouterFew {
    /// `(n_experts, cols)`
    pub w: MatrixParams,
    /// `(rows, cols)` f32.
    pub x: Ptr,
    /// Elements from one row of `x` to the next.
    pub x_row: usize,
    /// [`few_bytes`]; its first four bytes are zero before the first launch and after each.
    pub scratch: Ptr,
    /// The choice; its logits are not used.
    pub pick: Router,
}

/// Bytes that [`few`] works in.
pub fn few_bytes(n_experts: usize, cols: usize, rows: usize) -> usize {
    256 + rows * cols.div_ceil(FEW_COLS) * n_experts * 4
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RouterFewParams {
    w: MatrixParams,
    x: Ptr,
    sums: Ptr,
    done: Ptr,
    x_row: u64,
    rows: u32,
    pad: u32,
    pick: RouterParams,
}
const _: () = assert!(size_of::<RouterFewParams>() == 184);
// SAFETY: repr(C) without padding; RouterFewParams of kernels/router_few.cu.
unsafe impl Params for RouterFewParams {}

/// Logits in f32, then picks, for up to [`FEW_ROWS_MAX`] rows.
pub fn few(gpu: &Gpu, m: &MoeHyper, a: &RouterFew) -> Result<()> {
    let unit = few_unit(m, a.w.codec(), a.pick.rows).expect("the caller asked whether it fits");
    let params = RouterFewParams {
        w: a.w,
        x: a.x,
        sums: a.scratch.at(256),
        done: a.scratch,
        x_row: a.x_row as u64,
        rows: a.pick.rows as u32,
        pad: 0,
        pick: RouterParams::new(m, &a.pick),
    };
    let splits = (a.w.cols as usize).div_ceil(FEW_COLS);
    let grid = Grid {
        blocks: [tiles(m.n_experts) as u32, splits as u32, 1],
        threads: 32 * FEW_WARPS as u32,
        shared_bytes: (FEW_WARPS * row_bytes(m)) as u32,
    };
    gpu.launch(unit, "router_few", grid, &params)
}
