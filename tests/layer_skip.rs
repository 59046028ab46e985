//! A model without some of its layers, on a CPU and on an emulated GPU: it computes what a checkpoint computes whose parts
//! there add nothing, and what it leaves in the cache of the whole one is gone once that has run.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::small::{NORMED, SMALL, tokens};
use common::tiny::{self, Sizes};
use spec_core::engine::Engine;
use spec_core::exec::{Pool, SkipTrial, Written};
use spec_core::model::{Dtype, LayerSkip};
use spec_core::runtime::{Isa, TARGET_FILE};
use spec_core::testing::PageId;
use spec_core::testing::batch::{Forward, Segment};
use spec_core::testing::cpu;
use spec_core::testing::cuda::{self, Gpu, OnHost};
use spec_emu::{Emulator, Schedule};
use std::sync::Arc;
use tempfile::TempDir;

const NUM_LAYERS: usize = 4;
const PAGES: [PageId; 4] = [3, 1, 0, 2];
/// Tokens of a text, of which the last ones are drafts.
const LEN: usize = 40;
const DRAFTS: usize = 5;

fn skips() -> [LayerSkip; 3] {
    [(vec![], vec![0, 2]), (vec![1, 3], vec![]), (vec![0, 1, 2], vec![1, 3])]
        .map(|(attention, mlp)| LayerSkip { attention, mlp })
}

struct Built {
    _dir: TempDir,
    whole: Engine,
    silent: Engine,
}

fn built(sizes: &Sizes, dtype: Dtype, device: &str, skip: &LayerSkip) -> Built {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("whole-hf"), NUM_LAYERS, 5, sizes);
    tiny::write_silent(&path("silent-hf"), NUM_LAYERS, 5, sizes, skip);
    let [whole, silent] = ["whole", "silent"].map(|name| {
        let recipe = Recipe::plain(path(&format!("{name}-hf")), dtype).on(device);
        recipe.build(&path(name));
        Engine::open(path(name).join("1").join(TARGET_FILE)).unwrap()
    });
    Built { _dir: dir, whole, silent }
}

fn on_cpu(engine: &Engine, isa: Isa) -> cpu::Model {
    cpu::Model::load(engine, PAGES.len(), isa, Arc::new(Pool::new(2))).unwrap()
}

/// Logits behind the tokens from `first` on.
fn run(model: &mut dyn Forward, first: usize, end: usize) -> Vec<u32> {
    let text = tokens(end);
    let logits = model.forward(&[Segment {
        tokens: &text[first..],
        first_position: first,
        pages: &PAGES,
        prompt_len: 0,
        num_logits: end - first,
        tree: &[],
    }]);
    logits.unwrap().values.iter().map(|value| value.to_bits()).collect()
}

/// `part` is on the cache of `whole`; `silent` is the twin of `part`, and `other` one of `whole`.
fn check(what: &str, [whole, part, silent, other]: [&mut dyn Forward; 4]) {
    // All of a text by the part alone.
    assert!(run(part, 0, LEN) == run(silent, 0, LEN), "{what}: another text");
    // Drafts behind what the whole one has computed, a token at a time, which it then computes anew.
    let known = LEN - DRAFTS;
    run(whole, 0, known);
    let drafts: Vec<Vec<u32>> =
        (known..LEN).map(|position| run(part, position, position + 1)).collect();
    let at_once = run(part, known, LEN);
    assert!(drafts.concat() == at_once, "{what}: drafts at once");
    assert!(at_once != run(silent, known, LEN), "{what}: the whole model's cache does not count");
    let verified = run(whole, known, LEN);
    run(other, 0, known);
    assert!(verified == run(other, known, LEN), "{what}: what the drafts have left counts");
    assert!(verified != at_once, "{what}: nothing is left out");
}

