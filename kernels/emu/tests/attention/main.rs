//! The attention kernel against its naive twin, and its promise that a row's bits depend on nothing but
//! its own query and its sequence's keys and values.

mod case;
#[allow(dead_code, reason = "shared with the tests of the few-row product")]
#[path = "../gemm/image.rs"]
mod image;
mod mutations;
mod twin;

use std::collections::HashMap;

use case::{Case, Context, Query, Shape, UNTOUCHED, mix};
use spec_emu::{Arena, Schedule, run};
use spec_kernels::Format;

const SMALL: Shape = Shape {
    kv: Format::Fp16,
    head_dim: 64,
    group: 4,
    kv_heads: 2,
    tile_rows: 16,
    is_windowed: false,
};
const WIDE: Shape = Shape { tile_rows: 64, ..SMALL };
const WINDOWED: Shape = Shape { is_windowed: true, ..SMALL };
const SMALL_FP8: Shape = Shape { kv: Format::Fp8, group: 3, ..SMALL };
const WIDE_FP8: Shape = Shape { tile_rows: 64, head_dim: 128, ..SMALL_FP8 };

/// Runs a pass on several schedules, compares each with the twin and all with the first.
fn check(case: &Case, num_seeds: u64) -> Vec<u16> {
    let (image, first) = case.run(&Schedule::PLAIN).expect("the kernel ends");
    twin::compare(case, &image, &first).unwrap_or_else(|e| panic!("{e}\n{:?}", case.shape));
    for seed in 0..num_seeds {
        let (_, output) = case.run(&Schedule::seeded(seed)).expect("the kernel ends");
        assert!(output == first, "seed {seed} changes bits of {:?}", case.shape);
    }
    first
}

/// The outputs by the names of their queries.
fn by_name<'a>(case: &Case, output: &'a [u16]) -> HashMap<u64, &'a [u16]> {
    case.rows().map(|row| row.name).zip(output.chunks_exact(case.shape.row_len())).collect()
}

/// Random trees behind `base`: each row sees itself and a path of earlier ones.
fn tree(name: u64, sequence: usize, base: usize, num_rows: usize) -> Vec<Query> {
    let mut ancestors = Vec::<u64>::new();
    for i in 0..num_rows {
        let parent = mix(name, i as u64) as usize % (i + 1);
        let above = if parent == i { 0 } else { ancestors[parent] };
        ancestors.push(above | 1 << i);
    }
    let row = |(i, ancestors)| Query {
        name: mix(name, 1000 + i as u64),
        sequence: Some(sequence),
        base,
        ancestors,
        first: 0,
    };
    ancestors.into_iter().enumerate().map(row).collect()
}

/// A tree of one sequence, in tiles as full as they go.
fn tree_case(shape: Shape, name: u64, base: usize, num_rows: usize) -> Case {
    let rows = tree(name, 0, base, num_rows);
    let contexts = vec![Context::new(7, base + num_rows)];
    let tiles = rows.chunks(shape.tile_queries()).map(<[Query]>::to_vec).collect();
    Case { contexts, tiles, ..Case::chains(shape, &[], 0) }
}

#[test]
fn every_variant_agrees_with_the_twin() {
    for kv in [Format::Fp16, Format::Fp8] {
        for head_dim in [64, 128] {
            for group in [1, 2, 3, 4, 7, 8] {
                for tile_rows in [16, 64] {
                    let shape = Shape { kv, head_dim, group, tile_rows, ..SMALL };
                    check(&Case::chains(shape, &[1, 17, 300, 95], 7), 1);
                }
            }
        }
    }
}

#[test]
fn groups_that_leave_rows_of_a_tile_empty_or_fill_it_alone() {
    for kv in [Format::Fp16, Format::Fp8] {
        for group in [5, 6, 7, 12, 16] {
            for tile_rows in [16, 64] {
                let shape = Shape { kv, head_dim: 128, group, tile_rows, ..SMALL };
                check(&Case::chains(shape, &[1, 17, 300, 95], 5), 1);
                check(&tree_case(shape, group as u64, 41, 9), 1);
            }
        }
    }
}

#[test]
fn lengths_around_the_bounds_of_pages_and_splits() {
    for shape in [SMALL, SMALL_FP8, WIDE, WIDE_FP8] {
        for split_tokens in [32, 64, 512] {
            let lens = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 511, 513, 700];
            let case = Case { split_tokens, grid: 9, ..Case::chains(shape, &lens, 3) };
            check(&case, 1);
        }
    }
}

