//! `draft`: a target that is built gets another drafter, and stays what it is.

use super::support::{
    Checkpoint, MAX_POSITION, build_args, built, misused, names_in, refused, succeeds, tokenizer,
};
use std::fs;
use std::path::Path;

/// `spec-build draft` for the model folder.
fn args(model: &Path, draft: &str, options: &[&str]) -> Vec<String> {
    let mut args = vec!["draft".into(), "--target".into(), model.to_str().unwrap().into()];
    args.extend(["--draft".into(), draft.into(), "--quiet".into()]);
    args.extend(options.iter().map(|option| option.to_string()));
    args
}

fn engines(model: &Path) -> Vec<(String, Vec<u8>)> {
    let names = names_in(&model.join("1")).into_iter();
    names.map(|name| (name.clone(), fs::read(model.join("1").join(name)).unwrap())).collect()
}

#[test]
fn it_gives_what_a_build_with_that_drafter_gives() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    let model = path("model");
    Checkpoint::new(2, 16, 32, 1).write(&path("other"));
    let plain = engines(&model);
    let other = path("other").to_str().unwrap().to_string();
    let layers = path("skip_layers.json");
    fs::write(&layers, r#"{"any-model": {"attention": [1], "mlp": [0, 1]}}"#).unwrap();
    let skip = format!("skip:{}", layers.display());
    for (idx, drafter) in
        ["ngram:max=5,min=4", &other, "suffix:tokens=77", &skip, "none"].iter().enumerate()
    {
        let whole = path(&format!("whole-{idx}"));
        succeeds(&build_args(&path("checkpoint"), &whole, &["--draft", drafter]));
        assert_eq!(succeeds(&args(&model, drafter, &[])), "");
        assert!(engines(&model) == engines(&whole), "{drafter}");
    }
    assert!(engines(&model) == plain, "without a drafter it is what it was");
    assert_eq!(names_in(&model), ["1", "config.pbtxt"]);
}

#[test]
fn a_drafters_head_may_have_a_format_of_its_own() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    let (checkpoint, model) = (path("checkpoint"), path("with"));
    let own = ["--draft", checkpoint.to_str().unwrap(), "--draft-head-dtype", "fp8"];
    succeeds(&build_args(&checkpoint, &model, &own));
    for (file, head) in [("target.engine", "head bf16"), ("draft.engine", "head fp8")] {
        let shown = succeeds(&["inspect".as_ref(), model.join("1").join(file).as_os_str()]);
        assert!(shown.contains(&format!("embedding and {head},")), "{file}: {shown}");
    }
    for (option, value) in
        [("--draft-head-dtype", "fp8"), ("--draft-dtype", "fp8"), ("--draft-device", "cpu")]
    {
        let options = ["--draft", "ngram", option, value];
        refused(&build_args(&checkpoint, &path("other"), &options), &[option, "no model"]);
        refused(&args(&model, "ngram", &[option, value]), &[option, "no model"]);
    }
}

#[test]
fn a_drafter_may_draft_some_tokens_alone() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    let (checkpoint, model) = (path("checkpoint"), path("model"));
    let draft = checkpoint.to_str().unwrap();
    succeeds(&build_args(&checkpoint, &path("with"), &["--draft", draft, "--draft-vocab", "9"]));
    succeeds(&args(&model, draft, &["--draft-vocab", "9"]));
    assert!(engines(&model) == engines(&path("with")));
    for (file, has) in [("target.engine", false), ("draft.engine", true)] {
        let shown = succeeds(&["inspect".as_ref(), model.join("1").join(file).as_os_str()]);
        assert_eq!(shown.contains("drafts 9 of them"), has, "{file}: {shown}");
    }
    succeeds(&["verify".as_ref(), model.as_os_str()]);
    succeeds(&["try", model.to_str().unwrap(), "--prompt-ids", "3,4,5", "--max-tokens", "9"]);
    // Scales of its keys and values are found with all of its tokens.
    let scaled = ["--draft", draft, "--draft-vocab", "9", "--kv-dtype", "fp8"];
    succeeds(&build_args(&checkpoint, &path("scaled"), &scaled));
    succeeds(&["verify".as_ref(), path("scaled").as_os_str()]);

    let text = path("text.txt");
    fs::write(&text, "").unwrap();
    let of_text = format!("9:{}", text.display());
    fs::create_dir(path("answers")).unwrap();
    fs::write(path("answers/samples.jsonl"), "{\"prompt_tokens\":1,\"token_ids\":[3,99999]}\n")
        .unwrap();
    let of_answers = format!("9:{}", path("answers").display());
    for (drafter, vocab, parts) in [
        (draft, "9999", &["--draft-vocab 9999", "expected 2 to"][..]),
        (draft, "1", &["--draft-vocab 1", "expected 2 to"]),
        (draft, of_text.as_str(), &["text.txt", "it has no token"]),
        (draft, of_answers.as_str(), &["answers", "token 99999 of"]),
        (draft, "9:nowhere", &["nowhere", "No such file"]),
        ("ngram", "9", &["--draft-vocab", "no model drafts"]),
    ] {
        refused(&args(&model, drafter, &["--draft-vocab", vocab]), parts);
    }
    misused(&args(&model, draft, &["--draft-vocab", "many"]), &["no number of tokens"]);
}

