//! Medusa heads: the layouts they come in, what is left to the target, and refusals.

use super::super::testing::{Blob, Folder, safetensors, value};
use super::{open, read, refused};
use crate::checkpoint::Checkpoint;
use proptest::prelude::*;
use serde_json::json;
use spec_core::model::MedusaConfig;
use std::fs;
use std::path::Path;

fn blob(name: &str, shape: &[usize]) -> Blob {
    let values: Vec<f32> = (0..shape.iter().product()).map(|idx| value(name, idx)).collect();
    Blob::f32(name, shape, &values)
}

/// Two heads of two blocks each, for the tiny llama, as their authors publish them; config.json has the numbers wrong.
fn medusa() -> Folder {
    let mut blobs = Vec::new();
    for head in 0..2 {
        for block in 0..2 {
            blobs.push(blob(&format!("{head}.{block}.linear.weight"), &[32, 32]));
            blobs.push(blob(&format!("{head}.{block}.linear.bias"), &[32]));
        }
        blobs.push(blob(&format!("{head}.2.weight"), &[48, 32]));
    }
    let config = json!({
        "medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "tiny",
        "hidden_size": 32, "vocab_size": 48
    });
    Folder { config, blobs }
}

/// The same tensors under other names.
fn renamed(names: impl Fn(usize, &str) -> String) -> Folder {
    let mut folder = medusa();
    for blob in &mut folder.blobs {
        let (head, rest) = blob.name.split_once('.').unwrap();
        blob.name = names(head.parse().unwrap(), rest);
    }
    folder
}

fn target() -> Checkpoint {
    open(&Folder::llama()).unwrap()
}

fn write(heads: &Folder, dir: &Path, file: &str) {
    fs::write(dir.join("config.json"), heads.config.to_string()).unwrap();
    fs::write(dir.join(file), safetensors(&heads.blobs)).unwrap();
}

fn open_heads(heads: &Folder, shares: bool) -> anyhow::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    write(heads, dir.path(), "medusa_lm_head.safetensors");
    Checkpoint::open_draft(dir.path(), &target(), shares)
}

fn config(heads: &Folder, shares: bool) -> MedusaConfig {
    open_heads(heads, shares).unwrap().config.medusa().unwrap().clone()
}

#[test]
fn the_tensors_say_how_many_heads_and_layers_there_are() {
    let checkpoint = open_heads(&medusa(), true).unwrap();
    let expected =
        MedusaConfig { tap: 2, num_blocks: 2, block_bias: true, own_heads: vec![true, true] };
    assert_eq!(checkpoint.config.medusa(), Some(&expected));
    for name in ["0.1.linear.weight", "1.0.linear.bias", "1.2.weight"] {
        let values = read(&checkpoint, name);
        assert!((0..values.len()).all(|idx| values[idx] == value(name, idx)), "{name}");
    }
    // What the state is normed with is the target's.
    assert_eq!(read(&checkpoint, "input_norm.weight"), read(&target(), "model.norm.weight"));
    let mut bare = medusa();
    bare.blobs.retain(|blob| !blob.name.ends_with("bias"));
    assert!(!config(&bare, true).block_bias);
    let mut one = medusa();
    one.blobs.retain(|blob| blob.name.starts_with("0."));
    assert_eq!(config(&one, true).own_heads, [true]);
}

