//! The scheduler's behaviours, one at a time, against the fake model.

mod load;
mod reading;
mod reuse;
mod world;

use super::fake::{self, limits};
use super::*;
use crate::batch::{Executor, Outcome, WANTED};
use crate::draft_len::DraftPolicy;
use crate::sequence::{FinishReason, Limits};
use std::collections::BTreeSet;
use std::time::Duration;
use world::{World, config, prompt};

#[test]
fn texts_are_the_same_for_every_draft_length() {
    for draft_len in 0..=6 {
        let mut world = World::fixed(config());
        (1..=12).for_each(|id| world.add(id, 5 + id as usize, limits(40, draft_len)).unwrap());
        world.run();
        world.check_texts(&BTreeSet::new());
        let drafted: u64 = world.finished.values().map(|sequence| sequence.counters.drafted).sum();
        assert_eq!(drafted > 0, draft_len > 0);
    }
}

#[test]
fn texts_are_the_same_with_look_ups_ahead_of_a_model() {
    for policy in [DraftPolicy::Fixed, DraftPolicy::Adaptive] {
        for num_pages in [12, 64] {
            let config = SchedulerConfig { num_pages, ..config() };
            let mut world = World::combined(config, policy, 60);
            (1..=12).for_each(|id| world.add(id, 5 + id as usize, limits(60, 6)).unwrap());
            world.run();
            world.check_texts(&BTreeSet::new());
        }
    }
}

#[test]
fn what_is_looked_up_takes_rows_and_no_passes_and_tells_what_they_cost() {
    let mut world = World::combined(config(), DraftPolicy::Fixed, 80);
    world.add(1, 5, limits(100, 6)).unwrap();
    world.step();
    let (mut found, mut behind) = (0, 0);
    while !world.scheduler.is_idle() {
        let schedule = world.scheduler.schedule();
        let entries = world.scheduler.entries(&schedule);
        let mut stepped = world.executor.step(&entries, WANTED).unwrap().unwrap();
        stepped.cost = Some(Duration::from_millis(5));
        let Outcome { drafted, draft_passes, .. } = stepped.outcomes[0];
        let (_, time) = world.scheduler.commit(&schedule, stepped);
        let draft_rows = schedule.parts[0].draft_rows;
        if drafted > 0 && draft_passes == 0 {
            let shape = time.expect("nothing ran but rows of the target").shape;
            let passes = (shape.drafting, shape.draft_positions, shape.draft_passes);
            assert_eq!((shape.rows, passes), (1 + drafted, (0, 0, 0)));
            found += 1;
            behind += usize::from(draft_rows > 2);
        } else if draft_rows > 2 {
            assert_eq!(time, None, "the model catches up");
        } else if drafted > 0 {
            let shape = time.expect("a step that only drafts").shape;
            assert_eq!((shape.drafting, shape.draft_passes), (1, drafted));
        }
    }
    assert!(found > 3 && behind > 0, "{found} found, {behind} of them while the model was behind");
}

#[test]
fn drafts_save_steps() {
    let steps = |draft_len| {
        let mut world = World::fixed(config());
        world.add(1, 5, limits(100, draft_len)).unwrap();
        world.run();
        world.executor.num_steps
    };
    // 0.8 accepted: 2.9 tokens a step with five drafts, less what the fake leaves out.
    assert!(steps(5) * 2 < steps(0), "{} against {}", steps(5), steps(0));
}

