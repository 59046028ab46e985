//! The pool of KV pages.

/// Index of a page; one table serves target and drafter, whose caches have the same geometry.
pub type PageId = u32;

/// Positions in a page.
pub const PAGE_TOKENS: usize = 16;
