//! Requests as clients send them, and what is made of them.

mod clients;
mod configuration;
mod hostile;
mod limits;
mod prompts;
mod replies;
mod sampling;
mod sequences;
mod tables;
mod texts;

use super::{Call, Contract, Profile};
use crate::parameters::Settings;
use serde_json::{Value, json};
use spec_core::engine::Limits;
use spec_core::tokenizer::Tokenizer;
use std::sync::LazyLock;
use triton_backend::{Code, DataType, Error, Parameter, Result, Tensor};

/// The begin token of the test vocabulary, which a text gets in front.
const BOS: u32 = 256;
/// Tokens of the test model: the bytes, begin, end and two without a text.
const VOCAB: usize = 260;
const MAX_SEQ_LEN: usize = 64;
const MAX_DRAFT_LEN: usize = 4;

/// A token for each byte, so that prompts are easy to count.
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), vocabulary().to_string()).unwrap();
    let config = json!({
        "bos_token": "<s>", "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{% for t in tools or [] %}t:{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if enable_thinking is false %}n;{% endif %}a:",
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::open(dir.path()).unwrap()
});

fn vocabulary() -> Value {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut vocab = serde_json::Map::new();
    let mut others = 256;
    for byte in 0..=255u8 {
        let letter = if printable(byte) { u32::from(byte) } else { others };
        others += u32::from(!printable(byte));
        vocab.insert(char::from_u32(letter).unwrap().to_string(), json!(byte));
    }
    let added = |id: u32, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [added(BOS, "<s>"), added(257, "</s>")],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true },
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } },
                { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [BOS], "tokens": ["<s>"] } } },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [] },
    })
}

fn limits() -> Limits {
    Limits {
        max_draft_len: MAX_DRAFT_LEN,
        max_batch_size: 8,
        max_seq_len: MAX_SEQ_LEN,
        max_num_tokens: 64,
    }
}

fn settings(profile: Profile) -> Settings {
    Settings { profile, decoupled: true, ..Settings::default() }
}

fn contract(profile: Profile) -> Contract {
    Contract::new(&settings(profile), &limits(), VOCAB)
}

fn parse(profile: Profile, inputs: &[Tensor]) -> Result<Call> {
    contract(profile).parse(inputs, &[], &TOKENIZER)
}

/// The one row of a request of a text profile with prompt `hi` and these inputs.
fn hi(inputs: impl IntoIterator<Item = Tensor>) -> Result<super::Row> {
    let inputs: Vec<Tensor> = [texts("text_input", &["hi"])].into_iter().chain(inputs).collect();
    parse(Profile::Text, &inputs).map(|mut call| call.rows.remove(0))
}

fn with_parameter(name: &str, parameter: Parameter) -> Result<super::Row> {
    let inputs = [texts("text_input", &["hi"])];
    let call = contract(Profile::Text).parse(&inputs, &[(name.into(), parameter)], &TOKENIZER);
    call.map(|mut call| call.rows.remove(0))
}

fn tensor(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> Tensor {
    Tensor { name: name.into(), datatype, shape: shape.to_vec(), data }
}

/// One row of strings.
fn texts(name: &str, values: &[&str]) -> Tensor {
    tensor(name, DataType::Bytes, &[1, values.len() as i64], bytes(values))
}

fn bytes(values: &[&str]) -> Vec<u8> {
    let element = |text: &&str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    values.iter().flat_map(element).collect()
}

fn int(name: &str, value: i32) -> Tensor {
    tensor(name, DataType::Int32, &[1, 1], value.to_le_bytes().to_vec())
}

fn ints(name: &str, shape: &[i64], values: &[i32]) -> Tensor {
    let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    tensor(name, DataType::Int32, shape, data)
}

fn float(name: &str, value: f32) -> Tensor {
    floats(name, &[value])
}

fn floats(name: &str, values: &[f32]) -> Tensor {
    let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    tensor(name, DataType::Fp32, &[1, values.len() as i64], data)
}

fn flag(name: &str, value: bool) -> Tensor {
    tensor(name, DataType::Bool, &[1, 1], vec![u8::from(value)])
}

fn seed(value: u64) -> Tensor {
    tensor("seed", DataType::Uint64, &[1, 1], value.to_le_bytes().to_vec())
}

/// The same tensor as a model without a batch dimension takes it.
fn unbatched(tensor: Tensor) -> Tensor {
    Tensor { shape: tensor.shape[1..].to_vec(), ..tensor }
}

#[track_caller]
fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
    code_and_message(result, Code::InvalidArg)
}

#[track_caller]
fn unsupported<T: std::fmt::Debug>(result: Result<T>) -> String {
    code_and_message(result, Code::Unsupported)
}

#[track_caller]
fn code_and_message<T: std::fmt::Debug>(result: Result<T>, expected: Code) -> String {
    let Error { code, message } = result.unwrap_err();
    assert_eq!(code, expected, "{message}");
    message
}

/// The prompt of a text: the begin token and the bytes.
fn ids(text: &str) -> Vec<u32> {
    std::iter::once(BOS).chain(text.bytes().map(u32::from)).collect()
}
