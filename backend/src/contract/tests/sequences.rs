//! Several texts for a prompt: what of them is asked of the runtime, and how they are answered.

use super::super::{FanOut, Reply, RowReply};
use super::*;
use spec_core::runtime::Request;
use std::sync::Arc;

fn two_prompts(inputs: impl IntoIterator<Item = Tensor>) -> Result<Call> {
    let prompts = tensor("text_input", DataType::Bytes, &[2, 1], bytes(&["a", "b"]));
    let inputs: Vec<Tensor> = [prompts].into_iter().chain(inputs).collect();
    parse(Profile::Text, &inputs)
}

fn vllm(options: &str, streams: bool) -> Result<Call> {
    let inputs = [
        texts("text_input", &["hi"]),
        texts("sampling_parameters", &[options]),
        flag("stream", streams),
    ];
    parse(Profile::Vllm, &inputs.map(unbatched))
}

/// What a response holds of row `row_idx`.
fn of_row(row_idx: usize, count: usize) -> impl Iterator<Item = RowReply> {
    (0..count).map(move |sequence_idx| RowReply {
        row_idx,
        sequence_idx,
        text: format!("{row_idx}.{sequence_idx}"),
        ..RowReply::default()
    })
}

fn shapes(contract: &Contract, call: &Call, rows: Vec<RowReply>) -> Vec<(String, Vec<i64>)> {
    let outputs = contract.outputs(call, &Reply { rows, ..Reply::default() }, &TOKENIZER);
    outputs.into_iter().map(|output| (output.name, output.shape)).collect()
}

#[test]
fn each_text_of_a_prompt_has_a_seed_of_its_own() {
    let mut request = Request { prompt: vec![1, 2].into(), ..Request::default() };
    request.sampling.seed = Some(u64::MAX);
    request.sampling.prompt_logprobs = Some(3);
    let fan_out = FanOut { drawn: 3, returned: 2 };
    let requests = fan_out.requests(request.clone());
    let seeds: Vec<_> = requests.iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [Some(u64::MAX), Some(0), Some(1)]);
    let of_prompt: Vec<_> = requests.iter().map(|r| r.sampling.prompt_logprobs).collect();
    assert_eq!(of_prompt, [Some(3), None, None], "the prompt is the same for all");
    assert!(requests.iter().all(|each| Arc::ptr_eq(&each.prompt, &request.prompt)));
    request.sampling.seed = None;
    assert!(fan_out.requests(request).iter().all(|request| request.sampling.seed.is_none()));
}

#[test]
fn the_likeliest_texts_are_answered_the_likeliest_first() {
    let replies: Vec<RowReply> = [-3.0, -1.0, f64::NEG_INFINITY, -2.0]
        .map(|cum_log_prob| RowReply { cum_log_prob, ..RowReply::default() })
        .into();
    let told = |fan_out: FanOut| -> Vec<(usize, f64)> {
        let chosen = fan_out.choose(
            of_row(0, 4)
                .zip(&replies)
                .map(|(own, reply)| RowReply { cum_log_prob: reply.cum_log_prob, ..own })
                .collect(),
        );
        chosen.iter().map(|reply| (reply.sequence_idx, reply.cum_log_prob)).collect()
    };
    assert_eq!(told(FanOut { drawn: 4, returned: 2 }), [(0, -1.0), (1, -2.0)]);
    let all = [(0, -3.0), (1, -1.0), (2, f64::NEG_INFINITY), (3, -2.0)];
    assert_eq!(told(FanOut { drawn: 4, returned: 4 }), all, "they stay in order");
}

#[test]
fn texts_are_counted_before_prompts_are_read() {
    let count = |n| ints("num_return_sequences", &[2, 1], &[n, n]);
    assert_eq!(two_prompts([]).unwrap().fan_out, FanOut::default());
    assert_eq!(two_prompts([count(64)]).unwrap().fan_out, FanOut { drawn: 64, returned: 64 });
    assert_eq!(
        refusal(two_prompts([count(65)])),
        "num_return_sequences: 65 for each of 2 prompts, at most 128 in all are allowed"
    );
    assert_eq!(refusal(two_prompts([count(0)])), "num_return_sequences: 0, at least 1 is needed");
    assert_eq!(
        refusal(two_prompts([ints("num_return_sequences", &[2, 1], &[1, 2])])),
        "rows of a batch differ in what they stream or return"
    );
}

