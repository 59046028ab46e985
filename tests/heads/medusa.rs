//! Medusa heads against their definition, and against plain decoding.

use crate::common::golden;
use crate::common::models::Recipe;
use crate::support::{
    FP32_ERROR, Recorded, assert_can_be_built_later, assert_shared_pages_change_nothing,
    assert_texts_are_plain, check, checkpoints, drafts_along_the_text, engines,
};
use safetensors::Dtype as Stored;
use safetensors::tensor::TensorView;
use spec_build::checkpoint::Checkpoint;
use spec_build::cli::DraftSource;
use spec_core::Result;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, SequenceId, TARGET_FILE};
use spec_core::testing::batch::Entry;
use spec_core::testing::cpu::{Medusa, Resources, Weights};
use spec_core::testing::draft::{self, Drafter, Heads, Proposal, Verified};
use std::fs;
use std::path::Path;
use std::sync::Arc;

const NUM_HEADS: usize = 3;

fn heads(target: &Engine, draft: &Engine, isa: Isa) -> Medusa {
    let pool = Arc::new(Pool::new(1));
    let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
    let (own, targets) = (weights(draft), weights(target));
    let resources = Resources { num_pages: 3, rows: 8, isa, pool };
    Medusa::new(draft, own, Some(targets), resources).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_head_says_at_every_position_what_the_reference_says() {
    let (target, recorded) = (Recorded::of("target"), Recorded::of("medusa"));
    let (_dir, target_engine, draft_engine) = engines("medusa", Dtype::Fp32);
    for isa in Isa::supported() {
        let mut heads = heads(&target_engine, &draft_engine, isa);
        let states = heads.states(&target.floats("last_hidden_pre_norm")).unwrap();
        check("the states", &states, &target.floats("last_hidden_post_norm"));
        assert_eq!(heads.num_heads(), NUM_HEADS);
        let all: Vec<_> = (0..NUM_HEADS).map(|head| heads.logits(head, &states).unwrap()).collect();
        let logits: Vec<f32> = all.iter().flat_map(|logits| &logits.values).copied().collect();
        let largest = check(&format!("{isa}"), &logits, &recorded.floats("logits"));
        eprintln!("{isa}: within {largest:.1e}");
        let rows = logits.chunks(256);
        let tokens: Vec<usize> = rows.map(|row| golden::likeliest(row, 1)[0]).collect();
        assert_eq!(tokens, recorded.whole("tokens"), "{isa}");
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_company() {
    let taps = Recorded::of("target").floats("last_hidden_pre_norm");
    for dtype in [Dtype::Fp32, Dtype::Bf16, Dtype::Fp8, Dtype::Int8, Dtype::Int4] {
        let (_dir, target, draft) = engines("medusa", dtype);
        let mut heads = heads(&target, &draft, Isa::detect());
        let states = heads.states(&taps).unwrap();
        let width = heads.width();
        for head in 0..NUM_HEADS {
            // More rows than a pass takes.
            let together = heads.logits(head, &states).unwrap();
            for (row, state) in states.chunks(width).enumerate() {
                let alone = heads.logits(head, state).unwrap();
                assert_eq!(bits(alone.row(0)), bits(together.row(row)), "{dtype}, row {row}");
            }
        }
    }
}

/// Tells of the last position of a step with the hidden state of the one before it: taps of the wrong row.
struct RowTooEarly(draft::Medusa);

impl Drafter for RowTooEarly {
    fn taps(&self) -> &[usize] {
        self.0.taps()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        self.0.propose(entries)
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        fn wrong<'a>(each: &Verified<'a>) -> Verified<'a> {
            let mut each = each.clone();
            if let [.., before, last] = &mut each.taps[..] {
                *last = before;
            }
            each
        }
        self.0.observe(&verified.iter().map(wrong).collect::<Vec<_>>())
    }

    fn forget(&mut self, id: SequenceId) {
        self.0.forget(id);
    }
}

/// How many steps drafted, and how many of them what the reference drafts there.
fn count_right(target: &Engine, drafter: Box<dyn Drafter>) -> (usize, usize) {
    let tokens = Recorded::of("medusa").whole("tokens");
    let noted = drafts_along_the_text(target, drafter, NUM_HEADS + 1);
    let is_right = |(&(_, computed), drafts): (&(SequenceId, usize), &Vec<u32>)| {
        let expected = (0..NUM_HEADS).map(|head| tokens[head * 33 + computed - 1] as u32);
        expected.eq(drafts.iter().copied())
    };
    (noted.len(), noted.iter().filter(|&each| is_right(each)).count())
}

#[test]
fn what_a_step_drafts_is_what_the_reference_drafts() {
    let (_dir, target, draft) = engines("medusa", Dtype::Fp32);
    let medusa = || draft::Medusa::new(Box::new(heads(&target, &draft, Isa::detect())));
    let (steps, right) = count_right(&target, Box::new(medusa()));
    assert!(steps >= 30, "only {steps} steps drafted");
    assert_eq!(right, steps);
    // The check sees which row the state is of: several rows come at once with chunks and where drafts were accepted.
    let (steps, right) = count_right(&target, Box::new(RowTooEarly(medusa())));
    assert!(right < steps, "{right} of {steps} are right with the states of a wrong row");
}

#[test]
fn texts_are_those_of_plain_decoding() {
    let mut accepted = 0;
    for dtype in [Dtype::Fp32, Dtype::Int8, Dtype::Int4, Dtype::Fp8, Dtype::Bf16] {
        accepted += assert_texts_are_plain("medusa", dtype, 1..NUM_HEADS + 1);
    }
    assert!(accepted > 100, "only {accepted} drafts were accepted");
}

#[test]
fn who_begins_behind_shared_pages_drafts_as_if_all_were_its_own() {
    assert_shared_pages_change_nothing("medusa", NUM_HEADS);
}

#[test]
fn heads_for_a_built_target_are_those_that_are_built_with_it() {
    assert_can_be_built_later("medusa");
}

#[test]
fn drafts_are_no_longer_than_there_are_heads() {
    let (dir, target, head) = checkpoints("medusa");
    let args = |max_draft_len| spec_build::cli::ModelArgs {
        target: target.clone(),
        draft: DraftSource::Model(head.clone()),
        skip: spec_build::cli::SkipArgs::default(),
        max_draft_len,
        dtype: Dtype::Fp32,
        draft_dtype: None,
        head_dtype: None,
        draft_head_dtype: None,
        draft_vocab: None,
        kv_dtype: None,
        kv_calibration: None,
        device: "cpu".into(),
        draft_device: None,
        cuda_lib: None,
        max_batch_size: 4,
        max_seq_len: Some(64),
        max_num_tokens: 64,
    };
    let limits = |asked| spec_build::folder::Plan::new(&args(asked)).map(|plan| plan.limits);
    assert_eq!(limits(None).unwrap().max_draft_len, NUM_HEADS);
    assert_eq!(limits(Some(2)).unwrap().max_draft_len, 2);
    let error = limits(Some(4)).unwrap_err().to_string();
    assert!(error.contains("--max-draft-len 4") && error.contains("3 heads"), "{error}");
    drop(dir);
}

/// Two heads of two blocks without biases; the second one ends in the matrix that the target ends in.
pub(crate) fn write_deep(target: &Path, to: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut target_head = vec![0.0; 256 * 64];
    let checkpoint = Checkpoint::open(target).unwrap();
    checkpoint.read_rows("lm_head.weight", 0..256, &mut target_head).unwrap();
    let values = |seed: usize, len: usize| -> Vec<f32> {
        (0..len).map(|idx| ((idx * 37 + seed * 101) % 61) as f32 / 240.0 - 0.125).collect()
    };
    let mut written = Vec::new();
    for head in 0..2 {
        for block in 0..2 {
            let name = format!("{head}.{block}.linear.weight");
            written.push((name, vec![64, 64], values(2 * head + block, 64 * 64)));
        }
        let to_logits = if head == 0 { values(9, 256 * 64) } else { target_head.clone() };
        written.push((format!("{head}.2.weight"), vec![256, 64], to_logits));
    }
    let bytes: Vec<Vec<u8>> = written
        .iter()
        .map(|(_, _, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = written.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name, TensorView::new(Stored::F32, shape.clone(), bytes).unwrap())
    });
    fs::create_dir_all(to).unwrap();
    // What an uploaded file says of the numbers is wrong.
    fs::write(to.join("config.json"), r#"{"medusa_num_heads": 5, "medusa_num_layers": 1}"#)
        .unwrap();
    let file = to.join("medusa_lm_head.safetensors");
    safetensors::serialize_to_file(views, None, &file).unwrap();
    written
}

/// `W x`, of `[outputs][inputs]`.
fn product(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    matrix.chunks(x.len()).map(row).map(|sum: f64| sum as f32).collect()
}

#[test]
fn blocks_follow_each_other_and_the_targets_matrix_is_not_stored_twice() {
    let (dir, target, _) = checkpoints("medusa");
    let written = write_deep(&target, &dir.path().join("deep"));
    let built = dir.path().join("built");
    let draft = dir.path().join("deep");
    let recipe = Recipe::model(target, Dtype::Fp32, draft, Dtype::Fp32);
    recipe.drafting(2).up_to(64).build(&built);
    let target = Engine::open(built.join("1").join(TARGET_FILE)).unwrap();
    let draft = target.open_drafter().unwrap().unwrap();
    let has = |name: &str| draft.manifest().sections.iter().any(|section| section.name == name);
    assert!(has("heads.0.head") && !has("heads.1.head"));

    let mut heads = heads(&target, &draft, Isa::detect());
    let taps = Recorded::of("target").floats("last_hidden_pre_norm");
    let states = heads.states(&taps[..64]).unwrap();
    for head in 0..2 {
        let matrix = |part: &str| {
            let name = format!("{head}.{part}.weight");
            &written.iter().find(|(known, ..)| *known == name).unwrap().2
        };
        let mut x = states.clone();
        for block in ["0.linear", "1.linear"] {
            let y = product(matrix(block), &x);
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y / (1.0 + (-y).exp()));
        }
        let logits = heads.logits(head, &states).unwrap();
        check(&format!("head {head}"), logits.row(0), &product(matrix("2"), &x));
        let spread = logits.row(0).iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(spread > 1000.0 * FP32_ERROR, "they say something");
    }
}
