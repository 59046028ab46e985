//! Each thing that keeps the threads of these kernels in order is needed: without it results are wrong, the machine
//! stops the kernel, or ThreadSanitizer finds a race. With all of them there is none.

use crate::image::Random;
use crate::run::{put, read};
use crate::written::Written;
use spec_core::exec::cuda::many_params::{FinishParams, NormaliseParams, Operand};
use spec_core::exec::cuda::params::Scaling;
use spec_core::exec::cuda::plain::bytes_of;
use spec_core::exec::cuda::shape::{OPERAND_SHARED_BYTES, ROW_THREADS};
use spec_emu::{Arena, Launch, Mutation, Options, Program, Schedule};
use spec_kernels::Format;

const ROWS: usize = 5;
const WIDTH: usize = 1152;
const VARIANTS: [&str; 2] = ["finish.EPILOGUE=RESIDUAL", "normalise"];

/// Sums go to the residual stream, which is normalised while the kernel before may still run.
struct Chain {
    arena: Arena,
    finish: FinishParams,
    normalise: NormaliseParams,
    written: Written,
}

impl Chain {
    fn new() -> Self {
        let (arena, random) = (Arena::new(1 << 26), &mut Random(1));
        let written = Written::new(&arena, Format::Fp8, ROWS, WIDTH);
        let residual = put(&arena, &random.floats(ROWS * WIDTH, |x| x));
        let squares = put(&arena, &[0.0; ROWS * WIDTH / 64]);
        let finish = FinishParams {
            sums: put(&arena, &random.floats(ROWS * WIDTH, |x| 3.0 * x)),
            scaling: Scaling::default(),
            residual,
            squares,
            output: Operand::default(),
            num_rows: ROWS as u32,
            n: WIDTH as u32,
        };
        let normalise = NormaliseParams {
            input: residual,
            squares,
            weight: put(&arena, &random.floats(WIDTH, |x| 1.0 + 0.5 * x)),
            output: written.params,
            eps: 1e-5,
            num_rows: ROWS as u32,
            k: WIDTH as u32,
            unused: 0,
        };
        Self { arena, finish, normalise, written }
    }

    /// What the kernels leave behind, or what went wrong.
    fn run(&self, program: &Program, schedule: &Schedule) -> Result<Vec<u8>, String> {
        let (finish, normalise) = ([self.finish], [self.normalise]);
        let launch = |idx: usize, params| Launch {
            variant: VARIANTS[idx],
            grid: 2,
            block: ROW_THREADS,
            shared_bytes: OPERAND_SHARED_BYTES,
            params,
            overlap: true,
            ..Launch::default()
        };
        let launches = [launch(0, bytes_of(&finish)), launch(1, bytes_of(&normalise))];
        program.run(&self.arena, &launches, schedule)?;
        let scales = read(&self.arena, self.written.params.scales, ROWS * 4);
        Ok([read(&self.arena, self.written.params.values, ROWS * WIDTH), scales].concat())
    }
}

/// What the first of some schedules says about a program.
fn find(options: &Options<'_>, expected: &[u8]) -> Option<String> {
    let program = Program::build(&VARIANTS, options).expect("builds");
    (0..if options.tsan { 3 } else { 12 }).find_map(|seed| {
        match Chain::new().run(&program, &Schedule::seeded(seed)) {
            Ok(found) if found == expected => None,
            Ok(_) => Some(format!("other results with seed {seed}")),
            Err(message) => Some(message),
        }
    })
}

fn expected() -> Vec<u8> {
    let program = Program::build(&VARIANTS, &Options::default()).expect("builds");
    Chain::new().run(&program, &Schedule::PLAIN).expect("runs")
}

#[test]
fn the_kernels_as_they_are_have_no_race() {
    for tsan in [false, true] {
        assert_eq!(find(&Options { tsan, mutation: None }, &expected()), None, "tsan: {tsan}");
    }
}

#[test]
fn what_keeps_threads_in_order_is_needed() {
    let expected = expected();
    for (name, file, text, replacement) in [
        (
            "no barrier before parts are replaced",
            "operand.cuh",
            "    barrier_all();\n    if (lane_index() == 0) {",
            "    if (lane_index() == 0) {",
        ),
        (
            "no barrier before parts are read",
            "operand.cuh",
            "    barrier_all();\n    float total",
            "    float total",
        ),
        ("no wait for the kernel before", "normalise.cu", "    grid_wait();\n", ""),
        ("a sum of squares lacks lanes", "squares.cuh", "LANES / 2", "LANES / 4"),
    ] {
        let mutation = Some(Mutation { file, text, replacement });
        let found = find(&Options { tsan: true, mutation }, &expected);
        assert!(found.is_some(), "{name} is not found out");
    }
}
