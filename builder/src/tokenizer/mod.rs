//! Hugging Face tokenizer files from the tokenizer of a GGUF file.
//!
//! A GGUF file holds a vocabulary and names its pre-tokenizer; the regular expressions and the
//! flags that belong to a name are known here. A name that is not known is refused: a near miss
//! would give other ids and a worse model without a word. The same input gives the same bytes.

mod bpe;
mod pre;

use crate::checkpoint::GgufMetadata;
use anyhow::{Context, Result, bail, ensure};
use pre::Recipe;
use serde_json::{Map, Value, json};
use spec_core::tokenizer::Tokenizer;
use std::path::Path;

const MAX_TOKENS: usize = 1 << 22;
const MAX_TOKEN_BYTES: usize = 4096;

/// The `tokenizer.*` metadata of a GGUF file.
#[derive(Clone, Debug, Default)]
pub struct GgufTokenizer {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// `tokenizer.ggml.pre`: the pre-tokenizer; not used by `llama`.
    pub pre: String,
    /// The vocabulary, by id.
    pub tokens: Vec<String>,
    /// Kind of each token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; empty
    /// if all are normal.
    pub token_types: Vec<i32>,
    /// Score of each token; `llama` needs it where there are no merges.
    pub scores: Option<Vec<f32>>,
    /// `left right`, best first.
    pub merges: Vec<String>,
    /// Token that begins a text.
    pub bos: Option<u32>,
    /// Token that ends a text.
    pub eos: Option<u32>,
    /// Token that fills up batches.
    pub pad: Option<u32>,
    /// Token for what the vocabulary cannot express.
    pub unk: Option<u32>,
    /// Whether a text begins with bos; `None` is the model's default.
    pub add_bos: Option<bool>,
    /// `llama`: whether a text begins with a space; `None` is yes.
    pub add_space_prefix: Option<bool>,
    /// Whether white space behind an added token belongs to it.
    pub strips_behind: bool,
    /// The chat template, in Jinja.
    pub chat_template: Option<String>,
}

impl From<&GgufMetadata> for GgufTokenizer {
    fn from(metadata: &GgufMetadata) -> Self {
        let m = metadata.clone();
        Self {
            model: m.model,
            pre: m.pre.unwrap_or_default(),
            tokens: m.tokens,
            token_types: m.token_types,
            scores: (!m.scores.is_empty()).then_some(m.scores),
            merges: m.merges,
            bos: m.bos,
            eos: m.eos,
            pad: m.padding,
            unk: m.unknown,
            add_bos: m.add_bos,
            add_space_prefix: m.add_space_prefix,
            strips_behind: m.strips_behind,
            chat_template: m.chat_template,
        }
    }
}

