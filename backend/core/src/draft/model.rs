//! A second, smaller model as the drafter: it keeps a KV cache of its own in the same pages as the
//! target's and proposes a chain, one forward pass a token, batched over the sequences.

use super::catch_up::{Cached, readable, rows_to_feed};
use super::tree::{self, Rows, Trees};
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
    /// The token of the rows behind the first draft, if all drafts come from one pass: PARD.
    mask_token: Option<u32>,
}

impl Model {
    /// A drafter over `model`. `vocab_size` is the smaller one of the two models' vocabularies.
    pub fn new(model: Box<dyn Forward>, vocab_size: usize) -> Self {
        Self { model, vocab_size, mask_token: None }
    }

    /// One that drafts in one pass, with this token at the positions of drafts.
    pub fn at_once(self, mask_token: Option<u32>) -> Self {
        Self { mask_token, ..self }
    }
}

impl Model {
    /// Runs the known tokens that it has not read, and in one pass with them the rows of all drafts, if it drafts so;
    /// logits behind the last one of those who want drafts.
    fn read_known(&mut self, entries: &[Entry<'_>], proposals: &mut [Proposal]) -> Result<Logits> {
        let mut tokens: Vec<Cow<'_, [u32]>> = Vec::with_capacity(entries.len());
        for (entry, proposal) in entries.iter().zip(proposals) {
            let rows = rows_to_feed(entry);
            let is_fed = !rows.is_empty();
            proposal.cached = is_fed.then_some(Cached { known: rows.end, drafts: 0 });
            let mut known = readable(&entry.tokens[rows], self.vocab_size);
            if let Some(mask) = self.mask_token.filter(|_| is_fed) {
                known.to_mut().extend((1..entry.draft_lens.model).map(|_| mask));
            }
            tokens.push(known);
        }
        let segments = entries.iter().zip(&tokens).map(|(entry, tokens)| Segment {
            tokens,
            first_position: entry.draft_computed,
            pages: entry.pages,
            prompt_len: entry.prompt_len,
            num_logits: match self.mask_token {
                Some(_) => entry.draft_lens.model,
                None => usize::from(entry.draft_lens.model > 0),
            },
            tree: &[],
        });
        self.run(segments.filter(|segment| !segment.tokens.is_empty()).collect())
    }

    /// Runs the ends of those entries' drafts.
    fn read_ends(
        &mut self,
        ends: &[(usize, Rows)],
        entries: &[Entry<'_>],
        proposals: &mut [Proposal],
    ) -> Result<Logits> {
        for (idx, rows) in ends {
            // What is computed of a tree is not where its branch is looked for, once that is kept.
            let drafts = if rows.tree.is_empty() { proposals[*idx].len() } else { 0 };
            proposals[*idx].cached.iter_mut().for_each(|cached| cached.drafts = drafts);
        }
        let segments = ends.iter().map(|(idx, rows)| Segment {
            tokens: &rows.tokens,
            first_position: rows.first_position,
            pages: entries[*idx].pages,
            prompt_len: 0,
            num_logits: rows.num_logits,
            tree: &rows.tree,
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
        if self.mask_token.is_some() {
            let row = |row: usize| logits.row(row)[..self.vocab_size].to_vec();
            tree::draw_at_once(&drafting, entries, row, &mut proposals);
            return Ok(proposals);
        }
        let mut trees = Trees::new(entries.len());
        while !drafting.is_empty() {
            let mut row = 0;
            for &idx in &drafting {
                let (entry, proposal) = (&entries[idx], &mut proposals[idx]);
                let candidates = (0..trees.ends(idx).len()).map(|end| {
                    let logits = &logits.row(row + end)[..self.vocab_size];
                    trees.candidates(idx, entry, proposal, end, logits)
                });
                let candidates: Vec<_> = candidates.collect();
                row += candidates.len();
                trees.grow(idx, entry, &candidates, proposal);
            }
            drafting.retain(|&idx| trees.goes_on(idx, &entries[idx], &proposals[idx]));
            let rows =
                drafting.iter().map(|&idx| (idx, trees.rows(idx, &entries[idx], &proposals[idx])));
            let ends: Vec<(usize, Rows)> = rows.collect();
            logits = self.read_ends(&ends, entries, &mut proposals)?;
        }
        proposals.iter_mut().for_each(Proposal::put_first_branch_first);
        Ok(proposals)
    }

    fn forget(&mut self, _id: SequenceId) {}
}
