//! EAGLE heads on a GPU: against the CPU executor's, which are held to the reference's (`tests/heads`), and with themselves.

use crate::common::models::Recipe;
use crate::common::running::{self, Done};
use crate::common::small::{NORMED, SMALL, tokens};
use crate::common::tiny::{self, HeadKind, Sizes};
use crate::{
    FP8_TOLERANCE, FP16_TOLERANCE, NUM_SMS, WORST_BY_TYPICAL, emulator, load, load_bounded,
    load_with, open, requests_of_three_tokens, texts, totals,
};
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{AdmissionPolicy, Isa, Lookup, Options, Request};
use spec_core::testing::cpu::{self, Resources, Weights};
use spec_core::testing::cuda::{Eagle, Gpu, HeadOnHost, Model};
use spec_core::testing::draft::{Head, HeadPass, HeadSegment};
use spec_emu::{Emulator, Schedule};
use std::sync::Arc;
use tempfile::TempDir;

const NUM_PAGES: usize = 8;
const PAGES: [u32; 5] = [2, 0, 7, 1, 4];
const NUM_LAYERS: usize = 2;

/// A target with a head, built for one device.
struct Pair {
    target: Engine,
    head: Engine,
    _dir: TempDir,
}

impl Pair {
    fn new(device: &str, sizes: &Sizes, kind: &HeadKind, dtype: Dtype) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        tiny::write_sized(&path("model"), NUM_LAYERS, 3, sizes);
        tiny::write_head_of(&path("head"), NUM_LAYERS, 5, sizes, kind);
        Recipe::model(path("model"), dtype, path("head"), dtype).on(device).build(&path("built"));
        let target = open(dir.path(), "built");
        let head = target.open_drafter().unwrap().unwrap();
        Self { target, head, _dir: dir }
    }

    fn on_cpu(&self) -> cpu::Eagle {
        let pool = Arc::new(Pool::new(1));
        let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
        let (own, target) = (weights(&self.head), weights(&self.target));
        let resources = Resources { num_pages: NUM_PAGES, rows: 64, isa: Isa::detect(), pool };
        cpu::Eagle::new(&self.head, own, Some(target), resources).unwrap()
    }

    fn on_gpu(&self) -> HeadOnHost {
        self.on(emulator(Schedule::PLAIN))
    }

    fn on(&self, device: Emulator) -> HeadOnHost {
        let gpu = Gpu::new(Box::new(device));
        let target = Arc::new(Model::load(&self.target, NUM_PAGES, &mut **gpu.lock()).unwrap());
        let head = Eagle::load(&self.head, target, NUM_PAGES, &mut **gpu.lock()).unwrap();
        HeadOnHost::new(Arc::new(head), gpu)
    }
}

/// Hidden states of so many rows, `[row][tap][hidden]`, of sizes as they have.
fn taps(rows: usize, sizes: &Sizes, kind: &HeadKind) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 % 1013) as f32 / 506.0 - 1.0) * (1.0 + (i % 3) as f32);
    let taps = if kind.is_eagle1 { 1 } else { 3 };
    (0..rows * taps * sizes.hidden).map(value).collect()
}

/// Logits and states of every row of a text, of which the first rows come with states of the target and the last ones with
/// those of the head itself, or that of masks.
fn along_a_text(
    head: &mut dyn Head,
    (sizes, kind): (&Sizes, &HeadKind),
    tokens: &[u32],
    parts: &[usize],
) -> HeadPass {
    let width = head.width();
    let known: usize = parts.iter().sum();
    let states = head.states(&taps(known, sizes, kind)).unwrap();
    let mask = head.mask().cloned();
    let (mut all, mut last) = (HeadPass::default(), HeadPass::default());
    let mut run = |tokens: &[u32], states: &[f32], first_position: usize, last: &mut HeadPass| {
        // One row after the other, so that each tells of itself.
        let (pages, num_logits, tree) = (&PAGES, 1, &[]);
        let segment = HeadSegment { tokens, states, first_position, pages, num_logits, tree };
        *last = head.forward(&[segment]).unwrap();
        all.logits.values.extend_from_slice(&last.logits.values);
        all.states.extend_from_slice(&last.states);
    };
    let mut first = 0;
    for len in parts {
        let rows = first..first + len;
        let states = &states[first * width..][..len * width];
        run(&tokens[rows.start + 1..rows.end + 1], states, first + 1, &mut last);
        first += len;
    }
    for (position, &token) in tokens.iter().enumerate().skip(known + 1) {
        let states = mask.as_ref().map_or(last.states.clone(), |mask| mask.state.clone());
        run(&[token], &states, position, &mut last);
    }
    all
}

