//! Values out of their limits, and bytes that are not what their shape says.

use super::*;
use crate::parameters::WhenTooLong;
use std::time::Duration;

#[test]
fn a_wrong_value_is_refused_with_its_name_and_limits() {
    for (input, message) in [
        (int("max_tokens", 0), "max_tokens: 0, at least 1 is needed"),
        (int("max_tokens", -5), "max_tokens: -5, at least 1 is needed"),
        (int("min_tokens", -1), "min_tokens: -1, at least 0 is needed"),
        (int("min_length", -1), "min_length: -1, at least 0 is needed"),
        (int("top_k", -1), "top_k: -1, at least 0 is needed"),
        (float("temperature", f32::NAN), "temperature: NaN is not in 0 to 100"),
        (float("temperature", -0.5), "temperature: -0.5 is not in 0 to 100"),
        (float("top_p", f32::NAN), "top_p: NaN is not above 0 and at most 1"),
        (float("top_p", 2.0), "top_p: 2 is not above 0 and at most 1"),
        (float("min_p", -0.1), "min_p: -0.1 is not in 0 to 1"),
        (float("repetition_penalty", 0.0), "repetition_penalty: 0 is not above 0 and at most 100"),
        (float("presence_penalty", 3.0), "presence_penalty: 3 is not in -2 to 2"),
        (int("priority", -1), "priority: -1, at least 0 is needed"),
        (
            texts("cache_salt", &[&"x".repeat(1025)]),
            "cache_salt: 1025 bytes, at most 1024 are allowed",
        ),
        (texts("bad_words", &["x"; 1025]), "bad_words: 1025 entries, at most 1024 are allowed"),
        (int("num_draft_tokens", 5), "num_draft_tokens: 5 exceeds max_draft_len 4"),
        (texts("stop_words", &["x"; 257]), "stop_words: 257 entries, at most 256 are allowed"),
        (
            texts("bad_words", &[&"x".repeat(65)]),
            "bad_words: 65 tokens in an entry, at most 64 are allowed",
        ),
        (
            texts("bad_words", &[&"x".repeat(1025)]),
            "bad_words: 1025 bytes in an entry, at most 1024 are allowed",
        ),
    ] {
        assert_eq!(refusal(hi([input])), message);
    }
}

#[test]
fn a_timeout_among_the_parameters_is_microseconds() {
    let with = |value: Parameter| {
        let parameters = [("timeout".into(), value), ("id".into(), Parameter::String("a".into()))];
        contract(Profile::Text).parse(&[texts("text_input", &["hi"])], &parameters, &TOKENIZER)
    };
    let timeout = |value| with(value).unwrap().timeout;
    assert_eq!(timeout(Parameter::Int(1500)), Some(Duration::from_micros(1500)));
    assert_eq!(timeout(Parameter::String("7".into())), Some(Duration::from_micros(7)));
    assert_eq!(timeout(Parameter::Int(0)), None);
    assert_eq!(
        with(Parameter::Int(-1)).unwrap_err().message,
        "timeout: Int(-1) is no number of microseconds"
    );
}

#[test]
fn json_of_any_length_is_refused_before_it_is_read() {
    let zeros = format!("[{}0]", "0,".repeat(3 << 20));
    let message = "6291459 bytes, at most 4194304 are read";
    let with = |profile, name: &str, given: &str| {
        let parameters = [(name.into(), Parameter::String(given.into()))];
        let text = [texts("text_input", &["hi"])].map(|text| match profile {
            Profile::Vllm => unbatched(text),
            _ => text,
        });
        contract(profile).parse(&text, &parameters, &TOKENIZER).unwrap_err().message
    };
    for name in ["max_tokens", "embedding_bias_weights", "stop_words"] {
        assert_eq!(with(Profile::Text, name, &zeros), format!("{name}: {message}"));
    }
    let options = format!("{{\"stop_token_ids\": {zeros}}}");
    let refusal = with(Profile::Vllm, "sampling_parameters", &options);
    assert!(refusal.ends_with("bytes, at most 4194304 are read"), "{refusal}");
}

