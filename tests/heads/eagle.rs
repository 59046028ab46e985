//! EAGLE heads against their definition: heads in the layouts that are published, and what the reference says to five rounds
//! of drafting with each.

use crate::common::models::Recipe;
use crate::common::tiny;
use crate::rounds::{self, PAGES, run};
use crate::support::{
    OneRowLate, Recorded, assert_can_be_built_later, assert_shared_pages_change_nothing,
    assert_texts_are_plain, check, checkpoints, draft_args, drafts_along_the_text, engines,
};
use spec_build::checkpoint::Checkpoint;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{DRAFT_FILE, Isa, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_core::testing::Shares;
use spec_core::testing::batch::{Branching, DraftLens, Entry};
use spec_core::testing::cpu::{Eagle, Resources, Weights};
use spec_core::testing::draft::{self, Drafter, Head, HeadPass, HeadSegment, Verified};
use spec_core::testing::sampling::{Coupling, Sampler};
use std::fs;
use std::sync::Arc;

pub(crate) const CASES: [&str; 11] = [
    "eagle1-bias",
    "eagle1-nobias",
    "eagle3-31-fcnorm",
    "eagle3-31-normfc",
    "eagle3-nbr0",
    "eagle3-nbr0-d2t",
    "eagle3-nbr1",
    "eagle3-nbr1-d2t",
    "eagle3-original",
    "eagle3-qwen3-2layers",
    "eagle3-window8",
];

fn head(target: &Engine, draft: &Engine, isa: Isa, num_pages: usize) -> Eagle {
    let pool = Arc::new(Pool::new(1));
    let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
    let (own, targets) = (weights(draft), weights(target));
    let resources = Resources { num_pages, rows: 8, isa, pool };
    Eagle::new(draft, own, Some(targets), resources).unwrap()
}

#[test]
fn rounds_of_drafting_are_those_of_the_reference() {
    for case in CASES {
        let (_dir, target, draft) = engines(case, Dtype::Fp32);
        for isa in Isa::supported() {
            let mut largest = 0.0f32;
            let found = rounds::follow(case, &mut head(&target, &draft, isa, 3), |name, a, b| {
                largest = largest.max(check(&format!("{case} {isa} {name}"), a, b));
            });
            let recorded = Recorded::of(case);
            for (round, drafts) in found.into_iter().enumerate() {
                let expected = recorded.whole(&format!("r{round}.chain.tokens"));
                assert_eq!(drafts, expected, "{case} {isa}: round {round}");
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
            let mut one_by_one = head(&target, &draft, Isa::detect(), 3);
            let states = one_by_one.states(&taps).unwrap();
            let width = one_by_one.width();
            let state = |position: usize| &states[position * width..(position + 1) * width];
            let mut alone = HeadPass::default();
            for (position, &token) in tokens.iter().enumerate().skip(1) {
                alone = run(&mut one_by_one, token as usize, state(position - 1), position);
            }
            let mut at_once = head(&target, &draft, Isa::detect(), 3);
            let rows = tokens.len() - 1;
            let segment = HeadSegment {
                tokens: &tokens[1..],
                states: &states[..rows * width],
                first_position: 1,
                pages: &PAGES,
                num_logits: 1,
                tree: &[],
            };
            let pass = at_once.forward(&[segment]).unwrap();
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&pass.logits.values), bits(&alone.logits.values), "{case} {dtype}");
            assert_eq!(bits(&pass.states), bits(&alone.states), "{case} {dtype}");
        }
    }
}

/// Parents of drafts: a first branch, forks at two depths, a fork of a fork, and a second root.
const TREE: [Option<usize>; 7] = [None, Some(0), Some(1), Some(0), Some(3), None, Some(3)];

