//! The promise that speculation does not change what is drawn without a seed, through the whole product:
//! tiny random checkpoints are built into engines, thousands of requests run in batches, and the texts are
//! tested against the exact distribution that follows from the target's logits.
#![allow(clippy::unwrap_used)]

#[path = "../backend/core/tests/lossless/chi_square.rs"]
mod chi_square;
mod common;

use chi_square::{ALPHA, p_value};
use common::models::{MAX_BATCH_SIZE, Recipe};
use common::{golden, running, tiny};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{self, Adaptive, Fixed};
use spec_core::runtime::{Options, Request, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use std::collections::BTreeMap;
use std::fs;
use tempfile::TempDir;

/// Texts of each test.
const NUM_TEXTS: usize = 20_000;

/// Generated tokens: the first comes from the prefill, so that the others are drafted.
const TEXT_LEN: usize = 4;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drafts {
    /// The first of the target's two layers.
    Model,
    /// The same, and half of the tokens.
    SomeTokens,
    Lookup,
    /// Random heads.
    Medusa,
    /// A random EAGLE-3 head.
    Eagle,
    /// The same first layer, which drafts all tokens in one pass.
    AtOnce,
    /// The target without some of its own layers.
    Skip,
}

/// A target of two layers and its drafter.
struct Pair {
    _dir: TempDir,
    target: Engine,
    /// The target's first layer as an engine of its own.
    draft: Engine,
}

impl Pair {
    fn build(drafts: Drafts) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name);
        tiny::write(&path("big"), 2, 1);
        tiny::write(&path("small"), 1, 1);
        let with_model =
            |name: &str| Recipe::model(path("big"), Dtype::Fp32, path(name), Dtype::Fp32);
        let recipe = match drafts {
            Drafts::Lookup => Recipe::ngram(path("big"), Dtype::Fp32),
            Drafts::Model => with_model("small"),
            Drafts::SomeTokens => with_model("small").with_draft_vocab("32"),
            Drafts::AtOnce => {
                tiny::mask_with(&path("small"), 5);
                with_model("small")
            }
            Drafts::Skip => {
                let layers = r#"{"attention": [1], "mlp": [0]}"#;
                fs::write(path("skip_layers.json"), layers).expect("writes");
                Recipe::skipping(path("big"), Dtype::Fp32, path("skip_layers.json"))
            }
            Drafts::Eagle => {
                tiny::write_head(&path("head"), 2, 1, &tiny::SMALLEST);
                with_model("head")
            }
            Drafts::Medusa => {
                tiny::write_medusa(&path("heads"), 3, 1, &tiny::SMALLEST);
                with_model("heads").drafting(3)
            }
        };
        recipe.build(&path("pair"));
        Recipe::ngram(path("small"), Dtype::Fp32).build(&path("alone"));
        let open =
            |name: &str| Engine::open(path(name).join("1").join(TARGET_FILE)).expect("opens");
        Self { target: open("pair"), draft: open("alone"), _dir: dir }
    }
}

/// A draw of three tokens at most a position: every text of the test can be counted.
fn three_likeliest() -> SamplingParams {
    SamplingParams { temperature: 1.3, top_k: 3, ..SamplingParams::default() }
}

/// A prompt that ends with a token that stood in it before, where what followed may follow again, twice:
/// look-up proposes something, and some of that is accepted.
fn prompt(engine: &Engine, params: &SamplingParams) -> Vec<u32> {
    const LAST: u32 = 5;
    let mut model = golden::model(engine, 4);
    let mut follow = |prompt: &[u32]| {
        draws(golden::all_logits(&mut model, prompt).row(prompt.len() - 1), params)
    };
    let candidates = (0..tiny::END.pow(2)).map(|n| {
        let (a, b) = (n % tiny::END, n / tiny::END);
        vec![LAST, a, b, LAST]
    });
    let mut repeats = |prompt: &Vec<u32>| {
        let (a, b) = (prompt[1], prompt[2]);
        let mut may_follow = |text: &[u32], token| follow(text).iter().any(|&(id, _)| id == token);
        may_follow(prompt, a) && may_follow(&[&prompt[..], &[a]].concat(), b)
    };
    candidates.into_iter().find(|prompt| repeats(prompt)).expect("one in a few hundred does")
}

