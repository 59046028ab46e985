//! Drafts that branch inside of a step's graph: the texts are those of plain decoding, and more drafts are accepted.

use super::chi_square::{ALPHA, p_value};
use super::common::models::MAX_DRAFT_LEN;
use super::common::running::{self, Done};
use super::common::small::{in_parts, tokens};
use super::{
    Drafts, load, load_bounded, load_with, on_emulator, requests_of_three_tokens, target, texts,
    totals,
};
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{AdmissionPolicy, Counters, Lookup, Options, Request, Runtime};
use spec_core::sampling::SamplingParams;
use spec_emu::Schedule;
use std::collections::BTreeMap;

/// Texts of several pages, so that drafts begin on any position of one.
fn requests() -> Vec<Request> {
    let mut requests = requests_of_three_tokens();
    for (idx, request) in requests.iter_mut().enumerate() {
        request.prompt = [request.prompt.to_vec(), vec![41; 5 * idx]].concat().into();
        (request.max_tokens, request.draft_len) = (24, Some(1 + idx % 4));
    }
    requests
}

#[test]
fn texts_are_the_same_with_branches_of_a_models_drafts_and_more_are_accepted() {
    assert_branches_pay(Drafts::Model);
}

#[test]
fn texts_are_the_same_with_branches_of_a_heads_drafts_and_more_are_accepted() {
    assert_branches_pay(Drafts::Head);
}

#[test]
fn texts_are_the_same_with_branches_of_a_part_of_the_target_and_more_are_accepted() {
    assert_branches_pay(Drafts::Skip);
}

fn assert_branches_pay(drafts: Drafts) {
    let (_dir, engine) = target(drafts);
    let requests = requests();
    let plain: Vec<Request> =
        requests.iter().map(|request| Request { draft_len: Some(0), ..request.clone() }).collect();
    let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &plain);
    let branching = |draft_branches| Options { draft_branches, ..running::options(Fixed) };
    let accepted = [1, 2, 3].map(|draft_branches| {
        let mut runtime = load_with(&engine, branching(draft_branches), Schedule::seeded(1));
        let one_by_one: Vec<_> = requests
            .iter()
            .flat_map(|request| running::run(&mut runtime, std::slice::from_ref(request)))
            .collect();
        assert_eq!(texts(&one_by_one), alone, "{drafts:?}, {draft_branches} branches");
        totals(&one_by_one)
    });
    eprintln!("{drafts:?}: drafted and accepted with 1, 2 and 3 branches: {accepted:?}");
    let [one, two, three] = accepted;
    assert!(one.0 < two.0 && two.0 < three.0, "each branch is drafted");
    assert!(one.1 < two.1 && two.1 <= three.1, "the second one is accepted, too");

    for (nth, options) in [
        branching(3),
        Options { draft_branches: 2, ..running::options(Adaptive) },
        Options { max_num_tokens: Some(19), ..branching(3) },
        Options { draft_tree_tokens: Some(9), ..branching(4) },
        Options { max_batch_size: Some(2), lookup: Some(Lookup::Ngram), ..branching(4) },
        Options { lookup: Some(Lookup::Suffix), ngram_branches: 3, ..branching(2) },
    ]
    .into_iter()
    .enumerate()
    {
        let mut runtime = load_with(&engine, options.clone(), Schedule::seeded(3));
        // Pages of the first round are found in the second, which with one set of options is enough; somebody is decided about
        // on the host.
        for round in 0..if nth == 0 { 2 } else { 1 } {
            let mut requests = requests.clone();
            requests[(nth + round) % 2].sampling.logprobs.get_or_insert(0);
            let done = running::run(&mut runtime, &requests);
            assert_eq!(texts(&done), alone, "{drafts:?}, round {round} of {options:?}");
            // What adapts may find that drafts do not pay here.
            let accepts = totals(&done).1 > 0 || options.draft_policy == Adaptive;
            assert!(accepts, "{drafts:?}: {options:?}");
            for Counters { drafted, steps, .. } in done.iter().map(|done| &done.counters) {
                let most = options.draft_tree_tokens.map_or(u64::MAX, |most| steps * most as u64);
                assert!(*drafted <= most, "{drafted} drafts in {steps} steps: {options:?}");
            }
        }
    }
    // Pages are few: sequences lose theirs, and begin anew.
    let options = Options {
        kv_tokens: Some(1024),
        admission: AdmissionPolicy::MaxUtilization,
        ..branching(3)
    };
    let mut runtime = load_bounded(&engine, options, Schedule::PLAIN);
    let done = running::run(&mut runtime, &requests);
    assert_eq!(texts(&done), alone, "{drafts:?}, with few pages");
}

