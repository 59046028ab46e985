//! Each thing that keeps the product's threads in order is needed: without it the results are wrong, the
//! machine stops the kernel, or the race detector finds a race. With all of them there is none.

use crate::chain::{Chain, Size};
use crate::mutant::{Found, Setup};
use crate::run::Arch;
use spec_emu::{Options, Program, Schedule};
use spec_kernels::{Epilogue, Format};

/// Whose code is broken, and the rows that it is compiled for and runs with.
#[derive(Clone, Copy, Debug)]
struct Kind {
    arch: Arch,
    capacity: usize,
    num_rows: usize,
}

/// A segment fits in the shared memory of sm_80 with 16 rows, but not with 32.
const AMPERE: Kind = Kind { arch: Arch::Ampere, capacity: 32, num_rows: 3 };
const BLACKWELL: Kind = Kind { arch: Arch::Blackwell, capacity: 16, num_rows: 3 };
const HOPPER: Kind = Kind { arch: Arch::Hopper, capacity: 16, num_rows: 3 };
/// With rows that two warps copy.
const STREAMED: Kind = Kind { arch: Arch::Hopper, capacity: 64, num_rows: 35 };
/// With rows that a thread asks for, of two units.
const MANY: Kind = Kind { arch: Arch::Hopper, capacity: 128, num_rows: 67 };
/// With sums that take the registers of others, who are as many warps as those that multiply one tile.
const MOST: Kind = Kind { arch: Arch::Hopper, capacity: 320, num_rows: 195 };

fn chain(setup: Setup, kind: Kind) -> Chain {
    let Kind { arch, capacity, num_rows } = kind;
    let (hidden, grid) = match setup {
        Setup::Short => (1024, 3),
        Setup::Long => (2560, 5),
        Setup::Sum => (192, 5),
        Setup::Head => (2560, 3),
    };
    // Two blocks are a cluster: with the same units of k in all but the long one, where the first one's parts are shared too.
    let grid = match setup {
        _ if capacity <= 64 => grid,
        Setup::Short | Setup::Long | Setup::Sum => 4,
        Setup::Head => 2,
    };
    let weight = Format::Fp8;
    let mut chain = Chain::new(Size { weight, hidden, capacity, num_rows, grid, arch });
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

fn expected(setup: Setup, kind: Kind) -> Vec<u8> {
    let chain = chain(setup, kind);
    spec_emu::run(&chain.launches(false), &Schedule::PLAIN).unwrap();
    chain.bits()
}

fn build(setup: Setup, kind: Kind, options: &Options<'_>) -> Program {
    let chain = chain(setup, kind);
    let mut variants = chain.variants();
    variants.sort_unstable();
    variants.dedup();
    Program::build(&variants, options).unwrap()
}

/// What the first of some schedules finds.
fn find(program: &Program, setup: Setup, kind: Kind, seeds: u64) -> Option<(Found, String)> {
    let expected = expected(setup, kind);
    (0..seeds).find_map(|seed| {
        let chain = chain(setup, kind);
        match program.run(&chain.arena, &chain.launches(true), &Schedule::seeded(seed)) {
            Ok(()) if chain.bits() == expected => None,
            Ok(()) => Some((Found::Wrong, format!("other results with seed {seed}"))),
            Err(message) if message.starts_with("race:") => Some((Found::Race, message)),
            Err(message) => Some((Found::Stopped, message)),
        }
    })
}

fn assert_no_race(kind: Kind) {
    let options = Options { races: true, mutation: None };
    for setup in [Setup::Short, Setup::Long, Setup::Sum, Setup::Head] {
        let found = find(&build(setup, kind, &options), setup, kind, 2);
        assert_eq!(found, None, "{setup:?}, {kind:?}");
    }
}

#[test]
fn the_kernel_of_ampere_has_no_race() {
    assert_no_race(AMPERE);
}

#[test]
fn the_kernel_of_blackwell_has_no_race() {
    assert_no_race(BLACKWELL);
}

#[test]
fn the_kernel_of_hopper_has_no_race() {
    assert_no_race(HOPPER);
}

#[test]
fn the_kernel_with_rows_that_stream_in_has_no_race() {
    assert_no_race(STREAMED);
}

#[test]
fn the_kernel_with_rows_that_are_asked_for_has_no_race() {
    assert_no_race(MANY);
}

/// What a change of the kernels or of the emulator alone can break: `scripts/check-kernels` runs it.
mod exhaustive {
    use super::{AMPERE, BLACKWELL, HOPPER, Kind, MANY, MOST, STREAMED, build, find};
    use crate::mutant::{
        AMPERE_MUTANTS, BLACKWELL_MUTANTS, Found, HOPPER_MUTANTS, MANY_MUTANTS, MOST_MUTANTS,
        Mutant, STREAM_MUTANTS,
    };
    use spec_emu::{Mutation, Options};

    fn all_are_found(mutants: &[Mutant], kind: Kind, by: impl Fn(Found) -> bool) {
        for mutant in mutants.iter().filter(|mutant| by(mutant.found)) {
            let Mutant { name, setup, file, text, replacement, .. } = *mutant;
            let races = mutant.found == Found::Race;
            let mutation = Some(Mutation { file, text, replacement });
            let program = build(setup, kind, &Options { races, mutation });
            let found = find(&program, setup, kind, if races { 3 } else { 30 });
            let way = found.as_ref().map(|(way, _)| *way);
            assert_eq!(way, Some(mutant.found), "{name}: {found:?}");
        }
    }

    #[test]
    fn what_keeps_results_right_is_needed() {
        all_are_found(&BLACKWELL_MUTANTS, BLACKWELL, |found| found != Found::Race);
    }

    #[test]
    fn what_orders_memory_is_needed() {
        all_are_found(&BLACKWELL_MUTANTS, BLACKWELL, |found| found == Found::Race);
    }

    #[test]
    fn what_orders_copies_and_chunks_is_needed() {
        all_are_found(&AMPERE_MUTANTS, AMPERE, |_| true);
    }

    #[test]
    fn what_keeps_results_of_warpgroups_right_is_needed() {
        all_are_found(&HOPPER_MUTANTS, HOPPER, |found| found != Found::Race);
    }

    #[test]
    fn what_orders_memory_for_warpgroups_is_needed() {
        all_are_found(&HOPPER_MUTANTS, HOPPER, |found| found == Found::Race);
    }

    #[test]
    fn what_rows_that_stream_in_need_is_needed() {
        all_are_found(&STREAM_MUTANTS, STREAMED, |_| true);
    }

    #[test]
    fn what_rows_that_are_asked_for_need_is_needed() {
        all_are_found(&MANY_MUTANTS, MANY, |_| true);
    }

    #[test]
    fn what_most_rows_need_is_needed() {
        all_are_found(&MOST_MUTANTS, MOST, |_| true);
    }
}
