//! Every family against the reference implementation in fp32: tiny random checkpoints of `tests/data/families`, as the
//! reference's own library has saved them, and its logits for one prompt.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::small::in_parts;
use common::{data, golden, tiny};
use safetensors::SafeTensors;
use spec_core::engine::Engine;
use spec_core::exec::cpu::{self, Isa, Pool};
use spec_core::exec::cuda::{Gpu, Model, OnHost, Prefill};
use spec_core::model::Dtype;
use spec_core::runtime::TARGET_FILE;
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

/// The prompt, and the reference's logits behind each of its tokens.
fn recorded(family: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = data::bytes(&format!("families/{family}/golden.safetensors"));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let logits = golden::floats(&tensors.tensor("logits").unwrap());
    (data::ids(&data::json("families/prompt.json")), logits)
}

fn check(what: &str, found: &[Vec<f32>], expected: &[f32], most: f32) {
    let found = found.concat();
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    eprintln!("{what}: logits within {largest:.1e}");
    assert!(largest <= most, "{what}: a logit differs by {largest}");
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
        let (prompt, expected) = recorded(family);
        let (_dir, engine) = engine(family, Dtype::Fp32, "cpu");
        for isa in Isa::supported() {
            let pool = Arc::new(Pool::new(1));
            let mut model = cpu::Model::load(&engine, NUM_PAGES, isa, pool).unwrap();
            let parts = [prompt.len() - 5, 1, 4];
            let found = in_parts(&mut model, &prompt, &parts);
            check(&format!("{family} {isa}"), &found, &expected, FP32_ERROR);
        }
    }
}

#[test]
fn logits_on_an_emulated_gpu_are_those_of_the_reference() {
    for family in FAMILIES {
        let (prompt, expected) = recorded(family);
        let (_dir, engine) = engine(family, Dtype::Fp16, "cuda:sm_90a");
        let gpu = Gpu::new(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)));
        let model = Model::load_with(&engine, NUM_PAGES, Prefill::Exact, &mut **gpu.lock());
        let mut model = OnHost::new(Arc::new(model.unwrap()), gpu);
        let found = in_parts(&mut model, &prompt, &[prompt.len() - 5, 1, 4]);
        check(&format!("{family} on sm_90a"), &found, &expected, FP16_ERROR);
    }
}
