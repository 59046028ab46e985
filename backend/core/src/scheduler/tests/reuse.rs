//! Texts that begin alike: what is shared, what is not, and what goes first when room is needed.

use super::super::*;
use super::world::{World, config, prompt};
use crate::batch::{Executor, WANTED};
use crate::pages::{PAGE_TOKENS, PageId, PageKey};
use crate::scheduler::fake::{self, Fake, limits};
use crate::sequence::{FinishReason, Limits, Shares};
use std::collections::BTreeSet;

/// Two full pages and a half.
const PROMPT_LEN: usize = 40;

/// Runs a request of its own and gives the tokens that it found computed.
fn reused(world: &mut World, id: SequenceId, prompt: Vec<u32>, draft_len: usize) -> u64 {
    world.add_prompt(id, prompt, limits(3, draft_len)).unwrap();
    world.run();
    world.finished[&id].counters.reused_tokens
}

fn pages(world: &World, id: SequenceId) -> &[PageId] {
    &world.scheduler.running[&world.scheduler.keys[&id]].pages
}

#[test]
fn a_text_starts_behind_the_full_pages_that_another_left() {
    let mut world = World::fixed(config());
    assert_eq!(reused(&mut world, 1, prompt(1, PROMPT_LEN), 4), 0);
    assert_eq!(reused(&mut world, 2, prompt(1, PROMPT_LEN), 4), 32);
    assert_eq!(world.finished[&2].counters.reused_pages, 2);
    assert_eq!(world.finished[&2].counters.new_pages, 1);
    assert_eq!(reused(&mut world, 3, prompt(3, PROMPT_LEN), 4), 0);
    let mut forked = prompt(1, PROMPT_LEN);
    forked[20] += 1;
    assert_eq!(reused(&mut world, 4, forked, 4), 16);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn only_texts_of_the_same_salt_share_pages() {
    let mut world = World::fixed(config());
    let mut reused = |id, salt: &str| {
        let sequence = fake::sequence(id, prompt(1, PROMPT_LEN), limits(3, 4));
        let shares = PageKey::of_salt(salt.as_bytes()).map_or(Shares::All, Shares::Behind);
        world.add_sequence(Sequence { shares, ..sequence }).unwrap();
        world.run();
        world.finished[&id].counters.reused_tokens
    };
    assert_eq!([reused(1, ""), reused(2, "a"), reused(3, "b")], [0, 0, 0]);
    assert_eq!([reused(4, "b"), reused(5, ""), reused(6, "a")], [32, 32, 32]);
}

#[test]
fn the_last_token_is_always_computed() {
    let mut world = World::fixed(config());
    assert_eq!(reused(&mut world, 1, prompt(1, 2 * PAGE_TOKENS), 0), 0);
    assert_eq!(reused(&mut world, 2, prompt(1, 2 * PAGE_TOKENS), 0), 16);
    assert_eq!(reused(&mut world, 3, prompt(1, 2 * PAGE_TOKENS + 1), 0), 32);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_conversation_goes_on_behind_its_last_answer() {
    let mut world = World::fixed(config());
    world.add(1, 20, limits(30, 4)).unwrap();
    world.run();
    let longer = [&world.finished[&1].tokens[..], &[1, 2, 3]].concat();
    // The last token of the answer was never computed: 49 positions, three pages.
    assert_eq!(reused(&mut world, 2, longer, 4), 48);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn texts_share_pages_while_they_run() {
    let mut world = World::fixed(config());
    world.add_prompt(1, prompt(1, PROMPT_LEN), limits(60, 4)).unwrap();
    world.step();
    world.add_prompt(2, prompt(1, PROMPT_LEN), limits(60, 4)).unwrap();
    world.step();
    assert_eq!(pages(&world, 1)[..2], pages(&world, 2)[..2]);
    assert_ne!(pages(&world, 1)[2], pages(&world, 2)[2]);
    assert!(world.scheduler.finish(1, FinishReason::Cancelled).is_some());
    assert_eq!(world.scheduler.usage().used_pages, pages(&world, 2).len());
    world.run();
    world.check_texts(&BTreeSet::from([1]));
}

#[test]
fn a_text_waits_for_the_pages_that_another_is_computing_and_lets_others_go_first() {
    let mut world = World::fixed(SchedulerConfig { max_num_tokens: 40, ..config() });
    for id in 1..=2 {
        world.add_prompt(id, prompt(1, PROMPT_LEN + 10), limits(60, 4)).unwrap();
    }
    world.add(3, 5, limits(60, 4)).unwrap();
    assert_eq!(world.step().started, [1]);
    // Two pages of three are there, but the third is on its way.
    assert_eq!(world.step().started, [3]);
    assert_eq!(world.step().started, [2]);
    assert_eq!(pages(&world, 1)[..3], pages(&world, 2)[..3]);
    world.run();
    assert_eq!(world.finished[&2].counters.reused_tokens, 48);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_text_waits_for_the_half_of_a_head_that_reads_a_step_later() {
    let mut world =
        World::fixed(SchedulerConfig { max_num_tokens: 128, max_seq_len: 256, ..config() });
    world.executor = Fake::new(80, 7, true).with_head();
    for (id, draft_len) in [(1, 4), (2, 4), (3, 0)] {
        world.add_prompt(id, prompt(1, 100), limits(60, draft_len)).unwrap();
    }
    assert_eq!(world.step().started, [1]);
    world.run();
    // Six full pages, and the rest each computes for itself.
    let reused = [1, 2, 3].map(|id| world.finished[&id].counters.reused_tokens);
    assert_eq!(reused, [0, 96, 96]);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_text_does_not_wait_for_pages_that_it_could_not_use() {
    let started = |draft_lens: [usize; 2], shares| {
        let mut world = World::fixed(SchedulerConfig { max_num_tokens: 128, ..config() });
        for (id, draft_len) in (1..).zip(draft_lens) {
            let sequence = fake::sequence(id, prompt(1, PROMPT_LEN), limits(9, draft_len));
            world.add_sequence(Sequence { shares, ..sequence }).unwrap();
        }
        let started = world.step().started.len();
        world.run();
        world.check_texts(&BTreeSet::new());
        started
    };
    assert_eq!(started([0, 4], Shares::All), 2, "the first leaves out the drafter's half");
    assert_eq!(started([4, 4], Shares::NoOne), 2);
    assert_eq!(started([4, 0], Shares::All), 1);
}

#[test]
fn a_text_does_not_wait_for_pages_of_one_behind_it_that_may_starve() {
    let beginning = prompt(1, 100);
    let request =
        |id, priority| fake::sequence(id, beginning.clone(), Limits { priority, ..limits(9, 0) });
    let mut world = World::fixed(SchedulerConfig { max_num_tokens: 20, ..config() });
    world.add_sequence(request(1, 3)).unwrap();
    world.step();
    // From here on the first gets no rows.
    for id in 2..=3 {
        world.add_prompt(id, prompt(id, 100), Limits { priority: 2, ..limits(9, 0) }).unwrap();
    }
    assert_eq!(world.step().started, [2]);
    world.add_sequence(request(4, 1)).unwrap();
    assert_eq!(world.step().started, [4]);
    // Of two that begin alike the one of the lower priority still waits.
    world.add_sequence(request(5, 2)).unwrap();
    assert!(world.step().started.is_empty());
    world.run();
    assert_eq!(world.finished[&5].counters.reused_tokens, 96);

    let mut world = World::fixed(SchedulerConfig { max_num_tokens: 20, ..config() });
    world.add_sequence(request(1, 0)).unwrap();
    world.scheduler.delay(1);
    world.step();
    world.add_sequence(request(2, 0)).unwrap();
    assert_eq!(world.step().started, [2], "the first was put behind all others");
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_crowd_that_waits_for_a_prompt_costs_a_step_no_look_at_its_pages() {
    let config = SchedulerConfig {
        max_num_tokens: 32,
        max_seq_len: 1024,
        num_pages: 256,
        max_queue: 1000,
        ..config()
    };
    let mut world = World::fixed(config);
    for id in 1..=300 {
        world.add_prompt(id, prompt(1, 800), limits(2, 0)).unwrap();
    }
    // The first beside one that decodes: the others could have the rest of each step.
    world.add_prompt(301, prompt(2, 3), limits(100, 0)).unwrap();
    for _ in 0..50 {
        world.scheduler.pool.lookups.set(0);
        let schedule = world.scheduler.schedule();
        let lookups = world.scheduler.pool.lookups.get();
        assert!(lookups <= 10, "{lookups} pages looked for");
        let stepped = world.executor.step(&world.scheduler.entries(&schedule), WANTED);
        let stepped = stepped.unwrap().expect("it is wanted");
        world.scheduler.commit(&schedule, stepped);
    }
    assert_eq!(world.scheduler.usage().running, 2);
}

#[test]
fn only_a_text_without_drafts_takes_pages_without_the_drafters_half() {
    let mut world = World::fixed(config());
    assert_eq!(reused(&mut world, 1, prompt(1, PROMPT_LEN), 0), 0);
    assert_eq!(reused(&mut world, 2, prompt(1, PROMPT_LEN), 0), 32);
    assert_eq!(reused(&mut world, 3, prompt(1, PROMPT_LEN), 4), 0);
    // Those of the third took their place.
    assert_eq!(reused(&mut world, 4, prompt(1, PROMPT_LEN), 4), 32);
    assert_eq!(reused(&mut world, 5, prompt(1, PROMPT_LEN), 0), 32);
    assert_eq!(world.scheduler.usage().cached_pages, 2);

    let mut world = World::fixed(SchedulerConfig { drafter_caches: false, ..config() });
    assert_eq!(reused(&mut world, 1, prompt(1, PROMPT_LEN), 0), 0);
    assert_eq!(reused(&mut world, 2, prompt(1, PROMPT_LEN), 4), 32);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn the_drafter_starts_where_the_target_does() {
    let mut world = World::fixed(config());
    reused(&mut world, 1, prompt(1, PROMPT_LEN), 6);
    world.add_prompt(2, prompt(1, PROMPT_LEN), limits(30, 6)).unwrap();
    let first = &world.step().parts[0];
    assert_eq!((first.chunk, first.draft_rows), (8, 8));
    let second = &world.step().parts[0];
    assert_eq!((second.draft_len(), second.draft_rows), (6, 1));
}

#[test]
fn a_running_text_moves_to_pages_that_have_the_drafters_half_too() {
    let mut world = World::fixed(config());
    world.add_prompt(1, prompt(1, PROMPT_LEN), limits(60, 0)).unwrap();
    world.step();
    let before = pages(&world, 1)[..2].to_vec();
    world.add_prompt(2, prompt(1, PROMPT_LEN), limits(60, 4)).unwrap();
    world.step();
    assert_eq!(pages(&world, 1)[..2], pages(&world, 2)[..2]);
    assert_ne!(pages(&world, 1)[..2], before);
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_preempted_text_goes_on_where_it_was() {
    let mut world = World::fixed(config());
    world.forced = true;
    world.add(1, PROMPT_LEN, limits(60, 0)).unwrap();
    (0..10).for_each(|_| drop(world.step()));
    assert!(world.scheduler.preempt(1));
    let part = &world.step().parts[0];
    // 40 and 10 tokens are known; three pages were full.
    assert_eq!(part.chunk, 2);
    world.run();
    assert_eq!(world.finished[&1].counters.reused_tokens, 48);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn the_page_unused_for_longest_is_given_up_first_from_the_end_of_its_text() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 8, ..config() });
    for (id, name) in [(1, 1), (2, 2), (3, 1)] {
        reused(&mut world, id, prompt(name, PROMPT_LEN), 0);
    }
    assert_eq!(world.scheduler.usage().cached_pages, 4);
    // Five pages, where four are free.
    reused(&mut world, 4, prompt(4, 70), 0);
    assert_eq!(reused(&mut world, 5, prompt(1, PROMPT_LEN), 0), 32);
    assert_eq!(reused(&mut world, 6, prompt(2, PROMPT_LEN), 0), 16);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_text_needs_no_room_for_what_it_shares() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 8, ..config() });
    world.add_prompt(1, prompt(1, 66), limits(10, 0)).unwrap();
    world.step();
    world.step();
    for id in 2..=3 {
        world.add_prompt(id, prompt(1, 66), limits(10, 0)).unwrap();
    }
    assert_eq!(world.step().started, [2]);
    assert_eq!(world.scheduler.usage().used_pages, 6);
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_text_needs_room_for_what_it_takes_from_nobody() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 7, ..config() });
    reused(&mut world, 1, prompt(1, 66), 0);
    world.add(2, 20, limits(10, 0)).unwrap();
    world.step();
    // Five pages are left, four of them with its beginning; the other text may need one more.
    world.add_prompt(3, prompt(1, 66), limits(10, 0)).unwrap();
    assert!(world.step().started.is_empty());
    world.run();
    assert_eq!(world.scheduler.usage().preemptions, 0);
    world.check_texts(&BTreeSet::new());
}

#[test]
fn nothing_is_kept_of_what_is_shared_with_no_one() {
    let mut world = World::fixed(config());
    for id in 1..=3 {
        let sequence = fake::sequence(id, prompt(1, PROMPT_LEN), limits(3, 4));
        world.add_sequence(Sequence { shares: Shares::NoOne, ..sequence }).unwrap();
        world.run();
        assert_eq!(world.finished[&id].counters.reused_tokens, 0);
        assert_eq!(world.scheduler.usage().cached_pages, 0);
    }
    world.check_texts(&BTreeSet::new());
}
