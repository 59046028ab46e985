//! The same rounds on an emulated GPU.

use crate::eagle::CASES;
use crate::rounds;
use crate::support::{checkpoints, recipe};
use crate::widened::widen;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, TARGET_FILE};
use spec_core::testing::cpu::{self, Resources, Weights};
use spec_core::testing::cuda::{Eagle, Gpu, HeadOnHost, Model};
use spec_core::testing::draft::Head;
use spec_emu::{Emulator, Schedule};
use std::sync::Arc;
use tempfile::TempDir;

const NUM_PAGES: usize = 3;

/// Of what is typical of what was recorded: factors of a product in fp16 have 11 bits, and a chain of five passes of two layers
/// adds to what the one before has left.
const FP16_TOLERANCE: f32 = 0.02;
/// The same, in fp32, of heads of 64 values: sums of others in another order.
const FP32_TOLERANCE: f32 = 1e-4;

fn cases() -> impl Iterator<Item = &'static str> {
    // What is widened is safetensors, and its weights are pickled.
    CASES.into_iter().filter(|&case| case != "eagle1-nobias")
}

/// A target and a head of 64 values a head of attention.
fn engines(case: &str, dtype: Dtype, device: &str) -> (TempDir, Engine, Engine) {
    let (dir, target, head) = checkpoints(case);
    widen(&target);
    widen(&head);
    let built = dir.path().join("built");
    recipe(case, target, head, dtype).on(device).build(&built);
    let target = Engine::open(built.join("1").join(TARGET_FILE)).unwrap();
    let head = target.open_drafter().unwrap().unwrap();
    (dir, target, head)
}

/// Follows the rounds of the reference, and gives the largest error of a value, of what is typical.
fn largest_error(case: &str, head: &mut dyn Head) -> f32 {
    let mut largest = 0.0f32;
    let mut num_compared = 0;
    rounds::follow(case, head, |name, found, expected| {
        assert_eq!(found.len(), expected.len(), "{case} {name}");
        let mean_square = expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32;
        let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        largest = errors.map(|error| error / mean_square.sqrt()).fold(largest, f32::max);
        num_compared += found.len();
    });
    assert!(num_compared > 5000, "{case}: {num_compared} values");
    largest
}

/// So what differs on the GPU is not the layout.
#[test]
fn heads_of_twice_the_values_are_those_of_the_reference() {
    for case in cases() {
        let (_dir, target, head) = engines(case, Dtype::Fp32, "cpu");
        let pool = Arc::new(Pool::new(1));
        let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
        let (own, targets) = (weights(&head), weights(&target));
        let resources = Resources { num_pages: NUM_PAGES, rows: 8, isa: Isa::detect(), pool };
        let mut head = cpu::Eagle::new(&head, own, Some(targets), resources).unwrap();
        let error = largest_error(case, &mut head);
        eprintln!("{case}: within {error:.1e}");
        assert!(error < FP32_TOLERANCE, "{case}: {error}");
    }
}

#[test]
fn rounds_on_a_gpu_are_those_of_the_reference() {
    for case in cases() {
        let (_dir, target, head) = engines(case, Dtype::Fp16, "cuda:sm_90a");
        let gpu = Gpu::new(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)));
        let target = Arc::new(Model::load(&target, NUM_PAGES, &mut **gpu.lock()).unwrap());
        let head = Eagle::load(&head, target, NUM_PAGES, &mut **gpu.lock()).unwrap();
        let error = largest_error(case, &mut HeadOnHost::new(Arc::new(head), gpu));
        eprintln!("{case}: within {error:.1e} in fp16");
        assert!(error < FP16_TOLERANCE, "{case}: {error}");
    }
}
