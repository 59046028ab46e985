//! The payloads of Triton's OpenAI frontend, GenAI-Perf, perf_analyzer and the generate endpoint.

use super::*;

fn openai(extra: impl IntoIterator<Item = Tensor>) -> Vec<Tensor> {
    let always = [
        texts("text_input", &["hi"]),
        flag("stream", true),
        int("max_tokens", 16),
        flag("return_num_input_tokens", true),
        flag("return_num_output_tokens", true),
    ];
    always.into_iter().chain(extra).collect()
}

#[test]
fn a_chat_of_the_openai_frontend_streams_without_the_prompt() {
    let call = parse(Profile::Text, &openai([])).unwrap();
    assert!(call.streams && call.report.num_input_tokens && call.report.num_output_tokens);
    let row = &call.rows[0];
    assert_eq!((row.request.max_tokens, &row.echo), (16, &super::super::Echo::None));
    assert_eq!(*row.request.prompt, ids("hi"));
}

#[test]
fn a_completion_of_the_openai_frontend_sends_all_it_knows() {
    let call = parse(
        Profile::Text,
        &openai([
            texts("stop_words", &["is", ".", ","]),
            float("top_p", 1.0),
            float("frequency_penalty", 0.0),
            float("presence_penalty", 0.0),
            float("temperature", 1.0),
            seed(7),
            flag("exclude_input_in_output", false),
        ]),
    )
    .unwrap();
    let row = &call.rows[0];
    assert_eq!(row.rules.as_ref().unwrap().stops[..], ["is", ".", ","]);
    assert_eq!(row.request.sampling.temperature, 1.0);
    assert_eq!(row.request.sampling.seed, Some(7));
    assert!(call.streams);
    assert_eq!(row.echo, super::super::Echo::None, "the prompt is never streamed");
}

#[test]
fn the_openai_frontend_hears_that_schemas_and_adapters_are_not_built_in() {
    let schema = openai([texts("guided_decoding_guide_type", &["json_schema"])]);
    assert_eq!(
        unsupported(parse(Profile::Text, &schema)),
        "guided_decoding_guide_type: not supported, guided decoding is not built in"
    );
    let lora = tensor("lora_task_id", DataType::Uint64, &[1, 1], vec![0; 8]);
    assert_eq!(
        unsupported(parse(Profile::Text, &openai([lora]))),
        "lora_task_id: not supported, LoRA adapters are not built in"
    );
}

#[test]
fn genai_perf_asks_for_an_exact_length() {
    let call = parse(
        Profile::Text,
        &[
            texts("text_input", &["hi"]),
            int("max_tokens", 20),
            int("min_length", 20),
            flag("exclude_input_in_output", true),
            flag("stream", true),
        ],
    );
    let request = &call.unwrap().rows[0].request;
    assert_eq!((request.max_tokens, request.sampling.min_tokens), (20, 20));
}

#[test]
fn perf_analyzers_empty_stop_and_bad_words_mean_nothing() {
    let row = hi([texts("stop_words", &[""]), texts("bad_words", &["", "no"])]).unwrap();
    assert!(row.rules.as_ref().unwrap().stops.is_empty());
    assert_eq!(*row.request.sampling.bad_words, [[110, 111]]);
}

#[test]
fn genai_perf_for_an_engine_gives_tokens_and_scalars_without_a_dimension() {
    let call = parse(
        Profile::Token,
        &[
            ints("input_ids", &[1, 3], &[5, 6, 7]),
            ints("input_lengths", &[1], &[3]),
            ints("request_output_len", &[1], &[20]),
            flag("streaming", true),
            ints("min_length", &[1], &[20]),
            ints("end_id", &[1], &[257]),
        ],
    )
    .unwrap();
    let request = &call.rows[0].request;
    assert!(call.streams);
    assert_eq!((request.prompt.as_slice(), request.max_tokens), (&[5, 6, 7][..], 20));
    assert_eq!(request.stop_tokens, [257]);
}