/// A prompt behind whose continuation two tokens stood that may both follow again: look-up proposes both. The one that
/// stood earlier, which a chain leaves out, follows often.
fn forked_prompt(engine: &Engine, params: &SamplingParams) -> Vec<u32> {
    const LAST: u32 = 5;
    /// Of all texts: many times what chance makes of a difference.
    const OFTEN: f64 = 0.1;
    let mut model = golden::model(engine, 4);
    let mut chance = |text: &[u32], token| {
        let logits = golden::all_logits(&mut model, text);
        let draws = draws(logits.row(text.len() - 1), params);
        draws.iter().find(|&&(id, _)| id == token).map_or(0.0, |&(_, chance)| chance)
    };
    let ids = 0..tiny::END;
    let candidates = ids.clone().flat_map(|a| {
        let ids = ids.clone();
        ids.clone().flat_map(move |b| ids.clone().map(move |c| (a, b, c)))
    });
    let prompt = |(a, b, c)| vec![LAST, a, b, LAST, a, c, LAST];
    let mut forks = |&(a, b, c): &(u32, u32, u32)| {
        let prompt = prompt((a, b, c));
        let text = [&prompt[..], &[a]].concat();
        b != c && chance(&prompt, a) * chance(&text, b) > OFTEN && chance(&text, c) > 0.0
    };
    let found = candidates.into_iter().find(|candidate| forks(candidate));
    prompt(found.expect("one in some thousand does"))
}

/// The same, of what has not been written yet.
fn penalised() -> SamplingParams {
    SamplingParams {
        repetition_penalty: 1.2,
        presence_penalty: 0.7,
        frequency_penalty: 0.4,
        ..three_likeliest()
    }
}

/// The exact probabilities of all texts, from logits of whole texts without a cache.
fn exact(engine: &Engine, params: &SamplingParams, prompt: &[u32]) -> BTreeMap<Vec<u32>, f64> {
    let mut model = golden::model(engine, 4);
    let mut texts = BTreeMap::from([(Vec::new(), 1.0)]);
    for _ in 0..TEXT_LEN {
        let mut longer = BTreeMap::new();
        for (text, reached) in texts {
            let tokens = [prompt, &text].concat();
            let logits = golden::all_logits(&mut model, &tokens);
            let edited = edited(logits.row(tokens.len() - 1), params, prompt, &text);
            for (token, p) in draws(&edited, params) {
                longer.insert([&text[..], &[token]].concat(), reached * p);
            }
        }
        texts = longer;
    }
    texts
}

/// Logits behind the penalties on what a text has: what occurs in prompt or output is divided, or multiplied below 0, what occurs
/// in the output loses something, and something for each time.
fn edited(logits: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<f32> {
    let edit = |(id, &logit): (usize, &f32)| {
        let count = |tokens: &[u32]| tokens.iter().filter(|&&token| token as usize == id).count();
        let (before, times) = (count(prompt), count(output));
        let factor = if before + times > 0 { params.repetition_penalty } else { 1.0 };
        let logit = if logit > 0.0 { logit / factor } else { logit * factor };
        let presence = if times > 0 { params.presence_penalty } else { 0.0 };
        logit - presence - params.frequency_penalty * times as f32
    };
    logits.iter().enumerate().map(edit).collect()
}

/// Tokens that may be drawn, with their probabilities: temperature, then the likeliest `top_k`.
fn draws(logits: &[f32], params: &SamplingParams) -> Vec<(u32, f64)> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    ids.truncate(params.top_k);
    let max = f64::from(logits[ids[0] as usize]);
    let weight =
        |id: u32| ((f64::from(logits[id as usize]) - max) / f64::from(params.temperature)).exp();
    let total: f64 = ids.iter().map(|&id| weight(id)).sum();
    ids.into_iter().map(|id| (id, weight(id) / total)).collect()
}

