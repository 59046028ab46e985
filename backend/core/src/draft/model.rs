//! A second, smaller model as the drafter: it keeps a KV cache of its own in the same pages as the target's and proposes
//! a chain or a tree, one forward pass a level, batched over the sequences; or all in one pass, if it was made for that.
//! Or the target without some of its layers, on the target's own cache.

use super::catch_up::{Cached, readable, rows_to_feed};
use super::spread::Spread;
use super::tree::{self, Rows, Trees};
use super::{Drafter, Proposal};
use crate::Result;
use crate::batch::{Entry, Forward, Logits, Segment};
use crate::sequence::SequenceId;
use std::borrow::Cow;
use std::ops::Range;

/// Drafts with a model.
pub struct Model {
    model: Box<dyn Forward>,
    spread: Spread,
    /// Tokens that both models have; what lies behind in either is padding.
    vocab_size: usize,
    /// The token of the rows behind the first draft, if all drafts come from one pass: PARD.
    mask_token: Option<u32>,
    /// Whether its cache is the target's: then all but the last known token has been read, by the target.
    on_targets_cache: bool,
}

impl Model {
    /// A drafter over `model`. `vocab_size` is the smaller one of the two models' vocabularies.
    pub fn new(model: Box<dyn Forward>, vocab_size: usize) -> Self {
        let spread = Spread::new(None, vocab_size);
        Self { model, spread, vocab_size, mask_token: None, on_targets_cache: false }
    }

    /// One whose rows have logits of these tokens.
    pub fn of_tokens(self, vocab_map: Option<Vec<u32>>) -> Self {
        Self { spread: Spread::new(vocab_map, self.vocab_size), ..self }
    }

    /// A drafter over a part of the target, which stores what it computes where the target does: that is stale once it has
    /// drafted, and the target computes the same positions in the same step.
    pub fn of_target(part: Box<dyn Forward>, vocab_size: usize) -> Self {
        Self { on_targets_cache: true, ..Self::new(part, vocab_size) }
    }

    /// One that drafts in one pass, with this token at the positions of drafts.
    pub fn at_once(self, mask_token: Option<u32>) -> Self {
        Self { mask_token, ..self }
    }

    /// Known tokens that it runs in this step.
    fn rows_to_feed(&self, entry: &Entry<'_>) -> Range<usize> {
        if !self.on_targets_cache {
            return rows_to_feed(entry);
        }
        let end = entry.tokens.len();
        // What lies before is the target's to compute.
        let drafts = entry.draft_lens.model > 0 && entry.computed + 1 == end;
        if drafts { end - 1..end } else { end..end }
    }

