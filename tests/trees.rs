//! Trees of drafts on a CPU and on an emulated GPU: a row has the bits that it has in a chain of its ancestors, and what is kept of a tree is
//! what a chain would have left.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::small::{NORMED, SMALL, tokens};
use common::tiny::{self, Sizes};
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, Prefill, TARGET_FILE, pages_for};
use spec_core::testing::PageId;
use spec_core::testing::batch::{Forward, Logits, Segment};
use spec_core::testing::cpu::Model;
use spec_core::testing::cuda::{self, Gpu, OnHost};
use spec_emu::{Emulator, Schedule};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tempfile::TempDir;

/// Parents of the drafts: a first branch, forks at several depths, forks of forks, and a second root.
const TREE: [Option<usize>; 11] =
    [None, Some(0), Some(1), Some(2), Some(1), Some(4), Some(4), None, Some(7), Some(3), Some(8)];

/// Drafts whose branches are kept: of the first branch, of forks, and of the second root.
const KEPT: [usize; 4] = [3, 6, 9, 10];

/// Pages of a cache that sequences have; as many more are for branches.
const NUM_PAGES: usize = 64;

fn engine(sizes: &Sizes, dtype: Dtype, device: &str) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().unwrap();
    tiny::write_sized(&dir.path().join("hf"), 3, 5, sizes);
    Recipe::plain(dir.path().join("hf"), dtype).on(device).build(&dir.path().join("built"));
    let engine = Engine::open(dir.path().join("built").join("1").join(TARGET_FILE)).unwrap();
    (dir, engine)
}

fn on_cpu(engine: &Engine, isa: Isa) -> Model {
    Model::load(engine, NUM_PAGES, isa, Arc::new(Pool::new(2))).unwrap()
}

fn on_gpu(engine: &Engine) -> OnHost {
    let gpu = Gpu::new(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)));
    let prefill = Prefill::Blocks;
    let model = cuda::Model::load_with(engine, 2 * NUM_PAGES, prefill, &mut **gpu.lock()).unwrap();
    OnHost::new(Arc::new(model), gpu).with_scratch(64..128)
}

/// The tokens from the first draft down to a node.
fn path_to(node: usize, drafts: &[u32]) -> (Vec<usize>, Vec<u32>) {
    let mut path: Vec<usize> = std::iter::successors(Some(node), |&node| TREE[node]).collect();
    path.reverse();
    let tokens = path.iter().map(|&node| drafts[node]).collect();
    (path, tokens)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|value| value.to_bits()).collect()
}

/// The logits after every token of a text, computed at once from an empty cache.
fn chain(
    model: &mut dyn Forward,
    text: &[u32],
    pages: &[PageId],
    prompt_len: usize,
) -> Vec<Vec<u32>> {
    let len = text.len();
    let segment =
        Segment { tokens: text, first_position: 0, pages, prompt_len, num_logits: len, tree: &[] };
    let logits = model.forward(&[segment]).unwrap();
    (0..len).map(|row| bits(logits.row(row))).collect()
}

/// Behind a text that is no prompt, of which the last token is computed with the tree.
fn check(model: &mut dyn Forward, known: usize, what: &str) {
    check_behind(model, known, known - 1, 0, what);
}

/// Known tokens from `from` on are computed with the tree behind them.
fn check_behind(model: &mut dyn Forward, known: usize, from: usize, prompt_len: usize, what: &str) {
    let text = tokens(known + TREE.len() + 2);
    let (text, drafts) = text.split_at(known);
    let pages = |first: u32| -> Vec<PageId> {
        (first..first + pages_for(known + TREE.len() + 2) as u32).rev().collect()
    };
    let (own, beside, twin) = (pages(0), pages(20), pages(40));
    let expected: Vec<_> = (0..TREE.len())
        .map(|node| {
            let (_, branch) = path_to(node, drafts);
            chain(model, &[text, &branch].concat(), &twin, prompt_len).pop().unwrap()
        })
        .collect();
    for kept in KEPT {
        for pages in [&own, &beside] {
            chain(model, &text[..from], pages, prompt_len);
        }
        // The last known tokens and the tree behind them; beside them a chain of another sequence.
        let rows = [&text[from..], &drafts[..TREE.len()]].concat();
        let segment = |pages, tokens, tree| {
            let (first_position, num_logits) = (from, <[u32]>::len(tokens));
            Segment { tokens, first_position, pages, prompt_len, num_logits, tree }
        };
        let other = segment(&beside[..], &rows[..3], &[]);
        let logits = model.forward(&[other, segment(&own[..], &rows, &TREE)]).unwrap();
        for (node, expected) in expected.iter().enumerate() {
            let found = bits(logits.row(3 + (known - from) + node));
            assert!(found == *expected, "{what}, {known} known: node {node}");
        }
        let (path, kept_tokens) = path_to(kept, drafts);
        model.keep(&own, known, &path).unwrap();
        // What follows sees the branch that was kept.
        let follows = [text, &kept_tokens, &drafts[TREE.len()..]].concat();
        let first = known + kept_tokens.len();
        let next = Segment { first_position: first, ..segment(&own[..], &follows[first..], &[]) };
        let logits = model.forward(&[next]).unwrap();
        let expected = chain(model, &follows, &twin, prompt_len);
        for row in 0..2 {
            let found = bits(logits.row(row));
            assert!(found == expected[first + row], "{what}, {known} known: behind {kept}");
        }
    }
}

