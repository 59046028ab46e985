//! Pages that running sequences are about to compute. A waiting sequence that would have to compute one of them first
//! lets others go ahead: to wait costs it nothing, since it would be computing the same, and spares the page and the
//! work.
//!
//! It waits for those alone that come before it: a sequence behind it in the order may never get a turn while those of
//! a better priority keep the engine busy.

use super::{Key, Scheduler};
use crate::pages::{PAGE_TOKENS, PageKey};
use crate::sequence::Sequence;

/// The next page of each running sequence that a waiting one could want. There are as many as prompts are being
/// computed, so that who is held back is told by a comparison each, however many wait and however long their prompts.
#[derive(Debug, Default)]
pub(super) struct Coming(Vec<ComingPage>);

#[derive(Debug)]
struct ComingPage {
    /// Who computes it.
    by: Key,
    /// Its place in the text. All pages before it are kept.
    idx: usize,
    /// Names it and all before it: whose text has this name in this place begins with all of them.
    name: PageKey,
    /// Whether this is about sequences that need the drafter's half too, or about those that do not.
    drafted: bool,
}

impl Coming {
    fn holds_back(&self, key: Key, sequence: &Sequence, drafted: bool) -> bool {
        // The last known token is computed by each for itself, and so is the page that it completes.
        let wants = |page: &ComingPage| (page.idx + 1) * PAGE_TOKENS < sequence.tokens.len();
        let comes = |page: &ComingPage| {
            page.by < key
                && page.drafted == drafted
                && sequence.page_keys.get(page.idx) == Some(&page.name)
        };
        !sequence.tells_of_prompt() && self.0.iter().any(|page| comes(page) && wants(page))
    }
}

impl Scheduler {
    /// What all running sequences are about to compute.
    pub(super) fn coming(&self) -> Coming {
        let mut coming = Coming::default();
        self.running.iter().for_each(|(&key, sequence)| self.expect(&mut coming, key, sequence));
        coming
    }

    /// Adds what a running sequence is about to compute.
    pub(super) fn expect(&self, coming: &mut Coming, key: Key, sequence: &Sequence) {
        let halves = if self.has_draft_half(sequence) { &[false, true][..] } else { &[false] };
        for &drafted in halves {
            let idx = self.first_unknown(sequence, drafted);
            // A head reads a prompt a step behind the target: its half of the page is sure to follow.
            let follows =
                self.has_draft_half(sequence) && sequence.draft_lag() >= self.max_draft_lag();
            let is_computed = sequence.computed >= (idx + 1) * PAGE_TOKENS && !follows;
            if let Some(&name) = sequence.page_keys.get(idx).filter(|_| !is_computed) {
                coming.0.push(ComingPage { by: key, idx, name, drafted });
            }
        }
    }

    /// Place of the first page of a running sequence that is not kept, by itself or another.
    fn first_unknown(&self, sequence: &Sequence, drafted: bool) -> usize {
        let own = sequence.kept_pages;
        let others = sequence.page_keys.iter().skip(own);
        own + others.take_while(|key| self.pool.find(key, drafted).is_some()).count()
    }

    /// Whether a waiting sequence lets others go ahead.
    pub(super) fn is_held_back(&self, coming: &Coming, key: Key, sequence: &Sequence) -> bool {
        coming.holds_back(key, sequence, self.is_read_for_certain(sequence))
    }
}
