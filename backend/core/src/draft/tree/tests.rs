//! Trees against naive ones, and what verification relies on.

use super::*;
use crate::draft_source::DraftLens;
use crate::sampling::{Coupling, Sampler, SamplingParams};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const VOCAB: u32 = 12;

/// Logits behind a path, different ones behind each.
fn logits(seed: u64, path: &[u32]) -> Vec<f32> {
    let mix = |hash: u64, token: u64| {
        let product = (hash ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        product ^ (product >> 29)
    };
    let hash = path.iter().fold(seed, |hash, &token| mix(hash, u64::from(token) + 1));
    (0..u64::from(VOCAB)).map(|id| (mix(hash, id + 100) >> 40) as f32 / 4e6).collect()
}

fn entry(sampler: &Sampler, len: usize, branching: Branching) -> Entry<'_> {
    Entry {
        id: 7,
        tokens: &[1, 2, 3],
        prompt_len: 1,
        max_len: 64,
        computed: 2,
        chunk: 1,
        draft_computed: 3,
        is_read: true,
        speculates: true,
        draft_lens: DraftLens::both(len),
        branching,
        given: &[],
        min_confidence: 0.0,
        pages: &[0],
        prompt_rows: 0,
        shares: crate::sequence::Shares::All,
        sampler,
    }
}

/// What is drafted where `logits` are those behind a path.
fn draft(entry: &Entry<'_>, logits: impl Fn(&[u32]) -> Vec<f32>) -> Proposal {
    grown(entry, logits).1
}

/// The same as it is handed on.
fn finished(entry: &Entry<'_>, logits: impl Fn(&[u32]) -> Vec<f32>) -> Proposal {
    let (trees, mut proposal) = grown(entry, logits);
    trees.finish(0, entry, &mut proposal);
    proposal
}

fn grown(entry: &Entry<'_>, logits: impl Fn(&[u32]) -> Vec<f32>) -> (Trees, Proposal) {
    let mut proposal = Proposal::default();
    let mut trees = Trees::new(1);
    loop {
        let behind: Vec<Vec<f32>> =
            trees.ends(0).iter().map(|&end| logits(&proposal.tokens_to(end))).collect();
        trees.draw(0, entry, &mut proposal, |end| &behind[end]);
        if !trees.goes_on(0, entry, &proposal) {
            return (trees, proposal);
        }
        let rows = trees.rows(0, entry, &proposal);
        let ends: Vec<usize> = trees.ends(0).iter().copied().flatten().collect();
        assert!(rows.nodes.ends_with(&ends) && rows.num_logits == ends.len());
        assert!(rows.nodes.len() < entry.branching.max_tokens, "no room behind them");
        let tables = proposal.q.iter().flatten().count();
        assert!(tables <= entry.branching.max_tokens, "{tables} distributions are kept");
        let tokens = rows.nodes.iter().map(|&node| proposal.tokens[node]);
        assert!(tokens.eq(rows.tokens.iter().copied()));
        for (row, parent) in rows.tree.iter().enumerate() {
            assert_eq!(parent.map(|parent| rows.nodes[parent]), proposal.parents[rows.nodes[row]]);
        }
    }
}

fn greedy() -> Sampler {
    Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new())
}

fn drawing(coupling: Coupling) -> Sampler {
    let params = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    Sampler::new(params, coupling, Vec::new())
}

fn fixed(width: usize) -> Branching {
    Branching { width, ..Branching::CHAIN }
}

/// A path's likelihood from softmaxes in f64.
fn naive_likelihood(seed: u64, path: &[u32]) -> f64 {
    let share = |idx: usize| {
        let logits = logits(seed, &path[..idx]);
        let weights: Vec<f64> = logits.into_iter().map(|logit| f64::from(logit).exp()).collect();
        weights[path[idx] as usize] / weights.iter().sum::<f64>()
    };
    (0..path.len()).map(share).product()
}

fn paths(proposal: &Proposal) -> Vec<Vec<u32>> {
    (0..proposal.len()).map(|node| proposal.tokens_to(Some(node))).collect()
}

