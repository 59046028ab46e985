//! The CUDA executor, whole: engines that carry compiled kernels, run by the executor's own host code on an emulated
//! GPU. Its logits are compared with the CPU executor's, its texts with themselves under any speculation and batch.
#![allow(clippy::unwrap_used)]

mod ahead;
mod blocks;
mod branches;
#[path = "../../backend/core/tests/lossless/chi_square.rs"]
mod chi_square;
#[path = "../common/mod.rs"]
mod common;
mod heads;
mod kv_scales;
mod medusa;
mod outline;
mod prompt_ends;

use common::models::{Recipe, SMOLLM2};
use common::running::{self, Done};
use common::small::{NORMED, SMALL, in_parts, tokens};
use common::tiny::{self, Sizes};
use common::{golden, models};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{self, Adaptive, Fixed};
use spec_core::runtime::{Lookup, Options, Prefill, Request, Runtime, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_core::testing::batch::Logits;
use spec_core::testing::cuda::{Gpu, Model, OnHost};
use spec_core::tokenizer::Tokenizer;
use spec_emu::{Emulator, Schedule};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Against the CPU executor with fp16 weights, whose activations stay f32: those of the kernels have 11 bits.
const FP16_TOLERANCE: f32 = 0.02;
/// With fp8 weights the CPU executor's activations are bf16, with 8 bits: most of the difference is its own.
const FP8_TOLERANCE: f32 = 0.08;
/// Where rows are multiplied in e4m3 too, with 4 bits, each of a few products a layer adds its share.
const FP8_ROWS_TOLERANCE: f32 = 0.5;
/// Errors of rounding are spread as in a bell: among ten thousand the worst is more than four deviations out.
const WORST_BY_TYPICAL: f32 = 5.0;

/// Multiprocessors: an odd number, so that blocks begin and end inside of columns.
const NUM_SMS: u32 = 3;

fn emulator(schedule: Schedule) -> Emulator {
    Emulator::new((9, 0), NUM_SMS, schedule).with_small_samples()
}

fn open(dir: &Path, name: &str) -> Engine {
    Engine::open(dir.join(name).join("1").join(TARGET_FILE)).expect("opens")
}

/// One model built for both devices.
fn both(sizes: &Sizes, dtype: Dtype, kv: Dtype) -> (TempDir, Engine, Engine) {
    both_on("cuda:sm_90a", sizes, dtype, kv)
}

fn both_on(device: &str, sizes: &Sizes, dtype: Dtype, kv: Dtype) -> (TempDir, Engine, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("model"), 2, 3, sizes);
    let recipe = Recipe::plain(path("model"), dtype).with_kv(kv);
    recipe.build(&path("cpu"));
    recipe.on(device).build(&path("cuda"));
    let engines = (open(dir.path(), "cpu"), open(dir.path(), "cuda"));
    (dir, engines.0, engines.1)
}

fn on_emulator(engine: &Engine, num_pages: usize) -> OnHost {
    on(emulator(Schedule::PLAIN), engine, num_pages, Prefill::Exact)
}

fn on(device: Emulator, engine: &Engine, num_pages: usize, prefill: Prefill) -> OnHost {
    let gpu = Gpu::new(Box::new(device));
    let model = Model::load_with(engine, num_pages, prefill, &mut **gpu.lock()).expect("loads");
    OnHost::new(Arc::new(model), gpu)
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
        let tolerance = if dtype == Dtype::Fp8 { FP8_TOLERANCE } else { FP16_TOLERANCE };
        assert_close(&found, &expected, tolerance, &format!("{dtype} {sizes:?}"));
    }
}

