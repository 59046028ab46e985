//! Small vocabularies for tests, written as real `tokenizer.json` files are.

use super::{ChatTemplate, Tokenizer};
use serde_json::{Value, json};
use std::path::Path;

/// A byte-level vocabulary: the 256 letters, a few merges of parts of multi-byte characters, and
/// two added tokens, of which the first is special.
pub(crate) fn byte_level() -> Value {
    let letters: Vec<char> = (0..=255u8).map(byte_letter).collect();
    let mut vocab = serde_json::Map::new();
    for (id, letter) in letters.iter().enumerate() {
        vocab.insert(letter.to_string(), json!(id));
    }
    let mut merges = Vec::new();
    // The second one joins the middle of a 3-byte character, the third a whole 2-byte one.
    for (left, right) in [(b't', b'h'), (0xe2, 0x98), (0xc3, 0xa9), (b' ', b'a')] {
        let pair = [left, right].map(|byte| letters[usize::from(byte)].to_string());
        vocab.insert(pair.concat(), json!(vocab.len()));
        merges.push(json!(pair));
    }
    let first = vocab.len();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(first, "<|end|>", true),
            added(first + 1, "<tool ☃>", false),
        ],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges },
    })
}

/// A vocabulary in the way of Llama 2: `▁` for spaces, byte fallback, bos in front.
pub(crate) fn byte_fallback() -> Value {
    let mut vocab = serde_json::Map::new();
    for token in ["<unk>", "<s>", "</s>"] {
        vocab.insert(token.to_string(), json!(vocab.len()));
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    for token in ["▁", "a", "b", "é", "▁a", "ab", "▁▁"] {
        vocab.insert(token.to_string(), json!(vocab.len()));
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true),
        ],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "pre_tokenizer": null,
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } },
                { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } } },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": [["▁", "a"], ["a", "b"], ["▁", "▁"]] },
    })
}

pub(crate) fn parse(json: &Value) -> crate::Result<Tokenizer> {
    Tokenizer::parse(json.to_string().as_bytes(), Path::new("tokenizer.json"))
}

/// The same with a chat template, which has no variables for special tokens.
pub(crate) fn parse_with_template(json: &Value, source: &str) -> Tokenizer {
    let template = ChatTemplate::new(source.into(), None, minijinja::Value::UNDEFINED);
    Tokenizer { chat: Some(template.expect("compiles")), ..parse(json).expect("parses") }
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special })
}

/// GPT-2's letter for a byte, counted as its authors do.
fn byte_letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).expect("a letter below U+0200")
}
