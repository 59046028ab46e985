//! Model configurations, completed and checked.

use super::*;

fn completed(profile: Profile, mut config: Value) -> Result<Value> {
    contract(profile).complete(&mut config).map(|()| config)
}

fn entry<'a>(config: &'a Value, list: &str, name: &str) -> &'a Value {
    let entries = config[list].as_array().unwrap();
    entries.iter().find(|entry| entry["name"] == name).unwrap()
}

#[test]
fn a_bare_configuration_is_completed_and_then_passes_the_check() {
    for profile in [Profile::Text, Profile::Token, Profile::Vllm] {
        let bare = json!({ "name": "m", "backend": "spec", "input": [], "max_batch_size": 0 });
        assert!(contract(profile).check(&bare).is_err());
        let config = completed(profile, bare).unwrap();
        contract(profile).check(&config).unwrap();
        assert_eq!(config["model_transaction_policy"], json!({ "decoupled": true }));
        assert_eq!(config["max_batch_size"], if profile == Profile::Vllm { 0 } else { 8 });
        assert_eq!(completed(profile, config.clone()).unwrap(), config);
    }
}

#[test]
fn completed_inputs_are_optional_scalars_or_lists() {
    let config = completed(Profile::Text, json!({})).unwrap();
    assert_eq!(
        entry(&config, "input", "stop_words"),
        &json!({ "name": "stop_words", "data_type": "TYPE_STRING", "dims": [-1], "optional": true })
    );
    assert_eq!(
        entry(&config, "input", "seed"),
        &json!({ "name": "seed", "data_type": "TYPE_UINT64", "dims": [1], "optional": true })
    );
    assert_eq!(
        entry(&config, "output", "text_output"),
        &json!({ "name": "text_output", "data_type": "TYPE_STRING", "dims": [-1] })
    );
    let config = completed(Profile::Vllm, json!({})).unwrap();
    assert_eq!(entry(&config, "input", "text_input")["optional"], false);
    assert_eq!(entry(&config, "output", "num_input_tokens")["data_type"], "TYPE_UINT32");
}

#[test]
fn what_is_declared_is_kept() {
    let text = json!({ "name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"] });
    let config = completed(
        Profile::Text,
        json!({ "max_batch_size": 3, "input": [text.clone()],
            "model_transaction_policy": { "decoupled": false } }),
    )
    .unwrap();
    assert_eq!(entry(&config, "input", "text_input"), &text);
    assert_eq!(config["max_batch_size"], 3);
    assert_eq!(config["model_transaction_policy"], json!({ "decoupled": false }));
}

#[test]
fn scalars_may_be_reshaped_away_as_in_tensorrt_llms_templates() {
    let scalar = |dims: Value, shape: Value| {
        let input = json!({ "name": "request_output_len", "data_type": "TYPE_INT32", "dims": dims,
            "reshape": { "shape": shape } });
        completed(Profile::Token, json!({ "input": [input] }))
    };
    scalar(json!([1]), json!([])).unwrap();
    assert_eq!(
        refusal(scalar(json!([1]), json!([1, 1]))),
        "input 'request_output_len' is reshaped to [1,1], only dims [1] to [] are read"
    );
}

#[test]
fn counts_and_ids_may_be_declared_without_a_sign_as_in_older_templates() {
    let input = |name: &str| json!({ "input": [{ "name": name, "data_type": "TYPE_UINT32", "dims": [1], "optional": true }] });
    for name in ["max_tokens", "top_k", "beam_width", "end_id"] {
        let config = completed(Profile::Text, input(name)).unwrap();
        let declared = |entry: &&Value| entry["name"] == name;
        let entries: Vec<_> = config["input"].as_array().unwrap().iter().filter(declared).collect();
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0]["data_type"], "TYPE_UINT32");
    }
    for (name, expected) in [("seed", "UINT64"), ("temperature", "FP32"), ("stream", "BOOL")] {
        assert_eq!(
            refusal(completed(Profile::Text, input(name))),
            format!("input '{name}' is declared as \"TYPE_UINT32\", expected TYPE_{expected}")
        );
    }
}

#[test]
fn what_is_declared_otherwise_is_refused_with_both() {
    for (config, message) in [
        (
            json!({ "input": [{ "name": "top_k", "data_type": "TYPE_INT64", "dims": [1] }] }),
            "input 'top_k' is declared as \"TYPE_INT64\", expected TYPE_INT32",
        ),
        (
            json!({ "input": [{ "name": "top_k", "data_type": "TYPE_INT32", "dims": [-1] }] }),
            "input 'top_k' has dims [-1], expected [1]",
        ),
        (
            json!({ "input": [{ "name": "image", "data_type": "TYPE_STRING", "dims": [1] }] }),
            "input 'image' is not known",
        ),
        (
            json!({ "output": [{ "name": "logits", "data_type": "TYPE_FP32", "dims": [1] }] }),
            "output 'logits' is not known",
        ),
        (json!({ "input": 7 }), "input of the model configuration is no list"),
        (json!({ "input": [7] }), "input '' is not known"),
    ] {
        assert_eq!(refusal(completed(Profile::Text, config)), message);
    }
    assert_eq!(
        refusal(completed(Profile::Vllm, json!({ "max_batch_size": 4 }))),
        "max_batch_size is 4, profile vllm needs 0"
    );
}

/// Triton would add the tensors of controls to every request, which would then be refused, each of them.
#[test]
fn controls_of_a_sequence_batcher_are_refused_before_any_request() {
    let mut config = completed(Profile::Text, json!({})).unwrap();
    config["sequence_batching"] = json!({ "control_input": [] });
    contract(Profile::Text).check(&config).unwrap();
    config["sequence_batching"] = json!({ "control_input": [{ "name": "START" }] });
    assert_eq!(
        refusal(contract(Profile::Text).check(&config)),
        "sequence_batching: control inputs are not read, requests have nothing to do with each other"
    );
}

#[test]
fn a_check_names_what_is_missing() {
    let mut config = completed(Profile::Token, json!({})).unwrap();
    let outputs = config["output"].as_array_mut().unwrap();
    outputs.retain(|output| output["name"] != "sequence_length");
    let check = |config: &Value| contract(Profile::Token).check(config);
    assert_eq!(refusal(check(&config)), "output 'sequence_length' is not declared");
    config["input"] = json!([]);
    assert_eq!(refusal(check(&config)), "input 'input_ids' is not declared");
    config["max_batch_size"] = json!(0);
    assert_eq!(refusal(check(&config)), "max_batch_size is 0, at least 1 is needed");
    assert_eq!(
        refusal(contract(Profile::Text).check(&json!({ "max_batch_size": 1 }))),
        "input 'text_input' or 'messages' is not declared"
    );
}
