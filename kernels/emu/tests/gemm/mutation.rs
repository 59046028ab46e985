//! Each thing that keeps the product's threads in order is needed: without it the results are wrong, the
//! machine stops the kernel, or ThreadSanitizer finds a race.

use crate::chain::{Chain, Size};
use spec_emu::{Mutation, Options, Program, Schedule};
use spec_kernels::{Epilogue, Format};

/// How a broken kernel is found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// Other results.
    Wrong,
    /// The machine's message: threads that wait for ever, too many arrivals.
    Stopped,
    /// ThreadSanitizer's.
    Race,
}
use Found::{Race, Stopped, Wrong};

struct Case {
    name: &'static str,
    found: Found,
    scene: Scene,
    mutation: Mutation<'static>,
}

const fn case(
    name: &'static str,
    found: Found,
    file: &'static str,
    [text, replacement]: [&'static str; 2],
) -> Case {
    Case { name, found, scene: Short, mutation: Mutation { file, text, replacement } }
}

const RING: &str = "gemm_ring.cuh";
const INPUT: &str = "gemm_input.cuh";
const TILE: &str = "gemm_tile.cuh";
const SPLIT: &str = "gemm_split.cuh";
const MAIN: &str = "gemm.cu";

const CASES: [Case; 20] = [
    case(
        "no wait for a full stage",
        Wrong,
        RING,
        ["mbar_wait(&ring.full[at.stage], at.parity);", ""],
    ),
    case(
        "no wait for an empty stage",
        Stopped,
        RING,
        ["mbar_wait(&ring.empty[at.stage], at.parity ^ 1);", ""],
    ),
    case(
        "a warp too few empties a stage",
        Stopped,
        RING,
        [
            "mbar_init(&ring.empty[stage], CONSUMER_WARPS)",
            "mbar_init(&ring.empty[stage], CONSUMER_WARPS - 1)",
        ],
    ),
    case(
        "a warp too many empties a stage",
        Stopped,
        RING,
        [
            "mbar_init(&ring.empty[stage], CONSUMER_WARPS)",
            "mbar_init(&ring.empty[stage], CONSUMER_WARPS + 1)",
        ],
    ),
    case("the parity of the ring stays", Stopped, RING, ["at.parity ^= 1;", ""]),
    case(
        "no barrier before x is read",
        Race,
        INPUT,
        [
            "            store_group(x + row * X_STRIDE, k, group);\n        }\n    }\n    consumer_barrier();",
            "            store_group(x + row * X_STRIDE, k, group);\n        }\n    }",
        ],
    ),
    case(
        "no barrier before x is replaced",
        Race,
        INPUT,
        ["    consumer_barrier();\n    const uint32_t k_first", "    const uint32_t k_first"],
    ),
    case(
        "no barrier between the parts of a norm",
        Race,
        INPUT,
        [
            "    consumer_barrier();\n    if (thread_index() < p.num_rows)",
            "    if (thread_index() < p.num_rows)",
        ],
    ),
    case(
        "no barrier between two slices",
        Race,
        TILE,
        [
            "        store_sums(sums, half, false);\n    }\n    consumer_barrier();",
            "        store_sums(sums, half, false);\n    }",
        ],
    ),
    case(
        "no barrier before the slices' sums are read",
        Race,
        TILE,
        [
            "        store_sums(sums, half, true);\n    }\n    consumer_barrier();",
            "        store_sums(sums, half, true);\n    }",
        ],
    ),
    case(
        "no barrier before the next tile's sums",
        Race,
        MAIN,
        [
            "            p.arrivals[tile] = 0;\n        }\n    }\n    consumer_barrier();",
            "            p.arrivals[tile] = 0;\n        }\n    }",
        ],
    ),
    case(
        "no barrier before a part is announced",
        Race,
        SPLIT,
        [
            "    consumer_barrier();\n    if (thread_index() == 0) {",
            "    if (thread_index() == 0) {",
        ],
    ),
    case("a part is announced without order", Race, SPLIT, ["atomic_add_acq_rel", "atomic_add"]),
    case(
        "a tile waits for a part too many",
        Wrong,
        SPLIT,
        ["first_cta(split, tile) + 1;", "first_cta(split, tile) + 2;"],
    ),
    case(
        "a tile does not wait for its last part",
        Wrong,
        SPLIT,
        ["num_parts(split, tile) - 1;", "num_parts(split, tile) - 2;"],
    ),
    case(
        "parts are added from the last to arrive on",
        Wrong,
        SPLIT,
        [
            "    float sum = part_slot(p, cta, true)[place];\n    for (uint32_t i = 1; i < parts; ++i) {",
            "    float sum = 0.0f;\n    for (uint32_t j = 0; j < parts; ++j) {\n        \
         const uint32_t i = (block_index() - cta + j) % parts;\n        \
         if (i == 0) {\n            sum += part_slot(p, cta, true)[place];\n            continue;\n        }",
        ],
    ),
    case("the counter stays", Wrong, MAIN, ["            p.arrivals[tile] = 0;\n", ""]),
    case("another swizzle", Wrong, "image.cuh", ["(row & 7)", "(row & 3)"]),
    case("no wait for the kernel before", Race, MAIN, ["    grid_wait();\n", ""]),
    case("no wait for the kernel before, and no luck", Wrong, MAIN, ["    grid_wait();\n", ""]),
];

/// What is only there without bulk copies.
const OLD_CASES: [Case; 2] = [
    case(
        "an arrival that does not wait for its copies",
        Wrong,
        RING,
        ["async_arrive(full);", "mbar_arrive(full);"],
    ),
    case(
        "a lane too few fills a stage",
        Stopped,
        RING,
        ["HAS_BULK_COPY ? 1 : 32", "HAS_BULK_COPY ? 1 : 31"],
    ),
];

/// An embedding and products of it that overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// Four tiles of eight units in blocks of eleven: whole tiles and parts, a ring that wraps, one chunk.
    Short,
    /// Three tiles of twenty units in blocks of eight: three parts to a tile, several chunks.
    Long,
}
use Scene::{Long, Short};

