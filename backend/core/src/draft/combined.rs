//! Look-up first, a model otherwise: where the text repeats itself, a draft as long as allowed comes for
//! nothing and the model does not run. It catches up when it is asked again.

use super::{Drafter, Model, Ngram, Proposal};
use crate::Result;
use crate::batch::Entry;
use crate::sequence::SequenceId;
use std::collections::HashSet;

/// Two drafters in turn.
pub struct Combined {
    lookup: Ngram,
    model: Model,
    /// Whose draft in the last step came from the look-up.
    looked_up: HashSet<SequenceId>,
}

impl Combined {
    /// Asks `lookup` for every draft, and `model` where it has none.
    pub fn new(lookup: Ngram, model: Model) -> Self {
        Self { lookup, model, looked_up: HashSet::new() }
    }
}

impl Drafter for Combined {
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = self.lookup.propose(entries)?;
        let found = |idx: &usize| !proposals[*idx].is_empty();
        let (hits, rest): (Vec<usize>, Vec<usize>) = (0..entries.len()).partition(found);
        self.looked_up = hits.into_iter().map(|idx| entries[idx].id).collect();
        let others: Vec<Entry<'_>> = rest.iter().map(|&idx| entries[idx]).collect();
        for (idx, proposal) in rest.into_iter().zip(self.model.propose(&others)?) {
            proposals[idx] = proposal;
        }
        Ok(proposals)
    }

    fn computed_after(&self, entry: &Entry<'_>, proposed: usize, accepted: usize) -> usize {
        match self.looked_up.contains(&entry.id) {
            true => entry.draft_computed,
            false => self.model.computed_after(entry, proposed, accepted),
        }
    }

    fn passes(&self, entry: &Entry<'_>, proposed: usize) -> usize {
        match self.looked_up.contains(&entry.id) {
            true => 0,
            false => self.model.passes(entry, proposed),
        }
    }

    fn forget(&mut self, id: SequenceId) {
        self.lookup.forget(id);
        self.model.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Forward, Logits, Segment};
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use std::sync::{Arc, Mutex};

    /// Always wants token 9, and notes the positions that it was fed.
    struct Nine(Arc<Mutex<Vec<usize>>>);

    impl Forward for Nine {
        fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
            let mut logits = Logits { vocab_size: 10, values: Vec::new() };
            for segment in segments {
                let positions = (0..segment.tokens.len()).map(|i| segment.first_position + i);
                self.0.lock().unwrap().extend(positions);
                for _ in 0..segment.num_logits {
                    logits.values.extend([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 20.0]);
                }
            }
            Ok(logits)
        }
    }

    #[test]
    fn repeated_text_is_looked_up_and_the_model_catches_up_afterwards() {
        let fed = Arc::new(Mutex::new(Vec::new()));
        let model = Model::new(Box::new(Nine(Arc::clone(&fed))), 10);
        let mut drafter = Combined::new(Ngram::new(3, 2), model);
        let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new());
        let entry = |tokens, draft_computed| Entry {
            id: 7,
            tokens,
            prompt_len: 1,
            max_len: 64,
            computed: tokens.len() - 1,
            chunk: 1,
            draft_computed,
            speculates: true,
            draft_len: 3,
            given: &[],
            min_confidence: 0.0,
            pages: &[0],
            prompt_rows: 0,
            sampler: &sampler,
        };
        let repeats = entry(&[1, 2, 3, 4, 1, 2][..], 4);
        let found = drafter.propose(&[repeats]).unwrap().remove(0);
        assert_eq!(found.tokens, [3, 4, 1]);
        assert!(fed.lock().unwrap().is_empty(), "the model must not run");
        assert_eq!((drafter.passes(&repeats, 3), drafter.computed_after(&repeats, 3, 3)), (0, 4));

        let fresh = entry(&[1, 2, 3, 4, 1, 2, 5][..], 4);
        let drafted = drafter.propose(&[fresh]).unwrap().remove(0);
        assert_eq!(drafted.tokens, [9, 9, 9]);
        assert_eq!(*fed.lock().unwrap(), [4, 5, 6, 7, 8]);
        assert_eq!((drafter.passes(&fresh, 3), drafter.computed_after(&fresh, 3, 1)), (3, 8));
    }
}
