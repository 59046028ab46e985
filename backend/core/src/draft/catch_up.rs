//! How far a drafter's model has read a sequence. It reads what is known when it is asked for a draft, and its own drafts
//! but for the last one; what follows a draft that was rejected is stale. (`kernels/step/accept.cu` has the same rule for
//! steps that the device decides about.)

use crate::batch::Entry;
use std::borrow::Cow;
use std::ops::Range;

/// Positions that a drafter's own KV cache has: of the known tokens, and behind all of these of the draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    /// Known tokens, from the first on.
    pub known: usize,
    /// Drafts, from the first on.
    pub drafts: usize,
}

impl Cached {
    /// Valid positions once `accepted` drafts were kept.
    pub(crate) fn after(self, accepted: usize) -> usize {
        self.known + self.drafts.min(accepted)
    }
}

/// Known tokens that the drafter's model runs in this step: none where it is not kept in step, and then it catches up
/// when it is asked again.
pub(crate) fn rows_to_feed(entry: &Entry<'_>) -> Range<usize> {
    let end = entry.computed + entry.chunk;
    if entry.speculates { entry.draft_computed..end } else { end..end }
}

/// Tokens for a drafter that knows `vocab_size`. A target may draw a token of its padding, which the drafter may not have:
/// any other token does instead, at the cost of a worse draft.
pub(crate) fn readable(tokens: &[u32], vocab_size: usize) -> Cow<'_, [u32]> {
    let is_known = |token: u32| (token as usize) < vocab_size;
    if tokens.iter().all(|&token| is_known(token)) {
        return Cow::Borrowed(tokens);
    }
    tokens.iter().map(|&token| if is_known(token) { token } else { 0 }).collect()
}
