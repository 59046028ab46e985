//! The machine runs kernels under every schedule alike, and says what is wrong with one that is not right.

#![allow(clippy::unwrap_used)]

mod common;

use common::{longs, read_words, words};
use spec_emu::{Arena, Landing, Launch, Mutation, Options, Program, Schedule, launch, run};

const SEEDS: u64 = 60;

/// Runs `launches`, in this process or in a program of its own.
type Runner<'a> = &'a dyn Fn(&Arena, &[Launch], &Schedule) -> Result<(), String>;

fn here(_: &Arena, launches: &[Launch], schedule: &Schedule) -> Result<(), String> {
    run(launches, schedule)
}

fn all_landings() -> impl Iterator<Item = Schedule> {
    [Landing::AtOnce, Landing::AnyTime, Landing::AtTheEnd]
        .into_iter()
        .map(|landing| Schedule { landing, ..Schedule::PLAIN })
}

/// Whether the ring adds up right: `Ok(false)` is a wrong result.
fn ring(variant: &str, run: Runner, schedule: &Schedule) -> Result<bool, String> {
    const UNITS: usize = 13;
    let arena = Arena::new(1 << 20);
    let input: Vec<u32> = (0..128 * UNITS as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let sums = arena.alloc(2 * 64 * 4);
    let params = [longs(&[arena.put(&words(&input)), sums]), words(&[UNITS as u32, 0])].concat();
    let shared_bytes = 2 * 512 + 4 * 8;
    let launch =
        Launch { variant, grid: 2, block: 96, shared_bytes, params: &params, ..Launch::default() };
    run(&arena, &[launch], schedule)?;
    let expected: Vec<u32> = (0..128)
        .map(|i| {
            let of_unit = |unit: usize| {
                input[unit * 128 + i % 64].wrapping_add(input[unit * 128 + i % 64 + 64])
            };
            (0..UNITS).map(of_unit).fold(0, u32::wrapping_add)
        })
        .collect();
    Ok(read_words(&arena, sums, 128) == expected)
}

/// Whether a chain of overlapping launches counts right.
fn shift(run: Runner, schedule: &Schedule) -> Result<bool, String> {
    chain(run, schedule, true)
}

fn chain(run: Runner, schedule: &Schedule, overlap: bool) -> Result<bool, String> {
    const BLOCKS: usize = 3;
    const LAUNCHES: usize = 6;
    let arena = Arena::new(1 << 20);
    let start: Vec<u32> = (0..64 * BLOCKS as u32).map(|i| i * i).collect();
    let buffers = [arena.put(&words(&start)), arena.alloc(start.len() * 4)];
    let params: Vec<_> =
        (0..LAUNCHES).map(|i| longs(&[buffers[i % 2], buffers[(i + 1) % 2]])).collect();
    let launches: Vec<_> = params
        .iter()
        .map(|params| Launch {
            variant: "shift",
            grid: BLOCKS as u32,
            block: 64,
            shared_bytes: 256,
            params,
            overlap,
            max_resident: 2,
        })
        .collect();
    run(&arena, &launches, schedule)?;
    let expected: Vec<u32> = (0..start.len())
        .map(|i| {
            let (block, thread) = (i / 64 + LAUNCHES, i % 64 + LAUNCHES);
            start[block % BLOCKS * 64 + thread % 64] + LAUNCHES as u32
        })
        .collect();
    Ok(read_words(&arena, buffers[LAUNCHES % 2], start.len()) == expected)
}

/// Whether the last block sees all parts, in two launches that share the counter: the second must find
/// it as the first has left it, and so must not begin before.
fn handover(run: Runner, schedule: &Schedule) -> Result<bool, String> {
    const BLOCKS: u32 = 5;
    let arena = Arena::new(1 << 20);
    let arrivals = arena.put(&words(&[0]));
    let sums = [arena.alloc(256), arena.alloc(256)];
    let params = sums.map(|sums| longs(&[arena.alloc(BLOCKS as usize * 256), arrivals, sums]));
    let launches = params.each_ref().map(|params| Launch {
        variant: "handover",
        grid: BLOCKS,
        block: 64,
        shared_bytes: 16,
        params,
        ..Launch::default()
    });
    run(&arena, &launches, schedule)?;
    let total: u32 = (0..BLOCKS).sum();
    let expected: Vec<u32> = (0..64).map(|i| ((total * i) as f32).to_bits()).collect();
    let right = sums.iter().all(|sums| read_words(&arena, *sums, 64) == expected);
    Ok(right && read_words(&arena, arrivals, 1) == [0])
}

/// Whether many threads add right, one launch behind another.
fn neighbours(run: Runner, schedule: &Schedule) -> Result<bool, String> {
    const BLOCKS: usize = 70;
    const LAUNCHES: usize = 3;
    let arena = Arena::new(1 << 20);
    let mut expected: Vec<u8> = (0..64 * BLOCKS).map(|i| (i * i) as u8).collect();
    let bytes = arena.put(&expected);
    let params = longs(&[bytes]);
    let launch = Launch {
        variant: "neighbours",
        grid: BLOCKS as u32,
        block: 64,
        params: &params,
        ..Launch::default()
    };
    run(&arena, &[launch; LAUNCHES], schedule)?;
    for _ in 0..LAUNCHES {
        for block in expected.chunks_exact_mut(64) {
            let before = block.to_vec();
            for (idx, byte) in block.iter_mut().enumerate() {
                *byte = before[idx].wrapping_add(before[(idx + 1) % 64]).wrapping_add(2);
            }
        }
    }
    let mut found = vec![0; expected.len()];
    arena.read(bytes, &mut found);
    Ok(found == expected)
}

#[test]
fn a_ring_gives_the_same_sums_under_every_schedule() {
    for variant in ["ring", "ring@sm_80"] {
        for schedule in (0..SEEDS).map(Schedule::seeded).chain(all_landings()) {
            assert_eq!(ring(variant, &here, &schedule), Ok(true), "{variant} {schedule:?}");
        }
    }
}

#[test]
fn overlapping_launches_see_what_the_one_before_wrote() {
    for schedule in (0..SEEDS).map(Schedule::seeded).chain(all_landings()) {
        assert_eq!(shift(&here, &schedule), Ok(true), "{schedule:?}");
    }
}

#[test]
fn launches_that_do_not_overlap_need_no_wait() {
    let without = Mutation { file: "shift.cu", text: "    grid_wait();\n", replacement: "" };
    let options = Options { mutation: Some(without), ..Options::default() };
    let program = Program::build(&["shift"], &options).unwrap();
    let run = |arena: &Arena, launches: &[Launch], schedule: &Schedule| {
        program.run(arena, launches, schedule)
    };
    for schedule in (0..20).map(Schedule::seeded) {
        assert_eq!(chain(&run, &schedule, false), Ok(true), "{schedule:?}");
    }
}

#[test]
fn the_last_block_sees_all_parts() {
    for schedule in (0..SEEDS).map(Schedule::seeded).chain(all_landings()) {
        assert_eq!(handover(&here, &schedule), Ok(true), "{schedule:?}");
    }
}

#[test]
fn more_blocks_than_are_resident_run_one_after_the_other() {
    const BLOCKS: usize = 70;
    for max_resident in [1, 3, 16] {
        let arena = Arena::new(1 << 20);
        let sums = arena.alloc(BLOCKS * 4);
        let params = longs(&[sums]);
        let launched = Launch {
            variant: "wide",
            grid: BLOCKS as u32,
            block: 1024,
            shared_bytes: 128,
            params: &params,
            overlap: false,
            max_resident,
        };
        launch(&launched, &Schedule::seeded(max_resident.into())).unwrap();
        let expected: Vec<u32> = (0..BLOCKS as u32).map(|b| 1023 * 512 + 1024 * b).collect();
        assert_eq!(read_words(&arena, sums, BLOCKS), expected);
    }
}

#[test]
fn a_seed_repeats_itself_to_the_bit() {
    let spoiled = Mutation { file: "shift.cu", text: "    barrier_all();\n", replacement: "" };
    let options = Options { mutation: Some(spoiled), ..Options::default() };
    let program = Program::build(&["shift"], &options).unwrap();
    let run = |arena: &Arena, launches: &[Launch], schedule: &Schedule| {
        program.run(arena, launches, schedule)
    };
    for seed in 0..6 {
        let schedule = Schedule::seeded(seed);
        assert_eq!(shift(&run, &schedule), shift(&run, &schedule));
    }
}

/// What the machine says about one of the mistakes of `fault.cu`.
fn fault(number: u32) -> String {
    let arena = Arena::new(1 << 20);
    let (global, flag) = (arena.alloc(4096), arena.put(&words(&[0; 2])));
    let params = [longs(&[global, flag]), words(&[number, 0])].concat();
    let first = Launch {
        variant: "fault",
        grid: 1,
        block: 64,
        shared_bytes: 4096,
        params: &params,
        overlap: true,
        max_resident: 0,
    };
    // No mistake, but early for the one that is a mistake behind another that is early.
    let right = if number == 32 { 33 } else { 0 };
    let right = [longs(&[global, flag]), words(&[right, 0])].concat();
    let before = Launch { params: &right, ..first };
    let messages: Vec<_> =
        [Schedule::PLAIN, Schedule { landing: Landing::AtTheEnd, ..Schedule::PLAIN }]
            .iter()
            .filter_map(|schedule| run(&[before, first], schedule).err())
            .collect();
    // The machine lives.
    launch(&before, &Schedule::seeded(1)).unwrap();
    messages.last().cloned().unwrap_or_default()
}

#[test]
fn every_mistake_has_a_message() {
    let expected = [
        (
            1,
            "deadlock: 32 threads wait for ever; kernel fault: block 0 thread 0 in barrier_all (0, 64)",
        ),
        (2, "thread 32: barrier_named(1, 32) while others wait with a count of 64"),
        (3, "barrier_named(1, 40) in a block of 64 threads"),
        (4, "the mbarrier at 8 of block 0 is not initialised, or was written over"),
        (5, "more than 2 arrivals in a phase of the mbarrier at 0"),
        (6, "64 threads wait for ever; kernel fault: block 0 thread 0 in mbar_wait (0, 0)"),
        (7, "an mbarrier at 4 of 4096 bytes of shared memory"),
        (10, "bulk_copy of 16 bytes from"),
        (11, "bulk_copy of 16 bytes to 4096 of 4096 bytes of shared memory"),
        (12, "all must be multiples of 16"),
        (13, "the block ended while 1 of its copies were under way"),
        (14, "async_copy16 of 16 bytes from"),
        (15, "async_copy16 of 16 bytes to -16 of 4096 bytes of shared memory"),
        (20, " while other lanes of the warp are in "),
        (21, "62 threads wait for ever; kernel fault: block 0 thread 0 in shuffle_xor"),
        (22, " of 4096 bytes of shared memory"),
        (23, "load_matrix_x4 at 4096 of 4096 bytes"),
        (
            24,
            "64 threads wait for ever; kernel fault: block 0 thread 0 in a loop that reads memory",
        ),
        (25, "the block wrote at 4101 of its 4096 bytes of shared memory"),
        (26, "its stack is too small for this kernel"),
        (27, "an atomic update of the misaligned address"),
        (28, "touches the address 0x"),
        (29, "a division by zero"),
        (30, "the block ended without grid_wait, but its launch overlaps the one before"),
        (31, "grid_launch_dependents without grid_wait"),
        (32, "grid_launch_dependents_early behind another: four kernels would run at a time"),
    ];
    assert_eq!(fault(0), "");
    for (number, part) in expected {
        let message = fault(number);
        assert!(message.contains("kernel fault: block 0 thread"), "{number}: {message}");
        assert!(message.contains(part), "{number}: {message}");
    }
}

#[test]
fn a_write_past_an_allocation_is_found() {
    let arena = Arena::new(1 << 20);
    let buffers = [arena.put(&words(&[1; 64])), arena.alloc(63 * 4)];
    let params = longs(&buffers);
    let launched = Launch {
        variant: "shift",
        grid: 1,
        block: 64,
        shared_bytes: 256,
        params: &params,
        ..Launch::default()
    };
    launch(&launched, &Schedule::PLAIN).unwrap();
    let message = arena.check().unwrap_err();
    assert!(message.contains("a write 0 bytes past the allocation ending at 0x"), "{message}");
}

#[test]
fn a_launch_that_does_not_fit_its_kernel_is_refused() {
    let good =
        Launch { variant: "shift", grid: 1, block: 64, params: &[0; 16], ..Launch::default() };
    let refused = [
        (Launch { variant: "swift", ..good }, "no kernel is called swift"),
        (
            Launch { block: 96, ..good },
            "kernel shift: launched with blocks of 96 threads, takes 64",
        ),
        (Launch { grid: 0, ..good }, "kernel shift: launched with no blocks"),
        (
            Launch { params: &[0; 8], ..good },
            "kernel shift: launched with 8 bytes of arguments, takes 16",
        ),
    ];
    for (launched, message) in refused {
        assert_eq!(launch(&launched, &Schedule::PLAIN), Err(message.into()));
    }
}

/// How a mutated kernel gives itself away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    Wrong,
    Message,
    Race,
}

