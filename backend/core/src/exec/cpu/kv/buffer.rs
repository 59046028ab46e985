//! Zeroed memory that many threads may write to, at addresses that are multiples of a page.
#![allow(unsafe_code)]

use crate::exec::cpu::mapping::Mapping;
use std::ops::Range;

/// A cache line, and the widest vector.
const ALIGN: usize = 64;

/// Bytes behind a raw pointer: who reads and writes which of them, and when, is the owner's affair.
pub(super) struct Buffer(Mapping);

impl Buffer {
    /// `None` where there is no such amount of memory.
    pub(super) fn zeroed(len: usize) -> Option<Self> {
        Mapping::new(len).ok().map(Self)
    }

    /// Where the elements `offset .. offset + count` lie.
    ///
    /// # Panics
    /// If the range does not end within the buffer.
    pub(super) fn at<E>(&self, offset: usize, count: usize) -> *mut E {
        let size = size_of::<E>();
        assert!(align_of::<E>() <= ALIGN && (offset + count) * size <= self.0.len());
        // SAFETY: the assertion bounds the result to the mapping.
        unsafe { self.0.base().add(offset * size).cast() }
    }

    pub(super) fn addresses(&self) -> Range<usize> {
        self.0.range()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_bounded() {
        let buffer = Buffer::zeroed(1000).unwrap();
        let at: *mut u32 = buffer.at(0, 250);
        assert_eq!(at as usize % ALIGN, 0);
        // SAFETY: 250 elements are in bounds and nobody writes.
        assert!(unsafe { std::slice::from_raw_parts(at, 250) }.iter().all(|&x| x == 0));
        assert!(std::panic::catch_unwind(|| buffer.at::<u32>(1, 250)).is_err());
        assert!(Buffer::zeroed(usize::MAX).is_none());
    }
}
