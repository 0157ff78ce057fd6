//! Loads matrices: rows of tensors, read in parallel past the system's cache and repacked into the tile layout in
//! segments of memory that never change after.
//!
//! Each matrix is cut into units of some megabytes of whole tiles. Threads take units in the order of the file, read a
//! unit's rows into their own small buffer and repack them in place, so that the peak is the weights and those buffers.

use super::file::Reader;
use super::source::{Rows, Source};
use super::{Matrix, Segment, WeightBytes};
use crate::format::layout::{self, F8_BLOCK, PLANE_ALIGN, Planes, TILE_ROWS};
use crate::format::{Codec, TilesMut, put_f8_scales};
use crate::units::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A run of rows of one tensor, counted over its flattened outer dimensions.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSpan {
    /// Index in [`Source::tensors`].
    pub tensor: usize,
    /// First row.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
}

/// One matrix to load.
#[derive(Debug, Clone)]
pub struct MatrixJob {
    /// Names the matrix in messages.
    pub name: String,
    /// Its rows, one span after another, all of the same width.
    pub spans: Vec<RowSpan>,
    /// Load the transpose: `(cols, rows)`.
    pub transpose: bool,
}

/// Segments are filled up to this size; a larger matrix has one of its own.
const SEGMENT_BYTES: usize = 128 << 20;
/// File bytes of a unit of work: large enough for the disk, small enough for a thread's buffer.
const UNIT_BYTES: usize = 2 << 20;
/// More reads than this at a time gain nothing on one disk.
const WORKERS_MAX: usize = 16;
/// How often progress is reported.
const PROGRESS_EVERY: Duration = Duration::from_millis(50);

/// How a job becomes a matrix.
struct Planned<'s> {
    codec: Codec,
    rows: usize,
    cols: usize,
    planes: Planes,
    transpose: bool,
    /// Rows, and which of them.
    spans: Vec<(Rows<'s>, RowSpan)>,
}

impl Planned<'_> {
    /// True if rows go into tiles as the file has them.
    fn keeps_codec(&self) -> bool {
        self.spans.iter().all(|(rows, _)| rows.tensor().codec == self.codec)
    }
}

/// Bytes that `jobs` will take in memory.
pub fn resident_bytes(source: &Source, jobs: &[MatrixJob]) -> Result<u64> {
    let mut total = 0;
    for job in jobs {
        let (codec, rows, cols) = shape(source, job)?;
        total += planes(source, job, codec, rows, cols)?.total_bytes as u64;
    }
    Ok(total)
}

/// Codec, rows and columns of the matrices that `jobs` will make, before anything is read.
pub fn shapes(source: &Source, jobs: &[MatrixJob]) -> Result<Vec<(Codec, usize, usize)>> {
    jobs.iter().map(|job| shape(source, job)).collect()
}

/// Loads `jobs` with `threads` threads. `progress` gets the file bytes done so far, from this thread.
pub fn load(
    source: &Source,
    jobs: &[MatrixJob],
    threads: usize,
    progress: &dyn Fn(u64),
) -> Result<Vec<Matrix>> {
    let planned = jobs.iter().map(|job| plan(source, job)).collect::<Result<Vec<_>>>()?;
    let places = place(&planned);
    let mut segments = Vec::with_capacity(places.segment_bytes.len());
    for &len in &places.segment_bytes {
        segments.push(Segment::try_zeroed(len, "memory for weights")?);
    }
    fill(&planned, &places, &mut segments, threads, progress)?;
    let segments: Vec<Arc<Segment>> = segments.into_iter().map(Arc::new).collect();
    let matrix = |(p, &(segment, offset)): (&Planned, &(usize, usize))| {
        let bytes = WeightBytes::new(segments[segment].clone(), offset, p.planes.total_bytes);
        Matrix::new(p.codec, p.rows, p.cols, bytes)
    };
    Ok(planned.iter().zip(&places.of_job).map(matrix).collect())
}

/// Codec, rows and columns of the matrix that a job makes.
fn shape(source: &Source, job: &MatrixJob) -> Result<(Codec, usize, usize)> {
    let tensors = source.tensors();
    let first = &tensors[job.spans.first().expect("a job has rows").tensor];
    let mut rows = 0usize;
    for span in &job.spans {
        let t = &tensors[span.tensor];
        assert!(span.first_row + span.rows <= t.rows(), "{}: rows of {}", job.name, t.name);
        if t.cols() != first.cols() {
            let field = format!("tensor {}", t.name);
            let expected = format!("rows of {} as in {}", first.cols(), first.name);
            return Err(Error::bad(source.file_of(span.tensor), field, expected, t.cols()));
        }
        rows += span.rows;
    }
    let codec = result_codec(source, job);
    Ok(if job.transpose { (codec, first.cols(), rows) } else { (codec, rows, first.cols()) })
}

