//! The promise that speculation changes nothing, on the real runtime and real models: greedy and seeded
//! texts are the same tokens with any drafter, any draft length, any batch mates, any number of threads, chunked
//! prefill and preemption as the request alone without speculation.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod engines;
mod requests;

use common::models::MAX_DRAFT_LEN;
use common::running::{self, Done};
use engines::{good_drafter, ngram, no_drafter, poor_drafter, skipping};
use requests::{few_requests, many_requests, tokenizer};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{
    AdmissionPolicy, Counters, Lookup, Options, Request, Runtime, SequenceId,
};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What each request gives alone, without speculation and without what others computed. Engines of one identity hold the same
/// target, and are asked once.
fn alone(engine: &Engine, requests: &[Request]) -> Vec<Vec<u32>> {
    static TEXTS: Mutex<BTreeMap<String, Vec<u32>>> = Mutex::new(BTreeMap::new());
    let options = Options { kv_reuse: false, ..running::options(Fixed) };
    let mut runtime = None;
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let text = |request: &Request| {
        let key = format!("{} {request:?}", engine.manifest().identity);
        let run = || {
            let runtime = runtime.get_or_insert_with(|| running::load(engine, &options));
            running::run_alone(runtime, std::slice::from_ref(request)).remove(0)
        };
        texts.entry(key).or_insert_with(run).clone()
    };
    requests.iter().map(text).collect()
}

fn with_draft_len(
    requests: &[Request],
    draft_len: impl Fn(usize) -> Option<usize>,
) -> Vec<Request> {
    let requests = requests.iter().enumerate();
    requests.map(|(idx, r)| Request { draft_len: draft_len(idx), ..r.clone() }).collect()
}

fn assert_same(what: &str, done: &[Done], expected: &[Vec<u32>]) {
    assert_eq!(done.len(), expected.len());
    for (idx, (done, expected)) in done.iter().zip(expected).enumerate() {
        let same = done.tokens.iter().zip(expected).take_while(|(a, b)| a == b).count();
        let (ours, theirs) = (&done.tokens, expected);
        assert!(ours == theirs, "{what}: request {idx}, from token {same} on: {ours:?} {theirs:?}");
    }
}

/// Drafted and accepted tokens.
fn totals(done: &[Done]) -> (u64, u64) {
    let drafted = done.iter().map(|done| done.counters.drafted).sum();
    (drafted, done.iter().map(|done| done.counters.accepted).sum())
}

/// The test could not fail if every draft, or none, was right.
fn assert_speculated(what: &str, (drafted, accepted): (u64, u64)) {
    eprintln!("{what}: {accepted} of {drafted} drafts accepted");
    assert!(0 < accepted && accepted < drafted, "{what}: {accepted} of {drafted} drafts accepted");
}

/// Runs requests one by one, twice, and then all of them together with copies of themselves: once with
/// every text computed on its own, once with shared beginnings.
fn check_reuse(what: &str, engine: &Engine) {
    let mut requests = many_requests(5, &tokenizer(engine));
    for request in &mut requests {
        request.sampling.logprobs = Some(2);
    }
    let again = with_draft_len(&requests, |idx| [None, Some(0), Some(3)][idx % 3]);
    let crowd = [requests.as_slice(), &again].concat();
    let [own, shared] = [false, true].map(|kv_reuse| {
        let options = Options { kv_reuse, max_num_tokens: Some(256), ..running::options(Fixed) };
        let mut runtime = running::load(engine, &options);
        let mut done = Vec::new();
        for request in requests.iter().chain(&requests) {
            done.extend(running::run(&mut runtime, std::slice::from_ref(request)));
        }
        done.extend(running::run(&mut runtime, &crowd));
        done
    });
    let reused = |done: &[Done]| done.iter().map(|d| d.counters.reused_tokens).sum::<u64>();
    let (num_alone, texts) = (2 * requests.len(), own.iter().map(|done| done.tokens.clone()));
    assert_eq!(reused(&own), 0);
    let hits = [reused(&shared[requests.len()..num_alone]), reused(&shared[num_alone..])];
    eprintln!("{what}: {hits:?} tokens reused");
    assert!(hits.iter().all(|&hits| hits > 0), "{what}: {hits:?} tokens reused");
    assert_same(what, &shared, &texts.collect::<Vec<_>>());
    for (idx, (own, shared)) in own.iter().zip(&shared).enumerate() {
        assert_eq!(own.logprobs, shared.logprobs, "{what}: log-probabilities of request {idx}");
    }
    // Alone, a request drafts the same tokens whoever computed its beginning.
    let drafts = [totals(&own[..num_alone]), totals(&shared[..num_alone])];
    assert_speculated(what, drafts[0]);
    assert_eq!(drafts[0], drafts[1], "{what}: drafted and accepted without and with reuse");
}

