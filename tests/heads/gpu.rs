//! The same rounds on an emulated GPU.

use crate::common::models::Recipe;
use crate::eagle::CASES;
use crate::medusa::write_deep;
use crate::rounds;
use crate::support::{Recorded, checkpoints, recipe};
use crate::widened::widen;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, TARGET_FILE};
use spec_core::testing::cpu::{self, Resources, Weights};
use spec_core::testing::cuda::{Eagle, Gpu, HeadOnHost, Medusa, MedusaOnHost, Model};
use spec_core::testing::draft::{Head, Heads};
use spec_emu::{Emulator, Schedule};
use std::path::Path;
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

/// The largest error of a value, of what is typical.
fn error_of(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let mean_square = expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32;
    let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    errors.fold(0.0, f32::max) / mean_square.sqrt()
}

/// Follows the rounds of the reference, and gives the largest error of a value, of what is typical.
fn largest_error(case: &str, head: &mut dyn Head) -> f32 {
    let mut largest = 0.0f32;
    let mut num_compared = 0;
    rounds::follow(case, head, |name, found, expected| {
        assert_eq!(found.len(), expected.len(), "{case} {name}");
        largest = largest.max(error_of(found, expected));
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

/// Medusa heads of a checkpoint, on a GPU. They see no other position, so that their target may have attention of any width.
fn medusa(recipe: Recipe, device: &str, capability: (u32, u32), built: &Path) -> MedusaOnHost {
    recipe.on(device).build(built);
    let target = Engine::open(built.join("1").join(TARGET_FILE)).unwrap();
    let heads = target.open_drafter().unwrap().unwrap();
    let gpu = Gpu::new(Box::new(Emulator::new(capability, 3, Schedule::PLAIN)));
    let target = Arc::new(Model::load(&target, NUM_PAGES, &mut **gpu.lock()).unwrap());
    let heads = Medusa::load(&heads, target, &mut **gpu.lock()).unwrap();
    MedusaOnHost::new(Arc::new(heads), gpu)
}

/// Blocks behind each other, in place, and a head that ends in the target's matrix.
#[test]
fn deep_medusa_heads_on_a_gpu_are_those_of_the_cpu() {
    let (dir, target, _) = checkpoints("medusa");
    widen(&target);
    let path = |name: &str| dir.path().join(name);
    write_deep(&target, &path("deep"));
    let recipe = Recipe::model(target, Dtype::Fp16, path("deep"), Dtype::Fp16);
    let recipe = recipe.drafting(2).up_to(64);
    recipe.clone().build(&path("cpu"));
    let on_cpu = Engine::open(path("cpu").join("1").join(TARGET_FILE)).unwrap();
    let mut on_cpu = on_cpu_of(&on_cpu);
    let states = on_cpu.states(&Recorded::of("target").floats("last_hidden_pre_norm")).unwrap();
    for (device, capability) in [("cuda:sm_90a", (9, 0)), ("cuda:sm_80", (8, 0))] {
        let mut heads = medusa(recipe.clone(), device, capability, &path(device));
        for head in 0..2 {
            let expected = on_cpu.logits(head, &states).unwrap().values;
            let error = error_of(&heads.logits(head, &states).unwrap().values, &expected);
            eprintln!("{device}, head {head}: within {error:.1e} in fp16");
            assert!(error < FP16_TOLERANCE, "{device}, head {head}: {error}");
        }
    }
}

fn on_cpu_of(target: &Engine) -> cpu::Medusa {
    let heads = target.open_drafter().unwrap().unwrap();
    let pool = Arc::new(Pool::new(1));
    let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
    let (own, targets) = (weights(&heads), weights(target));
    let resources = Resources { num_pages: NUM_PAGES, rows: 8, isa: Isa::detect(), pool };
    cpu::Medusa::new(&heads, own, Some(targets), resources).unwrap()
}

#[test]
fn every_medusa_head_says_on_a_gpu_what_the_reference_says() {
    let (dir, target, draft) = checkpoints("medusa");
    widen(&target);
    let recipe = recipe("medusa", target, draft, Dtype::Fp16);
    let mut heads = medusa(recipe, "cuda:sm_90a", (9, 0), &dir.path().join("built"));

    let recorded = Recorded::of("target");
    let states = heads.states(&recorded.floats("last_hidden_pre_norm")).unwrap();
    let expected = recorded.floats("last_hidden_post_norm");
    let error = error_of(&states, &expected);
    assert!(error < FP32_TOLERANCE, "states: {error}");
    let all = (0..heads.num_heads()).flat_map(|head| heads.logits(head, &states).unwrap().values);
    let found: Vec<f32> = all.collect();
    let error = error_of(&found, &Recorded::of("medusa").floats("logits"));
    eprintln!("medusa: within {error:.1e} in fp16");
    assert!(error < FP16_TOLERANCE, "logits: {error}");
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
