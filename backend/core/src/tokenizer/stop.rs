//! Stop strings over a stream of text.
//!
//! The stop that *ends* first in the text counts, and of those that end together the longest. That
//! is known without looking ahead, so the result is a function of the text alone and not of how it
//! is cut into chunks: neither draft length nor batching can change it. No byte of a matched stop is
//! ever emitted, and nothing is held back but what may still become a stop.

use crate::{Error, Result};
use std::sync::Arc;

/// Most stop strings of a request: each costs a step for every byte of the text.
const MAX_STOPS: usize = 256;
const MAX_STOP_BYTES: usize = 1024;

/// Checks the stop strings of a request against their limits.
pub fn check_stops<S: AsRef<str>>(stops: &[S]) -> Result<()> {
    if stops.len() > MAX_STOPS {
        let message = format!("{} entries, at most {MAX_STOPS} are allowed", stops.len());
        return Err(Error::bad_request("stop", message));
    }
    match stops.iter().map(|stop| stop.as_ref().len()).find(|&bytes| bytes > MAX_STOP_BYTES) {
        Some(bytes) => Err(Error::bad_request(
            "stop",
            format!("{bytes} bytes in an entry, at most {MAX_STOP_BYTES} are allowed"),
        )),
        None => Ok(()),
    }
}

/// What a push makes of its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StopOutcome {
    /// Text to send on.
    pub emit: String,
    /// A stop string has been seen: nothing more will be emitted.
    pub stopped: bool,
}

/// Looks for stop strings in one stream of text. Clones share what does not change.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    stops: Arc<[Stop]>,
    /// Of each stop, how many of its bytes the text so far ends with.
    matched: Box<[u32]>,
    /// Whether a stop belongs to the text that it ends. Then nothing need be held back.
    includes: bool,
    /// Text not emitted yet: the longest suffix of the text so far that is the start of a stop.
    held: String,
    stopped: bool,
}

/// One stop string as a Knuth-Morris-Pratt automaton over bytes. Its first byte begins a character,
/// so a match can only begin at a character, and it ends at one.
#[derive(Clone, Debug)]
struct Stop {
    bytes: Box<[u8]>,
    /// `fallback[n]`: length of the longest proper border of the first `n + 1` bytes.
    fallback: Box<[u32]>,
}