proptest! {
    #[test]
    fn greedy_trees_are_the_likeliest_continuations(seed: u64, width in 1usize..5, len in 1usize..5) {
        let sampler = greedy();
        let proposal = draft(&entry(&sampler, len, fixed(width)), |path| logits(seed, path));
        let mut level = vec![Vec::new()];
        for depth in 1..=len {
            let found: BTreeSet<Vec<u32>> =
                paths(&proposal).into_iter().filter(|path| path.len() == depth).collect();
            prop_assert_eq!(found.len(), width);
            let mut likelihoods: Vec<(f64, bool)> = Vec::new();
            for path in &level {
                for token in 0..VOCAB {
                    let path = [&path[..], &[token]].concat();
                    likelihoods.push((naive_likelihood(seed, &path), found.contains(&path)));
                }
            }
            prop_assert_eq!(likelihoods.iter().filter(|(_, is_found)| *is_found).count(), width);
            let of = |which| likelihoods.iter().filter(move |(_, is_found)| *is_found == which);
            let least = of(true).map(|(likelihood, _)| *likelihood).fold(1.0, f64::min);
            let most = of(false).map(|(likelihood, _)| *likelihood).fold(0.0, f64::max);
            // Likelihoods are rounded to f32.
            prop_assert!(least >= most * (1.0 - 1e-5), "{least} was taken, {most} was not");
            level = found.into_iter().collect();
        }
        prop_assert_eq!(proposal.passes, len);
    }

    /// Verification relies on it: had a token a say in whether it is proposed, it would not be drawn from `q`.
    #[test]
    fn where_tokens_are_drawn_does_not_depend_on_which_are(
        seed: u64, keys: [u64; 2], width in 1usize..5, len in 1usize..5, least in 0f32..0.3, max_tokens in 4usize..17,
    ) {
        let branching = Branching { width, max_tokens, min_likelihood: least };
        let shapes = keys.map(|key| {
            let sampler = drawing(Coupling::Independent(key));
            let entry = Entry { min_confidence: least / 2.0, ..entry(&sampler, len, branching) };
            // Behind each path of a length the same.
            finished(&entry, |path| logits(seed, &vec![0; path.len()])).parents
        });
        prop_assert_eq!(&shapes[0], &shapes[1]);
    }

    #[test]
    fn of_a_tree_that_is_too_large_the_likeliest_tokens_stay(
        seed: u64, width in 1usize..5, len in 1usize..5, more in 0usize..12,
    ) {
        let sampler = greedy();
        let max_tokens = len + more;
        let entry = entry(&sampler, len, Branching { max_tokens, ..fixed(width) });
        let unbounded = Entry { branching: fixed(width), ..entry };
        let all = draft(&unbounded, |path| logits(seed, path));
        let kept = finished(&entry, |path| logits(seed, path));
        prop_assert_eq!(kept.len(), all.len().min(max_tokens));
        let (all, kept): (BTreeSet<_>, BTreeSet<_>) =
            (paths(&all).into_iter().collect(), paths(&kept).into_iter().collect());
        prop_assert!(kept.is_subset(&all));
        let likelihood = |path: &Vec<u32>| naive_likelihood(seed, path);
        let least = kept.iter().map(likelihood).fold(1.0, f64::min);
        let most = all.difference(&kept).map(likelihood).fold(0.0, f64::max);
        prop_assert!(least >= most * (1.0 - 1e-5), "{least} was kept, {most} was not");
    }

    /// As above, where what is behind a token depends on it: whether one is proposed may be a matter of its siblings before it,
    /// which are refused first, and of other branches, but not of itself and of what is drawn after it.
    #[test]
    fn a_token_has_no_say_in_whether_it_is_drafted(
        seed: u64, key: u64, width in 2usize..5, len in 2usize..5, more in 1usize..8, pick: prop::sample::Index,
    ) {
        let sampler = drawing(Coupling::Independent(key));
        let entry = entry(&sampler, len, Branching { max_tokens: len + more, ..fixed(width) });
        let drawn = finished(&entry, |path| logits(seed, path));
        let node = pick.index(drawn.len());
        let parent = drawn.parents[node];
        let siblings = |proposal: &Proposal, parent: &[u32]| -> Vec<u32> {
            let at = |node: usize| proposal.tokens_to(proposal.parents[node]) == parent;
            (0..proposal.len()).filter(|&node| at(node)).map(|node| proposal.tokens[node]).collect()
        };
        let behind = drawn.tokens_to(parent);
        let all = siblings(&drawn, &behind);
        let place = all.iter().position(|token| *token == drawn.tokens[node]).unwrap();
        // Behind it and its siblings after it, drawn or not, everything is said otherwise, as if these were other tokens.
        let changed = finished(&entry, |path| {
            let is_below = path.len() > behind.len() && path.starts_with(&behind);
            let is_changed = is_below && !all[..place].contains(&path[behind.len()]);
            logits(if is_changed { !seed } else { seed }, path)
        });
        let (before, after) = (&all[..=place], siblings(&changed, &behind));
        prop_assert!(after.starts_with(before), "{before:?} were drafted, {after:?} with others behind them");
    }

    #[test]
    fn siblings_are_drawn_from_what_those_before_them_leave(
        seed: u64, key: u64, width in 1usize..5, len in 1usize..4, is_seeded: bool,
    ) {
        let coupling = if is_seeded { Coupling::Path(key) } else { Coupling::Independent(key) };
        let sampler = drawing(coupling);
        let proposal = draft(&entry(&sampler, len, fixed(width)), |path| logits(seed, path));
        let mut levels = BTreeMap::<usize, usize>::new();
        for node in 0..proposal.len() {
            *levels.entry(proposal.path(Some(node)).count()).or_default() += 1;
            let context = Context {
                tokens: &[1, 2, 3],
                prompt_len: 1,
                drafted: &proposal.tokens_to(proposal.parents[node]),
            };
            let mut left = sampler.distribution(&logits(seed, context.drafted), context);
            for other in (0..node).filter(|&other| proposal.parents[other] == proposal.parents[node]) {
                left = left.without(proposal.tokens[other]).unwrap();
            }
            let q = proposal.q[node].as_ref().unwrap();
            prop_assert!((0..VOCAB).all(|token| q.prob(token) == left.prob(token)));
            prop_assert!(q.prob(proposal.tokens[node]) > 0.0);
            if is_seeded {
                // The target's own draw where those before it are not allowed.
                let position = 3 + context.drafted.len();
                prop_assert_eq!(proposal.tokens[node], sampler.draw(&left, position, Stream::Target));
            }
        }
        prop_assert!(levels.len() == len && levels.values().all(|&count| count == width));
    }

    #[test]
    fn the_first_branch_comes_first_and_siblings_keep_their_order(
        seed: u64, key: u64, width in 1usize..5, len in 1usize..5,
    ) {
        let sampler = drawing(Coupling::Independent(key));
        let drawn = draft(&entry(&sampler, len, fixed(width)), |path| logits(seed, path));
        let mut sorted = drawn.clone();
        sorted.put_first_branch_first();
        prop_assert!(sorted.parents.iter().enumerate().all(|(node, parent)| parent.is_none_or(|p| p < node)));
        let first_branch = sorted.parents.iter().enumerate().take_while(|(node, parent)| **parent == node.checked_sub(1));
        let mut deepest = None;
        while let Some(child) = (0..drawn.len()).find(|&node| drawn.parents[node] == deepest) {
            deepest = Some(child);
        }
        prop_assert_eq!(first_branch.count(), drawn.path(deepest).count());
        let of_parent = |proposal: &Proposal| {
            let mut children = BTreeMap::<Vec<u32>, Vec<u32>>::new();
            for node in 0..proposal.len() {
                let parent = proposal.tokens_to(proposal.parents[node]);
                children.entry(parent).or_default().push(proposal.tokens[node]);
            }
            children
        };
        prop_assert_eq!(of_parent(&sorted), of_parent(&drawn));
        prop_assert_eq!((sorted.len(), sorted.passes), (drawn.len(), drawn.passes));
    }
}

