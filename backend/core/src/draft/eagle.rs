//! A head on the target's hidden states as the drafter: EAGLE.
//!
//! The head's row at position j is the token there and the *state* that the target had before it, at j - 1. So position 0
//! has no row, and what the head's KV cache holds at j depends on the tokens up to j alone, as in any model: pages can be
//! shared. The target's states come by `observe` and wait (`head_states.rs`) until their rows are run. Behind the known
//! tokens the head goes on with states of its own; whatever it has written there is overwritten once the target's are known.

use super::head_states::HeadStates;
use super::kept_states::KeptStates;
use super::spread::Spread;
use super::tree::{self, Rows, Trees};
use super::{Cached, Drafter, Proposal, Verified};
use crate::batch::{Entry, Logits, Segment};
use crate::pages::PageId;
use crate::sequence::SequenceId;
use crate::{Error, Result};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

/// Rows of one sequence, each behind the one before it or as a tree.
#[derive(Clone, Copy, Debug)]
pub struct HeadSegment<'a> {
    /// One token a row.
    pub tokens: &'a [u32],
    /// What each comes with, `[row][width]`.
    pub states: &'a [f32],
    /// Position of the first row, at least 1; its KV goes to this slot of the sequence's pages.
    pub first_position: usize,
    /// The sequence's pages, in order, enough for every row.
    pub pages: &'a [PageId],
    /// So many of the last rows get logits, and their states are handed on.
    pub num_logits: usize,
    /// The parents of the rows, as in [`Segment::tree`], if they are a tree of drafts; else none.
    pub tree: &'a [Option<usize>],
}

impl<'a> HeadSegment<'a> {
    /// Segments as a model takes them, checked for rows of `width` values and a vocabulary of so many tokens.
    pub(crate) fn without_states(
        segments: &[Self],
        width: usize,
        vocab_size: usize,
    ) -> Result<Vec<Segment<'a>>> {
        let mut tokens = segments.iter().flat_map(|segment| segment.tokens);
        if let Some(token) = tokens.find(|&&token| token as usize >= vocab_size) {
            let message = format!("token {token} is outside of the vocabulary of {vocab_size}");
            return Err(Error::bad_request("input_ids", message));
        }
        let segment = |segment: &Self| {
            let Self { tokens, states, first_position, pages, num_logits, tree } = *segment;
            assert!(first_position > 0, "a row without a state before it");
            assert_eq!(states.len(), tokens.len() * width, "a state a row");
            Segment { tokens, first_position, pages, prompt_len: 0, num_logits, tree }
        };
        Ok(segments.iter().map(segment).collect())
    }
}

/// What came of a pass: of each row that has logits, in order.
#[derive(Clone, Debug, Default)]
pub struct HeadPass {
    /// Over the tokens that the head drafts.
    pub logits: Logits,
    /// What the rows behind it come with, `[row][width]`; nothing where all drafts come from one pass, on a GPU.
    pub states: Vec<f32>,
}

/// What a head's rows behind the first draft are made of, where all drafts come from one pass.
#[derive(Clone, Debug)]
pub struct MaskRow {
    /// Their token.
    pub token: u32,
    /// What it comes with.
    pub state: Vec<f32>,
}

/// A head on the hidden states of another model.
pub trait Head: Send {
    /// The layers whose hidden states it reads: of k the residual stream behind k layers.
    fn taps(&self) -> &[usize];

    /// Values of a state.
    fn width(&self) -> usize;

    /// The target's token of each of its own; none where they are the same.
    fn vocab_map(&self) -> Option<&[u32]>;

    /// The rows behind the first draft, if it drafts in one pass: P-EAGLE. None where a draft's row is its token with the
    /// state that was handed on.
    fn mask(&self) -> Option<&MaskRow> {
        None
    }

    /// Makes states of hidden states, `[row][tap][hidden]`. A row's depends on nothing but the row.
    fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>>;