/// A test: whether the result is right, by a runner under a schedule.
type Check<'a> = &'a dyn Fn(Runner, &Schedule) -> Result<bool, String>;

/// The signs that a program gives under some schedules.
fn signs(program: &Program, check: Check, num_seeds: u64) -> Vec<Sign> {
    let run = |arena: &Arena, launches: &[Launch], schedule: &Schedule| {
        program.run(arena, launches, schedule)
    };
    let sign = |seed| match check(&run, &Schedule::seeded(seed)) {
        Ok(true) => None,
        Ok(false) => Some(Sign::Wrong),
        Err(message) if message.starts_with("race:") => Some(Sign::Race),
        Err(message) if message.starts_with("kernel") || message.starts_with("deadlock") => {
            Some(Sign::Message)
        }
        Err(message) => panic!("{message}"),
    };
    (0..num_seeds).filter_map(sign).collect()
}

/// What both kinds of programs of a kernel, with a change or none, give away under some schedules.
fn found(variant: &str, check: Check, mutation: Option<Mutation>) -> Vec<Sign> {
    let plain = Program::build(&[variant], &Options { races: false, mutation }).unwrap();
    let watched = Program::build(&[variant], &Options { races: true, mutation }).unwrap();
    [signs(&plain, check, 18), signs(&watched, check, 3)].concat()
}

