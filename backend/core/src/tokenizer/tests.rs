//! The tokenizer as a whole: opening, refusing, and decoding token by token.

use super::testing::{byte_fallback, byte_level, parse};
use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

static BYTE_LEVEL: LazyLock<Tokenizer> = LazyLock::new(|| parse(&byte_level()).expect("parses"));
static BYTE_FALLBACK: LazyLock<Tokenizer> =
    LazyLock::new(|| parse(&byte_fallback()).expect("parses"));

fn refusal(json: &Value) -> String {
    match parse(json) {
        Err(Error::BadModel(message)) => message,
        Err(other) => panic!("not a bad model: {other}"),
        Ok(_) => panic!("was accepted"),
    }
}

/// Pushes one by one; the pieces and what `finish` adds.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(skip_special);
    let pieces = ids.iter().map(|&id| detokenizer.push(tokenizer, id).expect("decodes")).collect();
    (pieces, detokenizer.finish())
}

#[test]
fn text_goes_to_ids_and_back() {
    let text = "the é☃ <|end|> a\n";
    let ids = BYTE_LEVEL.encode(text, true).expect("encodes");
    assert_eq!(BYTE_LEVEL.decode(&ids, false).expect("decodes"), text);
    assert_eq!(BYTE_LEVEL.decode(&ids, true).expect("decodes"), "the é☃  a\n");
    assert!(BYTE_LEVEL.is_special(260) && !BYTE_LEVEL.is_special(261) && !BYTE_LEVEL.is_special(5));
    assert_eq!(BYTE_LEVEL.vocab_size(), 262);
    assert_eq!(BYTE_LEVEL.id_to_token(260).as_deref(), Some("<|end|>"));
    assert_eq!(BYTE_LEVEL.token_to_id("<|end|>"), Some(260));
    assert_eq!(BYTE_LEVEL.id_to_token(262), None);
}

#[test]
fn the_tokens_around_a_text_are_added_only_when_asked_for() {
    let (with, without) = (BYTE_FALLBACK.encode(" ab", true), BYTE_FALLBACK.encode(" ab", false));
    let (with, without) = (with.expect("encodes"), without.expect("encodes"));
    assert_eq!(with[0], 1);
    assert_eq!(with[1..], without);
    assert_eq!(BYTE_FALLBACK.decode(&with, true).expect("decodes"), " ab");
}

/// A first word of a text is written without its space, one that goes on from a text is not.
#[test]
fn what_goes_on_from_a_text_keeps_its_first_space() {
    let ids = BYTE_FALLBACK.encode(" ab", false).expect("encodes");
    let text = |mut detokenizer: Detokenizer| {
        let push = |&id| detokenizer.push(&BYTE_FALLBACK, id).expect("decodes");
        ids.iter().map(push).collect::<String>()
    };
    let (first, behind) = (text(Detokenizer::new(true)), text(Detokenizer::behind_text(true)));
    assert_eq!(behind, format!(" {first}"));
    let ids = BYTE_LEVEL.encode(" a", false).expect("encodes");
    let mut detokenizer = Detokenizer::behind_text(true);
    let push = |&id| detokenizer.push(&BYTE_LEVEL, id).expect("decodes");
    assert_eq!(ids.iter().map(push).collect::<String>(), " a");
}

#[test]
fn a_character_is_pushed_when_its_last_byte_is_there() {
    let ids = BYTE_LEVEL.encode("é☃", false).expect("encodes");
    let (pieces, last) = stream(&BYTE_LEVEL, &ids, true);
    assert_eq!(pieces, ["é", "", "☃"]);
    assert_eq!(last, "");
    let (pieces, last) = stream(&BYTE_LEVEL, &ids[..2], true);
    assert_eq!((pieces.concat(), last.as_str()), ("é".to_string(), "\u{fffd}"));
}

#[test]
fn a_character_of_byte_tokens_is_pushed_with_its_last_byte() {
    let ids = BYTE_FALLBACK.encode("a☃😀b", false).expect("encodes");
    let expected = ["a", "", "", "☃", "", "", "", "😀", "b"];
    assert_eq!(stream(&BYTE_FALLBACK, &ids, true), (expected.map(String::from).into(), "".into()));
    assert_eq!(stream(&BYTE_FALLBACK, &ids[..6], true).1, "\u{fffd}");
}

