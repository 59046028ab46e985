//! Token ids to text, one token at a time.
//!
//! A push returns only text that no later token can change, so that a client never sees half a
//! character or a replacement for one that was still on its way. All pushes and `finish` together
//! are exactly what decoding the whole at once gives. The cost of a push does not depend on how much
//! came before, and at most three bytes are held back.
//!
//! Byte tokens are UTF-8 wherever they stand: what is none becomes U+FFFD, and the characters around it
//! stay. (The tokenizers crate gives up a whole run of byte tokens for one byte that is wrong in it,
//! so that no character of the run would be certain before its end.)

use super::Tokenizer;
use crate::Result;
use serde_json::Value;

/// How the tokens of a vocabulary become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decoding {
    /// Tokens are bytes written as letters (GPT-2's map); text is their concatenation.
    Bytes,
    /// Tokens are text, with `▁` or the like for spaces; only the first one is treated differently.
    Pieces {
        /// Whether tokens `<0xNN>` are single bytes.
        byte_fallback: bool,
    },
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
        let byte_fallback = steps.iter().any(|step| step["type"] == "ByteFallback");
        match steps.iter().find(|step| !is_local(step)) {
            None if !steps.is_empty() => Ok(Self::Pieces { byte_fallback }),
            Some(Value::Null) | None => Err("has no decoder".to_string()),
            Some(step) => Err(format!("decoder {step} is not supported")),
        }
    }
}

impl Decoding {
    /// The bytes that a token stands for, as it is written in the vocabulary, letters for spaces included.
    pub(super) fn bytes(self, written: &str) -> Vec<u8> {
        match (self, byte_of(written)) {
            (Self::Bytes, _) => token_bytes(written),
            (Self::Pieces { byte_fallback: true }, Some(byte)) => vec![byte],
            (Self::Pieces { .. }, _) => written.into(),
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
    /// The start of a character whose other bytes have not come, at most 3 bytes.
    partial: Vec<u8>,
    /// `Pieces`: the tokens of `partial`.
    partial_ids: Vec<u32>,
    /// `Pieces`: a token to decode the next ones behind, so that they are not taken for the first of the
    /// text; `None` where they are.
    context: Option<u32>,
    /// `Pieces`: bytes of `context` alone as text.
    context_bytes: usize,
    /// Whether there was text before the first token.
    goes_on: bool,
}

impl Detokenizer {
    /// A decoder at the start of a text.
    pub fn new(skip_special: bool) -> Self {
        Self {
            skip_special,
            partial: Vec::new(),
            partial_ids: Vec::new(),
            context: None,
            context_bytes: 0,
            goes_on: false,
        }
    }

    /// A decoder of what follows a text.
    pub fn behind_text(skip_special: bool) -> Self {
        Self { goes_on: true, ..Self::new(skip_special) }
    }

    /// The text that `token` makes final; empty where it makes none.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String> {
        let Some(written) = tokenizer.id_to_token(token) else { return Ok(String::new()) };
        if self.skip_special && tokenizer.is_special(token) {
            return Ok(String::new());
        }
        if std::mem::take(&mut self.goes_on)
            && matches!(tokenizer.decoding, Decoding::Pieces { .. })
        {
            self.leave_start(tokenizer)?;
        }
        match (tokenizer.decoding, byte_of(&written)) {
            (Decoding::Bytes, _) => Ok(self.push_bytes(&written)),
            (Decoding::Pieces { byte_fallback: true }, Some(byte)) => {
                self.push_byte(tokenizer, token, byte)
            }
            (Decoding::Pieces { .. }, _) => self.push_piece(tokenizer, token),
        }
    }

    /// What is still held back: a cut-off character becomes U+FFFD. The next push starts a new text.
    pub fn finish(&mut self) -> String {
        let done = std::mem::replace(self, Self::new(self.skip_special));
        String::from_utf8_lossy(&done.partial).into_owned()
    }

    fn push_bytes(&mut self, written: &str) -> String {
        self.partial.extend(token_bytes(written));
        let mut text = String::new();
        while let Some(next) = next_text(&self.partial) {
            text.push_str(&String::from_utf8_lossy(&self.partial[..next]));
            self.partial.drain(..next);
        }
        text
    }

    /// As `push_bytes`, a byte at a time. Characters go through the decoder: it may drop the first space.
    fn push_byte(&mut self, tokenizer: &Tokenizer, token: u32, byte: u8) -> Result<String> {
        self.partial.push(byte);
        self.partial_ids.push(token);
        let mut text = String::new();
        while let Some(next) = next_text(&self.partial) {
            let bytes: Vec<u8> = self.partial.drain(..next).collect();
            let ids: Vec<u32> = self.partial_ids.drain(..next).collect();
            match std::str::from_utf8(&bytes) {
                Ok(_) => text.push_str(&self.decode_next(tokenizer, &ids)?),
                Err(_) => text.push(char::REPLACEMENT_CHARACTER),
            }
            self.leave_start(tokenizer)?;
        }
        Ok(text)
    }

    fn push_piece(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String> {
        let mut text = String::new();
        if !self.partial.is_empty() {
            self.partial.clear();
            self.partial_ids.clear();
            text.push(char::REPLACEMENT_CHARACTER);
            self.leave_start(tokenizer)?;
        }
        text.push_str(&self.decode_next(tokenizer, &[token])?);
        self.set_context(tokenizer, token)?;
        Ok(text)
    }

    /// The text of `ids` behind the context.
    fn decode_next(&self, tokenizer: &Tokenizer, ids: &[u32]) -> Result<String> {
        let ids: Vec<u32> = self.context.iter().chain(ids).copied().collect();
        let text = tokenizer.decode_at_once(&ids, false)?;
        Ok(text.get(self.context_bytes..).unwrap_or_default().to_string())
    }

    /// What follows bytes, or a text, is not the first of the text. Any token does as the context, here an `A`.
    fn leave_start(&mut self, tokenizer: &Tokenizer) -> Result<()> {
        let any = ["<0x41>", "A"].into_iter().find_map(|token| tokenizer.token_to_id(token));
        match (self.context, any) {
            (None, Some(token)) => self.set_context(tokenizer, token),
            _ => Ok(()),
        }
    }

    fn set_context(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<()> {
        self.context_bytes = tokenizer.decode_at_once(&[token], false)?.len();
        self.context = Some(token);
        Ok(())
    }
}

/// Bytes at the front that are text now: whole characters, or what can never become one. `None` where
/// there are none, or the start of a character whose end may still come.
fn next_text(bytes: &[u8]) -> Option<usize> {
    let whole = match std::str::from_utf8(bytes) {
        Ok(text) => text.len(),
        Err(error) if error.valid_up_to() > 0 => error.valid_up_to(),
        Err(error) => error.error_len()?,
    };
    (whole > 0).then_some(whole)
}

/// The byte that a token stands for by the rule of the `ByteFallback` decoder.
fn byte_of(written: &str) -> Option<u8> {
    let digits = written.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
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
