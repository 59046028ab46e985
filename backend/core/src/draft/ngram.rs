//! Drafts by looking up: the continuation of the most recent earlier place where the last few tokens
//! occurred. Costs nothing to run and does well where text repeats (code edits, summaries, extraction).
//!
//! The index of a sequence grows with its tokens, so a step costs its new tokens and one lookup.
//!
//! Where the same tokens went on in several ways, these may be drafted side by side, as a tree: most of the drafts follow
//! the most recent place, and a few each of the earlier ones that differ.

use super::{Drafter, Proposal};
use crate::Result;
use crate::batch::Entry;
use crate::sequence::SequenceId;
use std::collections::HashMap;

/// Earlier places of one n-gram that are looked at.
const MAX_PLACES: usize = 16;

/// The n-gram lookup drafter. It draws nothing: its proposals have no `q`.
#[derive(Debug)]
pub struct Ngram {
    max_ngram: usize,
    min_ngram: usize,
    /// Continuations that are drafted side by side.
    branches: usize,
    sequences: HashMap<SequenceId, Index>,
}

impl Default for Ngram {
    fn default() -> Self {
        Self::new(3, 2)
    }
}

impl Ngram {
    /// Matches the last `max_ngram` tokens, or fewer down to `min_ngram` where those did not occur before.
    pub fn new(max_ngram: usize, min_ngram: usize) -> Self {
        assert!(
            (1..=max_ngram).contains(&min_ngram),
            "n-grams of {min_ngram} to {max_ngram} tokens are no range"
        );
        Self { max_ngram, min_ngram, branches: 1, sequences: HashMap::new() }
    }

    /// Drafts up to so many continuations side by side; one is a chain.
    pub fn with_branches(self, branches: usize) -> Self {
        assert!(branches > 0, "no continuation to draft");
        Self { branches, ..self }
    }

    /// The draft that follows `tokens`, at most `max` tokens: what `propose` finds, without its memory.
    pub fn drafts_for<'a>(&self, tokens: &'a [u32], max: usize) -> &'a [u32] {
        let mut index = Index::default();
        self.extend(&mut index, tokens);
        self.lookup(&index, tokens, max)
    }

    fn lengths(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        self.min_ngram..=self.max_ngram
    }

    /// Takes in the tokens that are new since the last call.
    fn extend(&self, index: &mut Index, tokens: &[u32]) {
        if !index.is_prefix_of(tokens) {
            *index = Index::default();
        }
        for end in index.len..tokens.len() {
            for len in self.lengths().filter(|&len| len <= end) {
                let earlier = index.continuations.insert(hash(0, &tokens[end - len..end]), end);
                if self.branches > 1
                    && let Some(earlier) = earlier
                {
                    index.earlier.insert((len, end), earlier);
                }
            }
        }
        index.len = tokens.len();
        index.tail = tokens[tokens.len().saturating_sub(self.max_ngram)..].to_vec();
    }

    /// The continuations of the most recent places as a tree of at most `max` nodes: the first one gets most of them, and
    /// lies first.
    fn tree(&self, index: &Index, tokens: &[u32], max: usize) -> Proposal {
        let mut tree = Proposal::default();
        // Rounded to the nearest, which leaves the first branch a draft at least.
        let share = (max + self.branches) / (2 * self.branches);
        let mut num_branches = 0;
        for len in self.lengths().rev().filter(|&len| len < tokens.len()) {
            let last = &tokens[tokens.len() - len..];
            let mut place = index.continuations.get(&hash(0, last)).copied();
            for _ in 0..MAX_PLACES {
                let Some(start) = place.filter(|_| num_branches < self.branches) else { break };
                if tokens[start - len..start] == *last {
                    let most = match num_branches {
                        0 => max - share * (self.branches - 1),
                        _ => share,
                    };
                    let budget = most.min(max - tree.len());
                    num_branches += usize::from(graft(&mut tree, &tokens[start..], budget));
                }
                place = index.earlier.get(&(len, start)).copied();
            }
        }
        tree
    }

    /// Longer matches first. Only what stands there is proposed: a draft may be short.
    fn lookup<'a>(&self, index: &Index, tokens: &'a [u32], max: usize) -> &'a [u32] {
        for len in self.lengths().rev().filter(|&len| len < tokens.len()) {
            let last = &tokens[tokens.len() - len..];
            if let Some(&start) = index.continuations.get(&hash(0, last))
                && tokens[start - len..start] == *last
            {
                return &tokens[start..tokens.len().min(start.saturating_add(max))];
            }
        }
        &[]
    }
}