/// The worst logit is within the tolerance, and all together are far within.
fn assert_close(found: &[Vec<f32>], expected: &Logits, tolerance: f32, what: &str) {
    let pairs = found.iter().enumerate().flat_map(|(idx, row)| row.iter().zip(expected.row(idx)));
    let errors: Vec<f32> = pairs.map(|(found, expected)| (found - expected).abs()).collect();
    let worst = errors.iter().copied().fold(0.0, f32::max);
    let mean_square = errors.iter().map(|x| x * x).sum::<f32>() / errors.len() as f32;
    let typical = mean_square.sqrt();
    eprintln!("{what}: logits are off by {typical:.4}, the worst by {worst:.4}");
    assert!(worst < tolerance, "{what}: a logit is off by {worst}, allowed {tolerance}");
    assert!(typical < tolerance / WORST_BY_TYPICAL, "{what}: logits are off by {typical}");
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

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drafts {
    /// Half of the target's layers, with the same weights.
    Model,
    /// The same, with all drafts from one pass.
    AtOnce,
    Lookup,
    None,
    /// The same model, on the CPU.
    ModelOnCpu,
    /// An EAGLE head, on the target's GPU.
    Head,
    /// The same on the CPU.
    HeadOnCpu,
    /// Medusa heads, on the CPU.
    MedusaOnCpu,
    /// The target without one of its attentions and one of its MLPs.
    Skip,
}

fn target(drafts: Drafts) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("big"), 2, 1, &SMALL);
    tiny::write_sized(&path("small"), 1, 1, &SMALL);
    let recipe = match drafts {
        Drafts::Model => Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Fp16)
            .with_draft_head(Dtype::Fp8),
        Drafts::AtOnce => {
            tiny::mask_with(&path("small"), 5);
            Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Fp16)
        }
        Drafts::Lookup => Recipe::ngram(path("big"), Dtype::Fp8),
        Drafts::None => Recipe::plain(path("big"), Dtype::Fp8),
        Drafts::ModelOnCpu => {
            Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Int8).draft_on("cpu")
        }
        Drafts::Head => {
            tiny::write_head(&path("head"), 2, 1, &SMALL);
            Recipe::model(path("big"), Dtype::Fp8, path("head"), Dtype::Fp16)
        }
        Drafts::HeadOnCpu => {
            tiny::write_head(&path("head"), 2, 1, &SMALL);
            Recipe::model(path("big"), Dtype::Fp8, path("head"), Dtype::Int8).draft_on("cpu")
        }
        Drafts::Skip => {
            let file = path("skip_layers.json");
            fs::write(&file, r#"{"attention": [0], "mlp": [1]}"#).expect("writes");
            Recipe::skipping(path("big"), Dtype::Fp8, file)
        }
        Drafts::MedusaOnCpu => {
            tiny::write_medusa(&path("heads"), 3, 1, &SMALL);
            let recipe = Recipe::model(path("big"), Dtype::Fp8, path("heads"), Dtype::Int8);
            recipe.draft_on("cpu").drafting(3)
        }
    };
    recipe.on("cuda:sm_90a").build(&path("built"));
    let engine = open(dir.path(), "built");
    (dir, engine)
}

fn load(engine: &Engine, policy: DraftPolicy, schedule: Schedule) -> Runtime {
    load_with(engine, running::options(policy), schedule)
}

fn load_with(engine: &Engine, options: Options, schedule: Schedule) -> Runtime {
    load_bounded(engine, Options { kv_tokens: Some(2048), ..options }, schedule)
}

fn load_bounded(engine: &Engine, options: Options, schedule: Schedule) -> Runtime {
    let open = |_| Ok(Box::new(emulator(schedule)) as _);
    Runtime::load_on(engine, &options, &open).expect("loads")
}

/// Greedy and seeded, with what depends on the tokens before.
fn requests() -> Vec<Request> {
    let sampling = running::kinds_of_sampling();
    let request = |(idx, sampling): (usize, &SamplingParams)| Request {
        // Ends as it begins, so that look-up finds something to propose.
        prompt: [tokens(3 + 9 * idx), tokens(3)].concat().into(),
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
    for drafts in [Drafts::Model, Drafts::AtOnce, Drafts::Lookup, Drafts::Skip] {
        let (_dir, engine) = target(drafts);
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
                let (drafted, accepted) = totals(&done);
                // Of what is looked up in random text hardly any is right.
                engaged |= drafted > accepted && (drafts == Drafts::Lookup || accepted > 0);
            }
        }
        assert!(engaged, "some drafts must be refused, and some of the model's kept");
    }
}

/// Steps whose logits somebody wants to see are decided about on the host, with a drafter of its own.
#[test]
fn drafts_of_one_pass_are_those_of_the_host() {
    let (_dir, engine) = target(Drafts::AtOnce);
    let requests: Vec<Request> = requests_of_three_tokens()
        .into_iter()
        .zip(1..)
        .map(|(request, idx)| Request { max_tokens: 30, draft_len: Some(1 + idx % 5), ..request })
        .collect();
    let telling = |request: &Request| {
        let mut request = request.clone();
        request.sampling.logprobs = Some(0);
        request
    };
    let told: Vec<Request> = requests.iter().map(telling).collect();
    for (draft_branches, most_num_tokens) in [(1, None), (1, Some(19)), (2, None)] {
        let options =
            Options { draft_branches, max_num_tokens: most_num_tokens, ..running::options(Fixed) };
        let run = |requests: &[Request]| {
            running::run(&mut load_with(&engine, options.clone(), Schedule::PLAIN), requests)
        };
        let (on_host, found) = (run(&told), run(&requests));
        assert_eq!(texts(&found), texts(&on_host), "{options:?}");
        let [of_host, of_graph] = [&on_host, &found].map(|done| totals(done));
        let (drafted, accepted) = of_graph;
        assert!(drafted > accepted && accepted > 40, "{accepted} of {drafted}");
        // The host drafts chains.
        assert_eq!(draft_branches == 1, of_graph == of_host, "{of_graph:?}, {of_host:?}");
    }
}

