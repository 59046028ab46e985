//! Pages of KV cache: who holds them, and which are kept, when nobody does, for a text that begins
//! with the same tokens. What the pages hold is the executor's affair.

mod key;
mod pool;

pub use key::PageKey;
pub(crate) use pool::{Kept, PagePool};

/// Index of a page; one table serves target and drafter, whose caches have the same geometry.
pub type PageId = u32;

/// Positions in a page.
pub const PAGE_TOKENS: usize = 16;

/// Pages that hold this many positions.
pub fn pages_for(positions: usize) -> usize {
    positions.div_ceil(PAGE_TOKENS)
}