fn chain(scene: Scene, is_old: bool) -> Chain {
    let (hidden, grid, outputs) = match scene {
        Short => (1024, 3, vec![256, 200]),
        Long => (2560, 8, vec![192]),
    };
    let weight = Format::Fp8;
    let size = Size { weight, hidden, capacity: 16, num_rows: 3, grid, is_old };
    let mut chain = Chain::new(size);
    for n in outputs {
        chain.product((Epilogue::Raw, n), chain.residual, None);
    }
    chain
}

fn expected(scene: Scene) -> Vec<u8> {
    let chain = chain(scene, false);
    spec_emu::run(&chain.launches(false), &Schedule::PLAIN).unwrap();
    chain.bits()
}

fn build(scene: Scene, is_old: bool, options: &Options<'_>) -> Program {
    let chain = chain(scene, is_old);
    let mut variants = chain.variants();
    variants.dedup();
    Program::build(&variants, options).unwrap()
}

/// What the first of some schedules finds.
fn find(program: &Program, scene: Scene, is_old: bool, seeds: u64) -> Option<(Found, String)> {
    let expected = expected(scene);
    (0..seeds).find_map(|seed| {
        let chain = chain(scene, is_old);
        match program.run(&chain.arena, &chain.launches(true), &Schedule::seeded(seed)) {
            Ok(()) if chain.bits() == expected => None,
            Ok(()) => Some((Wrong, format!("other results with seed {seed}"))),
            Err(message) if message.starts_with("race:") => Some((Race, message)),
            Err(message) => Some((Stopped, message)),
        }
    })
}

fn all_are_found(cases: &[Case], is_old: bool, by: impl Fn(Found) -> bool) {
    for case in cases.iter().filter(|case| by(case.found)) {
        let tsan = case.found == Race;
        let options = Options { tsan, mutation: Some(case.mutation) };
        let program = build(case.scene, is_old, &options);
        let found = find(&program, case.scene, is_old, if tsan { 3 } else { 30 });
        let kind = found.as_ref().map(|(kind, _)| *kind);
        assert_eq!(kind, Some(case.found), "{}: {found:?}", case.name);
    }
}

#[test]
fn what_keeps_results_right_is_needed() {
    all_are_found(&CASES, false, |found| found != Race);
}

#[test]
fn what_orders_memory_is_needed() {
    all_are_found(&CASES, false, |found| found == Race);
}

#[test]
fn what_orders_copies_by_lanes_is_needed() {
    all_are_found(&OLD_CASES, true, |_| true);
}

#[test]
fn the_kernels_as_they_are_have_no_race() {
    for is_old in [false, true] {
        let options = Options { tsan: true, mutation: None };
        for scene in [Short, Long] {
            let found = find(&build(scene, is_old, &options), scene, is_old, 3);
            assert_eq!(found, None, "{scene:?}, old: {is_old}");
        }
    }
}
