//! Tiny heads of `tests/data/heads` as checkpoints and engines, what was recorded of them, and what holds for heads of any kind.

use crate::common::models::Recipe;
use crate::common::running::{self, Done};
use crate::common::{data, golden, tiny};
use safetensors::tensor::TensorView;
use safetensors::{Dtype as Stored, SafeTensors};
use spec_build::cli::{DraftArgs, DraftSource, SkipArgs};
use spec_core::Result;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{
    AdmissionPolicy, DRAFT_FILE, Isa, Options, Request, SequenceId, TARGET_FILE,
};
use spec_core::sampling::SamplingParams;
use spec_core::testing::batch::{Branching, DraftLens, Entry, Executor, WANTED};
use spec_core::testing::cpu::Model;
use spec_core::testing::draft::{Drafter, Proposal, Verified};
use spec_core::testing::sampling::{Coupling, Sampler};
use spec_core::testing::{Host, PageId};
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Most that a logit or a state may differ: both sum in fp32, in other orders; logits are up to 10.
pub(crate) const FP32_ERROR: f32 = 1e-4;

/// Writes a checkpoint of `tests/data/heads`.
fn copy(case: &str, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let weights = match case {
        "eagle1-nobias" => "pytorch_model.bin",
        "medusa" => "medusa_lm_head.pt",
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
pub(crate) fn checkpoints(case: &str) -> (TempDir, PathBuf, PathBuf) {
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
pub(crate) fn engines(case: &str, dtype: Dtype) -> (TempDir, Engine, Engine) {
    let (dir, target, head) = checkpoints(case);
    let built = dir.path().join("built");
    recipe(case, target, head, dtype).build(&built);
    let target = Engine::open(built.join("1").join(TARGET_FILE)).unwrap();
    let draft = target.open_drafter().unwrap().unwrap();
    (dir, target, draft)
}

/// An engine of a case.
pub(crate) fn recipe(case: &str, target: PathBuf, head: PathBuf, dtype: Dtype) -> Recipe {
    let recipe = Recipe::model(target, dtype, head, dtype).up_to(128);
    match case {
        "medusa" => recipe.drafting(3),
        _ => recipe,
    }
}

/// What was recorded of a case.
pub(crate) struct Recorded(Vec<u8>);

impl Recorded {
    pub(crate) fn of(case: &str) -> Self {
        let same_as = if case == "eagle3-original" { "eagle3-nbr0-d2t" } else { case };
        Self(data::bytes(&format!("heads/{same_as}/golden.safetensors")))
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        golden::floats(&SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap())
    }

    pub(crate) fn whole(&self, name: &str) -> Vec<usize> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Stored::I64, "{name}");
        let (values, _) = tensor.data().as_chunks();
        values.iter().map(|&value| i64::from_le_bytes(value) as usize).collect()
    }
}

/// The largest difference.
pub(crate) fn check(what: &str, found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    assert!(largest <= FP32_ERROR, "{what}: a value differs by {largest}");
    largest
}

/// What was drafted for a sequence behind so many computed positions.
pub(crate) type Noted = HashMap<(SequenceId, usize), Vec<u32>>;

/// A drafter whose proposals are noted.
struct Noting {
    inner: Box<dyn Drafter>,
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

/// A drafter that is told of the hidden states of the row before each.
pub(crate) struct OneRowLate<D> {
    inner: D,
    last: HashMap<SequenceId, Vec<f32>>,
}

impl<D> OneRowLate<D> {
    pub(crate) fn new(inner: D) -> Self {
        Self { inner, last: HashMap::new() }
    }
}

impl<D: Drafter> Drafter for OneRowLate<D> {
    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        self.inner.propose(entries)
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        for each in verified {
            let own = each.taps.iter().map(|row| row.to_vec());
            let before = self.last.remove(&each.entry.id);
            let mut rows: Vec<Vec<f32>> = before.into_iter().chain(own).collect();
            self.last.extend(rows.last().map(|row| (each.entry.id, row.clone())));
            // The first row has none before it.
            rows.truncate(each.taps.len());
            let taps = rows.iter().map(Vec::as_slice).collect();
            self.inner.observe(&[Verified { taps, ..each.clone() }])?;
        }
        Ok(())
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }
}

/// What is drafted along the recorded text of a target, by three sequences at once.
pub(crate) fn drafts_along_the_text(
    target: &Engine,
    drafter: Box<dyn Drafter>,
    draft_len: usize,
) -> Noted {
    let tokens: Vec<u32> =
        Recorded::of("target").whole("token_ids").into_iter().map(|token| token as u32).collect();
    let greedy = Sampler::new(SamplingParams::default(), Coupling::Path(0), vec![]);
    let model = Model::load(target, 12, Isa::detect(), Arc::new(Pool::new(1))).unwrap();
    let noted = Arc::new(Mutex::new(HashMap::new()));
    let noting = Noting { inner: drafter, noted: Arc::clone(&noted) };
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
            let chunk = if idx == 1 { (known - computed[1]).min(5) } else { known - computed[idx] };
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
                draft_lens: DraftLens::both(if is_asked { draft_len } else { 0 }),
                branching: Branching::CHAIN,
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
    noted.clone()
}

/// Arguments that build a head for a built target.
pub(crate) fn draft_args(target: PathBuf, head: PathBuf) -> DraftArgs {
    DraftArgs {
        target,
        draft: DraftSource::Model(head),
        skip: SkipArgs::default(),
        draft_vocab: None,
        max_draft_len: None,
        draft_dtype: None,
        head_dtype: None,
        kv_calibration: None,
        draft_device: None,
        cuda_lib: None,
        quiet: true,
    }
}

/// A head that is built for a built target is the one that is built with it.
pub(crate) fn assert_can_be_built_later(case: &str) {
    for dtype in [Dtype::Fp32, Dtype::Int8] {
        let (dir, target, head) = checkpoints(case);
        let (together, later) = (dir.path().join("together"), dir.path().join("later"));
        recipe(case, target.clone(), head.clone(), dtype).build(&together);
        Recipe::plain(target, dtype).up_to(128).build(&later);
        let limits = Engine::open(together.join("1").join(TARGET_FILE)).unwrap();
        let max_draft_len = Some(limits.manifest().limits.max_draft_len);
        let args = DraftArgs { max_draft_len, ..draft_args(later.clone(), head) };
        spec_build::draft::draft(&args).unwrap();
        for file in [TARGET_FILE, DRAFT_FILE] {
            let bytes = |folder: &Path| fs::read(folder.join("1").join(file)).unwrap();
            assert!(bytes(&together) == bytes(&later), "{case} {dtype}: {file}");
        }
    }
}

/// Requests of several kinds of sampling, some of which begin alike.
fn requests(num: usize, vocab_size: u32) -> Vec<Request> {
    let kinds = running::kinds_of_sampling();
    let request = |idx: usize| {
        let shared = (idx / 3).is_multiple_of(2).then_some(0..37);
        let own =
            (0..3 + 11 * (idx as u32 % 5)).map(|i| (i * i + 31 * idx as u32 + 3) % vocab_size);
        let prompt: Vec<u32> =
            shared.into_iter().flatten().map(|i| i * 5 % vocab_size).chain(own).collect();
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

/// Texts with a head are those of plain decoding; how many drafts were accepted.
pub(crate) fn assert_texts_are_plain(case: &str, dtype: Dtype, draft_lens: Range<usize>) -> u64 {
    let (_dir, engine, _) = engines(case, dtype);
    assert_texts_of_engine_are_plain(&format!("{case} {dtype}"), &engine, draft_lens)
}

/// Texts are those of plain decoding, with each of these draft lengths and in whatever steps; how many drafts were accepted.
pub(crate) fn assert_texts_of_engine_are_plain(
    what: &str,
    engine: &Engine,
    draft_lens: Range<usize>,
) -> u64 {
    let requests = requests(33, engine.manifest().model.vocab_size as u32);
    let plain = Options { kv_reuse: false, ..running::options(Fixed) };
    let expected = running::run_alone(&mut running::load(engine, &plain), &requests);
    let with = |draft_len: Option<usize>| -> Vec<Request> {
        requests.iter().map(|request| Request { draft_len, ..request.clone() }).collect()
    };
    let mut accepted = 0;
    for draft_len in draft_lens {
        let mut runtime = running::load(engine, &running::options(Fixed));
        let done = running::run(&mut runtime, &with(Some(draft_len)));
        assert_same(&format!("{what}, {draft_len} drafts"), &done, &expected);
        let totals = totals(&done);
        assert!(totals.0 > 0, "{what}: nothing was drafted");
        accepted += totals.1;
    }
    let branching = |draft_branches, policy| Options { draft_branches, ..running::options(policy) };
    for (how, options) in [
        ("adaptive", running::options(Adaptive)),
        ("four branches", branching(4, Fixed)),
        (
            "four branches of few tokens",
            Options { draft_tree_tokens: Some(9), ..branching(4, Fixed) },
        ),
        ("adaptive branches", branching(3, Adaptive)),
        (
            "branches with few pages",
            Options {
                kv_tokens: Some(160),
                admission: AdmissionPolicy::MaxUtilization,
                ..branching(3, Fixed)
            },
        ),
        ("one at a time", Options { max_batch_size: Some(1), ..running::options(Fixed) }),
        ("eight at a time", Options { max_batch_size: Some(8), ..running::options(Fixed) }),
        ("branches in chunks", Options { max_num_tokens: Some(40), ..branching(3, Fixed) }),
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
        let mut runtime = running::load(engine, &options);
        for round in ["first", "again"] {
            let requests = with(None);
            if options.kv_tokens.is_none() {
                let done = running::run(&mut runtime, &requests);
                assert_same(&format!("{what}, {how}, {round}"), &done, &expected);
                continue;
            }
            let done = running::run_with(&mut runtime, &requests, running::preempting());
            assert_same(&format!("{what}, {how}, {round}"), &done, &expected);
            let preemptions: u64 = done.iter().map(|done| done.counters.preemptions).sum();
            assert!(preemptions > 0, "{what}, {how}: nobody lost pages");
        }
    }
    accepted
}

/// Who begins behind shared pages drafts as if all were its own.
pub(crate) fn assert_shared_pages_change_nothing(case: &str, draft_len: usize) {
    let (_dir, engine, _) = engines(case, Dtype::Fp32);
    let request =
        [Request { draft_len: Some(draft_len), max_tokens: 40, ..requests(2, 256).remove(1) }];
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
