//! Heads on a target's hidden states: layouts, what is left to the target, and refusals.

use super::super::testing::{Blob, Folder, value};
use super::{open, read, refused};
use crate::checkpoint::target::Target;
use crate::checkpoint::tensor::Tensor;
use crate::checkpoint::{Checkpoint, Generation, TokenizerSource};
use proptest::prelude::*;
use serde_json::{Value, json};
use spec_core::model::{EagleConfig, EagleKind, ModelConfig, TapNorms};
use std::fs;

fn blob(name: &str, shape: &[usize]) -> Blob {
    let values: Vec<f32> = (0..shape.iter().product()).map(|idx| value(name, idx)).collect();
    Blob::f32(name, shape, &values)
}

/// Each draft token's distance to the target's: every third.
fn offsets(draft_vocab: i64) -> Blob {
    let bytes = (0..draft_vocab).flat_map(|row| (2 * row).to_le_bytes()).collect();
    Blob::new("d2t", "I64", &[draft_vocab as usize], bytes)
}

/// An EAGLE-3 head of 16 tokens in the original layout, for the tiny llama.
fn eagle3() -> Folder {
    let layer = |part: &str, shape: &[usize]| blob(&format!("midlayer.{part}.weight"), shape);
    let blobs = vec![
        blob("fc.weight", &[32, 96]),
        layer("input_layernorm", &[32]),
        layer("hidden_norm", &[32]),
        layer("self_attn.q_proj", &[32, 64]),
        layer("self_attn.k_proj", &[16, 64]),
        layer("self_attn.v_proj", &[16, 64]),
        layer("self_attn.o_proj", &[32, 32]),
        layer("post_attention_layernorm", &[32]),
        layer("mlp.gate_proj", &[64, 32]),
        layer("mlp.up_proj", &[64, 32]),
        layer("mlp.down_proj", &[32, 64]),
        blob("norm.weight", &[32]),
        blob("lm_head.weight", &[16, 32]),
        offsets(16),
        Blob::new("t2d", "BOOL", &[48], vec![0; 48]),
    ];
    let config = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 48,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "draft_vocab_size": 16,
        "eagle_config": { "eagle_aux_hidden_state_layer_ids": [2, 0, 1] }
    });
    Folder { config, blobs }
}

fn target() -> Checkpoint {
    open(&Folder::llama()).unwrap()
}

fn open_head(head: &Folder, shares: bool) -> anyhow::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    head.write(dir.path());
    Checkpoint::open_draft(dir.path(), &target(), shares)
}

fn eagle(head: &Folder) -> EagleConfig {
    open_head(head, true).unwrap().config.eagle().cloned().unwrap()
}

#[test]
fn the_original_layout_opens() {
    let checkpoint = open_head(&eagle3(), true).unwrap();
    let eagle = checkpoint.config.eagle().unwrap();
    assert_eq!((eagle.kind, &eagle.taps[..]), (EagleKind::Eagle3, &[0, 1, 2][..]));
    assert_eq!((eagle.tap_norms, eagle.draft_vocab), (TapNorms::None, 16));
    assert!(!eagle.own_embed && eagle.own_head && eagle.maps_vocab);
    // As long as the target, whatever it was trained with.
    assert_eq!(checkpoint.config.max_position, 256);
    let map: Vec<f32> = (0..16u8).map(|row| f32::from(3 * row)).collect();
    assert_eq!(read(&checkpoint, "d2t"), map);
    let q = read(&checkpoint, "model.layers.0.self_attn.q_proj.weight");
    assert!((0..q.len()).all(|idx| q[idx] == value("midlayer.self_attn.q_proj.weight", idx)));
}

#[test]
fn what_the_target_has_as_well_is_left_to_it() {
    let theirs = read(&target(), "model.embed_tokens.weight");
    let mut head = eagle3();
    head.blobs.push(Blob::f32("embed_tokens.weight", &[48, 32], &theirs));
    assert!(!eagle(&head).own_embed, "the same values");
    let alone = open_head(&head, false).unwrap();
    assert!(alone.config.eagle().unwrap().own_embed, "a head on another device has all");
    assert_eq!(read(&alone, "model.embed_tokens.weight"), theirs);
    let mut other = theirs;
    other[777] += 1.0;
    *head.blob("embed_tokens.weight") = Blob::f32("embed_tokens.weight", &[48, 32], &other);
    assert!(eagle(&head).own_embed, "other values");
}