impl Drafter for Ngram {
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let propose = |entry: &Entry<'_>| {
            let mut proposal = Proposal::default();
            if entry.draft_lens.lookup > 0 {
                let mut index = self.sequences.remove(&entry.id).unwrap_or_default();
                self.extend(&mut index, entry.tokens);
                if self.branches > 1 {
                    proposal = self.tree(&index, entry.tokens, entry.draft_lens.lookup);
                } else {
                    let drafts = self.lookup(&index, entry.tokens, entry.draft_lens.lookup);
                    drafts.iter().for_each(|&token| proposal.push(token, None));
                }
                self.sequences.insert(entry.id, index);
            }
            proposal
        };
        Ok(entries.iter().map(propose).collect())
    }

    fn forget(&mut self, id: SequenceId) {
        self.sequences.remove(&id);
    }
}

/// Where the n-grams of one sequence continue.
#[derive(Debug, Default)]
struct Index {
    /// By hash of the n-gram: the position after its last occurrence that has a token there.
    continuations: HashMap<u64, usize>,
    /// By length of an n-gram and a position after it: the position after its occurrence before that. Only where there are
    /// several branches.
    earlier: HashMap<(usize, usize), usize>,
    /// Tokens taken in.
    len: usize,
    /// The last of them: enough to notice that the sequence was rewound. (A stale entry that slips through
    /// is compared with the tokens before use, and can at worst hide a match.)
    tail: Vec<u32>,
}

impl Index {
    fn is_prefix_of(&self, tokens: &[u32]) -> bool {
        tokens.get(..self.len).is_some_and(|known| known.ends_with(&self.tail))
    }
}

/// Adds a continuation to a tree, at most `budget` nodes beyond what it shares with others; says whether it added any.
fn graft(tree: &mut Proposal, tokens: &[u32], budget: usize) -> bool {
    let (mut parent, mut added) = (None, 0);
    for &token in tokens {
        let child = (0..tree.len())
            .find(|&node| tree.parents[node] == parent && tree.tokens[node] == token);
        parent = match child {
            Some(child) => Some(child),
            None if added == budget => break,
            None => {
                added += 1;
                Some(tree.hang(parent, token, None))
            }
        };
    }
    added > 0
}