#[test]
fn a_row_of_a_tree_has_the_bits_that_it_has_in_a_chain_of_its_ancestors() {
    let tokens: Vec<u32> =
        Recorded::of("target").whole("token_ids").into_iter().map(|token| token as u32).collect();
    let taps = Recorded::of("target").floats("aux_hidden_states");
    let drafts: Vec<u32> = (0..TREE.len() as u32).map(|draft| 7 * draft + 3).collect();
    // The drafts begin within a page, at its beginning, and so that a branch ends on another one.
    for (case, known) in [("eagle3-nbr1", 9), ("eagle3-window8", 16), ("eagle1-bias", 14)] {
        for dtype in [Dtype::Fp32, Dtype::Int8] {
            let (_dir, target, draft) = engines(case, dtype);
            let made = |head: &mut Eagle| match case.starts_with("eagle1") {
                true => head.states(&Recorded::of("target").floats("last_hidden_pre_norm")),
                false => head.states(&taps),
            };
            // The known tokens are read; then come the drafts, with states that are as good as any.
            let begun = || {
                let mut head = head(&target, &draft, Isa::detect(), 3);
                let (states, width) = (made(&mut head).unwrap(), head.width());
                head.forward(&[HeadSegment {
                    tokens: &tokens[1..known],
                    states: &states[..(known - 1) * width],
                    first_position: 1,
                    pages: &PAGES,
                    num_logits: 0,
                    tree: &[],
                }])
                .unwrap();
                let own = states[..TREE.len() * width].to_vec();
                (head, own, width)
            };
            let run = |nodes: &[usize], num_logits: usize, tree: &[Option<usize>]| {
                let (mut head, states, width) = begun();
                let of = |node: &usize| states[node * width..][..width].iter().copied();
                let states: Vec<f32> = nodes.iter().flat_map(of).collect();
                let tokens: Vec<u32> = nodes.iter().map(|&node| drafts[node]).collect();
                let (tokens, states) = (&tokens[..], &states[..]);
                let (first_position, pages) = (known, &PAGES);
                let segment =
                    HeadSegment { tokens, states, first_position, pages, num_logits, tree };
                head.forward(&[segment]).unwrap()
            };
            let all: Vec<usize> = (0..TREE.len()).collect();
            let together = run(&all, TREE.len(), &TREE);
            let (num_logits, width) =
                (together.logits.vocab_size, together.states.len() / TREE.len());
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for node in all {
                let mut path: Vec<usize> =
                    std::iter::successors(Some(node), |&node| TREE[node]).collect();
                path.reverse();
                let alone = run(&path, 1, &[]);
                let what = format!("{case} {dtype}: draft {node} behind {known} tokens");
                let own = &together.logits.values[node * num_logits..][..num_logits];
                assert_eq!(bits(own), bits(&alone.logits.values), "{what}");
                let own = &together.states[node * width..][..width];
                assert_eq!(bits(own), bits(&alone.states), "{what}");
            }
        }
    }
}