    /// Runs the known tokens that it has not read, and in one pass with them the rows of all drafts, if it drafts so;
    /// logits behind the last one of those who want drafts.
    fn read_known(&mut self, entries: &[Entry<'_>], proposals: &mut [Proposal]) -> Result<Logits> {
        let mut tokens: Vec<Cow<'_, [u32]>> = Vec::with_capacity(entries.len());
        for (entry, proposal) in entries.iter().zip(proposals) {
            let rows = self.rows_to_feed(entry);
            let is_fed = !rows.is_empty();
            let keeps = is_fed && !self.on_targets_cache;
            proposal.cached = keeps.then_some(Cached { known: rows.end, drafts: 0 });
            let mut known = readable(&entry.tokens[rows], self.vocab_size);
            if let Some(mask) = self.mask_token.filter(|_| is_fed) {
                known.to_mut().extend((1..entry.draft_lens.model).map(|_| mask));
            }
            tokens.push(known);
        }
        let segments = entries.iter().zip(&tokens).map(|(entry, tokens)| Segment {
            tokens,
            first_position: self.rows_to_feed(entry).start,
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
        // A request may allow tokens alone that the drafter does not have, and then they are drafted.
        let tokens = ends.iter().map(|(_, rows)| readable(&rows.tokens, self.vocab_size));
        let tokens: Vec<_> = tokens.collect();
        let segments = ends.iter().zip(&tokens).map(|((idx, rows), tokens)| Segment {
            tokens,
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
        let asks = |&idx: &usize| {
            entries[idx].draft_lens.model > 0 && !self.rows_to_feed(&entries[idx]).is_empty()
        };
        let mut drafting: Vec<usize> = (0..entries.len()).filter(asks).collect();
        if self.mask_token.is_some() {
            let row = |row: usize| self.spread.over_vocab(logits.row(row)).to_vec();
            tree::draw_at_once(&drafting, entries, row, &mut proposals);
            return Ok(proposals);
        }
        let mut trees = Trees::new(entries.len());
        while !drafting.is_empty() {
            let mut row = 0;
            for &idx in &drafting {
                let (entry, proposal) = (&entries[idx], &mut proposals[idx]);
                let mut candidates = Vec::new();
                for end in 0..trees.ends(idx).len() {
                    let logits = self.spread.over_vocab(logits.row(row));
                    candidates.push(trees.candidates(idx, entry, proposal, end, logits));
                    row += 1;
                }
                trees.grow(idx, entry, &candidates, proposal);
            }
            drafting.retain(|&idx| trees.goes_on(idx, &entries[idx], &proposals[idx]));
            let rows =
                drafting.iter().map(|&idx| (idx, trees.rows(idx, &entries[idx], &proposals[idx])));
            let ends: Vec<(usize, Rows)> = rows.collect();
            logits = self.read_ends(&ends, entries, &mut proposals)?;
        }
        for (idx, (entry, proposal)) in entries.iter().zip(&mut proposals).enumerate() {
            trees.finish(idx, entry, proposal);
        }
        Ok(proposals)
    }

    fn forget(&mut self, _id: SequenceId) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use proptest::prelude::*;
    use std::sync::{Arc, Mutex};

    const VOCAB: usize = 11;

    fn mix(context: u64, token: u32) -> u64 {
        let product = (context ^ u64::from(token + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        product ^ (product >> 29)
    }

    /// What it says follows from the tokens before, of which it knows what its cache has.
    struct Remembering(Vec<u64>);

    impl Forward for Remembering {
        fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
            let mut logits = Logits { vocab_size: VOCAB, values: Vec::new() };
            for segment in segments {
                let known = segment.tokens.len() - segment.tree.len();
                let mut contexts: Vec<u64> = Vec::new();
                for (row, &token) in segment.tokens.iter().enumerate() {
                    let before = match row.checked_sub(known).map(|draft| segment.tree[draft]) {
                        Some(Some(parent)) => Some(known + parent),
                        Some(None) => known.checked_sub(1),
                        None => row.checked_sub(1),
                    };
                    let before = match before {
                        Some(row) => contexts[row],
                        None => {
                            segment.first_position.checked_sub(1).map_or(7, |slot| self.0[slot])
                        }
                    };
                    assert!((token as usize) < VOCAB, "token {token} of {VOCAB}");
                    let context = mix(before, token);
                    contexts.push(context);
                    self.0[segment.first_position + row] = context;
                    if row + segment.num_logits >= segment.tokens.len() {
                        let logit = |id| (mix(context, 100 + id) >> 40) as f32 / 4e6;
                        logits.values.extend((0..VOCAB as u32).map(logit));
                    }
                }
            }
            Ok(logits)
        }
    }

    /// Rows that passes ran: the first position, and how many.
    type Passes = Arc<Mutex<Vec<(usize, usize)>>>;

    /// Notes what it runs, and never says anything new.
    struct Noting(Passes);

    impl Forward for Noting {
        fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
            let mut passes = self.0.lock().unwrap();
            let mut logits = Logits { vocab_size: VOCAB, values: Vec::new() };
            for segment in segments {
                passes.push((segment.first_position, segment.tokens.len()));
                logits.values.resize(logits.values.len() + segment.num_logits * VOCAB, 0.0);
            }
            Ok(logits)
        }
    }

    /// A sequence that decodes and drafts `len` tokens, none of which the drafter has read.
    fn entry<'a>(tokens: &'a [u32], len: usize, sampler: &'a Sampler) -> Entry<'a> {
        Entry {
            id: 7,
            tokens,
            prompt_len: 1,
            max_len: 200,
            computed: tokens.len() - 1,
            chunk: 1,
            draft_computed: 0,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens { lookup: 0, model: len },
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: 0.0,
            pages: &[0; 16],
            prompt_rows: 0,
            shares: crate::sequence::Shares::All,
            sampler,
        }
    }

    /// What it would run of known tokens before the last one the target has computed, or computes in the same step: what a
    /// part of it stored there would stay.
    #[test]
    fn a_part_of_the_target_runs_the_last_known_token_alone() {
        let passes = Passes::default();
        let mut part = Model::of_target(Box::new(Noting(Arc::clone(&passes))), VOCAB);
        let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new());
        let text = [3; 20];
        let entry = Entry { draft_computed: 11, ..entry(&text, 3, &sampler) };
        let mut run = |entry: Entry<'_>| {
            let proposal = part.propose(&[entry]).unwrap().remove(0);
            assert_eq!(proposal.cached, None, "it keeps nothing");
            (proposal.len(), std::mem::take(&mut *passes.lock().unwrap()))
        };
        assert_eq!(run(entry), (3, vec![(19, 1), (20, 1), (21, 1)]));
        let of_prompt = Entry { computed: 12, chunk: 8, ..entry };
        assert_eq!(run(of_prompt), (0, vec![]), "the target has not computed what comes before");
        let part_of_it = Entry { computed: 4, chunk: 8, ..entry };
        assert_eq!(run(part_of_it), (0, vec![]));
        let resting = Entry { draft_lens: DraftLens { lookup: 4, model: 0 }, ..entry };
        assert_eq!(run(resting), (0, vec![]), "it has nothing to catch up with");
    }

    /// The target has them, as padding of its vocabulary, and a request may allow nothing else.
    #[test]
    fn tokens_that_it_does_not_have_are_drafted_where_no_others_are_allowed() {
        let foreign = [VOCAB as u32, VOCAB as u32 + 2];
        let allowed_tokens = Some(foreign.as_slice().into());
        let params = SamplingParams { allowed_tokens, ..Default::default() };
        let sampler = Sampler::new(params, Coupling::Path(0), Vec::new());
        let entry = entry(&[3, 1, 4], 4, &sampler);
        let proposal = drafter(None).propose(&[entry]).unwrap().remove(0);
        assert_eq!(proposal.tokens, [foreign[0]; 4]);
    }

    fn drafter(mask_token: Option<u32>) -> Model {
        Model::new(Box::new(Remembering(vec![0; 256])), VOCAB).at_once(mask_token)
    }

    proptest! {
        /// Whatever was drafted and kept before, it drafts as one would that reads all of the text now.
        #[test]
        fn drafts_do_not_depend_on_earlier_ones(
            steps in prop::collection::vec((1usize..4, 0usize..5, 0usize..12, any::<prop::sample::Index>()), 1..12),
            at_once: bool,
        ) {
            let mask_token = at_once.then_some(5);
            let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new());
            let mut going_on = drafter(mask_token);
            let (mut text, mut draft_computed) = (vec![3, 1, 4, 1, 5], 0);
            for (width, len, more, pick) in steps {
                let max_tokens = len + more;
                let branching = Branching { width, max_tokens, ..Branching::CHAIN };
                let entry = Entry { draft_computed, branching, ..entry(&text, len, &sampler) };
                let found = going_on.propose(&[entry]).unwrap().remove(0);
                let fresh = Entry { draft_computed: 0, ..entry };
                let expected = drafter(mask_token).propose(&[fresh]).unwrap().remove(0);
                prop_assert_eq!((&found.tokens, &found.parents), (&expected.tokens, &expected.parents));
                prop_assert_eq!(found.len(), (width * len).min(max_tokens));
                if found.len() == width * len {
                    prop_assert_eq!(found.passes, if at_once { len.min(1) } else { len });
                }
                // A branch is kept, or nothing, and a token comes behind it.
                let node = pick.index(found.len() + 1).checked_sub(1);
                let kept = found.tokens_to(node);
                draft_computed = found.cached.unwrap().after(kept.len());
                // What the executor relies on: only drafts that lie where a chain would are still there.
                let in_place = found.path(node).collect::<Vec<_>>().into_iter().rev().eq(0..kept.len());
                prop_assert!(draft_computed <= text.len() || in_place);
                text.extend(kept);
                text.push(2);
            }
        }
    }
}
