//! Trees of drafts on the CPU: a row has the bits that it has in a chain of its ancestors, and what is kept of a tree is
//! what a chain would have left.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::small::{NORMED, SMALL, tokens};
use common::tiny::{self, Sizes};
use spec_core::batch::{Forward, Segment};
use spec_core::engine::Engine;
use spec_core::exec::cpu::{Isa, Model, Pool};
use spec_core::model::Dtype;
use spec_core::pages::{PageId, pages_for};
use spec_core::runtime::TARGET_FILE;
use std::sync::Arc;

/// Parents of the drafts: a first branch, forks at several depths, forks of forks, and a second root.
const TREE: [Option<usize>; 11] =
    [None, Some(0), Some(1), Some(2), Some(1), Some(4), Some(4), None, Some(7), Some(3), Some(8)];

/// Drafts whose branches are kept: of the first branch, of forks, and of the second root.
const KEPT: [usize; 4] = [3, 6, 9, 10];

fn model(sizes: &Sizes, dtype: Dtype, isa: Isa) -> Model {
    let dir = tempfile::tempdir().unwrap();
    tiny::write_sized(&dir.path().join("hf"), 3, 5, sizes);
    Recipe::plain(dir.path().join("hf"), dtype).build(&dir.path().join("built"));
    let engine = Engine::open(dir.path().join("built").join("1").join(TARGET_FILE)).unwrap();
    Model::load(&engine, 64, isa, Arc::new(Pool::new(2))).unwrap()
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
fn chain(model: &mut Model, text: &[u32], pages: &[PageId]) -> Vec<Vec<u32>> {
    let len = text.len();
    let segment = Segment { tokens: text, first_position: 0, pages, num_logits: len, tree: &[] };
    let logits = model.forward(&[segment]).unwrap();
    (0..len).map(|row| bits(logits.row(row))).collect()
}

fn check(model: &mut Model, known: usize, what: &str) {
    let text = tokens(known + TREE.len() + 2);
    let (text, drafts) = text.split_at(known);
    let pages = |first: u32| -> Vec<PageId> {
        (first..first + pages_for(known + TREE.len() + 2) as u32).rev().collect()
    };
    let (own, beside, twin) = (pages(0), pages(20), pages(40));
    let expected: Vec<_> = (0..TREE.len())
        .map(|node| {
            let (_, branch) = path_to(node, drafts);
            chain(model, &[text, &branch].concat(), &twin).pop().unwrap()
        })
        .collect();
    for kept in KEPT {
        for pages in [&own, &beside] {
            chain(model, &text[..known - 1], pages);
        }
        // The last known token and the tree behind it; beside them a chain of another sequence.
        let rows = [&text[known - 1..], &drafts[..TREE.len()]].concat();
        let segment = |pages, tokens, tree| {
            let (first_position, num_logits) = (known - 1, <[u32]>::len(tokens));
            Segment { tokens, first_position, pages, num_logits, tree }
        };
        let other = segment(&beside[..], &rows[..3], &[]);
        let logits = model.forward(&[other, segment(&own[..], &rows, &TREE)]).unwrap();
        for (node, expected) in expected.iter().enumerate() {
            let found = bits(logits.row(3 + 1 + node));
            assert!(found == *expected, "{what}, {known} known: node {node}");
        }
        let (path, kept_tokens) = path_to(kept, drafts);
        model.keep(&own, known, &path).unwrap();
        // What follows sees the branch that was kept.
        let follows = [text, &kept_tokens, &drafts[TREE.len()..]].concat();
        let first = known + kept_tokens.len();
        let next = Segment { first_position: first, ..segment(&own[..], &follows[first..], &[]) };
        let logits = model.forward(&[next]).unwrap();
        let expected = chain(model, &follows, &twin);
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
            let mut model = model(&sizes, dtype, isa);
            // Drafts that begin a page, cross into the next, and lie behind a chunk of attention.
            for known in [1, 9, 16, 30, 255] {
                check(&mut model, known, &format!("{isa} {dtype}"));
            }
        }
    }
}