#[test]
fn a_model_without_layers_is_one_whose_layers_add_nothing_on_a_cpu() {
    for (sizes, dtype) in
        [(&tiny::SMALLEST, Dtype::Int8), (&NORMED, Dtype::Bf16), (&SMALL, Dtype::Fp8)]
    {
        for skip in skips() {
            let built = built(sizes, dtype, "cpu", &skip);
            for isa in Isa::supported() {
                let mut whole = on_cpu(&built.whole, isa);
                let mut part = whole.without(skip.clone(), 3);
                let [mut silent, mut other] =
                    [&built.silent, &built.whole].map(|engine| on_cpu(engine, isa));
                let models: [&mut dyn Forward; 4] =
                    [&mut whole, &mut part, &mut silent, &mut other];
                check(&format!("{dtype}, {isa}, {skip:?}"), models);
            }
        }
    }
}

#[test]
fn a_model_without_layers_is_one_whose_layers_add_nothing_on_a_gpu() {
    let load = |engine: &Engine| {
        let gpu = Gpu::new(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)));
        let model = cuda::Model::load(engine, PAGES.len(), &mut **gpu.lock()).unwrap();
        (Arc::new(model), gpu)
    };
    for skip in skips() {
        let built = built(&SMALL, Dtype::Fp8, "cuda:sm_90a", &skip);
        let (model, gpu) = load(&built.whole);
        let mut part = OnHost::new(Arc::clone(&model), gpu.clone()).without(skip.clone());
        let mut whole = OnHost::new(model, gpu);
        let [mut silent, mut other] = [&built.silent, &built.whole].map(|engine| {
            let (model, gpu) = load(engine);
            OnHost::new(model, gpu)
        });
        check(&format!("{skip:?}"), [&mut whole, &mut part, &mut silent, &mut other]);
    }
}

/// What a trial says of a set of layers is what drafts come to, counted one by one.
#[test]
fn a_trial_counts_the_drafts_that_are_right() {
    const DEPTH: usize = 3;
    let skip = LayerSkip { attention: vec![2], mlp: vec![1] };
    let built = built(&tiny::SMALLEST, Dtype::Int8, "cpu", &skip);
    let best = |logits: &[f32]| {
        let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        likeliest.unwrap() as u32
    };
    let step = |model: &mut dyn Forward, pages: &[PageId], tokens: &[u32], first: usize| {
        let logits = model.forward(&[Segment {
            tokens: &tokens[first..],
            first_position: first,
            pages,
            prompt_len: 0,
            num_logits: 1,
            tree: &[],
        }]);
        best(&logits.unwrap().values)
    };
    // Texts that the model writes itself.
    let texts: Vec<Written> = (0..6)
        .map(|idx| {
            let mut tokens = tokens(9 + 5 * idx);
            let prompt_len = tokens.len();
            let mut model = on_cpu(&built.whole, Isa::detect());
            let mut first = 0;
            while tokens.len() < 60 {
                let next = step(&mut model, &PAGES, &tokens, first);
                first = tokens.len();
                tokens.push(next);
            }
            Written { tokens, prompt_len }
        })
        .collect();
    let trial = SkipTrial::new(&built.whole, &texts, DEPTH, usize::MAX, Some(1)).unwrap();
    let found = trial.judge(&skip).unwrap();
    let again = trial.judge(&skip).unwrap();
    assert_eq!(found, again, "one trial leaves nothing to the next");

    let mut right = [0; DEPTH];
    let mut places = 0;
    for Written { tokens, prompt_len } in &texts {
        for start in (0..60 - DEPTH).filter(|start| start % 16 == 0 && start + 1 >= *prompt_len) {
            let mut whole = on_cpu(&built.whole, Isa::detect());
            step(&mut whole, &PAGES, &tokens[..start], 0);
            let mut part = whole.without(skip.clone(), 1);
            places += 1;
            for (draft, right) in right.iter_mut().enumerate() {
                let position = start + draft;
                let drafted = step(&mut part, &PAGES, &tokens[..=position], position);
                if drafted != tokens[position + 1] {
                    break;
                }
                *right += 1;
            }
        }
    }
    assert_eq!(trial.num_places(), places);
    let expected = right.map(|right| right as f64 / places as f64);
    for (found, expected) in found.accepted.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    }
    assert!(0 < right[0] && right[DEPTH - 1] < places, "{right:?} of {places}");
}