#[test]
fn flat_and_peaked_weights() {
    for spread in [0.0, 0.1, 20.0, 400.0] {
        for shape in [SMALL, SMALL_FP8, WIDE, WIDE_FP8] {
            check(&Case { spread, ..Case::chains(shape, &[200, 33], 2) }, 1);
        }
    }
}

#[test]
fn a_ring_wraps_many_times() {
    // The largest split, 32 pages a warp, and a few positions of another.
    let shape = Shape { kv_heads: 1, ..SMALL };
    for shape in [shape, WIDE, Shape { kv: Format::Fp8, head_dim: 128, ..shape }] {
        let case = Case { split_tokens: 2048, grid: 2, ..Case::chains(shape, &[2070], 2) };
        check(&case, 3);
    }
}

#[test]
fn bits_do_not_depend_on_the_level_of_the_items() {
    // Splits of a page: nodes have 128 positions, then 1,024, and three of those make the longest row.
    for shape in [SMALL, SMALL_FP8, WIDE, WIDE_FP8, Shape { group: 1, ..SMALL }] {
        let lens = [2100, 128, 129, 1024, 1025, 15];
        let case = Case { split_tokens: 16, max_items: 2000, ..Case::chains(shape, &lens, 5) };
        let expected = check(&case, 0);
        // Room for items of one split, of 8, of 64, and for none that is not the whole row.
        for max_items in [1200, 200, 40, 0] {
            for grid in [1, 3, 30] {
                let (_, output) =
                    Case { max_items, grid, ..case.clone() }.run(&Schedule::seeded(2)).unwrap();
                assert!(output == expected, "{max_items} items, {grid} blocks, {shape:?}");
            }
        }
    }
}

#[test]
fn trees_hide_what_is_no_ancestor() {
    for (seed, base) in [0, 1, 15, 40, 63, 64, 130].into_iter().enumerate() {
        for shape in [SMALL, SMALL_FP8, WIDE, WIDE_FP8, Shape { head_dim: 128, group: 1, ..SMALL }]
        {
            check(&tree_case(shape, seed as u64, base, 64), 1);
        }
    }
}

#[test]
fn what_no_row_sees_may_be_unwritten() {
    // A tree whose third place is empty: NaN lies between what its rows see.
    let rows = [0b1u64, 0b11, 0b1001, 0b11011].map(|ancestors| Query {
        name: ancestors,
        sequence: Some(0),
        base: 45,
        ancestors,
        first: 0,
    });
    let contexts = vec![Context { name: 3, len: 50, holes: vec![47] }];
    for shape in [SMALL, SMALL_FP8, WIDE, WIDE_FP8] {
        let contexts = contexts.clone();
        let case = Case { contexts, tiles: vec![rows.to_vec()], ..Case::chains(shape, &[], 0) };
        check(&case, 1);
    }
}

#[test]
fn windows_hide_what_is_before_them() {
    let large = Shape { head_dim: 128, group: 3, ..WINDOWED };
    let wide = [WINDOWED, large].map(|shape| Shape { tile_rows: 64, ..shape });
    for shape in [WINDOWED, large].into_iter().chain(wide) {
        // A window in a page, of whole pages, of more than a split, one that ends before the text begins.
        for window in [1, 5, 16, 17, 33, 100, 1000] {
            let mut case = Case { split_tokens: 32, ..Case::chains(shape, &[150, 20, 1], 20) };
            for row in case.tiles.iter_mut().flatten() {
                row.first = row.base.saturating_sub(window);
            }
            // What no row sees may be unwritten: here the text's beginning.
            let seen = case.rows().filter(|row| row.sequence == Some(0)).map(|row| row.first);
            case.contexts[0].holes = (0..seen.min().unwrap()).collect();
            check(&case, 1);
        }
    }
}

#[test]
fn where_everything_is_seen_a_window_changes_no_bit() {
    for shape in [SMALL, WIDE] {
        let plain = Case { split_tokens: 32, ..Case::chains(shape, &[150, 20], 20) };
        let windowed = Case { shape: Shape { is_windowed: true, ..shape }, ..plain.clone() };
        assert!(check(&plain, 0) == check(&windowed, 0), "{shape:?}");
    }
}

#[test]
fn prefill_in_chunks() {
    for start in [0, 50] {
        for shape in [SMALL, SMALL_FP8, WIDE, WIDE_FP8] {
            let case = Case { split_tokens: 32, ..Case::chains(shape, &[start + 70, 40], 70) };
            check(&case, 1);
        }
    }
}

