//! An instance's memory, as it is reported to Triton.

use spec_core::runtime::{Memory, MemoryType};

/// Bytes of each memory that go with an instance. Weights that it shares are reported by the instance that loaded them.
pub(crate) fn reported(memory: &Memory) -> Vec<(triton_backend::Memory, usize)> {
    let first = memory.weights.iter().filter(|copy| copy.is_first);
    let weights = first.map(|copy| (copy.memory, copy.bytes));
    let mut sums: Vec<(triton_backend::Memory, usize)> = Vec::new();
    for (of, bytes) in memory.own.iter().copied().chain(weights) {
        let of = match of {
            MemoryType::Cpu => triton_backend::Memory::Cpu,
            MemoryType::Pinned => triton_backend::Memory::Pinned,
            MemoryType::Gpu(number) => triton_backend::Memory::Gpu(number as i64),
        };
        match sums.iter_mut().find(|(other, _)| *other == of) {
            Some((_, sum)) => *sum += bytes,
            None => sums.push((of, bytes)),
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec_core::runtime::WeightCopy;

    #[test]
    fn each_memory_is_reported_once_and_shared_weights_by_who_loaded_them() {
        let copy = |memory, bytes, is_first| WeightCopy { number: 0, memory, bytes, is_first };
        let memory = Memory {
            own: vec![(MemoryType::Cpu, 1), (MemoryType::Gpu(2), 10), (MemoryType::Pinned, 100)],
            weights: vec![
                copy(MemoryType::Gpu(2), 1000, true),
                copy(MemoryType::Gpu(3), 10_000, true),
                copy(MemoryType::Cpu, 100_000, false),
            ],
        };
        let expected = [
            (triton_backend::Memory::Cpu, 1),
            (triton_backend::Memory::Gpu(2), 1010),
            (triton_backend::Memory::Pinned, 100),
            (triton_backend::Memory::Gpu(3), 10_000),
        ];
        assert_eq!(reported(&memory), expected);
    }
}