/// How drafts branch.
#[derive(Clone, Copy, Debug)]
struct Tree {
    branches: usize,
    /// At most, in all branches.
    tokens: Option<usize>,
}

impl Tree {
    const CHAIN: Self = Self::of(1);

    const fn of(branches: usize) -> Self {
        Self { branches, tokens: None }
    }
}

/// How often each text is generated, and drafted and accepted tokens.
fn sample(
    engine: &Engine,
    params: &SamplingParams,
    prompt: &[u32],
    (policy, draft_len): (DraftPolicy, usize),
    tree: Tree,
) -> (BTreeMap<Vec<u32>, u64>, u64, u64) {
    let options = Options {
        ngram_branches: tree.branches,
        draft_branches: tree.branches,
        draft_tree_tokens: tree.tokens,
        ..running::options(policy)
    };
    let mut runtime = running::load(engine, &options);
    let request = Request {
        prompt: prompt.to_vec().into(),
        max_tokens: TEXT_LEN,
        draft_len: Some(draft_len),
        sampling: params.clone(),
        ignore_eos: true,
        ..Request::default()
    };
    let (mut counts, mut drafted, mut accepted) = (BTreeMap::new(), 0, 0);
    // Requests of one go are all admitted, so the batch stays full until the last of them.
    for _ in 0..NUM_TEXTS.div_ceil(16 * MAX_BATCH_SIZE) {
        for done in running::run(&mut runtime, &vec![request.clone(); 16 * MAX_BATCH_SIZE]) {
            *counts.entry(done.tokens).or_default() += 1;
            drafted += done.counters.drafted;
            accepted += done.counters.accepted;
        }
    }
    (counts, drafted, accepted)
}

/// Requests without a seed differ from run to run, so one run in 10,000 is refused by chance: what is
/// wrong is refused twice.
fn assert_lossless(
    what: &str,
    expected: &BTreeMap<Vec<u32>, f64>,
    run: impl Fn() -> BTreeMap<Vec<u32>, u64>,
) {
    let first = p_value(&run(), expected);
    eprintln!("{what}: p = {first:.3}");
    if first < ALPHA {
        let second = p_value(&run(), expected);
        assert!(second >= ALPHA, "{what}: p = {first:e}, and again {second:e}");
    }
}

#[test]
fn unseeded_texts_are_distributed_as_the_target_says_with_any_drafter() {
    let params = three_likeliest();
    for drafter in [
        Drafts::Model,
        Drafts::SomeTokens,
        Drafts::Lookup,
        Drafts::Medusa,
        Drafts::Eagle,
        Drafts::AtOnce,
        Drafts::Skip,
    ] {
        let pair = Pair::build(drafter);
        let prompt = prompt(&pair.target, &params);
        let expected = exact(&pair.target, &params, &prompt);
        for drafts in
            [(Fixed, 0), (Fixed, 3), (Adaptive, pair.target.manifest().limits.max_draft_len)]
        {
            let what = format!("{drafter:?}, {drafts:?}");
            assert_lossless(&what, &expected, || {
                let (counts, drafted, accepted) =
                    sample(&pair.target, &params, &prompt, drafts, Tree::CHAIN);
                eprintln!("{what}: {accepted} of {drafted} drafts accepted");
                assert!(drafts != (Fixed, 3) || (0 < accepted && accepted < drafted), "{what}");
                counts
            });
        }
    }
}

