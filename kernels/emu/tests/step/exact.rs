//! Bit for bit the same decisions as the host's executor, in thousands of random steps.

use crate::device::{self, Outcome, Run};
use crate::host;
use crate::world::{Model, Random, Sequence, World};
use spec_core::sampling::SamplingParams;
use spec_core::testing::cuda::step::{Branched, Fork};
use spec_core::testing::sampling::{Coupling, Sampler};
use spec_emu::Schedule;
use std::ops::Range;
use std::sync::Arc;

/// Sequences of a step.
const BATCH: usize = 12;

/// Drafts at which branches part in these tests.
const DEPTHS: usize = 3;

/// What happened in many steps: that the cases are not all of one kind is part of the tests.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    sequences: usize,
    drafted: usize,
    accepted: usize,
    /// Of branches that are not the first, from their forks on, by depth.
    forked: [usize; DEPTHS],
    /// Where all drafts come from one pass.
    at_once: usize,
    /// Sequences whose last known token has run ahead of the step.
    have_run: usize,
}

/// Compares one step of some sequences. The error says what differs.
fn compare(world: &World, sequences: &[Sequence], run: Run<'_>) -> Result<Tally, String> {
    let expected = host::step(world, sequences);
    let found = device::step(world, sequences, run)?;
    let mut tally = Tally::default();
    for ((expected, found), sequence) in expected.into_iter().zip(found).zip(sequences) {
        let expected = Outcome {
            tokens: expected.tokens.iter().map(|emitted| emitted.token).collect(),
            drafted: expected.drafted,
            accepted: expected.accepted,
            // The host knows of no branches.
            draft_computed: match sequence.branch {
                // All that was kept, the target has computed.
                _ if world.on_targets_cache => sequence.tokens.len() + expected.accepted,
                Branched::From(_) if sequence.draft_len.min(world.max_drafts) > 0 => {
                    sequence.tokens.len()
                        + expected.accepted.min(expected.drafted.saturating_sub(1))
                }
                _ => expected.draft_computed,
            },
        };
        if found != expected {
            return Err(format!("{found:?}, not {expected:?}, of {sequence:?}"));
        }
        tally.sequences += 1;
        tally.drafted += expected.drafted;
        tally.accepted += expected.accepted;
        if let Branched::From(fork) = sequence.branch {
            tally.forked[fork.depth] += expected.drafted.saturating_sub(fork.depth);
        }
        tally.at_once += if world.mask.is_some() { expected.drafted } else { 0 };
        tally.have_run += usize::from(sequence.has_run);
    }
    Ok(tally)
}

/// How logits are spread.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Evenly.
    Even,
    /// On few values, so that ties cross every boundary.
    Tied,
    /// A few likely tokens before a long tail.
    Peaked,
    /// With NaN and both infinities.
    Broken,
    /// Nothing but NaN and negative infinity.
    Nothing,
}

const KINDS: [Kind; 9] = {
    use Kind::*;
    [Even, Even, Even, Tied, Tied, Peaked, Peaked, Broken, Nothing]
};

fn logit(kind: Kind, random: &mut Random) -> f32 {
    match kind {
        Kind::Even => random.within(-4.0, 4.0),
        Kind::Tied => random.below(5) as f32 * 0.5 - 1.0,
        Kind::Peaked if random.one_in(20) => random.within(4.0, 9.0),
        Kind::Peaked => random.within(-20.0, 2.0),
        Kind::Broken => match random.below(40) {
            0 => f32::INFINITY,
            1..4 => f32::NEG_INFINITY,
            4..8 => f32::NAN,
            8 => -0.0,
            9 => 0.0,
            _ => random.within(-1e3, 1e3),
        },
        Kind::Nothing => random.pick(&[f32::NAN, f32::NEG_INFINITY]),
    }
}

