//! EAGLE heads against their definition: tiny random heads of `tests/data/heads` in the layouts that are published, and
//! what the reference says to five rounds of drafting with each.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::running::{self, Done};
use common::{data, golden, tiny};
use safetensors::tensor::TensorView;
use safetensors::{Dtype as Stored, SafeTensors};
use spec_build::checkpoint::Checkpoint;
use spec_build::cli::{DraftArgs, DraftSource};
use spec_core::Result;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{
    AdmissionPolicy, DRAFT_FILE, Isa, Options, Request, SequenceId, TARGET_FILE,
};
use spec_core::sampling::SamplingParams;
use spec_core::testing::batch::{DraftLens, Entry, Executor, WANTED};
use spec_core::testing::cpu::{Eagle, Model, Resources, Weights};
use spec_core::testing::draft::{self, Drafter, Head, HeadPass, HeadSegment, Proposal, Verified};
use spec_core::testing::sampling::{Coupling, Sampler};
use spec_core::testing::{Host, PageId};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const CASES: [&str; 9] = [
    "eagle1-bias",
    "eagle1-nobias",
    "eagle3-31-fcnorm",
    "eagle3-31-normfc",
    "eagle3-nbr0-d2t",
    "eagle3-nbr1",
    "eagle3-original",
    "eagle3-qwen3-2layers",
    "eagle3-window8",
];

/// Most that a logit or a state may differ: both sum in fp32, in other orders; logits are up to 10.
const FP32_ERROR: f32 = 1e-4;

const PAGES: [u32; 3] = [2, 0, 1];

fn copy(case: &str, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let weights = match case {
        "eagle1-nobias" => "pytorch_model.bin",
        _ => "model.safetensors",
    };
    for file in ["config.json", weights] {
        fs::write(to.join(file), data::bytes(&format!("heads/{case}/{file}"))).unwrap();
    }
}

/// The head in the layout of the original repository has the weights of another, under other names and in f32, and not
/// what it shares with its target.
fn write_original(to: &Path) {
    fs::create_dir_all(to).unwrap();
    fs::write(to.join("config.json"), data::bytes("heads/eagle3-original/config.json")).unwrap();
    let bytes = data::bytes("heads/eagle3-nbr0-d2t/model.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut renamed = Vec::new();
    for (name, tensor) in tensors.iter() {
        let widened = |half: &[u8]| [&[0, 0], half].concat();
        let (dtype, values) = match tensor.dtype() {
            Stored::BF16 => (Stored::F32, tensor.data().chunks(2).flat_map(widened).collect()),
            other => (other, tensor.data().to_vec()),
        };
        if name != "embed_tokens.weight" {
            renamed.push((
                name.replace("layers.0.", "midlayer."),
                tensor.shape().to_vec(),
                dtype,
                values,
            ));
        }
    }
    let views = renamed.iter().map(|(name, shape, dtype, values)| {
        (name, TensorView::new(*dtype, shape.to_vec(), values).unwrap())
    });
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors")).unwrap();
}

/// The checkpoints of the target and of a head.
fn checkpoints(case: &str) -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (target, head) = (dir.path().join("target"), dir.path().join("head"));
    copy("target", &target);
    tiny::tokenizer().build().unwrap().write(&target).unwrap();
    match case {
        "eagle3-original" => write_original(&head),
        _ => copy(case, &head),
    }
    (dir, target, head)
}

/// The engines of the target and of a head of it.
fn engines(case: &str, dtype: Dtype) -> (TempDir, Engine, Engine) {
    let (dir, target, head) = checkpoints(case);
    let built = dir.path().join("built");
    Recipe::model(target, dtype, head, dtype).up_to(128).build(&built);
    let target = Engine::open(built.join("1").join(TARGET_FILE)).unwrap();
    let draft = target.open_drafter().unwrap().unwrap();
    (dir, target, draft)
}

fn head(target: &Engine, draft: &Engine, isa: Isa) -> Eagle {
    let pool = Arc::new(Pool::new(1));
    let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
    let (own, targets) = (weights(draft), weights(target));
    let resources = Resources { num_pages: 3, rows: 8, isa, pool };
    Eagle::new(draft, own, Some(targets), resources).unwrap()
}