#[test]
fn a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_decoding() {
    let mut world = World::fixed(SchedulerConfig { max_num_tokens: 10, ..config() });
    world.add(1, 3, limits(30, 2)).unwrap();
    world.step();
    world.add(2, 40, limits(4, 2)).unwrap();
    let schedule = world.step();
    let parts: Vec<_> = schedule.parts.iter().map(|p| (p.id, p.chunk, p.draft_len())).collect();
    assert_eq!(parts, [(1, 1, 2), (2, 7, 0)]);
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_lower_priority_number_is_served_first() {
    let mut world = World::fixed(SchedulerConfig { max_batch_size: 1, ..config() });
    for (id, priority) in [(1, 2), (2, 1), (3, 2), (4, 0)] {
        world.add(id, 5, Limits { priority, ..limits(5, 0) }).unwrap();
    }
    world.run();
    assert_eq!(world.started, [4, 2, 1, 3]);
}

#[test]
fn rows_of_one_request_take_turns_with_the_requests_behind_it() {
    let mut world = World::fixed(SchedulerConfig { max_batch_size: 1, ..config() });
    for row in 0..4 {
        world.add(10 + row as u64, 5, Limits { row, ..limits(5, 0) }).unwrap();
    }
    (1..=2).for_each(|id| world.add(id, 5, limits(5, 0)).unwrap());
    world.run();
    assert_eq!(world.started, [10, 11, 1, 12, 2, 13]);
}

#[test]
fn a_prompt_of_many_steps_gives_way_to_later_ones_of_few() {
    let mut world = World::fixed(SchedulerConfig { max_num_tokens: 10, ..config() });
    world.add(1, 40, limits(5, 0)).unwrap();
    world.step();
    (2..=3).for_each(|id| world.add(id, 4, limits(1, 0)).unwrap());
    let parts = |schedule: &Schedule| -> Vec<_> {
        schedule.parts.iter().map(|part| (part.id, part.chunk)).collect()
    };
    // A step's worth each: the first has had as many as the requests that have come since.
    assert_eq!(parts(&world.step()), [(1, 10)]);
    assert_eq!(parts(&world.step()), [(2, 4), (1, 6)]);
    assert_eq!(parts(&world.step()), [(1, 10)]);
    assert_eq!(parts(&world.step()), [(3, 4), (1, 4)]);
    world.run();
    world.check_texts(&BTreeSet::new());
}

/// Rows of the first sequence in the next step.
fn first_chunk(world: &mut World) -> Option<usize> {
    world.step().parts.iter().find(|part| part.id == 1).map(|part| part.chunk)
}

#[test]
fn a_very_long_prompt_gets_few_rows_of_each_step_beside_others() {
    let config =
        SchedulerConfig { max_num_tokens: 16, num_pages: 20, max_seq_len: 200, ..config() };
    let mut world = World::fixed(config);
    world.add(1, 100, limits(5, 0)).unwrap();
    assert_eq!(first_chunk(&mut world), Some(16), "nobody else is there");
    world.add(2, 3, limits(2, 0)).unwrap();
    assert_eq!(first_chunk(&mut world), Some(4), "one is let in");
    assert_eq!(first_chunk(&mut world), Some(4), "it decodes");
    assert_eq!(first_chunk(&mut world), Some(16), "it has ended");
    // Two long prompts take turns.
    world.add(3, 100, limits(1, 0)).unwrap();
    assert_eq!(first_chunk(&mut world), Some(16));
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_very_long_prompt_leaves_steps_short_that_cannot_be_given_up() {
    let long_prompts = LongPrompts { rows_beside_others: 3, give_way: false };
    let sizes = SchedulerConfig { max_num_tokens: 16, num_pages: 20, max_seq_len: 200, ..config() };
    let mut world = World::fixed(SchedulerConfig { long_prompts, ..sizes });
    world.add(1, 100, limits(5, 0)).unwrap();
    assert_eq!(first_chunk(&mut world), Some(4), "a quarter of the step");
    world.add(2, 3, limits(2, 0)).unwrap();
    assert_eq!(first_chunk(&mut world), Some(3));
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn only_steps_of_long_prompts_alone_give_way_and_nothing_of_them_is_kept() {
    let config =
        SchedulerConfig { max_num_tokens: 16, num_pages: 20, max_seq_len: 200, ..config() };
    let mut world = World::fixed(config);
    world.hurried = true;
    world.add(1, 100, limits(5, 3)).unwrap();
    let mut gave_way = 0;
    while !world.scheduler.is_idle() {
        let schedule = world.step();
        assert_eq!(schedule.gives_way, schedule.parts.iter().all(|part| part.chunk > 1));
        gave_way += usize::from(schedule.gives_way);
    }
    // 100 tokens are seven steps, each run again.
    assert_eq!(gave_way, 14);
    // Who comes to a full engine would have to wait anyway.
    (2..=10).for_each(|id| world.add(id, 100, limits(5, 0)).unwrap());
    while world.scheduler.usage().waiting > 0 {
        let gives_way = world.step().gives_way;
        assert!(!gives_way || world.scheduler.usage().waiting == 0);
    }
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_sequence_that_is_delayed_goes_behind_those_that_come_later() {
    let mut world = World::fixed(SchedulerConfig { max_batch_size: 1, ..config() });
    (1..=3).for_each(|id| world.add(id, 5, limits(5, 0)).unwrap());
    world.step();
    // The first runs: it cannot be put off any more.
    (1..=2).for_each(|id| world.scheduler.delay(id));
    world.add(4, 5, limits(5, 0)).unwrap();
    world.run();
    assert_eq!(world.started, [1, 3, 4, 2]);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn drafts_go_before_sequences_when_pages_run_out() {
    // Both sequences hold one of the two pages and decode their 15th position: plain rows fit.
    let mut world = World::fixed(SchedulerConfig { num_pages: 2, ..config() });
    world.add(1, 13, limits(19, 6)).unwrap();
    world.add(2, 13, limits(3, 0)).unwrap();
    let first = world.step();
    assert_eq!(first.parts.len(), 1, "the second waits for the first to have room to grow");
    world.run();
    world.check_texts(&BTreeSet::new());

    let mut world = World::fixed(SchedulerConfig { num_pages: 3, ..config() });
    world.add(1, 13, limits(18, 6)).unwrap();
    world.add(2, 13, limits(18, 6)).unwrap();
    world.step();
    world.step();
    // One free page: the first drafts into it, the second decodes plainly in its own.
    let schedule = world.step();
    let drafts: Vec<_> = schedule.parts.iter().map(|part| part.draft_len()).collect();
    assert_eq!(drafts, [6, 0], "{schedule:?}");
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn pages_within_reach_come_from_what_is_left_and_are_the_first_to_go_back() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 5, lookahead: 20, ..config() });
    let held = |world: &World| -> Vec<usize> {
        world.scheduler.running.values().map(|sequence| sequence.pages.len()).collect()
    };
    world.add(1, 13, limits(60, 0)).unwrap();
    world.step();
    assert_eq!(held(&world), [3], "13 positions of the prompt and 20 within reach");
    // Its prompt wants three pages, and two are free.
    world.add(2, 40, limits(10, 0)).unwrap();
    world.step();
    assert_eq!(
        held(&world),
        [1, 4],
        "the first cannot have two more, the second has all it ever needs"
    );
    world.run();
    world.check_texts(&BTreeSet::new());
    assert_eq!(world.finished[&1].counters.preemptions, 0);
    assert_eq!(world.finished[&1].counters.new_pages, 5, "73 positions");
}

#[test]
fn the_newest_of_the_lowest_priority_is_preempted_and_resumes() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 6, ..config() });
    for (id, priority) in [(1, 0), (2, 1), (3, 0)] {
        world.add(id, 5, Limits { priority, ..limits(80, 0) }).unwrap();
    }
    world.run();
    world.check_texts(&BTreeSet::new());
    let preemptions = |id| world.finished[&id].counters.preemptions;
    assert_eq!(preemptions(1), 0);
    assert!(preemptions(2) > 0);
}

