//! Text to token ids and back, from the files that stand beside a checkpoint.
//!
//! `tokenizer.json` decides the ids; `tokenizer_config.json` and `chat_template.jinja`, where they
//! are there, the chat prompt. Files are bounded and checked here once: after `open`, every id that
//! the file promises is the id that encoding gives, and decoding can be done token by token.

mod chat;
mod control;
mod conversation;
pub(crate) mod decode;
mod fewest;
mod files;
mod spelled;
mod stop;

pub(crate) use chat::ChatTemplate;
pub use control::ChatPrompt;
pub use conversation::Conversation;
pub(crate) use decode::Detokenizer;
pub(crate) use stop::StopMatcher;
pub use stop::check_stops;

use crate::{Error, Result};
use control::Control;
use decode::Decoding;
use fewest::Fewest;
use files::SpecialTokens;
use std::path::Path;

/// A vocabulary with its rules for splitting and joining text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    decoding: Decoding,
    fewest: Option<Fewest>,
    control: Control,
    vocab_size: usize,
    hash: String,
    bos: Option<u32>,
    /// Prompts begin with it whatever `tokenizer.json` says.
    puts_bos: bool,
    eos: Option<u32>,
    chat: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Opens the tokenizer files in `dir`. Only `tokenizer.json` must be there.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let mut tokenizer = Self::parse(&files::read(&path, files::TOKENIZER_BYTES)?, &path)?;
        let specials = SpecialTokens::read(dir)?;
        tokenizer.bos = specials.get("bos_token").and_then(|t| tokenizer.token_to_id(t));
        tokenizer.puts_bos = specials.puts_bos;
        tokenizer.eos = specials.get("eos_token").and_then(|t| tokenizer.token_to_id(t));
        tokenizer.chat = ChatTemplate::open(dir, &specials)?;
        Ok(tokenizer)
    }

    /// Parses the bytes of a `tokenizer.json`; `path` is named in errors. There is no chat template
    /// and no bos or eos.
    pub fn parse(json: &[u8], path: &Path) -> Result<Self> {
        let parsed = files::Parsed::new(json, path)?;
        let decoding = Decoding::from_json(parsed.section("decoder"))
            .map_err(|message| files::bad(path, message))?;
        let tokens = parsed.section("model")["vocab"].as_object();
        let tokens = tokens.into_iter().flatten().map(|(written, _)| decoding.bytes(written));
        let fewest = Fewest::new(&parsed, tokens);
        let unknown = parsed.section("model")["unk_token"].as_str().map(str::to_string);
        let mut inner = parsed.build()?;
        // Both are for training batches; a prompt is never cut or filled up.
        inner.with_truncation(None).map_err(|e| files::bad(path, e))?;
        inner.with_padding(None);
        let unknown = unknown.and_then(|token| inner.token_to_id(&token));
        let control = Control::new(&inner, unknown).map_err(|e| files::bad(path, e))?;
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let hash = blake3::hash(json).to_hex().to_string();
        Ok(Self {
            inner,
            decoding,
            fewest,
            control,
            vocab_size,
            hash,
            bos: None,
            puts_bos: false,
            eos: None,
            chat: None,
        })
    }

    /// The ids of `text`. Special tokens spelled out in the text are recognised; with `add_special`
    /// the ones that the tokenizer puts around a text (bos for most Llamas) are added too.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|e| Error::bad_request("text", format!("cannot be tokenized: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A number of tokens that no way to split `text` comes below; counts no further than one above `limit`.
    /// Takes a fraction of the time that splitting takes.
    pub fn fewest_tokens(&self, text: &str, limit: usize) -> usize {
        self.fewest.as_ref().map_or(0, |fewest| fewest.count(text, limit))
    }

    /// The ids of a whole prompt, with what the tokenizer puts around a text. One that was made with a chat template
    /// begins with the begin token already, and does not get a second one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, true)?;
        let Some(bos) = self.bos else { return Ok(ids) };
        if ids.starts_with(&[bos, bos]) {
            ids.remove(0);
        } else if self.puts_bos && !ids.starts_with(&[bos]) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The token that every prompt begins with; none where they begin with their text.
    pub fn prompt_bos(&self) -> Result<Option<u32>> {
        let ids = self.encode_prompt("a")?;
        Ok(self.bos.filter(|&bos| ids.starts_with(&[bos])))
    }

    /// The prompt for a conversation by the model's chat template: special tokens in it are the template's
    /// own, whatever the conversation spells.
    pub fn render_chat(&self, conversation: &Conversation) -> Result<ChatPrompt> {
        let template = self.chat.as_ref();
        let template =
            template.ok_or_else(|| Error::Unsupported("a model without a chat template".into()))?;
        self.control.render(&self.inner, template, conversation)
    }

    /// The ids of a rendered conversation: the template has put all special tokens there that are to be there.
    pub fn encode_chat(&self, prompt: &ChatPrompt) -> Result<Vec<u32>> {
        match prompt.as_plain() {
            Some(text) => self.encode(text, false),
            None => self
                .control
                .encode(&self.inner, prompt)
                .map_err(|e| Error::bad_request("messages", format!("cannot be tokenized: {e}"))),
        }
    }

    /// The text of `ids`. Ids without a token (padding of the vocabulary) have no text; bytes that
    /// are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if self.decoding != (Decoding::Pieces { byte_fallback: true }) {
            return self.decode_at_once(ids, skip_special);
        }
        let mut detokenizer = Detokenizer::new(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&detokenizer.push(self, id)?);
        }
        Ok(text + &detokenizer.finish())
    }

    /// As the tokenizers crate decodes: a run of byte tokens that is no UTF-8 is U+FFFD for each byte.
    fn decode_at_once(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|e| Error::bad_request("token ids", format!("cannot be decoded: {e}")))
    }

    /// One more than the largest id that has a token: the real tokens, without the model's padding.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// How `id` is written in the vocabulary (not its text: bytes are mapped to letters).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as written in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether decoding with `skip_special` leaves `id` out.
    pub fn is_special(&self, id: u32) -> bool {
        control::is_control(&self.inner, id)
    }

    /// blake3 of `tokenizer.json`, in hex.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The token that begins a text, if the files name one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, if the files name one. Models may have more: see their
    /// generation config.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether conversations can be rendered: whether the files hold a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.chat.is_some()
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