#[test]
fn shared_beginnings_change_neither_texts_nor_log_probabilities_nor_acceptance() {
    let Some(engine) = good_drafter(Dtype::Bf16) else { return };
    check_reuse("good drafter", &engine);
    let Some(engine) = ngram() else { return };
    check_reuse("ngram", &engine);
    let Some(engine) = skipping() else { return };
    check_reuse("without some layers", &engine);
}

/// Drafts that come with the requests: right ones, wrong ones, and such that are right for a while.
fn check_given(what: &str, engine: &Engine, draft_len: usize) {
    let requests = few_requests(12);
    let expected = alone(engine, &requests);
    let mut runtime = running::load(engine, &running::options(Fixed));
    for num_right in [0, 3, MAX_DRAFT_LEN] {
        let given = |(request, text): (&Request, &Vec<u32>)| {
            let token = |(idx, &token)| if idx < num_right { token } else { token ^ 1 };
            let given_draft = text.iter().enumerate().map(token).take(MAX_DRAFT_LEN).collect();
            Request { given_draft, draft_len: Some(draft_len), ..request.clone() }
        };
        let given: Vec<Request> = requests.iter().zip(&expected).map(given).collect();
        let done = running::run(&mut runtime, &given);
        assert_same(&format!("{what}, {num_right} given drafts right"), &done, &expected);
        for done in done.iter().filter(|_| draft_len == 0) {
            let Counters { drafted, accepted, .. } = done.counters;
            assert_eq!((drafted, accepted), (MAX_DRAFT_LEN as u64, num_right as u64), "{what}");
        }
    }
}

#[test]
fn given_drafts_right_or_wrong_do_not_change_a_text() {
    let Some(engine) = good_drafter(Dtype::Bf16) else { return };
    check_given("good drafter", &engine, 4);
    let Some(engine) = no_drafter() else { return };
    check_given("no drafter", &engine, 0);
}

/// Every draft length, and lengths that follow the acceptance, against plain decoding.
fn check_draft_lengths(what: &str, engine: &Engine, lengths: impl Iterator<Item = usize>) {
    let requests = few_requests(14);
    let expected = alone(engine, &requests);
    let mut runtime = running::load(engine, &running::options(Fixed));
    let (mut drafted, mut accepted) = (0, 0);
    for length in lengths {
        let done = running::run(&mut runtime, &with_draft_len(&requests, |_| Some(length)));
        assert_same(&format!("{what}, {length} drafts"), &done, &expected);
        let (num_drafted, num_accepted) = totals(&done);
        (drafted, accepted) = (drafted + num_drafted, accepted + num_accepted);
    }
    assert_speculated(what, (drafted, accepted));
    let mut runtime = running::load(engine, &running::options(Adaptive));
    let done = running::run(&mut runtime, &requests);
    assert_same(&format!("{what}, adaptive"), &done, &expected);
}

#[test]
fn every_draft_length_of_the_ngram_drafter_gives_the_tokens_of_plain_decoding() {
    let Some(engine) = ngram() else { return };
    check_draft_lengths("ngram", &engine, 1..=MAX_DRAFT_LEN);
}

#[test]
fn trees_of_looked_up_drafts_give_the_tokens_of_plain_decoding() {
    let Some(engine) = ngram() else { return };
    let requests = many_requests(8, &tokenizer(&engine));
    let expected = alone(&engine, &requests);
    let (mut drafted, mut accepted) = (0, 0);
    for (ngram_branches, policy) in [(2, Fixed), (4, Fixed), (3, Adaptive)] {
        let options = Options { ngram_branches, ..running::options(policy) };
        let mut runtime = running::load(&engine, &options);
        let done = running::run(&mut runtime, &requests);
        assert_same(&format!("{ngram_branches} branches, {policy:?}"), &done, &expected);
        let (num_drafted, num_accepted) = totals(&done);
        (drafted, accepted) = (drafted + num_drafted, accepted + num_accepted);
    }
    assert_speculated("trees", (drafted, accepted));
}

#[test]
fn trees_of_a_models_drafts_give_the_tokens_of_plain_decoding() {
    let Some(engine) = poor_drafter() else { return };
    check_trees(&engine);
}

