//! The pool of pages. A page is free, or held by one sequence that writes to it, or *kept*: full, named
//! by its key, never written again, and held by any number of sequences, or by none until it is evicted.
//!
//! Who holds a kept page holds the kept pages before it and returns them later, so the page that was
//! returned the longest ago never has another kept page behind it.

use super::{PageId, PageKey};
use std::collections::{BTreeMap, HashMap};

/// What became of a page that was to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// It is kept.
    New,
    /// This page with the same contents was kept already: it is held in its place.
    Known(PageId),
    /// It is kept in place of this page, which lacks the drafter's half. Who holds that one is to
    /// take the new one instead.
    Better(PageId),
}

#[derive(Clone, Debug, Default)]
struct Slot {
    holders: usize,
    kept: Option<Contents>,
    /// Its place among the pages that are kept and held by nobody.
    returned_at: u64,
}

#[derive(Clone, Copy, Debug)]
struct Contents {
    key: PageKey,
    /// Whether the drafter's cache holds it too.
    drafted: bool,
}

/// The pages of an executor.
#[derive(Clone, Debug)]
pub(crate) struct PagePool {
    /// The page freed last is lent first: its lines are the likeliest to be in a cache.
    free: Vec<PageId>,
    /// By page id.
    slots: Vec<Slot>,
    by_key: HashMap<PageKey, PageId>,
    /// Kept pages that nobody holds, in the order of their return.
    idle: BTreeMap<u64, PageId>,
    num_returned: u64,
    /// Pages looked for by their keys, for tests of what a plan may cost.
    #[cfg(test)]
    pub(crate) lookups: std::cell::Cell<usize>,
}

impl PagePool {
    /// A pool of pages `0 .. num_pages`, all free.
    pub(crate) fn new(num_pages: usize) -> Self {
        let count = PageId::try_from(num_pages).expect("page ids are 32 bits wide");
        Self {
            free: (0..count).rev().collect(),
            slots: vec![Slot::default(); num_pages],
            by_key: HashMap::new(),
            idle: BTreeMap::new(),
            num_returned: 0,
            #[cfg(test)]
            lookups: std::cell::Cell::default(),
        }
    }

    /// Pages in all.
    pub(crate) fn num_pages(&self) -> usize {
        self.slots.len()
    }

    /// Pages that can be lent now: those that are free, and those that nobody holds.
    pub(crate) fn free_pages(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Kept pages that nobody holds.
    pub(crate) fn idle_pages(&self) -> usize {
        self.idle.len()
    }

    pub(crate) fn holders(&self, page: PageId) -> usize {
        self.slots[page as usize].holders
    }

    /// The page that is kept under a key; only one with the drafter's half if `drafted`.
    pub(crate) fn find(&self, key: &PageKey, drafted: bool) -> Option<PageId> {
        #[cfg(test)]
        self.lookups.update(|count| count + 1);
        let page = *self.by_key.get(key)?;
        let contents = self.slots[page as usize].kept?;
        (contents.drafted || !drafted).then_some(page)
    }

    /// Whether a kept page holds the drafter's half too.
    pub(crate) fn is_drafted(&self, page: PageId) -> bool {
        self.slots[page as usize].kept.is_some_and(|contents| contents.drafted)
    }

    /// Lends a page to one holder, with nothing in it.
    fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop().or_else(|| self.evict())?;
        self.slots[page as usize].holders = 1;
        Some(page)
    }

    fn evict(&mut self) -> Option<PageId> {
        let (_, page) = self.idle.pop_first()?;
        self.drop_contents(page);
        Some(page)
    }

    fn drop_contents(&mut self, page: PageId) {
        if let Some(contents) = self.slots[page as usize].kept.take() {
            self.by_key.remove(&contents.key);
        }
    }

