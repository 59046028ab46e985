//! Zeroed memory that many threads may write to, at addresses that are multiples of 64.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// A cache line, and the widest vector.
const ALIGN: usize = 64;

/// Bytes behind a raw pointer: who reads and writes which of them, and when, is the owner's affair.
pub(super) struct Buffer {
    memory: NonNull<u8>,
    layout: Layout,
    /// Of the first multiple of [`ALIGN`] in the memory.
    start: usize,
    len: usize,
}

// SAFETY: the memory is owned, and every access to it is through raw pointers whose users answer for
// the absence of data races.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `None` where there is no such amount of memory.
    pub(super) fn zeroed(len: usize) -> Option<Self> {
        // The system hands out zeroed memory without touching it only when it is asked for a small
        // alignment, so the first multiple of `ALIGN` is looked for here.
        let layout = Layout::from_size_align(len.checked_add(ALIGN)?, 16).ok()?;
        // SAFETY: the size is at least `ALIGN`.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let start = memory.as_ptr().align_offset(ALIGN);
        Some(Self { memory, layout, start, len })
    }

    /// Where the elements `offset .. offset + count` lie.
    ///
    /// # Panics
    /// If the range does not end within the buffer.
    pub(super) fn at<E>(&self, offset: usize, count: usize) -> *mut E {
        let size = size_of::<E>();
        assert!(align_of::<E>() <= ALIGN && (offset + count) * size <= self.len);
        // SAFETY: `start` is less than `ALIGN` and the assertion bounds the rest: the result stays in
        // the allocation of `ALIGN + len` bytes.
        unsafe { self.memory.as_ptr().add(self.start + offset * size).cast() }
    }

    /// Usable bytes.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, and freed here only.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
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
