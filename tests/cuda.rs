//! The CUDA executor, whole: engines that carry compiled kernels, run by the executor's own host code on an emulated
//! GPU. Its logits are compared with the CPU executor's, its texts with themselves under any speculation and batch.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::running::{self, Done};
use common::tiny::{self, Sizes};
use common::{golden, models};
use spec_core::adapt::DraftPolicy::{self, Adaptive, Fixed};
use spec_core::batch::{Forward, Logits, Segment};
use spec_core::engine::Engine;
use spec_core::exec::cuda::{Gpu, Model, OnHost};
use spec_core::model::Dtype;
use spec_core::pages::PageId;
use spec_core::runtime::{Options, Request, Runtime, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_emu::{Emulator, Schedule};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// What the kernels are written for, as small as that goes.
const SMALL: Sizes =
    Sizes { hidden: 96, head_dim: 64, num_heads: 4, num_kv_heads: 2, ff: 160, qk_norm: false };
/// Wider heads, with norms, as in Qwen3; three query heads a key head.
const NORMED: Sizes =
    Sizes { hidden: 128, head_dim: 128, num_heads: 3, num_kv_heads: 1, ff: 96, qk_norm: true };

/// Against the CPU executor with fp16 weights, whose activations stay f32: those of the kernels have 11 bits.
const FP16_TOLERANCE: f32 = 0.02;
/// With fp8 weights the CPU executor's activations are bf16, with 8 bits: most of the difference is its own.
const FP8_TOLERANCE: f32 = 0.08;

/// Multiprocessors: an odd number, so that blocks begin and end inside of columns.
const NUM_SMS: u32 = 3;

fn emulator(schedule: Schedule) -> Emulator {
    Emulator::new((9, 0), NUM_SMS, schedule)
}

fn open(dir: &Path, name: &str) -> Engine {
    Engine::open(dir.join(name).join("1").join(TARGET_FILE)).expect("opens")
}

/// One model built for both devices.
fn both(sizes: &Sizes, dtype: Dtype, kv: Dtype) -> (TempDir, Engine, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("model"), 2, 3, sizes);
    let recipe = Recipe::plain(path("model"), dtype).with_kv(kv);
    recipe.build(&path("cpu"));
    recipe.on("cuda:sm_90a").build(&path("cuda"));
    let engines = (open(dir.path(), "cpu"), open(dir.path(), "cuda"));
    (dir, engines.0, engines.1)
}

fn on_emulator(engine: &Engine, num_pages: usize) -> OnHost {
    let gpu = Gpu::new(Box::new(emulator(Schedule::PLAIN)));
    let model = Model::load(engine, num_pages, &mut **gpu.lock()).expect("loads");
    OnHost::new(Arc::new(model), gpu)
}

/// Logits of all rows, computed in parts.
fn in_parts(model: &mut dyn Forward, tokens: &[u32], parts: &[usize]) -> Vec<Vec<f32>> {
    let pages: Vec<PageId> = (0..8).rev().collect();
    let (mut first, mut rows) = (0, Vec::new());
    for len in parts {
        let tokens = &tokens[first..first + len];
        let segment = Segment { tokens, first_position: first, pages: &pages, num_logits: *len };
        let logits: Logits = model.forward(&[segment]).expect("a pass");
        rows.extend((0..*len).map(|row| logits.row(row).to_vec()));
        first += len;
    }
    rows
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i + 7 * i + 3) % (tiny::VOCAB as u32)).collect()
}

#[test]
fn logits_are_those_of_the_cpu_executor() {
    for (sizes, dtype, kv) in [
        (&SMALL, Dtype::Fp16, Dtype::Fp16),
        (&SMALL, Dtype::Fp8, Dtype::Fp16),
        (&NORMED, Dtype::Fp16, Dtype::Fp16),
    ] {
        let (_dir, cpu, cuda) = both(sizes, dtype, kv);
        let tokens = tokens(50);
        let expected = golden::all_logits(&mut golden::model(&cpu, 8), &tokens);
        let found = in_parts(&mut on_emulator(&cuda, 8), &tokens, &[37, 1, 5, 7]);
        for (idx, found) in found.iter().enumerate() {
            let pairs = found.iter().zip(expected.row(idx));
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let tolerance = if dtype == Dtype::Fp8 { FP8_TOLERANCE } else { FP16_TOLERANCE };
            assert!(worst < tolerance, "{dtype} {sizes:?}: row {idx} is off by {worst}");
        }
    }
}

