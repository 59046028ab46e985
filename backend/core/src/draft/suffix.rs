//! Drafts by looking up, in the sequence's own text and in those that the model has read and written lately: what most
//! often followed the last tokens there. It does well where requests resemble each other: agents that call again with a
//! longer prompt, the same questions about other documents, code that is edited over and over.
//!
//! The places count at which the most of the last tokens stood. Where they went on in several ways, each token of a draft is
//! the one that most of them agree on, the sequence's own first, and how many do is how likely it is held to be.

use super::corpus::Corpus;
use super::text::Text;
use super::{Drafter, Proposal};
use crate::Result;
use crate::batch::Entry;
use crate::sequence::{SequenceId, Shares};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tokens that are compared to see whether a text is what it was.
const TAIL: usize = 8;

/// Tokens that another text must agree on: fewer say little about how this one goes on.
const MIN_OTHERS: usize = 4;

/// Tokens that are drafted for each that agrees, at most: the more agree, the longer texts go on alike.
const DRAFTS_A_MATCH: usize = 2;

/// The drafter. It draws nothing: its proposals have no `q`.
#[derive(Debug)]
pub struct Suffix {
    corpus: Arc<Mutex<Corpus>>,
    /// Whether texts that end are taken in.
    learns: bool,
    short: usize,
    sequences: HashMap<SequenceId, Own>,
}

/// A sequence's own text.
#[derive(Debug)]
struct Own {
    text: Text,
    shares: Shares,
}

impl Suffix {
    /// Keeps so many tokens of texts that ended, and looks up n-grams of so many tokens, where there is no longer one.
    pub fn new(max_tokens: usize, short: usize) -> Self {
        let corpus = Arc::new(Mutex::new(Corpus::new(max_tokens, short)));
        Self { corpus, learns: true, short, sequences: HashMap::new() }
    }

    /// One that drafts from the same texts and takes none in, for whoever is told of the same sequences.
    pub(crate) fn reader(&self) -> Self {
        Self {
            corpus: Arc::clone(&self.corpus),
            learns: false,
            short: self.short,
            sequences: HashMap::new(),
        }
    }

    /// Takes in the tokens that are new since the last call.
    fn own(&mut self, entry: &Entry<'_>) -> &Own {
        let new = || Own { text: Text::new(self.short), shares: entry.shares };
        let own = self.sequences.entry(entry.id).or_insert_with(new);
        // Enough to notice that the sequence was rewound: what slips through is a bad draft at worst.
        let last = &own.text.tokens()[own.text.end().saturating_sub(TAIL)..];
        if !entry.tokens.get(..own.text.end()).is_some_and(|known| known.ends_with(last)) {
            *own = new();
        }
        own.text.extend(&entry.tokens[own.text.end()..], 0);
        own
    }

    fn drafts(&mut self, entry: &Entry<'_>) -> Vec<u32> {
        let corpus = Arc::clone(&self.corpus);
        let own = self.own(entry);
        let corpus = lock(&corpus);
        let found = [0, 1].into_iter().map(|level| {
            let places = own.text.places(entry.tokens, level, 0).into_iter();
            let continuation =
                |place| (own.text.matching(place, entry.tokens), own.text.from(place));
            let mut found: Vec<(usize, &[u32])> = places.map(continuation).collect();
            let max = entry.draft_lens.lookup;
            let others = corpus.continuations(entry.tokens, level, own.shares, max);
            found.extend(others.into_iter().filter(|&(len, _)| len >= MIN_OTHERS));
            found
        });
        let found = found.into_iter().find(|found| !found.is_empty()).unwrap_or_default();
        let longest = found.iter().map(|&(len, _)| len).max();
        let found = found.into_iter().filter(|&(len, _)| Some(len) == longest);
        let max = entry.draft_lens.lookup.min(longest.unwrap_or(0).saturating_mul(DRAFTS_A_MATCH));
        vote(found.map(|(_, tokens)| tokens).collect(), max, entry.min_confidence)
    }
}

impl Drafter for Suffix {
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let propose = |entry: &Entry<'_>| {
            let mut proposal = Proposal::default();
            if entry.draft_lens.lookup > 0 {
                let drafts = self.drafts(entry);
                drafts.into_iter().for_each(|token| proposal.push(token, None));
            } else {
                self.own(entry);
            }
            proposal
        };
        Ok(entries.iter().map(propose).collect())
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(own) = self.sequences.remove(&id).filter(|_| self.learns) {
            lock(&self.corpus).add(own.text.tokens(), own.shares);
        }
    }
}