#[test]
fn what_is_not_likely_enough_is_left_out_but_for_the_likeliest() {
    let sampler = greedy();
    let shares = |_: &[u32]| [0.5f32, 0.3, 0.1, 0.1].map(f32::ln).to_vec();
    let drafted = |min_likelihood, min_confidence| {
        let branching = Branching { width: 3, min_likelihood, ..Branching::CHAIN };
        let proposal = draft(&Entry { min_confidence, ..entry(&sampler, 2, branching) }, shares);
        (paths(&proposal), proposal.passes)
    };
    // 0.25, and twice 0.15.
    let (all, passes) = drafted(0.0, 0.0);
    assert_eq!(all, [vec![0], vec![1], vec![2], vec![0, 0], vec![0, 1], vec![1, 0]]);
    assert_eq!(passes, 2);
    assert_eq!(drafted(0.2, 0.0).0, [vec![0], vec![1], vec![0, 0]]);
    assert_eq!(drafted(0.9, 0.0).0, [vec![0], vec![0, 0]]);
    assert_eq!(drafted(0.2, 0.6), (vec![vec![0], vec![1]], 1), "no second pass");
}

#[test]
fn a_certain_draw_leaves_nothing_to_draw() {
    let params = SamplingParams { temperature: 1.0, top_k: 1, ..SamplingParams::default() };
    let sampler = Sampler::new(params, Coupling::Independent(3), Vec::new());
    let proposal = draft(&entry(&sampler, 3, fixed(4)), |path| logits(5, path));
    assert!(proposal.is_chain() && proposal.len() == 3);
}