    /// Writes the rows' keys and values to their pages. A row attends to every position of its sequence up to its own
    /// but the first. Its result does not depend on the other segments, bit for bit.
    fn forward(&mut self, segments: &[HeadSegment<'_>]) -> Result<HeadPass>;
}

/// The states that a head has handed on behind nodes of a draft, or behind the last known token.
type HandedOn = HashMap<Option<usize>, Vec<f32>>;

/// Rows of an entry that do not wait for a draft: tokens, and what each comes with.
struct Known<'a> {
    tokens: Cow<'a, [u32]>,
    states: Cow<'a, [f32]>,
}

impl<'a> Known<'a> {
    /// The known rows, and behind the last known token those of drafts that come from the same pass.
    fn new(
        entry: &Entry<'a>,
        rows: &Range<usize>,
        states: &'a HeadStates,
        mask: Option<&MaskRow>,
    ) -> Self {
        let mut tokens = Cow::Borrowed(&entry.tokens[rows.clone()]);
        let mut states = Cow::Borrowed(states.of(entry.id, 0..rows.len()));
        let asks = !rows.is_empty() && rows.end == entry.tokens.len();
        if let Some(mask) = mask.filter(|_| asks) {
            for _ in 1..entry.draft_lens.model {
                tokens.to_mut().push(mask.token);
                states.to_mut().extend_from_slice(&mask.state);
            }
        }
        Self { tokens, states }
    }
}

/// Drafts with a head.
pub struct Eagle {
    head: Box<dyn Head>,
    states: HeadStates,
    spread: Spread,
}

impl Eagle {
    /// A drafter for a target of `vocab_size` tokens.
    pub fn new(head: Box<dyn Head>, vocab_size: usize) -> Self {
        let spread = Spread::new(head.vocab_map().map(<[u32]>::to_vec), vocab_size);
        let states = HeadStates::new(head.width());
        Self { head, states, spread }
    }

    /// Runs the known tokens that it has not read, and in one pass with them the rows of all drafts, if it drafts so;
    /// logits and states behind the last one of those who want drafts, and who these are.
    fn read_known(
        &mut self,
        entries: &[Entry<'_>],
        proposals: &mut [Proposal],
    ) -> Result<(Vec<usize>, HeadPass)> {
        let mut segments = Vec::with_capacity(entries.len());
        let mut drafting = Vec::new();
        let states = &mut self.states;
        let rows = entries.iter().map(|entry| states.rows_to_feed(entry, entry.speculates));
        let rows: Vec<_> = rows.collect();
        let (states, mask) = (&self.states, self.head.mask());
        let known = entries.iter().zip(&rows);
        let known = known.map(|(entry, rows)| Known::new(entry, rows, states, mask));
        let known: Vec<Known<'_>> = known.collect();
        for (idx, ((entry, rows), proposal)) in entries.iter().zip(rows).zip(proposals).enumerate()
        {
            if rows.is_empty() {
                continue;
            }
            proposal.cached = Some(Cached { known: rows.end, drafts: 0 });
            let has_logits = entry.draft_lens.model > 0 && rows.end == entry.tokens.len();
            if has_logits {
                drafting.push(idx);
            }
            let Known { tokens, states } = &known[idx];
            segments.push(HeadSegment {
                tokens,
                states,
                first_position: rows.start,
                pages: entry.pages,
                num_logits: usize::from(has_logits) + tokens.len() - rows.len(),
                tree: &[],
            });
        }
        let pass = match segments.is_empty() {
            true => HeadPass::default(),
            false => self.head.forward(&segments)?,
        };
        Ok((drafting, pass))
    }

    /// Runs the ends of those entries' drafts, each with the state of the row before it.
    fn read_ends(
        &mut self,
        ends: &[(usize, Rows)],
        handed_on: &[HandedOn],
        entries: &[Entry<'_>],
        proposals: &[Proposal],
    ) -> Result<HeadPass> {
        if ends.is_empty() {
            return Ok(HeadPass::default());
        }
        let states = ends.iter().map(|(idx, rows)| {
            let before = rows.nodes.iter().map(|&node| proposals[*idx].parents[node]);
            before.flat_map(|node| &handed_on[*idx][&node]).copied().collect()
        });
        let states: Vec<Vec<f32>> = states.collect();
        let segments = ends.iter().zip(&states).map(|((idx, rows), states)| HeadSegment {
            tokens: &rows.tokens,
            states,
            first_position: rows.first_position,
            pages: entries[*idx].pages,
            num_logits: rows.num_logits,
            tree: &rows.tree,
        });
        self.head.forward(&segments.collect::<Vec<_>>())
    }
}

impl Drafter for Eagle {
    fn taps(&self) -> &[usize] {
        self.head.taps()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); entries.len()];
        let (mut drafting, mut pass) = self.read_known(entries, &mut proposals)?;
        if self.head.mask().is_some() {
            let rows = |row: usize| self.spread.over_vocab(pass.logits.row(row)).to_vec();
            tree::draw_at_once(&drafting, entries, rows, &mut proposals);
            return Ok(proposals);
        }
        let mut trees = Trees::new(entries.len());
        let mut handed_on = vec![HandedOn::new(); entries.len()];
        while !drafting.is_empty() {
            let width = self.head.width();
            let mut row = 0;
            for &idx in &drafting {
                let (entry, proposal) = (&entries[idx], &mut proposals[idx]);
                let mut candidates = Vec::new();
                for (end, &node) in trees.ends(idx).iter().enumerate() {
                    let logits = self.spread.over_vocab(pass.logits.row(row));
                    candidates.push(trees.candidates(idx, entry, proposal, end, logits));
                    handed_on[idx].insert(node, pass.states[row * width..][..width].to_vec());
                    row += 1;
                }
                trees.grow(idx, entry, &candidates, proposal);
            }
            drafting.retain(|&idx| trees.goes_on(idx, &entries[idx], &proposals[idx]));
            let rows =
                drafting.iter().map(|&idx| (idx, trees.rows(idx, &entries[idx], &proposals[idx])));
            let ends: Vec<(usize, Rows)> = rows.collect();
            pass = self.read_ends(&ends, &handed_on, entries, &proposals)?;
        }
        for (idx, (entry, proposal)) in entries.iter().zip(&mut proposals).enumerate() {
            trees.finish(idx, entry, proposal);
        }
        Ok(proposals)
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        let read = || verified.iter().filter(|each| each.entry.is_read);
        let taps: Vec<&[f32]> = read().flat_map(|each| each.taps.iter().copied()).collect();
        let taps = taps.concat();
        let states = self.head.states(&taps)?;
        let mut rest = &states[..];
        for Verified { entry, taps, .. } in read() {
            let (own, behind) = rest.split_at(taps.len() * self.head.width());
            self.states.take(entry, own);
            rest = behind;
        }
        Ok(())
    }

