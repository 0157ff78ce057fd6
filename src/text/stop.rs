//! Stop strings in a stream of text.

use crate::limits::{STOP_BYTES_MAX, STOPS_MAX};
use crate::units::{Error, Result};

/// Passes text through until a stop string appears. No part of a stop string ever comes out: text that may be the
/// start of one is held back until it is clear.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text not yet passed on: empty, or the start of some stop string.
    held: String,
    hit: Option<usize>,
}

/// What a stop string did to the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopHit {
    /// The stop string.
    pub stop: String,
    /// Bytes pushed after it, which are dropped.
    pub dropped_bytes: usize,
}

impl StopStrings {
    /// Watches for `stops`. An empty string would stop before anything is said, so it is an error.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if stops.len() > STOPS_MAX {
            return Err(Error::bad("request", "stop", format!("at most {STOPS_MAX} strings"), stops.len()));
        }
        for (i, s) in stops.iter().enumerate() {
            if s.is_empty() || s.len() > STOP_BYTES_MAX {
                let found = format!("{} bytes", s.len());
                return Err(Error::bad(
                    "request",
                    format!("stop[{i}]"),
                    format!("1 to {STOP_BYTES_MAX} bytes"),
                    found,
                ));
            }
        }
        Ok(Self { stops, held: String::new(), hit: None })
    }

    /// Takes more text and appends to `out` what is certain not to belong to a stop string. Answers with the stop string
    /// that was met: the one that is whole first. After that, everything is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<StopHit> {
        if self.hit.is_some() || text.is_empty() {
            return None;
        }
        self.held.push_str(text);
        if let Some((at, i)) = self.find() {
            out.push_str(&self.held[..at]);
            let dropped_bytes = self.held.len() - at - self.stops[i].len();
            self.held.clear();
            self.hit = Some(i);
            return Some(StopHit { stop: self.stops[i].clone(), dropped_bytes });
        }
        let keep_from = self.held.len() - self.partial_bytes();
        out.push_str(&self.held[..keep_from]);
        self.held.drain(..keep_from);
        None
    }

    /// Ends the stream: what was held back was no stop string after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Whether a stop string was met.
    pub fn is_hit(&self) -> bool {
        self.hit.is_some()
    }

    /// The stop string in what is held that is whole first, and of those that end at one place the longest. Going by the
    /// end, not the start, makes the answer the same however the text was cut into pushes.
    fn find(&self) -> Option<(usize, usize)> {
        let found =
            self.stops.iter().enumerate().filter_map(|(i, s)| self.held.find(s.as_str()).map(|at| (at, i)));
        found.min_by_key(|&(at, i)| (at + self.stops[i].len(), at))
    }

    /// Length of the longest end of what is held that begins a stop string.
    fn partial_bytes(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest.saturating_sub(1));
        let mut starts = self.held.char_indices().map(|c| c.0).skip_while(|&at| at < from);
        let start = starts.find(|&at| self.stops.iter().any(|s| s.starts_with(&self.held[at..])));
        start.map_or(0, |at| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], chunks: &[&str]) -> (Vec<String>, Option<StopHit>) {
        let mut m = StopStrings::new(stops.iter().map(|s| s.to_string()).collect()).unwrap();
        let (mut parts, mut hit) = (Vec::new(), None);
        for c in chunks {
            let mut out = String::new();
            hit = m.push(c, &mut out).or(hit);
            parts.push(out);
        }
        let mut out = String::new();
        m.finish(&mut out);
        parts.push(out);
        (parts, hit)
    }

    #[test]
    fn holds_back_what_may_be_a_stop_string() {
        let (parts, hit) = run(&["\nUser:"], &["Hi\n", "Us", "ers\n", "User", ": more"]);
        assert_eq!(parts, ["Hi", "", "\nUsers", "", "", ""]);
        assert_eq!(hit, Some(StopHit { stop: "\nUser:".into(), dropped_bytes: 5 }));
        let (parts, hit) = run(&["ab"], &["xa", "", "y", "a"]);
        assert_eq!((parts.concat(), hit), ("xaya".to_owned(), None));
        assert_eq!(parts, ["x", "", "ay", "", "a"]);
    }

    #[test]
    fn overlapping_starts_are_found() {
        assert_eq!(run(&["aab"], &["aa", "a", "b"]).0.concat(), "a");
        assert_eq!(run(&["END", "D!"], &["xEN", "D!"]).0.concat(), "x");
        assert_eq!(run(&["é!"], &["caf", "é", "!"]).0.concat(), "caf");
        assert_eq!(run(&[], &["all", "goes"]).0.concat(), "allgoes");
    }

    #[test]
    fn bad_stop_strings_are_named() {
        let e = StopStrings::new(vec!["a".into(), "".into()]).unwrap_err();
        assert!(e.to_string().contains("stop[1]"), "{e}");
        assert!(StopStrings::new(vec!["a".into(); STOPS_MAX + 1]).is_err());
        assert!(StopStrings::new(vec!["a".repeat(STOP_BYTES_MAX + 1)]).is_err());
    }

    proptest! {
        /// Cut anywhere, the output is the text up to the stop string that is whole first.
        #[test]
        fn equals_the_search_of_the_whole(
            text in "[ab€]{0,30}",
            stops in proptest::collection::vec("[ab€]{1,4}", 0..4),
            step in 1usize..6,
        ) {
            let chars: Vec<char> = text.chars().collect();
            let chunks: Vec<String> = chars.chunks(step).map(String::from_iter).collect();
            let refs: Vec<&str> = chunks.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            // The definition: read on until some stop string ends here; of those the longest.
            let mut want = text.clone();
            for end in 0..=text.len() {
                if !text.is_char_boundary(end) { continue }
                let ends = stops.iter().filter(|s| text[..end].ends_with(**s)).map(|s| s.len()).max();
                if let Some(n) = ends { want.truncate(end - n); break }
            }
            let (parts, hit) = run(&stops, &refs);
            prop_assert_eq!(parts.concat(), want.clone());
            prop_assert_eq!(hit.is_some(), want.len() < text.len());
        }
    }
}