/// Each change gives all the signs that belong to it.
fn expect(variant: &str, check: Check, file: &str, broken: &[(&str, &str, &[Sign])]) {
    for (text, replacement, expected) in broken {
        let found = found(variant, check, Some(Mutation { file, text, replacement }));
        for sign in *expected {
            assert!(found.contains(sign), "{variant} without {text}: no {sign:?} in {found:?}");
        }
    }
}

#[test]
fn right_kernels_give_no_sign() {
    for variant in ["ring", "ring@sm_80"] {
        assert_eq!(found(variant, &|run, schedule| ring(variant, run, schedule), None), []);
    }
    assert_eq!(found("shift", &shift, None), []);
    assert_eq!(found("handover", &handover, None), []);
    assert_eq!(found("neighbours", &neighbours, None), []);
}

#[test]
fn a_broken_ring_gives_itself_away() {
    for variant in ["ring", "ring@sm_80"] {
        let broken: [(&str, &str, &[Sign]); 6] = [
            ("mbar_wait(&full[stage], unit / NUM_STAGES % 2);", "", &[Sign::Message, Sign::Race]),
            ("mbar_arrive(&empty[stage]);", "", &[Sign::Message]),
            ("        warp_sync();\n", "", &[Sign::Race]),
            ("NUM_CONSUMERS / 32);\n        }", "1);\n        }", &[Sign::Message]),
            ("    barrier_all();\n    grid_wait", "    grid_wait", &[Sign::Message]),
            ("ARCH >= 900 ? 1 : 32", "ARCH >= 900 ? 2 : 31", &[Sign::Message]),
        ];
        expect(variant, &|run, s| ring(variant, run, s), "ring.cu", &broken);
    }
}

