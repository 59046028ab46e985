//! The scheduler against the fake model: texts, pages, budgets and order under random load.

use super::fake::{self, Fake};
use super::*;
use crate::adapt::DraftPolicy;
use crate::batch::Executor;
use crate::pages::PageId;
use crate::sequence::Limits;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// More steps than any of these loads can take: a scheduler that stands still is caught by it.
const MAX_STEPS: u64 = 20_000;

/// A scheduler, its executor and everything they have given so far.
struct World {
    config: SchedulerConfig,
    scheduler: Scheduler,
    executor: Fake,
    expected: BTreeMap<SequenceId, Vec<u32>>,
    texts: BTreeMap<SequenceId, Vec<u32>>,
    finished: BTreeMap<SequenceId, Sequence>,
    /// In the order in which they first took part.
    started: Vec<SequenceId>,
    priorities: BTreeMap<SequenceId, u32>,
    /// Whether sequences were preempted out of turn.
    forced: bool,
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_batch_size: 8,
        max_num_tokens: 64,
        max_seq_len: 128,
        max_draft_len: 6,
        num_pages: 64,
        max_queue: 100,
    }
}

fn prompt(id: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|idx| ((id * 31 + idx * 7) % 50) as u32).collect()
}

impl World {
    fn new(config: SchedulerConfig, policy: DraftPolicy, percent: u64) -> Self {
        let tuner = Tuner::new(policy, config.max_draft_len, None, None);
        Self {
            scheduler: Scheduler::new(config.clone(), tuner),
            config,
            executor: Fake::new(percent, 7),
            expected: BTreeMap::new(),
            texts: BTreeMap::new(),
            finished: BTreeMap::new(),
            started: Vec::new(),
            priorities: BTreeMap::new(),
            forced: false,
        }
    }

    fn fixed(config: SchedulerConfig) -> Self {
        Self::new(config, DraftPolicy::Fixed, 80)
    }

    fn add(&mut self, id: SequenceId, prompt_len: usize, limits: Limits) -> Result<()> {
        let sequence = fake::sequence(id, prompt(id, prompt_len), limits);
        let twin = sequence.clone();
        self.scheduler.add(sequence)?;
        self.expected.insert(id, fake::expected(&twin));
        self.priorities.insert(id, twin.limits.priority);
        Ok(())
    }

    fn step(&mut self) -> Schedule {
        let was_idle = self.scheduler.is_idle();
        let schedule = self.scheduler.schedule();
        assert_eq!(
            schedule.parts.is_empty(),
            was_idle,
            "a step is empty iff nothing is to be done"
        );
        self.check(&schedule);
        schedule.forgotten.iter().for_each(|&id| self.executor.forget(id));
        let outcomes = self.executor.step(&self.scheduler.entries(&schedule)).unwrap();
        let rows: usize = schedule.parts.iter().map(|part| part.chunk + part.draft_len).sum();
        let passes = outcomes.iter().map(|outcome| outcome.drafted).max().unwrap_or(0);
        let ms = 5.0 + 0.1 * rows as f64 + 4.0 * passes as f64;
        self.scheduler.observe(&schedule, &outcomes, ms);
        for event in self.scheduler.commit(&schedule, outcomes) {
            let text = self.texts.entry(event.id).or_default();
            text.extend(event.emitted.iter().map(|emitted| emitted.token));
            if let Some(sequence) = event.finished {
                self.finished.insert(event.id, *sequence);
            }
        }
        self.check_pages();
        schedule
    }

