//! `profile`: what steps take goes into the engines, which stay what they were.

use super::support::{Checkpoint, build_args, built, misused, names_in, refused, succeeds};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn manifest(engine: &Path) -> Value {
    let shown = succeeds(&["inspect".as_ref(), "--json".as_ref(), engine.as_os_str()]);
    serde_json::from_str(&shown).unwrap()
}

/// Rows of the engine's table, after a look at its times.
fn measured_rows(engine: &Path) -> Vec<u64> {
    let costs = &manifest(engine)["costs"];
    let rows: Vec<u64> =
        costs["rows"].as_array().unwrap().iter().map(|row| row.as_u64().unwrap()).collect();
    let times = costs["step_ms"].as_array().unwrap();
    assert_eq!(times.len(), rows.len());
    assert!(times.iter().all(|ms| ms.as_f64().unwrap() > 0.0), "{times:?}");
    rows
}

/// The manifest without what a profile adds, and without where it moves the sections to.
fn without_costs(engine: &Path) -> Value {
    let mut manifest = manifest(engine);
    manifest.as_object_mut().unwrap().remove("costs");
    for section in manifest["sections"].as_array_mut().unwrap() {
        section.as_object_mut().unwrap().remove("offset");
    }
    manifest
}

#[test]
fn a_pair_gets_the_times_of_both_and_stays_what_it_was() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    Checkpoint::new(2, 16, 32, 1).write(&path("other"));
    let model = path("model");
    let draft = path("other").to_str().unwrap().to_string();
    succeeds(&build_args(
        &path("checkpoint"),
        &model,
        &["--draft", &draft, "--max-batch-size", "5"],
    ));
    let config = model.join("config.pbtxt");
    let own = fs::read_to_string(&config).unwrap() + "# mine\n";
    fs::write(&config, &own).unwrap();
    let engines = ["target.engine", "draft.engine"].map(|name| model.join("1").join(name));
    let before = engines.each_ref().map(|engine| without_costs(engine));
    let names = names_in(&model.join("1"));
    let shown =
        succeeds(&["profile".as_ref(), model.as_os_str(), "--rounds".as_ref(), "1".as_ref()]);
    assert!(shown.contains("verification") && shown.contains("a draft pass"), "{shown}");
    assert!(engines.each_ref().map(|engine| without_costs(engine)) == before, "other engines");
    assert_eq!(names_in(&model.join("1")), names);
    assert_eq!(fs::read_to_string(&config).unwrap(), own);
    // Rows of one sequence that verifies up to 8 drafts, of up to five sequences, and of four with drafts.
    assert_eq!(measured_rows(&engines[0]), [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 28, 32, 36]);
    assert_eq!(measured_rows(&engines[1]), [1, 4]);
    let costs = &manifest(&engines[1])["costs"];
    assert!(costs["prompt_token_ms"].as_f64().unwrap() > 0.0, "{costs}");
    let rates = costs["acceptance"].as_array().unwrap();
    assert!(rates.iter().all(|rate| (0.0..1.0).contains(&rate.as_f64().unwrap())), "{costs}");
    assert!(!rates.is_empty() && rates.len() <= 4, "{costs}");
    succeeds(&["verify".as_ref(), model.as_os_str()]);
    let inspected = succeeds(&["inspect".as_ref(), model.as_os_str()]);
    assert!(inspected.contains("ms for 1 row(s), "), "{inspected}");
}

/// What 16 sequences draft is compared with verification of as many rows, which nothing else measures.
#[test]
fn drafts_of_many_sequences_have_their_times() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let (checkpoint, model) = (dir.path().join("checkpoint"), dir.path().join("model"));
    let draft = checkpoint.to_str().unwrap();
    succeeds(&build_args(&checkpoint, &model, &["--draft", draft, "--max-batch-size", "16"]));
    succeeds(&["profile".as_ref(), model.as_os_str(), "--rounds".as_ref(), "1".as_ref()]);
    let engines = ["target.engine", "draft.engine"].map(|name| model.join("1").join(name));
    assert_eq!(measured_rows(&engines[0]).last(), Some(&80));
    assert_eq!(measured_rows(&engines[1]), [1, 4, 16]);
}

#[test]
fn what_drafts_without_passes_has_a_table_of_rows_alone() {
    let dir = built(
        &Checkpoint::tiny(1),
        &["--draft", "ngram", "--max-draft-len", "2", "--max-batch-size", "1"],
    );
    let model = dir.path().join("model");
    let args = [
        "profile".as_ref(),
        model.as_os_str(),
        "--rounds".as_ref(),
        "1".as_ref(),
        "--quiet".as_ref(),
    ];
    assert_eq!(succeeds(&args), "");
    assert_eq!(measured_rows(&model.join("1/target.engine")), [1, 2, 3]);
}

#[test]
fn what_drafts_with_the_targets_layers_has_its_times_in_the_target() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let path = |name: &str| dir.path().join(name);
    fs::write(path("skip_layers.json"), r#"{"attention": [1], "mlp": [1]}"#).unwrap();
    let (model, skip) = (path("skipping"), format!("skip:{}", path("skip_layers.json").display()));
    let options = ["--draft", &skip, "--max-batch-size", "5", "--max-draft-len", "3"];
    succeeds(&build_args(&path("checkpoint"), &model, &options));
    let shown =
        succeeds(&["profile".as_ref(), model.as_os_str(), "--rounds".as_ref(), "1".as_ref()]);
    assert!(shown.contains("verification") && shown.contains("a draft pass"), "{shown}");
    let engine = model.join("1/target.engine");
    assert_eq!(measured_rows(&engine), [1, 2, 3, 4, 5, 8, 12, 16]);
    let drafter = &manifest(&engine)["drafter"];
    assert_eq!(drafter["layers"], json!({ "attention": [1], "mlp": [1] }));
    let costs = &drafter["costs"];
    assert_eq!(costs["rows"], json!([1, 4]));
    assert_eq!(costs["prompt_token_ms"].as_f64(), Some(0.0), "the target has read it");
    assert!(!costs["acceptance"].as_array().unwrap().is_empty(), "{costs}");
    succeeds(&["verify".as_ref(), model.as_os_str()]);
}

#[test]
fn what_is_no_model_folder_is_refused() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let checkpoint = dir.path().join("checkpoint");
    refused(
        &["profile".as_ref(), checkpoint.as_os_str()],
        &["no version folder with target.engine"],
    );
    let model = dir.path().join("model");
    misused(
        &["profile".as_ref(), model.as_os_str(), "--rounds".as_ref(), "0".as_ref()],
        &["--rounds"],
    );
}
