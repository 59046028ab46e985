//! Heads that each draft one token from the target's last hidden state: Medusa.
//!
//! All drafts of a step come from one state, that of the last position that the target has computed; head k drafts the
//! (k + 1)th of them. So there is nothing to read and nothing to keep but one state a sequence: who begins behind shared
//! pages, or is computed again, drafts once the target has computed a position.

use super::kept_states::KeptStates;
use super::last_states::LastStates;
use super::tree::Trees;
use super::{Drafter, Proposal, Verified};
use crate::Result;
use crate::batch::{Entry, Logits};
use crate::sequence::SequenceId;

/// Heads on the last hidden state of another model.
pub trait Heads: Send {
    /// The layer whose hidden states they read: of k the residual stream behind k layers.
    fn taps(&self) -> &[usize];

    /// How many there are.
    fn num_heads(&self) -> usize;

    /// Values of a state.
    fn width(&self) -> usize;

    /// Makes states of hidden states, `[row][width]`. A row's depends on nothing but the row.
    fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>>;

    /// What the head with this number says to each state, `[row][width]`: a row of logits over the target's tokens. It does
    /// not depend on the other rows, bit for bit.
    fn logits(&mut self, head: usize, states: &[f32]) -> Result<Logits>;
}

/// Drafts with such heads.
pub struct Medusa {
    heads: Box<dyn Heads>,
    last: LastStates,
}

impl Medusa {
    /// A drafter with those heads.
    pub fn new(heads: Box<dyn Heads>) -> Self {
        let last = LastStates::new(heads.width());
        Self { heads, last }
    }

    fn can_draft(&self, entry: &Entry<'_>) -> bool {
        entry.draft_lens.model > 0 && self.last.before_last(entry).is_some()
    }
}

