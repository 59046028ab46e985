//! Whatever comes, a request is read or refused: nothing panics, and what is read can be served.

use super::super::table::{Action, Input};
use super::super::{FanOut, Reply, RowReply};
use super::*;
use proptest::prelude::*;
use spec_core::tokenizer::check_stops;

const PROFILES: [Profile; 3] = [Profile::Text, Profile::Token, Profile::Vllm];

fn names() -> Vec<String> {
    let of_profile = |profile: Profile| profile.inputs().iter().chain(profile.parameters());
    let mut names: Vec<String> =
        PROFILES.into_iter().flat_map(of_profile).map(|input| input.name.to_string()).collect();
    names.push("nonsense".into());
    names
}

fn datatype() -> impl Strategy<Value = DataType> {
    (1u32..=14).prop_map(|raw| DataType::from_raw(raw).unwrap())
}

fn any_tensor() -> impl Strategy<Value = Tensor> {
    let shape = prop::collection::vec(prop_oneof![8 => 0i64..3, 1 => any::<i64>()], 0..4);
    let data = prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..24);
    (prop::sample::select(names()), datatype(), shape, data)
        .prop_map(|(name, datatype, shape, data)| Tensor { name, datatype, shape, data })
}

fn value(datatype: DataType) -> BoxedStrategy<Vec<u8>> {
    match datatype {
        DataType::Bool => any::<bool>().prop_map(|flag| vec![u8::from(flag)]).boxed(),
        DataType::Int32 => prop_oneof![3 => -2i32..10, 1 => any::<i32>()]
            .prop_map(|int| int.to_le_bytes().to_vec())
            .boxed(),
        DataType::Uint64 => any::<u64>().prop_map(|int| int.to_le_bytes().to_vec()).boxed(),
        DataType::Fp32 => prop_oneof![3 => -0.5f32..2.5, 1 => any::<f32>()]
            .prop_map(|float| float.to_le_bytes().to_vec())
            .boxed(),
        _ => prop_oneof![any::<String>(), json_text()].prop_map(|text| bytes(&[&text])).boxed(),
    }
}

/// A tensor as its table says, with any values, of an input that is not there to be refused.
fn fitting(profile: Profile, batch: i64) -> impl Strategy<Value = Tensor> {
    let is_read = |input: &&Input| !matches!(input.option.action, Action::Refused(..));
    let inputs: Vec<&'static Input> = profile.inputs().iter().filter(is_read).collect();
    (0..inputs.len(), 0usize..4).prop_flat_map(move |(idx, len)| {
        let input = inputs[idx];
        let (datatype, mut shape) =
            (input.option.action.datatype(), input.option.action.dims().to_vec());
        shape.iter_mut().filter(|dim| **dim < 0).for_each(|dim| *dim = len as i64);
        if profile.batches() {
            shape.insert(0, batch);
        }
        let count = shape.iter().product::<i64>() as usize;
        prop::collection::vec(value(datatype), count)
            .prop_map(move |values| tensor(input.name, datatype, &shape, values.concat()))
    })
}

fn parameter() -> impl Strategy<Value = (String, Parameter)> {
    let value = prop_oneof![
        any::<String>().prop_map(Parameter::String),
        json_text().prop_map(Parameter::String),
        any::<i64>().prop_map(Parameter::Int),
        (0i64..10).prop_map(Parameter::Int),
        any::<bool>().prop_map(Parameter::Bool),
        any::<f64>().prop_map(Parameter::Double),
    ];
    (prop::sample::select(names()), value)
}

/// JSON that looks like sampling options, conversations or lists.
fn json_text() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1i64..5).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(json!({ "role": "user", "content": "x" })),
    ];
    let keys = prop::sample::select(names());
    let tree = leaf.prop_recursive(3, 16, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys.clone(), inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    });
    tree.prop_map(|json| json.to_string())
}

