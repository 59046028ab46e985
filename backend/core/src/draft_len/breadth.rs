//! How wide drafts of a model are.

use super::count::ENGINE_DECAY;

/// Tokens that drafts have for each of their longest branch's, of late: more than one where they branch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Breadth {
    tokens: f64,
    len: f64,
}

impl Breadth {
    /// Takes in a draft.
    pub(super) fn record(&mut self, tokens: usize, len: usize) {
        self.tokens = ENGINE_DECAY * self.tokens + tokens as f64;
        self.len = ENGINE_DECAY * self.len + len as f64;
    }

    /// One, where nothing was seen.
    pub(super) fn rate(&self) -> f64 {
        if self.len > 0.0 { self.tokens / self.len } else { 1.0 }
    }
}