#[test]
fn unseeded_texts_are_distributed_as_the_target_says_with_trees_of_drafts() {
    let params = three_likeliest();
    let pair = Pair::build(Drafts::Lookup);
    let prompt = forked_prompt(&pair.target, &params);
    let expected = exact(&pair.target, &params, &prompt);
    assert_lossless("trees", &expected, || {
        let [chains, trees] = [1, 2]
            .map(|branches| sample(&pair.target, &params, &prompt, (Fixed, 4), Tree::of(branches)));
        eprintln!("accepted: {} of chains, {} of trees", chains.2, trees.2);
        assert!(chains.2 < trees.2 && trees.2 < trees.1, "a second branch is accepted, too");
        trees.0
    });
}

/// Siblings are drawn here, from what of the drafter's distribution those before them have left.
#[test]
fn unseeded_texts_are_distributed_as_the_target_says_with_drawn_trees() {
    let params = three_likeliest();
    for drafter in [
        Drafts::Model,
        Drafts::SomeTokens,
        Drafts::Medusa,
        Drafts::Eagle,
        Drafts::AtOnce,
        Drafts::Skip,
    ] {
        let pair = Pair::build(drafter);
        let prompt = prompt(&pair.target, &params);
        let expected = exact(&pair.target, &params, &prompt);
        let draw = |policy, tree| sample(&pair.target, &params, &prompt, (policy, 3), tree);
        let (_, _, of_chains) = draw(Fixed, Tree::CHAIN);
        let pruned = Tree { branches: 3, tokens: Some(5) };
        for (policy, tree) in
            [(Fixed, Tree::of(2)), (Fixed, Tree::of(3)), (Fixed, pruned), (Adaptive, Tree::of(3))]
        {
            let what = format!("{drafter:?}, {policy:?}, {tree:?}");
            assert_lossless(&what, &expected, || {
                let (counts, _, accepted) = draw(policy, tree);
                eprintln!("{what}: accepted {of_chains} of chains, {accepted} of trees");
                assert!(policy == Adaptive || of_chains < accepted, "siblings are accepted, too");
                counts
            });
        }
    }
}

/// What is drawn depends on what was drawn before, siblings among it; and where it is cold, on one of three in most places.
#[test]
fn unseeded_texts_are_distributed_as_the_target_says_with_drawn_trees_of_penalised_and_cold_draws()
{
    let cold = SamplingParams { temperature: 0.4, ..three_likeliest() };
    for (what, params) in [("penalised", penalised()), ("cold", cold)] {
        let pair = Pair::build(Drafts::Model);
        let prompt = prompt(&pair.target, &three_likeliest());
        let expected = exact(&pair.target, &params, &prompt);
        assert_lossless(what, &expected, || {
            let (counts, drafted, accepted) =
                sample(&pair.target, &params, &prompt, (Fixed, 3), Tree::of(3));
            eprintln!("{what}: {accepted} of {drafted} drafts accepted");
            assert!(0 < accepted && accepted < drafted, "{what}");
            counts
        });
        // It tells what is drawn without the penalties, or warmer.
        let (others, ..) =
            sample(&pair.target, &three_likeliest(), &prompt, (Fixed, 3), Tree::of(3));
        assert!(p_value(&others, &expected) < ALPHA, "{what}: other draws pass");
    }
}

#[test]
fn the_same_test_tells_what_is_nearly_right_from_what_is_right() {
    let (params, pair) = (three_likeliest(), Pair::build(Drafts::Model));
    let prompt = prompt(&pair.target, &params);
    let (counts, ..) = sample(&pair.target, &params, &prompt, (Fixed, 3), Tree::CHAIN);
    let p_value = |engine, params| p_value(&counts, &exact(engine, params, &prompt));
    assert!(p_value(&pair.draft, &params) < ALPHA, "the drafter's distribution passes");
    let warmer = SamplingParams { temperature: 1.8, ..params.clone() };
    assert!(p_value(&pair.target, &warmer) < ALPHA, "another temperature passes");
}
