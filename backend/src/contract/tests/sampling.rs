//! Sampling options, and what holds where they are absent.

use super::*;
use crate::parameters::{SamplingDefaults, TemperatureAlone};
use spec_core::sampling::SamplingParams;
use std::sync::Arc;

fn sampling(inputs: impl IntoIterator<Item = Tensor>) -> SamplingParams {
    hi(inputs).unwrap().request.sampling
}

fn vllm(options: &Value) -> Result<super::super::Row> {
    let inputs = [
        unbatched(texts("text_input", &["hi"])),
        unbatched(texts("sampling_parameters", &[&options.to_string()])),
    ];
    parse(Profile::Vllm, &inputs).map(|mut call| call.rows.remove(0))
}

#[test]
fn nothing_given_is_greedy_and_the_default_length() {
    let row = hi([]).unwrap();
    assert_eq!(row.request.sampling, SamplingParams::default());
    assert_eq!(row.request.max_tokens, MAX_SEQ_LEN - 3);
    assert_eq!((row.request.draft_len, row.request.ignore_eos), (None, false));
    assert!(!row.request.fixed_draft_len);
}

#[test]
fn a_draft_length_is_the_most_or_what_is_kept() {
    let row = hi([int("num_draft_tokens", 2)]).unwrap();
    assert_eq!((row.request.draft_len, row.request.fixed_draft_len), (Some(2), false));
    let row = hi([int("num_draft_tokens", 2), flag("fixed_draft_tokens", true)]).unwrap();
    assert_eq!((row.request.draft_len, row.request.fixed_draft_len), (Some(2), true));
}

#[test]
fn options_of_drawing_without_a_temperature_mean_one() {
    assert_eq!(sampling([int("top_k", 2)]).temperature, 1.0);
    assert_eq!(sampling([float("top_p", 0.9)]).temperature, 1.0);
    assert_eq!(sampling([float("min_p", 0.1)]).temperature, 1.0);
    assert_eq!(sampling([int("top_k", 1)]).temperature, 0.0);
    assert_eq!(sampling([float("top_p", 1.0)]).temperature, 0.0);
    assert_eq!(sampling([int("top_k", 2), float("temperature", 0.0)]).temperature, 0.0);
}

#[test]
fn a_top_p_of_nothing_is_not_set() {
    assert_eq!(sampling([float("top_p", 0.0)]).top_p, 1.0);
    assert_eq!(sampling([float("top_p", -1.0)]).top_p, 1.0);
    assert_eq!(sampling([float("top_p", 0.0)]).temperature, 0.0);
}

#[test]
fn the_operators_defaults_hold_where_a_request_does_not_say() {
    let defaults = SamplingDefaults {
        temperature: Some(0.7),
        top_k: Some(5),
        seed: Some(11),
        presence_penalty: Some(0.5),
        ..SamplingDefaults::default()
    };
    let settings = Settings {
        sampling: defaults,
        default_max_tokens: Some(10),
        exclude_prompt: Some(false),
        ..settings(Profile::Text)
    };
    let contract = Contract::new(&settings, &limits(), VOCAB);
    let inputs = [texts("text_input", &["hi"]), float("top_p", 0.9), seed(u64::MAX)];
    let row = contract.parse(&inputs, &[], &TOKENIZER).unwrap().rows.remove(0);
    let sampling = row.request.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.7, 5, 0.9));
    assert_eq!((sampling.seed, sampling.presence_penalty), (Some(u64::MAX), 0.5));
    assert_eq!(row.request.max_tokens, 10);
    assert_eq!(row.echo, super::super::Echo::Text("hi".into()));
}

#[test]
fn vllm_has_defaults_of_its_own() {
    let row = vllm(&json!({})).unwrap();
    assert_eq!((row.request.sampling.temperature, row.request.max_tokens), (1.0, 16));
    let row = vllm(&json!({ "temperature": 0, "top_k": -1, "seed": -1 })).unwrap();
    assert!(row.request.sampling.is_greedy());
    assert_eq!((row.request.sampling.top_k, row.request.sampling.seed), (0, None));
}

