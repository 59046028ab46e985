//! Small GGUF vocabularies: ids, files and refusals. The real ones are in the integration tests.

use super::*;
use spec_core::tokenizer::Conversation;

/// GPT-2's letters for the 256 bytes, in byte order.
fn letters() -> Vec<String> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256..;
    (0..=255u8)
        .map(|byte| if printable(byte) { u32::from(byte) } else { next.next().expect("endless") })
        .map(|code| char::from_u32(code).expect("a letter").to_string())
        .collect()
}

/// A byte-level vocabulary; `front` and `back` are control tokens before and behind the others.
fn byte_level(pre: &str, front: &[&str], back: &[&str]) -> GgufTokenizer {
    let merged = ["he", "Ġa", "12", "123", "ĊĊ"];
    let merges = ["h e", "Ġ a", "1 2", "12 3", "Ċ Ċ"];
    let mut tokens: Vec<String> = front.iter().map(|token| token.to_string()).collect();
    tokens.extend(letters());
    tokens.extend(merged.map(String::from));
    let mut token_types = vec![1; tokens.len()];
    token_types[..front.len()].fill(3);
    tokens.extend(back.iter().map(|token| token.to_string()));
    token_types.resize(tokens.len(), 3);
    GgufTokenizer {
        model: "gpt2".into(),
        pre: pre.into(),
        tokens,
        token_types,
        merges: merges.map(String::from).into(),
        ..GgufTokenizer::default()
    }
}

/// A SentencePiece vocabulary without merges: score is minus the rank.
fn sentence_piece() -> GgufTokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    let mut token_types = vec![2, 3, 3];
    let mut scores = vec![0.0; 3];
    for byte in 0..=255u8 {
        tokens.push(format!("<0x{byte:02X}>"));
        token_types.push(6);
        scores.push(0.0);
    }
    for (rank, piece) in ["▁t", "he", "▁the", "▁", "t", "h", "e", "▁th", "▁▁"].iter().enumerate()
    {
        tokens.push(piece.to_string());
        token_types.push(1);
        scores.push(-(rank as f32));
    }
    GgufTokenizer {
        model: "llama".into(),
        tokens,
        token_types,
        scores: Some(scores),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..GgufTokenizer::default()
    }
}

fn load(source: &GgufTokenizer) -> Tokenizer {
    let files = source.build().expect("builds");
    Tokenizer::parse(&files.tokenizer, Path::new("tokenizer.json")).expect("parses")
}

/// The tokens of `text` as written in the vocabulary, joined by `|`.
fn cut(source: &GgufTokenizer, text: &str) -> String {
    let tokenizer = load(source);
    let ids = tokenizer.encode(text, true).expect("encodes");
    assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text);
    let token = |&id: &u32| tokenizer.id_to_token(id).expect("a token");
    ids.iter().map(token).collect::<Vec<_>>().join("|")
}

fn refusal(source: &GgufTokenizer) -> String {
    format!("{:#}", source.build().expect_err("is refused"))
}

#[test]
fn each_pre_tokenizer_cuts_numbers_its_own_way() {
    let cuts = |pre| {
        let mut source = byte_level(pre, &[], &[]);
        source.add_bos = Some(false);
        cut(&source, "he 1234 a")
    };
    assert_eq!(cuts("gpt-2"), "he|Ġ|123|4|Ġa");
    assert_eq!(cuts("smollm"), "he|Ġ|1|2|3|4|Ġa");
    assert_eq!(cuts("qwen2"), "he|Ġ|1|2|3|4|Ġa");
    assert_eq!(cuts("llama-bpe"), "he|Ġ|123|4|Ġa");
    assert_eq!(cuts("tekken"), "he|Ġ|1|2|3|4|Ġa");
}

#[test]
fn unicode_is_composed_for_qwen_only() {
    let ids = |pre| load(&byte_level(pre, &[], &[])).encode("e\u{301}", true).expect("encodes");
    assert_eq!(ids("qwen2"), [0xc3, 0xa9]);
    assert_eq!(ids("smollm"), [0x65, 0xcc, 0x81]);
}

#[test]
fn added_tokens_keep_their_ids_before_between_and_behind() {
    let mut source = byte_level("smollm", &["<|a|>", "<|b|>"], &["<|c|>"]);
    // Instead of "12", and a hole instead of "ĊĊ".
    source.tokens[260] = "<user>".into();
    source.token_types[260] = 4;
    source.token_types[262] = 5;
    source.merges.retain(|merge| !["1 2", "12 3", "Ċ Ċ"].contains(&merge.as_str()));
    let tokenizer = load(&source);
    let ids = tokenizer.encode("<|b|><user><|c|>", true).expect("encodes");
    assert_eq!(ids, [1, 260, 263]);
    assert!(tokenizer.is_special(1) && tokenizer.is_special(263) && !tokenizer.is_special(260));
}

#[test]
fn unused_rows_are_no_tokens() {
    let mut source = byte_level("qwen2", &[], &["<|end|>"]);
    source.tokens.push("[PAD262]".into());
    source.token_types.push(5);
    let tokenizer = load(&source);
    assert_eq!(tokenizer.vocab_size(), 262);
    assert_eq!(tokenizer.token_to_id("[PAD262]"), None);
}