#[test]
fn a_draft_of_a_tree_has_the_bits_that_it_has_in_a_chain() {
    for (sizes, dtype) in [(SMALL, Dtype::Fp32), (NORMED, Dtype::Fp8), (SMALL, Dtype::Int8)] {
        for isa in Isa::supported() {
            let (_dir, engine) = engine(&sizes, dtype, "cpu");
            let mut model = on_cpu(&engine, isa);
            // Drafts that begin a page, cross into the next, and lie behind a chunk of attention.
            for known in [1, 9, 16, 30, 255] {
                check(&mut model, known, &format!("{isa} {dtype}"));
            }
        }
    }
    for (sizes, dtype) in [(SMALL, Dtype::Fp16), (NORMED, Dtype::Fp8)] {
        let (_dir, engine) = engine(&sizes, dtype, "cuda:sm_90a");
        let mut model = on_gpu(&engine);
        for known in [1, 16, 30] {
            check(&mut model, known, &format!("sm_90a {dtype}"));
        }
        // The page that the first draft is in begins with the end of a block.
        check_behind(&mut model, 278, 268, 278, &format!("sm_90a {dtype}, a prompt"));
    }
}

/// A model that does not move what is kept.
struct KeepsNothing<F>(F);

impl<F: Forward> Forward for KeepsNothing<F> {
    fn forward(&mut self, segments: &[Segment<'_>]) -> spec_core::Result<Logits> {
        self.0.forward(segments)
    }

    fn takes_trees(&self) -> bool {
        self.0.takes_trees()
    }

    fn keep(&mut self, _: &[PageId], _: usize, _: &[usize]) -> spec_core::Result<()> {
        Ok(())
    }
}

#[test]
fn a_branch_that_is_not_kept_is_noticed() {
    let notices = |model: &mut dyn Forward| {
        let checked = catch_unwind(AssertUnwindSafe(|| check(model, 9, "nothing is kept")));
        let said = checked.expect_err("it was not noticed");
        let said = said.downcast_ref::<String>().unwrap();
        assert!(said.contains("nothing is kept, 9 known: behind 6"), "{said}");
    };
    let (_dir, on_cpu_engine) = engine(&SMALL, Dtype::Fp32, "cpu");
    notices(&mut KeepsNothing(on_cpu(&on_cpu_engine, Isa::detect())));
    let (_dir, on_gpu_engine) = engine(&SMALL, Dtype::Fp16, "cuda:sm_90a");
    notices(&mut KeepsNothing(on_gpu(&on_gpu_engine)));
}

#[test]
fn trees_without_pages_for_branches_are_refused() {
    let (_dir, engine) = engine(&SMALL, Dtype::Fp16, "cuda:sm_90a");
    let mut model = on_gpu(&engine);
    assert!(model.takes_trees());
    model = model.with_scratch(64..66);
    let (tokens, pages) = (tokens(1 + TREE.len()), [0, 1]);
    let segment = Segment {
        tokens: &tokens,
        first_position: 0,
        pages: &pages,
        prompt_len: 0,
        num_logits: 1,
        tree: &TREE,
    };
    let error = model.forward(&[segment]).unwrap_err().to_string();
    assert!(error.contains("a tree of drafts that needs more than 2 pages"), "{error}");
    assert!(!model.with_scratch(0..0).takes_trees());
}
