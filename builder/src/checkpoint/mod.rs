//! A checkpoint as input: a Hugging Face folder, a GGUF file, or one that is made up, read alike. Opening reads headers
//! only and checks that every tensor the model needs is there with its shape and nothing else is;
//! after that, rows of any tensor can be read as f32 from any thread, in memory bounded by the range.

mod bounded;
mod dequant;
mod draft_vocab;
mod eagle;
mod encoding;
pub(crate) mod family;
mod fp8;
mod gguf;
mod gguf_fields;
mod gguf_metadata;
mod gguf_model;
mod hf;
mod hf_config;
mod kquant;
mod kv_scales;
mod medusa;
pub mod names;
mod random;
mod safetensors;
mod target;
mod tensor;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod torch;

pub use encoding::Encoding;
pub use gguf_metadata::GgufMetadata;
pub use target::{BuiltTarget, Target};
pub use tensor::Tensor;

use anyhow::{Context, Result, bail, ensure};
use spec_core::model::ModelConfig;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Shape of the model.
    pub config: ModelConfig,
    /// How texts begin and end.
    pub generation: Generation,
    /// Where the tokenizer comes from.
    pub tokenizer: TokenizerSource,
    /// Positions that a token sees at most, where the model limits them: attention over all
    /// positions is right only up to this length.
    pub sliding_window: Option<usize>,
    /// What FP8 keys and values of each layer are to be multiplied by, where it says so; or why that makes no sense, which
    /// matters to who wants these.
    pub kv_scales: Result<Option<Vec<(f32, f32)>>>,
    tensors: BTreeMap<String, Tensor>,
}

/// How texts begin and end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generation {
    /// The token that begins a text.
    pub bos_token: Option<u32>,
    /// Whether the tokenizer puts it before every prompt, where the checkpoint says so.
    pub add_bos: Option<bool>,
    /// Tokens that end a text.
    pub end_tokens: Vec<u32>,
}

/// Where the tokenizer comes from.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// Files of a Hugging Face folder, or beside a GGUF file.
    Files(TokenizerFiles),
    /// The metadata of a GGUF file, or what it would be.
    Gguf(Box<GgufMetadata>),
}

/// Tokenizer files, each where it exists.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// `tokenizer_config.json`.
    pub config: Option<PathBuf>,
    /// `chat_template.jinja`.
    pub chat_template: Option<PathBuf>,
    /// `special_tokens_map.json`.
    pub special_tokens: Option<PathBuf>,
}

impl TokenizerFiles {
    fn in_folder(folder: &Path) -> Self {
        let file = |name| Some(folder.join(name)).filter(|path: &PathBuf| path.is_file());
        Self {
            tokenizer: file("tokenizer.json"),
            config: file("tokenizer_config.json"),
            chat_template: file("chat_template.jinja"),
            special_tokens: file("special_tokens_map.json"),
        }
    }
}

impl Checkpoint {
    /// Opens a Hugging Face folder or a GGUF file, or makes one up: `random:NAME`.
    pub fn open(path: &Path) -> Result<Self> {
        if let Some(name) = random::name(path) {
            return random::open(name).with_context(|| format!("checkpoint {}", path.display()));
        }
        let opened = match fs::metadata(path) {
            Err(error) => Err(error.into()),
            Ok(metadata) if metadata.is_dir() => hf::open(path),
            Ok(_) if starts_as_gguf(path) => gguf_model::open(path),
            Ok(_) => Err(anyhow::anyhow!("it is neither a Hugging Face folder nor a GGUF file")),
        };
        opened.with_context(|| format!("checkpoint {}", path.display()))
    }

    /// Opens what drafts for `target`: a model, or a head on its hidden states, which may leave to it what both have if
    /// it `shares`.
    pub fn open_draft(path: &Path, target: &dyn Target, shares: bool) -> Result<Self> {
        let head = match path.join("config.json").is_file() {
            true => open_head(path, target, shares)
                .with_context(|| format!("checkpoint {}", path.display()))?,
            false => None,
        };
        head.map_or_else(|| Self::open(path), Ok)
    }

    /// Every tensor of the model by canonical name, sorted.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// A tensor by canonical name.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).with_context(|| format!("tensor `{name}`: the model has no such"))
    }

    /// Decodes `rows` of a tensor into `out`, which has exactly their size; scales are applied.
    pub fn read_rows(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.tensor(name)?.read(rows, out).with_context(|| format!("tensor `{name}`"))
    }

    /// Copies `rows` of an FP8 tensor and a scale for each row, if the tensor is FP8 with scales that
    /// do not change within a row; otherwise leaves both alone and says `false`.
    pub fn read_fp8_rows(
        &self,
        name: &str,
        rows: Range<usize>,
        out: &mut [u8],
        scales: &mut [f32],
    ) -> Result<bool> {
        let tensor = self.tensor(name)?;
        let mut read = || -> Result<bool> {
            tensor.check_rows(&rows, out.len())?;
            ensure!(
                scales.len() == rows.len(),
                "there is room for {} scales, the rows have {}",
                scales.len(),
                rows.len()
            );
            let (Encoding::Fp8, Some(scale)) = (tensor.encoding(), &tensor.scale) else {
                return Ok(false);
            };
            let Some(values) = scale.per_row(rows.clone())? else { return Ok(false) };
            scales.copy_from_slice(&values);
            tensor.read_stored(rows.clone(), out)?;
            Ok(true)
        };
        let done = read().with_context(|| format!("tensor `{name}`"))?;
        if done {
            self.check_fp8_finite(name, rows.start, out, scales)?;
        }
        Ok(done)
    }

    /// Refuses NaN and infinities in rows that were read, naming the tensor and the row.
    pub fn check_finite(&self, name: &str, first_row: usize, values: &[f32]) -> Result<()> {
        // Without an early exit the loop vectorises; the search below runs at most once.
        if values.iter().fold(true, |all, v| all & v.is_finite()) {
            return Ok(());
        }
        let row_len = self.tensor(name)?.row_len().max(1);
        match values.iter().position(|v| !v.is_finite()) {
            Some(at) => bail!(
                "tensor `{name}`: row {} holds {}, expected finite values",
                first_row + at / row_len,
                values[at]
            ),
            None => Ok(()),
        }
    }

    fn check_fp8_finite(
        &self,
        name: &str,
        first_row: usize,
        bytes: &[u8],
        scales: &[f32],
    ) -> Result<()> {
        if let Some(at) = scales.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
            bail!("tensor `{name}`: the scale of row {} is {}", first_row + at, scales[at]);
        }
        if let Some(at) = bytes.iter().position(|byte| byte & 0x7f == 0x7f) {
            let row = first_row + at / self.tensor(name)?.row_len().max(1);
            bail!("tensor `{name}`: row {row} holds NaN, expected finite values");
        }
        Ok(())
    }
}

fn open_head(path: &Path, target: &dyn Target, shares: bool) -> Result<Option<Checkpoint>> {
    match medusa::open(path, target, shares)? {
        Some(heads) => Ok(Some(heads)),
        None => eagle::open(path, target, shares),
    }
}

fn starts_as_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && magic == *gguf::MAGIC
}
