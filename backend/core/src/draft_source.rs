//! Where draft tokens come from, and what there is of each such source.

/// Tokens of a position that are drafted at most.
pub const MAX_DRAFT_BRANCHES: usize = 16;

/// A kind of drafter. What it drafts is accepted more or less often and costs more or less, by its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DraftSource {
    /// Tokens that stand somewhere already: there is no pass of a model, and often nothing is found.
    Lookup,
    /// A model or a head: passes, whatever the text.
    Model,
}

impl DraftSource {
    /// In the order in which they are asked.
    pub(crate) const ALL: [Self; 2] = [Self::Lookup, Self::Model];
}

/// One of each source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerSource<T> {
    /// Asked first.
    pub lookup: T,
    /// Asked where the look-up has nothing.
    pub model: T,
}

impl<T> PerSource<T> {
    pub(crate) fn of(&self, source: DraftSource) -> &T {
        match source {
            DraftSource::Lookup => &self.lookup,
            DraftSource::Model => &self.model,
        }
    }

    pub(crate) fn of_mut(&mut self, source: DraftSource) -> &mut T {
        match source {
            DraftSource::Lookup => &mut self.lookup,
            DraftSource::Model => &mut self.model,
        }
    }
}

/// Draft tokens that each source proposes one behind the other at most; a source with 0 is not asked.
pub type DraftLens = PerSource<usize>;

impl DraftLens {
    /// The same for each.
    pub fn both(len: usize) -> Self {
        Self { lookup: len, model: len }
    }

    /// Draft tokens of a step at most, one behind the other: one source drafts, or the other.
    pub fn longest(&self) -> usize {
        self.lookup.max(self.model)
    }
}

/// How a draft that is drawn by a model branches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Branching {
    /// Tokens of a position at most, in all branches.
    pub width: usize,
    /// Tokens of the whole draft at most, in all branches: no fewer than those of the longest one.
    pub max_tokens: usize,
    /// A second one of a position is drafted only if it is held to be at least this likely; 0 is always.
    pub min_likelihood: f32,
}

impl Branching {
    /// One token a position.
    pub const CHAIN: Self = Self { width: 1, max_tokens: usize::MAX, min_likelihood: 0.0 };
}