#[test]
fn empty_tiles_and_inactive_rows_leave_the_others_alone() {
    let mut case = Case::chains(SMALL, &[40, 100, 3], 2);
    let plain = check(&case, 0);
    let plain = by_name(&case, &plain);
    let full = std::mem::take(&mut case.tiles);
    // More tiles than a block plans at once.
    case.tiles = vec![Vec::new(); 400];
    case.tiles[129] = vec![Query::INACTIVE; 4];
    for (tile, place) in full.iter().zip([2, 128, 399]) {
        let mut rows = vec![Query::INACTIVE];
        rows.extend(tile);
        case.tiles[place] = rows;
    }
    let output = check(&case, 2);
    for (name, row) in by_name(&case, &output) {
        if name != Query::INACTIVE.name {
            assert!(plain[&name] == row, "an inactive row changes bits of row {name}");
        }
    }
    let row_len = SMALL.row_len();
    let inactive = &output[6 * row_len..10 * row_len];
    assert!(inactive.iter().all(|&bits| bits == UNTOUCHED), "a tile of inactive rows was written");
}

#[test]
fn bits_of_a_row_depend_on_itself_alone() {
    for shape in [SMALL, SMALL_FP8, Shape { head_dim: 128, group: 2, ..SMALL }] {
        let together = Case { split_tokens: 32, ..Case::chains(shape, &[333, 60], 12) };
        let expected = check(&together, 0);
        let expected = by_name(&together, &expected);
        let same = |case: &Case, what: &str| {
            let (_, output) = case.run(&Schedule::seeded(1)).unwrap();
            for (name, row) in by_name(case, &output) {
                assert!(expected[&name] == row, "{what} changes bits of row {name}, {shape:?}");
            }
        };
        let wide = Case::chains(Shape { tile_rows: 64, ..shape }, &[333, 60], 12);
        same(&Case { split_tokens: 32, ..wide }, "a wide tile");
        let alone = together.rows().map(|&row| vec![row]).collect();
        same(&Case { tiles: alone, ..together.clone() }, "being alone");
        let mut turned = together.clone();
        turned.tiles.iter_mut().for_each(|tile| tile.reverse());
        turned.tiles.reverse();
        same(&turned, "the order of rows");
        for grid in [1, 2, 3, 8, 40, 200] {
            same(&Case { grid, ..together.clone() }, "the grid");
        }
    }
}

/// As the next product of warpgroups reads them; of 70 rows a second unit has some.
#[test]
fn outputs_may_lie_in_units() {
    for shape in [SMALL, SMALL_FP8, WIDE_FP8, WINDOWED] {
        for rows in [3, 70] {
            let case = Case { split_tokens: 32, ..Case::chains(shape, &[90], rows) };
            let (_, expected) = case.run(&Schedule::PLAIN).unwrap();
            assert!(case.run_in_units(&Schedule::seeded(3)).unwrap() == expected, "{shape:?}");
        }
    }
}

#[test]
fn a_chain_and_the_same_path_of_a_tree_have_the_same_bits() {
    // The rows write the same positions; what they see is said in two ways.
    let chain = Case { split_tokens: 32, ..Case::chains(SMALL, &[70], 10) };
    let mut path = chain.clone();
    for row in path.tiles.iter_mut().flatten() {
        row.ancestors = (1 << (row.base - 60)) - 1;
        row.base = 60;
    }
    assert!(check(&chain, 0) == check(&path, 0), "a path is not its chain");
}

#[test]
fn passes_overlap_without_mixing() {
    // Each pass asks with the results of the one before it, and all share partials and arrivals.
    let case = Case { split_tokens: 32, grid: 12, ..Case::chains(SMALL, &[150, 40], 4) };
    for seed in 0..6 {
        let arena = Arena::new(1 << 28);
        let mut images: Vec<_> = (0..3).map(|_| case.image(&arena)).collect();
        for i in 1..images.len() {
            let (before, rest) = images.split_at_mut(i);
            rest[0].read_queries_from(&before[i - 1], Vec::new());
            rest[0].share_workspace(&before[0]);
        }
        let variant = case.shape.variant();
        let mut launches: Vec<_> =
            images.iter().map(|image| case.launch(&variant, &image.params)).collect();
        launches[1..].iter_mut().for_each(|launch| launch.overlap = true);
        run(&launches, &Schedule::seeded(seed)).unwrap();
        images[0].arrivals_are_zero(&arena).unwrap();
        let mut queries = images[0].queries.clone();
        for image in &mut images {
            image.queries = queries;
            queries = image.output(&arena);
            twin::compare(&case, image, &queries).unwrap();
        }
    }
}
