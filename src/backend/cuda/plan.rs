//! What a model will take of a GPU's memory, said before it takes any; and how much of its routed experts lie there.

use super::backend::{CudaBackend, CudaOptions};
use super::memory::Ptr;
use super::model::{DevFfn, DevModel, Walk};
use super::module::Gpu;
use super::pages::page_bytes;
use super::rows::Rows;
use super::scratch::Scratch;
use super::step::experts_of;
use super::stream::{OfLayer, Streamed};
use super::weights::{self, Stored};
use crate::kv;
use crate::model::{Bound, Hyper, Model, build};
use crate::units::{Bytes, Error, Result};
use crate::weights::{Matrix, MatrixJob, ResidentExperts, Source, resident_bytes};

/// Runs side by side whose whole contexts the block of page addresses has room for.
const RUNS: usize = 64;
/// Device memory that stays free where the budget for experts is what there is: recorded steps and the driver grow.
const SPARE_BYTES: u64 = 256 << 20;

/// Memory that a model takes, before it takes any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Weights on the device but for routed experts.
    pub resident_bytes: u64,
    /// Routed experts on the device, or slots for them.
    pub expert_bytes: u64,
    /// Norms, biases and tables.
    pub vector_bytes: u64,
    /// KV pages.
    pub kv_bytes: u64,
    /// Buffers of a step.
    pub scratch_bytes: u64,
    /// Host memory that is pinned.
    pub pinned_bytes: u64,
    /// Routed experts in host memory.
    pub host_bytes: u64,
}

impl Plan {
    /// All weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.resident_bytes + self.expert_bytes + self.vector_bytes
    }

    /// All device memory.
    pub fn total_bytes(&self) -> u64 {
        self.weight_bytes() + self.kv_bytes + self.scratch_bytes
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [w, k, s] = [self.weight_bytes(), self.kv_bytes, self.scratch_bytes].map(Bytes);
        write!(f, "GPU memory: weights {w}, KV {k}, scratch {s}")?;
        if self.host_bytes > 0 {
            let [e, h] = [self.expert_bytes, self.host_bytes].map(Bytes);
            write!(f, "; {e} of the weights are slots for routed experts, {h} of which stay in host memory")?;
        }
        Ok(())
    }
}

/// How the routed experts lie on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertRoom {
    /// All of them, each in its place; or the model has none.
    Resident,
    /// The same, with some declared missing.
    Faked,
    /// In slots of one size, fewer than there are experts.
    Slots {
        /// Slots.
        slots: usize,
        /// Bytes of a slot.
        bytes: usize,
    },
}

/// A bound model laid out for a GPU, nothing of it loaded yet.
pub struct Draft {
    pub(super) jobs: Vec<MatrixJob>,
    /// Of which these first are routed experts'.
    pub(super) expert_jobs: usize,
    pub(super) stored: Vec<Stored>,
    pub(super) groups: Vec<Vec<usize>>,
    pub(super) model: Model,
    /// Experts without bytes.
    pub(super) shells: ResidentExperts,
    /// Shapes; every address is null.
    pub(super) shape: DevModel,
    pub(super) options: CudaOptions,
    /// How the routed experts lie on the device.
    pub room: ExpertRoom,
    /// Memory that it will take.
    pub plan: Plan,
}

impl Draft {
    /// Lays a model out for a GPU that has `free_bytes`, and checks that the kernels can run it.
    pub fn new(source: &Source, bound: Bound, options: CudaOptions, free_bytes: u64) -> Result<Draft> {
        let (jobs, expert_jobs) = (bound.jobs.clone(), bound.expert_jobs);
        let stored = weights::stored(source, &jobs, options.exact)?;
        let shells = stored.iter().map(|s| Matrix::shell(s.codec, s.rows, s.cols)).collect();
        let (model, shells) = build(source, bound, shells)?;
        let mut walk = Walk::plan(&stored);
        let shape = walk.model(&model, shells.layers())?;
        check(&model.hyper, &shape, &options)?;
        let h = &model.hyper;
        let mut plan = plan(h, &shape, &walk, &stored, expert_jobs, &options);
        let slot_bytes = of_layers(&shape, &stored).iter().flatten().map(OfLayer::bytes).max().unwrap_or(0);
        let room = expert_room(h, &plan, slot_bytes as u64, &options, free_bytes)?;
        if let (Some(m), true) = (&h.moe, room != ExpertRoom::Resident) {
            let slots = match room {
                ExpertRoom::Slots { slots, bytes } => {
                    plan.expert_bytes = slots as u64 * bytes as u64;
                    plan.host_bytes = resident_bytes(source, &jobs[..expert_jobs])?;
                    slots
                }
                _ => expert_jobs / 3,
            };
            let pinned = Streamed::pinned_bytes(slots, options.rows_max, h.n_layers, m.n_picked);
            plan.pinned_bytes += pinned as u64;
        }
        let groups = walk.groups;
        Ok(Draft { jobs, expert_jobs, stored, groups, model, shells, shape, options, room, plan })
    }

