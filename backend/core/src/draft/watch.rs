//! Drafts nothing and hands on what the target computes.

use super::{Drafter, Proposal, Verified};
use crate::Result;
use crate::batch::Entry;
use crate::sequence::SequenceId;

/// Is told the hidden states of a sequence's tokens, from a position on: `[layer][hidden]` a token. A sequence that lost
/// its pages is computed, and told, again.
pub type OnStates = Box<dyn FnMut(SequenceId, usize, &[&[f32]]) + Send>;

/// Who looks on while a runtime computes.
pub struct Watch {
    /// The layers whose hidden states are told: of k the residual stream behind k layers. Ascending.
    pub layers: Vec<usize>,
    /// Whom they are told.
    pub on_states: OnStates,
}

impl Drafter for Watch {
    fn taps(&self) -> &[usize] {
        &self.layers
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        Ok(vec![Proposal::default(); entries.len()])
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        for Verified { entry, taps, .. } in verified {
            (self.on_states)(entry.id, entry.computed, taps);
        }
        Ok(())
    }

    fn forget(&mut self, _: SequenceId) {}
}