#[test]
fn trees_drafted_without_some_layers_give_the_tokens_of_plain_decoding() {
    let Some(engine) = skipping() else { return };
    check_trees(&engine);
}

fn check_trees(engine: &Engine) {
    let requests = many_requests(8, &tokenizer(engine));
    let expected = alone(engine, &requests);
    let run = |draft_branches, policy, max_num_tokens| {
        let options = Options { draft_branches, max_num_tokens, ..running::options(policy) };
        let done = running::run(&mut running::load(engine, &options), &requests);
        assert_same(&format!("{draft_branches} branches, {policy:?}"), &done, &expected);
        totals(&done)
    };
    let steps = |(drafted, accepted)| {
        assert_speculated("trees", (drafted, accepted));
        accepted
    };
    let [chains, two, four] = [1, 2, 4].map(|branches| steps(run(branches, Fixed, None)));
    assert!(chains < two && two <= four, "accepted: {chains}, {two}, {four}");
    let options = Options {
        draft_branches: 4,
        draft_tree_tokens: Some(MAX_DRAFT_LEN + 3),
        ..running::options(Fixed)
    };
    let done = running::run(&mut running::load(engine, &options), &requests);
    assert_same("the likeliest tokens of four branches", &done, &expected);
    let few = steps(totals(&done));
    assert!(chains < few && few <= four, "accepted: {chains}, {few} of few tokens, {four}");
    for done in &done {
        let Counters { drafted, steps, .. } = done.counters;
        assert!(drafted <= steps * (MAX_DRAFT_LEN as u64 + 3), "{drafted} drafts in {steps} steps");
    }
    run(3, Adaptive, None);
    run(3, Fixed, Some(40));
    let sizes = Options { max_num_tokens: Some(24), ..smallest_cache(engine) };
    let options = Options { draft_branches: 3, ..sizes };
    check_preempted("trees", engine, &requests, &options, running::preempting());
}

/// What ended is drafted from by what comes behind it, unless nothing is shared.
fn check_suffix(what: &str, engine: &Engine) {
    let requests = many_requests(8, &tokenizer(engine));
    let expected = alone(engine, &requests);
    let [own, shared] = [false, true].map(|kv_reuse| {
        let lookup = Some(Lookup::Suffix);
        let options = Options { lookup, kv_reuse, ..running::options(Fixed) };
        let mut runtime = running::load(engine, &options);
        let rounds = [0, 1].map(|_| running::run(&mut runtime, &requests));
        rounds.map(|done| {
            assert_same(&format!("{what}, shared {kv_reuse}"), &done, &expected);
            totals(&done)
        })
    });
    eprintln!("{what}: drafted and accepted alone {own:?}, shared {shared:?}");
    assert_eq!(own[0], own[1], "{what}: who shares nothing learns nothing");
    assert_eq!(own[0], shared[0], "{what}: nothing had ended yet");
    assert!(shared[1].1 > 2 * shared[0].1, "{what}: accepted {shared:?}");

    let lookup = Some(Lookup::Suffix);
    let options = Options { lookup, max_num_tokens: Some(24), ..smallest_cache(engine) };
    check_preempted(what, engine, &requests, &options, running::preempting());
}

#[test]
fn drafts_from_texts_that_ended_give_the_tokens_of_plain_decoding() {
    let Some(engine) = ngram() else { return };
    check_suffix("suffix", &engine);
    let Some(engine) = poor_drafter() else { return };
    check_suffix("suffix before a poor drafter", &engine);
}

/// With what others wrote to draft from, in the second round all of it.
#[test]
fn every_draft_length_from_texts_that_ended_gives_the_tokens_of_plain_decoding() {
    let Some(engine) = ngram() else { return };
    let requests = few_requests(14);
    let expected = alone(&engine, &requests);
    let suffix = Options { lookup: Some(Lookup::Suffix), ..running::options(Fixed) };
    let mut runtime = running::load(&engine, &suffix);
    running::run(&mut runtime, &requests);
    let mut all = (0, 0);
    for length in 1..=MAX_DRAFT_LEN {
        let done = running::run(&mut runtime, &with_draft_len(&requests, |_| Some(length)));
        assert_same(&format!("suffix, {length} drafts"), &done, &expected);
        let (drafted, accepted) = totals(&done);
        all = (all.0 + drafted, all.1 + accepted);
    }
    assert_speculated("suffix", all);
}

