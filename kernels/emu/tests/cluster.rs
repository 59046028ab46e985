//! Blocks of a cluster reach each other's shared memory under every schedule alike, and the machine says where they must not.

#![allow(clippy::unwrap_used)]

mod common;

use common::{longs, read_words, words};
use spec_emu::{Arena, Launch, Mutation, Options, Program, Schedule, run};

const CLUSTER: usize = 4;
const THREADS: usize = 64;
const ROUNDS: usize = 5;

/// What a kernel is told to do wrong, as in `cluster.cu`.
#[derive(Clone, Copy)]
enum Fault {
    None,
    EndsEarly,
    NoSuchRank,
}

/// Runs launches, in this process or in a program of its own.
type Runner<'a> = &'a dyn Fn(&Arena, &[Launch<'_>]) -> Result<(), String>;

/// Whether all blocks have added up what their cluster has sent: `Ok(false)` is a wrong sum.
fn relay(fault: Fault, grid: usize, max_resident: u32, run: Runner<'_>) -> Result<bool, String> {
    let arena = Arena::new(1 << 20);
    let num_parts = grid.div_ceil(CLUSTER) * ROUNDS * CLUSTER;
    let parts: Vec<u32> =
        (0..(num_parts * THREADS) as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let sums = arena.alloc(grid * THREADS * 4);
    let params =
        [longs(&[arena.put(&words(&parts)), sums]), words(&[ROUNDS as u32, fault as u32])].concat();
    let launch = Launch {
        variant: "cluster",
        grid: grid as u32,
        block: THREADS as u32,
        shared_bytes: (128 + CLUSTER * THREADS * 4) as u32,
        params: &params,
        max_resident,
        ..Launch::default()
    };
    run(&arena, &[launch])?;
    let expected: Vec<u32> = (0..grid * THREADS)
        .map(|i| {
            let (block, thread) = (i / THREADS, i % THREADS);
            let first = block / CLUSTER * ROUNDS * CLUSTER;
            let of_thread =
                (first..first + ROUNDS * CLUSTER).map(|part| parts[part * THREADS + thread]);
            of_thread
                .fold((block % CLUSTER) as u32, |sum, part| sum.wrapping_mul(3).wrapping_add(part))
        })
        .collect();
    Ok(read_words(&arena, sums, grid * THREADS) == expected)
}

#[test]
fn a_cluster_shares_what_its_blocks_send_under_every_schedule() {
    for seed in 0..60 {
        let schedule = Schedule::seeded(seed);
        // As many at once as they like, and fewer than three clusters of them.
        for max_resident in [0, 1, 7] {
            let right =
                relay(Fault::None, 12, max_resident, &|_, launches| run(launches, &schedule));
            assert_eq!(right, Ok(true), "seed {seed}, {max_resident} at once");
        }
    }
}

#[test]
fn what_a_cluster_must_not_do_is_said() {
    for (fault, grid, message) in [
        (Fault::None, 6, "launched with 6 blocks, which are no whole clusters of 4"),
        (Fault::NoSuchRank, 4, "the block of rank 4 of its cluster of 4 does not run"),
        // Its neighbours arrive at its barriers, or wait for it.
        (Fault::EndsEarly, 4, "the block of rank 0 of its cluster of 4 does not run"),
        (Fault::EndsEarly, 4, "threads wait for ever"),
    ] {
        let said: Vec<String> = (0..30)
            .filter_map(|seed| {
                let schedule = Schedule::seeded(seed);
                relay(fault, grid, 0, &|_, launches| run(launches, &schedule)).err()
            })
            .collect();
        assert!(said.iter().any(|said| said.contains(message)), "{said:?} do not say {message:?}");
    }
}

/// What the first of some schedules says of a kernel that is changed.
fn find(text: &str, replacement: &str) -> Option<String> {
    let mutation = Mutation { file: "cluster.cu", text, replacement };
    let options = Options { races: true, mutation: Some(mutation) };
    let program = Program::build(&["cluster"], &options).expect("builds");
    (0..6).find_map(|seed| {
        let schedule = Schedule::seeded(seed);
        let found =
            relay(Fault::None, 8, 0, &|arena, launches| program.run(arena, launches, &schedule));
        match found {
            Ok(true) => None,
            Ok(false) => Some("other sums".into()),
            Err(message) => Some(message),
        }
    })
}

#[test]
fn what_keeps_a_cluster_in_order_is_needed() {
    assert_eq!(find("uint32_t sum = cluster_rank();", "uint32_t sum = cluster_rank() + 0;"), None);
    for (name, text, replacement) in [
        ("barriers are used before they are there", "    }\n    cluster_sync();\n", "    }\n"),
        (
            "a block ends while others arrive",
            "p.fault != ENDS_EARLY || cluster_rank() != 0",
            "p.fault == ENDS_EARLY",
        ),
        ("parts are replaced while they are read", "        barrier_all();\n", ""),
        (
            "others' parts are not waited for",
            "mbar_arrive_at(empty, thread_index())",
            "mbar_arrive_at(empty, cluster_rank())",
        ),
        ("parts go to one block", "bulk_copy_to_cluster<CLUSTER>", "bulk_copy_to_cluster<1>"),
    ] {
        let found = find(text, replacement);
        assert!(found.is_some(), "{name} is not found out");
    }
}