    /// One holder more for a page that is kept.
    pub(crate) fn hold(&mut self, page: PageId) {
        let slot = &mut self.slots[page as usize];
        assert!(slot.kept.is_some(), "page {page} is to be shared, but it is not kept");
        if slot.holders == 0 {
            self.idle.remove(&slot.returned_at);
        }
        slot.holders += 1;
    }

    /// One holder fewer.
    fn release(&mut self, page: PageId) {
        let slot = &mut self.slots[page as usize];
        assert!(slot.holders > 0, "page {page} is returned while nobody holds it");
        slot.holders -= 1;
        if slot.holders > 0 {
            return;
        }
        if slot.kept.is_none() {
            self.free.push(page);
            return;
        }
        self.num_returned += 1;
        slot.returned_at = self.num_returned;
        self.idle.insert(self.num_returned, page);
    }

    /// Keeps a full page, whose holder will not write to it again, under the key of its contents.
    pub(crate) fn keep(&mut self, page: PageId, key: PageKey, drafted: bool) -> Kept {
        let slot = &self.slots[page as usize];
        assert!(slot.holders == 1 && slot.kept.is_none(), "page {page} is kept twice");
        let known = self.by_key.get(&key).copied();
        if let Some(known) = known
            && self.find(&key, drafted).is_some()
        {
            self.hold(known);
            self.release(page);
            return Kept::Known(known);
        }
        if let Some(known) = known {
            self.slots[known as usize].kept = None;
            if self.holders(known) == 0 {
                self.idle.remove(&self.slots[known as usize].returned_at);
                self.free.push(known);
            }
        }
        self.slots[page as usize].kept = Some(Contents { key, drafted });
        self.by_key.insert(key, page);
        known.map_or(Kept::New, Kept::Better)
    }

    /// Exchanges a page in a table for a kept one with the same contents.
    pub(crate) fn exchange(&mut self, slot: &mut PageId, page: PageId) {
        self.hold(page);
        self.release(std::mem::replace(slot, page));
    }

    /// Grows a page table to `num_pages` pages. The caller has made sure that they are free.
    pub(crate) fn grow(&mut self, table: &mut Vec<PageId>, num_pages: usize) {
        while table.len() < num_pages {
            table.push(self.allocate().expect("pages are counted before they are lent"));
        }
    }

