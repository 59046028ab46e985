//! Log-probabilities of a prompt's tokens, on a whole model: those of the model alone, each once, however the prompt
//! is cut into chunks and whatever happens to it.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::running::{self, Done};
use common::{golden, small, tiny};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::{DraftPolicy, Options, Request, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_core::testing::sampling::report;
use tempfile::TempDir;

const NUM_TOP: usize = 3;

fn engine() -> (TempDir, Engine) {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    tiny::write(&path("big"), 2, 1);
    tiny::write(&path("draft"), 1, 1);
    let recipe = Recipe::model(path("big"), Dtype::Fp32, path("draft"), Dtype::Fp32);
    recipe.build(&path("built"));
    let engine = Engine::open(path("built").join("1").join(TARGET_FILE)).unwrap();
    (dir, engine)
}

fn telling(prompt: Vec<u32>) -> Request {
    let sampling = SamplingParams { prompt_logprobs: Some(NUM_TOP), ..SamplingParams::default() };
    Request { prompt: prompt.into(), max_tokens: 6, sampling, ..Request::default() }
}

/// The token, and the bits of its log-probability and of those of the likeliest.
type Told = (u32, u32, Vec<(u32, u32)>);

fn told(done: &Done) -> Vec<Told> {
    let bits =
        |logprobs: &[(u32, f32)]| logprobs.iter().map(|&(id, p)| (id, p.to_bits())).collect();
    let told = |one: &spec_core::runtime::Emitted| {
        (one.token, one.logprob.unwrap().to_bits(), bits(&one.top_logprobs))
    };
    done.prompt.iter().map(told).collect()
}

/// From the logits of one pass over the whole prompt.
fn expected(engine: &Engine, prompt: &[u32]) -> Vec<Told> {
    let logits = golden::all_logits(&mut golden::model(engine, 16), prompt);
    let one = |(idx, &token): (usize, &u32)| {
        let (own, top) = report(logits.row(idx), token, NUM_TOP);
        (token, own.to_bits(), top.into_iter().map(|(id, p)| (id, p.to_bits())).collect())
    };
    prompt[1..].iter().enumerate().map(one).collect()
}

#[test]
fn a_prompt_is_told_of_as_one_pass_over_it_would() {
    let (_dir, engine) = engine();
    let prompts = [150, 1, 2, 40, 150].map(small::tokens);
    let requests: Vec<Request> = prompts.iter().cloned().map(telling).collect();
    for max_num_tokens in [7, 64, 512] {
        let options = running::options(DraftPolicy::Fixed);
        let options = Options { max_num_tokens: Some(max_num_tokens), ..options };
        let mut runtime = running::load(&engine, &options);
        let done = running::run(&mut runtime, &requests);
        for (done, prompt) in done.iter().zip(&prompts) {
            assert_eq!(told(done), expected(&engine, prompt), "{max_num_tokens} rows a step");
        }
    }
}

#[test]
fn preemption_neither_loses_nor_doubles_what_is_told() {
    let (_dir, engine) = engine();
    let options = running::options(DraftPolicy::Fixed);
    let mut runtime = running::load(&engine, &Options { max_num_tokens: Some(40), ..options });
    let mut steps = 0;
    let requests = [telling(small::tokens(100)), telling(small::tokens(33))];
    let done = running::run_with(&mut runtime, &requests, |runtime, open| {
        steps += 1;
        // In the middle of the first prompt, with the second one begun, and when both are told.
        if [3, 5, 8, 9].contains(&steps) {
            for &id in open {
                runtime.preempt(id);
            }
        }
    });
    let preemptions: Vec<u64> = done.iter().map(|done| done.counters.preemptions).collect();
    assert!(preemptions[0] > 2 && preemptions[1] > 0, "{preemptions:?}");
    for (done, request) in done.iter().zip(&requests) {
        assert_eq!(told(done), expected(&engine, &request.prompt));
    }
}

#[test]
fn who_does_not_ask_hears_nothing() {
    let (_dir, engine) = engine();
    let request = Request { sampling: SamplingParams::default(), ..telling(small::tokens(40)) };
    let mut runtime = running::load(&engine, &running::options(DraftPolicy::Fixed));
    assert!(running::run(&mut runtime, &[request])[0].prompt.is_empty());
}