    fn kept_states(&mut self) -> Option<KeptStates<'_>> {
        Some(KeptStates::OfRows(&mut self.states))
    }

    fn forget(&mut self, id: SequenceId) {
        self.states.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::pages::PAGE_TOKENS;
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use std::sync::{Arc, Mutex};

    /// First positions and numbers of the rows of each pass.
    type Passes = Arc<Mutex<Vec<Vec<(usize, usize)>>>>;

    /// Its state is the hidden state itself, one number. It wants the token that its state says, and says one more for
    /// the row behind.
    struct Counting {
        vocab_map: Option<Vec<u32>>,
        passes: Passes,
    }

    impl Head for Counting {
        fn taps(&self) -> &[usize] {
            &[3]
        }

        fn width(&self) -> usize {
            1
        }

        fn vocab_map(&self) -> Option<&[u32]> {
            self.vocab_map.as_deref()
        }

        fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>> {
            Ok(taps.to_vec())
        }

        fn forward(&mut self, segments: &[HeadSegment<'_>]) -> Result<HeadPass> {
            let rows = |segment: &HeadSegment<'_>| {
                assert_eq!(segment.tokens.len(), segment.states.len());
                (segment.first_position, segment.tokens.len())
            };
            self.passes.lock().unwrap().push(segments.iter().map(rows).collect());
            let logits = Logits { vocab_size: 10, values: Vec::new() };
            let mut pass = HeadPass { logits, states: Vec::new() };
            for segment in segments.iter().filter(|segment| segment.num_logits > 0) {
                let state = segment.states[segment.states.len() - 1] as usize;
                pass.logits.values.extend((0..10).map(|id| if id == state { 20.0 } else { 0.0 }));
                pass.states.push((state + 1) as f32);
            }
            Ok(pass)
        }
    }

    /// A drafter for 40 tokens, the sequence that it drafts for, and what it ran.
    struct Bench {
        eagle: Eagle,
        passes: Passes,
        sampler: Sampler,
        tokens: Vec<u32>,
        /// Drafts that the next step accepts.
        accepted: usize,
        computed: usize,
        draft_computed: usize,
    }

    impl Bench {
        fn new(vocab_map: Option<Vec<u32>>) -> Self {
            let passes = Passes::default();
            let head = Counting { vocab_map, passes: Arc::clone(&passes) };
            Self {
                eagle: Eagle::new(Box::new(head), 40),
                passes,
                sampler: Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new()),
                tokens: (0..200).map(|position| position % 40).collect(),
                accepted: 0,
                computed: 0,
                draft_computed: 0,
            }
        }

        /// One step behind `known` tokens, of which each position's hidden state is `position % 10`; its drafts.
        fn step(&mut self, known: usize, speculates: bool, tells: bool) -> Vec<u32> {
            let Self { eagle, sampler, tokens, accepted, computed, draft_computed, .. } = self;
            let valid = known + std::mem::take(accepted);
            let entry = Entry {
                id: 7,
                tokens: &tokens[..known],
                prompt_len: 1,
                max_len: 200,
                computed: *computed,
                chunk: known - *computed,
                draft_computed: *draft_computed,
                is_read: true,
                speculates,
                draft_lens: DraftLens::both(if speculates { 3 } else { 0 }),
                branching: Branching::CHAIN,
                given: &[],
                min_confidence: 0.0,
                pages: &[4, 9, 2, 6, 1, 3, 5, 7, 8, 10, 11, 12, 13],
                prompt_rows: 0,
                shares: crate::sequence::Shares::All,
                sampler,
            };
            let proposal = eagle.propose(&[entry]).unwrap().remove(0);
            let states: Vec<f32> = (0..valid).map(|position| (position % 10) as f32).collect();
            let taps = if tells { states[*computed..].chunks(1).collect() } else { Vec::new() };
            let accepted = tokens[known..valid].to_vec();
            eagle.observe(&[Verified { entry: &entry, accepted, taps }]).unwrap();
            *computed = valid;
            *draft_computed = proposal.cached.map_or(*draft_computed, |cached| cached.known);
            proposal.tokens
        }

        fn passes(&self) -> Vec<Vec<(usize, usize)>> {
            std::mem::take(&mut self.passes.lock().unwrap())
        }
    }

