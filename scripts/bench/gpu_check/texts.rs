//! Texts of whole runtimes: the same with and without speculation, for any number of drafts, alone and in batches.

use crate::case::{self, Drafts, tokens};
use crate::common::models::MAX_DRAFT_LEN;
use crate::common::running;
use crate::gpu::Bed;
use crate::prefill;
use crate::report::{Outcome, Report, Verdict};
use spec_core::engine::Engine;
use spec_core::runtime::DraftPolicy::{self, Adaptive, Fixed};
use spec_core::runtime::{Options, Prefill, Request, Runtime};

/// Policies, draft lengths and branches that are compared with no drafts.
const WAYS: [(DraftPolicy, usize, usize); 8] = [
    (Fixed, 0, 1),
    (Fixed, 1, 1),
    (Fixed, 4, 3),
    (Fixed, MAX_DRAFT_LEN, 1),
    (Adaptive, MAX_DRAFT_LEN, 1),
    (Adaptive, 4, 2),
    (Adaptive, 1, 1),
    (Fixed, 4, 1),
];
/// How many long requests.
const FEW_LONG: usize = 2;
/// Room for all sequences of a run.
const KV_TOKENS: usize = 16 * 1024;
/// What prompts are longer by that are to be computed in blocks.
const LONG: usize = 300;
/// How many of them an emulator gets through.
const FEW_WAYS: usize = 5;

/// Checks every kind of drafter that a step has on a GPU.
pub(crate) fn run(report: &mut Report, bed: Bed) {
    for (drafts, name) in [
        (Drafts::LookUp, "look-up"),
        (Drafts::Model, "model"),
        (Drafts::Head, "head"),
        (Drafts::Skip, "the target without some layers"),
    ] {
        let name = format!("texts with and without drafts by {name}");
        report.check(&name, |_| the_same_with_drafts(drafts, Prefill::Exact, bed));
    }
    for (way, called) in prefill::BLOCKS {
        report.check(&format!("texts whose prompts are computed by {called}"), |_| {
            match prefill::missing(way, bed.machine) {
                Some(missing) => Ok(Verdict::Skipped(missing)),
                None => the_same_with_drafts(Drafts::Model, way, bed),
            }
        });
    }
}

fn the_same_with_drafts(drafts: Drafts, prefill: Prefill, bed: Bed) -> Outcome {
    let (_folder, engine) = case::speculating(drafts, bed);
    let requests = requests(prefill, bed);
    let ahead = options(Fixed, prefill);
    let mut waiting = load(&engine, Options { launch_ahead: false, ..ahead.clone() }, bed)?;
    let alone = running::run_alone(&mut waiting, &requests);
    if running::run_alone(&mut load(&engine, ahead, bed)?, &requests) != alone {
        return Err("steps that begin ahead give other texts than steps that wait".into());
    }
    let (mut drafted, mut accepted) = (0, 0);
    let ways = if bed.small { &WAYS[..FEW_WAYS] } else { &WAYS };
    for &(policy, draft_len, draft_branches) in ways {
        let requests = requests.iter().map(|request| with_drafts(request, draft_len));
        let done = running::run(
            &mut load(&engine, Options { draft_branches, ..options(policy, prefill) }, bed)?,
            &requests.collect::<Vec<_>>(),
        );
        for (idx, (done, expected)) in done.iter().zip(&alone).enumerate() {
            if done.tokens != *expected {
                let found = &done.tokens;
                let message = format!(
                    "{policy:?}, {draft_len} drafts in {draft_branches} branches: request {idx} gives {found:?}, alone and without {expected:?}"
                );
                return Err(message.into());
            }
            drafted += done.counters.drafted;
            accepted += done.counters.accepted;
        }
    }
    if drafted == 0 {
        return Err("nothing was drafted".into());
    }
    let (num, ways) = (requests.len(), ways.len());
    Ok(Verdict::Passed(format!(
        "{num} requests, {ways} ways, {accepted} of {drafted} drafts accepted"
    )))
}

fn with_drafts(request: &Request, draft_len: usize) -> Request {
    Request { draft_len: Some(draft_len), ..request.clone() }
}

fn options(policy: DraftPolicy, prefill: Prefill) -> Options {
    Options { kv_tokens: Some(KV_TOKENS), prefill: Some(prefill), ..running::options(policy) }
}

fn load(engine: &Engine, options: Options, bed: Bed) -> spec_core::Result<Runtime> {
    Runtime::load_on(engine, &options, &|_| Ok(Box::new(bed.machine.open()?)))
}

/// Greedy and seeded, with what depends on the tokens before; some with log-probabilities, which the host decides about.
fn requests(prefill: Prefill, bed: Bed) -> Vec<Request> {
    let sampling = running::kinds_of_sampling();
    let max_tokens = if bed.small { 8 } else { 64 };
    let rounds = if bed.small { 1 } else { 4 };
    // The end repeats the beginning, so that there is something to look up.
    let longer = if prefill == Prefill::Exact { 0 } else { LONG };
    let prompt = |idx: usize| [tokens(longer + 7 + 9 * idx), tokens(4 + idx)].concat();
    let request = |idx: usize| Request {
        prompt: prompt(idx).into(),
        max_tokens,
        sampling: sampling[idx % sampling.len()].clone(),
        ignore_eos: idx.is_multiple_of(2),
        ..Request::default()
    };
    let requests = (0..rounds * sampling.len()).map(request);
    if bed.small && longer > 0 { requests.take(FEW_LONG).collect() } else { requests.collect() }
}