/// What the runtime relies on.
fn assert_servable(profile: Profile, call: &Call) {
    assert!(!call.rows.is_empty());
    for row in &call.rows {
        let request = &row.request;
        request.sampling.validate(VOCAB).unwrap();
        let rules = row.rules.clone().unwrap_or_default();
        check_stops(&rules.stops).unwrap();
        assert!(!request.prompt.is_empty() && request.max_tokens > 0);
        assert!(request.prompt.len() + request.max_tokens <= MAX_SEQ_LEN);
        assert!(request.draft_len.is_none_or(|len| len <= MAX_DRAFT_LEN));
        assert!(row.request.given_draft.len() <= MAX_DRAFT_LEN);
        let ids = [&*request.prompt, &request.stop_tokens, &row.request.given_draft];
        assert!(ids.into_iter().flatten().all(|&id| (id as usize) < VOCAB));
        assert_eq!(row.prompt_len, request.prompt.len());
    }
    let FanOut { drawn, returned } = call.fan_out;
    assert!((1..=drawn).contains(&returned) && drawn <= 128);
    let of_row = |row_idx| {
        (0..returned).map(move |sequence_idx| RowReply {
            row_idx,
            sequence_idx,
            ..RowReply::default()
        })
    };
    let reply = Reply { rows: (0..call.rows.len()).flat_map(of_row).collect(), ..Reply::default() };
    for output in contract(profile).outputs(call, &reply, &TOKENIZER) {
        let flat = (call.rows.len() * returned) as i64;
        match output.name.as_str() {
            "text_output" => assert_eq!(output.shape, [flat]),
            _ if profile.batches() => assert_eq!(output.shape[0], call.rows.len() as i64),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_tensors_and_parameters_are_read_or_refused(
        profile in prop::sample::select(PROFILES.to_vec()),
        inputs in prop::collection::vec(any_tensor(), 0..6),
        parameters in prop::collection::vec(parameter(), 0..4),
    ) {
        if let Ok(call) = contract(profile).parse(&inputs, &parameters, &TOKENIZER) {
            assert_servable(profile, &call);
        }
    }

    #[test]
    fn well_formed_tensors_of_any_values_are_read_or_refused(
        (profile, batch, inputs) in (prop::sample::select(PROFILES.to_vec()), 1i64..3).prop_flat_map(
            |(profile, batch)| {
                let inputs = prop::collection::vec(fitting(profile, batch), 0..3);
                (Just(profile), Just(batch), inputs)
            },
        ),
        parameters in prop::collection::vec(parameter(), 0..2),
    ) {
        let mut prompt = match profile {
            Profile::Token => ints("input_ids", &[batch, 1], &vec![1; batch as usize]),
            _ => tensor("text_input", DataType::Bytes, &[batch, 1], bytes(&vec!["hi"; batch as usize])),
        };
        if profile == Profile::Vllm {
            prompt = unbatched(tensor("text_input", DataType::Bytes, &[1, 1], bytes(&["hi"])));
        }
        let inputs: Vec<Tensor> = [prompt].into_iter().chain(inputs).collect();
        if let Ok(call) = contract(profile).parse(&inputs, &parameters, &TOKENIZER) {
            assert_servable(profile, &call);
        }
    }

    #[test]
    fn any_sampling_options_and_conversations_are_read_or_refused(json in json_text()) {
        let text = unbatched(texts("text_input", &["hi"]));
        let options = unbatched(texts("sampling_parameters", &[&json]));
        if let Ok(call) = parse(Profile::Vllm, &[text, options]) {
            assert_servable(Profile::Vllm, &call);
        }
        if let Ok(call) = parse(Profile::Text, &[texts("messages", &[&json])]) {
            assert_servable(Profile::Text, &call);
        }
    }

    #[test]
    fn any_configuration_is_completed_or_refused(json in json_text()) {
        let mut config: Value = serde_json::from_str(&json).unwrap();
        let nested = json!({ "input": config.clone(), "max_batch_size": config.clone() });
        for profile in PROFILES {
            if contract(profile).complete(&mut config).is_ok() {
                contract(profile).check(&config).unwrap();
            }
            let _ = contract(profile).complete(&mut nested.clone());
        }
    }
}
