//! Look-up first, another drafter otherwise: where the text repeats itself, a draft as long as allowed comes for
//! nothing and no model runs. It catches up when it is asked again. Each drafts up to its own length, since the one's
//! tokens take passes and the other's do not.

use super::{Drafter, KeptStates, Proposal, Verified};
use crate::Result;
use crate::batch::Entry;
use crate::sequence::SequenceId;

/// Two drafters in turn.
pub(crate) struct Combined {
    lookup: Box<dyn Drafter>,
    next: Box<dyn Drafter>,
}

impl Combined {
    /// Asks `lookup` for every draft, and `next` where it has none.
    pub(crate) fn new(lookup: Box<dyn Drafter>, next: Box<dyn Drafter>) -> Self {
        Self { lookup, next }
    }
}

/// What the first drafter proposes; `None` where it has nothing, and the next one is asked.
pub(crate) fn ask_first<D: Drafter + ?Sized>(
    first: &mut D,
    entries: &[Entry<'_>],
) -> Result<Vec<Option<Proposal>>> {
    let proposals = first.propose(entries)?;
    let found = |proposal: Proposal| Some(proposal).filter(|proposal| !proposal.is_empty());
    Ok(proposals.into_iter().map(found).collect())
}

impl Drafter for Combined {
    fn taps(&self) -> &[usize] {
        self.next.taps()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let found = ask_first(&mut *self.lookup, entries)?;
        let rest = entries.iter().zip(&found).filter(|(_, found)| found.is_none());
        let rest: Vec<Entry<'_>> = rest.map(|(entry, _)| *entry).collect();
        let mut others = self.next.propose(&rest)?.into_iter();
        let proposal = |found: Option<Proposal>| found.or_else(|| others.next());
        Ok(found.into_iter().map_while(proposal).collect())
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        self.lookup.observe(verified)?;
        self.next.observe(verified)
    }

    fn kept_states(&mut self) -> Option<KeptStates<'_>> {
        self.next.kept_states()
    }

    fn forget(&mut self, id: SequenceId) {
        self.lookup.forget(id);
        self.next.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cached, Model, Ngram};
    use super::*;
    use crate::batch::{Forward, Logits, Segment};
    use crate::draft_source::{Branching, DraftLens};
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use proptest::prelude::*;
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

    const REPEATS: [u32; 6] = [1, 2, 3, 4, 1, 2];
    const FRESH: [u32; 7] = [1, 2, 3, 4, 1, 2, 5];

    /// The model has read four tokens.
    fn entry<'a>(sampler: &'a Sampler, tokens: &'a [u32], draft_lens: DraftLens) -> Entry<'a> {
        Entry {
            id: 7,
            tokens,
            prompt_len: 1,
            max_len: 64,
            computed: tokens.len() - 1,
            chunk: 1,
            draft_computed: 4,
            is_read: true,
            speculates: draft_lens.model > 0,
            draft_lens,
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: 0.0,
            pages: &[0],
            prompt_rows: 0,
            shares: crate::sequence::Shares::All,
            sampler,
        }
    }

    #[test]
    fn repeated_text_is_looked_up_and_the_model_catches_up_afterwards() {
        let fed = Arc::new(Mutex::new(Vec::new()));
        let model = Model::new(Box::new(Nine(Arc::clone(&fed))), 10);
        let mut drafter = Combined::new(Box::new(Ngram::new(3, 2)), Box::new(model));
        let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new());
        let lens = DraftLens::both(3);
        let repeats = entry(&sampler, &REPEATS, lens);
        let found = drafter.propose(&[repeats]).unwrap().remove(0);
        assert_eq!((&found.tokens[..], found.passes, found.cached), (&[3, 4, 1][..], 0, None));
        assert!(fed.lock().unwrap().is_empty(), "the model must not run");

        let fresh = entry(&sampler, &FRESH, lens);
        let drafted = drafter.propose(&[fresh]).unwrap().remove(0);
        assert_eq!(drafted.tokens, [9, 9, 9]);
        assert_eq!(*fed.lock().unwrap(), [4, 5, 6, 7, 8]);
        assert_eq!((drafted.passes, drafted.cached), (3, Some(Cached { known: 7, drafts: 2 })));
        let after = |accepted| drafted.cached.map(|cached| cached.after(accepted));
        assert_eq!((after(0), after(1), after(3)), (Some(7), Some(8), Some(9)));
    }

    proptest! {
        #[test]
        fn each_drafts_up_to_its_own_length(lookup in 0usize..6, model in 0usize..6) {
            let fed = Arc::new(Mutex::new(Vec::new()));
            let next = Model::new(Box::new(Nine(Arc::clone(&fed))), 10);
            let mut drafter = Combined::new(Box::new(Ngram::new(3, 2)), Box::new(next));
            let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new());
            let lens = DraftLens { lookup, model };
            let texts = [&REPEATS[..], &FRESH[..]];
            for (tokens, repeats) in texts.into_iter().zip([true, false]) {
                fed.lock().unwrap().clear();
                let draft = drafter.propose(&[entry(&sampler, tokens, lens)]).unwrap().remove(0);
                // Of the text that repeats itself four tokens are known to follow.
                let is_found = repeats && lookup > 0;
                let expected = if is_found { lookup.min(4) } else { model };
                prop_assert_eq!(draft.len(), expected);
                prop_assert_eq!(draft.passes, if is_found { 0 } else { model });
                // Without a length the model does not even catch up.
                prop_assert_eq!(fed.lock().unwrap().is_empty(), is_found || model == 0);
            }
        }
    }
}