/// Drafts, and those that were accepted.
fn totals(done: &[Done]) -> (u64, u64) {
    let sum = |count: fn(&Done) -> u64| done.iter().map(count).sum();
    (sum(|done| done.counters.drafted), sum(|done| done.counters.accepted))
}

/// What came before has gone on in every way, and whatever is drafted is right now and then.
fn requests_of_three_tokens() -> Vec<Request> {
    let mut requests = requests();
    for request in &mut requests {
        request.sampling.logit_bias = [40, 41, 42].map(|token| (token, 90.0)).into();
        let prompt = tokens(24).into_iter().map(|token| 40 + token % 3);
        request.prompt = prompt.collect::<Vec<_>>().into();
    }
    requests
}

#[test]
fn texts_are_the_same_with_a_drafter_elsewhere() {
    for (drafts, draft_gpu) in [
        (Drafts::ModelOnCpu, None),
        (Drafts::Head, None),
        (Drafts::HeadOnCpu, None),
        (Drafts::MedusaOnCpu, None),
        (Drafts::Model, Some(1)),
    ] {
        let (_dir, engine) = target(drafts);
        let requests = requests_of_three_tokens();
        let plain: Vec<Request> = requests
            .iter()
            .map(|request| Request { draft_len: Some(0), ..request.clone() })
            .collect();
        let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &plain);
        for policy in [Fixed, Adaptive] {
            let opened = Mutex::new(Vec::new());
            let open = |number| {
                opened.lock().unwrap().push(number);
                Ok(Box::new(emulator(Schedule::PLAIN)) as _)
            };
            let options = Options { kv_tokens: Some(2048), draft_gpu, ..running::options(policy) };
            let mut runtime = Runtime::load_on(&engine, &options, &open).expect("loads");
            let gpus = opened.into_inner().unwrap();
            assert_eq!((gpus.contains(&0), gpus.contains(&1)), (true, draft_gpu.is_some()));
            let done = running::run(&mut runtime, &requests);
            assert_eq!(texts(&done), alone, "{drafts:?}, {policy:?}");
            let (drafted, accepted) = totals(&done);
            // What adapts may find that drafts do not pay here.
            let engaged = policy == Adaptive || drafted > accepted && accepted > 0;
            assert!(engaged, "{drafts:?}: {accepted} of {drafted}");
        }
    }
}

#[test]
fn texts_are_the_same_with_trees_of_looked_up_drafts() {
    for drafts in [Drafts::Lookup, Drafts::Model] {
        let (_dir, engine) = target(drafts);
        let requests = requests_of_three_tokens();
        let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &requests);
        let drafted = [1, 3].map(|ngram_branches| {
            let policy = if drafts == Drafts::Lookup { Fixed } else { Adaptive };
            let options = Options { ngram_branches, ..running::options(policy) };
            let mut runtime = load_with(&engine, options, Schedule::PLAIN);
            let done = running::run(&mut runtime, &requests);
            assert_eq!(texts(&done), alone, "{drafts:?}, {ngram_branches} branches");
            totals(&done)
        });
        eprintln!("{drafts:?}: {drafted:?} drafts and accepted ones of chains and of trees");
        let [(_, of_chains), (drafted, of_trees)] = drafted;
        // What is drafted beside a model follows what steps cost.
        let is_better = of_chains < of_trees && of_trees < drafted;
        assert!(drafts == Drafts::Model || is_better, "a second branch is accepted, too");
    }
}

