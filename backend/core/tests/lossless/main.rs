//! Statistics of the promise that drafts do not change what the target would have said: chi-square goodness
//! of fit against exact enumeration, on adversarial pairs of models; and that wrong rules fail the same tests.
//! All randomness is keyed by the trial's number, so a result never changes from run to run.
#![allow(clippy::unwrap_used)]

mod chi_square;
mod game;
mod mutant;
mod path;
mod tree;

use chi_square::{ALPHA, p_value};
use game::{Drafts, Game, Rule, constant, markov, shipped};
use spec_core::sampling::SamplingParams;
use spec_core::testing::sampling::Coupling;
use std::collections::BTreeMap;

/// Trials of each test.
const TRIALS: u64 = 200_000;

/// A tenth of them must be enough to notice a wrong rule.
const FEW_TRIALS: u64 = 20_000;

const NEVER: f32 = f32::NEG_INFINITY;

fn sampled() -> SamplingParams {
    SamplingParams { temperature: 1.0, ..Default::default() }
}

fn count<K: Ord>(outcomes: impl Iterator<Item = K>) -> BTreeMap<K, u64> {
    let mut counts = BTreeMap::new();
    outcomes.for_each(|outcome| *counts.entry(outcome).or_default() += 1);
    counts
}

/// Tests the joint of (number accepted, tokens) of one step.
fn step_p_value(game: &Game, draft_len: usize, trials: u64, rule: Rule<'_>) -> f64 {
    let outcomes = (0..trials)
        .map(|trial| game.step(&game.sampler(Coupling::Independent(trial)), &[], draft_len, rule));
    p_value(&count(outcomes), &game.expected_step(draft_len))
}

/// Tests the first four tokens of whole generations, whose draft lengths follow what was accepted.
fn text_p_value(game: &Game, couple: fn(u64) -> Coupling, trials: u64, rule: Rule<'_>) -> f64 {
    let len = 4;
    let texts = (0..trials).map(|trial| {
        let sampler = game.sampler(couple(trial));
        let (mut text, mut draft_len) = (Vec::new(), 2);
        while text.len() < len {
            let (accepted, tokens) = game.step(&sampler, &text, draft_len, rule);
            text.extend(tokens);
            draft_len = (accepted + 1) % 4;
        }
        text.truncate(len);
        text
    });
    p_value(&count(texts), &game.expected_text(len))
}

fn assert_lossless(name: &str, p: f64) {
    assert!(p >= ALPHA, "{name}: p = {p:e}");
}

#[test]
fn adversarial_pairs_keep_the_joint_distribution() {
    let drawn = |params, target: &[f32], draft: &[f32]| {
        Game::new(params, constant(target), Drafts::Drawn(constant(draft)))
    };
    let cases = [
        ("equal", drawn(sampled(), &[1.0, 0.0, -1.0, 0.5], &[1.0, 0.0, -1.0, 0.5])),
        ("disjoint", drawn(sampled(), &[1.0, 0.5, NEVER, NEVER], &[NEVER, NEVER, 0.0, 1.0])),
        ("one-hot p", drawn(sampled(), &[NEVER, 0.0, NEVER, NEVER], &[0.0, 0.3, 0.0, 1.0])),
        ("one-hot q", drawn(sampled(), &[0.0, 0.3, 0.0, 1.0], &[NEVER, 0.0, NEVER, NEVER])),
        ("q = 0 where p > 0", drawn(sampled(), &[1.0, 0.5, 0.0, -0.5], &[NEVER, 0.5, 1.0, NEVER])),
        ("nearly equal", drawn(sampled(), &[1.0, 0.0, -1.0, 0.5], &[1.001, 0.0, -1.0, 0.5])),
        ("underflowing", drawn(sampled(), &[0.0, -200.0, -1.0, -90.0], &[-95.0, 0.0, 0.0, -1.0])),
        ("huge logits", drawn(sampled(), &[3e38, 3e38, 0.0, -3e38], &[0.0, 1.0, 1.0, 3e38])),
    ];
    for (name, game) in cases {
        assert_lossless(name, step_p_value(&game, 3, TRIALS, &shipped));
    }
}

#[test]
fn processed_distributions_keep_the_joint_distribution() {
    let processed = [
        ("hot", SamplingParams { temperature: 1.7, ..sampled() }),
        ("cold", SamplingParams { temperature: 0.4, ..sampled() }),
        ("top-k", SamplingParams { top_k: 2, ..sampled() }),
        ("top-p", SamplingParams { top_p: 0.7, ..sampled() }),
        ("min-p", SamplingParams { min_p: 0.35, ..sampled() }),
        ("all three", SamplingParams { top_k: 4, top_p: 0.9, min_p: 0.1, ..sampled() }),
        (
            "penalised",
            SamplingParams {
                repetition_penalty: 1.6,
                presence_penalty: 0.5,
                frequency_penalty: 0.4,
                ..sampled()
            },
        ),
        // In the middle of a draft the token that was held back may come.
        ("held back", SamplingParams { min_tokens: 2, ..sampled() }),
        (
            "allowed",
            SamplingParams { allowed_tokens: Some([0, 2, 3].into()), min_tokens: 1, ..sampled() },
        ),
    ];
    for (name, params) in processed {
        let game = Game::new(params, markov(5, 1, 1.5), Drafts::Drawn(markov(5, 2, 1.5)));
        assert_lossless(name, step_p_value(&game, 3, TRIALS, &shipped));
    }
}

