//! Trees: given siblings, and siblings that were drawn, with and without replacement.

use crate::chi_square::{ALPHA, p_value};
use crate::game::{Drafts, Game, PROMPT, Rule, constant, markov, naive, shipped};
use crate::{FEW_TRIALS, TRIALS, count, mutant, sampled};
use spec_core::testing::draft::Proposal;
use spec_core::testing::sampling::{Context, Coupling, Distribution, Sampler, Stream};
use spec_core::testing::verify::verify;
use std::collections::BTreeMap;

fn node(proposal: &mut Proposal, parent: Option<usize>, token: u32, q: Option<Distribution>) {
    proposal.parents.push(parent);
    proposal.tokens.push(token);
    proposal.q.push(q);
}

/// Two levels, with a token that is given twice and a subtree that is listed late.
pub(crate) fn given_tree() -> Proposal {
    let mut tree = Proposal::default();
    for (parent, token) in
        [(None, 0), (None, 2), (Some(0), 1), (None, 0), (Some(1), 3), (Some(0), 0), (Some(2), 2)]
    {
        node(&mut tree, parent, token, None);
    }
    tree
}

/// Every accepted path has its exact probability: a given node is kept iff the target would draw its token.
#[test]
fn given_trees_keep_the_joint_distribution() {
    let game = Game::new(sampled(), markov(4, 20, 1.0), Drafts::Drawn(constant(&[0.0; 4])));
    let tree = given_tree();
    let outcomes = (0..TRIALS).map(|trial| {
        let sampler = game.sampler(Coupling::Independent(trial));
        let row = |_, drafted: &[u32]| game.target_row(drafted, drafted.len());
        let verdict = verify(&sampler, &tree, row, PROMPT.len());
        (verdict.accepted(), verdict.tokens(&tree).collect::<Vec<_>>())
    });

    let mut expected = BTreeMap::new();
    let mut open = vec![(None, Vec::new(), 1.0)];
    while let Some((parent, text, reached)) = open.pop() {
        for (token, p) in (0u32..).zip(game.p(&text)) {
            let longer = [&text[..], &[token]].concat();
            let child = (0..tree.len())
                .find(|&child| tree.parents[child] == parent && tree.tokens[child] == token);
            match child {
                Some(child) => open.push((Some(child), longer, reached * p)),
                None => *expected.entry((text.len(), longer)).or_default() += reached * p,
            }
        }
    }
    let p = p_value(&count(outcomes), &expected);
    assert!(p >= ALPHA, "p = {p:e}");
}

const TARGET: [f32; 4] = [0.5, 0.0, 1.0, -0.5];
const DRAFT: [f32; 4] = [1.5, 0.5, -1.0, 0.0];

fn distribution(logits: &[f32]) -> Distribution {
    let sampler = Sampler::new(sampled(), Coupling::Independent(0), vec![]);
    sampler
        .distribution(logits, Context { tokens: &PROMPT, prompt_len: PROMPT.len(), drafted: &[] })
}

/// The draft logits of the second sibling, given the first.
type Second = fn(first: u32) -> [f32; 4];

/// Two drawn siblings; the joint of (accepted, token) against the formula.
fn drawn_siblings_p_value(second: Second, rule: Rule<'_>, trials: u64) -> f64 {
    let outcomes = (0..trials).map(|trial| {
        let sampler = Sampler::new(sampled(), Coupling::Independent(trial), vec![]);
        let draw = |dist: &Distribution, place| {
            sampler.draw(dist, PROMPT.len(), Stream::Draft { depth: 0, place })
        };
        let mut proposal = Proposal::default();
        let q = distribution(&DRAFT);
        let first = draw(&q, 0);
        node(&mut proposal, None, first, Some(q));
        let q = distribution(&second(first));
        node(&mut proposal, None, draw(&q, 1), Some(q));
        // Ends after one token, so that the bonus does not widen the cells.
        let mut row = |node: Option<usize>, _: &[u32]| match node {
            None => distribution(&TARGET),
            Some(_) => Distribution::certain(0),
        };
        let verdict = rule(&sampler, &proposal, &mut row, PROMPT.len());
        (verdict.accepted(), verdict.tokens(&proposal).next())
    });

    let (p, q) = (naive(&sampled(), &TARGET, &[]), naive(&sampled(), &DRAFT, &[]));
    let rejected: f64 = (0..4).map(|id| (p[id] - q[id]).max(0.0)).sum();
    let rest: Vec<f64> = (0..4).map(|id| (p[id] - q[id]).max(0.0) / rejected).collect();
    let mut expected = BTreeMap::new();
    let mut add = |accepted, id: usize, prob: f64| {
        if prob > 0.0 {
            *expected.entry((accepted, Some(id as u32))).or_default() += prob;
        }
    };
    for first in 0..4 {
        add(1, first, p[first].min(q[first]));
        let lost = (q[first] - p[first]).max(0.0);
        let q = naive(&sampled(), &second(first as u32), &[]);
        for id in 0..4 {
            add(1, id, lost * rest[id].min(q[id]));
            add(0, id, lost * (rest[id] - q[id]).max(0.0));
        }
    }
    p_value(&count(outcomes), &expected)
}

fn again(_: u32) -> [f32; 4] {
    DRAFT
}

fn another(first: u32) -> [f32; 4] {
    let mut logits = DRAFT;
    logits[first as usize] = f32::NEG_INFINITY;
    logits
}

#[test]
fn siblings_drawn_with_replacement_keep_the_joint_distribution() {
    let p = drawn_siblings_p_value(again, &shipped, TRIALS);
    assert!(p >= ALPHA, "p = {p:e}");
}

#[test]
fn siblings_drawn_without_replacement_keep_the_joint_distribution() {
    let p = drawn_siblings_p_value(another, &shipped, TRIALS);
    assert!(p >= ALPHA, "p = {p:e}");
}

#[test]
fn a_rule_without_the_residual_of_a_sibling_fails_the_same_test() {
    for second in [again, another] {
        let rule = &mutant::siblings_without_residual;
        let p = drawn_siblings_p_value(second, rule, FEW_TRIALS);
        assert!(p < ALPHA, "no residual of a sibling went unnoticed: p = {p}");
    }
}