#[test]
fn sentence_piece_merges_by_score() {
    // Best first: "▁t" beats "he", so "▁the" comes from "▁t" + "he", not from "▁th" + "e".
    assert_eq!(cut(&sentence_piece(), "the"), "<s>|▁the");
    assert_eq!(cut(&sentence_piece(), "the  the"), "<s>|▁the|▁|▁the");
    assert_eq!(cut(&sentence_piece(), "té"), "<s>|▁t|<0xC3>|<0xA9>");
    let mut source = sentence_piece();
    source.add_bos = Some(false);
    source.add_space_prefix = Some(false);
    assert_eq!(cut(&source, "the"), "t|he");
    assert_eq!(cut(&source, " the"), "▁the");
}

/// As in Phi-3, whose template puts line feeds behind marks that are not to be tokens.
#[test]
fn white_space_behind_marks_belongs_to_them_where_the_model_has_it_so() {
    let mut source = sentence_piece();
    source.tokens.push("<|user|>".into());
    source.token_types.push(3);
    source.scores.as_mut().expect("has scores").push(0.0);
    let tokens = |source: &GgufTokenizer| {
        let tokenizer = load(source);
        let ids = tokenizer.encode("<|user|>\nthe", false).expect("encodes");
        ids.iter().filter_map(|&id| tokenizer.id_to_token(id)).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&source), ["<|user|>", "▁", "<0x0A>", "t", "he"]);
    source.strips_behind = true;
    assert_eq!(tokens(&source), ["<|user|>", "▁the"]);
}

#[test]
fn merges_are_listed_best_score_first_then_longest_left_part() {
    let source = sentence_piece();
    let kinds = source.check().expect("is whole");
    let recipe = Recipe::of("llama", "").expect("is known");
    let model = bpe::model(&source, &kinds, recipe).expect("builds");
    let expected =
        json!([["▁", "t"], ["h", "e"], ["▁th", "e"], ["▁t", "he"], ["▁t", "h"], ["▁", "▁"]]);
    assert_eq!(model["merges"], expected);
}

#[test]
fn bos_stands_in_front_where_the_family_or_the_file_says_so() {
    let mut source = byte_level("llama-bpe", &[], &["<|begin|>"]);
    source.bos = Some(261);
    assert_eq!(load(&source).encode("he", true).expect("encodes"), [261, 256]);
    assert_eq!(load(&source).encode("he", false).expect("encodes"), [256]);
    source.add_bos = Some(false);
    assert_eq!(load(&source).encode("he", true).expect("encodes"), [256]);
    source.add_bos = Some(true);
    source.bos = None;
    assert_eq!(refusal(&source), "a text shall begin with bos, but there is no bos token id");
}

#[test]
fn the_files_open_as_a_folder_and_are_the_same_every_time() {
    let mut source = byte_level("qwen2", &[], &["<|im_start|>", "<|im_end|>"]);
    (source.bos, source.eos, source.pad) = (Some(261), Some(262), Some(261));
    source.chat_template = Some(
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}".into(),
    );
    let files = source.build().expect("builds");
    assert_eq!(files, source.build().expect("builds"));
    let dir = tempfile::tempdir().expect("a folder");
    files.write(dir.path()).expect("writes");
    let tokenizer = Tokenizer::open(dir.path()).expect("opens");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, Some(262)));
    let prompt = tokenizer.render_chat(&Conversation::new([("user", "he")])).expect("renders");
    assert_eq!(tokenizer.encode_chat(&prompt).expect("encodes"), [261, 256]);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let good = byte_level("qwen2", &[], &["<|end|>"]);
    let refusal = |change: fn(&mut GgufTokenizer)| {
        let mut source = good.clone();
        change(&mut source);
        refusal(&source)
    };
    assert!(refusal(|s| s.pre = "chatglm-bpe".into()).starts_with("pre-tokenizer `chatglm-bpe`"));
    assert!(refusal(|s| s.model = "bert".into()).starts_with("tokenizer model `bert`"));
    assert_eq!(refusal(|s| s.merges.clear()), "no merges (tokenizer.ggml.merges)");
    assert_eq!(refusal(|s| s.merges[0] = "he".into()), "merge \"he\" has no space");
    assert_eq!(refusal(|s| s.merges[0] = "h h".into()), "merge `h h`: \"hh\" is no token");
    assert_eq!(refusal(|s| s.token_types[3] = 9), "token 3 has type 9, expected 1 to 6");
    assert_eq!(refusal(|s| s.token_types.truncate(5)), "5 token types for 262 tokens");
    assert_eq!(refusal(|s| s.scores = Some(vec![0.0])), "1 scores for 262 tokens");
    assert_eq!(
        refusal(|s| s.eos = Some(262)),
        "eos token id is 262, the vocabulary has 262 tokens"
    );
    assert_eq!(
        refusal(|s| s.tokens[1] = "A".into()),
        "token \"A\" stands twice in the vocabulary, as 1 and as 65"
    );
    assert_eq!(refusal(|s| s.tokens[7] = "x".repeat(5000)), "token 7 has 5000 bytes, at most 4096");
    assert!(refusal(|s| s.tokens[261] = "A".into()).contains("token \"A\" has id"));
    assert_eq!(refusal(|s| s.tokens.clear()), "0 tokens, expected 1 to 4194304");
}
