//! The tables themselves, and the reference that is written from them.

use super::super::reference;
use super::*;
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn a_name_stands_for_one_thing() {
    for profile in [Profile::Text, Profile::Token, Profile::Vllm] {
        let inputs = profile.inputs().iter().chain(profile.parameters());
        let names: Vec<&str> = inputs.map(|input| input.name).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        let outputs: Vec<&str> = profile.outputs().iter().map(|output| output.name).collect();
        assert_eq!(outputs.iter().collect::<BTreeSet<_>>().len(), outputs.len());
    }
}

#[test]
fn the_cores_fields_are_spelled_as_inputs_of_the_profile() {
    // What the core names in errors that a request can bring about.
    const FIELDS: [&str; 15] = [
        "prompt",
        "max_tokens",
        "draft_len",
        "stop",
        "stop_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "given_draft",
    ];
    for profile in [Profile::Text, Profile::Token, Profile::Vllm] {
        for field in FIELDS {
            let only_tokens = field == "given_draft" && profile != Profile::Token;
            let only_text = field == "stop" && profile == Profile::Token;
            let mut inputs = profile.inputs().iter().chain(profile.parameters());
            let known = inputs.any(|input| input.name == profile.spell(field));
            assert!(known || only_tokens || only_text, "{profile:?} {field}");
        }
    }
}

/// With SPEC_WRITE_REFERENCE set, writes it.
#[test]
fn the_users_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("CONTRACT.md");
    if std::env::var_os("SPEC_WRITE_REFERENCE").is_some() {
        std::fs::write(&path, reference()).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == reference(),
        "CONTRACT.md is out of date: run this test once with SPEC_WRITE_REFERENCE=1"
    );
}