#[test]
fn every_draft_length_keeps_the_joint_distribution() {
    for draft_len in 1..=8 {
        let game = Game::new(sampled(), markov(3, 3, 1.0), Drafts::Drawn(markov(3, 4, 1.0)));
        assert_lossless(
            &format!("K = {draft_len}"),
            step_p_value(&game, draft_len, TRIALS, &shipped),
        );
    }
}

#[test]
fn given_drafts_keep_the_joint_distribution() {
    let give = |output: &[u32]| (output.iter().sum::<u32>() + 2) % 4;
    let game = Game::new(sampled(), markov(4, 5, 1.5), Drafts::Given(Box::new(give)));
    assert_lossless("given", step_p_value(&game, 4, TRIALS, &shipped));
}

#[test]
fn speculated_text_is_distributed_as_the_target_says() {
    let penalised = SamplingParams { repetition_penalty: 1.4, frequency_penalty: 0.5, ..sampled() };
    for (name, params) in [("plain", sampled()), ("penalised", penalised)] {
        let game = Game::new(params, markov(4, 6, 1.2), Drafts::Drawn(markov(4, 7, 1.2)));
        assert_lossless(name, text_p_value(&game, Coupling::Independent, TRIALS, &shipped));
        assert_lossless(name, text_p_value(&game, Coupling::Path, TRIALS, &shipped));
    }
}

#[test]
fn wrong_rules_fail_the_test_that_the_right_rule_passes() {
    let game = Game::new(sampled(), markov(4, 6, 1.2), Drafts::Drawn(markov(4, 7, 1.2)));
    let both = |rule: Rule<'_>, trials| {
        let text = text_p_value(&game, Coupling::Independent, trials, rule);
        [step_p_value(&game, 3, trials, rule), text]
    };
    for p in both(&mutant::textbook, TRIALS) {
        assert_lossless("textbook", p);
    }
    let mutants: [(&str, Rule<'_>); 4] = [
        ("no residual", &mutant::no_residual),
        ("accept always", &mutant::accept_always),
        ("inverted ratio", &mutant::inverted_ratio),
        ("openvino", &mutant::openvino),
    ];
    for (name, rule) in mutants {
        for p in both(rule, FEW_TRIALS) {
            assert!(p < ALPHA, "{name} went unnoticed: p = {p}");
        }
    }
}

#[test]
fn a_misreported_q_fails_the_same_test() {
    let drafts = Drafts::Misreported(markov(4, 7, 1.2), 0.7);
    let game = Game::new(sampled(), markov(4, 6, 1.2), drafts);
    assert!(step_p_value(&game, 3, FEW_TRIALS, &shipped) < ALPHA);
    assert!(text_p_value(&game, Coupling::Independent, FEW_TRIALS, &shipped) < ALPHA);
}

#[test]
fn a_drafter_that_equals_the_target_is_always_accepted() {
    for couple in [Coupling::Independent, Coupling::Path] {
        let game = Game::new(sampled(), markov(5, 8, 2.0), Drafts::Drawn(markov(5, 8, 2.0)));
        for trial in 0..5_000 {
            let (accepted, _) = game.step(&game.sampler(couple(trial)), &[], 6, &shipped);
            assert_eq!(accepted, 6);
        }
    }
}

#[test]
fn independent_drafts_are_accepted_as_often_as_the_models_overlap() {
    // sum of min(p, q), which is the most that any rule can reach.
    let game = Game::new(sampled(), markov(6, 9, 1.5), Drafts::Drawn(markov(6, 10, 1.5)));
    let q = game::naive(&game.params, &markov(6, 10, 1.5)(&[]), &[]);
    let overlap: f64 = game.p(&[]).iter().zip(&q).map(|(p, q)| p.min(*q)).sum();
    let accepted = (0..TRIALS).filter(|&trial| {
        game.step(&game.sampler(Coupling::Independent(trial)), &[], 1, &shipped).0 == 1
    });
    let rate = accepted.count() as f64 / TRIALS as f64;
    // Five standard deviations.
    assert!((rate - overlap).abs() < 5.0 * (0.25 / TRIALS as f64).sqrt(), "{rate} for {overlap}");
}
