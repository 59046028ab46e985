//! Steps that begin before they are asked for: they must happen where they may, and nobody must see from a text that
//! they did, whatever becomes of the sequences in the meantime.

use crate::common::running::{self, Done};
use crate::{Drafts, emulator, load_bounded, load_with, requests, target, texts};
use spec_core::engine::Engine;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{Options, PAGE_TOKENS, Request, Runtime, SequenceId};
use spec_core::sampling::SamplingParams;
use spec_core::testing::PageId;
use spec_core::testing::batch::{Branching, DraftLens, Entry, Executor, Stepped, Unwanted, WANTED};
use spec_core::testing::sampling::{Coupling, Sampler};
use spec_emu::Schedule;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts steps.
struct Counting {
    inner: Box<dyn Executor>,
    /// Which of them.
    counts: fn(&Stepped) -> bool,
    count: Arc<AtomicUsize>,
}

impl Executor for Counting {
    fn step(
        &mut self,
        entries: &[Entry<'_>],
        unwanted: Unwanted<'_>,
    ) -> spec_core::Result<Option<Stepped>> {
        let stepped = self.inner.step(entries, unwanted);
        let is_counted = matches!(&stepped, Ok(Some(stepped)) if (self.counts)(stepped));
        self.count.fetch_add(usize::from(is_counted), Ordering::Relaxed);
        stepped
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }
}

fn counting(runtime: Runtime, counts: fn(&Stepped) -> bool) -> (Runtime, Arc<AtomicUsize>) {
    let counted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&counted);
    (runtime.wrap_executor(|inner| Box::new(Counting { inner, counts, count })), counted)
}

/// Texts, and how many steps had begun before they were asked for.
fn run(engine: &Engine, options: Options, requests: &[Request]) -> (Vec<Done>, usize) {
    let (mut runtime, begun) =
        counting(load_with(engine, options, Schedule::PLAIN), |stepped| stepped.ahead);
    let done = running::run(&mut runtime, requests);
    (done, begun.load(Ordering::Relaxed))
}

fn asleep() -> Options {
    Options { launch_ahead: false, ..running::options(Fixed) }
}

/// What needs the host for no token.
fn simple_requests() -> Vec<Request> {
    simple_requests_to(Drafts::Model)
}

/// The same to an engine with these drafts.
fn simple_requests_to(drafts: Drafts) -> Vec<Request> {
    let requests = requests().into_iter().take(3);
    let longer = |(idx, request): (usize, Request)| Request {
        max_tokens: 40 - 3 * idx,
        draft_len: Some(if drafts == Drafts::None { 0 } else { 3 }),
        ignore_eos: true,
        ..request
    };
    requests.enumerate().map(longer).collect()
}

/// A step that is recorded takes longer than it will, and tells no time: no request is to wait for that.
#[test]
fn common_steps_are_recorded_when_an_engine_is_loaded() {
    for (drafts, len) in [(Drafts::Model, 3), (Drafts::Lookup, 5), (Drafts::None, 0)] {
        let (_dir, engine) = target(drafts);
        let runtime = load_with(&engine, asleep(), Schedule::PLAIN);
        let (mut runtime, recording) = counting(runtime, |stepped| stepped.cost.is_none());
        let requests = requests().into_iter().take(3);
        let requests = requests.map(|request| Request { draft_len: Some(len), ..request });
        let done = running::run(&mut runtime, &requests.collect::<Vec<_>>());
        assert_eq!(recording.load(Ordering::Relaxed), 0, "{drafts:?}");
        let drafted: u64 = done.iter().map(|done| done.counters.drafted).sum();
        assert_eq!(drafted > 0, len > 0, "{drafts:?}");
    }
}