/// What was recorded of a case.
struct Recorded(Vec<u8>);

impl Recorded {
    fn of(case: &str) -> Self {
        let same_as = if case == "eagle3-original" { "eagle3-nbr0-d2t" } else { case };
        Self(data::bytes(&format!("heads/{same_as}/golden.safetensors")))
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        golden::floats(&SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap())
    }

    fn whole(&self, name: &str) -> Vec<usize> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Stored::I64, "{name}");
        let (values, _) = tensor.data().as_chunks();
        values.iter().map(|&value| i64::from_le_bytes(value) as usize).collect()
    }
}

fn check(what: &str, found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    assert!(largest <= FP32_ERROR, "{what}: a value differs by {largest}");
    largest
}

/// Runs one row.
fn run(head: &mut Eagle, token: usize, state: &[f32], position: usize) -> HeadPass {
    let segment = HeadSegment {
        tokens: &[token as u32],
        states: state,
        first_position: position,
        pages: &PAGES,
        has_logits: true,
    };
    head.forward(&[segment]).unwrap()
}

/// The target's token of a head's likeliest one.
fn likeliest(head: &Eagle, pass: &HeadPass) -> usize {
    let row = golden::likeliest(pass.logits.row(0), 1)[0];
    head.vocab_map().map_or(row, |map| map[row] as usize)
}

