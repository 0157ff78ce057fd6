//! Streams a packed model to its file: rows are read, decoded, turned and encoded a few megabytes at a time on all
//! threads, and written in order. The file appears under its name whole or not at all.

use super::Packed;
use super::convert::{Piece, Recipe, Shape};
use crate::cli::aside::AsideFile;
use crate::format::encode::encode_row;
use crate::format::{Codec, gguf_write};
use crate::observe::{Progress, Unit};
use crate::units::{Error, Result};
use crate::weights::{Reader, Source};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements that a thread takes at a time.
const CHUNK_ELEMENTS: usize = 256 << 10;
/// Chunks a thread between two writes.
const CHUNKS_A_THREAD: usize = 4;

/// Writes the file and gives its size in bytes. `check` sees it whole before it takes its name, and may refuse.
pub fn write(
    source: &Source,
    packed: &Packed,
    output: &Path,
    threads: usize,
    check: impl FnOnce(&Path) -> Result<()>,
) -> Result<u64> {
    let threads = threads.max(1);
    let mut plan = gguf_write::Plan::new();
    packed.meta.iter().for_each(|(key, value)| plan.meta(key, value));
    packed.tensors.iter().for_each(|(t, codec)| plan.tensor(&t.name, *codec, &t.dims));
    let progress = Progress::new("packing", plan.data_bytes(), Unit::Bytes);
    let mut file = AsideFile::create(output)?;
    let fail = |e| Error::io(output, "write", e);
    let mut body = plan.start(&mut file).map_err(fail)?;
    let mut readers: Vec<Reader> = (0..threads).map(|_| Reader::new(1 << 20)).collect();
    for (t, codec) in &packed.tensors {
        body.begin(&t.name).map_err(fail)?;
        let field = |row: usize| format!("tensor {} row {row}", t.name);
        match &t.recipe {
            Recipe::Values(values) => {
                let mut bytes = Vec::new();
                encode(*codec, values, values.len(), &mut bytes)
                    .map_err(|(row, e)| e.at(output, field(row)))?;
                body.write(&bytes).map_err(fail)?;
            }
            Recipe::Pieces(pieces) => {
                for batch in chunks(source, pieces).chunks(threads * CHUNKS_A_THREAD) {
                    for bytes in encoded(source, batch, *codec, &mut readers)? {
                        progress.add(bytes.len() as u64);
                        body.write(&bytes).map_err(fail)?;
                    }
                }
            }
        }
    }
    body.finish().map_err(fail)?;
    file.finish_checked(check)
}

/// Cuts pieces into what one thread does at a time. Pieces that change shape are small and stay whole.
fn chunks(source: &Source, pieces: &[Piece]) -> Vec<Piece> {
    let mut out = Vec::new();
    for p in pieces {
        let cols = source.tensors()[p.tensor].cols();
        let step = if p.shape == Shape::Same { (CHUNK_ELEMENTS / cols).max(1) } else { p.rows };
        for at in (0..p.rows).step_by(step) {
            out.push(Piece { first: p.first + at, rows: step.min(p.rows - at), ..p.clone() });
        }
    }
    out
}

/// Encodes chunks on as many threads as there are readers; results come in order.
fn encoded(source: &Source, batch: &[Piece], codec: Codec, readers: &mut [Reader]) -> Result<Vec<Vec<u8>>> {
    let results: Vec<Mutex<Option<Result<Vec<u8>>>>> = batch.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for reader in readers.iter_mut() {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(piece) = batch.get(i) else { break };
                    *results[i].lock().expect("no holder panics") = Some(chunk(source, piece, codec, reader));
                }
            });
        }
    });
    let taken =
        results.into_iter().map(|r| r.into_inner().expect("no holder panics").expect("every chunk ran"));
    taken.collect()
}

/// Reads, turns and encodes one chunk.
fn chunk(source: &Source, piece: &Piece, codec: Codec, reader: &mut Reader) -> Result<Vec<u8>> {
    let rows = source.rows(piece.tensor)?;
    let t = rows.tensor();
    // Nothing to do is done without loss.
    if piece.shape == Shape::Same && t.codec == codec {
        return Ok(rows.raw(reader, piece.first, piece.rows)?.to_vec());
    }
    let (n, cols) = (piece.rows, t.cols());
    let mut values = vec![0.0; n * cols];
    rows.f32(reader, piece.first, n, &mut values)?;
    let (values, width) = match piece.shape {
        Shape::Same => (values, cols),
        Shape::Interleave => (interleaved(&values, n, cols), cols),
        Shape::Transpose => (transposed(&values, n, cols), n),
    };
    let mut out = Vec::new();
    let field = |row: usize| format!("tensor {} row {}", t.name, piece.first + row);
    encode(codec, &values, width, &mut out)
        .map_err(|(row, e)| e.at(source.file_of(piece.tensor), field(row)))?;
    Ok(out)
}

fn interleaved(values: &[f32], n: usize, cols: usize) -> Vec<f32> {
    let row = |j: usize| &values[(j / 2 + j % 2 * (n / 2)) * cols..][..cols];
    (0..n).flat_map(|j| row(j).iter().copied()).collect()
}

fn transposed(values: &[f32], n: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|k| (0..n).map(move |r| values[r * cols + k])).collect()
}

/// Encodes rows of `width`; an error says which row.
fn encode(
    codec: Codec,
    values: &[f32],
    width: usize,
    out: &mut Vec<u8>,
) -> std::result::Result<(), (usize, crate::format::encode::Unencodable)> {
    let row_bytes = codec.row_bytes(width).expect("the codec was chosen for this width");
    out.resize(values.len() / width * row_bytes, 0);
    for (row, (src, dst)) in values.chunks_exact(width).zip(out.chunks_exact_mut(row_bytes)).enumerate() {
        encode_row(codec, src, dst).map_err(|e| (row, e))?;
    }
    Ok(())
}