/// As many drafts as an engine verifies, and as many branches.
#[test]
fn texts_are_the_same_with_the_largest_trees() {
    let (_dir, engine) = target(Drafts::Model);
    let requests = requests();
    let with = |draft_len| -> Vec<Request> {
        requests.iter().map(|request| Request { draft_len, ..request.clone() }).collect()
    };
    let alone = running::run_alone(&mut load(&engine, Fixed, Schedule::PLAIN), &with(Some(0)));
    let options = Options { draft_branches: 4, ..running::options(Fixed) };
    let mut runtime = load_with(&engine, options, Schedule::PLAIN);
    let done = running::run(&mut runtime, &with(Some(MAX_DRAFT_LEN)));
    assert_eq!(texts(&done), alone);
    let longest = |done: &Done| done.counters.drafted / done.counters.drafts.max(1);
    let most = done.iter().map(longest).max();
    assert!(most > Some(2 * MAX_DRAFT_LEN as u64), "{most:?} drafts a step");
}

/// Without a seed branches follow the noise that the target draws by, and texts are distributed as it says all the same.
#[test]
fn unseeded_texts_are_distributed_as_the_target_says_with_branches() {
    const TEXT_LEN: usize = 4;
    const NUM_TEXTS: usize = 3000;
    let (_dir, engine) = target(Drafts::Model);
    let params = SamplingParams { temperature: 1.3, top_k: 2, ..SamplingParams::default() };
    let prompt = tokens(20);
    let mut expected = BTreeMap::from([(Vec::new(), 1.0)]);
    for _ in 0..TEXT_LEN {
        let mut longer = BTreeMap::new();
        for (text, reached) in expected {
            let known = [&prompt[..], &text].concat();
            let rows = in_parts(&mut on_emulator(&engine, 2), &known, &[known.len()]);
            for (token, chance) in two_likeliest(rows.last().unwrap(), params.temperature) {
                longer.insert([&text[..], &[token]].concat(), reached * chance);
            }
        }
        expected = longer;
    }
    let request = Request {
        prompt: prompt.into(),
        max_tokens: TEXT_LEN,
        draft_len: Some(3),
        sampling: params,
        ignore_eos: true,
        ..Request::default()
    };
    let options = Options { draft_branches: 2, ..running::options(Fixed) };
    let run = |request: &Request| {
        let mut runtime = load_with(&engine, options.clone(), Schedule::PLAIN);
        let done = running::run(&mut runtime, &vec![request.clone(); NUM_TEXTS]);
        let (drafted, accepted) = totals(&done);
        assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted} drafts accepted");
        let mut counts = BTreeMap::new();
        texts(&done).into_iter().for_each(|text| *counts.entry(text).or_default() += 1);
        p_value(&counts, &expected)
    };
    let first = run(&request);
    eprintln!("p = {first:.3}");
    // Other keys each time: what is wrong is refused twice.
    assert!(first >= ALPHA || run(&request) >= ALPHA, "p = {first:e}, and again");
    let mut warmer = request;
    warmer.sampling.temperature = 2.0;
    assert!(run(&warmer) < ALPHA, "another temperature passes");
}

/// The two tokens that may be drawn, with their probabilities.
fn two_likeliest(logits: &[f32], temperature: f32) -> [(u32, f64); 2] {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let gap = f64::from(logits[ids[0]] - logits[ids[1]]) / f64::from(temperature);
    let first = 1.0 / (1.0 + (-gap).exp());
    [(ids[0] as u32, first), (ids[1] as u32, 1.0 - first)]
}

/// A step's tokens follow from the text alone: what branches before it left in the caches is what a runtime computes that
/// reads all of the text now.
#[test]
fn drafts_do_not_depend_on_branches_before_them() {
    for drafts in [Drafts::Model, Drafts::AtOnce, Drafts::Head] {
        let (_dir, engine) = target(drafts);
        // What is right how often decides which forks are taken, but not so soon which three of these.
        let options = Options { draft_branches: 4, ..running::options(Fixed) };
        let request = Request { max_tokens: 24, draft_len: Some(3), ..requests()[1].clone() };
        let mut runtime = load_with(&engine, options.clone(), Schedule::PLAIN);
        let steps = steps(&mut runtime, &request);
        let text = [&request.prompt[..], &steps.concat()].concat();
        let (mut known, mut kept) = (request.prompt.len() + steps[0].len(), 0);
        for (nth, step) in steps.iter().enumerate().skip(1) {
            // The last known token comes with the prompt, as the first one does.
            let again = Request {
                prompt: text[..known - 1].to_vec().into(),
                max_tokens: text.len() - known + 1,
                ..request.clone()
            };
            let found =
                self::steps(&mut load_with(&engine, options.clone(), Schedule::PLAIN), &again);
            assert_eq!(found[1], *step, "{drafts:?}: step {nth}, behind {known} tokens");
            (known, kept) = (known + step.len(), kept + step.len() - 1);
        }
        assert!(kept > 5, "{drafts:?}: {kept} drafts are kept");
    }
}

/// The tokens of each step that brings some.
fn steps(runtime: &mut Runtime, request: &Request) -> Vec<Vec<u32>> {
    runtime.add(request.clone()).expect("the request is allowed");
    let mut steps = Vec::new();
    while !runtime.is_idle() {
        let events = runtime.step().events;
        let tokens = events.iter().flat_map(|event| &event.emitted).map(|emitted| emitted.token);
        steps.push(tokens.collect::<Vec<u32>>());
    }
    steps.retain(|tokens| !tokens.is_empty());
    steps
}