#[test]
fn a_wrong_byte_does_not_take_its_neighbours_along() {
    let byte = |byte: u32| 3 + byte;
    let a = BYTE_FALLBACK.token_to_id("a").expect("is there");
    let ids = [0xe2, 0x98, 0x83, 0xff, 0xe2, 0x41].map(byte);
    let decode = |ids: &[u32]| BYTE_FALLBACK.decode(ids, true).expect("decodes");
    assert_eq!(decode(&ids), "☃\u{fffd}\u{fffd}A");
    assert_eq!(decode(&[byte(0xe2), a]), "\u{fffd}a");
    // The first space of a text is no part of it, whatever it is written with.
    let word = BYTE_FALLBACK.token_to_id("▁a").expect("is there");
    assert_eq!([decode(&[word, word]), decode(&[byte(0x20), word])], ["a a", " a"]);
    assert_eq!(decode(&[byte(0xff), word]), "\u{fffd} a");
}

fn ids(vocab: u32) -> impl Strategy<Value = Vec<u32>> {
    // Beyond the end there are ids without a token.
    prop::collection::vec(0..vocab + 4, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn pushes_of_bytes_add_up_to_the_decoding_of_the_whole(ids in ids(262), skip: bool) {
        let (pieces, last) = stream(&BYTE_LEVEL, &ids, skip);
        prop_assert_eq!(pieces.concat() + &last, BYTE_LEVEL.decode(&ids, skip).expect("decodes"));
    }

    #[test]
    fn pushes_of_pieces_add_up_to_the_decoding_of_the_whole(
        // Mostly words and the bytes of a snowman, some of anything.
        ids in prop::collection::vec(
            prop_oneof![0u32..270, 259u32..266, Just(229u32), Just(155), Just(134), Just(35)], 0..40),
        skip: bool,
    ) {
        let (pieces, last) = stream(&BYTE_FALLBACK, &ids, skip);
        prop_assert_eq!(pieces.concat() + &last, BYTE_FALLBACK.decode(&ids, skip).expect("decodes"));
    }

    #[test]
    fn where_all_bytes_are_text_decoding_is_that_of_the_crate(
        text in "[ab é☃\u{1F600}\\x00-\\x20]{0,20}", skip: bool,
    ) {
        let ids = BYTE_FALLBACK.encode(&text, true).expect("encodes");
        let ours = BYTE_FALLBACK.decode(&ids, skip).expect("decodes");
        prop_assert_eq!(ours, BYTE_FALLBACK.inner.decode(&ids, skip).expect("decodes"));
    }

    #[test]
    fn nothing_pushed_depends_on_what_comes_later(
        ids in ids(270), cut in 0usize..40, fallback: bool,
    ) {
        let tokenizer: &Tokenizer = if fallback { &BYTE_FALLBACK } else { &BYTE_LEVEL };
        let (all, _) = stream(tokenizer, &ids, true);
        let (some, rest) = stream(tokenizer, &ids[..cut.min(ids.len())], true);
        prop_assert_eq!(&all[..some.len()], &some[..]);
        // Of three bytes, which are one character that was cut off.
        prop_assert!(["", "\u{fffd}"].contains(&rest.as_str()), "{}", rest);
    }

    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        prop_assert!(Tokenizer::parse(&bytes, Path::new("t")).is_err());
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = byte_level().to_string();
    for len in (0..whole.len()).step_by(7) {
        assert!(Tokenizer::parse(&whole.as_bytes()[..len], Path::new("t")).is_err(), "{len} bytes");
    }
}

#[test]
fn what_is_unknown_is_named() {
    let mut json = byte_level();
    json["pre_tokenizer"] = json!({ "type": "Telepathy" });
    let message = refusal(&json);
    assert!(
        message.starts_with("tokenizer.json: pre_tokenizer `Telepathy` is not one that"),
        "{message}"
    );

    let mut json = byte_level();
    json["decoder"] = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
    assert!(refusal(&json).contains("WordPiece"), "{}", refusal(&json));
    json["decoder"] = Value::Null;
    assert_eq!(refusal(&json), "tokenizer.json: has no decoder");

    let mut json = byte_level();
    json["version"] = json!("2.0");
    assert!(refusal(&json).contains("2.0"), "{}", refusal(&json));
}

#[test]
fn an_added_token_with_another_id_than_promised_is_refused() {
    let mut json = byte_level();
    json["added_tokens"][1]["id"] = json!(300);
    assert_eq!(
        refusal(&json),
        "tokenizer.json: added token \"<tool ☃>\" has id 300, loads as id 261"
    );
}

#[test]
fn a_template_of_tokens_or_texts_that_are_not_there_is_refused() {
    let mut json = byte_fallback();
    json["post_processor"]["single"][0]["SpecialToken"]["id"] = json!("<s~");
    let message = "tokenizer.json: post_processor: `single` has \"<s~\", no special token";
    assert_eq!(refusal(&json), message);
    json["post_processor"]["type"] = json!("TemplatePhocessing");
    assert_eq!(refusal(&json), message, "the type is not what decides how a part is read");
    let inner = json["post_processor"].take();
    json["post_processor"] = json!({ "type": "Sequence", "processors": [inner] });
    assert_eq!(refusal(&json), message);
    let mut json = byte_fallback();
    json["post_processor"]["single"][1]["Sequence"]["id"] = json!("B");
    assert_eq!(
        refusal(&json),
        "tokenizer.json: post_processor: `single` has sequence \"B\", expected A"
    );
}

#[test]
fn truncation_and_padding_of_the_file_are_not_followed() {
    let mut json = byte_level();
    json["truncation"] = json!({ "direction": "Right", "max_length": 2,
        "strategy": "LongestFirst", "stride": 0 });
    let ids = parse(&json).expect("parses").encode("abcdef", true).expect("encodes");
    assert_eq!(ids.len(), 6);
}

#[test]
fn a_folder_gives_the_chat_template_and_the_special_ids() {
    let dir = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).expect("writes");
    };
    assert!(matches!(Tokenizer::open(dir.path()), Err(Error::Io { .. })));
    write("tokenizer.json", &byte_fallback().to_string());
    assert!(!Tokenizer::open(dir.path()).expect("opens").has_chat_template());

    let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": null,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}" });
    write("tokenizer_config.json", &config.to_string());
    write("special_tokens_map.json", &json!({ "eos_token": "</s>" }).to_string());
    let tokenizer = Tokenizer::open(dir.path()).expect("opens");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert_eq!(
        tokenizer.hash(),
        blake3::hash(byte_fallback().to_string().as_bytes()).to_hex().as_str()
    );
    let conversation = Conversation::new([("user", "hi")]);
    let render =
        |tokenizer: &Tokenizer| tokenizer.render_chat(&conversation).expect("renders").text();
    assert_eq!(render(&tokenizer), "<s>hi</s>");

    write("chat_template.jinja", "file {{ messages[0].role }}");
    assert_eq!(render(&Tokenizer::open(dir.path()).expect("opens")), "file user");
    write("chat_template.jinja", "{% if %}");
    let message = Tokenizer::open(dir.path()).err().expect("refused").to_string();
    assert!(message.contains("chat_template.jinja: chat template: syntax error"), "{message}");
}