/// A target that is built, whose matrices can be compared and not read.
struct Packed(Checkpoint);

impl Target for Packed {
    fn config(&self) -> &ModelConfig {
        &self.0.config
    }

    fn generation(&self) -> &Generation {
        Target::generation(&self.0)
    }

    fn tokenizer(&self) -> &TokenizerSource {
        Target::tokenizer(&self.0)
    }

    fn has_same(&self, name: &str, own: &Tensor) -> anyhow::Result<bool> {
        self.0.has_same(name, own)
    }

    fn tensor(&self, name: &str) -> anyhow::Result<Tensor> {
        anyhow::bail!("{name} is packed")
    }
}

#[test]
fn a_head_on_another_device_than_a_built_target_keeps_its_copy_of_what_both_have() {
    let dir = tempfile::tempdir().unwrap();
    let theirs = read(&target(), "model.embed_tokens.weight");
    let mut head = eagle3();
    let without = head.blobs.clone();
    head.blobs.push(Blob::f32("embed_tokens.weight", &[48, 32], &theirs));
    head.write(dir.path());
    let open = |shares| Checkpoint::open_draft(dir.path(), &Packed(target()), shares);
    assert_eq!(read(&open(false).unwrap(), "model.embed_tokens.weight"), theirs);
    assert!(
        !open(true).unwrap().config.eagle().unwrap().own_embed,
        "beside the target it is left out"
    );
    head.blobs = without;
    head.write(dir.path());
    refused(open(false), &["model.embed_tokens.weight is packed"]);
}

#[test]
fn every_key_of_a_configuration_is_heard() {
    let with = |key: &str, value: Value| {
        let mut head = eagle3();
        head.config[key] = value;
        head
    };
    let mut normed = with("norm_before_fc", json!(true));
    normed.blobs.push(blob("input_norm.weight", &[96]));
    assert_eq!(eagle(&normed).tap_norms, TapNorms::Together);
    assert!(eagle(&with("norm_before_residual", json!(true))).norm_before_residual);
    assert!(eagle(&with("norm_output", json!(true))).norm_output);
    let mut slides = with("layer_types", json!(["sliding_attention"]));
    refused(open_head(&slides, true), &["sliding_window"]);
    slides.config["sliding_window"] = json!(8);
    assert_eq!(eagle(&slides).window, Some(8));
    let mut biased = eagle3();
    biased.blobs.push(blob("fc.bias", &[32]));
    assert!(eagle(&biased).fc_bias);
    let mut by_default = eagle3();
    by_default.config["eagle_config"] = Value::Null;
    // 2, half, and all but 3, which a target of 2 layers does not have apart.
    refused(open_head(&by_default, true), &["taps"]);
}

/// The target has two layers.
#[test]
fn layers_are_counted_as_who_writes_them_counts() {
    let ids = |ids: Value| json!({ "eagle_aux_hidden_state_layer_ids": ids });
    let taps =
        |head: Folder| open_head(&head, true).map(|head| head.config.eagle().unwrap().taps.clone());
    let mut head = eagle3();
    head.config["eagle_config"] = ids(json!([0, 1, 2]));
    assert_eq!(taps(head).unwrap(), [0, 1, 2]);
    let mut head = eagle3();
    head.config["eagle_config"] = ids(json!([1, 2]));
    let error = format!("{:#}", taps(head).unwrap_err());
    assert!(error.contains("behind layer 3"), "{error}");
    let mut head = eagle3();
    head.config["eagle_config"] = Value::Null;
    head.config["eagle_aux_hidden_state_layer_ids"] = json!([1, 2, 3]);
    let error = format!("{:#}", taps(head).unwrap_err());
    assert!(error.contains("behind layer 3"), "{error}");
    // Of the outer list 1 stays 1.
    let mut head = eagle3();
    head.config["eagle_aux_hidden_state_layer_ids"] = json!([1, 2]);
    let fc = head.blobs.iter_mut().find(|blob| blob.name == "fc.weight").unwrap();
    *fc = blob("fc.weight", &[32, 64]);
    assert_eq!(taps(head).unwrap(), [1, 2]);
}

