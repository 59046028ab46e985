//! Seeded and greedy requests: the very same tokens with any drafter, draft length or tree.

use crate::game::{Drafts, Game, PROMPT, markov, shipped};
use crate::tree::given_tree;
use proptest::prelude::*;
use spec_core::sampling::SamplingParams;
use spec_core::testing::sampling::{Coupling, Sampler, Stream};
use spec_core::testing::verify::verify;

const VOCAB: u32 = 5;
const LEN: usize = 24;

/// One token at a time, without drafts.
fn plain(game: &Game, sampler: &Sampler) -> Vec<u32> {
    let mut text = Vec::new();
    while text.len() < LEN {
        let position = PROMPT.len() + text.len();
        text.push(sampler.draw(&game.target_row(&text, 0), position, Stream::Target));
    }
    text
}

fn speculated(game: &Game, sampler: &Sampler, draft_lens: &[usize]) -> Vec<u32> {
    let mut text = Vec::new();
    for &draft_len in draft_lens.iter().cycle() {
        if text.len() >= LEN {
            break;
        }
        text.extend(game.step(sampler, &text, draft_len, &shipped).1);
    }
    text.truncate(LEN);
    text
}

fn with_trees(game: &Game, sampler: &Sampler) -> Vec<u32> {
    let (mut text, tree) = (Vec::new(), given_tree());
    while text.len() < LEN {
        let row = |_, drafted: &[u32]| game.target_row(&[&text, drafted].concat(), drafted.len());
        let verdict = verify(sampler, &tree, row, PROMPT.len() + text.len());
        text.extend(verdict.tokens(&tree));
    }
    text.truncate(LEN);
    text
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    (
        prop_oneof![Just(1.0f32), 0.2f32..2.0],
        0usize..5,
        prop_oneof![Just(1.0f32), 0.3f32..1.0],
        prop_oneof![Just(0.0f32), 0.0f32..0.4],
        prop_oneof![Just(1.0f32), 0.7f32..1.8],
        prop_oneof![Just(0.0f32), -1f32..1.0],
        prop::option::of(prop::collection::btree_set(0..VOCAB, 1..4)),
        0usize..6,
    )
        .prop_map(
            |(temperature, top_k, top_p, min_p, repetition, frequency, allowed, min_tokens)| {
                SamplingParams {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    repetition_penalty: repetition,
                    frequency_penalty: frequency,
                    bad_words: [vec![1, 2], vec![4, 4, 0]].into(),
                    logit_bias: [(3, 0.5)].into(),
                    allowed_tokens: allowed.map(|allowed| allowed.into_iter().collect()),
                    min_tokens,
                    ..Default::default()
                }
            },
        )
}

fn drafters(salt: u64) -> [Drafts; 3] {
    let give = |output: &[u32]| (output.len() as u32 * 7 + 1) % VOCAB;
    [
        Drafts::Drawn(markov(VOCAB, salt, 2.0)),
        Drafts::Drawn(markov(VOCAB, salt ^ 1, 2.0)),
        Drafts::Given(Box::new(give)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_seeded_text_does_not_depend_on_the_drafts(
        params in any_params(), seed: u64, salt in 0u64..1 << 40,
        draft_lens in prop::collection::vec(0usize..9, 1..6),
    ) {
        for drafts in drafters(salt) {
            let game = Game::new(params.clone(), markov(VOCAB, salt, 2.0), drafts);
            let sampler = game.sampler(Coupling::Path(seed));
            let expected = plain(&game, &sampler);
            prop_assert_eq!(&speculated(&game, &sampler, &[&[1], &draft_lens[..]].concat()), &expected);
            prop_assert_eq!(&with_trees(&game, &sampler), &expected);
        }
    }

    #[test]
    fn a_greedy_text_does_not_depend_on_the_drafts_nor_on_the_coupling(
        params in any_params(), key: u64, salt in 0u64..1 << 40,
        draft_lens in prop::collection::vec(0usize..9, 1..6),
    ) {
        let params = SamplingParams { temperature: 0.0, ..params };
        for drafts in drafters(salt) {
            let game = Game::new(params.clone(), markov(VOCAB, salt, 2.0), drafts);
            let expected = plain(&game, &game.sampler(Coupling::Path(0)));
            for coupling in [Coupling::Path(key), Coupling::Independent(key)] {
                let sampler = game.sampler(coupling);
                prop_assert_eq!(&speculated(&game, &sampler, &[&[1], &draft_lens[..]].concat()), &expected);
                prop_assert_eq!(&with_trees(&game, &sampler), &expected);
            }
        }
    }
}

#[test]
fn seeds_give_different_texts() {
    let params = SamplingParams { temperature: 1.0, ..Default::default() };
    let game = Game::new(params, markov(VOCAB, 1, 1.0), Drafts::Drawn(markov(VOCAB, 2, 1.0)));
    let texts = (0..50).map(|seed| plain(&game, &game.sampler(Coupling::Path(seed))));
    let distinct: std::collections::BTreeSet<_> = texts.collect();
    assert!(distinct.len() > 45);
}
