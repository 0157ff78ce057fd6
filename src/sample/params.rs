//! Sampling parameters and their checks.

use crate::units::{Error, Result, TokenId};

/// How tokens are chosen. The defaults turn everything off but the greedy choice.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleParams {
    /// Same seed, same text.
    pub seed: u64,
    /// Divides the logits; 0: greedy.
    pub temp: f32,
    /// Keep this many of the likeliest; 0: all.
    pub top_k: usize,
    /// Keep the likeliest that sum to this; 1: all.
    pub top_p: f32,
    /// Drop those below this share of the likeliest; 0: none.
    pub min_p: f32,
    /// Locally typical sampling (arXiv:2202.00666); 1: off.
    pub typical: f32,
    /// Keep logits within this many standard deviations of the best (arXiv:2411.07641); 0 or below: off.
    pub top_n_sigma: f32,
    /// Chance of dropping all likely tokens but the least likely of them; 0: off.
    pub xtc_probability: f32,
    /// What counts as likely for XTC; above 0.5 it never acts.
    pub xtc_threshold: f32,
    /// Strength against repeated passages; 0: off.
    pub dry_multiplier: f32,
    /// Growth of that with the passage's length.
    pub dry_base: f32,
    /// Passages shorter than this are free.
    pub dry_allowed_length: usize,
    /// Tokens looked back; `None`: all.
    pub dry_penalty_last_n: Option<usize>,
    /// Token sequences over which no passage reaches: line ends, quotes, list bullets. See
    /// [`Tokenizer::sequences_with`](crate::text::Tokenizer::sequences_with).
    pub dry_breakers: Vec<Vec<TokenId>>,
    /// Divides positive and multiplies negative logits of recent tokens; 1: off.
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back; `None`: all.
    pub repeat_last_n: Option<usize>,
    /// Taken from a token's logit for each use.
    pub frequency_penalty: f32,
    /// Taken from a used token's logit.
    pub presence_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Give the chosen token's log-probability and those of this many of the likeliest; `None`: neither.
    pub logprobs: Option<usize>,
}

impl Default for SampleParams {
    fn default() -> SampleParams {
        SampleParams {
            seed: 0,
            temp: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: None,
            dry_breakers: Vec::new(),
            repeat_penalty: 1.0,
            repeat_last_n: Some(64),
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
        }
    }
}

impl SampleParams {
    /// Always the likeliest token.
    pub fn greedy() -> SampleParams {
        SampleParams::default()
    }

    /// Refuses values that have no meaning, by name.
    pub(super) fn check(&self) -> Result<()> {
        let range = |field: &str, v: f32, low: f32, high: f32| {
            if (low..=high).contains(&v) {
                return Ok(());
            }
            Err(Error::bad("sampling", field, format!("a number from {low} to {high}"), v))
        };
        range("temperature", self.temp, 0.0, 100.0)?;
        range("top_p", self.top_p, 0.0, 1.0)?;
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("typical", self.typical, 0.0, 1.0)?;
        range("top_n_sigma", self.top_n_sigma, -1e6, 1e6)?;
        range("xtc_probability", self.xtc_probability, 0.0, 1.0)?;
        range("xtc_threshold", self.xtc_threshold, 0.0, 1.0)?;
        range("dry_multiplier", self.dry_multiplier, 0.0, 1e6)?;
        range("dry_base", self.dry_base, 0.0, 1e6)?;
        range("repeat_penalty", self.repeat_penalty, 1e-3, 1e3)?;
        range("frequency_penalty", self.frequency_penalty, -1e3, 1e3)?;
        range("presence_penalty", self.presence_penalty, -1e3, 1e3)?;
        for (id, bias) in &self.logit_bias {
            if bias.is_nan() || *bias == f32::INFINITY {
                return Err(Error::bad("sampling", format!("logit_bias[{id}]"), "a number or -inf", bias));
            }
        }
        Ok(())
    }
}
