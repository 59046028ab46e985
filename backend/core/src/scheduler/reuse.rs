//! Beginnings that several texts have in common are computed once. A full page is kept as soon as it
//! is computed, and is not written again; who starts takes the kept pages that its text begins with.
//!
//! Every page holds a half for the target and one for the drafter. A sequence that a drafter reads takes
//! only pages with both, so that its drafter starts where the target does, and keeps only such pages
//! while it runs. (To take the others and have the drafter catch up would write to shared pages, and
//! leave the sequence without good drafts until it has caught up.)

use super::{Key, Scheduler, lookahead};
use crate::batch::PromptBlocks;
use crate::draft_len::Reading;
use crate::pages::{Kept, PAGE_TOKENS, PageId, PageKey, pages_for};
use crate::sequence::{Sequence, Shares};
use std::ptr;
use std::sync::{Arc, Weak};

/// How a sequence starts.
pub(super) struct Beginning {
    /// The kept pages that it starts with.
    pub(super) pages: Vec<PageId>,
    /// What a model that drafts reads of it, if it does.
    reading: Option<Reading>,
}

/// A page of running sequences that is to make way for a better one, at this place in their tables.
struct Upgrade {
    idx: usize,
    old: PageId,
    new: PageId,
}

/// A prompt whose pages are named. Texts of one prompt come one after the other, and it is hashed once for all of them.
/// It does not live on for being remembered.
#[derive(Debug, Default)]
pub(super) struct NamedPrompt {
    tokens: Weak<Vec<u32>>,
    shares: Shares,
    page_keys: Weak<Vec<PageKey>>,
}

impl NamedPrompt {
    /// Names the full pages of a sequence that arrives.
    pub(super) fn name(&mut self, sequence: &mut Sequence, blocks: Option<PromptBlocks>) {
        // No other prompt can be in its place in memory as long as it is remembered.
        let is_same = ptr::eq(self.tokens.as_ptr(), Arc::as_ptr(&sequence.tokens));
        match self.page_keys.upgrade() {
            Some(page_keys) if is_same && self.shares == sequence.shares => {
                sequence.page_keys = page_keys;
            }
            _ => {
                name_pages(sequence, blocks);
                let (tokens, page_keys) = (&sequence.tokens, &sequence.page_keys);
                *self = Self {
                    tokens: Arc::downgrade(tokens),
                    shares: sequence.shares,
                    page_keys: Arc::downgrade(page_keys),
                };
            }
        }
    }
}

/// Names the full pages of a sequence.
fn name_pages(sequence: &mut Sequence, blocks: Option<PromptBlocks>) {
    let Sequence { page_keys, shares, tokens, prompt_len, .. } = sequence;
    let root = match shares {
        Shares::NoOne => return,
        Shares::All => None,
        Shares::Behind(key) => Some(&*key),
    };
    if page_keys.len() < tokens.len() / PAGE_TOKENS {
        let blocks_end = blocks.map_or(0, |blocks| blocks.end(*prompt_len));
        PageKey::extend(Arc::make_mut(page_keys), root, tokens, blocks_end);
    }
}

impl Scheduler {
    /// How a waiting sequence would start now.
    pub(super) fn beginning(&self, sequence: &Sequence) -> Beginning {
        let mut pages = self.prefix(sequence, false);
        if sequence.limits.draft_len == 0 {
            return Beginning { pages, reading: None };
        }
        let is_drafted = |page: &PageId| !self.config.drafter_caches || self.pool.is_drafted(*page);
        let num_drafted = pages.iter().take_while(|page| is_drafted(page)).count();
        let reading = Reading {
            num_unread: sequence.tokens.len() - num_drafted * PAGE_TOKENS,
            num_again: (pages.len() - num_drafted) * PAGE_TOKENS,
            is_fixed: sequence.limits.is_fixed,
            max_tokens: sequence.max_len() - sequence.tokens.len(),
            // Those that wait run beside it soon.
            batch_size: self.keys.len().min(self.config.max_batch_size),
        };
        let reading = Some(reading).filter(|reading| self.tuner.reads(reading));
        if reading.is_some() {
            pages.truncate(num_drafted);
        }
        Beginning { pages, reading }
    }