/// Logits that are a function of the salt and the tokens (of how many they are, if it is blind), of a kind
/// that is one of the sequence; with `noise` of another salt added.
fn hashed(salt: u64, blind: bool, vocab: usize, (other, noise): (u64, f32)) -> Model {
    Arc::new(move |sequence, tokens| {
        let kind = KINDS[sequence % KINDS.len()];
        let hash = |salt: u64| {
            let mut random = Random(salt ^ (sequence as u64) << 40 ^ (tokens.len() as u64) << 20);
            let seen = if blind { &[] } else { tokens };
            seen.iter().for_each(|&token| random = Random(random.bits() ^ u64::from(token)));
            random
        };
        let (mut random, mut added) = (hash(salt), hash(other));
        (0..vocab).map(|_| logit(kind, &mut random) + noise * added.within(-1.0, 1.0)).collect()
    })
}

/// What a request may ask for, each thing in some of the cases.
fn any_params(random: &mut Random, vocab: usize) -> SamplingParams {
    let mut params = SamplingParams::default();
    if !random.one_in(5) {
        params.temperature = random.pick(&[0.3, 0.7, 1.0, 1.0, 1.3, 1e-3, 50.0]);
    }
    if random.one_in(3) {
        params.top_k = random.pick(&[1, 2, 5, 20, 40, vocab - 1, vocab, vocab + 9]);
    }
    if random.one_in(3) {
        params.top_p = random.pick(&[1e-6, 0.1, 0.5, 0.75, 0.9, 0.95, 0.999, 0.999_999_9]);
    }
    if random.one_in(4) {
        params.min_p = random.pick(&[1e-6, 0.01, 0.1, 0.5, 1.0]);
    }
    if random.one_in(4) {
        params.repetition_penalty = random.pick(&[0.7, 1.2, 3.0]);
        params.presence_penalty = random.pick(&[0.0, 0.6, -0.4]);
        params.frequency_penalty = random.pick(&[0.0, 0.3, -0.3]);
    } else if random.one_in(5) {
        params.frequency_penalty = 0.7;
    }
    let mut some = |chances, most: usize| match random.one_in(chances) {
        true => random.below(most) + 1,
        false => 0,
    };
    let (num_biases, num_words) = (some(4, 30), some(4, 30));
    let token = |random: &mut Random| random.below(vocab.min(40)) as u32;
    params.logit_bias =
        (0..num_biases).map(|_| (token(random), random.within(-5.0, 5.0))).collect();
    let mut word = |_| (0..=random.below(3)).map(|_| token(random)).collect();
    params.bad_words = (0..num_words).map(&mut word).collect();
    if random.one_in(4) {
        params.min_tokens = random.below(14);
    }
    params
}

/// A sequence of few distinct tokens, so that penalties count and bad words begin.
fn any_sequence(random: &mut Random, world: &World) -> Sequence {
    let mut params = any_params(random, world.target_vocab);
    let prompt_len = random.below(6) + 1;
    let len = prompt_len + random.below(8);
    // Now and then one that the drafter may not have.
    let mut token = || {
        let num_tokens = if random.one_in(8) { world.target_vocab } else { 40 };
        random.below(num_tokens) as u32
    };
    let tokens: Vec<u32> = (0..len).map(|_| token()).collect();
    if world.target_vocab <= 1024 && random.one_in(30) {
        // Everything is banned.
        params.bad_words = (0..world.target_vocab as u32).map(|token| vec![token]).collect();
    }
    params.validate(world.target_vocab).unwrap();
    let coupling = match random.one_in(3) {
        true => Coupling::Path(random.bits()),
        false => Coupling::Independent(random.bits()),
    };
    let end_tokens = (0..random.below(4)).map(|_| random.below(40) as u32).collect();
    let speculates = world.drafting && !random.one_in(10);
    let is_given = world.max_drafts > 0 && random.one_in(if speculates { 6 } else { 2 });
    let num_given = if is_given { random.below(world.max_drafts) + 1 } else { 0 };
    let drafts = speculates && !is_given;
    // Drafts of branches are drawn as the target draws. Of drafts that come from one pass the host's know no forks.
    let is_path = matches!(coupling, Coupling::Path(_)) && world.mask.is_none();
    let depth = random.below(DEPTHS).min(random.below(DEPTHS));
    let branch = match (drafts && is_path, random.below(8)) {
        (false, _) | (true, 0) => Branched::Alone,
        (true, 1) => Branched::First,
        _ => Branched::From(Fork { depth, rank: 1 + random.below(4) }),
    };
    let min_confidences = match branch {
        Branched::Alone => &[0.0, 0.0, 0.0, 0.02, 0.3][..],
        _ => &[0.0][..],
    };
    let sequence = Sequence {
        prompt_len,
        draft_computed: match speculates {
            true => {
                let unseen = (1 + random.below(world.most_fed())).min(len);
                len - if world.on_targets_cache { 1 } else { unseen }
            }
            false => random.below(len),
        },
        speculates,
        draft_len: if drafts { random.below(world.max_drafts + 3) } else { 0 },
        given: (0..num_given).map(|_| random.below(world.target_vocab) as u32).collect(),
        min_confidence: random.pick(min_confidences),
        sampler: Sampler::new(params, coupling, end_tokens),
        branch,
        has_run: false,
        tokens,
    };
    let drafts_none = sequence.draft_len == 0 && num_given == 0;
    Sequence { has_run: drafts_none && len.is_multiple_of(2), ..sequence }
}