#[test]
fn a_broken_chain_gives_itself_away() {
    let early = "    p.to[block_index() * NUM_THREADS + thread_index()] = 0;\n    grid_wait();\n";
    let read = "    words[thread_index()] = p.from[other * NUM_THREADS + thread_index()];\n";
    let (in_order, swapped) =
        (format!("    grid_wait();\n{read}"), format!("{read}    grid_wait();\n"));
    let broken: [(&str, &str, &[Sign]); 4] = [
        ("    barrier_all();\n", "", &[Sign::Wrong, Sign::Race]),
        ("    grid_wait();\n", "", &[Sign::Message]),
        (&in_order, &swapped, &[Sign::Wrong, Sign::Race]),
        ("    grid_wait();\n", early, &[Sign::Wrong, Sign::Race]),
    ];
    expect("shift", &shift, "shift.cu", &broken);
}

#[test]
fn a_broken_handover_gives_itself_away() {
    let barrier = "    barrier_all();\n    if (thread == 0) {\n        *is";
    let broken: [(&str, &str, &[Sign]); 3] = [
        ("atomic_add_acq_rel(", "atomic_add(", &[Sign::Race]),
        (barrier, "    if (thread == 0) {\n        *is", &[Sign::Wrong, Sign::Race]),
        ("        *p.arrivals = 0;\n", "", &[Sign::Wrong]),
    ];
    expect("handover", &handover, "handover.cu", &broken);
}

