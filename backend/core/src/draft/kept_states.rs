//! The target's states that a drafter keeps from step to step: with them an executor may run it by itself.

use super::head_states::HeadStates;
use super::last_states::LastStates;
use crate::batch::Entry;
use std::ops::Range;

/// A drafter's.
#[derive(Debug)]
pub enum KeptStates<'a> {
    /// Those that rows of a head come with.
    OfRows(&'a mut HeadStates),
    /// One a sequence, of heads without a cache.
    Last(&'a mut LastStates),
}

impl KeptStates<'_> {
    /// Known tokens that the drafter can run now, the last one among them where it can draft. None while few wait and none
    /// `is_wanted`.
    pub(crate) fn rows_to_feed(&mut self, entry: &Entry<'_>, is_wanted: bool) -> Range<usize> {
        match self {
            Self::OfRows(states) => states.rows_to_feed(entry, is_wanted),
            Self::Last(states) => states.rows_to_feed(entry),
        }
    }

    /// Whether those of an entry are kept: of who is not read a head runs no rows.
    pub(crate) fn wants(&self, entry: &Entry<'_>) -> bool {
        match self {
            Self::OfRows(_) => entry.is_read,
            Self::Last(_) => true,
        }
    }

    /// Takes in the target's states from an entry's first computed position on, `[position][width]`.
    pub(crate) fn take(&mut self, entry: &Entry<'_>, states: &[f32]) {
        match self {
            Self::OfRows(of_rows) => of_rows.take(entry, states),
            Self::Last(last) => last.take(entry, states),
        }
    }
}
