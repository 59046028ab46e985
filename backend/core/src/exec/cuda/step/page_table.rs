//! The page table of steps as the device has it, so that only what has changed is uploaded: a place's pages seldom do.

use crate::pages::PageId;
use std::ops::Range;

/// Changes with at most so many unchanged words between them travel together: a copy of its own takes as long.
const NEAR: usize = 4096;

/// u32 `[place][max_pages]`.
#[derive(Debug)]
pub(super) struct PageTable {
    words: Vec<u32>,
    max_pages: usize,
}

impl PageTable {
    /// All zeros, as the device's memory is at first.
    pub(super) fn new(places: usize, max_pages: usize) -> Self {
        Self { words: vec![0; places * max_pages], max_pages }
    }

    /// Every page differs from what is known.
    pub(super) fn forget(&mut self) {
        self.words.fill(PageId::MAX);
    }

    /// Whether a place has these pages at its beginning.
    pub(super) fn begins_with(&self, place: usize, pages: &[PageId]) -> bool {
        self.words[place * self.max_pages..][..self.max_pages].starts_with(pages)
    }

    pub(super) fn words(&self, range: Range<usize>) -> &[u32] {
        &self.words[range]
    }

    /// Takes in the pages of some places, in rising order, and tells which words to upload for that.
    pub(super) fn update<'a>(
        &mut self,
        places: impl Iterator<Item = (usize, &'a [PageId])>,
    ) -> Vec<Range<usize>> {
        let mut changes: Vec<Range<usize>> = Vec::new();
        for (place, pages) in places {
            let pages = &pages[..pages.len().min(self.max_pages)];
            let row = &mut self.words[place * self.max_pages..][..pages.len()];
            let same = row.iter().zip(pages).take_while(|(old, new)| old == new).count();
            row[same..].copy_from_slice(&pages[same..]);
            let first = place * self.max_pages + same;
            let end = first + pages.len() - same;
            match changes.last_mut() {
                _ if first == end => {}
                Some(last) if first <= last.end + NEAR => last.end = end,
                _ => changes.push(first..end),
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First word and end of each change.
    fn update(table: &mut PageTable, places: &[(usize, &[PageId])]) -> Vec<(usize, usize)> {
        let changes = table.update(places.iter().copied());
        changes.into_iter().map(|change| (change.start, change.end)).collect()
    }

    #[test]
    fn only_what_has_changed_is_uploaded() {
        let mut table = PageTable::new(3, 10_000);
        let changes = update(&mut table, &[(0, &[5, 6]), (1, &[7, 8, 9])]);
        assert_eq!(changes, [(0, 2), (10_000, 10_003)]);
        assert!(update(&mut table, &[(0, &[5, 6]), (1, &[7, 8, 9])]).is_empty());
        assert_eq!(update(&mut table, &[(0, &[5, 6, 4]), (1, &[7, 8])]), [(2, 3)]);
        assert_eq!(update(&mut table, &[(1, &[7, 3, 9])]), [(10_001, 10_003)]);
        assert_eq!(table.words(0..4), [5, 6, 4, 0]);
        assert_eq!(table.words(10_000..10_003), [7, 3, 9]);
    }

    #[test]
    fn what_is_forgotten_is_uploaded_again() {
        let mut table = PageTable::new(1, 4);
        update(&mut table, &[(0, &[5, 6])]);
        table.forget();
        assert!(!table.begins_with(0, &[5]));
        assert_eq!(update(&mut table, &[(0, &[5, 6])]), [(0, 2)]);
    }

    #[test]
    fn changes_that_are_near_travel_together() {
        let mut table = PageTable::new(3, 100);
        assert_eq!(update(&mut table, &[(0, &[5, 6]), (2, &[7])]), [(0, 201)]);
    }

    #[test]
    fn pages_beyond_the_table_are_left_out() {
        let mut table = PageTable::new(1, 2);
        assert_eq!(update(&mut table, &[(0, &[5, 6, 7])]), [(0, 2)]);
        assert!(table.begins_with(0, &[5]) && !table.begins_with(0, &[5, 7]));
    }
}