/// One random step of a batch, in a world whose drafter is close to the target, or is not.
pub(crate) fn random_step(
    seed: u64,
    vocabs: &[(usize, usize)],
    batch: usize,
    run: Run<'_>,
) -> Result<Tally, String> {
    let mut random = Random(seed);
    let (target_vocab, drafter_vocab) = random.pick(vocabs);
    let (noise, salt) = (random.pick(&[0.0, 0.5, 2.0]), random.bits());
    let (max_drafts, blind) = (random.below(9), random.one_in(3));
    let world = World {
        target: hashed(salt, blind, target_vocab, (1, 0.0)),
        target_vocab,
        drafter: hashed(salt, blind, drafter_vocab, (2, noise)),
        drafter_vocab,
        max_drafts,
        drafting: max_drafts > 0 && !random.one_in(6),
        on_targets_cache: salt.is_multiple_of(4),
        mask: (salt % 4 == 1).then_some(3),
        blind,
    };
    let sequences: Vec<_> = (0..batch).map(|_| any_sequence(&mut random, &world)).collect();
    compare(&world, &sequences, run)
        .map_err(|e| format!("seed {seed}, vocabularies {target_vocab}, {drafter_vocab}: {e}"))
}

/// All must be right.
fn random_steps(seeds: Range<u64>, vocabs: &[(usize, usize)], run: Run<'_>) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds {
        let more = random_step(seed, vocabs, BATCH, run).unwrap();
        tally.sequences += more.sequences;
        tally.drafted += more.drafted;
        tally.accepted += more.accepted;
        tally.forked.iter_mut().zip(more.forked).for_each(|(sum, more)| *sum += more);
        tally.at_once += more.at_once;
        tally.have_run += more.have_run;
    }
    eprintln!("{tally:?}");
    tally
}

/// Whole tiles of logits and parts of one, padded on either side.
pub(crate) const VOCABS: [(usize, usize); 6] =
    [(300, 300), (257, 320), (320, 257), (64, 64), (41, 50), (1200, 1100)];

#[test]
fn every_step_is_that_of_the_host() {
    let tally = random_steps(0..400, &VOCABS, Run::SMALL);
    assert!(tally.sequences >= 4_000 && tally.drafted >= 7_000);
    assert!(tally.forked.iter().all(|&drafted| drafted >= 50) && tally.at_once >= 1_000);
    assert!(tally.have_run >= 300);
    // Some drafts are kept and some are not.
    assert!(tally.accepted * 5 > tally.drafted && tally.accepted * 10 < tally.drafted * 9);
}

#[test]
fn blocks_as_they_are_shipped_decide_the_same() {
    random_steps(1_000..1_030, &[(1500, 1500), (2300, 2100)], Run::WHOLE);
}

#[test]
fn more_candidates_than_are_listed_are_searched_all_the_same() {
    random_steps(3_000..3_004, &[(25_000, 25_000)], Run::WHOLE);
}

#[test]
fn no_schedule_changes_a_decision() {
    for seed in 0..12 {
        let run = Run { schedule: Schedule::seeded(seed), ..Run::SMALL };
        random_steps(2_000..2_004, &VOCABS[..3], run);
    }
}