/// The file's codec where the tile layout can hold the rows as they are, else F32, which holds every codec's values
/// exactly.
fn result_codec(source: &Source, job: &MatrixJob) -> Codec {
    let tensors = source.tensors();
    let codec = tensors[job.spans[0].tensor].codec;
    let same = job.spans.iter().all(|s| tensors[s.tensor].codec == codec);
    let keeps = match codec {
        Codec::F32 | Codec::F16 | Codec::BF16 => true,
        // Block scales are part of the value: they transpose and join only on block boundaries.
        Codec::F8E4M3 => {
            let span = &job.spans[0];
            let on_block = span.first_row.is_multiple_of(F8_BLOCK) && tensors[span.tensor].scale.is_some();
            !job.transpose && job.spans.len() == 1 && on_block
        }
        // Blocks run along rows.
        _ => !job.transpose,
    };
    if same && keeps { codec } else { Codec::F32 }
}

fn planes(source: &Source, job: &MatrixJob, codec: Codec, rows: usize, cols: usize) -> Result<Planes> {
    layout::planes(codec, rows, cols).ok_or_else(|| {
        let field = format!("matrix {}", job.name);
        Error::bad(source.path(), field, "a size that fits memory", format_args!("({rows}, {cols})"))
    })
}

fn plan<'s>(source: &'s Source, job: &MatrixJob) -> Result<Planned<'s>> {
    let (codec, rows, cols) = shape(source, job)?;
    let planes = planes(source, job, codec, rows, cols)?;
    let mut spans = Vec::with_capacity(job.spans.len());
    for span in &job.spans {
        spans.push((source.rows(span.tensor)?, span.clone()));
    }
    Ok(Planned { codec, rows, cols, planes, transpose: job.transpose, spans })
}

/// Which segment holds each matrix, and where.
struct Places {
    segment_bytes: Vec<usize>,
    /// Segment and offset, a job.
    of_job: Vec<(usize, usize)>,
}

fn place(planned: &[Planned]) -> Places {
    let mut places = Places { segment_bytes: Vec::new(), of_job: Vec::with_capacity(planned.len()) };
    for p in planned {
        let len = p.planes.total_bytes.next_multiple_of(PLANE_ALIGN);
        let last = places.segment_bytes.last().copied();
        let offset = match last.filter(|used| used + len <= SEGMENT_BYTES) {
            Some(used) => used,
            None => {
                places.segment_bytes.push(0);
                0
            }
        };
        let segment = places.segment_bytes.len() - 1;
        places.segment_bytes[segment] = offset + len;
        places.of_job.push((segment, offset));
    }
    places
}

/// Some whole tiles of one matrix, and the matrix row they start at.
struct Unit<'a, 's> {
    planned: &'a Planned<'s>,
    first_row: usize,
    tiles: TilesMut<'a>,
    file_bytes: u64,
}

/// Cuts the matrices' memory into units, in job order.
fn units<'a, 's>(
    planned: &'a [Planned<'s>],
    places: &Places,
    segments: &'a mut [Segment],
) -> Vec<Unit<'a, 's>> {
    let mut units = Vec::new();
    let mut rest: Vec<&mut [u8]> = segments.iter_mut().map(Segment::bytes_mut).collect();
    for (p, &(segment, _)) in planned.iter().zip(&places.of_job) {
        let len = p.planes.total_bytes.next_multiple_of(PLANE_ALIGN);
        let (mine, tail) = std::mem::take(&mut rest[segment]).split_at_mut(len);
        rest[segment] = tail;
        let mine = &mut mine[..p.planes.total_bytes];
        if p.codec == Codec::F8E4M3 {
            let (rows, span) = &p.spans[0];
            let blocks = p.cols.div_ceil(F8_BLOCK);
            let from = span.first_row / F8_BLOCK * blocks;
            let n = p.rows.div_ceil(F8_BLOCK) * blocks;
            put_f8_scales(p.rows, p.cols, &p.planes, mine, &rows.scales()[from..from + n]);
        }
        cut(p, TilesMut::new(p.codec, p.rows, p.cols, mine), &mut units);
    }
    units
}

fn cut<'a, 's>(p: &'a Planned<'s>, mut tiles: TilesMut<'a>, units: &mut Vec<Unit<'a, 's>>) {
    let file_bytes = |rows: usize| rows as u64 * p.spans[0].0.tensor().row_bytes() as u64;
    if p.transpose {
        // A tile of the transpose needs a column of every row: one unit. Transposed matrices are small (a head of MLA).
        let total = p.spans.iter().map(|(_, s)| file_bytes(s.rows)).sum();
        units.push(Unit { planned: p, first_row: 0, tiles, file_bytes: total });
        return;
    }
    let row_bytes = p.codec.row_bytes(p.cols).expect("planned");
    let step = (UNIT_BYTES / row_bytes.max(1) / TILE_ROWS).max(1);
    let mut first_row = 0;
    while tiles.tiles() > 0 {
        let n = step.min(tiles.tiles());
        let (unit, rest) = tiles.split_at(n);
        tiles = rest;
        let rows = unit.rows();
        units.push(Unit { planned: p, first_row, tiles: unit, file_bytes: file_bytes(rows) });
        first_row += rows;
    }
}