#[test]
fn a_forced_preemption_does_not_change_a_text() {
    let mut world = World::fixed(config());
    world.forced = true;
    (1..=3).for_each(|id| world.add(id, 20, limits(60, 4)).unwrap());
    for round in 0..30 {
        world.step();
        world.scheduler.preempt(1 + round % 3);
    }
    assert!(!world.scheduler.preempt(99));
    world.run();
    world.check_texts(&BTreeSet::new());
    assert!(world.finished[&1].counters.preemptions > 2);
}

#[test]
fn a_sequence_removed_during_a_step_is_passed_over() {
    let mut world = World::fixed(config());
    (1..=3).for_each(|id| world.add(id, 5, limits(9, 2)).unwrap());
    let schedule = world.scheduler.schedule();
    world.started.clone_from(&schedule.started);
    let stepped = world.executor.step(&world.scheduler.entries(&schedule), WANTED);
    let stepped = stepped.unwrap().expect("it is wanted");
    let cancelled = world.scheduler.finish(1, FinishReason::Cancelled).unwrap();
    assert_eq!(cancelled.finish, Some(FinishReason::Cancelled));
    assert!(world.scheduler.preempt(2));
    let (events, _) = world.scheduler.commit(&schedule, stepped);
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), [3]);
    world.texts.insert(3, events[0].emitted.iter().map(|emitted| emitted.token).collect());
    world.run();
    world.check_texts(&BTreeSet::from([1]));
}