#[test]
fn rounds_of_drafting_are_those_of_the_reference() {
    let target = Recorded::of("target");
    let tokens = target.whole("token_ids");
    for case in CASES {
        let (_dir, target_engine, draft_engine) = engines(case, Dtype::Fp32);
        let recorded = Recorded::of(case);
        let taps = match case.starts_with("eagle1") {
            true => target.floats("last_hidden_pre_norm"),
            false => target.floats("aux_hidden_states"),
        };
        for isa in Isa::supported() {
            let mut head = head(&target_engine, &draft_engine, isa);
            let states = head.states(&taps).unwrap();
            let mut largest = match case.starts_with("eagle1") {
                true => check(case, &states, &target.floats("last_hidden_post_norm")),
                false => check(case, &states, &recorded.floats("fused")),
            };
            let width = head.width();
            let state = |position: usize| &states[position * width..(position + 1) * width];
            let mut read = 0;
            for (round, committed) in recorded.whole("commit").into_iter().enumerate() {
                // The states of these positions are new: each comes with the token behind it.
                let (mut logits, mut handed_on) = (Vec::new(), Vec::new());
                let mut last = HeadPass::default();
                for position in read..committed {
                    last = run(&mut head, tokens[position + 1], state(position), position + 1);
                    logits.extend_from_slice(last.logits.row(0));
                    handed_on.extend_from_slice(&last.states);
                }
                let mut check = |name: &str, found: &[f32]| {
                    let name = format!("r{round}.{name}");
                    let error =
                        check(&format!("{case} {isa} {name}"), found, &recorded.floats(&name));
                    largest = largest.max(error);
                };
                check("first.logits", &logits);
                check("first.hidden", &handed_on);
                let (mut logits, mut handed_on, mut drafts) = (vec![], vec![], vec![]);
                for draft in 0..4 {
                    logits.extend_from_slice(last.logits.row(0));
                    handed_on.extend_from_slice(&last.states);
                    drafts.push(likeliest(&head, &last));
                    last =
                        run(&mut head, drafts[draft], &last.states.clone(), committed + 1 + draft);
                }
                check("chain.logits", &logits);
                check("chain.hidden", &handed_on);
                assert_eq!(
                    drafts,
                    recorded.whole(&format!("r{round}.chain.tokens")),
                    "{case} {isa}"
                );
                read = committed;
            }
            eprintln!("{case} {isa}: within {largest:.1e}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_company() {
    let tokens: Vec<u32> =
        Recorded::of("target").whole("token_ids").into_iter().map(|token| token as u32).collect();
    let taps = Recorded::of("target").floats("aux_hidden_states");
    for case in ["eagle3-qwen3-2layers", "eagle3-window8"] {
        for dtype in [Dtype::Fp32, Dtype::Int8] {
            let (_dir, target, draft) = engines(case, dtype);
            let mut one_by_one = head(&target, &draft, Isa::detect());
            let states = one_by_one.states(&taps).unwrap();
            let width = one_by_one.width();
            let state = |position: usize| &states[position * width..(position + 1) * width];
            let mut alone = HeadPass::default();
            for (position, &token) in tokens.iter().enumerate().skip(1) {
                alone = run(&mut one_by_one, token as usize, state(position - 1), position);
            }
            let mut at_once = head(&target, &draft, Isa::detect());
            let rows = tokens.len() - 1;
            let segment = HeadSegment {
                tokens: &tokens[1..],
                states: &states[..rows * width],
                first_position: 1,
                pages: &PAGES,
                has_logits: true,
            };
            let pass = at_once.forward(&[segment]).unwrap();
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&pass.logits.values), bits(&alone.logits.values), "{case} {dtype}");
            assert_eq!(bits(&pass.states), bits(&alone.states), "{case} {dtype}");
        }
    }
}

#[test]
fn what_a_head_has_of_its_target_is_not_stored_twice() {
    for (case, own_embed, own_head) in [
        ("eagle3-nbr1", false, true),
        ("eagle3-nbr0-d2t", false, true),
        ("eagle3-original", false, true),
        ("eagle1-bias", false, false),
    ] {
        let (_dir, target, head) = checkpoints(case);
        let target = Checkpoint::open(&target).unwrap();
        for shares in [true, false] {
            let checkpoint = Checkpoint::open_draft(&head, &target, shares).unwrap();
            let eagle = checkpoint.config.eagle().unwrap().clone();
            let own = (eagle.own_embed, eagle.own_head);
            assert_eq!(own, (own_embed || !shares, own_head || !shares), "{case}");
        }
    }
}

#[test]
fn a_head_for_a_built_target_is_the_one_that_is_built_with_it() {
    for (case, dtype) in CASES.iter().flat_map(|case| [(*case, Dtype::Fp32), (*case, Dtype::Int8)])
    {
        let (dir, target, head) = checkpoints(case);
        let (together, later) = (dir.path().join("together"), dir.path().join("later"));
        Recipe::model(target.clone(), dtype, head.clone(), dtype).up_to(128).build(&together);
        Recipe::plain(target, dtype).up_to(128).build(&later);
        let limits = Engine::open(together.join("1").join(TARGET_FILE)).unwrap();
        let args = DraftArgs {
            target: later.clone(),
            draft: DraftSource::Model(head),
            max_draft_len: Some(limits.manifest().limits.max_draft_len),
            draft_dtype: None,
            head_dtype: None,
            draft_device: None,
            cuda_lib: None,
            quiet: true,
        };
        spec_build::draft::draft(&args).unwrap();
        for file in [TARGET_FILE, DRAFT_FILE] {
            let bytes = |folder: &Path| fs::read(folder.join("1").join(file)).unwrap();
            assert!(bytes(&together) == bytes(&later), "{case} {dtype}: {file}");
        }
    }
}

/// What was drafted for a sequence behind so many computed positions.
type Noted = HashMap<(SequenceId, usize), Vec<u32>>;

/// A drafter whose proposals are noted.
struct Noting {
    inner: draft::Eagle,
    noted: Arc<Mutex<Noted>>,
}

impl Drafter for Noting {
    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let proposals = self.inner.propose(entries)?;
        let mut noted = self.noted.lock().unwrap();
        for (entry, proposal) in entries.iter().zip(&proposals) {
            if !proposal.is_empty() {
                noted.insert((entry.id, entry.computed), proposal.tokens.clone());
            }
        }
        Ok(proposals)
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        self.inner.observe(verified)
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }
}