#[test]
fn what_its_owner_has_set_stays() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let model = dir.path().join("model");
    let config = model.join("config.pbtxt");
    let own = fs::read_to_string(&config).unwrap() + "# mine\n";
    fs::write(&config, &own).unwrap();
    fs::rename(model.join("1"), model.join("7")).unwrap();
    succeeds(&args(&model, "ngram", &["--max-draft-len", "3"]));
    assert_eq!(fs::read_to_string(&config).unwrap(), own);
    assert_eq!(names_in(&model), ["7", "config.pbtxt"]);
    let shown = succeeds(&["inspect".as_ref(), model.as_os_str()]);
    assert!(
        shown.contains("max_draft_len 3") && shown.contains("look-up of the last 3 to 2 tokens"),
        "{shown}"
    );
}

#[test]
fn what_is_refused_changes_nothing() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    let model = path("model");
    let before = engines(&model);
    let mut foreign = Checkpoint::tiny(3);
    foreign.tokenizer = tokenizer("<|other|>");
    foreign.write(&path("foreign"));
    let mut short = Checkpoint::tiny(3);
    short.config["max_position_embeddings"] = (MAX_POSITION / 2).into();
    short.write(&path("short"));
    let text = |name: &str| path(name).to_str().unwrap().to_string();
    refused(&args(&model, &text("foreign"), &[]), &["do not share a vocabulary", "<|other|>"]);
    refused(&args(&model, &text("short"), &[]), &["built for 128 positions", "the draft sees 64"]);
    refused(&args(&model, &text("nothing"), &[]), &["nothing"]);
    refused(&args(&model, "ngram", &["--max-draft-len", "0"]), &["--max-draft-len 0"]);
    refused(&args(&model, "none", &["--max-draft-len", "2"]), &["without a drafter"]);
    refused(&args(&path("checkpoint"), "ngram", &[]), &["no version folder with target.engine"]);
    misused(&args(&model, "ngram:max=0", &[]), &["1 <= min"]);
    assert!(engines(&model) == before);
    assert_eq!(names_in(&model), ["1", "config.pbtxt"]);
}

#[test]
fn a_damaged_target_is_not_copied() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let model = dir.path().join("model");
    let file = model.join("1/target.engine");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).unwrap();
    refused(&args(&model, "ngram", &[]), &["was damaged", "identity"]);
    assert_eq!(fs::read(&file).unwrap(), bytes);
    assert_eq!(names_in(&model), ["1", "config.pbtxt"]);
}

/// Prompts that fit into the tiny model, and the options that search on them.
fn prompts(dir: &Path) -> Vec<String> {
    let file = dir.join("prompts.txt");
    fs::write(&file, "def f(x):\nThe sky is\nOnce upon a time\n1 2 3 4\n").unwrap();
    let options = ["--skip-prompts", file.to_str().unwrap(), "--skip-minutes", "0"];
    options.map(String::from).into()
}

#[test]
fn layers_to_skip_are_searched_for_a_build_and_for_a_target_that_is_built() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    let options = prompts(dir.path());
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let shown = |model: &Path| succeeds(&["inspect".as_ref(), model.as_os_str()]);
    let drafter = |model: &Path| {
        let shown = shown(model);
        let line = shown.lines().find(|line| line.contains("drafter")).unwrap().to_string();
        assert!(line.contains("the target without attention of layers"), "{line}");
        line
    };
    let build: Vec<&str> = ["--draft", "skip"].into_iter().chain(options.iter().copied()).collect();
    succeeds(&build_args(&path("checkpoint"), &path("whole"), &build));
    succeeds(&args(&path("model"), "skip", &options));
    assert_eq!(drafter(&path("model")), drafter(&path("whole")));
    assert_eq!(names_in(&path("whole").join("1")), names_in(&path("model").join("1")));
    succeeds(&["verify".as_ref(), path("model").as_os_str()]);
}

#[test]
fn layers_to_skip_that_there_are_not_are_refused() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    let model = path("model");
    let layers = path("skip_layers.json");
    let skip = format!("skip:{}", layers.display());
    let two = r#"{"a": {"attention": [], "mlp": [1]}, "b": {"attention": [5], "mlp": []}}"#;
    fs::write(&layers, two).unwrap();
    refused(&args(&model, &skip, &[]), &["skip_layers.json", "--skip-entry", "a, b"]);
    refused(&args(&model, &skip, &["--skip-entry", "b"]), &["attention of layer 5", "below 2"]);
    let minutes = ["--skip-entry", "a", "--skip-minutes", "1"];
    refused(&args(&model, &skip, &minutes), &["--skip-minutes", "not searched"]);
    refused(&args(&model, "skip", &["--skip-entry", "a"]), &["--skip-entry without a file"]);
    for minutes in ["inf", "NaN", "-1", "1e300"] {
        misused(&args(&model, "skip", &[&format!("--skip-minutes={minutes}")]), &["0 to 10080"]);
    }
    let alone = path("one.txt");
    fs::write(&alone, "def f(x):\n").unwrap();
    let alone = ["--skip-prompts", alone.to_str().unwrap()];
    refused(&args(&model, "skip", &alone), &["expected 2 at least", "--skip-prompts"]);
    refused(&args(&model, "ngram", &["--skip-minutes", "1"]), &["without --draft skip"]);
    refused(&args(&model, "skip:nothing.json", &[]), &["nothing.json"]);
    succeeds(&args(&model, &skip, &["--skip-entry", "a"]));
}
