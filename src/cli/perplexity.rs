//! Perplexity's arithmetic: which positions count, and how surprised the model was.

use crate::units::TokenId;

/// Windows side by side: `ctx` tokens each, an incomplete last one dropped. A position is scored by the row before
/// it, so the first of a window never is.
#[derive(Debug, Clone, Copy)]
pub struct Windows {
    /// Tokens a window.
    pub ctx: usize,
    /// Score only the second half of each window, whose tokens have at least `ctx/2` of context.
    pub skip_half: bool,
}

impl Windows {
    /// Complete windows in a text.
    pub fn count(&self, tokens: usize) -> usize {
        tokens / self.ctx
    }

    /// The first scored position of a window; every later one is scored too.
    pub fn first_scored(&self) -> usize {
        if self.skip_half { (self.ctx / 2).max(1) } else { 1 }
    }
}

/// Logits that give the token that follows them no probability.
#[derive(Debug, Clone, PartialEq)]
pub struct Senseless {
    /// Their position in the window.
    pub row: usize,
    /// The token that follows.
    pub target: TokenId,
    /// The first value that is in the way, and its token.
    pub found: String,
}

impl Senseless {
    fn of(logits: &[f32], row: usize, target: TokenId) -> Senseless {
        let wrong = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        let at = logits.iter().position(wrong).unwrap_or(target as usize);
        Senseless { row, target, found: format!("{} for token {at}", logits[at]) }
    }
}

/// The sum so far. Log-probabilities are taken in f64: a text has a million of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// Sum of negative log-probabilities, in nats.
    pub nll: f64,
    /// Sum of their squares, for the standard error.
    squares: f64,
    /// Scored positions.
    pub scored: u64,
}

impl Tally {
    /// Takes the rows `first_row..` of a window's logits, `(rows, vocab)`: row `i` predicts token `i + 1`. Stops at the first
    /// row by which that token has no probability.
    pub fn add(
        &mut self,
        windows: &Windows,
        window: &[TokenId],
        first_row: usize,
        logits: &[f32],
        vocab: usize,
    ) -> Result<(), Senseless> {
        for (i, row) in logits.chunks_exact(vocab).enumerate() {
            let position = first_row + i + 1;
            if position >= windows.first_scored() && position < window.len() {
                let target = window[position];
                let nll = nll(row, target);
                if !nll.is_finite() {
                    return Err(Senseless::of(row, position - 1, target));
                }
                self.nll += nll;
                self.squares += nll * nll;
                self.scored += 1;
            }
        }
        Ok(())
    }

    /// The perplexity: exp of the mean.
    pub fn ppl(&self) -> f64 {
        (self.nll / self.scored as f64).exp()
    }

    /// The perplexity's standard error, as if positions were independent.
    pub fn error(&self) -> f64 {
        let n = self.scored as f64;
        let mean = self.nll / n;
        let variance = (self.squares / n - mean * mean).max(0.0);
        self.ppl() * (variance / (n - 1.0).max(1.0)).sqrt()
    }
}

/// Minus the log-probability of `target` under the logits of one row.
fn nll(row: &[f32], target: TokenId) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = row.iter().map(|&x| (x as f64 - max).exp()).sum();
    sum.ln() + max - row[target as usize] as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every position by the definition, one window at a time, whole.
    fn plain(
        tokens: &[TokenId],
        w: &Windows,
        vocab: usize,
        logits: impl Fn(&[TokenId], usize) -> Vec<f32>,
    ) -> f64 {
        let (mut sum, mut n) = (0.0, 0);
        for window in tokens.chunks_exact(w.ctx) {
            for p in w.first_scored()..w.ctx {
                let row = logits(window, p - 1);
                assert_eq!(row.len(), vocab);
                let z: f64 = row.iter().map(|&x| (x as f64).exp()).sum();
                sum -= ((row[window[p] as usize] as f64).exp() / z).ln();
                n += 1;
            }
        }
        (sum / n as f64).exp()
    }

    #[test]
    fn chunks_add_up_to_the_definition() {
        let vocab = 7;
        let tokens: Vec<TokenId> = (0..33).map(|i| (i * i + 3) % 7).collect();
        let model = |w: &[TokenId], row: usize| -> Vec<f32> {
            (0..7).map(|v| ((w[row] * 31 + v * 17 + row as u32) % 13) as f32 * 0.3 - 1.0).collect()
        };
        for (ctx, skip_half) in [(8, false), (8, true), (5, true), (33, false), (2, true)] {
            let w = Windows { ctx, skip_half };
            let mut tally = Tally::default();
            assert_eq!(w.count(tokens.len()), 33 / ctx);
            for window in tokens.chunks_exact(ctx) {
                for first in (0..ctx).step_by(3) {
                    let rows = first..(first + 3).min(ctx);
                    let logits: Vec<f32> = rows.flat_map(|r| model(window, r)).collect();
                    tally.add(&w, window, first, &logits, vocab).unwrap();
                }
            }
            let want = plain(&tokens, &w, vocab, model);
            assert!((tally.ppl() - want).abs() < 1e-9 * want, "{ctx} {skip_half}: {} {want}", tally.ppl());
            assert_eq!(tally.scored as usize, (33 / ctx) * (ctx - w.first_scored()));
            assert!(tally.error() >= 0.0);
        }
    }

    #[test]
    fn even_odds_give_the_size_of_the_vocabulary() {
        let mut tally = Tally::default();
        tally.add(&Windows { ctx: 3, skip_half: false }, &[0, 1, 2], 0, &[1000.0; 12], 4).unwrap();
        assert_eq!(tally.scored, 2);
        assert!((tally.ppl() - 4.0).abs() < 1e-12 && tally.error() < 1e-9);
    }

    #[test]
    fn rows_that_say_nothing_are_named() {
        let w = Windows { ctx: 4, skip_half: false };
        let say = |at: usize, value: f32| {
            let mut logits = [0.5; 16];
            logits[at] = value;
            Tally::default().add(&w, &[0, 1, 2, 3], 0, &logits, 4).map_err(|e| (e.row, e.target, e.found))
        };
        for (at, value, row, found) in [
            (0, f32::NAN, 0, "NaN for token 0"),
            (7, f32::NAN, 1, "NaN for token 3"),
            (9, f32::INFINITY, 2, "inf for token 1"),
            (6, f32::NEG_INFINITY, 1, "-inf for token 2"),
        ] {
            assert_eq!(say(at, value), Err((row, row as u32 + 1, found.into())));
        }
        // A token that is ruled out and does not come is fine, and so is what no token follows.
        assert_eq!(say(7, f32::NEG_INFINITY), Ok(()));
        assert_eq!(say(13, f32::NAN), Ok(()));
    }
}