#[test]
fn best_of_is_vllms() {
    let fan_out = |options: &str| vllm(options, false).unwrap().fan_out;
    assert_eq!(fan_out(r#"{"n": 3}"#), FanOut { drawn: 3, returned: 3 });
    assert_eq!(fan_out(r#"{"n": 2, "best_of": 5}"#), FanOut { drawn: 5, returned: 2 });
    assert_eq!(fan_out(r#"{"best_of": 2}"#), FanOut { drawn: 2, returned: 1 });
    let logprobs = |options: &str| vllm(options, false).unwrap().rows[0].request.sampling.logprobs;
    assert_eq!(logprobs(r#"{"n": 2}"#), None);
    assert_eq!(logprobs(r#"{"n": 2, "best_of": 3}"#), Some(0), "texts are weighed by them");
    for (options, streams, message) in [
        (r#"{"n": 3, "best_of": 2}"#, false, "best_of: 2 is less than the 3 of n"),
        (r#"{"best_of": 2}"#, true, "best_of: 2 must be the 1 of n where the output is streamed"),
        (r#"{"n": 129}"#, false, "n: 129 for each of 1 prompts, at most 128 in all are allowed"),
        (r#"{"n": 2, "temperature": 0}"#, false, "n: 2 must be 1 where temperature is 0"),
        (
            r#"{"best_of": 2, "temperature": 0}"#,
            false,
            "best_of: 2 must be 1 where temperature is 0",
        ),
    ] {
        assert_eq!(refusal(vllm(options, streams)), message);
    }
    assert!(vllm(r#"{"n": 2, "best_of": 2}"#, true).is_ok());
}

#[test]
fn a_response_of_all_texts_has_a_dimension_for_those_of_a_row() {
    let contract = contract(Profile::Token);
    let inputs = [
        ints("input_ids", &[2, 1], &[1, 2]),
        ints("num_return_sequences", &[2, 1], &[3, 3]),
        tensor("return_perf_metrics", DataType::Bool, &[2, 1], vec![1, 1]),
        tensor("return_log_probs", DataType::Bool, &[2, 1], vec![1, 1]),
        tensor("return_num_input_tokens", DataType::Bool, &[2, 1], vec![1, 1]),
    ];
    let call = contract.parse(&inputs, &[], &TOKENIZER).unwrap();
    let shapes = shapes(&contract, &call, of_row(0, 3).chain(of_row(1, 3)).collect());
    for (name, expected) in [
        ("output_ids", &[2, 3, 0][..]),
        ("sequence_length", &[2, 3]),
        ("cum_log_probs", &[2, 3]),
        ("output_log_probs", &[2, 3, 0]),
        ("num_input_tokens", &[2, 1]),
        ("batch_index", &[2, 3]),
        ("sequence_index", &[2, 3]),
        ("acceptance_histogram", &[2, 3, 1]),
        ("last_token_time_ns", &[2, 3]),
    ] {
        let found = shapes.iter().find(|(known, _)| known == name).expect(name);
        assert_eq!(found.1, expected, "{name}");
    }
}

#[test]
fn texts_of_all_rows_are_one_list() {
    let call = two_prompts([ints("num_return_sequences", &[2, 1], &[2, 2])]).unwrap();
    let reply = Reply { rows: of_row(0, 2).chain(of_row(1, 2)).collect(), ..Reply::default() };
    let outputs = contract(Profile::Text).outputs(&call, &reply, &TOKENIZER);
    let all = bytes(&["0.0", "0.1", "1.0", "1.1"]);
    assert_eq!(outputs[0], tensor("text_output", DataType::Bytes, &[4], all));
}

#[test]
fn vllm_has_one_value_a_text() {
    let call = vllm(r#"{"n": 3}"#, false).unwrap();
    let call = Call {
        report: super::super::Report {
            perf_metrics: true,
            finish_reason: true,
            num_input_tokens: true,
            num_output_tokens: true,
            cum_log_probs: true,
            ..call.report
        },
        ..call
    };
    let shapes = shapes(&contract(Profile::Vllm), &call, of_row(0, 3).collect());
    for (name, expected) in [
        ("text_output", &[3][..]),
        ("finish_reason", &[3]),
        ("cumulative_logprob", &[3]),
        ("num_input_tokens", &[1]),
        ("num_output_tokens", &[3]),
        ("total_draft_tokens", &[3]),
        ("acceptance_histogram", &[3, 1]),
    ] {
        let found = shapes.iter().find(|(known, _)| known == name).expect(name);
        assert_eq!(found.1, expected, "{name}");
    }
}

#[test]
fn texts_have_responses_of_their_own_where_there_can_be_more_than_one() {
    let answers_each = |profile, decoupled, streams| {
        let settings = Settings { decoupled, ..settings(profile) };
        let call = Call { streams, ..Call::default() };
        Contract::new(&settings, &limits(), VOCAB).answers_each(&call)
    };
    for profile in [Profile::Text, Profile::Token] {
        assert!(answers_each(profile, true, true) && answers_each(profile, true, false));
        assert!(!answers_each(profile, false, false));
    }
    assert!(!answers_each(Profile::Vllm, true, true) && !answers_each(Profile::Vllm, true, false));
}
