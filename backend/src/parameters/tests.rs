//! Configurations as Triton gives them.

use super::*;
use serde_json::json;
use triton_backend::Code;

fn parse(parameters: &[(&str, &str)]) -> Result<Settings> {
    let parameters: serde_json::Map<String, Value> = parameters
        .iter()
        .map(|(key, value)| (key.to_string(), json!({ "string_value": value })))
        .collect();
    Settings::parse(&json!({ "parameters": parameters }))
}

fn refusal(parameters: &[(&str, &str)]) -> (Code, String) {
    let Error { code, message } = parse(parameters).unwrap_err();
    (code, message)
}

#[test]
fn without_parameters_the_defaults_hold() {
    assert_eq!(Settings::parse(&json!({ "name": "m" })).unwrap(), Settings::default());
}

#[test]
fn every_setting_is_read() {
    let settings = parse(&[
        ("profile", "token"),
        ("threads", "3"),
        ("pin_threads", "off"),
        ("isa", "portable"),
        ("draft_len", "0"),
        ("lookup", "suffix"),
        ("ngram_branches", "2"),
        ("draft_branches", "3"),
        ("draft_tree_tokens", "9"),
        ("kv_cache_free_gpu_mem_fraction", "0.5"),
        ("max_tokens_in_paged_kv_cache", "4096"),
        ("batch_scheduler_policy", "max_utilization"),
        ("max_queue_size", "7"),
        ("enable_kv_cache_reuse", "False"),
        ("enable_chunked_context", "TRUE"),
        ("max_num_tokens", "512"),
        ("exclude_input_in_output", "0"),
        ("default_max_tokens", "32"),
        ("gpu_device_ids", "2; 0"),
        ("draft_gpu", "1"),
        ("prefill", "cublaslt"),
        ("launch_ahead", "false"),
        ("default_temperature", "0.5"),
        ("default_top_k", "4"),
        ("default_top_p", "0.5"),
        ("default_min_p", "0.25"),
        ("default_repetition_penalty", "1.5"),
        ("default_presence_penalty", "-1"),
        ("default_frequency_penalty", "1"),
        ("default_seed", "18446744073709551615"),
        ("request_timeout_ms", "1000"),
        ("response_statistics", "all"),
        ("verify_engine", "1"),
        ("max_running", "5"),
        ("when_full", "hold_back"),
        ("when_too_long", "refuse"),
        ("temperature_alone", "greedy"),
        ("report_kv_cache_reuse", "false"),
        ("drain_timeout_ms", "10"),
        ("gpt_model_type", "inflight_fused_batching"),
        ("max_beam_width", "1"),
        ("FORCE_CPU_ONLY_INPUT_TENSORS", "no"),
    ]);
    let expected = Settings {
        profile: Profile::Token,
        decoupled: false,
        instance_count: 1,
        max_running: Some(5),
        threads: Some(3),
        pin_threads: Pinning::Off,
        isa: Some(Isa::PORTABLE),
        draft_len: Some(0),
        lookup: Some(Lookup::Suffix),
        ngram_branches: 2,
        draft_branches: 3,
        draft_tree_tokens: Some(9),
        kv_memory_fraction: Some(0.5),
        max_kv_tokens: Some(4096),
        policy: Policy::MaxUtilization,
        max_queue_size: 7,
        when_full: WhenFull::HoldBack,
        when_too_long: WhenTooLong::Refuse,
        temperature_alone: TemperatureAlone::Greedy,
        report_reuse: false,
        queue: QueuePolicy::default(),
        kv_reuse: false,
        max_num_tokens: Some(512),
        gpus: vec![2, 0],
        draft_gpu: Some(1),
        prefill: Some(Prefill::CublasLt),
        launch_ahead: false,
        exclude_prompt: Some(false),
        default_max_tokens: Some(32),
        sampling: SamplingDefaults {
            temperature: Some(0.5),
            top_k: Some(4),
            top_p: Some(0.5),
            min_p: Some(0.25),
            repetition_penalty: Some(1.5),
            presence_penalty: Some(-1.0),
            frequency_penalty: Some(1.0),
            seed: Some(u64::MAX),
        },
        request_timeout_ms: 1000,
        response_statistics: ResponseStatistics::All,
        verify_engine: true,
        drain_timeout_ms: 10,
    };
    assert_eq!(settings.unwrap(), expected);
}

