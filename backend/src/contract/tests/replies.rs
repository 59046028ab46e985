//! Responses: which outputs they have, their shapes and bytes.

use super::super::{Echo, PromptLogProbs, Reply, RowReply, Times};
use super::*;
use spec_core::runtime::{Counters, Emitted, FinishReason};

fn emitted(tokens: &[u32]) -> Vec<Emitted> {
    let one = |&token: &u32| Emitted {
        token,
        logprob: Some(-(token as f32)),
        rank: Some(1 + token % 90),
        top_logprobs: vec![(98, -0.5), (97, -97.0)],
    };
    tokens.iter().map(one).collect()
}

fn row(text: &str, tokens: &[u32], finish: Option<FinishReason>) -> RowReply {
    let counters = Counters {
        steps: 5,
        drafted: 8,
        accepted: 6,
        accepted_per_position: vec![3, 2, 1],
        new_pages: 2,
        reused_pages: 3,
        ..Counters::default()
    };
    RowReply {
        row_idx: 0,
        sequence_idx: 0,
        text: text.to_string(),
        emitted: emitted(tokens),
        cum_log_prob: -tokens.iter().map(|&token| f64::from(token)).sum::<f64>(),
        is_first: true,
        counters,
        times: Times {
            arrival_ns: 1,
            first_scheduled_ns: 2,
            first_token_ns: 3,
            last_token_ns: u64::MAX,
        },
        finish,
    }
}

/// Not the first response of its sequence: there is no prompt in front.
fn later(reply: RowReply) -> RowReply {
    RowReply { is_first: false, ..reply }
}

fn outputs(profile: Profile, call: &Call, rows: Vec<RowReply>) -> Vec<Tensor> {
    let reply = Reply { rows, ..Reply::default() };
    contract(profile).outputs(call, &reply, &TOKENIZER)
}

fn names(tensors: &[Tensor]) -> Vec<&str> {
    tensors.iter().map(|tensor| tensor.name.as_str()).collect()
}

#[track_caller]
fn named<'a>(tensors: &'a [Tensor], name: &str) -> &'a Tensor {
    tensors.iter().find(|tensor| tensor.name == name).expect(name)
}

fn read_ints(tensor: &Tensor) -> Vec<i64> {
    let read = |bytes: &[u8]| match bytes.len() {
        4 => i64::from(i32::from_le_bytes(bytes.try_into().unwrap())),
        _ => i64::from_le_bytes(bytes.try_into().unwrap()),
    };
    let width = if tensor.datatype == DataType::Int64 { 8 } else { 4 };
    tensor.data.chunks(width).map(read).collect()
}

