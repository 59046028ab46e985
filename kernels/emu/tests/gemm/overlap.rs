//! Kernels of which each begins before the one before it has ended give the bits of kernels in turn.

use crate::chain::{Chain, Size};
use spec_emu::Schedule;
use spec_kernels::{Epilogue, Format};

/// Embedding, gates, their sum into the residual, logits.
fn layer(weight: Format) -> Chain {
    let size = Size { weight, hidden: 192, capacity: 8, num_rows: 5, grid: 5, is_old: false };
    let mut chain = Chain::new(size);
    let residual = chain.residual;
    let activated = chain.product((Epilogue::SwiGlu, 384), Some(residual), None);
    chain.product((Epilogue::Residual, 192), Some(activated), Some(residual));
    chain.product((Epilogue::Head, 130), Some(residual), None);
    chain
}

#[test]
fn kernels_that_overlap_give_the_bits_of_kernels_in_turn() {
    for weight in [Format::Fp8, Format::Fp16] {
        let chain = layer(weight);
        spec_emu::run(&chain.launches(false), &Schedule::PLAIN).unwrap();
        let expected = chain.bits();
        for seed in 0..20 {
            let chain = layer(weight);
            spec_emu::run(&chain.launches(true), &Schedule::seeded(seed)).unwrap();
            assert!(chain.bits() == expected, "{weight:?} seed {seed}");
        }
    }
}
