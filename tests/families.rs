//! Every family against the reference implementation in fp32: tiny random checkpoints of `tests/data/families`, as the
//! reference's own library has saved them, and its logits for one prompt.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::small::in_parts;
use common::{data, golden, tiny};
use safetensors::SafeTensors;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, Prefill, TARGET_FILE};
use spec_core::testing::batch::{Forward, Segment};
use spec_core::testing::cpu;
use spec_core::testing::cuda::{Gpu, Model, OnHost};
use spec_emu::{Emulator, Schedule};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const FAMILIES: [&str; 5] = ["llama", "mistral", "phi3", "qwen2", "qwen3"];
const NUM_PAGES: usize = 4;

/// Most that an fp32 logit may differ: both sum in fp32, in other orders, logits up to 6.
const FP32_ERROR: f32 = 2e-5;
/// Weights are exact in FP16, as BF16 of this size is; activations and keys are rounded to it in every layer.
const FP16_ERROR: f32 = 2e-2;
/// The same of the residual stream, which is up to 18.
const FP16_HIDDEN_ERROR: f32 = 4e-2;

/// An engine of a recorded checkpoint, which has no tokenizer of its own.
fn engine(family: &str, dtype: Dtype, device: &str) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    fs::create_dir(&checkpoint).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let bytes = data::bytes(&format!("families/{family}/{file}"));
        fs::write(checkpoint.join(file), bytes).unwrap();
    }
    tiny::tokenizer().build().unwrap().write(&checkpoint).unwrap();
    let built = dir.path().join("built");
    Recipe::plain(checkpoint, dtype).on(device).build(&built);
    let engine = Engine::open(built.join("1").join(TARGET_FILE)).unwrap();
    (dir, engine)
}

/// The prompt, and what the reference says to each of its tokens: logits, or hidden states behind each number of layers.
fn recorded(family: &str, name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = data::bytes(&format!("families/{family}/golden.safetensors"));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let values = golden::floats(&tensors.tensor(name).unwrap());
    (data::ids(&data::json("families/prompt.json")), values)
}

fn check(what: &str, found: &[f32], expected: &[f32], most: f32) {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    eprintln!("{what}: within {largest:.1e}");
    assert!(largest <= most, "{what}: a value differs by {largest}");
}

#[test]
fn every_recorded_family_is_checked() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/families");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut recorded: Vec<_> =
        folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    recorded.sort();
    let mut checked = FAMILIES;
    checked.sort();
    assert_eq!(recorded, checked);
}

#[test]
fn logits_on_a_cpu_are_those_of_the_reference() {
    for family in FAMILIES {
        let (prompt, expected) = recorded(family, "logits");
        let (_dir, engine) = engine(family, Dtype::Fp32, "cpu");
        for isa in Isa::supported() {
            let pool = Arc::new(Pool::new(1));
            let mut model = cpu::Model::load(&engine, NUM_PAGES, isa, pool).unwrap();
            let parts = [prompt.len() - 5, 1, 4];
            let found = in_parts(&mut model, &prompt, &parts).concat();
            check(&format!("{family} {isa}"), &found, &expected, FP32_ERROR);
        }
    }
}

/// Hidden states behind every number of layers, computed in three parts.
fn hidden_states(model: &mut dyn Forward, engine: &Engine, prompt: &[u32]) -> Vec<f32> {
    let num_layers = engine.manifest().model.num_layers;
    model.tap(&Vec::from_iter(0..=num_layers)).unwrap();
    let segment = |first: usize, len| Segment {
        tokens: &prompt[first..first + len],
        first_position: first,
        pages: &[2, 0],
        prompt_len: 0,
        num_logits: 0,
        tree: &[],
    };
    let mut found = Vec::new();
    for (first, len) in [(0, 19), (19, 1), (20, prompt.len() - 20)] {
        model.forward(&[segment(first, len)]).unwrap();
        found.extend_from_slice(model.taps().unwrap());
    }
    found
}

#[test]
fn hidden_states_are_those_of_the_reference() {
    for family in FAMILIES {
        let (prompt, expected) = recorded(family, "hidden_states");
        let (_dir, on_cpu) = engine(family, Dtype::Fp32, "cpu");
        let pool = Arc::new(Pool::new(1));
        let mut model = cpu::Model::load(&on_cpu, NUM_PAGES, Isa::detect(), pool).unwrap();
        let found = hidden_states(&mut model, &on_cpu, &prompt);
        check(&format!("{family}, hidden states"), &found, &expected, FP32_ERROR);
        let (_dir, on_gpu) = engine(family, Dtype::Fp16, "cuda:sm_90a");
        let found = hidden_states(&mut on_emulator(&on_gpu), &on_gpu, &prompt);
        check(&format!("{family}, hidden states on sm_90a"), &found, &expected, FP16_HIDDEN_ERROR);
    }
}

#[test]
fn layers_that_are_not_there_are_not_tapped() {
    let (_dir, engine) = engine("llama", Dtype::Fp32, "cpu");
    let mut model =
        cpu::Model::load(&engine, NUM_PAGES, Isa::detect(), Arc::new(Pool::new(1))).unwrap();
    let error = model.tap(&[1, 3]).unwrap_err().to_string();
    assert!(error.contains("behind layer 3 of a model of 2"), "{error}");
    let (_dir, engine) = self::engine("llama", Dtype::Fp16, "cuda:sm_90a");
    let error = on_emulator(&engine).tap(&[1, 3]).unwrap_err().to_string();
    assert!(error.contains("behind layer 3 of a model of 2"), "{error}");
}

fn on_emulator(engine: &Engine) -> OnHost {
    let gpu = Gpu::new(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)));
    let model = Model::load_with(engine, NUM_PAGES, Prefill::Exact, &mut **gpu.lock());
    OnHost::new(Arc::new(model.unwrap()), gpu)
}

#[test]
fn logits_on_an_emulated_gpu_are_those_of_the_reference() {
    for family in FAMILIES {
        let (prompt, expected) = recorded(family, "logits");
        let (_dir, engine) = engine(family, Dtype::Fp16, "cuda:sm_90a");
        let mut model = on_emulator(&engine);
        let found = in_parts(&mut model, &prompt, &[prompt.len() - 5, 1, 4]).concat();
        check(&format!("{family} on sm_90a"), &found, &expected, FP16_ERROR);
    }
}
