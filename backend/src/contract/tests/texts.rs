//! What of the tokens is text.

use super::*;
use spec_core::runtime::TextRules;

fn vllm(options: Value) -> Result<Option<TextRules>> {
    row(options, false).map(|row| row.rules)
}

fn row(options: Value, streams: bool) -> Result<super::super::Row> {
    let inputs = [
        texts("text_input", &["hi"]),
        texts("sampling_parameters", &[&options.to_string()]),
        flag("stream", streams),
    ];
    parse(Profile::Vllm, &inputs.map(unbatched)).map(|mut call| call.rows.remove(0))
}

#[test]
fn vllms_options_of_the_text_are_taken() {
    let plain = TextRules { goes_on: true, ..TextRules::default() };
    assert_eq!(vllm(json!({})).unwrap(), Some(plain));
    let rules = vllm(json!({ "stop": ["a", ""], "include_stop_str_in_output": true,
        "skip_special_tokens": false, "spaces_between_special_tokens": true, "min_tokens": 3 }));
    let expected = TextRules {
        stops: ["a".to_string()].into(),
        includes_stop: true,
        skips_special: false,
        min_tokens: 3,
        goes_on: true,
    };
    assert_eq!(rules.unwrap(), Some(expected));
    assert_eq!(
        unsupported(vllm(json!({ "spaces_between_special_tokens": false }))),
        "sampling_parameters: spaces_between_special_tokens: not supported, special tokens that are shown are shown as they are"
    );
}

#[test]
fn without_text_there_are_no_stop_strings() {
    assert_eq!(vllm(json!({ "detokenize": false, "stop_token_ids": [5] })).unwrap(), None);
    assert_eq!(vllm(json!({ "detokenize": false, "stop": "" })).unwrap(), None);
    assert_eq!(
        refusal(vllm(json!({ "detokenize": false, "stop": ["a", "b"] }))),
        "stop: 2 strings, but detokenize is false: they are looked for in the text"
    );
}

#[test]
fn the_larger_of_two_minima_holds_back_stop_words() {
    let row = hi([texts("stop_words", &["a"]), int("min_tokens", 2), int("min_length", 5)]);
    assert_eq!(row.unwrap().rules.unwrap().min_tokens, 5);
    let list = ints("stop_words_list", &[1, 2, 2], &[5, 6, 2, -1]);
    let inputs = [ints("input_ids", &[1, 1], &[1]), list, int("min_tokens", 4)];
    let row = parse(Profile::Token, &inputs).unwrap().rows.remove(0);
    assert_eq!((row.min_tokens, row.rules), (4, None));
}

#[test]
fn the_prompts_log_probabilities_are_bounded_and_not_streamed() {
    let asked = |options| row(options, false).map(|row| row.request.sampling.prompt_logprobs);
    assert_eq!(asked(json!({})).unwrap(), None);
    assert_eq!(asked(json!({ "prompt_logprobs": 2 })).unwrap(), Some(2));
    assert_eq!(asked(json!({ "prompt_logprobs": true })).unwrap(), Some(0));
    assert_eq!(
        refusal(asked(json!({ "prompt_logprobs": 21 }))),
        "prompt_logprobs: 21 alternatives, at most 20 are allowed"
    );
    assert_eq!(
        refusal(row(json!({ "prompt_logprobs": 0 }), true)),
        "prompt_logprobs: not available where the output is streamed"
    );
    let long = super::super::answer::MAX_PROMPT_LOGPROBS / 21 + 1;
    let limits = Limits { max_seq_len: 2 * long, ..limits() };
    let contract = Contract::new(&settings(Profile::Vllm), &limits, VOCAB);
    let ask = |len: usize| {
        let options = texts("sampling_parameters", &[r#"{"prompt_logprobs": 20}"#]);
        let inputs = [texts("text_input", &[&"x".repeat(len)]), options].map(unbatched);
        contract.parse(&inputs, &[], &TOKENIZER)
    };
    assert!(ask(long - 2).is_ok(), "with the token in front");
    assert_eq!(
        refusal(ask(long - 1)),
        "prompt_logprobs: 20 alternatives to each of 12484 tokens are 262164 log-probabilities with their own, at most 262144 are allowed"
    );
}