/// A multiplication and a fold a token, starting from the length and a seed.
pub(super) fn hash(seed: u64, ngram: &[u32]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed ^ ngram.len() as u64;
    let mix = |hash: u64, &token: &u32| {
        let product = (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        product ^ (product >> 29)
    };
    ngram.iter().fold(start, mix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use proptest::prelude::*;

    /// Scans backwards.
    fn naive(tokens: &[u32], max_ngram: usize, min_ngram: usize, max: usize) -> Vec<u32> {
        for len in (min_ngram..=max_ngram).rev().filter(|&len| len < tokens.len()) {
            let last = &tokens[tokens.len() - len..];
            for start in (0..tokens.len() - len).rev() {
                if &tokens[start..start + len] == last {
                    return tokens[start + len..].iter().copied().take(max).collect();
                }
            }
        }
        Vec::new()
    }

    fn sampler() -> Sampler {
        Sampler::new(SamplingParams::default(), Coupling::Independent(0), vec![])
    }

    fn propose(drafter: &mut Ngram, id: u64, tokens: &[u32], draft_len: usize) -> Vec<u32> {
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
            min_confidence: 0.0,
            pages: &[],
            prompt_rows: 0,
            shares: crate::sequence::Shares::All,
            sampler: &sampler(),
        };
        let proposal = drafter.propose(&[entry]).unwrap().remove(0);
        assert!(proposal.q.iter().all(Option::is_none));
        let chain = (0..proposal.len()).map(|node: usize| node.checked_sub(1));
        assert!(proposal.parents.iter().copied().eq(chain));
        proposal.tokens
    }

    proptest! {
        #[test]
        fn lookup_is_a_backward_scan(
            tokens in prop::collection::vec(0u32..4, 0..120),
            range in (1usize..5).prop_flat_map(|max| (Just(max), 1..=max)), max in 1usize..12,
        ) {
            let drafter = Ngram::new(range.0, range.1);
            let expected = naive(&tokens, range.0, range.1, max);
            prop_assert_eq!(drafter.drafts_for(&tokens, max), &expected[..]);
        }

        #[test]
        fn a_growing_rewound_and_regrown_sequence_is_looked_up_as_if_it_were_new(
            chunks in prop::collection::vec((prop::collection::vec(0u32..4, 1..20), 0usize..30), 1..12),
        ) {
            let mut drafter = Ngram::default();
            let mut tokens = Vec::new();
            for (chunk, rewind) in chunks {
                tokens.extend(chunk);
                prop_assert_eq!(propose(&mut drafter, 1, &tokens, 5), naive(&tokens, 3, 2, 5));
                tokens.truncate(tokens.len().saturating_sub(rewind).max(1));
                prop_assert_eq!(propose(&mut drafter, 1, &tokens, 5), naive(&tokens, 3, 2, 5));
            }
        }
    }

    #[test]
    fn the_most_recent_occurrence_wins_and_a_short_continuation_stays_short() {
        let drafter = Ngram::default();
        assert_eq!(drafter.drafts_for(&[1, 2, 7, 1, 2, 8, 1, 2], 4), [8, 1, 2]);
        assert_eq!(drafter.drafts_for(&[5, 5, 5, 5], 4), [5]);
        assert_eq!(drafter.drafts_for(&[1, 2, 3], 4), [0u32; 0]);
    }

    fn trees_of(branches: usize, tokens: &[u32], max: usize) -> Proposal {
        let drafter = Ngram::default().with_branches(branches);
        let mut index = Index::default();
        drafter.extend(&mut index, tokens);
        drafter.tree(&index, tokens, max)
    }

    #[test]
    fn continuations_that_differ_are_branches_of_a_tree() {
        // After 1, 2: lately 8, 6, earlier 8, 5 and 7.
        let tokens = [1, 2, 7, 9, 1, 2, 8, 5, 1, 2, 8, 6, 3, 1, 2];
        let tree = trees_of(3, &tokens, 12);
        assert_eq!(tree.tokens[..4], [8, 6, 3, 1], "the most recent one comes first");
        let chains: Vec<Vec<u32>> = (0..tree.len())
            .map(|node| {
                let path = std::iter::successors(Some(node), |&node| tree.parents[node]);
                let mut path: Vec<u32> = path.map(|node| tree.tokens[node]).collect();
                path.reverse();
                path
            })
            .collect();
        assert!(chains.contains(&vec![8, 5]) && chains.contains(&vec![7, 9]), "{chains:?}");
        assert!(tree.len() <= 12);
        assert!(trees_of(3, &tokens, 1).is_chain() && trees_of(3, &[1, 2, 3], 8).is_empty());
    }

    proptest! {
        #[test]
        fn a_tree_begins_with_the_chain_and_every_path_of_it_stood_behind_the_same_tokens(
            tokens in prop::collection::vec(0u32..4, 3..120), branches in 2usize..5, max in 1usize..16,
        ) {
            let tree = trees_of(branches, &tokens, max);
            prop_assert!(tree.len() <= max);
            let chain = naive(&tokens, 3, 2, max);
            let share = (max + branches) / (2 * branches);
            let first = (max - share * (branches - 1)).min(chain.len());
            prop_assert!(first > 0 || chain.is_empty());
            prop_assert_eq!(&tree.tokens[..first], &chain[..first]);
            prop_assert!((0..first).all(|node| tree.parents[node] == node.checked_sub(1)));
            prop_assert_eq!(tree.is_empty(), chain.is_empty());
            for node in 0..tree.len() {
                let path = std::iter::successors(Some(node), |&node| tree.parents[node]);
                let mut path: Vec<u32> = path.map(|node| tree.tokens[node]).collect();
                path.reverse();
                let last = &tokens[tokens.len() - 2..];
                let behind = [last, &path].concat();
                prop_assert!(tokens.windows(behind.len()).any(|window| window == behind));
                let siblings = (0..node).filter(|&other| tree.parents[other] == tree.parents[node]);
                prop_assert!(siblings.into_iter().all(|other| tree.tokens[other] != tree.tokens[node]));
            }
        }
    }

    #[test]
    fn sequences_do_not_mix_and_can_be_forgotten() {
        let mut drafter = Ngram::default();
        assert_eq!(propose(&mut drafter, 1, &[1, 2, 3, 1, 2], 2), [3, 1]);
        assert_eq!(propose(&mut drafter, 2, &[9, 9, 1, 2], 2), [0u32; 0]);
        drafter.forget(1);
        assert!(!drafter.sequences.contains_key(&1));
        assert_eq!(propose(&mut drafter, 1, &[1, 2, 4, 1, 2], 1), [4]);
        assert_eq!(propose(&mut drafter, 1, &[1, 2, 4, 1, 2], 0), [0u32; 0]);
    }
}
