//! The router's choice, `kernels/router.cu`.

use crate::backend::cuda::params::Params;
use crate::backend::cuda::{Gpu, Grid, Ptr, Unit};
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
    /// Elements from one row's picks to the next's, and where this layer's start.
    pub route: (usize, usize),
    /// `(rows, n_picked)` of [`crate::backend::cuda::params::PickParams`].
    pub picks: Ptr,
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
    pad: u32,
}
const _: () = assert!(size_of::<RouterParams>() == 80);
// SAFETY: repr(C) without padding; RouterParams of kernels/router.cu.
unsafe impl Params for RouterParams {}

/// Picks experts for every row.
pub fn pick(gpu: &Gpu, m: &MoeHyper, a: &Router) -> Result<()> {
    let params = RouterParams {
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
        pad: 0,
    };
    let groups = if m.n_groups > 1 { m.n_groups } else { 0 };
    let shared_bytes = ((2 * m.n_experts + groups) * 4) as u32;
    gpu.launch(
        UNIT,
        "router_pick",
        Grid { blocks: [a.rows as u32, 1, 1], threads: 32, shared_bytes },
        &params,
    )
}
