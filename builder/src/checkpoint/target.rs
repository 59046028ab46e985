//! What a head on a model's hidden states asks of that model, which is a checkpoint or an engine that is built already.

use super::names;
use super::tensor::{Source, Tensor};
use super::{Checkpoint, Generation, TokenizerFiles, TokenizerSource};
use crate::compile;
use anyhow::{Context, Result, bail};
use spec_core::engine::{Engine, Section};
use spec_core::model::ModelConfig;
use spec_core::model::decoder::MatrixKind;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Rows that are compared at a time.
const COMPARED_ROWS: usize = 256;

/// A model that a head drafts for.
pub trait Target {
    /// Its shape.
    fn config(&self) -> &ModelConfig;

    /// How its texts begin and end.
    fn generation(&self) -> &Generation;

    /// Where its tokenizer comes from.
    fn tokenizer(&self) -> &TokenizerSource;

    /// Whether its matrix of this name is the same as `own`.
    fn has_same(&self, name: &str, own: &Tensor) -> Result<bool>;

    /// Its tensor of this name. Its head may be its table of token vectors.
    fn tensor(&self, name: &str) -> Result<Tensor>;
}

impl Target for Checkpoint {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn generation(&self) -> &Generation {
        &self.generation
    }

    fn tokenizer(&self) -> &TokenizerSource {
        &self.tokenizer
    }

    fn has_same(&self, name: &str, own: &Tensor) -> Result<bool> {
        let theirs = Target::tensor(self, name)?;
        Ok(own.shape() == theirs.shape() && same_values(own, &theirs)?)
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        let is_tied = name == names::HEAD && self.config.tied_head;
        self.tensor(if is_tied { names::EMBED } else { name }).cloned()
    }
}

/// A target that is built: what its engine holds is packed, and can be compared, not read back.
pub struct BuiltTarget<'a> {
    engine: &'a Engine,
    generation: Generation,
    tokenizer: TokenizerSource,
}

impl<'a> BuiltTarget<'a> {
    /// The target of a version folder.
    pub fn of(engine: &'a Engine, folder: &Path) -> Self {
        let manifest = engine.manifest();
        let generation = Generation {
            bos_token: manifest.bos_token,
            add_bos: Some(manifest.bos_token.is_some()),
            end_tokens: manifest.end_tokens.clone(),
        };
        let tokenizer = TokenizerSource::Files(TokenizerFiles::in_folder(folder));
        Self { engine, generation, tokenizer }
    }

    /// The section of a matrix.
    fn section(&self, name: &str) -> Result<(&Section, MatrixKind)> {
        let is_tied = self.engine.manifest().model.tied_head;
        let (section, kind) = match name {
            names::HEAD if !is_tied => ("head", MatrixKind::Head),
            names::HEAD | names::EMBED => ("embed", MatrixKind::Embed),
            _ => bail!("tensor `{name}` of a built target"),
        };
        let mut sections = self.engine.manifest().sections.iter();
        let found = sections.find(|found| found.name == section);
        Ok((found.with_context(|| format!("the target has no section `{section}`"))?, kind))
    }
}

impl Target for BuiltTarget<'_> {
    fn config(&self) -> &ModelConfig {
        &self.engine.manifest().model
    }

    fn generation(&self) -> &Generation {
        &self.generation
    }

    fn tokenizer(&self) -> &TokenizerSource {
        &self.tokenizer
    }

    fn has_same(&self, name: &str, own: &Tensor) -> Result<bool> {
        let (section, kind) = self.section(name)?;
        if own.shape() != section.shape {
            return Ok(false);
        }
        let read = |rows, out: &mut [f32]| own.read(rows, out);
        compile::gives_section(self.engine, section, kind, read)
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        if name != names::FINAL_NORM {
            bail!(
                "tensor `{name}`: missing, and that of a built target on another device cannot be taken: build target \
                 and head together"
            );
        }
        let mut sections = self.engine.manifest().sections.iter();
        let norm = sections.find(|section| section.name == "final_norm");
        let norm = norm.context("the target has no section `final_norm`")?;
        let file = Arc::new(File::open(self.engine.path())?);
        // Vectors are stored as f32.
        let source = Source::File { file, offset: norm.offset };
        Ok(Tensor::of_values(source, norm.shape.clone()))
    }
}

/// Whether two tensors of one shape hold the same numbers.
fn same_values(one: &Tensor, other: &Tensor) -> Result<bool> {
    let (rows, len) = (one.num_rows(), one.row_len());
    let (mut a, mut b) = (vec![0.0; COMPARED_ROWS * len], vec![0.0; COMPARED_ROWS * len]);
    for first in (0..rows).step_by(COMPARED_ROWS) {
        let part = first..rows.min(first + COMPARED_ROWS);
        let values = part.len() * len;
        one.read(part.clone(), &mut a[..values])?;
        other.read(part, &mut b[..values])?;
        if a[..values] != b[..values] {
            return Ok(false);
        }
    }
    Ok(true)
}