#[test]
fn neighbours_out_of_step_give_themselves_away() {
    let barrier = "    barrier_all();\n";
    let next = "    const uint8_t next = bytes[(thread_index() + 1) % NUM_THREADS];\n";
    let (behind, before) = (format!("{barrier}{next}"), format!("{next}{barrier}"));
    let broken: [(&str, &str, &[Sign]); 4] = [
        (&behind, next, &[Sign::Wrong, Sign::Race]),
        (&before, next, &[Sign::Wrong, Sign::Race]),
        ("block_index() * NUM", "block_index() / 2 * NUM", &[Sign::Wrong, Sign::Race]),
        ("bytes[thread_index()]++", "bytes[thread_index() / 2 * 2]++", &[Sign::Race]),
    ];
    expect("neighbours", &neighbours, "neighbours.cu", &broken);
}

#[test]
fn a_race_is_told_with_both_threads_and_their_lines() {
    let (text, replacement) = ("block_index() * NUM_THREADS", "0");
    let mutation = Some(Mutation { file: "neighbours.cu", text, replacement });
    let program = Program::build(&["neighbours"], &Options { races: true, mutation }).unwrap();
    let run = |arena: &Arena, launches: &[Launch], schedule: &Schedule| {
        program.run(arena, launches, schedule)
    };
    let message = neighbours(&run, &Schedule::PLAIN).unwrap_err();
    for part in ["race: nothing orders", "wrote it at neighbours.cu:16; block"] {
        assert!(message.contains(part), "no `{part}` in {message}");
    }
}
