//! `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, with a 0xff between two: opened,
//! and used on a text and on a conversation.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_core::testing::Detokenizer;
use spec_core::tokenizer::{Conversation, Tokenizer};
use spec_fuzz::{file, folder, no_file, parts};

const NAMES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
const TEXT: &str = " the cat's <|end|> \u{2603}\u{e9}a  12";

fuzz_target!(|input: &[u8]| {
    let mut repeats = false;
    let mut parts = parts(input);
    for name in NAMES {
        match parts.next() {
            Some(bytes) => {
                repeats |= name != "tokenizer.json" && bytes.contains(&b'*');
                drop(file(name, bytes));
            }
            None => no_file(name),
        }
    }
    let Ok(tokenizer) = Tokenizer::open(folder()) else { return };
    let ids = tokenizer.encode(TEXT, true).unwrap_or_default();
    let _ = tokenizer.decode(&ids, true);
    let mut stream = Detokenizer::new(false);
    for &id in ids.iter().chain(&[0, 1, u32::MAX]) {
        let _ = stream.push(&tokenizer, id);
        let _ = (tokenizer.id_to_token(id), tokenizer.is_special(id));
    }
    let _ = stream.finish();
    // Memory of the values inside a template is not bounded: a product of strings takes 100 MB.
    if !repeats {
        let turns = ["system", "user", "assistant", "user"].map(|role| (role, TEXT));
        if let Ok(prompt) = tokenizer.render_chat(&Conversation::new(turns)) {
            let _ = tokenizer.encode_chat(&prompt);
        }
    }
});