#[test]
fn a_caller_may_end_a_sequence_for_a_stop_word() {
    let mut world = World::fixed(config());
    world.add(1, 5, limits(50, 0)).unwrap();
    world.step();
    let sequence = world.scheduler.finish(1, FinishReason::StopWord).unwrap();
    assert_eq!(sequence.finish, Some(FinishReason::StopWord));
    assert_eq!(sequence.generated().len(), 1);
    assert!(world.scheduler.finish(1, FinishReason::StopWord).is_none());
    world.run();
}

#[test]
fn requests_that_can_never_be_served_are_refused_with_their_limits() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 4, ..config() });
    let mut refusal = |prompt_len, max_tokens, draft_len| {
        world.add(1, prompt_len, limits(max_tokens, draft_len)).unwrap_err().to_string()
    };
    assert_eq!(refusal(0, 5, 0), "prompt: 0 tokens, at least 1 is needed");
    assert_eq!(refusal(5, 0, 0), "max_tokens: 0, at least 1 is needed");
    assert_eq!(refusal(5, 5, 7), "draft_len: 7 exceeds max_draft_len 6");
    assert_eq!(
        refusal(100, 29, 0),
        "max_tokens: 29 after a prompt of 100 needs 129 positions, max_seq_len is 128"
    );
    assert_eq!(
        refusal(60, 5, 0),
        "max_tokens: 5 after a prompt of 60 needs 5 KV pages, the engine has 4"
    );
    assert!(refusal(5, usize::MAX, 0).contains("max_seq_len is 128"));
    world.add(1, 60, limits(4, 6)).unwrap();
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_full_queue_is_a_matter_of_capacity() {
    let mut world = World::fixed(SchedulerConfig { max_queue: 2, ..config() });
    (1..=2).for_each(|id| world.add(id, 5, limits(5, 0)).unwrap());
    assert!(!world.scheduler.has_room());
    let error = world.add(3, 5, limits(5, 0)).unwrap_err();
    assert!(matches!(error, Error::Capacity(_)));
    assert_eq!(error.to_string(), "2 requests wait and max_queue is 2");
    world.step();
    world.add(3, 5, limits(5, 0)).unwrap();
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_drafter_left_behind_catches_up_within_the_budget() {
    // Nothing is ever accepted: the tuner stops drafting, and only probes and catch-ups run.
    let mut world = World::new(
        SchedulerConfig { max_seq_len: 600, max_num_tokens: 40, ..config() },
        DraftPolicy::Adaptive,
        0,
    );
    world.add(1, 5, limits(500, 6)).unwrap();
    let (mut plain, mut max_rows) = (0, 0);
    while !world.scheduler.is_idle() {
        let schedule = world.step();
        plain += schedule.parts.iter().filter(|part| part.draft_rows == 0).count();
        max_rows =
            schedule.parts.iter().map(|part| part.draft_rows).max().max(Some(max_rows)).unwrap();
    }
    assert!(plain > 350, "{plain} plain steps");
    assert!((2..=11).contains(&max_rows), "{max_rows} rows caught up at once");
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn whether_a_request_may_have_to_go_again_is_a_matter_of_policy() {
    let preemptions = |admission| {
        let mut world = World::fixed(SchedulerConfig { num_pages: 6, admission, ..config() });
        (1..=3).for_each(|id| world.add(id, 5, limits(40, 3)).unwrap());
        let started = world.step().started;
        world.run();
        world.check_texts(&BTreeSet::new());
        (started.len(), world.scheduler.usage().preemptions)
    };
    // Three pages for each at its longest, one at first.
    assert_eq!(preemptions(AdmissionPolicy::GuaranteedNoEvict), (2, 0));
    let (started, preempted) = preemptions(AdmissionPolicy::MaxUtilization);
    assert!(started == 3 && preempted > 0, "{started} started, {preempted} preempted");
}

/// Given drafts, how many of them are accepted, and the steps that ten tokens take.
#[test]
fn a_given_draft_is_verified_behind_the_prompt_and_never_changes_a_text() {
    let request = || fake::sequence(1, world::prompt(1, 20), limits(10, 0));
    let right = fake::expected(&request(), None)[..6].to_vec();
    let wrong: Vec<u32> = right.iter().map(|token| (token + 1) % fake::VOCAB_SIZE).collect();
    let half = [&right[..3], &wrong[3..]].concat();
    for (given, accepted) in [(right, 6), (wrong, 0), (half, 3)] {
        for (max_num_tokens, draft_len) in [(64, 0), (64, 4), (7, 0)] {
            let mut world = World::fixed(SchedulerConfig { max_num_tokens, ..config() });
            let mut sequence = Sequence { given: given.clone(), ..request() };
            sequence.limits.draft_len = draft_len;
            world.add_sequence(sequence).unwrap();
            world.run();
            world.check_texts(&BTreeSet::new());
            let counters = &world.finished[&1].counters;
            if draft_len == 0 {
                // Of 7 rows the last step of the prompt leaves one to the draft.
                let drafted = if max_num_tokens == 7 { 1 } else { 6 };
                assert_eq!((counters.drafted, counters.accepted), (drafted, accepted.min(drafted)));
                assert_eq!(counters.steps, 10 - counters.accepted);
            }
        }
    }
}

#[test]
fn a_given_draft_waits_for_the_prompt_to_be_computed() {
    let mut world = World::fixed(config());
    // The second prompt is computed up to its last token when it starts.
    for id in 1..=2 {
        let mut sequence = fake::sequence(id, world::prompt(1, 17), limits(10, 0));
        sequence.given = fake::expected(&sequence, None)[..4].to_vec();
        world.add_sequence(sequence).unwrap();
        world.run();
        assert_eq!(world.finished[&id].counters.accepted, 4);
    }
    assert_eq!(world.finished[&2].counters.reused_tokens, 16);
    world.check_texts(&BTreeSet::new());
}

/// Whoever wants to hear of its prompt computes all of it, a bounded part in a step; others go on sharing.
#[test]
fn prompts_that_are_told_of_are_computed_whole() {
    let mut world =
        World::fixed(SchedulerConfig { max_num_tokens: 200, max_seq_len: 256, ..config() });
    let telling = |id| Sequence {
        sampler: fake::telling(),
        ..fake::sequence(id, prompt(1, 100), limits(5, 3))
    };
    world.add_sequence(telling(1)).unwrap();
    world.add_sequence(telling(2)).unwrap();
    let chunks: Vec<usize> = world.step().parts.iter().map(|part| part.chunk).collect();
    // The second one comes when there are rows left to be told of.
    assert_eq!(chunks, [64]);
    world.run();
    world.add_prompt(3, prompt(1, 100), limits(5, 3)).unwrap();
    world.run();
    let reused = |id| world.finished[&id].counters.reused_tokens;
    assert_eq!([reused(1), reused(2), reused(3)], [0, 0, 96]);
    world.check_told();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn what_was_told_before_a_preemption_is_not_told_again() {
    let mut world = World::fixed(SchedulerConfig { max_seq_len: 256, ..config() });
    let sequence = fake::sequence(1, prompt(1, 100), limits(40, 3));
    world.add_sequence(Sequence { sampler: fake::telling(), ..sequence }).unwrap();
    world.step();
    assert_eq!(world.told[&1].len(), 64);
    world.scheduler.preempt(1);
    // What is known is computed again beside what is not, as it need not be told.
    let chunks: Vec<usize> = (0..2).map(|_| world.step().parts[0].chunk).collect();
    assert_eq!(chunks, [64, 36]);
    world.step();
    world.scheduler.preempt(1);
    world.run();
    assert_eq!(world.finished[&1].counters.reused_tokens, 96);
    world.check_told();
    world.check_texts(&BTreeSet::new());
}
