//! Prompts: text, conversations, tokens, batches, and what becomes of them.

use super::super::Echo;
use super::*;

#[test]
fn a_text_gets_one_begin_token_even_if_it_has_one() {
    assert_eq!(*hi([]).unwrap().request.prompt, ids("hi"));
    let call = parse(Profile::Text, &[texts("text_input", &["<s>hi"])]).unwrap();
    assert_eq!(*call.rows[0].request.prompt, ids("hi"));
}

#[test]
fn messages_are_rendered_with_the_chat_template() {
    let messages = r#"[{"role": "user", "content": "é"}]"#;
    let inputs = [texts("messages", &[messages]), flag("exclude_input_in_output", false)];
    let row = parse(Profile::Text, &inputs).unwrap().rows.remove(0);
    assert_eq!(*row.request.prompt, ids("u:é;a:"));
    assert_eq!(row.echo, Echo::Text("<s>u:é;a:".into()));
    assert_eq!(row.prompt_len, 8);
}

#[test]
fn messages_that_are_no_conversation_are_refused() {
    for (messages, reason) in [
        ("", "not a JSON list of objects: EOF while parsing a value"),
        ("{}", "not a JSON list of objects: invalid type: map, expected a sequence"),
        (r#"[{"role": "user"}]"#, "[0] has no content"),
        (r#"[{"role": "user", "content": "x", "tool": 1}]"#, "[0]: field 'tool' is not known"),
    ] {
        let message = refusal(parse(Profile::Text, &[texts("messages", &[messages])]));
        assert!(message.starts_with(&format!("messages: {reason}")), "{message}");
    }
}

#[test]
fn a_prompt_is_text_or_messages_and_not_nothing() {
    assert_eq!(
        refusal(parse(Profile::Text, &[texts("messages", &["[]"])])),
        "messages: an empty list, at least 1 message is needed"
    );
    let both = [texts("text_input", &["hi"]), texts("messages", &["[]"])];
    assert_eq!(refusal(parse(Profile::Text, &both)), "text_input and messages are both given");
    assert_eq!(
        refusal(parse(Profile::Text, &[int("max_tokens", 1)])),
        "neither text_input nor messages is given"
    );
    assert_eq!(refusal(parse(Profile::Token, &[])), "input_ids is not given");
    assert_eq!(refusal(parse(Profile::Vllm, &[])), "text_input is not given");
}

#[test]
fn each_row_of_a_batch_is_a_text_of_its_own() {
    let shape = [2, 1];
    let mut row_tokens = int("max_tokens", 3);
    row_tokens.shape = shape.to_vec();
    row_tokens.data.extend_from_slice(&4i32.to_le_bytes());
    let prompts = tensor("text_input", DataType::Bytes, &shape, bytes(&["a", "bc"]));
    let rows = parse(Profile::Text, &[prompts, row_tokens]).unwrap().rows;
    let read: Vec<_> = rows.iter().map(|row| (row.prompt_len, row.request.max_tokens)).collect();
    assert_eq!(read, [(2, 3), (3, 4)]);
}

#[test]
fn rows_that_differ_in_what_they_return_are_refused() {
    let prompts = tensor("text_input", DataType::Bytes, &[2, 1], bytes(&["a", "b"]));
    let stream = tensor("stream", DataType::Bool, &[2, 1], vec![0, 1]);
    assert_eq!(
        refusal(parse(Profile::Text, &[prompts, stream])),
        "rows of a batch differ in what they stream or return"
    );
}

#[test]
fn inputs_of_different_batches_are_refused_with_both_sizes() {
    let stream = tensor("stream", DataType::Bool, &[2, 1], vec![0, 0]);
    assert_eq!(refusal(hi([stream])), "stream: a batch of 2, text_input has one of 1");
}

#[test]
fn an_input_given_twice_or_unknown_is_refused_by_name() {
    assert_eq!(refusal(hi([int("top_k", 1), int("top_k", 1)])), "top_k: given twice");
    assert_eq!(refusal(hi([int("runtime_top_k", 1)])), "input 'runtime_top_k' is not known");
    assert_eq!(
        refusal(with_parameter("beam", Parameter::Int(1))),
        "request parameter 'beam' is not known"
    );
}

#[test]
fn input_lengths_cuts_what_fills_up_a_row() {
    let inputs = [
        ints("input_ids", &[2, 3], &[1, 2, 3, 4, -1, 1 << 20]),
        ints("input_lengths", &[2, 1], &[3, 1]),
        flag("exclude_input_in_output", false),
    ];
    let mut inputs = inputs.to_vec();
    inputs[2].shape = vec![2, 1];
    inputs[2].data = vec![0, 0];
    let rows = parse(Profile::Token, &inputs).unwrap().rows;
    assert_eq!((rows[0].request.prompt.len(), rows[1].request.prompt.as_slice()), (3, &[4][..]));
    assert_eq!(rows[1].echo, Echo::Ids(vec![4].into()));
    inputs[1] = ints("input_lengths", &[2, 1], &[3, 2]);
    assert_eq!(refusal(parse(Profile::Token, &inputs)), "input_ids: -1 is no token");
    inputs[1] = ints("input_lengths", &[2, 1], &[3, 4]);
    assert_eq!(refusal(parse(Profile::Token, &inputs)), "input_lengths: 4, input_ids has 3 tokens");
}

#[test]
fn vllm_reads_the_end_of_a_prompt_that_is_to_be_cut() {
    let prompt = |text: &str, kept: i64| {
        let inputs = [unbatched(texts("text_input", &[text]))];
        let parameters = [("truncate_prompt_tokens".to_string(), Parameter::Int(kept))];
        let call = contract(Profile::Vllm).parse(&inputs, &parameters, &TOKENIZER);
        call.map(|call| call.rows[0].request.prompt.to_vec())
    };
    assert_eq!(prompt("abcd", 2).unwrap(), [99, 100]);
    assert_eq!(prompt("abcd", 9).unwrap(), ids("abcd"));
    // One that is too long fits then.
    assert_eq!(prompt(&"x".repeat(200), -1).unwrap(), [120; MAX_SEQ_LEN - 1]);
    assert_eq!(
        refusal(prompt(&"x".repeat(200), 64)),
        "text_input: 64 tokens, max_seq_len is 64 with at least 1 to generate"
    );
    assert_eq!(refusal(prompt("x", 0)), "truncate_prompt_tokens: 0, at least 1 is needed");
}

/// All of a text is split before its end is known: of one that is kept, that would be work without a bound.
#[test]
fn a_text_whose_end_is_read_may_be_longer_than_the_engine_but_not_without_end() {
    let limits = Limits { max_seq_len: 8192, ..limits() };
    let contract = Contract::new(&settings(Profile::Vllm), &limits, VOCAB);
    let prompt = |len: usize, kept: i64| {
        let inputs = [unbatched(texts("text_input", &[&"x".repeat(len)]))];
        let parameters = [("truncate_prompt_tokens".to_string(), Parameter::Int(kept))];
        let call = contract.parse(&inputs, &parameters, &TOKENIZER);
        call.map(|call| call.rows[0].request.prompt.clone())
    };
    // Tokens of this vocabulary are taken to reach 3 bytes.
    let most = |kept: usize| 3 * (4 * kept + 65_536);
    assert_eq!(*prompt(most(2), 2).unwrap(), [120; 2]);
    assert_eq!(
        refusal(prompt(most(2) + 1, 2)),
        "text_input: 196633 bytes are more than 65544 tokens, too many to find the last 2 of them"
    );
    assert_eq!(*prompt(most(8191), -1).unwrap(), [120; 8191]);
    let refused = refusal(prompt(most(8191) + 1, -1));
    assert!(
        refused.ends_with("are more than 98300 tokens, too many to find the last 8191 of them")
    );
}

#[test]
fn what_a_conversation_is_made_of_is_bounded_together() {
    let conversation = texts("messages", &[r#"[{"role": "user", "content": "hi"}]"#]);
    let spaces = " ".repeat(4096);
    let tools = texts("tools", &[&format!("[{spaces}]")]);
    let variables = texts("chat_template_kwargs", &[&format!("{{{spaces}}}")]);
    for one in [&tools, &variables] {
        assert!(parse(Profile::Text, &[conversation.clone(), one.clone()]).is_ok());
    }
    assert_eq!(
        refusal(parse(Profile::Text, &[conversation.clone(), tools, variables])),
        "messages, tools, chat_template_kwargs: 8231 bytes, at most 8192 are allowed for a max_seq_len of 64"
    );
    let variables = texts("chat_template_kwargs", &[&format!("{{{spaces}{spaces}}}")]);
    assert_eq!(
        refusal(parse(Profile::Text, &[conversation, variables])),
        "messages, chat_template_kwargs: 8229 bytes, at most 8192 are allowed for a max_seq_len of 64"
    );
}

#[test]
fn tools_and_variables_of_the_template_come_with_messages() {
    let conversation = texts("messages", &[r#"[{"role": "user", "content": "hi"}]"#]);
    let tools = texts("tools", &[r#"[{"type": "function", "function": {"name": "f"}}]"#]);
    let variables = texts("chat_template_kwargs", &[r#"{"enable_thinking": false}"#]);
    let all = [conversation.clone(), tools.clone(), variables.clone()];
    let call = parse(Profile::Text, &all).unwrap();
    assert_eq!(*call.rows[0].request.prompt, ids("t:f;u:hi;n;a:"));
    for (extra, message) in [
        (tools, "tools: given without messages"),
        (variables, "chat_template_kwargs: given without messages"),
    ] {
        let alone = [texts("text_input", &["hi"]), extra];
        assert_eq!(refusal(parse(Profile::Text, &alone)), message);
    }
    let wrong = [conversation, texts("chat_template_kwargs", &["[]"])];
    assert!(refusal(parse(Profile::Text, &wrong)).starts_with("chat_template_kwargs: "));
}

#[test]
fn every_profile_takes_a_salt_for_its_cache() {
    for profile in [Profile::Text, Profile::Token, Profile::Vllm] {
        let prompt = match profile {
            Profile::Text => texts("text_input", &["hi"]),
            Profile::Token => ints("input_ids", &[1, 2], &[1, 2]),
            Profile::Vllm => unbatched(texts("text_input", &["hi"])),
        };
        let parameters = [("cache_salt".to_string(), Parameter::String("a tenant".into()))];
        let call = contract(profile).parse(&[prompt], &parameters, &TOKENIZER).unwrap();
        assert_eq!(call.rows[0].request.cache_salt, "a tenant");
    }
}

#[test]
fn vllm_has_the_prompt_in_front_where_nothing_is_streamed() {
    let prompt = unbatched(texts("text_input", &["hi"]));
    let echo = |extra: &[Tensor]| {
        let inputs = [std::slice::from_ref(&prompt), extra].concat();
        parse(Profile::Vllm, &inputs).map(|call| call.rows[0].echo.clone())
    };
    let (stream, keep) =
        (unbatched(flag("stream", true)), unbatched(flag("exclude_input_in_output", false)));
    assert_eq!(echo(&[]).unwrap(), Echo::Text("hi".into()));
    assert_eq!(echo(std::slice::from_ref(&stream)).unwrap(), Echo::None);
    assert_eq!(
        refusal(echo(&[stream, keep])),
        "When streaming, `exclude_input_in_output` = False is not allowed."
    );
}

#[test]
fn streaming_needs_a_decoupled_model() {
    let settings = Settings { decoupled: false, ..settings(Profile::Text) };
    let contract = Contract::new(&settings, &limits(), VOCAB);
    let inputs = [texts("text_input", &["hi"]), flag("stream", true)];
    assert_eq!(
        refusal(contract.parse(&inputs, &[], &TOKENIZER)),
        "Streaming is only supported if model is deployed using decoupled mode."
    );
    assert!(contract.parse(&inputs[..1], &[], &TOKENIZER).is_ok());
}
