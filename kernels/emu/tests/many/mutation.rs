//! Each thing that keeps the threads of these kernels in order is needed: without it results are wrong, the machine
//! stops the kernel, or the race detector finds a race. With all of them there is none.

use crate::image::Random;
use crate::run::{put, read};
use crate::written::{Layout, Written, code_of};
use spec_core::testing::cuda::device::{Pod, bytes_of};
use spec_core::testing::cuda::model::many_params::{
    FinishParams, NormaliseParams, Operand, QuantiseParams, UnpackParams,
};
use spec_core::testing::cuda::model::params::Scaling;
use spec_core::testing::cuda::model::{OPERAND_SHARED_BYTES, ROW_THREADS};
use spec_emu::{Arena, Launch, Mutation, Options, Program, Schedule};
use spec_kernels::Format;
use std::slice;

const ROWS: usize = 5;
const WIDTH: usize = 1152;
const VARIANTS: [&str; 4] =
    ["unpack.WEIGHT=FP8", "finish.EPILOGUE=RESIDUAL", "normalise", "quantise"];
/// A kernel waits for the one before, or does so when it is done, which the machine cannot know to be too late.
const WAIT: &str = "    grid_wait();\n";
const LATE: &str = "    struct AtTheEnd { ~AtTheEnd() { grid_wait(); } } at_the_end;\n";
/// Of a packed matrix.
const UNITS: usize = 4;
const UNIT_BYTES: usize = 8192;

/// A matrix takes the place of another, sums go to the residual stream twice, which is normalised and then quantised:
/// each while the kernel before may still run.
struct Chain {
    arena: Arena,
    unpack: [UnpackParams; 2],
    finish: FinishParams,
    normalise: NormaliseParams,
    quantise: QuantiseParams,
    written: Written,
}

impl Chain {
    fn new() -> Self {
        let (arena, random) = (Arena::new(1 << 26), &mut Random(1));
        let written = Written::new(&arena, Format::Fp8, ROWS, WIDTH, Layout::RowAfterRow);
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
        let halves = Written::new(&arena, Format::Fp16, ROWS, WIDTH, Layout::RowAfterRow);
        let normalise = NormaliseParams {
            row_index: 0,
            input: residual,
            squares,
            weight: put(&arena, &random.floats(WIDTH, |x| 1.0 + 0.5 * x)),
            output: halves.params,
            eps: 1e-5,
            num_rows: ROWS as u32,
            k: WIDTH as u32,
            unused: 0,
        };
        let (num_rows, k) = (ROWS as u32, WIDTH as u32);
        let (input, output) = (halves.params.values, written.params);
        let quantise = QuantiseParams { input, output, num_rows, k };
        let place = arena.put(&[0; UNITS * UNIT_BYTES]);
        let unpack = [0x11, 0x22].map(|byte| UnpackParams {
            weights: arena.put(&[byte; UNITS * UNIT_BYTES]),
            output: place,
            num_units: UNITS as u32,
            k_units: 2,
            format: code_of(Format::Fp8),
            unused: 0,
        });
        Self { arena, unpack, finish, normalise, quantise, written }
    }

    /// What the kernels leave behind, or what went wrong.
    fn run(&self, program: &Program, schedule: &Schedule) -> Result<Vec<u8>, String> {
        let launch = |idx: usize, params| Launch {
            variant: VARIANTS[idx],
            grid: 2,
            block: ROW_THREADS,
            shared_bytes: if idx == 0 { 0 } else { OPERAND_SHARED_BYTES },
            params,
            overlap: true,
            ..Launch::default()
        };
        let [first, second] = &self.unpack;
        let launches = [
            launch(0, one(first)),
            launch(0, one(second)),
            launch(1, one(&self.finish)),
            launch(1, one(&self.finish)),
            launch(2, one(&self.normalise)),
            launch(3, one(&self.quantise)),
        ];
        program.run(&self.arena, &launches, schedule)?;
        let Operand { values, scales, .. } = self.written.params;
        let parts =
            [(values, ROWS * WIDTH), (scales, ROWS * 4), (first.output, UNITS * UNIT_BYTES)];
        Ok(parts.map(|(address, len)| read(&self.arena, address, len)).concat())
    }
}

/// The bytes of a kernel's parameter.
fn one<P: Pod>(params: &P) -> &[u8] {
    bytes_of(slice::from_ref(params))
}

/// What the first of some schedules says about a program.
fn find(options: &Options<'_>, expected: &[u8]) -> Option<String> {
    let program = Program::build(&VARIANTS, options).expect("builds");
    (0..if options.races { 3 } else { 12 }).find_map(|seed| {
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
    for races in [false, true] {
        assert_eq!(find(&Options { races, mutation: None }, &expected()), None, "races: {races}");
    }
}

#[test]
fn what_keeps_threads_in_order_is_needed() {
    let expected = expected();
    for (name, file, text, replacement) in [
        (
            "no barrier before parts are replaced",
            "prefill/operand.cuh",
            "    barrier_all();\n    if (lane_index() == 0) {",
            "    if (lane_index() == 0) {",
        ),
        (
            "no barrier before parts are read",
            "prefill/operand.cuh",
            "    barrier_all();\n    float total",
            "    float total",
        ),
        ("a late wait for the matrix before", "prefill/unpack.cu", WAIT, LATE),
        ("a late wait for the residual stream", "prefill/finish.cu", WAIT, LATE),
        ("a late wait for the sums of squares", "prefill/normalise.cu", WAIT, LATE),
        ("a late wait for the halves", "prefill/quantise.cu", WAIT, LATE),
        ("a sum of squares lacks lanes", "common/squares.cuh", "LANES / 2", "LANES / 4"),
    ] {
        let mutation = Some(Mutation { file, text, replacement });
        let found = find(&Options { races: true, mutation }, &expected);
        assert!(found.is_some(), "{name} is not found out");
    }
}