#[test]
fn a_head_that_drafts_in_one_pass_has_a_mask_and_what_comes_with_it() {
    let head = |token: Value, shape: &[usize]| {
        let mut head = eagle3();
        head.config["mask_token_id"] = token;
        head.blobs.push(blob("mask_hidden", shape));
        head
    };
    let opened = open_head(&head(json!(47), &[1, 1, 96]), true).unwrap();
    assert_eq!(opened.config.eagle().unwrap().mask_token, Some(47));
    assert_eq!(opened.config.mask_token, None, "it is not one as a model");
    let values: Vec<f32> = (0..96).map(|idx| value("mask_hidden", idx)).collect();
    assert_eq!(read(&opened, "mask_hidden"), values);
    refused(open_head(&head(json!(48), &[96]), true), &["mask token is 48", "48"]);
    refused(open_head(&head(Value::Null, &[96]), true), &["mask_hidden", "no mask_token_id"]);
    refused(open_head(&head(json!(-1), &[96]), true), &["mask_token_id"]);
    refused(open_head(&head(json!(7), &[1, 1, 32]), true), &["`mask_hidden`", "[32]", "[96]"]);
    assert_eq!(eagle(&eagle3()).mask_token, None);
}

#[test]
fn a_head_for_another_target_is_refused() {
    for (key, value, parts) in [
        ("vocab_size", json!(49), &["49 tokens", "the target has 48"][..]),
        ("target_hidden_size", json!(40), &["width 40", "the target is 32 wide"]),
        (
            "eagle_config",
            json!({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}),
            &["behind layer 3", "2 layers"],
        ),
        (
            "eagle_config",
            json!({"eagle_aux_hidden_state_layer_ids": [0, "1"]}),
            &["eagle_aux_hidden_state_layer_ids"],
        ),
        ("draft_vocab_size", json!(17), &["d2t", "[16]", "[17]"]),
        ("head_dim", json!(16), &["self_attn.", "expected"]),
        ("norm_before_fc", json!(true), &["input_norm", "missing"]),
    ] {
        let mut head = eagle3();
        head.config[key] = value;
        refused(open_head(&head, true), parts);
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let mut wide = eagle3();
    *wide.blob("fc.weight") = blob("fc.weight", &[32, 64]);
    refused(open_head(&wide, true), &["`fc.weight`", "[32, 64]", "[32, 96]"]);
    let mut more = eagle3();
    more.blobs.push(blob("midlayer.self_attn.x_proj.weight", &[8]));
    refused(open_head(&more, true), &["x_proj"]);
    let mut fewer = eagle3();
    fewer.remove("midlayer.mlp.up_proj.weight");
    refused(open_head(&fewer, true), &["mlp.up_proj.weight", "missing"]);
    let mut twice = eagle3();
    twice.blobs.push(blob("layers.0.hidden_norm.weight", &[32]));
    refused(open_head(&twice, true), &["hidden_norm", "twice"]);
    let mut nan = eagle3();
    nan.blob("fc.weight").bytes[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
    let checkpoint = open_head(&nan, true).unwrap();
    let checked = checkpoint.check_finite("fc.weight", 0, &read(&checkpoint, "fc.weight"));
    assert!(checked.unwrap_err().to_string().contains("`fc.weight`: row 0 holds NaN"));
}

#[test]
fn a_map_that_leads_out_of_the_vocabulary_is_refused() {
    let with = |row: usize, offset: i64| {
        let mut head = eagle3();
        head.blob("d2t").bytes[8 * row..8 * row + 8].copy_from_slice(&offset.to_le_bytes());
        head
    };
    for offset in [48 - 15, i64::MAX, i64::MIN, -16] {
        refused(open_head(&with(15, offset), true), &["`d2t`: row 15", &offset.to_string()]);
    }
    refused(open_head(&with(15, 27), true), &["`d2t`: token 42 has two rows"]);
    let mut floats = eagle3();
    *floats.blob("d2t") = blob("d2t", &[16]);
    refused(open_head(&floats, true), &["`d2t`: dtype F32"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn altered_configs_never_panic(flips in prop::collection::vec((0usize..480, any::<u8>()), 1..4)) {
        let head = eagle3();
        let dir = tempfile::tempdir().unwrap();
        head.write(dir.path());
        let mut bytes = head.config.to_string().into_bytes();
        flips.iter().for_each(|(at, byte)| bytes[at % head.config.to_string().len()] = *byte);
        fs::write(dir.path().join("config.json"), &bytes).unwrap();
        let _ = Checkpoint::open_draft(dir.path(), &target(), true);
    }
}
