//! One anonymous mapping for all weights of a model, on huge pages where the system grants them: a mapped
//! file comes in 4 KiB pages, and reading weights through them costs a third of the bandwidth.
//! Bytes are written once, in order, and are read-only from then on.
#![allow(unsafe_code)]

use super::Pool;
use super::mapping::{HUGE_PAGE, Mapping};
use super::pool::SyncPtr;
use crate::{Error, Result};
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

/// Start of every slice: a multiple of this, so that vector loads do not cross cache lines.
const ALIGN: usize = 256;
/// Bytes that one task writes: a huge page, which is faulted in by one thread and lies near to where that thread runs.
/// The part of a section that workers of a node write is, up to whole pages, the part of a product that they compute.
const PIECE: usize = HUGE_PAGE;

/// Memory to be filled front to back: bytes that a slice covers are never written again, and those not yet covered are
/// reached only through `&mut Arena`.
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

impl Arena {
    /// Room that a section of `bytes` takes.
    pub(crate) fn room(bytes: usize) -> usize {
        bytes.next_multiple_of(ALIGN)
    }

    /// Reserves `bytes`, the sum of `Arena::room` over what will be pushed.
    pub fn new(bytes: usize) -> Result<Self> {
        let mapping = Mapping::huge(bytes).map_err(|cause| {
            Error::Capacity(format!("no memory for {bytes} bytes of weights: {cause}"))
        })?;
        Ok(Self { mapping: Arc::new(mapping), used: 0 })
    }

    /// Addresses of all that is reserved.
    pub(crate) fn addresses(&self) -> Range<usize> {
        self.mapping.range()
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
    pub(crate) fn fill(
        &mut self,
        pool: &Pool,
        len: usize,
        write: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<ArenaSlice> {
        let offset = self.used;
        let room = self.mapping.len() - offset;
        assert!(len <= room, "section of {len} bytes, {room} left in the arena");
        // The first page may have other sections ahead of this one.
        let lead = offset % PIECE;
        let base = SyncPtr(self.mapping.base());
        let failure = OnceLock::new();
        let num_pieces = if len == 0 { 0 } else { (lead + len).div_ceil(PIECE) };
        pool.for_each_near(num_pieces, |idx| {
            let start = (idx * PIECE).max(lead) - lead;
            let end = ((idx + 1) * PIECE - lead).min(len);
            // SAFETY: inside of the mapping, where no slice covers it, as `self` is borrowed mutably; each `idx` is
            // handed out once, and its piece overlaps no other.
            let piece = unsafe {
                std::slice::from_raw_parts_mut(base.get().add(offset + start), end - start)
            };
            if failure.get().is_none()
                && let Err(error) = write(start, piece)
            {
                // Another thread may have failed first.
                let _ = failure.set(error);
            }
        });
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        self.used = (offset + Self::room(len)).min(self.mapping.len());
        Ok(ArenaSlice { mapping: Arc::clone(&self.mapping), offset, len })
    }
}

impl Deref for ArenaSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `fill` checked the range and had it written before it made this slice.
        unsafe { std::slice::from_raw_parts(self.mapping.base().add(self.offset), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

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
    fn a_huge_page_is_written_by_one_task_of_a_section() {
        let pool = Pool::new(2);
        let mut arena = Arena::new(8 * PIECE).unwrap();
        arena.push(&pool, &[1; 3 * ALIGN]);
        let pieces = Mutex::new(Vec::new());
        let len = 4 * PIECE + 5;
        let written = arena.fill(&pool, len, |offset, piece| {
            pieces.lock().unwrap().push(offset..offset + piece.len());
            piece.fill(7);
            Ok(())
        });
        assert!(written.unwrap().iter().all(|&byte| byte == 7));
        let mut pieces = pieces.into_inner().unwrap();
        pieces.sort_by_key(|piece| piece.start);
        let ends: Vec<usize> = pieces.iter().map(|piece| piece.end).collect();
        let at = |page: usize| page * PIECE - 3 * ALIGN;
        assert_eq!(ends, [at(1), at(2), at(3), at(4), len]);
        assert!(pieces.windows(2).all(|two| two[0].end == two[1].start) && pieces[0].start == 0);
        assert!(arena.push(&pool, &[]).is_empty());
    }

    #[test]
    fn an_absurd_size_is_an_error() {
        assert!(matches!(Arena::new(1 << 60), Err(Error::Capacity(_))));
    }
}
