//! Real vocabularies: ids, texts and chat prompts as Hugging Face gives them.
#![allow(clippy::unwrap_used)]

mod common;

use common::data::{self, ids};
use common::models::{self, QWEN, SMOLLM2};
use serde_json::Value;
use spec_build::checkpoint::{Checkpoint, TokenizerSource};
use spec_build::pair::check_pair;
use spec_build::tokenizer::GgufTokenizer;
use spec_core::testing::Detokenizer;
use spec_core::tokenizer::{Conversation, Tokenizer};

/// Builds the files and opens them as a folder, as the server does.
fn open(source: &GgufTokenizer) -> Tokenizer {
    let dir = tempfile::tempdir().expect("a folder");
    source.build().expect("builds").write(dir.path()).expect("writes");
    Tokenizer::open(dir.path()).expect("opens")
}

/// The user turn of a rendered prompt; the system turn comes from the template.
fn user_turn(prompt: &str) -> Conversation {
    let (_, turn) = prompt.split_once("<|im_start|>user\n").expect("a user turn");
    let (content, _) = turn.split_once("<|im_end|>").expect("an end");
    Conversation::new([("user", content)])
}

/// Six chat prompts: template, ids, text, and the text again token by token.
fn check_prompts(tokenizer: &Tokenizer, prompts: &Value) {
    let prompts = prompts.as_array().expect("a list");
    assert_eq!(prompts.len(), 6);
    for prompt in prompts {
        let (text, expected) = (prompt["text"].as_str().expect("a text"), ids(&prompt["ids"]));
        let prompt = tokenizer.render_chat(&user_turn(text)).expect("renders");
        assert_eq!(prompt.text(), text);
        assert_eq!(tokenizer.encode_chat(&prompt).expect("encodes"), expected);
        assert_eq!(tokenizer.encode(text, true).expect("encodes"), expected);
        assert_eq!(tokenizer.decode(&expected, false).expect("decodes"), text);
        let mut detokenizer = Detokenizer::new(false);
        let push = |&id: &u32| detokenizer.push(tokenizer, id).expect("decodes");
        assert_eq!(expected.iter().map(push).collect::<String>(), text);
    }
}

/// The prompts of the reference runs and what they went on with.
fn check_golden(tokenizer: &Tokenizer, golden: &Value) {
    for prompt in golden["prompts"].as_array().expect("a list") {
        let text = prompt["prompt"].as_str().expect("a text");
        assert_eq!(tokenizer.encode(text, true).expect("encodes"), ids(&prompt["ids"]));
        for (id, token) in
            ids(&prompt["ids"]).iter().zip(prompt["tokens"].as_array().expect("a list"))
        {
            assert_eq!(tokenizer.id_to_token(*id).as_deref(), token.as_str());
        }
        let greedy = tokenizer.decode(&ids(&prompt["greedy"]), false).expect("decodes");
        assert_eq!(greedy, prompt["greedy_text"].as_str().expect("a text"));
    }
}

#[test]
fn smollm2_and_qwen_give_the_ids_and_prompts_of_hugging_face() {
    let prompts = data::json("six_prompts.json");
    for name in [SMOLLM2, QWEN] {
        let Some(source) = gguf(name) else { continue };
        let tokenizer = open(&source);
        check_prompts(&tokenizer, &prompts[name]);
        check_golden(&tokenizer, &data::json(&format!("golden/{name}.json")));
    }
}

/// The estimate is worth having only if it is close: within a factor of 4 on all of these.
#[test]
fn texts_have_no_fewer_tokens_than_is_said_without_splitting_them_and_not_many_more() {
    for source in [SMOLLM2, QWEN].into_iter().filter_map(gguf) {
        let tokenizer = open(&source);
        for text in [
            include_str!("tokenizer_real.rs"),
            "The quick brown fox, 1984. ",
            "日本の首都は東京です。中文字符测试 Ein Fluß fließt ",
            "e\u{301}>\u{338}한글 \u{1112}\u{1161}\u{11ab} \u{212a}<|im_end|>\u{338}",
            "                    ",
            "qwzxkjvbnmasdfgh",
            "======\n\n\t\t",
        ] {
            let text = text.repeat((6000 / text.len()).max(1));
            for end in (1..=text.len()).rev().filter(|&end| text.is_char_boundary(end)).step_by(499)
            {
                let len = tokenizer.encode(&text[..end], false).expect("encodes").len();
                let fewest = tokenizer.fewest_tokens(&text[..end], usize::MAX - 1);
                assert!(
                    fewest <= len && len <= 4 * fewest,
                    "{fewest} of {len}: {:?}",
                    &text[..end]
                );
            }
        }
    }
}

#[test]
fn smollm2_and_qwen_are_no_pair_and_qwen_fits_itself_with_padding() {
    let (Some(smol), Some(qwen)) = (gguf(SMOLLM2), gguf(QWEN)) else {
        return;
    };
    let (smol, qwen) = (open(&smol), open(&qwen));
    assert_eq!((smol.vocab_size(), qwen.vocab_size()), (49_152, 151_665));
    check_pair(&qwen, &qwen, 152_064, 151_936).expect("is a pair");
    let error = check_pair(&qwen, &smol, 151_936, 49_152).expect_err("is refused").to_string();
    assert!(
        error.contains("token 0 is \"!\" in the target and \"<|endoftext|>\" in the draft"),
        "{error}"
    );
}

/// The tokenizer of a GGUF file, if the model was fetched.
fn gguf(model: &str) -> Option<GgufTokenizer> {
    let checkpoint = Checkpoint::open(&models::gguf(model)?).expect("opens");
    match checkpoint.tokenizer {
        TokenizerSource::Gguf(metadata) => Some(GgufTokenizer::from(&*metadata)),
        TokenizerSource::Files(files) => panic!("files lie beside the GGUF file: {files:?}"),
    }
}