#[test]
fn messages_are_short_whatever_a_client_sends() {
    let long = "9".repeat(10_000);
    let list = format!("[{}0]", "0,".repeat(10_000));
    let with = |options: &str| {
        let inputs = [texts("text_input", &["hi"]), texts("sampling_parameters", &[options])];
        contract(Profile::Vllm).parse(&inputs.map(unbatched), &[], &TOKENIZER)
    };
    for options in [
        format!("{{\"logit_bias\": {list}}}"),
        format!("{{\"logit_bias\": {{\"{long}\": 1}}}}"),
        format!("{{\"logit_bias\": {{\"1\": {list}}}}}"),
        format!("{{\"seed\": {list}}}"),
        format!("{{\"logprobs\": {list}}}"),
        format!("{{\"{long}\": 1}}"),
    ] {
        let refusal = with(&options).unwrap_err().message;
        assert!(refusal.len() < 120, "{} bytes: {refusal}", refusal.len());
    }
    let parameters =
        [(long.as_str(), Parameter::Int(1)), ("timeout", Parameter::String(long.clone()))];
    for (name, value) in parameters {
        let text = [texts("text_input", &["hi"])];
        let parsed = contract(Profile::Text).parse(&text, &[(name.into(), value)], &TOKENIZER);
        let refusal = parsed.unwrap_err().message;
        assert!(refusal.len() < 120, "{} bytes: {refusal}", refusal.len());
    }
}

#[test]
fn what_is_not_built_is_unsupported() {
    for (input, message) in [
        (flag("return_context_logits", true), "return_context_logits: logits are not sent"),
        (int("beam_width", 2), "beam_width: 2, only 1 is supported"),
        (
            float("length_penalty", 0.5),
            "length_penalty: 0.5, only 0 and 1: there is no beam search",
        ),
        (
            texts("decoder_text_input", &["x"]),
            "decoder_text_input: not supported, only decoder models are served",
        ),
    ] {
        assert_eq!(unsupported(hi([input])), message);
    }
    hi([
        flag("return_context_logits", false),
        int("beam_width", 1),
        float("length_penalty", 1.0),
        flag("use_draft_logits", true),
    ])
    .unwrap();
}

#[test]
fn the_token_profile_names_its_own_fields() {
    let prompt = ints("input_ids", &[1, 2], &[1, 2]);
    for (input, message) in [
        (int("runtime_top_k", -1), "runtime_top_k: -1, at least 0 is needed"),
        (float("runtime_top_p", 2.0), "runtime_top_p: 2 is not above 0 and at most 1"),
        (int("request_output_len", 0), "request_output_len: 0, at least 1 is needed"),
        (
            ints("draft_input_ids", &[1, 5], &[1; 5]),
            "draft_input_ids: 5 tokens, at most 4 are allowed",
        ),
        (
            ints("stop_words_list", &[1, 2, 1], &[260, 1]),
            "stop_words_list: token 260 is outside the vocabulary of 260 tokens",
        ),
        (
            ints("bad_words_list", &[1, 2, 2], &[1, 2, 2, 1]),
            "bad_words_list: offset 1 after 2 in 2 ids",
        ),
        (
            floats("embedding_bias", &[1.0; 3]),
            "embedding_bias: 3 values, the vocabulary has 260 tokens",
        ),
        (
            floats("embedding_bias", &[f32::NAN; VOCAB]),
            "embedding_bias: NaN is not in -1000000 to 1000000",
        ),
    ] {
        assert_eq!(refusal(parse(Profile::Token, &[prompt.clone(), input])), message);
    }
    let outside = ints("input_ids", &[1, 2], &[1, 260]);
    assert_eq!(
        refusal(parse(Profile::Token, &[outside])),
        "input_ids: token 260 is outside the vocabulary of 260 tokens"
    );
    assert_eq!(
        refusal(parse(Profile::Token, &[ints("input_ids", &[1, 1], &[-1])])),
        "input_ids: -1 is no token"
    );
    assert_eq!(
        refusal(parse(Profile::Token, &[ints("input_ids", &[1, 0], &[])])),
        "input_ids: 0 tokens, at least 1 is needed"
    );
}

#[test]
fn of_an_output_that_does_not_fit_behind_the_prompt_what_fits_is_left() {
    for asked in [61, 62, i32::MAX] {
        assert_eq!(hi([int("max_tokens", asked)]).unwrap().request.max_tokens, 61);
    }
}