#[test]
fn most_steps_begin_before_they_are_asked_for_and_nobody_sees_it() {
    for drafts in [Drafts::Model, Drafts::AtOnce, Drafts::None, Drafts::Skip] {
        let (_dir, engine) = target(drafts);
        let requests = simple_requests_to(drafts);
        let (expected, none) = run(&engine, asleep(), &requests);
        assert_eq!(none, 0, "launch_ahead = false");
        let (done, begun) = run(&engine, running::options(Fixed), &requests);
        assert_eq!(texts(&done), texts(&expected), "{drafts:?}");
        assert_eq!(counters(&done), counters(&expected), "{drafts:?}");
        let steps = done.iter().map(|done| done.counters.steps).max().unwrap_or(0) as usize;
        // All but the first, and the one behind the end of each text.
        assert!(begun + 2 * requests.len() >= steps, "{begun} of {steps} steps, {drafts:?}");
        assert!(steps >= 10, "{steps} steps");
    }
}

/// What a caller is told of a text.
fn counters(done: &[Done]) -> Vec<(u64, u64, u64, u64)> {
    let counted = |done: &Done| {
        let counters = &done.counters;
        (counters.steps, counters.drafted, counters.accepted, counters.new_pages)
    };
    done.iter().map(counted).collect()
}

#[test]
fn what_looks_at_tokens_or_logits_waits_for_the_host() {
    let (_dir, engine) = target(Drafts::Model);
    let sampling = [
        SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() },
        SamplingParams { bad_words: [vec![3, 8]].into(), ..SamplingParams::default() },
        SamplingParams { logprobs: Some(1), ..SamplingParams::default() },
    ];
    for sampling in sampling {
        let request = Request { sampling, ..simple_requests().remove(0) };
        let (_, begun) = run(&engine, running::options(Fixed), &[request]);
        assert_eq!(begun, 0);
    }
    let (_dir, engine) = target(Drafts::Lookup);
    assert_eq!(run(&engine, running::options(Fixed), &simple_requests()).1, 0, "look-up");
}

/// Whenever a sequence comes to the end of a page, and its next step may have begun, a sequence that the host decides
/// about has a step of its own, on the pages that the first one has not come to.
struct Intruding {
    inner: Box<dyn Executor>,
    intrusions: Arc<AtomicUsize>,
}

impl Intruding {
    fn intrude(&mut self, pages: &[PageId]) -> spec_core::Result<()> {
        let params = SamplingParams { logprobs: Some(1), ..SamplingParams::default() };
        let tokens = vec![1; pages.len() * PAGE_TOKENS];
        let intruder = Entry {
            id: SequenceId::MAX,
            tokens: &tokens,
            prompt_len: tokens.len(),
            max_len: tokens.len() + 1,
            computed: 0,
            chunk: tokens.len(),
            draft_computed: 0,
            is_read: true,
            speculates: false,
            draft_lens: DraftLens::default(),
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: 0.0,
            pages,
            prompt_rows: 0,
            shares: spec_core::testing::Shares::All,
            sampler: &Sampler::new(params, Coupling::Path(0), Vec::new()),
        };
        self.inner.step(&[intruder], WANTED)?;
        self.inner.forget(intruder.id);
        self.intrusions.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Executor for Intruding {
    fn step(
        &mut self,
        entries: &[Entry<'_>],
        unwanted: Unwanted<'_>,
    ) -> spec_core::Result<Option<Stepped>> {
        let is_between = |entry: &&Entry<'_>| {
            entry.chunk == 1 && entry.computed > 0 && entry.computed.is_multiple_of(PAGE_TOKENS)
        };
        if let Some(victim) = entries.iter().find(is_between) {
            self.intrude(&victim.pages[victim.computed / PAGE_TOKENS..])?;
        }
        self.inner.step(entries, unwanted)
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }
}

/// It was computed before its pages were others', but what it wrote to them is gone.
#[test]
fn a_step_that_has_begun_is_given_up_where_a_call_has_nothing_for_the_device() {
    for drafts in [Drafts::Model, Drafts::None, Drafts::Skip] {
        let (_dir, engine) = target(drafts);
        let requests = simple_requests_to(drafts);
        let (expected, _) = run(&engine, asleep(), &requests);
        let intrusions = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&intrusions);
        let options = Options { kv_reuse: false, ..running::options(Fixed) };
        let mut runtime = load_with(&engine, options, Schedule::PLAIN)
            .wrap_executor(|inner| Box::new(Intruding { inner, intrusions: count }));
        let done = running::run(&mut runtime, &requests);
        assert_eq!(texts(&done), texts(&expected), "{drafts:?}");
        let intrusions = intrusions.load(Ordering::Relaxed);
        assert!(intrusions > 1, "{intrusions} intrusions, {drafts:?}");
    }
}

/// A small generator of decisions.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % end
    }

    fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }
}

