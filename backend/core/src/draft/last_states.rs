//! The state that the target has had at the last position that it has computed, by sequence: what heads without a cache draft
//! from.

use crate::batch::Entry;
use crate::sequence::SequenceId;
use std::collections::HashMap;
use std::ops::Range;

/// The states of all sequences.
#[derive(Debug)]
pub struct LastStates {
    width: usize,
    states: HashMap<SequenceId, State>,
}

/// That of a position.
#[derive(Debug)]
struct State {
    position: usize,
    values: Vec<f32>,
}

impl LastStates {
    /// Of heads whose states are so wide.
    pub(crate) fn new(width: usize) -> Self {
        Self { width, states: HashMap::new() }
    }

    /// The state in front of the last known token, where the target has computed that position last.
    pub(crate) fn before_last(&self, entry: &Entry<'_>) -> Option<&[f32]> {
        let state = self.states.get(&entry.id)?;
        (state.position + 2 == entry.tokens.len()).then_some(&state.values)
    }

    /// Known tokens that drafts which are asked for come behind: the last one, where there is the state in front of it.
    pub(crate) fn rows_to_feed(&self, entry: &Entry<'_>) -> Range<usize> {
        let can_draft = entry.draft_lens.model > 0 && self.before_last(entry).is_some();
        let end = entry.tokens.len();
        end - usize::from(can_draft)..end
    }

    /// Takes in the target's states from an entry's first computed position on, `[position][width]`: the last one.
    pub(crate) fn take(&mut self, entry: &Entry<'_>, states: &[f32]) {
        if let Some(last) = states.chunks_exact(self.width).last() {
            self.take_last(entry, states.len() / self.width, last);
        }
    }

    /// The same of so many positions, of which the state of the last one is at hand.
    pub(crate) fn take_last(&mut self, entry: &Entry<'_>, num_positions: usize, state: &[f32]) {
        let position = entry.computed + num_positions - 1;
        self.states.insert(entry.id, State { position, values: state.to_vec() });
    }

    /// The sequence has left or lost its pages.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        self.states.remove(&id);
    }
}
