//! Who got how much: an account for each client, so that a greedy one leaves the others their share.
//!
//! The idea is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588): who
//! has been served least goes first. Here a client that is ahead waits even where a batch has room, since on these machines
//! each further row makes the step longer for all. A client that comes back from a pause has a little credit, not all
//! that it did not use.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Tokens that a client may be ahead of one that is ready too.
const AHEAD: f64 = 8.0;
/// Tokens of credit after a pause: the gap between two requests does not cost a client its share.
const CREDIT: f64 = 128.0;
/// A pause longer than this is not one: the client had nothing to ask.
const PAUSE: Duration = Duration::from_secs(2);
/// Accounts of clients not seen for so long are closed.
const FORGET: Duration = Duration::from_secs(60);
/// A prompt's token costs less than a generated one: it shares its step with many.
const PREFILL_SHARE: f64 = 1.0 / 16.0;

#[derive(Debug, Clone)]
struct Account {
    /// Generated tokens.
    tokens: f64,
    /// Tokens of prompts.
    prompt_tokens: f64,
    seen: Instant,
}

/// All accounts.
#[derive(Debug, Default)]
pub struct Accounts {
    clients: HashMap<String, Account>,
}

impl Accounts {
    /// A client has something to do now. Who is new, or comes back, starts near those who are active. Where no one else was,
    /// no one owes anyone anything: it starts where the one that was given most is.
    pub fn seen(&mut self, client: &str, now: Instant) {
        let others = self.clients.iter().filter(|(c, _)| *c != client).map(|(_, a)| a);
        let active = others.clone().filter(|a| now.duration_since(a.seen) < PAUSE);
        let (mut level, mut prompt_level) = (f64::INFINITY, f64::INFINITY);
        for a in active {
            level = level.min(a.tokens);
            prompt_level = prompt_level.min(a.prompt_tokens);
        }
        if level.is_infinite() {
            level = others.clone().map(|a| a.tokens).fold(0.0, f64::max);
            prompt_level = others.map(|a| a.prompt_tokens).fold(0.0, f64::max);
        }
        match self.clients.get_mut(client) {
            Some(a) => {
                let credit = if now.duration_since(a.seen) < PAUSE { CREDIT } else { 0.0 };
                a.tokens = a.tokens.max(level - credit);
                a.prompt_tokens = a.prompt_tokens.max(prompt_level - credit / PREFILL_SHARE);
                a.seen = now;
            }
            None => {
                self.clients.retain(|_, a| now.duration_since(a.seen) < FORGET);
                let account = Account { tokens: level, prompt_tokens: prompt_level, seen: now };
                self.clients.insert(client.to_owned(), account);
            }
        }
    }

    /// A client was given a token, or had prompt tokens read.
    pub fn charge(&mut self, client: &str, tokens: usize, prompt_tokens: usize) {
        if let Some(a) = self.clients.get_mut(client) {
            a.tokens += tokens as f64;
            a.prompt_tokens += prompt_tokens as f64;
        }
    }

    fn tokens(&self, client: &str) -> f64 {
        self.clients.get(client).map_or(0.0, |a| a.tokens)
    }

    /// What a client was given in all, above the one that is active and was given least, in steps of some hundreds of tokens:
    /// within a step other things decide.
    pub fn level(&self, client: &str, now: Instant) -> u64 {
        const STEP: f64 = 256.0;
        let given = |a: &Account| a.tokens + a.prompt_tokens * PREFILL_SHARE;
        let active = self.clients.values().filter(|a| now.duration_since(a.seen) < PAUSE);
        let least = active.map(given).fold(f64::INFINITY, f64::min);
        self.clients.get(client).map_or(0, |a| ((given(a) - least) / STEP) as u64)
    }

