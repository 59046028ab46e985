//! The loop around an executor that fails when it is told to, and whose every step is checked.

use super::*;
use crate::batch::{Entry, LongPrompts, Stepped, Unwanted};
use crate::pages::PAGE_TOKENS;
use crate::scheduler::fake::{self, Fake};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fails while the flag is up.
struct Fragile {
    fake: Fake,
    fails: Arc<AtomicBool>,
}

impl Executor for Fragile {
    fn step(&mut self, entries: &[Entry<'_>], unwanted: Unwanted<'_>) -> Result<Option<Stepped>> {
        match self.fails.load(Ordering::Relaxed) {
            true => Err(Error::Device("out of order".into())),
            false => self.fake.step(entries, unwanted),
        }
    }

    fn forget(&mut self, id: SequenceId) {
        self.fake.forget(id);
    }
}

const NUM_PAGES: usize = 12;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_batch_size: 2,
        max_num_tokens: 32,
        max_seq_len: 128,
        max_draft_len: 4,
        draft_width: 1,
        max_tree_tokens: usize::MAX,
        whole_branches: false,
        num_pages: NUM_PAGES,
        max_queue: 8,
        admission: AdmissionPolicy::MaxUtilization,
        drafter_caches: true,
        usual_draft_rows: 2,
        lookahead: 0,
        long_prompts: LongPrompts { rows_beside_others: 4, give_way: true },
        prompt_blocks: None,
    }
}

fn runtime() -> (Runtime, Arc<AtomicBool>) {
    let fails = Arc::new(AtomicBool::new(false));
    let runtime = Runtime {
        limits: EngineLimits {
            max_draft_len: 4,
            max_batch_size: 2,
            max_seq_len: 128,
            max_num_tokens: 32,
        },
        scheduler: Scheduler::new(
            config(),
            Tuner::new(DraftPolicy::Fixed, 4, None, PassCost::Unknown),
        ),
        executor: Box::new(Fragile { fake: Fake::new(80, 1, true), fails: Arc::clone(&fails) }),
        pool: Arc::new(Pool::new(1)),
        memory: Memory::default(),
        _promise: None,
        vocab_size: fake::VOCAB_SIZE as usize,
        end_tokens: Vec::new(),
        next_id: 0,
        first_row: 0,
        kv_reuse: true,
        entropy: RandomState::new(),
        gave_up: false,
    };
    (runtime, fails)
}

fn request(prompt_len: usize, max_tokens: usize) -> Request {
    let prompt: Vec<u32> = (0..prompt_len as u32).map(|idx| idx % fake::VOCAB_SIZE).collect();
    Request { prompt: prompt.into(), max_tokens, ..Request::default() }
}

/// Runs to the end and gives the ended sequences; each of them must end once.
fn run(runtime: &mut Runtime) -> Vec<Sequence> {
    let mut ended: Vec<Sequence> = Vec::new();
    while !runtime.is_idle() {
        let step = runtime.step();
        assert!(step.failure.is_none());
        ended.extend(step.events.into_iter().filter_map(|event| event.finished).map(|s| *s));
    }
    let ids: std::collections::BTreeSet<SequenceId> = ended.iter().map(|s| s.id).collect();
    assert_eq!(ids.len(), ended.len());
    ended
}

fn reasons(events: &[Event]) -> Vec<(SequenceId, Option<FinishReason>)> {
    let reason = |event: &Event| event.finished.as_ref().and_then(|sequence| sequence.finish);
    events.iter().map(|event| (event.id, reason(event))).collect()
}

#[test]
fn a_failed_step_ends_its_sequences_and_no_others() {
    let (mut runtime, fails) = runtime();
    let ids: Vec<_> = (0..4).map(|_| runtime.add(request(5, 9)).unwrap()).collect();
    assert_eq!(runtime.step().started, ids[..2]);
    fails.store(true, Ordering::Relaxed);
    let step = runtime.step();
    let failed = Some(FinishReason::Failed);
    assert_eq!(reasons(&step.events), [(ids[0], failed), (ids[1], failed)]);
    assert!(step.events.iter().all(|event| event.emitted.is_empty()));
    assert_eq!(step.failure.unwrap().to_string(), "device: out of order");
    assert!(step.started.is_empty());
    let usage = runtime.usage();
    assert_eq!((usage.running, usage.waiting, usage.used_pages), (0, 2, 0));

    // The step that fails may be a sequence's first.
    let step = runtime.step();
    assert_eq!(step.started, ids[2..]);
    assert_eq!(reasons(&step.events), [(ids[2], failed), (ids[3], failed)]);
    assert!(runtime.is_idle());

    fails.store(false, Ordering::Relaxed);
    let id = runtime.add(request(5, 9)).unwrap();
    let ended = run(&mut runtime);
    assert_eq!((ended[0].id, ended[0].finish), (id, Some(FinishReason::Length)));
    assert_eq!(ended[0].generated().len(), 9);
}