#[test]
fn what_a_step_drafts_is_what_the_reference_drafts() {
    let tokens: Vec<u32> =
        Recorded::of("target").whole("token_ids").into_iter().map(|token| token as u32).collect();
    let greedy = Sampler::new(SamplingParams::default(), Coupling::Path(0), vec![]);
    for case in CASES {
        let (_dir, target, draft) = engines(case, Dtype::Fp32);
        let recorded = Recorded::of(case);
        let pool = Arc::new(Pool::new(1));
        let model = Model::load(&target, 12, Isa::detect(), Arc::clone(&pool)).unwrap();
        let weights = Arc::new(Weights::load(&draft, &pool).unwrap());
        let of_target = Arc::new(Weights::load(&target, &pool).unwrap());
        let resources = Resources { num_pages: 12, rows: 8, isa: Isa::detect(), pool };
        let head = Eagle::new(&draft, weights, Some(of_target), resources).unwrap();
        let noted = Arc::new(Mutex::new(HashMap::new()));
        let inner = draft::Eagle::new(Box::new(head), 256);
        let noting = Noting { inner, noted: Arc::clone(&noted) };
        let mut host = Host::new(Box::new(model), Some(Box::new(noting))).unwrap();
        // One sequence drafts at every step; one reads its prompt in chunks of 5; one is not asked before position 20.
        let pages: [Vec<PageId>; 3] = [vec![3, 0, 5], vec![1, 7, 2], vec![4, 11, 6]];
        let (mut computed, mut draft_computed) = ([0; 3], [0; 3]);
        while computed[0] < 31 {
            let entry = |idx: usize| {
                // The text is the target's own from token 9 on, so what it says is what is known.
                let known = match (idx, computed[idx]) {
                    (1, read) => (read + 5).clamp(9, 32),
                    (_, read) => (read + 1).max(9),
                };
                let chunk =
                    if idx == 1 { (known - computed[1]).min(5) } else { known - computed[idx] };
                let samples = computed[idx] + chunk == known;
                let is_asked = samples && (idx != 2 || computed[2] >= 20);
                Entry {
                    id: idx as u64,
                    tokens: &tokens[..known],
                    prompt_len: 9,
                    max_len: 64,
                    computed: computed[idx],
                    chunk,
                    draft_computed: draft_computed[idx],
                    is_read: true,
                    speculates: is_asked || idx == 1,
                    draft_lens: DraftLens::both(if is_asked { 4 } else { 0 }),
                    given: &[],
                    min_confidence: 0.0,
                    pages: &pages[idx],
                    prompt_rows: 0,
                    shares: spec_core::testing::Shares::All,
                    sampler: &greedy,
                }
            };
            let going_on: Vec<usize> = (0..3).filter(|&idx| computed[idx] < 31).collect();
            let entries: Vec<Entry<'_>> = going_on.iter().map(|&idx| entry(idx)).collect();
            let stepped = host.step(&entries, WANTED).unwrap().unwrap();
            let chunks: Vec<usize> = entries.iter().map(|entry| entry.chunk).collect();
            for ((idx, chunk), outcome) in going_on.into_iter().zip(chunks).zip(stepped.outcomes) {
                computed[idx] += chunk + outcome.accepted;
                draft_computed[idx] = outcome.draft_computed.min(computed[idx]);
            }
        }
        let noted = noted.lock().unwrap();
        let (mut seen, mut late) = (0, 0);
        for (round, committed) in recorded.whole("commit").into_iter().enumerate() {
            let expected = recorded.whole(&format!("r{round}.chain.tokens"));
            for idx in 0..3 {
                let Some(drafts) = noted.get(&(idx, committed)) else { continue };
                let drafts: Vec<usize> = drafts.iter().map(|&token| token as usize).collect();
                assert_eq!(drafts, expected, "{case}: sequence {idx} behind {committed}");
                seen += 1;
                late += usize::from(idx == 2);
            }
        }
        assert!(seen >= 5 && late >= 1, "{case}: {seen} rounds were seen, {late} of them late");
    }
}