#[test]
fn genai_perf_for_vllm_gives_numbers_as_strings() {
    let options = json!({ "max_tokens": "30", "min_tokens": "30", "ignore_eos": "true" });
    let call = parse(
        Profile::Vllm,
        &[
            unbatched(texts("text_input", &["hi"])),
            unbatched(flag("exclude_input_in_output", true)),
            unbatched(flag("stream", true)),
            unbatched(texts("sampling_parameters", &[&options.to_string()])),
        ],
    );
    let request = &call.unwrap().rows[0].request;
    assert_eq!((request.max_tokens, request.sampling.min_tokens), (30, 30));
    assert!(request.ignore_eos);
}

#[test]
fn the_openai_frontends_sampling_options_for_vllm_are_all_known() {
    let options = json!({ "frequency_penalty": 0.0, "logprobs": false, "n": 1, "best_of": 1,
        "presence_penalty": 0.0, "temperature": 0.5, "top_p": 1.0, "seed": 3, "stop": ["x", "y"],
        "logit_bias": { "7": 2.5 }, "max_tokens": 16, "top_logprobs": null });
    let call = parse(
        Profile::Vllm,
        &[
            unbatched(texts("text_input", &["hi"])),
            unbatched(flag("stream", false)),
            unbatched(flag("exclude_input_in_output", true)),
            unbatched(texts("sampling_parameters", &[&options.to_string()])),
            unbatched(flag("return_logprobs", true)),
            unbatched(flag("return_num_input_tokens", true)),
            unbatched(flag("return_num_output_tokens", true)),
        ],
    );
    let call = call.unwrap();
    let row = &call.rows[0];
    let sampling = &row.request.sampling;
    assert_eq!((sampling.temperature, sampling.seed), (0.5, Some(3)));
    assert_eq!(*sampling.logit_bias, [(7, 2.5)]);
    assert_eq!((row.rules.as_ref().unwrap().stops.len(), row.logprobs), (2, None));
}

#[test]
fn the_generate_endpoint_gives_options_as_request_parameters() {
    let parameters = [
        ("max_tokens", Parameter::String("12".into())),
        ("temperature", Parameter::Double(0.5)),
        ("top_k", Parameter::Int(3)),
        ("seed", Parameter::Int(9)),
        ("ignore_eos", Parameter::Bool(true)),
        ("stop_words", Parameter::String("[\"a\", \"b\"]".into())),
        ("bad_words", Parameter::String("[no".into())),
        ("triton_enable_empty_final_response", Parameter::Bool(true)),
        ("binary_data_output", Parameter::Bool(false)),
    ]
    .map(|(name, value)| (name.to_string(), value));
    let inputs = [texts("text_input", &["hi"])];
    let call = contract(Profile::Text).parse(&inputs, &parameters, &TOKENIZER).unwrap();
    let row = &call.rows[0];
    let sampling = &row.request.sampling;
    assert_eq!((row.request.max_tokens, row.request.ignore_eos), (12, true));
    assert_eq!((sampling.temperature, sampling.top_k, sampling.seed), (0.5, 3, Some(9)));
    assert_eq!(row.rules.as_ref().unwrap().stops[..], ["a", "b"]);
    assert_eq!(*sampling.bad_words, [b"[no".map(u32::from).to_vec()]);
}

#[test]
fn a_tensor_wins_over_a_parameter_of_its_name() {
    let inputs = [texts("text_input", &["hi"]), int("max_tokens", 5), int("end_id", 8)];
    let parameters = [("max_tokens", 9), ("end_id", 7)]
        .map(|(name, value)| (name.to_string(), Parameter::Int(value)));
    let call = contract(Profile::Text).parse(&inputs, &parameters, &TOKENIZER).unwrap();
    let request = &call.rows[0].request;
    assert_eq!((request.max_tokens, request.stop_tokens.as_slice()), (5, &[8][..]));
}