#[test]
fn every_draft_length_of_a_good_drafter_gives_the_tokens_of_plain_decoding() {
    let Some(engine) = good_drafter(Dtype::Bf16) else { return };
    check_draft_lengths("good drafter", &engine, 1..=MAX_DRAFT_LEN);
}

#[test]
fn every_draft_length_of_a_poor_drafter_gives_the_tokens_of_plain_decoding() {
    let Some(engine) = poor_drafter() else { return };
    check_draft_lengths("poor drafter", &engine, 1..=MAX_DRAFT_LEN);
}

#[test]
fn every_draft_length_without_some_layers_gives_the_tokens_of_plain_decoding() {
    let Some(engine) = skipping() else { return };
    check_draft_lengths("without some layers", &engine, 1..=MAX_DRAFT_LEN);
}

#[test]
fn an_fp32_target_gives_the_tokens_of_plain_decoding() {
    let Some(engine) = good_drafter(Dtype::Fp32) else { return };
    check_draft_lengths("fp32", &engine, [1, 5].into_iter());
}

/// Batches of 1, 8 and 32 with another draft length for each request, 0 among them.
fn check_batches(what: &str, engine: &Engine, options: &Options) {
    let requests = many_requests(32, &tokenizer(engine));
    let expected = alone(engine, &requests);
    let mixed = with_draft_len(&requests, |idx| Some(idx * 5 % (MAX_DRAFT_LEN + 1)));
    let mut runtime = running::load(engine, options);
    for batch_size in [1, 8, 32] {
        // One by one only as many as there are draft lengths: that takes the longest.
        let some = if batch_size == 1 { &mixed[..MAX_DRAFT_LEN + 1] } else { &mixed };
        let batches = some.chunks(batch_size);
        let done: Vec<Done> = batches.flat_map(|batch| running::run(&mut runtime, batch)).collect();
        assert_same(&format!("{what}, batches of {batch_size}"), &done, &expected[..some.len()]);
        let (drafted, accepted) = totals(&done);
        match options.lookup {
            // What a batch before wrote may all be right.
            Some(Lookup::Suffix) => assert!(accepted > 0, "{what}, batches of {batch_size}"),
            _ => {
                assert_speculated(&format!("{what}, batches of {batch_size}"), (drafted, accepted))
            }
        }
    }
}

#[test]
fn batch_mates_do_not_change_a_text_with_look_ups() {
    let Some(engine) = ngram() else { return };
    check_batches("ngram", &engine, &running::options(Fixed));
    let suffix = Options { lookup: Some(Lookup::Suffix), ..running::options(Fixed) };
    check_batches("suffix", &engine, &suffix);
}

#[test]
fn batch_mates_do_not_change_a_text_with_a_model_as_the_drafter() {
    let Some(engine) = poor_drafter() else { return };
    check_batches("poor drafter", &engine, &running::options(Fixed));
}

#[test]
fn batch_mates_do_not_change_a_text_that_is_drafted_without_some_layers() {
    let Some(engine) = skipping() else { return };
    check_batches("without some layers", &engine, &running::options(Fixed));
}

/// The smallest cache that is allowed, found by asking for less.
fn smallest_cache(engine: &Engine) -> Options {
    let mut options = running::options(Fixed);
    let mut mib = 1;
    loop {
        options.kv_bytes = Some(mib << 20);
        match Runtime::load(engine, &options) {
            Ok(_) => return options,
            Err(error) => assert!(mib < 1024, "no cache is large enough: {error}"),
        }
        mib += 1;
    }
}

/// Prompts in chunks of a few tokens, and sequences that lose their pages at any moment.
fn check_preemption(what: &str, engine: &Engine) {
    let requests = many_requests(8, &tokenizer(engine));
    let options = Options { max_num_tokens: Some(24), ..smallest_cache(engine) };
    let mut random = 1u64;
    check_preempted(what, engine, &requests, &options, |runtime, open| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let victim = (random >> 33) as usize;
        if victim.is_multiple_of(4) {
            runtime.preempt(open[victim / 4 % open.len()]);
        }
    });
}

/// Texts that outgrow the cache together, so that the newest lose their pages again and again.
fn check_crowd(what: &str, engine: &Engine) {
    let mut requests = many_requests(20, &tokenizer(engine));
    for request in &mut requests {
        Arc::make_mut(&mut request.prompt).truncate(20);
        request.max_tokens = 44;
        request.ignore_eos = true;
    }
    let admission = AdmissionPolicy::MaxUtilization;
    let options = Options { admission, ..smallest_cache(engine) };
    check_preempted(what, engine, &requests, &options, |_, _| ());
}