    /// Cuts a page table to its first `num_pages` pages and takes the others back.
    pub(crate) fn trim(&mut self, table: &mut Vec<PageId>, num_pages: usize) {
        // From the end: regrowing a table lends the same pages again, and a kept page is returned
        // before those that it continues.
        while table.len() > num_pages {
            let Some(page) = table.pop() else { break };
            self.release(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PAGE_TOKENS;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn key(name: u32) -> PageKey {
        let mut keys = Vec::new();
        PageKey::extend(&mut keys, None, &[name; PAGE_TOKENS], 0);
        keys[0]
    }

    #[test]
    fn an_empty_pool_lends_nothing() {
        let mut pool = PagePool::new(1);
        assert_eq!(pool.allocate(), Some(0));
        assert_eq!(pool.allocate(), None);
        pool.release(0);
        assert_eq!(pool.allocate(), Some(0));
    }

    #[test]
    #[should_panic(expected = "page 0 is returned while nobody holds it")]
    fn a_double_free_panics() {
        let mut pool = PagePool::new(1);
        let page = pool.allocate().unwrap();
        pool.release(page);
        pool.release(page);
    }

    #[test]
    #[should_panic(expected = "page 0 is to be shared, but it is not kept")]
    fn a_page_that_is_written_cannot_be_shared() {
        let mut pool = PagePool::new(1);
        pool.allocate().unwrap();
        pool.hold(0);
    }

    #[test]
    fn a_kept_page_stays_until_its_room_is_needed() {
        let mut pool = PagePool::new(2);
        let mut table = Vec::new();
        pool.grow(&mut table, 2);
        assert_eq!(pool.keep(table[0], key(1), false), Kept::New);
        assert_eq!(pool.keep(table[1], key(2), false), Kept::New);
        pool.trim(&mut table, 0);
        assert_eq!((pool.free_pages(), pool.idle_pages()), (2, 2));
        pool.grow(&mut table, 1);
        assert_eq!(pool.find(&key(1), false), Some(0), "the later page goes first");
        assert_eq!(pool.find(&key(2), false), None);
        pool.hold(0);
        assert_eq!(pool.free_pages(), 0);
    }

    #[test]
    fn a_page_with_the_drafters_half_takes_the_place_of_one_without() {
        let mut pool = PagePool::new(4);
        let mut table = Vec::new();
        pool.grow(&mut table, 3);
        assert_eq!(pool.keep(table[0], key(1), false), Kept::New);
        assert_eq!(pool.find(&key(1), true), None);
        assert_eq!(pool.keep(table[1], key(1), true), Kept::Better(table[0]));
        assert_eq!(pool.find(&key(1), true), Some(table[1]));
        let better = table[1];
        pool.exchange(&mut table[0], better);
        assert_eq!((pool.holders(better), pool.free_pages()), (2, 2));
        assert_eq!(pool.keep(table[2], key(1), false), Kept::Known(better));
        table[2] = better;
        pool.trim(&mut table, 0);
        assert_eq!((pool.free_pages(), pool.idle_pages()), (4, 1));
    }

    #[test]
    fn a_page_nobody_holds_is_free_at_once_when_a_better_one_is_kept() {
        let mut pool = PagePool::new(2);
        let mut table = Vec::new();
        pool.grow(&mut table, 1);
        pool.keep(table[0], key(1), false);
        pool.trim(&mut table, 0);
        pool.grow(&mut table, 1);
        assert_eq!(pool.keep(table[0], key(1), true), Kept::Better(0));
        assert_eq!((pool.free_pages(), pool.idle_pages()), (1, 0));
    }

    proptest! {
        /// Tables over texts of which one is the beginning of the other; each keeps and takes what it can.
        #[test]
        fn pages_are_free_held_or_idle_and_only_kept_ones_are_shared(
            actions in prop::collection::vec((0usize..4, 0usize..9, any::<bool>()), 1..80),
        ) {
            let text: Vec<u32> = (0..9 * PAGE_TOKENS as u32).collect();
            let mut keys = Vec::new();
            PageKey::extend(&mut keys, None, &text, 0);
            let mut pool = PagePool::new(20);
            let mut tables = vec![Vec::new(); 4];
            for (owner, size, keeps) in actions {
                let table = &mut tables[owner];
                if table.is_empty() {
                    for page in keys[..size].iter().map_while(|key| pool.find(key, false)).collect::<Vec<_>>() {
                        pool.hold(page);
                        table.push(page);
                    }
                } else if size.saturating_sub(table.len()) <= pool.free_pages() {
                    pool.grow(table, size);
                    for idx in 0..size.min(if keeps { 9 } else { 0 }) {
                        if pool.slots[table[idx] as usize].kept.is_none()
                            && let Kept::Known(page) = pool.keep(table[idx], keys[idx], false)
                        {
                            table[idx] = page;
                        }
                    }
                    pool.trim(table, if keeps { 0 } else { size });
                }
                let held: BTreeSet<PageId> = tables.iter().flatten().copied().collect();
                prop_assert_eq!(held.len() + pool.free_pages(), pool.num_pages());
                for &page in &held {
                    let holders = tables.iter().flatten().filter(|&&other| other == page).count();
                    prop_assert_eq!(holders, pool.holders(page));
                    prop_assert!(holders == 1 || pool.slots[page as usize].kept.is_some());
                }
                prop_assert_eq!(pool.by_key.len(), pool.slots.iter().filter(|slot| slot.kept.is_some()).count());
                let found: Vec<bool> = keys.iter().map(|key| pool.find(key, false).is_some()).collect();
                prop_assert!(found.is_sorted_by(|a, b| a >= b), "a page is kept without its beginning: {:?}", found);
            }
        }
    }
}