    /// Refuses what the GPU has no room for now.
    pub fn check_memory(&self, gpu: &Gpu) -> Result<()> {
        let (free, total) = gpu.context().memory_bytes()?;
        if self.plan.total_bytes() <= free {
            return Ok(());
        }
        Err(Error::Limit {
            what: "GPU memory".into(),
            needs: format!("{} ({})", Bytes(self.plan.total_bytes()), self.plan),
            has: format!("{} free of {}", Bytes(free), Bytes(total)),
        })
    }
}

/// Room in the page address block.
pub fn pages_named(h: &Hyper, o: &CudaOptions) -> usize {
    let stride = h.masks.iter().map(|m| m.stride()).max().unwrap_or(1);
    o.pages.min(kv::pages_for(h.context_tokens, stride)) * RUNS.min(o.rows_max)
}

/// How each layer's experts lie in a slot; `None` for dense layers. Tables are the shape's.
pub fn of_layers(shape: &DevModel, stored: &[Stored]) -> Vec<Option<OfLayer>> {
    let mut next = 0;
    let of_layer = |l: &super::model::DevLayer| match &l.ffn {
        DevFfn::Dense(_) => None,
        DevFfn::Moe(d) => {
            // The loader's first jobs: three an expert, and all of a layer's experts are alike.
            let three = [stored[next], stored[next + 1], stored[next + 2]];
            next += 3 * d.router.rows as usize;
            Some(OfLayer { table: d.table, stored: three })
        }
    };
    shape.layers.iter().map(of_layer).collect()
}

/// How the routed experts will lie, by the budget or by what is free.
fn expert_room(
    h: &Hyper,
    all: &Plan,
    slot_bytes: u64,
    o: &CudaOptions,
    free_bytes: u64,
) -> Result<ExpertRoom> {
    let Some(m) = &h.moe else { return Ok(ExpertRoom::Resident) };
    if o.fake_missing.is_some() {
        return Ok(ExpertRoom::Faked);
    }
    let rest = all.total_bytes() - all.expert_bytes;
    let budget = match o.expert_bytes {
        Some(bytes) => bytes,
        None if all.total_bytes() <= free_bytes => return Ok(ExpertRoom::Resident),
        None => free_bytes.saturating_sub(rest + SPARE_BYTES),
    };
    if budget >= all.expert_bytes {
        return Ok(ExpertRoom::Resident);
    }
    let slots = budget / slot_bytes;
    // A row's picks are all read by one launch.
    if slots >= m.n_picked as u64 {
        return Ok(ExpertRoom::Slots { slots: slots as usize, bytes: slot_bytes as usize });
    }
    if o.expert_bytes.is_none() {
        // Nothing fits: the plan of the whole is what an error should show.
        return Ok(ExpertRoom::Resident);
    }
    Err(Error::Limit {
        what: "budget for routed experts".into(),
        needs: format!(
            "{} for the {} experts that a token picks in a layer",
            Bytes(slot_bytes * m.n_picked as u64),
            m.n_picked
        ),
        has: Bytes(budget).to_string(),
    })
}

/// Memory that the model will take with all its experts on the device.
fn plan(
    h: &Hyper,
    shape: &DevModel,
    walk: &Walk,
    stored: &[Stored],
    expert_jobs: usize,
    o: &CudaOptions,
) -> Plan {
    let bytes = |of: &[Stored]| of.iter().map(|s| s.room_bytes() as u64).sum();
    let (experts, resident) = stored.split_at(expert_jobs);
    let rows = Rows::bytes(o.rows_max, pages_named(h, o));
    Plan {
        resident_bytes: bytes(resident),
        expert_bytes: bytes(experts),
        vector_bytes: 4 * walk.vectors.len() as u64,
        kv_bytes: o.pages as u64 * page_bytes(h, o.kv_type()) as u64,
        scratch_bytes: (Scratch::bytes(h, shape, o.rows_max) + rows) as u64,
        pinned_bytes: (CudaBackend::out_bytes(h, o) + rows) as u64,
        host_bytes: 0,
    }
}

/// What the kernels ask of a model, said before anything is loaded.
fn check(h: &Hyper, shape: &DevModel, o: &CudaOptions) -> Result<()> {
    super::scratch::heads(h).check(o.kv_type())?;
    let Some(m) = &h.moe else { return Ok(()) };
    for (l, layer) in shape.layers.iter().enumerate() {
        if let DevFfn::Moe(d) = &layer.ffn {
            experts_of(d, m).check(l)?;
        }
    }
    Ok(())
}

/// An address of every expert, in the loader's order: where each is a slot of its own.
pub fn first_places(places: &[Ptr], expert_jobs: usize) -> Vec<Ptr> {
    places[..expert_jobs].iter().step_by(3).copied().collect()
}
