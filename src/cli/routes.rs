//! Recorded expert picks as a file: one safetensors tensor `routes` of i32, `(tokens, layers * picks)`; dense layers hold 0.
//!
//! Replaying them takes routing flips (a near-tie that rounding decides) out of a comparison of numerics.

use std::path::Path;

use super::tensors::{Dtype, Spec, Writer};
use crate::format::input::NamedBytes;
use crate::format::safetensors;
use crate::model::Hyper;
use crate::units::{Error, ExpertId, Result};

/// Writes picks of shape `(tokens, layers, picks)`.
pub fn write(file: &Path, shape: (usize, usize, usize), picks: &[ExpertId]) -> Result<()> {
    let (tokens, layers, picked) = shape;
    assert_eq!(picks.len(), tokens * layers * picked);
    let width = layers * picked;
    let spec = Spec { name: "routes".into(), dtype: Dtype::I32, rows: Some(tokens), width };
    let writer = Writer::create(file, vec![spec])?;
    let ids: Vec<i32> = picks.iter().map(|&e| e as i32).collect();
    writer.rows_i32(0, 0, &ids)?;
    writer.finish()
}

/// Reads picks for `tokens` tokens of a model and checks that each is an expert of it.
pub fn read(file: &Path, h: &Hyper, tokens: usize) -> Result<Vec<ExpertId>> {
    // A model without routed experts records, and replays, no picks: one script serves both kinds.
    let (n_experts, n_picked) = h.moe.as_ref().map_or((0, 0), |m| (m.n_experts, m.n_picked));
    let width = h.n_layers * n_picked;
    let data_bytes = tokens as u64 * width as u64 * 4;
    // The tensor, and a header that names it.
    let bytes = super::small_file(file, data_bytes + 4096)?;
    let entries = safetensors::parse(&NamedBytes { path: file, bytes: &bytes })?;
    let found = entries.iter().find(|e| e.name == "routes");
    let entry = found.ok_or_else(|| Error::bad(file, "routes", "a tensor of that name", "none"))?;
    let expected = format!("I32 [{tokens}, {width}]");
    if entry.dtype != "I32" || entry.dims != [tokens, width] {
        return Err(Error::bad(file, "routes", expected, format!("{} {:?}", entry.dtype, entry.dims)));
    }
    let data = &bytes[entry.offset as usize..][..data_bytes as usize];
    let ids = data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let ids: Vec<ExpertId> = ids.collect();
    match ids.iter().position(|&e| e as usize >= n_experts) {
        Some(i) => {
            let expected = format!("an expert below {}", n_experts);
            Err(Error::bad(file, format!("routes, element {i}"), expected, ids[i]))
        }
        None => Ok(ids),
    }
}