impl Drafter for Medusa {
    fn taps(&self) -> &[usize] {
        self.heads.taps()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); entries.len()];
        let mut drafting: Vec<usize> =
            (0..entries.len()).filter(|&idx| self.can_draft(&entries[idx])).collect();
        let mut trees = Trees::new(entries.len());
        for head in 0..self.heads.num_heads() {
            if drafting.is_empty() {
                break;
            }
            let states: Vec<f32> = drafting
                .iter()
                .flat_map(|&idx| self.last.before_last(&entries[idx]).expect("it can draft"))
                .copied()
                .collect();
            let logits = self.heads.logits(head, &states)?;
            for (row, &idx) in drafting.iter().enumerate() {
                let (entry, proposal) = (&entries[idx], &mut proposals[idx]);
                // A head says the same behind every draft of its position.
                trees.draw(idx, entry, proposal, |_| logits.row(row));
            }
            drafting.retain(|&idx| trees.goes_on(idx, &entries[idx], &proposals[idx]));
        }
        for (idx, (entry, proposal)) in entries.iter().zip(&mut proposals).enumerate() {
            trees.finish(idx, entry, proposal);
        }
        Ok(proposals)
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        let told: Vec<&Verified<'_>> =
            verified.iter().filter(|each| !each.taps.is_empty()).collect();
        let last = |each: &&Verified<'_>| each.taps.last().copied().unwrap_or_default().to_vec();
        let states = self.heads.states(&told.iter().flat_map(last).collect::<Vec<f32>>())?;
        for (each, state) in told.into_iter().zip(states.chunks_exact(self.heads.width())) {
            self.last.take_last(each.entry, each.taps.len(), state);
        }
        Ok(())
    }

    fn kept_states(&mut self) -> Option<KeptStates<'_>> {
        Some(KeptStates::Last(&mut self.last))
    }

    fn forget(&mut self, id: SequenceId) {
        self.last.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use std::sync::{Arc, Mutex};

    /// Head k of three wants the token that the state says and k more. Notes the rows of each pass.
    struct Counting(Arc<Mutex<Vec<(usize, usize)>>>);

    impl Heads for Counting {
        fn taps(&self) -> &[usize] {
            &[5]
        }

        fn num_heads(&self) -> usize {
            3
        }

        fn width(&self) -> usize {
            1
        }

        fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>> {
            Ok(taps.to_vec())
        }

        fn logits(&mut self, head: usize, states: &[f32]) -> Result<Logits> {
            self.0.lock().unwrap().push((head, states.len()));
            let wants = states.iter().map(|&state| state as usize + head);
            let values = wants
                .flat_map(|wanted| (0..40).map(move |id| if id == wanted { 20.0 } else { 0.0 }));
            Ok(Logits { vocab_size: 40, values: values.collect() })
        }
    }

    /// Sequences of the tokens 0, 1, 2, and so on, where the state of a position is its own number and 2 more.
    struct Bench {
        medusa: Medusa,
        passes: Arc<Mutex<Vec<(usize, usize)>>>,
        sampler: Sampler,
        tokens: Vec<u32>,
    }

    impl Bench {
        fn new() -> Self {
            let passes = Arc::default();
            Self {
                medusa: Medusa::new(Box::new(Counting(Arc::clone(&passes)))),
                passes,
                sampler: Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new()),
                tokens: (0..40).collect(),
            }
        }

        fn entry(&self, id: u64, computed: usize, known: usize, draft_len: usize) -> Entry<'_> {
            Entry {
                id,
                tokens: &self.tokens[..known],
                prompt_len: 1,
                max_len: 40,
                computed,
                chunk: known - computed,
                draft_computed: computed,
                is_read: true,
                speculates: true,
                draft_lens: DraftLens::both(draft_len),
                branching: Branching::CHAIN,
                given: &[],
                min_confidence: 0.0,
                pages: &[0, 1, 2],
                prompt_rows: 0,
                shares: crate::sequence::Shares::All,
                sampler: &self.sampler,
            }
        }

        fn propose(&mut self, asked: &[(u64, usize, usize, usize)]) -> Vec<Vec<u32>> {
            let mut medusa = std::mem::replace(&mut self.medusa, Self::new().medusa);
            let entries: Vec<_> = asked
                .iter()
                .map(|&(id, computed, known, len)| self.entry(id, computed, known, len))
                .collect();
            let proposals = medusa.propose(&entries).unwrap();
            self.medusa = medusa;
            proposals.into_iter().map(|proposal| proposal.tokens).collect()
        }

        /// Tells of the positions `computed .. end`.
        fn observe(&mut self, id: u64, computed: usize, end: usize) {
            let mut medusa = std::mem::replace(&mut self.medusa, Self::new().medusa);
            let states: Vec<f32> = (computed..end).map(|position| (position + 2) as f32).collect();
            let entry = self.entry(id, computed, computed + 1, 0);
            let taps = states.chunks(1).collect();
            medusa.observe(&[Verified { entry: &entry, accepted: Vec::new(), taps }]).unwrap();
            self.medusa = medusa;
        }

        fn passes(&self) -> Vec<(usize, usize)> {
            std::mem::take(&mut self.passes.lock().unwrap())
        }
    }

    #[test]
    fn each_head_drafts_one_token_from_the_last_state() {
        let mut bench = Bench::new();
        assert_eq!(bench.propose(&[(7, 0, 5, 3)]), [[0u32; 0]], "nothing is known of the target");
        // A chunk of the prompt, then its rest: the state of the last row counts.
        bench.observe(7, 0, 3);
        assert_eq!(bench.propose(&[(7, 3, 6, 3)]), [[0u32; 0]], "positions are missing");
        bench.observe(7, 3, 6);
        // Behind the computed positions 0 to 5 token 6 is known: what comes is 7 and so on.
        assert_eq!(bench.propose(&[(7, 6, 7, 3)]), [[7, 8, 9]]);
        assert_eq!(bench.passes(), [(0, 1), (1, 1), (2, 1)]);
        // Two of the drafts were accepted: positions 6 to 8 are valid since.
        bench.observe(7, 6, 9);
        assert_eq!(bench.propose(&[(7, 9, 10, 2)]), [[10, 11]]);
        bench.medusa.forget(7);
        assert_eq!(bench.propose(&[(7, 9, 10, 2)]), [[0u32; 0]]);
    }

    #[test]
    fn sequences_share_the_passes_and_stop_by_themselves() {
        let mut bench = Bench::new();
        [(1, 4), (2, 8), (3, 2)].into_iter().for_each(|(id, end)| bench.observe(id, 0, end));
        let asked = [(1, 4, 5, 9), (2, 8, 9, 1), (4, 2, 3, 3), (3, 2, 3, 0)];
        let drafts: [&[u32]; 4] = [&[5, 6, 7], &[9], &[], &[]];
        assert_eq!(
            bench.propose(&asked),
            drafts,
            "no more than there are heads, or were asked for"
        );
        assert_eq!(bench.passes(), [(0, 2), (1, 1), (2, 1)]);
    }

    #[test]
    fn a_draft_in_doubt_goes_no_further() {
        let mut bench = Bench::new();
        bench.observe(1, 0, 4);
        let medusa = &mut std::mem::replace(&mut bench.medusa, Bench::new().medusa);
        let unsure = Entry { min_confidence: 1.1, ..bench.entry(1, 4, 5, 3) };
        assert_eq!(medusa.propose(&[unsure]).unwrap()[0].tokens, [5]);
    }
}
