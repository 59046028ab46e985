//! One sequence's part in a step that the host tells the device about: where its drafts come from, and what the drafter
//! in the graph sees of it.

use super::forks::Fork;
use super::input::{Branched, Planned};
use crate::batch::Entry;
use std::ops::Range;

/// A sequence's part in a step.
pub(super) struct StepEntry<'a> {
    pub(super) entry: &'a Entry<'a>,
    /// Draft tokens that the host knows already.
    pub(super) given: Vec<u32>,
    /// Whether a drafter in the graph may propose: nobody has found drafts before it, and it can go on from the last token.
    pub(super) asks_graph: bool,
    /// Known tokens that go through that drafter in this step.
    pub(super) drafter_rows: Range<usize>,
    /// So many of them, the last ones, do in the graph.
    pub(super) num_fed: usize,
    /// Whether its last known token runs ahead of the graph too, with those before it; then nothing is drafted.
    pub(super) has_run: bool,
    /// Where further chains of drafts part from the first one, each with a place in the step.
    pub(super) forks: Vec<Fork>,
}

impl StepEntry<'_> {
    /// Drafts that the graph is asked for.
    pub(super) fn draft_len(&self) -> usize {
        if self.asks_graph { self.entry.draft_lens.model } else { 0 }
    }

    /// Those that run ahead of the graph.
    pub(super) fn rows_ahead(&self) -> Range<usize> {
        self.drafter_rows.start..self.drafter_rows.end - self.num_fed
    }

    /// Positions that the drafter knows without what the graph runs.
    pub(super) fn draft_computed(&self) -> usize {
        match self.drafter_rows.is_empty() {
            true => self.entry.draft_computed,
            false => self.drafter_rows.end - self.num_fed,
        }
    }

    /// Positions that a head on hidden states knows behind the step: its own drafts it runs again, with other states.
    pub(super) fn head_computed(&self) -> usize {
        match self.drafter_rows.is_empty() {
            true => self.entry.draft_computed,
            false => self.drafter_rows.end,
        }
    }

    /// Places in the step.
    pub(super) fn num_branches(&self) -> usize {
        1 + self.forks.len()
    }

    /// What its n-th branch does.
    pub(super) fn planned(&self, nth: usize) -> Planned {
        let branch = match nth.checked_sub(1) {
            Some(idx) => Branched::From(self.forks[idx]),
            None if self.forks.is_empty() => Branched::Alone,
            None => Branched::First,
        };
        Planned {
            branch,
            num_fed: self.num_fed,
            draft_computed: self.draft_computed(),
            draft_len: self.draft_len(),
            num_given: self.given.len(),
            has_run: self.has_run,
        }
    }
}
