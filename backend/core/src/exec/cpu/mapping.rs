//! Zeroed memory straight from the system, whole pages of it, given back when it is dropped.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};

pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Memory that takes room as its pages are first written. Who reads and writes it, and when, is the owner's affair.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// What was mapped to find `base` in it.
    whole: *mut libc::c_void,
    whole_len: usize,
}

// SAFETY: the memory is owned and not bound to a thread, and every access to it is through raw pointers whose users
// answer for the absence of data races.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// For what is written little by little.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        Self::aligned(len, 1)
    }

    /// For what is read all the time: on huge pages where the system grants them.
    pub(super) fn huge(len: usize) -> io::Result<Self> {
        let len = len.checked_next_multiple_of(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self::aligned(len, HUGE_PAGE)?;
        // SAFETY: the range lies in the mapping just made. Advice only: refusal leaves small pages.
        #[cfg(all(target_os = "linux", not(miri)))]
        unsafe {
            libc::madvise(mapping.base.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
        }
        Ok(mapping)
    }

    /// At a multiple of `alignment`; of whole pages in any case.
    fn aligned(len: usize, alignment: usize) -> io::Result<Self> {
        let len = len.max(1);
        let whole_len = len.checked_add(alignment - 1).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: an anonymous mapping at an address of the system's choice touches nothing of ours.
        let whole = unsafe {
            libc::mmap(
                ptr::null_mut(),
                whole_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if whole == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = whole.cast::<u8>();
        let base = NonNull::new(start.wrapping_add(start.align_offset(alignment)));
        let base = base.expect("nothing is mapped at 0");
        Ok(Self { base, len, whole, whole_len })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Usable bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn range(&self) -> Range<usize> {
        let start = self.base.as_ptr() as usize;
        start..start + self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it once its owner is dropped.
        unsafe {
            libc::munmap(self.whole, self.whole_len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_zeroed_and_aligned() {
        for (mapping, alignment) in
            [(Mapping::new(1000).unwrap(), 4096), (Mapping::huge(1000).unwrap(), HUGE_PAGE)]
        {
            assert_eq!(mapping.base() as usize % alignment, 0);
            // SAFETY: that many bytes are mapped, and nobody writes them.
            let bytes = unsafe { std::slice::from_raw_parts(mapping.base(), mapping.len()) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            assert_eq!(mapping.range().len(), mapping.len());
        }
        assert_eq!(Mapping::huge(1000).unwrap().len(), HUGE_PAGE);
    }

    #[test]
    fn an_absurd_length_is_an_error() {
        for len in [1 << 60, usize::MAX] {
            assert!(Mapping::new(len).is_err() && Mapping::huge(len).is_err());
        }
    }
}
