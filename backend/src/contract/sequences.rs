//! Stop sequences of several tokens, over the tokens of one row.

/// Looks for token sequences that end the output.
#[derive(Clone, Debug, Default)]
pub struct StopSequences {
    sequences: Vec<Vec<u32>>,
    /// The latest tokens, as many as the longest sequence has.
    tail: Vec<u32>,
    longest: usize,
}

impl StopSequences {
    /// Starts before the first token. The prompt does not count.
    pub fn new(sequences: &[Vec<u32>]) -> Self {
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        Self { sequences: sequences.to_vec(), tail: Vec::new(), longest }
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
        self.sequences.iter().any(|sequence| self.tail.ends_with(sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sequence_is_seen_at_its_last_token() {
        let mut stops = StopSequences::new(&[vec![1, 2], vec![2, 2, 3]]);
        let seen: Vec<bool> = [1, 1, 2].into_iter().map(|token| stops.push(token)).collect();
        assert_eq!(seen, [false, false, true]);
    }

    #[test]
    fn without_sequences_nothing_stops() {
        assert!(!StopSequences::new(&[]).push(0));
    }

    proptest! {
        #[test]
        fn it_stops_where_the_whole_output_ends_with_a_sequence(
            sequences in prop::collection::vec(prop::collection::vec(0u32..3, 1..4), 0..3),
            tokens in prop::collection::vec(0u32..3, 0..20),
        ) {
            let mut stops = StopSequences::new(&sequences);
            for end in 1..=tokens.len() {
                let expected = sequences.iter().any(|sequence| tokens[..end].ends_with(sequence));
                prop_assert_eq!(stops.push(tokens[end - 1]), expected);
            }
        }
    }
}