    #[test]
    fn a_row_comes_with_the_state_before_it_and_drafts_with_states_of_the_head() {
        let mut bench = Bench::new(None);
        assert_eq!(bench.step(5, true, true), [0u32; 0], "nothing is known of the target yet");
        bench.accepted = 1;
        assert_eq!(bench.step(6, true, true), [4, 5, 6]);
        assert_eq!(bench.passes(), [vec![(1, 5)], vec![(6, 1)], vec![(7, 1)]]);
        // What was drafted is run again with the states that the target had.
        assert_eq!(bench.step(8, true, true), [6, 7, 8]);
        assert_eq!(bench.passes()[0], [(6, 2)]);
        assert_eq!(bench.step(9, true, true), [7, 8, 9]);
        assert_eq!(bench.passes()[0], [(8, 1)]);
    }

    #[test]
    fn who_is_not_asked_waits_but_not_without_bound() {
        let mut bench = Bench::new(None);
        bench.step(40, false, true);
        bench.step(60, false, true);
        assert!(bench.passes().is_empty(), "40 rows may wait");
        bench.step(90, false, true);
        assert!(bench.passes().is_empty(), "59 rows may wait");
        bench.step(91, false, true);
        assert_eq!(bench.passes(), [vec![(1, 90)]]);
        assert_eq!(bench.eagle.states.num_waiting(7), Some(91));
        bench.step(92, false, true);
        assert_eq!(bench.eagle.states.num_waiting(7), Some(2), "what was run does not wait");
        assert_eq!(bench.step(93, true, true), [1, 2, 3]);
        assert_eq!(bench.passes()[0], [(91, 2)]);
    }

    #[test]
    fn behind_positions_that_it_was_not_told_of_there_are_no_drafts() {
        let mut bench = Bench::new(None);
        bench.step(5, true, true);
        bench.step(8, true, false);
        for known in 9..15 {
            let drafts = bench.step(known, true, true);
            assert_eq!(drafts.is_empty(), known > 8, "behind {known} tokens");
        }
    }

    #[test]
    fn pages_of_another_sequence_come_with_the_state_at_their_end() {
        let mut bench = Bench::new(None);
        bench.step(2 * PAGE_TOKENS + 3, true, true);
        bench.step(2 * PAGE_TOKENS + 4, true, true);
        bench.eagle.forget(7);
        assert_eq!(bench.eagle.states.num_waiting(7), None);
        bench.passes();
        (bench.computed, bench.draft_computed) = (2 * PAGE_TOKENS, 2 * PAGE_TOKENS);
        bench.step(2 * PAGE_TOKENS + 3, true, true);
        assert_eq!(bench.passes(), [vec![(2 * PAGE_TOKENS, 1)]]);
        assert_eq!(bench.step(2 * PAGE_TOKENS + 4, true, true), [4, 5, 6]);
        assert_eq!(bench.passes()[0], [(2 * PAGE_TOKENS + 1, 3)]);
    }

    #[test]
    fn a_head_of_fewer_tokens_drafts_those_of_its_target() {
        let mut bench = Bench::new(Some((0..10).map(|id| 3 * id + 1).collect()));
        bench.step(5, true, true);
        assert_eq!(bench.step(6, true, true), [13, 16, 19]);
    }
}