/// Added tokens that leave what is behind them alone, also where others take it.
const NEVER_STRIP: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// What a token is for, as GGUF numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The bytes of the three files that `transformers` and this project read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// `tokenizer.json`
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`
    pub config: Vec<u8>,
    /// `special_tokens_map.json`
    pub special_tokens: Vec<u8>,
}

impl Files {
    /// Name and bytes of each file.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        let Self { tokenizer, config, special_tokens } = self;
        [
            ("tokenizer.json", tokenizer.as_slice()),
            ("tokenizer_config.json", config.as_slice()),
            ("special_tokens_map.json", special_tokens.as_slice()),
        ]
        .into_iter()
    }

    /// Writes the files into `dir`.
    pub fn write(&self, dir: &Path) -> Result<()> {
        for (name, bytes) in self.iter() {
            let path = dir.join(name);
            std::fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }
}

impl GgufTokenizer {
    /// Makes the tokenizer files and loads the result back: every token has its id there.
    pub fn build(&self) -> Result<Files> {
        let kinds = self.check()?;
        let recipe = Recipe::of(&self.model, &self.pre)?;
        let add_bos = self.add_bos.unwrap_or(recipe.add_bos);
        let model = bpe::model(self, &kinds, recipe)?;
        let json = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(&kinds).map(|(id, kind)| self.added_token(id, kind)).collect::<Vec<_>>(),
            "normalizer": recipe.normalizer(self.add_space_prefix.unwrap_or(true)),
            "pre_tokenizer": recipe.pre_tokenizer(),
            "post_processor": self.post_processor(add_bos)?,
            "decoder": recipe.decoder(self.add_space_prefix.unwrap_or(true)),
            "model": model,
        });
        let files = Files {
            tokenizer: serde_json::to_vec(&json)?,
            config: serde_json::to_vec_pretty(&self.config(&kinds, recipe, add_bos))?,
            special_tokens: serde_json::to_vec_pretty(&Value::Object(self.specials(recipe)))?,
        };
        self.check_ids(&kinds, &files.tokenizer)?;
        Ok(files)
    }

    /// Checks lengths and ids, so that indexing is safe from here on.
    fn check(&self) -> Result<Vec<Kind>> {
        let num = self.tokens.len();
        ensure!(num > 0 && num <= MAX_TOKENS, "{num} tokens, expected 1 to {MAX_TOKENS}");
        let types = self.token_types.len();
        ensure!(types == 0 || types == num, "{types} token types for {num} tokens");
        if let Some(scores) = &self.scores {
            ensure!(scores.len() == num, "{} scores for {num} tokens", scores.len());
        }
        for (id, token) in self.tokens.iter().enumerate() {
            let bytes = token.len();
            ensure!(
                bytes <= MAX_TOKEN_BYTES,
                "token {id} has {bytes} bytes, at most {MAX_TOKEN_BYTES}"
            );
        }
        let roles =
            [("bos", self.bos), ("eos", self.eos), ("padding", self.pad), ("unknown", self.unk)];
        for (role, id) in roles {
            if let Some(id) = id {
                ensure!(
                    (id as usize) < num,
                    "{role} token id is {id}, the vocabulary has {num} tokens"
                );
            }
        }
        if types == 0 {
            return Ok(vec![Kind::Normal; num]);
        }
        self.token_types.iter().enumerate().map(|(id, &code)| Kind::of(code, id)).collect()
    }

    /// Tokens that are looked for in the text before anything else.
    fn added<'a>(&self, kinds: &'a [Kind]) -> impl Iterator<Item = (usize, Kind)> + 'a {
        kinds.iter().copied().enumerate().filter(|(_, kind)| kind.is_added())
    }

    fn added_token(&self, id: usize, kind: Kind) -> Value {
        let content = &self.tokens[id];
        json!({
            "id": id,
            "content": content,
            "single_word": false,
            "lstrip": false,
            "rstrip": self.strips_behind && !NEVER_STRIP.contains(&content.as_str()),
            "normalized": false,
            "special": kind != Kind::UserDefined,
        })
    }

    fn token(&self, id: Option<u32>) -> Option<&str> {
        id.map(|id| self.tokens[id as usize].as_str())
    }

    fn post_processor(&self, add_bos: bool) -> Result<Value> {
        let Some(bos) = self.token(self.bos).filter(|_| add_bos) else {
            ensure!(!add_bos, "a text shall begin with bos, but there is no bos token id");
            return Ok(Value::Null);
        };
        let special = json!({ "id": bos, "ids": [self.bos], "tokens": [bos] });
        Ok(json!({
            "type": "TemplateProcessing",
            "single": [
                { "SpecialToken": { "id": bos, "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } },
            ],
            "pair": [
                { "SpecialToken": { "id": bos, "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } },
                { "SpecialToken": { "id": bos, "type_id": 1 } },
                { "Sequence": { "id": "B", "type_id": 1 } },
            ],
            "special_tokens": { bos: special },
        }))
    }

    /// Role to token text. Qwen's tokenizers have no bos, though their GGUF files name one.
    fn specials(&self, recipe: Recipe) -> Map<String, Value> {
        let bos = self.token(self.bos).filter(|_| recipe.has_bos || self.add_bos == Some(true));
        [
            ("bos_token", bos),
            ("eos_token", self.token(self.eos)),
            ("pad_token", self.token(self.pad)),
            ("unk_token", self.token(self.unk)),
        ]
        .into_iter()
        .filter_map(|(role, token)| Some((role.to_string(), json!(token?))))
        .collect()
    }

    fn config(&self, kinds: &[Kind], recipe: Recipe, add_bos: bool) -> Value {
        let mut added = Map::new();
        for (id, kind) in self.added(kinds) {
            let mut token = self.added_token(id, kind);
            if let Some(token) = token.as_object_mut() {
                token.shift_remove("id");
            }
            added.insert(id.to_string(), token);
        }
        let mut config = json!({
            "added_tokens_decoder": added,
            "add_bos_token": add_bos,
            "add_prefix_space": false,
            "clean_up_tokenization_spaces": false,
            "errors": "replace",
            "tokenizer_class": recipe.class,
            "bos_token": null,
            "eos_token": null,
            "pad_token": null,
            "unk_token": null,
        });
        for (role, token) in self.specials(recipe) {
            config[role] = token;
        }
        if let Some(template) = &self.chat_template {
            config["chat_template"] = json!(template);
        }
        config
    }

    fn check_ids(&self, kinds: &[Kind], json: &[u8]) -> Result<()> {
        let built = Tokenizer::parse(json, Path::new("tokenizer.json"))
            .context("loading the tokenizer made from GGUF metadata")?;
        for (id, (token, kind)) in self.tokens.iter().zip(kinds).enumerate() {
            if *kind == Kind::Unused {
                continue;
            }
            let got = built.token_to_id(token);
            if got.map(|got| got as usize) != Some(id) {
                bail!(
                    "token {token:?} has id {id} in the GGUF file, {got:?} in the tokenizer made from it"
                );
            }
        }
        Ok(())
    }
}

impl Kind {
    fn of(code: i32, id: usize) -> Result<Self> {
        Ok(match code {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => bail!("token {id} has type {code}, expected 1 to 6"),
        })
    }

    fn is_added(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }
}

#[cfg(test)]
mod tests;
