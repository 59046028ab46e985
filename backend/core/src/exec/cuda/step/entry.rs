//! One sequence's part in a step that the host tells the device about: where its drafts come from, and what the drafter
//! in the graph sees of it.

use super::input::Planned;
use crate::batch::Entry;
use crate::draft::catch_up::rows_to_feed;
use std::ops::Range;

/// A sequence's part in a step.
pub(super) struct StepEntry<'a> {
    pub(super) entry: &'a Entry<'a>,
    /// Draft tokens that the host knows already.
    pub(super) given: Vec<u32>,
    /// Whether a drafter in the graph sees the sequence: nobody has found drafts before it.
    pub(super) asks_graph: bool,
    /// Known tokens that go through that drafter in the graph.
    pub(super) num_fed: usize,
}

impl StepEntry<'_> {
    /// Drafts that the graph is asked for.
    pub(super) fn draft_len(&self) -> usize {
        if self.asks_graph { self.entry.draft_lens.model } else { 0 }
    }

    /// Known tokens that go through the drafter in this step.
    pub(super) fn drafter_rows(&self) -> Range<usize> {
        let rows = rows_to_feed(self.entry);
        if self.asks_graph { rows } else { rows.end..rows.end }
    }

    /// Positions that the drafter knows without what the graph runs.
    pub(super) fn draft_computed(&self) -> usize {
        let rows = self.drafter_rows();
        if rows.is_empty() { self.entry.draft_computed } else { rows.end - self.num_fed }
    }

    pub(super) fn planned(&self) -> Planned {
        Planned {
            num_fed: self.num_fed,
            draft_computed: self.draft_computed(),
            draft_len: self.draft_len(),
            num_given: self.given.len(),
        }
    }
}
