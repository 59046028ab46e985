//! Which part of a range of memory has been touched.
#![allow(unsafe_code)]

use std::ops::Range;

/// Pages asked about at a time.
const BATCH: usize = 64 << 10;

/// Bytes of the pages in a range of addresses that are in memory; 0 where the system does not say. Nothing need be
/// mapped there.
pub(crate) fn resident_bytes(range: Range<usize>) -> usize {
    // SAFETY: takes a number and gives one.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let (first, end) = (range.start / page, range.end.div_ceil(page));
    let mut flags = [0_u8; BATCH];
    let mut num_resident = 0;
    for start in (first..end).step_by(BATCH) {
        let count = BATCH.min(end - start);
        // SAFETY: the call reads nothing at the addresses, and writes a byte a page, of which there are `BATCH`.
        let status = unsafe {
            libc::mincore((start * page) as *mut libc::c_void, count * page, flags.as_mut_ptr())
        };
        if status == 0 {
            num_resident += flags[..count].iter().filter(|&flag| flag & 1 == 1).count();
        }
    }
    num_resident * page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untouched_memory_is_not_resident_and_touched_memory_is() {
        const LEN: usize = 64 << 20;
        // Far above what an allocator takes from memory that it has: zeroes of the system, untouched.
        let mut memory = vec![0_u8; LEN];
        let start = memory.as_ptr() as usize;
        let range = start..start + LEN;
        assert!(resident_bytes(range.clone()) < LEN / 16, "{}", resident_bytes(range));
        memory[..LEN / 2].fill(1);
        let half = resident_bytes(start..start + LEN / 2);
        assert!((LEN / 2..LEN / 2 + (1 << 16)).contains(&half), "{half}");
        assert!(resident_bytes(start + LEN * 3 / 4..start + LEN) < LEN / 16);
        std::hint::black_box(memory);
    }

    #[test]
    fn where_nothing_is_mapped_nothing_is_resident() {
        assert_eq!(resident_bytes(4096..8192), 0);
    }
}
