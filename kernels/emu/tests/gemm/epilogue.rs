//! Every epilogue in every variant, and its special values.

use crate::image::Random;
use crate::problem::{ALL_ROWS, Plan, Problem};
use crate::run::{Arch, Run, check, run, values};
use crate::twin::some_rows;
use spec_emu::Schedule;
use spec_kernels::{Epilogue, Format};

const FORMATS: [Format; 2] = [Format::Fp8, Format::Fp16];

/// In every capacity and architecture, with rows side by side and looked up.
fn is_right(plan: Plan, seed: u64) {
    let problem = Problem::random(plan, seed);
    let random = &mut Random(seed);
    for arch in Arch::ALL {
        for (i, &capacity) in arch.capacities().iter().enumerate() {
            let picks = some_rows(1 + random.below(capacity), random);
            let schedule = Schedule::seeded(random.below(1000) as u64);
            let run = Run::new(capacity, picks, 1 + random.below(7) as u32);
            let is_indexed = (i + usize::from(arch == Arch::Ampere)) % 2 == 0;
            check(&problem, &Run { arch, schedule, is_indexed, ..run });
        }
    }
}

#[test]
fn queries_turn_and_keys_and_values_go_to_their_pages() {
    for (i, weight) in FORMATS.into_iter().enumerate() {
        for (j, kv) in FORMATS.into_iter().enumerate() {
            let seed = (2 * i + j) as u64;
            is_right(Plan::qkv(weight, 64, [3, 1], 192, kv), seed);
            is_right(Plan::qkv(weight, 128, [2, 2], 320, kv).with_bias(), 10 + seed);
        }
    }
}

#[test]
fn raw_sums_have_scale_and_bias() {
    for weight in FORMATS {
        is_right(Plan::new(weight, Epilogue::Raw, 200, 320).with_bias(), 20);
    }
}

#[test]
fn residuals_have_scale_and_bias() {
    for weight in FORMATS {
        is_right(Plan::new(weight, Epilogue::Residual, 136, 192).with_bias(), 30);
    }
}

#[test]
fn gates_open_their_ups() {
    for weight in FORMATS {
        is_right(Plan::new(weight, Epilogue::SwiGlu, 192, 576), 40);
        is_right(Plan::new(weight, Epilogue::SwiGlu, 64, 128).with_bias(), 41);
    }
}

#[test]
fn logits_have_the_best_of_each_tile() {
    for weight in FORMATS {
        is_right(Plan::new(weight, Epilogue::Head, 203, 320).with_bias(), 50);
    }
}

/// A problem whose sums are all zero, so that the epilogue sees the bias alone.
fn only_bias(plan: Plan, bias: &[f32]) -> Problem {
    let mut problem = Problem::random(plan.with_bias(), 60);
    problem.input = vec![0.0; ALL_ROWS * plan.k];
    problem.bias.copy_from_slice(bias);
    problem
}

#[test]
fn of_equal_logits_the_first_is_best_and_nan_never_is() {
    let mut bias = vec![-1.0; 300];
    bias[..64].fill(f32::NAN);
    bias[64..128].fill(f32::NEG_INFINITY);
    (bias[130], bias[131], bias[170], bias[190]) = (f32::NAN, 5.0, 5.0, f32::NAN);
    (bias[192 + 33], bias[192 + 32]) = (f32::INFINITY, 7.0);
    let problem = only_bias(Plan::new(Format::Fp16, Epilogue::Head, 300, 64), &bias);
    for grid in [1, 3] {
        let outcome = run(&problem, &Run::new(8, vec![0, 1], grid));
        let nothing = f32::NEG_INFINITY;
        let expected = [(nothing, 0), (nothing, 64), (5.0, 131), (f32::INFINITY, 225), (-1.0, 256)];
        assert_eq!(outcome.best, [expected, expected]);
    }
}

#[test]
fn what_is_too_large_for_a_half_saturates_and_nan_stays() {
    let mut bias = vec![1.0; 64];
    (bias[0], bias[32]) = (1e4, 1e4);
    (bias[1], bias[33]) = (1e4, -1e4);
    bias[2] = f32::NAN;
    (bias[3], bias[35]) = (-1e30, 1e30);
    let problem = only_bias(Plan::new(Format::Fp8, Epilogue::SwiGlu, 64, 64), &bias);
    let outcome = run(&problem, &Run::new(8, vec![5], 1));
    let found = values(&outcome.output[0], 2);
    assert_eq!((found[0], found[1], found[3]), (65504.0, -65504.0, 0.0));
    assert!(found[2].is_nan());
}