pub(crate) fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32;
    let errors: Vec<f32> = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).collect();
    let worst = errors.iter().copied().fold(0.0, f32::max) / scale.sqrt();
    let mean_square = errors.iter().map(|x| x * x).sum::<f32>() / errors.len() as f32;
    let typical = (mean_square / scale).sqrt();
    eprintln!("{what}: off by {typical:.5} of what is typical, the worst by {worst:.5}");
    assert!(worst < tolerance && typical < tolerance / WORST_BY_TYPICAL, "{what}: {worst}");
}

/// A head for a model of these sizes, its format, and how close it comes to the CPU executor's.
type Kind = (&'static Sizes, HeadKind, Dtype, f32);

/// Every flag of a head is in one of them.
fn kinds() -> [Kind; 7] {
    let plain = HeadKind { norm_spread: 0.3, ..HeadKind::default() };
    let windowed = HeadKind {
        more_layers: 1,
        draft_vocab: Some(30),
        window: Some(21),
        norm_before_fc: true,
        norm_output: true,
        ..plain
    };
    let own = HeadKind { own_embed: true, fc_norm: true, norm_before_residual: true, ..plain };
    let first = HeadKind { is_eagle1: true, ..plain };
    let first_of_more = HeadKind { more_layers: 1, own_embed: true, ..first };
    [
        (&SMALL, plain, Dtype::Fp16, FP16_TOLERANCE),
        (&NORMED, windowed, Dtype::Fp16, FP16_TOLERANCE),
        (&SMALL, own, Dtype::Fp16, FP16_TOLERANCE),
        (&SMALL, HeadKind { window: Some(5), ..own }, Dtype::Fp8, FP8_TOLERANCE),
        (&SMALL, HeadKind { mask_token: Some(9), ..windowed }, Dtype::Fp16, FP16_TOLERANCE),
        (&SMALL, first, Dtype::Fp16, FP16_TOLERANCE),
        (&NORMED, first_of_more, Dtype::Fp8, FP8_TOLERANCE),
    ]
}

#[test]
fn rows_are_those_of_the_cpu_executor() {
    let tokens = tokens(70);
    for (sizes, kind, dtype, tolerance) in kinds() {
        let what = format!("{dtype} {kind:?}");
        let mut on_cpu = Pair::new("cpu", sizes, &kind, dtype).on_cpu();
        let mut on_gpu = Pair::new("cuda:sm_90a", sizes, &kind, dtype).on_gpu();
        assert_eq!(on_gpu.taps(), on_cpu.taps());
        assert_eq!(on_gpu.vocab_map(), on_cpu.vocab_map());
        let taps = taps(70, sizes, &kind);
        let (found, expected) = (on_gpu.states(&taps).unwrap(), on_cpu.states(&taps).unwrap());
        assert_close(&found, &expected, tolerance, &format!("{what}: states"));
        let parts = [17, 1, 30, 16];
        let expected = along_a_text(&mut on_cpu, (sizes, &kind), &tokens, &parts);
        let found = along_a_text(&mut on_gpu, (sizes, &kind), &tokens, &parts);
        let (logits, expected_logits) = (&found.logits.values, &expected.logits.values);
        assert_close(logits, expected_logits, tolerance, &format!("{what}: logits"));
        if kind.mask_token.is_none() {
            assert_close(&found.states, &expected.states, tolerance, &format!("{what}: handed on"));
        }
    }
}

/// Where single warps multiply, products for logits norm their rows: EAGLE-1's too, of which more want logits than one launch
/// takes.
#[test]
fn rows_without_a_norm_are_those_of_the_cpu_executor_where_products_norm_them() {
    let tokens = tokens(70);
    for (sizes, kind, dtype, tolerance) in [kinds()[5], kinds()[6]] {
        let what = format!("sm_80 {dtype} {kind:?}");
        let run = |head: &mut dyn Head| {
            let states = head.states(&taps(70, sizes, &kind)).unwrap();
            let width = head.width();
            let segment = HeadSegment {
                tokens: &tokens[1..],
                states: &states[..69 * width],
                first_position: 1,
                pages: &PAGES,
                num_logits: 69,
                tree: &[],
            };
            head.forward(&[segment]).unwrap()
        };
        let expected = run(&mut Pair::new("cpu", sizes, &kind, dtype).on_cpu());
        let pair = Pair::new("cuda:sm_80", sizes, &kind, dtype);
        let found = run(&mut pair.on(Emulator::new((8, 0), NUM_SMS, Schedule::PLAIN)));
        let (logits, expected_logits) = (&found.logits.values, &expected.logits.values);
        assert_close(logits, expected_logits, tolerance, &format!("{what}: logits"));
        assert_close(&found.states, &expected.states, tolerance, &format!("{what}: handed on"));
    }
}

#[test]
fn bits_of_a_row_do_not_depend_on_the_rows_beside_it() {
    let tokens = tokens(70);
    for (sizes, kind, dtype, _) in kinds() {
        let pair = Pair::new("cuda:sm_90a", sizes, &kind, dtype);
        let last = |parts: &[usize]| {
            let pass = along_a_text(&mut pair.on_gpu(), (sizes, &kind), &tokens[..66], parts);
            let tail = |values: &[f32]| values[values.len().saturating_sub(30)..].to_vec();
            (tail(&pass.logits.values), tail(&pass.states))
        };
        let alone = last(&[1; 64]);
        for parts in [&[64][..], &[7, 33, 24], &[40, 24]] {
            assert_eq!(last(parts), alone, "{dtype} {kind:?} {parts:?}");
        }
    }
}

#[test]
fn rows_of_many_sequences_go_through_one_pass() {
    rows_go_through_one_pass(kinds()[1]);
    rows_go_through_one_pass(kinds()[5]);
}

fn rows_go_through_one_pass((sizes, kind, dtype, _): Kind) {
    let pair = Pair::new("cuda:sm_90a", sizes, &kind, dtype);
    let tokens = tokens(40);
    let pages: [&[u32]; 3] = [&[2, 0], &[5], &[1, 3]];
    let lens = [20, 3, 31];
    let run = |head: &mut HeadOnHost, which: &[usize]| {
        let states = head.states(&taps(40, sizes, &kind)).unwrap();
        let segment = |&idx: &usize| HeadSegment {
            tokens: &tokens[1..lens[idx] + 1],
            states: &states[..lens[idx] * sizes.hidden],
            first_position: 1,
            pages: pages[idx],
            num_logits: usize::from(idx != 1),
            tree: &[],
        };
        let segments: Vec<HeadSegment<'_>> = which.iter().map(segment).collect();
        head.forward(&segments).unwrap()
    };
    let together = run(&mut pair.on_gpu(), &[0, 1, 2]);
    let alone = [0, 2].map(|idx| run(&mut pair.on_gpu(), &[idx]));
    let logits: Vec<f32> = alone.iter().flat_map(|pass| pass.logits.values.clone()).collect();
    let states: Vec<f32> = alone.iter().flat_map(|pass| pass.states.clone()).collect();
    assert_eq!((together.logits.values, together.states), (logits, states));
}

/// The rows of known tokens and of masks behind them, of several sequences in one pass.
#[test]
fn rows_of_masks_are_those_of_the_cpu_executor() {
    let (sizes, kind, dtype, tolerance) = kinds()[4];
    let tokens = tokens(40);
    let pages: [&[u32]; 3] = [&[2, 0], &[5], &[1, 3, 4]];
    let (lens, drafts) = ([20, 3, 31], [8, 1, 5]);
    let run = |head: &mut dyn Head| {
        let mask = head.mask().cloned().expect("it has one");
        let known = head.states(&taps(40, sizes, &kind)).unwrap();
        let rows = lens.iter().zip(drafts).map(|(&len, drafts): (&usize, usize)| {
            let masks = vec![mask.token; drafts - 1];
            let states = [&known[..len * sizes.hidden], &mask.state.repeat(drafts - 1)].concat();
            ([&tokens[1..=len], &masks].concat(), states)
        });
        let rows: Vec<(Vec<u32>, Vec<f32>)> = rows.collect();
        let segments = rows.iter().enumerate().map(|(idx, (tokens, states))| HeadSegment {
            tokens,
            states,
            first_position: 1,
            pages: pages[idx],
            num_logits: drafts[idx],
            tree: &[],
        });
        let pass = head.forward(&segments.collect::<Vec<_>>()).unwrap();
        (mask, pass.logits.values)
    };
    let (on_cpu, expected) = run(&mut Pair::new("cpu", sizes, &kind, dtype).on_cpu());
    let (on_gpu, found) = run(&mut Pair::new("cuda:sm_90a", sizes, &kind, dtype).on_gpu());
    assert_eq!(on_gpu.token, on_cpu.token);
    assert_close(&on_gpu.state, &on_cpu.state, tolerance, "state of masks");
    assert_close(&found, &expected, tolerance, "logits of masks");
}

/// Long enough that a head has states of several pages, whatever is drafted right now and then.
fn requests() -> Vec<Request> {
    let mut requests = requests_of_three_tokens();
    for (idx, request) in requests.iter_mut().enumerate() {
        request.prompt = [request.prompt.to_vec(), vec![40; 7 * idx]].concat().into();
        (request.max_tokens, request.draft_len) = (20, Some(1 + idx % 4));
    }
    requests
}

fn counters(done: &[Done]) -> Vec<(u64, u64)> {
    done.iter().map(|done| (done.counters.drafted, done.counters.accepted)).collect()
}

/// Steps whose logits somebody wants to see are decided about on the host, with a drafter of its own.
#[test]
fn drafts_of_the_graph_are_those_of_the_host() {
    for (sizes, kind, dtype, _) in [kinds()[1], kinds()[3], kinds()[4], kinds()[6]] {
        let pair = Pair::new("cuda:sm_90a", sizes, &kind, dtype);
        assert_drafts_are_those_of_the_host(&pair.target, &requests(), &format!("{kind:?}"));
    }
}

pub(crate) fn assert_drafts_are_those_of_the_host(
    engine: &Engine,
    requests: &[Request],
    what: &str,
) {
    let told: Vec<Request> = requests.iter().cloned().map(telling).collect();
    let plain = requests.iter().map(|request| Request { draft_len: Some(0), ..request.clone() });
    let plain: Vec<Request> = plain.collect();
    let run =
        |requests: &[Request]| running::run(&mut load(engine, Fixed, Schedule::PLAIN), requests);
    let (expected, on_host, found) = (run(&plain), run(&told), run(requests));
    assert_eq!(texts(&on_host), texts(&expected), "{what}");
    assert_eq!(texts(&found), texts(&expected), "{what}");
    assert_eq!(counters(&found), counters(&on_host), "{what}");
    let (drafted, accepted) = totals(&found);
    assert!(drafted > accepted && accepted > 20, "{what}: {accepted} of {drafted}");
}

fn telling(mut request: Request) -> Request {
    request.sampling.logprobs = Some(0);
    request
}

#[test]
fn texts_do_not_depend_on_when_a_head_is_asked() {
    assert_texts_do_not_depend_on_when(kinds()[0]);
}

#[test]
fn texts_do_not_depend_on_when_a_head_of_eagle_1_is_asked() {
    assert_texts_do_not_depend_on_when(kinds()[5]);
}

#[test]
fn texts_do_not_depend_on_when_a_head_of_masks_is_asked() {
    assert_texts_do_not_depend_on_when(kinds()[4]);
}

fn assert_texts_do_not_depend_on_when((sizes, kind, dtype, _): Kind) {
    let pair = Pair::new("cuda:sm_90a", sizes, &kind, dtype);
    assert_texts_are_those_of_plain_decoding(&pair.target, requests(), &[]);
}

/// In steps that hold more or less, with cut prompts, look-up beside the drafter, branches, pages that are found and such that
/// are lost, and with other options besides.
pub(crate) fn assert_texts_are_those_of_plain_decoding(
    engine: &Engine,
    mut requests: Vec<Request>,
    besides: &[Options],
) {
    // Some are decided about on the host, one never drafts.
    requests[1] = telling(requests[1].clone());
    requests[2].draft_len = Some(0);
    let alone = running::run_alone(&mut load(engine, Fixed, Schedule::PLAIN), &requests);
    let options = [
        running::options(Fixed),
        running::options(Adaptive),
        Options { max_num_tokens: Some(19), ..running::options(Fixed) },
        Options {
            max_batch_size: Some(2),
            lookup: Some(Lookup::Ngram),
            ..running::options(Adaptive)
        },
        Options { lookup: Some(Lookup::Suffix), ngram_branches: 3, ..running::options(Fixed) },
        Options { draft_branches: 3, ..running::options(Fixed) },
    ];
    for (nth, options) in options.iter().chain(besides).enumerate() {
        let mut runtime = load_with(engine, options.clone(), Schedule::seeded(3));
        // Pages of the first round are found in the second, which with one set of options is enough.
        for round in 1..=if nth == 0 { 2 } else { 1 } {
            let done = running::run(&mut runtime, &requests);
            assert_eq!(texts(&done), alone, "round {round} of {options:?}");
            // What adapts may find that drafts do not pay here.
            let drafts = totals(&done).0 > 0 || options.draft_policy == Adaptive;
            assert!(drafts, "round {round} of {options:?}");
        }
    }
    // Pages are few: sequences lose theirs, and begin anew.
    let options = Options {
        kv_tokens: Some(1024),
        admission: AdmissionPolicy::MaxUtilization,
        ..running::options(Fixed)
    };
    let done = running::run(&mut load_bounded(engine, options, Schedule::PLAIN), &requests);
    assert_eq!(texts(&done), alone, "with few pages");
}

/// Who begins behind shared pages drafts at once, as if all were its own.
#[test]
fn pages_come_with_the_state_at_their_end() {
    let (sizes, kind, dtype, _) = kinds()[0];
    let pair = Pair::new("cuda:sm_90a", sizes, &kind, dtype);
    let requests =
        [Request { prompt: tokens(40).into(), draft_len: Some(3), ..requests().remove(0) }];
    let mut runtime = load(&pair.target, Fixed, Schedule::PLAIN);
    let [first, again] = [0, 1].map(|_| running::run(&mut runtime, &requests));
    assert!(again[0].counters.reused_tokens >= 32, "{:?}", again[0].counters);
    assert_eq!((texts(&again), counters(&again)), (texts(&first), counters(&first)));
}
