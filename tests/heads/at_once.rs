//! Drafters whose drafts all come from one pass: P-EAGLE heads, against what their reference says, and PARD models, against
//! their definition.

use crate::common::models::Recipe;
use crate::common::{golden, tiny};
use crate::support::{
    Recorded, assert_can_be_built_later, assert_shared_pages_change_nothing,
    assert_texts_are_plain, assert_texts_of_engine_are_plain, check, drafts_along_the_text,
    engines,
};
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_core::testing::batch::{Branching, DraftLens, Entry};
use spec_core::testing::cpu::{self, Resources, Weights};
use spec_core::testing::draft::{self, Drafter, Head, HeadSegment};
use spec_core::testing::sampling::{Coupling, Sampler};
use std::sync::Arc;

const CASE: &str = "peagle-d2t";
const PAGES: [u32; 3] = [2, 0, 1];

fn head(target: &Engine, draft: &Engine, num_pages: usize) -> cpu::Eagle {
    let pool = Arc::new(Pool::new(1));
    let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
    let (own, targets) = (weights(draft), weights(target));
    let resources = Resources { num_pages, rows: 8, isa: Isa::detect(), pool };
    cpu::Eagle::new(draft, own, Some(targets), resources).unwrap()
}

#[test]
fn every_row_of_a_pass_says_what_the_reference_says() {
    let (_dir, target, draft) = engines(CASE, Dtype::Fp32);
    let (text, recorded) = (Recorded::of("target"), Recorded::of(CASE));
    let tokens: Vec<u32> = text.whole("token_ids").into_iter().map(|token| token as u32).collect();
    let mut head = head(&target, &draft, 3);
    let states = head.states(&text.floats("aux_hidden_states")).unwrap();
    check(CASE, &states, &recorded.floats("fused"));
    let (width, mask) = (head.width(), head.mask().unwrap().clone());
    let mut read = 0;
    for (round, committed) in recorded.whole("commit").into_iter().enumerate() {
        let mut rows = tokens[read + 1..committed + 1].to_vec();
        let mut with = states[read * width..committed * width].to_vec();
        let num_known = rows.len();
        for _ in 1..4 {
            rows.push(mask.token);
            with.extend_from_slice(&mask.state);
        }
        let pass = head
            .forward(&[HeadSegment {
                tokens: &rows,
                states: &with,
                first_position: read + 1,
                pages: &PAGES,
                num_logits: rows.len(),
                tree: &[],
            }])
            .unwrap();
        let at = (num_known - 1) * pass.logits.vocab_size;
        let end = num_known * pass.logits.vocab_size;
        let of = |name: &str| recorded.floats(&format!("r{round}.{name}"));
        check("first", &pass.logits.values[..end], &of("first.logits"));
        check("all drafts", &pass.logits.values[at..], &of("chain.logits"));
        read = committed;
    }
}

#[test]
fn what_a_step_drafts_is_what_the_reference_drafts() {
    let (_dir, target, draft) = engines(CASE, Dtype::Fp32);
    let recorded = Recorded::of(CASE);
    let head = draft::Eagle::new(Box::new(head(&target, &draft, 12)), 256);
    let noted = drafts_along_the_text(&target, Box::new(head), 4);
    let mut seen = 0;
    for (round, committed) in recorded.whole("commit").into_iter().enumerate() {
        let expected = recorded.whole(&format!("r{round}.chain.tokens"));
        for idx in 0..3 {
            let Some(drafts) = noted.get(&(idx, committed)) else { continue };
            let drafts: Vec<usize> = drafts.iter().map(|&token| token as usize).collect();
            assert_eq!(drafts, expected, "sequence {idx} behind {committed}");
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen} rounds were seen");
}

#[test]
fn texts_are_those_of_plain_decoding() {
    let accepted = assert_texts_are_plain(CASE, Dtype::Int8, 1..9);
    assert!(accepted > 20, "only {accepted} drafts were accepted");
}

#[test]
fn who_begins_behind_shared_pages_drafts_as_if_all_were_its_own() {
    assert_shared_pages_change_nothing(CASE, 4);
}

#[test]
fn a_head_for_a_built_target_is_the_one_that_is_built_with_it() {
    assert_can_be_built_later(CASE);
}

/// Its first draft is what the target says, whose weights it has; what it says behind masks is right now and then.
#[test]
fn texts_that_a_model_drafts_in_one_pass_are_those_of_plain_decoding() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    ["target", "draft"].iter().for_each(|name| tiny::write(&path(name), 2, 1));
    tiny::mask_with(&path("draft"), 5);
    let recipe = Recipe::model(path("target"), Dtype::Bf16, path("draft"), Dtype::Int8).up_to(128);
    recipe.build(&path("built"));
    let engine = Engine::open(path("built").join("1").join(TARGET_FILE)).unwrap();
    let drafter = engine.open_drafter().unwrap().unwrap();
    assert_eq!(drafter.manifest().model.mask_token, Some(5));
    let accepted = assert_texts_of_engine_are_plain("a model in one pass", &engine, 1..9);
    assert!(accepted > 100, "only {accepted} drafts were accepted");
}

#[test]
fn a_model_that_drafts_in_one_pass_says_what_its_rows_of_masks_say() {
    let dir = tempfile::tempdir().unwrap();
    tiny::write(&dir.path().join("hf"), 1, 1);
    tiny::mask_with(&dir.path().join("hf"), 5);
    Recipe::plain(dir.path().join("hf"), Dtype::Fp32).build(&dir.path().join("built"));
    let engine = Engine::open(dir.path().join("built").join("1").join(TARGET_FILE)).unwrap();
    assert_eq!(engine.manifest().model.mask_token, Some(5));
    let model = |num_pages| golden::model(&engine, num_pages);
    let mut drafter = draft::Model::new(Box::new(model(4)), tiny::VOCAB)
        .at_once(engine.manifest().model.mask_token);
    let greedy = Sampler::new(SamplingParams::default(), Coupling::Path(0), vec![]);
    let text: Vec<u32> = (0..40).map(|idx| (idx * idx + 7) % 60).collect();
    let mut draft_computed = 0;
    for (known, len) in [(9, 4), (11, 1), (12, 6), (20, 3)] {
        let entry = Entry {
            id: 7,
            tokens: &text[..known],
            prompt_len: 9,
            max_len: 64,
            computed: known - 1,
            chunk: 1,
            draft_computed,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens::both(len),
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: 0.0,
            pages: &[3, 0, 2],
            prompt_rows: 0,
            shares: spec_core::testing::Shares::All,
            sampler: &greedy,
        };
        let proposal = drafter.propose(&[entry]).unwrap().remove(0);
        let masked = [&text[..known], &vec![5; len - 1]].concat();
        let logits = golden::all_logits(&mut model(4), &masked);
        let expected: Vec<u32> = (known - 1..masked.len())
            .map(|row| golden::likeliest(logits.row(row), 1)[0] as u32)
            .collect();
        assert_eq!((&proposal.tokens, proposal.passes), (&expected, 1), "{len} behind {known}");
        draft_computed = known;
    }
}
