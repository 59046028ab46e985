//! Stop sequences of several tokens, over the tokens of one row.

use std::sync::Arc;

/// Looks for token sequences that end the output.
#[derive(Clone, Debug, Default)]
pub struct StopSequences {
    sequences: Arc<[Vec<u32>]>,
    /// The latest tokens, as many as the longest sequence has.
    tail: Vec<u32>,
    longest: usize,
    /// Tokens with which no sequence that ends there counts, of those that are to come.
    num_free: usize,
}

impl StopSequences {
    /// Starts before the first token. The prompt does not count, nor does what ends with one of the first `min_tokens`.
    pub fn new(sequences: &Arc<[Vec<u32>]>, min_tokens: usize) -> Self {
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        Self { sequences: Arc::clone(sequences), tail: Vec::new(), longest, num_free: min_tokens }
    }

    /// Takes the next token and says whether it completes a sequence. The token still belongs to the output.
    pub fn push(&mut self, token: u32) -> bool {
        if self.longest == 0 {
            return false;
        }
        if self.tail.len() == self.longest {
            self.tail.remove(0);
        }
        self.tail.push(token);
        let counts = self.num_free == 0;
        self.num_free = self.num_free.saturating_sub(1);
        counts && self.sequences.iter().any(|sequence| self.tail.ends_with(sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sequence_is_seen_at_its_last_token() {
        let mut stops = StopSequences::new(&[vec![1, 2], vec![2, 2, 3]].into(), 0);
        let seen: Vec<bool> = [1, 1, 2].into_iter().map(|token| stops.push(token)).collect();
        assert_eq!(seen, [false, false, true]);
    }

    #[test]
    fn without_sequences_nothing_stops() {
        assert!(!StopSequences::new(&Arc::default(), 0).push(0));
    }

    proptest! {
        #[test]
        fn it_stops_where_the_whole_output_ends_with_a_sequence_behind_the_first_tokens(
            sequences in prop::collection::vec(prop::collection::vec(0u32..3, 1..4), 0..3),
            tokens in prop::collection::vec(0u32..3, 0..20),
            min_tokens in 0usize..6,
        ) {
            let mut stops = StopSequences::new(&sequences.clone().into(), min_tokens);
            for end in 1..=tokens.len() {
                let ends = sequences.iter().any(|sequence| tokens[..end].ends_with(sequence));
                let expected = ends && end > min_tokens;
                prop_assert_eq!(stops.push(tokens[end - 1]), expected);
            }
        }
    }
}