    fn check(&mut self, schedule: &Schedule) {
        let SchedulerConfig { max_batch_size, max_num_tokens, max_seq_len, .. } = self.config;
        let sum = |rows: fn(&Part) -> usize| schedule.parts.iter().map(rows).sum::<usize>();
        assert!(schedule.parts.len() <= max_batch_size);
        assert!(sum(|part| part.chunk + part.draft_len) <= max_num_tokens);
        assert!(sum(|part| part.draft_rows) <= max_num_tokens);
        for (part, entry) in schedule.parts.iter().zip(self.scheduler.entries(schedule)) {
            let sequence = &self.scheduler.running[&part.key];
            assert!(part.draft_len <= sequence.useful_draft_len(max_seq_len));
            assert_eq!(entry.speculates, part.draft_rows > 0);
            assert!(!entry.speculates || sequence.limits.draft_len > 0);
            if !self.started.contains(&part.id) {
                self.started.push(part.id);
            }
        }
        let parts: BTreeSet<Key> = schedule.parts.iter().map(|part| part.key).collect();
        assert_eq!(parts.len(), schedule.parts.len(), "one part a sequence");
        let decoding = |key: &Key| {
            let sequence = &self.scheduler.running[key];
            sequence.pending() == 1 && sequence.computed > 0
        };
        if schedule.parts.iter().any(|part| part.chunk > 1) {
            let mut left_out = self.scheduler.running.keys().filter(|key| !parts.contains(key));
            assert!(!left_out.any(decoding), "a prompt was preferred to a sequence that decodes");
        }
        self.check_order();
    }

    /// Within a priority nothing waits that came before something that runs.
    fn check_order(&self) {
        let running = self.scheduler.running.keys();
        for &(priority, arrival) in running.filter(|_| !self.forced) {
            let mut before = self.scheduler.waiting.range((priority, 0)..(priority, arrival));
            assert!(before.next().is_none());
        }
    }

    fn check_pages(&self) {
        let held = || self.scheduler.running.values().flat_map(|sequence| &sequence.pages);
        let unique: BTreeSet<PageId> = held().copied().collect();
        assert_eq!(unique.len(), held().count(), "a page has two owners");
        assert_eq!(unique.len() + self.scheduler.pool.free_pages(), self.config.num_pages);
        assert!(self.scheduler.waiting.values().all(|sequence| sequence.pages.is_empty()));
        for sequence in self.scheduler.running.values() {
            assert!(sequence.pages.len() <= pages_for(sequence.tokens.len()), "rows left behind");
        }
    }

    fn run(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
            assert!(self.executor.num_steps < MAX_STEPS, "no progress");
        }
        // Those that ended in the last step are told with the next.
        self.step();
        assert_eq!(self.executor.remembered(), 0);
        assert_eq!(self.scheduler.pool.free_pages(), self.config.num_pages);
    }

    fn check_texts(&self, cancelled: &BTreeSet<SequenceId>) {
        for (id, expected) in &self.expected {
            let text = self.texts.get(id).map_or(&[][..], Vec::as_slice);
            if cancelled.contains(id) {
                assert!(expected.starts_with(text), "sequence {id}");
            } else {
                assert_eq!(text, expected, "sequence {id}");
                assert_eq!(self.finished[id].generated(), expected, "sequence {id}");
            }
        }
    }

    /// Within a priority, first come first started.
    fn check_started(&self, cancelled: &BTreeSet<SequenceId>) {
        let mut last = BTreeMap::new();
        for id in self.started.iter().filter(|id| !cancelled.contains(id)) {
            // Ids rise with arrival.
            let before = last.insert(self.priorities[id], *id);
            assert!(before.is_none_or(|before| before < *id));
        }
    }
}

#[test]
fn texts_are_the_same_for_every_draft_length() {
    for draft_len in 0..=6 {
        let mut world = World::fixed(config());
        (1..=12)
            .for_each(|id| world.add(id, 5 + id as usize, fake::limits(40, draft_len)).unwrap());
        world.run();
        world.check_texts(&BTreeSet::new());
        let drafted: u64 = world.finished.values().map(|sequence| sequence.counters.drafted).sum();
        assert_eq!(drafted > 0, draft_len > 0);
    }
}

#[test]
fn drafts_save_steps() {
    let steps = |draft_len| {
        let mut world = World::fixed(config());
        world.add(1, 5, fake::limits(100, draft_len)).unwrap();
        world.run();
        world.executor.num_steps
    };
    // 0.8 accepted: 2.9 tokens a step with five drafts, less what the fake leaves out.
    assert!(steps(5) * 2 < steps(0), "{} against {}", steps(5), steps(0));
}