/// Prompts that have nothing in common, so long that a few texts fill the cache.
fn crowd() -> Vec<Request> {
    let requests = simple_requests().into_iter().cycle().take(CROWD).enumerate();
    let long = |(idx, request): (usize, Request)| Request {
        prompt: (0..120 + 9 * idx)
            .map(|at| ((at * at + 31 * idx * at + idx) % 60) as u32)
            .collect::<Vec<_>>()
            .into(),
        max_tokens: 22 + idx,
        ..request
    };
    requests.map(long).collect()
}

/// Texts that want more pages than there are.
const CROWD: usize = 8;
const PAGES: usize = 64;

/// Sequences lose their pages, leave and arrive while a step of theirs has begun, with so few pages that what one
/// gives back another gets at once.
#[test]
fn texts_survive_what_happens_around_a_step_that_has_begun() {
    for drafts in [Drafts::Model, Drafts::Skip] {
        survive(drafts);
    }
}

fn survive(drafts: Drafts) {
    let (_dir, engine) = target(drafts);
    let requests = crowd();
    let (expected, _) = run(&engine, asleep(), &requests);
    for (seed, policy) in [(1, Fixed), (2, Fixed), (3, Adaptive)] {
        let options = Options { kv_tokens: Some(PAGES * PAGE_TOKENS), ..running::options(policy) };
        let runtime = load_bounded(&engine, options, Schedule::seeded(seed));
        let (mut runtime, begun) = counting(runtime, |stepped| stepped.ahead);
        let mut dice = Dice(seed);
        let mut extras = Vec::new();
        let done = running::run_with(&mut runtime, &requests, |runtime, open| {
            // An extra may outlive all of them.
            if dice.one_in(8) && !open.is_empty() {
                runtime.preempt(open[dice.below(open.len())]);
            }
            if dice.one_in(4) && extras.len() < 2 {
                // Comes, takes pages, and goes in the middle of its text.
                let prompt = requests[dice.below(CROWD)].prompt[..40].to_vec();
                let request = Request { prompt: prompt.into(), ..requests[0].clone() };
                extras.extend(runtime.add(request).ok());
            }
            if dice.one_in(6) {
                extras.pop().map(|id| runtime.cancel(id));
            }
        });
        assert_eq!(texts(&done), texts(&expected), "seed {seed}");
        let begun = begun.load(Ordering::Relaxed);
        // What adapts goes by times that it measures.
        assert!(begun > 10 || policy == Adaptive, "{begun} steps had begun with seed {seed}");
    }
}

/// What the host believes that the device knows must be true, or the next sequences use pages of others.
#[test]
fn a_copy_that_fails_leaves_nothing_behind() {
    let (_dir, engine) = target(Drafts::Model);
    let requests = simple_requests();
    let (expected, _) = run(&engine, asleep(), &requests);
    for after in 0..6 {
        let open = |_| Ok(Box::new(emulator(Schedule::PLAIN).refusing_a_copy(after)) as _);
        // Pages are lent again at once, in the same order.
        let kv_tokens = Some(PAGES * PAGE_TOKENS);
        let options = Options { kv_reuse: false, kv_tokens, ..running::options(Fixed) };
        let mut runtime = Runtime::load_on(&engine, &options, &open).expect("loads");
        for request in requests.iter().rev() {
            runtime.add(request.clone()).expect("is allowed");
        }
        let mut failures = 0;
        while !runtime.is_idle() {
            failures += usize::from(runtime.step().failure.is_some());
        }
        assert_eq!(failures, 1, "after {after} copies");
        let done = running::run(&mut runtime, &requests);
        assert_eq!(texts(&done), texts(&expected), "after {after} copies");
    }
}