/// Nothing that is left half done under the lock can be worse than a bad draft.
fn lock(corpus: &Mutex<Corpus>) -> MutexGuard<'_, Corpus> {
    corpus.lock().unwrap_or_else(PoisonError::into_inner)
}

/// At most `max` tokens, each the one that most of the continuations agree on which agree so far, the most recent one's of
/// several; up to the one at which fewer than a part of all agree on all of it.
fn vote(mut continuations: Vec<&[u32]>, max: usize, min_agreement: f32) -> Vec<u32> {
    let mut drafts = Vec::new();
    let mut agreement = 1.0;
    while drafts.len() < max {
        let idx = drafts.len();
        let mut votes: Vec<(u32, usize)> = Vec::new();
        for &token in continuations.iter().filter_map(|continuation| continuation.get(idx)) {
            match votes.iter_mut().find(|(other, _)| *other == token) {
                Some((_, count)) => *count += 1,
                None => votes.push((token, 1)),
            }
        }
        let Some(&(_, most)) = votes.iter().max_by_key(|(_, count)| *count) else { break };
        let Some(&(token, _)) = votes.iter().find(|(_, count)| *count == most) else { break };
        agreement *= most as f32 / continuations.len() as f32;
        if agreement < min_agreement {
            break;
        }
        drafts.push(token);
        continuations.retain(|continuation| continuation.get(idx) == Some(&token));
    }
    drafts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::pages::PageKey;
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use proptest::prelude::*;

    const NO_CONFIDENCE: f32 = 0.0;

    fn propose(
        drafter: &mut Suffix,
        (id, shares): (u64, Shares),
        tokens: &[u32],
        draft_len: usize,
    ) -> Vec<u32> {
        let sampler = Sampler::new(SamplingParams::default(), Coupling::Independent(0), vec![]);
        let entry = Entry {
            id,
            tokens,
            prompt_len: 1,
            max_len: 64,
            computed: tokens.len() - 1,
            chunk: 1,
            draft_computed: tokens.len() - 1,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens::both(draft_len),
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: NO_CONFIDENCE,
            pages: &[],
            prompt_rows: 0,
            shares,
            sampler: &sampler,
        };
        let proposal = drafter.propose(&[entry]).unwrap().remove(0);
        assert!(proposal.is_chain() && proposal.q.iter().all(Option::is_none));
        proposal.tokens
    }

    fn salted(salt: &str) -> Shares {
        Shares::Behind(PageKey::of_salt(salt.as_bytes()).unwrap())
    }

    #[test]
    fn a_text_that_ended_is_drafted_from_by_those_who_share_with_it() {
        let mut drafter = Suffix::new(1000, 2);
        propose(&mut drafter, (1, Shares::All), &[1, 2, 3, 4, 5, 6], 0);
        let asked = [9, 1, 2, 3, 4];
        assert_eq!(propose(&mut drafter, (2, Shares::All), &asked, 4), [0u32; 0], "it goes on");
        drafter.forget(1);
        assert_eq!(propose(&mut drafter, (2, Shares::All), &asked, 4), [5, 6]);
        assert_eq!(propose(&mut drafter, (3, salted("a")), &asked, 4), [0u32; 0]);
        assert_eq!(propose(&mut drafter, (4, Shares::NoOne), &asked, 4), [0u32; 0]);
        propose(&mut drafter, (5, salted("a")), &[1, 2, 3, 4, 8], 0);
        propose(&mut drafter, (6, Shares::NoOne), &[1, 2, 3, 4, 7], 0);
        (3..7).for_each(|id| drafter.forget(id));
        assert_eq!(propose(&mut drafter, (7, salted("a")), &asked, 4), [8]);
        assert_eq!(propose(&mut drafter, (8, Shares::All), &asked, 4), [5, 6]);
        assert_eq!(
            propose(&mut drafter, (9, Shares::All), &[9, 2, 3, 4], 4),
            [0u32; 0],
            "too little"
        );
    }

    #[test]
    fn the_longest_repeat_counts_and_the_own_text_before_others() {
        let mut drafter = Suffix::new(1000, 2);
        let long = [10, 11, 12, 13, 14, 15, 16, 17];
        let other = [&long[..], &[100, 101]].concat();
        propose(&mut drafter, (1, Shares::All), &other, 0);
        drafter.forget(1);
        // The last two tokens stood in the own text, the last eight in another.
        let own = [&[16, 17, 200, 201][..], &long].concat();
        assert_eq!(propose(&mut drafter, (2, Shares::All), &own, 2), [100, 101]);
        // Of two places of the last seven tokens that where eight of them stood.
        let own = [&long[1..], &[102, 50], &long].concat();
        assert_eq!(propose(&mut drafter, (3, Shares::All), &own, 2), [100, 101]);
        let own = [&long[..], &[200, 201], &long].concat();
        assert_eq!(propose(&mut drafter, (4, Shares::All), &own, 2), [200, 201]);
        let own = [&long[4..], &[200], &long[4..]].concat();
        assert_eq!(propose(&mut drafter, (5, Shares::All), &own, 1), [200]);
    }

    #[test]
    fn a_short_repeat_gives_a_short_draft() {
        let mut drafter = Suffix::new(1000, 2);
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2];
        assert_eq!(propose(&mut drafter, (1, Shares::All), &tokens, 8), [3, 4, 5, 6]);
    }

    #[test]
    fn who_reads_along_takes_nothing_in() {
        let mut drafter = Suffix::new(1000, 2);
        let mut reader = drafter.reader();
        let asked = [1, 2, 3, 4];
        propose(&mut reader, (1, Shares::All), &[1, 2, 3, 4, 5], 0);
        reader.forget(1);
        assert_eq!(propose(&mut drafter, (2, Shares::All), &asked, 1), [0u32; 0]);
        propose(&mut drafter, (1, Shares::All), &[1, 2, 3, 4, 6], 0);
        drafter.forget(1);
        assert_eq!(propose(&mut reader, (2, Shares::All), &asked, 1), [6]);
    }

    #[test]
    fn most_texts_decide_and_the_most_recent_of_as_many() {
        let texts: [&[u32]; 4] = [&[1, 2, 3], &[1, 4, 5], &[1, 2, 6], &[7]];
        assert_eq!(vote(texts.to_vec(), 9, 0.0), [1, 2, 3]);
        assert_eq!(vote(texts.to_vec(), 9, 0.3), [1, 2], "two in four agree, one in four");
        assert_eq!(vote(texts.to_vec(), 9, 0.8), [0u32; 0]);
        assert_eq!(vote(texts.to_vec(), 1, 0.0), [1]);
        assert_eq!(vote(Vec::new(), 9, 0.0), [0u32; 0]);
    }

    /// Counts how many of all continuations begin with each beginning.
    fn naive_vote(all: &[Vec<u32>], max: usize, min_agreement: f32) -> Vec<u32> {
        let share = |drafts: &[u32]| {
            let agree = all.iter().filter(|one| one.starts_with(drafts)).count();
            agree as f32 / all.len() as f32
        };
        let mut drafts: Vec<u32> = Vec::new();
        while drafts.len() < max {
            let nexts = all.iter().filter(|one| one.starts_with(&drafts));
            let nexts: Vec<u32> = nexts.filter_map(|one| one.get(drafts.len()).copied()).collect();
            let longer = |token: u32| [&drafts[..], &[token]].concat();
            let best = nexts.iter().map(|&token| share(&longer(token))).fold(0.0, f32::max);
            let first = nexts.iter().find(|&&token| share(&longer(token)) == best);
            match first.filter(|_| best >= min_agreement) {
                Some(&token) => drafts = longer(token),
                None => break,
            }
        }
        drafts
    }

    proptest! {
        #[test]
        fn votes_are_counted(
            all in prop::collection::vec(prop::collection::vec(0u32..3, 1..8), 0..20),
            max in 0usize..8, percent in 0u32..100,
        ) {
            // No share of up to 20 is so near to it that rounding could decide.
            let min_agreement = (percent as f32 + 0.37) / 100.0;
            let found = vote(all.iter().map(Vec::as_slice).collect(), max, min_agreement);
            prop_assert_eq!(found, naive_vote(&all, max, min_agreement));
        }

        #[test]
        fn a_rewound_sequence_is_looked_up_as_if_it_were_new(
            chunks in prop::collection::vec((prop::collection::vec(0u32..4, 1..20), 0usize..30), 1..12),
        ) {
            let mut drafter = Suffix::new(1000, 2);
            let mut tokens = Vec::new();
            for (chunk, rewind) in chunks {
                tokens.extend(chunk);
                for rewind in [0, rewind] {
                    tokens.truncate(tokens.len().saturating_sub(rewind).max(1));
                    let fresh = propose(&mut Suffix::new(1000, 2), (1, Shares::All), &tokens, 5);
                    let found = propose(&mut drafter, (1, Shares::All), &tokens, 5);
                    prop_assert_eq!(found, fresh);
                }
            }
        }
    }
}
