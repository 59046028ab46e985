//! A step on its way on the device. Where nobody has to look at what it brings, the next one begins before it is told:
//! the device goes on from where it is. It is taken for the step that is asked for next if it turns out to be that; if
//! not, nothing is lost but time, since what it wrote lies behind everything that is valid.

use super::page_table::PageTable;
use super::step_graph::Shape;
use super::step_input::looks_back;
use super::step_params::StepResult;
use crate::batch::Entry;
use crate::pages::pages_for;
use crate::sequence::SequenceId;

/// By how much the confidence that drafting asks for may have changed: it follows costs, which never rest.
const CONFIDENCE_DRIFT: f32 = 0.05;

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) id: SequenceId,
    /// Known tokens at its beginning, once that is known.
    pub(super) len: usize,
    /// Drafts at most, but for the end of the text.
    pub(super) draft_len: usize,
    pub(super) min_confidence: f32,
}

impl Place {
    /// Drafts that are asked for in a step from `len` tokens on.
    fn drafts_from(&self, len: usize, max_len: usize) -> usize {
        self.draft_len.min(max_len.saturating_sub(len + 1))
    }

    /// Whether the entry is what this place does.
    fn is_for(&self, entry: &Entry<'_>) -> bool {
        let len = entry.tokens.len();
        let does_same = self.len == len && entry.computed + 1 == len && entry.chunk == 1;
        does_same && len < entry.max_len && entry.given.is_empty()
    }

    /// Whether the next step of the entry is known to be like this one, and has pages.
    fn goes_on(&self, entry: &Entry<'_>) -> bool {
        let (len, max_len) = (entry.tokens.len(), entry.max_len);
        let drafts_same = entry.draft_len == self.drafts_from(len, max_len);
        let drift = (entry.min_confidence - self.min_confidence).abs();
        // A drafter that was told to catch up does that when the host says what it has missed.
        let catches_up = entry.speculates && entry.draft_len == 0;
        // All drafts accepted and a token more, then drafts again.
        let end = (len + 2 * self.draft_len + 1).min(max_len);
        let has_pages = pages_for(end) <= entry.pages.len();
        let is_free = entry.given.is_empty() && !looks_back(entry) && !catches_up;
        is_free && drafts_same && drift <= CONFIDENCE_DRIFT && has_pages
    }
}

/// What is on its way.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) number: u32,
    pub(super) shape: Shape,
    pub(super) places: Vec<Place>,
}

impl Flight {
    /// The place that does what an entry asks for, if there is one. `pages` is what the device knows.
    pub(super) fn place_of(&self, entry: &Entry<'_>, pages: &PageTable) -> Option<usize> {
        let place = self.places.iter().position(|place| place.id == entry.id)?;
        let written =
            pages_for((entry.tokens.len() + self.places[place].draft_len).min(entry.max_len));
        let has_same_pages =
            entry.pages.get(..written).is_some_and(|own| pages.begins_with(place, own));
        (has_same_pages && self.places[place].is_for(entry)).then_some(place)
    }

    /// Whether the step after this one may begin before this one is told: it has the same sequences in the same
    /// places, and at least one goes on for sure.
    pub(super) fn goes_on(&self, entries: &[&Entry<'_>]) -> bool {
        let is_same = self.places.len() == entries.len()
            && self.places.iter().zip(entries).all(|(place, entry)| place.id == entry.id);
        let mut pairs = self.places.iter().zip(entries);
        let is_needed = entries.iter().any(|entry| entry.tokens.len() + 1 < entry.max_len);
        is_same && is_needed && pairs.all(|(place, entry)| place.goes_on(entry))
    }

    /// The step after this one. Where it begins is not known yet.
    pub(super) fn next(&self) -> Self {
        Self { number: self.number.wrapping_add(1), shape: self.shape, places: self.places.clone() }
    }

    /// Takes in what the step before has brought.
    pub(super) fn begin_after(&mut self, before: &[StepResult]) {
        for (place, result) in self.places.iter_mut().zip(before) {
            place.len += result.num_tokens as usize;
        }
    }
}