#[test]
fn what_a_head_drafts_as_a_tree_is_what_chains_along_it_say_is_likeliest() {
    const KNOWN: usize = 14;
    const WIDTH: usize = 3;
    let tokens: Vec<u32> =
        Recorded::of("target").whole("token_ids").into_iter().map(|token| token as u32).collect();
    let taps = Recorded::of("target").floats("aux_hidden_states");
    let greedy = Sampler::new(SamplingParams::default(), Coupling::Path(0), vec![]);
    for case in ["eagle3-nbr1", "eagle3-31-normfc", "eagle3-window8"] {
        let (_dir, target, draft) = engines(case, Dtype::Fp32);
        let entry = |known: usize, computed: usize| Entry {
            id: 7,
            tokens: &tokens[..known],
            prompt_len: 1,
            max_len: 48,
            computed,
            chunk: known - computed,
            draft_computed: 0,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens::both(3),
            branching: Branching { width: WIDTH, ..Branching::CHAIN },
            given: &[],
            min_confidence: 0.0,
            pages: &PAGES,
            prompt_rows: 0,
            shares: Shares::All,
            sampler: &greedy,
        };
        let inner = head(&target, &draft, Isa::detect(), 3);
        let mut drafter = draft::Eagle::new(Box::new(inner), 256);
        let prompt = entry(KNOWN - 1, 0);
        assert!(drafter.propose(&[prompt]).unwrap()[0].is_empty());
        let row_len = taps.len() / tokens.len();
        let told = taps.chunks(row_len).take(KNOWN - 1).collect();
        drafter.observe(&[Verified { entry: &prompt, accepted: vec![], taps: told }]).unwrap();
        let tree = drafter.propose(&[entry(KNOWN, KNOWN - 1)]).unwrap().remove(0);
        assert_eq!((tree.len(), tree.passes), (3 * WIDTH, 3));

        // Probabilities of what follows a path, by passes of one row along it.
        let mut head = head(&target, &draft, Isa::detect(), 3);
        let states = head.states(&taps).unwrap();
        let width = head.width();
        let mut follows = |path: &[u32]| -> Vec<(u32, f64)> {
            let mut pass = HeadPass::default();
            for position in 1..KNOWN {
                let state = &states[(position - 1) * width..][..width];
                pass = run(&mut head, tokens[position] as usize, state, position);
            }
            for (idx, &token) in path.iter().enumerate() {
                pass = run(&mut head, token as usize, &pass.states.clone(), KNOWN + idx);
            }
            let weights: Vec<f64> =
                pass.logits.row(0).iter().map(|&logit| f64::from(logit).exp()).collect();
            let total: f64 = weights.iter().sum();
            let token = |row: usize| head.vocab_map().map_or(row as u32, |map| map[row]);
            weights.iter().enumerate().map(|(row, weight)| (token(row), weight / total)).collect()
        };
        let path = |node: usize| -> Vec<u32> {
            let mut path: Vec<u32> = std::iter::successors(Some(node), |&node| tree.parents[node])
                .map(|node| tree.tokens[node])
                .collect();
            path.reverse();
            path
        };
        let paths: Vec<Vec<u32>> = (0..tree.len()).map(path).collect();
        let mut level: Vec<(Vec<u32>, f64)> = vec![(vec![], 1.0)];
        for depth in 1..=3 {
            let mut next: Vec<(Vec<u32>, f64)> = Vec::new();
            for (path, likelihood) in &level {
                let behind = |(token, share): (u32, f64)| {
                    ([&path[..], &[token]].concat(), likelihood * share)
                };
                next.extend(follows(path).into_iter().map(behind));
            }
            let (found, others): (Vec<_>, Vec<_>) =
                next.into_iter().partition(|(path, _)| paths.contains(path));
            assert_eq!(found.len(), WIDTH, "{case}: level {depth} of {paths:?}");
            let least = found.iter().map(|(_, likelihood)| *likelihood).fold(1.0, f64::min);
            let most = others.iter().map(|(_, likelihood)| *likelihood).fold(0.0, f64::max);
            assert!(least >= most * (1.0 - 1e-4), "{case}: level {depth} has {least}, not {most}");
            level = found;
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
    CASES.into_iter().for_each(assert_can_be_built_later);
}

#[test]
fn weights_of_heads_that_are_no_finite_numbers_are_named_and_nothing_is_built() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    tiny::write(&path("target"), 2, 1);
    tiny::write_head(&path("eagle"), 2, 1, &tiny::SMALLEST);
    tiny::write_medusa(&path("medusa"), 3, 1, &tiny::SMALLEST);
    Recipe::plain(path("target"), Dtype::Bf16).build(&path("built"));
    let target = path("built").join("1").join(TARGET_FILE);
    let before = fs::read(&target).unwrap();
    for (head, part) in [("eagle", "up_proj.weight"), ("medusa", "2.0.linear.weight")] {
        for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
            let broken = path(&format!("{head} with {shown}"));
            fs::create_dir(&broken).unwrap();
            for file in ["config.json", "model.safetensors"] {
                fs::copy(path(head).join(file), broken.join(file)).unwrap();
            }
            tiny::edit(&broken, |name, len, values| {
                if name.ends_with(part) {
                    values[3 * len + 1] = value;
                }
            });
            let refused = spec_build::draft::draft(&draft_args(path("built"), broken));
            let error = format!("{:#}", refused.unwrap_err());
            for expected in [part, "row 3", shown] {
                assert!(error.contains(expected), "{head}: {error}");
            }
            assert!(fs::read(&target).unwrap() == before, "{head}: the target has changed");
            assert!(!target.with_file_name(DRAFT_FILE).exists(), "{head}");
        }
    }
}

#[test]
fn what_a_step_drafts_is_what_the_reference_drafts() {
    for case in CASES {
        let (_dir, target, draft) = engines(case, Dtype::Fp32);
        let recorded = Recorded::of(case);
        let head = head(&target, &draft, Isa::detect(), 12);
        let noted =
            drafts_along_the_text(&target, Box::new(draft::Eagle::new(Box::new(head), 256)), 4);
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

#[test]
fn states_of_the_wrong_row_are_noticed() {
    for case in ["eagle3-nbr1", "eagle1-bias"] {
        let (_dir, target, draft) = engines(case, Dtype::Fp32);
        let drafter = || draft::Eagle::new(Box::new(head(&target, &draft, Isa::detect(), 12)), 256);
        let right = drafts_along_the_text(&target, Box::new(drafter()), 4);
        let wrong = drafts_along_the_text(&target, Box::new(OneRowLate::new(drafter())), 4);
        let differ = right.iter().filter(|(place, drafts)| wrong.get(place) != Some(drafts));
        assert!(2 * differ.count() > right.len(), "{case}: most drafts are the same");
    }
}

#[test]
fn texts_are_those_of_plain_decoding() {
    for (case, dtype) in [
        ("eagle3-nbr0-d2t", Dtype::Int8),
        ("eagle3-window8", Dtype::Fp8),
        ("eagle1-bias", Dtype::Bf16),
    ] {
        let accepted = assert_texts_are_plain(case, dtype, 1..9);
        assert!(accepted > 100, "{case}: only {accepted} drafts were accepted");
    }
}

#[test]
fn who_begins_behind_shared_pages_drafts_as_if_all_were_its_own() {
    assert_shared_pages_change_nothing("eagle3-31-normfc", 4);
}
