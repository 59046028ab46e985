//! Token ids to text, one token at a time.
//!
//! A push returns only text that no later token can change, so that a client never sees half a
//! character or a replacement for one that was still on its way. All pushes and `finish` together
//! are exactly what decoding the whole at once gives. The cost of a push does not depend on how much
//! came before.

use super::Tokenizer;
use crate::Result;
use serde_json::Value;

/// How the tokens of a vocabulary become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decoding {
    /// Tokens are bytes written as letters (GPT-2's map); text is their concatenation.
    Bytes,
    /// Tokens are text, with `▁` or the like for spaces; only the first one is treated differently.
    /// Tokens `<0xNN>` are single bytes and stand for text by the unbroken run.
    Pieces,
}

impl Decoding {
    /// Reads the `decoder` of a `tokenizer.json`. Refuses those whose text cannot be known token by
    /// token.
    pub(super) fn from_json(decoder: &Value) -> Result<Self, String> {
        let one = std::slice::from_ref(decoder);
        let steps = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().map_or(one, Vec::as_slice),
            _ => one,
        };
        if let [step] = steps
            && step["type"] == "ByteLevel"
        {
            return Ok(Self::Bytes);
        }
        match steps.iter().find(|step| !is_local(step)) {
            None if !steps.is_empty() => Ok(Self::Pieces),
            Some(Value::Null) | None => Err("has no decoder".to_string()),
            Some(step) => Err(format!("decoder {step} is not supported")),
        }
    }
}

/// Whether a decoder step looks at one token at a time, but for the start of the text and for runs
/// of byte tokens.
fn is_local(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteFallback" | "Fuse" | "Metaspace") => true,
        Some("Replace") => {
            step["pattern"]["String"].as_str().is_some_and(|p| p.chars().count() == 1)
        }
        Some("Strip") => {
            step["stop"] == 0 && step["start"].as_u64().is_some_and(|start| start <= 1)
        }
        _ => false,
    }
}

/// Decodes one stream of tokens. All calls must be given the same tokenizer.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// `Bytes`: the start of a character whose other bytes have not come, at most 3 bytes.
    partial: Vec<u8>,
    /// `Pieces`: the last token that is no byte, as context, so that the next one is not taken for
    /// the first of the text.
    context: Option<u32>,
    /// `Pieces`: bytes of `context` alone as text.
    context_bytes: usize,
    /// `Pieces`: byte tokens after `context`. A run that is no UTF-8 as a whole decodes to
    /// replacements only, so nothing of it is final before it ends.
    run: Vec<u32>,
}

impl Detokenizer {
    /// A decoder at the start of a text.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, partial: Vec::new(), context: None, context_bytes: 0, run: Vec::new() }
    }

    /// The text that `token` makes final; empty where it makes none.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String> {
        let Some(written) = tokenizer.id_to_token(token) else { return Ok(String::new()) };
        if self.skip_special && tokenizer.is_special(token) {
            return Ok(String::new());
        }
        match tokenizer.decoding {
            Decoding::Bytes => Ok(self.push_bytes(&written)),
            Decoding::Pieces if is_byte_token(&written) => {
                self.run.push(token);
                Ok(String::new())
            }
            Decoding::Pieces => self.push_piece(tokenizer, token),
        }
    }

    /// What is still held back: a cut-off character becomes U+FFFD. The next push starts a new text.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let done = std::mem::replace(self, Self::new(self.skip_special));
        match tokenizer.decoding {
            Decoding::Bytes => Ok(String::from_utf8_lossy(&done.partial).into_owned()),
            Decoding::Pieces if done.run.is_empty() => Ok(String::new()),
            Decoding::Pieces => done.decode_run(tokenizer, None),
        }
    }

    fn push_bytes(&mut self, written: &str) -> String {
        self.partial.extend(token_bytes(written));
        let mut text = String::new();
        let mut rest = self.partial.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, tail) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = tail;
                    // Without a length the bytes are the start of a character.
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &tail[invalid..];
                }
            }
        }
        self.partial = rest.to_vec();
        text
    }

    fn push_piece(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String> {
        let text = self.decode_run(tokenizer, Some(token))?;
        self.run.clear();
        self.context = Some(token);
        self.context_bytes = tokenizer.decode(&[token], false)?.len();
        Ok(text)
    }

    /// The text of the byte run and then `last`, after the context.
    fn decode_run(&self, tokenizer: &Tokenizer, last: Option<u32>) -> Result<String> {
        let ids: Vec<u32> =
            self.context.into_iter().chain(self.run.iter().copied()).chain(last).collect();
        let text = tokenizer.decode(&ids, false)?;
        Ok(text.get(self.context_bytes..).unwrap_or_default().to_string())
    }
}

/// Whether a token is a single byte by the rule of the `ByteFallback` decoder.
fn is_byte_token(written: &str) -> bool {
    written.len() == 6
        && written.starts_with("<0x")
        && written.ends_with('>')
        && u8::from_str_radix(&written[3..5], 16).is_ok()
}

/// The bytes of a token of a byte-level vocabulary. Added tokens that hold other letters stand for
/// themselves.
fn token_bytes(written: &str) -> Vec<u8> {
    let mapped: Option<Vec<u8>> = written.chars().map(letter_byte).collect();
    mapped.unwrap_or_else(|| written.as_bytes().to_vec())
}

/// GPT-2's map backwards: printable Latin-1 letters are themselves, and the 68 other bytes are in
/// order the letters from U+0100 on.
fn letter_byte(letter: char) -> Option<u8> {
    let code = u32::from(letter);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}