#[test]
fn other_names_of_the_same_tensors_are_known() {
    let as_vllm = renamed(|head, rest| match rest.split_once(".linear.") {
        Some((block, kind)) => format!("blocks.{head}.layers.{block}.{kind}"),
        None => format!("lm_heads.{head}.weight"),
    });
    let in_model = renamed(|head, rest| format!("medusa_head.{head}.{rest}"));
    for (folder, file) in [
        (as_vllm, "model.safetensors"),
        (in_model, "medusa_lm_head.safetensors"),
        (medusa(), "model.safetensors"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(&folder, dir.path(), file);
        let checkpoint = Checkpoint::open_draft(dir.path(), &target(), true).unwrap();
        let plain = open_heads(&medusa(), true).unwrap();
        assert_eq!(checkpoint.config, plain.config);
        for head in 0..2 {
            for (name, source) in [("1.linear.weight", "1.linear.weight"), ("2.weight", "2.weight")]
            {
                // Values follow from the names of the published layout.
                let found = read(&checkpoint, &format!("{head}.{name}"));
                assert_eq!(found, read(&plain, &format!("{head}.{source}")));
            }
        }
    }
}

#[test]
fn a_matrix_that_the_target_has_is_left_to_it() {
    let theirs = read(&target(), "lm_head.weight");
    let mut heads = medusa();
    *heads.blob("1.2.weight") = Blob::f32("1.2.weight", &[48, 32], &theirs);
    assert_eq!(config(&heads, true).own_heads, [true, false]);
    assert_eq!(config(&heads, false).own_heads, [true, true], "on another device they have all");
    let mut other = theirs.clone();
    other[777] += 1.0;
    *heads.blob("1.2.weight") = Blob::f32("1.2.weight", &[48, 32], &other);
    assert_eq!(config(&heads, true).own_heads, [true, true], "other values");

    // One matrix for all heads, where the file says so.
    heads.remove("1.2.weight");
    *heads.blob("0.2.weight") = Blob::f32("0.2.weight", &[48, 32], &theirs);
    refused(open_heads(&heads, true), &["`1.2.weight`", "missing"]);
    heads.config["original_lm_head"] = true.into();
    assert_eq!(config(&heads, true).own_heads, [false, false]);
}

#[test]
fn heads_for_another_target_are_refused_by_what_differs_first() {
    for (key, value, parts) in [
        ("hidden_size", 64, &["width 64", "the target is 32"][..]),
        ("vocab_size", 49, &["vocabulary 49", "the target is 48"]),
    ] {
        let mut heads = medusa();
        heads.config[key] = value.into();
        refused(open_heads(&heads, true), parts);
    }
    let mut wide = medusa();
    *wide.blob("1.1.linear.weight") = blob("1.1.linear.weight", &[32, 64]);
    refused(open_heads(&wide, true), &["`1.1.linear.weight`", "[32, 64]", "[32, 32]"]);
    let mut many = medusa();
    *many.blob("0.2.weight") = blob("0.2.weight", &[49, 32]);
    refused(open_heads(&many, true), &["`0.2.weight`", "[49, 32]", "[48, 32]"]);
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    for name in ["0.1.linear.weight", "1.0.linear.weight", "1.1.linear.bias", "0.2.weight"] {
        let mut fewer = medusa();
        fewer.remove(name);
        assert!(open_heads(&fewer, true).is_err(), "{name} is missing");
    }
    for name in ["2.2.weight", "0.2.bias", "token_map", "7.0.linear.bias", "model.norm.weight"] {
        let mut more = medusa();
        more.blobs.push(blob(name, &[32]));
        refused(open_heads(&more, true), &[name, "unexpected"]);
    }
    let mut twice = medusa();
    twice.blobs.push(blob("lm_heads.0.weight", &[48, 32]));
    refused(open_heads(&twice, true), &["`0.2.weight`", "twice"]);
    let mut crowd = medusa();
    for head in 2..65 {
        crowd.blobs.push(blob(&format!("{head}.0.linear.weight"), &[1, 1]));
        crowd.blobs.push(blob(&format!("{head}.2.weight"), &[1, 1]));
    }
    refused(open_heads(&crowd, true), &["Medusa heads", "65", "1 to 64"]);
    let mut nan = medusa();
    nan.blob("0.2.weight").bytes[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
    let checkpoint = open_heads(&nan, true).unwrap();
    let checked = checkpoint.check_finite("0.2.weight", 0, &read(&checkpoint, "0.2.weight"));
    assert!(checked.unwrap_err().to_string().contains("`0.2.weight`: row 0 holds NaN"));
}

#[test]
fn a_pickle_that_is_none_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), medusa().config.to_string()).unwrap();
    fs::write(dir.path().join("medusa_lm_head.pt"), b"cos\nsystem\n(S'true'\ntR.").unwrap();
    let opened = Checkpoint::open_draft(dir.path(), &target(), true);
    refused(opened, &["medusa_lm_head.pt"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn altered_names_and_shapes_never_panic(
        at in 0usize..10,
        name in "([0-9]{1,21}|blocks|lm_heads|medusa_head)?[.0-9]{0,6}(linear|layers)?[.](0[.])?(weight|bias)",
        shape in prop::collection::vec(0usize..40, 0..3),
    ) {
        let mut heads = medusa();
        let count = heads.blobs.len();
        heads.blobs[at % count] = blob(&name, &shape);
        let _ = open_heads(&heads, true);
    }
}
