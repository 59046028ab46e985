//! One sequence's part in a step that the host tells the device about: where its drafts come from, and what the drafter
//! sees of it.

use super::input::Planned;
use crate::batch::Entry;
use std::ops::Range;

/// Who is asked for a sequence's drafts.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum DraftSource {
    /// The model on the device.
    Model,
    /// Nobody any more: something was looked up, and the model sees nothing of this step.
    Lookup,
    /// There is no model that could fall behind.
    LookupOnly,
}

/// A sequence's part in a step.
pub(super) struct StepEntry<'a> {
    pub(super) entry: &'a Entry<'a>,
    /// Draft tokens that the host knows already.
    pub(super) given: Vec<u32>,
    pub(super) drafter: DraftSource,
    /// Known tokens that go through the drafter in the graph.
    pub(super) num_fed: usize,
}

impl StepEntry<'_> {
    /// Drafts that the model is asked for.
    pub(super) fn draft_len(&self) -> usize {
        if self.drafter == DraftSource::Model { self.entry.draft_len } else { 0 }
    }

    /// Known tokens that go through the drafter in this step.
    pub(super) fn drafter_rows(&self) -> Range<usize> {
        let end = self.entry.computed + self.entry.chunk;
        let is_fed = self.entry.speculates && self.drafter == DraftSource::Model;
        if is_fed { self.entry.draft_computed..end } else { end..end }
    }

    /// Positions that the drafter knows without what the graph runs.
    pub(super) fn draft_computed(&self) -> usize {
        let Entry { computed, chunk, draft_computed, .. } = *self.entry;
        let rows = self.drafter_rows();
        match self.drafter {
            DraftSource::LookupOnly => computed + chunk,
            DraftSource::Model if !rows.is_empty() => rows.end - self.num_fed,
            DraftSource::Model | DraftSource::Lookup => draft_computed,
        }
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
