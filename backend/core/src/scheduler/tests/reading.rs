//! Which sequences a model that drafts reads, where lengths adapt.

use super::world::{World, config, prompt};
use crate::batch::LongPrompts;
use crate::draft_len::{DraftPolicy, PassCost, Tuner};
use crate::engine::CostTable;
use crate::scheduler::SchedulerConfig;
use crate::scheduler::fake::{Fake, limits};
use crate::sequence::{FinishReason, Sequence};
use std::collections::BTreeSet;

/// A full page and some, whose answer is a page and a half.
const PROMPT_LEN: usize = 60;
const MAX_TOKENS: usize = 40;

/// An engine that adapts; its model is right in so many of a hundred tokens.
fn adaptive(percent: u64) -> World {
    World::new(config(), DraftPolicy::Adaptive, percent)
}

/// Runs requests one after the other, each with a prompt of its own; gives how many were read.
fn serve(world: &mut World, ids: std::ops::Range<u64>, draft_len: usize) -> usize {
    let mut num_read = 0;
    for id in ids {
        world.add(id, PROMPT_LEN, limits(MAX_TOKENS, draft_len)).unwrap();
        num_read += usize::from(world.step().parts[0].draft_rows > 0);
        world.run();
    }
    num_read
}

#[test]
fn drafts_that_are_never_right_cost_a_fiftieth_with_the_prompts_that_they_need() {
    let mut plain = adaptive(0);
    serve(&mut plain, 1..200, 0);
    let mut drafting = adaptive(0);
    let num_read = serve(&mut drafting, 1..200, 6);
    assert!((2..60).contains(&num_read), "{num_read} of 199 prompts were read");
    assert!(drafting.ms < plain.ms / 0.98, "{} ms, {} ms plainly", drafting.ms, plain.ms);
    drafting.check_texts(&BTreeSet::new());
}

#[test]
fn drafts_that_are_always_right_are_worth_every_prompt() {
    let mut world = adaptive(100);
    assert_eq!(serve(&mut world, 1..40, 6), 39);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn who_is_not_read_begins_with_any_pages_and_leaves_such_pages() {
    let mut world = adaptive(0);
    serve(&mut world, 1..100, 6);
    let mut computed = Vec::new();
    for id in 100..104 {
        world.add_prompt(id, prompt(7777, PROMPT_LEN), limits(3, 6)).unwrap();
        let part = world.step().parts[0].clone();
        computed.push((part.chunk, part.draft_rows));
        world.run();
    }
    // A trial takes the pages of those who were not read for nothing, unless there is time to compute them again.
    assert_eq!(computed, [(60, 0), (12, 0), (12, 0), (12, 0)]);
    world.check_texts(&BTreeSet::new());
}

/// Rows that are free up to eight: one sequence gains by drafts, eight do not.
#[test]
fn who_comes_with_others_is_read_only_if_it_pays_beside_them() {
    let rows = vec![1, 8, 16, 64];
    let target = CostTable { rows, step_ms: vec![10.0, 10.0, 20.0, 80.0], ..CostTable::default() };
    let pass = CostTable { rows: vec![1, 64], step_ms: vec![1.0, 8.0], ..CostTable::default() };
    for (num_requests, is_read) in [(1, true), (8, false)] {
        let measured = PassCost::Measured(&pass);
        let tuner = Tuner::new(DraftPolicy::Adaptive, 6, Some(&target), measured);
        let mut world = World::with_tuner(config(), tuner, 70);
        for id in 0..num_requests {
            world.add(id, PROMPT_LEN, limits(MAX_TOKENS, 6)).unwrap();
        }
        let parts = world.step().parts.clone();
        let read = parts.iter().filter(|part| part.draft_rows > 0).count();
        assert_eq!(read, if is_read { parts.len() } else { 0 }, "{num_requests} requests");
    }
}

/// Where steps are shorter than the prompts that wait would have them be, trials take no more than their share of the time.
#[test]
fn trials_beside_long_prompts_cost_their_share_of_the_time() {
    let sizes =
        SchedulerConfig { max_num_tokens: 512, max_seq_len: 512, num_pages: 400, ..config() };
    let mut world = World::new(sizes, DraftPolicy::Adaptive, 0);
    serve(&mut world, 1..100, 6);
    let (before, mut read) = (world.ms, 0);
    for round in 0..60 {
        world.add(1000 + 2 * round, 300, limits(4, 6)).unwrap();
        world.add(1001 + 2 * round, 100, limits(10, 6)).unwrap();
        while world.scheduler.num_waiting() > 0 || world.scheduler.running.len() > 6 {
            let schedule = world.step();
            let prompts = schedule.parts.iter().filter(|part| part.chunk > 1);
            read += prompts.map(|part| part.draft_rows).sum::<usize>();
        }
    }
    world.run();
    let share = 0.08 * read as f64 / (world.ms - before);
    assert!(read > 0 && share < 0.01, "{read} rows were read, {share} of the time");
}

#[test]
fn requests_that_are_given_up_are_no_short_answers() {
    let mut world = adaptive(100);
    assert_eq!(serve(&mut world, 1..10, 6), 9);
    for id in 100..200 {
        world.add(id, PROMPT_LEN, limits(MAX_TOKENS, 6)).unwrap();
        assert!(world.scheduler.finish(id, FinishReason::Cancelled).is_some());
    }
    assert_eq!(serve(&mut world, 200..210, 6), 10);
    world.check_texts(&(100..200).collect());
}

#[test]
fn a_request_without_drafts_is_never_read() {
    let mut world = adaptive(100);
    assert_eq!(serve(&mut world, 1..10, 0), 0);
}

/// A head has the target's states of a prompt a step after the target, so it is a chunk behind all along.
#[test]
fn a_prompt_that_a_head_reads_goes_on_beside_others_that_draft() {
    let long_prompts = LongPrompts { rows_beside_others: 64, give_way: true };
    let config = SchedulerConfig { max_seq_len: 512, long_prompts, ..config() };
    let mut world = World::fixed(config);
    world.executor = Fake::new(80, 7, true).with_head();
    world.add(1, 250, limits(20, 4)).unwrap();
    (0..2).for_each(|_| drop(world.step()));
    world.add(2, 3, limits(200, 4)).unwrap();
    (0..8).for_each(|_| drop(world.step()));
    assert!(
        world.texts.contains_key(&1) && !world.texts[&1].is_empty(),
        "it waits for the other one to end"
    );
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_drafter_reads_now_and_then_where_look_ups_always_find_something() {
    let config = SchedulerConfig { max_seq_len: 512, ..config() };
    let most = config.max_num_tokens / 4 + config.max_draft_len;
    let mut world = World::combined(config, DraftPolicy::Fixed, 80);
    world.executor = Fake::new(80, 7, true).finding(100);
    world.add(1, 3, limits(400, 4)).unwrap();
    while !world.scheduler.is_idle() {
        world.step();
        let lags = world.scheduler.running.values().map(Sequence::draft_lag);
        assert!(lags.max().unwrap_or(0) <= most, "further behind than it may be");
    }
    world.check_texts(&BTreeSet::new());
}