/// Reads and repacks every unit.
fn fill(
    planned: &[Planned],
    places: &Places,
    segments: &mut [Segment],
    threads: usize,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let mut units = units(planned, places, segments);
    // Threads pop from the end; the file's order keeps the disk sequential.
    units.reverse();
    let units = Mutex::new(units);
    let done_bytes = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    let work = || -> Result<()> {
        let mut worker =
            Worker { reader: Reader::new(UNIT_BYTES), file_rows: Vec::new(), values: Vec::new() };
        while !failed.load(Ordering::Relaxed) {
            let Some(mut unit) = units.lock().expect("no worker panics").pop() else { break };
            let result = worker.run(&mut unit);
            result.inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            done_bytes.fetch_add(unit.file_bytes, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers(threads)).map(|_| scope.spawn(work)).collect();
        while !workers.iter().all(|w| w.is_finished()) {
            progress(done_bytes.load(Ordering::Relaxed));
            wait(&workers);
        }
        progress(done_bytes.load(Ordering::Relaxed));
        workers.into_iter().try_for_each(|w| w.join().expect("a worker's bug is ours"))
    })
}

/// A worker that waits for the disk uses no core, so there are more of them than threads asked for.
fn workers(threads: usize) -> usize {
    (2 * threads).clamp(4, WORKERS_MAX)
}

/// Sleeps until the next progress report, less if the workers end before.
fn wait<T>(workers: &[std::thread::ScopedJoinHandle<T>]) {
    let step = Duration::from_millis(1);
    let mut waited = Duration::ZERO;
    while waited < PROGRESS_EVERY && !workers.iter().all(|w| w.is_finished()) {
        std::thread::sleep(step);
        waited += step;
    }
}

/// A thread's buffers.
struct Worker {
    reader: Reader,
    /// A unit's rows in the codec of the result, where they cannot be repacked from the reader's buffer.
    file_rows: Vec<u8>,
    /// Decoded values.
    values: Vec<f32>,
}

impl Worker {
    fn run(&mut self, unit: &mut Unit) -> Result<()> {
        let p = unit.planned;
        if p.transpose {
            return self.transposed(unit);
        }
        let (first, n) = (unit.first_row, unit.tiles.rows());
        let pieces = pieces(p, first, n);
        if let [(i, first, n)] = pieces[..]
            && p.keeps_codec()
        {
            // The common case: one run of rows, straight from the buffer into tiles.
            unit.tiles.put(p.spans[i].0.raw(&mut self.reader, first, n)?);
            return Ok(());
        }
        self.file_rows.clear();
        for (i, first, n) in pieces {
            self.append(p, i, first, n)?;
        }
        unit.tiles.put(&self.file_rows);
        Ok(())
    }

    /// Appends rows of span `i` to `file_rows` in the codec of the result.
    fn append(&mut self, p: &Planned, i: usize, first: usize, n: usize) -> Result<()> {
        let rows = &p.spans[i].0;
        if p.keeps_codec() {
            self.file_rows.extend_from_slice(rows.raw(&mut self.reader, first, n)?);
            return Ok(());
        }
        self.values.resize(n * rows.tensor().cols(), 0.0);
        rows.f32(&mut self.reader, first, n, &mut self.values)?;
        self.file_rows.extend(self.values.iter().flat_map(|v| v.to_le_bytes()));
        Ok(())
    }

    /// Reads all rows of a matrix and fills its transpose.
    fn transposed(&mut self, unit: &mut Unit) -> Result<()> {
        let p = unit.planned;
        self.file_rows.clear();
        for i in 0..p.spans.len() {
            let span = p.spans[i].1.clone();
            self.append(p, i, span.first_row, span.rows)?;
        }
        let size = p.codec.info().block_bytes;
        // The result is (rows, cols); what was read is (cols, rows).
        let mut turned = vec![0; self.file_rows.len()];
        for (k, src) in self.file_rows.chunks_exact(p.rows * size).enumerate() {
            for (r, element) in src.chunks_exact(size).enumerate() {
                turned[(r * p.cols + k) * size..][..size].copy_from_slice(element);
            }
        }
        unit.tiles.put(&turned);
        Ok(())
    }
}

/// Rows `first..first + n` of a matrix as (span, first row in its tensor, rows).
fn pieces(p: &Planned, first: usize, n: usize) -> Vec<(usize, usize, usize)> {
    let mut out = Vec::with_capacity(1);
    let (mut start, end) = (0, first + n);
    for (i, (_, span)) in p.spans.iter().enumerate() {
        let (from, to) = (first.max(start), end.min(start + span.rows));
        if from < to {
            out.push((i, span.first_row + from - start, to - from));
        }
        start += span.rows;
    }
    out
}
