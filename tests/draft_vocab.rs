//! A model that drafts some tokens of its vocabulary alone: of these it has the logits of the whole model, to the bit, on a CPU
//! and on an emulated GPU, and texts do not depend on which they are.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::running::{self, Done};
use common::small::{SMALL, in_parts, tokens};
use common::tiny::{self, END, Sizes};
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{DRAFT_FILE, Isa, Options, Request, Runtime, TARGET_FILE};
use spec_core::testing::cuda::{self, Gpu, OnHost};
use spec_core::testing::{cpu, vocab_map};
use spec_emu::{Emulator, Schedule};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const NUM_PAGES: usize = 4;
/// What is drafted: a third of the vocabulary.
const DRAFTED: usize = 21;

/// A text to count tokens in: each of its 27 characters is one.
fn text(dir: &Path) -> PathBuf {
    let path = dir.join("text.txt");
    fs::write(&path, "THE-QUICK-BROWN-FOX-JUMPS-OVER-THE-LAZY-DOG\n".repeat(3)).unwrap();
    path
}

fn emulated() -> Emulator {
    Emulator::new((9, 0), 3, Schedule::PLAIN)
}

struct Built {
    _dir: TempDir,
    path: PathBuf,
}

impl Built {
    /// A target and a drafter of half of its layers, or a third of the vocabulary of that.
    fn new(sizes: &Sizes, dtype: Dtype, head: Dtype, device: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        tiny::write_sized(&path("big"), 2, 1, sizes);
        tiny::write_sized(&path("small"), 1, 1, sizes);
        let whole = Recipe::model(path("big"), dtype, path("small"), dtype).on(device);
        let whole = whole.with_draft_head(head);
        whole.build(&path("whole"));
        let vocab = format!("{DRAFTED}:{}", text(dir.path()).display());
        whole.with_draft_vocab(&vocab).build(&path("some"));
        Self { path: dir.path().into(), _dir: dir }
    }

    fn engine(&self, name: &str, file: &str) -> Engine {
        Engine::open(self.path.join(name).join("1").join(file)).unwrap()
    }

    /// The drafter of all tokens, that of some, and which these are.
    fn drafters(&self) -> (Engine, Engine, Vec<u32>) {
        let [whole, some] = ["whole", "some"].map(|name| self.engine(name, DRAFT_FILE));
        assert_eq!(vocab_map(&whole).unwrap(), None);
        let map = vocab_map(&some).unwrap().unwrap();
        assert!(map.len() == DRAFTED && map.is_sorted() && map.last() == Some(&END), "{map:?}");
        (whole, some, map)
    }
}

/// Of each row of the whole model's logits those of some tokens.
fn of_tokens(rows: &[Vec<f32>], map: &[u32]) -> Vec<Vec<u32>> {
    let of = |row: &Vec<f32>| map.iter().map(|&token| row[token as usize].to_bits()).collect();
    rows.iter().map(of).collect()
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}

#[test]
fn logits_of_some_tokens_are_those_of_all_on_a_cpu() {
    for (dtype, head) in [
        (Dtype::Int4, Dtype::Int4),
        (Dtype::Int8, Dtype::Bf16),
        (Dtype::Fp8, Dtype::Fp8),
        (Dtype::Fp32, Dtype::Fp32),
    ] {
        let built = Built::new(&tiny::SMALLEST, dtype, head, "cpu");
        let (whole, some, map) = built.drafters();
        for isa in Isa::supported() {
            let [whole, some] = [&whole, &some].map(|engine| {
                let pool = Arc::new(Pool::new(2));
                let mut model = cpu::Model::load(engine, NUM_PAGES, isa, pool).unwrap();
                in_parts(&mut model, &tokens(40), &[1, 30, 2, 7])
            });
            assert!(bits(&some) == of_tokens(&whole, &map), "{dtype}, {head}, {isa}");
        }
    }
}

#[test]
fn logits_of_some_tokens_are_those_of_all_on_a_gpu() {
    for (dtype, head) in [(Dtype::Fp8, Dtype::Fp8), (Dtype::Fp16, Dtype::Fp16)] {
        let built = Built::new(&SMALL, dtype, head, "cuda:sm_90a");
        let (whole, some, map) = built.drafters();
        let [whole, some] = [&whole, &some].map(|engine| {
            let gpu = Gpu::new(Box::new(emulated()));
            let model = cuda::Model::load(engine, NUM_PAGES, &mut **gpu.lock()).unwrap();
            in_parts(&mut OnHost::new(Arc::new(model), gpu), &tokens(40), &[1, 30, 2, 7])
        });
        assert!(bits(&some) == of_tokens(&whole, &map), "{dtype}, {head}");
    }
}

/// Greedy and seeded, with what depends on the tokens before, and what a GPU leaves to the host.
fn requests() -> Vec<Request> {
    let sampling = running::kinds_of_sampling();
    let request = |(idx, sampling): (usize, &_)| Request {
        prompt: tokens(5 + 9 * idx).into(),
        max_tokens: 14,
        sampling: Clone::clone(sampling),
        ..Request::default()
    };
    sampling.iter().enumerate().map(request).collect()
}

/// Drafts, and those that were accepted.
fn totals(done: &[Done]) -> (u64, u64) {
    let sum = |count: fn(&Done) -> u64| done.iter().map(count).sum();
    (sum(|done| done.counters.drafted), sum(|done| done.counters.accepted))
}

fn load(engine: &Engine, options: Options) -> Runtime {
    let options = Options { kv_tokens: Some(2048), ..options };
    Runtime::load_on(engine, &options, &|_| Ok(Box::new(emulated()) as _)).unwrap()
}

fn texts_are_the_same(sizes: &Sizes, dtype: Dtype, device: &str) {
    let built = Built::new(sizes, dtype, dtype, device);
    let [whole, some] = ["whole", "some"].map(|name| built.engine(name, TARGET_FILE));
    let requests = requests();
    let alone = running::run_alone(&mut load(&whole, running::options(Fixed)), &requests);
    let drafts = [&whole, &some].map(|engine| {
        let mut of_chains = (0, 0);
        for (policy, draft_len, draft_branches) in
            [(Fixed, 1, 1), (Fixed, 4, 1), (Adaptive, 8, 1), (Fixed, 3, 2)]
        {
            let options = Options { draft_branches, ..running::options(policy) };
            let requests: Vec<Request> = requests
                .iter()
                .map(|request| Request { draft_len: Some(draft_len), ..request.clone() })
                .collect();
            let done = running::run(&mut load(engine, options), &requests);
            for (done, alone) in done.iter().zip(&alone) {
                assert_eq!(done.tokens, *alone, "{device}, {policy:?}, {draft_len} drafts");
            }
            if (policy, draft_len) == (Fixed, 4) {
                of_chains = totals(&done);
            }
        }
        of_chains
    });
    eprintln!(
        "{device}: drafted and accepted {:?} of all tokens, {:?} of some",
        drafts[0], drafts[1]
    );
    let [(_, of_all), (drafted, of_some)] = drafts;
    // In random text every token is as frequent: two thirds are not drafted.
    assert!(0 < of_some && of_some < of_all && of_some < drafted, "{device}");
}

#[test]
fn texts_do_not_depend_on_the_tokens_that_are_drafted_on_a_cpu() {
    texts_are_the_same(&tiny::SMALLEST, Dtype::Int8, "cpu");
}

#[test]
fn texts_do_not_depend_on_the_tokens_that_are_drafted_on_a_gpu() {
    texts_are_the_same(&SMALL, Dtype::Fp8, "cuda:sm_90a");
}
