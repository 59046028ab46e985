//! What `inspect`, `verify` and `plan` say of good input.

use super::support::{
    Checkpoint, MAX_POSITION, VOCAB_SIZE, build_args, built, names_in, refused, succeeds,
};
use serde_json::Value;
use spec_core::engine::Manifest;
use std::fs;

fn has_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
}

/// A tiny target with a tiny draft of other weights.
fn pair() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    Checkpoint::tiny(1).write(&path("target"));
    Checkpoint::new(2, 16, 32, 1).write(&path("draft"));
    let draft = path("draft");
    let options = ["--draft", draft.to_str().unwrap(), "--max-draft-len", "4"];
    succeeds(&build_args(&path("target"), &path("model"), &options));
    dir
}

#[test]
fn inspect_tells_what_a_pair_is() {
    let dir = pair();
    let model = dir.path().join("model");
    let text = succeeds(&["inspect".as_ref(), model.as_os_str()]);
    has_all(
        &text,
        &[
            "target.engine: a target",
            "draft.engine: a draft",
            "Llama: 2 layers of 32 (mlp 64), 4 heads of 8 over 2",
            "max_draft_len 4",
            "weights fp8, embedding and head bf16, kv fp16",
            "draft.engine, identity ",
            "all weights",
            "kv cache, a token",
        ],
    );
    // 8 values of a key and 16 of a padded value, 2 layers, 2 heads, 2 bytes.
    has_all(&text, &["192 B"]);
    let json = succeeds(&["inspect".as_ref(), model.as_os_str(), "--json".as_ref()]);
    let json: Value = serde_json::from_str(&json).unwrap();
    let manifest = |role: &str| serde_json::from_value::<Manifest>(json[role].clone()).unwrap();
    Manifest::check_pair(&manifest("target"), &manifest("draft")).unwrap();
    let file = model.join("1/draft.engine");
    let alone = succeeds(&["inspect".as_ref(), file.as_os_str(), "--json".as_ref()]);
    assert_eq!(serde_json::from_str::<Manifest>(&alone).unwrap(), manifest("draft"));
}

#[test]
fn verify_reads_every_hash_and_compares_tokens() {
    let dir = pair();
    let model = dir.path().join("model");
    let line = succeeds(&["verify".as_ref(), model.as_os_str()]);
    assert_eq!(line.lines().count(), 1, "{line}");
    has_all(&line, &["have their hashes; 8 greedy tokens are the same with draft length 0 and 4"]);
    for file in ["target.engine", "draft.engine"] {
        let file = model.join("1").join(file);
        has_all(&succeeds(&["verify".as_ref(), file.as_os_str()]), &["8 greedy tokens"]);
    }
}

#[test]
fn verify_runs_look_ups_and_plain_models_too() {
    let dir = built(&Checkpoint::tiny(1), &["--draft", "ngram"]);
    let model = dir.path().join("model");
    let line = succeeds(&["verify".as_ref(), model.as_os_str()]);
    has_all(&line, &["the same with draft length 0 and 8"]);
    assert!(!line.contains("(0 drafted"), "the look-up never engaged: {line}");
    let dir = built(&Checkpoint::tiny(1), &["--draft", "ngram:min=1,max=4"]);
    let text = succeeds(&["inspect".as_ref(), dir.path().join("model").as_os_str()]);
    has_all(&text, &["look-up of the last 4 to 1 tokens"]);
    let dir = built(&Checkpoint::tiny(1), &["--draft", "suffix:tokens=1000"]);
    let model = dir.path().join("model");
    let text = succeeds(&["inspect".as_ref(), model.as_os_str()]);
    has_all(&text, &["look-up in the text and in 1000 tokens of earlier ones"]);
    let line = succeeds(&["verify".as_ref(), model.as_os_str()]);
    has_all(&line, &["the same with draft length 0 and 8"]);
    assert!(!line.contains("(0 drafted"), "the look-up never engaged: {line}");
    let dir = built(&Checkpoint::tiny(1), &["--max-seq-len", "4"]);
    let model = dir.path().join("model");
    has_all(&succeeds(&["verify".as_ref(), model.as_os_str()]), &["without a drafter"]);
}

#[test]
fn scales_of_keys_and_values_are_found_unless_told_otherwise() {
    let own = tempfile::tempdir().unwrap();
    let prompts = own.path().join("prompts.txt");
    fs::write(&prompts, "a b c\n{\"prompt\": \"c b a\"}\n").unwrap();
    let of_file = prompts.to_str().unwrap().to_string();
    for (calibration, shown) in [
        (&[][..], "keys 2^"),
        (&["--kv-calibration", &of_file], "keys 2^"),
        (&["--kv-calibration", "none"], "all 1"),
    ] {
        let options = [&["--draft", "ngram", "--kv-dtype", "fp8"], calibration].concat();
        let dir = built(&Checkpoint::tiny(1), &options);
        let model = dir.path().join("model");
        let text = succeeds(&["inspect".as_ref(), model.as_os_str()]);
        let line = text.lines().find(|line| line.contains("kv scales")).unwrap();
        assert!(line.contains(shown), "{line}");
        has_all(
            &succeeds(&["verify".as_ref(), model.as_os_str()]),
            &["have their hashes", "the same with draft length 0 and 8"],
        );
        assert!(!names_in(&model.join("1")).contains(&"calibration".into()), "it is in the way");
    }
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::tiny(1).write(&dir.path().join("checkpoint"));
    let options = ["--kv-dtype", "fp8", "--kv-calibration", "nowhere.txt"];
    let args = build_args(&dir.path().join("checkpoint"), &dir.path().join("model"), &options);
    refused(&args, &["reading nowhere.txt"]);
    let options = ["--kv-calibration", "none"];
    let args = build_args(&dir.path().join("checkpoint"), &dir.path().join("model"), &options);
    refused(&args, &["--kv-calibration without keys and values in fp8"]);
    assert!(!dir.path().join("model").exists(), "nothing is left");
}

#[test]
fn plan_tells_sizes_capacity_and_speeds() {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::tiny(1).write(dir.path());
    let path = dir.path().to_str().unwrap();
    let args = ["plan", "--target", path, "--draft", path, "--max-draft-len", "2"];
    let text = succeeds(&[&args[..], &["--bandwidth", "10", "--kv-memory", "3"]].concat());
    // 384 bytes a token: 2 x 192; 6 KiB a page of both, 512 pages; 8 pages a sequence of 128.
    assert_eq!((MAX_POSITION, VOCAB_SIZE), (128, 264));
    has_all(
        &text,
        &[
            "target",
            "draft",
            "3 MiB of keys and values hold 8,192 tokens: 64 sequences of max_seq_len 128",
            "10.0 GB/s (given)",
            "are left, of which KV caches get 25 %",
            "break-even acceptance",
            "tokens/s at 0.8",
        ],
    );
    let rows = text.lines().filter(|line| line.starts_with(['0', '1', '2'])).count();
    assert!(rows >= 3, "{text}");
    has_all(&succeeds(&args), &["GB/s (measured)"]);
}
