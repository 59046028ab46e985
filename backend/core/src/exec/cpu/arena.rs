//! One anonymous mapping for all weights of a model, on huge pages where the system grants them: a mapped
//! file comes in 4 KiB pages, and reading weights through them costs a third of the bandwidth.
//! Bytes are written once, in order, and are read-only from then on.
#![allow(unsafe_code)]

use super::Pool;
use crate::{Error, Result};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// Start of every slice: a multiple of this, so that vector loads do not cross cache lines.
const ALIGN: usize = 256;
const HUGE_PAGE: usize = 2 << 20;
/// Bytes that one task writes: whole huge pages, so that a page is faulted in by one thread.
const PIECE: usize = HUGE_PAGE;

/// Memory to be filled front to back.
pub struct Arena {
    mapping: Arc<Mapping>,
    used: usize,
}

/// Bytes in an arena. Keeps the arena alive.
#[derive(Clone)]
pub struct ArenaSlice {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

struct Mapping {
    /// At a huge page.
    base: NonNull<u8>,
    bytes: usize,
    /// What was mapped to find such a place in it.
    whole: *mut libc::c_void,
}

// SAFETY: bytes that a slice covers are never written again, and bytes not yet covered are reached only
// through `&mut Arena`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Arena {
    /// Room that a section of `bytes` takes.
    pub fn room(bytes: usize) -> usize {
        bytes.next_multiple_of(ALIGN)
    }

    /// Reserves `bytes`, the sum of [`Arena::room`] over what will be pushed.
    pub fn new(bytes: usize) -> Result<Self> {
        Ok(Self { mapping: Arc::new(Mapping::new(bytes)?), used: 0 })
    }

    /// Copies `bytes` in, all threads helping. Panics when they do not fit.
    pub fn push(&mut self, pool: &Pool, bytes: &[u8]) -> ArenaSlice {
        let copied = self.fill(pool, bytes.len(), |offset, piece| {
            piece.copy_from_slice(&bytes[offset..][..piece.len()]);
            Ok(())
        });
        copied.expect("copying does not fail")
    }

    /// Has `write` write `len` bytes, piece by piece on all threads: it gets a piece's offset and its memory. Of
    /// several failures one is returned; the room is free again then. Panics when they do not fit.
    pub fn fill(
        &mut self,
        pool: &Pool,
        len: usize,
        write: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<ArenaSlice> {
        let offset = self.used;
        let room = self.mapping.bytes - offset;
        assert!(len <= room, "section of {len} bytes, {room} left in the arena");
        // SAFETY: the range is inside the mapping, no slice covers it, and `self` is borrowed mutably.
        let target =
            unsafe { std::slice::from_raw_parts_mut(self.mapping.base.as_ptr().add(offset), len) };
        let failure = OnceLock::new();
        pool.for_each_chunk(target, PIECE, |idx, piece| {
            if failure.get().is_none()
                && let Err(error) = write(idx * PIECE, piece)
            {
                // Another thread may have failed first.
                let _ = failure.set(error);
            }
        });
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        self.used = (offset + Self::room(len)).min(self.mapping.bytes);
        Ok(ArenaSlice { mapping: Arc::clone(&self.mapping), offset, len })
    }
}

impl Deref for ArenaSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `fill` checked the range and had it written before it made this slice.
        unsafe { std::slice::from_raw_parts(self.mapping.base.as_ptr().add(self.offset), self.len) }
    }
}

impl Mapping {
    fn new(bytes: usize) -> Result<Self> {
        let failed = || {
            let cause = std::io::Error::last_os_error();
            Error::Capacity(format!("no memory for {bytes} bytes of weights: {cause}"))
        };
        let bytes = bytes.max(1).next_multiple_of(HUGE_PAGE);
        // SAFETY: an anonymous mapping at an address of the system's choice touches nothing of ours.
        let whole = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes + HUGE_PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if whole == libc::MAP_FAILED {
            return Err(failed());
        }
        let start = whole.cast::<u8>();
        let base = start.wrapping_add(start.align_offset(HUGE_PAGE));
        let base = NonNull::new(base).ok_or_else(failed)?;
        // SAFETY: the range lies in the mapping just made. Advice only: refusal leaves small pages.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        }
        Ok(Self { base, bytes, whole })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it once the last handle is dropped.
        unsafe {
            libc::munmap(self.whole, self.bytes + HUGE_PAGE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_come_back_as_they_were_and_aligned() {
        let pool = Pool::new(2);
        let sections = [vec![1_u8; 5], vec![2; 3 * PIECE + 17], vec![], vec![3; 256]];
        let total = sections.iter().map(|s| Arena::room(s.len())).sum();
        let mut arena = Arena::new(total).unwrap();
        let slices: Vec<_> = sections.iter().map(|s| arena.push(&pool, s)).collect();
        drop(arena);
        for (slice, section) in slices.iter().zip(&sections) {
            assert!(**slice == **section);
            assert_eq!(slice.as_ptr() as usize % ALIGN, 0);
        }
    }

    #[test]
    #[should_panic(expected = "left in the arena")]
    fn a_section_that_does_not_fit_is_refused() {
        Arena::new(100).unwrap().push(&Pool::new(1), &vec![0; HUGE_PAGE + 1]);
    }

    #[test]
    fn a_piece_that_cannot_be_had_is_an_error_and_leaves_the_room() {
        let pool = Pool::new(2);
        let mut arena = Arena::new(4 * PIECE).unwrap();
        let broken = arena.fill(&pool, 4 * PIECE, |offset, _| match offset / PIECE {
            2 => Err(Error::Device("gone".into())),
            _ => Ok(()),
        });
        assert_eq!(broken.err().unwrap().to_string(), "device: gone");
        assert!(*arena.push(&pool, &[7; 3 * PIECE]) == [7; 3 * PIECE]);
    }

    #[test]
    fn an_absurd_size_is_an_error() {
        assert!(matches!(Arena::new(1 << 60), Err(Error::Capacity(_))));
    }
}