/// Requests of several kinds of sampling, some of which begin alike.
fn requests(num: usize) -> Vec<Request> {
    let kinds = running::kinds_of_sampling();
    let request = |idx: usize| {
        let shared = (idx / 3).is_multiple_of(2).then_some(0..37);
        let own = (0..3 + 11 * (idx as u32 % 5)).map(|i| (i * i + 31 * idx as u32 + 3) % 256);
        let prompt: Vec<u32> =
            shared.into_iter().flatten().map(|i| i * 5 % 256).chain(own).collect();
        let sampling = kinds[idx % kinds.len()].clone();
        Request { prompt: prompt.into(), max_tokens: 24 + idx % 9, sampling, ..Request::default() }
    };
    (0..num).map(request).collect()
}

fn assert_same(what: &str, done: &[Done], expected: &[Vec<u32>]) {
    for (idx, (done, expected)) in done.iter().zip(expected).enumerate() {
        assert!(
            done.tokens == *expected,
            "{what}: request {idx}: {:?}, not {expected:?}",
            done.tokens
        );
    }
}

/// Drafted and accepted tokens.
fn totals(done: &[Done]) -> (u64, u64) {
    let sum = |count: fn(&Done) -> u64| done.iter().map(count).sum();
    (sum(|done| done.counters.drafted), sum(|done| done.counters.accepted))
}

#[test]
fn texts_are_those_of_plain_decoding() {
    for (case, dtype) in [
        ("eagle3-nbr0-d2t", Dtype::Int8),
        ("eagle3-window8", Dtype::Fp8),
        ("eagle1-bias", Dtype::Bf16),
    ] {
        let (_dir, engine, _) = engines(case, dtype);
        let requests = requests(21);
        let plain = Options { kv_reuse: false, ..running::options(Fixed) };
        let expected = running::run_alone(&mut running::load(&engine, &plain), &requests);
        let with = |draft_len: Option<usize>| -> Vec<Request> {
            requests.iter().map(|request| Request { draft_len, ..request.clone() }).collect()
        };
        let mut accepted = 0;
        for draft_len in [1, 2, 3, 4, 5, 6, 7, 8] {
            let mut runtime = running::load(&engine, &running::options(Fixed));
            let done = running::run(&mut runtime, &with(Some(draft_len)));
            assert_same(&format!("{case} {dtype}, {draft_len} drafts"), &done, &expected);
            let totals = totals(&done);
            assert!(totals.0 > 0, "{case}: nothing was drafted");
            accepted += totals.1;
        }
        assert!(accepted > 100, "{case}: only {accepted} drafts were accepted");
        for (what, options) in [
            ("adaptive", running::options(Adaptive)),
            ("one at a time", Options { max_batch_size: Some(1), ..running::options(Fixed) }),
            ("in chunks", Options { max_num_tokens: Some(19), ..running::options(Fixed) }),
            (
                "with few pages",
                Options {
                    kv_tokens: Some(160),
                    admission: AdmissionPolicy::MaxUtilization,
                    ..running::options(Fixed)
                },
            ),
        ] {
            let mut runtime = running::load(&engine, &options);
            for round in ["first", "again"] {
                let done = running::run(&mut runtime, &with(None));
                assert_same(&format!("{case} {dtype}, {what}, {round}"), &done, &expected);
            }
        }
    }
}

#[test]
fn who_begins_behind_shared_pages_drafts_as_if_all_were_its_own() {
    let (_dir, engine, _) = engines("eagle3-31-normfc", Dtype::Fp32);
    let request = [Request { draft_len: Some(4), max_tokens: 40, ..requests(2).remove(1) }];
    assert!(request[0].prompt.len() > 32, "two pages and more");
    let options = |kv_reuse| Options { kv_reuse, ..running::options(Fixed) };
    let fresh = running::run(&mut running::load(&engine, &options(false)), &request);
    let mut runtime = running::load(&engine, &options(true));
    running::run(&mut runtime, &request);
    let found = running::run(&mut runtime, &request);
    assert!(found[0].counters.reused_tokens >= 32, "{:?}", found[0].counters);
    assert_eq!(totals(&found), totals(&fresh), "drafted and accepted");
    // Steps differ by none: the first drafts come as early.
    assert_eq!(found[0].counters.steps, fresh[0].counters.steps);
}
