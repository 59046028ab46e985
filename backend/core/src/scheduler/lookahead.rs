//! Pages beyond those of a step, for an executor that begins the next step before it has told of this one. They come
//! from what a plan has left, kept pages that nobody holds included, and go back as soon as anything else needs them.

use super::{Scheduled, Scheduler};
use crate::pages::{PagePool, pages_for};
use crate::sequence::Sequence;

impl Scheduler {
    /// Lends the sequences that generate in this step pages for the executor's lookahead, as far as pages are left.
    pub(super) fn lend_lookahead(&mut self, parts: &[Scheduled]) {
        for part in parts.iter().filter(|_| self.config.lookahead > 0) {
            let Some(sequence) = self.running.get_mut(&part.key) else { continue };
            let own = sequence.computed + part.chunk + part.draft_len();
            let all = pages_for((own + self.config.lookahead).min(sequence.max_len()));
            let more = all.saturating_sub(sequence.pages.len());
            if part.chunk == sequence.pending() && more <= self.pool.free_pages() {
                let num_pages = sequence.pages.len() + more;
                self.pool.grow(&mut sequence.pages, num_pages);
                sequence.counters.new_pages += more as u64;
            }
        }
    }

    /// Takes those pages back from all sequences, but for what the parts planned so far need. Tells whether there were
    /// any.
    pub(super) fn take_back_lookahead(&mut self, parts: &[Scheduled]) -> bool {
        let before = self.pool.free_pages();
        for (key, sequence) in self.running.iter_mut().filter(|_| self.config.lookahead > 0) {
            let part = parts.iter().find(|part| part.key == *key);
            let own = part.map_or(0, |part| sequence.computed + part.chunk + part.draft_len());
            trim(&mut self.pool, sequence, pages_for(own.max(sequence.tokens.len())));
        }
        self.pool.free_pages() > before
    }

    /// Pages that a sequence keeps from one step to the next: those of the tokens it has, and as far as the executor looks ahead.
    pub(super) fn num_kept_pages(&self, sequence: &Sequence) -> usize {
        let len = sequence.tokens.len();
        pages_for(len.max((len + self.config.lookahead).min(sequence.max_len())))
    }
}

/// Cuts a sequence's table; what goes back was never taken.
pub(super) fn trim(pool: &mut PagePool, sequence: &mut Sequence, num_pages: usize) {
    let held = sequence.pages.len();
    pool.trim(&mut sequence.pages, num_pages);
    sequence.counters.new_pages -= (held - sequence.pages.len()) as u64;
}
