//! `collect`: what it stores, that it goes on where it was, and what it refuses.

use super::support::{Checkpoint, MAX_POSITION, built, names_in, refused, succeeds};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A built target, and room beside it.
struct Target(TempDir);

impl Target {
    fn new() -> Self {
        Self(built(&Checkpoint::new(5, 32, 64, 4), &["--dtype", "fp32"]))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a prompt file.
    fn prompts(&self, lines: &[&str]) -> PathBuf {
        let path = self.path("prompts.jsonl");
        fs::write(&path, lines.join("\n")).unwrap();
        path
    }

    /// The command over the prompts, into `data`.
    fn args(&self, options: &[&str]) -> Vec<String> {
        let text = |name| self.path(name).to_str().unwrap().to_string();
        let mut args = vec!["collect".into(), "--target".into(), text("model")];
        args.extend(["--prompts".into(), text("prompts.jsonl"), "--output".into(), text("data")]);
        args.extend(["--max-tokens", "6", "--held-out", "2"].map(String::from));
        args.extend(options.iter().map(|option| option.to_string()));
        args
    }
}

fn samples(data: &Path) -> Vec<Value> {
    let text = fs::read_to_string(data.join("samples.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const LAYERS: [&str; 2] = ["--layers", "1,2,3"];

#[test]
fn every_kind_of_prompt_is_answered_as_try_answers_it() {
    let target = Target::new();
    target.prompts(&[
        r#"{"turns": ["ab", "not asked"]}"#,
        "",
        r#"{"task_id": "x", "prompt": "cd\n"}"#,
        r#"{"messages": [{"role": "system", "content": "e"}, {"role": "user", "content": "f"}]}"#,
        "plain text",
        r#"{"prompt_ids": [7, 8, 9]}"#,
    ]);
    let said = succeeds(&target.args(&LAYERS));
    assert!(said.contains("5 answers") && said.lines().count() == 1, "{said}");
    let mut found = samples(&target.path("data"));
    found.sort_by_key(|sample| sample["prompt"].as_u64());
    let prompts = ["ab", "cd\n", "e\nf", "plain text", "\u{7}\u{8}\t"];
    for (idx, (sample, prompt)) in found.iter().zip(prompts).enumerate() {
        assert_eq!(sample["held_out"], json!(idx % 2 == 1), "{sample}");
        assert_eq!(sample["prompt_tokens"], json!(prompt.len()), "{sample}");
        let ids: Vec<String> = prompt.bytes().map(|byte| byte.to_string()).collect();
        let (model, ids) = (target.path("model"), ids.join(","));
        let options = ["--prompt-ids", &ids, "--max-tokens", "6", "--json"];
        let mut args = vec!["try", model.to_str().unwrap()];
        args.extend(options);
        let tried: Value = serde_json::from_str(&succeeds(&args)).unwrap();
        let text: Vec<Value> = [&tried["prompt_ids"], &tried["output_ids"]]
            .iter()
            .flat_map(|ids| ids.as_array().unwrap().clone())
            .collect();
        assert_eq!(sample["token_ids"], json!(text));
        let number = sample["sample"].as_u64().unwrap();
        let file = target.path("data").join(format!("hidden_states/hs_{number}.safetensors"));
        let bytes = fs::read(file).unwrap();
        let header = String::from_utf8_lossy(&bytes[8..]).split("}}").next().unwrap().to_string();
        let shape = format!("[{},4,32]", text.len() - 1);
        assert!(header.contains(&shape) && header.contains("BF16"), "{shape} in {header}");
    }
    let about: Value =
        serde_json::from_slice(&fs::read(target.path("data/collected.json")).unwrap()).unwrap();
    assert_eq!(about["layers"], json!([1, 2, 3, 4]));
}

#[test]
fn a_folder_that_was_begun_is_gone_on_with() {
    let target = Target::new();
    target.prompts(&["one", "two", "three"]);
    let with = |options: &[&str]| target.args(&[&LAYERS, options].concat());
    succeeds(&with(&["--max-gib", "0"]));
    let data = target.path("data");
    let first = samples(&data);
    assert_eq!(first.len(), 1, "it stops once it has as much as it may");
    succeeds(&with(&["--answers", "3"]));
    let all = samples(&data);
    assert_eq!(all[0], first[0]);
    let mut which: Vec<_> = all
        .iter()
        .map(|sample| (sample["prompt"].as_u64().unwrap(), sample["answer"].as_u64().unwrap()))
        .collect();
    which.sort_unstable();
    // The second prompt is held out: it is answered once.
    assert_eq!(which, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]);
    let answers = |answer: u64| all.iter().find(|s| s["prompt"] == 0 && s["answer"] == answer);
    let texts = [0, 1, 2].map(|answer| answers(answer).unwrap()["token_ids"].clone());
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "answers are drawn: {texts:?}");
    let numbers: Vec<String> = (0..all.len()).map(|n| format!("hs_{n}.safetensors")).collect();
    assert_eq!(names_in(&data.join("hidden_states")), numbers);
    let again = succeeds(&with(&["--answers", "3"]));
    assert!(again.contains("nothing was left to do"), "{again}");
    refused(&with(&["--temperature", "0.5"]), &["data", "temperature", "0.8", "there", "0.5"]);
}

#[test]
fn answers_end_where_the_engine_has_no_room_for_more() {
    let target = Target::new();
    let prompt = |len: usize| format!(r#"{{"prompt_ids": {:?}}}"#, vec![7; len]);
    let lens = [MAX_POSITION - 2, MAX_POSITION - 1, MAX_POSITION, 3];
    let lines = lens.map(prompt);
    target.prompts(&lines.each_ref().map(String::as_str));
    let said = succeeds(&target.args(&LAYERS));
    assert!(said.contains("3 answers"), "{said}");
    let mut found = samples(&target.path("data"));
    found.sort_by_key(|sample| sample["prompt"].as_u64());
    let lens: Vec<usize> =
        found.iter().map(|sample| sample["token_ids"].as_array().unwrap().len()).collect();
    assert_eq!(lens, [MAX_POSITION, MAX_POSITION, 9]);
}

#[test]
fn what_cannot_be_collected_is_named() {
    let target = Target::new();
    target.prompts(&["fine"]);
    refused(&target.args(&[]), &["model of 4 layers", "[2, 2, 1]", "--layers"]);
    refused(&target.args(&["--layers", "3,1"]), &["--layers [3, 1]", "ascending", "below 4"]);
    refused(&target.args(&["--layers", "4"]), &["--layers [4]", "below 4"]);
    for (line, part) in [
        (r#"{"question": "?"}"#, "none of `messages`"),
        (r#"{"turns": []}"#, "`turns` is empty"),
        (r#"{"prompt": ""}"#, "no token"),
        (r#"{"prompt_ids": []}"#, "`prompt_ids` is empty"),
    ] {
        target.prompts(&["fine", line]);
        refused(&target.args(&LAYERS), &["prompts.jsonl line 2", part]);
    }
    target.prompts(&["", " "]);
    refused(&target.args(&LAYERS), &["prompts.jsonl has no prompt"]);
    target.prompts(&[r#"{"prompt_ids": [100000]}"#]);
    refused(&target.args(&LAYERS), &["100000"]);
    fs::write(target.path("data/samples.jsonl"), "{}\n").unwrap();
    target.prompts(&["fine"]);
    fs::remove_file(target.path("data/collected.json")).unwrap();
    refused(&target.args(&LAYERS), &["samples.jsonl", "line 1"]);
}