#[test]
fn a_step_of_a_long_prompt_is_given_up_for_who_comes_but_never_twice_in_a_row() {
    let (mut runtime, _) = runtime();
    let long = Request { prompt: request(90, 9).prompt, ..request(1, 9) };
    // Of 8 rows a step 90 tokens are many.
    runtime.scheduler = Scheduler::new(
        SchedulerConfig { max_num_tokens: 8, ..config() },
        Tuner::new(DraftPolicy::Fixed, 4, None, PassCost::Unknown),
    );
    let id = runtime.add(long).unwrap();
    let computed = |runtime: &Runtime| runtime.usage().context_tokens;
    let somebody_came = || true;
    assert_eq!(runtime.step_unless(&somebody_came).started, [id]);
    assert!(runtime.gave_up);
    let other = runtime.add(request(5, 2)).unwrap();
    let step = runtime.step_unless(&somebody_came);
    assert_eq!((step.started, runtime.gave_up), (vec![other], false));
    assert_eq!(computed(&runtime), 7, "5 of the one and 2 of the other");
    let mut texts: Vec<_> = run(&mut runtime).iter().map(|s| s.generated().to_vec()).collect();
    runtime.add(request(5, 2)).unwrap();
    runtime.add(request(90, 9)).unwrap();
    let mut expected: Vec<_> = run(&mut runtime).iter().map(|s| s.generated().to_vec()).collect();
    texts.sort_unstable();
    expected.sort_unstable();
    assert_eq!(texts, expected);
}

#[test]
fn pages_of_a_failed_step_are_not_kept() {
    let (mut runtime, fails) = runtime();
    runtime.add(request(60, 9)).unwrap();
    runtime.step();
    fails.store(true, Ordering::Relaxed);
    runtime.step();
    // Two pages were full before it; the step would have filled a third.
    let usage = runtime.usage();
    assert_eq!((usage.cached_pages, usage.free_pages), (2, NUM_PAGES - 2));
}

#[test]
fn a_sequence_starts_once_however_often_it_is_preempted() {
    let (mut runtime, _) = runtime();
    let id = runtime.add(request(5, 40)).unwrap();
    let mut started = runtime.step().started;
    for _ in 0..3 {
        assert!(runtime.preempt(id));
        assert_eq!((runtime.usage().paused, runtime.usage().waiting), (1, 0));
        started.extend(runtime.step().started);
    }
    assert_eq!(started, [id]);
    assert_eq!((runtime.usage().paused, runtime.usage().preemptions), (0, 3));
    assert_eq!(run(&mut runtime)[0].counters.preemptions, 3);
}

/// A request in each stage of its life ends when the caller says so: its pages are free at once.
#[test]
fn a_sequence_can_be_ended_wherever_it_is() {
    let (mut runtime, _) = runtime();
    let decoding = runtime.add(request(5, 40)).unwrap();
    let prefilling = runtime.add(request(60, 40)).unwrap();
    runtime.step();
    runtime.step();
    let waiting = runtime.add(request(9, 40)).unwrap();
    let usage = runtime.usage();
    assert_eq!((usage.decoding, usage.prefilling, usage.waiting), (1, 1, 1));
    assert!(runtime.preempt(decoding));

    let ended = runtime.finish(decoding, FinishReason::Deadline).unwrap();
    assert_eq!(ended.finish, Some(FinishReason::Deadline));
    assert!(!ended.generated().is_empty());
    assert_eq!(runtime.usage().paused, 0);
    assert!(runtime.usage().used_pages > 0);
    assert_eq!(runtime.cancel(prefilling).unwrap().finish, Some(FinishReason::Cancelled));
    assert_eq!(runtime.usage().used_pages, 0);
    assert!(runtime.cancel(prefilling).is_none());
    assert!(runtime.cancel(waiting).unwrap().generated().is_empty());
    assert!(runtime.is_idle());

    let id = runtime.add(request(30, 20)).unwrap();
    (0..3).for_each(|_| drop(runtime.step()));
    assert!(runtime.usage().used_pages > 0);
    assert!(runtime.cancel(id).is_some());
    assert_eq!(runtime.usage().used_pages, 0);
    assert!(run(&mut runtime).is_empty());
}