#[test]
fn bits_of_a_row_do_not_depend_on_the_rows_beside_it() {
    let (_dir, _, cuda) = both(&SMALL, Dtype::Fp8, Dtype::Fp8);
    let tokens = tokens(45);
    let whole = in_parts(&mut on_emulator(&cuda, 8), &tokens, &[45]);
    for parts in [&[1; 45][..], &[7, 9, 1, 28], &[33, 12]] {
        assert_eq!(in_parts(&mut on_emulator(&cuda, 8), &tokens, parts), whole, "{parts:?}");
    }
}

/// A target with a drafter: half of its layers, by the same weights.
fn pair(by_lookup: bool) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("big"), 2, 1, &SMALL);
    tiny::write_sized(&path("small"), 1, 1, &SMALL);
    let recipe = match by_lookup {
        true => Recipe::ngram(path("big"), Dtype::Fp8),
        false => Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Fp16),
    };
    recipe.on("cuda:sm_90a").build(&path("pair"));
    let engine = open(dir.path(), "pair");
    (dir, engine)
}

fn load(engine: &Engine, policy: DraftPolicy, schedule: Schedule) -> Runtime {
    let options = Options { kv_tokens: Some(2048), ..running::options(policy) };
    let open = |_| Ok(Box::new(emulator(schedule)) as _);
    Runtime::load_on(engine, &options, &open).expect("loads")
}

/// Greedy and seeded, with what depends on the tokens before.
fn requests() -> Vec<Request> {
    let seeded = SamplingParams { temperature: 1.1, seed: Some(5), ..SamplingParams::default() };
    let sampling = [
        SamplingParams::default(),
        seeded.clone(),
        SamplingParams { top_k: 7, top_p: 0.9, seed: Some(6), ..seeded.clone() },
        SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.2,
            logit_bias: vec![(4, 1.5)],
            bad_words: vec![vec![9], vec![3, 8]],
            min_tokens: 4,
            ..seeded.clone()
        },
        SamplingParams { min_p: 0.1, logprobs: Some(2), ..seeded },
    ];
    let request = |(idx, sampling): (usize, &SamplingParams)| Request {
        // Ends as it begins, so that look-up finds something to propose.
        prompt: [tokens(3 + 9 * idx), tokens(3)].concat(),
        max_tokens: 12,
        sampling: sampling.clone(),
        ..Request::default()
    };
    sampling.iter().enumerate().map(request).collect()
}

fn texts(done: &[Done]) -> Vec<Vec<u32>> {
    done.iter().map(|done| done.tokens.clone()).collect()
}

#[test]
fn texts_are_the_same_with_any_speculation_and_in_any_batch() {
    for by_lookup in [false, true] {
        let (_dir, engine) = pair(by_lookup);
        let requests = requests();
        let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &requests);
        let mut engaged = false;
        for policy in [Fixed, Adaptive] {
            for draft_len in [1, 3, models::MAX_DRAFT_LEN] {
                let requests: Vec<Request> = requests
                    .iter()
                    .map(|request| Request { draft_len: Some(draft_len), ..request.clone() })
                    .collect();
                let mut runtime = load(&engine, policy, Schedule::PLAIN);
                let done = running::run(&mut runtime, &requests);
                assert_eq!(texts(&done), alone, "{policy:?}, {draft_len} drafts");
                let count = |count: fn(&Done) -> u64| done.iter().map(count).sum::<u64>();
                let drafted = count(|done| done.counters.drafted);
                let accepted = count(|done| done.counters.accepted);
                // Of what is looked up in random text hardly any is right.
                engaged |= drafted > accepted && (by_lookup || accepted > 0);
            }
        }
        assert!(engaged, "some drafts must be refused, and some of the model's kept");
    }
}

#[test]
fn given_drafts_are_verified_on_the_device() {
    for by_lookup in [false, true] {
        let (_dir, engine) = pair(by_lookup);
        let requests = requests();
        let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &requests);
        // The first half of each text is right, then comes a token that is not.
        let guess = |(request, text): (&Request, &Vec<u32>)| Request {
            given_draft: [&text[..3], &[(text[3] + 1) % 60]].concat(),
            ..request.clone()
        };
        let given: Vec<Request> = requests.iter().zip(&alone).map(guess).collect();
        let done = running::run(&mut load(&engine, Fixed, Schedule::PLAIN), &given);
        assert_eq!(texts(&done), alone);
        assert!(done.iter().all(|done| done.counters.accepted >= 3), "{done:?}");
    }
}

#[test]
fn texts_do_not_depend_on_what_a_gpu_leaves_open() {
    let (_dir, engine) = pair(false);
    let requests = &requests()[..4];
    let done = |schedule| texts(&running::run(&mut load(&engine, Fixed, schedule), requests));
    assert_eq!(done(Schedule::seeded(1)), done(Schedule::PLAIN));
}