/// Some checkpoints with another `tokenizer.json` name the class of Llamas for its begin token alone.
#[test]
fn prompts_begin_with_what_the_class_of_llamas_is_told_to_put_there() {
    let dir = tempfile::tempdir().expect("a folder");
    let opened = |config: Value| {
        let write = |name: &str, json: &Value| {
            std::fs::write(dir.path().join(name), json.to_string()).expect("writes");
        };
        let mut tokenizer = byte_fallback();
        tokenizer["post_processor"] = Value::Null;
        write("tokenizer.json", &tokenizer);
        write("tokenizer_config.json", &config);
        Tokenizer::open(dir.path()).expect("opens")
    };
    let config = |class: &str, adds: Value| json!({ "bos_token": "<s>", "tokenizer_class": class, "add_bos_token": adds });
    let told = opened(config("LlamaTokenizerFast", json!(true)));
    let plain = told.encode("hi", false).expect("encodes");
    assert_eq!(told.encode_prompt("hi").expect("encodes"), [&[1], &plain[..]].concat());
    assert_eq!(told.encode_prompt("<s>hi").expect("encodes"), [&[1], &plain[..]].concat());
    assert_eq!(told.prompt_bos().expect("encodes"), Some(1));
    for (class, adds) in [
        ("LlamaTokenizerFast", json!(false)),
        ("LlamaTokenizerFast", Value::Null),
        ("Qwen2Tokenizer", json!(true)),
    ] {
        let other = opened(config(class, adds));
        assert_eq!(other.encode_prompt("hi").expect("encodes"), plain, "{class}");
        assert_eq!(other.prompt_bos().expect("encodes"), None);
    }
}

