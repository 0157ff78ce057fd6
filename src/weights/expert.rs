//! Routed experts and where they come from. The model asks for experts by layer and id; whether they are resident or
//! read from NVMe on demand is the source's business.

use super::Matrix;
use crate::units::{ExpertId, LayerId, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One routed expert's SwiGLU: `down (silu(gate x) * (up x))`.
#[derive(Debug, Clone)]
pub struct Expert {
    /// `(expert_width, hidden)`
    pub gate: Matrix,
    /// `(expert_width, hidden)`
    pub up: Matrix,
    /// `(hidden, expert_width)`
    pub down: Matrix,
}

impl Expert {
    /// Bytes of the three matrices.
    pub fn size_bytes(&self) -> usize {
        self.gate.size_bytes() + self.up.size_bytes() + self.down.size_bytes()
    }
}

/// Gives out routed experts. An [`Arc`] pins what it points to: a source that evicts must not reuse the memory of an
/// expert while a clone is out.
pub trait ExpertSource: Send + Sync {
    /// Appends the experts `ids` of `layer` to `out`, in order, blocking until each is in memory.
    fn fetch(&self, layer: LayerId, ids: &[ExpertId], out: &mut Vec<Arc<Expert>>) -> Result<()>;

    /// Asked about an expert that a backend holds a copy of: true if it is to be fetched again all the same. Only what fakes
    /// misses says so.
    fn forgets(&self, layer: LayerId, expert: ExpertId) -> bool {
        let _ = (layer, expert);
        false
    }

    /// True if fetched experts have no bytes, because those that the backend holds are right: a miss then costs nothing but
    /// what surrounds it.
    fn forgets_freely(&self) -> bool {
        false
    }
}

/// All experts in memory, `(layer, expert)`; dense layers have an empty row.
pub struct ResidentExperts {
    layers: Vec<Vec<Arc<Expert>>>,
}

impl ResidentExperts {
    /// Takes the loaded experts.
    pub fn new(layers: Vec<Vec<Arc<Expert>>>) -> ResidentExperts {
        ResidentExperts { layers }
    }

    /// All of them, `(layer, expert)`.
    pub fn layers(&self) -> &[Vec<Arc<Expert>>] {
        &self.layers
    }
}

impl ExpertSource for ResidentExperts {
    fn fetch(&self, layer: LayerId, ids: &[ExpertId], out: &mut Vec<Arc<Expert>>) -> Result<()> {
        out.extend(ids.iter().map(|&e| self.layers[layer][e as usize].clone()));
        Ok(())
    }
}

/// Declares a share of the experts missing that a backend holds, at no cost: what it gives out has no bytes. Measures what a
/// backend pays for misses apart from reading and copying.
pub struct FakeMisses {
    /// What is given out.
    shells: ResidentExperts,
    /// Of 2^32.
    share: u64,
    asked: AtomicU64,
}

impl FakeMisses {
    /// `share` of the experts asked for, 0 to 1; `shells` are matrices without bytes.
    pub fn new(shells: ResidentExperts, share: f64) -> FakeMisses {
        let share = (share.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64;
        FakeMisses { shells, share, asked: AtomicU64::new(0) }
    }
}

impl ExpertSource for FakeMisses {
    fn fetch(&self, layer: LayerId, ids: &[ExpertId], out: &mut Vec<Arc<Expert>>) -> Result<()> {
        self.shells.fetch(layer, ids, out)
    }

    fn forgets(&self, _: LayerId, _: ExpertId) -> bool {
        // Multiples of the golden ratio, modulo one, fill the range evenly (Weyl): the share is met in every stretch.
        let n = self.asked.fetch_add(1, Ordering::Relaxed);
        (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) < self.share
    }

    fn forgets_freely(&self) -> bool {
        true
    }
}

#[test]
fn fakes_meet_their_share() {
    for share in [0.0, 0.25, 0.5, 1.0] {
        let fakes = FakeMisses::new(ResidentExperts::new(Vec::new()), share);
        let missed = (0..1000).filter(|_| fakes.forgets(0, 0)).count() as f64;
        assert!((missed - 1000.0 * share).abs() <= 5.0, "{missed} of 1000 at {share}");
    }
}
