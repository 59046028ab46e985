//! The states that rows of a head come with, which the target has had: they wait here, by sequence, until their rows are run.
//!
//! Those at the ends of pages stay as long as nobody else computes the page: who begins behind it needs them.

use crate::batch::Entry;
use crate::pages::{PAGE_TOKENS, PageId};
use crate::sequence::SequenceId;
use std::collections::HashMap;
use std::ops::Range;

/// States of a sequence that wait at most while it is not asked for drafts: then their rows are run together, for little
/// more than one.
pub(crate) const MAX_WAITING: usize = 64;

/// The states of all sequences.
#[derive(Debug)]
pub struct HeadStates {
    width: usize,
    waiting: HashMap<SequenceId, States>,
    page_ends: HashMap<PageId, Vec<f32>>,
}

/// States of consecutive positions.
#[derive(Debug, Default)]
struct States {
    first: usize,
    values: Vec<f32>,
}

impl States {
    /// One behind the last position.
    fn end(&self, width: usize) -> usize {
        self.first + self.values.len() / width
    }

    /// Takes in the state of a position, and lets go of all others that it does not follow.
    fn push(&mut self, position: usize, state: &[f32]) {
        if self.end(state.len()) != position {
            *self = Self { first: position, values: Vec::new() };
        }
        self.values.extend_from_slice(state);
    }

    /// Puts a state in front of the others.
    fn put_first(&mut self, position: usize, state: &[f32]) {
        if self.values.is_empty() || self.first == position + 1 {
            self.first = position;
            self.values.splice(0..0, state.iter().copied());
        }
    }

    fn forget_before(&mut self, position: usize, width: usize) {
        if position > self.first {
            let gone = (position - self.first) * width;
            self.values.drain(..gone.min(self.values.len()));
            // A prompt's are many, what follows are few.
            self.values.shrink_to(2 * self.values.len());
            self.first = position;
        }
    }
}

impl HeadStates {
    /// Of a head whose states are so wide.
    pub(crate) fn new(width: usize) -> Self {
        Self { width, waiting: HashMap::new(), page_ends: HashMap::new() }
    }

    /// Known tokens that the head can run now: those from the last one read that the target has a state before. None while
    /// few wait and none `is_wanted`.
    pub(crate) fn rows_to_feed(&mut self, entry: &Entry<'_>, is_wanted: bool) -> Range<usize> {
        let first = entry.draft_computed.max(1);
        let waiting = self.waiting.entry(entry.id).or_default();
        waiting.forget_before(first - 1, self.width);
        let is_missing = waiting.values.is_empty() || waiting.first == first;
        if is_missing && first.is_multiple_of(PAGE_TOKENS) && first <= entry.computed {
            let page = entry.pages[first / PAGE_TOKENS - 1];
            self.page_ends.get(&page).into_iter().for_each(|end| waiting.put_first(first - 1, end));
        }
        if waiting.first != first - 1 {
            // What is missing was never heard of: there are no drafts for this sequence.
            return first..first;
        }
        let rows = first..(waiting.end(self.width) + 1).min(entry.tokens.len());
        if is_wanted || rows.len() >= MAX_WAITING { rows } else { first..first }
    }

    /// What some rows of those to feed come with, counted from the first one, `[row][width]`.
    pub(crate) fn of(&self, id: SequenceId, rows: Range<usize>) -> &[f32] {
        let waiting = self.waiting.get(&id).map_or(&[][..], |waiting| &waiting.values);
        &waiting[rows.start * self.width..rows.end * self.width]
    }

    /// Takes in the target's states from an entry's first computed position on, `[position][width]`.
    pub(crate) fn take(&mut self, entry: &Entry<'_>, states: &[f32]) {
        let waiting = self.waiting.entry(entry.id).or_default();
        for (position, state) in (entry.computed..).zip(states.chunks_exact(self.width)) {
            waiting.push(position, state);
            if (position + 1).is_multiple_of(PAGE_TOKENS) {
                self.page_ends.insert(entry.pages[position / PAGE_TOKENS], state.to_vec());
            }
        }
    }

    /// The sequence has left or lost its pages.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        self.waiting.remove(&id);
    }

    /// Values that wait for a sequence.
    #[cfg(test)]
    pub(crate) fn num_waiting(&self, id: SequenceId) -> Option<usize> {
        self.waiting.get(&id).map(|waiting| waiting.values.len())
    }
}
