//! The tokenizer that a GGUF file carries, as it states it, and the tokens that end a text.

use super::Generation;
use super::gguf_fields::Fields;
use anyhow::{Context, Result, ensure};

/// Names of control tokens that end a text whatever the file calls its end token.
const END_TEXTS: [&str; 6] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"];
/// The token type of control tokens.
const CONTROL: i32 = 3;

/// The tokenizer as a GGUF file states it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata {
    /// `gpt2` is byte-level BPE, `llama` is SentencePiece.
    pub model: String,
    /// Which pre-tokenizer: `qwen2`, `smollm`, `llama-bpe`, ...
    pub pre: Option<String>,
    /// Texts of the tokens, by id.
    pub tokens: Vec<String>,
    /// Types by id: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// Scores by id (SentencePiece).
    pub scores: Vec<f32>,
    /// Merges, best first, two texts with a space between.
    pub merges: Vec<String>,
    /// Begin of text.
    pub bos: Option<u32>,
    /// End of text.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of message.
    pub eom: Option<u32>,
    /// Unknown token.
    pub unknown: Option<u32>,
    /// Padding.
    pub padding: Option<u32>,
    /// Whether prompts begin with `bos`.
    pub add_bos: Option<bool>,
    /// Whether prompts end with `eos`.
    pub add_eos: Option<bool>,
    /// Whether a space is put before the text (SentencePiece).
    pub add_space_prefix: Option<bool>,
    /// Whether white space behind an added token belongs to it, as Phi-3's files leave to who reads them.
    pub strips_behind: bool,
    /// Jinja chat template.
    pub chat_template: Option<String>,
    /// The longest context, in tokens.
    pub max_position: usize,
}

impl GgufMetadata {
    pub(super) fn read(fields: &Fields<'_>, max_position: usize) -> Result<Self> {
        let gguf = fields.gguf;
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let tokens = gguf.strings(&key("tokens"))?.context("tokenizer.ggml.tokens is missing")?;
        let id = |name: &str| -> Result<Option<u32>> {
            let Some(id) = fields.size_at(&key(name))? else { return Ok(None) };
            let known = u32::try_from(id).ok().filter(|_| id < tokens.len());
            let counted = || format!("{} is {id}, there are {} tokens", key(name), tokens.len());
            known.map(Some).with_context(counted)
        };
        let token_types = gguf.integers(&key("token_type"))?.unwrap_or_default();
        let scores = gguf.floats(&key("scores"))?.unwrap_or_default();
        for (name, len) in [("token_type", token_types.len()), ("scores", scores.len())] {
            let expected = tokens.len();
            ensure!(
                len == 0 || len == expected,
                "{} has {len} elements, there are {expected} tokens",
                key(name)
            );
        }
        let model =
            fields.text_at(&key("model"))?.context("tokenizer.ggml.model is missing")?.to_string();
        Ok(Self {
            strips_behind: fields.arch == "phi3" && model == "llama",
            model,
            pre: fields.text_at(&key("pre"))?.map(String::from),
            merges: gguf.strings(&key("merges"))?.unwrap_or_default(),
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            eot: id("eot_token_id")?,
            eom: id("eom_token_id")?,
            unknown: id("unknown_token_id")?,
            padding: id("padding_token_id")?,
            add_bos: fields.flag_at(&key("add_bos_token"))?,
            add_eos: fields.flag_at(&key("add_eos_token"))?,
            add_space_prefix: fields.flag_at(&key("add_space_prefix"))?,
            chat_template: fields.text_at("tokenizer.chat_template")?.map(String::from),
            tokens,
            token_types,
            scores,
            max_position,
        })
    }

    /// How texts begin and end.
    pub(super) fn generation(&self) -> Generation {
        let mut end_tokens: Vec<u32> =
            [self.eos, self.eot, self.eom].into_iter().flatten().collect();
        for (id, (text, kind)) in self.tokens.iter().zip(&self.token_types).enumerate() {
            if *kind == CONTROL && END_TEXTS.contains(&text.as_str()) {
                end_tokens.push(id as u32);
            }
        }
        let eos = self.eos;
        end_tokens.sort_by_key(|id| (Some(*id) != eos, *id));
        end_tokens.dedup();
        Generation { bos_token: self.bos, add_bos: self.add_bos, end_tokens }
    }
}
