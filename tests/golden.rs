//! Real models against recorded outputs of the reference implementation in fp32: logits, greedy texts,
//! and how far narrower number formats are from them. The models are exported to Hugging Face folders in
//! bf16 first, as the reference ran on these weights.
#![allow(clippy::unwrap_used)]

mod common;

use common::golden::{self, Distance, agreement};
use common::models::{self, QWEN, Recipe, SMOLLM2};
use common::{data, running, turn};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::{DraftPolicy, Options, Request};

/// Most that an fp32 logit, or a log-sum-exp, may differ from the reference's: both sum in fp32, in other
/// orders, logits up to 35. The closest choice among the recorded greedy tokens has a gap of 0.0024, so
/// that none can go the other way within this.
const TOLERANCE: f64 = 5e-4;

/// An engine of the exported model that drafts by look-up.
fn engine(model: &str, dtype: Dtype) -> Option<Engine> {
    Some(Recipe::ngram(models::hf(model)?, dtype).engine(&format!("{model}-{dtype}-ngram")))
}

fn check_logits_and_greedy_texts(model: &str) {
    let _turn = turn();
    let prompts = golden::prompts(model);
    let Some(engine) = engine(model, Dtype::Fp32) else {
        return;
    };
    let distance = Distance::of(&engine, &prompts);
    eprintln!(
        "{model} fp32: logits within {:.1e}, log-sum-exps within {:.1e}, mean log-probability {:.1e}",
        distance.logit,
        distance.logsumexp,
        distance.mean()
    );
    assert_eq!(distance.same_argmax, distance.positions);
    assert!(distance.logit < TOLERANCE, "logits differ by {}", distance.logit);
    assert!(distance.logsumexp < TOLERANCE, "they differ by {}", distance.logsumexp);
    for (prompt, ours) in prompts.iter().zip(golden::greedy(&engine, &prompts)) {
        assert_same_text(&ours, &prompt.greedy);
    }
}

fn assert_same_text(ours: &[u32], theirs: &[u32]) {
    let same = agreement(ours, theirs);
    assert!(ours == theirs, "they differ from token {same} on: {ours:?} for {theirs:?}");
}

#[test]
fn smollm2_gives_the_logits_and_greedy_texts_of_the_reference() {
    check_logits_and_greedy_texts(SMOLLM2);
}

#[test]
fn qwen_gives_the_logits_and_greedy_texts_of_the_reference() {
    check_logits_and_greedy_texts(QWEN);
}

/// Chat prompts up to their natural end, at most 128 tokens, with speculation: it must change nothing.
fn check_chats(model: &str, names: &[&str]) {
    let _turn = turn();
    let prompts = data::six_prompts(model);
    let recorded = data::json(&format!("golden/six_prompts_{model}.json"));
    let Some(engine) = engine(model, Dtype::Fp32) else { return };
    let recorded = recorded["runs"][0].as_array().expect("a list");
    let (prompts, recorded): (Vec<_>, Vec<_>) = prompts
        .into_iter()
        .zip(recorded)
        .filter(|((name, _), _)| names.contains(&&name[..]))
        .unzip();
    assert_eq!(prompts.len(), names.len());
    let request = |(_, prompt): (String, Vec<u32>)| Request {
        prompt: prompt.into(),
        max_tokens: 128,
        ..Request::default()
    };
    let requests: Vec<Request> = prompts.into_iter().map(request).collect();
    // On all processors, as whoever serves it.
    let options = Options { threads: None, ..running::options(DraftPolicy::Fixed) };
    let mut runtime = running::load(&engine, &options);
    let done = running::run(&mut runtime, &requests);
    for (done, recorded) in done.iter().zip(recorded) {
        eprintln!("{model} {}: {} of 128 tokens", recorded["name"], done.tokens.len());
        assert_same_text(&done.tokens, &data::ids(&recorded["tokens"]));
    }
    assert!(done.iter().any(|done| done.counters.accepted > 0), "nothing was speculated");
}

#[test]
fn smollm2_answers_six_chats_as_the_reference_does() {
    let all =
        ["code_lru", "code_refactor", "chat_explain", "chat_plan", "summarise", "json_extract"];
    check_chats(SMOLLM2, &all);
}

#[test]
fn qwen_answers_chats_as_the_reference_does() {
    check_chats(QWEN, &["code_lru", "chat_plan"]);
}

/// Bounds on the mean and the 99th percentile of differences of log-probabilities, two to three times
/// what was measured: a wrong scale or a lost bit shows, another order of sums does not.
fn check_dtype(dtype: Dtype, mean: f64, p99: f64) {
    let _turn = turn();
    let prompts = golden::prompts(SMOLLM2);
    let Some(engine) = engine(SMOLLM2, dtype) else {
        return;
    };
    let distance = Distance::of(&engine, &prompts);
    eprintln!("{dtype}: mean {:.2e}, p99 {:.2e}", distance.mean(), distance.p99());
    assert!(distance.mean() < mean, "mean {} for {mean}", distance.mean());
    assert!(distance.p99() < p99, "p99 {} for {p99}", distance.p99());
}

#[test]
fn fp16_stays_close_to_fp32() {
    check_dtype(Dtype::Fp16, 0.004, 0.012);
}

#[test]
fn bf16_stays_close_to_fp32() {
    check_dtype(Dtype::Bf16, 0.06, 0.2);
}

#[test]
fn fp8_stays_near_fp32() {
    check_dtype(Dtype::Fp8, 0.5, 1.8);
}

#[test]
fn int8_stays_near_fp32() {
    check_dtype(Dtype::Int8, 0.25, 0.8);
}

/// The checkpoint is of 4 bits itself, in blocks of as many inputs: little is lost beside what the head and activations
/// lose.
#[test]
fn int4_stays_near_fp32() {
    check_dtype(Dtype::Int4, 0.3, 1.0);
}
