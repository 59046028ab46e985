//! Kernels of which each begins before the one before it has ended give the bits of kernels in turn.

use crate::chain::{Chain, Size};
use crate::run::Arch;
use spec_emu::Schedule;
use spec_kernels::{Epilogue, Format};

/// Embedding, gates, their sum into the residual, logits.
fn layer(weight: Format, arch: Arch, capacity: usize) -> Chain {
    let size = Size { weight, hidden: 192, capacity, num_rows: capacity - 3, grid: 5, arch };
    let mut chain = Chain::new(size);
    let residual = chain.residual;
    let activated = chain.product((Epilogue::SwiGlu, 384), Some(residual), None);
    chain.product((Epilogue::Residual, 192), Some(activated), Some(residual));
    chain.product((Epilogue::Head, 130), Some(residual), None);
    chain
}

#[test]
fn kernels_that_overlap_give_the_bits_of_kernels_in_turn() {
    let kinds = [(Arch::Hopper, 8), (Arch::Hopper, 64), (Arch::Ampere, 8), (Arch::Blackwell, 8)];
    for (weight, (arch, capacity)) in
        [Format::Fp8, Format::Fp16].into_iter().flat_map(|weight| kinds.map(|kind| (weight, kind)))
    {
        let chain = layer(weight, arch, capacity);
        spec_emu::run(&chain.launches(false), &Schedule::PLAIN).unwrap();
        let expected = chain.bits();
        for seed in 0..10 {
            let chain = layer(weight, arch, capacity);
            spec_emu::run(&chain.launches(true), &Schedule::seeded(seed)).unwrap();
            assert!(chain.bits() == expected, "{weight:?} {arch:?} {capacity} seed {seed}");
        }
    }
}
