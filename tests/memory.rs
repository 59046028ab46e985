//! What instances of a model hold: one copy of the weights among them, as long as one of them is there; and what becomes
//! of a runtime whose engine file is gone.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::{running, tiny};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::Fixed;
use spec_core::runtime::{
    Memory, MemoryType, Options, Request, Runtime, SharedWeights, TARGET_FILE, WeightCopy,
};
use std::fs;
use tempfile::TempDir;

/// A target that drafts with a model, in a folder.
fn engine() -> (TempDir, Engine) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    tiny::write(&path("big"), 2, 1);
    tiny::write(&path("small"), 1, 1);
    Recipe::model(path("big"), Dtype::Bf16, path("small"), Dtype::Int8).build(&path("built"));
    let engine = Engine::open(path("built").join("1").join(TARGET_FILE)).unwrap();
    (folder, engine)
}

fn options() -> Options {
    Options { kv_tokens: Some(4096), ..running::options(Fixed) }
}

fn request() -> Request {
    Request { prompt: Vec::from_iter(3..20).into(), max_tokens: 12, ..Request::default() }
}

fn text(runtime: &mut Runtime) -> Vec<u32> {
    running::run(runtime, &[request()]).remove(0).tokens
}

fn numbers(runtime: &Runtime) -> Vec<u64> {
    runtime.memory().weights.iter().map(|copy| copy.number).collect()
}

fn is_first(runtime: &Runtime) -> Vec<bool> {
    runtime.memory().weights.iter().map(|copy| copy.is_first).collect()
}

#[test]
fn instances_share_one_copy_that_goes_with_the_last() {
    let (_folder, engine) = engine();
    let shared = SharedWeights::default();
    let load = || Runtime::load_sharing(&engine, &options(), &shared).unwrap();
    let (mut first, mut second) = (load(), load());
    assert_eq!(is_first(&first), [true, true], "target and drafter");
    assert_eq!(is_first(&second), [false, false]);
    assert_eq!(numbers(&first), numbers(&second));
    let alone = text(&mut Runtime::load(&engine, &options()).unwrap());
    assert_eq!(text(&mut first), alone);

    let mut both = Memory::default();
    [&first, &second].into_iter().for_each(|runtime| both.merge(runtime.memory()));
    let own: usize = second.memory().own.iter().map(|(_, bytes)| bytes).sum();
    let weights = |memory: &Memory| memory.weights.iter().map(|copy| copy.bytes).sum::<usize>();
    assert_eq!(both.bytes(|of| of == MemoryType::Cpu), 2 * own + weights(first.memory()));
    assert_eq!(both.bytes(|of| of != MemoryType::Cpu), 0);

    let number = numbers(&first);
    drop(first);
    assert_eq!(text(&mut second), alone);
    let third = load();
    assert_eq!(numbers(&third), number, "the second still holds it");
    drop((second, third));
    let fourth = load();
    assert_eq!(is_first(&fourth), [true, true]);
    assert!(numbers(&fourth).iter().all(|new| number.iter().all(|old| old != new)));
}

#[test]
fn a_drafter_with_the_weights_of_its_target_shares_them_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    tiny::write(&path("model"), 2, 1);
    Recipe::model(path("model"), Dtype::Bf16, path("model"), Dtype::Bf16).build(&path("built"));
    let engine = Engine::open(path("built").join("1").join(TARGET_FILE)).unwrap();
    let mut runtime = Runtime::load(&engine, &options()).unwrap();
    assert_eq!(is_first(&runtime), [true]);
    let done = running::run(&mut runtime, &[request()]).remove(0);
    assert!(done.counters.drafted > 0 && done.counters.accepted == done.counters.drafted);
}

#[test]
fn weights_count_with_their_scales_norms_and_biases() {
    let (_folder, engine) = engine();
    let runtime = Runtime::load(&engine, &options()).unwrap();
    let sections = |engine: &Engine| -> usize {
        engine.manifest().sections.iter().map(|section| section.bytes as usize).sum()
    };
    let draft = engine.open_drafter().unwrap().unwrap();
    for (copy, engine) in runtime.memory().weights.iter().zip([&engine, &draft]) {
        let WeightCopy { memory, bytes, .. } = copy;
        let least = sections(engine);
        let padding = 256 * engine.manifest().sections.len();
        assert_eq!(*memory, MemoryType::Cpu);
        assert!((least..=least + padding).contains(bytes), "{bytes} bytes of {least}");
    }
}

#[test]
fn an_instance_needs_no_file_for_weights_that_another_one_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    tiny::write(&path("model"), 2, 1);
    Recipe::ngram(path("model"), Dtype::Bf16).build(&path("built"));
    let file = path("built").join("1").join(TARGET_FILE);
    let engine = Engine::open(&file).unwrap();
    let shared = SharedWeights::default();
    let load = || Runtime::load_sharing(&engine, &options(), &shared);
    let mut first = load().unwrap();
    let expected = text(&mut first);
    let whole = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(whole / 2).unwrap();
    assert_eq!(text(&mut first), expected, "what is loaded is read no more");
    let mut second = load().unwrap();
    drop(first);
    assert_eq!(text(&mut second), expected);
    drop(second);
    let error = load().err().unwrap().to_string();
    let (half, name) = (whole / 2, file.display());
    assert_eq!(
        error,
        format!(
            "engine {name}: has changed since it was opened: it has {half} bytes and had {whole}: load the model again"
        )
    );
}