impl StopMatcher {
    /// A matcher at the start of a text. Empty strings stop nothing.
    pub(crate) fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        let stops = stops.iter().map(AsRef::as_ref).filter(|stop| !stop.is_empty());
        let stops: Arc<[Stop]> = stops.map(Stop::new).collect();
        let matched = vec![0; stops.len()].into();
        Self { stops, matched, includes: false, held: String::new(), stopped: false }
    }

    /// The same, with the stop that was met as the end of the text.
    pub(crate) fn including(self) -> Self {
        Self { includes: true, ..self }
    }

    /// Takes the next text of the stream. Stops that end in it count if it `counts`.
    pub(crate) fn push(&mut self, text: &str, counts: bool) -> StopOutcome {
        if self.stopped {
            return StopOutcome { emit: String::new(), stopped: true };
        }
        let start = self.held.len();
        self.held.push_str(text);
        for (idx, byte) in text.bytes().enumerate() {
            let stops = self.stops.iter().zip(&mut self.matched);
            let longest = stops.filter_map(|(stop, matched)| stop.step(matched, byte)).max();
            if let Some(len) = longest.filter(|_| counts) {
                self.stopped = true;
                let mut emit = std::mem::take(&mut self.held);
                emit.truncate(start + idx + 1 - if self.includes { 0 } else { len });
                return StopOutcome { emit, stopped: true };
            }
        }
        let keep = self.matched.iter().max().filter(|_| !self.includes);
        let keep = keep.map_or(0, |&bytes| bytes as usize);
        let tail = self.held.split_off(self.held.len() - keep);
        StopOutcome { emit: std::mem::replace(&mut self.held, tail), stopped: false }
    }

    /// The end of the text: returns what was held back. The next push starts a new text.
    pub(crate) fn finish(&mut self) -> String {
        self.stopped = false;
        self.matched.fill(0);
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut border = 0_u32;
        for idx in 1..bytes.len() {
            while border > 0 && bytes[idx] != bytes[border as usize] {
                border = fallback[border as usize - 1];
            }
            border += u32::from(bytes[idx] == bytes[border as usize]);
            fallback[idx] = border;
        }
        Self { bytes: bytes.into(), fallback: fallback.into() }
    }

    /// Takes the next byte of a text that ends with so many of the stop's; the length of the stop where it is now complete.
    fn step(&self, matched: &mut u32, byte: u8) -> Option<usize> {
        while *matched > 0 && self.bytes[*matched as usize] != byte {
            *matched = self.fallback[*matched as usize - 1];
        }
        *matched += u32::from(self.bytes[*matched as usize] == byte);
        let len = self.bytes.len();
        if (*matched as usize) < len {
            return None;
        }
        *matched = self.fallback[len - 1];
        Some(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tries every end from `first` on and every start: the text before the stop that ends first.
    fn naive(text: &str, stops: &[String], first: usize) -> (String, bool) {
        for end in first..=text.len() {
            for start in 0..end {
                if stops.iter().any(|stop| stop.as_bytes() == &text.as_bytes()[start..end]) {
                    return (text[..start].to_string(), true);
                }
            }
        }
        (text.to_string(), false)
    }

    /// The longest suffix of `text` that is the start of a stop and shorter than it.
    fn naive_hold(text: &str, stops: &[String]) -> usize {
        let could_grow =
            |tail: &str| stops.iter().any(|s| s.len() > tail.len() && s.starts_with(tail));
        text.char_indices()
            .map(|(start, _)| &text[start..])
            .find(|tail| could_grow(tail))
            .map_or(0, str::len)
    }

    #[test]
    fn too_many_and_too_long_stops_are_refused() {
        assert!(check_stops(&vec!["x"; 256]).is_ok() && check_stops(&["x".repeat(1024)]).is_ok());
        let many = check_stops(&vec!["x"; 257]).unwrap_err().to_string();
        assert_eq!(many, "stop: 257 entries, at most 256 are allowed");
        let long = check_stops(&["a", &"x".repeat(1025)]).unwrap_err().to_string();
        assert_eq!(long, "stop: 1025 bytes in an entry, at most 1024 are allowed");
    }

    #[test]
    fn a_stop_across_chunks_is_never_leaked() {
        let mut stops = StopMatcher::new(&["<|end|>"]);
        assert_eq!(
            stops.push("one <|e", true),
            StopOutcome { emit: "one ".into(), stopped: false }
        );
        assert_eq!(stops.push("nd|", true), StopOutcome::default());
        assert_eq!(stops.push("> two", true), StopOutcome { emit: String::new(), stopped: true });
        assert_eq!(stops.push("three", true), StopOutcome { emit: String::new(), stopped: true });
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn clones_share_the_stops_and_nothing_of_the_text() {
        let mut first = StopMatcher::new(&["aab"]);
        let mut second = first.clone();
        assert!(Arc::ptr_eq(&first.stops, &second.stops));
        assert_eq!([first.push("aa", true).emit, second.push("b", true).emit], ["", "b"]);
        assert!(first.push("b", true).stopped && !second.push("b", true).stopped);
    }

    #[test]
    fn text_that_turns_out_to_be_no_stop_is_given_back() {
        let mut stops = StopMatcher::new(&["aab"]);
        assert_eq!(stops.push("aa", true).emit, "");
        assert_eq!(stops.push("a", true).emit, "a");
        assert_eq!(stops.finish(), "aa");
    }

    #[test]
    fn the_stop_that_ends_first_counts_and_of_equals_the_longest() {
        assert_eq!(StopMatcher::new(&["abcd", "bc"]).push("xabcd", true).emit, "xa");
        assert_eq!(StopMatcher::new(&["c", "abc"]).push("xabc", true).emit, "x");
    }

    #[test]
    fn a_stop_that_belongs_to_the_text_holds_nothing_back() {
        let mut stops = StopMatcher::new(&["abc"]).including();
        assert_eq!(stops.push("xab", true).emit, "xab");
        assert_eq!(stops.push("cd", true), StopOutcome { emit: "c".into(), stopped: true });
    }

    #[test]
    fn a_stop_counts_where_it_ends() {
        let mut stops = StopMatcher::new(&["aba"]);
        assert_eq!(stops.push("xab", false), StopOutcome { emit: "x".into(), stopped: false });
        // It ends too early; what it ends with may begin another.
        assert_eq!(stops.push("a", false), StopOutcome { emit: "ab".into(), stopped: false });
        assert_eq!(stops.push("ba", true), StopOutcome { emit: String::new(), stopped: true });
    }

    #[test]
    fn empty_stops_stop_nothing() {
        assert_eq!(StopMatcher::new(&[""]).push("text", true).emit, "text");
        assert_eq!(StopMatcher::new::<&str>(&[]).push("text", true).emit, "text");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_chunking_gives_what_the_naive_search_gives(
            chunks in prop::collection::vec("[abé☃]{0,5}", 0..12),
            stops in prop::collection::vec("[abé☃]{1,4}", 0..5),
            num_free in 0usize..4,
        ) {
            let text = chunks.concat();
            let num_free = num_free.min(chunks.len());
            let first = chunks[..num_free].concat().len() + 1;
            let (expected, expected_stopped) = naive(&text, &stops, first);
            let mut matcher = StopMatcher::new(&stops);
            let (mut got, mut seen, mut stopped) = (String::new(), String::new(), false);
            for (idx, chunk) in chunks.iter().enumerate() {
                let outcome = matcher.push(chunk, idx >= num_free);
                got.push_str(&outcome.emit);
                seen.push_str(chunk);
                stopped = outcome.stopped;
                if !stopped {
                    prop_assert_eq!(got.len(), seen.len() - naive_hold(&seen, &stops));
                }
            }
            got.push_str(&matcher.finish());
            prop_assert_eq!(got, expected);
            prop_assert_eq!(stopped, expected_stopped);
        }
    }
}
