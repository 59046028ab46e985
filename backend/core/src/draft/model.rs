//! A second, smaller model as the drafter: it keeps a KV cache of its own in the same pages as the
//! target's and proposes a chain, one forward pass a token, batched over the sequences.

use super::catch_up::{Cached, readable, rows_to_feed};
use super::chain::Chains;
use super::{Drafter, Proposal};
use crate::Result;
use crate::batch::{Entry, Forward, Logits, Segment};
use crate::sequence::SequenceId;
use std::borrow::Cow;

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
}

impl Model {
    /// Runs the known tokens that it has not read; logits behind the last one of those who want drafts.
    fn read_known(&mut self, entries: &[Entry<'_>], proposals: &mut [Proposal]) -> Result<Logits> {
        let mut tokens: Vec<Cow<'_, [u32]>> = Vec::with_capacity(entries.len());
        for (entry, proposal) in entries.iter().zip(proposals) {
            let rows = rows_to_feed(entry);
            let is_fed = !rows.is_empty();
            proposal.cached = is_fed.then_some(Cached { known: rows.end, drafts: 0 });
            tokens.push(readable(&entry.tokens[rows], self.vocab_size));
        }
        let segments = entries.iter().zip(&tokens).map(|(entry, tokens)| Segment {
            tokens,
            first_position: entry.draft_computed,
            pages: entry.pages,
            prompt_len: entry.prompt_len,
            num_logits: usize::from(entry.draft_lens.model > 0),
            tree: &[],
        });
        self.run(segments.filter(|segment| !segment.tokens.is_empty()).collect())
    }

    /// Runs the last draft of those that go on.
    fn read_last_drafts(
        &mut self,
        drafting: &[usize],
        entries: &[Entry<'_>],
        proposals: &mut [Proposal],
    ) -> Result<Logits> {
        for &idx in drafting {
            proposals[idx].cached.iter_mut().for_each(|cached| cached.drafts += 1);
        }
        let segments = drafting.iter().map(|&idx| {
            let drafted = &proposals[idx].tokens;
            Segment {
                tokens: &drafted[drafted.len() - 1..],
                first_position: entries[idx].tokens.len() + drafted.len() - 1,
                pages: entries[idx].pages,
                prompt_len: 0,
                num_logits: 1,
                tree: &[],
            }
        });
        self.run(segments.collect())
    }

    fn run(&mut self, segments: Vec<Segment<'_>>) -> Result<Logits> {
        if segments.is_empty() { Ok(Logits::default()) } else { self.model.forward(&segments) }
    }
}

impl Drafter for Model {
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); entries.len()];
        let mut logits = self.read_known(entries, &mut proposals)?;
        let asks =
            |&idx: &usize| entries[idx].draft_lens.model > 0 && proposals[idx].cached.is_some();
        let mut drafting: Vec<usize> = (0..entries.len()).filter(asks).collect();
        let mut chains = Chains::new(entries.len());
        while !drafting.is_empty() {
            for (row, &idx) in drafting.iter().enumerate() {
                let row = &logits.row(row)[..self.vocab_size];
                chains.extend(idx, &entries[idx], row, &mut proposals[idx]);
            }
            drafting.retain(|&idx| chains.goes_on(idx, &entries[idx], &proposals[idx]));
            logits = self.read_last_drafts(&drafting, entries, &mut proposals)?;
        }
        Ok(proposals)
    }

    fn forget(&mut self, _id: SequenceId) {}
}