#[test]
fn unfilled_templates_are_unset() {
    let settings = parse(&[
        ("threads", "${threads}"),
        ("gpu_device_ids", "${gpu_device_ids}"),
        ("draft_len", " "),
    ]);
    assert_eq!(settings.unwrap(), Settings::default());
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest() {
    for (key, nearest) in [
        ("thread", "threads"),
        ("draft_length", "draft_len"),
        ("Profile", "profile"),
        ("default_topp", "default_top_p"),
    ] {
        let expected = format!("parameter '{key}' is not known, the nearest is '{nearest}'");
        assert_eq!(refusal(&[(key, "1")]), (Code::InvalidArg, expected));
    }
    // Even where a template left it unfilled, a misspelling is one.
    assert_eq!(refusal(&[("thread", "${x}")]).0, Code::InvalidArg);
}

#[test]
fn keys_of_tensorrt_llm_that_mean_nothing_here_are_refused_with_a_reason() {
    assert_eq!(
        refusal(&[("gpt_model_path", "/engines")]),
        (
            Code::Unsupported,
            "parameter 'gpt_model_path' is not supported: the engine lies in the model's version \
             folder and is no TensorRT engine"
                .into()
        )
    );
    for key in KEYS {
        if let Meaning::Refused(why) = key.meaning {
            let (code, message) = refusal(&[(key.name, "x")]);
            assert!(code == Code::Unsupported && message.ends_with(why), "{message}");
        }
    }
}

#[test]
fn a_wrong_value_is_refused_with_what_is_expected() {
    for (key, value, message) in [
        ("profile", "triton", "parameter 'profile' is 'triton', expected text, token or vllm"),
        ("threads", "0", "parameter 'threads' is '0', expected a whole number of at least 1"),
        (
            "isa",
            "mmx",
            "parameter 'isa' is 'mmx', expected auto or an instruction set of this machine",
        ),
        (
            "draft_branches",
            "17",
            "parameter 'draft_branches' is '17', expected a whole number of 1 to 16",
        ),
        ("pin_threads", "true", "parameter 'pin_threads' is 'true', expected auto, on or off"),
        (
            "draft_len",
            "-1",
            "parameter 'draft_len' is '-1', expected auto or a whole number of at least 0",
        ),
        (
            "kv_cache_free_gpu_mem_fraction",
            "NaN",
            "parameter 'kv_cache_free_gpu_mem_fraction' is 'NaN', expected a number above 0 and at most 1",
        ),
        (
            "gpu_device_ids",
            "0,1;2,3",
            "parameter 'gpu_device_ids' is '0,1;2,3', expected GPU numbers separated by ';': an instance runs on one",
        ),
        (
            "prefill",
            "fast",
            "parameter 'prefill' is 'fast', expected auto, exact, blocks or cublaslt",
        ),
        ("verify_engine", "yes", "parameter 'verify_engine' is 'yes', expected true or false"),
        (
            "enable_chunked_context",
            "false",
            "parameter 'enable_chunked_context' is 'false', expected true: prompts are always computed in chunks",
        ),
        (
            "max_beam_width",
            "4",
            "parameter 'max_beam_width' is '4', expected 1: there is no beam search",
        ),
        ("default_temperature", "-1", "parameter 'default_temperature': -1 is not in 0 to 100"),
        ("default_top_p", "NaN", "parameter 'default_top_p': NaN is not above 0 and at most 1"),
    ] {
        assert_eq!(refusal(&[(key, value)]), (Code::InvalidArg, message.to_string()));
    }
    let bare = json!({ "parameters": { "threads": 4 } });
    assert_eq!(
        Settings::parse(&bare).unwrap_err().message,
        "parameter 'threads' has no string_value: 4"
    );
}

#[test]
fn a_documented_default_is_the_default() {
    for key in KEYS {
        let default = key.default.trim_matches('`');
        if !key.default.starts_with('`') || key.default.contains(", ") {
            continue;
        }
        let settings = parse(&[(key.name, default)]).unwrap();
        let explicit = ["default_", "max_beam_width"].iter().any(|name| key.name.starts_with(name));
        assert!(explicit || settings == Settings::default(), "{}", key.name);
    }
}

#[test]
fn instances_of_all_groups_and_the_transaction_policy_are_read() {
    let settings = Settings::parse(&json!({
        "instance_group": [
            { "kind": "KIND_CPU", "count": 2 }, { "kind": "KIND_CPU", "count": 1 },
            { "kind": "KIND_GPU", "count": 2, "gpus": [0, 3] }, { "kind": "KIND_GPU" },
        ],
        "model_transaction_policy": { "decoupled": true },
    }))
    .unwrap();
    assert_eq!((settings.instance_count, settings.decoupled), (8, true));
}
