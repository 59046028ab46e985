//! Numbers in device memory and in params.

use spec_emu::Arena;

pub(crate) fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn read_words(arena: &Arena, address: u64, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; count * 4];
    arena.read(address, &mut bytes);
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}
