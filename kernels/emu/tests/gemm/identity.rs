//! The bits of a row depend on the row, the matrix and the grid alone.

use crate::image::{Random, bytes_of};
use crate::problem::{Plan, Problem};
use crate::run::{Arch, Outcome, Run, run};
use crate::twin::some_rows;
use spec_emu::Schedule;
use spec_kernels::{Epilogue, Format};

/// Everything that a row of a run left behind.
fn row_bits(problem: &Problem, run: &Run, outcome: &Outcome, row: usize) -> Vec<u8> {
    let i = run.picks.iter().position(|&pick| pick == row).unwrap();
    let mut bits = outcome.output[i].clone();
    if let Some(best) = outcome.best.get(i) {
        let words = best.iter().flat_map(|(value, index)| [value.to_bits(), *index]);
        bits.extend(words.flat_map(u32::to_le_bytes));
    }
    if let Some(squares) = outcome.squares.get(i) {
        bits.extend(squares.iter().flat_map(|square| square.to_le_bytes()));
    }
    let is_stored = matches!(problem.plan.epilogue, Epilogue::Qkv { .. });
    if is_stored && problem.rows[row].is_active() {
        let size = bytes_of(problem.plan.kv);
        let places = problem.cache_places(&problem.rows[row]).concat();
        bits.extend(places.iter().flat_map(|&place| &outcome.cache[place * size..][..size]));
    }
    bits
}

/// Ampere's and Blackwell's code gives the same bits.
fn does_not_depend_on_company(plan: Plan) {
    let problem = Problem::random(plan, 70);
    does_not_depend_on_company_of(&problem, &[Arch::Hopper]);
    does_not_depend_on_company_of(&problem, &[Arch::Ampere, Arch::Blackwell]);
}

fn does_not_depend_on_company_of(problem: &Problem, archs: &[Arch]) {
    let (plan, row) = (problem.plan, 7);
    let random = &mut Random(71);
    let capacities = archs[0].capacities();
    for grid in [2, 6] {
        let alone = Run { arch: archs[0], ..Run::new(8, vec![row], grid) };
        let expected = row_bits(problem, &alone, &run(problem, &alone), row);
        for i in 0..2 * capacities.len() {
            let capacity = capacities[i % capacities.len()];
            let mut picks = some_rows(capacity - i / capacities.len(), random);
            if !picks.contains(&row) {
                let place = random.below(picks.len());
                picks[place] = row;
            }
            let schedule = Schedule::seeded(random.below(1000) as u64);
            let among = Run::new(capacity, picks, grid);
            let arch = archs[i / 2 % archs.len()];
            let among = Run { schedule, arch, is_indexed: i % 2 == 0, ..among };
            let found = row_bits(problem, &among, &run(problem, &among), row);
            assert_eq!(found, expected, "{plan:?} {among:?}");
        }
    }
}

#[test]
fn a_rows_queries_keys_and_values_do_not_depend_on_its_company() {
    does_not_depend_on_company(Plan::qkv(Format::Fp8, 128, [2, 1], 704, Format::Fp16).with_bias());
    does_not_depend_on_company(Plan::qkv(Format::Fp16, 64, [2, 1], 704, Format::Fp8));
}

#[test]
fn a_rows_sums_do_not_depend_on_its_company() {
    does_not_depend_on_company(Plan::new(Format::Fp8, Epilogue::Raw, 200, 704).with_bias());
    does_not_depend_on_company(Plan::new(Format::Fp16, Epilogue::Residual, 200, 704));
    does_not_depend_on_company(Plan::new(Format::Fp16, Epilogue::SwiGlu, 192, 2112));
}

#[test]
fn a_rows_logits_do_not_depend_on_its_company() {
    does_not_depend_on_company(Plan::new(Format::Fp8, Epilogue::Head, 200, 2112));
}

/// Every tile is one block's, whichever that is: the bits of a head do not even depend on the grid.
#[test]
fn a_rows_logits_do_not_depend_on_the_grid() {
    let problem = Problem::random(Plan::new(Format::Fp16, Epilogue::Head, 320, 2112), 72);
    let on = |grid| run(&problem, &Run::new(16, (0..9).collect(), grid)).output;
    let expected = on(1);
    for grid in [2, 3, 5, 7] {
        assert_eq!(on(grid), expected, "{grid} blocks");
    }
}

/// Of ten blocks six share rows three apart, and of the four behind them two; of six four two apart, and none behind them.
#[test]
fn a_rows_sums_are_the_same_where_some_blocks_share_rows() {
    for (n, k, grid, distance) in [(1664, 384, 10, 3), (1152, 256, 6, 2)] {
        let problem = Problem::random(Plan::new(Format::Fp8, Epilogue::Raw, n, k), 73);
        let of = |capacity, count| Run::new(capacity, (0..count).collect(), grid);
        assert_eq!(of(128, 100).sharing_distance(&problem.plan), distance);
        let many = run(&problem, &of(128, 100)).output;
        assert_eq!(run(&problem, &of(8, 5)).output, many[..5], "{distance} apart");
    }
}

/// Tiles of up to seven parts, whose blocks end in any order.
#[test]
fn the_order_in_which_blocks_end_changes_no_bit() {
    let problem = Problem::random(Plan::new(Format::Fp8, Epilogue::Raw, 128, 896), 80);
    let all = |schedule| Run { schedule, ..Run::new(8, (0..8).collect(), 13) };
    let expected = run(&problem, &all(Schedule::PLAIN)).output;
    for seed in 0..60 {
        let found = run(&problem, &all(Schedule::seeded(seed))).output;
        assert_eq!(found, expected, "seed {seed}");
    }
}
