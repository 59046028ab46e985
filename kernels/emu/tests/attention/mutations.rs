//! What these tests would notice: the kernel broken in one place at a time, and ThreadSanitizer's word
//! that the whole one has no race.

use spec_emu::{Arena, Mutation, Options, Program, Schedule};

use crate::case::{Case, Query, Shape};
use crate::{SMALL, WIDE, twin};

/// Schedules of a program: each way in which copies land.
const NUM_SEEDS: u64 = 3;

/// Who notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// A result, a counter, or the machine.
    Result,
    /// ThreadSanitizer.
    Race,
}

struct Broken {
    what: &'static str,
    file: &'static str,
    text: &'static str,
    replacement: &'static str,
    by: By,
    shape: Shape,
}

impl Broken {
    const fn in_wide_tiles(self) -> Self {
        Self { shape: WIDE, ..self }
    }
}

const fn broken(
    what: &'static str,
    file: &'static str,
    text: &'static str,
    replacement: &'static str,
    by: By,
) -> Broken {
    Broken { what, file, text, replacement, by, shape: SMALL }
}

const BROKEN: [Broken; 19] = [
    broken(
        "copies are not waited for",
        "attention.cu",
        "async_wait<STAGES - 2>();",
        "",
        By::Result,
    ),
    broken(
        "lanes do not wait for each other's copies",
        "attention.cu",
        "        ring_sync();\n        if (has_page",
        "        if (has_page",
        By::Race,
    ),
    broken(
        "sums are stored while a lane still reads the ring",
        "attention.cu",
        "    ring_sync();\n    return",
        "    return",
        By::Race,
    ),
    broken(
        "sums are merged before all warps have stored theirs",
        "attention.cu",
        "    barrier_all();\n    const uint64_t head",
        "    const uint64_t head",
        By::Race,
    ),
    broken(
        "a warp is left out",
        "attention.cu",
        "parts = {sums, NUM_RINGS,",
        "parts = {sums, NUM_RINGS - 1,",
        By::Result,
    ),
    broken(
        "a block arrives before all its threads have stored",
        "attention.cu",
        "    fence_gpu();\n    barrier_all();\n    if (thread",
        "    if (thread",
        By::Race,
    ),
    broken(
        "one arrival less is waited for",
        "attention.cu",
        "item.num_splits - 1;",
        "item.num_splits - 2;",
        By::Result,
    ),
    broken(
        "the order of splits depends on who arrives last",
        "attention.cu",
        "const uint64_t offset = uint64_t{part} * parts.stride;",
        "const uint64_t offset = uint64_t{(part + block_index()) % parts.count} * parts.stride;",
        By::Result,
    ),
    broken("a counter stays", "attention.cu", "*counter = 0;", "", By::Result),
    broken(
        "the next item begins before all threads have ended this one",
        "attention.cu",
        "barrier_all();  // the rings",
        "// the rings",
        By::Race,
    ),
    broken(
        "the pass before is waited for too late",
        "attention.cu",
        "    grid_wait();\n",
        "    struct AtTheEnd { ~AtTheEnd() { grid_wait(); } } at_the_end;\n",
        By::Race,
    ),
    broken(
        "the pass before is not waited for",
        "attention.cu",
        "    grid_wait();\n",
        "",
        By::Result,
    ),
    broken(
        "the last page is not masked",
        "attention.cu",
        "if (first_token + PAGE_TOKENS > unmasked)",
        "if (first_token > unmasked)",
        By::Result,
    ),
    broken(
        "unwritten values are not masked",
        "attention_page.cuh",
        "four.x & seen.x",
        "four.x",
        By::Result,
    ),
    broken(
        "sums are not scaled when the largest score grows",
        "attention_page.cuh",
        "*= factor[i / 2];",
        "*= 1.0f;",
        By::Result,
    ),
    broken(
        "keys do not stand where they are looked for",
        "attention.cu",
        "stage + key_chunk_offset(copier / KEY_CHUNKS, copier % KEY_CHUNKS);",
        "stage + 16 * copier;",
        By::Result,
    ),
    broken(
        "a part is added as if its largest score were the largest",
        "attention.cu",
        "factors.own * own",
        "own",
        By::Result,
    ),
    broken(
        "the warps of a wide tile do not wait for each other's copies",
        "attention.cu",
        "    if constexpr (IS_WIDE) {\n        barrier_all();",
        "    if constexpr (IS_WIDE) {\n        warp_sync();",
        By::Race,
    )
    .in_wide_tiles(),
    broken(
        "a part of a wide tile begins with the sums before it",
        "attention.cu",
        "                part = empty_softmax();\n",
        "",
        By::Result,
    )
    .in_wide_tiles(),
];

