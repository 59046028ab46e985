//! One launch on both: from its text, and on the emulator.

use spec_emu::{Arena, Schedule};

use crate::cluster;
use crate::device::Kernels;
use crate::memory::Memory;

/// Runs a launch on a copy of an arena's memory, in an order of a seed, then on the emulator; afterwards every allocation
/// must be the same but for a workspace. The error says what is not.
pub fn compare(
    kernels: &Kernels,
    arena: &Arena,
    launch: &spec_emu::Launch<'_>,
    seed: u64,
    workspace: Option<u64>,
) -> Result<(), String> {
    let read = |address, len| {
        let mut bytes = vec![0; len];
        arena.read(address, &mut bytes);
        bytes
    };
    let mut memory = Memory::default();
    for (address, len) in arena.allocations() {
        memory.put(address, read(address, len));
    }
    let spec_emu::Launch { variant, grid, block, shared_bytes, params, .. } = *launch;
    let kernel = kernels.get(variant.split('@').next().unwrap_or(variant))?;
    let own = cluster::Launch { grid, block, shared_bytes, params, seed };
    cluster::run(&kernel, &own, &mut memory).map_err(|e| format!("{variant}: {e}"))?;
    spec_emu::launch(launch, &Schedule::PLAIN)?;
    for (place, (address, found)) in memory.contents().enumerate() {
        let expected = read(address, found.len());
        if let (Some(difference), true) = (difference(found, &expected), Some(address) != workspace)
        {
            return Err(format!("{variant}, {grid} blocks: allocation {place}: {difference}"));
        }
    }
    Ok(())
}

/// The word that arithmetic in the text gives where there is no number.
const NO_NUMBER: [u8; 4] = 0x7fff_ffff_u32.to_le_bytes();

/// The first word that differs, if there is one, and how many do. A GPU writes one word for what is no number; a CPU writes
/// whatever it was given.
pub(crate) fn difference(found: &[u8], expected: &[u8]) -> Option<String> {
    if found == expected {
        return None;
    }
    let is_nan = |word: &[u8]| word.try_into().is_ok_and(|four| f32::from_le_bytes(four).is_nan());
    let words = || found.chunks(4).zip(expected.chunks(4)).enumerate();
    let differs = |(_, (a, b)): &(usize, (&[u8], &[u8]))| a != b && !(*a == NO_NUMBER && is_nan(b));
    let (first, (a, b)) = words().find(differs)?;
    let (num, of) = (words().filter(differs).count(), found.len().div_ceil(4));
    Some(format!("{num} of {of} words, from {first} on: {a:02x?}, in the emulator {b:02x?}"))
}