#[test]
fn an_operator_may_have_it_refused() {
    let settings = Settings { when_too_long: WhenTooLong::Refuse, ..settings(Profile::Text) };
    let contract = Contract::new(&settings, &limits(), VOCAB);
    let fits = |max_tokens| {
        let inputs = [texts("text_input", &["hi"]), int("max_tokens", max_tokens)];
        contract.parse(&inputs, &[], &TOKENIZER)
    };
    assert_eq!(fits(61).unwrap().rows[0].request.max_tokens, 61);
    assert_eq!(
        refusal(fits(62)),
        "max_tokens: 62 after a prompt of 3 tokens is 65, max_seq_len is 64"
    );
    assert_eq!(
        refusal(fits(i32::MAX)),
        "max_tokens: 2147483647 after a prompt of 3 tokens is 2147483650, max_seq_len is 64"
    );
}

#[test]
fn a_prompt_that_leaves_no_room_is_refused_before_it_is_split() {
    let prompt = |len| parse(Profile::Text, &[texts("text_input", &[&"x".repeat(len)])]);
    assert_eq!(prompt(62).unwrap().rows[0].request.max_tokens, 1);
    assert_eq!(
        refusal(prompt(63)),
        "text_input: 64 tokens, max_seq_len is 64 with at least 1 to generate"
    );
    assert_eq!(
        refusal(prompt(640)),
        "text_input: 640 bytes are more than 63 tokens, max_seq_len is 64 with at least 1 to generate"
    );
    assert_eq!(
        refusal(prompt(10_000)),
        "text_input: 10000 bytes, at most 8192 are allowed for a max_seq_len of 64"
    );
}

#[test]
fn types_and_shapes_must_be_those_declared() {
    let wide = tensor("top_k", DataType::Int64, &[1, 1], vec![0; 8]);
    assert_eq!(refusal(hi([wide])), "top_k: data type INT64, expected INT32");
    for (shape, values) in
        [(&[1, 2][..], 2), (&[0, 1], 0), (&[], 1), (&[1, 1, 1], 1), (&[-1, 1], 1), (&[1, 0], 0)]
    {
        let message = refusal(hi([ints("top_k", shape, &vec![1; values])]));
        assert_eq!(message, format!("top_k: shape {shape:?}, expected [-1, 1]"));
    }
    let vllm = parse(Profile::Vllm, &[texts("text_input", &["hi"])]);
    assert_eq!(refusal(vllm), "text_input: shape [1, 1], expected [1]");
}

#[test]
fn counts_without_a_sign_are_read_as_they_are() {
    for value in [7, u32::MAX] {
        let top_k = tensor("top_k", DataType::Uint32, &[1, 1], value.to_le_bytes().to_vec());
        assert_eq!(hi([top_k]).unwrap().request.sampling.top_k, value as usize);
    }
    let seed = tensor("seed", DataType::Uint32, &[1, 1], vec![1, 0, 0, 0]);
    assert_eq!(refusal(hi([seed])), "seed: data type UINT32, expected UINT64");
}

#[test]
fn bytes_must_be_as_many_as_the_shape_says() {
    let short = tensor("top_k", DataType::Int32, &[1, 1], vec![0; 3]);
    assert_eq!(refusal(hi([short])), "top_k: 3 bytes for 1 elements of 4");
    for (data, message) in [
        (vec![], "stop_words: element 0 of 2 is cut off"),
        (bytes(&["x"]), "stop_words: element 1 of 2 is cut off"),
        (vec![255, 255, 255, 255, 1], "stop_words: element 0 of 2 is cut off"),
        (bytes(&["x", "y", ""]), "stop_words: 4 bytes follow the 2 elements"),
    ] {
        let input = tensor("stop_words", DataType::Bytes, &[1, 2], data);
        assert_eq!(refusal(hi([input])), message);
    }
    let huge = tensor("stop_words", DataType::Bytes, &[1, i64::MAX], vec![]);
    assert_eq!(refusal(hi([huge])), format!("stop_words: element 0 of {} is cut off", i64::MAX));
    let overflow = tensor("lora", DataType::Int32, &[1, 2, i64::MAX], vec![]);
    let overflow = Tensor { name: "stop_words_list".into(), ..overflow };
    assert!(refusal(parse(Profile::Token, &[overflow])).contains("stop_words_list"));
}

#[test]
fn a_batch_of_empty_rows_is_bounded() {
    let empty = tensor("stop_words", DataType::Bytes, &[i64::MAX, 0], vec![]);
    assert_eq!(
        refusal(parse(Profile::Text, &[empty])),
        format!("stop_words: shape [{}, 0], expected [-1, -1]", i64::MAX)
    );
}

