//! What the device says a step did.

use super::params::StepResult;
use crate::batch::{Emitted, Outcome};

/// What a step did, place by place.
pub(super) struct Answers {
    pub(super) results: Vec<StepResult>,
    pub(super) tokens: Vec<u32>,
    /// Tokens of a place.
    pub(super) width: usize,
}

impl Answers {
    fn tokens(&self, place: usize) -> Vec<Emitted> {
        let emit = |&token| Emitted { token, logprob: None, rank: None, top_logprobs: Vec::new() };
        let tokens = &self.tokens[place * self.width..][..self.width];
        tokens[..self.results[place].num_tokens as usize].iter().map(emit).collect()
    }

    /// Of a place with `given` drafts that the graph has not made.
    pub(super) fn outcome(&self, place: usize, given: usize) -> Outcome {
        let result = &self.results[place];
        let (drafted, accepted) = (result.drafted as usize, result.accepted as usize);
        Outcome {
            tokens: self.tokens(place),
            drafted,
            draft_depth: drafted,
            accepted,
            prompt: Vec::new(),
            draft_passes: drafted - given.min(drafted),
            draft_computed: result.draft_computed as usize,
        }
    }
}
