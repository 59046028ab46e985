//! Each thing that keeps the product's threads in order is needed: without it the results are wrong, the
//! machine stops the kernel, or ThreadSanitizer finds a race. With all of them there is none.

use crate::chain::{Chain, Size};
use crate::mutant::{Found, MUTANTS, Mutant, OLD_MUTANTS, Setup};
use spec_emu::{Mutation, Options, Program, Schedule};
use spec_kernels::{Epilogue, Format};

fn chain(setup: Setup, is_old: bool) -> Chain {
    let (hidden, grid) = match setup {
        Setup::Short => (1024, 3),
        Setup::Long => (2560, 5),
        Setup::Sum => (192, 5),
        Setup::Head => (2560, 3),
    };
    let weight = Format::Fp8;
    // A segment fits in the shared memory of sm_80 with 16 rows, but not with 32.
    let capacity = if is_old { 32 } else { 16 };
    let mut chain = Chain::new(Size { weight, hidden, capacity, num_rows: 3, grid, is_old });
    let residual = chain.residual;
    let mut raw = |n| chain.product((Epilogue::Raw, n), Some(residual), None);
    match setup {
        Setup::Short => [256, 200].map(raw).into_iter().for_each(drop),
        Setup::Long => {
            raw(128);
            chain.product((Epilogue::Residual, 128), None, None);
        }
        Setup::Sum => {
            let activated = chain.product((Epilogue::SwiGlu, 384), Some(residual), None);
            chain.product((Epilogue::Residual, 192), Some(activated), Some(residual));
            chain.product((Epilogue::Raw, 130), Some(residual), None);
        }
        Setup::Head => _ = chain.product((Epilogue::Head, 200), Some(residual), None),
    }
    chain
}

fn expected(setup: Setup) -> Vec<u8> {
    let chain = chain(setup, false);
    spec_emu::run(&chain.launches(false), &Schedule::PLAIN).unwrap();
    chain.bits()
}

fn build(setup: Setup, is_old: bool, options: &Options<'_>) -> Program {
    let chain = chain(setup, is_old);
    let mut variants = chain.variants();
    variants.dedup();
    Program::build(&variants, options).unwrap()
}

/// What the first of some schedules finds.
fn find(program: &Program, setup: Setup, is_old: bool, seeds: u64) -> Option<(Found, String)> {
    let expected = expected(setup);
    (0..seeds).find_map(|seed| {
        let chain = chain(setup, is_old);
        match program.run(&chain.arena, &chain.launches(true), &Schedule::seeded(seed)) {
            Ok(()) if chain.bits() == expected => None,
            Ok(()) => Some((Found::Wrong, format!("other results with seed {seed}"))),
            Err(message) if message.starts_with("race:") => Some((Found::Race, message)),
            Err(message) => Some((Found::Stopped, message)),
        }
    })
}

fn all_are_found(mutants: &[Mutant], is_old: bool, by: impl Fn(Found) -> bool) {
    for mutant in mutants.iter().filter(|mutant| by(mutant.found)) {
        let Mutant { name, setup, file, text, replacement, .. } = *mutant;
        let tsan = mutant.found == Found::Race;
        let mutation = Some(Mutation { file, text, replacement });
        let program = build(setup, is_old, &Options { tsan, mutation });
        let found = find(&program, setup, is_old, if tsan { 3 } else { 30 });
        let kind = found.as_ref().map(|(kind, _)| *kind);
        assert_eq!(kind, Some(mutant.found), "{name}: {found:?}");
    }
}

#[test]
fn what_keeps_results_right_is_needed() {
    all_are_found(&MUTANTS, false, |found| found != Found::Race);
}

#[test]
fn what_orders_memory_is_needed() {
    all_are_found(&MUTANTS, false, |found| found == Found::Race);
}

#[test]
fn what_orders_copies_and_chunks_is_needed() {
    all_are_found(&OLD_MUTANTS, true, |_| true);
}

#[test]
fn the_kernels_as_they_are_have_no_race() {
    for is_old in [false, true] {
        let options = Options { tsan: true, mutation: None };
        for setup in [Setup::Short, Setup::Long, Setup::Sum, Setup::Head] {
            let found = find(&build(setup, is_old, &options), setup, is_old, 3);
            assert_eq!(found, None, "{setup:?}, old: {is_old}");
        }
    }
}