fn check_preempted(
    what: &str,
    engine: &Engine,
    requests: &[Request],
    options: &Options,
    meddle: impl FnMut(&mut Runtime, &[SequenceId]),
) {
    let expected = alone(engine, requests);
    let mixed = with_draft_len(requests, |idx| Some((idx * 5 + 3) % (MAX_DRAFT_LEN + 1)));
    let done = running::run_with(&mut running::load(engine, options), &mixed, meddle);
    assert_same(what, &done, &expected);
    assert_speculated(what, totals(&done));
    let preemptions: u64 = done.iter().map(|done| done.counters.preemptions).sum();
    eprintln!("{what}: {preemptions} preemptions");
    assert!(preemptions > 0, "{what}: no sequence lost its pages");
}

/// Parts of long prompts that are given up in the middle of the model and run again.
fn check_given_up(what: &str, engine: &Engine) {
    let requests = many_requests(6, &tokenizer(engine));
    let expected = alone(engine, &requests);
    // Of 8 rows a step a prompt of 40 tokens is long.
    let options = Options { max_num_tokens: Some(8), ..running::options(Fixed) };
    let (mut num_asked, mut given_up) = (0, 0);
    let mut runtime = running::load(engine, &options);
    let done = running::run_steps(&mut runtime, &requests, |runtime, _| {
        let (looks, came) = (Cell::new(0), Cell::new(false));
        let step = runtime.step_unless(&|| {
            looks.update(|looks| looks + 1);
            came.set(looks.get() > num_asked * 7 % 50);
            came.get()
        });
        num_asked += 1;
        given_up += usize::from(came.get());
        step
    });
    assert_same(what, &done, &expected);
    eprintln!("{what}: {given_up} steps given up");
    assert!(given_up > 5, "{what}: {given_up} steps were given up");
}

#[test]
fn steps_that_are_given_up_for_others_do_not_change_a_text() {
    let Some(engine) = ngram() else { return };
    check_given_up("ngram, given up", &engine);
    let Some(engine) = poor_drafter() else { return };
    check_given_up("poor drafter, given up", &engine);
    let Some(engine) = skipping() else { return };
    check_given_up("without some layers, given up", &engine);
}

#[test]
fn preemption_and_chunked_prefill_do_not_change_a_text_with_the_ngram_drafter() {
    let Some(engine) = ngram() else { return };
    check_preemption("ngram", &engine);
}

#[test]
fn preemption_and_chunked_prefill_do_not_change_a_text_with_a_model_as_the_drafter() {
    let Some(engine) = good_drafter(Dtype::Bf16) else { return };
    check_preemption("good drafter", &engine);
}

#[test]
fn preemption_and_chunked_prefill_do_not_change_a_text_that_is_drafted_without_some_layers() {
    let Some(engine) = skipping() else { return };
    check_preemption("without some layers", &engine);
}

#[test]
fn a_cache_that_is_too_small_for_the_batch_does_not_change_a_text() {
    let Some(engine) = ngram() else { return };
    check_crowd("ngram, crowded", &engine);
    let Some(engine) = poor_drafter() else { return };
    check_crowd("poor drafter, crowded", &engine);
}

/// Threads share the work of a step, more of them than there are processors too.
fn check_threads(what: &str, engine: &Engine) {
    // Short ones.
    let mut requests = many_requests(12, &tokenizer(engine)).split_off(10);
    for request in &mut requests {
        request.sampling.logprobs = Some(2);
    }
    let [one, two, three] = [1, 2, 3].map(|threads| {
        let options = Options { threads: Some(threads), ..running::options(Fixed) };
        running::run(&mut running::load(engine, &options), &requests)
    });
    assert_speculated(what, totals(&one));
    let of = |done: &[Done]| -> Vec<_> {
        done.iter().map(|done| (done.tokens.clone(), done.logprobs.clone())).collect()
    };
    assert!(of(&one) == of(&two), "{what}: two threads");
    assert!(of(&one) == of(&three), "{what}: three threads");
}

#[test]
fn the_number_of_threads_changes_neither_texts_nor_log_probabilities() {
    let Some(engine) = good_drafter(Dtype::Bf16) else { return };
    check_threads("good drafter", &engine);
    let Some(engine) = poor_drafter() else { return };
    check_threads("poor drafter", &engine);
}
