//! What belongs to the name of a GGUF tokenizer: how text is cut before merging, and the defaults
//! of the family.

use anyhow::{Result, bail};
use serde_json::{Value, json};

/// The rules behind a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recipe {
    cut: Cut,
    /// A piece that is a token as a whole is not merged from its bytes.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with bos when the file does not say.
    pub(super) add_bos: bool,
    /// Whether the original tokenizer has a bos at all.
    pub(super) has_bos: bool,
    /// The class in `transformers`.
    pub(super) class: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// GPT-2's expression, built into the ByteLevel pre-tokenizer.
    Gpt2,
    /// GPT-2's after every digit has been set apart.
    DigitsGpt2,
    /// An expression of its own, with or without Unicode composition (NFC) before.
    Split { pattern: &'static str, nfc: bool },
    /// None: spaces become `▁` and the text is merged as a whole.
    SentencePiece,
}

/// Words, three digits at most, punctuation with the line ends after it, white space.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Llama 3, but single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words split where small letters are followed by capitals, single digits, `/` goes with punctuation.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Recipe {
    pub(super) fn of(model: &str, pre: &str) -> Result<Self> {
        let plain = Self {
            cut: Cut::Gpt2,
            ignore_merges: false,
            add_bos: false,
            has_bos: true,
            class: "GPT2Tokenizer",
        };
        let fast = Self { class: "PreTrainedTokenizerFast", ..plain };
        let split = |pattern, nfc| Cut::Split { pattern, nfc };
        Ok(match (model, pre) {
            ("gpt2", "gpt-2" | "gpt2" | "default") => plain,
            ("gpt2", "smollm") => Self { cut: Cut::DigitsGpt2, ..plain },
            ("gpt2", "qwen2") => {
                Self { cut: split(QWEN2, true), has_bos: false, class: "Qwen2Tokenizer", ..plain }
            }
            ("gpt2", "llama-bpe" | "llama3" | "llama-v3") => {
                Self { cut: split(LLAMA3, false), ignore_merges: true, add_bos: true, ..fast }
            }
            ("gpt2", "tekken") => {
                Self { cut: split(TEKKEN, false), ignore_merges: true, add_bos: true, ..fast }
            }
            ("llama", _) => {
                Self { cut: Cut::SentencePiece, add_bos: true, class: "LlamaTokenizer", ..plain }
            }
            ("gpt2", _) => bail!(
                "pre-tokenizer `{pre}` is not supported (supported: gpt-2, default, smollm, qwen2, \
                 llama-bpe, tekken): put the checkpoint's tokenizer.json beside the GGUF file"
            ),
            _ => bail!("tokenizer model `{model}` is not supported (supported: gpt2, llama)"),
        })
    }

    /// Whether the vocabulary is SentencePiece's rather than bytes written as letters.
    pub(super) fn is_sentence_piece(self) -> bool {
        self.cut == Cut::SentencePiece
    }

    pub(super) fn normalizer(self, space_prefix: bool) -> Value {
        match self.cut {
            Cut::Split { nfc: true, .. } => json!({ "type": "NFC" }),
            Cut::SentencePiece => {
                let replace =
                    json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
                let prepend = json!({ "type": "Prepend", "prepend": "▁" });
                let steps = if space_prefix { vec![prepend, replace] } else { vec![replace] };
                json!({ "type": "Sequence", "normalizers": steps })
            }
            _ => Value::Null,
        }
    }

    pub(super) fn pre_tokenizer(self) -> Value {
        match self.cut {
            Cut::Gpt2 => byte_level(false, true, true),
            Cut::DigitsGpt2 => json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Digits", "individual_digits": true },
                byte_level(false, true, true),
            ] }),
            Cut::Split { pattern, .. } => json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated",
                    "invert": false },
                byte_level(false, false, false),
            ] }),
            Cut::SentencePiece => Value::Null,
        }
    }

    pub(super) fn decoder(self, space_prefix: bool) -> Value {
        if !self.is_sentence_piece() {
            return byte_level(true, true, true);
        }
        let mut steps = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if space_prefix {
            steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        json!({ "type": "Sequence", "decoders": steps })
    }
}

fn byte_level(add_prefix_space: bool, trim_offsets: bool, use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space,
        "trim_offsets": trim_offsets, "use_regex": use_regex })
}
