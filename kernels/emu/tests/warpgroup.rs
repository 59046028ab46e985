//! Products of warpgroups: the bits of a chain of smaller products under every schedule, and a message or a wrong result
//! for every way to use them wrongly.
#![allow(clippy::unwrap_used)]

mod common;

use common::{longs, read_words, words};
use half::f16;
use spec_emu::{Arena, Landing, Launch, Mutation, Options, Program, Schedule, run};

const ROWS: usize = 128;
/// Bytes of a row in one stage of the kernel.
const ROW_BYTES: usize = 128;
const STAGE_BYTES: usize = (ROWS + 256) * ROW_BYTES;

/// How `warpgroup.cu` multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Warps,
    Fragments,
    Shared,
    SharedE4m3,
}

/// Each with the columns that it takes.
const FORMS: [(Form, &[usize]); 4] = [
    (Form::Warps, &[8, 16, 32, 64]),
    (Form::Fragments, &[8, 16, 32, 64]),
    (Form::Shared, &[8, 16, 32, 64, 128, 256]),
    (Form::SharedE4m3, &[128, 256]),
];

/// Operands as a form has them, row after row, and the sums that are there before.
struct Problem {
    form: Form,
    columns: usize,
    row_bytes: usize,
    a: Vec<u8>,
    b: Vec<u8>,
    c: Vec<f32>,
}

impl Problem {
    fn random(form: Form, columns: usize, num_chunks: usize, seed: u64) -> Self {
        let row_bytes = num_chunks * ROW_BYTES;
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            (state >> 40) as f32 / (1 << 22) as f32 - 2.0
        };
        // Any bytes are e4m3, but for the two that are no number.
        let mut operand = |rows: usize| -> Vec<u8> {
            let halves = (0..rows * row_bytes / 2).map(|_| f16::from_f32(next()).to_le_bytes());
            let bytes = halves.flatten();
            match form {
                Form::SharedE4m3 => bytes.map(|byte| byte & 0xbf).collect(),
                _ => bytes.collect(),
            }
        };
        let (a, b) = (operand(ROWS), operand(columns));
        let c = (0..ROWS * columns).map(|_| next() * 9.0).collect();
        Self { form, columns, row_bytes, a, b, c }
    }

    /// Every sum by ascending k, of e4m3 instruction by instruction. Products are exact in f32, so that it does not matter
    /// whether they are fused.
    fn expected(&self) -> Vec<u32> {
        let values = |operand: &[u8]| -> Vec<f32> {
            match self.form {
                Form::SharedE4m3 => operand.iter().map(|&byte| e4m3_value(byte)).collect(),
                _ => operand
                    .as_chunks()
                    .0
                    .iter()
                    .map(|&two| f16::from_le_bytes(two).to_f32())
                    .collect(),
            }
        };
        let (a, b) = (values(&self.a), values(&self.b));
        let k = a.len() / ROWS;
        let sum = |(i, c): (usize, &f32)| {
            let (row, column) = (i / self.columns, i % self.columns);
            let terms = a[row * k..][..k].iter().zip(&b[column * k..][..k]).map(|(a, b)| a * b);
            match self.form {
                Form::SharedE4m3 => terms.collect::<Vec<_>>().chunks(32).fold(*c, aligned_sum),
                _ => terms.fold(*c, |sum, term| sum + term),
            }
            .to_bits()
        };
        self.c.iter().enumerate().map(sum).collect()
    }

    /// Bits of the sums that a runner comes to.
    fn run(&self, runner: Runner, schedule: &Schedule) -> Result<Vec<u32>, String> {
        let arena = Arena::new(1 << 22);
        let c: Vec<u32> = self.c.iter().map(|c| c.to_bits()).collect();
        let c = arena.put(&words(&c));
        let sizes = [self.row_bytes as u32, self.columns as u32, self.form as u32, 0];
        let params = [longs(&[arena.put(&self.a), arena.put(&self.b), c]), words(&sizes)].concat();
        let launched = Launch {
            variant: "warpgroup",
            grid: 1,
            block: 256,
            shared_bytes: 2 * STAGE_BYTES as u32,
            params: &params,
            ..Launch::default()
        };
        runner(&arena, &[launched], schedule)?;
        Ok(read_words(&arena, c, self.c.len()))
    }
}

