//! Hidden states that `spec-build collect` stores against the reference's, of a whole text and of one that is answered
//! beside others.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::{data, golden, tiny};
use half::bf16;
use safetensors::SafeTensors;
use serde_json::json;
use spec_build::cli::{Cli, Command};
use spec_build::collect::collect;
use spec_core::model::Dtype;
use std::fs;
use std::path::Path;

/// Prompt of the recorded text.
const PROMPT_LEN: usize = 12;
/// A bfloat16 has 8 bits: half a step of it, and what sums in another order differ by.
const ERROR: f32 = 1.0 / 256.0;

fn recorded_tokens(golden: &SafeTensors<'_>) -> Vec<u32> {
    let tensor = golden.tensor("token_ids").unwrap();
    let (values, _) = tensor.data().as_chunks();
    values.iter().map(|&value| i64::from_le_bytes(value) as u32).collect()
}

/// Builds the reference's target and collects its answer to the recorded prompt, with others beside it.
fn collected(dir: &Path, prompt: &[u32], max_tokens: usize) {
    let target = dir.join("target");
    fs::create_dir_all(&target).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::write(target.join(file), data::bytes(&format!("heads/target/{file}"))).unwrap();
    }
    tiny::tokenizer().build().unwrap().write(&target).unwrap();
    Recipe::plain(target, Dtype::Fp32).up_to(128).build(&dir.join("built"));
    let others = [json!([1, 2, 3]), json!(vec![9; 40]), json!([200, 100])];
    let lines = [json!({ "prompt_ids": prompt })].into_iter();
    let lines = lines.chain(others.map(|ids| json!({ "prompt_ids": ids })));
    let lines: Vec<String> = lines.map(|line| line.to_string()).collect();
    fs::write(dir.join("prompts.jsonl"), lines.join("\n")).unwrap();
    let path = |name: &str| dir.join(name).into_os_string();
    let (tokens, flags) = (max_tokens.to_string(), ["--layers", "1,2,3", "--held-out", "0"]);
    let args = ["spec-build", "collect", "--max-tokens", &tokens].map(Into::into).into_iter();
    let args = args.chain(flags.map(Into::into)).chain([
        "--target".into(),
        path("built"),
        "--prompts".into(),
        path("prompts.jsonl"),
        "--output".into(),
        path("data"),
    ]);
    let Command::Collect(args) = Cli::from_args(args).command else { panic!("not a collection") };
    collect(&args).unwrap();
}

#[test]
fn the_states_are_those_of_the_reference() {
    let bytes = data::bytes("heads/target/golden.safetensors");
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = recorded_tokens(&golden);
    let floats = |name: &str| golden::floats(&golden.tensor(name).unwrap());
    let (taps, last) = (floats("aux_hidden_states"), floats("last_hidden_pre_norm"));
    let width = last.len() / tokens.len();
    let dir = tempfile::tempdir().unwrap();
    collected(dir.path(), &tokens[..PROMPT_LEN], tokens.len() - PROMPT_LEN);
    let list = fs::read_to_string(dir.path().join("data/samples.jsonl")).unwrap();
    let sample = list
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .find(|sample| sample["prompt"] == 0)
        .unwrap();
    assert_eq!(sample["token_ids"], json!(tokens));
    let file = format!("data/hidden_states/hs_{}.safetensors", sample["sample"]);
    let bytes = fs::read(dir.path().join(file)).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(recorded_tokens(&stored), tokens[..tokens.len() - 1]);
    let states = stored.tensor("hidden_states").unwrap();
    assert_eq!(states.shape(), [tokens.len() - 1, 4, width]);
    let values =
        states.data().as_chunks().0.iter().map(|&value| bf16::from_le_bytes(value).to_f32());
    let expected = taps
        .chunks(3 * width)
        .zip(last.chunks(width))
        .flat_map(|(taps, last)| [taps, last].concat());
    for (idx, (value, expected)) in values.zip(expected).enumerate() {
        let error = (value - expected).abs() / expected.abs().max(0.1);
        assert!(error <= ERROR, "value {idx} is {value}, the reference has {expected}");
    }
}