    /// The kept pages that a waiting sequence can start with. The last known token is left to be
    /// computed: its logits are needed. So are those of the whole prompt where they tell of it.
    pub(super) fn prefix(&self, sequence: &Sequence, drafted: bool) -> Vec<PageId> {
        if sequence.tells_of_prompt() {
            return Vec::new();
        }
        let limit = (sequence.tokens.len() - 1) / PAGE_TOKENS;
        let keys = sequence.page_keys.iter().take(limit);
        keys.map_while(|key| self.pool.find(key, drafted)).collect()
    }

    /// Starts a sequence with the kept pages of its beginning.
    pub(super) fn take_beginning(&mut self, sequence: &mut Sequence) {
        let Beginning { pages, reading } = self.beginning(sequence);
        reading.iter().for_each(|reading| self.tuner.count_reading(reading));
        pages.iter().for_each(|&page| self.pool.hold(page));
        sequence.computed = pages.len() * PAGE_TOKENS;
        sequence.found = sequence.computed;
        sequence.is_read = reading.is_some();
        if sequence.is_read {
            sequence.draft_computed = sequence.computed;
        }
        sequence.kept_pages = pages.len();
        sequence.counters.reused_pages += pages.len() as u64;
        self.tally.reused_pages += pages.len() as u64;
        sequence.counters.reused_tokens += sequence.computed as u64;
        sequence.pages = pages;
    }

    /// Whether the drafter's half of a running sequence's pages is computed as well.
    pub(super) fn has_draft_half(&self, sequence: &Sequence) -> bool {
        self.config.drafter_caches && sequence.is_read
    }

    /// Whether that can be said of a waiting sequence already.
    pub(super) fn is_read_for_certain(&self, sequence: &Sequence) -> bool {
        let is_settled = self.tuner.reads_all() || sequence.limits.is_fixed;
        self.config.drafter_caches && sequence.limits.draft_len > 0 && is_settled
    }

    /// Keeps the full pages of a running sequence that no step will write to again.
    pub(super) fn keep_computed(&mut self, key: Key) {
        let Some(sequence) = self.running.get(&key) else { return };
        let end = match self.has_draft_half(sequence) {
            true => sequence.draft_computed,
            false => sequence.computed,
        };
        if sequence.shares != Shares::NoOne && end / PAGE_TOKENS > sequence.kept_pages {
            let Some(mut sequence) = self.running.remove(&key) else { return };
            self.keep(&mut sequence, end);
            self.running.insert(key, sequence);
        }
    }

    /// Takes a sequence's pages away, and keeps what is computed of the full ones.
    pub(super) fn release(&mut self, sequence: &mut Sequence) {
        lookahead::trim(&mut self.pool, sequence, pages_for(sequence.tokens.len()));
        self.keep(sequence, sequence.computed);
        self.pool.trim(&mut sequence.pages, 0);
        sequence.kept_pages = 0;
    }

    /// Keeps the full pages of a sequence's first `end` positions.
    fn keep(&mut self, sequence: &mut Sequence, end: usize) {
        name_pages(sequence, self.config.prompt_blocks);
        let mut upgrades = Vec::new();
        let end = (end / PAGE_TOKENS).min(sequence.page_keys.len());
        for idx in sequence.kept_pages..end {
            let drafted =
                !self.config.drafter_caches || (idx + 1) * PAGE_TOKENS <= sequence.draft_computed;
            let page = &mut sequence.pages[idx];
            match self.pool.keep(*page, sequence.page_keys[idx], drafted) {
                Kept::New => {}
                Kept::Known(known) => *page = known,
                Kept::Better(old) => upgrades.push(Upgrade { idx, old, new: *page }),
            }
        }
        sequence.kept_pages = sequence.kept_pages.max(end);
        upgrades.iter().for_each(|upgrade| self.upgrade(upgrade));
    }

    /// Has all that hold the old page take the new one: who holds a page that continues a kept one
    /// must hold that one too, lest it be evicted first.
    fn upgrade(&mut self, &Upgrade { idx, old, new }: &Upgrade) {
        let tables = self.running.values_mut().map(|sequence| &mut sequence.pages);
        for page in tables.filter_map(|table| table.get_mut(idx)).filter(|page| **page == old) {
            self.pool.exchange(page, new);
        }
    }
}
