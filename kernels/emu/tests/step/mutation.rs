//! Kernels that are broken on purpose are noticed: missing barriers by the race detector or by the machine,
//! wrong rules by the statistics that the right ones pass.

use crate::chi_square::ALPHA;
use crate::device::Run;
use crate::exact::{VOCABS, random_step};
use crate::lossless::unlike;
use spec_core::sampling::SamplingParams;
use spec_emu::{Mutation, Options, Program, Schedule};

/// Sequences of a step.
const BATCH: usize = 2;

/// Steps in which a race must show.
const STEPS: u64 = 24;

/// Trials in which a wrong rule must show.
const TRIALS: u64 = 2_000;

/// Waits that no kernel can do without: what begins with one, as it stands in a file.
const WAITS: [(&str, &str); 14] = [
    ("sample/block.cuh", "    barrier_all();\n    return warp_sum"),
    ("sample/block.cuh", "    barrier_all();\n    // The first"),
    ("sample/select.cuh", "        barrier_all();\n        find_bin("),
    ("sample/select.cuh", "        barrier_all();\n        if (!reached.any) {"),
    ("sample/list.cuh", "    barrier_all();\n    return scratch.num_listed"),
    ("sample/race.cuh", "    barrier_all();\n}"),
    ("sample/slice.cuh", "    barrier_all();\n}\n\nDEVICE Scored better_of_four"),
    ("sample/parts.cuh", "    barrier_all();\n    return *told"),
    ("sample/edit.cuh", "    barrier_all();\n    ban_all"),
    ("sample/edit.cuh", "    barrier_all();\n    // Only the"),
    ("sample/sample.cu", "    barrier_all();\n    if (thread_index() == 0 && token == NO_TOKEN) {"),
    ("sample/sample.cu", "        barrier_all();\n    }\n}\n\n// Puts the listed"),
    ("sample/sample.cu", "    grid_wait();\n    grid_launch_dependents();"),
    ("step/accept.cu", "    grid_wait();\n    grid_launch_dependents();"),
];

fn watched(mutation: Option<Mutation<'_>>) -> Program {
    let options = Options { races: true, mutation };
    Program::build(&["rows", "sample_small", "accept"], &options).unwrap()
}

/// Random steps under random schedules, until one goes wrong.
fn first_error(program: &Program) -> Option<String> {
    (0..STEPS).find_map(|seed| {
        let schedule = Schedule::seeded(seed);
        let run = Run { program: Some(program), schedule, ..Run::SMALL };
        random_step(4_000 + seed, &VOCABS[3..5], BATCH, run).err()
    })
}

#[test]
fn nothing_races() {
    assert_eq!(first_error(&watched(None)), None);
}

#[test]
fn wrong_rules_fail_the_test_that_the_right_one_passes() {
    let params = SamplingParams { temperature: 1.0, ..Default::default() };
    let p_value = |mutation| {
        let options = Options { races: false, mutation };
        let program = Program::build(&["rows", "sample_warp", "accept"], &options).unwrap();
        let run = Run { program: Some(&program), ..Run::WARP };
        unlike(params.clone()).p_value(run, TRIALS)
    };
    assert!(p_value(None) >= ALPHA);
    let rules = [
        ("no residual", "left.is_less = true;", "left.is_less = false;"),
        ("a wrong q", "+ log(q(token))", "+ 0.8 * log(q(token))"),
        (
            "the drafter's noise twice",
            "is_path ? TARGET_LANE : DRAFT_LANE",
            "is_path ? TARGET_LANE : TARGET_LANE",
        ),
    ];
    for (name, text, replacement) in rules {
        let p = p_value(Some(Mutation { file: "sample/sample.cu", text, replacement }));
        assert!(p < ALPHA, "{name} went unnoticed: p = {p}");
    }
}

/// What a change of the kernels or of the emulator alone can break: `scripts/check-kernels` runs it.
mod exhaustive {
    use super::{Run, VOCABS, WAITS, first_error, random_step, watched};
    use spec_emu::{Mutation, Options, Program};

    #[test]
    fn missing_waits_are_noticed() {
        for (file, text) in WAITS {
            let (_, replacement) = text.split_once('\n').unwrap();
            let error = first_error(&watched(Some(Mutation { file, text, replacement })));
            let error = error.unwrap_or_else(|| panic!("{file} without the first line of {text}"));
            let is_named = ["race:", "without grid_wait"].iter().any(|name| error.contains(name));
            assert!(is_named, "{file}, {text}: {error}");
        }
    }

    #[test]
    fn unchecked_short_cuts_are_noticed() {
        let checks = [
            (
                "sample/race.cuh",
                "best.id != NO_TOKEN && best.score",
                "best.id != NO_TOKEN || best.score",
            ),
            ("sample/sample.cu", "if (best.score == guess)", "if (best.score <= 1e30)"),
            ("sample/sample.cu", "if (drawn[idx] == id)", "if (drawn[idx] == id + 1)"),
            ("sample/sample.cu", "idx == s.fork_depth ?", "idx == 0 ?"),
            ("sample/sample.cu", "idx == s.fork_depth ?", "idx >= s.fork_depth ?"),
            ("sample/list.cuh", "score == last.score && id > last.id", "score == last.score"),
            ("sample/truncate.cuh", "FLOOR_SLACK = 0.99", "FLOOR_SLACK = 9.0"),
            // A row that has run must not run again, and the next one must.
            ("step/rows.cu", "s.len == 0 || s.has_run ?", "s.len == 0 ?"),
            ("step/accept.cu", "    s.has_run = 0;\n", ""),
            // What masks left in the drafter's cache is no draft's.
            ("step/accept.cu", "params.draft_cache == CACHE_OF_DRAFTS && s", "s"),
        ];
        for (file, text, replacement) in checks {
            let options =
                Options { races: false, mutation: Some(Mutation { file, text, replacement }) };
            let program = Program::build(&["rows", "sample_small", "accept"], &options).unwrap();
            let run = Run { program: Some(&program), ..Run::SMALL };
            let is_noticed = |seed| random_step(seed, &VOCABS[5..], 12, run).is_err();
            assert!((5_000..5_200).any(is_noticed), "{file}: {text}");
        }
    }
}
