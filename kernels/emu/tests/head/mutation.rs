//! What these tests would notice: the kernel broken in one place at a time, and the race detector's word that the whole one has
//! no race.

use crate::image::Random;
use crate::run::{put, read};
use spec_core::testing::cuda::device::bytes_of;
use spec_core::testing::cuda::model::params::{JoinParams, MOST_PIECES, Piece};
use spec_core::testing::cuda::model::{OPERAND_SHARED_BYTES, ROW_THREADS};
use spec_emu::{Arena, Launch, Mutation, Options, Program, Schedule};
use std::slice;

const ROWS: usize = 5;
const WIDTH: usize = 1152;

/// Rows become rows again: each pass reads what the one before it has kept, while that may still run.
fn run(program: &Program, schedule: &Schedule) -> Result<Vec<u8>, String> {
    let (arena, random) = (Arena::new(1 << 26), &mut Random(1));
    let rows = [0; 3].map(|_| put(&arena, &random.floats(ROWS * WIDTH, |x| x)));
    let norm = put(&arena, &random.floats(WIDTH, |x| 1.0 + 0.5 * x));
    let joined = arena.put(&[0; ROWS * 2 * WIDTH * 2]);
    let pass = |first: u64, second: u64, kept: u64| {
        let piece = |rows| Piece { rows, norm, stride: WIDTH as u32, len: WIDTH as u32 };
        let mut pieces = [Piece::default(); MOST_PIECES];
        (pieces[0], pieces[1]) = (piece(first), piece(second));
        JoinParams {
            pieces,
            joined,
            kept,
            eps: 1e-5,
            num_rows: ROWS as u32,
            num_pieces: 2,
            keeps_normed: 1,
            ..JoinParams::default()
        }
    };
    let passes = [
        pass(rows[0], rows[1], rows[0]),
        pass(rows[0], rows[0], rows[2]),
        pass(rows[2], rows[0], rows[1]),
    ];
    let launch = |params| Launch {
        variant: "join",
        grid: 2,
        block: ROW_THREADS,
        shared_bytes: OPERAND_SHARED_BYTES,
        params: bytes_of(slice::from_ref(params)),
        overlap: true,
        ..Launch::default()
    };
    program.run(&arena, &passes.each_ref().map(launch), schedule)?;
    let parts = [(joined, ROWS * 2 * WIDTH * 2), (rows[1], ROWS * WIDTH * 4)];
    Ok(parts.map(|(address, len)| read(&arena, address, len)).concat())
}

fn whole() -> Vec<u8> {
    let program = Program::build(&["join"], &Options::default()).expect("builds");
    run(&program, &Schedule::PLAIN).expect("the whole kernel runs")
}

/// What the first of some schedules says about a program.
fn find(options: &Options<'_>, expected: &[u8]) -> Option<String> {
    let program = Program::build(&["join"], options).expect("builds");
    (0..if options.races { 3 } else { 12 }).find_map(|seed| {
        match run(&program, &Schedule::seeded(seed)) {
            Ok(found) if found == expected => None,
            Ok(_) => Some(format!("other results with seed {seed}")),
            Err(message) => Some(message),
        }
    })
}

#[test]
fn the_kernel_as_it_is_has_no_race() {
    for races in [false, true] {
        assert_eq!(find(&Options { races, mutation: None }, &whole()), None, "races: {races}");
    }
}

#[test]
fn what_keeps_threads_in_order_is_needed() {
    let expected = whole();
    for (name, text, replacement) in [
        (
            "no barrier before parts are replaced",
            "    barrier_all();\n    if (lane_index() == 0) {",
            "    if (lane_index() == 0) {",
        ),
        (
            "no barrier before parts are read",
            "    barrier_all();\n    float total",
            "    float total",
        ),
        (
            "a late wait for the rows before",
            "    grid_wait();\n",
            "    struct AtTheEnd { ~AtTheEnd() { grid_wait(); } } at_the_end;\n",
        ),
        ("a square is left out", "warp < WARPS", "warp < WARPS - 1"),
    ] {
        let mutation = Some(Mutation { file: "head/join.cu", text, replacement });
        let found = find(&Options { races: true, mutation }, &expected);
        assert!(found.is_some(), "{name} is not found out");
    }
}
