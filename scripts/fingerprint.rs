//! Prints hashes of what the code computes: see `scripts/fingerprint`.

#[path = "../tests/common/mod.rs"]
mod common;

use blake3::Hasher;
use common::models::{self, Recipe, SMOLLM2};
use common::running::{self, Done};
use common::small::{NORMED, SMALL, in_parts, tokens};
use common::tiny::{self, Sizes};
use common::{data, golden};
use spec_core::engine::{Engine, SectionKind};
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::Fixed;
use spec_core::runtime::{Isa, Options, Prefill, Request, Runtime, TARGET_FILE};
use spec_core::testing::cpu;
use spec_core::testing::cuda::{Gpu, Model, OnHost};
use spec_emu::{Emulator, Schedule};
use std::fs;
use std::sync::Arc;
use tempfile::TempDir;

const DTYPES: [Dtype; 6] =
    [Dtype::Fp32, Dtype::Fp16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8, Dtype::Int4];
const CUDA_DTYPES: [Dtype; 2] = [Dtype::Fp16, Dtype::Fp8];
/// Pages of a forward pass over [`NUM_TOKENS`].
const NUM_PAGES: usize = 8;
const NUM_TOKENS: usize = 50;
/// Of the emulated GPU: an odd number, so that blocks begin and end inside of columns.
const NUM_SMS: u32 = 3;

/// Where drafts come from.
#[derive(Clone, Copy, Debug)]
enum Drafts {
    None,
    Lookup,
    Model,
}

fn main() {
    for (name, sizes) in [("small", &SMALL), ("normed", &NORMED)] {
        for drafts in [Drafts::None, Drafts::Lookup, Drafts::Model] {
            for dtype in DTYPES {
                on_cpu(name, sizes, dtype, drafts);
            }
            for dtype in CUDA_DTYPES {
                on_emulated_gpu(name, sizes, dtype, drafts);
            }
        }
    }
    DTYPES.into_iter().for_each(real_model);
}

fn on_cpu(name: &str, sizes: &Sizes, dtype: Dtype, drafts: Drafts) {
    let (dir, engine) = build(sizes, dtype, drafts, "cpu");
    say(&format!("{name} {dtype} {drafts:?} cpu engine"), &hash_of_files(&dir));
    say(&format!("{name} {dtype} {drafts:?} cpu weights"), &hash_of_weights(&engine));
    for isa in Isa::supported() {
        let what = format!("{name} {dtype} {drafts:?} cpu {isa:?}");
        let options = Options { isa: Some(isa), threads: Some(2), ..running::options(Fixed) };
        let mut runtime = running::load(&engine, &options);
        say(&format!("{what} texts"), &hash_of_texts(&running::run(&mut runtime, &requests())));
        let pool = Arc::new(Pool::new(2));
        let mut model = cpu::Model::load(&engine, NUM_PAGES, isa, pool).expect("loads");
        let rows = in_parts(&mut model, &tokens(NUM_TOKENS), &[37, 1, 5, 7]);
        say(&format!("{what} logits"), &hash_of_logits(&rows));
    }
}

fn on_emulated_gpu(name: &str, sizes: &Sizes, dtype: Dtype, drafts: Drafts) {
    let (dir, engine) = build(sizes, dtype, drafts, "cuda:sm_90a");
    let what = format!("{name} {dtype} {drafts:?} sm_90a");
    say(&format!("{what} engine"), &hash_of_files(&dir));
    say(&format!("{what} weights"), &hash_of_weights(&engine));
    let emulator = || Emulator::new((9, 0), NUM_SMS, Schedule::PLAIN);
    let open = |_| Ok(Box::new(emulator()) as _);
    let options = Options { kv_tokens: Some(2048), ..running::options(Fixed) };
    let mut runtime = Runtime::load_on(&engine, &options, &open).expect("loads");
    say(&format!("{what} texts"), &hash_of_texts(&running::run(&mut runtime, &requests())));
    let gpu = Gpu::new(Box::new(emulator()));
    let model = Model::load_with(&engine, NUM_PAGES, Prefill::Exact, &mut **gpu.lock());
    let mut model = OnHost::new(Arc::new(model.expect("loads")), gpu);
    let rows = in_parts(&mut model, &tokens(NUM_TOKENS), &[37, 1, 5, 7]);
    say(&format!("{what} logits"), &hash_of_logits(&rows));
}

