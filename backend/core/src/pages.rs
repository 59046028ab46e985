//! The pool of KV pages: which are free and which are lent. A page has one owner at a time, the
//! sequence that holds its id; the pool asserts that nothing is returned twice.

/// Index of a page; one table serves target and drafter, whose caches have the same geometry.
pub type PageId = u32;

/// Positions in a page.
pub const PAGE_TOKENS: usize = 16;

/// Pages that hold this many positions.
pub fn pages_for(positions: usize) -> usize {
    positions.div_ceil(PAGE_TOKENS)
}

/// The pages of an executor.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// The page freed last is lent first: its lines are the likeliest to be in a cache.
    free: Vec<PageId>,
    /// By page id.
    lent: Vec<bool>,
}

impl PagePool {
    /// A pool of pages `0 .. num_pages`, all free.
    pub fn new(num_pages: usize) -> Self {
        let count = PageId::try_from(num_pages).expect("page ids are 32 bits wide");
        Self { free: (0..count).rev().collect(), lent: vec![false; num_pages] }
    }

    /// Pages in all.
    pub fn num_pages(&self) -> usize {
        self.lent.len()
    }

    /// Pages that can be lent now.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Lends a page.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.lent[page as usize] = true;
        Some(page)
    }

    /// Takes a page back.
    pub fn free(&mut self, page: PageId) {
        let lent = &mut self.lent[page as usize];
        assert!(*lent, "page {page} is returned while it is free");
        *lent = false;
        self.free.push(page);
    }

    /// Grows a page table to `num_pages` pages. The caller has made sure that they are free.
    pub fn grow(&mut self, table: &mut Vec<PageId>, num_pages: usize) {
        while table.len() < num_pages {
            table.push(self.allocate().expect("pages are counted before they are lent"));
        }
    }

    /// Cuts a page table to its first `num_pages` pages and takes the others back.
    pub fn trim(&mut self, table: &mut Vec<PageId>, num_pages: usize) {
        // From the end, so that regrowing a table lends the same pages again.
        while table.len() > num_pages {
            let Some(page) = table.pop() else { break };
            self.free(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn partial_pages_count_whole() {
        assert_eq!(pages_for(0), 0);
        assert_eq!(pages_for(1), 1);
        assert_eq!(pages_for(PAGE_TOKENS), 1);
        assert_eq!(pages_for(PAGE_TOKENS + 1), 2);
    }

    #[test]
    fn an_empty_pool_lends_nothing() {
        let mut pool = PagePool::new(1);
        assert_eq!(pool.allocate(), Some(0));
        assert_eq!(pool.allocate(), None);
        pool.free(0);
        assert_eq!(pool.allocate(), Some(0));
    }

    #[test]
    #[should_panic(expected = "page 0 is returned while it is free")]
    fn a_double_free_panics() {
        let mut pool = PagePool::new(1);
        let page = pool.allocate().unwrap();
        pool.free(page);
        pool.free(page);
    }

    proptest! {
        #[test]
        fn tables_never_share_a_page(sizes in prop::collection::vec((0usize..4, 0usize..9), 1..60)) {
            let mut pool = PagePool::new(24);
            let mut tables = vec![Vec::new(); 4];
            for (owner, size) in sizes {
                let held = tables[owner].len();
                if size.saturating_sub(held) <= pool.free_pages() {
                    pool.grow(&mut tables[owner], size);
                }
                pool.trim(&mut tables[owner], size);
                let lent: BTreeSet<PageId> = tables.iter().flatten().copied().collect();
                prop_assert_eq!(lent.len(), tables.iter().map(Vec::len).sum::<usize>());
                prop_assert_eq!(lent.len() + pool.free_pages(), pool.num_pages());
            }
        }
    }
}
