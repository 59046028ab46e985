//! A chain of drafts in the making: drawn one token after the other from a drafter's own distributions.

use super::Proposal;
use crate::batch::Entry;
use crate::sampling::{Context, Stream, confidence};

pub(super) struct Chains {
    /// How likely each is held to be; 1 where nobody asks.
    likelihood: Vec<f32>,
}

impl Chains {
    pub(super) fn new(num_entries: usize) -> Self {
        Self { likelihood: vec![1.0; num_entries] }
    }

    /// Draws the next token of the entry with this number from the drafter's own processed distribution.
    pub(super) fn extend(
        &mut self,
        idx: usize,
        entry: &Entry<'_>,
        logits: &[f32],
        proposal: &mut Proposal,
    ) {
        let sampler = entry.sampler;
        let drafted = &proposal.tokens;
        let context = Context { tokens: entry.tokens, prompt_len: entry.prompt_len, drafted };
        let q = sampler.distribution(logits, context);
        let position = entry.tokens.len() + proposal.len();
        let token = sampler.draw(&q, position, Stream::Draft(proposal.len()));
        proposal.push(token, Some(q));
        proposal.passes += 1;
        if entry.min_confidence > 0.0 {
            self.likelihood[idx] *= confidence(logits);
        }
    }

    /// Whether one more token is to be drawn. That is settled before it is, or q would be biased.
    pub(super) fn goes_on(&self, idx: usize, entry: &Entry<'_>, proposal: &Proposal) -> bool {
        proposal.len() < entry.draft_lens.model && self.likelihood[idx] >= entry.min_confidence
    }
}
