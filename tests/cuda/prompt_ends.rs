//! Ends of prompts: their last rows run with those before them, and the step has their logits alone.

use super::common::running;
use super::common::small::tokens;
use super::{Drafts, emulator, target, texts};
use spec_core::runtime::DraftPolicy::Fixed;
use spec_core::runtime::{Options, Request, Runtime, SequenceId};
use spec_core::sampling::SamplingParams;
use spec_emu::Schedule;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Of `target`.
const NUM_LAYERS: usize = 2;

fn prompt(len: usize, first: usize) -> Request {
    let prompt = tokens(first + len).split_off(first);
    Request { prompt: prompt.into(), ignore_eos: true, ..Request::default() }
}

/// A step for the last token alone would read all weights once more.
#[test]
fn a_prompt_that_is_alone_is_read_once() {
    let (_dir, engine) = target(Drafts::Model);
    let attentions = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&attentions);
    let open =
        move |_| Ok(Box::new(emulator(Schedule::PLAIN).counting("attention", count.clone())) as _);
    let options = Options { kv_tokens: Some(2048), kv_reuse: false, ..running::options(Fixed) };
    let mut runtime = Runtime::load_on(&engine, &options, &open).expect("loads");
    // Of rows that are multiplied as those of decoding, in one block, and in a block and behind it.
    for (len, passes) in [(1, 1), (40, 1), (128, 1), (129, 1), (300, 1), (530, 2)] {
        let request = Request { max_tokens: 1, draft_len: Some(0), ..prompt(len, 0) };
        let before = attentions.load(Ordering::Relaxed);
        running::run(&mut runtime, &[request]);
        let launched = attentions.load(Ordering::Relaxed) - before;
        assert_eq!(launched, passes * NUM_LAYERS, "a prompt of {len} tokens");
    }
}

/// Two texts that have begun, and prompts that come while they go on: some in blocks to their end, some not, some with
/// drafts of their own.
#[test]
fn a_prompt_that_ends_beside_others_ends_as_it_does_alone() {
    for drafts in [Drafts::Model, Drafts::None, Drafts::Skip] {
        let (_dir, engine) = target(drafts);
        let load = |seed| {
            let open = move |_| Ok(Box::new(emulator(Schedule::seeded(seed))) as _);
            let options = Options { kv_tokens: Some(4096), ..running::options(Fixed) };
            Runtime::load_on(&engine, &options, &open).expect("loads")
        };
        let seeded =
            SamplingParams { temperature: 1.2, seed: Some(7), ..SamplingParams::default() };
        let began = [30, 140].map(|len| Request { max_tokens: 40, ..prompt(len, 0) });
        let come = [(200, 3), (129, 5), (90, 7), (300, 9)];
        let come = come.map(|(len, first)| Request { max_tokens: 9, ..prompt(len, first) });
        let all = [&began[..], &come].concat().into_iter().enumerate().map(|(idx, request)| {
            let sampling = if idx % 2 == 0 { seeded.clone() } else { request.sampling.clone() };
            Request { sampling, ..request }
        });
        let mut all: Vec<Request> = all.collect();
        let alone = running::run_alone(&mut load(1), &all);
        for (request, text) in all.iter_mut().zip(&alone) {
            request.draft_len = (drafts == Drafts::None).then_some(0);
            // Two of three tokens that come with the request are right.
            if drafts != Drafts::None && request.prompt.len() > 128 {
                request.given_draft = [&text[..2], &[1]].concat();
            }
        }
        let (began, come) = all.split_at(began.len());
        let mut runtime = load(2);
        let (mut late, mut come_ids, mut steps) = (come.iter(), Vec::new(), 0);
        let mut told = HashMap::<SequenceId, Vec<u32>>::new();
        let done = running::run_steps(&mut runtime, began, |runtime, open| {
            steps += 1;
            if steps % 3 == 0
                && let Some(request) = late.next()
            {
                assert_eq!(open.len(), began.len(), "it comes beside those that have begun");
                come_ids.push(runtime.add(request.clone()).expect("is allowed"));
            }
            let step = runtime.step();
            for event in &step.events {
                let tokens = event.emitted.iter().map(|emitted| emitted.token);
                told.entry(event.id).or_default().extend(tokens);
            }
            step
        });
        let of_late = come_ids.iter().map(|id| told[id].clone()).collect();
        assert_eq!([texts(&done), of_late].concat(), alone, "{drafts:?}");
    }
}

/// Where the last token of a block alone is left for a step, that one may be asked for drafts, and has none: what they would
/// be verified beside has run.
#[test]
fn a_last_token_that_is_left_alone_is_in_its_block() {
    for drafts in [Drafts::Model, Drafts::Skip, Drafts::Lookup] {
        let (_dir, engine) = target(drafts);
        let load = |rows| {
            let open = |_| Ok(Box::new(emulator(Schedule::PLAIN)) as _);
            let max_num_tokens = Some(rows);
            let options =
                Options { kv_tokens: Some(2048), max_num_tokens, ..running::options(Fixed) };
            Runtime::load_on(&engine, &options, &open).expect("loads")
        };
        let request = Request { max_tokens: 40, draft_len: Some(3), ..prompt(273, 0) };
        let alone = running::run_alone(&mut load(512), std::slice::from_ref(&request));
        let done = running::run(&mut load(272), &[request]);
        assert_eq!(texts(&done), alone, "{drafts:?}");
        assert!(done[0].counters.drafted > 0, "{drafts:?}");
    }
}
