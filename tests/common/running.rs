//! Requests through a runtime, to their end.

use spec_core::engine::Engine;
use spec_core::runtime::{
    Counters, DraftPolicy, Emitted, FinishReason, Options, Request, Runtime, SequenceId, Step,
};
use spec_core::sampling::SamplingParams;
use std::collections::HashMap;

/// Bytes of KV cache where the test does not say: room for a batch of 32 short texts.
const KV_BYTES: usize = 1 << 30;

/// What became of a request.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    /// The generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// The bits of their log-probabilities, where asked for.
    pub(crate) logprobs: Vec<Option<u32>>,
    /// What was told of the prompt.
    pub(crate) prompt: Vec<Emitted>,
    /// What the sequence counted.
    pub(crate) counters: Counters,
    /// Why it ended.
    pub(crate) reason: FinishReason,
}

/// Options of the tests: a bounded KV cache, and one thread, since tests run beside each other: threads of a step that wait
/// for each other on processors that others use take many times as long.
pub(crate) fn options(draft_policy: DraftPolicy) -> Options {
    Options {
        draft_policy,
        kv_bytes: Some(KV_BYTES),
        max_queue: 1 << 20,
        threads: Some(1),
        ..Options::default()
    }
}

/// Loads an engine.
pub(crate) fn load(engine: &Engine, options: &Options) -> Runtime {
    Runtime::load(engine, options).expect("loads")
}

/// Runs requests together.
pub(crate) fn run(runtime: &mut Runtime, requests: &[Request]) -> Vec<Done> {
    run_with(runtime, requests, |_, _| ())
}

/// Runs requests together; `meddle` may interfere before each step, given the ids of those that are
/// not done. The answers come in the order of the requests.
pub(crate) fn run_with(
    runtime: &mut Runtime,
    requests: &[Request],
    mut meddle: impl FnMut(&mut Runtime, &[SequenceId]),
) -> Vec<Done> {
    run_steps(runtime, requests, |runtime, open| {
        meddle(runtime, open);
        runtime.step()
    })
}

/// Takes the pages of another sequence away before every seventh step.
pub(crate) fn preempting() -> impl FnMut(&mut Runtime, &[SequenceId]) {
    let mut turns = 0;
    move |runtime, open| {
        turns += 1;
        if turns % 7 == 0 {
            runtime.preempt(open[turns % open.len()]);
        }
    }
}

/// As `run_with`, with steps that `step` runs.
pub(crate) fn run_steps(
    runtime: &mut Runtime,
    requests: &[Request],
    mut step: impl FnMut(&mut Runtime, &[SequenceId]) -> Step,
) -> Vec<Done> {
    let ids: Vec<SequenceId> = requests
        .iter()
        .map(|request| runtime.add(request.clone()).expect("the request is allowed"))
        .collect();
    let (mut emitted, mut done) = (HashMap::<SequenceId, Vec<Emitted>>::new(), HashMap::new());
    let mut told = HashMap::<SequenceId, Vec<Emitted>>::new();
    let mut open = ids.clone();
    while !runtime.is_idle() {
        let step = step(runtime, &open);
        assert!(step.failure.is_none(), "a step failed: {:?}", step.failure);
        for event in step.events {
            let told = told.entry(event.id).or_default();
            told.extend(event.prompt);
            let emitted = emitted.entry(event.id).or_default();
            emitted.extend(event.emitted);
            let Some(sequence) = event.finished else { continue };
            let tokens: Vec<u32> = emitted.iter().map(|emitted| emitted.token).collect();
            assert_eq!(sequence.generated(), tokens, "events tell all that was generated");
            let logprobs =
                emitted.iter().map(|emitted| emitted.logprob.map(f32::to_bits)).collect();
            open.retain(|&id| id != event.id);
            let reason = sequence.finish.expect("an ended sequence has a reason");
            let counters = sequence.counters;
            let prompt = std::mem::take(told);
            done.insert(event.id, Done { tokens, logprobs, prompt, counters, reason });
        }
    }
    ids.iter().map(|id| done.remove(id).expect("every request ends")).collect()
}

/// Runs each request alone and without speculation: what all else is compared with.
pub(crate) fn run_alone(runtime: &mut Runtime, requests: &[Request]) -> Vec<Vec<u32>> {
    let plain = |request: &Request| Request { draft_len: Some(0), ..request.clone() };
    requests.iter().map(|request| run(runtime, &[plain(request)]).remove(0).tokens).collect()
}

/// Greedy and seeded, with what depends on the tokens before; the last three with what a GPU
/// leaves to the host: log-probabilities, those of the prompt, and tokens of a list alone.
pub(crate) fn kinds_of_sampling() -> [SamplingParams; 7] {
    let seeded = SamplingParams { temperature: 1.1, seed: Some(5), ..SamplingParams::default() };
    [
        SamplingParams::default(),
        seeded.clone(),
        SamplingParams { top_k: 7, top_p: 0.9, seed: Some(6), ..seeded.clone() },
        SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.2,
            logit_bias: [(4, 1.5)].into(),
            bad_words: [vec![9], vec![3, 8]].into(),
            min_tokens: 4,
            ..seeded.clone()
        },
        SamplingParams { min_p: 0.1, logprobs: Some(2), ..seeded.clone() },
        SamplingParams { prompt_logprobs: Some(1), ..seeded.clone() },
        SamplingParams { allowed_tokens: Some((2..30).step_by(3).collect()), ..seeded },
    ]
}
