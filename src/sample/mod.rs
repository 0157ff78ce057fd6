//! Choosing the next token from logits. Pure and deterministic: the same parameters, seed and logits give the same
//! tokens, on any machine.
//!
//! The order is llama.cpp's: logit bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature,
//! then a draw. Nothing allocates a token once buffers have grown to the vocabulary, but for the list of likeliest tokens
//! where that is asked for. Temperature 0 takes the likeliest token after bias, penalties and DRY; ties go to the lower id.

mod filter;
pub mod grammar;
mod grammar_gbnf;
mod history;
mod params;
mod rng;

pub use grammar::{Form, Grammars};
pub use params::SampleParams;
pub use rng::Rng;

use crate::units::{Error, Result, TokenId};
use filter::Candidates;
use history::History;

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: TokenId,
    /// Its natural log-probability in the model's own distribution, before bias, penalties and filters; NaN unless
    /// log-probabilities were asked for.
    pub logprob: f32,
    /// The likeliest tokens of that distribution, likeliest first; as many as asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Holds an answer to a form: a grammar, a schema. One answer's own; it is asked before each token and told after.
pub trait Constraint: Send + std::fmt::Debug {
    /// Sets the logits of every token that may not come next to -infinity. Where the text may end, end tokens stay.
    fn mask(&mut self, logits: &mut [f32]) -> Result<()>;

    /// Takes the chosen token; true if the text is complete and nothing may follow.
    fn accept(&mut self, token: TokenId) -> Result<bool>;
}

/// Chooses tokens for one sequence.
#[derive(Debug)]
pub struct Sampler {
    constraint: Option<Box<dyn Constraint>>,
    params: SampleParams,
    rng: Rng,
    history: History,
    candidates: Candidates,
    weights: Vec<f64>,
    original: Vec<f32>,
}

impl Sampler {
    /// Checks the parameters.
    pub fn new(params: SampleParams) -> Result<Sampler> {
        params.check()?;
        let rng = Rng::new(params.seed);
        let history = History::new(&params);
        let (candidates, weights, original) = (Candidates::default(), Vec::new(), Vec::new());
        Ok(Sampler { constraint: None, params, rng, history, candidates, weights, original })
    }

    /// Tells the sampler of a token that is now part of the text: what it chose, or part of the prompt.
    pub fn accept(&mut self, token: TokenId) {
        self.history.push(token);
    }

    /// Holds what is chosen from now on to a form.
    pub fn constrained(mut self, constraint: Box<dyn Constraint>) -> Sampler {
        self.constraint = Some(constraint);
        self
    }

    /// Accepts a token of the answer (the prompt's go to [`Sampler::accept`], which no form holds); true if the form is
    /// complete with it.
    pub fn advance(&mut self, token: TokenId) -> Result<bool> {
        self.accept(token);
        self.constraint.as_mut().map_or(Ok(false), |c| c.accept(token))
    }

    /// Chooses from `logits (vocab)`, which it changes. NaN counts as -infinity; no finite logit at all is an error.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled> {
        logits.iter_mut().filter(|l| l.is_nan()).for_each(|l| *l = f32::NEG_INFINITY);
        if !logits.iter().any(|l| l.is_finite()) {
            return Err(Error::bad("sampler", "logits", "at least one finite value", "none"));
        }
        let wants_logprobs = self.params.logprobs.is_some();
        if wants_logprobs {
            self.original.clear();
            self.original.extend_from_slice(logits);
        }
        if let Some(c) = &mut self.constraint {
            c.mask(logits)?;
            if !logits.iter().any(|l| *l > f32::NEG_INFINITY) {
                return Err(Error::bad("sampling", "grammar", "to leave one token possible", "none"));
            }
        }
        for &(id, bias) in &self.params.logit_bias {
            let vocab = logits.len();
            match logits.get_mut(id as usize) {
                Some(l) => *l += bias,
                None => {
                    let want = format!("a token id below {vocab}");
                    return Err(Error::bad("sampling", "logit_bias", want, id));
                }
            }
        }
        self.history.penalize(&self.params, logits);
        if !logits.iter().any(|l| *l > f32::NEG_INFINITY) {
            return Err(Error::bad("sampling", "logit_bias", "to leave one token possible", "none"));
        }
        let token = if self.params.temp == 0.0 { argmax(logits) } else { self.draw(logits) };
        let (logprob, top) = if wants_logprobs { self.logprobs(token) } else { (f32::NAN, Vec::new()) };
        Ok(Sampled { token, logprob, top })
    }

    /// Filters and draws.
    fn draw(&mut self, logits: &[f32]) -> TokenId {
        let p = &self.params;
        let c = &mut self.candidates;
        c.collect(logits, p.top_n_sigma);
        c.top_k(p.top_k);
        c.typical(p.typical);
        c.top_p(p.top_p);
        c.min_p(p.min_p);
        c.xtc(p.xtc_probability, p.xtc_threshold, &mut self.rng);
        c.draw(p.temp, &mut self.weights, &mut self.rng)
    }

    /// Log-probability of `token` and of the likeliest tokens before anything was changed.
    fn logprobs(&mut self, token: TokenId) -> (f32, Vec<(TokenId, f32)>) {
        let max = self.original.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = self.original.iter().map(|l| f64::from(l - max).exp()).sum();
        let lse = f64::from(max) + sum.ln();
        let logprob = |l: f32| (f64::from(l) - lse) as f32;
        let mut top = Vec::new();
        if let Some(n) = self.params.logprobs.filter(|&n| n > 0) {
            let c = &mut self.candidates;
            c.collect(&self.original, -1.0);
            c.top_k(n.min(self.original.len() - 1));
            top.extend(c.list().iter().map(|c| (c.id, logprob(c.logit))));
        }
        (logprob(self.original[token as usize]), top)
    }
}

/// The first index of the largest value.
pub fn argmax(v: &[f32]) -> TokenId {
    let best =
        v.iter().enumerate().fold((0, f32::NEG_INFINITY), |a, (i, &x)| if x > a.1 { (i, x) } else { a });
    best.0 as TokenId
}

#[cfg(test)]
mod tests;