/// All terms in units of a 2^13th of the largest one's first bit, cut to whole ones.
fn aligned_sum(before: f32, terms: &[f32]) -> f32 {
    let all = || terms.iter().chain([&before]).map(|&term| f64::from(term));
    let largest = all().fold(0.0, |largest: f64, term| largest.max(term.abs()));
    let unit = largest.log2().floor().exp2() / 8192.0;
    (all().map(|term| (term / unit).trunc()).sum::<f64>() * unit) as f32
}

/// Four bits of exponent, biased by 7, three of fraction.
fn e4m3_value(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude = match exponent {
        0 => fraction * 2f32.powi(-6),
        _ => (1.0 + fraction) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Runs launches, in this process or in a program of its own.
type Runner<'a> = &'a dyn Fn(&Arena, &[Launch], &Schedule) -> Result<(), String>;

fn here(_: &Arena, launches: &[Launch], schedule: &Schedule) -> Result<(), String> {
    run(launches, schedule)
}

fn schedules(num_seeds: u64) -> impl Iterator<Item = Schedule> {
    let landings = [Landing::AtOnce, Landing::AnyTime, Landing::AtTheEnd];
    let plain = landings.into_iter().map(|landing| Schedule { landing, ..Schedule::PLAIN });
    plain.chain((0..num_seeds).map(Schedule::seeded))
}

#[test]
fn products_have_the_bits_of_their_sums_in_order_under_every_schedule() {
    for (form, all_columns) in FORMS {
        for &columns in all_columns {
            let problem = Problem::random(form, columns, 3, columns as u64);
            let expected = problem.expected();
            for schedule in schedules(6) {
                let sums = problem.run(&here, &schedule).unwrap();
                assert!(sums == expected, "{form:?}, {columns} columns, {schedule:?}");
            }
        }
    }
}

/// A change to the kernel, and what comes of it: a message, or other sums.
const MUTANTS: [(&str, &str, Option<&str>); 8] = [
    ("    warpgroup_fence();\n", "", Some("without a warpgroup_fence since the last commit")),
    ("    warpgroup_commit();\n", "", Some("ends before")),
    ("    warpgroup_wait<0>();\n", "", Some("ends before")),
    // The next stage but one is written while products read it.
    ("    warpgroup_wait<1>();\n", "", None),
    (
        "matrix_descriptor(first + A_BYTES, ATOM_BYTES)",
        "matrix_descriptor(first + A_BYTES, 0)",
        None,
    ),
    ("offset ^ (offset >> 3 & 0x70u)", "offset", None),
    (
        "matrix_descriptor(first + A_BYTES, ATOM_BYTES)",
        "matrix_descriptor(first + A_BYTES, 1u << 17)",
        Some("bytes of shared memory"),
    ),
    (
        "    warpgroup_commit();\n",
        "    if (warp_index() > 0) {\n        warpgroup_fence();\n        wgmma_f16<N>(c, a[0], matrix_descriptor(stage + A_BYTES, ATOM_BYTES));\n    }\n    warpgroup_commit();\n",
        Some("of its warpgroup"),
    ),
];

#[test]
fn what_is_wrong_is_told_or_gives_other_sums() {
    let problem = Problem::random(Form::Fragments, 16, 4, 5);
    let expected = problem.expected();
    for (text, replacement, message) in MUTANTS {
        let mutation = Some(Mutation { file: "warpgroup.cu", text, replacement });
        let program = Program::build(&["warpgroup"], &Options { races: false, mutation }).unwrap();
        let there = |arena: &Arena, launches: &[Launch], schedule: &Schedule| {
            program.run(arena, launches, schedule)
        };
        let found = schedules(10).find_map(|schedule| match problem.run(&there, &schedule) {
            Ok(sums) => (sums != expected).then_some(None),
            Err(error) => Some(Some(error)),
        });
        match (found, message) {
            (Some(None), None) => (),
            (Some(Some(error)), Some(message)) if error.contains(message) => (),
            (found, _) => panic!("{text} -> {replacement}: {found:?}"),
        }
    }
}
