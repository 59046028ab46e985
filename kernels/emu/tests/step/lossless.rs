//! Chi-square tests of what the device draws against exact probabilities, as the host's rules are tested:
//! the joint of (number accepted, tokens) of one step. All randomness is keyed by the trial's number.

use crate::chi_square::{ALPHA, p_value};
use crate::device::{self, Run};
use crate::game::{Drafts, Game, PROMPT, constant, markov};
use crate::world::{Sequence, World};
use spec_core::sampling::SamplingParams;
use spec_core::testing::sampling::Coupling;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Trials of each test: as many as the emulator does in a few seconds.
const TRIALS: u64 = 4_000;

/// Trials of one launch.
const BATCH: u64 = 250;

const DRAFT_LEN: usize = 3;

/// Logits after these generated tokens.
type Logits = Arc<dyn Fn(&[u32]) -> Vec<f32> + Send + Sync>;

/// A target and a drafter of the same vocabulary, and what is asked of them.
pub(crate) struct Pair {
    params: SamplingParams,
    target: Logits,
    drafter: Logits,
}

impl Pair {
    fn game(&self) -> Game {
        let (target, drafter) = (self.target.clone(), self.drafter.clone());
        let drafts = Drafts::Drawn(Box::new(move |output| drafter(output)));
        Game::new(self.params.clone(), Box::new(move |output| target(output)), drafts)
    }

    fn world(&self) -> World {
        let (target, drafter) = (self.target.clone(), self.drafter.clone());
        let vocab = target(&[]).len();
        World {
            target: Arc::new(move |_, tokens| target(&tokens[PROMPT.len()..])),
            target_vocab: vocab,
            drafter: Arc::new(move |_, tokens| drafter(&tokens[PROMPT.len()..])),
            drafter_vocab: vocab,
            max_drafts: DRAFT_LEN,
            drafting: true,
            on_targets_cache: false,
            mask: None,
            blind: false,
        }
    }

    /// How often each outcome was seen.
    fn counts(&self, run: Run<'_>, trials: u64) -> BTreeMap<(usize, Vec<u32>), u64> {
        let world = self.world();
        let mut counts = BTreeMap::new();
        for first in (0..trials).step_by(BATCH as usize) {
            let sequences: Vec<Sequence> =
                (first..first + BATCH).map(|trial| self.sequence(trial)).collect();
            for outcome in device::step(&world, &sequences, run).unwrap() {
                *counts.entry((outcome.accepted, outcome.tokens)).or_default() += 1;
            }
        }
        counts
    }

    fn sequence(&self, trial: u64) -> Sequence {
        let mut sequence = Sequence::new(&PROMPT, &self.params, Coupling::Independent(trial));
        sequence.prompt_len = PROMPT.len();
        sequence.draft_len = DRAFT_LEN;
        sequence
    }

    /// Of one step of `trials` sequences.
    pub(crate) fn p_value(&self, run: Run<'_>, trials: u64) -> f64 {
        p_value(&self.counts(run, trials), &self.game().expected_step(DRAFT_LEN))
    }
}

fn sampled() -> SamplingParams {
    SamplingParams { temperature: 1.0, ..Default::default() }
}

/// Two models that agree on some of what follows.
pub(crate) fn unlike(params: SamplingParams) -> Pair {
    Pair {
        params,
        target: Arc::new(|output| markov(5, 1, 1.5)(output)),
        drafter: Arc::new(|output| markov(5, 2, 1.5)(output)),
    }
}

fn always(target: &'static [f32], drafter: &'static [f32]) -> Pair {
    Pair {
        params: sampled(),
        target: Arc::new(|output| constant(target)(output)),
        drafter: Arc::new(|output| constant(drafter)(output)),
    }
}

#[test]
fn processed_distributions_keep_the_joint_distribution() {
    let processed = [
        ("plain", sampled()),
        ("hot", SamplingParams { temperature: 1.7, ..sampled() }),
        ("top-k", SamplingParams { top_k: 2, ..sampled() }),
        ("top-p", SamplingParams { top_p: 0.7, ..sampled() }),
        ("all", SamplingParams { top_k: 4, top_p: 0.9, min_p: 0.1, ..sampled() }),
        (
            "penalised",
            SamplingParams { repetition_penalty: 1.6, frequency_penalty: 0.4, ..sampled() },
        ),
    ];
    for (name, params) in processed {
        let p = unlike(params).p_value(Run::WARP, TRIALS);
        eprintln!("{name}: p = {p:.3}");
        assert!(p >= ALPHA, "{name}: p = {p:e}");
    }
}

#[test]
fn adversarial_pairs_keep_the_joint_distribution() {
    const NEVER: f32 = f32::NEG_INFINITY;
    let pairs = [
        ("equal", always(&[1.0, 0.0, -1.0, 0.5], &[1.0, 0.0, -1.0, 0.5])),
        ("disjoint", always(&[1.0, 0.5, NEVER, NEVER], &[NEVER, NEVER, 0.0, 1.0])),
        ("one-hot q", always(&[0.0, 0.3, 0.0, 1.0], &[NEVER, 0.0, NEVER, NEVER])),
        ("q = 0 where p > 0", always(&[1.0, 0.5, 0.0, -0.5], &[NEVER, 0.5, 1.0, NEVER])),
        ("underflowing", always(&[0.0, -200.0, -1.0, -90.0], &[-95.0, 0.0, 0.0, -1.0])),
    ];
    for (name, pair) in pairs {
        let p = pair.p_value(Run::WARP, TRIALS);
        eprintln!("{name}: p = {p:.3}");
        assert!(p >= ALPHA, "{name}: p = {p:e}");
    }
}
