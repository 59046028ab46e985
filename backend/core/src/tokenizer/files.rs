//! Reading the tokenizer files: size limits, JSON, and errors that name the file and the part.

use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most bytes of `tokenizer.json`; the largest published ones have about 40 MB.
pub(super) const TOKENIZER_BYTES: u64 = 256 << 20;
/// Most bytes of `tokenizer_config.json` and its like.
pub(super) const CONFIG_BYTES: u64 = 32 << 20;
/// Most bytes of a chat template.
pub(super) const TEMPLATE_BYTES: u64 = 1 << 20;

/// Tokenizers of `transformers` that go by `add_bos_token`, whatever `tokenizer.json` says.
const REMADE_CLASSES: [&str; 2] = ["LlamaTokenizer", "LlamaTokenizerFast"];

/// What is wrong with the contents of `path`.
pub(super) fn bad(path: &Path, message: impl Display) -> Error {
    Error::BadModel(format!("{}: {message}", path.display()))
}

/// All bytes of a file of at most `limit` bytes.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = std::fs::File::open(path).map_err(|e| Error::io(path, e))?;
    let mut bytes = Vec::new();
    // The length is not asked for first: it may change, and a pipe has none.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(bad(path, format!("has more than {limit} bytes")));
    }
    Ok(bytes)
}

/// As `read`, but `None` where there is no such file.
pub(super) fn read_if_there(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    match read(path, limit) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// A `tokenizer.json` that is an object, with its parts not yet looked into.
pub(super) struct Parsed<'a> {
    path: &'a Path,
    json: Value,
}

impl<'a> Parsed<'a> {
    pub(super) fn new(bytes: &[u8], path: &'a Path) -> Result<Self> {
        // The syntax is checked here because the tokenizers crate panics on some syntax errors.
        let json: Value =
            serde_json::from_slice(bytes).map_err(|e| bad(path, format!("not JSON: {e}")))?;
        if !json.is_object() {
            return Err(bad(path, "not a JSON object"));
        }
        Ok(Self { path, json })
    }

    pub(super) fn section(&self, name: &str) -> &Value {
        &self.json[name]
    }

