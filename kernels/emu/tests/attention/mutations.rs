//! What these tests would notice: the kernel broken in one place at a time, and the race detector's word
//! that the whole one has no race.

use spec_emu::{Arena, Launch, Mutation, Options, Program, Schedule};

use crate::case::{Case, MORE_BLOCKS, Query, Shape};
use crate::{SMALL, SMALL_FP8, WIDE, WINDOWED, twin};

/// Schedules of a program: each way in which copies land, twice.
const NUM_SEEDS: u64 = 6;

/// Who notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// A result, a counter, or the machine.
    Result,
    /// The race detector.
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

    const fn in_windows(self) -> Self {
        Self { shape: WINDOWED, ..self }
    }

    const fn in_fp8(self) -> Self {
        Self { shape: SMALL_FP8, ..self }
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

const BROKEN: [Broken; 37] = [
    broken(
        "pages that the kernel in front still writes are copied before it ends",
        "attention/attention.cu",
        "end <= unit.item.rows.num_old;",
        "true;",
        By::Result,
    ),
    broken(
        "copies are not waited for",
        "attention/attention.cu",
        "async_wait<AHEAD - 1>();",
        "",
        By::Result,
    ),
    broken(
        "lanes do not wait for each other's copies",
        "attention/attention.cu",
        "        ring_sync();  // all copies",
        "        // all copies",
        By::Race,
    ),
    broken(
        "a stage is filled while a lane still reads it",
        "attention/attention.cu",
        "            ring_sync();  // all lanes",
        "            // all lanes",
        By::Race,
    ),
    broken(
        "sums are stored while a warp still reads the ring",
        "attention/attention.cu",
        "        ring_sync();  // all warps",
        "        // all warps",
        By::Race,
    )
    .in_wide_tiles(),
    broken(
        "sums are merged before all warps have stored theirs",
        "attention/attention.cu",
        "    barrier_all();\n    add_split",
        "    add_split",
        By::Race,
    ),
    broken(
        "a warp is left out",
        "attention/attention.cu",
        "(parts, NUM_RINGS,",
        "(parts, NUM_RINGS - 1,",
        By::Result,
    ),
    broken(
        "a block arrives before all its threads have stored",
        "attention/attention.cu",
        "    barrier_all();\n    if (thread_index() == 0) {\n        const bool is_last",
        "    if (thread_index() == 0) {\n        const bool is_last",
        By::Race,
    ),
    broken(
        "a thread reads other blocks' sums before its block has arrived",
        "attention/attention.cu",
        "    barrier_all();\n    return plan.arrived_last",
        "    return plan.arrived_last",
        By::Race,
    ),
    broken(
        "a block arrives without order",
        "attention/attention.cu",
        "atomic_add_acq_rel",
        "atomic_add",
        By::Race,
    ),
    broken(
        "one arrival less is waited for",
        "attention/attention.cu",
        "== count - 1;",
        "== count - 2;",
        By::Result,
    ),
    broken(
        "nodes share a counter",
        "attention/attention.cu",
        "arrive(p.arrivals + partial + distance,",
        "arrive(p.arrivals + partial,",
        By::Result,
    ),
    broken(
        "the order of children depends on who arrives last",
        "attention/merge.cuh",
        "part = minimum(begin + i, count - 1);",
        "part = (minimum(begin + i, count - 1) + block_index()) % count;",
        By::Result,
    ),
    broken("a counter stays", "attention/attention.cu", "*counter = 0;", "", By::Result),
    broken(
        "the first child is overwritten while a lane still reads it",
        "attention/attention.cu",
        "            warp_sync();  // all lanes",
        "            // all lanes",
        By::Race,
    ),
    broken(
        "what a block has of a node is overwritten while a lane still reads it",
        "attention/merge.cuh",
        "                warp_sync();  // all lanes",
        "                // all lanes",
        By::Race,
    )
    .in_wide_tiles(),
    broken(
        "what a block has of a node is forgotten",
        "attention/merge.cuh",
        "if (!is_multiple(begin, bits)) {",
        "if (level > 1 && !is_multiple(begin, bits)) {",
        By::Result,
    ),
    broken(
        "an item is read before all of it is noted",
        "attention/items.cuh",
        "    barrier_all();\n}\n\n// Plans what",
        "}\n\n// Plans what",
        By::Race,
    ),
    broken(
        "the next split begins before all threads have added this one",
        "attention/attention.cu",
        "    barrier_all();  // the rings",
        "    // the rings",
        By::Race,
    ),
    broken(
        "the pass before is waited for too late",
        "attention/attention.cu",
        "    grid_wait();\n    grid_launch_dependents();\n",
        "    struct AtTheEnd {\n    ~AtTheEnd() { grid_wait(); grid_launch_dependents(); }\n    } at_the_end;\n",
        By::Race,
    ),
    broken(
        "the pass before is not waited for",
        "attention/attention.cu",
        "    grid_wait();\n",
        "",
        By::Result,
    ),
    broken(
        "the last page is not masked",
        "attention/attention.cu",
        "first_token + PAGE_TOKENS > unmasked",
        "first_token > unmasked",
        By::Result,
    ),
    broken(
        "pages before a window are not masked",
        "attention/attention.cu",
        "is_masked || first_token < view.all_after",
        "is_masked",
        By::Result,
    )
    .in_windows(),
    broken(
        "a row sees one position before its first",
        "attention/page.cuh",
        "token >= view.first[i / 2]",
        "token + 1 >= view.first[i / 2]",
        By::Result,
    )
    .in_windows(),
    broken(
        "where masks begin is of one row alone",
        "attention/page.cuh",
        "warp_max(maximum(view.first[0], view.first[1]))",
        "view.first[0]",
        By::Result,
    )
    .in_windows(),
    broken(
        "unwritten values are not masked",
        "attention/page.cuh",
        "four.x & seen.x",
        "four.x",
        By::Result,
    ),
    broken(
        "sums are not scaled when the largest score grows",
        "attention/page.cuh",
        "*= factor[i / 2];",
        "*= 1.0f;",
        By::Result,
    ),
    broken(
        "keys do not stand where they are looked for",
        "attention/attention.cu",
        "stage + key_chunk_offset(copier / KEY_CHUNKS, copier % KEY_CHUNKS);",
        "stage + 16 * copier;",
        By::Result,
    ),
    broken(
        "a part is added as if its largest score were the largest",
        "attention/merge.cuh",
        "factors.own * own",
        "own",
        By::Result,
    ),
    broken(
        "every head has the scales of the first",
        "attention/items.cuh",
        "p.kv_scales[which * p.num_kv_heads + item.kv_head]",
        "p.kv_scales[which * p.num_kv_heads]",
        By::Result,
    )
    .in_fp8(),
    broken(
        "values are taken as they are stored",
        "attention/merge.cuh",
        "value_scale(unit) / row.sum",
        "1.0f / row.sum",
        By::Result,
    )
    .in_fp8(),
    broken(
        "a split is read before all of it is noted",
        "attention/items.cuh",
        "        note_unit(p, now.item, now.split + 1, next);\n        barrier_all();",
        "        barrier_all();\n        note_unit(p, now.item, now.split + 1, next);",
        By::Race,
    ),
    broken(
        "a unit is planned while threads still add up what it takes the place of",
        "attention/attention.cu",
        "            barrier_all();  // all have left the unit\n",
        "",
        By::Race,
    ),
    broken(
        "whether an item ends is asked of what may be another one",
        "attention/attention.cu",
        "        if (ends_item) {",
        "        if (now.split + 1 == now.item.end_split) {",
        By::Race,
    ),
    broken(
        "rows are those of the unit before",
        "attention/attention.cu",
        "load_lane_rows(p, next.item, rows);",
        "",
        By::Result,
    ),
    broken(
        "the warps of a wide tile do not wait for each other's copies",
        "attention/attention.cu",
        "    if constexpr (IS_WIDE) {\n        barrier_all();",
        "    if constexpr (IS_WIDE) {\n        warp_sync();",
        By::Race,
    )
    .in_wide_tiles(),
    broken(
        "a part of a wide tile begins with the sums before it",
        "attention/attention.cu",
        "            part = empty_softmax();\n",
        "",
        By::Result,
    )
    .in_wide_tiles(),
];

/// Passes one after the other, as early as they may start, with the same workspace, behind a kernel that writes the first
/// one's newest keys and values: the second asks with the results of the first, the third is the first once more on
/// another grid.
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
    let newest = images[0].take_newest(case, &arena);
    let refill =
        Launch { variant: "refill", grid: 2, block: 64, params: &newest, ..Launch::default() };
    let passes = images.iter().map(|image| case.launch(&variant, &image.params));
    let mut launches: Vec<_> = [refill].into_iter().chain(passes).collect();
    launches[3].grid += MORE_BLOCKS as u32;
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
    // Two nodes of splits, and a root; then a block for each node.
    let mut splits = Case { split_tokens: 16, grid: 4, ..Case::chains(shape, &[150, 40], 4) };
    for row in splits.tiles.iter_mut().flatten() {
        // Those of the first tile begin in two pages.
        row.first = if shape.is_windowed { row.base.saturating_sub(132) } else { 0 };
    }
    let nodes = Case { max_items: 8, ..splits.clone() };
    // More tiles than a block plans at once; one block has several items of the first ones, and on the
    // larger grid some have none.
    let mut long = Case { split_tokens: 512, ..Case::chains(shape, &[500], 2) };
    long.grid = 1;
    long.tiles.resize(130, Vec::new());
    long.tiles.push(vec![Query::chain(1, 0, 9)]);
    (0..NUM_SEEDS).try_for_each(|seed| {
        examine_passes(program, &splits, seed)?;
        examine_passes(program, &nodes, seed)?;
        examine_passes(program, &long, seed)
    })
}

fn build(shape: Shape, mutation: Option<Mutation>, races: bool) -> Program {
    Program::build(&["refill", &shape.variant()], &Options { races, mutation })
        .expect("the kernel compiles, and the text to change is there")
}

fn assert_whole(shape: Shape) {
    for races in [false, true] {
        assert_eq!(examine(&build(shape, None, races), shape), Ok(()), "races: {races}");
    }
}

#[test]
fn the_whole_kernel_passes_and_has_no_race() {
    assert_whole(SMALL);
}

#[test]
fn the_whole_kernel_with_rings_of_two_pages_passes_and_has_no_race() {
    assert_whole(Shape { head_dim: 128, ..SMALL });
}

#[test]
fn the_whole_kernel_with_rings_of_a_block_passes_and_has_no_race() {
    assert_whole(WIDE);
}

#[test]
fn the_whole_kernel_with_windows_passes_and_has_no_race() {
    assert_whole(WINDOWED);
}

/// What a change of the kernels or of the emulator alone can break: `scripts/check-kernels` runs it.
mod exhaustive {
    use super::{BROKEN, Broken, By, build, examine};
    use spec_emu::Mutation;

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
}
