//! From a draft to a backend: memory is taken, weights are read and copied, kernels are compiled.

use super::backend::{CudaBackend, CudaOptions};
use super::memory::{Arena, Pinned, Ptr};
use super::model::{DevFfn, DevModel, Walk};
use super::module::Gpu;
use super::pages::Pages;
use super::plan::{Draft, ExpertRoom, first_places, of_layers, pages_named};
use super::rows::Rows;
use super::scratch::Scratch;
use super::stream::{Parts, Streamed};
use super::weights::Stored;
use super::{units, weights};
use crate::backend::Counters;
use crate::model::Hyper;
use crate::units::{Bytes, Error, Result};
use crate::weights::{Expert, ExpertSource, FakeMisses, Matrix, ResidentExperts, Source};
use std::collections::HashMap;
use std::sync::Arc;

impl CudaBackend {
    /// Loads a drafted model. Routed experts that the draft leaves to slots come from `experts`; without such a source all of them
    /// are read into host memory. `progress` gets the file bytes read so far.
    pub fn load(
        gpu: Gpu,
        source: &Source,
        draft: Draft,
        experts: Option<Arc<dyn ExpertSource>>,
        progress: &dyn Fn(u64),
    ) -> Result<CudaBackend> {
        draft.check_memory(&gpu)?;
        let taken = Taken::new(&gpu, &draft)?;
        log::info!("GPU memory taken: {} of {}", Bytes(gpu.context().allocated_bytes()), draft.plan);
        let Draft { jobs, expert_jobs, stored, model, shells, options, room, plan, .. } = draft;
        let Taken { arena, first, places, slots, vectors, pages, scratch, rows } = taken;
        let (h, threads) = (model.hyper.clone(), options.threads);
        let experts = match experts {
            Some(source) => Some(source),
            None if slots.is_empty() => None,
            None => {
                let loaded = crate::weights::load(source, &jobs[..first], threads, progress)?;
                Some(Arc::new(filled(&shells, loaded)) as Arc<dyn ExpertSource>)
            }
        };
        let read = weights::jobs_bytes(source, &jobs[..first]);
        let rest = |done| progress(read + done);
        let (jobs, to) = (&jobs[first..], &places[first..]);
        weights::load(&gpu.device, source, jobs, &stored[first..], to, threads, &rest)?;
        let mut walk = Walk::with(&stored, &places, vectors);
        let dev = walk.model(&model, shells.layers())?;
        gpu.device.copy_in(vectors, &walk.vectors)?;
        if !scratch.router_few.is_null() {
            gpu.device.zero(scratch.router_few, 4)?;
        }
        gpu.device.synchronize()?;
        gpu.prepare(&units::of(&dev, &h, options.kv_type(), options.rows_max, options.exact))?;
        let lain = Lain { dev: &dev, stored: &stored, h: &h, options: &options };
        let streamed = match (room, options.fake_missing) {
            (ExpertRoom::Slots { .. }, _) => {
                let experts = experts.expect("given or loaded above");
                Some(lain.streamed(&gpu, experts, slots)?)
            }
            (ExpertRoom::Faked, share) => {
                let fakes = FakeMisses::new(shells, share.unwrap_or(0.0).into());
                let mut s = lain.streamed(&gpu, Arc::new(fakes), first_places(&places, expert_jobs))?;
                s.hold(lain.experts());
                Some(s)
            }
            (ExpertRoom::Resident, _) => None,
        };
        let record = streamed.as_ref().map_or(Ok(scratch.made), |s| s.picks_at())?;
        Ok(CudaBackend {
            graphs: HashMap::new(),
            rows,
            out: Pinned::new(gpu.context(), CudaBackend::out_bytes(&h, &options))?,
            streamed,
            routed: lain.routed(),
            record,
            stride: h.masks.iter().map(|m| m.stride()).max().unwrap_or(1),
            hyper: h,
            model: dev,
            scratch,
            pages,
            options,
            plan,
            counters: Counters::default(),
            _arena: arena,
            gpu,
        })
    }
}

/// A draft's device memory.
struct Taken {
    arena: Arena,
    /// The first matrix with a place of its own: those before are experts that go to slots.
    first: usize,
    places: Vec<Ptr>,
    slots: Vec<Ptr>,
    vectors: Ptr,
    pages: Pages,
    scratch: Scratch,
    rows: Rows,
}

impl Taken {
    /// Takes all of it. Another program may have been quicker since it was checked: an error then shows the plan.
    fn new(gpu: &Gpu, d: &Draft) -> Result<Taken> {
        let (h, o, plan) = (&d.model.hyper, &d.options, d.plan);
        let take = || -> Result<Taken> {
            let (slots, slot_bytes) = match d.room {
                ExpertRoom::Slots { slots, bytes } => (slots, bytes),
                _ => (0, 0),
            };
            let first = if slots > 0 { d.expert_jobs } else { 0 };
            let mut arena = Arena::new(gpu.context());
            Ok(Taken {
                first,
                places: weights::place(&mut arena, &d.stored, &d.groups, first)?,
                slots: arena.reserve(&vec![slot_bytes; slots])?,
                vectors: arena.take(plan.vector_bytes as usize)?,
                pages: Pages::new(&mut arena, h, o.kv_type(), o.pages)?,
                scratch: Scratch::new(&mut arena, h, &d.shape, o.rows_max)?,
                rows: Rows::new(gpu.context(), &mut arena, o.rows_max, pages_named(h, o))?,
                arena,
            })
        };
        take().map_err(|e| match e {
            Error::Limit { what, needs, has } => {
                Error::Limit { what, needs: format!("{needs} ({plan})"), has }
            }
            e => e,
        })
    }
}

/// A model that lies on the device.
struct Lain<'a> {
    dev: &'a DevModel,
    stored: &'a [Stored],
    h: &'a Hyper,
    options: &'a CudaOptions,
}

impl Lain<'_> {
    /// Layers with routed experts.
    fn routed(&self) -> Vec<usize> {
        let is_routed = |l: &usize| matches!(self.dev.layers[*l].ffn, DevFfn::Moe(_));
        (0..self.dev.layers.len()).filter(is_routed).collect()
    }

    /// Every routed expert, in the loader's order.
    fn experts(&self) -> impl Iterator<Item = (usize, u32)> {
        let n = self.h.moe.as_ref().map_or(0, |m| m.n_experts as u32);
        self.routed().into_iter().flat_map(move |l| (0..n).map(move |e| (l, e)))
    }

    fn streamed(&self, gpu: &Gpu, source: Arc<dyn ExpertSource>, slots: Vec<Ptr>) -> Result<Streamed> {
        let m = self.h.moe.as_ref().expect("a model with experts");
        let parts = Parts {
            source,
            layers: of_layers(self.dev, self.stored),
            n_experts: m.n_experts,
            n_picked: m.n_picked,
            slots,
            rows: self.options.rows_max,
            wait: gpu.device.wait,
        };
        Streamed::new(gpu.context(), parts)
    }
}

/// Experts of the shells' shape with the loaded matrices, three an expert.
fn filled(shells: &ResidentExperts, loaded: Vec<Matrix>) -> ResidentExperts {
    let mut next = loaded.into_iter();
    let mut one = || next.next().expect("one matrix a job");
    let mut expert = || Arc::new(Expert { gate: one(), up: one(), down: one() });
    let layers = shells.layers().iter().map(|l| l.iter().map(|_| expert()).collect());
    ResidentExperts::new(layers.collect())
}