#[test]
fn usage_tells_what_the_last_step_left() {
    let (mut runtime, _) = runtime();
    assert_eq!(
        runtime.usage(),
        Usage {
            max_running: 2,
            pages: NUM_PAGES,
            free_pages: NUM_PAGES,
            page_tokens: PAGE_TOKENS,
            ..Usage::default()
        }
    );
    for first in 0..3 {
        let mut prompt = request(20, 5).prompt;
        Arc::make_mut(&mut prompt)[0] = first;
        runtime.add(Request { prompt, draft_len: Some(0), ..request(20, 5) }).unwrap();
    }
    runtime.step();
    let usage = runtime.usage();
    assert_eq!((usage.context_tokens, usage.iterations), (32, 1));
    assert_eq!((usage.waiting, usage.running), (1, 2));
    assert_eq!((usage.decoding, usage.prefilling), (1, 1));
    assert_eq!((usage.used_pages, usage.free_pages), (3, NUM_PAGES - 3));
    runtime.step();
    assert_eq!(runtime.usage().context_tokens, 8);
    runtime.step();
    assert_eq!(runtime.usage().context_tokens, 0);
    run(&mut runtime);
    let usage = runtime.usage();
    // Each has filled a page, and none a second one.
    assert_eq!((usage.used_pages, usage.cached_pages, usage.free_pages), (0, 3, NUM_PAGES - 3));
    assert_eq!(usage.reused_pages, 0);
    let mut prompt = request(20, 5).prompt;
    Arc::make_mut(&mut prompt)[0] = 1;
    runtime.add(Request { prompt, draft_len: Some(0), ..request(20, 5) }).unwrap();
    run(&mut runtime);
    assert_eq!(runtime.usage().reused_pages, 1);
}

#[test]
fn unless_it_is_said_otherwise_none_that_runs_loses_its_pages() {
    assert_eq!(Options::default().admission, AdmissionPolicy::GuaranteedNoEvict);
}

#[test]
fn min_tokens_holds_back_whatever_ends_the_text() {
    let (mut runtime, _) = runtime();
    runtime.end_tokens = vec![3];
    let mut held_back = |min_tokens| {
        let sampling = SamplingParams { min_tokens, ..SamplingParams::default() };
        let request = Request { sampling, stop_tokens: vec![4, 5], ..request(5, 9) };
        let id = runtime.add(request).unwrap();
        runtime.cancel(id).unwrap().sampler.end_tokens().to_vec()
    };
    assert_eq!(held_back(2), [3, 4, 5]);
    // Where nothing is held back it is not told to devices either.
    assert_eq!(held_back(0), [3]);
}

#[test]
fn ends_alone_are_not_allowed_where_they_are_held_back() {
    let (mut runtime, _) = runtime();
    runtime.end_tokens = vec![3];
    let mut add = |allowed: &[u32], min_tokens, ignore_eos| {
        let sampling = SamplingParams {
            min_tokens,
            allowed_tokens: Some(allowed.into()),
            bad_words: [vec![6], vec![7, 8]].into(),
            ..SamplingParams::default()
        };
        let request = Request { sampling, ignore_eos, stop_tokens: vec![4], ..request(5, 9) };
        let id = runtime.add(request).map_err(|error| error.to_string())?;
        runtime.cancel(id).map(drop).ok_or_else(String::new)
    };
    assert_eq!(
        add(&[3, 4], 2, false).unwrap_err(),
        "allowed_tokens: each of the 2 ends the text or is a bad word, min_tokens is 2"
    );
    assert!(add(&[3, 6], 1, false).is_err() && add(&[3, 4], 1, true).is_err());
    // The last is banned nowhere, or behind something else alone.
    for (allowed, min_tokens, ignore_eos) in
        [(&[3, 5][..], 2, false), (&[3, 8], 2, false), (&[3, 4], 0, false), (&[3], 2, true)]
    {
        add(allowed, min_tokens, ignore_eos).unwrap();
    }
}

#[test]
fn a_given_draft_of_the_wrong_size_or_of_no_tokens_is_refused() {
    let (mut runtime, _) = runtime();
    let mut refusal = |given_draft| {
        runtime.add(Request { given_draft, ..request(5, 9) }).unwrap_err().to_string()
    };
    assert_eq!(refusal(vec![1; 5]), "given_draft: 5 tokens, at most 4 are verified at once");
    assert_eq!(refusal(vec![1, 50]), "given_draft: token 50, the vocabulary has 50");
    runtime.limits.max_draft_len = 0;
    let mut add = |len| runtime.add(Request { given_draft: vec![1; len], ..request(5, 9) });
    assert!(add(MAX_GIVEN_LEN).is_ok() && add(MAX_GIVEN_LEN + 1).is_err());
    assert_eq!(run(&mut runtime)[0].generated().len(), 9);
}

#[test]
fn rows_of_one_request_share_their_beginning_even_where_requests_do_not() {
    let reused = |kv_reuse: bool, num_rows: usize| {
        let (mut runtime, _) = runtime();
        runtime.kv_reuse = kv_reuse;
        let mut reused = Vec::new();
        for _ in 0..2 {
            for row in 0..num_rows {
                runtime.add(Request { row, num_rows, ..request(20, 3) }).unwrap();
            }
            let ended = run(&mut runtime);
            reused.extend(ended.iter().map(|sequence| sequence.counters.reused_pages));
        }
        reused
    };
    assert_eq!(reused(false, 1), [0, 0]);
    assert_eq!(reused(false, 2), [0, 1, 0, 1]);
    assert_eq!(reused(true, 2), [0, 1, 1, 1]);
}
