//! A second, smaller model as the drafter: it keeps a KV cache of its own in the same pages as the
//! target's and proposes a chain, one forward pass a token, batched over the sequences.

use super::{Drafter, Proposal};
use crate::Result;
use crate::batch::{Entry, Forward, Segment};
use crate::sampling::{Context, Stream, confidence};
use crate::sequence::SequenceId;
use std::borrow::Cow;
use std::ops::Range;

/// Drafts with a model.
pub struct Model {
    model: Box<dyn Forward>,
    /// Tokens that both models have; what lies behind in either is padding.
    vocab_size: usize,
}

impl Model {
    /// A drafter over `model`. `vocab_size` is the smaller one of the two models' vocabularies.
    pub fn new(model: Box<dyn Forward>, vocab_size: usize) -> Self {
        Self { model, vocab_size }
    }

    /// The entry's tokens to feed. A target may draw a token of its padding, which the drafter may not
    /// have: any other token does instead, at the cost of a worse draft.
    fn readable<'a>(&self, entry: &Entry<'a>) -> Cow<'a, [u32]> {
        let tokens = &entry.tokens[rows_to_feed(entry)];
        let is_known = |token: u32| (token as usize) < self.vocab_size;
        if tokens.iter().all(|&token| is_known(token)) {
            return Cow::Borrowed(tokens);
        }
        tokens.iter().map(|&token| if is_known(token) { token } else { 0 }).collect()
    }
}

impl Drafter for Model {
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); entries.len()];
        let active: Vec<usize> =
            (0..entries.len()).filter(|&idx| !rows_to_feed(&entries[idx]).is_empty()).collect();
        let fed: Vec<Cow<'_, [u32]>> =
            active.iter().map(|&idx| self.readable(&entries[idx])).collect();
        let segments: Vec<Segment<'_>> = active
            .iter()
            .zip(&fed)
            .map(|(&idx, tokens)| {
                let (entry, rows) = (&entries[idx], rows_to_feed(&entries[idx]));
                Segment {
                    tokens,
                    first_position: rows.start,
                    pages: entry.pages,
                    num_logits: usize::from(entry.draft_len > 0),
                    tree: &[],
                }
            })
            .collect();
        if segments.is_empty() {
            return Ok(proposals);
        }
        let mut logits = self.model.forward(&segments)?;
        let mut drafting: Vec<usize> =
            active.into_iter().filter(|&idx| entries[idx].draft_len > 0).collect();
        let mut likelihood = vec![1.0; entries.len()];
        loop {
            for (row, &idx) in drafting.iter().enumerate() {
                let row = &logits.row(row)[..self.vocab_size];
                extend(&entries[idx], row, &mut proposals[idx]);
                if entries[idx].min_confidence > 0.0 {
                    likelihood[idx] *= confidence(row);
                }
            }
            // Whether to propose a position is settled before its token is drawn, or q would be biased.
            drafting.retain(|&idx| {
                proposals[idx].len() < entries[idx].draft_len
                    && likelihood[idx] >= entries[idx].min_confidence
            });
            if drafting.is_empty() {
                return Ok(proposals);
            }
            let segments: Vec<Segment<'_>> = drafting
                .iter()
                .map(|&idx| {
                    let drafted = &proposals[idx].tokens;
                    Segment {
                        tokens: &drafted[drafted.len() - 1..],
                        first_position: entries[idx].tokens.len() + drafted.len() - 1,
                        pages: entries[idx].pages,
                        num_logits: 1,
                        tree: &[],
                    }
                })
                .collect();
            logits = self.model.forward(&segments)?;
        }
    }

    fn computed_after(&self, entry: &Entry<'_>, proposed: usize, accepted: usize) -> usize {
        let fed = rows_to_feed(entry);
        if fed.is_empty() {
            return entry.draft_computed;
        }
        // The last proposed token was never fed; what follows a rejected one is stale.
        fed.end + proposed.saturating_sub(1).min(accepted)
    }

    fn passes(&self, _entry: &Entry<'_>, proposed: usize) -> usize {
        proposed
    }

    fn forget(&mut self, _id: SequenceId) {}
}

/// Known tokens that the drafter runs in this step: none where it is not kept in step, and then it
/// catches up when it is asked again.
fn rows_to_feed(entry: &Entry<'_>) -> Range<usize> {
    let end = entry.computed + entry.chunk;
    if entry.speculates { entry.draft_computed..end } else { end..end }
}

/// Draws the next token of the chain from the drafter's own processed distribution.
fn extend(entry: &Entry<'_>, logits: &[f32], proposal: &mut Proposal) {
    let sampler = entry.sampler;
    let context =
        Context { tokens: entry.tokens, prompt_len: entry.prompt_len, drafted: &proposal.tokens };
    let q = sampler.distribution(logits, context);
    let position = entry.tokens.len() + proposal.len();
    let token = sampler.draw(&q, position, Stream::Draft(proposal.len()));
    proposal.push(token, Some(q));
}
