//! Routed experts and where they come from. The model asks for experts by layer and id; whether they are resident or
//! read from NVMe on demand is the source's business.

use super::Matrix;
use crate::units::{ExpertId, LayerId, Result};
use std::sync::Arc;

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