#[test]
fn text_must_be_utf8() {
    let latin = tensor("text_input", DataType::Bytes, &[1, 1], vec![1, 0, 0, 0, 0xe9]);
    assert!(
        refusal(parse(Profile::Text, &[latin])).starts_with("text_input: element 0 is not UTF-8: ")
    );
    let nul = parse(Profile::Text, &[texts("text_input", &["a\0b"])]).unwrap();
    assert_eq!(*nul.rows[0].request.prompt, ids("a\0b"));
}

#[test]
fn parameters_of_another_kind_are_refused_by_name() {
    for (name, value, message) in [
        (
            "max_tokens",
            Parameter::String("many".into()),
            "max_tokens: \"many\" is not a whole number",
        ),
        ("max_tokens", Parameter::Double(1.5), "max_tokens: 1.5 is not a whole number"),
        ("max_tokens", Parameter::Bool(true), "max_tokens: true is not a whole number"),
        ("temperature", Parameter::Double(f64::NAN), "temperature: NaN is not a finite number"),
        ("temperature", Parameter::String("nan".into()), "temperature: NaN is not in 0 to 100"),
        ("seed", Parameter::Int(-1), "seed: -1 is not a whole number of at least 0"),
        ("stream", Parameter::String("maybe".into()), "stream: \"maybe\" is not true or false"),
        ("embedding_bias_weights", Parameter::Int(1), "embedding_bias_weights: 1 is not a list"),
    ] {
        assert_eq!(refusal(with_parameter(name, value)), message);
    }
    assert_eq!(with_parameter("max_tokens", Parameter::Double(7.0)).unwrap().request.max_tokens, 7);
}

#[test]
fn the_cores_errors_are_told_in_the_clients_names() {
    let error = contract(Profile::Token)
        .error(spec_core::Error::bad_request("max_tokens", "9, the engine has 2"));
    assert_eq!(error, Error::invalid_arg("request_output_len: 9, the engine has 2"));
    let full = contract(Profile::Text).error(spec_core::Error::Capacity("full".into()));
    assert_eq!(full.code, Code::Unavailable);
    let broken = contract(Profile::Text).error(spec_core::Error::Device("gone".into()));
    assert_eq!(broken.code, Code::Internal);
}

#[test]
fn what_takes_no_time_is_checked_in_all_rows_before_any_text_is_split() {
    // The first row's prompt is too long only once it is split; the second row is wrong at a glance.
    let row = |len: usize| "x".repeat(len);
    let inputs = [
        tensor("text_input", DataType::Bytes, &[2, 1], bytes(&[&row(63), "hi"])),
        ints("num_draft_tokens", &[2, 1], &[1, 5]),
    ];
    assert_eq!(
        refusal(parse(Profile::Text, &inputs)),
        "num_draft_tokens: 5 exceeds max_draft_len 4"
    );
}

#[test]
fn a_draft_may_come_along_where_there_is_no_drafter() {
    let limits = Limits { max_draft_len: 0, ..limits() };
    let contract = Contract::new(&settings(Profile::Token), &limits, VOCAB);
    let with = |len: usize| {
        let draft = ints("draft_input_ids", &[1, len as i64], &vec![1; len]);
        contract.parse(&[ints("input_ids", &[1, 2], &[1, 2]), draft], &[], &TOKENIZER)
    };
    assert_eq!(with(16).unwrap().rows[0].request.given_draft, [1; 16]);
    assert_eq!(refusal(with(17)), "draft_input_ids: 17 tokens, at most 16 are allowed");
}

#[test]
fn the_words_of_all_rows_together_are_bounded() {
    let lists = |name: &str, first: &str| {
        let word = "x".repeat(1000);
        let mut words = vec![word.as_str(); 2 * 200];
        words[200] = first;
        let prompts = tensor("text_input", DataType::Bytes, &[2, 1], bytes(&["hi", "ho"]));
        let words = tensor(name, DataType::Bytes, &[2, 200], bytes(&words));
        parse(Profile::Text, &[prompts, words])
    };
    const TOO_MANY: &str = "bad_words, stop_words and embedding_bias_words: 399001 bytes in all rows, at most 262144 are \
                            allowed";
    // Equal lists count once; what is wrong with them is seen when they are split.
    assert_eq!(
        refusal(lists("bad_words", &"x".repeat(1000))),
        "bad_words: 1000 tokens in an entry, at most 64 are allowed"
    );
    lists("stop_words", &"x".repeat(1000)).expect("they are looked for once");
    for name in ["bad_words", "stop_words"] {
        assert_eq!(refusal(lists(name, "y")), TOO_MANY, "{name}");
    }
}