    /// Chooses up to `most` of the sequences that are ready to generate, `(client, last served)` each: those of the client
    /// served least first, each client's own in turn, and none of a client that is ahead of another that is ready.
    pub fn choose(&self, ready: &[(&str, u64)], most: usize) -> Vec<usize> {
        // Who is alone waits for no one.
        let alone = ready.iter().all(|(c, _)| *c == ready[0].0);
        let least = ready.iter().map(|(c, _)| self.tokens(c)).fold(f64::INFINITY, f64::min);
        let mut given: HashMap<&str, f64> = HashMap::new();
        let mut left: Vec<usize> = (0..ready.len()).collect();
        let mut chosen = Vec::new();
        while chosen.len() < most {
            let level = |i: &usize| {
                let (client, served) = ready[*i];
                (self.tokens(client) + given.get(client).copied().unwrap_or(0.0), served)
            };
            let order = |a: &usize, b: &usize| {
                let ((ta, sa), (tb, sb)) = (level(a), level(b));
                ta.total_cmp(&tb).then(sa.cmp(&sb)).then(a.cmp(b))
            };
            let Some(next) = left.iter().copied().min_by(order) else { break };
            if !alone && level(&next).0 > least + AHEAD {
                break; // all that is left is further ahead still
            }
            left.retain(|&i| i != next);
            *given.entry(ready[next].0).or_default() += 1.0;
            chosen.push(next);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of each client after some steps; `demand(client, step)` sequences are ready.
    fn serve(steps: usize, most: usize, demand: impl Fn(usize, usize) -> usize) -> [usize; 2] {
        let names = ["a", "b"];
        let (mut accounts, start) = (Accounts::default(), Instant::now());
        let mut got = [0, 0];
        for step in 0..steps {
            let now = start + Duration::from_millis(20 * step as u64);
            let mut ready = vec![];
            for (c, name) in names.iter().enumerate() {
                let n = demand(c, step);
                if n > 0 {
                    accounts.seen(name, now);
                }
                ready.extend((0..n).map(|i| (*name, i as u64)));
            }
            for i in accounts.choose(&ready, most) {
                accounts.charge(ready[i].0, 1, 0);
                got[names.iter().position(|n| *n == ready[i].0).unwrap()] += 1;
            }
        }
        got
    }

    #[test]
    fn a_greedy_client_leaves_the_other_its_share() {
        for (greedy, modest) in [(8, 1), (64, 1), (20, 2), (64, 8)] {
            let [a, b] = serve(1000, 8, |c, _| if c == 0 { greedy } else { modest });
            assert!(b * 10 >= (a + b) * 4, "{greedy} {modest}: {a} {b}");
        }
        // Also where it needs a moment between its requests.
        let [a, b] = serve(2000, 8, |c, step| if c == 0 { 16 } else { usize::from(step % 50 > 2) });
        assert!(b * 10 >= (a + b) * 4, "{a} {b}");
    }

    #[test]
    fn who_is_alone_has_the_whole_batch() {
        assert_eq!(serve(100, 8, |c, _| if c == 0 { 20 } else { 0 }), [800, 0]);
        // A long absence gives no credit.
        let [a, b] = serve(1000, 8, |c, step| if c == 0 { 8 } else { usize::from(step >= 900) });
        assert!(a > 7000 && (90..=110).contains(&b), "{a} {b}");
    }

    #[test]
    fn what_was_given_while_no_one_else_asked_is_no_debt() {
        let (mut accounts, start) = (Accounts::default(), Instant::now());
        let at = |s: u64| start + Duration::from_secs(s);
        accounts.seen("human", at(0));
        accounts.charge("human", 2000, 9000);
        accounts.seen("bulk", at(10));
        accounts.seen("human", at(11));
        assert_eq!((accounts.level("human", at(11)), accounts.level("bulk", at(11))), (0, 0));
        // What is given while both ask counts.
        accounts.charge("bulk", 0, 16_000);
        assert_eq!((accounts.level("human", at(11)), accounts.level("bulk", at(11))), (0, 3));
    }

    #[test]
    fn the_sequences_of_a_client_take_turns() {
        let mut accounts = Accounts::default();
        accounts.seen("a", Instant::now());
        assert_eq!(accounts.choose(&[("a", 5), ("a", 3), ("a", 4)], 2), [1, 2]);
    }
}
