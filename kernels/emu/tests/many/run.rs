//! Launches of the kernels, and numbers in device memory.

use spec_core::testing::cuda::device::{Pod, bytes_of};
use spec_core::testing::cuda::model::{OPERAND_SHARED_BYTES, ROW_THREADS};
use spec_emu::{Arena, Launch, Schedule, launch};
use spec_kernels::Variant;

/// What memory holds that a kernel must not touch.
pub(crate) const UNTOUCHED: u8 = 0xa5;

/// Runs a kernel on some blocks.
pub(crate) fn run<P: Pod>(variant: &Variant, grid: u32, params: P, seed: u64) {
    let (variant, params) = (variant.to_string(), [params]);
    let launched = Launch {
        variant: &variant,
        grid,
        block: ROW_THREADS,
        shared_bytes: OPERAND_SHARED_BYTES,
        params: bytes_of(&params),
        ..Launch::default()
    };
    launch(&launched, &Schedule::seeded(seed)).unwrap_or_else(|error| panic!("{variant}: {error}"));
}

pub(crate) fn put(arena: &Arena, values: &[f32]) -> u64 {
    arena.put(bytes_of(values))
}

pub(crate) fn read(arena: &Arena, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    arena.read(address, &mut bytes);
    bytes
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect()
}