#[test]
fn texts_are_the_same_with_drafts_from_texts_that_ended() {
    for drafts in [Drafts::Lookup, Drafts::Model] {
        let (_dir, engine) = target(drafts);
        let mut requests = requests_of_three_tokens();
        // The second one is decided about on the host, and drafts from the same texts.
        requests[1].sampling.logprobs = Some(1);
        let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &requests);
        let options = Options { lookup: Some(Lookup::Suffix), ..running::options(Fixed) };
        let mut runtime = load_with(&engine, options, Schedule::PLAIN);
        let rounds = [0, 1].map(|_| {
            let done = running::run(&mut runtime, &requests);
            assert_eq!(texts(&done), alone, "{drafts:?}");
            done
        });
        let [first, again] = rounds.map(|done| totals(&done));
        eprintln!("{drafts:?}: drafted and accepted {first:?}, then {again:?}");
        // A model's drafts are as good as those of texts of three tokens.
        let is_better = again.1 * first.0 > first.1 * again.0;
        assert!(drafts == Drafts::Model || is_better, "what ended is drafted from");
    }
}

#[test]
fn prompts_are_told_of_in_any_batch() {
    let (_dir, engine) = target(Drafts::Model);
    let sampling = SamplingParams { prompt_logprobs: Some(2), ..SamplingParams::default() };
    let telling = |len| Request {
        prompt: tokens(len).into(),
        max_tokens: 4,
        sampling: sampling.clone(),
        ..Request::default()
    };
    // The longest takes more steps than one, beside sequences that the device decides about alone.
    let requests = [&[telling(90), telling(5)], &requests()[..2]].concat();
    let alone = |request: &Request| {
        let mut runtime = load(&engine, Fixed, Schedule::PLAIN);
        running::run(&mut runtime, std::slice::from_ref(request)).remove(0)
    };
    let alone: Vec<Done> = requests.iter().map(alone).collect();
    let together = running::run(&mut load(&engine, Fixed, Schedule::seeded(2)), &requests);
    assert_eq!(texts(&together), texts(&alone));
    for (together, alone) in together.iter().zip(&alone) {
        assert_eq!(together.prompt, alone.prompt);
    }
    let told: Vec<u32> = together[0].prompt.iter().map(|told| told.token).collect();
    assert_eq!(told, tokens(90)[1..]);
    assert!(together[0].prompt.iter().all(|told| told.top_logprobs.len() == 2));
}

#[test]
fn given_drafts_are_verified() {
    for drafts in [Drafts::Model, Drafts::Lookup, Drafts::None] {
        let (_dir, engine) = target(drafts);
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
    let (_dir, engine) = target(Drafts::Model);
    let requests = &requests()[..4];
    let done = |schedule| texts(&running::run(&mut load(&engine, Fixed, schedule), requests));
    assert_eq!(done(Schedule::seeded(1)), done(Schedule::PLAIN));
}

/// A model of 135 million weights. The closest of its choices here is decided by more than the formats differ.
#[test]
fn a_real_model_writes_what_it_writes_on_the_cpu() {
    let Some(checkpoint) = models::hf(SMOLLM2) else { return };
    let recipe = Recipe::ngram(checkpoint, Dtype::Fp16);
    let cpu = recipe.engine("smollm2-135m-fp16-ngram");
    let cuda = recipe.on("cuda:sm_90a").engine("smollm2-135m-fp16-ngram-cuda");
    let tokenizer = Tokenizer::open(cuda.path().parent().expect("a folder")).expect("opens");
    let count = "One, two, three, four, one, two, three, four, one,";
    let request = Request {
        prompt: tokenizer.encode_prompt(count).expect("encodes").into(),
        max_tokens: 8,
        ..Request::default()
    };
    let requests = [request];
    let expected = running::run(&mut running::load(&cpu, &running::options(Fixed)), &requests);
    let found = running::run(&mut load(&cuda, Fixed, Schedule::PLAIN), &requests);
    assert_eq!(texts(&found), texts(&expected));
    assert!(found[0].counters.accepted > 0, "drafts engage: {:?}", found[0].counters);
}

/// A drafter that seems to be far behind would never be asked again.
#[test]
fn look_up_keeps_up_with_a_text_that_is_longer_than_a_step() {
    const STEP_ROWS: usize = 16;
    let (_dir, engine) = target(Drafts::Lookup);
    let options = Options { max_num_tokens: Some(STEP_ROWS), ..running::options(Fixed) };
    let request = Request {
        prompt: [tokens(40), tokens(12)].concat().into(),
        max_tokens: 8,
        ..Request::default()
    };
    let done = running::run(&mut load_with(&engine, options, Schedule::PLAIN), &[request]);
    assert!(done[0].counters.drafted > 0, "{:?}", done[0].counters);
}
