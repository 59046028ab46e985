//! What the device says a step did.

use super::params::StepResult;
use crate::batch::{Emitted, Outcome};

/// What became of the drafts of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settled {
    /// Of the branch that the target went along; of the first one if it went along none.
    pub(super) place: usize,
    /// Drafts of all branches.
    pub(super) drafted: usize,
    /// Those of the longest one.
    pub(super) depth: usize,
}

/// What a step did, place by place.
pub(super) struct Answers {
    pub(super) results: Vec<StepResult>,
    pub(super) tokens: Vec<u32>,
    /// Tokens of a place.
    pub(super) width: usize,
    /// Whether all drafts of the graph come from one pass.
    pub(super) at_once: bool,
}

impl Answers {
    fn tokens(&self, place: usize) -> Vec<Emitted> {
        let emit = |&token| Emitted { token, logprob: None, rank: None, top_logprobs: Vec::new() };
        let tokens = &self.tokens[place * self.width..][..self.width];
        tokens[..self.results[place].num_tokens as usize].iter().map(emit).collect()
    }

    /// Of a place without branches beside it.
    pub(super) fn settled(&self, place: usize) -> Settled {
        let drafted = self.results[place].drafted as usize;
        Settled { place, drafted, depth: drafted }
    }

    /// Of a sequence with `given` drafts that the graph has not made.
    pub(super) fn outcome(&self, settled: &Settled, given: usize) -> Outcome {
        let Settled { place, drafted, depth, .. } = *settled;
        let result = &self.results[place];
        let from_graph = depth - given.min(depth);
        Outcome {
            tokens: self.tokens(place),
            drafted,
            draft_depth: depth,
            accepted: result.accepted as usize,
            prompt: Vec::new(),
            draft_passes: if self.at_once { from_graph.min(1) } else { from_graph },
            draft_computed: result.draft_computed as usize,
        }
    }
}