fn read_floats(tensor: &Tensor) -> Vec<f32> {
    let floats = tensor.data.chunks(4);
    floats.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn all_flags() -> Vec<Tensor> {
    [
        "return_log_probs",
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_finish_reason",
    ]
    .map(|name| flag(name, true))
    .to_vec()
}

fn call(profile: Profile, inputs: Vec<Tensor>) -> Call {
    let prompt = match profile {
        Profile::Token => ints("input_ids", &[1, 2], &[1, 2]),
        _ => texts("text_input", &["hi"]),
    };
    let mut inputs: Vec<_> = [prompt].into_iter().chain(inputs).collect();
    if profile == Profile::Vllm {
        inputs = inputs.into_iter().map(unbatched).collect();
    }
    parse(profile, &inputs).unwrap()
}

#[test]
fn without_flags_a_response_is_the_text_alone() {
    let call = call(Profile::Text, vec![]);
    let tensors =
        outputs(Profile::Text, &call, vec![row("é", &[195, 169], Some(FinishReason::Length))]);
    assert_eq!(tensors, [tensor("text_output", DataType::Bytes, &[1], bytes(&["é"]))]);
}

#[test]
fn the_prompt_stands_before_the_first_response_alone() {
    let call = call(Profile::Text, vec![flag("exclude_input_in_output", false)]);
    assert_eq!(call.rows[0].echo, Echo::Text("hi".into()));
    let first = outputs(Profile::Text, &call, vec![row("a", &[97], None)]);
    assert_eq!(first[0].data, bytes(&["hia"]));
    let later = later(row("b", &[98], None));
    assert_eq!(outputs(Profile::Text, &call, vec![later])[0].data, bytes(&["b"]));
}

#[test]
fn the_last_response_has_every_output_that_was_asked_for() {
    let call = call(Profile::Text, all_flags());
    let last = vec![row("ab", &[97, 98], Some(FinishReason::StopWord))];
    let tensors = outputs(Profile::Text, &call, last);
    let mut expected: Vec<&str> =
        Profile::Text.outputs().iter().map(|output| output.name).collect();
    expected.retain(|name| !["batch_index", "sequence_index"].contains(name));
    assert_eq!(names(&tensors), expected);
    let ints = |name| read_ints(named(&tensors, name));
    assert_eq!(read_floats(named(&tensors, "cum_log_probs")), [-195.0]);
    assert_eq!(read_floats(named(&tensors, "output_log_probs")), [-97.0, -98.0]);
    assert_eq!(named(&tensors, "output_log_probs").shape, [1, 1, 2]);
    assert_eq!(named(&tensors, "finish_reason").data, bytes(&["stop"]));
    assert_eq!((ints("num_input_tokens"), ints("num_output_tokens")), (vec![3], vec![2]));
    assert_eq!(read_floats(named(&tensors, "acceptance_rate")), [0.75]);
    assert_eq!(ints("total_accepted_draft_tokens"), [6]);
    assert_eq!((ints("total_draft_tokens"), ints("num_spec_steps")), (vec![8], vec![5]));
    assert_eq!(ints("acceptance_histogram"), [2, 1, 1, 1]);
    assert_eq!(named(&tensors, "acceptance_histogram").shape, [1, 4]);
    assert_eq!(ints("kv_cache_alloc_new_blocks"), [2]);
    assert_eq!(ints("kv_cache_reused_blocks"), [3]);
    assert_eq!(ints("kv_cache_alloc_total_blocks"), [5]);
    assert_eq!((ints("arrival_time_ns"), ints("first_token_time_ns")), (vec![1], vec![3]));
    assert_eq!(ints("last_token_time_ns"), [i64::MAX]);
}

#[test]
fn an_operator_may_hide_what_tells_of_others_prompts() {
    let settings = Settings { report_reuse: false, ..settings(Profile::Text) };
    let call = call(Profile::Text, all_flags());
    let last = row("ab", &[97, 98], Some(FinishReason::StopWord));
    let reply = Reply { rows: vec![last], ..Reply::default() };
    let tensors = Contract::new(&settings, &limits(), VOCAB).outputs(&call, &reply, &TOKENIZER);
    let told: Vec<_> =
        names(&tensors).into_iter().filter(|name| name.starts_with("kv_cache")).collect();
    assert_eq!(told, ["kv_cache_alloc_total_blocks"]);
}

#[test]
fn responses_before_the_last_have_the_counts_so_far_and_no_reason_of_the_end() {
    let call = call(Profile::Text, all_flags());
    let tensors = outputs(Profile::Text, &call, vec![row("a", &[97], None)]);
    let last = outputs(Profile::Text, &call, vec![row("b", &[98], Some(FinishReason::Length))]);
    let mut expected = names(&last);
    expected.retain(|&name| name != "finish_reason");
    assert_eq!(names(&tensors), expected);
    assert_eq!(read_ints(named(&tensors, "total_draft_tokens")), [8]);
}

#[test]
fn nothing_drafted_is_an_acceptance_rate_of_nothing() {
    let call = call(Profile::Text, all_flags());
    let plain =
        RowReply { counters: Counters::default(), ..row("", &[], Some(FinishReason::Length)) };
    let tensors = outputs(Profile::Text, &call, vec![plain]);
    assert_eq!(read_floats(named(&tensors, "acceptance_rate")), [0.0]);
    assert_eq!(read_ints(named(&tensors, "acceptance_histogram")), [0]);
    assert_eq!(named(&tensors, "output_log_probs").shape, [1, 1, 0]);
    assert_eq!(named(&tensors, "finish_reason").data, bytes(&["length"]));
}

#[test]
fn rows_of_a_batch_are_filled_up_to_the_longest() {
    let inputs = [
        ints("input_ids", &[2, 1], &[1, 2]),
        ints("pad_id", &[2, 1], &[-1, 7]),
        tensor("return_log_probs", DataType::Bool, &[2, 1], vec![1, 1]),
    ];
    let call = parse(Profile::Token, &inputs).unwrap();
    let long = later(row("", &[5, 6, 7], Some(FinishReason::Length)));
    let short = later(RowReply { row_idx: 1, ..row("", &[9], Some(FinishReason::Stop(9))) });
    let tensors = outputs(Profile::Token, &call, vec![long, short]);
    let ids = named(&tensors, "output_ids");
    assert_eq!((ids.shape.as_slice(), read_ints(ids)), (&[2, 1, 3][..], vec![5, 6, 7, 9, 7, 7]));
    let lengths = named(&tensors, "sequence_length");
    assert_eq!((lengths.shape.as_slice(), read_ints(lengths)), (&[2, 1][..], vec![3, 1]));
    let log_probs = read_floats(named(&tensors, "output_log_probs"));
    assert_eq!(log_probs, [-5.0, -6.0, -7.0, -9.0, 0.0, 0.0]);
    assert_eq!(read_ints(named(&tensors, "batch_index")), [0, 1]);
    assert_eq!(read_ints(named(&tensors, "sequence_index")), [0, 0]);
}

#[test]
fn a_streamed_row_of_a_batch_says_which_it_is() {
    let prompts = tensor("text_input", DataType::Bytes, &[2, 1], bytes(&["a", "b"]));
    let stream = tensor("stream", DataType::Bool, &[2, 1], vec![1, 1]);
    let call = parse(Profile::Text, &[prompts, stream]).unwrap();
    let second = RowReply { row_idx: 1, ..row("x", &[120], None) };
    let tensors = outputs(Profile::Text, &call, vec![second]);
    assert_eq!(names(&tensors), ["text_output", "batch_index", "sequence_index"]);
    assert_eq!(named(&tensors, "text_output").shape, [1]);
    let index = named(&tensors, "batch_index");
    assert_eq!((index.shape.as_slice(), read_ints(index)), (&[1, 1][..], vec![1]));
}

#[test]
fn tokens_have_the_prompt_in_front_where_it_is_wanted() {
    let stream = flag("streaming", true);
    let exclude = |flag_value| flag("exclude_input_in_output", flag_value);
    for (inputs, expected) in [
        (vec![], &[1, 2, 5][..]),
        (vec![exclude(false)], &[1, 2, 5]),
        (vec![exclude(true)], &[5]),
        (vec![stream.clone()], &[5]),
        (vec![stream, exclude(false)], &[5]),
    ] {
        let tensors =
            outputs(Profile::Token, &call(Profile::Token, inputs), vec![row("", &[5], None)]);
        assert_eq!(read_ints(named(&tensors, "output_ids")), expected);
        assert_eq!(read_ints(named(&tensors, "sequence_length")), [expected.len() as i64]);
    }
}

#[test]
fn vllm_outputs_have_no_batch_dimension_and_vllms_types() {
    let flags = [
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
    ];
    let mut inputs: Vec<Tensor> = flags.map(|name| flag(name, true)).to_vec();
    inputs.push(texts("sampling_parameters", &[r#"{"logprobs": 2}"#]));
    let mut call = call(Profile::Vllm, inputs);
    // The runtime takes the request away; the response must not need it.
    call.rows[0].request = spec_core::runtime::Request::default();
    let tensors = outputs(Profile::Vllm, &call, vec![row("a", &[97], None)]);
    assert_eq!(
        named(&tensors, "text_output"),
        &tensor("text_output", DataType::Bytes, &[1], bytes(&["hia"]))
    );
    assert_eq!(named(&tensors, "finish_reason").data, bytes(&["None"]));
    assert_eq!(named(&tensors, "num_input_tokens").datatype, DataType::Uint32);
    assert_eq!(named(&tensors, "num_output_tokens").shape, [1]);
    assert_eq!(read_floats(named(&tensors, "cumulative_logprob")), [-97.0]);
    let expected = r#"[{"97":{"logprob":-97.0,"rank":8,"decoded_token":"a"},"98":{"logprob":-0.5,"rank":1,"decoded_token":"b"}}]"#;
    assert_eq!(named(&tensors, "logprobs").data, bytes(&[expected]));
}

#[test]
fn vllm_logprobs_are_null_where_none_were_asked_for() {
    let call = call(Profile::Vllm, vec![flag("return_logprobs", true)]);
    let tensors = outputs(Profile::Vllm, &call, vec![row("a", &[97], None)]);
    assert_eq!(named(&tensors, "logprobs").data, bytes(&["null"]));
}

#[test]
fn a_token_has_its_own_rank_however_few_alternatives_there_are() {
    let options = texts("sampling_parameters", &[r#"{"logprobs": 0}"#]);
    let call = call(Profile::Vllm, vec![flag("return_logprobs", true), options]);
    let mut reply = row("a", &[97], None);
    reply.emitted[0].top_logprobs.clear();
    let tensors = outputs(Profile::Vllm, &call, vec![reply]);
    let expected = r#"[{"97":{"logprob":-97.0,"rank":8,"decoded_token":"a"}}]"#;
    assert_eq!(named(&tensors, "logprobs").data, bytes(&[expected]));
}

#[test]
fn log_probabilities_of_a_prompt_are_one_list_however_they_came() {
    let whole = |parts: &[&[u32]]| {
        let mut told = PromptLogProbs::default();
        parts.iter().for_each(|tokens| told.push(&emitted(tokens), &TOKENIZER));
        told.json()
    };
    assert_eq!(whole(&[]), "[null]");
    assert_eq!(whole(&[&[97, 98, 99]]), whole(&[&[97], &[], &[98, 99]]));
    let list: Vec<Value> = serde_json::from_str(&whole(&[&[99, 97]])).unwrap();
    assert_eq!((list.len(), &list[0]), (3, &Value::Null));
    assert_eq!(list[1]["99"], json!({ "logprob": -99.0, "rank": 10, "decoded_token": "c" }));
    assert_eq!(list[2]["98"], json!({ "logprob": -0.5, "rank": 1, "decoded_token": "b" }));
}

#[test]
fn log_probabilities_of_the_prompt_are_an_output_where_they_are_asked_for() {
    let with = |options: &str| {
        let call = call(Profile::Vllm, vec![texts("sampling_parameters", &[options])]);
        let reply = Reply { rows: vec![row("a", &[97], None)], prompt_log_probs: "[null]".into() };
        contract(Profile::Vllm).outputs(&call, &reply, &TOKENIZER)
    };
    assert_eq!(names(&with("{}")), ["text_output"]);
    let tensors = with(r#"{"prompt_logprobs": 0}"#);
    assert_eq!(
        named(&tensors, "prompt_logprobs"),
        &tensor("prompt_logprobs", DataType::Bytes, &[1], bytes(&["[null]"]))
    );
}