    /// Builds the tokenizer and checks that every added token got the id that the file gives it:
    /// the tokenizers crate only numbers them on.
    pub(super) fn build(self) -> Result<tokenizers::Tokenizer> {
        let added: Vec<(String, u64)> = self.json["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|t| Some((t["content"].as_str()?.to_string(), t["id"].as_u64()?)))
            .collect();
        let path = self.path;
        if let Some(message) = self.unknown_part() {
            return Err(bad(path, message));
        }
        let built: tokenizers::Tokenizer = serde_json::from_value(self.json)
            .map_err(|e| bad(path, format!("not a tokenizer that this build reads: {e}")))?;
        for (token, id) in added {
            let got = built.token_to_id(&token).map(u64::from);
            if got != Some(id) {
                let got = got.map_or("no id".to_string(), |got| format!("id {got}"));
                return Err(bad(
                    path,
                    format!("added token {token:?} has id {id}, loads as {got}"),
                ));
            }
        }
        Ok(built)
    }

    /// Names the part that the tokenizers crate cannot read: its own error for the whole is only
    /// "did not match any variant".
    fn unknown_part(&self) -> Option<String> {
        use tokenizers as t;
        self.refusal::<t::NormalizerWrapper>("normalizer")
            .or_else(|| self.refusal::<t::PreTokenizerWrapper>("pre_tokenizer"))
            .or_else(|| self.refusal::<t::PostProcessorWrapper>("post_processor"))
            .or_else(|| self.refusal::<t::DecoderWrapper>("decoder"))
            .or_else(|| {
                // As it was understood: the tokenizers crate reads other spellings too, and other names
                // of the type.
                let part = self.section("post_processor").clone();
                let read: t::PostProcessorWrapper = serde_json::from_value(part).ok()?;
                broken_template(&serde_json::to_value(read).ok()?)
            })
    }

    fn refusal<T: DeserializeOwned>(&self, name: &str) -> Option<String> {
        let part = self.section(name);
        if part.is_null() {
            return None;
        }
        let error = serde_json::from_value::<T>(part.clone()).err()?;
        let kind = part["type"].as_str().unwrap_or("(no type)");
        Some(format!("{name} `{kind}` is not one that this build reads: {error}"))
    }
}

/// What a template of a post-processor names but does not have: the tokenizers crate panics when it
/// encodes with such a one.
fn broken_template(processor: &Value) -> Option<String> {
    if processor["type"] == "Sequence" {
        return processor["processors"].as_array()?.iter().find_map(broken_template);
    }
    if processor["type"] != "TemplateProcessing" {
        return None;
    }
    for (name, sequences) in [("single", &["A"][..]), ("pair", &["A", "B"])] {
        for piece in processor[name].as_array().into_iter().flatten() {
            if let Some(id) = piece["SpecialToken"]["id"].as_str()
                && processor["special_tokens"].get(id).is_none()
            {
                return Some(format!("post_processor: `{name}` has {id:?}, no special token"));
            }
            if let Some(id) = piece["Sequence"]["id"].as_str()
                && !sequences.contains(&id)
            {
                return Some(format!("post_processor: `{name}` has sequence {id:?}, expected A"));
            }
        }
    }
    None
}

/// The special tokens by role (`bos_token`, ...), and the config that they come from.
pub(super) struct SpecialTokens {
    /// Role to token text, in file order.
    pub(super) by_role: Vec<(String, String)>,
    /// `additional_special_tokens`.
    pub(super) additional: Vec<String>,
    /// Whether the begin token goes before every prompt though `tokenizer.json` puts none there: `transformers` makes the part
    /// that does so anew for these classes, and some checkpoints rely on it.
    pub(super) puts_bos: bool,
    /// `chat_template` of `tokenizer_config.json`, null where there is none.
    pub(super) chat_template: Value,
    /// The file that `chat_template` comes from.
    pub(super) config_path: PathBuf,
}

impl SpecialTokens {
    /// Reads `tokenizer_config.json` and, for roles that it leaves open, `special_tokens_map.json`.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let config_path = dir.join("tokenizer_config.json");
        let mut specials = Self {
            by_role: Vec::new(),
            additional: Vec::new(),
            puts_bos: false,
            chat_template: Value::Null,
            config_path: config_path.clone(),
        };
        if let Some(mut config) = read_object(&config_path)? {
            specials.chat_template = config["chat_template"].take();
            let class = config["tokenizer_class"].as_str();
            specials.puts_bos = config["add_bos_token"] == Value::Bool(true)
                && class.is_some_and(|class| REMADE_CLASSES.contains(&class));
            specials.add(&config);
        }
        if let Some(map) = read_object(&dir.join("special_tokens_map.json"))? {
            specials.add(&map);
        }
        Ok(specials)
    }

    pub(super) fn get(&self, role: &str) -> Option<&str> {
        self.by_role.iter().find(|(known, _)| known == role).map(|(_, token)| token.as_str())
    }

    fn add(&mut self, config: &Value) {
        const ROLES: [&str; 7] = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
        for role in ROLES.map(|role| format!("{role}_token")) {
            if let (None, Some(token)) = (self.get(&role), token_text(&config[&role])) {
                self.by_role.push((role, token));
            }
        }
        if self.additional.is_empty() {
            let list = config["additional_special_tokens"].as_array();
            self.additional = list.into_iter().flatten().filter_map(token_text).collect();
        }
    }
}

/// A special token is written as a string or as an object with its flags.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_string)
}

fn read_object(path: &Path) -> Result<Option<Value>> {
    let Some(bytes) = read_if_there(path, CONFIG_BYTES)? else { return Ok(None) };
    let json: Value =
        serde_json::from_slice(&bytes).map_err(|e| bad(path, format!("not JSON: {e}")))?;
    if !json.is_object() {
        return Err(bad(path, "not a JSON object"));
    }
    Ok(Some(json))
}
