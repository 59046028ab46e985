//! Weights that are fetched before a kernel comes to them: which, how far ahead, and into which cache. Only hints, so no
//! result depends on them.
#![allow(unsafe_code)]

use crate::model::panel::{GROUP_BYTES, PANEL};
use std::sync::OnceLock;

/// How far ahead of the reads a pass that reads straight through fetches, in bytes: the processor's own prefetcher stops at
/// the end of a page.
const AHEAD_BYTES: usize = 8 << 10;
pub(super) const LINE_BYTES: usize = 64;
/// Cache lines of a group.
const GROUP_LINES: usize = GROUP_BYTES / LINE_BYTES;

/// The cache that is fetched into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cache {
    First,
    Second,
}

impl Cache {
    /// The one that serves this machine best. Processors of AMD before Zen 5 have no more than 24 lines under way to the
    /// first cache; fetched early, lines hold these places for as long as memory takes, and reads wait for one.
    pub(super) fn of_machine() -> Self {
        static CACHE: OnceLock<Cache> = OnceLock::new();
        *CACHE.get_or_init(|| match processor() {
            Some((vendor, 0x17..=0x19)) if &vendor == b"AuthenticAMD" => Cache::Second,
            _ => Cache::First,
        })
    }
}

/// Vendor and family as the processor tells them.
#[cfg(target_arch = "x86_64")]
fn processor() -> Option<([u8; 12], u32)> {
    use std::arch::x86_64::__cpuid;
    let name = __cpuid(0);
    let mut vendor = [0; 12];
    for (part, word) in vendor.chunks_exact_mut(4).zip([name.ebx, name.edx, name.ecx]) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    let signature = __cpuid(1).eax;
    let (base, extended) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
    Some((vendor, if base == 0xf { base + extended } else { base }))
}

#[cfg(not(target_arch = "x86_64"))]
fn processor() -> Option<([u8; 12], u32)> {
    None
}

/// What a tile fetches meanwhile: with every unit as many bytes from `start`, and `step` bytes on.
#[derive(Clone, Copy)]
pub(super) struct Fetch {
    start: *const u8,
    step: usize,
    /// Where none is, nothing is fetched.
    into: Option<Cache>,
}

impl Fetch {
    /// Fetches the line `offset` bytes from where the unit's begin.
    #[inline(always)]
    pub(super) fn line(&self, unit: usize, offset: usize) {
        let line = self.start.wrapping_add(unit * self.step + offset);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch may be of any address.
            unsafe {
                match self.into {
                    None => {}
                    Some(Cache::First) => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
                    Some(Cache::Second) => _mm_prefetch::<_MM_HINT_T1>(line.cast()),
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (line, self.into);
    }

    /// The share of one of `strips` strips that pass the `units` one after the other. Each has a piece of its own to fetch
    /// line by line: with some lines of every unit each, memory was read with gaps, and five rows of bfloat16 took 1.5 times
    /// one row on a Zen 3 instead of 1.1.
    pub(super) fn strip(&self, strip: usize, strips: usize, units: usize) -> Self {
        let step = self.step / strips;
        Self { start: self.start.wrapping_add(strip * units * step), step, into: self.into }
    }

    /// What a strip of `V` vectors of `len` outputs fetches with a group, `offset` bytes from where the unit's begin: the
    /// group's four lines are shared out among the strips.
    #[inline(always)]
    pub(super) fn share<const V: usize>(
        &self,
        unit: usize,
        offset: usize,
        strip: usize,
        len: usize,
    ) {
        let share = GROUP_LINES * V * len / PANEL;
        for line in 0..share {
            self.line(unit, offset + 64 * (strip * share + line));
        }
        if share == 0 && strip < GROUP_LINES {
            self.line(unit, offset + 64 * strip);
        }
    }
}

/// What to fetch while a chunk is worked on, for each of its tiles a part. Past the end of a panel lies the next, which is
/// this thread's next task.
pub(super) struct Ahead {
    start: *const u8,
    bytes: usize,
    units: usize,
    step: usize,
    into: Option<Cache>,
}

impl Ahead {
    /// What the one tile, which reads the chunk once, comes to soon.
    pub(super) fn of_a_pass(cache: Cache, chunk: &[u8], unit_bytes: usize) -> Self {
        let start = chunk.as_ptr().wrapping_add(AHEAD_BYTES);
        let units = chunk.len() / unit_bytes;
        Self { start, bytes: chunk.len(), units, step: unit_bytes, into: Some(cache) }
    }

    /// Nothing: the processor's own prefetcher does better.
    pub(super) fn nothing() -> Self {
        Self { start: std::ptr::null(), bytes: 0, units: 0, step: 0, into: None }
    }

    /// The bytes that follow the chunk, as many, each tile a part.
    pub(super) fn of_the_next(cache: Cache, chunk: &[u8], units: usize, num_tiles: usize) -> Self {
        let step = chunk.len().div_ceil(units * num_tiles).next_multiple_of(64);
        Self { start: chunk.as_ptr_range().end, bytes: chunk.len(), units, step, into: Some(cache) }
    }

    /// The share of a tile.
    pub(super) fn part(&self, tile_idx: usize) -> Fetch {
        let offset = (tile_idx * self.units * self.step).min(self.bytes);
        Fetch { start: self.start.wrapping_add(offset), step: self.step, into: self.into }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_the_one_that_the_system_names() {
        let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else { return };
        let (vendor, family) = processor().unwrap();
        let of = |key: &str| {
            let line = text.lines().find(|line| line.starts_with(key))?;
            Some(line.split_once(": ")?.1.to_owned())
        };
        assert_eq!(of("vendor_id").as_deref().map(str::as_bytes), Some(&vendor[..]));
        assert_eq!(of("cpu family"), Some(family.to_string()));
    }
}
