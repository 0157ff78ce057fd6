//! Steps in spans: what the GPU does without the host. A step whose experts are all there is one span. Where experts come and
//! go, a span ends with each router: the host reads the picks, brings what is missing, and puts the next span on the
//! stream. Spans of few rows are recorded once a shape and replayed.

use super::backend::CudaBackend;
use super::graph::Graph;
use super::halves::Part;
use super::launch::gemv::ROWS_MAX;
use super::memory::Pinned;
use super::stream::Streamed;
use crate::units::{ExpertId, Result};

/// Which recorded step: rows, rows that want logits, and block table entries.
pub type Shape = (usize, usize, usize);

/// A step's recorded spans, or that it ran once (so that everything is loaded) and may be recorded.
pub enum Recorded {
    /// Ran once.
    Ran,
    /// All spans, in order.
    Spans(Vec<Graph>),
}

impl CudaBackend {
    /// A whole step of few rows with nothing but logits wanted, everything from the rows' copy to the logits' copy; recorded
    /// from its second time on.
    pub(super) fn small_step(&mut self) -> Result<()> {
        let mut out = std::mem::replace(&mut self.out, Pinned::empty(self.gpu.context()));
        let mut streamed = self.streamed.take();
        // The layers after whose routers the host has its word.
        let reads = if streamed.is_some() { self.routed.clone() } else { Vec::new() };
        let done = self.walk(&reads, streamed.as_mut(), out.bytes_mut());
        // Also after a failure: nothing that runs may use what is given back.
        let idle = self.gpu.device.synchronize();
        if let Some(s) = &mut streamed {
            s.idle();
        }
        (self.out, self.streamed) = (out, streamed);
        done.and(idle)
    }

    fn walk(&mut self, reads: &[usize], mut streamed: Option<&mut Streamed>, out: &mut [u8]) -> Result<()> {
        let key = (self.rows.rows, self.rows.wanted.len(), self.entries());
        let before = if self.options.graphs { self.graphs.remove(&key) } else { None };
        let mut made = Vec::new();
        // The experts of the layer before were run already, in parts: its span begins after them.
        let mut ran = false;
        let mut whole = true;
        if let Some(s) = &mut streamed {
            s.start(self.rows.rows);
        }
        let mut result = Ok(());
        for k in 0..=reads.len() {
            result = match &before {
                Some(Recorded::Spans(spans)) if !ran => self.gpu.replay(&spans[k]),
                Some(Recorded::Ran) if !ran && whole => {
                    let graph = self.gpu.record(|| self.span(reads, k, false, out));
                    graph.and_then(|g| {
                        made.push(g);
                        self.gpu.replay(&made[k])
                    })
                }
                _ => self.span(reads, k, ran, out),
            };
            whole &= !ran;
            if let (Ok(()), Some(s), Some(&l)) = (&result, &mut streamed, reads.get(k)) {
                match self.between(s, l) {
                    Ok(in_parts) => ran = in_parts,
                    Err(e) => result = Err(e),
                }
            } else {
                ran = false;
            }
            if result.is_err() {
                break;
            }
        }
        if self.options.graphs {
            let spans = made.len() == reads.len() + 1;
            let after = if spans { Recorded::Spans(made) } else { before.unwrap_or(Recorded::Ran) };
            self.graphs.insert(key, after);
        }
        result
    }

    /// Span `k` of a whole step. `ran`: the routed experts that it would begin with have run.
    fn span(&self, reads: &[usize], k: usize, ran: bool, out: &mut [u8]) -> Result<()> {
        let cx = self.cx(false);
        let mut from = 0;
        match k.checked_sub(1).map(|k| reads[k]) {
            None => {
                self.rows.send(&self.gpu.device)?;
                cx.embed()?;
                cx.angles()?;
            }
            Some(l) => {
                if !ran {
                    cx.routed_part(l, Part::All)?;
                    cx.after_parts(l)?;
                }
                from = l + 1;
            }
        }
        for l in from..reads.get(k).copied().unwrap_or(self.hyper.n_layers) {
            cx.layer(l)?;
        }
        if let Some(&l) = reads.get(k) {
            return cx.to_picks(l);
        }
        let n = self.rows.wanted.len();
        if n > 0 {
            cx.head(0, n)?;
        }
        let (logits, picks) = out.split_at_mut(4 * n * self.hyper.vocab);
        self.gpu.device.copy_out(logits, self.scratch.logits)?;
        if self.streamed_picks() {
            return Ok(());
        }
        let picks = &mut picks[..4 * self.rows.rows * self.picks_of_row()];
        self.gpu.device.copy_out(picks, self.scratch.made)
    }

    /// Reads the picks of a layer and brings their experts. True if they did not all fit at once, and have run in parts.
    fn between(&self, s: &mut Streamed, l: usize) -> Result<bool> {
        let n = self.rows.rows;
        s.await_picks(&self.gpu.device, l, n)?;
        let ids = s.distinct(l, 0..n);
        if ids.len() <= s.capacity() {
            s.bring(&self.gpu.device, l, &ids)?;
            return Ok(false);
        }
        self.in_parts(s, l, &ids, false)?;
        Ok(true)
    }

    /// Runs a layer's routed experts a part at a time, as slots allow. Parts follow an order that gives the same sums as all at
    /// once.
    fn in_parts(&self, s: &mut Streamed, l: usize, ids: &[ExpertId], replay: bool) -> Result<()> {
        let (cx, device) = (self.cx(replay), &self.gpu.device);
        if cx.is_grouped() {
            // Half of the slots, so that a part is brought while the one before runs.
            for part in ids.chunks((s.capacity() / 2).max(1)) {
                s.bring(device, l, part)?;
                cx.routed_part(l, Part::Experts(part[0], part[part.len() - 1] + 1))?;
                s.mark(device)?;
            }
            return cx.after_parts(l);
        }
        let mut first = 0;
        while first < self.rows.rows {
            let (mut rows, mut part) = (1, s.distinct(l, first..first + 1));
            while first + rows < self.rows.rows {
                let more = s.distinct(l, first..first + rows + 1);
                if more.len() > s.capacity() {
                    break;
                }
                (rows, part) = (rows + 1, more);
            }
            s.bring(device, l, &part)?;
            cx.routed_part(l, Part::Rows(first, rows))?;
            s.mark(device)?;
            first += rows;
        }
        cx.after_parts(l)
    }

    /// One layer of a step of any shape, as it is put on the stream.
    pub(super) fn any_layer(&self, s: Option<&mut Streamed>, l: usize, replay: bool) -> Result<()> {
        let cx = self.cx(replay);
        let (Some(s), true) = (s, self.routed.contains(&l)) else { return cx.layer(l) };
        cx.to_picks(l)?;
        // Long work: sleeping until it is done costs nothing.
        self.gpu.device.synchronize()?;
        s.idle();
        let ids = s.distinct(l, 0..self.rows.rows);
        if ids.len() > s.capacity() {
            return self.in_parts(s, l, &ids, replay);
        }
        s.bring(&self.gpu.device, l, &ids)?;
        cx.routed_part(l, Part::All)?;
        cx.after_parts(l)
    }

    /// True if routers write their picks to host memory.
    pub(super) fn streamed_picks(&self) -> bool {
        self.record != self.scratch.made
    }

    /// Rows of a [`CudaBackend::small_step`].
    pub(super) fn is_small(&self) -> bool {
        self.rows.together.is_empty() && self.rows.rows <= ROWS_MAX && self.rows.wanted.len() <= ROWS_MAX
    }
}