#[test]
fn a_file_over_its_limit_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("tokenizer.json"), byte_level().to_string()).expect("writes");
    let file = std::fs::File::create(dir.path().join("chat_template.jinja")).expect("creates");
    file.set_len(files::TEMPLATE_BYTES + 1).expect("grows");
    let message = Tokenizer::open(dir.path()).err().expect("refused").to_string();
    assert!(message.ends_with("chat_template.jinja: has more than 1048576 bytes"), "{message}");
}

#[test]
fn too_long_a_text_is_known_without_splitting_it() {
    // Three letters or less a token, but for the added ones.
    assert_eq!(BYTE_LEVEL.fewest_tokens("abcdefg", 100), 3);
    assert_eq!(BYTE_LEVEL.fewest_tokens("<tool ☃><|end|>", 100), 2);
    assert_eq!(BYTE_LEVEL.fewest_tokens(&"ab".repeat(1 << 20), 1000), 1001);
    assert_eq!(BYTE_FALLBACK.fewest_tokens("", 100), 0);
}

#[test]
fn where_tokens_do_not_spell_the_text_nothing_is_said_about_it() {
    let changes: [fn(&mut Value); 6] = [
        |json| json["normalizer"] = json!({ "type": "NFKC" }),
        |json| json["pre_tokenizer"] = json!({ "type": "WhitespaceSplit" }),
        |json| json["added_tokens"][0]["lstrip"] = json!(true),
        |json| json["model"]["end_of_word_suffix"] = json!("</w>"),
        |json| json["model"]["unk_token"] = json!("<|end|>"),
        |json| {
            json["pre_tokenizer"] = json!({ "type": "Split", "behavior": "Removed", "invert": false,
                "pattern": { "String": "a" } });
        },
    ];
    for change in changes {
        let mut json = byte_level();
        change(&mut json);
        assert_eq!(parse(&json).expect("parses").fewest_tokens("abcdefg", 100), 0);
    }
}

/// Texts that tokenizers change, with what may be put together out of parts.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[ab ▁é☃\\n]{0,9}",
        Just("e\u{301}>\u{338}\u{1112}\u{1161}\u{11ab}\u{212a}".to_string()),
        Just("<|end|>".to_string()),
        Just("<tool ☃>".to_string()),
        Just("<s>".to_string()),
    ];
    prop::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
}

static COMPOSING: LazyLock<Tokenizer> = LazyLock::new(|| {
    let mut json = byte_level();
    json["normalizer"] = json!({ "type": "NFC" });
    json["pre_tokenizer"]["add_prefix_space"] = json!(true);
    parse(&json).expect("parses")
});
static METASPACE: LazyLock<Tokenizer> = LazyLock::new(|| {
    let mut json = byte_fallback();
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] = json!({ "type": "Metaspace", "replacement": "▁",
        "prepend_scheme": "first", "split": false });
    parse(&json).expect("parses")
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_has_fewer_tokens_than_are_said(text in text(), limit in 0usize..30) {
        for tokenizer in [&BYTE_LEVEL, &BYTE_FALLBACK, &COMPOSING, &METASPACE] {
            let len = tokenizer.encode(&text, false).expect("encodes").len();
            let fewest = tokenizer.fewest_tokens(&text, limit);
            prop_assert!(fewest <= len, "{} of {}", fewest, len);
            prop_assert!(fewest > 0 || text.is_empty());
            prop_assert!(fewest <= limit + 1);
        }
    }
}