/// Passes one after the other, as early as they may start, with the same workspace: the second asks with
/// the results of the first, the third is the first once more on another grid.
fn examine_passes(program: &Program, case: &Case, seed: u64) -> Result<(), String> {
    let arena = Arena::new(1 << 26);
    let variant = case.shape.variant();
    let mut images = [0; 3].map(|_| case.image(&arena));
    for i in 1..images.len() {
        let (before, rest) = images.split_at_mut(i);
        rest[0].share_workspace(&before[0]);
    }
    let (first, rest) = images.split_at_mut(1);
    rest[0].read_queries_from(&first[0], Vec::new());
    let mut launches: Vec<_> =
        images.iter().map(|image| case.launch(&variant, &image.params)).collect();
    launches[2].grid += 2;
    launches[1..].iter_mut().for_each(|launch| launch.overlap = true);
    program.run(&arena, &launches, &Schedule::seeded(seed))?;
    images[0].arrivals_are_zero(&arena)?;
    let outputs = images.each_ref().map(|image| image.output(&arena));
    if outputs[0] != outputs[2] {
        return Err("the same pass has other bits on another grid".into());
    }
    images[1].queries.clone_from(&outputs[0]);
    images.iter().zip(&outputs).try_for_each(|(image, output)| twin::compare(case, image, output))
}

/// All that a broken kernel has to get past.
fn examine(program: &Program, shape: Shape) -> Result<(), String> {
    let splits = Case { split_tokens: 32, grid: 4, ..Case::chains(shape, &[150, 40], 4) };
    // More tiles than a block plans at once; one block has several items of the first ones, and on the
    // larger grid some have none.
    let mut long = Case { split_tokens: 512, max_splits: 1, ..Case::chains(shape, &[500], 2) };
    long.grid = 1;
    long.tiles.resize(130, Vec::new());
    long.tiles.push(vec![Query::chain(1, 0, 9)]);
    (0..NUM_SEEDS).try_for_each(|seed| {
        examine_passes(program, &splits, seed)?;
        examine_passes(program, &long, seed)
    })
}

fn build(shape: Shape, mutation: Option<Mutation>, tsan: bool) -> Program {
    Program::build(&[&shape.variant()], &Options { tsan, mutation })
        .expect("the kernel compiles, and the text to change is there")
}

#[test]
fn the_whole_kernel_passes_and_has_no_race() {
    // Rings of four pages and of two, of a warp and of the block.
    for shape in [SMALL, Shape { head_dim: 128, ..SMALL }, WIDE] {
        for tsan in [false, true] {
            examine(&build(shape, None, tsan), shape).unwrap();
        }
    }
}

/// All that are noticed by `by` are.
fn check_broken(by: By) {
    let mut unnoticed = Vec::new();
    for Broken { what, file, text, replacement, shape, .. } in
        BROKEN.into_iter().filter(|b| b.by == by)
    {
        let program = build(shape, Some(Mutation { file, text, replacement }), by == By::Race);
        let noticed = examine(&program, shape).err();
        println!("{what}: {noticed:.300?}");
        let is_race = noticed.as_ref().is_some_and(|message| message.starts_with("race:"));
        if noticed.is_none() || is_race != (by == By::Race) {
            unnoticed.push((what, noticed));
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
}

#[test]
fn what_is_broken_has_wrong_results() {
    check_broken(By::Result);
}

#[test]
fn what_waits_too_little_has_a_race() {
    check_broken(By::Race);
}