#[test]
fn a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_decoding() {
    let mut world = World::fixed(SchedulerConfig { max_num_tokens: 10, ..config() });
    world.add(1, 3, fake::limits(30, 2)).unwrap();
    world.step();
    world.add(2, 40, fake::limits(4, 2)).unwrap();
    let schedule = world.step();
    let parts: Vec<_> = schedule.parts.iter().map(|p| (p.id, p.chunk, p.draft_len)).collect();
    assert_eq!(parts, [(1, 1, 2), (2, 7, 0)]);
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_lower_priority_number_is_served_first() {
    let mut world = World::fixed(SchedulerConfig { max_batch_size: 1, ..config() });
    for (id, priority) in [(1, 2), (2, 1), (3, 2), (4, 0)] {
        world.add(id, 5, Limits { priority, ..fake::limits(5, 0) }).unwrap();
    }
    world.run();
    assert_eq!(world.started, [4, 2, 1, 3]);
}

#[test]
fn drafts_go_before_sequences_when_pages_run_out() {
    // Both sequences hold one of the two pages and decode their 15th position: plain rows fit.
    let mut world = World::fixed(SchedulerConfig { num_pages: 2, ..config() });
    world.add(1, 13, fake::limits(19, 6)).unwrap();
    world.add(2, 13, fake::limits(3, 0)).unwrap();
    let first = world.step();
    assert_eq!(first.parts.len(), 1, "the second waits for the first to have room to grow");
    world.run();
    world.check_texts(&BTreeSet::new());

    let mut world = World::fixed(SchedulerConfig { num_pages: 3, ..config() });
    world.add(1, 13, fake::limits(18, 6)).unwrap();
    world.add(2, 13, fake::limits(18, 6)).unwrap();
    world.step();
    world.step();
    // One free page: the first drafts into it, the second decodes plainly in its own.
    let schedule = world.step();
    let drafts: Vec<_> = schedule.parts.iter().map(|part| part.draft_len).collect();
    assert_eq!(drafts, [6, 0], "{schedule:?}");
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn the_newest_of_the_lowest_priority_is_preempted_and_resumes() {
    let mut world = World::fixed(SchedulerConfig { num_pages: 6, ..config() });
    for (id, priority) in [(1, 0), (2, 1), (3, 0)] {
        world.add(id, 5, Limits { priority, ..fake::limits(80, 0) }).unwrap();
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
    (1..=3).for_each(|id| world.add(id, 20, fake::limits(60, 4)).unwrap());
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
    (1..=3).for_each(|id| world.add(id, 5, fake::limits(9, 2)).unwrap());
    let schedule = world.scheduler.schedule();
    let outcomes = world.executor.step(&world.scheduler.entries(&schedule)).unwrap();
    let cancelled = world.scheduler.cancel(1).unwrap();
    assert_eq!(cancelled.finish, Some(FinishReason::Cancelled));
    assert!(world.scheduler.preempt(2));
    let events = world.scheduler.commit(&schedule, outcomes);
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), [3]);
    world.texts.insert(3, events[0].emitted.iter().map(|emitted| emitted.token).collect());
    world.run();
    world.check_texts(&BTreeSet::from([1]));
}

#[test]
fn a_caller_may_end_a_sequence_for_a_stop_word() {
    let mut world = World::fixed(config());
    world.add(1, 5, fake::limits(50, 0)).unwrap();
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
        world.add(1, prompt_len, fake::limits(max_tokens, draft_len)).unwrap_err().to_string()
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
    world.add(1, 60, fake::limits(4, 6)).unwrap();
    world.run();
    world.check_texts(&BTreeSet::new());
}

#[test]
fn a_full_queue_is_a_matter_of_capacity() {
    let mut world = World::fixed(SchedulerConfig { max_queue: 2, ..config() });
    (1..=2).for_each(|id| world.add(id, 5, fake::limits(5, 0)).unwrap());
    assert!(!world.scheduler.has_room());
    let error = world.add(3, 5, fake::limits(5, 0)).unwrap_err();
    assert!(matches!(error, Error::Capacity(_)));
    assert_eq!(error.to_string(), "2 requests wait and max_queue is 2");
    world.step();
    world.add(3, 5, fake::limits(5, 0)).unwrap();
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
    world.add(1, 5, fake::limits(500, 6)).unwrap();
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

#[derive(Clone, Debug)]
enum Action {
    Add { prompt_len: usize, max_tokens: usize, draft_len: usize, priority: u32, ends: bool },
    Step,
    Cancel(u64),
    Preempt(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let add = (1usize..50, 1usize..50, 0usize..6, 0u32..3, any::<bool>()).prop_map(
        |(prompt_len, max_tokens, draft_len, priority, ends)| Action::Add {
            prompt_len,
            max_tokens,
            draft_len,
            priority,
            ends,
        },
    );
    let action = prop_oneof![
        4 => add,
        8 => Just(Action::Step),
        1 => (1u64..30).prop_map(Action::Cancel),
        1 => (1u64..30).prop_map(Action::Preempt),
    ];
    prop::collection::vec(action, 1..80)
}

fn configs() -> impl Strategy<Value = SchedulerConfig> {
    (1usize..7, 1usize..50, 20usize..110, 0usize..6, 1usize..16, 1usize..12).prop_map(
        |(max_batch_size, max_num_tokens, max_seq_len, max_draft_len, num_pages, max_queue)| {
            SchedulerConfig {
                max_batch_size,
                max_num_tokens,
                max_seq_len,
                max_draft_len,
                num_pages,
                max_queue,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_load_is_served_in_order_within_its_budgets(
        config in configs(),
        actions in actions(),
        adaptive in any::<bool>(),
        forced in any::<bool>(),
        percent in prop_oneof![Just(0u64), Just(100), 0u64..100],
    ) {
        let policy = if adaptive { DraftPolicy::Adaptive } else { DraftPolicy::Fixed };
        let mut world = World::new(config, policy, percent);
        world.forced = forced;
        let mut cancelled = BTreeSet::new();
        let mut id = 0;
        for action in actions {
            match action {
                Action::Add { prompt_len, max_tokens, draft_len, priority, ends } => {
                    id += 1;
                    let end_tokens = if ends { vec![fake::END_TOKEN, 1, 2] } else { Vec::new() };
                    let limits =
                        Limits { priority, end_tokens, ..fake::limits(max_tokens, draft_len) };
                    // Refused where it cannot fit; what is admitted must finish.
                    let _ = world.add(id, prompt_len, limits);
                }
                Action::Step => drop(world.step()),
                Action::Cancel(id) => cancelled.extend(world.scheduler.cancel(id).map(|s| s.id)),
                Action::Preempt(id) if forced => drop(world.scheduler.preempt(id)),
                Action::Preempt(_) => {}
            }
        }
        world.run();
        world.check_texts(&cancelled);
        world.check_started(&cancelled);
    }

    /// Older requests are not overtaken for ever, however many come after them.
    #[test]
    fn a_steady_stream_starves_no_one(
        num_pages in 6usize..12,
        max_num_tokens in 8usize..40,
        draft_len in 0usize..5,
    ) {
        let mut world = World::fixed(SchedulerConfig { num_pages, max_num_tokens, ..config() });
        world.add(1, 40, fake::limits(50, draft_len)).unwrap();
        for id in 2..80 {
            let _ = world.add(id, 1 + (id as usize * 7) % 30, fake::limits(10, draft_len));
            world.step();
        }
        // A first sequence is never set back: 40 rows in steps of at least 8, then a token a step.
        prop_assert!(world.finished.contains_key(&1));
        prop_assert_eq!(world.finished[&1].counters.preemptions, 0);
        world.run();
        world.check_texts(&BTreeSet::new());
    }
}
