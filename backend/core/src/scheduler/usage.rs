//! How full the scheduler is, in plain numbers: what a server reports about itself.

use super::{Scheduled, Scheduler};
use crate::pages::PAGE_TOKENS;

/// How full the scheduler is between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Sequences that wait for their first turn.
    pub waiting: usize,
    /// Sequences that lost their pages and wait to run again.
    pub paused: usize,
    /// Sequences that run: `prefilling` and `decoding` together.
    pub running: usize,
    /// Sequences that can run at once.
    pub max_running: usize,
    /// Running sequences whose known tokens are not all computed: prompts, and what was preempted.
    pub prefilling: usize,
    /// Running sequences that generate a token or more a step.
    pub decoding: usize,
    /// Pages in all.
    pub pages: usize,
    /// Pages that running sequences hold.
    pub used_pages: usize,
    /// Pages that nobody holds but that are kept for texts that begin alike. They give way to others.
    pub cached_pages: usize,
    /// Pages with nothing in them: `pages` without `used_pages` and `cached_pages`.
    pub free_pages: usize,
    /// Positions in a page.
    pub page_tokens: usize,
    /// Known tokens that the last step computed for prefilling sequences.
    pub context_tokens: usize,
    /// Steps since the start.
    pub iterations: u64,
    /// Times since the start that a sequence lost its pages.
    pub preemptions: u64,
    /// Pages since the start that a sequence found computed: each as often as it was.
    pub reused_pages: u64,
}

impl Scheduler {
    pub(crate) fn usage(&self) -> Usage {
        let decoding = self.running.values().filter(|sequence| sequence.decodes()).count();
        let (pages, cached_pages) = (self.pool.num_pages(), self.pool.idle_pages());
        let used_pages = pages - self.pool.free_pages();
        Usage {
            waiting: self.num_waiting(),
            paused: self.num_paused,
            running: self.running.len(),
            max_running: self.config.max_batch_size,
            prefilling: self.running.len() - decoding,
            decoding,
            pages,
            used_pages,
            cached_pages,
            free_pages: pages - used_pages - cached_pages,
            page_tokens: PAGE_TOKENS,
            context_tokens: self.tally.context_tokens,
            iterations: self.tally.iterations,
            preemptions: self.tally.preemptions,
            reused_pages: self.tally.reused_pages,
        }
    }

    pub(super) fn count_rows(&mut self, parts: &[Scheduled]) {
        if parts.is_empty() {
            return;
        }
        let prefills = parts.iter().filter(|part| !self.running[&part.key].decodes());
        self.tally.context_tokens = prefills.map(|part| part.chunk).sum();
        self.tally.iterations += 1;
    }
}