/// A real model with the best instructions that this machine has.
fn real_model(dtype: Dtype) {
    let Some(hf) = models::hf(SMOLLM2) else { return };
    let engine = Recipe::ngram(hf, dtype).engine(&format!("{SMOLLM2}-{dtype}-ngram"));
    let prompts = data::six_prompts(SMOLLM2);
    let (_, prompt) = &prompts[0];
    let logits = golden::all_logits(&mut golden::model(&engine, NUM_PAGES), &prompt[..NUM_TOKENS]);
    let rows: Vec<Vec<f32>> = (0..NUM_TOKENS).map(|row| logits.row(row).to_vec()).collect();
    say(&format!("{SMOLLM2} {dtype} logits"), &hash_of_logits(&rows));
    let request = |sampling| Request {
        prompt: prompt[..NUM_TOKENS].to_vec().into(),
        max_tokens: 16,
        sampling,
        ..Request::default()
    };
    let requests = running::kinds_of_sampling().map(request);
    let mut runtime = running::load(&engine, &running::options(Fixed));
    let done = running::run(&mut runtime, &requests);
    say(&format!("{SMOLLM2} {dtype} Lookup texts"), &hash_of_texts(&done));
}

/// A target of two layers and, where a model drafts, its first layer.
fn build(sizes: &Sizes, dtype: Dtype, drafts: Drafts, device: &str) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("big"), 2, 1, sizes);
    tiny::write_sized(&path("small"), 1, 1, sizes);
    let recipe = match drafts {
        Drafts::None => Recipe::plain(path("big"), dtype),
        Drafts::Lookup => Recipe::ngram(path("big"), dtype),
        Drafts::Model => Recipe::model(path("big"), dtype, path("small"), Dtype::Fp16),
    };
    recipe.on(device).build(&path("built"));
    let engine = Engine::open(path("built").join("1").join(TARGET_FILE)).expect("opens");
    (dir, engine)
}

/// One of each kind of sampling, with as many drafts as there may be. Prompts end as they begin, so that look-up finds
/// something to propose.
fn requests() -> Vec<Request> {
    let sampling = running::kinds_of_sampling().into_iter().enumerate();
    let request = |(idx, sampling)| Request {
        prompt: [tokens(3 + 9 * idx), tokens(3)].concat().into(),
        max_tokens: 24,
        sampling,
        ..Request::default()
    };
    sampling.map(request).collect()
}

fn say(what: &str, hash: &Hasher) {
    println!("{} {what}", &hash.finalize().to_hex()[..16]);
}

/// Of the engine files: the target's and, where a model drafts, the drafter's.
fn hash_of_files(dir: &TempDir) -> Hasher {
    let mut hasher = Hasher::new();
    let version = dir.path().join("built").join("1");
    let files = fs::read_dir(&version).expect("a version folder");
    let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "engine")) {
        hasher.update(&fs::read(path).expect("reads"));
    }
    assert!(hasher.count() > 0, "no engine in {}", version.display());
    hasher
}

/// Of the target's sections, code left out: a change to a kernel changes that of the files.
fn hash_of_weights(engine: &Engine) -> Hasher {
    let mut hasher = Hasher::new();
    let sections = engine.manifest().sections.iter();
    for section in sections.filter(|section| section.kind != SectionKind::Code) {
        hasher.update(section.name.as_bytes()).update(section.hash.as_bytes());
    }
    hasher
}

fn hash_of_logits(rows: &[Vec<f32>]) -> Hasher {
    let mut hasher = Hasher::new();
    for logit in rows.iter().flatten() {
        hasher.update(&logit.to_bits().to_le_bytes());
    }
    hasher
}

fn hash_of_texts(all: &[Done]) -> Hasher {
    let mut hasher = Hasher::new();
    for done in all {
        let Done { tokens, logprobs, prompt, reason, .. } = done;
        let bits: Vec<_> = prompt.iter().map(|told| told.logprob.map(f32::to_bits)).collect();
        hasher.update(format!("{tokens:?} {logprobs:?} {bits:?} {reason:?}\n").as_bytes());
    }
    hasher
}