#[test]
fn vllm_reads_every_option() {
    let row = vllm(&json!({ "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.5,
        "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "seed": "18446744073709551615", "stop": "x",
        "stop_token_ids": [5, 6], "bad_words": ["no"], "ignore_eos": true, "logprobs": 2,
        "logit_bias": { "7": -3 }, "num_draft_tokens": 0, "n": 1, "use_beam_search": false }))
    .unwrap();
    let expected = SamplingParams {
        temperature: 0.5,
        top_k: 3,
        top_p: 0.5,
        min_p: 0.1,
        repetition_penalty: 1.5,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        logit_bias: [(7, -3.0)].into(),
        bad_words: [vec![110, 111]].into(),
        allowed_tokens: None,
        min_tokens: 2,
        seed: Some(u64::MAX),
        logprobs: Some(2),
        prompt_logprobs: None,
    };
    assert_eq!(row.request.sampling, expected);
    assert_eq!(row.request.stop_tokens, [5, 6]);
    assert_eq!(row.rules.unwrap().stops[..], ["x"]);
    assert_eq!((row.request.draft_len, row.request.ignore_eos), (Some(0), true));
}

#[test]
fn vllm_takes_request_parameters_and_the_tensor_wins_over_them() {
    let parameters =
        [("max_tokens", "5"), ("temperature", "0.25"), ("stop", "[\"a\"]"), ("logprobs", "9")]
            .map(|(name, value)| (name.to_string(), Parameter::String(value.into())));
    let options = unbatched(texts("sampling_parameters", &[r#"{"max_tokens": 6, "logprobs": 2}"#]));
    let inputs = [unbatched(texts("text_input", &["hi"])), options];
    let row =
        contract(Profile::Vllm).parse(&inputs, &parameters, &TOKENIZER).unwrap().rows.remove(0);
    assert_eq!((row.request.max_tokens, row.request.sampling.temperature), (6, 0.25));
    assert_eq!((&row.rules.unwrap().stops[..], row.logprobs), (&["a".to_string()][..], Some(2)));
}

#[test]
fn vllm_options_that_are_wrong_unknown_or_not_built_are_named() {
    for (options, message) in [
        (json!([]), "sampling_parameters: not a JSON object"),
        (json!({ "beams": 1 }), "sampling_parameters: option 'beams' is not known"),
        (json!({ "max_tokens": 0 }), "sampling_parameters: max_tokens: 0, at least 1 is needed"),
        (
            json!({ "max_tokens": 1.5 }),
            "sampling_parameters: max_tokens: 1.5 is not a whole number",
        ),
        (json!({ "stop": [1] }), "sampling_parameters: stop: 1 is not a string"),
        (
            json!({ "seed": -2 }),
            "sampling_parameters: seed: -2 is not -1 or a whole number of at least 0",
        ),
        (json!({ "top_p": 0 }), "top_p: 0 is not above 0 and at most 1"),
        (json!({ "logprobs": 21 }), "logprobs: 21 alternatives, at most 20 are allowed"),
        (
            json!({ "logit_bias": { "260": 1 } }),
            "logit_bias: token 260 is outside the vocabulary of 260 tokens",
        ),
    ] {
        assert_eq!(refusal(vllm(&options)), message);
    }
    assert_eq!(
        unsupported(vllm(&json!({ "guided_decoding": {} }))),
        "sampling_parameters: guided_decoding: not supported, guided decoding is not built in"
    );
}

#[test]
fn of_two_names_for_one_thing_the_larger_value_holds() {
    assert_eq!(sampling([int("min_tokens", 3), int("min_length", 2)]).min_tokens, 3);
    assert_eq!(sampling([int("min_tokens", 3), int("min_length", 4)]).min_tokens, 4);
    let logprobs = |json: Value| vllm(&json).unwrap().logprobs;
    assert_eq!(logprobs(json!({ "logprobs": true, "top_logprobs": 3 })), Some(3));
    assert_eq!(logprobs(json!({ "logprobs": true })), Some(0));
    assert_eq!(logprobs(json!({ "logprobs": "4" })), Some(4));
}

#[test]
fn biased_words_are_one_token_and_have_a_weight_each() {
    let words = |words: &[&str], weights: &[f32]| {
        hi([texts("embedding_bias_words", words), floats("embedding_bias_weights", weights)])
    };
    let row = words(&["a", "b"], &[1.0, -2.0]).unwrap();
    assert_eq!(*row.request.sampling.logit_bias, [(97, 1.0), (98, -2.0)]);
    assert_eq!(
        refusal(words(&["a", "b"], &[1.0])),
        "embedding_bias_words has 2 entries, embedding_bias_weights 1"
    );
    assert_eq!(
        refusal(words(&["ab"], &[1.0])),
        "embedding_bias_words: 'ab' is 2 tokens, only words of 1 can be biased"
    );
}

#[test]
fn token_lists_are_split_at_their_offsets() {
    let list = |name: &str, values: &[i32]| ints(name, &[1, 2, values.len() as i64 / 2], values);
    let inputs = [
        ints("input_ids", &[1, 1], &[1]),
        list("stop_words_list", &[5, 6, 7, 2, 3, -1]),
        list("bad_words_list", &[8, 9, 1, 2]),
        ints("draft_input_ids", &[1, 2], &[3, 4]),
    ];
    let row = parse(Profile::Token, &inputs).unwrap().rows.remove(0);
    assert_eq!((row.request.stop_tokens, &*row.stop_sequences), (vec![7], &[vec![5, 6]][..]));
    assert_eq!(*row.request.sampling.bad_words, [[8], [9]]);
    assert_eq!(row.request.given_draft, [3, 4]);
}

#[test]
fn end_id_ends_the_text_too_and_minus_one_ends_it_never() {
    let row = hi([int("end_id", 9)]).unwrap();
    assert_eq!((row.request.stop_tokens, row.request.ignore_eos), (vec![9], false));
    let row = hi([int("end_id", -1)]).unwrap();
    assert_eq!((row.request.stop_tokens, row.request.ignore_eos), (vec![], true));
    let row = hi([int("end_id", -1), flag("ignore_eos", false)]).unwrap();
    assert!(row.request.ignore_eos);
}

#[test]
fn an_end_id_that_the_vocabulary_does_not_have_ends_nothing() {
    for id in [260, i32::MAX, -2] {
        let row = hi([int("end_id", id)]).unwrap();
        assert_eq!((row.request.stop_tokens, row.request.ignore_eos), (vec![], false));
    }
}

#[test]
fn the_object_of_sampling_options_wins_over_parameters_in_any_order() {
    let object = json!({ "temperature": 0.25, "ignore_eos": false }).to_string();
    let object = ("sampling_parameters".to_string(), Parameter::String(object));
    let single = [
        ("temperature".to_string(), Parameter::Double(1.0)),
        ("ignore_eos".to_string(), Parameter::Bool(true)),
    ];
    for place in 0..=single.len() {
        let mut parameters = single.to_vec();
        parameters.insert(place, object.clone());
        let inputs = [unbatched(texts("text_input", &["hi"]))];
        let call = contract(Profile::Vllm).parse(&inputs, &parameters, &TOKENIZER).unwrap();
        let request = &call.rows[0].request;
        assert_eq!((request.sampling.temperature, request.ignore_eos), (0.25, false), "{place}");
    }
}

#[test]
fn a_seed_has_two_names() {
    let older = Tensor { name: "random_seed".into(), ..seed(7) };
    assert_eq!(sampling([older.clone()]).seed, Some(7));
    assert_eq!(sampling([older.clone(), seed(7)]).seed, Some(7));
    assert_eq!(refusal(hi([older, seed(8)])), "seed: 8, the other name has 7");
}

#[test]
fn a_temperature_alone_draws_or_not_as_the_operator_says() {
    let temperature = |profile, alone, extra: &[Tensor]| {
        let settings = Settings { temperature_alone: alone, ..settings(profile) };
        let prompt = [texts("text_input", &["hi"]), float("temperature", 0.5)];
        let mut inputs = [&prompt, extra].concat();
        if profile == Profile::Vllm {
            let parameters = [("temperature".to_string(), Parameter::Double(0.5))];
            let contract = Contract::new(&settings, &limits(), VOCAB);
            let call = contract.parse(&[unbatched(inputs.remove(0))], &parameters, &TOKENIZER);
            return call.unwrap().rows[0].request.sampling.temperature;
        }
        let call = Contract::new(&settings, &limits(), VOCAB).parse(&inputs, &[], &TOKENIZER);
        call.unwrap().rows[0].request.sampling.temperature
    };
    use TemperatureAlone::{Draws, Greedy};
    assert_eq!(temperature(Profile::Text, Draws, &[]), 0.5);
    assert_eq!(temperature(Profile::Text, Greedy, &[]), 0.0);
    for cut in [int("top_k", 5), float("top_p", 0.9), float("min_p", 0.1)] {
        assert_eq!(temperature(Profile::Text, Greedy, &[cut]), 0.5);
    }
    assert_eq!(temperature(Profile::Vllm, Greedy, &[]), 0.5);
}

#[test]
fn rows_share_the_lists_that_are_equal() {
    let words = texts("bad_words", &["ab", "cd"]);
    let both = |second: &str| {
        let data = bytes(&["ab", "cd", "ab", second]);
        tensor("bad_words", DataType::Bytes, &[2, 2], data)
    };
    let prompts = tensor("text_input", DataType::Bytes, &[2, 1], bytes(&["hi", "ho"]));
    let lists = |words: Tensor| {
        let rows = parse(Profile::Text, &[prompts.clone(), words]).unwrap().rows;
        rows.into_iter().map(|row| row.request.sampling.bad_words).collect::<Vec<_>>()
    };
    let equal = lists(both("cd"));
    assert!(Arc::ptr_eq(&equal[0], &equal[1]));
    let different = lists(both("ce"));
    assert_eq!(*different[1], [vec![97, 98], vec![99, 101]]);
    assert_eq!(*hi([words]).unwrap().request.sampling.bad_words, *equal[0]);
    assert_eq!(different[0], equal[0]);
}

#[test]
fn vllm_may_name_the_only_tokens_that_can_come() {
    let allowed = |ids: Value| vllm(&json!({ "allowed_token_ids": ids }));
    let row = allowed(json!([9, 3, 9])).unwrap();
    assert_eq!(row.request.sampling.allowed_tokens.as_deref(), Some(&[3, 9][..]));
    assert!(refusal(allowed(json!([260]))).starts_with("allowed_token_ids: token 260"));
    assert!(refusal(allowed(json!([]))).starts_with("allowed_token_ids: an empty list"));
}

#[test]
fn a_stop_of_vllm_that_looks_like_a_list_is_a_string() {
    let stops = |stop: Value| vllm(&json!({ "stop": stop })).unwrap().rules.unwrap().stops;
    assert_eq!(stops(json!("[\"a\"]"))[..], ["[\"a\"]"]);
    assert_eq!(stops(json!(["a", "b"]))[..], ["a", "b"]);
    // A request parameter cannot be a list; there the string is one.
    let parameters = [("stop".to_string(), Parameter::String("[\"a\", \"b\"]".into()))];
    let inputs = [unbatched(texts("text_input", &["hi"]))];
    let call = contract(Profile::Vllm).parse(&inputs, &parameters, &TOKENIZER).unwrap();
    assert_eq!(call.rows[0].rules.as_ref().unwrap().stops[..], ["a", "b"]);
}
