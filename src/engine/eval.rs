//! Evaluation: given tokens through the model, with logits, hidden states and expert picks handed out chunk by chunk.

use super::Engine;
use crate::backend::{Input, MlaOrder, Run, StepPlan, Want};
use crate::kv::BlockTable;
use crate::units::{ExpertId, Result, TokenId};

/// f32s of logits that one step of an evaluation may give.
const LOGITS_MAX: usize = 16 << 20;

/// How to evaluate.
#[derive(Debug, Clone, Default)]
pub struct EvalOptions<'a> {
    /// Tokens of a step; 0: as many as the backend takes.
    pub chunk: usize,
    /// Sequences in the batch: the others are rotations of the same tokens, to show that company does not matter.
    pub batch: usize,
    /// Hidden states to return, as [`StepPlan::hidden`] numbers them.
    pub hidden: Vec<usize>,
    /// Return expert picks.
    pub record_routes: bool,
    /// Replay these picks, `(tokens, n_layers, n_picked)`.
    pub routes: Option<&'a [ExpertId]>,
    /// Positions before this one get no logits.
    pub logits_from: usize,
}

/// What one step of an evaluation gives.
#[derive(Debug)]
pub struct EvalChunk<'a> {
    /// Position of the first row.
    pub position: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first row of `logits`.
    pub logits_from: usize,
    /// `(rows from logits_from on, vocab)` f32
    pub logits: &'a [f32],
    /// `(rows, hidden)` f32 for each number asked for.
    pub hidden: Vec<&'a [f32]>,
    /// `(rows, n_layers, n_picked)`
    pub routes: &'a [ExpertId],
    /// `(rows, n_layers)` with the routes, if the backend tells ([`crate::backend::StepOutput::margins`]).
    pub margins: &'a [f32],
}

impl Engine {
    /// Runs `tokens` from an empty cache and hands each step's results to `f`.
    pub fn eval(
        &mut self,
        tokens: &[TokenId],
        options: &EvalOptions,
        f: &mut dyn FnMut(EvalChunk) -> Result<()>,
    ) -> Result<()> {
        super::check_tokens("tokens", tokens, self.hyper.vocab)?;
        super::check_context(tokens.len(), self.context_tokens)?;
        let batch = options.batch.max(1);
        let mut tables: Vec<BlockTable> = (0..batch).map(|_| BlockTable::default()).collect();
        let result = self.eval_in(tokens, options, &mut tables, f);
        tables.into_iter().for_each(|t| self.release(t));
        result
    }

    fn eval_in(
        &mut self,
        tokens: &[TokenId],
        options: &EvalOptions,
        tables: &mut [BlockTable],
        f: &mut dyn FnMut(EvalChunk) -> Result<()>,
    ) -> Result<()> {
        let order = self.prompt_order(tokens.len(), 0);
        let batch = tables.len();
        // All rows of a step may want logits: 64 MiB of them at most.
        let by_logits = (LOGITS_MAX / self.hyper.vocab).max(1);
        let most = (self.backend.rows_max() / batch).clamp(1, by_logits);
        let chunk = if options.chunk == 0 { most } else { options.chunk.min(most) };
        let company: Vec<Vec<TokenId>> = (0..batch)
            .map(|b| {
                let mut t = tokens.to_vec();
                t.rotate_left(b % tokens.len().max(1));
                t
            })
            .collect();
        let mut position = 0;
        while position < tokens.len() {
            let mut end = (position + chunk).min(tokens.len());
            if position < options.logits_from {
                end = end.min(options.logits_from); // a step's rows want logits together
            }
            self.eval_step(&company, position..end, order, options, tables, f)?;
            position = end;
        }
        Ok(())
    }

    fn eval_step(
        &mut self,
        company: &[Vec<TokenId>],
        rows: std::ops::Range<usize>,
        mla: MlaOrder,
        options: &EvalOptions,
        tables: &mut [BlockTable],
        f: &mut dyn FnMut(EvalChunk) -> Result<()>,
    ) -> Result<()> {
        for t in tables.iter_mut() {
            t.reserve(&mut self.pool, rows.end, self.stride)?;
            t.tokens = rows.end;
        }
        let n = rows.len();
        let picked = self.hyper.n_layers * self.hyper.moe.as_ref().map_or(0, |m| m.n_picked);
        let want = if rows.start >= options.logits_from { Want::All } else { Want::Nothing };
        let runs: Vec<Run> = company
            .iter()
            .zip(tables.iter())
            .enumerate()
            .map(|(b, (tokens, table))| Run {
                input: Input::Tokens(&tokens[rows.clone()]),
                position: rows.start,
                rows: n,
                pages: &table.pages,
                mla,
                want: if b == 0 { want } else { Want::Nothing },
            })
            .collect();
        // The company replays the same picks: what it computes is not looked at.
        let routes = options.routes.map(|r| r[rows.start * picked..rows.end * picked].repeat(company.len()));
        let plan = StepPlan {
            runs: &runs,
            layers: 0..self.hyper.n_layers,
            hidden: &options.hidden,
            record_routes: options.record_routes,
            routes: routes.as_deref(),
        };
        self.backend.step(&plan, &mut self.out)?;
        let out = &self.out;
        f(EvalChunk {
            position: rows.start,
            rows: n,
            logits_from: if want == Want::All { rows.start } else { rows.end },
            logits: &out.logits,
            hidden: out.hidden.iter().map(|h| &h[..n * self.hyper.hidden]).collect(),
            routes: if options.record_routes { &out.routes[..n * picked] } else { &[] },
            margins: out.margins.get(..n * self.hyper.n_layers).unwrap_or_default(),
        })
    }
}
